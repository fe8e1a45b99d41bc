//! loom tests: every interleaving of threads that use a table at once, and every reordering that the memory model
//! permits: `RUSTFLAGS="--cfg loom" cargo test --release -p towpath-gate --lib interleavings`

use std::sync::Arc;

use loom::thread;

use crate::state::concurrent::epoch::Epochs;
use crate::state::concurrent::retire_list::RetireList;
use crate::state::journal::{Changes, Journal, Read};
use crate::state::limits::occupancy::Occupancy;
use crate::state::limits::rule_counts::{RemovedRules, RuleCountCache, RuleCounts};
use crate::state::table::entry::{BurstTime, Entry, NewEntry, PacketInfo};
use crate::state::table::family::{Family, InsertResult};
use crate::state::table::hash::Secret;
use crate::state::table::index::{Index, Migration};
use crate::state::table::key::{Key, Key4, Side};
use crate::state::table::live_filter::LiveFilter;
use crate::state::table::memory::Pages;
use crate::state::table::slab::{Slab, SlotList};
use crate::state::table::slot_cache::SlotCache;
use crate::state::tcp::window::{Fit, Window};
use crate::state::tcp::window_table::WindowTable;
use crate::state::{Direction, Lookup, Name, Origin, RuleId, Segment, Settings};
use towpath_wire::Time;

const NOW: Time = Time::from_secs(100);
const TCP: u8 = 6;

/// A table and its workers.
struct World {
    family: Family<2>,
    epochs: Epochs,
}

fn explore(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // More preemptions find nothing more in practice, and take days.
    builder.preemption_bound = Some(2);
    builder.check(run);
}

fn world() -> Arc<World> {
    let world = World { family: Family::new(1, Pages::Base), epochs: Epochs::new() };
    // std's OnceLock, whose ordering loom does not model, allocates the memory of the first slots.
    let slot = world.family.slab.alloc_one().unwrap();
    world.family.slab.free(SlotList { first: slot, last: slot, slots: 1 });
    Arc::new(world)
}

fn key(n: u64) -> Key4 {
    Key([n, 7])
}

/// Inserts a state for flow `n` and rule `n` from a new slot. Returns the slot.
fn insert(family: &Family<2>, index: &Index, n: u32) -> (u32, InsertResult) {
    let slot = family.slab.alloc_one().unwrap();
    let new = NewEntry {
        key: key(n.into()),
        side: Side::Low,
        rule: RuleId(n),
        name: Name::DEFAULT,
        generation: 0,
        flags: 0,
        parent: u32::MAX,
        lifetime: None,
        every_packet: false,
        established: true,
        origin: Origin::UNRECORDED,
    };
    let segment = Segment { tcp_flags: 0x10, ..Segment::default() };
    let packet = PacketInfo {
        proto: TCP,
        bytes: segment.bytes,
        segment: &segment,
        at: BurstTime::new(NOW, &Settings::default()),
    };
    family.entry(slot).init(&new, packet, &Settings::default());
    (
        slot,
        family.insert(index, &key(n.into()), Name::DEFAULT, slot, LiveFilter::new(NOW, RemovedRules::NONE)),
    )
}

fn find(family: &Family<2>, index: &Index, n: u32) -> Option<u32> {
    let key = key(n.into());
    family.find(index, index.probe(&key), &key, Lookup::Any, LiveFilter::new(NOW, RemovedRules::NONE))
}

#[test]
fn of_two_threads_one_inserts_a_state() {
    explore(|| {
        let world = world();
        let make = |world: &World| insert(&world.family, &world.family.index.current(), 1);
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || make(&world))
        };
        let made = [make(&world), other.join().unwrap()];
        let new = made.iter().filter(|(_, what)| matches!(what, InsertResult::Inserted { .. })).count();
        assert_eq!(new, 1);
        let slot = find(&world.family, &world.family.index.current(), 1);
        for (own, what) in made {
            let is = if let InsertResult::Exists(other) = what { other } else { own };
            assert_eq!(slot, Some(is));
        }
    });
}

