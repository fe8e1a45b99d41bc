//! From changes of states to flow records: what was exported of each flow, so that counters are differences.
//!
//! The tracker is pure: records and times in, flow records out. It gets each change of the journal, and each state when the table is
//! scanned. Changes that the journal lost leave flows here that have ended: the scan after a loss removes them.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use towpath_gate::state::EventKind;
use towpath_gate::state::record::Record;
use towpath_wire::Time;

use super::message::{FlowRecord, Reason};
use crate::state_feed::EndReason;

/// Maximum number of flows. A flow beyond it has only a record at its end, whose start is the end.
const FLOWS: usize = 1 << 22;

/// What was exported of a flow.
#[derive(Clone, Copy, Debug)]
struct Tracked {
    /// Hash of the flow: the number of a state is used again after its end.
    key: u64,
    /// Time of its first packet.
    start: Time,
    /// Time of its last record, or of its start.
    sent: Time,
    packets: [u64; 2],
    bytes: [u64; 2],
    /// The last scan that found it.
    scan: u64,
}

/// The flows that are exported.
#[derive(Debug)]
pub(super) struct Tracker {
    flows: HashMap<u32, Tracked>,
    active_timeout: Duration,
    /// A record at the start of each flow.
    starts: bool,
    /// Number of the current scan. The first one is 1.
    scan: u64,
    /// Changes are missing: the scan whose end removes flows that have ended. 0: none.
    cleanup: u64,
    /// Ends of flows that were missed.
    pub(super) lost_ends: u64,
}

impl Tracker {
    pub(super) fn new(active_timeout: Duration, starts: bool) -> Self {
        Self { flows: HashMap::new(), active_timeout, starts, scan: 0, cleanup: 0, lost_ends: 0 }
    }

    /// Number of flows.
    pub(super) fn len(&self) -> usize {
        self.flows.len()
    }

    /// Takes a change.
    pub(super) fn change(&mut self, record: &Record<'_>) -> Option<FlowRecord> {
        let key = key(record);
        if let Some(reason) = EndReason::of(record) {
            let tracked = self.flows.remove(&record.id);
            self.lost_ends += u64::from(tracked.is_some_and(|tracked| tracked.key != key));
            let tracked = tracked.filter(|tracked| tracked.key == key).unwrap_or_else(|| new(record, key));
            return Some(flow(record, &tracked, Reason::from(reason)));
        }
        let known = self.flows.get_mut(&record.id);
        match (known, record.kind) {
            // Another engine has exported what the state counted before.
            (Some(tracked), Some(EventKind::Restored)) if tracked.key == key => {
                (tracked.packets, tracked.bytes) = (record.packets, record.bytes);
                None
            }
            (Some(tracked), _) if tracked.key == key => None,
            (Some(_), _) => {
                self.lost_ends += 1;
                self.begin(record, key)
            }
            (None, _) => self.begin(record, key),
        }
    }

    fn begin(&mut self, record: &Record<'_>, key: u64) -> Option<FlowRecord> {
        let mut tracked = Tracked { scan: self.scan, ..new(record, key) };
        let start = self.starts.then(|| flow(record, &tracked, Reason::Start));
        if start.is_some() {
            (tracked.packets, tracked.bytes) = (record.packets, record.bytes);
        }
        if self.flows.len() < FLOWS || self.flows.contains_key(&record.id) {
            self.flows.insert(record.id, tracked);
        }
        start
    }

    /// Changes are missing. Flows that the next two scans do not find have ended. (A state that expired during the first one is in no
    /// scan, and its end follows.)
    pub(super) fn gap(&mut self) {
        self.cleanup = self.scan + 2;
    }

    /// Begins a scan of the table. All changes before it were taken.
    pub(super) fn begin_scan(&mut self) {
        self.scan += 1;
    }

