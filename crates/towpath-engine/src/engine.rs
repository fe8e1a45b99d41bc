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
//! - packets leave in the order they burst ([`ReorderBuffer`]): all of a replay, and those of each flow of a live engine;
//! - within a flow, packets meet the rules in the order they burst: while a packet of the flow waits for a verdict after
//!   which its walk goes on, the next packet of that flow waits too (a packet that an inspector sends back to the rules
//!   against the rule's word, and later fragments, which have no ports, are outside this promise);
//! - the engine never waits longer than a queue's deadline for a packet that an inspector should decide.
//!
//! A replay has all the time in the world: when there is no room, it waits for inspectors. A live engine
//! ([`Engine::live`]) waits for nobody: what has no room is dropped and counted, and a packet that must not overtake
//! another one is put aside until its turn comes. Its states live on the wall clock, a replay's on the captures'.
//!
//! The engine has no clock and no port of its own: both come through [`PacketIo`].

mod fast_path;
mod ingress;
mod introspect;
mod packet_ctx;
mod packet_io;
mod replies;
mod slow_path;
#[cfg(test)]
mod tests;
mod topology;
mod trace;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::BorrowedFd;
use towpath_gate::Walker;
use towpath_gate::reassembly::Reassembler;
use towpath_gate::state::{Ends, Keepalive, States};
use towpath_metrics::metrics;
use towpath_wire::{LinkType, Time};

pub use self::introspect::{ChannelSnapshot, ConversationStats, FrameSnapshot, Introspect, QueueSnapshot};
use self::introspect::{View, snapshots};
pub use self::packet_ctx::Fate;
use self::packet_ctx::{BUCKETS, Next, PacketCtx, Settled, advance};
pub use self::packet_io::{Meta, PacketIo};
use self::replies::Replies;
pub use self::replies::ReplyStats;
use self::slow_path::{bytes, parse};
pub use self::topology::{ForwardMode, Topology};
use self::trace::Traces;
pub use self::trace::{TraceFilter, TraceSink, TracedPacket};
use crate::conversations::Conversations;
use crate::queue::{DefaultVerdict, Policy, Queue};
use crate::reorder::{PacketId, ReorderBuffer};
use towpath_port::{Burst, Frame};

metrics! {
    /// Packet counters of an engine. `packets = passed + dropped + rejected + undecodable + waiting`.
    pub struct Stats in "engine" {
        /// Packets received.
        pub packets: counter packets,
        /// Bytes received, as on the wire.
        pub bytes: counter bytes,
        /// Packets that went out.
        pub passed: counter packets,
        /// Packets that a rule, an inspector or a full table dropped.
        pub dropped: counter packets,
        /// Packets that a rule or an inspector rejected.
        pub rejected: counter packets,
        /// Packets that at least one inspector got.
        pub inspected: counter packets,
        /// Malformed packets.
        pub undecodable: counter packets,
        /// Packets dropped because there was no room to keep them until they are decided.
        pub no_room: counter packets,
        /// Packets dropped because there is no route.
        pub no_route: counter packets,
        /// Packets dropped because their TTL or hop limit was exceeded.
        pub expired: counter packets,
    }
}

impl Stats {
    /// Packets that wait for a verdict, for room, or for other fragments.
    pub fn waiting(&self) -> u64 {
        self.packets - self.passed - self.dropped - self.rejected - self.undecodable
    }
}

/// The result of a run so far.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Packet counters.
    pub stats: Stats,
    /// Counters of the answers to rejected packets.
    pub replies: ReplyStats,
    /// Conversations, of a replay.
    pub conversations: ConversationStats,
    /// The queues, by number.
    pub queues: Vec<QueueSnapshot>,
    /// Time from the first packet to the last, on the clock of the states.
    pub span: Duration,
}

