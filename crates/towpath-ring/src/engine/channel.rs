//! The engine's end of one attached client: of one of its lanes, each of which an engine thread may have for itself.
//!
//! Everything that decides anything is private: who holds which frame is in `Producer`, how far the records were taken
//! in `VerdictReader`. What the client writes (release entries, records, TX headers and payloads) is loaded once, compared
//! with that, and never stored anywhere it would be believed later.

mod batch;
mod poll;
mod send;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

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

/// How long the peer is believed to be alive without a look, in nanoseconds.
pub(crate) const PEER_CHECK: u64 = 5_000_000;

/// One attached client: frames go out through [`reserve`](Self::reserve), verdicts come back through
/// [`poll_verdicts`](Self::poll_verdicts).
///
/// The sum always holds: published = decided by the client + by default + yielded by
/// [`drain_held`](Self::drain_held) + still out; see [`ChannelStats`].
#[derive(Debug)]
pub struct Channel {
    pub(crate) liveness: Arc<PeerLiveness>,
    pub(crate) lane: u32,
    pub(crate) rings: Rings,
    pub(crate) control: ControlRx,
    pub(crate) sleeper: Sleeper,
    pub(crate) ringer: Ringer,
    pub(crate) oneshots: OneShots,
    pub(crate) policy: ClientPolicy,
    pub(crate) dump: Option<Dump>,
    pub(crate) gaps: LossRecords,
    /// When the client was last looked at.
    pub(crate) checked: u64,
    pub(crate) stats: ChannelStats,
    /// Frames lost for this client: the word that the client reads.
    pub(crate) lost: u64,
    /// The other lanes, until they are [`split`](Self::split) off.
    pub(crate) others: Vec<Channel>,
}

/// What a channel asks of its client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientPolicy {
    pub(crate) violations_max: u64,
    pub(crate) overdue_max: Option<u64>,
    /// Whether messages from the client are wanted.
    pub(crate) messages: bool,
}

/// One message that a client has not given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameOut {
    /// Its number.
    pub seq: Seq,
    /// Index of its first frame.
    pub first: u32,
    /// How many frames it takes.
    pub frames: u32,
    /// The client holds it.
    pub held: bool,
    /// It was decided without the client, which still has its memory.
    pub overdue: bool,
}

impl Channel {
    /// The lanes, each for a thread of its own: it sends on its lane, and gets the verdicts for what it sent. They charge the
    /// client and its end: [`detach`](Self::detach) or drop one of them, and all have ended. Until it is split, a channel
    /// is its first lane.
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
    ///         let frame = queue.recv().expect("no nonsense").expect("a frame");
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
    /// // Dropped when all are done: the first that goes ends the channel.
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

    /// Which lane this is, from 0.
    #[must_use]
    pub fn lane(&self) -> u32 {
        self.lane
    }

