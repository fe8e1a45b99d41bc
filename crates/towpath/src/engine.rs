//! A packet's path: port, gate, perhaps an inspector, and out.
//!
//! ```text
//! packet -> parse -> walk in -> (walk out) -> out
//!                      |  ^
//!             inspect, |  | verdict
//!      divert, tee     v  |
//!                      queue
//! ```
//!
//! What must hold:
//! - `packets = passed + dropped + rejected + undecodable + waiting`; waiting (for a verdict, or for the other fragments of
//!   a datagram) is 0 after [`Engine::finish`];
//! - packets leave in the order they came ([`Window`]): all of a replay, and those of each flow of a live engine;
//! - within a flow, packets meet the rules in the order they came: while a packet of the flow waits for a verdict after
//!   which its walk goes on, the next packet of that flow waits too (a packet that an inspector sends back to the rules
//!   against the rule's word, and later fragments, which have no ports, are outside this promise);
//! - the engine never waits longer than a queue's deadline for a packet that an inspector should decide.
//!
//! A replay has all the time in the world: when there is no room, it waits for inspectors. A live engine
//! ([`Engine::live`]) waits for nobody: what has no room is dropped and counted, and a packet that must not overtake
//! another one is put aside until its turn comes. Its states live on the wall clock, a replay's on the captures'.
//!
//! The engine has no clock and no port of its own: both come through [`Edge`].

mod path;
mod replies;
mod straight;
#[cfg(test)]
mod tests;
mod trace;
mod view;
mod wiring;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::BorrowedFd;
use towpath_gate::gate::{Dir, Edits, PortId, Walk, Walker};
use towpath_gate::packet::Link;
use towpath_gate::reassembly::{Added, Reassembler};
use towpath_gate::state::{Ends, Keepalive};
use towpath_gate::wire::{self, checksum};
use towpath_gate::{Packet, Time};

use self::path::{
    BUCKETS, Decision, Fate, Kind, Next, Progress, Settled, Wait, advance, apply, begins, detoured, goes_on,
    label, obey,
};
use self::replies::Replies;
use self::trace::Traces;
use self::view::View;
pub use self::wiring::{Arrivals, Way};
use crate::control::Observed;
use crate::conversations::Conversations;
use crate::queue::{Channel, DefaultVerdict, Offer, Policy, Queue};
use crate::report::{self, Report};
use crate::window::{Stored, Ticket, Window};
use towpath_port::{Burst, Checksum, Frame};

/// What the engine needs from outside.
pub trait Edge {
    /// The link to an inspector.
    type Channel: Channel;

    /// Why sending failed.
    type Error;

    /// Wall-clock time in nanoseconds since any fixed moment. Asked for once per burst, and while waiting.
    fn now(&mut self) -> u64;

    /// Whether a live engine takes this frame on. One that it does not take meets no rule and is no packet; who is asked counts
    /// it. The default: all.
    fn takes(&mut self, frame: &[u8], meta: &Meta) -> bool {
        let _ = (frame, meta);
        true
    }

    /// Sends one packet out.
    ///
    /// # Errors
    ///
    /// The engine gives the error to its caller; the packet counts as passed.
    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Self::Error>;

    /// Sends the packet at `index` of the burst that is being handled, which leaves as it came. The default:
    /// [`Edge::send`], which copies it.
    ///
    /// # Errors
    ///
    /// As [`Edge::send`].
    fn pass(&mut self, index: usize, frame: &[u8], meta: &Meta) -> Result<(), Self::Error> {
        let _ = index;
        self.send(frame, meta)
    }

    /// A packet ended here. The default: nobody needs to know.
    fn discard(&mut self, meta: &Meta) {
        let _ = meta;
    }

    /// Inspectors have packets and run on this thread's CPU: they go first. The default: nothing, they run when this thread
    /// waits.
    fn give_way(&mut self) {}

    /// Answers those who look at the engine from outside; called once per burst, and while the engine waits. Returns for
    /// how many nanoseconds at most the engine may sleep before it calls this again. The default: nobody looks.
    fn attend(&mut self, engine: &mut dyn Observed) -> u64 {
        let _ = engine;
        u64::MAX
    }

    /// Sends the answer to a rejected packet out by `port`, where that packet came in. False when the port cannot send,
    /// or not now: the answer is then lost, and counted.
    fn reply(&mut self, port: PortId, frame: &[u8], meta: &Meta) -> bool {
        let _ = (port, frame, meta);
        false
    }
}

/// What a port says about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Bytes on the wire.
    pub wire_len: u32,
    /// Capture time, nanoseconds since the epoch.
    pub time: u64,
    /// How the frame begins.
    pub link: Link,
    /// Link type, pcap's number.
    pub link_type: u16,
    /// The interface that it came from: of the capture, or the number of the live port.
    pub interface: u32,
    /// The port that it leaves by; none before it has passed, and for one that goes nowhere.
    pub out: Option<PortId>,
    /// The next hop that a rule (`fwd`) has named, in place of that of its route.
    pub hop: Option<IpAddr>,
    /// Its bytes are not those that came.
    pub changed: bool,
    /// What a live port knows about it besides.
    pub port: towpath_port::Meta,
}

#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    packets: u64,
    bytes: u64,
    passed: u64,
    dropped: u64,
    rejected: u64,
    inspected: u64,
    undecodable: u64,
    /// Of those dropped: a live engine had no room to keep them until they are decided.
    no_room: u64,
    /// Of those dropped: there is no route.
    no_route: u64,
    /// Of those dropped: they had no hop left.
    expired: u64,
}

