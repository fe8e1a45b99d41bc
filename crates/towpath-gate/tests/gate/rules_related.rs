//! ICMP errors match the state of the flow that they quote. `strict` and `loose` change which packets a state
//! passes.

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{Refused, Settings};
use towpath_gate::{Dir, DropReason, Gate, PacketSpec, Ports, RuleOutcome, Step, Walk};
use towpath_wire::{self as wire, LinkType, Time};

const NOW: Time = Time::from_secs(100);
const DENY: Step = Step::Drop(DropReason::Deny);

fn gate(rules: &str) -> Gate {
    let ruleset =
        Ruleset::parse("t", rules).ruleset.unwrap_or_else(|errors| panic!("{rules}: {}", errors[0]));
    Gate::new(ruleset, Ports::new(), Settings::default(), 3)
}

fn frame(packet: &str) -> Vec<u8> {
    PacketSpec::parse(packet).unwrap_or_else(|error| panic!("{error}")).frame
}

fn walk(gate: &mut Gate, frame: &[u8]) -> Step {
    let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).unwrap();
    gate.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW)
}

/// An ICMP error that quotes the first `bytes` bytes of the packet `about`.
fn error(words: &str, about: &str, bytes: usize) -> Vec<u8> {
    let quote = frame(about)[14..].to_vec();
    let quote = &quote[..bytes.min(quote.len())];
    let mut error = frame(&format!("{words} len {}", quote.len()));
    let at = error.len() - quote.len();
    error[at..].copy_from_slice(quote);
    error
}

const SYN: &str = "tcp 10.0.0.1:1000 > 192.0.2.1:80 syn";

#[test]
fn icmp_errors_match_the_state_of_the_quoted_flow() {
    let rules = "add 10 check-state\nadd 20 allow tcp from any to any setup keep-state\n\
                 add 30 allow udp from any to any 53 record-state :dns\nadd 40 allow icmp from any to any icmptypes 8 keep-state\n\
                 add 50 allow ip6 from any to any proto udp keep-state";
    let unreach = "icmp 203.0.113.9 > 10.0.0.1 type 3 code 1";
    let dns = "udp 10.0.0.1:1000 > 192.0.2.1:53";
    let six = "udp [2001:db8::1]:1000 > [2001:db8::2]:54";
    let rows: [(&str, Vec<u8>, Step); 9] = [
        (SYN, error(unreach, SYN, 28), Step::Pass),
        (SYN, error("icmp 203.0.113.9 > 10.0.0.1 type 11", SYN, 60), Step::Pass),
        (SYN, error("icmp 203.0.113.9 > 10.0.0.1 type 5", SYN, 60), DENY),
        // Errors that quote another flow, a flow of another host, or nothing.
        (SYN, error(unreach, "tcp 10.0.0.1:1001 > 192.0.2.1:80 syn", 28), DENY),
        (SYN, error("icmp 203.0.113.9 > 10.0.0.2 type 3", SYN, 28), DENY),
        (SYN, frame(unreach), DENY),
        // check-state looks up another name.
        (dns, error(unreach, dns, 28), DENY),
        (
            "icmp 10.0.0.1 > 192.0.2.1 type 8",
            error(unreach, "icmp 10.0.0.1 > 192.0.2.1 type 8", 28),
            Step::Pass,
        ),
        (six, error("icmp6 2001:db8:9::9 > 2001:db8::1 type 2", six, 1000), Step::Pass),
    ];
    for (row, (first, error, want)) in rows.into_iter().enumerate() {
        let mut gate = gate(rules);
        assert_eq!(walk(&mut gate, &frame(first)), Step::Pass, "row {row}");
        let listed: Vec<_> = gate.states().list(NOW).collect();
        let packet = wire::parse(LinkType::ETHERNET, &error, error.len() as u32).unwrap();
        let explained = gate.explain(&Walk::new(Dir::In, None, None), &packet, NOW);
        assert_eq!(explained.verdict, want, "row {row}");
        let related = explained
            .steps
            .iter()
            .any(|step| matches!(step.outcome, RuleOutcome::State { related: true, .. }));
        assert_eq!(related, want == Step::Pass, "row {row}");
        assert_eq!(walk(&mut gate, &error), want, "row {row}");
        // The error does not count in the state and does not refresh it; its rule counts it.
        assert_eq!(gate.states().list(NOW).collect::<Vec<_>>(), listed, "row {row}");
        let counted: u64 =
            gate.show().iter().filter(|rule| rule.number != 65535).map(|rule| rule.packets).sum();
        assert_eq!(counted, 1 + u64::from(want == Step::Pass), "row {row}");
        // The setting disables it.
        gate.set_settings(towpath_gate::GateSettings { related: false, ..gate.settings() });
        assert_eq!(walk(&mut gate, &error), DENY, "row {row}");
    }
}

