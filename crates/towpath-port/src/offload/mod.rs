//! Flow offload: the kernel forwards packets of flows that are decided.
//!
//! The kernel's part is `bpf/offload.bpf.c`: a filter of the packet sockets and a program at the tc ingress hook of each `af_packet`
//! port, and `bpf/offload_xdp.bpf.c`: the XDP program of each `af_xdp` port. They share a map of flows. An entry names a slot with the egress interface, the Ethernet addresses of a route, and counters.
//! The slots are mapped into the engine's memory: counters are read, and an entry is ended, without a system call.
//!
//! A frame that matches an entry is redirected, and no socket of the engine receives it. All other frames take the path that
//! they take without offload. Never redirected: TCP segments with SYN, FIN or RST or without ACK, fragments, IPv4 options, IPv6
//! extension headers, malformed packets, protocols other than TCP and UDP, packets above the MTU of the egress interface (of a frame
//! to be segmented, its segments); on a route, also packets whose hop limit expires, and frames for another Ethernet address. XDP programs
//! leave frames to the engine that are to be segmented, or whose checksum is to be completed.
//!
//! When the engine is killed, the entries end with it, or stay until their lifetime ends ([`Flows::outlive`]): the link of the program is then
//! pinned, and the program decides without a socket once the [heartbeat](FlowMap::beat) is old.
//!
//! An entry belongs to an epoch. A change of the epoch ([`FlowMap::set_epoch`]) ends all entries with one store to memory.
//!
//! Privileges: loading and attaching need CAP_BPF and CAP_NET_ADMIN. The engine needs none: since Linux 5.19, a map is changed by the
//! right to its descriptor, also with `kernel.unprivileged_bpf_disabled`. Needs tcx links (Linux 6.6).
//!
//! Not supported: IPv6 link-local addresses, tunnels, frames with several VLAN tags.

pub mod deny;
mod program;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use towpath_metrics::metrics;

use self::deny::DenyMap;
pub(crate) use self::program::{Xdp, attach, load, load_xdp};
use crate::interface::Interface;
use crate::mapping::Mapping;
use crate::probe::{self, XdpFeatures};
use crate::{Error, LinkType, Object, Opener, State, sys};

/// Bytes of a key and of a slot (`struct key`, `struct slot`).
const KEY: usize = 44;
const SLOT: usize = 128;
/// The words of a slot: the epoch; the egress interface and its MTU; flags and Ethernet addresses; the counters.
const WORDS: usize = SLOT / 8;
const EPOCH: usize = 0;
const EGRESS: usize = 1;
const FLAGS: usize = 2;
const MACS: usize = 3;
const DEADLINE: usize = 4;
const LIFETIME: usize = 5;
const OWN: usize = 6;
const PACKETS: usize = 8;
const BYTES: usize = 9;
const ACK: usize = 10;
const RST: usize = 11;
/// `ROUTE`, `ANY_VLAN`, `ONE_BUFFER` and `DROP` of the C source.
const ROUTE: u32 = 1;
const ANY_VLAN: u32 = 2;
const ONE_BUFFER: u32 = 4;
const DROP: u32 = 8;
/// Entries of `stats`.
const STATS: u32 = 12;
/// Most entries.
pub const ENTRIES_MAX: u32 = 4 << 20;

/// Flow offload of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flows {
    /// Entries of the map, which all ports of a process share.
    pub entries: u32,
    /// Entries with a lifetime stay when the process is killed.
    pub outlive: bool,
    /// There is room for addresses whose packets are dropped ([`FlowMap::deny`]).
    pub deny: bool,
}

/// A flow in one direction, as its frames arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Source.
    pub src: IpAddr,
    /// Destination, of the same family.
    pub dst: IpAddr,
    /// Index of the ingress interface.
    pub ifindex: u32,
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// The VLAN of tagged frames.
    pub vlan: Option<u16>,
    /// IP protocol: TCP or UDP.
    pub proto: u8,
}

