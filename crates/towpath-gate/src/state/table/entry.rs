//! The words of one state, and their changes by a packet.
//!
//! What: these words follow the key: the header (rule, flow name, generation, flags); the expiry, together with
//! what was seen of the connection; the configuration (parent, origin, window scales, lifetime); TCP's acknowledgement
//! numbers; and the packets and bytes of each direction.
//!
//! Invariant: packets of any number of threads may change one state at once. The expiry and what was seen of the
//! connection share a word that compare-and-exchange changes, so that no FIN is lost and no refresh outlives a reset.
//! Packets and bytes are counted by one addition to one word, and move to the [wide
//! counters](crate::state::table::wide_counters) before a half could overflow.
//!
//! Races: each word is consistent alone, and no word publishes another. Two TCP segments that change the expiry word
//! at once: one exchange fails, and its segment is evaluated again with the new value. Two packets of
//! other protocols store the expiry: the last store wins, and both are expiries of packets that were just seen.
//!
//! The expiry is kept modulo 2^55 ns (417 days). Lifetimes are at most a quarter of that. If time jumps farther than
//! [`MAX_TIME_JUMP`], expired states are collected first.

use crate::state::concurrent::sync::Ordering;
use crate::state::sctp;
use crate::state::table::count::{BYTE_BITS, is_count_high, one_packet, unpack_count};
use crate::state::table::key::{Key, Side};
use crate::state::table::memory::WORDS;
use crate::state::table::slab::Words;
use crate::state::tcp::{Life, RST, SYN, Tcp};
use crate::state::{Direction, Name, Origin, RuleId, Segment, Settings};
use towpath_wire::Time;

const TCP: u8 = 6;
const UDP: u8 = 17;
pub(crate) const SCTP: u8 = 132;
const UDP_LITE: u8 = 136;

// Flags of a state, in the low bits of the header.

/// The first packet came from the higher end of the key.
pub(crate) const FORWARD_HIGH: u64 = 1;
/// The state's source counts it (`dyn_source_max`).
pub(crate) const CAPPED: u64 = 1 << 1;
/// A parent counts it.
pub(crate) const LIMITED: u64 = 1 << 2;
/// It has a TCP window.
pub(crate) const STRICT: u64 = 1 << 3;
/// Its rule was deleted (`dyn_keep_states`).
pub(crate) const ORPHANED: u64 = 1 << 4;
/// The state was replied to and is evicted last (conntrack's IPS_ASSURED).
pub(crate) const ASSURED: u64 = 1 << 5;
/// It has wide counters.
pub(crate) const WIDE_COUNTS: u64 = 1 << 6;
/// The other side has replied (conntrack's IPS_SEEN_REPLY).
pub(crate) const SEEN_REPLY: u64 = 1 << 7;

/// All flags.
const FLAGS: u64 = (1 << GENERATION) - 1;

/// Position of the rule's [generation](crate::state::limits::rule_counts), between the flow name and the flags.
const GENERATION: u32 = 8;

/// Bits of the expiry word for what was seen of the connection, below the expiry.
const SEEN_BITS: u32 = 9;
const SEEN: u64 = (1 << SEEN_BITS) - 1;

/// Lifetimes are limited to this many seconds, less than 2^53 ns.
const MAX_LIFETIME: u32 = crate::state::LIFETIME_MAX;

/// Maximum jump in time, in ns, without a prior collection of expired states.
pub(crate) const MAX_TIME_JUMP: u64 = 1 << 52;

/// The state has no individual lifetime: the setting applies.
const NO_LIFETIME: u64 = 0xff_ffff;

/// Position of the window scales in the configuration word, four bits for each direction, above the lifetime.
const SCALES: u32 = 24;
/// The largest window scale (RFC 7323 section 2.3), also before the SYN was seen.
const MAX_SCALE: u8 = 14;
/// The window scales before a SYN was seen.
const UNKNOWN_SCALES: u64 = (MAX_SCALE as u64 | (MAX_SCALE as u64) << 4) << SCALES;
/// In the place of the window scales: every packet sets the lifetime.
const EVERY_PACKET: u64 = 0xff << SCALES;

/// Position of the [`Origin`] in the configuration word, above the window scales.
const ORIGIN: u32 = 32;

