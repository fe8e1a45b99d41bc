//! Bursts: lookups whose cache misses overlap.
//!
//! What: three stages. The flows' lines of the index are asked for; then, from their tags alone, the states; then each
//! packet is looked up, in the packets' order. What the tags told is a guess that the key confirms.
//!
//! Invariant: a guess is good as long as the worker has not said since that it knows no slots: [`States::is_fresh`].

use super::{Found, Own, States, TELL};
use crate::Time;
use crate::state::cell::{Cell, Maker, STRICT, Seen};
use crate::state::index::Probe;
use crate::state::key::{Key, Key4, Key6, Side, Unpack};
use crate::state::{Ends, Flow, Hit, Lookup, RuleId, Segment};

/// Packets that go through the stages of a burst together: so many cache lines are on their way at once.
pub const BURST: usize = 32;

/// No guess.
const NONE: u32 = u32::MAX;

impl States {
    /// [`States::lookup`] for each of the packets, in their order, whose cache misses overlap: `hits` has what each of
    /// them found.
    ///
    /// # Panics
    /// When there are not as many `hits` as `packets`.
    pub fn lookup_burst(
        &mut self,
        packets: impl IntoIterator<Item = (Flow, Segment)>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) {
        self.begin(now);
        let mut packets = packets.into_iter();
        for hits in hits.chunks_mut(BURST) {
            let bursts = self.fetched(packets.by_ref().take(hits.len()).map(Some));
            assert_eq!(bursts.v4.len + bursts.v6.len, hits.len(), "a packet for each hit");
            bursts.v4.look_up(self, lookup, now, hits);
            bursts.v6.look_up(self, lookup, now, hits);
            self.bursts = Some(bursts);
        }
        assert!(packets.next().is_none(), "a place for each packet's hit");
    }

    /// Finds the live state of each of the flows, in either direction, and leaves it as it is: for those who only ask.
    ///
    /// # Panics
    /// When there are not as many `hits` as `flows`.
    pub fn peek_burst(
        &mut self,
        flows: impl IntoIterator<Item = Flow>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) {
        self.begin(now);
        let mut flows = flows.into_iter();
        for hits in hits.chunks_mut(BURST) {
            let packets = flows.by_ref().take(hits.len()).map(|flow| Some((flow, Segment::default())));
            let bursts = self.fetched(packets);
            assert_eq!(bursts.v4.len + bursts.v6.len, hits.len(), "a flow for each hit");
            bursts.v4.peek(self, lookup, now, hits);
            bursts.v6.peek(self, lookup, now, hits);
            self.bursts = Some(bursts);
        }
        assert!(flows.next().is_none(), "a place for each flow's hit");
    }

    /// Has what lookups of these packets will read on its way to the cache, for [`States::pass`] of each, or lookups one
    /// by one, that follow soon. Of the packets, at most 32 are looked at; `None` is one that is not.
    #[inline]
    pub(crate) fn fetch(&mut self, packets: impl Iterator<Item = Option<(Flow, Segment)>>) {
        self.stamp();
        let bursts = self.fetched(packets);
        self.bursts = Some(bursts);
    }

    /// Takes packet `at` of those that were fetched into its state, if there is a live one whose rule `passes` lets it
    /// through; else nothing has happened.
    #[inline]
    pub(crate) fn pass<T>(
        &mut self,
        at: usize,
        lookup: Lookup,
        now: Time,
        passes: impl FnOnce(RuleId) -> Option<T>,
    ) -> Option<(T, u32)> {
        // A jump of time is for the walk.
        if now.as_nanos() > self.latest.saturating_add(TELL) {
            return None;
        }
        let bursts = self.bursts.take()?;
        let fresh = self.is_fresh(&bursts);
        let passed = match bursts.order[at] {
            Place { six: false, at } if fresh && usize::from(at) < bursts.v4.len => {
                bursts.v4.packets[usize::from(at)].pass(self, lookup, now, passes)
            }
            Place { six: true, at } if fresh && usize::from(at) < bursts.v6.len => {
                bursts.v6.packets[usize::from(at)].pass(self, lookup, now, passes)
            }
            _ => None,
        };
        self.bursts = Some(bursts);
        passed
    }

