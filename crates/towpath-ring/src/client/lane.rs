//! One lane of a client: receives frames from an engine thread, and sends messages and verdicts to it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use super::rings::Rings;
use super::{ConsumerStats, Frame, FrameId};
use crate::client::recv_error::RecvError;
use crate::client::tx_ring;
use crate::handshake::attach::Attached;
use crate::handshake::messages::{NOTICE, Notice};
use crate::lane::consumer::Found;
use crate::lane::reserve_error::ReserveError;
use crate::lane::verdict::Decision;
use crate::shm::abi;
use crate::shm::header::{Kind, Meta};
use crate::shm::park::{Answered, Ringer};
use crate::shm::region::{Access, Payload, Words, in_huge_pages};
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;
use crate::shm::sys::{self, Received, Sent};

/// Messages read from the socket at a time.
const NOTICES: usize = 64;
/// Maximum number of one-shot messages that are read from the socket before their frames.
const ANNOUNCED: usize = 512;

#[derive(Debug)]
pub(crate) struct Lane {
    number: u32,
    pub(crate) socket: OwnedFd,
    pub(crate) rings: Rings,
    post: Post,
    ringer: Ringer,
    /// True if a write has not been followed by a doorbell check.
    unflushed: bool,
    /// There was no space for a message: the engine rings when there is.
    wants_room: bool,
    /// The engine has ended the channel.
    pub(crate) ended: bool,
    oneshot_max: u64,
    replacement_max: u32,
    /// The engine receives messages.
    pub(crate) messages: bool,
    /// Losses that [`overrun`](Self::overrun) has reported.
    told: u64,
    stats: ConsumerStats,
}

impl Lane {
    pub(crate) fn new(number: u32, attached: Attached) -> Self {
        let Attached { socket, oneshot_max, replacement_max, fences, messages, memory } = attached;
        let mut lane = Self {
            number,
            socket,
            rings: Rings::new(memory, Seq::begin(), Seq::begin()),
            post: Post::default(),
            ringer: Ringer::new(abi::ENGINE_NEED_WAKEUP, fences, Answered::default()),
            unflushed: false,
            wants_room: true,
            ended: false,
            oneshot_max,
            replacement_max,
            messages,
            told: 0,
            stats: ConsumerStats::default(),
        };
        lane.want_room(false);
        lane
    }

    /// Says whether this client waits for space. A sleep follows with its fence.
    fn want_room(&mut self, wanted: bool) {
        if self.wants_room != wanted {
            self.wants_room = wanted;
            // Relaxed: ordered by the fence of the sleep. A late 0 costs one doorbell.
            self.own_page().word(abi::CLIENT_NO_ROOM_WANTED).store(u64::from(!wanted), Ordering::Relaxed);
        }
    }

    // Passed to a closure from one place, and always inline: see `Consumer::next` in lane/consumer.rs.
    /// Passes the next frame to `give`, if it is published.
    #[inline(always)]
    pub(crate) fn take(&mut self, mut give: impl FnMut(Frame)) -> Result<bool, RecvError> {
        let Self { number, rings, post, socket, ended, stats, .. } = self;
        let lane = *number;
        rings.next(
            |seq, len| post.memory_of(socket, ended, seq, len),
            |Found { seq, at, header }| {
                stats.received += 1;
                stats.lost += u64::from(header.lost);
                give(Frame { id: FrameId { lane, seq }, at, header });
            },
        )
    }

    /// Returns true if a frame is published.
    pub(crate) fn is_ready(&self) -> bool {
        self.rings.rx.is_ready(&self.rings.memory.theirs)
    }

    #[inline]
    pub(crate) fn has(&self, frame: &Frame) -> bool {
        self.rings.has(frame.id.seq, frame.at)
    }

    /// Returns true if the engine has decided the frame by default, because it was overdue.
    #[inline]
    pub(crate) fn is_overdue(&self, seq: Seq) -> bool {
        // Relaxed: a hint that orders nothing. A wrong number affects only this client's frames.
        let word = self.rings.memory.theirs.word(abi::ENGINE_OVERDUE).load(Ordering::Relaxed);
        word >> 32 == 1 && seq.is_before(Seq(word as u32))
    }

    /// The payload of a frame that this client has.
    #[inline]
    pub(crate) fn payload(&self, frame: &Frame) -> Option<&[u8]> {
        self.rings.payload(frame.id.seq, frame.at)
    }

    #[inline]
    pub(crate) fn decide(&mut self, frame: &Frame, decision: Decision<'_>) {
        if self.has(frame) {
            self.rings.decide(frame.id.seq, frame.at, decision);
            self.unflushed = true;
        }
    }

