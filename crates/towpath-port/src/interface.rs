//! A network interface as the kernel describes it (netdevice(7)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use crate::sys::{self, Answer};
use crate::{Caps, Error, LinkType, State};

/// linux/if_arp.h.
const ARPHRD_ETHER: u16 = 1;
const ARPHRD_LOOPBACK: u16 = 772;
const ARPHRD_NONE: u16 = 0xfffe;

/// Returns true if there is an interface of this name in the calling thread's network namespace.
#[cfg(test)]
pub(crate) fn exists(name: &str) -> bool {
    let socket = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).expect("a socket");
    sys::interface(socket.as_fd(), libc::SIOCGIFINDEX, name).is_ok()
}

/// Properties of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) index: u32,
    pub(crate) mtu: u32,
    pub(crate) link: LinkType,
    pub(crate) address: Option<[u8; 6]>,
    pub(crate) state: State,
}

impl Interface {
    /// Queries the interface `name` in the network namespace of `socket`.
    ///
    /// # Errors
    /// [`Error::NoInterface`]; [`Error::Unsupported`] for hardware types other than Ethernet and plain IP.
    pub(crate) fn find(socket: impl AsFd, name: &str) -> Result<Self, Error> {
        let socket = socket.as_fd();
        Self::ask(socket, name).map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => Error::NoInterface { interface: name.into() },
            None if source.kind() == io::ErrorKind::InvalidInput => {
                Error::NoInterface { interface: name.into() }
            }
            None => Error::Unsupported { name: name.into(), what: source.to_string() },
            Some(_) => Error::Io { name: name.into(), source },
        })
    }

    /// Queries the interface again. An interface that was deleted and created again under the same name counts as gone.
    ///
    /// # Errors
    /// As [`find`](Self::find), except that a missing interface is [`State::Gone`].
    pub(crate) fn look(&mut self, socket: impl AsFd, name: &str) -> Result<State, Error> {
        match Self::find(socket, name) {
            Ok(found) if found.index == self.index => {
                *self = found;
                Ok(found.state)
            }
            Ok(_) | Err(Error::NoInterface { .. }) => Ok(State::Gone),
            Err(error) => Err(error),
        }
    }

    fn ask(socket: BorrowedFd<'_>, name: &str) -> io::Result<Self> {
        let ask = |request| sys::interface(socket, request, name);
        let (Answer::Index(index), Answer::Mtu(mtu), Answer::Flags(flags), Answer::Hardware(kind, address)) = (
            ask(libc::SIOCGIFINDEX)?,
            ask(libc::SIOCGIFMTU)?,
            ask(libc::SIOCGIFFLAGS)?,
            ask(libc::SIOCGIFHWADDR)?,
        ) else {
            unreachable!("each request has one kind of answer")
        };
        let link = match kind {
            ARPHRD_ETHER | ARPHRD_LOOPBACK => LinkType::ETHERNET,
            ARPHRD_NONE => LinkType::RAW,
            kind => {
                return Err(io::Error::other(format!(
                    "hardware type {kind} (linux/if_arp.h) is not supported; use an Ethernet or plain IP interface"
                )));
            }
        };
        let ready = libc::IFF_UP | libc::IFF_RUNNING;
        let state = if flags & ready == ready { State::Up } else { State::Down };
        let address = (kind == ARPHRD_ETHER).then_some(address);
        Ok(Self { index, mtu, link, address, state })
    }

    /// The capabilities of a port on the interface. Drivers add their own.
    pub(crate) fn caps(&self) -> Caps {
        Caps {
            receive: true,
            send: true,
            link: Some(self.link),
            mtu: Some(self.mtu),
            max_frame: Some(self.max_frame() as u32),
            address: self.address,
            ..Caps::default()
        }
    }

    /// Length of the longest frame: the MTU plus the link header.
    pub(crate) fn max_frame(&self) -> usize {
        let header = if self.link == LinkType::ETHERNET { 14 } else { 0 };
        self.mtu as usize + header
    }
}
