//! A server front: connections on one side, worker processes on rings on the other, the multiplexor between them.
//!
//! What: one thread has the sockets ([`towpath_mux::io::Driver`]) and the rings. Its turn: read what the workers answered
//! and released, tell the core, take messages for those that have room, publish them, write answers, wait. No other thread
//! exists; a thread that has other things to do, too, takes one turn at a time ([`WorkerPool::step`]).
//!
//! ```text
//! socket -> psock -> framing -> queue -> RX frame (connection, generation) -> worker process
//! socket <- psock <- reply, copied <------ TX frame (number of the RX frame) <- reply()
//!   (long ones leave from that copy without another, or from the frame itself: `zerocopy_tx.rs`, `tx_lease.rs`)
//!                    done <--------------- release of the RX frame <----------- done()
//! ```
//!
//! Invariants:
//! - a reply is believed only for a message that the worker holds: which message a number means is in private memory
//!   (`process.rs`), the payload is copied before it is looked at;
//! - a release counts after every reply that the worker wrote before it: releases are read first, applied last;
//! - a worker that dies costs the message it was at one of its lives; what lies behind that one goes to others unblamed;
//! - what is to be sent waits at its connection, so a worker never waits for a peer.
//!
//! A worker process that dies is started again, after a while that doubles when it dies at once. SIGHUP replaces all of them
//! one by one: the new one has attached before the old one is drained.

mod completions;
mod dispatch;
mod frame;
mod listen;
mod poll_backoff;
mod process;
mod signals;
mod tx_lease;
mod worker_slot;
mod zerocopy_tx;

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;
use towpath_mux::io::{Driver, Ended, Event, Server};
use towpath_mux::mux::{Mux, Order, SendError};
use towpath_ring::SocketFile;
use towpath_send::Choice;

use crate::control::{QueryHandler, QueryInbox, mux, protocol, send};
use completions::Completions;
use dispatch::Dispatcher;
pub use listen::{ListenError, is_no_address, listen};
use poll_backoff::PollBackoff;
pub use process::WorkerExit;
pub use signals::PoolControl;
use signals::{Signal, Signals};
use worker_slot::WorkerSlot;
use zerocopy_tx::ZerocopyTx;

/// The token of the signals; a slot's is its number and 1.
const SIGNALS: u32 = 0;
/// Ends of connections that are reported in a second; more are counted.
const TOLD: u32 = 10;
/// How long sockets wait at most while rings give something: to ask for them costs as much as some messages do.
const LOOK: Duration = Duration::from_micros(10);
/// What is left behind the time for draining, for the core to end what has not ended and for that to be reported.
const MOMENT: Duration = Duration::from_millis(100);

/// What a front is reported when it is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// The command of a worker, in words. As its first word, `towpath` means this very program.
    pub command: Vec<String>,
    /// How many workers.
    pub workers: NonZeroUsize,
    /// How long connections have to be done when the front is reported to end, and a worker when it is replaced.
    pub drain: Duration,
    /// A worker that has a message for longer is killed; none waits for ever.
    pub timeout: Option<Duration>,
    /// Whether a connection ends when its message was given up because its workers died.
    pub close_undone: bool,
    /// What it is called, where there are several.
    pub name: String,
    /// Workers' channels are numbered behind this one, where others are listed beside them.
    pub first_channel: u32,
    /// How long answers leave: see [`towpath_send::Choice`].
    pub send: Choice,
    /// Whether each long answer's checksum when it was given is compared with that at its completion, which costs two readings of every
    /// byte: see [`towpath_send::Counters::tampered`].
    pub send_check: bool,
}

/// Why there is no front, or why it ended.
#[derive(Debug, Error)]
pub enum Error {
    /// A worker could not be started, or ended before it attached, for the first time.
    #[error("worker {slot}: {exit}")]
    Worker {
        /// Which, from 0.
        slot: usize,
        /// Why.
        exit: WorkerExit,
    },
    /// A system call failed.
    #[error("{doing}: {source}")]
    System {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

fn system(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::System { doing, source }
}

/// What a front did, when it has ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Connections were drained in time, and their peers have taken everything, or the kernel has it for them.
    pub drained: bool,
    /// Connections of which something was not answered or not taken when they were waited for no longer, since it was reported to end.
    pub cut: u64,
    /// What the multiplexor counted.
    pub totals: towpath_mux::mux::Totals,
    /// Worker processes that were started again.
    pub restarts: u64,
}

/// What a turn of a front came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There was something to do, and there may be more.
    Busy,
    /// There was nothing to do.
    Quiet,
    /// It has ended: see [`WorkerPool::end`].
    Over {
        /// Connections were drained in time.
        drained: bool,
    },
}

