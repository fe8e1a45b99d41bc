//! Who is woken for what waits, and who is asked to hand back what he has not begun.
//!
//! What: one idle worker at a time is woken, who sees to the next, and only for what takes longer than waking him. One that
//! was woken and does not ask is waited for no longer than [`Config::patience`](super::Config::patience).

use super::event::Event;
use super::worker::{self, Activity, Worker};
use super::{Mux, Order};
use crate::Time;

/// How many wake-ups' time short messages must take together before another worker is woken for them.
const WORTH: u64 = 5;

impl Mux {
    pub(super) fn set_activity(&mut self, id: worker::Id, activity: Activity) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        if activity == Activity::Woken {
            worker.woken_at = self.now;
        }
        let before = std::mem::replace(&mut worker.activity, activity);
        match before {
            Activity::Awake => self.awake -= 1,
            Activity::Woken => self.woken -= 1,
            Activity::Idle => self.idle.retain(|&idle| idle != id),
            Activity::Overdue => {}
        }
        match activity {
            Activity::Awake => self.awake += 1,
            Activity::Woken => self.woken += 1,
            Activity::Idle => self.idle.push_back(id),
            Activity::Overdue => {}
        }
    }

    /// The idle worker that is to be woken now, if one is: exactly one at a time, who sees to the next.
    pub(super) fn wake(&mut self) -> Option<worker::Id> {
        if self.woken > 0 || self.awake > 0 && !self.is_worth_waking() {
            return None;
        }
        if self.ready.is_empty() {
            return None;
        }
        let idle = self.first_idle()?;
        self.set_activity(idle, Activity::Woken);
        Some(idle)
    }

    /// The idle worker that is woken next. One that is disabled is not.
    fn first_idle(&self) -> Option<worker::Id> {
        let mut idle = self.idle.iter().copied();
        idle.find(|&id| self.workers.get(id).is_some_and(|worker| worker.enabled))
    }

    /// Those who were told to ask and have not, for too long, are not waited for, if there is another to be told.
    pub(super) fn expire_wakeups(&mut self) {
        if self.woken == 0 || self.ready.is_empty() || self.first_idle().is_none() {
            return;
        }
        let (now, patience) = (self.now, self.config.patience);
        let late =
            |worker: &Worker| worker.activity == Activity::Woken && now.since(worker.woken_at) >= patience;
        let late: Vec<_> = self.workers.iter().filter(|(_, worker)| late(worker)).map(|(id, _)| id).collect();
        for id in late {
            self.set_activity(id, Activity::Overdue);
        }
    }

    /// How many messages a worker may be given before it is worth waking another for more of them: those that take less than
    /// several wake-ups. None when it is not known, or one takes as long as a wake-up.
    pub fn short_batch(&self) -> Option<usize> {
        let cost = u64::try_from(self.config.wake_cost.as_nanos()).unwrap_or(u64::MAX);
        let known = self.median > 0 && self.median < cost && self.config.batch > 1;
        known.then(|| (cost.saturating_mul(WORTH) / self.median) as usize)
    }

    /// How many messages a worker may be given before it is worth waking another, where all messages are short: each takes less than a
    /// wake-up, and none of late took much longer. What workers that are elsewhere take is counted with how long it takes to wake
    /// them, so that few messages at a time seem long: what counts is the least that they took.
    pub fn quick_batch(&self) -> Option<usize> {
        let cost = u64::try_from(self.config.wake_cost.as_nanos()).unwrap_or(u64::MAX);
        let worth = cost.saturating_mul(WORTH);
        let quick = self.median > 0 && self.floor < cost && self.ewma_slow < worth && self.config.batch > 1;
        quick.then(|| (worth / self.median).max(1) as usize)
    }

    /// Whether so many messages take long enough for another worker to be woken meanwhile. Short ones must take several
    /// wake-ups' time together: who would come for less would only be in the way.
    pub(crate) fn is_long(&self, messages: usize) -> bool {
        let cost = u64::try_from(self.config.wake_cost.as_nanos()).unwrap_or(u64::MAX);
        let least = if self.median >= cost { cost } else { cost.saturating_mul(WORTH) };
        self.median == 0 || self.median.saturating_mul(messages as u64) >= least
    }

    /// Whether what is ready would keep those that are awake for longer than waking another takes.
    fn is_worth_waking(&self) -> bool {
        let Some(oldest) = self.ready.oldest() else { return false };
        self.is_long(self.ready.len()) || self.now.since(oldest) >= self.config.patience
    }

    /// Asks the worker that has been longest at its turn for what it has not begun, if somebody is idle.
    pub(super) fn recall(&mut self) {
        if !self.recalls() {
            return;
        }
        let now = self.now;
        // Whoever has been at it for no longer will soon be through.
        let patience = self.config.wake_cost * WORTH as u32;
        let slowest = self
            .workers
            .iter_mut()
            .filter(|(_, worker)| worker.held() > 1 && !worker.recalled)
            .filter(|(_, worker)| now.since(worker.since) > patience)
            .min_by_key(|(_, worker)| worker.since);
        if let Some((id, worker)) = slowest {
            worker.recalled = true;
            self.events.push_back(Event::Recall(id));
        }
    }

    /// Whether what a worker has not begun could be another's.
    fn recalls(&self) -> bool {
        self.ready.is_empty() && self.config.order != Order::Sticky && self.first_idle().is_some()
    }

    /// When the scheduler wants to look again: somebody is idle, and what seemed soon done may not be, or who was told to ask
    /// may not come. What it gives is over once it was looked at: nobody looks again and again in vain.
    pub(super) fn schedule_timeout(&self) -> Option<Time> {
        if let Some(oldest) = self.ready.oldest() {
            self.first_idle()?;
            let woken = self.workers.values().filter(|worker| worker.activity == Activity::Woken);
            let since =
                if self.woken == 0 { Some(oldest) } else { woken.map(|worker| worker.woken_at).min() };
            return since.map(|since| since + self.config.patience);
        }
        if !self.recalls() {
            return None;
        }
        let held = self.workers.values().filter(|worker| worker.held() > 1 && !worker.recalled);
        held.map(|worker| worker.since + self.config.patience).min()
    }
}