#[test]
fn a_state_that_is_found_is_complete() {
    explore(|| {
        let world = world();
        let header = {
            let world = Arc::clone(&world);
            thread::spawn(move || insert(&world.family, &world.family.index.current(), 1))
        };
        if let Some(slot) = find(&world.family, &world.family.index.current(), 1) {
            assert_eq!(world.family.entry(slot).header().rule(), RuleId(1));
            assert!(world.family.entry(slot).has_key(&key(1)));
        }
        header.join().unwrap();
    });
}

#[test]
fn a_slot_is_not_reused_while_a_worker_reads_it() {
    explore(|| {
        let world = world();
        insert(&world.family, &world.family.index.current(), 1);
        let (mut remover, mut reader) = (world.epochs.register().unwrap(), world.epochs.register().unwrap());
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let (family, mut retired) = (&world.family, RetireList::default());
                let mut cache = SlotCache::default();
                let index = family.index.current();
                world.epochs.quiescent(&mut remover);
                let slot = find(family, &index, 1).unwrap();
                assert!(family.unlink(&index, slot, |_| true));
                retired.push(&family.slab, slot);
                retired.free((&family.slab, &mut cache), &world.epochs, &mut remover);
                cache.give_back(&family.slab);
                // In the same slot, if it is free already.
                insert(family, &index, 2);
            })
        };
        let (family, index) = (&world.family, world.family.index.current());
        world.epochs.quiescent(&mut reader);
        if let Some(slot) = find(family, &index, 1) {
            family.entry(slot).refresh(
                Direction::Forward,
                PacketInfo {
                    proto: TCP,
                    bytes: 0,
                    segment: &Segment::default(),
                    at: BurstTime::new(NOW, &Settings::default()),
                },
                &Settings::default(),
            );
            assert_eq!(family.entry(slot).header().rule(), RuleId(1));
        }
        other.join().unwrap();
    });
}

/// Looks for a flow while it migrates from an index, whose migrations `start` begins.
fn find_while_it_migrates(start: impl Fn(&Index) + Copy + Send + Sync + 'static) {
    explore(move || {
        let world = world();
        let index = world.family.index.current();
        insert(&world.family, &index, 1);
        let mover = {
            let (world, index) = (Arc::clone(&world), Arc::clone(&index));
            thread::spawn(move || {
                start(&index);
                while index.migrate_some(4, &world.family) == Migration::Partial {}
            })
        };
        assert!(find(&world.family, &index, 1).is_some());
        mover.join().unwrap();
        assert!(find(&world.family, &index, 1).is_some());
        assert!(find(&world.family, index.last(), 1).is_some());
    });
}

#[test]
fn a_flow_that_migrates_is_found() {
    find_while_it_migrates(|index| {
        index.start_migration(Arc::new(Index::new(2, Secret::new(9), Pages::Base)));
    });
}

/// The next index gets a next one before the flow has migrated to it.
#[test]
fn a_flow_that_migrates_along_a_chain_is_found() {
    find_while_it_migrates(|index| {
        index.start_migration(Arc::new(Index::new(1, Secret::new(9), Pages::Base)));
        index.last().start_migration(Arc::new(Index::new(2, Secret::new(10), Pages::Base)));
    });
}

#[test]
fn a_flow_is_inserted_once_during_a_migration() {
    explore(|| {
        let world = world();
        let index = world.family.index.current();
        let mover = {
            let (world, index) = (Arc::clone(&world), Arc::clone(&index));
            thread::spawn(move || {
                index.start_migration(Arc::new(Index::new(2, Secret::new(9), Pages::Base)));
                insert(&world.family, &index, 1).1
            })
        };
        let made = [insert(&world.family, &index, 1).1, mover.join().unwrap()];
        let new = made.iter().filter(|what| matches!(what, InsertResult::Inserted { .. })).count();
        assert_eq!(new, 1);
        assert!(find(&world.family, &index, 1).is_some());
    });
}

