//! One inspector of a queue: the frames that it has, and which packets wait for them.

use std::collections::VecDeque;

use towpath_metrics::metrics;
use towpath_ring::{self as ring, FrameOut, Loss, Meta, ReserveError, Seq};

use super::{Answer, Channel, Detached, Outcome, Policy, Reply};
use crate::reorder::PacketId;
use crate::{ChannelSnapshot, FrameSnapshot, TraceSink};

/// Traces of one channel at a time.
const TAPS: usize = 8;

metrics! {
    /// Verdicts of one inspector, by kind.
    pub struct VerdictStats in "channel" {
        /// Passes, also to another queue and back to the rules.
        pub pass: counter frames as "verdicts" (verdict = "pass"),
        /// Drops.
        pub drop: counter frames as "verdicts" (verdict = "drop"),
        /// Rejects.
        pub reject: counter frames as "verdicts" (verdict = "reject"),
        /// Replaced payloads.
        pub replace: counter frames as "verdicts" (verdict = "replace"),
        /// Verdicts for the packet's flow.
        pub flow: counter frames as "flow_verdicts",
    }
}

/// Who waits for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// It was published just now.
    New,
    /// This packet waits for its verdict.
    Packet(PacketId),
    /// It is a copy: nobody waits.
    Copy,
    /// Nobody any more; or the number is not a packet's (a gap record's).
    Decided,
}

/// A frame that was handed over.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    waiter: Waiter,
    len: u32,
    /// When it was handed over, nanoseconds of the engine's wall clock.
    since: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct InspectorSlot<C> {
    number: u32,
    channel: C,
    /// Frames by sequence number: the front has `first`. Its front is never [`Waiter::Decided`].
    held: VecDeque<InFlight>,
    first: u32,
    /// Frames that it has now.
    open: u32,
    /// Frames were published since it was last told.
    unannounced: bool,
    gone: Option<Detached>,
    verdicts: VerdictStats,
    taps: Vec<Box<dyn TraceSink>>,
    /// It has been late once.
    late: bool,
    /// Its end was told.
    ended: bool,
}

impl<C: Channel> InspectorSlot<C> {
    pub(super) fn new(number: u32, channel: C) -> Self {
        Self {
            number,
            channel,
            held: VecDeque::new(),
            first: 0,
            open: 0,
            unannounced: false,
            gone: None,
            verdicts: VerdictStats::default(),
            taps: Vec::new(),
            late: false,
            ended: false,
        }
    }

    /// The channel's number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Frames that it has now.
    pub fn open(&self) -> u32 {
        self.open
    }

    /// The channel.
    pub fn channel(&self) -> &C {
        &self.channel
    }

    #[cfg(test)]
    pub(super) fn channel_mut(&mut self) -> &mut C {
        &mut self.channel
    }

    /// How it went, if it has.
    pub fn gone(&self) -> Option<&Detached> {
        self.gone.as_ref()
    }

    /// The channel at `now`.
    pub(crate) fn snapshot(&self, queue: u16, policy: Policy, now: u64) -> ChannelSnapshot {
        ChannelSnapshot {
            channel: self.number,
            queue,
            policy,
            gone: self.gone.as_ref().map(|gone| gone.why.clone()),
            open: self.open,
            oldest: self.held.front().map(|held| now.saturating_sub(held.since)),
            traces: self.taps.len() as u32,
            used: self.channel.frames().iter().map(|frame| frame.frames).sum(),
            verdicts: self.verdicts,
            about: self.channel.about(),
        }
    }

    /// The frames that are not free at `now`.
    pub(crate) fn frames(&self, now: u64) -> Vec<FrameSnapshot> {
        let frame_size = self.channel.about().map_or(0, |about| about.geometry.frame_size);
        let snapshot = |out: FrameOut| {
            let held = self.held.get(out.seq.0.wrapping_sub(self.first) as usize);
            let held = held.filter(|held| held.waiter != Waiter::Decided);
            let len = held.map(|held| held.len);
            let room = u64::from(out.frames) * u64::from(frame_size);
            let oneshot = len.is_some_and(|len| u64::from(len) > room);
            FrameSnapshot { out, len, age: held.map(|held| now.saturating_sub(held.since)), oneshot }
        };
        self.channel.frames().into_iter().map(snapshot).collect()
    }

