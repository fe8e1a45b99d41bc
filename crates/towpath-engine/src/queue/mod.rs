//! A queue: packets that rules hand to inspectors, and the verdicts for them.
//!
//! Several inspectors may serve one queue. [`towpath_ring::Queue`] selects the inspector for a frame and applies the overload
//! policy; this module knows which packet waits for which frame.
//!
//! Invariant: `frames = passed + dropped + replaced + lost + open`. A frame is lost if no inspector decided it: its packet
//! gets the queue's default verdict. A broadcast packet is one frame per inspector. A packet that is given to a second
//! inspector because the first one died counts once.
//!
//! The channel to an inspector is a trait, so that the queue can be tested without a process.

mod broadcast;
mod inspector_slot;
pub mod parse;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;

use rustix::fd::BorrowedFd;
use towpath_metrics::metrics;
use towpath_ring::{
    self as ring, ChannelStats, Credentials, Decision, Fanout, FrameOut, Geometry, Loss, Meta, Overload,
    ReserveError, Seq, Verdict,
};
use towpath_wire::{Flow, Time};

use self::broadcast::PendingBroadcast;
use self::inspector_slot::Waiter;
pub use self::inspector_slot::{InspectorSlot, VerdictStats};
use crate::flow_verdict::{FlowVerdict, FlowVerdictCache};
use crate::reorder::{Account, PacketId, Shares, Usage};
use crate::{DropReason, QueueSnapshot};

/// A channel to one inspector. Sequence numbers increase.
pub trait Channel {
    /// Publishes a frame.
    ///
    /// # Errors
    ///
    /// The ring has no room.
    fn publish(&mut self, frame: &[u8], meta: &Meta) -> Result<Seq, ReserveError>;

    /// Counts a frame that the inspector does not get, and tells the inspector with the next gap record.
    fn lose(&mut self, loss: Loss);

    /// Wakes the inspector if it sleeps and frames were published.
    fn kick(&mut self);

    /// Passes each decided frame to `each`, once: the inspector's decision, or why it did not decide
    /// ([`Overdue`](DropReason::Overdue), [`InvalidVerdict`](DropReason::InvalidVerdict),
    /// [`InspectorDied`](DropReason::InspectorDied)). Returns the number of frames.
    fn poll(&mut self, now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize;

    /// Sleeps until [`poll`](Self::poll) may have something, a frame is overdue, or the time is `until`. May return early.
    fn wait(&mut self, now: u64, until: u64);

    /// Asks the inspector to signal [`descriptor`](Self::descriptor) with its next verdict. Returns false if
    /// [`poll`](Self::poll) has something already.
    fn arm(&mut self) -> bool {
        true
    }

    /// Ends [`arm`](Self::arm), and checks whether the inspector is alive.
    fn disarm(&mut self) {}

    /// Returns true if the inspector last ran on the CPU of the calling thread: it decides nothing while this thread runs.
    fn shares_cpu(&self) -> bool {
        false
    }

    /// The descriptor to poll for reading while armed.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When the oldest frame is overdue, in nanoseconds of the wall clock.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// The number of overdue frames that the inspector has not returned.
    fn unreturned(&self) -> u32;

    /// Returns true if the inspector is known to be dead. It gets no more frames.
    fn is_dead(&self) -> bool;

    /// The peer and the ring. `None` for a channel without them.
    fn about(&self) -> Option<About> {
        None
    }

    /// The frames of the ring that are not free.
    fn frames(&self) -> Vec<FrameOut> {
        Vec::new()
    }

    /// How the inspector was detached. `None` until [`poll`](Self::poll) has returned every frame that it had.
    fn detached(&mut self) -> Option<Detached>;
}

/// The channel type of an engine without inspectors.
impl Channel for Infallible {
    fn publish(&mut self, _frame: &[u8], _meta: &Meta) -> Result<Seq, ReserveError> {
        match *self {}
    }

    fn lose(&mut self, _loss: Loss) {
        match *self {}
    }

    fn kick(&mut self) {
        match *self {}
    }

    fn poll(&mut self, _now: u64, _each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        match *self {}
    }

    fn wait(&mut self, _now: u64, _until: u64) {
        match *self {}
    }

    fn unreturned(&self) -> u32 {
        match *self {}
    }

    fn is_dead(&self) -> bool {
        match *self {}
    }

