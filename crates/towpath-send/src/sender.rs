//! The blocking sender, and the options of all senders.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::buffer::Buffer;
use crate::counters::{Counters, Distributions};
use crate::driver::{Done, Driver, Remains, Turn};
use crate::engine::{Config, CopyMode};
use crate::error::{SendError, Unarmed};
use crate::locked::LockedMemory;
use crate::notification::ExtendedError;
use crate::policy::Mode;
use crate::socket::Socket;
use crate::sys;
use crate::time::Clock;
use crate::tx_backoff::TxBackoff;
use towpath_wire::Time;

/// The kernel interface of zero-copy sends. Both have the same completions and the same counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum BackEnd {
    /// send(2) with MSG_ZEROCOPY; completions arrive in the socket's error queue.
    #[default]
    MsgZerocopy,
    /// SEND_ZC and SENDMSG_ZC of io_uring (Linux 6.2), with one ring per socket. Plain sends remain calls of send(2).
    IoUring,
}

/// Settings of a sender. The defaults suit TCP messages of any size.
#[derive(Clone, Debug)]
pub struct Options {
    /// Zero copy, plain, or adaptive (the default).
    pub choice: CopyMode,
    /// The kernel interface. [`BackEnd::IoUring`] falls back to [`BackEnd::MsgZerocopy`] if the kernel lacks the operations or refuses
    /// a ring (seccomp, `kernel.io_uring_disabled`). [`PollSender`](crate::PollSender) always uses MSG_ZEROCOPY.
    pub back_end: BackEnd,
    /// Shorter calls are sent plain. Bytes.
    pub min_zerocopy: usize,
    /// Adjacent queued buffers are gathered into one call until it reaches this size in bytes; 0 disables gathering.
    pub gather: usize,
    /// Calls per sendmmsg(2), at most [`MAX_CALLS`](crate::MAX_CALLS); default 1. With more than 1, [`Sender::queue`] sends when this
    /// many buffers wait; otherwise when `gather` bytes wait. Use it for datagrams, and for a stream whose messages must not be
    /// gathered.
    pub batch: usize,
    /// The error queue is read after this many calls, or one millisecond after the last read.
    pub read_every: usize,
    /// Limit on the buffers that the sender holds: queued, in flight, and completed but not reclaimed.
    pub max_frames: usize,
    /// Limit on pinned bytes.
    pub max_pinned: u64,
    /// Keeps completed buffers for [`Sender::reclaim`]. If false (the default), completed buffers are dropped, which returns a
    /// pool's frames to the pool.
    pub keep_done: bool,
    /// Compares each buffer's checksum at completion with the checksum at the send. This reads every byte twice. See
    /// [`Counters::tampered`].
    pub tamper_check: bool,
    /// UDP: segment size in bytes; the kernel or the device cuts each buffer into datagrams of this size (UDP_SEGMENT). UDP
    /// without segmentation is always copied. `None` turns segmentation off on the socket, as does
    /// the end of the sender.
    pub segment: Option<u16>,
    /// Limit on the time without progress of the peer before a blocking call fails; `None` (the default) waits forever.
    pub stall: Option<Duration>,
    /// Account of locked memory, shared by the senders of a process. `None` takes the limit of [`Limits::read`](crate::Limits::read) for this sender
    /// alone.
    pub locked: Option<Arc<LockedMemory>>,
}

impl Default for Options {
    fn default() -> Self {
        let config = Config::default();
        Self {
            choice: config.choice,
            back_end: BackEnd::default(),
            min_zerocopy: config.min_zerocopy,
            gather: config.gather,
            batch: 1,
            read_every: config.read_every,
            max_frames: config.max_frames,
            max_pinned: config.max_pinned,
            keep_done: false,
            tamper_check: false,
            segment: None,
            stall: None,
            locked: None,
        }
    }
}

