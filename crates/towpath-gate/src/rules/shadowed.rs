//! Shadowed rules: rules that never match, because an earlier rule takes every packet that they would match.
//!
//! A rule covers a later one if each of its blocks matches whenever some block of the later rule does. This is
//! decided from the text of the tests: network in network, port range in port range, protocol in `ip`. Undecided
//! cases count as not covered, so that there are no false warnings. A rule that a jump can bypass covers nothing
//! after the target of the jump. A `skipto` covers the rules before its target in the same way, unless a jump leads there.

use std::sync::Arc;

use super::address::Address;
use super::diagnostic::{Diagnostic, Fault};
use super::option::{FieldTest, LookupKey, Term, Test};
use super::parse::jump_position;
use super::ports::Ranges;
use super::protocol::Protocol;
use super::rule::{Action, DEFAULT_RULE, Rule};
use super::ruleset::Ruleset;

/// With more rules, only this many of the widest are compared with the others: the time grows with both.
const MAX_COVERING: usize = 2000;

/// A jump from one position to another.
#[derive(Clone, Copy, Debug)]
struct Jump {
    from: usize,
    /// `None`: any rule (tablearg).
    to: Option<usize>,
    /// It may come from any later position: a call, or a state that a later rule finds.
    back: bool,
}

impl Jump {
    /// Returns true if the jump may lead to a rule behind `after` and not behind `at`.
    fn leads_into(&self, after: usize, at: usize) -> bool {
        self.to.is_none_or(|to| after < to && to <= at)
    }
}

impl Ruleset {
    /// Returns a warning for every rule that never matches because of an earlier one.
    pub fn shadowed(&self, file: &str) -> Vec<Diagnostic> {
        let file: Arc<str> = file.into();
        let jumps = self.jumps();
        // Rules with few blocks first: they cover most.
        let mut covering: Vec<(usize, usize)> =
            (0..self.rules.len()).filter_map(|at| Some((at, self.covers_until(at)?))).collect();
        if covering.len() > MAX_COVERING {
            covering
                .sort_by_key(|(at, _)| self.rules[*at].body.blocks().filter(|block| !always(block)).count());
            covering.truncate(MAX_COVERING);
            covering.sort_unstable();
        }
        let mut warnings = Vec::new();
        for (at, rule) in self.rules.iter().enumerate() {
            if rule.number == DEFAULT_RULE || !self.set_enabled(rule.set) {
                continue;
            }
            let before = covering.iter().take_while(|(earlier, _)| *earlier < at);
            let around = |earlier: usize, end: usize| {
                jumps.iter().any(|jump| {
                    let from = jump.from < earlier || jump.from > earlier && end < usize::MAX && jump.back;
                    from && jump.leads_into(earlier, at)
                })
            };
            let shadow = before.copied().find(|(earlier, end)| {
                at < *end && covers(&self.rules[*earlier], rule) && !around(*earlier, *end)
            });
            if let Some((earlier, end)) = shadow {
                let by = &self.rules[earlier];
                let message = match end {
                    usize::MAX => {
                        format!("this rule never matches: rule {} matches all its packets first", by.number)
                    }
                    _ => format!(
                        "this rule never matches: the skipto of rule {} takes all its packets past it",
                        by.number
                    ),
                };
                let fault = Fault::new(rule.at, message).hint(match by.at.line {
                    0 => "delete this rule or move it up".to_owned(),
                    line => format!("that rule is in line {line}; delete this rule or move it up"),
                });
                warnings.push(fault.in_file(&file));
            }
        }
        warnings
    }

    /// Returns the position up to which no packet that the rule matches reaches a later rule: the end if it ends the walk, the target if
    /// it is a `skipto`. `None` if a packet that it matches may reach the next rule.
    fn covers_until(&self, at: usize) -> Option<usize> {
        let rule = &self.rules[at];
        let whole = rule.prob.is_none() && !rule.defer && self.set_enabled(rule.set);
        match &rule.action {
            _ if !whole => None,
            Action::Skipto(_) if rule.state.is_none() => self.jump_position(at).filter(|to| *to > at),
            _ => self.ends_walk(at).then_some(usize::MAX),
        }
    }

