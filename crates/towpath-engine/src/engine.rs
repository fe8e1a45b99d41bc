//! The engine: its parts, and the calls of its owner.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use rustix::fd::{BorrowedFd, OwnedFd};
use towpath_gate::reassembly::Reassembler;
use towpath_gate::state::{Keepalive, States};
use towpath_gate::{Dir, PortId, SuppressedBy, Walker};
use towpath_port::{Burst, Frame};
use towpath_wire::{LinkType, Time};

use crate::clock::Clock;
use crate::conversations::Conversations;
use crate::drop_log::{self, DropLog, LogDrops};
use crate::drop_reason::{DropReason, Drops, Outcome};
use crate::engine_view::EngineView;
use crate::flow_locks::{BUCKETS, FlowLocks};
use crate::inject::InjectBatch;
use crate::meta::{Egress, Meta};
use crate::packet_ctx::PacketCtx;
use crate::packet_io::PacketIo;
use crate::queue::{AnswersReport, DefaultVerdict, Policy, Queue, QueueSnapshot};
use crate::queue_set::QueueSet;
use crate::reorder::{Limits, ReorderBuffer};
use crate::replies::Replies;
use crate::router::Fib;
use crate::topology::Topology;
use crate::totals::{ConversationStats, ReplyStats, Totals};
use crate::trace::Traces;
use crate::verdict_feed::{DecidedFlow, MAX_DECIDED, VerdictFeed};
use crate::verdicts::VerdictBatch;

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Packets by outcome.
    pub totals: Totals,
    /// Answers to rejected packets.
    pub replies: ReplyStats,
    /// Conversations, of a replay.
    pub conversations: ConversationStats,
    /// The queues, by number.
    pub queues: Vec<QueueSnapshot>,
    /// Time from the first packet to the last, on the clock of the dynamic states.
    pub span: Duration,
}

/// An engine. See the [crate's documentation](crate).
pub struct Engine<E: PacketIo> {
    pub(crate) io: E,
    pub(crate) walker: Walker,
    pub(crate) topology: Topology,
    pub(crate) queues: QueueSet<E::Channel>,
    pub(crate) reorder: ReorderBuffer<Meta, PacketCtx>,
    pub(crate) locks: FlowLocks,
    /// The burst that is being processed, if packets may be borrowed from it.
    pub(crate) burst: Option<Arc<Burst>>,
    /// With the port that a fragment came in by.
    pub(crate) reassembler: Reassembler<(PortId, Meta)>,
    pub(crate) verdicts: VerdictBatch,
    /// Of an engine whose kernel forwards flows.
    pub(crate) feed: Option<VerdictFeed>,
    /// The flows of new verdicts, to be announced when their packets have left.
    pub(crate) decided_flows: Vec<DecidedFlow>,
    pub(crate) injected: InjectBatch,
    pub(crate) clock: Clock,
    pub(crate) conversations: Conversations,
    pub(crate) replies: Replies,
    pub(crate) traces: Traces,
    pub(crate) drop_log: DropLog,
    pub(crate) totals: Totals,
    /// The bytes of a packet that is changed.
    pub(crate) scratch: Vec<u8>,
    /// The engine never waits for an inspector.
    pub(crate) live: bool,
    /// A dynamic state decided a packet that took the slow path.
    pub(crate) by_states: bool,
}

/// Number of polls before the engine sleeps. With [`SPIN_HINTS`] they take about 50 us: the cost of a wake-up.
const SPINS: usize = 500;
/// Number of spin hints between two polls.
const SPIN_HINTS: usize = 4;

/// Maximum number of yields of the CPU to inspectors after a burst. The scheduler may return at once from some of them.
const YIELDS: usize = 8;
/// After a yield of this length in nanoseconds without a verdict, the engine does not yield again: another process had the CPU.
const LONG_YIELD: u64 = 100_000;

/// Maximum sleep in nanoseconds while several queues have packets.
const LOOK: u64 = 1_000_000;

impl<E: PacketIo> Engine<E> {
    /// Creates an engine for replays: it waits for inspectors while there is no room, all packets leave in order, and dynamic
    /// states expire by the time stamps of the captures. `unserved` is the policy of queues that rules name and that are not in
    /// `queues`.
    pub fn new(
        io: E,
        walker: Walker,
        topology: Topology,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        Self::with_mode(false, io, walker, topology, queues, unserved)
    }

