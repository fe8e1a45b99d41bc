//! BurstBuffers: lookups whose cache misses overlap.
//!
//! What: three stages. The flows' lines of the index are asked for; then, from their tags alone, the states; then each
//! packet is looked up, in the packets' order. What the tags told is a guess that the key confirms. While packets are in
//! the last stage, which waits for nothing, those behind them are in the first. Each stage is a loop of its own, so that
//! the processor is at several packets at once also when all is in its cache.
//!
//! While flows move to another index, a packet whose flow is not found in this one is asked for there, in the same three
//! stages: growth costs a burst some more cache misses, and not a wait for each.
//!
//! Invariant: a guess is good as long as the worker has not said since that it knows no slots, and has itself taken no
//! state away and put none before another of its flow: [`States::pass`] asks.

use super::{AddressFamily, States, TELL};
use crate::state::table::entry::{BurstTime, Entry, PacketInfo, STRICT};
use crate::state::table::family::Family;
use crate::state::table::index::{Index, Probe};
use crate::state::table::key::{FlowKey, Key, Key4, Key6, Side};
use crate::state::{Ends, Flow, Hit, Lookup, RuleId, Segment};
use towpath_wire::Time;

/// Packets that go through the stages of a burst together: so many cache lines are on their way at once.
pub const BURST: usize = 32;

const UDP: u8 = 17;

/// No guess.
const NONE: u32 = u32::MAX;

/// The states that packets of a burst are in, as far as that was guessed.
type Entries<'s, const N: usize> = [Option<Entry<'s, N>>; BURST];

impl States {
    /// [`States::lookup`] for each of the packets, in their order, whose cache misses overlap: `hits` has what each of
    /// them found. How many packets there were, no more than there is room for in `hits`, of which the rest stays as it is.
    /// `None`, as [`towpath_wire::plain`] says of some, is a packet that finds nothing.
    #[inline]
    pub fn lookup_burst(
        &mut self,
        packets: impl IntoIterator<Item = Option<(Flow, Segment)>>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) -> usize {
        self.begin(now);
        self.staged::<true>(packets.into_iter(), lookup, now, hits)
    }

    /// [`States::peek`] for each of the flows, in their order, whose cache misses overlap. How many flows there were, as
    /// there.
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
        self.staged::<false>(packets, lookup, now, hits)
    }

    /// The packets stage by stage, so many at a time: each is taken into its state (`COUNTS`), or only finds it.
    #[inline(always)]
    fn staged<const COUNTS: bool>(
        &mut self,
        mut packets: impl Iterator<Item = Option<(Flow, Segment)>>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) -> usize {
        let at = BurstTime::new(now, &self.settings);
        let mut bursts = self.bursts.take().unwrap_or_default();
        let [mut first, mut behind] = [&mut bursts.0, &mut bursts.1];
        let (mut v4, mut v6): (Entries<'_, 2>, Entries<'_, 6>) = ([None; BURST], [None; BURST]);
        first.clear();
        let mut count = 0;
        loop {
            let (hits, rest) = hits[count..].split_at_mut(first.count);
            behind.add(self, &mut packets, rest.len());
            first.v4.find::<COUNTS>(self, &v4, lookup, at, hits);
            first.v6.find::<COUNTS>(self, &v6, lookup, at, hits);
            first.find_none(hits);
            count += first.count;
            if behind.count == 0 {
                break;
            }
            behind.v4.fetch::<COUNTS>(self, &mut v4);
            behind.v6.fetch::<COUNTS>(self, &mut v6);
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
        if burst.v4.here != 0 {
            burst.v4.fetch::<true>(self, &mut [None; BURST]);
        }
        if burst.v6.here != 0 {
            burst.v6.fetch::<true>(self, &mut [None; BURST]);
        }
        (burst.seen, burst.news, burst.turns) = (self.seen, self.news, self.turns);
        self.bursts = Some(bursts);
    }

    /// Takes packet `at` of those that were fetched into its state, if there is a live one whose rule `passes` lets it
    /// through; else nothing has happened. A packet passes once: who asks again, or for one that was not fetched, hears
    /// nothing of it.
    #[inline]
    pub(crate) fn pass<T>(
        &mut self,
        at: usize,
        lookup: Lookup,
        now: Time,
        passes: impl FnOnce(RuleId) -> Option<T>,
    ) -> Option<(T, u32)> {
        let Self { bursts, seen, news, turns, latest, .. } = self;
        let burst = &mut bursts.as_mut()?.0;
        // Guesses are good as long as no slot that they name has been used for another flow, the index is the same, and what it
        // says of their flows. A jump of time is for the walk.
        let fresh = (burst.seen, burst.news, burst.turns) == (*seen, *news, *turns);
        if at >= BURST || !fresh || now.as_nanos() > latest.saturating_add(TELL) {
            return None;
        }
        let (v4, v6) = (burst.v4.take(at), burst.v6.take(at));
        let burst = &self.bursts.as_ref()?.0;
        if v4 {
            return burst.v4.packets[at].pass(self, lookup, now, passes);
        }
        if v6 {
            return burst.v6.packets[at].pass(self, lookup, now, passes);
        }
        None
    }
}

