//! The rate limit of log lines, per cause and peer. No IO; the clock is an argument.
//!
//! A cause is a place in the source. A line with a peer needs room in the bucket of its cause and peer and in the bucket of its cause;
//! a line without a peer needs room in the bucket of its cause only. The second bucket bounds the lines of a peer that has many names,
//! such as source addresses. Each bucket is a virtual scheduling algorithm (GCRA, ITU-T I.371): a line at most every period on average,
//! and a burst.

use std::collections::HashMap;

/// Lines of one cause and peer: at once, and nanoseconds per line afterwards.
pub(super) const PEER: Rate = Rate { burst: 16, period: 1_000_000_000 };

/// Lines of one cause: at once, and nanoseconds per line afterwards.
pub(super) const CAUSE: Rate = Rate { burst: 64, period: 250_000_000 };

/// Maximum number of buckets of peers. Further peers share the bucket of the cause.
const PEERS: usize = 1024;

/// Nanoseconds between two summaries of one bucket.
const SUMMARY: u64 = 10_000_000_000;

/// Nanoseconds from the first suppressed line to its summary.
const FIRST_SUMMARY: u64 = 1_000_000_000;

/// Summaries of one call.
const SUMMARIES: usize = 64;

/// Bytes of a line that a summary quotes.
const SAMPLE: usize = 200;

/// A rate: `burst` lines at once, then one line per `period` nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    burst: u64,
    period: u64,
}

/// The place in the source that logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cause {
    /// The source file.
    pub file: &'static str,
    /// The line in the file.
    pub line: u32,
}

/// Lines of one cause and peer that were suppressed since the last summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Summary {
    /// Their number.
    pub(super) suppressed: u64,
    /// The beginning of the last line that passed.
    pub(super) sample: String,
}

/// A cause, and the hash of a peer's name if the line has a peer.
type Key = (Cause, Option<u64>);

#[derive(Debug, Default)]
struct Bucket {
    /// Time at which the bucket is empty.
    empty: u64,
    /// Lines suppressed since the last summary.
    suppressed: u64,
    /// Earliest time of the next summary.
    due: u64,
    /// The beginning of the last line that passed.
    sample: String,
}

impl Bucket {
    fn has_room(&self, rate: Rate, now: u64) -> bool {
        self.empty.saturating_sub(now) <= (rate.burst - 1) * rate.period
    }

    fn fill(&mut self, rate: Rate, now: u64) {
        self.empty = self.empty.max(now) + rate.period;
    }

    /// Returns the time of the next summary if this is the first line since the last one.
    fn suppress(&mut self, now: u64) -> Option<u64> {
        self.suppressed += 1;
        if self.suppressed > 1 {
            return None;
        }
        self.due = self.due.max(now + FIRST_SUMMARY);
        Some(self.due)
    }

    /// Removing the bucket changes nothing.
    fn is_idle(&self, now: u64) -> bool {
        self.empty <= now && self.suppressed == 0 && self.due <= now
    }
}

/// The buckets with suppressed lines.
#[derive(Debug, Default)]
struct Pending {
    count: usize,
    /// The earliest time of a summary, if there is a bucket.
    next: u64,
}

impl Pending {
    /// Adds a bucket with a summary at `due`, if any.
    fn add(&mut self, due: Option<u64>) {
        let Some(due) = due else { return };
        self.next = if self.count == 0 { due } else { self.next.min(due) };
        self.count += 1;
    }
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    buckets: HashMap<Key, Bucket>,
    /// Buckets of peers.
    peers: usize,
    pending: Pending,
    /// Earliest time at which idle buckets are removed again.
    sweep: u64,
}

impl Limiter {
    /// Returns true if a line may pass. [`note`](Self::note) must follow with the line.
    pub(super) fn admit(&mut self, cause: Cause, peer: Option<u64>, now: u64) -> bool {
        let peer = self.key(cause, peer, now);
        if let Some(key) = peer {
            let bucket = self.buckets.entry(key).or_default();
            if !bucket.has_room(PEER, now) {
                self.pending.add(bucket.suppress(now));
                return false;
            }
        }
        let all = self.buckets.entry((cause, None)).or_default();
        if !all.has_room(CAUSE, now) {
            self.pending.add(all.suppress(now));
            return false;
        }
        all.fill(CAUSE, now);
        if let Some(bucket) = peer.and_then(|key| self.buckets.get_mut(&key)) {
            bucket.fill(PEER, now);
        }
        true
    }

    /// Keeps the beginning of a line that passed, for summaries.
    pub(super) fn note(&mut self, cause: Cause, peer: Option<u64>, line: &str) {
        let end = line.floor_char_boundary(SAMPLE);
        for key in [Some((cause, None)), peer.map(|peer| (cause, Some(peer)))].into_iter().flatten() {
            if let Some(bucket) = self.buckets.get_mut(&key) {
                bucket.sample.clear();
                bucket.sample.push_str(line[..end].trim_end());
            }
        }
    }

