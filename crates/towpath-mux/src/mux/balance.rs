//! Connected mode: the open connections ordered by bytes to send, so that a message goes to the least loaded one.
//!
//! Bytes that the socket has accepted are not counted, because each look at them costs a system call. The caller bounds them
//! (`io`: TCP_NOTSENT_LOWAT). Among connections with equal bytes, the one that was not used for longest is first, so that connections whose
//! sockets accept everything at once share the messages.

use std::collections::BTreeSet;

use slotmap::SecondaryMap;

use super::psock;

/// Open connections by bytes to send. Empty without connected mode.
#[derive(Debug, Default)]
pub(super) struct Balance {
    /// Bytes to send, number of the last use, connection.
    psocks: BTreeSet<(usize, u64, psock::Id)>,
    /// The last use of each connection: the value of `uses` then.
    last: SecondaryMap<psock::Id, u64>,
    uses: u64,
    /// A sender found every connection full and waits for [`super::Event::WriteSpace`].
    write_space_wanted: bool,
}

impl Balance {
    pub(super) fn insert(&mut self, id: psock::Id) {
        self.psocks.insert((0, 0, id));
        self.last.insert(id, 0);
    }

    pub(super) fn remove(&mut self, bytes: usize, id: psock::Id) {
        if let Some(last) = self.last.remove(id) {
            self.psocks.remove(&(bytes, last, id));
        }
    }

    /// A connection has `after` bytes to send in place of `before`. More is a use of it.
    pub(super) fn update(&mut self, id: psock::Id, before: usize, after: usize) {
        let Some(last) = self.last.get_mut(id) else { return };
        self.psocks.remove(&(before, *last, id));
        if after > before {
            self.uses += 1;
            *last = self.uses;
        }
        self.psocks.insert((after, *last, id));
    }

    /// The connection with the fewest bytes to send, and their number.
    pub(super) fn least(&self) -> Option<(usize, psock::Id)> {
        self.psocks.first().map(|&(bytes, _, id)| (bytes, id))
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
        balance.update(a, 10, 0);
        balance.update(b, 20, 0);
        let used = [0; 4].map(|_| {
            let (_, id) = balance.least().unwrap();
            balance.update(id, 0, 5);
            balance.update(id, 5, 0);
            id
        });
        assert_eq!(used, [a, b, a, b], "the one that was not used for longest");
        balance.update(a, 0, 10);
        balance.update(b, 0, 20);
        balance.remove(10, a);
        balance.update(a, 10, 0);
        assert_eq!(balance.least(), Some((20, b)), "a removed connection stays removed");
    }
}
