//! Bursts: lookups whose cache misses overlap.
//!
//! What: three stages. The flows' lines of the index are asked for; then, from their tags alone, the states; then each
//! packet is looked up, in the packets' order. What the tags told is a guess that the key confirms. While packets are in
//! the last stage, which waits for nothing, those behind them are in the first. Each stage is a loop of its own, so that
//! the processor is at several packets at once also when all is in its cache.
//!
//! Invariant: a guess is good as long as the worker has not said since that it knows no slots: [`States::is_fresh`].

use super::{Own, States, TELL};
use crate::Time;
use crate::state::cell::{Cell, STRICT, Seen};
use crate::state::family::Family;
use crate::state::index::Probe;
use crate::state::key::{Key, Key4, Key6, Side, Unpack};
use crate::state::{Ends, Flow, Hit, Lookup, RuleId, Segment};

/// Packets that go through the stages of a burst together: so many cache lines are on their way at once.
pub const BURST: usize = 32;

const UDP: u8 = 17;

/// No guess.
const NONE: u32 = u32::MAX;

impl States {
    /// [`States::lookup`] for each of the packets, in their order, whose cache misses overlap: `hits` has what each of
    /// them found. How many packets there were, no more than there is room for in `hits`, of which the rest stays as it is.
    #[inline]
    pub fn lookup_burst(
        &mut self,
        packets: impl IntoIterator<Item = (Flow, Segment)>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) -> usize {
        self.begin(now);
        self.staged(packets.into_iter().map(Some), LookUp, lookup, now, hits)
    }

    /// Finds the live state of each of the flows, in either direction, and leaves it as it is: for those who only ask.
    /// How many flows there were, as there.
    #[inline]
    pub fn peek_burst(
        &mut self,
        flows: impl IntoIterator<Item = Flow>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) -> usize {
        self.begin(now);
        let packets = flows.into_iter().map(|flow| Some((flow, Segment::default())));
        self.staged(packets, Peek, lookup, now, hits)
    }

    /// The packets stage by stage, so many at a time.
    #[inline(always)]
    fn staged(
        &mut self,
        mut packets: impl Iterator<Item = Option<(Flow, Segment)>>,
        act: impl Act,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) -> usize {
        let mut bursts = self.bursts.take().unwrap_or_default();
        let [mut first, mut behind] = [&mut bursts.0, &mut bursts.1];
        first.clear();
        let mut count = 0;
        // Each stage stands here once, so that it becomes part of this.
        loop {
            let (hits, rest) = hits[count..].split_at_mut(first.count);
            behind.add(self, &mut packets, rest.len());
            first.v4.find_and(self, act, lookup, now, hits);
            first.v6.find_and(self, act, lookup, now, hits);
            count += first.count;
            if behind.count == 0 {
                break;
            }
            behind.fetch(self);
            std::mem::swap(&mut first, &mut behind);
        }
        // These are not for pass().
        bursts.0.clear();
        self.bursts = Some(bursts);
        count
    }

    /// Has what lookups of these packets will read on its way to the cache, for [`States::pass`] of each, or lookups one
    /// by one, that follow soon. Of the packets, at most 32 are looked at; `None` is one that is not.
    #[inline]
    pub(crate) fn fetch(&mut self, mut packets: impl Iterator<Item = Option<(Flow, Segment)>>) {
        self.stamp();
        let mut bursts = self.bursts.take().unwrap_or_default();
        let burst = &mut bursts.0;
        burst.add(self, &mut packets, BURST);
        burst.fetch(self);
        (burst.seen, burst.news) = (self.seen, self.news);
        self.bursts = Some(bursts);
    }

    /// Takes packet `at` of those that were fetched into its state, if there is a live one whose rule `passes` lets it
    /// through; else nothing has happened.
    #[inline]
    pub(crate) fn pass<T>(
        &self,
        at: usize,
        lookup: Lookup,
        now: Time,
        passes: impl FnOnce(RuleId) -> Option<T>,
    ) -> Option<(T, u32)> {
        let burst = &self.bursts.as_deref()?.0;
        // A jump of time is for the walk.
        if at >= burst.count || !self.is_fresh(burst) || now.as_nanos() > self.latest.saturating_add(TELL) {
            return None;
        }
        match burst.order[at] {
            Place::V4(at) => burst.v4.packets[usize::from(at)].pass(self, lookup, now, passes),
            Place::V6(at) => burst.v6.packets[usize::from(at)].pass(self, lookup, now, passes),
            Place::Nowhere => None,
        }
    }