#[test]
fn no_fin_is_lost() {
    explore(|| {
        let world = world();
        let (slot, _) = insert(&world.family, &world.family.index.current(), 1);
        let fin = |entry: Entry<'_, 2>, direction| {
            let segment = Segment { tcp_flags: 0x11, tcp_ack: 5, bytes: 40, ..Segment::default() };
            let _ = entry.count(direction, segment.bytes);
            entry.refresh(
                direction,
                PacketInfo {
                    proto: TCP,
                    bytes: segment.bytes,
                    segment: &segment,
                    at: BurstTime::new(NOW, &Settings::default()),
                },
                &Settings::default(),
            );
        };
        let other = {
            let world = Arc::clone(&world);
            thread::spawn(move || fin(world.family.entry(slot), Direction::Reverse))
        };
        fin(world.family.entry(slot), Direction::Forward);
        other.join().unwrap();
        let entry = world.family.entry(slot);
        assert!(entry.tcp().ended());
        assert_eq!(entry.expires(NOW).since(NOW).as_secs(), 1);
        assert_eq!(entry.counts(Direction::Forward), [2, 40]);
        assert_eq!(entry.counts(Direction::Reverse), [1, 40]);
    });
}

#[test]
fn a_window_has_the_effect_of_both_segments() {
    explore(|| {
        let windows = Arc::new(WindowTable::new());
        let segment = |tcp_flags, tcp_seq, tcp_ack, tcp_len| Segment {
            tcp_flags,
            tcp_seq,
            tcp_ack,
            tcp_len,
            tcp_window: 1000,
            ..Segment::default()
        };
        let mut window = Window::default();
        window.segment(Direction::Forward, &segment(0x02, 100, 0, 0));
        window.segment(Direction::Reverse, &segment(0x12, 500, 101, 0));
        window.segment(Direction::Forward, &segment(0x10, 101, 501, 0));
        windows.insert(0, window);
        let (up, down) = (segment(0x10, 101, 501, 50), segment(0x10, 501, 101, 70));
        let take = |windows: &WindowTable, direction, segment: &Segment| {
            windows.with(0, |window| window.segment(direction, segment))
        };
        let other = {
            let windows = Arc::clone(&windows);
            thread::spawn(move || take(&windows, Direction::Reverse, &down))
        };
        assert_eq!(take(&windows, Direction::Forward, &up), Some(Fit::Fits));
        assert_eq!(other.join().unwrap(), Some(Fit::Fits));
        window.segment(Direction::Forward, &up);
        window.segment(Direction::Reverse, &down);
        assert_eq!(windows.with(0, |window| *window), Some(window));
    });
}

#[test]
fn a_state_counts_in_its_generation() {
    explore(|| {
        let rules = Arc::new(RuleCounts::default());
        let rule = RuleId(1);
        // Before the threads start, so that the rule has a state to remove.
        let first = RuleCountCache::default().add(&rules, rule);
        let remover = {
            let rules = Arc::clone(&rules);
            thread::spawn(move || (rules.remove_where(|_| true), rules.removed()))
        };
        // In another stripe.
        let mut cache = RuleCountCache::new(1);
        let generation = cache.add(&rules, rule);
        assert!(cache.subtract(&rules, rule, first) || generation == first);
        let (states, removed) = remover.join().unwrap();
        let stale = cache.subtract(&rules, rule, generation);
        assert_eq!(stale, states > 0 && generation == first);
        assert!(removed.all_unlinked());
        assert_eq!(rules.count(rule), 0);
    });
}

#[test]
fn a_slot_is_in_one_cache_at_a_time() {
    explore(|| {
        let slab = Arc::new(Slab::<2>::new(Pages::Base));
        // The memory of all slots is allocated here, as in world().
        let first: Vec<u32> = (0..6).map(|_| slab.alloc_one().unwrap()).collect();
        for &slot in &first[..4] {
            slab.free(SlotList { first: slot, last: slot, slots: 1 });
        }
        let work = |slab: &Slab<2>| {
            let mut cache = SlotCache::default();
            let slots = [cache.alloc(slab).unwrap(), cache.alloc(slab).unwrap()];
            cache.free(slab, SlotList { first: slots[0], last: slots[0], slots: 1 });
            cache.give_back(slab);
            slots[1]
        };
        let other = {
            let slab = Arc::clone(&slab);
            thread::spawn(move || work(&slab))
        };
        let taken = [work(&slab), other.join().unwrap(), 4, 5];
        let mut all: Vec<u32> = (4..slab.len()).map(|_| slab.alloc_one().unwrap()).chain(taken).collect();
        let len = slab.len();
        all.sort_unstable();
        assert_eq!(all, (0..len).collect::<Vec<u32>>());
    });
}

