//! A client: receives frames and gives verdicts.
//!
//! Each engine thread has a lane. The client serves the lanes in turn, [`TURN`] frames at a time, so that no lane
//! waits long for another. It sleeps once for all lanes, on one descriptor. A verdict returns on its frame's lane.

use std::hint;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use towpath_metrics::metrics;

use crate::client::recv_error::RecvError;
use crate::handshake::attach::{Attached, Options, attach, renew};
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

pub use send::{Inject, InjectError, NotReplaced};

/// Frames of one lane before the next lane's turn.
const TURN: u32 = 32;
/// Calls of [`Consumer::try_recv`] without a frame, until one reads the socket.
const POLLS: u32 = 1024;

/// Identifies a frame of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FrameId {
    /// Lane, from 0.
    pub lane: u32,
    /// Sequence number, dense per lane.
    pub seq: Seq,
}

/// A received frame that this client owns: its identity and a private copy of its header. The payload stays in the ring, see
/// [`Consumer::payload`].
///
/// A frame that is dropped without a verdict stays undecided until [`Consumer::verdict_upto`] covers it or the engine's
/// deadline expires.
#[derive(Debug)]
#[must_use = "the ring stops when frames are neither decided nor held"]
pub struct Frame {
    pub(crate) id: FrameId,
    pub(crate) at: u32,
    pub(crate) header: Header,
}

/// A frame as plain numbers, for other languages. [`Consumer::recall`] returns the frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Ticket {
    /// Lane, from 0.
    pub lane: u32,
    /// Sequence number.
    pub seq: u32,
    /// First frame in the ring.
    pub at: u32,
}

impl Frame {
    /// Lane and sequence number.
    #[must_use]
    pub fn id(&self) -> FrameId {
        self.id
    }

    /// Sequence number on its lane.
    #[must_use]
    pub fn seq(&self) -> Seq {
        self.id.seq
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Converts the frame into a ticket. The frame stays undecided until it is recalled.
    #[must_use]
    pub fn into_ticket(self) -> Ticket {
        let Self { id: FrameId { lane, seq }, at, .. } = self;
        Ticket { lane, seq: seq.0, at }
    }
}

/// The client's end of a channel.
///
/// Verdicts are visible to the engine at once. A sleeping engine is woken by the next call that receives, or by
/// [`flush`](Self::flush). See [`crate::Endpoint`] for an example of both ends.
#[derive(Debug)]
pub struct Consumer {
    lanes: Box<[Lane]>,
    /// Lane whose turn it is.
    turn: usize,
    /// Remaining frames of the turn.
    left: u32,
    sleeper: Sleeper,
    /// True if a write has not been followed by a doorbell check.
    unflushed: bool,
    /// Number of spins before the next batch is read.
    away: usize,
    /// Number of checks before a sleep; adapts if `learns`.
    spins: u32,
    learns: bool,
    /// True if the client asked for loss records.
    gaps: bool,
    /// True if a signal ends a wait.
    interruptible: bool,
    /// Longest wait for space.
    send_timeout: Option<Duration>,
    /// Process id at the attach.
    process: u32,
    sleeps: u64,
    /// The path and options with which this client has attached; it greets a successor of the engine with them.
    greeting: Option<(PathBuf, Options)>,
    /// Calls of [`try_recv`](Self::try_recv) without a frame.
    polls: u32,
    /// Counters of earlier memory.
    before: ConsumerStats,
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
    /// Attaches to the engine at `path`.
    ///
    /// # Errors
    /// [`AttachError`]; each variant says what to do.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self, AttachError> {
        Self::attach_with(path, &Options::default())
    }

    /// Attaches to the engine that the environment variable `TOWPATH_SOCKET` names: the one that started this
    /// program.
    ///
    /// # Errors
    /// [`AttachError::NoSocket`] if it is not set, and those of [`attach`](Self::attach).
    pub fn attach_env() -> Result<Self, AttachError> {
        Self::attach(std::env::var_os("TOWPATH_SOCKET").ok_or(AttachError::NoSocket)?)
    }

