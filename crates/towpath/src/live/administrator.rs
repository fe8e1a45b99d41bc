//! The main thread of `towpath run`: what needs a file, a lookup, a process or a signal.
//!
//! The order at the start matters: ports and sockets are opened, then every capability that is not needed any more is given
//! up, then threads and processes begin.

mod ending;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;
use towpath_gate::gate::{PortId, Ports, Routes, StatePolicy};
use towpath_gate::rules::{Diagnostic, Ruleset};
use towpath_gate::state::Gauge;
use towpath_gate::{Gate, state};
use towpath_port::Port;

use super::door::Door;
use super::edge::{Line, Outside};
use super::hop::{self, Hops};
use super::hugepages;
use super::neighbor::{Directory, Resolver};
use super::order::{Bell, Order};
use super::port;
use super::privilege::Capabilities;
use super::round::Round;
use super::service::{self, Service};
use super::signals::{heard, reloads, stops};
use super::sockets::Socket;
use super::worker::{Parts, Worker};
use crate::config::{self, Config};
use crate::control::dumps::Dumps;
use crate::control::{BindError, Desk, Listening, Server};
use crate::engine::{Arrivals, Engine, Way};
use crate::front;
use crate::inspector::{self, ATTACH_TIMEOUT, Inspector};
use crate::queue::{DefaultVerdict, Policy, Queue};
use crate::report::Report;
use crate::rulebook::{Rechecks, Rulebook};
use crate::settings::Settings;
use crate::snapshot::{self, Saving};

/// How long the administrator sleeps at most.
const TICK: Duration = Duration::from_millis(200);

/// Lines of `log` rules that may wait to be printed.
const LOG_LINES: usize = 1024;

/// States that are looked at for keepalives each tick, if there are so many; and how long looking at all of them takes at most, a
/// little less than the five seconds of a round.
const KEEPALIVE_LEAST: usize = 65_536;
const KEEPALIVE_ROUND: Duration = Duration::from_millis(4500);

/// How long a start or an end waits for a re-check.
const RECHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// How long others have the rules between two steps of a re-check.
const BREATH: Duration = Duration::from_millis(1);

/// Clients that attach before signals, states and threads have their turn again. Each costs milliseconds, and one that comes again and again
/// is always there; who waits is still there in the next turn.
const WELCOMES: usize = 8;

/// How often the connections of muxes are looked after.
const TEND: Duration = Duration::from_secs(1);

/// How long threads have to do what a reload asks of them.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long processes have to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

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
    Workers(String, front::Error),
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
pub struct Administrator {
    config: Config,
    workers: Vec<Hand>,
    /// Rung when a worker has ended.
    done: Bell,
    log: Receiver<String>,
    sockets: Vec<Socket>,
    /// Which of them is looked at next.
    round: Round,
    channels: u32,
    stop: UnixStream,
    hup: UnixStream,
    kept: Capabilities,
    rulebook: Arc<Rulebook>,
    services: Vec<Service>,
    /// When the connections of muxes were looked after last, and the rules' version then.
    tended: (Instant, u64),
    /// When keepalives were sent last.
    kept_alive: Instant,
    /// What was last said of the states.
    nearly_full: bool,
    /// States are to be re-checked.
    rechecking: bool,
    _server: Option<Server>,
    _dumps: Option<Dumps>,
}

/// A worker, as the administrator has it.
struct Hand {
    thread: Option<JoinHandle<Report>>,
    /// What it came to, once it has ended.
    ended: Option<thread::Result<Report>>,
    orders: Sender<Order>,
    bell: Bell,
}

