//! Bursts: lookups whose cache misses overlap.
//!
//! What: a burst has three stages. The first prefetches the flows' lines of the index. The second finds a slot in them by the
//! flow's tag alone (a *hint*) and prefetches the state. The third looks each packet up, in the packets' order; the key confirms
//! the hint. Each stage is a loop over all packets, so that the processor works on several packets at once also when everything is
//! cached. The stages take turns: between two stages of a burst there is one of the burst after it and one of the burst before it,
//! so that what is prefetched has time to arrive also if no packet has a state.
//!
//! While flows migrate to another index, a packet whose flow has no hint in this one goes through the same stages there:
//! growth costs a burst some more overlapping cache misses.
//!
//! Invariant: a hint is valid as long as the worker has announced no quiescent state, the indices are the same, and the worker
//! itself has neither unlinked a state nor put one before another of its flow. [`States::pass`] checks that.

use towpath_wire::Time;

use super::{AddressFamily, States, TIME_STEP};
use crate::state::table::entry::{BurstTime, Entry, PacketInfo, STRICT};
use crate::state::table::family::Family;
use crate::state::table::index::{Index, Probe};
use crate::state::table::key::{FlowKey, Key, Key4, Key6, Side};
use crate::state::{Ends, Flow, Hit, Lookup, RuleId, Segment};

/// The number of packets whose cache misses overlap.
pub const BURST: usize = 32;

const UDP: u8 = 17;

/// No hint.
const NONE: u32 = u32::MAX;

/// The states that the hints of a burst lead to.
type Entries<'s, const N: usize> = [Option<Entry<'s, N>>; BURST];

/// The versions on which hints depend: the worker's epoch, the shared version, and the worker's own changes.
type HintVersion = (u64, u64, u64);

impl States {
    /// [`States::lookup`] for each packet, in order, with overlapping cache misses. Writes the result for each packet to
    /// `hits`, up to its length, and returns the number of packets looked up. `None` is a packet that
    /// [`towpath_wire::plain`] does not handle; its result is `None`.
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

    /// [`States::peek`] for each flow, in order, with overlapping cache misses. Results and return value are those of
    /// [`States::lookup_burst`].
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

    /// Runs the stages. `COUNTS` applies each packet to its state.
    #[inline(always)]
    fn staged<const COUNTS: bool>(
        &mut self,
        mut packets: impl Iterator<Item = Option<(Flow, Segment)>>,
        lookup: Lookup,
        now: Time,
        hits: &mut [Option<Hit>],
    ) -> usize {
        let time = BurstTime::new(now, &self.settings);
        let mut bursts = self.bursts.take().unwrap_or_default();
        let [first, second, third] = &mut *bursts;
        let (mut first, mut second, mut third) = (first, second, third);
        let mut entries: [(Entries<'_, 2>, Entries<'_, 6>); 2] = [([None; BURST], [None; BURST]); 2];
        let [mut of_second, mut of_third] = entries.each_mut();
        second.clear();
        third.clear();
        let (mut added, mut count) = (0, 0);
        loop {
            first.add(self, &mut packets, hits.len() - added);
            added += first.count;
            if second.count > 0 {
                second.v4.prefetch::<COUNTS>(self, &mut of_second.0);
                second.v6.prefetch::<COUNTS>(self, &mut of_second.1);
            }
            if third.count > 0 {
                let hits = &mut hits[count..][..third.count];
                third.v4.find::<COUNTS>(self, &of_third.0, lookup, time, hits);
                third.v6.find::<COUNTS>(self, &of_third.1, lookup, time, hits);
                third.clear_absent(hits);
                count += third.count;
            }
            if first.count + second.count == 0 {
                break;
            }
            (first, second, third) = (third, first, second);
            std::mem::swap(&mut of_second, &mut of_third);
        }
        // pass() must not use these packets.
        bursts[0].clear();
        self.bursts = Some(bursts);
        count
    }

    /// Prefetches what lookups of these packets will read, for [`States::pass`] of each or single lookups soon after. Takes up
    /// to [`BURST`] packets; `None` is a packet to skip.
    #[inline]
    pub(crate) fn fetch(&mut self, mut packets: impl Iterator<Item = Option<(Flow, Segment)>>) {
        self.quiescent();
        let mut bursts = self.bursts.take().unwrap_or_default();
        let burst = &mut bursts[0];
        burst.add(self, &mut packets, BURST);
        if burst.v4.present != 0 {
            burst.v4.prefetch::<true>(self, &mut [None; BURST]);
        }
        if burst.v6.present != 0 {
            burst.v6.prefetch::<true>(self, &mut [None; BURST]);
        }
        burst.version = self.hint_version();
        self.bursts = Some(bursts);
    }