impl FlowKey {
    fn to_bytes(self) -> [u8; KEY] {
        let mut bytes = [0; KEY];
        let family = match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                bytes[..4].copy_from_slice(&src.octets());
                bytes[16..20].copy_from_slice(&dst.octets());
                4
            }
            (src, dst) => {
                let six = |ip: IpAddr| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                bytes[..16].copy_from_slice(&six(src).octets());
                bytes[16..32].copy_from_slice(&six(dst).octets());
                6
            }
        };
        bytes[32..36].copy_from_slice(&self.ifindex.to_ne_bytes());
        bytes[36..38].copy_from_slice(&self.src_port.to_be_bytes());
        bytes[38..40].copy_from_slice(&self.dst_port.to_be_bytes());
        bytes[40..42].copy_from_slice(&self.vlan.map_or(0, |vlan| vlan & 0xfff | 0x8000).to_ne_bytes());
        bytes[42] = self.proto;
        bytes[43] = family;
        bytes
    }
}

/// What the kernel does with the frames of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Redirect {
    /// Index of the egress interface.
    pub ifindex: u32,
    /// Its MTU.
    pub mtu: u32,
    /// Also frames with a VLAN tag, which they keep. For keys without a VLAN.
    pub any_vlan: bool,
    /// The interface takes no frames of several buffers from native XDP programs.
    pub one_buffer: bool,
    /// The frames are dropped. The interface and its MTU do not count.
    pub drop: bool,
    /// Of a routed packet. Its hop limit is decremented.
    pub route: Option<Route>,
}

/// The Ethernet addresses of a routed packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Its new destination.
    pub to: [u8; 6],
    /// Its new source.
    pub from: [u8; 6],
    /// The address of the ingress interface, to which it was sent. XDP programs compare it; the kernel does for others.
    pub own: [u8; 6],
}

/// The counters of an entry since it was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Frames that were redirected. A frame to be segmented counts once.
    pub packets: u64,
    /// The length of their IP packets.
    pub bytes: u64,
    /// The last TCP acknowledgement number; 0: none.
    pub ack: u32,
    /// The last RST, which the engine received: sequence number, acknowledgement number, and TCP flags.
    pub rst: Option<(u32, u32, u8)>,
    /// The entry has not ended: neither the engine nor a SYN has ended it.
    pub in_use: bool,
}

metrics! {
    /// Packets at the offload programs.
    pub struct PathStats in "offload" {
        /// Frames that the kernel forwarded.
        pub forwarded_packets: counter packets,
        /// Bytes of the IP packets in these frames.
        pub forwarded_bytes: counter bytes,
        /// Frames that the kernel dropped: of blocked flows, and of addresses that a rule denies.
        pub dropped_packets: counter packets,
        /// Bytes of the IP packets in these frames.
        pub dropped_bytes: counter bytes,
        /// Frames of flows without an entry.
        pub no_entry: counter packets as "missed": "Frames that took the path through the engine, by reason." (reason = "no_entry"),
        /// Frames of an entry that a change has ended.
        pub stale: counter packets as "missed" (reason = "stale"),
        /// TCP segments with SYN, FIN or RST, or without ACK.
        pub control: counter packets as "missed" (reason = "control"),
        /// Frames that are no plain TCP or UDP packets: fragments, options, other protocols.
        pub not_plain: counter packets as "missed" (reason = "not_plain"),
        /// Packets whose hop limit expires.
        pub ttl: counter packets as "missed" (reason = "ttl"),
        /// Packets above the MTU of the egress interface.
        pub mtu: counter packets as "missed" (reason = "mtu"),
        /// Frames of a routed flow for another Ethernet address.
        pub other_host: counter packets as "missed" (reason = "other_host"),
        /// Frames at an XDP program whose checksum the sender has left to the interface.
        pub partial: counter packets as "missed" (reason = "partial"),
    }
}

/// The engine's side of the flow map.
#[derive(Debug)]
pub struct FlowMap {
    flows: OwnedFd,
    stats: OwnedFd,
    slots: Mapping,
    epoch: Mapping,
    capacity: u32,
    cpus: usize,
    deny: DenyMap,
    /// While it is open, the filters of the sockets can continue with the program for flows.
    _filters: OwnedFd,
}