/// Position of the parent in the configuration word, above the origin. All ones is no parent.
const PARENT: u32 = 40;

/// The number of parents that states can refer to.
pub(crate) const MAX_PARENTS: u32 = (1 << (u64::BITS - PARENT)) - 1;

/// The fields of a packet that a state uses.
#[derive(Clone, Copy)]
pub(crate) struct PacketInfo<'a> {
    pub(crate) proto: u8,
    /// Bytes to count.
    pub(crate) bytes: u32,
    /// Used for TCP and SCTP only.
    pub(crate) segment: &'a Segment,
    pub(crate) at: BurstTime,
}

/// The time of a burst, and the expiry that most of its packets give: computed once per burst.
#[derive(Clone, Copy)]
pub(crate) struct BurstTime {
    pub(crate) now: Time,
    /// The expiry of a UDP state without an individual lifetime.
    udp: Time,
}

impl BurstTime {
    #[inline(always)]
    pub(crate) fn new(now: Time, settings: &Settings) -> Self {
        Self { now, udp: after(now, settings.dyn_udp_lifetime) }
    }
}

/// The contents of a new state.
pub(crate) struct NewEntry<const N: usize> {
    pub(crate) key: Key<N>,
    pub(crate) side: Side,
    pub(crate) rule: RuleId,
    pub(crate) name: Name,
    /// The rule's generation.
    pub(crate) generation: u8,
    /// [`CAPPED`], [`LIMITED`], [`STRICT`].
    pub(crate) flags: u64,
    pub(crate) parent: u32,
    pub(crate) lifetime: Option<u32>,
    /// Every packet sets the lifetime (`state-timeout`).
    pub(crate) every_packet: bool,
    /// Treat it as an established TCP connection.
    pub(crate) established: bool,
    pub(crate) origin: Origin,
}

/// The values that a state takes over from another rule ([`Entry::set_owner`]).
#[derive(Clone, Copy)]
pub(crate) struct NewOwner {
    pub(crate) rule: RuleId,
    pub(crate) name: Name,
    /// The rule's generation.
    pub(crate) generation: u8,
    /// The parent that counts the state, if `limited`.
    pub(crate) parent: u32,
    pub(crate) limited: bool,
    pub(crate) lifetime: Option<u32>,
    /// Every packet sets the lifetime (`state-timeout`).
    pub(crate) every_packet: bool,
    /// The rule checks TCP windows. A state without a window stays without.
    pub(crate) strict: bool,
}

/// How a packet changed the expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpiryChange {
    /// It is the same or later.
    Extended,
    /// It is sooner.
    Shortened(Time),
    /// Another connection begins in the state of one that has ended, or a SYN completes the handshake of one that was answered before.
    Opened,
}

/// What another gate has seen of a connection.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) proto: u8,
    /// The phase of the connection, in the form of its protocol.
    pub(crate) bits: u64,
    /// Its forward direction is the reverse direction here.
    pub(crate) reversed: bool,
    /// It has seen more packets, by the direction here.
    pub(crate) newer: [bool; 2],
}

/// Merges what was seen of a TCP connection. Returns the bits of the expiry word, and whether the other gate's expiry applies. `None`:
/// the other gate has seen less.
fn merge_tcp(own: u64, seen: Seen) -> Option<(u64, bool)> {
    let (own, other) = (unpack_tcp(own, 0), unpack_tcp(seen.bits, 0));
    let other = if seen.reversed { other.reversed() } else { other };
    match (own.ended(), other.ended()) {
        // Only a SYN of the forward direction begins another connection.
        (true, false) => seen.newer[0].then(|| (pack(other.seen), true)),
        (false, true) => (seen.newer != [false; 2]).then(|| (pack(own.seen | other.seen), true)),
        _ => Some((pack(own.seen | other.seen), false)),
    }
}

/// The words of one state.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a, const N: usize>(pub(crate) Words<'a, N>);

impl<'a, const N: usize> Entry<'a, N> {
    const HEADER: usize = N;
    const EXPIRY: usize = N + 1;
    const CONFIG: usize = N + 2;
    const ACKS: usize = N + 3;
    const COUNTS: usize = N + 4;

