//! Gates in this process whose table has had many changes: a gate that joins reads a snapshot instead of the changes. And a stream that is
//! made anew.

use std::sync::Arc;

use super::copies::Plain;
use super::with_server;
use crate::support::until;
use towpath::config::Config;
use towpath::control::EndpointCounters;
use towpath::fleet::group::{GroupCommand, GroupRules, GroupThread, GroupView};
use towpath::ruleset_manager::RulesetManager;
use towpath_fleet::group::tables;
use towpath_gate::rules::Ruleset;
use towpath_gate::{Gate, Ports, state};

const RULES: &str = "table blocked create type addr\nadd deny ip from table(blocked) to any\n";

struct Member {
    manager: Arc<RulesetManager>,
    shown: EndpointCounters,
    _thread: GroupThread,
    _files: tempfile::TempDir,
}

impl Member {
    fn start(gate: &str, password: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        let text = format!("{}configuration = \"group\"\n", super::gate(gate, password, 1));
        let config = Config::parse(files.path().join("t.toml").to_str().unwrap(), &text).unwrap();
        let ruleset = Ruleset::parse("t", RULES).ruleset.unwrap();
        let gate = Gate::new(ruleset.clone(), Ports::new(), state::Settings::default(), 1);
        let manager = Arc::new(RulesetManager::new(gate, ruleset, false));
        let rules = GroupRules::open(&config, &manager).unwrap();
        let shown = EndpointCounters::default();
        let thread = GroupThread::start(config.fleet.as_ref().unwrap(), rules, shown.clone()).unwrap();
        let member = Self { manager, shown, _thread: thread, _files: files };
        until(|| member.view().tables.caught_up == 1);
        member
    }

    fn view(&self) -> GroupView {
        self.shown.group().unwrap()
    }

    fn lines(&self) -> String {
        self.manager.entry_lines("blocked").unwrap()
    }
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_gate_that_joins_reads_a_snapshot_of_many_changes() {
    with_server(|_, _, _server| {
        let one = Member::start("a", "one");
        // More than 4 MiB of changes of 250 entries.
        let comment = "x".repeat(400);
        let lines: String =
            (0..11_000).map(|at| format!("add 10.0.0.{} {at} # {comment}\n", at % 250)).collect();
        let changes = tables::change("blocked", &lines).messages.len() as u64;
        let desk = one.shown.group_desk().unwrap();
        let change = desk.ask(GroupCommand::Change { table: "blocked".to_owned(), lines }).unwrap();
        until(|| desk.outcome(change) != Ok(None));
        assert!(matches!(desk.outcome(change), Ok(Some(Ok(_)))), "{:?}", desk.outcome(change));
        // The gate sees its own snapshot, which changes nothing here.
        until(|| one.view().tables.seq > changes);
        let two = loop {
            let two = Member::start("b", "two");
            assert_eq!(two.lines(), one.lines());
            // The server forgets the changes a moment after it has the snapshot.
            if two.view().tables.entries == 0 {
                break two;
            }
        };
        let (first, second) = (one.view(), two.view());
        assert_eq!((second.tables.loads, first.tables.loads), (1, 0), "{first:?} {second:?}");
        assert!(first.problem.is_none() && second.problem.is_none(), "{first:?} {second:?}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_stream_that_was_made_anew_is_read_from_its_beginning() {
    with_server(|_, _, _server| {
        let one = Member::start("a", "one");
        let mut other = Plain::connect("c", "three");
        let (stream, subject) = ("towpath-edge-tables", "towpath.edge.table.blocked.b");
        let add = |last: u8| format!("TWGT\u{1}\u{1}\u{1}\u{0}add 192.0.2.{last}\n");
        other.publish_to(stream, subject, &add(100));
        until(|| one.view().tables.seq == 1);
        // The next one has more messages before the gate sees it.
        let config =
            format!(r#"{{"name":"{stream}","subjects":["towpath.edge.table.*.*"],"storage":"file"}}"#);
        for (request, text) in [("DELETE", ""), ("CREATE", &config)] {
            let answer = other.request(&format!("$JS.API.STREAM.{request}.{stream}"), text);
            assert!(!answer.contains("\"error\""), "{answer}");
        }
        (1..=5).for_each(|last| other.publish_to(stream, subject, &add(last)));
        until(|| one.lines().lines().count() == 6);
        until(|| one.view().tables.seq == 5);
    });
}
