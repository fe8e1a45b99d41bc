//! The words of one state, and what a packet does to them.
//!
//! What: behind the key are, a word each: who made the state (rule, name, marks); its clock, which is when it ends and
//! what was seen of its connection; what it keeps (parent, lifetime); TCP's acknowledgement numbers; and the packets and
//! bytes of each direction.
//!
//! Invariant: any number of threads may have a packet in one state. What was seen and when it ends are in one word,
//! changed together (compare and exchange), so that no FIN is lost and no refresh outlives a reset. Packets and bytes
//! are counted together in one word by one addition, and move to a wider place ([`Entry::take_count`]) before they could
//! overflow.
//!
//! The end is kept modulo 2^55 ns, which is 417 days: lifetimes are at most a fourth of that, and whoever lets time jump
//! farther cleans up first ([`LONGEST_JUMP`]).

use crate::state::concurrent::sync::Ordering;
use crate::state::limits::rule_counts::RemovedRules;
use crate::state::sctp;
use crate::state::table::key::{Key, Side};
use crate::state::table::memory::WORDS;
use crate::state::table::slab::Words;
use crate::state::tcp::{Life, Tcp};
use crate::state::{Direction, Name, RuleId, Segment, Settings};
use towpath_wire::Time;

const TCP: u8 = 6;
const UDP: u8 = 17;
pub(crate) const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;

/// Marks of a state, in the low bits of its word of who made it.
pub(crate) const FORWARD_HIGH: u64 = 1;
pub(crate) const CAPPED: u64 = 1 << 1;
pub(crate) const LIMITED: u64 = 1 << 2;
pub(crate) const STRICT: u64 = 1 << 3;
pub(crate) const ORPHANED: u64 = 1 << 4;
pub(crate) const REPLIED: u64 = 1 << 5;
pub(crate) const SPILLED: u64 = 1 << 6;
/// The other side has spoken; whether this one has heard it, [`REPLIED`] says.
pub(crate) const ANSWERED: u64 = 1 << 7;

/// The era of its rule in which a state was made ([`crate::state::limits::rule_counts`]), between its name and its marks.
const ERA: u32 = 8;

/// The clock: the end above, what was seen below.
const SEEN_BITS: u32 = 9;
const SEEN: u64 = (1 << SEEN_BITS) - 1;

/// Lifetimes are cut to this, in seconds: less than 2^53 ns.
const LONGEST: u32 = crate::state::LIFETIME_MAX;

/// How far time may go between two packets, in ns, before states have to be looked at.
pub(crate) const LONGEST_JUMP: u64 = 1 << 52;

/// No lifetime of its own.
const NO_LIFETIME: u64 = 0xff_ffff;

/// Bytes below, packets above. One packet is less than 2^17 bytes, so that 2^19 threads at once could not carry a count
/// from the mark to the end of its half.
const BYTE_BITS: u32 = 37;
const SPILL: u64 = 1 << (BYTE_BITS - 1) | 1 << 63;

/// One packet as a state sees it.
#[derive(Clone, Copy)]
pub(crate) struct PacketInfo<'a> {
    pub(crate) proto: u8,
    /// Bytes counted for it.
    pub(crate) bytes: u32,
    /// What else is seen of TCP and SCTP; nobody looks at it for others.
    pub(crate) segment: &'a Segment,
    pub(crate) at: BurstTime,
}

/// When packets are seen, and what follows from it for most of them: made once for a burst.
#[derive(Clone, Copy)]
pub(crate) struct BurstTime {
    pub(crate) now: Time,
    /// When a state of UDP ends that has no lifetime of its own.
    udp: Time,
}

impl BurstTime {
    #[inline(always)]
    pub(crate) fn new(now: Time, settings: &Settings) -> Self {
        Self { now, udp: after(now, settings.dyn_udp_lifetime) }
    }
}

