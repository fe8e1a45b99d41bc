//! An entry of the flow map: what it depends on, and what it has counted.

use std::net::IpAddr;
use std::sync::Arc;

use towpath_engine::verdict_feed::SharedVerdict;
use towpath_gate::state::{Flow, RuleId};
use towpath_gate::{PortId, StateHit, Unseen, Walker};
use towpath_port::offload::{FlowCounts, FlowMap, Redirect};
use towpath_wire::Time;

use super::keys::StateKey;

/// An entry of the map.
#[derive(Debug)]
pub(super) struct Entry {
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
