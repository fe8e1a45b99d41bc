//! The mux under any operations, beside a plain model of what must come out: one harness for property tests, the
//! fuzzer, the simulation and the enumeration of small cases.
//!
//! The model knows what each peer sent and remembers, message by message, who has it. It asserts after every
//! operation, so that a failure stands where it happened:
//! - a worker gets a message only when it is whole, right, nobody has it and nobody has done it;
//! - the mode's order holds when a worker gets it, and in what peers get back;
//! - what peers get back are whole answers to what they asked;
//! - no message waits while an enabled worker is idle and none is about to look;
//! - [`Mux::check`].
//!
//! At the end everything is let go on, and all that arrived must have been done once, or come back.

mod act;
mod row;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{
    Bound, Cause, Config, Event, Message, Mux, Order, Outcome, Retry, Run, Said, Ticket, psock, worker,
};
use crate::Time;
use crate::assembler::Limits;

pub use act::Op;
use act::{ACTS, Act};
use wire::{framing, key_of, notice, request};

/// Connections and workers that there may be at once.
const PEERS: usize = 4;
const HANDS: usize = 4;
/// Messages that a peer has to send.
const MESSAGES: u16 = 40;

/// A worker, and what it has got and not begun or not done.
#[derive(Debug)]
struct Hand {
    id: worker::Id,
    batch: VecDeque<Message>,
    /// What it read itself.
    run: Option<Run>,
    /// The mux thinks that it will ask by itself, or told it to.
    asks: bool,
    enabled: bool,
    /// It was disabled or is to leave, so its connections may have got another worker.
    moved: bool,
    /// When it is taken for dead.
    deadline: Option<Time>,
}

impl Hand {
    fn has_some(&self) -> bool {
        !self.batch.is_empty() || self.run.is_some()
    }
}

/// The other end of a connection.
#[derive(Debug)]
struct Peer {
    id: psock::Id,
    /// Which of all connections ever.
    name: u8,
    stream: Vec<u8>,
    /// Where messages end in `stream`.
    ends: Vec<usize>,
    arrived: usize,
    /// What came back.
    got: Vec<u8>,
    open: bool,
    /// It was told to be read, and nobody was told since that it is not to be.
    reads: bool,
}

/// Where a message is, in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Waits,
    With(worker::Id),
    Done,
    Undone,
}

/// The mux, its peers and workers, and the model.
#[derive(Debug)]
pub struct World {
    mux: Mux,
    config: Config,
    now: Time,
    peers: Vec<Peer>,
    /// Peers whose connections ended.
    gone: Vec<Peer>,
    hands: Vec<Hand>,
    names: u8,
    places: BTreeMap<Ticket, Place>,
    /// Which messages were answered, in order, by connection.
    answered: BTreeMap<psock::Id, Vec<u64>>,
    /// Messages that a worker answered, whether anybody was there to hear it or not.
    tried: BTreeSet<Ticket>,
    /// [`Order::Sticky`]: who had the last message of a connection.
    last: BTreeMap<psock::Id, worker::Id>,
    /// Connected mode: messages sent, and what became of them.
    sent: BTreeMap<u16, Fate>,
    ended: BTreeSet<psock::Id>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    returned: bool,
    arrived: u32,
}

/// Told when it ended badly.
struct Story {
    kind: u8,
    ops: Vec<Op>,
}

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let ops =
                self.ops.iter().map(|[act, whom, much]| (ACTS[usize::from(*act) % ACTS.len()], whom, much));
            eprintln!("kind {}, behind {:?}", self.kind, ops.collect::<Vec<_>>());
        }
    }
}