    /// Writes a new state, known to the caller only, with its first packet.
    pub(crate) fn init(self, new: &NewEntry<N>, packet: PacketInfo<'_>, settings: &Settings) {
        // Relaxed: the index publishes the state.
        let put = |at: usize, word: u64| self.0.word(at).store(word, Ordering::Relaxed);
        new.key.0.iter().enumerate().for_each(|(at, &word)| put(at, word));
        let forward = if new.side == Side::High { FORWARD_HIGH } else { 0 };
        let header = u64::from(new.rule.0) << 32 | u64::from(new.name.0.get()) << 16;
        put(Self::HEADER, header | u64::from(new.generation) << GENERATION | new.flags | forward);
        put(Self::CONFIG, config(new.parent, new.origin, UNKNOWN_SCALES, new.lifetime, new.every_packet));
        put(Self::ACKS, 0);
        (0..2).for_each(|direction| put(Self::COUNTS + direction, 0));
        let mut tcp = Tcp::default();
        if new.established {
            tcp.assume_established();
        }
        // For a first packet that refreshes nothing: a connection that is treated as established.
        let end = after(packet.at.now, settings.dyn_syn_lifetime);
        put(Self::EXPIRY, stamp(end) | pack(tcp.seen));
        let _ = self.count(Direction::Forward, packet.bytes);
        self.refresh(Direction::Forward, packet, settings);
    }

    /// Prefetches all words, or only the key and the words that show whether the state is live.
    #[inline(always)]
    pub(crate) fn prefetch(self) {
        self.0.prefetch();
    }

    #[inline(always)]
    pub(crate) fn prefetch_key(self) {
        const { assert!(Self::EXPIRY < WORDS) };
        self.0.prefetch_first();
    }

    #[inline]
    pub(crate) fn has_key(self, key: &Key<N>) -> bool {
        // Relaxed, here and in all loads below: these words were written before the slot number that the caller read with
        // acquire. Later changes of a word publish nothing.
        let differ = |(at, &word): (usize, &u64)| self.0.word(at).load(Ordering::Relaxed) ^ word;
        key.0.iter().enumerate().map(differ).fold(0, |all, word| all | word) == 0
    }

    pub(crate) fn key(self) -> Key<N> {
        Key(std::array::from_fn(|at| self.0.word(at).load(Ordering::Relaxed)))
    }

    /// Rule, flow name, generation and flags.
    #[inline]
    pub(crate) fn header(self) -> Header {
        Header(self.0.word(Self::HEADER).load(Ordering::Relaxed))
    }

    /// Sets a flag. Returns true if it was not set.
    pub(crate) fn set_flag(self, flag: u64) -> bool {
        // AcqRel: a worker that sets a flag after the one that unlinked the state sees that it was unlinked
        // (`States::widen_counts`). A flag publishes nothing else.
        self.0.word(Self::HEADER).fetch_or(flag, Ordering::AcqRel) & flag == 0
    }

    #[inline]
    pub(crate) fn is_live(self, now: Time) -> bool {
        is_sooner(stamp(now), self.expiry())
    }

    /// When the state expires: of the possible times, which differ by 417 days, the one nearest to `now`.
    pub(crate) fn expires(self, now: Time) -> Time {
        let ahead = (self.expiry() & !SEEN).wrapping_sub(stamp(now)).cast_signed() >> SEEN_BITS;
        Time::from_nanos(now.as_nanos().saturating_add_signed(ahead))
    }

    /// The flags seen on a TCP connection, with its last acknowledgement numbers.
    pub(crate) fn tcp(self) -> Tcp {
        unpack_tcp(self.expiry(), self.0.word(Self::ACKS).load(Ordering::Relaxed))
    }

    /// The phase of an SCTP association.
    pub(crate) fn sctp(self) -> sctp::Phase {
        sctp::Phase::from_bits(self.expiry() & SEEN)
    }

    /// The phase of the connection, in the form of its protocol.
    pub(crate) fn seen(self) -> u64 {
        self.expiry() & SEEN
    }

    /// Sets the contents of a saved state.
    pub(crate) fn restore(self, end: Time, seen: u64, acks: [u32; 2]) {
        // Relaxed, as in refresh_tcp(). A concurrent packet counts as having come before.
        self.0.word(Self::ACKS).store(u64::from(acks[0]) | u64::from(acks[1]) << 32, Ordering::Relaxed);
        self.0.word(Self::EXPIRY).store(stamp(end) | seen & SEEN, Ordering::Relaxed);
    }