    /// Whether guesses are still good: no slot that they name has been used for another flow, and the index is the same.
    #[inline]
    fn is_fresh(&self, burst: &Burst) -> bool {
        (burst.seen, burst.news) == (self.seen, self.news)
    }
}

/// What is done with a packet and the state that was found for it.
trait Act: Copy {
    fn act<const N: usize>(
        self,
        states: &States,
        packet: &Fetched<N>,
        found: Option<(u32, Cell<'_, N>)>,
        now: Time,
    ) -> Option<Hit>
    where
        Key<N>: Own<N>;
}

/// The packet counts in the state, and refreshes it.
#[derive(Clone, Copy)]
struct LookUp;

impl Act for LookUp {
    #[inline(always)]
    fn act<const N: usize>(
        self,
        states: &States,
        packet: &Fetched<N>,
        found: Option<(u32, Cell<'_, N>)>,
        now: Time,
    ) -> Option<Hit>
    where
        Key<N>: Own<N>,
    {
        let (slot, cell) = found?;
        states.hit_of(states.hit(cell, slot, packet.side, packet.seen(now)))
    }
}

/// Nothing.
#[derive(Clone, Copy)]
struct Peek;

impl Act for Peek {
    #[inline(always)]
    fn act<const N: usize>(
        self,
        _: &States,
        packet: &Fetched<N>,
        found: Option<(u32, Cell<'_, N>)>,
        _: Time,
    ) -> Option<Hit>
    where
        Key<N>: Own<N>,
    {
        let maker = found?.1.maker();
        Some(Hit { rule: maker.rule(), direction: packet.side.direction(maker.forward()) })
    }
}

/// Packets on their way, and those behind them: a worker's own, which it keeps, for it is too much to make each time.
pub(super) type Bursts = (Burst, Burst);

/// Packets of both families on their way.
#[derive(Debug)]
pub(super) struct Burst {
    v4: Half<2>,
    v6: Half<6>,
    /// Where each packet is.
    order: [Place; BURST],
    count: usize,
    /// The worker's stamp, and the news that it had, when the guesses were made.
    seen: u64,
    news: u64,
}

impl Default for Burst {
    fn default() -> Self {
        let (v4, v6) = (Half::default(), Half::default());
        Self { v4, v6, order: [Place::Nowhere; BURST], count: 0, seen: 0, news: 0 }
    }
}

impl Burst {
    pub(super) fn clear(&mut self) {
        (self.count, self.v4.len, self.v6.len) = (0, 0, 0);
    }

    /// Takes the packets, at most `most` and [`BURST`], through the first stage.
    #[inline(always)]
    fn add(
        &mut self,
        states: &States,
        packets: &mut impl Iterator<Item = Option<(Flow, Segment)>>,
        most: usize,
    ) {
        self.clear();
        let Self { v4, v6, order, .. } = self;
        let mut at = 0;
        while at < most.min(BURST)
            && let Some(packet) = packets.next()
        {
            order[at] = match packet.map(|(flow, segment)| (states.keyed_whole(flow), segment)) {
                Some((flow @ Flow { ends: Ends::V4(src, dst), .. }, segment)) => {
                    Place::V4(v4.add(states, at, Key4::new(src, dst, &flow), segment))
                }
                Some((flow @ Flow { ends: Ends::V6(src, dst, zone), .. }, segment)) => {
                    Place::V6(v6.add(states, at, Key6::new(src, dst, zone, &flow), segment))
                }
                None => Place::Nowhere,
            };
            at += 1;
        }
        self.count = at;
    }

