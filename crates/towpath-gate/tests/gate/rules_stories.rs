//! Stories: sequences of packets, the step for each, and the counters at the end.

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{Refused, Settings};
use towpath_gate::{Dir, DropReason, Gate, NoReply, PacketSpec, Ports, Reject, StatePolicy, Step, Walk};
use towpath_wire::{self as wire, Time};

/// A gate, a clock and the walks of the packets.
struct Story {
    gate: Gate,
    now: u64,
}

impl Story {
    fn new(rules: &str) -> Self {
        Self::with(rules, Settings::default())
    }

    fn with(rules: &str, settings: Settings) -> Self {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap_or_else(|e| panic!("{rules}: {}", e[0]));
        let mut ports = Ports::new();
        ports.add("em0", vec!["10.0.0.254".parse().unwrap()]);
        ports.add("em1", Vec::new());
        Self { gate: Gate::new(ruleset, ports, settings, 7), now: 1000 }
    }

    /// Returns the next step of a walk.
    fn step(&mut self, walk: &mut Walk, packet: &str) -> Step {
        let written = PacketSpec::parse(packet).unwrap_or_else(|e| panic!("{packet}: {e}"));
        let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
        self.gate.walk(walk, &parsed, Time::from_secs(self.now))
    }

    fn walk(&self, packet: &str) -> Walk {
        let written = PacketSpec::parse(packet).unwrap_or_else(|e| panic!("{packet}: {e}"));
        let port = written.port.as_deref().map(|name| self.gate.ports().find(name).unwrap());
        match written.dir {
            Dir::In => Walk::new(Dir::In, port, None),
            Dir::Out => Walk::new(Dir::Out, None, port),
        }
    }

    fn first(&mut self, packet: &str) -> Step {
        let mut walk = self.walk(packet);
        self.step(&mut walk, packet)
    }

    /// Returns every step of one packet to its end; inspectors always pass.
    fn all(&mut self, packet: &str) -> (Vec<Step>, Walk) {
        let mut walk = self.walk(packet);
        let mut steps = Vec::new();
        loop {
            let step = self.step(&mut walk, packet);
            steps.push(step);
            if !matches!(step, Step::Divert(_) | Step::Tee(_) | Step::Reassemble) {
                return (steps, walk);
            }
        }
    }

    /// Returns `number packets` of the rules that counted.
    fn counts(&self) -> Vec<(u32, u64)> {
        self.gate
            .show()
            .iter()
            .filter(|rule| rule.packets > 0)
            .map(|rule| (rule.number, rule.packets))
            .collect()
    }
}

const DENY: Step = Step::Drop(DropReason::Deny);
const SYN: &str = "tcp 10.0.0.1:1000 > 10.0.0.2:80 syn";
const SYNACK: &str = "tcp 10.0.0.2:80 > 10.0.0.1:1000 syn ack ackno 5";
const DNS: &str = "udp 10.0.0.1:1000 > 10.0.0.2:53";
const ANSWER: &str = "udp 10.0.0.2:53 > 10.0.0.1:1000";

#[test]
fn labels_between_rules_of_one_number() {
    // Jumps into the middle of a number from before it and from inside; a call returns through it.
    let rows = [
        "add 200 skipto :T udp from any to any\nadd 300 deny ip from any to any\n:T\nadd 300 allow ip from any to any",
        "add 300 skipto :T udp from any to any\nadd 300 deny ip from any to any\n:T\nadd 300 allow ip from any to any",
        "add 200 call :T ip from any to any\nadd 250 allow ip from any to any\n\
         add 300 deny ip from any to any\n:T\nadd 300 count udp from any to any\nadd 310 return ip from any to any",
        "set disable 3\nadd 200 skipto :T udp from any to any\nadd 300 deny ip from any to any\n:T\n\
         add 300 set 3 deny ip from any to any\nadd 300 allow ip from any to any",
    ];
    for rules in rows {
        assert_eq!(Story::new(rules).first(DNS), Step::Pass, "{rules}");
    }
}

#[test]
fn keep_state_passes_the_reply_and_counts_for_its_rule() {
    let mut story = Story::new("add allow udp from any to any 53 keep-state\nadd deny ip from any to any");
    assert_eq!(story.first(ANSWER), DENY);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), Step::Pass);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.counts(), [(100, 3), (200, 1)]);
    story.now += 11;
    assert_eq!(story.first(ANSWER), DENY);
}

#[test]
fn bytes_are_those_of_the_ip_packet() {
    let mut story = Story::new("add allow ip from any to any");
    story.first("udp 10.0.0.1:1 > 10.0.0.2:2 len 100");
    assert_eq!(story.gate.show()[0].bytes, 128);
    story.first("arp");
    assert_eq!(story.gate.show()[0].bytes, 128 + 42);
}