    /// Returns true if the action ends the walk.
    fn ends_walk(&self, at: usize) -> bool {
        matches!(
            self.rules[at].action,
            Action::Allow
                | Action::Deny
                | Action::Reject
                | Action::Unreach { .. }
                | Action::Unreach6(_)
                | Action::Reset
                | Action::Reset6
                | Action::Abort
                | Action::Abort6
                | Action::Inspect(_)
                | Action::Pipe(_)
                | Action::Forward(_)
        )
    }

    /// Returns the position at which the jump of a rule continues, `None` for tablearg. The default rule if no rule has that number.
    fn jump_position(&self, at: usize) -> Option<usize> {
        jump_position(&self.rules[at], self.rules.len() - 1, |at| self.rules[at].number)
    }

    /// Returns all jumps.
    fn jumps(&self) -> Vec<Jump> {
        let mut jumps = Vec::new();
        for (at, rule) in self.rules.iter().enumerate().filter(|(_, rule)| self.set_enabled(rule.set)) {
            match &rule.action {
                Action::Skipto(_) => jumps.push(Jump { from: at, to: self.jump_position(at), back: false }),
                Action::Call(_) => jumps.push(Jump { from: at, to: self.jump_position(at), back: true }),
                _ => {}
            }
            // Packets with a state continue after the rule that created it, or at its target, wherever the state was looked up.
            if rule.state.is_some() && self.covers_until(at) != Some(usize::MAX) {
                let probe = |rule: &Rule| {
                    matches!(rule.action, Action::CheckState(_))
                        || rule.state.as_ref().is_some_and(|s| s.probe)
                };
                let from = self.rules.iter().position(probe).unwrap_or(at);
                let to = match &rule.action {
                    Action::Skipto(_) | Action::Call(_) => self.jump_position(at),
                    _ => Some(at + 1),
                };
                // A later rule may find the state, too.
                jumps.push(Jump { from, to, back: true });
            }
        }
        jumps
    }
}

/// Returns true if the block matches every packet.
fn always(block: &[Term]) -> bool {
    block.iter().any(|term| {
        let any = match &term.test {
            Test::Proto(Protocol::Any) | Test::True => true,
            Test::Src(list) | Test::Dst(list) => list.contains(&Address::Any),
            _ => false,
        };
        any && !term.not
    })
}

fn covers(wide: &Rule, narrow: &Rule) -> bool {
    let no_body = matches!(narrow.action, Action::CheckState(_));
    // A rule that looks up states does so even if its body does not match.
    if narrow.state.as_ref().is_some_and(|state| state.probe) && !wide.body.blocks().all(always) {
        return false;
    }
    wide.body.blocks().filter(|block| !always(block)).all(|block| {
        !no_body
            && narrow.body.blocks().any(|other| {
                other.iter().all(|n| block.iter().any(|w| implies(n, w) && is_constant(&n.test)))
            })
    })
}

/// Returns true if the result of the test is the same for all rules: a rule in between may change the packet's tags, mark and code
/// point, and `rulenum` is the number of the rule itself.
fn is_constant(test: &Test) -> bool {
    match test {
        Test::Tagged(_) | Test::Mark { .. } | Test::Connmark { .. } => false,
        Test::Field(test) => {
            !matches!(test, FieldTest::Dscp(_) | FieldTest::IpPrecedence(_) | FieldTest::IpTos(_))
        }
        Test::Lookup { key, .. } => !matches!(key, LookupKey::Dscp | LookupKey::Mark | LookupKey::RuleNum),
        _ => true,
    }
}

