//! The views: tables with rates, from two samples. No IO.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::flows::{self, Flows};
use super::sample::{Part, Sample, seconds};
use super::table::{Cell, Column, Kind, Row, Sort, Table};
use crate::control::text::items;

/// A view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum View {
    Ports,
    Rules,
    Flows,
    Inspectors,
    Muxes,
    Drops,
}

const fn column(title: &'static str, key: &'static str, kind: Kind) -> Column {
    Column { title, key, kind }
}

/// The columns of the ports.
const PORTS: &[Column] = &[
    column("port", "name", Kind::Text),
    column("driver", "driver", Kind::Text),
    column("state", "state", Kind::Text),
    column("rx/s", "received_per_second", Kind::Count),
    column("rx bit/s", "received_bits_per_second", Kind::Count),
    column("tx/s", "sent_per_second", Kind::Count),
    column("tx bit/s", "sent_bits_per_second", Kind::Count),
    column("lost/s", "lost_per_second", Kind::Count),
    column("lost", "lost", Kind::Count),
];

/// The columns of the rules.
const RULES: &[Column] = &[
    column("rule", "number", Kind::Id),
    column("set", "set", Kind::Id),
    column("pkt/s", "packets_per_second", Kind::Count),
    column("bit/s", "bits_per_second", Kind::Count),
    column("packets", "packets", Kind::Count),
    column("bytes", "bytes", Kind::Count),
    column("text", "text", Kind::Tail),
];

/// The columns of the flows.
const FLOWS: &[Column] = &[
    column("pkt/s", "packets_per_second", Kind::Count),
    column("bit/s", "bits_per_second", Kind::Count),
    column("packets", "packets", Kind::Count),
    column("bytes", "bytes", Kind::Count),
    column("rule", "rule", Kind::Id),
    column("left", "expire", Kind::Id),
    column("flow", "flow", Kind::Tail),
];

/// The columns of the inspectors: a row for each queue, and one for each channel.
const INSPECTORS: &[Column] = &[
    column("queue", "queue", Kind::Id),
    column("chan", "channel", Kind::Id),
    column("pid", "pid", Kind::Id),
    column("frm/s", "frames_per_second", Kind::Count),
    column("verd/s", "verdicts_per_second", Kind::Count),
    column("open", "open", Kind::Count),
    column("oldest", "oldest", Kind::Nanos),
    column("lost/s", "lost_per_second", Kind::Count),
    column("lost", "lost", Kind::Count),
    column("inspector", "inspector", Kind::Tail),
];

/// The columns of the muxes: a row for each mux, and one for each worker.
const MUXES: &[Column] = &[
    column("rx/s", "received_per_second", Kind::Count),
    column("rx bit/s", "received_bits_per_second", Kind::Count),
    column("tx/s", "sent_per_second", Kind::Count),
    column("tx bit/s", "sent_bits_per_second", Kind::Count),
    column("wait", "waiting", Kind::Count),
    column("held", "held", Kind::Count),
    column("conns", "connections", Kind::Count),
    column("p99", "service_p99", Kind::Nanos),
    column("mux", "mux", Kind::Tail),
];

/// The columns of the drops.
const DROPS: &[Column] = &[
    column("per s", "per_second", Kind::Count),
    column("total", "total", Kind::Count),
    column("by", "by", Kind::Text),
    column("reason", "reason", Kind::Tail),
];

impl View {
    pub(super) const ALL: [Self; 6] =
        [Self::Ports, Self::Rules, Self::Flows, Self::Inspectors, Self::Muxes, Self::Drops];

