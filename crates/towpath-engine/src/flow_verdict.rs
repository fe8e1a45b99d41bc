//! Verdicts that are for a flow from now on.
//!
//! An inspector may say "this flow from now on" with its verdict. The flow's later packets, in both directions, get the
//! verdict and the mark without going to the inspector, wherever a rule sends them to that inspector's queue. Rules come
//! first: a packet that no rule sends to the queue is not concerned, so a reload of the rules needs no change here. A
//! verdict ends:
//! - when the flow has been silent for [`IDLE`] on the engine's clock;
//! - with a TCP SYN that has no ACK: the same addresses and ports, and another connection;
//! - when the inspector that gave it is detached for breaking the protocol. One that merely ends leaves its verdicts
//!   behind, as connection marks outlive the program behind an NFQUEUE;
//! - when there are more flows than room: the ones that were silent longest go, and their packets are inspected again.
//!
//! Two generations keep the bound without a list: a flow that is seen moves to the young one; when that is full the old
//! one is forgotten, and the young becomes the old.

use std::collections::HashMap;

use towpath_gate::state::{Ends, Flow};
use towpath_wire::Time;

/// Nanoseconds of silence after which a flow's verdict ends: the lifetime of ipfw's established states
/// (`dyn_ack_lifetime`).
pub const IDLE: u64 = 300_000_000_000;

/// FlowVerdictCache of one generation.
const GENERATION: usize = 1 << 15;

/// What was said of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowVerdict {
    /// What becomes of its packets.
    pub verdict: Verdict,
    /// New bits of the mark, and which bits change.
    pub mark: (u32, u32),
    /// The channel of the inspector that said so.
    pub channel: u32,
}

/// Verdicts that can be for a flow. A replacement is about one packet, and so is "walk the rules again", which would
/// lead back here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Let it go on.
    Pass,
    /// Drop it.
    Drop,
    /// Drop it and tell the sender.
    Reject,
    /// Hand it to another queue.
    Queue(u16),
}

/// What the table has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Verdicts that were given for a flow.
    pub given: u64,
    /// Verdicts that ended because the flow was silent, or began anew.
    pub expired: u64,
    /// Verdicts that gave way to newer ones.
    pub evicted: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct FlowVerdictCache {
    young: HashMap<Flow, Entry>,
    old: HashMap<Flow, Entry>,
    generation: usize,
    stats: Stats,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    verdict: FlowVerdict,
    seen: Time,
}

impl Default for FlowVerdictCache {
    fn default() -> Self {
        Self::with_room(2 * GENERATION)
    }
}

impl FlowVerdictCache {
    /// Room for at most `flows` flows, and for half as many at least.
    pub fn with_room(flows: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            generation: (flows / 2).max(1),
            stats: Stats::default(),
        }
    }

    /// True when nothing was said about any flow.
    pub fn is_empty(&self) -> bool {
        self.young.is_empty() && self.old.is_empty()
    }

    /// FlowVerdictCache that something was said about and that have not been found silent.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// What it has done.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// What was said of the flow that a packet at `now` belongs to. `new`: the packet begins a connection.
    pub fn find(&mut self, flow: &Flow, new: bool, now: Time) -> Option<FlowVerdict> {
        let key = key(flow);
        let in_old = !self.young.contains_key(&key);
        let entry = if in_old { self.old.get_mut(&key) } else { self.young.get_mut(&key) }?;
        if new || now.since(entry.seen).as_nanos() >= u128::from(IDLE) {
            self.stats.expired += 1;
            if in_old {
                self.old.remove(&key)
            } else {
                self.young.remove(&key)
            };
            return None;
        }
        entry.seen = now;
        let entry = *entry;
        if in_old {
            self.old.remove(&key);
            self.keep(key, entry);
        }
        Some(entry.verdict)
    }

    /// From now on `verdict` is what becomes of the flow's packets.
    pub fn insert(&mut self, flow: &Flow, verdict: FlowVerdict, now: Time) {
        let key = key(flow);
        self.old.remove(&key);
        self.stats.given += 1;
        self.keep(key, Entry { verdict, seen: now });
    }

    /// Forgets what the inspector on `channel` said.
    pub fn forget(&mut self, channel: u32) {
        self.young.retain(|_, entry| entry.verdict.channel != channel);
        self.old.retain(|_, entry| entry.verdict.channel != channel);
    }

    fn keep(&mut self, key: Flow, entry: Entry) {
        if self.young.len() >= self.generation && !self.young.contains_key(&key) {
            std::mem::swap(&mut self.young, &mut self.old);
            self.stats.evicted += self.young.len() as u64;
            self.young.clear();
        }
        self.young.insert(key, entry);
    }
}

/// The same for both directions of a flow.
fn key(flow: &Flow) -> Flow {
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
        Flow { ends, proto: 6, src_port: n, dst_port: 80, tenant: 0 }
    }

    fn verdict(channel: u32) -> FlowVerdict {
        FlowVerdict { verdict: Verdict::Drop, mark: (0, 0), channel }
    }

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_verdict_is_for_both_directions_until_silence_or_a_new_connection() {
        let mut flows = FlowVerdictCache::default();
        flows.insert(&flow(1), verdict(1), at(0));
        assert_eq!(flows.find(&flow(1).reversed(), false, at(299)), Some(verdict(1)));
        assert_eq!(flows.find(&flow(1), false, at(598)), Some(verdict(1)));
        assert_eq!(flows.find(&flow(2), false, at(598)), None);
        assert_eq!(flows.find(&flow(1), false, at(898)), None, "300 s of silence");
        flows.insert(&flow(1), verdict(1), at(900));
        assert_eq!(flows.find(&flow(1), true, at(901)), None, "a SYN");
        assert_eq!(flows.find(&flow(1), false, at(902)), None, "it does not come back");
        assert_eq!(flows.stats(), Stats { given: 2, expired: 2, evicted: 0 });
    }

    #[test]
    fn what_a_distrusted_inspector_said_is_forgotten() {
        let mut flows = FlowVerdictCache::with_room(2);
        flows.insert(&flow(1), verdict(1), at(0));
        flows.insert(&flow(2), verdict(2), at(0));
        flows.forget(1);
        assert_eq!(flows.find(&flow(1), false, at(1)), None);
        assert_eq!(flows.find(&flow(2), false, at(1)), Some(verdict(2)));
    }

    proptest! {
        /// Against a plain map: what is found was said last, the bound holds, and the most recent half is always there.
        #[test]
        fn agrees_with_a_map(ops in proptest::collection::vec((any::<bool>(), 0u16..24), 1..300)) {
            const ROOM: usize = 8;
            let mut flows = FlowVerdictCache::with_room(ROOM);
            let mut said = HashMap::new();
            let mut recent: Vec<u16> = Vec::new();
            for (step, (insert, n)) in ops.into_iter().enumerate() {
                if insert {
                    flows.insert(&flow(n), verdict(step as u32), at(0));
                    said.insert(n, step as u32);
                } else {
                    let found = flows.find(&flow(n), false, at(0));
                    if let Some(found) = found {
                        prop_assert_eq!(Some(&found.channel), said.get(&n));
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
                let Stats { given, expired, evicted } = flows.stats();
                // An insertion may replace what was there.
                prop_assert!(flows.len() as u64 + expired + evicted <= given);
            }
        }
    }
}