    /// Copies what the inspector gets to `sink`. Returns false if the inspector is gone or traced too often.
    pub(crate) fn trace(&mut self, sink: Box<dyn TraceSink>) -> bool {
        self.taps.retain(|tap| !tap.is_over());
        if self.gone.is_some() || self.taps.len() >= TAPS {
            return false;
        }
        self.taps.push(sink);
        true
    }

    /// Says who waits for the frame that was published just now, if one was.
    pub(super) fn name_newest(&mut self, id: Option<PacketId>, now: u64) {
        if let Some(held) = self.held.back_mut()
            && held.waiter == Waiter::New
        {
            held.waiter = id.map_or(Waiter::Copy, Waiter::Packet);
            held.since = now;
        }
    }

    pub(super) fn poll(&mut self, now: u64, each: &mut dyn FnMut(Waiter, Outcome<'_>)) -> usize {
        let Self { channel, held, first, open, gone, late, verdicts, taps, .. } = self;
        if gone.is_some() {
            return 0;
        }
        let mut decided = 0;
        channel.poll(now, &mut |Seq(sequence), outcome| {
            let index = sequence.wrapping_sub(*first) as usize;
            let Some(held) = held.get_mut(index).filter(|held| held.waiter != Waiter::Decided) else {
                return debug_assert!(false, "frame {sequence} was decided twice");
            };
            let waiter = std::mem::replace(&mut held.waiter, Waiter::Decided);
            count(verdicts, &outcome);
            for tap in &mut *taps {
                tap.decided(Seq(sequence), now.saturating_sub(held.since), &outcome);
            }
            decided += 1;
            *open -= 1;
            *late |= outcome == Outcome::Overdue;
            each(waiter, outcome);
        });
        while let Some(InFlight { waiter: Waiter::Decided, .. }) = held.front() {
            held.pop_front();
            *first = first.wrapping_add(1);
        }
        taps.retain(|tap| !tap.is_over());
        *gone = channel.gone();
        if gone.is_some() {
            taps.clear();
        }
        debug_assert!(gone.is_none() || held.is_empty(), "every frame comes back before the channel goes");
        decided
    }

    /// How it went, once.
    pub(super) fn take_end(&mut self) -> Option<Detached> {
        let gone = self.gone.as_ref().filter(|_| !self.ended)?.clone();
        self.ended = true;
        Some(gone)
    }

    pub(super) fn is_unannounced(&self) -> bool {
        self.unannounced
    }

    pub(super) fn kick(&mut self) {
        self.unannounced = false;
        if self.gone.is_none() {
            self.channel.kick();
        }
    }

    pub(super) fn arm(&mut self) -> bool {
        self.gone.is_some() || self.channel.arm()
    }

    pub(super) fn disarm(&mut self) {
        if self.gone.is_none() {
            self.channel.disarm();
        }
    }

    pub(super) fn wait(&mut self, now: u64, until: u64) {
        self.channel.wait(now, until);
    }
}

impl<C: Channel> ring::Listener for InspectorSlot<C> {
    fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        let seq = self.channel.publish(bytes, meta)?;
        if self.held.is_empty() {
            self.first = seq.0;
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // Numbers between the last frame's and this one's are gap records'.
        while self.first.wrapping_add(self.held.len() as u32) != seq.0 {
            self.held.push_back(InFlight { waiter: Waiter::Decided, len: 0, since: 0 });
        }
        self.held.push_back(InFlight { waiter: Waiter::New, len, since: 0 });
        self.open += 1;
        self.unannounced = true;
        for tap in &mut self.taps {
            tap.given(seq, bytes, meta);
        }
        Ok(seq)
    }

    fn depth(&self) -> u32 {
        // What was overdue is decided, and yet it is with the inspector until that gives it back.
        if self.late { self.open + self.channel.unreturned() } else { self.open }
    }

    fn lose(&mut self, loss: Loss) {
        self.channel.lose(loss);
    }

    fn is_dead(&self) -> bool {
        self.gone.is_some() || self.channel.is_dead()
    }
}

fn count(verdicts: &mut VerdictStats, outcome: &Outcome<'_>) {
    let Outcome::Answer(Reply { answer, flow, .. }) = outcome else { return };
    verdicts.flow += u64::from(*flow);
    match answer {
        Answer::Pass | Answer::Queue(_) | Answer::Repeat => verdicts.pass += 1,
        Answer::Drop => verdicts.drop += 1,
        Answer::Reject => verdicts.reject += 1,
        Answer::Replace(_) => verdicts.replace += 1,
    }
}
