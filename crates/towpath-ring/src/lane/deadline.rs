//! Deadlines of frames, without a timestamp per frame.
//!
//! What: each poll records a mark: "every number below n was published by now". The last few marks are kept. A frame
//! is overdue if a mark that covers it is older than the period. A frame is therefore overdue at most 17/16 of the period
//! after the first poll that follows its publication.

use std::collections::VecDeque;
use std::time::Duration;

use crate::shm::seq::Seq;

/// Marks per period.
const MARKS: u64 = 16;

#[derive(Debug)]
pub(crate) struct Deadline {
    period: u64,
    marks: VecDeque<(u64, Seq)>,
    /// Number of the last mark.
    marked: Seq,
    /// True if frames were published that no mark covers.
    unmarked: bool,
}

impl Deadline {
    pub(crate) fn new(period: Duration) -> Self {
        Self {
            period: u64::try_from(period.as_nanos()).unwrap_or(u64::MAX),
            marks: VecDeque::new(),
            marked: Seq::FIRST,
            unmarked: false,
        }
    }

    /// Records that every number below `published` was published by `now` (nanoseconds).
    pub(crate) fn mark(&mut self, now: u64, published: Seq) {
        let soon = |(at, _): &(u64, Seq)| now < at.saturating_add(self.period / MARKS);
        self.unmarked = published != self.marked && self.marks.back().is_some_and(soon);
        if published != self.marked && !self.unmarked {
            self.marks.push_back((now, published));
            self.marked = published;
        }
    }

    /// The number below which every frame is overdue at `now`, if it changed.
    pub(crate) fn overdue(&mut self, now: u64) -> Option<Seq> {
        let mut below = None;
        while let Some((at, seq)) = self.marks.front()
            && at.saturating_add(self.period) <= now
        {
            below = Some(*seq);
            self.marks.pop_front();
        }
        below
    }

    /// Time of the next due poll, in nanoseconds.
    pub(crate) fn next(&self) -> Option<u64> {
        let overdue = self.marks.front()?.0.saturating_add(self.period);
        let mark = self.marks.back()?.0.saturating_add(self.period / MARKS);
        Some(if self.unmarked { overdue.min(mark) } else { overdue })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn frames_are_overdue_after_the_period() {
        let mut d = Deadline::new(Duration::from_nanos(160));
        d.mark(0, Seq(3));
        d.mark(5, Seq(4)); // too soon after the previous mark
        d.mark(20, Seq(6));
        assert_eq!(d.overdue(159), None);
        d.mark(25, Seq(7));
        assert_eq!(d.next(), Some(30));
        d.mark(30, Seq(7));
        assert_eq!(d.overdue(160), Some(Seq(3)));
        assert_eq!(d.overdue(179), None);
        assert_eq!(d.next(), Some(180));
        assert_eq!(d.overdue(180), Some(Seq(6)));
        assert_eq!(d.overdue(190), Some(Seq(7)));
        assert_eq!(d.next(), None);
    }

    #[test]
    fn the_marks_are_bounded() {
        let mut d = Deadline::new(Duration::from_nanos(1600));
        for now in 0..100_000 {
            d.mark(now, Seq(now as u32));
            d.overdue(now);
            assert!(d.marks.len() <= MARKS as usize + 1);
        }
    }
}
