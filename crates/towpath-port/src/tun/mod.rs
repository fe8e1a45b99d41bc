//! TUN and TAP devices: a port receives the packets that the host sends to the interface, and sends packets to the host.
//!
//! Frames are read into the burst and written from where they are, without a copy in user space. With [`Config::vnet_hdr`] the host
//! passes partial checksums and frames of up to 64 KiB, and accepts the same. Creating an interface needs CAP_NET_ADMIN in the
//! user namespace of the network namespace; a private one suffices if the device node can be opened.
//!
//! Frames have no timestamps of the kernel; their time is that of the receiving call.
//!
//! References: Documentation/networking/tuntap.rst, linux/if_tun.h.

mod config;
#[cfg(test)]
mod tests;

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::clock;
use crate::hand_over::{HandOver, changed};
use crate::interface::Interface;
use crate::stats::Refused;
use crate::tx_offload::{Medium, TxOffload};
use crate::{
    Burst, Caps, Error, Frame, Meta, Object, Opener, Port, Received, Segmentation, State, Stats, TxDrop, sys,
};
use towpath_wire::{Offload, VIRTIO_NET_HDR_LEN};

pub use config::{Config, Kind};

/// Length of the longest frame that is read: the longest IP packet with an Ethernet header and two VLAN tags. The kernel truncates
/// longer frames, which are then dropped for their length.
const LONGEST: usize = 65_535 + 22;

/// A TUN or TAP device as a port.
///
/// ```no_run
/// use towpath_port::{Burst, Port, Received, tun};
///
/// let mut port = tun::Device::open(tun::Config::tun("tun%d"))?;
/// println!("ip addr add 10.0.0.1/24 dev {}", port.name());
/// let mut burst = Burst::new(64);
/// while port.receive(&mut burst)? != Received::End {
///     println!("{} packets", burst.len());
/// }
/// # Ok::<(), towpath_port::Error>(())
/// ```
#[derive(Debug)]
pub struct Device {
    config: Config,
    opener: Opener,
    device: OwnedFd,
    /// Socket for interface requests.
    control: OwnedFd,
    interface: Interface,
    tx_offload: TxOffload,
    stats: Stats,
    refused: Refused,
    /// Frames dropped because the kernel's queue was full. With several queues, only the first port counts.
    lost: Lost,
}

/// Drop counter of the interface, towards this process.
#[derive(Clone, Copy, Debug, Default)]
struct Lost {
    /// Value when the device was opened.
    before: u64,
    /// Sum over previous, deleted interfaces of this port.
    gone: u64,
}

impl Device {
    /// Creates or opens the interface.
    ///
    /// # Errors
    /// [`Error::Unsupported`] (no device node), [`Error::Privilege`], [`Error::InUse`], [`Error::Config`], [`Error::Io`].
    pub fn open(config: Config) -> Result<Self, Error> {
        let opener = Opener::local(&config);
        Self::open_with(config, &opener)
    }

    fn open_with(config: Config, opener: &Opener) -> Result<Self, Error> {
        opener.open(&Object::TunNode).map_err(|error| config.node_error(error))?;
        let queue = Object::TunQueue { multi_queue: config.multi_queue, interface: config.interface.clone() };
        let [device] = opener.open_all(&queue).map_err(|error| config.attach_error(error))?;
        let name = sys::tun_name(device.as_fd()).map_err(|error| config.attach_error(error))?;
        let config = Config { interface: name, ..config };
        let io = |source| Error::Io { name: config.interface.clone(), source };
        if config.vnet_hdr {
            offloads(device.as_fd()).map_err(io)?;
        }
        sys::tun_send_buffer(device.as_fd(), 16 << 20).map_err(io)?;
        sys::tun_persist(device.as_fd(), config.persist).map_err(io)?;
        Self::over(config, device, opener)
    }

