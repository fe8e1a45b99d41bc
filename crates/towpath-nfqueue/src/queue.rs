//! A queue of the program: the packets that it has, by id, and their verdicts.
//!
//! What: the pump (`pump.rs`) receives frames of the engine's queue, numbers them as the kernel numbers packets, and sends each to the
//! program as a message. The program's threads give verdicts by id. The frame of an id is in `recent`, or in `old` if [`RECENT`] later
//! packets were received; a frame is held when it moves there, because the ring otherwise stops at a frame without a verdict.
//!
//! Invariant: `recent` and `old` have exactly the frames that the consumer has, so the ring bounds both.

pub(crate) mod parked;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use towpath_ring::{AttachError, Consumer, Decision, Frame, Header, Kind, Options, ReserveError, Verdict};

use self::parked::Parked;
use crate::message::{Datagrams, Packet};
use crate::{fork, lock};

/// Packets of one turn of the pump.
const TURN: usize = 64;
/// Later packets after which a packet without a verdict is held.
const RECENT: usize = 256;
/// Datagrams of which the library knows the packets.
const SPANS: usize = 256;
/// Shortest payload that can stay in the ring: one that does not share a datagram.
const LARGE: usize = 3072;
/// Datagrams in a row that `nfq_handle_packet` handled: then the program leaves the messages to it.
const HANDLED: u32 = 16;
/// Packets without a verdict at which the kernel drops further ones (`NFQNL_QMAX_DEFAULT`).
const MAXLEN: u32 = 1024;
/// Delay between two attempts to attach again: first and longest.
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Time for which a replacement waits for space in the ring, and the interval of its attempts.
const SPACE: (u32, Duration) = (20_000, Duration::from_micros(50));

/// `NF_DROP` to `NF_STOP` (linux/netfilter.h).
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
const NF_QUEUE: u32 = 3;
const NF_REPEAT: u32 = 4;
const NF_STOP: u32 = 5;
/// `NFQA_CFG_F_`.
const FAIL_OPEN: u32 = 1;
const GSO: u32 = 4;
const UID_GID: u32 = 8;
const FLAGS: u32 = 1 << 5;

/// `enum nfqnl_config_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyMode {
    /// The program has not set the mode yet. Packets wait in the ring.
    Unset,
    /// The program has destroyed the queue.
    Closed,
    /// Packets are dropped, as by the kernel.
    None,
    Meta,
    Packet,
}

/// The packets of a datagram that the program has not handled, without gaps: the numbers of the first and of the last one.
type Span = (u64, u64);

