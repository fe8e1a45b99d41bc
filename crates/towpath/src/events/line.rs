//! Events as JSON, one object per line. docs/book/src/reference/flow-records.md lists the fields.

use std::io::Write;
use std::net::IpAddr;

use serde::Serialize;
use towpath_gate::state::EventKind;
use towpath_gate::state::record::{Record, RecordPort};
use towpath_gate::{Dir, LogEntry, Suppressed, SuppressedBy};
use towpath_wire::{Addresses, Time};

use crate::packet_log::utc;
use crate::state_feed::EndReason;

/// A change of a state. Pairs are forward and reverse.
#[derive(Debug, Serialize)]
struct StateEvent<'a> {
    time: String,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    id: u32,
    rule: u32,
    rule_hash: String,
    name: &'a str,
    zone: u16,
    proto: u8,
    src: IpAddr,
    src_port: u16,
    dst: IpAddr,
    dst_port: u16,
    packets: [u64; 2],
    bytes: [u64; 2],
    expire: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    direction: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<&'a str>,
}

/// An event without a state and without a packet.
#[derive(Debug, Serialize)]
struct Notice {
    time: String,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

/// A packet.
#[derive(Debug, Default, Serialize)]
struct PacketLine<'a> {
    time: String,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    direction: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ethertype: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proto: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    src: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    src_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    icmp: Option<[u8; 2]>,
    /// Bytes of a malformed frame.
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<u32>,
}

fn put(line: &impl Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(&mut *out, line).expect("strings and numbers serialise");
    writeln!(out).expect("a Vec takes everything");
}

fn written(time: Time) -> String {
    utc(time, true).to_string()
}

/// Returns true if this packet was dropped without the decision of a rule, or its state was refused.
pub(super) fn is_drop(entry: &LogEntry) -> bool {
    reason(entry.action).is_some()
}

/// The drop reason in the words of the log: `Drop (no_route)`, `Deny (states_full)`.
fn reason(action: &str) -> Option<&str> {
    let (_, reason) = action.strip_suffix(')')?.split_once(" (")?;
    Some(reason)
}

/// Appends a change of a state; `time` is its time since 1970.
pub fn state(record: &Record<'_>, time: Time, out: &mut Vec<u8>) {
    let end = EndReason::of(record);
    let event = match (record.kind, end) {
        (_, Some(_)) => "ended",
        (Some(kind), None) => kind.as_str(),
        (None, None) => return,
    };
    let (src, dst) = record.flow.ends.addresses();
    let port = record.origin.and_then(|origin| match origin.port {
        RecordPort::Named(name) => Some(name),
        RecordPort::None | RecordPort::Unrecorded => None,
    });
    let line = StateEvent {
        time: written(time),
        event,
        reason: end.map(EndReason::as_str),
        id: record.id,
        rule: record.rule.number,
        rule_hash: format!("{:016x}", record.rule.hash),
        name: record.name,
        zone: record.flow.zone,
        proto: record.flow.proto,
        src,
        src_port: record.flow.src_port,
        dst,
        dst_port: record.flow.dst_port,
        packets: record.packets,
        bytes: record.bytes,
        expire: record.remaining.as_secs() + u64::from(record.remaining.subsec_nanos() > 0),
        direction: record.origin.map(|origin| if origin.outgoing { "out" } else { "in" }),
        port,
    };
    put(&line, out);
}

/// Appends a change of the state table.
pub fn table(kind: EventKind, time: Time, out: &mut Vec<u8>) {
    let event = if kind == EventKind::NearlyFull { "nearly_full" } else { "no_longer_full" };
    put(&Notice { time: written(time), event, rule: None, reason: None, count: None }, out);
}

/// Appends the number of events that are missing here.
pub fn lost(reason: &'static str, count: u64, time: Time, out: &mut Vec<u8>) {
    put(
        &Notice { time: written(time), event: "lost", rule: None, reason: Some(reason), count: Some(count) },
        out,
    );
}

/// Appends the number of packets of a `log` rule, or with a drop reason, that have no event.
pub(super) fn suppressed(summary: &Suppressed, time: Time, out: &mut Vec<u8>) {
    let reason = match summary.by {
        SuppressedBy::Limit(_) => "limit",
        SuppressedBy::Rate(action) => reason(action).unwrap_or("rate"),
        SuppressedBy::Full => "full",
        SuppressedBy::Other => "other",
    };
    let (rule, count) = (summary.rule, Some(summary.lines));
    put(&Notice { time: written(time), event: "suppressed", rule, reason: Some(reason), count }, out);
}

