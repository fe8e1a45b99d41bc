//! The packets that wait, lane by lane in the order they came.
//!
//! A packet that an inspector holds must not let later ones of its lane overtake it on the way out. So as long as a lane is
//! not clear, every packet of it that passes joins it at the back, and packets leave it only at the front, once decided.
//! Lanes do not wait for each other. A replay has one lane: everything leaves in the order of the capture. A live engine
//! has one for each bucket of flows: a flow that waits delays nobody else.
//!
//! Invariant: a lane is clear, or its front waits for a verdict, or the lane is in `ready` ([`Window::flush`] empties
//! that). Bounded in packets and in bytes: [`Window::has_room`] says when there are too many.

/// Names an entry for as long as it is in the window; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket {
    generation: u32,
    at: u32,
}

/// A packet's bytes, and what the port said about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored<M> {
    bytes: Bytes,
    /// What goes with it.
    pub meta: M,
}

/// Where a packet's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Bytes {
    /// Where they came: its place in the burst, and its length.
    Came(u32, u32),
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

/// A place in the window. What is in it stays where it is while its state changes: it is some cache lines.
#[derive(Debug)]
struct Entry<M, W> {
    state: State,
    generation: u32,
    lane: u16,
    /// Behind it in its lane, or among the free ones.
    next: u32,
    stored: Stored<M>,
    /// Where its walk goes on; none of one that never waited.
    walk: Option<W>,
}

#[derive(Clone, Copy, Debug)]
struct Lane {
    front: u32,
    back: u32,
}

/// No entry.
const NONE: u32 = u32::MAX;

const CLEAR: Lane = Lane { front: NONE, back: NONE };

/// See the module's text.
#[derive(Debug)]
pub struct Window<M, W> {
    entries: Vec<Entry<M, W>>,
    /// The first free entry.
    free: u32,
    lanes: Box<[Lane]>,
    /// Lanes whose front was decided.
    ready: Vec<u16>,
    /// Packets at the front of their lane that still wait, and were not there before.
    turns: Vec<Ticket>,
    packets: usize,
    /// Bytes of all packets.
    bytes: usize,
    waiting: usize,
    max_packets: usize,
    max_bytes: usize,
    /// Buffers for the next packets: the window allocates only until it is warm.
    spare: Vec<Vec<u8>>,
    /// Packets whose bytes lay in their burst when they were added.
    came: Vec<Ticket>,
}

impl Default for Bytes {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Bytes {
    fn len(&self) -> usize {
        match self {
            Self::Came(_, len) => *len as usize,
            Self::Own(bytes) => bytes.len(),
        }
    }
}

impl<M> Stored<M> {
    /// Its place in the burst that it came with, as long as its bytes are only there.
    pub fn came(&self) -> Option<usize> {
        match self.bytes {
            Bytes::Came(index, _) => Some(index as usize),
            Bytes::Own(_) => None,
        }
    }

    /// The frame; `came` has the bytes of those that still lie in their burst.
    pub fn bytes<'a>(&'a self, came: impl FnOnce(usize) -> &'a [u8]) -> &'a [u8] {
        match &self.bytes {
            Bytes::Came(index, _) => came(*index as usize),
            Bytes::Own(bytes) => bytes,
        }
    }

    /// The frame and what goes with it, to be changed: a copy of its own from now on.
    pub fn parts_mut<'a>(&mut self, came: impl FnOnce(usize) -> &'a [u8]) -> (&mut [u8], &mut M) {
        if let Bytes::Came(index, _) = self.bytes {
            self.bytes = Bytes::Own(came(index as usize).to_vec());
        }
        match &mut self.bytes {
            Bytes::Own(bytes) => (bytes, &mut self.meta),
            Bytes::Came(..) => unreachable!("it was copied just now"),
        }
    }
}

impl<M, W> Window<M, W> {
    /// An empty window of so many lanes for at most `max_packets` packets and about `max_bytes` bytes: one packet may
    /// exceed the bytes.
    pub fn new(lanes: u16, max_packets: usize, max_bytes: usize) -> Self {
        Self {
            entries: Vec::new(),
            free: NONE,
            lanes: vec![CLEAR; usize::from(lanes)].into(),
            ready: Vec::new(),
            turns: Vec::new(),
            packets: 0,
            bytes: 0,
            waiting: 0,
            max_packets,
            max_bytes,
            spare: Vec::new(),
            came: Vec::new(),
        }
    }

