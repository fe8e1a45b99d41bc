//! The packets of an exclusive port that stay with this machine's network stack: the key `host`.
//!
//! ```text
//! "arp"                             ARP
//! "nd"                              IPv6 neighbor and router discovery (ICMPv6 types 133 to 137)
//! "dhcp"                            replies to the DHCP clients of the machine
//! "icmp"                            ICMP and ICMPv6 to the interface's addresses
//! "ssh"                             tcp from any to me 22
//! "PROTOCOL from SOURCE [PORTS] to DESTINATION [PORTS]"
//! ```
//!
//! PROTOCOL is `ip`, `tcp`, `udp`, `icmp` or `icmp6`; SOURCE is `any`, an address or a prefix; DESTINATION is `me` or an address.
//! `me` stands for the addresses that the interface has in the kernel. PORTS are numbers and ranges: `22,8000-8080`.
//!
//! The network stack gets a matching packet. If the packet is for an address of the machine, the port does not; ARP, `nd` and
//! `dhcp` go to both, because other machines behind a bridge need them too. Never matched: packets with a VLAN tag, packets to another
//! Ethernet address, ports of fragments after the first, and of IPv6 packets with extension headers.
//!
//! `Filter::compile` makes a BPF program of it, for the ingress hook and for the packet socket.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;

use crate::bpf_asm::{Asm, Cond, Label, Reg, Size};

/// Limit on the entries of a list.
const ENTRIES_MAX: usize = 32;
/// Limit on the addresses that `me` stands for.
const ADDRESSES_MAX: usize = 64;

/// linux/if_ether.h.
const ETH_P_IP: u16 = 0x0800;
const ETH_P_ARP: u16 = 0x0806;
const ETH_P_IPV6: u16 = 0x86dd;
/// linux/in.h, linux/in6.h.
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// linux/if_packet.h.
const PACKET_OTHERHOST: u32 = 3;
/// Offsets in struct __sk_buff (linux/bpf.h).
const SKB_PKT_TYPE: i16 = 4;
const SKB_PROTOCOL: i16 = 16;
const SKB_VLAN_PRESENT: i16 = 20;
/// enum bpf_func_id.
const KTIME_GET_NS: i32 = 5;
const SKB_LOAD_BYTES: i32 = 26;
const TAIL_CALL: i32 = 12;
/// Offsets from the frame pointer: the IP header, and the first four bytes after it.
const IP: i16 = -64;
const L4: i16 = -8;

/// The age of a heartbeat at which the port counts as ended, in nanoseconds.
pub(crate) const SILENCE: i32 = 1_000_000_000;

/// A list of packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// The entries as they are written.
    texts: Vec<String>,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Arp,
    Nd,
    Dhcp,
    Ip(Packets),
}

/// IP packets to this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Packets {
    /// Protocols, one of which matches; empty: any.
    protocols: Vec<u8>,
    /// A prefix; `None`: any.
    source: Option<(IpAddr, u8)>,
    /// An address; `None`: `me`.
    destination: Option<IpAddr>,
    source_ports: Vec<RangeInclusive<u16>>,
    ports: Vec<RangeInclusive<u16>>,
}

/// What a program does with its packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Actions {
    /// The result for packets that stay with the stack alone.
    pub(crate) host: i32,
    /// The result for packets that go to both.
    pub(crate) both: i32,
    /// The result for all other packets.
    pub(crate) port: i32,
}