    pub(crate) fn hold(&mut self, frame: &Frame) {
        if self.has(frame) {
            self.rings.hold(frame.id.seq, frame.at);
            self.unflushed = true;
        }
    }

    pub(crate) fn decide_upto(&mut self, upto: Seq, decision: Decision<'_>) {
        self.unflushed |= self.rings.decide_upto(upto, decision);
    }

    /// Decides every received frame.
    pub(crate) fn decide_all(&mut self, decision: Decision<'_>) {
        self.decide_upto(self.rings.rx.expected().back(1), decision);
    }

    /// Publishes a message for the engine; returns its first frame.
    pub(crate) fn send(&mut self, payload: &[u8], meta: &Meta) -> Result<u16, ReserveError> {
        let Self { rings, socket, oneshot_max, .. } = self;
        let way = tx_ring::Way {
            own: &rings.memory.own,
            theirs: &rings.memory.theirs,
            payload: &mut rings.memory.tx_payload,
            socket,
            oneshot_max: *oneshot_max,
        };
        let sent = rings.tx.send(way, payload, meta);
        self.want_room(matches!(sent, Err(ReserveError::RingFull | ReserveError::NoContiguousSpace)));
        self.unflushed |= sent.is_ok();
        sent
    }

    /// Publishes a replacement for `frame`'s payload and decides the frame.
    pub(crate) fn replace(
        &mut self,
        frame: &Frame,
        payload: &[u8],
        mark: (u32, u32),
    ) -> Result<(), ReserveError> {
        // The engine would count it as a violation.
        if payload.len() > self.replacement_max as usize {
            return Err(ReserveError::TooLarge);
        }
        let meta = Meta { kind: Kind::REPLACEMENT, port: frame.id.seq.0, ..Meta::default() };
        let at = self.send(payload, &meta)?;
        self.rings.replace(frame.id.seq, frame.at, at, mark);
        Ok(())
    }

    /// Returns true if the engine has released a TX frame that was not reclaimed yet.
    pub(crate) fn is_returned(&self) -> bool {
        self.rings.tx.is_returned(&self.rings.memory.theirs)
    }

    /// Returns true if there is space for a message of `len` bytes. Otherwise the engine rings when there is, if a fence follows: this
    /// function must be called again after the fence.
    pub(crate) fn has_room(&mut self, len: usize) -> bool {
        let room = self.rings.tx.has_room(&self.rings.memory.theirs, len);
        self.want_room(!room);
        room
    }

    /// Wakes the engine's thread if it waits for what was written.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if std::mem::take(&mut self.unflushed) && self.ringer.should_ring(&self.rings.memory.theirs) {
            self.ring();
        }
    }

    #[cold]
    fn ring(&mut self) {
        self.stats.wakeups += 1;
        // A full socket has unread doorbells. Receiving reports an error.
        let _: Result<Sent, _> = sys::send(&self.socket, &Notice::Doorbell.emit(), &[]);
    }

    /// Reports the read position.
    pub(crate) fn tell_position(&self) {
        // Relaxed: a statistic for the other side.
        self.rings
            .memory
            .own
            .word(abi::CLIENT_CONSUMED)
            .store(self.rings.rx.expected().0.into(), Ordering::Relaxed);
    }

    /// Losses since the last call.
    pub(crate) fn overrun(&mut self) -> u64 {
        // Relaxed: a number that orders nothing.
        let lost = self.rings.memory.theirs.word(abi::ENGINE_LOST).load(Ordering::Relaxed);
        lost.wrapping_sub(std::mem::replace(&mut self.told, lost))
    }

    /// Reads the engine's messages from the socket.
    pub(crate) fn listen(&mut self) -> Result<(), RecvError> {
        self.post.listen(&self.socket, &mut self.ended)?;
        // The unread messages precede the end of the stream, so it is polled for.
        if !self.ended && self.post.is_full() {
            self.ended = sys::hung_up(&self.socket, Duration::ZERO).unwrap_or(false);
        }
        Ok(())
    }

    /// Returns true if messages stay in the socket until frames are received.
    pub(crate) fn is_deaf(&self) -> bool {
        self.post.is_full()
    }

    /// Returns true if the engine asks for a hello.
    pub(crate) fn is_renewed(&self) -> bool {
        self.post.renewed
    }

    pub(crate) fn stats(&self) -> ConsumerStats {
        ConsumerStats { oneshots: self.stats.oneshots + self.rings.tx.oneshots, ..self.stats }
    }

    /// The memory with this client's need_wakeup word.
    pub(crate) fn own_page(&self) -> &Words {
        &self.rings.memory.own
    }
}

