//! A queue with several listeners: which listener gets a frame, and the overload policy.
//!
//! Invariant: every offered frame is accounted for: sent, lost by the policy, returned to the caller with a verdict
//! or to be retried, or in the backlog. A lost frame is reported to its listener in the header of the next frame.

mod policy;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use towpath_metrics::metrics;

use crate::engine::channel::Channel;
use crate::lane::loss_record::Loss;
use crate::lane::reserve_error::ReserveError;
use crate::lane::verdict::Verdict;
use crate::shm::header::Meta;
use crate::shm::seq::Seq;
pub use policy::{Fanout, Overload, Policy};

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

/// Why no listener took a frame.
#[derive(Debug)]
enum Refusal {
    NoRoom,
    /// Another thread ended the chosen listener after the choice (the lanes of a client end together). The choice must be made again.
    Ended,
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
        let to_all = matches!(self.policy.fanout, Fanout::Broadcast | Fanout::Mirror);
        let takes = |m: &Member<L>| if to_all { m.is_in_use() } else { m.is_usable() };
        loop {
            if self.standby {
                self.take_over();
            }
            if !self.members.iter().any(takes) {
                self.stats.no_listener += 1;
                return Enqueue::NoListener;
            }
            let result = if to_all {
                self.enqueue_all(bytes, meta)
            } else if self.backlog.is_empty() {
                self.try_one(bytes, meta, cpu)
            } else {
                // The backlog precedes this frame.
                Err(Refusal::NoRoom)
            };
            match result {
                Ok(result) => return result,
                Err(Refusal::NoRoom) => return self.overloaded(bytes, meta, cpu),
                Err(Refusal::Ended) => {}
            }
        }
    }

    /// Sends the frames of the backlog that have space now. Frames that are too large for their listener are lost.
    pub fn flush(&mut self) {
        while let Some((meta, cpu, bytes)) = self.backlog.pop_front() {
            if self.try_one(&bytes, &meta, cpu).is_err() {
                self.backlog.push_front((meta, cpu, bytes));
                return;
            }
        }
    }

    /// Sends the frame to its listener.
    fn try_one(&mut self, bytes: &[u8], meta: &Meta, cpu: u32) -> Result<Enqueue, Refusal> {
        let index = self.choose(meta, cpu).ok_or(Refusal::Ended)?;
        if !self.has_room(index) {
            self.members[index].listener.refused();
            return Err(Refusal::NoRoom);
        }
        match self.members[index].listener.send(bytes, meta) {
            Ok(seq) => {
                self.stats.sent += 1;
                Ok(Enqueue::Sent(index, seq))
            }
            // Space for this frame would never suffice, and it would block the frames after it.
            Err(ReserveError::TooLarge) if self.policy.overload.waits() => {
                self.members[index].listener.lose(Loss::TooLarge);
                self.stats.lost += 1;
                Ok(Enqueue::Lost)
            }
            Err(_) if self.members[index].listener.is_dead() => Err(Refusal::Ended),
            Err(_) => {
                self.members[index].listener.refused();
                Err(Refusal::NoRoom)
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

    fn enqueue_all(&mut self, bytes: &[u8], meta: &Meta) -> Result<Enqueue, Refusal> {
        // A broadcast with `block` reaches all listeners at the same time, or waits.
        if self.policy.fanout == Fanout::Broadcast
            && self.policy.overload == Overload::Block
            && !(0..self.members.len()).all(|i| self.has_room(i) || !self.members[i].is_in_use())
        {
            self.stats.blocked += 1;
            return Ok(Enqueue::Blocked);
        }
        let (mut sent, mut later, mut alive) = (0, false, false);
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
            if listener.is_dead() {
                continue;
            }
            listener.lose(loss);
            self.stats.copies_lost += 1;
            later |= loss == Loss::NoRoom;
            alive = true;
        }
        if sent == 0 && !alive {
            return Err(Refusal::Ended);
        }
        if sent == 0 && self.policy.fanout == Fanout::Broadcast {
            if !later && self.policy.overload.waits() {
                self.stats.lost += 1;
                return Ok(Enqueue::Lost);
            }
            return Ok(self.refuse());
        }
        self.stats.sent += 1;
        Ok(Enqueue::SentTo(sent))
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
