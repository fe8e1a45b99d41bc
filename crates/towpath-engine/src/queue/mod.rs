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
mod channel;
mod copy_budget;
mod inspector_slot;
pub mod parse;
mod policy;
mod ring_channel;
mod snapshot;
mod stats;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use rustix::fd::{BorrowedFd, OwnedFd};
use towpath_metrics::{Histogram, Kind, Metric, Unit};
use towpath_ring::{self as ring, Decision, Fanout, Loss, Meta, Overload, Verdict};
use towpath_wire::{Flow, Time};

use self::broadcast::PendingBroadcast;
pub use self::channel::{About, Channel, Detached};
use self::copy_budget::CopyBudget;
use self::inspector_slot::Waiter;
pub use self::inspector_slot::{Answers, InspectorSlot};
pub use self::policy::{DefaultVerdict, Policy};
pub use self::ring_channel::RingChannel;
pub use self::snapshot::{ChannelSnapshot, FrameSnapshot, QueueSnapshot};
pub use self::stats::{Stats, VerdictStats};
use crate::drop_reason::DropReason;
use crate::flow_verdict::{FlowVerdict, FlowVerdictCache};
use crate::inject::InjectBatch;
use crate::reorder::{Account, PacketId, Shares, Usage};
use crate::verdict_feed::Origin;

/// [`QueueSnapshot::verdict_time`].
pub const VERDICT_TIME: Metric = Metric {
    group: "queue",
    name: "verdict_time",
    stem: "verdict_time",
    kind: Kind::Histogram,
    unit: Unit::Nanoseconds,
    label: None,
    help: "Time from the publication of a frame to the reading of its verdict by the engine.",
    family_help: None,
};

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

/// Decides whether the reorder buffer takes a replacement of a packet.
type Admit<'a> = dyn FnMut(PacketId, &[u8]) -> Result<(), DropReason> + 'a;

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
    copies: CopyBudget,
    /// A frame waited for room until its deadline. No packet waits for room until an inspector decides again.
    no_wait: bool,
    /// The number of stalled inspectors.
    stalled: u32,
    /// The queue belongs to a live engine.
    live: bool,
    /// An inspector may send packets of its own.
    may_inject: bool,
    number: u16,
    /// Packets that no single inspector has are charged to it.
    account: Account,
    /// The accounts of detached inspectors, to be closed.
    closed: Vec<Account>,
    stats: Stats,
    /// Time from the publication of a frame to the reading of its verdict.
    verdict_time: Histogram,
    /// Why inspectors were detached.
    trouble: Option<String>,
    reports: Vec<AnswersReport>,
}

/// An inspector has stalled, or answers again.
#[derive(Clone, Debug)]
pub struct AnswersReport {
    /// The queue.
    pub queue: u16,
    /// The peer and the ring. `None` for a channel without them.
    pub about: Option<About>,
    /// What has changed.
    pub answers: Answers,
}

/// Reports that a queue keeps until they are taken.
const REPORTS: usize = 64;

impl<C: Channel> Queue<C> {
    /// A queue without inspectors: every frame is lost.
    pub fn new(number: u16, policy: Policy) -> Self {
        Self {
            inspectors: ring::Queue::new(policy.ring_policy()),
            policy,
            broadcasts: BTreeMap::new(),
            backlog: VecDeque::new(),
            flow_verdicts: FlowVerdictCache::default(),
            copies: CopyBudget::Unlimited,
            no_wait: false,
            stalled: 0,
            live: false,
            may_inject: false,
            reports: Vec::new(),
            number,
            account: Account::ENGINE,
            closed: Vec::new(),
            stats: Stats::default(),
            verdict_time: Histogram::default(),
            trouble: None,
        }
    }

    /// Sets the policy. If the queue has inspectors or a backlog, only the default verdict, `stall` and `may_queue` change. Verdicts for flows
    /// that name a queue which is no longer allowed end.
    pub fn set_policy(&mut self, policy: Policy) {
        self.flow_verdicts.retain(|verdict| policy.allows(verdict.verdict));
        if self.inspectors.listeners().next().is_none() && self.backlog.is_empty() {
            self.inspectors = ring::Queue::new(policy.ring_policy());
            self.policy = policy;
        } else {
            self.policy.default = policy.default;
            self.policy.stall = policy.stall;
            self.policy.may_queue = policy.may_queue;
        }
    }

    /// Attaches an inspector; `number` is the number of its channel.
    pub fn join(&mut self, number: u32, channel: C) {
        self.forget_detached();
        let slot = InspectorSlot::new(number, channel);
        self.may_inject |= slot.may_inject();
        self.inspectors.join(slot);
    }

    /// Attaches an inspector on standby. It takes over the flows of the next inspector that dies or stalls.
    pub fn join_standby(&mut self, number: u32, channel: C) {
        self.forget_detached();
        let slot = InspectorSlot::new(number, channel);
        self.may_inject |= slot.may_inject();
        self.inspectors.join_standby(slot);
    }