/// A multiplexor whose workers are processes. See the module's documentation.
#[derive(Debug)]
pub struct WorkerPool {
    driver: Driver,
    config: Config,
    start: Instant,
    slots: Vec<WorkerSlot>,
    signals: Signals,
    completions: Completions,
    zerocopy_tx: ZerocopyTx,
    /// Who is next to be replaced, while that goes on.
    replacing: Option<usize>,
    /// It was reported to end: when it does so at the latest, and how many connections had been cut before.
    draining: Option<Instant>,
    cut_before: u64,
    /// Ends reported in this second, those that were not, and when it began.
    reported: (u32, u64, Instant),
    /// Workers' messages that were not sent, as far as that was reported, and when.
    lost: (mux::Lost, Option<Instant>),
    inbox: Option<QueryInbox>,
    dispatcher: Dispatcher,
    /// How long who looks at it, and what leaves without a copy, can be left alone.
    patience: Duration,
    /// Of the Unix sockets where it listens, as long as it does.
    sockets: Vec<SocketFile>,
    /// Holds the workers' sockets; removed with it.
    _directory: TempDir,
}

impl WorkerPool {
    /// Starts the workers and waits until all have attached.
    ///
    /// # Errors
    /// Why not; then every worker has been ended.
    pub fn new(server: &Server, config: Config, inbox: Option<QueryInbox>) -> Result<Self, Error> {
        let signals = Signals::new().map_err(system("listening to signals"))?;
        Self::start(server, config, inbox, signals, &|| false)
    }

    /// The same for a process that has other things to do with its signals: what they would say is said by orders. Once it is
    /// `stopped`, workers that have not attached yet are not waited for any more.
    ///
    /// # Errors
    /// As [`WorkerPool::new`].
    pub fn ordered(
        server: &Server,
        config: Config,
        inbox: Option<QueryInbox>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Self, PoolControl), Error> {
        let (signals, orders) = Signals::ordered().map_err(system("listening to orders"))?;
        Ok((Self::start(server, config, inbox, signals, stopped)?, orders))
    }

