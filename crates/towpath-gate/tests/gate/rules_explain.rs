//! `explain` describes the walk without changing anything. `reload` replaces everything in one step.

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{Cursor, Foreseen, Refused, Settings};
use towpath_gate::{Diff, Dir, DropReason, Gate, PacketSpec, Ports, StatePolicy, Step, Walk};
use towpath_wire::{self as wire, Time};

fn ruleset(rules: &str) -> Ruleset {
    Ruleset::parse("t", rules).ruleset.unwrap_or_else(|errors| panic!("{rules}: {}", errors[0]))
}

fn gate(rules: &str) -> Gate {
    gate_with(rules, &["em0"])
}

fn gate_with(rules: &str, names: &[&str]) -> Gate {
    let mut ports = Ports::new();
    for name in names {
        ports.add(name, vec!["10.0.0.254".parse().unwrap()]);
    }
    Gate::new(ruleset(rules), ports, Settings::default(), 3)
}

const NOW: Time = Time::from_secs(100);

fn step(gate: &mut Gate, packet: &str) -> Step {
    let written = PacketSpec::parse(packet).unwrap();
    let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
    gate.walk(&mut Walk::new(written.dir, None, None), &parsed, NOW)
}

fn explain(gate: &Gate, packet: &str) -> Vec<String> {
    let written = PacketSpec::parse(packet).unwrap();
    let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
    let explanation = gate.explain(&Walk::new(Dir::In, None, None), &parsed, NOW);
    let lines = explanation.steps.iter().map(|step| format!("{} {}", step.number, step.outcome));
    lines.chain([explanation.verdict.to_string()]).collect()
}

const DNS: &str = "udp 10.0.0.1:1000 > 10.0.0.2:53";
const ANSWER: &str = "udp 10.0.0.2:53 > 10.0.0.1:1000";

#[test]
fn every_rule_is_explained() {
    let mut gate = gate(
        "add 10 check-state\nadd 20 set 4 deny ip from any to any\nadd 30 count tag 7 ip4 from any to 10.0.0.0/8\n\
         add 40 deny tcp from any to any\nadd 50 skipto 70 udp from any to any 53-60 in tagged 7\n\
         add 60 deny ip from any to any\nadd 70 tee 4 ip from any to any\n\
         add 80 allow udp from { 10.9.9.9 or 10.0.0.1 } to any 53 keep-state :dns\nset disable 4",
    );
    let before = gate.show();
    assert_eq!(
        explain(&gate, DNS),
        [
            "10 no state :default",
            "20 set disabled",
            "30 match: continue at rule 40",
            "40 no match: proto tcp (packet: udp over IPv4)",
            "50 match: continue at rule 70",
            "70 match: copy to queue 4, then continue at rule 80",
            "80 match, creates state :dns: pass",
            "pass",
        ]
    );
    assert_eq!(gate.show(), before);
    assert_eq!(gate.states().len(), 0);
    assert_eq!(step(&mut gate, DNS), Step::Tee(4));
    assert_eq!(explain(&gate, "arp").last().unwrap(), "drop (deny)",);
    assert_eq!(explain(&gate, "tcp 10.0.0.1:1 > 10.0.0.2:2 syn")[3], "40 match: drop (deny)",);
    assert_eq!(explain(&gate, "tcp 10.0.0.1:1 > 10.0.0.2:2 offset 1 len 8"), ["drop (tiny fragment)"]);
}

#[test]
fn explain_finds_states_without_changing_them() {
    let mut gate = gate(
        "add 10 check-state\nadd 20 allow udp from any to any 53 record-state\nadd 30 deny ip from any to any",
    );
    assert_eq!(step(&mut gate, DNS), Step::Pass);
    let listed: Vec<_> = gate.states().list(NOW).collect();
    let lines = explain(&gate, ANSWER);
    assert_eq!(lines.len(), 2);
    assert!(
        lines[0].starts_with("10 state of rule 20 found (") && lines[0].ends_with("): pass"),
        "{}",
        lines[0]
    );
    assert!(lines[0].contains("udp 10.0.0.1 1000 <-> 10.0.0.2 53 :default"), "{}", lines[0]);
    assert_eq!(gate.states().list(NOW).collect::<Vec<_>>(), listed);
}

