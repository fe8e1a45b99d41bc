//! XDP sockets (AF_XDP): frames of an interface's queue in memory shared with the kernel, before the network stack.
//!
//! Received frames are lent to the burst in place; sent frames are copied into the port's chunks. A queue with a socket passes
//! all frames to the port and none to the host's network stack. The XDP program is part of the port (see `program.rs`).
//! Needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF.
//!
//! XDP does not report partial checksums and GSO frames, which a host with offloads sends over veth. [`Config::find_partial`]
//! detects both, GSO frames by their length. They are received only with [`Config::multi_buffer`]; without it, a frame longer
//! than one buffer is dropped ([`Stats::rx_too_long`]), and the senders' offloads must be off
//! (`ethtool -K eth0 tso off gso off`). TCP is segmented by the MTU. Unsegmented UDP datagrams (UDP_SEGMENT) are dropped
//! ([`Stats::rx_unsegmented`]) if they exceed the MTU together, and cannot be
//! told from one datagram otherwise: the senders' `tx-udp-segmentation` must be off. Sent frames always have complete checksums.
//!
//! Frames have no timestamps of the kernel; their time is that of the receiving call.
//!
//! References: Documentation/networking/af_xdp.rst, linux/if_xdp.h.

mod config;
mod program;
mod ring;
#[cfg(test)]
mod tests;
mod umem;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::burst::{Lent, NEAR};
use crate::clock;
use crate::interface::Interface;
use crate::stats::Refused;
use crate::tx_offload::{Medium, TxOffload};
use towpath_wire::{checksum, gso};

use crate::hand_over::{HandOver, changed};
use crate::{
    Burst, Caps, Error, Frame, LinkType, Meta, Object, Offload, Opener, Port, Received, Segmentation, State,
    Stats, TxDrop, sys,
};

pub use config::{After, Config, Mode};
use program::{Program, QUEUES};
use ring::{Descriptor, Offsets, Ring};
pub(crate) use umem::Chunks;
use umem::{CHUNK, Chunk, LENT, Umem};

/// Length of the longest frame in one buffer. XDP reserves 256 bytes of headroom and the tail of the page.
const SINGLE: usize = CHUNK - 256;
/// Limit on buffers per frame: MAX_SKB_FRAGS plus one.
const BUFFERS: usize = 18;
/// Limit on consecutive wakeups to send the ring's frames. Each sends at most 32 frames.
const KICKS: usize = 256;

/// An XDP socket on one queue of an interface as a port.
///
/// ```no_run
/// use towpath_port::{Burst, Port, Received, af_xdp};
///
/// let mut port = af_xdp::Socket::open(af_xdp::Config::new("eth0"))?;
/// let mut burst = Burst::new(64);
/// while port.receive(&mut burst)? != Received::End {
///     port.send(&mut burst.iter())?; // back to the same queue
/// }
/// # Ok::<(), towpath_port::Error>(())
/// ```
#[derive(Debug)]
pub struct Socket {
    config: Config,
    queue: u32,
    socket: OwnedFd,
    /// Socket for interface requests.
    control: OwnedFd,
    interface: Interface,
    umem: Arc<Umem>,
    free: Vec<Chunk>,
    fill: Ring<u64>,
    completion: Ring<u64>,
    rx: Ring<Descriptor>,
    tx: Ring<Descriptor>,
    program: Arc<Program>,
    /// The interface has left the network namespace since the socket was bound.
    unbound: bool,
    opener: Opener,
    reopened: Reopened,
    tx_offload: TxOffload,
    stats: Stats,
    refused: Refused,
}

/// Sockets on the queues of an interface that was created again, until each port takes its own. The sockets share a program, so
/// the first port to find the interface opens all of them.
type Reopened = Arc<Mutex<Vec<Option<Socket>>>>;

impl Socket {
    /// Attaches the program to the interface and opens a socket on its queue 0.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::Privilege`], [`Error::Unsupported`], [`Error::InUse`], [`Error::Config`], [`Error::Io`].
    pub fn open(config: Config) -> Result<Self, Error> {
        let mut sockets = Self::open_queues(&config, 1)?;
        Ok(sockets.remove(0))
    }

    /// Attaches the program to the interface and opens one socket per queue, 0 to `queues - 1`. Frames on other queues go to the
    /// network stack ([`After::Pass`]) or are dropped ([`After::Drop`]).
    ///
    /// # Errors
    /// As [`Socket::open`].
    pub fn open_queues(config: &Config, queues: u32) -> Result<Vec<Self>, Error> {
        Self::open_queues_with(config, queues, &Opener::local(config))
    }

