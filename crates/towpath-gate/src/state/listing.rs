//! States in the form of `ipfw -d show`.

use std::fmt;
use std::time::Duration;

use crate::state::{Flow, Name, Origin, RuleId, tcp};

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Made by keep-state or record-state.
    State,
    /// Made by limit or set-limit; a parent counts it.
    Limit,
    /// The counter of a limit.
    Parent {
        /// The number of states that it counts.
        count: u32,
    },
}

/// Where a dump continues. The default is the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// 0 parents, 1 IPv4, 2 IPv6.
    pub(crate) part: u8,
    pub(crate) slot: u32,
}

impl Cursor {
    /// The cursor as a number, for programs that continue later.
    pub fn to_bits(self) -> u64 {
        u64::from(self.part) << 32 | u64::from(self.slot)
    }

    /// The cursor of a number. A number that [`Cursor::to_bits`] never returned gives some position, or one beyond the end
    /// ([`States::has_position`](crate::state::States::has_position)).
    pub fn from_bits(bits: u64) -> Self {
        Self { part: u8::try_from(bits >> 32).unwrap_or(u8::MAX), slot: bits as u32 }
    }
}

/// One entry of a listing. Pairs are \[forward, reverse\].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The kind of entry.
    pub kind: Kind,
    /// The rule that made it.
    pub rule: RuleId,
    /// Its flow name.
    pub name: Name,
    /// The rule was deleted and the entry kept.
    pub orphaned: bool,
    /// Its flow, in the direction of the first packet. In a parent, fields outside the mask are zero.
    pub flow: Flow,
    /// Packets; 0 for a parent.
    pub packets: [u64; 2],
    /// Bytes; 0 for a parent.
    pub bytes: [u64; 2],
    /// Time until it expires.
    pub remaining: Duration,
    /// ipfw's state word of a TCP connection: the flags seen (FIN 1, SYN 2, RST 4) in forward direction, the same << 8 in reverse
    /// direction, and 0x10000 or 0x20000 for the direction of the acknowledgement that was accepted last.
    pub tcp_seen: u32,
    /// A `loose` rule made it by a segment of a TCP connection whose SYN was not seen. `tcp_seen` has the SYN of both sides.
    pub picked_up: bool,
    /// The last acknowledgement numbers that were accepted; 0 if there was none.
    pub tcp_ack: [u32; 2],
    /// Where its first packet was received.
    pub origin: Origin,
}

/// Set in the word that `ipfw -v` prints when the rule was deleted.
const ORPHANED: u32 = 0x4_0000;

impl Listed {
    /// Seconds until it expires, rounded up: a live entry has at least one.
    pub fn seconds(&self) -> u64 {
        self.remaining.as_secs() + u64::from(self.remaining.subsec_nanos() > 0)
    }

    /// The entry as ipfw prints it. `number` is the number of its rule, `name` returns its flow name.
    ///
    /// ```text
    /// NNNNN pkts bytes (Ns) STATE|LIMIT|PARENT n proto src sport <-> dst dport :name
    /// ```
    pub fn line<'a>(&'a self, number: u32, name: impl FnOnce(Name) -> &'a str) -> Line<'a> {
        Line { listed: self, number, name: name(self.name), widths: (0, 0), verbose: false }
    }
}

/// A [`Listed`] as text.
#[derive(Clone, Debug)]
pub struct Line<'a> {
    listed: &'a Listed,
    number: u32,
    name: &'a str,
    widths: (usize, usize),
    verbose: bool,
}

impl Line<'_> {
    /// Pads packets and bytes to these widths, to align the columns of a listing.
    pub fn widths(self, packets: usize, bytes: usize) -> Self {
        Self { widths: (packets, bytes), ..self }
    }

    /// Adds the fields of `ipfw -v`: the TCP state in hexadecimal and in words, and the acknowledgement numbers.
    pub fn verbose(self, verbose: bool) -> Self {
        Self { verbose, ..self }
    }
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { listed, number, name, widths: (packets_width, bytes_width), verbose } = *self;
        let packets: u64 = listed.packets.iter().sum();
        let bytes: u64 = listed.bytes.iter().sum();
        write!(f, "{number:05} {packets:packets_width$} {bytes:bytes_width$} ({}s) ", listed.seconds())?;
        match listed.kind {
            Kind::State => f.write_str("STATE ")?,
            Kind::Limit => f.write_str("LIMIT ")?,
            Kind::Parent { count } => write!(f, "PARENT {count} ")?,
        }
        let Flow { ends, proto, src_port, dst_port, .. } = listed.flow;
        match protocol(proto) {
            Some(name) => f.write_str(name)?,
            None => write!(f, "proto {proto}")?,
        }
        let (src, dst) = ends.addresses();
        write!(f, " {src} {src_port} <-> {dst} {dst_port} :{name}")?;
        if listed.flow.zone != 0 {
            write!(f, " zone {}", listed.flow.zone)?;
        }
        if verbose { self.details(f) } else { Ok(()) }
    }
}

