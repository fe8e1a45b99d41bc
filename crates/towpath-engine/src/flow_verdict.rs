//! Verdicts for flows.
//!
//! An inspector's verdict may apply to the packet's flow. Later packets of the flow, in both directions, then get the verdict and
//! the mark without going to the inspector, wherever a rule sends them to the inspector's queue. A packet that no rule
//! sends to the queue is not affected, so a reload of the rules needs no change here. A verdict ends:
//! - after [`IDLE`] without a packet, on the clock of the dynamic states;
//! - with a TCP SYN without ACK, which begins another connection;
//! - when its inspector is detached for a protocol violation. If the inspector ends without a violation, its verdicts remain, as
//!   connection marks outlive the program of an NFQUEUE;
//! - when the cache is full: the flows that were idle longest are evicted, and their packets are inspected again.
//!
//! Two generations bound the cache without a list. A flow with a packet moves to the young generation. If that is full, the
//! old generation is dropped, and the young one becomes the old one.
//!
//! With flow offload, a verdict is also known to the thread that decides which flows the kernel forwards ([`verdict_feed`](crate::verdict_feed)).
//! Packets that the kernel forwards refresh it. If the old generation has flows that the kernel has forwarded packets of since the last
//! time, these move to the young generation first, up to half of it.

use std::collections::HashMap;

use towpath_gate::state::{Ends, Flow};
use towpath_metrics::metrics;
use towpath_ring::Verdict;
use towpath_wire::Time;

use crate::verdict_feed::{Origin, OwnVerdict};

/// Idle time in nanoseconds after which a verdict ends: the lifetime of ipfw's established states (`dyn_ack_lifetime`).
pub const IDLE: u64 = 300_000_000_000;

/// Verdicts of one generation.
const GENERATION: usize = 1 << 15;

/// A verdict for a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowVerdict {
    /// The verdict: pass, drop, reject or queue. Replacements and `repeat` concern one packet.
    pub verdict: Verdict<'static>,
    /// New bits of the mark, and which bits change.
    pub mark: (u32, u32),
    /// The channel of the inspector that decided.
    pub channel: u32,
}

metrics! {
    /// Counters of the cache.
    pub struct Stats in "flow_verdicts" {
        /// Verdicts for flows that inspectors gave.
        pub given: counter events,
        /// Verdicts for flows that ended because the flow was idle or began another connection.
        pub expired: counter events,
        /// Verdicts for flows that were evicted because the cache was full.
        pub evicted: counter events,
        /// Verdicts for flows now, idle ones included.
        pub kept: gauge events,
    }
}

/// The verdicts for the flows of one queue.
#[derive(Debug)]
pub struct FlowVerdictCache {
    young: HashMap<Flow, Entry>,
    old: HashMap<Flow, Entry>,
    generation: usize,
    /// When the old generation was the young one for the last time.
    aged: Time,
    stats: Stats,
}

#[derive(Debug)]
struct Entry {
    verdict: FlowVerdict,
    seen: Time,
    /// Once it is announced to flow offload.
    own: Option<OwnVerdict>,
}

impl Entry {
    /// The time of the last packet.
    fn seen(&self) -> Time {
        self.own.as_ref().map_or(self.seen, |own| own.seen().max(self.seen))
    }
}

impl Default for FlowVerdictCache {
    fn default() -> Self {
        Self::with_room(2 * GENERATION)
    }
}

impl FlowVerdictCache {
    /// Creates a cache for at least `flows / 2` and at most `flows` flows.
    pub fn with_room(flows: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            generation: (flows / 2).max(1),
            aged: Time::default(),
            stats: Stats::default(),
        }
    }

    /// Returns true if there is no verdict.
    pub fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }

    /// The number of verdicts, idle ones included.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        Stats { kept: self.len() as u64, ..self.stats }
    }

    /// The verdict for the flow of a packet at `now`. `new`: the packet begins a connection.
    pub fn find(&mut self, flow: &Flow, new: bool, now: Time) -> Option<FlowVerdict> {
        self.find_and_announce(flow, new, now, None)
    }

    /// As [`find`](Self::find). The verdict is announced if `origin` is present: no packet of the flow waits.
    pub(crate) fn find_and_announce(
        &mut self,
        flow: &Flow,
        new: bool,
        now: Time,
        origin: Option<Origin<'_>>,
    ) -> Option<FlowVerdict> {
        let key = symmetric(flow);
        let in_old = !self.young.contains_key(&key);
        let entry = if in_old { self.old.get_mut(&key) } else { self.young.get_mut(&key) }?;
        if new || now.since(entry.seen()).as_nanos() >= u128::from(IDLE) {
            self.stats.expired += 1;
            if in_old {
                self.old.remove(&key)
            } else {
                self.young.remove(&key)
            };
            return None;
        }
        entry.seen = now;
        if let Some(origin) = origin {
            origin.announce(&mut entry.own, (flow, key == *flow), &entry.verdict, now);
        }
        if let Some(own) = &entry.own {
            own.saw(now);
        }
        let verdict = entry.verdict;
        if in_old && let Some(entry) = self.old.remove(&key) {
            self.keep(key, entry, now);
        }
        Some(verdict)
    }

    /// Sets the verdict for a flow.
    pub fn insert(&mut self, flow: &Flow, verdict: FlowVerdict, now: Time) {
        self.insert_and_announce(flow, verdict, now, None);
    }

    /// As [`insert`](Self::insert). A verdict that does not pass is announced if `origin` is present.
    pub(crate) fn insert_and_announce(
        &mut self,
        flow: &Flow,
        verdict: FlowVerdict,
        now: Time,
        origin: Option<Origin<'_>>,
    ) {
        let key = symmetric(flow);
        self.stats.given += 1;
        let earlier = self.old.remove(&key).or_else(|| self.young.remove(&key));
        let own = match earlier {
            // The same again: its entries go on.
            Some(Entry { verdict: before, own, .. }) if before == verdict => own,
            _ => origin
                .filter(|_| verdict.verdict != Verdict::Pass)
                .map(|origin| origin.announce_block(flow, &verdict, now)),
        };
        self.keep(key, Entry { verdict, seen: now, own }, now);
    }

    /// Announces the verdict for a flow that was just set.
    pub(crate) fn announce(&mut self, flow: &Flow, now: Time, origin: Origin<'_>) {
        let key = symmetric(flow);
        if let Some(Entry { own, verdict, .. }) = self.young.get_mut(&key) {
            origin.announce(own, (flow, key == *flow), verdict, now);
        }
    }

    /// Removes the verdicts of the inspector on `channel`.
    pub fn forget(&mut self, channel: u32) {
        self.retain(|verdict| verdict.channel != channel);
    }

    /// Removes the verdicts for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&FlowVerdict) -> bool) {
        self.young.retain(|_, entry| keep(&entry.verdict));
        self.old.retain(|_, entry| keep(&entry.verdict));
    }

    fn keep(&mut self, key: Flow, entry: Entry, now: Time) {
        if self.young.len() >= self.generation && !self.young.contains_key(&key) {
            self.age(now);
        }
        self.young.insert(key, entry);
    }

    /// The young generation becomes the old one, which is dropped.
    fn age(&mut self, now: Time) {
        std::mem::swap(&mut self.young, &mut self.old);
        let (aged, mut room) = (std::mem::replace(&mut self.aged, now), self.generation / 2);
        let before = self.young.len();
        self.young.retain(|_, entry| {
            let stays = room > 0 && entry.own.as_ref().is_some_and(|own| own.seen() > aged);
            room -= usize::from(stays);
            stays
        });
        self.stats.evicted += (before - self.young.len()) as u64;
    }
}

