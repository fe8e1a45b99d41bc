//! One inspector of a queue: the frames that it has, and the packets that wait for them.

use std::collections::VecDeque;

use towpath_metrics::Histogram;
use towpath_ring::{self as ring, Decision, FrameOut, Header, Loss, Meta, ReserveError, Seq, Verdict};

use super::Admit;
use super::channel::{Channel, Detached};
use super::policy::Policy;
use super::snapshot::{ChannelSnapshot, FrameSnapshot};
use super::stats::VerdictStats;
use crate::drop_reason::DropReason;
use crate::reorder::{Account, PacketId};
use crate::trace::TraceSink;

/// Maximum number of traces of one channel.
const TRACES: usize = 8;

/// The waiter for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// The frame was just published; [`InspectorSlot::set_waiter`] follows.
    New,
    /// This packet waits for the verdict.
    Packet(PacketId),
    /// The frame is a copy. No packet waits.
    Copy,
    /// The frame is decided, or the sequence number belongs to a gap record.
    Decided,
}

/// Time between two polls of an inspector that has no frames, in nanoseconds: long enough for 24 idle inspectors to cost nothing.
const IDLE_POLL: u64 = 100_000_000;

/// The inspector has returned no frame since one was overdue.
#[derive(Clone, Copy, Debug)]
struct Silence {
    /// When the first frame was overdue, in nanoseconds of the engine's wall clock.
    since: u64,
    /// [`Channel::returned`] at that time.
    returned: u64,
    stalled: bool,
    /// The last frame that it got to find out whether it answers.
    probed: u64,
}

/// A change of an inspector's answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// It has stalled.
    Stalled,
    /// It has stalled and now returned a frame.
    Again,
}

/// A published frame.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    waiter: Waiter,
    len: u32,
    /// Time of publication in nanoseconds of the engine's wall clock.
    since: u64,
}

/// An inspector that serves a queue.
///
/// Sequence numbers are consecutive, so the frames in flight are a deque indexed by `seq - first`.
#[derive(Debug)]
pub struct InspectorSlot<C> {
    number: u32,
    channel: C,
    /// Frames by sequence number, from `first`. The front is never [`Waiter::Decided`].
    in_flight: VecDeque<InFlight>,
    first: u32,
    /// Undecided frames.
    open: u32,
    /// Frames were published since the last [`kick`](Self::kick).
    unannounced: bool,
    detached: Option<Detached>,
    verdicts: VerdictStats,
    traces: Vec<Box<dyn TraceSink>>,
    /// The inspector has exceeded a deadline.
    late: bool,
    silence: Option<Silence>,
    /// The last change that [`take_answers`](Self::take_answers) has not returned.
    answers: Option<Answers>,
    /// A frame was refused for want of room since the last poll.
    refused: bool,
    /// While the inspector has no frames, it is polled at this time.
    next_poll: u64,
    /// [`arm`](Self::arm) was called.
    armed: bool,
    /// Its packets in the reorder buffer are charged to it.
    account: Account,
    /// The account has room for the frame that is being published.
    in_share: bool,
    /// [`take_end`](Self::take_end) has returned the end.
    ended: bool,
    /// It may send packets of its own.
    may_inject: bool,
}

impl<C: Channel> InspectorSlot<C> {
    pub(super) fn new(number: u32, channel: C) -> Self {
        let may_inject = channel.may_inject();
        Self {
            number,
            channel,
            in_flight: VecDeque::new(),
            first: 0,
            open: 0,
            unannounced: false,
            detached: None,
            verdicts: VerdictStats::default(),
            traces: Vec::new(),
            late: false,
            silence: None,
            answers: None,
            refused: false,
            next_poll: 0,
            armed: false,
            account: Account::ENGINE,
            in_share: true,
            ended: false,
            may_inject,
        }
    }

    /// The channel's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The number of undecided frames.
    pub fn open(&self) -> u32 {
        self.open
    }

