//! What each rule has seen: counted by every walker in memory of its own, and added up when somebody asks.
//!
//! What: a walker's counts stand in the order of the rules that it goes by. When it takes other rules it makes other
//! counts, and takes along those of the rules that stay. Readers take the walker's seat, and with it the counts and the
//! rules that they belong to.
//!
//! Invariant: of each count there is one writer. Readers see every packet that was counted before they came, none twice:
//! counts are only replaced, under the seat's lock, by counts that have what these had.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::program::Program;
use crate::state::RuleId;
use towpath_wire::Time;

/// Beside the version of a walker that says it walks nothing for a while.
const AWAY: u64 = 1 << 63;

/// What a rule has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RuleCounter {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) last: Time,
}

impl RuleCounter {
    pub(super) fn add(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.last = self.last.max(other.last);
    }

    pub(super) fn since(self, earlier: Self) -> Self {
        Self { packets: self.packets - earlier.packets, bytes: self.bytes - earlier.bytes, last: self.last }
    }
}

/// A rule's count of one walker.
#[derive(Debug, Default)]
#[repr(align(32))]
struct RuleCounterCell {
    packets: AtomicU64,
    bytes: AtomicU64,
    last: AtomicU64,
}

impl RuleCounterCell {
    fn get(&self) -> RuleCounter {
        // Relaxed, here and below: each number is right by itself.
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RuleCounter {
            packets: get(&self.packets),
            bytes: get(&self.bytes),
            last: Time::from_nanos(get(&self.last)),
        }
    }

    fn set(&self, counter: RuleCounter) {
        self.packets.store(counter.packets, Ordering::Relaxed);
        self.bytes.store(counter.bytes, Ordering::Relaxed);
        self.last.store(counter.last.as_nanos(), Ordering::Relaxed);
    }
}

/// The counts of one walker, beside the rules that it goes by.
pub(super) struct RuleCounters {
    pub(super) program: Arc<Program>,
    counts: Box<[RuleCounterCell]>,
}

impl RuleCounters {
    /// RuleCounters for these rules, with what `before` had of them.
    pub(super) fn new(program: Arc<Program>, before: Option<&Self>) -> Self {
        let count = |rule: &super::program::CompiledRule| {
            let count = RuleCounterCell::default();
            if let Some(counter) = before.and_then(|before| before.of(rule.id)) {
                count.set(counter);
            }
            count
        };
        let counts = program.rules.iter().map(count).collect();
        Self { program, counts }
    }

    /// RuleCounters a packet for the rule at this position, by the walker that they belong to.
    #[inline]
    pub(super) fn count(&self, at: usize, bytes: u32, now: Time) {
        let count = &self.counts[at];
        // No read-modify-write: nobody else writes here.
        count.packets.store(count.packets.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        count.bytes.store(count.bytes.load(Ordering::Relaxed) + u64::from(bytes), Ordering::Relaxed);
        count.last.store(now.as_nanos(), Ordering::Relaxed);
    }

    fn of(&self, rule: RuleId) -> Option<RuleCounter> {
        Some(self.counts[self.program.position_of(rule)?].get())
    }
}

/// What others may see of a walker.
pub(super) struct WalkerSlot {
    counts: Mutex<Arc<RuleCounters>>,
    /// The number of what it goes by.
    version: AtomicU64,
    /// Tags that found no room on their packet.
    tags_full: AtomicU64,
}

impl WalkerSlot {
    pub(super) fn take(&self, version: u64, counts: Arc<RuleCounters>) {
        *locked(&self.counts) = counts;
        // Release: pairs with the acquire of WalkerSlots::all_have(): what the walker did by what it went by is done.
        self.version.store(version, Ordering::Release);
    }

    pub(super) fn go(&self) {
        self.version.fetch_or(AWAY, Ordering::Release);
    }

    /// The walker is back, still with what it had.
    pub(super) fn come(&self, version: u64) {
        self.version.store(version, Ordering::Relaxed);
        // Pairs with the fence of all_have(): if that one came first, the walker sees what was put in force before it;
        // if this one did, the walker is seen.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    pub(super) fn count_tag(&self) {
        self.tags_full.store(self.tags_full.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

/// The seats of all walkers, and what those counted that are gone.
#[derive(Default)]
pub(super) struct WalkerSlots(Mutex<All>);

#[derive(Default)]
struct All {
    seats: Vec<Arc<WalkerSlot>>,
    gone: HashMap<RuleId, RuleCounter>,
    tags_full: u64,
}

impl WalkerSlots {
    pub(super) fn join(&self, version: u64, counts: Arc<RuleCounters>) -> Arc<WalkerSlot> {
        let seat = Arc::new(WalkerSlot {
            counts: Mutex::new(counts),
            version: AtomicU64::new(version),
            tags_full: AtomicU64::new(0),
        });
        locked(&self.0).seats.push(Arc::clone(&seat));
        seat
    }

    /// The walker is gone; what it counted stays.
    pub(super) fn leave(&self, seat: &Arc<WalkerSlot>) {
        let mut all = locked(&self.0);
        all.seats.retain(|other| !Arc::ptr_eq(other, seat));
        all.tags_full += seat.tags_full.load(Ordering::Relaxed);
        let counts = locked(&seat.counts);
        for (rule, count) in counts.program.rules.iter().zip(&counts.counts) {
            let counter = count.get();
            if counter.packets > 0 {
                all.gone.entry(rule.id).or_default().add(counter);
            }
        }
    }

    /// What these rules have seen, all walkers together.
    pub(super) fn sums(&self, rules: impl Iterator<Item = RuleId> + Clone) -> Vec<RuleCounter> {
        let all = locked(&self.0);
        let mut sums: Vec<RuleCounter> =
            rules.clone().map(|rule| all.gone.get(&rule).copied().unwrap_or_default()).collect();
        for seat in &all.seats {
            let counts = locked(&seat.counts);
            for (sum, rule) in sums.iter_mut().zip(rules.clone()) {
                sum.add(counts.of(rule).unwrap_or_default());
            }
        }
        sums
    }

    /// Forgets what walkers that are gone counted for rules that are gone too.
    pub(super) fn forget(&self, stays: impl Fn(RuleId) -> bool) {
        locked(&self.0).gone.retain(|rule, _| stays(*rule));
    }

    pub(super) fn tags_full(&self) -> u64 {
        let all = locked(&self.0);
        all.tags_full + all.seats.iter().map(|seat| seat.tags_full.load(Ordering::Relaxed)).sum::<u64>()
    }

    /// Whether there is one walker only.
    pub(super) fn alone(&self) -> bool {
        locked(&self.0).seats.len() == 1
    }

    /// Whether some walker goes by this very version, or will when it comes back.
    pub(super) fn held(&self, version: u64) -> bool {
        // Relaxed: who sees it late asks again.
        locked(&self.0).seats.iter().any(|seat| seat.version.load(Ordering::Relaxed) & !AWAY == version)
    }

    /// Whether every walker goes by this version or a later one, or is away.
    pub(super) fn all_have(&self, version: u64) -> bool {
        // Pairs with the fence of WalkerSlot::come().
        std::sync::atomic::fence(Ordering::SeqCst);
        // Acquire: pairs with the release of take() and go().
        locked(&self.0).seats.iter().all(|seat| seat.version.load(Ordering::Acquire) >= version)
    }
}

/// The lock's contents, whoever panicked with it: they are whole at every step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
