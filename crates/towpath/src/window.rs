//! The packets that wait, in the order they came.
//!
//! A packet that an inspector holds must not let later ones overtake it on the way out. So as long as the window is
//! not empty, every packet that passes joins it at the back, and packets leave it only at the front, once decided.
//!
//! Invariant: the window is empty or its front is waiting for a verdict ([`Window::flush`] restores it).
//! Bounded in packets and in bytes: [`Window::has_room`] says when the caller must wait for verdicts first.

use std::collections::VecDeque;

/// Names an entry for as long as it is in the window; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// A packet's own bytes, and what the port said about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored<M> {
    /// The frame.
    pub bytes: Vec<u8>,
    /// What goes with it.
    pub meta: M,
}

#[derive(Debug)]
enum Slot<M, W> {
    /// Somebody holds the packet; `W` is where its walk goes on.
    Waiting(Stored<M>, W),
    /// It goes out when its turn comes.
    Passed(Stored<M>),
    /// It was dropped; only its place is left.
    Gone,
}

/// See the module's text.
#[derive(Debug)]
pub struct Window<M, W> {
    slots: VecDeque<Slot<M, W>>,
    /// Ticket of the front slot.
    first: u64,
    /// Bytes in all slots.
    bytes: usize,
    waiting: usize,
    max_packets: usize,
    max_bytes: usize,
    /// Buffers for the next packets: the window allocates only until it is warm.
    spare: Vec<Vec<u8>>,
}

impl<M, W> Window<M, W> {
    /// An empty window for at most `max_packets` packets and about `max_bytes` bytes: one packet may exceed the bytes.
    pub fn new(max_packets: usize, max_bytes: usize) -> Self {
        Self {
            slots: VecDeque::new(),
            first: 0,
            bytes: 0,
            waiting: 0,
            max_packets,
            max_bytes,
            spare: Vec::new(),
        }
    }

    /// True when nothing is in the window: a packet that passes may go straight out.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// False when one more packet would break the bounds.
    pub fn has_room(&self) -> bool {
        self.slots.len() < self.max_packets && self.bytes < self.max_bytes
    }

    /// Packets that wait for a verdict.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The first packet that waits.
    pub fn oldest_waiting(&self) -> Option<Ticket> {
        let index = self.slots.iter().position(|slot| matches!(slot, Slot::Waiting(..)))?;
        Some(Ticket(self.first + index as u64))
    }

    /// The ticket that the next packet to join will get.
    pub fn next_ticket(&self) -> Ticket {
        Ticket(self.first + self.slots.len() as u64)
    }

    /// Adds a packet that somebody holds.
    pub fn push_waiting(&mut self, bytes: &[u8], meta: M, walk: W) -> Ticket {
        let ticket = self.next_ticket();
        let stored = self.store(bytes, meta);
        self.waiting += 1;
        self.slots.push_back(Slot::Waiting(stored, walk));
        ticket
    }

    /// Adds a packet that passed, behind those that wait.
    pub fn push_passed(&mut self, bytes: &[u8], meta: M) {
        let stored = self.store(bytes, meta);
        self.slots.push_back(Slot::Passed(stored));
    }

    /// The waiting packet of `ticket` and its walk; `None` when it is not waiting (any more).
    pub fn waiting_mut(&mut self, ticket: Ticket) -> Option<(&mut Stored<M>, &mut W)> {
        match self.slot_mut(ticket)? {
            Slot::Waiting(stored, walk) => Some((stored, walk)),
            Slot::Passed(_) | Slot::Gone => None,
        }
    }

    /// Decides that the waiting packet of `ticket` passes. Does nothing when it is not waiting.
    pub fn pass(&mut self, ticket: Ticket) {
        let Some(slot) = self.slot_mut(ticket) else { return };
        match std::mem::replace(slot, Slot::Gone) {
            Slot::Waiting(stored, _) => {
                *slot = Slot::Passed(stored);
                self.waiting -= 1;
            }
            other => *slot = other,
        }
    }

    /// Decides that the waiting packet of `ticket` does not pass. Does nothing when it is not waiting.
    pub fn discard(&mut self, ticket: Ticket) {
        let Some(slot) = self.slot_mut(ticket) else { return };
        match std::mem::replace(slot, Slot::Gone) {
            Slot::Waiting(stored, _) => {
                self.waiting -= 1;
                self.reclaim(stored);
            }
            other => *slot = other,
        }
    }

    /// Gives the decided packets at the front to `out`, up to the first that waits. After an error of `out` the packet
    /// that failed is gone and the rest is still here.
    pub fn flush<E>(&mut self, mut out: impl FnMut(&Stored<M>) -> Result<(), E>) -> Result<(), E> {
        while let Some(slot) = self.slots.pop_front() {
            match slot {
                Slot::Waiting(..) => {
                    self.slots.push_front(slot);
                    break;
                }
                Slot::Gone => self.first += 1,
                Slot::Passed(stored) => {
                    self.first += 1;
                    let sent = out(&stored);
                    self.reclaim(stored);
                    sent?;
                }
            }
        }
        Ok(())
    }