    /// Its name, also in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ports => "ports",
            Self::Rules => "rules",
            Self::Flows => "flows",
            Self::Inspectors => "inspectors",
            Self::Muxes => "muxes",
            Self::Drops => "drops",
        }
    }

    pub(super) fn columns(self) -> &'static [Column] {
        match self {
            Self::Ports => PORTS,
            Self::Rules => RULES,
            Self::Flows => FLOWS,
            Self::Inspectors => INSPECTORS,
            Self::Muxes => MUXES,
            Self::Drops => DROPS,
        }
    }

    /// The order at the start.
    pub(super) fn sort(self) -> Sort {
        match self {
            Self::Flows => Sort { column: Some(1), descending: true },
            Self::Drops => Sort { column: Some(0), descending: true },
            _ => Sort { column: None, descending: true },
        }
    }

    /// The parts that the view needs besides the packet counters.
    pub(super) fn parts(self) -> &'static [Part] {
        match self {
            Self::Ports => &[Part::Ports],
            Self::Rules => &[Part::Rules],
            Self::Flows => &[],
            Self::Inspectors => &[Part::Queues, Part::Rings],
            Self::Muxes => &[Part::Mux],
            Self::Drops => &[Part::Ports, Part::Queues],
        }
    }

    /// The table of the view.
    pub(super) fn table(self, pair: &Pair<'_>, flows: &Flows) -> Table {
        let rows = match self {
            Self::Ports => ports(pair),
            Self::Rules => rules(pair),
            Self::Flows => flow_rows(flows),
            Self::Inspectors => inspectors(pair),
            Self::Muxes => muxes(pair),
            Self::Drops => drops(pair),
        };
        Table { columns: self.columns(), note: self.note(pair, flows, rows.len()), rows }
    }

    fn note(self, pair: &Pair<'_>, flows: &Flows, rows: usize) -> Option<String> {
        let now = pair.now;
        match self {
            Self::Flows => match &now.flows {
                Some(Err(refusal)) => Some(refusal.clone()),
                _ if !flows.complete && flows.len() > 0 => {
                    Some(format!("{} flows of more; the busiest, and those read so far", flows.len()))
                }
                _ => None,
            },
            Self::Rules if now.part(Part::Rules)["more"] == true => Some(format!("the first {rows} rules")),
            // An engine without ports has drops.
            Self::Drops => None,
            _ => self.parts().iter().find_map(|part| now.refusal(*part)).map(str::to_owned),
        }
    }
}

/// A sample and the one before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair<'a> {
    pub(super) now: &'a Sample,
    pub(super) before: Option<&'a Sample>,
}

/// An object and the same object before.
struct Twice<'a> {
    now: &'a Value,
    before: Option<&'a Value>,
    seconds: Option<f64>,
}

impl Pair<'_> {
    /// Seconds between both samples.
    pub(super) fn seconds(&self) -> Option<f64> {
        seconds(self.before?.at, self.now.at)
    }

    /// The objects of `list` in a part, each with the same object before.
    fn twice(
        &self,
        part: Part,
        list: impl Fn(&Value) -> Vec<&Value>,
        id: impl Fn(&Value) -> String,
    ) -> Vec<(String, Twice<'_>)> {
        fn numbered(all: Vec<&Value>, id: impl Fn(&Value) -> String) -> Vec<(String, &Value)> {
            let mut count: HashMap<String, u32> = HashMap::new();
            let name = |value| {
                let id = id(value);
                // Two rules may have the same number and text.
                let number = count.entry(id.clone()).or_default();
                *number += 1;
                (format!("{id}#{number}"), value)
            };
            all.into_iter().map(name).collect()
        }
        let (seconds, before) = (self.seconds(), self.before.map(|before| before.part(part)));
        let now = numbered(list_of(self.now.part(part), &list), &id);
        let before: HashMap<String, &Value> = before
            .map(|before| numbered(list_of(before, &list), &id))
            .unwrap_or_default()
            .into_iter()
            .collect();
        let row = |(id, now): (String, _)| {
            let twice = Twice { now, before: before.get(&id).copied(), seconds };
            (id, twice)
        };
        now.into_iter().map(row).collect()
    }

    /// Packets per second and other sums of the engine, for the head of the screen and for JSON.
    pub(super) fn totals(&self) -> Map<String, Value> {
        let stats = |sample: &Sample| sample.part(Part::Stats).clone();
        let (now, before) = (stats(self.now), self.before.map(stats));
        let twice = Twice { now: &now, before: before.as_ref(), seconds: self.seconds() };
        let mut totals = Map::new();
        for key in ["packets", "passed", "dropped", "rejected"] {
            totals.insert(key.to_owned(), now[key].clone());
            totals.insert(format!("{key}_per_second"), json!(twice.rate(|stats| stats[key].as_u64())));
        }
        totals.insert("waiting".to_owned(), now["waiting"].clone());
        totals.insert("states".to_owned(), now["states"]["left"].clone());
        totals.insert("states_max".to_owned(), now["states"]["max"].clone());
        totals
    }
}

