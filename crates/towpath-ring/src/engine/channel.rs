//! The engine's end of one attached client: one of its lanes. Each engine thread may own a lane.
//!
//! Invariant: all state that decisions depend on is private. `Producer` has the frame states, `VerdictReader` the
//! position in the records. Words that the client writes (release entries, records, TX headers and payloads) are
//! loaded once, compared with the private state, and never stored where they would be trusted later.

mod batch;
#[cfg(test)]
mod doorbell_tests;
mod poll;
mod send;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::arm_scan::Scan;
use crate::engine::control_rx::ControlRx;
use crate::engine::dump::Dump;
use crate::engine::oneshots::OneShots;
use crate::engine::peer_liveness::{Death, PeerLiveness};
use crate::engine::rings::Rings;
use crate::engine::stats::ChannelStats;
use crate::lane::loss_record::LossRecords;
use crate::shm::abi;
use crate::shm::cpu;
use crate::shm::geometry::Geometry;
use crate::shm::header::Credentials;
use crate::shm::park::{Ringer, Sleeper};
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;
use crate::shm::sys;

pub use poll::{POLL_BYTES, POLL_MESSAGES};

/// Interval of liveness checks of the peer, in nanoseconds.
pub(crate) const PEER_CHECK: u64 = 5_000_000;

/// One attached client: [`reserve`](Self::reserve) and [`send`](Self::send) publish frames,
/// [`poll_verdicts`](Self::poll_verdicts) returns verdicts.
///
/// For the invariant of the frame counters, see [`ChannelStats`].
#[derive(Debug)]
pub struct Channel {
    pub(crate) lane: u32,
    pub(crate) rings: Rings,
    pub(crate) control: ControlRx,
    pub(crate) sleeper: Sleeper,
    pub(crate) ringer: Ringer,
    pub(crate) oneshots: OneShots,
    pub(crate) policy: ClientPolicy,
    pub(crate) dump: Option<Dump>,
    pub(crate) gaps: LossRecords,
    /// Time of the last liveness check.
    pub(crate) checked: u64,
    pub(crate) stats: ChannelStats,
    /// Frames lost for this client: the word that the client reads.
    pub(crate) lost: u64,
    /// The other lanes, until [`split`](Self::split).
    pub(crate) others: Vec<Channel>,
    /// The request for a doorbell, from [`arm`](Self::arm) until the doorbell was read.
    pub(crate) armed: Option<Scan>,
    pub(crate) liveness: Arc<PeerLiveness>,
}

/// Limits for the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientPolicy {
    pub(crate) violations_max: u64,
    pub(crate) overdue_max: Option<u64>,
    /// Whether the engine receives messages from the client.
    pub(crate) messages: bool,
    /// Whether the client wants connection events.
    pub(crate) events: bool,
    /// Whether the client takes messages in parts.
    pub(crate) parts: bool,
}

/// One outstanding message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameOut {
    /// Sequence number.
    pub seq: Seq,
    /// First frame.
    pub first: u32,
    /// Number of frames.
    pub frames: u32,
    /// The client holds it.
    pub held: bool,
    /// It was decided by default; the client still has its memory.
    pub overdue: bool,
}