    /// True when nothing is in the window.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// True when nothing of the lane is in the window: a packet of it that passes may go straight out.
    pub fn is_clear(&self, lane: u16) -> bool {
        self.lanes[usize::from(lane)].front == NONE
    }

    /// False when one more packet would break the bounds.
    pub fn has_room(&self) -> bool {
        self.packets < self.max_packets && self.bytes < self.max_bytes
    }

    /// Packets that wait for a verdict.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The first packet that waits in the first lane that is not clear.
    pub fn oldest_waiting(&self) -> Option<Ticket> {
        let mut at = self.lanes.iter().map(|lane| lane.front).find(|&front| front != NONE)?;
        while at != NONE {
            let entry = &self.entries[at as usize];
            if entry.state == State::Waiting {
                return Some(Ticket { generation: entry.generation, at });
            }
            at = entry.next;
        }
        None
    }

    /// All packets that wait for a verdict.
    pub fn waiting_tickets(&self) -> Vec<Ticket> {
        let waits = |(_, entry): &(u32, &Entry<M, W>)| entry.state == State::Waiting;
        let ticket = |(at, entry): (u32, &Entry<M, W>)| Ticket { generation: entry.generation, at };
        (0..).zip(&self.entries).filter(waits).map(ticket).collect()
    }

    /// Adds a packet that somebody holds.
    pub fn push_waiting(&mut self, bytes: &[u8], meta: M, walk: W, lane: u16) -> Ticket {
        let stored = self.store(bytes, meta);
        self.waiting += 1;
        self.push(State::Waiting, stored, Some(walk), lane)
    }

    /// Adds a packet that somebody holds, and that lies at `index` of the burst that is being handled. Its `len` bytes stay there,
    /// until [`keep`](Self::keep).
    pub fn push_lent(&mut self, index: usize, len: usize, meta: M, walk: W, lane: u16) -> Ticket {
        self.bytes += len;
        self.waiting += 1;
        let stored = Stored { bytes: Bytes::Came(index as u32, len as u32), meta };
        let ticket = self.push(State::Waiting, stored, Some(walk), lane);
        self.came.push(ticket);
        ticket
    }

