//! The packets that wait, bucket by bucket in the order they borrowed.
//!
//! A packet that an inspector holds must not let later ones of its bucket overtake it on the way out. So as long as a bucket is
//! not clear, every packet of it that passes joins it at the back, and packets leave it only at the front, once decided.
//! Lanes do not wait for each other. A replay has one bucket: everything leaves in the order of the capture. A live engine
//! has one for each bucket of flows: a flow that waits delays nobody else.
//!
//! Invariant: a bucket is clear, or its front waits for a verdict, or the bucket is in `ready` ([`ReorderBuffer::flush`] empties
//! that). Bounded in packets and in bytes: [`ReorderBuffer::has_room`] says when there are too many.

/// Names an entry for as long as it is in the buffer; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PacketId {
    generation: u32,
    at: u32,
}

/// A packet's bytes, and what the port said about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held<M> {
    bytes: Bytes,
    /// What goes with it.
    pub meta: M,
}

/// Where a packet's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Bytes {
    /// Where they borrowed: its place in the burst, and its length.
    Borrowed(u32, u32),
    Own(Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Somebody holds the packet.
    Waiting,
    /// It goes out when its turn comes.
    Passed,
    /// It was dropped; only its place is left.
    Gone,
}

/// A place in the buffer. What is in it stays where it is while its state changes: it is some cache lines.
#[derive(Debug)]
struct Entry<M, W> {
    state: State,
    generation: u32,
    bucket: u16,
    /// Behind it in its bucket, or among the free ones.
    next: u32,
    held: Held<M>,
    /// Where its walk goes on; none of one that never waited.
    walk: Option<W>,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    front: u32,
    back: u32,
}

/// No entry.
const NONE: u32 = u32::MAX;

const CLEAR: Bucket = Bucket { front: NONE, back: NONE };

/// See the module's text.
#[derive(Debug)]
pub struct ReorderBuffer<M, W> {
    entries: Vec<Entry<M, W>>,
    /// The first free entry.
    free: u32,
    buckets: Box<[Bucket]>,
    /// Lanes whose front was decided.
    ready: Vec<u16>,
    /// Packets at the front of their bucket that still wait, and were not there before.
    turns: Vec<PacketId>,
    packets: usize,
    /// Bytes of all packets.
    bytes: usize,
    waiting: usize,
    max_packets: usize,
    max_bytes: usize,
    /// Buffers for the next packets: the buffer allocates only until it is warm.
    spare: Vec<Vec<u8>>,
    /// Packets whose bytes lay in their burst when they were added.
    borrowed: Vec<PacketId>,
}

impl Default for Bytes {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Bytes {
    fn len(&self) -> usize {
        match self {
            Self::Borrowed(_, len) => *len as usize,
            Self::Own(bytes) => bytes.len(),
        }
    }
}

impl<M> Held<M> {
    /// Its place in the burst that it borrowed with, as long as its bytes are only there.
    pub fn borrowed(&self) -> Option<usize> {
        match self.bytes {
            Bytes::Borrowed(index, _) => Some(index as usize),
            Bytes::Own(_) => None,
        }
    }

    /// The frame; `borrowed` has the bytes of those that still lie in their burst.
    pub fn bytes<'a>(&'a self, borrowed: impl FnOnce(usize) -> &'a [u8]) -> &'a [u8] {
        match &self.bytes {
            Bytes::Borrowed(index, _) => borrowed(*index as usize),
            Bytes::Own(bytes) => bytes,
        }
    }

    /// The frame and what goes with it, to be changed: a copy of its own from now on.
    pub fn parts_mut<'a>(&mut self, borrowed: impl FnOnce(usize) -> &'a [u8]) -> (&mut [u8], &mut M) {
        if let Bytes::Borrowed(index, _) = self.bytes {
            self.bytes = Bytes::Own(borrowed(index as usize).to_vec());
        }
        match &mut self.bytes {
            Bytes::Own(bytes) => (bytes, &mut self.meta),
            Bytes::Borrowed(..) => unreachable!("it was copied just now"),
        }
    }
}