    fn detached(&mut self) -> Option<Detached> {
        match *self {}
    }
}

/// The peer of a channel, and the channel's ring.
#[derive(Clone, Debug)]
pub struct About {
    /// The peer's process and user.
    pub peer: Credentials,
    /// The peer's name for itself.
    pub name: String,
    /// The ring towards the peer.
    pub geometry: Geometry,
    /// The channel's counters.
    pub stats: ChannelStats,
}

/// How an inspector was detached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detached {
    /// The reason, as text.
    pub why: String,
    /// The inspector violated the protocol: its verdicts for flows no longer count.
    pub distrusted: bool,
}

/// The verdict for a packet that no inspector decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefaultVerdict {
    /// Fail open.
    Pass,
    /// Fail closed.
    #[default]
    Drop,
}

impl DefaultVerdict {
    /// `reason` if the verdict is to drop, `None` if it is to pass.
    pub fn drops(self, reason: DropReason) -> Option<DropReason> {
        match self {
            Self::Pass => None,
            Self::Drop => Some(reason),
        }
    }
}

/// The policy of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long an inspector may keep a frame, and how long a packet waits for room, in nanoseconds of wall-clock time.
    /// Default: 1 s.
    pub deadline: u64,
    /// The verdict for packets that no inspector decides. Default: drop.
    pub default: DefaultVerdict,
    /// Which inspector gets a frame. Default: by flow.
    pub fanout: Fanout,
    /// What happens to a frame if its inspector has no room. Default: the packet waits.
    pub overload: Overload,
    /// An inspector with this many frames is overloaded, until it has `low`. Default: no limit.
    pub high: u32,
    /// See `high`.
    pub low: u32,
    /// The queues that a verdict of its inspectors may name. A verdict that names another one is invalid. Default: none.
    pub may_queue: Vec<u16>,
    /// The queue's weight in the division of the reorder buffer ([`Shares`]). Default: 1.
    pub share: u16,
}

impl Policy {
    fn ring_policy(&self) -> ring::Policy {
        let overload = match self.overload {
            // The packets wait in this queue's own backlog, which knows their ids.
            Overload::DropOldest(_) => Overload::Block,
            other => other,
        };
        ring::Policy { fanout: self.fanout, overload, high: self.high, low: self.low }
    }

    /// Returns true if an inspector may give this verdict: it names no queue, or one of `may_queue`. Otherwise one inspector could
    /// send its packets to the inspectors of any queue.
    fn allows(&self, verdict: Verdict<'_>) -> bool {
        match verdict {
            Verdict::Queue(number) => self.may_queue.contains(&number),
            _ => true,
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            deadline: 1_000_000_000,
            default: DefaultVerdict::Drop,
            fanout: Fanout::FlowHash,
            overload: Overload::Block,
            high: u32::MAX,
            low: u32::MAX,
            may_queue: Vec::new(),
            share: 1,
        }
    }
}

/// The result of [`Queue::enqueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueue {
    /// An inspector has the frame. Its verdict follows. The packet is charged to this account from now on.
    Held(Account),
    /// Only copies were made. No verdict follows.
    Copied,
    /// No room: wait for verdicts, then try again.
    Full,
    /// No inspector gets the frame. The packet is dropped for this reason, or passes.
    Lost(Option<DropReason>),
    /// The overload policy gives the packet to this queue.
    Queue(u16),
}

/// The result of a frame that was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueVerdict<'a> {
    /// The inspector on this channel decided.
    Decided(Decision<'a>, u32),
    /// No inspector decided. The packet is dropped for this reason, or passes.
    Lost(Option<DropReason>),
    /// The inspector died and the queue has others: enqueue the packet again, or call [`Queue::abandon`].
    Redeliver,
}