/// What a new state is.
pub(crate) struct NewEntry<const N: usize> {
    pub(crate) key: Key<N>,
    pub(crate) side: Side,
    pub(crate) rule: RuleId,
    pub(crate) name: Name,
    /// The rule's era.
    pub(crate) era: u8,
    /// [`CAPPED`], [`LIMITED`], [`STRICT`].
    pub(crate) marks: u64,
    pub(crate) parent: u32,
    pub(crate) lifetime: Option<u32>,
    /// Taken for an established TCP connection.
    pub(crate) established: bool,
}

/// What became of a state's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpiryChange {
    /// It is as late as it was, or later.
    Extended,
    /// It is sooner.
    Shortened(Time),
}

/// The words of one state.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a, const N: usize>(pub(crate) Words<'a, N>);

impl<'a, const N: usize> Entry<'a, N> {
    const MAKER: usize = N;
    const CLOCK: usize = N + 1;
    const KEEP: usize = N + 2;
    const ACKS: usize = N + 3;
    const COUNTS: usize = N + 4;

    /// Writes a new state, which nobody else knows yet, with its first packet.
    pub(crate) fn write(self, template: &NewEntry<N>, packet: PacketInfo<'_>, settings: &Settings) {
        // Relaxed: the index publishes the state.
        let put = |at: usize, word: u64| self.0.word(at).store(word, Ordering::Relaxed);
        template.key.0.iter().enumerate().for_each(|(at, &word)| put(at, word));
        let forward = if template.side == Side::High { FORWARD_HIGH } else { 0 };
        let header = u64::from(template.rule.0) << 32 | u64::from(template.name.0.get()) << 16;
        put(Self::MAKER, header | u64::from(template.era) << ERA | template.marks | forward);
        let lifetime = template.lifetime.map_or(NO_LIFETIME, |seconds| seconds.min(LONGEST).into());
        put(Self::KEEP, u64::from(template.parent) << 32 | lifetime);
        put(Self::ACKS, 0);
        (0..2).for_each(|direction| put(Self::COUNTS + direction, 0));
        let mut tcp = Tcp::default();
        if template.established {
            tcp.assume_established();
        }
        // For a first packet that refreshes nothing: a connection that is taken for established.
        let end = after(packet.at.now, settings.dyn_syn_lifetime);
        put(Self::CLOCK, stamp(end) | pack(tcp.seen));
        let _ = self.count(Direction::Forward, packet.bytes);
        self.refresh(Direction::Forward, packet, settings);
    }

    /// Has its words on their way to the cache: all of them, or the key and what finds it live.
    #[inline(always)]
    pub(crate) fn prefetch(self) {
        self.0.prefetch();
    }

    #[inline(always)]
    pub(crate) fn prefetch_key(self) {
        const { assert!(Self::CLOCK < WORDS) };
        self.0.prefetch_first();
    }

    #[inline]
    pub(crate) fn is(self, key: &Key<N>) -> bool {
        // Relaxed, here and below: the slot was read with acquire after these words were written.
        let differ = |(at, &word): (usize, &u64)| self.0.word(at).load(Ordering::Relaxed) ^ word;
        key.0.iter().enumerate().map(differ).fold(0, |all, word| all | word) == 0
    }

    pub(crate) fn key(self) -> Key<N> {
        Key(std::array::from_fn(|at| self.0.word(at).load(Ordering::Relaxed)))
    }

    /// Rule, name and marks.
    #[inline]
    pub(crate) fn header(self) -> Header {
        Header(self.0.word(Self::MAKER).load(Ordering::Relaxed))
    }

    /// Sets a mark; whether it was not set before.
    pub(crate) fn mark(self, mark: u64) -> bool {
        // Acquire and release: who marks a state after the one that took it away sees that it was (`States::spill`). A mark
        // publishes nothing else.
        self.0.word(Self::MAKER).fetch_or(mark, Ordering::AcqRel) & mark == 0
    }

    #[inline]
    pub(crate) fn live(self, now: Time) -> bool {
        sooner(stamp(now), self.clock())
    }

