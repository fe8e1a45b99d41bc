//! What a gate has of processes that are not the current ones of its peers: those that ended, and those that it has not heard itself.
//!
//! What: a gate *has* a batch if it has received it, or a snapshot of a gate that had it. It has the batch also if it refused states of
//! it. Each gate tells once per second, and with each snapshot, what it has of all processes. So a peer with batches that this gate lacks
//! is found, whatever was lost and whichever process has ended.

use std::collections::BTreeMap;

use crate::batches::Batches;

/// Maximum number of processes. When there are more, those with the smallest incarnations, the oldest, are forgotten by all gates. Gates of
/// a group are trusted in this: invented processes with large incarnations would take the places of all others.
pub(crate) const MAX_KNOWN: usize = 64;

/// The processes, by their incarnations.
#[derive(Debug, Default)]
pub(crate) struct Known(BTreeMap<u64, Batches>);

impl Known {
    /// Returns true if the gate has these batches, or the process is older than those that are remembered.
    pub(crate) fn includes(&self, incarnation: u64, batches: &Batches) -> bool {
        match self.0.get(&incarnation) {
            Some(known) => known.includes(batches),
            None => batches.is_empty() || !self.takes(incarnation),
        }
    }

    /// The gate has these batches of a process.
    pub(crate) fn add(&mut self, incarnation: u64, batches: &Batches) {
        if batches.is_empty() || !self.takes(incarnation) {
            return;
        }
        self.0.entry(incarnation).or_default().add(batches);
        if self.0.len() > MAX_KNOWN {
            self.0.pop_first();
        }
    }

    /// Forgets a process that is the current one of a peer now. Returns the batches that the gate has.
    pub(crate) fn take(&mut self, incarnation: u64) -> Batches {
        self.0.remove(&incarnation).unwrap_or_default()
    }

    /// The newest one first: a message may have no room for all.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Batches)> {
        self.0.iter().rev().map(|(incarnation, batches)| (*incarnation, batches))
    }

    fn takes(&self, incarnation: u64) -> bool {
        self.0.len() < MAX_KNOWN || self.0.first_key_value().is_some_and(|(oldest, _)| incarnation >= *oldest)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_processes_are_forgotten() {
        let (few, many) = (Batches::below(3), Batches::below(9));
        let mut known = Known::default();
        assert!(known.includes(5, &Batches::default()) && !known.includes(5, &few));
        (100..100 + MAX_KNOWN as u64).for_each(|incarnation| known.add(incarnation, &many));
        known.add(120, &few);
        assert!(known.includes(120, &many) && known.len() == MAX_KNOWN);
        known.add(50, &many);
        assert!(known.includes(50, &many), "too old to be wanted");
        assert!(!known.includes(500, &few));
        known.add(500, &many);
        assert_eq!(
            (known.len(), known.take(100), known.take(101)),
            (MAX_KNOWN, Batches::default(), many.clone())
        );
        assert_eq!((known.take(500), known.includes(500, &many)), (many.clone(), false));
    }
}