    /// Applies the packet at position `at` of the last [`States::fetch`] to its live state, if `passes` accepts the state's
    /// rule. Returns what `passes` returned and the packet's bytes. Returns `None`, without effect, if there is no valid hint, if
    /// the state has strict tracking, or if the packet passed before.
    #[inline]
    pub(crate) fn pass<T>(
        &mut self,
        at: usize,
        lookup: Lookup,
        now: Time,
        passes: impl FnOnce(RuleId) -> Option<T>,
    ) -> Option<(T, u32)> {
        let version = self.hint_version();
        let burst = &mut self.bursts.as_mut()?[0];
        // A jump in time is for a full lookup.
        let jump = now.as_nanos() > self.shared_time.saturating_add(TIME_STEP);
        if at >= BURST || burst.version != version || jump {
            return None;
        }
        let (v4, v6) = (burst.v4.take(at), burst.v6.take(at));
        let burst = &self.bursts.as_ref()?[0];
        if v4 {
            return burst.v4.packets[at].pass(self, lookup, now, passes);
        }
        if v6 {
            return burst.v6.packets[at].pass(self, lookup, now, passes);
        }
        None
    }

    #[inline(always)]
    fn hint_version(&self) -> HintVersion {
        (self.worker.seen(), self.version, self.hint_version)
    }
}

/// The packets in each stage. A worker keeps the buffers: initializing them costs too much.
pub(super) type BurstBuffers = [BurstBuffer; 3];

/// The packets of one burst.
#[derive(Debug, Default)]
pub(super) struct BurstBuffer {
    v4: FamilyBurst<2>,
    v6: FamilyBurst<6>,
    count: usize,
    /// The versions at which the hints were made.
    version: HintVersion,
}

impl BurstBuffer {
    fn clear(&mut self) {
        (self.count, self.v4.present, self.v6.present) = (0, 0, 0);
    }