    fn start(
        server: &Server,
        config: Config,
        inbox: Option<QueryInbox>,
        signals: Signals,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Self, Error> {
        let mut driver = server.driver().map_err(system("driving the sockets"))?;
        driver.gather();
        driver.watch(&signals, SIGNALS).map_err(system("listening to signals"))?;
        // tempdir gives it mode 0700.
        let directory = tempfile::Builder::new().prefix("towpath-").tempdir();
        let directory = directory.map_err(system("making a directory for the workers' sockets"))?;
        if let Some(limit) = descriptor_limit(config.workers.get()) {
            server.set_descriptor_limit(limit);
        }
        let start = Instant::now();
        let zerocopy_tx = ZerocopyTx::new(config.send, config.send_check);
        server.set_zerocopy(Arc::new(zerocopy_tx.clone()));
        // Else what one worker answers goes out beside what others do.
        let alone = config.workers.get() == 1 || driver.change(|mux, _| mux.config().order) == Order::Sticky;
        let leases = alone && config.send != Choice::Plain;
        let slots = (0..config.workers.get())
            .map(|number| WorkerSlot::new(number, directory.path(), leases))
            .collect();
        let completions = Completions::new(config.drain);
        let mut front = Self {
            driver,
            config,
            start,
            slots,
            signals,
            completions,
            zerocopy_tx,
            replacing: None,
            draining: None,
            cut_before: 0,
            reported: (0, 0, start),
            lost: (mux::Lost::default(), None),
            inbox,
            dispatcher: Dispatcher::new(),
            patience: Duration::ZERO,
            sockets: Vec::new(),
            _directory: directory,
        };
        for slot in &mut front.slots {
            slot.start(&front.config.command, &front.driver, start);
        }
        while front.slots.iter().any(|slot| !slot.is_attached()) && !stopped() {
            front.wait(Some(Duration::from_millis(100)))?;
            front.supervise_slots();
            if let Some((slot, exit)) = front.slots.iter_mut().find_map(WorkerSlot::take_exit) {
                return Err(Error::Worker { slot, exit });
            }
        }
        Ok(front)
    }

    /// Gives it the files of the Unix sockets that it serves: they go when it stops accepting.
    pub fn keep(&mut self, sockets: Vec<SocketFile>) {
        self.sockets.extend(sockets);
    }

    /// Serves until a signal ends it: SIGTERM and SIGINT drain, a second one does not wait.
    ///
    /// # Errors
    /// When epoll fails.
    pub fn run(mut self) -> Result<Outcome, Error> {
        let (mut backoff, mut looked) = (PollBackoff::default(), None);
        loop {
            let now = Instant::now();
            let busy = self.exchange();
            let again = backoff.should_poll(busy, || self.slots.iter().any(WorkerSlot::works_elsewhere));
            if busy && now.duration_since(*looked.get_or_insert(now)) < LOOK {
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

    /// One turn for somebody who has other things to do, too: what is there is done, within bounds, and nobody is waited
    /// for. Who calls this sleeps with the front's descriptor, when it has [armed](Self::arm) it.
    ///
    /// # Errors
    /// When epoll fails.
    pub fn step(&mut self) -> Result<Step, Error> {
        let busy = self.exchange();
        let busy = self.wait(Some(Duration::ZERO))? || busy;
        Ok(match self.supervise() {
            Some(drained) => Step::Over { drained },
            None if busy => Step::Busy,
            None => Step::Quiet,
        })
    }

    /// Has everything that brings work make the front's descriptor readable; for how long the front may be left alone
    /// otherwise. Nothing when there is something to do already.
    pub fn arm(&mut self) -> Option<Duration> {
        let slots = self.arm_slots()?;
        let own = self.driver.poll_timeout().map(|due| due.saturating_duration_since(Instant::now()));
        Some(own.map_or(slots, |own| own.min(slots)))
    }

    /// Ends it when its last [step](Self::step) was over: its workers are reported, and waited for.
    pub fn end(mut self, drained: bool) -> Outcome {
        let totals = self.driver.change(|mux, _| *mux.totals());
        let restarts = self.slots.iter().map(WorkerSlot::restarts).sum();
        let open = if drained { 0 } else { totals.attach - totals.unattach };
        let cut = self.cut() + open;
        // Every channel ends before any process is waited for.
        self.slots.iter_mut().for_each(WorkerSlot::close);
        Outcome { drained, cut, totals, restarts }
    }

    /// Messages, answers and questions; whether there was anything to do.
    fn exchange(&mut self) -> bool {
        let serve_queries = self.serve_queries();
        // Behind the questions: what they take is no worker's delay.
        let now = Instant::now();
        let busy = self.turn(self.clock(now));
        // Also while there is always something else to do.
        self.patience = serve_queries.min(self.zerocopy_tx.look(now));
        busy
    }

    /// How long to sleep at most; nothing when a worker has something already.
    fn arm_slots(&mut self) -> Option<Duration> {
        // Every one of them, not up to the first that has something.
        let armed = self.slots.iter_mut().filter_map(|slot| (!slot.arm()).then_some(())).count() == 0;
        armed.then(|| self.timeout().min(self.patience))
    }

    /// What is not messages: processes, what there is to tell, signals. Whether it is over, and if so whether it was drained.
    fn supervise(&mut self) -> Option<bool> {
        self.supervise_slots();
        let news = self.driver.has_news();
        if news {
            self.handle_events();
            self.report_ends();
        }
        self.report_lost();
        if news && self.driver.is_drained() {
            return Some(self.cut() == 0);
        }
        // A worker that is stuck in a message is not waited for, since nobody is there any more to be answered.
        let late = self.draining.is_some_and(|latest| Instant::now() >= latest);
        (self.handle_signals() || late).then_some(false)
    }

    /// One turn of messages and answers; whether there was anything to do.
    fn turn(&mut self, now: u64) -> bool {
        let Self { driver, slots, completions, dispatcher, config, .. } = self;
        let mut busy = false;
        for slot in slots.iter_mut() {
            busy |= slot.collect(completions, now, config.timeout);
        }
        let room = slots.iter().any(WorkerSlot::has_room);
        let more = || room && driver.server().look(|mux| mux.queued() > 0);
        if !busy && completions.refused.is_empty() && completions.is_all_reported() && !more() {
            dispatcher.rest();
            return false;
        }
        driver.apply(|mux, time| {
            completions.apply(mux, time);
            busy |= dispatcher.dispatch(slots, mux, time, now);
        });
        let epoch = epoch();
        for slot in slots.iter_mut() {
            slot.hand_over(completions, now, epoch);
        }
        // Writing takes long: workers are at what they got meanwhile.
        driver.flush();
        busy
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        let Self { driver, slots, signals, .. } = self;
        let each = |token| match token {
            SIGNALS => signals.read(),
            token => {
                if let Some(slot) = slots.get_mut(WorkerSlot::of(token)) {
                    slot.handle_ready();
                }
            }
        };
        driver.wait(timeout, each).map_err(|source| Error::System { doing: "waiting for sockets", source })
    }

    /// When slots want to be looked after at the latest.
    fn timeout(&self) -> Duration {
        let now = Instant::now();
        let slots = self.slots.iter().filter_map(|slot| slot.due(self.config.timeout, self.start));
        let due = slots.chain(self.draining).min();
        let due = due.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        self.dispatcher.again().map_or(due, |again| again.min(due))
    }

    /// Processes that attached or ended, restarts that are due, replacements that may go on.
    fn supervise_slots(&mut self) {
        let now = Instant::now();
        let clock = self.clock(now);
        let Self { driver, slots, draining, .. } = self;
        for slot in slots {
            slot.look(driver, &mut self.completions, now, clock);
            if !slot.is_due(now) {
                continue;
            }
            // Nothing is read while it drains: what nobody holds or waits with then needs nobody any more.
            match draining.is_none() || driver.server().look(Mux::has_work) {
                true => slot.start(&self.config.command, driver, now),
                false => slot.stay_empty(),
            }
        }
        let Some(at) = self.replacing else { return };
        if self.slots.get(at).is_some_and(WorkerSlot::is_replacing) {
            return;
        }
        self.replacing = Some(at + 1).filter(|next| *next < self.slots.len());
        match self.replacing {
            Some(next) => {
                self.slots[next].replace(&self.config.command, &self.driver, self.config.drain, now);
            }
            None => match self.slots.iter().filter(|slot| slot.was_kept()).count() {
                0 => log::info!("all workers were replaced"),
                kept => log::warn!("{kept} of {} workers were not replaced", self.slots.len()),
            },
        }
    }

    /// Does what signals say; whether to end at once.
    fn handle_signals(&mut self) -> bool {
        while let Some(signal) = self.signals.next() {
            match signal {
                Signal::Replace if self.replacing.is_none() && self.draining.is_none() => {
                    self.replacing = Some(0);
                    let now = Instant::now();
                    self.slots[0].replace(&self.config.command, &self.driver, self.config.drain, now);
                }
                Signal::Replace => log::warn!("SIGHUP: workers are being replaced, or the front ends"),
                Signal::End if self.draining.is_some() => return true,
                Signal::End => {
                    self.draining = Some(Instant::now() + self.config.drain + MOMENT);
                    self.cut_before = cut(&self.driver.server());
                    // One that has been begun comes to its end.
                    self.replacing = None;
                    // Before nobody listens there any more: a successor that finds the file then puts its own in its place, which may
                    // have the same number (inode(7)), and would go with us.
                    self.sockets.clear();
                    self.driver.server().drain(Some(self.config.drain));
                }
            }
        }
        false
    }

    fn handle_events(&mut self) {
        while let Some(reported) = self.driver.poll_event() {
            match reported {
                Event::Left(id) => self.slots.iter_mut().for_each(|slot| slot.handle_left(id)),
                Event::Undone(message) => {
                    let psock = message.psock();
                    log::warn!(
                        "a message of {} bytes of {psock} was given up: {} workers died with it",
                        message.bytes().len(),
                        message.deaths()
                    );
                    if self.config.close_undone {
                        // What else it asked is done and answered.
                        let drain = self.config.drain;
                        self.driver.change(|mux, now| mux.drain_psock(psock, Some(now + drain), now));
                    }
                }
                Event::NotAttached { peer, why } => match peer {
                    Some(peer) => self.warn(|| format!("{peer} was not attached: {why}")),
                    None => self.warn(|| format!("a connection was not attached: {why}")),
                },
                Event::Undelivered(undelivered) => self.completions.undelivered(undelivered.bytes),
                Event::WriteSpace => {}
            }
        }
    }

    /// Connections that were cut since it was reported to end.
    fn cut(&self) -> u64 {
        if self.draining.is_some() { cut(&self.driver.server()) - self.cut_before } else { 0 }
    }

    /// Workers' messages that were not sent, at most once a second.
    fn report_lost(&mut self) {
        let (before, since) = &mut self.lost;
        let lost = self.completions.lost;
        if lost == *before || since.is_some_and(|since| since.elapsed() < Duration::from_secs(1)) {
            return;
        }
        let more = lost.since(before);
        (*before, *since) = (lost, Some(Instant::now()));
        log::warn!("messages of workers were not sent: {more}");
    }

    /// Connections that ended badly, with the cause.
    fn report_ends(&mut self) {
        while let Some(Ended { psock, peer, cause, unsent, .. }) = self.driver.server().poll_ended() {
            if cause.is_clean() {
                continue;
            }
            let unsent = if unsent > 0 { format!("; {unsent} answers were not sent") } else { String::new() };
            let peer = peer.map_or_else(String::new, |peer| format!(" ({peer})"));
            self.warn(|| format!("{psock}{peer} ended: {cause}{unsent}"));
        }
    }

    /// Says what became of a connection: some in a second, the others as a number.
    fn warn(&mut self, line: impl FnOnce() -> String) {
        let (count, left_out, since) = &mut self.reported;
        if since.elapsed() >= Duration::from_secs(1) {
            if *left_out > 0 {
                log::warn!("{left_out} more connections ended badly");
            }
            (*count, *left_out, *since) = (0, 0, Instant::now());
        }
        if *count >= TOLD {
            *left_out += 1;
            return;
        }
        *count += 1;
        log::warn!("{}", line());
    }

    /// Answers those who look; for how long they can be left alone.
    fn serve_queries(&mut self) -> Duration {
        let Some(mut inbox) = self.inbox.take() else { return Duration::MAX };
        let patience = inbox.attend(self);
        self.inbox = Some(inbox);
        Duration::from_nanos(patience)
    }

    /// Nanoseconds since it began.
    fn clock(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Readable when there is something to do for [`WorkerPool::step`], once the front was [armed](WorkerPool::arm).
impl AsFd for WorkerPool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }
}

impl QueryHandler for WorkerPool {
    fn rings(&mut self) -> Vec<protocol::Ring> {
        let first = self.config.first_channel;
        let ring = |ring: protocol::Ring| protocol::Ring { channel: first + ring.channel, ..ring };
        self.slots.iter().filter_map(WorkerSlot::ring).map(ring).collect()
    }

    fn frames(&mut self, _channel: u32) -> Option<Vec<protocol::Frame>> {
        None
    }

    fn mux(&mut self) -> Option<Box<mux::Mux>> {
        let slots = &self.slots;
        let pid = |id| slots.iter().find_map(|slot| slot.pid(id)).unwrap_or(0);
        let restarts = slots.iter().map(WorkerSlot::restarts).sum();
        let name = self.config.name.clone();
        let lost = self.completions.lost;
        let server = self.driver.server();
        let arrivals = server.accept_stats().into();
        let of = |core: &Mux| mux::Mux { name, lost, arrivals, ..mux::Mux::of(core, restarts, pid) };
        Some(Box::new(server.look(of).with_peers(|psock| server.peer(psock))))
    }

    fn send(&mut self) -> Option<Box<send::Send>> {
        Some(Box::new(self.zerocopy_tx.show(&self.config.name)))
    }

    fn ports(&self) -> Vec<String> {
        Vec::new()
    }
}

/// From which descriptor on they are not for connections, which would otherwise take what a worker needs that is started again: it has
/// five, and twelve for a moment. At most half of all.
fn descriptor_limit(workers: usize) -> Option<RawFd> {
    let all = rustix::process::getrlimit(rustix::process::Resource::Nofile).current?;
    let kept = (8 * workers as u64 + 24).min(all / 2);
    RawFd::try_from(all - kept).ok()
}

/// Connections whose peers were not waited for any longer, though they had not been answered or had not taken what was sent.
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

/// Sends what a worker said, as far as it may: a message that nobody is there for, or has room for, is not kept.
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
