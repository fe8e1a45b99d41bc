//! The supervisor: the main thread of `towpath run`, which handles files, name lookups, processes and signals.

mod reload;
pub mod ruleset;
mod shutdown;
mod start;
mod state_log;
mod upgrade;

use std::io::{self, PipeReader};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use towpath_gate::state::Counters;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;
use towpath_engine::queue::RingChannel;

use self::state_log::StateLog;
use self::upgrade::Upgrade;
use super::inherited::Inherited;
use super::inspector_sockets::Socket;
use super::launcher::Launcher;
use super::mux_service::Service;
use super::privilege::Capabilities;
use super::round_robin::RoundRobin;
use super::signals::heard;
use super::stalled::Stalled;
use super::worker_command::WorkerCommand;
use crate::config::Config;
use crate::control::dumps::Dumps;
use crate::control::{AcceptPace, BindError, EndpointCounters, Server};
use crate::eventfd::EventFd;
use crate::events::{self, Events};
use crate::fleet::Fleet;
use crate::fleet::group::{GroupRules, GroupThread};
use crate::inspector;
use crate::ipfix::{self, Ipfix};
use crate::metrics::endpoint::{self, Endpoint};
use crate::offload::{self, Offloading};
use crate::packet_log::PacketLine;
use crate::process::Starter;
use crate::quantity::count;
use crate::report::Report;
use crate::ruleset_manager::{Rechecks, RulesetManager};
use crate::service_manager::{Watchdog, notify};
use crate::snapshot::running::Running;
use crate::worker_pool;

/// Longest sleep of the supervisor.
const TICK: Duration = Duration::from_millis(200);

/// Bound of the channel for lines of `log` rules, and the sleep of the supervisor while many of them arrive.
const LOG_LINES: usize = 4096;
const LOG_TICK: Duration = Duration::from_millis(5);

/// Fewest states checked for keepalives in each tick, and the time in which all states are checked: slightly less than the five
/// seconds that ipfw specifies.
const KEEPALIVE_MIN: usize = 65_536;
const KEEPALIVE_ROUND: Duration = Duration::from_millis(4500);

/// Bound of a re-check at startup and shutdown.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause between two steps of a re-check, in which other threads can take the rules.
const RECHECK_PAUSE: Duration = Duration::from_millis(1);

/// Inspectors accepted in one turn. An attach takes milliseconds, and a client may reconnect in a loop: the bound keeps signals,
/// states and threads served. Pending connections wait for the next turn.
const ACCEPTS_PER_TURN: usize = 8;

/// Interval at which the states of mux connections are refreshed.
const REFRESH: Duration = Duration::from_secs(1);