#[test]
fn a_check_state_miss_counts_nothing() {
    let mut story = Story::new(
        "add check-state\nadd allow tcp from any to any setup record-state\nadd deny ip from any to any",
    );
    assert_eq!(story.first(SYN), Step::Pass);
    assert_eq!(story.first(SYNACK), Step::Pass);
    assert_eq!(story.first("tcp 10.0.0.3:80 > 10.0.0.1:1000 ack"), DENY);
    assert_eq!(story.counts(), [(200, 2), (300, 1)]);
}

#[test]
fn record_state_does_not_look_up() {
    let mut story = Story::new("add allow udp from any to any 53 record-state\nadd deny ip from any to any");
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), DENY);
}

#[test]
fn a_hit_on_a_count_rule_continues_after_it() {
    let rules =
        "add 10 check-state\nadd 20 count udp from any to any 53 keep-state\nadd 30 allow ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), Step::Pass);
    assert_eq!(story.counts(), [(20, 2), (30, 2)]);
}

#[test]
fn a_state_belongs_to_its_name() {
    let rules = "add 10 check-state :web\nadd 20 allow udp from any to any 53 record-state :dns\n\
                 add 30 check-state :dns\nadd 40 deny ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), Step::Pass);
    assert_eq!(story.counts(), [(20, 2)]);

    let mut story =
        Story::new("add 10 check-state :any\nadd 20 allow udp from any to any 53 record-state :dns");
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), Step::Pass);
    assert_eq!(story.counts(), [(20, 2)]);
}

#[test]
fn a_second_lookup_is_made_only_for_another_name() {
    // The second check-state finds the state of :a after the first one missed :b.
    let rules =
        "add 10 check-state :b\nadd 20 check-state :a\nadd 30 allow udp from any to any 53 keep-state :a";
    let mut story = Story::new(rules);
    story.first(DNS);
    assert_eq!(story.first(ANSWER), Step::Pass);
    // After a miss of :any no further lookup is made, as in ipfw: keep-state does not see the state that
    // record-state creates for the first packet.
    let rules = "add 10 check-state :any\nadd 20 count udp from any to any 53 record-state :a\n\
                 add 30 allow ip from any to any keep-state :a";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.counts(), [(20, 1), (30, 1)]);
}

#[test]
fn a_refused_state_drops_the_packet() {
    let mut settings = Settings::default();
    settings.set("dyn_max", 1).unwrap();
    let mut story = Story::with("add allow udp from any to any keep-state", settings);
    assert_eq!(story.first(DNS), Step::Pass);
    let other = "udp 10.0.0.9:1000 > 10.0.0.2:53";
    assert_eq!(story.first(other), Step::Drop(DropReason::NoState(Refused::Full)));
    assert_eq!(story.counts(), [(100, 2)]);
    assert_eq!(
        Story::new("add allow all from any to any keep-state").first("arp"),
        Step::Drop(DropReason::NotIp)
    );
}

#[test]
fn limit_counts_states_of_one_source() {
    let mut story = Story::new("add allow tcp from any to any setup limit src-addr 2");
    let from = |host: u32, port: u32| format!("tcp 10.0.0.{host}:{port} > 10.0.0.200:80 syn");
    assert_eq!(story.first(&from(1, 1)), Step::Pass);
    assert_eq!(story.first(&from(1, 2)), Step::Pass);
    assert_eq!(story.first(&from(1, 3)), Step::Drop(DropReason::NoState(Refused::OverLimit)));
    assert_eq!(story.first(&from(1, 1)), Step::Pass);
    assert_eq!(story.first(&from(2, 3)), Step::Pass);
    // The limit may be a table value.
    let rules = "table t create valtype limit\ntable t add 10.0.0.1 1 10.0.0.2 2\n\
                 add allow tcp from table(t) to any setup limit src-addr tablearg";
    let mut story = Story::new(rules);
    assert_eq!(story.first(&from(1, 1)), Step::Pass);
    assert_eq!(story.first(&from(1, 2)), Step::Drop(DropReason::NoState(Refused::OverLimit)));
    assert_eq!(story.first(&from(2, 1)), Step::Pass);
    assert_eq!(story.first(&from(2, 2)), Step::Pass);
}

#[test]
fn defer_action_installs_and_continues() {
    let rules = "add 10 deny udp from any to any 53 keep-state defer-action\nadd 20 allow ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.counts(), [(20, 1)]);
    // The second packet finds the state, and the action of the rule runs.
    assert_eq!(story.first(ANSWER), DENY);
}

#[test]
fn lifetime_and_state_timeout() {
    let rules = "add state-timeout 60 udp from any to any 53\nadd allow udp from any to any keep-state\n";
    let mut story = Story::new(rules);
    story.first(DNS);
    story.now += 59;
    assert_eq!(story.gate.states().list(Time::from_secs(story.now)).count(), 1);
    assert_eq!(story.first(ANSWER), Step::Pass);
    story.now += 61;
    assert_eq!(story.gate.states().list(Time::from_secs(story.now)).count(), 0);

    let mut story = Story::new("add check-state\nadd allow udp from any to any 53 record-state lifetime 30");
    story.first(DNS);
    story.now += 29;
    assert_eq!(story.first(ANSWER), Step::Pass);
    story.now += 31;
    assert_eq!(story.first(ANSWER), DENY);
}

