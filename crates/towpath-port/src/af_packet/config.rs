use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::{Error, sys};

/// How a packet socket is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Name of the interface.
    pub interface: String,
    /// Bytes of one block of the receive ring: a power of two, at least 128 KiB (the longest frame fits).
    pub block_size: u32,
    /// Blocks of the ring, at least 2.
    pub blocks: u32,
    /// How long a frame waits at most for its block to fill; 1 ms is the least that the kernel's timer takes.
    pub retire: Duration,
    /// Receive every frame on the wire, not only those for this interface's addresses: what a bridge needs.
    pub promiscuous: bool,
    /// Unfinished checksums and frames to be cut leave as they are. (What comes says what it needs in any case: PACKET_VNET_HDR.)
    pub vnet_hdr: bool,
    /// Send past the interface's queueing discipline (PACKET_QDISC_BYPASS).
    pub qdisc_bypass: bool,
    /// Share the interface's frames among several sockets.
    pub fanout: Option<Fanout>,
    /// The number that frames of this socket get as their [`Meta::queue`](crate::Meta::queue).
    pub queue: u16,
    /// Bytes of the send buffer, as far as the system allows.
    pub send_buffer: u32,
}

/// Several sockets in one group, and how frames are shared among them (PACKET_FANOUT). A number is the interface's: on another one,
/// and on one of the same name that was made anew, it means another group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fanout {
    /// By the flow's hash: a flow stays with one socket. Of the two directions of a connection both go to the same.
    Hash(u16),
    /// The same in a group that nobody else has: the kernel chooses it (Linux 4.12), and the others join it by
    /// [`Socket::fanout`](super::Socket::fanout) of the first.
    HashAlone,
    /// By the CPU on which the frame came in.
    Cpu(u16),
    /// By the receive queue of the interface's hardware.
    Queue(u16),
}

impl Config {
    /// A ring of 128 blocks of 256 KiB, everything on the wire, checksums finished.
    pub fn new(interface: impl Into<String>) -> Self {
        Self {
            interface: interface.into(),
            // Few packets use up a block each `retire`, many its bytes: for 128 ms nothing is lost while nobody looks, at 2 Gbit/s
            // and below.
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
            return refuse("block_size is a power of two from 128 KiB to 64 MiB");
        }
        if self.blocks < 2 || u64::from(self.blocks) * u64::from(self.block_size) > 2 << 30 {
            return refuse("a ring has at least 2 blocks, and at most 2 GiB");
        }
        if self.retire < Duration::from_millis(1) || self.retire > Duration::from_secs(1) {
            return refuse("retire is from 1 ms to 1 s");
        }
        Ok(())
    }

    /// Everything that is set before the ring is mapped.
    pub(super) fn apply(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let set = |name, words: &[u32]| sys::set(socket, libc::SOL_PACKET, name, words);
        set(libc::PACKET_VERSION, &[libc::tpacket_versions::TPACKET_V3 as u32])?;
        set(libc::PACKET_IGNORE_OUTGOING, &[1])?;
        // Room in front of the frame for a VLAN tag that is put back.
        set(libc::PACKET_RESERVE, &[4])?;
        // Otherwise nobody would say how a frame is to be cut: where one UDP datagram ends and the next begins is nobody's to guess.
        set(libc::PACKET_VNET_HDR, &[1])?;
        if self.qdisc_bypass {
            set(libc::PACKET_QDISC_BYPASS, &[1])?;
        }
        // Only the administrator of the machine may go beyond net.core.wmem_max.
        sys::set(socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &[self.send_buffer])
            .or_else(|_| sys::set(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &[self.send_buffer]))?;
        // struct tpacket_req3: block size and number, frame size and number (which must agree, and mean nothing in V3), timeout, private area,
        // features.
        let frame_size = 2048;
        let frames = self.block_size / frame_size * self.blocks;
        let retire = self.retire.as_millis() as u32;
        set(libc::PACKET_RX_RING, &[self.block_size, self.blocks, frame_size, frames, retire, 0, 0])
    }

    /// Binds to the interface and joins the group, by its number from then on.
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
                        what: format!("this kernel gives no fan-out group ({source}): use one thread"),
                    })?;
                self.fanout = Some(Fanout::Hash(value[0] as u16 ^ of));
                return Ok(());
            }
            Fanout::Hash(group) => (group, libc::PACKET_FANOUT_HASH),
            Fanout::Cpu(group) => (group, libc::PACKET_FANOUT_CPU),
            Fanout::Queue(group) => (group, libc::PACKET_FANOUT_QM),
        };
        // The kernel's groups are the namespace's, and the group of an interface that is gone lives until its last socket is closed.
        let value = u32::from(group ^ of) | how << 16;
        sys::set(socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &[value]).map_err(|_| Error::InUse {
            name: name(),
            what: format!(
                "fan-out group {group} is used by sockets with another way of sharing: choose another"
            ),
        })
    }
}