    /// Attaches with a name (at most 32 bytes) that the engine displays.
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
        consumer.greeting = Some((path.as_ref().into(), options.clone()));
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
            greeting: None,
            polls: 0,
            before: ConsumerStats::default(),
        }
    }

    /// Sets whether a signal handler that ran during a sleep ends the call. A receiving call then fails with
    /// [`RecvError::System`] of [`ErrorKind::Interrupted`](std::io::ErrorKind::Interrupted), a sending call with
    /// [`ReserveError::Interrupted`](crate::ReserveError::Interrupted). Nothing is lost; the call may be repeated.
    /// The default is false: the call continues to sleep. For languages without another way to end a waiting thread.
    pub fn set_interruptible(&mut self, interruptible: bool) {
        self.interruptible = interruptible;
    }

    /// Sets the longest wait for space of sending calls ([`replace`](Self::replace), [`send`](Self::send),
    /// [`reply`](Self::reply)). After it, they return [`ReserveError::RingFull`](crate::ReserveError::RingFull), and
    /// nothing was sent. The default is `None`: no limit.
    pub fn set_send_timeout(&mut self, timeout: Option<Duration>) {
        self.send_timeout = timeout;
    }

    /// Number of lanes: one per engine thread that sends to this client.
    #[must_use]
    pub fn lanes(&self) -> u32 {
        self.lanes.len() as u32
    }

    /// Receives the next frame; waits for it. `None` if the engine has ended the channel and all frames were received.
    ///
    /// # Errors
    /// [`RecvError`]: the engine wrote invalid data, or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Frame>, RecvError> {
        self.wait_for(None, Self::take)
    }

    /// Receives the next frame; waits at most `timeout`. `None` after the timeout and at the end of the channel;
    /// [`is_ended`](Self::is_ended) distinguishes them.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Frame>, RecvError> {
        self.recv_until(Instant::now().checked_add(timeout))
    }

    /// Like [`recv_timeout`](Self::recv_timeout), until `end`.
    pub(crate) fn recv_until(&mut self, end: Option<Instant>) -> Result<Option<Frame>, RecvError> {
        self.wait_for(end, Self::take)
    }

    /// Receives the next frame, if it is published.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), without poll(2).
    #[inline]
    pub fn try_recv(&mut self) -> Result<Option<Frame>, RecvError> {
        self.flush();
        let taken = self.take()?;
        if taken.is_none() {
            self.polls = self.polls.wrapping_add(1);
            // A client that never sleeps would otherwise not learn that it gets new memory, or that the engine has ended.
            if self.polls.is_multiple_of(POLLS) {
                self.listen()?;
            }
        }
        Ok(taken)
    }

    /// Appends at most `max` frames to `into`; waits for the first one. Returns their number; 0 at the end of the
    /// channel.
    ///
    /// Made for throughput: if a call returned several frames and emptied the ring, the next call waits some
    /// microseconds before it looks, so that several frames are published again. [`recv`](Self::recv) never waits
    /// that way.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_batch(&mut self, into: &mut Vec<Frame>, max: usize) -> Result<usize, RecvError> {
        if max == 0 {
            return Ok(0);
        }
        self.flush();
        // On a shared CPU, no frame is published before this thread sleeps: look at once.
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

    /// Borrows the frame's payload in the ring. The borrow excludes verdicts.
    ///
    /// # Panics
    /// The frame was released: [`verdict_upto`](Self::verdict_upto) has covered it.
    #[must_use]
    #[inline]
    pub fn payload(&self, frame: &Frame) -> &[u8] {
        match self.lane(frame).payload(frame) {
            Some(payload) => payload,
            None => given_back(frame),
        }
    }

    /// Returns true if the frame is still this consumer's.
    #[must_use]
    #[inline]
    pub fn has(&self, frame: &Frame) -> bool {
        self.lane(frame).has(frame)
    }

    /// Returns true if the engine has given the frame the default verdict, because this client did not decide it before the deadline. A
    /// verdict for it only returns its memory. A frame can become overdue right after the call.
    #[must_use]
    #[inline]
    pub fn is_overdue(&self, frame: &Frame) -> bool {
        self.lane(frame).is_overdue(frame.id.seq)
    }

    /// Returns the frame of a ticket, with an empty header. `None` if this consumer does not own the frame, or owns it
    /// no longer. A ticket may contain any numbers.
    #[must_use]
    pub fn recall(&self, ticket: Ticket) -> Option<Frame> {
        let lane = self.lanes.get(ticket.lane as usize)?;
        let id = FrameId { lane: ticket.lane, seq: Seq(ticket.seq) };
        let frame = Frame { id, at: ticket.at, header: Header::default() };
        lane.has(&frame).then_some(frame)
    }

    /// Gives a verdict for the frame and releases it. [`Verdict::Hold`] holds the frame, which the caller then cannot
    /// decide; [`hold`](Self::hold) borrows the frame, so that it can be decided later.
    ///
    /// # Panics
    /// The verdict is [`Verdict::Replace`]: call [`replace`](Self::replace), which sends the payload.
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

    /// Names TX frame `frame` as replacement, whatever its content.
    #[cfg(test)]
    pub(crate) fn replace_by(&mut self, of: Frame, frame: u16) {
        self.lane_mut(&of).rings.replace(of.id.seq, of.at, frame, (0, 0));
    }

    /// Gives a verdict for every frame of a lane received up to `upto` that is undecided and not held, in one write:
    /// `queue.verdict_upto(frame.id(), Verdict::Pass)`.
    ///
    /// # Panics
    /// The verdict is for one frame only: [`Verdict::Hold`] or [`Verdict::Replace`].
    pub fn verdict_upto(&mut self, upto: FrameId, decision: impl Into<Decision<'static>>) {
        let decision = about_many(decision.into());
        if let Some(lane) = self.lanes.get_mut(upto.lane as usize) {
            lane.decide_upto(upto.seq, decision);
            self.unflushed = true;
        }
    }

    /// Gives a verdict for every received frame, on all lanes, that is undecided and not held: one write per lane.
    ///
    /// # Panics
    /// As [`verdict_upto`](Self::verdict_upto).
    pub fn verdict_all(&mut self, decision: impl Into<Decision<'static>>) {
        let decision = about_many(decision.into());
        self.lanes.iter_mut().for_each(|lane| lane.decide_all(decision));
        self.unflushed = true;
    }

    /// Keeps the frame: later frames proceed, and this one is decided later, in any order. A full ring stops at a
    /// frame that is neither decided nor held.
    pub fn hold(&mut self, frame: &Frame) {
        self.lane_mut(frame).hold(frame);
        self.unflushed = true;
    }

    /// Announces the number of messages that this client accepts in one frame.
    pub(crate) fn set_batch_max(&self, most: usize) {
        // Relaxed: a number that orders nothing.
        self.lanes.iter().for_each(|lane| {
            lane.own_page().word(abi::CLIENT_BATCH_MAX).store(most as u64, Ordering::Relaxed)
        });
    }

    /// Reports the message that this client processes.
    #[inline]
    pub(crate) fn tell_at(&self, frame: &Frame, index: u16) {
        // Relaxed: read when this process is gone, or to be shown.
        self.lane(frame)
            .own_page()
            .word(abi::CLIENT_AT)
            .store(batch::at(frame.seq(), index), Ordering::Relaxed);
    }

    /// Reports this frame as the last one received. For a program that passes frames on and does not use [`Worker`](crate::Worker): if it
    /// dies, a multiplexor without redelivery gives the messages up to this one up.
    #[inline]
    pub fn tell_received(&self, frame: &Frame) {
        // Relaxed: as in tell_at.
        let page = self.lane(frame).own_page();
        page.word(abi::CLIENT_AT).store(batch::received(frame.seq()), Ordering::Relaxed);
    }

    /// Frames for this client that were lost since the last call. A loss is reported once, at once, even while the
    /// ring is full (like ENOBUFS of netlink(7)). Always 0 without [`Options::gaps`].
    pub fn overrun(&mut self) -> u64 {
        if !self.gaps {
            return 0;
        }
        // Wrapping: the engine may write any numbers.
        self.lanes.iter_mut().map(Lane::overrun).fold(0, u64::wrapping_add)
    }

    /// Wakes the engine if it waits for verdicts. Receiving calls do so too.
    #[inline]
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.unflushed) {
            self.lanes.iter_mut().for_each(Lane::flush);
        }
    }

    /// For event loops: announces a sleep on [`as_fd`](AsFd::as_fd). Returns false if there is a frame already; then
    /// do not sleep.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        self.flush();
        self.lanes.iter().for_each(Lane::tell_position);
        self.lanes.iter().map(Lane::own_page).for_each(cpu::tell);
        self.sleeper.arm(self.lanes.iter().map(Lane::own_page))
            && !self.lanes.iter().any(Lane::is_ready)
            && !self.is_ended()
    }

    /// For event loops: ends the sleep and reads the doorbells.
    ///
    /// # Errors
    /// The socket cannot be read.
    pub fn disarm(&mut self) -> Result<(), RecvError> {
        self.sleeper.disarm(self.lanes.iter().map(Lane::own_page));
        self.listen()
    }

    /// Reads the first lane's socket, where all doorbells ring.
    fn listen(&mut self) -> Result<(), RecvError> {
        self.lanes[0].listen()?;
        if self.lanes[0].is_renewed() { self.renew() } else { Ok(()) }
    }

    /// Replaces the memory: an engine has handed this client over to its successor, or takes it back. The engine does so only when this
    /// client has no frames. Waits for the memory, which takes milliseconds.
    #[cold]
    fn renew(&mut self) -> Result<(), RecvError> {
        if self.lanes.iter().any(|lane| lane.rings.has_any()) {
            return Err(RecvError::Damaged("it was replaced although this client has frames".into()));
        }
        let other = |error: AttachError| std::io::Error::other(format!("the engine was replaced: {error}"));
        let Some((path, options)) = &self.greeting else {
            return Err(RecvError::Damaged("it was replaced".into()));
        };
        let lanes = match renew(self.lanes[0].socket.try_clone()?, path, options) {
            Ok(lanes) => lanes,
            Err(AttachError::Closed) => {
                self.lanes[0].ended = true;
                return Ok(());
            }
            Err(error) => return Err(other(error).into()),
        };
        let fences = lanes[0].fences;
        let mut lanes: Box<[Lane]> = (0..).zip(lanes).map(|(number, lane)| Lane::new(number, lane)).collect();
        // The caller may have the number of the descriptor.
        std::mem::swap(&mut lanes[0].socket, &mut self.lanes[0].socket);
        self.before = ConsumerStats { sleeps: 0, ..self.stats() };
        self.lanes = lanes;
        (self.turn, self.left, self.unflushed) = (0, TURN, false);
        self.sleeper = Sleeper::new(abi::CLIENT_NEED_WAKEUP, fences);
        Ok(())
    }

    /// Number of messages that the lanes have queued for records.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn queued(&self) -> usize {
        self.lanes.iter().map(|lane| lane.rings.queued()).sum()
    }

    /// Ends the channel, even if a forked process has copies of its sockets; dropping the consumer would not. In a
    /// forked process, it only drops the consumer.
    pub fn close(mut self) {
        self.flush();
        if std::process::id() == self.process {
            self.lanes.iter().for_each(|lane| sys::shut(&lane.socket));
        }
    }

    /// Returns true if the engine has ended the channel. Frames published before can still be received.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.lanes.iter().any(|lane| lane.ended)
    }

    /// The consumer's counters.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        let mut sum = ConsumerStats { sleeps: self.sleeps, ..self.before };
        self.lanes.iter().for_each(|lane| sum.add(&lane.stats()));
        sum
    }

    // A frame reaches the caller from one place; from two, the compiler would build it in memory first.
    /// Receives the next frame of the lane whose turn it is, or of the next lane that has one.
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

    /// Appends at most `max` frames of one lane: the one whose turn it is, or the next with frames. Returns their
    /// number, or `None` if no lane has frames.
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
    panic!("frame {} was released", frame.id.seq)
}

#[cold]
#[inline(never)]
fn not_a_replacement() -> ! {
    panic!("Verdict::Replace needs room in the ring: call Consumer::replace")
}

/// Checks that the decision applies to several frames.
#[inline]
fn about_many(decision: Decision<'_>) -> Decision<'_> {
    let one = matches!(decision.verdict, Verdict::Hold | Verdict::Replace(_));
    assert!(!one, "{:?} applies to a single frame", decision.verdict);
    decision
}

impl AsFd for Consumer {
    /// Readable if the engine rings, which it does only between [`Consumer::arm`] and [`Consumer::disarm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lanes[0].socket.as_fd()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.flush();
    }
}