    /// Returns the summaries that are due, at most [`SUMMARIES`]. With `all`, those that are not due, too.
    pub(super) fn poll_summaries(&mut self, now: u64, all: bool) -> Vec<Summary> {
        let mut summaries = Vec::new();
        self.pending = Pending::default();
        for bucket in self.buckets.values_mut().filter(|bucket| bucket.suppressed > 0) {
            if summaries.len() < SUMMARIES && (all || bucket.due <= now) {
                bucket.due = now + SUMMARY;
                let suppressed = std::mem::take(&mut bucket.suppressed);
                summaries.push(Summary { suppressed, sample: bucket.sample.clone() });
            } else {
                self.pending.add(Some(bucket.due));
            }
        }
        summaries
    }

    /// Number of buckets whose summary is not written.
    pub(super) fn pending(&self) -> usize {
        self.pending.count
    }

    /// Returns the time of the next summary.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        (self.pending.count > 0).then_some(self.pending.next)
    }

    /// The key of a peer's bucket. `None` without a peer, or if there is no room for another bucket.
    fn key(&mut self, cause: Cause, peer: Option<u64>, now: u64) -> Option<Key> {
        let key = (cause, Some(peer?));
        if self.buckets.contains_key(&key) {
            return Some(key);
        }
        if self.peers >= PEERS && now >= self.sweep {
            self.sweep = now + FIRST_SUMMARY;
            self.buckets.retain(|(_, peer), bucket| peer.is_none() || !bucket.is_idle(now));
            self.peers = self.buckets.keys().filter(|(_, peer)| peer.is_some()).count();
        }
        if self.peers >= PEERS {
            return None;
        }
        self.peers += 1;
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const CAUSES: [Cause; 2] = [Cause { file: "a.rs", line: 1 }, Cause { file: "a.rs", line: 2 }];

    /// Submits `lines` lines. Returns how many pass.
    fn passed(limiter: &mut Limiter, cause: Cause, peer: Option<u64>, lines: u64, now: u64) -> u64 {
        (0..lines).filter(|_| limiter.admit(cause, peer, now)).count() as u64
    }

    #[test]
    fn a_flood_of_one_peer_costs_neither_another_peer_nor_another_cause() {
        let mut limiter = Limiter::default();
        let [one, other] = CAUSES;
        assert_eq!(passed(&mut limiter, one, Some(7), 53_000, 0), PEER.burst);
        assert_eq!(passed(&mut limiter, one, Some(8), 3, 0), 3);
        assert_eq!(passed(&mut limiter, other, Some(7), 3, 0), 3);
        // Afterwards one line per second.
        assert_eq!(passed(&mut limiter, one, Some(7), 100, S - 1), 0);
        assert_eq!(passed(&mut limiter, one, Some(7), 100, 3 * S), 3);
    }

    #[test]
    fn many_names_and_no_name_have_the_bound_of_the_cause() {
        let mut limiter = Limiter::default();
        let [one, other] = CAUSES;
        let lines = (0..100_000).filter(|peer| limiter.admit(one, Some(*peer), 0)).count() as u64;
        assert_eq!(lines, CAUSE.burst);
        assert!(limiter.buckets.len() <= PEERS + CAUSES.len(), "{}", limiter.buckets.len());
        assert_eq!(passed(&mut limiter, other, None, 1000, 0), CAUSE.burst);
        assert_eq!(passed(&mut limiter, other, None, 1000, S), 4);
        // Idle buckets make room.
        limiter.poll_summaries(S, true);
        assert!(limiter.admit(one, Some(1 << 40), 100 * S));
        assert!(limiter.buckets.len() < 10, "{}", limiter.buckets.len());
    }

    #[test]
    fn suppressed_lines_are_counted_in_summaries() {
        let mut limiter = Limiter::default();
        let cause = CAUSES[0];
        passed(&mut limiter, cause, Some(7), PEER.burst, 0);
        limiter.note(cause, Some(7), "refused process 5\n");
        assert_eq!(limiter.poll_timeout(), None);
        passed(&mut limiter, cause, Some(7), 10, 0);
        assert_eq!(limiter.poll_timeout(), Some(S));
        assert_eq!(limiter.poll_summaries(S - 1, false), []);
        let summary = |suppressed| [Summary { suppressed, sample: "refused process 5".to_owned() }];
        assert_eq!(limiter.poll_summaries(S, false), summary(10));
        assert_eq!(limiter.poll_summaries(S, true), []);
        // The next summary waits its time.
        assert_eq!(passed(&mut limiter, cause, Some(7), 5, S), 1);
        assert_eq!(limiter.poll_timeout(), Some(11 * S));
        assert_eq!(limiter.poll_summaries(S, true), summary(4));
    }
}