/// See the module's text.
pub struct Engine<E: PacketIo> {
    io: E,
    walker: Walker,
    topology: Topology,
    queues: Vec<Queue<E::Channel>>,
    /// For queues that a rule names and nobody serves.
    unserved: Policy,
    /// The numbers of those that have been named so far.
    named: Vec<u16>,
    reorder: ReorderBuffer<Meta, PacketCtx>,
    /// The burst that is being handled, when packets may lie in it until they are decided ([`Engine::process_burst_borrowed`]).
    burst: Option<Arc<Burst>>,
    /// A packet went by its state that was not let pass at once.
    by_states: bool,
    /// It waits for nobody.
    live: bool,
    reassembler: Reassembler,
    /// Tickets that wait for room in their queue, oldest first.
    backlog: VecDeque<PacketId>,
    /// Decided, not yet acted on; empty between calls.
    settled: Vec<(PacketId, Settled)>,
    /// Per flow bucket, the packets whose walk will go on after a verdict.
    continuing: Box<[u32; BUCKETS]>,
    conversations: Conversations,
    replies: Replies,
    traces: Traces,
    totals: Stats,
    /// A packet that is changed on its mode out.
    scratch: Vec<u8>,
    /// The captures' time; never goes back.
    clock: Time,
    /// What it is at each packet of the burst, where their own stamps do not say ([`Engine::set_times`]).
    times: Vec<Time>,
    /// When to look for what has ended.
    expire_at: Time,
    /// Wall-clock time when the engine last looked.
    wall: u64,
    started: Option<Time>,
}

/// Packets that may wait at one time.
const WINDOW_PACKETS: usize = 8192;

/// Bytes that may wait at one time.
const WINDOW_BYTES: usize = 16 << 20;

/// How often the engine looks before it sleeps, and how long it pauses between two looks: some 50 us in all, which is
/// what waking up would cost.
const SPINS: usize = 500;
const PAUSES: usize = 4;

/// How often after a burst the engine gives mode to inspectors that run on its CPU: each time at least one of them runs.
const WAYS: usize = 8;

/// How long the engine sleeps at most while several queues have packets, in nanoseconds.
const LOOK: u64 = 1_000_000;

/// How often what has ended is looked for, by the clock of the states, and how many states are looked at then.
const EXPIRE_EVERY: Duration = Duration::from_millis(1);
const EXPIRE_BUDGET: usize = 256;

/// How many are looked at after a sleep at most: a millisecond's work.
const EXPIRE_MOST: usize = 8192;

impl<E: PacketIo> Engine<E> {
    /// An engine with its mode into the gate, its ways in and out, and its queues. `unserved` is the policy of queues that
    /// a rule names and that are not among `queues`.
    pub fn new(
        io: E,
        walker: Walker,
        topology: Topology,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        Self {
            io,
            walker,
            topology,
            queues,
            unserved,
            named: Vec::new(),
            reorder: ReorderBuffer::new(1, WINDOW_PACKETS, WINDOW_BYTES),
            burst: None,
            by_states: false,
            live: false,
            reassembler: Reassembler::new(),
            backlog: VecDeque::new(),
            settled: Vec::new(),
            continuing: Box::new([0; BUCKETS]),
            conversations: Conversations::default(),
            replies: Replies::default(),
            traces: Traces::default(),
            totals: Stats::default(),
            scratch: Vec::new(),
            clock: Time::default(),
            times: Vec::new(),
            expire_at: Time::default(),
            wall: 0,
            started: None,
        }
    }

    /// An engine between live ports: see the module's text.
    pub fn live(
        io: E,
        walker: Walker,
        topology: Topology,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        let reorder = ReorderBuffer::new(BUCKETS as u16, WINDOW_PACKETS, WINDOW_BYTES);
        let mut engine = Self { reorder, live: true, ..Self::new(io, walker, topology, queues, unserved) };
        engine.look_at_the_clock();
        engine
    }

