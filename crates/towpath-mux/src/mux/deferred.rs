//! Connections to update once after several changes ([`Mux::together`](super::Mux::together)).

use super::psock;

/// List of connections whose update is deferred.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    active: bool,
    psocks: Vec<psock::Id>,
}

impl Deferred {
    pub(super) const fn begin(&mut self) {
        self.active = true;
    }

    /// Ends the deferral. [`Deferred::pop`] returns the connections.
    pub(super) const fn end(&mut self) {
        self.active = false;
    }

    pub(super) const fn is_active(&self) -> bool {
        self.active
    }

    /// The caller adds a connection once.
    pub(super) fn push(&mut self, id: psock::Id) {
        self.psocks.push(id);
    }

    pub(super) fn pop(&mut self) -> Option<psock::Id> {
        self.psocks.pop()
    }
}
