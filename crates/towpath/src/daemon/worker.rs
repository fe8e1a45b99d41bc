//! An engine thread: its ports, its engine, its inspectors' channels and its muxes.
//!
//! One turn receives a burst from every port, processes it, and sends what leaves by each port; then the muxes run (`muxes.rs`).
//! After a turn without work the worker polls for a while, then sleeps on every descriptor that can bring work.

use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use towpath_port::{Burst, HandOver, Port, Received, State, Stats};

use super::muxes::Muxes;
use super::stalled::StalledSender;
use super::worker_command::{HandedOver, WorkerCommand};
use crate::config::Wait;
use crate::control::PortRows;
use crate::control::commands::show_ports;
use crate::eventfd::EventFd;
use crate::metrics::thread::LoadClock;
use crate::packet_log::LogSender;
use crate::quantity::count;
use crate::report::Report;
use crate::ruleset_manager::Clock;
use crate::service_manager::{Heartbeat, Watchdog};
use towpath_engine::LiveEngine;
use towpath_engine::egress::TxQueue;
use towpath_engine::queue::{About, Answers, AnswersReport, RingChannel};
use towpath_engine::router;

/// Interval between two checks of the ports, and the longest sleep.
const TICK: Duration = Duration::from_secs(1);

/// Longest sleep until a pause has begun.
const PAUSE_TICK: Duration = Duration::from_millis(1);

/// Turns between two clock reads while packets arrive.
const TURNS: u32 = 256;

/// See the module documentation.
pub struct Worker {
    engine: LiveEngine,
    ports: Vec<Live>,
    /// The records of the ports, for queries.
    rows: PortRows,
    /// Shared with the engine while it processes the burst; unique between turns.
    burst: Arc<Burst>,
    muxes: Muxes,
    commands: Receiver<WorkerCommand>,
    /// Tells the supervisor which inspectors do not answer.
    stalled: StalledSender,
    bell: EventFd,
    wait: Wait,
    drain: Duration,
    /// Receives the lines of `log` rules.
    log: LogSender,
    /// The clock, published for readers of the states.
    clock: Clock,
    /// Nothing is received: another process does so, or will.
    paused: Option<Pausing>,
    /// Counts turns for the watchdog.
    heartbeat: Arc<Heartbeat>,
    /// The longest sleep.
    sleep_max: Duration,
}

/// A pause that has not begun: until when inspectors may return frames, and the sender to be dropped when it has.
#[derive(Debug)]
struct Pausing(Option<(Instant, Sender<()>)>);

/// A port and its state.
struct Live {
    port: Box<dyn Port>,
    /// Name of the driver.
    driver: &'static str,
    state: State,
    /// The log says that the interface does not exist.
    absent: bool,
    /// The port has reached its end: it will deliver no more frames.
    ended: bool,
    /// Errors so far.
    errors: u64,
    /// Oversized frames reported so far.
    too_long: u64,
    /// Unsegmented datagrams reported so far.
    uncut: u64,
}

/// The parts of a worker.
pub(super) struct Parts {
    pub(super) engine: LiveEngine,
    /// The ports with the names of their drivers.
    pub(super) ports: Vec<(Box<dyn Port>, &'static str)>,
    pub(super) rows: PortRows,
    pub(super) burst: usize,
    pub(super) commands: Receiver<WorkerCommand>,
    pub(super) stalled: StalledSender,
    pub(super) bell: EventFd,
    pub(super) wait: Wait,
    pub(super) drain: Duration,
    pub(super) log: LogSender,
    pub(super) clock: Clock,
    pub(super) heartbeat: Arc<Heartbeat>,
}

impl Worker {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { engine, ports, rows, burst, commands, stalled, bell, wait, drain, log, clock, heartbeat } =
            parts;
        let live = |(port, driver): (Box<dyn Port>, &'static str)| {
            let ended = !port.caps().receive;
            Live { port, driver, state: State::Up, absent: false, ended, errors: 0, too_long: 0, uncut: 0 }
        };
        let ports = ports.into_iter().map(live).collect();
        Self {
            engine,
            ports,
            rows,
            burst: Arc::new(Burst::new(burst)),
            muxes: Muxes::new(),
            commands,
            stalled,
            bell,
            wait,
            drain,
            log,
            clock,
            paused: None,
            heartbeat,
            sleep_max: TICK.min(Watchdog::longest_sleep()),
        }
    }