#[test]
fn explain_and_walk_have_the_same_result() {
    let rules = "add 10 call 100 ip from any to any\nadd 20 call 100 udp from any to any\nadd 30 reset tcp from any to any\n\
                 add 40 fwd 10.0.0.9 udp from any to any\nadd 100 count ip from any to any\nadd 110 return ip from any to any";
    let mut gate = gate(rules);
    for packet in [
        DNS,
        "tcp 10.0.0.1:1 > 10.0.0.2:2 syn",
        "icmp 10.0.0.1 > 10.0.0.2 type 8",
        "arp",
        "udp [::1]:1 > [::2]:2",
    ] {
        let written = PacketSpec::parse(packet).unwrap();
        let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
        let explained = gate.explain(&Walk::new(Dir::In, None, None), &parsed, NOW).verdict;
        assert_eq!(step(&mut gate, packet), explained, "{packet}");
    }
    let gate = self::gate("add 10 call 10 ip from any to any");
    assert_eq!(explain(&gate, DNS).len(), 18);
}

#[test]
fn reload_keeps_unchanged_rules() {
    let old = "add 10 check-state\nadd 20 allow udp from any to any 53 record-state\nadd 30 allow udp from any to any 54 record-state\nadd 40 deny ip from any to any";
    let new = "table t add 10.0.0.0/8\nadd 10 check-state\nadd 20 allow udp from any to any 53 record-state\nadd 35 count ip from any to any\nadd 40 deny ip from any to any";
    let other = "udp 10.0.0.1:1000 > 10.0.0.2:54";
    let back = "udp 10.0.0.2:54 > 10.0.0.1:1000";
    let expected = Diff {
        added: vec!["00035 count ip from any to any".into()],
        removed: vec!["00030 allow udp from any to any 54 record-state :default".into()],
        kept: 4,
        tables: vec!["t".into()],
        states_orphaned: 1,
        ..Diff::default()
    };
    let mut gate = gate(old);
    assert_eq!((step(&mut gate, DNS), step(&mut gate, other)), (Step::Pass, Step::Pass));
    assert_eq!(gate.preview(&ruleset(new), StatePolicy::Keep, NOW), expected);
    assert_eq!(gate.reload(ruleset(new), StatePolicy::Keep, NOW), expected);
    // Both flows continue, and rule 20 keeps its counters.
    assert_eq!((step(&mut gate, ANSWER), step(&mut gate, back)), (Step::Pass, Step::Pass));
    let shown = gate.show();
    assert_eq!(
        shown.iter().map(|r| (r.number, r.packets)).collect::<Vec<_>>(),
        [(10, 0), (20, 2), (35, 0), (40, 0), (65535, 0)]
    );
    assert_eq!(gate.unused().map(|rule| rule.number).collect::<Vec<_>>(), [10, 35, 40]);
    assert!(gate.table("t").is_some());

    let mut gate = self::gate(old);
    assert_eq!((step(&mut gate, DNS), step(&mut gate, other)), (Step::Pass, Step::Pass));
    let diff = gate.reload(ruleset(new), StatePolicy::Drop, NOW);
    assert_eq!((diff.states_dropped, gate.states().list(NOW).count()), (2, 0));
}

#[test]
fn recheck_removes_states_that_the_new_rules_would_not_create() {
    let old = "add 10 check-state\nadd 20 allow udp from any to any 53 record-state\nadd 30 allow tcp from any to any setup record-state";
    let mut gate = gate(old);
    assert_eq!(step(&mut gate, DNS), Step::Pass);
    assert_eq!(step(&mut gate, "tcp 10.0.0.1:1 > 10.0.0.2:80 syn"), Step::Pass);
    let new = format!("add 5 check-state\nadd 15 deny udp from 10.0.0.1 to any\n{old}");
    let diff = gate.reload(ruleset(&new), StatePolicy::Recheck, NOW);
    assert_eq!((diff.states_dropped, diff.removed.len()), (1, 0));
    assert_eq!(step(&mut gate, ANSWER), Step::Drop(towpath_gate::DropReason::Deny));
    assert_eq!(step(&mut gate, "tcp 10.0.0.2:80 > 10.0.0.1:1 syn ack ackno 1"), Step::Pass);
}

