//! Authority of a worker process: the connections to which it may send unrequested messages.
//!
//! What: a worker may answer each message once, and may send messages to the connections whose messages it received.
//! [`Rights`] extend this. Answers need no entry here: the frames that a worker holds (`frame.rs`) permit them.
//!
//! Invariants:
//! - The pool grants a connection when it publishes one of its messages to the worker, and revokes it when the
//!   connection ends. Nothing that the worker writes adds an entry.
//! - Generations of an index only grow, so a generation below the entry's is that of an ended connection.
//!
//! Race: a worker may name a connection that ended a moment ago. That is not a violation; the message returns
//! ([`Destination::Ended`]).
//!
//! Bound: four bytes per index, and indices are reused: as many as connections were open at once.

use towpath_mux::mux::psock;

/// Rights of all processes of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rights {
    /// Replies may be sent from the worker's own memory, because no other worker sends on its connections: it
    /// is the only worker, or connections stay with their worker.
    pub(super) leases: bool,
    /// A worker may send messages to all connections, and answer a message several times (`--worker-may push`).
    pub(super) push: bool,
    /// Connected mode: a message without a destination has one.
    pub(super) connected: bool,
    /// Long messages are given in parts (`body=stream`): all workers must take them.
    pub(super) parts: bool,
}

/// The destination of a worker's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destination {
    /// The worker may send to it.
    Granted,
    /// The connection has ended.
    Ended,
    /// The worker received no message of this connection, or there is no such connection.
    Unknown,
}

/// The connections of one worker process.
#[derive(Debug, Default)]
pub(super) struct Authority {
    /// By index: the generation of the last granted connection, plus one after its end. Generations are odd
    /// (slotmap). 0: none was granted.
    generations: Vec<u32>,
}

impl Authority {
    /// The worker receives a message of this connection.
    #[inline]
    pub(super) fn grant(&mut self, connection: psock::Id) {
        let (index, generation) = connection.parts();
        let index = index as usize;
        if index >= self.generations.len() {
            self.generations.resize(index + 1, 0);
        }
        self.generations[index] = generation;
    }

    /// The connection has ended.
    pub(super) fn revoke(&mut self, connection: psock::Id) {
        let (index, generation) = connection.parts();
        if let Some(granted) = self.generations.get_mut(index as usize).filter(|it| **it == generation) {
            *granted = generation.wrapping_add(1);
        }
    }

    /// Revokes all connections for which `is_open` returns false.
    pub(super) fn retain(&mut self, mut is_open: impl FnMut(psock::Id) -> bool) {
        for (index, granted) in (0..).zip(&mut self.generations) {
            if *granted % 2 == 1 && !is_open(psock::Id::from_parts(index, *granted)) {
                *granted = granted.wrapping_add(1);
            }
        }
    }

    /// Returns true if the worker received this connection, which may have ended.
    pub(super) fn received(&self, connection: psock::Id) -> bool {
        let (index, generation) = connection.parts();
        let granted = self.generations.get(index as usize).copied();
        granted.is_some_and(|granted| granted == generation || granted == generation.wrapping_add(1))
    }

    /// The destination with these parts, as the worker wrote them.
    pub(super) fn destination(&self, index: u32, generation: u32) -> Destination {
        match self.generations.get(index as usize) {
            // An even generation would name the connection after it (psock::Id::from_parts).
            Some(granted) if generation.is_multiple_of(2) || *granted < generation => Destination::Unknown,
            Some(granted) if *granted == generation => Destination::Granted,
            Some(_) => Destination::Ended,
            None => Destination::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_the_connections_of_its_messages_until_they_end() {
        let id = psock::Id::from_parts;
        let mut authority = Authority::default();
        authority.grant(id(2, 5));
        // Rows: connection, destination before and after its end.
        let rows = [
            ((2, 5), Destination::Granted, Destination::Ended),
            // Earlier connections with the same index.
            ((2, 3), Destination::Ended, Destination::Ended),
            ((2, 4), Destination::Unknown, Destination::Unknown),
            ((2, 6), Destination::Unknown, Destination::Unknown),
            ((2, 7), Destination::Unknown, Destination::Unknown),
            ((1, 5), Destination::Unknown, Destination::Unknown),
            ((3, 5), Destination::Unknown, Destination::Unknown),
            ((u32::MAX, 1), Destination::Unknown, Destination::Unknown),
        ];
        for ((index, generation), before, _) in rows {
            assert_eq!(authority.destination(index, generation), before, "{index} {generation}");
        }
        // The end of another connection changes nothing.
        [id(2, 3), id(2, 7), id(9, 5)].into_iter().for_each(|other| authority.revoke(other));
        authority.retain(|_| true);
        assert_eq!(authority.destination(2, 5), Destination::Granted);
        assert!(
            authority.received(id(2, 5)) && !authority.received(id(2, 3)) && !authority.received(id(1, 5))
        );
        authority.revoke(id(2, 5));
        assert!(authority.received(id(2, 5)), "also after its end");
        for ((index, generation), _, after) in rows {
            assert_eq!(authority.destination(index, generation), after, "{index} {generation}");
        }
        authority.grant(id(2, 7));
        authority.grant(id(0, 1));
        authority.retain(|connection| connection == id(0, 1));
        let destinations = [(2, 7), (2, 5), (0, 1)].map(|(index, at)| authority.destination(index, at));
        assert_eq!(destinations, [Destination::Ended, Destination::Ended, Destination::Granted]);
    }

    #[test]
    fn memory_is_bounded_by_the_largest_index() {
        let mut authority = Authority::default();
        for generation in (1..100_001).step_by(2) {
            authority.grant(psock::Id::from_parts(7, generation));
            authority.revoke(psock::Id::from_parts(7, generation));
        }
        assert_eq!(authority.generations.len(), 8);
    }
}