    /// Continues the queue number `queue` of a device that another process has opened.
    fn adopt(config: &Config, queue: usize, port: HandOver, opener: &Opener) -> Result<Self, Error> {
        let ([device], [multi_queue, vnet_hdr, before, gone]) = port.parts(&config.interface)?;
        if (vnet_hdr == 1) != config.vnet_hdr {
            return Err(changed(&config.interface, "`offload`"));
        }
        let interface = sys::tun_name(device.as_fd()).map_err(|error| config.attach_error(error))?;
        let multi_queue = multi_queue == 1;
        let config = Config { interface, multi_queue, queue: queue as u16, ..config.clone() };
        // The interface's counter goes on: frames that are dropped while neither process reads count too.
        Ok(Self { lost: Lost { before, gone }, ..Self::over(config, device, opener)? })
    }

    fn over(config: Config, device: OwnedFd, opener: &Opener) -> Result<Self, Error> {
        let io = |source| Error::Io { name: config.interface.clone(), source };
        let control = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).map_err(io)?;
        let interface = Interface::find(&control, &config.interface)?;
        let lost = Lost { before: dropped(&config.interface).unwrap_or(0), gone: 0 };
        Ok(Self {
            config,
            opener: opener.clone(),
            device,
            control,
            interface,
            tx_offload: TxOffload::default(),
            stats: Stats::default(),
            refused: Refused::default(),
            lost,
        })
    }

    /// Creates or opens the interface with several queues, one port per queue. The kernel distributes flows among them.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open_queues(config: &Config, queues: u16) -> Result<Vec<Self>, Error> {
        Self::open_queues_with(config, queues, &Opener::local(config))
    }

    fn open_queues_with(config: &Config, queues: u16, opener: &Opener) -> Result<Vec<Self>, Error> {
        let mut ports: Vec<Self> = Vec::new();
        for queue in 0..queues {
            let interface = ports.first().map_or(&config.interface, |first| &first.config.interface).clone();
            let config = Config { interface, multi_queue: true, queue, ..config.clone() };
            ports.push(Self::open_with(config, opener)?);
        }
        Ok(ports)
    }

    fn header(&self) -> usize {
        if self.config.vnet_hdr { VIRTIO_NET_HDR_LEN } else { 0 }
    }

    fn segmentation(&self) -> Segmentation {
        if self.config.vnet_hdr { Segmentation::ALL } else { Segmentation::default() }
    }
}

impl Port for Device {
    fn name(&self) -> &str {
        &self.config.interface
    }

    fn caps(&self) -> Caps {
        Caps {
            link: Some(self.config.link()),
            checksum: self.config.vnet_hdr,
            segmentation: self.segmentation(),
            ..self.interface.caps()
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        let header = self.header();
        let mut now = None;
        while burst.has_room() {
            let len = match rustix::io::read(&self.device, burst.room(header + LONGEST)) {
                Ok(len) => len,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                // EBADFD: the interface was deleted. EIO: it is being deleted.
                Err(Errno::BADFD | Errno::IO) => break,
                Err(error) => {
                    return Err(Error::Io { name: self.config.interface.clone(), source: error.into() });
                }
            };
            let offload = match burst.room(header).first_chunk() {
                Some(header) => Offload::parse(header),
                None => Some(Offload::default()),
            };
            let (Some(offload), Some(bytes)) = (offload, len.checked_sub(header)) else {
                self.stats.rx_invalid += 1;
                continue;
            };
            let start = burst.used() + header;
            burst.advance(len);
            let meta = Meta { queue: self.config.queue, offload, ..Meta::default() };
            let time_ns = *now.get_or_insert_with(clock::now_ns);
            let frame = Frame {
                bytes: &[],
                wire_len: 0,
                time_ns,
                link: self.config.link(),
                interface: self.interface.index,
                meta,
            };
            burst.add_own(start..start + bytes, frame);
            self.stats.count_received(bytes);
        }
        Ok(if burst.is_empty() { Received::Nothing } else { Received::Frames })
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let medium = Medium {
            link: self.config.link(),
            max_piece: self.interface.max_frame(),
            checksum: self.config.vnet_hdr,
            segmentation: self.segmentation(),
        };
        let Self { config, device, tx_offload, stats, refused, .. } = self;
        tx_offload.send(&config.interface, &medium, frames, |tx_offload, pieces| {
            for (at, piece) in pieces.iter().enumerate() {
                let bytes = tx_offload.bytes(piece);
                if let Err((reason, error)) = write(device, config, (stats, refused), &piece.vnet, bytes) {
                    stats.count_tx_drop(reason, (pieces.len() - at) as u64);
                    pieces[at..].iter().for_each(|piece| refused.keep(reason, tx_offload.bytes(piece)));
                    return Err(error);
                }
            }
            Ok(())
        })
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.as_fd())
    }

