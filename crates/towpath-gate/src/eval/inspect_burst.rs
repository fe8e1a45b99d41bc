//! Bursts, of which some packets go to inspectors: those that a state sends there, with no rule tried.
//!
//! What: as in [`super::burst`], for callers whose packets do more than pass. Invariant: [`Walker::try_step`] does what
//! [`Walker::walk`] would have done, or nothing.

use super::program::{CompiledAction, Program};
use super::walk::{Step, Walk};
use super::walker::Walker;
use crate::rules::option::Arg;
use crate::state::RuleId;
use towpath_wire::Time;

impl Walker {
    /// What [`Walker::walk`] would say of packet `at` of those that were [fetched](Walker::prefetch), where its state says it alone:
    /// [`Step::Pass`], or [`Step::Inspect`]. With `None` nothing has happened, and the packet is to [`Walker::walk`].
    ///
    /// In the place of [`Walker::try_pass`], and as that to be asked once for a packet, in the order of the packets, with a new `walk` of
    /// the port that they came by.
    #[inline]
    pub fn try_step(&mut self, at: usize, walk: &mut Walk, now: Time) -> Option<Step> {
        // Another program has other rules before the lookup.
        if self.fetched != self.version {
            return None;
        }
        let program = &self.live.program;
        let lookup = program.opening.as_ref()?.lookup;
        let ((position, step), bytes) = self.states.pass(at, lookup, now, |rule| program.asks(rule))?;
        self.counts.count(position, bytes, now);
        let rule = &program.rules[position];
        walk.stopped = Some((rule.id, rule.number));
        Some(step)
    }
}

impl Program {
    /// The position of the rule and what it says, if it lets pass or asks an inspector, and does nothing else.
    #[inline]
    fn asks(&self, rule: RuleId) -> Option<(usize, Step)> {
        let position = self.position_of(rule)?;
        let rule = &self.rules[position];
        let step = match rule.act {
            CompiledAction::Allow => Step::Pass,
            CompiledAction::Inspect(Arg::Number(queue)) => Step::Inspect(queue as u16),
            _ => return None,
        };
        (rule.log.is_none() && rule.tag.is_none()).then_some((position, step))
    }
}
