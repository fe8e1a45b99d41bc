//! A group: one payload area, several listeners, and taps.
//!
//! A message is copied once, whoever listens. Each listener has headers and release entries of its own, numbers of its own, and
//! its own verdict; the frames are free when the last of them has given them back. Taps have a [log](crate::taplog) and give
//! nothing back.
//!
//! ```text
//! area     [msg 7][msg 8     ][free][msg 4, held by B][free ...
//! A's ring   #5    #6
//! B's ring   #7    #8               #4
//! refs        2     2                 1
//! ```
//!
//! Invariants: a frame is in use as long as its count is not 0; a listener's own book (its `Frames`) has each message that
//! it was given, at the same place as the group's. A listener may have at most its [part](crate::member) of the area, so that
//! the slowest cannot take it from the others: what is beyond that it loses, and is told. All listeners and taps of a group see the same
//! memory, so they have the same rights: one allow-list, which names them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use crate::engine::channel::{Channel, Full, PEER_CHECK};
use crate::engine::endpoint::{Allow, Config, Endpoint, Newcomer};
use crate::engine::member::{Member, Quarantined, share_out};
use crate::engine::quota::Share;
use crate::engine::rings::Area;
use crate::engine::verdict_reader::Decision;
use crate::handshake::error::BindError;
use crate::handshake::messages::{Notice, Reply, Terms, Welcome};
use crate::lane::frames::Frames;
use crate::lane::loss_record::Loss;
use crate::lane::taplog::{Shape, Writer};
use crate::shm::abi::{self, INLINE_BYTES};
use crate::shm::geometry::Geometry;
use crate::shm::header::{Credentials, FLAG_INLINE, FLAG_ONESHOT, Kind, Meta};
use crate::shm::park::Ringer;
use crate::shm::region::{Access, Payload, Words};
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Received, Sent};

/// Which listener of a group, for as long as the group lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u64);

/// Who has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// A listener, a [`Consumer`](crate::Consumer) at its end.
    Listener(MemberId),
    /// A [`Tap`](crate::Tap).
    Tap,
}

/// What a group has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Messages offered.
    pub offered: u64,
    /// Messages that at least one listener has.
    pub sent: u64,
    /// Of each message, the listeners that have it.
    pub copies: u64,
    /// And those that lost it: told to each by a gap record.
    pub copies_lost: u64,
    /// Messages that travelled in a memory of their own.
    pub oneshots: u64,
    /// Messages that there was no room for in the area.
    pub no_room: u64,
    /// Messages that nobody was there for.
    pub no_listener: u64,
    /// Listeners now.
    pub listeners: usize,
    /// Taps now, as far as was looked: see [`Group::poll_verdicts`].
    pub taps: usize,
    /// Whether the area is in huge pages.
    pub huge_pages: bool,
    /// Messages that a listener had which was detached and whose process lives: it may be reading them.
    pub quarantined: usize,
}

/// Most messages read from a tap's socket at a time; it has no reason to send any.
const SAID: usize = 64;

/// The memory that all of a group share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) payload: OwnedFd,
    pub(crate) log: OwnedFd,
}

/// The engine's end of a tap.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) socket: OwnedFd,
    /// The end of its process; none where it cannot be seen.
    pub(crate) pidfd: Option<OwnedFd>,
    /// The page that the tap writes.
    pub(crate) theirs: Words,
    pub(crate) ringer: Ringer,
    pub(crate) peer: Credentials,
    pub(crate) name: String,
    pub(crate) _share: Share,
}

