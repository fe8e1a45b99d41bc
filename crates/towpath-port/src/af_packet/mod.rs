//! Packet sockets (packet(7)): all frames of an interface, in a ring shared with the kernel.
//!
//! The port lends received TPACKET_V3 blocks to the burst without a copy. It sends with sendmmsg(2) from where the frames are; a
//! bridge between two interfaces sends from the blocks of the receive ring. Frames that this host sends on the interface are not
//! received (PACKET_IGNORE_OUTGOING). VLAN tags that the kernel removed are reinserted. Needs CAP_NET_RAW in the user namespace
//! of the network namespace.
//!
//! Received frames have offload metadata (PACKET_VNET_HDR). With [`Config::vnet_hdr`], partial checksums and frames to be
//! segmented are sent as they are; without it, the port completes checksums and segments in software.
//!
//! The kernel passes on a block when it is full or after [`Config::retire`], which is the latency at low rates.

mod config;
mod frame;
mod ingress;
mod ring;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::burst::{Lent, NEAR};
use crate::hand_over::{HandOver, changed};
use crate::interface::Interface;
use crate::kernel_path::addresses_of;
use crate::stats::Refused;
use crate::tx_offload::{Medium, Piece, TxOffload};
use crate::{
    Burst, Caps, Error, Frame, Object, Opener, Port, Received, Segmentation, State, Stats, TxDrop, offload,
    sys, tx_offload,
};

pub use config::{Config, Fanout, Kernel};
use ingress::Ingress;
pub(crate) use ring::Lease;
use ring::Ring;

const ETH_P_ALL: u16 = 3;
/// Messages per sendmmsg(2).
const BATCH: usize = tx_offload::BATCH;

/// A packet socket as a port.
///
/// ```no_run
/// use towpath_port::{Burst, Port, Received, af_packet};
///
/// let mut wan = af_packet::Socket::open(af_packet::Config::new("eth0"))?;
/// let mut lan = af_packet::Socket::open(af_packet::Config::new("eth1"))?;
/// let mut burst = Burst::new(256);
/// while wan.receive(&mut burst)? == Received::Frames {
///     lan.send(&mut burst.iter())?; // from the blocks of the ring
/// }
/// # Ok::<(), towpath_port::Error>(())
/// ```
#[derive(Debug)]
pub struct Socket {
    config: Config,
    opener: Opener,
    socket: OwnedFd,
    interface: Interface,
    ring: Arc<Ring>,
    /// Index of the next block.
    next: usize,
    /// The block being received.
    open: Option<Open>,
    shared: Shared,
    /// The generation of the programs whose filter the socket has.
    generation: u64,
    tx_offload: TxOffload,
    stats: Stats,
    refused: Refused,
}

/// What the sockets of a port share. The first socket to find an interface that was made again sets it.
type Shared = Arc<Mutex<Sharing>>;

/// See [`Shared`].
#[derive(Debug, Default)]
struct Sharing {
    /// The programs of an exclusive port.
    programs: Option<Programs>,
    /// The programs of flow offload, with the generation of the port's own programs at the time of the attachment.
    flows: Option<(offload::Attached, u64)>,
    /// The fanout group of a port with several sockets. The kernel keeps a group with its interface: on another one of the same index,
    /// the sockets need another group, and cannot leave the old one together.
    fanout: Option<Fanout>,
}

/// Attached programs.
#[derive(Debug)]
pub(crate) struct Programs {
    /// The interface's addresses at the time of the attachment.
    me: Vec<IpAddr>,
    generation: u64,
    ingress: Ingress,
}

/// The unread part of a block.
#[derive(Debug)]
struct Open {
    lease: Lease,
    /// Offset of the next frame's header.
    at: usize,
    frames: u32,
}

impl Socket {
    /// Opens a packet socket on the interface and maps its ring.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::Privilege`], [`Error::Unsupported`] (a kernel without packet sockets, an interface of an unsupported hardware type),
    /// [`Error::Config`], [`Error::Io`].
    pub fn open(config: Config) -> Result<Self, Error> {
        let opener = Opener::local(&config);
        Self::open_with(config, &opener, &Shared::default())
    }