    /// Takes a burst of packets. When it returns, each is decided or an inspector has it.
    ///
    /// # Errors
    ///
    /// What [`PacketIo::send`] said.
    pub fn process_burst<'a>(
        &mut self,
        burst: impl Iterator<Item = (&'a [u8], Meta)> + Clone,
    ) -> Result<(), E::Error> {
        if self.live || !self.queues.is_empty() {
            self.look_at_the_clock();
        }
        self.handle_packets(burst.enumerate())?;
        self.times.clear();
        self.expire();
        self.serve_queries();
        if self.reorder.is_empty() && self.queues.iter().all(|queue| queue.open() == 0) {
            return Ok(());
        }
        for queue in &mut self.queues {
            queue.kick();
        }
        for _ in 0..WAYS {
            // One that decides nothing in its turn is waited for no longer: it is slow, blocked, or elsewhere after all.
            let waited_for = self.live && self.queues.iter_mut().any(Queue::shares_cpu);
            if waited_for {
                self.io.yield_cpu();
            }
            if self.poll()? == 0 || !waited_for {
                break;
            }
        }
        Ok(())
    }

    /// What time it is for the states of a replay at each packet of the next burst. Without it, or for packets beyond, their
    /// own time stamps say so ([`CaptureClock`](crate::capture_clock::CaptureClock) knows better).
    pub fn set_times(&mut self, times: &[Time]) {
        self.times.clear();
        self.times.extend_from_slice(times);
    }

