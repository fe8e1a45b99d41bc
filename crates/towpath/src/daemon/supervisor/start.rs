//! Startup of the daemon.
//!
//! Order: open ports and sockets, drop the capabilities that are no longer needed, start threads and processes.

use std::io::{self, PipeReader};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{channel, sync_channel};
use std::task::Waker;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towpath_gate::StatePolicy;
use towpath_gate::rules::Ruleset;
use towpath_port::offload::FlowMap;
use towpath_port::{Opener, Port, driver, scheduling};
use towpath_wire::LinkType;

use super::super::inherited::{self, Inherited};
use super::super::inspector_sockets::Socket;
use super::super::launcher::Launcher;
use super::super::mux_admission::MuxAdmission;
use super::super::mux_service;
use super::super::privilege::{self, Capabilities};
use super::super::remote_front::RemoteConfig;
use super::super::round_robin::RoundRobin;
use super::super::signals::{reloads, stops, upgrades};
use super::super::stalled::stalled;
use super::super::worker::{Parts, Worker};
use super::super::worker_command::WorkerCommand;
use super::ruleset::gate;
use super::state_log::StateLog;
use super::upgrade::{Later, Upgrade};
use super::{
    ACCEPTS_PER_TURN, Failure, LOG_LINES, RECHECK_TIMEOUT, States, Supervisor, WorkerHandle, idle_wait,
    is_signalled,
};
use crate::config::{self, Config, EventOutput};
use crate::control::dumps::{self, Dumps};
use crate::control::{AcceptPace, EndpointCounters, Listening, PortRows, QueryInbox, logged_packets};
use crate::eventfd::EventFd;
use crate::events;
use crate::fleet::Fleet;
use crate::fleet::group::{GroupRules, GroupThread};
use crate::inspector::{self, ATTACH_TIMEOUT};
use crate::ipfix;
use crate::leftovers;
use crate::metrics::endpoint;
use crate::offload::{self, Offload, Offloading};
use crate::packet_log::LogSender;
use crate::process::{Local, Remote, Starter};
use crate::quantity::count;
use crate::report::Report;
use crate::ruleset_manager::{Rechecks, RulesetManager};
use crate::sandbox::{self, Role};
use crate::service_manager::{Sockets, Watchdog, notify};
use crate::snapshot::{self, Saving};
use towpath_engine::Engine;
use towpath_engine::egress::{PortIo, QueryServer, RouterPort, TxConfig, TxQueue};
use towpath_engine::queue::{Policy, Queue};
use towpath_engine::router;
use towpath_engine::router::{Directory, Resolver};

impl Supervisor {
    /// Opens ports and sockets, drops capabilities, and starts threads and processes. `passed` are the sockets of the service manager.
    ///
    /// # Errors
    ///
    /// The first resource that is unavailable.
    pub fn start(config: Config, ruleset: Ruleset, passed: Sockets) -> Result<Self, Failure> {
        Self::start_with(config, ruleset, passed, None)
    }

