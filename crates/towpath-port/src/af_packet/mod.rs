//! Packet sockets (packet(7)): all frames of an interface, in a ring shared with the kernel.
//!
//! Received in TPACKET_V3 blocks, which are lent to the burst: no copy. Sent with sendmmsg(2) straight from where the frames lie, so a
//! bridge between two interfaces sends from the receive ring's blocks. What this machine itself sends on the interface is not
//! received (PACKET_IGNORE_OUTGOING). A VLAN tag that the kernel took off is put back. Needs CAP_NET_RAW in the
//! network namespace's user namespace.
//!
//! The kernel says of each frame what its sender left undone (PACKET_VNET_HDR). With [`Config::vnet_hdr`] unfinished checksums and frames to
//! be cut leave as they are; without it, checksums are finished and frames cut on the way out.
//!
//! A frame waits in its block until the block is full or [`Config::retire`] has passed: that is the latency at low rates.

mod config;
mod frame;
mod ring;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::burst::{Lent, NEAR};
use crate::interface::Interface;
use crate::stage::{Medium, Piece, Stage};
use crate::{Burst, Caps, Error, Frame, Port, Received, Segmentation, State, Stats, stage, sys};

pub use config::{Config, Fanout};
pub(crate) use ring::Lease;
use ring::Ring;

const ETH_P_ALL: u16 = 3;
/// Messages of one sendmmsg(2).
const BATCH: usize = stage::BATCH;

/// A packet socket as a port.
///
/// ```no_run
/// use towpath_port::{Burst, Port, Received, af_packet};
///
/// let mut wan = af_packet::Socket::open(af_packet::Config::new("eth0"))?;
/// let mut lan = af_packet::Socket::open(af_packet::Config::new("eth1"))?;
/// let mut burst = Burst::new(256);
/// while wan.receive(&mut burst)? == Received::Frames {
///     lan.send(&mut burst.iter())?; // from the ring's own blocks
/// }
/// # Ok::<(), towpath_port::Error>(())
/// ```
#[derive(Debug)]
pub struct Socket {
    config: Config,
    socket: OwnedFd,
    interface: Interface,
    ring: Arc<Ring>,
    /// The block that comes next.
    next: usize,
    /// The block that is being received.
    open: Option<Open>,
    stage: Stage,
    stats: Stats,
}

/// What is left of a block.
#[derive(Debug)]
struct Open {
    lease: Lease,
    /// Place of the next frame's header.
    at: usize,
    frames: u32,
}

impl Socket {
    /// Opens a packet socket with its ring on the interface.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::Privilege`], [`Error::Unsupported`] (a kernel without packet sockets, an interface whose frames no port reads),
    /// [`Error::Config`], [`Error::Io`].
    pub fn open(mut config: Config) -> Result<Self, Error> {
        config.check()?;
        let name = config.interface.clone();
        let socket =
            sys::socket(libc::AF_PACKET, libc::SOCK_RAW, 0).map_err(|source| opening(&name, source))?;
        let interface = Interface::find(&socket, &name)?;
        let io = |source| Error::Io { name: name.clone(), source };
        config.apply(socket.as_fd()).map_err(io)?;
        let ring =
            Ring::map(socket.as_fd(), config.block_size as usize, config.blocks as usize).map_err(io)?;
        config.bind(socket.as_fd(), interface.index, ETH_P_ALL)?;
        Ok(Self {
            config,
            socket,
            interface,
            ring,
            next: 0,
            open: None,
            stage: Stage::default(),
            stats: Stats::default(),
        })
    }

    /// Its group, by which others join it.
    #[must_use]
    pub fn fanout(&self) -> Option<Fanout> {
        self.config.fanout
    }

    /// Begins with the next block, if there is one.
    fn next_block(&mut self) -> Option<Open> {
        let lease = self.ring.lease(self.next)?;
        self.next = (self.next + 1) % self.ring.blocks();
        let (frames, at) = frame::block(&lease);
        Some(Open { lease, at, frames })
    }

    fn medium(&self) -> Medium {
        Medium {
            link: self.interface.link,
            max_piece: self.interface.max_frame(),
            checksum: self.config.vnet_hdr,
            segmentation: self.segmentation(),
        }
    }

    fn segmentation(&self) -> Segmentation {
        if self.config.vnet_hdr { Segmentation::ALL } else { Segmentation::default() }
    }
}

impl Port for Socket {
    fn name(&self) -> &str {
        &self.config.interface
    }

