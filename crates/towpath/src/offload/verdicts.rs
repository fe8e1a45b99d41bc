//! The inspectors' verdicts for flows that engine threads have announced.

use std::collections::HashMap;
use std::sync::Arc;

use towpath_engine::flow_verdict::symmetric;
use towpath_engine::verdict_feed::{Announced, SharedVerdict, VerdictReader};
use towpath_gate::FixedWalk;
use towpath_gate::state::Flow;
use towpath_wire::Time;

use super::VERDICTS;

/// The verdicts of all engine threads.
pub(super) struct Verdicts {
    reader: VerdictReader,
    /// By queue and flow; of several engine threads, if its packets come to several.
    known: HashMap<(u16, Flow), Vec<Arc<SharedVerdict>>>,
    /// A flow with a verdict has no entry, for a reason that may soon be gone.
    retry: bool,
    deferred: u64,
}

impl Verdicts {
    pub(super) fn new(reader: VerdictReader) -> Self {
        Self { reader, known: HashMap::new(), retry: false, deferred: 0 }
    }

    /// Announcements that were not kept.
    pub(super) fn deferred(&self) -> u64 {
        self.deferred + self.reader.refused()
    }

    /// Takes the next announcement. A verdict that does not pass ends the entries of its flow.
    pub(super) fn read(&mut self) -> Option<Announced> {
        let announced = self.reader.read()?;
        let key = (announced.queue, symmetric(&announced.flow));
        if self.known.len() >= VERDICTS && !self.known.contains_key(&key) {
            self.prune();
        }
        if self.known.len() >= VERDICTS && !self.known.contains_key(&key) {
            self.deferred += 1;
            if !announced.verdict.passes() {
                self.forget();
            }
            return Some(announced);
        }
        let verdicts = self.known.entry(key).or_default();
        verdicts.retain(|verdict| !verdict.is_ended() && !Arc::ptr_eq(verdict, &announced.verdict));
        if !announced.verdict.passes() {
            verdicts.iter().for_each(|verdict| verdict.end_entries());
        }
        verdicts.push(Arc::clone(&announced.verdict));
        Some(announced)
    }

    /// The verdict that passes or drops a flow, unless another engine thread has a different one.
    pub(super) fn deciding(&self, queue: u16, flow: &Flow, now: Time) -> Option<&Arc<SharedVerdict>> {
        let verdicts = self.known.get(&(queue, symmetric(flow)))?;
        let mut apply = verdicts.iter().filter(|verdict| verdict.applies(now));
        let first = apply.next()?;
        let kind = |verdict: &SharedVerdict| (verdict.passes(), verdict.drops());
        let is_one = (first.passes() || first.drops()) && apply.all(|verdict| kind(verdict) == kind(first));
        is_one.then_some(first)
    }

    /// The verdicts of a walk; `None` if one does not apply any more.
    pub(super) fn of(&self, walk: &FixedWalk, now: Time) -> Option<Box<[Arc<SharedVerdict>]>> {
        walk.verdicts.iter().map(|hit| self.deciding(hit.queue, &hit.flow, now).cloned()).collect()
    }

    /// After a verdict was lost that does not pass, the others are not used until they are announced again.
    pub(super) fn forget_after_gap(&mut self) {
        if self.reader.take_gap() {
            self.forget();
        }
    }

    fn forget(&mut self) {
        self.known.values().flatten().for_each(|verdict| verdict.end_entries());
        self.known.clear();
        self.reader.begin_round();
    }

    /// The verdicts are announced again at the next [`retry`](Self::retry).
    pub(super) fn retry_soon(&mut self) {
        self.retry = true;
    }

    pub(super) fn retry(&mut self) {
        if std::mem::take(&mut self.retry) {
            self.reader.begin_round();
        }
    }

    /// Removes verdicts that have ended. The others are announced again.
    pub(super) fn tidy(&mut self) {
        self.prune();
        self.reader.begin_round();
    }

    fn prune(&mut self) {
        self.known.retain(|_, verdicts| {
            verdicts.retain(|verdict| !verdict.is_ended());
            !verdicts.is_empty()
        });
    }
}

/// The same verdicts in the same order.
pub(super) fn are_same(one: &[Arc<SharedVerdict>], other: &[Arc<SharedVerdict>]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| Arc::ptr_eq(one, other))
}
