//! Stories of actions: inspectors, replies, edits, next hops, pipes, log lines.

use towpath_gate::rules::Ruleset;
use towpath_gate::state::Settings;
use towpath_gate::{Dir, DropReason, Gate, NoReply, PacketSpec, Ports, Reject, Step, Walk};
use towpath_wire::{self as wire, Time};

use super::{ANSWER, DENY, DNS, SYN, Story};

#[test]
fn inspectors_pause_or_end_the_walk() {
    let rules = "add 10 tee 3 udp from any to any\nadd 20 divert 4 udp from any to any\n\
                 add 30 count ip from any to any\nadd 40 inspect 5 ip from any to any\nadd 50 allow ip from any to any";
    let mut story = Story::new(rules);
    let (steps, walk) = story.all(DNS);
    assert_eq!(steps, [Step::Tee(3), Step::Divert(4), Step::Inspect(5)]);
    assert_eq!(walk.rule(), Some(40));
    assert_eq!(story.counts(), [(10, 1), (20, 1), (30, 1), (40, 1)]);
    let rules =
        "table t create valtype divert\ntable t add 10.0.0.2 9\nadd divert tablearg ip from any to table(t)";
    assert_eq!(Story::new(rules).all(DNS).0, [Step::Divert(9), DENY]);
    // A state whose rule diverts, found again after the divert: not a loop.
    let rules = "add 10 check-state\nadd 20 divert 4 udp from any to any keep-state\nadd 30 check-state\nadd 40 allow ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!(story.all(DNS).0, [Step::Divert(4), Step::Pass]);
    assert_eq!(story.all(ANSWER).0, [Step::Divert(4), Step::Pass]);
}

#[test]
fn replies_follow_the_rfcs() {
    let unreach = Step::Reject(Reject::Unreach { code: 3, mtu: 0 });
    let unreach6 = |code| Step::Reject(Reject::Unreach6 { code });
    let silent = |reason| Step::Reject(Reject::NoReply(reason));
    let rows = [
        ("unreach port", DNS, unreach),
        ("unreach port", "icmp 10.0.0.1 > 10.0.0.2 type 8", unreach),
        ("unreach port", "icmp 10.0.0.1 > 10.0.0.2 type 3", silent(NoReply::NotQuery)),
        ("unreach port", "udp 10.0.0.1:1 > 224.0.0.1:2", silent(NoReply::Multicast)),
        ("unreach port", "udp 10.0.0.1:1 > 10.0.0.255:2 dmac ff:ff:ff:ff:ff:ff", silent(NoReply::Multicast)),
        ("unreach port", "udp 10.0.0.1:1 > 10.0.0.2:2 offset 5 len 8", silent(NoReply::LaterFragment)),
        ("reject", "udp [2001:db8::1]:1 > [2001:db8::2]:2", unreach6(0)),
        ("unreach host-unknown", "tcp [2001:db8::1]:1 > [2001:db8::2]:2 syn", unreach6(0)),
        ("unreach tosnet", "udp [2001:db8::1]:1 > [2001:db8::2]:2", unreach6(0)),
        ("unreach port", "udp [2001:db8::1]:1 > [2001:db8::2]:2", unreach6(4)),
        ("unreach protocol", "udp [2001:db8::1]:1 > [2001:db8::2]:2", unreach6(1)),
        ("unreach filter-prohib", "udp [2001:db8::1]:1 > [2001:db8::2]:2", unreach6(1)),
        ("unreach needfrag 1400", "udp [2001:db8::1]:1 > [2001:db8::2]:2", unreach6(1)),
        ("reject", "udp [2001:db8::1]:1 > [ff02::2]:2", silent(NoReply::Multicast)),
        ("reject", "icmp6 2001:db8::1 > 2001:db8::2 type 1", silent(NoReply::NotQuery)),
        ("unreach port", "arp", silent(NoReply::NotIp)),
        ("unreach needfrag 1400", DNS, Step::Reject(Reject::Unreach { code: 4, mtu: 1400 })),
        (
            "unreach6 port",
            "udp [2001:db8::1]:1 > [2001:db8::2]:2",
            Step::Reject(Reject::Unreach6 { code: 4 }),
        ),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 1", silent(NoReply::NotQuery)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 127", silent(NoReply::NotQuery)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 128", unreach6(4)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 129", silent(NoReply::NotQuery)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 130", unreach6(4)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 135", silent(NoReply::NotQuery)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 139", unreach6(4)),
        ("unreach6 port", "icmp6 2001:db8::1 > 2001:db8::2 type 140", silent(NoReply::NotQuery)),
        ("unreach6 port", "udp [2001:db8::1]:1 > [ff02::2]:2", silent(NoReply::Multicast)),
        ("unreach6 port", DNS, silent(NoReply::OtherFamily)),
        ("reset", SYN, Step::Reject(Reject::Reset)),
        ("reset", "tcp 10.0.0.1:1 > 10.0.0.2:2 rst", silent(NoReply::Reset)),
        ("reset", DNS, silent(NoReply::OtherProtocol)),
        ("reset", "tcp [2001:db8::1]:1 > [2001:db8::2]:2 syn", Step::Reject(Reject::Reset)),
        ("reset", "udp [2001:db8::1]:1 > [2001:db8::2]:2", silent(NoReply::OtherProtocol)),
        ("abort", "sctp [2001:db8::1]:1 > [2001:db8::2]:2", Step::Reject(Reject::Abort)),
        ("abort", "icmp6 2001:db8::1 > 2001:db8::2 type 136", silent(NoReply::OtherProtocol)),
        ("reset6", "udp [2001:db8::1]:1 > [2001:db8::2]:2", silent(NoReply::OtherProtocol)),
        ("reset6", "tcp [2001:db8::1]:1 > [2001:db8::2]:2 syn", Step::Reject(Reject::Reset)),
        ("reset6", SYN, silent(NoReply::OtherFamily)),
        ("abort", "sctp 10.0.0.1:1 > 10.0.0.2:2", Step::Reject(Reject::Abort)),
        ("unreach port", "udp 0.0.0.0:68 > 10.0.0.2:67", silent(NoReply::BadSource)),
        ("unreach port", "udp 240.0.0.1:68 > 10.0.0.2:67", silent(NoReply::BadSource)),
        ("unreach port", "udp 127.0.0.1:68 > 10.0.0.2:67", silent(NoReply::BadSource)),
        ("unreach port", "udp 127.0.0.1:68 > 127.0.0.1:67", silent(NoReply::BadSource)),
        ("unreach port", "udp 127.0.0.1:68 > 127.0.0.2:67", unreach),
        ("reset", "tcp 10.0.0.2:68 > 10.0.0.2:67 syn", silent(NoReply::BadSource)),
        ("reset", "tcp 10.0.0.1:1 > 10.0.0.2:2 syn smac 03:00:00:00:00:01", silent(NoReply::BadSource)),
        ("unreach6 port", "udp [::]:1 > [2001:db8::2]:2", silent(NoReply::BadSource)),
        ("unreach6 port", "udp [ff02::1]:1 > [2001:db8::2]:2", silent(NoReply::BadSource)),
        ("abort6", SYN, silent(NoReply::OtherFamily)),
        ("abort6", "sctp [2001:db8::1]:1 > [2001:db8::2]:2", Step::Reject(Reject::Abort)),
    ];
    for (action, packet, expected) in rows {
        let mut story = Story::new(&format!("add {action} all from any to any"));
        assert_eq!(story.first(packet), expected, "{action}: {packet}");
        assert_eq!(story.counts(), [(100, 1)]);
    }
}

