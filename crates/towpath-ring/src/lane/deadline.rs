//! When frames are overdue, without a time for each of them.
//!
//! Each poll says "every number below n was out by now"; the last few such marks are kept. A frame is overdue when a
//! mark that covers it is older than the period. So a frame waits for the period and at most a sixteenth of it more,
//! plus the time from its publication to the next poll.

use std::collections::VecDeque;
use std::time::Duration;

use crate::shm::seq::Seq;

const MARKS: u64 = 16;

#[derive(Debug)]
pub(crate) struct Deadline {
    period: u64,
    marks: VecDeque<(u64, Seq)>,
    /// The last number that a mark was made for.
    marked: Seq,
    /// Numbers were given that no mark covers yet.
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

    /// Every number below `published` was out at `now` (nanoseconds).
    pub(crate) fn mark(&mut self, now: u64, published: Seq) {
        let soon = |(at, _): &(u64, Seq)| now < at.saturating_add(self.period / MARKS);
        self.unmarked = published != self.marked && self.marks.back().is_some_and(soon);
        if published != self.marked && !self.unmarked {
            self.marks.push_back((now, published));
            self.marked = published;
        }
    }

    /// The number below which everything is overdue at `now`, when that is news.
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

    /// When the next poll is due, in nanoseconds.
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
        d.mark(5, Seq(4)); // too soon for a mark of its own
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