    /// When the state ends, of two ends that differ by a multiple of 417 days the one next to `now`.
    pub(crate) fn end(self, now: Time) -> Time {
        let ahead = (self.clock() & !SEEN).wrapping_sub(stamp(now)).cast_signed() >> SEEN_BITS;
        Time::from_nanos(now.as_nanos().saturating_add_signed(ahead))
    }

    /// What was seen of a TCP connection, and its last acknowledgement numbers.
    pub(crate) fn tcp(self) -> Tcp {
        self.tcp_of(self.clock(), self.0.word(Self::ACKS).load(Ordering::Relaxed))
    }

    /// Forgets what was seen of a TCP connection, for another one in the same state.
    pub(crate) fn forget(self) {
        self.0.word(Self::ACKS).store(0, Ordering::Relaxed);
        self.0.word(Self::CLOCK).fetch_and(!SEEN, Ordering::Relaxed);
    }

    /// How far an SCTP association has come.
    pub(crate) fn sctp(self) -> sctp::Phase {
        sctp::Phase::from_bits(self.clock() & SEEN)
    }

    /// What was seen, of any protocol.
    pub(crate) fn seen(self) -> u64 {
        self.clock() & SEEN
    }

    /// Sets what packets made of another state once.
    pub(crate) fn restore(self, end: Time, seen: u64, acks: [u32; 2]) {
        // Relaxed, as in refresh_tcp(). A packet that comes in between is as if it had come before.
        self.0.word(Self::ACKS).store(u64::from(acks[0]) | u64::from(acks[1]) << 32, Ordering::Relaxed);
        self.0.word(Self::CLOCK).store(stamp(end) | seen & SEEN, Ordering::Relaxed);
    }

    pub(crate) fn parent(self) -> u32 {
        (self.0.word(Self::KEEP).load(Ordering::Relaxed) >> 32) as u32
    }

    /// Counts a packet. Whether the count is to be taken away soon.
    #[inline]
    #[must_use]
    pub(crate) fn count(self, direction: Direction, bytes: u32) -> bool {
        // Relaxed: a count publishes nothing.
        is_high(self.0.word(Self::COUNTS + direction as usize).fetch_add(one(bytes), Ordering::Relaxed))
    }

    /// Packets and bytes of a direction, as far as they are here.
    pub(crate) fn counted(self, direction: Direction) -> [u64; 2] {
        unpack(self.0.word(Self::COUNTS + direction as usize).load(Ordering::Relaxed))
    }

    /// Takes away what was counted, which is returned.
    pub(crate) fn take_count(self, direction: Direction) -> [u64; 2] {
        let counted = self.counted(direction);
        let word = counted[0] << BYTE_BITS | counted[1];
        self.0.word(Self::COUNTS + direction as usize).fetch_sub(word, Ordering::Relaxed);
        counted
    }

    /// Takes a packet in.
    #[inline(always)]
    pub(crate) fn refresh(
        self,
        direction: Direction,
        packet: PacketInfo<'_>,
        settings: &Settings,
    ) -> ExpiryChange {
        // By itself, as it is all that there is to most packets.
        if packet.proto == UDP {
            return self.refresh_until(packet.at.udp, packet.at.now);
        }
        // Word by word: a packet in memory would be put there for UDP, too.
        self.refresh_other(direction, packet.proto, packet.segment, packet.at, settings)
    }

    #[inline(never)]
    fn refresh_other(
        self,
        direction: Direction,
        proto: u8,
        segment: &Segment,
        BurstTime { now, udp }: BurstTime,
        settings: &Settings,
    ) -> ExpiryChange {
        let Segment { tcp_flags, tcp_ack, sctp_chunk, .. } = *segment;
        match proto {
            TCP => self.refresh_tcp(direction, (tcp_flags, tcp_ack), now, settings),
            SCTP if settings.dyn_sctp => self.refresh_sctp(direction, sctp_chunk, now, settings),
            UDP_LITE => self.refresh_until(udp, now),
            _ => self.refresh_until(after(now, settings.dyn_short_lifetime), now),
        }
    }

