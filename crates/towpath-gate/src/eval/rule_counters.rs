//! Counters per rule. Each walker counts in its own memory; readers sum over the walkers.
//!
//! The counters of a walker are in the order of the rules of its generation. When the walker adopts another
//! generation, it allocates new counters and copies those of rules that stay. A reader locks the walker's slot and
//! gets the counters together with the rules.
//!
//! Invariant: each counter has one writer. A reader sees every packet that was counted before it started, none
//! twice: counters are replaced under the slot's lock, by counters that include the old values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::program::Program;
use crate::state::RuleId;
use towpath_wire::Time;

/// Counter values of a rule.
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

/// The counters of one rule in one walker.
#[derive(Debug, Default)]
#[repr(align(32))]
pub(super) struct RuleCounterCell {
    packets: AtomicU64,
    bytes: AtomicU64,
    last: AtomicU64,
}

impl RuleCounterCell {
    pub(super) fn get(&self) -> RuleCounter {
        // Relaxed, here and below: each number is independent.
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

/// The counters of one walker, with the rules to which they belong.
pub(super) struct RuleCounters {
    pub(super) program: Arc<Program>,
    pub(super) counts: Box<[RuleCounterCell]>,
}

impl RuleCounters {
    /// Creates counters for the rules of a program, with the values of `before` for rules that are in both.
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

    /// Counts a packet for the rule at this position. Only the walker that owns the counters calls it.
    #[inline]
    pub(super) fn count(&self, at: usize, bytes: u32, now: Time) {
        let count = &self.counts[at];
        // No atomic read-modify-write: this is the only writer.
        count.packets.store(count.packets.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        count.bytes.store(count.bytes.load(Ordering::Relaxed) + u64::from(bytes), Ordering::Relaxed);
        count.last.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// As [`count`](Self::count), for several packets.
    pub(super) fn count_many(&self, at: usize, packets: u64, bytes: u64, now: Time) {
        let count = &self.counts[at];
        count.packets.store(count.packets.load(Ordering::Relaxed) + packets, Ordering::Relaxed);
        count.bytes.store(count.bytes.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
        count.last.store(now.as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn of(&self, rule: RuleId) -> Option<RuleCounter> {
        Some(self.counts[self.program.position_of(rule)?].get())
    }
}
