//! The sequence windows of the states with strict tracking.
//!
//! A window is more than a word, so that packets of one such state take turns: under a lock that they share with a
//! sixteenth of the others. States without strict tracking have nothing here.

use std::sync::Mutex;

use hashbrown::HashMap;

use super::family::locked;
use super::window::Window;

const PARTS: usize = 16;

/// The windows by family (whether IPv6) and slot.
#[derive(Debug, Default)]
pub(super) struct Windows([Mutex<HashMap<(bool, u32), Window>>; PARTS]);

impl Windows {
    pub(super) fn insert(&self, v6: bool, slot: u32, window: Window) {
        locked(self.part(slot)).insert((v6, slot), window);
    }

    pub(super) fn remove(&self, v6: bool, slot: u32) {
        locked(self.part(slot)).remove(&(v6, slot));
    }

    /// Does something with a window while nobody else does; `None` when the state was unlinked meanwhile.
    pub(super) fn with<T>(&self, v6: bool, slot: u32, work: impl FnOnce(&mut Window) -> T) -> Option<T> {
        locked(self.part(slot)).get_mut(&(v6, slot)).map(work)
    }

    fn part(&self, slot: u32) -> &Mutex<HashMap<(bool, u32), Window>> {
        &self.0[slot as usize % PARTS]
    }
}
