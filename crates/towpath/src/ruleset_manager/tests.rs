//! Tests: re-checks in steps, commands, tables and settings.

use std::time::Duration;

use towpath_engine::ForwardMode;
use towpath_gate::state;
use towpath_gate::state::{Ends, Flow, Install, Lookup, Name, RuleId, Segment};
use towpath_gate::{Dir, DropReason, Gateway, PacketSpec, PortId, Ports, Route, Step, Walk};
use towpath_wire::{self as wire, LinkType};

use super::*;
use crate::explained::Walked;

fn book(rules: &str) -> RulesetManager {
    let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
    let gate = Gate::new(ruleset.clone(), Ports::new(), state::Settings::default(), 1);
    RulesetManager::new(gate, ruleset, false)
}

/// A DNS query from 10.0.0.1.
fn walk(book: &RulesetManager) -> Step {
    walk_from(book, [0, 1], 53)
}

/// A packet from 10.0.HOST to this port.
fn walk_from(book: &RulesetManager, [high, low]: [u8; 2], port: u8) -> Step {
    let frame =
        [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, high, low, 10, 0, 0, 2, 4, 0, 0, port, 0, 8, 0, 0];
    let packet = wire::parse(LinkType::RAW, &frame, 28).unwrap();
    let mut walk = Walk::new(Dir::In, None, None);
    book.book().gate.walk(&mut walk, &packet, Time::from_secs(1))
}

/// New rules take effect at once. States are re-checked in steps, and queries are answered between steps.
#[test]
fn a_recheck_lets_others_have_the_rules() {
    let rule = "add 5 check-state\nadd 20 allow udp from any to any keep-state\n";
    let with = |more: &str| Ruleset::parse("t", &format!("{more}{rule}")).ruleset.unwrap();
    let book = book(rule);
    let states = || book.states(Cursor::default(), usize::MAX, false).0;
    let hosts = || (0..9_000_u16).map(u16::to_be_bytes);
    for host in hosts() {
        assert_eq!(walk_from(&book, host, 53 + host[1] % 2), Step::Pass);
    }
    let replace =
        |more: &str| book.replace(with(more), None, false, StatePolicy::Recheck, None).states_dropped;
    let going = |looked, dropped| Rechecks { running: true, looked, dropped, handed: 0 };

    assert_eq!(replace("add 10 deny udp from any to any 53\n"), 0);
    assert_eq!((states().len(), book.rechecks()), (9_000, going(0, 0)));
    assert!(book.recheck_some());
    assert_eq!(book.rechecks(), going(4_096, 2_048));
    assert_eq!((states().len(), book.rules().len()), (9_000 - 2_048, 4));
    // States that have not been re-checked yet keep their old verdict.
    assert_eq!(walk_from(&book, [1, 0], 53), Step::Drop(DropReason::Deny));
    assert_eq!(walk_from(&book, 8_998_u16.to_be_bytes(), 53), Step::Pass);

    // Another reload: the re-check continues with the new rules, and a second round covers the states checked before.
    assert_eq!(replace("add 10 deny udp from 10.0.0.0/24 to any\n"), 0);
    assert_eq!(book.rechecks(), going(4_096, 2_048));
    let mut steps = 1;
    while book.recheck_some() {
        // Other changes take effect during the re-check.
        book.command(&format!("add {} count ip from any to any", 100 + steps)).unwrap();
        steps += 1;
    }
    assert_eq!(steps, 3);
    let Rechecks { running, looked, dropped, handed: 0 } = book.rechecks() else {
        panic!("no other rule creates states")
    };
    assert!(!running && looked >= 9_000 + 2_048, "{looked}");
    assert_eq!((dropped, states().len()), (2_048 + 128, 9_000 - 2_048 - 128));
    assert!(!book.recheck_some());
    // Without states, the re-check ends.
    replace("add 10 deny ip from any to any\n");
    book.replace(with(""), None, false, StatePolicy::Drop, None);
    assert!(!book.rechecks().running && states().is_empty());
}

