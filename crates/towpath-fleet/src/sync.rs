//! Snapshots that a gate takes of its peers: when it joins, and when batches are missing that the stream of the bus does not have.
//!
//! What: one snapshot at a time. The gate asks for [`CHUNKS`] chunks from a cursor, and for more when it has them: a slow gate asks slowly.
//! A chunk is for the cursor that is expected, or is dropped. If none arrives for [`PATIENCE`], the gate asks again, and after [`TRIES`]
//! takes the next peer. The peer keeps no memory of a snapshot. Changes that happen meanwhile arrive in batches, and merge in any order.

use std::collections::BTreeMap;
use std::time::Duration;

use towpath_wire::Time;

/// Chunks of one request.
pub(crate) const CHUNKS: u64 = 16;

/// Time without a chunk after which a request is repeated.
pub(crate) const PATIENCE: Duration = Duration::from_millis(500);

/// Requests without a chunk after which the snapshot fails.
const TRIES: u32 = 6;

/// Time until a snapshot that failed is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// Time in which a peer must be heard, so that its snapshot stays wanted.
const GONE: Duration = Duration::from_secs(10);

/// Time after which the other gates have heard a peer that this gate has heard, unless a message was lost.
const KNOWN: Duration = Duration::from_millis(200);

/// Why a snapshot is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// The peer was there before this gate. A snapshot of any peer that is in step serves as well.
    Joined,
    /// Batches of the peer are missing.
    Missing,
}

/// A snapshot that is wanted. The needs are separate: a replay ends one of them only.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    joined: bool,
    missing: bool,
    at: Time,
    /// When the wish began.
    since: Time,
}

impl Wanted {
    fn add(&mut self, need: Need) {
        match need {
            Need::Joined => self.joined = true,
            Need::Missing => self.missing = true,
        }
    }

    const fn need(self) -> Need {
        if self.missing { Need::Missing } else { Need::Joined }
    }
}

/// The snapshot that is being taken.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) peer: String,
    pub(crate) incarnation: u64,
    pub(crate) epoch: u64,
    pub(crate) cursor: u64,
    need: Need,
    begun: Time,
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
    wanted: BTreeMap<String, Wanted>,
    pub(crate) running: Option<Running>,
    epoch: u64,
}

impl Sync {
    /// A snapshot of `peer` is wanted from `at` on.
    pub(crate) fn want(&mut self, peer: &str, need: Need, at: Time, now: Time) {
        if self.running.as_ref().is_some_and(|running| running.peer == peer && need == Need::Joined) {
            return;
        }
        let wanted = Wanted { joined: false, missing: false, at, since: now };
        self.wanted.entry(peer.to_owned()).or_insert(wanted).add(need);
    }

    /// Returns true if no snapshot is wanted or being taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.wanted.is_empty() && self.running.is_none()
    }

    /// No batch of `peer` is missing any more.
    pub(crate) fn filled(&mut self, peer: &str) {
        if let Some(wanted) = self.wanted.get_mut(peer) {
            wanted.missing = false;
            if !wanted.joined {
                self.wanted.remove(peer);
            }
        }
    }

    /// No batch of `peer` went missing since its snapshot began.
    pub(crate) fn covers(&self, peer: &str) -> bool {
        !self.wanted.contains_key(peer)
    }

    /// The bus is back: peers have time to be heard.
    pub(crate) fn resume(&mut self, now: Time) {
        self.wanted.values_mut().for_each(|wanted| wanted.at = now.max(wanted.at));
    }

    /// The bus has failed: the chunks that were requested are lost.
    pub(crate) fn interrupt(&mut self, now: Time) {
        if let Some(running) = self.running.take() {
            self.want(&running.peer, running.need, now, now);
        }
    }

    /// The next request, if one is due. `peers` tells whether a peer was heard lately, and its incarnation. Returns the peer, the epoch and
    /// the cursor; `failed` counts snapshots that were given up.
    pub(crate) fn poll(
        &mut self,
        now: Time,
        peer: impl Fn(&str) -> Option<u64>,
        failed: &mut u64,
    ) -> Option<(String, u64, u64)> {
        if let Some(running) = &mut self.running {
            let waited = now.since(running.active) >= PATIENCE;
            let same = peer(&running.peer) == Some(running.incarnation);
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
            let wanted = Wanted { joined: false, missing: false, at, since: now };
            let again = self.wanted.entry(running.peer).or_insert(wanted);
            again.add(running.need);
            again.at = at;
        }
        // A peer that has gone has nothing to give. If it comes back, the gap of its batches shows.
        self.wanted.retain(|name, wanted| now.since(wanted.at) < GONE || peer(name).is_some());
        let due = |(name, wanted): (&String, &Wanted)| {
            let incarnation = (wanted.at <= now).then(|| peer(name)).flatten()?;
            Some((name.clone(), wanted.need(), incarnation))
        };
        let (name, need, incarnation) = self.wanted.iter().find_map(due)?;
        self.wanted.remove(&name);
        self.epoch += 1;
        let (epoch, cursor) = (self.epoch, 0);
        self.running = Some(Running {
            peer: name.clone(),
            incarnation,
            epoch,
            cursor,
            need,
            begun: now,
            open: CHUNKS,
            active: now,
            tries: 0,
            states: 0,
        });
        Some((name, epoch, cursor))
    }

    /// A chunk of `peer`.
    pub(crate) fn chunk(
        &mut self,
        peer: &str,
        (epoch, cursor, next): (u64, u64, Option<u64>),
        now: Time,
    ) -> Chunk {
        let Some(running) = &mut self.running else { return Chunk::Other };
        if (running.peer.as_str(), running.epoch, running.cursor) != (peer, epoch, cursor) {
            return Chunk::Other;
        }
        (running.active, running.tries) = (now, 0);
        running.open = running.open.saturating_sub(1);
        match next {
            // A cursor that does not advance would never end.
            Some(next) if next > cursor => {
                running.cursor = next;
                Chunk::Expected
            }
            Some(_) => Chunk::Other,
            None => Chunk::Last,
        }
    }

    /// The snapshot is complete. `in_step`: its peer had the states of its own peers, so those need not be asked. Peers that came shortly
    /// before the snapshot began are: its peer may not have heard them, and does not know then that it is not in step. Returns the peer.
    pub(crate) fn finish(&mut self, in_step: bool) -> Option<String> {
        let running = self.running.take()?;
        if in_step {
            let known = |wanted: &Wanted| wanted.since + KNOWN <= running.begun;
            self.wanted.values_mut().filter(|wanted| known(wanted)).for_each(|wanted| wanted.joined = false);
            self.wanted.retain(|_, wanted| wanted.missing || wanted.joined);
        }
        Some(running.peer)
    }

    /// The number of peers of which a snapshot is wanted.
    #[cfg(test)]
    pub(crate) fn wanted(&self) -> usize {
        self.wanted.len()
    }

    /// When [`poll`](Self::poll) is to be called next.
    pub(crate) fn timeout(&self) -> Option<Time> {
        let running = self.running.as_ref().map(|running| running.active + PATIENCE);
        running.or_else(|| self.wanted.values().map(|wanted| wanted.at).min())
    }
}
