//! The completion engine: selects the next calls and their copy mode, and reports the frames that the kernel has completed.
//!
//! The engine does no IO. The owner of the socket asks [`poll_transmit`](Engine::poll_transmit) for a call, makes it, and reports
//! the result ([`handle_sent`](Engine::handle_sent), [`handle_no_buffers`](Engine::handle_no_buffers),
//! [`handle_too_long`](Engine::handle_too_long)). It reads the error queue when
//! [`wants_notifications`](Engine::wants_notifications) returns true and passes each entry to
//! [`handle_notification`](Engine::handle_notification). It takes back completed frames with [`poll_done`](Engine::poll_done).
//!
//! Invariants: a frame is returned once, after all its bytes were accepted by the kernel and all numbers that cover it are
//! completed. Progress never depends on a completion: where zero copy cannot continue, a plain send can.

use std::ops::Range as Span;
use std::sync::Arc;
use std::time::Duration;

use crate::budget::{Budget, Freed};
use crate::counters::{Counters, Distributions, PlainCause};
use crate::inflight::{Abandoned, Inflight};
use crate::locked::LockedMemory;
use crate::notification::Range;
use crate::policy::{Decision, Mode, Policy};
use towpath_wire::Time;

/// Limit on the frames of one set of calls (UIO_MAXIOV is 1024; more than some tens gain nothing).
pub const MAX_PARTS: usize = 64;
/// Limit on the calls of one set.
pub const MAX_CALLS: usize = 16;
/// Messages shorter than this are copied for a stuck peer.
const STUCK_SMALL: u64 = 64 << 10;
/// A peer is stuck when a frame is pinned for longer than this and than `STUCK_RTTS` round trips.
const STUCK_AFTER: Duration = Duration::from_secs(1);
const STUCK_RTTS: u32 = 8;
/// The error queue is read after this time, however few calls were made. A sender with rare messages then gets its frames and the
/// result of a probe at its next message.
const READ_AFTER_NANOS: u64 = 1_000_000;
/// Pause of zero copy after repeated ENOBUFS, doubling up to `LONGEST_PAUSE`: another process of the user may hold the locked
/// memory permanently.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// Kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A byte stream: TCP. Frames are gathered, and a call may be accepted partially.
    Stream,
    /// Datagrams: UDP. Each frame is one call. Without `segmented` the kernel copies.
    Datagram {
        /// UDP_SEGMENT is set (generic segmentation offload).
        segmented: bool,
    },
}

/// Selects between zero-copy and plain sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CopyMode {
    /// Zero copy where probes show that it works, plain sends otherwise.
    #[default]
    Adaptive,
    /// Zero copy for all calls of at least `min_zerocopy` bytes.
    Zerocopy,
    /// Plain sends.
    Plain,
}

/// Configuration of an engine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The socket's kind.
    pub kind: Kind,
    /// SO_ZEROCOPY is set, and the socket is neither MPTCP nor kTLS.
    pub armed: bool,
    /// Zero-copy or plain sends.
    pub choice: CopyMode,
    /// The destination is this machine.
    pub local: bool,
    /// Shorter calls are sent plain. Bytes.
    pub min_zerocopy: usize,
    /// Adjacent frames of a stream are gathered into one call until it reaches this size in bytes; 0 disables gathering.
    pub gather: usize,
    /// The error queue is read after this many calls, or one millisecond after the last read.
    pub read_every: usize,
    /// Limit on the frames that the connection holds, queued or pinned. At least 1.
    pub max_frames: usize,
    /// Limit on pinned bytes.
    pub max_pinned: u64,
    /// Limit on outstanding numbers.
    pub max_numbers: usize,
    /// Account of locked memory, shared with other connections.
    pub locked: Arc<LockedMemory>,
    /// net.core.optmem_max in bytes.
    pub optmem: u64,
    /// The socket's first number: 0 for a new socket; tests start near 2^32.
    pub first_number: u64,
}

