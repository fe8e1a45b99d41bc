//! The mux under arbitrary operations next to a plain model: one harness for property tests, the fuzzer, the
//! simulation and the enumeration of small cases.
//!
//! The model knows what each peer sent and where each message is. It checks after every operation, so that a
//! failure appears where it happened:
//! - A worker gets a message only if it is whole and correct, and no worker has it or has done it.
//! - The configured order holds for workers and for the replies that peers receive.
//! - Workers hold at most [`Config::in_flight`] messages of a connection. Without it, and with turns of one message, a connection leaves a
//!   worker free while another one is active.
//! - While messages of a connection wait, every other connection gets at most one turn (`fairness.rs`).
//! - A message of a connection that has ended is not given to a worker.
//! - A message in parts arrives completely at one worker, or is cut because its connection ended.
//! - Peers receive whole replies to their own requests.
//! - No message waits while an enabled worker is idle and no worker is about to ask.
//! - [`Mux::check`] succeeds.
//!
//! At the end everything proceeds, and every message must have been done once or returned. With [`Retry::Always`] a
//! peer loses what it had not acknowledged when its connection ended; still every notice arrives or is returned.

mod act;
mod actor;
mod batch;
mod fairness;
mod parts;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{
    Batch, Bound, Cause, Completion, Config, Event, Message, Mux, Order, Outcome, PartKind, Retry, Ticket,
    psock, worker,
};
use crate::Time;
use crate::assembler::Limits;

pub use act::Op;
use act::{ACTS, Act};
use actor::Actor;
use fairness::Fairness;
use wire::{framing, key_of, notice, request};

/// Maximum number of connections and of workers.
const PEERS: usize = 4;
const WORKERS: usize = 4;
/// Number of messages of each peer.
const MESSAGES: u16 = 40;

/// The other end of a connection.
#[derive(Debug)]
struct Peer {
    id: psock::Id,
    /// Number of the connection.
    name: u8,
    stream: Vec<u8>,
    /// Ends of the messages in `stream`.
    ends: Vec<usize>,
    arrived: usize,
    /// Number of messages that the mux has received.
    received: usize,
    /// It closes after a message that arrives in parts.
    closes: bool,
    /// Bytes that the socket has accepted. With [`Retry::Always`], those after `acked` are lost when the connection ends.
    got: Vec<u8>,
    /// Number of bytes that the peer has acknowledged.
    acked: usize,
    open: bool,
    /// True if the mux's last report was that the connection may be read.
    reads: bool,
}

/// Place of a message in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    Waits,
    With(worker::Id),
    Done,
    Undone,
    /// Its connection ended before a worker got it.
    Discarded,
}

/// The mux, its peers and workers, and the model.
#[derive(Debug)]
pub struct World {
    mux: Mux,
    config: Config,
    /// Minimum length of a part; 0: all messages are whole.
    part: usize,
    now: Time,
    peers: Vec<Peer>,
    /// Peers whose connections ended.
    gone: Vec<Peer>,
    actors: Vec<Actor>,
    names: u8,
    locations: BTreeMap<Ticket, Location>,
    /// Numbers of the answered messages, in order, per connection.
    answered: BTreeMap<psock::Id, Vec<u64>>,
    /// Messages that a worker answered, with or without a connection.
    tried: BTreeSet<Ticket>,
    /// [`Order::Sticky`]: worker of the last message of a connection.
    last: BTreeMap<psock::Id, worker::Id>,
    /// Connected mode: messages sent, and their state.
    sent: BTreeMap<u16, SentState>,
    ended: BTreeSet<psock::Id>,
    /// Number of messages in parts that workers have begun.
    begun: u64,
    fairness: Fairness,
    /// When each connection was attached or a message of it was complete.
    active: BTreeMap<psock::Id, Time>,
}

#[derive(Clone, Copy, Debug, Default)]
struct SentState {
    returned: bool,
    arrived: u32,
}

/// Prints the operations if the test panics.
struct FailureReport {
    kind: u8,
    ops: Vec<Op>,
}

impl Drop for FailureReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let ops = self
                .ops
                .iter()
                .map(|[act, target, much]| (ACTS[usize::from(*act) % ACTS.len()], target, much));
            eprintln!("kind {}, after {:?}", self.kind, ops.collect::<Vec<_>>());
        }
    }
}