#[test]
fn early_drops_reach_no_rule() {
    let mut story = Story::new("add allow ip from any to any");
    let tiny = "tcp 10.0.0.1:1 > 10.0.0.2:2 offset 1 len 8";
    assert_eq!(story.first(tiny), Step::Drop(DropReason::TinyFragment));
    assert_eq!(story.first("253 ::1 > ::2 len 8"), Step::Drop(DropReason::UnknownHeader));
    assert_eq!(story.counts(), []);
    let settings = towpath_gate::GateSettings { deny_unknown_exthdrs: false, ..story.gate.settings() };
    story.gate.set_settings(settings);
    assert_eq!(story.first("253 ::1 > ::2 len 8"), Step::Pass);
}

#[test]
fn marks_tags_and_edits_stay_with_the_packet() {
    let rules = "table t create valtype tag,mark,dscp\ntable t add 10.0.0.2 ef,5,77\n\
                 add count tag tablearg ip from any to table(t)\nadd setmark tablearg ip from any to table(t)\n\
                 add setdscp tablearg ip from any to table(t)\nadd tcp-setmss 1400 tcp from any to any\n\
                 add tcp-setmss 1300 tcp from any to any\nadd tcp-setmss 1350 tcp from any to any\n\
                 add count untag 6 ip from any to any tagged 5\n\
                 add allow ip from any to any tagged 5 mark 0x77 dscp ef";
    let mut story = Story::new(rules);
    let (steps, walk) = story.all(SYN);
    assert_eq!(steps, [Step::Pass]);
    assert_eq!((walk.tags(), walk.mark()), (&[5u16][..], 0x77));
    assert_eq!((walk.edits().dscp, walk.edits().mss), (Some(46), Some(1300)));
    let rules: String = (1..=20).map(|tag| format!("add count tag {tag} ip from any to any\n")).collect();
    let mut story = Story::new(&rules);
    assert_eq!(story.all(DNS).1.tags().len(), 16);
    assert_eq!(story.gate.counters().tags_full, 4);
}

