//! Bursts: lookups whose cache misses overlap.
//!
//! What: three stages. The flows' lines of the index are asked for; then, from their tags alone, the states; then each
//! packet is looked up, in the packets' order. What the tags told is a guess that the key confirms.

use super::{Found, Own, States};
use crate::Time;
use crate::state::cell::{Maker, Seen};
use crate::state::index::Probe;
use crate::state::key::{Key, Side};
use crate::state::{Flow, Hit, Lookup, Segment};

/// Packets that go through the stages together: so many lines are on their way at once.
pub(super) const BURST: usize = 32;

/// Packets of one family on their way through the stages of a burst.
pub(super) struct Burst<const N: usize> {
    packets: [Option<Fetched<N>>; BURST],
    len: usize,
}

#[derive(Clone, Copy)]
struct Fetched<const N: usize> {
    at: u32,
    /// A slot that the index has for the tag: nearly always the flow's.
    guess: Option<u32>,
    side: Side,
    probe: Probe,
    key: Key<N>,
}

impl<const N: usize> Burst<N>
where
    Key<N>: Own<N>,
{
    pub(super) fn new() -> Self {
        Self { packets: [None; BURST], len: 0 }
    }

    /// Takes a packet, and has its line of the index on its way.
    #[inline]
    pub(super) fn add(&mut self, states: &States, at: usize, (key, side): (Key<N>, Side)) {
        let index = &Key::<N>::local(states).index;
        let probe = index.probe(&key);
        index.prefetch(probe);
        self.packets[self.len] = Some(Fetched { at: at as u32, guess: None, side, probe, key });
        self.len += 1;
    }

    /// Has the states on their way, as far as the index tells by tags alone.
    #[inline]
    pub(super) fn fetch(&mut self, states: &States) {
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
    fn find(packet: &Fetched<N>, states: &States, lookup: Lookup, now: Time) -> Option<u32> {
        let family = Key::<N>::family(&states.shared);
        let Fetched { guess, probe, key, .. } = packet;
        if let Some(first) = guess.filter(|&slot| family.cell(slot).is(key)) {
            return family.choose(first, lookup, now);
        }
        family.find(&Key::<N>::local(states).index, *probe, key, lookup, now)
    }

    #[inline]
    pub(super) fn peek(&self, states: &States, lookup: Lookup, now: Time, hits: &mut [Option<Hit>]) {
        let family = Key::<N>::family(&states.shared);
        for packet in self.packets[..self.len].iter().flatten() {
            let maker = |slot| family.cell(slot).maker();
            let direction = |maker: Maker| packet.side.direction(maker.forward());
            let hit = |maker: Maker| Hit { rule: maker.rule(), direction: direction(maker) };
            hits[packet.at as usize] = Self::find(packet, states, lookup, now).map(maker).map(hit);
        }
    }

    #[inline]
    pub(super) fn look_up(
        &self,
        states: &States,
        packets: &[(Flow, Segment)],
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) {
        let family = Key::<N>::family(&states.shared);
        for packet in self.packets[..self.len].iter().flatten() {
            let (flow, segment) = &packets[packet.at as usize];
            let seen = Seen { proto: flow.proto, segment, now };
            let found = match Self::find(packet, states, lookup, now) {
                Some(slot) => states.hit(family, slot, packet.side, seen),
                None => Found::Miss,
            };
            hits[packet.at as usize] = states.hit_of(found);
        }
    }
}

const _: () = assert!(BURST <= u32::BITS as usize);
