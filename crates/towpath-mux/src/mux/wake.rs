//! Wake policy: when an idle worker is woken, and when a busy one hands back messages.
//!
//! What: at most one worker is being woken at a time; it wakes the next one. A worker is woken only for work
//! that takes longer than the wake-up. A woken worker that does not ask is waited for up to
//! [`Config::patience`](super::Config::patience).

use super::event::Event;
use super::service_time::WORTH;
use super::worker::{self, Activity, Worker};
use super::{Mux, Order};
use crate::Time;

impl Mux {
    pub(super) fn set_activity(&mut self, id: worker::Id, activity: Activity) {
        self.workers.set_activity(id, activity, self.now);
    }

    /// Returns the idle worker to wake now. The woken worker causes the next wake-up.
    pub(super) fn wake(&mut self) -> Option<worker::Id> {
        if self.workers.woken() > 0 || self.workers.awake() > 0 && !self.is_worth_waking() {
            return None;
        }
        if self.ready.is_empty() {
            return None;
        }
        let idle = self.workers.first_idle()?;
        self.set_activity(idle, Activity::Woken);
        Some(idle)
    }

    /// Stops waiting for woken workers that have not asked for too long, if another worker is idle.
    pub(super) fn expire_wakeups(&mut self) {
        if self.workers.woken() == 0 || self.ready.is_empty() || self.workers.first_idle().is_none() {
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

    /// Cost of a wake-up in nanoseconds.
    pub(super) fn wake_cost(&self) -> u64 {
        u64::try_from(self.config.wake_cost.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Number of messages to give to one worker before waking another pays. `None` if the service time is unknown or not below
    /// [`Config::wake_cost`](super::Config::wake_cost), or if [`Config::batch`](super::Config::batch) is 1.
    pub fn short_batch(&self) -> Option<usize> {
        self.service_time.short_batch(self.wake_cost()).filter(|_| self.config.batch > 1)
    }

    /// The same, but `None` also if any recent message was long. Decides by the least service time, because the time of a worker
    /// process includes its wake-up.
    pub fn quick_batch(&self) -> Option<usize> {
        self.service_time.quick_batch(self.wake_cost()).filter(|_| self.config.batch > 1)
    }

    /// Returns true if `messages` take long enough to wake another worker meanwhile.
    pub(crate) fn is_long(&self, messages: usize) -> bool {
        self.service_time.is_long(messages, self.wake_cost())
    }

    /// Returns true if the awake workers need longer for the ready messages than waking another worker takes.
    fn is_worth_waking(&self) -> bool {
        let Some(oldest) = self.ready.oldest() else { return false };
        self.is_long(self.ready.len()) || self.now.since(oldest) >= self.config.patience
    }

    /// If a worker is idle, recalls the messages that the longest running worker has not begun.
    pub(super) fn recall(&mut self) {
        if !self.recalls() {
            return;
        }
        let now = self.now;
        // A shorter turn will be over soon.
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

    /// Returns true if another worker could take messages that one has not begun.
    fn recalls(&self) -> bool {
        self.ready.is_empty() && self.config.order != Order::Sticky && self.workers.first_idle().is_some()
    }

    /// When the scheduler must run without an event: while a worker is idle, the oldest message has waited
    /// too long, or a woken worker has not asked. One call of [`Mux::handle_timeout`] handles it.
    pub(super) fn schedule_timeout(&self) -> Option<Time> {
        if let Some(oldest) = self.ready.oldest() {
            self.workers.first_idle()?;
            let woken = self.workers.values().filter(|worker| worker.activity == Activity::Woken);
            let since = if self.workers.woken() == 0 {
                Some(oldest)
            } else {
                woken.map(|worker| worker.woken_at).min()
            };
            return since.map(|since| since + self.config.patience);
        }
        if !self.recalls() {
            return None;
        }
        let held = self.workers.values().filter(|worker| worker.held() > 1 && !worker.recalled);
        held.map(|worker| worker.since + self.config.patience).min()
    }
}