fn list_of<'v>(part: &'v Value, list: impl Fn(&'v Value) -> Vec<&'v Value>) -> Vec<&'v Value> {
    list(part)
}

impl Twice<'_> {
    fn rate(&self, get: impl Fn(&Value) -> Option<u64>) -> Option<f64> {
        let (now, before) = (get(self.now)?, get(self.before?)?);
        // A counter that is smaller belongs to another engine, or was reset.
        Some(now.checked_sub(before)? as f64 / self.seconds?)
    }

    fn count(&self, key: &str) -> Cell {
        Cell::rate(self.rate(|object| object[key].as_u64()))
    }

    fn bits(&self, key: &str) -> Cell {
        Cell::rate(self.rate(|object| object[key].as_u64()).map(|bytes| bytes * 8.0))
    }

    fn cell(&self, key: &str) -> Cell {
        Cell::of(&self.now[key])
    }

    fn row(&self, id: &str, cells: Vec<Cell>) -> Row {
        Row { id: id.to_owned(), cells, object: self.now.clone() }
    }
}

/// The sum of the numbers of an object, or of pairs `[name, number]`.
fn sum(value: &Value) -> u64 {
    match value {
        Value::Object(members) => members.values().filter_map(Value::as_u64).fold(0, u64::saturating_add),
        Value::Array(pairs) => pairs.iter().filter_map(|pair| pair[1].as_u64()).fold(0, u64::saturating_add),
        _ => 0,
    }
}

fn all<'v>(part: &'v Value, key: &str) -> Vec<&'v Value> {
    items(&part[key]).iter().collect()
}

fn ports(pair: &Pair<'_>) -> Vec<Row> {
    let ports = pair.twice(Part::Ports, |part| all(part, "ports"), |port| port["name"].to_string());
    let row = |(id, port): &(String, Twice<'_>)| {
        let lost = |port: &Value| Some(sum(&port["lost"]));
        let cells = vec![
            port.cell("name"),
            port.cell("driver"),
            port.cell("state"),
            port.count("received"),
            port.bits("received_bytes"),
            port.count("sent"),
            port.bits("sent_bytes"),
            Cell::rate(port.rate(lost)),
            Cell::Number(sum(&port.now["lost"])),
        ];
        port.row(id, cells)
    };
    ports.iter().map(row).collect()
}

fn rules(pair: &Pair<'_>) -> Vec<Row> {
    let id = |rule: &Value| format!("{} {} {}", rule["number"], rule["set"], rule["text"]);
    let rules = pair.twice(Part::Rules, |part| all(part, "rules"), id);
    let row = |(id, rule): &(String, Twice<'_>)| {
        let cells = vec![
            rule.cell("number"),
            rule.cell("set"),
            rule.count("packets"),
            rule.bits("bytes"),
            rule.cell("packets"),
            rule.cell("bytes"),
            rule.cell("text"),
        ];
        rule.row(id, cells)
    };
    rules.iter().map(row).collect()
}