    fn open_with(mut config: Config, opener: &Opener, shared: &Shared) -> Result<Self, Error> {
        config.check()?;
        let name = config.interface.clone();
        let [socket] = opener.open_all(&Object::PacketSocket).map_err(|source| opening(&name, source))?;
        let interface = Interface::find(&socket, &name)?;
        let io = |source| Error::Io { name: name.clone(), source };
        config.apply(socket.as_fd()).map_err(io)?;
        let ring =
            Ring::map(socket.as_fd(), config.block_size as usize, config.blocks as usize).map_err(io)?;
        // Before the first packet: none goes to both.
        let generation = match config.kernel {
            Kernel::Shares | Kernel::Monitored => 0,
            Kernel::Excluded { .. } => {
                exclude(&config, opener, shared, (Some(socket.as_fd()), interface.index), 0)?
            }
        };
        offload_flows(&config, opener, shared, (Some(socket.as_fd()), interface.index), generation)?;
        let mut sharing = shared.lock().unwrap_or_else(PoisonError::into_inner);
        config.fanout = sharing.fanout.or(config.fanout);
        match config.bind(socket.as_fd(), interface.index, ETH_P_ALL) {
            Err(Error::InUse { .. }) if sharing.fanout.is_some() => {
                config.fanout = Some(Fanout::HashAlone);
                config.join(socket.as_fd(), interface.index)?;
                sharing.fanout = config.fanout;
            }
            bound => bound?,
        }
        drop(sharing);
        Ok(Self {
            config,
            shared: Arc::clone(shared),
            generation,
            opener: opener.clone(),
            socket,
            interface,
            ring,
            next: 0,
            open: None,
            tx_offload: TxOffload::default(),
            stats: Stats::default(),
            refused: Refused::default(),
        })
    }

    /// Continues a socket that another process has opened.
    fn adopt(mut config: Config, opener: &Opener, shared: &Shared, port: HandOver) -> Result<Self, Error> {
        config.check()?;
        let name = config.interface.clone();
        let io = |source| Error::Io { name: name.clone(), source };
        let ([socket], numbers) = port.parts(&name)?;
        let [block_size, blocks, vnet_hdr, fanout @ ..]: [u64; 5] = numbers;
        if [block_size, blocks] != [u64::from(config.block_size), u64::from(config.blocks)] {
            return Err(changed(&name, "the size of the receive ring"));
        }
        if (vnet_hdr == 1) != config.vnet_hdr {
            return Err(changed(&name, "`offload`"));
        }
        config.fanout = Fanout::of_numbers(fanout);
        shared.lock().unwrap_or_else(PoisonError::into_inner).fanout = config.fanout;
        let interface = Interface::find(&socket, &name)?;
        let ring =
            Ring::map(socket.as_fd(), config.block_size as usize, config.blocks as usize).map_err(io)?;
        let mut port = Self {
            config,
            shared: Arc::clone(shared),
            generation: 0,
            opener: opener.clone(),
            socket,
            interface,
            ring,
            next: 0,
            open: None,
            tx_offload: TxOffload::default(),
            stats: Stats::default(),
            refused: Refused::default(),
        };
        // The programs of the other process end with it. An interface that is gone has none.
        if port.look()? != State::Gone {
            // With offload, the filter looks up flows of this process: see `resume`.
            let socket = Some(port.socket.as_fd()).filter(|_| port.config.flows.is_none());
            let place = (socket, port.interface.index);
            port.generation = exclude(&port.config, &port.opener, &port.shared, place, 0)?;
            offload_flows(&port.config, &port.opener, &port.shared, (None, place.1), port.generation)?;
        }
        Ok(port)
    }

    /// The fanout group, for further sockets to join.
    #[must_use]
    pub fn fanout(&self) -> Option<Fanout> {
        self.config.fanout
    }

