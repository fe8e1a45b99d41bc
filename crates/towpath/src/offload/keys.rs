//! Keys of entries and of states.

use towpath_gate::StateHit;
use towpath_gate::state::{Direction, Flow, Name};
use towpath_port::offload::FlowKey;

/// A state: its flow in the direction of its first packet, and its name.
pub(super) type StateKey = (Flow, Name);

/// The key of the packets of a flow at an interface.
pub(super) fn flow_key(flow: &Flow, ifindex: u32, vlan: Option<u16>) -> FlowKey {
    let (src, dst) = flow.ends.addresses();
    let Flow { src_port, dst_port, proto, .. } = *flow;
    FlowKey { src, dst, ifindex, src_port, dst_port, vlan, proto }
}

/// The states that an entry depends on: that for which it was written, and those of its lookups.
pub(super) fn state_keys(state: Option<&StateKey>, hits: &[StateHit]) -> Vec<StateKey> {
    let mut keys: Vec<_> = state.copied().into_iter().collect();
    for hit in hits {
        let flow = if hit.direction == Direction::Reverse { hit.flow.reversed() } else { hit.flow };
        if !keys.contains(&(flow, hit.name)) {
            keys.push((flow, hit.name));
        }
    }
    keys
}
