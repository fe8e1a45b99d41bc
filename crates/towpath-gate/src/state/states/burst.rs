//! Bursts: lookups whose cache misses overlap.
//!
//! What: three stages. The flows' lines of the index are asked for; then, from their tags alone, the states; then each
//! packet is looked up, in the packets' order. What the tags told is a guess that the key confirms.

use super::{Found, Own, States};
use crate::Time;
use crate::state::cell::{Cell, Maker, Seen};
use crate::state::index::Probe;
use crate::state::key::{Key, Key4, Key6, Side};
use crate::state::{Ends, Flow, Hit, Lookup, Segment};

/// Packets that go through the stages together: so many lines are on their way at once.
const BURST: usize = 32;

impl States {
    /// [`States::lookup`] for each of the packets, in their order, whose cache misses overlap: `hits` has what each of
    /// them found.
    ///
    /// # Panics
    /// When there are not as many `hits` as `packets`.
    pub fn lookup_burst(
        &mut self,
        packets: &[(Flow, Segment)],
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) {
        assert_eq!(packets.len(), hits.len(), "a place for each packet's hit");
        self.begin(now);
        for (packets, hits) in packets.chunks(BURST).zip(hits.chunks_mut(BURST)) {
            let bursts = self.fetched(packets.iter().map(|(flow, _)| flow));
            bursts.v4.look_up(self, packets, lookup, now, hits);
            bursts.v6.look_up(self, packets, lookup, now, hits);
            self.bursts = Some(bursts);
        }
    }

    /// Finds the live state of each of the flows, in either direction, and leaves it as it is: for those who only ask.
    ///
    /// # Panics
    /// When there are not as many `hits` as `flows`.
    pub fn peek_burst(&mut self, flows: &[Flow], lookup: Lookup, now: Time, hits: &mut [Option<Hit>]) {
        assert_eq!(flows.len(), hits.len(), "a place for each flow's hit");
        self.begin(now);
        for (flows, hits) in flows.chunks(BURST).zip(hits.chunks_mut(BURST)) {
            let bursts = self.fetched(flows.iter());
            bursts.v4.peek(self, lookup, now, hits);
            bursts.v6.peek(self, lookup, now, hits);
            self.bursts = Some(bursts);
        }
    }

    /// Has what lookups of these flows will read on its way to the cache: for lookups that follow soon, one by one.
    pub fn prefetch<'a>(&mut self, flows: impl Iterator<Item = &'a Flow>) {
        self.stamp();
        let mut flows = flows.peekable();
        while flows.peek().is_some() {
            let bursts = self.fetched(flows.by_ref().take(BURST));
            self.bursts = Some(bursts);
        }
    }

    /// Takes the flows, at most [`BURST`], through the first two stages. What it gives is to be given back.
    #[inline]
    fn fetched<'a>(&mut self, flows: impl Iterator<Item = &'a Flow>) -> Box<Bursts> {
        let mut bursts = self.bursts.take().unwrap_or_default();
        let Bursts { v4, v6 } = &mut *bursts;
        (v4.len, v6.len) = (0, 0);
        for (at, flow) in flows.enumerate() {
            let flow = &*self.keyed(flow);
            match flow.ends {
                Ends::V4(src, dst) => v4.add(self, at, Key4::new(src, dst, flow)),
                Ends::V6(src, dst, zone) => v6.add(self, at, Key6::new(src, dst, zone, flow)),
            }
        }
        v4.fetch(self);
        v6.fetch(self);
        bursts
    }
}

/// Packets of both families on their way: a worker's own, which it keeps, for it is too much to make for each burst.
#[derive(Debug, Default)]
pub(super) struct Bursts {
    v4: Burst<2>,
    v6: Burst<6>,
}

/// Packets of one family on their way through the stages of a burst.
#[derive(Debug)]
struct Burst<const N: usize> {
    packets: [Option<Fetched<N>>; BURST],
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Fetched<const N: usize> {
    at: u32,
    /// A slot that the index has for the tag: nearly always the flow's.
    guess: Option<u32>,
    side: Side,
    probe: Probe,
    key: Key<N>,
}

impl<const N: usize> Default for Burst<N> {
    fn default() -> Self {
        Self { packets: [None; BURST], len: 0 }
    }
}

impl<const N: usize> Burst<N>
where
    Key<N>: Own<N>,
{
    /// Takes a packet, and has its line of the index on its way.
    #[inline]
    fn add(&mut self, states: &States, at: usize, (key, side): (Key<N>, Side)) {
        let index = &Key::<N>::local(states).index;
        let probe = index.probe(&key);
        index.prefetch(probe);
        self.packets[self.len] = Some(Fetched { at: at as u32, guess: None, side, probe, key });
        self.len += 1;
    }

    /// Has the states on their way, as far as the index tells by tags alone.
    #[inline]
    fn fetch(&mut self, states: &States) {
        let family = Key::<N>::family(&states.shared);
        let index = &Key::<N>::local(states).index;
        let mut elsewhere = 0_u32;
        for (at, packet) in self.packets[..self.len].iter_mut().flatten().enumerate() {
            packet.guess = index.guess(packet.probe);
            match packet.guess {
                Some(slot) => family.slab.prefetch(slot),
                None => elsewhere |= 1 << at,
            }
        }
        while elsewhere != 0 {
            if let Some(packet) = &mut self.packets[elsewhere.trailing_zeros() as usize] {
                packet.guess = index.guess_second(packet.probe);
                if let Some(slot) = packet.guess {
                    family.slab.prefetch(slot);
                }
            }
            elsewhere &= elsewhere - 1;
        }
    }

    /// The slot of the packet's state. The guess was made in this call, so that a state of the flow in it is what a
    /// lookup would have found then.
    #[inline]
    fn find<'s>(
        packet: &Fetched<N>,
        states: &'s States,
        lookup: Lookup,
        now: Time,
    ) -> Option<(u32, Cell<'s, N>)> {
        let family = Key::<N>::family(&states.shared);
        let Fetched { guess, probe, key, .. } = packet;
        let found = match guess.map(|slot| (slot, family.cell(slot))) {
            Some((slot, cell)) if cell.is(key) => {
                // Most flows have one state, and it is live.
                if lookup == Lookup::Any && cell.live(now) {
                    return Some((slot, cell));
                }
                family.choose(slot, lookup, now)
            }
            _ => family.find(&Key::<N>::local(states).index, *probe, key, lookup, now),
        };
        found.map(|slot| (slot, family.cell(slot)))
    }

    #[inline]
    fn peek(&self, states: &States, lookup: Lookup, now: Time, hits: &mut [Option<Hit>]) {
        for packet in self.packets[..self.len].iter().flatten() {
            let maker = |(_, cell): (u32, Cell<'_, N>)| cell.maker();
            let direction = |maker: Maker| packet.side.direction(maker.forward());
            let hit = |maker: Maker| Hit { rule: maker.rule(), direction: direction(maker) };
            hits[packet.at as usize] = Self::find(packet, states, lookup, now).map(maker).map(hit);
        }
    }

    #[inline]
    fn look_up(
        &self,
        states: &States,
        packets: &[(Flow, Segment)],
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) {
        for packet in self.packets[..self.len].iter().flatten() {
            let (flow, segment) = &packets[packet.at as usize];
            let seen = Seen { proto: flow.proto, segment, now };
            let found = match Self::find(packet, states, lookup, now) {
                Some((slot, cell)) => states.hit(cell, slot, packet.side, seen),
                None => Found::Miss,
            };
            hits[packet.at as usize] = states.hit_of(found);
        }
    }
}

const _: () = assert!(BURST <= u32::BITS as usize);