/// Even with many reloads, each state is checked within one round.
#[test]
fn a_restarted_recheck_reaches_the_last_state() {
    let rule = "add 5 check-state\nadd 20 allow udp from any to any keep-state\n";
    let book = book(rule);
    for host in (0..9_000_u16).map(u16::to_be_bytes) {
        assert_eq!(walk_from(&book, host, 53 + host[1] % 2), Step::Pass);
    }
    for reload in 0..6 {
        let rules = format!("add 10 deny udp from any to any 53 // {reload}\n{rule}");
        let ruleset = Ruleset::parse("t", &rules).ruleset.unwrap();
        book.replace(ruleset, None, false, StatePolicy::Recheck, None);
        assert!(book.recheck_some(), "there is always more by the last one's rules");
    }
    let left = book.states(Cursor::default(), usize::MAX, false).0;
    assert_eq!(left.len(), 4_500);
    // Without further reloads, the re-check ends after one round.
    let (mut steps, before) = (1, book.rechecks().looked);
    while book.recheck_some() {
        steps += 1;
    }
    assert!(steps <= 3 && book.rechecks().looked > before, "{steps}");
}

/// If the engine stops during a re-check, the snapshot records it for the next engine.
#[test]
fn a_snapshot_records_an_incomplete_recheck() {
    let rule = "add 5 check-state\nadd 20 allow udp from any to any keep-state\n";
    let rules = format!("add 10 deny udp from any to any 53\n{rule}");
    let ruleset = || Ruleset::parse("t", &rules).ruleset.unwrap();
    let first = book(rule);
    for host in (0..9_000_u16).map(u16::to_be_bytes) {
        assert_eq!(walk_from(&first, host, 53 + host[1] % 2), Step::Pass);
    }
    first.replace(ruleset(), None, false, StatePolicy::Recheck, None);
    let mut asked = 0;
    first.recheck_until(|| {
        asked += 1;
        true
    });
    assert_eq!((asked, first.rechecks().looked), (1, 4_096));
    let saved = |book: &RulesetManager| {
        let mut saved = Vec::new();
        book.snapshot(|piece| saved.extend_from_slice(piece));
        saved
    };

    // The rules are the same, but not all states were checked against them.
    let now = Time::from_secs(1);
    let second = book(&rules);
    let restored = second.restore(&saved(&first), now).unwrap();
    assert_eq!((restored.states, restored.default_dynamic, restored.unchecked), (6_952, 0, true));
    // The flag persists if this engine does not re-check the states either.
    assert!(book(&rules).restore(&saved(&second), now).unwrap().unchecked);
    second.recheck();
    second.recheck_until(|| false);
    assert_eq!(second.rechecks(), Rechecks { running: false, looked: 6_952, dropped: 2_452, handed: 0 });
    assert!(!book(&rules).restore(&saved(&second), now).unwrap().unchecked);
}

/// IPv4 slots are empty and IPv6 slots are used: the two parts of a round together cover all states.
#[test]
fn parts_of_a_round_are_the_whole() {
    let book = book("");
    let (syn, ack) = (2, 16);
    let segment = |tcp_flags| Segment { tcp_flags, tcp_ack: 1000, ..Segment::default() };
    let start = Time::from_secs(1);
    for v6 in [false, true] {
        let mut book = book.book();
        let states = book.gate.states_mut();
        for src_port in 0..50 {
            let ends = match v6 {
                false => Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into()),
                true => Ends::V6([1; 8].into(), [2; 8].into(), 0),
            };
            let flow = Flow { ends, proto: 6, src_port, dst_port: 80, zone: 0 };
            let install = Install::default();
            states.install(&flow, Name::DEFAULT, &segment(syn), RuleId(1), &install, start).unwrap();
            for (flow, flags) in [(flow.reversed(), syn | ack), (flow, ack)] {
                assert!(states.lookup(&flow, Lookup::Any, &segment(flags), start).is_some());
            }
            if !v6 {
                assert!(states.remove(&flow, Name::DEFAULT, start));
            }
        }
    }
    book.clock().set(start + std::time::Duration::from_secs(285));
    let due = [book.keepalives(0, 0.6).len(), book.keepalives(0, 0.4).len()];
    // Two for each state: one to each end.
    assert_eq!(due.iter().sum::<usize>(), 100, "{due:?}");
    assert!(due[0] > 0 && due[0] < 50, "{due:?}");
}