impl Hand {
    fn say(&self, order: Order) {
        // A worker that has ended is noticed in the loop.
        let _ = self.orders.send(order);
        self.bell.ring();
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

impl Administrator {
    /// Opens everything, gives up what is not needed, and starts.
    ///
    /// # Errors
    /// What cannot be had.
    pub fn start(config: Config, ruleset: Ruleset) -> Result<Self, Failure> {
        let signals = |error| Failure::System("signals", error);
        // From the first moment on: who has written to the files does not know how far the start is.
        let hup = reloads().map_err(signals)?;
        let (threads, mux_threads) = (config.engine_threads(), config.mux_threads());
        let mut ports: Vec<_> = std::iter::repeat_with(Vec::new).take(threads).collect();
        for port in &config.ports {
            let (opened, word) = (port::open(port, threads)?, port.driver.word());
            ports.iter_mut().zip(opened).for_each(|(ports, opened)| ports.push((opened, word)));
        }
        // Before the first thing that would stay behind; a port goes with its process, and opening one may take long.
        let stop = stops().map_err(signals)?;
        if let Some(control) = &config.control {
            super::make_directory_of(&control.socket);
        }
        let listening = config.control.as_ref().map(Listening::bind).transpose()?;
        let sockets = config
            .queues
            .iter()
            .map(|queue| Socket::bind(queue, threads.max(1)))
            .collect::<Result<Vec<_>, _>>()?;
        let listening_muxes =
            config.muxes.iter().map(service::Listening::open).collect::<Result<Vec<_>, _>>()?;
        let saved = config.states.as_deref().map(snapshot::read);
        let kept = Capabilities::needed(&config)
            .keep()
            .map_err(|error| Failure::System("capabilities cannot be given up", error))?;
        log::info!("capabilities kept: {kept}");
        if let Some(path) = &config.states {
            // As it will be at the end: better now than when all states are lost by it.
            Saving::create(path).map_err(|source| Failure::States { file: path.clone(), source })?;
        }

        let (mut gate, arrivals, mux_ports) = gate(&config, &ruleset);
        let mut walkers: Vec<_> = (0..threads + config.muxes.len()).map_while(|_| gate.walker()).collect();
        if walkers.len() < threads + config.muxes.len() {
            let error = io::Error::other("there are too many; together they can be 63");
            return Err(Failure::System("threads and muxes", error));
        }
        let mux_walkers = walkers.split_off(threads);
        let rulebook = Arc::new(Rulebook::new(gate, ruleset, config.default_allow));
        if let (Some(path), Some(saved)) = (&config.states, saved) {
            restore(&rulebook, path, saved, config.reload, &stop);
        }
        let system = |error| Failure::System("eventfd", error);
        let bells = (0..threads).map(|_| Bell::new()).collect::<io::Result<Vec<_>>>().map_err(system)?;
        let done = Bell::new().map_err(system)?;
        let wakes: Vec<_> = bells
            .iter()
            .cloned()
            .map(Some)
            .chain(mux_threads.iter().map(|at| at.map(|at| bells[at].clone())))
            .collect();
        let (server, mut desks) = match listening {
            Some(listening) => {
                let (server, desks) = listening.start(Some(Arc::clone(&rulebook)), wakes)?;
                (Some(server), desks.into_iter().map(Some).collect())
            }
            None => (None, wakes.iter().map(|_| None).collect::<Vec<_>>()),
        };
        let mux_desks = desks.split_off(threads);
        let dumps = config.control.as_ref().map(|control| {
            Dumps::start(&control.socket, control.owner, Arc::clone(&rulebook)).map_err(Failure::Dumps)
        });
        let dumps = dumps.transpose()?;
        let (log, lines) = sync_channel(LOG_LINES);
        let start = Instant::now();
        let directory = (!config.routes.is_empty()).then(|| Arc::new(Directory::new(bells.clone())));
        let mut workers = Vec::new();
        for (number, (((ports, walker), bell), desk)) in
            ports.into_iter().zip(walkers).zip(bells).zip(desks).enumerate()
        {
            let edge =
                Outside::new(start, self::lines(&config, &ports), desk, directory.clone().map(Resolver::new));
            let queues = config.queues.iter().map(|queue| Queue::new(queue.number, queue.policy)).collect();
            let unserved = Policy { default: config.unserved, ..Policy::default() };
            let (orders, taken) = channel();
            let parts = Parts {
                engine: Engine::live(edge, walker, arrivals.clone(), queues, unserved),
                ports,
                burst: config.engine.burst,
                orders: taken,
                bell: bell.clone(),
                wait: config.engine.wait,
                drain: config.engine.drain,
                log: log.clone(),
                clock: rulebook.clock(),
            };
            let cpu = config.engine.cpus.get(number).copied();
            let thread = Some(spawn(number, parts, cpu, done.clone())?);
            workers.push(Hand { thread, ended: None, orders, bell });
        }
        let doors = listening_muxes.into_iter().zip(mux_walkers).zip(mux_ports).zip(mux_desks);
        let doors: Vec<_> = doors
            .map(|(((listening, walker), port), desk)| {
                let ((port, name), time) = (port, (start, rulebook.clock()));
                let door = Door::new(&name, walker, port, time, config.unserved, log.clone());
                (listening, door, desk)
            })
            .collect();
        let tended = (Instant::now(), rulebook.version());
        let rechecking = rulebook.rechecks().running;
        let mut administrator = Self {
            config,
            workers,
            done,
            log: lines,
            sockets: Vec::new(),
            round: Round::default(),
            channels: 0,
            stop,
            hup,
            kept,
            rulebook,
            services: Vec::new(),
            tended,
            kept_alive: Instant::now(),
            nearly_full: false,
            rechecking,
            _server: server,
            _dumps: dumps,
        };
        if let Err(failure) = administrator.attach(sockets, doors, &mux_threads) {
            // Threads that wait for the start, and who waits for these, would be left behind.
            administrator.sockets.clear();
            administrator.drain();
            let _ = administrator.end(States::Left);
            return Err(failure);
        }
        if let Some(path) = &administrator.config.states {
            snapshot::set_aside(path);
        }
        Ok(administrator)
    }

    /// Starts the processes of queues and muxes, waits until they have attached, and begins; unless it is told to stop meanwhile.
    fn attach(
        &mut self,
        mut sockets: Vec<Socket>,
        doors: Vec<(service::Listening, Door, Option<Desk>)>,
        mux_threads: &[Option<usize>],
    ) -> Result<(), Failure> {
        let started = self.start_inspectors(&mut sockets);
        self.sockets = sockets;
        started?;
        let (mut served, mut failed) = (Vec::new(), None);
        for (place, ((listening, door, desk), thread)) in doors.into_iter().zip(mux_threads).enumerate() {
            if self.is_stopped() {
                break;
            }
            let done = self.done.clone();
            match listening.start(place, door, desk, thread.is_some(), done, &|| self.is_stopped()) {
                Ok((service, mux)) => {
                    served.extend(thread.zip(mux));
                    self.services.push(service);
                }
                Err(failure) => {
                    failed = Some(failure);
                    break;
                }
            }
        }
        // Those that have attached end with this thread if another one does not.
        for (thread, mux) in served {
            self.workers[thread].say(Order::Serve(Box::new(mux)));
        }
        if let Some(failure) = failed {
            return Err(failure);
        }
        if self.is_stopped() {
            return Ok(());
        }
        self.workers.iter().for_each(|worker| worker.say(Order::Begin));
        Ok(())
    }

    /// Runs until a signal stops it, or nothing will come any more.
    ///
    /// # Errors
    /// A thread has failed.
    pub fn run(mut self) -> Result<Ended, Failure> {
        loop {
            self.wait();
            self.print_log();
            self.rulebook.tidy();
            self.tell_gauge();
            self.keep_alive();
            self.tend();
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
            self.welcome();
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
        let ends = workers.iter_mut().map(Hand::ended).chain(services.iter_mut().map(Service::ended));
        ends.fold((true, false), |(all, failed), end| (all && end.is_some(), failed || end == Some(false)))
    }

    /// Whether a signal waits that stops it; [`Administrator::run`] takes it.
    fn is_stopped(&self) -> bool {
        is_signalled(&self.stop)
    }

    /// Starts the processes of the configuration, and waits until all have attached.
    fn start_inspectors(&mut self, sockets: &mut [Socket]) -> Result<(), Failure> {
        for socket in sockets {
            let mut missing = socket.start()?;
            let start = Instant::now();
            while missing > 0 && !self.is_stopped() {
                for _ in 0..WELCOMES {
                    let Some(channel) = socket.accept() else { break };
                    missing = missing.saturating_sub(1);
                    self.join(socket.queue, channel);
                }
                socket.look_after(true)?;
                if missing > 0 && start.elapsed() >= ATTACH_TIMEOUT {
                    let program = "its command".to_owned();
                    return Err(inspector::Error::Late { queue: socket.queue, program }.into());
                }
                if missing > 0 {
                    let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
                    // One that takes nobody for a while stays readable.
                    if !socket.is_paused() {
                        fds.push(PollFd::new(socket, PollFlags::IN));
                    }
                    doze(&mut fds, Duration::from_millis(20));
                }
            }
        }
        Ok(())
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
            worker.say(Order::Join(queue, self.channels, Box::new(Inspector::attached(lane))));
        }
    }

    /// Takes in who has attached, some at a time.
    fn welcome(&mut self) {
        let (mut sockets, mut round) = (std::mem::take(&mut self.sockets), std::mem::take(&mut self.round));
        round.turn(&mut sockets, WELCOMES, |socket| {
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
            if self.doze(BREATH) || begun.elapsed() >= TICK {
                return;
            }
        }
        self.doze(TICK);
    }

    /// Sleeps until something comes, so long at most. Whether it came.
    fn doze(&mut self, timeout: Duration) -> bool {
        let paused: Vec<bool> = self.sockets.iter_mut().map(Socket::is_paused).collect();
        let mut fds: Vec<PollFd<'_>> = vec![
            PollFd::new(&self.stop, PollFlags::IN),
            PollFd::new(&self.hup, PollFlags::IN),
            PollFd::new(&self.done, PollFlags::IN),
        ];
        let open = self.sockets.iter().zip(paused).filter(|(_, paused)| !paused);
        fds.extend(open.map(|(socket, _)| PollFd::new(socket, PollFlags::IN)));
        doze(&mut fds, timeout)
    }

    /// Goes on with a re-check, and says what it came to.
    fn recheck_some(&mut self) {
        self.rechecking = self.rulebook.recheck_some();
        if !self.rechecking {
            let Rechecks { looked, dropped, .. } = self.rulebook.rechecks();
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
        let Gauge { states, unreplied, states_max, nearly_full, .. } = self.rulebook.gauge();
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
        let due = self.rulebook.keepalives(KEEPALIVE_LEAST, part);
        if !due.is_empty() {
            self.workers[0].say(Order::Keepalives(due));
        }
    }

    /// Looks after the connections of muxes: every second, and when rules have changed.
    fn tend(&mut self) {
        let version = self.rulebook.version();
        let (last, before) = self.tended;
        if self.services.is_empty() || version == before && last.elapsed() < TEND {
            return;
        }
        self.tended = (Instant::now(), version);
        self.services.iter().for_each(|service| service.tend(version != before));
    }

    /// Reads the configuration and the rules again. All of it is taken, or nothing.
    fn reload(&mut self) {
        match self.read_again() {
            Ok((config, ruleset, bound)) => {
                self.prepare(&config);
                if self.rechecking {
                    log::info!(
                        "reloaded again before all states were re-checked: all of them are, by these rules"
                    );
                }
                let settings = settings(&config);
                let routes = (config.routes != self.config.routes).then(|| routes(&config));
                let diff = self.rulebook.replace(
                    ruleset,
                    routes,
                    config.default_allow,
                    config.reload,
                    Some(settings),
                );
                self.rechecking = self.rulebook.rechecks().running;
                self.change(config, bound);
                // When all of it is so: who reads this line may attach by the new words at once.
                log::info!(
                    "reloaded: {} rules added, {} removed, {} kept; {} states dropped",
                    diff.added.len(),
                    diff.removed.len(),
                    diff.kept,
                    diff.states_dropped
                );
            }
            Err(reasons) => {
                for reason in reasons {
                    log::warn!("not reloaded: {reason}");
                }
            }
        }
    }

    /// Has the threads do whatever other rules may ask of them, before the first packet meets these; what is not asked of them
    /// any more goes on until [`change`](Self::change). So no packet is dropped for what is there by the one or the other.
    fn prepare(&self, config: &Config) {
        let Self { config: before, services, .. } = self;
        for queue in &config.queues {
            if lenient(before, queue) {
                self.say(&|| Order::Queue(queue.number, queue.policy));
            }
        }
        if config.unserved != before.unserved && config.unserved == DefaultVerdict::Pass {
            self.say(&|| Order::Unserved(config.unserved));
            services.iter().for_each(|service| service.set_unserved(config.unserved));
        }
        if config.routes != before.routes {
            self.say(&|| Order::Routes(before.routes.clone(), config.routes.clone()));
        }
        self.settle();
    }

    fn say(&self, order: &dyn Fn() -> Order) {
        self.workers.iter().for_each(|worker| worker.say(order()));
    }

    /// Waits until the threads have done what was said, and not for long: one that ends does nothing of it.
    fn settle(&self) {
        let (done, settled) = channel();
        self.say(&|| Order::Settle(done.clone()));
        drop(done);
        // Nothing ever comes: it is over when the last of them has let go.
        let _ = settled.recv_timeout(SETTLE_TIMEOUT);
    }

    /// Takes what else can change while it runs.
    fn change(&mut self, config: Config, bound: Vec<Socket>) {
        let before = std::mem::replace(&mut self.config, config);
        let Self { config, workers, sockets, services, .. } = self;
        sockets.extend(bound);
        let say = |order: &dyn Fn() -> Order| workers.iter().for_each(|worker| worker.say(order()));
        for queue in &config.queues {
            let old = before.queues.iter().find(|old| old.number == queue.number);
            if old == Some(queue) {
                continue;
            }
            log::info!("queue {}: {}", queue.number, if old.is_some() { "changed" } else { "new" });
            if !lenient(&before, queue) {
                say(&|| Order::Queue(queue.number, queue.policy));
            }
            if let Some(socket) = sockets.iter_mut().find(|socket| socket.queue == queue.number) {
                socket.want(&queue.inspectors);
            }
        }
        if config.unserved != before.unserved {
            say(&|| Order::Unserved(config.unserved));
            services.iter().for_each(|service| service.set_unserved(config.unserved));
        }
        if config.engine != before.engine {
            say(&|| Order::Pace(config.engine.clone()));
        }
        if config.routes != before.routes {
            say(&|| Order::Routes(config.routes.clone(), before.routes.clone()));
        }
    }

    /// The files as they are now, and the sockets of queues that are new.
    fn read_again(&self) -> Result<(Config, Ruleset, Vec<Socket>), Vec<String>> {
        let lines = |found: Vec<Diagnostic>| found.iter().map(ToString::to_string).collect::<Vec<_>>();
        let mut config = Config::read(&self.config.file).map_err(lines)?;
        config.number_ports_as(&self.config);
        let fixed = self.config.fixed_differences(&config);
        if !fixed.is_empty() {
            let missing = self.kept.missing(Capabilities::needed(&config));
            let why = match missing.is_empty() {
                true => String::new(),
                false => format!(" ({missing} was given up)"),
            };
            let line = |what| format!("{what} cannot change while it runs{why}: restart");
            return Err(fixed.iter().map(line).collect());
        }
        let cramped = |queue: &config::Queue| {
            let socket = self.sockets.iter().find(|socket| socket.queue == queue.number)?;
            let why = socket.lacks(&queue.inspectors)?;
            Some(format!("queue {}: {why}, which cannot change while it runs: restart", queue.number))
        };
        let cramped: Vec<String> = config.queues.iter().filter_map(cramped).collect();
        if !cramped.is_empty() {
            return Err(cramped);
        }
        let rules = config.read_rules().map_err(lines)?;
        if let Some(path) = config.states.as_ref().filter(|_| config.states != self.config.states) {
            Saving::create(path).map_err(|error| vec![format!("states: {}: {error}", path.display())])?;
        }
        let is_new = |queue: &&config::Queue| !self.sockets.iter().any(|socket| socket.queue == queue.number);
        let bind =
            |queue| Socket::bind(queue, self.workers.len().max(1)).map_err(|error| vec![error.to_string()]);
        let bound = config.queues.iter().filter(is_new).map(bind).collect::<Result<_, _>>()?;
        rules.warnings.iter().for_each(|warning| log::warn!("{warning}"));
        Ok((config, rules.ruleset, bound))
    }
}

/// Whether a queue is new, or lets pass what nobody decides where it did not: then it comes before the rules.
fn lenient(before: &Config, queue: &config::Queue) -> bool {
    let old = before.queues.iter().find(|old| old.number == queue.number);
    let verdict = queue.policy.default;
    old.is_none_or(|old| old.policy.default != verdict && verdict == DefaultVerdict::Pass)
}

/// What becomes of the file of states at the end: a start that has failed leaves it as it was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum States {
    Saved,
    Left,
}

/// Takes the states that an engine before this one has left. What cannot be read is no reason to stand still: connections
/// meet the rules again then.
fn restore(
    rulebook: &Rulebook,
    path: &Path,
    saved: io::Result<Option<Vec<u8>>>,
    policy: StatePolicy,
    stop: &UnixStream,
) {
    let file = path.display();
    match saved {
        Ok(None) => log::info!("{file}: no states yet"),
        Ok(Some(saved)) => match rulebook.restore(&saved, rulebook.clock().now()) {
            Ok(restored) => {
                log::info!("{file}: {}", snapshot::told(restored));
                // The rules have changed meanwhile, or changed when there was no time any more: it is as if they were reloaded.
                if (restored.companion > 0 || restored.unchecked) && policy != StatePolicy::Keep {
                    rulebook.recheck();
                    // No packet comes yet. What is left after a while is re-checked beside them.
                    let begun = Instant::now();
                    rulebook.recheck_until(|| begun.elapsed() >= RECHECK_TIMEOUT || is_signalled(stop));
                    let Rechecks { dropped, running, .. } = rulebook.rechecks();
                    let more = if running { ", and there are more to be re-checked" } else { "" };
                    log::info!("{file}: {dropped} states dropped, which the rules would not make now{more}");
                }
            }
            Err(error) => log::warn!("{file}: no states restored: {error}"),
        },
        Err(error) => log::warn!("{file}: no states restored: {error}"),
    }
}

/// What leaves by each port of a thread.
fn lines(config: &Config, ports: &[(Box<dyn Port>, &'static str)]) -> Vec<Line> {
    let line = |(at, (port, _)): (usize, &(Box<dyn Port>, _))| {
        let caps = port.caps();
        let routed = !config.taps.contains(&at) && !config.bridges.iter().any(|b| b.ports.contains(&at));
        let hops = (routed && !caps.verdicts).then(|| Hops::new(&config.routes, at, caps.address));
        let addresses = config.ports[at].addresses.clone();
        Line { addresses, mtu: hop::mtu(&caps), ..Line::new(caps.send, hops) }
    };
    ports.iter().enumerate().map(line).collect()
}

/// A gate, how its ports hang together, and those of the muxes with their names. A port's number is its place in the
/// configuration; ports of VLANs follow, then those of muxes.
fn gate(config: &Config, ruleset: &Ruleset) -> (Gate, Arrivals, Vec<(PortId, String)>) {
    let mut ports = Ports::new();
    let ids: Vec<_> = config.ports.iter().map(|port| ports.add(&port.name, port.addresses.clone())).collect();
    let mut arrivals = Arrivals::none();
    for (at, port) in config.ports.iter().enumerate() {
        arrivals.add(ids[at], way(config, at, &ids));
        for vlan in &port.vlans {
            arrivals.tagged(vlan.id, ports.add(&vlan.name, Vec::new()));
        }
    }
    let muxes = config.muxes.iter().map(|mux| (ports.add(&mux.name, Vec::new()), mux.name.clone())).collect();
    // Unpredictable: nobody can make states collide from outside.
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let pages = hugepages::states(config.engine.hugepages);
    let mut gate = Gate::with_pages(ruleset.clone(), ports, state::Settings::default(), seed, pages);
    gate.set_routes(routes(config));
    settings(config).give(&mut gate);
    (gate, arrivals, muxes)
}

/// The routes. A port's number is its place.
fn routes(config: &Config) -> Routes {
    let mut routes = Routes::new();
    for route in &config.routes {
        let port = PortId(route.port as u16);
        // Where a gateway is named, or it is the default route, what lies behind is no port's own net.
        let connected = route.via.is_none() && route.len > 0;
        routes.add(route.net, route.len, towpath_gate::gate::Route { port, connected });
    }
    routes
}

fn way(config: &Config, port: usize, ids: &[towpath_gate::gate::PortId]) -> Way {
    if config.ports[port].driver.returns() {
        return Way::Back;
    }
    if config.taps.contains(&port) {
        return Way::Nowhere;
    }
    let bridge = config.bridges.iter().find(|bridge| bridge.ports.contains(&port));
    bridge.map_or(Way::Router, |bridge| {
        let other = if bridge.ports[0] == port { bridge.ports[1] } else { bridge.ports[0] };
        Way::Bridge { xmit: ids[other], walk_out: bridge.walk_out }
    })
}

fn settings(config: &Config) -> Settings {
    let mut settings = Settings::default();
    for (name, value) in &config.settings {
        settings.set(name, *value).expect("the configuration was checked");
    }
    settings
}

fn spawn(number: usize, parts: Parts, cpu: Option<usize>, done: Bell) -> Result<JoinHandle<Report>, Failure> {
    let body = move || {
        if let Some(cpu) = cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                log::warn!("the engine cannot stay on processor {cpu}: {error}");
            }
        }
        let report = Worker::new(parts).run();
        done.ring();
        report
    };
    let thread = thread::Builder::new().name(format!("engine-{number}"));
    thread.spawn(body).map_err(|error| Failure::System("no thread", error))
}

fn is_signalled(stop: &UnixStream) -> bool {
    doze(&mut [PollFd::new(stop, PollFlags::IN)], Duration::ZERO)
}

/// Whether something came.
fn doze(fds: &mut [PollFd<'_>], timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // Interrupted by a signal, or woken: the caller looks in any case.
    poll(fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_owns_the_nets_without_a_gateway() {
        let head = "rules = \"r\"\n[port.lan]\ndriver = \"tun\"\n";
        let route = |(to, more): (&str, &str)| format!("[[route]]\nto = \"{to}\"\nport = \"lan\"\n{more}\n");
        let rows =
            [("10.0.0.0/24", ""), ("10.9.0.0/16", "via = \"10.0.0.9\""), ("0.0.0.0/0", ""), ("::/0", "")];
        let text = head.to_owned() + &rows.map(route).concat();
        let routes = routes(&Config::parse("t", &text).unwrap());
        let addresses = [("10.0.0.7", true), ("10.9.0.7", false), ("8.8.8.8", false), ("2001:db8::1", false)];
        for (address, connected) in addresses {
            let (route, _) = routes.lookup(address.parse().unwrap()).unwrap();
            assert_eq!(route.connected, connected, "{address}");
        }
    }

    #[test]
    fn a_thread_that_panicked_is_noticed() {
        let rows: [(fn() -> Report, bool); 2] = [(Report::default, true), (|| panic!("on purpose"), false)];
        for (body, well) in rows {
            let (orders, _taken) = channel();
            let thread = Some(thread::spawn(body));
            let mut hand = Hand { thread, ended: None, orders, bell: Bell::new().unwrap() };
            while hand.ended().is_none() {
                thread::yield_now();
            }
            assert_eq!((hand.ended(), hand.join().is_some()), (Some(well), well));
        }
    }
}
