//! A set of batches of one process: ranges of their numbers, which begin at 1.

/// Maximum number of ranges of a set.
pub(crate) const MAX_RANGES: usize = 64;

/// The set. A range excludes its end. The ranges are in order, and do not touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Batches(Vec<(u64, u64)>);

impl Batches {
    /// All batches below `end`.
    pub(crate) fn below(end: u64) -> Self {
        Self::range(1, end)
    }

    /// Those from `from` to the one before `to`.
    pub(crate) fn range(from: u64, to: u64) -> Self {
        let mut batches = Self::default();
        batches.insert(from, to);
        batches
    }

    /// Adds the batches from `from` to the one before `to`. The caller bounds the set.
    pub(crate) fn insert(&mut self, from: u64, to: u64) {
        if from >= to {
            return;
        }
        let first = self.0.partition_point(|range| range.1 < from);
        let end = self.0.partition_point(|range| range.0 <= to);
        let (mut from, mut to) = (from, to);
        if first < end {
            (from, to) = (from.min(self.0[first].0), to.max(self.0[end - 1].1));
        }
        self.0.splice(first..end, [(from, to)]);
    }

    /// Adds those of another set. If there are too many ranges, the oldest gaps are taken as filled.
    pub(crate) fn add(&mut self, other: &Self) {
        other.0.iter().for_each(|(from, to)| self.insert(*from, *to));
        while self.0.len() > MAX_RANGES {
            self.insert(self.0[0].0, self.0[1].1);
        }
    }

    /// If there are too many ranges, the oldest ones are forgotten.
    pub(crate) fn bound(&mut self) {
        let more = self.0.len().saturating_sub(MAX_RANGES);
        self.0.drain(..more);
    }

    pub(crate) fn has(&self, from: u64, to: u64) -> bool {
        let at = self.0.partition_point(|range| range.1 < to);
        from >= to || self.0.get(at).is_some_and(|range| range.0 <= from)
    }

    pub(crate) fn includes(&self, other: &Self) -> bool {
        other.0.iter().all(|(from, to)| self.has(*from, *to))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_a_set(ranges in prop::collection::vec((0_u64..60, 0_u64..6), 0..40), probe in (0_u64..70, 0_u64..9)) {
            let (mut batches, mut model) = (Batches::default(), BTreeSet::new());
            for (from, length) in ranges {
                batches.insert(from, from + length);
                model.extend(from..from + length);
                prop_assert!(batches.0.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", batches);
            }
            prop_assert_eq!(batches.ranges().flat_map(|(from, to)| from..to).collect::<BTreeSet<_>>(), model.clone());
            let (from, to) = (probe.0, probe.0 + probe.1);
            prop_assert_eq!(batches.has(from, to), (from..to).all(|batch| model.contains(&batch)));
        }
    }

    #[test]
    fn a_set_is_bounded() {
        let many = MAX_RANGES as u64 + 3;
        let mut all = Batches::default();
        (1..=many).for_each(|at| all.insert(10 * at, 10 * at + 1));
        let mut forgets = all.clone();
        forgets.bound();
        assert_eq!((forgets.0.len(), forgets.0[0]), (MAX_RANGES, (40, 41)));
        let mut fills = Batches::default();
        fills.add(&all);
        assert_eq!((fills.0.len(), fills.0[0]), (MAX_RANGES, (10, 41)));
        assert!(fills.includes(&all) && !all.includes(&fills));
    }
}
