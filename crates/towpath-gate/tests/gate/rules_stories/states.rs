//! Stories of states: keep-state, check-state, limit, lifetimes.

use towpath_gate::state::{Refused, Settings};
use towpath_gate::{DropReason, Step};
use towpath_wire::Time;

use super::{ANSWER, DENY, DNS, SYN, SYNACK, Story};

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
fn link_local_states_are_per_port() {
    let rules = "add allow udp from any to any 53 keep-state";
    let mut story = Story::new(rules);
    assert_eq!(story.first("in em0 udp [fe80::1]:1 > [fe80::2]:53"), Step::Pass);
    assert_eq!(story.first("in em1 udp [fe80::2]:53 > [fe80::1]:1"), DENY);
    assert_eq!(story.first("in em0 udp [fe80::2]:53 > [fe80::1]:1"), Step::Pass);
}
