//! The indexed walk compared with the linear walk, and bursts compared with single packets: for any rules and
//! packets the steps, states and counters are equal.

use proptest::prelude::*;
use towpath_gate::rules::Ruleset;
use towpath_gate::state::Settings;
use towpath_gate::{BURST, Dir, Gate, PacketSpec, Ports, Step, Walk, Walker};
use towpath_wire::{self as wire, Time};

fn pick(words: &'static [&'static str]) -> impl Strategy<Value = &'static str> + Clone {
    proptest::sample::select(words)
}

/// One of few hosts, so that rules and packets match often.
fn host4() -> impl Strategy<Value = String> {
    (pick(&["10.0", "10.1", "192.168"]), 0..3u8, 0..4u8).prop_map(|(net, a, b)| format!("{net}.{a}.{b}"))
}

fn host6() -> impl Strategy<Value = String> {
    (0..3u8, 0..3u8).prop_map(|(a, b)| format!("2001:db8:{a}::{b}"))
}

fn address() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => Just("any".to_owned()),
        4 => host4(),
        3 => (host4(), pick(&["8", "16", "24", "30", "0"])).prop_map(|(host, len)| format!("{host}/{len}")),
        1 => host4().prop_map(|host| format!("{host}:255.0.255.0")),
        2 => host6(),
        1 => host6().prop_map(|host| format!("{host}/48")),
        1 => host6().prop_map(|host| format!("{host}/ffff:ffff:ffff::ffff")),
        1 => proptest::collection::vec(prop_oneof![host4(), host6()], 2..6).prop_map(|list| list.join(",")),
        1 => Just("192.168.1.0/24{0,2-3}".to_owned()),
        1 => pick(&["me", "table(t)", "table(t,1)", "not table(t)", "not me"]).prop_map(str::to_owned),
        1 => host4().prop_map(|host| format!("not {host}")),
        1 => (host4(), host6()).prop_map(|(a, b)| format!("{{ {a} or not {b} }}")),
    ]
}

fn ports() -> impl Strategy<Value = String> {
    pick(&["", "", "", "53", "80", "80,443", "1024-65535", "not 80", "1-100,200-300,400"])
        .prop_map(str::to_owned)
}

fn action() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("allow".to_owned()),
        4 => Just("deny".to_owned()),
        3 => pick(&["count", "count tag 5", "setmark 7", "setdscp ef", "state-timeout 20", "setzone 3", "return"]).prop_map(str::to_owned),
        2 => (1..400u32).prop_map(|to| format!("skipto {to}")),
        1 => (1..400u32).prop_map(|to| format!("call {to}")),
        1 => pick(&["skipto tablearg", "divert 3", "inspect 5", "tee 4", "reject", "prob 0.5 count", "prob 0.5 allow"]).prop_map(str::to_owned),
    ]
}

fn options() -> impl Strategy<Value = String> {
    let words = &[
        "",
        "",
        "",
        "",
        "in",
        "out",
        "setup",
        "established",
        "not established",
        "via em0",
        "recv em1",
        "frag",
        "layer2",
        "tagged 5",
        "mark 7",
        "dscp ef",
        "icmptypes 8",
        "icmp6types 128",
        "ipttl 1-100",
        "{ in or setup }",
        "{ src-port 53 or dst-port 53 }",
        "tcpflags syn,!ack",
        "not ipv6",
        "dst-ip table(t)",
        "MAC any any",
        "src-ip 10.0.0.0/16",
        "proto udp",
        "lookup src-ip t",
    ];
    let state = &[
        "",
        "",
        "",
        "",
        "keep-state",
        "keep-state :a",
        "keep-state :b",
        "record-state",
        "record-state :a",
        "limit src-addr 2",
        "set-limit dst-port 3 :b",
        "keep-state defer-action",
    ];
    (pick(words), pick(words), pick(state)).prop_map(|(a, b, c)| format!("{a} {b} {c}"))
}

fn rule() -> impl Strategy<Value = String> {
    let proto = pick(&[
        "ip",
        "ip",
        "tcp",
        "udp",
        "icmp",
        "icmp6",
        "ip4",
        "ip6",
        "not udp",
        "{ tcp or udp }",
        "gre",
        "1",
        "58",
    ]);
    let body = (proto, address(), ports(), address(), ports(), options()).prop_map(
        |(proto, src, sport, dst, dport, options)| {
            format!("{proto} from {src} {sport} to {dst} {dport} {options}")
        },
    );
    let full = (action(), body).prop_map(|(action, body)| format!("{action} {body}"));
    let check = pick(&["check-state", "check-state :a", "check-state :b", "check-state :any"])
        .prop_map(str::to_owned);
    let ruled = prop_oneof![12 => full, 1 => check];
    // The grammar requires `prob` first.
    (1..400u32, pick(&["", "", "", "set 3", "set 4"]), ruled)
        .prop_map(|(n, set, rule)| format!("add {n} {set} {rule}\n"))
}

