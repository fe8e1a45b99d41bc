//! A worker slot: its current process, the replacement, and restarts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use towpath_mux::Time;
use towpath_mux::io::Driver;
use towpath_mux::mux::{Mux, psock, worker};

use super::authority::Rights;
use super::completions::Completions;
use super::connections::{Connections, EndedEvent};
use super::process::{Command, Process, ProcessState, WorkerExit};
use super::violation::Violations;
use crate::control::commands::show_rings;

/// A process that lived this long did not fail at once.
const LIVED: Duration = Duration::from_secs(10);
/// Delay before the second restart in a row. Doubles.
const AGAIN: Duration = Duration::from_millis(100);
/// Maximum delay.
const AGAIN_MOST: Duration = Duration::from_secs(10);
/// Delay after a violation. Doubles with each further violation in a row.
const BAR: Duration = Duration::from_secs(1);
/// Maximum delay after violations.
const BAR_MOST: Duration = Duration::from_secs(60);
/// Number of processes that may end within [`LIVED`] before the next one is delayed, even if all of them completed
/// messages: a start costs several milliseconds.
const BUDGET: u32 = 16;
/// Number of processes without a channel that are given time to exit. Beyond it the oldest is killed.
const GONE: usize = 8;

#[derive(Debug)]
pub(super) struct WorkerSlot {
    number: usize,
    directory: PathBuf,
    rights: Rights,
    /// For a worker on another machine: it attaches when there is one.
    remote: bool,
    /// Number of processes started.
    starts: u64,
    process: Option<Process>,
    /// The replacement; becomes `process` when it has attached.
    next: Option<Process>,
    /// The replaced process, which finishes its messages.
    old: Option<Process>,
    /// Processes whose channels are closed and that have not exited. They are not waited for.
    gone: Vec<Process>,
    /// Time for `old` to finish.
    patience: Duration,
    /// Number of failures in a row.
    failures: u32,
    /// Number of violations in a row, and time of the last one. Twice [`BAR_MOST`] without a violation ends the row.
    violations: (u32, Option<Instant>),
    /// Number of processes that ended since this time, at most [`LIVED`] ago at the last one.
    ended: (u32, Option<Instant>),
    /// Time of the next restart.
    again: Option<Instant>,
    /// Number of processes started because another ended.
    restarts: u64,
    attached_once: bool,
    /// The last replacement failed.
    kept: bool,
    /// How the first process ended, if it never attached.
    exit: Option<WorkerExit>,
    ready: bool,
}

impl WorkerSlot {
    pub(super) fn new(number: usize, directory: &Path, rights: Rights) -> Self {
        Self {
            number,
            directory: directory.into(),
            rights,
            remote: false,
            starts: 0,
            process: None,
            next: None,
            old: None,
            gone: Vec::new(),
            patience: Duration::ZERO,
            failures: 0,
            violations: (0, None),
            ended: (0, None),
            again: None,
            restarts: 0,
            attached_once: false,
            kept: false,
            exit: None,
            ready: false,
        }
    }

    /// A slot for a worker on another machine.
    pub(super) fn remote(number: usize, directory: &Path, rights: Rights) -> Self {
        // Its end never prevents the start of the pool.
        Self { remote: true, attached_once: true, ..Self::new(number, directory, rights) }
    }

    pub(super) const fn is_remote(&self) -> bool {
        self.remote
    }