/// Sends buffers over a connected TCP or UDP socket, without copying where that works.
///
/// The sender owns a buffer until the kernel has completed it. Completed buffers return to their pool, or through
/// [`reclaim`](Self::reclaim). Writing into a buffer that was sent does not compile:
///
/// ```compile_fail,E0382
/// # fn example(mut sender: towpath_send::Sender, mut pool: towpath_send::Pool) -> Result<(), towpath_send::SendError> {
/// let mut frame = pool.take().expect("a free frame");
/// frame.put(b"the peer will read this");
/// sender.send(frame)?;
/// frame.put(b"or will it read that?"); // error: use of moved value: `frame`
/// # Ok(())
/// # }
/// ```
///
/// ```
/// use std::io::Read;
/// use std::net::{TcpListener, TcpStream};
/// use std::time::Duration;
/// use towpath_send::{Options, Pool, Sender};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let stream = TcpStream::connect(listener.local_addr()?)?;
/// let mut pool = Pool::new(4, 64 << 10, true)?;
/// let mut sender = Sender::new(stream, Options::default())?;
/// let reader = std::thread::spawn(move || {
///     let mut all = Vec::new();
///     listener.accept()?.0.read_to_end(&mut all).map(|_| all)
/// });
///
/// let mut frame = pool.take().ok_or("no free frame")?;
/// frame.put(&[7; 64 << 10]);
/// sender.send(frame)?;
/// let closed = sender.close(Duration::from_secs(60))?;
/// assert!(closed.finished);
/// assert_eq!(reader.join().map_err(|_| "the reader failed")??, [7; 64 << 10]);
/// # Ok(())
/// # }
/// ```
///
/// Dropping a sender with buffers in flight leaks their memory; call [`close`](Self::close).
#[derive(Debug)]
pub struct Sender {
    driver: Driver<Socket>,
    clock: Clock,
    max_frames: usize,
    gather: u64,
    batch: usize,
    stall: Option<Duration>,
    tx_backoff: TxBackoff,
}

/// Result of [`Sender::close`].
#[derive(Debug)]
pub struct Closed {
    /// True if all data was handed to the kernel and every completion arrived: the peer's TCP acknowledged the data sent without
    /// a copy (which does not imply that the application read it), and the kernel owns the data that it copied. If false, the
    /// connection was reset.
    pub finished: bool,
    /// The buffers that the sender still held.
    pub remains: Remains,
    /// The sender's counters.
    pub counters: Counters,
    /// The sender's distributions.
    pub distributions: Distributions,
}

impl Sender {
    /// Creates a sender for a connected socket: `TcpStream`, `UdpSocket` or `OwnedFd`. The socket's blocking mode does not matter.
    ///
    /// No other code may send with MSG_ZEROCOPY on the socket, before or after this call (the kernel's completion numbers would
    /// differ), or read its error queue.
    ///
    /// # Errors
    /// [`SendError::NotASocket`], [`SendError::Segmentation`]; with [`CopyMode::Zerocopy`], [`SendError::NotSupported`].
    pub fn new(socket: impl Into<OwnedFd>, options: Options) -> Result<Self, SendError> {
        let clock = Clock::new();
        let (socket, engine) = Socket::open(socket.into(), &options, Time::default())?;
        Ok(Self {
            driver: Driver::new(socket, engine, &options),
            clock,
            max_frames: options.max_frames.max(1),
            gather: options.gather as u64,
            batch: options.batch,
            stall: options.stall,
            tx_backoff: TxBackoff::new(),
        })
    }

    /// Sends a buffer. Blocks until the kernel has accepted this buffer and all queued ones; they may still be in flight.
    ///
    /// # Errors
    /// The connection ended or stalled, or a datagram is too long.
    pub fn send(&mut self, buffer: impl Into<Buffer>) -> Result<(), SendError> {
        self.make_room()?;
        self.driver.push(0, buffer.into());
        self.flush()
    }

