//! The states with the most traffic.

use std::cmp::Reverse;

use towpath_wire::Time;

use super::States;
use crate::state::{Kind, Listed};

/// The sort key of [`States::top`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Top {
    /// Packets of both directions.
    Packets,
    /// Bytes of both directions.
    Bytes,
}

impl States {
    /// Up to `max` live states with the most packets or bytes, in descending order. Equal states are in the order of
    /// [`States::list`]. Looks at every state; other workers continue meanwhile.
    pub fn top(&self, max: usize, by: Top, now: Time) -> Vec<Listed> {
        let weight = |state: &Listed| match by {
            Top::Packets => state.packets.iter().sum::<u64>(),
            Top::Bytes => state.bytes.iter().sum(),
        };
        let mut kept: Vec<Listed> = Vec::new();
        let cut = |kept: &mut Vec<Listed>| {
            // Stable: equal states keep their order.
            kept.sort_by_key(|state| Reverse(weight(state)));
            kept.truncate(max);
        };
        for state in self.list(now).filter(|state| !matches!(state.kind, Kind::Parent { .. })) {
            kept.push(state);
            if kept.len() >= max.saturating_mul(2).max(64) {
                cut(&mut kept);
            }
        }
        cut(&mut kept);
        kept
    }
}