    fn open_queues_with(config: &Config, queues: u32, opener: &Opener) -> Result<Vec<Self>, Error> {
        config.check()?;
        let name = &config.interface;
        if !(1..=QUEUES).contains(&queues) {
            let what = format!("the number of queues must be from 1 to {QUEUES}");
            return Err(Error::Config { name: name.clone(), what });
        }
        // Fails first if the kernel has no AF_XDP.
        let socket = |_| {
            let socket = opener.open_all(&Object::XdpSocket);
            socket.map(|[socket]| socket).map_err(|error| config.refused("opening a socket", error))
        };
        let sockets: Vec<OwnedFd> = (0..queues).map(socket).collect::<Result<_, _>>()?;
        let control = control(name)?;
        let interface = Interface::find(&control, name)?;
        if interface.link != LinkType::ETHERNET {
            let what = "XDP needs an Ethernet interface: use tun or af_packet".into();
            return Err(Error::Unsupported { name: name.clone(), what });
        }
        // A driver without channels has one queue; binding reports others.
        let available = sys::receive_queues(control.as_fd(), name).unwrap_or(queues);
        if available < queues {
            let what = format!(
                "the interface has {available} receive queue{}, and {queues} threads need one each: set [engine] threads = {available}, or run \
                 `ethtool -L {name} combined {queues}` (veth: `numrxqueues {queues}` when it is made)",
                if available == 1 { "" } else { "s" }
            );
            return Err(Error::Config { name: name.clone(), what });
        }
        if available > queues && config.after == After::Pass {
            log::warn!(
                "{name}: the interface has {available} receive queues, and the engine {queues}: the kernel gets the packets of the others; run \
                 `ethtool -L {name} combined {queues}`"
            );
        }
        config.fits(&interface)?;
        let program = Program::open(config, opener)
            .map_err(|error| config.refused("attaching the XDP program", error))?;
        let program = Arc::new(program);
        let reopened = Reopened::new(Mutex::new((0..queues).map(|_| None).collect()));
        let opened = sockets.into_iter().zip(0..);
        opened
            .map(|(socket, queue)| {
                Self::open_one(config, interface, (socket, queue), (&program, opener), &reopened)
            })
            .collect()
    }

    fn open_one(
        config: &Config,
        interface: Interface,
        (socket, queue): (OwnedFd, u32),
        (program, opener): (&Arc<Program>, &Opener),
        reopened: &Reopened,
    ) -> Result<Self, Error> {
        let io = |source| Error::Io { name: config.interface.clone(), source };
        let fd = socket.as_fd();
        let (umem, free) = Umem::new(config.chunks).map_err(io)?;
        let set = |name, words: &[u32]| sys::set(fd, libc::SOL_XDP, name, words).map_err(io);
        // struct xdp_umem_reg: address, length, chunk size, headroom, flags, metadata.
        let (address, len) = umem.place();
        let registration = [halves(address), halves(len), [CHUNK as u32, 0], [0, 0]].concat();
        sys::set(fd, libc::SOL_XDP, libc::XDP_UMEM_REG, &registration)
            .map_err(|source| unregistered(config, len, source))?;
        // Up to half of the chunks are in the fill ring; the rest is lent or being sent.
        let size = config.chunks / 2;
        let rings =
            [libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING, libc::XDP_RX_RING, libc::XDP_TX_RING];
        for ring in rings {
            set(ring, &[size])?;
        }
        let [rx, tx, fill, completion] = offsets(fd).map_err(io)?;
        let page = |offset: libc::off_t| offset as u64;
        let mut port = Self {
            fill: Ring::map(fd, libc::XDP_UMEM_PGOFF_FILL_RING, fill, size, true).map_err(io)?,
            completion: Ring::map(fd, libc::XDP_UMEM_PGOFF_COMPLETION_RING, completion, size, false)
                .map_err(io)?,
            rx: Ring::map(fd, page(libc::XDP_PGOFF_RX_RING), rx, size, false).map_err(io)?,
            tx: Ring::map(fd, page(libc::XDP_PGOFF_TX_RING), tx, size, true).map_err(io)?,
            control: control(&config.interface)?,
            config: config.clone(),
            queue,
            interface,
            umem,
            free,
            program: program.clone(),
            unbound: false,
            opener: opener.clone(),
            reopened: reopened.clone(),
            tx_offload: TxOffload::default(),
            stats: Stats::default(),
            refused: Refused::default(),
            socket,
        };
        port.refill();
        let copy = if config.zero_copy { libc::XDP_ZEROCOPY } else { libc::XDP_COPY };
        let frags = if config.multi_buffer { libc::XDP_USE_SG } else { 0 };
        let flags = copy | frags | libc::XDP_USE_NEED_WAKEUP;
        let fd = port.socket.as_fd();
        sys::bind_xdp(fd, interface.index, queue, flags)
            .map_err(|error| config.refused(&format!("binding to queue {queue}"), error))?;
        if let Some(micros) = config.busy_poll {
            // SO_PREFER_BUSY_POLL, SO_BUSY_POLL_BUDGET: asm-generic/socket.h.
            let options = [(69, 1), (libc::SO_BUSY_POLL, micros), (70, 64)];
            for (option, value) in options {
                sys::set(fd, libc::SOL_SOCKET, option, &[value])
                    .map_err(|error| config.refused("busy polling", error))?;
            }
        }
        program.serve(queue, fd).map_err(|error| config.refused("serving the queue", error))?;
        Ok(port)
    }

