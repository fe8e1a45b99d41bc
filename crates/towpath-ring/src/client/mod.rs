//! A client: receives frames, decides about them.
//!
//! The engine's threads each have a lane. The client serves them in turn, [`TURN`] frames at a time, so that none waits for
//! another for long; it sleeps once for all of them, on one descriptor; and what it says about a frame goes back on the
//! frame's lane.

use std::hint;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use towpath_metrics::metrics;

use crate::client::recv_error::RecvError;
use crate::handshake::attach::{Attached, Options, attach};
use crate::handshake::attach_error::AttachError;
use crate::lane::batch;
use crate::lane::verdict::{Decision, Verdict};
use crate::shm::abi;
use crate::shm::cpu;
use crate::shm::header::Header;
use crate::shm::park::Sleeper;
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;
use crate::shm::sys;
use lane::Lane;
use wait::SPINS;

#[cfg(feature = "tokio")]
pub(crate) mod asynchronous;
mod lane;
mod pace;
pub(crate) mod recv_error;
mod rings;
mod send;
pub(crate) mod tx_ring;
mod wait;
pub(crate) mod worker;

pub use send::NotReplaced;

/// Frames of one lane before the next lane's turn.
const TURN: u32 = 32;

/// Which frame: its lane, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameId {
    /// The lane that it came on, from 0.
    pub lane: u32,
    /// Its number, dense on its lane.
    pub seq: Seq,
}

/// A frame that this client has: its number and a private copy of its header. The payload stays in the ring, see
/// [`Consumer::payload`].
///
/// A frame that is dropped without a verdict stays undecided, until [`Consumer::verdict_upto`] covers it or the engine's
/// deadline does.
#[derive(Debug)]
#[must_use = "the ring stops when frames are neither decided nor held"]
pub struct Frame {
    pub(crate) id: FrameId,
    pub(crate) at: u32,
    pub(crate) header: Header,
}

/// A frame as plain numbers, for interfaces of other languages: [`Consumer::recall`] gives the frame for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Ticket {
    /// Its lane, from 0.
    pub lane: u32,
    /// Its number there.
    pub seq: u32,
    /// Where it is in its ring.
    pub at: u32,
}

impl Frame {
    /// Its lane and its number.
    #[must_use]
    pub fn id(&self) -> FrameId {
        self.id
    }

    /// Its number on its lane.
    #[must_use]
    pub fn seq(&self) -> Seq {
        self.id.seq
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// What names it in programs that cannot own it. The frame stays undecided until it is recalled.
    #[must_use]
    pub fn into_ticket(self) -> Ticket {
        let Self { id: FrameId { lane, seq }, at, .. } = self;
        Ticket { lane, seq: seq.0, at }
    }
}

/// The client's end of a channel.
///
/// VerdictReader become visible to the engine at once; if it sleeps it is woken by the next call that receives, or by
/// [`flush`](Self::flush). See [`crate::Endpoint`] for an example of both ends.
#[derive(Debug)]
pub struct Consumer {
    lanes: Box<[Lane]>,
    /// Whose turn it is.
    turn: usize,
    /// Frames that are left of the turn.
    left: u32,
    sleeper: Sleeper,
    /// Something was written that no engine thread has been woken for.
    unflushed: bool,
    /// Spins before the next batch is looked for.
    away: usize,
    /// Looks before it goes to sleep; fewer when they are in vain, if it is to learn from that.
    spins: u32,
    learns: bool,
    /// Whether it asked to be told of losses.
    gaps: bool,
    /// Whether a signal ends a wait.
    interruptible: bool,
    /// How long room is waited for at most.
    send_timeout: Option<Duration>,
    /// The process that attached.
    process: u32,
    sleeps: u64,
}

metrics! {
    /// Counters of a consumer.
    pub struct ConsumerStats in "consumer" {
        /// Frames received, loss records included.
        pub received: counter frames,
        /// Frames lost before they were received, as the engine reports them.
        pub lost: counter frames,
        /// Times that the consumer slept.
        pub sleeps: counter events,
        /// Doorbells sent to the engine.
        pub wakeups: counter events,
        /// Messages and replacements sent in a one-shot memfd.
        pub oneshots: counter messages,
    }
}

impl Consumer {
    /// Attaches to the engine that listens at `path`.
    ///
    /// # Errors
    /// Each case of [`AttachError`] says what to do.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self, AttachError> {
        Self::attach_with(path, &Options::default())
    }

