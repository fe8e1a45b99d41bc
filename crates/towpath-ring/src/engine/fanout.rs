//! A queue with several listeners: which listener gets a frame, and the overload policy.
//!
//! Invariant: every offered frame is accounted for: sent, lost by the policy, returned to the caller with a verdict
//! or to be retried, or in the backlog. A lost frame is reported to its listener in the header of the next frame.

use std::collections::VecDeque;

use towpath_metrics::metrics;

use crate::engine::channel::Channel;
use crate::lane::loss_record::Loss;
use crate::lane::reserve_error::ReserveError;
use crate::lane::verdict::Verdict;
use crate::shm::header::Meta;
use crate::shm::seq::Seq;

/// Selection of the listener for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fanout {
    /// The first listener. The others are standby.
    Exclusive,
    /// One listener per flow, by [`Meta::hash`]. A flow moves only if its listener leaves, or to a listener that
    /// joins.
    FlowHash,
    /// One listener per CPU.
    Cpu,
    /// The listener with the fewest outstanding frames.
    LeastLoaded,
    /// Every listener; each has a copy and gives a verdict. With [`Overload::Block`], no listener gets a frame while
    /// one is above its marks. Set the marks below the capacity of the rings: a full ring loses that listener's
    /// copy, which is counted and reported to the listener.
    Broadcast,
    /// Every listener that has space. The queue never waits for a listener, and the verdicts have no effect.
    Mirror,
}

/// Policy for a frame whose listener has no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overload {
    /// The caller retries: back-pressure.
    Block,
    /// This frame is lost.
    DropNewest,
    /// The frame enters a backlog of this many frames; a full backlog loses its oldest frame.
    DropOldest(usize),
    /// The frame passes without inspection: fail open.
    Pass,
    /// The frame is dropped: fail closed.
    Drop,
    /// The frame goes to this queue.
    Queue(u16),
}

impl Overload {
    /// Returns true if a frame is kept or offered again until there is space. Otherwise its verdict is immediate,
    /// even for a frame that is too large.
    fn waits(self) -> bool {
        matches!(self, Self::Block | Self::DropNewest | Self::DropOldest(_))
    }
}

/// Result of [`Queue::enqueue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enqueue {
    /// Published to this listener (index into [`Queue::listeners`]) with this sequence number.
    Sent(usize, Seq),
    /// Published to this many listeners ([`Fanout::Broadcast`], [`Fanout::Mirror`]).
    SentTo(usize),
    /// In the backlog.
    Backlogged,
    /// No space, and the policy is [`Overload::Block`]: enqueue the frame again later.
    Blocked,
    /// Lost by [`Overload::DropNewest`], or larger than the largest message of the listener ([`Loss::TooLarge`]):
    /// waiting for space would never end.
    Lost,
    /// The policy's verdict: [`Overload::Pass`], [`Overload::Drop`] or [`Overload::Queue`].
    Verdict(Verdict<'static>),
    /// The queue has no listener.
    NoListener,
}

/// A listener of a queue: a [`Channel`], or a test double.
pub trait Listener {
    /// Publishes a frame.
    ///
    /// # Errors
    /// [`ReserveError`]: the ring has no space.
    fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, ReserveError>;
    /// Number of outstanding frames.
    fn depth(&self) -> u32;
    /// Counts a loss and reports it with the next frame.
    fn lose(&mut self, loss: Loss);
    /// Returns true if the listener has disconnected.
    fn is_dead(&self) -> bool;
    /// Returns true if the listener does not answer: other listeners get its frames. [`Fanout::Broadcast`] and
    /// [`Fanout::Mirror`] do not ask.
    fn is_stalled(&self) -> bool {
        false
    }
    /// The queue selected the listener for a frame, and it has no space.
    fn refused(&mut self) {}
}

impl Listener for Channel {
    fn send(&mut self, bytes: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        self.send(bytes, meta)
    }

    fn depth(&self) -> u32 {
        self.held()
    }

