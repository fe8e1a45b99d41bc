//! A packet and its state: the lookup, and what the packet changes in the state.

use std::borrow::Cow;
use std::time::Duration;

use towpath_wire::Time;

use super::{AddressFamily, ICMP, ICMP6, States, TCP};
use crate::state::concurrent::worker_counters::Counter;
use crate::state::events::EventKind;
use crate::state::sctp::Phase;
use crate::state::table::count::{count_of, is_count_high, one_packet, small_count, unpack_count};
use crate::state::table::entry::{
    ASSURED, BurstTime, Entry, ExpiryChange, Header, PacketInfo, SCTP, SEEN_REPLY, STRICT, WIDE_COUNTS,
};
use crate::state::table::family::Family;
use crate::state::table::index::Probe;
use crate::state::table::key::{Key, Side, with_key};
use crate::state::table::wide_counters::Counts;
use crate::state::tcp::window::{Fit, Window};
use crate::state::tcp::{ACK, RST, SYN};
use crate::state::{Direction, Flow, Hit, Listed, Lookup, Segment};

/// The result of a lookup with a packet.
pub(super) enum LookupResult {
    Hit(Hit),
    Miss,
    /// The state has strict tracking, and the packet does not fit into its connection.
    Invalid,
}

impl States {
    /// Refreshes the state of a flow as [`States::lookup`] with this packet does, without counting a packet. For callers that
    /// know by other means that a connection is alive. Returns true if the flow has a live state that the packet fits.
    pub fn renew(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> bool {
        self.begin(now);
        let flow = &*self.key_flow(flow);
        let time = BurstTime::new(now, &self.settings);
        let packet = PacketInfo { proto: flow.proto, bytes: 0, segment, at: time };
        with_key!(flow, |key, side| self.renew_key(&key, side, lookup, packet))
    }

    fn renew_key<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        packet: PacketInfo<'_>,
    ) -> bool
    where
        Key<N>: AddressFamily<N>,
    {
        let probe = Key::<N>::local(self).index.probe(key);
        let Some((slot, entry)) = self.find_live(probe, key, lookup, packet.at.now) else { return false };
        let header = entry.header();
        let direction = side.direction(header.forward());
        let strict = header.has(STRICT);
        let fit = if strict { self.fit(entry, slot, direction, *packet.segment) } else { Fit::Fits };
        if fit == Fit::Fits {
            self.refresh(entry, header, slot, direction, packet);
        }
        fit != Fit::Invalid
    }

    /// Counts packets that no worker saw and refreshes the state of their flow; `segment` is the last of them. Returns the time until the
    /// state expires, if the flow has a live one. A state with strict tracking is not for such packets.
    pub(crate) fn count_unseen(
        &mut self,
        flow: &Flow,
        lookup: Lookup,
        counts: [u64; 2],
        segment: &Segment,
        now: Time,
    ) -> Option<Duration> {
        self.begin(now);
        let flow = &*self.key_flow(flow);
        let time = BurstTime::new(now, &self.settings);
        let packet = PacketInfo { proto: flow.proto, bytes: 0, segment, at: time };
        with_key!(flow, |key, side| self.count_unseen_key(&key, side, lookup, counts, packet))
    }