#[derive(Debug)]
pub(crate) struct Queue {
    /// The program's number.
    pub(crate) number: u16,
    path: PathBuf,
    /// Identifies the program's socket.
    socket: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` while the engine is gone.
    consumer: Option<Consumer>,
    /// A duplicate of the consumer's descriptor, for a pump that sleeps.
    doorbell: Option<Arc<OwnedFd>>,
    mode: CopyMode,
    range: usize,
    flags: u32,
    maxlen: u32,
    /// The number of the next packet; its low 32 bits are the id.
    next: u64,
    /// The last packets; the last one has the number `next - 1`. `None` after the verdict.
    recent: VecDeque<Option<Frame>>,
    /// Earlier packets, by number.
    old: BTreeMap<u64, Frame>,
    /// The last [`SPANS`] datagrams.
    spans: VecDeque<Span>,
    /// Packets whose messages the program's buffer cut off; sent again.
    again: VecDeque<u64>,
    /// The last packet that the program has handled.
    handled: u64,
    /// Datagrams that `nfq_handle_packet` handled since one that it did not.
    handled_in_row: u32,
    /// Packets without a verdict.
    open: u32,
    /// The next attempt to attach, and the delay after it.
    retry: (Instant, Duration),
}

impl Queue {
    /// Attaches to the engine's queue at `path`, or takes over the queue that the program has just destroyed. `socket` identifies the
    /// program's socket.
    pub(crate) fn attach(number: u16, path: PathBuf, socket: usize) -> Result<Self, AttachError> {
        if let Some(Parked { state, socket: before, .. }) = parked::take(&path) {
            let mut state =
                State { mode: CopyMode::Unset, range: usize::MAX, flags: 0, maxlen: MAXLEN, ..state };
            // The messages of other packets are still in the socket.
            let forgotten = if before == socket { state.handled } else { state.next };
            // Those that a short buffer cut off are in no socket either.
            let cut = std::mem::take(&mut state.again);
            let again: BTreeSet<_> =
                state.numbers().filter(|number| *number <= forgotten).chain(cut).collect();
            state.again.extend(again);
            return Ok(Self { number, path, socket, state: Mutex::new(state) });
        }
        let (consumer, doorbell) = attach(&path)?;
        let state = State { consumer: Some(consumer), doorbell: Some(doorbell), ..State::detached() };
        Ok(Self { number, path, socket, state: Mutex::new(state) })
    }

    /// `nfq_set_mode`.
    pub(crate) fn set_mode(&self, mode: u8, range: u32) -> Result<(), Errno> {
        let mode = match mode {
            0 => CopyMode::None,
            1 => CopyMode::Meta,
            2 => CopyMode::Packet,
            _ => return Err(Errno::INVAL),
        };
        let mut state = self.lock();
        state.mode = mode;
        // 0 is the whole packet, as in the kernel.
        state.range = if range == 0 { usize::MAX } else { range as usize };
        Ok(())
    }

    /// `nfq_set_queue_flags`.
    pub(crate) fn set_flags(&self, mask: u32, flags: u32) -> Result<(), Errno> {
        if flags >= FLAGS {
            return Err(Errno::INVAL);
        }
        // Connection tracking entries and security contexts are the kernel's, which refuses what it was not built with.
        if flags & mask & !(FAIL_OPEN | GSO | UID_GID) != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let mut state = self.lock();
        state.flags = state.flags & !mask | flags & mask;
        Ok(())
    }

    /// `nfq_set_queue_maxlen`.
    pub(crate) fn set_maxlen(&self, maxlen: u32) {
        self.lock().maxlen = maxlen;
    }

    /// Ends the queue. It stays attached for a moment, so that a program that creates it again loses no packet.
    pub(crate) fn close(&self) {
        let closed = State { mode: CopyMode::Closed, ..State::detached() };
        let state = std::mem::replace(&mut *self.lock(), closed);
        if state.consumer.is_some() {
            parked::put(Parked {
                number: self.number,
                path: self.path.clone(),
                socket: self.socket,
                since: Instant::now(),
                state,
            });
        }
    }

    /// Receives packets and appends their messages. Returns false if there is none now.
    pub(crate) fn receive(&self, into: &mut Datagrams) -> bool {
        let mut state = self.lock();
        let mut received = false;
        if state.mode == CopyMode::Unset {
            return false;
        }
        while let Some(number) = state.again.pop_front() {
            received |= state.write(self.number, number, into);
        }
        for _ in 0..TURN {
            if !state.takes() {
                break;
            }
            let Some(consumer) = &mut state.consumer else { break };
            let frame = match consumer.try_recv() {
                Ok(Some(frame)) => frame,
                Ok(None) if !consumer.is_ended() => break,
                // The engine has ended, or it wrote invalid data.
                Ok(None) | Err(_) => {
                    state.detach();
                    break;
                }
            };
            received = true;
            state.handle(self.number, frame, into);
        }
        received
    }

    /// The callback of the packet `id` runs.
    pub(crate) fn handles(&self, id: u32) {
        self.lock().handles(id);
    }

    /// The program handled a datagram whose last message is that of the packet `id`. Returns true if its buffer cut off further messages,
    /// which are then sent again.
    pub(crate) fn handled(&self, id: u32) -> bool {
        let mut state = self.lock();
        let number = state.number_of(id);
        // Messages that were sent again have lower numbers.
        state.handled = state.handled.max(number);
        // Most datagrams are handled in order. A message that was sent again is in a later datagram, too: one that ends with it counts first.
        let whole = state.spans.iter().position(|(_, last)| *last == number);
        let part = || state.spans.iter().position(|(first, last)| (*first..*last).contains(&number));
        let Some((_, last)) = whole.or_else(part).and_then(|at| state.spans.remove(at)) else { return false };
        state.handled_in_row = state.handled_in_row.saturating_add(1);
        state.again.extend(number + 1..=last);
        last > number
    }

    /// Copies the payload of the packet `id`. Returns false if the program does not have the packet any more.
    pub(crate) fn copy_payload(&self, id: u32, into: &mut Vec<u8>) -> bool {
        let state = self.lock();
        let number = state.number_of(id);
        let (Some(consumer), Some(frame)) = (&state.consumer, state.frame(number)) else { return false };
        let (_, packet) = split(frame.header(), consumer.payload(frame));
        into.clear();
        into.extend_from_slice(&packet[..packet.len().min(state.range)]);
        true
    }

    /// Announces a sleep. Returns the descriptor to wait for, or an error if there is something to do first.
    pub(crate) fn arm(&self) -> Result<Option<Arc<OwnedFd>>, ()> {
        let mut state = self.lock();
        let takes = state.takes();
        if !state.again.is_empty() && state.mode != CopyMode::Unset {
            return Err(());
        }
        match &mut state.consumer {
            Some(consumer) if takes => match consumer.arm() {
                true => Ok(state.doorbell.clone()),
                false => Err(()),
            },
            Some(consumer) => {
                consumer.flush();
                Ok(None)
            }
            None => Ok(None),
        }
    }

    /// Ends the sleep.
    pub(crate) fn disarm(&self) {
        let mut state = self.lock();
        if let Some(Err(_)) = state.consumer.as_mut().map(Consumer::disarm) {
            state.detach();
        }
    }

    /// In a child whose parent had attached the queue, and has ended: attaches again. A thread of the parent may have held the lock; the
    /// child then has no packets of the queue.
    pub(crate) fn forget_engine(&self) {
        if let Ok(mut state) = self.state.try_lock() {
            state.detach();
        }
    }

    /// Attaches again if the engine is gone and the time has come. Returns the time of the next attempt.
    pub(crate) fn attach_again(&self) -> Option<Instant> {
        let (due, delay) = {
            let _working = fork::working();
            let state = self.lock();
            if state.consumer.is_some() || state.mode == CopyMode::Closed {
                return None;
            }
            state.retry
        };
        if Instant::now() < due {
            return Some(due);
        }
        // Without locks: an engine may take its time, and neither verdicts nor a fork must wait.
        let attached = attach(&self.path);
        let _working = fork::working();
        let mut state = self.lock();
        match attached {
            // The queue was destroyed meanwhile.
            Ok(_) if state.mode == CopyMode::Closed => None,
            Ok((consumer, doorbell)) => {
                (state.consumer, state.doorbell) = (Some(consumer), Some(doorbell));
                state.retry.1 = DELAYS.0;
                None
            }
            Err(_) => {
                state.retry = (Instant::now() + delay, (2 * delay).min(DELAYS.1));
                Some(state.retry.0)
            }
        }
    }

    /// The verdict for one packet. `mark` is the whole mark, in host byte order.
    pub(crate) fn verdict(
        &self,
        id: u32,
        verdict: u32,
        mark: Option<u32>,
        payload: Option<&[u8]>,
    ) -> Result<Woken, Errno> {
        let decision = decision(verdict, mark)?;
        let mut state = self.lock();
        state.forget_overdue();
        let payload = payload.filter(|_| decision.verdict != Verdict::Drop);
        if payload.is_some() && decision.verdict != Verdict::Pass {
            // The ring's verdict is either a replacement or another queue.
            return Err(Errno::OPNOTSUPP);
        }
        let number = state.number_of(id);
        let woken = state.is_full();
        match payload {
            None => state.decide(number, decision)?,
            Some(payload) => {
                let mut attempts = 0..SPACE.0;
                while let Err(error) = state.replace(number, payload, decision) {
                    if error != Errno::AGAIN || attempts.next().is_none() {
                        return Err(error);
                    }
                    // The engine releases space when it has read earlier replacements.
                    drop(state);
                    std::thread::sleep(SPACE.1);
                    state = self.lock();
                }
            }
        }
        state.flush();
        Ok(Woken(woken && !state.is_full()))
    }

    /// The verdict for all packets up to one.
    pub(crate) fn verdict_upto(&self, id: u32, verdict: u32, mark: Option<u32>) -> Result<Woken, Errno> {
        let decision = decision(verdict, mark)?;
        let mut state = self.lock();
        state.forget_overdue();
        let upto = state.number_of(id);
        let woken = state.is_full();
        let mut decided = 0;
        while let Some(number) = state.oldest().filter(|number| *number <= upto) {
            decided += u32::from(state.decide(number, decision).is_ok());
        }
        if decided == 0 {
            return Err(Errno::NOENT);
        }
        state.flush();
        Ok(Woken(woken && !state.is_full()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Whether the queue receives packets again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Woken(pub(crate) bool);

/// Attaches, and duplicates the descriptor of the doorbell.
fn attach(path: &Path) -> Result<(Consumer, Arc<OwnedFd>), AttachError> {
    // Losses are the engine's counters; the kernel's messages do not report them.
    let consumer = Consumer::attach_with(path, &Options { gaps: false, ..Options::default() })?;
    let doorbell = consumer.as_fd().try_clone_to_owned();
    let doorbell =
        doorbell.map_err(|source| AttachError::System { doing: "duplicating the doorbell", source })?;
    Ok((consumer, Arc::new(doorbell)))
}

/// The errno of a failed attachment as the kernel's queues report it.
pub(crate) fn errno(error: &AttachError) -> Errno {
    match error {
        AttachError::Connect { source, .. } if source.kind() == ErrorKind::ConnectionRefused => Errno::NOENT,
        AttachError::Connect { source, .. } if source.kind() == ErrorKind::PermissionDenied => Errno::PERM,
        error => Errno::from_raw_os_error(error.errno()),
    }
}

/// Decodes a verdict as the kernel does.
fn decision(verdict: u32, mark: Option<u32>) -> Result<Decision<'static>, Errno> {
    let named = match verdict & 0xff {
        NF_DROP => Verdict::Drop,
        // NF_STOP is NF_ACCEPT without further rules; a Towpath rule states what follows a verdict.
        NF_ACCEPT | NF_STOP => Verdict::Pass,
        NF_QUEUE => Verdict::Queue((verdict >> 16) as u16),
        NF_REPEAT => Verdict::Repeat,
        // NF_STOLEN, and numbers without a meaning.
        _ => return Err(Errno::INVAL),
    };
    let decision = Decision::from(named);
    Ok(mark.map_or(decision, |mark| decision.with_mark(mark, u32::MAX)))
}

impl State {
    /// Without an engine and packets.
    fn detached() -> Self {
        Self {
            consumer: None,
            doorbell: None,
            mode: CopyMode::Unset,
            range: usize::MAX,
            flags: 0,
            maxlen: MAXLEN,
            next: 1,
            recent: VecDeque::new(),
            old: BTreeMap::new(),
            spans: VecDeque::new(),
            again: VecDeque::new(),
            handled: 0,
            handled_in_row: 0,
            open: 0,
            retry: (Instant::now(), DELAYS.0),
        }
    }

    /// The numbers of the packets that the program has, oldest first.
    fn numbers(&self) -> impl Iterator<Item = u64> {
        let recent = (self.first_recent()..).zip(&self.recent).filter(|(_, frame)| frame.is_some());
        self.old.keys().copied().chain(recent.map(|(number, _)| number))
    }

    /// Returns true if packets are received.
    fn takes(&self) -> bool {
        !matches!(self.mode, CopyMode::Unset | CopyMode::Closed)
            && (!self.is_full() || self.flags & FAIL_OPEN != 0)
    }

    /// Returns true if the program has as many packets as it wants.
    fn is_full(&self) -> bool {
        self.open >= self.maxlen
    }

    /// Number of the first packet in `recent`.
    fn first_recent(&self) -> u64 {
        self.next - self.recent.len() as u64
    }

    /// The number whose low bits are `id`, at most 2^31 before or after the next one. 0, which no packet has, for an id before the first one.
    fn number_of(&self, id: u32) -> u64 {
        let behind = (self.next as u32).wrapping_sub(id) as i32;
        self.next.checked_sub_signed(behind.into()).unwrap_or(0)
    }

    /// The program has read the message of the packet `id`.
    fn handles(&mut self, id: u32) {
        self.handled = self.handled.max(self.number_of(id));
    }

    fn handle(&mut self, queue: u16, frame: Frame, into: &mut Datagrams) {
        let Some(consumer) = &mut self.consumer else { return };
        let by_default = match self.mode {
            _ if frame.header().kind != Kind::PACKET => Some(Verdict::Pass),
            CopyMode::None => Some(Verdict::Drop),
            _ if self.open >= self.maxlen => Some(Verdict::Pass),
            _ => None,
        };
        if let Some(verdict) = by_default {
            consumer.verdict(frame, verdict);
            return;
        }
        let number = self.next;
        self.next += 1;
        self.open += 1;
        self.recent.push_back(Some(frame));
        self.write(queue, number, into);
        if self.recent.len() > RECENT {
            self.hold_oldest();
        }
    }

    /// The frame of a packet that the program has.
    fn frame(&self, number: u64) -> Option<&Frame> {
        match number.checked_sub(self.first_recent()) {
            Some(index) => self.recent.get(usize::try_from(index).ok()?)?.as_ref(),
            None => self.old.get(&number),
        }
    }

    /// Writes the message of a packet that the program has. Returns false if it has a verdict.
    fn write(&mut self, queue: u16, number: u64, into: &mut Datagrams) -> bool {
        let (Some(consumer), Some(frame)) = (&self.consumer, self.frame(number)) else { return false };
        let header = frame.header();
        let (link, packet) = split(header, consumer.payload(frame));
        let interfaces = header.interfaces();
        let (family, protocol) = match packet.first().map(|byte| byte >> 4) {
            Some(4) => (libc::AF_INET, 0x0800),
            Some(6) => (libc::AF_INET6, 0x86dd),
            _ => (libc::AF_UNSPEC, ethertype(link)),
        };
        let ports = if interfaces.bridged { [interfaces.ingress, interfaces.egress] } else { [0; 2] };
        // The packets of a datagram have no gaps: `handled` knows them by their numbers.
        if self.spans.back().is_none_or(|(_, last)| last + 1 != number) {
            into.end_datagram();
        }
        let payload = (self.mode == CopyMode::Packet).then(|| &packet[..packet.len().min(self.range)]);
        let begins = into.push(&Packet {
            queue,
            id: number as u32,
            protocol,
            hook: interfaces.hook,
            family: family as u8,
            indev: interfaces.ingress,
            outdev: interfaces.egress,
            physindev: ports[0],
            physoutdev: ports[1],
            mark: header.mark,
            hardware: hardware(header, link),
            time: header.time,
            payload,
            in_ring: self.handled_in_row >= HANDLED && payload.is_some_and(|payload| payload.len() >= LARGE),
            length: (header.wire_len as usize).saturating_sub(link.len()).max(packet.len()),
        });
        match self.spans.back_mut().filter(|_| !begins) {
            Some((_, last)) => *last = number,
            None => {
                if self.spans.len() == SPANS {
                    // The program parses messages itself.
                    self.spans.pop_front();
                    self.handled_in_row = 0;
                }
                self.spans.push_back((number, number));
            }
        }
        true
    }

    /// Moves the oldest recent packet to the old ones.
    fn hold_oldest(&mut self) {
        let number = self.first_recent();
        if let Some(Some(frame)) = self.recent.pop_front()
            && let Some(consumer) = &mut self.consumer
        {
            consumer.hold(&frame);
            self.old.insert(number, frame);
        }
        self.skip_decided();
    }

    /// Removes decided packets from the front of `recent`.
    fn skip_decided(&mut self) {
        while let Some(None) = self.recent.front() {
            self.recent.pop_front();
        }
    }

    /// Removes the packet `number`.
    fn take(&mut self, number: u64) -> Option<Frame> {
        let frame = match number.checked_sub(self.first_recent()) {
            Some(index) => self.recent.get_mut(usize::try_from(index).ok()?)?.take(),
            None => self.old.remove(&number),
        };
        self.skip_decided();
        self.open -= u32::from(frame.is_some());
        frame
    }

    /// Puts a packet back that `take` returned.
    fn put_back(&mut self, number: u64, frame: Frame) {
        self.open += 1;
        // An old packet may have any number; it has to be held there.
        if let Some(consumer) = &mut self.consumer {
            consumer.hold(&frame);
        }
        self.old.insert(number, frame);
    }

    /// Number of the oldest packet. `take` leaves a packet at the front of `recent`.
    fn oldest(&self) -> Option<u64> {
        let old = self.old.first_key_value().map(|(number, _)| *number);
        old.or_else(|| (!self.recent.is_empty()).then(|| self.first_recent()))
    }

    fn decide(&mut self, number: u64, decision: Decision<'static>) -> Result<(), Errno> {
        let frame = self.take(number).ok_or(Errno::NOENT)?;
        let consumer = self.consumer.as_mut().ok_or(Errno::NOENT)?;
        let overdue = consumer.is_overdue(&frame);
        consumer.verdict(frame, decision);
        if overdue { Err(Errno::NOENT) } else { Ok(()) }
    }

    /// Passes the packet with another content from its IP header on. EAGAIN if the ring has no space now.
    fn replace(&mut self, number: u64, payload: &[u8], decision: Decision<'static>) -> Result<(), Errno> {
        let frame = self.take(number).ok_or(Errno::NOENT)?;
        let consumer = self.consumer.as_mut().ok_or(Errno::NOENT)?;
        let overdue = consumer.is_overdue(&frame);
        let (link, packet) = split(frame.header(), consumer.payload(&frame));
        // Many programs return each packet's bytes.
        if overdue || packet == payload {
            consumer.verdict(frame, decision);
            return if overdue { Err(Errno::NOENT) } else { Ok(()) };
        }
        let bytes = [link, payload].concat();
        let Err(not) = consumer.try_replace_marked(frame, &bytes, decision.mark, decision.mask) else {
            return Ok(());
        };
        consumer.flush();
        self.put_back(number, not.frame);
        Err(match not.why {
            ReserveError::RingFull | ReserveError::NoContiguousSpace => Errno::AGAIN,
            ReserveError::TooLarge => Errno::MSGSIZE,
            _ => Errno::NOENT,
        })
    }

    /// Returns the memory of the oldest packets that are overdue. Done with a verdict only: an engine sends no packets to a program that
    /// gives none.
    fn forget_overdue(&mut self) {
        while let Some(number) = self.oldest()
            && let Some(frame) = self.old.get(&number).or_else(|| self.recent.front()?.as_ref())
            && self.consumer.as_ref().is_some_and(|consumer| consumer.is_overdue(frame))
        {
            // The result is known: the packet is overdue.
            let _ = self.decide(number, Verdict::Drop.into());
        }
    }

    fn flush(&mut self) {
        if let Some(consumer) = &mut self.consumer {
            consumer.flush();
        }
    }

    /// Forgets the engine and its packets.
    fn detach(&mut self) {
        self.doorbell = None;
        // Ends the channel even if a child process has copies of its sockets.
        if let Some(consumer) = self.consumer.take() {
            consumer.close();
        }
        self.recent.clear();
        self.old.clear();
        self.spans.clear();
        self.again.clear();
        self.open = 0;
        self.retry = (Instant::now(), DELAYS.0);
    }
}

/// The link header of a packet, and the rest.
fn split<'a>(header: &Header, bytes: &'a [u8]) -> (&'a [u8], &'a [u8]) {
    bytes.split_at(usize::from(header.layers.network).min(bytes.len()))
}

/// The EtherType before the network header, 0 without one.
fn ethertype(link: &[u8]) -> u16 {
    link.last_chunk().map_or(0, |bytes| u16::from_be_bytes(*bytes))
}

/// The Ethernet source address (LINKTYPE_ETHERNET).
fn hardware(header: &Header, link: &[u8]) -> Option<[u8; 6]> {
    (header.layers.link == 1).then(|| link.get(6..12)?.try_into().ok()).flatten()
}
