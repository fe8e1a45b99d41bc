//! An entry of the flow map: what it depends on, and what it has counted.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use towpath_engine::verdict_feed::SharedVerdict;
use towpath_gate::state::{Flow, RuleId};
use towpath_gate::{PortId, StateHit, Unseen, Walker};
use towpath_port::offload::{FlowCounts, FlowKey, FlowMap, Redirect};
use towpath_wire::Time;

use super::keys::{StateKey, state_keys};

/// An entry of the map.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: FlowKey,
    pub(super) slot: u32,
    /// The flow of its packets, and the port that they arrive on.
    pub(super) flow: Flow,
    pub(super) arrival: PortId,
    /// `None` for a flow that has a verdict and no state.
    pub(super) state: Option<StateKey>,
    /// The slot of the other direction's entry, if the state has exactly two.
    pub(super) other: Option<u32>,
    /// The verdicts that pass its packets.
    pub(super) verdicts: Box<[Arc<SharedVerdict>]>,
    pub(super) rules: Box<[RuleId]>,
    pub(super) states: Box<[StateHit]>,
    /// The neighbor of a routed flow.
    pub(super) neighbor: Option<(u16, IpAddr)>,
    pub(super) redirect: Redirect,
    /// The counters that were added to states and rules.
    pub(super) seen: FlowCounts,
    /// The last RST that was applied to the states.
    pub(super) reset: Option<(u32, u32, u8)>,
}

impl Entry {
    /// Returns true if nothing has happened to the entry since its counters were read and its last RST was applied.
    pub(super) fn is_quiet(&self, map: &FlowMap) -> bool {
        let counts = map.counts(self.slot);
        counts.in_use && self.verdicts.is_empty() && counts == self.seen && counts.rst == self.reset
    }
}

/// The entries, by slot, by key, and by the states that they depend on.
#[derive(Debug, Default)]
pub(super) struct Entries {
    slots: Vec<Option<Entry>>,
    by_key: HashMap<FlowKey, u32>,
    by_state: HashMap<StateKey, Vec<u32>>,
}

impl Entries {
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// All slots that have had an entry are below this number.
    pub(super) fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = FlowKey> {
        self.by_key.keys().copied()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Entry> {
        self.slots.iter().flatten()
    }

    pub(super) fn at(&self, slot: u32) -> Option<&Entry> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn at_mut(&mut self, slot: u32) -> Option<&mut Entry> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    pub(super) fn slot(&self, key: &FlowKey) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    pub(super) fn get(&self, key: &FlowKey) -> Option<&Entry> {
        self.at(self.slot(key)?)
    }

    pub(super) fn get_mut(&mut self, key: &FlowKey) -> Option<&mut Entry> {
        self.at_mut(self.slot(key)?)
    }

    /// The slots of the entries that depend on a state.
    pub(super) fn of_state(&self, state: &StateKey) -> &[u32] {
        self.by_state.get(state).map_or(&[], Vec::as_slice)
    }

    /// The keys of these entries.
    pub(super) fn keys_of_state(&self, state: &StateKey) -> Vec<FlowKey> {
        self.of_state(state).iter().filter_map(|slot| Some(self.at(*slot)?.key)).collect()
    }

    /// The entry, and the others of its state.
    pub(super) fn with_others<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = &'a Entry> {
        let others = match (entry.other, &entry.state) {
            (Some(_), _) => entry.other.as_slice(),
            (None, Some(state)) => self.of_state(state),
            (None, None) => &[],
        };
        let others = others.iter().filter(|slot| **slot != entry.slot);
        others.filter_map(|slot| self.at(*slot)).chain([entry])
    }

    /// Adds an entry whose key and slot are not used.
    pub(super) fn insert(&mut self, entry: Entry) {
        let (at, slot) = (entry.slot, entry.slot as usize);
        let states = state_keys(entry.state.as_ref(), &entry.states);
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.by_key.insert(entry.key, at);
        self.slots[slot] = Some(entry);
        for state in states {
            self.by_state.entry(state).or_default().push(at);
            self.pair(&state);
        }
    }

    pub(super) fn remove(&mut self, key: &FlowKey) -> Option<Entry> {
        let slot = self.by_key.remove(key)?;
        let entry = self.slots.get_mut(slot as usize)?.take()?;
        for state in state_keys(entry.state.as_ref(), &entry.states) {
            if let Some(slots) = self.by_state.get_mut(&state) {
                slots.retain(|other| *other != slot);
                if slots.is_empty() {
                    self.by_state.remove(&state);
                }
            }
            self.pair(&state);
        }
        Some(entry)
    }

    /// Two entries of a state are those of its directions, and name each other.
    fn pair(&mut self, state: &StateKey) {
        let slots = self.by_state.get(state).map_or(&[][..], Vec::as_slice);
        for (at, slot) in slots.iter().enumerate() {
            let entry = self.slots.get_mut(*slot as usize).and_then(Option::as_mut);
            if let Some(entry) = entry.filter(|entry| entry.state.as_ref() == Some(state)) {
                entry.other = (slots.len() == 2).then(|| slots[1 - at]);
            }
        }
    }
}

/// What has become of an entry whose counters were read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settled {
    /// False if one of its states has ended, or a SYN has ended it, or a verdict does not apply any more.
    pub(super) live: bool,
    /// The time until the first of its states expires, if packets were counted.
    pub(super) left: Option<Duration>,
}

/// Adds what the kernel counted for an entry to its states and rules.
pub(super) fn settle(map: &FlowMap, walker: &mut Walker, entry: &mut Entry, at: Time) -> Settled {
    let counts = map.counts(entry.slot);
    let before = std::mem::replace(&mut entry.seen, counts);
    let (mut live, mut left) = (true, None);
    let (packets, bytes) = (counts.packets - before.packets, counts.bytes - before.bytes);
    if packets > 0 || bytes > 0 {
        let unseen = Unseen { packets, bytes, ack: counts.ack };
        left = walker.count_unseen(&entry.rules, &entry.states, unseen, at);
        live = left.is_some();
        entry.verdicts.iter().for_each(|verdict| verdict.saw(at));
    }
    let live = live && counts.in_use && entry.verdicts.iter().all(|verdict| verdict.applies(at));
    Settled { live, left }
}
