//! The packet log: entries of `log` rules, and of packets whose state was refused, in a bounded queue that the
//! caller empties.

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::port::PortId;
use super::walk::Dir;
use crate::rules::protocol;
use crate::state::Refused;
use towpath_wire::{Addresses, Packet, Time, proto};

/// Maximum number of entries in the queue.
const CAPACITY: usize = 1024;

/// Maximum number of bytes of copied packets: 16 of the largest.
const COPIES: usize = 1 << 20;

/// A logged packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Time of the packet.
    pub time: Time,
    /// Rule number. `None` if no rule decided.
    pub rule: Option<u32>,
    /// The rule's action in ipfw's word, or the reason why the packet was dropped.
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
    /// The entry is the last one of its rule: `logamount` or `verbose_limit` is reached.
    pub limit: Option<u32>,
    /// Bytes of a malformed frame, whose addresses are unknown.
    pub malformed_len: Option<u32>,
    /// The copy of the packet, for [`PacketLog::copy`].
    pub copied: Option<Copied>,
}

/// Where the copy of a logged packet is, and what it is a copy of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    start: u32,
    len: u32,
    /// Bytes on the wire.
    pub wire_len: u32,
    /// pcap's number of the link type.
    pub link: u16,
    /// Offset of the IP header; for other packets, of the link payload.
    pub network: u16,
}

impl LogEntry {
    /// An entry for a malformed frame of `len` bytes.
    pub fn malformed(time: Time, action: &'static str, port: Option<PortId>, len: u32) -> Self {
        Self {
            time,
            rule: None,
            action,
            dir: Dir::In,
            port,
            addresses: Addresses::None,
            proto: 0,
            ports: None,
            icmp: None,
            ethertype: 0,
            limit: None,
            malformed_len: Some(len),
            copied: None,
        }
    }

    /// An entry for a packet; `rule` is the rule that decided.
    pub fn new(
        time: Time,
        rule: Option<u32>,
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
            limit: None,
            malformed_len: None,
            copied: None,
        }
    }

    /// Formats the entry as ipfw does. `port` is the name of the port: `ipfw: 100 Deny TCP 10.0.0.1:1 10.0.0.2:2
    /// in via em0`. A limit that is reached follows: `, limit 5 reached`.
    pub fn line<'a>(&'a self, port: Option<&'a str>) -> impl fmt::Display + 'a {
        fmt::from_fn(move |f| {
            f.write_str("ipfw: ")?;
            self.rule.map_or(Ok(()), |rule| write!(f, "{rule} "))?;
            write!(f, "{} ", self.action)?;
            if let Some(len) = self.malformed_len {
                write!(f, "{len} bytes")?;
                return self.way(f, port);
            }
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
        self.limit.map_or(Ok(()), |limit| write!(f, ", limit {limit} reached"))
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
        Refused::Full => Some("Deny (states_full)"),
        Refused::OverLimit => Some("Deny (over_limit)"),
        Refused::OverRate => Some("Deny (over_rate)"),
        Refused::ParentsFull => Some("Deny (limits_full)"),
        Refused::OverSource => Some("Deny (over_source)"),
        Refused::Invalid | Refused::FirstSyn => None,
    }
}

/// Why lines of `log` were not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuppressedBy {
    /// The rule has logged this number of packets (`logamount`, `verbose_limit`).
    Limit(u32),
    /// At most one packet per second and reason is logged. The text is that of [`LogEntry::action`].
    Rate(&'static str),
    /// The queue of entries was full.
    Full,
    /// Several reasons, of rules beyond the number that is counted separately.
    Other,
}

/// Lines of `log` that were not written since the last summary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suppressed {
    /// Time of the last one.
    pub time: Time,
    /// Rule number. `None` for [`SuppressedBy::Full`] and [`SuppressedBy::Other`].
    pub rule: Option<u32>,
    /// The reason.
    pub by: SuppressedBy,
    /// Number of lines.
    pub lines: u64,
}

