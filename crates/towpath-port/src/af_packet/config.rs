use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::af_packet::ingress::{Attach, FILTER};
use crate::af_packet::{Shared, Socket};
use crate::driver::{Capability, DriverConfig, Options};
use crate::host_filter::Filter;
use crate::interface::Interface;
use crate::kernel_path::{KernelPath, addresses_of};
use crate::named::NamedPort;
use crate::offload::Flows;
use crate::{Error, HandOver, LinkType, Object, Opener, Port, offload, pins, sys};

/// Configuration of a packet socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the interface.
    pub interface: String,
    /// Bytes per block of the receive ring: a power of two from 128 KiB to 64 MiB (default 256 KiB).
    pub block_size: u32,
    /// Blocks of the ring: at least 2, and at most 2 GiB together (default 128).
    pub blocks: u32,
    /// Time after which the kernel passes on a block that is not full: 1 ms to 1 s (default 1 ms).
    pub retire: Duration,
    /// Receive all frames, not only those for the interface's addresses. A bridge needs it (default true).
    pub promiscuous: bool,
    /// Send partial checksums and frames to be segmented as they are (default false). Received frames always have offload metadata
    /// (PACKET_VNET_HDR).
    pub vnet_hdr: bool,
    /// Bypass the queueing discipline when sending (PACKET_QDISC_BYPASS, default true).
    pub qdisc_bypass: bool,
    /// Distribute the interface's frames among several sockets.
    pub fanout: Option<Fanout>,
    /// Value of [`Meta::queue`](crate::Meta::queue) for frames of this socket.
    pub queue: u16,
    /// What the kernel's network stack does with the received packets (default [`Kernel::Shares`]).
    pub kernel: Kernel,
    /// The kernel forwards the packets of decided flows ([`offload`](crate::offload); default: it forwards none).
    pub flows: Option<Flows>,
    /// Bytes of the send buffer (default 16 MiB), limited by net.core.wmem_max without CAP_NET_ADMIN.
    pub send_buffer: u32,
}

/// What the kernel's network stack does with the packets that a port receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// It gets them too: it delivers them to the machine's addresses, forwards and bridges them.
    Shares,
    /// As `Shares`: the port's packets are not forwarded, so that no packet has two paths.
    Monitored,
    /// It gets those of a filter. A program at the interface's ingress hook drops the others.
    Excluded {
        /// The packets that it gets.
        host: Filter,
        /// The program stays after this process has ended, until the port is opened again or the file is removed (fail closed).
        closed: bool,
        /// The configuration says so. Otherwise an interface with an address is refused by [`DriverConfig::open`].
        stated: bool,
    },
}

/// A fanout group of sockets and its distribution of frames (PACKET_FANOUT). Group numbers are per interface: the same number on
/// another interface, or on one that was created again, is another group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fanout {
    /// By the hash of the flow. Both directions of a connection go to the same socket.
    Hash(u16),
    /// As `Hash`, in a new group that the kernel chooses (Linux 4.12). Further sockets join it with the value of
    /// [`Socket::fanout`](super::Socket::fanout) of the first.
    HashAlone,
    /// By the CPU that received the frame.
    Cpu(u16),
    /// By the hardware receive queue.
    Queue(u16),
}

impl Fanout {
    /// The group as two numbers.
    pub(super) fn numbers(fanout: Option<Self>) -> [u64; 2] {
        match fanout {
            None | Some(Self::HashAlone) => [0, 0],
            Some(Self::Hash(group)) => [1, group.into()],
            Some(Self::Cpu(group)) => [2, group.into()],
            Some(Self::Queue(group)) => [3, group.into()],
        }
    }

    pub(super) fn of_numbers([kind, group]: [u64; 2]) -> Option<Self> {
        match kind {
            1 => Some(Self::Hash(group as u16)),
            2 => Some(Self::Cpu(group as u16)),
            3 => Some(Self::Queue(group as u16)),
            _ => None,
        }
    }
}

