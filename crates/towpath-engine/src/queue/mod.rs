//! One queue: the frames that rules send to inspectors, and what came back.
//!
//! Several inspectors may serve one queue. Who gets a frame, and what becomes of one that finds no room, is
//! [`towpath_ring::Queue`]'s work; here is which packet waits for which frame.
//!
//! Invariant: `frames = passed + dropped + replaced + lost + held`, where held is what the inspectors have now; at the
//! end of a run held is 0. A frame is `lost` when no inspector decided it. A broadcast packet is one frame for each
//! inspector that got it. A packet that goes to another inspector because its first one died counts once.
//!
//! The channel to an inspector is behind a trait, so that what is here can be tested without a process.

mod broadcast;
mod inspector_slot;
pub mod parse;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;

use rustix::fd::BorrowedFd;
use towpath_gate::state::Flow;
use towpath_metrics::metrics;
use towpath_ring::{
    self as ring, ChannelStats, Credentials, Fanout, FrameOut, Geometry, Loss, Meta, Overload, ReserveError,
    Seq,
};
use towpath_wire::Time;

use self::broadcast::PendingBroadcast;
use self::inspector_slot::Waiter;
pub use self::inspector_slot::{InspectorSlot, VerdictStats};
use crate::QueueSnapshot;
use crate::flow_verdict::{FlowVerdict, FlowVerdictCache};
use crate::reorder::PacketId;

/// The link to one inspector process. Later frames have later sequence numbers.
pub trait Channel {
    /// Publishes one frame.
    ///
    /// # Errors
    /// There is no room for it now.
    fn publish(&mut self, frame: &[u8], meta: &Meta) -> Result<Seq, ReserveError>;

    /// Counts a frame that was meant for the inspector, and tells it.
    fn lose(&mut self, loss: Loss);

    /// Tells the inspector about what was published, if it sleeps.
    fn kick(&mut self);

    /// Gives each frame that was decided to `each`, once. Returns how many there were.
    fn poll(&mut self, now: u64, each: &mut dyn FnMut(Seq, Outcome<'_>)) -> usize;

    /// Sleeps until there may be something to poll for, a frame is overdue, or it is `until`. May return early.
    fn wait(&mut self, now: u64, until: u64);

    /// For event loops: asks the inspector to ring when it has decided something. False when there is something to poll
    /// for already.
    fn arm(&mut self) -> bool {
        true
    }

    /// No doorbells any more; and a look whether the inspector is still there.
    fn disarm(&mut self) {}

    /// Whether the inspector was last seen on the CPU of the calling thread: it decides nothing while that runs.
    fn shares_cpu(&self) -> bool {
        false
    }

    /// What to poll for reading while armed.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When the oldest frame is overdue, in nanoseconds of the wall clock.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// Frames that were decided without the inspector because they were overdue, and that it still has.
    fn unreturned(&self) -> u32;

    /// Whether the inspector is known to be gone: it gets no more frames.
    fn is_dead(&self) -> bool;

    /// Who is at the other end, and what the channel has done; nothing for one that has neither.
    fn about(&self) -> Option<About> {
        None
    }

    /// The frames that are not free.
    fn frames(&self) -> Vec<FrameOut> {
        Vec::new()
    }

    /// How the inspector went, once it has and every frame it had has come back through [`Channel::poll`].
    fn gone(&mut self) -> Option<Detached>;
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

    fn poll(&mut self, _now: u64, _each: &mut dyn FnMut(Seq, Outcome<'_>)) -> usize {
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

    fn gone(&mut self) -> Option<Detached> {
        match *self {}
    }
}

/// Who is at the other end of a channel, and what the channel has done.
#[derive(Clone, Debug)]
pub struct About {
    /// The process.
    pub peer: Credentials,
    /// What it calls itself.
    pub name: String,
    /// The ring towards it.
    pub geometry: Geometry,
    /// What the channel has done.
    pub stats: ChannelStats,
}

/// How an inspector went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detached {
    /// For people.
    pub why: String,
    /// It broke the protocol: nothing of what it said counts any more.
    pub distrusted: bool,
}

/// What came of a frame that an inspector had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// The inspector decided.
    Answer(Reply<'a>),
    /// It let the deadline pass.
    Overdue,
    /// What it said has no meaning.
    Garbage,
    /// It is gone.
    Orphan,
}

/// An inspector's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// Let it go on.
    Pass,
    /// Drop it.
    Drop,
    /// Drop it and tell the sender.
    Reject,
    /// Let it go on with these bytes in its place.
    Replace(&'a [u8]),
    /// Hand it to another queue.
    Queue(u16),
    /// Walk the rules again from the first.
    Repeat,
}

/// An inspector's verdict, and what goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// The verdict.
    pub answer: Answer<'a>,
    /// New bits of the mark, and which bits change.
    pub mark: (u32, u32),
    /// It is for the packet's flow from now on.
    pub flow: bool,
}

/// What becomes of a frame that no inspector decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefaultVerdict {
    /// Fail open.
    Pass,
    /// Fail closed.
    #[default]
    Drop,
}

/// How a queue treats its inspectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long an inspector may keep a frame, and how long one may wait for room, in nanoseconds of wall-clock time.
    pub deadline: u64,
    /// The verdict for frames that no inspector decides.
    pub default: DefaultVerdict,
    /// Which inspector gets a frame.
    pub fanout: Fanout,
    /// What becomes of a frame whose inspector has no room.
    pub overload: Overload,
    /// An inspector that has so many frames is overloaded ...
    pub high: u32,
    /// ... until it has so many or fewer.
    pub low: u32,
}

