//! How many states each rule has, and which of them are no more its own.
//!
//! What: each rule has an era, which a state remembers from when it was made. To remove a rule's states is to begin its next
//! era: those of an earlier one are gone from that moment on, wherever they still stand, and are taken out slot by slot by
//! whoever collects what has ended ([`RemovedRules`] says which rules to ask).
//!
//! Invariant: a state of an earlier era counts in `gone` until it is unlinked. A state is counted, and gets its era, by one
//! operation. So when `gone` is zero there is no such state, and none is being made; and an era has the same number as
//! another only after [`ERAS`] of them, before which everything is swept.

use std::sync::{Arc, Mutex};

use hashbrown::HashMap;

use crate::state::RuleId;
use crate::state::concurrent::sync::{AtomicU64, Ordering};
use crate::state::table::entry::Header;
use crate::state::table::family::locked;

/// The count of states has the era above it.
const ERA: u32 = 56;
const COUNT: u64 = (1 << ERA) - 1;

/// Eras that are told apart.
const ERAS: u32 = 1 << (u64::BITS - ERA);

/// The counts of all rules that have, or had, states.
#[derive(Debug, Default)]
pub(crate) struct RuleCounts(Mutex<HashMap<RuleId, Arc<OfRule>>>);

/// The states of one rule.
#[derive(Debug)]
struct OfRule {
    /// The era, and the states that were made in it.
    own: AtomicU64,
    /// States of earlier eras: less than none for a moment, when they go while they are counted.
    gone: AtomicU64,
}

/// The rules that have states of earlier eras.
#[derive(Clone, Debug, Default)]
pub(crate) struct RemovedRules(Vec<RemovedRule>);

#[derive(Clone, Debug)]
struct RemovedRule {
    rule: RuleId,
    states: Arc<OfRule>,
    /// Eras that have begun since there was none.
    eras: u32,
}

/// The counts that one worker used last, so that it seldom asks for one.
#[derive(Debug, Default)]
pub(crate) struct RuleCountCache([Option<(RuleId, Arc<OfRule>)>; RECENT]);

const RECENT: usize = 16;

impl OfRule {
    fn new() -> Self {
        Self { own: AtomicU64::new(0), gone: AtomicU64::new(0) }
    }

    #[inline]
    fn era(&self) -> u8 {
        // Relaxed: who sees a state of this era has acquired it from its header, who has seen the era.
        (self.own.load(Ordering::Relaxed) >> ERA) as u8
    }

    fn count(&self) -> u64 {
        self.own.load(Ordering::Relaxed) & COUNT
    }

    fn has_gone(&self) -> bool {
        // Acquire: pairs with the release of RuleCountCache::subtract(), so that who sees none finds none.
        self.gone.load(Ordering::Acquire) != 0
    }

    /// Begins the next era. How many states are gone by it.
    fn turn(&self) -> u64 {
        // Relaxed: a state that is made after it is of the next era.
        let turned = |own: u64| Some((own & !COUNT).wrapping_add(1 << ERA));
        let own =
            self.own.fetch_update(Ordering::Relaxed, Ordering::Relaxed, turned).unwrap_or_else(|own| own);
        self.gone.fetch_add(own & COUNT, Ordering::Relaxed);
        own & COUNT
    }
}

impl RuleCounts {
    /// How many states the rule has.
    pub(crate) fn count(&self, rule: RuleId) -> u64 {
        locked(&self.0).get(&rule).map_or(0, |states| states.count())
    }

    /// The rules with states that `wanted` names.
    pub(crate) fn with_states(&self, mut wanted: impl FnMut(RuleId) -> bool) -> Vec<RuleId> {
        let rules = locked(&self.0);
        let mut rules: Vec<_> = rules
            .iter()
            .filter(|(rule, states)| states.count() > 0 && wanted(**rule))
            .map(|(rule, _)| *rule)
            .collect();
        rules.sort_unstable();
        rules
    }

    /// Has the states of every rule that `wanted` names gone, and adds the rules to `gone`. How many states that were.
    pub(crate) fn turn(&self, mut wanted: impl FnMut(RuleId) -> bool, gone: &mut RemovedRules) -> u64 {
        let (mut states, known) = (0, gone.0.len());
        for (&rule, of_rule) in &*locked(&self.0) {
            if of_rule.count() > 0 && wanted(rule) {
                states += of_rule.turn();
                gone.add(known, rule, of_rule);
            }
        }
        gone.0.sort_unstable_by_key(|of| of.rule);
        states
    }

