//! Each word of the language with a packet that matches and a packet that does not.

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::{Dir, Gate, PacketSpec, Ports, Step, Walk};
use towpath_wire::{self as wire, Time};

fn gate(rules: &str) -> Gate {
    let parsed = Ruleset::parse("t", rules);
    let ruleset = parsed.ruleset.unwrap_or_else(|errors| panic!("{rules}: {}", errors[0]));
    let mut ports = Ports::new();
    ports.add("em0", vec!["10.0.0.254".parse().unwrap(), "2001:db8::fe".parse().unwrap()]);
    ports.add("em1", vec!["192.168.0.254".parse().unwrap()]);
    ports.add("lo0", Vec::new());
    let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
    let mut routes = towpath_gate::Routes::new();
    let mut route = |net: &str, len, port: &str, connected| {
        let port = gate.ports().find(port).unwrap();
        routes.add(
            net.parse().unwrap(),
            len,
            towpath_gate::Route { port, connected, gateway: Default::default() },
        );
    };
    route("10.0.0.0", 8, "em0", true);
    route("192.168.0.0", 24, "em1", true);
    route("0.0.0.0", 0, "em1", false);
    route("fe80::20", 128, "em0", true);
    gate.set_routes(routes);
    gate
}

/// Returns the first step of a packet.
fn step(gate: &mut Gate, packet: &str) -> Step {
    let written = PacketSpec::parse(packet).unwrap_or_else(|e| panic!("{packet}: {e}"));
    let port = written.port.as_deref().map(|name| gate.ports().find(name).unwrap());
    let (recv, xmit) = match written.dir {
        Dir::In => (port, None),
        Dir::Out => (None, port),
    };
    let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32)
        .unwrap_or_else(|e| panic!("{packet}: {e}"));
    let mut walk = Walk::new(written.dir, recv, xmit);
    gate.walk(&mut walk, &parsed, Time::from_secs(1000))
}

#[test]
fn every_test_matches_one_packet_and_not_another() {
    // Rule body; a packet that matches; a packet that does not, if any.
    let rows: &[(&str, &str, &str)] = include!("rows/match.in");
    for (body, yes, no) in rows {
        let tables = "table t add 10.0.0.0/8 7\ntable n create type number\ntable n add 53 1 443 2\n\
                      table i create type iface\ntable i add em1 3\n\
                      table f create type flow\ntable f add 10.0.0.1,tcp,1000,10.0.0.2,80 1\n\
                      table m create type mac\ntable m add 02:00:00:00:00:00/40 1\n";
        let rules = format!(
            "{tables}add 5 setmark 0x12 ip from 10.9.9.9 to any\nadd 6 count tag 9 ip from 10.9.9.9 to any\nadd 100 allow {body}\n"
        );
        let mut gate = gate(&rules);
        assert_eq!(step(&mut gate, yes), Step::Pass, "{body}: {yes}");
        if !no.is_empty() {
            assert_ne!(step(&mut gate, no), Step::Pass, "{body}: {no}");
        }
        let shown = gate.show();
        let rule = shown.iter().find(|rule| rule.number == 100).unwrap();
        assert_eq!(rule.packets, 1, "{body}");
        assert_eq!(shown.last().unwrap().packets, u64::from(!no.is_empty()), "{body}");
    }
}
