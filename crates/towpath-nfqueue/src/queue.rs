//! A queue of the program: the packets that it has, by id, and their verdicts.
//!
//! What: the pump (`pump.rs`) receives frames of the engine's queue, numbers them as the kernel numbers packets, and sends each to the
//! program as a message. The program's threads give verdicts by id. The frame of an id is in `recent`, or in `old` if [`RECENT`] later
//! packets were received; a frame is held when it moves there, because the ring otherwise stops at a frame without a verdict.
//!
//! Invariant: `recent` and `old` have exactly the frames that the consumer has, so the ring bounds both.

use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use towpath_ring::{AttachError, Consumer, Decision, Frame, Kind, Options, ReserveError, Ticket, Verdict};

use crate::lock;
use crate::message::{Datagrams, Packet};

/// Packets of one turn of the pump.
const TURN: usize = 64;
/// Later packets after which a packet without a verdict is held.
const RECENT: usize = 256;
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

/// A packet that the program has.
#[derive(Clone, Copy, Debug)]
struct Slot {
    ticket: Ticket,
    /// Offset of the IP header.
    network: u16,
}

#[derive(Debug)]
pub(crate) struct Queue {
    /// The program's number.
    pub(crate) number: u16,
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` while the engine is gone.
    consumer: Option<Consumer>,
    mode: CopyMode,
    range: usize,
    flags: u32,
    maxlen: u32,
    /// The number of the next packet; its low 32 bits are the id.
    next: u64,
    /// The last packets; the last one has the number `next - 1`. `None` after the verdict.
    recent: VecDeque<Option<Slot>>,
    /// Earlier packets, by number.
    old: BTreeMap<u64, Slot>,
    /// Packets without a verdict.
    open: u32,
    /// The next attempt to attach, and the delay after it.
    retry: (Instant, Duration),
}

impl Queue {
    /// Attaches to the engine's queue at `path`.
    pub(crate) fn attach(number: u16, path: PathBuf) -> Result<Self, AttachError> {
        let consumer = attach(&path)?;
        let state = State {
            consumer: Some(consumer),
            mode: CopyMode::Unset,
            range: usize::from(u16::MAX),
            flags: 0,
            maxlen: MAXLEN,
            next: 1,
            recent: VecDeque::new(),
            old: BTreeMap::new(),
            open: 0,
            retry: (Instant::now(), DELAYS.0),
        };
        Ok(Self { number, path, state: Mutex::new(state) })
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

    /// Ends the queue; the pump detaches it.
    pub(crate) fn close(&self) {
        self.lock().mode = CopyMode::Closed;
    }

    /// Receives packets and appends their messages. Returns false if there is none now.
    pub(crate) fn receive(&self, into: &mut Datagrams) -> bool {
        let mut state = self.lock();
        let mut received = false;
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

    /// Announces a sleep. Returns the descriptor to wait for, or an error if there is something to do first.
    pub(crate) fn arm(&self) -> Result<Option<RawFd>, ()> {
        let mut state = self.lock();
        let takes = state.takes();
        match &mut state.consumer {
            Some(consumer) if takes => match consumer.arm() {
                true => Ok(Some(consumer.as_fd().as_raw_fd())),
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

    /// Attaches again if the engine is gone and the time has come. Returns the time of the next attempt.
    pub(crate) fn attach_again(&self) -> Option<Instant> {
        let (due, delay) = {
            let state = self.lock();
            if state.consumer.is_some() || state.mode == CopyMode::Closed {
                return None;
            }
            state.retry
        };
        if Instant::now() < due {
            return Some(due);
        }
        // Without the lock: an engine may take its time, and verdicts must not wait.
        let attached = attach(&self.path);
        let mut state = self.lock();
        match attached {
            Ok(consumer) => {
                state.consumer = Some(consumer);
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

fn attach(path: &std::path::Path) -> Result<Consumer, AttachError> {
    // Losses are the engine's counters; the kernel's messages do not report them.
    Consumer::attach_with(path, &Options { gaps: false, ..Options::default() })
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

    /// The number whose low bits are `id`, at most 2^31 before or after the next one.
    fn number_of(&self, id: u32) -> u64 {
        let behind = (self.next as u32).wrapping_sub(id) as i32;
        self.next.wrapping_sub(i64::from(behind) as u64)
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
        let header = *frame.header();
        let bytes = consumer.payload(&frame);
        let network = usize::from(header.layers.network).min(bytes.len());
        let (link, packet) = bytes.split_at(network);
        let interfaces = header.interfaces();
        let range = if self.mode == CopyMode::Packet { self.range } else { 0 };
        let (family, protocol) = match packet.first().map(|byte| byte >> 4) {
            Some(4) => (libc::AF_INET, 0x0800),
            Some(6) => (libc::AF_INET6, 0x86dd),
            _ => (libc::AF_UNSPEC, ethertype(link)),
        };
        let ports = if interfaces.bridged { [interfaces.ingress, interfaces.egress] } else { [0; 2] };
        into.push(&Packet {
            queue,
            id: self.next as u32,
            protocol,
            hook: interfaces.hook,
            family: family as u8,
            indev: interfaces.ingress,
            outdev: interfaces.egress,
            physindev: ports[0],
            physoutdev: ports[1],
            mark: header.mark,
            hardware: hardware(&header, link),
            time: header.time,
            payload: (self.mode == CopyMode::Packet).then(|| &packet[..packet.len().min(range)]),
            length: (header.wire_len as usize).saturating_sub(network).max(packet.len()),
        });
        let slot = Slot { ticket: frame.into_ticket(), network: network as u16 };
        self.next += 1;
        self.open += 1;
        self.recent.push_back(Some(slot));
        if self.recent.len() > RECENT {
            self.hold_oldest();
        }
    }

    /// Moves the oldest recent packet to the old ones.
    fn hold_oldest(&mut self) {
        let number = self.first_recent();
        if let Some(Some(slot)) = self.recent.pop_front()
            && let Some(consumer) = &mut self.consumer
            && let Some(frame) = consumer.recall(slot.ticket)
        {
            consumer.hold(&frame);
            self.old.insert(number, slot);
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
    fn take(&mut self, number: u64) -> Option<Slot> {
        let slot = match number.checked_sub(self.first_recent()) {
            Some(index) => self.recent.get_mut(usize::try_from(index).ok()?)?.take(),
            None => self.old.remove(&number),
        };
        self.skip_decided();
        self.open -= u32::from(slot.is_some());
        slot
    }

    /// Number of the oldest packet. `take` leaves a packet at the front of `recent`.
    fn oldest(&self) -> Option<u64> {
        let old = self.old.first_key_value().map(|(number, _)| *number);
        old.or_else(|| (!self.recent.is_empty()).then(|| self.first_recent()))
    }

    fn slot(&self, number: u64) -> Option<Slot> {
        match number.checked_sub(self.first_recent()) {
            Some(index) => *self.recent.get(usize::try_from(index).ok()?)?,
            None => self.old.get(&number).copied(),
        }
    }

    fn decide(&mut self, number: u64, decision: Decision<'static>) -> Result<(), Errno> {
        let slot = self.take(number).ok_or(Errno::NOENT)?;
        let consumer = self.consumer.as_mut().ok_or(Errno::NOENT)?;
        let frame = consumer.recall(slot.ticket).ok_or(Errno::NOENT)?;
        let overdue = consumer.is_overdue(&frame);
        consumer.verdict(frame, decision);
        if overdue { Err(Errno::NOENT) } else { Ok(()) }
    }

    /// Passes the packet with another content from its IP header on. EAGAIN if the ring has no space now.
    fn replace(&mut self, number: u64, payload: &[u8], decision: Decision<'static>) -> Result<(), Errno> {
        let slot = self.slot(number).ok_or(Errno::NOENT)?;
        let consumer = self.consumer.as_mut().ok_or(Errno::NOENT)?;
        let frame = consumer.recall(slot.ticket).ok_or(Errno::NOENT)?;
        if consumer.is_overdue(&frame) {
            return self.decide(number, decision);
        }
        let original = consumer.payload(&frame);
        let (link, packet) = original.split_at(usize::from(slot.network).min(original.len()));
        // Many programs return each packet's bytes.
        if packet == payload {
            return self.decide(number, decision);
        }
        let bytes = [link, payload].concat();
        match consumer.try_replace_marked(frame, &bytes, decision.mark, decision.mask) {
            Ok(()) => {
                self.take(number);
                Ok(())
            }
            Err(not) => Err(match not.why {
                ReserveError::RingFull | ReserveError::NoContiguousSpace => {
                    consumer.flush();
                    Errno::AGAIN
                }
                ReserveError::TooLarge => Errno::MSGSIZE,
                _ => Errno::NOENT,
            }),
        }
    }

    /// Returns the memory of the oldest packets that are overdue. Done with a verdict only: an engine sends no packets to a program that
    /// gives none.
    fn forget_overdue(&mut self) {
        while let Some(number) = self.oldest()
            && let Some(slot) = self.slot(number)
            && let Some(consumer) = &self.consumer
            && consumer.recall(slot.ticket).is_none_or(|frame| consumer.is_overdue(&frame))
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
        // Ends the channel even if a child process has copies of its sockets.
        if let Some(consumer) = self.consumer.take() {
            consumer.close();
        }
        self.recent.clear();
        self.old.clear();
        self.open = 0;
        self.retry = (Instant::now(), DELAYS.0);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.detach();
    }
}

/// The EtherType before the network header, 0 without one.
fn ethertype(link: &[u8]) -> u16 {
    link.last_chunk().map_or(0, |bytes| u16::from_be_bytes(*bytes))
}

/// The Ethernet source address (LINKTYPE_ETHERNET).
fn hardware(header: &towpath_ring::Header, link: &[u8]) -> Option<[u8; 6]> {
    (header.layers.link == 1).then(|| link.get(6..12)?.try_into().ok()).flatten()
}