/// Appends a logged packet; `port` is the name of its port.
pub(super) fn packet(entry: &LogEntry, port: Option<&str>, time: Time, out: &mut Vec<u8>) {
    let addresses: Option<(IpAddr, IpAddr)> = match entry.addresses {
        Addresses::None => None,
        Addresses::V4(src, dst) => Some((src.into(), dst.into())),
        Addresses::V6(src, dst) => Some((src.into(), dst.into())),
    };
    let reason = reason(entry.action);
    let line = PacketLine {
        time: written(time),
        event: if reason.is_some() { "drop" } else { "verdict" },
        rule: entry.rule,
        action: reason.is_none().then_some(entry.action),
        reason,
        direction: if entry.dir == Dir::In { "in" } else { "out" },
        port,
        ethertype: entry.malformed_len.is_none().then_some(entry.ethertype),
        proto: addresses.map(|_| entry.proto),
        src: addresses.map(|(src, _)| src),
        src_port: entry.ports.map(|(src, _)| src),
        dst: addresses.map(|(_, dst)| dst),
        dst_port: entry.ports.map(|(_, dst)| dst),
        icmp: entry.icmp.map(|(kind, code)| [kind, code]),
        length: entry.malformed_len,
    };
    put(&line, out);
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use towpath_gate::PacketSpec;
    use towpath_wire as wire;

    use super::*;
    use crate::state_feed::tests::record;

    fn read(out: &[u8]) -> Value {
        let text = std::str::from_utf8(out).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_state_has_all_fields() {
        let mut out = Vec::new();
        state(&record(1, Some(EventKind::Replied)), Time::from_secs(7), &mut out);
        let expected = json!({
            "time": "1970-01-01T00:00:07.000000Z", "event": "replied", "id": 1, "rule": 400,
            "rule_hash": "af63dc4c8601ec8c", "name": "web", "zone": 3, "proto": 6,
            "src": "10.0.0.1", "src_port": 4001, "dst": "10.0.0.2", "dst_port": 80,
            "packets": [7, 5], "bytes": [700, 50_000], "expire": 300, "direction": "in", "port": "wan",
        });
        assert_eq!(read(&out), expected);
        for (kind, reason) in
            [(EventKind::Expired, "idle"), (EventKind::Removed, "removed"), (EventKind::Evicted, "evicted")]
        {
            out.clear();
            state(&record(1, Some(kind)), Time::from_secs(7), &mut out);
            let line = read(&out);
            assert_eq!((&line["event"], &line["reason"]), (&json!("ended"), &json!(reason)));
        }
    }

    #[test]
    fn packets_have_their_rule_or_their_drop_reason() {
        let spec = PacketSpec::parse("udp 10.0.0.1:5 > 10.0.0.2:53").unwrap();
        let parsed = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        let entry = |rule, action| LogEntry::new(Time::default(), rule, action, Dir::In, None, &parsed);
        let mut out = Vec::new();
        packet(&entry(Some(100), "Deny"), Some("wan"), Time::from_secs(1), &mut out);
        let expected = json!({
            "time": "1970-01-01T00:00:01.000000Z", "event": "verdict", "rule": 100, "action": "Deny",
            "direction": "in", "port": "wan", "ethertype": 0x800, "proto": 17,
            "src": "10.0.0.1", "src_port": 5, "dst": "10.0.0.2", "dst_port": 53,
        });
        assert_eq!(read(&out), expected);
        for action in ["Drop (no_route)", "Deny (no_route)"] {
            out.clear();
            let entry = entry(None, action);
            assert!(is_drop(&entry));
            packet(&entry, None, Time::default(), &mut out);
            let line = read(&out);
            assert_eq!((&line["event"], &line["reason"]), (&json!("drop"), &json!("no_route")));
            assert!(line.get("action").is_none() && line.get("port").is_none());
        }
        out.clear();
        let malformed = LogEntry::malformed(Time::default(), "Drop (malformed_ip4)", None, 60);
        packet(&malformed, None, Time::default(), &mut out);
        let line = read(&out);
        assert_eq!((&line["reason"], &line["length"]), (&json!("malformed_ip4"), &json!(60)));
        assert!(line.get("proto").is_none());
    }

    #[test]
    fn counts_of_missing_events_are_lines() {
        let mut out = Vec::new();
        lost("slow", 3, Time::default(), &mut out);
        let line = read(&out);
        assert_eq!(
            (&line["event"], &line["reason"], &line["count"]),
            (&json!("lost"), &json!("slow"), &json!(3))
        );
        out.clear();
        let by = SuppressedBy::Limit(5);
        suppressed(
            &Suppressed { time: Time::default(), rule: Some(9), by, lines: 4 },
            Time::default(),
            &mut out,
        );
        let line = read(&out);
        assert_eq!(
            (&line["event"], &line["rule"], &line["count"]),
            (&json!("suppressed"), &json!(9), &json!(4))
        );
    }
}