impl Config {
    /// The defaults: 128 blocks of 256 KiB, promiscuous, checksums completed when sending.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            // At low rates each `retire` uses one block, at high rates the bytes fill it: the ring buffers 128 ms at up to
            // 2 Gbit/s.
            block_size: 256 << 10,
            blocks: 128,
            retire: Duration::from_millis(1),
            promiscuous: true,
            vnet_hdr: false,
            qdisc_bypass: true,
            fanout: None,
            queue: 0,
            kernel: Kernel::Shares,
            flows: None,
            send_buffer: 16 << 20,
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        let refuse = |what: &str| Err(Error::Config { name: self.interface.clone(), what: what.into() });
        if !self.block_size.is_power_of_two() || !(128 << 10..=64 << 20).contains(&self.block_size) {
            return refuse("block_size must be a power of two from 128 KiB to 64 MiB");
        }
        if self.blocks < 2 || u64::from(self.blocks) * u64::from(self.block_size) > 2 << 30 {
            return refuse("a ring must have at least 2 blocks and at most 2 GiB");
        }
        if self.retire < Duration::from_millis(1) || self.retire > Duration::from_secs(1) {
            return refuse("retire must be from 1 ms to 1 s");
        }
        Ok(())
    }

    /// Opens a socket. This is the only step that needs a privilege.
    fn socket(&self) -> io::Result<OwnedFd> {
        let socket = sys::socket(libc::AF_PACKET, libc::SOCK_RAW, 0)?;
        let size = [self.send_buffer];
        // SO_SNDBUFFORCE exceeds net.core.wmem_max and needs CAP_NET_ADMIN.
        sys::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &size)
            .or_else(|_| sys::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, &size))?;
        Ok(socket)
    }

    /// Sets the socket options that must precede mapping the ring.
    pub(super) fn apply(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let set = |name, words: &[u32]| sys::set(socket, libc::SOL_PACKET, name, words);
        set(libc::PACKET_VERSION, &[libc::tpacket_versions::TPACKET_V3 as u32])?;
        set(libc::PACKET_IGNORE_OUTGOING, &[1])?;
        // Headroom for reinserting a VLAN tag.
        set(libc::PACKET_RESERVE, &[4])?;
        // Without it the segment size of a GSO frame is unknown; for UDP it cannot be inferred.
        set(libc::PACKET_VNET_HDR, &[1])?;
        if self.qdisc_bypass {
            set(libc::PACKET_QDISC_BYPASS, &[1])?;
        }
        // struct tpacket_req3: block size and number, frame size and number (which must be consistent, and are unused in V3), timeout, private area,
        // features.
        let frame_size = 2048;
        let frames = self.block_size / frame_size * self.blocks;
        let retire = self.retire.as_millis() as u32;
        set(libc::PACKET_RX_RING, &[self.block_size, self.blocks, frame_size, frames, retire, 0, 0])
    }

    /// Binds to the interface and joins the fanout group.
    pub(super) fn bind(&mut self, socket: BorrowedFd<'_>, index: u32, protocol: u16) -> Result<(), Error> {
        let name = || self.interface.clone();
        sys::bind_packet(socket, index, protocol).map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => Error::NoInterface { interface: name() },
            _ => Error::Io { name: name(), source },
        })?;
        if self.promiscuous {
            // struct packet_mreq: index, type and address length, address.
            let kind = u32::from_ne_bytes({
                let [low, high] = (libc::PACKET_MR_PROMISC as u16).to_ne_bytes();
                [low, high, 0, 0]
            });
            sys::set(socket, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &[index, kind, 0, 0])
                .map_err(|source| Error::Io { name: name(), source })?;
        }
        self.join(socket, index)
    }

    /// Joins the fanout group. Replaces `HashAlone` by the number of the new group.
    pub(super) fn join(&mut self, socket: BorrowedFd<'_>, index: u32) -> Result<(), Error> {
        let name = || self.interface.clone();
        let Some(fanout) = self.fanout else { return Ok(()) };
        let of = (index as u16).wrapping_mul(0x9e37);
        let (group, how) = match fanout {
            Fanout::HashAlone => {
                let alone = libc::PACKET_FANOUT_HASH | libc::PACKET_FANOUT_FLAG_UNIQUEID;
                let mut value = [alone << 16];
                sys::set(socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &value)
                    .and_then(|()| sys::get(socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &mut value))
                    .map_err(|source| Error::Unsupported {
                        name: name(),
                        what: format!("this kernel cannot create a fanout group ({source}): use one thread"),
                    })?;
                self.fanout = Some(Fanout::Hash(value[0] as u16 ^ of));
                return Ok(());
            }
            Fanout::Hash(group) => (group, libc::PACKET_FANOUT_HASH),
            Fanout::Cpu(group) => (group, libc::PACKET_FANOUT_CPU),
            Fanout::Queue(group) => (group, libc::PACKET_FANOUT_QM),
        };
        // Groups are per network namespace. The group of a deleted interface exists until its last socket is closed.
        let value = u32::from(group ^ of) | how << 16;
        sys::set(socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &[value]).map_err(|_| Error::InUse {
            name: name(),
            what: format!("fanout group {group} is in use with another distribution: choose another group"),
        })
    }
}