    /// The channel.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    pub(super) fn account(&self) -> Account {
        self.account
    }

    pub(super) fn set_account(&mut self, account: Account) {
        self.account = account;
    }

    /// Sets whether the account has room for the next frame.
    pub(super) fn set_in_share(&mut self, in_share: bool) {
        self.in_share = in_share;
    }

    pub(super) fn channel_mut(&mut self) -> &mut C {
        &mut self.channel
    }

    /// How the inspector was detached, if it was.
    pub fn detached(&self) -> Option<&Detached> {
        self.detached.as_ref()
    }

    pub(crate) fn snapshot(&self, queue: u16, policy: &Policy, now: u64) -> ChannelSnapshot {
        ChannelSnapshot {
            channel: self.number,
            queue,
            policy: policy.clone(),
            gone: self.detached.as_ref().map(|detached| detached.why.clone()),
            open: self.open,
            oldest: self.in_flight.front().map(|frame| now.saturating_sub(frame.since)),
            traces: self.traces.len() as u32,
            used: self.channel.frames().iter().map(|frame| frame.frames).sum(),
            verdicts: self.verdicts,
            about: self.channel.about(),
        }
    }

    pub(crate) fn frames(&self, now: u64) -> Vec<FrameSnapshot> {
        let frame_size = self.channel.about().map_or(0, |about| about.geometry.frame_size);
        let snapshot = |out: FrameOut| {
            let frame = self.in_flight.get(out.seq.0.wrapping_sub(self.first) as usize);
            let frame = frame.filter(|frame| frame.waiter != Waiter::Decided);
            let len = frame.map(|frame| frame.len);
            let room = u64::from(out.frames) * u64::from(frame_size);
            let oneshot = len.is_some_and(|len| u64::from(len) > room);
            FrameSnapshot { out, len, age: frame.map(|frame| now.saturating_sub(frame.since)), oneshot }
        };
        self.channel.frames().into_iter().map(snapshot).collect()
    }

    /// Copies the frames to `sink`. Returns false if the inspector is detached or has [`TRACES`] traces.
    pub(crate) fn trace(&mut self, sink: Box<dyn TraceSink>) -> bool {
        self.traces.retain(|trace| !trace.is_over());
        let room = self.detached.is_none() && self.traces.len() < TRACES;
        if room {
            self.traces.push(sink);
        }
        room
    }

    /// Sets the waiter of the frame that was just published, if one was. `None`: the frame is a copy.
    pub(super) fn set_waiter(&mut self, packet: Option<PacketId>, now: u64) {
        if let Some(frame) = self.in_flight.back_mut()
            && frame.waiter == Waiter::New
        {
            frame.waiter = packet.map_or(Waiter::Copy, Waiter::Packet);
            frame.since = now;
        }
    }

    /// Passes each decided frame to `each`. A verdict that `policy` does not allow ([`Policy::may_queue`]) is invalid. `admit` decides
    /// about replacements. `times` counts the time to each verdict. A `lazy` poll omits an inspector that has no frames, except every 100 ms.
    pub(super) fn poll(
        &mut self,
        (now, lazy): (u64, bool),
        (policy, times): (&Policy, &mut Histogram),
        admit: &mut Admit<'_>,
        each: &mut dyn FnMut(Waiter, Result<Decision<'_>, DropReason>),
    ) -> usize {
        if self.detached.is_some() || lazy && self.is_idle() && now < self.next_poll {
            return 0;
        }
        self.next_poll = now.saturating_add(IDLE_POLL);
        let Self { channel, in_flight, first, open, detached, late, verdicts, traces, .. } = self;
        let (mut decided, mut missed, mut returned) = (0, false, false);
        channel.poll(now, &mut |Seq(seq), decision| {
            let index = seq.wrapping_sub(*first) as usize;
            let Some(frame) = in_flight.get_mut(index).filter(|frame| frame.waiter != Waiter::Decided) else {
                return debug_assert!(false, "frame {seq} was decided twice");
            };
            let waiter = std::mem::replace(&mut frame.waiter, Waiter::Decided);
            let decision = decision.and_then(|decision| match (decision.verdict, waiter) {
                (verdict, _) if !policy.allows(verdict) => {
                    verdicts.forbidden_queue += 1;
                    Err(DropReason::InvalidVerdict)
                }
                (Verdict::Replace(bytes), Waiter::Packet(packet)) => admit(packet, bytes).map(|()| decision),
                _ => Ok(decision),
            });
            match &decision {
                Ok(decision) => verdicts.count(decision),
                Err(DropReason::ReplaceLimit) => verdicts.over_share += 1,
                Err(DropReason::TooLong) => verdicts.too_long += 1,
                Err(_) => {}
            }
            let decision = decision.map_err(|reason| match reason {
                DropReason::TooLong => DropReason::InvalidVerdict,
                other => other,
            });
            for trace in &mut *traces {
                trace.decided(Seq(seq), now.saturating_sub(frame.since), &decision);
            }
            decided += 1;
            *open -= 1;
            if decision.is_ok() {
                times.add(now.saturating_sub(frame.since));
            }
            let overdue = matches!(decision, Err(DropReason::Overdue));
            *late |= overdue;
            // A copy needs no verdict.
            missed |= overdue && matches!(waiter, Waiter::Packet(_));
            returned |= !matches!(decision, Err(DropReason::Overdue | DropReason::InspectorDied));
            each(waiter, decision);
        });
        while let Some(InFlight { waiter: Waiter::Decided, .. }) = in_flight.front() {
            in_flight.pop_front();
            *first = first.wrapping_add(1);
        }
        traces.retain(|trace| !trace.is_over());
        *detached = channel.detached();
        if detached.is_some() {
            traces.clear();
        }
        debug_assert!(
            detached.is_none() || in_flight.is_empty(),
            "a channel returns every frame before its end"
        );
        if missed || self.silence.is_some() {
            self.note_answers(now, policy, missed, returned);
        }
        decided
    }

    /// Passes the packets that the inspector sends to `each`.
    pub(super) fn poll_injected(&mut self, each: &mut dyn FnMut(&Header, &[u8])) {
        if self.may_inject && self.detached.is_none() {
            self.channel.poll_injected(each);
        }
    }

    #[cfg(test)]
    pub(crate) fn verdicts(&self) -> VerdictStats {
        self.verdicts
    }

    pub(super) fn may_inject(&self) -> bool {
        self.may_inject
    }

    pub(super) fn count_injected(&mut self, sent: bool) {
        self.verdicts.injected += u64::from(sent);
        self.verdicts.not_injected += u64::from(!sent);
    }

    /// Begins or ends the silence of the inspector, or finds that it has stalled: it returned nothing for the policy's time, and a
    /// frame that it should have got meanwhile is overdue too, or had no room.
    #[cold]
    fn note_answers(&mut self, now: u64, policy: &Policy, missed: bool, returned: bool) {
        let missed = missed | std::mem::take(&mut self.refused);
        if self.detached.is_some() {
            self.silence = None;
            return;
        }
        let all = self.channel.returned();
        let silence =
            *self.silence.get_or_insert(Silence { since: now, returned: all, stalled: false, probed: now });
        if returned || all != silence.returned {
            self.silence = None;
            self.answers = silence.stalled.then_some(Answers::Again).or(self.answers);
        } else if missed
            && !silence.stalled
            && now.saturating_sub(silence.since).saturating_add(policy.deadline) >= policy.stall
        {
            self.silence = Some(Silence { stalled: true, probed: now, ..silence });
            self.answers = Some(Answers::Stalled);
        }
    }

    /// Returns the last change of the inspector's answers, once.
    pub(super) fn take_answers(&mut self) -> Option<Answers> {
        self.answers.take()
    }

    /// Returns true if a stalled inspector gets a copy of the next frame: one in each period of the policy's `stall`, and only if it
    /// has no other.
    pub(super) fn is_probe_due(&mut self, now: u64, policy: &Policy) -> bool {
        let open = self.open;
        match &mut self.silence {
            Some(silence)
                if silence.stalled && open == 0 && now.saturating_sub(silence.probed) >= policy.stall =>
            {
                silence.probed = now;
                true
            }
            _ => false,
        }
    }

    /// Returns true if the inspector has nothing to return or to send.
    fn is_idle(&self) -> bool {
        let owes = self.may_inject
            || self.open > 0
            || self.silence.is_some()
            || self.late && self.channel.unreturned() > 0;
        !owes && !self.channel.is_dead()
    }

    /// Returns how the inspector was detached, once.
    pub(super) fn take_end(&mut self) -> Option<Detached> {
        let detached = self.detached.as_ref().filter(|_| !self.ended)?.clone();
        self.ended = true;
        Some(detached)
    }

    pub(super) fn is_unannounced(&self) -> bool {
        self.unannounced
    }

    /// Wakes the inspector if it sleeps.
    pub(super) fn kick(&mut self) {
        if self.detached.is_none() {
            self.channel.kick();
        }
        self.unannounced = self.channel.has_losses();
    }

    /// An inspector that has nothing to return is not asked to signal.
    pub(super) fn arm(&mut self) -> bool {
        if self.detached.is_some() || self.is_idle() {
            return true;
        }
        self.armed = true;
        self.channel.arm()
    }

    /// Ends [`arm`](Self::arm), and checks whether the inspector is alive. The next poll is not omitted.
    pub(super) fn disarm(&mut self) {
        (self.armed, self.next_poll) = (false, 0);
        if self.detached.is_none() {
            self.channel.disarm();
        }
    }

    /// Takes a value of `ready` if the inspector has a descriptor. Makes no system call if it is neither ready nor armed.
    pub(super) fn disarm_ready(&mut self, ready: &mut impl Iterator<Item = bool>) {
        let is_ready = match self.channel.descriptor() {
            Some(_) => ready.next().unwrap_or(true),
            None => self.armed,
        };
        if is_ready {
            self.disarm();
        } else if self.armed && self.detached.is_none() {
            (self.armed, self.next_poll) = (false, 0);
            self.channel.disarm_unready();
        }
    }

    pub(super) fn wait(&mut self, now: u64, until: u64) {
        self.channel.wait(now, until);
    }
}