impl Policy {
    /// How frames are shared out among the inspectors.
    fn members(&self) -> ring::Policy {
        let overload = match self.overload {
            // The packets wait in the queue, where they can be named.
            Overload::DropOldest(_) => Overload::Block,
            other => other,
        };
        ring::Policy { fanout: self.fanout, overload, high: self.high, low: self.low }
    }
}

impl Default for Policy {
    /// One second, fail closed, by flow; a full ring makes the packet wait.
    fn default() -> Self {
        Self {
            deadline: 1_000_000_000,
            default: DefaultVerdict::Drop,
            fanout: Fanout::FlowHash,
            overload: Overload::Block,
            high: u32::MAX,
            low: u32::MAX,
        }
    }
}

/// What [`Queue::offer`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueue {
    /// An inspector has it, and its verdict will come.
    Held,
    /// Copies went out, and nobody waits for what is said of them.
    Copied,
    /// There is no room: wait for verdicts, then offer it again.
    Full,
    /// It was decided without an inspector.
    Lost(DefaultVerdict),
    /// The policy hands it to this queue.
    Queue(u16),
}

/// What became of a packet that was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided<'a> {
    /// This inspector decided (its channel's number).
    Answer(Reply<'a>, u32),
    /// Nobody did: the default verdict.
    Lost(DefaultVerdict),
    /// Its inspector is gone, and there are others. [`Queue::abandon`] if it is not offered again.
    Orphan,
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
        pub overdue: counter frames as "lost" (reason = "overdue"),
        /// Frames with an invalid verdict.
        pub garbage: counter frames as "lost" (reason = "garbage"),
        /// Frames of an inspector that died.
        pub died: counter frames as "lost" (reason = "died"),
        /// Frames for which the inspector had no room.
        pub overload: counter frames as "lost" (reason = "overload"),
        /// Frames for which there was no inspector.
        pub no_listener: counter frames as "lost" (reason = "no_listener"),
        /// Frames that the overload policy gave to another queue. They do not count here.
        pub handed_on: counter frames,
        /// Frames that were given to another inspector because theirs died. Each counts once.
        pub redelivered: counter frames,
        /// Packets decided by an earlier verdict for their flow. They are not frames of the queue.
        pub by_flow: counter packets,
        /// Frames that inspectors have now.
        pub open: gauge frames,
        /// Most frames that inspectors had at one time.
        pub high_water: gauge frames,
    }
}

impl Stats {
    /// Frames that no inspector decided.
    pub fn lost(&self) -> u64 {
        self.overdue + self.garbage + self.died + self.overload + self.no_listener
    }

    fn count(&mut self, outcome: &Outcome<'_>) {
        match outcome {
            Outcome::Answer(reply) => match reply.answer {
                Answer::Pass | Answer::Queue(_) | Answer::Repeat => self.passed += 1,
                Answer::Drop | Answer::Reject => self.dropped += 1,
                Answer::Replace(_) => self.replaced += 1,
            },
            Outcome::Overdue => self.overdue += 1,
            Outcome::Garbage => self.garbage += 1,
            Outcome::Orphan => self.died += 1,
        }
    }
}

/// Inspectors that are gone and still shown.
const GONE_MAX: usize = 16;