    /// Runs until the supervisor sends `WorkerCommand::Drain` or every source has ended.
    pub fn run(mut self) -> Report {
        let mut quiet: Option<Instant> = None;
        let mut turns = 0;
        let mut looked = Instant::now();
        self.show_ports();
        self.wait_for_the_start();
        let (mut load, mut worked) = (LoadClock::new(Instant::now()), false);
        while self.take_commands() && !self.is_over() {
            self.heartbeat.beat();
            let packets = self.turn();
            let messages = self.muxes.turn(packets);
            if messages && !packets {
                self.idle();
            }
            self.begin_pause();
            let came = packets || messages;
            worked |= came;
            turns += 1;
            if !came || turns % TURNS == 0 {
                let now = Instant::now();
                load.tick(now, std::mem::take(&mut worked));
                if now - looked >= TICK {
                    looked = now;
                    if self.paused.is_none() {
                        self.look_at_ports();
                    }
                    self.show_ports();
                    // Detects dead inspectors when the worker does not sleep.
                    self.engine.disarm();
                }
                if came {
                    quiet = None;
                    continue;
                }
                self.idle();
                match self.wait {
                    Wait::Spin => std::hint::spin_loop(),
                    Wait::Park(look) if now - *quiet.get_or_insert(now) >= look => {
                        let trouble = self.sleep();
                        load.slept(Instant::now());
                        if trouble {
                            looked = Instant::now() - TICK;
                        }
                        quiet = None;
                    }
                    Wait::Park(_) => std::hint::spin_loop(),
                }
            }
        }
        self.finish()
    }

    /// Returns true if no source can deliver any more.
    fn is_over(&self) -> bool {
        self.muxes.is_empty() && self.paused.is_none() && self.ports.iter().all(|live| live.ended)
    }

    /// Returns true while another process may use the rings of the ports.
    fn is_handed_over(&self) -> bool {
        matches!(self.paused, Some(Pausing(None)))
    }

    /// Begins a pause when every received packet has left, and no inspector has a frame.
    fn begin_pause(&mut self) {
        let Some(Pausing(Some((until, _)))) = self.paused else { return };
        if !self.engine.is_drained() || self.ports.iter().any(|live| live.port.has_lent()) {
            return;
        }
        if self.engine.has_frames() {
            if Instant::now() < until {
                return;
            }
            let detached = self.engine.detach_holders();
            log::warn!(
                "upgrade: {} detached, because frames were not returned in time",
                count(detached, "inspector")
            );
            self.engine.process_verdicts();
        }
        for live in &mut self.ports {
            if let Err(error) = live.port.flush() {
                live.warn(&error);
            }
        }
        // From here on, another process reads the kernel's counters.
        self.show_ports();
        self.paused = Some(Pausing(None));
    }

    /// Receives once from every port, processes, and sends. Returns whether any packet arrived.
    fn turn(&mut self) -> bool {
        let mut came = false;
        let paused = self.paused.is_some();
        for at in 0..self.ports.len() {
            let live = &mut self.ports[at];
            // What was begun is received before a pause.
            if live.ended || live.state == State::Gone || paused && !live.port.is_midway() {
                continue;
            }
            let burst = Arc::get_mut(&mut self.burst).expect("the burst is unshared between turns");
            match live.port.receive(burst) {
                Ok(Received::Nothing) => continue,
                Ok(Received::End) => live.ended = true,
                Ok(Received::Frames) => {}
                Err(error) => live.warn(&error),
            }
            if self.burst.is_empty() {
                continue;
            }
            came = true;
            self.engine.process_received(&self.burst, at as u32);
            self.transmit();
            Arc::get_mut(&mut self.burst).expect("the engine has released the burst").clear();
        }
        if came {
            self.tell();
        }
        came
    }

    /// Collects inspectors' verdicts while no packet arrives.
    fn idle(&mut self) {
        self.engine.process_verdicts();
        self.transmit();
        self.tell();
    }

    /// Sends what leaves by each port.
    fn transmit(&mut self) {
        if self.is_handed_over() {
            return;
        }
        let Self { engine, ports, burst, .. } = self;
        engine.io_mut().poll_neighbors();
        for (at, Live { port, errors, .. }) in ports.iter_mut().enumerate() {
            engine.transmit(at, &mut **port, burst, &mut |error| warn(errors, error));
        }
    }

    /// Publishes the clock and passes on the lines of `log` rules without blocking.
    fn tell(&mut self) {
        let now = self.engine.clock();
        self.clock.set(now);
        self.log.send(self.engine.walker_mut(), now, false);
        self.tell_answers();
    }