impl<C: Channel> ring::Listener for InspectorSlot<C> {
    fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        if !self.in_share {
            return Err(ReserveError::RingFull);
        }
        let seq = self.channel.publish(bytes, meta)?;
        if self.in_flight.is_empty() {
            self.first = seq.0;
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // Sequence numbers between the last frame's and this one's belong to gap records.
        while self.first.wrapping_add(self.in_flight.len() as u32) != seq.0 {
            self.in_flight.push_back(InFlight { waiter: Waiter::Decided, len: 0, since: 0 });
        }
        self.in_flight.push_back(InFlight { waiter: Waiter::New, len, since: 0 });
        self.open += 1;
        self.unannounced = true;
        for trace in &mut self.traces {
            trace.given(seq, bytes, meta);
        }
        Ok(seq)
    }

    fn depth(&self) -> u32 {
        // The inspector still has overdue frames, although they are decided.
        if self.late { self.open + self.channel.unreturned() } else { self.open }
    }

    fn lose(&mut self, loss: Loss) {
        self.channel.lose(loss);
        self.unannounced = true;
    }

    fn is_dead(&self) -> bool {
        self.detached.is_some() || self.channel.is_dead()
    }

    fn is_stalled(&self) -> bool {
        self.silence.is_some_and(|silence| silence.stalled)
    }

    fn refused(&mut self) {
        self.refused = true;
    }
}