    /// Takes a state of the scan.
    pub(super) fn scanned(&mut self, record: &Record<'_>) -> Option<FlowRecord> {
        let key = key(record);
        match self.flows.get_mut(&record.id) {
            Some(tracked) if tracked.key == key => {
                tracked.scan = self.scan;
                if record.at.since(tracked.sent) < self.active_timeout {
                    return None;
                }
                let found = flow(record, tracked, Reason::Active);
                (tracked.sent, tracked.packets, tracked.bytes) = (record.at, record.packets, record.bytes);
                Some(found)
            }
            // The state that has this number now: its changes follow. If they were lost, the next scan finds it.
            Some(_) => None,
            // The change that began it follows, was lost, or is older than this engine's export.
            None => {
                let mut tracked = Tracked { scan: self.scan, ..new(record, key) };
                if self.scan == 1 {
                    (tracked.packets, tracked.bytes) = (record.packets, record.bytes);
                }
                if self.flows.len() < FLOWS {
                    self.flows.insert(record.id, tracked);
                }
                None
            }
        }
    }

    /// Ends a scan that found all states.
    pub(super) fn end_scan(&mut self) {
        if self.cleanup != 0 && self.scan >= self.cleanup {
            let before = self.flows.len();
            self.flows.retain(|_, tracked| tracked.scan + 1 >= self.scan);
            self.lost_ends += (before - self.flows.len()) as u64;
            self.cleanup = 0;
        }
    }

    /// The last record of a state of the last scan: the engine ends.
    pub(super) fn stopped(&mut self, record: &Record<'_>) -> Option<FlowRecord> {
        let key = key(record);
        let tracked = self.flows.remove(&record.id).filter(|tracked| tracked.key == key)?;
        Some(flow(record, &tracked, Reason::Forced))
    }
}

impl From<EndReason> for Reason {
    fn from(reason: EndReason) -> Self {
        match reason {
            EndReason::Idle => Self::Idle,
            EndReason::Closed => Self::End,
            EndReason::Removed => Self::Forced,
            EndReason::Evicted => Self::Resources,
        }
    }
}

fn key(record: &Record<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (record.flow, record.name).hash(&mut hasher);
    hasher.finish()
}

/// A flow of which nothing was exported.
fn new(record: &Record<'_>, key: u64) -> Tracked {
    let at = record.at;
    Tracked { key, start: at, sent: at, packets: [0; 2], bytes: [0; 2], scan: 0 }
}