impl Seat {
    /// Makes the tap's page and hands the group's memory over.
    pub(crate) fn open(
        terms: Terms,
        shared: &Shared,
        socket: std::io::Result<OwnedFd>,
        peer: Credentials,
        name: String,
        share: Share,
    ) -> std::io::Result<Self> {
        let socket = socket?;
        let page = sys::memfd("towpath-tap", abi::TAP_BYTES)?;
        sys::seal(&page, sys::WRITABLE)?;
        let theirs = Words::map(page.as_fd(), abi::TAP_BYTES, Access::Foreign)?;
        let welcome = Welcome { version: abi::VERSION, answer: Reply::Attached(terms) };
        let fds = [shared.log.as_fd(), shared.payload.as_fd(), page.as_fd()];
        if sys::send(&socket, &welcome.emit(), &fds)? != Sent::Yes {
            return Err(std::io::ErrorKind::BrokenPipe.into());
        }
        share.lend();
        let ringer = Ringer::new(abi::CLIENT_NEED_WAKEUP, terms.fences, std::sync::Arc::default());
        Ok(Self { socket, pidfd: sys::pidfd(peer.pid), theirs, ringer, peer, name, _share: share })
    }

    /// Whether the tap is gone: it has closed its end, or its process has ended.
    fn is_gone(&self) -> bool {
        // Read to the end of what it has sent, if it does that: the end of the socket comes behind it.
        for _ in 0..SAID {
            match sys::recv(&self.socket, &mut [0; 8]) {
                Ok(Received::Message(..) | Received::Short(_)) => {}
                Ok(Received::Nothing) => break,
                Ok(Received::End) | Err(_) => return true,
            }
        }
        let ended = |pidfd: &OwnedFd| sys::wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap_or(false);
        self.pidfd.as_ref().is_some_and(ended)
    }
}

/// One payload area for several listeners and taps. Driven by one engine thread: the area has one writer, so [`Config::lanes`]
/// must be 1. A listener must be a process whose end the engine can see (pidfd_open(2), Linux 5.3; a process of a namespace
/// beside the engine's is refused): what it is detached with is free when it ends, and not before.
///
/// An engine with several threads has a group for each, at a path of its own, and whoever listens attaches to each of them. The
/// inspectors of a queue, of which each packet goes to one, need no group: each is a [`Channel`] with a lane for every thread
/// ([`Channel::split`]), and every thread has a [`Queue`](crate::Queue) of its own lanes of them.
///
/// ```
/// use towpath_ring::{Config, Consumer, Group, Joined, Meta, Verdict};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// let path = dir.path().join("group.sock");
/// let mut group = Group::bind(&path, Config::default())?;
/// let client = std::thread::spawn(move || {
///     let mut listener = Consumer::attach(&path).expect("the group is there");
///     let frame = listener.recv().expect("no nonsense").expect("a frame");
///     let payload = listener.payload(&frame).to_vec();
///     listener.verdict(frame, Verdict::Pass);
///     payload
/// });
/// while group.accept()?.is_none() {
///     group.wait(None)?;
/// }
/// assert_eq!(group.send(b"to all of you", &Meta::default()), 1);
/// group.kick();
/// assert_eq!(client.join().unwrap(), b"to all of you");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Group {
    endpoint: Endpoint,
    area: Payload,
    geometry: Geometry,
    /// Which frames of the area are in use. All messages are aside: nobody is waited for.
    frames: Frames,
    /// By first frame: how many listeners have the message.
    refs: Box<[u32]>,
    members: Vec<Member>,
    quarantine: Vec<Quarantined>,
    taps: Vec<Seat>,
    /// When these and the quarantine were last looked at.
    looked: u64,
    log: Words,
    writer: Writer,
    next_id: u64,
    stats: GroupStats,
}

