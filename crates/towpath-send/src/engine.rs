//! The completion engine: what to hand to the kernel next, how, and which frames it is done with.
//!
//! No IO: whoever has the socket asks [`poll_transmit`](Engine::poll_transmit), makes the call, and tells the outcome
//! ([`handle_sent`](Engine::handle_sent), [`handle_no_buffers`](Engine::handle_no_buffers),
//! [`handle_too_long`](Engine::handle_too_long)); reads the error queue when
//! [`wants_notifications`](Engine::wants_notifications) says so and hands over what it finds
//! ([`handle_notification`](Engine::handle_notification)); and takes back frames ([`poll_done`](Engine::poll_done)).
//!
//! What always holds: a frame comes back once, after all its bytes were handed over and all numbers that touched it were
//! completed. Nothing ever waits for a completion to make progress: where zero copy cannot go on, a plain send can.

use std::ops::Range as Span;
use std::sync::Arc;
use std::time::Duration;

use crate::budget::{Budget, Freed};
use crate::counters::{Counters, PlainCause};
use crate::flight::{Abandoned, Flight};
use crate::locked::LockedMemory;
use crate::notification::Range;
use crate::policy::{Decision, Mode, Policy};
use towpath_wire::Time;

/// Most frames of the calls that are asked for at once (UIO_MAXIOV is 1024; beyond some tens nothing is gained).
pub const MAX_PARTS: usize = 64;
/// Most calls that are asked for at once.
pub const MAX_CALLS: usize = 16;
/// Messages below this are copied for a peer that is stuck.
const STUCK_SMALL: u64 = 64 << 10;
/// A peer is stuck when a frame is pinned for longer than this, and than eight round trips.
const STUCK_AFTER: Duration = Duration::from_secs(1);
const STUCK_RTTS: u32 = 8;
/// The error queue is read after so long, however few calls were made: who sends now and then has his frames back, and learns what a probe
/// showed, with his next message.
const READ_AFTER_NANOS: u64 = 1_000_000;
/// After ENOBUFS a second time and more, nothing is tried with the flag for so long, doubling to the longest: another process of the user
/// may hold what is missing for ever.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// What kind of socket it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes in order: TCP. Frames are gathered, and a call may take a part.
    Stream,
    /// Each frame is one call: UDP. `segmented`: UDP_SEGMENT is set, without which the kernel copies.
    Datagram {
        /// UDP generic segmentation offload is on.
        segmented: bool,
    },
}

/// Which way to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Choice {
    /// Zero copy where probes show that it works, plain elsewhere.
    #[default]
    Adaptive,
    /// Zero copy for all that is long enough.
    Zerocopy,
    /// Plain sends.
    Plain,
}

/// What an engine is told about its connection.
#[derive(Clone, Debug)]
pub struct Config {
    /// The socket's kind.
    pub kind: Kind,
    /// SO_ZEROCOPY was set and read back, and the socket is no MPTCP or kTLS one.
    pub armed: bool,
    /// Which way to send.
    pub choice: Choice,
    /// The destination is this machine.
    pub local: bool,
    /// Shorter calls are sent plain, bytes.
    pub min_zerocopy: usize,
    /// Adjacent frames of a stream are put into one call until it has this many bytes; 0 does not gather.
    pub gather: usize,
    /// The error queue is read when so many calls were made since it was read last (or a millisecond has passed).
    pub read_every: usize,
    /// Most frames that the connection holds: queued, and pinned. At least 1.
    pub max_frames: usize,
    /// Most bytes that it pins.
    pub max_pinned: u64,
    /// Most numbers outstanding at once.
    pub max_numbers: usize,
    /// Locked memory, shared with other connections.
    pub locked: Arc<LockedMemory>,
    /// net.core.optmem_max, bytes.
    pub optmem: u64,
    /// The socket's first number: 0 for a fresh socket; tests begin near 2^32.
    pub first_number: u64,
}

impl Default for Config {
    /// A stream that is armed and adaptive, without a limit of locked memory.
    fn default() -> Self {
        Self {
            kind: Kind::Stream,
            armed: true,
            choice: Choice::Adaptive,
            local: false,
            min_zerocopy: 16 << 10,
            gather: 64 << 10,
            read_every: 32,
            max_frames: 1024,
            max_pinned: 64 << 20,
            max_numbers: 4096,
            locked: Arc::new(LockedMemory::of_rlimit(None)),
            optmem: 128 << 10,
            first_number: 0,
        }
    }
}

/// How to make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// With MSG_ZEROCOPY.
    Zerocopy,
    /// Without.
    Plain(PlainCause),
}