#[test]
fn an_icmp_error_before_the_first_lookup_is_an_ordinary_packet() {
    let mut gate = gate("add 10 deny icmp from any to any\nadd 20 allow tcp from any to any keep-state");
    assert_eq!(walk(&mut gate, &frame(SYN)), Step::Pass);
    assert_eq!(walk(&mut gate, &error("icmp 203.0.113.9 > 10.0.0.1 type 3", SYN, 28)), DENY);
}

/// A sequence of segments, with the step for each under `keep-state`, `keep-state strict` and `keep-state loose`.
#[test]
fn strict_and_loose_change_the_verdict() {
    let back = |words: &str| format!("tcp 192.0.2.1:80 > 10.0.0.1:1000 {words}");
    let forth = |words: &str| format!("tcp 10.0.0.1:1000 > 192.0.2.1:80 {words}");
    let invalid = Step::Drop(DropReason::NoState(Refused::Invalid));
    let story = [
        (forth("syn seq 100"), [Step::Pass; 3]),
        (back("syn ack seq 500 ackno 101"), [Step::Pass; 3]),
        (forth("ack seq 101 ackno 501"), [Step::Pass; 3]),
        // Far outside the window: only strict detects it.
        (back("ack seq 900000000 ackno 101"), [Step::Pass, DENY, Step::Pass]),
        (back("ack seq 501 ackno 101 len 100"), [Step::Pass; 3]),
    ];
    for (at, option) in ["", " strict", " loose"].into_iter().enumerate() {
        let mut gate =
            gate(&format!("add check-state\nadd allow tcp from 10.0.0.0/8 to any keep-state{option}"));
        for (packet, wants) in &story {
            assert_eq!(walk(&mut gate, &frame(packet)), wants[at], "{option}: {packet}");
        }
    }
    // One lookup misses the state each time. The rule that would create the state refuses it, and the packet
    // counts once.
    for (rules, want, invalid) in [
        ("add check-state\nadd allow tcp from any to any keep-state strict", invalid, 1),
        ("add allow tcp from any to any keep-state strict", invalid, 1),
        ("add check-state\nadd allow tcp from any to any setup keep-state strict", DENY, 0),
        (
            "add allow tcp from any to any setup keep-state strict\nadd allow tcp from any to any",
            Step::Pass,
            0,
        ),
    ] {
        let mut gate = gate(rules);
        assert!(story[..3].iter().all(|(packet, _)| walk(&mut gate, &frame(packet)) == Step::Pass));
        assert_eq!(walk(&mut gate, &frame(&story[3].0)), want, "{rules}");
        let counters = gate.states().counters();
        assert_eq!((counters.unfit, counters.invalid), (1, invalid), "{rules}");
    }
    // A connection that started before: refused by strict; otherwise it expires after a second, or not.
    let middle = forth("ack seq 101 ackno 501");
    for (option, want, after) in [("", Step::Pass, 0), (" strict", invalid, 0), (" loose", Step::Pass, 1)] {
        let mut gate = gate(&format!("add allow tcp from any to any keep-state{option}"));
        assert_eq!(walk(&mut gate, &frame(&middle)), want, "{option}");
        assert_eq!(gate.states().list(Time::from_secs(110)).count(), after, "{option}");
    }
}