metrics! {
    /// Counters of one queue. `frames = passed + dropped + replaced + lost + open`, where `lost` is the sum of its reasons.
    pub struct Stats in "queue" {
        /// Frames that the rules sent to the queue.
        pub frames: counter frames,
        /// Frames that the inspector passed unchanged.
        pub passed: counter frames,
        /// Frames that the inspector dropped or rejected.
        pub dropped: counter frames,
        /// Frames that the inspector passed with another payload.
        pub replaced: counter frames,
        /// Frames that had no verdict within the deadline, or at the stop of the engine.
        pub overdue: counter frames as "lost": "Frames that no inspector decided, by reason." (reason = "overdue"),
        /// Frames with an invalid verdict.
        pub invalid_verdict: counter frames as "lost" (reason = "invalid_verdict"),
        /// Frames of an inspector that died.
        pub inspector_died: counter frames as "lost" (reason = "inspector_died"),
        /// Frames for which the inspector, or its share of the reorder buffer, had no room.
        pub queue_full: counter frames as "lost" (reason = "queue_full"),
        /// Frames for which there was no inspector.
        pub no_inspector: counter frames as "lost" (reason = "no_inspector"),
        /// Frames that the overload policy gave to another queue. They do not count here.
        pub handed_on: counter frames,
        /// Frames that were given to another inspector because theirs died. Each counts once.
        pub redelivered: counter frames,
        /// Packets decided by an earlier verdict for their flow. They are not frames of the queue.
        pub by_flow: counter packets,
        /// Packets for which the queue's share of the reorder buffer had no room. They are dropped, and they are no frames of the queue.
        pub no_room: counter packets,
        /// Packets of the queue in the reorder buffer now.
        pub held: gauge packets,
        /// Bytes of these packets.
        pub held_bytes: gauge bytes,
        /// Frames that inspectors have now.
        pub open: gauge frames,
        /// Most frames that inspectors had at one time.
        pub high_water: gauge frames,
    }
}

impl Stats {
    /// Frames that no inspector decided.
    pub fn lost(&self) -> u64 {
        self.overdue + self.invalid_verdict + self.inspector_died + self.queue_full + self.no_inspector
    }

    fn count(&mut self, decision: &Result<Decision<'_>, DropReason>) {
        match decision {
            Ok(decision) => match decision.verdict {
                Verdict::Pass | Verdict::Queue(_) | Verdict::Repeat => self.passed += 1,
                Verdict::Drop | Verdict::Reject | Verdict::Hold => self.dropped += 1,
                Verdict::Replace(_) => self.replaced += 1,
            },
            Err(DropReason::Overdue) => self.overdue += 1,
            Err(DropReason::InspectorDied) => self.inspector_died += 1,
            Err(DropReason::ReplaceLimit) => self.queue_full += 1,
            Err(_) => self.invalid_verdict += 1,
        }
    }
}

/// Detached inspectors that a queue keeps for introspection.
const DETACHED_MAX: usize = 16;

/// A queue with its inspectors. See the module's documentation.
#[derive(Debug)]
pub struct Queue<C> {
    inspectors: ring::Queue<InspectorSlot<C>>,
    policy: Policy,
    /// Broadcast packets that wait for further verdicts.
    broadcasts: BTreeMap<PacketId, PendingBroadcast>,
    /// Packets that wait for room, oldest first.
    backlog: VecDeque<PacketId>,
    flow_verdicts: FlowVerdictCache,
    /// A frame waited for room until its deadline. No packet waits for room until an inspector decides again.
    stalled: bool,
    number: u16,
    /// Packets that no single inspector has are charged to it.
    account: Account,
    /// The accounts of detached inspectors, to be closed.
    closed: Vec<Account>,
    stats: Stats,
    /// Why inspectors were detached.
    trouble: Option<String>,
}

impl<C: Channel> Queue<C> {
    /// A queue without inspectors: every frame is lost.
    pub fn new(number: u16, policy: Policy) -> Self {
        Self {
            inspectors: ring::Queue::new(policy.ring_policy()),
            policy,
            broadcasts: BTreeMap::new(),
            backlog: VecDeque::new(),
            flow_verdicts: FlowVerdictCache::default(),
            stalled: false,
            number,
            account: Account::ENGINE,
            closed: Vec::new(),
            stats: Stats::default(),
            trouble: None,
        }
    }

    /// Sets the policy. If the queue has inspectors or a backlog, only the default verdict and `may_queue` change. Verdicts for flows
    /// that name a queue which is no longer allowed end.
    pub fn set_policy(&mut self, policy: Policy) {
        self.flow_verdicts.retain(|verdict| policy.allows(verdict.verdict));
        if self.inspectors.listeners().next().is_none() && self.backlog.is_empty() {
            self.inspectors = ring::Queue::new(policy.ring_policy());
            self.policy = policy;
        } else {
            self.policy.default = policy.default;
            self.policy.may_queue = policy.may_queue;
        }
    }

    /// Attaches an inspector; `number` is the number of its channel.
    pub fn join(&mut self, number: u32, channel: C) {
        // Detached inspectors are kept for introspection, up to a limit.
        let detached = self.inspectors.listeners().filter(|slot| slot.detached().is_some()).count();
        let dead = self.inspectors.listeners().filter(|slot| ring::Listener::is_dead(*slot)).count();
        if detached >= DETACHED_MAX && detached == dead {
            drop(self.inspectors.take_dead());
        }
        self.inspectors.join(InspectorSlot::new(number, channel));
    }