#[test]
fn states_are_filtered_and_one_is_ended() {
    let book = book(
        "add 100 allow udp from any to any 53 keep-state\nadd 200 allow udp from any to any keep-state :other\n",
    );
    book.clock().set(Time::from_secs(1));
    for host in [[0, 1], [0, 2], [0, 3]] {
        assert_eq!((walk_from(&book, host, 53), walk_from(&book, host, 54)), (Step::Pass, Step::Pass));
    }
    let all = Cursor::default();
    let numbers = |wanted: &dyn Fn(&Listed, u32, &str) -> bool| -> Vec<u32> {
        book.states_where(all, 100, false, wanted).0.iter().map(|line| line.rule).collect()
    };
    assert_eq!(numbers(&|_, _, _| true).len(), 6);
    assert_eq!(numbers(&|_, rule, _| rule == 200), [200; 3]);
    assert_eq!(numbers(&|_, _, name| name == "default"), [100; 3]);
    assert_eq!(numbers(&|state, _, _| state.seconds() > 10), [0; 0]);
    // Pages: each state once, whichever are wanted.
    let (first, next) = book.states_where(all, 2, false, |_, rule, _| rule == 100);
    let (second, end) = book.states_where(next.unwrap(), 2, false, |_, rule, _| rule == 100);
    assert_eq!((first.len(), second.len(), end), (2, 1, None));
    let one = Ends::V4([10, 0, 0, 2].into(), [10, 0, 0, 2].into());
    let wanted = |state: &Listed, _: u32, name: &str| state.flow.ends == one && name == "other";
    let (removed, next) = book.remove_states(all, wanted);
    assert_eq!((removed.len(), removed[0].rule, next), (1, 200, None));
    assert_eq!(numbers(&|_, _, _| true).len(), 5);
    assert_eq!(book.remove_states(all, wanted).0, []);
    // A state that was ended is made anew by the next packet.
    assert_eq!(walk_from(&book, [0, 2], 54), Step::Pass);
    assert_eq!(numbers(&|_, _, _| true).len(), 6);
}

#[test]
fn rules_have_the_time_of_their_last_packet() {
    let book = book("add 100 allow udp from any to any 53\n");
    book.clock().set_zero(std::time::Duration::from_secs(1_000_000));
    assert_eq!(walk(&book), Step::Pass);
    let times: Vec<_> = book.rules_with_times().1.into_iter().map(|(_, last)| last).collect();
    assert_eq!(times, [Some(Time::from_secs(1_000_001)), None]);
}

#[test]
fn deleting_a_rule_that_does_not_exist_is_an_error_of_a_command() {
    let book = book("delete 7\nadd 100 allow ip from any to any\n");
    for (text, place) in [
        ("delete 101", "command:1:8: "),
        ("delete 100 101", "command:1:12: "),
        ("set 3 delete 100", "command:1:14: "),
    ] {
        let errors = book.command(text).unwrap_err();
        assert_eq!(errors.len(), 1, "{text}");
        assert!(errors[0].to_string().starts_with(place), "{text}: {}", errors[0]);
        assert!(book.preview(text).is_err(), "{text}");
    }
    assert_eq!(book.rules().len(), 2);
    let done = book.command("-q delete 100 101").unwrap();
    assert_eq!((done.diff.removed.len(), done.warnings.len()), (1, 0));
}

#[test]
fn commands_are_carried_out_all_or_none() {
    let book = book("add 100 allow udp from any to any 53 keep-state\nadd 200 count ip from any to any\n");
    assert_eq!(walk(&book), Step::Pass);
    let done = book.command("add 150 deny tcp from any to any\nadd 160 deny icmp from any to any\n").unwrap();
    assert_eq!((done.diff.added.len(), done.diff.kept, done.diff.states_dropped), (2, 3, 0));
    let errors = book.command("delete 150\nadd 170 allow tpc from any to any\n").unwrap_err();
    assert_eq!(errors.len(), 1);
    assert!(errors[0].to_string().starts_with("command:2:15: "), "{}", errors[0]);
    let numbers: Vec<u32> = book.rules().iter().map(|rule| rule.number).collect();
    assert_eq!(numbers, [100, 150, 160, 200, 65535]);
    // The first rule keeps its state and counter; deleting the rule drops the state.
    assert_eq!(book.rules()[0].packets, 1);
    assert_eq!(book.states(Cursor::default(), 10, false).0.len(), 1);
    let done = book.command("delete 100").unwrap();
    assert_eq!((done.diff.removed.len(), done.diff.states_dropped), (1, 1));
    assert!(matches!(walk(&book), Step::Drop(_)));
}

