//! Zero-copy transmission of long replies, by `towpath_send`.
//!
//! On a connection that several workers share, the reply's frame is copied once and released, and the kernel
//! sends from the copy: a worker must not be able to change the bytes of other workers' replies. The copy is
//! freed at its completion. On a connection of one worker (there is only one, or the order is sticky) the
//! kernel sends from the worker's frame (`tx_lease.rs`), which is released at its completion.
//!
//! A connection that ended with replies in flight lingers: its socket is shut down, not closed, so that
//! completions still arrive. A peer that reads, however slowly, gets everything. A peer that acknowledges
//! nothing for [`LINGER`] is reset, as is the oldest connection when too many linger or they pin too much
//! memory. Buffers without a completion go to quarantine.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, getpeername, shutdown};
use towpath_mux::io::{ZerocopySender, ZerocopySenders};
use towpath_mux::mux::{Body, Outcome, Transmit};
use towpath_send::{
    Buffer, CopyMode, Done, Limits, LockedMemory, Options, PollSender, Quarantine, SendError, Sent, Time,
};

use super::tx_lease::Rest;
use crate::control::commands::show_send::{self, Totals};

/// Minimum size of a zero-copy reply (spec: 16 KiB per call).
pub(super) const LEAST: usize = 16 << 10;
/// Maximum number of bytes and buffers in flight per connection. Bounds the cost of a peer that does not
/// read.
const PINNED: u64 = 8 << 20;
const FRAMES: usize = 1024;
/// Time without acknowledgement after which a lingering connection is reset, as for open ones
/// ([`towpath_mux::mux::Config::send_time`]).
const LINGER: Duration = Duration::from_secs(60);
/// Maximum number of lingering connections, and of bytes that they pin.
const LINGERING: (usize, u64) = (1024, 256 << 20);
/// Interval of checks of lingering and inactive connections.
const LOOK: Duration = Duration::from_millis(100);

/// Zero-copy senders of a pool's connections.
#[derive(Clone, Debug)]
pub(super) struct ZerocopyTx(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    choice: CopyMode,
    check: bool,
    limits: Limits,
    locked: Arc<LockedMemory>,
    start: Instant,
    /// Bytes sent from workers' frames. Relaxed: a statistic without ordering.
    lent: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    live: Vec<Arc<FrameMessages>>,
    /// Oldest first.
    lingering: VecDeque<Lingering>,
    /// Number of lingering connections that were reset because their peers acknowledged nothing.
    stalled: u64,
    /// Number of lingering connections that were reset because too many lingered or pinned too much memory.
    crowded: u64,
    quarantine: Quarantine<Done>,
    /// Sums over the connections that have ended.
    ended: Totals,
    connections: u64,
    looked: Option<Instant>,
}

/// The sender of a connection, shared with [`ZerocopyTx`].
#[derive(Debug)]
struct FrameMessages {
    peer: String,
    sender: Mutex<Option<PollSender>>,
}

/// A connection that ended with replies in flight.
#[derive(Debug)]
struct Lingering {
    peer: String,
    sender: PollSender,
    /// State of the peer's acknowledgements and of the outstanding ranges at the last change, and its time.
    progress: (Option<u64>, usize),
    since: Instant,
}

/// State of a lingering connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linger {
    /// The peer acknowledges data.
    On,
    /// Everything is completed, or the connection is gone.
    Over,
    /// The peer has acknowledged nothing for too long.
    Stalled,
}

impl Lingering {
    fn new(peer: String, sender: PollSender, now: Instant) -> Self {
        let progress = (sender.acked(), sender.outstanding());
        Self { peer, sender, progress, since: now }
    }

    fn look(&mut self, time: Time, now: Instant) -> Linger {
        if self.sender.handle_error_queue(time).is_err() || self.sender.outstanding() == 0 {
            return Linger::Over;
        }
        let progress = (self.sender.acked(), self.sender.outstanding());
        if progress != self.progress {
            (self.progress, self.since) = (progress, now);
        }
        if now.saturating_duration_since(self.since) >= LINGER { Linger::Stalled } else { Linger::On }
    }
}

impl State {
    /// The connection has ended: adds its counters to the sums, and moves memory that the kernel may read to
    /// quarantine.
    fn bury(&mut self, sender: PollSender, time: Time) {
        self.ended.add(&sender);
        self.ended.counters.abandoned += sender.outstanding() as u64;
        self.quarantine.append(sender.abandon(time).quarantine);
    }

    /// Resets a lingering connection. The reset completes everything in the socket's queue.
    fn reset(&mut self, mut sender: PollSender, time: Time) {
        sender.reset();
        // Fails because the connection is gone.
        let _ = sender.handle_error_queue(time);
        self.bury(sender, time);
    }

