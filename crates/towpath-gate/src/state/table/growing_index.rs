//! The index of one address family while it grows: the index to begin lookups with, and those before and after it.
//!
//! What: when three quarters of the entries are used, an index with twice the lines is made, and the flows migrate: some
//! lines with each call of [`GrowingIndex::migrate`], and the lines of a flow before it is written. When an eighth of the entries
//! is used, the flows migrate to an index with half the lines in the same way, outside the packet path. When the stash is in use
//! although there is room, a peer may know the hash secret: the flows migrate to an index of the same size with another
//! secret.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::family::locked;
use super::hash::Secret;
use super::index::{Index, Migration, Table};
use super::memory::Pages;
use crate::state::concurrent::sync::{AtomicU64, Ordering};

/// Lines of the first index, as a power of two.
#[cfg(not(loom))]
const FIRST_BITS: u32 = 6;
#[cfg(loom)]
const FIRST_BITS: u32 = 1;

/// Lines that migrate with an install, and after a burst.
///
/// One line per install completes a migration in time: it begins when 7.5 entries of each of the `n` lines are used, and the
/// next one is due when as many of the `2n` lines are used. There are 7.5n installs for n lines.
pub(crate) const MIGRATE_LINES: u64 = 1;

/// Lines that migrate with a call outside the packet path.
pub(crate) const MIGRATE_LINES_IDLE: u64 = 128;

/// The indices of one address family.
#[derive(Debug)]
pub(crate) struct GrowingIndex {
    /// The index to begin lookups with.
    current: Mutex<Arc<Index>>,
    /// The next index, allocated and prefaulted ahead of its use.
    spare: Mutex<Option<Arc<Index>>>,
    /// The indices that the flows have left, for a call outside the packet path to free: unmapping takes a while.
    old: Mutex<VecDeque<Arc<Index>>>,
    seed: AtomicU64,
    /// [`Index::preempted`] of the indices before the current one.
    preempted: AtomicU64,
    pages: Pages,
}

impl GrowingIndex {
    pub(crate) fn new(seed: u64, pages: Pages) -> Self {
        Self {
            current: Mutex::new(Arc::new(Index::new(FIRST_BITS, Secret::new(seed), pages))),
            spare: Mutex::new(None),
            old: Mutex::new(VecDeque::with_capacity(4)),
            seed: AtomicU64::new(seed),
            preempted: AtomicU64::new(0),
            pages,
        }
    }

    /// The index to begin lookups with. Workers keep it until the configuration version changes.
    pub(crate) fn current(&self) -> Arc<Index> {
        Arc::clone(&locked(&self.current))
    }

    /// How often a writer waited for a lock whose holder was preempted.
    pub(crate) fn preempted(&self) -> u64 {
        let current = self.current();
        self.preempted.load(Ordering::Relaxed) + current.chain().map(Index::preempted).sum::<u64>()
    }

    /// Migrates `lines` lines from `index` to `next`. Returns true when `index` is empty: [`GrowingIndex::current`] is
    /// another one. `prefetch` fetches the key in a slot that is needed soon.
    #[cold]
    pub(crate) fn migrate<const N: usize>(
        &self,
        (index, next): (&Arc<Index>, &Arc<Index>),
        lines: u64,
        table: &impl Table<N>,
        prefetch: impl Fn(u32),
    ) -> bool {
        if index.migrate_some(lines, table) == Migration::Partial {
            // The next call comes soon, and then waits only for the lines that the entries go to.
            index.prefetch_migration(lines.min(MIGRATE_LINES), prefetch);
            return false;
        }
        let mut current = locked(&self.current);
        let old = Arc::ptr_eq(&current, index).then(|| std::mem::replace(&mut *current, Arc::clone(next)));
        drop(current);
        if let Some(old) = &old {
            // Relaxed: a count.
            self.preempted.fetch_add(old.preempted(), Ordering::Relaxed);
            // Without calls outside the packet path, the index before it is freed here.
            self.free_old();
            locked(&self.old).push_back(Arc::clone(old));
        }
        true
    }