impl Channel {
    /// Splits the channel into its lanes, one per engine thread. A lane returns the verdicts for the frames sent on
    /// it. The lanes share the client and its liveness: if one of them is [detached](Self::detach) or dropped, all end.
    /// Before the split, a channel is its first lane.
    ///
    /// ```
    /// use towpath_ring::{Config, Consumer, Endpoint, Meta, Verdict};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("ring.sock");
    /// let mut endpoint = Endpoint::bind(&path, Config { lanes: 2, ..Config::default() })?;
    /// let client = std::thread::spawn(move || {
    ///     let mut queue = Consumer::attach(&path).expect("the engine is there");
    ///     for _ in 0..2 {
    ///         let frame = queue.recv().expect("a valid ring").expect("a frame");
    ///         queue.verdict(frame, Verdict::Pass);
    ///     }
    ///     queue.flush();
    ///     queue
    /// });
    /// let channel = loop {
    ///     match endpoint.accept()? {
    ///         Some(channel) => break channel,
    ///         None => endpoint.wait(None)?,
    ///     }
    /// };
    /// let threads = channel.split().into_iter().map(|mut lane| {
    ///     std::thread::spawn(move || {
    ///         lane.send(b"from this thread", &Meta::default()).expect("room");
    ///         while lane.poll_verdicts(0, |_, decision| assert_eq!(decision.verdict, Verdict::Pass)) == 0 {
    ///             lane.wait(None).expect("poll(2)");
    ///         }
    ///         lane
    ///     })
    /// });
    /// let threads: Vec<_> = threads.collect();
    /// // Dropped together: dropping one lane ends the channel.
    /// let lanes: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    /// # client.join().unwrap();
    /// # drop(lanes);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn split(mut self) -> Vec<Self> {
        let others = std::mem::take(&mut self.others);
        let mut lanes = vec![self];
        lanes.extend(others);
        lanes
    }

    /// Index of this lane, from 0.
    #[must_use]
    pub fn lane(&self) -> u32 {
        self.lane
    }

    /// Number of lanes of the channel ([`Config::lanes`](crate::Config::lanes)).
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.liveness.lanes()
    }

    /// Credentials of the client's process.
    #[must_use]
    pub fn peer(&self) -> Credentials {
        self.liveness.peer
    }

    /// Name that the client gave, printable. Not verified.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.liveness.name
    }

    /// Updates the high-water mark before frames are released. Only publication raises the number of outstanding
    /// frames.
    fn note_high_water(&mut self) {
        self.stats.high_water = self.stats.high_water.max(self.held().into());
    }

    /// Undecided outstanding frames.
    #[must_use]
    #[inline]
    pub fn held(&self) -> u32 {
        self.rings.rx.frames.lent() + self.rings.rx.frames.held()
    }

    /// Why the channel ended, if it has. Returns the known state; [`check_peer`](Self::check_peer) asks the system.
    #[must_use]
    pub fn death(&self) -> Option<Death> {
        self.liveness.death()
    }

    /// Returns true if the channel has ended: publish no more frames, poll the remaining verdicts, then call
    /// [`drain_held`](Self::drain_held).
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.liveness.is_over()
    }

    /// Asks the system whether the client lives, and reads its doorbells. [`poll_verdicts`](Self::poll_verdicts)
    /// does so every 5 ms of its clock, and [`wait`](Self::wait) each time.
    pub fn check_peer(&mut self) -> bool {
        self.control.listen();
        if self.control.rung && self.armed.take().is_some() {
            // The client has sent its doorbell. With the word cleared, it sends no other one.
            self.sleeper.disarm([&self.rings.own]);
        }
        let invalid = self.control.take_invalid();
        if invalid > 0 {
            // Bounded: a limited number of violations ends the channel.
            let PeerLiveness { name, peer, .. } = &*self.liveness;
            log::warn!(
                peer = peer.uid;
                "client {name:?} (process {}): {invalid} invalid messages, or messages with more than {} unused descriptors",
                peer.pid,
                self.control.descriptors_max()
            );
            self.stats.violations += invalid;
        }
        if self.control.is_ended() {
            self.liveness.close(Death::Closed);
        } else if !self.liveness.is_over() && self.liveness.has_exited() {
            self.liveness.end(Death::Exited);
        }
        !self.liveness.is_over()
    }

    /// Ends the channel. The client sees the end of its socket.
    pub fn detach(&mut self) {
        self.liveness.end(Death::Detached);
    }

    /// Gives up a client that has no frame, for this engine or its successor to give it new memory ([`Endpoint::adopt`]).
    ///
    /// Returns the client's socket, once for all lanes. `None`: the channel has ended, was handed over by another lane, or the client has
    /// frames of this lane. The channel has ended afterwards; the client's connection stays.
    ///
    /// [`Endpoint::adopt`]: crate::Endpoint::adopt
    pub fn hand_over(&mut self) -> Option<OwnedFd> {
        if self.has_frames() {
            return None;
        }
        self.liveness.hand_over()
    }

    /// Returns true while the client has a frame of this lane, overdue ones included.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.rings.rx.frames.free() < self.rings.rx.frames.frame_nr()
    }

    /// Takes back every undecided frame of an ended channel, once each, oldest first where the order is known. The
    /// caller decides them (with the default verdict, or at another client). Detaches the client if the channel has
    /// not ended.
    ///
    /// Call [`poll_verdicts`](Self::poll_verdicts) before: verdicts that the client gave in time count.
    pub fn drain_held(&mut self, mut f: impl FnMut(Seq)) {
        self.detach();
        self.note_high_water();
        let mut drained = 0;
        let frames = &mut self.rings.rx.frames;
        let numbers = std::iter::successors(Some(frames.oldest()), |seq| Some(seq.next()));
        let numbers = numbers.take(frames.next_seq().since(frames.oldest()) as usize);
        let mut all: Vec<_> = numbers.filter_map(|seq| frames.find(seq)).collect();
        all.extend_from_slice(frames.skipped());
        for at in all {
            let (seq, undecided) = (frames.seq_at(at), !frames.is_expired(at));
            frames.release(at);
            if undecided {
                drained += 1;
                if !self.gaps.take(seq) {
                    f(seq);
                }
            }
        }
        self.stats.drained += drained;
    }

    /// Sleeps until the client has decided a frame, has sent a message or has disconnected, at most `timeout`. Wakes
    /// the client first ([`kick`](Self::kick)).
    ///
    /// Verdicts that [`poll_verdicts`](Self::poll_verdicts) has returned do not end the sleep. To wait for space,
    /// retry after a poll that found verdicts, and wait only after one that found none: `while channel.send(..) ==
    /// Err(ReserveError::RingFull) { if channel.poll_verdicts(..) == 0 { channel.wait(..)?; } }`.
    ///
    /// # Errors
    /// poll(2) failed.
    pub fn wait(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.kick();
        if self.arm() {
            sys::wait(&self.liveness.watched(self.lane), timeout)?;
        }
        self.disarm();
        self.check_peer();
        Ok(())
    }

    /// For event loops: asks the client to ring the doorbell at its next verdict. Returns false if there is a
    /// verdict or message already, or if the search for one has not finished; then do not sleep, and call it again
    /// after the next poll. Call [`disarm`](Self::disarm) after a sleep.
    ///
    /// The client rings once. A caller that stays armed because another event ended its sleep must arm again if
    /// [`has_rung`](Self::has_rung).
    ///
    /// The work is constant: a call looks at no more than 128 outstanding frames, and the next call continues. The
    /// request stays until the client has answered it, so that a call after a sleep that another event ended looks
    /// at no frame again.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        // Relaxed: a statistic for the other side. It lies on a line that the client reads with each verdict, so it is
        // written only when we are about to sleep.
        self.rings
            .own
            .word(abi::ENGINE_PUBLISHED)
            .store(self.rings.rx.frames.next_seq().0.into(), Ordering::Relaxed);
        cpu::tell(&self.rings.own);
        if self.control.rung || self.armed.is_none() {
            self.control.rung = false;
            self.armed = None;
            if !self.sleeper.arm([&self.rings.own]) {
                return false;
            }
        }
        let Rings { verdict_reader, theirs, rx, .. } = &self.rings;
        // A word that is written from here on rings the doorbell, so one search is enough.
        let scan = self.armed.get_or_insert_with(|| Scan::new(&rx.frames));
        let is_quiet = verdict_reader.is_quiet(theirs, rx, scan);
        if is_quiet.is_none() {
            // A poll must read the word first; then a new search begins.
            self.armed = None;
        }
        is_quiet == Some(true) && !self.liveness.is_over() && !self.has_message()
    }

    /// Returns true if the client last reported the CPU of the calling thread. Then it makes no progress while this
    /// thread spins; yield (sched_yield(2)) or [`wait`](Self::wait). The client's report is a hint.
    #[must_use]
    pub fn shares_cpu(&self) -> bool {
        cpu::is_shared(&self.rings.theirs)
    }

    /// Returns true if the engine receives messages of this client ([`Config::messages`](crate::Config::messages)).
    #[must_use]
    pub fn takes_messages(&self) -> bool {
        self.policy.messages
    }

    /// Returns true if [`poll_messages`](Self::poll_messages) has something to read, or if there are more unread
    /// replacements than one call steps over (128).
    #[must_use]
    pub fn has_message(&mut self) -> bool {
        self.policy.messages && self.rings.tx.is_ready(&self.rings.theirs)
    }

    /// Returns true if the doorbell requested by [`arm`](Self::arm) was read, here or by
    /// [`poll_verdicts`](Self::poll_verdicts), [`poll_messages`](Self::poll_messages) or
    /// [`check_peer`](Self::check_peer).
    #[must_use]
    pub fn has_rung(&self) -> bool {
        self.control.rung
    }

    /// For event loops: ends a sleep. The request for a doorbell ends with the doorbell, which
    /// [`check_peer`](Self::check_peer) reads.
    pub fn disarm(&mut self) {
        if self.armed.is_none() {
            self.sleeper.disarm([&self.rings.own]);
        }
    }

    /// The channel's counters.
    #[must_use]
    pub fn stats(&self) -> ChannelStats {
        let mut stats = self.stats;
        stats.held = self.rings.rx.frames.held().into();
        stats.out = self.held().into();
        stats.high_water = stats.high_water.max(stats.out);
        stats.huge_pages = self.rings.huge.into();
        stats.oneshots_in += self.rings.tx.oneshots;
        // Relaxed: an unverified report, for display.
        stats.consumed =
            u64::from(self.rings.theirs.word(abi::CLIENT_CONSUMED).load(Ordering::Relaxed) as u32);
        stats
    }

    /// Outstanding frames, as `towpath ctl show frames` prints them.
    pub fn frames(&self) -> impl Iterator<Item = FrameOut> {
        self.rings.rx.frames.out().map(|(seq, first, frames, held, overdue)| FrameOut {
            seq,
            first,
            frames,
            held,
            overdue,
        })
    }

    /// Geometry of the ring towards the client.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.rings.rx.geometry()
    }
}

impl Drop for Channel {
    /// Ends all lanes: a client would wait forever for a lane without an owner.
    fn drop(&mut self) {
        self.liveness.close(Death::Detached);
    }
}

impl AsFd for Channel {
    /// Readable if the client rings or disconnects: call [`Channel::check_peer`], then [`Channel::poll_verdicts`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.liveness.socket(self.lane).as_fd()
    }
}