    /// Adds a lingering connection. Resets the oldest while there are more than `most` or they pin too many
    /// bytes.
    fn linger(&mut self, lingering: Lingering, (most, most_pinned): (usize, u64), time: Time) {
        self.lingering.push_back(lingering);
        let mut pinned: u64 = self.lingering.iter().map(|lingering| lingering.sender.pinned()).sum();
        let before = self.crowded;
        while self.lingering.len() > most || pinned > most_pinned && self.lingering.len() > 1 {
            let Some(oldest) = self.lingering.pop_front() else { break };
            pinned -= oldest.sender.pinned();
            self.crowded += 1;
            self.reset(oldest.sender, time);
        }
        if self.crowded > before {
            tracing::debug!(
                "{} lingering connections were reset: there were too many",
                self.crowded - before
            );
        }
    }
}

#[derive(Debug)]
struct Connection {
    zerocopy_tx: ZerocopyTx,
    messages: Arc<FrameMessages>,
    /// True if further replies are copied: those that are not in the sender yet.
    copies: bool,
}

impl ZerocopyTx {
    pub(super) fn new(choice: CopyMode, check: bool) -> Self {
        let limits = Limits::read();
        let locked = Arc::new(LockedMemory::of_rlimit(limits.locked));
        let state = Mutex::default();
        let lent = AtomicU64::new(0);
        Self(Arc::new(Inner { choice, check, limits, locked, start: Instant::now(), lent, state }))
    }

    /// Reads completions of lingering and inactive connections. Returns the time of the next check.
    pub(super) fn look(&self, now: Instant) -> Duration {
        let mut state = lock(&self.0.state);
        let none = state.live.is_empty() && state.lingering.is_empty();
        let time = self.time();
        while state.quarantine.poll(time).is_some() {}
        if none {
            return state.quarantine.poll_timeout().map_or(Duration::MAX, |end| end.since(time));
        }
        if let Some(looked) = state.looked.filter(|looked| now < *looked + LOOK) {
            return looked + LOOK - now;
        }
        state.looked = Some(now);
        for messages in &state.live {
            if let Some(sender) = &mut *lock(&messages.sender)
                && sender.outstanding() > 0
            {
                // The reader of the connection handles the error.
                let _ = sender.read_completions(time);
            }
        }
        let mut stalled: Option<(String, u64)> = None;
        for mut lingering in std::mem::take(&mut state.lingering) {
            match lingering.look(time, now) {
                Linger::On => state.lingering.push_back(lingering),
                Linger::Over => state.bury(lingering.sender, time),
                Linger::Stalled => {
                    state.stalled += 1;
                    state.reset(lingering.sender, time);
                    let (_, more) = stalled.take().unwrap_or_default();
                    stalled = Some((lingering.peer, more + 1));
                }
            }
        }
        if let Some((peer, count)) = stalled {
            let others = if count > 1 { format!(" and {} more were", count - 1) } else { " was".to_owned() };
            tracing::warn!(
                "{peer}{others} reset: nothing of the last answers was acknowledged for {} s",
                LINGER.as_secs()
            );
        }
        LOOK
    }

    /// Snapshot for `towpath ctl show send`.
    pub(super) fn show(&self, name: &str) -> show_send::Send {
        let state = lock(&self.0.state);
        let time = self.time();
        let mut totals = state.ended.clone();
        let mut zerocopy_tx = Vec::new();
        for messages in &state.live {
            let sender = lock(&messages.sender);
            let Some(sender) = &*sender else { continue };
            totals.add(sender);
            zerocopy_tx.push(show_send::Sender::of(&messages.peer, sender, time));
        }
        for lingering in &state.lingering {
            totals.add(&lingering.sender);
        }
        let mut shown = show_send::Send {
            name: name.to_owned(),
            choice: word(self.0.choice),
            locked_limit: self.0.limits.locked,
            locked_used: self.0.locked.used(),
            optmem: self.0.limits.optmem,
            connections: state.connections,
            lingering: state.lingering.len() as u64,
            stalled: state.stalled,
            crowded: state.crowded,
            quarantined: state.quarantine.len() as u64,
            lent_bytes: self.0.lent.load(Relaxed),
            totals,
            senders: zerocopy_tx,
            ..show_send::Send::default()
        };
        shown.bound();
        shown
    }

