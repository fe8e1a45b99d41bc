//! Connected mode: the open connections ordered by bytes to send, so that a message goes to the least loaded one.

use std::collections::BTreeSet;

use super::psock;

/// Open connections by bytes to send. Empty without connected mode.
#[derive(Debug, Default)]
pub(super) struct Balance {
    psocks: BTreeSet<(usize, psock::Id)>,
    /// A sender found every connection full and waits for [`super::Event::WriteSpace`].
    write_space_wanted: bool,
}

impl Balance {
    pub(super) fn insert(&mut self, id: psock::Id) {
        self.psocks.insert((0, id));
    }

    pub(super) fn remove(&mut self, bytes: usize, id: psock::Id) {
        self.psocks.remove(&(bytes, id));
    }

    /// A connection has `after` bytes to send in place of `before`.
    pub(super) fn update(&mut self, id: psock::Id, before: usize, after: usize) {
        if self.psocks.remove(&(before, id)) {
            self.psocks.insert((after, id));
        }
    }

    /// The connection with the fewest bytes to send, and their number.
    pub(super) fn least(&self) -> Option<(usize, psock::Id)> {
        self.psocks.first().copied()
    }

    pub(super) const fn want_write_space(&mut self) {
        self.write_space_wanted = true;
    }

    /// Returns true, once, if write space was wanted and a connection has at most `low` bytes to send.
    pub(super) fn take_write_space(&mut self, low: usize) -> bool {
        let free = self.write_space_wanted && self.least().is_some_and(|(bytes, _)| bytes <= low);
        self.write_space_wanted &= !free;
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_loaded_connection_is_first() {
        let [a, b] = [1, 2].map(|index| psock::Id::from_parts(index, 1));
        let mut balance = Balance::default();
        balance.insert(a);
        balance.insert(b);
        balance.update(a, 0, 10);
        assert_eq!(balance.least(), Some((0, b)));
        balance.update(b, 0, 20);
        balance.want_write_space();
        assert!(
            !balance.take_write_space(9) && balance.take_write_space(10) && !balance.take_write_space(10)
        );
        balance.remove(10, a);
        balance.update(a, 10, 0);
        assert_eq!(balance.least(), Some((20, b)), "a removed connection stays removed");
    }
}