impl Filter {
    /// Parses the entries of a list.
    ///
    /// # Errors
    /// The entry that is wrong, and what it can be.
    pub fn parse<'t>(list: impl IntoIterator<Item = &'t str>) -> Result<Self, String> {
        let texts: Vec<String> = list.into_iter().map(str::to_owned).collect();
        let entries = texts.iter().map(|text| Entry::parse(text)).collect::<Result<Vec<_>, _>>()?;
        if entries.len() > ENTRIES_MAX {
            return Err(format!("more than {ENTRIES_MAX} entries"));
        }
        Ok(Self { texts, entries })
    }

    /// The entries as they are written.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.texts.iter().map(String::as_str)
    }

    /// Returns true if the list is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns true if an entry depends on the interface's addresses.
    pub(crate) fn has_me(&self) -> bool {
        self.entries.iter().any(|entry| matches!(entry, Entry::Ip(Packets { destination: None, .. })))
    }

    /// Compiles the program for frames with a link header of `header` bytes. `me`: the interface's addresses. `heartbeat`: a map whose first
    /// value is a time of CLOCK_MONOTONIC in nanoseconds; the network stack gets all packets when it is older than [`SILENCE`].
    pub(crate) fn compile(
        &self,
        header: i32,
        me: &[IpAddr],
        actions: Actions,
        heartbeat: Option<BorrowedFd<'_>>,
    ) -> Vec<u64> {
        self.compile_with(header, me, actions, heartbeat, None)
    }

    /// As [`compile`](Self::compile). Packets that the port gets continue with the first program of the array `then`. The list is not
    /// empty.
    pub(crate) fn compile_before(
        &self,
        header: i32,
        me: &[IpAddr],
        actions: Actions,
        then: BorrowedFd<'_>,
    ) -> Vec<u64> {
        self.compile_with(header, me, actions, None, Some(then))
    }

    fn compile_with(
        &self,
        header: i32,
        me: &[IpAddr],
        actions: Actions,
        heartbeat: Option<BorrowedFd<'_>>,
        then: Option<BorrowedFd<'_>>,
    ) -> Vec<u64> {
        let asm = &mut Asm::default();
        let (host, both, miss) = (asm.label(), asm.label(), asm.label());
        if let Some(map) = heartbeat {
            asm.copy(Reg::R6, Reg::R1);
            asm.map_value(Reg::R2, map);
            asm.load(Size::Double, Reg::R7, Reg::R2, 0);
            asm.call(KTIME_GET_NS);
            asm.subtract(Reg::R0, Reg::R7);
            asm.goto_if_above(Reg::R0, SILENCE, host);
            asm.copy(Reg::R1, Reg::R6);
        }
        if !self.entries.is_empty() {
            read_headers(asm, header, miss);
        }
        for entry in &self.entries {
            entry.compile(asm, &me[..me.len().min(ADDRESSES_MAX)], (host, both));
        }
        asm.bind(miss);
        let exit = |asm: &mut Asm, action, is_host: bool| {
            if let Some(then) = then.filter(|_| !is_host) {
                asm.copy(Reg::R1, Reg::R6);
                asm.map(Reg::R2, then);
                asm.set(Reg::R3, 0);
                // Returns only if the array has no program.
                asm.call(TAIL_CALL);
            }
            asm.exit(action);
        };
        exit(asm, actions.port, false);
        for (label, action, is_host) in [(both, actions.both, false), (host, actions.host, true)] {
            // The verifier refuses code that cannot be reached.
            if asm.is_used(label) {
                asm.bind(label);
                exit(asm, action, is_host);
            }
        }
        std::mem::take(asm).finish()
    }
}

