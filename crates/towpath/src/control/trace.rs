//! Traces: copies of packets with their verdicts, from the engine's threads to one client.
//!
//! A copy of a frame waits in the [`TraceBuffer`] until the frame is decided, and then in a queue until the server reads it from the
//! [`TraceSource`]. Both are bounded. A copy without room is dropped and counted; the engine never waits for a trace.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};

use towpath_engine::{DropReason, Outcome, TraceSink, TracedPacket};
use towpath_ring::{Decision, Meta, Seq, Verdict};

use crate::offload::Pause;

/// Maximum number of copies that wait for their verdict, and of their bytes.
const UNDECIDED: usize = 4096;
const UNDECIDED_BYTES: usize = 8 << 20;

/// Maximum number of copies that wait for the server.
const READY: usize = 1024;

/// A traced packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TraceRecord {
    /// Its number on the channel, or in the engine.
    pub(super) seq: u32,
    /// Capture time in nanoseconds since the epoch.
    pub(super) time: u64,
    /// Bytes on the wire.
    pub(super) wire_len: u32,
    /// pcap's number of the link type.
    pub(super) link: u16,
    /// The number of the port on which it was received.
    pub(super) port: u32,
    /// The queue. 0 outside of a channel's trace.
    pub(super) queue: u32,
    pub(super) bytes: Box<[u8]>,
    /// The outcome, as Wireshark shows it beside the packet.
    pub(super) comment: String,
}

/// The engine thread's end of a trace.
#[derive(Debug)]
pub(super) struct TraceBuffer {
    undecided: VecDeque<TraceRecord>,
    bytes: usize,
    ready: SyncSender<TraceRecord>,
    /// Relaxed: a counter that orders nothing.
    dropped: Arc<AtomicU64>,
    /// Dead when the source is dropped.
    open: Weak<()>,
}

/// The server's end of a trace.
#[derive(Debug)]
pub(super) struct TraceSource {
    pub(super) ready: Receiver<TraceRecord>,
    pub(super) dropped: Arc<AtomicU64>,
    _open: Arc<()>,
    /// Meanwhile all packets take the path through the engine.
    pub(super) pause: Option<Pause>,
}

impl TraceBuffer {
    pub(super) fn new() -> (Self, TraceSource) {
        let (tx, ready) = sync_channel(READY);
        let dropped = Arc::new(AtomicU64::new(0));
        let open = Arc::new(());
        let buffer = Self {
            undecided: VecDeque::new(),
            bytes: 0,
            ready: tx,
            dropped: Arc::clone(&dropped),
            open: Arc::downgrade(&open),
        };
        (buffer, TraceSource { ready, dropped, _open: open, pause: None })
    }

    /// Creates the buffer of another engine thread for the same trace.
    pub(super) fn for_another_thread(&self) -> Self {
        Self {
            undecided: VecDeque::new(),
            bytes: 0,
            ready: self.ready.clone(),
            dropped: Arc::clone(&self.dropped),
            open: Weak::clone(&self.open),
        }
    }

    fn drop_one(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }

    fn push(&mut self, record: TraceRecord) {
        match self.ready.try_send(record) {
            // Disconnected: the trace has ended.
            Ok(()) | Err(TrySendError::Disconnected(_)) => {}
            Err(TrySendError::Full(_)) => self.drop_one(),
        }
    }
}

impl TraceSink for TraceBuffer {
    fn is_over(&self) -> bool {
        self.open.strong_count() == 0
    }

    fn given(&mut self, Seq(seq): Seq, bytes: &[u8], meta: &Meta) {
        if self.is_over() {
            return;
        }
        if self.undecided.len() >= UNDECIDED || self.bytes + bytes.len() > UNDECIDED_BYTES {
            return self.drop_one();
        }
        self.bytes += bytes.len();
        self.undecided.push_back(TraceRecord {
            seq,
            time: meta.time,
            wire_len: meta.wire_len,
            link: meta.layers.link,
            port: meta.port,
            queue: meta.group,
            bytes: bytes.into(),
            comment: String::new(),
        });
    }

    fn decided(&mut self, Seq(seq): Seq, after: u64, decision: &Result<Decision<'_>, DropReason>) {
        // Sequence numbers are given in order: the distance from the first is at most an index.
        let place = self.undecided.binary_search_by_key(&0, |record| record.seq.wrapping_sub(seq) as i32);
        let Ok(index) = place else { return };
        let Some(mut record) = self.undecided.remove(index) else { return };
        self.bytes -= record.bytes.len();
        let outcome = comment(decision);
        let (micros, nanos) = (after / 1000, after % 1000);
        record.comment =
            format!("queue {}, seq {seq}: {outcome}, after {micros}.{nanos:03} us", record.queue);
        self.push(record);
    }

