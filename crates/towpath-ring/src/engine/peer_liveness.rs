//! Liveness and identity of the client's process. The lanes of a channel share it.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::quota::Charge;
use crate::handshake::messages::Notice;
use crate::reaper::{Reaped, Teardown};
use crate::shm::header::Credentials;
use crate::shm::sync::{AtomicU64, Ordering};
use crate::shm::sys::{self, Sent};

/// Why a channel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// The client closed its socket.
    Closed,
    /// The client's process ended while another process kept the socket open.
    Exited,
    /// The client wrote more invalid words than [`Config::violations_max`](crate::Config::violations_max).
    Violations,
    /// The client kept more overdue frames than [`Config::overdue_max`](crate::Config::overdue_max).
    Stuck,
    /// The engine detached the client.
    Detached,
    /// The client gets new memory, from this engine or its successor ([`Channel::hand_over`](crate::Channel::hand_over)).
    HandedOver,
}

impl Death {
    const ALL: [Self; 6] =
        [Self::Closed, Self::Exited, Self::Violations, Self::Stuck, Self::Detached, Self::HandedOver];
}

/// The end of one lane ends all lanes; the threads that own the other lanes take back their frames.
#[derive(Debug)]
pub(crate) struct PeerLiveness {
    pub(crate) peer: Credentials,
    pub(crate) name: String,
    pub(crate) pidfd: Option<OwnedFd>,
    /// The socket of each lane. The client sleeps on the first one, for all lanes.
    sockets: Box<[Reaped<OwnedFd>]>,
    /// 0 while the client lives, then 1 + the index of its [`Death`].
    dead: AtomicU64,
    /// The channel's charge against its user's quota; returned when the teardown of the last lane has finished.
    charge: Option<Charge>,
    teardown: Arc<Teardown>,
}

impl PeerLiveness {
    pub(crate) fn new(
        sockets: Box<[Reaped<OwnedFd>]>,
        peer: Credentials,
        pidfd: Option<OwnedFd>,
        name: String,
        charge: Charge,
        teardown: Arc<Teardown>,
    ) -> Self {
        Self { peer, name, pidfd, sockets, dead: AtomicU64::new(0), charge: Some(charge), teardown }
    }

    /// Why the channel ended, if it has.
    pub(crate) fn death(&self) -> Option<Death> {
        // Relaxed: the word is self-contained; no other data depends on it.
        let dead = self.dead.load(Ordering::Relaxed);
        Death::ALL.get((dead as usize).checked_sub(1)?).copied()
    }

    pub(crate) fn is_over(&self) -> bool {
        // Relaxed: as in death.
        self.dead.load(Ordering::Relaxed) != 0
    }

    /// Ends the channel if it lives, and logs it.
    pub(crate) fn end(&self, how: Death) {
        if self.close(how) {
            let Credentials { pid, uid, .. } = self.peer;
            log::info!(peer = uid; "client {:?} (process {pid}) detached: {how}", self.name);
        }
    }

    /// Ends the channel without a log line; returns true if it lived.
    pub(crate) fn close(&self, how: Death) -> bool {
        if !self.set(how) {
            return false;
        }
        for socket in &self.sockets {
            // The client sees the end of the socket. An error means that it has closed the socket already.
            sys::shut(socket);
        }
        if how == Death::Violations
            && let Some(charge) = &self.charge
        {
            charge.bar();
        }
        true
    }

    fn set(&self, how: Death) -> bool {
        // Relaxed: as in death; the first reason counts.
        self.dead.compare_exchange(0, how as u64 + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Ends the channel and keeps the client's connection. Returns its socket; `None` if the channel has ended, or there is no free
    /// descriptor.
    pub(crate) fn hand_over(&self) -> Option<OwnedFd> {
        let socket = self.sockets[0].try_clone().ok()?;
        self.set(Death::HandedOver).then_some(socket)
    }

    /// Returns true if the client's process has ended.
    pub(crate) fn has_exited(&self) -> bool {
        let ended = |pidfd: &OwnedFd| sys::wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap_or(false);
        self.pidfd.as_ref().is_some_and(ended)
    }

    /// Rings the client's doorbell.
    pub(crate) fn ring(&self) {
        // A full socket has unread doorbells.
        if matches!(sys::send(&self.sockets[0], &Notice::Doorbell.emit(), &[]), Ok(Sent::Gone)) {
            self.end(Death::Closed);
        }
    }

    /// The socket of lane `lane`.
    pub(crate) fn socket(&self, lane: u32) -> &OwnedFd {
        &self.sockets[lane as usize]
    }

    /// Number of lanes.
    pub(crate) fn lanes(&self) -> u32 {
        self.sockets.len() as u32
    }

    /// Descriptors that lane `lane` polls: its socket and the pidfd.
    pub(crate) fn watched(&self, lane: u32) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.socket(lane).as_fd()];
        fds.extend(self.pidfd.as_ref().map(AsFd::as_fd));
        fds
    }
}

impl Drop for PeerLiveness {
    fn drop(&mut self) {
        self.teardown.add_last(self.charge.take());
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "it closed its socket",
            Self::Exited => "its process ended",
            Self::Violations => "it wrote too many invalid words",
            Self::Stuck => "it kept too many overdue frames",
            Self::Detached => "detached by the engine",
            Self::HandedOver => "handed over",
        })
    }
}