    /// Queues a buffer to be sent together with later ones. Blocks only while [`Options::max_frames`] buffers are held. Data that
    /// a full socket does not accept is sent with the next buffer or by [`flush`](Self::flush). [`reclaim`](Self::reclaim) returns
    /// `token` with the buffer.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    #[inline]
    pub fn queue(&mut self, token: u64, buffer: impl Into<Buffer>) -> Result<(), SendError> {
        self.make_room()?;
        self.driver.push(token, buffer.into());
        let engine = &self.driver.engine;
        let enough =
            if self.batch > 1 { engine.waiting() >= self.batch } else { engine.unsent() >= self.gather };
        if enough { self.try_turn() } else { Ok(()) }
    }

    /// Blocks until the kernel has accepted all queued data.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub fn flush(&mut self) -> Result<(), SendError> {
        self.drive(|sender| sender.driver.engine.is_flushed(), None).map(|_| ())
    }

    /// Like [`flush`](Self::flush), for at most `patience`. Returns true if the kernel accepted everything.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub fn flush_for(&mut self, patience: Duration) -> Result<bool, SendError> {
        let deadline = Instant::now() + patience;
        self.drive(|sender| sender.driver.engine.is_flushed(), Some(deadline))
    }

    /// Returns a completed buffer, with [`Options::keep_done`]. Never blocks.
    ///
    /// # Errors
    /// The error queue could not be read.
    pub fn reclaim(&mut self) -> Result<Option<Done>, SendError> {
        if let Some(done) = self.driver.poll_done() {
            return Ok(Some(done));
        }
        if self.driver.engine.outstanding() > 0 {
            let now = self.clock.read();
            self.driver.read(now)?;
        }
        Ok(self.driver.poll_done())
    }

    /// Reads pending completions, which frees their buffers and their locked memory. Call it when the sender pauses; each send
    /// also reads completions once a millisecond has passed. Never blocks.
    ///
    /// # Errors
    /// The error queue could not be read.
    pub fn read_completions(&mut self) -> Result<(), SendError> {
        let now = self.clock.read();
        self.driver.read(now).map(drop)
    }

    /// Blocks until all data is sent and every completion arrived. Returns false if that takes longer than `patience`.
    ///
    /// # Errors
    /// See [`send`](Self::send).
    pub fn drain(&mut self, patience: Duration) -> Result<bool, SendError> {
        let deadline = Instant::now() + patience;
        let idle = self.drive(|sender| sender.is_idle(), Some(deadline))?;
        // The kernel also completes data that a reset discarded.
        match self.driver.backend.lost(false).filter(|_| idle) {
            Some(error) => Err(SendError::Gone(error)),
            None => Ok(idle),
        }
    }

    /// Ends the connection: sends queued data, shuts down the write side, waits for completions, and closes. After `patience` the
    /// connection is reset, and buffers that the kernel may still read go into quarantine.
    ///
    /// # Errors
    /// The error queue could not be read. A peer that is gone or does not read is not an error: see [`Closed::finished`].
    pub fn close(mut self, patience: Duration) -> Result<Closed, SendError> {
        let deadline = Instant::now() + patience;
        let flushed = self.drive(|sender| sender.driver.engine.is_flushed(), Some(deadline)).unwrap_or(false);
        let finished = flushed
            && self.driver.backend.lost(false).is_none()
            && self.driver.backend.shutdown().is_ok()
            && self.drive(|sender| sender.is_idle(), Some(deadline)).unwrap_or(false)
            && self.driver.backend.lost(true).is_none();
        if !finished {
            self.driver.backend.reset();
            let soon = Instant::now() + AFTER_RESET;
            while self.driver.engine.outstanding() > 0 && Instant::now() < soon {
                let now = self.clock.read();
                self.driver.read(now)?;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let now = self.clock.read();
        let remains = self.driver.abandon(now);
        let distributions = self.distributions().clone();
        Ok(Closed { finished, remains, counters: *self.counters(), distributions })
    }

    /// The sender's counters.
    pub fn counters(&self) -> &Counters {
        self.driver.engine.counters()
    }

    /// The sender's distributions.
    pub fn distributions(&self) -> &Distributions {
        self.driver.engine.distributions()
    }

    /// The current mode.
    pub fn mode(&self) -> Mode {
        self.driver.engine.mode()
    }

    /// Changes the copy mode: [`CopyMode::Zerocopy`] and [`CopyMode::Plain`] take effect with the next call, [`CopyMode::Adaptive`]
    /// starts with new probes. Without support of the socket, all calls stay plain.
    pub fn set_choice(&mut self, choice: CopyMode) {
        let now = self.clock.read();
        self.driver.engine.set_choice(choice, now);
    }

    /// The reason why zero copy cannot be used on the socket; `None` if it can.
    pub fn unarmed(&self) -> Option<Unarmed> {
        self.driver.backend.unarmed
    }

    /// The kernel interface in use.
    pub fn back_end(&self) -> BackEnd {
        self.driver.backend.back_end()
    }

    /// Limit on pinned bytes at present.
    pub fn budget(&self) -> u64 {
        self.driver.engine.budget()
    }

    /// Number of zero-copy calls whose completions are outstanding.
    pub fn outstanding(&self) -> usize {
        self.driver.engine.outstanding()
    }

    /// Returns an entry of the socket's error queue that is not a zero-copy notification: an ICMP error or a timestamp. The oldest
    /// 64 are kept.
    pub fn poll_other(&mut self) -> Option<ExtendedError> {
        self.driver.poll_other()
    }

    #[inline]
    fn make_room(&mut self) -> Result<(), SendError> {
        if self.driver.has_room(self.max_frames) {
            return Ok(());
        }
        self.drive(|sender| sender.driver.has_room(sender.max_frames), None).map(|_| ())
    }

    fn try_turn(&mut self) -> Result<(), SendError> {
        let now = self.clock.glance();
        self.driver.try_turn(now)
    }

    fn is_idle(&self) -> bool {
        self.driver.engine.is_flushed() && self.driver.engine.outstanding() == 0
    }

    /// Sends and waits until `until` holds. Returns false if `deadline` comes first.
    fn drive(&mut self, until: impl Fn(&Self) -> bool, deadline: Option<Instant>) -> Result<bool, SendError> {
        let (mut moved, mut turn, mut again) = (None, Turn::Flushed, true);
        loop {
            if again {
                let now = self.clock.read();
                turn = self.driver.turn(now)?;
            }
            if until(self) {
                return Ok(true);
            }
            if turn == Turn::Flushed {
                let now = self.clock.read();
                self.driver.read(now)?;
                if until(self) {
                    return Ok(true);
                }
            }
            let now = Instant::now();
            let (progress, since) = *moved.get_or_insert((self.driver.progress, now));
            let since = if self.driver.progress == progress { since } else { now };
            moved = Some((self.driver.progress, since));
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            let waited = now.duration_since(since);
            if let Some(stall) = self.stall.filter(|stall| waited >= *stall) {
                return Err(SendError::Stalled(stall));
            }
            if waited >= RTT_WORTH
                && let Some(micros) = sys::rtt(self.driver.backend.fd.as_fd())
            {
                self.driver.engine.handle_rtt(Duration::from_micros(micros.into()));
            }
            let left = deadline.map(|deadline| deadline.duration_since(now));
            let left = [left, self.stall.map(|stall| stall - waited)].into_iter().flatten().min();
            again = self.wait(turn, left)?;
        }
    }

    /// Waits for an event of the socket. Returns true if another turn can make progress; completions alone do not make room in a
    /// full socket.
    fn wait(&mut self, turn: Turn, most: Option<Duration>) -> Result<bool, SendError> {
        let most = if turn == Turn::Full { self.back_off(most) } else { most };
        // poll(2) always reports POLLERR and POLLHUP; completions raise POLLERR.
        let (events, most) = match turn {
            Turn::Full => (PollFlags::OUT, most.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT)),
            Turn::Busy => (PollFlags::empty(), BUSY_WAIT),
            Turn::Flushed => (PollFlags::empty(), most.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT)),
        };
        // Completions of the ring do not wake a sender that waits for room.
        let uring = self.driver.backend.uring.as_ref().filter(|_| turn == Turn::Flushed);
        let uring = uring.map(|uring| uring.as_fd());
        let ready = wait(self.driver.backend.fd.as_fd(), uring, events, most).map_err(SendError::Io)?;
        let again =
            turn != Turn::Full || ready.is_empty() || ready.intersects(PollFlags::OUT | PollFlags::HUP);
        // While the socket has room, completions can wait until it is full.
        if !ready.intersects(PollFlags::ERR | PollFlags::HUP) || turn == Turn::Full && writable(ready) {
            return Ok(again);
        }
        let before = self.driver.progress;
        let now = self.clock.read();
        self.driver.read(now)?;
        if self.driver.progress != before || writable(ready) {
            return Ok(again);
        }
        match self.driver.backend.error() {
            Some(error) => Err(SendError::Gone(error)),
            None if ready.contains(PollFlags::HUP) && turn == Turn::Full => {
                Err(SendError::Gone(io::ErrorKind::ConnectionReset.into()))
            }
            // The end was reported, and completions are still on their way. They arrive without another event.
            None => {
                std::thread::sleep(BUSY_WAIT);
                Ok(true)
            }
        }
    }

    /// Sleeps while the socket is full, so that not every completion wakes this thread. Returns the rest of `most`.
    fn back_off(&mut self, most: Option<Duration>) -> Option<Duration> {
        let Some(pause) = self.tx_backoff.pause().filter(|_| self.driver.engine.outstanding() > 0) else {
            return most;
        };
        let pause = most.map_or(pause, |most| most.min(pause));
        let fd = self.driver.backend.fd.as_fd();
        let Some(before) = sys::queued(fd) else { return most };
        std::thread::sleep(pause);
        let now = sys::queued(self.driver.backend.fd.as_fd()).unwrap_or(0);
        self.tx_backoff.handle_slept(before, now);
        most.map(|most| most.saturating_sub(pause))
    }
}

