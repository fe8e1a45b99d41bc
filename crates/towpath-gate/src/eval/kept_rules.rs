//! The rules that two rulesets have in common, by content: set and text. Numbers do not count, because a line that is
//! added to an unnumbered file renumbers the rules below it.
//!
//! What: the longest common subsequence of both rulesets, after their common beginning and end. It is the longest
//! increasing subsequence of the pairs of equal rules (Hunt and Szymanski 1977), which takes n log n for rules that
//! are mostly different from each other. The rules that remain are paired by content in any order: they were moved.
//!
//! Bound: rules that are repeated n times in both rulesets make n^2 pairs. Above [`MAX_PAIRS`], each rule is paired
//! only with the rule that is the same repetition of its content, which is a common subsequence, if not always the
//! longest.

use std::collections::HashMap;
use std::hash::Hash;

use crate::rules::Rule;

/// Maximum number of pairs that are compared.
const MAX_PAIRS: usize = 1 << 20;

/// How a rule of a new ruleset relates to an old one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// The old ruleset does not have it.
    New,
    /// The old ruleset has it at this position, in the same order among the rules that are kept.
    Same(usize),
    /// The old ruleset has it at this position, in a different order relative to other rules.
    Moved(usize),
}

impl Kept {
    pub(super) fn old(self) -> Option<usize> {
        match self {
            Self::New => None,
            Self::Same(old) | Self::Moved(old) => Some(old),
        }
    }
}

/// The properties by which two rules are the same: set and text.
pub(super) fn content(rule: &Rule) -> (u8, String) {
    (rule.set, rule.to_string())
}

/// Relates each rule of `new` to a rule of `old`. No two rules are related to the same one.
pub(super) fn kept_rules<'r>(
    old: impl Iterator<Item = &'r Rule>,
    new: impl Iterator<Item = &'r Rule>,
) -> Vec<Kept> {
    let rows = |rule: &Rule| (content(rule), rule.number);
    kept(&old.map(rows).collect::<Vec<_>>(), &new.map(rows).collect::<Vec<_>>())
}

/// As [`kept_rules`], of contents and numbers.
pub(super) fn kept<C: Eq + Hash>(old: &[(C, u32)], new: &[(C, u32)]) -> Vec<Kept> {
    let mut tokens = HashMap::new();
    let mut token = |content| {
        let next = tokens.len() as u32;
        *tokens.entry(content).or_insert(next)
    };
    let old_tokens: Vec<u32> = old.iter().map(|(content, _)| token(content)).collect();
    let new_tokens: Vec<u32> = new.iter().map(|(content, _)| token(content)).collect();
    let mut kept = vec![Kept::New; new.len()];
    let mut taken = vec![false; old.len()];
    for (before, now) in common(&old_tokens, &new_tokens, MAX_PAIRS) {
        kept[now] = Kept::Same(before);
        taken[before] = true;
    }
    prefer_numbers((&old_tokens, old), (&new_tokens, new), &mut kept, &mut taken);
    let mut left: HashMap<u32, Vec<usize>> = HashMap::new();
    for (at, token) in old_tokens.iter().enumerate().rev().filter(|(at, _)| !taken[*at]) {
        left.entry(*token).or_default().push(at);
    }
    for (kept, token) in kept.iter_mut().zip(&new_tokens).filter(|(kept, _)| **kept == Kept::New) {
        if let Some(at) = left.get_mut(token).and_then(Vec::pop) {
            *kept = Kept::Moved(at);
        }
    }
    kept
}

type Rows<'a, C> = (&'a [u32], &'a [(C, u32)]);

/// Among neighbours with the same content, the rule with the same number is the same rule.
fn prefer_numbers<C>(
    (old_tokens, old): Rows<'_, C>,
    (new_tokens, new): Rows<'_, C>,
    kept: &mut [Kept],
    taken: &mut [bool],
) {
    for now in (0..kept.len()).rev() {
        let Kept::Same(before) = kept[now] else { continue };
        if old[before].1 == new[now].1 {
            continue;
        }
        let equal = |tokens: &[u32], at: usize| tokens.get(at) == Some(&old_tokens[before]);
        let free_old = (before + 1..).take_while(|at| equal(old_tokens, *at) && !taken[*at]);
        let free_new = (now + 1..).take_while(|at| equal(new_tokens, *at) && kept[*at] == Kept::New);
        if let Some(at) = free_old.clone().find(|at| old[*at].1 == new[now].1) {
            (taken[before], taken[at]) = (false, true);
            kept[now] = Kept::Same(at);
        } else if let Some(at) = free_new.clone().find(|at| old[before].1 == new[*at].1) {
            (kept[at], kept[now]) = (kept[now], Kept::New);
        }
    }
}

/// A common subsequence of both, as pairs of positions in order: the longest one, if it has at most `max_pairs` equal
/// pairs between the common beginning and end.
fn common(old: &[u32], new: &[u32], max_pairs: usize) -> Vec<(usize, usize)> {
    let head = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let tail = old[head..].iter().rev().zip(new[head..].iter().rev()).take_while(|(a, b)| a == b).count();
    let (old_end, new_end) = (old.len() - tail, new.len() - tail);
    let mut pairs: Vec<_> = (0..head).map(|at| (at, at)).collect();
    let inner = longest(&old[head..old_end], &new[head..new_end], max_pairs);
    pairs.extend(inner.into_iter().map(|(before, now)| (head + before, head + now)));
    pairs.extend((0..tail).map(|at| (old_end + at, new_end + at)));
    pairs
}

