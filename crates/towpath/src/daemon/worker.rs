//! A thread that has packets: its ports, its engine, its inspectors' channels.
//!
//! One turn: every port is received from once, what came is handled, and each port gets what leaves by it; then the muxes have theirs
//! (`muxes.rs`). When a turn brought nothing, the worker looks for a while, then sleeps on everything that may bring something.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use towpath_port::{Burst, Frame, LinkType, Port, Received, State};

use super::muxes::Muxes;
use super::worker_command::WorkerCommand;
use crate::config::Wait;
use crate::control::{EngineView, QueryInbox, neighbors, records};
use crate::eventfd::EventFd;
use crate::inspector::Inspector;
use crate::report::Report;
use crate::ruleset_manager::Clock;
use towpath_engine::egress::{PortIo, QueryServer, TxItem, TxQueue};
use towpath_engine::router::{self, Fib};
use towpath_engine::{Engine, Introspect, Meta};

/// How often ports are looked at, and how long a worker sleeps at most.
const TICK: Duration = Duration::from_secs(1);

/// Turns between two looks at the time while packets come.
const TURNS: u32 = 256;

/// How often a port that has no room is offered the rest of a burst again.
const TRIES: usize = 16;

/// The engine's surroundings in a worker.
pub(super) type Io = PortIo<Inspector, Queries>;

/// The worker's control queries.
pub(super) struct Queries(pub(super) Option<QueryInbox>);

impl Queries {
    /// What is told about the ports.
    fn set_ports(&mut self, ports: Vec<records::Port>) {
        if let Some(inbox) = &mut self.0 {
            inbox.set_ports(ports);
        }
    }
}

impl QueryServer for Queries {
    fn serve(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.0.as_mut().map_or(u64::MAX, |inbox| inbox.attend(&mut EngineView(engine)))
    }
}

/// See the module's text.
pub struct Worker {
    engine: Engine<Io>,
    ports: Vec<Live>,
    /// Shared with the engine while that handles it, and with nobody else.
    burst: Arc<Burst>,
    muxes: Muxes,
    commands: Receiver<WorkerCommand>,
    bell: EventFd,
    wait: Wait,
    drain: Duration,
    /// Lines of `log` rules go there.
    log: SyncSender<String>,
    unlogged: u64,
    /// The time, for who looks at the states.
    clock: Clock,
}

/// A port and what became of it.
struct Live {
    port: Box<dyn Port>,
    /// The driver's word.
    driver: &'static str,
    state: State,
    /// Nothing will come any more.
    ended: bool,
    /// Errors so far.
    errors: u64,
    /// Frames that were too long to be received, as far as it was said.
    too_long: u64,
    /// The same of datagrams that were not cut.
    uncut: u64,
}

/// What a worker is made of.
pub(super) struct Parts {
    pub(super) engine: Engine<Io>,
    /// The ports, and their drivers' words.
    pub(super) ports: Vec<(Box<dyn Port>, &'static str)>,
    pub(super) burst: usize,
    pub(super) commands: Receiver<WorkerCommand>,
    pub(super) bell: EventFd,
    pub(super) wait: Wait,
    pub(super) drain: Duration,
    pub(super) log: SyncSender<String>,
    pub(super) clock: Clock,
}

impl Worker {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { engine, ports, burst, commands, bell, wait, drain, log, clock } = parts;
        let live = |(port, driver): (Box<dyn Port>, &'static str)| {
            let ended = !port.caps().receive;
            Live { port, driver, state: State::Up, ended, errors: 0, too_long: 0, uncut: 0 }
        };
        let ports = ports.into_iter().map(live).collect();
        Self {
            engine,
            ports,
            burst: Arc::new(Burst::new(burst)),
            muxes: Muxes::new(),
            commands,
            bell,
            wait,
            drain,
            log,
            unlogged: 0,
            clock,
        }
    }