#[test]
fn no_reserve_is_lost_and_the_bound_is_exact() {
    /// There is room for a batch, and then there is not.
    const MANY: u32 = 10_000;
    const FEW: u32 = 2;
    explore(|| {
        let occupancy = Arc::new(Occupancy::new());
        let work = |occupancy: &Occupancy, worker: usize| {
            let reserved = occupancy.reserve((worker, 2), MANY);
            assert!(reserved);
            occupancy.release(worker, 1, MANY);
            u64::from(occupancy.reserve((worker, 2), FEW))
        };
        let other = {
            let occupancy = Arc::clone(&occupancy);
            thread::spawn(move || work(&occupancy, 1))
        };
        let reserved = work(&occupancy, 0) + other.join().unwrap();
        assert_eq!(occupancy.used(2), reserved);
        while occupancy.used(2) < FEW.into() {
            assert!(occupancy.reserve((0, 2), FEW));
        }
        assert!(!occupancy.reserve((1, 2), FEW));
    });
}

/// Reads to the end. Returns the contents, and how many changes were lost.
fn read(journal: &Journal<2>, at: &mut u64) -> (Vec<u64>, u64) {
    let (mut found, mut missed) = (Vec::new(), 0);
    loop {
        match journal.read(at) {
            Read::Content([first, second]) => {
                assert_eq!(first, !second, "one content is half of another");
                found.push(first);
            }
            Read::Lost(changes) => missed += changes,
            Read::Empty => return (found, missed),
        }
    }
}

/// Two writers that share a slot, a round apart, and a reader.
#[test]
fn a_change_in_the_journal_is_whole_or_lost() {
    explore(|| {
        let journal = Arc::new(Journal::<2>::new());
        let mut at = journal.attach(Changes::All);
        journal.push(|| [0, !0]);
        let writers = [10, 20].map(|value| {
            let journal = Arc::clone(&journal);
            thread::spawn(move || journal.push(|| [value, !value]))
        });
        let (mut found, mut missed) = read(&journal, &mut at);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let (rest, late) = read(&journal, &mut at);
        found.extend(rest);
        missed += late;
        assert_eq!(found.len() as u64 + missed, 3, "{found:?}");
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len() as u64 + missed, 3, "a change is read once");
        // The last position is in its slot, unless its writer found the first one there.
        assert!(missed <= 2 && found.iter().all(|value| [0, 10, 20].contains(value)));
    });
}

/// A change of a slot of the table follows the one that it happens after: the end of a state is not before an update of it.
#[test]
fn an_update_after_the_end_of_a_state_sees_the_end() {
    explore(|| {
        use crate::state::concurrent::sync::{AtomicU64, Ordering};
        let (journal, linked) = (Arc::new(Journal::<2>::new()), Arc::new(AtomicU64::new(1)));
        let mut at = journal.attach(Changes::All);
        let (other, state) = (Arc::clone(&journal), Arc::clone(&linked));
        let unlinks = thread::spawn(move || {
            // Relaxed: the position orders it.
            state.store(0, Ordering::Relaxed);
            other.push(|| [9, !9]);
        });
        journal.push(|| {
            let linked = linked.load(Ordering::Relaxed);
            [linked, !linked]
        });
        unlinks.join().unwrap();
        let (found, missed) = read(&journal, &mut at);
        assert_eq!(missed, 0);
        assert!(found == [1, 9] || found == [0, 9] || found == [9, 0], "{found:?}");
    });
}