/// A re-check decides for each state. Rows: new rules, and the result for three states that one rule created.
#[test]
fn recheck_decides_per_state() {
    let old = "table t add 10.0.0.2 0 10.0.0.3\nadd 10 check-state\nadd 20 allow ip from any to table(t) in recv em0 keep-state";
    let first = [
        "in em0 tcp 10.0.0.1:1 > 10.0.0.2:80 syn",
        "in em0 udp 10.0.0.1:1 > 10.0.0.2:53",
        "in em0 icmp 10.0.0.1 > 10.0.0.3 type 8",
    ];
    let back = [
        "tcp 10.0.0.2:80 > 10.0.0.1:1 syn ack",
        "udp 10.0.0.2:53 > 10.0.0.1:1",
        "icmp 10.0.0.3 > 10.0.0.1 type 0",
    ];
    let rows: [(&str, &str, [bool; 3]); 7] = [
        ("", "", [true; 3]),
        ("10.0.0.2 0 10.0.0.3", "10.0.0.2", [true, true, false]),
        ("", "add 15 deny udp from any to any", [true, false, true]),
        ("", "add 15 deny tcp from any to any established", [true; 3]),
        ("", "add 15 deny tcp from any to any", [false, true, true]),
        ("", "add 15 skipto 30 ip from any to any recv em1", [true; 3]),
        ("recv em0", "recv em1", [false; 3]),
    ];
    for (from, to, stays) in rows {
        let new = if from.is_empty() { format!("{old}\n{to}") } else { old.replace(from, to) };
        let mut gate = gate_with(old, &["em0", "em1"]);
        for packet in first {
            let written = PacketSpec::parse(packet).unwrap();
            let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
            let port = gate.ports().find("em0");
            assert_eq!(gate.walk(&mut Walk::new(Dir::In, port, None), &parsed, NOW), Step::Pass);
        }
        let gone = stays.iter().filter(|stays| !**stays).count();
        assert_eq!(gate.preview(&ruleset(&new), StatePolicy::Recheck, NOW).states_dropped, gone, "{to}");
        assert_eq!(gate.states().len(), 3);
        let diff = gate.reload(ruleset(&new), StatePolicy::Recheck, NOW);
        assert_eq!(diff.states_dropped, gone, "{to}");
        let passed = back.map(|packet| step(&mut gate, packet) == Step::Pass);
        assert_eq!(passed, stays, "{to}");
    }
}

#[test]
fn a_paused_walk_continues_in_the_new_rules() {
    let mut gate = gate("add 10 divert 1 ip from any to any\nadd 20 allow ip from any to any");
    let written = PacketSpec::parse(DNS).unwrap();
    let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
    let mut walk = Walk::new(Dir::In, None, None);
    assert_eq!(gate.walk(&mut walk, &parsed, NOW), Step::Divert(1));
    gate.reload(
        ruleset(
            "add 5 deny ip from any to any\nadd 10 deny ip from any to any\nadd 15 allow ip from any to any",
        ),
        StatePolicy::Keep,
        NOW,
    );
    assert_eq!(gate.walk(&mut walk, &parsed, NOW), Step::Pass);
    assert!(size_of::<Walk>() <= 192, "{}", size_of::<Walk>());
}

/// A stepwise re-check has the same result as a single one, and frees the gate between the steps.
#[test]
fn stepwise_recheck_removes_the_same_states() {
    let rules = "add 10 check-state\nadd 20 allow udp from any to any keep-state";
    let new =
        "add 10 check-state\nadd 15 deny udp from any to any 53\nadd 20 allow udp from any to any keep-state";
    let fill = || {
        let mut gate = gate(rules);
        for n in 0..10_000 {
            let port = if n % 3 == 0 { 53 } else { 123 };
            let packet = format!("udp 10.0.{}.{}:1 > 10.0.0.2:{port}", n / 250 + 1, n % 250);
            assert_eq!(step(&mut gate, &packet), Step::Pass);
        }
        gate
    };
    let mut whole = fill();
    let dropped = whole.reload(ruleset(new), StatePolicy::Recheck, NOW).states_dropped;
    assert_eq!(dropped, 3334);

    let mut gate = fill();
    assert_eq!(gate.reload(ruleset(new), StatePolicy::RecheckLater, NOW).states_dropped, 0);
    // Packets of the last state use it until it has been checked.
    assert_eq!(step(&mut gate, "udp 10.0.40.249:1 > 10.0.0.2:53"), Step::Pass);
    let (mut pieces, mut looked, mut sum, mut from) = (0, 0, 0, Some(Cursor::default()));
    while let Some(cursor) = from {
        let rechecked = gate.recheck_step(cursor, NOW);
        // States that the new rules create meanwhile stay.
        assert_eq!(step(&mut gate, &format!("udp 10.9.0.{pieces}:1 > 10.0.0.2:123")), Step::Pass);
        (pieces, looked, sum, from) =
            (pieces + 1, looked + rechecked.checked, sum + rechecked.dropped, rechecked.next);
    }
    assert_eq!((pieces, looked, sum), (3, 10_000 + 2, dropped));
    assert_eq!(gate.states().list(NOW).count(), 10_000 - dropped + pieces);
    assert_eq!(step(&mut gate, "udp 10.0.40.249:1 > 10.0.0.2:53"), Step::Drop(DropReason::Deny));
}