    /// Starts a migration to a larger index, or to one with another secret, if `states` states need it.
    #[cold]
    pub(crate) fn grow(&self, states: u64) {
        let current = locked(&self.current);
        let last = current.last();
        let (capacity, stashed) = (last.capacity(), last.stashed());
        let bits = match stashed {
            _ if states * 4 > capacity * 3 => last.bits() + 1,
            true => last.bits() + u32::from(states * 2 > capacity),
            false => return,
        };
        let mut spare = locked(&self.spare);
        let fits = |spare: &mut Arc<Index>| spare.bits() == bits;
        // Another thread is prefaulting it. Up to 7/8 of the entries can be used meanwhile.
        let soon = spare.as_mut().is_some_and(|spare| fits(spare) && !spare.is_prefaulted());
        if soon && !stashed && states * 8 <= capacity * 7 {
            return;
        }
        last.start_migration(spare.take_if(fits).unwrap_or_else(|| Arc::new(self.make(bits))));
    }

    /// Starts a migration from an index without room to a larger one, if it has no next one.
    #[cold]
    pub(crate) fn replace(&self, full: &Index) {
        if full.next().is_none() {
            full.start_migration(Arc::new(self.make(full.bits() + 1)));
        }
    }

    /// Starts a migration to an index with half the lines, if `states` states need no more. Frees an index that was prepared
    /// for more states. Returns true if flows migrate.
    ///
    /// A fourth of the next index is used at the end. Each install migrates a line: all `n` lines have migrated when as many
    /// flows came, before three quarters of the next index's `5n` entries are used. If `states` is too old a number, the next
    /// index has a next one before it is full.
    pub(crate) fn shrink(&self, states: u64) -> bool {
        let current = locked(&self.current);
        let (capacity, bits) = (current.capacity(), current.bits());
        if current.next().is_some() || states * 4 > capacity {
            return false;
        }
        let spare = locked(&self.spare).take_if(|spare| spare.bits() > bits);
        let begins = states * 8 < capacity && bits > FIRST_BITS && !current.stashed();
        // A thread that finds no room may be first.
        let begins = begins && current.start_migration(Arc::new(self.make(bits - 1)));
        // After the lock is released: unmapping takes a while.
        drop((current, spare));
        begins
    }

    /// Bytes of the indices.
    pub(crate) fn bytes(&self) -> u64 {
        let current = self.current();
        let spare = locked(&self.spare).as_ref().map_or(0, |spare| spare.bytes());
        let old = locked(&self.old).iter().map(|old| old.bytes()).sum::<u64>();
        current.chain().map(Index::bytes).sum::<u64>() + spare + old
    }

    /// Frees the previous indices that no worker uses any more.
    pub(crate) fn free_old(&self) {
        // The oldest one first: it refers to the next one.
        loop {
            let old = locked(&self.old).pop_front_if(|old| Arc::strong_count(old) == 1);
            // After the lock is released: unmapping takes a while.
            if old.is_none() {
                return;
            }
        }
    }

    /// Allocates and prefaults `lines` lines of the index that `states` states will need next. Returns true if more remain.
    pub(crate) fn prepare(&self, states: u64, lines: u64) -> bool {
        let current = self.current();
        // Flows that migrate already need those lines first.
        if current.next().is_some() {
            return current.last().prefault(lines);
        }
        if states * 2 <= current.capacity() {
            return false;
        }
        // The lock is not held while pages are faulted in.
        let spare = {
            let (mut spare, bits) = (locked(&self.spare), current.bits() + 1);
            spare.take_if(|spare| spare.bits() < bits);
            Arc::clone(spare.get_or_insert_with(|| Arc::new(self.make(bits))))
        };
        spare.prefault(lines)
    }

    fn make(&self, bits: u32) -> Index {
        // Relaxed: each index draws a distinct number, and with it a distinct secret.
        let seed = self.seed.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        Index::new(bits, Secret::new(seed ^ 0x6a09_e667_f3bc_c908), self.pages)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::table::key::Key;

    /// A table whose keys are slot numbers.
    struct Slots<'a>(&'a GrowingIndex);