/// Messages from the engine's socket that are not used yet.
#[derive(Debug, Default)]
struct Post {
    /// One-shot messages whose frames are not received yet: sequence number, length, memfd. The memfd is missing if
    /// this process had no free descriptor.
    announced: VecDeque<(Seq, u64, Option<OwnedFd>)>,
    /// The engine asks for a hello: it will send new memory.
    renewed: bool,
}

impl Post {
    /// Reads pending messages until [`ANNOUNCED`] are kept, or until a descriptor was lost. The rest is read with the
    /// frames.
    fn listen(&mut self, socket: &OwnedFd, ended: &mut bool) -> Result<(), RecvError> {
        // Bounded: an engine that keeps ringing could otherwise keep the client here.
        for _ in 0..NOTICES {
            if self.renewed || self.is_full() || !self.hear(socket, ended)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns true if no message is read ahead.
    fn is_full(&self) -> bool {
        let lost = self.announced.back().is_some_and(|(.., memory)| memory.is_none());
        lost || self.announced.len() >= ANNOUNCED
    }

    /// Reads the next message; returns true if there was one.
    fn hear(&mut self, socket: &OwnedFd, ended: &mut bool) -> Result<bool, RecvError> {
        let mut message = [0; NOTICE];
        match sys::recv_with_fds(socket, &mut message)? {
            Received::Message(len, fds) => self.handle(&message[..len], fds)?,
            Received::Short(len, _) => self.handle_short(&message[..len])?,
            Received::Nothing => return Ok(false),
            Received::End => {
                *ended = true;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn handle(&mut self, message: &[u8], fds: Vec<OwnedFd>) -> Result<(), RecvError> {
        let meaningless = || RecvError::Damaged("an invalid message".into());
        match (Notice::parse(message), fds.into_iter().next()) {
            (Ok(Notice::Doorbell), _) => {}
            (Ok(Notice::Renew), None) => self.renewed = true,
            (Ok(Notice::OneShot { seq, len }), Some(fd)) => {
                self.announced.push_back((seq, len, Some(fd)));
            }
            _ => return Err(meaningless()),
        }
        Ok(())
    }

    /// Handles a message whose descriptor was lost because this process has too many open files.
    #[cold]
    fn handle_short(&mut self, message: &[u8]) -> Result<(), RecvError> {
        let Ok(Notice::OneShot { seq, len }) = Notice::parse(message) else {
            return Err(sys::no_descriptor().into());
        };
        // Reported when the frame is received.
        self.announced.push_back((seq, len, None));
        Ok(())
    }

    /// Returns the memory of message `which`, which was announced on the socket before its publication; `None`
    /// if its descriptor was lost because this process has too many open files.
    fn memory_of(
        &mut self,
        socket: &OwnedFd,
        ended: &mut bool,
        which: Seq,
        len: u32,
    ) -> Result<Option<Payload>, RecvError> {
        let damaged = |what: &str| RecvError::Damaged(format!("the memory of frame {which}: {what}"));
        let is_it = |(seq, ..): &(Seq, u64, _)| *seq == which;
        let mut index = self.announced.iter().position(is_it);
        // Earlier one-shot messages were taken with their frames, so this is the next one unless it was read
        // already; only doorbells come between. Bounded, as in `listen`.
        for _ in 0..ANNOUNCED {
            if index.is_some()
                || self.renewed
                || self.announced.len() >= ANNOUNCED
                || !self.hear(socket, ended)?
            {
                break;
            }
            index = self.announced.back().is_some_and(is_it).then(|| self.announced.len() - 1);
        }
        let index = index.ok_or_else(|| damaged("its descriptor did not arrive"))?;
        let (.., told, fd) = &self.announced[index];
        let Some(fd) = fd else {
            self.announced.remove(index);
            return Ok(None);
        };
        let (seals, size) = sys::sealed(fd.as_fd()).map_err(|_| damaged("not a memfd"))?;
        // Without the seals, the memory could shrink or change during a read.
        if !seals.contains(sys::FROZEN) || *told != u64::from(len) || size < *told || len == 0 {
            return Err(damaged("wrong seals or size"));
        }
        // As in `attach`: the mapping has the message's length.
        if in_huge_pages(fd.as_fd())? {
            return Err(damaged("it is in huge pages"));
        }
        let memory = Payload::map_once(fd.as_fd(), len as usize, Access::Lent)?;
        self.announced.remove(index);
        Ok(Some(memory))
    }
}
