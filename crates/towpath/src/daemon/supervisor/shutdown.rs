//! Shutdown: waits for what inspectors and workers hold, up to the drain timeout, then saves the states.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::{
    Ended, Failure, RECHECK_TIMEOUT, Report, Service, States, Supervisor, WorkerCommand, heard, idle_wait,
};
use crate::inspector::EXIT_TIMEOUT;
use crate::quantity::count;
use crate::snapshot::Saving;

/// Interval between two checks of ending threads.
const LOOK: Duration = Duration::from_millis(20);
/// Time after which an engine that was replaced has exported its last events.
const EXPORT: Duration = Duration::from_secs(1);
/// Time after the drain for a new engine that ends as this one does.
const OUTLIVED: Duration = Duration::from_secs(15);

impl Supervisor {
    /// Tells all threads to stop receiving.
    pub(super) fn drain(&mut self) {
        // From here on the manager's time limit for the stop counts.
        self.watchdog = None;
        self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Drain));
        self.services.iter().for_each(Service::drain);
    }

    /// Tells all threads that another process has replaced this one. The service manager must not hear of a stop: the service goes on. Muxes
    /// serve the connections that stay.
    pub(super) fn retire(&mut self) {
        self.watchdog = None;
        // The other process has the same sockets: these threads would accept its clients.
        (self.endpoint, self.dumps) = (None, None);
        self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Drain));
        self.services.iter().for_each(Service::retire);
    }

    /// Waits for all threads to end, and, for its drain time, for a new engine that ends as this one does. While it is `draining`, a stop signal ends the wait;
    /// otherwise the first one drains.
    pub(super) fn outlast(&mut self, mut draining: bool) {
        let (begun, mut hurried) = (Instant::now(), false);
        let longest = self.services.iter().map(Service::drain_time).max().unwrap_or_default();
        let longest = longest.max(self.config.engine.drain) + OUTLIVED;
        while !self.look_at_threads().0 || !hurried && begun.elapsed() < longest && self.upgrade.is_outlived()
        {
            if heard(&mut self.stop) && !hurried {
                if std::mem::replace(&mut draining, true) {
                    hurried = true;
                    tracing::warn!("second stop signal: the engine stops without waiting for inspectors");
                }
                self.drain();
            }
            if !draining && begun.elapsed() >= EXPORT {
                // Every packet is decided. The other process exports its own.
                (self.ipfix, self.events, self.fleet, self.group) = (None, None, None, None);
            }
            self.print_log();
            self.own_files();
            let stop = PollFd::new(&self.stop, PollFlags::IN);
            idle_wait(&mut [stop, PollFd::new(&self.done, PollFlags::IN)], LOOK);
            // Every ending thread signals `done`, shortly before it has ended.
            self.done.clear();
        }
    }

    /// Joins all threads and stops all processes.
    pub(super) fn end(mut self, states: States) -> Result<Ended, Failure> {
        let mut report = Report::default();
        let mut failed = self.launcher_ended().then(|| "the launcher".to_owned());
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
            line.log();
        }
        for socket in self.sockets {
            socket.stop(EXIT_TIMEOUT);
        }
        report.rules = self.ruleset.rules();
        self.running = None;
        // After the last packet.
        (self.ipfix, self.events, self.fleet, self.group) = (None, None, None, None);
        if let (States::Saved, Some(path)) = (states, &self.config.states) {
            // The file marks states whose re-check is incomplete, and the next engine re-checks them. The time is bounded: a service
            // manager that kills a slow engine would lose all states.
            let (begun, most) = (Instant::now(), RECHECK_TIMEOUT.min(self.config.engine.drain));
            self.ruleset.recheck_until(|| begun.elapsed() >= most || heard(&mut self.stop));
            if self.ruleset.rechecks().running {
                tracing::info!(
                    "{}: the re-check of the states is incomplete; the next engine repeats it",
                    path.display()
                );
            }
            let saved = Saving::create(path).and_then(|saving| saving.finish(&self.ruleset));
            match saved {
                Ok(()) => {
                    let states = count(self.ruleset.state_counters().now, "state");
                    tracing::info!("{}: {states} saved", path.display());
                }
                Err(source) if failed.is_none() => {
                    return Err(Failure::States { file: path.clone(), source });
                }
                Err(error) => tracing::warn!("{}: states not saved: {error}", path.display()),
            }
        }
        if let Some(name) = failed {
            return Err(Failure::Thread(name));
        }
        Ok(Ended { report })
    }
}
