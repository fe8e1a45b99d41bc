//! Long answers leave without being copied into the kernel: `towpath_send` carries them, from the front's own copy.
//!
//! An answer's frame belongs to its worker, and its connection is shared by all workers: so the front copies the frame once, as it
//! does with every answer (DESIGN.md, rule 1 and its exception), gives the frame back, and the kernel sends from the copy. The copy is
//! freed at its completion.
//!
//! A connection that ended with answers in flight lingers here: its socket was shut, not closed, so that completions still come.
//! What is not completed in time is reset and put into quarantine.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, getpeername, shutdown};
use towpath_mux::io::{Carrier, Carriers};
use towpath_mux::mux::{Outcome, Transmit};
use towpath_send::{
    Buffer, Choice, Counters, Done, Limits, LockedMemory, Options, PollSender, Quarantine, SendError, Sent,
    Time,
};

use crate::control::send;

/// Shorter answers are written as ever (spec: 16 KiB for each call).
const LEAST: usize = 16 << 10;
/// Bytes and buffers that one connection may have in flight: a peer that does not read costs no more.
const PINNED: u64 = 8 << 20;
const FRAMES: usize = 1024;
/// How long a connection that ended may take to complete.
const LINGER: Duration = Duration::from_secs(5);
/// How often those that linger, and those that nobody writes to, are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// The senders of a front's connections.
#[derive(Clone, Debug)]
pub(super) struct Senders(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    choice: Choice,
    limits: Limits,
    locked: Arc<LockedMemory>,
    start: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    live: Vec<Arc<Row>>,
    lingering: Vec<(PollSender, Instant)>,
    quarantine: Quarantine<Done>,
    /// What connections that are gone had counted.
    ended: Counters,
    connections: u64,
    looked: Option<Instant>,
}

/// One connection's sender, which its carrier and whoever looks share.
#[derive(Debug)]
struct Row {
    peer: String,
    sender: Mutex<Option<PollSender>>,
}

#[derive(Debug)]
struct Connection {
    senders: Senders,
    row: Arc<Row>,
}

impl Senders {
    pub(super) fn new(choice: Choice) -> Self {
        let limits = Limits::read();
        let locked = Arc::new(LockedMemory::of_rlimit(limits.locked));
        let state = Mutex::default();
        Self(Arc::new(Inner { choice, limits, locked, start: Instant::now(), state }))
    }

    /// Completions of connections that ended, or that nobody writes to. When to look again.
    pub(super) fn look(&self, now: Instant) -> Duration {
        let mut state = lock(&self.0.state);
        let time = self.time();
        while state.quarantine.poll(time).is_some() {}
        if state.live.is_empty() && state.lingering.is_empty() {
            return Duration::MAX;
        }
        if let Some(left) = state.looked.and_then(|looked| (looked + LOOK).checked_duration_since(now)) {
            return left;
        }
        state.looked = Some(now);
        let State { live, lingering, quarantine, ended, .. } = &mut *state;
        for row in live.iter() {
            if let Some(sender) = &mut *lock(&row.sender)
                && sender.outstanding() > 0
            {
                // An error of the connection is found by whoever reads it.
                let _ = sender.handle_error_queue(time);
            }
        }
        for (mut sender, until) in std::mem::take(lingering) {
            let mut gone = sender.handle_error_queue(time).is_err();
            if !gone && now >= until {
                sender.reset();
                let _ = sender.handle_error_queue(time);
                gone = true;
            }
            if sender.outstanding() > 0 && !gone {
                lingering.push((sender, until));
                continue;
            }
            *ended += sender.counters();
            quarantine.append(sender.abandon(time).quarantine);
        }
        LOOK
    }

