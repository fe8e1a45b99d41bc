//! Listening addresses of a mux.

use std::io;
use std::path::Path;

use thiserror::Error;
use towpath_mux::io::{Server, Tls};
use towpath_ring::SocketFile;

/// An address that cannot be listened on.
#[derive(Debug, Error)]
#[error("cannot listen on {address}: {source}{}", hint(address, source))]
pub struct ListenError {
    /// The address.
    pub address: String,
    /// The error.
    pub source: io::Error,
}

/// Listens on HOST:PORT, with TLS if given, or on unix:PATH. Replaces the file of a socket without a
/// listener. Returns the bound address and the socket's file.
///
/// # Errors
/// The error states the reason and a remedy.
pub fn listen(
    server: &Server,
    address: &str,
    tls: Option<&Tls>,
) -> Result<(String, Option<SocketFile>), ListenError> {
    let wrong = |source| ListenError { address: address.to_owned(), source };
    if let Some(path) = address.strip_prefix("unix:") {
        let bound = SocketFile::bind(Path::new(path), || server.listen_unix(path));
        return bound.map(|((), file)| (address.to_owned(), Some(file))).map_err(wrong);
    }
    if address.starts_with(':') {
        // A resolver finds no address for an empty name, and reports this as a failure of its own.
        return Err(wrong(io::Error::new(io::ErrorKind::InvalidInput, "the host is missing")));
    }
    let at = match tls {
        Some(tls) => server.listen_tls(address, tls.clone()),
        None => server.listen(address),
    };
    at.map(|at| (at.to_string(), None)).map_err(wrong)
}

/// Reads certificates and keys again and logs the result; `mux` begins the line. If a file is not usable, those that were read before stay
/// in use.
pub fn reload_tls(tls: &Tls, mux: &str) {
    match tls.reload() {
        Ok(()) => tracing::info!("{mux}new connections get the certificate that was just read"),
        Err(error) => tracing::error!("{mux}the certificates that were read before stay in use: {error}"),
    }
}

/// Returns true if the text is not an address. This includes addresses that bind(2) refuses with EINVAL: a
/// link-local address (`fe80::1`) without its interface.
pub fn is_no_address(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput && error.raw_os_error().is_none()
}

fn hint(address: &str, error: &io::Error) -> &'static str {
    let path = address.strip_prefix("unix:").map(Path::new);
    match error.kind() {
        io::ErrorKind::AddrInUse if path.is_some_and(|path| !SocketFile::is_socket(path)) => {
            "; the path exists and is not a socket: choose another path"
        }
        io::ErrorKind::PermissionDenied if path.is_some() => "; its directory must exist and be writable",
        io::ErrorKind::AddrInUse => "; another program listens there: stop it, or choose another address",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need root or CAP_NET_BIND_SERVICE",
        io::ErrorKind::AddrNotAvailable => "; this machine does not have the address",
        _ if is_no_address(error) && address.starts_with(':') => {
            "; an address is HOST:PORT: write 0.0.0.0 for all IPv4 addresses, [::] for all IPv6 addresses"
        }
        _ if is_no_address(error) => "; an address is HOST:PORT or unix:PATH",
        _ => "",
    }
}
