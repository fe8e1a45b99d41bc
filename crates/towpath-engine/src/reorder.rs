//! The reorder buffer: packets that wait for a verdict, and packets that passed behind them.
//!
//! What: each packet belongs to a bucket, and the packets of a bucket leave in the order in which they were added. While a bucket is
//! not clear, a packet that passes joins it at the back. Packets leave a bucket only at its front, once they are decided.
//! Buckets do not wait for each other. A replay has one bucket: all packets leave in the order of the capture. A live engine
//! hashes flows into buckets, so that a flow that waits delays only the flows of its bucket.
//!
//! Invariant: a bucket is clear, or its front waits for a verdict, or the bucket is in `ready`, which
//! [`ReorderBuffer::flush`] empties. [`ReorderBuffer::has_room`] bounds packets and bytes.

/// The name of a packet while it is in the buffer. Names are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PacketId {
    generation: u32,
    at: u32,
}

/// The bytes of a packet and its metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held<M> {
    bytes: Bytes,
    /// The metadata.
    pub meta: M,
}

/// The bytes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Bytes {
    /// In the burst: the packet's index there, and its length.
    Borrowed(u32, u32),
    Own(Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// The packet waits for a verdict, for room, or for its turn.
    Waiting,
    /// The packet leaves when its turn comes.
    Passed,
    /// The packet was dropped or moved. The entry remains until its turn comes.
    Gone,
}

/// An entry of the buffer. Its contents, several cache lines, do not move while its state changes.
#[derive(Debug)]
struct Entry<M, W> {
    state: State,
    generation: u32,
    bucket: u16,
    /// The next entry of the bucket or of the free list.
    next: u32,
    held: Held<M>,
    /// The packet's state on its path. `None` for a packet that never waited.
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

/// The reorder buffer. See the module's documentation.
#[derive(Debug)]
pub struct ReorderBuffer<M, W> {
    entries: Vec<Entry<M, W>>,
    /// The first free entry.
    free: u32,
    buckets: Box<[Bucket]>,
    /// Buckets whose front was decided.
    ready: Vec<u16>,
    /// Waiting packets that have come to the front of their bucket.
    turns: Vec<PacketId>,
    packets: usize,
    /// Bytes of all packets.
    bytes: usize,
    waiting: usize,
    max_packets: usize,
    max_bytes: usize,
    /// Free byte buffers, so that the buffer allocates only until it is warm.
    spare: Vec<Vec<u8>>,
    /// Packets that were added with borrowed bytes.
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
    /// The packet's index in the burst, if its bytes are borrowed.
    pub fn borrowed(&self) -> Option<usize> {
        match self.bytes {
            Bytes::Borrowed(index, _) => Some(index as usize),
            Bytes::Own(_) => None,
        }
    }

    /// The bytes. `borrowed` returns the bytes at an index of the burst.
    pub fn bytes<'a>(&'a self, borrowed: impl FnOnce(usize) -> &'a [u8]) -> &'a [u8] {
        match &self.bytes {
            Bytes::Borrowed(index, _) => borrowed(*index as usize),
            Bytes::Own(bytes) => bytes,
        }
    }

    /// The bytes and the metadata for changes. Borrowed bytes are copied.
    pub fn parts_mut<'a>(&mut self, borrowed: impl FnOnce(usize) -> &'a [u8]) -> (&mut [u8], &mut M) {
        if let Bytes::Borrowed(index, _) = self.bytes {
            self.bytes = Bytes::Own(borrowed(index as usize).to_vec());
        }
        match &mut self.bytes {
            Bytes::Own(bytes) => (bytes, &mut self.meta),
            Bytes::Borrowed(..) => unreachable!("the bytes were copied"),
        }
    }
}

impl<M, W> ReorderBuffer<M, W> {
    /// Creates a buffer for at most `max_packets` packets and `max_bytes` bytes. The last packet may exceed the bytes.
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

    /// Returns true if the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// Returns true if the bucket is empty: a packet of it that passes may leave at once.
    pub fn is_clear(&self, bucket: u16) -> bool {
        self.buckets[usize::from(bucket)].front == NONE
    }

    /// Returns false if the buffer is full.
    pub fn has_room(&self) -> bool {
        self.packets < self.max_packets && self.bytes < self.max_bytes
    }

    /// The number of packets that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The first waiting packet of the first bucket that is not clear.
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

    /// All packets that wait.
    pub fn waiting_ids(&self) -> Vec<PacketId> {
        let waits = |(_, entry): &(u32, &Entry<M, W>)| entry.state == State::Waiting;
        let id = |(at, entry): (u32, &Entry<M, W>)| PacketId { generation: entry.generation, at };
        (0..).zip(&self.entries).filter(waits).map(id).collect()
    }

    /// Adds a packet that waits. Copies its bytes.
    pub fn push_waiting(&mut self, bytes: &[u8], meta: M, walk: W, bucket: u16) -> PacketId {
        let held = self.store(bytes, meta);
        self.waiting += 1;
        self.push(State::Waiting, held, Some(walk), bucket)
    }