fn flow_rows(flows: &Flows) -> Vec<Row> {
    let mut rows: Vec<Row> = flows
        .iter()
        .map(|(id, flow)| {
            let cells = vec![
                Cell::rate(flow.packet_rate),
                Cell::rate(flow.byte_rate.map(|bytes| bytes * 8.0)),
                Cell::Number(flow.packets),
                Cell::Number(flow.bytes),
                Cell::of(&flow.state["rule"]),
                Cell::of(&flow.state["expire"]),
                Cell::Text(flows::words(&flow.state)),
            ];
            Row { id: id.clone(), cells, object: flow.state.clone() }
        })
        .collect();
    // The flows are in a hash table. Without traffic, those with the most bytes so far are first.
    let bytes = |row: &Row| std::cmp::Reverse(if let Cell::Number(bytes) = row.cells[3] { bytes } else { 0 });
    rows.sort_unstable_by(|one, other| bytes(one).cmp(&bytes(other)).then(one.id.cmp(&other.id)));
    rows
}

fn inspectors(pair: &Pair<'_>) -> Vec<Row> {
    let queues = pair.twice(Part::Queues, |part| all(part, "queues"), |queue| queue["number"].to_string());
    let rings = pair.twice(
        Part::Rings,
        |part| all(part, "rings"),
        |ring| format!("{} {}", ring["channel"], ring["pid"]),
    );
    let queue_row = |(id, queue): &(String, Twice<'_>)| {
        let verdicts = |queue: &Value| {
            Some(["passed", "dropped", "replaced"].map(|key| queue[key].as_u64().unwrap_or(0)).iter().sum())
        };
        let trouble = queue.now["trouble"].as_str().map(|trouble| format!(": {trouble}")).unwrap_or_default();
        let inspectors = queue.now["inspectors"].as_u64().unwrap_or(0);
        let cells = vec![
            queue.cell("number"),
            Cell::None,
            Cell::None,
            queue.count("frames"),
            Cell::rate(queue.rate(verdicts)),
            queue.cell("open"),
            Cell::None,
            queue.count("lost"),
            queue.cell("lost"),
            Cell::Text(format!("{inspectors} attached{trouble}")),
        ];
        queue.row(&format!("queue {id}"), cells)
    };
    let ring_row = |(id, ring): &(String, Twice<'_>)| {
        let gone = ring.now["gone"].as_str().map(|gone| format!(" (gone: {gone})")).unwrap_or_default();
        let lost = |ring: &Value| Some(sum(&ring["lost"]));
        let cells = vec![
            ring.cell("queue"),
            ring.cell("channel"),
            ring.cell("pid"),
            ring.count("published"),
            Cell::rate(ring.rate(|ring| ring["verdicts"]["decided"].as_u64())),
            ring.cell("depth"),
            ring.cell("oldest"),
            Cell::rate(ring.rate(lost)),
            Cell::Number(sum(&ring.now["lost"])),
            Cell::Text(format!("{}{gone}", ring.now["name"].as_str().unwrap_or("-"))),
        ];
        ring.row(&format!("ring {id}"), cells)
    };
    let mut rows: Vec<Row> = queues.iter().map(queue_row).chain(rings.iter().map(ring_row)).collect();
    // Each queue with its channels.
    let number = |row: &Row| match row.cells[0] {
        Cell::Number(number) => number,
        _ => u64::MAX,
    };
    rows.sort_by_key(number);
    rows
}