/// Returns true if every packet that matches `narrow` matches `wide`.
pub(super) fn implies(narrow: &Term, wide: &Term) -> bool {
    if narrow == wide {
        return true;
    }
    if narrow.not || wide.not {
        return false;
    }
    match (&narrow.test, &wide.test) {
        (Test::Proto(_), Test::Proto(Protocol::Any)) => true,
        (Test::Src(n), Test::Src(w)) | (Test::Dst(n), Test::Dst(w)) => {
            n.iter().all(|n| w.iter().any(|w| within(n, w)))
        }
        (Test::SrcPort(n), Test::SrcPort(w)) | (Test::DstPort(n), Test::DstPort(w)) => ranges_within(n, w),
        (Test::Field(FieldTest::IpTtl(n)), Test::Field(FieldTest::IpTtl(w))) => ranges_within(n, w),
        (Test::Field(FieldTest::IpLen(n)), Test::Field(FieldTest::IpLen(w))) => ranges_within(n, w),
        (Test::Field(FieldTest::IcmpTypes(n)), Test::Field(FieldTest::IcmpTypes(w))) => n & !w == 0,
        (Test::Src(list) | Test::Dst(list), Test::Ip4 | Test::Proto(Protocol::Ip4)) => {
            list.iter().all(|a| matches!(a, Address::Net4(_) | Address::Set4(_)))
        }
        (Test::Src(list) | Test::Dst(list), Test::Ip6 | Test::Proto(Protocol::Ip6)) => {
            list.iter().all(|a| matches!(a, Address::Net6(_) | Address::Me6))
        }
        (Test::Setup, Test::Proto(Protocol::Number(6))) => true,
        (Test::Established, Test::Proto(Protocol::Number(6))) => true,
        _ => false,
    }
}

fn within(narrow: &Address, wide: &Address) -> bool {
    match (narrow, wide) {
        (_, Address::Any) => true,
        (Address::Net4(n), Address::Net4(w)) => n.mask & w.mask == w.mask && w.contains(n.addr),
        (Address::Net6(n), Address::Net6(w)) => n.mask & w.mask == w.mask && w.contains(n.addr),
        (Address::Me6, Address::Me) => true,
        (n, w) => n == w,
    }
}