impl Group {
    /// Listens at `path`. [`Config::rx`] is the area; every listener has the other parts of `config` for itself.
    ///
    /// # Errors
    /// As [`Endpoint::bind`]; also when the allow-list does not name the users, because they all see the same memory, and when
    /// there is to be more than one lane.
    pub fn bind(path: impl AsRef<Path>, config: Config) -> Result<Self, BindError> {
        if config.allow == Allow::Any {
            return Err(BindError::GroupOfAny);
        }
        if config.lanes != 1 {
            return Err(BindError::GroupLanes(config.lanes));
        }
        let geometry = config.rx;
        geometry.check().map_err(|rule| BindError::Geometry { direction: "RX", rule })?;
        let memory = |source| BindError::Memory { source };
        let shape = Shape { area: geometry };
        let Area { fd: payload, payload: area, huge } =
            Area::make("towpath-group", geometry.bytes(), config.huge_pages).map_err(memory)?;
        let log = sys::memfd("towpath-log", shape.bytes()).map_err(memory)?;
        // Mapped before the seal: afterwards nobody can map it for writing.
        let words = Words::map(log.as_fd(), shape.bytes(), Access::Own).map_err(memory)?;
        sys::seal(&log, sys::READ_ONLY).map_err(memory)?;
        Ok(Self {
            endpoint: Endpoint::shared(path.as_ref(), config, Shared { payload, log })?,
            area,
            geometry,
            frames: Frames::new(geometry.frame_nr, Seq::FIRST),
            refs: vec![0; geometry.frame_nr as usize].into(),
            members: Vec::new(),
            quarantine: Vec::new(),
            looked: 0,
            taps: Vec::new(),
            writer: Writer::new(shape, &words),
            log: words,
            next_id: 0,
            stats: GroupStats { huge_pages: huge, ..GroupStats::default() },
        })
    }

    /// The endpoint, for its path and counters.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The next client that has joined, if there is one. Never blocks.
    ///
    /// # Errors
    /// As [`Endpoint::accept`].
    pub fn accept(&mut self) -> std::io::Result<Option<Joined>> {
        self.look_at_quarantine();
        // Who is gone must not count against who comes.
        if !self.taps.is_empty() && sys::wait(&[self.endpoint.as_fd()], Some(Duration::ZERO))? {
            self.look_at_taps();
        }
        Ok(match self.endpoint.newcomer()? {
            None => None,
            Some(Newcomer::Client(channel)) => {
                let id = MemberId(self.next_id);
                self.next_id += 1;
                self.members.push(Member { id, channel: *channel, quota: 0 });
                self.share_out();
                Some(Joined::Listener(id))
            }
            Some(Newcomer::Tap(seat)) => {
                self.taps.push(*seat);
                Some(Joined::Tap)
            }
        })
    }

    /// Waits until [`accept`](Self::accept) may have something to do, at most `timeout`.
    ///
    /// # Errors
    /// When poll(2) fails.
    pub fn wait(&self, timeout: Option<Duration>) -> std::io::Result<()> {
        self.endpoint.wait(timeout)
    }

    /// Gives a message to every listener that has room, and to the taps. Returns how many listeners have it; the others lost
    /// it and are told.
    pub fn send(&mut self, bytes: &[u8], meta: &Meta) -> usize {
        self.reclaim();
        self.tell_gaps();
        self.stats.offered += 1;
        if self.members.is_empty() && self.taps.is_empty() {
            self.stats.no_listener += 1;
            return 0;
        }
        let inline = bytes.len() <= INLINE_BYTES;
        let frames = if inline { 1 } else { self.geometry.frames_for(bytes.len()) };
        let frames = u32::try_from(frames).unwrap_or(u32::MAX);
        let sent = match self.place(frames) {
            Some(at) => {
                if !inline {
                    self.fill(at, bytes);
                }
                let (flags, beside) = if inline { (FLAG_INLINE, bytes) } else { (0, &[][..]) };
                self.log(at, bytes.len(), flags, meta, beside);
                self.publish(at, frames, |channel| {
                    Ok(channel.publish_at(at, bytes.len(), flags, meta, beside))
                })
            }
            None => {
                self.stats.no_room += 1;
                let gap = Meta { kind: Kind::GAP, wire_len: 1, mark: Loss::NoRoom.code(), ..Meta::default() };
                self.log(0, 0, FLAG_INLINE, &gap, &[]);
                self.send_oneshot(bytes, meta)
            }
        };
        self.stats.sent += u64::from(sent > 0);
        self.stats.copies += sent as u64;
        sent
    }