#[test]
fn a_preview_changes_nothing() {
    let book = book("add 100 allow udp from any to any 53 keep-state\n");
    walk(&book);
    let done = book.preview("add 150 deny tcp from any to any\ndelete 100\n").unwrap();
    assert_eq!((done.diff.added.len(), done.diff.removed.len()), (1, 1));
    assert_eq!(book.rules().iter().map(|rule| rule.number).collect::<Vec<_>>(), [100, 65535]);
    assert_eq!(book.states(Cursor::default(), 10, false).0.len(), 1);
    let errors = book.preview("add 150 deny tpc from any to any").unwrap_err();
    assert!(errors[0].to_string().starts_with("command:1:14: "), "{}", errors[0]);
    book.preview("zero").unwrap();
    assert_eq!(book.rules()[0].packets, 1);
}

/// Each rule has logged what `logamount` permits. `resetlog` lets a rule log again, and keeps its counters.
#[test]
fn a_log_is_reset_by_rule() {
    let text = "add 100 count log logamount 1 ip from any to any\nadd 200 allow log logamount 1 ip from any to any\n";
    let book = book(text);
    let logged = || {
        walk(&book);
        let mut book = book.book();
        std::iter::from_fn(|| book.gate.log().take()).count()
    };
    assert_eq!([logged(), logged()], [2, 0]);
    for (command, expected) in [("resetlog 200", 1), ("resetlog", 2), ("resetlog 300", 0)] {
        book.command(command).unwrap();
        assert_eq!(logged(), expected, "{command}");
    }
    assert_eq!(book.rules()[0].packets, 5);
    book.command("zero 100").unwrap();
    assert_eq!((logged(), book.rules()[0].packets), (1, 1));
}

#[test]
fn commands_that_only_show_are_none() {
    let book = book("table t create type addr\n");
    for (text, place) in [
        ("table t lookup 10.0.0.1", "command:1:9: \"lookup\" only shows data"),
        ("add 5 count ip from any to any\n ipfw -q table all list", "command:2:20: \"list\" only shows"),
        ("set show", "command:1:5: \"show\" only shows"),
        ("set list", "command:1:5: \"list\" only shows"),
        ("/sbin/ipfw -qf -a set show", "command:1:23: \"show\" only shows"),
        ("pipe show", "command:1:6: \"show\" only shows"),
        ("pipe 5 list", "command:1:8: \"list\" only shows"),
    ] {
        let errors = book.command(text).unwrap_err();
        assert!(errors[0].to_string().starts_with(place), "{}", errors[0]);
        assert!(book.preview(text).is_err());
    }
    assert_eq!(book.rules().len(), 1);
}

#[test]
fn tables_are_looked_into_by_their_keys() {
    let book = book(
        "table a add 10.0.0.0/8 1 10.1.0.0/16 2 0.0.0.0/0 9 2001:db8::/32 3\n\
         table i create type iface\ntable i add lan 4\n\
         table n create type number\ntable n add 7 5\n\
         table f create type flow:src-ip,proto,dst-port\ntable f add 10.0.0.1,tcp,22 6\n\
         table m create type mac\ntable m add 02:00:00:00:00:00/24 7\n",
    );
    type Entry = Option<(&'static str, &'static str)>;
    let rows: [(&str, &str, Entry); 11] = [
        ("a", "10.1.2.3", Some(("10.1.0.0/16", "2"))),
        ("a", "10.2.0.0/16", Some(("10.0.0.0/8", "1"))),
        ("a", "192.0.2.1", Some(("0.0.0.0/0", "9"))),
        ("a", "2001:db8::1", Some(("2001:db8::/32", "3"))),
        ("a", "::1", None),
        ("i", "lan", Some(("lan", "4"))),
        ("i", "wan", None),
        ("n", "7", Some(("7", "5"))),
        ("f", "10.0.0.1,6,22", Some(("10.0.0.1,6,22", "6"))),
        ("m", "02:00:00:00:00:01", Some(("02:00:00:00:00:00/24", "7"))),
        ("m", "04:00:00:00:00:01", None),
    ];
    for (table, key, expected) in rows {
        let found = book.lookup(table, key).unwrap().unwrap();
        let found = found.as_ref().map(|(key, value)| (key.as_str(), value.as_str()));
        assert_eq!(found, expected, "{table} {key}");
    }
    for (table, key) in [("a", "lan"), ("n", "x"), ("a", "10.0.0.1 10.0.0.2"), ("a", ""), ("f", "1,2")] {
        assert!(book.lookup(table, key).unwrap().is_err(), "{table} {key}");
    }
    assert!(book.lookup("b", "10.0.0.1").is_none());
}