/// The flow in the one of its directions that stands for both.
pub fn symmetric(flow: &Flow) -> Flow {
    let backwards = match flow.ends {
        Ends::V4(src, dst) => (src, flow.src_port) > (dst, flow.dst_port),
        Ends::V6(src, dst, _) => (src, flow.src_port) > (dst, flow.dst_port),
    };
    if backwards { flow.reversed() } else { *flow }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn flow(n: u16) -> Flow {
        let ends = Ends::V4(Ipv4Addr::new(10, 0, 0, 9), Ipv4Addr::new(10, 0, 0, 2));
        Flow { ends, proto: 6, src_port: n, dst_port: 80, zone: 0 }
    }

    fn verdict(channel: u32) -> FlowVerdict {
        FlowVerdict { verdict: Verdict::Drop, mark: (0, 0), channel }
    }

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_verdict_applies_to_both_directions_until_idle_or_a_new_connection() {
        let mut flows = FlowVerdictCache::default();
        flows.insert(&flow(1), verdict(1), at(0));
        assert_eq!(flows.find(&flow(1).reversed(), false, at(299)), Some(verdict(1)));
        assert_eq!(flows.find(&flow(1), false, at(598)), Some(verdict(1)));
        assert_eq!(flows.find(&flow(2), false, at(598)), None);
        assert_eq!(flows.find(&flow(1), false, at(898)), None, "300 s idle");
        flows.insert(&flow(1), verdict(1), at(900));
        assert_eq!(flows.find(&flow(1), true, at(901)), None, "a SYN");
        assert_eq!(flows.find(&flow(1), false, at(902)), None, "the verdict is removed");
        assert_eq!(flows.stats(), Stats { given: 2, expired: 2, evicted: 0, kept: flows.len() as u64 });
    }

    #[test]
    fn forget_removes_the_verdicts_of_one_inspector() {
        let mut flows = FlowVerdictCache::with_room(2);
        flows.insert(&flow(1), verdict(1), at(0));
        flows.insert(&flow(2), verdict(2), at(0));
        flows.forget(1);
        assert_eq!(flows.find(&flow(1), false, at(1)), None);
        assert_eq!(flows.find(&flow(2), false, at(1)), Some(verdict(2)));
    }

    proptest! {
        /// The model: a map. A found verdict is the last one, the bound holds, and the most recent half is present.
        #[test]
        fn agrees_with_a_map(ops in proptest::collection::vec((any::<bool>(), 0u16..24), 1..300)) {
            const ROOM: usize = 8;
            let mut flows = FlowVerdictCache::with_room(ROOM);
            let mut last = HashMap::new();
            let mut recent: Vec<u16> = Vec::new();
            for (step, (insert, n)) in ops.into_iter().enumerate() {
                if insert {
                    flows.insert(&flow(n), verdict(step as u32), at(0));
                    last.insert(n, step as u32);
                } else {
                    let found = flows.find(&flow(n), false, at(0));
                    if let Some(found) = found {
                        prop_assert_eq!(Some(&found.channel), last.get(&n));
                    } else {
                        prop_assert!(!recent.contains(&n), "{} was used among the last {}", n, ROOM / 2);
                        continue;
                    }
                }
                recent.retain(|known| *known != n);
                recent.push(n);
                if recent.len() > ROOM / 2 {
                    recent.remove(0);
                }
                prop_assert!(flows.len() <= ROOM);
                let Stats { given, expired, evicted, .. } = flows.stats();
                // An insertion may replace a verdict.
                prop_assert!(flows.len() as u64 + expired + evicted <= given);
            }
        }
    }
}