    /// Lets the further sockets of the port join the fanout group of this one, and its own successors.
    fn share_fanout(&self) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).fanout = self.config.fanout;
    }

    /// Starts reading the next block, if the kernel has passed one on.
    fn next_block(&mut self) -> Option<Open> {
        let lease = self.ring.lease(self.next)?;
        self.next = (self.next + 1) % self.ring.blocks();
        let (frames, at) = frame::block(&lease);
        Some(Open { lease, at, frames })
    }

    /// The state of the interface. An interface that has left the network namespace, and has come back or was made again with the same
    /// index, counts as gone: the socket is not bound to it any more.
    fn look(&mut self) -> Result<State, Error> {
        // Clear a pending ENETDOWN; the next sendmmsg(2) would return it.
        let _ = sys::pending_error(self.socket.as_fd());
        let state = self.interface.look(&self.socket, &self.config.interface)?;
        let bound = sys::bound_interface(self.socket.as_fd());
        Ok(if bound.is_ok_and(|index| index.is_none()) { State::Gone } else { state })
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
            timestamps: true,
            checksum: self.config.vnet_hdr,
            segmentation: self.segmentation(),
            ..self.interface.caps()
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
                // An invalid header: drop the rest of the block and count it.
                self.stats.rx_invalid += u64::from(open.frames);
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
        let Self { config, socket, tx_offload, stats, refused, .. } = self;
        tx_offload.send(&config.interface, &medium, frames, |tx_offload, pieces| {
            transmit(socket.as_fd(), config, (stats, refused), tx_offload, pieces)
        })
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn state(&mut self) -> Result<State, Error> {
        let state = self.look()?;
        if state != State::Gone
            && let Kernel::Excluded { host, .. } = &self.config.kernel
            && host.has_me()
        {
            let place = (Some(self.socket.as_fd()), self.interface.index);
            let before = self.generation;
            self.generation = exclude(&self.config, &self.opener, &self.shared, place, before)?;
            if self.generation != before {
                offload_flows(&self.config, &self.opener, &self.shared, place, self.generation)?;
            }
        }
        Ok(state)
    }

    fn reopen(&mut self) -> Result<(), Error> {
        if self.look()? != State::Gone {
            return Ok(());
        }
        let stats = self.stats();
        let fresh = Self::open_with(self.config.clone(), &self.opener, &self.shared)?;
        *self = Self { stats, ..fresh };
        Ok(())
    }

    fn is_midway(&self) -> bool {
        self.open.is_some()
    }

    fn has_lent(&self) -> bool {
        !self.ring.is_free()
    }

    fn hand_over(&mut self) -> std::io::Result<Option<HandOver>> {
        let Config { block_size, blocks, vnet_hdr, .. } = self.config;
        let [kind, group] = Fanout::numbers(self.config.fanout);
        let numbers = [block_size.into(), blocks.into(), vnet_hdr.into(), kind, group];
        Ok(Some(HandOver::of(self.opener.claim()?, vec![self.socket.try_clone()?], &numbers)))
    }

    fn resume(&mut self) {
        // Another process may have set its own.
        let sharing = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((attached, _)) = &sharing.flows
            && let Err(error) = attached.filter(self.socket.as_fd())
        {
            log::warn!("{}: flows are not offloaded: {error}", self.config.interface);
        }
        drop(sharing);
        self.next = self.ring.position();
    }

    fn continue_stats(&mut self, before: Stats) {
        // Reading the kernel's drops resets them: those that this port has read so far are in no other counter.
        self.stats.add(&before);
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.refused.take(each);
    }

    fn stats(&mut self) -> Stats {
        // struct tpacket_stats_v3: packets, drops, freezes; reading resets them.
        let mut counters = [0; 3];
        if sys::get(self.socket.as_fd(), libc::SOL_PACKET, libc::PACKET_STATISTICS, &mut counters).is_ok() {
            self.stats.rx_full += u64::from(counters[1]);
        }
        self.stats
    }
}

