//! The log of dropped packets, and frames that passed the rules and failed to leave.
//!
//! The egress keeps a bounded number of them until the engine takes them, after a burst. Without a trace, one frame of each reason is
//! enough, for the log.

use std::ops::Range;
use std::time::Duration;

use towpath_gate::{Dir, LogEntry, PacketLog, PortId, SuppressedBy};
use towpath_wire::{self as wire, Time};

use crate::drop_reason::{DropReason, Drops};
use crate::meta::Meta;

/// Shortest time between two lines of one reason.
const PERIOD: Duration = Duration::from_secs(1);

/// The dropped packets that are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogDrops {
    /// None.
    #[default]
    No,
    /// Those that no rule and no inspector decided to drop.
    Losses,
    /// All.
    All,
}

impl LogDrops {
    /// Returns true if packets with this drop reason are logged.
    fn includes(self, reason: DropReason) -> bool {
        match self {
            Self::No => false,
            Self::Losses => !reason.is_decision() && !reason.is_logged_by_gate(),
            Self::All => !reason.is_logged_by_gate(),
        }
    }
}

/// Writes at most one line per second and reason to the packet log. The others are counted as suppressed.
#[derive(Debug)]
pub(crate) struct DropLog {
    wanted: [bool; DropReason::ALL.len()],
    /// Earliest time of the next line, by reason.
    next: [Time; DropReason::ALL.len()],
    /// Packets that failed to leave, were logged or counted as suppressed, and are not yet counted by their port.
    pub(crate) told: Drops,
}

impl DropLog {
    pub(crate) fn new(which: LogDrops) -> Self {
        let mut wanted = [false; DropReason::ALL.len()];
        DropReason::ALL.iter().for_each(|reason| wanted[*reason as usize] = which.includes(*reason));
        Self { wanted, next: [Time::default(); DropReason::ALL.len()], told: Drops::default() }
    }

    /// Returns true if packets with this drop reason are logged.
    #[inline]
    pub(crate) fn wants(&self, reason: DropReason) -> bool {
        self.wanted[reason as usize]
    }

    /// Logs one of `packets` packets with this drop reason, if a line is due.
    #[cold]
    pub(crate) fn put(
        &mut self,
        reason: DropReason,
        packets: u64,
        now: Time,
        entry: impl FnOnce() -> LogEntry,
        log: &mut PacketLog,
    ) {
        let next = &mut self.next[reason as usize];
        let due = now >= *next;
        if due {
            *next = now + PERIOD;
            log.put(entry());
        }
        let rest = packets - u64::from(due && packets > 0);
        if rest > 0 {
            log.suppress(now, None, SuppressedBy::Rate(reason.log_words()), rest);
        }
    }
}

/// The log entry of a dropped packet; `rule` is the rule that decided.
pub(crate) fn entry(
    reason: DropReason,
    rule: Option<u32>,
    (bytes, meta): (&[u8], &Meta),
    (dir, port): (Dir, Option<PortId>),
    now: Time,
) -> LogEntry {
    match wire::parse(meta.link, bytes, meta.wire_len) {
        Ok(packet) => LogEntry::new(now, rule, reason.log_words(), dir, port, &packet),
        Err(_) => LogEntry::malformed(now, reason.log_words(), port, meta.wire_len),
    }
}

/// Frames that are kept for a trace until the engine takes them, and their bytes.
const FRAMES: usize = 1024;
const BYTES: usize = 2 << 20;

/// Bytes of a frame that are kept without a trace: the headers, for the log.
const HEADERS: usize = 256;

/// Frames that passed the rules and failed to leave.
#[derive(Debug)]
pub(crate) struct LostFrames {
    frames: Vec<(DropReason, Meta, Range<usize>)>,
    bytes: Vec<u8>,
    /// A trace wants every frame.
    all: bool,
    /// A frame of this reason has been kept for the log.
    kept: [bool; DropReason::ALL.len()],
    /// Frames that were not kept while a trace wanted them.
    left_out: u64,
}

impl Default for LostFrames {
    fn default() -> Self {
        Self {
            frames: Vec::new(),
            bytes: Vec::new(),
            all: false,
            kept: [false; DropReason::ALL.len()],
            left_out: 0,
        }
    }
}

impl LostFrames {
    /// States whether a trace wants every frame.
    pub(crate) fn set_all(&mut self, all: bool) {
        self.all = all;
    }

    /// Keeps a frame, if it is wanted and there is room. A frame of the router itself is not a packet.
    #[cold]
    pub(crate) fn keep(&mut self, reason: DropReason, bytes: &[u8], meta: &Meta) {
        if meta.packets == 0 || std::mem::replace(&mut self.kept[reason as usize], true) && !self.all {
            return;
        }
        let bytes = if self.all { bytes } else { &bytes[..bytes.len().min(HEADERS)] };
        let start = self.bytes.len();
        if self.frames.len() >= FRAMES || start + bytes.len() > BYTES {
            self.left_out += 1;
            return;
        }
        self.bytes.extend_from_slice(bytes);
        self.frames.push((reason, *meta, start..self.bytes.len()));
    }

    /// Passes the frames to `each` and forgets them. Returns the number of frames for which there was no room.
    pub(crate) fn take(&mut self, mut each: impl FnMut(DropReason, &[u8], &Meta)) -> u64 {
        for (reason, meta, range) in self.frames.drain(..) {
            each(reason, &self.bytes[range], &meta);
        }
        self.bytes.clear();
        self.kept = [false; DropReason::ALL.len()];
        std::mem::take(&mut self.left_out)
    }
}
