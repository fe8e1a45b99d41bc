//! How an engine ends: what it has is waited for, and no longer than that is wanted; then its states are kept.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{
    Ended, Failure, RECHECK_TIMEOUT, Report, Service, States, Supervisor, WorkerCommand, heard, idle_wait,
};
use crate::inspector::EXIT_TIMEOUT;
use crate::snapshot::Saving;

/// How often threads are looked at that end.
const LOOK: Duration = Duration::from_millis(20);

impl Supervisor {
    /// Tells all threads that nothing more is to be received.
    pub(super) fn drain(&self) {
        self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Drain));
        self.services.iter().for_each(Service::drain);
    }

    /// Waits for all threads to end. A signal that comes meanwhile, the second one, tells them to wait for nothing.
    pub(super) fn outlast(&mut self) {
        let mut hurried = false;
        while !self.look_at_threads().0 {
            if heard(&mut self.stop) && !hurried {
                hurried = true;
                log::warn!("told to end again: nothing is waited for any more");
                self.drain();
            }
            self.print_log();
            let stop = PollFd::new(&self.stop, PollFlags::IN);
            idle_wait(&mut [stop, PollFd::new(&self.done, PollFlags::IN)], LOOK);
            // The others ring it, too; and who has rung has not quite ended.
            self.done.clear();
        }
    }

    /// Waits for all threads and processes.
    pub(super) fn end(mut self, states: States) -> Result<Ended, Failure> {
        let mut report = Report::default();
        let mut failed = None;
        for service in self.services {
            let name = format!("mux {}", service.name());
            if !service.join() {
                failed = failed.or(Some(name));
            }
        }
        for (number, worker) in self.workers.into_iter().enumerate() {
            match worker.join() {
                Some(part) => report.add(&part),
                None => failed = failed.or(Some(format!("thread engine-{number}"))),
            }
        }
        for line in self.log.try_iter() {
            log::info!("{line}");
        }
        for socket in self.sockets {
            socket.stop(EXIT_TIMEOUT);
        }
        report.rules = self.ruleset.rules();
        if let (States::Saved, Some(path)) = (states, &self.config.states) {
            // The next engine takes what is saved for what these rules would make, unless it is told that they were not all asked. Whoever
            // waits for this end may not wait for long, and all states are lost when he does not.
            let (begun, most) = (Instant::now(), RECHECK_TIMEOUT.min(self.config.engine.drain));
            self.ruleset.recheck_until(|| begun.elapsed() >= most || heard(&mut self.stop));
            if self.ruleset.rechecks().running {
                log::info!(
                    "{}: the next engine re-checks the states that were not re-checked yet",
                    path.display()
                );
            }
            let saved = Saving::create(path).and_then(|saving| saving.finish(&self.ruleset));
            match saved {
                Ok(()) => log::info!("{}: {} states saved", path.display(), self.ruleset.gauge().states),
                Err(source) if failed.is_none() => {
                    return Err(Failure::States { file: path.clone(), source });
                }
                Err(error) => log::warn!("{}: states not saved: {error}", path.display()),
            }
        }
        if let Some(name) = failed {
            return Err(Failure::Thread(name));
        }
        Ok(Ended { report })
    }
}