    /// Opens accounts for the queue and its inspectors, where they have none. A queue without accounts is charged to the engine's.
    pub(crate) fn open_accounts(&mut self, shares: &mut Shares) {
        if self.account == Account::ENGINE {
            self.account = shares.add_queue(self.policy.share);
        }
        for slot in self.inspectors.listeners().filter(|slot| slot.account() == Account::ENGINE) {
            slot.set_account(shares.open(self.account));
        }
    }

    /// Closes the accounts of detached inspectors.
    pub(crate) fn close_accounts(&mut self, shares: &mut Shares) {
        self.closed.drain(..).for_each(|account| shares.close(account));
    }

    /// The queue's own account.
    pub(crate) fn account(&self) -> Account {
        self.account
    }

    /// Gives a frame to an inspector. The frame was received on `cpu`. `packet` waits for the verdict; a copy has none. An inspector
    /// whose account in `shares` has no room for the packet has no room.
    ///
    /// The frame counts if the result is `Held`, `Copied` or `Lost`.
    pub fn enqueue(
        &mut self,
        frame: &[u8],
        meta: &Meta,
        cpu: u32,
        now: u64,
        packet: Option<PacketId>,
        shares: &Shares,
    ) -> Enqueue {
        let meta = Meta { group: self.number.into(), ..*meta };
        let fanout = self.policy.fanout;
        let charged = packet.is_some() && !matches!(fanout, Fanout::Broadcast | Fanout::Mirror);
        let usage = Usage { packets: 1, bytes: frame.len() };
        for slot in self.inspectors.listeners() {
            slot.set_in_share(!charged || shares.admits(slot.account(), usage));
        }
        match self.inspectors.enqueue(frame, &meta, cpu) {
            ring::Enqueue::Sent(index, _) => {
                let mut account = self.account;
                if let Some(slot) = self.inspectors.listeners().nth(index) {
                    slot.set_waiter(packet, now);
                    account = slot.account();
                }
                self.count_open(1);
                Enqueue::Held(account)
            }
            ring::Enqueue::SentTo(copies) => {
                let packet = packet.filter(|_| fanout == Fanout::Broadcast);
                for slot in self.inspectors.listeners() {
                    slot.set_waiter(packet, now);
                }
                if let Some(packet) = packet.filter(|_| copies > 1) {
                    self.broadcasts.insert(packet, PendingBroadcast::new(copies));
                }
                self.count_open(copies as u64);
                if packet.is_some() { Enqueue::Held(self.account) } else { Enqueue::Copied }
            }
            // A copy does not wait in the backlog.
            ring::Enqueue::Blocked if self.stalled || self.has_backlog() && packet.is_none() => {
                self.lose_for_room(&meta, cpu)
            }
            ring::Enqueue::Blocked | ring::Enqueue::Backlogged => Enqueue::Full,
            ring::Enqueue::Verdict(Verdict::Queue(number)) => {
                self.stats.handed_on += 1;
                Enqueue::Queue(number)
            }
            ring::Enqueue::Verdict(Verdict::Pass) => {
                self.count_full();
                Enqueue::Lost(None)
            }
            ring::Enqueue::Lost | ring::Enqueue::Verdict(_) => {
                self.count_full();
                Enqueue::Lost(Some(DropReason::QueueFull))
            }
            ring::Enqueue::NoListener => {
                self.stats.frames += 1;
                self.stats.no_inspector += 1;
                Enqueue::Lost(self.policy.default.drops(DropReason::NoInspector))
            }
        }
    }

    fn count_open(&mut self, copies: u64) {
        self.stats.frames += copies;
        self.stats.open += copies;
        self.stats.high_water = self.stats.high_water.max(self.stats.open);
    }

    fn count_full(&mut self) {
        self.stats.frames += 1;
        self.stats.queue_full += 1;
    }

    fn lose_for_room(&mut self, meta: &Meta, cpu: u32) -> Enqueue {
        self.inspectors.lose(Loss::NoRoom, meta, cpu);
        self.count_full();
        Enqueue::Lost(self.policy.default.drops(DropReason::QueueFull))
    }

    /// Gives up on a frame that found no room within the deadline. Further frames do not wait for room until an inspector
    /// decides again. Returns why the packet is dropped, or `None` if it passes.
    pub fn give_up(&mut self, meta: &Meta, cpu: u32) -> Option<DropReason> {
        self.stalled = true;
        self.lose_for_room(meta, cpu);
        self.policy.default.drops(DropReason::QueueFull)
    }

