//! Stories of zones: each zone has separate states.

use towpath_gate::rules::Ruleset;
use towpath_gate::state::Settings;
use towpath_gate::{Dir, Gate, PacketSpec, Ports, StatePolicy, Step, Walk};
use towpath_wire::{self as wire, Time};

use super::{ANSWER, DENY, DNS, Story};

/// Two customers with equal addresses, on ports in different zones.
#[test]
fn states_are_per_zone() {
    let rules = "add check-state\nadd allow udp from any to any 53 keep-state\nadd deny ip from any to any";
    let mut ports = Ports::new();
    for (name, zone) in [("a0", 1), ("a1", 1), ("b0", 2), ("b1", 2), ("c", 0)] {
        let id = ports.add(name, Vec::new());
        ports.set_zone(id, zone);
    }
    let find = |name: &str| ports.find(name).unwrap();
    let [a0, a1, b0, b1, c] = ["a0", "a1", "b0", "b1", "c"].map(find);
    let mut gate = Gate::new(Ruleset::parse("t", rules).ruleset.unwrap(), ports, Settings::default(), 1);
    let mut walker = gate.walker().unwrap();
    let (query, answer) = (PacketSpec::parse(DNS).unwrap().frame, PacketSpec::parse(ANSWER).unwrap().frame);
    let now = Time::from_secs(1_000);
    let mut step = |recv, frame: &[u8], burst: bool| {
        let len = frame.len() as u32;
        if burst {
            walker.prefetch(Some(recv), std::iter::once(wire::plain(wire::LinkType::ETHERNET, frame, len)));
            if walker.try_pass(0, now).is_some() {
                return Step::Pass;
            }
        }
        let packet = wire::parse(wire::LinkType::ETHERNET, frame, len).unwrap();
        walker.walk(&mut Walk::new(Dir::In, Some(recv), None), &packet, now)
    };
    assert_eq!(step(a0, &query, true), Step::Pass);
    for burst in [false, true] {
        let others = [b1, b0, c].map(|port| step(port, &answer, burst));
        assert_eq!(others, [DENY; 3], "{burst}");
        assert_eq!([a1, a0].map(|port| step(port, &answer, burst)), [Step::Pass; 2], "{burst}");
    }
    assert_eq!(step(b0, &query, true), Step::Pass);
    assert_eq!(step(b1, &answer, true), Step::Pass);
    let listed: Vec<_> =
        gate.states().list(now).map(|state| state.line(1, |_| "default").to_string()).collect();
    assert_eq!(listed.len(), 2);
    assert!(listed[0].ends_with(" zone 1") && listed[1].ends_with(" zone 2"), "{listed:?}");
    // The outgoing walk of a packet and `explain` are in the zone of the receive port.
    let packet = wire::parse(wire::LinkType::ETHERNET, &answer, answer.len() as u32).unwrap();
    let explained = |recv| gate.explain(&Walk::new(Dir::In, Some(recv), None), &packet, now).verdict;
    assert_eq!([a1, b1, c].map(explained), [Step::Pass, Step::Pass, DENY]);
}

#[test]
fn a_rule_sets_the_zone() {
    let rules = "add setzone 7 ip from any to any via em0\nadd check-state\nadd allow udp from any to any 53 keep-state";
    let mut story = Story::new(rules);
    let via = |port: &str, packet: &str| format!("in {port} {packet}");
    assert_eq!(story.first(&via("em0", DNS)), Step::Pass);
    assert_eq!(story.first(&via("em1", ANSWER)), DENY);
    assert_eq!(story.first(&via("em0", ANSWER)), Step::Pass);
    assert_eq!(story.first(&via("em1", DNS)), Step::Pass);
    let now = Time::from_secs(story.now);
    let mut zones: Vec<u16> = story.gate.states().list(now).map(|state| state.flow.zone).collect();
    zones.sort_unstable();
    assert_eq!(zones, [0, 7]);
    // Without `setzone`, no rule makes the state of zone 7: what stays is that of zone 0, which em1's packet made.
    for (more, left) in
        [("add setzone 7 ip from any to any via em0\n", 2), ("add setzone 8 ip from any to any via em0\n", 1)]
    {
        let rules = format!("{more}add check-state\nadd allow udp from any to any 53 keep-state");
        let ruleset = Ruleset::parse("t", &rules).ruleset.unwrap();
        story.gate.reload(ruleset, StatePolicy::Recheck, now);
        assert_eq!(story.gate.states().list(now).count(), left, "{more}");
    }
    let error = Ruleset::parse("t", "add setzone 0 ip from any to any").ruleset.unwrap_err();
    assert!(error[0].to_string().contains("zone"), "{}", error[0]);
}

