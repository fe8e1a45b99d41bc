//! Packet and byte counts that no longer fit into the words of their state.
//!
//! What: a state counts in 64-bit words that hold packets and bytes together. Before a half could overflow, the worker that
//! sees it moves the count here, and the state gets the flag [`WIDE_COUNTS`](super::entry::WIDE_COUNTS). Few states ever do,
//! so a map under a mutex is enough.

use std::sync::Mutex;

use hashbrown::HashMap;

use super::family::locked;

/// Packets and bytes, forward and reverse.
pub(crate) type Counts = [[u64; 2]; 2];

/// The wide counts of one address family by slot.
#[derive(Debug, Default)]
pub(crate) struct WideCounters(Mutex<HashMap<u32, Counts>>);

impl WideCounters {
    /// The wide counts of the state in `slot`.
    pub(crate) fn get(&self, slot: u32) -> Option<Counts> {
        locked(&self.0).get(&slot).copied()
    }

    /// Lets `change` add to the counts of a slot, under the lock. Drops them if it returns false: the slot has no state.
    pub(crate) fn update(&self, slot: u32, change: impl FnOnce(&mut Counts) -> bool) {
        let mut all = locked(&self.0);
        if !change(all.entry(slot).or_default()) {
            all.remove(&slot);
        }
    }

    /// Drops the counts of a slot.
    pub(crate) fn remove(&self, slot: u32) {
        locked(&self.0).remove(&slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_until_they_are_removed() {
        let wide = WideCounters::default();
        let add = |slot, keep| {
            wide.update(slot, |counts| {
                counts[1][0] += 2;
                keep
            });
        };
        add(7, true);
        add(7, true);
        assert_eq!(wide.get(7), Some([[0, 0], [4, 0]]));
        add(8, true);
        add(8, false);
        wide.remove(7);
        assert_eq!((wide.get(7), wide.get(8)), (None, None));
    }
}
