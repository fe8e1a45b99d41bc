//! A packet and its state: finding it, and what the packet does to it.

use std::borrow::Cow;

use super::{AddressFamily, ICMP, ICMP6, States, TCP};
use crate::state::concurrent::worker_counters::Counter;
use crate::state::sctp::Phase;
use crate::state::table::entry::{
    ANSWERED, BurstTime, Entry, ExpiryChange, Header, PacketInfo, REPLIED, SCTP, SPILLED, STRICT, is_high,
    one, unpack,
};
use crate::state::table::family::{Family, locked};
use crate::state::table::index::Probe;
use crate::state::table::key::{Key, Key4, Key6, Side};
use crate::state::tcp::window::{Fit, Window};
use crate::state::tcp::{ACK, SYN};
use crate::state::{Direction, Ends, Flow, Hit, Lookup, Segment};
use towpath_wire::Time;

/// What came of a packet.
pub(super) enum LookupResult {
    Hit(Hit),
    Miss,
    /// The state tracks strictly, and the packet does not fit.
    Invalid,
}

impl States {
    /// Does what [`States::lookup`] does for a packet that nobody sent, and counts none: for those who know by other means that
    /// a connection is alive. Whether its flow has a live state, into which the packet would fit.
    pub fn renew(&mut self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> bool {
        self.begin(now);
        let flow = &*self.keyed(flow);
        let at = BurstTime::new(now, &self.settings);
        let packet = PacketInfo { proto: flow.proto, bytes: 0, segment, at };
        match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                self.renew_by(&key, side, lookup, packet)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                self.renew_by(&key, side, lookup, packet)
            }
        }
    }

    fn renew_by<const N: usize>(
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
        let Some((slot, entry)) = self.live(probe, key, lookup, packet.at.now) else { return false };
        let header = entry.header();
        let direction = side.direction(header.forward());
        let strict = header.has(STRICT);
        let fit = if strict { self.fit(entry, slot, direction, *packet.segment) } else { Fit::Fits };
        if fit == Fit::Fits {
            self.refresh(entry, header, slot, direction, packet);
        }
        fit != Fit::Invalid
    }

    #[inline]
    pub(super) fn find(&self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> LookupResult {
        let flow = &*self.keyed(flow);
        let at = BurstTime::new(now, &self.settings);
        let packet = PacketInfo { proto: flow.proto, bytes: segment.bytes, segment, at };
        match flow.ends {
            Ends::V4(src, dst) => {
                let (key, side) = Key4::new(src, dst, flow);
                let probe = self.v4.index.probe(&key);
                self.find_by(probe, &key, side, lookup, packet)
            }
            Ends::V6(src, dst, zone) => {
                let (key, side) = Key6::new(src, dst, zone, flow);
                let probe = self.v6.index.probe(&key);
                self.find_by(probe, &key, side, lookup, packet)
            }
        }
    }

    #[inline]
    pub(super) fn find_by<const N: usize>(
        &self,
        probe: Probe,
        key: &Key<N>,
        side: Side,
        lookup: Lookup,
        packet: PacketInfo<'_>,
    ) -> LookupResult
    where
        Key<N>: AddressFamily<N>,
    {
        match self.live(probe, key, lookup, packet.at.now) {
            Some((slot, entry)) => self.hit(entry, slot, side, packet),
            None => LookupResult::Miss,
        }
    }

    /// The live state of a flow, and its slot.
    #[inline(always)]
    fn live<const N: usize>(
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
        let living = self.living(now);
        let guess = index.guess(probe).map(|slot| (slot, family.entry(slot)));
        guess.filter(|(_, entry)| Family::is_it(*entry, key, lookup, living)).or_else(|| {
            let slot = family.find(index, probe, key, lookup, living)?;
            Some((slot, family.entry(slot)))
        })
    }

    /// The live state of a flow, which stays as it is.
    #[inline]
    pub(super) fn seek<const N: usize>(
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
        let (_, entry) = self.live(probe, key, lookup, now)?;
        let header = entry.header();
        Some(Hit { rule: header.rule(), direction: side.direction(header.forward()) })
    }

    /// Takes a packet into the live state in `slot`.
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
        self.hit_loosely(entry, header, slot, side, packet);
        LookupResult::Hit(hit)
    }

    /// The same where the segment's place in its connection does not matter.
    #[inline(always)]
    pub(super) fn hit_loosely<const N: usize>(
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

    /// What a packet does to its state, but for being counted.
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
        if let ExpiryChange::Shortened(end) = entry.refresh(direction, packet, &self.settings) {
            Key::<N>::family(&self.shared).look_sooner(slot, end);
        }
        if !header.has(REPLIED) && (direction == Direction::Reverse || header.has(ANSWERED)) {
            self.answered(entry, direction, packet.proto, packet.segment);
        }
    }

    /// Takes a packet in of a state that counts as never replied to: one from the other side, or one after that.
    ///
    /// Whoever makes an address up has others answer to it, but does not hear the answer. So where there is a handshake the
    /// state waits for what its header says to the answer: with TCP an acknowledgement (RFC 9293, 3.5), with SCTP the cookie that
    /// the other side has found to be its own (RFC 9260, 5.1).
    #[cold]
    #[inline(never)]
    fn answered<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        direction: Direction,
        proto: u8,
        segment: &Segment,
    ) {
        let replied = match (proto, direction) {
            (TCP, Direction::Reverse) => false,
            (TCP, Direction::Forward) => segment.tcp_flags & (SYN | ACK) == ACK && !entry.tcp().was_reset(),
            (SCTP, _) if self.settings.dyn_sctp => match entry.sctp() {
                Phase::Unknown => direction == Direction::Reverse,
                phase => matches!(phase, Phase::Established(_)),
            },
            _ => direction == Direction::Reverse,
        };
        if replied {
            self.replied(entry);
        } else {
            entry.mark(ANSWERED);
        }
    }

    fn replied<const N: usize>(&self, entry: Entry<'_, N>) {
        if entry.mark(REPLIED) {
            self.count(Counter::Replied);
        }
    }

    /// Counts a packet in its state, or for it.
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
        let slot_counters = &Key::<N>::local(self).slot_counters;
        let high = match slot_counters.add(slot, direction as usize, one(bytes)) {
            Some(count) => is_high(count),
            None => entry.count(direction, bytes),
        };
        if high {
            self.spill(entry, slot);
        }
    }

    /// What a segment is to the connection of a state with strict tracking.
    #[cold]
    pub(super) fn fit<const N: usize>(
        &self,
        entry: Entry<'_, N>,
        slot: u32,
        direction: Direction,
        segment: Segment,
    ) -> Fit
    where
        Key<N>: AddressFamily<N>,
    {
        let again = direction == Direction::Forward && Window::begins(&segment) && entry.tcp().ended();
        let fit = |window: &mut Window| {
            if again {
                *window = Window::default();
            }
            window.segment(direction, &segment)
        };
        let fit = self.shared.windows.with(Key::<N>::V6, slot, fit).unwrap_or(Fit::Fits);
        if again {
            entry.forget();
        }
        fit
    }

    /// Takes counts that are about to overflow to where there is more room.
    #[cold]
    pub(super) fn spill<const N: usize>(&self, entry: Entry<'_, N>, slot: u32)
    where
        Key<N>: AddressFamily<N>,
    {
        let mut spilled = locked(&self.shared.spilled);
        entry.mark(SPILLED);
        let wide = spilled.entry((Key::<N>::V6, slot)).or_default();
        let slot_counters = &Key::<N>::local(self).slot_counters;
        for (at, direction) in [Direction::Forward, Direction::Reverse].into_iter().enumerate() {
            for [packets, bytes] in [entry.take_count(direction), unpack(slot_counters.take(slot, at))] {
                wide[2 * at] += packets;
                wide[2 * at + 1] += bytes;
            }
        }
        // Somebody took the state away: either he finds the mark and takes the counts away too, or it came too late for him, and
        // then it is seen here that there is no state any more. The slot is nobody else's before this call is over.
        if Key::<N>::family(&self.shared).slab.tick(slot).is_none() {
            spilled.remove(&(Key::<N>::V6, slot));
        }
    }

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
        let slot = family.find(index, index.probe(key), key, lookup, self.living(now))?;
        let header = family.entry(slot).header();
        let direction = side.direction(header.forward());
        if let (Some(seq), true) = (seq, header.has(STRICT)) {
            // Who makes an error up would have to know where the connection is (RFC 5927, 4.1).
            let sender =
                if direction == Direction::Forward { Direction::Reverse } else { Direction::Forward };
            let sent = self.shared.windows.with(Key::<N>::V6, slot, |window| window.sent(sender, seq));
            if sent == Some(false) {
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

    /// The flow as the key has it, as [`States::keyed`] says.
    #[inline(always)]
    pub(super) fn keyed_whole(&self, mut flow: Flow) -> Flow {
        if matches!(flow.proto, ICMP | ICMP6) && !self.settings.dyn_icmp_id {
            (flow.src_port, flow.dst_port) = (0, 0);
        }
        flow
    }

    /// The flow as the key has it: without the identifiers of ICMP queries unless they count.
    #[inline]
    pub(super) fn keyed<'a>(&self, flow: &'a Flow) -> Cow<'a, Flow> {
        if matches!(flow.proto, ICMP | ICMP6) && !self.settings.dyn_icmp_id {
            return Cow::Owned(Flow { src_port: 0, dst_port: 0, ..*flow });
        }
        Cow::Borrowed(flow)
    }
}