    /// Continues the sockets that another process has opened. [`resume`](Port::resume) reads the positions of their rings.
    fn adopt_all(config: &Config, ports: Vec<HandOver>, opener: &Opener) -> Result<Vec<Self>, Error> {
        config.check()?;
        let name = &config.interface;
        let io = |source| Error::Io { name: name.clone(), source };
        let interface = Interface::find(&control(name)?, name)?;
        let reopened = Reopened::new(Mutex::new((0..ports.len()).map(|_| None).collect()));
        let mut shared = None;
        let adopt = |(queue, port): (usize, HandOver)| {
            let ([socket, memory, map, link], [chunks, multi_buffer]) = port.parts(name)?;
            if chunks != u64::from(config.chunks) {
                return Err(changed(name, "the size of the frame memory"));
            }
            if (multi_buffer == 1) != config.multi_buffer {
                return Err(changed(name, "`multi-buffer`"));
            }
            let program = match &shared {
                Some(program) => Arc::clone(program),
                None => Arc::new(Program::adopt([map, link], config, opener).map_err(io)?),
            };
            shared = Some(Arc::clone(&program));
            let size = config.chunks / 2;
            let fd = socket.as_fd();
            if config.flows.is_some() {
                program.serve(queue as u32, fd).map_err(io)?;
            }
            let [rx, tx, fill, completion] = offsets(fd).map_err(io)?;
            let page = |offset: libc::off_t| offset as u64;
            Ok(Self {
                fill: Ring::map(fd, libc::XDP_UMEM_PGOFF_FILL_RING, fill, size, true).map_err(io)?,
                completion: Ring::map(fd, libc::XDP_UMEM_PGOFF_COMPLETION_RING, completion, size, false)
                    .map_err(io)?,
                rx: Ring::map(fd, page(libc::XDP_PGOFF_RX_RING), rx, size, false).map_err(io)?,
                tx: Ring::map(fd, page(libc::XDP_PGOFF_TX_RING), tx, size, true).map_err(io)?,
                control: control(name)?,
                config: config.clone(),
                queue: queue as u32,
                interface,
                umem: Umem::adopt(memory, config.chunks).map_err(io)?,
                free: Vec::new(),
                program,
                unbound: false,
                opener: opener.clone(),
                reopened: reopened.clone(),
                tx_offload: TxOffload::default(),
                stats: Stats::default(),
                refused: Refused::default(),
                socket,
            })
        };
        ports.into_iter().enumerate().map(adopt).collect()
    }

    /// Refills the fill ring with free chunks. An empty fill ring causes drops.
    fn refill(&mut self) {
        self.umem.take_back(&mut self.free);
        // Transmission has reserved chunks, so that neither direction starves the other.
        let reserve = self.config.chunks as usize / 4;
        let count = (self.fill.ready() as usize).min(self.free.len().saturating_sub(reserve));
        for ahead in 0..count as u32 {
            let Some(chunk) = self.free.pop() else { break };
            let address = self.umem.give(chunk);
            self.fill.set(ahead, address);
        }
        self.fill.advance(count as u32);
    }

    /// Reclaims the chunks of completed transmissions.
    fn complete(&mut self) {
        let count = self.completion.ready();
        for ahead in 0..count {
            self.free.extend(self.umem.taken(self.completion.get(ahead)));
        }
        self.completion.advance(count);
    }

