//! Unused user ids, for programs whose configuration names no user.
//!
//! The range is that of systemd's DynamicUser=. An id is unused if /etc/passwd, systemd and the process table do not have it. A place
//! is a `[queue.N]` or a `[mux.NAME]`. Its programs share an id, so that a restarted inspector has the files and limits of the
//! previous one.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;

use crate::config::users;
use crate::process::Place;

/// The ids of DynamicUser= (systemd.exec(5)), which no distribution assigns.
const RANGE: std::ops::RangeInclusive<u32> = 61_184..=65_519;

/// The ids of this engine's places.
#[derive(Debug, Default)]
pub(super) struct UnusedIds {
    ids: HashMap<Place, u32>,
    warned: bool,
}

impl UnusedIds {
    /// The id of a place. `None`: the user namespace maps no unused id of the range.
    pub(super) fn of(&mut self, place: &Place) -> Option<u32> {
        if let Some(id) = self.ids.get(place) {
            return Some(*id);
        }
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let running = running();
        let is_free = |id: &u32| {
            is_mapped(&map, *id)
                && !self.ids.values().any(|other| other == id)
                && !running.contains(id)
                && !users::exists(*id)
                && !std::path::Path::new(&format!("/run/systemd/dynamic-uid/{id}")).exists()
        };
        // Begins at a hash of the place, so that the id is usually the same after a restart.
        let mut hasher = DefaultHasher::new();
        place.hash(&mut hasher);
        let count = u64::from(RANGE.end() - RANGE.start() + 1);
        let first = (hasher.finish() % count) as usize;
        let found = RANGE.skip(first).chain(RANGE.take(first)).find(is_free);
        match found {
            Some(id) => {
                self.ids.insert(place.clone(), id);
            }
            None if !self.warned => {
                self.warned = true;
                tracing::warn!(
                    "this user namespace has no unused user id: inspectors and workers keep the engine's user, without capabilities"
                );
            }
            None => {}
        }
        found
    }
}

/// The users of all processes.
fn running() -> HashSet<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return HashSet::new() };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.uid()).collect()
}

/// Returns true if a line of uid_map (user_namespaces(7)) has the id: first id inside, first id outside, count.
fn is_mapped(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_whitespace().map(|number| number.parse::<u64>().unwrap_or(0));
        let (first, count) = (numbers.next().unwrap_or(0), numbers.nth(1).unwrap_or(0));
        (first..first + count).contains(&u64::from(id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_mapped_by_ranges() {
        let rows = [
            ("         0          0 4294967295\n", true),
            ("         0       1000          1\n", false),
            ("0 1000 1\n1 100000 65536\n", true),
            ("", false),
        ];
        for (map, expected) in rows {
            assert_eq!(is_mapped(map, 61_184), expected, "{map}");
        }
    }

    #[test]
    fn places_have_different_ids() {
        let mut ids = UnusedIds::default();
        let places = [Place::Queue(1), Place::Queue(2), Place::Mux("web".into())];
        let found: Vec<_> = places.iter().map(|place| ids.of(place)).collect();
        let again: Vec<_> = places.iter().map(|place| ids.of(place)).collect();
        assert_eq!(found, again);
        let given: HashSet<_> = found.iter().flatten().collect();
        assert_eq!(given.len(), found.iter().flatten().count());
        assert!(given.iter().all(|id| RANGE.contains(id)));
    }
}
