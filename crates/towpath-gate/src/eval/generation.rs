//! Generations: immutable snapshots of everything that a packet is compared with: program, tables, ports, routes,
//! pipes.
//!
//! A [`Generation`] is a set of shared pointers. The gate changes a copy and publishes it in
//! [`CurrentGeneration`]. A walker compares version numbers and adopts the new generation before its next packet.
//! A packet therefore sees all of a change or none of it, and no lookup takes a lock.
//!
//! A part that only the gate references is changed in place: without walkers, changing a table entry costs only
//! that entry; with walkers it costs a copy of the table.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::gate::GateSettings;
use super::insn::MatchContext;
use super::port::Ports;
use super::program::Program;
use super::routes::Routes;
use super::token_bucket::TokenBucket;
use crate::rules::table::Table;
use towpath_wire::Packet;

/// Everything that a packet is compared with.
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
    /// Returns what the instructions of a rule may read.
    #[inline]
    pub(super) fn context<'g, 'p>(&'g self, packet: &'p Packet<'p>) -> MatchContext<'g, 'p> {
        MatchContext { packet, tables: &self.tables, ports: &self.ports, routes: &self.routes }
    }
}

/// The current generation and its version number.
#[derive(Default)]
pub(super) struct CurrentGeneration {
    version: AtomicU64,
    generation: Mutex<Generation>,
}

impl CurrentGeneration {
    /// The version number. It changes with every published change.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        // Acquire: pairs with the release in change().
        self.version.load(Ordering::Acquire)
    }

    /// Returns a copy of the generation, and its version.
    pub(super) fn take(&self) -> (u64, Generation) {
        let generation = self.locked();
        (self.version(), generation.clone())
    }

    /// Publishes a change. `own` is the gate's copy; it is released first, so that parts can be changed in place.
    pub(super) fn change<T>(
        &self,
        own: &mut Generation,
        change: impl FnOnce(&mut Generation) -> T,
    ) -> (u64, T) {
        *own = Generation::default();
        let mut generation = self.locked();
        let done = change(&mut generation);
        *own = generation.clone();
        // Release: pairs with the acquire of version(). Under the lock, so that version and contents agree.
        (self.version.fetch_add(1, Ordering::Release) + 1, done)
    }

    fn locked(&self) -> MutexGuard<'_, Generation> {
        // Every part is consistent at every step, even after a panic.
        self.generation.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
