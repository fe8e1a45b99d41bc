//! Input from the client: its verdicts and messages, each read once and checked.

use std::os::fd::OwnedFd;

use super::{Channel, PEER_CHECK};
use crate::engine::control_rx::ControlRx;
use crate::engine::peer_liveness::Death;
use crate::engine::rings::Rings;
use crate::engine::stats::ChannelStats;
use crate::engine::tx_ring::{self, Next, Taken, TxFrame, TxPayload, TxSink};
use crate::lane::loss_record::LossRecords;
use crate::lane::verdict::Decision;
use crate::shm::cpu;
use crate::shm::header::{Credentials, Header};
use crate::shm::seq::Seq;

/// Largest number of messages that one [`Channel::poll_messages`] takes.
pub const POLL_MESSAGES: usize = 256;
/// Bytes of messages after which [`Channel::poll_messages`] stops. Messages may overlap in the area, so its size is
/// no limit. A one-shot message counts 64 KiB more, for its system calls.
pub const POLL_BYTES: usize = 4 << 20;

impl Channel {
    /// Reads the client's verdicts and calls `f` once per decided frame; the frame is free then. Frames that are
    /// overdue at `now` (nanoseconds of a monotonic clock) get the default verdict.
    ///
    /// The order of decisions is unspecified. A call does bounded work; verdicts far behind an undecided frame may
    /// take several calls. Returns the number of decided frames, loss records included.
    pub fn poll_verdicts(&mut self, now: u64, mut f: impl FnMut(Seq, Decision<'_>)) -> usize {
        if self.checked == 0 || now >= self.checked.saturating_add(PEER_CHECK) {
            self.checked = now.max(1);
            self.check_peer();
            self.control.renew(now);
            cpu::tell(&self.rings.own);
        }
        self.note_high_water();
        let before = self.control.awaits_news().then(|| self.news());
        let Self { rings, control, stats, gaps, .. } = self;
        let decided = poll(rings, control, stats, gaps, now, &mut f);
        if before.is_some_and(|before| before != self.news()) {
            self.control.note_news();
        }
        self.control.close_used();
        self.oneshots.forget_released(&self.rings.rx.frames);
        self.look_at_violations();
        // The client has an overdue frame until it releases the frame, which `late` counts.
        if self.policy.overdue_max.is_some_and(|max| self.stats.overdue - self.stats.late > max) {
            self.liveness.end(Death::Stuck);
        }
        decided
    }

    /// Changes with every verdict that a poll has read.
    fn news(&self) -> (u64, usize) {
        let ChannelStats { decided, invalid, late, holds_refused, .. } = self.stats;
        (decided + invalid + late + holds_refused, self.rings.rx.frames.skipped().len())
    }

    fn look_at_violations(&mut self) {
        if self.stats.violations > self.policy.violations_max {
            self.liveness.end(Death::Violations);
        }
    }

    /// Receives the client's messages (with [`Config::messages`](crate::Config::messages)): calls `f` with a checked
    /// header, whose sender is the kernel's information, and a copy of the payload. Returns the number of messages,
    /// at most [`POLL_MESSAGES`]; stops after [`POLL_BYTES`]. Below both limits, all messages were received, except
    /// those after a message with a missing payload (a violation), and those for which [`has_message`](Self::has_message)
    /// still returns true: they follow replacements, of which a call skips at most 128. Call [`kick`](Self::kick)
    /// afterwards: the client may wait for the space.
    pub fn poll_messages(&mut self, mut f: impl FnMut(&Header, &[u8])) -> usize {
        struct Copies<F>(F);
        impl<F: FnMut(&Header, &[u8])> TxSink for Copies<F> {
            fn hold(&mut self, _: &Header) -> bool {
                false
            }

            fn take(&mut self, header: &Header, payload: TxPayload<'_>) {
                if let TxPayload::Copied(bytes) = payload {
                    self.0(header, bytes);
                }
            }
        }
        self.poll_frames(&mut Copies(&mut f))
    }

    /// Like [`poll_messages`](Self::poll_messages), but the payload stays in the client's memory until
    /// [`give_back`](Self::give_back) if `sink` returns true from `hold`. Use it for payloads that are only
    /// forwarded and never read, because the client may still change them. Payloads outside of the ring, or across
    /// its end, are copied in any case.
    pub fn poll_frames(&mut self, sink: &mut impl TxSink) -> usize {
        let count = self.take_frames(sink);
        if count > 0 {
            self.control.note_news();
        }
        self.control.close_used();
        count
    }

    fn take_frames(&mut self, sink: &mut impl TxSink) -> usize {
        let mut left = POLL_BYTES;
        for count in 0..POLL_MESSAGES {
            if left == 0 {
                return count;
            }
            if self.liveness.death() == Some(Death::Violations) || !self.policy.messages {
                return count;
            }
            let rings = &mut self.rings;
            let next =
                rings.tx.next(&rings.own, &rings.theirs, &mut self.control, |header| sink.hold(header));
            self.stats.oneshots_in += std::mem::take(&mut rings.tx.oneshots);
            match next {
                Ok(Next::Nothing) => return count,
                Ok(Next::Missing) => {
                    // A memfd lost for lack of a descriptor is not the client's fault.
                    self.stats.violations += u64::from(!self.control.take_short());
                    self.look_at_violations();
                    return count;
                }
                Ok(Next::Message(found, taken)) => {
                    self.stats.messages += 1;
                    // The sender is the process that the kernel reported, not the one in the header.
                    let Credentials { pid, uid, gid } = self.liveness.peer;
                    let header = Header { pid, uid, gid, ..found.header };
                    match taken {
                        Taken::Held(frame) => sink.take(&header, TxPayload::Held(frame)),
                        Taken::Copied(bytes) => {
                            left = left.saturating_sub(bytes.len() + tx_ring::calls(&header));
                            sink.take(&header, TxPayload::Copied(&bytes));
                            rings.tx.put_back(bytes);
                        }
                    }
                }
                Err(_) => {
                    // The position of the next message is unknown from here on.
                    self.stats.violations += 1;
                    self.liveness.end(Death::Violations);
                }
            }
        }
        POLL_MESSAGES
    }

    /// Descriptor and length of the memory of the client's messages, to be mapped for reading by the process that
    /// forwards [held](Self::poll_frames) payloads. The memory cannot shrink.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn tx_area(&self) -> std::io::Result<(OwnedFd, usize)> {
        Ok((self.rings.tx_fd.try_clone()?, self.rings.layout.tx.bytes()))
    }

    /// Releases a held message. The next [`kick`](Self::kick) wakes the client.
    pub fn give_back(&mut self, frame: TxFrame) {
        self.rings.tx.give_back(&self.rings.own, &frame);
    }

    /// Time of the next due [`poll_verdicts`](Self::poll_verdicts) for overdue frames, in nanoseconds.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.rings.verdict_reader.deadline()
    }
}

/// Polls a lane, without the gap records among the decisions.
#[inline]
fn poll(
    rings: &mut Rings,
    control: &mut ControlRx,
    stats: &mut ChannelStats,
    gaps: &mut LossRecords,
    now: u64,
    f: &mut impl FnMut(Seq, Decision<'_>),
) -> usize {
    let Rings { own, theirs, rx, tx, verdict_reader, .. } = rings;
    let lane = crate::engine::verdict_reader::Lane { own, theirs, rx, tx, control, stats };
    if gaps.none_out() {
        return verdict_reader.poll(lane, now, f);
    }
    verdict_reader.poll(lane, now, &mut |seq, decision| {
        if !gaps.take(seq) {
            f(seq, decision);
        }
    })
}