/// An explanation of the engine's rules with its states changes neither states nor counters.
#[test]
fn explaining_changes_nothing() {
    let rules = "add 50 deny udp from any to any 9\nadd 100 allow tcp from any to any 80 setup keep-state strict\nadd 200 reject tcp from any to any\n";
    let book = book(rules);
    let spec = |text: &str| PacketSpec::parse(text).unwrap();
    for text in [
        "tcp 10.0.0.1:1000 > 10.0.0.2:80 syn seq 99",
        "tcp 10.0.0.2:80 > 10.0.0.1:1000 syn ack seq 499 ackno 100",
        "tcp 10.0.0.1:1000 > 10.0.0.2:80 ack seq 100 ackno 500",
    ] {
        let spec = spec(text);
        let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        let mut walk = Walk::new(Dir::In, None, None);
        assert_eq!(book.book().gate.walk(&mut walk, &packet, Time::from_secs(1)), Step::Pass);
    }
    book.clock().set(Time::from_secs(2));
    let look = || (book.states(Cursor::default(), 9, true).0, book.rules(), book.state_counters());
    let before = look();
    let rows = [
        ("tcp 10.0.0.1:1000 > 10.0.0.2:80 ack seq 100 ackno 500", "pass"),
        ("tcp 10.0.0.1:1000 > 10.0.0.2:80 ack seq 900000000 ackno 500", "reject (ICMP unreachable, code 1)"),
        ("tcp 10.0.0.1:1000 > 10.0.0.2:80 rst seq 100", "pass"),
        ("tcp 10.0.0.7:1000 > 10.0.0.2:80 syn", "pass"),
        ("udp 10.0.0.7:1000 > 10.0.0.2:9", "drop"),
    ];
    for (text, verdict) in rows {
        let (walks, _) = book.explain(&spec(text)).unwrap();
        assert_eq!(crate::explained::json(&walks, &[])["walks"][0]["verdict"], verdict, "{text}");
    }
    assert_eq!(look(), before);
    assert!(book.explain(&spec("in em9 tcp 10.0.0.1:1 > 10.0.0.2:2")).unwrap_err().contains("no port `em9`"));
}

#[test]
fn an_explanation_has_the_second_walk_of_a_bridge_and_of_a_router() {
    let rules = "add 100 allow ip from any to any in\nadd 200 deny udp from any to any 9\n\
                 add 300 allow ip from any to any\n";
    let bridge = |walk_out| move |xmit| ForwardMode::Bridge { xmit, walk_out };
    type Mode = Box<dyn Fn(PortId) -> ForwardMode>;
    #[rustfmt::skip]
    let rows: [(Mode, &[&str]); 4] = [
        (Box::new(bridge(true)),            &["in lan", "out wan"]),
        (Box::new(bridge(false)),           &["in lan"]),
        (Box::new(|_| ForwardMode::Nowhere), &["in lan"]),
        (Box::new(|_| ForwardMode::Router),  &["in lan", "out dmz"]),
    ];
    for (mode, expected) in rows {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut ports = Ports::new();
        let [lan, wan, dmz] = ["lan", "wan", "dmz"].map(|name| ports.add(name, Vec::new()));
        let mut gate = Gate::new(ruleset.clone(), ports, state::Settings::default(), 1);
        let mut routes = Routes::new();
        let route = Route { port: dmz, connected: true, gateway: Gateway::OnLink };
        routes.add([10, 0, 0, 0].into(), 8, route);
        gate.set_routes(routes);
        let mut topology = Topology::none();
        topology.add(lan, mode(wan));
        let book = RulesetManager::new(gate, ruleset, false).with_topology(topology);
        let (walks, _) =
            book.explain(&PacketSpec::parse("in lan udp 10.0.0.1:7 > 10.0.0.2:9").unwrap()).unwrap();
        let walked: Vec<_> =
            walks.iter().map(|walk| format!("{:?} {}", walk.dir, walk.port).to_lowercase()).collect();
        assert_eq!(walked, expected);
        assert_eq!(walks.iter().all(Walked::passes), expected.len() == 1);
    }
}

#[test]
fn zero_resets_the_counters_of_a_rule() {
    let book = book("add 100 allow udp from any to any\n");
    walk(&book);
    book.command("zero 200").unwrap();
    assert_eq!(book.rules()[0].packets, 1);
    book.command("ipfw -q zero 100").unwrap();
    assert_eq!(book.rules()[0].packets, 0);
}

