//! A group of two gates with one configuration, with nats-server.

use std::path::Path;
use std::process::Output;

use rustix::process::Signal;

use super::copies::Plain;
use super::{Server, fleet, with_server};
use crate::live::machines::*;
use crate::support::until;

/// A gate's own rules: version 0.
const OWN: &str = "add 1 deny ip from any to any\n";

/// The group's rules.
const RULES: &str = "table blocked create type addr\nadd 100 deny ip from table(blocked) to any\nadd 200 allow ip from any to any\n";

/// A gate that takes its rules from the group.
fn gate(name: &str, password: &str, number: u8, more: &str) -> tempfile::TempDir {
    files(&format!("{}configuration = \"group\"\n{more}", super::gate(name, password, number)), OWN)
}

fn in_touch(engine: &Engine, gates: usize) {
    until(|| {
        let configuration = fleet(engine)["configuration"].take();
        let gates_in_touch = configuration["stats"]["gates"].as_u64() == Some(gates as u64);
        gates_in_touch && configuration["problem"].is_null() && configuration["tables"]["caught_up"] == 1
    });
}

fn two() -> ([tempfile::TempDir; 2], [Engine; 2]) {
    let files = [gate("a", "one", 1, ""), gate("b", "two", 2, "")];
    let engines = [Engine::start(files[0].path()), Engine::start(files[1].path())];
    engines.iter().for_each(|engine| in_touch(engine, 2));
    (files, engines)
}