impl World {
    /// Returns a world whose configuration follows from `kind`. The orders alternate.
    pub fn new(kind: u8) -> Self {
        const ORDERS: [Order; 5] = [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key];
        let order = ORDERS[usize::from(kind) % ORDERS.len()];
        let variant = usize::from(kind) / ORDERS.len();
        let quick = Duration::from_micros([0, 20][variant % 2]);
        let config = Config {
            connected: variant & 2 != 0,
            retry: [Retry::IfNoByteLeft, Retry::Never, Retry::Always][variant % 3],
            batch: [1, 64, 3][variant % 3],
            read: 64,
            psock_bytes: Bound::of([1 << 20, 600][variant / 2 % 2]),
            send_bytes: Bound::of([1 << 20, 60][variant / 3 % 2]),
            unacked_bytes: [1 << 20, 12][variant / 8 % 2],
            mux_bytes: Bound::of([1 << 20, 2000][variant / 4 % 2]),
            wake_cost: quick,
            stream_bytes: Bound::of([1 << 20, 300][variant % 2]),
            in_flight: [None, Some(3), Some(usize::MAX), Some(1)][variant / 2 % 4],
            rebalance: [None, Some(1)][variant / 3 % 2],
            ..Config::new(order)
        };
        Self {
            mux: Mux::new(config),
            config,
            part: if variant % 5 < 3 { 0 } else { 4 },
            now: Time::from_secs(1),
            peers: Vec::new(),
            gone: Vec::new(),
            actors: Vec::new(),
            names: 0,
            locations: BTreeMap::new(),
            answered: BTreeMap::new(),
            tried: BTreeSet::new(),
            last: BTreeMap::new(),
            sent: BTreeMap::new(),
            ended: BTreeSet::new(),
            begun: 0,
            fairness: Fairness::new(&config),
            active: BTreeMap::new(),
        }
    }

    /// Applies all operations, finishes, and checks that nothing is missing.
    ///
    /// # Panics
    ///
    /// Panics if the mux violates the model.
    pub fn run(kind: u8, ops: impl IntoIterator<Item = Op>) {
        let mut report = FailureReport { kind, ops: Vec::new() };
        let mut world = Self::new(kind);
        for op in ops {
            report.ops.push(op);
            world.apply(op);
        }
        world.finish();
    }

    /// Applies an operation and checks the model.
    ///
    /// # Panics
    ///
    /// Panics if the mux violates the model.
    pub fn apply(&mut self, [act, target, much]: Op) {
        let act = ACTS[usize::from(act) % ACTS.len()];
        self.act(act, usize::from(target), usize::from(much));
        self.look();
    }

    fn act(&mut self, act: Act, target: usize, much: usize) {
        let now = self.now;
        let peer = self.peers.get(target % self.peers.len().max(1)).map(|peer| peer.id);
        match (act, peer) {
            (Act::Attach, _) => self.attach(),
            (Act::Arrive, Some(_)) => self.arrive(target % self.peers.len(), 1 + much % 40, much),
            (Act::Flood, Some(_)) => self.arrive(target % self.peers.len(), 200 + much, much),
            (Act::Eof, Some(id)) => self.mux.handle_eof(id, now),
            (Act::Reset, Some(id)) => self.mux.handle_error(id, 104, now),
            (Act::Unattach, Some(id)) => {
                self.closes(id);
                self.mux.unattach(id, None, now);
            }
            (Act::UnattachBy, Some(id)) => {
                self.closes(id);
                self.mux.unattach(id, Some(now + Duration::from_millis(much as u64)), now);
            }
            (Act::DeadlineDrain, Some(id)) => {
                self.closes(id);
                self.mux.drain_psock(id, Some(now + Duration::from_millis(much as u64)), now);
            }
            (Act::Transmit, Some(_)) => self.transmit(target % self.peers.len(), much, Outcome::Taken),
            (Act::Block, Some(id)) if much.is_multiple_of(2) => self.mux.handle_writable(id, now),
            (Act::Block, Some(_)) => self.transmit(target % self.peers.len(), much / 2, Outcome::Blocked),
            (Act::WriteFails, Some(_)) => {
                self.transmit(target % self.peers.len(), much, Outcome::Failed(32));
            }
            (Act::Clone, _) => self.clone_worker(1 + much % 5),
            (Act::Pass, _) => self.pass(Duration::from_micros(1 << (much % 24))),
            (Act::Send, _) if self.config.connected => self.send(),
            (Act::Ack, Some(_)) => self.ack(target % self.peers.len(), much, much.is_multiple_of(2)),
            (act, _) if !self.actors.is_empty() => self.actor(act, target % self.actors.len(), much),
            _ => {}
        }
    }

