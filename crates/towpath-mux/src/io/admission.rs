//! Who may come in: whether a peer that was accepted is attached, decided by somebody outside (a packet filter's rules).

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{getpeername, getsockname, sockopt};

use super::since;
use crate::Time;

/// A TCP connection that was accepted: with the protocol, its 5-tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Our end.
    pub local: SocketAddr,
    /// The peer's.
    pub remote: SocketAddr,
}

/// What becomes of a connection that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Admit {
    /// It is attached.
    Pass,
    /// It is closed.
    Deny,
    /// It is reset (RST).
    Reset,
}

/// Decides about TCP connections that listeners accepted, see [`super::Server::set_admission`]. Unix sockets are not asked
/// about: the mode of their path decides.
///
/// Both are called without any lock of the server's, on whichever thread has the sockets; messages wait meanwhile.
pub trait Admission: fmt::Debug + Send + Sync {
    /// Whether it may come in, before a byte of it is read. `now` is the server's clock: since it was made.
    fn admit(&self, peer: &Peer, now: Time) -> Admit;

    /// A connection that passed is not the mux's any more: it ended, its handshake failed, or it was handed back. Called
    /// once for each, and before the system can give the same 5-tuple to another.
    fn closed(&self, peer: &Peer, now: Time);
}

/// A connection that passed; says so when it is dropped.
#[derive(Debug)]
pub(super) struct Entry {
    admission: Arc<dyn Admission>,
    peer: Peer,
    start: Instant,
}

impl Entry {
    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.admission.closed(&self.peer, since(self.start));
    }
}

/// Asks. A connection that is to be reset will be, when it is closed.
pub(super) fn admit(
    admission: &Arc<dyn Admission>,
    socket: impl AsFd,
    start: Instant,
) -> Result<Entry, Admit> {
    // A peer that has already gone has no name any more, and needs none.
    let peer = peer(&socket).ok_or(Admit::Deny)?;
    match admission.admit(&peer, since(start)) {
        Admit::Pass => Ok(Entry { admission: Arc::clone(admission), peer, start }),
        Admit::Deny => Err(Admit::Deny),
        Admit::Reset => {
            // Lingering for no time at all is a reset (tcp(7), RFC 9293 3.10.5: ABORT).
            let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
            Err(Admit::Reset)
        }
    }
}

/// The two ends of a TCP socket; `None` of any other, or of one that is not connected.
pub(super) fn peer(socket: impl AsFd) -> Option<Peer> {
    let local = getsockname(&socket).ok()?.try_into().ok()?;
    let remote = getpeername(&socket).ok()??.try_into().ok()?;
    Some(Peer { local, remote })
}