/// The flow record of what changed since the last one. Its times are in milliseconds of the engine's clock.
fn flow(record: &Record<'_>, since: &Tracked, reason: Reason) -> FlowRecord {
    let less = |now: [u64; 2], before: [u64; 2]| [0, 1].map(|side| now[side].saturating_sub(before[side]));
    FlowRecord {
        flow: record.flow,
        id: record.id,
        rule: record.rule.hash,
        passes: None,
        start: since.start.as_nanos() / 1_000_000,
        end: record.at.as_nanos() / 1_000_000,
        bytes: less(record.bytes, since.bytes),
        packets: less(record.packets, since.packets),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_feed::tests::record;

    /// A record of state `id` at second `at` with this many packets.
    fn at(id: u32, kind: Option<EventKind>, at: u64, packets: [u64; 2]) -> Record<'static> {
        Record {
            at: Time::from_secs(at),
            packets,
            bytes: packets.map(|packets| packets * 100),
            ..record(id, kind)
        }
    }

    fn told(record: Option<FlowRecord>) -> Option<(Reason, u64, u64, [u64; 2])> {
        record.map(|record| (record.reason, record.start / 1000, record.end / 1000, record.packets))
    }

    #[test]
    fn the_records_of_a_flow_sum_to_its_counters() {
        for starts in [false, true] {
            let mut tracker = Tracker::new(Duration::from_secs(60), starts);
            let first = told(tracker.change(&at(1, Some(EventKind::Created), 10, [1, 0])));
            assert_eq!(first, starts.then_some((Reason::Start, 10, 10, [1, 0])));
            let one = u64::from(!starts);
            assert_eq!(tracker.change(&at(1, Some(EventKind::Replied), 11, [1, 1])), None);
            tracker.begin_scan();
            assert_eq!(tracker.scanned(&at(1, None, 69, [8, 7])), None);
            let active = told(tracker.scanned(&at(1, None, 70, [9, 7])));
            assert_eq!(active, Some((Reason::Active, 10, 70, [8 + one, 7])));
            assert_eq!(tracker.scanned(&at(1, None, 71, [9, 7])), None);
            let end = told(tracker.change(&at(1, Some(EventKind::Expired), 100, [12, 9])));
            assert_eq!(end, Some((Reason::Idle, 10, 100, [3, 2])));
            assert_eq!((tracker.len(), tracker.lost_ends), (0, 0));
        }
    }

    #[test]
    fn states_from_before_the_export_count_from_the_first_scan() {
        let mut tracker = Tracker::new(Duration::from_secs(60), true);
        tracker.begin_scan();
        assert_eq!(tracker.scanned(&at(1, None, 5, [100, 100])), None);
        tracker.end_scan();
        let end = told(tracker.change(&at(1, Some(EventKind::Removed), 9, [101, 103])));
        assert_eq!(end, Some((Reason::Forced, 5, 9, [1, 3])));
        // A later scan finds a state whose beginning was lost: nothing of it was exported.
        tracker.begin_scan();
        assert_eq!(tracker.scanned(&at(2, None, 20, [4, 4])), None);
        let end = told(tracker.change(&at(2, Some(EventKind::Evicted), 21, [5, 4])));
        assert_eq!(end, Some((Reason::Resources, 20, 21, [5, 4])));
    }

    #[test]
    fn a_restored_state_counts_from_its_restoration() {
        let mut tracker = Tracker::new(Duration::from_secs(60), false);
        assert_eq!(tracker.change(&at(1, Some(EventKind::Created), 5, [50, 50])), None);
        assert_eq!(tracker.change(&at(1, Some(EventKind::Restored), 5, [50, 50])), None);
        let end = told(tracker.change(&at(1, Some(EventKind::Expired), 9, [51, 50])));
        assert_eq!(end, Some((Reason::Idle, 5, 9, [1, 0])));
    }

    #[test]
    fn after_lost_changes_a_scan_removes_flows_that_ended() {
        let mut tracker = Tracker::new(Duration::from_secs(60), false);
        for id in 1..=3 {
            tracker.change(&at(id, Some(EventKind::Created), 1, [1, 0]));
        }
        tracker.gap();
        // Meanwhile, 1 has ended, and 2 has ended and its number is another flow's.
        let other = |kind, at_second| {
            let mut record = at(2, kind, at_second, [1, 1]);
            record.flow.src_port = 1;
            record
        };
        for second in [2, 20] {
            tracker.begin_scan();
            assert_eq!(tracker.scanned(&other(None, second)), None);
            assert_eq!(tracker.scanned(&at(3, None, second, [1, 0])), None);
            // A flow that began during the scan stays.
            tracker.change(&at(4, Some(EventKind::Created), 2, [1, 0]));
            tracker.end_scan();
            assert_eq!((tracker.len(), tracker.lost_ends), if second == 2 { (4, 0) } else { (2, 2) });
        }
        // The end of the other flow has all that it counted.
        let end = told(tracker.change(&other(Some(EventKind::Expired), 24)));
        assert_eq!(end, Some((Reason::Idle, 24, 24, [1, 1])));
        // The number of a flow whose end was lost begins another flow.
        let mut another = at(3, Some(EventKind::Created), 25, [1, 0]);
        another.flow.src_port = 2;
        assert_eq!(tracker.change(&another), None);
        assert_eq!((tracker.len(), tracker.lost_ends), (2, 3));
    }

    #[test]
    fn a_stop_ends_all_flows() {
        let mut tracker = Tracker::new(Duration::from_secs(60), false);
        tracker.change(&at(1, Some(EventKind::Created), 1, [1, 0]));
        let end = told(tracker.stopped(&at(1, None, 3, [2, 1])));
        assert_eq!(end, Some((Reason::Forced, 1, 3, [2, 1])));
        assert_eq!((tracker.stopped(&at(1, None, 3, [2, 1])), tracker.len()), (None, 0));
    }
}