    /// Has the state end then, or after the lifetime of its own.
    #[inline(always)]
    fn refresh_until(self, end: Time, now: Time) -> ExpiryChange {
        let end = self.lifetime().map_or(end, |seconds| after(now, seconds));
        // Nothing was seen that another thread could have changed: whoever stores last had the last packet. What was
        // seen of SCTP stays for when `dyn_sctp` is on again.
        let before = self.clock();
        let new = stamp(end) | before & SEEN;
        if new != before {
            self.0.word(Self::CLOCK).store(new, Ordering::Relaxed);
        }
        if sooner(new, before) { ExpiryChange::Shortened(end) } else { ExpiryChange::Extended }
    }

    fn refresh_tcp(
        self,
        direction: Direction,
        (flags, ack): (u8, u32),
        now: Time,
        settings: &Settings,
    ) -> ExpiryChange {
        let (clock, acks) = (self.0.word(Self::CLOCK), self.0.word(Self::ACKS));
        loop {
            let (before, acks_before) = (clock.load(Ordering::Relaxed), acks.load(Ordering::Relaxed));
            let mut tcp = self.tcp_of(before, acks_before);
            let life = tcp.segment(direction, flags, ack);
            // Relaxed: each word is right by itself; nothing is read by way of it.
            let new = u64::from(tcp.ack[0]) | u64::from(tcp.ack[1]) << 32;
            if new != acks_before
                && acks.compare_exchange(acks_before, new, Ordering::Relaxed, Ordering::Relaxed).is_err()
            {
                continue;
            }
            // If the other exchange fails, the number that was just accepted will be accepted once more.
            let end = life.map(|life| {
                let seconds = match life {
                    Life::Ack => self.lifetime().unwrap_or(settings.dyn_ack_lifetime),
                    Life::Syn => settings.dyn_syn_lifetime,
                    Life::Fin => settings.dyn_fin_lifetime,
                    Life::Rst => settings.dyn_rst_lifetime,
                };
                after(now, seconds)
            });
            if let Some(end) = self.exchange(before, end, pack(tcp.seen)) {
                return end;
            }
        }
    }

    fn refresh_sctp(
        self,
        direction: Direction,
        chunk: Option<u8>,
        now: Time,
        settings: &Settings,
    ) -> ExpiryChange {
        loop {
            let before = self.clock();
            let mut phase = sctp::Phase::from_bits(before & SEEN);
            let life = phase.packet(direction, chunk);
            let end = life.map(|life| {
                let seconds = match life {
                    sctp::Life::Short => self.lifetime().unwrap_or(settings.dyn_short_lifetime),
                    sctp::Life::Ack => self.lifetime().unwrap_or(settings.dyn_ack_lifetime),
                    sctp::Life::Syn => settings.dyn_syn_lifetime,
                    sctp::Life::Fin => settings.dyn_fin_lifetime,
                    sctp::Life::Rst => settings.dyn_rst_lifetime,
                };
                after(now, seconds)
            });
            if let Some(end) = self.exchange(before, end, phase.bits()) {
                return end;
            }
        }
    }