impl Kernel {
    fn from_options(options: &dyn Options) -> Self {
        let exclusive = options.flag("exclusive");
        let list = options.texts("host");
        let closed = options.word("fail", &["open", "closed"]) == Some(1);
        if exclusive == Some(false) {
            if list.is_some() {
                options.invalid(
                    "`host` without an exclusive port",
                    "the kernel gets all packets: remove `host`",
                );
            }
            if closed {
                options.invalid("`fail = \"closed\"` needs an exclusive port", "remove `exclusive = false`");
            }
            return Self::Shares;
        }
        let entries = list.iter().flatten().map(String::as_str);
        let host = Filter::parse(entries).unwrap_or_else(|what| {
            options.invalid(&format!("`host`: {what}"), "");
            Filter::default()
        });
        Self::Excluded { host, closed, stated: exclusive.is_some() || list.is_some() }
    }
}

impl Config {
    /// Why a port that says neither `host` nor `exclusive` cannot be opened: the interface may carry the operator's session.
    fn unstated(&self, path: &KernelPath) -> Option<String> {
        let (on, address) = path.addresses.first()?;
        let on = if *on == self.interface { String::new() } else { format!(" on `{on}`") };
        Some(format!(
            "the kernel has the address {address}{on}, and an af_packet port takes all packets of `{}` from it (also those of \
             ssh). Write one of these lines in the port's table:\n    \
             host = [\"arp\", \"nd\", \"icmp\", \"ssh\"]   # what the kernel still receives\n    \
             exclusive = true    # the kernel receives nothing\n    \
             exclusive = false   # the kernel receives everything too, denied packets included",
            self.interface
        ))
    }

    fn shared_with(&self, path: &KernelPath) -> Option<String> {
        path.is_used().then(|| {
            format!(
                "the kernel processes the packets of `{}` too, denied ones included (exclusive = false): {}",
                self.interface,
                path.words()
            )
        })
    }

    /// The interface of the programs, and the filter of its sockets if there is one, with the interface's addresses.
    fn flow_programs(&self, engine: u32) -> io::Result<Vec<OwnedFd>> {
        let flows = self.flows.ok_or(io::ErrorKind::InvalidInput)?;
        let control = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
        let interface = Interface::find(&control, &self.interface)
            .map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
        let me = addresses_of(interface.index)?;
        let host = match &self.kernel {
            Kernel::Excluded { host, .. } if !host.is_empty() => Some((host, FILTER, &me[..])),
            _ => None,
        };
        let pin = pins::path_of_flows(&self.interface);
        offload::attach(engine, flows, (interface.index, &pin), host)
    }

    /// Loads and attaches the programs of an exclusive port.
    fn ingress(&self) -> io::Result<Vec<OwnedFd>> {
        let Kernel::Excluded { host, closed, .. } = &self.kernel else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let control = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
        let interface = Interface::find(&control, &self.interface)
            .map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
        let header = if interface.link == LinkType::ETHERNET { 14 } else { 0 };
        let me = addresses_of(interface.index)?;
        let pin = pins::path(&self.interface);
        let attach = Attach { index: interface.index, header, host, me: &me, pin: &pin, closed: *closed };
        attach.attach()
    }
}

impl DriverConfig for Config {
    const NAMES: &'static [(&'static str, &'static str)] =
        &[("af_packet", "a network interface, by a packet socket (packet(7))")];
    const CAPABILITIES: &'static [Capability] = &[Capability::NetRaw, Capability::NetAdmin, Capability::Bpf];
    const MULTI_QUEUE: bool = true;

    fn from_options(_: &str, options: &dyn Options) -> Self {
        let vnet_hdr = options.flag("offload").unwrap_or(false);
        Self { vnet_hdr, kernel: Kernel::from_options(options), ..Self::new(options.interface()) }
    }