    /// Adds a packet that waits, at `index` of the current burst. Its `len` bytes are borrowed until [`keep`](Self::keep).
    pub fn push_borrowed(&mut self, index: usize, len: usize, meta: M, walk: W, bucket: u16) -> PacketId {
        self.bytes += len;
        self.waiting += 1;
        let held = Held { bytes: Bytes::Borrowed(index as u32, len as u32), meta };
        let id = self.push(State::Waiting, held, Some(walk), bucket);
        self.borrowed.push(id);
        id
    }

    /// Ends the burst: copies the borrowed bytes of packets that still wait.
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

    /// Adds a packet that passed. Copies its bytes.
    pub fn push_passed(&mut self, bytes: &[u8], meta: M, bucket: u16) {
        let held = self.store(bytes, meta);
        let id = self.push(State::Passed, held, None, bucket);
        self.note(id);
    }

    /// A waiting packet and its state on its path. `None` if it does not wait.
    pub fn waiting_mut(&mut self, id: PacketId) -> Option<(&mut Held<M>, &mut W)> {
        let Entry { held, walk, .. } = self.waiting_entry(id)?;
        Some((held, walk.as_mut()?))
    }

    /// A waiting packet passes. No effect if it does not wait.
    pub fn pass(&mut self, id: PacketId) {
        let Some(entry) = self.waiting_entry(id) else { return };
        entry.state = State::Passed;
        self.waiting -= 1;
        self.note(id);
    }

    /// A waiting packet does not pass. No effect if it does not wait.
    pub fn discard(&mut self, id: PacketId) {
        let Some(entry) = self.waiting_entry(id) else { return };
        entry.state = State::Gone;
        self.waiting -= 1;
        self.reclaim(id.at);
        self.note(id);
    }

    /// Moves a waiting packet to the back of another bucket. Returns its new name, or `None` if it does not wait. Its entry in the old
    /// bucket counts as a packet until its turn comes.
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

    /// Replaces the bytes of a waiting packet. No effect if it does not wait.
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

    /// Passes each packet to `out` that passed and is behind no waiting packet of its bucket.
    ///
    /// # Errors
    ///
    /// Returns an error of `out`. That packet is removed, and the others remain.
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

    /// Returns a waiting packet that has come to the front of its bucket, once.
    pub fn take_turn(&mut self) -> Option<PacketId> {
        self.turns.pop()
    }

    /// Clears the packets of [`take_turn`](Self::take_turn).
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

    /// A packet was decided: its bucket may have packets that leave.
    fn note(&mut self, id: PacketId) {
        let bucket = self.entries[id.at as usize].bucket;
        if self.buckets[usize::from(bucket)].front == id.at {
            self.ready.push(bucket);
        }
    }

    /// Removes the front of a bucket.
    fn unlink(&mut self, bucket: u16, at: u32) {
        self.packets -= 1;
        let entry = &mut self.entries[at as usize];
        let next = std::mem::replace(&mut entry.next, self.free);
        entry.state = State::Free;
        // Older names of this entry are invalid from now on.
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

    /// Takes the bytes of an entry.
    fn reclaim(&mut self, at: u32) {
        let bytes = std::mem::take(&mut self.entries[at as usize].held.bytes);
        // The length may differ from the length that was added: `replace` keeps the sum.
        self.bytes -= bytes.len();
        let Bytes::Own(mut buffer) = bytes else { return };
        buffer.clear();
        // The spare buffers stay within the bounds: no large ones, and no more than there are entries.
        if buffer.capacity() <= KEEP && self.spare.len() < self.entries.len() {
            self.spare.push(buffer);
        }
    }
}

#[inline]
fn entry_mut<M, W>(entries: &mut [Entry<M, W>], id: PacketId) -> Option<&mut Entry<M, W>> {
    entries.get_mut(id.at as usize).filter(|entry| entry.generation == id.generation)
}

/// Maximum size of a spare byte buffer.
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
    fn packets_leave_in_order() {
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
    fn buckets_do_not_wait_for_each_other() {
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
    fn a_moved_packet_is_the_last_of_its_bucket() {
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
    fn a_second_verdict_has_no_effect() {
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
    fn borrowed_bytes_are_copied_only_at_the_end_of_the_burst() {
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
        /// The model: a list per bucket. Packets that passed leave in order and overtake no waiting packet.
        #[test]
        fn agrees_with_lists(ops in proptest::collection::vec((0u8..4, 0usize..8, 0u16..3), 1..200)) {
            let mut buffer = ReorderBuffer::<u32, ()>::new(3, usize::MAX, usize::MAX);
            /// A packet, whether it passed, and its name if it waited.
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
                            let id = list[i].2.expect("a waiting packet");
                            if op == 2 { buffer.pass(id) } else { buffer.discard(id) }
                        }
                    }
                }
                // The other buckets are already flushed.
                let decided = list.iter().take_while(|(_, passed, _)| passed.is_some()).count();
                let expected: Vec<_> =
                    list.drain(..decided).filter(|(_, passed, _)| *passed == Some(true)).map(|(id, _, _)| id).collect();
                prop_assert_eq!(flushed(&mut buffer), expected);
                prop_assert_eq!(buffer.is_clear(bucket), lists[usize::from(bucket)].is_empty());
                let waiting = lists.iter().flatten().filter(|(_, passed, _)| passed.is_none()).count();
                prop_assert_eq!(buffer.waiting(), waiting);
            }
        }
    }
}