impl FlowMap {
    /// Opens the map of the process that `opener` asks. `entries` is the number of directions that it has room for.
    ///
    /// # Errors
    /// The reason in words, for the operator.
    pub fn open(opener: &Opener, entries: u32) -> Result<Self, String> {
        let failed = |error: io::Error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                "this process may not load BPF programs: run as root outside of any user namespace".to_owned()
            }
            Some(sys::REFUSED_BY_VERIFIER) => sys::REFUSED_IN_WORDS.to_owned(),
            Some(libc::EINVAL) => format!("the kernel refuses the programs ({error}): it needs Linux 6.6"),
            Some(libc::ENOMEM) => format!("no memory for {entries} entries: write fewer"),
            _ => format!("the programs cannot be loaded: {error}"),
        };
        let [flows, slots, epoch, stats, filters, hosts, nets, ports, denying, denied] =
            opener.open_all(&Object::FlowMap { engine: std::process::id() }).map_err(failed)?;
        let bytes = (entries as usize * SLOT).next_multiple_of(4096);
        let slots = Mapping::of(slots.as_fd(), bytes, 0).map_err(failed)?;
        let epoch = Mapping::of(epoch.as_fd(), 4096, 0).map_err(failed)?;
        let cpus = possible_cpus().map_err(failed)?;
        let deny = DenyMap::new([hosts, nets, ports, denying, denied], cpus).map_err(failed)?;
        Ok(Self { flows, stats, slots, epoch, capacity: entries, cpus, deny, _filters: filters })
    }

    /// The number of slots.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The current epoch.
    pub fn epoch(&self) -> u64 {
        // Acquire: pairs with `set_epoch`.
        self.epoch.word().load(Ordering::Acquire)
    }

    /// Changes the epoch by a function of the current one. Entries of another epoch end at once.
    pub fn set_epoch(&self, mut change: impl FnMut(u64) -> u64) {
        // AcqRel: a thread that sees the new epoch sees the change that it stands for. The programs read the word once for each frame.
        let _ = self.epoch.word().fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| Some(change(now)));
    }

    /// The addresses whose packets are dropped at a port.
    pub fn deny(&self) -> &DenyMap {
        &self.deny
    }

    /// So many ports have rules that deny an address. Without any, the programs do not look addresses up.
    pub fn set_denying_ports(&self, ports: usize) {
        self.epoch.words(16, 1)[0].store(ports as u64, Ordering::Relaxed);
    }

    /// The process lives. Call it at least every 20 ms if entries outlive it.
    pub fn beat(&self) {
        self.epoch.words(8, 1)[0].store(monotonic(), Ordering::Relaxed);
    }

    /// The entry stays for `lifetime` from now if the process is killed. Call it when a packet has refreshed the flow. Each packet that the
    /// kernel then forwards begins the longest of these times again.
    pub fn outlive(&self, slot: u32, lifetime: Duration) {
        let words = self.words(slot);
        let lifetime = u64::try_from(lifetime.as_nanos()).unwrap_or(u64::MAX / 2);
        words[LIFETIME].fetch_max(lifetime, Ordering::Relaxed);
        words[DEADLINE].store(monotonic().saturating_add(lifetime), Ordering::Relaxed);
    }

    /// Writes a slot that no entry uses, with counters of 0. The entry ends with the process.
    pub fn write(&self, slot: u32, redirect: Redirect, epoch: u64) {
        let words = self.words(slot);
        // Relaxed: the entry is written to the map after this, by a system call.
        let put = |at: usize, word: u64| words[at].store(word, Ordering::Relaxed);
        (PACKETS..WORDS).chain([DEADLINE, LIFETIME]).for_each(|at| put(at, 0));
        self.redirect(slot, redirect);
        words[EPOCH].store(epoch, Ordering::Release);
    }

    /// Continues an entry in another epoch if it has this redirect. Returns false if it has another one.
    pub fn renew(&self, slot: u32, redirect: Redirect, epoch: u64) -> bool {
        let words = self.words(slot);
        let same =
            redirect_words(redirect).into_iter().all(|(at, word)| words[at].load(Ordering::Relaxed) == word);
        if same {
            words[EPOCH].store(epoch, Ordering::Release);
        }
        same
    }

    fn redirect(&self, slot: u32, redirect: Redirect) {
        let words = self.words(slot);
        redirect_words(redirect).into_iter().for_each(|(at, word)| words[at].store(word, Ordering::Relaxed));
    }

    /// Adds entries, each with its slot. Returns how many were added, and the error of the next one.
    pub fn insert(&self, entries: &[(FlowKey, u32)]) -> (usize, io::Result<()>) {
        let keys: Vec<u8> = entries.iter().flat_map(|(key, _)| key.to_bytes()).collect();
        let slots: Vec<u8> = entries.iter().flat_map(|(_, slot)| slot.to_ne_bytes()).collect();
        sys::bpf_update_batch(self.flows.as_fd(), &keys, KEY, &slots, 4)
    }

    /// Ends an entry: its next frame takes the path through the engine. The slot keeps its counters.
    pub fn end(&self, slot: u32) {
        self.words(slot)[EPOCH].store(0, Ordering::Release);
    }

    /// Removes an entry from the map. Its slot may be used again when no program can still have read it: after a second.
    ///
    /// # Errors
    /// Errors of bpf(2). An entry that does not exist is none.
    pub fn remove(&self, key: &FlowKey) -> io::Result<()> {
        match sys::bpf_delete(self.flows.as_fd(), &key.to_bytes()) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
            _ => Ok(()),
        }
    }

    /// The counters of a slot.
    pub fn counts(&self, slot: u32) -> FlowCounts {
        let words = self.words(slot);
        // Relaxed: each number is independent.
        let get = |at: usize| words[at].load(Ordering::Relaxed);
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let ([ack, seq], [rst_ack, flags]) = (halves(get(ACK)), halves(get(RST)));
        let number = u32::from_be;
        let rst = (flags != 0).then(|| (number(seq), number(rst_ack), flags as u8));
        let (packets, bytes) = (get(PACKETS), get(BYTES));
        FlowCounts { packets, bytes, ack: number(ack), rst, in_use: get(EPOCH) != 0 }
    }

    /// The counters of all frames.
    ///
    /// # Errors
    /// Errors of bpf(2).
    pub fn stats(&self) -> io::Result<PathStats> {
        let mut sums = [0; STATS as usize];
        for (index, sum) in (0..STATS).zip(&mut sums) {
            let mut values = vec![0_u64; self.cpus];
            sys::bpf_lookup_words(self.stats.as_fd(), index, &mut values)?;
            *sum = values.iter().sum();
        }
        let [
            forwarded_packets,
            forwarded_bytes,
            no_entry,
            stale,
            control,
            not_plain,
            ttl,
            mtu,
            other_host,
            partial,
            dropped_packets,
            dropped_bytes,
        ] = sums;
        Ok(PathStats {
            forwarded_packets,
            forwarded_bytes,
            no_entry,
            stale,
            control,
            not_plain,
            ttl,
            mtu,
            other_host,
            partial,
            dropped_packets,
            dropped_bytes,
        })
    }

    fn words(&self, slot: u32) -> &[AtomicU64] {
        self.slots.words(slot as usize * SLOT, WORDS)
    }
}

