use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::af_packet::Socket;
use crate::driver::{Capability, DriverConfig, Options};
use crate::named::NamedPort;
use crate::{Error, Object, Opener, Port, sys};

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
    /// Bytes of the send buffer (default 16 MiB), limited by net.core.wmem_max without CAP_NET_ADMIN.
    pub send_buffer: u32,
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

    /// Binds to the interface and joins the fanout group. Replaces `HashAlone` by the number of the new group.
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

impl DriverConfig for Config {
    const NAMES: &'static [(&'static str, &'static str)] =
        &[("af_packet", "a network interface, by a packet socket (packet(7))")];
    const CAPABILITIES: &'static [Capability] = &[Capability::NetRaw];
    const MULTI_QUEUE: bool = true;

    fn from_options(_: &str, options: &dyn Options) -> Self {
        Self { vnet_hdr: options.flag("offload").unwrap_or(false), ..Self::new(options.interface()) }
    }

    /// Both directions of a connection hash to the same index in every group, and so to the same worker. The group belongs to
    /// this port alone: two processes on one interface do not share packets by accident.
    fn open(&self, name: &str, workers: usize, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let mut fanout = (workers > 1).then_some(Fanout::HashAlone);
        let open = |worker| {
            let config = Self { fanout, queue: worker as u16, ..self.clone() };
            let socket = Socket::open_with(config, opener)?;
            fanout = socket.fanout();
            Ok(NamedPort::boxed(name, socket))
        };
        (0..workers).map(open).collect()
    }

    fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        match object {
            Object::PacketSocket => Ok(vec![self.socket()?]),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn interface(&self) -> Option<&str> {
        Some(&self.interface)
    }
}
