//! Frames of a producer: which are free, which are lent, and in which order.
//!
//! What: the frames form a circle. A message takes adjacent frames; the index of its first frame names it. The
//! outstanding messages form a list in the order of the circle. `position` is where the next message goes, and
//! `ahead` is the first message at or after it. A message that its consumer holds is *skipped*: the producer places
//! later messages after it. The producer does not skip a message that is only outstanding: it will be released in its
//! turn, and skipping it would scatter the free frames.
//!
//! ```text
//!        released     out, in order of publication    position   skipped
//!   |....................[3][4  ][5][6     ]..............^........[1 ]....|
//!                        ^ in sequence                             ^ ahead
//! ```
//!
//! Invariants:
//! - a frame belongs to at most one outstanding message; free frames belong to none;
//! - `in_sequence` maps each number from `oldest` up to `next` to its message, unless that was released or is skipped.
//!   The consumer has therefore seen every number that is no longer in sequence, and needs its note no longer;
//! - published = released + in sequence + skipped.
//!
//! All state is private: the peer's words are compared with it and never stored in it.

use crate::shm::seq::Seq;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// In sequence, undecided.
    Lent,
    /// In sequence, decided by default; the consumer still has the memory.
    Overdue,
    /// Skipped, undecided.
    Held,
    /// Skipped, decided by default; the consumer still has the memory.
    Expired,
}

#[derive(Clone, Copy, Debug)]
struct Message {
    seq: Seq,
    state: State,
    frames: u32,
    /// Neighbours in the circle, by first frame.
    prev: u32,
    next: u32,
    /// Index in `skipped`.
    place: u32,
}

/// Space for a message: found by [`Frames::room`], taken by [`Frames::publish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Where the consumer looks for the message.
    pub(crate) from: u32,
    /// Where the message is; differs from `from` if the producer skipped held messages.
    pub(crate) at: u32,
    ahead: u32,
}

/// Why there is no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Larger than the area.
    TooLarge,
    /// Outstanding messages are in the way; they will be released.
    RingFull,
    /// Held messages leave no contiguous space that is large enough.
    NoContiguousSpace,
}

#[derive(Debug)]
pub(crate) struct Frames {
    messages: Box<[Message]>,
    position: u32,
    ahead: u32,
    next: Seq,
    oldest: Seq,
    in_sequence: Box<[u32]>,
    lent: u32,
    skipped: Vec<u32>,
    held: u32,
    /// Frames that belong to a message.
    used: u32,
}

impl Frames {
    /// `first` is the sequence number of the first message.
    pub(crate) fn new(frame_nr: u32, first: Seq) -> Self {
        let free =
            Message { seq: Seq(0), state: State::Free, frames: 0, prev: NONE, next: NONE, place: NONE };
        Self {
            messages: vec![free; frame_nr as usize].into(),
            position: 0,
            ahead: NONE,
            next: first,
            oldest: first,
            in_sequence: vec![NONE; frame_nr.next_power_of_two() as usize].into(),
            lent: 0,
            skipped: Vec::new(),
            held: 0,
            used: 0,
        }
    }

    /// Returns true if `in_sequence` has space for another number.
    fn has_number(&self) -> bool {
        (self.next.since(self.oldest) as usize) < self.in_sequence.len()
    }

    /// Sequence number of the next message.
    pub(crate) fn next_seq(&self) -> Seq {
        self.next
    }

    /// Oldest number that may still be in sequence.
    pub(crate) fn oldest(&self) -> Seq {
        self.oldest
    }

    /// Number of free frames.
    pub(crate) fn free(&self) -> u32 {
        self.frame_nr() - self.used
    }

    /// Number of frames.
    pub(crate) fn frame_nr(&self) -> u32 {
        self.messages.len() as u32
    }

    /// Undecided messages in sequence.
    pub(crate) fn lent(&self) -> u32 {
        self.lent
    }

    /// Held messages: skipped and undecided.
    pub(crate) fn held(&self) -> u32 {
        self.held
    }

    /// First frames of the skipped messages, held or expired.
    pub(crate) fn skipped(&self) -> &[u32] {
        &self.skipped
    }

