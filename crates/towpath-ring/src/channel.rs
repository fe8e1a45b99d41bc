//! The engine's end of one attached client.
//!
//! Everything that decides anything is private: who holds which frame is in `Producer`, how far the records were taken
//! in `Verdicts`. What the client writes (release entries, records, TX headers and payloads) is loaded once, compared
//! with that, and never stored anywhere it would be believed later.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use thiserror::Error;

use crate::Seq;
use crate::abi::{self, INLINE_BYTES, VERSION};
use crate::dump::Dump;
use crate::endpoint::Config;
use crate::gap::{Gaps, Loss};
use crate::geometry::Geometry;
use crate::header::{Credentials, FLAG_INLINE, FLAG_ONESHOT, Header, Kind, Meta};
use crate::hello::{Hello, Notice, Reply, Terms, Welcome};
use crate::inbox::Inbox;
use crate::lane::frames::{NoRoom, Room};
use crate::lane::producer::Producer;
use crate::limits::Share;
use crate::park::{Ringer, Sleeper};
use crate::region::{Access, Payload, Use, Words};
use crate::sync::Ordering;
use crate::sys::{self, Sent};
use crate::transmit::Transmit;
use crate::verdicts::{Decision, Verdicts};

/// How long the peer is believed to be alive without a look, in nanoseconds.
const PEER_CHECK: u64 = 5_000_000;
/// Most messages taken from a client's TX lane at a time.
const MESSAGES: usize = 256;

/// One attached client: frames go out through [`reserve`](Self::reserve), verdicts come back through
/// [`poll_verdicts`](Self::poll_verdicts).
///
/// The sum always holds: published = decided by the client + by default + yielded by
/// [`drain_held`](Self::drain_held) + still out; see [`ChannelStats`].
#[derive(Debug)]
pub struct Channel {
    control: Control,
    /// The memory that we write.
    own: Words,
    /// The memory that the client writes.
    theirs: Words,
    payload: Payload,
    pub(crate) rx: Producer,
    verdicts: Verdicts,
    transmit: Transmit,
    sleeper: Sleeper,
    ringer: Ringer,
    /// Messages that are out in a memory of their own, with their sizes.
    oneshots: Vec<(Seq, u64)>,
    oneshot_max: u64,
    /// Whether messages from the client are wanted.
    messages: bool,
    pub(crate) dump: Option<Dump>,
    gaps: Gaps,
    /// Whether the frames are a group's, which publishes.
    shared: bool,
    stats: ChannelStats,
    /// What this channel counts against its user's limits; given back when it is dropped.
    _share: Share,
}

/// The other process: its socket, and whether it is alive.
#[derive(Debug)]
struct Control {
    socket: OwnedFd,
    pidfd: Option<OwnedFd>,
    peer: Credentials,
    name: String,
    dead: Option<Death>,
    violations_max: u64,
    overdue_max: Option<u64>,
    checked: u64,
}

/// How a client's end came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// It closed its socket.
    Closed,
    /// Its process ended while something else kept its socket open.
    Exited,
    /// It wrote too much that has no meaning.
    Violations,
    /// It sat on more overdue frames than [`Config::overdue_max`].
    Stuck,
    /// The engine detached it.
    Detached,
}

/// Why there is no frame for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Full {
    /// The message is larger than the ring ([`Channel::send`] sends such messages in a memory of their own), or larger
    /// than [`Config::oneshot_max`] or than the system has memory for.
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

