//! The packet log: entries of `log` rules, and of packets whose state was refused, in a bounded queue that the
//! caller empties.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use super::port::PortId;
use super::walk::Dir;
use crate::rules::protocol;
use crate::state::Refused;
use towpath_wire::{Addresses, Packet, Time, proto};

/// Maximum number of entries in the queue.
const CAPACITY: usize = 1024;

/// A logged packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Time of the packet.
    pub time: Time,
    /// Rule number.
    pub rule: u32,
    /// The rule's action in ipfw's word, or the reason why the state was refused.
    pub action: &'static str,
    /// Direction.
    pub dir: Dir,
    /// Receive port of an incoming packet, transmit port of an outgoing one.
    pub port: Option<PortId>,
    /// Addresses.
    pub addresses: Addresses,
    /// Protocol.
    pub proto: u8,
    /// Source and destination port, if the protocol has ports.
    pub ports: Option<(u16, u16)>,
    /// Type and code of ICMP and ICMPv6.
    pub icmp: Option<(u8, u8)>,
    /// EtherType.
    pub ethertype: u16,
    /// Lines of this queue that were suppressed since the entry before: it was full, or refusals came more often than once per
    /// second.
    pub suppressed: u64,
    /// The entry is the last one of its rule: `logamount` or `verbose_limit` is reached.
    pub limit: Option<u32>,
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
            suppressed: 0,
            limit: None,
        }
    }

    /// Formats the entry as ipfw does. `port` is the name of the port: `ipfw: 100 Deny TCP 10.0.0.1:1 10.0.0.2:2
    /// in via em0`. The number of suppressed lines and a limit that is reached follow: `, 3 lines suppressed before`.
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
        port.map_or(Ok(()), |port| write!(f, " via {port}"))?;
        if let Some(limit) = self.limit {
            write!(f, ", limit {limit} reached")?;
        }
        match self.suppressed {
            0 => Ok(()),
            1 => f.write_str(", 1 line suppressed before"),
            lines => write!(f, ", {lines} lines suppressed before"),
        }
    }
}

/// Time of the last logged refusal, shared by all walkers.
#[derive(Debug, Default)]
pub(super) struct RefusalLogLimiter(AtomicU64);

impl RefusalLogLimiter {
    /// Returns true if another refusal may be logged: at most one per second.
    pub(super) fn take(&self, now: Time) -> bool {
        // 0 means never. Relaxed: the timestamp guards no other data; of several walkers one succeeds.
        let (now, last) = (now.as_nanos().max(1), self.0.load(Ordering::Relaxed));
        let due = last == 0 || now.saturating_sub(last) >= 1_000_000_000;
        due && self.0.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// Returns the log text for a packet that was denied because its state was refused. `None` for refusals that occur
/// in normal operation.
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

/// A bounded queue of log entries.
#[derive(Debug)]
pub struct PacketLog {
    entries: VecDeque<LogEntry>,
    dropped: u64,
    /// Lines suppressed since the last entry.
    suppressed: u64,
}

impl Default for PacketLog {
    fn default() -> Self {
        // Allocates all memory now: logging a packet does not allocate.
        Self { entries: VecDeque::with_capacity(CAPACITY), dropped: 0, suppressed: 0 }
    }
}

impl PacketLog {
    /// Removes and returns the oldest entry.
    pub fn take(&mut self) -> Option<LogEntry> {
        self.entries.pop_front()
    }

    /// Number of entries that were discarded because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Number of lines that were suppressed and that no entry reports yet: the next one will.
    pub fn suppressed(&self) -> u64 {
        self.suppressed
    }

    pub(crate) fn put(&mut self, entry: LogEntry) {
        if self.entries.len() < CAPACITY {
            let suppressed = std::mem::take(&mut self.suppressed);
            self.entries.push_back(LogEntry { suppressed, ..entry });
        } else {
            self.dropped += 1;
            self.suppress();
        }
    }

    /// Counts a line that is not logged.
    pub(crate) fn suppress(&mut self) {
        self.suppressed += 1;
    }
}