    fn state(&mut self) -> Result<State, Error> {
        // The present name: the device may have been renamed, and another interface may have its former name.
        let Ok(name) = sys::tun_name(self.device.as_fd()) else { return Ok(State::Gone) };
        match Interface::find(&self.control, &name) {
            Ok(found) if found.index == self.interface.index => {
                self.interface = found;
                Ok(found.state)
            }
            // The interface was moved to another network namespace and cannot be queried. It still carries frames.
            Ok(_) | Err(Error::NoInterface { .. }) => Ok(State::Up),
            Err(error) => Err(error),
        }
    }

    fn reopen(&mut self) -> Result<(), Error> {
        if sys::tun_name(self.device.as_fd()).is_ok() {
            return Ok(());
        }
        let stats = self.stats;
        let fresh = Self::open_with(self.config.clone(), &self.opener)?;
        let lost = Lost { gone: stats.rx_full, ..fresh.lost };
        *self = Self { stats, lost, ..fresh };
        Ok(())
    }

    fn hand_over(&mut self) -> std::io::Result<Option<HandOver>> {
        let Config { multi_queue, vnet_hdr, .. } = self.config;
        let numbers = [multi_queue.into(), vnet_hdr.into(), self.lost.before, self.lost.gone];
        Ok(Some(HandOver::of(self.opener.claim()?, vec![self.device.try_clone()?], &numbers)))
    }

    fn continue_stats(&mut self, before: Stats) {
        self.stats = before;
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.refused.take(each);
    }

    fn stats(&mut self) -> Stats {
        if self.config.queue == 0
            && let Some(dropped) = dropped(&self.config.interface)
        {
            self.stats.rx_full = self.lost.gone + dropped.saturating_sub(self.lost.before);
        }
        self.stats
    }
}

/// Frames that the host sent to an interface and that were dropped before they were read: the fourth transmit column of
/// /proc/net/dev (proc_net(5)) of the calling thread's network namespace. The receive columns come first.
fn dropped(interface: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/net/dev").ok()?;
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(interface)?.strip_prefix(':'))?;
    line.split_whitespace().nth(8 + 3)?.parse().ok()
}

/// Writes one frame and counts it. A frame that the kernel refuses counts as dropped.
fn write(
    device: &OwnedFd,
    config: &Config,
    (stats, refused): (&mut Stats, &mut Refused),
    vnet: &[u8; VIRTIO_NET_HDR_LEN],
    bytes: &[u8],
) -> Result<(), (TxDrop, Error)> {
    loop {
        let written = match config.vnet_hdr {
            true => rustix::io::writev(device, &[IoSlice::new(vnet), IoSlice::new(bytes)]),
            false => rustix::io::write(device, bytes),
        };
        match written {
            Ok(_) => stats.count_sent(bytes.len()),
            Err(Errno::INTR) => continue,
            Err(errno) => {
                let reason = match errno {
                    // The interface is down.
                    Errno::IO => TxDrop::Down,
                    errno => TxDrop::from_errno(errno.raw_os_error()),
                };
                match reason {
                    // EBADFD: the interface was deleted. EINVAL: the frame has the wrong type, or its virtio_net_hdr is inconsistent.
                    TxDrop::Full | TxDrop::Down | TxDrop::Einval | TxDrop::Emsgsize => {
                        stats.count_tx_drop(reason, 1);
                        refused.keep(reason, bytes);
                    }
                    _ => {
                        return Err((
                            reason,
                            Error::Io { name: config.interface.clone(), source: errno.into() },
                        ));
                    }
                }
            }
        }
        return Ok(());
    }
}

/// Enables all offloads that the kernel supports.
fn offloads(device: BorrowedFd<'_>) -> std::io::Result<()> {
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    // USO needs Linux 6.2.
    sys::tun_offload(device, tcp | libc::TUN_F_USO4 | libc::TUN_F_USO6)
        .or_else(|_| sys::tun_offload(device, tcp))
}