    /// All outstanding messages, in the order of the circle from `position` on: sequence number, first frame,
    /// frames, whether it is skipped, whether it was decided by default.
    pub(crate) fn out(&self) -> impl Iterator<Item = (Seq, u32, u32, bool, bool)> {
        let (mut at, mut left) = (self.ahead, self.messages_out());
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let message = &self.messages[at as usize];
            let row = (message.seq, at, message.frames, self.is_skipped(at), self.is_expired(at));
            at = message.next;
            Some(row)
        })
    }

    fn messages_out(&self) -> usize {
        let (mut seq, mut count) = (self.oldest, self.skipped.len());
        while seq != self.next {
            count += usize::from(self.in_sequence[self.sequence_index(seq)] != NONE);
            seq = seq.next();
        }
        count
    }

    /// Frame of the next message, unless a message is in the way.
    pub(crate) fn position(&self) -> u32 {
        self.position
    }

    /// The frame two messages of `frames` frames after the next message.
    pub(crate) fn ahead(&self, frames: u32) -> u32 {
        self.forward(self.forward(self.position, frames), frames)
    }

    /// Finds `frames` adjacent free frames.
    #[inline]
    pub(crate) fn room(&self, frames: u32) -> Result<Room, NoRoom> {
        let all = self.frame_nr();
        if frames > all {
            return Err(NoRoom::TooLarge);
        }
        if !self.has_number() {
            return Err(NoRoom::RingFull);
        }
        let (mut at, mut ahead, mut gone) = (self.position, self.ahead, 0);
        loop {
            if ahead == NONE {
                return Ok(Room { from: self.position, at, ahead });
            }
            let gap = self.distance(at, ahead);
            if frames <= gap {
                return Ok(Room { from: self.position, at, ahead });
            }
            let blocking = &self.messages[ahead as usize];
            if matches!(blocking.state, State::Lent | State::Overdue) {
                return Err(NoRoom::RingFull);
            }
            gone += gap + blocking.frames;
            if gone >= all {
                return Err(NoRoom::NoContiguousSpace);
            }
            at = self.forward(ahead, blocking.frames);
            ahead = blocking.next;
        }
    }

    /// Takes the space and assigns the sequence number. `frames` is at most what the space was found for.
    #[inline]
    pub(crate) fn publish(&mut self, room: Room, frames: u32) -> Seq {
        let Room { at, ahead, .. } = room;
        debug_assert_eq!(self.messages[at as usize].state, State::Free);
        let seq = self.next;
        let (prev, next) = if ahead == NONE { (at, at) } else { (self.messages[ahead as usize].prev, ahead) };
        self.messages[at as usize] = Message { seq, state: State::Lent, frames, prev, next, place: NONE };
        self.messages[prev as usize].next = at;
        self.messages[next as usize].prev = at;
        self.position = self.forward(at, frames);
        // The list is circular: a single message is both before and after the position.
        self.ahead = next;
        let index = self.sequence_index(seq);
        self.in_sequence[index] = at;
        self.next = seq.next();
        self.lent += 1;
        self.used += frames;
        seq
    }

    /// First frame of message `seq`, if it is in sequence (decided or not).
    #[inline]
    pub(crate) fn find(&self, seq: Seq) -> Option<u32> {
        if seq.since(self.oldest) >= self.next.since(self.oldest) {
            return None;
        }
        Some(self.in_sequence[self.sequence_index(seq)]).filter(|at| *at != NONE)
    }

    /// Sequence number of the outstanding message at `at`.
    pub(crate) fn seq_at(&self, at: u32) -> Seq {
        self.messages[at as usize].seq
    }

    /// Returns true if the message at `at` was decided by default.
    pub(crate) fn is_expired(&self, at: u32) -> bool {
        matches!(self.messages[at as usize].state, State::Overdue | State::Expired)
    }

    /// Releases the message at `at`.
    #[inline]
    pub(crate) fn release(&mut self, at: u32) {
        self.leave(at);
        let Message { prev, next, frames, .. } = self.messages[at as usize];
        self.used -= frames;
        if next == at {
            self.ahead = NONE;
        } else {
            self.messages[prev as usize].next = next;
            self.messages[next as usize].prev = prev;
            if self.ahead == at {
                self.ahead = next;
            }
        }
        self.messages[at as usize].state = State::Free;
    }

    /// Marks the message at `at`, which is in sequence, as held: the producer skips it.
    pub(crate) fn hold(&mut self, at: u32) {
        let overdue = self.is_expired(at);
        self.leave(at);
        self.skip(at, if overdue { State::Expired } else { State::Held });
        self.held += u32::from(!overdue);
    }

    /// Returns true if the message at `at` is skipped.
    pub(crate) fn is_skipped(&self, at: u32) -> bool {
        matches!(self.messages[at as usize].state, State::Held | State::Expired)
    }

    /// Marks the undecided message at `at` as decided by default. The consumer still has its memory.
    pub(crate) fn expire(&mut self, at: u32) {
        let message = &mut self.messages[at as usize];
        match message.state {
            State::Lent => {
                message.state = State::Overdue;
                self.lent -= 1;
            }
            State::Held => {
                message.state = State::Expired;
                self.held -= 1;
            }
            State::Free | State::Overdue | State::Expired => unreachable!("frame {at} is not undecided"),
        }
    }

    /// Removes the message from `in_sequence` or from `skipped`.
    #[inline]
    fn leave(&mut self, at: u32) {
        let Message { seq, state, place, .. } = self.messages[at as usize];
        match state {
            State::Free => unreachable!("frame {at} is not out"),
            State::Lent | State::Overdue => {
                let index = self.sequence_index(seq);
                self.in_sequence[index] = NONE;
                self.lent -= u32::from(state == State::Lent);
                self.advance();
            }
            State::Held | State::Expired => {
                self.skipped.swap_remove(place as usize);
                if let Some(moved) = self.skipped.get(place as usize) {
                    self.messages[*moved as usize].place = place;
                }
                self.held -= u32::from(state == State::Held);
            }
        }
    }

    fn skip(&mut self, at: u32, state: State) {
        self.messages[at as usize].state = state;
        self.messages[at as usize].place = self.skipped.len() as u32;
        self.skipped.push(at);
    }

    /// Moves `oldest` to the oldest message in sequence.
    #[inline]
    fn advance(&mut self) {
        while self.oldest != self.next && self.in_sequence[self.sequence_index(self.oldest)] == NONE {
            self.oldest = self.oldest.next();
        }
    }

    fn sequence_index(&self, seq: Seq) -> usize {
        seq.0 as usize & (self.in_sequence.len() - 1)
    }

    fn forward(&self, at: u32, frames: u32) -> u32 {
        let to = at + frames;
        if to >= self.frame_nr() { to - self.frame_nr() } else { to }
    }

    /// Free frames from `at` to the message at `ahead`.
    fn distance(&self, at: u32, ahead: u32) -> u32 {
        if ahead >= at { ahead - at } else { ahead + self.frame_nr() - at }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Publish { frames: u32, used: u32 },
        Release(usize),
        Hold(usize),
        Expire(usize),
    }

    fn op(frame_nr: u32) -> impl Strategy<Value = Op> {
        let index = any::<usize>();
        prop_oneof![
            4 => (1..=frame_nr + 1).prop_flat_map(|frames| (Just(frames), 1..=frames))
                .prop_map(|(frames, used)| Op::Publish { frames, used }),
            4 => (1..=2u32).prop_map(|frames| Op::Publish { frames, used: frames }),
            3 => Just(Op::Release(0)),
            2 => index.prop_map(Op::Release),
            1 => index.prop_map(Op::Hold),
            1 => index.prop_map(Op::Expire),
        ]
    }

    /// The oracle: a plain list of the outstanding messages, oldest first.
    #[derive(Default)]
    struct Oracle {
        out: VecDeque<(Seq, u32, u32, State)>,
        position: u32,
    }

    impl Oracle {
        fn taken(&self, frame_nr: u32) -> Vec<bool> {
            let mut taken = vec![false; frame_nr as usize];
            for (_, at, frames, _) in &self.out {
                for i in 0..*frames {
                    let frame = ((at + i) % frame_nr) as usize;
                    assert!(!taken[frame], "frame {frame} is lent twice");
                    taken[frame] = true;
                }
            }
            taken
        }

        /// The first place from the position on, not beyond a message that is merely lent.
        fn room(&self, frames: u32, frame_nr: u32) -> Option<u32> {
            let taken = self.taken(frame_nr);
            let lent = |frame: u32| {
                self.out.iter().any(|(_, at, n, s)| {
                    matches!(s, State::Lent | State::Overdue) && (frame + frame_nr - at) % frame_nr < *n
                })
            };
            for skip in 0..frame_nr {
                let at = (self.position + skip) % frame_nr;
                if frames <= frame_nr && (0..frames).all(|i| !taken[((at + i) % frame_nr) as usize]) {
                    return Some(at);
                }
                if lent(at) {
                    return None;
                }
            }
            None
        }
    }

    fn run(frame_nr: u32, first: Seq, ops: Vec<Op>) {
        let mut frames = Frames::new(frame_nr, first);
        let mut oracle = Oracle::default();
        let mut next = first;
        for op in ops {
            match op {
                Op::Publish { frames: n, used } => {
                    let full = frames.next.since(frames.oldest) as usize >= frames.in_sequence.len();
                    let room = frames.room(n);
                    if full {
                        assert!(room.is_err());
                    } else {
                        assert_eq!(room.ok().map(|r| r.at), oracle.room(n, frame_nr), "{n} frames");
                    }
                    let Ok(room) = room else { continue };
                    assert_eq!(room.from, oracle.position);
                    assert_eq!(frames.publish(room, used), next);
                    oracle.out.push_back((next, room.at, used, State::Lent));
                    oracle.position = (room.at + used) % frame_nr;
                    next = next.next();
                }
                Op::Release(i) if !oracle.out.is_empty() => {
                    let (_, at, ..) = oracle.out.remove(i % oracle.out.len()).unwrap();
                    frames.release(at);
                }
                Op::Hold(i) | Op::Expire(i) if !oracle.out.is_empty() => {
                    let i = i % oracle.out.len();
                    let (_, at, _, state) = &mut oracle.out[i];
                    match (&op, *state) {
                        (Op::Hold(_), State::Lent) => {
                            frames.hold(*at);
                            *state = State::Held;
                        }
                        (Op::Hold(_), State::Overdue) => {
                            frames.hold(*at);
                            *state = State::Expired;
                        }
                        (Op::Expire(_), State::Lent) => {
                            frames.expire(*at);
                            *state = State::Overdue;
                        }
                        (Op::Expire(_), State::Held) => {
                            frames.expire(*at);
                            *state = State::Expired;
                        }
                        _ => {}
                    }
                }
                _ => {}
            }
            let used = oracle.taken(frame_nr).iter().filter(|t| **t).count();
            assert_eq!(frames.free() as usize, frame_nr as usize - used);
            let count = |s| oracle.out.iter().filter(|o| o.3 == s).count();
            assert_eq!(frames.lent() as usize, count(State::Lent));
            assert_eq!(frames.held() as usize, count(State::Held));
            assert_eq!(frames.skipped().len(), count(State::Held) + count(State::Expired));
            for (seq, at, _, state) in &oracle.out {
                let skipped = matches!(state, State::Held | State::Expired);
                assert_eq!(frames.find(*seq), (!skipped).then_some(*at));
                assert_eq!(frames.is_skipped(*at), skipped);
                assert_eq!(frames.seq_at(*at), *seq);
                assert_eq!(frames.is_expired(*at), matches!(state, State::Overdue | State::Expired));
            }
            assert_eq!(frames.find(next), None);
            let mut listed: Vec<_> = frames.out().map(|(seq, at, n, ..)| (seq.0, at, n)).collect();
            let mut out: Vec<_> = oracle.out.iter().map(|(seq, at, n, _)| (seq.0, *at, *n)).collect();
            listed.sort_unstable();
            out.sort_unstable();
            assert_eq!(listed, out);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn frames_agree_with_a_queue(
            (frame_nr, ops) in (1..=12u32).prop_flat_map(|n| (Just(n), prop::collection::vec(op(n), 0..120))),
            first in prop_oneof![Just(1u32), Just(u32::MAX - 5)],
        ) {
            run(frame_nr, Seq(first), ops);
        }
    }

    #[test]
    fn a_held_message_costs_its_own_frames_only() {
        let mut frames = Frames::new(8, Seq::FIRST);
        let room = frames.room(2).unwrap();
        frames.publish(room, 2);
        frames.hold(0);
        for _ in 0..100 {
            let room = frames.room(3).unwrap();
            assert!(room.at >= 2 && room.at <= 5, "{room:?}");
            frames.publish(room, 3);
            frames.release(room.at);
        }
        assert_eq!(frames.room(7), Err(NoRoom::NoContiguousSpace));
        assert_eq!(frames.room(9), Err(NoRoom::TooLarge));
    }
}