/// What a channel has done, and what is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Frames published.
    pub published: u64,
    /// Bytes of payload published.
    pub bytes: u64,
    /// Frames that the client decided.
    pub decided: u64,
    /// Of these, by a cumulative verdict.
    pub cumulative: u64,
    /// Frames decided by default because they were overdue.
    pub overdue: u64,
    /// Frames decided by default because the client's answer had no meaning.
    pub garbage: u64,
    /// Frames that came back undecided when the client was gone.
    pub drained: u64,
    /// Frames that are out and undecided now.
    pub out: u32,
    /// Of these, held.
    pub held: u32,
    /// Most frames that were out at a time.
    pub high_water: u32,
    /// Holds beyond the quota, not honoured.
    pub holds_refused: u64,
    /// Verdicts for frames that had been decided without the client.
    pub late: u64,
    /// Words from the client that have no meaning.
    pub violations: u64,
    /// Messages received from the client, replacements not counted.
    pub messages: u64,
    /// Times that a message found no room.
    pub full: u64,
    /// Messages that travelled to the client in a memory of their own.
    pub oneshots: u64,
    /// Of these, because held frames left no gap that was large enough.
    pub oneshots_held: u64,
    /// Messages and replacements that came from the client in a memory of their own.
    pub oneshots_in: u64,
    /// Frames meant for this client that were lost ([`Channel::lose`]).
    pub lost: u64,
    /// The same by reason, in the order of [`Loss::ALL`].
    pub lost_by: [u64; Loss::ALL.len()],
    /// Gap records published; they count as frames published and, later, as decided.
    pub gaps: u64,
    /// Doorbells rung.
    pub wakeups: u64,
    /// How far the client says it has read: its own claim.
    pub consumed: u32,
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
    /// Makes the memory, seals it and hands it over.
    pub(crate) fn open(
        config: &Config,
        socket: &OwnedFd,
        peer: Credentials,
        hello: Hello,
        share: Share,
        area: Option<BorrowedFd<'_>>,
    ) -> std::io::Result<Self> {
        let (layout, fences) = (config.layout(), hello.fences);
        let engine_fd = sys::memfd("towpath-engine", layout.engine_bytes())?;
        let client_fd = sys::memfd("towpath-client", layout.client_bytes())?;
        let tx_fd = sys::memfd("towpath-tx", layout.tx.bytes())?;
        // What only we write is mapped before the seal: afterwards nobody can map it for writing, nor write(2) to it.
        let own = Words::map(engine_fd.as_fd(), layout.engine_bytes(), Access::Own)?;
        let (payload_fd, access) = match area {
            // Sealed, and filled by the group.
            Some(area) => (area.try_clone_to_owned()?, Access::Lent),
            None => (sys::memfd("towpath-rx", layout.rx.bytes())?, Access::Own),
        };
        let payload = Payload::map(payload_fd.as_fd(), layout.rx.bytes(), access)?;
        sys::seal(&engine_fd, sys::READ_ONLY)?;
        if area.is_none() {
            sys::seal(&payload_fd, sys::READ_ONLY)?;
        }
        sys::seal(&client_fd, sys::WRITABLE)?;
        sys::seal(&tx_fd, sys::WRITABLE)?;
        let theirs = Words::map(client_fd.as_fd(), layout.client_bytes(), Access::Foreign)?;
        let tx_payload = Payload::map(tx_fd.as_fd(), layout.tx.bytes(), Access::Foreign)?;
        // Relaxed: the welcome below orders it.
        own.word(abi::IDENT).store(u64::from(abi::MAGIC) | u64::from(VERSION) << 32, Ordering::Relaxed);

        let (socket_copy, pidfd) = (socket.try_clone()?, sys::pidfd(peer.pid));
        let terms = Terms { layout, oneshot_max: config.oneshot_max, fences };
        let welcome = Welcome { version: VERSION, answer: Reply::Attached(terms) };
        let inbox = Inbox::new(socket.try_clone()?, config.limits.descriptors, config.oneshot_max);
        let fds = [engine_fd.as_fd(), payload_fd.as_fd(), client_fd.as_fd(), tx_fd.as_fd()];
        if sys::send(socket, &welcome.emit(), &fds)? != Sent::Yes {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        let mut rx = Producer::new(layout.rx, layout.rx_headers(), layout.rx_notes(), layout.rx_entries());
        if area.is_some() {
            rx.frames.note_freed();
        }
        Ok(Self {
            shared: area.is_some(),
            control: Control {
                socket: socket_copy,
                pidfd,
                peer,
                name: hello.name,
                dead: None,
                violations_max: config.violations_max,
                overdue_max: config.overdue_max,
                checked: 0,
            },
            own,
            theirs,
            payload,
            rx,
            verdicts: Verdicts::new(config),
            transmit: Transmit::new(&layout, tx_payload, inbox),
            sleeper: Sleeper::new(abi::ENGINE_NEED_WAKEUP, fences),
            ringer: Ringer::new(abi::CLIENT_NEED_WAKEUP, fences),
            oneshots: Vec::new(),
            oneshot_max: config.oneshot_max,
            messages: config.messages,
            dump: None,
            gaps: Gaps::new(hello.gaps),
            stats: ChannelStats::default(),
            _share: share,
        })
    }

    /// The process at the other end.
    #[must_use]
    pub fn peer(&self) -> Credentials {
        self.control.peer
    }

    /// What the client calls itself; printable, and nothing to rely on.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.control.name
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
            Err(why @ (Full::TooLarge | Full::Held)) => {
                let sent = self.send_oneshot(bytes, meta);
                self.stats.oneshots_held += u64::from(why == Full::Held && sent.is_ok());
                return sent;
            }
            Err(why) => return Err(why),
        };
        if bytes.len() <= INLINE_BYTES {
            return Ok(self.publish(room, bytes.len(), FLAG_INLINE, meta, bytes));
        }
        let offset = self.rx.payload_offset(room.at);
        self.payload.bytes_mut(offset, bytes.len()).copy_from_slice(bytes);
        let seq = self.publish(room, bytes.len(), 0, meta, &[]);
        // The next message is likely of the same size, and the client has read what is there now.
        let next = self.rx.payload_offset(self.rx.frames.position());
        self.payload.prefetch(next, bytes.len(), Use::Write);
        Ok(seq)
    }

    pub(crate) fn room(&mut self, len: usize) -> Result<Room, Full> {
        if self.control.dead.is_some() {
            return Err(Full::Dead);
        }
        if self.shared {
            return Err(Full::Shared);
        }
        if self.gaps.is_pending() {
            self.tell_gaps(self.rx.geometry().frames_for(len));
        }
        Ok(self.rx.room(len).inspect_err(|_| self.stats.full += 1)?)
    }

    fn send_oneshot(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, Full> {
        if bytes.len() as u64 > self.oneshot_max || bytes.is_empty() {
            return Err(Full::TooLarge);
        }
        let room = self.rx.room(0)?;
        let fd = sys::frozen(bytes).map_err(|e| {
            log::warn!("no memory for a message of {} bytes: {e}", bytes.len());
            Full::TooLarge
        })?;
        self.hand_over(&fd, bytes.len())?;
        Ok(self.publish(room, bytes.len(), FLAG_ONESHOT, meta, &[]))
    }

    /// Sends the memory of the message that is published next.
    pub(crate) fn hand_over(&mut self, fd: &OwnedFd, len: usize) -> Result<(), Full> {
        let (seq, len) = (self.rx.frames.next_seq(), len as u64);
        if len > self.oneshot_max.min(u32::MAX.into()) {
            return Err(Full::TooLarge);
        }
        let under_way: u64 = self.oneshots.iter().map(|(_, len)| len).sum();
        if under_way + len > self.oneshot_max {
            return Err(Full::Lent);
        }
        // Sent before it is published: when the client sees the header, the descriptor is there.
        match sys::send(&self.control.socket, &Notice::OneShot { seq, len }.emit(), &[fd.as_fd()]) {
            Ok(Sent::Yes) => {}
            Ok(Sent::Full) => return Err(Full::Lent),
            Ok(Sent::Gone) => {
                self.die(Death::Closed);
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

    pub(crate) fn publish(&mut self, room: Room, len: usize, flags: u16, meta: &Meta, inline: &[u8]) -> Seq {
        let mut header = meta.header(len, flags);
        if meta.kind != Kind::GAP {
            header.lost = self.gaps.take_before();
        }
        let seq = self.rx.publish(&self.own, room, &header, inline);
        self.stats.published += 1;
        self.stats.bytes += len as u64;
        self.stats.high_water = self.stats.high_water.max(self.held());
        seq
    }

    /// Counts a frame that was meant for this client and is not published. It is told: in the header of the next
    /// message, and, to a client that wants to know, in a frame of [`Kind::GAP`].
    pub fn lose(&mut self, loss: Loss) {
        self.gaps.count(loss, 1);
        self.stats.lost += 1;
        self.stats.lost_by[loss as usize] += 1;
        // Relaxed: a number for Consumer::overrun, which orders nothing.
        self.own.word(abi::ENGINE_LOST).store(self.stats.lost, Ordering::Relaxed);
    }

    /// Publishes gap records while they leave room for `frames` frames behind them.
    #[cold]
    fn tell_gaps(&mut self, frames: usize) {
        let frames = u32::try_from(frames).unwrap_or(u32::MAX).saturating_add(1);
        while self.gaps.is_pending()
            && self.rx.frames.room(frames).is_ok()
            && let Ok(room) = self.rx.room(0)
            && let Some(meta) = self.gaps.next()
        {
            let seq = self.publish(room, 0, FLAG_INLINE, &meta, &[]);
            self.gaps.told(seq);
            self.stats.gaps += 1;
        }
    }

    /// Whether there is a gap record to be published, in a group.
    pub(crate) fn has_gap(&self) -> bool {
        self.gaps.is_pending() && self.control.dead.is_none()
    }

    /// Publishes a gap record in the group's frame at `at`.
    pub(crate) fn publish_gap(&mut self, at: u32) {
        let Some(meta) = self.gaps.next() else { return };
        let seq = self.publish_at(at, 0, FLAG_INLINE, &meta, &[]);
        self.gaps.told(seq);
        self.stats.gaps += 1;
    }

    /// Publishes what the group has put at `at`.
    pub(crate) fn publish_at(&mut self, at: u32, len: usize, flags: u16, meta: &Meta, inline: &[u8]) -> Seq {
        self.publish(self.rx.frames.room_at(at), len, flags, meta, inline)
    }

    /// Whether `frames` more of the group's frames are within `quota`.
    pub(crate) fn may_have(&self, frames: u32, quota: u32) -> bool {
        self.rx.frames.has_number() && self.frames_left().saturating_add(frames) <= quota
    }

    /// Frames that the client has.
    pub(crate) fn frames_left(&self) -> u32 {
        self.rx.frames.frame_nr() - self.rx.frames.free()
    }

    /// The group's messages that have come back since this was last asked, by first frame.
    pub(crate) fn take_freed(&mut self) -> Vec<u32> {
        self.rx.frames.take_freed()
    }

    /// Whether a dead client reads its frames no more: it has closed its end, or its process is gone.
    pub(crate) fn has_left(&self) -> bool {
        let gone = |pidfd: &OwnedFd| sys::wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap_or(false);
        matches!(self.control.dead, Some(Death::Closed | Death::Exited))
            || self.control.pidfd.as_ref().is_some_and(gone)
    }

    /// Wakes the client if it sleeps. Called once after a batch of commits.
    pub fn kick(&mut self) {
        // Without a message that follows, a loss is told when the client has caught up by half.
        if self.gaps.is_pending() && self.control.dead.is_none() && !self.shared {
            self.tell_gaps(self.rx.frames.frame_nr() as usize / 2);
        }
        if self.ringer.should_ring(&self.theirs) {
            self.stats.wakeups += 1;
            self.control.notify(Notice::Doorbell);
        }
    }

    /// Reads what the client has decided and gives each frame's decision to `f` once; the frames are free then. Frames
    /// that are overdue at `now` (nanoseconds, of a clock that does not go back) get the default verdict.
    ///
    /// Decisions come in no particular order. A bounded amount of work per call: frames far behind an undecided one may
    /// take several. Returns how many frames there were, gap records included.
    pub fn poll_verdicts(&mut self, now: u64, mut f: impl FnMut(Seq, Decision<'_>)) -> usize {
        if self.control.checked == 0 || now >= self.control.checked.saturating_add(PEER_CHECK) {
            self.control.checked = now.max(1);
            self.check_peer();
        }
        let lane = crate::verdicts::Lane {
            own: &self.own,
            theirs: &self.theirs,
            rx: &mut self.rx,
            transmit: &mut self.transmit,
            stats: &mut self.stats,
        };
        let gaps = &mut self.gaps;
        let decided = if gaps.none_out() {
            self.verdicts.poll(lane, now, &mut f)
        } else {
            self.verdicts.poll(lane, now, &mut |seq, decision| {
                if !gaps.take(seq) {
                    f(seq, decision);
                }
            })
        };
        // An overdue message is decided, but its memory is with the client until it gives the frame back.
        let frames = &self.rx.frames;
        self.oneshots.retain(|(seq, _)| {
            frames.find(*seq).is_some() || frames.aside().iter().any(|at| frames.seq_at(*at) == *seq)
        });
        if self.stats.violations > self.control.violations_max {
            self.die(Death::Violations);
        }
        // An overdue frame is with the client until its answer comes, too late.
        if self.control.overdue_max.is_some_and(|max| self.stats.overdue - self.stats.late > max) {
            self.die(Death::Stuck);
        }
        decided
    }

    /// Takes the messages that the client has sent (with [`Config::messages`]) and gives a copy of each to `f`: its
    /// header, of which the length was checked and the sender is the kernel's word, and its payload. A bounded number per call; returns how many.
    pub fn poll_messages(&mut self, mut f: impl FnMut(&Header, &[u8])) -> usize {
        for count in 0..MESSAGES {
            if self.control.dead == Some(Death::Violations) || !self.messages {
                return count;
            }
            let next = self.transmit.next(&self.own, &self.theirs);
            self.stats.violations += std::mem::take(&mut self.transmit.missing);
            match next {
                Ok(None) => return count,
                Ok(Some((found, bytes))) => {
                    self.stats.messages += 1;
                    // Who sends is what the kernel said, not what the sender says.
                    let Credentials { pid, uid, gid } = self.control.peer;
                    f(&Header { pid, uid, gid, ..found.header }, &bytes);
                    self.transmit.put_back(bytes);
                }
                Err(_) => {
                    // Where the next message would be is not known any more.
                    self.stats.violations += 1;
                    self.die(Death::Violations);
                }
            }
        }
        MESSAGES
    }

    /// When [`poll_verdicts`](Self::poll_verdicts) should be called again at the latest, for frames that become overdue.
    #[must_use]
    pub fn deadline(&self) -> Option<u64> {
        self.verdicts.deadline()
    }

    /// Frames that are out and undecided.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.rx.frames.lent() + self.rx.frames.held()
    }

    /// How the client's end came, if it has. Looks at what is known; [`check_peer`](Self::check_peer) asks.
    #[must_use]
    pub fn death(&self) -> Option<Death> {
        self.control.dead
    }

    /// Whether the client is gone: publish nothing more, poll for its last verdicts, then
    /// [`drain_held`](Self::drain_held).
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.control.dead.is_some()
    }

    /// Asks the system whether the client lives, and reads its doorbells. Also done by
    /// [`poll_verdicts`](Self::poll_verdicts) every 5 ms of its clock, and by [`wait`](Self::wait).
    pub fn check_peer(&mut self) -> bool {
        self.transmit.inbox.listen();
        self.stats.violations += self.transmit.inbox.take_strangers();
        if self.transmit.inbox.is_ended() {
            self.control.dead.get_or_insert(Death::Closed);
        }
        if let Some(pidfd) = &self.control.pidfd
            && self.control.dead.is_none()
            && sys::wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap_or(false)
        {
            self.die(Death::Exited);
        }
        self.control.dead.is_none()
    }

    /// Ends the channel from this side. The client sees the end of its socket.
    pub fn detach(&mut self) {
        self.die(Death::Detached);
    }

    /// After the end: every frame that is undecided, once, oldest first where that is known. They are the caller's to
    /// decide (by policy: the default verdict, or another worker). Detaches a client that is not gone.
    ///
    /// Call [`poll_verdicts`](Self::poll_verdicts) before: what the client decided in time counts.
    pub fn drain_held(&mut self, mut f: impl FnMut(Seq)) {
        self.detach();
        let frames = &mut self.rx.frames;
        let (mut seq, end) = (frames.oldest(), frames.next_seq());
        let mut drained = 0;
        while seq != end {
            if let Some(at) = frames.find(seq) {
                let undecided = !frames.is_expired(at);
                frames.release(at);
                if undecided {
                    drained += 1;
                    if !self.gaps.take(seq) {
                        f(seq);
                    }
                }
            }
            seq = seq.next();
        }
        while let Some(at) = frames.aside().first().copied() {
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
    /// `while channel.send(..) == Err(Full::Lent) { if channel.poll_verdicts(..) == 0 { channel.wait(..)?; } }`.
    ///
    /// # Errors
    /// When poll(2) fails.
    pub fn wait(&mut self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.kick();
        if self.arm() {
            let mut fds = vec![self.control.socket.as_fd()];
            fds.extend(self.control.pidfd.as_ref().map(AsFd::as_fd));
            sys::wait(&fds, timeout)?;
        }
        self.disarm();
        self.check_peer();
        Ok(())
    }

    /// For event loops: asks the client to ring when it has decided something. False when there is something already,
    /// and then there is no need to sleep. [`disarm`](Self::disarm) afterwards.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        // Relaxed: a statistic for the other side. It lies on a line that the client reads with each verdict, so it is
        // written only when we are about to sleep.
        self.own.word(abi::ENGINE_PUBLISHED).store(self.rx.frames.next_seq().0.into(), Ordering::Relaxed);
        self.sleeper.arm(&self.own)
            && self.control.dead.is_none()
            && !self.verdicts.is_ready(&self.theirs, &self.rx)
            && !(self.messages && self.transmit.is_ready(&self.theirs))
    }

    /// For event loops: no doorbells any more.
    pub fn disarm(&mut self) {
        self.sleeper.disarm(&self.own);
    }

    /// What the channel has done.
    #[must_use]
    pub fn stats(&self) -> ChannelStats {
        let mut stats = self.stats;
        stats.held = self.rx.frames.held();
        stats.out = self.held();
        stats.oneshots_in = self.transmit.oneshots;
        // Relaxed: a claim, shown as one.
        stats.consumed = self.theirs.word(abi::CLIENT_CONSUMED).load(Ordering::Relaxed) as u32;
        stats
    }

    /// The frames that are out, for people: what `towpath ctl show frames` prints.
    pub fn frames(&self) -> impl Iterator<Item = FrameOut> {
        self.rx.frames.out().map(|(seq, first, frames, held, overdue)| FrameOut {
            seq,
            first,
            frames,
            held,
            overdue,
        })
    }

    /// The shape of the ring towards the client.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.rx.geometry()
    }

    fn die(&mut self, how: Death) {
        if self.control.dead.is_some() {
            return;
        }
        log::info!("client {:?} (process {}) detached: {how}", self.control.name, self.control.peer.pid);
        self.control.dead = Some(how);
        // The client, if it lives, sees the end of the socket; that it may be gone already is no error.
        let _ = rustix::net::shutdown(&self.control.socket, rustix::net::Shutdown::Both);
    }
}

impl Control {
    fn notify(&mut self, notice: Notice) {
        // Full: there are doorbells enough that it has not read.
        if matches!(sys::send(&self.socket, &notice.emit(), &[]), Ok(Sent::Gone)) && self.dead.is_none() {
            self.dead = Some(Death::Closed);
        }
    }
}

impl AsFd for Channel {
    /// Readable when the client rings or goes: call [`Channel::check_peer`], then [`Channel::poll_verdicts`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.socket.as_fd()
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "it closed its socket",
            Self::Exited => "its process ended",
            Self::Violations => "it wrote too much that has no meaning",
            Self::Stuck => "it sat on too many overdue frames",
            Self::Detached => "detached by the engine",
        })
    }
}

