//! What a killed engine leaves: directories of sockets, pinned BPF links, filters on interfaces, and the file of its control socket.
//!
//! An engine removes at its start what has no effect any more (`remove_at_start`). `towpath ctl clean` lists everything, also what
//! has an effect: the program of a port with `fail = "closed"`.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use towpath_port::clsact::Abandoned;
use towpath_port::pins::{self, Pin};
use towpath_ring::SocketFile;

use crate::process::Identity;
use crate::process::socket_directory::abandoned;

/// One thing that an engine has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// A directory for the sockets of inspectors or workers.
    Directory(PathBuf),
    /// The file of a socket at which no process listens.
    Socket(PathBuf),
    /// The pinned link of a program.
    Pin(Pin),
    /// A filter on an interface, before Linux 6.6.
    Filter(Abandoned),
}

impl Leftover {
    /// Its file, or its interface.
    pub fn name(&self) -> std::borrow::Cow<'_, str> {
        match self {
            Self::Directory(path) | Self::Socket(path) => path.to_string_lossy(),
            Self::Pin(pin) => pin.path.to_string_lossy(),
            Self::Filter(filter) => filter.interface.as_str().into(),
        }
    }

    /// Removes it. Returns false if another process has removed it since it was found.
    ///
    /// # Errors
    ///
    /// The error of unlink(2), rmdir(2) or rtnetlink(7).
    pub fn remove(&self) -> io::Result<bool> {
        let removed = match self {
            Self::Directory(path) => std::fs::remove_dir_all(path),
            Self::Socket(path) => std::fs::remove_file(path),
            Self::Pin(pin) => std::fs::remove_file(&pin.path),
            Self::Filter(filter) => filter.remove(),
        };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        }
    }
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.name();
        match self {
            Self::Directory(_) => write!(f, "{path}: sockets of an engine that was killed"),
            Self::Socket(_) => write!(f, "{path}: a socket at which no process listens"),
            Self::Filter(_) => write!(
                f,
                "{path}: the filter `towpath` of an engine that has ended, at the ingress hook of the interface"
            ),
            Self::Pin(Pin { interface: None, .. }) => {
                write!(f, "{path}: the program of an interface that is gone")
            }
            Self::Pin(Pin { interface: Some(index), offload: true, .. }) => {
                write!(
                    f,
                    "{path}: the program of flow offload, which forwards flows that an engine let through, of interface {index}"
                )
            }
            Self::Pin(Pin { interface: Some(index), .. }) => {
                write!(
                    f,
                    "{path}: the program of a closed port, which drops the packets of interface {index}"
                )
            }
        }
    }
}

/// The leftovers that this user can see. `control` is the path of a control socket.
pub fn find(control: Option<&Path>) -> Vec<Leftover> {
    let users = [rustix::process::geteuid().as_raw()];
    let mut found: Vec<_> = abandoned(&users).into_iter().map(Leftover::Directory).collect();
    found.extend(control.filter(|path| is_dead(path)).map(|path| Leftover::Socket(path.into())));
    found.extend(pins::all().into_iter().filter(|pin| !pin.is_in_use()).map(Leftover::Pin));
    found.extend(Abandoned::all().into_iter().map(Leftover::Filter));
    found
}

/// Removes the directories of killed engines of this user and of `identity`, and the programs of interfaces that are gone.
pub(crate) fn remove_at_start(identity: Option<Identity>) {
    let users: Vec<u32> = identity
        .map(|identity| identity.user)
        .into_iter()
        .chain([rustix::process::geteuid().as_raw()])
        .collect();
    let directories = abandoned(&users).into_iter().map(Leftover::Directory);
    let gone = pins::all().into_iter().filter(|pin| pin.interface.is_none()).map(Leftover::Pin);
    for leftover in directories.chain(gone) {
        match leftover.remove() {
            Ok(true) => tracing::info!("{leftover}: removed"),
            Ok(false) => {}
            Err(error) => tracing::warn!("{leftover}: not removed: {error}"),
        }
    }
}

/// Returns true if the path is a socket at which no process listens.
fn is_dead(path: &Path) -> bool {
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    SocketFile::is_socket(path) && std::os::unix::net::UnixStream::connect(path).is_err_and(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_another_process_has_removed_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let [sockets, socket, file] = ["sockets", "socket", "pin"].map(|name| directory.path().join(name));
        std::fs::create_dir(&sockets).unwrap();
        [&socket, &file].into_iter().for_each(|path| std::fs::write(path, "").unwrap());
        let pin = Pin { path: file, interface: None, offload: false };
        for leftover in [Leftover::Directory(sockets), Leftover::Socket(socket), Leftover::Pin(pin)] {
            assert!(leftover.remove().unwrap(), "{leftover}");
            assert!(!leftover.remove().unwrap(), "{leftover}");
        }
        let other = Leftover::Socket(directory.path().into());
        assert!(other.remove().is_err(), "a directory is no file");
    }
}
