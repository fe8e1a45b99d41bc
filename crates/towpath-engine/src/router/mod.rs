//! A router and its neighbors on Ethernet links: ARP (RFC 826) for IPv4, neighbor discovery (RFC 4861) for IPv6.
//!
//! ```text
//! who looks for us      answer.rs     the answer
//! whom we look for      table.rs      what is known of each, and when to ask: no IO, one for all threads
//!                       ask.rs        the requests, and what answers to them have to be like
//!                       resolver.rs   a thread's copy of what is known, and its packets that wait
//! ```

mod arp_nd_reply;
mod arp_nd_solicit;
mod fib;
mod neighbor_table;
mod resolver;

use std::net::Ipv6Addr;

use towpath_wire::proto;

pub(crate) use arp_nd_reply::answer;
pub use fib::{Fib, Route, mtu};
pub(crate) use fib::{ForwardError, fragment, is_group, is_own};
pub(crate) use resolver::Resolution;
pub use resolver::{Directory, NeighborSnapshot, Resolver};

/// Bytes of an Ethernet header, and of IPv6's (RFC 8200 section 3).
const ETHERNET: usize = 14;
const IPV6: usize = 40;

/// RFC 4861 sections 4.3 and 4.4: the messages and their lengths without options.
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const MESSAGE: usize = 24;

/// RFC 4861 section 4.4: "I'm a router", "it answers a solicitation", "it replaces what you know".
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// RFC 4861 section 4.6.1: options, which say their length in units of 8 bytes.
const SOURCE_LINK_ADDRESS: u8 = 1;
const TARGET_LINK_ADDRESS: u8 = 2;

/// The Ethernet address in an option of this kind; `None` when the options are not whole ("All included options have a length that
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

/// Where a solicitation for an address is sent to (RFC 4291 section 2.7.1).
fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    let low = u16::from_be_bytes([b, c]);
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), low)
}

/// The ones' complement sum of a message and its pseudo header (RFC 4443 section 2.3): 0xffff when the checksum in it is right.
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