    /// Logs inspectors that stalled or answer again. The supervisor kills a stalled one that the engine has started.
    fn tell_answers(&mut self) {
        for AnswersReport { queue, about, answers } in self.engine.take_reports() {
            let Some(About { peer, name, .. }) = about else { continue };
            match answers {
                Answers::Stalled => {
                    tracing::warn!(
                        peer = peer.uid,
                        "queue {queue}: process {} ({name}) does not answer: it gets no packets until it does",
                        peer.pid
                    );
                    self.stalled.tell(queue, peer.pid);
                }
                Answers::Again => {
                    tracing::info!(
                        peer = peer.uid,
                        "queue {queue}: process {} ({name}) answers again",
                        peer.pid
                    );
                }
            }
        }
    }

    /// Executes pending commands. Returns false after `Drain`.
    fn take_commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                WorkerCommand::Join(queue, channel, inspector) => {
                    self.join(false, queue, channel, *inspector)
                }
                WorkerCommand::JoinStandby(queue, channel, inspector) => {
                    self.join(true, queue, channel, *inspector);
                }
                WorkerCommand::CheckInspectors => self.engine.disarm(),
                WorkerCommand::Keepalives(due) => {
                    for keepalive in due {
                        let Ok(()) = self.engine.send_keepalive(&keepalive);
                    }
                    self.transmit();
                }
                WorkerCommand::Serve(served) => self.muxes.serve(*served),
                WorkerCommand::Begin => {}
                WorkerCommand::Pause(until, begun) => self.paused = Some(Pausing(Some((until, begun)))),
                WorkerCommand::Ports(to) => self.hand_over_ports(&to),
                WorkerCommand::HandOver(to) => {
                    let ports = self.ports.iter_mut().map(|live| live.port.own_stats()).collect();
                    // The supervisor may have given up.
                    let _ = to.send(HandedOver { inspectors: self.engine.hand_over(), ports });
                }
                WorkerCommand::Resume => self.resume(),
                WorkerCommand::Drain => return false,
                other => self.change(other),
            }
        }
        true
    }

    /// Applies a change of a reload.
    fn change(&mut self, command: WorkerCommand) {
        match command {
            WorkerCommand::Queue(number, policy) => self.engine.set_queue(number, policy),
            WorkerCommand::Unserved(default) => self.engine.set_unserved(default),
            WorkerCommand::Pace(engine) => {
                self.burst = Arc::new(Burst::new(engine.burst));
                self.engine.set_reorder_limits(engine.reorder);
                self.engine.set_log_drops(engine.log_drops);
                for at in 0..self.ports.len() {
                    self.engine.io_mut().tx_queue_mut(at).set_reorder_limits(engine.reorder);
                }
                (self.wait, self.drain) = (engine.wait, engine.drain);
            }
            WorkerCommand::Counters(ports) => self.continue_counters(ports),
            WorkerCommand::Settle(done) => drop(done),
            WorkerCommand::Join(..)
            | WorkerCommand::JoinStandby(..)
            | WorkerCommand::CheckInspectors
            | WorkerCommand::Serve(_)
            | WorkerCommand::Begin
            | WorkerCommand::Pause(..)
            | WorkerCommand::Ports(_)
            | WorkerCommand::HandOver(_)
            | WorkerCommand::Resume
            | WorkerCommand::Keepalives(_)
            | WorkerCommand::Drain => {}
        }
    }

    /// Continues the counters of ports that another process has handed over. Its engine has counted their drops.
    fn continue_counters(&mut self, ports: Vec<Stats>) {
        for (at, before) in ports.into_iter().enumerate().take(self.ports.len()) {
            let port = &mut self.ports[at].port;
            port.continue_stats(before);
            self.engine.io_mut().begin_port_drops(at, port.stats().tx_drops());
        }
    }

    fn hand_over_ports(&mut self, to: &Sender<Vec<io::Result<Option<HandOver>>>>) {
        // The supervisor may have given up.
        let _ = to.send(self.ports.iter_mut().map(|live| live.port.hand_over()).collect());
    }

    /// Receives from where another process has stopped.
    fn resume(&mut self) {
        self.paused = None;
        self.ports.iter_mut().for_each(|live| live.port.resume());
    }

    /// Until the start is complete, arriving packets stay in the kernel's queues.
    fn wait_for_the_start(&mut self) {
        loop {
            match self.commands.recv() {
                Ok(WorkerCommand::Begin) => return self.resume(),
                Ok(WorkerCommand::Join(queue, channel, inspector)) => {
                    self.join(false, queue, channel, *inspector);
                }
                Ok(WorkerCommand::JoinStandby(queue, channel, inspector)) => {
                    self.join(true, queue, channel, *inspector);
                }
                Ok(WorkerCommand::Serve(served)) => self.muxes.serve(*served),
                // The supervisor is gone: the start has failed.
                Ok(WorkerCommand::Drain) | Err(_) => {
                    self.ports.iter_mut().for_each(|live| live.ended = true);
                    return;
                }
                Ok(other) => self.change(other),
            }
        }
    }

    fn join(&mut self, standby: bool, queue: u16, channel: u32, inspector: RingChannel) {
        let joined = match standby {
            true => self.engine.join_standby(queue, channel, inspector),
            false => self.engine.join(queue, channel, inspector),
        };
        if joined.is_err() {
            tracing::warn!("queue {queue}: no such queue; its inspector was detached");
        }
    }

    /// Sleeps until there is work. Returns whether a port reported an error.
    fn sleep(&mut self) -> bool {
        let mut trouble = false;
        // A sleeping worker must not delay the release of retired rules.
        self.engine.walker_mut().idle();
        let armed = self.engine.arm();
        // Without a sleep, the next turn polls the verdicts, and this thread checks all inspectors in each `TICK`.
        let mut ready = Some(Vec::new());
        if let Some(patience) = self.muxes.arm()
            && armed
        {
            let now = self.engine.io_mut().wall();
            let due = self.engine.deadline().into_iter().chain(self.engine.io_mut().neighbors_due()).min();
            let due = due.map_or(TICK, |due| Duration::from_nanos(due.saturating_sub(now)));
            let tick =
                if matches!(self.paused, Some(Pausing(Some(_)))) { PAUSE_TICK } else { self.sleep_max };
            let sleep = due.min(tick).min(patience);
            let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
            let open = |live: &&Live| !live.ended && live.state == State::Up && self.paused.is_none();
            let watched = self.ports.iter().filter(open);
            let mut fds: Vec<PollFd<'_>> = watched
                .filter_map(|live| live.port.poll_fd())
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            let ports = fds.len();
            fds.push(PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN));
            fds.extend(self.muxes.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            let others = fds.len();
            fds.extend(self.engine.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            // Interrupted or woken: the caller checks all sources in any case.
            let events = poll(&mut fds, Some(&timeout)).unwrap_or(0);
            let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
            ready = (events > 0).then(|| fds[others..].iter().map(is_ready).collect());
            trouble = fds[..ports].iter().any(|fd| fd.revents().intersects(PollFlags::ERR | PollFlags::HUP));
        }
        match ready {
            Some(ready) => self.engine.disarm_ready(ready.into_iter().chain(std::iter::repeat(false))),
            None => self.engine.disarm(),
        }
        self.bell.clear();
        trouble
    }

    /// Checks the interface of each port and reopens one that has come back.
    fn look_at_ports(&mut self) {
        for (at, live) in self.ports.iter_mut().enumerate() {
            let before = live.state;
            let mut reopened = false;
            match live.port.state() {
                Ok(State::Gone) => match live.port.reopen() {
                    Ok(()) => {
                        reopened = true;
                        live.state = live.port.state().unwrap_or(State::Gone);
                    }
                    Err(error) => {
                        // While there is no interface, one line says so. Any other reason is logged at each attempt.
                        let absent = matches!(error, towpath_port::Error::NoInterface { .. });
                        if !(absent && live.absent) {
                            tracing::warn!("{}: {error}", live.port.name());
                        }
                        live.absent = absent;
                        live.state = State::Gone;
                    }
                },
                Ok(state) => live.state = state,
                Err(error) => live.warn(&error),
            }
            if live.state != State::Gone {
                // The MTU and the address may have changed.
                let caps = live.port.caps();
                let tx = self.engine.io_mut().tx_queue_mut(at);
                tx.set_mtu(router::mtu(&caps));
                tx.set_mac(caps.address);
            }
            let name = live.port.name();
            live.absent &= live.state == State::Gone;
            match (before, live.state) {
                (State::Up | State::Down, State::Up | State::Down) if reopened => {
                    tracing::warn!("{name}: its interface was gone and is opened again");
                    self.engine.io_mut().forget_neighbors(at);
                }
                (State::Up, State::Down) => tracing::warn!("{name}: its interface is down"),
                (State::Up | State::Down, State::Gone) => tracing::warn!("{name}: its interface is gone"),
                (State::Down | State::Gone, State::Up) => {
                    tracing::info!("{name}: its interface is up again");
                    self.engine.io_mut().forget_neighbors(at);
                }
                _ => {}
            }
        }
    }

    /// Counts the frames that the ports accepted and did not send.
    fn take_port_drops(&mut self) {
        let io = self.engine.io_mut();
        for (at, live) in self.ports.iter_mut().enumerate() {
            let stats = live.port.stats();
            io.count_port_drops(at, stats.tx_drops());
        }
    }

    /// Publishes the records of the ports. While another process uses them, the last ones stay: reading the kernel's counters resets some.
    fn show_ports(&mut self) {
        if self.is_handed_over() {
            return;
        }
        self.take_port_drops();
        let Self { engine, ports, rows, .. } = self;
        let io = engine.io_mut();
        let row = |(at, (live, tx)): (usize, (&mut Live, &TxQueue))| {
            let stats = live.port.stats();
            live.tell_too_long(stats.rx_too_long);
            live.tell_unsegmented(stats.rx_unsegmented);
            show_ports::Port {
                name: live.port.name().to_owned(),
                driver: live.driver.to_owned(),
                state: match live.state {
                    State::Up => "up",
                    State::Down => "down",
                    State::Gone => "gone",
                },
                stats,
                tx: *tx.drops(),
                neighbors: io.neighbors(at).into_iter().map(Into::into).collect(),
            }
        };
        let shown = ports.iter_mut().zip(io.tx_queues()).enumerate().map(row).collect();
        *rows.lock().unwrap_or_else(PoisonError::into_inner) = shown;
    }

    /// Returns whether a second drain command arrived. Other commands are too late and ignored.
    fn is_hurried(&self) -> bool {
        self.commands.try_iter().any(|command| matches!(command, WorkerCommand::Drain))
    }

    /// Waits for packets that inspectors hold, up to the drain timeout.
    fn finish(mut self) -> Report {
        let start = Instant::now();
        // From here on new packets do not wake the thread.
        self.ports.iter_mut().for_each(|live| live.ended = true);
        while !self.engine.is_drained() && start.elapsed() < self.drain && !self.is_hurried() {
            self.idle();
            if !self.muxes.turn(false) && !self.engine.is_drained() {
                self.sleep();
            }
        }
        let left = !self.engine.is_drained();
        let dropped = self.engine.drop_undecided();
        self.engine.io_mut().abandon_neighbors();
        self.transmit();
        if left {
            let waited = start.elapsed().as_secs_f64();
            tracing::warn!("inspectors still held packets after {waited:.1} s: {dropped} were dropped");
        }
        let own = !self.is_handed_over();
        for live in self.ports.iter_mut().filter(|_| own) {
            if let Err(error) = live.port.flush() {
                live.warn(&error);
            }
        }
        // The muxes have their own drain timeout.
        while !self.muxes.is_empty() {
            if !self.muxes.turn(false) && !self.muxes.is_empty() {
                self.sleep();
            }
            self.idle();
        }
        // Before the log: the last losses have their lines.
        self.show_ports();
        let _ = self.engine.totals();
        let now = self.engine.clock();
        self.log.send(self.engine.walker_mut(), now, true);
        let ports = self.rows.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Report { ports, ..Report::of(&mut self.engine) }
    }
}

