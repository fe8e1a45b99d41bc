//! A scene: a sequence of packets, each with ipfw's verdict and the rule that gives it.
//!
//! The verdicts are derived by hand from ipfw(8), not by running Towpath. A difference is an error in one of them.

use std::fmt::{self, Write as _};
use std::path::Path as FilePath;

use towpath_port::{Error, Frame, LinkType, pcap};

use super::frames::{Ip4, Path};
use super::tcp::Connection;

/// 2024-05-06 08:00:00 UTC, in microseconds.
const START_US: u64 = 1_714_982_400_000_000;
/// From one packet to the next, unless the scene waits.
const STEP_US: u64 = 2_000;

/// Where a packet's walk through the rules ends or pauses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    verdict: Verdict,
    /// The rule; `None` if the packet was dropped before the rules.
    rule: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Verdict {
    Pass,
    Drop,
    Reject,
    Queue(u16),
    Tee(u16),
}

pub(crate) const fn pass(rule: u32) -> Stop {
    Stop { verdict: Verdict::Pass, rule: Some(rule) }
}

pub(crate) const fn drop(rule: u32) -> Stop {
    Stop { verdict: Verdict::Drop, rule: Some(rule) }
}

/// Dropped, and answered if ipfw answers.
pub(crate) const fn reject(rule: u32) -> Stop {
    Stop { verdict: Verdict::Reject, rule: Some(rule) }
}

/// To the inspector of a queue, by inspect or divert.
pub(crate) const fn queue(queue: u16, rule: u32) -> Stop {
    Stop { verdict: Verdict::Queue(queue), rule: Some(rule) }
}

/// A copy to a queue; the packet goes on.
pub(crate) const fn tee(queue: u16, rule: u32) -> Stop {
    Stop { verdict: Verdict::Tee(queue), rule: Some(rule) }
}

/// Dropped before the first rule.
pub(crate) const UNSEEN: Stop = Stop { verdict: Verdict::Drop, rule: None };

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verdict {
            Verdict::Pass => write!(f, "pass"),
            Verdict::Drop => write!(f, "drop"),
            Verdict::Reject => write!(f, "reject"),
            Verdict::Queue(queue) => write!(f, "queue {queue}"),
            Verdict::Tee(queue) => write!(f, "tee {queue}"),
        }?;
        match self.rule {
            Some(rule) => write!(f, " rule {rule:05}"),
            None => write!(f, " rule none"),
        }
    }
}

/// The packets so far.
#[derive(Debug, Default)]
pub(crate) struct Scene {
    now_us: u64,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    time_us: u64,
    stops: String,
    what: String,
    frame: Vec<u8>,
}

impl Scene {
    /// Advances the time of the next packet.
    pub(crate) fn wait(&mut self, seconds: u64) {
        self.now_us += seconds * 1_000_000;
    }

    /// Adds a packet: its verdicts, a description, its frame.
    pub(crate) fn frame(&mut self, stops: &[Stop], what: &str, frame: Vec<u8>) {
        self.now_us += STEP_US;
        let stops = stops.iter().map(Stop::to_string).collect::<Vec<_>>().join(", ");
        self.rows.push(Row { time_us: self.now_us, stops, what: what.to_owned(), frame });
    }

    /// A TCP segment.
    pub(crate) fn tcp(
        &mut self,
        stops: &[Stop],
        what: &str,
        (connection, side): (&mut Connection, usize),
        flags: &str,
        payload: &[u8],
    ) {
        let frame = connection.segment(self.id(), side, flags, payload);
        self.frame(stops, what, frame);
    }

    /// The first segment of a connection that the scene does not follow further.
    pub(crate) fn syn(&mut self, stops: &[Stop], what: &str, path: Path, ports: (u16, u16)) {
        let mut connection = Connection::new(path, ports, [0x1000_0000 + u32::from(self.id()), 0]);
        self.tcp(stops, what, (&mut connection, super::tcp::CLIENT), "S", &[]);
    }

    /// A UDP datagram.
    pub(crate) fn udp(&mut self, stops: &[Stop], what: &str, path: Path, ports: (u16, u16), payload: &[u8]) {
        let frame = path.udp(self.id(), ports, payload);
        self.frame(stops, what, frame);
    }

    /// An ICMP or ICMPv6 message.
    pub(crate) fn icmp(
        &mut self,
        stops: &[Stop],
        what: &str,
        path: Path,
        kind: (u8, u8),
        rest: [u8; 4],
        payload: &[u8],
    ) {
        let frame = path.icmp(self.id(), kind.0, kind.1, rest, payload);
        self.frame(stops, what, frame);
    }

    /// An IPv4 packet of any kind.
    pub(crate) fn ip4(&mut self, stops: &[Stop], what: &str, path: Path, part: Ip4<'_>, payload: &[u8]) {
        let frame = path.ip4(self.id(), part, payload);
        self.frame(stops, what, frame);
    }

    /// Writes `NAME.pcap` and `NAME.expected`.
    pub(crate) fn write(&self, directory: &FilePath, name: &str) -> Result<(), Error> {
        let mut file = pcap::Writer::create(directory.join(format!("{name}.pcap")))?;
        for row in &self.rows {
            let wire_len = row.frame.len() as u32;
            let time_ns = (START_US + row.time_us) * 1_000;
            let link = LinkType::ETHERNET;
            file.write(
                Frame { bytes: &row.frame, wire_len, time_ns, link, interface: 0, meta: Default::default() },
                None,
            )?;
        }
        file.finish()?;
        let path = directory.join(format!("{name}.expected"));
        std::fs::write(&path, self.expected(name))
            .map_err(|source| Error::Io { name: path.display().to_string(), source })
    }

    fn expected(&self, name: &str) -> String {
        let width = self.rows.iter().map(|row| row.stops.len()).max().unwrap_or(0);
        let mut text =
            format!("# What ipfw does with each packet of {name}.pcap by the rules of {name}.ipfw.\n");
        for (index, row) in self.rows.iter().enumerate() {
            let number = index + 1;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{number:3}  {:width$}  # {}", row.stops, row.what);
        }
        text
    }

    /// The IPv4 identification of the next packet.
    fn id(&self) -> u16 {
        self.rows.len() as u16 + 1
    }
}