    /// Changes the clock from `before`, to another end if there is one. `None` when it was changed meanwhile.
    #[inline]
    fn exchange(self, before: u64, end: Option<Time>, seen: u64) -> Option<ExpiryChange> {
        let new = end.map_or(before & !SEEN, stamp) | seen;
        if new != before {
            let clock = self.0.word(Self::CLOCK);
            // Relaxed: see refresh_tcp().
            clock.compare_exchange(before, new, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        }
        Some(match end {
            Some(end) if sooner(stamp(end), before) => ExpiryChange::Shortened(end),
            _ => ExpiryChange::Extended,
        })
    }

    #[inline]
    pub(crate) fn lifetime(self) -> Option<u32> {
        let keep = self.0.word(Self::KEEP).load(Ordering::Relaxed) & NO_LIFETIME;
        (keep != NO_LIFETIME).then_some(keep as u32)
    }

    #[inline]
    fn clock(self) -> u64 {
        self.0.word(Self::CLOCK).load(Ordering::Relaxed)
    }

    #[inline]
    fn tcp_of(self, clock: u64, acks: u64) -> Tcp {
        let seen = clock & 7 | (clock >> 3 & 7) << 8 | (clock >> 6 & 3) << 16;
        Tcp { seen: seen as u32, ack: [acks as u32, (acks >> 32) as u32] }
    }
}

/// Who made a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header(u64);

impl Header {
    #[cfg(all(test, not(loom)))]
    pub(crate) fn of(rule: RuleId, era: u8) -> Self {
        Self(u64::from(rule.0) << 32 | u64::from(era) << ERA)
    }

    #[inline]
    pub(crate) fn rule(self) -> RuleId {
        RuleId((self.0 >> 32) as u32)
    }

    #[inline]
    pub(crate) fn era(self) -> u8 {
        (self.0 >> ERA) as u8
    }

    #[inline]
    pub(crate) fn is_named(self, name: Name) -> bool {
        (self.0 >> 16) as u16 == name.0.get()
    }

    pub(crate) fn name(self) -> Name {
        std::num::NonZeroU16::new((self.0 >> 16) as u16).map_or(Name::DEFAULT, Name)
    }

    #[inline]
    pub(crate) fn has(self, mark: u64) -> bool {
        self.0 & mark != 0
    }

    /// The end that the first packet came from.
    #[inline]
    pub(crate) fn forward(self) -> Side {
        if self.has(FORWARD_HIGH) { Side::High } else { Side::Low }
    }
}

/// Who looks for states, and when: those that have ended are not there for him, nor those of rules that are gone.
#[derive(Clone, Copy)]
pub(crate) struct LiveFilter<'a> {
    pub(crate) now: Time,
    gone: Option<&'a RemovedRules>,
}

impl<'a> LiveFilter<'a> {
    #[inline(always)]
    pub(crate) fn new(now: Time, gone: &'a RemovedRules) -> Self {
        Self { now, gone: if gone.is_empty() { None } else { Some(gone) } }
    }

    #[inline(always)]
    pub(crate) fn has<const N: usize>(self, entry: Entry<'_, N>) -> bool {
        entry.live(self.now) && !self.gone.is_some_and(|gone| gone.has(entry.header()))
    }
}

/// What a packet adds to a count.
#[inline]
pub(crate) fn one(bytes: u32) -> u64 {
    1 << BYTE_BITS | u64::from(bytes)
}

/// Whether a count is to be taken away soon.
#[inline]
pub(crate) fn is_high(count: u64) -> bool {
    count & SPILL != 0
}

/// Packets and bytes of a count.
pub(crate) fn unpack(count: u64) -> [u64; 2] {
    [count >> BYTE_BITS, count & ((1 << BYTE_BITS) - 1)]
}

/// `seconds`, or about a hundred days if that is more, after `now`.
#[inline]
pub(crate) fn after(now: Time, seconds: u32) -> Time {
    Time::from_nanos(now.as_nanos().saturating_add(u64::from(seconds.min(LONGEST)) * 1_000_000_000))
}

/// A time as it stands in a clock.
#[inline]
fn stamp(time: Time) -> u64 {
    time.as_nanos() << SEEN_BITS
}

/// Whether clock `a` ends before clock `b`.
#[inline]
fn sooner(a: u64, b: u64) -> bool {
    ((a & !SEEN).wrapping_sub(b & !SEEN)).cast_signed() < 0
}

/// ipfw's word of a TCP connection, without its gaps.
#[inline]
fn pack(seen: u32) -> u64 {
    u64::from(seen & 7 | (seen >> 8 & 7) << 3 | (seen >> 16 & 3) << 6)
}