    /// The second stage.
    #[inline(always)]
    fn fetch(&mut self, states: &States) {
        self.v4.fetch(states);
        self.v6.fetch(states);
    }
}

/// Where a packet of a burst is.
#[derive(Clone, Copy, Debug)]
enum Place {
    V4(u8),
    V6(u8),
    Nowhere,
}

/// Packets of one family on their way.
#[derive(Debug)]
struct Half<const N: usize> {
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
    bytes: u32,
    /// What else the packet contributes, unless it is UDP's.
    segment: Segment,
}

impl<const N: usize> Default for Half<N> {
    fn default() -> Self {
        let none = Fetched {
            key: Key([0; N]),
            probe: Probe::default(),
            guess: NONE,
            at: 0,
            side: Side::Low,
            bytes: 0,
            segment: Segment::default(),
        };
        Self { packets: [none; BURST], len: 0 }
    }
}

impl<const N: usize> Half<N>
where
    Key<N>: Own<N>,
{
    /// Takes a packet, and has its line of the index on its way. Its place.
    #[inline(always)]
    fn add(&mut self, states: &States, at: usize, (key, side): (Key<N>, Side), segment: Segment) -> u8 {
        let index = &Key::<N>::local(states).index;
        let probe = index.probe(&key);
        index.prefetch(probe);
        let place = self.len;
        let packet = &mut self.packets[place];
        (packet.key, packet.probe, packet.guess) = (key, probe, NONE);
        (packet.at, packet.side, packet.bytes) = (at as u8, side, segment.bytes);
        // UDP has nothing else: what was there stays.
        if key.proto() != UDP {
            packet.segment = segment;
        }
        self.len += 1;
        place as u8
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
                    family.slab.words(slot).prefetch();
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
                family.slab.words(slot).prefetch();
            }
            elsewhere &= elsewhere - 1;
        }
    }

    /// The last stage: `hits` has what each of the packets found.
    #[inline(always)]
    fn find_and(&self, states: &States, act: impl Act, lookup: Lookup, now: Time, hits: &mut [Option<Hit>]) {
        for packet in &self.packets[..self.len] {
            let found = packet.find(packet.guess, states, lookup, now);
            hits[usize::from(packet.at)] = act.act(states, packet, found, now);
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
    fn find<'s>(
        &self,
        guess: u32,
        states: &'s States,
        lookup: Lookup,
        now: Time,
    ) -> Option<(u32, Cell<'s, N>)> {
        if guess != NONE {
            let cell = Key::<N>::family(&states.shared).cell(guess);
            if Family::is_it(cell, &self.key, lookup, now) {
                return Some((guess, cell));
            }
        }
        search(states, self.probe, self.key, lookup, now)
    }

    #[inline(always)]
    fn pass<T>(
        &self,
        states: &States,
        lookup: Lookup,
        now: Time,
        passes: impl FnOnce(RuleId) -> Option<T>,
    ) -> Option<(T, u32)> {
        if self.guess == NONE {
            return None;
        }
        let cell = Key::<N>::family(&states.shared).cell(self.guess);
        let maker = cell.maker();
        if !Family::is_it(cell, &self.key, lookup, now) || maker.has(STRICT) {
            return None;
        }
        let passed = passes(maker.rule())?;
        states.hit_loosely(cell, self.guess, self.side, self.seen(now));
        Some((passed, self.bytes))
    }

    #[inline(always)]
    fn seen(&self, now: Time) -> Seen<'_> {
        Seen { proto: self.key.proto(), bytes: self.bytes, segment: &self.segment, now }
    }
}

/// The slot of a flow's state, whatever the guess was.
#[cold]
#[inline(never)]
fn search<const N: usize>(
    states: &States,
    probe: Probe,
    key: Key<N>,
    lookup: Lookup,
    now: Time,
) -> Option<(u32, Cell<'_, N>)>
where
    Key<N>: Own<N>,
{
    let family = Key::<N>::family(&states.shared);
    let slot = family.find(&Key::<N>::local(states).index, probe, &key, lookup, now)?;
    Some((slot, family.cell(slot)))
}

const _: () = assert!(BURST <= u32::BITS as usize && BURST < u8::MAX as usize);