    fn left_out(&mut self, packets: u64) {
        // Relaxed: a counter that orders nothing.
        self.dropped.fetch_add(packets, Ordering::Relaxed);
    }

    fn packet(&mut self, packet: &TracedPacket<'_>) {
        let what = match (packet.outcome, packet.out) {
            (Outcome::Passed, Some(port)) => format!("pass, out by {port}"),
            (Outcome::Passed, None) => "pass".to_owned(),
            (Outcome::Dropped(reason), Some(port)) => format!("drop, {reason}, out by {port}"),
            (Outcome::Dropped(reason), None) => format!("drop, {reason}"),
            (Outcome::Rejected(_), _) => "reject".to_owned(),
        };
        let zone = if packet.zone > 0 { format!(", zone {}", packet.zone) } else { String::new() };
        let comment = match packet.rule {
            Some(rule) => format!("rule {rule}: {what}{zone}"),
            None => what + &zone,
        };
        self.push(TraceRecord {
            seq: packet.number as u32,
            time: packet.meta.time,
            wire_len: packet.meta.wire_len,
            link: packet.meta.link.0,
            port: packet.arrival.0.into(),
            queue: 0,
            bytes: packet.bytes.into(),
            comment,
        });
    }
}

/// The outcome of a frame as text.
fn comment(decision: &Result<Decision<'_>, DropReason>) -> String {
    let Decision { verdict, mark, mask, flow, .. } = match *decision {
        Err(reason) => return format!("no verdict, {reason}"),
        Ok(decision) => decision,
    };
    let mut text = match verdict {
        Verdict::Pass => "pass".to_owned(),
        Verdict::Drop | Verdict::Hold => "drop".to_owned(),
        Verdict::Reject => "reject".to_owned(),
        Verdict::Replace(bytes) => format!("replace by {} bytes", bytes.len()),
        Verdict::Queue(number) => format!("queue {number}"),
        Verdict::Repeat => "repeat".to_owned(),
    };
    if mask != 0 {
        text += &format!(", mark {mark:#x}/{mask:#x}");
    }
    if flow {
        text += ", for the flow";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(buffer: &mut TraceBuffer, seq: u32, len: usize) {
        buffer.given(Seq(seq), &vec![0; len], &Meta { wire_len: len as u32, ..Meta::default() });
    }

    #[test]
    fn a_copy_is_ready_when_its_frame_is_decided() {
        let (mut buffer, source) = TraceBuffer::new();
        for seq in [u32::MAX, 0, 1] {
            given(&mut buffer, seq, 10);
        }
        buffer.decided(Seq(0), 50, &Err(DropReason::Overdue));
        buffer.decided(Seq(0), 50, &Err(DropReason::Overdue));
        buffer.decided(Seq(7), 50, &Err(DropReason::Overdue));
        buffer.decided(Seq(u32::MAX), 2060, &Err(DropReason::InspectorDied));
        let got: Vec<_> = source.ready.try_iter().map(|record| record.comment).collect();
        assert_eq!(
            got,
            [
                "queue 0, seq 0: no verdict, overdue, after 0.050 us",
                "queue 0, seq 4294967295: no verdict, inspector_died, after 2.060 us"
            ]
        );
        let other = buffer.for_another_thread();
        assert!(!buffer.is_over() && !other.is_over());
        drop(source);
        assert!(buffer.is_over() && other.is_over());
        buffer.decided(Seq(1), 70, &Err(DropReason::Overdue));
    }

    #[test]
    fn copies_without_room_are_dropped_and_counted() {
        let (mut buffer, source) = TraceBuffer::new();
        let dropped = || source.dropped.load(Ordering::Relaxed);
        for seq in 0..5000 {
            given(&mut buffer, seq, 1);
        }
        assert_eq!(dropped(), 5000 - UNDECIDED as u64);
        for seq in 0..5000 {
            buffer.decided(Seq(seq), 9, &Err(DropReason::InvalidVerdict));
        }
        assert_eq!(dropped(), 5000 - READY as u64);
        assert_eq!(source.ready.try_iter().count(), READY);
        given(&mut buffer, 6000, UNDECIDED_BYTES);
        given(&mut buffer, 6001, 1);
        assert_eq!(dropped(), 5001 - READY as u64);
    }
}
