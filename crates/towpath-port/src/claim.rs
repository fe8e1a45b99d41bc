//! One engine per interface: a claim that ends with the process, and names it.
//!
//! A claim is a listening Unix socket with an abstract name (unix(7)). Abstract names belong to the network namespace, as interfaces
//! do, and the kernel removes them with the process. SO_PEERCRED of a connection to it is the process that has the claim.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use crate::{Error, sys};

/// A claim on a port's medium. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Claim {
    socket: Option<UnixListener>,
}

impl Claim {
    /// The claim that another process had.
    pub(crate) fn of(socket: OwnedFd) -> Self {
        let socket = UnixListener::from(socket);
        // From here on it names this process (SO_PEERCRED).
        let _ = rustix::net::listen(&socket, 1);
        Self { socket: Some(socket) }
    }

    /// A copy for another process.
    pub(crate) fn descriptor(&self) -> io::Result<Option<OwnedFd>> {
        self.socket.as_ref().map(|socket| socket.as_fd().try_clone_to_owned()).transpose()
    }

    /// Returns true if a process of this network namespace has the medium.
    pub(crate) fn is_taken(medium: &str) -> bool {
        name(medium).is_ok_and(|name| UnixStream::connect_addr(&name).is_ok())
    }

    /// Claims `medium` (an interface or a queue) for the port `name`.
    ///
    /// # Errors
    /// [`Error::InUse`] with the process that has the medium.
    pub(crate) fn take(name: &str, medium: &str) -> Result<Self, Error> {
        let io = |source| Error::Io { name: name.into(), source };
        let address = self::name(medium).map_err(io)?;
        let source = match UnixListener::bind_addr(&address) {
            Ok(socket) => return Ok(Self { socket: Some(socket) }),
            Err(source) => source,
        };
        if source.kind() != io::ErrorKind::AddrInUse {
            return Err(io(source));
        }
        let what = match UnixStream::connect_addr(&address).and_then(|peer| owner(&peer)) {
            Ok((pid, user)) => {
                let own = rustix::process::geteuid().as_raw();
                // Any process of the namespace can have the name. A user without privilege must not keep the engine from starting.
                if user != 0 && user != own {
                    log::warn!(
                        "{name}: process {pid} of user {user} claims {medium} and is no engine: ignored"
                    );
                    return Ok(Self { socket: None });
                }
                let process = match pid {
                    0 => "an engine in another PID namespace".to_owned(),
                    pid => format!("the engine with process id {pid}"),
                };
                format!("{process} has {medium}: stop it, or use another interface")
            }
            // It has just ended, or it is being started.
            Err(error) => format!("another engine has {medium} ({error}): stop it, or use another interface"),
        };
        Err(Error::InUse { name: name.into(), what })
    }
}

/// The process that listens at the other end (SO_PEERCRED: struct ucred), and its user. The process is 0 in another PID namespace.
fn owner(peer: &UnixStream) -> io::Result<(u32, u32)> {
    let mut words = [0; 3];
    sys::get(peer.as_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, &mut words)?;
    Ok((words[0], words[1]))
}

fn name(medium: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("towpath/port/{medium}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{patiently, within};

    #[towpath_testenv::needs(netns)]
    #[test]
    fn a_medium_has_one_claim() {
        within(|| {
            let first = Claim::take("wan", "`eth0`").unwrap();
            let error = Claim::take("wan", "`eth0`").unwrap_err().to_string();
            let pid = std::process::id();
            assert!(error.contains(&format!("process id {pid} has `eth0`")), "{error}");
            let other = Claim::take("lan", "`eth1`").unwrap();
            drop(first);
            let again = patiently(|| Claim::take("wan", "`eth0`")).unwrap();
            within(|| drop(Claim::take("wan", "`eth0`").unwrap()));
            drop((other, again));
        });
    }
}