fn longest(old: &[u32], new: &[u32], max_pairs: usize) -> Vec<(usize, usize)> {
    let mut places: HashMap<u32, Vec<usize>> = HashMap::new();
    for (at, token) in old.iter().enumerate() {
        places.entry(*token).or_default().push(at);
    }
    let all: usize = new.iter().filter_map(|token| places.get(token)).map(Vec::len).sum();
    let mut seen: HashMap<u32, usize> = HashMap::new();
    // Each pair with the best pair before it; and for each length, the pair that ends there first.
    let mut pairs: Vec<(usize, usize, Option<usize>)> = Vec::new();
    let mut ends: Vec<usize> = Vec::new();
    for (now, token) in new.iter().enumerate() {
        let Some(at) = places.get(token) else { continue };
        let repetition = seen.entry(*token).or_default();
        let one = *repetition..(*repetition + 1).min(at.len());
        *repetition += 1;
        let at = if all <= max_pairs { &at[..] } else { at.get(one).unwrap_or_default() };
        // From the last one: no two pairs of one rule follow each other.
        for &before in at.iter().rev() {
            let length = ends.partition_point(|end| pairs[*end].0 < before);
            let pair = pairs.len();
            pairs.push((before, now, length.checked_sub(1).map(|shorter| ends[shorter])));
            match ends.get_mut(length) {
                Some(end) => *end = pair,
                None => ends.push(pair),
            }
        }
    }
    let mut chain: Vec<_> = std::iter::successors(ends.last().copied(), |pair| pairs[*pair].2)
        .map(|pair| (pairs[pair].0, pairs[pair].1))
        .collect();
    chain.reverse();
    chain
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length of the longest common subsequence, by the textbook.
    fn length(old: &[u32], new: &[u32]) -> usize {
        let mut rows = vec![vec![0; new.len() + 1]; old.len() + 1];
        for (i, a) in old.iter().enumerate() {
            for (j, b) in new.iter().enumerate() {
                rows[i + 1][j + 1] = if a == b { rows[i][j] + 1 } else { rows[i][j + 1].max(rows[i + 1][j]) };
            }
        }
        rows[old.len()][new.len()]
    }

    proptest::proptest! {
        #[test]
        fn it_is_common_and_the_longest(
            old in proptest::collection::vec(0..6_u32, 0..24),
            new in proptest::collection::vec(0..6_u32, 0..24),
        ) {
            for max_pairs in [usize::MAX, 0] {
                let pairs = common(&old, &new, max_pairs);
                assert!(pairs.iter().all(|(before, now)| old[*before] == new[*now]));
                assert!(pairs.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
                assert!(max_pairs == 0 || pairs.len() == length(&old, &new));
            }
        }
    }

    /// Rows: old rules, new rules (text, number), and what each new one is.
    #[test]
    fn rules_are_found_by_content() {
        use Kept::{Moved, New, Same};
        type Rules = &'static [(&'static str, u32)];
        let rows: [(Rules, Rules, &[Kept]); 7] = [
            (&[("a", 100), ("b", 200)], &[("x", 100), ("a", 200), ("b", 300)], &[New, Same(0), Same(1)]),
            (&[("a", 100), ("b", 200), ("c", 300)], &[("a", 100), ("c", 200)], &[Same(0), Same(2)]),
            (
                &[("a", 1), ("b", 2), ("c", 3), ("d", 4)],
                &[("d", 1), ("a", 2), ("b", 3), ("c", 4)],
                &[Moved(3), Same(0), Same(1), Same(2)],
            ),
            // Equal neighbours: the number decides.
            (&[("a", 100), ("a", 200)], &[("a", 200)], &[Same(1)]),
            (&[("a", 100), ("a", 200)], &[("a", 100)], &[Same(0)]),
            (&[("a", 200)], &[("a", 100), ("a", 200)], &[New, Same(0)]),
            (&[("a", 100), ("a", 200)], &[("a", 200), ("a", 300)], &[Same(0), Same(1)]),
        ];
        for (old, new, expected) in rows {
            let rules = |rules: Rules| -> Vec<_> {
                rules.iter().map(|(text, number)| ((0, (*text).to_owned()), *number)).collect()
            };
            assert_eq!(kept(&rules(old), &rules(new)), expected, "{old:?} {new:?}");
        }
    }

    /// A file of the maximum size, with an edit in the middle and rules that are all the same.
    #[test]
    fn large_files_take_bounded_work() {
        let mut new: Vec<u32> = (0..65_000).collect();
        let old = new.clone();
        new.splice(30_000..30_010, 70_000..70_100);
        assert_eq!(common(&old, &new, MAX_PAIRS).len(), 65_000 - 10);
        let mut same = vec![7; 65_000];
        same[0] = 1;
        let mut other = vec![7; 65_000];
        (other[0], other[64_999]) = (2, 3);
        assert_eq!(common(&same, &other, MAX_PAIRS).len(), 64_998);
    }
}
