//! The engine's end of one attached client: of one of its lanes, each of which an engine thread may have for itself.
//!
//! Everything that decides anything is private: who holds which frame is in `Producer`, how far the records were taken
//! in `Verdicts`. What the client writes (release entries, records, TX headers and payloads) is loaded once, compared
//! with that, and never stored anywhere it would be believed later.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::Seq;
use crate::abi::{self, INLINE_BYTES};
use crate::cpu;
use crate::dump::Dump;
use crate::gap::{Gaps, Loss};
use crate::geometry::Geometry;
use crate::grow::{Growing, Old};
use crate::header::{Credentials, FLAG_INLINE, FLAG_ONESHOT, Header, Kind, Meta};
use crate::hello::Notice;
use crate::inbox::Inbox;
use crate::lane::frames::{NoRoom, Room};
use crate::life::{Death, Life};
use crate::park::{Ringer, Sleeper};
use crate::region::Use;
use crate::rings::{Page, Rings};
use crate::slot::Slot;
use crate::stats::ChannelStats;
use crate::sync::Ordering;
use crate::sys::{self, Sent};
use crate::transmit::{Next, Taken, TxFrame, TxPayload, TxSink};
use crate::verdicts::Decision;

/// How long the peer is believed to be alive without a look, in nanoseconds.
pub(crate) const PEER_CHECK: u64 = 5_000_000;
/// Most messages that a [`Channel::poll_messages`] takes from a client's TX lane.
pub const POLL_MESSAGES: usize = 256;
/// Bytes of messages after which a [`Channel::poll_messages`] takes no more: they may overlap in the area, so its size is no bound.
pub const POLL_BYTES: usize = 4 << 20;

/// One attached client: frames go out through [`reserve`](Self::reserve), verdicts come back through
/// [`poll_verdicts`](Self::poll_verdicts).
///
/// The sum always holds: published = decided by the client + by default + yielded by
/// [`drain_held`](Self::drain_held) + still out; see [`ChannelStats`].
#[derive(Debug)]
pub struct Channel {
    pub(crate) life: Arc<Life>,
    pub(crate) lane: u32,
    pub(crate) page: Page,
    pub(crate) rings: Rings,
    /// The rings before these, until they are drained.
    pub(crate) old: Option<Box<Old>>,
    pub(crate) growing: Option<Box<Growing>>,
    pub(crate) inbox: Inbox,
    pub(crate) sleeper: Sleeper,
    pub(crate) ringer: Ringer,
    /// Messages that are out in a memory of their own, with their sizes.
    pub(crate) oneshots: Vec<(Seq, u64)>,
    pub(crate) demands: Demands,
    pub(crate) dump: Option<Dump>,
    pub(crate) gaps: Gaps,
    /// When the client was last looked at.
    pub(crate) checked: u64,
    pub(crate) stats: ChannelStats,
    /// The other lanes, until they are [`split`](Self::split) off.
    pub(crate) others: Vec<Channel>,
}

/// What a channel asks of its client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demands {
    pub(crate) violations_max: u64,
    pub(crate) overdue_max: Option<u64>,
    /// Largest message in a memory of its own, and most bytes of them under way.
    pub(crate) oneshot_max: u64,
    /// Whether messages from the client are wanted.
    pub(crate) messages: bool,
    /// Whether the frames are a group's, which publishes.
    pub(crate) shared: bool,
}

/// Why there is no frame for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Full {
    /// The message is larger than the ring ([`Channel::send`] sends such messages in a memory of their own), or larger
    /// than [`Config::oneshot_max`](crate::Config::oneshot_max) or than the system has memory for; of a replacement, larger
    /// than [`Config::replacement_max`](crate::Config::replacement_max).
    #[error("the message is larger than the ring")]
    TooLarge,
    /// The client has not given enough frames back. Poll for verdicts, then try again.
    #[error("the client has not given enough frames back")]
    Lent,
    /// Held frames leave no gap that is large enough.
    #[error("frames that the client holds leave no gap that is large enough")]
    Held,
    /// The client is gone.
    #[error("the client is gone")]
    Dead,
    /// The client listens to a group, and its frames are the group's: [`Group::send`](crate::Group::send).
    #[error("the client shares its frames with a group: send to the group")]
    Shared,
    /// To a client that waits for room: a signal's handler ran ([`Consumer::set_interruptible`](crate::Consumer::set_interruptible)).
    /// Nothing was sent; it may try again.
    #[error("a signal came while there was no room")]
    Interrupted,
}