fn write(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn apply(engine: &Engine, file: &str) -> Result<String, String> {
    let output = engine.ctl(&format!("fleet apply {file}"));
    if output.status.success() { Ok(said(&output)) } else { Err(said(&output)) }
}

fn version(engine: &Engine) -> u64 {
    fleet(engine)["configuration"]["version"].as_u64().unwrap()
}

/// The numbers of the rules.
fn rules(engine: &Engine) -> Vec<u64> {
    let rules = engine.json("show rules --json");
    rules["rules"].as_array().unwrap().iter().map(|rule| rule["number"].as_u64().unwrap()).collect()
}

/// Waits until the gate has this version with these rules. What `show fleet` shows is up to 100 ms old.
fn has(engine: &Engine, expected: u64, numbers: &[u64]) {
    until(|| version(engine) == expected);
    assert_eq!(rules(engine), numbers);
}

fn entries(engine: &Engine, table: &str) -> usize {
    let tables = engine.json("show tables --json");
    let found = tables["tables"].as_array().unwrap().iter().find(|row| row["name"] == table);
    found.map_or(0, |row| row["entries"].as_u64().unwrap() as usize)
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_version_reaches_all_gates_and_survives_the_server_and_restarts() {
    with_server(|_, path, server| {
        let (files, [one, two]) = two();
        let file = write(path, "edge.ipfw", RULES);
        let said = apply(&one, &file).unwrap();
        assert!(
            said.contains("version 1 is applied\n") && said.matches(" version 1\n").count() == 2,
            "{said}"
        );
        for engine in [&one, &two] {
            has(engine, 1, &[100, 200, 65535]);
        }
        // Keys of a configuration, at the other gate.
        write(path, "more.ipfw", "add 300 allow ip from any to any\n");
        let toml = write(path, "edge.toml", "rules = \"more.ipfw\"\n[settings]\ndyn_max = 4321\n");
        assert!(apply(&two, &toml).unwrap().contains("version 2 is applied"));
        has(&one, 2, &[300, 65535]);
        assert!(String::from_utf8_lossy(&one.ctl("sysctl").stdout).contains("dyn_max: 4321"), "sysctl");
        // A reload of the gate's own files keeps the group's rules.
        one.signal(Signal::HUP);
        let reloaded = "towpath_reload_reloads_total{result=\"applied\"} 1\n";
        until(|| String::from_utf8_lossy(&one.ctl("metrics").stdout).contains(reloaded));
        assert_eq!(rules(&one), [300, 65535]);
        // Without a server, a gate begins with the version that it had.
        drop(server);
        one.stop();
        let one = Engine::start(files[0].path());
        has(&one, 2, &[300, 65535]);
        has(&two, 2, &[300, 65535]);
        let error = apply(&one, &file).unwrap_err();
        assert!(error.contains("no connection to a server of the group; nothing was applied"), "{error}");
        // One that joins later, without a file, gets it from the bucket.
        two.stop();
        std::fs::remove_file(files[1].path().join("group")).unwrap();
        let _server = Server::start(path);
        let two = Engine::start(files[1].path());
        has(&two, 2, &[300, 65535]);
        in_touch(&one, 2);
        assert!(apply(&one, &file).unwrap().contains("version 3 is applied"));
        one.stop();
        two.stop();
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_version_that_one_gate_refuses_is_applied_nowhere() {
    with_server(|_, path, _server| {
        let files = [gate("a", "one", 1, "[offload]\n"), gate("b", "two", 2, "")];
        let [one, two] = [0, 1].map(|at| Engine::start(files[at].path()));
        in_touch(&one, 2);
        let good = write(path, "good.ipfw", RULES);
        assert!(apply(&one, &good).is_ok());
        let bad =
            write(path, "bad.ipfw", &format!("{RULES}add 300 allow ip from any to any keep-state offload\n"));
        let error = apply(&one, &bad).unwrap_err();
        assert!(error.contains("gate b: ") && error.contains("bad.ipfw:4:"), "{error}");
        assert!(error.contains("nothing was applied"), "{error}");
        // The other gate refuses its own file.
        let error = apply(&two, &bad).unwrap_err();
        assert!(error.contains("gate b: ") && error.contains("bad.ipfw:4:"), "{error}");
        for engine in [&one, &two] {
            has(engine, 1, &[100, 200, 65535]);
        }
        // A list of addresses as rules.
        let rules = (0..30_000).map(|at| format!("add deny ip from 10.1.{}.{} to any\n", at / 256, at % 256));
        let error = apply(&one, &write(path, "long.ipfw", &rules.collect::<String>())).unwrap_err();
        assert!(
            error.contains("at most 960 KiB") && error.contains("`towpath ctl fleet table NAME load FILE`"),
            "{error}"
        );
        // A file of a gate, and keys that are not the group's.
        let bad = write(path, "files.ipfw", "table t create type addr\ntable t load /etc/passwd\n");
        assert!(apply(&one, &bad).unwrap_err().contains("files.ipfw:2:"));
        let bad = write(path, "bad.toml", "rules = \"good.ipfw\"\n[port.x]\ndriver = \"tap\"\n");
        assert!(apply(&one, &bad).unwrap_err().contains("bad.toml:2:"));
        one.stop();
        two.stop();
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn of_two_versions_at_the_same_time_at_most_one_is_applied() {
    with_server(|_, path, _server| {
        let (_files, engines) = two();
        let names = ["first", "second"];
        let files: Vec<_> = (0..2_usize)
            .map(|at| write(path, names[at], &format!("add {} allow ip from any to any\n", 10 + at)))
            .collect();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = engines
                .iter()
                .zip(&files)
                .map(|(engine, file)| scope.spawn(move || apply(engine, file)))
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let applied = outcomes.iter().filter(|outcome| outcome.is_ok()).count() as u64;
        // Either one was written on the base of the other, or one has failed.
        for outcome in &outcomes {
            let fine = match outcome {
                Ok(said) => said.contains("is applied"),
                Err(said) => said.contains("another version was applied at the same time"),
            };
            assert!(fine, "{outcomes:?}");
        }
        assert!(applied >= 1, "{outcomes:?}");
        until(|| engines.iter().all(|engine| version(engine) == applied));
        assert_eq!(rules(&engines[0]), rules(&engines[1]));
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn entries_of_a_table_reach_all_gates() {
    with_server(|_, path, server| {
        let (files, [one, two]) = two();
        let rules = write(path, "edge.ipfw", RULES);
        assert!(apply(&one, &rules).is_ok());
        let ctl = |engine: &Engine, words: &str| {
            let output = engine.ctl(&format!("fleet table {words}"));
            if output.status.success() { Ok(()) } else { Err(said(&output)) }
        };
        ctl(&one, "blocked add 192.0.2.1 198.51.100.0/24=7").unwrap();
        until(|| entries(&two, "blocked") == 2);
        ctl(&two, "blocked delete 192.0.2.1").unwrap();
        until(|| entries(&one, "blocked") == 1);
        assert!(said(&one.ctl("table blocked lookup 198.51.100.9")).contains('7'));
        // Wrong entries and tables are refused before they are published.
        let error = ctl(&one, "blocked add 300.0.0.1").unwrap_err();
        assert!(error.contains("300.0.0.1"), "{error}");
        assert!(ctl(&one, "none add 192.0.2.1").unwrap_err().contains("no table none"));
        let many: String = (0..30_000).map(|at| format!("10.{}.{}.1 9\n", at / 250, at % 250)).collect();
        let list = write(path, "list", &many);
        ctl(&one, &format!("blocked load {list}")).unwrap();
        until(|| entries(&two, "blocked") == 30_000);
        // The stream has forgotten what was before the list.
        assert!(fleet(&one)["configuration"]["problem"].is_null(), "{}", fleet(&one));
        ctl(&two, "blocked add 192.0.2.9").unwrap();
        // Another version of the rules keeps the entries.
        assert!(apply(&two, &rules).is_ok());
        until(|| entries(&one, "blocked") == 30_001 && entries(&two, "blocked") == 30_001);
        // A gate that joins has the same ones.
        two.stop();
        std::fs::remove_file(files[1].path().join("group.tables")).unwrap();
        let two = Engine::start(files[1].path());
        until(|| entries(&two, "blocked") == 30_001);
        // Without a server, gates continue with the entries that they have.
        drop(server);
        until(|| fleet(&one)["server"].is_null());
        let error = ctl(&one, "blocked add 192.0.2.10").unwrap_err();
        assert!(error.contains("nothing was changed"), "{error}");
        assert_eq!(entries(&one, "blocked"), 30_001);
        // Also when they begin without one.
        two.stop();
        one.stop();
        let one = Engine::start(files[0].path());
        assert_eq!(entries(&one, "blocked"), 30_001);
        // What they have is not read again.
        let _server = Server::start(path);
        in_touch(&one, 1);
        assert_eq!(fleet(&one)["configuration"]["tables"]["messages"], 0, "{}", fleet(&one));
        one.stop();
        // A file that is cut off is not used.
        let file = files[0].path().join("group.tables");
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
        let one = Engine::start(files[0].path());
        until(|| entries(&one, "blocked") == 30_001);
        let said = one.stop();
        assert!(
            said.contains("group.tables: the tables of the group cannot be read")
                && said.contains("cut off after"),
            "{said}"
        );
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn messages_that_no_gate_has_published_are_refused() {
    with_server(|_, path, _server| {
        let (_files, [one, two]) = two();
        assert!(apply(&one, &write(path, "edge.ipfw", RULES)).is_ok());
        let stats = |engine: &Engine, part: &str| fleet(engine)["configuration"][part].take();
        let mut hostile = Plain::connect("c", "three");
        // Without the name of the stream: as a consumer would deliver a message of another stream.
        hostile.publish("$KV.towpath-edge.current", "", "towpath-group 1\nconfig 0 \nrules 0 r\n\n");
        hostile.publish("towpath.edge.table.blocked.a", "", "TWGT\u{1}\u{1}\u{1}\u{0}add 192.0.2.1");
        hostile.publish("towpath.edge.config.a", "", "TWGM");
        hostile.publish("towpath.edge.config.x", "_INBOX.plain", "TWGM");
        until(|| {
            let (stats, tables) = (stats(&two, "stats"), stats(&two, "tables"));
            stats["messages_malformed"] == 1
                && stats["messages_republished"] == 2
                && tables["messages_republished"] == 1
        });
        until(|| {
            let problem = fleet(&two)["configuration"]["problem"].as_str().unwrap_or_default().to_owned();
            problem.contains("was not written by a gate")
        });
        for engine in [&one, &two] {
            has(engine, 1, &[100, 200, 65535]);
            assert_eq!(entries(engine, "blocked"), 0);
        }
        // The next version replaces the value.
        assert!(apply(&two, &write(path, "edge.ipfw", OWN)).unwrap().contains("version 3 is applied"));
        has(&one, 3, &[1, 65535]);
    });
}