/// See the module's text.
pub struct Engine<E: Edge> {
    edge: E,
    walker: Walker,
    arrivals: Arrivals,
    queues: Vec<Queue<E::Channel>>,
    /// For queues that a rule names and nobody serves.
    unserved: Policy,
    /// The numbers of those that have been named so far.
    named: Vec<u16>,
    window: Window<Meta, Progress>,
    /// The burst that is being handled, when packets may lie in it until they are decided ([`Engine::handle_lent`]).
    came: Option<Arc<Burst>>,
    /// It waits for nobody.
    live: bool,
    reassembler: Reassembler,
    /// Tickets that wait for room in their queue, oldest first.
    backlog: VecDeque<Ticket>,
    /// Decided, not yet acted on; empty between calls.
    settled: Vec<(Ticket, Settled)>,
    /// Per flow bucket, the packets whose walk will go on after a verdict.
    continuing: Box<[u32; BUCKETS]>,
    conversations: Conversations,
    replies: Replies,
    traces: Traces,
    totals: Totals,
    /// A packet that is changed on its way out.
    scratch: Vec<u8>,
    /// The captures' time; never goes back.
    clock: Time,
    /// When to look for what has ended.
    expire_at: Time,
    /// Wall-clock time when the engine last looked.
    wall: u64,
    started: Option<Time>,
}

/// What came of offering a packet to a queue.
enum Handed {
    /// The inspector has it.
    Held,
    /// Only a copy went, or nobody is there and the default is to pass: it goes on.
    On,
    /// Nobody is there to look at it, and the default is to drop.
    Dropped,
    /// There is no room.
    Full,
    /// There is no room, and the policy is to hand it to this queue.
    Other(u16),
}

/// Packets that may wait at one time.
const WINDOW_PACKETS: usize = 8192;

/// Bytes that may wait at one time.
const WINDOW_BYTES: usize = 16 << 20;

/// How often the engine looks before it sleeps, and how long it pauses between two looks: some 50 us in all, which is
/// what waking up would cost.
const SPINS: usize = 500;
const PAUSES: usize = 4;

/// How often after a burst the engine gives way to inspectors that run on its CPU: each time at least one of them runs.
const WAYS: usize = 8;

/// How long the engine sleeps at most while several queues have packets, in nanoseconds.
const LOOK: u64 = 1_000_000;

/// How often what has ended is looked for, by the clock of the states, and how many states are looked at then.
const EXPIRE_EVERY: Duration = Duration::from_millis(1);
const EXPIRE_BUDGET: usize = 256;

impl<E: Edge> Engine<E> {
    /// An engine with its way into the gate, its ways in and out, and its queues. `unserved` is the policy of queues that
    /// a rule names and that are not among `queues`.
    pub fn new(
        edge: E,
        walker: Walker,
        arrivals: Arrivals,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        Self {
            edge,
            walker,
            arrivals,
            queues,
            unserved,
            named: Vec::new(),
            window: Window::new(1, WINDOW_PACKETS, WINDOW_BYTES),
            came: None,
            live: false,
            reassembler: Reassembler::new(),
            backlog: VecDeque::new(),
            settled: Vec::new(),
            continuing: Box::new([0; BUCKETS]),
            conversations: Conversations::default(),
            replies: Replies::default(),
            traces: Traces::default(),
            totals: Totals::default(),
            scratch: Vec::new(),
            clock: Time::default(),
            expire_at: Time::default(),
            wall: 0,
            started: None,
        }
    }

    /// An engine between live ports: see the module's text.
    pub fn live(
        edge: E,
        walker: Walker,
        arrivals: Arrivals,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        let window = Window::new(BUCKETS as u16, WINDOW_PACKETS, WINDOW_BYTES);
        let mut engine = Self { window, live: true, ..Self::new(edge, walker, arrivals, queues, unserved) };
        engine.look_at_the_clock();
        engine
    }

    /// Takes a burst of packets. When it returns, each is decided or an inspector has it.
    ///
    /// # Errors
    ///
    /// What [`Edge::send`] said.
    pub fn handle_burst<'a>(
        &mut self,
        burst: impl Iterator<Item = (&'a [u8], Meta)> + Clone,
    ) -> Result<(), E::Error> {
        if self.live || !self.queues.is_empty() {
            self.look_at_the_clock();
        }
        self.handle_packets(burst.enumerate())?;
        self.expire();
        self.attend();
        if self.window.is_empty() && self.queues.iter().all(|queue| queue.open() == 0) {
            return Ok(());
        }
        for queue in &mut self.queues {
            queue.kick();
        }
        for _ in 0..WAYS {
            // One that decides nothing in its turn is waited for no longer: it is slow, blocked, or elsewhere after all.
            let waited_for = self.live && self.queues.iter_mut().any(Queue::shares_cpu);
            if waited_for {
                self.edge.give_way();
            }
            if self.poll()? == 0 || !waited_for {
                break;
            }
        }
        Ok(())
    }