/// The words that a redirect sets, with their positions.
fn redirect_words(
    Redirect { ifindex, mtu, any_vlan, one_buffer, drop, route }: Redirect,
) -> [(usize, u64); 4] {
    let Route { to, from, own } = route.unwrap_or_default();
    let flags = [(route.is_some(), ROUTE), (any_vlan, ANY_VLAN), (one_buffer, ONE_BUFFER), (drop, DROP)];
    let flags: u32 = flags.into_iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
    let mut bytes = [0; 24];
    bytes[..4].copy_from_slice(&flags.to_ne_bytes());
    bytes[4..10].copy_from_slice(&to);
    bytes[10..16].copy_from_slice(&from);
    bytes[16..22].copy_from_slice(&own);
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[8 * at..8 * at + 8]);
        u64::from_ne_bytes(word)
    };
    [(EGRESS, u64::from(ifindex) | u64::from(mtu) << 32), (FLAGS, word(0)), (MACS, word(1)), (OWN, word(2))]
}

/// The programs on one interface. Dropping it detaches the program at the ingress hook.
#[derive(Debug)]
pub(crate) struct Attached {
    link: OwnedFd,
    filter: OwnedFd,
    /// The link stays when the process is killed.
    pub(crate) is_pinned: bool,
}

impl Attached {
    /// Attaches the programs to the interface of the opener's port.
    pub(crate) fn open(opener: &Opener) -> io::Result<Self> {
        let mut descriptors = opener.open(&Object::FlowProgram { engine: std::process::id() })?.into_iter();
        let mut next = || descriptors.next().ok_or(io::ErrorKind::InvalidData);
        Ok(Self { link: next()?, filter: next()?, is_pinned: next().is_ok() })
    }

