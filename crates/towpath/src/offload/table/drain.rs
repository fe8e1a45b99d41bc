//! What the kernel counted for entries goes to their states and rules.

use std::time::{Duration, Instant};

use towpath_engine::flow_verdict;
use towpath_gate::state::{Lookup, Segment};
use towpath_port::offload::FlowKey;
use towpath_wire::Time;

use super::Table;
use crate::offload::TICK;
use crate::offload::entry::{Settled, settle};

/// Entries whose counters one step reads, most of which are unchanged.
const DRAINED: u32 = 8192;
/// The counters of all entries are read in a round of this time for each entry, but at least `TICK`, and at most `ROUND`.
const ENTRY: Duration = Duration::from_micros(1);
const ROUND: Duration = Duration::from_millis(800);

impl Table {
    /// Counts the packets whose program had read an entry before it ended.
    pub(super) fn settle_ended(&mut self, at: Time) {
        for (_, entry) in &mut self.quarantine {
            settle(&self.map, &mut self.walker, entry, at);
        }
    }

    /// Adds what the kernel counted to states and rules. Ends entries whose state has ended, or began another connection.
    pub(in crate::offload) fn drain(&mut self) {
        let (now, at) = (Instant::now(), self.now());
        // Which connections have begun.
        self.read_journal(now);
        self.write_added();
        (0..self.entries.slots()).for_each(|slot| self.drain_slot(slot, now, at));
        self.settle_ended(at);
        self.drain_denied(at);
        self.walker.idle();
    }

    /// As [`drain`](Self::drain), for the part of the entries that is due.
    pub(super) fn drain_part(&mut self, now: Instant) {
        let (slots, at) = (self.entries.slots(), self.now());
        let round = (ENTRY * slots).clamp(TICK, ROUND);
        let elapsed = now.saturating_duration_since(self.round.0);
        let due = (u128::from(slots) * elapsed.as_nanos() / round.as_nanos()).min(slots.into()) as u32;
        let end = due.min(self.round.1.saturating_add(DRAINED));
        (self.round.1..end).for_each(|slot| self.drain_slot(slot, now, at));
        self.round.1 = self.round.1.max(end);
        if self.round.1 >= slots && elapsed >= round {
            self.round = (now, 0);
        }
    }

    fn drain_slot(&mut self, slot: u32, now: Instant, at: Time) {
        let Some(entry) = self.entries.at(slot).filter(|entry| !entry.is_quiet(&self.map)) else { return };
        let key = entry.key;
        let live = self.drain_at(slot, at);
        if self.entries.at(slot).is_some_and(|entry| entry.seen.rst != entry.reset) {
            self.apply_reset(&key, at);
        }
        if !live {
            self.remove(&key, now);
            // Another connection may have begun in the state.
            self.missed = true;
        }
    }

    pub(super) fn drain_denied(&mut self, at: Time) {
        if let Some(denied) = &mut self.denied {
            denied.drain(&mut self.walker, at);
        }
    }

    /// Returns false if a state of the entry has ended, or a SYN has ended the entry.
    pub(super) fn drain_entry(&mut self, key: &FlowKey, at: Time) -> bool {
        self.entries.slot(key).is_none_or(|slot| self.drain_at(slot, at))
    }

    fn drain_at(&mut self, slot: u32, at: Time) -> bool {
        let Some(entry) = self.entries.at_mut(slot) else { return true };
        let Settled { live, left } = settle(&self.map, &mut self.walker, entry, at);
        if let Some(left) = left.filter(|_| self.config.outlive && !entry.redirect.drop) {
            self.outlive(slot, left);
        }
        live
    }

    /// The time until the first state of an entry expires.
    pub(super) fn left(&mut self, slot: u32) -> Duration {
        let at = self.now();
        let states = self.walker.states_mut();
        let hits = self.entries.at(slot).into_iter().flat_map(|entry| &entry.states);
        let left = hits.map(|hit| {
            let state = states.listed(&hit.flow, Lookup::Named(hit.name), at);
            state.map_or(Duration::ZERO, |state| state.remaining)
        });
        left.min().unwrap_or(Duration::MAX)
    }

    /// A packet has refreshed the flow of an entry: the entries of both directions would stay so long without an engine.
    pub(super) fn outlive(&self, slot: u32, left: Duration) {
        let Some(entry) = self.entries.at(slot) else { return };
        // Without states, a verdict decides.
        let lifetime = if entry.states.is_empty() { Duration::from_nanos(flow_verdict::IDLE) } else { left };
        for entry in self.entries.with_others(entry).filter(|entry| !entry.redirect.drop) {
            self.map.outlive(entry.slot, lifetime);
        }
    }

    /// Applies the RST of an entry to its states. The engine has received the packet, and has compared it with acknowledgement numbers
    /// that it had then.
    pub(super) fn apply_reset(&mut self, key: &FlowKey, at: Time) {
        let Some(entry) = self.entries.get(key) else { return };
        let counts = self.map.counts(entry.slot);
        let Some((seq, ack, flags)) = counts.rst.filter(|_| counts.rst != entry.reset && counts.in_use)
        else {
            return;
        };
        // The acknowledgement numbers of both sides count.
        for other in entry.state.map_or_else(Vec::new, |state| self.entries.of_state(&state).to_vec()) {
            self.drain_at(other, at);
        }
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.reset = counts.rst;
        let segment = Segment { tcp_flags: flags, tcp_seq: seq, tcp_ack: ack, ..Segment::default() };
        for hit in &entry.states {
            self.walker.states_mut().renew(&hit.flow, Lookup::Named(hit.name), &segment, at);
        }
    }
}