    fn time(&self) -> Time {
        Time::from_nanos(u64::try_from(self.0.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

impl ZerocopySenders for ZerocopyTx {
    fn min_bytes(&self) -> usize {
        LEAST
    }

    fn open(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn ZerocopySender>> {
        let fd = socket.try_clone_to_owned().ok()?;
        let peer = getpeername(&fd).ok().flatten().and_then(|peer| std::net::SocketAddr::try_from(peer).ok());
        // Unix sockets do not support it.
        let address = peer?;
        let peer = address.to_string();
        let options = Options {
            choice: self.0.choice,
            tamper_check: self.0.check,
            min_zerocopy: LEAST,
            max_frames: FRAMES,
            max_pinned: PINNED,
            locked: Some(self.0.locked.clone()),
            ..Options::default()
        };
        let sender = match PollSender::new(fd, options, self.time()) {
            Ok(sender) => sender,
            Err(error) => {
                tracing::warn!(peer = %address.ip(), "{peer}: {error}");
                return None;
            }
        };
        let messages = Arc::new(FrameMessages { peer, sender: Mutex::new(Some(sender)) });
        let mut state = lock(&self.0.state);
        state.live.push(messages.clone());
        state.connections += 1;
        drop(state);
        Some(Box::new(Connection { zerocopy_tx: self.clone(), messages, copies: false }))
    }
}

impl ZerocopySender for Connection {
    fn write(&mut self, transmit: &mut Transmit) -> Outcome {
        let mut sender = lock(&self.messages.sender);
        let Some(sender) = &mut *sender else { return Outcome::Failed(broken()) };
        // The message that was not accepted is at the front of the queue.
        let mut ahead = sender.unsent();
        if ahead == 0 && (self.copies || !transmit.has_long(LEAST)) {
            // No long message: no buffers are made.
            return plain(sender.as_fd(), transmit);
        }
        let mut pushed = ahead;
        for (body, left) in transmit.pieces() {
            let len = (body.len() - left) as u64;
            if ahead >= len {
                ahead -= len;
                continue;
            }
            if sender.push(0, buffer(body, left)).is_err() {
                break;
            }
            pushed += len;
            if let Body::Leased(_) = body {
                self.zerocopy_tx.0.lent.fetch_add(len, Relaxed);
            }
        }
        let outcome = sender.poll_send(self.zerocopy_tx.time());
        let gone = pushed - sender.unsent();
        transmit.advance(usize::try_from(gone).unwrap_or(usize::MAX));
        match outcome {
            // The maximum number of buffers is in flight: the rest is copied, so that it does not wait for
            // completions.
            Ok(Sent::Flushed) if !transmit.is_empty() => plain(sender.as_fd(), transmit),
            Ok(Sent::Flushed) => Outcome::Taken,
            Ok(Sent::Full | Sent::Busy) => Outcome::Blocked,
            Err(error) => Outcome::Failed(number(&error)),
        }
    }

    fn release(&mut self) -> bool {
        self.copies = true;
        let mut slot = lock(&self.messages.sender);
        let Some(sender) = &mut *slot else { return false };
        let time = self.zerocopy_tx.time();
        // The reader of the connection handles the error.
        let broken = sender.read_completions(time).is_err();
        if broken || sender.outstanding() > 0 || sender.unsent() > 0 {
            return false;
        }
        let sender = slot.take();
        drop(slot);
        let mut state = lock(&self.zerocopy_tx.0.state);
        state.live.retain(|messages| !Arc::ptr_eq(messages, &self.messages));
        sender.into_iter().for_each(|sender| state.bury(sender, time));
        true
    }

    fn handle_error_queue(&mut self) -> Result<bool, i32> {
        let mut sender = lock(&self.messages.sender);
        let Some(sender) = &mut *sender else { return Ok(true) };
        sender.handle_error_queue(self.zerocopy_tx.time()).map_err(|error| number(&error))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(sender) = lock(&self.messages.sender).take() else { return };
        // The mux closes its descriptor. The duplicate would keep the connection open.
        let _ = shutdown(&sender, Shutdown::Both);
        let time = self.zerocopy_tx.time();
        let mut state = lock(&self.zerocopy_tx.0.state);
        state.live.retain(|messages| !Arc::ptr_eq(messages, &self.messages));
        if sender.outstanding() > 0 {
            let lingering = Lingering::new(self.messages.peer.clone(), sender, Instant::now());
            state.linger(lingering, LINGERING, time);
        } else {
            state.bury(sender, time);
        }
    }
}

/// The bytes after the first `left`, which have left.
fn buffer(body: &Body, left: usize) -> Buffer {
    let lent = match body {
        // Short replies share a block of memory, which would wait for all of them. They are sent as copies.
        Body::Bytes(bytes) if bytes.len() - left < LEAST => return bytes[left..].to_vec().into(),
        Body::Bytes(bytes) => return Buffer::owner(bytes.slice(left..)),
        Body::Leased(lent) => lent,
    };
    let any: Arc<dyn Any + Send + Sync> = lent.clone();
    // Other leases do not occur here; a copy is correct for all.
    let rest = any.downcast().ok().and_then(|tx_lease| Buffer::lent(Rest::of(tx_lease, left)));
    rest.unwrap_or_else(|| Buffer::owner(lent.copy().slice(left..)))
}

/// writev(2), as in the mux.
fn plain(socket: BorrowedFd<'_>, transmit: &mut Transmit) -> Outcome {
    while !transmit.is_empty() {
        let slices: Vec<_> = transmit.slices(64).map(std::io::IoSlice::new).collect();
        match rustix::io::writev(socket, &slices) {
            Ok(bytes) => {
                drop(slices);
                transmit.advance(bytes);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return Outcome::Blocked,
            Err(errno) => return Outcome::Failed(errno.raw_os_error()),
        }
    }
    Outcome::Taken
}

fn number(error: &SendError) -> i32 {
    let source = match error {
        SendError::Gone(source) | SendError::Queue(source) | SendError::Io(source) => source.raw_os_error(),
        _ => None,
    };
    source.unwrap_or_else(broken)
}

fn broken() -> i32 {
    rustix::io::Errno::PIPE.raw_os_error()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const fn word(choice: CopyMode) -> &'static str {
    match choice {
        CopyMode::Adaptive => "adaptive",
        CopyMode::Zerocopy => "zerocopy",
        CopyMode::Plain => "plain",
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// A sender with replies in flight whose peer's buffer is full, and the peer.
    fn full(zerocopy_tx: &ZerocopyTx) -> (PollSender, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        let options = Options { choice: CopyMode::Zerocopy, max_pinned: PINNED, ..Options::default() };
        let mut sender = PollSender::new(socket, options, zerocopy_tx.time()).unwrap();
        while sender.poll_send(zerocopy_tx.time()).unwrap() == Sent::Flushed {
            sender.push(0, vec![7; 1 << 20]).unwrap();
        }
        sender.handle_error_queue(zerocopy_tx.time()).unwrap();
        assert!(sender.outstanding() > 0 && sender.pinned() > 0);
        (sender, peer)
    }

    fn linger(zerocopy_tx: &ZerocopyTx, sender: PollSender, most: (usize, u64), now: Instant) {
        let lingering = Lingering::new("peer".to_owned(), sender, now);
        lock(&zerocopy_tx.0.state).linger(lingering, most, zerocopy_tx.time());
    }

    fn sums(zerocopy_tx: &ZerocopyTx) -> show_send::Send {
        let shown = zerocopy_tx.show("");
        let totals = &shown.totals.counters;
        assert!(shown.lingering > 0 || totals.numbers == totals.completed + totals.abandoned, "{shown:?}");
        shown
    }

    #[test]
    fn a_lingering_peer_that_reads_is_not_reset() {
        let zerocopy_tx = ZerocopyTx::new(CopyMode::Zerocopy, false);
        let (sender, mut peer) = full(&zerocopy_tx);
        let start = Instant::now();
        linger(&zerocopy_tx, sender, LINGERING, start);
        let short = Duration::from_millis(1);
        assert_eq!(zerocopy_tx.look(start + LINGER - short), LOOK);
        assert_eq!(sums(&zerocopy_tx).lingering, 1);
        // Read enough to reopen the window.
        let acked = lock(&zerocopy_tx.0.state).lingering[0].progress.0;
        let mut rest = vec![0; 1 << 20];
        while lock(&zerocopy_tx.0.state).lingering[0].sender.acked() == acked {
            peer.read_exact(&mut rest).unwrap();
        }
        let later = start + 2 * LINGER;
        zerocopy_tx.look(later);
        zerocopy_tx.look(later + LINGER - short);
        let shown = sums(&zerocopy_tx);
        assert_eq!((shown.lingering, shown.stalled), (1, 0), "the deadline was extended");
        // Data in flight at the last check has arrived since, which extends the deadline once more.
        let mut now = later + LINGER;
        while sums(&zerocopy_tx).lingering == 1 {
            now += LINGER;
            zerocopy_tx.look(now);
        }
        let shown = sums(&zerocopy_tx);
        assert_eq!((shown.stalled, shown.crowded), (1, 0));
        assert!(peer.read_to_end(&mut Vec::new()).is_err(), "the connection is reset");
    }

    #[test]
    fn the_oldest_lingering_connections_are_reset_first() {
        for most in [(2, u64::MAX), (LINGERING.0, 1)] {
            let zerocopy_tx = ZerocopyTx::new(CopyMode::Zerocopy, false);
            let mut peers: Vec<_> = (0..3)
                .map(|_| {
                    let (sender, peer) = full(&zerocopy_tx);
                    linger(&zerocopy_tx, sender, most, Instant::now());
                    peer
                })
                .collect();
            let shown = sums(&zerocopy_tx);
            let left = if most.0 == 2 { 2 } else { 1 };
            assert_eq!((shown.lingering, shown.crowded, shown.stalled), (left, 3 - left, 0));
            assert!(peers[0].read_to_end(&mut Vec::new()).is_err(), "the first connection is reset");
        }
    }
}
