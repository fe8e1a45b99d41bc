//! A packet and its state: finding it, and what the packet does to it.

use std::borrow::Cow;

use super::{ICMP, ICMP6, Own, States, TCP};
use crate::state::cell::{
    ANSWERED, Cell, End, Maker, Moment, REPLIED, SCTP, SPILLED, STRICT, Seen, is_high, one, unpack,
};
use crate::state::family::{Family, locked};
use crate::state::index::Probe;
use crate::state::key::{Key, Key4, Key6, Side};
use crate::state::sctp::Phase;
use crate::state::tally::Event;
use crate::state::tcp::{ACK, SYN};
use crate::state::window::{Fit, Window};
use crate::state::{Direction, Ends, Flow, Hit, Lookup, Segment};
use towpath_wire::Time;

/// What came of a packet.
pub(super) enum Found {
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
        let at = Moment::new(now, &self.settings);
        let packet = Seen { proto: flow.proto, bytes: 0, segment, at };
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

    fn renew_by<const N: usize>(&self, key: &Key<N>, side: Side, lookup: Lookup, packet: Seen<'_>) -> bool
    where
        Key<N>: Own<N>,
    {
        let probe = Key::<N>::local(self).index.probe(key);
        let Some((slot, cell)) = self.live(probe, key, lookup, packet.at.now) else { return false };
        let maker = cell.maker();
        let direction = side.direction(maker.forward());
        let strict = maker.has(STRICT);
        let fit = if strict { self.fit(cell, slot, direction, *packet.segment) } else { Fit::Fits };
        if fit == Fit::Fits {
            self.refresh(cell, maker, slot, direction, packet);
        }
        fit != Fit::Invalid
    }

    #[inline]
    pub(super) fn find(&self, flow: &Flow, lookup: Lookup, segment: &Segment, now: Time) -> Found {
        let flow = &*self.keyed(flow);
        let at = Moment::new(now, &self.settings);
        let packet = Seen { proto: flow.proto, bytes: segment.bytes, segment, at };
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
        packet: Seen<'_>,
    ) -> Found
    where
        Key<N>: Own<N>,
    {
        match self.live(probe, key, lookup, packet.at.now) {
            Some((slot, cell)) => self.hit(cell, slot, side, packet),
            None => Found::Miss,
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
    ) -> Option<(u32, Cell<'_, N>)>
    where
        Key<N>: Own<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let index = &Key::<N>::local(self).index;
        let living = self.living(now);
        let guess = index.guess(probe).map(|slot| (slot, family.cell(slot)));
        guess.filter(|(_, cell)| Family::is_it(*cell, key, lookup, living)).or_else(|| {
            let slot = family.find(index, probe, key, lookup, living)?;
            Some((slot, family.cell(slot)))
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
        Key<N>: Own<N>,
    {
        let probe = Key::<N>::local(self).index.probe(key);
        let (_, cell) = self.live(probe, key, lookup, now)?;
        let maker = cell.maker();
        Some(Hit { rule: maker.rule(), direction: side.direction(maker.forward()) })
    }

    /// Takes a packet into the live state in `slot`.
    #[inline(always)]
    pub(super) fn hit<const N: usize>(
        &self,
        cell: Cell<'_, N>,
        slot: u32,
        side: Side,
        packet: Seen<'_>,
    ) -> Found
    where
        Key<N>: Own<N>,
    {
        let maker = cell.maker();
        let direction = side.direction(maker.forward());
        let hit = Hit { rule: maker.rule(), direction };
        if maker.has(STRICT) {
            match self.fit(cell, slot, direction, *packet.segment) {
                Fit::Invalid => return Found::Invalid,
                Fit::Ignored => {
                    self.count_packet(cell, slot, direction, packet.bytes);
                    return Found::Hit(hit);
                }
                Fit::Fits => {}
            }
        }
        self.hit_loosely(cell, maker, slot, side, packet);
        Found::Hit(hit)
    }

    /// The same where the segment's place in its connection does not matter.
    #[inline(always)]
    pub(super) fn hit_loosely<const N: usize>(
        &self,
        cell: Cell<'_, N>,
        maker: Maker,
        slot: u32,
        side: Side,
        packet: Seen<'_>,
    ) -> Direction
    where
        Key<N>: Own<N>,
    {
        let direction = side.direction(maker.forward());
        self.count_packet(cell, slot, direction, packet.bytes);
        self.refresh(cell, maker, slot, direction, packet);
        direction
    }

    /// What a packet does to its state, but for being counted.
    #[inline(always)]
    fn refresh<const N: usize>(
        &self,
        cell: Cell<'_, N>,
        maker: Maker,
        slot: u32,
        direction: Direction,
        packet: Seen<'_>,
    ) where
        Key<N>: Own<N>,
    {
        if let End::Sooner(end) = cell.refresh(direction, packet, &self.settings) {
            Key::<N>::family(&self.shared).look_sooner(slot, end);
        }
        if !maker.has(REPLIED) && (direction == Direction::Reverse || maker.has(ANSWERED)) {
            self.answered(cell, direction, packet.proto, packet.segment);
        }
    }

    /// Takes a packet in of a state that counts as never replied to: one from the other side, or one after that.
    ///
    /// Whoever makes an address up has others answer to it, but does not hear the answer. So where there is a handshake the
    /// state waits for what its maker says to the answer: with TCP an acknowledgement (RFC 9293, 3.5), with SCTP the cookie that
    /// the other side has found to be its own (RFC 9260, 5.1).
    #[cold]
    #[inline(never)]
    fn answered<const N: usize>(
        &self,
        cell: Cell<'_, N>,
        direction: Direction,
        proto: u8,
        segment: &Segment,
    ) {
        let replied = match (proto, direction) {
            (TCP, Direction::Reverse) => false,
            (TCP, Direction::Forward) => segment.tcp_flags & (SYN | ACK) == ACK && !cell.tcp().was_reset(),
            (SCTP, _) if self.settings.dyn_sctp => match cell.sctp() {
                Phase::Unknown => direction == Direction::Reverse,
                phase => matches!(phase, Phase::Established(_)),
            },
            _ => direction == Direction::Reverse,
        };
        if replied {
            self.replied(cell);
        } else {
            cell.mark(ANSWERED);
        }
    }

    fn replied<const N: usize>(&self, cell: Cell<'_, N>) {
        if cell.mark(REPLIED) {
            self.count(Event::Replied);
        }
    }

    /// Counts a packet in its state, or for it.
    #[inline(always)]
    pub(super) fn count_packet<const N: usize>(
        &self,
        cell: Cell<'_, N>,
        slot: u32,
        direction: Direction,
        bytes: u32,
    ) where
        Key<N>: Own<N>,
    {
        let near = &Key::<N>::local(self).near;
        let high = match near.add(slot, direction as usize, one(bytes)) {
            Some(count) => is_high(count),
            None => cell.count(direction, bytes),
        };
        if high {
            self.spill(cell, slot);
        }
    }

    /// What a segment is to the connection of a state with strict tracking.
    #[cold]
    pub(super) fn fit<const N: usize>(
        &self,
        cell: Cell<'_, N>,
        slot: u32,
        direction: Direction,
        segment: Segment,
    ) -> Fit
    where
        Key<N>: Own<N>,
    {
        let again = direction == Direction::Forward && Window::begins(&segment) && cell.tcp().ended();
        let fit = |window: &mut Window| {
            if again {
                *window = Window::default();
            }
            window.segment(direction, &segment)
        };
        let fit = self.shared.windows.with(Key::<N>::V6, slot, fit).unwrap_or(Fit::Fits);
        if again {
            cell.forget();
        }
        fit
    }

    /// Takes counts that are about to overflow to where there is more room.
    #[cold]
    pub(super) fn spill<const N: usize>(&self, cell: Cell<'_, N>, slot: u32)
    where
        Key<N>: Own<N>,
    {
        let mut spilled = locked(&self.shared.spilled);
        cell.mark(SPILLED);
        let wide = spilled.entry((Key::<N>::V6, slot)).or_default();
        let near = &Key::<N>::local(self).near;
        for (at, direction) in [Direction::Forward, Direction::Reverse].into_iter().enumerate() {
            for [packets, bytes] in [cell.take_count(direction), unpack(near.take(slot, at))] {
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
        Key<N>: Own<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let index = &Key::<N>::local(self).index;
        let slot = family.find(index, index.probe(key), key, lookup, self.living(now))?;
        let maker = family.cell(slot).maker();
        let direction = side.direction(maker.forward());
        if let (Some(seq), true) = (seq, maker.has(STRICT)) {
            // Who makes an error up would have to know where the connection is (RFC 5927, 4.1).
            let sender =
                if direction == Direction::Forward { Direction::Reverse } else { Direction::Forward };
            let sent = self.shared.windows.with(Key::<N>::V6, slot, |window| window.sent(sender, seq));
            if sent == Some(false) {
                return None;
            }
        }
        Some(Hit { rule: maker.rule(), direction })
    }

    #[inline]
    pub(super) fn hit_of(&self, found: Found) -> Option<Hit> {
        match found {
            Found::Hit(hit) => Some(hit),
            Found::Miss => None,
            Found::Invalid => {
                self.count(Event::Unfit);
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