impl From<NoRoom> for Full {
    fn from(why: NoRoom) -> Self {
        match why {
            NoRoom::TooLarge => Self::TooLarge,
            NoRoom::Lent => Self::Lent,
            NoRoom::Held => Self::Held,
        }
    }
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
    /// The lanes, each for a thread of its own: it sends on its lane, and gets the verdicts for what it sent. They share the
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
        self.life.lanes()
    }

    /// The process at the other end.
    #[must_use]
    pub fn peer(&self) -> Credentials {
        self.life.peer
    }

    /// What the client calls itself; printable, and nothing to rely on.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.life.name
    }

    /// Room for a message of `len` bytes, to be filled and committed. Dropping the slot gives the room back unused.
    ///
    /// # Errors
    /// [`Full`]: there is none.
    pub fn reserve(&mut self, len: usize) -> Result<Slot<'_>, Full> {
        let room = self.room(len)?;
        Ok(Slot { room, len, written: 0, inline: [0; INLINE_BYTES], channel: self })
    }

    /// Publishes a copy of `bytes`: [`reserve`](Self::reserve), write and commit in one. A message that is larger than
    /// the ring, or than every gap between held frames, travels in a memory of its own; the client notices nothing.
    ///
    /// # Errors
    /// [`Full`]: there is no room.
    pub fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, Full> {
        let room = match self.room(bytes.len()) {
            Ok(room) => room,
            Err(why) => return self.send_without_room(why, bytes, meta),
        };
        if bytes.len() <= INLINE_BYTES {
            return Ok(self.publish(room, bytes.len(), FLAG_INLINE, meta, bytes));
        }
        let offset = self.rings.rx.payload_offset(room.at);
        self.rings.payload.bytes_mut(offset, bytes.len()).copy_from_slice(bytes);
        let seq = self.publish(room, bytes.len(), 0, meta, &[]);
        // The next message is likely of the same size, and the client has read what is there now.
        let next = self.rings.rx.payload_offset(self.rings.rx.frames.position());
        self.rings.payload.prefetch(next, bytes.len(), Use::Write);
        Ok(seq)
    }

    #[inline]
    pub(crate) fn room(&mut self, len: usize) -> Result<Room, Full> {
        if self.life.is_over() {
            return Err(Full::Dead);
        }
        if self.demands.shared {
            return Err(Full::Shared);
        }
        if self.gaps.is_pending() {
            self.tell_gaps(self.rings.rx.geometry().frames_for(len));
        }
        match self.rings.rx.room(len) {
            Ok(room) => {
                self.at_ease();
                Ok(room)
            }
            Err(why) => self.no_room(why, len),
        }
    }

    /// There is no room; perhaps there is in larger rings.
    #[cold]
    fn no_room(&mut self, why: NoRoom, len: usize) -> Result<Room, Full> {
        self.stats.full += 1;
        if self.pressed(why.into(), len) { Ok(self.rings.rx.room(len)?) } else { Err(why.into()) }
    }

    #[cold]
    fn send_without_room(&mut self, why: Full, bytes: &[u8], meta: &Meta) -> Result<Seq, Full> {
        if !matches!(why, Full::TooLarge | Full::Held) {
            return Err(why);
        }
        let sent = self.send_oneshot(bytes, meta);
        self.stats.oneshots_held += u64::from(why == Full::Held && sent.is_ok());
        sent
    }

    fn send_oneshot(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, Full> {
        if bytes.len() as u64 > self.demands.oneshot_max || bytes.is_empty() {
            return Err(Full::TooLarge);
        }
        let room = self.rings.rx.room(0)?;
        let fd = sys::frozen(bytes).map_err(|e| {
            log::warn!("no memory for a message of {} bytes: {e}", bytes.len());
            Full::TooLarge
        })?;
        self.hand_over(&fd, bytes.len())?;
        Ok(self.publish(room, bytes.len(), FLAG_ONESHOT, meta, &[]))
    }

    /// Sends the memory of the message that is published next.
    pub(crate) fn hand_over(&mut self, fd: &OwnedFd, len: usize) -> Result<(), Full> {
        let (seq, len) = (self.rings.rx.frames.next_seq(), len as u64);
        if len > self.demands.oneshot_max.min(u32::MAX.into()) {
            return Err(Full::TooLarge);
        }
        let under_way: u64 = self.oneshots.iter().map(|(_, len)| len).sum();
        if under_way + len > self.demands.oneshot_max {
            return Err(Full::Lent);
        }
        // Sent before it is published: when the client sees the header, the descriptor is there.
        match sys::send(
            self.life.socket(self.lane),
            &Notice::OneShot { generation: self.rings.generation, seq, len }.emit(),
            &[fd.as_fd()],
        ) {
            Ok(Sent::Yes) => {}
            Ok(Sent::Full) => return Err(Full::Lent),
            Ok(Sent::Gone) => {
                self.life.end(Death::Closed);
                return Err(Full::Dead);
            }
            Err(e) => {
                log::warn!("a message of {len} bytes cannot be handed over: {e}");
                return Err(Full::TooLarge);
            }
        }
        self.oneshots.push((seq, len));
        self.stats.oneshots += 1;
        Ok(())
    }

    #[inline]
    pub(crate) fn publish(&mut self, room: Room, len: usize, flags: u16, meta: &Meta, inline: &[u8]) -> Seq {
        let mut header = meta.header(len, flags);
        if meta.kind != Kind::GAP {
            header.lost = self.gaps.take_before();
        }
        let seq = self.rings.rx.publish(&self.rings.own, room, &header, inline);
        self.stats.published += 1;
        self.stats.bytes += len as u64;
        seq
    }

    /// Notes how many messages are out, before some come back: they become more by being published only.
    fn note_high_water(&mut self) {
        self.stats.high_water = self.stats.high_water.max(self.held());
    }

    /// Counts a frame that was meant for this client and is not published. It is told: in the header of the next
    /// message, and, to a client that wants to know, in a frame of [`Kind::GAP`].
    pub fn lose(&mut self, loss: Loss) {
        self.gaps.count(loss, 1);
        self.stats.lost += 1;
        self.stats.lost_by[loss as usize] += 1;
        // Relaxed: a number for Consumer::overrun, which orders nothing.
        self.page.own.word(abi::ENGINE_LOST).store(self.stats.lost, Ordering::Relaxed);
    }

    /// Publishes gap records while they leave room for `frames` frames behind them.
    #[cold]
    fn tell_gaps(&mut self, frames: usize) {
        let frames = u32::try_from(frames).unwrap_or(u32::MAX).saturating_add(1);
        while self.gaps.is_pending()
            && self.rings.rx.frames.room(frames).is_ok()
            && let Ok(room) = self.rings.rx.room(0)
            && let Some(meta) = self.gaps.next()
        {
            let seq = self.publish(room, 0, FLAG_INLINE, &meta, &[]);
            self.gaps.told(seq);
            self.stats.gaps += 1;
        }
    }

    /// Wakes the client if it sleeps. Called once after a batch of commits.
    #[inline]
    pub fn kick(&mut self) {
        // Without a message that follows, a loss is told when the client has caught up by half.
        if self.gaps.is_pending() && !self.life.is_over() && !self.demands.shared {
            self.tell_gaps(self.rings.rx.frames.frame_nr() as usize / 2);
        }
        if self.ringer.should_ring(&self.page.theirs) {
            self.ring();
        }
    }

    #[cold]
    fn ring(&mut self) {
        self.stats.wakeups += 1;
        self.life.ring();
    }

    /// Reads what the client has decided and gives each frame's decision to `f` once; the frames are free then. Frames
    /// that are overdue at `now` (nanoseconds, of a clock that does not go back) get the default verdict.
    ///
    /// Decisions come in no particular order. A bounded amount of work per call: frames far behind an undecided one may
    /// take several. Returns how many frames there were, gap records included.
    pub fn poll_verdicts(&mut self, now: u64, mut f: impl FnMut(Seq, Decision<'_>)) -> usize {
        if self.checked == 0 || now >= self.checked.saturating_add(PEER_CHECK) {
            self.checked = now.max(1);
            self.check_peer();
            cpu::tell(&self.page.own);
        }
        self.note_high_water();
        let mut decided = 0;
        let Self { rings, old, inbox, stats, gaps, .. } = self;
        let mut held_elsewhere = 0;
        // What was sent first is decided first.
        if let Some(old) = old {
            held_elsewhere = rings.rx.frames.held();
            decided += poll(&mut old.rings, inbox, stats, gaps, held_elsewhere, now, &mut f);
            held_elsewhere = old.rings.rx.frames.held();
        }
        decided += poll(rings, inbox, stats, gaps, held_elsewhere, now, &mut f);
        if self.old.is_some() {
            self.drop_drained();
        }
        if !self.oneshots.is_empty() {
            self.forget_oneshots();
        }
        self.look_at_violations();
        // An overdue frame is with the client until its answer comes, too late.
        if self.demands.overdue_max.is_some_and(|max| self.stats.overdue - self.stats.late > max) {
            self.life.end(Death::Stuck);
        }
        decided
    }

    fn look_at_violations(&mut self) {
        if self.stats.violations > self.demands.violations_max {
            self.life.end(Death::Violations);
        }
    }

    /// Counts those messages in a memory of their own no more that have come back. An overdue one is decided, but its memory
    /// is with the client until it gives the frame back.
    #[cold]
    fn forget_oneshots(&mut self) {
        let out = |rings: &Rings, seq| {
            let frames = &rings.rx.frames;
            frames.find(seq).is_some() || frames.aside().iter().any(|at| frames.seq_at(*at) == seq)
        };
        self.oneshots.retain(|(seq, _)| {
            out(&self.rings, *seq) || self.old.as_ref().is_some_and(|old| out(&old.rings, *seq))
        });
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
    /// not in the ring, or that cross its end, are copied all the same, and so is everything where lanes grow
    /// ([`Config::growth`](crate::Config::growth)).
    pub fn poll_frames(&mut self, sink: &mut impl TxSink) -> usize {
        // A lane that grows has another area afterwards.
        let one_area = self.growing.is_none();
        let mut left = POLL_BYTES;
        for count in 0..POLL_MESSAGES {
            if left == 0 {
                return count;
            }
            if self.life.death() == Some(Death::Violations) || !self.demands.messages {
                return count;
            }
            // What is in the old ring was sent first.
            let moved = self.has_tx_moved();
            let rings = match &mut self.old {
                Some(old) if !moved => &mut old.rings,
                _ => &mut self.rings,
            };
            let next = rings
                .transmit
                .next(&rings.own, &rings.theirs, &mut self.inbox, |header| one_area && sink.hold(header));
            self.stats.oneshots_in += std::mem::take(&mut rings.transmit.oneshots);
            match next {
                Ok(Next::Nothing) => return count,
                Ok(Next::Missing) => {
                    // One that we had no descriptor for is not the client's fault.
                    self.stats.violations += u64::from(!self.inbox.take_short());
                    self.look_at_violations();
                    return count;
                }
                Ok(Next::Message(found, taken)) => {
                    self.stats.messages += 1;
                    // Who sends is what the kernel said, not what the sender says.
                    let Credentials { pid, uid, gid } = self.life.peer;
                    let header = Header { pid, uid, gid, ..found.header };
                    match taken {
                        Taken::Held(frame) => sink.take(&header, TxPayload::Held(frame)),
                        Taken::Copied(bytes) => {
                            left = left.saturating_sub(bytes.len());
                            sink.take(&header, TxPayload::Copied(&bytes));
                            rings.transmit.put_back(bytes);
                        }
                    }
                }
                Err(_) => {
                    // Where the next message would be is not known any more.
                    self.stats.violations += 1;
                    self.life.end(Death::Violations);
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
        let old = self.old.as_mut().map(|old| &mut old.rings);
        for rings in std::iter::once(&mut self.rings).chain(old) {
            if rings.transmit.give_back(&rings.own, &frame) {
                return;
            }
        }
    }

    /// When [`poll_verdicts`](Self::poll_verdicts) should be called again at the latest, for frames that become overdue.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.each_rings().filter_map(|rings| rings.verdicts.deadline()).min()
    }

    /// Frames that are out and undecided.
    #[must_use]
    #[inline]
    pub fn held(&self) -> u32 {
        let out = |rings: &Rings| rings.rx.frames.lent() + rings.rx.frames.held();
        out(&self.rings) + self.old.as_ref().map_or(0, |old| out(&old.rings))
    }

    /// The generations of the rings, the older one first.
    fn each_rings(&self) -> impl Iterator<Item = &Rings> {
        self.old.iter().map(|old| &old.rings).chain([&self.rings])
    }

    /// How the client's end came, if it has. Looks at what is known; [`check_peer`](Self::check_peer) asks.
    #[must_use]
    pub fn death(&self) -> Option<Death> {
        self.life.death()
    }

    /// Whether the client is gone: publish nothing more, poll for its last verdicts, then
    /// [`drain_held`](Self::drain_held).
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.life.is_over()
    }

    /// Asks the system whether the client lives, and reads its doorbells. Also done by
    /// [`poll_verdicts`](Self::poll_verdicts) every 5 ms of its clock, and by [`wait`](Self::wait).
    pub fn check_peer(&mut self) -> bool {
        self.inbox.listen();
        let strangers = self.inbox.take_strangers();
        if strangers > 0 {
            // Bounded: so many of them end the channel.
            let Life { name, peer, .. } = &*self.life;
            log::warn!(
                "client {name:?} (process {}): {strangers} messages without a meaning, or with a descriptor beyond the \
                 {} that may wait for their messages",
                peer.pid,
                self.inbox.descriptors_max()
            );
            self.stats.violations += strangers;
        }
        if self.inbox.take_full() || self.growing.as_ref().is_some_and(|growing| growing.is_put_off()) {
            self.asked_to_grow();
        }
        if self.inbox.is_ended() {
            self.life.close(Death::Closed);
        } else if !self.life.is_over() && self.life.has_exited() {
            self.life.end(Death::Exited);
        }
        !self.life.is_over()
    }

    /// Ends the channel from this side. The client sees the end of its socket.
    pub fn detach(&mut self) {
        self.life.end(Death::Detached);
    }

    /// After the end: every frame that is undecided, once, oldest first where that is known. They are the caller's to
    /// decide (by policy: the default verdict, or another worker). Detaches a client that is not gone.
    ///
    /// Call [`poll_verdicts`](Self::poll_verdicts) before: what the client decided in time counts.
    pub fn drain_held(&mut self, mut f: impl FnMut(Seq)) {
        self.detach();
        self.note_high_water();
        let mut drained = 0;
        for rings in self.old.as_mut().map(|old| &mut old.rings).into_iter().chain([&mut self.rings]) {
            let frames = &mut rings.rx.frames;
            let window = std::iter::successors(Some(frames.oldest()), |seq| Some(seq.next()));
            let window = window.take(frames.next_seq().since(frames.oldest()) as usize);
            let mut all: Vec<_> = window.filter_map(|seq| frames.find(seq)).collect();
            all.extend_from_slice(frames.aside());
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
        }
        self.stats.drained += drained;
    }

    /// Sleeps until the client has decided something, has sent something, is gone, or `timeout` has passed. The frames
    /// published so far are the client's to see first: this also [`kick`](Self::kick)s.
    ///
    /// What [`poll_verdicts`](Self::poll_verdicts) has taken is not there to be waited for any more. When room is
    /// needed, try again after a poll that found something, and wait only after one that found nothing:
    /// `while channel.send(..) == Err(Full::Lent) { if channel.poll_verdicts(..) == 0 { channel.wait(..)?; } }`.
    ///
    /// # Errors
    /// When poll(2) fails.
    pub fn wait(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.kick();
        if self.arm() {
            sys::wait(&self.life.watched(self.lane), timeout)?;
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
        self.inbox.rung = false;
        // Relaxed: a statistic for the other side. It lies on a line that the client reads with each verdict, so it is
        // written only when we are about to sleep.
        self.page
            .own
            .word(abi::ENGINE_PUBLISHED)
            .store(self.rings.rx.frames.next_seq().0.into(), Ordering::Relaxed);
        cpu::tell(&self.page.own);
        self.sleeper.arm([&self.page.own])
            && !self.life.is_over()
            && !self.each_rings().any(|rings| rings.verdicts.is_ready(&rings.theirs, &rings.rx))
            && !self.has_message()
    }

    /// Whether the client was last seen on the CPU of the calling thread. Then it decides nothing while this thread runs, and
    /// looking again is of no use; letting it run is (sched_yield(2), [`wait`](Self::wait)). What the client says, and no more than
    /// a hint.
    #[must_use]
    pub fn shares_cpu(&self) -> bool {
        cpu::is_shared(&self.page.theirs)
    }

    /// Whether there is a message that is wanted.
    fn has_message(&mut self) -> bool {
        if !self.demands.messages {
            return false;
        }
        let moved = self.has_tx_moved();
        let rings = match &mut self.old {
            Some(old) if !moved => &mut old.rings,
            _ => &mut self.rings,
        };
        rings.transmit.is_ready(&rings.theirs)
    }

    /// Whether the doorbell for which [`arm`](Self::arm) asked has come and was read, here or by
    /// [`poll_verdicts`](Self::poll_verdicts), [`poll_messages`](Self::poll_messages) or [`check_peer`](Self::check_peer).
    #[must_use]
    pub fn has_rung(&self) -> bool {
        self.inbox.rung
    }

    /// For event loops: no doorbells any more.
    pub fn disarm(&mut self) {
        self.sleeper.disarm([&self.page.own]);
    }

    /// What the channel has done.
    #[must_use]
    pub fn stats(&self) -> ChannelStats {
        let mut stats = self.stats;
        stats.held = self.each_rings().map(|rings| rings.rx.frames.held()).sum();
        stats.out = self.held();
        stats.high_water = stats.high_water.max(stats.out);
        stats.huge_pages = self.rings.huge;
        stats.old =
            self.old.as_ref().map_or(0, |old| old.rings.rx.frames.frame_nr() - old.rings.rx.frames.free());
        stats.oneshots_in += self.each_rings().map(|rings| rings.transmit.oneshots).sum::<u64>();
        // Relaxed: a claim, shown as one.
        stats.consumed = self.page.theirs.word(abi::CLIENT_CONSUMED).load(Ordering::Relaxed) as u32;
        stats
    }

    /// The frames that are out, for people: what `towpath ctl show frames` prints.
    pub fn frames(&self) -> impl Iterator<Item = FrameOut> {
        self.each_rings()
            .flat_map(|rings| rings.rx.frames.out())
            .map(|(seq, first, frames, held, overdue)| FrameOut { seq, first, frames, held, overdue })
    }

    /// The shape of the ring towards the client, as it is now.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.rings.rx.geometry()
    }
}

/// Polls one generation of a lane's rings, without the gap records among the decisions.
#[inline]
fn poll(
    rings: &mut Rings,
    inbox: &mut Inbox,
    stats: &mut ChannelStats,
    gaps: &mut Gaps,
    held_elsewhere: u32,
    now: u64,
    f: &mut impl FnMut(Seq, Decision<'_>),
) -> usize {
    let Rings { own, theirs, rx, transmit, verdicts, .. } = rings;
    let lane = crate::verdicts::Lane { own, theirs, rx, transmit, inbox, stats, held_elsewhere };
    if gaps.none_out() {
        return verdicts.poll(lane, now, f);
    }
    verdicts.poll(lane, now, &mut |seq, decision| {
        if !gaps.take(seq) {
            f(seq, decision);
        }
    })
}

impl Drop for Channel {
    /// A lane that nobody serves would be waited on for ever: the end of one is the end of all.
    fn drop(&mut self) {
        self.life.close(Death::Detached);
    }
}

impl AsFd for Channel {
    /// Readable when the client rings or goes: call [`Channel::check_peer`], then [`Channel::poll_verdicts`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.life.socket(self.lane).as_fd()
    }
}
