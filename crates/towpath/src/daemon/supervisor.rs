//! The main thread of `towpath run`: what needs a file, a lookup, a process or a signal.

mod reload;
mod ruleset;
mod shutdown;
mod start;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;
use towpath_gate::state::Gauge;

use super::inspector_sockets::Socket;
use super::mux_service::Service;
use super::privilege::Capabilities;
use super::round_robin::RoundRobin;
use super::signals::heard;
use super::worker_command::WorkerCommand;
use crate::config::Config;
use crate::control::dumps::Dumps;
use crate::control::{BindError, Server};
use crate::eventfd::EventFd;
use crate::inspector::{self, Inspector};
use crate::report::Report;
use crate::ruleset_manager::{Rechecks, RulesetManager};
use crate::worker_pool;

/// How long the supervisor sleeps at most.
const TICK: Duration = Duration::from_millis(200);

/// Lines of `log` rules that may wait to be printed.
const LOG_LINES: usize = 1024;

/// States that are looked at for keepalives each tick, if there are so many; and how long looking at all of them takes at most, a
/// little less than the five seconds of a round.
const KEEPALIVE_MIN: usize = 65_536;
const KEEPALIVE_ROUND: Duration = Duration::from_millis(4500);

/// How long a start or an end waits for a re-check.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// How long others have the rules between two steps of a re-check.
const RECHECK_PAUSE: Duration = Duration::from_millis(1);

/// Clients that attach before signals, states and threads have their turn again. Each costs milliseconds, and one that comes again and again
/// is always there; who waits is still there in the next turn.
const ACCEPTS_PER_TURN: usize = 8;

/// How often the connections of muxes are looked after.
const REFRESH: Duration = Duration::from_secs(1);

