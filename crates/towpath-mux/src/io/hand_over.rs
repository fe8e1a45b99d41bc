//! Listeners and connections that move to another process.
//!
//! What: the old process passes duplicates of its listeners ([`Server::listeners`]). When the new one accepts
//! ([`Server::listen_on`]), the old one stops ([`Server::stop_listening`]) and calls [`Server::hand_over`] until
//! nothing is left to move. A connection is unattached: it is not read any more, and when its messages are done and
//! its replies are accepted by the kernel, [`Server::poll_ended`] returns its socket, the bytes of its incomplete
//! message, and its state ([`Resume`]). The new process attaches it with these ([`Server::attach_moved`]).
//!
//! A connection stays if it has TLS, whose session cannot be moved, or if a [`super::Connector`] keeps it.
//!
//! Zero-copy sends: their completions arrive in the error queue, which has one reader, and the kernel numbers
//! them for the life of the socket. A connection on which they were used is unattached after the last completion. It sends copies
//! from then on, here and in the new process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;

use super::admission;
use super::link::Link;
use super::listener::Listener;
use super::state::State;
use super::tls::Tls;
use super::{Server, sys};
use crate::Time;
use crate::mux::{self, psock};

/// Connections unattached by one call. While they are given back, their descriptors may exist twice.
const BURST: usize = 128;

/// A listening socket of a server, to be passed to another process.
#[derive(Debug)]
pub struct ListenerSocket {
    /// Its address, as text.
    pub name: String,
    /// A duplicate of its descriptor.
    pub socket: OwnedFd,
}

/// The state of a connection that was given back, for the process that continues it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// Its place in the stream of messages.
    pub core: mux::Resume,
    /// Address of the listener that accepted it; empty for other connections.
    pub listener: String,
    /// A zero-copy sender was used: it is not used again, because the kernel goes on with its numbers.
    pub copies: bool,
}

/// State of the connections of a server that hands over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandOver {
    /// Connections that finish their messages before they are given back.
    pub finishing: usize,
    /// Connections that will be unattached: in the next call, or when their zero-copy sends are completed.
    pub waiting: usize,
    /// Connections that stay, with those whose TLS handshake is in progress.
    pub staying: usize,
}

impl Server {
    /// Duplicates of the listening sockets.
    ///
    /// # Errors
    ///
    /// Fails if the process has no free descriptor.
    pub fn listeners(&self) -> io::Result<Vec<ListenerSocket>> {
        let state = self.shared.lock();
        let of = |listener: &Arc<Listener>| {
            Ok(ListenerSocket { name: listener.name.to_string(), socket: listener.fd.try_clone()? })
        };
        state.listeners.all().map(of).collect()
    }

    /// Listens on a socket that another process has passed. Returns its address as text.
    ///
    /// # Errors
    ///
    /// Fails if it is not a listening stream socket, or if epoll refuses it.
    pub fn listen_on(&self, socket: OwnedFd) -> io::Result<String> {
        self.listen_passed(socket, None)
    }

    /// As [`Server::listen_on`], with TLS if it is a TCP socket.
    ///
    /// # Errors
    ///
    /// As [`Server::listen_on`].
    #[cfg(feature = "tls")]
    pub fn listen_tls_on(&self, socket: OwnedFd, tls: Tls) -> io::Result<String> {
        self.listen_passed(socket, Some(tls))
    }

    fn listen_passed(&self, socket: OwnedFd, tls: Option<Tls>) -> io::Result<String> {
        let listens = sockopt::socket_acceptconn(&socket)?;
        if !listens {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a listening socket"));
        }
        rustix::io::ioctl_fionbio(&socket, true)?;
        let tcp = sockopt::socket_domain(&socket)? != rustix::net::AddressFamily::UNIX;
        if !tcp {
            sys::refuse_descriptors(socket.as_fd());
        }
        let name = super::connection_info::local(&socket);
        let listener = Listener { fd: socket, tcp, tls: tls.filter(|_| tcp), name: name.as_str().into() };
        self.shared.lock().listeners.add(&self.shared.epoll, listener)?;
        Ok(name)
    }

    /// Stops listening. Connections, and TLS handshakes in progress, are not affected.
    pub fn stop_listening(&self) {
        self.shared.lock().listeners.close();
    }

    /// Stops (`true`) or resumes (`false`) accepting connections. Another process may accept them meanwhile.
    pub fn suspend_listening(&self, suspend: bool) {
        self.shared.lock().listeners.suspend(&self.shared.epoll, suspend);
    }

    /// Unattaches connections for another process, some in each call. Connections without unfinished messages are given back at once,
    /// others when they are done, after `patience` at the latest: [`Server::poll_ended`] returns them, and loses none of them. Without
    /// `patience`, only counts.
    pub fn hand_over(&self, patience: Option<Duration>) -> HandOver {
        let now = self.shared.now();
        self.shared.with(|state, _| state.hand_over(patience.map(|patience| now + patience), now))
    }

    /// Attaches a connection that another process has handed over: its socket, the bytes of its incomplete message, and its state,
    /// from [`super::Ended`]. The admission policy decides about a TCP connection that a listener accepted.
    ///
    /// # Errors
    ///
    /// Fails if the policy refuses the connection, if the mux drains, if the bytes exceed its limits, or if epoll refuses the descriptor. The
    /// connection is then closed.
    pub fn attach_moved(&self, socket: OwnedFd, rest: &[u8], resume: Resume) -> io::Result<psock::Id> {
        let Resume { core, listener, copies } = resume;
        rustix::io::ioctl_fionbio(&socket, true)?;
        let listener = Some(listener).filter(|listener| !listener.is_empty());
        let shared = &self.shared;
        let tcp = sockopt::socket_domain(&socket)? != rustix::net::AddressFamily::UNIX;
        // Outside of the mutex, as for an accepted connection.
        let admission = shared.lock().listeners.admission.clone().filter(|_| tcp && listener.is_some());
        let entry = admission.map(|admission| admission::admit(&admission, &socket, shared.start));
        let refused = |_| io::Error::new(io::ErrorKind::PermissionDenied, "it is not admitted any more");
        let entry = entry.transpose().map_err(refused)?;
        let link = Link::new(socket, None, entry).accepted_by(listener.map(Into::into)).copying(copies);
        self.shared.with(|state, work| state.attach_resumed(shared, Arc::new(link), core, rest, work))
    }
}

impl State {
    fn hand_over(&mut self, until: Option<Time>, now: Time) -> HandOver {
        let mut over = HandOver { staying: self.handshakes.len(), ..HandOver::default() };
        let mut ready = Vec::new();
        for (id, socket) in &self.sockets {
            let open = self.mux.status(id).is_some_and(|status| !status.rx_stop);
            match () {
                () if !open => over.finishing += 1,
                () if until.is_none() || socket.is_kept() || !socket.link.is_plain() => over.staying += 1,
                () if ready.len() < BURST && socket.link.release_zerocopy() => ready.push(id),
                () => over.waiting += 1,
            }
        }
        for id in ready {
            self.mux.unattach(id, until, now);
            over.finishing += usize::from(self.mux.status(id).is_some());
        }
        over
    }
}