/// The entries of a table as they are listed.
fn entries(book: &RulesetManager, name: &str) -> Option<Vec<(String, String)>> {
    let (_, listing) = book.listing(name, None).ok()?;
    let row = |(key, value)| (listing.table().show_key(&key), listing.table().show_value(&value));
    Some(listing.iter_from(0).map(row).collect())
}

#[test]
fn a_table_is_loaded_in_one_step_or_not_at_all() {
    let book = book(
        "table t create type addr limit 3\ntable t add 10.0.0.0/8 7\nadd allow ip from table(t) to any\n",
    );
    let rule = || book.rules()[0].text.clone();
    assert_eq!(walk(&book), Step::Pass);
    let load = |text: &str, quiet, check| book.load_table("t", "feed.txt", text, quiet, check);
    let errors = |text: &str| -> Vec<String> {
        load(text, false, false).unwrap_err().iter().map(ToString::to_string).collect()
    };
    for (text, wanted) in [
        ("192.0.2.1\n\n 10.0.0.0/40 1\n", "feed.txt:3:2: \"10.0.0.0/40\" is not a valid address or prefix"),
        (
            "192.0.2.1 1 2\n",
            "feed.txt:1:13: unexpected \"2\" after the entry; write one entry per line: KEY or KEY VALUE",
        ),
        ("192.0.2.1 x\n", "feed.txt:1:11: \"x\" is not a valid value"),
        ("192.0.2.1 :up\n", "feed.txt:1:11: the value \":up\" is a label"),
        (
            "192.0.2.1 1\n192.0.2.1 2\n",
            "feed.txt:2:1: \"192.0.2.1\": the entry already exists; with \"-q\" before \"table\"",
        ),
        ("1.0.0.1\n1.0.0.2\n1.0.0.3\n1.0.0.4\n", "feed.txt:4:1: \"1.0.0.4\": the table is full"),
    ] {
        assert!(errors(text)[0].starts_with(wanted), "{:?}", errors(text));
    }
    assert_eq!(errors("a\nb\n").len(), 2, "all errors");
    assert_eq!((entries(&book, "t").unwrap().len(), walk(&book)), (1, Step::Pass));
    let feed = "# feed\n192.0.2.0/24 3 // three\n192.0.2.0/24 4\n2001:db8::/32\n";
    assert_eq!(load(feed, true, true).unwrap().diff.tables, ["t"]);
    assert_eq!(entries(&book, "t").unwrap().len(), 1, "only checked");
    assert_eq!(load(feed, true, false).unwrap().diff.tables, ["t"]);
    let row = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(entries(&book, "t").unwrap(), [row("192.0.2.0/24", "4"), row("2001:db8::/32", "0")]);
    assert!(matches!(walk(&book), Step::Drop(_)));
    // The configuration has the new entries too, and the rule stays.
    assert!(book.to_text().contains("table t add 192.0.2.0/24 4\n"));
    assert_eq!(book.command("table t add 10.0.0.0/8 1").unwrap().diff.tables, ["t"]);
    assert_eq!((walk(&book), rule()), (Step::Pass, "allow ip from table(t) to any".to_owned()));
    book.command("table t lock").unwrap();
    let message =
        |name: &str| book.load_table(name, "f", "1.1.1.1", false, false).unwrap_err()[0].to_string();
    assert!(message("t").contains("is locked; unlock it first"), "{}", message("t"));
    assert!(message("u").contains("does not exist; create it first"), "{}", message("u"));
    // The engine reads no file for a client.
    let error = &book.command("table t unlock\ntable t load /etc/passwd").unwrap_err()[0];
    assert!(error.to_string().starts_with("command:2:14: \"load\" reads a file"), "{error}");
}

#[test]
fn tables_are_swapped_in_one_step() {
    let book = book(
        "table t create type addr\ntable u create type addr\ntable u add 10.0.0.0/8 7\n\
         add allow ip from table(t) to any\n",
    );
    assert!(matches!(walk(&book), Step::Drop(_)));
    assert_eq!(book.command("table t swap u").unwrap().diff.tables, ["t", "u"]);
    assert_eq!(walk(&book), Step::Pass);
}