    /// The first stage, for up to `max` and [`BURST`] packets.
    #[inline(always)]
    fn add(
        &mut self,
        states: &States,
        packets: &mut impl Iterator<Item = Option<(Flow, Segment)>>,
        max: usize,
    ) {
        let (mut v4, mut v6) = (0_u32, 0_u32);
        let (mut at, mut bit) = (0, 1_u32);
        // Internal iteration: the code that makes a packet, mostly its parser, is inlined into this loop, and the packet stays in
        // registers. A `next` that is called from two places is not inlined.
        packets.by_ref().take(max.min(BURST)).for_each(|packet| {
            match packet.map(|(flow, segment)| (states.key_flow_owned(flow), segment)) {
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
        (self.v4.present, self.v6.present, self.count) = (v4, v6, at);
    }

    /// The third stage of packets that belong to neither family.
    #[inline(always)]
    fn clear_absent(&self, hits: &mut [Option<Hit>]) {
        let all = (1_u64 << self.count) - 1;
        for at in bits(all as u32 & !(self.v4.present | self.v6.present)) {
            hits[at] = None;
        }
    }
}

/// The packets of one address family, each at its position in the burst.
#[derive(Debug)]
struct FamilyBurst<const N: usize> {
    packets: [PendingPacket<N>; BURST],
    /// A bit for each position with a packet.
    present: u32,
    /// A bit for each position whose packet has no state: the second stage has read all lines where the index could have it.
    absent: u32,
}

/// A packet between the stages.
#[derive(Clone, Copy, Debug)]
struct PendingPacket<const N: usize> {
    key: Key<N>,
    probe: Probe,
    /// A slot that the index has for the flow's tag, nearly always the flow's; or [`NONE`].
    hint: u32,
    bytes: u32,
    side: Side,
    /// Not updated for UDP, which does not use it.
    segment: Segment,
}

impl<const N: usize> Default for FamilyBurst<N> {
    fn default() -> Self {
        let none = PendingPacket {
            key: Key([0; N]),
            probe: Probe::default(),
            hint: NONE,
            bytes: 0,
            side: Side::Low,
            segment: Segment::default(),
        };
        Self { packets: [none; BURST], present: 0, absent: 0 }
    }
}

impl<const N: usize> FamilyBurst<N>
where
    Key<N>: AddressFamily<N>,
{
    /// The second stage: finds the hints and prefetches the states that they lead to, as a whole (`COUNTS`) or what a peek
    /// reads.
    ///
    /// Not inlined, so that its variables get registers.
    #[inline(never)]
    fn prefetch<'s, const COUNTS: bool>(&mut self, states: &'s States, entries: &mut Entries<'s, N>) {
        let family = Key::<N>::family(&states.shared);
        let index = &*Key::<N>::local(states).index;
        let (mut in_second, mut migrated) = (0_u32, 0_u32);
        self.absent = 0;
        for at in bits(self.present) {
            let packet = &mut self.packets[at];
            if let Some(slot) = index.hint(packet.probe) {
                entries[at] = packet.set_hint::<COUNTS>(family, slot);
                continue;
            }
            (packet.hint, entries[at]) = (NONE, None);
            if index.may_be_elsewhere(packet.probe) {
                index.prefetch_second(packet.probe);
                in_second |= 1 << at;
            } else {
                migrated |= 1 << at;
            }
        }
        let mut misses = migrated;
        for at in bits(in_second) {
            let packet = &mut self.packets[at];
            match index.hint_second(packet.probe) {
                Some(slot) => entries[at] = packet.set_hint::<COUNTS>(family, slot),
                None => migrated |= 1 << at,
            }
        }
        if migrated == 0 {
            return;
        }
        if !index.stashed() {
            misses = migrated;
        }
        match index.next() {
            Some(next) => self.prefetch_migrated::<COUNTS>(family, next, migrated, entries),
            None => self.absent = misses,
        }
    }

    /// The same for packets whose flows may be in the next index.
    #[cold]
    #[inline(never)]
    fn prefetch_migrated<'s, const COUNTS: bool>(
        &mut self,
        family: &'s Family<N>,
        next: &Index,
        migrated: u32,
        entries: &mut Entries<'s, N>,
    ) {
        let mut probes = [Probe::default(); BURST];
        for at in bits(migrated) {
            probes[at] = next.probe(&self.packets[at].key);
            next.prefetch(probes[at]);
        }
        let mut in_second = 0_u32;
        for at in bits(migrated) {
            match next.hint(probes[at]) {
                Some(slot) => entries[at] = self.packets[at].set_hint::<COUNTS>(family, slot),
                None => {
                    next.prefetch_second(probes[at]);
                    in_second |= 1 << at;
                }
            }
        }
        for at in bits(in_second) {
            let slot = next.hint_second(probes[at]);
            entries[at] = slot.and_then(|slot| self.packets[at].set_hint::<COUNTS>(family, slot));
        }
    }

    /// The third stage: writes the result of each packet to `hits`.
    #[inline(never)]
    fn find<const COUNTS: bool>(
        &self,
        states: &States,
        entries: &Entries<'_, N>,
        lookup: Lookup,
        time: BurstTime,
        hits: &mut [Option<Hit>],
    ) {
        let live = states.live(time.now);
        bits(self.present & self.absent).for_each(|at| hits[at] = None);
        for at in bits(self.present & !self.absent) {
            let packet = &self.packets[at];
            // The hint was made in this call: a live state of the flow in it is what a lookup would have found then.
            let Some(entry) = entries[at].filter(|&entry| Family::matches(entry, &packet.key, lookup, live))
            else {
                hits[at] = packet.search::<COUNTS>(states, lookup, time);
                continue;
            };
            let header = entry.header();
            let direction = if !COUNTS {
                packet.side.direction(header.forward())
            } else if header.has(STRICT) {
                hits[at] = packet.hit(states, packet.hint, entry, time);
                continue;
            } else {
                states.hit_unchecked(entry, header, packet.hint, packet.side, packet.info(time))
            };
            hits[at] = Some(Hit { rule: header.rule(), direction });
        }
    }

    /// Removes the packet at position `at`. Returns false if there is none.
    #[inline(always)]
    fn take(&mut self, at: usize) -> bool {
        let present = self.present >> at & 1 != 0;
        self.present &= !(1 << at);
        present
    }
}

impl<const N: usize> PendingPacket<N>
where
    Key<N>: AddressFamily<N>,
{
    /// The first stage: prefetches the flow's line of the index.
    #[inline(always)]
    fn add(&mut self, states: &States, (key, side): (Key<N>, Side), segment: Segment) {
        let index = &Key::<N>::local(states).index;
        let probe = index.probe(&key);
        index.prefetch(probe);
        (self.key, self.probe, self.side, self.bytes) = (key, probe, side, segment.bytes);
        if key.proto() != UDP {
            self.segment = segment;
        }
    }

    /// The second stage: prefetches the state in `slot`, which may be the packet's.
    #[inline(always)]
    fn set_hint<'s, const COUNTS: bool>(&mut self, family: &'s Family<N>, slot: u32) -> Option<Entry<'s, N>> {
        self.hint = slot;
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
        if self.hint == NONE {
            return None;
        }
        let entry = Key::<N>::family(&states.shared).entry(self.hint);
        let header = entry.header();
        if !Family::matches(entry, &self.key, lookup, states.live(now)) || header.has(STRICT) {
            return None;
        }
        let passed = passes(header.rule())?;
        let time = BurstTime::new(now, &states.settings);
        states.hit_unchecked(entry, header, self.hint, self.side, self.info(time));
        Some((passed, self.bytes))
    }

    /// The third stage without a valid hint.
    #[cold]
    #[inline(never)]
    fn search<const COUNTS: bool>(&self, states: &States, lookup: Lookup, time: BurstTime) -> Option<Hit> {
        let family = Key::<N>::family(&states.shared);
        let index = &Key::<N>::local(states).index;
        let slot = family.find(index, self.probe, &self.key, lookup, states.live(time.now))?;
        let entry = family.entry(slot);
        if COUNTS {
            return self.hit(states, slot, entry, time);
        }
        let header = entry.header();
        Some(Hit { rule: header.rule(), direction: self.side.direction(header.forward()) })
    }

    #[cold]
    #[inline(never)]
    fn hit(&self, states: &States, slot: u32, entry: Entry<'_, N>, time: BurstTime) -> Option<Hit> {
        states.hit_of(states.hit(entry, slot, self.side, self.info(time)))
    }

    #[inline(always)]
    fn info(&self, at: BurstTime) -> PacketInfo<'_> {
        PacketInfo { proto: self.key.proto(), bytes: self.bytes, segment: &self.segment, at }
    }
}

