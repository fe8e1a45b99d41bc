use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::driver::{Capability, DriverConfig, Options};
use crate::named::NamedPort;
use crate::tun::Device;
use crate::{Error, HandOver, LinkType, Object, Opener, Port, sys};

/// Configuration of a TUN or TAP device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the interface. It is created if it does not exist. The kernel replaces `%d` by a number.
    pub interface: String,
    /// TUN or TAP.
    pub kind: Kind,
    /// Several ports share the flows of the interface (IFF_MULTI_QUEUE). All of them must set this.
    pub multi_queue: bool,
    /// Pass partial checksums and frames to be segmented in both directions (IFF_VNET_HDR).
    pub vnet_hdr: bool,
    /// Keep the interface after its last port is closed (TUNSETPERSIST).
    pub persist: bool,
    /// Bring the interface up.
    pub up: bool,
    /// Path of the device node (default `/dev/net/tun`). Containers may lack it or have it elsewhere.
    pub node: String,
    /// Value of [`Meta::queue`](crate::Meta::queue) for frames of this port.
    pub queue: u16,
}

/// The frame format of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// TUN: IP packets.
    Tun,
    /// TAP: Ethernet frames.
    Tap,
}

impl Config {
    /// A TUN device with one queue and offloads, brought up.
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

    /// A TAP device, otherwise as [`Config::tun`].
    pub fn tap(interface: impl Into<String>) -> Self {
        Self { kind: Kind::Tap, ..Self::tun(interface) }
    }

    /// Flags of TUNSETIFF (linux/if_tun.h).
    pub(super) fn flags(&self) -> i32 {
        let kind = match self.kind {
            Kind::Tun => libc::IFF_TUN,
            Kind::Tap => libc::IFF_TAP,
        };
        let queues = if self.multi_queue { libc::IFF_MULTI_QUEUE } else { 0 };
        let header = if self.vnet_hdr { libc::IFF_VNET_HDR } else { 0 };
        kind | libc::IFF_NO_PI | queues | header
    }

    fn open_node(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.node.as_str(), flags, Mode::empty())?)
    }

    /// Returns true if `name` is the configured interface, or one that its `%d` stands for.
    fn has(&self, name: &str) -> bool {
        let Some((before, after)) = self.interface.split_once("%d") else { return name == self.interface };
        let number = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
        name == self.interface
            || number
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    }

    pub(super) fn link(&self) -> LinkType {
        match self.kind {
            Kind::Tun => LinkType::RAW,
            Kind::Tap => LinkType::ETHERNET,
        }
    }

    /// Converts an error of opening the device node.
    pub(super) fn node_error(&self, source: std::io::Error) -> Error {
        let (name, node) = (self.interface.clone(), &self.node);
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => Error::Unsupported {
                name,
                what: format!("{node} does not exist: run `modprobe tun`, or use a kernel with TUN"),
            },
            Some(libc::EACCES | libc::EPERM) => {
                let what = format!(
                    "no permission to open {node}: run as root, or grant the user access to the device"
                );
                Error::Unsupported { name, what }
            }
            _ => Error::Open { name: node.clone(), source },
        }
    }

    /// Converts an error of TUNSETIFF.
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
                what: "an interface of this name and another kind (tun or tap, number of queues) exists: \
                       choose another name, or the same kind"
                    .into(),
            },
            None => Error::Config { name, what: "an interface's name has at most 15 characters".into() },
            _ => Error::Io { name, source },
        }
    }
}

impl DriverConfig for Config {
    const NAMES: &'static [(&'static str, &'static str)] =
        &[("tun", "a TUN device: IP packets"), ("tap", "a TAP device: Ethernet frames")];
    const CAPABILITIES: &'static [Capability] = &[Capability::NetAdmin];
    const MULTI_QUEUE: bool = true;

    fn from_options(driver: &str, options: &dyn Options) -> Self {
        let kind = if driver == "tap" { Kind::Tap } else { Kind::Tun };
        let vnet_hdr = options.flag("offload").unwrap_or(false);
        Self { kind, vnet_hdr, ..Self::tun(options.interface()) }
    }

    fn open(&self, name: &str, workers: usize, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let devices = match workers {
            1 => vec![Device::open_with(self.clone(), opener)?],
            _ => Device::open_queues_with(self, workers as u16, opener)?,
        };
        Ok(devices.into_iter().map(|device| NamedPort::boxed(name, device)).collect())
    }

    fn adopt(&self, name: &str, ports: Vec<HandOver>, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let adopt = |(queue, port)| {
            Device::adopt(self, queue, port, opener).map(|device| NamedPort::boxed(name, device))
        };
        ports.into_iter().enumerate().map(adopt).collect()
    }

    fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        match object {
            Object::TunNode => self.open_node().map(|_| Vec::new()),
            Object::TunQueue { multi_queue, interface } if self.has(interface) => {
                let config = Self { multi_queue: *multi_queue, ..self.clone() };
                let device = self.open_node()?;
                let name = sys::tun_attach(device.as_fd(), interface, config.flags())?;
                if self.up {
                    let control = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
                    sys::interface_up(control.as_fd(), &name)?;
                }
                Ok(vec![device])
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn name(&self) -> &'static str {
        match self.kind {
            Kind::Tun => "tun",
            Kind::Tap => "tap",
        }
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.interface)
    }

    fn link(&self) -> Option<LinkType> {
        Some(Self::link(self))
    }
}