    impl Table<2> for Slots<'_> {
        fn key(&self, slot: u32) -> Key<2> {
            Key([slot.into(), 0])
        }

        fn replace(&self, full: &Index) {
            self.0.replace(full);
        }
    }

    #[test]
    fn an_index_is_prepared_before_it_is_needed() {
        let indices = GrowingIndex::new(1, Pages::Base);
        let index = indices.current();
        let half = index.capacity() / 2;
        assert!(!indices.prepare(half, 1), "half full");
        while indices.prepare(half + 1, 7) {}
        indices.grow(half + 1);
        assert!(index.next().is_none(), "not yet three quarters full");
        indices.grow(index.capacity() * 3 / 4 + 1);
        let next = index.next().expect("it grows");
        assert!(next.is_prefaulted() && next.bits() == index.bits() + 1);
        while !indices.migrate((&index, next), 5, &Slots(&indices), |_| ()) {}
        assert_eq!(indices.current().bits(), index.bits() + 1);
        // `old` holds a reference too.
        assert_eq!(Arc::strong_count(&index), 2);
        indices.free_old();
        assert_eq!(Arc::strong_count(&index), 2, "in use here");
    }

    #[test]
    fn a_sparse_index_is_halved() {
        let indices = GrowingIndex::new(1, Pages::Base);
        let migrate = || {
            let index = indices.current();
            let next = index.next().expect("it migrates");
            while !indices.migrate((&index, next), 5, &Slots(&indices), |_| ()) {}
        };
        let first = indices.current().capacity();
        for bits in 1..4 {
            indices.grow((first << (bits - 1)) * 3 / 4 + 1);
            migrate();
            assert_eq!(indices.current().capacity(), first << bits);
        }
        indices.prepare(first * 5, 1);
        let bytes = indices.bytes();
        assert!(!indices.shrink(first) && indices.bytes() < bytes, "what was prepared is freed");
        assert!(indices.current().next().is_none());
        assert!(indices.shrink(first - 1) && !indices.shrink(0));
        migrate();
        assert!(!indices.shrink(first / 2));
        while indices.shrink(0) {
            migrate();
        }
        indices.free_old();
        assert_eq!((indices.current().capacity(), indices.bytes()), (first, indices.current().bytes()));
    }

    /// States that come while a thread decides to halve the index are found, though it is too small for them.
    #[test]
    fn an_index_that_was_halved_too_late_grows_again() {
        let indices = GrowingIndex::new(1, Pages::Base);
        let index = indices.current();
        indices.grow(index.capacity() * 3 / 4 + 1);
        while !indices.migrate((&index, index.next().unwrap()), 5, &Slots(&indices), |_| ()) {}
        let index = indices.current();
        let states = index.capacity() as u32 * 3 / 4;
        let add = |slot| {
            let key = Slots(&indices).key(slot);
            while let Err(full) = index.with_flow(&key, &Slots(&indices), |mut flow| flow.add(slot)) {
                indices.replace(full);
            }
        };
        let is_found = |slot| {
            let found = |index: &Index| index.find(index.probe(&Slots(&indices).key(slot)), |at| at == slot);
            index.chain().any(|index| found(index).is_some())
        };
        (0..states).for_each(add);
        assert!(indices.shrink(0), "the number of states is too old");
        let mut lines = 0;
        while !indices.migrate((&index, index.next().unwrap()), 1, &Slots(&indices), |_| ()) {
            lines += 1;
            add(states + lines);
            assert!((0..=states + lines).filter(|&slot| slot != states).all(is_found), "{lines} lines");
        }
        let halved = indices.current();
        assert_eq!(
            (halved.bits() + 1, halved.next().map(|next| next.bits())),
            (index.bits(), Some(index.bits()))
        );
        // The number of states has its effect on the last index.
        indices.grow(index.capacity());
        assert_eq!(halved.chain().count(), 3);
        assert!(indices.preempted() == 0 && indices.bytes() > halved.bytes() * 7);
    }
}
