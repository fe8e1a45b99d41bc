//! Listening sockets that the service manager passes (sd_listen_fds(3)), and those that it keeps for the next process (FDSTORE of
//! sd_notify(3)).
//!
//! A passed socket is used where the configuration names its address. Its name (LISTEN_FDNAMES) shows its origin: the names of sockets
//! that this program stored begin with [`STORED`]. Stored sockets that no address names are removed from the store.
//!
//! The file of a Unix socket that the manager has stays when the engine ends: connections wait until the next process accepts them.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::net::{SocketAddrUnix, getsockname, sockopt};
use towpath_port::credentials;
use towpath_ring::SocketFile;

use super::notify::{notify, notify_with};

/// The beginning of the names of stored sockets.
const STORED: &str = "towpath-";

/// The address of a listening socket in a configuration.
#[derive(Clone, Copy, Debug)]
pub enum Address<'a> {
    /// `HOST:PORT`
    Tcp(&'a str),
    /// The path of a Unix socket.
    Unix(&'a Path),
}

impl fmt::Display for Address<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(text) => f.write_str(text),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl<'a> Address<'a> {
    /// Reads `HOST:PORT` or `unix:PATH`.
    pub fn of(text: &'a str) -> Self {
        text.strip_prefix("unix:").map_or(Self::Tcp(text), |path| Self::Unix(Path::new(path)))
    }

    fn is_that_of(self, socket: &OwnedFd) -> bool {
        let Ok(bound) = getsockname(socket) else { return false };
        match self {
            Self::Tcp(text) => SocketAddr::try_from(bound).is_ok_and(|bound| {
                text.to_socket_addrs().is_ok_and(|mut addresses| addresses.any(|address| address == bound))
            }),
            // Without its file, no client can reach it.
            Self::Unix(path) => {
                SocketFile::is_socket(path)
                    && SocketAddrUnix::try_from(bound).is_ok_and(|bound| {
                        bound.path_bytes().is_some_and(|bytes| bytes == path.as_os_str().as_bytes())
                    })
            }
        }
    }
}

/// A socket that the manager has passed.
#[derive(Debug)]
pub struct Passed {
    name: String,
    /// The listening socket.
    pub socket: OwnedFd,
}

impl Passed {
    /// Closes the socket, and removes it from the manager's store.
    fn remove(self) {
        notify(&format!("FDSTOREREMOVE=1\nFDNAME={}", self.name));
    }

    /// The file of the Unix socket at `path`, which stays when the engine ends. If this program made it, it gets the owner, the group and
    /// the mode of the configuration, which may have changed. Those of a socket unit are set there.
    ///
    /// # Errors
    ///
    /// As [`SocketFile::set_access`].
    pub fn file(
        &self,
        path: &Path,
        owner: Option<u32>,
        group: Option<u32>,
        mode: Option<u32>,
    ) -> io::Result<SocketFile> {
        let identity = std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()));
        let mut file = SocketFile::adopt(path, identity);
        if self.name.starts_with(STORED) && identity.is_some() {
            file.set_access(owner, group, mode)?;
        }
        file.give_up();
        Ok(file)
    }
}

/// The sockets of the service manager.
#[derive(Debug)]
pub struct Sockets {
    passed: Vec<Passed>,
    stores: bool,
}

impl Sockets {
    /// The sockets that were passed to this process: once, before the process opens its first descriptor.
    pub fn of_this_process() -> Self {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let names = names.split(':').map(str::to_owned).chain(std::iter::repeat(String::new()));
        let passed = credentials::passed_descriptors().into_iter().zip(names);
        let passed = passed.map(|(socket, name)| Passed { name, socket });
        let number = std::env::var("FDSTORE").ok().and_then(|text| text.parse::<u32>().ok());
        Self { passed: passed.collect(), stores: number.is_some_and(|number| number > 0) }
    }

    /// Takes the listening stream socket at `address`.
    pub fn take(&mut self, address: Address<'_>) -> Option<Passed> {
        let listens = |socket| sockopt::socket_acceptconn(socket).unwrap_or(false);
        let found =
            self.passed.iter().position(|it| listens(&it.socket) && address.is_that_of(&it.socket))?;
        let passed = self.passed.remove(found);
        tracing::info!("{address}: the listening socket {} of the service manager", passed.name);
        Some(passed)
    }

    /// Has the manager keep `socket`, which this process made, for the next one. `name` is for people. Returns true if the
    /// manager keeps sockets.
    pub fn store(&mut self, name: &str, socket: BorrowedFd<'_>) -> bool {
        if !self.stores {
            return false;
        }
        // FDNAME has no colons and no control characters.
        let name = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(200);
        let name = STORED.chars().chain(name).collect::<String>();
        // Before the new one is stored: a removal is by name.
        for stale in self.passed.extract_if(.., |passed| passed.name == name) {
            stale.remove();
        }
        notify_with(&format!("FDSTORE=1\nFDNAME={name}"), Some(socket));
        true
    }

    /// Stores a Unix socket and gives up its file, if the manager keeps sockets.
    pub fn store_unix(&mut self, name: &str, socket: impl AsFd, file: &mut SocketFile) {
        if self.store(name, socket.as_fd()) {
            file.give_up();
        }
    }

    /// Closes the sockets that no address of the configuration names.
    pub fn finish(self) {
        for passed in self.passed {
            if passed.name.starts_with(STORED) {
                passed.remove();
                continue;
            }
            tracing::warn!(
                "the service manager passed the descriptor {}, which no address of the configuration names: closed",
                passed.name
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_are_found_by_their_addresses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = tcp.local_addr().unwrap();
        let connection = std::net::TcpStream::connect(at).unwrap();
        let own = connection.local_addr().unwrap().to_string();
        let passed = |name: &str, socket| Passed { name: name.to_owned(), socket };
        let mut sockets = Sockets {
            passed: vec![
                passed("connection", connection.into()),
                passed("tcp", tcp.into()),
                passed("unix", UnixListener::bind(&path).unwrap().into()),
            ],
            stores: false,
        };
        assert!(sockets.take(Address::of(&own)).is_none(), "a connection does not listen");
        assert!(sockets.take(Address::of("127.0.0.1:1")).is_none());
        assert!(sockets.take(Address::of("unix:/no/such")).is_none());
        let text = format!("unix:{}", path.display());
        let unix = sockets.take(Address::of(&text)).unwrap();
        assert_eq!(unix.name, "unix");
        assert!(sockets.take(Address::of(&text)).is_none());
        assert_eq!(sockets.take(Address::Tcp(&at.to_string())).unwrap().name, "tcp");
        // The file stays.
        drop(unix.file(&path, None, None, Some(0o600)).unwrap());
        assert!(path.exists());
    }
}
