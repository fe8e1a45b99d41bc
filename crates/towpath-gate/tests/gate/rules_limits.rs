//! Limits per prefix, per second, and shared by name.

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::state::{Kind, Refused};
use towpath_gate::{Dir, DropReason, Gate, Ports, Step, Walk};
use towpath_wire::{self as wire, LinkType, Time};

fn gate(text: &str) -> Gate {
    let ruleset = Ruleset::parse("t", text).ruleset.unwrap_or_else(|errors| panic!("{}", errors[0]));
    Gate::new(ruleset, Ports::new(), state::Settings::default(), 7)
}

/// A UDP packet from `src`, port 4000, to port `port` of 192.0.2.1 or 2001:db8::1, at `millis`.
fn walk(gate: &mut Gate, src: &str, port: u16, millis: u64) -> Step {
    walk_from(gate, src, 4000, port, millis)
}

fn walk_from(gate: &mut Gate, src: &str, src_port: u16, port: u16, millis: u64) -> Step {
    let mut frame = Vec::new();
    match src.parse().unwrap() {
        std::net::IpAddr::V4(src) => {
            frame.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
            frame.extend(src.octets().into_iter().chain([192, 0, 2, 1]));
        }
        std::net::IpAddr::V6(src) => {
            frame.extend([0x60, 0, 0, 0, 0, 8, 17, 64]);
            frame.extend(
                src.octets().into_iter().chain([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
            );
        }
    }
    frame.extend(src_port.to_be_bytes().into_iter().chain(port.to_be_bytes()).chain([0, 8, 0, 0]));
    let packet = wire::parse(LinkType::RAW, &frame, frame.len() as u32).unwrap();
    let now = Time::from_nanos(1_000_000_000_000 + millis * 1_000_000);
    gate.walk(&mut Walk::new(Dir::In, None, None), &packet, now)
}

const LIMIT: Step = Step::Drop(DropReason::NoState(Refused::OverLimit));
const RATE: Step = Step::Drop(DropReason::NoState(Refused::OverRate));

#[test]
fn prefixes_share_a_count() {
    let mut gate = gate("add allow udp from any to any limit src-addr/24/64 2");
    let rows = [
        ("10.0.0.1", Step::Pass),
        ("10.0.0.2", Step::Pass),
        ("10.0.0.200", LIMIT),
        ("10.0.1.1", Step::Pass),
        ("2001:db8:0:1::1", Step::Pass),
        ("2001:db8:0:1:8000::1", Step::Pass),
        ("2001:db8:0:1::2", LIMIT),
        ("2001:db8:0:2::2", Step::Pass),
        // This flow has a state.
        ("10.0.0.1", Step::Pass),
    ];
    for (src, step) in rows {
        assert_eq!(walk(&mut gate, src, 1, 0), step, "{src}");
    }
    let now = Time::from_secs(1000);
    let parents = gate.states().list(now).filter_map(|listed| match listed.kind {
        Kind::Parent { count } => Some((listed.flow.ends, count)),
        _ => None,
    });
    let v4 = |src: [u8; 4]| state::Ends::V4(src.into(), [0; 4].into());
    let v6 = |src: &str| state::Ends::V6(src.parse().unwrap(), "::".parse().unwrap(), 0);
    let mut parents: Vec<_> = parents.collect();
    parents.sort_by_key(|(ends, _)| format!("{ends:?}"));
    let rows = [
        (v4([10, 0, 0, 0]), 2),
        (v4([10, 0, 1, 0]), 1),
        (v6("2001:db8:0:1::"), 2),
        (v6("2001:db8:0:2::"), 1),
    ];
    assert_eq!(parents, rows);
}

#[test]
fn a_rate_limits_new_states_per_second() {
    let mut gate = gate("add allow udp from any to any limit src-addr 2/second");
    let rows = [
        ("10.0.0.1", 1, 0, Step::Pass),
        ("10.0.0.1", 2, 0, Step::Pass),
        ("10.0.0.1", 3, 0, RATE),
        ("10.0.0.2", 3, 0, Step::Pass),
        // This flow has a state.
        ("10.0.0.1", 1, 0, Step::Pass),
        ("10.0.0.1", 3, 499, RATE),
        ("10.0.0.1", 3, 500, Step::Pass),
        ("10.0.0.1", 4, 500, RATE),
        ("10.0.0.1", 4, 1000, Step::Pass),
        ("10.0.0.1", 5, 2000, Step::Pass),
        ("10.0.0.1", 6, 2000, Step::Pass),
        ("10.0.0.1", 7, 2000, RATE),
    ];
    for (src, port, millis, step) in rows {
        assert_eq!(walk(&mut gate, src, port, millis), step, "{src} {port} {millis}");
    }
    assert_eq!(gate.states().counters().over_rate, 4);
    let limits = gate.states().list(Time::from_secs(1001)).filter(|listed| listed.kind == Kind::Limit);
    assert_eq!(limits.count(), 0, "nothing is counted down");
}

#[test]
fn rules_that_share_a_name_count_together() {
    let mut gate = gate(
        "add 100 allow udp from any to any 1 limit src-addr 2 shared office\n\
         add 200 allow udp from any to any 2 limit src-addr 3 shared office\n\
         add 300 allow udp from any to any 3 limit src-addr 1 :office\n",
    );
    let rows = [
        ("10.0.0.1", 1, Step::Pass),
        ("10.0.0.1", 2, Step::Pass),
        ("10.0.0.2", 1, Step::Pass),
        // The third state: above the limit of the first rule, within that of the second.
        ("10.0.0.1", 3, Step::Pass),
    ];
    for (src, port, step) in rows {
        assert_eq!(walk(&mut gate, src, port, 0), step, "{src} {port}");
    }
    let mut other = |port: u16| {
        // Another port and another source, which differ in no counted field.
        let mut frame = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1, 0x20, 0];
        frame.extend(port.to_be_bytes().into_iter().chain([0, 8, 0, 0]));
        let packet = wire::parse(LinkType::RAW, &frame, 28).unwrap();
        gate.walk(&mut Walk::new(Dir::In, None, None), &packet, Time::from_secs(1000))
    };
    assert_eq!([other(1), other(3), other(2)], [LIMIT, LIMIT, Step::Pass]);
    assert_eq!(other(1), LIMIT);
    // Deleting one of the rules removes its states; the others continue to count.
    let ruleset = Ruleset::parse("t", "add 100 allow udp from any to any 1 limit src-addr 2 shared office");
    let policy = towpath_gate::StatePolicy::Recheck;
    gate.reload(ruleset.ruleset.unwrap(), policy, Time::from_secs(1000));
    let limits = gate.states().list(Time::from_secs(1000)).filter(|listed| listed.kind == Kind::Limit);
    assert_eq!(limits.count(), 2);
    assert_eq!(walk(&mut gate, "10.0.0.1", 1, 1), Step::Pass);
}

#[test]
fn limits_print_in_normalised_form() {
    let rows = [
        ("limit src-addr/24/64 4", ""),
        ("limit src-addr/24 4", "limit src-addr/24/24 4"),
        ("limit src-addr/64 4", "limit src-addr/32/64 4"),
        ("limit src-addr dst-addr/8/32 dst-port 4", ""),
        ("set-limit dst-addr 100/second :web", ""),
        ("limit src-addr 4 shared office :web strict lifetime 5", ""),
    ];
    for (written, printed) in rows {
        let printed = if printed.is_empty() { written } else { printed };
        let text = |option: &str| {
            let parsed = Ruleset::parse("t", &format!("add allow tcp from any to any {option}"));
            parsed.ruleset.unwrap_or_else(|errors| panic!("{option}: {}", errors[0])).rules()[0].to_string()
        };
        let once = text(written);
        assert!(once.contains(printed), "{written}: {once}");
        assert_eq!(once, text(printed), "{written}");
    }
    let errors = [
        (
            "limit src-addr/33/64 4",
            "\"33/64\" is not a valid prefix length; src-addr/24, or src-addr/24/64 for IPv4 and IPv6",
        ),
        ("limit src-port/8 4", "a port has no prefix length: write \"src-port\""),
        ("limit src-addr 0/second", "\"0\" is not a valid rate; use a number from 1 to 1000000000"),
        ("limit src-addr 4 shared", "the name of the shared limit is missing"),
        ("limit src-addr 4 shared a/b", "\"a/b\" is not a valid limit name"),
    ];
    for (option, error) in errors {
        let parsed = Ruleset::parse("t", &format!("add allow tcp from any to any {option}"));
        let found: Vec<_> = parsed.ruleset.unwrap_err().iter().map(ToString::to_string).collect();
        assert!(found[0].ends_with(error), "{option}: {found:?}");
    }
}

#[test]
fn refused_states_are_logged_once_per_second() {
    let mut gate = gate(
        "add 100 allow udp from any to any 1 limit src-addr 1\n\
         add 200 allow udp from any to any 2-9 limit src-addr 1/second\n",
    );
    let rows = [
        (1, 0, None),
        (1, 0, Some("ipfw: 100 Deny (over_limit) UDP 10.0.0.1:2 192.0.2.1:1 in")),
        (1, 999, None),
        (2, 1000, None),
        (3, 1001, Some("ipfw: 200 Deny (over_rate) UDP 10.0.0.1:5 192.0.2.1:3 in")),
        (4, 1500, None),
        (4, 1501, None),
        (1, 2001, Some("ipfw: 100 Deny (over_limit) UDP 10.0.0.1:8 192.0.2.1:1 in")),
    ];
    for (src_port, (port, millis, line)) in (1..).zip(rows) {
        walk_from(&mut gate, "10.0.0.1", src_port, port, millis);
        let logged = gate.log().take().map(|logged| logged.line(None).to_string());
        assert_eq!(logged.as_deref(), line, "{src_port} {port} {millis}");
    }
    // The refusals without a line are counted: one of rule 100, two of rule 200.
    let summaries: Vec<String> = std::iter::from_fn(|| gate.log().poll_summary(Time::from_secs(1003), false))
        .map(|s| s.to_string())
        .collect();
    assert_eq!(
        summaries,
        [
            "ipfw: 100 suppressed 1 line: at most one \"Deny (over_limit)\" per second",
            "ipfw: 200 suppressed 2 lines: at most one \"Deny (over_rate)\" per second",
        ]
    );
}