    /// Gives up on a frame whose inspector died ([`QueueVerdict::Redeliver`]). Returns why the packet is dropped, or `None`
    /// if it passes.
    pub fn abandon(&mut self) -> Option<DropReason> {
        self.stats.frames += 1;
        self.stats.inspector_died += 1;
        self.policy.default.drops(DropReason::InspectorDied)
    }

    /// Detaches all inspectors. Their frames count as overdue, packets in the backlog as without room. The caller drops
    /// the packets.
    pub fn close(&mut self) {
        self.stats.overdue += std::mem::take(&mut self.stats.open);
        for _ in self.backlog.drain(..) {
            self.stats.frames += 1;
            self.stats.queue_full += 1;
        }
        self.broadcasts.clear();
        self.inspectors = ring::Queue::new(self.policy.ring_policy());
    }

    /// Puts a packet into the backlog, if the policy is [`Overload::DropOldest`]. Returns the oldest packet if the backlog was
    /// full: it is counted as lost, and the caller drops it.
    ///
    /// # Errors
    ///
    /// Returns the packet if the policy has no backlog.
    pub fn push_backlog(&mut self, packet: PacketId) -> Result<Option<PacketId>, PacketId> {
        let Overload::DropOldest(max) = self.policy.overload else { return Err(packet) };
        self.backlog.push_back(packet);
        if self.backlog.len() <= max.max(1) {
            return Ok(None);
        }
        self.count_full();
        if let Some(slot) = self.inspectors.listeners().find(|slot| !ring::Listener::is_dead(*slot)) {
            ring::Listener::lose(slot, Loss::Oldest);
        }
        Ok(self.backlog.pop_front())
    }

    /// Puts a packet into the backlog, whatever the policy.
    pub fn force_backlog(&mut self, packet: PacketId) {
        self.backlog.push_back(packet);
    }

    /// Counts a copy that was not made for want of room.
    pub fn skip_copy(&mut self, meta: &Meta, cpu: u32) {
        self.lose_for_room(meta, cpu);
    }

    /// The oldest packet of the backlog.
    pub fn next_in_backlog(&self) -> Option<PacketId> {
        self.backlog.front().copied()
    }

    /// Removes the packet of [`next_in_backlog`](Self::next_in_backlog).
    pub fn pop_backlog(&mut self) {
        self.backlog.pop_front();
    }

