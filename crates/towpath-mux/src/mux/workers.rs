//! The table of workers and their states: which are awake, woken, idle.
//!
//! Invariant: `awake`, `woken` and `idle` agree with the [`Activity`] of each worker.

use std::collections::VecDeque;

use slotmap::SlotMap;

use super::worker::{Activity, Id, Worker};
use crate::Time;

/// All workers of a mux.
#[derive(Debug, Default)]
pub(super) struct Workers {
    slots: SlotMap<Id, Worker>,
    /// Idle workers in the order in which they became idle.
    idle: VecDeque<Id>,
    /// Number of workers that were woken and have not asked for messages yet.
    woken: usize,
    /// Number of workers that have a turn or will ask for messages without being woken.
    awake: usize,
}

impl Workers {
    /// Adds a worker, which is awake.
    pub(super) fn insert(&mut self, worker: Worker) -> Id {
        debug_assert_eq!(worker.activity, Activity::Awake);
        self.awake += 1;
        self.slots.insert(worker)
    }

    pub(super) fn remove(&mut self, id: Id) -> Option<Worker> {
        let worker = self.slots.remove(id)?;
        self.uncount(id, worker.activity);
        Some(worker)
    }

    #[inline]
    pub(super) fn get(&self, id: Id) -> Option<&Worker> {
        self.slots.get(id)
    }

    /// The worker. Change its activity by [`Workers::set_activity`] only.
    #[inline]
    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Worker> {
        self.slots.get_mut(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Worker)> {
        self.slots.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Id, &mut Worker)> {
        self.slots.iter_mut()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Worker> {
        self.slots.values()
    }

    /// Number of workers that have a turn or will ask for messages without being woken.
    pub(super) const fn awake(&self) -> usize {
        self.awake
    }

    /// Number of workers that were woken and have not asked for messages yet.
    pub(super) const fn woken(&self) -> usize {
        self.woken
    }

    /// Returns true if a worker other than `id` is idle.
    pub(super) fn has_other_idle(&self, id: Id) -> bool {
        self.idle.iter().any(|&idle| idle != id)
    }

    /// The enabled worker that has been idle for longest.
    pub(super) fn first_idle(&self) -> Option<Id> {
        let mut idle = self.idle.iter().copied();
        idle.find(|&id| self.slots.get(id).is_some_and(|worker| worker.enabled))
    }

    /// The worker for a new connection: the one with the fewest connections bound to it; an idle one, or the one with the fewest messages,
    /// if several have.
    pub(super) fn fewest_connections(&self) -> Option<Id> {
        let load = |worker: &Worker| worker.pinned.len() + worker.pinned.parked() + worker.held();
        let key = |worker: &Worker| (worker.connections, worker.activity != Activity::Idle, load(worker));
        let takes = self.slots.iter().filter(|(_, worker)| worker.enabled && !worker.retiring);
        takes.min_by_key(|(_, worker)| key(worker)).map(|(id, _)| id)
    }

    pub(super) fn set_activity(&mut self, id: Id, activity: Activity, now: Time) {
        let Some(worker) = self.slots.get_mut(id) else { return };
        if activity == Activity::Woken {
            worker.woken_at = now;
        }
        let before = std::mem::replace(&mut worker.activity, activity);
        self.uncount(id, before);
        match activity {
            Activity::Awake => self.awake += 1,
            Activity::Woken => self.woken += 1,
            Activity::Idle => self.idle.push_back(id),
            Activity::Overdue => {}
        }
    }

    fn uncount(&mut self, id: Id, activity: Activity) {
        match activity {
            Activity::Awake => self.awake -= 1,
            Activity::Woken => self.woken -= 1,
            Activity::Idle => self.idle.retain(|&idle| idle != id),
            Activity::Overdue => {}
        }
    }

    /// Compares the counts with the workers, for [`super::Mux::check`]: name, counted, actual.
    pub(super) fn checks(&self) -> [(&'static str, usize, usize); 3] {
        let count = |activity| self.slots.values().filter(|worker| worker.activity == activity).count();
        [
            ("awake", self.awake, count(Activity::Awake)),
            ("woken", self.woken, count(Activity::Woken)),
            ("idle", self.idle.len(), count(Activity::Idle)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_follow_the_activities() {
        let (mut workers, now) = (Workers::default(), Time::default());
        let [a, b, c] = [1; 3].map(|credit| workers.insert(Worker::new(credit, now)));
        workers.set_activity(b, Activity::Idle, now);
        workers.set_activity(a, Activity::Idle, now);
        assert_eq!(
            (workers.awake(), workers.first_idle(), workers.fewest_connections()),
            (1, Some(b), Some(a))
        );
        workers.get_mut(a).unwrap().connections = 1;
        assert_eq!(workers.fewest_connections(), Some(b));
        workers.get_mut(b).unwrap().enabled = false;
        assert_eq!(workers.first_idle(), Some(a), "a disabled worker is not woken");
        workers.set_activity(a, Activity::Woken, now);
        assert_eq!((workers.woken(), workers.first_idle()), (1, None));
        assert!(workers.has_other_idle(a) && !workers.has_other_idle(b));
        workers.set_activity(a, Activity::Overdue, now);
        for id in [a, b, c] {
            assert!(workers.remove(id).is_some() && workers.remove(id).is_none());
        }
        assert_eq!(workers.checks().map(|(_, counted, _)| counted), [0; 3]);
    }
}