    fn count_unseen_key<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        [mut packets, mut bytes]: [u64; 2],
        packet: PacketInfo<'_>,
    ) -> Option<Duration>
    where
        Key<N>: AddressFamily<N>,
    {
        let probe = Key::<N>::local(self).index.probe(key);
        let (slot, entry) = self.find_live(probe, key, lookup, packet.at.now)?;
        let header = entry.header();
        let direction = side.direction(header.forward());
        while packets > 0 || bytes > 0 {
            // Small enough that a count does not pass from below the high mark to overflow.
            let (some_packets, some_bytes) = (packets.min(1 << 20), bytes.min(1 << 29));
            (packets, bytes) = (packets - some_packets, bytes - some_bytes);
            self.add_count(entry, slot, direction, count_of(some_packets, some_bytes));
        }
        if !header.has(STRICT) {
            self.refresh(entry, header, slot, direction, packet);
        }
        Some(entry.expires(packet.at.now).since(packet.at.now))
    }

    /// The flow's live state as listings show it. Changes nothing.
    pub fn listed(&mut self, flow: &Flow, lookup: Lookup, now: Time) -> Option<Listed> {
        self.begin(now);
        self.peek_packet(flow, lookup, &Segment::default(), now).map(|(listed, ..)| listed)
    }

    /// The flow's live state as listings show it, the direction of the packet in it, and whether the packet fits it. Changes
    /// nothing.
    pub(crate) fn peek_packet(
        &self,
        flow: &Flow,
        lookup: Lookup,
        segment: &Segment,
        now: Time,
    ) -> Option<(Listed, Direction, bool)> {
        let flow = &*self.key_flow(flow);
        with_key!(flow, |key, side| self.peek_packet_key(&key, side, lookup, segment, now))
    }

    fn peek_packet_key<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        segment: &Segment,
        now: Time,
    ) -> Option<(Listed, Direction, bool)>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let probe = Key::<N>::local(self).index.probe(key);
        let (slot, entry) = self.find_live(probe, key, lookup, now)?;
        let header = entry.header();
        let direction = side.direction(header.forward());
        let fits = !header.has(STRICT) || {
            // In a copy of the window.
            let tcp = entry.tcp();
            let fit = |window: &mut Window| {
                let mut window = if entry.reopens(&tcp, direction, segment.tcp_flags) {
                    Window::default()
                } else {
                    *window
                };
                window.segment(direction, segment)
            };
            let ended = segment.tcp_flags & RST != 0 && tcp.ended();
            ended || family.windows.with(slot, fit) != Some(Fit::Invalid)
        };
        Some((family.listed(slot, now), direction, fits))
    }

    /// Finds the flow's live state and applies the packet to it.
    #[inline]
    pub(super) fn find(&self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> LookupResult {
        let flow = &*self.key_flow(flow);
        let time = BurstTime::new(now, &self.settings);
        let packet = PacketInfo { proto: flow.proto, bytes: segment.bytes, segment, at: time };
        with_key!(flow, |key, side| self.find_key(&key, side, lookup, packet))
    }

    #[inline]
    fn find_key<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        packet: PacketInfo<'_>,
    ) -> LookupResult
    where
        Key<N>: AddressFamily<N>,
    {
        let probe = Key::<N>::local(self).index.probe(key);
        match self.find_live(probe, key, lookup, packet.at.now) {
            Some((slot, entry)) => self.hit(entry, slot, side, packet),
            None => LookupResult::Miss,
        }
    }

    /// The flow's live state and its slot.
    #[inline(always)]
    fn find_live<const N: usize>(
        &self,
        probe: Probe,
        key: &Key<N>,
        lookup: Lookup,
        now: Time,
    ) -> Option<(u32, Entry<'_, N>)>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let index = &Key::<N>::local(self).index;
        let live = self.live(now);
        let hint = index.hint(probe).map(|slot| (slot, family.entry(slot)));
        hint.filter(|(_, entry)| Family::matches(*entry, key, lookup, live)).or_else(|| {
            let slot = family.find(index, probe, key, lookup, live)?;
            Some((slot, family.entry(slot)))
        })
    }

    /// Finds the flow's live state without changing it.
    #[inline]
    pub(super) fn peek_key<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        now: Time,
    ) -> Option<Hit>
    where
        Key<N>: AddressFamily<N>,
    {
        let probe = Key::<N>::local(self).index.probe(key);
        let (_, entry) = self.find_live(probe, key, lookup, now)?;
        let header = entry.header();
        Some(Hit { rule: header.rule(), direction: side.direction(header.forward()) })
    }

    /// Applies a packet to the live state in `slot`.
    #[inline(always)]
    pub(super) fn hit<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        slot: u32,
        side: Side,
        packet: PacketInfo<'_>,
    ) -> LookupResult
    where
        Key<N>: AddressFamily<N>,
    {
        let header = entry.header();
        let direction = side.direction(header.forward());
        let hit = Hit { rule: header.rule(), direction };
        if header.has(STRICT) {
            match self.fit(entry, slot, direction, *packet.segment) {
                Fit::Invalid => return LookupResult::Invalid,
                Fit::Ignored => {
                    self.count_packet(entry, slot, direction, packet.bytes);
                    return LookupResult::Hit(hit);
                }
                Fit::Fits => {}
            }
        }
        self.hit_unchecked(entry, header, slot, side, packet);
        LookupResult::Hit(hit)
    }

    /// As [`States::hit`], without the check of a TCP segment against its connection.
    #[inline(always)]
    pub(super) fn hit_unchecked<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        header: Header,
        slot: u32,
        side: Side,
        packet: PacketInfo<'_>,
    ) -> Direction
    where
        Key<N>: AddressFamily<N>,
    {
        let direction = side.direction(header.forward());
        self.count_packet(entry, slot, direction, packet.bytes);
        self.refresh(entry, header, slot, direction, packet);
        direction
    }

    /// Applies a packet to a state, except that it does not count it.
    #[inline(always)]
    fn refresh<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        header: Header,
        slot: u32,
        direction: Direction,
        packet: PacketInfo<'_>,
    ) where
        Key<N>: AddressFamily<N>,
    {
        match entry.refresh(direction, packet, &self.settings) {
            ExpiryChange::Extended => {}
            change => self.phase_changed::<N>(slot, change),
        }
        if !header.has(ASSURED) && (direction == Direction::Reverse || header.has(SEEN_REPLY)) {
            self.replied(entry, slot, direction, packet.proto, packet.segment);
        }
    }

    #[cold]
    #[inline(never)]
    fn phase_changed<const N: usize>(&self, slot: u32, change: ExpiryChange)
    where
        Key<N>: AddressFamily<N>,
    {
        if let ExpiryChange::Shortened(expires) = change {
            Key::<N>::family(&self.shared).schedule_sooner(slot, expires);
        }
        self.record::<N>(EventKind::Updated, slot);
    }

    /// Handles a packet of a state that is not assured: a reply, or a packet after one.
    ///
    /// A sender that forges its address makes another host reply, but does not receive the reply. Where the protocol has a
    /// handshake, the state is assured only by what its maker answers to the reply: in TCP an acknowledgement (RFC 9293, 3.5), in
    /// SCTP the cookie that the other side recognizes as its own (RFC 9260, 5.1).
    #[cold]
    #[inline(never)]
    fn replied<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        slot: u32,
        direction: Direction,
        proto: u8,
        segment: &Segment,
    ) where
        Key<N>: AddressFamily<N>,
    {
        let assured = match (proto, direction) {
            (TCP, Direction::Reverse) => false,
            (TCP, Direction::Forward) => {
                segment.tcp_flags & (SYN | RST | ACK) == ACK && !entry.tcp().was_reset()
            }
            (SCTP, _) if self.settings.dyn_sctp => match entry.sctp() {
                Phase::Unknown => direction == Direction::Reverse,
                phase => matches!(phase, Phase::Established(_)),
            },
            _ => direction == Direction::Reverse,
        };
        if !assured {
            if entry.set_flag(SEEN_REPLY) {
                self.record::<N>(EventKind::Replied, slot);
            }
        } else if entry.set_flag(ASSURED) {
            self.count(Counter::Assured);
            let replied = entry.header().has(SEEN_REPLY);
            self.record::<N>(if replied { EventKind::Updated } else { EventKind::Replied }, slot);
        }
    }

    /// Counts a packet, in the worker's counters of the slot or in the state.
    #[inline(always)]
    pub(super) fn count_packet<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        slot: u32,
        direction: Direction,
        bytes: u32,
    ) where
        Key<N>: AddressFamily<N>,
    {
        self.add_count(entry, slot, direction, one_packet(bytes));
    }

    #[inline(always)]
    fn add_count<const N: usize>(&self, entry: Entry<'_, N>, slot: u32, direction: Direction, count: u64)
    where
        Key<N>: AddressFamily<N>,
    {
        let slot_counters = &Key::<N>::local(self).slot_counters;
        let high = match slot_counters.add(slot, direction as usize, count) {
            Some(count) => is_count_high(count),
            None => entry.add_count(direction, count),
        };
        if high {
            self.widen_counts(entry, slot);
        }
    }

    /// Checks a segment against the connection of a state with strict tracking.
    #[cold]
    fn fit<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        slot: u32,
        direction: Direction,
        segment: Segment,
    ) -> Fit
    where
        Key<N>: AddressFamily<N>,
    {
        let tcp = entry.tcp();
        if segment.tcp_flags & RST != 0 && tcp.ended() {
            // There is nothing left to protect, and its number may be that of a later connection: Linux checks none either.
            return Fit::Fits;
        }
        // The refresh that follows begins another connection, too.
        let reopens = entry.reopens(&tcp, direction, segment.tcp_flags);
        let fit = |window: &mut Window| {
            if reopens {
                *window = Window::default();
            }
            window.segment(direction, &segment)
        };
        Key::<N>::family(&self.shared).windows.with(slot, fit).unwrap_or(Fit::Fits)
    }

    /// Moves counts that are about to overflow to the [wide counters](crate::state::table::wide_counters).
    #[cold]
    fn widen_counts<const N: usize>(&self, entry: Entry<'_, N>, slot: u32)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot_counters = &Key::<N>::local(self).slot_counters;
        family.wide_counters.update(slot, |wide| {
            entry.set_flag(WIDE_COUNTS);
            for direction in [Direction::Forward, Direction::Reverse] {
                let at = direction as usize;
                for [packets, bytes] in
                    [entry.take_counts(direction), unpack_count(slot_counters.take(slot, at))]
                {
                    wide[at][0] += packets;
                    wide[at][1] += bytes;
                }
            }
            // Another worker may have unlinked the state. If our flag came first, that worker sees it and removes the wide
            // counts. If its own read-modify-write of the flags came first, this load sees that the slot has no state. The slot
            // is not reused before the end of this call.
            family.slab.is_occupied(slot)
        });
    }

    /// Adds packets and bytes that another table has counted: to the state's words if they have room, otherwise to the wide counters.
    pub(super) fn add_counts<const N: usize>(&self, entry: Entry<'_, N>, slot: u32, counts: Counts)
    where
        Key<N>: AddressFamily<N>,
    {
        if counts == [[0; 2]; 2] {
            return;
        }
        let directions = [Direction::Forward, Direction::Reverse];
        let words = directions.map(|direction| {
            small_count(entry.counts(direction))?;
            small_count(counts[direction as usize])
        });
        if let [Some(forward), Some(reverse)] = words {
            for (direction, count) in directions.into_iter().zip([forward, reverse]) {
                if entry.add_count(direction, count) {
                    self.widen_counts(entry, slot);
                }
            }
            return;
        }
        let family = Key::<N>::family(&self.shared);
        family.wide_counters.update(slot, |wide| {
            entry.set_flag(WIDE_COUNTS);
            for (wide, more) in wide.iter_mut().flatten().zip(counts.iter().flatten()) {
                *wide += more;
            }
            // As in `widen_counts`: the flag is set first, so that the worker that unlinks the state removes the wide counts.
            family.slab.is_occupied(slot)
        });
    }

    /// Finds the live state that an ICMP error refers to. `seq` is the TCP sequence number that it quotes.
    pub(super) fn related<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        seq: Option<u32>,
        now: Time,
    ) -> Option<Hit>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let index = &Key::<N>::local(self).index;
        let slot = family.find(index, index.probe(key), key, lookup, self.live(now))?;
        let header = family.entry(slot).header();
        let direction = side.direction(header.forward());
        if let (Some(seq), true) = (seq, header.has(STRICT)) {
            // A forged error must quote a sequence number in flight (RFC 5927, 4.1).
            let sender = match direction {
                Direction::Forward => Direction::Reverse,
                Direction::Reverse => Direction::Forward,
            };
            if family.windows.with(slot, |window| window.sent(sender, seq)) == Some(false) {
                return None;
            }
        }
        Some(Hit { rule: header.rule(), direction })
    }

    #[inline]
    pub(super) fn hit_of(&self, found: LookupResult) -> Option<Hit> {
        match found {
            LookupResult::Hit(hit) => Some(hit),
            LookupResult::Miss => None,
            LookupResult::Invalid => {
                self.count(Counter::Unfit);
                None
            }
        }
    }

    /// As [`States::key_flow`], by value.
    #[inline(always)]
    pub(super) fn key_flow_owned(&self, mut flow: Flow) -> Flow {
        if matches!(flow.proto, ICMP | ICMP6) && !self.settings.dyn_icmp_id {
            (flow.src_port, flow.dst_port) = (0, 0);
        }
        flow
    }

    /// The flow that is the key of the packet's state: without the identifier of an ICMP query, unless `dyn_icmp_id` is on.
    #[inline]
    pub(super) fn key_flow<'a>(&self, flow: &'a Flow) -> Cow<'a, Flow> {
        if matches!(flow.proto, ICMP | ICMP6) && !self.settings.dyn_icmp_id {
            return Cow::Owned(Flow { src_port: 0, dst_port: 0, ..*flow });
        }
        Cow::Borrowed(flow)
    }
}