impl Live {
    /// Warns about oversized frames: a connection whose full-sized segments are lost stalls without any other sign.
    fn tell_too_long(&mut self, too_long: u64) {
        if too_long > self.too_long * 2 {
            self.too_long = too_long;
            tracing::warn!(
                "{}: frames longer than a receive buffer are dropped ({too_long} so far): set multi-buffer = true, or \
                 `ethtool -K DEV tso off gso off gro off` at the hosts that send them",
                self.port.name()
            );
        }
    }

    /// Warns about unsegmented datagrams: the sender keeps sending them, and none arrives.
    fn tell_unsegmented(&mut self, uncut: u64) {
        if uncut > self.uncut * 2 {
            self.uncut = uncut;
            tracing::warn!(
                "{}: unsegmented UDP datagrams are dropped ({uncut} frames so far): use af_packet, or \
                 `ethtool -K DEV tx-udp-segmentation off` at the hosts that send them",
                self.port.name()
            );
        }
    }
    fn warn(&mut self, error: &towpath_port::Error) {
        warn(&mut self.errors, error);
    }
}

/// Logs an error of a port with `errors` errors so far: the first one, and then at increasing intervals.
fn warn(errors: &mut u64, error: &towpath_port::Error) {
    *errors += 1;
    if errors.is_power_of_two() {
        tracing::warn!("{error} ({errors} so far)");
    }
}
