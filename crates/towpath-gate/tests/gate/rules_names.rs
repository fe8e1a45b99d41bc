//! Flow names: more names over time than numbers, and never two names with the same number.

use std::fmt::Write;

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::{Dir, Gate, Ports, StatePolicy, Step, Walk};
use towpath_wire::{self as wire, LinkType, Time};

const NOW: Time = Time::from_secs(1_000);

fn ruleset(text: &str) -> Ruleset {
    Ruleset::parse("t", text).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]))
}

fn gate(text: &str) -> Gate {
    Gate::new(ruleset(text), Ports::new(), state::Settings::default(), 7)
}

/// Rules with `count` names that start with `head`.
fn named(head: &str, count: usize) -> String {
    (0..count).fold(String::new(), |mut text, n| {
        writeln!(text, "add check-state :{head}{n}").unwrap();
        text
    })
}

/// A packet from 10.0.0.1:4000 to 192.0.2.1:22, or in the other direction.
fn walk(gate: &mut Gate, back: bool) -> Step {
    let mut frame =
        [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1, 15, 160, 0, 22, 0, 8, 0, 0];
    if back {
        frame[12..20].rotate_left(4);
        frame[20..24].rotate_left(2);
    }
    let packet = wire::parse(LinkType::RAW, &frame, 28).unwrap();
    gate.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW)
}

#[test]
fn names_of_deleted_rules_are_reclaimed() {
    let own = "add check-state :web\nadd allow udp from any to any 22 keep-state :ssh\n";
    let mut gate = gate(own);
    assert_eq!(walk(&mut gate, false), Step::Pass);
    for round in 0..12 {
        let more = named(&format!("r{round}-"), 8_000);
        gate.reload(ruleset(&format!("{own}{more}")), StatePolicy::Delete, NOW);
        let names: Vec<_> =
            gate.states().list(NOW).map(|state| gate.flow_name(state.name).to_owned()).collect();
        assert_eq!(names, ["ssh"]);
    }
    // The numbers of the last names are not those of the first.
    let last = "add check-state :r11-7999\nadd deny udp from any 22 to any\n\
                add allow udp from any to any 22 keep-state :ssh\n";
    gate.reload(ruleset(last), StatePolicy::Delete, NOW);
    assert!(matches!(walk(&mut gate, true), Step::Drop(_)), "the state of :ssh is not that of another name");
    assert_eq!(walk(&mut gate, false), Step::Pass);
}

#[test]
fn names_without_states_are_not_restored() {
    let mut snapshot = Vec::new();
    let mut other =
        gate(&format!("{}add allow udp from any to any keep-state :ssh\n", named("junk", 29_000)));
    walk(&mut other, false);
    other.snapshot(NOW, |piece| snapshot.extend_from_slice(piece));
    let mut gate = gate("add check-state :web\n");
    let restored = gate.restore(&snapshot, NOW).unwrap();
    assert_eq!((restored.default_dynamic, restored.refused), (1, 0));
    let names = (1..=u16::MAX).filter_map(|n| {
        let name = gate.flow_name(state::Name(n.try_into().unwrap()));
        (name != "?").then(|| name.to_owned())
    });
    assert_eq!(names.collect::<Vec<_>>(), ["default", "web", "ssh"]);
}

#[test]
fn flow_names_per_file_are_limited() {
    assert!(Ruleset::parse("t", &named("n", 30_000)).ruleset.is_ok());
    let errors = Ruleset::parse("t", &named("n", 30_001)).ruleset.unwrap_err();
    assert_eq!((errors.len(), errors[0].line), (1, 30_001));
    assert!(errors[0].to_string().contains("more than 30000 flow names"), "{}", errors[0]);
}
