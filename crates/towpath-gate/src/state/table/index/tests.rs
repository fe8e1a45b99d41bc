use super::*;
use crate::state::table::index_line::CONTROL;

fn index(bits: u32, seed: u64) -> Index {
    Index::new(bits, Secret::new(seed), Pages::Base)
}

/// In these tests, a key is its slot number.
fn key(slot: u32) -> Key<2> {
    Key([u64::from(slot), 7])
}

fn add(index: &Index, slot: u32) -> bool {
    index.lock(index.probe(&key(slot))).unwrap().add(slot).is_ok()
}

/// A table whose keys are slot numbers, and which makes an index of twice the size in the place of a full one.
struct Slots(AtomicU64);

impl Table<2> for Slots {
    fn key(&self, slot: u32) -> Key<2> {
        key(slot)
    }

    fn replace(&self, full: &Index) {
        let seed = self.0.fetch_add(1, Ordering::Relaxed);
        full.start_migration(Arc::new(index(full.bits() + 1, 100 + seed)));
    }
}

fn found(index: &Index, slot: u32) -> Option<u32> {
    index.find(index.probe(&key(slot)), |at| at == slot)
}

#[test]
fn an_entry_is_found_until_it_is_removed() {
    let index = index(4, 1);
    (0..100).for_each(|slot| assert!(add(&index, slot)));
    for slot in 0..100 {
        assert_eq!(found(&index, slot), Some(slot));
        let locked = index.lock(index.probe(&key(slot))).unwrap();
        let (place, _) = locked.find(|at| at == slot).unwrap();
        locked.remove(place);
        drop(locked);
        assert_eq!(found(&index, slot), None);
    }
}

/// The count of each first line is that of the entries in other lines, so that no lookup stops too early.
#[test]
fn first_lines_count_the_entries_elsewhere() {
    let index = index(3, 1);
    let counts = || -> Vec<u64> {
        (0..8)
            .map(|line| (index.lines.line(line).word(0).load(Ordering::Relaxed) & CONTROL) / ELSEWHERE)
            .collect()
    };
    let mut random = 1_u32;
    let mut slots = std::collections::BTreeSet::new();
    let mut most = 0;
    for _ in 0..4000 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let slot = random >> 24;
        let mut locked = index.lock(index.probe(&key(slot))).unwrap();
        match locked.find(|at| at == slot) {
            Some((place, _)) => {
                locked.remove(place);
                slots.remove(&slot);
            }
            None if slots.len() < 80 => {
                assert!(locked.add(slot).is_ok());
                slots.insert(slot);
            }
            None => {}
        }
        drop(locked);
        let mut wanted = vec![0; 8];
        for &slot in &slots {
            let probe = index.probe(&key(slot));
            let locked = index.lock(probe).unwrap();
            let (place, _) = locked.find(|at| at == slot).unwrap();
            wanted[probe.first as usize] += u64::from(place.line != probe.first as usize);
        }
        assert_eq!(counts(), wanted);
        assert!((0..256).all(|slot| found(&index, slot).is_some() == slots.contains(&slot)));
        most = most.max(wanted.iter().sum());
    }
    assert!(most > 10, "{most}");
}

/// A writer waits as long as the holder of a lock does not run, and counts that it did.
#[test]
fn a_writer_outlasts_a_preempted_holder() {
    let index = index(1, 1);
    let held = index.lock(index.probe(&key(1))).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| add(&index, 1));
        while index.preempted() == 0 {
            std::thread::yield_now();
        }
        assert!(!writer.is_finished());
        drop(held);
        assert!(writer.join().unwrap());
    });
    assert_eq!((index.preempted(), found(&index, 1)), (1, Some(1)));
}