    /// Adjacent frames that nobody uses; in use from now on.
    fn place(&mut self, frames: u32) -> Option<u32> {
        let room = self.frames.room(frames).ok()?;
        self.frames.publish(room, frames);
        self.frames.hold(room.at);
        self.refs[room.at as usize] = 0;
        Some(room.at)
    }

    fn fill(&mut self, at: u32, bytes: &[u8]) {
        if !self.taps.is_empty() {
            self.writer.stamp(&self.log, at, bytes.len());
        }
        let offset = at as usize * self.geometry.frame_size as usize;
        self.area.bytes_mut(offset, bytes.len()).copy_from_slice(bytes);
    }

    fn log(&mut self, at: u32, len: usize, flags: u16, meta: &Meta, inline: &[u8]) {
        if !self.taps.is_empty() {
            self.writer.publish(&self.log, &meta.header(len, flags), at, inline);
        }
    }

    /// Gives what is at `at` to each listener whose part of the area it fits into.
    fn publish(
        &mut self,
        at: u32,
        frames: u32,
        mut give: impl FnMut(&mut Channel) -> Result<Seq, Full>,
    ) -> usize {
        let mut sent = 0;
        for Member { channel, quota, .. } in self.members.iter_mut().filter(|m| !m.channel.is_dead()) {
            if channel.may_have(frames, *quota) && give(channel).is_ok() {
                sent += 1;
            } else {
                channel.lose(Loss::NoRoom);
                self.stats.copies_lost += 1;
            }
        }
        self.refs[at as usize] = sent as u32;
        if sent == 0 {
            self.frames.release(at);
        }
        sent
    }

    /// What is larger than every gap: one memory, which every listener gets.
    fn send_oneshot(&mut self, bytes: &[u8], meta: &Meta) -> usize {
        let fd = if bytes.len() > INLINE_BYTES { sys::frozen(bytes).ok() } else { None };
        let place = if fd.is_some() { self.place(1) } else { None };
        let (Some(fd), Some(at)) = (fd, place) else {
            for Member { channel, .. } in self.members.iter_mut().filter(|m| !m.channel.is_dead()) {
                channel.lose(Loss::NoRoom);
                self.stats.copies_lost += 1;
            }
            return 0;
        };
        self.stats.oneshots += 1;
        self.publish(at, 1, |channel| {
            channel.hand_over(&fd, bytes.len())?;
            Ok(channel.publish_at(at, bytes.len(), FLAG_ONESHOT, meta, &[]))
        })
    }

    /// Tells listeners what they lost, as soon as there is room for it.
    fn tell_gaps(&mut self) {
        for i in 0..self.members.len() {
            while let Member { channel, quota, .. } = &self.members[i]
                && channel.has_gap()
                && channel.may_have(2, *quota)
            {
                let Some(at) = self.place(1) else { return };
                self.refs[at as usize] = 1;
                self.members[i].channel.publish_gap(at);
            }
        }
    }

    /// Wakes the listeners and taps that sleep. Called once after a batch.
    pub fn kick(&mut self) {
        self.reclaim();
        self.tell_gaps();
        self.members.iter_mut().for_each(|m| m.channel.kick());
        self.taps.retain_mut(|tap| {
            !tap.ringer.should_ring(&tap.theirs)
                || !matches!(sys::send(&tap.socket, &Notice::Doorbell.emit(), &[]), Ok(Sent::Gone) | Err(_))
        });
    }