fn muxes(pair: &Pair<'_>) -> Vec<Row> {
    let list = |part: &Value| -> Vec<Value> {
        let first = &part["mux"];
        if first.is_null() {
            return Vec::new();
        }
        std::iter::once(first).chain(items(&first["others"])).cloned().collect()
    };
    let now = list(pair.now.part(Part::Mux));
    let before = pair.before.map(|before| list(before.part(Part::Mux))).unwrap_or_default();
    let (mut rows, seconds) = (Vec::new(), pair.seconds());
    for mux in &now {
        let name = mux["name"].as_str().filter(|name| !name.is_empty()).unwrap_or("mux");
        let old = before.iter().find(|old| old["name"] == mux["name"]);
        let stats = Twice { now: &mux["stats"], before: old.map(|old| &old["stats"]), seconds };
        let connections = items(&mux["psocks"]).len() as u64 + mux["psocks_left_out"].as_u64().unwrap_or(0);
        let cells = vec![
            stats.count("rx_msgs"),
            stats.bits("rx_bytes"),
            stats.count("tx_msgs"),
            stats.bits("tx_bytes"),
            stats.cell("queued"),
            stats.cell("in_hand"),
            Cell::Number(connections),
            Cell::of(&mux["service_time"]["p99"]),
            Cell::Text(format!("{name}{}", if mux["full"] == true { " (full)" } else { "" })),
        ];
        let mut object = mux.clone();
        // Each of them has a row of its own, and there may be a thousand connections.
        for key in ["others", "psocks", "workers"] {
            object.as_object_mut().map(|object| object.remove(key));
        }
        rows.push(Row { id: format!("mux {name}"), cells, object });
        for worker in items(&mux["workers"]) {
            let same = |old: &&Value| (&old["index"], &old["pid"]) == (&worker["index"], &worker["pid"]);
            let old = old.and_then(|old| items(&old["workers"]).iter().find(same));
            let twice = Twice { now: worker, before: old, seconds };
            let cells = vec![
                twice.count("rx_msgs"),
                twice.bits("rx_bytes"),
                twice.count("tx_msgs"),
                twice.bits("tx_bytes"),
                Cell::None,
                twice.cell("recv_q"),
                Cell::None,
                Cell::None,
                Cell::Text(format!(
                    "{name} worker {}, {} {}",
                    worker["index"],
                    worker["remote"].as_str().map_or_else(|| format!("pid {}", worker["pid"]), str::to_owned),
                    worker["status"].as_str().unwrap_or_default()
                )),
            ];
            rows.push(twice.row(&format!("worker {name} {} {}", worker["index"], worker["pid"]), cells));
        }
    }
    rows
}

/// A counter of drops: by what, for which reason, how many.
fn counted(sample: &Sample) -> Vec<(String, String, u64)> {
    let mut drops = Vec::new();
    let members = |value: &Value| -> Vec<(String, u64)> {
        match value {
            Value::Object(reasons) => {
                reasons.iter().filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
            }
            other => {
                let pair = |pair: &Value| Some((pair[0].as_str()?.to_owned(), pair[1].as_u64()?));
                items(other).iter().filter_map(pair).collect()
            }
        }
    };
    for (reason, count) in members(&sample.part(Part::Stats)["dropped_by"]) {
        drops.push(("engine".to_owned(), reason, count));
    }
    for port in items(&sample.part(Part::Ports)["ports"]) {
        for (reason, count) in members(&port["lost"]) {
            drops.push((format!("port {}", port["name"].as_str().unwrap_or("?")), reason, count));
        }
    }
    for queue in items(&sample.part(Part::Queues)["queues"]) {
        for (reason, count) in members(&queue["lost_by"]) {
            drops.push((format!("queue {}", queue["number"]), reason, count));
        }
    }
    drops.retain(|(_, _, count)| *count > 0);
    drops
}

