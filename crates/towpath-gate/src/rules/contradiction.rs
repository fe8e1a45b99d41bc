//! Rules that contradict themselves: two of their tests exclude each other, so that no packet matches.
//!
//! Two blocks exclude each other if each test of one excludes each test of the other. Undecided cases count as possible, so that there
//! are no false warnings.

use towpath_wire::proto;

use super::address::Address;
use super::diagnostic::Fault;
use super::option::{FieldTest, Interface, Scope, Term, Test};
use super::ports::Ranges;
use super::print::block_text;
use super::protocol::Protocol;
use super::rule::Rule;
use super::shadowed::implies;

/// Returns a warning if no packet matches the rule.
pub(super) fn contradiction(rule: &Rule) -> Option<Fault> {
    let blocks: Vec<&[Term]> = rule.body.blocks().collect();
    let pairs = blocks
        .iter()
        .enumerate()
        .flat_map(|(at, one)| blocks[at + 1..].iter().map(move |other| (one, other)));
    let (one, other) =
        pairs.into_iter().find(|(one, other)| one.iter().all(|a| other.iter().all(|b| excludes(a, b))))?;
    let (one, other) = (block_text(one), block_text(other));
    let message = format!("this rule never matches: \"{one}\" and \"{other}\" exclude each other");
    Some(
        Fault::new(rule.at, message)
            .hint("no packet has both: delete one of them, or write an or-block { A or B }"),
    )
}

/// Returns true if no packet matches both.
fn excludes(a: &Term, b: &Term) -> bool {
    let positive = |term: &Term| Term { not: false, test: term.test.clone() };
    match (a.not, b.not) {
        (false, false) => tests_exclude(&a.test, &b.test) || tests_exclude(&b.test, &a.test),
        (true, false) => implies(b, &positive(a)),
        (false, true) => implies(a, &positive(b)),
        (true, true) => false,
    }
}

fn tests_exclude(a: &Test, b: &Test) -> bool {
    if let (Some(a), Some(b)) = (family(a), family(b))
        && a != b
    {
        return true;
    }
    if let (Some(a), Some(b)) = (upper(a), upper(b))
        && a != b
    {
        return true;
    }
    match (a, b) {
        (Test::In, Test::Out) => true,
        // An incoming packet has no transmit port yet.
        (Test::In, Test::Xmit(interface)) => *interface != Interface::Any,
        (Test::Recv(Interface::Name(a)), Test::Recv(Interface::Name(b)))
        | (Test::Xmit(Interface::Name(a)), Test::Xmit(Interface::Name(b))) => a != b,
        (Test::Src(a), Test::Src(b)) | (Test::Dst(a), Test::Dst(b)) => {
            a.iter().all(|a| b.iter().all(|b| disjoint(a, b)))
        }
        (Test::SrcPort(a), Test::SrcPort(b)) | (Test::DstPort(a), Test::DstPort(b)) => ranges_disjoint(a, b),
        (Test::SrcPort(_) | Test::DstPort(_), other) => upper(other).is_some_and(|number| {
            !matches!(number, proto::TCP | proto::UDP | proto::UDPLITE | proto::SCTP | proto::DCCP)
        }),
        _ => false,
    }
}

/// The address family of all packets that match.
fn family(test: &Test) -> Option<u8> {
    match test {
        Test::Ip4 | Test::Proto(Protocol::Ip4) => Some(4),
        Test::Ip6 | Test::Proto(Protocol::Ip6) => Some(6),
        Test::Src(list) | Test::Dst(list) => {
            if list.iter().all(|address| matches!(address, Address::Net4(_) | Address::Set4(_))) {
                Some(4)
            } else if list.iter().all(|address| matches!(address, Address::Net6(_) | Address::Me6)) {
                Some(6)
            } else {
                None
            }
        }
        Test::Field(test) => match test.scope() {
            Scope::Ip4 => Some(4),
            Scope::Ip6 => Some(6),
            _ => None,
        },
        _ => None,
    }
}