impl Default for Config {
    /// An armed, adaptive stream without a limit on locked memory.
    fn default() -> Self {
        Self {
            kind: Kind::Stream,
            armed: true,
            choice: CopyMode::Adaptive,
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

/// The path of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// With MSG_ZEROCOPY.
    Zerocopy,
    /// Without MSG_ZEROCOPY, and the cause.
    Plain(PlainCause),
}

/// One call to make: one send(2), or one message of sendmmsg(2). [`Engine::parts`] has its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes of the call; zero only for an empty datagram.
    pub bytes: usize,
    /// Number of frames that hold these bytes.
    pub parts: usize,
    /// With or without MSG_ZEROCOPY.
    pub how: Path,
    probe: bool,
}

impl Transmit {
    const NONE: Self = Self { bytes: 0, parts: 0, how: Path::Zerocopy, probe: false };
}

/// The calls that were returned by `poll_transmits`, until their results are reported.
#[derive(Debug)]
struct Asked {
    calls: [Transmit; MAX_CALLS],
    /// Calls from `answered` up to `count` are open.
    answered: usize,
    count: usize,
}

impl Asked {
    const NONE: Self = Self { calls: [Transmit::NONE; MAX_CALLS], answered: 0, count: 0 };

    fn open(&self) -> &[Transmit] {
        &self.calls[self.answered..self.count]
    }
}

/// Resources that open calls will use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ahead {
    pub(crate) calls: usize,
    pub(crate) frames: usize,
    pub(crate) bytes: u64,
}

/// Error of [`Engine::push`]: the limit on frames is reached. Contains the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

/// State after a refused call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    No,
    /// Retry with MSG_ZEROCOPY: the error queue has been read since.
    Once,
    /// Plain, until a call succeeds.
    Twice,
    /// MSG_ZEROCOPY failed for a datagram. The next call is plain, which shows whether the flag or the datagram was refused.
    Flag,
}

/// The engine of one connection. `T` identifies a frame to the caller; it is returned when the frame is completed.
#[derive(Debug)]
pub struct Engine<T> {
    config: Config,
    inflight: Inflight<T>,
    policy: Policy,
    budget: Budget,
    counters: Counters,
    distributions: Distributions,
    /// Calls of either path since the last read of the error queue, while numbers were outstanding.
    calls_since_read: usize,
    /// Time of the last read.
    read_at: Time,
    refused: Refused,
    /// Consecutive failures with ENOBUFS.
    refusals: u32,
    /// End of the pause of zero copy after such failures.
    paused_until: Time,
    asked: Asked,
    rtt: Duration,
}