    fn attach(&mut self) {
        if self.peers.len() == PEERS || self.names == u8::MAX {
            return;
        }
        let name = self.names;
        self.names += 1;
        let (mut stream, mut ends) = (Vec::new(), Vec::new());
        for number in 0..MESSAGES {
            stream.extend(request(name, number));
            ends.push(stream.len());
        }
        let id = self
            .mux
            .attach(framing().streamed(), Limits { part: self.part, ..Limits::default() }, self.now)
            .expect("it does not drain");
        self.active.insert(id, self.now);
        self.peers.push(Peer {
            id,
            name,
            stream,
            ends,
            arrived: 0,
            received: 0,
            closes: false,
            got: Vec::new(),
            acked: 0,
            open: true,
            reads: true,
        });
    }

    /// Bytes arrive; sometimes a worker reads them.
    fn arrive(&mut self, at: usize, bytes: usize, much: usize) {
        let peer = &mut self.peers[at];
        // Readiness is reported once (EPOLLET), and again when the interest returns.
        if !peer.reads {
            return;
        }
        let end = (peer.arrived + bytes).min(peer.stream.len());
        let arriving = &peer.stream[peer.arrived..end];
        let before = self.mux.totals().received;
        let count = self.actors.len();
        let (took, run) = match self.actors.get_mut(much % (count + 1)) {
            Some(actor) => match self.mux.reserve(peer.id) {
                Some(mut buffer) => {
                    buffer.extend_from_slice(arriving);
                    let run = self.mux.handle_read_by(peer.id, buffer, actor.id, self.now);
                    (arriving.len(), run.map(|run| (actor, run)))
                }
                None => (0, None),
            },
            None => (self.mux.handle_bytes(peer.id, arriving, self.now), None),
        };
        assert!(took == 0 || took == end - peer.arrived);
        peer.reads = took > 0 || end == peer.arrived;
        peer.arrived += took;
        let received = parts::received(peer, self.part);
        let counted = (self.mux.totals().received - before) as usize;
        let expected = received - peer.received;
        assert!(counted == expected || peer.closes && counted < expected, "{counted} of {expected} messages");
        for number in peer.received..peer.received + counted {
            self.locations.insert(Ticket { psock: peer.id, number: number as u64 }, Location::Waits);
        }
        peer.received += counted;
        if counted > 0 {
            self.active.insert(peer.id, self.now);
        }
        let Some((actor, run)) = run else { return };
        assert!(actor.enabled && !actor.has_some(), "a local batch is for an idle worker");
        assert_eq!(self.config.order, Order::None);
        for ticket in run.rest() {
            assert_eq!(self.locations.insert(ticket, Location::With(actor.id)), Some(Location::Waits));
        }
        (actor.run, actor.asks) = (Some(run), true);
    }

    /// Messages of a connection with their places.
    fn of(&self, psock: psock::Id) -> impl Iterator<Item = (&Ticket, &Location)> {
        self.locations.range(Ticket { psock, number: 0 }..=Ticket { psock, number: u64::MAX })
    }

    /// Returns true if no earlier message of its connection waits, among those that `which` selects.
    fn is_first(&self, ticket: Ticket, which: impl Fn(&Ticket) -> bool) -> bool {
        !self
            .of(ticket.psock)
            .any(|(other, place)| other.number < ticket.number && which(other) && *place == Location::Waits)
    }

    fn transmit(&mut self, at: usize, most: usize, outcome: Outcome) {
        let peer = &mut self.peers[at];
        let Some(mut transmit) = self.mux.transmit(peer.id) else { return };
        assert!(self.mux.transmit(peer.id).is_none(), "one writer at a time");
        let bytes = transmit.slices(usize::MAX).collect::<Vec<_>>().concat();
        let taken = bytes.len().min(most);
        peer.got.extend_from_slice(&bytes[..taken]);
        transmit.advance(taken);
        if transmit.wants_unacked() || most.is_multiple_of(3) {
            transmit.set_unacked(peer.got.len() - peer.acked);
        }
        self.mux.handle_transmitted(transmit, outcome, self.now);
    }

    /// The peer acknowledges some bytes. The mux learns of it now or later.
    fn ack(&mut self, at: usize, bytes: usize, told: bool) {
        let peer = &mut self.peers[at];
        peer.acked = peer.got.len().min(peer.acked + bytes);
        if told {
            self.mux.handle_unacked(peer.id, peer.got.len() - peer.acked, self.now);
        }
    }

