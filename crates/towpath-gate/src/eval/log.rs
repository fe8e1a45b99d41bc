//! What `log` rules write, and what is said of packets that could not have their state: entries in a bounded queue, for the
//! caller to take away and print.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use super::port::PortId;
use super::walk::Dir;
use crate::rules::protocol;
use crate::state::Refused;
use towpath_wire::{Addresses, Packet, Time, proto};

/// Entries that are kept until somebody takes them.
const CAPACITY: usize = 1024;

/// One logged packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// When.
    pub time: Time,
    /// Number of the rule.
    pub rule: u32,
    /// The rule's action, in ipfw's word for the log; of a packet that could not have its state, why.
    pub action: &'static str,
    /// Direction.
    pub dir: Dir,
    /// The port that it came in or goes out by.
    pub port: Option<PortId>,
    /// Addresses.
    pub addresses: Addresses,
    /// Protocol.
    pub proto: u8,
    /// Ports, for protocols that have them.
    pub ports: Option<(u16, u16)>,
    /// Type and code, for ICMP and ICMPv6.
    pub icmp: Option<(u8, u8)>,
    /// Ethertype.
    pub ethertype: u16,
}

impl LogEntry {
    pub(crate) fn new(
        time: Time,
        rule: u32,
        action: &'static str,
        dir: Dir,
        port: Option<PortId>,
        packet: &Packet<'_>,
    ) -> Self {
        let has_ports =
            matches!(packet.proto, proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP | proto::DCCP)
                && packet.fragment_offset == 0;
        let icmp = matches!(packet.proto, proto::ICMP | proto::ICMP6) && packet.fragment_offset == 0;
        Self {
            time,
            rule,
            action,
            dir,
            port,
            addresses: packet.addresses,
            proto: packet.proto,
            ports: has_ports.then_some((packet.src_port, packet.dst_port)),
            icmp: icmp.then_some((packet.icmp_type, packet.icmp_code)),
            ethertype: packet.ethertype,
        }
    }

    /// The line as ipfw writes it, with the name of the port: `ipfw: 100 Deny TCP 10.0.0.1:1 10.0.0.2:2 in via em0`.
    pub fn line<'a>(&'a self, port: Option<&'a str>) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| {
            write!(f, "ipfw: {} {} ", self.rule, self.action)?;
            let (src, dst): (IpAddr, IpAddr) = match self.addresses {
                Addresses::None => {
                    write!(f, "ethertype 0x{:04x}", self.ethertype)?;
                    return self.way(f, port);
                }
                Addresses::V4(src, dst) => (src.into(), dst.into()),
                Addresses::V6(src, dst) => (src.into(), dst.into()),
            };
            match (self.icmp, protocol::name(self.proto)) {
                (Some((kind, code)), Some(_)) => {
                    let name = if self.proto == proto::ICMP { "ICMP" } else { "ICMPv6" };
                    write!(f, "{name}:{kind}.{code} ")?;
                }
                (_, Some(name)) => write!(f, "{} ", name.to_ascii_uppercase())?,
                (_, None) => write!(f, "P:{} ", self.proto)?,
            }
            match self.ports {
                Some((s, d)) => write!(f, "{} {}", SocketAddr::new(src, s), SocketAddr::new(dst, d))?,
                None => write!(f, "{src} {dst}")?,
            }
            self.way(f, port)
        })
    }

    fn way(&self, f: &mut fmt::Formatter<'_>, port: Option<&str>) -> fmt::Result {
        f.write_str(if self.dir == Dir::In { " in" } else { " out" })?;
        port.map_or(Ok(()), |port| write!(f, " via {port}"))
    }
}

/// When a packet that was refused a state was logged last, by whichever walker.
#[derive(Debug, Default)]
pub(super) struct RefusalLogLimiter(AtomicU64);

impl RefusalLogLimiter {
    /// Whether to log another one: once a second at most.
    pub(super) fn take(&self, now: Time) -> bool {
        // 0 is never. Relaxed: a moment, which guards nothing; of several at once one succeeds.
        let (now, last) = (now.as_nanos().max(1), self.0.load(Ordering::Relaxed));
        let due = last == 0 || now.saturating_sub(last) >= 1_000_000_000;
        due && self.0.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// What the log says of a packet that was denied because it could not have its state; nothing of those that are denied
/// in the normal course of things.
pub(super) fn refused_word(refused: Refused) -> Option<&'static str> {
    match refused {
        Refused::Full => Some("Deny (states full)"),
        Refused::OverLimit => Some("Deny (over limit)"),
        Refused::OverRate => Some("Deny (over rate)"),
        Refused::ParentsFull => Some("Deny (limits full)"),
        Refused::OverSource => Some("Deny (source over its share)"),
        Refused::Invalid | Refused::FirstSyn => None,
    }
}

/// The queue of logged packets.
#[derive(Debug)]
pub struct PacketLog {
    entries: VecDeque<LogEntry>,
    dropped: u64,
}

impl Default for PacketLog {
    fn default() -> Self {
        // All room is made now: packets allocate nothing.
        Self { entries: VecDeque::with_capacity(CAPACITY), dropped: 0 }
    }
}

impl PacketLog {
    /// Takes the oldest entry.
    pub fn take(&mut self) -> Option<LogEntry> {
        self.entries.pop_front()
    }

    /// Entries that were not kept because nobody took the earlier ones.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    pub(crate) fn put(&mut self, entry: LogEntry) {
        if self.entries.len() < CAPACITY {
            self.entries.push_back(entry);
        } else {
            self.dropped += 1;
        }
    }
}
