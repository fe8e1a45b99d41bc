//! Worker pool: a multiplexor whose workers are processes on rings.
//!
//! What: one thread has the sockets ([`towpath_mux::io::Driver`]) and the rings. A turn reads the workers'
//! replies and releases, applies them to the core, takes messages for workers with space, publishes them,
//! writes replies, and waits. No other thread exists. A thread with other duties runs single turns
//! ([`WorkerPool::step`]).
//!
//! ```text
//! socket -> psock -> framing -> queue -> RX frame (connection, generation) -> worker process
//! socket <- psock <- reply, copied <------ TX frame (number of the RX frame) <- reply()
//! (long replies are sent from that copy, or from the frame itself: `zerocopy_tx.rs`, `tx_lease.rs`)
//!                    done <--------------- release of the RX frame <----------- done()
//! ```
//!
//! Invariants:
//! - A worker that asked for them learns of opened and ended connections (`connections.rs`).
//! - A reply is accepted only for a message that the worker holds. The message of a sequence number is looked
//!   up in private memory (`process.rs`), and the payload is copied before it is examined.
//! - No call here blocks on a peer. Channels, mapped memory and Unix sockets are closed by helper threads
//!   ([`towpath_ring::reaper`]).
//! - A worker answers a message once, and sends unrequested messages only to connections that it received messages from
//!   (`authority.rs`). The first violation detaches it (`violation.rs`), and the slot is barred for a while.
//! - A release takes effect after all replies that the worker wrote before it: releases are read first and
//!   applied last.
//! - The death of a worker counts against the message that it was processing. Messages after it go to other
//!   workers without a count.
//! - Data to send is queued at its connection, so that a worker never waits for a peer.
//!
//! Workers on other machines ([`RemoteSlots`]) have slots after the local ones. Their program is a thread of this process that attaches like a
//! worker process, so that nothing else here knows of them but the order in which they get messages (`dispatch.rs`).
//!
//! A worker process that dies is restarted, with a delay that doubles if it dies at once. SIGHUP replaces the
//! workers one by one: the new process attaches before the old one is drained. SIGUSR2 replaces the whole process (`upgrade.rs`).

mod authority;
mod completions;
mod config;
mod connections;
pub mod delivery;
mod dispatch;
mod end_log;
mod frame;
mod goodbye;
mod introspect;
mod listen;
mod moved;
mod poll_backoff;
mod process;
mod remote_slots;
mod signals;
mod tx_lease;
mod upgrade;
mod violation;
mod worker_slot;
mod zerocopy_tx;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;
use towpath_mux::io::{Driver, Event, Server};
use towpath_mux::mux::{Mux, Order, SendError};
use towpath_ring::SocketFile;
use towpath_ring::reaper::{PeerKey, Reaper};
use towpath_send::CopyMode;

use crate::control::QueryInbox;
use crate::process::socket_directory::{self, SocketDirectory};
use authority::Rights;
use completions::Completions;
pub use completions::UnsentStats;
pub use config::Config;
use connections::Connections;
use dispatch::Dispatcher;
pub use goodbye::WorkerEnd;
pub use listen::{ListenError, is_no_address, listen, reload_tls};
use poll_backoff::PollBackoff;
use process::Command;
pub use process::WorkerExit;
#[cfg(feature = "fleet")]
pub(crate) use process::worker_ring;
pub use remote_slots::RemoteSlots;
pub use signals::{Moved, PoolControl};
use signals::{Signal, Signals};
use upgrade::Upgrades;
pub use upgrade::{Inherited, InheritedFile, SERVICE, Upgradable, UpgradeStats};
pub use violation::{Violation, Violations};
use worker_slot::WorkerSlot;
use zerocopy_tx::ZerocopyTx;

/// Minimum number of bytes of a part of a long message ([`towpath_mux::assembler::Limits::part`]).
pub const PART: usize = 16 << 10;