/// Limit on one poll(2), after which the state is checked again.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Polling interval for conditions without an event.
const BUSY_WAIT: Duration = Duration::from_millis(1);
/// Time for which completions are read after a reset.
pub(crate) const AFTER_RESET: Duration = Duration::from_millis(20);
/// Time without progress after which the RTT is queried, to detect a stuck peer.
const RTT_WORTH: Duration = Duration::from_millis(500);

/// Returns true if there is room to send and the connection has not ended; an ended connection also polls as writable.
fn writable(ready: PollFlags) -> bool {
    ready.contains(PollFlags::OUT) && !ready.contains(PollFlags::HUP)
}

/// poll(2) of one socket, and of its ring, whose completions are reported as POLLERR, too.
fn wait(
    fd: BorrowedFd<'_>,
    uring: Option<BorrowedFd<'_>>,
    events: PollFlags,
    most: Duration,
) -> io::Result<PollFlags> {
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
    let second = uring.unwrap_or(fd);
    let mut fds = [PollFd::new(&fd, events), PollFd::new(&second, PollFlags::IN)];
    let count = if uring.is_some() { 2 } else { 1 };
    match poll(&mut fds[..count], Some(&timeout)) {
        Ok(_) if fds[1].revents().is_empty() => Ok(fds[0].revents()),
        Ok(_) => Ok(fds[0].revents() | PollFlags::ERR),
        Err(rustix::io::Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}

impl AsFd for Sender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.backend.fd.as_fd()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The resulting quarantine is dropped, which leaks its frames, as documented.
        let now = self.clock.read();
        self.driver.abandon(now);
    }
}