    fn send(&mut self) {
        let number = self.sent.len() as u16;
        let open = self.peers.iter().any(|peer| peer.open);
        match self.mux.send(notice(number), self.now) {
            Ok(_) => {
                self.sent.insert(number, SentState::default());
            }
            Err(super::SendError::Full) => assert!(open, "a connection is open"),
            Err(error) => assert_eq!(error, super::SendError::NotConnected),
        }
    }

    /// Handles the mux's events.
    fn pump(&mut self) {
        while let Some(event) = self.mux.poll_event() {
            match event {
                Event::Wake(id) => {
                    let actor =
                        self.actors.iter_mut().find(|actor| actor.id == id).expect("a worker that is there");
                    assert!(!actor.asks, "only an idle worker is woken");
                    actor.asks = true;
                }
                Event::Ended(end) => {
                    let at = self.peers.iter().position(|peer| peer.id == end.psock).expect("a peer");
                    let mut peer = self.peers.remove(at);
                    peer.open = false;
                    if self.config.retry == Retry::Always {
                        peer.got.truncate(peer.acked);
                    }
                    let whole =
                        peer.ends.iter().rev().find(|end| **end <= peer.arrived).copied().unwrap_or(0);
                    if end.hand_back {
                        let whole = peer.received.checked_sub(1).map_or(0, |last| peer.ends[last]);
                        assert_eq!(
                            end.rest[..],
                            peer.stream[whole..peer.arrived],
                            "from the start of a message"
                        );
                        assert_eq!((end.unsent, end.outstanding), (0, 0));
                    }
                    if let Cause::Inside { bytes, .. } = end.cause {
                        assert_eq!(bytes, peer.arrived - whole);
                    }
                    assert!(self.ended.insert(end.psock), "a connection ends once");
                    self.gone.push(peer);
                }
                Event::Undelivered(undelivered) => {
                    let number = u16::from_be_bytes([undelivered.bytes[2], undelivered.bytes[3]]);
                    let state = self.sent.get_mut(&number).expect("it was sent");
                    assert!(!std::mem::replace(&mut state.returned, true), "a message is returned once");
                }
                Event::Undone(message) => {
                    assert_eq!(
                        self.locations.insert(message.ticket(), Location::Undone),
                        Some(Location::Waits)
                    );
                }
                Event::Left(id) => self.actors.retain(|actor| actor.id != id),
                Event::Interest(id) => {
                    let reads = self.mux.interest(id).read;
                    if let Some(peer) = self.peers.iter_mut().find(|peer| peer.id == id) {
                        peer.reads = reads;
                    }
                }
                Event::Transmit(_)
                | Event::Unacked(_)
                | Event::Recall(_)
                | Event::WriteSpace
                | Event::Drained
                | Event::Removed(_) => {}
            }
        }
    }

    fn look(&mut self) {
        self.pump();
        if let Err(wrong) = self.mux.check() {
            panic!("{wrong}");
        }
        // Messages of a connection that ended are discarded; with keys, when their turn comes.
        let ended = &self.ended;
        let waiting = self.locations.iter_mut().filter(|(_, place)| **place == Location::Waits);
        waiting
            .filter(|(ticket, _)| ended.contains(&ticket.psock))
            .for_each(|(_, place)| *place = Location::Discarded);
        let totals = *self.mux.totals();
        let count = |place: fn(&Location) -> bool| self.locations.values().filter(|at| place(at)).count();
        let (waits, discarded) =
            (count(|place| *place == Location::Waits), count(|place| *place == Location::Discarded));
        let late = if self.config.order == Order::Key { totals.queued as usize - waits } else { 0 };
        assert_eq!(totals.queued as usize, waits + late, "queued messages");
        assert_eq!(totals.discarded() as usize, discarded - late, "discarded messages");
        assert_eq!(
            totals.in_hand as usize,
            count(|place| matches!(place, Location::With(_))),
            "messages with workers"
        );
        assert_eq!(totals.done as usize, count(|place| *place == Location::Done), "done messages");
        for peer in &self.peers {
            assert!(
                peer.reads || !self.mux.interest(peer.id).read,
                "{:?} may be read, and this was not reported",
                peer.id
            );
        }
        let stays = self.mux.memory.bytes() - self.mux.memory.messages();
        let stuck = self.mux.is_full() && stays > self.mux.config.mux_bytes.low;
        assert!(!stuck || self.peers.is_empty(), "nothing is read, and workers cannot change that");
        let idle = self.actors.iter().any(|actor| !actor.asks && actor.enabled);
        let looking = self.actors.iter().any(|actor| actor.asks);
        if idle && !self.mux.ready.is_empty() {
            assert!(looking, "messages wait, a worker is idle, and no worker will ask");
            assert!(self.mux.poll_timeout().is_some(), "a timer is set");
        }
    }