/// One call to make, as send(2) is one and each message of sendmmsg(2): the bytes are those of [`Engine::parts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes of the call; zero only for an empty datagram.
    pub bytes: usize,
    /// Frames that they lie in.
    pub parts: usize,
    /// With the flag or without.
    pub how: How,
    probe: bool,
}

impl Transmit {
    const NONE: Self = Self { bytes: 0, parts: 0, how: How::Zerocopy, probe: false };
}

/// The calls that were asked for and not answered yet.
#[derive(Debug)]
struct Asked {
    calls: [Transmit; MAX_CALLS],
    /// Those from `answered` on, before `count`.
    answered: usize,
    count: usize,
}

impl Asked {
    const NONE: Self = Self { calls: [Transmit::NONE; MAX_CALLS], answered: 0, count: 0 };

    fn open(&self) -> &[Transmit] {
        &self.calls[self.answered..self.count]
    }
}

/// What calls that were asked for, and not made yet, will have taken.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ahead {
    pub(crate) calls: usize,
    pub(crate) frames: usize,
    pub(crate) bytes: u64,
}

/// A frame that there is no room for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

/// After an ENOBUFS: what to try next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    No,
    /// Once more with the flag: the queue has been read since.
    Once,
    /// Plain, until a call succeeds.
    Twice,
    /// The flag was refused for a datagram: plain once, which tells whether it was the flag or the datagram.
    Flag,
}

/// The engine of one connection. `T` is what the caller knows a frame by; it comes back when the frame is done.
#[derive(Debug)]
pub struct Engine<T> {
    config: Config,
    flight: Flight<T>,
    policy: Policy,
    budget: Budget,
    counters: Counters,
    /// Calls of either kind while numbers were outstanding, and the time of the last reading.
    calls_since_read: usize,
    read_at: Time,
    refused: Refused,
    /// ENOBUFS in vain, in a row; and until when the flag is not tried again for it.
    refusals: u32,
    paused_until: Time,
    asked: Asked,
    rtt: Duration,
}

impl<T> Engine<T> {
    /// An engine for a connection on which nothing has been sent with the flag.
    pub fn new(mut config: Config, now: Time) -> Self {
        config.max_frames = config.max_frames.max(1);
        let mut counters = Counters::default();
        let policy = policy(&config, &mut counters, now);
        let stream = config.kind == Kind::Stream;
        let budget = Budget::new(config.locked.clone(), config.max_pinned, config.optmem, stream);
        Self {
            flight: Flight::new(config.first_number),
            policy,
            budget,
            counters,
            calls_since_read: 0,
            read_at: now,
            refused: Refused::No,
            refusals: 0,
            paused_until: now,
            asked: Asked::NONE,
            rtt: Duration::ZERO,
            config,
        }
    }

    /// Another way to send, from the next call on.
    pub fn set_choice(&mut self, choice: Choice, now: Time) {
        self.config.choice = choice;
        self.policy = policy(&self.config, &mut self.counters, now);
    }

    /// Takes a frame of `len` bytes, to be sent after those taken before.
    ///
    /// # Errors
    /// The quota of frames is used up: the frame comes back.
    pub fn push(&mut self, token: T, len: usize) -> Result<(), Full<T>> {
        if !self.has_room() {
            return Err(Full(token));
        }
        self.flight.push(token, len);
        Ok(())
    }

    /// From now on what is done is dropped, and not kept for [`poll_done`](Self::poll_done).
    pub(crate) fn drop_done(&mut self) {
        self.flight.drop_done();
    }

    /// The frame that was pushed last.
    pub(crate) fn last_pushed(&mut self) -> Option<&mut T> {
        self.flight.last_pushed()
    }

    /// As [`push`](Self::push), by a caller who knows that there is room: what cannot come back is not moved about.
    #[inline]
    pub(crate) fn push_in_room(&mut self, token: T, len: usize) {
        debug_assert!(self.has_room());
        self.flight.push(token, len);
    }