/// The upper-layer protocol of all packets that match.
fn upper(test: &Test) -> Option<u8> {
    match test {
        Test::Proto(Protocol::Number(number)) => Some(*number),
        Test::Setup | Test::Established => Some(proto::TCP),
        Test::Field(test) => match FieldTest::scope(test) {
            Scope::Tcp => Some(proto::TCP),
            Scope::Icmp => Some(proto::ICMP),
            Scope::Icmp6 => Some(proto::ICMP6),
            _ => None,
        },
        _ => None,
    }
}

fn disjoint(a: &Address, b: &Address) -> bool {
    match (a, b) {
        (Address::Net4(a), Address::Net4(b)) => (a.addr ^ b.addr) & a.mask & b.mask != 0,
        (Address::Net6(a), Address::Net6(b)) => (a.addr ^ b.addr) & a.mask & b.mask != 0,
        _ => false,
    }
}

fn ranges_disjoint(a: &Ranges, b: &Ranges) -> bool {
    a.0.iter().all(|(lo, hi)| b.0.iter().all(|(l, h)| hi < l || h < lo))
}

#[cfg(test)]
mod tests {
    use crate::rules::Ruleset;

    #[test]
    fn rules_that_contradict_themselves_are_found() {
        let rows = [
            ("allow ip from any to any in out", Some(("in", "out"))),
            ("allow tcp from any to any proto udp", Some(("proto tcp", "proto udp"))),
            ("allow ip6 from 10.0.0.1 to any", Some(("proto ip6", "src-ip 10.0.0.1"))),
            ("allow ip from 10.0.0.1 to 2001:db8::1", Some(("src-ip 10.0.0.1", "dst-ip 2001:db8::1"))),
            ("allow ip4 from me6 to any", Some(("proto ip4", "src-ip me6"))),
            ("allow udp from any to any setup", Some(("proto udp", "setup"))),
            ("allow udp from any to any tcpflags syn", Some(("proto udp", "tcpflags syn"))),
            ("allow icmp from any to any 80", Some(("proto icmp", "dst-port 80"))),
            ("allow ip from any to any 22 icmptypes 8", Some(("dst-port 22", "icmptypes 8"))),
            ("allow ip from any 22 to any icmp6types 128", Some(("src-port 22", "icmp6types 128"))),
            ("allow ip from any to any 22 setup", None),
            (
                "allow ip from 10.0.0.0/8 to any src-ip 192.0.2.1",
                Some(("src-ip 10.0.0.0/8", "src-ip 192.0.2.1")),
            ),
            ("allow tcp from any 1-9 to any src-port 10", Some(("src-port 1-9", "src-port 10"))),
            ("allow ip from any to any in xmit em0", Some(("in", "xmit em0"))),
            ("allow ip from any to any recv em0 recv em1", Some(("recv em0", "recv em1"))),
            ("allow tcp from any to any not in in", Some(("not in", "in"))),
            (
                "allow { tcp or udp } from any to any proto icmp",
                Some(("{ proto tcp or proto udp }", "proto icmp")),
            ),
            ("allow { tcp or udp } from any to any proto udp", None),
            ("allow tcp from 10.0.0.0/8 to any src-ip 10.1.0.0/16 in recv em0 setup", None),
            ("allow tcp from any to any { in or out } in", None),
            ("allow ip from me to 2001:db8::1", None),
            ("allow ip from 10.0.0.1,2001:db8::1 to 10.0.0.2", None),
            ("allow ip6 from not 10.0.0.1 to any", None),
            ("allow tcp from any to any out recv em0 xmit em1", None),
            ("allow ip from table(t) to any src-ip 10.0.0.1", None),
        ];
        for (rule, expected) in rows {
            let parsed = Ruleset::parse("t", &format!("table t create\nadd {rule}"));
            assert!(parsed.ruleset.is_ok(), "{rule}");
            let found: Vec<String> = parsed.warnings.iter().map(ToString::to_string).collect();
            let expected = expected.map(|(one, other)| {
                format!("t:2:1: this rule never matches: \"{one}\" and \"{other}\" exclude each other; no packet has both: delete one of them, or write an or-block {{ A or B }}")
            });
            assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "{rule}");
        }
    }
}