    /// Takes the packets, at most [`BURST`], through the first two stages. What it gives is to be given back.
    #[inline(always)]
    fn fetched(&mut self, packets: impl Iterator<Item = Option<(Flow, Segment)>>) -> Box<Bursts> {
        let mut bursts = self.bursts.take().unwrap_or_default();
        let Bursts { v4, v6, order, .. } = &mut *bursts;
        (v4.len, v6.len) = (0, 0);
        for (at, packet) in packets.take(BURST).enumerate() {
            order[at] = Place::NOWHERE;
            let Some((flow, segment)) = packet else { continue };
            let flow = &self.keyed_whole(flow);
            match flow.ends {
                Ends::V4(src, dst) => {
                    order[at] = Place { six: false, at: v4.len as u8 };
                    v4.add(self, at, Key4::new(src, dst, flow), segment);
                }
                Ends::V6(src, dst, zone) => {
                    order[at] = Place { six: true, at: v6.len as u8 };
                    v6.add(self, at, Key6::new(src, dst, zone, flow), segment);
                }
            }
        }
        v4.fetch(self);
        v6.fetch(self);
        (bursts.seen, bursts.news) = (self.seen, self.news);
        bursts
    }

    /// Whether guesses are still good: no slot that they name has been used for another flow, and the index is the same.
    #[inline]
    fn is_fresh(&self, bursts: &Bursts) -> bool {
        (bursts.seen, bursts.news) == (self.seen, self.news)
    }
}

/// Packets of both families on their way: a worker's own, which it keeps, for it is too much to make for each burst.
#[derive(Debug)]
pub(super) struct Bursts {
    v4: Burst<2>,
    v6: Burst<6>,
    /// Where each packet is.
    order: [Place; BURST],
    /// The worker's stamp, and the news that it had, when the guesses were made.
    seen: u64,
    news: u64,
}