/// Packets on their way, and those behind them: a worker's own, which it keeps, for it is too much to make each time.
pub(super) type BurstBuffers = (BurstBuffer, BurstBuffer);

/// Packets of both families on their way.
#[derive(Debug, Default)]
pub(super) struct BurstBuffer {
    v4: FamilyBurst<2>,
    v6: FamilyBurst<6>,
    count: usize,
    /// The worker's stamp, and the news and turns that it had, when the guesses were made.
    seen: u64,
    news: u64,
    turns: u64,
}

impl BurstBuffer {
    fn clear(&mut self) {
        (self.count, self.v4.here, self.v6.here) = (0, 0, 0);
    }

    /// Takes the packets, at most `most` and [`BURST`], through the first stage.
    #[inline(always)]
    fn add(
        &mut self,
        states: &States,
        packets: &mut impl Iterator<Item = Option<(Flow, Segment)>>,
        most: usize,
    ) {
        let (mut v4, mut v6) = (0_u32, 0_u32);
        let (mut at, mut bit) = (0, 1_u32);
        // The iterator calls this, and not this the iterator: so what makes a packet, its parser most often, becomes part of this
        // loop, and the packet stays in registers. A call of `next` that is made in two places is a call.
        packets.by_ref().take(most.min(BURST)).for_each(|packet| {
            match packet.map(|(flow, segment)| (states.keyed_whole(flow), segment)) {
                Some((flow @ Flow { ends: Ends::V4(src, dst), .. }, segment)) => {
                    self.v4.packets[at % BURST].add(states, Key4::new(src, dst, &flow), segment);
                    v4 |= bit;
                }
                Some((flow @ Flow { ends: Ends::V6(src, dst, zone), .. }, segment)) => {
                    self.v6.packets[at % BURST].add(states, Key6::new(src, dst, zone, &flow), segment);
                    v6 |= bit;
                }
                None => {}
            }
            at += 1;
            bit = bit.wrapping_shl(1);
        });
        (self.v4.here, self.v6.here, self.count) = (v4, v6, at);
    }

    /// The last stage of packets that are of neither family.
    #[inline(always)]
    fn find_none(&self, hits: &mut [Option<Hit>]) {
        let all = (1_u64 << self.count) - 1;
        for at in bits(all as u32 & !(self.v4.here | self.v6.here)) {
            hits[at] = None;
        }
    }
}

/// Packets of one family on their way, each in its place in the burst.
#[derive(Debug)]
struct FamilyBurst<const N: usize> {
    packets: [PendingPacket<N>; BURST],
    /// In which places there is one.
    here: u32,
}

#[derive(Clone, Copy, Debug)]
struct PendingPacket<const N: usize> {
    key: Key<N>,
    probe: Probe,
    /// A slot that the index has for the tag, nearly always the flow's; or [`NONE`].
    guess: u32,
    bytes: u32,
    side: Side,
    /// What else the packet contributes, unless it is UDP's.
    segment: Segment,
}

impl<const N: usize> Default for FamilyBurst<N> {
    fn default() -> Self {
        let none = PendingPacket {
            key: Key([0; N]),
            probe: Probe::default(),
            guess: NONE,
            bytes: 0,
            side: Side::Low,
            segment: Segment::default(),
        };
        Self { packets: [none; BURST], here: 0 }
    }
}