impl World {
    /// A world of that kind: any number makes one. The orders come in turn.
    pub fn new(kind: u8) -> Self {
        const ORDERS: [Order; 5] = [Order::None, Order::Replies, Order::Serial, Order::Sticky, Order::Key];
        let order = ORDERS[usize::from(kind) % ORDERS.len()];
        let variant = usize::from(kind) / ORDERS.len();
        let quick = Duration::from_micros([0, 20][variant % 2]);
        let config = Config {
            order,
            connected: variant & 2 != 0,
            retry: [Retry::IfNoByteLeft, Retry::Never, Retry::Always][variant % 3],
            batch: [1, 64, 3][variant % 3],
            read: 64,
            psock_bytes: Bound::of([1 << 20, 600][variant / 2 % 2]),
            send_bytes: Bound::of([1 << 20, 60][variant / 3 % 2]),
            mux_bytes: Bound::of([1 << 20, 2000][variant / 4 % 2]),
            wake_cost: quick,
            ..Config::default()
        };
        Self {
            mux: Mux::new(config),
            config,
            now: Time::from_secs(1),
            peers: Vec::new(),
            gone: Vec::new(),
            hands: Vec::new(),
            names: 0,
            places: BTreeMap::new(),
            answered: BTreeMap::new(),
            tried: BTreeSet::new(),
            last: BTreeMap::new(),
            sent: BTreeMap::new(),
            ended: BTreeSet::new(),
        }
    }

    /// Does all of it, lets everything go on, and looks that nothing is missing.
    ///
    /// # Panics
    ///
    /// When the mux does what it must not.
    pub fn run(kind: u8, ops: impl IntoIterator<Item = Op>) {
        let mut story = Story { kind, ops: Vec::new() };
        let mut world = Self::new(kind);
        for op in ops {
            story.ops.push(op);
            world.apply(op);
        }
        world.finish();
    }

    /// Does one thing, and looks whether everything is as it must be.
    ///
    /// # Panics
    ///
    /// When the mux does what it must not.
    pub fn apply(&mut self, [act, whom, much]: Op) {
        let act = ACTS[usize::from(act) % ACTS.len()];
        self.act(act, usize::from(whom), usize::from(much));
        self.look();
    }

    fn act(&mut self, act: Act, whom: usize, much: usize) {
        let now = self.now;
        let peer = self.peers.get(whom % self.peers.len().max(1)).map(|peer| peer.id);
        match (act, peer) {
            (Act::Attach, _) => self.attach(),
            (Act::Arrive, Some(_)) => self.arrive(whom % self.peers.len(), 1 + much % 40, much),
            (Act::Flood, Some(_)) => self.arrive(whom % self.peers.len(), 200 + much, much),
            (Act::Eof, Some(id)) => self.mux.handle_eof(id, now),
            (Act::Reset, Some(id)) => self.mux.handle_error(id, 104, now),
            (Act::Unattach, Some(id)) => self.mux.unattach(id, None, now),
            (Act::UnattachBy, Some(id)) => {
                self.mux.unattach(id, Some(now + Duration::from_millis(much as u64)), now);
            }
            (Act::DeadlineDrain, Some(id)) => {
                self.mux.drain_psock(id, Some(now + Duration::from_millis(much as u64)), now);
            }
            (Act::Transmit, Some(_)) => self.transmit(whom % self.peers.len(), much, Outcome::Taken),
            (Act::Block, Some(id)) if much.is_multiple_of(2) => self.mux.handle_writable(id, now),
            (Act::Block, Some(_)) => self.transmit(whom % self.peers.len(), much / 2, Outcome::Blocked),
            (Act::WriteFails, Some(_)) => {
                self.transmit(whom % self.peers.len(), much, Outcome::Failed(32));
            }
            (Act::Clone, _) => self.clone_worker(1 + much % 5),
            (Act::Pass, _) => self.pass(Duration::from_micros(1 << (much % 24))),
            (Act::Send, _) if self.config.connected => self.send(),
            (act, _) if !self.hands.is_empty() => self.hand(act, whom % self.hands.len(), much),
            _ => {}
        }
    }