/// Room for one message: fill it, then commit it.
#[derive(Debug)]
pub struct Slot<'a> {
    channel: &'a mut Channel,
    room: Room,
    len: usize,
    written: usize,
    inline: [u8; INLINE_BYTES],
}

impl Slot<'_> {
    /// The bytes to be filled, as many as were reserved; [`commit_len`](Self::commit_len) says how many count.
    /// What is not filled is from earlier messages of this channel or zero.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.written = self.len;
        self.room_mut()
    }

    /// Appends bytes.
    ///
    /// # Panics
    /// When they are more than was reserved.
    pub fn write(&mut self, bytes: &[u8]) {
        let written = self.written;
        assert!(bytes.len() <= self.len - written, "more bytes than the {} that were reserved", self.len);
        self.room_mut()[written..written + bytes.len()].copy_from_slice(bytes);
        self.written += bytes.len();
    }

    /// Publishes what was written. The client is woken by the next [`Channel::kick`] or [`Channel::wait`].
    pub fn commit(self, meta: &Meta) -> Seq {
        let len = self.written;
        self.commit_len(len, meta)
    }

    /// Publishes the first `len` bytes.
    ///
    /// # Panics
    /// When `len` is more than was written.
    pub fn commit_len(self, len: usize, meta: &Meta) -> Seq {
        assert!(len <= self.written, "{len} bytes were not written");
        let inline = self.len <= INLINE_BYTES;
        let (flags, bytes) = if inline { (FLAG_INLINE, &self.inline[..len]) } else { (0, &[][..]) };
        self.channel.publish(self.room, len, flags, meta, bytes)
    }

    fn room_mut(&mut self) -> &mut [u8] {
        if self.len <= INLINE_BYTES {
            return &mut self.inline[..self.len];
        }
        self.channel.payload.bytes_mut(self.channel.rx.payload_offset(self.room.at), self.len)
    }
}
