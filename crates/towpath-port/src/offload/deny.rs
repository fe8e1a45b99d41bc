//! The addresses whose packets the kernel drops, because a rule denies their source or destination.
//!
//! The maps have each address and network once for sources and once for destinations, with a bit for each rule that denies it. Each class of
//! packets at a port has the bits of its rules, in their order, and a counter for each: the first rule whose bit both have denies the packet.
//!
//! Consistency: the caller changes the maps only while the epoch of each port differs from the current one
//! ([`FlowMap::set_epoch`](super::FlowMap::set_epoch)). The programs read the epoch of the port before the maps, and the current one after them,
//! with barriers between. On this side, a fence orders the current epoch before the changes, also before the kernel's deletion of an
//! entry, which is a plain store; the release store of a port's epoch orders the changes before it.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use towpath_wire::End;

use crate::mapping::Mapping;
use crate::sys;

/// Limit on addresses, and on networks.
pub const DENIED_MAX: usize = 1 << 18;
/// Limit on ports, as in `bpf/offload.h`.
pub const DENYING_PORTS: u32 = 64;
/// Limit on rules.
pub const DENYING_RULES: usize = 32;
/// The classes of packets that a port has, as in `bpf/offload.h`: of IPv4 and IPv6, of TCP and UDP.
pub const DENYING_CLASSES: usize = 4;

/// Bytes of the entry of a class (`struct denying`).
const DENYING: usize = 32;
/// Its words: epoch, port, rules by sources and by destinations, flags and the Ethernet address.
const WORDS: usize = DENYING / 8;
const ROUTE: u16 = super::ROUTE as u16;
const ANY_VLAN: u16 = super::ANY_VLAN as u16;
/// Added to the family of a destination.
const DESTINATION: u32 = 0x100;

/// An address or a network, of sources or of destinations. In the order of these, the parts of a network follow it, before all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Net {
    end: End,
    six: bool,
    /// From the first bit on, also of an IPv4 address. The bits after `len` are 0.
    bits: u128,
    len: u8,
}

impl Net {
    /// The network of an address. A prefix length above that of the family counts as the longest one.
    pub fn new(end: End, address: IpAddr, len: u8) -> Self {
        let (six, bits, max) = match address {
            IpAddr::V4(ip) => (false, u128::from(ip.to_bits()) << 96, 32),
            IpAddr::V6(ip) => (true, ip.to_bits(), 128),
        };
        let len = len.min(max);
        Self { end, six, bits: bits & mask(len), len }
    }

    /// Which address of a packet is in the network.
    pub fn end(&self) -> End {
        self.end
    }

    /// The address and the prefix length.
    pub fn prefix(&self) -> (IpAddr, u8) {
        let address = match self.six {
            false => IpAddr::V4(((self.bits >> 96) as u32).into()),
            true => IpAddr::V6(self.bits.into()),
        };
        (address, self.len)
    }

    /// Returns true if all addresses of `other` are in this network.
    pub fn contains(&self, other: &Self) -> bool {
        (self.end, self.six) == (other.end, other.six)
            && self.len <= other.len
            && other.bits & mask(self.len) == self.bits
    }

    fn is_host(&self) -> bool {
        self.len == if self.six { 128 } else { 32 }
    }

    /// `struct address`.
    fn address(&self) -> [u8; 20] {
        let mut bytes = [0; 20];
        let end = if self.end == End::Destination { DESTINATION } else { 0 };
        bytes[..4].copy_from_slice(&(end + if self.six { 6 } else { 4 }).to_ne_bytes());
        bytes[4..].copy_from_slice(&self.bits.to_be_bytes());
        bytes
    }

    /// `struct prefix`.
    fn trie_key(&self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..4].copy_from_slice(&(32 + u32::from(self.len)).to_ne_bytes());
        bytes[4..].copy_from_slice(&self.address());
        bytes
    }
}

fn mask(len: u8) -> u128 {
    if len == 0 { 0 } else { u128::MAX << (128 - u32::from(len)) }
}