    fn caps(&self) -> Caps {
        Caps {
            receive: true,
            send: true,
            timestamps: true,
            link: Some(self.interface.link),
            mtu: Some(self.interface.mtu),
            max_frame: Some(self.interface.max_frame() as u32),
            address: self.interface.address,
            checksum: self.config.vnet_hdr,
            segmentation: self.segmentation(),
            ..Caps::default()
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        let Some(mut open) = self.open.take().or_else(|| self.next_block()) else {
            return Ok(Received::Nothing);
        };
        let context = frame::Context {
            link: self.interface.link,
            interface: self.interface.index,
            queue: self.config.queue,
        };
        let start = open.at;
        while open.frames > 0 && !burst.is_full() && open.at.saturating_sub(start) < NEAR {
            let Some(next) = frame::receive(&mut open.lease, open.at, &context, burst, &mut self.stats)
            else {
                // Not a header that the kernel writes: the rest of the block is lost, and said so.
                self.stats.dropped.rx_invalid += u64::from(open.frames);
                open.frames = 0;
                break;
            };
            open.at = next;
            open.frames -= 1;
        }
        if open.frames == 0 {
            burst.lend(Lent::Block(open.lease));
        } else {
            burst.lend(Lent::Block(open.lease.split_front(open.at)));
            self.open = Some(open);
        }
        Ok(if burst.is_empty() { Received::Nothing } else { Received::Frames })
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let medium = self.medium();
        let Self { config, socket, stage, stats, .. } = self;
        stage.send(&config.interface, &medium, frames, |stage, pieces| {
            transmit(socket.as_fd(), config, stats, stage, pieces)
        })
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn state(&mut self) -> Result<State, Error> {
        // ENETDOWN stays with the socket until it is asked for, and would be the answer to the next sendmmsg(2).
        let _ = sys::pending_error(self.socket.as_fd());
        self.interface.look(&self.socket, &self.config.interface)
    }

    fn reopen(&mut self) -> Result<(), Error> {
        if self.state()? != State::Gone {
            return Ok(());
        }
        let stats = self.stats();
        let fresh = Self::open(self.config.clone())?;
        *self = Self { stats, ..fresh };
        Ok(())
    }

    fn stats(&mut self) -> Stats {
        // struct tpacket_stats_v3: packets, drops, freezes; asking sets them to 0.
        let mut counters = [0; 3];
        if sys::get(self.socket.as_fd(), libc::SOL_PACKET, libc::PACKET_STATISTICS, &mut counters).is_ok() {
            self.stats.dropped.rx_full += u64::from(counters[1]);
        }
        self.stats
    }
}

/// Hands messages to the kernel. What it refuses is counted and passed over.
fn transmit(
    socket: BorrowedFd<'_>,
    config: &Config,
    stats: &mut Stats,
    stage: &Stage,
    pieces: &[Piece<'_>],
) -> Result<(), Error> {
    let mut messages: [[&[u8]; 2]; BATCH] = [[&[]; 2]; BATCH];
    for (message, piece) in messages.iter_mut().zip(pieces) {
        *message = [&piece.vnet, stage.bytes(piece)];
    }
    let mut left = &messages[..pieces.len()];
    while !left.is_empty() {
        let error = match sys::send_many(socket, left) {
            Ok(sent) => {
                left[..sent].iter().for_each(|message| stats.count_sent(message[1].len()));
                left = &left[sent..];
                continue;
            }
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EINTR) => continue,
            Some(libc::EAGAIN | libc::ENOBUFS) => stats.dropped.tx_full += 1,
            // ENETDOWN, ENXIO: the interface is down or gone. EMSGSIZE: its MTU has become smaller. EINVAL: the kernel does not believe
            // the virtio_net_hdr. EIO: the driver does not.
            Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV | libc::EMSGSIZE | libc::EINVAL | libc::EIO) => {
                stats.dropped.tx_refused += 1
            }
            _ => {
                stats.dropped.tx_refused += left.len() as u64;
                return Err(Error::Io { name: config.interface.clone(), source: error });
            }
        }
        left = &left[1..];
    }
    Ok(())
}

fn opening(name: &str, source: std::io::Error) -> Error {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::Privilege { name, capability: "CAP_NET_RAW" },
        Some(libc::EAFNOSUPPORT) => {
            let what = "this kernel has no packet sockets (CONFIG_PACKET)".into();
            Error::Unsupported { name, what }
        }
        _ => Error::Io { name, source },
    }
}