impl<const N: usize> FamilyBurst<N>
where
    Key<N>: AddressFamily<N>,
{
    /// Has the states on their way, as far as the index tells by tags alone: all of them, or what a look takes.
    ///
    /// A stage stands by itself, so that what it uses is in registers.
    #[inline(never)]
    fn fetch<'s, const COUNTS: bool>(&mut self, states: &'s States, entries: &mut Entries<'s, N>) {
        let family = Key::<N>::family(&states.shared);
        let index = &*Key::<N>::local(states).index;
        let mut elsewhere = 0_u32;
        for at in bits(self.here) {
            let packet = &mut self.packets[at];
            if let Some(slot) = index.guess(packet.probe) {
                entries[at] = packet.expect::<COUNTS>(family, slot);
            } else {
                index.prefetch_second(packet.probe);
                (packet.guess, entries[at]) = (NONE, None);
                elsewhere |= 1 << at;
            }
        }
        let mut moved = 0_u32;
        for at in bits(elsewhere) {
            let packet = &mut self.packets[at];
            match index.guess_second(packet.probe) {
                Some(slot) => entries[at] = packet.expect::<COUNTS>(family, slot),
                None => moved |= 1 << at,
            }
        }
        if moved != 0
            && let Some(next) = index.next()
        {
            self.fetch_moved::<COUNTS>(family, next, moved, entries);
        }
    }

    /// The same for packets whose flows may be in the next index.
    #[cold]
    #[inline(never)]
    fn fetch_moved<'s, const COUNTS: bool>(
        &mut self,
        family: &'s Family<N>,
        next: &Index,
        moved: u32,
        entries: &mut Entries<'s, N>,
    ) {
        let mut probes = [Probe::default(); BURST];
        for at in bits(moved) {
            probes[at] = next.probe(&self.packets[at].key);
            next.prefetch(probes[at]);
        }
        let mut elsewhere = 0_u32;
        for at in bits(moved) {
            match next.guess(probes[at]) {
                Some(slot) => entries[at] = self.packets[at].expect::<COUNTS>(family, slot),
                None => {
                    next.prefetch_second(probes[at]);
                    elsewhere |= 1 << at;
                }
            }
        }
        for at in bits(elsewhere) {
            let slot = next.guess_second(probes[at]);
            entries[at] = slot.and_then(|slot| self.packets[at].expect::<COUNTS>(family, slot));
        }
    }

    /// The last stage: `hits` has what each of the packets found.
    #[inline(never)]
    fn find<const COUNTS: bool>(
        &self,
        states: &States,
        entries: &Entries<'_, N>,
        lookup: Lookup,
        moment: BurstTime,
        hits: &mut [Option<Hit>],
    ) {
        let living = states.living(moment.now);
        for at in bits(self.here) {
            let packet = &self.packets[at];
            // The guess was made in this call, so that a state of the flow in it is what a lookup would have found then.
            let Some(entry) = entries[at].filter(|&entry| Family::is_it(entry, &packet.key, lookup, living))
            else {
                hits[at] = packet.search::<COUNTS>(states, lookup, moment);
                continue;
            };
            let header = entry.header();
            let direction = if !COUNTS {
                packet.side.direction(header.forward())
            } else if header.has(STRICT) {
                hits[at] = packet.hit(states, packet.guess, entry, moment);
                continue;
            } else {
                states.hit_loosely(entry, header, packet.guess, packet.side, packet.seen(moment))
            };
            hits[at] = Some(Hit { rule: header.rule(), direction });
        }
    }

    /// Whether there is a packet in this place; it is not there any more.
    #[inline(always)]
    fn take(&mut self, at: usize) -> bool {
        let here = self.here >> at & 1 != 0;
        self.here &= !(1 << at);
        here
    }
}

impl<const N: usize> PendingPacket<N>
where
    Key<N>: AddressFamily<N>,
{
    /// A packet at the first stage: its line of the index is on its way.
    #[inline(always)]
    fn add(&mut self, states: &States, (key, side): (Key<N>, Side), segment: Segment) {
        let index = &Key::<N>::local(states).index;
        let probe = index.probe(&key);
        index.prefetch(probe);
        (self.key, self.probe, self.side, self.bytes) = (key, probe, side, segment.bytes);
        // UDP has nothing else: what was there stays.
        if key.proto() != UDP {
            self.segment = segment;
        }
    }

    /// The second stage: the packet's state may be in this slot, and is on its way.
    #[inline(always)]
    fn expect<'s, const COUNTS: bool>(&mut self, family: &'s Family<N>, slot: u32) -> Option<Entry<'s, N>> {
        self.guess = slot;
        let entry = family.try_entry(slot)?;
        if COUNTS {
            entry.prefetch()
        } else {
            entry.prefetch_key()
        }
        Some(entry)
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
        let entry = Key::<N>::family(&states.shared).entry(self.guess);
        let header = entry.header();
        if !Family::is_it(entry, &self.key, lookup, states.living(now)) || header.has(STRICT) {
            return None;
        }
        let passed = passes(header.rule())?;
        let moment = BurstTime::new(now, &states.settings);
        states.hit_loosely(entry, header, self.guess, self.side, self.seen(moment));
        Some((passed, self.bytes))
    }

    /// The last stage, whatever the guess was.
    #[cold]
    #[inline(never)]
    fn search<const COUNTS: bool>(&self, states: &States, lookup: Lookup, moment: BurstTime) -> Option<Hit> {
        let family = Key::<N>::family(&states.shared);
        let index = &Key::<N>::local(states).index;
        let slot = family.find(index, self.probe, &self.key, lookup, states.living(moment.now))?;
        let entry = family.entry(slot);
        if COUNTS {
            return self.hit(states, slot, entry, moment);
        }
        let header = entry.header();
        Some(Hit { rule: header.rule(), direction: self.side.direction(header.forward()) })
    }

    #[cold]
    #[inline(never)]
    fn hit(&self, states: &States, slot: u32, entry: Entry<'_, N>, moment: BurstTime) -> Option<Hit> {
        states.hit_of(states.hit(entry, slot, self.side, self.seen(moment)))
    }

    #[inline(always)]
    fn seen(&self, at: BurstTime) -> PacketInfo<'_> {
        PacketInfo { proto: self.key.proto(), bytes: self.bytes, segment: &self.segment, at }
    }
}

