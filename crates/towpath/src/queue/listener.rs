//! One inspector of a queue: the frames that it has, and which packets wait for them.

use std::collections::VecDeque;

use towpath_ring::{self as ring, Full, Loss, Meta, Seq};

use super::{Channel, Gone, Outcome};
use crate::window::Ticket;

/// Who waits for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// It was published just now.
    New,
    /// This packet waits for its verdict.
    Packet(Ticket),
    /// It is a copy: nobody waits.
    Copy,
    /// Nobody any more; or the number is not a packet's (a gap record's).
    Decided,
}

/// A frame that was handed over.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: Slot,
    len: u32,
    /// When it was handed over, nanoseconds of the engine's wall clock.
    since: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Listener<C> {
    number: u32,
    channel: C,
    /// Frames by sequence number: the front has `first`. Its front is never [`Slot::Decided`].
    held: VecDeque<Held>,
    first: u32,
    /// Frames that it has now.
    open: u32,
    gone: Option<Gone>,
    /// It has been late once.
    late: bool,
    /// Its end was told.
    ended: bool,
}

impl<C: Channel> Listener<C> {
    pub(super) fn new(number: u32, channel: C) -> Self {
        Self {
            number,
            channel,
            held: VecDeque::new(),
            first: 0,
            open: 0,
            gone: None,
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
    pub fn gone(&self) -> Option<&Gone> {
        self.gone.as_ref()
    }

    /// Of an undecided frame: how many bytes it has, and when it was handed over.
    pub fn frame(&self, Seq(sequence): Seq) -> Option<(u32, u64)> {
        let held = self.held.get(sequence.wrapping_sub(self.first) as usize)?;
        (held.slot != Slot::Decided).then_some((held.len, held.since))
    }

    /// When the oldest frame that it has was handed over.
    pub fn oldest(&self) -> Option<u64> {
        self.held.front().map(|held| held.since)
    }

    /// Says who waits for the frame that was published just now, if one was.
    pub(super) fn name_newest(&mut self, ticket: Option<Ticket>, now: u64) {
        if let Some(held) = self.held.back_mut()
            && held.slot == Slot::New
        {
            held.slot = ticket.map_or(Slot::Copy, Slot::Packet);
            held.since = now;
        }
    }

    pub(super) fn poll(&mut self, now: u64, each: &mut dyn FnMut(Slot, Outcome<'_>)) -> usize {
        let Self { channel, held, first, open, gone, late, .. } = self;
        if gone.is_some() {
            return 0;
        }
        let mut decided = 0;
        channel.poll(now, &mut |Seq(sequence), outcome| {
            let index = sequence.wrapping_sub(*first) as usize;
            let slot = held
                .get_mut(index)
                .map_or(Slot::Decided, |held| std::mem::replace(&mut held.slot, Slot::Decided));
            if slot == Slot::Decided {
                return debug_assert!(false, "frame {sequence} was decided twice");
            }
            decided += 1;
            *open -= 1;
            *late |= outcome == Outcome::Overdue;
            each(slot, outcome);
        });
        while let Some(Held { slot: Slot::Decided, .. }) = held.front() {
            held.pop_front();
            *first = first.wrapping_add(1);
        }
        *gone = channel.gone();
        debug_assert!(gone.is_none() || held.is_empty(), "every frame comes back before the channel goes");
        decided
    }

    /// How it went, once.
    pub(super) fn take_end(&mut self) -> Option<Gone> {
        let gone = self.gone.as_ref().filter(|_| !self.ended)?.clone();
        self.ended = true;
        Some(gone)
    }

    pub(super) fn kick(&mut self) {
        if self.gone.is_none() {
            self.channel.kick();
        }
    }

    pub(super) fn wait(&mut self, now: u64, until: u64) {
        self.channel.wait(now, until);
    }
}

impl<C: Channel> ring::Listener for Listener<C> {
    fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, Full> {
        let seq = self.channel.publish(bytes, meta)?;
        if self.held.is_empty() {
            self.first = seq.0;
        }
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        // Numbers between the last frame's and this one's are gap records'.
        while self.first.wrapping_add(self.held.len() as u32) != seq.0 {
            self.held.push_back(Held { slot: Slot::Decided, len: 0, since: 0 });
        }
        self.held.push_back(Held { slot: Slot::New, len, since: 0 });
        self.open += 1;
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
