//! A client: receives frames, decides about them.

use std::collections::VecDeque;
use std::hint;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::Seq;
use crate::abi;
use crate::attach::{Attached, Options, attach};
use crate::channel::Full;
use crate::error::{AttachError, RecvError};
use crate::header::{FLAG_INLINE, FLAG_ONESHOT, Header, Kind, Meta};
use crate::hello::{NOTICE, Notice};
use crate::lane::{consumer, records};
use crate::outbox::{self, Outbox};
use crate::park::{Ringer, Sleeper};
use crate::region::{Access, Payload, Use};
use crate::sync::Ordering;
use crate::sys::{self, Received, Sent};
use crate::verdict::{Answer, Verdict, Word};

/// Looks at the ring before going to sleep: some 10 us.
const SPINS: u32 = 400;
/// Most messages read from the engine's socket at a time.
const NOTICES: usize = 64;
/// Most descriptors that wait for their frames; an engine has no reason for so many.
const ANNOUNCED: usize = 512;

/// A frame that this client has: its number and a private copy of its header. The payload stays in the ring, see
/// [`Consumer::payload`].
///
/// A frame that is dropped without a verdict stays undecided, until [`Consumer::verdict_upto`] covers it or the engine's
/// deadline does.
#[derive(Debug)]
#[must_use = "the ring stops when frames are neither decided nor held"]
pub struct Frame {
    seq: Seq,
    at: u32,
    header: Header,
}

impl Frame {
    /// Its number.
    #[must_use]
    pub fn seq(&self) -> Seq {
        self.seq
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }
}

/// What we know about a frame that is ours.
#[derive(Clone, Copy, Debug)]
struct Mine {
    seq: Seq,
    len: u32,
    place: Place,
    /// Records do not cover it.
    held: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    NotMine,
    Ring,
    Inline,
    /// In a memory of its own.
    OneShot,
}

/// The client's end of a channel.
///
/// Verdicts become visible to the engine at once; if it sleeps it is woken by the next call that receives, or by
/// [`flush`](Self::flush). See [`crate::Endpoint`] for an example of both ends.
#[derive(Debug)]
pub struct Consumer {
    ring: Attached,
    rx: consumer::Consumer,
    outbox: Outbox,
    /// By first frame.
    mine: Box<[Mine]>,
    /// Received and undecided, oldest first; some were decided or held since.
    undecided: VecDeque<(Seq, u32)>,
    /// Descriptors that came before the frames they belong to were received.
    announced: VecDeque<(Seq, u64, OwnedFd)>,
    /// Frames that are in a memory of their own, by first frame.
    oneshots: Vec<(u32, Payload)>,
    /// Everything up to here was decided by records.
    upto: Seq,
    records: records::Writer,
    sleeper: Sleeper,
    ringer: Ringer,
    /// Something was written that the engine has not been woken for.
    unflushed: bool,
    /// The engine is gone.
    ended: bool,
    /// Whether it asked to be told of losses.
    gaps: bool,
    /// Losses that [`overrun`](Self::overrun) has told.
    told: u64,
    stats: ConsumerStats,
}

/// What a consumer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsumerStats {
    /// Frames received.
    pub received: u64,
    /// Frames that were meant for it and lost, as the gap records say.
    pub lost: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Doorbells rung.
    pub wakeups: u64,
    /// Messages and replacements sent in a memory of their own.
    pub oneshots: u64,
}

/// A replacement that could not be handed over; the frame is still there to be decided.
#[derive(Debug, thiserror::Error)]
#[error("no replacement for frame {}: {why}", frame.seq())]
pub struct NotReplaced {
    /// The frame.
    pub frame: Frame,
    /// Why not.
    pub why: Full,
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