/// A reload during a re-check applies its own policy to the states of rules that it deletes. Earlier orphans are
/// removed by the re-check.
#[test]
fn orphans_of_a_reload_during_a_recheck_stay() {
    let rule = |number: u32, port: u32| format!("add {number} allow udp from any to any {port} keep-state\n");
    let mut gate = gate(&(rule(10, 1) + &rule(20, 2) + &rule(30, 3)));
    let listed = |gate: &Gate| {
        let mut ports: Vec<_> = gate.states().list(NOW).map(|state| state.flow.dst_port).collect();
        ports.sort_unstable();
        ports
    };
    for port in 1..=3 {
        assert_eq!(step(&mut gate, &format!("udp 10.0.0.1:1 > 10.0.0.2:{port}")), Step::Pass);
    }
    gate.reload(ruleset(&(rule(20, 2) + &rule(30, 3))), StatePolicy::Keep, NOW);
    assert_eq!(listed(&gate), [1, 2, 3]);
    let diff = gate.reload(ruleset(&(rule(20, 2) + &rule(30, 3))), StatePolicy::RecheckLater, NOW);
    assert_eq!((diff.states_dropped, listed(&gate)), (0, vec![1, 2, 3]));
    gate.reload(ruleset(&rule(30, 3)), StatePolicy::Keep, NOW);
    let rechecked = gate.recheck_step(Cursor::default(), NOW);
    assert_eq!((rechecked.checked, rechecked.dropped, listed(&gate)), (3, 1, vec![2, 3]));
    assert_eq!((gate.finish_recheck(), listed(&gate)), (0, vec![2, 3]));
}

#[test]
fn invalid_packet_specs_are_rejected() {
    for (words, wrong) in [
        ("in cap0 tcp 10.0.0.1:1234", "\">\" is missing between the addresses;"),
        ("in tcp 10.0.0.1:1234 10.0.0.2:22 syn", "\">\" is missing between the addresses;"),
        ("in cap0 tpc 10.0.0.1:1234 > 10.0.0.2:22", "unknown protocol \"tpc\";"),
        ("in tpc 10.0.0.1:1234", "unknown protocol \"tpc\";"),
    ] {
        let error = PacketSpec::parse(words).unwrap_err().to_string();
        assert!(error.starts_with(wrong), "{words}: {error}");
    }
}

