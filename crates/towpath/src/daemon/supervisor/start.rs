//! How an engine starts.
//!
//! The command matters: ports and sockets are opened, then every capability that is not needed any more is given
//! up, then threads and processes begin.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{channel, sync_channel};
use std::task::Waker;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use towpath_gate::StatePolicy;
use towpath_gate::rules::Ruleset;
use towpath_port::Port;

use super::super::inspector_sockets::Socket;
use super::super::mux_admission::MuxAdmission;
use super::super::mux_service;
use super::super::port_slot;
use super::super::privilege::Capabilities;
use super::super::round_robin::RoundRobin;
use super::super::signals::{reloads, stops};
use super::super::worker::{Parts, Queries, Worker};
use super::super::worker_command::WorkerCommand;
use super::ruleset::gate;
use super::{
    ACCEPTS_PER_TURN, Failure, LOG_LINES, RECHECK_TIMEOUT, States, Supervisor, WorkerHandle, idle_wait,
    is_signalled,
};
use crate::config::Config;
use crate::control::dumps::Dumps;
use crate::control::{Listening, QueryInbox};
use crate::eventfd::EventFd;
use crate::inspector::{self, ATTACH_TIMEOUT};
use crate::report::Report;
use crate::ruleset_manager::{Rechecks, RulesetManager};
use crate::snapshot::{self, Saving};
use towpath_engine::Engine;
use towpath_engine::egress::{PortIo, TxQueue};
use towpath_engine::queue::{Policy, Queue};
use towpath_engine::router::{self, Fib};
use towpath_engine::router::{Directory, Resolver};

impl Supervisor {
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
            let (opened, word) = (port_slot::open(port, threads)?, port.driver.word());
            ports.iter_mut().zip(opened).for_each(|(ports, opened)| ports.push((opened, word)));
        }
        // Before the first thing that would stay behind; a port goes with its process, and opening one may take long.
        let stop = stops().map_err(signals)?;
        if let Some(control) = &config.control {
            super::super::make_directory_of(&control.socket);
        }
        let listening = config.control.as_ref().map(Listening::bind).transpose()?;
        let sockets = config
            .queues
            .iter()
            .map(|queue| Socket::bind(queue, threads.max(1)))
            .collect::<Result<Vec<_>, _>>()?;
        let listening_muxes =
            config.muxes.iter().map(mux_service::Listening::open).collect::<Result<Vec<_>, _>>()?;
        let saved = config.states.as_deref().map(snapshot::read);
        let kept = Capabilities::needed(&config)
            .keep()
            .map_err(|error| Failure::System("capabilities cannot be given up", error))?;
        log::info!("capabilities kept: {kept}");
        if let Some(path) = &config.states {
            // As it will be at the end: better now than when all states are lost by it.
            Saving::create(path).map_err(|source| Failure::States { file: path.clone(), source })?;
        }

        let (mut gate, topology, mux_ports) = gate(&config, &ruleset);
        let mut walkers: Vec<_> = (0..threads + config.muxes.len()).map_while(|_| gate.walker()).collect();
        if walkers.len() < threads + config.muxes.len() {
            let error = io::Error::other("there are too many; together they can be 63");
            return Err(Failure::System("threads and muxes", error));
        }
        let mux_walkers = walkers.split_off(threads);
        let ruleset = Arc::new(RulesetManager::new(gate, ruleset, config.default_allow));
        if let (Some(path), Some(saved)) = (&config.states, saved) {
            restore(&ruleset, path, saved, config.reload, &stop);
        }
        let system = |error| Failure::System("eventfd", error);
        let bells = (0..threads).map(|_| EventFd::new()).collect::<io::Result<Vec<_>>>().map_err(system)?;
        let done = EventFd::new().map_err(system)?;
        let wakes: Vec<_> = bells
            .iter()
            .cloned()
            .map(Some)
            .chain(mux_threads.iter().map(|at| at.map(|at| bells[at].clone())))
            .collect();
        let (server, mut inboxes) = match listening {
            Some(listening) => {
                let (server, inboxes) = listening.start(Some(Arc::clone(&ruleset)), wakes)?;
                (Some(server), inboxes.into_iter().map(Some).collect())
            }
            None => (None, wakes.iter().map(|_| None).collect::<Vec<_>>()),
        };
        let mux_desks = inboxes.split_off(threads);
        let dumps = config.control.as_ref().map(|control| {
            Dumps::start(&control.socket, control.owner, Arc::clone(&ruleset)).map_err(Failure::Dumps)
        });
        let dumps = dumps.transpose()?;
        let (log, lines) = sync_channel(LOG_LINES);
        let start = Instant::now();
        let directory = (!config.routes.is_empty()).then(|| {
            let wakers = bells.iter().map(|bell| Waker::from(Arc::new(bell.clone()))).collect();
            Arc::new(Directory::new(wakers))
        });
        let mut workers = Vec::new();
        for (number, (((ports, walker), bell), inbox)) in
            ports.into_iter().zip(walkers).zip(bells).zip(inboxes).enumerate()
        {
            let io = PortIo::new(
                start,
                tx_queues(&config, &ports),
                Queries(inbox),
                directory.clone().map(Resolver::new),
            );
            let queues = config.queues.iter().map(|queue| Queue::new(queue.number, queue.policy)).collect();
            let unserved = Policy { default: config.unserved, ..Policy::default() };
            let (commands, taken) = channel();
            let parts = Parts {
                engine: Engine::live(io, walker, topology.clone(), queues, unserved),
                ports,
                burst: config.engine.burst,
                commands: taken,
                bell: bell.clone(),
                wait: config.engine.wait,
                drain: config.engine.drain,
                log: log.clone(),
                clock: ruleset.clock(),
            };
            let cpu = config.engine.cpus.get(number).copied();
            let thread = Some(spawn(number, parts, cpu, done.clone())?);
            workers.push(WorkerHandle { thread, ended: None, commands, bell });
        }
        let doors = listening_muxes.into_iter().zip(mux_walkers).zip(mux_ports).zip(mux_desks);
        let doors: Vec<_> = doors
            .map(|(((listening, walker), port), inbox)| {
                let ((port, name), time) = (port, (start, ruleset.clock()));
                let door = MuxAdmission::new(&name, walker, port, time, config.unserved, log.clone());
                (listening, door, inbox)
            })
            .collect();
        let refreshed = (Instant::now(), ruleset.version());
        let rechecking = ruleset.rechecks().running;
        let mut supervisor = Self {
            config,
            workers,
            done,
            log: lines,
            sockets: Vec::new(),
            round: RoundRobin::default(),
            channels: 0,
            stop,
            hup,
            kept,
            ruleset,
            services: Vec::new(),
            refreshed,
            kept_alive: Instant::now(),
            nearly_full: false,
            rechecking,
            _server: server,
            _dumps: dumps,
        };
        if let Err(failure) = supervisor.attach(sockets, doors, &mux_threads) {
            // Threads that wait for the start, and who waits for these, would be left behind.
            supervisor.sockets.clear();
            supervisor.drain();
            let _ = supervisor.end(States::Left);
            return Err(failure);
        }
        if let Some(path) = &supervisor.config.states {
            snapshot::set_aside(path);
        }
        Ok(supervisor)
    }

    /// Starts the processes of queues and muxes, waits until they have attached, and begins; unless it is told to stop meanwhile.
    fn attach(
        &mut self,
        mut sockets: Vec<Socket>,
        doors: Vec<(mux_service::Listening, MuxAdmission, Option<QueryInbox>)>,
        mux_threads: &[Option<usize>],
    ) -> Result<(), Failure> {
        let started = self.start_inspectors(&mut sockets);
        self.sockets = sockets;
        started?;
        let (mut served, mut failed) = (Vec::new(), None);
        for (place, ((listening, door, inbox), thread)) in doors.into_iter().zip(mux_threads).enumerate() {
            if self.is_stopped() {
                break;
            }
            let done = self.done.clone();
            match listening.start(place, door, inbox, thread.is_some(), done, &|| self.is_stopped()) {
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
            self.workers[thread].say(WorkerCommand::Serve(Box::new(mux)));
        }
        if let Some(failure) = failed {
            return Err(failure);
        }
        if self.is_stopped() {
            return Ok(());
        }
        self.workers.iter().for_each(|worker| worker.say(WorkerCommand::Begin));
        Ok(())
    }

    /// Starts the processes of the configuration, and waits until all have attached.
    fn start_inspectors(&mut self, sockets: &mut [Socket]) -> Result<(), Failure> {
        for socket in sockets {
            let mut missing = socket.start()?;
            let start = Instant::now();
            while missing > 0 && !self.is_stopped() {
                for _ in 0..ACCEPTS_PER_TURN {
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
                    idle_wait(&mut fds, Duration::from_millis(20));
                }
            }
        }
        Ok(())
    }
}