    /// Runs until it is told to drain, or nothing will come any more.
    pub fn run(mut self) -> Report {
        let mut quiet: Option<Instant> = None;
        let mut turns = 0;
        let mut looked = Instant::now();
        self.show_ports();
        self.wait_for_the_start();
        while self.take_commands() && !self.is_over() {
            let packets = self.turn();
            let messages = self.muxes.turn(packets);
            if messages && !packets {
                self.idle();
            }
            let came = packets || messages;
            turns += 1;
            if !came || turns % TURNS == 0 {
                let now = Instant::now();
                if now - looked >= TICK {
                    looked = now;
                    self.look_at_ports();
                    self.show_ports();
                    // Inspectors that are gone are noticed while nobody sleeps, too.
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
                        if self.sleep() {
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

    /// Whether nothing will come any more.
    fn is_over(&self) -> bool {
        self.muxes.is_empty() && self.ports.iter().all(|live| live.ended)
    }

    /// Receives from every port once, and sends what leaves. Returns whether anything came.
    fn turn(&mut self) -> bool {
        let mut came = false;
        for at in 0..self.ports.len() {
            let live = &mut self.ports[at];
            if live.ended || live.state == State::Gone {
                continue;
            }
            let burst = Arc::get_mut(&mut self.burst).expect("nobody else has it between two turns");
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
            let Ok(()) = self.engine.process_burst_borrowed(&self.burst, |frame| meta(frame, at));
            self.transmit();
            Arc::get_mut(&mut self.burst).expect("the engine is done with it").clear();
        }
        if came {
            self.tell();
        }
        came
    }

    /// Collects what inspectors have decided, while nothing comes.
    fn idle(&mut self) {
        let Ok(()) = self.engine.idle();
        self.transmit();
        self.tell();
    }

    /// Gives each port what leaves by it.
    fn transmit(&mut self) {
        let Self { engine, ports, burst, .. } = self;
        engine.io_mut().look_after_neighbors();
        for (tx, live) in engine.io_mut().tx_queues.iter_mut().zip(ports) {
            if !tx.items.is_empty() {
                live.send(tx, burst);
            }
            if !tx.verdicts.is_empty() {
                live.decide(tx);
            }
            tx.clear();
        }
    }

    /// Says what time it is, and hands the tx_queues of `log` rules over. Nobody waits for who prints them.
    fn tell(&mut self) {
        self.clock.set(self.engine.clock());
        let Self { engine, log, unlogged, .. } = self;
        let walker = engine.walker_mut();
        while let Some(logged) = walker.log().take() {
            let port = logged.port.and_then(|port| walker.ports().name(port));
            if log.try_send(logged.line(port).to_string()).is_err() {
                *unlogged += 1;
            }
        }
    }

    /// Carries out what the supervisor said. False when it is to drain.
    fn take_commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                WorkerCommand::Join(queue, channel, inspector) => self.join(queue, channel, *inspector),
                WorkerCommand::Keepalives(due) => {
                    for keepalive in due {
                        let Ok(()) = self.engine.send_keepalive(&keepalive);
                    }
                    self.transmit();
                }
                WorkerCommand::Serve(served) => self.muxes.serve(*served),
                WorkerCommand::Begin => {}
                WorkerCommand::Drain => return false,
                other => self.change(other),
            }
        }
        true
    }

    /// Takes what a reload has changed.
    fn change(&mut self, command: WorkerCommand) {
        match command {
            WorkerCommand::Queue(number, policy) => self.engine.set_queue(number, policy),
            WorkerCommand::Unserved(default) => self.engine.set_unserved(default),
            WorkerCommand::Routes(routes, others) => {
                let tx_queues = self.engine.io_mut().tx_queues.iter_mut().enumerate();
                tx_queues.filter_map(|(at, tx)| Some((at, tx.fib.as_mut()?))).for_each(|(at, fib)| {
                    *fib = Fib::new(&routes, at, fib.own).or(&others, at);
                });
            }
            WorkerCommand::Pace(engine) => {
                self.burst = Arc::new(Burst::new(engine.burst));
                (self.wait, self.drain) = (engine.wait, engine.drain);
            }
            WorkerCommand::Settle(done) => drop(done),
            WorkerCommand::Join(..)
            | WorkerCommand::Serve(_)
            | WorkerCommand::Begin
            | WorkerCommand::Keepalives(_)
            | WorkerCommand::Drain => {}
        }
    }

    /// Packets that come before everybody has attached wait in the kernel.
    fn wait_for_the_start(&mut self) {
        loop {
            match self.commands.recv() {
                Ok(WorkerCommand::Begin) => return,
                Ok(WorkerCommand::Join(queue, channel, inspector)) => self.join(queue, channel, *inspector),
                Ok(WorkerCommand::Serve(served)) => self.muxes.serve(*served),
                // Who would say so is gone: the start has failed.
                Ok(WorkerCommand::Drain) | Err(_) => {
                    self.ports.iter_mut().for_each(|live| live.ended = true);
                    return;
                }
                Ok(other) => self.change(other),
            }
        }
    }

    fn join(&mut self, queue: u16, channel: u32, inspector: Inspector) {
        if self.engine.join(queue, channel, inspector).is_err() {
            log::warn!("queue {queue}: there is no such queue; its inspector was let go");
        }
    }

    /// Sleeps until something comes. Returns whether a port has an error.
    fn sleep(&mut self) -> bool {
        let mut trouble = false;
        // Nothing that the rules let go of waits for this thread while it sleeps.
        self.engine.walker_mut().idle();
        let armed = self.engine.arm();
        if let Some(patience) = self.muxes.arm()
            && armed
        {
            let now = self.engine.io_mut().wall();
            let due = self.engine.deadline().into_iter().chain(self.engine.io_mut().neighbors_due()).min();
            let due = due.map_or(TICK, |due| Duration::from_nanos(due.saturating_sub(now)));
            let sleep = due.min(TICK).min(patience);
            let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
            let watched = self.ports.iter().filter(|live| !live.ended && live.state == State::Up);
            let mut fds: Vec<PollFd<'_>> = watched
                .filter_map(|live| live.port.poll_fd())
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            let ports = fds.len();
            fds.push(PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN));
            fds.extend(self.muxes.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            fds.extend(self.engine.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            // Interrupted by a signal, or woken: the caller looks again in any case.
            let _ = poll(&mut fds, Some(&timeout));
            trouble = fds[..ports].iter().any(|fd| fd.revents().intersects(PollFlags::ERR | PollFlags::HUP));
        }
        self.engine.disarm();
        self.bell.clear();
        trouble
    }

    /// Whether each interface is there; one that has come back is taken up again.
    fn look_at_ports(&mut self) {
        for (at, live) in self.ports.iter_mut().enumerate() {
            let before = live.state;
            match live.port.state() {
                Ok(State::Gone) => match live.port.reopen() {
                    Ok(()) => live.state = live.port.state().unwrap_or(State::Gone),
                    Err(error) => {
                        if before != State::Gone {
                            log::warn!("{}: {error}", live.port.name());
                        }
                        live.state = State::Gone;
                    }
                },
                Ok(state) => live.state = state,
                Err(error) => live.warn(&error),
            }
            // It may have been changed.
            self.engine.io_mut().tx_queues[at].mtu = router::mtu(&live.port.caps());
            let name = live.port.name();
            match (before, live.state) {
                (State::Up, State::Down) => log::warn!("{name}: its interface is down"),
                (State::Up | State::Down, State::Gone) => log::warn!("{name}: its interface is gone"),
                (State::Down | State::Gone, State::Up) => {
                    log::info!("{name}: its interface is up again");
                    self.engine.io_mut().forget_neighbors(at);
                }
                _ => {}
            }
        }
    }

    /// Tells those who look what the ports have done.
    fn show_ports(&mut self) {
        let Self { engine, ports, .. } = self;
        let io = engine.io_mut();
        let row = |(at, (live, tx)): (usize, (&mut Live, &TxQueue))| {
            let stats = live.port.stats();
            live.tell_too_long(stats.dropped.rx_too_long);
            live.tell_uncut(stats.dropped.rx_uncut);
            let lost = stats.dropped.iter().chain(tx.lost.iter()).filter(|(_, count)| *count > 0);
            records::Port {
                name: live.port.name().to_owned(),
                driver: live.driver.to_owned(),
                state: match live.state {
                    State::Up => "up".to_owned(),
                    State::Down => "down".to_owned(),
                    State::Gone => "gone".to_owned(),
                },
                received: stats.received,
                received_bytes: stats.received_bytes,
                sent: stats.sent,
                sent_bytes: stats.sent_bytes,
                lost: lost.map(|(reason, count)| (reason.to_owned(), count)).collect(),
                neighbors: neighbors(io.neighbors(at)),
            }
        };
        let rows = ports.iter_mut().zip(&io.tx_queues).enumerate().map(row).collect();
        engine.io_mut().queries_mut().set_ports(rows);
    }

    /// Whether it was told to end once more. Whatever else is said now comes too late.
    fn is_hurried(&self) -> bool {
        self.commands.try_iter().any(|command| matches!(command, WorkerCommand::Drain))
    }

    /// Waits for what inspectors have, so long and no longer.
    fn finish(mut self) -> Report {
        let start = Instant::now();
        // What comes from now on wakes nobody who would not take it.
        self.ports.iter_mut().for_each(|live| live.ended = true);
        while !self.engine.is_drained() && start.elapsed() < self.drain && !self.is_hurried() {
            self.idle();
            if !self.muxes.turn(false) && !self.engine.is_drained() {
                self.sleep();
            }
        }
        let left = !self.engine.is_drained();
        let Ok(dropped) = self.engine.abandon();
        self.engine.io_mut().abandon();
        self.transmit();
        if left {
            let waited = start.elapsed().as_secs_f64();
            log::warn!("inspectors still had packets after {waited:.1} s: {dropped} were dropped");
        }
        for live in &mut self.ports {
            if let Err(error) = live.port.flush() {
                live.warn(&error);
            }
        }
        // Their connections have a time of their own to be done.
        while !self.muxes.is_empty() {
            if !self.muxes.turn(false) && !self.muxes.is_empty() {
                self.sleep();
            }
            self.idle();
        }
        if self.unlogged > 0 {
            log::warn!("{} tx_queues of log rules were left out", self.unlogged);
        }
        Report::of(&mut self.engine)
    }
}

impl Live {
    fn send(&mut self, tx: &mut TxQueue, burst: &Burst) {
        let TxQueue { items, copies, lost, .. } = tx;
        let (mut done, mut tries) = (0, 0);
        while done < items.len() {
            let mut pulled = 0;
            let mut frames = items[done..].iter().map(|items| {
                pulled += 1;
                match *items {
                    TxItem::Came(at) => burst.frame(at),
                    TxItem::Copy(at) => copies.frame(at),
                }
            });
            match self.port.send(&mut frames) {
                Ok(sent) => {
                    done += sent;
                    if done < items.len() {
                        tries += 1;
                        if tries > TRIES {
                            lost.full += (items.len() - done) as u64;
                            break;
                        }
                    }
                }
                Err(error) => {
                    // A port that fails counts what it did not send; otherwise those before the frame that was pulled last are.
                    lost.refused += u64::from(!matches!(error, towpath_port::Error::Io { .. }));
                    done += pulled.max(1);
                    self.warn(&error);
                }
            }
        }
        if let Err(error) = self.port.flush() {
            self.warn(&error);
        }
    }

    fn decide(&mut self, tx: &mut TxQueue) {
        for (verdict, meta, copy) in &tx.verdicts {
            let plain = || Frame { meta: *meta, ..Frame::new(&[], LinkType::RAW) };
            let frame = copy.map_or_else(plain, |at| tx.copies.frame(at));
            if let Err(error) = self.port.verdict(frame, *verdict) {
                tx.lost.refused += 1;
                self.warn(&error);
            }
        }
        if let Err(error) = self.port.flush() {
            self.warn(&error);
        }
    }

    /// A connection of which no full segment arrives stalls, and nothing else says why.
    fn tell_too_long(&mut self, too_long: u64) {
        if too_long > self.too_long * 2 {
            self.too_long = too_long;
            log::warn!(
                "{}: frames longer than a buffer cannot be received ({too_long} so far): set multi-buffer = true, or \
                 `ethtool -K DEV tso off gso off gro off` at the hosts that send them",
                self.port.name()
            );
        }
    }

    /// Who sends datagrams that way does not do without it, and sees only that none arrives.
    fn tell_uncut(&mut self, uncut: u64) {
        if uncut > self.uncut * 2 {
            self.uncut = uncut;
            log::warn!(
                "{}: datagrams that are not cut cannot be received ({uncut} frames of them so far): use af_packet, or \
                 `ethtool -K DEV tx-udp-segmentation off` at the hosts that send them",
                self.port.name()
            );
        }
    }

    /// Says what is wrong: the first time, and then ever more rarely.
    fn warn(&mut self, error: &towpath_port::Error) {
        self.errors += 1;
        if self.errors.is_power_of_two() {
            log::warn!("{error} ({} so far)", self.errors);
        }
    }
}

fn meta(frame: &Frame<'_>, port: usize) -> Meta {
    Meta {
        wire_len: frame.wire_len,
        time: frame.time_ns,
        link: frame.link,
        interface: port as u32,
        out: None,
        hop: None,
        changed: false,
        port: frame.meta,
    }
}
