//! Admission policy: decides about accepted TCP connections, for example by a packet filter's rules.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{getpeername, getsockname, sockopt};

use super::since;
use crate::Time;

/// Addresses of an accepted TCP connection: its 5-tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Local address.
    pub local: SocketAddr,
    /// Address of the peer.
    pub remote: SocketAddr,
}

/// Decision about an accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Admit {
    /// Attach it.
    Pass,
    /// Close it.
    Deny,
    /// Reset it (RST).
    Reset,
}

/// Decides about TCP connections that listeners accepted ([`super::Server::set_admission`]). Unix sockets are
/// controlled by the mode of their path instead.
///
/// Both methods are called without the server's lock, by a thread that handles sockets; messages wait
/// meanwhile.
pub trait Admission: fmt::Debug + Send + Sync {
    /// Decides about a connection before any byte is read. `now`: time since the server was created.
    fn admit(&self, peer: &Peer, now: Time) -> Admit;

    /// A connection that passed has left the mux: it ended, its handshake failed, or it was given back.
    /// Called once per connection, before the kernel can reuse the 5-tuple.
    fn closed(&self, peer: &Peer, now: Time);
}

/// An admitted connection. Reports its end on drop.
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

/// Asks the policy. Closing the socket after [`Admit::Reset`] sends an RST.
pub(super) fn admit(
    admission: &Arc<dyn Admission>,
    socket: impl AsFd,
    start: Instant,
) -> Result<Entry, Admit> {
    // A peer that has gone has no address.
    let peer = peer(&socket).ok_or(Admit::Deny)?;
    match admission.admit(&peer, since(start)) {
        Admit::Pass => Ok(Entry { admission: Arc::clone(admission), peer, start }),
        Admit::Deny => Err(Admit::Deny),
        Admit::Reset => {
            // A linger time of 0 makes close(2) reset the connection (tcp(7), RFC 9293 3.10.5: ABORT).
            let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
            Err(Admit::Reset)
        }
    }
}

/// The addresses of a connected TCP socket; `None` for other sockets.
pub(super) fn peer(socket: impl AsFd) -> Option<Peer> {
    let local = getsockname(&socket).ok()?.try_into().ok()?;
    let remote = getpeername(&socket).ok()??.try_into().ok()?;
    Some(Peer { local, remote })
}
