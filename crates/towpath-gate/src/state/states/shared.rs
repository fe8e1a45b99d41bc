//! The data that all workers of a gate share, and each worker's local data of an address family.

use std::sync::{Arc, Mutex};

use super::States;
use crate::state::Settings;
use crate::state::concurrent::epoch::Epochs;
use crate::state::concurrent::retire_list::{AbandonedSlots, RetireList};
use crate::state::concurrent::sync::AtomicU64;
use crate::state::concurrent::worker_counters::{Counter, WorkerCounters};
use crate::state::fragment_table::FragmentTable;
use crate::state::journal::{Journal, WORDS};
use crate::state::limits::Limits;
use crate::state::limits::first_syn::FirstSynTable;
use crate::state::limits::occupancy::Occupancy;
use crate::state::limits::rule_counts::RuleCounts;
use crate::state::table::family::Family;
use crate::state::table::hash::Secret;
use crate::state::table::index::Index;
use crate::state::table::key::{FlowKey, Key4, Key6};
use crate::state::table::memory::Pages;
use crate::state::table::slot_cache::SlotCache;
use crate::state::table::slot_counters::LocalSlotCounters;

/// Data shared by all workers.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) epochs: Epochs,
    /// Incremented when the settings, the removed rules, or an index for lookups change.
    pub(super) version: AtomicU64,
    pub(super) occupancy: Occupancy,
    /// Current time in ns, as last published by a worker. The time of any worker is at most [`TIME_STEP`](super::TIME_STEP) ahead of it.
    pub(super) time: AtomicU64,
    pub(super) settings: Mutex<Settings>,
    pub(super) v4: Family<2>,
    pub(super) v6: Family<6>,
    /// Key of all hashes except those of the index.
    pub(super) secret: Secret,
    pub(super) limits: Limits,
    pub(super) first_syns: FirstSynTable,
    pub(super) fragments: FragmentTable,
    pub(super) journal: Arc<Journal<WORDS>>,
    pub(super) rules: RuleCounts,
    pub(super) counters: WorkerCounters,
    pub(super) abandoned: AbandonedSlots,
}

impl Shared {
    pub(super) fn new(settings: Settings, seed: u64, pages: Pages) -> Self {
        let secret = Secret::new(seed ^ 0xbb67_ae85_84ca_a73b);
        Self {
            epochs: Epochs::new(),
            version: AtomicU64::new(0),
            occupancy: Occupancy::new(),
            time: AtomicU64::new(0),
            settings: Mutex::new(settings.clamped()),
            v4: Family::new(seed, pages),
            v6: Family::new(seed ^ 0x3c6e_f372_fe94_f82b, pages),
            limits: Limits::new(&secret),
            secret,
            first_syns: FirstSynTable::default(),
            fragments: FragmentTable::default(),
            journal: Arc::new(Journal::new()),
            rules: RuleCounts::default(),
            counters: WorkerCounters::new(),
            abandoned: AbandonedSlots::default(),
        }
    }

    /// The number of states, including those that have expired and were not collected yet.
    pub(super) fn len(&self) -> u64 {
        // While workers change the counts, the sum may be too large for a moment. There are at most as many states as slots.
        self.lens().iter().sum::<u64>().min(self.occupancy.granted())
    }

    /// The number of states of each address family.
    pub(super) fn lens(&self) -> [u64; 2] {
        [Counter::Linked4, Counter::Linked6].map(|linked| self.len_of(linked))
    }

    /// The number of states of one address family.
    pub(super) fn len_of(&self, linked: Counter) -> u64 {
        let states = self.counters.sum_of(self.epochs.registered(), linked);
        // While workers change the counts, the sum may be negative for a moment.
        if states > u64::MAX / 2 { 0 } else { states }
    }
}

/// A worker's local data of one address family.
#[derive(Debug)]
pub(super) struct LocalFamily {
    /// The index in which lookups start.
    pub(super) index: Arc<Index>,
    pub(super) slot_counters: LocalSlotCounters,
    pub(super) retired: RetireList,
    pub(super) free: SlotCache,
}

impl LocalFamily {
    pub(super) fn new<const N: usize>(family: &Family<N>, worker: usize) -> Self {
        let slot_counters = family.slot_counters.of_worker(worker);
        let (retired, free) = (RetireList::default(), SlotCache::default());
        Self { index: family.index.current(), slot_counters, retired, free }
    }
}

/// The address family of keys of `N` words.
pub(super) trait AddressFamily<const N: usize>: FlowKey {
    const V6: bool;
    /// Counts the linked states.
    const LINKED: Counter;
    fn family(shared: &Shared) -> &Family<N>;
    fn local(states: &States) -> &LocalFamily;
    fn pick<'a>(v4: &'a mut LocalFamily, v6: &'a mut LocalFamily) -> &'a mut LocalFamily;
}

impl AddressFamily<2> for Key4 {
    const V6: bool = false;
    const LINKED: Counter = Counter::Linked4;

    #[inline]
    fn family(shared: &Shared) -> &Family<2> {
        &shared.v4
    }

    #[inline]
    fn local(states: &States) -> &LocalFamily {
        &states.v4
    }

    #[inline]
    fn pick<'a>(v4: &'a mut LocalFamily, _: &'a mut LocalFamily) -> &'a mut LocalFamily {
        v4
    }
}

impl AddressFamily<6> for Key6 {
    const V6: bool = true;
    const LINKED: Counter = Counter::Linked6;

    #[inline]
    fn family(shared: &Shared) -> &Family<6> {
        &shared.v6
    }

    #[inline]
    fn local(states: &States) -> &LocalFamily {
        &states.v6
    }

    #[inline]
    fn pick<'a>(_: &'a mut LocalFamily, v6: &'a mut LocalFamily) -> &'a mut LocalFamily {
        v6
    }
}
