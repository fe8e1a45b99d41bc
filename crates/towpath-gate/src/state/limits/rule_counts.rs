//! The number of states of each rule, and the rules whose states were removed.
//!
//! What: each rule has a generation, and a state records the generation that it was made in. Removing the states of a rule
//! starts its next generation. The states of earlier generations are stale from that moment on: no lookup accepts them
//! ([`RemovedRules`] lists the rules to check), and the sweep unlinks them slot by slot.
//!
//! Invariant: a state of an earlier generation counts in `stale` until it is unlinked. One read-modify-write counts a state
//! and reads its generation. So when `stale` is zero, no such state exists and none is being made. Generation numbers repeat
//! after [`GENERATIONS`] generations; before that, a full sweep unlinks all stale states.
//!
//! The count of a rule is in stripes: workers with different stripes write different cache lines. The sum of the stripes is the count;
//! a stripe alone may be negative, if its workers unlink states that others made. Each stripe has the generation. The next
//! generation starts in stripe 0, then in the others: stripe 0 has the newest generation.
//!
//! Races: a worker makes a state of a rule (A: add one to `current`, read the generation) while another removes the rule's
//! states (B: start the next generation, move the count to `stale`). If A comes first, B counts the state as stale, and its
//! generation is the old one. If B comes first, A reads the new generation. Between the two steps of B, the state may be
//! unlinked: `stale` is decremented first and wraps around below zero for a moment, which [`RuleCount::has_stale`] takes for
//! "there are stale states". While B has reached some stripes only, a worker may unlink a state of a newer generation than that of
//! its stripe: it counts in stripe 0.

use std::sync::{Arc, Mutex};

use hashbrown::HashMap;

use crate::state::RuleId;
use crate::state::concurrent::sync::{Apart, AtomicU64, Ordering};
use crate::state::table::entry::Header;
use crate::state::table::family::locked;

/// Position of the generation above the count of states.
const GENERATION: u32 = 56;
const COUNT: u64 = (1 << GENERATION) - 1;
/// The count of a stripe without states: it never falls below zero.
const ZERO: u64 = 1 << (GENERATION - 1);

/// Stripes of a rule's count.
#[cfg(not(loom))]
const STRIPES: usize = 4;
#[cfg(loom)]
const STRIPES: usize = 2;

/// Distinct generation numbers.
const GENERATIONS: u32 = 1 << (u64::BITS - GENERATION);

/// The counts of all rules that have, or had, states.
#[derive(Debug, Default)]
pub(crate) struct RuleCounts {
    rules: Mutex<HashMap<RuleId, Arc<RuleCount>>>,
    /// The rules with stale states. Locked before `rules` where both are.
    removed: Mutex<Arc<RemovedRules>>,
}

/// The count of one rule.
#[derive(Debug)]
struct RuleCount {
    /// In each stripe: the generation, and [`ZERO`] plus the number of its states.
    current: [Apart<AtomicU64>; STRIPES],
    /// The number of states of earlier generations, modulo 2^64.
    stale: AtomicU64,
}

/// The rules with stale states, sorted.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemovedRules(Vec<RemovedRule>);

#[derive(Clone, Debug)]
struct RemovedRule {
    rule: RuleId,
    count: Arc<RuleCount>,
    /// Generations started since the rule had no stale state.
    generations: u32,
}

/// The counts that one worker used last: most installs take no lock to find theirs.
#[derive(Debug, Default)]
pub(crate) struct RuleCountCache {
    stripe: usize,
    rules: [Option<(RuleId, Arc<RuleCount>)>; CACHED],
}

const CACHED: usize = 16;

impl RuleCount {
    fn new() -> Self {
        Self { current: std::array::from_fn(|_| Apart(AtomicU64::new(ZERO))), stale: AtomicU64::new(0) }
    }

    #[inline]
    fn generation(&self) -> u8 {
        // Relaxed: a worker that sees a state of this generation has acquired it from its maker, which has seen the generation.
        (self.current[0].load(Ordering::Relaxed) >> GENERATION) as u8
    }

    fn states(&self) -> u64 {
        let count = |stripe: &Apart<AtomicU64>| (stripe.load(Ordering::Relaxed) & COUNT).wrapping_sub(ZERO);
        let states = self.current.iter().map(count).fold(0, u64::wrapping_add);
        // While workers change the stripes, the sum may be negative for a moment.
        if states > u64::MAX / 2 { 0 } else { states }
    }