    /// Merges what another gate has seen of the connection, with the expiry that it has there.
    pub(crate) fn merge(self, end: Time, seen: Seen) -> ExpiryChange {
        loop {
            let before = self.expiry();
            let later = if is_sooner(before, stamp(end)) { stamp(end) } else { before & !SEEN };
            let new = match seen.proto {
                TCP => match merge_tcp(before, seen) {
                    // What the other gate has seen is older.
                    None => return ExpiryChange::Extended,
                    Some((bits, true)) => stamp(end) | bits,
                    Some((bits, false)) => later | bits,
                },
                _ => later | before & SEEN,
            };
            let clock = self.0.word(Self::EXPIRY);
            // Relaxed: see refresh_tcp().
            if new != before
                && clock.compare_exchange(before, new, Ordering::Relaxed, Ordering::Relaxed).is_err()
            {
                continue;
            }
            return match is_sooner(new, before) {
                true => ExpiryChange::Shortened(end),
                false => ExpiryChange::Extended,
            };
        }
    }

    /// Where the first packet was received.
    pub(crate) fn origin(self) -> Origin {
        Origin::from_bits((self.0.word(Self::CONFIG).load(Ordering::Relaxed) >> ORIGIN) as u8)
    }

    /// Gives the state to another rule, with its parent and lifetime. The caller holds the locks of the flow, and the state is
    /// linked. Returns the header and the parent from before.
    pub(crate) fn set_owner(self, owner: &NewOwner) -> (Header, u32) {
        let parent = self.parent();
        let change = |before: u64| {
            let scales = if !before & EVERY_PACKET == 0 { UNKNOWN_SCALES } else { before & EVERY_PACKET };
            Some(config(owner.parent, self.origin(), scales, owner.lifetime, owner.every_packet))
        };
        // Relaxed: packets read the lifetime and the window scales alone. Only the thread that unlinks the state reads the
        // parent, after it had the locks that the caller holds.
        let _ = self.0.word(Self::CONFIG).fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        let gone = LIMITED | ORPHANED | if owner.strict { 0 } else { STRICT };
        let limited = if owner.limited { LIMITED } else { 0 };
        let own = u64::from(owner.rule.0) << 32
            | u64::from(owner.name.0.get()) << 16
            | u64::from(owner.generation) << GENERATION;
        let change = |header: u64| Some(own | header & FLAGS & !gone | limited);
        // AcqRel: as set_flag(), which other threads may call meanwhile.
        let header = self.0.word(Self::HEADER).fetch_update(Ordering::AcqRel, Ordering::Relaxed, change);
        (Header(header.unwrap_or_else(|header| header)), parent)
    }

    pub(crate) fn parent(self) -> u32 {
        match (self.0.word(Self::CONFIG).load(Ordering::Relaxed) >> PARENT) as u32 {
            MAX_PARENTS => u32::MAX,
            parent => parent,
        }
    }

    /// Counts a packet. Returns true if the counts must be moved soon.
    #[inline]
    #[must_use]
    pub(crate) fn count(self, direction: Direction, bytes: u32) -> bool {
        self.add_count(direction, one_packet(bytes))
    }

    /// Adds a count. Returns true if the counts must be moved soon.
    #[inline]
    #[must_use]
    pub(crate) fn add_count(self, direction: Direction, count: u64) -> bool {
        // Relaxed: a count publishes nothing.
        is_count_high(self.0.word(Self::COUNTS + direction as usize).fetch_add(count, Ordering::Relaxed))
    }

    /// Packets and bytes of a direction that this word counts.
    pub(crate) fn counts(self, direction: Direction) -> [u64; 2] {
        unpack_count(self.0.word(Self::COUNTS + direction as usize).load(Ordering::Relaxed))
    }

    /// Subtracts the counts of a direction from the word and returns them.
    pub(crate) fn take_counts(self, direction: Direction) -> [u64; 2] {
        let counted = self.counts(direction);
        // Relaxed: a count publishes nothing. A concurrent addition stays in the word.
        let word = counted[0] << BYTE_BITS | counted[1];
        self.0.word(Self::COUNTS + direction as usize).fetch_sub(word, Ordering::Relaxed);
        counted
    }

