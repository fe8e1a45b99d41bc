use crate::{Error, LinkType};

/// How a TUN or TAP interface is made or opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the interface, which is made if it is not there; with `%d` in it the kernel chooses a number.
    pub interface: String,
    /// What its frames are.
    pub kind: Kind,
    /// Several ports may open the interface, and each gets a share of the flows (IFF_MULTI_QUEUE). Every one of them says so.
    pub multi_queue: bool,
    /// Unfinished checksums and frames to be cut pass as they are, in both directions (IFF_VNET_HDR).
    pub vnet_hdr: bool,
    /// The interface stays when its last port is closed.
    pub persist: bool,
    /// Bring the interface up.
    pub up: bool,
    /// The device node. In a container or a user namespace it may be elsewhere, or not to be had.
    pub node: String,
    /// The number that frames of this port get as their [`Meta::queue`](crate::Meta::queue).
    pub queue: u16,
}

/// What frames a TUN/TAP interface has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// IP packets.
    Tun,
    /// Ethernet frames.
    Tap,
}

impl Config {
    /// A TUN interface: IP packets, one queue, offloads on, brought up.
    pub fn tun(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            kind: Kind::Tun,
            multi_queue: false,
            vnet_hdr: true,
            persist: false,
            up: true,
            node: "/dev/net/tun".into(),
            queue: 0,
        }
    }

    /// A TAP interface: Ethernet frames, otherwise as [`Config::tun`].
    pub fn tap(interface: impl Into<String>) -> Self {
        Self { kind: Kind::Tap, ..Self::tun(interface) }
    }

    /// TUNSETIFF's flags (linux/if_tun.h).
    pub(super) fn flags(&self) -> i32 {
        let kind = match self.kind {
            Kind::Tun => libc::IFF_TUN,
            Kind::Tap => libc::IFF_TAP,
        };
        let queues = if self.multi_queue { libc::IFF_MULTI_QUEUE } else { 0 };
        let header = if self.vnet_hdr { libc::IFF_VNET_HDR } else { 0 };
        kind | libc::IFF_NO_PI | queues | header
    }

    pub(super) fn link(&self) -> LinkType {
        match self.kind {
            Kind::Tun => LinkType::RAW,
            Kind::Tap => LinkType::ETHERNET,
        }
    }

    /// What went wrong when the node was opened.
    pub(super) fn node_error(&self, source: std::io::Error) -> Error {
        let (name, node) = (self.interface.clone(), &self.node);
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::Unsupported {
                name,
                what: format!("there is no {node}: `modprobe tun`, or this kernel has no TUN"),
            },
            Some(libc::EACCES | libc::EPERM) => {
                let what =
                    format!("may not open {node}: run as root, or give the user access to that device");
                Error::Unsupported { name, what }
            }
            _ => Error::Open { name: node.clone(), source },
        }
    }

    /// What went wrong when the descriptor was attached.
    pub(super) fn attach_error(&self, source: std::io::Error) -> Error {
        let name = self.interface.clone();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Error::Privilege { name, capability: "CAP_NET_ADMIN" },
            Some(libc::EBUSY) => Error::InUse {
                name,
                what:
                    "another process has this interface open, and it is not multi-queue: choose another name"
                        .into(),
            },
            Some(libc::EINVAL | libc::EEXIST | libc::E2BIG) => Error::InUse {
                name,
                what:
                    "an interface of this name is there, and of another kind (tun or tap, number of queues): \
                       choose another name, or open it as it was made"
                        .into(),
            },
            None => Error::Config { name, what: "an interface's name has at most 15 characters".into() },
            _ => Error::Io { name, source },
        }
    }
}
