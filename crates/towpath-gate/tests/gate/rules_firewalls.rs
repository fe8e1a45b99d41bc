//! Complete rule files as written for ipfw, and the verdicts that ipfw would give.

use towpath_gate::rules::Ruleset;
use towpath_gate::state::Settings;
use towpath_gate::{Dir, Gate, PacketSpec, Ports, Reject, Step, Walk};
use towpath_wire::{self as wire, Time};

type Row<'r> = (&'r str, &'r str, &'r [(&'r str, &'r str)]);

fn gate(name: &str, rules: &str) -> Gate {
    let ruleset = Ruleset::parse(name, rules).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
    // The printed ruleset behaves the same.
    let ruleset =
        Ruleset::parse(name, &ruleset.to_text()).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
    let mut ports = Ports::new();
    ports.add("em0", vec!["203.0.113.1".parse().unwrap()]);
    ports.add("em1", vec!["192.168.1.1".parse().unwrap(), "2001:db8:1::1".parse().unwrap()]);
    ports.add("lo0", vec!["127.0.0.1".parse().unwrap()]);
    Gate::new(ruleset, ports, Settings::default(), 3)
}

/// Describes the steps of a packet; inspectors always pass.
fn outcome(gate: &mut Gate, words: &str) -> String {
    let written = PacketSpec::parse(words).unwrap_or_else(|error| panic!("{words}: {error}"));
    let packet = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
    let port = written.port.as_deref().and_then(|name| gate.ports().find(name));
    let mut walk = match written.dir {
        Dir::In => Walk::new(Dir::In, port, None),
        Dir::Out => Walk::new(Dir::Out, None, port),
    };
    let mut said: Vec<String> = Vec::new();
    loop {
        let step = gate.walk(&mut walk, &packet, Time::from_secs(1000));
        said.push(match step {
            Step::Drop(_) => "drop".to_owned(),
            Step::Reject(Reject::NoReply(_)) => "silent".to_owned(),
            Step::Reject(_) => "reject".to_owned(),
            other => other.to_string(),
        });
        if !matches!(step, Step::Divert(_) | Step::Tee(_) | Step::Reassemble) {
            return said.join(", ");
        }
    }
}

#[test]
fn firewalls_decide_as_ipfw_does() {
    let rows: &[Row<'_>] = include!("rows/firewalls.in");
    let mut wrong = Vec::new();
    for (name, rules, packets) in rows {
        let mut gate = gate(name, rules);
        for (packet, want) in *packets {
            let got = outcome(&mut gate, packet);
            if got != *want {
                wrong.push(format!("{name}: {packet}: {got}, not {want}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