impl Line<'_> {
    fn details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Listed { orphaned, tcp_seen, tcp_ack: [forward, reverse], .. } = *self.listed;
        let word = tcp_seen | if orphaned { ORPHANED } else { 0 };
        write!(f, " state {word:#010x}{}", if word == 0 { "," } else { " " })?;
        if orphaned {
            f.write_str("ORPHANED,")?;
        }
        for (flag, name) in [(tcp::SYN, "SYN"), (tcp::FIN, "FIN")] {
            match (tcp_seen & u32::from(flag) != 0, tcp_seen >> 8 & u32::from(flag) != 0) {
                (true, true) => write!(f, "BOTH_{name},")?,
                (true, false) => write!(f, "F_{name},")?,
                (false, true) => write!(f, "R_{name},")?,
                (false, false) => {}
            }
        }
        write!(f, " f_ack {forward:#x}, r_ack {reverse:#x}")
    }
}

/// The name of a protocol in the protocols database. Others print as a number.
fn protocol(proto: u8) -> Option<&'static str> {
    Some(match proto {
        0 => "ip",
        1 => "icmp",
        2 => "igmp",
        4 => "ipencap",
        6 => "tcp",
        17 => "udp",
        33 => "dccp",
        41 => "ipv6",
        47 => "gre",
        50 => "esp",
        51 => "ah",
        58 => "ipv6-icmp",
        89 => "ospf",
        103 => "pim",
        112 => "vrrp",
        132 => "sctp",
        136 => "udplite",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Ends;

    fn listed() -> Listed {
        Listed {
            kind: Kind::State,
            rule: RuleId(1),
            name: Name::DEFAULT,
            orphaned: false,
            flow: Flow {
                ends: Ends::V4([10, 0, 0, 1].into(), [192, 0, 2, 7].into()),
                proto: 6,
                src_port: 49152,
                dst_port: 443,
                zone: 0,
            },
            packets: [3, 2],
            bytes: [180, 120],
            remaining: Duration::from_millis(299_001),
            tcp_seen: 0x2_0202,
            picked_up: false,
            tcp_ack: [0x10, 0xffff_ffff],
            origin: Origin::UNRECORDED,
        }
    }

    #[test]
    fn lines() {
        let base = listed();
        let udp6 = Flow {
            ends: Ends::V6("fe80::1".parse().unwrap(), "2001:db8::53".parse().unwrap(), 2),
            proto: 17,
            src_port: 5353,
            dst_port: 53,
            zone: 0,
        };
        let parent = Flow { proto: 200, src_port: 0, dst_port: 0, ..base.flow };
        let rows = [
            (base.clone(), "00100 5 300 (300s) STATE tcp 10.0.0.1 49152 <-> 192.0.2.7 443 :web"),
            (
                Listed { kind: Kind::Limit, flow: udp6, ..base.clone() },
                "00100 5 300 (300s) LIMIT udp fe80::1 5353 <-> 2001:db8::53 53 :web",
            ),
            (
                Listed {
                    kind: Kind::Parent { count: 4 },
                    flow: parent,
                    packets: [0; 2],
                    bytes: [0; 2],
                    remaining: Duration::ZERO,
                    ..base
                },
                "00100 0 0 (0s) PARENT 4 proto 200 10.0.0.1 0 <-> 192.0.2.7 0 :web",
            ),
        ];
        for (listed, line) in rows {
            assert_eq!(listed.line(100, |_| "web").to_string(), line);
            let zoned = Listed { flow: Flow { zone: 7, ..listed.flow }, ..listed };
            assert_eq!(zoned.line(100, |_| "web").to_string(), format!("{line} zone 7"));
        }
        let wide = listed().line(70_000, |_| "web").widths(4, 6).to_string();
        assert_eq!(wide, "70000    5    300 (300s) STATE tcp 10.0.0.1 49152 <-> 192.0.2.7 443 :web");
    }

    #[test]
    fn verbose_lines() {
        let base = listed();
        let rows = [
            (base.clone(), " state 0x00020202 BOTH_SYN, f_ack 0x10, r_ack 0xffffffff"),
            (
                Listed { tcp_seen: 0, tcp_ack: [0; 2], ..base.clone() },
                " state 0x00000000, f_ack 0x0, r_ack 0x0",
            ),
            (
                Listed { tcp_seen: 0x103, orphaned: true, tcp_ack: [0; 2], ..base.clone() },
                " state 0x00040103 ORPHANED,F_SYN,BOTH_FIN, f_ack 0x0, r_ack 0x0",
            ),
            (
                Listed { tcp_seen: 0x201, ..base },
                " state 0x00000201 R_SYN,F_FIN, f_ack 0x10, r_ack 0xffffffff",
            ),
        ];
        for (listed, tail) in rows {
            let line = listed.line(1, |_| "default").verbose(true).to_string();
            assert_eq!(line.split_once(" :default").unwrap().1, tail);
        }
    }
}