    /// As `towpath ctl show send` prints it.
    pub(super) fn show(&self, name: &str) -> send::Send {
        let state = lock(&self.0.state);
        let time = self.time();
        let mut totals = state.ended.clone();
        let mut senders = Vec::new();
        for row in &state.live {
            let sender = lock(&row.sender);
            let Some(sender) = &*sender else { continue };
            totals += sender.counters();
            senders.push(send::Sender::of(&row.peer, sender, time));
        }
        for (sender, _) in &state.lingering {
            totals += sender.counters();
        }
        let mut shown = send::Send {
            name: name.to_owned(),
            choice: word(self.0.choice).to_owned(),
            locked_limit: self.0.limits.locked,
            locked_used: self.0.locked.used(),
            optmem: self.0.limits.optmem,
            connections: state.connections,
            lingering: state.lingering.len() as u64,
            quarantined: state.quarantine.len() as u64,
            totals: send::Totals::of(&totals),
            senders,
            ..send::Send::default()
        };
        shown.bound();
        shown
    }

    fn time(&self) -> Time {
        Time::from_nanos(u64::try_from(self.0.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

impl Carriers for Senders {
    fn least(&self) -> usize {
        LEAST
    }

    fn open(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn Carrier>> {
        let fd = socket.try_clone_to_owned().ok()?;
        let peer = getpeername(&fd).ok().flatten().and_then(|peer| std::net::SocketAddr::try_from(peer).ok());
        // A Unix socket has no other way.
        let peer = peer?.to_string();
        let options = Options {
            choice: self.0.choice,
            min_zerocopy: LEAST,
            max_frames: FRAMES,
            max_pinned: PINNED,
            locked: Some(self.0.locked.clone()),
            ..Options::default()
        };
        let sender = match PollSender::new(fd, options, self.time()) {
            Ok(sender) => sender,
            Err(error) => {
                log::warn!("{peer}: {error}");
                return None;
            }
        };
        let row = Arc::new(Row { peer, sender: Mutex::new(Some(sender)) });
        let mut state = lock(&self.0.state);
        state.live.push(row.clone());
        state.connections += 1;
        drop(state);
        Some(Box::new(Connection { senders: self.clone(), row }))
    }
}

impl Carrier for Connection {
    fn write(&mut self, transmit: &mut Transmit) -> Outcome {
        let mut sender = lock(&self.row.sender);
        let Some(sender) = &mut *sender else { return Outcome::Failed(broken()) };
        // What it has and could not hand over is at the front of what is to be sent.
        let mut ahead = sender.unsent();
        let mut pushed = ahead;
        for piece in transmit.pieces() {
            let len = piece.len() as u64;
            if ahead >= len {
                ahead -= len;
                continue;
            }
            if sender.push(0, Buffer::owner(piece)).is_err() {
                break;
            }
            pushed += len;
        }
        let outcome = sender.poll_send(self.senders.time());
        let gone = pushed - sender.unsent();
        transmit.advance(usize::try_from(gone).unwrap_or(usize::MAX));
        match outcome {
            // It holds as many buffers as it may: the rest is copied, so that nothing waits for a completion.
            Ok(Sent::Flushed) if !transmit.is_empty() => plain(sender.as_fd(), transmit),
            Ok(Sent::Flushed) => Outcome::Taken,
            Ok(Sent::Full | Sent::Busy) => Outcome::Blocked,
            Err(error) => Outcome::Failed(number(&error)),
        }
    }

    fn handle_error_queue(&mut self) -> Result<(), i32> {
        let mut sender = lock(&self.row.sender);
        let Some(sender) = &mut *sender else { return Ok(()) };
        sender.handle_error_queue(self.senders.time()).map_err(|error| number(&error))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(sender) = lock(&self.row.sender).take() else { return };
        // The mux closes its descriptor, and ours would keep the connection open.
        let _ = shutdown(&sender, Shutdown::Both);
        let mut state = lock(&self.senders.0.state);
        state.live.retain(|row| !Arc::ptr_eq(row, &self.row));
        if sender.outstanding() > 0 {
            state.lingering.push((sender, Instant::now() + LINGER));
        } else {
            state.ended += sender.counters();
        }
    }
}

/// writev(2), as the mux does it.
fn plain(socket: BorrowedFd<'_>, transmit: &mut Transmit) -> Outcome {
    while !transmit.is_empty() {
        let slices: Vec<_> = transmit.slices().take(64).map(std::io::IoSlice::new).collect();
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

const fn word(choice: Choice) -> &'static str {
    match choice {
        Choice::Adaptive => "adaptive",
        Choice::Zerocopy => "zerocopy",
        Choice::Plain => "plain",
    }
}
