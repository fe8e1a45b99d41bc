use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use super::program::{Attach, Program};
use crate::af_xdp::Socket;
use crate::driver::{Capability, DriverConfig, Options};
use crate::named::NamedPort;
use crate::offload::{self, Flows};
use crate::{Error, HandOver, Object, Opener, Port, interface::Interface, pins, sys};

/// Configuration of XDP sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the interface.
    pub interface: String,
    /// Where the XDP program runs.
    pub mode: Mode,
    /// Require zero copy between the driver and the socket (default false). Few drivers support it; veth does not.
    pub zero_copy: bool,
    /// Frames of several buffers (XDP_USE_SG, Linux 6.6; generic mode Linux 6.9; default false). Needed for an MTU above 3,826, and for
    /// GSO frames from a host on this machine.
    pub multi_buffer: bool,
    /// Without support for [`multi_buffer`](Self::multi_buffer) in the kernel or the driver, [`DriverConfig::open`] opens the sockets
    /// without it and logs a warning. Otherwise opening fails.
    pub multi_buffer_optional: bool,
    /// Microseconds of busy polling per receive (SO_PREFER_BUSY_POLL); `None` uses interrupts (default).
    pub busy_poll: Option<u32>,
    /// Chunks of 4 KiB per queue, for frames received, sent and lent to bursts: a power of two from 256 to 262,144 (default 8,192).
    pub chunks: u32,
    /// Handling of the interface's traffic after this process ends.
    pub after: After,
    /// Detect partial checksums and GSO frames, which XDP does not report (default true). Needed if a host sends over veth or virtio
    /// with offloads enabled.
    pub find_partial: bool,
    /// The kernel forwards the packets of decided flows ([`offload`](crate::offload); default: it forwards none).
    pub flows: Option<Flows>,
}

/// Where the XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Generic mode, after the driver (`xdpgeneric`): works on any interface, and is faster on veth.
    Skb,
    /// Native mode, in the driver.
    Native,
}

/// Handling of the interface's traffic after this process ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum After {
    /// Traffic continues to the network stack (fail open).
    #[default]
    Pass,
    /// Traffic is dropped until the port is opened again or the file is removed (fail closed). The program is pinned at this path of
    /// a bpf file system (`/sys/fs/bpf/...`).
    Drop(PathBuf),
}

impl Config {
    /// The defaults: generic mode, copying, one buffer per frame, 8,192 chunks (32 MiB), fail open.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            mode: Mode::Skb,
            zero_copy: false,
            multi_buffer: false,
            multi_buffer_optional: false,
            busy_poll: None,
            chunks: 8192,
            after: After::Pass,
            find_partial: true,
            flows: None,
        }
    }

    /// The programs of this port, on the interface that has its name.
    fn attach_parameters(&self, frags: bool) -> io::Result<Attach<'_>> {
        let control = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
        let index = match sys::interface(control.as_fd(), libc::SIOCGIFINDEX, &self.interface)? {
            sys::Answer::Index(index) => index,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let pin = match &self.after {
            After::Pass => None,
            After::Drop(pin) => Some(pin.as_path()),
        };
        Ok(Attach { index, native: self.mode == Mode::Native, frags, pin })
    }

    /// Removes what an earlier engine has left on the interface, unless this port continues it.
    fn remove_leftovers(&self) {
        // Without permission, this process has pinned nothing.
        let _ = pins::remove(&pins::path_of_flows(&self.interface));
        if self.after == After::Pass {
            // The program of an earlier port with `After::Drop`.
            let _ = pins::remove(&pins::path(&self.interface));
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let refuse = |what: &str| Err(Error::Config { name: self.interface.clone(), what: what.into() });
        if !self.chunks.is_power_of_two() || !(256..=1 << 18).contains(&self.chunks) {
            return refuse("chunks must be a power of two from 256 to 262,144");
        }
        if self.zero_copy && self.mode == Mode::Skb {
            return refuse("zero_copy needs mode native; generic mode always copies");
        }
        Ok(())
    }

    /// Checks that the interface's longest frame fits.
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

    pub(crate) fn refused(&self, doing: &str, source: io::Error) -> Error {
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
                    "{doing}: another XDP program or socket uses this interface's queue: run `ip link`, remove it"
                ),
            },
            Some(libc::EOPNOTSUPP | libc::EINVAL | libc::EPROTONOSUPPORT) => Error::Unsupported {
                name,
                what: format!(
                    "{doing}: the interface's driver or this kernel does not support it ({source}): \
                     try mode skb, without zero_copy and multi_buffer, or af_packet"
                ),
            },
            Some(libc::ENODEV) => Error::NoInterface { interface: name },
            Some(sys::REFUSED_BY_VERIFIER) => {
                Error::Unsupported { name, what: format!("{doing}: {}", sys::REFUSED_IN_WORDS) }
            }
            _ => Error::Io { name, source: io::Error::new(source.kind(), format!("{doing}: {source}")) },
        }
    }
}

