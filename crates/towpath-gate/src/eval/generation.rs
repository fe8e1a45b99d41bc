//! What all walkers of a gate go by, and none of them changes: the rules made ready, tables, ports, routes, pipes.
//!
//! What: a [`Generation`] is a handful of shared pointers. The gate changes a copy of what changes and puts it into
//! [`CurrentGeneration`]; walkers see by a number that there is another one, and take it before their next packet. So a packet sees
//! all of a change or nothing of it, and no lookup in a table takes a lock.
//!
//! Where the gate is the only one that has a part, it is changed in place: without walkers an entry of a table costs what
//! it costs, and with walkers a copy of that table.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::port::{Ports, Routes};
use super::program::Program;
use super::token_bucket::TokenBucket;
use super::{GateSettings, insn::MatchContext};
use crate::rules::table::Table;
use towpath_wire::Packet;

/// What a packet meets.
#[derive(Clone, Default)]
pub(super) struct Generation {
    pub(super) program: Arc<Program>,
    pub(super) tables: Arc<Vec<Arc<Table>>>,
    pub(super) ports: Arc<Ports>,
    pub(super) routes: Arc<Routes>,
    pub(super) pipes: Arc<HashMap<u32, Arc<TokenBucket>>>,
    pub(super) settings: GateSettings,
}

impl Generation {
    /// What a rule's tests may look at.
    #[inline]
    pub(super) fn sight<'g, 'p>(&'g self, packet: &'p Packet<'p>) -> MatchContext<'g, 'p> {
        MatchContext { packet, tables: &self.tables, ports: &self.ports, routes: &self.routes }
    }
}

/// The one that is in force, and its number.
#[derive(Default)]
pub(super) struct CurrentGeneration {
    version: AtomicU64,
    live: Mutex<Generation>,
}

impl CurrentGeneration {
    /// Its number: another one whenever something has changed.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        // Acquire: pairs with the release in change().
        self.version.load(Ordering::Acquire)
    }

    /// A copy of it, and its number.
    pub(super) fn take(&self) -> (u64, Generation) {
        let live = self.locked();
        (self.version(), live.clone())
    }

    /// Changes it in one step; `own` is the gate's copy, which would only be in the way.
    pub(super) fn change<T>(
        &self,
        own: &mut Generation,
        change: impl FnOnce(&mut Generation) -> T,
    ) -> (u64, T) {
        *own = Generation::default();
        let mut live = self.locked();
        let done = change(&mut live);
        *own = live.clone();
        // Release: pairs with the acquire of version(). Under the lock, so that number and contents belong together.
        (self.version.fetch_add(1, Ordering::Release) + 1, done)
    }

    fn locked(&self) -> MutexGuard<'_, Generation> {
        // Every part is whole at every step, whoever panicked.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
