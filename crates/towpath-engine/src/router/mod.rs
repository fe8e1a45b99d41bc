//! The router: forwarding table, link headers, fragmentation, and neighbors on Ethernet links by ARP (RFC 826) and neighbor
//! discovery (RFC 4861).
//!
//! ```text
//! fib.rs              route lookup; TTL, link header and MTU of a forwarded packet
//! arp_nd_reply.rs     replies to requests for the router's addresses
//! arp_nd_solicit.rs   requests for neighbors, and the replies to them
//! neighbor_table.rs   the states of the neighbors: no IO, one table for all threads
//! resolver.rs         a thread's copy of the table, and its packets that wait for a neighbor
//! ```

mod arp_nd_reply;
mod arp_nd_solicit;
mod fib;
mod neighbor_table;
mod resolver;

use std::net::Ipv6Addr;

use towpath_wire::proto;

pub use crate::meta::{Adjacency, NextHop};
pub(crate) use arp_nd_reply::reply as arp_nd_reply;
pub use fib::{Fib, Route, mtu};
pub(crate) use fib::{forward, fragment, is_for, is_multicast, needs_fragmentation};
pub(crate) use resolver::Resolution;
pub use resolver::{Directory, NeighborSnapshot, Resolver};

/// Bytes of an Ethernet header and of an IPv6 header (RFC 8200 section 3).
const ETHERNET: usize = 14;
const IPV6: usize = 40;

/// RFC 4861 sections 4.3 and 4.4: the message types, and their length without options.
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const MESSAGE: usize = 24;

/// RFC 4861 section 4.4: the flags of an advertisement.
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// RFC 4861 section 4.6.1: options. Their length is in units of 8 bytes.
const SOURCE_LINK_ADDRESS: u8 = 1;
const TARGET_LINK_ADDRESS: u8 = 2;

/// The Ethernet address in an option of this kind. `None` if the options are malformed ("All included options have a length that
/// is greater than zero").
fn link_address(mut options: &[u8], kind: u8) -> Option<Option<[u8; 6]>> {
    let mut found = None;
    while let [this, units, ..] = *options {
        let len = usize::from(units) * 8;
        let option = options.get(..len).filter(|_| len > 0)?;
        if this == kind && len == 8 {
            found = option[2..].first_chunk().copied();
        }
        options = &options[len..];
    }
    options.is_empty().then_some(found)
}

/// The solicited-node multicast address (RFC 4291 section 2.7.1).
fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    let low = u16::from_be_bytes([b, c]);
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), low)
}

/// The ones' complement sum of a message and its pseudo header (RFC 4443 section 2.3): 0xffff if its checksum is correct.
fn icmp6_sum(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> u16 {
    let word = |pair: &[u8]| u64::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
    let words = |bytes: &[u8]| bytes.chunks(2).map(word).sum::<u64>();
    let mut sum = words(&from.octets()) + words(&to.octets()) + words(message);
    sum += message.len() as u64 + u64::from(proto::ICMP6);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
