//! Where a front listens.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use thiserror::Error;
use towpath_mux::io::{Server, Tls};

/// An address that cannot be listened on.
#[derive(Debug, Error)]
#[error("cannot listen on {address}: {source}{}", hint(address, source))]
pub struct ListenError {
    /// The address.
    pub address: String,
    /// What the system said.
    pub source: io::Error,
}

/// Listens on HOST:PORT, with `tls` if there is any, or on unix:PATH; a socket that nobody listens on any more is replaced.
/// The address as it is: a port of 0 was chosen.
///
/// # Errors
/// Why not, and what to do.
pub fn listen(server: &Server, address: &str, tls: Option<&Tls>) -> Result<String, ListenError> {
    let wrong = |source| ListenError { address: address.to_owned(), source };
    if let Some(path) = address.strip_prefix("unix:") {
        if is_stale(Path::new(path)) {
            std::fs::remove_file(path).map_err(wrong)?;
        }
        server.listen_unix(path).map_err(wrong)?;
        return Ok(address.to_owned());
    }
    let at = match tls {
        Some(tls) => server.listen_tls(address, tls.clone()),
        None => server.listen(address),
    };
    at.map(|at| at.to_string()).map_err(wrong)
}

/// The file of a Unix socket that was listened on, which goes with this, unless there is another's by then.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// What it is (stat(2)): its device and its number there.
    file: (u64, u64),
}

impl SocketFile {
    /// That of an address that was listened on; there is none of HOST:PORT.
    pub fn of(address: &str) -> Option<Self> {
        let path = PathBuf::from(address.strip_prefix("unix:")?);
        let file = identity(&path)?;
        Some(Self { path, file })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path) == Some(self.file) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

fn hint(address: &str, error: &io::Error) -> &'static str {
    let path = address.strip_prefix("unix:").map(Path::new);
    match error.kind() {
        io::ErrorKind::AddrInUse if path.is_some_and(|path| !is_socket(path)) => {
            "; something that is no socket is there: choose another path"
        }
        io::ErrorKind::PermissionDenied if path.is_some() => {
            "; its directory must be one that you may write to"
        }
        io::ErrorKind::AddrInUse => "; another program listens there: stop it, or choose another address",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need root or CAP_NET_BIND_SERVICE",
        io::ErrorKind::AddrNotAvailable => "; it is none of this machine's addresses",
        io::ErrorKind::InvalidInput => "; an address is HOST:PORT or unix:PATH",
        _ => "",
    }
}

/// Whether there is a socket that nobody listens on any more.
fn is_stale(path: &Path) -> bool {
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket(path) && UnixStream::connect(path).is_err_and(refused)
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}