impl DriverConfig for Config {
    const NAMES: &'static [(&'static str, &'static str)] =
        &[("af_xdp", "a network interface, by XDP sockets in front of the network stack")];
    const CAPABILITIES: &'static [Capability] = &[Capability::NetRaw, Capability::NetAdmin, Capability::Bpf];
    const MULTI_QUEUE: bool = true;

    /// Without it, the verifier puts a barrier after nearly each store of a program, against speculative execution.
    fn capabilities_optional(&self) -> &'static [Capability] {
        &[Capability::PerfMon]
    }

    fn from_options(_: &str, options: &dyn Options) -> Self {
        let interface = options.interface();
        let native = options.word("mode", &["generic", "native"]) == Some(1);
        let multi_buffer = options.flag("multi-buffer");
        let closed = options.word("fail", &["open", "closed"]) == Some(1);
        Self {
            mode: if native { Mode::Native } else { Mode::Skb },
            zero_copy: options.flag("zero-copy").unwrap_or(false),
            multi_buffer: multi_buffer.unwrap_or(true),
            multi_buffer_optional: multi_buffer.is_none(),
            after: match closed {
                true => After::Drop(pins::path(&interface)),
                false => After::Pass,
            },
            ..Self::new(interface)
        }
    }

    fn open(&self, name: &str, workers: usize, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let sockets = match Socket::open_queues_with(self, workers as u32, opener) {
            Err(Error::Unsupported { .. }) if self.multi_buffer && self.multi_buffer_optional => {
                let single = Self { multi_buffer: false, ..self.clone() };
                let sockets = Socket::open_queues_with(&single, workers as u32, opener)?;
                log::warn!(
                    "{name}: this kernel or `{}` does not support multi-buffer XDP; hosts on this machine \
                     must not offload segmentation: run `ethtool -K DEV tso off gso off` there",
                    self.interface
                );
                sockets
            }
            sockets => sockets?,
        };
        Ok(sockets.into_iter().map(|socket| NamedPort::boxed(name, socket)).collect())
    }

    fn adopt(&self, name: &str, ports: Vec<HandOver>, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        // The other process may have found that the kernel does not support it.
        let single = ports.iter().any(|port| port.numbers.last() == Some(&0)) && self.multi_buffer_optional;
        let config = Self { multi_buffer: self.multi_buffer && !single, ..self.clone() };
        let sockets = Socket::adopt_all(&config, ports, opener)?;
        Ok(sockets.into_iter().map(|socket| NamedPort::boxed(name, socket)).collect())
    }

    fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        match object {
            Object::XdpSocket => Ok(vec![sys::socket(libc::AF_XDP, libc::SOCK_RAW, 0)?]),
            Object::XdpProgram { frags } => {
                let attach = self.attach_parameters(*frags)?;
                self.remove_leftovers();
                Program::attach(attach)
            }
            Object::FlowMap { engine } => {
                offload::load(*engine, self.flows.ok_or(io::ErrorKind::InvalidInput)?)
            }
            Object::XdpFlowProgram { engine, frags, attach } => {
                let flows = self.flows.ok_or(io::ErrorKind::InvalidInput)?;
                let parameters = self.attach_parameters(*frags)?;
                if !attach {
                    return Program::load_for_flows((*engine, flows), parameters);
                }
                self.remove_leftovers();
                Program::attach_for_flows((*engine, flows), parameters, &pins::path_of_flows(&self.interface))
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.interface)
    }

    fn set_flows(&mut self, flows: Flows) -> bool {
        self.flows = Some(flows);
        true
    }

    fn clear_flows(&mut self) {
        self.flows = None;
    }

    fn redirects_natively(&self) -> bool {
        self.mode == Mode::Native
    }
}
