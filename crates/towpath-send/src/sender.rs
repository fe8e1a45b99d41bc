//! The blocking sender, and what it shares with tokio's: a socket, examined and armed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};

use crate::buffer::Buffer;
use crate::counters::Counters;
use crate::engine::{Choice, Config, Engine, Kind};
use crate::error::{SendError, Unarmed};
use crate::limits::Limits;
use crate::locked::LockedMemory;
use crate::moderation::Moderation;
use crate::notification::{Event, ExtendedError, parse};
use crate::policy::Mode;
use crate::pump::{Backend, Done, Pump, Remains, Turn};
use crate::sys::{self, Control, Part};
use crate::time::Clock;
use towpath_wire::Time;

/// How a sender works. The defaults are good for TCP messages of any size.
#[derive(Clone, Debug)]
pub struct Options {
    /// Zero copy, plain, or what probes show.
    pub choice: Choice,
    /// Shorter calls are sent plain, bytes.
    pub min_zerocopy: usize,
    /// Adjacent buffers that wait are put into one call until it has this many bytes; 0 does not gather.
    pub gather: usize,
    /// So many calls are made at once (sendmmsg(2)), at most [`MAX_CALLS`](crate::MAX_CALLS): [`Sender::queue`] waits for that
    /// many buffers, or for as many bytes as are gathered. For datagrams, and for a stream whose messages are not to be
    /// gathered.
    pub batch: usize,
    /// The error queue is read when so many calls were made since it was read last, or a millisecond has passed.
    pub read_every: usize,
    /// Most buffers that the sender holds: queued, in flight, and done but not taken.
    pub max_frames: usize,
    /// Most bytes that it pins.
    pub max_pinned: u64,
    /// Whether buffers that are done are kept for [`Sender::reclaim`]; else they are dropped, which gives a pool's frames
    /// back to it.
    pub keep_done: bool,
    /// Compares each buffer's checksum at its completion with that at the send: costs a reading of every byte, twice. See
    /// [`Counters::tampered`].
    pub tamper_check: bool,
    /// UDP: each buffer is cut into datagrams of so many bytes by the kernel or the device (UDP_SEGMENT). Without it UDP is
    /// always copied.
    pub segment: Option<u16>,
    /// How long a peer may take nothing before a blocking call gives up; none waits for ever.
    pub stall: Option<Duration>,
    /// Locked memory, to be shared by all senders of a process; none takes [`Limits::read`]'s for this sender alone.
    pub locked: Option<Arc<LockedMemory>>,
}

