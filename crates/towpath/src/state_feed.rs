//! Changes of states as records, for threads that export them: IPFIX, events, and rings.
//!
//! A feed has its own cursor in the table's journal. The packet threads do not wait for it: a feed that is slower than the journal is
//! long gets the number of changes that it missed. The gate is locked for `CHUNK` changes at a time, to resolve names of rules and
//! ports.

use std::sync::Arc;
use std::time::Duration;

use towpath_gate::RuleRefs;
use towpath_gate::state::record::Record;
use towpath_gate::state::{Changes, Cursor, EventKind, JournalRead, JournalReader, StateEvent};
use towpath_wire::Time;

use crate::ruleset_manager::RulesetManager;

/// Interval at which a feed is read. The journal holds 65,536 changes: 3 million per second.
pub const TICK: Duration = Duration::from_millis(20);

/// Changes that are encoded while the rules are locked.
const CHUNK: usize = 1024;

/// An item of the feed, in the order of the changes.
#[derive(Clone, Debug, PartialEq)]
pub enum Change<'a> {
    /// A change of a state.
    State(&'a Record<'a>),
    /// A change of the whole table, and its time.
    Table(EventKind, Time),
    /// This many changes are missing here.
    Gap(u64),
}

/// A reader of the changes of states.
pub struct StateFeed {
    journal: JournalReader,
    events: Vec<StateEvent>,
    scanner: StateScanner,
}

/// A reader of the states as they are.
pub struct StateScanner {
    ruleset: Arc<RulesetManager>,
    refs: RuleRefs,
    /// The version of rules and tables that `refs` has.
    version: Option<u64>,
    bytes: Vec<u8>,
}

impl StateFeed {
    /// A feed of the changes from now on.
    pub fn new(ruleset: &Arc<RulesetManager>) -> Self {
        Self::of(ruleset, Changes::All)
    }

    /// A feed of these changes from now on.
    pub fn of(ruleset: &Arc<RulesetManager>, changes: Changes) -> Self {
        Self { journal: ruleset.journal(changes), events: Vec::new(), scanner: StateScanner::new(ruleset) }
    }

    /// Passes at most `max` changes to `each`, rounded up to `CHUNK`. Returns true if there may be more.
    pub fn read(&mut self, max: usize, mut each: impl FnMut(Change<'_>)) -> bool {
        let mut taken = 0;
        while taken < max {
            self.events.clear();
            // What ended the chunk: an event of the table or a gap, which has no record.
            let mut end = None;
            let mut empty = false;
            while self.events.len() < CHUNK {
                match self.journal.read() {
                    JournalRead::Change(event) if event.kind.is_of_table() => {
                        end = Some(Change::Table(event.kind, event.at));
                        break;
                    }
                    JournalRead::Change(event) => self.events.push(event),
                    JournalRead::Gap(changes) => {
                        end = Some(Change::Gap(changes));
                        break;
                    }
                    JournalRead::End => {
                        empty = true;
                        break;
                    }
                }
            }
            taken += self.events.len() + 1;
            if !self.events.is_empty() {
                self.scanner.changes(&self.events, |record| each(Change::State(record)));
            }
            if let Some(end) = end {
                each(end);
            }
            if empty {
                return false;
            }
        }
        true
    }

    /// As [`StateScanner::scan`].
    pub fn scan(&mut self, from: Cursor, slots: u32, each: impl FnMut(&Record<'_>)) -> Option<Cursor> {
        self.scanner.scan(from, slots, each)
    }
}

impl StateScanner {
    /// A reader of the states.
    pub fn new(ruleset: &Arc<RulesetManager>) -> Self {
        let ruleset = Arc::clone(ruleset);
        Self { ruleset, refs: RuleRefs::default(), version: None, bytes: Vec::new() }
    }

    /// Passes the states in the next `slots` slots of the table to `each`. Returns the cursor that continues, or `None` at the end.
    pub fn scan(&mut self, from: Cursor, slots: u32, mut each: impl FnMut(&Record<'_>)) -> Option<Cursor> {
        self.update_refs();
        self.bytes.clear();
        let next = self.ruleset.snapshot_part(&self.refs, from, slots, &mut self.bytes);
        records(&self.bytes, |record| each(record));
        next
    }

    /// As [`scan`](Self::scan), without a copy of the records: `each` takes little time and must not use the rules, which are locked.
    pub fn scan_locked(&mut self, from: Cursor, slots: u32, each: impl FnMut(&Record<'_>)) -> Option<Cursor> {
        self.update_refs();
        self.ruleset.scan_part(&self.refs, from, slots, each)
    }

    fn changes(&mut self, events: &[StateEvent], mut each: impl FnMut(&Record<'_>)) {
        self.update_refs();
        self.bytes.clear();
        self.ruleset.snapshot_changes(&self.refs, events, &mut self.bytes);
        records(&self.bytes, |record| each(record));
    }

    fn update_refs(&mut self) {
        let version = Some(self.ruleset.version());
        if version != self.version {
            self.ruleset.update_refs(&mut self.refs);
            self.version = version;
        }
    }
}

/// Passes the records in `bytes` to `each`.
fn records(mut bytes: &[u8], mut each: impl FnMut(&Record<'_>)) {
    // The records are those of this process: they decode.
    while let Ok((record, length)) = Record::decode(bytes) {
        each(&record);
        bytes = &bytes[length..];
    }
}

/// Why a state ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// No packet arrived during its lifetime.
    Idle,
    /// The TCP connection was closed or reset, and its state expired.
    Closed,
    /// It was removed: by a command, with its rule, or by a re-check.
    Removed,
    /// It was evicted to make room for another state.
    Evicted,
}

impl EndReason {
    /// The reason of a record, if it is the end of a state.
    pub fn of(record: &Record<'_>) -> Option<Self> {
        match record.kind? {
            EventKind::Expired if record.has_closed() => Some(Self::Closed),
            EventKind::Expired => Some(Self::Idle),
            EventKind::Removed => Some(Self::Removed),
            EventKind::Evicted => Some(Self::Evicted),
            _ => None,
        }
    }

    /// The word in events.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Closed => "closed",
            Self::Removed => "removed",
            Self::Evicted => "evicted",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::Ipv4Addr;

    use towpath_gate::rules::Ruleset;
    use towpath_gate::state::Settings;
    use towpath_gate::state::record::{RecordOrigin, RecordPort, RuleRef};
    use towpath_gate::{Dir, Gate, PacketSpec, Ports, Walk, Walker};
    use towpath_wire::{self as wire, Ends, Flow, proto};

    use super::*;

    /// A record of a TCP connection from 10.0.0.1 port 4000+`id` to 10.0.0.2 port 80.
    pub(crate) fn record(id: u32, kind: Option<EventKind>) -> Record<'static> {
        Record {
            kind,
            id,
            at: Time::from_secs(5),
            flow: Flow {
                ends: Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into()),
                proto: proto::TCP,
                src_port: 4000 + id as u16,
                dst_port: 80,
                zone: 3,
            },
            rule: RuleRef { hash: 0xaf63_dc4c_8601_ec8c, number: 400 },
            name: "web",
            limited: false,
            replied: true,
            remaining: Duration::from_secs(300),
            seen: 0o22,
            tcp_ack: [0; 2],
            packets: [7, 5],
            bytes: [700, 50_000],
            lifetime: None,
            every_packet: false,
            window: None,
            origin: Some(RecordOrigin { outgoing: false, port: RecordPort::Named("wan") }),
        }
    }

    /// A manager of these rules, and a walker that makes states.
    pub(crate) fn world(rules: &str) -> (Arc<RulesetManager>, Walker) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset.clone(), Ports::new(), Settings::default(), 1);
        let walker = gate.walker().unwrap();
        (Arc::new(RulesetManager::new(gate, ruleset, false)), walker)
    }

    pub(crate) fn walk(walker: &mut Walker, packet: &str, now: Time) {
        let spec = PacketSpec::parse(packet).unwrap();
        let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now);
    }