    fn capabilities(&self) -> &'static [Capability] {
        match self.kernel {
            Kernel::Shares | Kernel::Monitored if self.flows.is_none() => &Self::CAPABILITIES[..1],
            _ => Self::CAPABILITIES,
        }
    }

    /// Without it, the verifier puts a barrier after nearly each store of a program, against speculative execution.
    fn capabilities_optional(&self) -> &'static [Capability] {
        if self.capabilities().contains(&Capability::Bpf) { &[Capability::PerfMon] } else { &[] }
    }

    /// A monitor receives copies: the kernel's network stack works as without it.
    fn set_monitor(&mut self) {
        if matches!(self.kernel, Kernel::Excluded { stated: false, closed: false, .. }) {
            self.kernel = Kernel::Monitored;
        }
    }

    fn set_flows(&mut self, flows: Flows) -> bool {
        self.flows = Some(flows);
        true
    }

    fn clear_flows(&mut self) {
        self.flows = None;
    }

    fn shares_with_kernel(&self) -> bool {
        !matches!(self.kernel, Kernel::Excluded { .. })
    }

    fn kernel_warning(&self) -> Option<String> {
        let path = KernelPath::of(&self.interface).ok()?;
        match &self.kernel {
            Kernel::Shares => self.shared_with(&path),
            Kernel::Excluded { stated: false, .. } => self.unstated(&path).map(|what| {
                // The lines, without their comments.
                let mut lines = what.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
                let first = lines.next().unwrap_or_default().trim_end_matches(':');
                format!("{first}: {}", lines.map(|line| format!("`{line}`")).collect::<Vec<_>>().join(", "))
            }),
            Kernel::Excluded { .. } | Kernel::Monitored => None,
        }
    }

    /// Both directions of a connection hash to the same index in every group, and so to the same worker. The group belongs to
    /// this port alone: two processes on one interface do not share packets by accident.
    fn open(&self, name: &str, workers: usize, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let path =
            KernelPath::of(&self.interface).map_err(|source| Error::Io { name: name.into(), source })?;
        let mut kernel = match &self.kernel {
            Kernel::Excluded { stated: false, .. } if let Some(what) = self.unstated(&path) => {
                return Err(Error::Config { name: name.into(), what });
            }
            kernel => kernel.clone(),
        };
        let shared = Shared::default();
        let mut fanout = (workers > 1).then_some(Fanout::HashAlone);
        let open = |worker| {
            let config = Self { fanout, queue: worker as u16, kernel: kernel.clone(), ..self.clone() };
            let socket = match Socket::open_with(config, opener, &shared) {
                // Without the privilege or the kernel for it, the program is dispensable where the kernel would drop all packets.
                Err(Error::NotExclusive { .. })
                    if matches!(kernel, Kernel::Excluded { stated: false, .. }) && !path.is_used() =>
                {
                    log::info!(
                        "{name}: not exclusive, because this process may not load BPF programs: the kernel has no address here and \
                         does not forward"
                    );
                    kernel = Kernel::Shares;
                    let config =
                        Self { fanout, queue: worker as u16, kernel: Kernel::Shares, ..self.clone() };
                    Socket::open_with(config, opener, &shared)?
                }
                socket => socket?,
            };
            fanout = socket.fanout();
            socket.share_fanout();
            Ok(NamedPort::boxed(name, socket))
        };
        let ports = (0..workers).map(open).collect::<Result<Vec<_>, Error>>()?;
        if matches!(self.kernel, Kernel::Shares)
            && let Some(what) = self.shared_with(&path)
        {
            log::warn!("{name}: {what}");
        }
        Ok(ports)
    }

    fn adopt(&self, name: &str, ports: Vec<HandOver>, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let path =
            KernelPath::of(&self.interface).map_err(|source| Error::Io { name: name.into(), source })?;
        if let Kernel::Excluded { stated: false, .. } = &self.kernel
            && let Some(what) = self.unstated(&path)
        {
            return Err(Error::Config { name: name.into(), what });
        }
        let (mut kernel, shared) = (self.kernel.clone(), Shared::default());
        let adopt = |(worker, port): (usize, HandOver)| {
            let of = |kernel| Self { queue: worker as u16, kernel, ..self.clone() };
            let dispensable = matches!(kernel, Kernel::Excluded { stated: false, .. }) && !path.is_used();
            if dispensable && opener.open(&Object::IngressProgram).is_err() {
                kernel = Kernel::Shares;
            }
            Socket::adopt(of(kernel.clone()), opener, &shared, port)
                .map(|socket| NamedPort::boxed(name, socket))
        };
        ports.into_iter().enumerate().map(adopt).collect()
    }

    fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        match object {
            Object::PacketSocket => {
                // What a killed engine has left would forward frames that this socket receives.
                if self.flows.is_none() {
                    let _ = pins::remove(&pins::path_of_flows(&self.interface));
                }
                Ok(vec![self.socket()?])
            }
            Object::IngressProgram => self.ingress(),
            Object::FlowMap { engine } => {
                offload::load(*engine, self.flows.ok_or(io::ErrorKind::InvalidInput)?)
            }
            Object::FlowProgram { engine } => self.flow_programs(*engine),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.interface)
    }
}