/// Reads the headers: R7 has the EtherType in network byte order, R9 the IP protocol. The stack has the IP header and the first four
/// bytes after it, which are 0 if they are unknown.
fn read_headers(asm: &mut Asm, header: i32, miss: Label) {
    let (v4, v6, after_ip, done) = (asm.label(), asm.label(), asm.label(), asm.label());
    asm.copy(Reg::R6, Reg::R1);
    asm.load(Size::Word, Reg::R2, Reg::R6, SKB_PKT_TYPE);
    asm.goto_if(Reg::R2, Cond::Eq, PACKET_OTHERHOST, miss);
    asm.load(Size::Word, Reg::R2, Reg::R6, SKB_VLAN_PRESENT);
    asm.goto_if(Reg::R2, Cond::NotEq, 0, miss);
    asm.load(Size::Word, Reg::R7, Reg::R6, SKB_PROTOCOL);
    asm.set(Reg::R8, 0);
    asm.set(Reg::R9, 0);
    for word in 0..5 {
        asm.store(Size::Double, Reg::R10, IP + 8 * word, 0);
    }
    asm.store(Size::Word, Reg::R10, L4, 0);
    asm.goto_if(Reg::R7, Cond::Eq, network(ETH_P_IP), v4);
    asm.goto_if(Reg::R7, Cond::Eq, network(ETH_P_IPV6), v6);
    asm.goto(done);

    asm.bind(v4);
    asm.set(Reg::R2, header);
    load_bytes(asm, IP, 20);
    asm.goto_if_negative(Reg::R0, miss);
    asm.load(Size::Byte, Reg::R8, Reg::R10, IP);
    asm.and(Reg::R8, 0x0f);
    asm.shift_left(Reg::R8, 2);
    asm.add(Reg::R8, header);
    asm.load(Size::Byte, Reg::R9, Reg::R10, IP + 9);
    // The offset of a fragment.
    asm.load(Size::Half, Reg::R2, Reg::R10, IP + 6);
    asm.and(Reg::R2, network(0x1fff));
    asm.goto_if(Reg::R2, Cond::NotEq, 0, done);
    asm.goto(after_ip);

    asm.bind(v6);
    asm.set(Reg::R2, header);
    load_bytes(asm, IP, 40);
    asm.goto_if_negative(Reg::R0, miss);
    asm.load(Size::Byte, Reg::R9, Reg::R10, IP + 6);
    asm.set(Reg::R8, header + 40);

    asm.bind(after_ip);
    asm.copy(Reg::R2, Reg::R8);
    // "On failure" the helper clears the memory: the ports are then 0, which no entry has.
    load_bytes(asm, L4, 4);
    asm.bind(done);
}

/// bpf_skb_load_bytes(R6, R2, R10 + to, len).
fn load_bytes(asm: &mut Asm, to: i16, len: i32) {
    asm.copy(Reg::R1, Reg::R6);
    asm.copy(Reg::R3, Reg::R10);
    asm.add(Reg::R3, to.into());
    asm.set(Reg::R4, len);
    asm.call(SKB_LOAD_BYTES);
}

impl Entry {
    fn parse(text: &str) -> Result<Self, String> {
        let to_me = |protocols: &[u8]| Packets { protocols: protocols.into(), ..Packets::default() };
        Ok(match text {
            "arp" => Self::Arp,
            "nd" => Self::Nd,
            "dhcp" => Self::Dhcp,
            "icmp" => Self::Ip(to_me(&[ICMP, ICMPV6])),
            "ssh" => Self::Ip(Packets { ports: vec![22..=22], ..to_me(&[TCP]) }),
            _ => Self::Ip(Packets::parse(text).map_err(|what| format!("`{text}`: {what}"))?),
        })
    }

    fn compile(&self, asm: &mut Asm, me: &[IpAddr], (host, both): (Label, Label)) {
        let next = asm.label();
        match self {
            Self::Arp => asm.goto_if(Reg::R7, Cond::Eq, network(ETH_P_ARP), both),
            Self::Nd => {
                asm.goto_if(Reg::R7, Cond::NotEq, network(ETH_P_IPV6), next);
                asm.goto_if(Reg::R9, Cond::NotEq, ICMPV6.into(), next);
                asm.load(Size::Byte, Reg::R2, Reg::R10, L4);
                asm.goto_if(Reg::R2, Cond::Less, 133, next);
                asm.goto_if(Reg::R2, Cond::Greater, 137, next);
                asm.goto(both);
            }
            Self::Dhcp => {
                asm.goto_if(Reg::R9, Cond::NotEq, UDP.into(), next);
                asm.load(Size::Half, Reg::R2, Reg::R10, L4 + 2);
                // RFC 2131 section 4.1, RFC 8415 section 7.2: the ports of clients.
                for (protocol, port) in [(ETH_P_IP, 68), (ETH_P_IPV6, 546)] {
                    let other = asm.label();
                    asm.goto_if(Reg::R7, Cond::NotEq, network(protocol), other);
                    asm.goto_if(Reg::R2, Cond::Eq, network(port), both);
                    asm.bind(other);
                }
            }
            Self::Ip(packets) => {
                let own = packets.destination.as_slice();
                for address in if own.is_empty() { me } else { own } {
                    packets.compile(asm, *address, host);
                }
            }
        }
        asm.bind(next);
    }
}