    pub(crate) fn over(ring: Attached) -> Self {
        let layout = ring.layout;
        let none = Mine { seq: Seq(0), len: 0, place: Place::NotMine, held: false };
        Self {
            rx: consumer::Consumer::new(
                layout.rx,
                layout.rx_headers(),
                layout.rx_notes(),
                layout.rx_entries(),
            ),
            outbox: Outbox::new(&layout),
            mine: vec![none; layout.rx.frame_nr as usize].into(),
            undecided: VecDeque::new(),
            announced: VecDeque::new(),
            oneshots: Vec::new(),
            upto: Seq(0),
            records: records::Writer::new(layout.records_place()),
            sleeper: Sleeper::new(abi::CLIENT_NEED_WAKEUP, ring.fences),
            ringer: Ringer::new(abi::ENGINE_NEED_WAKEUP, ring.fences),
            unflushed: false,
            ended: false,
            gaps: true,
            told: 0,
            stats: ConsumerStats::default(),
            ring,
        }
    }

    /// The next frame; waits for it. None when the engine has ended the channel and everything was received.
    ///
    /// # Errors
    /// [`RecvError`]: the engine wrote nonsense, or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Frame>, RecvError> {
        self.recv_until(None)
    }

    /// The next frame; waits at most `timeout`. None also when that has passed; [`is_ended`](Self::is_ended) tells.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Frame>, RecvError> {
        self.recv_until(Instant::now().checked_add(timeout))
    }

    /// The next frame, if it is there.
    ///
    /// # Errors
    /// As [`recv`](Self::recv), except that there is no poll(2).
    pub fn try_recv(&mut self) -> Result<Option<Frame>, RecvError> {
        self.flush();
        self.take()
    }

    /// Appends at most `max` frames to `into`; waits for the first one. Returns how many; 0 means the end.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_batch(&mut self, into: &mut Vec<Frame>, max: usize) -> Result<usize, RecvError> {
        let Some(first) = (if max == 0 { None } else { self.recv()? }) else { return Ok(0) };
        into.push(first);
        let mut count = 1;
        while count < max
            && let Some(frame) = self.take()?
        {
            into.push(frame);
            count += 1;
        }
        Ok(count)
    }

    /// The frame's payload, in the ring: as long as the result lives nothing can be decided.
    ///
    /// # Panics
    /// When the frame is not this consumer's any more: [`verdict_upto`](Self::verdict_upto) has covered it.
    #[must_use]
    pub fn payload(&self, frame: &Frame) -> &[u8] {
        let mine = &self.mine[frame.at as usize];
        assert!(self.has(frame), "frame {} was given back", frame.seq);
        let len = mine.len as usize;
        match mine.place {
            Place::Inline => self.ring.theirs.lent(self.rx.inline_index(frame.at), len),
            Place::Ring => self.ring.rx_payload.lent(self.rx.payload_offset(frame.at), len),
            Place::OneShot => {
                let own = self.oneshots.iter().find(|(at, _)| *at == frame.at);
                own.map(|(_, memory)| memory.lent(0, len)).unwrap_or_default()
            }
            Place::NotMine => unreachable!("just checked"),
        }
    }

    /// Whether the frame is still this consumer's.
    #[must_use]
    pub fn has(&self, frame: &Frame) -> bool {
        let mine = self.mine.get(frame.at as usize);
        mine.is_some_and(|m| m.seq == frame.seq && m.place != Place::NotMine)
    }

    /// Decides about the frame and gives it back. ([`Verdict::Hold`] keeps it, but [`hold`](Self::hold) is what leaves
    /// you the frame to decide about later.)
    pub fn verdict(&mut self, frame: Frame, answer: impl Into<Answer>) {
        self.answer(&frame, answer.into());
    }

    /// Decides about every frame received up to `upto` that has no verdict of its own and is not held, in one write.
    ///
    /// # Panics
    /// When the answer is about one frame only: [`Verdict::Hold`] or [`Verdict::Replace`].
    pub fn verdict_upto(&mut self, upto: Seq, answer: impl Into<Answer>) {
        let answer = answer.into();
        assert!(
            !matches!(answer.verdict, Verdict::Hold | Verdict::Replace(_)),
            "{:?} is about one frame",
            answer.verdict
        );
        let received = self.rx.expected().back(1);
        let upto = if received.is_before(upto) { received } else { upto };
        if !self.upto.is_before(upto) {
            return;
        }
        let full = self.records.is_full(&self.ring.theirs);
        while let Some((seq, at)) = self.undecided.front().copied()
            && !upto.is_before(seq)
        {
            self.undecided.pop_front();
            if !self.is_undecided(seq, at) {
                continue;
            }
            if full {
                self.write_entry(seq, at, answer);
            }
            self.give_back(at);
        }
        self.unflushed = true;
        if full {
            return;
        }
        self.upto = upto;
        let word = Word { seq: upto, verdict: answer.verdict, flags: answer.flags };
        self.records.write(&self.ring.own, word, answer.mark, answer.mask);
    }

    /// Keeps the frame: later ones go on, this one is decided later, in any order. Frames that are neither decided nor
    /// held stop the ring when it is full.
    pub fn hold(&mut self, frame: &Frame) {
        if self.has(frame) {
            self.write_entry(frame.seq, frame.at, Verdict::Hold.into());
            self.unflushed = true;
            self.mine[frame.at as usize].held = true;
        }
    }

    /// Lets the frame go on with another payload; waits while the ring towards the engine is full.
    ///
    /// # Errors
    /// [`NotReplaced`] gives the frame back: the payload is larger than the engine takes, or the engine is gone.
    pub fn replace(&mut self, frame: Frame, payload: &[u8]) -> Result<(), NotReplaced> {
        let mut frame = frame;
        loop {
            match self.try_replace(frame, payload) {
                Err(NotReplaced { frame: again, why: Full::Lent }) => frame = again,
                other => return other,
            }
            if let Err(why) = self.wait_for_room() {
                return Err(NotReplaced { frame, why });
            }
        }
    }

    /// Waits until the engine has given a TX frame back.
    fn wait_for_room(&mut self) -> Result<(), Full> {
        self.flush();
        if self.sleeper.arm(&self.ring.own) && !self.outbox.is_returned(&self.ring.theirs) && !self.ended {
            self.stats.sleeps += 1;
            // A poll that fails shows in the next call that receives; here it is only a turn of the loop.
            let _ = sys::wait(&[self.ring.socket.as_fd()], None);
        }
        self.sleeper.disarm(&self.ring.own);
        if self.listen().is_err() || self.ended { Err(Full::Dead) } else { Ok(()) }
    }

    /// Lets the frame go on with another payload.
    ///
    /// # Errors
    /// [`NotReplaced`] gives the frame back; with [`Full::Lent`](crate::Full::Lent) it is worth trying again.
    pub fn try_replace(&mut self, frame: Frame, payload: &[u8]) -> Result<(), NotReplaced> {
        if !self.has(&frame) {
            // Decided before, by verdict_upto: as for any verdict on such a frame, nothing happens. A TX frame that no
            // verdict names would be lost to the ring.
            return Ok(());
        }
        match self.transmit(payload, &Meta { kind: Kind::REPLACEMENT, port: frame.seq.0, ..Meta::default() })
        {
            Ok(at) => {
                self.answer(&frame, Verdict::Replace(at).into());
                Ok(())
            }
            Err(why) => Err(NotReplaced { frame, why }),
        }
    }

    /// Sends a message to the engine; waits while the ring towards it is full. One that is larger than that ring goes in a
    /// memory of its own. Whether engines listen to messages is
    /// theirs to say ([`crate::Config::messages`]).
    ///
    /// # Errors
    /// [`Full`]: the message is larger than the engine takes ([`crate::Config::oneshot_max`]), or the engine is gone.
    pub fn send(&mut self, payload: &[u8], meta: &Meta) -> Result<(), Full> {
        loop {
            match self.try_send(payload, meta) {
                Err(Full::Lent) => self.wait_for_room()?,
                other => return other,
            }
        }
    }

    /// Sends a message to the engine if there is room. It is woken by the next call that receives, or by
    /// [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`Full`]: there is no room now ([`Full::Lent`]), or never will be.
    pub fn try_send(&mut self, payload: &[u8], meta: &Meta) -> Result<(), Full> {
        self.transmit(payload, meta)?;
        Ok(())
    }

    /// Asks for a dump of what `group` names. The answer comes as frames of [`Kind::DUMP`] and one of [`Kind::DONE`], or
    /// one of [`Kind::ERROR`].
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn request(&mut self, group: u32, payload: &[u8]) -> Result<(), Full> {
        self.send(payload, &Meta { kind: Kind::REQUEST, group, ..Meta::default() })?;
        self.flush();
        Ok(())
    }

    /// How many frames for this client were lost since this was last asked: each loss is told once, at once, also while
    /// the ring is full (what ENOBUFS was for netlink(7)). Always 0 without [`Options::gaps`].
    pub fn overrun(&mut self) -> u64 {
        if !self.gaps {
            return 0;
        }
        // Relaxed: a number that orders nothing.
        let lost = self.ring.theirs.word(abi::ENGINE_LOST).load(Ordering::Relaxed);
        lost.wrapping_sub(std::mem::replace(&mut self.told, lost))
    }

    /// Wakes the engine if it waits for what was decided. Receiving does it too.
    pub fn flush(&mut self) {
        if !std::mem::take(&mut self.unflushed) {
            return;
        }
        if self.ringer.should_ring(&self.ring.theirs) {
            self.stats.wakeups += 1;
            // Full: there are doorbells enough. Failed or gone: receiving will tell.
            let _: Result<Sent, _> = sys::send(&self.ring.socket, &Notice::Doorbell.emit(), &[]);
        }
    }

    /// Whether a message of `len` bytes would find room in the ring towards the engine. In an event loop: after
    /// [`arm`](Self::arm), which makes the engine ring also when it gives room back.
    pub fn has_room(&mut self, len: usize) -> bool {
        self.outbox.has_room(&self.ring.theirs, len)
    }

    /// For event loops: says that we are about to sleep on [`as_fd`](AsFd::as_fd). False when there is a frame already.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        self.flush();
        // Relaxed: a statistic for the other side.
        self.ring.own.word(abi::CLIENT_CONSUMED).store(self.rx.expected().0.into(), Ordering::Relaxed);
        self.sleeper.arm(&self.ring.own) && !self.rx.is_ready(&self.ring.theirs) && !self.ended
    }

    /// For event loops: awake again; reads what rang.
    ///
    /// # Errors
    /// When the socket cannot be read.
    pub fn disarm(&mut self) -> Result<(), RecvError> {
        self.sleeper.disarm(&self.ring.own);
        self.listen()
    }

    /// Whether the engine has ended the channel. Frames that it published before may still be received.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// What this consumer has done.
    #[must_use]
    pub fn stats(&self) -> ConsumerStats {
        ConsumerStats { oneshots: self.outbox.oneshots, ..self.stats }
    }

    fn recv_until(&mut self, end: Option<Instant>) -> Result<Option<Frame>, RecvError> {
        loop {
            self.flush();
            for _ in 0..SPINS {
                if let Some(frame) = self.take()? {
                    return Ok(Some(frame));
                }
                hint::spin_loop();
            }
            if self.ended {
                return Ok(None);
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            if self.arm() {
                self.stats.sleeps += 1;
                sys::wait(&[self.ring.socket.as_fd()], left)?;
            }
            self.disarm()?;
        }
    }

    fn take(&mut self) -> Result<Option<Frame>, RecvError> {
        let found = self.rx.next(&self.ring.theirs).map_err(|e| RecvError::Damaged(format!("{e:?}")))?;
        let Some(consumer::Found { seq, at, header }) = found else { return Ok(None) };
        if self.mine[at as usize].place != Place::NotMine {
            return Err(RecvError::Damaged(format!("frame {at} came again while it was ours")));
        }
        let place = if header.flags & FLAG_ONESHOT != 0 {
            let memory = self.announced(seq, header.len)?;
            self.oneshots.push((at, memory));
            Place::OneShot
        } else if header.flags & FLAG_INLINE != 0 {
            Place::Inline
        } else {
            // Asked for now, read when the caller has taken its batch.
            self.ring.rx_payload.prefetch(self.rx.payload_offset(at), header.len as usize, Use::Read);
            Place::Ring
        };
        self.mine[at as usize] = Mine { seq, len: header.len, place, held: false };
        while let Some((seq, at)) = self.undecided.front().copied()
            && !self.is_undecided(seq, at)
        {
            self.undecided.pop_front();
        }
        self.undecided.push_back((seq, at));
        // Numbers are compared modulo 2^32: what is far behind must not come to look as if it were ahead.
        if self.upto.is_before(seq.back(1 << 30)) {
            self.upto = seq.back(1 << 30);
        }
        self.stats.received += 1;
        self.stats.lost += u64::from(header.lost);
        Ok(Some(Frame { seq, at, header }))
    }

    /// The memory of message `seq`, which was announced on the socket before it was published.
    fn announced(&mut self, seq: Seq, len: u32) -> Result<Payload, RecvError> {
        self.listen()?;
        let damaged = |what: &str| RecvError::Damaged(format!("the memory of frame {seq}: {what}"));
        let index = self.announced.iter().position(|(s, ..)| *s == seq);
        let (_, announced, fd) = index
            .and_then(|i| self.announced.remove(i))
            .ok_or_else(|| damaged("no descriptor came with it"))?;
        let (seals, size) = sys::sealed(fd.as_fd()).map_err(|_| damaged("no memfd"))?;
        // It could otherwise shrink or change while it is read.
        if !seals.contains(sys::FROZEN) || announced != u64::from(len) || size < announced || len == 0 {
            return Err(damaged("seals or size are not what they should be"));
        }
        Ok(Payload::map_once(fd.as_fd(), len as usize, Access::Lent)?)
    }

    fn give_back(&mut self, at: u32) {
        let mine = &mut self.mine[at as usize];
        if mine.place == Place::OneShot {
            self.oneshots.retain(|(frame, _)| *frame != at);
        }
        mine.place = Place::NotMine;
    }

    fn answer(&mut self, frame: &Frame, answer: Answer) {
        if answer.verdict == Verdict::Hold {
            return self.hold(frame);
        }
        if self.has(frame) {
            self.write_entry(frame.seq, frame.at, answer);
            self.give_back(frame.at);
            self.unflushed = true;
        }
    }

    fn write_entry(&self, seq: Seq, at: u32, answer: Answer) {
        let word = Word { seq, verdict: answer.verdict, flags: answer.flags };
        self.rx.release(&self.ring.own, at, word, answer.mark, answer.mask);
    }

    fn is_undecided(&self, seq: Seq, at: u32) -> bool {
        let mine = &self.mine[at as usize];
        mine.seq == seq && mine.place != Place::NotMine && !mine.held
    }

    /// Publishes a TX frame; returns its first frame.
    fn transmit(&mut self, payload: &[u8], meta: &Meta) -> Result<u16, Full> {
        let way = outbox::Way {
            own: &self.ring.own,
            theirs: &self.ring.theirs,
            payload: &mut self.ring.tx_payload,
            socket: &self.ring.socket,
            oneshot_max: self.ring.oneshot_max,
        };
        let at = self.outbox.send(way, payload, meta)?;
        self.unflushed = true;
        Ok(at)
    }

    /// Reads what the engine sent over the socket.
    fn listen(&mut self) -> Result<(), RecvError> {
        let mut message = [0; NOTICE];
        // Bounded: an engine that keeps ringing could otherwise keep us here.
        for _ in 0..NOTICES {
            match sys::recv_with_fds::<1>(&self.ring.socket, &mut message)? {
                Received::Message(len, fds) => match (Notice::parse(&message[..len]), fds.into_iter().next())
                {
                    (Ok(Notice::Doorbell), _) => {}
                    (Ok(Notice::OneShot { seq, len }), Some(fd)) if self.announced.len() < ANNOUNCED => {
                        self.announced.push_back((seq, len, fd));
                    }
                    _ => return Err(RecvError::Damaged("a message that has no meaning".into())),
                },
                Received::Nothing => return Ok(()),
                Received::End => {
                    self.ended = true;
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

impl AsFd for Consumer {
    /// Readable when the engine rings, which it does only between [`Consumer::arm`] and [`Consumer::disarm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.socket.as_fd()
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.flush();
    }
}
