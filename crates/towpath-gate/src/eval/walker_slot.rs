//! Slots: what the gate reads about each walker. Its counters, its generation and whether it is idle.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::rule_counters::{RuleCounter, RuleCounters};
use crate::state::RuleId;

/// Flag in the version of an idle walker.
const IDLE: u64 = 1 << 63;

/// One walker as the gate sees it.
pub(super) struct WalkerSlot {
    counts: Mutex<Arc<RuleCounters>>,
    /// Version of the walker's generation, with [`IDLE`].
    version: AtomicU64,
    /// Tags that were not attached because the packet had no room.
    tags_full: AtomicU64,
}

impl WalkerSlot {
    pub(super) fn publish(&self, version: u64, counts: Arc<RuleCounters>) {
        *locked(&self.counts) = counts;
        // Release: pairs with the acquire of WalkerSlots::all_reached(). The walker has finished its work with the
        // earlier generation.
        self.version.store(version, Ordering::Release);
    }

    pub(super) fn set_idle(&self) {
        self.version.fetch_or(IDLE, Ordering::Release);
    }

    /// Marks the walker as active, still at `version`.
    pub(super) fn set_active(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
        // Pairs with the fence of all_reached(). If that fence came first, the walker sees what was published
        // before it; if this fence came first, all_reached() sees the walker.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(super) fn count_tag(&self) {
        self.tags_full.store(self.tags_full.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// The slots of all walkers, and the totals of walkers that ended.
#[derive(Default)]
pub(super) struct WalkerSlots(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    slots: Vec<Arc<WalkerSlot>>,
    gone: HashMap<RuleId, RuleCounter>,
    tags_full: u64,
}

impl WalkerSlots {
    pub(super) fn register(&self, version: u64, counts: Arc<RuleCounters>) -> Arc<WalkerSlot> {
        let slot = Arc::new(WalkerSlot {
            counts: Mutex::new(counts),
            version: AtomicU64::new(version),
            tags_full: AtomicU64::new(0),
        });
        locked(&self.0).slots.push(Arc::clone(&slot));
        slot
    }

    /// Removes the slot of a walker that ends. Its counters are added to the totals.
    pub(super) fn unregister(&self, slot: &Arc<WalkerSlot>) {
        let mut all = locked(&self.0);
        all.slots.retain(|other| !Arc::ptr_eq(other, slot));
        all.tags_full += slot.tags_full.load(Ordering::Relaxed);
        let counts = locked(&slot.counts);
        for (rule, count) in counts.program.rules.iter().zip(&counts.counts) {
            let counter = count.get();
            if counter.packets > 0 {
                all.gone.entry(rule.id).or_default().add(counter);
            }
        }
    }

    /// Sums the counters of these rules over all walkers.
    pub(super) fn sums(&self, rules: impl Iterator<Item = RuleId> + Clone) -> Vec<RuleCounter> {
        let all = locked(&self.0);
        let mut sums: Vec<RuleCounter> =
            rules.clone().map(|rule| all.gone.get(&rule).copied().unwrap_or_default()).collect();
        for slot in &all.slots {
            let counts = locked(&slot.counts);
            for (sum, rule) in sums.iter_mut().zip(rules.clone()) {
                sum.add(counts.of(rule).unwrap_or_default());
            }
        }
        sums
    }

    /// Discards totals of ended walkers for rules that no longer exist.
    pub(super) fn retain(&self, stays: impl Fn(RuleId) -> bool) {
        locked(&self.0).gone.retain(|rule, _| stays(*rule));
    }

    pub(super) fn tags_full(&self) -> u64 {
        let all = locked(&self.0);
        all.tags_full + all.slots.iter().map(|slot| slot.tags_full.load(Ordering::Relaxed)).sum::<u64>()
    }

    /// Returns true if there is exactly one walker.
    pub(super) fn is_single(&self) -> bool {
        locked(&self.0).slots.len() == 1
    }

    /// Returns true if a walker, idle or active, is at exactly this version.
    pub(super) fn is_used(&self, version: u64) -> bool {
        // Relaxed: a late value only delays reclamation until the next call.
        locked(&self.0).slots.iter().any(|slot| slot.version.load(Ordering::Relaxed) & !IDLE == version)
    }

    /// Returns true if every walker is at this version or a later one, or is idle.
    pub(super) fn all_reached(&self, version: u64) -> bool {
        // Pairs with the fence of WalkerSlot::set_active().
        std::sync::atomic::fence(Ordering::SeqCst);
        // Acquire: pairs with the release of publish() and set_idle().
        locked(&self.0).slots.iter().all(|slot| slot.version.load(Ordering::Acquire) >= version)
    }
}

/// The contents are consistent at every step, even after a panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