/// The pages of a listing belong to one moment, although the table changes in between.
#[test]
fn a_listing_is_not_affected_by_changes() {
    let book = book("table t create type number\n");
    let text: String = (0..5_000).map(|key| format!("{key} {}\n", key % 7)).collect();
    book.load_table("t", "f", &text, false, false).unwrap();
    let (version, listing) = book.listing("t", None).unwrap();
    book.command("table t delete 4000\ntable t add 9000 1").unwrap();
    book.command("table t flush").unwrap();
    let (same, again) = book.listing("t", Some(version)).unwrap();
    assert!(same == version && Arc::ptr_eq(&listing, &again));
    let page: Vec<_> = again.iter_from(3_999).take(3).map(|(key, _)| again.table().show_key(&key)).collect();
    assert_eq!(page, ["3999", "4000", "4001"]);
    // Without the version, the listing is the current one.
    let (now, current) = book.listing("t", None).unwrap();
    assert!(now > version && current.is_empty());
    // A listing that was not kept, or was discarded, is not continued with other entries.
    assert_eq!(book.listing("t", Some(version + 1)).err(), Some(NoListing::Discarded));
    book.listings.expire(Instant::now() + Duration::from_secs(3600));
    assert_eq!(book.listing("t", Some(version)).err(), Some(NoListing::Discarded));
    // The table has not changed since.
    assert_eq!(book.listing("t", Some(now)).unwrap().0, now);
    assert_eq!(book.listing("u", None).err(), Some(NoListing::NoTable));
}

#[test]
fn tables_and_settings() {
    let book = book("table t create type addr\nadd allow ip from table(t) to any\n");
    assert!(matches!(walk(&book), Step::Drop(_)));
    book.command("table t add 10.0.0.0/8 7").unwrap();
    assert_eq!(walk(&book), Step::Pass);
    assert_eq!(book.tables(), [("t".to_owned(), "addr".to_owned(), 1)]);
    let errors = book.command("table t add 11.0.0.0/8\ntable t delete 12.0.0.0/8").unwrap_err();
    assert!(errors[0].to_string().starts_with("command:2:16: "), "{}", errors[0]);
    assert_eq!(entries(&book, "t").unwrap().len(), 1, "all or none");
    assert_eq!(book.command("table t delete 10.0.0.0/8").unwrap().diff.tables, ["t"]);
    assert!(matches!(walk(&book), Step::Drop(_)));
    book.command("ipfw -q table t add 10.0.0.0/8 7").unwrap();
    assert_eq!(entries(&book, "t").unwrap(), [("10.0.0.0/8".to_owned(), "7".to_owned())]);
    assert_eq!(entries(&book, "u"), None);
    assert_eq!(book.set("net.inet.ip.fw.dyn_max", 9).unwrap(), ("dyn_max".to_owned(), 1_048_576, 9));
    assert_eq!(book.set("dyn_fin_lifetime", 100).unwrap(), ("dyn_fin_lifetime".to_owned(), 1, 4));
    assert!(book.settings().contains(&("dyn_max", 9)));
    assert!(book.set("dyn_count", 9).is_err());
}

#[test]
fn a_table_of_a_group_is_changed_by_the_group_only() {
    let book = book("table t create type addr\ntable own create type addr\n");
    book.command("table t add 10.0.0.1").unwrap();
    book.load_group_entries("t", "10.0.0.2\n").unwrap();
    let commands = [
        "table t add 10.0.0.3",
        "-q table t delete 10.0.0.2",
        "table t flush",
        "table t destroy",
        "table own swap t",
        "table own add 10.0.0.4\ntable t add 10.0.0.4",
    ];
    for command in commands {
        let errors = book.command(command).unwrap_err();
        assert!(errors[0].message.contains("entries of t come from the group"), "{command}: {}", errors[0]);
        assert_eq!(book.preview(command).unwrap_err().len(), 1, "{command}");
    }
    for check in [false, true] {
        assert!(book.load_table("t", "f", "1.1.1.1", false, check).is_err());
    }
    assert_eq!(book.entry_lines("t").unwrap().lines().count(), 1);
    // Other tables are this gate's, and the group may change its own.
    book.command("table own add 10.0.0.4").unwrap();
    book.check_group_load("t", "f", "10.0.0.5").unwrap();
    book.check_group_entries("t", "add 10.0.0.5").unwrap();
    assert_eq!(book.change_group_entries("t", "add 10.0.0.5"), 0);
    assert_eq!(book.entry_lines("t").unwrap().lines().count(), 2);
}