/// Token of the signals. The token of a slot is its number + 1.
const SIGNALS: u32 = 0;
/// Maximum delay of a look at the sockets while the rings are busy. A look costs as much as several messages.
const POLL_INTERVAL: Duration = Duration::from_micros(10);
/// Time after the drain deadline for the core to end the remaining connections and report them.
const DRAIN_GRACE: Duration = Duration::from_millis(50);

/// Why the pool cannot start, or failed.
#[derive(Debug, Error)]
pub enum Error {
    /// A worker could not be started, or ended before it attached for the first time.
    #[error("worker {slot}: {exit}")]
    Worker {
        /// Number of the worker, from 0.
        slot: usize,
        /// Reason.
        exit: WorkerExit,
    },
    /// SIGTERM or SIGINT, before all workers had attached.
    #[error("told to end before all workers had attached")]
    Stopped,
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// The operation.
        doing: &'static str,
        /// The error.
        source: io::Error,
    },
}

fn system(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { doing, source }
}

/// Result of a worker pool that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Connections were drained in time, and their peers or the kernel have accepted all data.
    pub drained: bool,
    /// Number of connections that were cut before everything was answered and accepted, since the drain
    /// began.
    pub cut: u64,
    /// Number of messages that workers had begun and not completed when the pool ended.
    pub begun: u64,
    /// Counters of the multiplexor.
    pub totals: towpath_mux::mux::Totals,
    /// Number of worker processes that were restarted.
    pub restarts: u64,
    /// Counters of upgrades.
    pub upgrade: UpgradeStats,
}

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There was something to do, and there may be more.
    Busy,
    /// There was nothing to do.
    Quiet,
    /// The pool has ended: call [`WorkerPool::end`].
    Over {
        /// Connections were drained in time.
        drained: bool,
    },
}

/// A multiplexor whose workers are processes. See the documentation of this module.
#[derive(Debug)]
pub struct WorkerPool {
    driver: Driver,
    config: Config,
    command: Command,
    remote: Option<Command>,
    start: Instant,
    slots: Vec<WorkerSlot>,
    signals: Signals,
    completions: Completions,
    connections: Connections,
    zerocopy_tx: ZerocopyTx,
    /// The slot being replaced.
    replacing: Option<usize>,
    /// Draining: the deadline, and the number of connections cut before it began.
    draining: Option<Instant>,
    cut_before: u64,
    /// Ends logged in this second, ends not logged, and start of the second.
    reported: (u32, u64, Instant),
    /// Number of connections whose ends were handled.
    ended: u64,
    /// Unsent messages of workers when they were last logged, and that time.
    lost: (UnsentStats, Option<Instant>),
    inbox: Option<QueryInbox>,
    dispatcher: Dispatcher,
    /// Time until queries and zero-copy senders need a turn.
    patience: Duration,
    /// Files of the Unix sockets that it listens on.
    sockets: Vec<SocketFile>,
    upgrades: Upgrades,
    /// Directory of the workers' sockets; removed on drop.
    _directory: SocketDirectory,
}

impl WorkerPool {
    /// Starts the workers and waits until all have attached.
    ///
    /// # Errors
    /// Fails if a worker cannot be started or does not attach, or if SIGTERM or SIGINT arrives before. All workers have been ended then.
    pub fn new(server: &Server, config: Config, inbox: Option<QueryInbox>) -> Result<Self, Error> {
        let signals = Signals::new().map_err(system("listening to signals"))?;
        Self::start(server, config, inbox, signals, &|| false)
    }

    /// As [`WorkerPool::new`], for a process that handles signals itself: the returned control replaces them.
    /// Stops waiting for workers to attach when `stopped` returns true.
    ///
    /// # Errors
    /// As [`WorkerPool::new`].
    pub fn with_control(
        server: &Server,
        config: Config,
        inbox: Option<QueryInbox>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Self, PoolControl), Error> {
        let (signals, orders) = Signals::channel().map_err(system("listening to orders"))?;
        Ok((Self::start(server, config, inbox, signals, stopped)?, orders))
    }