impl Default for Options {
    fn default() -> Self {
        let config = Config::default();
        Self {
            choice: config.choice,
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

/// A connected socket as a back end.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    /// Whether completions end with the connection (TCP).
    stream: bool,
    /// Whether it can be asked for what TCP alone knows.
    tcp: bool,
    /// Why it broke, once that is known (errno(3)).
    broken: Option<i32>,
    pub(crate) unarmed: Option<Unarmed>,
    /// What its error queue is read into.
    control: Control,
}

impl Socket {
    /// Examines `fd`, arms it, and makes its engine.
    pub(crate) fn open(
        fd: OwnedFd,
        options: &Options,
        now: Time,
    ) -> Result<(Self, Engine<crate::pump::Item>), SendError> {
        let unknown = |error: rustix::io::Errno| SendError::NotASocket(error.into());
        let family = sockopt::socket_domain(&fd).map_err(unknown)?;
        let stream = match sockopt::socket_type(&fd).map_err(unknown)? {
            SocketType::STREAM => true,
            SocketType::DGRAM | SocketType::SEQPACKET => false,
            _ => return Err(SendError::NotASocket(io::ErrorKind::Unsupported.into())),
        };
        let protocol = sockopt::socket_protocol(&fd).map_err(unknown)?;
        if options.segment == Some(0) {
            // The kernel takes it for "off".
            return Err(SendError::Segmentation(io::ErrorKind::InvalidInput.into()));
        }
        if let Some(bytes) = options.segment {
            sys::segment(fd.as_fd(), bytes).map_err(SendError::Segmentation)?;
        }
        let inet = matches!(family, AddressFamily::INET | AddressFamily::INET6);
        let unarmed = if options.choice == Choice::Plain {
            Some(Unarmed::Choice)
        } else if protocol == Some(rustix::net::ipproto::MPTCP) {
            Some(Unarmed::Mptcp)
        } else if stream && inet && sys::has_ulp(fd.as_fd()) {
            Some(Unarmed::KernelTls)
        } else if sys::arm(fd.as_fd()).is_err() {
            Some(Unarmed::Refused)
        } else {
            None
        };
        if let Some(why) = unarmed.filter(|_| options.choice == Choice::Zerocopy) {
            return Err(SendError::NotSupported { why });
        }
        let limits = Limits::read();
        let locked =
            options.locked.clone().unwrap_or_else(|| Arc::new(LockedMemory::of_rlimit(limits.locked)));
        let config = Config {
            kind: if stream { Kind::Stream } else { Kind::Datagram { segmented: options.segment.is_some() } },
            armed: unarmed.is_none(),
            choice: options.choice,
            local: sys::is_local(fd.as_fd()),
            min_zerocopy: options.min_zerocopy,
            gather: options.gather,
            read_every: options.read_every,
            max_frames: options.max_frames,
            max_pinned: options.max_pinned,
            locked,
            optmem: limits.optmem,
            ..Config::default()
        };
        let tcp = stream && inet && protocol != Some(rustix::net::ipproto::MPTCP);
        Ok((
            Self { fd, stream, tcp, broken: None, unarmed, control: Control::new() },
            Engine::new(config, now),
        ))
    }

    /// Why the connection broke, when it did; it is said once. An error that TCP goes on with (ICMP's, ip(7)) is none.
    pub(crate) fn error(&self) -> Option<io::Error> {
        if self.tcp && !sys::is_over(self.fd.as_fd()) {
            return None;
        }
        match sockopt::socket_error(&self.fd) {
            Ok(Err(error)) | Err(error) => Some(error.into()),
            Ok(Ok(())) => None,
        }
    }

    /// Why a stream broke, when it did, again and again: what the peer had not acknowledged then is completed all the same. Whoever shares the
    /// socket may have taken its error; TCP tells still that it is over, and how many bytes are left, among which the end, when it was
    /// `announced`, has a place.
    pub(crate) fn lost(&mut self, announced: bool) -> Option<io::Error> {
        if self.stream && self.broken.is_none() {
            let left = || sys::queued(self.fd.as_fd()).is_some_and(|bytes| bytes > u64::from(announced));
            let error = self.error().map(|error| error.raw_os_error().unwrap_or(libc::EPIPE));
            let over = || self.tcp && sys::is_over(self.fd.as_fd());
            self.broken = error.or_else(|| (over() && left()).then_some(libc::EPIPE));
        }
        self.broken.map(io::Error::from_raw_os_error)
    }

    pub(crate) fn shutdown(&self) -> io::Result<()> {
        // A datagram socket has no end to announce.
        if !self.stream {
            return Ok(());
        }
        match rustix::net::shutdown(&self.fd, Shutdown::Write) {
            // The peer was faster.
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Resets the connection, which empties its queue: what is then completed is still told.
    pub(crate) fn reset(&self) {
        if self.stream {
            // Either fails only when there is no connection any more.
            let _ = sockopt::set_socket_linger(&self.fd, Some(Duration::ZERO));
            let _ = rustix::net::connect_unspec(&self.fd);
        }
    }
}

impl Backend for Socket {
    fn transmit(&mut self, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize> {
        sys::send(self.fd.as_fd(), parts, zerocopy)
    }

    fn transmit_all(&mut self, parts: &[Part<'_>], calls: &mut [usize], zerocopy: bool) -> io::Result<usize> {
        sys::send_all(self.fd.as_fd(), parts, calls, zerocopy)
    }

    fn event(&mut self) -> io::Result<Option<Event>> {
        // An entry without an extended error (a timestamp alone) tells nothing that we know of: the next one.
        while let Some(control) = sys::recv_error(self.fd.as_fd(), &mut self.control)? {
            if let Some(event) = parse(control) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }
}

/// Sends buffers over a connected TCP or UDP socket, without copying them where that works.
///
/// A buffer is given away and comes back (to its pool, or through [`reclaim`](Self::reclaim)) when the kernel is done with it;
/// to write into it before then does not compile:
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
/// A sender that is dropped with buffers in flight leaks their memory: [`close`](Self::close) it.
#[derive(Debug)]
pub struct Sender {
    pump: Pump<Socket>,
    clock: Clock,
    max_frames: usize,
    gather: u64,
    batch: usize,
    stall: Option<Duration>,
    moderation: Moderation,
}

/// How a connection ended.
#[derive(Debug)]
pub struct Closed {
    /// Everything was handed over, and every completion came: what TCP sent without a copy was acknowledged by the peer's machine
    /// (which does not say that anybody read it), and what it copied is the kernel's. Otherwise the connection was reset.
    pub finished: bool,
    /// The buffers.
    pub remains: Remains,
    /// What was counted.
    pub counters: Counters,
}

impl Sender {
    /// A sender for a connected socket: `TcpStream`, `UdpSocket`, `OwnedFd`. The socket's own blocking mode does not matter.
    /// Nobody else may send with MSG_ZEROCOPY on it, or have done so before (the kernel's numbers would be other ones), or read
    /// its error queue.
    ///
    /// # Errors
    /// [`SendError::NotASocket`], [`SendError::Segmentation`]; with [`Choice::Zerocopy`], [`SendError::NotSupported`].
    pub fn new(socket: impl Into<OwnedFd>, options: Options) -> Result<Self, SendError> {
        let clock = Clock::new();
        let (socket, engine) = Socket::open(socket.into(), &options, Time::default())?;
        Ok(Self {
            pump: Pump::new(socket, engine, &options),
            clock,
            max_frames: options.max_frames.max(1),
            gather: options.gather as u64,
            batch: options.batch,
            stall: options.stall,
            moderation: Moderation::new(),
        })
    }

    /// Sends a buffer: blocks until the kernel took all of it and of those queued before. It may still be in flight then.
    ///
    /// # Errors
    /// The connection is gone or stalled, or a datagram is too long.
    pub fn send(&mut self, buffer: impl Into<Buffer>) -> Result<(), SendError> {
        self.make_room()?;
        self.pump.push(0, buffer.into());
        self.flush()
    }

    /// Queues a buffer, to be sent together with those after it: blocks only while the quota is used up.
    /// What a full socket does not take goes with the next buffer, or with the flush. `token` comes back
    /// with the buffer in [`reclaim`](Self::reclaim).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[inline]
    pub fn queue(&mut self, token: u64, buffer: impl Into<Buffer>) -> Result<(), SendError> {
        self.make_room()?;
        self.pump.push(token, buffer.into());
        let engine = &self.pump.engine;
        let enough =
            if self.batch > 1 { engine.waiting() >= self.batch } else { engine.unsent() >= self.gather };
        if enough { self.try_turn() } else { Ok(()) }
    }

    /// Blocks until the kernel took everything that is queued.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn flush(&mut self) -> Result<(), SendError> {
        self.drive(|sender| sender.pump.engine.is_flushed(), None).map(|_| ())
    }

    /// The same for at most `patience`. Whether the kernel took everything.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn flush_for(&mut self, patience: Duration) -> Result<bool, SendError> {
        let deadline = Instant::now() + patience;
        self.drive(|sender| sender.pump.engine.is_flushed(), Some(deadline))
    }

    /// A buffer that the kernel is done with, for those who asked to keep them ([`Options::keep_done`]). Never blocks.
    ///
    /// # Errors
    /// The error queue could not be read.
    pub fn reclaim(&mut self) -> Result<Option<Done>, SendError> {
        if let Some(done) = self.pump.poll_done() {
            return Ok(Some(done));
        }
        if self.pump.engine.outstanding() > 0 {
            let now = self.clock.read();
            self.pump.read(now)?;
        }
        Ok(self.pump.poll_done())
    }

    /// Reads the completions that came, so that their buffers are free and their locked memory is there for others: for who sends
    /// nothing for a while. (Each send does so too, when a millisecond has passed.) Never blocks.
    ///
    /// # Errors
    /// The error queue could not be read.
    pub fn read_completions(&mut self) -> Result<(), SendError> {
        let now = self.clock.read();
        self.pump.read(now).map(drop)
    }

    /// Blocks until everything is sent and every completion came. Whether that happened within `patience`.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn drain(&mut self, patience: Duration) -> Result<bool, SendError> {
        let deadline = Instant::now() + patience;
        let idle = self.drive(|sender| sender.is_idle(), Some(deadline))?;
        // What a reset threw away is completed like what was acknowledged.
        match self.pump.backend.lost(false).filter(|_| idle) {
            Some(error) => Err(SendError::Gone(error)),
            None => Ok(idle),
        }
    }

    /// Ends the connection: sends what is queued, announces the end (shutdown), waits for the completions, closes. After
    /// `patience` the connection is reset, and what the kernel may still read goes into quarantine.
    ///
    /// # Errors
    /// None for a peer that is gone or does not read: that is [`Closed::finished`].
    pub fn close(mut self, patience: Duration) -> Result<Closed, SendError> {
        let deadline = Instant::now() + patience;
        let flushed = self.drive(|sender| sender.pump.engine.is_flushed(), Some(deadline)).unwrap_or(false);
        let finished = flushed
            && self.pump.backend.lost(false).is_none()
            && self.pump.backend.shutdown().is_ok()
            && self.drive(|sender| sender.is_idle(), Some(deadline)).unwrap_or(false)
            && self.pump.backend.lost(true).is_none();
        if !finished {
            self.pump.backend.reset();
            let soon = Instant::now() + AFTER_RESET;
            while self.pump.engine.outstanding() > 0 && Instant::now() < soon {
                let now = self.clock.read();
                self.pump.read(now)?;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let now = self.clock.read();
        let remains = self.pump.abandon(now);
        Ok(Closed { finished, remains, counters: self.counters().clone() })
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        self.pump.engine.counters()
    }

    /// How it sends now.
    pub fn mode(&self) -> Mode {
        self.pump.engine.mode()
    }

    /// From now on sends the other way: [`Choice::Zerocopy`] or [`Choice::Plain`]; a sender that adapts finds out anew. Where the socket does
    /// not take the flag, all go plain.
    pub fn set_choice(&mut self, choice: Choice) {
        let now = self.clock.read();
        self.pump.engine.set_choice(choice, now);
    }

    /// Why it sends plain whatever happens, when it does.
    pub fn unarmed(&self) -> Option<Unarmed> {
        self.pump.backend.unarmed
    }

    /// Bytes that may be pinned at once.
    pub fn budget(&self) -> u64 {
        self.pump.engine.budget()
    }

    /// Zero-copy calls whose completions are outstanding.
    pub fn outstanding(&self) -> usize {
        self.pump.engine.outstanding()
    }

    /// An entry of the socket's error queue that is not about zero copy: an ICMP error, a timestamp. The oldest 64 are kept.
    pub fn poll_other(&mut self) -> Option<ExtendedError> {
        self.pump.poll_other()
    }

    #[inline]
    fn make_room(&mut self) -> Result<(), SendError> {
        if self.pump.has_room(self.max_frames) {
            return Ok(());
        }
        self.drive(|sender| sender.pump.has_room(sender.max_frames), None).map(|_| ())
    }

    fn try_turn(&mut self) -> Result<(), SendError> {
        let now = self.clock.glance();
        self.pump.try_turn(now)
    }

    fn is_idle(&self) -> bool {
        self.pump.engine.is_flushed() && self.pump.engine.outstanding() == 0
    }

    /// Works and waits until `until`; whether that came before `deadline`.
    fn drive(&mut self, until: impl Fn(&Self) -> bool, deadline: Option<Instant>) -> Result<bool, SendError> {
        let (mut moved, mut turn, mut again) = (None, Turn::Flushed, true);
        loop {
            if again {
                let now = self.clock.read();
                turn = self.pump.turn(now)?;
            }
            if until(self) {
                return Ok(true);
            }
            if turn == Turn::Flushed {
                let now = self.clock.read();
                self.pump.read(now)?;
                if until(self) {
                    return Ok(true);
                }
            }
            let now = Instant::now();
            let (progress, since) = *moved.get_or_insert((self.pump.progress, now));
            let since = if self.pump.progress == progress { since } else { now };
            moved = Some((self.pump.progress, since));
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            let waited = now.duration_since(since);
            if let Some(stall) = self.stall.filter(|stall| waited >= *stall) {
                return Err(SendError::Stalled(stall));
            }
            if waited >= RTT_WORTH
                && let Some(micros) = sys::rtt(self.pump.backend.fd.as_fd())
            {
                self.pump.engine.handle_rtt(Duration::from_micros(micros.into()));
            }
            let left = deadline.map(|deadline| deadline.duration_since(now));
            let left = [left, self.stall.map(|stall| stall - waited)].into_iter().flatten().min();
            again = self.wait(turn, left)?;
        }
    }

    /// Waits until the socket may have something for us. Whether it is worth another turn: completions alone do not make room
    /// in a socket that is full.
    fn wait(&mut self, turn: Turn, most: Option<Duration>) -> Result<bool, SendError> {
        let most = if turn == Turn::Full { self.moderate(most) } else { most };
        // POLLERR and POLLHUP come without being asked for; completions are POLLERR.
        let (events, most) = match turn {
            Turn::Full => (PollFlags::OUT, most.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT)),
            Turn::Busy => (PollFlags::empty(), BUSY_WAIT),
            Turn::Flushed => (PollFlags::empty(), most.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT)),
        };
        let ready = wait(self.pump.backend.fd.as_fd(), events, most).map_err(SendError::Io)?;
        let again =
            turn != Turn::Full || ready.is_empty() || ready.intersects(PollFlags::OUT | PollFlags::HUP);
        // With room to send in, completions can wait until the socket is full again.
        if !ready.intersects(PollFlags::ERR | PollFlags::HUP) || turn == Turn::Full && writable(ready) {
            return Ok(again);
        }
        let before = self.pump.progress;
        let now = self.clock.read();
        self.pump.read(now)?;
        if self.pump.progress != before || writable(ready) {
            return Ok(again);
        }
        match self.pump.backend.error() {
            Some(error) => Err(SendError::Gone(error)),
            None if ready.contains(PollFlags::HUP) && turn == Turn::Full => {
                Err(SendError::Gone(io::ErrorKind::ConnectionReset.into()))
            }
            // The end was seen, and completions are on their way: they come without another event.
            None => {
                std::thread::sleep(BUSY_WAIT);
                Ok(true)
            }
        }
    }

    /// Leaves a full socket alone for a while, so that not every completion wakes us. What is left of `most`.
    fn moderate(&mut self, most: Option<Duration>) -> Option<Duration> {
        let Some(pause) = self.moderation.pause().filter(|_| self.pump.engine.outstanding() > 0) else {
            return most;
        };
        let pause = most.map_or(pause, |most| most.min(pause));
        let fd = self.pump.backend.fd.as_fd();
        let Some(before) = sys::queued(fd) else { return most };
        std::thread::sleep(pause);
        let now = sys::queued(self.pump.backend.fd.as_fd()).unwrap_or(0);
        self.moderation.handle_slept(before, now);
        most.map(|most| most.saturating_sub(pause))
    }
}

/// A wait is looked at again after this, whatever happens.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// What is waited for where nothing tells the end.
const BUSY_WAIT: Duration = Duration::from_millis(1);
/// How long completions are read after a reset.
pub(crate) const AFTER_RESET: Duration = Duration::from_millis(20);
/// From this long without progress on, the round-trip time is asked for: it tells whether the peer is stuck.
const RTT_WORTH: Duration = Duration::from_millis(500);

/// Room to send in, and no end: a connection that is gone is writable too.
fn writable(ready: PollFlags) -> bool {
    ready.contains(PollFlags::OUT) && !ready.contains(PollFlags::HUP)
}

/// poll(2) of one socket.
fn wait(fd: BorrowedFd<'_>, events: PollFlags, most: Duration) -> io::Result<PollFlags> {
    let timeout = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
    let mut fds = [PollFd::new(&fd, events)];
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) => Ok(fds[0].revents()),
        Err(rustix::io::Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}

impl AsFd for Sender {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pump.backend.fd.as_fd()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The quarantine that this makes is dropped with what is in it: leaked, as its documentation says.
        let now = self.clock.read();
        self.pump.abandon(now);
    }
}