/// The packets of which interface and VLAN a port has, and which rules deny them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Denying {
    /// Index of the interface.
    pub ifindex: u32,
    /// The VLAN of tagged frames.
    pub vlan: Option<u16>,
    /// Also frames with a VLAN tag.
    pub any_vlan: bool,
    /// The bits of the rules, for each class of packets: IPv4 TCP, IPv4 UDP, IPv6 TCP, IPv6 UDP.
    pub rules: [u32; DENYING_CLASSES],
    /// The bits of the rules that deny a destination.
    pub destinations: u32,
    /// Of a router: the address of the interface. Frames for another one are not dropped.
    pub own: Option<[u8; 6]>,
}

impl Denying {
    /// `struct port`.
    fn port(&self) -> [u8; 8] {
        let vlan = self.vlan.map_or(0, |vlan| u32::from(vlan & 0xfff) | 0x8000);
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&self.ifindex.to_ne_bytes());
        bytes[4..].copy_from_slice(&vlan.to_ne_bytes());
        bytes
    }
}

/// The engine's side of the maps.
#[derive(Debug)]
pub struct DenyMap {
    hosts: OwnedFd,
    nets: OwnedFd,
    ports: OwnedFd,
    denying: Mapping,
    denied: OwnedFd,
    cpus: usize,
}

impl DenyMap {
    pub(super) fn new([hosts, nets, ports, denying, denied]: [OwnedFd; 5], cpus: usize) -> io::Result<Self> {
        let denying = Mapping::of(denying.as_fd(), DENYING_PORTS as usize * DENYING_CLASSES * DENYING, 0)?;
        Ok(Self { hosts, nets, ports, denying, denied, cpus })
    }

    /// Writes addresses and networks, each with the bits of the rules that deny it.
    ///
    /// # Errors
    /// Errors of bpf(2): without room, ENOSPC or E2BIG. Part of the entries may be written then.
    pub fn write(&self, entries: &[(Net, u32)]) -> io::Result<()> {
        fence(Ordering::SeqCst);
        let (hosts, nets): (Vec<_>, Vec<_>) = entries.iter().partition(|(net, _)| net.is_host());
        let rules = |entries: &[(Net, u32)]| -> Vec<u8> {
            entries.iter().flat_map(|(_, rules)| rules.to_ne_bytes()).collect()
        };
        if !hosts.is_empty() {
            let keys: Vec<u8> = hosts.iter().flat_map(|(net, _)| net.address()).collect();
            sys::bpf_update_batch(self.hosts.as_fd(), &keys, 20, &rules(&hosts), 4).1?;
        }
        if !nets.is_empty() {
            let keys: Vec<u8> = nets.iter().flat_map(|(net, _)| net.trie_key()).collect();
            sys::bpf_update_batch(self.nets.as_fd(), &keys, 24, &rules(&nets), 4).1?;
        }
        Ok(())
    }

    /// Removes addresses and networks.
    ///
    /// # Errors
    /// Errors of bpf(2). An entry that does not exist is none.
    pub fn remove(&self, nets: &[Net]) -> io::Result<()> {
        fence(Ordering::SeqCst);
        for net in nets {
            absent(match net.is_host() {
                true => sys::bpf_delete(self.hosts.as_fd(), &net.address()),
                false => sys::bpf_delete(self.nets.as_fd(), &net.trie_key()),
            })?;
        }
        Ok(())
    }