    /// Applies a packet.
    #[inline(always)]
    pub(crate) fn refresh(
        self,
        direction: Direction,
        packet: PacketInfo<'_>,
        settings: &Settings,
    ) -> ExpiryChange {
        // Separate, because most packets need nothing else.
        if packet.proto == UDP {
            return self.refresh_until(packet.at.udp, packet.at.now);
        }
        // Field by field: as a struct, the packet would be written to memory for UDP, too.
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
        match proto {
            TCP => self.refresh_tcp(direction, segment, now, settings),
            SCTP if settings.dyn_sctp => self.refresh_sctp(direction, segment.sctp_chunk, now, settings),
            UDP_LITE => self.refresh_until(udp, now),
            _ => self.refresh_until(after(now, settings.dyn_short_lifetime), now),
        }
    }

    /// Sets the expiry to `end`, or by the state's own lifetime.
    #[inline(always)]
    fn refresh_until(self, end: Time, now: Time) -> ExpiryChange {
        let end = self.lifetime().map_or(end, |seconds| after(now, seconds));
        // Relaxed store: no other thread changes what was seen of these protocols. The last store is that of the last
        // packet. What was seen of SCTP stays for when `dyn_sctp` is on again.
        let before = self.expiry();
        let new = stamp(end) | before & SEEN;
        if new != before {
            self.0.word(Self::EXPIRY).store(new, Ordering::Relaxed);
        }
        if is_sooner(new, before) { ExpiryChange::Shortened(end) } else { ExpiryChange::Extended }
    }

    fn refresh_tcp(
        self,
        direction: Direction,
        segment: &Segment,
        now: Time,
        settings: &Settings,
    ) -> ExpiryChange {
        let (flags, ack) = (segment.tcp_flags, segment.tcp_ack);
        let (clock, acks) = (self.0.word(Self::EXPIRY), self.0.word(Self::ACKS));
        loop {
            let (before, acks_before) = (clock.load(Ordering::Relaxed), acks.load(Ordering::Relaxed));
            let mut tcp = unpack_tcp(before, acks_before);
            let mut opened = false;
            if flags & (SYN | RST) != 0 {
                match self.opens_or_ends(&mut tcp, direction, segment, now, settings) {
                    Some(opens) => opened = opens,
                    None => return ExpiryChange::Extended,
                }
            }
            let life = tcp.segment(direction, flags, ack);
            // Relaxed: each word is consistent alone, and publishes nothing.
            let new = u64::from(tcp.ack[0]) | u64::from(tcp.ack[1]) << 32;
            if new != acks_before
                && acks.compare_exchange(acks_before, new, Ordering::Relaxed, Ordering::Relaxed).is_err()
            {
                continue;
            }
            // If the second exchange fails, the acknowledgement number that was just accepted is accepted once more.
            let end = self.tcp_lifetime(life, settings).map(|seconds| after(now, seconds));
            if let Some(change) = self.exchange(before, end, pack(tcp.seen)) {
                return match change {
                    ExpiryChange::Extended if opened => ExpiryChange::Opened,
                    change => change,
                };
            }
        }
    }

    /// The lifetime in seconds that a segment sets, if any.
    #[inline]
    fn tcp_lifetime(self, life: Option<Life>, settings: &Settings) -> Option<u32> {
        let seconds = match life {
            Some(Life::Ack) => return Some(self.lifetime().unwrap_or(settings.dyn_ack_lifetime)),
            Some(Life::Syn) => Some(settings.dyn_syn_lifetime),
            Some(Life::Fin) => Some(settings.dyn_fin_lifetime),
            Some(Life::Rst) => Some(settings.dyn_rst_lifetime),
            None => None,
        };
        if self.every_packet() { self.lifetime() } else { seconds }
    }