/// The numbers of the bits that are set, from the lowest.
#[inline(always)]
fn bits(mut set: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        at
    })
}

const _: () = assert!(BURST <= u32::BITS as usize);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::{Install, Name, Settings};

    const NOW: Time = Time::from_secs(100);

    fn packet(src_port: u16) -> Option<(Flow, Segment)> {
        let ends = Ends::V4([10, 0, 0, 1].into(), [192, 0, 2, 1].into());
        Some((Flow { ends, proto: UDP, src_port, dst_port: 53, tenant: 0 }, Segment::default()))
    }

    fn keep(states: &mut States, src_port: u16, name: u16) {
        let (flow, segment) = packet(src_port).unwrap();
        let (name, rule) = (Name(name.try_into().unwrap()), RuleId(name.into()));
        states.install(&flow, name, &segment, rule, &Install::default(), NOW).unwrap();
    }

    fn pass(states: &mut States, at: usize) -> Option<u32> {
        states.pass(at, Lookup::Any, NOW, Some).map(|(rule, _)| rule.0)
    }

    #[test]
    fn a_packet_passes_once_and_only_of_the_last_burst() {
        let mut states = States::new(Settings::default(), 1);
        (1..=3).for_each(|port| keep(&mut states, port, 1));
        states.fetch([packet(1), None, packet(2), packet(3)].into_iter());
        assert_eq!(
            [0, 1, 2, 2, 4, 31, 32, 99].map(|at| pass(&mut states, at).is_some()),
            [true, false, true, false, false, false, false, false]
        );
        // What was at 3 is not in the next burst.
        states.fetch([packet(1)].into_iter());
        assert_eq!([3, 2, 0].map(|at| pass(&mut states, at).is_some()), [false, false, true]);
        states.fetch(std::iter::empty());
        assert_eq!(pass(&mut states, 0), None);
    }

    #[test]
    fn what_changes_within_a_burst_is_seen_by_it() {
        let mut states = States::new(Settings { dyn_max: 2, dyn_evict: true, ..Settings::default() }, 1);
        keep(&mut states, 1, 1);
        states.fetch([packet(1), packet(1)].into_iter());
        assert_eq!(pass(&mut states, 0), Some(1));
        // Another state of the flow is the newest now.
        keep(&mut states, 1, 2);
        assert_eq!(pass(&mut states, 1), None);
        states.fetch([packet(1), packet(1)].into_iter());
        assert_eq!(pass(&mut states, 0), Some(2));
        // Both make room for others.
        (2..=3).for_each(|port| keep(&mut states, port, 1));
        assert_eq!(pass(&mut states, 1), None);
    }

    #[test]
    fn packets_without_a_flow_find_nothing_in_their_places() {
        let mut states = States::new(Settings::default(), 1);
        (1..=40).for_each(|port| keep(&mut states, port, 1));
        let packets = || (1..=40).map(|port| if port % 3 == 0 { None } else { packet(port) });
        let mut hits = [Some(Hit { rule: RuleId(9), direction: crate::state::Direction::Reverse }); 41];
        assert_eq!(states.lookup_burst(packets(), Lookup::Any, NOW, &mut hits), 40);
        for (hit, port) in hits.iter().zip(1..=40) {
            assert_eq!(hit.map(|hit| hit.rule.0), (port % 3 != 0).then_some(1), "{port}");
        }
        assert_eq!(hits[40].map(|hit| hit.rule.0), Some(9));
    }

    #[test]
    fn bursts_find_flows_that_move() {
        let mut states = States::new(Settings::default(), 1);
        let (mut made, mut moving) = (0, 0);
        while made < 20_000 {
            made += 1;
            keep(&mut states, made, 1);
            if made % 50 == 0 {
                moving += u32::from(states.v4.index.next().is_some());
                states.fetch((made - 31..=made).map(packet));
                assert!((0..BURST).all(|at| pass(&mut states, at).is_some()), "{made}");
            }
        }
        assert!(moving > 10, "{moving}");
    }
}