/// Each zone has its own states: a lookup in another zone says nothing about the states of this one.
#[test]
fn setzone_forgets_the_last_lookup() {
    let keep = "add allow udp from any to any 53 keep-state";
    for (after, named) in [("add check-state\n", ""), ("", ""), ("", " :dns")] {
        let rules = format!("add check-state{named}\nadd setzone 7 ip from any to any\n{after}{keep}{named}");
        let mut story = Story::new(&rules);
        assert_eq!(story.first(DNS), Step::Pass, "{rules}");
        assert_eq!(story.first(ANSWER), Step::Pass, "{rules}");
        let written = PacketSpec::parse(ANSWER).unwrap();
        let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
        let explained = story.gate.explain(&story.walk(ANSWER), &parsed, Time::from_secs(story.now));
        assert_eq!(explained.verdict, Step::Pass, "{rules}");
    }
}

/// The first packet of a state begins in the zone of its port. Rows: the rules after an edit, and the states that stay.
#[test]
fn a_recheck_begins_in_the_zone_of_the_port() {
    let keep = "add check-state\nadd allow udp from any to any 53 keep-state";
    let rows = [
        (String::new(), 0),
        ("add setzone 7 ip from any to any via em0\nadd count ip from any to any\n".to_owned(), 1),
        ("add setzone 7 ip from any to any via em1\n".to_owned(), 0),
        ("add setzone 8 ip from any to any via em0\n".to_owned(), 0),
        // Rules that create a state of zone 0 and leave the decision to later rules.
        (
            "add allow udp from any to any record-state :a defer-action\n\
             add setzone 7 ip from any to any via em0\n"
                .to_owned(),
            1,
        ),
        (
            "add count udp from any to any keep-state :a\nadd setzone 7 ip from any to any via em0\n"
                .to_owned(),
            1,
        ),
    ];
    let ruleset = |text: &str| Ruleset::parse("t", text).ruleset.unwrap();
    let left = |story: &mut Story, rules: &str| {
        let now = Time::from_secs(story.now);
        story.gate.reload(ruleset(rules), StatePolicy::Recheck, now);
        story.gate.states().list(now).count()
    };
    let dns = format!("in em0 {DNS}");
    for (more, expected) in rows {
        let mut story = Story::new(&format!("add setzone 7 ip from any to any via em0\n{keep}"));
        assert_eq!(story.first(&dns), Step::Pass);
        assert_eq!(left(&mut story, &format!("{more}{keep}")), expected, "{more}");
    }
    // A port of zone 7.
    let mut story = Story::new(keep);
    let mut ports = story.gate.ports().clone();
    ports.set_zone(ports.find("em0").unwrap(), 7);
    story.gate.set_ports(ports);
    assert_eq!(story.first(&dns), Step::Pass);
    assert_eq!(left(&mut story, &format!("add count ip from any to any\n{keep}")), 1);
    assert_eq!(left(&mut story, &format!("add setzone 8 ip from any to any\n{keep}")), 0);
    // The incoming walk sets the zone of a packet whose state an outgoing rule creates.
    let out = "add allow udp from any to any 53 out keep-state\nadd allow ip from any to any in";
    for (more, expected) in [("add setzone 7 ip from any to any in recv em0\n", 1), ("", 0)] {
        let mut story = Story::new(&format!("add setzone 7 ip from any to any in\n{out}"));
        let mut walk = story.walk(&dns);
        assert_eq!(story.step(&mut walk, &dns), Step::Pass);
        walk.leave(story.gate.ports().find("em1").unwrap());
        assert_eq!(story.step(&mut walk, &dns), Step::Pass);
        assert_eq!(left(&mut story, &format!("{more}{out}")), expected, "{more}");
    }
}

#[test]
fn a_walk_may_be_given_a_zone() {
    let mut story = Story::new("add allow udp from any to any 53 keep-state");
    let mut walk = story.walk(DNS).with_zone(1);
    assert_eq!(story.step(&mut walk, DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), DENY);
    let mut walk = story.walk(ANSWER).with_zone(1);
    assert_eq!(story.step(&mut walk, ANSWER), Step::Pass);
}
