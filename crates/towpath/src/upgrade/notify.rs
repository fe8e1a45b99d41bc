//! sd_notify(3): tells a service manager the state of this process.
//!
//! The protocol is one datagram. A crate for it would be larger than this file, and would set no variable of ours.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `state` (`READY=1`, `MAINPID=4711`, one per line) to the socket in NOTIFY_SOCKET. Does nothing without this variable.
pub fn notify(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else { return };
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not stop this process.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state.as_bytes(), &address)
    });
    if let Err(error) = sent {
        log::warn!(
            "the service manager was not notified ({}): {error}",
            state.lines().next().unwrap_or(state)
        );
    }
}