    /// The burst goes: what still waits is copied out of it.
    pub fn keep<'a>(&mut self, burst: impl Fn(usize) -> &'a [u8]) {
        let mut came = std::mem::take(&mut self.came);
        for ticket in came.drain(..) {
            let Self { entries, spare, .. } = self;
            if let Some(entry) = entry_mut(entries, ticket)
                && let Bytes::Came(index, _) = entry.stored.bytes
            {
                let mut buffer = spare.pop().unwrap_or_default();
                buffer.extend_from_slice(burst(index as usize));
                entry.stored.bytes = Bytes::Own(buffer);
            }
        }
        self.came = came;
    }

    /// Adds a packet that passed, behind those that wait.
    pub fn push_passed(&mut self, bytes: &[u8], meta: M, lane: u16) {
        let stored = self.store(bytes, meta);
        let ticket = self.push(State::Passed, stored, None, lane);
        self.note(ticket);
    }

    /// The waiting packet of `ticket` and its walk; `None` when it is not waiting (any more).
    pub fn waiting_mut(&mut self, ticket: Ticket) -> Option<(&mut Stored<M>, &mut W)> {
        let Entry { stored, walk, .. } = self.waiting_entry(ticket)?;
        Some((stored, walk.as_mut()?))
    }

    /// Decides that the waiting packet of `ticket` passes. Does nothing when it is not waiting.
    pub fn pass(&mut self, ticket: Ticket) {
        let Some(entry) = self.waiting_entry(ticket) else { return };
        entry.state = State::Passed;
        self.waiting -= 1;
        self.note(ticket);
    }

    /// Decides that the waiting packet of `ticket` does not pass. Does nothing when it is not waiting.
    pub fn discard(&mut self, ticket: Ticket) {
        let Some(entry) = self.waiting_entry(ticket) else { return };
        entry.state = State::Gone;
        self.waiting -= 1;
        self.reclaim(ticket.at);
        self.note(ticket);
    }

    /// Takes a waiting packet to the back of another lane: its new ticket. In its old lane it has passed nobody, and its place there
    /// counts until its turn comes, so that there may be twice as many entries as packets. `None` when it is not waiting.
    pub fn move_to(&mut self, ticket: Ticket, lane: u16) -> Option<Ticket>
    where
        M: Copy,
    {
        let entry = self.waiting_entry(ticket)?;
        entry.state = State::Gone;
        let (bytes, walk) = (std::mem::take(&mut entry.stored.bytes), entry.walk.take());
        let stored = Stored { bytes, meta: entry.stored.meta };
        self.note(ticket);
        let lent = matches!(stored.bytes, Bytes::Came(..));
        let ticket = self.push(State::Waiting, stored, walk, lane);
        if lent {
            self.came.push(ticket);
        }
        Some(ticket)
    }

    /// Puts other bytes in the place of a waiting packet's. Does nothing when it is not waiting.
    pub fn replace(&mut self, ticket: Ticket, bytes: &[u8]) {
        let Some((stored, _)) = self.waiting_mut(ticket) else { return };
        let before = stored.bytes.len();
        match &mut stored.bytes {
            Bytes::Own(own) => {
                own.clear();
                own.extend_from_slice(bytes);
            }
            lent => *lent = Bytes::Own(bytes.to_vec()),
        }
        self.bytes = self.bytes - before + bytes.len();
    }

    /// Gives the decided packets at the front of their lanes to `out`, up to the first that waits. After an error of `out`
    /// the packet that failed is gone and the rest is still here.
    pub fn flush<E>(&mut self, mut out: impl FnMut(&Stored<M>) -> Result<(), E>) -> Result<(), E> {
        while let Some(&lane) = self.ready.last() {
            let at = self.lanes[usize::from(lane)].front;
            let Some(entry) = self.entries.get(at as usize) else {
                self.ready.pop();
                continue;
            };
            match entry.state {
                State::Waiting => {
                    self.turns.push(Ticket { generation: entry.generation, at });
                    self.ready.pop();
                }
                State::Passed => {
                    let sent = out(&entry.stored);
                    self.reclaim(at);
                    self.unlink(lane, at);
                    sent?;
                }
                State::Gone | State::Free => self.unlink(lane, at),
            }
        }
        Ok(())
    }

    /// A packet that waits and has come to the front of its lane since this was asked.
    pub fn take_turn(&mut self) -> Option<Ticket> {
        self.turns.pop()
    }

    /// Forgets whose turn it is.
    pub fn clear_turns(&mut self) {
        self.turns.clear();
    }

    fn waiting_entry(&mut self, ticket: Ticket) -> Option<&mut Entry<M, W>> {
        entry_mut(&mut self.entries, ticket).filter(|entry| entry.state == State::Waiting)
    }

    fn push(&mut self, state: State, stored: Stored<M>, walk: Option<W>, lane: u16) -> Ticket {
        self.packets += 1;
        let at = match self.free {
            NONE => {
                self.entries.push(Entry { state, generation: 0, lane, next: NONE, stored, walk });
                (self.entries.len() - 1) as u32
            }
            at => {
                let entry = &mut self.entries[at as usize];
                self.free = entry.next;
                *entry = Entry { state, generation: entry.generation, lane, next: NONE, stored, walk };
                at
            }
        };
        let ends = &mut self.lanes[usize::from(lane)];
        match std::mem::replace(&mut ends.back, at) {
            NONE => ends.front = at,
            back => self.entries[back as usize].next = at,
        }
        Ticket { generation: self.entries[at as usize].generation, at }
    }

    /// The packet of `ticket` was decided: its lane may have something to give.
    fn note(&mut self, ticket: Ticket) {
        let lane = self.entries[ticket.at as usize].lane;
        if self.lanes[usize::from(lane)].front == ticket.at {
            self.ready.push(lane);
        }
    }

    /// Takes the front of a lane out of it.
    fn unlink(&mut self, lane: u16, at: u32) {
        self.packets -= 1;
        let entry = &mut self.entries[at as usize];
        let next = std::mem::replace(&mut entry.next, self.free);
        entry.state = State::Free;
        // Tickets of what was here before find nothing.
        entry.generation = entry.generation.wrapping_add(1);
        self.free = at;
        let ends = &mut self.lanes[usize::from(lane)];
        ends.front = next;
        if next == NONE {
            ends.back = NONE;
        }
    }

    fn store(&mut self, bytes: &[u8], meta: M) -> Stored<M> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.extend_from_slice(bytes);
        self.bytes += bytes.len();
        Stored { bytes: Bytes::Own(buffer), meta }
    }

    /// Takes the bytes of the entry at `at` back.
    fn reclaim(&mut self, at: u32) {
        let bytes = std::mem::take(&mut self.entries[at as usize].stored.bytes);
        // A replaced payload may have another length than the one that was counted in: `replace` keeps the sum.
        self.bytes -= bytes.len();
        let Bytes::Own(mut buffer) = bytes else { return };
        buffer.clear();
        // A jumbo's buffer is not kept, nor more of them than packets ever waited at a time (what came lent was none of them): the
        // spares stay within the window's own bound.
        if buffer.capacity() <= KEEP && self.spare.len() < self.entries.len() {
            self.spare.push(buffer);
        }
    }
}

