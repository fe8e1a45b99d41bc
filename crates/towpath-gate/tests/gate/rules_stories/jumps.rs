//! Stories of jumps: skipto, call, labels.

use towpath_gate::{DropReason, Reject, Step};

use super::{DENY, DNS, Story};

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