impl Packets {
    fn parse(text: &str) -> Result<Self, String> {
        const FORM: &str = "write \"arp\", \"nd\", \"dhcp\", \"icmp\", \"ssh\", or \"PROTOCOL from SOURCE [PORTS] to me [PORTS]\"";
        let mut words = text.split_ascii_whitespace().peekable();
        let protocols = match words.next() {
            Some("ip") => vec![],
            Some("tcp") => vec![TCP],
            Some("udp") => vec![UDP],
            Some("icmp") => vec![ICMP],
            Some("icmp6") => vec![ICMPV6],
            _ => return Err(FORM.into()),
        };
        if words.next() != Some("from") {
            return Err(FORM.into());
        }
        let source = match words.next() {
            Some("any") => None,
            Some(text) => {
                Some(prefix(text).ok_or_else(|| format!("`{text}` is not an address or a prefix"))?)
            }
            None => return Err(FORM.into()),
        };
        let source_ports = words.next_if(|word| *word != "to").map(ports).transpose()?.unwrap_or_default();
        if words.next() != Some("to") {
            return Err(FORM.into());
        }
        let destination: Option<IpAddr> = match words.next() {
            Some("me") => None,
            Some(text) => Some(text.parse().map_err(|_| format!("`{text}` is not `me` or an address"))?),
            None => return Err(FORM.into()),
        };
        let ports = words.next().map(ports).transpose()?.unwrap_or_default();
        if words.next().is_some() {
            return Err(FORM.into());
        }
        let has_ports = !source_ports.is_empty() || !ports.is_empty();
        if has_ports && protocols != [TCP] && protocols != [UDP] {
            return Err("ports need `tcp` or `udp`".into());
        }
        if let (Some((source, _)), Some(destination)) = (source, destination)
            && source.is_ipv6() != destination.is_ipv6()
        {
            return Err("source and destination are of different families".into());
        }
        Ok(Self { protocols, source, destination, source_ports, ports })
    }

    /// Leads the packets to `address` to `found`.
    fn compile(&self, asm: &mut Asm, address: IpAddr, found: Label) {
        if self.source.is_some_and(|(source, _)| source.is_ipv6() != address.is_ipv6()) {
            return;
        }
        let next = asm.label();
        let (protocol, source_at, destination_at) = match address {
            IpAddr::V4(_) => (ETH_P_IP, IP + 12, IP + 16),
            IpAddr::V6(_) => (ETH_P_IPV6, IP + 8, IP + 24),
        };
        asm.goto_if(Reg::R7, Cond::NotEq, network(protocol), next);
        match_prefix(asm, destination_at, (address, 128), next);
        if let Some(source) = self.source {
            match_prefix(asm, source_at, source, next);
        }
        if !self.protocols.is_empty() {
            let right = asm.label();
            for protocol in &self.protocols {
                asm.goto_if(Reg::R9, Cond::Eq, (*protocol).into(), right);
            }
            asm.goto(next);
            asm.bind(right);
        }
        match_ports(asm, L4, &self.source_ports, next);
        match_ports(asm, L4 + 2, &self.ports, next);
        asm.goto(found);
        asm.bind(next);
    }
}

/// Continues if the address at `at` is in the prefix; otherwise jumps to `next`.
fn match_prefix(asm: &mut Asm, at: i16, (net, len): (IpAddr, u8), next: Label) {
    let bytes = match net {
        IpAddr::V4(net) => net.octets().to_vec(),
        IpAddr::V6(net) => net.octets().to_vec(),
    };
    for (word, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
        let bits = u32::from(len).saturating_sub(32 * word as u32).min(32);
        let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0).to_be();
        if mask == 0 {
            continue;
        }
        asm.load(Size::Word, Reg::R2, Reg::R10, at + 4 * word as i16);
        if mask != u32::MAX {
            asm.and(Reg::R2, mask);
        }
        asm.goto_if(Reg::R2, Cond::NotEq, u32::from_ne_bytes(*bytes) & mask, next);
    }
}

