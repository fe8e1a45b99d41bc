use std::io;
use std::path::PathBuf;

use crate::{Error, interface::Interface};

/// How XDP sockets are opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the interface.
    pub interface: String,
    /// Where the program runs.
    pub mode: Mode,
    /// Demand that frames are not copied between the driver and the socket; few drivers can, veth cannot.
    pub zero_copy: bool,
    /// Frames of several buffers, for an MTU above 3,822 and for segments that a host on this machine has not cut (XDP_USE_SG, Linux
    /// 6.6; in the general code Linux 6.9).
    pub multi_buffer: bool,
    /// Microseconds that a receive looks into the driver itself before interrupts do (SO_PREFER_BUSY_POLL); `None` leaves it to them.
    pub busy_poll: Option<u32>,
    /// Chunks of 4 KiB for each queue: frames that are received, sent, and lent to bursts. A power of two, at least 256.
    pub chunks: u32,
    /// What becomes of the interface's traffic when this process ends.
    pub after: After,
    /// Look for unfinished checksums and segments that are not cut, which XDP does not tell of: needed where a host sends over veth or virtio
    /// with offloads on.
    pub find_partial: bool,
}

/// Where the XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the general code behind the driver (`xdpgeneric`): any interface. On veth also the faster.
    Skb,
    /// In the driver.
    Native,
}

/// What becomes of the interface's traffic when this process ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum After {
    /// It goes on as if the port had never been (fail open).
    #[default]
    Pass,
    /// It is dropped until the port is opened again or the file is removed (fail closed): the program is pinned at this path of a bpf file
    /// system (`/sys/fs/bpf/...`).
    Drop(PathBuf),
}

impl Config {
    /// Copied, in the general code, one buffer for each frame, 8,192 chunks (32 MiB), fail open.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            mode: Mode::Skb,
            zero_copy: false,
            multi_buffer: false,
            busy_poll: None,
            chunks: 8192,
            after: After::Pass,
            find_partial: true,
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let refuse = |what: &str| Err(Error::Config { name: self.interface.clone(), what: what.into() });
        if !self.chunks.is_power_of_two() || !(256..=1 << 18).contains(&self.chunks) {
            return refuse("chunks is a power of two from 256 to 262,144");
        }
        if self.zero_copy && self.mode == Mode::Skb {
            return refuse("zero_copy needs mode native: the general code always copies");
        }
        Ok(())
    }

    /// Whether the interface's longest frame fits.
    pub(super) fn fits(&self, interface: &Interface) -> Result<(), Error> {
        if self.multi_buffer || interface.max_frame() <= super::SINGLE {
            return Ok(());
        }
        let what = format!(
            "an MTU of {} needs multi_buffer; without it the MTU is at most {}",
            interface.mtu,
            super::SINGLE - 14
        );
        Err(Error::Config { name: self.interface.clone(), what })
    }

    pub(super) fn refused(&self, doing: &str, source: io::Error) -> Error {
        let name = self.interface.clone();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Error::Privilege {
                name,
                capability: "CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF outside of any user namespace",
            },
            Some(libc::EAFNOSUPPORT) => {
                let what = "this kernel has no AF_XDP (CONFIG_XDP_SOCKETS): use af_packet".into();
                Error::Unsupported { name, what }
            }
            Some(libc::EBUSY | libc::EEXIST) => Error::InUse {
                name,
                what: format!(
                    "{doing}: another XDP program or socket is on this interface's queue: see `ip link`, remove it"
                ),
            },
            Some(libc::EOPNOTSUPP | libc::EINVAL | libc::EPROTONOSUPPORT) => Error::Unsupported {
                name,
                what: format!(
                    "{doing}: this interface's driver or this kernel does not do that ({source}): \
                     try mode skb, without zero_copy and multi_buffer, or af_packet"
                ),
            },
            Some(libc::ENODEV) => Error::NoInterface { interface: name },
            _ => Error::Io { name, source: io::Error::new(source.kind(), format!("{doing}: {source}")) },
        }
    }
}