    /// As [`process_burst`](Self::process_burst), for what a live port has received: packets that are decided before this returns
    /// leave from where they lie, the others are copied then. The burst is the caller's alone again afterwards.
    ///
    /// # Errors
    ///
    /// What [`PacketIo::send`] said.
    pub fn process_burst_borrowed(
        &mut self,
        burst: &Arc<Burst>,
        meta: impl Fn(&Frame<'_>) -> Meta + Clone,
    ) -> Result<(), E::Error> {
        self.burst = Some(burst.clone());
        let handled = self.process_burst(burst.iter().map(|frame| (frame.bytes, meta(&frame))));
        self.burst = None;
        self.reorder.keep(|index| burst.frame(index).bytes);
        handled
    }

    /// Nothing has come for a while: collects what inspectors have decided meanwhile, and answers those who look.
    ///
    /// # Errors
    ///
    /// What [`PacketIo::send`] said.
    pub fn idle(&mut self) -> Result<(), E::Error> {
        self.serve_queries();
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
    /// What [`PacketIo::send`] said.
    pub fn finish(&mut self) -> Result<(), E::Error> {
        while !self.reorder.is_empty() || self.queues.iter().any(|queue| queue.open() > 0) {
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
    /// What [`PacketIo::send`] said.
    pub fn abandon(&mut self) -> Result<u64, E::Error> {
        let before = self.totals.dropped;
        self.queues.iter_mut().for_each(Queue::close);
        self.backlog.clear();
        for id in self.reorder.waiting_ids() {
            self.end(id, Some(Fate::Dropped));
        }
        let unfinished = self.reassembler.drain();
        self.count(Fate::Dropped, unfinished);
        self.flush()?;
        Ok(self.totals.dropped - before)
    }

    /// Whether nobody has a packet or a copy.
    pub fn is_drained(&self) -> bool {
        self.reorder.is_empty() && self.queues.iter().all(|queue| queue.open() == 0)
    }

    /// Sends a keepalive by its route, outside the rules. Without a route it is left out.
    ///
    /// # Errors
    ///
    /// What [`PacketIo::send`] said.
    pub fn send_keepalive(&mut self, keepalive: &Keepalive) -> Result<(), E::Error> {
        let Self { walker, io, scratch, .. } = self;
        let to = match keepalive.flow.ends {
            Ends::V4(_, to) => to.into(),
            Ends::V6(_, to, _) => to.into(),
        };
        let Some((route, _)) = walker.routes().lookup(to) else { return Ok(()) };
        keepalive.write(scratch);
        let meta = Meta {
            wire_len: scratch.len() as u32,
            time: 0,
            link: LinkType::RAW,
            interface: u32::from(route.port.0),
            out: Some(route.port),
            hop: None,
            changed: true,
            port: towpath_port::Meta::default(),
        };
        io.send(scratch, &meta)
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

    /// The mode into the gate.
    pub fn walker_mut(&mut self) -> &mut Walker {
        &mut self.walker
    }

    /// The time that states live by, for others to see.
    pub fn clock(&self) -> Time {
        self.clock
    }

    /// The counters so far.
    pub fn stats(&self) -> Stats {
        self.totals
    }

    /// The table of dynamic states.
    pub fn states(&self) -> &States {
        self.walker.states()
    }

    /// The result so far.
    pub fn summary(&mut self) -> Summary {
        Summary {
            stats: self.totals,
            replies: self.replies.counts,
            conversations: ConversationStats { tcp: self.conversations.tcp(), udp: self.conversations.udp() },
            queues: snapshots(&mut self.queues),
            span: self.started.map_or(Duration::ZERO, |started| self.clock.since(started)),
        }
    }

    /// The outside.
    pub fn io_mut(&mut self) -> &mut E {
        &mut self.io
    }

    /// The outside again, when the run is over: to close files.
    pub fn into_io(self) -> E {
        self.io
    }

    fn look_at_the_clock(&mut self) {
        self.wall = self.io.now();
        if self.live {
            self.clock = self.clock.max(Time::from_nanos(self.wall));
        }
    }

    /// Takes away what has ended, some of it at a time.
    fn expire(&mut self) {
        if self.clock < self.expire_at {
            return;
        }
        // Who has slept has as many more to look at, and the time for it.
        let late = self.clock.as_nanos() - self.expire_at.as_nanos();
        let turns = 1 + late / EXPIRE_EVERY.as_nanos() as u64;
        let budget = usize::try_from(turns).map_or(EXPIRE_MOST, |turns| turns.saturating_mul(EXPIRE_BUDGET));
        self.expire_at = self.clock + EXPIRE_EVERY;
        self.walker.expire(self.clock, budget.min(EXPIRE_MOST));
        let late = self.reassembler.expire(self.clock);
        self.count(Fate::Dropped, late);
    }

    /// Takes packets that were put aside to the rules, those whose turn has come. Returns whether there were any.
    fn take_turns(&mut self) -> bool {
        if !self.live {
            self.reorder.clear_turns();
            return false;
        }
        let mut any = false;
        while let Some(id) = self.reorder.take_turn() {
            let Self { reorder, burst, walker, clock, continuing, .. } = self;
            let Some((stored, ctx)) = reorder.waiting_mut(id) else { continue };
            if !std::mem::take(&mut ctx.aside) {
                continue;
            }
            any = true;
            if let Some(bucket) = ctx.bucket.take() {
                continuing[bucket] -= 1;
            }
            let next = match parse(stored, burst.as_ref()) {
                Ok(packet) => advance(walker, &packet, ctx, *clock),
                Err(_) => Next::End(Fate::Dropped),
            };
            self.drive(id, next);
        }
        any
    }

    /// Lets others look; how long the engine may sleep.
    fn serve_queries(&mut self) -> u64 {
        let Self { io, queues, walker, wall, clock, totals, replies, traces, .. } = self;
        traces.tidy();
        let (stats, replies) = (*totals, replies.counts);
        io.serve_queries(&mut View { queues, walker, wall: *wall, clock: *clock, stats, replies, traces })
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
        let patience = self.serve_queries();
        let backlogged = self.backlog.front().copied();
        let oldest = backlogged.or_else(|| self.reorder.oldest_waiting());
        let packet = oldest.and_then(|id| self.reorder.waiting_mut(id)).map(|(_, p)| p.wait);
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
            decided += queue.poll(self.wall, |id, decided| {
                settled.push((id, Settled::new(decided, &mut room)));
            });
        }
        for (id, decision) in settled.drain(..) {
            self.settle(id, decision);
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
        let Self { reorder, burst, io, .. } = self;
        reorder.flush(|stored| {
            let bytes = bytes(stored, burst.as_ref());
            match stored.borrowed() {
                Some(index) => io.pass(index, bytes, &stored.meta),
                None => io.send(bytes, &stored.meta),
            }
        })
    }
}