/// A walk of the first packets, and the time in seconds that passes after them.
type Before<'a> = (&'a [&'a str], u64);

/// `explain` foresees a state that cannot be made, and changes nothing: its verdict is that of the walk that follows.
#[test]
fn explain_foresees_a_state_that_cannot_be_made() {
    let refused = |reason| Step::Drop(DropReason::NoState(reason));
    let keep = "add allow ip from any to any keep-state";
    let limit = "add allow udp from any to any limit src-addr 1";
    let by_table = "table t add 10.0.0.0/8 1\nadd allow udp from table(t) to any limit src-addr tablearg";
    let [a, b, c] =
        ["udp 10.0.0.1:1 > 10.0.0.9:53", "udp 10.0.0.1:2 > 10.0.0.9:53", "udp 10.0.0.2:1 > 10.0.0.9:53"];
    let syn = "tcp 10.0.0.1:1 > 10.0.0.9:80 syn";
    let max = |dyn_max, dyn_evict| Settings { dyn_max, dyn_evict, ..Settings::default() };
    let plain = Settings::default;
    #[rustfmt::skip]
    let rows: [(Settings, &str, Before<'_>, &str, Step); 19] = [
        (plain(), limit, (&[], 0), a, Step::Pass),
        (plain(), limit, (&[a], 0), a, Step::Pass),
        (plain(), limit, (&[a], 0), b, refused(Refused::OverLimit)),
        (plain(), limit, (&[a], 0), c, Step::Pass),
        (plain(), limit, (&[a], 11), b, Step::Pass),
        (plain(), by_table, (&[a], 0), b, refused(Refused::OverLimit)),
        (plain(), "add allow udp from any to any limit src-addr 1/second", (&[a], 0), b, refused(Refused::OverRate)),
        (plain(), "add allow udp from any to any limit src-addr 1/second", (&[a], 1), b, Step::Pass),
        (Settings { dyn_parent_max: 1, ..plain() }, limit, (&[a], 0), c, refused(Refused::ParentsFull)),
        (Settings { dyn_parent_max: 1, ..plain() }, limit, (&[a], 11), c, Step::Pass),
        (Settings { dyn_source_max: 1, ..plain() }, keep, (&[a], 0), b, refused(Refused::OverSource)),
        (Settings { dyn_source_max: 1, ..plain() }, keep, (&[a], 0), c, Step::Pass),
        (Settings { dyn_source_max: 1, ..plain() }, keep, (&[a], 11), b, Step::Pass),
        (max(2, false), keep, (&[a, b], 0), c, refused(Refused::Full)),
        (max(2, false), keep, (&[a, b], 11), c, Step::Pass),
        (max(2, true), keep, (&[a, b], 0), c, Step::Pass),
        (Settings { dyn_first_syn: true, ..plain() }, keep, (&[], 0), syn, refused(Refused::FirstSyn)),
        (Settings { dyn_first_syn: true, ..plain() }, keep, (&[syn], 1), syn, Step::Pass),
        (plain(), "add allow tcp from any to any keep-state strict", (&[], 0), "tcp 10.0.0.1:1 > 10.0.0.9:80 ack", refused(Refused::Invalid)),
    ];
    for (row, (settings, rules, (before, seconds), packet, expected)) in rows.into_iter().enumerate() {
        let mut gate = Gate::new(ruleset(rules), Ports::new(), settings, 3);
        for packet in before {
            step(&mut gate, packet);
        }
        let now = NOW + std::time::Duration::from_secs(seconds);
        let written = PacketSpec::parse(packet).unwrap();
        let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
        let look = |gate: &Gate| {
            (gate.show(), gate.states().counters(), gate.states().list(now).collect::<Vec<_>>())
        };
        let unchanged = look(&gate);
        for _ in 0..2 {
            let explanation = gate.explain(&Walk::new(Dir::In, None, None), &parsed, now);
            assert_eq!(explanation.verdict, expected, "row {row}: {:?}", explanation.steps);
        }
        assert_eq!(look(&gate), unchanged, "row {row}");
        assert_eq!(gate.walk(&mut Walk::new(Dir::In, None, None), &parsed, now), expected, "row {row}");
    }
}

/// The outgoing walk of a packet finds the state, the mark and the tags of the incoming one; and within a walk, that of `defer-action`.
#[test]
fn explain_finds_the_states_that_the_packet_would_make() {
    let rows = [
        ("add allow ip from any to any in keep-state\nadd deny ip from any to any out", Step::Pass),
        (
            "add allow ip from any to any in keep-state :a\nadd deny ip from any to any out keep-state :b",
            Step::Pass,
        ),
        (
            "add setmark 7 ip from any to any in\nadd allow ip from any to any in\nadd allow ip from any to any out mark 7",
            Step::Pass,
        ),
        (
            "add allow ip from any to any in record-state defer-action\nadd check-state\nadd deny ip from any to any",
            Step::Pass,
        ),
        (
            "add allow ip from any to any in set-limit src-addr 1 :a\nadd allow ip from any to any out set-limit src-addr 1 :b",
            Step::Pass,
        ),
        (
            "add allow udp from any to any in set-limit src-addr 1 shared x :a\nadd allow udp from any to any out set-limit src-addr 1 shared x :b",
            Step::Drop(DropReason::NoState(Refused::OverLimit)),
        ),
    ];
    let written = PacketSpec::parse(DNS).unwrap();
    let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
    for (rules, expected) in rows {
        let mut gate = gate_with(rules, &["em0", "em1"]);
        let port = |name| gate.ports().find(name).unwrap();
        let (em0, em1) = (port("em0"), port("em1"));
        let walks = |step: &mut dyn FnMut(&mut Walk) -> Step| {
            let mut walk = Walk::new(Dir::In, Some(em0), None);
            let first = step(&mut walk);
            walk.leave(em1);
            [first, step(&mut walk)]
        };
        let mut states = Foreseen::default();
        let explained = walks(&mut |walk| gate.explain_walk(walk, &mut states, &parsed, NOW).verdict);
        assert_eq!((gate.states().len(), explained[1]), (0, expected), "{rules}");
        assert_eq!(walks(&mut |walk| gate.walk(walk, &parsed, NOW)), explained, "{rules}");
    }
}