/// Why the daemon could not start or failed.
#[derive(Debug, Error)]
pub enum Failure {
    /// A port cannot be opened.
    #[error(transparent)]
    Port(#[from] towpath_port::Error),
    /// The control socket cannot be bound.
    #[error("control: {0}")]
    Control(#[from] BindError),
    /// The metrics endpoint cannot be bound.
    #[error("metrics: {0}")]
    Metrics(#[from] endpoint::BindError),
    /// The collector of flow records cannot be reached.
    #[error("ipfix: {0}")]
    Ipfix(#[from] ipfix::OpenError),
    /// The output of events cannot be opened.
    #[error("events: {0}")]
    Events(#[from] events::OpenError),
    /// The socket for dumps cannot be bound.
    #[error(
        "control: the dump socket next to the control socket: {0}; choose another path for the control socket"
    )]
    Dumps(io::Error),
    /// A mux cannot listen.
    #[error("mux {0}: {1}")]
    Mux(String, String),
    /// The workers of a mux could not be started or did not attach.
    #[error("mux {0}: {1}")]
    Workers(String, worker_pool::Error),
    /// An inspector could not be started or did not attach, or its socket cannot be bound.
    #[error(transparent)]
    Inspector(#[from] inspector::Error),
    /// A thread panicked or ended with an error. The others were drained.
    #[error("{0} failed; all other threads were drained and stopped")]
    Thread(String),
    /// The states cannot be saved.
    #[error("states: {}: {source}", file.display())]
    States {
        /// The file.
        file: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The process that this one is to replace continues or has ended.
    #[error("not upgraded: {0}")]
    Upgrade(io::Error),
    /// A system call failed.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The report of all workers.
    pub report: Report,
}

/// See the module documentation.
pub struct Supervisor {
    config: Config,
    workers: Vec<WorkerHandle>,
    /// Signalled when a worker has ended.
    done: EventFd,
    /// Inspectors that do not answer.
    stalled: Stalled,
    log: Receiver<PacketLine>,
    /// Many lines of `log` rules or events of states arrived since the last turn.
    logging: bool,
    state_log: StateLog,
    sockets: Vec<Socket>,
    /// Order in which `sockets` are accepted from.
    round: RoundRobin,
    pace: AcceptPace,
    /// A socket of `sockets` was readable.
    connecting: bool,
    channels: u32,
    stop: PipeReader,
    hup: PipeReader,
    usr2: PipeReader,
    kept: Capabilities,
    starter: Starter,
    launcher: Option<Arc<Launcher>>,
    ruleset: Arc<RulesetManager>,
    services: Vec<Service>,
    /// Time and rules version of the last refresh of mux connections.
    refreshed: (Instant, u64),
    /// Time of the last keepalive check.
    kept_alive: Instant,
    /// The last logged fill level of the state table.
    nearly_full: bool,
    /// A re-check of the states is in progress.
    rechecking: bool,
    /// Saves the states while the engine runs.
    running: Option<Running>,
    /// Sends flow records.
    ipfix: Option<Ipfix>,
    /// Replicates states.
    fleet: Option<Fleet>,
    /// The rules of the group, and the thread that applies its versions.
    group_rules: Option<Arc<GroupRules>>,
    group: Option<GroupThread>,
    /// Writes events.
    events: Option<Events>,
    /// Offloads flows. Its entries end before the ports.
    offload: Option<Offloading>,
    /// Another process receives, or will.
    offload_paused: Option<offload::Pause>,
    server: Option<Server>,
    /// Counters that the control server and the metrics endpoint show.
    counters: EndpointCounters,
    endpoint: Option<Endpoint>,
    dumps: Option<Dumps>,
    /// The process that this one replaces, until it has given up its files.
    inherited: Option<Inherited>,
    /// The process that replaces this one.
    upgrade: Upgrade,
    /// Notifies the service manager while the packet threads advance.
    watchdog: Option<Watchdog>,
}

/// The supervisor's handle of a worker.
struct WorkerHandle {
    thread: Option<JoinHandle<Report>>,
    /// Its result, once it has ended.
    ended: Option<thread::Result<Report>>,
    commands: Sender<WorkerCommand>,
    bell: EventFd,
}

impl WorkerHandle {
    fn say(&self, command: WorkerCommand) {
        // The main loop detects a worker that has ended.
        let _ = self.commands.send(command);
        self.bell.signal();
    }

    /// Returns whether it ended without a panic, or `None` while it runs.
    fn ended(&mut self) -> Option<bool> {
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            self.ended = Some(thread.join());
        }
        self.ended.as_ref().map(Result::is_ok)
    }

    /// Joins the thread. Returns `None` if it panicked.
    fn join(self) -> Option<Report> {
        self.ended.or_else(|| self.thread.map(JoinHandle::join))?.ok()
    }
}

impl Supervisor {
    /// Runs until a signal arrives or all sources have ended.
    ///
    /// # Errors
    ///
    /// [`Failure::Thread`] if a thread failed.
    pub fn run(mut self) -> Result<Ended, Failure> {
        crate::background::begin_as(crate::sandbox::Role::Supervisor);
        loop {
            self.wait();
            self.print_log();
            self.ruleset.tidy();
            self.tell_gauge();
            self.keep_alive();
            self.refresh();
            // A version of the group begins a re-check, too.
            self.rechecking |= self.group.is_some() && self.ruleset.rechecks().running;
            let (all, mut failed) = self.look_at_threads();
            failed |= self.launcher_ended();
            if heard(&mut self.stop) || failed || self.ends_with_predecessor() {
                self.stop_upgrade();
                notify("STOPPING=1\nSTATUS=draining");
                self.drain();
                self.outlast(true);
                if self.launcher_ended() {
                    self.settle_files();
                }
                break;
            }
            if all {
                break;
            }
            if heard(&mut self.hup) {
                // Even if the reload is refused: the file may have been rotated.
                self.events.iter().for_each(Events::reopen);
                self.reload();
            }
            if heard(&mut self.usr2) {
                self.request_upgrade();
            }
            if self.attend_upgrade() {
                self.retire();
                self.outlast(false);
                return self.end(States::Left);
            }
            self.accept_inspectors();
            self.look_after_inspectors();
        }
        // The new engine saves them.
        let states = if self.upgrade.is_ending() { States::Left } else { States::Saved };
        self.end(states)
    }

    /// Returns whether the launcher has ended.
    fn launcher_ended(&self) -> bool {
        let Some(launcher) = &self.launcher else { return false };
        idle_wait(&mut [PollFd::new(launcher, PollFlags::empty())], Duration::ZERO)
    }

    /// Returns whether all threads have ended, and whether one of them failed.
    fn look_at_threads(&mut self) -> (bool, bool) {
        let Self { workers, services, .. } = self;
        let ends = workers.iter_mut().map(WorkerHandle::ended).chain(services.iter_mut().map(Service::ended));
        ends.fold((true, false), |(all, failed), end| (all && end.is_some(), failed || end == Some(false)))
    }

    /// Returns whether a stop signal is pending. [`Supervisor::run`] consumes it.
    fn is_stopped(&self) -> bool {
        is_signalled(&self.stop)
    }

    /// Kills started inspectors that do not answer, and restarts those that have ended.
    fn look_after_inspectors(&mut self) {
        for (queue, pid) in self.stalled.take() {
            self.sockets
                .iter_mut()
                .filter(|socket| socket.queue == queue)
                .for_each(|socket| socket.kill(pid));
        }
        let mut ended = false;
        for socket in &mut self.sockets {
            // An error is fatal at startup only.
            ended |= socket.look_after(false).unwrap_or(false);
        }
        if ended {
            // A busy thread would find out only after milliseconds.
            self.workers.iter().for_each(|worker| worker.say(WorkerCommand::CheckInspectors));
        }
    }

    fn join(&mut self, queue: u16, channel: towpath_ring::Channel, standby: bool) {
        self.channels += 1;
        let peer = channel.peer();
        tracing::info!(
            peer = peer.uid,
            "queue {queue}: process {} of user {} has attached ({})",
            peer.pid,
            peer.uid,
            channel.name()
        );
        // One lane for each worker.
        let lanes = if self.workers.len() > 1 { channel.split() } else { vec![channel] };
        for (worker, lane) in self.workers.iter().zip(lanes) {
            let inspector = Box::new(RingChannel::new(lane));
            worker.say(match standby {
                true => WorkerCommand::JoinStandby(queue, self.channels, inspector),
                false => WorkerCommand::Join(queue, self.channels, inspector),
            });
        }
    }

    /// Accepts attached inspectors, a bounded number in each turn and in a bounded share of the time.
    fn accept_inspectors(&mut self) {
        if !std::mem::take(&mut self.connecting) || self.upgrade.is_handed_over() {
            return;
        }
        let begun = Instant::now();
        let (mut sockets, mut round) = (std::mem::take(&mut self.sockets), std::mem::take(&mut self.round));
        round.turn(&mut sockets, ACCEPTS_PER_TURN, |socket| {
            if AcceptPace::is_over(begun, Instant::now()) {
                return false;
            }
            let channel = socket.accept();
            let came = channel.is_some();
            channel.into_iter().for_each(|(channel, standby)| self.join(socket.queue, channel, standby));
            came
        });
        (self.sockets, self.round) = (sockets, round);
        self.counters.set(self.sockets.iter().map(|socket| (socket.queue, socket.stats())));
        self.pace.pause(begun, Instant::now());
    }

    /// Sleeps until an event or the next tick. Re-checks states meanwhile if a re-check is in progress.
    fn wait(&mut self) {
        let begun = Instant::now();
        let tick = if self.logging || self.upgrade.moves() { LOG_TICK } else { TICK };
        while self.rechecking {
            self.recheck_some();
            if self.idle_wait(RECHECK_PAUSE) || begun.elapsed() >= tick {
                return;
            }
        }
        self.idle_wait(tick);
    }

    /// Sleeps until an event or `timeout`. Returns whether there was an event.
    fn idle_wait(&mut self, timeout: Duration) -> bool {
        let left = self.pace.left(Instant::now());
        let paused: Vec<bool> =
            self.sockets.iter_mut().map(|socket| socket.is_paused() || !left.is_zero()).collect();
        let timeout = if left.is_zero() { timeout } else { timeout.min(left) };
        let mut fds: Vec<PollFd<'_>> = vec![
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::new(&self.hup, PollFlags::IN),
            PollFd::new(&self.usr2, PollFlags::IN),
            PollFd::new(&self.done, PollFlags::IN),
            PollFd::new(&self.stalled, PollFlags::IN),
        ];
        // The end of a started inspector: it is restarted at once.
        fds.extend(
            self.sockets
                .iter()
                .flat_map(Socket::processes)
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        fds.extend(self.upgrade.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        fds.extend(self.inherited.as_ref().map(|inherited| PollFd::new(inherited, PollFlags::IN)));
        // No event is requested: only its end is reported.
        fds.extend(self.launcher.as_ref().map(|launcher| PollFd::new(launcher, PollFlags::empty())));
        let before = fds.len();
        let handed_over = self.upgrade.is_handed_over();
        let open = self.sockets.iter().zip(paused).filter(|(_, paused)| !paused && !handed_over);
        fds.extend(open.map(|(socket, _)| PollFd::new(socket, PollFlags::IN)));
        let event = idle_wait(&mut fds, timeout);
        self.connecting = event && fds[before..].iter().any(|fd| !fd.revents().is_empty());
        event
    }

    /// Continues the re-check and logs its result at the end.
    fn recheck_some(&mut self) {
        self.rechecking = self.ruleset.recheck_some();
        if !self.rechecking {
            let Rechecks { looked, dropped, handed, .. } = self.ruleset.rechecks();
            tracing::info!(
                "re-checked {}: {dropped} dropped because the rules would not create them now, {handed} handed to another rule",
                count(looked, "state")
            );
        }
    }

    /// The status for the service manager.
    fn summary(&self) -> String {
        let (ports, rules) = (self.config.ports.len() as u64, self.ruleset.rules().len() as u64);
        let muxes = match self.config.muxes.len() {
            1 => "1 mux".to_owned(),
            number => format!("{number} muxes"),
        };
        format!("{}, {muxes}, {}", count(ports, "port"), count(rules, "rule"))
    }

    fn print_log(&mut self) {
        let lines = self.log.try_iter().take(LOG_LINES);
        let count = lines.map(PacketLine::log).count();
        self.logging = self.state_log.log(&self.ruleset) || count > LOG_LINES / 16;
    }

    /// Logs when the state table becomes nearly full and when it no longer is.
    fn tell_gauge(&mut self) {
        let nearly_full = self.ruleset.is_nearly_full();
        if nearly_full == self.nearly_full {
            return;
        }
        let Counters { now, unreplied, max, .. } = self.ruleset.state_counters();
        self.nearly_full = nearly_full;
        match nearly_full {
            true => tracing::warn!(
                "the state table is nearly full: {now} of dyn_max {max}, {unreplied} of them without a reply"
            ),
            false => tracing::info!("the state table is no longer nearly full: {now} of dyn_max {max}"),
        }
    }

    /// Sends keepalives if routes are configured. Every state is checked once in five seconds.
    fn keep_alive(&mut self) {
        let since = self.kept_alive.elapsed();
        if self.config.routes.is_empty() || since < TICK || self.upgrade.is_handed_over() {
            return;
        }
        self.kept_alive = Instant::now();
        // A late tick checks more states.
        let part = since.as_secs_f64() / KEEPALIVE_ROUND.as_secs_f64();
        let due = self.ruleset.keepalives(KEEPALIVE_MIN, part);
        if !due.is_empty() {
            self.workers[0].say(WorkerCommand::Keepalives(due));
        }
    }

    /// Starts the running snapshot, if it is configured.
    fn save_states(&mut self) -> io::Result<()> {
        let Some((path, every)) = self.config.states.as_ref().zip(self.config.states_every) else {
            return Ok(());
        };
        self.running = Some(Running::start(path, every, &self.ruleset)?);
        Ok(())
    }

    /// Refreshes the states of mux connections: every second, and when the rules have changed.
    fn refresh(&mut self) {
        let version = self.ruleset.version();
        let (last, before) = self.refreshed;
        if self.services.is_empty() || version == before && last.elapsed() < REFRESH {
            return;
        }
        self.refreshed = (Instant::now(), version);
        self.services.iter().for_each(|service| service.refresh(version != before));
    }
}

/// Whether the shutdown saves the states. A failed start leaves the file unchanged.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum States {
    Saved,
    Left,
}

fn is_signalled(stop: &PipeReader) -> bool {
    idle_wait(&mut [PollFd::new(stop, PollFlags::IN)], Duration::ZERO)
}

/// Polls `fds`. Returns whether one is ready.
fn idle_wait(fds: &mut [PollFd<'_>], timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // Interrupted or woken: the caller checks all sources in any case.
    poll(fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_panicked_thread_is_detected() {
        let rows: [(fn() -> Report, bool); 2] = [(Report::default, true), (|| panic!("on purpose"), false)];
        for (body, well) in rows {
            let (commands, _taken) = channel();
            let thread = Some(thread::spawn(body));
            let mut hand = WorkerHandle { thread, ended: None, commands, bell: EventFd::new().unwrap() };
            while hand.ended().is_none() {
                thread::yield_now();
            }
            assert_eq!((hand.ended(), hand.join().is_some()), (Some(well), well));
        }
    }
}