    /// Prepares the state for a SYN or a RST. A SYN that begins another connection resets `tcp`. Returns whether another connection
    /// begins or an answered one is established now, or `None` for a reset that is ignored. With strict tracking, the windows have already accepted the segment.
    #[cold]
    #[inline(never)]
    fn opens_or_ends(
        self,
        tcp: &mut Tcp,
        direction: Direction,
        segment: &Segment,
        now: Time,
        settings: &Settings,
    ) -> Option<bool> {
        if segment.tcp_flags & RST != 0 {
            let checked = settings.dyn_rst_check && !self.header().has(STRICT);
            return (!checked || tcp.accepts_reset(direction, segment, self.scales())).then_some(false);
        }
        let reopens = self.reopens(tcp, direction, segment.tcp_flags);
        if reopens {
            *tcp = Tcp::default();
        }
        if !tcp.is_established() && !self.every_packet() {
            self.set_scale(direction, segment.tcp_wscale.unwrap_or(0));
        }
        let (flags, ack, short) = (segment.tcp_flags, segment.tcp_ack, after(now, settings.dyn_syn_lifetime));
        let establishes = self.header().has(SEEN_REPLY)
            && !is_sooner(stamp(short), self.expiry())
            && Tcp { ..*tcp }.segment(direction, flags, ack) == Some(Life::Ack);
        Some(reopens || establishes)
    }

    /// Returns true if the segment begins another connection in this state. The state of a deleted rule ends with its
    /// connection: no rule has accepted another one.
    pub(crate) fn reopens(self, tcp: &Tcp, direction: Direction, flags: u8) -> bool {
        tcp.reopens(direction, flags) && !self.header().has(ORPHANED)
    }

    /// The window scales of both directions, the largest one if the SYN was not seen.
    fn scales(self) -> [u8; 2] {
        // Relaxed, here and below: a window scale publishes nothing.
        let config = self.0.word(Self::CONFIG).load(Ordering::Relaxed);
        [0, 4].map(|at| ((config >> (SCALES + at) & 0xf) as u8).min(MAX_SCALE))
    }

    /// Returns true if every packet sets the lifetime.
    #[inline]
    pub(crate) fn every_packet(self) -> bool {
        !self.0.word(Self::CONFIG).load(Ordering::Relaxed) & EVERY_PACKET == 0
    }

    fn set_scale(self, direction: Direction, scale: u8) {
        let at = SCALES + 4 * direction as u32;
        let scale = u64::from(scale.min(MAX_SCALE)) << at;
        // Another thread may hand the state to a rule meanwhile (set_owner). If it was first, the place of the window scales
        // may say that every packet sets the lifetime, and stays so. If this exchange is first, set_owner() sees the scale.
        let change = |config: u64| (!config & EVERY_PACKET != 0).then_some(config & !(0xf << at) | scale);
        let _ = self.0.word(Self::CONFIG).fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }

    fn refresh_sctp(
        self,
        direction: Direction,
        chunk: Option<u8>,
        now: Time,
        settings: &Settings,
    ) -> ExpiryChange {
        loop {
            let before = self.expiry();
            let mut phase = sctp::Phase::from_bits(before & SEEN);
            let seconds = phase.packet(direction, chunk).map(|life| match life {
                sctp::Life::Short => self.lifetime().unwrap_or(settings.dyn_short_lifetime),
                sctp::Life::Ack => self.lifetime().unwrap_or(settings.dyn_ack_lifetime),
                sctp::Life::Syn => settings.dyn_syn_lifetime,
                sctp::Life::Fin => settings.dyn_fin_lifetime,
                sctp::Life::Rst => settings.dyn_rst_lifetime,
            });
            let seconds = if self.every_packet() { self.lifetime() } else { seconds };
            let end = seconds.map(|seconds| after(now, seconds));
            if let Some(end) = self.exchange(before, end, phase.bits()) {
                return end;
            }
        }
    }

    /// Changes the expiry word from `before`. `end` is the new expiry, if any. Returns `None` if another thread
    /// changed it.
    #[inline]
    fn exchange(self, before: u64, end: Option<Time>, seen: u64) -> Option<ExpiryChange> {
        let new = end.map_or(before & !SEEN, stamp) | seen;
        if new != before {
            let clock = self.0.word(Self::EXPIRY);
            // Relaxed: see refresh_tcp().
            clock.compare_exchange(before, new, Ordering::Relaxed, Ordering::Relaxed).ok()?;
        }
        Some(match end {
            Some(end) if is_sooner(stamp(end), before) => ExpiryChange::Shortened(end),
            _ => ExpiryChange::Extended,
        })
    }