    /// Lets everything proceed until nothing more happens, and checks that nothing is missing.
    ///
    /// # Panics
    ///
    /// Panics if the mux has lost, duplicated, truncated or reordered something.
    pub fn finish(&mut self) {
        self.clone_worker(64);
        if self.actors.iter().all(|actor| !actor.enabled) {
            self.actor(Act::Disable, 0, 0);
            self.actors[0].enabled =
                self.mux.workers.get(self.actors[0].id).is_some_and(|worker| worker.enabled);
        }
        if self.actors.iter().all(|actor| !actor.enabled) {
            // All workers leave; one more is needed.
            self.actor(Act::Die, 0, 0);
            self.clone_worker(64);
        }
        self.end_incomplete();
        self.pump();
        for turn in 0..20_000 {
            let progress = |world: &Self| world.mux.totals().done + world.mux.totals().tx_bytes + world.begun;
            let before = progress(self);
            for at in 0..self.actors.len() {
                // One that leaves is gone after its last message.
                if self.actors.get(at).is_some_and(|actor| actor.enabled) {
                    self.poll(at);
                }
                if at < self.actors.len() {
                    self.parts(at, usize::MAX);
                }
            }
            for at in (0..self.actors.len()).rev() {
                if let Some(actor) = self.actors.get(at)
                    && actor.has_some()
                {
                    self.done(at, true, 0);
                    self.pump();
                }
            }
            for at in (0..self.peers.len()).rev() {
                if let Some(peer) = self.peers.get(at) {
                    self.mux.handle_writable(peer.id, self.now);
                    self.transmit(at, usize::MAX, Outcome::Taken);
                    self.pump();
                }
            }
            let mut acked = false;
            for at in (0..self.peers.len()).rev() {
                acked |= self.peers[at].acked < self.peers[at].got.len();
                self.ack(at, usize::MAX >> 1, true);
            }
            self.look();
            // The first turn may have reported an older acknowledgement, after which there is room to transmit.
            if turn > 0 && !acked && progress(self) == before {
                break;
            }
        }
        let totals = *self.mux.totals();
        assert_eq!((totals.queued, totals.in_hand), (0, 0), "all messages are done");
        let gone = std::mem::take(&mut self.gone);
        let peers = std::mem::take(&mut self.peers);
        for peer in peers.iter().chain(&gone) {
            self.check_replies(peer);
        }
        (self.peers, self.gone) = (peers, gone);
        for (number, state) in &self.sent {
            let known = state.arrived + u32::from(state.returned);
            assert!(known >= 1, "notice {number} is lost");
            assert!(known == 1 || self.config.retry == Retry::Always, "notice {number} came twice");
        }
        let now = self.now;
        self.mux.drain(None, now);
        self.pump();
        assert_eq!(self.mux.bytes(), 0, "no memory is held");
    }

    /// Checks what a peer received: whole replies and notices, replies in the configured order.
    fn check_replies(&mut self, peer: &Peer) {
        let (mut numbers, mut at) = (Vec::new(), 0);
        while let Some(&length) = peer.got.get(at) {
            let Some(bytes) = peer.got.get(at..at + usize::from(length)) else { break };
            at += bytes.len();
            let number = u16::from_be_bytes([bytes[2], bytes[3]]);
            if bytes == notice(number) {
                self.sent.get_mut(&number).expect("it was sent").arrived += 1;
                continue;
            }
            assert_eq!(bytes, request(peer.name, number), "a reply is whole and belongs to this peer");
            numbers.push(u64::from(number));
        }
        assert!(at == peer.got.len() || !peer.open, "an open connection has no truncated message");
        let answered = self.answered.get(&peer.id).cloned().unwrap_or_default();
        if peer.open {
            let (mut came, mut meant) = (numbers.clone(), answered);
            came.sort_unstable();
            meant.sort_unstable();
            assert_eq!(came, meant, "every reply arrives once");
        }
        if matches!(self.config.order, Order::Replies | Order::Serial | Order::Sticky) {
            assert!(numbers.is_sorted_by(|a, b| a < b), "replies in order: {numbers:?}");
        }
    }
}
