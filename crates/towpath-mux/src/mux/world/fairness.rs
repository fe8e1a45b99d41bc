//! Fairness: a connection waits for at most one turn of every other connection.
//!
//! The peers' messages are shorter than the least cost of a message, so a turn is a number of messages.

use std::collections::{BTreeMap, BTreeSet};

use super::{Config, Order, psock};

/// Messages given to workers while connections wait.
#[derive(Debug)]
pub(super) struct Fairness {
    /// Maximum number of messages of a turn. `None`: an order holds messages back.
    turn: Option<u32>,
    /// For each waiting connection: messages of others that were given since it was served, began to wait, or was at its limit.
    overtaken: BTreeMap<psock::Id, BTreeMap<psock::Id, u32>>,
}

impl Fairness {
    pub(super) fn new(config: &Config) -> Self {
        let free = matches!(config.order, Order::None | Order::Replies);
        // Workers have a credit of up to 64.
        let turn = if config.batch == 1 { 1 } else { config.batch.max(64) as u32 };
        Self { turn: free.then_some(turn), overtaken: BTreeMap::new() }
    }

    /// Messages were given back: they go before others.
    pub(super) fn forget(&mut self) {
        self.overtaken.clear();
    }

    /// These connections are at their limits, and may be overtaken.
    pub(super) fn parked(&mut self, is_parked: impl Fn(psock::Id) -> bool) {
        self.overtaken.retain(|id, _| !is_parked(*id));
    }

    /// A worker got a message of this connection; messages of `waiting` still wait and are not at a limit.
    pub(super) fn given(&mut self, id: psock::Id, waiting: impl Iterator<Item = psock::Id>) {
        let Some(turn) = self.turn else { return };
        self.overtaken.remove(&id);
        let waiting: BTreeSet<_> = waiting.filter(|other| *other != id).collect();
        self.overtaken.retain(|other, _| waiting.contains(other));
        for other in waiting {
            let count = self.overtaken.entry(other).or_default().entry(id).or_default();
            *count += 1;
            assert!(*count <= turn, "{other} waits, and {id} got {count} messages in a row");
        }
    }
}
