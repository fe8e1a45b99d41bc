//! A server front: connections on one side, worker processes on rings on the other, the multiplexor between them.
//!
//! What: one thread has the sockets ([`towpath_mux::io::Driver`]) and the rings. Its turn: read what the workers answered
//! and released, tell the core, take messages for those that have room, publish them, write answers, wait. No other thread
//! exists; a thread that has other things to do, too, takes one turn at a time ([`Front::step`]).
//!
//! ```text
//! socket -> psock -> framing -> queue -> RX frame (connection, generation) -> worker process
//! socket <- psock <- reply, copied <------ TX frame (number of the RX frame) <- reply()
//!   (long ones leave from that copy without another, or from the frame itself: `senders.rs`, `loan.rs`)
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

mod deal;
mod frame;
mod listen;
mod loan;
mod pace;
mod process;
mod returns;
mod seat;
mod senders;
mod signals;

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;
use towpath_mux::io::{Driver, Ended, Server, Told};
use towpath_mux::mux::{Mux, Order, SendError};
use towpath_ring::SocketFile;
use towpath_send::Choice;

use crate::control::{Desk, Observed, mux, protocol, send};
use deal::Deal;
pub use listen::{ListenError, is_no_address, listen};
use pace::Pace;
pub use process::Ending;
use returns::Returns;
use seat::Seat;
use senders::Senders;
pub use signals::Orders;
use signals::{Signal, Signals};

/// The token of the signals; a seat's is its number and 1.
const SIGNALS: u32 = 0;
/// Ends of connections that are told in a second; more are counted.
const TOLD: u32 = 10;
/// How long sockets wait at most while rings give something: to ask for them costs as much as some messages do.
const LOOK: Duration = Duration::from_micros(10);
/// What is left behind the time for draining, for the core to end what has not ended and for that to be told.
const MOMENT: Duration = Duration::from_millis(100);

/// What a front is told when it is made.
#[derive(Clone, Debug)]
pub struct Config {
    /// The command of a worker, in words. As its first word, `towpath` means this very program.
    pub command: Vec<String>,
    /// How many workers.
    pub workers: NonZeroUsize,
    /// How long connections have to be done when the front is told to end, and a worker when it is replaced.
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
    #[error("worker {seat}: {ending}")]
    Worker {
        /// Which, from 0.
        seat: usize,
        /// Why.
        ending: Ending,
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
    /// Connections of which something was not answered or not taken when they were waited for no longer, since it was told to end.
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
    /// It has ended: see [`Front::end`].
    Over {
        /// Connections were drained in time.
        drained: bool,
    },
}

/// A multiplexor whose workers are processes. See the module's documentation.
#[derive(Debug)]
pub struct Front {
    driver: Driver,
    config: Config,
    start: Instant,
    seats: Vec<Seat>,
    signals: Signals,
    returns: Returns,
    senders: Senders,
    /// Who is next to be replaced, while that goes on.
    replacing: Option<usize>,
    /// It was told to end: when it does so at the latest, and how many connections had been cut before.
    draining: Option<Instant>,
    cut_before: u64,
    /// Ends told in this second, those that were not, and when it began.
    told: (u32, u64, Instant),
    /// Workers' messages that were not sent, as far as that was told, and when.
    lost: (mux::Lost, Option<Instant>),
    desk: Option<Desk>,
    deal: Deal,
    /// How long who looks at it, and what leaves without a copy, can be left alone.
    patience: Duration,
    /// Of the Unix sockets where it listens, as long as it does.
    sockets: Vec<SocketFile>,
    /// Holds the workers' sockets; removed with it.
    _directory: TempDir,
}

impl Front {
    /// Starts the workers and waits until all have attached.
    ///
    /// # Errors
    /// Why not; then every worker has been ended.
    pub fn new(server: &Server, config: Config, desk: Option<Desk>) -> Result<Self, Error> {
        let signals = Signals::new().map_err(system("listening to signals"))?;
        Self::start(server, config, desk, signals, &|| false)
    }

    /// The same for a process that has other things to do with its signals: what they would say is said by orders. Once it is
    /// `stopped`, workers that have not attached yet are not waited for any more.
    ///
    /// # Errors
    /// As [`Front::new`].
    pub fn ordered(
        server: &Server,
        config: Config,
        desk: Option<Desk>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Self, Orders), Error> {
        let (signals, orders) = Signals::ordered().map_err(system("listening to orders"))?;
        Ok((Self::start(server, config, desk, signals, stopped)?, orders))
    }