    /// Returns true if the program is attached to the interface `index`.
    pub(crate) fn is_on(&self, index: u32) -> bool {
        sys::bpf_link_interface(self.link.as_fd()).is_ok_and(|on| on == Some(index))
    }

    /// Makes the filter decide on the frames of a socket.
    pub(crate) fn filter(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        sys::set(socket, libc::SOL_SOCKET, sys::SO_ATTACH_BPF, &[self.filter.as_raw_fd() as u32])
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // A pinned link would stay. The file has no effect afterwards: the launcher removes it, or the next engine.
        if self.is_pinned {
            let _ = sys::bpf_detach(self.link.as_fd());
        }
    }
}

/// The time of CLOCK_MONOTONIC in nanoseconds, as bpf_ktime_get_ns has it.
fn monotonic() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// An interface, as offload needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its index.
    pub ifindex: u32,
    /// Its MTU.
    pub mtu: u32,
    /// Its Ethernet address.
    pub address: Option<[u8; 6]>,
    /// What its driver can do with XDP, where a native program redirects to it.
    pub xdp: Option<XdpFeatures>,
}

/// Reads the properties of interfaces, and learns when one changes.
#[derive(Debug)]
pub struct Links {
    control: OwnedFd,
    /// A netlink socket that receives the changes of links (RTMGRP_LINK).
    changes: OwnedFd,
}

impl Links {
    /// In the network namespace of the calling thread.
    ///
    /// # Errors
    /// Errors of socket(2) and bind(2).
    pub fn new() -> io::Result<Self> {
        let control = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
        let changes = sys::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE)?;
        sys::bind_netlink(changes.as_fd(), libc::RTMGRP_LINK as u32)?;
        Ok(Self { control, changes })
    }

    /// Returns true if the kernel has reported a change of a link since the last call. Does not block.
    pub fn changed(&self) -> bool {
        let mut changed = false;
        let mut buffer = [0; 8192];
        loop {
            match rustix::net::recv(&self.changes, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT) {
                Ok(_) => changed = true,
                // Changes were lost.
                Err(rustix::io::Errno::NOBUFS) => changed = true,
                Err(_) => return changed,
            }
        }
    }

    /// The interface of this name; `None` if it does not exist, is down, or is not of Ethernet.
    pub fn get(&self, name: &str) -> Option<Link> {
        let found: Result<Interface, Error> = Interface::find(&self.control, name);
        let found = found.ok().filter(|it| it.state == State::Up && it.link == LinkType::ETHERNET)?;
        Some(Link { ifindex: found.index, mtu: found.mtu, address: found.address, xdp: None })
    }

    /// What the drivers can do with XDP, by index of the interface; empty before Linux 6.3.
    pub fn xdp_features(&self) -> HashMap<u32, XdpFeatures> {
        probe::xdp_features().unwrap_or_default()
    }
}

/// The number of values in an entry of a per-CPU map.
fn possible_cpus() -> io::Result<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    // Ranges: "0-3", "0,2-3".
    let last = text.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<usize>().ok());
    last.map(|last| last + 1).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests;