#[test]
fn next_hops_match_the_address_family() {
    let hop = |ip: &str, port| Step::Forward(ip.parse().unwrap(), port);
    assert_eq!(Story::new("add fwd 10.0.0.9,80 ip from any to any").first(DNS), hop("10.0.0.9", Some(80)));
    let mut story = Story::new("add fwd 10.0.0.9 ip from any to any");
    assert_eq!(story.first("udp [::1]:1 > [::2]:2"), Step::Drop(DropReason::NoNextHop));
    let rules = "table t create valtype ipv4,ipv6\ntable t add 10.0.0.2 1.2.3.4,2001:db8::9 ::2 1.2.3.4,2001:db8::9\n\
                 add fwd tablearg ip from any to table(t)";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), hop("1.2.3.4", None));
    assert_eq!(story.first("udp [::1]:1 > [::2]:2"), hop("2001:db8::9", None));
}

#[test]
fn fwd_applies_to_the_direction_of_the_rule() {
    let mut story = Story::new("add fwd 10.0.0.9 udp from any to any 53 keep-state");
    let hop = Step::Forward("10.0.0.9".parse().unwrap(), None);
    assert_eq!(story.first(DNS), hop);
    assert_eq!(story.first(ANSWER), Step::Pass);
    assert_eq!(story.first(DNS), hop);
    // Another rule may forward the reply packets.
    let rules = "add 10 count udp from any to any 53 keep-state\nadd 20 fwd 10.0.0.9 ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!((story.first(DNS), story.first(ANSWER)), (hop, hop));
}

#[test]
fn pipes_limit_the_rate() {
    let mut story = Story::new(
        "pipe 1 config bw 8Kbit/s burst 3000\nadd pipe 1 udp from any to any\nadd pipe 2 ip from any to any",
    );
    let big = "udp 10.0.0.1:1 > 10.0.0.2:2 len 972";
    let steps: Vec<_> = (0..4).map(|_| story.first(big)).collect();
    assert_eq!(steps, [Step::Pass, Step::Pass, Step::Pass, Step::Drop(DropReason::Policed)]);
    story.now += 1;
    assert_eq!(story.first(big), Step::Pass);
    assert_eq!(story.first(big), Step::Drop(DropReason::Policed));
    assert_eq!(story.first(SYN), Step::Drop(DropReason::NoPipe));
}

#[test]
fn a_routed_packet_is_charged_once_per_pipe() {
    let routed = |rules: &str| {
        let mut story = Story::new(rules);
        let big = "udp 10.0.0.1:1 > 10.0.0.2:2 len 972";
        let xmit = story.gate.ports().find("em1").unwrap();
        let mut pass = || {
            let mut walk = story.walk(big);
            let walked = story.step(&mut walk, big);
            if walked != Step::Pass {
                return (walked, None);
            }
            walk.leave(xmit);
            (walked, Some(story.step(&mut walk, big)))
        };
        [pass(), pass()]
    };
    let passed = (Step::Pass, Some(Step::Pass));
    let policed = Step::Drop(DropReason::Policed);
    let one = "pipe 1 config bw 8Kbit/s burst 2000\nadd pipe 1 udp from any to any";
    assert_eq!(routed(one), [passed, passed]);
    // Another pipe is charged for itself.
    let two = "pipe 1 config bw 8Kbit/s burst 2000\npipe 2 config bw 8Kbit/s burst 1000\n\
               add pipe 1 udp from any to any in\nadd pipe 2 udp from any to any out";
    assert_eq!(routed(two), [passed, (Step::Pass, Some(policed))]);
}

#[test]
fn prob_is_accurate_and_repeatable() {
    let passed = || {
        let mut story = Story::new("add prob 0.25 allow ip from any to any");
        (0..10_000).map(|_| story.first(DNS) == Step::Pass).collect::<Vec<_>>()
    };
    let first = passed();
    let share = first.iter().filter(|passed| **passed).count();
    assert!((2300..2700).contains(&share), "{share}");
    assert_eq!(first, passed());
}

#[test]
fn reass_waits_for_fragments_only() {
    let mut story = Story::new("add reass ip from any to any in\nadd allow ip from any to any");
    assert_eq!(story.all(DNS).0, [Step::Pass]);
    assert_eq!(story.all("udp 10.0.0.1:1 > 10.0.0.2:2 offset 5 len 8").0, [Step::Reassemble, Step::Pass]);
}