    /// Receives one frame from the RX ring: `buffers` descriptors from `ahead` on. Returns its length.
    fn take(
        &mut self,
        ahead: u32,
        buffers: u32,
        burst: &mut Burst,
        lent: &mut Chunks,
        time_ns: u64,
    ) -> usize {
        let meta = Meta { queue: self.queue as u16, ..Meta::default() };
        let (link, interface) = (LinkType::ETHERNET, self.interface.index);
        let mut frame = Frame { bytes: &[], wire_len: 0, time_ns, link, interface, meta };
        if buffers == 1 {
            let descriptor = self.rx.get(ahead);
            let start = (descriptor.address % CHUNK as u64) as usize;
            let range = start..start + descriptor.len as usize;
            let Some(chunk) = self.umem.taken(descriptor.address) else {
                self.stats.rx_invalid += 1;
                return 0;
            };
            let Some(bytes) = self.umem.bytes(&chunk, range.clone()) else {
                self.stats.rx_invalid += 1;
                self.free.push(chunk);
                return 0;
            };
            let len = range.len();
            let Some(offload) = self.unfinished(bytes) else {
                self.stats.rx_unsegmented += 1;
                self.free.push(chunk);
                return len;
            };
            frame.meta.offload = offload;
            self.stats.count_received(len);
            let number = lent.add(chunk);
            burst.add_chunk(number, range, frame);
            return len;
        }
        // A frame of several buffers is copied into one.
        let begin = burst.used();
        for ahead in ahead..ahead + buffers {
            let descriptor = self.rx.get(ahead);
            let start = (descriptor.address % CHUNK as u64) as usize;
            let Some(chunk) = self.umem.taken(descriptor.address) else { continue };
            if let Some(bytes) = self.umem.bytes(&chunk, start..start + descriptor.len as usize) {
                burst.room(bytes.len()).copy_from_slice(bytes);
                burst.advance(bytes.len());
            }
            self.free.push(chunk);
        }
        let range = begin..burst.used();
        let len = range.len();
        let Some(offload) = self.unfinished(burst.used_bytes(range.clone())) else {
            self.stats.rx_unsegmented += 1;
            return len;
        };
        frame.meta.offload = offload;
        self.stats.count_received(len);
        burst.add_own(range, frame);
        len
    }

    /// Detects offload metadata that XDP does not report: a partial checksum, and TCP segmentation of frames that exceed the MTU.
    /// Returns `None` for unsegmented UDP datagrams, whose size is unknown.
    fn unfinished(&self, bytes: &[u8]) -> Option<Offload> {
        if !self.config.find_partial {
            return Some(Offload::default());
        }
        let link = LinkType::ETHERNET;
        let mtu = self.interface.mtu as usize;
        let long = bytes.len() > self.interface.max_frame();
        if long && gso::is_unsegmented_udp(link, bytes, mtu) {
            return None;
        }
        let gso = if long { gso::infer(link, bytes, mtu) } else { None };
        Some(Offload { checksum: checksum::detect(link, bytes), gso })
    }

    /// The number of descriptors of the frame that begins at `ahead`, out of `count`; `None` if the end is not available yet.
    fn buffers(&self, ahead: u32, count: u32) -> Option<u32> {
        let last = (ahead..count).find(|at| self.rx.get(*at).options & libc::XDP_PKT_CONTD == 0)?;
        Some(last + 1 - ahead)
    }

    /// Wakes the kernel to send the frames of the TX ring.
    fn kick(&mut self) -> Result<(), Error> {
        for _ in 0..KICKS {
            if self.tx.outstanding() == 0 || !self.tx.needs_wakeup() {
                return Ok(());
            }
            let Err(error) = sys::kick(self.socket.as_fd(), true) else {
                self.complete();
                continue;
            };
            match error.raw_os_error() {
                // EAGAIN: more frames are left. EBUSY: the driver is sending. ENOBUFS: its queue is full.
                Some(libc::EAGAIN | libc::EINTR) => self.complete(),
                Some(libc::EBUSY | libc::ENOBUFS) => return Ok(()),
                // The interface is down or gone: the frames stay in the ring until it is up.
                Some(libc::ENETDOWN | libc::ENXIO | libc::ENODEV) => return Ok(()),
                _ => return Err(Error::Io { name: self.config.interface.clone(), source: error }),
            }
        }
        Ok(())
    }