    fn lose(&mut self, loss: Loss) {
        self.lose(loss);
    }

    fn is_dead(&self) -> bool {
        self.is_dead()
    }
}

/// Behaviour of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Selection of the listener. The default is [`Fanout::Exclusive`].
    pub fanout: Fanout,
    /// Policy for a frame without space. The default is [`Overload::Drop`].
    pub overload: Overload,
    /// High mark: a listener with this many outstanding frames is overloaded. By default there is no mark: overloaded if
    /// the ring is full.
    pub high: u32,
    /// Low mark: the listener is overloaded until it has this many frames or fewer.
    pub low: u32,
}

impl Default for Policy {
    /// Exclusive, fail closed, overloaded only if the ring is full.
    fn default() -> Self {
        Self { fanout: Fanout::Exclusive, overload: Overload::Drop, high: u32::MAX, low: u32::MAX }
    }
}

metrics! {
    /// A queue and its listeners. See [`Policy`].
    pub struct QueueStats in "fanout" {
        /// Frames offered. A frame offered again after [`Enqueue::Blocked`] counts again.
        pub offered: counter frames,
        /// Frames published to one or several listeners.
        pub sent: counter frames,
        /// Copies of broadcast or mirrored frames that one listener lost.
        pub copies_lost: counter frames,
        /// Frames returned with [`Enqueue::Blocked`].
        pub blocked: counter frames,
        /// Frames lost by [`Overload::DropNewest`] or [`Overload::DropOldest`], or because they are too large.
        pub lost: counter frames,
        /// Frames passed without inspection.
        pub passed: counter frames,
        /// Frames dropped without inspection.
        pub dropped: counter frames,
        /// Frames sent to another queue.
        pub handed_on: counter frames,
        /// Frames offered while the queue had no listener.
        pub no_listener: counter frames,
        /// Frames in the backlog.
        pub backlog: gauge frames,
        /// Times that a listener reached the high mark.
        pub overloads: counter events,
        /// Times that a standby listener took over from one that disconnected or stalled.
        pub takeovers: counter events,
    }
}

#[derive(Debug)]
struct Member<L> {
    /// Unique for the lifetime of the queue. Rendezvous hashing assigns flows by it.
    id: u32,
    listener: L,
    overloaded: bool,
    /// Gets no frames until it takes over from another one.
    standby: bool,
}

impl<L: Listener> Member<L> {
    fn is_in_use(&self) -> bool {
        !self.standby && !self.listener.is_dead()
    }

    fn is_usable(&self) -> bool {
        self.is_in_use() && !self.listener.is_stalled()
    }
}

/// A queue and its listeners. See [`Policy`].
#[derive(Debug)]
pub struct Queue<L> {
    members: Vec<Member<L>>,
    /// A listener is or was on standby.
    standby: bool,
    next_id: u32,
    policy: Policy,
    backlog: VecDeque<(Meta, u32, Box<[u8]>)>,
    stats: QueueStats,
}