#[test]
fn tag_matches_are_exact() {
    // Tags that differ from `wanted` in one bit, at every position.
    let lines = Lines::zeroed(1, Pages::Base);
    let line = lines.line(0);
    for wanted in 0..ENTRIES {
        (0..ENTRIES).for_each(|entry| set_tag(line, entry, if entry == wanted { 0x8001 } else { 0x8000 }));
        let entries: Vec<usize> = (0..ENTRIES)
            .filter(|&entry| find(line, 0x8001, |_| true).map(|(at, _)| at) == Some(entry))
            .collect();
        assert_eq!(entries, [wanted]);
        set_tag(line, wanted, 0);
        assert_eq!(find(line, 0x8001, |_| true), None);
    }
}

#[test]
fn two_choices_fill_the_lines() {
    for seed in 0..4 {
        let index = index(12, seed);
        let fits = (0..).take_while(|&slot| add(&index, slot) && !index.stashed()).count();
        let load = fits as f64 / index.capacity() as f64;
        assert!(load > 0.75, "the stash is used at {load}");
    }
}

#[test]
fn regular_keys_fill_the_lines() {
    for shift in [0, 8, 16, 32, 48] {
        let (index, mut count) = (index(10, 5), 0_u32);
        let key = |n: u32| Key([u64::from(n) << shift, 7]);
        while index.lock(index.probe(&key(count))).unwrap().add(count).is_ok() && !index.stashed() {
            count += 1;
        }
        let load = f64::from(count) / index.capacity() as f64;
        assert!(load > 0.7, "shift {shift}: the stash is used at {load}");
    }
}

#[test]
fn a_migration_keeps_every_entry() {
    let old = index(6, 1);
    (0..500).for_each(|slot| assert!(add(&old, slot)));
    let next = Arc::new(index(7, 2));
    assert!(old.start_migration(Arc::clone(&next)));
    assert!(!old.start_migration(Arc::new(index(7, 3))));
    let lookup = |slot| found(&old, slot).or_else(|| found(old.next()?, slot));
    // A flow's own lines first, as a writer does.
    let table = Slots(AtomicU64::new(0));
    old.migrate_flow(old.probe(&key(3)), &table);
    assert!(old.lock(old.probe(&key(3))).is_none());
    assert_eq!(found(&next, 3), Some(3));
    let mut rounds = 0;
    while old.migrate_some(5, &table) == Migration::Partial {
        (0..500).for_each(|slot| assert_eq!(lookup(slot), Some(slot)));
        rounds += 1;
    }
    assert!(rounds >= 10, "{rounds}");
    (0..500).for_each(|slot| assert_eq!(found(&next, slot), Some(slot)));
}

#[test]
fn the_stash_takes_entries_without_room() {
    let index = index(1, 1);
    let added = (0..100).take_while(|&slot| add(&index, slot)).count();
    assert_eq!(added, ENTRIES * (2 + STASH));
    (0..added as u32).for_each(|slot| assert_eq!(found(&index, slot), Some(slot)));
    let next = Arc::new(Index::new(2, Secret::new(9), Pages::Base));
    index.start_migration(Arc::clone(&next));
    while index.migrate_some(1, &Slots(AtomicU64::new(0))) == Migration::Partial {}
    (0..added as u32).for_each(|slot| assert_eq!(found(&next, slot), Some(slot)));
}

/// Entries that the next index has no room for migrate along the chain.
#[test]
fn a_chain_takes_the_entries_of_a_full_index() {
    let (old, table) = (index(6, 1), Slots(AtomicU64::new(0)));
    (0..400).for_each(|slot| assert!(add(&old, slot)));
    old.start_migration(Arc::new(index(2, 2)));
    while old.migrate_some(1, &table) == Migration::Partial {
        assert!((0..400).all(|slot| old.chain().any(|index| found(index, slot).is_some())));
    }
    let sizes: Vec<u32> = old.chain().map(Index::bits).collect();
    assert!(sizes.starts_with(&[6, 2, 3, 4, 5]), "{sizes:?}");
    let entries = |slot| old.chain().filter(|index| found(index, slot).is_some()).count();
    assert!((0..400).all(|slot| entries(slot) == 1));
}