fn packet() -> impl Strategy<Value = String> {
    let port =
        (pick(&["1", "53", "80", "443", "2000", "250"]), pick(&["1", "53", "80", "443", "2000", "250"]));
    let way = pick(&["in em0", "in em1", "out em0", "in"]);
    let four = (
        way.clone(),
        pick(&["tcp", "udp", "sctp"]),
        host4(),
        host4(),
        port.clone(),
        pick(&[
            "",
            "syn",
            "ack",
            "syn ack",
            "rst",
            "syn rst",
            "fin ack",
            "offset 5 len 8",
            "mf",
            "ttl 200",
            "tos 0xb8",
        ]),
    )
        .prop_map(|(way, proto, src, dst, (s, d), words)| {
            format!("{way} {proto} {src}:{s} > {dst}:{d} {words}")
        });
    let six = (
        way.clone(),
        pick(&["tcp", "udp"]),
        host6(),
        host6(),
        port,
        pick(&["", "syn", "ack", "offset 5 len 8", "ext hopopt"]),
    )
        .prop_map(|(way, proto, src, dst, (s, d), words)| {
            format!("{way} {proto} [{src}]:{s} > [{dst}]:{d} {words}")
        });
    let other =
        (way.clone(), pick(&["icmp", "gre", "icmp6"]), host4(), host4(), pick(&["", "type 8", "type 3"]))
            .prop_map(|(way, proto, src, dst, words)| format!("{way} {proto} {src} > {dst} {words}"));
    let icmp6 = (way, host6(), host6(), pick(&["type 128", "type 1", ""]))
        .prop_map(|(way, src, dst, words)| format!("{way} icmp6 {src} > {dst} {words}"));
    prop_oneof![6 => four, 3 => six, 1 => other, 1 => icmp6, 1 => Just("in em0 arp".to_owned())]
}

fn gate(rules: &str) -> Gate {
    let parsed = Ruleset::parse("t", rules);
    let ruleset = parsed.ruleset.unwrap_or_else(|errors| panic!("{rules}: {}", errors[0]));
    let mut ports = Ports::new();
    ports.add("em0", vec!["10.0.0.1".parse().unwrap(), "2001:db8:1::1".parse().unwrap()]);
    ports.add("em1", Vec::new());
    Gate::new(ruleset, ports, Settings::default(), 9)
}

/// Returns all steps of one packet.
fn steps(gate: &mut Gate, packet: &str, now: u64, straight: bool) -> Vec<(Step, String)> {
    let written = PacketSpec::parse(packet).unwrap_or_else(|e| panic!("{packet}: {e}"));
    let Ok(parsed) = wire::parse(written.link(), &written.frame, written.frame.len() as u32) else {
        return Vec::new();
    };
    let port = written.port.as_deref().and_then(|name| gate.ports().find(name));
    let mut walk = match written.dir {
        Dir::In => Walk::new(Dir::In, port, None),
        Dir::Out => Walk::new(Dir::Out, None, port),
    };
    let mut all = Vec::new();
    loop {
        let now = Time::from_secs(now);
        let step = if straight {
            gate.walk_linear(&mut walk, &parsed, now)
        } else {
            gate.walk(&mut walk, &parsed, now)
        };
        all.push((step, format!("{walk:?}")));
        if !matches!(step, Step::Divert(_) | Step::Tee(_) | Step::Reassemble) {
            return all;
        }
    }
}

/// Returns the first step of one packet and the rule that decided.
fn one(walker: &mut Walker, written: &PacketSpec, now: u64) -> Option<(Step, Option<u32>)> {
    let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).ok()?;
    let port = written.port.as_deref().and_then(|name| walker.ports().find(name));
    let mut walk = match written.dir {
        Dir::In => Walk::new(Dir::In, port, None),
        Dir::Out => Walk::new(Dir::Out, None, port),
    };
    Some((walker.walk(&mut walk, &parsed, Time::from_secs(now)), walk.rule()))
}