    /// Adds one frame to the TX ring and counts it.
    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let buffers = bytes.len().div_ceil(CHUNK).max(1);
        if (self.tx.ready() as usize) < buffers || self.free.len() < buffers {
            self.complete();
            self.umem.take_back(&mut self.free);
            self.kick()?;
        }
        if (self.tx.ready() as usize) < buffers || self.free.len() < buffers {
            self.stats.tx_full += 1;
            self.refused.keep(TxDrop::Full, bytes);
            return Ok(());
        }
        for (ahead, part) in bytes.chunks(CHUNK).enumerate() {
            let Some(mut chunk) = self.free.pop() else { break };
            if let Some(room) = self.umem.bytes_mut(&mut chunk, 0..part.len()) {
                room.copy_from_slice(part);
            }
            let options = if ahead + 1 < buffers { libc::XDP_PKT_CONTD } else { 0 };
            let address = self.umem.give(chunk);
            self.tx.set(ahead as u32, Descriptor { address, len: part.len() as u32, options });
        }
        self.tx.advance(buffers as u32);
        self.stats.count_sent(bytes.len());
        Ok(())
    }

    /// Length of the longest frame that can be sent.
    fn max_frame(&self) -> usize {
        let most = if self.config.multi_buffer { BUFFERS * CHUNK } else { CHUNK };
        self.interface.max_frame().min(most)
    }
}

impl Port for Socket {
    fn name(&self) -> &str {
        &self.config.interface
    }

