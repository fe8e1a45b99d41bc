//! The other process: who it is, and whether it lives. The lanes of a channel charge one life.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::engine::quota::Charge;
use crate::handshake::messages::Notice;
use crate::shm::header::Credentials;
use crate::shm::sync::{AtomicU64, Ordering};
use crate::shm::sys::{self, Sent};

/// How a client's end came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It closed its socket.
    Closed,
    /// Its process ended while something else kept its socket open.
    Exited,
    /// It wrote too much that has no meaning.
    Violations,
    /// It sat on more overdue frames than [`Config::overdue_max`](crate::Config::overdue_max).
    Stuck,
    /// The engine detached it.
    Detached,
}

impl Death {
    const ALL: [Self; 5] = [Self::Closed, Self::Exited, Self::Violations, Self::Stuck, Self::Detached];
}

/// The end of one lane is the end of all: what is left of the others is taken back by the threads that have them.
#[derive(Debug)]
pub(crate) struct PeerLiveness {
    pub(crate) peer: Credentials,
    pub(crate) name: String,
    pub(crate) pidfd: Option<OwnedFd>,
    /// Each lane's. The client sleeps on the first one, for all lanes.
    sockets: Box<[OwnedFd]>,
    /// 0 while it lives, then 1 + the index of its [`Death`].
    dead: AtomicU64,
    /// What the channel counts against its user's quota; given back when the last lane is dropped.
    _charge: Charge,
}

impl PeerLiveness {
    pub(crate) fn new(
        sockets: Box<[OwnedFd]>,
        peer: Credentials,
        pidfd: Option<OwnedFd>,
        name: String,
        charge: Charge,
    ) -> Self {
        Self { peer, name, pidfd, sockets, dead: AtomicU64::new(0), _charge: charge }
    }

    /// How its end came, if it has.
    pub(crate) fn death(&self) -> Option<Death> {
        // Relaxed: the word says everything; nothing is read because of it.
        let dead = self.dead.load(Ordering::Relaxed);
        Death::ALL.get((dead as usize).checked_sub(1)?).copied()
    }

    pub(crate) fn is_over(&self) -> bool {
        // Relaxed: as in death.
        self.dead.load(Ordering::Relaxed) != 0
    }

    /// Ends it, if it is not over.
    pub(crate) fn end(&self, how: Death) {
        if self.close(how) {
            log::info!("client {:?} (process {}) detached: {how}", self.name, self.peer.pid);
        }
    }

    /// The same without a word; whether it was not over.
    pub(crate) fn close(&self, how: Death) -> bool {
        // Relaxed: as in death; the first one counts.
        if self.dead.compare_exchange(0, how as u64 + 1, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return false;
        }
        for socket in &self.sockets {
            // The client, if it lives, sees the end of the socket; that it may be gone already is no error.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
        true
    }

    /// Whether its process has ended.
    pub(crate) fn has_exited(&self) -> bool {
        let ended = |pidfd: &OwnedFd| sys::wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap_or(false);
        self.pidfd.as_ref().is_some_and(ended)
    }

    /// Rings the client's doorbell.
    pub(crate) fn ring(&self) {
        // Full: there are doorbells enough that it has not read.
        if matches!(sys::send(&self.sockets[0], &Notice::Doorbell.emit(), &[]), Ok(Sent::Gone)) {
            self.end(Death::Closed);
        }
    }

    /// The socket of lane `lane`.
    pub(crate) fn socket(&self, lane: u32) -> &OwnedFd {
        &self.sockets[lane as usize]
    }

    /// How many lanes there are.
    pub(crate) fn lanes(&self) -> u32 {
        self.sockets.len() as u32
    }

    /// What lane `lane` waits for: its socket, and the end of the process.
    pub(crate) fn watched(&self, lane: u32) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.socket(lane).as_fd()];
        fds.extend(self.pidfd.as_ref().map(AsFd::as_fd));
        fds
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "it closed its socket",
            Self::Exited => "its process ended",
            Self::Violations => "it wrote too much that has no meaning",
            Self::Stuck => "it sat on too many overdue frames",
            Self::Detached => "detached by the engine",
        })
    }
}