#[inline]
fn entry_mut<M, W>(entries: &mut [Entry<M, W>], ticket: Ticket) -> Option<&mut Entry<M, W>> {
    entries.get_mut(ticket.at as usize).filter(|entry| entry.generation == ticket.generation)
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
        let mut window = Window::new(1, 16, 1000);
        let a = window.push_waiting(b"a", 1, (), 0);
        window.push_passed(b"b", 2, 0);
        let c = window.push_waiting(b"c", 3, (), 0);
        window.push_passed(b"d", 4, 0);
        assert!(flushed(&mut window).is_empty());
        window.discard(c);
        assert!(flushed(&mut window).is_empty());
        window.pass(a);
        assert_eq!(flushed(&mut window), [1, 2, 4]);
        assert!(window.is_empty());
        assert_eq!(window.bytes, 0);
    }

    #[test]
    fn lanes_do_not_wait_for_each_other_and_say_whose_turn_it_is() {
        let mut window = Window::new(2, 16, 1000);
        let a = window.push_waiting(b"a", 1, (), 0);
        let b = window.push_waiting(b"b", 2, (), 1);
        let c = window.push_waiting(b"c", 3, (), 1);
        assert!(!window.is_clear(0) && !window.is_clear(1));
        window.pass(b);
        assert_eq!(flushed(&mut window), [2]);
        assert_eq!((window.take_turn(), window.take_turn()), (Some(c), None));
        window.pass(a);
        assert_eq!(flushed(&mut window), [1]);
        assert!(window.is_clear(0) && !window.is_clear(1));
        assert_eq!(window.take_turn(), None);
    }

    #[test]
    fn a_packet_that_goes_to_another_lane_is_the_last_one_there() {
        let mut window = Window::new(2, 16, 1000);
        let a = window.push_waiting(b"a", 1, (), 0);
        let b = window.push_waiting(b"b", 2, (), 0);
        let c = window.push_waiting(b"c", 3, (), 1);
        let moved = window.move_to(a, 1).unwrap();
        assert_eq!(window.move_to(a, 1), None);
        assert_eq!(flushed(&mut window), [0; 0]);
        assert_eq!((window.take_turn(), window.waiting()), (Some(b), 3));
        window.pass(moved);
        window.pass(b);
        assert_eq!(flushed(&mut window), [2]);
        window.pass(c);
        assert_eq!(flushed(&mut window), [3, 1]);
        assert_eq!((window.is_empty(), window.bytes), (true, 0));
    }

    #[test]
    fn a_second_verdict_changes_nothing() {
        let mut window = Window::<u32, ()>::new(1, 16, 1000);
        let a = window.push_waiting(b"a", 1, (), 0);
        window.pass(a);
        window.discard(a);
        window.pass(a);
        assert_eq!(flushed(&mut window), [1]);
        let b = window.push_waiting(b"b", 2, (), 0);
        assert_ne!(a, b);
        window.discard(a);
        window.replace(a, b"x");
        assert_eq!(window.waiting(), 1);
    }

    #[test]
    fn what_was_decided_in_time_is_not_copied_and_the_rest_is_before_its_burst_goes() {
        let burst: [&[u8]; 4] = [b"zero", b"one", b"two", b"three"];
        let mut window = Window::<u32, ()>::new(1, 16, 100);
        let tickets: Vec<_> = burst
            .iter()
            .enumerate()
            .map(|(at, frame)| window.push_lent(at, frame.len(), at as u32, (), 0))
            .collect();
        assert_eq!(window.bytes, 15);
        let out = |window: &mut Window<u32, ()>| {
            let mut out = Vec::new();
            window
                .flush(|stored| {
                    out.push((stored.came(), stored.bytes(|at| burst[at]).to_vec()));
                    Ok::<(), ()>(())
                })
                .unwrap();
            out
        };
        window.pass(tickets[0]);
        window.replace(tickets[1], b"another");
        let (stored, _) = window.waiting_mut(tickets[2]).unwrap();
        stored.parts_mut(|at| burst[at]).0[0] = b'T';
        assert_eq!(out(&mut window), [(Some(0), b"zero".to_vec())]);
        window.keep(|at| burst[at]);
        tickets[1..].iter().for_each(|ticket| window.pass(*ticket));
        let rest: [&[u8]; 3] = [b"another", b"Two", b"three"];
        assert_eq!(out(&mut window), rest.map(|bytes| (None, bytes.to_vec())));
        assert_eq!(window.bytes, 0);
    }

    #[test]
    fn bounds_count_packets_and_bytes() {
        let mut window = Window::<u32, ()>::new(1, 2, 10);
        let a = window.push_waiting(&[0; 4], 1, (), 0);
        assert!(window.has_room());
        window.replace(a, &[0; 10]);
        assert!(!window.has_room());
        window.replace(a, &[0; 1]);
        assert!(window.has_room());
        window.push_passed(&[0; 1], 2, 0);
        assert!(!window.has_room());
    }

    proptest! {
        /// Against a plain list for each lane: what leaves is what passed, in order, and nothing that still waits is
        /// overtaken.
        #[test]
        fn agrees_with_lists(ops in proptest::collection::vec((0u8..4, 0usize..8, 0u16..3), 1..200)) {
            let mut window = Window::<u32, ()>::new(3, usize::MAX, usize::MAX);
            /// A packet, what was decided about it, and its ticket when it waited.
            type Row = (u32, Option<bool>, Option<Ticket>);
            let mut lists: [Vec<Row>; 3] = Default::default();
            let mut id = 0;
            for (op, pick, lane) in ops {
                let list = &mut lists[usize::from(lane)];
                match op {
                    0 => {
                        list.push((id, None, Some(window.push_waiting(&id.to_le_bytes(), id, (), lane))));
                        id += 1;
                    }
                    1 if !window.is_clear(lane) => {
                        window.push_passed(&[], id, lane);
                        list.push((id, Some(true), None));
                        id += 1;
                    }
                    _ => {
                        let open: Vec<_> = (0..list.len()).filter(|&i| list[i].1.is_none()).collect();
                        if !open.is_empty() {
                            let i = open[pick % open.len()];
                            list[i].1 = Some(op == 2);
                            let ticket = list[i].2.expect("it waits");
                            if op == 2 { window.pass(ticket) } else { window.discard(ticket) }
                        }
                    }
                }
                // Every lane but this one had nothing to give.
                let decided = list.iter().take_while(|(_, fate, _)| fate.is_some()).count();
                let expected: Vec<_> =
                    list.drain(..decided).filter(|(_, fate, _)| *fate == Some(true)).map(|(id, _, _)| id).collect();
                prop_assert_eq!(flushed(&mut window), expected);
                prop_assert_eq!(window.is_clear(lane), lists[usize::from(lane)].is_empty());
                let waiting = lists.iter().flatten().filter(|(_, fate, _)| fate.is_none()).count();
                prop_assert_eq!(window.waiting(), waiting);
            }
        }
    }
}
