//! The states that most goes through.

use std::cmp::Reverse;

use super::States;
use crate::state::{Kind, Listed};
use towpath_wire::Time;

/// What is most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Top {
    /// Packets, both directions together.
    Packets,
    /// Bytes, likewise.
    Bytes,
}

impl States {
    /// The live states with the most packets or bytes, at most `most` of them, the first with the most; of equals, those
    /// that [`States::list`] has first. It looks at every state, and packets go on meanwhile.
    pub fn top(&self, most: usize, by: Top, now: Time) -> Vec<Listed> {
        let weight = |state: &Listed| match by {
            Top::Packets => state.packets.iter().sum::<u64>(),
            Top::Bytes => state.bytes.iter().sum(),
        };
        let mut kept: Vec<Listed> = Vec::new();
        let cut = |kept: &mut Vec<Listed>| {
            // Stable, so that equals stay in order.
            kept.sort_by_key(|state| Reverse(weight(state)));
            kept.truncate(most);
        };
        for state in self.list(now).filter(|state| !matches!(state.kind, Kind::Parent { .. })) {
            kept.push(state);
            if kept.len() >= most.saturating_mul(2).max(64) {
                cut(&mut kept);
            }
        }
        cut(&mut kept);
        kept
    }
}
