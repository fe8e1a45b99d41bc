//! The rows of answers: what `towpath ctl show` prints, a line each.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use towpath_gate::Diff;

use crate::report;
use crate::ruleset_manager::Rechecks;

/// A dynamic state. Pairs are forward and reverse.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Number of its rule.
    pub rule: u32,
    /// `state`, `limit` or `parent`.
    pub kind: String,
    /// Its flow name.
    pub name: String,
    /// IP protocol.
    pub proto: u8,
    /// Where the first packet came from.
    pub src: String,
    /// Its port; 0 where the protocol has none.
    pub src_port: u16,
    /// Where the first packet went.
    pub dst: String,
    /// Its port.
    pub dst_port: u16,
    /// Packets.
    pub packets: [u64; 2],
    /// Bytes.
    pub bytes: [u64; 2],
    /// Seconds to live.
    pub expire: u64,
    /// Its rule is gone.
    pub orphaned: bool,
    /// States that a parent counts.
    pub count: u32,
    /// As ipfw prints it.
    pub text: String,
}

/// Something that happened to a state, or to all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Nanoseconds of the engine's clock, which began when it did.
    pub at: u64,
    /// `created`, `expired`, `removed`, `evicted`, `nearly full`, `no longer full`.
    pub what: String,
    /// The state as it was then; none for what happens to all.
    pub state: Option<State>,
}

/// A table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// ipfw's word for its keys.
    pub kind: String,
    /// How many it has.
    pub entries: u64,
}

/// A pipe: it limits a rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pipe {
    /// Its number.
    pub number: u32,
    /// Bits a second; 0 is no limit.
    pub rate: u64,
    /// Bytes that may pass at once.
    pub burst: u64,
}

/// A queue. `frames = passed + dropped + replaced + lost + open`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Queue {
    /// The counters.
    #[serde(flatten)]
    pub counters: report::Queue,
    /// Frames that inspectors have now.
    pub open: u64,
    /// Most at one time.
    pub high_water: u64,
    /// Inspectors that are there.
    pub inspectors: u64,
    /// What went wrong, if something did.
    pub trouble: Option<String>,
}

/// A port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// The driver's word.
    pub driver: String,
    /// `up`, `down` or `gone`.
    pub state: String,
    /// Frames that came.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that left.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that the port lost, and packets that passed and could not leave, by reason.
    pub lost: Vec<(String, u64)>,
    /// Whom a router has looked for on its link.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub neighbors: Vec<Neighbor>,
}

/// A neighbor of a router.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbor {
    /// Its address.
    pub address: String,
    /// Its Ethernet address, while that is known.
    pub mac: Option<String>,
    /// `INCOMPLETE`, `REACHABLE`, `STALE`, `DELAY`, `PROBE` or `FAILED`.
    pub state: String,
}

/// Packets by outcome: `packets = passed + dropped + rejected + waiting`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Packets that came.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those that went on.
    pub passed: u64,
    /// Dropped packets.
    pub dropped: u64,
    /// Dropped packets by reason.
    #[serde(default)]
    pub dropped_by: BTreeMap<String, u64>,
    /// Those that a rule or an inspector rejected.
    pub rejected: u64,
    /// Those that wait for a verdict, or for other fragments.
    pub waiting: u64,
    /// Those that went to at least one inspector.
    pub inspected: u64,
    /// What became of the answers to rejected ones.
    pub replies: report::Replies,
    /// Dynamic states.
    pub states: report::States,
    /// How far the re-check of states is that came with the last reload.
    #[serde(default)]
    pub recheck: Rechecks,
}

impl Queue {
    /// Adds another thread's part.
    pub(super) fn add(&mut self, other: Self) {
        self.counters.add(&other.counters);
        self.open += other.open;
        self.high_water = self.high_water.max(other.high_water);
        // Each inspector serves every thread.
        self.inspectors = self.inspectors.max(other.inspectors);
        self.trouble = self.trouble.take().or(other.trouble);
    }
}

impl Port {
    /// Adds another thread's part.
    pub(super) fn add(&mut self, other: Self) {
        self.received += other.received;
        self.received_bytes += other.received_bytes;
        self.sent += other.sent;
        self.sent_bytes += other.sent_bytes;
        for (reason, count) in other.lost {
            match self.lost.iter_mut().find(|(own, _)| *own == reason) {
                Some((_, own)) => *own += count,
                None => self.lost.push((reason, count)),
            }
        }
        if other.state != "up" {
            self.state = other.state;
        }
    }
}

impl Stats {
    /// With another thread's part. States are the same for all.
    pub(super) fn plus(self, other: Self) -> Self {
        let mut replies = self.replies;
        replies.add(other.replies);
        Self {
            packets: self.packets + other.packets,
            bytes: self.bytes + other.bytes,
            passed: self.passed + other.passed,
            dropped: self.dropped + other.dropped,
            dropped_by: report::add_dropped_by(self.dropped_by, other.dropped_by),
            rejected: self.rejected + other.rejected,
            waiting: self.waiting + other.waiting,
            inspected: self.inspected + other.inspected,
            replies,
            states: other.states,
            recheck: other.recheck,
        }
    }
}

/// What commands changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Rules that are new, as `number text`.
    pub added: Vec<String>,
    /// Rules that are gone.
    pub removed: Vec<String>,
    /// How many rules stay, with their counters.
    pub kept: u64,
    /// Tables that are new, gone, or have other entries.
    pub tables: Vec<String>,
    /// States that went.
    pub states_dropped: u64,
    /// States that stay without a rule.
    pub states_orphaned: u64,
    /// What is allowed but was probably not meant.
    pub warnings: Vec<String>,
}

impl From<Diff> for Changes {
    fn from(diff: Diff) -> Self {
        let Diff { added, removed, kept, tables, states_dropped, states_orphaned } = diff;
        Self {
            added,
            removed,
            kept: kept as u64,
            tables,
            states_dropped: states_dropped as u64,
            states_orphaned: states_orphaned as u64,
            warnings: Vec::new(),
        }
    }
}