    fn caps(&self) -> Caps {
        Caps {
            link: Some(LinkType::ETHERNET),
            max_frame: Some(self.max_frame() as u32),
            ..self.interface.caps()
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        self.complete();
        self.refill();
        let busy = self.config.busy_poll.is_some();
        let mut count = self.rx.ready();
        if count == 0 && (busy || self.fill.needs_wakeup()) {
            // EAGAIN and similar: no frame is available yet.
            let _ = sys::kick(self.socket.as_fd(), false);
            count = self.rx.ready();
        }
        if count == 0 {
            return Ok(Received::Nothing);
        }
        let time_ns = clock::now_ns();
        let mut lent = Chunks::new(self.umem.clone());
        let most = burst.vacancies().min(LENT);
        let (mut ahead, mut bytes) = (0, 0);
        while burst.len() < most && bytes < NEAR {
            let Some(buffers) = self.buffers(ahead, count) else { break };
            bytes += self.take(ahead, buffers, burst, &mut lent, time_ns);
            ahead += buffers;
            if ahead == count {
                break;
            }
        }
        self.rx.advance(ahead);
        burst.lend(Lent::Chunks(lent));
        Ok(if burst.is_empty() { Received::Nothing } else { Received::Frames })
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let medium = Medium {
            link: LinkType::ETHERNET,
            max_piece: self.max_frame(),
            checksum: false,
            segmentation: Segmentation::default(),
        };
        self.complete();
        self.umem.take_back(&mut self.free);
        let mut tx_offload = std::mem::take(&mut self.tx_offload);
        let name = std::mem::take(&mut self.config.interface);
        let sent = tx_offload.send(&name, &medium, frames, |tx_offload, pieces| {
            for (at, piece) in pieces.iter().enumerate() {
                if let Err(error) = self.put(tx_offload.bytes(piece)) {
                    let reason = match &error {
                        Error::Io { source, .. } => {
                            TxDrop::from_errno(source.raw_os_error().unwrap_or_default())
                        }
                        _ => TxDrop::Other,
                    };
                    self.stats.count_tx_drop(reason, (pieces.len() - at) as u64);
                    pieces[at..].iter().for_each(|piece| self.refused.keep(reason, tx_offload.bytes(piece)));
                    return Err(error);
                }
            }
            Ok(())
        });
        self.config.interface = name;
        self.tx_offload = tx_offload;
        self.kick()?;
        sent
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.kick()
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn state(&mut self) -> Result<State, Error> {
        // An interface that leaves the network namespace unbinds its sockets (net/xdp/xsk.c, xsk_notifier). It may have come back with
        // the same index.
        let error = sys::pending_error(self.socket.as_fd()).err().and_then(|error| error.raw_os_error());
        self.unbound |= error == Some(libc::ENETDOWN);
        let state = self.interface.look(&self.control, &self.config.interface)?;
        Ok(if self.unbound { State::Gone } else { state })
    }

    /// With several queues, the first socket to reopen opens the sockets of all queues; the others take theirs.
    fn reopen(&mut self) -> Result<(), Error> {
        if self.state()? != State::Gone {
            return Ok(());
        }
        let reopened = self.reopened.clone();
        let mut places = reopened.lock().unwrap_or_else(PoisonError::into_inner);
        let place = self.queue as usize;
        if places[place].is_none() {
            Interface::find(&self.control, &self.config.interface)?;
            self.program.detach(self.config.after != After::Pass);
            let fresh = Self::open_queues_with(&self.config, places.len() as u32, &self.opener)?;
            *places = fresh.into_iter().map(Some).collect();
        }
        if let Some(fresh) = places[place].take() {
            let stats = self.stats();
            *self = Self { stats, ..fresh };
        }
        Ok(())
    }

    fn has_lent(&self) -> bool {
        self.umem.lent(self.free.len()) > 0
    }

    fn hand_over(&mut self) -> std::io::Result<Option<HandOver>> {
        let [map, link] = self.program.descriptors()?;
        let own = vec![self.socket.try_clone()?, self.umem.memory()?, map, link];
        let numbers = [self.config.chunks.into(), self.config.multi_buffer.into()];
        Ok(Some(HandOver::of(self.opener.claim()?, own, &numbers)))
    }

    fn resume(&mut self) {
        if let Err(error) = self.program.resume() {
            log::warn!("{}: flows are not offloaded: {error}", self.config.interface);
        }
        self.fill.resume();
        self.completion.resume();
        self.rx.resume();
        self.tx.resume();
        self.free = self.umem.free();
    }

    fn own_stats(&mut self) -> Stats {
        self.stats
    }

    fn continue_stats(&mut self, before: Stats) {
        self.stats = before;
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.refused.take(each);
    }

    fn stats(&mut self) -> Stats {
        // struct xdp_statistics: rx_dropped, rx_invalid_descs, tx_invalid_descs, rx_ring_full, rx_fill_ring_empty_descs, tx_ring_empty_descs.
        let mut counters = [0; 12];
        let mut stats = self.stats;
        if sys::get(self.socket.as_fd(), libc::SOL_XDP, libc::XDP_STATISTICS, &mut counters).is_ok() {
            let counter = |at: usize| whole(counters[2 * at], counters[2 * at + 1]);
            // rx_dropped includes frames without a chunk in the fill ring. The others were too long for one buffer.
            let full = if self.config.multi_buffer { counter(0) } else { counter(0).min(counter(4)) };
            stats.rx_full += full + counter(3);
            stats.rx_too_long += counter(0) - full;
            stats.tx_refused += counter(2);
        }
        stats
    }
}

/// The error of registering `len` bytes. ENOBUFS: RLIMIT_MEMLOCK (net/xdp/xdp_umem.c, `xdp_umem_account_pages`).
fn unregistered(config: &Config, len: u64, source: std::io::Error) -> Error {
    let name = config.interface.clone();
    if source.raw_os_error() != Some(libc::ENOBUFS) {
        return Error::Io { name, source };
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX);
    let what = format!(
        "the memory of an XDP queue ({} KiB) exceeds RLIMIT_MEMLOCK ({} KiB for all of this user): set LimitMEMLOCK=infinity in the \
         systemd unit, run `ulimit -l unlimited`, or keep CAP_IPC_LOCK",
        len >> 10,
        limit >> 10
    );
    Error::Config { name, what }
}

fn control(name: &str) -> Result<OwnedFd, Error> {
    sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).map_err(|source| Error::Io { name: name.into(), source })
}

/// Offsets of the rings' parts (`struct xdp_mmap_offsets`): for rx, tx, fill and completion each producer, consumer, entries, flags.
fn offsets(socket: BorrowedFd<'_>) -> std::io::Result<[Offsets; 4]> {
    let mut raw = [0; 32];
    if sys::get(socket, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS, &mut raw)? != size_of_val(&raw) {
        return Err(std::io::Error::other(
            "this kernel's AF_XDP has no need_wakeup: Linux 5.4 or later is required",
        ));
    }
    let number = |at: usize| whole(raw[2 * at], raw[2 * at + 1]) as usize;
    Ok(std::array::from_fn(|ring| {
        let at = ring * 4;
        Offsets {
            producer: number(at),
            consumer: number(at + 1),
            entries: number(at + 2),
            flags: number(at + 3),
        }
    }))
}

fn halves(value: u64) -> [u32; 2] {
    let [a, b, c, d, e, f, g, h] = value.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

fn whole(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}