    /// Attaches to the engine that the environment variable `TOWPATH_SOCKET` names: the one that started this program.
    ///
    /// # Errors
    /// [`AttachError::NoSocket`] when it is not set, and all of [`attach`](Self::attach).
    pub fn attach_env() -> Result<Self, AttachError> {
        Self::attach(std::env::var_os("TOWPATH_SOCKET").ok_or(AttachError::NoSocket)?)
    }

    /// Attaches under a name (at most 32 bytes) that the engine shows to people.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_as(path: impl AsRef<Path>, name: &str) -> Result<Self, AttachError> {
        Self::attach_with(path, &Options::named(name))
    }

    /// Attaches with [`Options`].
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_with(path: impl AsRef<Path>, options: &Options) -> Result<Self, AttachError> {
        let mut consumer = Self::over(attach(path.as_ref(), options)?);
        consumer.gaps = options.gaps;
        Ok(consumer)
    }

    pub(crate) fn over(lanes: Vec<Attached>) -> Self {
        let fences = lanes[0].fences;
        Self {
            lanes: (0..).zip(lanes).map(|(number, lane)| Lane::new(number, lane)).collect(),
            turn: 0,
            left: TURN,
            sleeper: Sleeper::new(abi::CLIENT_NEED_WAKEUP, fences),
            unflushed: false,
            away: 0,
            spins: SPINS,
            learns: false,
            gaps: true,
            interruptible: false,
            send_timeout: None,
            process: std::process::id(),
            sleeps: 0,
        }
    }

    /// From now on a signal whose handler ran while this consumer slept ends the call that receives, with
    /// [`RecvError::System`] of [`ErrorKind::Interrupted`](std::io::ErrorKind::Interrupted), and the call that waits for room to send, with
    /// [`ReserveError::Interrupted`](crate::ReserveError::Interrupted); nothing is lost, and it may be called again. Otherwise it sleeps on. For languages that have no other way to
    /// end a thread that waits.
    pub fn set_interruptible(&mut self, interruptible: bool) {
        self.interruptible = interruptible;
    }

    /// How long calls that send ([`replace`](Self::replace), [`send`](Self::send), [`reply`](Self::reply)) wait for room at most; then they
    /// say [`ReserveError::RingFull`](crate::ReserveError::RingFull), and nothing was sent. `None`, as at first: for ever.
    pub fn set_send_timeout(&mut self, timeout: Option<Duration>) {
        self.send_timeout = timeout;
    }

    /// How many lanes there are: as many as the engine has threads that send to this client.
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.lanes.len() as u32
    }

    /// The next frame; waits for it. None when the engine has ended the channel and everything was received.
    ///
    /// # Errors
    /// [`RecvError`]: the engine wrote nonsense, or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Frame>, RecvError> {
        self.wait_for(None, Self::take)
    }

    /// The next frame; waits at most `timeout`. None also when that has passed; [`is_ended`](Self::is_ended) tells.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Frame>, RecvError> {
        self.wait_for(Instant::now().checked_add(timeout), Self::take)
    }

    /// The next frame, if it is there.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), except that there is no poll(2).
    #[inline]
    pub fn try_recv(&mut self) -> Result<Option<Frame>, RecvError> {
        self.flush();
        self.take()
    }

    /// Appends at most `max` frames to `into`; waits for the first one. Returns how many; 0 means the end.
    ///
    /// Made for throughput: after several frames, if they were all that there were, the next call lets some microseconds
    /// pass before it looks, so that there are several again. [`recv`](Self::recv) never does.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_batch(&mut self, into: &mut Vec<Frame>, max: usize) -> Result<usize, RecvError> {
        if max == 0 {
            return Ok(0);
        }
        self.flush();
        // What is there is taken at once where nothing more comes before this thread sleeps.
        if self.away > 0 && !self.shares_cpu() {
            for _ in 0..self.away {
                hint::spin_loop();
            }
        }
        let taken = self.wait_for(None, |consumer| consumer.take_batch(into, max))?;
        let mut count = taken.unwrap_or(0);
        while count > 0
            && count < max
            && let Some(more) = self.take_batch(into, max - count)?
        {
            count += more;
        }
        self.away = pace::away(count, max);
        Ok(count)
    }

    /// The frame's payload, in the ring: as long as the result lives nothing can be decided.
    ///
    /// # Panics
    /// When the frame is not this consumer's any more: [`verdict_upto`](Self::verdict_upto) has covered it.
    #[must_use]
    #[inline]
    pub fn payload(&self, frame: &Frame) -> &[u8] {
        match self.lane(frame).payload(frame) {
            Some(payload) => payload,
            None => given_back(frame),
        }
    }

    /// Whether the frame is still this consumer's.
    #[must_use]
    #[inline]
    pub fn has(&self, frame: &Frame) -> bool {
        self.lane(frame).has(frame)
    }

    /// The frame that the ticket names, with an empty header: who asks has read it. None when it is not this consumer's (any more):
    /// a ticket may be any numbers.
    #[must_use]
    pub fn recall(&self, ticket: Ticket) -> Option<Frame> {
        let lane = self.lanes.get(ticket.lane as usize)?;
        let id = FrameId { lane: ticket.lane, seq: Seq(ticket.seq) };
        let frame = Frame { id, at: ticket.at, header: Header::default() };
        lane.has(&frame).then_some(frame)
    }

    /// Decides about the frame and gives it back. ([`Verdict::Hold`] keeps it, but [`hold`](Self::hold) is what leaves
    /// you the frame to decide about later.)
    ///
    /// # Panics
    /// For [`Verdict::Replace`]: [`replace`](Self::replace) sends the payload.
    pub fn verdict(&mut self, frame: Frame, decision: impl Into<Decision<'static>>) {
        let decision = decision.into();
        match decision.verdict {
            Verdict::Hold => self.hold(&frame),
            Verdict::Replace(_) => not_a_replacement(),
            _ => {
                self.lane_mut(&frame).decide(&frame, decision);
                self.unflushed = true;
            }
        }
    }

    /// Says that TX frame `frame` replaces the payload, whatever is in it.
    #[cfg(test)]
    pub(crate) fn replace_by(&mut self, of: Frame, frame: u16) {
        self.lane_mut(&of).rings.replace(of.id.seq, of.at, frame);
    }

    /// Decides about every frame of a lane received up to `upto` that has no verdict of its own and is not held, in one
    /// write: `queue.verdict_upto(frame.id(), Verdict::Pass)`.
    ///
    /// # Panics
    /// When the answer is about one frame only: [`Verdict::Hold`] or [`Verdict::Replace`].
    pub fn verdict_upto(&mut self, upto: FrameId, decision: impl Into<Decision<'static>>) {
        let decision = about_many(decision.into());
        if let Some(lane) = self.lanes.get_mut(upto.lane as usize) {
            lane.decide_upto(upto.seq, decision);
            self.unflushed = true;
        }
    }

    /// Decides about every frame received so far, on any lane, that has no verdict of its own and is not held: one write
    /// for each lane.
    ///
    /// # Panics
    /// As [`verdict_upto`](Self::verdict_upto).
    pub fn verdict_all(&mut self, decision: impl Into<Decision<'static>>) {
        let decision = about_many(decision.into());
        self.lanes.iter_mut().for_each(|lane| lane.decide_all(decision));
        self.unflushed = true;
    }

    /// Keeps the frame: later ones go on, this one is decided later, in any order. Frames that are neither decided nor
    /// held stop the ring when it is full.
    pub fn hold(&mut self, frame: &Frame) {
        self.lane_mut(frame).hold(frame);
        self.unflushed = true;
    }

    /// Says how many messages this client takes in one frame.
    pub(crate) fn set_batch_max(&self, most: usize) {
        // Relaxed: a number that orders nothing.
        self.lanes.iter().for_each(|lane| {
            lane.own_page().word(abi::CLIENT_BATCH_MAX).store(most as u64, Ordering::Relaxed)
        });
    }

    /// Says that this client is at this message of a frame.
    #[inline]
    pub(crate) fn tell_at(&self, frame: &Frame, index: u16) {
        // Relaxed: read when this process is gone, or to be shown.
        self.lane(frame)
            .own_page()
            .word(abi::CLIENT_AT)
            .store(batch::at(frame.seq(), index), Ordering::Relaxed);
    }

    /// How many frames for this client were lost since this was last asked: each loss is told once, at once, also while
    /// the ring is full (what ENOBUFS was for netlink(7)). Always 0 without [`Options::gaps`].
    pub fn overrun(&mut self) -> u64 {
        if !self.gaps {
            return 0;
        }
        self.lanes.iter_mut().map(Lane::overrun).sum()
    }

    /// Wakes the engine if it waits for what was decided. Receiving does it too.
    #[inline]
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.unflushed) {
            self.lanes.iter_mut().for_each(Lane::flush);
        }
    }

    /// For event loops: says that we are about to sleep on [`as_fd`](AsFd::as_fd). False when there is a frame already.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        self.flush();
        self.lanes.iter().for_each(Lane::tell_position);
        self.lanes.iter().map(Lane::own_page).for_each(cpu::tell);
        self.sleeper.arm(self.lanes.iter().map(Lane::own_page))
            && !self.lanes.iter().any(Lane::is_ready)
            && !self.is_ended()
    }

    /// For event loops: awake again; reads what rang.
    ///
    /// # Errors
    /// When the socket cannot be read.
    pub fn disarm(&mut self) -> Result<(), RecvError> {
        self.sleeper.disarm(self.lanes.iter().map(Lane::own_page));
        // All doorbells ring at the first lane's socket.
        self.lanes[0].listen()
    }

    /// Ends the channel, also where a process that was forked from this one has its sockets: dropping it ends nothing as long as they are
    /// open there. In such a process it is as good as dropping it.
    pub fn close(mut self) {
        self.flush();
        if std::process::id() == self.process {
            self.lanes.iter().for_each(|lane| sys::shut(&lane.socket));
        }
    }

    /// Whether the engine has ended the channel. Frames that it published before may still be received.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.lanes.iter().any(|lane| lane.ended)
    }

    /// What this consumer has done.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        let mut sum = ConsumerStats { sleeps: self.sleeps, ..ConsumerStats::default() };
        self.lanes.iter().for_each(|lane| sum.add(&lane.stats()));
        sum
    }

    /// The next frame of the lane whose turn it is, or of the next lane that has one.
    // One place from which a frame goes to the caller: were there two, it would be put together in memory first.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Result<Option<Frame>, RecvError> {
        if self.left == 0 {
            self.turn_on();
        }
        for _ in 0..=self.lanes.len() {
            let mut taken = None;
            if self.lanes[self.turn].take(|frame| taken = Some(frame))? {
                self.left -= 1;
                return Ok(taken);
            }
            if self.lanes.len() == 1 {
                break;
            }
            self.turn_on();
        }
        Ok(None)
    }

    /// Appends at most `max` frames of one lane: of the one whose turn it is, or of the next that has some. How many; none
    /// when there are none.
    #[inline]
    fn take_batch(&mut self, into: &mut Vec<Frame>, max: usize) -> Result<Option<usize>, RecvError> {
        for _ in 0..=self.lanes.len() {
            let (before, most) = (into.len(), max.min(self.left as usize));
            let lane = &mut self.lanes[self.turn];
            while into.len() - before < most && lane.take(|frame| into.push(frame))? {}
            let taken = into.len() - before;
            if taken > 0 {
                self.left -= taken as u32;
                return Ok(Some(taken));
            }
            self.turn_on();
        }
        Ok(None)
    }

    #[inline]
    fn turn_on(&mut self) {
        self.left = TURN;
        self.turn = if self.turn + 1 == self.lanes.len() { 0 } else { self.turn + 1 };
    }

    #[inline]
    fn lane(&self, frame: &Frame) -> &Lane {
        &self.lanes[frame.id.lane as usize]
    }

    #[inline]
    fn lane_mut(&mut self, frame: &Frame) -> &mut Lane {
        &mut self.lanes[frame.id.lane as usize]
    }
}

#[cold]
#[inline(never)]
fn given_back(frame: &Frame) -> ! {
    panic!("frame {} was given back", frame.id.seq)
}

#[cold]
#[inline(never)]
fn not_a_replacement() -> ! {
    panic!("Verdict::Replace needs room in the ring: call Consumer::replace")
}

/// The answer, unless it is about one frame.
#[inline]
fn about_many(decision: Decision<'_>) -> Decision<'_> {
    let one = matches!(decision.verdict, Verdict::Hold | Verdict::Replace(_));
    assert!(!one, "{:?} is about one frame", decision.verdict);
    decision
}

impl AsFd for Consumer {
    /// Readable when the engine rings, which it does only between [`Consumer::arm`] and [`Consumer::disarm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lanes[0].socket.as_fd()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.flush();
    }
}