/// See the module's text.
#[derive(Debug)]
pub struct Queue<C> {
    members: ring::Queue<InspectorSlot<C>>,
    policy: Policy,
    /// Broadcast packets that have not heard from everybody.
    broadcasts: BTreeMap<PacketId, PendingBroadcast>,
    /// Packets that wait for room, oldest first ([`Overload::DropOldest`]).
    backlog: VecDeque<PacketId>,
    /// What inspectors said about flows.
    flows: FlowVerdictCache,
    /// A frame waited for room until its deadline: until an inspector answers again nobody waits for one.
    stalled: bool,
    number: u16,
    stats: Stats,
    /// Why inspectors were detached.
    trouble: Option<String>,
}

impl<C: Channel> Queue<C> {
    /// A queue that nobody serves yet: every frame is lost.
    pub fn new(number: u16, policy: Policy) -> Self {
        Self {
            members: ring::Queue::new(policy.members()),
            policy,
            broadcasts: BTreeMap::new(),
            backlog: VecDeque::new(),
            flows: FlowVerdictCache::default(),
            stalled: false,
            number,
            stats: Stats::default(),
            trouble: None,
        }
    }

    /// Another policy from now on. While there are inspectors only its default verdict changes: the rest is theirs, too.
    pub fn set_policy(&mut self, policy: Policy) {
        if self.members.listeners().next().is_none() && self.backlog.is_empty() {
            self.policy = policy;
            self.members = ring::Queue::new(policy.members());
        }
        self.policy.default = policy.default;
    }

    /// An inspector attaches; `number` names its channel.
    pub fn join(&mut self, number: u32, channel: C) {
        // Those that are gone are shown for a while; a queue that many come to and leave does not keep them all.
        let gone = self.members.listeners().filter(|listener| listener.gone().is_some()).count();
        let dying = self.members.listeners().filter(|l| ring::Listener::is_dead(*l)).count();
        if gone >= GONE_MAX && gone == dying {
            drop(self.members.take_dead());
        }
        self.members.join(InspectorSlot::new(number, channel));
    }

    /// Hands a frame over; it came on `cpu`. `id` names the packet that waits for the verdict; a copy has none.
    ///
    /// A frame counts once it is held or lost, not when the answer is `Full` or `Queue`.
    pub fn offer(&mut self, frame: &[u8], meta: &Meta, cpu: u32, now: u64, id: Option<PacketId>) -> Enqueue {
        let number = self.number;
        let meta = Meta { group: number.into(), ..*meta };
        let fanout = self.policy.fanout;
        match self.members.enqueue(frame, &meta, cpu) {
            ring::Enqueue::Sent(index, _) => {
                if let Some(listener) = self.members.listeners().nth(index) {
                    listener.name_newest(id, now);
                }
                self.hold(1)
            }
            ring::Enqueue::SentTo(copies) => {
                let id = id.filter(|_| fanout == Fanout::Broadcast);
                for listener in self.members.listeners() {
                    listener.name_newest(id, now);
                }
                if let Some(id) = id.filter(|_| copies > 1) {
                    self.broadcasts.insert(id, PendingBroadcast::new(copies));
                }
                self.hold(copies as u64);
                if id.is_some() { Enqueue::Held } else { Enqueue::Copied }
            }
            // A copy is not worth a place in the backlog.
            ring::Enqueue::Blocked if self.stalled || self.has_backlog() && id.is_none() => {
                self.lose_overload(&meta, cpu, self.policy.default)
            }
            ring::Enqueue::Blocked | ring::Enqueue::Backlogged => Enqueue::Full,
            ring::Enqueue::Verdict(ring::Verdict::Pass) => self.count_overload(DefaultVerdict::Pass),
            ring::Enqueue::Verdict(ring::Verdict::Queue(number)) => {
                self.stats.handed_on += 1;
                Enqueue::Queue(number)
            }
            ring::Enqueue::Lost | ring::Enqueue::Verdict(_) => self.count_overload(DefaultVerdict::Drop),
            ring::Enqueue::NoListener => {
                self.stats.no_listener += 1;
                self.count_lost(self.policy.default)
            }
        }
    }

    fn hold(&mut self, copies: u64) -> Enqueue {
        let counters = &mut self.stats;
        counters.frames += copies;
        counters.open += copies;
        counters.high_water = counters.high_water.max(counters.open);
        Enqueue::Held
    }