    /// Each listener's verdicts, as [`Channel::poll_verdicts`]. Taps that are gone are seen here, every 5 ms of its clock, and in
    /// [`accept`](Self::accept) when somebody comes.
    pub fn poll_verdicts(&mut self, now: u64, mut f: impl FnMut(MemberId, Seq, Decision<'_>)) -> usize {
        let mut found = 0;
        for Member { id, channel, .. } in &mut self.members {
            found += channel.poll_verdicts(now, |seq, decision| f(*id, seq, decision));
        }
        self.reclaim();
        self.look_around(now);
        found
    }

    /// The listeners, for what concerns one of them: its messages, its counters, its end.
    pub fn members(&mut self) -> impl Iterator<Item = (MemberId, &mut Channel)> {
        self.members.iter_mut().map(|m| (m.id, &mut m.channel))
    }

    /// The taps: who they are.
    pub fn taps(&self) -> impl Iterator<Item = (Credentials, &str)> {
        self.taps.iter().map(|tap| (tap.peer, tap.name.as_str()))
    }

    /// Takes out the listeners that are gone; what they had is given to `f` and theirs no longer. Returns how many went.
    ///
    /// The frames of one that was detached while its process lives stay in use until that ends, because it may be reading
    /// them: they come off what its user's listeners may have. That it has ended is seen here, in [`accept`](Self::accept), and
    /// in [`poll_verdicts`](Self::poll_verdicts) every 5 ms of its clock.
    pub fn remove_dead(&mut self, mut f: impl FnMut(MemberId, Seq)) -> usize {
        // What it has given back is not kept.
        self.reclaim();
        let before = self.members.len();
        let dead = self.members.extract_if(.., |m| m.channel.is_dead());
        self.quarantine.extend(dead.map(|member| Quarantined::new(member, &mut f)));
        let gone = before - self.members.len();
        if gone > 0 {
            self.share_out();
        }
        self.look_at_quarantine();
        gone
    }

    /// What the group has done.
    #[must_use]
    pub fn stats(&self) -> GroupStats {
        let mut stats = self.stats;
        stats.listeners = self.members.len();
        stats.taps = self.taps.len();
        stats.quarantined = self.quarantine.iter().map(|q| q.channel.rings.rx.frames.freed()).sum();
        stats
    }

    /// Frees what the last listener has given back.
    fn reclaim(&mut self) {
        for Member { channel, .. } in &mut self.members {
            free(&mut self.frames, &mut self.refs, channel);
        }
    }

    /// Looks at the quarantine and the taps if that was not done for some milliseconds: it is system calls for each of them.
    pub(crate) fn look_around(&mut self, now: u64) {
        if self.quarantine.is_empty() && self.taps.is_empty() {
            return;
        }
        if self.looked == 0 || now >= self.looked.saturating_add(PEER_CHECK) {
            self.looked = now.max(1);
            self.look_at_quarantine();
            self.look_at_taps();
        }
    }

    /// Lets go of the taps that are gone. One that did not sleep is rung by nobody, so its doorbell does not tell.
    fn look_at_taps(&mut self) {
        self.taps.retain(|tap| !tap.is_gone());
    }

    /// Frees what those had who read their frames no more.
    fn look_at_quarantine(&mut self) {
        let Self { quarantine, frames, refs, .. } = self;
        let left = quarantine.extract_if(.., |q| q.channel.has_left());
        let count = left.map(|mut q| free(frames, refs, &mut q.channel)).count();
        if count > 0 {
            self.share_out();
        }
    }

    pub(crate) fn share_out(&mut self) {
        share_out(self.geometry.frame_nr, &mut self.members, &self.quarantine);
    }

    #[cfg(test)]
    pub(crate) fn quotas(&self) -> impl Iterator<Item = u32> {
        self.members.iter().map(|member| member.quota)
    }
}

/// Frees what `channel` has given back, where it was the last.
fn free(frames: &mut Frames, refs: &mut [u32], channel: &mut Channel) {
    for at in channel.take_freed() {
        refs[at as usize] -= 1;
        if refs[at as usize] == 0 {
            frames.release(at);
        }
    }
}

impl AsFd for Group {
    /// Readable when [`Group::accept`] has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.as_fd()
    }
}