impl<M, W> ReorderBuffer<M, W> {
    /// An empty buffer of so many buckets for at most `max_packets` packets and about `max_bytes` bytes: one packet may
    /// exceed the bytes.
    pub fn new(buckets: u16, max_packets: usize, max_bytes: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: NONE,
            buckets: vec![CLEAR; usize::from(buckets)].into(),
            ready: Vec::new(),
            turns: Vec::new(),
            packets: 0,
            bytes: 0,
            waiting: 0,
            max_packets,
            max_bytes,
            spare: Vec::new(),
            borrowed: Vec::new(),
        }
    }

    /// True when nothing is in the buffer.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// True when nothing of the bucket is in the buffer: a packet of it that passes may go straight out.
    pub fn is_clear(&self, bucket: u16) -> bool {
        self.buckets[usize::from(bucket)].front == NONE
    }

    /// False when one more packet would break the bounds.
    pub fn has_room(&self) -> bool {
        self.packets < self.max_packets && self.bytes < self.max_bytes
    }

    /// Packets that wait for a verdict.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The first packet that waits in the first bucket that is not clear.
    pub fn oldest_waiting(&self) -> Option<PacketId> {
        let mut at = self.buckets.iter().map(|bucket| bucket.front).find(|&front| front != NONE)?;
        while at != NONE {
            let entry = &self.entries[at as usize];
            if entry.state == State::Waiting {
                return Some(PacketId { generation: entry.generation, at });
            }
            at = entry.next;
        }
        None
    }

    /// All packets that wait for a verdict.
    pub fn waiting_ids(&self) -> Vec<PacketId> {
        let waits = |(_, entry): &(u32, &Entry<M, W>)| entry.state == State::Waiting;
        let id = |(at, entry): (u32, &Entry<M, W>)| PacketId { generation: entry.generation, at };
        (0..).zip(&self.entries).filter(waits).map(id).collect()
    }

    /// Adds a packet that somebody holds.
    pub fn push_waiting(&mut self, bytes: &[u8], meta: M, walk: W, bucket: u16) -> PacketId {
        let held = self.store(bytes, meta);
        self.waiting += 1;
        self.push(State::Waiting, held, Some(walk), bucket)
    }

    /// Adds a packet that somebody holds, and that lies at `index` of the burst that is being handled. Its `len` bytes stay there,
    /// until [`keep`](Self::keep).
    pub fn push_borrowed(&mut self, index: usize, len: usize, meta: M, walk: W, bucket: u16) -> PacketId {
        self.bytes += len;
        self.waiting += 1;
        let held = Held { bytes: Bytes::Borrowed(index as u32, len as u32), meta };
        let id = self.push(State::Waiting, held, Some(walk), bucket);
        self.borrowed.push(id);
        id
    }

    /// The burst goes: what still waits is copied out of it.
    pub fn keep<'a>(&mut self, burst: impl Fn(usize) -> &'a [u8]) {
        let mut borrowed = std::mem::take(&mut self.borrowed);
        for id in borrowed.drain(..) {
            let Self { entries, spare, .. } = self;
            if let Some(entry) = entry_mut(entries, id)
                && let Bytes::Borrowed(index, _) = entry.held.bytes
            {
                let mut buffer = spare.pop().unwrap_or_default();
                buffer.extend_from_slice(burst(index as usize));
                entry.held.bytes = Bytes::Own(buffer);
            }
        }
        self.borrowed = borrowed;
    }

    /// Adds a packet that passed, behind those that wait.
    pub fn push_passed(&mut self, bytes: &[u8], meta: M, bucket: u16) {
        let held = self.store(bytes, meta);
        let id = self.push(State::Passed, held, None, bucket);
        self.note(id);
    }

    /// The waiting packet of `id` and its walk; `None` when it is not waiting (any more).
    pub fn waiting_mut(&mut self, id: PacketId) -> Option<(&mut Held<M>, &mut W)> {
        let Entry { held, walk, .. } = self.waiting_entry(id)?;
        Some((held, walk.as_mut()?))
    }

    /// Decides that the waiting packet of `id` passes. Does nothing when it is not waiting.
    pub fn pass(&mut self, id: PacketId) {
        let Some(entry) = self.waiting_entry(id) else { return };
        entry.state = State::Passed;
        self.waiting -= 1;
        self.note(id);
    }

    /// Decides that the waiting packet of `id` does not pass. Does nothing when it is not waiting.
    pub fn discard(&mut self, id: PacketId) {
        let Some(entry) = self.waiting_entry(id) else { return };
        entry.state = State::Gone;
        self.waiting -= 1;
        self.reclaim(id.at);
        self.note(id);
    }

    /// Takes a waiting packet to the back of another bucket: its new id. In its old bucket it has passed nobody, and its place there
    /// counts until its turn comes, so that there may be twice as many entries as packets. `None` when it is not waiting.
    pub fn move_to(&mut self, id: PacketId, bucket: u16) -> Option<PacketId>
    where
        M: Copy,
    {
        let entry = self.waiting_entry(id)?;
        entry.state = State::Gone;
        let (bytes, walk) = (std::mem::take(&mut entry.held.bytes), entry.walk.take());
        let held = Held { bytes, meta: entry.held.meta };
        self.note(id);
        let borrowed = matches!(held.bytes, Bytes::Borrowed(..));
        let id = self.push(State::Waiting, held, walk, bucket);
        if borrowed {
            self.borrowed.push(id);
        }
        Some(id)
    }

    /// Puts other bytes in the place of a waiting packet's. Does nothing when it is not waiting.
    pub fn replace(&mut self, id: PacketId, bytes: &[u8]) {
        let Some((held, _)) = self.waiting_mut(id) else { return };
        let before = held.bytes.len();
        match &mut held.bytes {
            Bytes::Own(own) => {
                own.clear();
                own.extend_from_slice(bytes);
            }
            borrowed => *borrowed = Bytes::Own(bytes.to_vec()),
        }
        self.bytes = self.bytes - before + bytes.len();
    }

    /// Gives the decided packets at the front of their buckets to `out`, up to the first that waits. After an error of `out`
    /// the packet that failed is gone and the rest is still here.
    pub fn flush<E>(&mut self, mut out: impl FnMut(&Held<M>) -> Result<(), E>) -> Result<(), E> {
        while let Some(&bucket) = self.ready.last() {
            let at = self.buckets[usize::from(bucket)].front;
            let Some(entry) = self.entries.get(at as usize) else {
                self.ready.pop();
                continue;
            };
            match entry.state {
                State::Waiting => {
                    self.turns.push(PacketId { generation: entry.generation, at });
                    self.ready.pop();
                }
                State::Passed => {
                    let sent = out(&entry.held);
                    self.reclaim(at);
                    self.unlink(bucket, at);
                    sent?;
                }
                State::Gone | State::Free => self.unlink(bucket, at),
            }
        }
        Ok(())
    }

    /// A packet that waits and has come to the front of its bucket since this was asked.
    pub fn take_turn(&mut self) -> Option<PacketId> {
        self.turns.pop()
    }

    /// Forgets whose turn it is.
    pub fn clear_turns(&mut self) {
        self.turns.clear();
    }

    fn waiting_entry(&mut self, id: PacketId) -> Option<&mut Entry<M, W>> {
        entry_mut(&mut self.entries, id).filter(|entry| entry.state == State::Waiting)
    }

    fn push(&mut self, state: State, held: Held<M>, walk: Option<W>, bucket: u16) -> PacketId {
        self.packets += 1;
        let at = match self.free {
            NONE => {
                self.entries.push(Entry { state, generation: 0, bucket, next: NONE, held, walk });
                (self.entries.len() - 1) as u32
            }
            at => {
                let entry = &mut self.entries[at as usize];
                self.free = entry.next;
                *entry = Entry { state, generation: entry.generation, bucket, next: NONE, held, walk };
                at
            }
        };
        let ends = &mut self.buckets[usize::from(bucket)];
        match std::mem::replace(&mut ends.back, at) {
            NONE => ends.front = at,
            back => self.entries[back as usize].next = at,
        }
        PacketId { generation: self.entries[at as usize].generation, at }
    }

    /// The packet of `id` was decided: its bucket may have something to give.
    fn note(&mut self, id: PacketId) {
        let bucket = self.entries[id.at as usize].bucket;
        if self.buckets[usize::from(bucket)].front == id.at {
            self.ready.push(bucket);
        }
    }

    /// Takes the front of a bucket out of it.
    fn unlink(&mut self, bucket: u16, at: u32) {
        self.packets -= 1;
        let entry = &mut self.entries[at as usize];
        let next = std::mem::replace(&mut entry.next, self.free);
        entry.state = State::Free;
        // Tickets of what was here before find nothing.
        entry.generation = entry.generation.wrapping_add(1);
        self.free = at;
        let ends = &mut self.buckets[usize::from(bucket)];
        ends.front = next;
        if next == NONE {
            ends.back = NONE;
        }
    }

    fn store(&mut self, bytes: &[u8], meta: M) -> Held<M> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.extend_from_slice(bytes);
        self.bytes += bytes.len();
        Held { bytes: Bytes::Own(buffer), meta }
    }

    /// Takes the bytes of the entry at `at` back.
    fn reclaim(&mut self, at: u32) {
        let bytes = std::mem::take(&mut self.entries[at as usize].held.bytes);
        // A replaced payload may have another length than the one that was counted in: `replace` keeps the sum.
        self.bytes -= bytes.len();
        let Bytes::Own(mut buffer) = bytes else { return };
        buffer.clear();
        // A jumbo's buffer is not kept, nor more of them than packets ever waited at a time (what borrowed borrowed was none of them): the
        // spares stay within the buffer's own bound.
        if buffer.capacity() <= KEEP && self.spare.len() < self.entries.len() {
            self.spare.push(buffer);
        }
    }
}