    /// As [`start`](Self::start), and takes over from the process that has started this one to be replaced by it. That process continues if
    /// this fails.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); [`Failure::Upgrade`] if that process ends or ends the upgrade.
    pub fn start_with(
        config: Config,
        ruleset: Ruleset,
        mut passed: Sockets,
        mut inherited: Option<Inherited>,
    ) -> Result<Self, Failure> {
        let signals = |error| Failure::System("signals", error);
        // Before the files are read: a SIGHUP that follows a change of the files must not be lost.
        let hup = reloads().map_err(signals)?;
        let usr2 = upgrades().map_err(signals)?;
        let identity = privilege::engine_user(config.engine.identity)
            .map_err(|error| Failure::System("the engine's user", error))?;
        privilege::start_helper_threads(identity);
        privilege::warn_of_root(config.engine.identity, identity);
        leftovers::remove_at_start(identity);
        let launcher = match rustix::process::geteuid().is_root() {
            true if let Some(inherited) = &mut inherited => {
                let taken = inherited.launcher().and_then(|socket| Launcher::inherited(socket, &config));
                Some(taken.map_err(|error| Failure::System("the launcher of the old version", error))?)
            }
            true => Some(Launcher::start(&config).map_err(|error| Failure::System("the launcher", error))?),
            false => None,
        };
        let starter = match &launcher {
            Some(launcher) => Starter::Remote(Arc::clone(launcher) as Arc<dyn Remote>),
            None => Starter::Local(Local::daemon()),
        };
        let (threads, mux_threads) = (config.engine_threads(), config.mux_threads());
        // The memory of XDP sockets is accounted to the engine's user. A socket that is opened again needs it too.
        let locks = config.ports.iter().any(|port| matches!(port.driver, driver::Config::AfXdp(_)));
        let limited = locks && !raise_memlock();
        let mut ports: Vec<_> = std::iter::repeat_with(Vec::new).take(threads).collect();
        let opener_of = |port: &config::Port| match &launcher {
            Some(launcher) => {
                let (launcher, name) = (Arc::clone(launcher), port.name.clone());
                Opener::new(move |object| launcher.open(&name, object))
            }
            None => port.driver.local_opener(),
        };
        let flow_map = open_flow_map(&config, opener_of);
        let parts: Vec<_> = match &mut inherited {
            Some(inherited) => config.ports.iter().map(|port| inherited.port(&port.name)).collect(),
            None => config.ports.iter().map(|_| Vec::new()).collect(),
        };
        // The kernel takes tens of milliseconds for the memory of a port. Ports wait for it at the same time.
        let opened: Vec<_> = thread::scope(|scope| {
            let ports = config.ports.iter().zip(parts);
            let opening: Vec<_> = ports
                .map(|(port, parts)| {
                    let opener = opener_of(port);
                    let mut driver = port.driver.clone();
                    if flow_map.is_none() {
                        driver.clear_flows();
                    }
                    scope.spawn(move || match port.optional {
                        _ if !parts.is_empty() => driver.adopt(&port.name, threads, parts, &opener),
                        true => driver.open_optional(&port.name, threads, &opener),
                        false => driver.open_with(&port.name, threads, &opener),
                    })
                })
                .collect();
            opening.into_iter().map(|port| port.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        });
        for (port, opened) in config.ports.iter().zip(opened) {
            let word = port.driver.name();
            ports.iter_mut().zip(opened?).for_each(|(ports, opened)| ports.push((opened, word)));
        }
        // Before the first resource that outlives the process. Ports end with the process, and opening one may take long.
        let stop = stops().map_err(signals)?;
        let mut listener = |name: &str| inherited.as_mut().and_then(|inherited| inherited.listener(name));
        let listening = match (&config.control, listener(inherited::CONTROL)) {
            (None, _) => None,
            (Some(control), Some(socket)) => Some(Listening::adopt_as(control, identity, socket)?),
            (Some(control), None) => {
                super::super::make_directory_of(&control.socket, identity);
                Some(Listening::open(control, identity, &mut passed)?)
            }
        };
        if let Some(path) = config.metrics.as_ref().and_then(config::Metrics::unix) {
            super::super::make_directory_of(path, identity);
        }
        let listening_metrics = config
            .metrics
            .as_ref()
            .map(|metrics| match listener(inherited::METRICS) {
                Some(socket) => Ok(endpoint::Listening::adopt(metrics, socket)),
                None => endpoint::Listening::open(metrics, identity, &mut passed),
            })
            .transpose()?;
        let sockets = config
            .queues
            .iter()
            .map(|queue| {
                let socket = listener(&inherited::queue(queue.number));
                Socket::bind(queue, threads.max(1), &starter, identity, socket)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let dumps_socket = config.control.as_ref().and_then(|_| listener(inherited::DUMPS));
        let listening_muxes = config
            .muxes
            .iter()
            .map(|mux| {
                let remote = RemoteConfig::of(mux, config.fleet.as_ref());
                let inherited = inherited.as_mut();
                mux_service::Listening::open(mux, remote, &starter, identity, &mut passed, inherited)
            })
            .collect::<Result<Vec<_>, _>>()?;
        passed.finish();
        let dumps = config.control.as_ref().map(|control| match dumps_socket {
            Some(socket) => Dumps::adopt(control, identity, socket).map_err(Failure::Dumps),
            None => Dumps::bind(control, identity).map_err(Failure::Dumps),
        });
        let dumps = dumps.transpose()?;
        let ipfix = config.ipfix.as_ref().map(ipfix::Opened::open).transpose()?;
        if let Some(EventOutput::File(path)) = config.events.as_ref().map(|events| &events.output) {
            super::super::make_directory_of(path, identity);
        }
        let events = config.events.as_ref().map(events::Prepared::new);
        let packet_events = events.as_ref().and_then(events::Prepared::sender);
        let saved = config.states.as_deref().filter(|_| inherited.is_none()).map(snapshot::read);
        let needed = match launcher {
            Some(_) => Capabilities::needed_in_use(&config),
            None => Capabilities::needed(&config),
        };
        let needed = if limited { needed.with_locked_memory() } else { needed };
        let kept =
            needed.keep_as(identity).map_err(|error| Failure::System("cannot drop privileges", error))?;
        tracing::info!("capabilities kept: {kept}");
        sandbox::begin(&config, launcher.is_some())
            .map_err(|error| Failure::System("`sandbox` of [engine]: seccomp", error))?;
        if let Some(identity) = identity {
            tracing::info!("the engine is user {}, group {}", identity.user, identity.group);
        }
        if let Some(path) = &config.states {
            // Tests the file as the shutdown will write it: an error now is better than lost states then.
            Saving::create(path).map_err(|source| Failure::States { file: path.clone(), source })?;
        }

        let (mut gate, topology, mux_ports) = gate(&config, &ruleset);
        let mut walkers: Vec<_> = (0..threads + config.muxes.len()).map_while(|_| gate.walker()).collect();
        if walkers.len() < threads + config.muxes.len() {
            let error = io::Error::other("too many; at most 63 together");
            return Err(Failure::System("threads and muxes", error));
        }
        let mux_walkers = walkers.split_off(threads);
        let offload_parts = match &flow_map {
            Some(_) => {
                let error =
                    || io::Error::other("too many threads and muxes; at most 63 together with offload");
                let walker = gate.walker().ok_or_else(error);
                let walker = walker.map_err(|error| Failure::System("offload", error))?;
                Some((walker, gate.states().journal()))
            }
            None => None,
        };
        let ruleset =
            RulesetManager::new(gate, ruleset, config.default_allow).with_topology(topology.clone());
        let ruleset = Arc::new(ruleset);
        // Before the states, which belong to these rules.
        let group_rules = GroupRules::open(&config, &ruleset);
        if let (Some(path), Some(saved)) = (&config.states, saved) {
            restore(&ruleset, path, saved, config.reload, &stop);
        }
        let system = |error| Failure::System("eventfd", error);
        let bells = (0..threads).map(|_| EventFd::new()).collect::<io::Result<Vec<_>>>().map_err(system)?;
        let done = EventFd::new().map_err(system)?;
        let (stalled_sender, stalled) = stalled().map_err(system)?;
        let wakes: Vec<_> = bells
            .iter()
            .cloned()
            .map(Some)
            .chain(mux_threads.iter().map(|at| at.map(|at| bells[at].clone())))
            .collect();
        let counters = EndpointCounters::default();
        let metrics_wakeup = EventFd::new().map_err(system)?;
        let (server, mut inboxes, senders) = match listening {
            Some(listening) => {
                let (server, inboxes) =
                    listening.start_with(Some(Arc::clone(&ruleset)), wakes, counters.clone())?;
                let senders = server.senders(&metrics_wakeup);
                (Some(server), inboxes.into_iter().map(Some).collect(), senders)
            }
            None if listening_metrics.is_some() => {
                let pairs = wakes.into_iter().map(|wake| QueryInbox::new(metrics_wakeup.clone(), wake));
                let (inboxes, senders): (Vec<_>, _) = pairs.unzip();
                (None, inboxes.into_iter().map(Some).collect(), senders)
            }
            None => (None, wakes.iter().map(|_| None).collect::<Vec<_>>(), Vec::new()),
        };
        let (for_endpoint, shown) = (Arc::clone(&ruleset), counters.clone());
        let start_endpoint = move |listening: endpoint::Listening| {
            listening
                .start(for_endpoint, senders, metrics_wakeup, shown)
                .map_err(|error| Failure::System("the metrics endpoint", error))
        };
        // The process that this one replaces serves their clients until it has stopped.
        let mut later: Vec<Later> = Vec::new();
        let endpoint = match listening_metrics {
            Some(listening) if inherited.is_some() => {
                later.push(Box::new(move |this| {
                    this.endpoint = Some(start_endpoint(listening)?);
                    Ok(())
                }));
                None
            }
            listening => listening.map(start_endpoint).transpose()?,
        };
        let mux_desks = inboxes.split_off(threads);
        let (copies, logged) = logged_packets();
        let copies = dumps.is_some().then_some(copies);
        let (for_dumps, shown) = (Arc::clone(&ruleset), counters.clone());
        let start_dumps =
            move |dumps: dumps::Listening| dumps.start(for_dumps, shown, logged).map_err(Failure::Dumps);
        let dumps = match dumps {
            Some(dumps) if inherited.is_some() => {
                later.push(Box::new(move |this| {
                    this.dumps = Some(start_dumps(dumps)?);
                    Ok(())
                }));
                None
            }
            dumps => dumps.map(start_dumps).transpose()?,
        };
        let (log, lines) = sync_channel(LOG_LINES);
        let log =
            || LogSender::new(log.clone()).with_events(packet_events.clone()).with_copies(copies.clone());
        let start = Instant::now();
        // The wall clock may be before 1970: then the times of rules count from the engine's start.
        ruleset.clock().set_zero(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        let events = events.map(|events| events.start(&ruleset, counters.clone())).transpose()?;
        let start_ipfix = |opened: ipfix::Opened| {
            let started = opened.start(&ruleset, counters.clone());
            started.map_err(|error| Failure::System("the thread of flow records", error))
        };
        let ipfix = ipfix.map(start_ipfix).transpose()?;
        let start_fleet = |fleet: &config::Fleet| {
            let started = Fleet::start(fleet, &ruleset, counters.clone());
            started.map_err(|error| Failure::System("fleet", error))
        };
        // Without a group, only muxes use the servers.
        let in_group = config.fleet.as_ref().filter(|fleet| fleet.group.is_some());
        let fleet = in_group.map(start_fleet).transpose()?;
        let start_group = |(fleet, rules): (&config::Fleet, &Arc<GroupRules>)| {
            let started = GroupThread::start(fleet, Arc::clone(rules), counters.clone());
            started.map_err(|error| Failure::System("group", error))
        };
        let group = in_group.zip(group_rules.as_ref()).map(start_group).transpose()?;
        let directory = (!config.routes.is_empty()).then(|| {
            let wakers = bells.iter().map(|bell| Waker::from(Arc::new(bell.clone()))).collect();
            Arc::new(Directory::new(wakers))
        });
        let offload = match flow_map.zip(offload_parts) {
            Some((map, (walker, journal))) => {
                let settings = config.offload.unwrap_or_default();
                let interfaces = config.ports.iter().map(|port| {
                    let offloads = port.driver.clone().set_flows(settings.flows());
                    let native = port.driver.redirects_natively();
                    let name = port.driver.interface().filter(|_| offloads)?;
                    let shared = port.driver.shares_with_kernel();
                    Some(offload::Interface { name: name.to_owned(), native, shared })
                });
                let parts = offload::Parts {
                    walker,
                    journal,
                    topology: topology.clone(),
                    interfaces: interfaces.collect(),
                    directory: directory.clone(),
                    start,
                };
                let started = Offload::new(map, &settings, parts).and_then(|offload| {
                    ruleset.set_offload(Arc::clone(&offload));
                    Offloading::start(&offload)
                });
                Some(started.map_err(|error| Failure::System("offload", error))?)
            }
            None => None,
        };
        let (mut workers, mut beats) = (Vec::new(), Vec::new());
        for (number, (((ports, walker), bell), inbox)) in
            ports.into_iter().zip(walkers).zip(bells).zip(inboxes).enumerate()
        {
            let rows = PortRows::default();
            let queries: Box<dyn QueryServer + Send> = match inbox {
                Some(mut inbox) => {
                    inbox.set_ports(Arc::clone(&rows));
                    Box::new(inbox)
                }
                None => Box::new(()),
            };
            let resolver = directory.clone().map(Resolver::new);
            let io = PortIo::new(start, tx_queues(&config, &ports), queries, resolver);
            let queues =
                config.queues.iter().map(|queue| Queue::new(queue.number, queue.policy.clone())).collect();
            let unserved = Policy { default: config.unserved, ..Policy::default() };
            let (commands, taken) = channel();
            let mut engine = Engine::live(io, walker, topology.clone(), queues, unserved);
            engine.set_reorder_limits(config.engine.reorder);
            engine.set_log_drops(config.engine.log_drops);
            if let Some(offload) = ruleset.offload() {
                engine.set_verdict_feed(offload.verdict_feed());
            }
            let parts = Parts {
                engine,
                ports,
                rows,
                burst: config.engine.burst,
                commands: taken,
                stalled: stalled_sender.clone(),
                bell: bell.clone(),
                wait: config.engine.wait,
                drain: config.engine.drain,
                log: log(),
                clock: ruleset.clock(),
                heartbeat: Arc::default(),
            };
            beats.push((format!("engine-{number}"), Arc::clone(&parts.heartbeat)));
            let cpu = config.engine.cpus.get(number).copied();
            let thread = Some(spawn(number, parts, cpu, done.clone())?);
            workers.push(WorkerHandle { thread, ended: None, commands, bell });
        }
        let admissions = listening_muxes.into_iter().zip(mux_walkers).zip(mux_ports).zip(mux_desks);
        let admissions: Vec<_> = admissions
            .map(|(((listening, walker), port), inbox)| {
                let ((port, _), time) = (port, (start, ruleset.clock()));
                let admission = MuxAdmission::new(walker, port, time, config.unserved, log());
                (listening, admission, inbox)
            })
            .collect();
        let refreshed = (Instant::now(), ruleset.version());
        let rechecking = ruleset.rechecks().running;
        let mut supervisor = Self {
            config,
            workers,
            done,
            stalled,
            log: lines,
            logging: false,
            state_log: StateLog::default(),
            sockets: Vec::new(),
            round: RoundRobin::default(),
            pace: AcceptPace::default(),
            connecting: false,
            channels: 0,
            stop,
            hup,
            usr2,
            kept,
            starter,
            launcher,
            ruleset,
            services: Vec::new(),
            refreshed,
            kept_alive: Instant::now(),
            nearly_full: false,
            rechecking,
            running: None,
            ipfix,
            fleet,
            group_rules,
            group,
            events,
            offload,
            offload_paused: None,
            server,
            counters,
            endpoint,
            dumps,
            inherited,
            upgrade: Upgrade::None,
            watchdog: None,
        };
        supervisor.offer_upgrades();
        if let Err(failure) = supervisor.attach(sockets, admissions, &mux_threads, later) {
            // The threads wait for `Begin`: end them.
            supervisor.sockets.clear();
            supervisor.drain();
            let _ = supervisor.end(States::Left);
            return Err(failure);
        }
        match &supervisor.config {
            // The first base replaces the file. Until then, an engine that is killed leaves the states that this one began with.
            Config { states: Some(_), states_every: Some(_), .. } => {
                supervisor.save_states().map_err(|error| Failure::System("thread", error))?;
            }
            Config { states: Some(path), .. } => snapshot::set_aside(path),
            _ => {}
        }
        supervisor.watchdog =
            Watchdog::start(beats).map_err(|error| Failure::System("the watchdog's thread", error))?;
        notify(&format!("READY=1\nSTATUS={}", supervisor.summary()));
        Ok(supervisor)
    }

    /// Starts the processes of queues and muxes, waits until they have attached, and tells the workers to begin. A stop signal
    /// ends the wait.
    fn attach(
        &mut self,
        mut sockets: Vec<Socket>,
        admissions: Vec<(mux_service::Listening, MuxAdmission, Option<QueryInbox>)>,
        mux_threads: &[Option<usize>],
        later: Vec<Later>,
    ) -> Result<(), Failure> {
        let path = |socket: &Socket| Some((socket.queue, socket.configured_path()?.to_owned()));
        self.counters.set_paths(sockets.iter().filter_map(path));
        let started = match self.inherited {
            Some(_) => Ok(()),
            None => self.start_inspectors(&mut sockets),
        };
        self.sockets = sockets;
        started?;
        let (mut served, mut failed) = (Vec::new(), None);
        for (place, ((listening, admission, inbox), thread)) in
            admissions.into_iter().zip(mux_threads).enumerate()
        {
            if self.is_stopped() {
                break;
            }
            let done = self.done.clone();
            match listening.start(place, admission, inbox, thread.is_some(), done, &|| self.is_stopped()) {
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
        // Muxes whose workers have attached are served even if another mux failed: the drain that follows ends them.
        for (thread, mux) in served {
            self.workers[thread].say(WorkerCommand::Serve(Box::new(mux)));
        }
        if let Some(failure) = failed {
            return Err(failure);
        }
        if self.is_stopped() {
            return Ok(());
        }
        if !self.take_over(later)? {
            self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Begin));
        }
        Ok(())
    }

    /// Starts the configured inspector processes and waits until all have attached.
    fn start_inspectors(&mut self, sockets: &mut [Socket]) -> Result<(), Failure> {
        for socket in sockets {
            let mut missing = socket.start()?;
            let start = Instant::now();
            while missing > 0 && !self.is_stopped() {
                for _ in 0..ACCEPTS_PER_TURN {
                    let Some((channel, standby)) = socket.accept() else { break };
                    missing = missing.saturating_sub(1);
                    self.join(socket.queue, channel, standby);
                }
                socket.look_after(true)?;
                if missing > 0 && start.elapsed() >= ATTACH_TIMEOUT {
                    let program = "its command".to_owned();
                    return Err(inspector::Error::Late { queue: socket.queue, program }.into());
                }
                if missing > 0 {
                    let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
                    // A paused socket stays readable.
                    if !socket.is_paused() {
                        fds.push(PollFd::new(socket, PollFlags::IN));
                    }
                    idle_wait(&mut fds, Duration::from_millis(20));
                }
            }
        }
        Ok(())
    }
}

/// Opens the flow map of a configuration with offload. Without it, the engine works as without offload, and the log says why.
fn open_flow_map(config: &Config, opener_of: impl Fn(&config::Port) -> Opener) -> Option<FlowMap> {
    let offload = config.offload?;
    let mut ports = config.ports.iter();
    let port = ports.find(|port| port.driver.clone().set_flows(offload.flows()))?;
    match FlowMap::open(&opener_of(port), offload.entries) {
        Ok(map) => Some(map),
        Err(reason) => {
            log::warn!("offload is not available, all packets take the path through the engine: {reason}");
            None
        }
    }
}

/// Raises RLIMIT_MEMLOCK as far as this process may. Returns true if there is no limit now.
fn raise_memlock() -> bool {
    if setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }).is_ok() {
        return true;
    }
    let Rlimit { maximum, .. } = getrlimit(Resource::Memlock);
    setrlimit(Resource::Memlock, Rlimit { current: maximum, maximum }).is_ok() && maximum.is_none()
}

/// Restores the states that a previous engine saved. An unreadable file is logged and ignored: connections are then evaluated by
/// the rules again.
fn restore(
    ruleset: &RulesetManager,
    path: &Path,
    saved: io::Result<Option<Vec<u8>>>,
    policy: StatePolicy,
    stop: &PipeReader,
) {
    let file = path.display();
    match saved {
        Ok(None) => tracing::info!("{file}: no states yet"),
        Ok(Some(saved)) => match ruleset.restore(&saved, ruleset.clock().now()) {
            Ok(restored) => {
                tracing::info!("{file}: {}", snapshot::told(restored));
                // The rules differ from those of the saved states, or the last re-check was incomplete: treat it as a reload.
                if (restored.default_dynamic > 0 || restored.unchecked) && policy != StatePolicy::Keep {
                    ruleset.recheck();
                    // No packet is received yet. After the timeout the re-check continues while packets are processed.
                    let begun = Instant::now();
                    ruleset.recheck_until(|| begun.elapsed() >= RECHECK_TIMEOUT || is_signalled(stop));
                    let Rechecks { dropped, running, .. } = ruleset.rechecks();
                    let more = if running { "; the re-check continues" } else { "" };
                    tracing::info!(
                        "{file}: {} dropped because the rules would not create them now{more}",
                        count(dropped, "state")
                    );
                }
            }
            Err(error) => tracing::warn!("{file}: no states restored: {error}"),
        },
        Err(error) => tracing::warn!("{file}: no states restored: {error}"),
    }
}

/// The transmit queues of a thread, one for each port.
fn tx_queues(config: &Config, ports: &[(Box<dyn Port>, &'static str)]) -> Vec<TxQueue> {
    let tx = |(at, (port, _)): (usize, &(Box<dyn Port>, _))| {
        let caps = port.caps();
        let routed = !config.monitors.contains(&at) && !config.bridges.iter().any(|b| b.ports.contains(&at));
        let router = (routed && !caps.verdicts).then_some(RouterPort { mac: caps.address });
        let addresses = config.ports[at].addresses.clone();
        let (mtu, reorder) = (router::mtu(&caps), config.engine.reorder);
        let echo = config.ports[at].echo;
        let link = caps.link.unwrap_or(LinkType::ETHERNET);
        TxQueue::new(TxConfig { sends: caps.send, link, router, mtu, addresses, echo, reorder })
    };
    ports.iter().enumerate().map(tx).collect()
}

fn spawn(
    number: usize,
    parts: Parts,
    cpu: Option<usize>,
    done: EventFd,
) -> Result<JoinHandle<Report>, Failure> {
    let body = move || {
        if let Some(cpu) = cpu {
            let mut set = rustix::thread::CpuSet::new();
            set.set(cpu);
            if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
                tracing::warn!("cannot pin the engine to CPU {cpu}: {error}");
            }
        }
        // It is scheduled before threads with longer slices, such as helper threads and other processes.
        if let Err(error) = scheduling::set_slice(scheduling::SHORTEST_SLICE) {
            tracing::warn!("packets may wait for other threads: no short time slices: {error}");
        }
        sandbox::enter(Role::Packet);
        let _ended = parts.heartbeat.until_dropped();
        let report = Worker::new(parts).run();
        done.signal();
        report
    };
    let thread = thread::Builder::new().name(format!("engine-{number}"));
    thread.spawn(body).map_err(|error| Failure::System("thread", error))
}