    /// The call to make next; none when everything is handed over.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        self.poll_transmits(1, now).first().copied()
    }

    /// The calls to make next, at most `most` and [`MAX_CALLS`], all in the same way: sendmmsg(2) makes them at once. None when
    /// everything is handed over. Each is answered with [`handle_sent`](Self::handle_sent); those that were not made, because
    /// one before them took a part only, are asked for again.
    pub fn poll_transmits(&mut self, most: usize, now: Time) -> &[Transmit] {
        (self.asked.answered, self.asked.count) = (0, 0);
        let stream = self.config.kind == Kind::Stream;
        let mut ahead = Ahead::default();
        while ahead.calls < most.clamp(1, MAX_CALLS) {
            let (bytes, parts) = self.next_call(ahead.frames);
            if parts == 0 || ahead.frames + parts > MAX_PARTS {
                break;
            }
            if stream && bytes == 0 {
                if ahead.calls > 0 {
                    break;
                }
                // Messages without bytes are sent by not sending them.
                self.flight.advance(0, false, now);
                continue;
            }
            let (how, most, probe) = self.choose(bytes as u64, ahead, now);
            if ahead.calls > 0 && (probe || how != self.asked.calls[0].how) {
                break;
            }
            let taken = bytes.min(usize::try_from(most).unwrap_or(usize::MAX));
            self.asked.calls[ahead.calls] = Transmit { bytes: taken, parts, how, probe };
            self.asked.count += 1;
            if probe || taken < bytes {
                break;
            }
            ahead.calls += 1;
            ahead.frames += parts;
            ahead.bytes += bytes as u64;
        }
        self.asked.open()
    }

    /// Bytes and frames of the call behind the first `skip` frames that wait.
    fn next_call(&self, skip: usize) -> (usize, usize) {
        let most = if self.config.kind == Kind::Stream { MAX_PARTS } else { 1 };
        let (mut bytes, mut parts) = (0, 0);
        while parts < most
            && let Some((_, left)) = self.flight.waiting(skip + parts)
        {
            bytes += left.len();
            parts += 1;
            if bytes > 0 && bytes >= self.config.gather {
                break;
            }
        }
        (bytes, parts)
    }

    /// The frames and bytes of the calls that were asked for last and are not answered: those of the first, which has as many
    /// as [`Transmit::parts`] says, then those of the second.
    pub fn parts(&self) -> impl Iterator<Item = (&T, Span<usize>)> {
        let mut at = 0;
        self.asked.open().iter().flat_map(move |transmit| {
            let (from, mut left) = (at, transmit.bytes);
            at += transmit.parts;
            (from..at).filter_map(move |at| {
                let (token, span) = self.flight.waiting(at)?;
                let part = span.len().min(left);
                left -= part;
                Some((token, span.start..span.start + part))
            })
        })
    }

    /// The first of them.
    #[inline]
    pub(crate) fn first_part(&self) -> Option<(&T, Span<usize>)> {
        let transmit = self.asked.open().first()?;
        let (token, span) = self.flight.waiting(0)?;
        Some((token, span.start..span.end.min(span.start + transmit.bytes)))
    }

    pub(crate) fn asked(&self) -> &[Transmit] {
        self.asked.open()
    }

    /// The kernel took `bytes` of the next call that was asked for.
    pub fn handle_sent(&mut self, bytes: usize, now: Time) {
        let Some(&transmit) = self.asked.open().first() else { return };
        self.asked.answered += 1;
        if bytes < transmit.bytes {
            self.asked.answered = self.asked.count;
        }
        let bytes = bytes.min(transmit.bytes) as u64;
        if self.refused == Refused::Flag && transmit.how != How::Zerocopy {
            // The same datagram goes without the flag: that was it.
            self.disarm();
        }
        self.refused = Refused::No;
        // A call of no bytes has no number.
        let with_number = transmit.how == How::Zerocopy && bytes > 0;
        if transmit.probe && with_number {
            self.policy.handle_probe(self.flight.next_number());
        }
        self.flight.advance(bytes, with_number, now);
        self.calls_since_read += usize::from(self.flight.outstanding() > 0);
        match transmit.how {
            How::Zerocopy if with_number => {
                self.refusals = 0;
                self.budget.take(bytes);
                self.counters.numbers += 1;
                self.counters.zerocopy_bytes += bytes;
            }
            How::Zerocopy => {}
            How::Plain(cause) => self.counters.add_plain(cause, bytes),
        }
    }

    /// The call with the flag failed with ENOBUFS, and the error queue has been read since: once more, then plain.
    pub fn handle_no_buffers(&mut self, now: Time) {
        self.counters.no_buffers += 1;
        let drained = self.flight.outstanding() == 0 || self.refused == Refused::Once;
        if !drained {
            self.refused = Refused::Once;
            return;
        }
        self.refused = Refused::Twice;
        self.budget.halve(now);
        if self.refusals > 0 {
            let pause = FIRST_PAUSE * (1 << (self.refusals - 1).min(30));
            self.paused_until = now + pause.min(LONGEST_PAUSE);
        }
        self.refusals += 1;
    }

    /// The call with the flag failed with EINVAL or EOPNOTSUPP. A stream is never sent with it again; a datagram, which may be what is
    /// refused, is tried without.
    pub fn handle_unsupported(&mut self) {
        if self.is_datagram() {
            self.refused = Refused::Flag;
        } else {
            self.disarm();
        }
    }

    /// A datagram with the flag was refused, and the error queue has been read since, when [`Counters::unknown`] was `unknown` before.
    ///
    /// UDP hands a datagram on after it has a number (ip_make_skb, then udp_send_skb, net/ipv4/udp.c): when it is refused there, the
    /// number is used up and notified at once. It is left out here too; else all behind it would be taken for the one before them.
    pub fn handle_refused_datagram(&mut self, unknown: u64, now: Time) {
        let used = (self.counters.unknown - unknown).min(1);
        self.counters.unknown -= used;
        self.flight.skip(used, now);
    }

    fn disarm(&mut self) {
        self.config.armed = false;
        let reason = self.policy.refuse();
        self.counters.switches[reason as usize] += 1;
    }

    /// The call that was asked for was longer than the socket takes (EMSGSIZE, or EINVAL without the flag): its datagram is done, and was
    /// not sent.
    pub fn handle_too_long(&mut self, now: Time) {
        let Some(&transmit) = self.asked.open().first() else { return };
        self.refused = Refused::No;
        self.asked.answered = self.asked.count;
        if !self.is_datagram() {
            return;
        }
        self.flight.advance(transmit.bytes as u64, false, now);
        self.counters.too_long += 1;
        self.counters.too_long_bytes += transmit.bytes as u64;
    }

    /// A range of numbers came from the error queue.
    pub fn handle_notification(&mut self, range: Range, now: Time) {
        let (counters, budget) = (&mut self.counters, &mut self.budget);
        let mut freed = Freed::default();
        let completed = self.flight.complete(range, |bytes, at| {
            freed.add(bytes);
            counters.add_pin_time(now.as_nanos().saturating_sub(at.as_nanos()));
        });
        budget.give_back(freed);
        counters.notifications += 1;
        counters.per_notification.add(completed.numbers);
        counters.completed += completed.numbers;
        counters.duplicates += completed.duplicates;
        counters.unknown += completed.unknown;
        counters.out_of_order += u64::from(completed.out_of_order);
        if range.copied {
            counters.copied += completed.numbers;
            counters.copied_bytes += completed.bytes;
        }
        let Some(first) = completed.first.filter(|_| completed.numbers > 0) else { return };
        let sent = self.sent();
        let (judged, reason) = self.policy.handle_range(first, range.count(), range.copied, sent, now);
        if let Some(copied) = judged {
            self.counters.probes[usize::from(copied)] += 1;
        }
        if let Some(reason) = reason {
            self.counters.switches[reason as usize] += 1;
        }
    }

    /// Whether it is time to read the error queue: many calls since, few frames left, or a millisecond. (It is read also at EAGAIN, at
    /// ENOBUFS, when idle, and at the end.)
    pub fn wants_notifications(&self, now: Time) -> bool {
        if self.flight.outstanding() == 0 {
            return false;
        }
        let most = self.config.max_frames;
        let every = self.config.read_every.max(1);
        // With few frames left it is read sooner, but not at every call: a reading that finds nothing costs half a send.
        let few_left = self.flight.held() >= most - most / 4;
        let wanted = if few_left { (most / 16).clamp(1, every) } else { every };
        self.calls_since_read >= wanted
            || now.as_nanos().saturating_sub(self.read_at.as_nanos()) >= READ_AFTER_NANOS
    }

    /// The error queue was read until it was empty, or as far as one reading goes.
    pub fn handle_queue_read(&mut self, now: Time) {
        self.calls_since_read = 0;
        self.read_at = now;
    }

    /// A frame that the kernel is done with.
    pub fn poll_done(&mut self) -> Option<T> {
        self.flight.poll_done()
    }

    /// When something is to be looked at although nothing happened: the moment at which the peer counts as stuck.
    pub fn poll_timeout(&self) -> Option<Time> {
        Some(self.flight.oldest_at()? + self.stuck_after())
    }

    /// The connection's round-trip time, when the caller knows it.
    pub fn handle_rtt(&mut self, rtt: Duration) {
        self.rtt = rtt;
    }

    /// Whether a frame has been pinned for longer than the larger of a second and eight round trips.
    pub fn is_stuck(&self, now: Time) -> bool {
        self.flight.oldest_at().is_some_and(|at| now.since(at) > self.stuck_after())
    }

    /// Whether everything is handed over to the kernel.
    pub fn is_flushed(&self) -> bool {
        self.flight.is_flushed()
    }

    /// Whether there is room for a frame.
    pub fn has_room(&self) -> bool {
        self.flight.held() < self.config.max_frames
    }

    /// Whether each frame is one datagram.
    pub fn is_datagram(&self) -> bool {
        self.config.kind != Kind::Stream
    }

    /// Numbers that are outstanding.
    pub fn outstanding(&self) -> usize {
        self.flight.outstanding()
    }

    /// Frames that were pushed and are not done.
    #[inline]
    pub fn held(&self) -> usize {
        self.flight.held()
    }

    /// Bytes that outstanding numbers pin.
    pub fn pinned(&self) -> u64 {
        self.flight.pinned()
    }

    /// Frames that are not handed over entirely.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.flight.unflushed()
    }

    /// Bytes that are not handed over yet.
    #[inline]
    pub fn unsent(&self) -> u64 {
        self.flight.unsent()
    }

    /// Bytes that may be pinned at once: less than configured after an ENOBUFS.
    pub fn budget(&self) -> u64 {
        self.budget.limit()
    }

    /// How the connection sends now.
    pub fn mode(&self) -> Mode {
        self.policy.mode()
    }

    /// Whether the socket takes the flag.
    pub fn is_armed(&self) -> bool {
        self.config.armed
    }

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(crate) fn counters_mut(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// Ends: the connection was closed or reset, and no further completion will be seen.
    pub fn abandon(&mut self) -> Abandoned<T> {
        self.budget.abandon(self.flight.outstanding_bytes());
        self.counters.abandoned += self.flight.outstanding() as u64;
        self.asked = Asked::NONE;
        self.flight.take_all()
    }

    fn sent(&self) -> u64 {
        self.counters.zerocopy_bytes + self.counters.plain_bytes()
    }

    fn stuck_after(&self) -> Duration {
        STUCK_AFTER.max(self.rtt * STUCK_RTTS)
    }

    /// With the flag or not, how much, and whether it is a probe.
    fn choose(&mut self, bytes: u64, ahead: Ahead, now: Time) -> (How, u64, bool) {
        let plain = |cause| (How::Plain(cause), bytes, false);
        let least = self.config.min_zerocopy.max(1) as u64;
        if !self.config.armed || self.config.choice == Choice::Plain {
            return plain(PlainCause::Unarmed);
        }
        if self.config.kind == (Kind::Datagram { segmented: false }) && self.config.choice != Choice::Zerocopy
        {
            return plain(PlainCause::NoSegmentation);
        }
        if bytes < least {
            return plain(PlainCause::Small);
        }
        match self.refused {
            Refused::Twice => return plain(PlainCause::NoBuffers),
            Refused::Flag => return plain(PlainCause::Unarmed),
            Refused::No | Refused::Once if now < self.paused_until => {
                return plain(PlainCause::NoBuffers);
            }
            Refused::No | Refused::Once => {}
        }
        if bytes < STUCK_SMALL && self.is_stuck(now) {
            return plain(PlainCause::Stuck);
        }
        let mut probe = false;
        if self.policy.mode() != Mode::Zerocopy {
            let (decision, reason) = self.policy.decide(self.sent(), self.flight.outstanding(), now);
            if let Some(reason) = reason {
                self.counters.switches[reason as usize] += 1;
            }
            match decision {
                Decision::Plain => return plain(PlainCause::Copying),
                Decision::Beside => return plain(PlainCause::Probing),
                Decision::Zerocopy => {}
                Decision::Probe => probe = true,
            }
        }
        let room = self.budget.room(ahead, now);
        let fits = if self.config.kind == Kind::Stream { room >= least } else { room >= bytes };
        if !fits || self.flight.window() + ahead.calls >= self.config.max_numbers {
            return plain(PlainCause::Budget);
        }
        (How::Zerocopy, room, probe)
    }
}

/// How a connection begins.
fn policy(config: &Config, counters: &mut Counters, now: Time) -> Policy {
    let (policy, reason) = match config.choice {
        _ if !config.armed => (Policy::fixed(Mode::Copying), None),
        Choice::Adaptive => Policy::adaptive(config.local, now),
        Choice::Zerocopy => (Policy::fixed(Mode::Zerocopy), None),
        Choice::Plain => (Policy::fixed(Mode::Copying), None),
    };
    if let Some(reason) = reason {
        counters.switches[reason as usize] += 1;
    }
    policy
}

impl<T> Drop for Engine<T> {
    /// Gives its share of locked memory back.
    fn drop(&mut self) {
        self.budget.abandon(self.flight.outstanding_bytes());
    }
}