impl<L: Listener> Queue<L> {
    /// Creates a queue without listeners.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self {
            members: Vec::new(),
            standby: false,
            next_id: 0,
            policy,
            backlog: VecDeque::new(),
            stats: QueueStats::default(),
        }
    }

    /// Adds a listener.
    pub fn join(&mut self, listener: L) {
        // With listeners on standby, the number of those in use stays the same: the new one replaces a disconnected one.
        let vacant = |m: &&mut Member<L>| self.standby && !m.standby && m.listener.is_dead();
        let mut id = self.next_id;
        if let Some(member) = self.members.iter_mut().find(vacant) {
            std::mem::swap(&mut member.id, &mut id);
            member.standby = true;
        }
        self.members.push(Member { id, listener, overloaded: false, standby: false });
        self.next_id = self.next_id.wrapping_add(1);
    }

    /// Adds a listener on standby. It gets no frames until another listener disconnects or stalls. It then takes over the
    /// flows of that one; no other flow moves.
    pub fn join_standby(&mut self, listener: L) {
        self.standby = true;
        self.members.push(Member { id: self.next_id, listener, overloaded: false, standby: true });
        self.next_id = self.next_id.wrapping_add(1);
    }

    /// Removes and returns the disconnected listeners, so that the caller decides their frames.
    pub fn take_dead(&mut self) -> Vec<L> {
        let dead = self.members.extract_if(.., |m| m.listener.is_dead());
        dead.map(|m| m.listener).collect()
    }

    /// The listeners, for polling.
    pub fn listeners(&mut self) -> impl Iterator<Item = &mut L> {
        self.members.iter_mut().map(|m| &mut m.listener)
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        QueueStats { backlog: self.backlog.len() as u64, ..self.stats }
    }

    /// Sends a frame that was received on `cpu` to a listener, or applies the overload policy.
    pub fn enqueue(&mut self, bytes: &[u8], meta: &Meta, cpu: u32) -> Enqueue {
        self.flush();
        self.stats.offered += 1;
        if self.standby {
            self.take_over();
        }
        let to_all = matches!(self.policy.fanout, Fanout::Broadcast | Fanout::Mirror);
        let takes = |m: &Member<L>| if to_all { m.is_in_use() } else { m.is_usable() };
        if !self.members.iter().any(takes) {
            self.stats.no_listener += 1;
            return Enqueue::NoListener;
        }
        if to_all {
            return self.enqueue_all(bytes, meta);
        }
        // The backlog precedes this frame.
        if self.backlog.is_empty()
            && let Some(sent) = self.try_one(bytes, meta, cpu)
        {
            return sent;
        }
        self.overloaded(bytes, meta, cpu)
    }

    /// Sends the frames of the backlog that have space now. Frames that are too large for their listener are lost.
    pub fn flush(&mut self) {
        while let Some((meta, cpu, bytes)) = self.backlog.pop_front() {
            if self.try_one(&bytes, &meta, cpu).is_none() {
                self.backlog.push_front((meta, cpu, bytes));
                return;
            }
        }
    }

    /// Sends the frame to its listener; none if it must wait.
    fn try_one(&mut self, bytes: &[u8], meta: &Meta, cpu: u32) -> Option<Enqueue> {
        let index = self.choose(meta, cpu)?;
        if !self.has_room(index) {
            self.members[index].listener.refused();
            return None;
        }
        match self.members[index].listener.send(bytes, meta) {
            Ok(seq) => {
                self.stats.sent += 1;
                Some(Enqueue::Sent(index, seq))
            }
            // Space for this frame would never suffice, and it would block the frames after it.
            Err(ReserveError::TooLarge) if self.policy.overload.waits() => {
                self.members[index].listener.lose(Loss::TooLarge);
                self.stats.lost += 1;
                Some(Enqueue::Lost)
            }
            Err(_) => {
                self.members[index].listener.refused();
                None
            }
        }
    }

    /// Each listener that disconnected or stalled changes places with one on standby.
    fn take_over(&mut self) {
        for at in 0..self.members.len() {
            let Member { id, standby, ref listener, .. } = self.members[at];
            if standby || !listener.is_dead() && !listener.is_stalled() {
                continue;
            }
            let ready = |m: &&mut Member<L>| m.standby && !m.listener.is_dead() && !m.listener.is_stalled();
            let Some(other) = self.members.iter_mut().find(ready) else { return };
            let other_id = std::mem::replace(&mut other.id, id);
            other.standby = false;
            (self.members[at].id, self.members[at].standby) = (other_id, true);
            self.stats.takeovers += 1;
        }
    }

    fn enqueue_all(&mut self, bytes: &[u8], meta: &Meta) -> Enqueue {
        // A broadcast with `block` reaches all listeners at the same time, or waits.
        if self.policy.fanout == Fanout::Broadcast
            && self.policy.overload == Overload::Block
            && !(0..self.members.len()).all(|i| self.has_room(i) || !self.members[i].is_in_use())
        {
            self.stats.blocked += 1;
            return Enqueue::Blocked;
        }
        let (mut sent, mut later) = (0, false);
        for index in 0..self.members.len() {
            if !self.members[index].is_in_use() {
                continue;
            }
            let room = self.has_room(index);
            let listener = &mut self.members[index].listener;
            let loss = match room.then(|| listener.send(bytes, meta)) {
                Some(Ok(_)) => {
                    sent += 1;
                    continue;
                }
                Some(Err(ReserveError::TooLarge)) => Loss::TooLarge,
                Some(Err(_)) | None => Loss::NoRoom,
            };
            listener.lose(loss);
            self.stats.copies_lost += 1;
            later |= loss == Loss::NoRoom;
        }
        if sent == 0 && self.policy.fanout == Fanout::Broadcast {
            if !later && self.policy.overload.waits() {
                self.stats.lost += 1;
                return Enqueue::Lost;
            }
            return self.refuse();
        }
        self.stats.sent += 1;
        Enqueue::SentTo(sent)
    }

    fn choose(&self, meta: &Meta, cpu: u32) -> Option<usize> {
        let live = |i: &usize| self.members[*i].is_usable();
        let suits = |hash: u32, i: usize| score(hash, self.members[i].id);
        let all = 0..self.members.len();
        match self.policy.fanout {
            Fanout::Exclusive | Fanout::Broadcast | Fanout::Mirror => all.into_iter().find(live),
            // Rendezvous hashing: the listener with the highest score for this flow. If it leaves, only its flows
            // move.
            Fanout::FlowHash => all.filter(live).max_by_key(|i| suits(meta.hash, *i)),
            Fanout::Cpu => {
                all.filter(live).max_by_key(|i| (*i == cpu as usize % self.members.len(), suits(cpu, *i)))
            }
            Fanout::LeastLoaded => all.filter(live).min_by_key(|i| self.members[*i].listener.depth()),
        }
    }

    /// Returns true if the listener is below its marks.
    fn has_room(&mut self, index: usize) -> bool {
        let Policy { high, low, .. } = self.policy;
        let member = &mut self.members[index];
        let depth = member.listener.depth();
        if member.overloaded && depth <= low {
            member.overloaded = false;
        } else if !member.overloaded && depth >= high {
            member.overloaded = true;
            self.stats.overloads += 1;
        }
        !member.overloaded
    }

    fn overloaded(&mut self, bytes: &[u8], meta: &Meta, cpu: u32) -> Enqueue {
        let max = match self.policy.overload {
            Overload::DropOldest(max) if max > 0 => max,
            policy => {
                let loss = match policy {
                    Overload::Block => None,
                    Overload::DropNewest | Overload::DropOldest(_) => Some(Loss::NoRoom),
                    Overload::Pass => Some(Loss::Passed),
                    Overload::Drop => Some(Loss::Dropped),
                    Overload::Queue(_) => Some(Loss::HandedOn),
                };
                if let Some(loss) = loss {
                    self.lose(loss, meta, cpu);
                }
                return self.refuse();
            }
        };
        if self.backlog.len() >= max
            && let Some((meta, cpu, _)) = self.backlog.pop_front()
        {
            self.stats.lost += 1;
            self.lose(Loss::Oldest, &meta, cpu);
        }
        self.backlog.push_back((*meta, cpu, bytes.into()));
        Enqueue::Backlogged
    }

    /// Reports to the listener of the frame that the frame is lost; for losses that the caller decides.
    pub fn lose(&mut self, loss: Loss, meta: &Meta, cpu: u32) {
        if let Some(index) = self.choose(meta, cpu) {
            self.members[index].listener.lose(loss);
        }
    }

    /// Applies the policies that return the frame to the caller.
    fn refuse(&mut self) -> Enqueue {
        match self.policy.overload {
            Overload::Block => {
                self.stats.blocked += 1;
                Enqueue::Blocked
            }
            Overload::DropNewest | Overload::DropOldest(_) => {
                self.stats.lost += 1;
                Enqueue::Lost
            }
            Overload::Pass => {
                self.stats.passed += 1;
                Enqueue::Verdict(Verdict::Pass)
            }
            Overload::Drop => {
                self.stats.dropped += 1;
                Enqueue::Verdict(Verdict::Drop)
            }
            Overload::Queue(number) => {
                self.stats.handed_on += 1;
                Enqueue::Verdict(Verdict::Queue(number))
            }
        }
    }
}

