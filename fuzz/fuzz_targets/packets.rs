//! Frames of every link through a ruleset that looks at everything.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use towpath_gate::{Dir, Gate, PortId, Ports, Route, Routes, Step, Walk};
use towpath_wire::{self as wire, Addresses, LinkType, Packet, Time, edit};
use towpath_gate::rules::Ruleset;
use towpath_gate::state;

static RULES: LazyLock<Ruleset> = LazyLock::new(|| {
    Ruleset::parse("packets.ipfw", include_str!("packets.ipfw")).ruleset.expect("rules without errors")
});

fuzz_target!(|data: &[u8]| {
    let mut gate = gate();
    let mut now = Time::from_secs(1_000);
    let mut rest = data;
    // A byte of link and direction, a byte of time, two bytes of length, the frame.
    while let [kind, pause, high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (frame, next) = after.split_at(length);
        rest = next;
        now = now + std::time::Duration::from_millis(u64::from(*pause) * 50);
        let wire_len = length as u32 + u32::from(kind >> 5);
        let link = LinkType::CANONICAL[usize::from(kind & 7 | kind >> 1 & 8) % LinkType::CANONICAL.len()];
        let Ok(packet) = wire::parse(link, frame, wire_len) else { continue };
        look(&packet);
        if let Ok(Some(inner)) = wire::tunnel::inner(&packet) {
            look(&inner);
        }
        let (recv, xmit) = (Some(PortId(0)), Some(PortId(1)));
        let walk =
            if kind & 8 == 0 { Walk::new(Dir::In, recv, None) } else { Walk::new(Dir::Out, recv, xmit) };
        decide(&mut gate, walk, &packet, now);
        gate.expire(now, 16);
    }
    assert!(gate.states().len() as u64 <= gate.states().counters().peak);
});

fn gate() -> Gate {
    let address = |text: &str| text.parse().expect("an address");
    let mut ports = Ports::new();
    let em0 = ports.add("em0", vec![address("192.0.2.1"), address("2001:db8::1")]);
    let em1 = ports.add("em1", vec![address("198.51.100.1")]);
    let mut routes = Routes::new();
    routes.add(address("192.0.2.0"), 24, Route { port: em0, connected: true, gateway: Default::default() });
    routes.add(address("2001:db8::"), 32, Route { port: em0, connected: true, gateway: Default::default() });
    routes.add(address("0.0.0.0"), 0, Route { port: em1, connected: false, gateway: Default::default() });
    let mut gate = Gate::new(RULES.clone(), ports, state::Settings::default(), 1);
    gate.set_routes(routes);
    gate
}

/// Checks the invariants of a parsed packet, and calls every accessor.
fn look(packet: &Packet<'_>) {
    let len = packet.frame.len();
    assert!(packet.network <= len && packet.transport <= len);
    assert!(packet.transport + packet.transport_len <= len);
    let options = packet.ip_options().count() + packet.tcp_options().count();
    let numbers = (packet.tos(), packet.ttl(), packet.ip_id(), packet.ipoff_flags(), packet.flow_label());
    let tcp = (packet.tcp_mss(), packet.tcp_wscale(), packet.tcp_data_len());
    let rest = (packet.macs(), packet.icmp_echo_id(), packet.sctp_chunk(), packet.flow(), packet.segment());
    std::hint::black_box((options, numbers, tcp, rest));
    // The payload of a frame that is not IP begins after the link header.
    let most = if packet.addresses == Addresses::None { len - packet.network } else { packet.transport_len };
    assert!(packet.payload().len() <= most);
}

/// To the end, through every divert and tee; what rules change is changed in a copy.
fn decide(gate: &mut Gate, mut walk: Walk, packet: &Packet<'_>, now: Time) {
    for _ in 0..100 {
        match gate.walk(&mut walk, packet, now) {
            Step::Divert(_) | Step::Tee(_) => {}
            Step::Pass => {
                let mut frame = packet.frame.to_vec();
                let edits = walk.edits();
                if let Some(dscp) = edits.dscp {
                    edit::set_dscp(&mut frame, packet.network, dscp);
                }
                if let Some(mss) = edits.mss {
                    edit::clamp_mss(&mut frame, packet.transport, packet.transport_len, mss);
                }
                return assert_eq!(frame.len(), packet.frame.len());
            }
            _ => return,
        }
    }
    panic!("a walk without an end");
}