/// The positions of the bits that are set, in ascending order.
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
        Some((Flow { ends, proto: UDP, src_port, dst_port: 53, zone: 0 }, Segment::default()))
    }

    fn install(states: &mut States, src_port: u16, name: u16) {
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
        (1..=3).for_each(|port| install(&mut states, port, 1));
        states.fetch([packet(1), None, packet(2), packet(3)].into_iter());
        assert_eq!(
            [0, 1, 2, 2, 4, 31, 32, 99].map(|at| pass(&mut states, at).is_some()),
            [true, false, true, false, false, false, false, false]
        );
        // The packet at position 3 is not part of the next burst.
        states.fetch([packet(1)].into_iter());
        assert_eq!([3, 2, 0].map(|at| pass(&mut states, at).is_some()), [false, false, true]);
        states.fetch(std::iter::empty());
        assert_eq!(pass(&mut states, 0), None);
    }

    #[test]
    fn changes_within_a_burst_invalidate_its_hints() {
        let mut states = States::new(Settings { dyn_max: 2, dyn_evict: true, ..Settings::default() }, 1);
        install(&mut states, 1, 1);
        states.fetch([packet(1), packet(1)].into_iter());
        assert_eq!(pass(&mut states, 0), Some(1));
        // Another state of the flow is the newest now.
        install(&mut states, 1, 2);
        assert_eq!(pass(&mut states, 1), None);
        states.fetch([packet(1), packet(1)].into_iter());
        assert_eq!(pass(&mut states, 0), Some(2));
        // Both are evicted.
        (2..=3).for_each(|port| install(&mut states, port, 1));
        assert_eq!(pass(&mut states, 1), None);
    }

    #[test]
    fn packets_without_a_flow_have_no_hit() {
        let mut states = States::new(Settings::default(), 1);
        (1..=40).for_each(|port| install(&mut states, port, 1));
        let packets = || (1..=40).map(|port| if port % 3 == 0 { None } else { packet(port) });
        let mut hits = [Some(Hit { rule: RuleId(9), direction: crate::state::Direction::Reverse }); 41];
        assert_eq!(states.lookup_burst(packets(), Lookup::Any, NOW, &mut hits), 40);
        for (hit, port) in hits.iter().zip(1..=40) {
            assert_eq!(hit.map(|hit| hit.rule.0), (port % 3 != 0).then_some(1), "{port}");
        }
        assert_eq!(hits[40].map(|hit| hit.rule.0), Some(9));
    }

    /// The results of bursts are those of single lookups, also for flows without a state, while the index grows.
    #[test]
    fn bursts_miss_what_single_lookups_miss() {
        let mut states = States::new(Settings::default(), 1);
        let mut random = 1_u32;
        for installed in (20..20_000_u16).step_by(20) {
            (installed - 20..installed).for_each(|port| install(&mut states, 2 * port, 1));
            let ports: [u16; 40] = std::array::from_fn(|_| {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (random >> 16) as u16 % (2 * installed)
            });
            let mut hits = [None; 40];
            states.peek_burst(ports.iter().map(|&port| packet(port).unwrap().0), Lookup::Any, NOW, &mut hits);
            for (hit, port) in hits.iter().zip(ports) {
                assert_eq!(hit.is_some(), port % 2 == 0, "{port} of {installed}");
            }
        }
    }

    #[test]
    fn bursts_find_flows_that_migrate() {
        let mut states = States::new(Settings::default(), 1);
        let (mut installed, mut migrating) = (0, 0);
        while installed < 20_000 {
            installed += 1;
            install(&mut states, installed, 1);
            if installed % 50 == 0 {
                migrating += u32::from(states.v4.index.next().is_some());
                states.fetch((installed - 31..=installed).map(packet));
                assert!((0..BURST).all(|at| pass(&mut states, at).is_some()), "{installed}");
            }
        }
        assert!(migrating > 10, "{migrating}");
    }
}