impl fmt::Display for Suppressed {
    /// `ipfw: 100 suppressed 7 lines: limit 5 reached`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ipfw: ")?;
        if let Some(rule) = self.rule {
            write!(f, "{rule} ")?;
        }
        let plural = if self.lines == 1 { "" } else { "s" };
        write!(f, "suppressed {} line{plural}", self.lines)?;
        match self.by {
            SuppressedBy::Limit(limit) => write!(f, ": limit {limit} reached"),
            SuppressedBy::Rate(word) => write!(f, ": at most one \"{word}\" per second"),
            SuppressedBy::Full => f.write_str(": the log queue was full"),
            SuppressedBy::Other => f.write_str(" of other rules"),
        }
    }
}

/// Rules that are counted separately until the next summary, and reasons without a rule.
const SUPPRESSED: usize = 32;
const REASONS: usize = 96;

/// Time from the first suppressed line to its summary, and shortest time between two summaries.
const FIRST_SUMMARY: Duration = Duration::from_secs(1);
const SUMMARY: Duration = Duration::from_secs(10);

/// A bounded queue of log entries, and the number of entries that did not enter it.
#[derive(Debug)]
pub struct PacketLog {
    entries: VecDeque<LogEntry>,
    dropped: u64,
    suppressed: VecDeque<Suppressed>,
    /// Earliest time of the next summary.
    due: Time,
    /// Bytes of each packet to copy; 0: none.
    copy_range: usize,
    /// The copies of the packets in `entries`, and of those that were taken since it was empty.
    copies: Vec<u8>,
    /// Packets without a copy because there was no room.
    uncopied: u64,
}

impl Default for PacketLog {
    fn default() -> Self {
        // Allocates all memory now: logging a packet does not allocate.
        Self {
            entries: VecDeque::with_capacity(CAPACITY),
            dropped: 0,
            suppressed: VecDeque::with_capacity(SUPPRESSED + REASONS),
            due: Time::default(),
            copy_range: 0,
            copies: Vec::new(),
            uncopied: 0,
        }
    }
}

impl PacketLog {
    /// Sets how many bytes of each packet of a `log` rule are copied. 0: none. Allocates memory for the copies when it is first needed.
    pub fn set_copy_range(&mut self, bytes: usize) {
        if bytes > 0 && self.copies.capacity() < COPIES {
            self.copies.reserve_exact(COPIES - self.copies.len());
        }
        self.copy_range = bytes;
    }

    /// The copy of the packet of an entry that was taken. Valid until the next packet is logged.
    pub fn copy(&self, entry: &LogEntry) -> Option<&[u8]> {
        let Copied { start, len, .. } = entry.copied?;
        self.copies.get(start as usize..(start + len) as usize)
    }

    /// Returns and resets the number of packets without a copy because there was no room.
    pub fn take_uncopied(&mut self) -> u64 {
        std::mem::take(&mut self.uncopied)
    }

    /// Adds the entry of a packet, and a copy of the packet if it is wanted.
    pub(super) fn put_packet(&mut self, mut entry: LogEntry, packet: &Packet<'_>) {
        if self.copy_range > 0 {
            entry.copied = self.copied(packet);
        }
        self.put(entry);
    }

    #[cold]
    fn copied(&mut self, packet: &Packet<'_>) -> Option<Copied> {
        if self.entries.is_empty() {
            self.copies.clear();
        }
        let bytes = &packet.frame[..packet.frame.len().min(self.copy_range)];
        let start = self.copies.len();
        if start + bytes.len() > COPIES || self.entries.len() >= CAPACITY {
            self.uncopied += 1;
            return None;
        }
        self.copies.extend_from_slice(bytes);
        Some(Copied {
            start: start as u32,
            len: bytes.len() as u32,
            wire_len: packet.wire_len,
            link: packet.link.0,
            network: packet.network as u16,
        })
    }

    /// Removes and returns the oldest entry.
    pub fn take(&mut self) -> Option<LogEntry> {
        self.entries.pop_front()
    }