impl<T> Engine<T> {
    /// An engine for a connection without earlier calls with MSG_ZEROCOPY.
    pub fn new(mut config: Config, now: Time) -> Self {
        config.max_frames = config.max_frames.max(1);
        let mut counters = Counters::default();
        let policy = policy(&config, &mut counters, now);
        let stream = config.kind == Kind::Stream;
        let budget = Budget::new(config.locked.clone(), config.max_pinned, config.optmem, stream);
        Self {
            inflight: Inflight::new(config.first_number),
            policy,
            budget,
            counters,
            distributions: Distributions::default(),
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

    /// Changes the copy mode from the next call on.
    pub fn set_choice(&mut self, choice: CopyMode, now: Time) {
        self.config.choice = choice;
        self.policy = policy(&self.config, &mut self.counters, now);
    }

    /// Queues a frame of `len` bytes.
    ///
    /// # Errors
    /// [`Config::max_frames`] frames are held; returns the frame.
    pub fn push(&mut self, token: T, len: usize) -> Result<(), Full<T>> {
        if !self.has_room() {
            return Err(Full(token));
        }
        self.inflight.push(token, len);
        Ok(())
    }

    /// Drops completed frames instead of keeping them for [`poll_done`](Self::poll_done).
    pub(crate) fn drop_done(&mut self) {
        self.inflight.drop_done();
    }

    /// The frame that was pushed last.
    pub(crate) fn last_pushed(&mut self) -> Option<&mut T> {
        self.inflight.last_pushed()
    }

    /// Like [`push`](Self::push), for a caller that has checked for room; avoids a move of the frame.
    #[inline]
    pub(crate) fn push_in_room(&mut self, token: T, len: usize) {
        debug_assert!(self.has_room());
        self.inflight.push(token, len);
    }

    /// Returns the next call, or `None` if all data was accepted.
    pub fn poll_transmit(&mut self, now: Time) -> Option<Transmit> {
        self.poll_transmits(1, now).first().copied()
    }

    /// Returns the next calls, at most `most` and [`MAX_CALLS`], all with the same path, for one sendmmsg(2). Empty if all data was
    /// accepted. Report each result with [`handle_sent`](Self::handle_sent). Calls that were not made, because an earlier one was
    /// accepted partially, are returned again.
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
                // Empty messages of a stream need no call.
                self.inflight.advance(0, false, now);
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

    /// Bytes and frames of the call that starts after the first `skip` waiting frames.
    fn next_call(&self, skip: usize) -> (usize, usize) {
        let most = if self.config.kind == Kind::Stream { MAX_PARTS } else { 1 };
        let (mut bytes, mut parts) = (0, 0);
        while parts < most
            && let Some((_, left)) = self.inflight.waiting(skip + parts)
        {
            bytes += left.len();
            parts += 1;
            if bytes > 0 && bytes >= self.config.gather {
                break;
            }
        }
        (bytes, parts)
    }

    /// The frames and bytes of the open calls: first those of the first call, as many as its [`Transmit::parts`], then those of the
    /// second, and so on.
    pub fn parts(&self) -> impl Iterator<Item = (&T, Span<usize>)> {
        let mut at = 0;
        self.asked.open().iter().flat_map(move |transmit| {
            let (from, mut left) = (at, transmit.bytes);
            at += transmit.parts;
            (from..at).filter_map(move |at| {
                let (token, span) = self.inflight.waiting(at)?;
                let part = span.len().min(left);
                left -= part;
                Some((token, span.start..span.start + part))
            })
        })
    }

    /// The first of these parts.
    #[inline]
    pub(crate) fn first_part(&self) -> Option<(&T, Span<usize>)> {
        let transmit = self.asked.open().first()?;
        let (token, span) = self.inflight.waiting(0)?;
        Some((token, span.start..span.end.min(span.start + transmit.bytes)))
    }

    pub(crate) fn asked(&self) -> &[Transmit] {
        self.asked.open()
    }

    /// The kernel accepted `bytes` of the first open call.
    pub fn handle_sent(&mut self, bytes: usize, now: Time) {
        let Some(&transmit) = self.asked.open().first() else { return };
        self.asked.answered += 1;
        if bytes < transmit.bytes {
            self.asked.answered = self.asked.count;
        }
        let bytes = bytes.min(transmit.bytes) as u64;
        if self.refused == Refused::Flag && transmit.how != Path::Zerocopy {
            // The same datagram succeeded without the flag, so the flag was refused.
            self.disarm();
        }
        self.refused = Refused::No;
        // A call without bytes gets no number.
        let with_number = transmit.how == Path::Zerocopy && bytes > 0;
        if transmit.probe && with_number {
            self.policy.handle_probe(self.inflight.next_number());
        }
        self.inflight.advance(bytes, with_number, now);
        self.calls_since_read += usize::from(self.inflight.outstanding() > 0);
        match transmit.how {
            Path::Zerocopy if with_number => {
                self.refusals = 0;
                self.budget.take(bytes);
                self.counters.numbers += 1;
                self.counters.zerocopy_bytes += bytes;
            }
            Path::Zerocopy => {}
            Path::Plain(cause) => self.counters.add_plain(cause, bytes),
        }
    }

    /// The zero-copy call failed with ENOBUFS, and the error queue has been read since. The call is retried once, then sent plain.
    pub fn handle_no_buffers(&mut self, now: Time) {
        self.counters.no_buffers += 1;
        let drained = self.inflight.outstanding() == 0 || self.refused == Refused::Once;
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

    /// The zero-copy call failed with EINVAL or EOPNOTSUPP. On a stream this disables zero copy. A datagram is retried plain, because
    /// the datagram itself may be invalid.
    pub fn handle_unsupported(&mut self) {
        if self.is_datagram() {
            self.refused = Refused::Flag;
        } else {
            self.disarm();
        }
    }

    /// A zero-copy datagram was refused, and the error queue has been read since. `unknown` is the value of [`Counters::unknown`] before
    /// that read.
    ///
    /// UDP assigns the number before it transmits the datagram (ip_make_skb, then udp_send_skb, net/ipv4/udp.c). If the transmission is
    /// refused, the number is used up and notified at once. It is skipped here too; otherwise all later numbers would be off by one.
    pub fn handle_refused_datagram(&mut self, unknown: u64, now: Time) {
        let used = (self.counters.unknown - unknown).min(1);
        self.counters.unknown -= used;
        self.inflight.skip(used, now);
    }

    fn disarm(&mut self) {
        self.config.armed = false;
        let reason = self.policy.refuse();
        self.counters.count_switch(reason);
    }

    /// The first open call exceeds the socket's limit (EMSGSIZE, or EINVAL without the flag). Its datagram is completed without being
    /// sent.
    pub fn handle_too_long(&mut self, now: Time) {
        let Some(&transmit) = self.asked.open().first() else { return };
        self.refused = Refused::No;
        self.asked.answered = self.asked.count;
        if !self.is_datagram() {
            return;
        }
        self.inflight.advance(transmit.bytes as u64, false, now);
        self.counters.too_long += 1;
        self.counters.too_long_bytes += transmit.bytes as u64;
    }

    /// Processes a range of completed numbers from the error queue.
    pub fn handle_notification(&mut self, range: Range, now: Time) {
        let (counters, budget) = (&mut self.counters, &mut self.budget);
        let distributions = &mut self.distributions;
        let mut freed = Freed::default();
        let completed = self.inflight.complete(range, |bytes, at| {
            freed.add(bytes);
            distributions.add_pin_time(now.as_nanos().saturating_sub(at.as_nanos()));
        });
        budget.give_back(freed);
        counters.notifications += 1;
        distributions.per_notification.add(completed.numbers);
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
            let probes =
                if copied { &mut self.counters.probes_copied } else { &mut self.counters.probes_not_copied };
            *probes += 1;
        }
        if let Some(reason) = reason {
            self.counters.count_switch(reason);
        }
    }

    /// Returns true if the error queue should be read: after `read_every` calls, with few free frames, or after a millisecond. (It is also
    /// read at EAGAIN and ENOBUFS, when idle, and at the end.)
    pub fn wants_notifications(&self, now: Time) -> bool {
        if self.inflight.outstanding() == 0 {
            return false;
        }
        let most = self.config.max_frames;
        let every = self.config.read_every.max(1);
        // With few frames left the queue is read sooner, but not at every call: an empty read costs half a send.
        let few_left = self.inflight.held() >= most - most / 4;
        let wanted = if few_left { (most / 16).clamp(1, every) } else { every };
        self.calls_since_read >= wanted
            || now.as_nanos().saturating_sub(self.read_at.as_nanos()) >= READ_AFTER_NANOS
    }

    /// The error queue was read until it was empty, or up to the limit of one read.
    pub fn handle_queue_read(&mut self, now: Time) {
        self.calls_since_read = 0;
        self.read_at = now;
    }

    /// Returns a completed frame.
    pub fn poll_done(&mut self) -> Option<T> {
        self.inflight.poll_done()
    }

    /// The time at which the peer counts as stuck, if a number is outstanding.
    pub fn poll_timeout(&self) -> Option<Time> {
        Some(self.inflight.oldest_at()? + self.stuck_after())
    }

    /// Sets the connection's round-trip time, if known.
    pub fn handle_rtt(&mut self, rtt: Duration) {
        self.rtt = rtt;
    }

    /// Returns true if a frame has been pinned for longer than a second and eight round trips.
    pub fn is_stuck(&self, now: Time) -> bool {
        self.inflight.oldest_at().is_some_and(|at| now.since(at) > self.stuck_after())
    }

    /// Returns true if the kernel has accepted all data.
    pub fn is_flushed(&self) -> bool {
        self.inflight.is_flushed()
    }

    /// Returns true if another frame can be pushed.
    pub fn has_room(&self) -> bool {
        self.inflight.held() < self.config.max_frames
    }

    /// Returns true if each frame is one datagram.
    pub fn is_datagram(&self) -> bool {
        self.config.kind != Kind::Stream
    }

    /// Number of outstanding completions.
    pub fn outstanding(&self) -> usize {
        self.inflight.outstanding()
    }

    /// Frames that were pushed and are not completed.
    #[inline]
    pub fn held(&self) -> usize {
        self.inflight.held()
    }

    /// Bytes pinned by outstanding numbers.
    pub fn pinned(&self) -> u64 {
        self.inflight.pinned()
    }

    /// Frames not yet completely accepted by the kernel.
    #[inline]
    pub fn waiting(&self) -> usize {
        self.inflight.unflushed()
    }

    /// Bytes not yet accepted by the kernel.
    #[inline]
    pub fn unsent(&self) -> u64 {
        self.inflight.unsent()
    }

    /// Limit on pinned bytes at present; less than configured after ENOBUFS.
    pub fn budget(&self) -> u64 {
        self.budget.limit()
    }

    /// The current mode.
    pub fn mode(&self) -> Mode {
        self.policy.mode()
    }

    /// Returns true if the socket accepts MSG_ZEROCOPY.
    pub fn is_armed(&self) -> bool {
        self.config.armed
    }

    /// The engine's counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The engine's distributions.
    pub fn distributions(&self) -> &Distributions {
        &self.distributions
    }

    pub(crate) fn counters_mut(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// Ends the engine: the connection was closed or reset, and no further completion can arrive.
    pub fn abandon(&mut self) -> Abandoned<T> {
        self.budget.abandon(self.inflight.outstanding_bytes());
        self.counters.abandoned += self.inflight.outstanding() as u64;
        self.asked = Asked::NONE;
        self.inflight.take_all()
    }

    fn sent(&self) -> u64 {
        self.counters.zerocopy_bytes + self.counters.plain_bytes()
    }

    fn stuck_after(&self) -> Duration {
        STUCK_AFTER.max(self.rtt * STUCK_RTTS)
    }

    /// Selects the path, the limit on bytes, and whether the call is a probe.
    fn choose(&mut self, bytes: u64, ahead: Ahead, now: Time) -> (Path, u64, bool) {
        let plain = |cause| (Path::Plain(cause), bytes, false);
        let least = self.config.min_zerocopy.max(1) as u64;
        if !self.config.armed || self.config.choice == CopyMode::Plain {
            return plain(PlainCause::Unarmed);
        }
        if self.config.kind == (Kind::Datagram { segmented: false })
            && self.config.choice != CopyMode::Zerocopy
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
            let (decision, reason) = self.policy.decide(self.sent(), self.inflight.outstanding(), now);
            if let Some(reason) = reason {
                self.counters.count_switch(reason);
            }
            match decision {
                Decision::Plain => return plain(PlainCause::Copying),
                Decision::PlainDuringProbe => return plain(PlainCause::Probing),
                Decision::Zerocopy => {}
                Decision::Probe => probe = true,
            }
        }
        let room = self.budget.room(ahead, now);
        let fits = if self.config.kind == Kind::Stream { room >= least } else { room >= bytes };
        if !fits || self.inflight.number_span() + ahead.calls >= self.config.max_numbers {
            return plain(PlainCause::Budget);
        }
        (Path::Zerocopy, room, probe)
    }
}

/// The initial policy of a connection.
fn policy(config: &Config, counters: &mut Counters, now: Time) -> Policy {
    let (policy, reason) = match config.choice {
        _ if !config.armed => (Policy::fixed(Mode::Copying), None),
        CopyMode::Adaptive => Policy::adaptive(config.local, now),
        CopyMode::Zerocopy => (Policy::fixed(Mode::Zerocopy), None),
        CopyMode::Plain => (Policy::fixed(Mode::Copying), None),
    };
    if let Some(reason) = reason {
        counters.count_switch(reason);
    }
    policy
}

impl<T> Drop for Engine<T> {
    /// Credits its share of locked memory.
    fn drop(&mut self) {
        self.budget.abandon(self.inflight.outstanding_bytes());
    }
}