fn ranges_within(narrow: &Ranges, wide: &Ranges) -> bool {
    narrow.0.iter().all(|(lo, hi)| wide.0.iter().any(|(l, h)| l <= lo && hi <= h))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skipto_hides_the_rules_before_its_target() {
        let number = |warning: &String| warning.split(':').nth(1).unwrap().parse::<usize>().unwrap();
        let lines = |text: &str| shadowed(text).iter().map(number).collect::<Vec<_>>();
        let rows: &[(&str, &[usize])] = &[
            (
                "add 100 skipto 500 ip from any to any\nadd 200 allow tcp from any to any\nadd 300 count ip from any to any\nadd 500 allow ip from any to any",
                &[2, 3],
            ),
            (
                "add 100 skipto 500 tcp from any to any\nadd 200 allow tcp from any to any 80\nadd 300 allow udp from any to any\nadd 500 allow ip from any to any",
                &[2],
            ),
            // To a label, and to a number that no rule has.
            (
                "add skipto :end ip from any to any\nadd allow tcp from any to any\n:end\nadd allow ip from any to any",
                &[2],
            ),
            (
                "add 100 skipto 400 ip from any to any\nadd 200 allow tcp from any to any\nadd 500 allow ip from any to any",
                &[2],
            ),
            // To the next number, because the target is not ahead.
            (
                "add 100 skipto 50 ip from any to any\nadd 100 allow tcp from any to any\nadd 200 allow udp from any to any",
                &[2],
            ),
            // Not behind the target, not by chance, not in a disabled set.
            ("add 100 skipto 300 ip from any to any\nadd 300 allow tcp from any to any", &[]),
            ("add 100 prob 0.5 skipto 500 ip from any to any\nadd 200 allow tcp from any to any", &[]),
            (
                "set disable 3\nadd 100 set 3 skipto 500 ip from any to any\nadd 200 allow tcp from any to any",
                &[],
            ),
            // A subroutine that is called from below, and one that an earlier jump reaches.
            (
                "add 100 skipto 500 ip from any to any\nadd 200 count tcp from any to any\nadd 300 return ip from any to any\nadd 500 call 200 ip from any to any",
                &[],
            ),
            (
                "add 50 skipto 200 udp from any to any\nadd 100 skipto 500 ip from any to any\nadd 200 count udp from any to any\nadd 500 allow ip from any to any",
                &[],
            ),
            // A packet with a state runs the rest behind the rule that created it.
            (
                "add 100 skipto 500 ip from any to any\nadd 200 count tcp from any to any record-state\nadd 300 count ip from any to any\nadd 500 check-state",
                &[2],
            ),
            // A tag that changes in between.
            (
                "add 100 deny ip from any to any tagged 5\nadd 200 count tag 5 ip from any to any\nadd 300 allow ip from any to any tagged 5",
                &[],
            ),
        ];
        for (text, expected) in rows {
            assert_eq!(lines(text), *expected, "{text}");
        }
        assert_eq!(
            shadowed("add 100 skipto 500 ip from any to any\nadd 200 allow tcp from any to any")[0],
            "t:2:1: this rule never matches: the skipto of rule 100 takes all its packets past it; that rule is in line 1; delete this rule or move it up"
        );
    }

    fn shadowed(text: &str) -> Vec<String> {
        let ruleset = Ruleset::parse("t", text).ruleset.unwrap();
        ruleset.shadowed("t").iter().map(ToString::to_string).collect()
    }

    #[test]
    fn covered_rules_are_named() {
        assert_eq!(
            shadowed("add deny tcp from 10.0.0.0/8 to any\nadd allow tcp from 10.1.2.3 to any 80"),
            [
                "t:2:1: this rule never matches: rule 100 matches all its packets first; that rule is in line 1; delete this rule or move it up"
            ]
        );
        let rows = [
            // Covering rule, covered rule, expected result.
            ("deny ip from any to any", "allow tcp from any to any 80 setup", true),
            ("deny ip from any to any", "allow tcp from any to any keep-state", true),
            ("deny ip from any to any", "check-state", true),
            ("deny tcp from any to any", "check-state", false),
            ("deny tcp from any to any", "allow tcp from any to any keep-state", false),
            ("deny tcp from any to any 1-1024", "allow tcp from any to any 80,443", true),
            ("deny tcp from any to any 1-1024", "allow tcp from any to any 80,1443", false),
            ("deny tcp from any to any 80", "allow udp from any to any 80", false),
            ("deny ip from any to any { in or via em0 }", "allow tcp from any to any in", true),
            ("deny ip from any to any in", "allow tcp from any to any { in or via em0 }", false),
            ("deny ip from not 10.0.0.1 to any", "allow ip from 10.0.0.2 to any", false),
            ("deny ip4 from any to any", "allow tcp from 10.0.0.0/8 to any", true),
            ("deny ip from 10.0.2.0:255.0.255.0 to any", "allow ip from 10.9.2.7 to any", true),
            ("prob 0.5 deny ip from any to any", "allow ip from any to any", false),
            ("count ip from any to any", "allow ip from any to any", false),
            ("set 3 deny ip from any to any", "allow ip from any to any", true),
            ("deny ip from any to any iplen 40", "allow ip from any to any iplen 40", true),
            // A rule in between may change the code point; each rule has another number.
            ("deny ip from any to any dscp cs1", "allow ip from any to any dscp cs1", false),
            ("deny ip from any to any ipprecedence 1", "allow ip from any to any ipprecedence 1", false),
            ("deny ip from any to any lookup rulenum t", "allow ip from any to any lookup rulenum t", false),
        ];
        for (wide, narrow, expected) in rows {
            let found = !shadowed(&format!("add 10 {wide}\nadd 20 {narrow}")).is_empty();
            assert_eq!(found, expected, "{wide} / {narrow}");
        }
        assert!(
            shadowed("add 10 set 3 deny ip from any to any\nadd 20 allow ip from any to any\nset disable 3")
                .is_empty()
        );
    }

    #[test]
    fn jumps_around_a_rule_are_considered() {
        let body = "add 20 deny ip from any to any\nadd 30 allow tcp from any to any";
        assert_eq!(shadowed(body).len(), 1);
        assert!(shadowed(&format!("add 10 skipto 30 tcp from any to any\n{body}")).is_empty());
        assert_eq!(shadowed(&format!("add 10 skipto 15 tcp from any to any\n{body}")).len(), 1);
        assert!(
            shadowed(&format!(
                "table t add 1.1.1.1 30\nadd 10 skipto tablearg ip from table(t) to any\n{body}"
            ))
            .is_empty()
        );
        assert!(
            shadowed(&format!("add 10 check-state\n{body}\nadd 25 count udp from any to any record-state"))
                .len()
                <= 1
        );
    }
}