    /// Gives up on a frame that found no room within the deadline; from now on nobody waits for the inspectors until
    /// one answers again.
    pub fn give_up(&mut self, meta: &Meta, cpu: u32) -> DefaultVerdict {
        self.stalled = true;
        self.lose_overload(meta, cpu, self.policy.default);
        self.policy.default
    }

    /// Gives up on a frame whose inspector is gone.
    pub fn abandon(&mut self) -> DefaultVerdict {
        self.stats.died += 1;
        self.count_lost(self.policy.default);
        self.policy.default
    }

    /// Nothing is waited for any more: what inspectors have is overdue, what waits for room has found none, and the inspectors are
    /// let go. The caller decides about the packets.
    pub fn close(&mut self) {
        let open = std::mem::take(&mut self.stats.open);
        self.stats.overdue += open;
        for _ in 0..std::mem::take(&mut self.backlog).len() {
            self.count_overload(DefaultVerdict::Drop);
        }
        self.broadcasts.clear();
        self.members = ring::Queue::new(self.policy.members());
    }

    /// The packet waits in the queue's backlog, if the policy has one. Returns the packet that had to give way (counted
    /// as lost: drop it), or the packet back when there is no backlog.
    ///
    /// # Errors
    /// The packet back: this queue has no backlog.
    pub fn enqueue(&mut self, id: PacketId) -> Result<Option<PacketId>, PacketId> {
        let Overload::DropOldest(max) = self.policy.overload else { return Err(id) };
        self.backlog.push_back(id);
        if self.backlog.len() <= max.max(1) {
            return Ok(None);
        }
        self.count_overload(DefaultVerdict::Drop);
        if let Some(listener) = self.members.listeners().find(|l| !ring::Listener::is_dead(*l)) {
            ring::Listener::lose(listener, Loss::Oldest);
        }
        Ok(self.backlog.pop_front())
    }

    /// The packet waits in the queue's backlog, whatever the policy: nobody else waits for it there.
    pub fn put_off(&mut self, id: PacketId) {
        self.backlog.push_back(id);
    }

    /// A copy that finds no room is not made.
    pub fn skip(&mut self, meta: &Meta, cpu: u32) {
        self.lose_overload(meta, cpu, self.policy.default);
    }

    /// The packet that has waited longest in the backlog.
    pub fn next_in_backlog(&self) -> Option<PacketId> {
        self.backlog.front().copied()
    }

    /// The packet of [`next_in_backlog`](Self::next_in_backlog) waits no more.
    pub fn leave_backlog(&mut self) {
        self.backlog.pop_front();
    }

