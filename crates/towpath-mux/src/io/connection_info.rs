//! Addresses and TLS names of a connection, and the life of connections as a driver sees it.

use std::os::fd::AsFd;

use rustix::net::{SocketAddrAny, SocketAddrUnix};

use crate::mux::{Cause, psock};

/// Addresses and TLS names of a connection. An address is `IP:PORT`, `[IP]:PORT` or `unix:PATH`; empty if unknown or unnamed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ConnectionInfo {
    /// Address of the peer.
    pub peer: String,
    /// Own address.
    pub local: String,
    /// Address of the listener that accepted the connection; empty for other connections.
    pub listener: String,
    /// The connection has TLS.
    pub tls: bool,
    /// Server name that the client asked for (SNI); empty without.
    pub server_name: String,
    /// Protocol that the two sides agreed on (ALPN); empty without.
    pub protocol: Vec<u8>,
    /// Names in the verified certificate of the client: the DNS names and URIs of its subject alternative name, or its common name if
    /// it has none of them. At most 32 names and 1,023 bytes; names beyond are left out.
    pub client_names: Vec<String>,
    /// The client asked for TLS in plaintext, with STARTTLS or SSLRequest. An SMTP client was greeted then; a worker does not greet it.
    pub starttls: bool,
}

/// A change of a connection, for a [`super::Driver`].
#[derive(Debug)]
pub enum Lifecycle {
    /// It was attached, or it was open when [`super::Driver::report_connections`] was called.
    Opened(psock::Id, Box<ConnectionInfo>),
    /// It ended.
    Ended(psock::Id, Cause),
    /// It ended, and workers have done all of its messages.
    Removed(psock::Id),
}

/// The own address of a socket, as text.
pub(super) fn local(fd: impl AsFd) -> String {
    rustix::net::getsockname(fd).map_or_else(|_| String::new(), text)
}

/// The peer's address of a socket, as text.
pub(super) fn peer(fd: impl AsFd) -> String {
    rustix::net::getpeername(fd).ok().flatten().map_or_else(String::new, text)
}

fn text(address: SocketAddrAny) -> String {
    if let Ok(address) = std::net::SocketAddr::try_from(address.clone()) {
        return address.to_string();
    }
    let unix = SocketAddrUnix::try_from(address).ok();
    let path = unix.as_ref().and_then(SocketAddrUnix::path);
    path.map_or_else(String::new, |path| format!("unix:{}", path.to_string_lossy()))
}
