//! The TCP of iperf3 through engines with and without flow offload. The number of packets differs from run to run. Each of them counts once
//! for rules and states, none is lost, and the states end alike.

use serde_json::Value;
use towpath_port::netns::{Host, ip, within};

use super::machines::*;
use super::offload::{offload, offload_machines, rule};
use crate::flow_records::events;
use crate::support::until;

/// Rules 60 and 70 count all packets of one machine each. A packet that comes after the end of its state is denied.
const RULES: &str = "\
add 60 count ip from any to any in recv wan
add 70 count ip from any to any in recv lan
add 100 check-state
add 200 allow tcp from any to any in recv wan setup keep-state
";
/// The engine sends no packets of its own.
const CONFIG: &str = "\
[events]
output = \"events.json\"
include = [\"states\"]
[settings]
dyn_keepalive = 0
dyn_fin_lifetime = 5
dyn_rst_lifetime = 5
";
/// So few bytes on the way that no buffer between the machines overflows.
const AMOUNT: &str = "--bytes 8M --window 128K";
const ETHERNET: u64 = 14;
/// The headers of IPv4 and of a TCP segment with data, which has the option of timestamps.
const HEADERS: u64 = 20 + 32;

/// The interfaces have no packets but those of iperf3: each machine knows the Ethernet address of the other.
fn acquaint(left: &Host, right: &Host) {
    left.run(|| {
        ip("link set l0 address 02:00:00:00:00:01");
        ip(&format!("neigh replace {RIGHT} lladdr 02:00:00:00:00:02 dev l0 nud permanent"));
    });
    right.run(|| ip(&format!("neigh replace {LEFT} lladdr 02:00:00:00:00:01 dev r0 nud permanent")));
}

/// Packets and bytes of IP that a machine received and sent since `before`.
fn since(before: [[u64; 2]; 2], now: [[u64; 2]; 2]) -> [[u64; 2]; 2] {
    [0, 1].map(|way| {
        let [frames, bytes] = [0, 1].map(|at| now[way][at] - before[way][at]);
        [frames, bytes - ETHERNET * frames]
    })
}

/// iperf3 through an engine with this configuration. Each packet is counted once on its way. Returns how the states ended.
fn through(bridge: &str, config: &str) -> Vec<Value> {
    let (left, right) = offload_machines(bridge);
    acquaint(&left, &right);
    let statistics = || [left.run(|| statistics("l0")), right.run(|| statistics("r0"))];
    let before = statistics();
    let files = files(&format!("{bridge}{CONFIG}{config}"), RULES);
    let engine = Engine::start(files.path());
    iperf3(&left, &right, 9002, AMOUNT);
    if !config.is_empty() {
        assert!(offload(&engine, "forwarded_bytes") > 0, "{}", engine.json("show offload --json"));
    }
    let path = files.path().join("events.json");
    let of =
        |event: &str| events(&path).into_iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
    // Two connections for each direction.
    until(|| of("ended").len() == 4);
    let states = engine.json("show states --json");
    assert!(of("created").len() == 4 && of("lost").is_empty(), "{:#?}, {states}", events(&path));
    let ended = of("ended");
    let now = statistics();
    let machines = [0, 1].map(|machine| since(before[machine], now[machine]));
    for (from, number) in [(0, 60), (1, 70)] {
        let ([_, sent], [received, _]) = (machines[from], machines[1 - from]);
        let count = |name: &str| ended.iter().map(|state| state[name][from].as_u64().unwrap()).sum::<u64>();
        let (packets, bytes) = rule(&engine, number);
        assert_eq!(([packets, bytes], [count("packets"), count("bytes")]), (sent, sent), "{ended:#?}");
        // The engine may cut packets into segments. Hosts at `af_xdp` ports send none that are longer.
        let cuts = received[0].checked_sub(sent[0]);
        assert_eq!(cuts.map(|cuts| sent[1] + HEADERS * cuts), Some(received[1]), "{sent:?}, {received:?}");
        assert!(cuts == Some(0) || !bridge.contains("af_xdp"), "{sent:?}, {received:?}");
    }
    let all = [0, 1].map(|at| machines.iter().map(|[_, sent]| sent[at]).sum());
    assert_eq!((rule(&engine, 200), rule(&engine, 65535)), (all.into(), (0, 0)));
    let stats = engine.json("show stats --json");
    assert_eq!(stats["stats"]["dropped"], 0, "{stats}");
    engine.stop();
    let end = |state: &Value| {
        ["src", "dst", "dst_port", "rule", "reason"].map(|key| state[key].clone()).into_iter().collect()
    };
    let mut ends: Vec<Value> = ended.iter().map(end).collect();
    ends.sort_by_key(Value::to_string);
    ends
}

fn passes_as_without_offload(bridge: &str) {
    let mut ends = Vec::new();
    for config in ["", "[offload]\nrules = \"all\"\ndeny = true\n"] {
        within(|| ends.push(through(bridge, config)));
    }
    assert_eq!(ends[0], ends[1]);
}

#[towpath_testenv::needs(netns, tcx, "iperf3")]
#[test]
fn iperf3_passes_as_without_offload() {
    passes_as_without_offload(BRIDGE);
}

#[towpath_testenv::needs(netns, xdp, "iperf3", "ethtool")]
#[test]
fn iperf3_passes_as_without_offload_on_xdp() {
    passes_as_without_offload(&BRIDGE.replace("af_packet", "af_xdp"));
}
