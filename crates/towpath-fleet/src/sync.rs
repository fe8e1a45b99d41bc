//! Snapshots that a gate takes of its peers: when it joins, and when batches are missing that the stream of the bus does not have.
//!
//! What: a snapshot is wanted for each process of which a peer has more batches than this gate ([`Known`](crate::known::Known)), and one is
//! taken at a time, of a peer that has them. It ends the wishes for all processes of which its peer had the batches when it began.
//!
//! The gate asks for [`CHUNKS`] chunks from a cursor, and for more when it has them: a slow gate asks slowly. A chunk is for the cursor
//! that is expected, or is dropped. If none arrives for [`PATIENCE`], the gate asks again, and after [`TRIES`] takes another peer. The peer
//! keeps no memory of a snapshot. Changes that happen meanwhile arrive in batches, and merge in any order.

use std::collections::BTreeMap;
use std::time::Duration;

use towpath_wire::Time;

use crate::batches::Batches;
use crate::message::Has;
#[cfg(test)]
use crate::message::MAX_TOLD;

/// Chunks of one request.
pub(crate) const CHUNKS: u64 = 16;

/// Maximum number of processes for which a snapshot is wanted. Peers tell what they have again and again.
pub(crate) const MAX_WANTED: usize = 256;

/// Time without a chunk after which a request is repeated.
pub(crate) const PATIENCE: Duration = Duration::from_millis(500);

/// Requests without a chunk after which the snapshot fails.
const TRIES: u32 = 6;

/// Time until a snapshot that failed is tried again, and between those for one process that this gate does not hear.
const AGAIN: Duration = Duration::from_secs(5);

/// Time in which a peer must be heard, so that its snapshot stays wanted.
const GONE: Duration = Duration::from_secs(10);

/// A snapshot of `peer`, because it has these batches of a process.
#[derive(Clone, Debug)]
struct Wanted {
    peer: String,
    has: Batches,
    at: Time,
    /// The snapshot that is being taken began after the wish.
    asked: bool,
    /// A snapshot of the peer has failed: any other peer that has some of them takes its place.
    failed: bool,
}

impl Wanted {
    fn new(peer: &str, has: &Batches, at: Time) -> Self {
        Self { peer: peer.to_owned(), has: has.clone(), at, asked: false, failed: false }
    }
}

/// The snapshot that is being taken.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) peer: String,
    pub(crate) incarnation: u64,
    pub(crate) epoch: u64,
    pub(crate) cursor: u64,
    /// The batches of processes that the peer had when the snapshot began.
    pub(crate) covers: BTreeMap<u64, Batches>,
    /// Chunks of the last request that have not arrived.
    open: u64,
    /// When the last request was sent or the last chunk arrived.
    active: Time,
    tries: u32,
    pub(crate) states: u64,
}

/// What a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// The one that is expected.
    Expected,
    /// The last one.
    Last,
    /// Of another snapshot, or repeated.
    Other,
}

/// The snapshots that are wanted, and the one that is being taken.
#[derive(Debug, Default)]
pub(crate) struct Sync {
    /// By incarnation of the process whose batches are missing.
    wanted: BTreeMap<u64, Wanted>,
    /// Processes for which a snapshot was taken lately, and when the next one may be, if only other gates tell of them.
    taken: BTreeMap<u64, Time>,
    pub(crate) running: Option<Running>,
    epoch: u64,
}

impl Sync {
    /// `peer` has these batches of the process `incarnation`, and the gate lacks some. A snapshot is wanted from `at` on.
    pub(crate) fn want(&mut self, incarnation: u64, has: &Batches, peer: &str, at: Time) {
        let room = self.wanted.len() < MAX_WANTED;
        match self.wanted.get_mut(&incarnation) {
            Some(wanted) if wanted.peer == peer => {
                wanted.asked &= wanted.has.includes(has);
                wanted.has = has.clone();
            }
            Some(wanted) if wanted.failed || has.includes(&wanted.has) && !wanted.has.includes(has) => {
                *wanted = Wanted::new(peer, has, at.min(wanted.at));
            }
            None if room => drop(self.wanted.insert(incarnation, Wanted::new(peer, has, at))),
            _ => {}
        }
    }

    /// The gate has these batches of a process.
    pub(crate) fn has(&mut self, incarnation: u64, batches: &Batches) {
        if self.wanted.get(&incarnation).is_some_and(|wanted| batches.includes(&wanted.has)) {
            self.wanted.remove(&incarnation);
        }
    }

    /// The process of a peer has ended: the next one does not have what it had.
    pub(crate) fn ended(&mut self, incarnation: u64, peer: &str) {
        self.wanted.retain(|at, wanted| *at != incarnation || wanted.peer != peer);
        self.wanted.values_mut().filter(|wanted| wanted.peer == peer).for_each(|wanted| wanted.failed = true);
    }

    /// When a snapshot may be wanted for a process of which this gate hears only from others. Such a process may send all the time.
    pub(crate) fn next(&self, incarnation: u64) -> Time {
        self.taken.get(&incarnation).copied().unwrap_or_default()
    }

