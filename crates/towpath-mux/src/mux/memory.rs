//! Bytes that a mux holds, against its bound ([`Config::mux_bytes`](super::Config::mux_bytes)).

use super::config::Bound;

/// Memory account of a mux.
#[derive(Debug)]
pub(super) struct Memory {
    bound: Bound,
    /// All bytes: messages, partial messages, data to send.
    bytes: usize,
    /// The part of them that messages take. Workers free it.
    messages: usize,
    full: bool,
}

impl Memory {
    pub(super) const fn new(bound: Bound) -> Self {
        Self { bound, bytes: 0, messages: 0, full: false }
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of messages that workers have not done.
    pub(super) const fn messages(&self) -> usize {
        self.messages
    }

    pub(super) const fn is_full(&self) -> bool {
        self.full
    }

    /// Returns true if the mux would stay full after all messages are done: more than the low mark is partial messages and data
    /// to send.
    pub(super) const fn is_stuck(&self) -> bool {
        self.full && self.bytes - self.messages > self.bound.low
    }

    /// Counts `after` bytes in place of `before`. Returns true if the mux has become not full.
    pub(super) fn charge(&mut self, before: usize, after: usize) -> bool {
        self.bytes = self.bytes - before + after;
        let was = self.full;
        self.full = self.bound.is_full(was, self.bytes);
        was && !self.full
    }

    /// Counts `bytes` more that messages take. The caller charges them, too.
    pub(super) const fn add_message(&mut self, bytes: usize) {
        self.messages += bytes;
    }

    /// The opposite of [`Memory::add_message`].
    pub(super) const fn remove_message(&mut self, bytes: usize) {
        self.messages -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_at_the_high_mark_until_the_low_mark() {
        let mut memory = Memory::new(Bound { high: 10, low: 4 });
        memory.add_message(6);
        assert!(!memory.charge(0, 10) && memory.is_full() && !memory.is_stuck());
        memory.remove_message(1);
        assert!(!memory.charge(1, 0) && memory.is_full() && !memory.is_stuck());
        assert!(!memory.charge(0, 1) && memory.is_stuck());
        assert!(memory.charge(6, 0) && !memory.is_full());
    }
}
