//! States that were removed lately. Records of them may still be on their way, and must not create them again.
//!
//! A record is older than a removal if its sender sent it before: on the clock of one sender, or on the clock of this gate, by the age of
//! the message, and within [`GRACE`], in which a peer has not yet heard of the removal.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use towpath_gate::state::record::Record;
use towpath_wire::Time;

/// Maximum number of removals that are remembered; the oldest one is forgotten first.
pub(crate) const MAX_REMOVED: usize = 1 << 16;

/// How long a removal is remembered: longer than the stream of the bus has a message.
const KEPT: Duration = Duration::from_secs(64);

/// How long a peer may send records of a state that another gate has removed.
const GRACE: Duration = Duration::from_secs(1);

/// When and by which process a message was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// The process.
    pub(crate) incarnation: u64,
    /// On its clock.
    pub(crate) there: Time,
    /// On the clock of this gate.
    pub(crate) here: Time,
}

/// The removals.
#[derive(Debug, Default)]
pub(crate) struct Removed {
    hasher: RandomState,
    by_flow: HashMap<u64, Sent>,
    order: VecDeque<(Time, u64)>,
}

impl Removed {
    /// The state of a record was removed.
    pub(crate) fn add(&mut self, record: &Record<'_>, sent: Sent, now: Time) {
        let old = |(at, _): &(Time, u64)| now.since(*at) >= KEPT;
        while self.order.len() >= MAX_REMOVED || self.order.front().is_some_and(old) {
            let Some((at, hash)) = self.order.pop_front() else { break };
            // Unless it was removed again since.
            if self.by_flow.get(&hash).is_some_and(|sent| sent.here <= at) {
                self.by_flow.remove(&hash);
            }
        }
        let hash = self.hash(record);
        let latest = self.by_flow.entry(hash).or_insert(sent);
        if latest.here <= sent.here {
            *latest = sent;
        }
        self.order.push_back((now, hash));
    }

    /// Returns true if the record was sent before its state was removed.
    pub(crate) fn is_older(&self, record: &Record<'_>, sent: Sent) -> bool {
        if self.by_flow.is_empty() {
            return false;
        }
        self.by_flow.get(&self.hash(record)).is_some_and(|removal| {
            match removal.incarnation == sent.incarnation {
                true => sent.there < removal.there,
                false => sent.here <= removal.here + GRACE,
            }
        })
    }

    /// The number of removals that are remembered.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.order.len().max(self.by_flow.len())
    }

    /// The same for both directions of a flow.
    fn hash(&self, record: &Record<'_>) -> u64 {
        self.hasher.hash_one((record.flow.undirected(), record.name))
    }
}