    /// Returns true if a snapshot for this process has failed.
    pub(crate) fn has_failed(&self, incarnation: u64) -> bool {
        self.wanted.get(&incarnation).is_some_and(|wanted| wanted.failed)
    }

    /// Returns true if no snapshot is wanted or being taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.wanted.is_empty() && self.running.is_none()
    }

    /// The bus is back: peers have time to be heard.
    pub(crate) fn resume(&mut self, now: Time) {
        self.wanted.values_mut().for_each(|wanted| wanted.at = now.max(wanted.at));
    }

    /// The bus has failed: the chunks that were requested are lost.
    pub(crate) fn interrupt(&mut self) {
        self.running = None;
    }

    /// The next request, if one is due. `peer` tells whether a peer was heard lately: its incarnation, and the number of its next batch.
    /// Returns the peer, the epoch and the cursor; `failed` counts snapshots that were given up.
    pub(crate) fn poll(
        &mut self,
        now: Time,
        peer: impl Fn(&str) -> Option<(u64, u64)>,
        failed: &mut u64,
    ) -> Option<(String, u64, u64)> {
        if let Some(running) = &mut self.running {
            let waited = now.since(running.active) >= PATIENCE;
            let same = peer(&running.peer).is_some_and(|(incarnation, _)| incarnation == running.incarnation);
            if same && (running.open == 0 || waited && running.tries < TRIES) {
                running.tries += u32::from(waited);
                (running.open, running.active) = (CHUNKS, now);
                return Some((running.peer.clone(), running.epoch, running.cursor));
            }
            if same && !waited {
                return None;
            }
            *failed += 1;
            let running = self.running.take()?;
            let at = now + if same { AGAIN } else { PATIENCE };
            for wanted in self.wanted.values_mut().filter(|wanted| wanted.peer == running.peer) {
                (wanted.at, wanted.failed) = (at, true);
            }
        }
        // A peer that has gone has nothing to give. If it comes back, it tells again what it has.
        self.wanted.retain(|_, wanted| now.since(wanted.at) < GONE || peer(&wanted.peer).is_some());
        let mut due = self.wanted.values_mut().filter(|wanted| wanted.at <= now);
        let (name, (incarnation, next)) = due.find_map(|wanted| {
            let live = peer(&wanted.peer);
            wanted.failed |= live.is_none();
            Some((wanted.peer.clone(), live?))
        })?;
        self.wanted.values_mut().for_each(|wanted| wanted.asked = wanted.peer == name);
        self.epoch += 1;
        let (epoch, cursor) = (self.epoch, 0);
        self.running = Some(Running {
            peer: name.clone(),
            incarnation,
            epoch,
            cursor,
            // A peer of an older version does not tell.
            covers: BTreeMap::from([(incarnation, Batches::below(next))]),
            open: CHUNKS,
            active: now,
            tries: 0,
            states: 0,
        });
        Some((name, epoch, cursor))
    }

    /// A chunk of the process `incarnation` of `peer`, with what the peer has.
    pub(crate) fn chunk(
        &mut self,
        (peer, incarnation): (&str, u64),
        (epoch, cursor, next): (u64, u64, Option<u64>),
        has: Has<'_>,
        now: Time,
    ) -> Chunk {
        let Some(running) = &mut self.running else { return Chunk::Other };
        // A process that began meanwhile may have got the request.
        if (running.peer.as_str(), running.incarnation) != (peer, incarnation)
            || (running.epoch, running.cursor) != (epoch, cursor)
        {
            return Chunk::Other;
        }
        // A cursor that does not advance would never end.
        if next.is_some_and(|next| next <= cursor) {
            return Chunk::Other;
        }
        (running.active, running.tries) = (now, 0);
        running.open = running.open.saturating_sub(1);
        if cursor == 0 {
            running.covers.extend(has.processes());
        }
        match next {
            Some(next) => {
                running.cursor = next;
                Chunk::Expected
            }
            None => Chunk::Last,
        }
    }

    /// The snapshot is complete. What its peer does not have is not wanted of it any more. Returns what it covers.
    pub(crate) fn finish(&mut self, now: Time) -> BTreeMap<u64, Batches> {
        let Some(running) = self.running.take() else { return BTreeMap::new() };
        self.taken.retain(|_, next| *next > now);
        self.wanted.retain(|incarnation, wanted| {
            if wanted.asked {
                self.taken.insert(*incarnation, now + AGAIN);
            }
            !wanted.asked
        });
        while self.taken.len() > MAX_WANTED {
            self.taken.pop_first();
        }
        running.covers
    }

    /// What is held, each with its bound.
    #[cfg(test)]
    pub(crate) fn sizes(&self) -> [(usize, usize); 3] {
        let covers = self.running.as_ref().map_or(0, |running| running.covers.len());
        [(self.wanted.len(), MAX_WANTED), (self.taken.len(), MAX_WANTED), (covers, 1 + MAX_TOLD)]
    }

    /// When [`poll`](Self::poll) is to be called next.
    pub(crate) fn timeout(&self) -> Option<Time> {
        let running = self.running.as_ref().map(|running| running.active + PATIENCE);
        running.or_else(|| self.wanted.values().map(|wanted| wanted.at).min())
    }
}