    fn forget_detached(&mut self) {
        // Detached inspectors are kept for introspection, up to a limit.
        let detached = self.inspectors.listeners().filter(|slot| slot.detached().is_some()).count();
        let dead = self.inspectors.listeners().filter(|slot| ring::Listener::is_dead(*slot)).count();
        if detached >= DETACHED_MAX && detached == dead {
            drop(self.inspectors.take_dead());
        }
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

    /// Begins a turn of a live engine: a queue makes at most 1,024 copies and 16 MiB of copies in each. Before the first turn, their
    /// number is not bounded.
    pub fn begin_turn(&mut self) {
        self.live = true;
        self.copies.renew();
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
        let to_all = matches!(fanout, Fanout::Broadcast | Fanout::Mirror);
        let charged = packet.is_some() && !to_all;
        if packet.is_none() || fanout == Fanout::Mirror {
            let live = self.inspectors.listeners().filter(|slot| !ring::Listener::is_dead(*slot)).count();
            let copies = if to_all { live } else { live.min(1) };
            if !self.copies.take(copies as u32, frame.len()) {
                return self.lose_copies(copies as u64, to_all, &meta, cpu);
            }
        }
        if self.stalled > 0 {
            self.probe(frame, &meta, now);
        }
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
            ring::Enqueue::Blocked if self.no_wait || self.has_backlog() && packet.is_none() => {
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

    /// Gives stalled inspectors a copy of the frame, to find out whether they answer.
    #[cold]
    fn probe(&mut self, frame: &[u8], meta: &Meta, now: u64) {
        let mut probes = 0;
        for slot in self.inspectors.listeners().filter(|slot| !ring::Listener::is_dead(*slot)) {
            if !slot.is_probe_due(now, &self.policy) {
                continue;
            }
            slot.set_in_share(true);
            if ring::Listener::send(slot, frame, meta).is_ok() {
                slot.set_waiter(None, now);
                probes += 1;
            }
        }
        self.stats.probes += probes;
        self.count_open(probes);
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

    /// The turn has no budget for these copies of a frame.
    fn lose_copies(&mut self, copies: u64, to_all: bool, meta: &Meta, cpu: u32) -> Enqueue {
        if to_all {
            let live = self.inspectors.listeners().filter(|slot| !ring::Listener::is_dead(*slot));
            live.for_each(|slot| ring::Listener::lose(slot, Loss::Limited));
        } else {
            self.inspectors.lose(Loss::Limited, meta, cpu);
        }
        self.stats.frames += copies;
        self.stats.copy_budget += copies;
        Enqueue::Lost(None)
    }

    fn lose_for_room(&mut self, meta: &Meta, cpu: u32) -> Enqueue {
        self.inspectors.lose(Loss::NoRoom, meta, cpu);
        self.count_full();
        Enqueue::Lost(self.policy.default.drops(DropReason::QueueFull))
    }

    /// Gives up on a frame that found no room within the deadline. Further frames do not wait for room until an inspector
    /// decides again. Returns why the packet is dropped, or `None` if it passes.
    pub fn give_up(&mut self, meta: &Meta, cpu: u32) -> Option<DropReason> {
        self.no_wait = true;
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

    /// Returns true while an inspector that lives has a frame, overdue ones included.
    pub fn has_frames(&mut self) -> bool {
        self.inspectors
            .listeners()
            .any(|slot| !ring::Listener::is_dead(&*slot) && slot.channel().has_frames())
    }

    /// Detaches the inspectors that have frames. Returns their number. The next [`poll`](Self::poll) returns undecided ones.
    pub fn detach_holders(&mut self) -> u64 {
        let mut count = 0;
        for slot in self.inspectors.listeners() {
            if !ring::Listener::is_dead(&*slot) && slot.channel().has_frames() {
                slot.channel_mut().detach();
                count += 1;
            }
        }
        count
    }

    /// Gives up all inspectors for another engine. Returns their sockets, in the order in which flows are divided among them.
    pub fn hand_over(&mut self) -> Vec<OwnedFd> {
        let sockets = self.inspectors.listeners().filter_map(|slot| slot.channel_mut().hand_over()).collect();
        let accounts = self.inspectors.listeners().map(|slot| slot.account());
        self.closed.extend(accounts.filter(|account| *account != Account::ENGINE));
        self.inspectors = ring::Queue::new(self.policy.ring_policy());
        sockets
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
        admit: &mut Admit<'_>,
        mut each: impl FnMut(PacketId, QueueVerdict<'_>),
    ) -> usize {
        let Self {
            inspectors,
            policy,
            broadcasts,
            flow_verdicts,
            no_wait,
            stats,
            verdict_time,
            trouble,
            closed,
            ..
        } = self;
        let (reports, number, lazy, mut changed) = (&mut self.reports, self.number, self.live, false);
        let single = !matches!(policy.fanout, Fanout::Broadcast | Fanout::Mirror);
        let alive = inspectors.listeners().filter(|slot| !ring::Listener::is_dead(*slot)).count();
        let mut decided = 0;
        for slot in inspectors.listeners() {
            let others = alive - usize::from(!ring::Listener::is_dead(slot));
            let channel = slot.number();
            decided +=
                slot.poll((now, lazy), (&*policy, &mut *verdict_time), admit, &mut |waiter, decision| {
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
                    *no_wait &= decision.is_err();
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
            if let Some(answers) = slot.take_answers() {
                changed = true;
                stats.stalls += u64::from(answers == Answers::Stalled);
                if reports.len() < REPORTS {
                    reports.push(AnswersReport { queue: number, about: slot.channel().about(), answers });
                }
            }
            if let Some(Detached { why, distrusted }) = slot.take_end() {
                changed = true;
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
        if changed {
            let stalled = |slot: &&mut InspectorSlot<C>| ring::Listener::is_stalled(*slot);
            self.stalled = self.inspectors.listeners().filter(stalled).count() as u32;
        }
        decided
    }

    /// Returns true if an inspector may send packets of its own.
    pub fn may_inject(&self) -> bool {
        self.may_inject
    }

    /// Collects the packets that inspectors send. The queue has the index `index`.
    pub(crate) fn poll_injected(&mut self, index: usize, into: &mut InjectBatch) {
        for slot in self.inspectors.listeners().filter(|slot| slot.may_inject()) {
            let (channel, account) = (slot.number(), slot.account());
            slot.poll_injected(&mut |header, bytes| into.push((index, channel), account, header, bytes));
        }
    }

    /// Counts a packet of the inspector on this channel.
    pub(crate) fn count_injected(&mut self, channel: u32, sent: bool) {
        if let Some(slot) = self.inspectors.listeners().find(|slot| slot.number() == channel) {
            slot.count_injected(sent);
        }
    }

    /// Takes the reports of inspectors that stalled or answer again.
    pub fn take_reports(&mut self) -> Vec<AnswersReport> {
        std::mem::take(&mut self.reports)
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
        // All of them: each continues its search, so that those with many frames do not keep the thread awake one after another.
        let mut quiet = true;
        self.inspectors.listeners().for_each(|slot| quiet &= slot.arm());
        quiet
    }

    /// Ends [`arm`](Self::arm), and checks whether the inspectors are alive.
    pub fn disarm(&mut self) {
        self.inspectors.listeners().for_each(InspectorSlot::disarm);
    }

    /// As [`disarm`](Self::disarm) for the inspectors whose descriptor is `ready`, in the order of [`descriptors`](Self::descriptors).
    /// Makes no system call for the others.
    pub fn disarm_ready(&mut self, ready: &mut impl Iterator<Item = bool>) {
        self.inspectors.listeners().for_each(|slot| slot.disarm_ready(ready));
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

    /// The inspectors' verdict for a flow. `new`: the packet begins a connection, which ends an earlier verdict. `origin`: the verdict is
    /// announced to flow offload.
    pub(crate) fn flow_verdict(
        &mut self,
        flow: &Flow,
        new: bool,
        now: Time,
        origin: Option<Origin<'_>>,
    ) -> Option<FlowVerdict> {
        let verdict = self.flow_verdicts.find_and_announce(flow, new, now, origin)?;
        self.stats.by_flow += 1;
        Some(verdict)
    }

    /// Returns true if the queue has verdicts for flows.
    pub fn has_flow_verdicts(&self) -> bool {
        !self.flow_verdicts.is_empty()
    }

    /// Sets the verdict for a flow. `origin`: a verdict that does not pass is announced to flow offload.
    pub(crate) fn set_flow_verdict(
        &mut self,
        flow: &Flow,
        verdict: FlowVerdict,
        now: Time,
        origin: Option<Origin<'_>>,
    ) {
        self.flow_verdicts.insert_and_announce(flow, verdict, now, origin);
    }

    /// Announces the verdict for a flow to flow offload.
    pub(crate) fn announce_flow_verdict(&mut self, flow: &Flow, now: Time, origin: Origin<'_>) {
        self.flow_verdicts.announce(flow, now, origin);
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
        let takeovers = self.inspectors.stats().takeovers;
        let stalled =
            self.inspectors.listeners().filter(|slot| ring::Listener::is_stalled(*slot)).count() as u64;
        let (held, held_bytes) = (held.packets as u64, held.bytes as u64);
        let stats = Stats { held, held_bytes, no_room, takeovers, stalled, ..self.stats };
        let attached = self.inspectors.listeners().filter(|slot| slot.detached().is_none());
        QueueSnapshot {
            number: self.number,
            inspectors: attached.count() as u64,
            stats,
            flow_verdicts: self.flow_verdicts.stats(),
            verdict_time: self.verdict_time,
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