    #[inline]
    pub(crate) fn lifetime(self) -> Option<u32> {
        let keep = self.0.word(Self::CONFIG).load(Ordering::Relaxed) & NO_LIFETIME;
        (keep != NO_LIFETIME).then_some(keep as u32)
    }

    #[inline]
    fn expiry(self) -> u64 {
        self.0.word(Self::EXPIRY).load(Ordering::Relaxed)
    }
}

/// The header: rule, flow name, generation and flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header(u64);

impl Header {
    #[cfg(all(test, not(loom)))]
    pub(crate) fn of(rule: RuleId, generation: u8) -> Self {
        Self(u64::from(rule.0) << 32 | u64::from(generation) << GENERATION)
    }

    #[inline]
    pub(crate) fn rule(self) -> RuleId {
        RuleId((self.0 >> 32) as u32)
    }

    #[inline]
    pub(crate) fn generation(self) -> u8 {
        (self.0 >> GENERATION) as u8
    }

    #[inline]
    pub(crate) fn is_named(self, name: Name) -> bool {
        (self.0 >> 16) as u16 == name.0.get()
    }

    pub(crate) fn name(self) -> Name {
        std::num::NonZeroU16::new((self.0 >> 16) as u16).map_or(Name::DEFAULT, Name)
    }

    #[inline]
    pub(crate) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    /// The end of the key that the first packet came from.
    #[inline]
    pub(crate) fn forward(self) -> Side {
        if self.has(FORWARD_HIGH) { Side::High } else { Side::Low }
    }
}

/// The configuration word. A parent is below [`MAX_PARENTS`], or `u32::MAX` for none.
fn config(parent: u32, origin: Origin, scales: u64, lifetime: Option<u32>, every_packet: bool) -> u64 {
    let lifetime = lifetime.map_or(NO_LIFETIME, |seconds| seconds.min(MAX_LIFETIME).into());
    let scales = if every_packet { EVERY_PACKET } else { scales };
    u64::from(parent.min(MAX_PARENTS)) << PARENT | u64::from(origin.to_bits()) << ORIGIN | scales | lifetime
}

/// `now` plus `seconds`, or plus [`MAX_LIFETIME`] if that is less.
#[inline]
pub(crate) fn after(now: Time, seconds: u32) -> Time {
    Time::from_nanos(now.as_nanos().saturating_add(u64::from(seconds.min(MAX_LIFETIME)) * 1_000_000_000))
}

/// A time in the form of the expiry word.
#[inline]
fn stamp(time: Time) -> u64 {
    time.as_nanos() << SEEN_BITS
}

/// Returns true if expiry word `a` is before `b`.
#[inline]
fn is_sooner(a: u64, b: u64) -> bool {
    ((a & !SEEN).wrapping_sub(b & !SEEN)).cast_signed() < 0
}

/// The word of a TCP connection without its gaps.
#[inline]
fn pack(seen: u32) -> u64 {
    u64::from(seen & 7 | (seen >> 8 & 7) << 3 | (seen >> 16 & 7) << 6)
}

/// The connection of an expiry word and a word of acknowledgement numbers.
#[inline]
pub(crate) fn unpack_tcp(clock: u64, acks: u64) -> Tcp {
    let seen = clock & 7 | (clock >> 3 & 7) << 8 | (clock >> 6 & 7) << 16;
    Tcp { seen: seen as u32, ack: [acks as u32, (acks >> 32) as u32] }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::Pages;
    use crate::state::table::slab::Slab;

    /// The hand-over to a rule with `state-timeout` between the two looks of a SYN at the configuration.
    #[test]
    fn a_window_scale_does_not_replace_the_mark_of_state_timeout() {
        let slab = Slab::<2>::new(Pages::Base);
        let slot = slab.alloc_one().unwrap();
        let entry = Entry(slab.words(slot));
        for (every_packet, scales) in [(false, [7, MAX_SCALE]), (true, [MAX_SCALE; 2])] {
            let word = config(MAX_PARENTS, Origin::UNRECORDED, UNKNOWN_SCALES, Some(9), every_packet);
            entry.0.word(Entry::<2>::CONFIG).store(word, Ordering::Relaxed);
            entry.set_scale(Direction::Forward, 7);
            assert_eq!((entry.every_packet(), entry.scales()), (every_packet, scales));
        }
    }
}