    #[test]
    fn a_feed_has_the_records_of_the_changes_with_the_rules_of_then() {
        let (ruleset, mut walker) = world("add 100 allow udp from any to any keep-state");
        let mut feed = StateFeed::new(&ruleset);
        let mut read = || {
            let mut seen = Vec::new();
            let more = feed.read(usize::MAX, |change| match change {
                Change::State(record) => {
                    let Ends::V4(src, _) = record.flow.ends else { panic!("{record:?}") };
                    seen.push((record.kind.unwrap(), src, record.rule.number, record.packets));
                }
                other => panic!("{other:?}"),
            });
            assert!(!more);
            seen
        };
        let (one, two) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 9));
        walk(&mut walker, "udp 10.0.0.1:1 > 10.0.0.2:53", Time::from_secs(1));
        walk(&mut walker, "udp 10.0.0.2:53 > 10.0.0.1:1", Time::from_secs(1));
        assert_eq!(read(), [(EventKind::Created, one, 100, [1, 0]), (EventKind::Replied, one, 100, [1, 1])]);
        ruleset.command("add 50 allow udp from 10.0.0.9 to any keep-state").unwrap();
        walk(&mut walker, "udp 10.0.0.9:1 > 10.0.0.2:53", Time::from_secs(2));
        assert_eq!(read(), [(EventKind::Created, two, 50, [1, 0])]);
        let mut found = Vec::new();
        let mut next = Some(Cursor::default());
        while let Some(at) = next {
            next = feed.scan(at, 1000, |record| found.push((record.rule.number, record.kind)));
        }
        found.sort_unstable_by_key(|(number, _)| *number);
        assert_eq!(found, [(50, None), (100, None)]);
    }

    #[test]
    fn a_tcp_connection_that_was_closed_or_reset_has_not_expired_idle() {
        let rows = [
            (0o00, proto::TCP, EndReason::Idle),
            (0o22, proto::TCP, EndReason::Idle),
            (0o23, proto::TCP, EndReason::Idle),
            (0o33, proto::TCP, EndReason::Closed),
            (0o26, proto::TCP, EndReason::Closed),
            (0o62, proto::TCP, EndReason::Closed),
            (0o33, proto::UDP, EndReason::Idle),
        ];
        for (seen, proto, expected) in rows {
            let mut record = record(1, Some(EventKind::Expired));
            (record.seen, record.flow.proto) = (seen, proto);
            assert_eq!(EndReason::of(&record), Some(expected), "{seen:o}");
        }
        for kind in [EventKind::Created, EventKind::Restored, EventKind::Replied, EventKind::Updated] {
            assert_eq!(EndReason::of(&record(1, Some(kind))), None);
        }
        assert_eq!(EndReason::of(&record(1, Some(EventKind::Evicted))), Some(EndReason::Evicted));
        assert_eq!(EndReason::of(&record(1, Some(EventKind::Removed))), Some(EndReason::Removed));
    }
}