/// Attaches the programs of an exclusive port to the interface `index`, unless another socket has done so and the addresses are the
/// same, and filters the socket, if there is one, unless it has the filter of the generation `filtered`. Returns the generation of the
/// programs.
fn exclude(
    config: &Config,
    opener: &Opener,
    shared: &Shared,
    (socket, index): (Option<BorrowedFd<'_>>, u32),
    filtered: u64,
) -> Result<u64, Error> {
    let name = || config.interface.clone();
    let Kernel::Excluded { host, closed, .. } = &config.kernel else { return Ok(0) };
    let me = match host.has_me() {
        true => addresses_of(index).map_err(|source| Error::Io { name: name(), source })?,
        false => Vec::new(),
    };
    let mut sharing = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let programs = &mut sharing.programs;
    let is_current = |programs: &Programs| programs.me == me && programs.ingress.is_on(index);
    if !programs.as_ref().is_some_and(is_current) {
        let ingress = opener.open(&Object::IngressProgram);
        let ingress = ingress.and_then(|descriptors| Ingress::of(index, *closed, descriptors));
        let ingress = ingress.map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => Error::NoInterface { interface: name() },
            _ => Error::NotExclusive { name: name(), source: sys::bpf_reason(source) },
        })?;
        let generation = programs.as_ref().map_or(1, |programs| programs.generation + 1);
        // The new program is attached while the old one is: there is no time without one.
        *programs = Some(Programs { me, generation, ingress });
    }
    let Some(Programs { ingress, generation, .. }) = &*programs else { return Ok(0) };
    if let Some(socket) = socket.filter(|_| filtered != *generation) {
        ingress.filter(socket).map_err(|source| Error::Io { name: name(), source })?;
    }
    Ok(*generation)
}

/// Attaches the programs of flow offload to the interface `index`, unless another socket has done so, and filters the socket, if there is
/// one. The filter depends on the interface's addresses as the programs of the generation do.
fn offload_flows(
    config: &Config,
    opener: &Opener,
    shared: &Shared,
    (socket, index): (Option<BorrowedFd<'_>>, u32),
    generation: u64,
) -> Result<(), Error> {
    let Some(flows) = config.flows else { return Ok(()) };
    let failed = |source: std::io::Error| match source.raw_os_error() {
        Some(libc::ENODEV) => Error::NoInterface { interface: config.interface.clone() },
        _ => Error::NoOffload { name: config.interface.clone(), source: sys::bpf_reason(source) },
    };
    let mut sharing = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let is_current = |(attached, of): &(offload::Attached, u64)| *of == generation && attached.is_on(index);
    if !sharing.flows.as_ref().is_some_and(is_current) {
        let attached = offload::Attached::open(opener).map_err(failed)?;
        if flows.outlive && !attached.is_pinned {
            log::warn!(
                "`{}`: offloaded flows end with the engine: `fail = \"open\"` needs a BPF file system at /sys/fs/bpf, and an engine that no upgrade has started",
                config.interface
            );
        }
        sharing.flows = Some((attached, generation));
    }
    match sharing.flows.as_ref().zip(socket) {
        Some(((attached, _), socket)) => attached.filter(socket).map_err(failed),
        None => Ok(()),
    }
}

/// Sends messages. Skips and counts messages that the kernel refuses.
fn transmit(
    socket: BorrowedFd<'_>,
    config: &Config,
    (stats, refused): (&mut Stats, &mut Refused),
    tx_offload: &TxOffload,
    pieces: &[Piece<'_>],
) -> Result<(), Error> {
    let mut messages: [[&[u8]; 2]; BATCH] = [[&[]; 2]; BATCH];
    for (message, piece) in messages.iter_mut().zip(pieces) {
        *message = [&piece.vnet, tx_offload.bytes(piece)];
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
        let errno = error.raw_os_error().unwrap_or_default();
        let reason = TxDrop::from_errno(errno);
        match errno {
            libc::EINTR => continue,
            // ENETDOWN, ENXIO: the interface is down or gone. EMSGSIZE: the MTU was lowered. EINVAL, EIO: the kernel or the driver
            // rejects the virtio_net_hdr.
            libc::EAGAIN
            | libc::ENOBUFS
            | libc::ENETDOWN
            | libc::ENXIO
            | libc::ENODEV
            | libc::EMSGSIZE
            | libc::EINVAL
            | libc::EIO => {
                stats.count_tx_drop(reason, 1);
                refused.keep(reason, left[0][1]);
            }
            _ => {
                stats.count_tx_drop(reason, left.len() as u64);
                left.iter().for_each(|message| refused.keep(reason, message[1]));
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
