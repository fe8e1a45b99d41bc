//! Which states a lookup may find: those that have not expired, and whose rule's states were not removed.

use towpath_wire::Time;

use super::entry::Entry;
use crate::state::limits::rule_counts::RemovedRules;

/// The states that are live at `now`, as far as the worker knows which rules' states were removed.
#[derive(Clone, Copy)]
pub(crate) struct LiveFilter<'a> {
    pub(crate) now: Time,
    removed: Option<&'a RemovedRules>,
}

impl<'a> LiveFilter<'a> {
    #[inline(always)]
    pub(crate) fn new(now: Time, removed: &'a RemovedRules) -> Self {
        Self { now, removed: if removed.is_empty() { None } else { Some(removed) } }
    }

    #[inline(always)]
    pub(crate) fn accepts<const N: usize>(self, entry: Entry<'_, N>) -> bool {
        entry.is_live(self.now) && !self.removed.is_some_and(|removed| removed.contains(entry.header()))
    }
}