    /// Creates a live engine: it never waits for an inspector, the packets of each flow leave in order, and dynamic states expire
    /// by the wall clock. A packet for which there is no room is dropped.
    pub fn live(
        io: E,
        walker: Walker,
        topology: Topology,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        let mut engine = Self::with_mode(true, io, walker, topology, queues, unserved);
        engine.read_clock();
        engine
    }

    fn with_mode(
        live: bool,
        io: E,
        walker: Walker,
        topology: Topology,
        queues: Vec<Queue<E::Channel>>,
        unserved: Policy,
    ) -> Self {
        let mut queues = QueueSet::new(queues, unserved);
        // A replay has one bucket and one account.
        let buckets = if live { BUCKETS as u16 } else { 1 };
        let mut reorder = ReorderBuffer::new(buckets, Limits::default(), live);
        queues.iter_mut().for_each(|queue| queue.open_accounts(reorder.shares_mut()));
        Self {
            io,
            walker,
            topology,
            queues,
            reorder,
            locks: FlowLocks::default(),
            burst: None,
            reassembler: Reassembler::new(),
            verdicts: VerdictBatch::default(),
            feed: None,
            decided_flows: Vec::new(),
            injected: InjectBatch::default(),
            clock: Clock::new(live),
            conversations: Conversations::default(),
            replies: Replies::default(),
            traces: Traces::default(),
            drop_log: DropLog::new(LogDrops::No),
            totals: Totals::default(),
            scratch: Vec::new(),
            live,
            by_states: false,
        }
    }

    /// Sets the bounds of the reorder buffer. Packets that exceed them stay until they are decided.
    pub fn set_reorder_limits(&mut self, limits: Limits) {
        self.reorder.set_limits(limits);
    }

    /// Announces verdicts for flows to flow offload.
    pub fn set_verdict_feed(&mut self, feed: VerdictFeed) {
        self.feed = Some(feed);
        self.decided_flows.reserve(MAX_DECIDED);
    }

    /// Processes a burst. On return, each packet is decided, or an inspector has it. The engine copies packets that wait.
    ///
    /// # Errors
    ///
    /// Returns an error of [`PacketIo::send`].
    pub fn process_burst<'a>(
        &mut self,
        burst: impl Iterator<Item = (&'a [u8], Meta)> + Clone,
    ) -> Result<(), E::Error> {
        if self.live || !self.queues.is_empty() {
            self.read_clock();
        }
        // Before the burst: no packet is between the engine and its port now, so the counters are exact.
        self.serve_queries();
        self.begin_turn();
        self.process_packets(burst.enumerate())?;
        self.clock.clear_times();
        self.expire();
        if self.is_drained() && !self.queues.may_inject() {
            return Ok(());
        }
        self.queues.iter_mut().for_each(Queue::announce);
        for _ in 0..YIELDS {
            let yields = self.live && self.queues.iter_mut().any(Queue::shares_cpu);
            if yields {
                self.read_clock();
                self.io.yield_cpu();
            }
            let before = self.clock.wall;
            let decided = self.poll()?;
            if !yields || decided == 0 && self.clock.wall.saturating_sub(before) > LONG_YIELD {
                break;
            }
        }
        Ok(())
    }

    fn begin_turn(&mut self) {
        if self.live {
            self.queues.iter_mut().for_each(Queue::begin_turn);
        }
    }