    fn hand(&mut self, act: Act, at: usize, much: usize) {
        let (id, now) = (self.hands[at].id, self.now);
        match act {
            Act::Poll => self.poll(at),
            Act::Done | Act::DoneSilently => {
                // Some worker that has something, so that most calls do something.
                let count = self.hands.len();
                let busy = (0..count).map(|more| (at + more) % count).find(|&at| self.hands[at].has_some());
                if let Some(at) = busy {
                    self.done(at, act == Act::Done, much);
                }
            }
            Act::HandBack => self.hand_back(at, much),
            Act::Disable => {
                self.hands[at].enabled = much.is_multiple_of(2);
                self.hands[at].moved = true;
                self.mux.disable(id, !much.is_multiple_of(2), now);
            }
            Act::Leave => self.leave(at, None),
            Act::LeaveBy => self.leave(at, Some(now + Duration::from_millis(much as u64))),
            Act::PollAtMost => self.poll_at_most(at, much % 9),
            Act::DoneRow => {
                let count = self.hands.len();
                let busy =
                    (0..count).map(|more| (at + more) % count).find(|&at| !self.hands[at].batch.is_empty());
                busy.into_iter().for_each(|at| self.done_row(at, much));
            }
            Act::Die => {
                self.hand_back_but(at, much);
                self.lost(at);
                self.hands.remove(at);
                self.mux.handle_worker_died(id, now);
            }
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
        let id = self.mux.attach(framing(), Limits::default(), self.now).expect("it does not drain");
        self.peers.push(Peer {
            id,
            name,
            stream,
            ends,
            arrived: 0,
            got: Vec::new(),
            open: true,
            reads: true,
        });
    }

    /// Bytes arrive; sometimes it is a worker that reads them.
    fn arrive(&mut self, at: usize, bytes: usize, much: usize) {
        let peer = &mut self.peers[at];
        // Its socket says once that there is something (EPOLLET), and again when it is to be read again.
        if !peer.reads {
            return;
        }
        let end = (peer.arrived + bytes).min(peer.stream.len());
        let arriving = &peer.stream[peer.arrived..end];
        let count = self.hands.len();
        let (took, run) = match self.hands.get_mut(much % (count + 1)) {
            Some(hand) => match self.mux.reserve(peer.id) {
                Some(mut buffer) => {
                    buffer.extend_from_slice(arriving);
                    let run = self.mux.handle_read_by(peer.id, buffer, hand.id, self.now);
                    (arriving.len(), run.map(|run| (hand, run)))
                }
                None => (0, None),
            },
            None => (self.mux.handle_bytes(peer.id, arriving, self.now), None),
        };
        assert!(took == 0 || took == end - peer.arrived);
        peer.reads = took > 0 || end == peer.arrived;
        let before = peer.arrived;
        peer.arrived += took;
        for (number, end) in peer.ends.iter().enumerate() {
            if (before + 1..=peer.arrived).contains(end) {
                let ticket = Ticket { psock: peer.id, number: number as u64 };
                self.places.insert(ticket, Place::Waits);
            }
        }
        let Some((hand, run)) = run else { return };
        assert!(hand.enabled && !hand.has_some(), "a run is for who has nothing");
        assert_eq!(self.config.order, Order::None);
        for ticket in run.rest() {
            assert_eq!(self.places.insert(ticket, Place::With(hand.id)), Some(Place::Waits));
        }
        (hand.run, hand.asks) = (Some(run), true);
    }

    fn clone_worker(&mut self, credit: usize) {
        if self.hands.len() < HANDS {
            let id = self.mux.clone_worker(credit, self.now);
            let (batch, run, deadline) = (VecDeque::new(), None, None);
            self.hands.push(Hand { id, batch, run, asks: true, enabled: true, moved: false, deadline });
        }
    }

    /// Workers in places with odd numbers get rows, as those that are elsewhere do.
    fn poll(&mut self, at: usize) {
        let (id, now, mut batch) = (self.hands[at].id, self.now, Vec::new());
        let given = if at.is_multiple_of(2) {
            self.mux.poll_batch(id, now, &mut batch)
        } else {
            let mut rows = Vec::new();
            let given = self.mux.poll_rows(id, usize::MAX, now, &mut rows);
            for mut row in rows {
                assert_eq!(row.bytes(row.len()).len(), row.views().map(|view| view.bytes().len()).sum());
                batch.extend(std::iter::from_fn(|| row.begin()));
            }
            given
        };
        assert_eq!(given, batch.len());
        self.hands[at].asks = given > 0 || self.hands[at].has_some();
        for message in batch {
            self.got(at, &message);
            self.hands[at].batch.push_back(message);
        }
    }

    /// A worker got this message: may it?
    fn got(&mut self, at: usize, message: &Message) {
        let ticket = message.ticket();
        let id = self.hands[at].id;
        assert!(self.hands[at].enabled, "a disabled worker gets nothing");
        let peer = self.peers.iter().chain(&self.gone).find(|peer| peer.id == ticket.psock).expect("a peer");
        assert_eq!(
            message.bytes()[..],
            request(peer.name, ticket.number as u16),
            "the message is what was sent"
        );
        let place = self.places.insert(ticket, Place::With(id));
        assert_eq!(place, Some(Place::Waits), "{ticket:?} is given once");
        let with = |other: &Ticket| matches!(self.places.get(other), Some(Place::With(_)));
        match self.config.order {
            Order::None | Order::Replies => {}
            Order::Serial => {
                let mut others = self.of(ticket.psock).filter(|(other, _)| **other != ticket);
                assert!(!others.any(|(other, _)| with(other)), "{ticket:?}: one of a connection at a time");
                assert!(self.is_first(ticket, |_| true), "{ticket:?} is the first that is not done");
            }
            Order::Sticky => {
                for (other, place) in self.of(ticket.psock) {
                    assert!(
                        !matches!(place, Place::With(worker) if *worker != id),
                        "{other:?} is with another"
                    );
                    assert!(
                        other.number >= ticket.number || *place != Place::Waits,
                        "{ticket:?}: before {other:?}, which waits"
                    );
                }
                let before = self.last.insert(ticket.psock, id).filter(|before| *before != id);
                if let Some(hand) = before.and_then(|before| self.hands.iter().find(|hand| hand.id == before))
                {
                    assert!(hand.moved, "{ticket:?} leaves a worker that stays");
                }
            }
            Order::Key => {
                let key = key_of(ticket.number as u16);
                let same = |other: &Ticket| key_of(other.number as u16) == key && key != 0;
                let mut others = self.places.keys().filter(|other| **other != ticket && same(other));
                assert!(!others.any(with), "{ticket:?}: one of a key at a time");
                assert!(key == 0 || self.is_first(ticket, same), "{ticket:?} is the first of its key");
            }
        }
    }

    /// Messages of a connection, and where they are.
    fn of(&self, psock: psock::Id) -> impl Iterator<Item = (&Ticket, &Place)> {
        self.places.range(Ticket { psock, number: 0 }..=Ticket { psock, number: u64::MAX })
    }

    /// Whether none before this message of its connection waits, of those that `which` says.
    fn is_first(&self, ticket: Ticket, which: impl Fn(&Ticket) -> bool) -> bool {
        !self
            .of(ticket.psock)
            .any(|(other, place)| other.number < ticket.number && which(other) && *place == Place::Waits)
    }

    fn done(&mut self, at: usize, answers: bool, much: usize) {
        let hand = &mut self.hands[at];
        hand.asks = true;
        if hand.run.is_some() {
            return self.done_of_run(at, answers, much);
        }
        // Sticky and keyed work is done in order; otherwise the first need not be the first.
        let which = if self.config.order == Order::Sticky { 0 } else { much % hand.batch.len() };
        let message = hand.batch.remove(which).expect("it has some");
        let (id, ticket) = (hand.id, message.ticket());
        if answers && much % 3 == 1 && much < 250 {
            // Both in one go.
            let there = !self.ended.contains(&ticket.psock);
            let said = [Said::Reply(ticket, message.bytes().clone()), Said::Done(ticket)];
            self.mux.handle_said(id, said, self.now);
            self.tried.insert(ticket);
            if there {
                self.answered.entry(ticket.psock).or_default().push(ticket.number);
            }
            assert!(!self.mux.done(id, ticket, self.now), "done once");
            self.places.insert(ticket, Place::Done);
            return;
        }
        if answers {
            let there = !self.ended.contains(&ticket.psock);
            let bytes = message.bytes().clone();
            let replied = self.mux.reply(id, ticket, bytes, self.now);
            self.pump();
            self.tried.insert(ticket);
            assert!(replied.is_ok() || !there, "an answer to a connection that is there");
            if replied.is_ok() {
                self.answered.entry(ticket.psock).or_default().push(ticket.number);
            }
        }
        if much >= 250 {
            // It answered and forgot to say that it is done, and dies.
            self.hands[at].batch.push_front(message);
            return self.hand(Act::Die, at, 0);
        }
        assert!(self.mux.done(id, ticket, self.now), "it held {ticket:?}");
        assert!(!self.mux.done(id, ticket, self.now), "done once");
        self.places.insert(ticket, Place::Done);
    }

    /// It has done some of its run, and answered them in one piece.
    fn done_of_run(&mut self, at: usize, answers: bool, much: usize) {
        let hand = &mut self.hands[at];
        let Some(run) = &mut hand.run else { return };
        let (psock, mut answer, mut tickets) = (run.psock(), Vec::new(), Vec::new());
        while let Some(message) = run.begin() {
            let ticket = message.ticket();
            let peer = self.peers.iter().chain(&self.gone).find(|peer| peer.id == psock).expect("a peer");
            assert_eq!(message.bytes()[..], request(peer.name, ticket.number as u16));
            assert_eq!(self.places.insert(ticket, Place::Done), Some(Place::With(hand.id)));
            answer.extend_from_slice(message.bytes());
            tickets.push(ticket);
            if tickets.len() > much % 4 {
                break;
            }
        }
        if run.is_empty() {
            hand.run = None;
        }
        let replies = answers.then(|| (answer.into(), tickets.len() as u32));
        if answers && !self.ended.contains(&psock) {
            self.answered.entry(psock).or_default().extend(tickets.iter().map(|ticket| ticket.number));
        }
        self.mux.handle_run(hand.id, tickets.len(), replies, self.now);
    }

    fn hand_back(&mut self, at: usize, keep: usize) {
        let hand = &mut self.hands[at];
        if let Some(mut run) = hand.run.take() {
            self.mux.unroll(hand.id);
            hand.batch.extend(std::iter::from_fn(|| run.begin()));
        }
        let keep = keep % (hand.batch.len() + 1);
        let back: Vec<Ticket> = hand.batch.drain(keep..).map(|message| message.ticket()).collect();
        for ticket in &back {
            self.places.insert(*ticket, Place::Waits);
        }
        self.mux.handle_hand_back(self.hands[at].id, &back, self.now);
    }

    /// What a process that dies had besides the message that it was at, if that is known: it is not to blame for those.
    fn hand_back_but(&mut self, at: usize, which: usize) {
        let Hand { id, batch, .. } = &mut self.hands[at];
        let blamed = batch.get(which % (batch.len() + 1)).map(Message::ticket);
        let answered = batch.iter().any(|message| self.tried.contains(&message.ticket()));
        let Some(blamed) = blamed.filter(|_| !answered) else { return };
        let back: Vec<Ticket> =
            batch.iter().map(Message::ticket).filter(|&ticket| ticket != blamed).collect();
        batch.retain(|message| message.ticket() == blamed);
        for ticket in &back {
            self.places.insert(*ticket, Place::Waits);
        }
        self.mux.handle_hand_back(*id, &back, self.now);
    }

    fn transmit(&mut self, at: usize, most: usize, outcome: Outcome) {
        let peer = &mut self.peers[at];
        let Some(mut transmit) = self.mux.transmit(peer.id) else { return };
        assert!(self.mux.transmit(peer.id).is_none(), "one writer at a time");
        let bytes = transmit.slices().collect::<Vec<_>>().concat();
        let taken = bytes.len().min(most);
        peer.got.extend_from_slice(&bytes[..taken]);
        transmit.advance(taken);
        self.mux.handle_transmitted(transmit, outcome, self.now);
    }

    fn send(&mut self) {
        let number = self.sent.len() as u16;
        let open = self.peers.iter().any(|peer| peer.open);
        match self.mux.send(notice(number), self.now) {
            Ok(_) => {
                self.sent.insert(number, Fate::default());
            }
            Err(super::SendError::Full) => assert!(open, "there is a connection"),
            Err(error) => assert_eq!(error, super::SendError::NotConnected),
        }
    }

    /// Takes what the mux has to say.
    fn pump(&mut self) {
        while let Some(event) = self.mux.poll_event() {
            match event {
                Event::Wake(id) => {
                    let hand =
                        self.hands.iter_mut().find(|hand| hand.id == id).expect("a worker that is there");
                    assert!(!hand.asks, "only who is idle is woken");
                    hand.asks = true;
                }
                Event::Ended(end) => {
                    let at = self.peers.iter().position(|peer| peer.id == end.psock).expect("a peer");
                    let mut peer = self.peers.remove(at);
                    peer.open = false;
                    let whole =
                        peer.ends.iter().rev().find(|end| **end <= peer.arrived).copied().unwrap_or(0);
                    if end.hand_back {
                        assert_eq!(
                            end.rest[..],
                            peer.stream[whole..peer.arrived],
                            "from a message's start on"
                        );
                        assert_eq!((end.unsent, end.outstanding), (0, 0));
                    }
                    if let Cause::Inside { bytes, .. } = end.cause {
                        assert_eq!(bytes, peer.arrived - whole);
                    }
                    assert!(self.ended.insert(end.psock), "it ends once");
                    self.gone.push(peer);
                }
                Event::Undelivered(undelivered) => {
                    let number = u16::from_be_bytes([undelivered.bytes[2], undelivered.bytes[3]]);
                    let fate = self.sent.get_mut(&number).expect("it was sent");
                    assert!(!std::mem::replace(&mut fate.returned, true), "it comes back once");
                }
                Event::Undone(message) => {
                    assert_eq!(self.places.insert(message.ticket(), Place::Undone), Some(Place::Waits));
                }
                Event::Left(id) => self.hands.retain(|hand| hand.id != id),
                Event::Interest(id) => {
                    let reads = self.mux.interest(id).read;
                    if let Some(peer) = self.peers.iter_mut().find(|peer| peer.id == id) {
                        peer.reads = reads;
                    }
                }
                Event::Transmit(_) | Event::Recall(_) | Event::Room | Event::Drained => {}
            }
        }
    }

    fn look(&mut self) {
        self.pump();
        if let Err(wrong) = self.mux.check() {
            panic!("{wrong}");
        }
        let totals = *self.mux.totals();
        let count = |place: fn(&Place) -> bool| self.places.values().filter(|at| place(at)).count();
        assert_eq!(totals.queued, count(|place| *place == Place::Waits), "those that wait");
        assert_eq!(totals.in_hand, count(|place| matches!(place, Place::With(_))), "those with workers");
        assert_eq!(totals.done as usize, count(|place| *place == Place::Done), "those that are done");
        for peer in &self.peers {
            assert!(
                peer.reads || !self.mux.interest(peer.id).read,
                "{:?} may be read, and nobody knows",
                peer.id
            );
        }
        let stays = self.mux.bytes - self.mux.message_bytes;
        let stuck = self.mux.is_full() && stays > self.mux.config.mux_bytes.low;
        assert!(!stuck || self.peers.is_empty(), "nothing is read, and workers cannot change that");
        let idle = self.hands.iter().any(|hand| !hand.asks && hand.enabled);
        let looking = self.hands.iter().any(|hand| hand.asks);
        if idle && !self.mux.ready.is_empty() {
            assert!(looking, "messages wait, somebody is idle, and nobody looks");
            assert!(self.mux.poll_timeout().is_some(), "and nobody will look in time");
        }
    }

    /// Lets everything go on until nothing more happens, and looks that nothing is missing.
    ///
    /// # Panics
    ///
    /// When the mux has lost, doubled, cut or reordered something.
    pub fn finish(&mut self) {
        self.clone_worker(64);
        if self.hands.iter().all(|hand| !hand.enabled) {
            self.hand(Act::Disable, 0, 0);
            self.hands[0].enabled =
                self.mux.workers.get(self.hands[0].id).is_some_and(|worker| worker.enabled);
        }
        if self.hands.iter().all(|hand| !hand.enabled) {
            // All are leaving; one more is needed.
            self.hand(Act::Die, 0, 0);
            self.clone_worker(64);
        }
        self.pump();
        for _ in 0..20_000 {
            let before = self.mux.totals().done + self.mux.totals().tx_bytes;
            for at in 0..self.hands.len() {
                if self.hands[at].enabled {
                    self.poll(at);
                }
            }
            for at in (0..self.hands.len()).rev() {
                if let Some(hand) = self.hands.get(at)
                    && hand.has_some()
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
            self.look();
            if self.mux.totals().done + self.mux.totals().tx_bytes == before {
                break;
            }
        }
        let totals = *self.mux.totals();
        assert_eq!((totals.queued, totals.in_hand), (0, 0), "all is done");
        let gone = std::mem::take(&mut self.gone);
        let peers = std::mem::take(&mut self.peers);
        for peer in peers.iter().chain(&gone) {
            self.look_at_answers(peer);
        }
        (self.peers, self.gone) = (peers, gone);
        for (number, fate) in &self.sent {
            let known = fate.arrived + u32::from(fate.returned);
            assert!(known >= 1, "notice {number} is lost");
            assert!(known == 1 || self.config.retry == Retry::Always, "notice {number} came twice");
        }
        let now = self.now;
        self.mux.drain(None, now);
        self.pump();
        assert_eq!(self.mux.bytes(), 0, "nothing is held");
    }

    /// What came back to a peer: whole answers and notices, the answers in the order that the mode says.
    fn look_at_answers(&mut self, peer: &Peer) {
        let (mut numbers, mut at) = (Vec::new(), 0);
        while let Some(&length) = peer.got.get(at) {
            let Some(bytes) = peer.got.get(at..at + usize::from(length)) else { break };
            at += bytes.len();
            let number = u16::from_be_bytes([bytes[2], bytes[3]]);
            if bytes == notice(number) {
                self.sent.get_mut(&number).expect("it was sent").arrived += 1;
                continue;
            }
            assert_eq!(bytes, request(peer.name, number), "an answer is whole, and to this peer");
            numbers.push(u64::from(number));
        }
        assert!(at == peer.got.len() || !peer.open, "nothing is cut on a connection that is open");
        let answered = self.answered.get(&peer.id).cloned().unwrap_or_default();
        if peer.open {
            let (mut came, mut meant) = (numbers.clone(), answered);
            came.sort_unstable();
            meant.sort_unstable();
            assert_eq!(came, meant, "every answer arrives, once");
        }
        if matches!(self.config.order, Order::Replies | Order::Serial | Order::Sticky) {
            assert!(numbers.is_sorted_by(|a, b| a < b), "answers in order: {numbers:?}");
        }
    }
}