#[inline]
fn entry_mut<M, W>(entries: &mut [Entry<M, W>], id: PacketId) -> Option<&mut Entry<M, W>> {
    entries.get_mut(id.at as usize).filter(|entry| entry.generation == id.generation)
}

/// Buffers larger than this are freed, not kept.
const KEEP: usize = 2048;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flushed(buffer: &mut ReorderBuffer<u32, ()>) -> Vec<u32> {
        let mut out = Vec::new();
        buffer
            .flush(|held| {
                out.push(held.meta);
                Ok::<(), ()>(())
            })
            .unwrap();
        out
    }

    #[test]
    fn packets_leave_in_the_order_they_came() {
        let mut buffer = ReorderBuffer::new(1, 16, 1000);
        let a = buffer.push_waiting(b"a", 1, (), 0);
        buffer.push_passed(b"b", 2, 0);
        let c = buffer.push_waiting(b"c", 3, (), 0);
        buffer.push_passed(b"d", 4, 0);
        assert!(flushed(&mut buffer).is_empty());
        buffer.discard(c);
        assert!(flushed(&mut buffer).is_empty());
        buffer.pass(a);
        assert_eq!(flushed(&mut buffer), [1, 2, 4]);
        assert!(buffer.is_empty());
        assert_eq!(buffer.bytes, 0);
    }

    #[test]
    fn lanes_do_not_wait_for_each_other_and_say_whose_turn_it_is() {
        let mut buffer = ReorderBuffer::new(2, 16, 1000);
        let a = buffer.push_waiting(b"a", 1, (), 0);
        let b = buffer.push_waiting(b"b", 2, (), 1);
        let c = buffer.push_waiting(b"c", 3, (), 1);
        assert!(!buffer.is_clear(0) && !buffer.is_clear(1));
        buffer.pass(b);
        assert_eq!(flushed(&mut buffer), [2]);
        assert_eq!((buffer.take_turn(), buffer.take_turn()), (Some(c), None));
        buffer.pass(a);
        assert_eq!(flushed(&mut buffer), [1]);
        assert!(buffer.is_clear(0) && !buffer.is_clear(1));
        assert_eq!(buffer.take_turn(), None);
    }

    #[test]
    fn a_packet_that_goes_to_another_lane_is_the_last_one_there() {
        let mut buffer = ReorderBuffer::new(2, 16, 1000);
        let a = buffer.push_waiting(b"a", 1, (), 0);
        let b = buffer.push_waiting(b"b", 2, (), 0);
        let c = buffer.push_waiting(b"c", 3, (), 1);
        let moved = buffer.move_to(a, 1).unwrap();
        assert_eq!(buffer.move_to(a, 1), None);
        assert_eq!(flushed(&mut buffer), [0; 0]);
        assert_eq!((buffer.take_turn(), buffer.waiting()), (Some(b), 3));
        buffer.pass(moved);
        buffer.pass(b);
        assert_eq!(flushed(&mut buffer), [2]);
        buffer.pass(c);
        assert_eq!(flushed(&mut buffer), [3, 1]);
        assert_eq!((buffer.is_empty(), buffer.bytes), (true, 0));
    }

    #[test]
    fn a_second_verdict_changes_nothing() {
        let mut buffer = ReorderBuffer::<u32, ()>::new(1, 16, 1000);
        let a = buffer.push_waiting(b"a", 1, (), 0);
        buffer.pass(a);
        buffer.discard(a);
        buffer.pass(a);
        assert_eq!(flushed(&mut buffer), [1]);
        let b = buffer.push_waiting(b"b", 2, (), 0);
        assert_ne!(a, b);
        buffer.discard(a);
        buffer.replace(a, b"x");
        assert_eq!(buffer.waiting(), 1);
    }

    #[test]
    fn what_was_decided_in_time_is_not_copied_and_the_rest_is_before_its_burst_goes() {
        let burst: [&[u8]; 4] = [b"zero", b"one", b"two", b"three"];
        let mut buffer = ReorderBuffer::<u32, ()>::new(1, 16, 100);
        let ids: Vec<_> = burst
            .iter()
            .enumerate()
            .map(|(at, frame)| buffer.push_borrowed(at, frame.len(), at as u32, (), 0))
            .collect();
        assert_eq!(buffer.bytes, 15);
        let out = |buffer: &mut ReorderBuffer<u32, ()>| {
            let mut out = Vec::new();
            buffer
                .flush(|held| {
                    out.push((held.borrowed(), held.bytes(|at| burst[at]).to_vec()));
                    Ok::<(), ()>(())
                })
                .unwrap();
            out
        };
        buffer.pass(ids[0]);
        buffer.replace(ids[1], b"another");
        let (held, _) = buffer.waiting_mut(ids[2]).unwrap();
        held.parts_mut(|at| burst[at]).0[0] = b'T';
        assert_eq!(out(&mut buffer), [(Some(0), b"zero".to_vec())]);
        buffer.keep(|at| burst[at]);
        ids[1..].iter().for_each(|id| buffer.pass(*id));
        let rest: [&[u8]; 3] = [b"another", b"Two", b"three"];
        assert_eq!(out(&mut buffer), rest.map(|bytes| (None, bytes.to_vec())));
        assert_eq!(buffer.bytes, 0);
    }

    #[test]
    fn bounds_count_packets_and_bytes() {
        let mut buffer = ReorderBuffer::<u32, ()>::new(1, 2, 10);
        let a = buffer.push_waiting(&[0; 4], 1, (), 0);
        assert!(buffer.has_room());
        buffer.replace(a, &[0; 10]);
        assert!(!buffer.has_room());
        buffer.replace(a, &[0; 1]);
        assert!(buffer.has_room());
        buffer.push_passed(&[0; 1], 2, 0);
        assert!(!buffer.has_room());
    }

    proptest! {
        /// Against a plain list for each bucket: what leaves is what passed, in order, and nothing that still waits is
        /// overtaken.
        #[test]
        fn agrees_with_lists(ops in proptest::collection::vec((0u8..4, 0usize..8, 0u16..3), 1..200)) {
            let mut buffer = ReorderBuffer::<u32, ()>::new(3, usize::MAX, usize::MAX);
            /// A packet, what was decided about it, and its id when it waited.
            type Row = (u32, Option<bool>, Option<PacketId>);
            let mut lists: [Vec<Row>; 3] = Default::default();
            let mut id = 0;
            for (op, pick, bucket) in ops {
                let list = &mut lists[usize::from(bucket)];
                match op {
                    0 => {
                        list.push((id, None, Some(buffer.push_waiting(&id.to_le_bytes(), id, (), bucket))));
                        id += 1;
                    }
                    1 if !buffer.is_clear(bucket) => {
                        buffer.push_passed(&[], id, bucket);
                        list.push((id, Some(true), None));
                        id += 1;
                    }
                    _ => {
                        let open: Vec<_> = (0..list.len()).filter(|&i| list[i].1.is_none()).collect();
                        if !open.is_empty() {
                            let i = open[pick % open.len()];
                            list[i].1 = Some(op == 2);
                            let id = list[i].2.expect("it waits");
                            if op == 2 { buffer.pass(id) } else { buffer.discard(id) }
                        }
                    }
                }
                // Every bucket but this one had nothing to give.
                let decided = list.iter().take_while(|(_, fate, _)| fate.is_some()).count();
                let expected: Vec<_> =
                    list.drain(..decided).filter(|(_, fate, _)| *fate == Some(true)).map(|(id, _, _)| id).collect();
                prop_assert_eq!(flushed(&mut buffer), expected);
                prop_assert_eq!(buffer.is_clear(bucket), lists[usize::from(bucket)].is_empty());
                let waiting = lists.iter().flatten().filter(|(_, fate, _)| fate.is_none()).count();
                prop_assert_eq!(buffer.waiting(), waiting);
            }
        }
    }
}