    fn has_stale(&self) -> bool {
        // Acquire: pairs with the release of RuleCountCache::subtract(). A worker that reads zero finds no stale state.
        self.stale.load(Ordering::Acquire) != 0
    }

    /// Starts the next generation. Returns the number of states that are stale by it.
    fn start_generation(&self) -> u64 {
        let mut states = 0_u64;
        for stripe in &self.current {
            // Relaxed: a state made after it belongs to the next generation.
            let next = |current: u64| Some((current & !COUNT).wrapping_add(1 << GENERATION) | ZERO);
            let current = stripe
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
                .unwrap_or_else(|current| current);
            let of_stripe = (current & COUNT).wrapping_sub(ZERO);
            // Relaxed: has_stale() pairs with the release of the unlinking only.
            self.stale.fetch_add(of_stripe, Ordering::Relaxed);
            states = states.wrapping_add(of_stripe);
        }
        if states > u64::MAX / 2 { 0 } else { states }
    }

    /// Counts one state of this generation less in a stripe. Returns false if the stripe has another generation.
    fn subtract(&self, stripe: usize, generation: u8) -> bool {
        let less = |current: u64| ((current >> GENERATION) as u8 == generation).then(|| current - 1);
        // Relaxed: a count.
        self.current[stripe].fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

impl RuleCounts {
    /// The number of the rule's states.
    pub(crate) fn count(&self, rule: RuleId) -> u64 {
        locked(&self.rules).get(&rule).map_or(0, |count| count.states())
    }

    /// The rules with states that `wanted` accepts, sorted.
    pub(crate) fn with_states(&self, mut wanted: impl FnMut(RuleId) -> bool) -> Vec<RuleId> {
        let rules = locked(&self.rules);
        let mut rules: Vec<_> = rules
            .iter()
            .filter(|(rule, count)| count.states() > 0 && wanted(**rule))
            .map(|(rule, _)| *rule)
            .collect();
        rules.sort_unstable();
        rules
    }

    /// The rules with stale states, as of now.
    pub(crate) fn removed(&self) -> Arc<RemovedRules> {
        Arc::clone(&locked(&self.removed))
    }

    /// Makes the states of the rules that `wanted` accepts stale. Returns their number.
    pub(crate) fn remove_where(&self, mut wanted: impl FnMut(RuleId) -> bool) -> u64 {
        let mut removed = locked(&self.removed);
        let removed = Arc::make_mut(&mut removed);
        removed.prune();
        let (mut states, known) = (0, removed.0.len());
        for (&rule, count) in &*locked(&self.rules) {
            if count.states() > 0 && wanted(rule) {
                states += count.start_generation();
                removed.add(known, rule, count);
            }
        }
        removed.0.sort_unstable_by_key(|removed| removed.rule);
        states
    }

    /// Forgets the rules whose stale states are all unlinked.
    pub(crate) fn prune_removed(&self) {
        Arc::make_mut(&mut locked(&self.removed)).prune();
    }

    /// Returns true if a rule's next generation could have the number of a stale state's: a full sweep must come first.
    pub(crate) fn generations_exhausted(&self) -> bool {
        locked(&self.removed).0.iter().any(|removed| removed.generations >= GENERATIONS - 1)
    }

    fn of(&self, rule: RuleId) -> Arc<RuleCount> {
        let mut rules = locked(&self.rules);
        if rules.len() == rules.capacity() {
            // Rules come and go. A count that a worker has cached may be used again.
            rules.retain(|_, count| Arc::strong_count(count) > 1 || count.states() > 0 || count.has_stale());
        }
        Arc::clone(rules.entry(rule).or_insert_with(|| Arc::new(RuleCount::new())))
    }
}

impl RemovedRules {
    /// No rules.
    #[cfg(test)]
    pub(crate) const NONE: &Self = &Self(Vec::new());

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if the state is stale.
    #[inline]
    pub(crate) fn contains(&self, header: Header) -> bool {
        !self.0.is_empty() && self.find(header)
    }

    #[cold]
    fn find(&self, header: Header) -> bool {
        let found = self.0.binary_search_by_key(&header.rule(), |removed| removed.rule);
        found.is_ok_and(|at| self.0[at].count.generation() != header.generation())
    }

    /// Returns true if all stale states of these rules are unlinked.
    pub(crate) fn all_unlinked(&self) -> bool {
        !self.0.iter().any(|removed| removed.count.has_stale())
    }

    fn prune(&mut self) {
        self.0.retain(|removed| removed.count.has_stale());
    }

    /// Adds a rule. The first `known` rules are sorted; those after them are distinct.
    fn add(&mut self, known: usize, rule: RuleId, count: &Arc<RuleCount>) {
        match self.0[..known].binary_search_by_key(&rule, |removed| removed.rule) {
            Ok(at) => self.0[at].generations += 1,
            Err(_) => self.0.push(RemovedRule { rule, count: Arc::clone(count), generations: 1 }),
        }
    }
}

impl RuleCountCache {
    /// The cache of a worker.
    pub(crate) fn new(worker: usize) -> Self {
        Self { stripe: worker % STRIPES, ..Self::default() }
    }

    /// Counts one more state. Returns its generation.
    pub(crate) fn add(&mut self, rules: &RuleCounts, rule: RuleId) -> u8 {
        // Relaxed: the state publishes what its maker has seen.
        let stripe = self.stripe;
        (self.of(rules, rule).current[stripe].fetch_add(1, Ordering::Relaxed) >> GENERATION) as u8
    }

    /// Counts one state of this generation less. Returns true if it was stale.
    pub(crate) fn subtract(&mut self, rules: &RuleCounts, rule: RuleId, generation: u8) -> bool {
        let stripe = self.stripe;
        let count = self.of(rules, rule);
        let stale = !count.subtract(stripe, generation) && !count.subtract(0, generation);
        if stale {
            // Release: pairs with the acquire of has_stale(). The state is unlinked.
            count.stale.fetch_sub(1, Ordering::Release);
        }
        stale
    }

    fn of(&mut self, rules: &RuleCounts, rule: RuleId) -> &RuleCount {
        let cached = &mut self.rules[rule.0 as usize % CACHED];
        if cached.as_ref().is_none_or(|(known, _)| *known != rule) {
            *cached = None;
        }
        &cached.get_or_insert_with(|| (rule, rules.of(rule))).1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_the_cache() {
        let (rules, mut cache) = (RuleCounts::default(), RuleCountCache::default());
        for rule in 0..1000 {
            cache.add(&rules, RuleId(rule));
        }
        (0..1000).for_each(|rule| assert_eq!(rules.count(RuleId(rule)), 1));
        cache.subtract(&rules, RuleId(3), 0);
        assert_eq!(rules.with_states(|rule| rule.0 < 5), [0, 1, 2, 4].map(RuleId));
    }

    #[test]
    fn a_rule_has_stale_states_until_they_are_unlinked() {
        let (rules, mut cache) = (RuleCounts::default(), RuleCountCache::default());
        let (one, other) = (RuleId(1), RuleId(2));
        let first = cache.add(&rules, one);
        cache.add(&rules, one);
        cache.add(&rules, other);
        assert_eq!(rules.remove_where(|rule| rule == one), 2);
        let removed = rules.removed();
        let second = cache.add(&rules, one);
        assert_ne!(first, second);
        assert_eq!((rules.count(one), rules.count(other)), (1, 1));
        let is_stale = |rule, generation| removed.contains(Header::of(rule, generation));
        assert_eq!([is_stale(one, first), is_stale(one, second), is_stale(other, 0)], [true, false, false]);
        let stale = [first, second, first].map(|generation| cache.subtract(&rules, one, generation));
        assert_eq!(stale, [true, false, true]);
        assert!(removed.all_unlinked());
        rules.prune_removed();
        assert!(rules.removed().is_empty());
    }

    #[test]
    fn generations_are_exhausted_before_a_number_repeats() {
        let (rules, mut cache) = (RuleCounts::default(), RuleCountCache::default());
        let first = cache.add(&rules, RuleId(1));
        for _ in 1..GENERATIONS {
            assert!(!rules.generations_exhausted());
            assert_ne!(rules.remove_where(|_| true), 0);
            assert_ne!(cache.add(&rules, RuleId(1)), first);
        }
        assert!(rules.generations_exhausted());
    }
}