/// Takes the states that an engine before this one has left. What cannot be read is no reason to stand still: connections
/// meet the rules again then.
fn restore(
    ruleset: &RulesetManager,
    path: &Path,
    saved: io::Result<Option<Vec<u8>>>,
    policy: StatePolicy,
    stop: &UnixStream,
) {
    let file = path.display();
    match saved {
        Ok(None) => log::info!("{file}: no states yet"),
        Ok(Some(saved)) => match ruleset.restore(&saved, ruleset.clock().now()) {
            Ok(restored) => {
                log::info!("{file}: {}", snapshot::told(restored));
                // The rules have changed meanwhile, or changed when there was no time any more: it is as if they were reloaded.
                if (restored.companion > 0 || restored.unchecked) && policy != StatePolicy::Keep {
                    ruleset.recheck();
                    // No packet comes yet. What is left after a while is re-checked beside them.
                    let begun = Instant::now();
                    ruleset.recheck_until(|| begun.elapsed() >= RECHECK_TIMEOUT || is_signalled(stop));
                    let Rechecks { dropped, running, .. } = ruleset.rechecks();
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
fn tx_queues(config: &Config, ports: &[(Box<dyn Port>, &'static str)]) -> Vec<TxQueue> {
    let tx = |(at, (port, _)): (usize, &(Box<dyn Port>, _))| {
        let caps = port.caps();
        let routed = !config.taps.contains(&at) && !config.bridges.iter().any(|b| b.ports.contains(&at));
        let fib = (routed && !caps.verdicts).then(|| Fib::new(&config.routes, at, caps.address));
        let addresses = config.ports[at].addresses.clone();
        TxQueue { addresses, mtu: router::mtu(&caps), ..TxQueue::new(caps.send, fib) }
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
                log::warn!("the engine cannot stay on processor {cpu}: {error}");
            }
        }
        let report = Worker::new(parts).run();
        done.signal();
        report
    };
    let thread = thread::Builder::new().name(format!("engine-{number}"));
    thread.spawn(body).map_err(|error| Failure::System("no thread", error))
}
