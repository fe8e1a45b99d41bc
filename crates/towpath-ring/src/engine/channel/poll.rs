//! From the client: its verdicts and its messages, each read once and checked.

use std::os::fd::OwnedFd;

use super::{Channel, PEER_CHECK};
use crate::engine::control_rx::ControlRx;
use crate::engine::peer_liveness::Death;
use crate::engine::rings::Rings;
use crate::engine::stats::ChannelStats;
use crate::engine::tx_ring::{Next, Taken, TxFrame, TxPayload, TxSink};
use crate::lane::loss_record::LossRecords;
use crate::lane::verdict::Decision;
use crate::shm::cpu;
use crate::shm::header::{Credentials, Header};
use crate::shm::seq::Seq;

/// Most messages that a [`Channel::poll_messages`] takes from a client's TX lane.
pub const POLL_MESSAGES: usize = 256;
/// Bytes of messages after which a [`Channel::poll_messages`] takes no more: they may overlap in the area, so its size is no bound.
pub const POLL_BYTES: usize = 4 << 20;

impl Channel {
    /// Reads what the client has decided and gives each frame's decision to `f` once; the frames are free then. Frames
    /// that are overdue at `now` (nanoseconds, of a clock that does not go back) get the default verdict.
    ///
    /// Decisions come in no particular order. A bounded amount of work per call: frames far behind an undecided one may
    /// take several. Returns how many frames there were, gap records included.
    pub fn poll_verdicts(&mut self, now: u64, mut f: impl FnMut(Seq, Decision<'_>)) -> usize {
        if self.checked == 0 || now >= self.checked.saturating_add(PEER_CHECK) {
            self.checked = now.max(1);
            self.check_peer();
            cpu::tell(&self.rings.own);
        }
        self.note_high_water();
        let Self { rings, control, stats, gaps, .. } = self;
        let decided = poll(rings, control, stats, gaps, now, &mut f);
        self.oneshots.forget_released(&self.rings.rx.frames);
        self.look_at_violations();
        // An overdue frame is with the client until its answer comes, too late.
        if self.policy.overdue_max.is_some_and(|max| self.stats.overdue - self.stats.late > max) {
            self.liveness.end(Death::Stuck);
        }
        decided
    }

    fn look_at_violations(&mut self) {
        if self.stats.violations > self.policy.violations_max {
            self.liveness.end(Death::Violations);
        }
    }

    /// Takes the messages that the client has sent (with [`Config::messages`](crate::Config::messages)) and gives a copy of each to `f`: its
    /// header, of which the length was checked and the sender is the kernel's word, and its payload. Returns how many, [`POLL_MESSAGES`] at
    /// most, and none after [`POLL_BYTES`]: with less of both, all that had been sent was taken, but
    /// for what stands behind a message that is not where its header says (a violation). The client may wait for the room that
    /// they leave; [`kick`](Self::kick) tells it.
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

    /// The same, but a message of which `sink` says so stays in the client's memory until it is [given back](Self::give_back): for
    /// those that are only passed on, and whose bytes nobody looks at, because the client may still change them. Messages that are
    /// not in the ring, or that cross its end, are copied all the same.
    pub fn poll_frames(&mut self, sink: &mut impl TxSink) -> usize {
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
                    // One that we had no descriptor for is not the client's fault.
                    self.stats.violations += u64::from(!self.control.take_short());
                    self.look_at_violations();
                    return count;
                }
                Ok(Next::Message(found, taken)) => {
                    self.stats.messages += 1;
                    // Who sends is what the kernel said, not what the sender says.
                    let Credentials { pid, uid, gid } = self.liveness.peer;
                    let header = Header { pid, uid, gid, ..found.header };
                    match taken {
                        Taken::Held(frame) => sink.take(&header, TxPayload::Held(frame)),
                        Taken::Copied(bytes) => {
                            left = left.saturating_sub(bytes.len());
                            sink.take(&header, TxPayload::Copied(&bytes));
                            rings.tx.put_back(bytes);
                        }
                    }
                }
                Err(_) => {
                    // Where the next message would be is not known any more.
                    self.stats.violations += 1;
                    self.liveness.end(Death::Violations);
                }
            }
        }
        POLL_MESSAGES
    }

    /// The memory that the client's messages are in, and its length: a descriptor of a memory that cannot shrink, to be mapped for
    /// reading by whoever passes on what is [held](Self::poll_frames).
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn tx_area(&self) -> std::io::Result<(OwnedFd, usize)> {
        Ok((self.rings.tx_fd.try_clone()?, self.rings.layout.tx.bytes()))
    }

    /// Gives a message back to the client, which may use its memory again. It is woken by the next [`kick`](Self::kick).
    pub fn give_back(&mut self, frame: TxFrame) {
        self.rings.tx.give_back(&self.rings.own, &frame);
    }

    /// When [`poll_verdicts`](Self::poll_verdicts) should be called again at the latest, for frames that become overdue.
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