    fn start(
        server: &Server,
        config: Config,
        inbox: Option<QueryInbox>,
        signals: Signals,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Self, Error> {
        // Started here, so that no turn starts a thread.
        Reaper::shared().start();
        towpath_mux::io::set_close(|user, fds| Reaper::shared().drop_for(PeerKey::User(user), fds));
        let mut driver = server.driver().map_err(system("driving the sockets"))?;
        driver.gather();
        driver.watch(&signals, SIGNALS).map_err(system("listening to signals"))?;
        let directory = socket_directory::make(config.starter.changes_user());
        let directory = directory.map_err(system("making a directory for the workers' sockets"))?;
        let remote = config.remote.as_ref().map_or(0, |remote| remote.most.get());
        let all = config.workers + remote;
        if let Some(limit) = descriptor_limit(all) {
            server.set_descriptor_limit(limit);
        }
        let start = Instant::now();
        let zerocopy_tx = ZerocopyTx::new(config.send, config.send_check);
        server.set_zerocopy(Arc::new(zerocopy_tx.clone()));
        // Leases need a connection that one worker alone sends on.
        let core = driver.change(|mux, _| *mux.config());
        let sticky = core.order == Order::Sticky && core.rebalance.is_none();
        let alone = all == 1 || sticky;
        let connected = core.connected;
        let rights = Rights {
            leases: alone && config.send != CopyMode::Plain,
            push: config.may_push,
            connected,
            parts: server.streams(),
        };
        let slot = |number| match number < config.workers {
            true => WorkerSlot::new(number, directory.path(), rights),
            false => WorkerSlot::remote(number, directory.path(), rights),
        };
        let slots = (0..all).map(slot).collect();
        let completions = Completions::new(config.drain);
        let mut pool = Self {
            driver,
            command: Command {
                program: config.program.clone(),
                place: config.place.clone(),
                starter: config.starter.clone(),
                waits: false,
            },
            remote: config.remote.as_ref().map(|remote| remote.command(&config.place)),
            config,
            start,
            slots,
            signals,
            completions,
            connections: Connections::default(),
            zerocopy_tx,
            replacing: None,
            draining: None,
            cut_before: 0,
            reported: (0, 0, start),
            ended: 0,
            lost: (UnsentStats::default(), None),
            inbox,
            dispatcher: Dispatcher::new(),
            patience: Duration::ZERO,
            sockets: Vec::new(),
            upgrades: Upgrades::default(),
            _directory: directory,
        };
        for slot in &mut pool.slots {
            let command = pool.remote.as_ref().filter(|_| slot.is_remote()).unwrap_or(&pool.command);
            slot.start(command, &pool.driver, start);
        }
        while pool.slots.iter().any(|slot| !slot.is_attached() && !slot.is_remote()) && !stopped() {
            pool.wait(Some(Duration::from_millis(100)))?;
            pool.supervise_slots();
            if let Some((slot, exit)) = pool.slots.iter_mut().find_map(WorkerSlot::take_exit) {
                return Err(Error::Worker { slot, exit });
            }
            // The workers are ended with the pool.
            if pool.signals.is_told_to_end() {
                return Err(Error::Stopped);
            }
        }
        Ok(pool)
    }

    /// Keeps the files of Unix sockets until the pool stops accepting.
    pub fn keep(&mut self, sockets: Vec<SocketFile>) {
        self.sockets.extend(sockets);
    }

    /// Serves a control socket.
    pub fn serve_control(&mut self, inbox: QueryInbox) {
        self.inbox = Some(inbox);
    }

    /// Serves until a signal ends it: SIGTERM or SIGINT drains, the second one ends at once.
    ///
    /// # Errors
    /// Fails if epoll_wait(2) fails.
    pub fn run(mut self) -> Result<Outcome, Error> {
        let (mut backoff, mut looked) = (PollBackoff::default(), None);
        loop {
            let now = Instant::now();
            let busy = self.exchange();
            let again = backoff.should_poll(busy, || self.slots.iter().any(WorkerSlot::works_elsewhere));
            if busy && now.duration_since(*looked.get_or_insert(now)) < POLL_INTERVAL {
                continue;
            }
            looked = None;
            let timeout = if again { None } else { self.arm_slots() };
            self.wait(Some(timeout.unwrap_or(Duration::ZERO)))?;
            if let Some(drained) = self.supervise() {
                return Ok(self.end(drained));
            }
        }
    }

    /// Runs one bounded turn without waiting. Sleep by the pool's descriptor after [`WorkerPool::arm`].
    ///
    /// # Errors
    /// Fails if epoll_wait(2) fails.
    pub fn step(&mut self) -> Result<Step, Error> {
        let busy = self.exchange();
        let busy = self.wait(Some(Duration::ZERO))? || busy;
        Ok(match self.supervise() {
            Some(drained) => Step::Over { drained },
            None if busy => Step::Busy,
            None => Step::Quiet,
        })
    }

    /// Makes the pool's descriptor readable when there is work. Returns the maximum time until the next turn,
    /// or `None` if there is work already.
    pub fn arm(&mut self) -> Option<Duration> {
        let slots = self.arm_slots()?;
        let own = self.driver.poll_timeout().map(|due| due.saturating_duration_since(Instant::now()));
        Some(own.map_or(slots, |own| own.min(slots)))
    }

    /// Ends the pool after [`Step::Over`]: closes the workers' channels and waits for the processes.
    pub fn end(mut self, drained: bool) -> Outcome {
        let totals = self.driver.change(|mux, _| *mux.totals());
        let restarts = self.slots.iter().map(WorkerSlot::restarts).sum();
        let open = if drained { 0 } else { totals.attach - totals.unattach };
        let cut = self.cut() + open;
        let begun = self.slots.iter().map(WorkerSlot::begun).sum::<u64>().min(totals.in_hand);
        if !drained {
            // They would be waited for.
            self.slots.iter_mut().for_each(WorkerSlot::kill_working);
        }
        self.report_left_out(Duration::ZERO);
        // All channels are closed before any process is waited for.
        let Self { slots, driver, connections, .. } = &mut self;
        connections.update(driver, slots);
        slots.iter_mut().for_each(WorkerSlot::report_ended);
        slots.iter_mut().for_each(|slot| slot.close(driver));
        self.upgrades.end();
        Outcome { drained, cut, begun, totals, restarts, upgrade: self.upgrades.stats }
    }

    /// Handles messages, replies and queries. Returns true if there was anything to do.
    fn exchange(&mut self) -> bool {
        let serve_queries = self.serve_queries();
        // Time spent on queries does not count as a worker's delay.
        let now = Instant::now();
        let busy = self.turn(self.clock(now));
        // Also while the pool is always busy.
        self.patience = serve_queries.min(self.zerocopy_tx.look(now));
        busy
    }

    /// Maximum time to sleep; `None` if a worker has something already.
    fn arm_slots(&mut self) -> Option<Duration> {
        // Arms every slot; does not stop at the first that has something.
        let armed = self.slots.iter_mut().filter_map(|slot| (!slot.arm()).then_some(())).count() == 0;
        armed.then(|| self.timeout().min(self.patience))
    }

    /// Handles processes, events and signals. Returns whether the drain succeeded when the pool is over.
    fn supervise(&mut self) -> Option<bool> {
        self.supervise_slots();
        let now = Instant::now();
        self.attend_upgrade(now);
        let news = self.driver.has_news();
        if news {
            self.handle_events();
            self.report_ends();
        }
        self.report_lost();
        self.report_left_out(Duration::from_secs(1));
        self.finish_upgrade(now);
        // A worker that is stuck in a message is not waited for: its connection has gone.
        let late = self.draining.is_some_and(|latest| now >= latest);
        if news && self.driver.is_drained() && (late || !self.upgrades.has_queue()) {
            return Some(self.cut() == 0);
        }
        (self.handle_signals() || late).then_some(false)
    }

    /// One turn of messages and replies. Returns true if there was anything to do.
    fn turn(&mut self, now: u64) -> bool {
        let Self { driver, slots, completions, connections, dispatcher, config, .. } = self;
        let mut busy = connections.update(driver, slots);
        for slot in slots.iter_mut() {
            busy |= slot.collect(completions, now, config.timeout);
        }
        let room = slots.iter().any(WorkerSlot::has_room);
        let parts = |mux: &Mux| slots.iter().any(|slot| slot.takes_part(mux));
        let more = || driver.server().look(|mux| room && mux.available() > 0 || parts(mux));
        if !busy && completions.refused.is_empty() && completions.is_all_reported() && !more() {
            dispatcher.rest();
            return false;
        }
        driver.apply(|mux, time| {
            completions.apply(mux, time);
            busy |= dispatcher.dispatch(slots, mux, time, now);
            for slot in slots.iter_mut() {
                busy |= slot.fill_retired(mux, time);
                busy |= slot.feed(mux);
            }
        });
        let epoch = epoch();
        for slot in slots.iter_mut() {
            slot.hand_over(completions, connections, now, epoch);
        }
        // Workers process their messages during the writes.
        driver.flush();
        busy
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        let Self { driver, slots, signals, upgrades, .. } = self;
        let each = |token| match token {
            SIGNALS => signals.read(),
            upgrade::SUCCESSOR => upgrades.successor_ready = true,
            upgrade::PREDECESSOR => upgrades.predecessor_ready = true,
            token => {
                if let Some(slot) = slots.get_mut(WorkerSlot::of(token)) {
                    slot.handle_ready();
                }
            }
        };
        driver.wait(timeout, each).map_err(|source| Error::System { doing: "waiting for sockets", source })
    }

    /// When the slots need supervision.
    fn timeout(&self) -> Duration {
        let now = Instant::now();
        let slots = self.slots.iter().filter_map(|slot| slot.due(self.config.timeout, self.start));
        let due = slots.chain(self.draining).chain(self.upgrades.due(now)).min();
        let due = due.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        self.dispatcher.again().map_or(due, |again| again.min(due))
    }

    /// Handles processes that attached or ended, due restarts, and replacements.
    fn supervise_slots(&mut self) {
        let now = Instant::now();
        let clock = self.clock(now);
        let Self { driver, slots, draining, command, remote, .. } = self;
        for slot in slots {
            slot.look(driver, &mut self.completions, now, clock);
            if !slot.is_due(now) {
                continue;
            }
            // While it drains nothing is read. A worker is needed only for messages that exist.
            match draining.is_none() || driver.server().look(Mux::has_work) {
                true => {
                    slot.start(remote.as_ref().filter(|_| slot.is_remote()).unwrap_or(command), driver, now)
                }
                false => slot.stay_empty(),
            }
        }
        self.dispatcher.look(&self.slots, now);
        self.connections.report(&mut self.driver, &self.slots);
        let Some(at) = self.replacing else { return };
        if self.slots.get(at).is_some_and(WorkerSlot::is_replacing) {
            return;
        }
        self.replacing = Some(at + 1).filter(|next| *next < self.config.workers);
        match self.replacing {
            Some(next) => {
                self.slots[next].replace(&self.command, &self.driver, self.config.drain, now);
            }
            None => match self.slots.iter().filter(|slot| slot.was_kept()).count() {
                0 => tracing::info!("all workers were replaced"),
                kept => tracing::warn!("{kept} of {} workers were not replaced", self.config.workers),
            },
        }
    }

    /// Handles signals. Returns true to end at once.
    fn handle_signals(&mut self) -> bool {
        while let Some(signal) = self.signals.next() {
            if signal == Signal::Replace
                && let Some(tls) = &self.config.tls
            {
                reload_tls(tls, "");
            }
            match signal {
                Signal::Upgrade => self.begin_upgrade(),
                Signal::Replace
                    if self.config.workers > 0
                        && self.replacing.is_none()
                        && self.draining.is_none()
                        && !self.upgrades.is_active()
                        && !self.slots.iter().any(WorkerSlot::has_old) =>
                {
                    self.replacing = Some(0);
                    let now = Instant::now();
                    self.slots[0].replace(&self.command, &self.driver, self.config.drain, now);
                }
                Signal::Replace => {
                    tracing::warn!(
                        "SIGHUP ignored: workers are being replaced already, or the mux is draining or being upgraded"
                    )
                }
                Signal::End if self.draining.is_some() => return true,
                Signal::End => {
                    self.drain_upgrade();
                    self.begin_drain(Instant::now(), self.config.drain);
                }
            }
        }
        false
    }

    /// Accepts and reads nothing more.
    fn begin_drain(&mut self, now: Instant, patience: Duration) {
        self.draining = Some(now + patience + DRAIN_GRACE);
        self.cut_before = cut(&self.driver.server());
        // A replacement that has begun is completed.
        self.replacing = None;
        // Before listening ends: a successor that finds the file would replace it by its own,
        // which may have the same inode number (inode(7)) and would be removed with ours.
        self.sockets.clear();
        self.upgrades.remove_files();
        self.driver.server().drain(Some(patience));
    }

    fn handle_events(&mut self) {
        while let Some(reported) = self.driver.poll_event() {
            match reported {
                Event::Left(id) => {
                    let Self { slots, driver, .. } = self;
                    slots.iter_mut().for_each(|slot| slot.handle_left(id, driver));
                }
                Event::Undone(message) => {
                    let psock = message.psock();
                    tracing::warn!(
                        "a message of {} bytes of {psock} was given up: {} workers died with it",
                        message.bytes().len(),
                        message.deaths()
                    );
                    if self.config.close_undone {
                        // Its other messages are processed and answered.
                        let drain = self.config.drain;
                        self.driver.change(|mux, now| mux.drain_psock(psock, Some(now + drain), now));
                    }
                }
                Event::NotAttached { peer, why } => match peer {
                    Some(address) => self.warn(peer, || format!("{address} was not attached: {why}")),
                    None => self.warn(None, || format!("a connection was not attached: {why}")),
                },
                Event::Undelivered(undelivered) => self.completions.undelivered(undelivered.bytes),
                Event::WriteSpace => {}
            }
        }
    }

    /// Number of connections cut since the drain began.
    fn cut(&self) -> u64 {
        if self.draining.is_some() { cut(&self.driver.server()) - self.cut_before } else { 0 }
    }

    /// Serves queries. Returns the time until they need the next turn.
    fn serve_queries(&mut self) -> Duration {
        let Some(mut inbox) = self.inbox.take() else { return Duration::MAX };
        let patience = inbox.serve_pool(self);
        self.inbox = Some(inbox);
        Duration::from_nanos(patience)
    }

    /// Nanoseconds since the start.
    fn clock(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Readable when [`WorkerPool::step`] has something to do, after [`WorkerPool::arm`].
impl AsFd for WorkerPool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }
}

/// Most descriptors in one message (SCM_MAX_FD, include/net/scm.h).
const PASSED: u64 = 253;

/// Lowest descriptor that connections must leave free. Workers can then be restarted: each needs five, and twelve during
/// the start. A message with descriptors is received with them: the kernel would close them in this thread, which may
/// block. Reserves at most half of all.
fn descriptor_limit(workers: usize) -> Option<RawFd> {
    let all = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
    let kept = (8 * workers as u64 + 24 + PASSED).min(all / 2);
    RawFd::try_from(all - kept).ok()
}

/// Number of connections that ended with unanswered messages or unaccepted data.
fn cut(server: &Server) -> u64 {
    let ended = |mux: &Mux| {
        let totals = mux.totals();
        totals.drain_timeouts + totals.send_timeouts + totals.send_full
    };
    server.look(ended) + server.accept_stats().cut_short
}

/// Nanoseconds since the epoch.
fn epoch() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Sends a message of a worker. A message without destination or space is not kept.
fn send(
    mux: &mut Mux,
    to: Option<towpath_mux::mux::psock::Id>,
    bytes: bytes::Bytes,
    now: towpath_mux::Time,
) -> Result<(), SendError> {
    match to {
        Some(psock) => mux.forward(psock, bytes, now),
        None if mux.config().connected => mux.send(bytes, now).map(drop),
        None => Err(SendError::NotConnected),
    }
}