    fn of(&self, rule: RuleId) -> Arc<OfRule> {
        let mut rules = locked(&self.0);
        if rules.len() == rules.capacity() {
            // RuleCounts come and go; a count that a worker still has may be needed again.
            rules
                .retain(|_, states| Arc::strong_count(states) > 1 || states.count() > 0 || states.has_gone());
        }
        Arc::clone(rules.entry(rule).or_insert_with(|| Arc::new(OfRule::new())))
    }
}

impl RemovedRules {
    #[cfg(all(test, loom))]
    pub(crate) const NONE: &Self = &Self(Vec::new());

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the state is gone.
    #[inline]
    pub(crate) fn has(&self, header: Header) -> bool {
        !self.0.is_empty() && self.find(header)
    }

    #[cold]
    fn find(&self, header: Header) -> bool {
        let found = self.0.binary_search_by_key(&header.rule(), |of| of.rule);
        found.is_ok_and(|at| self.0[at].states.era() != header.era())
    }

    /// Whether all of these states are taken out.
    pub(crate) fn is_over(&self) -> bool {
        !self.0.iter().any(|of| of.states.has_gone())
    }

    /// Whether eras could be taken for each other when one more begins.
    pub(crate) fn is_spent(&self) -> bool {
        self.0.iter().any(|of| of.eras >= ERAS - 1)
    }

    /// Forgets rules whose states are taken out.
    pub(crate) fn prune(&mut self) {
        self.0.retain(|of| of.states.has_gone());
    }

    /// One more; the first `known` are in order, and none is added twice behind them.
    fn add(&mut self, known: usize, rule: RuleId, states: &Arc<OfRule>) {
        match self.0[..known].binary_search_by_key(&rule, |of| of.rule) {
            Ok(at) => self.0[at].eras += 1,
            Err(_) => self.0.push(RemovedRule { rule, states: Arc::clone(states), eras: 1 }),
        }
    }
}

impl RuleCountCache {
    /// One state more; the era that it is of.
    pub(crate) fn add(&mut self, rules: &RuleCounts, rule: RuleId) -> u8 {
        // Relaxed: the state publishes what its header has seen.
        (self.of(rules, rule).own.fetch_add(1, Ordering::Relaxed) >> ERA) as u8
    }

    /// One state less, of this era. Whether it was gone.
    pub(crate) fn subtract(&mut self, rules: &RuleCounts, rule: RuleId, era: u8) -> bool {
        let states = self.of(rules, rule);
        let less = |own: u64| ((own >> ERA) as u8 == era).then(|| own - 1);
        let gone = states.own.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err();
        if gone {
            // Release: pairs with the acquire of has_gone(); the state is unlinked.
            states.gone.fetch_sub(1, Ordering::Release);
        }
        gone
    }

    fn of(&mut self, rules: &RuleCounts, rule: RuleId) -> &OfRule {
        let recent = &mut self.0[rule.0 as usize % RECENT];
        if recent.as_ref().is_none_or(|(known, _)| *known != rule) {
            *recent = None;
        }
        &recent.get_or_insert_with(|| (rule, rules.of(rule))).1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_being_recent() {
        let (rules, mut recent) = (RuleCounts::default(), RuleCountCache::default());
        for rule in 0..1000 {
            recent.add(&rules, RuleId(rule));
        }
        (0..1000).for_each(|rule| assert_eq!(rules.count(RuleId(rule)), 1));
        recent.subtract(&rules, RuleId(3), 0);
        assert_eq!(rules.with_states(|rule| rule.0 < 5), [0, 1, 2, 4].map(RuleId));
    }

    #[test]
    fn a_rule_that_turned_has_states_of_two_eras() {
        let (rules, mut recent, mut gone) =
            (RuleCounts::default(), RuleCountCache::default(), RemovedRules::default());
        let (one, other) = (RuleId(1), RuleId(2));
        let first = recent.add(&rules, one);
        recent.add(&rules, one);
        recent.add(&rules, other);
        assert_eq!(rules.turn(|rule| rule == one, &mut gone), 2);
        let second = recent.add(&rules, one);
        assert_ne!(first, second);
        assert_eq!((rules.count(one), rules.count(other)), (1, 1));
        let is_gone = |rule, era| gone.has(Header::of(rule, era));
        assert_eq!([is_gone(one, first), is_gone(one, second), is_gone(other, 0)], [true, false, false]);
        assert_eq!([first, second, first].map(|era| recent.subtract(&rules, one, era)), [true, false, true]);
        assert!(gone.is_over());
        gone.prune();
        assert!(gone.is_empty());
    }
}
