//! The lines of `log` rules, from the walkers that write them to the log.

use std::fmt::{self, Display};
use std::net::IpAddr;
use std::sync::mpsc::SyncSender;

use time::OffsetDateTime;
use towpath_gate::{Dir, LogEntry, Suppressed, SuppressedBy, Walker};
use towpath_wire::{Addresses, Time};

use crate::control::PacketCopies;
use crate::events::PacketEvents;
use crate::logging;
use crate::quantity::count;

/// A line of the walker's packets.
pub struct Drained<'a> {
    /// Its time.
    pub time: Time,
    /// The text.
    pub line: &'a dyn Display,
    /// The number of lines for which it stands.
    pub lines: u64,
    /// The packet and the name of its port; `None` for a summary.
    packet: Option<(&'a LogEntry, Option<&'a str>)>,
}

/// Passes each new line of the walker's packets to `line`, the oldest first. Then passes the summaries of suppressed lines that are due at
/// `now`; with `all`, also the others.
pub fn drain(walker: &mut Walker, now: Time, all: bool, line: impl FnMut(Drained<'_>)) {
    drain_with(walker, now, all, (None, None), line);
}

/// As [`drain`], and passes the packets to `events` and `copies`.
fn drain_with(
    walker: &mut Walker,
    now: Time,
    all: bool,
    (events, copies): (Option<&PacketEvents>, Option<&PacketCopies>),
    mut line: impl FnMut(Drained<'_>),
) {
    while let Some(entry) = walker.log().take() {
        if let Some(copies) = copies {
            copies.packet(walker, &entry);
        }
        let port = entry.port.and_then(|port| walker.ports().name(port));
        if let Some(events) = events {
            events.packet(&entry, port);
        }
        let text = entry.line(port);
        line(Drained { time: entry.time, line: &text, lines: 1, packet: Some((&entry, port)) });
    }
    while let Some(summary) = walker.log().poll_summary(now, all) {
        if let Some(events) = events {
            events.suppressed(summary);
        }
        let Suppressed { by, lines, .. } = summary;
        match by {
            SuppressedBy::Full => logging::count_lost(lines),
            _ => logging::count_suppressed(lines),
        }
        line(Drained { time: summary.time, line: &summary, lines, packet: None });
    }
}

/// A line on its way to the log.
#[derive(Debug)]
pub(crate) struct PacketLine {
    text: String,
    /// The packet and the name of its port.
    packet: Option<(LogEntry, Option<Box<str>>)>,
}

impl PacketLine {
    fn of(drained: &Drained<'_>) -> Self {
        let packet = drained.packet.map(|(entry, port)| (*entry, port.map(Box::from)));
        Self { text: drained.line.to_string(), packet }
    }

    /// Writes the line to the log.
    pub(crate) fn log(self) {
        let Self { text, packet } = self;
        let Some((entry, port)) = packet else {
            return tracing::info!(target: logging::PACKETS, "{text}");
        };
        let (src, dst): (Option<IpAddr>, Option<IpAddr>) = match entry.addresses {
            Addresses::None => (None, None),
            Addresses::V4(src, dst) => (Some(src.into()), Some(dst.into())),
            Addresses::V6(src, dst) => (Some(src.into()), Some(dst.into())),
        };
        tracing::info!(
            target: logging::PACKETS,
            rule = entry.rule,
            action = entry.action,
            dir = if entry.dir == Dir::In { "in" } else { "out" },
            port = port.as_deref(),
            proto = src.is_some().then_some(entry.proto),
            src = src.map(tracing::field::display),
            src_port = entry.ports.map(|(src, _)| src),
            dst = dst.map(tracing::field::display),
            dst_port = entry.ports.map(|(_, dst)| dst),
            "{text}"
        );
    }
}

/// Sends the lines of one walker to the supervisor without blocking.
#[derive(Debug)]
pub(crate) struct LogSender {
    lines: SyncSender<PacketLine>,
    /// Lines that the full channel did not take since the last summary.
    lost: u64,
    /// Receives the packets as events.
    events: Option<PacketEvents>,
    /// Receives copies of the packets, for the ring.
    copies: Option<PacketCopies>,
}

impl LogSender {
    pub(crate) fn new(lines: SyncSender<PacketLine>) -> Self {
        Self { lines, lost: 0, events: None, copies: None }
    }

    /// Passes the packets to `events`, too.
    pub(crate) fn with_events(mut self, events: Option<PacketEvents>) -> Self {
        self.events = events;
        self
    }

    /// Passes copies of the packets to the ring, too.
    pub(crate) fn with_copies(mut self, copies: Option<PacketCopies>) -> Self {
        self.copies = copies;
        self
    }

    /// Sends the new lines. After a loss, the first line that the channel takes has the number of lost lines. With `all`, the summaries
    /// of suppressed lines that are not due are sent, too.
    pub(crate) fn send(&mut self, walker: &mut Walker, now: Time, all: bool) {
        self.tell_lost();
        let Self { lines, lost, events, copies } = self;
        drain_with(walker, now, all, (events.as_ref(), copies.as_ref()), |drained| {
            // After a lost line, all others are lost until the channel takes the summary.
            if *lost > 0 || lines.try_send(PacketLine::of(&drained)).is_err() {
                *lost += drained.lines;
            }
        });
        if all {
            self.tell_lost();
        }
        if let Some(copies) = &self.copies {
            copies.count_uncopied(walker);
            copies.arm(walker);
        }
    }

    fn tell_lost(&mut self) {
        if self.lost > 0 && self.lines.try_send(lost_line(self.lost)).is_ok() {
            logging::count_lost(self.lost);
            self.lost = 0;
        }
    }
}

impl Drop for LogSender {
    /// Writes the number of lines that were lost since the last summary to the log.
    fn drop(&mut self) {
        if self.lost > 0 {
            logging::count_lost(self.lost);
            lost_line(self.lost).log();
        }
    }
}

fn lost_line(lost: u64) -> PacketLine {
    let text = format!("ipfw: suppressed {}: the log is too slow", count(lost, "line"));
    PacketLine { text, packet: None }
}

/// A time since 1970, in UTC: `2026-11-22T08:15:30.123456Z` (RFC 3339). With `fraction`, microseconds.
pub fn utc(time: Time, fraction: bool) -> impl Display {
    fmt::from_fn(move |f| {
        // 2^64 ns after 1970 is in the year 2554, within the range of `time`.
        let at = OffsetDateTime::from_unix_timestamp_nanos(time.as_nanos().into()).map_err(|_| fmt::Error)?;
        let (year, month, day) = (at.year(), u8::from(at.month()), at.day());
        write!(f, "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}", at.hour(), at.minute(), at.second())?;
        if fraction {
            write!(f, ".{:06}", at.microsecond())?;
        }
        f.write_str("Z")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, sync_channel};

    use towpath_gate::rules::Ruleset;
    use towpath_gate::{Dir, Gate, PacketSpec, Ports, Walk, state};
    use towpath_wire as wire;

    use super::*;

    fn walker(rules: &str) -> (Gate, Walker) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset, Ports::new(), state::Settings::default(), 1);
        let walker = gate.walker().unwrap();
        (gate, walker)
    }

    fn walk(walker: &mut Walker, packets: usize, now: Time) {
        let spec = PacketSpec::parse("udp 10.0.0.1:1 > 10.0.0.2:53").unwrap();
        let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        for _ in 0..packets {
            walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now);
        }
    }

    fn texts(taken: &Receiver<PacketLine>) -> Vec<String> {
        taken.try_iter().map(|line| line.text).collect()
    }

    const LINE: &str = "ipfw: 100 Deny UDP 10.0.0.1:1 10.0.0.2:53 in";

    #[test]
    fn lines_that_the_channel_does_not_take_are_counted_in_the_log() {
        let (_gate, mut walker) = walker("add 100 deny log ip from any to any");
        let (lines, taken) = sync_channel(2);
        let mut sender = LogSender::new(lines);
        let now = Time::from_secs(5);
        walk(&mut walker, 5, now);
        sender.send(&mut walker, now, false);
        assert_eq!(texts(&taken), [LINE; 2]);
        walk(&mut walker, 1, now);
        sender.send(&mut walker, now, false);
        let lost = "ipfw: suppressed 3 lines: the log is too slow";
        assert_eq!(texts(&taken), [lost, LINE]);
    }

    #[test]
    fn the_number_of_suppressed_lines_is_a_line() {
        let (_gate, mut walker) = walker("add 100 deny log logamount 1 ip from any to any");
        let (lines, taken) = sync_channel(10);
        let mut sender = LogSender::new(lines);
        walk(&mut walker, 8, Time::from_secs(5));
        sender.send(&mut walker, Time::from_secs(5), false);
        assert_eq!(texts(&taken), [format!("{LINE}, limit 1 reached")]);
        sender.send(&mut walker, Time::from_secs(6), false);
        assert_eq!(texts(&taken), ["ipfw: 100 suppressed 7 lines: limit 1 reached"]);
        // The last call does not wait for the summary's time.
        walk(&mut walker, 1, Time::from_secs(6));
        sender.send(&mut walker, Time::from_secs(6), true);
        assert_eq!(texts(&taken), ["ipfw: 100 suppressed 1 line: limit 1 reached"]);
    }

    #[test]
    fn times_are_utc() {
        let rows = [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1_709_210_096_123_456_789, "2024-02-29T12:34:56.123456Z"),
            (u64::MAX, "2554-07-21T23:34:33.709551Z"),
        ];
        for (nanos, expected) in rows {
            assert_eq!(utc(Time::from_nanos(nanos), true).to_string(), expected);
        }
        assert_eq!(utc(Time::from_secs(86_399), false).to_string(), "1970-01-01T23:59:59Z");
    }
}