    fn slot_mut(&mut self, ticket: Ticket) -> Option<&mut Slot<M, W>> {
        let index = usize::try_from(ticket.0.checked_sub(self.first)?).ok()?;
        self.slots.get_mut(index)
    }

    fn store(&mut self, bytes: &[u8], meta: M) -> Stored<M> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.extend_from_slice(bytes);
        self.bytes += bytes.len();
        Stored { bytes: buffer, meta }
    }

    fn reclaim(&mut self, stored: Stored<M>) {
        let mut buffer = stored.bytes;
        // A replaced payload may have another length than the one that was counted in: `replace` keeps the sum.
        self.bytes -= buffer.len();
        buffer.clear();
        // A jumbo's buffer is not kept: the spares stay within the window's own bound.
        if buffer.capacity() <= KEEP {
            self.spare.push(buffer);
        }
    }

    /// Puts other bytes in the place of a waiting packet's. Does nothing when it is not waiting.
    pub fn replace(&mut self, ticket: Ticket, bytes: &[u8]) {
        let Some((stored, _)) = self.waiting_mut(ticket) else { return };
        let before = stored.bytes.len();
        stored.bytes.clear();
        stored.bytes.extend_from_slice(bytes);
        self.bytes = self.bytes - before + bytes.len();
    }
}

/// Buffers larger than this are freed, not kept.
const KEEP: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flushed(window: &mut Window<u32, ()>) -> Vec<u32> {
        let mut out = Vec::new();
        window
            .flush(|stored| {
                out.push(stored.meta);
                Ok::<(), ()>(())
            })
            .unwrap();
        out
    }

    #[test]
    fn packets_leave_in_the_order_they_came() {
        let mut window = Window::new(16, 1000);
        let a = window.push_waiting(b"a", 1, ());
        window.push_passed(b"b", 2);
        let c = window.push_waiting(b"c", 3, ());
        window.push_passed(b"d", 4);
        assert!(flushed(&mut window).is_empty());
        window.discard(c);
        assert!(flushed(&mut window).is_empty());
        window.pass(a);
        assert_eq!(flushed(&mut window), [1, 2, 4]);
        assert!(window.is_empty());
        assert_eq!(window.bytes, 0);
    }

    #[test]
    fn a_second_verdict_changes_nothing() {
        let mut window = Window::<u32, ()>::new(16, 1000);
        let a = window.push_waiting(b"a", 1, ());
        window.pass(a);
        window.discard(a);
        window.pass(a);
        assert_eq!(flushed(&mut window), [1]);
        window.discard(a);
        window.replace(a, b"x");
        assert_eq!(window.waiting(), 0);
    }

    #[test]
    fn bounds_count_packets_and_bytes() {
        let mut window = Window::<u32, ()>::new(2, 10);
        let a = window.push_waiting(&[0; 4], 1, ());
        assert!(window.has_room());
        window.replace(a, &[0; 10]);
        assert!(!window.has_room());
        window.replace(a, &[0; 1]);
        assert!(window.has_room());
        window.push_passed(&[0; 1], 2);
        assert!(!window.has_room());
    }

    proptest! {
        /// Against a plain list: what leaves is what passed, in order, and nothing that still waits is overtaken.
        #[test]
        fn agrees_with_a_list(ops in proptest::collection::vec((0u8..4, 0usize..8), 1..200)) {
            let mut window = Window::<u32, ()>::new(usize::MAX, usize::MAX);
            let mut list: Vec<(u32, Option<bool>, Ticket)> = Vec::new();
            let mut id = 0;
            for (op, pick) in ops {
                match op {
                    0 => {
                        list.push((id, None, window.push_waiting(&id.to_le_bytes(), id, ())));
                        id += 1;
                    }
                    1 if !window.is_empty() => {
                        let ticket = window.next_ticket();
                        window.push_passed(&[], id);
                        list.push((id, Some(true), ticket));
                        id += 1;
                    }
                    _ => {
                        let open: Vec<_> = (0..list.len()).filter(|&i| list[i].1.is_none()).collect();
                        if !open.is_empty() {
                            let i = open[pick % open.len()];
                            list[i].1 = Some(op == 2);
                            if op == 2 { window.pass(list[i].2) } else { window.discard(list[i].2) }
                        }
                    }
                }
                let decided = list.iter().take_while(|(_, fate, _)| fate.is_some()).count();
                let expected: Vec<_> =
                    list.drain(..decided).filter(|(_, fate, _)| *fate == Some(true)).map(|(id, _, _)| id).collect();
                prop_assert_eq!(flushed(&mut window), expected);
                prop_assert_eq!(window.waiting(), list.iter().filter(|(_, fate, _)| fate.is_none()).count());
            }
        }
    }
}