    /// Collects verdicts, expired deadlines, and the frames of dead inspectors. Returns the number of frames. `now` is
    /// wall-clock time in nanoseconds. `admit` returns why a packet cannot have this replacement.
    pub fn poll(
        &mut self,
        now: u64,
        admit: &mut dyn FnMut(PacketId, &[u8]) -> Result<(), DropReason>,
        mut each: impl FnMut(PacketId, QueueVerdict<'_>),
    ) -> usize {
        let Self { inspectors, policy, broadcasts, flow_verdicts, stalled, stats, trouble, closed, .. } =
            self;
        let single = !matches!(policy.fanout, Fanout::Broadcast | Fanout::Mirror);
        let alive = inspectors.listeners().filter(|slot| !ring::Listener::is_dead(*slot)).count();
        let mut decided = 0;
        for slot in inspectors.listeners() {
            let others = alive - usize::from(!ring::Listener::is_dead(slot));
            let channel = slot.number();
            decided += slot.poll(now, policy, admit, &mut |waiter, decision| {
                stats.open -= 1;
                if matches!(decision, Err(DropReason::InspectorDied))
                    && others > 0
                    && single
                    && let Waiter::Packet(packet) = waiter
                {
                    stats.frames -= 1;
                    stats.redelivered += 1;
                    return each(packet, QueueVerdict::Redeliver);
                }
                *stalled &= decision.is_err();
                stats.count(&decision);
                let Waiter::Packet(packet) = waiter else { return };
                match broadcasts.get_mut(&packet) {
                    None => each(packet, packet_verdict(decision, policy.default, channel)),
                    Some(open) => {
                        if open.add(decision, policy.default) {
                            each(packet, packet_verdict(open.result(), DefaultVerdict::Drop, channel));
                            broadcasts.remove(&packet);
                        }
                    }
                }
            });
            if let Some(Detached { why, distrusted }) = slot.take_end() {
                let trouble = trouble.get_or_insert_default();
                if !trouble.is_empty() {
                    trouble.push_str("; ");
                }
                trouble.push_str(&why);
                closed.push(slot.account());
                if distrusted {
                    flow_verdicts.forget(channel);
                }
            }
        }
        decided
    }

    /// Wakes every inspector that sleeps.
    pub fn kick(&mut self) {
        self.inspectors.listeners().for_each(InspectorSlot::kick);
    }

    /// Wakes the inspectors that got frames since their last wake-up.
    pub fn announce(&mut self) {
        self.inspectors.listeners().filter(|slot| slot.is_unannounced()).for_each(InspectorSlot::kick);
    }

    /// Sleeps until [`poll`](Self::poll) may have something, a frame is overdue, or the time is `until`.
    pub fn wait(&mut self, now: u64, until: u64) {
        if let Some(slot) = self.inspectors.listeners().find(|slot| slot.open() > 0) {
            slot.wait(now, until);
        }
    }

    /// Asks the inspectors to signal their [`descriptors`](Self::descriptors) with the next verdict. Returns false if
    /// [`poll`](Self::poll) has something already. [`disarm`](Self::disarm) ends it.
    pub fn arm(&mut self) -> bool {
        self.inspectors.listeners().all(InspectorSlot::arm)
    }

    /// Ends [`arm`](Self::arm), and checks whether the inspectors are alive.
    pub fn disarm(&mut self) {
        self.inspectors.listeners().for_each(InspectorSlot::disarm);
    }

    /// Returns true if an inspector has frames and last ran on the CPU of the calling thread.
    pub fn shares_cpu(&mut self) -> bool {
        self.inspectors.listeners().any(|slot| slot.open() > 0 && slot.channel().shares_cpu())
    }

    /// The descriptors to poll for reading while armed.
    pub fn descriptors(&mut self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.inspectors.listeners().filter_map(|slot| slot.channel().descriptor())
    }

    /// When the oldest frame is overdue, in nanoseconds of the wall clock.
    pub fn deadline(&mut self) -> Option<u64> {
        self.inspectors.listeners().filter_map(|slot| slot.channel().deadline()).min()
    }

    /// The number of inspectors that have frames.
    pub fn busy(&mut self) -> usize {
        if self.stats.open == 0 {
            return 0;
        }
        self.inspectors.listeners().filter(|slot| slot.open() > 0).count()
    }

    /// The inspectors, detached ones included.
    pub fn inspectors(&mut self) -> impl Iterator<Item = &mut InspectorSlot<C>> {
        self.inspectors.listeners()
    }

    /// The inspectors' verdict for a flow. `new`: the packet begins a connection, which ends an earlier verdict.
    pub fn flow_verdict(&mut self, flow: &Flow, new: bool, now: Time) -> Option<FlowVerdict> {
        let verdict = self.flow_verdicts.find(flow, new, now)?;
        self.stats.by_flow += 1;
        Some(verdict)
    }

    /// Returns true if the queue has verdicts for flows.
    pub fn has_flow_verdicts(&self) -> bool {
        !self.flow_verdicts.is_empty()
    }

    /// Sets the verdict for a flow.
    pub fn set_flow_verdict(&mut self, flow: &Flow, verdict: FlowVerdict, now: Time) {
        self.flow_verdicts.insert(flow, verdict, now);
    }

    /// The verdicts for flows.
    pub fn flow_verdicts(&self) -> &FlowVerdictCache {
        &self.flow_verdicts
    }

    /// The queue's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// The queue's policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Frames that inspectors have now.
    pub fn open(&self) -> u64 {
        self.stats.open
    }

    /// The queue's counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    pub(crate) fn snapshot(&mut self, shares: &Shares) -> QueueSnapshot {
        let (held, no_room) = match self.account {
            Account::ENGINE => (Usage::default(), 0),
            account => shares.usage(account),
        };
        let stats = Stats { held: held.packets as u64, held_bytes: held.bytes as u64, no_room, ..self.stats };
        let attached = self.inspectors.listeners().filter(|slot| slot.detached().is_none());
        QueueSnapshot {
            number: self.number,
            inspectors: attached.count() as u64,
            stats,
            trouble: self.trouble.clone(),
        }
    }

    fn has_backlog(&self) -> bool {
        matches!(self.policy.overload, Overload::DropOldest(_))
    }
}

fn packet_verdict(
    decision: Result<Decision<'_>, DropReason>,
    default: DefaultVerdict,
    channel: u32,
) -> QueueVerdict<'_> {
    match decision {
        Ok(decision) => QueueVerdict::Decided(decision, channel),
        Err(reason) => QueueVerdict::Lost(default.drops(reason)),
    }
}