    /// As [`handle_burst`](Self::handle_burst), for what a live port has received: packets that are decided before this returns
    /// leave from where they lie, the others are copied then. The burst is the caller's alone again afterwards.
    ///
    /// # Errors
    ///
    /// What [`Edge::send`] said.
    pub fn handle_lent(
        &mut self,
        burst: &Arc<Burst>,
        meta: impl Fn(&Frame<'_>) -> Meta + Clone,
    ) -> Result<(), E::Error> {
        self.came = Some(burst.clone());
        let handled = self.handle_burst(burst.iter().map(|frame| (frame.bytes, meta(&frame))));
        self.came = None;
        self.window.keep(|index| burst.frame(index).bytes);
        handled
    }

    /// Nothing has come for a while: collects what inspectors have decided meanwhile, and answers those who look.
    ///
    /// # Errors
    ///
    /// What [`Edge::send`] said.
    pub fn idle(&mut self) -> Result<(), E::Error> {
        self.attend();
        if self.live {
            self.look_at_the_clock();
            self.expire();
        }
        self.poll().map(drop)
    }

    /// Waits until every packet is decided and every copy is taken, each queue's deadline at most.
    ///
    /// # Errors
    ///
    /// What [`Edge::send`] said.
    pub fn finish(&mut self) -> Result<(), E::Error> {
        while !self.window.is_empty() || self.queues.iter().any(|queue| queue.open() > 0) {
            self.wait()?;
        }
        // What is not whole now never will be.
        let unfinished = self.reassembler.drain();
        self.count(Fate::Dropped, unfinished);
        // Whatever expired by the capture's own clock is no longer a state.
        self.walker.states_mut().expire_all(self.clock);
        Ok(())
    }

    /// Waits for nothing any more: what inspectors have, what waits for room or for its turn, and datagrams that are not whole are
    /// dropped; what has passed behind them leaves. The queues have no inspectors afterwards. Returns how many packets were
    /// dropped.
    ///
    /// # Errors
    ///
    /// What [`Edge::send`] said.
    pub fn abandon(&mut self) -> Result<u64, E::Error> {
        let before = self.totals.dropped;
        self.queues.iter_mut().for_each(Queue::close);
        self.backlog.clear();
        for ticket in self.window.waiting_tickets() {
            self.end(ticket, Some(Fate::Dropped));
        }
        let unfinished = self.reassembler.drain();
        self.count(Fate::Dropped, unfinished);
        self.flush()?;
        Ok(self.totals.dropped - before)
    }

    /// Whether nobody has a packet or a copy.
    pub fn is_drained(&self) -> bool {
        self.window.is_empty() && self.queues.iter().all(|queue| queue.open() == 0)
    }

    /// Sends a keepalive by its route, outside the rules. Without a route it is left out.
    ///
    /// # Errors
    ///
    /// What [`Edge::send`] said.
    pub fn send_keepalive(&mut self, keepalive: &Keepalive) -> Result<(), E::Error> {
        let Self { walker, edge, scratch, .. } = self;
        let to = match keepalive.flow.ends {
            Ends::V4(_, to) => to.into(),
            Ends::V6(_, to, _) => to.into(),
        };
        let Some((route, _)) = walker.routes().lookup(to) else { return Ok(()) };
        keepalive.write(scratch);
        let meta = Meta {
            wire_len: scratch.len() as u32,
            time: 0,
            link: Link::Ip,
            link_type: towpath_port::LinkType::RAW.0,
            interface: u32::from(route.port.0),
            out: Some(route.port),
            hop: None,
            changed: true,
            port: towpath_port::Meta::default(),
        };
        edge.send(scratch, &meta)
    }

    /// For event loops: asks the inspectors to ring when they have decided something. False when there is something to do
    /// already. [`Engine::disarm`] afterwards.
    pub fn arm(&mut self) -> bool {
        self.queues.iter_mut().all(Queue::arm)
    }

    /// No doorbells any more; and a look whether the inspectors are still there.
    pub fn disarm(&mut self) {
        self.queues.iter_mut().for_each(Queue::disarm);
    }

    /// What to poll for reading while armed.
    pub fn descriptors(&mut self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter_mut().flat_map(Queue::descriptors)
    }

    /// When something is overdue, in nanoseconds of the wall clock.
    pub fn deadline(&mut self) -> Option<u64> {
        let wall = self.wall;
        // A packet that waits for room is looked at again soon: room comes without a doorbell.
        let soon = |queue: &Queue<_>| queue.next_in_backlog().map(|_| wall + LOOK);
        self.queues.iter_mut().filter_map(|queue| soon(queue).or_else(|| queue.deadline())).min()
    }

    /// An inspector attaches to a queue; `channel` names its channel. The inspector back when there is no such queue.
    ///
    /// # Errors
    ///
    /// There is no such queue.
    pub fn join(&mut self, number: u16, channel: u32, inspector: E::Channel) -> Result<(), E::Channel> {
        match self.queues.iter_mut().find(|queue| queue.number() == number) {
            Some(queue) => {
                queue.join(channel, inspector);
                Ok(())
            }
            None => Err(inspector),
        }
    }

    /// There is a queue of this number from now on, with this policy ([`Queue::set_policy`]).
    pub fn set_queue(&mut self, number: u16, policy: Policy) {
        self.named.retain(|named| *named != number);
        match self.queues.iter_mut().find(|queue| queue.number() == number) {
            Some(queue) => queue.set_policy(policy),
            None => self.queues.push(Queue::new(number, policy)),
        }
    }

    /// What becomes of packets for queues that are not there.
    pub fn set_unserved(&mut self, default: DefaultVerdict) {
        self.unserved.default = default;
        for queue in self.queues.iter_mut().filter(|queue| self.named.contains(&queue.number())) {
            queue.set_policy(self.unserved);
        }
    }

    /// The way into the gate.
    pub fn walker_mut(&mut self) -> &mut Walker {
        &mut self.walker
    }

    /// The time that states live by, for others to see.
    pub fn clock(&self) -> Time {
        self.clock
    }

    /// What happened so far. The caller adds the rules, the wall-clock time and the number of captures.
    pub fn report(&self) -> Report {
        let totals = self.totals;
        let states = self.walker.states();
        let mut queues: Vec<_> = self.queues.iter().map(|queue| queue.counters().clone()).collect();
        queues.sort_by_key(|queue| queue.number);
        Report {
            packets: totals.packets,
            bytes: totals.bytes,
            passed: totals.passed,
            dropped: totals.dropped,
            rejected: totals.rejected,
            inspected: totals.inspected,
            undecodable: totals.undecodable,
            replies: self.replies.counts,
            conversations: report::Conversations {
                tcp: self.conversations.tcp(),
                udp: self.conversations.udp(),
            },
            states: report::States {
                created: states.created(),
                peak: states.peak() as u64,
                left: states.len() as u64,
            },
            queues,
            span: self.started.map_or(std::time::Duration::ZERO, |started| self.clock.since(started)),
            ..Report::default()
        }
    }

    /// The outside.
    pub fn edge_mut(&mut self) -> &mut E {
        &mut self.edge
    }

    /// The outside again, when the run is over: to close files.
    pub fn into_edge(self) -> E {
        self.edge
    }

    fn look_at_the_clock(&mut self) {
        self.wall = self.edge.now();
        if self.live {
            self.clock = self.clock.max(Time::from_nanos(self.wall));
        }
    }

    /// Takes away what has ended, some of it at a time.
    fn expire(&mut self) {
        if self.clock < self.expire_at {
            return;
        }
        self.expire_at = self.clock + EXPIRE_EVERY;
        self.walker.expire(self.clock, EXPIRE_BUDGET);
        let late = self.reassembler.expire(self.clock);
        self.count(Fate::Dropped, late);
    }

    fn handle_packet(&mut self, index: usize, frame: &[u8], meta: Meta) -> Result<(), E::Error> {
        self.totals.packets += 1;
        self.totals.bytes += u64::from(meta.wire_len);
        if !self.live {
            self.clock = self.clock.max(Time::from_nanos(meta.time));
        }
        self.started.get_or_insert(self.clock);
        // Borrowed, not moved: a packet is a cache line and more.
        let parsed = wire::parse(meta.link, frame, meta.wire_len);
        let Ok(packet) = &parsed else {
            self.totals.undecodable += 1;
            self.edge.discard(&meta);
            return Ok(());
        };
        if !self.live {
            self.conversations.observe(packet);
        }
        let (arrival, way) = self.arrivals.of(packet, meta.interface);
        let mut progress = Progress::new(arrival, way);
        // Without a queue and with nobody to overtake, most packets need no place.
        let placed = !self.queues.is_empty() || !self.window.is_empty();
        if placed {
            progress.place(packet);
        }
        if self.window.waiting() > 0 {
            let bucket = progress.bucket();
            if self.live && self.continuing[bucket] > 0 {
                self.put_aside(index, frame, meta, progress);
                return Ok(());
            }
            while self.continuing[bucket] > 0 {
                self.wait()?;
            }
        }
        let next = advance(&mut self.walker, packet, &mut progress, self.clock);
        match self.follow_rulings(packet, &mut progress, next) {
            Next::Out => return self.out(index, frame, meta, &progress),
            Next::Gone(fate) => {
                self.count(fate, 1);
                if !self.traces.is_empty() {
                    let Self { traces, walker, totals, .. } = self;
                    let place = (totals.packets, arrival.0.into());
                    traces.tell(place, (frame, &meta), &progress.walk, Some(fate), walker);
                }
                if let Some(reject) = fate.answer(packet, self.walker.ports().addresses(arrival)) {
                    let Self { replies, walker, clock, edge, .. } = self;
                    replies.answer(reject, packet, (arrival, &meta), 1, walker, *clock, edge);
                }
                self.edge.discard(&meta);
            }
            _ if self.live && !self.window.has_room() => self.overrun(&meta),
            next => {
                if !placed {
                    progress.place(packet);
                }
                let ticket = self.push(index, frame, meta, progress);
                self.drive(ticket, next);
            }
        }
        if self.live {
            return Ok(());
        }
        while !self.backlog.is_empty() || !self.window.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    fn out(
        &mut self,
        index: usize,
        frame: &[u8],
        mut meta: Meta,
        progress: &Progress,
    ) -> Result<(), E::Error> {
        (meta.out, meta.hop) = (progress.out, progress.hop);
        let (edits, lane) = (progress.walk.edits(), self.lane(progress));
        let clear = self.window.is_clear(lane);
        if self.live && !clear && !self.window.has_room() {
            self.overrun(&meta);
            return Ok(());
        }
        self.totals.passed += 1;
        if !self.traces.is_empty() {
            let Self { traces, walker, totals, .. } = self;
            let place = (totals.packets, progress.arrival.0.into());
            traces.tell(place, (frame, &meta), &progress.walk, None, walker);
        }
        if clear && edits == Edits::default() {
            return self.edge.pass(index, frame, &meta);
        }
        let Self { scratch, window, edge, .. } = self;
        scratch.clear();
        scratch.extend_from_slice(frame);
        apply(edits, scratch, &mut meta);
        if clear {
            return edge.send(scratch, &meta);
        }
        window.push_passed(scratch, meta, lane);
        while !self.live && !self.window.has_room() {
            self.wait()?;
        }
        Ok(())
    }

    /// The packet's lane in the window.
    fn lane(&self, progress: &Progress) -> u16 {
        if self.live { progress.bucket() as u16 } else { 0 }
    }

    /// There is no room to keep a packet until it is decided.
    fn overrun(&mut self, meta: &Meta) {
        self.totals.no_room += 1;
        self.totals.dropped += 1;
        self.edge.discard(meta);
    }

    /// Keeps a packet until those before it in its flow have met the rules.
    fn put_aside(&mut self, index: usize, frame: &[u8], meta: Meta, mut progress: Progress) {
        if !self.window.has_room() {
            return self.overrun(&meta);
        }
        let bucket = progress.bucket();
        self.continuing[bucket] += 1;
        progress.bucket = Some(bucket);
        progress.aside = true;
        self.push(index, frame, meta, progress);
    }

    /// Puts a packet that waits into the window.
    fn push(&mut self, index: usize, frame: &[u8], meta: Meta, progress: Progress) -> Ticket {
        let lane = self.lane(&progress);
        match self.came {
            Some(_) => self.window.push_lent(index, frame.len(), meta, progress, lane),
            None => self.window.push_waiting(frame, meta, progress, lane),
        }
    }

    /// Takes packets that were put aside to the rules, those whose turn has come. Returns whether there were any.
    fn take_turns(&mut self) -> bool {
        if !self.live {
            self.window.clear_turns();
            return false;
        }
        let mut any = false;
        while let Some(ticket) = self.window.take_turn() {
            let Self { window, came, walker, clock, continuing, .. } = self;
            let Some((stored, progress)) = window.waiting_mut(ticket) else { continue };
            if !std::mem::take(&mut progress.aside) {
                continue;
            }
            any = true;
            if let Some(bucket) = progress.bucket.take() {
                continuing[bucket] -= 1;
            }
            let next = match parse(stored, came.as_ref()) {
                Ok(packet) => advance(walker, &packet, progress, *clock),
                Err(_) => Next::Gone(Fate::Dropped),
            };
            self.drive(ticket, next);
        }
        any
    }

    /// What comes next for a packet where an inspector has decided about its flow: it does not go to the queue.
    fn follow_rulings(&mut self, packet: &Packet<'_>, progress: &mut Progress, mut next: Next) -> Next {
        while let Next::Queue(number, kind @ (Kind::Inspect | Kind::Divert)) = next {
            let queue = self.queues.iter_mut().find(|queue| queue.number() == number && queue.has_rulings());
            let ruling = queue.and_then(|queue| queue.ruling(&packet.flow()?, begins(packet), self.clock));
            let Some(ruling) = ruling else { break };
            next = obey(ruling, &mut self.walker, packet, progress, kind, self.clock);
        }
        next
    }

    /// Lets others look; how long the engine may sleep.
    fn attend(&mut self) -> u64 {
        let Self { edge, queues, walker, wall, clock, totals, replies, traces, .. } = self;
        let counts = (*totals, replies.counts);
        edge.attend(&mut View { queues, walker, wall: *wall, clock: *clock, counts, traces })
    }

    fn count(&mut self, fate: Fate, parts: u32) {
        match fate {
            Fate::Dropped => self.totals.dropped += u64::from(parts),
            Fate::NoRoute => {
                self.totals.no_route += u64::from(parts);
                self.totals.dropped += u64::from(parts);
            }
            Fate::Expired => {
                self.totals.expired += u64::from(parts);
                self.totals.dropped += u64::from(parts);
            }
            Fate::Rejected(_) => self.totals.rejected += u64::from(parts),
        }
    }

    /// Waits until something was decided: looks for a while, then sleeps on the queue that the oldest packet needs.
    fn wait(&mut self) -> Result<(), E::Error> {
        for queue in &mut self.queues {
            queue.kick();
        }
        for _ in 0..SPINS {
            if self.poll()? > 0 {
                return Ok(());
            }
            for _ in 0..PAUSES {
                std::hint::spin_loop();
            }
        }
        let patience = self.attend();
        let backlogged = self.backlog.front().copied();
        let oldest = backlogged.or_else(|| self.window.oldest_waiting());
        let packet = oldest.and_then(|ticket| self.window.waiting_mut(ticket)).map(|(_, p)| p.wait);
        let copy = || self.queues.iter().position(|queue| queue.open() > 0);
        if let Some(queue) = packet.map(|wait| wait.queue).or_else(copy) {
            let due =
                packet.and_then(|wait| wait.since).map(|since| since + self.queues[queue].policy().deadline);
            // Only one inspector can wake us: while others have packets too, look again soon.
            let alone = self.queues.iter_mut().map(Queue::busy).sum::<usize>() <= 1;
            let look = if alone { u64::MAX } else { self.wall + LOOK };
            let until = due.unwrap_or(u64::MAX).min(look).min(self.wall.saturating_add(patience));
            self.queues[queue].wait(self.wall, until);
        }
        self.poll().map(drop)
    }

    /// Collects what was decided and acts on it. Returns how many frames that were.
    fn poll(&mut self) -> Result<usize, E::Error> {
        self.look_at_the_clock();
        let mut decided = 0;
        let mut settled = std::mem::take(&mut self.settled);
        let mut room = WINDOW_BYTES;
        for queue in &mut self.queues {
            decided += queue.poll(self.wall, |ticket, decided| {
                settled.push((ticket, Settled::new(decided, &mut room)));
            });
        }
        for (ticket, decision) in settled.drain(..) {
            self.settle(ticket, decision);
        }
        self.settled = settled;
        self.retry();
        loop {
            self.flush()?;
            if !self.take_turns() {
                break;
            }
        }
        // What found its turn or its room here was not announced with the burst.
        self.queues.iter_mut().for_each(Queue::announce);
        Ok(decided)
    }

    /// Sends what is decided and overtakes nobody.
    fn flush(&mut self) -> Result<(), E::Error> {
        let Self { window, came, edge, .. } = self;
        window.flush(|stored| {
            let bytes = bytes(stored, came.as_ref());
            match stored.came() {
                Some(index) => edge.pass(index, bytes, &stored.meta),
                None => edge.send(bytes, &stored.meta),
            }
        })
    }

    /// Acts on a decision about a packet that waits.
    fn settle(&mut self, ticket: Ticket, decision: Settled) {
        let Some((stored, progress)) = self.window.waiting_mut(ticket) else { return };
        let Settled { outcome, mark: (mark, mask), ruling } = decision;
        progress.set_mark(mark, mask);
        if let Some(ruling) = ruling
            && let Ok(packet) = parse(stored, self.came.as_ref())
            && let Some(flow) = packet.flow()
        {
            self.queues[progress.wait.queue].rule(&flow, ruling, self.clock);
        }
        let next = match outcome {
            Decision::Repeat | Decision::Queue(_) if detoured(progress) => Next::Gone(Fate::Dropped),
            Decision::Gone(fate) => Next::Gone(fate),
            Decision::Pass => self.step(ticket),
            Decision::Repeat => {
                progress.walk = Walk::new(Dir::In, Some(progress.arrival), None);
                progress.leaving = false;
                progress.out = None;
                progress.wait.kind = Kind::Divert;
                self.step(ticket)
            }
            Decision::Replace(mut bytes) => {
                stored.meta.wire_len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                // An inspector changes bytes; that the checksums fit them again is our work. Where it cannot be done
                // (a fragment, a protocol we do not know) the inspector's own stand.
                checksum::fill(stored.meta.link, &mut bytes, stored.meta.wire_len);
                stored.meta.changed = true;
                stored.meta.port.offload.checksum = Checksum::Unverified;
                self.window.replace(ticket, &bytes);
                self.step(ticket)
            }
            // A queue that neither rules nor the command line know: an inspector's word does not make one.
            Decision::Queue(number) if !self.queues.iter().any(|queue| queue.number() == number) => {
                match self.unserved.default {
                    DefaultVerdict::Pass => self.step(ticket),
                    DefaultVerdict::Drop => Next::Gone(Fate::Dropped),
                }
            }
            Decision::Queue(number) => Next::Queue(number, progress.wait.kind),
            // Once: a packet that kills its inspector shall not kill them all.
            Decision::Orphan if progress.orphaned => match self.queues[progress.wait.queue].abandon() {
                DefaultVerdict::Pass => self.step(ticket),
                DefaultVerdict::Drop => Next::Gone(Fate::Dropped),
            },
            Decision::Orphan => {
                progress.orphaned = true;
                Next::Queue(self.queues[progress.wait.queue].number(), progress.wait.kind)
            }
        };
        self.drive(ticket, next);
    }

    /// The packet of `ticket` may go on: what comes next on its path.
    fn step(&mut self, ticket: Ticket) -> Next {
        let Self { window, came, walker, clock, .. } = self;
        let Some((stored, progress)) = window.waiting_mut(ticket) else { return Next::Gone(Fate::Dropped) };
        // Nothing of it has changed, and what comes next does not depend on what it is.
        if !stored.meta.changed && progress.ends() {
            return Next::Out;
        }
        let Ok(packet) = parse(stored, came.as_ref()) else {
            // It parsed when it came: an inspector has put something malformed in its place.
            return Next::Gone(Fate::Dropped);
        };
        progress.look(&packet);
        goes_on(walker, &packet, progress, progress.wait.kind, *clock)
    }

    /// Takes the packet of `ticket` along its path until it is decided or somebody holds it.
    fn drive(&mut self, mut ticket: Ticket, mut next: Next) {
        loop {
            next = match next {
                Next::Out => return self.end(ticket, None),
                Next::Gone(fate) => return self.end(ticket, Some(fate)),
                Next::Queue(number, kind) => {
                    let queue = self.queue_index(number);
                    self.set_wait(ticket, Wait { queue, kind, since: None });
                    match self.ruled(ticket, kind) {
                        Some(next) => next,
                        None => match self.offer_in_turn(ticket) {
                            // A copy never slows a live packet.
                            Handed::Full if self.live && kind == Kind::Tee => match self.skip_copy(ticket) {
                                Some(next) => next,
                                None => return,
                            },
                            Handed::Full => return self.put_off(ticket, queue, kind),
                            handed => match self.act(ticket, handed) {
                                Some(next) => next,
                                None => return,
                            },
                        },
                    }
                }
                Next::Reassemble => match self.reassemble(ticket) {
                    Some(whole) => {
                        ticket = whole;
                        self.step(ticket)
                    }
                    None => return,
                },
            }
        }
    }

    /// What comes next after a packet was offered; nothing while an inspector has it.
    fn act(&mut self, ticket: Ticket, handed: Handed) -> Option<Next> {
        match handed {
            Handed::Held | Handed::Full => None,
            Handed::On => Some(self.step(ticket)),
            Handed::Dropped => Some(Next::Gone(Fate::Dropped)),
            Handed::Other(number) => {
                let (_, progress) = self.window.waiting_mut(ticket)?;
                let kind = progress.wait.kind;
                match detoured(progress) {
                    false => Some(Next::Queue(number, kind)),
                    true if kind == Kind::Tee => Some(self.step(ticket)),
                    true => Some(Next::Gone(Fate::Dropped)),
                }
            }
        }
    }

    /// What comes next for a packet that waits, where an inspector has decided about its flow.
    fn ruled(&mut self, ticket: Ticket, kind: Kind) -> Option<Next> {
        let (stored, progress) = self.window.waiting_mut(ticket)?;
        if kind == Kind::Tee || !self.queues[progress.wait.queue].has_rulings() {
            return None;
        }
        let packet = parse(stored, self.came.as_ref()).ok()?;
        let flow = packet.flow()?;
        let ruling = self.queues[progress.wait.queue].ruling(&flow, begins(&packet), self.clock)?;
        Some(obey(ruling, &mut self.walker, &packet, progress, kind, self.clock))
    }

    /// The packet waits for room.
    fn put_off(&mut self, ticket: Ticket, queue: usize, kind: Kind) {
        self.set_wait(ticket, Wait { queue, kind, since: Some(self.wall) });
        match self.queues[queue].enqueue(ticket) {
            Ok(None) => {}
            Ok(Some(oldest)) => self.end(oldest, Some(Fate::Dropped)),
            Err(ticket) if self.live => self.queues[queue].put_off(ticket),
            Err(ticket) => self.backlog.push_back(ticket),
        }
    }

    /// Offers a packet to its queue, behind those that wait for room there.
    fn offer_in_turn(&mut self, ticket: Ticket) -> Handed {
        let Some((_, progress)) = self.window.waiting_mut(ticket) else { return Handed::Dropped };
        let queue = &self.queues[progress.wait.queue];
        if self.live && queue.next_in_backlog().is_some() { Handed::Full } else { self.offer(ticket) }
    }

    /// The packet goes on without its copy.
    fn skip_copy(&mut self, ticket: Ticket) -> Option<Next> {
        let (stored, progress) = self.window.waiting_mut(ticket)?;
        let queue = &mut self.queues[progress.wait.queue];
        queue.skip(&label(&stored.meta, progress), stored.meta.interface);
        Some(self.step(ticket))
    }

    /// Gives a fragment to the reassembler. If that made its datagram whole, and nothing of its flow is before it, the datagram
    /// goes on.
    fn reassemble(&mut self, ticket: Ticket) -> Option<Ticket> {
        let Self { window, came, reassembler, clock, .. } = self;
        let (stored, progress) = window.waiting_mut(ticket)?;
        let Ok(packet) = parse(stored, came.as_ref()) else {
            self.end(ticket, Some(Fate::Dropped));
            return None;
        };
        let Added { whole, dropped } = reassembler.add(&packet, progress.parts, *clock);
        // From here on the reassembler counts the fragment, or the datagram does.
        progress.parts = whole.as_ref().map_or(0, |whole| whole.parts);
        progress.wait.kind = Kind::Divert;
        if let Some(whole) = &whole {
            stored.meta.wire_len = whole.frame.len() as u32;
            stored.meta.changed = true;
            stored.meta.port.offload = towpath_port::Offload::default();
            window.replace(ticket, &whole.frame);
        }
        self.count(Fate::Dropped, dropped);
        if whole.is_none() {
            self.end(ticket, Some(Fate::Dropped));
            return None;
        }
        self.join_flow(ticket)
    }

    /// A datagram is in its flow from when it is whole: its fragments' lane, but for the first one's, is another. Nothing when
    /// it has to wait for its turn there.
    fn join_flow(&mut self, ticket: Ticket) -> Option<Ticket> {
        let Self { window, came, continuing, .. } = self;
        let (stored, progress) = window.waiting_mut(ticket)?;
        let Ok(packet) = parse(stored, came.as_ref()) else {
            self.end(ticket, Some(Fate::Dropped));
            return None;
        };
        let before = progress.bucket();
        progress.place(&packet);
        let bucket = progress.bucket();
        if bucket == before {
            return Some(ticket);
        }
        if let Some(bucket) = progress.bucket.take() {
            continuing[bucket] -= 1;
        }
        if !self.live {
            return Some(ticket);
        }
        let waits = continuing[bucket] > 0;
        if waits {
            continuing[bucket] += 1;
            progress.bucket = Some(bucket);
            progress.aside = true;
        }
        let ticket = window.move_to(ticket, bucket as u16)?;
        (!waits).then_some(ticket)
    }

    fn queue_index(&mut self, number: u16) -> usize {
        let known = self.queues.iter().position(|queue| queue.number() == number);
        known.unwrap_or_else(|| {
            self.queues.push(Queue::new(number, self.unserved));
            self.named.push(number);
            self.queues.len() - 1
        })
    }

    /// Offers what waits for room, oldest first, as long as there is some; gives up on what waits too long.
    fn retry(&mut self) {
        while let Some(&ticket) = self.backlog.front() {
            let Some(handed) = self.offer_again(ticket) else { break };
            self.backlog.pop_front();
            self.go_on(ticket, handed);
        }
        for queue in 0..self.queues.len() {
            while let Some(ticket) = self.queues[queue].next_in_backlog() {
                let Some(handed) = self.offer_again(ticket) else { break };
                self.queues[queue].leave_backlog();
                self.go_on(ticket, handed);
            }
        }
    }

    fn go_on(&mut self, ticket: Ticket, handed: Handed) {
        if let Some(next) = self.act(ticket, handed) {
            self.drive(ticket, next);
        }
    }

    /// Offers a packet that waits for room; nothing when it still has to wait.
    fn offer_again(&mut self, ticket: Ticket) -> Option<Handed> {
        let Some((_, progress)) = self.window.waiting_mut(ticket) else { return Some(Handed::Held) };
        let wait = progress.wait;
        match self.offer(ticket) {
            Handed::Full => {
                let (stored, progress) = self.window.waiting_mut(ticket)?;
                let queue = &mut self.queues[wait.queue];
                if self.wall.saturating_sub(wait.since.unwrap_or(self.wall)) <= queue.policy().deadline {
                    return None;
                }
                let verdict = queue.give_up(&label(&stored.meta, progress), stored.meta.interface);
                Some(match verdict {
                    DefaultVerdict::Drop if wait.kind != Kind::Tee => Handed::Dropped,
                    _ => Handed::On,
                })
            }
            handed => Some(handed),
        }
    }

    /// Offers a packet to the queue that it waits for.
    fn offer(&mut self, ticket: Ticket) -> Handed {
        let Some((stored, progress)) = self.window.waiting_mut(ticket) else { return Handed::Dropped };
        let Wait { queue, kind, .. } = progress.wait;
        let label = label(&stored.meta, progress);
        let answer_to = (kind != Kind::Tee).then_some(ticket);
        // Of a capture, the interface stands for the processor that the packet came on.
        let cpu = stored.meta.interface;
        let frame = bytes(stored, self.came.as_ref());
        let offer = self.queues[queue].offer(frame, &label, cpu, self.wall, answer_to);
        if matches!(offer, Offer::Held | Offer::Copied) && !std::mem::replace(&mut progress.inspected, true) {
            self.totals.inspected += u64::from(progress.parts);
        }
        match offer {
            Offer::Full => Handed::Full,
            Offer::Queue(number) => Handed::Other(number),
            Offer::Held if kind != Kind::Tee => Handed::Held,
            Offer::Lost(DefaultVerdict::Drop) if kind != Kind::Tee => Handed::Dropped,
            Offer::Held | Offer::Copied | Offer::Lost(_) => Handed::On,
        }
    }

    fn set_wait(&mut self, ticket: Ticket, wait: Wait) {
        let Self { window, came, continuing, walker, .. } = self;
        let Some((stored, progress)) = window.waiting_mut(ticket) else { return };
        progress.wait = wait;
        // The inspector sees what the rules have changed so far.
        change(progress.walk.edits(), stored, came.as_ref());
        let goes_on = wait.kind != Kind::Inspect || progress.walks_out(walker);
        if goes_on && progress.bucket.is_none() {
            let bucket = progress.bucket();
            continuing[bucket] += 1;
            progress.bucket = Some(bucket);
        }
    }

    /// The packet of `ticket` is decided: it passes when it has no fate.
    fn end(&mut self, ticket: Ticket, fate: Option<Fate>) {
        let Some((stored, progress)) = self.window.waiting_mut(ticket) else { return };
        if let Some(bucket) = progress.bucket.take() {
            self.continuing[bucket] -= 1;
        }
        let parts = progress.parts;
        if !self.traces.is_empty() {
            let Self { traces, walker, totals, came, .. } = self;
            let place = (totals.packets, progress.arrival.0.into());
            let meta = Meta { out: progress.out, ..stored.meta };
            traces.tell(place, (bytes(stored, came.as_ref()), &meta), &progress.walk, fate, walker);
        }
        match fate {
            None => {
                change(progress.walk.edits(), stored, self.came.as_ref());
                (stored.meta.out, stored.meta.hop) = (progress.out, progress.hop);
                self.totals.passed += u64::from(parts);
                self.window.pass(ticket);
            }
            Some(fate) => {
                if fate != Fate::Dropped
                    && let Ok(packet) = parse(stored, self.came.as_ref())
                    && let Some(reject) =
                        fate.answer(&packet, self.walker.ports().addresses(progress.arrival))
                {
                    let came = (progress.arrival, &stored.meta);
                    let Self { replies, walker, clock, edge, .. } = self;
                    replies.answer(reject, &packet, came, parts, walker, *clock, edge);
                }
                let meta = stored.meta;
                self.edge.discard(&meta);
                self.count(fate, parts);
                self.window.discard(ticket);
            }
        }
    }
}

/// A waiting packet's bytes: its own, or those in the burst that it came with.
#[inline]
fn bytes<'a>(stored: &'a Stored<Meta>, came: Option<&'a Arc<Burst>>) -> &'a [u8] {
    stored.bytes(|index| came.expect("its burst is being handled").frame(index).bytes)
}

#[inline]
fn parse<'a>(stored: &'a Stored<Meta>, came: Option<&'a Arc<Burst>>) -> Result<Packet<'a>, wire::Malformed> {
    wire::parse(stored.meta.link, bytes(stored, came), stored.meta.wire_len)
}

/// Makes the changes that rules asked for.
fn change(edits: Edits, stored: &mut Stored<Meta>, came: Option<&Arc<Burst>>) {
    if edits != Edits::default() {
        let burst = |index| came.expect("its burst is being handled").frame(index).bytes;
        let (frame, meta) = stored.parts_mut(burst);
        apply(edits, frame, meta);
    }
}
