//! The costs on which the page of sizes (docs/book/src/how/fleet-sizes.md) is based, and its tables.

use std::net::{Ipv4Addr, Ipv6Addr};

use towpath_gate::state::record::{RecordOrigin, RecordPort, RuleRef};
use towpath_wire::{Ends, Flow, proto};

use super::tests::CALM;
use super::*;
use crate::outgoing::{BATCH, KNOWN_BYTES, LINGER};

/// The group of the page: gates, states, and new flows a second.
const ALL_GATES: u64 = 100;
const ALL_STATES: u64 = 10_000_000;
const ALL_FLOWS: u64 = 500_000;

/// Bytes of a message besides its content, in the protocol of NATS: `PUB towpath.edge.states.gate-42 65536` and two line breaks.
const PROTOCOL: u64 = 44;

fn record(ends: Ends) -> u64 {
    let record = Record {
        kind: None,
        id: 1,
        at: Time::from_secs(1),
        flow: Flow { proto: proto::TCP, zone: 0, src_port: 40_000, dst_port: 443, ends },
        rule: RuleRef::new(0, "allow tcp from any to any setup keep-state", 300),
        name: "default",
        limited: false,
        replied: true,
        remaining: Duration::from_secs(300),
        seen: 0x1212,
        tcp_ack: [1, 2],
        packets: [10, 10],
        bytes: [1000, 10_000],
        lifetime: None,
        every_packet: false,
        window: None,
        origin: Some(RecordOrigin { outgoing: false, port: RecordPort::Named("wan") }),
    };
    let mut bytes = Vec::new();
    record.encode(&mut bytes);
    bytes.len() as u64
}

fn batch_header() -> u64 {
    let sender =
        Sender { incarnation: 1, at: Time::from_secs(1), fingerprint: 2, in_step: true, unchecked: false };
    Message { sender, kind: Kind::States { seq: 1 }, has: Has::default(), records: &[] }.encode().len() as u64
}

/// Records of a TCP connection from its SYN to the end of both sides.
fn records_of_a_connection() -> u64 {
    let mut world = World::new(CALM, 1);
    world.step(Step::Wait(3_000));
    for (reply, flags) in [
        (false, "syn"),
        (true, "syn ack"),
        (false, "ack"),
        (false, "ack"),
        (true, "ack"),
        (false, "fin ack"),
        (true, "fin ack"),
        (false, "ack"),
    ] {
        world.step(Step::Packet { gate: 0, flow: 3, reply, tcp: Some(flags) });
        world.step(Step::Wait(100));
    }
    world.replicas[0].stats(world.time(0)).sent
}

/// Memory of a state in the table, and in what a gate knows of its peers.
fn memory_of_a_state() -> u64 {
    const STATES: u32 = 50_000;
    let settings = state::Settings { dyn_max: STATES, ..state::Settings::default() };
    let mut host = Host::with("add allow udp from any to any keep-state", settings, 0, Time::from_secs(1));
    for flow in 0..STATES {
        let [_, a, b, c] = flow.to_be_bytes();
        host.packet(&format!("udp 10.{a}.{b}.{c}:1 > 192.0.2.1:53"));
    }
    assert_eq!(host.gate.states().len(), STATES as usize);
    host.gate.states().memory() / u64::from(STATES) + KNOWN_BYTES as u64
}

struct Costs {
    record: u64,
    records: u64,
    header: u64,
    memory: u64,
}

impl Costs {
    fn rows(&self) -> Vec<String> {
        let v6 = record(Ends::V6(Ipv6Addr::LOCALHOST, Ipv6Addr::LOCALHOST, 0));
        vec![
            format!("| record of a state, IPv4 | {} B |", self.record),
            format!("| record of a state, IPv6 | {v6} B |"),
            format!("| records of a TCP connection | {} |", self.records),
            format!("| header of a batch, with that of NATS | {} B |", self.header),
            format!("| largest batch | {} KiB |", BATCH >> 10),
            format!("| longest wait of a batch | {} ms |", LINGER.as_millis()),
            format!("| memory of a state, IPv4 | {} B |", self.memory),
        ]
    }

    /// Needs of groups of `gates` gates each, all gates together having the flows and states of the page.
    fn row(&self, gates: u64) -> String {
        let groups = ALL_GATES / gates;
        let own = ALL_FLOWS / ALL_GATES * self.records;
        // A gate sends after the longest wait, or when a batch is full.
        let (most, full) = (1000 / LINGER.as_millis() as u64, own * self.record / BATCH as u64);
        let batches = most.max(full);
        let bytes = own * self.record + batches * self.header;
        let (received, megabits) = (own * (gates - 1), |bytes: u64| (bytes * 8).div_ceil(1_000_000));
        let states = ALL_STATES / groups;
        format!(
            "| {gates} | {groups} | {received} | {} | {} | {} | {} | {} | {} |",
            megabits(bytes * (gates - 1)),
            batches * (gates - 1),
            megabits(bytes * gates * (gates - 1)),
            batches * gates * gates,
            states,
            (states * self.memory).div_ceil(1_000_000),
        )
    }
}

#[test]
fn the_page_of_sizes_has_the_costs_of_the_code() {
    let v4 = Ends::V4(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST);
    let costs = Costs {
        record: record(v4),
        records: records_of_a_connection(),
        header: batch_header() + PROTOCOL,
        memory: memory_of_a_state(),
    };
    let page = include_str!("../../../../docs/book/src/how/fleet-sizes.md");
    let rows = costs.rows().into_iter().chain([2, 4, 10, 20, 50, 100].map(|gates| costs.row(gates)));
    let missing: Vec<String> = rows.filter(|row| !page.contains(row)).collect();
    assert!(missing.is_empty(), "the page lacks these rows:\n{}", missing.join("\n"));
}