    /// The round trip to the worker on another machine.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.process.as_ref().filter(|process| process.is_attached())?.round_trip()
    }

    /// The slot of a token.
    pub(super) const fn of(token: u32) -> usize {
        token as usize - 1
    }

    /// The name of its processes in the limits of log lines: other muxes have slots with the same number.
    fn peer(&self) -> String {
        self.directory.join(self.number.to_string()).display().to_string()
    }

    /// Starts a process.
    pub(super) fn start(&mut self, command: &Command, driver: &Driver, now: Instant) {
        self.restarts += u64::from(self.again.take().is_some());
        match self.spawn(command, driver, now) {
            Ok(process) => self.process = Some(process),
            // A system without room for a process is not a violation of the worker.
            Err(exit) => self.failed(exit, false, &mut Violations::default(), now),
        }
    }

    /// Starts the replacement of the current process.
    pub(super) fn replace(&mut self, command: &Command, driver: &Driver, patience: Duration, now: Instant) {
        (self.patience, self.kept) = (patience, false);
        match self.spawn(command, driver, now) {
            Ok(process) => self.next = Some(process),
            Err(exit) => self.not_replaced(exit, &mut Violations::default(), now),
        }
    }

    fn spawn(&mut self, command: &Command, driver: &Driver, now: Instant) -> Result<Process, WorkerExit> {
        let path = self.directory.join(format!("worker-{}-{}.sock", self.number, self.starts));
        self.starts += 1;
        let token = u32::try_from(self.number + 1).expect("the number of slots fits");
        Process::start(command, &path, driver, token, self.rights, now)
    }

    /// Handles processes that attached or ended.
    pub(super) fn look(
        &mut self,
        driver: &mut Driver,
        completions: &mut Completions,
        now: Instant,
        clock: u64,
    ) {
        if let Some(old) = &mut self.old {
            old.check_retired(driver, clock);
        }
        let waits = !self.remote && self.all().any(|process| !process.is_attached());
        if !std::mem::take(&mut self.ready) && !waits {
            return;
        }
        if let Some(process) = &mut self.process {
            match process.look(driver, now) {
                Ok(ProcessState::Same) => {}
                Ok(ProcessState::Attached) => self.attached_once = true,
                Ok(ProcessState::Gone(exit)) | Err(exit) => {
                    process.die(driver, completions, clock);
                    let lived = process.has_served() || now.duration_since(process.started()) >= LIVED;
                    self.gone.extend(self.process.take());
                    self.failed(exit, lived, &mut completions.violations, now);
                }
            }
        }
        if let Some(next) = &mut self.next {
            match next.look(driver, now) {
                Ok(ProcessState::Same) => {}
                Ok(ProcessState::Attached) => {
                    match std::mem::replace(&mut self.process, self.next.take()) {
                        Some(mut old) if old.is_attached() => {
                            old.retire(driver, self.patience, clock);
                            self.old = Some(old);
                        }
                        // A process that has not attached has no messages. It is killed as part of `gone`.
                        old => self.gone.extend(old.map(|mut old| {
                            old.close(driver);
                            old
                        })),
                    }
                    (self.again, self.failures) = (None, 0);
                }
                Ok(ProcessState::Gone(exit)) | Err(exit) => {
                    next.close(driver);
                    self.gone.extend(self.next.take());
                    self.not_replaced(exit, &mut completions.violations, now);
                }
            }
        }
        if let Some(old) = &mut self.old
            && let Ok(ProcessState::Gone(exit)) | Err(exit) = old.look(driver, now)
        {
            if let WorkerExit::Violation { why, .. } = exit {
                completions.violations.count(why);
            }
            old.die(driver, completions, clock);
            self.gone.extend(self.old.take());
        }
        self.gone.retain_mut(|process| !process.has_ended(now));
        let crowd = self.gone.len().saturating_sub(GONE);
        self.gone.iter_mut().take(crowd).for_each(|process| process.kill("too many did not end"));
    }

    /// A process has gone: schedules a restart, with a delay if it failed early, violated the protocol, or was one
    /// of too many.
    fn failed(&mut self, exit: WorkerExit, lived: bool, violations: &mut Violations, now: Instant) {
        self.failures = if lived { 1 } else { self.failures + 1 };
        let wait = match self.failures {
            1 => Duration::ZERO,
            more => doubled(AGAIN, more - 2, AGAIN_MOST),
        };
        let wait = wait.max(self.bar(&exit, violations, now));
        if !self.attached_once {
            self.exit = Some(exit);
            return;
        }
        if self.next.is_some() {
            return tracing::warn!(
                peer = %self.peer(),
                "worker {}: {exit}; the one that replaces it has been started", self.number
            );
        }
        tracing::warn!(
            peer = %self.peer(),
            "worker {}: {exit}; another one is started in {} ms", self.number, wait.as_millis()
        );
        self.again = Some(now + wait);
    }

    /// Time that the slot is barred after the end of a process: for a violation, and while more than [`BUDGET`]
    /// processes end within [`LIVED`].
    fn bar(&mut self, exit: &WorkerExit, violations: &mut Violations, now: Instant) -> Duration {
        let (ended, since) = &mut self.ended;
        if since.is_none_or(|since| now.saturating_duration_since(since) >= LIVED) {
            (*ended, *since) = (0, Some(now));
        }
        *ended += 1;
        let mut wait = match ended.checked_sub(BUDGET + 1) {
            Some(over) => doubled(AGAIN, over, AGAIN_MOST),
            None => Duration::ZERO,
        };
        if let WorkerExit::Violation { why, .. } = exit {
            violations.count(*why);
            let (row, last) = &mut self.violations;
            if last.is_none_or(|last| now.saturating_duration_since(last) >= 2 * BAR_MOST) {
                *row = 0;
            }
            wait = wait.max(doubled(BAR, *row, BAR_MOST));
            (*row, *last) = (*row + 1, Some(now));
        }
        violations.barred += u64::from(!wait.is_zero());
        wait
    }

    /// The replacement failed. The current process may have gone meanwhile.
    fn not_replaced(&mut self, exit: WorkerExit, violations: &mut Violations, now: Instant) {
        self.kept = true;
        match self.process {
            Some(_) => {
                tracing::warn!(peer = %self.peer(), "worker {} keeps its process: {exit}", self.number)
            }
            None => self.failed(exit, false, violations, now),
        }
    }

    pub(super) fn take_exit(&mut self) -> Option<(usize, WorkerExit)> {
        Some((self.number, self.exit.take()?))
    }

    pub(super) fn is_attached(&self) -> bool {
        self.process.as_ref().is_some_and(Process::is_attached)
    }

    /// Returns true until the replacement has attached and the replaced process has left or keeps its connections.
    pub(super) fn is_replacing(&self) -> bool {
        self.next.is_some() || self.old.as_ref().is_some_and(|old| !old.is_retiring())
    }

    /// Returns true if a replaced process has not left.
    pub(super) const fn has_old(&self) -> bool {
        self.old.is_some()
    }

    /// Returns true if the last replacement failed.
    pub(super) const fn was_kept(&self) -> bool {
        self.kept
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.again.is_some_and(|again| again <= now) && self.process.is_none() && self.next.is_none()
    }

    /// Cancels the restart: no message is left to process.
    pub(super) const fn stay_empty(&mut self) {
        self.again = None;
    }

    pub(super) const fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Returns true if a process has messages and runs on another CPU of this machine than this thread. An answer from another machine takes
    /// longer than a wake-up.
    pub(super) fn works_elsewhere(&self) -> bool {
        !self.remote && self.all().any(|process| process.is_working() && !process.shares_cpu())
    }

    pub(super) fn has_room(&self) -> bool {
        let old = self.old.as_ref().filter(|old| old.is_retiring());
        self.process.iter().chain(old).any(Process::has_room)
    }

    /// When the slot needs supervision.
    pub(super) fn due(&self, timeout: Option<Duration>, start: Instant) -> Option<Instant> {
        self.all().filter_map(|process| process.due(timeout, start)).chain(self.again).min()
    }

    pub(super) fn handle_ready(&mut self) {
        self.ready = true;
        self.all_mut().for_each(Process::handle_ready);
    }

    pub(super) fn handle_left(&mut self, id: worker::Id, driver: &Driver) {
        if let Some(process) = self.all_mut().find(|process| process.is(id)) {
            process.close(driver);
        }
    }

    pub(super) fn collect(
        &mut self,
        completions: &mut Completions,
        now: u64,
        timeout: Option<Duration>,
    ) -> bool {
        // During a replacement two processes send on the same connections.
        let alone = self.next.is_none() && self.old.is_none();
        let collect = |process: &mut Process| process.collect(completions, now, timeout, alone);
        // Collects from every process; does not stop at the first.
        self.all_mut().map(collect).filter(|any| *any).count() > 0
    }

    /// Returns true if a process asked for connection events.
    pub(super) fn wants_events(&self) -> bool {
        self.all().any(Process::wants_events)
    }

    /// A connection has ended, and all of its messages are done.
    pub(super) fn handle_ended(&mut self, connection: psock::Id, ended: &Arc<EndedEvent>) {
        self.all_mut().for_each(|process| process.handle_ended(connection, ended));
    }

    /// The connection has ended: no process may send to it.
    pub(super) fn revoke(&mut self, connection: psock::Id) {
        self.all_mut().for_each(|process| process.revoke(connection));
    }

    /// Revokes the connections for which `is_open` returns false.
    pub(super) fn retain(&mut self, mut is_open: impl FnMut(psock::Id) -> bool) {
        self.all_mut().for_each(|process| process.retain(&mut is_open));
    }

    pub(super) fn is_idle(&self) -> bool {
        self.process.as_ref().is_some_and(Process::is_idle)
    }

    /// Returns true if it has messages and made progress within `patience` nanoseconds.
    pub(super) fn is_going_on(&self, now: u64, patience: u64) -> bool {
        self.working() > 0 && !self.process.as_ref().is_some_and(|process| process.is_stuck(now, patience))
    }

    /// Returns true if it has made progress on its current messages.
    pub(super) fn moves(&self) -> bool {
        self.process.as_ref().is_some_and(Process::moves)
    }

    /// Time until it counts as stuck without progress.
    pub(super) fn until_stuck(&self, now: u64, patience: u64) -> Option<u64> {
        self.process.as_ref()?.until_stuck(now, patience)
    }

    #[cfg(test)]
    pub(super) const fn number(&self) -> usize {
        self.number
    }

    /// Number of messages that it holds.
    pub(super) fn working(&self) -> usize {
        self.process.as_ref().map_or(0, Process::working)
    }

    pub(super) fn fill(&mut self, mux: &mut Mux, now: Time, most: usize) -> bool {
        self.process.as_mut().is_some_and(|process| process.fill(mux, now, most))
    }

    /// Gives a retired process messages of its connections. Returns true if it got any.
    pub(super) fn fill_retired(&mut self, mux: &mut Mux, now: Time) -> bool {
        let retired = self.old.as_mut().filter(|old| old.is_retiring());
        retired.is_some_and(|old| old.fill(mux, now, usize::MAX))
    }

    /// Returns true if the core has a part for one of its processes.
    pub(super) fn takes_part(&self, mux: &Mux) -> bool {
        self.all().any(|process| process.takes_part(mux))
    }

    /// Takes parts of messages for its processes. Returns true if there are any.
    pub(super) fn feed(&mut self, mux: &mut Mux) -> bool {
        self.all_mut().map(|process| process.feed(mux)).filter(|any| *any).count() > 0
    }

    /// Publishes ended events for the last time.
    pub(super) fn report_ended(&mut self) {
        self.all_mut().for_each(Process::report_ended);
    }

    /// Kills the processes that hold messages.
    pub(super) fn kill_working(&mut self) {
        self.all_mut().for_each(Process::kill_working);
    }

    /// Number of processes that hold messages, each of which has begun one.
    pub(super) fn begun(&self) -> u64 {
        self.all().filter(|process| process.is_working()).count() as u64
    }

    pub(super) fn hand_over(
        &mut self,
        completions: &mut Completions,
        connections: &Connections,
        now: u64,
        epoch: u64,
    ) {
        // A leaving process gets no messages, but may wait for transmit space.
        for process in self.all_mut() {
            process.hand_over(completions, connections, now, epoch);
        }
    }

    pub(super) fn arm(&mut self) -> bool {
        self.all_mut().filter_map(|process| (!process.arm()).then_some(())).count() == 0
    }

    /// Process id of this worker.
    pub(super) fn pid(&self, id: worker::Id) -> Option<u32> {
        self.all().find(|process| process.is(id)).map(Process::pid)
    }

    /// The name of this worker, if it is on another machine.
    pub(super) fn remote_name(&self, id: worker::Id) -> Option<String> {
        self.all().find(|process| process.is(id))?.remote_name()
    }

    /// Number of messages that the process with this id holds.
    pub(super) fn held_by(&self, pid: u32) -> usize {
        self.all().filter(|process| process.pid() == pid).map(Process::working).sum()
    }

    /// Closes all processes.
    pub(super) fn close(&mut self, driver: &Driver) {
        self.all_mut().for_each(|process| process.close(driver));
    }

    pub(super) fn ring(&self) -> Option<show_rings::Ring> {
        self.process.as_ref()?.ring(u32::try_from(self.number + 1).unwrap_or(u32::MAX))
    }

    fn all(&self) -> impl Iterator<Item = &Process> {
        [&self.process, &self.next, &self.old].into_iter().flatten().chain(&self.gone)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Process> {
        [&mut self.process, &mut self.next, &mut self.old].into_iter().flatten().chain(&mut self.gone)
    }
}

/// `first`, doubled `times` times, up to `most`.
fn doubled(first: Duration, times: u32, most: Duration) -> Duration {
    most.min(first * 2u32.saturating_pow(times).min(1000))
}

#[cfg(test)]
pub(super) mod tests;
