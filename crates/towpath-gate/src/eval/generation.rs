//! Generations: immutable snapshots of everything that a packet is compared with: program, tables, ports, routes,
//! pipes.
//!
//! A [`Generation`] is a set of shared pointers. The gate changes a copy and publishes it in
//! [`CurrentGeneration`]. A walker compares version numbers and adopts the new generation before its next packet.
//! A packet therefore sees all of a change or none of it, and no lookup takes a lock.
//!
//! No walker waits for the gate. There are two places: version N is in place N mod 2. The gate writes the next
//! version to the other place and then publishes its number. A walker that finds the place of the published version
//! locked has read an old number: the gate writes to that place only after it has published the version between. The
//! walker reads the number again. Several walkers read a place together.

use std::collections::HashMap;
use std::ops::DerefMut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, TryLockError};

use super::gate::GateSettings;
use super::insn::MatchContext;
use super::port::Ports;
use super::program::Program;
use super::routes::Routes;
use super::token_bucket::TokenBucket;
use crate::rules::table::Table;
use crate::state::Name;
use towpath_wire::Packet;

/// Everything that a packet is compared with.
#[derive(Clone, Default)]
pub(super) struct Generation {
    pub(super) program: Arc<Program>,
    pub(super) tables: Arc<Vec<Arc<Table>>>,
    pub(super) ports: Arc<Ports>,
    pub(super) routes: Arc<Routes>,
    pub(super) pipes: Arc<HashMap<u32, Arc<TokenBucket>>>,
    /// While a re-check runs: the names under which deleted rules have states.
    pub(super) left_names: Arc<[Name]>,
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
    places: [RwLock<Place>; 2],
}

#[derive(Default)]
struct Place {
    /// The version of `generation`.
    version: u64,
    generation: Option<Generation>,
}

impl CurrentGeneration {
    /// The version number. It changes with every published change.
    #[inline]
    pub(super) fn version(&self) -> u64 {
        // Acquire: pairs with the release in publish().
        self.version.load(Ordering::Acquire)
    }

    /// Returns a copy of the generation, and its version. It is at least as new as every version that was published
    /// before the call.
    pub(super) fn take(&self) -> (u64, Generation) {
        loop {
            let version = self.version();
            let place = match self.places[version as usize % 2].try_read() {
                Ok(place) => place,
                // A place is consistent at every step, even after a panic.
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The gate writes version + 2 here. It has published version + 1 before.
                Err(TryLockError::WouldBlock) => {
                    std::hint::spin_loop();
                    continue;
                }
            };
            match &place.generation {
                Some(generation) if place.version == version => return (version, generation.clone()),
                // Before the first version.
                None if version == 0 => return (0, Generation::default()),
                // The number is old: the gate has discarded the version here, or has written version + 2, which is not
                // published yet. A walker that took that one would go back to version + 1.
                _ => {}
            }
        }
    }

    /// Publishes a generation and returns its version. Only the gate calls it.
    pub(super) fn publish(&self, generation: Generation) -> u64 {
        let version = self.version() + 1;
        let place = Place { version, generation: Some(generation) };
        let old = std::mem::replace(&mut *self.locked(version), place);
        // Release: pairs with the acquire of version(). The version is at its place before its number is known.
        self.version.store(version, Ordering::Release);
        drop(old);
        version
    }

    /// Frees the version before the current one. Only the gate calls it.
    pub(super) fn discard_previous(&self) {
        let previous = self.version().wrapping_sub(1);
        let old = self.locked(previous).generation.take();
        drop(old);
    }

    fn locked(&self, version: u64) -> impl DerefMut<Target = Place> {
        // Walkers that read an old version hold the lock for the copy of a few pointers.
        self.places[version as usize % 2].write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// Readers beside a writer get whole generations that are not older than the version that they have seen.
    #[test]
    fn readers_get_whole_generations_in_order() {
        let current = CurrentGeneration::default();
        let generation = |number: u64| {
            let settings = GateSettings { verbose_limit: number as u32, ..GateSettings::default() };
            Generation { settings, ..Generation::default() }
        };
        let done = AtomicBool::new(false);
        let changes = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut last = 0;
                    while !done.load(Ordering::Relaxed) {
                        let seen = current.version();
                        let (version, generation) = current.take();
                        assert!(version >= seen && version >= last, "{version} {seen} {last}");
                        assert_eq!(u64::from(generation.settings.verbose_limit), version);
                        last = version;
                    }
                });
            }
            for number in 1..=changes {
                assert_eq!(current.publish(generation(number)), number);
                if number % 3 == 0 {
                    current.discard_previous();
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(current.take().0, changes);
    }

    /// A reader does not wait while the gate writes, however long that takes.
    #[test]
    fn a_writer_that_does_not_go_on_delays_no_reader() {
        let current = CurrentGeneration::default();
        for _ in 0..4 {
            current.publish(Generation::default());
            let writing = current.locked(current.version() + 1);
            assert_eq!(current.take().0, current.version());
            drop(writing);
        }
    }
}
