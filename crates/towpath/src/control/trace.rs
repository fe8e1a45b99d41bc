//! A trace: copies of what one channel gets, with the verdicts that came for them.
//!
//! A copy waits in the tap until its frame is decided, and then goes to whoever traces. Both places are bounded; what
//! finds no room is dropped and counted, and nothing that the channel does ever waits for a tap.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};

use towpath_engine::DropReason;
use towpath_ring::{Meta, Seq};

/// Copies that wait for their verdict, and their bytes.
const UNDECIDED: usize = 4096;
const UNDECIDED_BYTES: usize = 8 << 20;

/// Copies that wait to be read.
const READY: usize = 1024;

/// A packet that was traced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Its number on the channel.
    pub seq: u32,
    /// Capture time, nanoseconds since the epoch.
    pub time: u64,
    /// Bytes on the wire.
    pub wire_len: u32,
    /// Link type, pcap's number.
    pub link: u16,
    /// The port that it came in on.
    pub port: u32,
    /// The queue.
    pub queue: u32,
    /// The packet.
    pub bytes: Box<[u8]>,
    /// How long the inspector had it, in nanoseconds of the engine's clock.
    pub after: u64,
    /// What came of it.
    pub note: TraceOutcome,
}

/// What came of a frame, for a comment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceOutcome {
    /// A verdict, its mark and mask, and whether it is for the flow.
    Verdict {
        /// Its name, with what belongs to it.
        verdict: String,
        /// New bits of the mark, and which.
        mark: (u32, u32),
        /// From now on.
        flow: bool,
    },
    /// No inspector decided.
    Lost(DropReason),
    /// The rules decided, this one last; and what that was.
    Decided {
        /// Its number.
        rule: Option<u32>,
        /// In words.
        what: String,
    },
}

/// The engine's end of a trace.
#[derive(Debug)]
pub struct TraceBuffer {
    undecided: VecDeque<TraceRecord>,
    bytes: usize,
    ready: SyncSender<TraceRecord>,
    /// Counted here, read by who traces. Relaxed: a statistic, which orders nothing.
    dropped: Arc<AtomicU64>,
    /// Lives as long as the other end.
    open: Weak<()>,
}

/// The other end.
#[derive(Debug)]
pub(super) struct TraceSource {
    pub(super) ready: Receiver<TraceRecord>,
    pub(super) dropped: Arc<AtomicU64>,
    /// As long as this lives, somebody traces.
    _open: Arc<()>,
}

impl TraceBuffer {
    pub(super) fn new() -> (Self, TraceSource) {
        let (tx, ready) = sync_channel(READY);
        let dropped = Arc::new(AtomicU64::new(0));
        let open = Arc::new(());
        let tap = Self {
            undecided: VecDeque::new(),
            bytes: 0,
            ready: tx,
            dropped: Arc::clone(&dropped),
            open: Arc::downgrade(&open),
        };
        (tap, TraceSource { ready, dropped, _open: open })
    }

    /// Another one, of another thread of the engine, for the same trace.
    pub(super) fn again(&self) -> Self {
        Self {
            undecided: VecDeque::new(),
            bytes: 0,
            ready: self.ready.clone(),
            dropped: Arc::clone(&self.dropped),
            open: Weak::clone(&self.open),
        }
    }

    /// True when nobody traces any more, whether there was something for it meanwhile or not.
    pub fn is_over(&self) -> bool {
        self.open.strong_count() == 0
    }

    /// The channel gets this frame.
    pub fn given(&mut self, Seq(seq): Seq, bytes: &[u8], meta: &Meta) {
        if self.is_over() {
            return;
        }
        if self.undecided.len() >= UNDECIDED || self.bytes + bytes.len() > UNDECIDED_BYTES {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.bytes += bytes.len();
        let traced = TraceRecord {
            seq,
            time: meta.time,
            wire_len: meta.wire_len,
            link: meta.layers.link,
            port: meta.port,
            queue: meta.group,
            bytes: bytes.into(),
            after: 0,
            note: TraceOutcome::Lost(DropReason::InspectorDied),
        };
        self.undecided.push_back(traced);
    }

    /// What came of frame `seq`, which the inspector had for `after` nanoseconds.
    pub fn decided(&mut self, Seq(seq): Seq, after: u64, note: impl FnOnce() -> TraceOutcome) {
        // Sequence numbers are given in order: the distance from the first is at most an index.
        let place = self.undecided.binary_search_by_key(&0, |traced| traced.seq.wrapping_sub(seq) as i32);
        let Ok(index) = place else { return };
        let Some(mut traced) = self.undecided.remove(index) else { return };
        self.bytes -= traced.bytes.len();
        traced.after = after;
        traced.note = note();
        self.push(traced);
    }

    /// A packet that is decided already.
    pub fn push(&mut self, traced: TraceRecord) {
        match self.ready.try_send(traced) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            // It is over.
            Err(TrySendError::Disconnected(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(tap: &mut TraceBuffer, seq: u32, len: usize) {
        tap.given(Seq(seq), &vec![0; len], &Meta { wire_len: len as u32, ..Meta::default() });
    }

    #[test]
    fn a_copy_comes_out_when_its_frame_is_decided() {
        let (mut tap, source) = TraceBuffer::new();
        for seq in [u32::MAX, 0, 1] {
            given(&mut tap, seq, 10);
        }
        tap.decided(Seq(0), 50, || TraceOutcome::Lost(DropReason::Overdue));
        tap.decided(Seq(0), 50, || TraceOutcome::Lost(DropReason::Overdue));
        tap.decided(Seq(7), 50, || TraceOutcome::Lost(DropReason::Overdue));
        tap.decided(Seq(u32::MAX), 60, || TraceOutcome::Lost(DropReason::InspectorDied));
        let got: Vec<_> =
            source.ready.try_iter().map(|traced| (traced.seq, traced.after, traced.note)).collect();
        assert_eq!(
            got,
            [
                (0, 50, TraceOutcome::Lost(DropReason::Overdue)),
                (u32::MAX, 60, TraceOutcome::Lost(DropReason::InspectorDied))
            ]
        );
        let again = tap.again();
        assert!(!tap.is_over() && !again.is_over());
        // Nothing has to come for it to be noticed.
        drop(source);
        assert!(tap.is_over() && again.is_over());
        tap.decided(Seq(1), 70, || TraceOutcome::Lost(DropReason::Overdue));
    }

    #[test]
    fn what_finds_no_room_is_dropped_and_counted() {
        let (mut tap, source) = TraceBuffer::new();
        for seq in 0..5000 {
            given(&mut tap, seq, 1);
        }
        assert_eq!(source.dropped.load(Ordering::Relaxed), 5000 - UNDECIDED as u64);
        for seq in 0..5000 {
            tap.decided(Seq(seq), 9, || TraceOutcome::Lost(DropReason::InvalidVerdict));
        }
        assert_eq!(source.dropped.load(Ordering::Relaxed), 5000 - READY as u64);
        assert_eq!(source.ready.try_iter().count(), READY);
        given(&mut tap, 6000, UNDECIDED_BYTES);
        given(&mut tap, 6001, 1);
        assert_eq!(source.dropped.load(Ordering::Relaxed), 5001 - READY as u64);
    }
}
