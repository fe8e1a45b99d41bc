//! An entry of the flow map: what it depends on, and what it has counted.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use towpath_engine::verdict_feed::SharedVerdict;
use towpath_gate::state::{Flow, RuleId};
use towpath_gate::{PortId, StateHit, Unseen, Walker};
use towpath_port::offload::{FlowCounts, FlowKey, FlowMap, Redirect};
use towpath_wire::Time;

use super::keys::StateKey;

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

/// The entries, by slot and by key.
#[derive(Debug, Default)]
pub(super) struct Entries {
    slots: Vec<Option<Entry>>,
    by_key: HashMap<FlowKey, u32>,
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

    /// Adds an entry whose key and slot are not used.
    pub(super) fn insert(&mut self, entry: Entry) {
        let slot = entry.slot as usize;
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.by_key.insert(entry.key, entry.slot);
        self.slots[slot] = Some(entry);
    }

    pub(super) fn remove(&mut self, key: &FlowKey) -> Option<Entry> {
        let slot = self.by_key.remove(key)?;
        self.slots.get_mut(slot as usize)?.take()
    }
}

/// Adds what the kernel counted for an entry to its states and rules. Returns false if one of the states has ended, or a SYN has ended the
/// entry, or a verdict does not apply any more.
pub(super) fn settle(map: &FlowMap, walker: &mut Walker, entry: &mut Entry, at: Time) -> bool {
    let counts = map.counts(entry.slot);
    let before = std::mem::replace(&mut entry.seen, counts);
    let mut live = true;
    let (packets, bytes) = (counts.packets - before.packets, counts.bytes - before.bytes);
    if packets > 0 || bytes > 0 {
        let unseen = Unseen { packets, bytes, ack: counts.ack };
        live = walker.count_unseen(&entry.rules, &entry.states, unseen, at);
        entry.verdicts.iter().for_each(|verdict| verdict.saw(at));
    }
    live && counts.in_use && entry.verdicts.iter().all(|verdict| verdict.applies(at))
}