#[test]
fn skipto_goes_forward_and_skips_disabled_sets() {
    let rules = "add 10 skipto 30 ip from any to any\nadd 20 allow ip from any to any\n\
                 add 30 set 5 deny ip from any to any\nadd 40 allow ip from any to any\nset disable 5";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.counts(), [(10, 1), (40, 1)]);
    // Not forward: continues at the next number.
    let mut story = Story::new(
        "add 10 count ip from any to any\nadd 20 skipto 10 ip from any to any\nadd 20 deny ip from any to any\nadd 30 allow ip from any to any",
    );
    assert_eq!(story.first(DNS), Step::Pass);
    // No such rule: the default rule.
    assert_eq!(
        Story::new("add 10 skipto 60000 ip from any to any\nadd 20 allow ip from any to any").first(DNS),
        DENY
    );
}

#[test]
fn labels_and_tablearg_as_targets() {
    let rules = "table t add 10.0.0.2 :two 10.0.0.3 900\n\
                 add skipto tablearg ip from any to table(t)\nadd skipto :end ip from any to any\n\
                 :two\nadd allow ip from any to any // two\n:end\nadd deny ip from any to any\n\
                 add 900 reject ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.first("udp 10.0.0.1:1 > 10.0.0.4:1"), DENY);
    assert_eq!(story.first("udp 10.0.0.1:1 > 10.0.0.3:1"), Step::Reject(Reject::Unreach { code: 1, mtu: 0 }));
}

#[test]
fn call_returns_to_the_next_rule() {
    let rules = "add 10 call 100 ip from any to any\nadd 10 count ip from any to any // same number\n\
                 add 20 allow ip from any to any\nadd 100 count ip from any to any\nadd 110 return ip from any to any\n\
                 add 120 deny ip from any to any";
    let mut story = Story::new(rules);
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.counts(), [(10, 1), (20, 1), (100, 1), (110, 1)]);
    let mut story = Story::new(&rules.replace("return ip", "return next-rule ip"));
    assert_eq!(story.first(DNS), Step::Pass);
    assert_eq!(story.counts(), [(10, 1), (10, 1), (20, 1), (100, 1), (110, 1)]);
    // Without a call, return continues at the next rule.
    assert_eq!(
        Story::new("add return ip from any to any\nadd allow ip from any to any").first(DNS),
        Step::Pass
    );
}

#[test]
fn recursion_is_bounded() {
    let mut story = Story::new("add 10 call 10 ip from any to any");
    assert_eq!(story.first(DNS), Step::Drop(DropReason::CallDepth));
    assert_eq!(story.counts(), [(10, 17)]);
    // Without the jump limit, sixteen levels of sixteen calls each would not end in practice.
    let level = |n: u32| {
        format!("add {n} call {} ip from any to any\n", n + 1).repeat(16)
            + &format!("add {n} return next-rule ip from any to any\n")
    };
    let rules: String =
        (1..=15).map(level).collect::<String>() + "add 16 return next-rule ip from any to any";
    assert_eq!(Story::new(&rules).first(DNS), Step::Drop(DropReason::Loop));
    // Two names. The rule of each precedes the check-state of the other name.
    let rules = "add 1 count udp from any to any keep-state :a\nadd 2 count udp from any to any keep-state :b\n\
                 add 3 check-state :a\nadd 4 check-state :b\nadd 5 allow ip from any to any";
    let mut story = Story::new(rules);
    let _ = story.first(DNS);
    assert!(matches!(story.first(DNS), Step::Pass | Step::Drop(DropReason::Loop)));
}

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
fn link_local_states_are_per_port() {
    let rules = "add allow udp from any to any 53 keep-state";
    let mut story = Story::new(rules);
    assert_eq!(story.first("in em0 udp [fe80::1]:1 > [fe80::2]:53"), Step::Pass);
    assert_eq!(story.first("in em1 udp [fe80::2]:53 > [fe80::1]:1"), DENY);
    assert_eq!(story.first("in em0 udp [fe80::2]:53 > [fe80::1]:1"), Step::Pass);
}

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

#[test]
fn a_walk_may_be_given_a_zone() {
    let mut story = Story::new("add allow udp from any to any 53 keep-state");
    let mut walk = story.walk(DNS).with_zone(1);
    assert_eq!(story.step(&mut walk, DNS), Step::Pass);
    assert_eq!(story.first(ANSWER), DENY);
    let mut walk = story.walk(ANSWER).with_zone(1);
    assert_eq!(story.step(&mut walk, ANSWER), Step::Pass);
}