/// Why an engine could not be started.
#[derive(Debug, Error)]
pub enum Failure {
    /// A port cannot be had.
    #[error(transparent)]
    Port(#[from] towpath_port::Error),
    /// There is no control socket.
    #[error("control: {0}")]
    Control(#[from] BindError),
    /// There is no ring for dumps.
    #[error("control: the ring for dumps, beside the control socket: {0}; choose another path for that")]
    Dumps(io::Error),
    /// A mux cannot listen.
    #[error("mux {0}: {1}")]
    Mux(String, String),
    /// A mux's workers could not be started, or did not attach.
    #[error("mux {0}: {1}")]
    Workers(String, worker_pool::Error),
    /// An inspector could not be started, did not attach, or its socket cannot be had.
    #[error(transparent)]
    Inspector(#[from] inspector::Error),
    /// A thread has panicked, or ended with an error: the others were drained.
    #[error("{0} has failed; everything else was drained and has ended")]
    Thread(String),
    /// The states cannot be saved.
    #[error("states: {}: {source}", file.display())]
    States {
        /// Where.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refused something.
    #[error("{0}: {1}")]
    System(&'static str, io::Error),
}

/// How an engine ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What it did.
    pub report: Report,
}

/// See the module's text.
pub struct Supervisor {
    config: Config,
    workers: Vec<WorkerHandle>,
    /// Rung when a worker has ended.
    done: EventFd,
    log: Receiver<String>,
    sockets: Vec<Socket>,
    /// Which of them is looked at next.
    round: RoundRobin,
    channels: u32,
    stop: UnixStream,
    hup: UnixStream,
    kept: Capabilities,
    ruleset: Arc<RulesetManager>,
    services: Vec<Service>,
    /// When the connections of muxes were looked after last, and the rules' version then.
    refreshed: (Instant, u64),
    /// When keepalives were sent last.
    kept_alive: Instant,
    /// What was last said of the states.
    nearly_full: bool,
    /// States are to be re-checked.
    rechecking: bool,
    _server: Option<Server>,
    _dumps: Option<Dumps>,
}

/// A worker, as the supervisor has it.
struct WorkerHandle {
    thread: Option<JoinHandle<Report>>,
    /// What it came to, once it has ended.
    ended: Option<thread::Result<Report>>,
    commands: Sender<WorkerCommand>,
    bell: EventFd,
}

impl WorkerHandle {
    fn say(&self, command: WorkerCommand) {
        // A worker that has ended is noticed in the loop.
        let _ = self.commands.send(command);
        self.bell.signal();
    }

    /// Whether it has ended, and if so whether it ended well.
    fn ended(&mut self) -> Option<bool> {
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            self.ended = Some(thread.join());
        }
        self.ended.as_ref().map(Result::is_ok)
    }

    /// Waits for its end. Nothing when it has panicked.
    fn join(self) -> Option<Report> {
        self.ended.or_else(|| self.thread.map(JoinHandle::join))?.ok()
    }
}

impl Supervisor {
    /// Runs until a signal stops it, or nothing will come any more.
    ///
    /// # Errors
    /// A thread has failed.
    pub fn run(mut self) -> Result<Ended, Failure> {
        loop {
            self.wait();
            self.print_log();
            self.ruleset.tidy();
            self.tell_gauge();
            self.keep_alive();
            self.refresh();
            let (all, failed) = self.look_at_threads();
            if heard(&mut self.stop) || failed {
                self.drain();
                self.outlast();
                break;
            }
            if all {
                break;
            }
            if heard(&mut self.hup) {
                self.reload();
            }
            self.accept_inspectors();
            for socket in &mut self.sockets {
                // Only the first start fails the engine.
                let _ = socket.look_after(false);
            }
        }
        self.end(States::Saved)
    }

    /// Whether all threads have ended, and whether one of them did not end well.
    fn look_at_threads(&mut self) -> (bool, bool) {
        let Self { workers, services, .. } = self;
        let ends = workers.iter_mut().map(WorkerHandle::ended).chain(services.iter_mut().map(Service::ended));
        ends.fold((true, false), |(all, failed), end| (all && end.is_some(), failed || end == Some(false)))
    }

    /// Whether a signal waits that stops it; [`Supervisor::run`] takes it.
    fn is_stopped(&self) -> bool {
        is_signalled(&self.stop)
    }

    fn join(&mut self, queue: u16, channel: towpath_ring::Channel) {
        self.channels += 1;
        let peer = channel.peer();
        log::info!(
            "queue {queue}: process {} of user {} has attached ({})",
            peer.pid,
            peer.uid,
            channel.name()
        );
        // A lane for each worker.
        let lanes = if self.workers.len() > 1 { channel.split() } else { vec![channel] };
        for (worker, lane) in self.workers.iter().zip(lanes) {
            worker.say(WorkerCommand::Join(queue, self.channels, Box::new(Inspector::attached(lane))));
        }
    }

    /// Takes in who has attached, some at a time.
    fn accept_inspectors(&mut self) {
        let (mut sockets, mut round) = (std::mem::take(&mut self.sockets), std::mem::take(&mut self.round));
        round.turn(&mut sockets, ACCEPTS_PER_TURN, |socket| {
            let channel = socket.accept();
            let came = channel.is_some();
            channel.into_iter().for_each(|channel| self.join(socket.queue, channel));
            came
        });
        (self.sockets, self.round) = (sockets, round);
    }

    /// Sleeps until something comes, and no longer than a tick; or re-checks states meanwhile, if there are some to be.
    fn wait(&mut self) {
        let begun = Instant::now();
        while self.rechecking {
            self.recheck_some();
            if self.idle_wait(RECHECK_PAUSE) || begun.elapsed() >= TICK {
                return;
            }
        }
        self.idle_wait(TICK);
    }

    /// Sleeps until something comes, so long at most. Whether it came.
    fn idle_wait(&mut self, timeout: Duration) -> bool {
        let paused: Vec<bool> = self.sockets.iter_mut().map(Socket::is_paused).collect();
        let mut fds: Vec<PollFd<'_>> = vec![
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::new(&self.hup, PollFlags::IN),
            PollFd::new(&self.done, PollFlags::IN),
        ];
        let open = self.sockets.iter().zip(paused).filter(|(_, paused)| !paused);
        fds.extend(open.map(|(socket, _)| PollFd::new(socket, PollFlags::IN)));
        idle_wait(&mut fds, timeout)
    }

    /// Goes on with a re-check, and says what it came to.
    fn recheck_some(&mut self) {
        self.rechecking = self.ruleset.recheck_some();
        if !self.rechecking {
            let Rechecks { looked, dropped, .. } = self.ruleset.rechecks();
            log::info!(
                "re-checked: {looked} states, {dropped} of them dropped, which the rules would not make now"
            );
        }
    }

    fn print_log(&self) {
        self.log.try_iter().take(LOG_LINES).for_each(|line| log::info!("{line}"));
    }

    /// Says when the table of states becomes nearly full, and when it no longer is.
    fn tell_gauge(&mut self) {
        let Gauge { states, unreplied, states_max, nearly_full, .. } = self.ruleset.gauge();
        if nearly_full == self.nearly_full {
            return;
        }
        self.nearly_full = nearly_full;
        match nearly_full {
            true => log::warn!(
                "states are nearly full: {states} of dyn_max {states_max}, {unreplied} of them never replied to"
            ),
            false => log::info!("states are no longer nearly full: {states} of dyn_max {states_max}"),
        }
    }

    /// Sends keepalives, where there are routes to send them by. All states are looked at within five seconds.
    fn keep_alive(&mut self) {
        let since = self.kept_alive.elapsed();
        if self.config.routes.is_empty() || since < TICK {
            return;
        }
        self.kept_alive = Instant::now();
        // A tick that comes late has more to look at.
        let part = since.as_secs_f64() / KEEPALIVE_ROUND.as_secs_f64();
        let due = self.ruleset.keepalives(KEEPALIVE_MIN, part);
        if !due.is_empty() {
            self.workers[0].say(WorkerCommand::Keepalives(due));
        }
    }

    /// Looks after the connections of muxes: every second, and when rules have changed.
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

/// What becomes of the file of states at the end: a start that has failed leaves it as it was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum States {
    Saved,
    Left,
}

fn is_signalled(stop: &UnixStream) -> bool {
    idle_wait(&mut [PollFd::new(stop, PollFlags::IN)], Duration::ZERO)
}

/// Whether something came.
fn idle_wait(fds: &mut [PollFd<'_>], timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // Interrupted by a signal, or woken: the caller looks in any case.
    poll(fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_thread_that_panicked_is_noticed() {
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