    /// How many lanes the channel has ([`Config::lanes`](crate::Config::lanes)).
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.liveness.lanes()
    }

    /// The process at the other end.
    #[must_use]
    pub fn peer(&self) -> Credentials {
        self.liveness.peer
    }

    /// What the client calls itself; printable, and nothing to rely on.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.liveness.name
    }

    /// Notes how many messages are out, before some come back: they become more by being published only.
    fn note_high_water(&mut self) {
        self.stats.high_water = self.stats.high_water.max(self.held().into());
    }

    /// Frames that are out and undecided.
    #[must_use]
    #[inline]
    pub fn held(&self) -> u32 {
        self.rings.rx.frames.lent() + self.rings.rx.frames.held()
    }

    /// How the client's end came, if it has. Looks at what is known; [`check_peer`](Self::check_peer) asks.
    #[must_use]
    pub fn death(&self) -> Option<Death> {
        self.liveness.death()
    }

    /// Whether the client is gone: publish nothing more, poll for its last verdicts, then
    /// [`drain_held`](Self::drain_held).
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.liveness.is_over()
    }

    /// Asks the system whether the client lives, and reads its doorbells. Also done by
    /// [`poll_verdicts`](Self::poll_verdicts) every 5 ms of its clock, and by [`wait`](Self::wait).
    pub fn check_peer(&mut self) -> bool {
        self.control.listen();
        let invalid = self.control.take_invalid();
        if invalid > 0 {
            // Bounded: so many of them end the channel.
            let PeerLiveness { name, peer, .. } = &*self.liveness;
            log::warn!(
                "client {name:?} (process {}): {invalid} messages without a meaning, or with a descriptor beyond the \
                 {} that may wait for their messages",
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

    /// Ends the channel from this side. The client sees the end of its socket.
    pub fn detach(&mut self) {
        self.liveness.end(Death::Detached);
    }

    /// After the end: every frame that is undecided, once, oldest first where that is known. They are the caller's to
    /// decide (by policy: the default verdict, or another worker). Detaches a client that is not gone.
    ///
    /// Call [`poll_verdicts`](Self::poll_verdicts) before: what the client decided in time counts.
    pub fn drain_held(&mut self, mut f: impl FnMut(Seq)) {
        self.detach();
        self.note_high_water();
        let mut drained = 0;
        let frames = &mut self.rings.rx.frames;
        let window = std::iter::successors(Some(frames.oldest()), |seq| Some(seq.next()));
        let window = window.take(frames.next_seq().since(frames.oldest()) as usize);
        let mut all: Vec<_> = window.filter_map(|seq| frames.find(seq)).collect();
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

    /// Sleeps until the client has decided something, has sent something, is gone, or `timeout` has passed. The frames
    /// published so far are the client's to see first: this also [`kick`](Self::kick)s.
    ///
    /// What [`poll_verdicts`](Self::poll_verdicts) has taken is not there to be waited for any more. When room is
    /// needed, try again after a poll that found something, and wait only after one that found nothing:
    /// `while channel.send(..) == Err(ReserveError::RingFull) { if channel.poll_verdicts(..) == 0 { channel.wait(..)?; } }`.
    ///
    /// # Errors
    /// When poll(2) fails.
    pub fn wait(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.kick();
        if self.arm() {
            sys::wait(&self.liveness.watched(self.lane), timeout)?;
        }
        self.disarm();
        self.check_peer();
        Ok(())
    }

    /// For event loops: asks the client to ring when it has decided something. False when there is something already,
    /// and then there is no need to sleep. [`disarm`](Self::disarm) afterwards.
    ///
    /// The client rings once. Whoever stays armed, because he slept for something else too and that is what came, must
    /// ask again when [`has_rung`](Self::has_rung).
    #[must_use]
    pub fn arm(&mut self) -> bool {
        self.control.rung = false;
        // Relaxed: a statistic for the other side. It lies on a line that the client reads with each verdict, so it is
        // written only when we are about to sleep.
        self.rings
            .own
            .word(abi::ENGINE_PUBLISHED)
            .store(self.rings.rx.frames.next_seq().0.into(), Ordering::Relaxed);
        cpu::tell(&self.rings.own);
        self.sleeper.arm([&self.rings.own])
            && !self.liveness.is_over()
            && !self.rings.verdict_reader.is_ready(&self.rings.theirs, &self.rings.rx)
            && !self.has_message()
    }

    /// Whether the client was last seen on the CPU of the calling thread. Then it decides nothing while this thread runs, and
    /// looking again is of no use; letting it run is (sched_yield(2), [`wait`](Self::wait)). What the client says, and no more than
    /// a hint.
    #[must_use]
    pub fn shares_cpu(&self) -> bool {
        cpu::is_shared(&self.rings.theirs)
    }

    /// Whether there is a message that is wanted.
    fn has_message(&mut self) -> bool {
        self.policy.messages && self.rings.tx.is_ready(&self.rings.theirs)
    }

    /// Whether the doorbell for which [`arm`](Self::arm) asked has come and was read, here or by
    /// [`poll_verdicts`](Self::poll_verdicts), [`poll_messages`](Self::poll_messages) or [`check_peer`](Self::check_peer).
    #[must_use]
    pub fn has_rung(&self) -> bool {
        self.control.rung
    }

    /// For event loops: no doorbells any more.
    pub fn disarm(&mut self) {
        self.sleeper.disarm([&self.rings.own]);
    }

    /// What the channel has done.
    #[must_use]
    pub fn stats(&self) -> ChannelStats {
        let mut stats = self.stats;
        stats.held = self.rings.rx.frames.held().into();
        stats.out = self.held().into();
        stats.high_water = stats.high_water.max(stats.out);
        stats.huge_pages = self.rings.huge.into();
        stats.oneshots_in += self.rings.tx.oneshots;
        // Relaxed: a claim, shown as one.
        stats.consumed =
            u64::from(self.rings.theirs.word(abi::CLIENT_CONSUMED).load(Ordering::Relaxed) as u32);
        stats
    }

    /// The frames that are out, for people: what `towpath ctl show frames` prints.
    pub fn frames(&self) -> impl Iterator<Item = FrameOut> {
        self.rings.rx.frames.out().map(|(seq, first, frames, held, overdue)| FrameOut {
            seq,
            first,
            frames,
            held,
            overdue,
        })
    }

    /// The shape of the ring towards the client, as it is now.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.rings.rx.geometry()
    }
}

impl Drop for Channel {
    /// A lane that nobody serves would be waited on for ever: the end of one is the end of all.
    fn drop(&mut self) {
        self.liveness.close(Death::Detached);
    }
}

impl AsFd for Channel {
    /// Readable when the client rings or goes: call [`Channel::check_peer`], then [`Channel::poll_verdicts`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.liveness.socket(self.lane).as_fd()
    }
}