/// A rule before the state lookup may stay if no IP packet can match it.
#[test]
fn bursts_pass_after_rules_for_other_frames() {
    #[rustfmt::skip]
    let rows = [
        // Rules before the lookup; whether bursts pass.
        ("",                                                     true),
        ("add allow layer2 mac-type arp\n",                     true),
        ("add allow mac-type arp,0x88cc\nadd deny mac-type 0x8863\n", true),
        ("set disable 3\nadd set 3 deny udp from any to any\n", true),
        ("add count mac-type ip\n",                             false),
        ("add count not mac-type arp\n",                        false),
        ("add count { mac-type arp or in }\n",                 false),
        ("add count layer2\n",                                  false),
        ("add prob 0.5 allow mac-type arp\n",                   true),
    ];
    for (front, passes) in rows {
        let mut gate =
            gate(&format!("{front}add check-state\nadd 200 allow udp from any to any keep-state\n"));
        let mut walker = gate.walker().unwrap();
        let written = PacketSpec::parse("in em0 udp 10.0.0.2:4000 > 10.0.0.3:53").unwrap();
        assert_eq!(one(&mut walker, &written, 1), Some((Step::Pass, Some(200))), "{front}");
        let plain = wire::plain(written.link(), &written.frame, written.frame.len() as u32);
        walker.prefetch(None, [plain].into_iter());
        assert_eq!(walker.try_pass(0, Time::from_secs(1)), passes.then_some(200), "{front}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn indexed_and_linear_walk_agree(
        rules in proptest::collection::vec(rule(), 1..90),
        packets in proptest::collection::vec((packet(), 0..8u64), 1..60),
        disabled in any::<bool>(),
    ) {
        let tables = "table t add 10.0.1.0/24 1 10.1.0.0/16 200 2001:db8:2::/48 1\n";
        let sets = if disabled { "set disable 4\n" } else { "" };
        let rules = format!("{tables}{}{sets}", rules.concat());
        let (mut indexed, mut straight) = (gate(&rules), gate(&rules));
        let mut now = 1000;
        for (packet, later) in &packets {
            now += later;
            let expected = steps(&mut straight, packet, now, true);
            let found = steps(&mut indexed, packet, now, false);
            prop_assert_eq!(&found, &expected, "{}\n{}", packet, rules);
        }
        prop_assert_eq!(indexed.show(), straight.show());
        prop_assert_eq!(indexed.states().len(), straight.states().len());
        prop_assert_eq!(indexed.states().counters().created, straight.states().counters().created);
    }

    /// Packets that pass by state in a burst are those that would pass one by one.
    #[test]
    fn bursts_and_single_packets_agree(
        opening in pick(&[
            "check-state", "check-state :a", "check-state :any", "allow udp from any to any keep-state", "count ip from any to any",
            "count ip from any to any via em1", "deny ip from any to any frag", "count tcp from any to any 250",
            "allow ip from 10.0.0.0/30 to not 10.0.0.0/8 out", "count { udp or sctp } from any to any established",
            "allow layer2 mac-type arp\nadd 2 check-state", "deny mac-type ipv6\nadd 2 check-state",
            "deny not mac-type arp\nadd 2 check-state", "deny { mac-type arp or in }\nadd 2 check-state",
            "prob 0.5 deny mac-type arp\nadd 2 check-state",
        ]),
        rules in proptest::collection::vec(rule(), 1..20),
        packets in proptest::collection::vec((packet(), 0..20u64), 1..8),
        order in proptest::collection::vec((0..8usize, any::<bool>()), 1..150),
        size in 1..=BURST,
    ) {
        let tables = "table t add 10.0.1.0/24 1 10.1.0.0/16 200 2001:db8:2::/48 1\n";
        let end = "add 500 allow ip from any to any keep-state :a\n";
        let rules = format!("{tables}add 1 {opening}\n{}{end}", rules.concat());
        let (mut alone, mut together) = (gate(&rules), gate(&rules));
        // Each walker is the first of its gate, so that both have the same random numbers.
        let (mut straight, mut walker) = (alone.walker().unwrap(), together.walker().unwrap());
        // Few packets, many times: most of them have a state.
        let burst = order.iter().map(|(at, _)| PacketSpec::parse(&packets[at % packets.len()].0).unwrap());
        let burst: Vec<PacketSpec> = burst.collect();
        let mut now = 1000;
        for (burst, later) in burst.chunks(size).zip(packets.iter().map(|(_, later)| later).cycle()) {
            now += later;
            // Only packets of the same receive port as the first one.
            let port = burst.first().and_then(|written| written.port.clone());
            let plain = |written: &PacketSpec| {
                let same = written.dir == Dir::In && written.port == port;
                if same { wire::plain(written.link(), &written.frame, written.frame.len() as u32) } else { None }
            };
            let recv = port.as_deref().and_then(|name| walker.ports().find(name));
            walker.prefetch(recv, burst.iter().map(plain));
            for (at, written) in burst.iter().enumerate() {
                let expected = one(&mut straight, written, now);
                let mut walk = Walk::new(written.dir, recv, None);
                // Both functions of the fast path.
                let known = match at % 2 {
                    0 => walker.try_pass(at, Time::from_secs(now)).map(|rule| (Step::Pass, Some(rule))),
                    _ => walker.try_step(at, &mut walk, Time::from_secs(now)).map(|step| (step, walk.rule())),
                };
                let found = known.or_else(|| one(&mut walker, written, now));
                prop_assert_eq!(&found, &expected, "{:?}\n{}", written, rules);
            }
        }
        prop_assert_eq!(alone.show(), together.show());
        let now = Time::from_secs(now);
        prop_assert!(alone.states().list(now).eq(together.states().list(now)));
    }

    /// Rules that are printed and parsed again are equal.
    #[test]
    fn printed_rules_parse_to_the_same_rules(rules in proptest::collection::vec(rule(), 1..40)) {
        let text = Ruleset::parse("t", &rules.concat()).ruleset.unwrap().to_text();
        let again = Ruleset::parse("t", &text).ruleset.unwrap();
        prop_assert_eq!(again.to_text(), text);
    }

    /// Arbitrary text does not panic.
    #[test]
    fn any_text_parses_without_panic(text in "(add |table t |:|[0-9]{1,5} |allow |tcp |from |to |any |[a-z0-9/:.,{}()!@-]{1,9} |[ -~]{0,9}|\\PC{0,4}|//|#|\\\\|\n){0,60}") {
        let parsed = Ruleset::parse("t", &text);
        if let Ok(ruleset) = parsed.ruleset {
            let printed = ruleset.to_text();
            let again = Ruleset::parse("t", &printed).ruleset;
            prop_assert!(again.is_ok(), "{:?} {:?}", printed, again.err());
        }
    }
}

/// Bursts pass by state, but not by a state that was removed after the prefetch.
#[test]
fn a_burst_does_not_pass_by_a_removed_state() {
    let mut gate = gate("add check-state\nadd 200 allow udp from any to any keep-state\n");
    let mut walker = gate.walker().unwrap();
    let written = PacketSpec::parse("in em0 udp 10.0.0.2:4000 > 10.0.0.3:53").unwrap();
    let now = Time::from_secs(1);
    let (flow, segment) =
        wire::plain(written.link(), &written.frame, written.frame.len() as u32).expect("a plain packet");
    let fetch = |walker: &mut Walker| walker.prefetch(None, [Some((flow, segment)); 2].into_iter());
    fetch(&mut walker);
    assert_eq!(walker.try_pass(0, now), None);
    assert_eq!(one(&mut walker, &written, 1), Some((Step::Pass, Some(200))));
    fetch(&mut walker);
    assert_eq!(walker.try_pass(0, now), Some(200));
    assert_eq!(walker.states_mut().remove_flow(&flow, now), 1);
    assert_eq!(walker.try_pass(1, now), None);
}

/// Rules before the state lookup do not prevent the fast path for packets that they do not match.
#[test]
fn bursts_pass_after_rules_that_do_not_match() {
    // The rules after the lookup do not matter, however many there are.
    let after: String = (600..620).map(|n| format!("add {n} deny tcp from any to any {n}\n")).collect();
    let end = format!("add 500 allow udp from any to any keep-state\n{after}");
    let nine = (1..=9).map(|n| format!("add {n} deny tcp from any to any\n")).collect::<String>();
    let rows = [
        ("", true),
        // A long prefix is left to the index.
        (&nine[..nine.len() / 9 * 8], true),
        (&nine, false),
        ("add allow ip from any to any via em1\nadd deny ip from any to 127.0.0.0/8\n", true),
        ("add deny ip from me to any\nadd deny tcp from any to any\n", true),
        ("add deny ip6 from any to any\nadd count ip from any to any 54,70-80\n", true),
        ("add count ip from any to any { established or out }\n", true),
        ("add set 4 deny ip from any to any\nset disable 4\n", true),
        ("add prob 0.5 deny ip from any to 10.9.0.0/16\n", true),
        ("add allow layer2 mac-type arp\nadd deny mac-type 0x8863\n", true),
        ("add count { mac-type arp or in }\n", false),
        ("add count ip from any to any\n", false),
        ("add count ip from any to any via em0\n", false),
        ("add count ip from any to any { established or in }\n", false),
        ("add count ip from any to any iplen 5000\n", false),
        ("add prob 0.5 check-state\n", false),
    ];
    for (before, passes) in rows {
        let mut gate = gate(&format!("{before}{end}"));
        let mut walker = gate.walker().unwrap();
        let em0 = walker.ports().find("em0");
        let written = PacketSpec::parse("in em0 udp 10.0.0.2:4000 > 10.0.0.3:53").unwrap();
        let plain = wire::plain(written.link(), &written.frame, written.frame.len() as u32);
        assert_eq!(one(&mut walker, &written, 1), Some((Step::Pass, Some(500))), "{before}");
        walker.prefetch(em0, [plain].into_iter());
        assert_eq!(walker.try_pass(0, Time::from_secs(1)).is_some(), passes, "{before}");
    }
}