    fn start(
        server: &Server,
        config: Config,
        desk: Option<Desk>,
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
        let senders = Senders::new(config.send, config.send_check);
        server.set_carriers(Arc::new(senders.clone()));
        // Else what one worker answers goes out beside what others do.
        let alone = config.workers.get() == 1 || driver.change(|mux, _| mux.config().order) == Order::Sticky;
        let lends = alone && config.send != Choice::Plain;
        let seats =
            (0..config.workers.get()).map(|number| Seat::new(number, directory.path(), lends)).collect();
        let returns = Returns::new(config.drain);
        let mut front = Self {
            driver,
            config,
            start,
            seats,
            signals,
            returns,
            senders,
            replacing: None,
            draining: None,
            cut_before: 0,
            told: (0, 0, start),
            lost: (mux::Lost::default(), None),
            desk,
            deal: Deal::new(),
            patience: Duration::ZERO,
            sockets: Vec::new(),
            _directory: directory,
        };
        for seat in &mut front.seats {
            seat.start(&front.config.command, &front.driver, start);
        }
        while front.seats.iter().any(|seat| !seat.is_attached()) && !stopped() {
            front.wait(Some(Duration::from_millis(100)))?;
            front.look_after_seats();
            if let Some((seat, ending)) = front.seats.iter_mut().find_map(Seat::take_ending) {
                return Err(Error::Worker { seat, ending });
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
        let (mut pace, mut looked) = (Pace::default(), None);
        loop {
            let now = Instant::now();
            let busy = self.exchange();
            let again = pace.looks_again(busy, || self.seats.iter().any(Seat::works_elsewhere));
            if busy && now.duration_since(*looked.get_or_insert(now)) < LOOK {
                continue;
            }
            looked = None;
            let timeout = if again { None } else { self.arm_seats() };
            self.wait(Some(timeout.unwrap_or(Duration::ZERO)))?;
            if let Some(drained) = self.look_after() {
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
        Ok(match self.look_after() {
            Some(drained) => Step::Over { drained },
            None if busy => Step::Busy,
            None => Step::Quiet,
        })
    }

    /// Has everything that brings work make the front's descriptor readable; for how long the front may be left alone
    /// otherwise. Nothing when there is something to do already.
    pub fn arm(&mut self) -> Option<Duration> {
        let seats = self.arm_seats()?;
        let own = self.driver.poll_timeout().map(|due| due.saturating_duration_since(Instant::now()));
        Some(own.map_or(seats, |own| own.min(seats)))
    }

    /// Ends it when its last [step](Self::step) was over: its workers are told, and waited for.
    pub fn end(mut self, drained: bool) -> Outcome {
        let totals = self.driver.change(|mux, _| *mux.totals());
        let restarts = self.seats.iter().map(Seat::restarts).sum();
        let open = if drained { 0 } else { totals.attach - totals.unattach };
        let cut = self.cut() + open;
        // Every channel ends before any process is waited for.
        self.seats.iter_mut().for_each(Seat::close);
        Outcome { drained, cut, totals, restarts }
    }

    /// Messages, answers and questions; whether there was anything to do.
    fn exchange(&mut self) -> bool {
        let attend = self.attend();
        // Behind the questions: what they take is no worker's delay.
        let now = Instant::now();
        let busy = self.turn(self.clock(now));
        // Also while there is always something else to do.
        self.patience = attend.min(self.senders.look(now));
        busy
    }

    /// How long to sleep at most; nothing when a worker has something already.
    fn arm_seats(&mut self) -> Option<Duration> {
        // Every one of them, not up to the first that has something.
        let armed = self.seats.iter_mut().filter_map(|seat| (!seat.arm()).then_some(())).count() == 0;
        armed.then(|| self.timeout().min(self.patience))
    }

    /// What is not messages: processes, what there is to tell, signals. Whether it is over, and if so whether it was drained.
    fn look_after(&mut self) -> Option<bool> {
        self.look_after_seats();
        let news = self.driver.has_news();
        if news {
            self.hear_told();
            self.tell_ends();
        }
        self.tell_lost();
        if news && self.driver.is_drained() {
            return Some(self.cut() == 0);
        }
        // A worker that is stuck in a message is not waited for, since nobody is there any more to be answered.
        let late = self.draining.is_some_and(|latest| Instant::now() >= latest);
        (self.obey() || late).then_some(false)
    }

    /// One turn of messages and answers; whether there was anything to do.
    fn turn(&mut self, now: u64) -> bool {
        let Self { driver, seats, returns, deal, config, .. } = self;
        let mut busy = false;
        for seat in seats.iter_mut() {
            busy |= seat.collect(returns, now, config.timeout);
        }
        let room = seats.iter().any(Seat::has_room);
        let more = || room && driver.server().look(|mux| mux.queued() > 0);
        if !busy && returns.refused.is_empty() && returns.is_all_told() && !more() {
            deal.rest();
            return false;
        }
        driver.apply(|mux, time| {
            returns.apply(mux, time);
            busy |= deal.deal(seats, mux, time, now);
        });
        let epoch = epoch();
        for seat in seats.iter_mut() {
            seat.hand_over(returns, now, epoch);
        }
        // Writing takes long: workers are at what they got meanwhile.
        driver.flush();
        busy
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        let Self { driver, seats, signals, .. } = self;
        let each = |token| match token {
            SIGNALS => signals.hear(),
            token => {
                if let Some(seat) = seats.get_mut(Seat::of(token)) {
                    seat.handle_ready();
                }
            }
        };
        driver.wait(timeout, each).map_err(|source| Error::System { doing: "waiting for sockets", source })
    }

    /// When seats want to be looked after at the latest.
    fn timeout(&self) -> Duration {
        let now = Instant::now();
        let seats = self.seats.iter().filter_map(|seat| seat.due(self.config.timeout, self.start));
        let due = seats.chain(self.draining).min();
        let due = due.map_or(Duration::from_secs(1), |due| due.saturating_duration_since(now));
        self.deal.again().map_or(due, |again| again.min(due))
    }

    /// Processes that attached or ended, restarts that are due, replacements that may go on.
    fn look_after_seats(&mut self) {
        let now = Instant::now();
        let clock = self.clock(now);
        let Self { driver, seats, draining, .. } = self;
        for seat in seats {
            seat.look(driver, &mut self.returns, now, clock);
            if !seat.is_due(now) {
                continue;
            }
            // Nothing is read while it drains: what nobody holds or waits with then needs nobody any more.
            match draining.is_none() || driver.server().look(Mux::has_work) {
                true => seat.start(&self.config.command, driver, now),
                false => seat.stay_empty(),
            }
        }
        let Some(at) = self.replacing else { return };
        if self.seats.get(at).is_some_and(Seat::is_replacing) {
            return;
        }
        self.replacing = Some(at + 1).filter(|next| *next < self.seats.len());
        match self.replacing {
            Some(next) => {
                self.seats[next].replace(&self.config.command, &self.driver, self.config.drain, now);
            }
            None => match self.seats.iter().filter(|seat| seat.was_kept()).count() {
                0 => log::info!("all workers were replaced"),
                kept => log::warn!("{kept} of {} workers were not replaced", self.seats.len()),
            },
        }
    }

    /// Does what signals say; whether to end at once.
    fn obey(&mut self) -> bool {
        while let Some(signal) = self.signals.next() {
            match signal {
                Signal::Replace if self.replacing.is_none() && self.draining.is_none() => {
                    self.replacing = Some(0);
                    let now = Instant::now();
                    self.seats[0].replace(&self.config.command, &self.driver, self.config.drain, now);
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

    fn hear_told(&mut self) {
        while let Some(told) = self.driver.poll_told() {
            match told {
                Told::Left(id) => self.seats.iter_mut().for_each(|seat| seat.handle_left(id)),
                Told::Undone(message) => {
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
                Told::NotAttached { peer, why } => match peer {
                    Some(peer) => self.warn(|| format!("{peer} was not attached: {why}")),
                    None => self.warn(|| format!("a connection was not attached: {why}")),
                },
                Told::Undelivered(undelivered) => self.returns.undelivered(undelivered.bytes),
                Told::Room => {}
            }
        }
    }

    /// Connections that were cut since it was told to end.
    fn cut(&self) -> u64 {
        if self.draining.is_some() { cut(&self.driver.server()) - self.cut_before } else { 0 }
    }

    /// Workers' messages that were not sent, at most once a second.
    fn tell_lost(&mut self) {
        let (before, since) = &mut self.lost;
        let lost = self.returns.lost;
        if lost == *before || since.is_some_and(|since| since.elapsed() < Duration::from_secs(1)) {
            return;
        }
        let more = lost.since(before);
        (*before, *since) = (lost, Some(Instant::now()));
        log::warn!("messages of workers were not sent: {more}");
    }

    /// Connections that ended badly, with the cause.
    fn tell_ends(&mut self) {
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
        let (count, left_out, since) = &mut self.told;
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
    fn attend(&mut self) -> Duration {
        let Some(mut desk) = self.desk.take() else { return Duration::MAX };
        let patience = desk.attend(self);
        self.desk = Some(desk);
        Duration::from_nanos(patience)
    }

    /// Nanoseconds since it began.
    fn clock(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Readable when there is something to do for [`Front::step`], once the front was [armed](Front::arm).
impl AsFd for Front {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }
}

impl Observed for Front {
    fn rings(&mut self) -> Vec<protocol::Ring> {
        let first = self.config.first_channel;
        let ring = |ring: protocol::Ring| protocol::Ring { channel: first + ring.channel, ..ring };
        self.seats.iter().filter_map(Seat::ring).map(ring).collect()
    }

    fn frames(&mut self, _channel: u32) -> Option<Vec<protocol::Frame>> {
        None
    }

    fn trace(&mut self, _channel: u32, tap: crate::control::Tap) -> Result<(), crate::control::Tap> {
        Err(tap)
    }

    fn mux(&mut self) -> Option<Box<mux::Mux>> {
        let seats = &self.seats;
        let pid = |id| seats.iter().find_map(|seat| seat.pid(id)).unwrap_or(0);
        let restarts = seats.iter().map(Seat::restarts).sum();
        let name = self.config.name.clone();
        let lost = self.returns.lost;
        let server = self.driver.server();
        let arrivals = server.arrivals().into();
        let of = |core: &Mux| mux::Mux { name, lost, arrivals, ..mux::Mux::of(core, restarts, pid) };
        Some(Box::new(server.look(of).with_peers(|psock| server.peer(psock))))
    }

    fn send(&mut self) -> Option<Box<send::Send>> {
        Some(Box::new(self.senders.show(&self.config.name)))
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
    server.look(ended) + server.arrivals().cut_short
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
