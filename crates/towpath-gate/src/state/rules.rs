//! How many states each rule has.

use std::sync::{Arc, Mutex};

use hashbrown::HashMap;

use super::RuleId;
use super::family::locked;
use super::sync::{AtomicU64, Ordering};

/// The counts of all rules that have, or had, states.
#[derive(Debug, Default)]
pub(super) struct Rules(Mutex<HashMap<RuleId, Arc<AtomicU64>>>);

/// The counts that one worker used last, so that it seldom asks for one.
#[derive(Debug, Default)]
pub(super) struct Recent([Option<(RuleId, Arc<AtomicU64>)>; RECENT]);

const RECENT: usize = 16;

impl Rules {
    /// How many states the rule has.
    pub(super) fn count(&self, rule: RuleId) -> u64 {
        locked(&self.0).get(&rule).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// The rules with states that `wanted` names, and how many states they have together.
    pub(super) fn with_states(&self, mut wanted: impl FnMut(RuleId) -> bool) -> (Vec<RuleId>, u64) {
        let (mut rules, mut states) = (Vec::new(), 0);
        for (&rule, count) in &*locked(&self.0) {
            let count = count.load(Ordering::Relaxed);
            if count > 0 && wanted(rule) {
                rules.push(rule);
                states += count;
            }
        }
        rules.sort_unstable();
        (rules, states)
    }

    fn counter(&self, rule: RuleId) -> Arc<AtomicU64> {
        let mut rules = locked(&self.0);
        if rules.len() == rules.capacity() {
            // Rules come and go; a count that a worker still has may be needed again.
            rules.retain(|_, count| Arc::strong_count(count) > 1 || count.load(Ordering::Relaxed) > 0);
        }
        Arc::clone(rules.entry(rule).or_insert_with(|| Arc::new(AtomicU64::new(0))))
    }
}

impl Recent {
    /// One state more.
    pub(super) fn add(&mut self, rules: &Rules, rule: RuleId) {
        // Relaxed, here and below: a number, of which nothing else depends.
        self.counter(rules, rule).fetch_add(1, Ordering::Relaxed);
    }

    /// One state less.
    pub(super) fn subtract(&mut self, rules: &Rules, rule: RuleId) {
        self.counter(rules, rule).fetch_sub(1, Ordering::Relaxed);
    }

    fn counter(&mut self, rules: &Rules, rule: RuleId) -> &AtomicU64 {
        let recent = &mut self.0[rule.0 as usize % RECENT];
        if recent.as_ref().is_none_or(|(known, _)| *known != rule) {
            *recent = None;
        }
        &recent.get_or_insert_with(|| (rule, rules.counter(rule))).1
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_outlive_being_recent() {
        let (rules, mut recent) = (Rules::default(), Recent::default());
        for rule in 0..1000 {
            recent.add(&rules, RuleId(rule));
        }
        (0..1000).for_each(|rule| assert_eq!(rules.count(RuleId(rule)), 1));
        recent.subtract(&rules, RuleId(3));
        assert_eq!(rules.with_states(|rule| rule.0 < 5), ([0, 1, 2, 4].map(RuleId).to_vec(), 4));
    }
}