/// Score of the listener `id` for `hash`: a mix of the two (the finaliser of MurmurHash3).
fn score(hash: u32, id: u32) -> u32 {
    let mut x = hash ^ id.wrapping_mul(0x9e37_79b9);
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Largest message of a test listener.
    const LARGEST: usize = 3;

    /// A listener with space for `room` frames.
    #[derive(Debug, Default)]
    struct Double {
        room: usize,
        out: Vec<u8>,
        lost: u64,
        last: Option<Loss>,
        dead: bool,
        stalled: bool,
        refused: u32,
        next: u32,
    }

    impl Listener for Double {
        fn send(&mut self, bytes: &[u8], _: &Meta) -> Result<Seq, ReserveError> {
            if bytes.len() > LARGEST {
                return Err(ReserveError::TooLarge);
            }
            if self.out.len() == self.room {
                return Err(ReserveError::RingFull);
            }
            self.out.push(bytes[0]);
            self.next += 1;
            Ok(Seq(self.next))
        }

        fn depth(&self) -> u32 {
            self.out.len() as u32
        }

        fn lose(&mut self, loss: Loss) {
            self.lost += 1;
            self.last = Some(loss);
        }

        fn is_dead(&self) -> bool {
            self.dead
        }

        fn is_stalled(&self) -> bool {
            self.stalled
        }

        fn refused(&mut self) {
            self.refused += 1;
        }
    }

    fn queue(policy: Policy, listeners: usize, room: usize) -> Queue<Double> {
        let mut queue = Queue::new(policy);
        for _ in 0..listeners {
            queue.join(Double { room, ..Double::default() });
        }
        queue
    }

    fn with(fanout: Fanout, overload: Overload) -> Policy {
        Policy { fanout, overload, ..Policy::default() }
    }

    fn hash(hash: u32) -> Meta {
        Meta { hash, ..Meta::default() }
    }

    #[test]
    fn each_overload_policy_with_room_for_two_frames() {
        // Policy, result for the third frame, losses reported after the fourth, frames after space for one more.
        for (overload, third, told, out) in [
            (Overload::Block, Enqueue::Blocked, (0, None), vec![1, 2, 5]),
            (Overload::DropNewest, Enqueue::Lost, (2, Some(Loss::NoRoom)), vec![1, 2, 5]),
            (Overload::DropOldest(1), Enqueue::Backlogged, (1, Some(Loss::Oldest)), vec![1, 2, 4]),
            (Overload::DropOldest(0), Enqueue::Lost, (2, Some(Loss::NoRoom)), vec![1, 2, 5]),
            (Overload::Pass, Enqueue::Verdict(Verdict::Pass), (2, Some(Loss::Passed)), vec![1, 2, 5]),
            (Overload::Drop, Enqueue::Verdict(Verdict::Drop), (2, Some(Loss::Dropped)), vec![1, 2, 5]),
            (
                Overload::Queue(9),
                Enqueue::Verdict(Verdict::Queue(9)),
                (2, Some(Loss::HandedOn)),
                vec![1, 2, 5],
            ),
        ] {
            let mut q = queue(with(Fanout::Exclusive, overload), 1, 2);
            for n in [1, 2] {
                assert!(matches!(q.enqueue(&[n], &hash(0), 0), Enqueue::Sent(0, _)));
            }
            assert_eq!(q.enqueue(&[3], &hash(0), 0), third, "{overload:?}");
            q.enqueue(&[4], &hash(0), 0);
            let listener = &mut q.members[0].listener;
            assert_eq!((listener.lost, listener.last), told, "{overload:?}");
            listener.room = 3;
            q.enqueue(&[5], &hash(0), 0);
            assert_eq!(q.members[0].listener.out, out, "{overload:?}");
        }
    }

    #[test]
    fn a_frame_that_is_too_large_is_lost_and_blocks_nothing() {
        let all = [1; LARGEST + 1];
        for fanout in [Fanout::Exclusive, Fanout::Broadcast] {
            // Policy, result, loss reported to the listener.
            for (overload, fate, told) in [
                (Overload::Block, Enqueue::Lost, Loss::TooLarge),
                (Overload::DropNewest, Enqueue::Lost, Loss::TooLarge),
                (Overload::DropOldest(4), Enqueue::Lost, Loss::TooLarge),
                (Overload::Pass, Enqueue::Verdict(Verdict::Pass), Loss::Passed),
                (Overload::Drop, Enqueue::Verdict(Verdict::Drop), Loss::Dropped),
                (Overload::Queue(9), Enqueue::Verdict(Verdict::Queue(9)), Loss::HandedOn),
            ] {
                let told = if fanout == Fanout::Broadcast { Loss::TooLarge } else { told };
                let mut q = queue(with(fanout, overload), 1, 2);
                assert_eq!(q.enqueue(&all, &hash(0), 0), fate, "{overload:?}");
                let listener = &q.members[0].listener;
                assert_eq!((listener.lost, listener.last), (1, Some(told)), "{overload:?}");
                assert_eq!(q.stats().lost, u64::from(fate == Enqueue::Lost));
            }
        }
        // In the backlog, followed by another frame.
        let mut q = queue(with(Fanout::Exclusive, Overload::DropOldest(4)), 1, 1);
        assert!(matches!(q.enqueue(&[1], &hash(0), 0), Enqueue::Sent(0, _)));
        for bytes in [&[2][..], &all, &[3]] {
            assert_eq!(q.enqueue(bytes, &hash(0), 0), Enqueue::Backlogged);
        }
        q.members[0].listener.room = 9;
        q.flush();
        assert_eq!((q.members[0].listener.out.as_slice(), q.members[0].listener.lost), (&[1, 2, 3][..], 1));
        assert_eq!((q.stats().backlog, q.stats().lost, q.stats().sent), (0, 1, 3));
    }

    /// The listener of each flow.
    fn owners(q: &mut Queue<Double>) -> Vec<usize> {
        let owner = |sent| match sent {
            Enqueue::Sent(index, _) => index,
            other => panic!("{other:?}"),
        };
        (0..64).map(|flow| owner(q.enqueue(&[1], &hash(flow), 0))).collect()
    }

    #[test]
    fn a_standby_listener_takes_over_the_flows_of_one_that_ends_or_stalls() {
        let mut q = queue(with(Fanout::FlowHash, Overload::Block), 3, 9999);
        q.join_standby(Double { room: 9999, ..Double::default() });
        let mut expected = owners(&mut q);
        assert!((0..3).all(|index| expected.contains(&index)) && !expected.contains(&3));
        // The listener that ends or stalls, and its successor: the one on standby. Then another is on standby.
        for (index, successor, ends) in [(0, 3, true), (3, 4, false), (1, 5, true)] {
            let listener = &mut q.members[index].listener;
            (listener.dead, listener.stalled) = (ends, !ends);
            expected.iter_mut().filter(|owner| **owner == index).for_each(|owner| *owner = successor);
            assert_eq!(owners(&mut q), expected, "{index}");
            q.join_standby(Double { room: 9999, ..Double::default() });
        }
        assert_eq!(q.stats().takeovers, 3);
        // A new listener in use takes the place of one that has ended.
        let mut q = queue(with(Fanout::FlowHash, Overload::Block), 2, 9999);
        q.join_standby(Double::default());
        let mut expected = owners(&mut q);
        (q.members[0].listener.dead, q.members[2].listener.dead) = (true, true);
        q.join(Double { room: 9999, ..Double::default() });
        expected.iter_mut().filter(|owner| **owner == 0).for_each(|owner| *owner = 3);
        assert_eq!(owners(&mut q), expected);
    }

    #[test]
    fn a_stalled_listener_gets_frames_of_a_broadcast_only() {
        for (fanout, sent) in [
            (Fanout::Exclusive, Enqueue::NoListener),
            (Fanout::FlowHash, Enqueue::NoListener),
            (Fanout::Cpu, Enqueue::NoListener),
            (Fanout::LeastLoaded, Enqueue::NoListener),
            (Fanout::Broadcast, Enqueue::SentTo(1)),
            (Fanout::Mirror, Enqueue::SentTo(1)),
        ] {
            let mut q = queue(with(fanout, Overload::Block), 1, 9);
            q.members[0].listener.stalled = true;
            assert_eq!(q.enqueue(&[1], &hash(0), 0), sent, "{fanout:?}");
            q.join(Double { room: 1, ..Double::default() });
            if sent == Enqueue::NoListener {
                assert!(matches!(q.enqueue(&[1], &hash(0), 0), Enqueue::Sent(1, _)), "{fanout:?}");
                assert_eq!(q.enqueue(&[1], &hash(0), 0), Enqueue::Blocked);
                assert_eq!((q.members[0].listener.refused, q.members[1].listener.refused), (0, 1));
            }
        }
    }

    #[test]
    fn the_marks_have_hysteresis() {
        let policy = Policy { high: 4, low: 1, ..with(Fanout::Exclusive, Overload::Drop) };
        let mut q = queue(policy, 1, 100);
        for n in 0..4 {
            assert!(matches!(q.enqueue(&[n], &hash(0), 0), Enqueue::Sent(..)));
        }
        for depth in [4, 3, 2] {
            q.members[0].listener.out.truncate(depth);
            assert_eq!(q.enqueue(&[9], &hash(0), 0), Enqueue::Verdict(Verdict::Drop), "at {depth}");
        }
        q.members[0].listener.out.truncate(1);
        assert!(matches!(q.enqueue(&[9], &hash(0), 0), Enqueue::Sent(..)));
        assert_eq!(q.stats().overloads, 1);
    }

    #[test]
    fn a_flow_stays_with_its_listener_while_other_listeners_join_and_leave() {
        let mut q = queue(with(Fanout::FlowHash, Overload::Drop), 0, 0);
        // The value of `room` identifies a listener.
        let join = |q: &mut Queue<Double>, who| q.join(Double { room: 10_000 + who, ..Double::default() });
        let flows = |q: &mut Queue<Double>| {
            let mut at = |flow| match q.enqueue(&[0], &hash(flow), 0) {
                Enqueue::Sent(i, _) => q.members[i].listener.room - 10_000,
                other => panic!("{other:?}"),
            };
            (0..1000).map(|h| at(h * 7919)).collect::<Vec<_>>()
        };
        (0..4).for_each(|who| join(&mut q, who));
        let mut before = flows(&mut q);
        for who in 0..4 {
            let charge = before.iter().filter(|b| **b == who).count();
            assert!((150..350).contains(&charge), "listener {who} has {charge} of 1000 flows");
        }
        // Listener that leaves; whether it is removed at once; listener that joins.
        for (gone, taken, come) in [(1, false, None), (0, true, None), (3, true, Some(4)), (2, true, Some(5))]
        {
            for member in q.members.iter_mut().filter(|m| m.listener.room == 10_000 + gone) {
                member.listener.dead = true;
            }
            if taken {
                assert!(!q.take_dead().is_empty());
            }
            come.into_iter().for_each(|who| join(&mut q, who));
            let now = flows(&mut q);
            for (flow, (before, now)) in before.iter().zip(&now).enumerate() {
                assert_ne!(*now, gone);
                let may = before == now || *before == gone || Some(*now) == come;
                assert!(may, "flow {flow} moved from {before} to {now} when {gone} went");
            }
            before = now;
        }
    }

    #[test]
    fn cpu_least_loaded_and_exclusive() {
        let mut q = queue(with(Fanout::Cpu, Overload::Drop), 3, 10);
        for cpu in 0..6 {
            assert!(matches!(q.enqueue(&[0], &hash(0), cpu), Enqueue::Sent(i, _) if i == cpu as usize % 3));
        }
        let mut q = queue(with(Fanout::LeastLoaded, Overload::Drop), 3, 10);
        for n in 0..9 {
            q.enqueue(&[n], &hash(0), 0);
        }
        assert!(q.listeners().all(|l| l.out.len() == 3));
        let mut q = queue(with(Fanout::Exclusive, Overload::Drop), 2, 10);
        q.members[0].listener.dead = true;
        assert!(matches!(q.enqueue(&[0], &hash(0), 0), Enqueue::Sent(1, _)));
        assert_eq!(q.take_dead().len(), 1);
        q.members[0].listener.dead = true;
        assert_eq!(q.enqueue(&[0], &hash(0), 0), Enqueue::NoListener);
    }

    #[test]
    fn a_slow_mirror_listener_loses_only_its_own_copies() {
        let mut q = queue(with(Fanout::Mirror, Overload::Block), 2, 100);
        q.members[1].listener.room = 1;
        for n in 0..10 {
            assert!(matches!(q.enqueue(&[n], &hash(0), 0), Enqueue::SentTo(1 | 2)));
        }
        assert_eq!((q.members[0].listener.out.len(), q.members[0].listener.lost), (10, 0));
        assert_eq!((q.members[1].listener.out.len(), q.members[1].listener.lost), (1, 9));
        let mut q = queue(with(Fanout::Broadcast, Overload::Drop), 2, 1);
        assert_eq!(q.enqueue(&[1], &hash(0), 0), Enqueue::SentTo(2));
        assert_eq!(q.enqueue(&[2], &hash(0), 0), Enqueue::Verdict(Verdict::Drop));
    }

    fn overload() -> impl Strategy<Value = Overload> {
        prop_oneof![
            Just(Overload::Block),
            Just(Overload::DropNewest),
            (0..4usize).prop_map(Overload::DropOldest),
            Just(Overload::Pass),
            Just(Overload::Drop),
            Just(Overload::Queue(3)),
        ]
    }

    fn fanout() -> impl Strategy<Value = Fanout> {
        prop::sample::select(vec![
            Fanout::Exclusive,
            Fanout::FlowHash,
            Fanout::Cpu,
            Fanout::LeastLoaded,
            Fanout::Broadcast,
            Fanout::Mirror,
        ])
    }

    proptest! {
        #[test]
        fn every_frame_is_accounted_for(
            fanout in fanout(), overload in overload(), high in 1..6u32, low in 0..6u32,
            ops in prop::collection::vec((0..4usize, 0..6usize, any::<u32>()), 1..80),
        ) {
            let mut q = queue(Policy { fanout, overload, high, low }, 3, 4);
            for (who, what, hash) in ops {
                match what {
                    0 => drop(q.members.get_mut(who).map(|m| m.listener.out.clear())),
                    1 if hash % 8 == 0 => drop(q.members.get_mut(who).map(|m| m.listener.dead = true)),
                    2 if hash % 4 == 0 => drop(q.take_dead()),
                    _ => drop(q.enqueue(&[1; LARGEST + 1][..1 + hash as usize % (LARGEST + 1)], &Meta { hash, ..Meta::default() }, hash)),
                }
                let s = q.stats();
                prop_assert_eq!(s.offered, s.sent + s.blocked + s.lost + s.passed + s.dropped + s.handed_on
                    + s.no_listener + s.backlog);
                if let Overload::DropOldest(max) = overload {
                    prop_assert!(s.backlog <= max as u64);
                }
            }
        }
    }
}