    /// Processes a burst of a live port. A packet that is decided before the call returns leaves from the burst's memory
    /// ([`PacketIo::send_borrowed`]); the engine copies the others at the end. The engine keeps no reference to the burst.
    ///
    /// # Errors
    ///
    /// Returns an error of [`PacketIo::send`].
    pub fn process_burst_borrowed(
        &mut self,
        burst: &Arc<Burst>,
        meta: impl Fn(&Frame<'_>) -> Meta + Clone,
    ) -> Result<(), E::Error> {
        self.burst = Some(burst.clone());
        let result = self.process_burst(burst.iter().map(|frame| (frame.bytes, meta(&frame))));
        self.burst = None;
        self.reorder.keep(|index| burst.frame(index).bytes);
        result
    }

    /// Sets the time of the dynamic states at each packet of a replay's next burst. Default: the packet's time stamp. See
    /// [`CaptureClock`](crate::capture_clock::CaptureClock).
    pub fn set_times(&mut self, times: &[Time]) {
        self.clock.set_times(times);
    }

    /// Collects verdicts and serves queries while no packet arrives.
    ///
    /// # Errors
    ///
    /// Returns an error of [`PacketIo::send`].
    pub fn idle(&mut self) -> Result<(), E::Error> {
        self.serve_queries();
        if self.live {
            self.read_clock();
            self.expire();
        }
        self.begin_turn();
        self.poll().map(drop)
    }

    /// Waits until every packet is decided and every copy is returned, for each queue's deadline at most.
    ///
    /// # Errors
    ///
    /// Returns an error of [`PacketIo::send`].
    pub fn finish(&mut self) -> Result<(), E::Error> {
        while !self.is_drained() {
            self.wait()?;
        }
        let unfinished = self.reassembler.drain();
        self.drop_fragments(unfinished);
        self.walker.states_mut().expire_all(self.clock.now);
        Ok(())
    }

    /// Drops every undecided packet and detaches the inspectors. Packets that passed and waited for their turn are sent. Returns
    /// the number of dropped packets.
    ///
    /// # Errors
    ///
    /// Returns an error of [`PacketIo::send`].
    pub fn abandon(&mut self) -> Result<u64, E::Error> {
        let before = self.totals.dropped();
        self.queues.iter_mut().for_each(Queue::close);
        self.queues.backlog = VecDeque::new();
        self.locks.clear_deferred();
        for id in self.reorder.waiting_ids() {
            self.end(id, Outcome::Dropped(DropReason::Shutdown));
        }
        let unfinished = self.reassembler.drain();
        self.drop_fragments(unfinished);
        let dropped = self.totals.dropped() - before;
        self.flush()?;
        Ok(dropped)
    }

    /// Returns true if the reorder buffer is empty and no inspector has a frame.
    pub fn is_drained(&self) -> bool {
        self.reorder.is_empty() && self.queues.is_drained()
    }

    /// Sends a keepalive by its route, outside the rules. It is not sent without a route, or if the port of the route is in another
    /// zone: the same addresses there are those of other hosts.
    ///
    /// # Errors
    ///
    /// Returns an error of [`PacketIo::send`].
    pub fn send_keepalive(&mut self, keepalive: &Keepalive) -> Result<(), E::Error> {
        let Self { walker, io, scratch, .. } = self;
        let neighbor = |port, address| io.neighbor(port, address);
        let Some(route) = Fib::new(walker.routes()).lookup(keepalive.to(), neighbor) else { return Ok(()) };
        if walker.ports().zone(route.port) != keepalive.flow.zone {
            return Ok(());
        }
        keepalive.write(scratch);
        let meta = Meta {
            interface: u32::from(route.port.0),
            egress: Egress::Port(route.port),
            next_hop: route.next_hop,
            packets: 0,
            changed: true,
            ..Meta::new(LinkType::RAW, scratch.len())
        };
        io.send(scratch, &meta)
    }

    /// Asks the inspectors to signal their [`descriptors`](Self::descriptors) with the next verdict, for event loops. Returns
    /// false if there is a verdict already. [`disarm`](Self::disarm) ends it.
    pub fn arm(&mut self) -> bool {
        let mut quiet = true;
        self.queues.iter_mut().for_each(|queue| quiet &= queue.arm());
        quiet
    }

    /// Ends [`arm`](Self::arm), and checks whether the inspectors are alive.
    pub fn disarm(&mut self) {
        self.queues.iter_mut().for_each(Queue::disarm);
    }

    /// As [`disarm`](Self::disarm) for the inspectors whose descriptor is `ready`, in the order of [`descriptors`](Self::descriptors).
    /// Makes no system call for the others: their number does not delay the packet that ended the sleep. Call `disarm` from time to time:
    /// a descriptor that a dead inspector passed on is never ready.
    pub fn disarm_ready(&mut self, ready: impl IntoIterator<Item = bool>) {
        let mut ready = ready.into_iter();
        self.queues.iter_mut().for_each(|queue| queue.disarm_ready(&mut ready));
    }

    /// Takes the reports of inspectors that stalled or answer again.
    pub fn take_reports(&mut self) -> Vec<AnswersReport> {
        self.queues.iter_mut().flat_map(Queue::take_reports).collect()
    }

    /// The descriptors to poll for reading while armed.
    pub fn descriptors(&mut self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter_mut().flat_map(Queue::descriptors)
    }

    /// When the engine must be called at the latest, in nanoseconds of the wall clock.
    pub fn deadline(&mut self) -> Option<u64> {
        let wall = self.clock.wall;
        // No descriptor signals that a queue has room.
        let soon = |queue: &Queue<_>| queue.next_in_backlog().map(|_| wall + LOOK);
        self.queues.iter_mut().filter_map(|queue| soon(queue).or_else(|| queue.deadline())).min()
    }

    /// Attaches an inspector to a queue; `channel` is the number of its channel.
    ///
    /// # Errors
    ///
    /// Returns the inspector if the queue does not exist.
    pub fn join(&mut self, number: u16, channel: u32, inspector: E::Channel) -> Result<(), E::Channel> {
        self.join_as(false, number, channel, inspector)
    }

    /// Returns true while an inspector has a frame, overdue ones included.
    pub fn has_frames(&mut self) -> bool {
        self.queues.iter_mut().any(Queue::has_frames)
    }

    /// Detaches the inspectors that have frames. Returns their number.
    pub fn detach_holders(&mut self) -> u64 {
        self.queues.iter_mut().map(Queue::detach_holders).sum()
    }

    /// Gives up all inspectors for another engine ([`Queue::hand_over`]). Returns their queues and sockets. The engine must be
    /// [drained](Self::is_drained), and no inspector may have [frames](Self::has_frames).
    pub fn hand_over(&mut self) -> Vec<(u16, OwnedFd)> {
        let sockets = |queue: &mut Queue<E::Channel>| {
            let number = queue.number();
            queue.hand_over().into_iter().map(move |socket| (number, socket))
        };
        let all = self.queues.iter_mut().flat_map(sockets).collect();
        self.queues.iter_mut().for_each(|queue| queue.close_accounts(self.reorder.shares_mut()));
        all
    }

    /// The same for an inspector on standby: it takes over from the next one that dies or stalls.
    ///
    /// # Errors
    ///
    /// As [`join`](Self::join).
    pub fn join_standby(
        &mut self,
        number: u16,
        channel: u32,
        inspector: E::Channel,
    ) -> Result<(), E::Channel> {
        self.join_as(true, number, channel, inspector)
    }

    fn join_as(
        &mut self,
        standby: bool,
        number: u16,
        channel: u32,
        inspector: E::Channel,
    ) -> Result<(), E::Channel> {
        match self.queues.find(number) {
            Some(queue) => {
                match standby {
                    true => queue.join_standby(channel, inspector),
                    false => queue.join(channel, inspector),
                }
                queue.open_accounts(self.reorder.shares_mut());
                Ok(())
            }
            None => Err(inspector),
        }
    }

    /// Creates a queue, or changes its policy ([`Queue::set_policy`]).
    pub fn set_queue(&mut self, number: u16, policy: Policy) {
        self.queues.configure(number, policy, self.reorder.shares_mut());
    }

    /// Sets the verdict for packets of queues that are not configured.
    pub fn set_unserved(&mut self, default: DefaultVerdict) {
        self.queues.set_unserved(default);
    }

    /// Sets which dropped packets are logged. Default: none.
    pub fn set_log_drops(&mut self, which: LogDrops) {
        self.drop_log = DropLog::new(which);
    }

    /// The evaluator of the rules.
    pub fn walker_mut(&mut self) -> &mut Walker {
        &mut self.walker
    }

    /// The time of the dynamic states.
    pub fn clock(&self) -> Time {
        self.clock.now
    }

    /// The table of dynamic states.
    pub fn states(&self) -> &States {
        self.walker.states()
    }

    /// The packets so far, by outcome.
    pub fn totals(&mut self) -> Totals {
        self.take_drops();
        let mut totals = self.totals;
        totals.stats.passed -= self.io.held();
        totals
    }

    /// The result so far.
    pub fn summary(&mut self) -> Summary {
        Summary {
            totals: self.totals(),
            replies: self.replies.stats,
            conversations: ConversationStats { tcp: self.conversations.tcp(), udp: self.conversations.udp() },
            queues: self.queues.snapshots(self.reorder.shares()),
            span: self.clock.span(),
        }
    }

    /// The engine's [`PacketIo`].
    pub fn io_mut(&mut self) -> &mut E {
        &mut self.io
    }

    /// Ends the engine and returns its [`PacketIo`].
    pub fn into_io(self) -> E {
        self.io
    }

    pub(crate) fn read_clock(&mut self) {
        self.clock.set_wall(self.io.now());
    }

    /// Collects expired states and fragments, a bounded number at a time.
    fn expire(&mut self) {
        let Some(budget) = self.clock.expire_budget() else { return };
        self.walker.expire(self.clock.now, budget);
        let late = self.reassembler.expire(self.clock.now);
        self.drop_fragments(late);
    }

    /// Takes over the packets that passed and failed to leave.
    fn take_drops(&mut self) {
        let Some(drops) = self.io.take_drops() else { return };
        for (reason, packets) in drops.iter() {
            // A port counts frames, and some are the engine's own: no more packets are dropped than have passed.
            let packets = packets.min(self.totals.stats.passed);
            self.totals.stats.passed -= packets;
            self.totals.drops[reason] += packets;
        }
        self.tell_lost(&drops);
    }

    /// Shows the packets that failed to leave to the traces and to the log.
    #[cold]
    fn tell_lost(&mut self, drops: &Drops) {
        let Self { io, walker, traces, drop_log, totals, clock, topology, .. } = self;
        let (number, now) = (totals.stats.packets, clock.now);
        let left_out = io.take_lost_frames(&mut |reason, bytes, meta| {
            if !traces.is_empty() {
                let arrival = topology.untagged(meta.interface).unwrap_or(PortId(0));
                traces.record((number, arrival), (bytes, meta), None, Outcome::Dropped(reason), walker);
            }
            if drop_log.wants(reason) {
                drop_log.told[reason] += 1;
                let entry =
                    || drop_log::entry(reason, None, (bytes, meta), (Dir::Out, meta.egress.port()), now);
                drop_log.put(reason, 1, now, entry, walker.log());
            }
        });
        traces.count_left_out(left_out);
        // The packets whose frames were not kept have no line. A port counts its packets later than it shows their frames.
        for (reason, packets) in drops.iter() {
            let told = packets.min(drop_log.told[reason]);
            drop_log.told[reason] -= told;
            let rest = packets - told;
            if rest > 0 && drop_log.wants(reason) {
                walker.log().suppress(now, None, SuppressedBy::Rate(reason.log_words()), rest);
            }
        }
    }

    /// Answers queries. Returns for how many nanoseconds the engine may sleep.
    fn serve_queries(&mut self) -> u64 {
        self.take_drops();
        self.traces.tidy();
        let held = self.io.held();
        let Self { io, queues, reorder, walker, clock, totals, replies, traces, .. } = self;
        let patience = io.serve_queries(&mut EngineView {
            queues,
            shares: reorder.shares(),
            walker,
            clock,
            totals,
            held,
            replies: replies.stats,
            traces,
        });
        self.io.trace_lost_frames(!self.traces.is_empty());
        patience
    }

    /// Waits for verdicts: polls for a while, then sleeps on the queue of the oldest packet.
    pub(crate) fn wait(&mut self) -> Result<(), E::Error> {
        self.queues.iter_mut().for_each(Queue::announce);
        for _ in 0..SPINS {
            if self.poll()? > 0 {
                return Ok(());
            }
            for _ in 0..SPIN_HINTS {
                std::hint::spin_loop();
            }
        }
        let patience = self.serve_queries();
        let Self { reorder, queues, clock, .. } = self;
        let oldest = queues.backlog.front().copied().or_else(|| reorder.oldest_waiting());
        let wait = oldest.and_then(|id| reorder.waiting_mut(id)).map(|(_, ctx)| ctx.wait);
        let copies = queues.iter().position(|queue| queue.open() > 0);
        if let Some(index) = wait.map(|wait| wait.queue).or(copies) {
            let due =
                wait.and_then(|wait| wait.since).map(|since| since + queues.get(index).policy().deadline);
            // The sleep ends with a verdict of one inspector. If others have packets too, it is short.
            let busy: usize = queues.iter_mut().map(Queue::busy).sum();
            let look = if busy <= 1 { u64::MAX } else { clock.wall + LOOK };
            let until = due.unwrap_or(u64::MAX).min(look).min(clock.wall.saturating_add(patience));
            queues.get_mut(index).wait(clock.wall, until);
        }
        self.poll().map(drop)
    }
}