    /// Removes and returns a summary of suppressed lines: one second after the first of them, and then at most every 10 seconds. With
    /// `all`, also a summary that is not due. Call it until it returns `None`.
    pub fn poll_summary(&mut self, now: Time, all: bool) -> Option<Suppressed> {
        if self.suppressed.is_empty() || now < self.due && !all {
            return None;
        }
        let summary = self.suppressed.pop_front();
        if self.suppressed.is_empty() {
            self.due = now + SUMMARY;
        }
        summary
    }

    /// Number of entries that were discarded because the queue was full.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Adds an entry. A full queue discards it and counts it.
    pub fn put(&mut self, entry: LogEntry) {
        if self.entries.len() < CAPACITY {
            self.entries.push_back(entry);
        } else {
            self.dropped += 1;
            self.suppress(entry.time, None, SuppressedBy::Full, 1);
        }
    }

    /// Counts `lines` entries that are not logged.
    #[cold]
    pub fn suppress(&mut self, now: Time, rule: Option<u32>, by: SuppressedBy, lines: u64) {
        let known = self.suppressed.iter().position(|known| (known.rule, known.by) == (rule, by));
        match known {
            Some(at) => {
                let known = &mut self.suppressed[at];
                (known.time, known.lines) = (now, known.lines + lines);
            }
            None if rule.is_some() && self.suppressed.len() >= SUPPRESSED => {
                self.suppress(now, None, SuppressedBy::Other, lines);
            }
            None => {
                if self.suppressed.is_empty() {
                    self.due = self.due.max(now + FIRST_SUMMARY);
                }
                self.suppressed.push_back(Suppressed { time: now, rule, by, lines });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(log: &mut PacketLog, millis: u64, all: bool) -> Vec<String> {
        let now = Time::from_nanos(millis * 1_000_000);
        std::iter::from_fn(|| log.poll_summary(now, all)).map(|line| line.to_string()).collect()
    }

    #[test]
    fn every_suppressed_line_is_in_one_summary() {
        let mut log = PacketLog::default();
        let suppress = |log: &mut PacketLog, rule, by, millis: u64| {
            log.suppress(Time::from_nanos(millis * 1_000_000), rule, by, 1);
        };
        for n in 0..5 {
            suppress(&mut log, Some(100), SuppressedBy::Limit(3), 1000 + n);
        }
        suppress(&mut log, Some(200), SuppressedBy::Rate("Deny (over_limit)"), 1500);
        suppress(&mut log, None, SuppressedBy::Full, 1600);
        assert_eq!(lines(&mut log, 1999, false), Vec::<String>::new());
        assert_eq!(
            lines(&mut log, 2000, false),
            [
                "ipfw: 100 suppressed 5 lines: limit 3 reached",
                "ipfw: 200 suppressed 1 line: at most one \"Deny (over_limit)\" per second",
                "ipfw: suppressed 1 line: the log queue was full",
            ]
        );
        // The next summary waits its time, but not at the end.
        suppress(&mut log, Some(100), SuppressedBy::Limit(3), 2500);
        assert_eq!(lines(&mut log, 11_999, false), Vec::<String>::new());
        assert_eq!(lines(&mut log, 12_000, false).len(), 1);
        suppress(&mut log, Some(100), SuppressedBy::Limit(3), 12_100);
        assert_eq!(lines(&mut log, 12_100, true), ["ipfw: 100 suppressed 1 line: limit 3 reached"]);
    }

    #[test]
    fn the_number_of_counts_is_bounded() {
        let mut log = PacketLog::default();
        for rule in 0..1000 {
            log.suppress(Time::from_secs(1), Some(rule), SuppressedBy::Limit(1), 1);
        }
        log.suppress(Time::from_secs(1), None, SuppressedBy::Full, 1);
        let all: Vec<Suppressed> =
            std::iter::from_fn(|| log.poll_summary(Time::from_secs(1), true)).collect();
        assert_eq!((all.len(), all.iter().map(|row| row.lines).sum::<u64>()), (SUPPRESSED + 2, 1001));
        assert_eq!(all[SUPPRESSED].to_string(), "ipfw: suppressed 968 lines of other rules");
    }
}