#[test]
fn log_lines_have_ipfws_format_and_are_bounded() {
    let mut story = Story::new(
        "add 100 deny log logamount 2 ip from any to any in via em0\nadd count log ip from any to any",
    );
    for _ in 0..3 {
        story.first("in em0 tcp 10.0.0.1:1000 > 10.0.0.2:80 syn");
    }
    story.first("icmp6 ::1 > ::2 type 128");
    let mut lines = Vec::new();
    while let Some(entry) = story.gate.log().take() {
        let port = entry.port.and_then(|port| story.gate.ports().name(port).map(str::to_owned));
        lines.push(entry.line(port.as_deref()).to_string());
    }
    assert_eq!(
        lines,
        [
            "ipfw: 100 Deny TCP 10.0.0.1:1000 10.0.0.2:80 in via em0",
            "ipfw: 100 Deny TCP 10.0.0.1:1000 10.0.0.2:80 in via em0, limit 2 reached",
            "ipfw: 200 Count ICMPv6:128.0 ::1 ::2 in",
        ]
    );
    let summary = story.gate.log().poll_summary(Time::default(), true).map(|summary| summary.to_string());
    assert_eq!(summary.as_deref(), Some("ipfw: 100 suppressed 1 line: limit 2 reached"));
    let mut story = Story::new("add allow log ip from any to any");
    (0..1100).for_each(|_| assert_eq!(story.first(DNS), Step::Pass));
    assert_eq!(story.gate.log().dropped(), 1100 - 1024);
    assert_eq!(std::iter::from_fn(|| story.gate.log().take()).count(), 1024);
    // The output gives the number of the others.
    let summary = story.gate.log().poll_summary(Time::default(), true).map(|summary| summary.to_string());
    assert_eq!(summary.as_deref(), Some("ipfw: suppressed 76 lines: the log queue was full"));
}

#[test]
fn ip_in_pppoe_is_ip() {
    let in_pppoe = |packet: &str| {
        let plain = PacketSpec::parse(packet).unwrap().frame;
        let length = (plain.len() - 14 + 2) as u8;
        [&plain[..12], &[0x88, 0x64, 0x11, 0, 0, 1, 0, length, 0, 0x21], &plain[14..]].concat()
    };
    let (web, dns) = (in_pppoe("tcp 10.0.0.1:1000 > 10.0.0.2:80 syn"), in_pppoe(DNS));
    let unanswered = Step::Reject(Reject::NoReply(NoReply::UnsupportedLink));
    let rows = [
        ("add deny tcp from any to any 80\nadd allow ip from any to any", DENY, Step::Pass),
        ("add allow ip from any to any mac-type pppoe_sess", Step::Pass, Step::Pass),
        ("add allow ip from any to any mac-type ip", DENY, DENY),
        (
            "add reset tcp from any to any\nadd allow udp from 10.0.0.1 to any 53 keep-state",
            unanswered,
            Step::Pass,
        ),
        ("add unreach port ip from any to any", unanswered, unanswered),
    ];
    for (rules, of_web, of_dns) in rows {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset, Ports::new(), Settings::default(), 1);
        for (frame, expected) in [(&web, of_web), (&dns, of_dns)] {
            let packet = wire::parse(wire::LinkType::ETHERNET, frame, 0).unwrap();
            let mut walk = Walk::new(Dir::In, None, None);
            assert_eq!(gate.walk(&mut walk, &packet, Time::from_secs(9)), expected, "{rules}");
        }
    }
}

/// A packet without a connection of the kernel matches no `connmark`, and `setconnmark` changes nothing.
#[test]
fn marks_of_connections_are_matched_and_set() {
    let rules = "add 10 setconnmark 0x9 ip from any to any mark 0x1\nadd 20 deny ip from any to any connmark 0x5:0xf\n\
                 add 30 deny ip from any to any connmark 0x9\nadd 40 allow ip from any to any not connmark 0x7";
    // Rows: mark, mark of the connection, step, mark of the connection then.
    let rows = [
        (0, None, Step::Pass, None),
        (1, None, Step::Pass, None),
        (0, Some(0x15), DENY, Some(0x15)),
        (1, Some(0x15), DENY, Some(0x9)),
        (0, Some(0x7), DENY, Some(0x7)),
    ];
    for (mark, connmark, expected, then) in rows {
        let mut story = Story::new(rules);
        let mut walk = story.walk(SYN).with_marks(mark, connmark);
        let step = story.step(&mut walk, SYN);
        assert_eq!((step, walk.connmark()), (expected, then), "mark {mark}, connection {connmark:?}");
    }
}