impl Default for Bursts {
    fn default() -> Self {
        let (v4, v6) = (Burst::default(), Burst::default());
        Self { v4, v6, order: [Place::NOWHERE; BURST], seen: 0, news: 0 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Place {
    six: bool,
    at: u8,
}

impl Place {
    const NOWHERE: Self = Self { six: false, at: u8::MAX };
}

/// Packets of one family on their way through the stages of a burst.
#[derive(Debug)]
struct Burst<const N: usize> {
    packets: [Fetched<N>; BURST],
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Fetched<const N: usize> {
    key: Key<N>,
    probe: Probe,
    /// A slot that the index has for the tag, nearly always the flow's; or [`NONE`].
    guess: u32,
    at: u8,
    side: Side,
    segment: Segment,
}

impl<const N: usize> Default for Burst<N> {
    fn default() -> Self {
        let none = Fetched {
            key: Key([0; N]),
            probe: Probe::default(),
            guess: NONE,
            at: 0,
            side: Side::Low,
            segment: Segment::default(),
        };
        Self { packets: [none; BURST], len: 0 }
    }
}

impl<const N: usize> Burst<N>
where
    Key<N>: Own<N>,
{
    /// Takes a packet, and has its line of the index on its way.
    #[inline(always)]
    fn add(&mut self, states: &States, at: usize, (key, side): (Key<N>, Side), segment: Segment) {
        let index = &Key::<N>::local(states).index;
        let probe = index.probe(&key);
        index.prefetch(probe);
        self.packets[self.len] = Fetched { key, probe, guess: NONE, at: at as u8, side, segment };
        self.len += 1;
    }

    /// Has the states on their way, as far as the index tells by tags alone.
    #[inline(always)]
    fn fetch(&mut self, states: &States) {
        let family = Key::<N>::family(&states.shared);
        let index = &Key::<N>::local(states).index;
        let mut elsewhere = 0_u32;
        for (at, packet) in self.packets[..self.len].iter_mut().enumerate() {
            match index.guess(packet.probe) {
                Some(slot) => {
                    packet.guess = slot;
                    family.slab.prefetch(slot);
                }
                None => {
                    index.prefetch_second(packet.probe);
                    elsewhere |= 1 << at;
                }
            }
        }
        while elsewhere != 0 {
            let packet = &mut self.packets[elsewhere.trailing_zeros() as usize];
            if let Some(slot) = index.guess_second(packet.probe) {
                packet.guess = slot;
                family.slab.prefetch(slot);
            }
            elsewhere &= elsewhere - 1;
        }
    }

    #[inline(always)]
    fn peek(&self, states: &States, lookup: Lookup, now: Time, hits: &mut [Option<Hit>]) {
        for packet in &self.packets[..self.len] {
            let maker = |(_, cell): (u32, Cell<'_, N>)| cell.maker();
            let direction = |maker: Maker| packet.side.direction(maker.forward());
            let hit = |maker: Maker| Hit { rule: maker.rule(), direction: direction(maker) };
            hits[usize::from(packet.at)] = packet.find(states, lookup, now).map(maker).map(hit);
        }
    }

    #[inline(always)]
    fn look_up(&self, states: &States, lookup: Lookup, now: Time, hits: &mut [Option<Hit>]) {
        for packet in &self.packets[..self.len] {
            let found = match packet.find(states, lookup, now) {
                Some((slot, cell)) => states.hit(cell, slot, packet.side, packet.seen(now)),
                None => Found::Miss,
            };
            hits[usize::from(packet.at)] = states.hit_of(found);
        }
    }
}

impl<const N: usize> Fetched<N>
where
    Key<N>: Own<N>,
{
    /// The slot of the packet's state. The guess was made in this call, so that a state of the flow in it is what a
    /// lookup would have found then.
    #[inline(always)]
    fn find<'s>(&self, states: &'s States, lookup: Lookup, now: Time) -> Option<(u32, Cell<'s, N>)> {
        self.guessed(states, lookup, now).or_else(|| self.search(states, lookup, now))
    }

    /// The same, when the guess is right and the flow has one state, as most have.
    #[inline(always)]
    fn guessed<'s>(&self, states: &'s States, lookup: Lookup, now: Time) -> Option<(u32, Cell<'s, N>)> {
        if self.guess == NONE {
            return None;
        }
        let cell = Key::<N>::family(&states.shared).cell(self.guess);
        let named = match lookup {
            Lookup::Any => true,
            Lookup::Named(name) => cell.maker().is_named(name),
        };
        (cell.is(&self.key) && named && cell.live(now)).then_some((self.guess, cell))
    }

    #[cold]
    #[inline(never)]
    fn search<'s>(&self, states: &'s States, lookup: Lookup, now: Time) -> Option<(u32, Cell<'s, N>)> {
        let family = Key::<N>::family(&states.shared);
        let slot = family.find(&Key::<N>::local(states).index, self.probe, &self.key, lookup, now)?;
        Some((slot, family.cell(slot)))
    }

    #[inline(always)]
    fn pass<T>(
        &self,
        states: &States,
        lookup: Lookup,
        now: Time,
        passes: impl FnOnce(RuleId) -> Option<T>,
    ) -> Option<(T, u32)> {
        let (slot, cell) = self.guessed(states, lookup, now)?;
        let maker = cell.maker();
        if maker.has(STRICT) {
            return None;
        }
        let passed = passes(maker.rule())?;
        let _ = states.hit(cell, slot, self.side, self.seen(now));
        Some((passed, self.segment.bytes))
    }

    #[inline(always)]
    fn seen(&self, now: Time) -> Seen<'_> {
        Seen { proto: self.key.proto(), segment: &self.segment, now }
    }
}

const _: () = assert!(BURST <= u32::BITS as usize && BURST < u8::MAX as usize);