fn drops(pair: &Pair<'_>) -> Vec<Row> {
    let before = pair.before.map(counted);
    let row = |(by, reason, count): (String, String, u64)| {
        // A reason that is not listed has happened never.
        let old = before.as_ref().map(|before| {
            before.iter().find(|(b, r, _)| (b, r) == (&by, &reason)).map_or(0, |(_, _, count)| *count)
        });
        let rate = old.and_then(|old| Some(count.checked_sub(old)? as f64 / pair.seconds()?));
        let object = json!({ "by": by, "reason": reason, "count": count });
        let id = format!("{by} {reason}");
        Row {
            id,
            cells: vec![Cell::rate(rate), Cell::Number(count), Cell::Text(by), Cell::Text(reason)],
            object,
        }
    };
    counted(pair.now).into_iter().map(row).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A sample in which every counter is `n` times as large.
    pub(in super::super) fn sample(n: u64) -> Sample {
        let parts = [
            (
                Part::Stats,
                json!({ "packets": 100 * n, "passed": 90 * n, "dropped": 10 * n, "rejected": 0, "waiting": 1,
                        "states": { "left": 3, "max": 16384 }, "dropped_by": { "rule": 8 * n, "no_route": 2 * n } }),
            ),
            (
                Part::Ports,
                json!({ "ports": [{ "name": "lan", "driver": "af_packet", "state": "up", "received": 1000 * n,
                                    "received_bytes": 1_000_000 * n, "sent": 10 * n, "sent_bytes": 1000 * n,
                                    "lost": [["tx_full", 5 * n], ["rx_ring", n]] }] }),
            ),
            (
                Part::Rules,
                json!({ "rules": [
                    { "number": 100, "set": 0, "packets": 7 * n, "bytes": 700 * n, "text": "allow udp from any to any" },
                    { "number": 100, "set": 0, "packets": 3 * n, "bytes": 0, "text": "allow udp from any to any" },
                    { "number": 65535, "set": 31, "packets": n, "bytes": 0, "text": "deny ip from any to any" }],
                    "more": false }),
            ),
            (
                Part::Queues,
                json!({ "queues": [{ "number": 1, "inspectors": 1, "frames": 20 * n, "passed": 10 * n, "dropped": 5 * n,
                                     "replaced": n, "open": 2, "lost": 4 * n, "lost_by": { "overdue": 4 * n } }] }),
            ),
            (
                Part::Rings,
                json!({ "rings": [{ "channel": 1, "queue": 1, "pid": 77, "name": "ips", "published": 20 * n, "depth": 2,
                                    "oldest": 1_000_000, "verdicts": { "decided": 16 * n }, "lost": { "no_room": n } }] }),
            ),
            (
                Part::Mux,
                json!({ "mux": { "name": "web", "others": [], "full": false, "psocks": [{}, {}], "psocks_left_out": 3,
                                 "service_time": { "p99": 5000 },
                                 "stats": { "rx_msgs": 50 * n, "rx_bytes": 5000 * n, "tx_msgs": 50 * n, "tx_bytes": 100 * n,
                                            "queued": 4, "in_hand": 2 },
                                 "workers": [{ "index": 0, "pid": 9, "rx_msgs": 50 * n, "rx_bytes": 0, "tx_msgs": 0,
                                               "tx_bytes": 0, "recv_q": 2, "status": "ready" }] } }),
            ),
        ];
        let parts = parts.into_iter().map(|(part, value)| (part, Ok(value))).collect();
        Sample { at: n * 2 * SECOND, parts, flows: None }
    }

    #[test]
    fn every_view_has_the_rates_of_two_samples() {
        let (before, now) = (sample(1), sample(2));
        let pair = Pair { now: &now, before: Some(&before) };
        let flows = Flows::default();
        let json = |view: View| view.table(&pair, &flows).json();
        let port = &json(View::Ports)[0];
        assert_eq!(port["received_per_second"], 500.0);
        assert_eq!(port["received_bits_per_second"], 4_000_000.0);
        assert_eq!((&port["lost"], &port["lost_per_second"]), (&json!(12), &json!(3.0)));
        let rules = json(View::Rules);
        assert_eq!(
            (&rules[0]["packets_per_second"], &rules[1]["packets_per_second"]),
            (&json!(3.5), &json!(1.5))
        );
        let inspectors = json(View::Inspectors);
        assert_eq!((&inspectors[0]["channel"], &inspectors[1]["channel"]), (&Value::Null, &json!(1)));
        assert_eq!(inspectors[0]["verdicts_per_second"], 8.0);
        assert_eq!(inspectors[1]["verdicts_per_second"], 8.0);
        let muxes = json(View::Muxes);
        assert_eq!((&muxes[0]["received_per_second"], &muxes[0]["connections"]), (&json!(25.0), &json!(5)));
        assert_eq!(muxes[1]["mux"], "web worker 0, pid 9 ready");
        let drops = json(View::Drops);
        assert_eq!(drops.as_array().map(Vec::len), Some(5));
        assert_eq!(drops[1], json!({ "per_second": 4.0, "total": 16, "by": "engine", "reason": "rule" }));
        assert_eq!(pair.totals()["packets_per_second"], 50.0);
        assert_eq!(pair.totals()["states_max"], 16384);
    }

    #[test]
    fn without_a_sample_before_and_after_a_restart_there_are_no_rates() {
        let (one, two) = (sample(1), sample(2));
        // Another engine: its counters are smaller.
        let mut restarted = sample(1);
        restarted.at = sample(3).at;
        for pair in [Pair { now: &one, before: None }, Pair { now: &restarted, before: Some(&two) }] {
            for view in View::ALL {
                let table = view.table(&pair, &Flows::default());
                // A counter of 0 has not changed.
                let mut cells = table.rows.iter().flat_map(|row| &row.cells);
                assert!(
                    !cells.any(|cell| matches!(cell, Cell::Rate(rate) if *rate > 0.0)),
                    "{view:?} {table:?}"
                );
            }
            assert!(pair.totals()["packets_per_second"].is_null());
        }
    }

    #[test]
    fn a_missing_part_is_a_note_and_hostile_answers_are_no_panic() {
        let mut now = sample(1);
        now.parts.insert(Part::Mux, Err("this engine has no multiplexor".into()));
        let table = View::Muxes.table(&Pair { now: &now, before: None }, &Flows::default());
        assert_eq!(table.note.as_deref(), Some("this engine has no multiplexor"));
        for value in [
            Value::Null,
            json!([]),
            json!({ "ports": 3, "rules": [1, "x", null], "mux": [], "queues": [[]],
                      "rings": [{ "lost": "x" }], "dropped_by": [[1]] }),
            json!("x"),
        ] {
            for part in [Part::Stats, Part::Ports, Part::Queues, Part::Rings, Part::Mux, Part::Rules] {
                now.parts.insert(part, Ok(value.clone()));
            }
            for view in View::ALL {
                let pair = Pair { now: &now, before: Some(&now) };
                let _ = (view.table(&pair, &Flows::default()).text(view.name()), pair.totals());
            }
        }
    }

    #[test]
    fn the_book_lists_every_column() {
        let page =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/reference/top.md");
        let page = std::fs::read_to_string(page).unwrap();
        for view in View::ALL {
            let list = page.split_once(&format!("\n- `{}`: ", view.name())).expect("a list of the view").1;
            let list = list.split("\n- ").next().unwrap().split("\n\n").next().unwrap();
            let keys: Vec<&str> = list.split('`').skip(1).step_by(2).collect();
            let columns: Vec<&str> = view.columns().iter().map(|column| column.key).collect();
            assert_eq!(keys, columns, "{view:?}");
        }
    }

    /// Every view fits into 80 columns with the widest values: rates of 5 characters, ids of 5 digits or 7 for a process.
    #[test]
    fn views_fit_into_80_columns() {
        for view in View::ALL {
            let cell = |column: &Column| match (column.kind, column.key) {
                (Kind::Text, "name") => Cell::Text("fifteen-letters".into()),
                (Kind::Text, "driver") => Cell::Text("af_packet".into()),
                (Kind::Text, "state") => Cell::Text("down".into()),
                (Kind::Text, _) => Cell::Text("port fifteen-letters".into()),
                (Kind::Id, "pid") => Cell::Number(4_194_304),
                (Kind::Id, "set") => Cell::Number(31),
                (Kind::Id, _) => Cell::Number(65_535),
                (Kind::Count, _) => Cell::Rate(123_456.0),
                (Kind::Nanos, _) => Cell::Number(9_999_000_000),
                (Kind::Tail, _) => Cell::Text("word ".repeat(30)),
            };
            let cells = view.columns().iter().map(cell).collect();
            let row = Row { id: String::new(), cells, object: Value::Null };
            let table = Table { columns: view.columns(), rows: vec![row], note: None };
            for column in (0..view.columns().len()).map(Some) {
                let (header, rows) = table.lines(80, Some(Sort { column, descending: true }));
                for line in std::iter::once(header).chain(rows.into_iter().flatten()) {
                    assert!(line.chars().count() <= 80, "{view:?}: {line}");
                }
            }
        }
    }
}