    /// Makes `index` the entry of a port, with counters that continue. It has an effect from [`renew`](Self::renew) on.
    ///
    /// # Errors
    /// Errors of bpf(2).
    pub fn add_port(&self, index: u32, denying: Denying) -> io::Result<()> {
        let Denying { any_vlan, rules, destinations, own, .. } = denying;
        let flags = u16::from(own.is_some()) * ROUTE + u16::from(any_vlan) * ANY_VLAN;
        for (class, rules) in rules.into_iter().enumerate() {
            let words = self.words(index, class);
            words[0].store(0, Ordering::Relaxed);
            let mut bytes = [0; DENYING - 8];
            bytes[..8].copy_from_slice(&denying.port());
            bytes[8..12].copy_from_slice(&(rules & !destinations).to_ne_bytes());
            bytes[12..16].copy_from_slice(&(rules & destinations).to_ne_bytes());
            bytes[16..18].copy_from_slice(&flags.to_ne_bytes());
            bytes[18..24].copy_from_slice(&own.unwrap_or_default());
            for (word, bytes) in words[1..].iter().zip(bytes.as_chunks().0) {
                word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
        }
        sys::bpf_update_batch(self.ports.as_fd(), &denying.port(), 8, &index.to_ne_bytes(), 4).1
    }

    /// The entry of a port applies in an epoch.
    pub fn renew(&self, index: u32, epoch: u64) {
        (0..DENYING_CLASSES).for_each(|class| self.words(index, class)[0].store(epoch, Ordering::Release));
    }

    /// Removes the entry of a port. It may be used again when no program can still have read it: after a second.
    ///
    /// # Errors
    /// Errors of bpf(2). An entry that does not exist is none.
    pub fn remove_port(&self, index: u32, denying: Denying) -> io::Result<()> {
        self.renew(index, 0);
        absent(sys::bpf_delete(self.ports.as_fd(), &denying.port()))
    }

    /// Packets of a class and their bytes that a rule has denied at a port.
    ///
    /// # Errors
    /// Errors of bpf(2).
    pub fn counts(&self, index: u32, class: usize, rule: usize) -> io::Result<[u64; 2]> {
        let mut values = vec![0; 2 * self.cpus];
        let number = entry(index, class) * DENYING_RULES + rule;
        sys::bpf_lookup_words(self.denied.as_fd(), number as u32, &mut values)?;
        let sum = values
            .as_chunks::<2>()
            .0
            .iter()
            .fold([0; 2], |sum: [u64; 2], it| [sum[0] + it[0], sum[1] + it[1]]);
        Ok(sum)
    }

    fn words(&self, index: u32, class: usize) -> &[std::sync::atomic::AtomicU64] {
        self.denying.words(entry(index, class) * DENYING, WORDS)
    }
}

/// The position of the entry of a class.
fn entry(index: u32, class: usize) -> usize {
    index as usize * DENYING_CLASSES + class
}

fn absent(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nets_have_the_layout_and_the_order_of_the_program() {
        let net = |address: &str, len| Net::new(End::Source, address.parse().unwrap(), len);
        let four = net("10.1.2.3", 24);
        assert_eq!(four.trie_key()[..4], 56_u32.to_ne_bytes());
        assert_eq!(four.trie_key()[4..8], 4_u32.to_ne_bytes());
        assert_eq!(four.trie_key()[8..], [10, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(net("2001:db8::1", 128).address()[4..8], [0x20, 1, 0xd, 0xb8]);
        assert_eq!(four.prefix(), ([10, 1, 2, 0].into(), 24));
        let to = Net::new(End::Destination, [10, 1, 2, 3].into(), 24);
        assert_eq!(
            (to.trie_key()[4..8].to_vec(), to.end()),
            (0x104_u32.to_ne_bytes().to_vec(), End::Destination)
        );
        assert!(to.trie_key()[8..] == four.trie_key()[8..] && !net("10.0.0.0", 8).contains(&to));
        assert!(net("10.0.0.0", 8).contains(&four) && !four.contains(&net("10.0.0.0", 8)));
        assert!(net("0.0.0.0", 0).contains(&four) && !net("::", 0).contains(&four));
        let mut nets = [four, net("10.0.0.0", 8), net("10.1.2.0", 32), net("::", 0), net("0.0.0.0", 0)];
        nets.sort_unstable();
        assert_eq!(nets, [net("0.0.0.0", 0), net("10.0.0.0", 8), four, net("10.1.2.0", 32), net("::", 0)]);
        let port = Denying { ifindex: 0x0102_0304, vlan: Some(5), ..Denying::default() }.port();
        assert_eq!(
            (&port[..4], &port[4..]),
            (&0x0102_0304_u32.to_ne_bytes()[..], &0x8005_u32.to_ne_bytes()[..])
        );
    }
}
