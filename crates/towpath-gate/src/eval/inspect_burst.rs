//! The fast path of bursts with inspection: packets that an existing state passes or sends to an inspector.
//!
//! Same as [`super::burst`], for callers that handle steps other than pass. Invariant: [`Walker::try_step`] has
//! the same effect as [`Walker::walk`], or no effect.

use super::program::{CompiledAction, Program};
use super::step::Step;
use super::walk::Walk;
use super::walker::Walker;
use crate::rules::option::Arg;
use crate::state::RuleId;
use towpath_wire::Time;

impl Walker {
    /// Returns [`Step::Pass`] or [`Step::Inspect`] for packet `at` of the [prefetched](Walker::prefetch) burst if
    /// its state alone decides. Returns `None` without any effect if the packet must go through [`Walker::walk`].
    ///
    /// Use it instead of [`Walker::try_pass`]. Call it once per packet, in the order of the packets, with a new
    /// `walk` of their receive port.
    #[inline]
    pub fn try_step(&mut self, at: usize, walk: &mut Walk, now: Time) -> Option<Step> {
        // A new program may have other rules before the first lookup.
        if self.fetched != self.version {
            return None;
        }
        let program = &self.generation.program;
        let lookup = program.prefix.as_ref()?.lookup;
        let ((position, step), bytes) = self.states.pass(at, lookup, now, |rule| program.verdict_of(rule))?;
        self.counts.count(position, bytes, now);
        let rule = &program.rules[position];
        walk.stopped = Some((rule.id, rule.number));
        walk.enter_zone(&self.generation.ports);
        Some(step)
    }
}

impl Program {
    /// Returns the position and the step of the rule if it only passes or inspects.
    #[inline]
    fn verdict_of(&self, rule: RuleId) -> Option<(usize, Step)> {
        let position = self.position_of(rule)?;
        let rule = &self.rules[position];
        let step = match rule.action {
            CompiledAction::Allow => Step::Pass,
            CompiledAction::Inspect(Arg::Number(queue)) => Step::Inspect(queue as u16),
            _ => return None,
        };
        (rule.log.is_none() && rule.tag.is_none()).then_some((position, step))
    }
}
