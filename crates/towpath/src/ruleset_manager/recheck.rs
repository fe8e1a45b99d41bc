//! Re-checks: existing states are evaluated with new rules, in steps.

use serde::{Deserialize, Serialize};
use towpath_gate::state::Cursor;

use super::{Book, RulesetManager};

/// A re-check in progress.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Recheck {
    /// Start of the next step.
    at: Cursor,
    /// Set if a rule change restarted the re-check here: after the last state, a second round covers the states before it.
    again: Option<Cursor>,
    /// In the second round: its end.
    until: Option<Cursor>,
}

impl Recheck {
    /// Restarts at the current position, because rules changed, and wraps around at the end. Restarting at the first state would never
    /// reach the last one if rules change often.
    fn anew(self) -> Self {
        Self { at: self.at, again: (self.at != Cursor::default()).then_some(self.at), until: None }
    }

    /// Advances to `next`, or past the last state if `None`. Returns `None` when the re-check is complete.
    fn go_on(self, next: Option<Cursor>) -> Option<Self> {
        match next {
            Some(at) if self.until.is_none_or(|until| at.to_bits() < until.to_bits()) => {
                Some(Self { at, ..self })
            }
            Some(_) => None,
            None => self.again.map(|until| Self { until: Some(until), ..Self::default() }),
        }
    }
}

/// Progress and results of re-checks of states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rechecks {
    /// Whether a re-check is running.
    pub running: bool,
    /// States checked by the current or last re-check; states that it checked twice after a rule change count twice.
    pub looked: u64,
    /// States that were dropped because the current rules would not create them.
    pub dropped: u64,
    /// States that now belong to another rule, because that rule would create them.
    #[serde(default)]
    pub handed: u64,
}

impl Book {
    pub(super) fn begin_recheck(&mut self) {
        if self.recheck.is_none() {
            self.rechecks = Rechecks::default();
        }
        self.recheck = Some(self.recheck.map_or_else(Recheck::default, Recheck::anew));
    }
}

impl RulesetManager {
    /// Starts a re-check of all states, as after a reload. [`RulesetManager::recheck_some`] runs it.
    pub fn recheck(&self) {
        self.book().begin_recheck();
    }

    /// Runs one step of the current re-check, if any: hands some states to the rules that would create them now, and drops those that no
    /// rule would create. A step takes some milliseconds. Returns true if there is more to do.
    pub fn recheck_some(&self) -> bool {
        let now = self.clock.now();
        let mut book = self.book();
        let Some(recheck) = book.recheck else { return false };
        let step = book.gate.recheck_step(recheck.at, now);
        book.recheck = recheck.go_on(step.next);
        let late = if book.recheck.is_none() { book.gate.finish_recheck() } else { 0 };
        book.rechecks.looked += step.checked as u64;
        book.rechecks.dropped += (step.dropped + late) as u64;
        book.rechecks.handed += step.handed as u64;
        book.unchecked &= book.recheck.is_some();
        book.recheck.is_some()
    }

    /// Runs the current re-check, if any, until it is complete or `enough` returns true; at least one step.
    pub fn recheck_until(&self, mut enough: impl FnMut() -> bool) {
        while self.recheck_some() && !enough() {}
    }

    /// Returns the progress of re-checks.
    pub fn rechecks(&self) -> Rechecks {
        let book = self.book();
        Rechecks { running: book.recheck.is_some(), ..book.rechecks }
    }
}
