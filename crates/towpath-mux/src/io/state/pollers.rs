//! The threads that wait for sockets: the leader, its helpers, and the watchdog.
//!
//! What: at most one worker leads: it waits for sockets for an unlimited time. While the leader finds sockets ready whenever it looks,
//! helpers wait for them, too. The watchdog is a parked worker that checks at intervals whether the leader got stuck in a message.

use crate::Time;
use crate::mux::worker;

/// Roles of workers in polling.
#[derive(Debug)]
pub(in crate::io) struct Pollers {
    pub(in crate::io) leader: Option<worker::Id>,
    /// The time until which the poller sleeps at most, `None` while it is awake. An earlier deadline wakes it.
    pub(in crate::io) sleeps_until: Option<Time>,
    pub(in crate::io) watchdog: Option<worker::Id>,
    /// Parked workers; the last one is woken first.
    pub(in crate::io) parked: Vec<worker::Id>,
    /// The worker that was woken to help and has not come yet.
    pub(in crate::io) helper: Option<worker::Id>,
    /// Number of workers that wait for sockets in addition to the leader.
    pub(in crate::io) helping: usize,
    /// Number of workers above which no helper is woken: half of the processors, 0 with up to 2.
    limit: usize,
}

impl Pollers {
    /// `processors`: number of processors of this machine.
    pub(in crate::io) const fn new(processors: usize) -> Self {
        Self {
            leader: None,
            sleeps_until: None,
            watchdog: None,
            parked: Vec::new(),
            helper: None,
            helping: 0,
            limit: helpers(processors),
        }
    }

    /// Returns true if another poller would only compete with the `working` workers and the pollers.
    pub(in crate::io) fn has_enough(&self, working: usize) -> bool {
        working + self.helping + usize::from(self.leader.is_some()) > self.limit
    }

    /// Removes and returns the worker that was parked last.
    pub(in crate::io) fn pop_parked(&mut self) -> Option<worker::Id> {
        let id = self.parked.pop()?;
        self.watchdog = self.watchdog.filter(|watchdog| *watchdog != id);
        Some(id)
    }

    /// As [`Pollers::pop_parked`], but prefers a worker that is not the watchdog, which would have to be replaced.
    pub(in crate::io) fn pop_helper(&mut self) -> Option<worker::Id> {
        if let Some(at) = self.parked.iter().rposition(|&id| Some(id) != self.watchdog) {
            let last = self.parked.len() - 1;
            self.parked.swap(at, last);
        }
        self.pop_parked()
    }

    /// A worker ends: it has no role any more.
    pub(in crate::io) fn remove(&mut self, id: worker::Id) {
        self.parked.retain(|&parked| parked != id);
        self.watchdog = self.watchdog.filter(|watchdog| *watchdog != id);
        self.leader = self.leader.filter(|leader| *leader != id);
    }
}

/// Half of the processors are left to the peers and the system, which need about as long for short messages as the workers. With two
/// processors a second reader of 256-byte messages costs a third of the rate.
const fn helpers(processors: usize) -> usize {
    (processors / 2).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use slotmap::KeyData;

    use super::*;

    #[test]
    fn the_watchdog_helps_last() {
        let [a, b] = [1, 2].map(|id| worker::Id::from(KeyData::from_ffi(1 << 32 | id)));
        let mut pollers = Pollers::new(8);
        pollers.parked = vec![a, b];
        pollers.watchdog = Some(b);
        assert_eq!((pollers.pop_helper(), pollers.watchdog), (Some(a), Some(b)));
        assert_eq!((pollers.pop_helper(), pollers.watchdog), (Some(b), None));
        assert_eq!(pollers.pop_helper(), None);
    }
}
