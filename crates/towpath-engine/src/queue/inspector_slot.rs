//! One inspector of a queue: the frames that it has, and the packets that wait for them.

use std::collections::VecDeque;

use towpath_ring::{self as ring, Decision, FrameOut, Loss, Meta, ReserveError, Seq, Verdict};

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
    /// Its packets in the reorder buffer are charged to it.
    account: Account,
    /// The account has room for the frame that is being published.
    in_share: bool,
    /// [`take_end`](Self::take_end) has returned the end.
    ended: bool,
}

impl<C: Channel> InspectorSlot<C> {
    pub(super) fn new(number: u32, channel: C) -> Self {
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
            account: Account::ENGINE,
            in_share: true,
            ended: false,
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

    #[cfg(test)]
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
    /// about replacements.
    pub(super) fn poll(
        &mut self,
        now: u64,
        policy: &Policy,
        admit: &mut Admit<'_>,
        each: &mut dyn FnMut(Waiter, Result<Decision<'_>, DropReason>),
    ) -> usize {
        let Self { channel, in_flight, first, open, detached, late, verdicts, traces, .. } = self;
        if detached.is_some() {
            return 0;
        }
        let mut decided = 0;
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
            *late |= matches!(decision, Err(DropReason::Overdue));
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
        decided
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

    pub(super) fn kick(&mut self) {
        self.unannounced = false;
        if self.detached.is_none() {
            self.channel.kick();
        }
    }

    pub(super) fn arm(&mut self) -> bool {
        self.detached.is_some() || self.channel.arm()
    }

    pub(super) fn disarm(&mut self) {
        if self.detached.is_none() {
            self.channel.disarm();
        }
    }

    /// Takes a value of `ready` if the inspector has a descriptor.
    pub(super) fn disarm_ready(&mut self, ready: &mut impl Iterator<Item = bool>) {
        let is_ready = self.channel.descriptor().is_none() || ready.next().unwrap_or(true);
        if is_ready {
            self.disarm();
        } else if self.detached.is_none() {
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
    }

    fn is_dead(&self) -> bool {
        self.detached.is_some() || self.channel.is_dead()
    }
}