/// Continues if the port at `at` is in one of the ranges or there is none; otherwise jumps to `next`.
fn match_ports(asm: &mut Asm, at: i16, ranges: &[RangeInclusive<u16>], next: Label) {
    if ranges.is_empty() {
        return;
    }
    asm.load(Size::Half, Reg::R2, Reg::R10, at);
    asm.network_to_host(Reg::R2);
    let right = asm.label();
    for range in ranges {
        let other = asm.label();
        asm.goto_if(Reg::R2, Cond::Less, (*range.start()).into(), other);
        asm.goto_if(Reg::R2, Cond::Greater, (*range.end()).into(), other);
        asm.goto(right);
        asm.bind(other);
    }
    asm.goto(next);
    asm.bind(right);
}

/// The word that a half in network byte order is when it is loaded.
fn network(half: u16) -> u32 {
    half.to_be().into()
}

fn prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (net, len) = text.split_once('/').map_or((text, None), |(net, len)| (net, Some(len)));
    let net: IpAddr = net.parse().ok()?;
    let most = if net.is_ipv4() { 32 } else { 128 };
    let len = len.map_or(Some(most), |len| len.parse().ok())?;
    (len <= most).then_some((net, len))
}

fn ports(text: &str) -> Result<Vec<RangeInclusive<u16>>, String> {
    let number = |text: &str| text.parse().ok().filter(|port: &u16| *port > 0);
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(number(first)?..=number(last)?).filter(|range| !range.is_empty())
    };
    let found: Option<Vec<_>> = text.split(',').map(range).collect();
    found.filter(|found| found.len() <= 16).ok_or_else(|| format!("`{text}` is not a list of up to 16 ports"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_parsed() {
        let parsed = |text: &str| Filter::parse([text]).unwrap().entries.remove(0);
        assert_eq!(parsed("ssh"), parsed("tcp from any to me 22"));
        assert_eq!(
            parsed("udp from 192.0.2.0/24 53,67-68 to 192.0.2.1 1024-65535"),
            Entry::Ip(Packets {
                protocols: vec![UDP],
                source: Some((IpAddr::from([192, 0, 2, 0]), 24)),
                destination: Some(IpAddr::from([192, 0, 2, 1])),
                source_ports: vec![53..=53, 67..=68],
                ports: vec![1024..=65535],
            })
        );
        assert!(Filter::parse(["ssh"]).unwrap().has_me());
        assert!(!Filter::parse(["arp", "nd", "dhcp", "ip from any to 192.0.2.1"]).unwrap().has_me());
    }

    #[test]
    fn wrong_entries_are_refused() {
        #[rustfmt::skip]
        let rows = [
            ("",                                  "write \"arp\""),
            ("arpa",                              "write \"arp\""),
            ("tcp from any",                      "write \"arp\""),
            ("tcp from any to me 22 in",          "write \"arp\""),
            ("tcp from 192.0.2.0/33 to me",       "`192.0.2.0/33` is not an address or a prefix"),
            ("tcp from any to you",               "`you` is not `me` or an address"),
            ("tcp from any to me 0",              "`0` is not a list"),
            ("tcp from any to me 9-8",            "`9-8` is not a list"),
            ("ip from any to me 22",              "ports need `tcp` or `udp`"),
            ("ip from ::1 to 192.0.2.1",          "different families"),
        ];
        for (entry, expected) in rows {
            let error = Filter::parse([entry]).unwrap_err();
            assert!(error.contains(expected), "{entry}: {error}");
        }
        assert!(Filter::parse(vec!["arp"; ENTRIES_MAX + 1]).is_err());
    }
}