    /// Collects what was decided: verdicts, deadlines that passed, and all that inspectors had who are gone. Returns
    /// how many frames there were.
    ///
    /// `now` is wall-clock time in nanoseconds.
    pub fn poll(&mut self, now: u64, mut each: impl FnMut(PacketId, Decided<'_>)) -> usize {
        let Self { members, policy, broadcasts, flows, stalled, stats, trouble, .. } = self;
        let single = !matches!(policy.fanout, Fanout::Broadcast | Fanout::Mirror);
        let alive = members.listeners().filter(|l| !ring::Listener::is_dead(*l)).count();
        let mut decided = 0;
        for listener in members.listeners() {
            let others = alive - usize::from(!ring::Listener::is_dead(listener));
            let number = listener.number();
            decided += listener.poll(now, &mut |slot, outcome| {
                stats.open -= 1;
                if outcome == Outcome::Orphan
                    && others > 0
                    && single
                    && let Waiter::Packet(id) = slot
                {
                    stats.frames -= 1;
                    stats.redelivered += 1;
                    return each(id, Decided::Orphan);
                }
                *stalled &= !matches!(outcome, Outcome::Answer(_));
                stats.count(&outcome);
                let Waiter::Packet(id) = slot else { return };
                match broadcasts.get_mut(&id) {
                    None => each(id, decide(outcome, policy.default, number)),
                    Some(open) => {
                        if open.cast(outcome, policy.default) {
                            open.announce(|reply| each(id, Decided::Answer(reply, number)));
                            broadcasts.remove(&id);
                        }
                    }
                }
            });
            if let Some(Detached { why, distrusted }) = listener.take_end() {
                let trouble = trouble.get_or_insert_default();
                if !trouble.is_empty() {
                    trouble.push_str("; ");
                }
                trouble.push_str(&why);
                if distrusted {
                    flows.forget(number);
                }
            }
        }
        decided
    }

    /// Tells the inspectors about new frames, those that sleep.
    pub fn kick(&mut self) {
        self.members.listeners().for_each(InspectorSlot::kick);
    }

    /// Tells the inspectors that sleep, those for whom there are frames that nobody has told them about.
    pub fn announce(&mut self) {
        self.members.listeners().filter(|listener| listener.is_unannounced()).for_each(InspectorSlot::kick);
    }

    /// Sleeps until there may be something to poll for, a frame is overdue, or it is `until`.
    pub fn wait(&mut self, now: u64, until: u64) {
        if let Some(listener) = self.members.listeners().find(|listener| listener.open() > 0) {
            listener.wait(now, until);
        }
    }

    /// For event loops: asks the inspectors to ring when they have decided something. False when there is something to poll
    /// for already. [`Queue::disarm`] afterwards.
    pub fn arm(&mut self) -> bool {
        self.members.listeners().all(InspectorSlot::arm)
    }

    /// No doorbells any more.
    pub fn disarm(&mut self) {
        self.members.listeners().for_each(InspectorSlot::disarm);
    }

    /// Whether an inspector has frames and was last seen on the CPU of the calling thread.
    pub fn shares_cpu(&mut self) -> bool {
        self.members.listeners().any(|listener| listener.open() > 0 && listener.channel().shares_cpu())
    }

    /// What to poll for reading while armed.
    pub fn descriptors(&mut self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.members.listeners().filter_map(|listener| listener.channel().descriptor())
    }

    /// When something of it is overdue, in nanoseconds of the wall clock.
    pub fn deadline(&mut self) -> Option<u64> {
        self.members.listeners().filter_map(|listener| listener.channel().deadline()).min()
    }

    /// Inspectors that have frames now.
    pub fn busy(&mut self) -> usize {
        if self.stats.open == 0 {
            return 0;
        }
        self.members.listeners().filter(|listener| listener.open() > 0).count()
    }

    /// The inspectors, those that are gone included.
    pub fn listeners(&mut self) -> impl Iterator<Item = &mut InspectorSlot<C>> {
        self.members.listeners()
    }

    /// What an inspector said about the flow from then on, if one did.
    pub fn flow_verdict(&mut self, flow: &Flow, new: bool, now: Time) -> Option<FlowVerdict> {
        let flow_verdict = self.flows.find(flow, new, now)?;
        self.stats.by_flow += 1;
        Some(flow_verdict)
    }

    /// Whether inspectors said anything about flows.
    pub fn has_flow_verdicts(&self) -> bool {
        !self.flows.is_empty()
    }

    /// An inspector said this about the flow, from now on.
    pub fn rule(&mut self, flow: &Flow, flow_verdict: FlowVerdict, now: Time) {
        self.flows.insert(flow, flow_verdict, now);
    }

    /// What inspectors said about flows.
    pub fn flows(&self) -> &FlowVerdictCache {
        &self.flows
    }

    /// The queue's number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// How the queue treats its inspectors.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Frames that inspectors have now.
    pub fn open(&self) -> u64 {
        self.stats.open
    }

    /// What happened so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The queue as it is now.
    pub(crate) fn snapshot(&mut self) -> QueueSnapshot {
        let inspectors = self.members.listeners().filter(|listener| listener.gone().is_none()).count() as u64;
        QueueSnapshot { number: self.number, stats: self.stats, inspectors, trouble: self.trouble.clone() }
    }

    fn has_backlog(&self) -> bool {
        matches!(self.policy.overload, Overload::DropOldest(_))
    }

    fn lose_overload(&mut self, meta: &Meta, cpu: u32, verdict: DefaultVerdict) -> Enqueue {
        self.members.lose(Loss::NoRoom, meta, cpu);
        self.count_overload(verdict)
    }

    fn count_overload(&mut self, verdict: DefaultVerdict) -> Enqueue {
        self.stats.overload += 1;
        self.count_lost(verdict)
    }

    fn count_lost(&mut self, verdict: DefaultVerdict) -> Enqueue {
        self.stats.frames += 1;
        Enqueue::Lost(verdict)
    }
}

fn decide(outcome: Outcome<'_>, default: DefaultVerdict, number: u32) -> Decided<'_> {
    match outcome {
        Outcome::Answer(reply) => Decided::Answer(reply, number),
        Outcome::Overdue | Outcome::Garbage | Outcome::Orphan => Decided::Lost(default),
    }
}
