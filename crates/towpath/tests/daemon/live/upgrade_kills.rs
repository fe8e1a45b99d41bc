//! Processes that die during an upgrade of a running engine: afterwards one engine carries packets, or none is left of any.

use std::path::Path;
use std::thread;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath_port::netns::within;

use super::machines::*;
use super::mux_upgrade::Talk;
use super::services;
use super::upgrade::{config, inspector, script, started};
use crate::deserter::DESERTER;
use crate::support::{Log, until};

const TOWPATH: &str = env!("CARGO_BIN_EXE_towpath");

const RULES: &str = "\
add 100 allow layer2 mac-type arp
add 200 check-state
add 300 allow tcp from any to any setup recv wan keep-state
";

/// The log of all engines, whose reports are read.
pub(super) fn log(engine: &mut Engine) -> Log {
    let mut reports = engine.child.stdout.take().unwrap();
    thread::spawn(move || std::io::copy(&mut reports, &mut std::io::sink()));
    engine.log.clone()
}

/// The other processes of this network namespace, and their command lines.
pub(super) fn processes() -> Vec<(Pid, String)> {
    let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    let in_namespace = |entry: std::fs::DirEntry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        let is_here = std::fs::read_link(entry.path().join("ns/net")).is_ok_and(|net| net == own);
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        (is_here && pid != rustix::process::getpid()).then_some((pid, line))
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter_map(in_namespace).collect()
}

/// The process of this namespace whose command begins with these words.
pub(super) fn process(words: &str) -> Pid {
    let mut found = processes().into_iter().filter(|(_, line)| line.starts_with(words));
    let (pid, _) = found.next().unwrap_or_else(|| panic!("{words}: {:?}", processes()));
    pid
}

/// The process ids of the inspectors of both queues.
fn inspectors(engine: &Engine) -> Vec<i64> {
    let rings = engine.json("show rings --json");
    let open = rings["rings"].as_array().unwrap().iter().filter(|ring| ring["gone"].is_null());
    // Workers of the mux have no queue.
    let inspectors = open.filter(|ring| [1, 2].map(Value::from).contains(&ring["queue"]));
    let mut pids: Vec<_> = inspectors.map(|ring| ring["pid"].as_i64().unwrap()).collect();
    pids.sort_unstable();
    pids
}

/// A configuration with an inspector of the engine, one of the test, and a mux.
fn write_config(directory: &Path, program: &str) {
    let mux = services::config(1, &[("web", 7001, "order = \"replies\"")]);
    let mux = mux.split("[mux.web]").nth(1).unwrap();
    std::fs::write(directory.join("t.toml"), format!("{}[mux.web]{mux}", config(program))).unwrap();
}

/// The new engine dies at each stage at which it can, until the old one has given up its files.
#[towpath_testenv::needs(netns, "python3")]
#[test]
fn a_new_engine_that_dies_at_any_stage_leaves_the_old_one_as_it_was() {
    within(|| {
        let (left, right) = machines();
        let files = files("", &format!("{}{RULES}", services::SERVED));
        let directory = files.path();
        let program = directory.join("next");
        write_config(directory, program.to_str().unwrap());
        std::fs::write(directory.join("deserter.py"), DESERTER).unwrap();
        let mut engine = Engine::start(directory);
        let log = log(&mut engine);
        let mut own = inspector(directory);
        until(|| inspectors(&engine).len() == 3);
        let before = inspectors(&engine);
        let echo = Echo::start(&left, &right, 9100);
        let talk = Talk::tcp(7001);
        let ended = &["ended (exit status: 0)", "closed the channel", "handing over: "][..];
        let rows = [
            ("-launcher", ended),
            ("-launcher +ready", ended),
            ("-launcher +ready -go", ended),
            ("-launcher +ready -go +serving", ended),
            (
                "-launcher +ready -go +serving +serving",
                &["sent an invalid message", "ended (exit status: 0)"],
            ),
            // Before it has everything.
            ("-launcher +serving -go", &["sent an invalid message"]),
        ];
        for (failed, (stages, why)) in (1..).zip(rows) {
            let python = format!("exec python3 {}/deserter.py '{stages}'", directory.display());
            script(directory, "next", &python);
            engine.signal(Signal::USR2);
            log.until("; this engine continues");
            let said = log.take();
            assert!(why.iter().any(|why| said.contains(why)), "{stages}: {said}");
            echo.goes_on();
            talk.goes_on();
            let new = Talk::tcp(7001);
            new.goes_on();
            assert!(new.end() >= 100, "{stages}");
            until(|| inspectors(&engine) == before);
            let metrics = String::from_utf8(engine.ctl("metrics").stdout).unwrap();
            assert!(metrics.contains(&format!("towpath_upgrade_failed_total{{}} {failed}\n")), "{metrics}");
        }
        // The next one is as good as the first would have been.
        script(directory, "next", &format!("exec {TOWPATH} \"$@\""));
        let said = engine.ctl("upgrade --json");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        assert!(engine.child.wait().unwrap().success(), "{}", log.text());
        echo.goes_on();
        talk.goes_on();
        echo.end();
        assert!(talk.end() >= 100);
        kill_process(process(&format!("{TOWPATH} run")), Signal::TERM).unwrap();
        own.wait().unwrap();
        until(|| processes().is_empty());
    });
}

/// The old engine is killed when it has handed over everything, and the new one does not carry packets yet: it waits for an inspector.
#[towpath_testenv::needs(netns)]
#[test]
fn a_new_engine_that_has_everything_goes_on_without_the_old_one() {
    within(|| {
        let (left, right) = machines();
        let files = files("", &format!("{}{RULES}", services::SERVED));
        let directory = files.path();
        write_config(directory, TOWPATH);
        let mut engine = Engine::start(directory);
        let log = log(&mut engine);
        let mut own = inspector(directory);
        until(|| inspectors(&engine).len() == 3);
        let before = inspectors(&engine);
        let echo = Echo::start(&left, &right, 9100);
        echo.goes_on();
        let stopped = Pid::from_child(&own);
        kill_process(stopped, Signal::STOP).unwrap();
        engine.signal(Signal::USR2);
        log.until(" handed over in ");
        engine.signal(Signal::KILL);
        engine.child.wait().unwrap();
        kill_process(stopped, Signal::CONT).unwrap();
        log.until("upgrade: took over from process");
        echo.goes_on();
        until(|| inspectors(&engine) == before);
        let talk = Talk::tcp(7001);
        talk.goes_on();
        assert!(talk.end() >= 100);
        echo.end();
        // One engine, its launcher, its inspectors and its workers.
        let count = |words: &str| processes().iter().filter(|(_, line)| line.contains(words)).count();
        let counts = ["towpath run", "towpath launcher", "towpath inspect", "mux_worker"];
        until(|| counts.map(count) == [1, 1, 3, 2]);
        kill_process(process(&format!("{TOWPATH} run")), Signal::TERM).unwrap();
        own.wait().unwrap();
        until(|| processes().is_empty());
        assert!(!directory.join("ctl.sock").exists() && !directory.join("q1.sock").exists());
    });
}

/// Without its launcher, an engine ends in an orderly way, and so does an upgrade. Nothing is left.
#[towpath_testenv::needs(netns)]
#[test]
fn an_upgrade_ends_with_the_launcher() {
    for stage in ["none", "prepares", "carries packets"] {
        within(|| {
            let _machines = machines();
            let files = files("", &format!("{}{RULES}", services::SERVED));
            let directory = files.path();
            let real = format!("exec {TOWPATH} \"$@\"");
            let program = if stage == "prepares" { "exec sleep 1000" } else { &real };
            write_config(directory, &script(directory, "next", program));
            let mut engine = Engine::start(directory);
            let log = log(&mut engine);
            match stage {
                "prepares" => {
                    engine.signal(Signal::USR2);
                    started(directory);
                }
                "carries packets" => assert!(engine.ctl("upgrade").status.success()),
                _ => {}
            }
            kill_process(process("towpath launcher"), Signal::KILL).unwrap();
            let status = engine.child.wait().unwrap();
            // On a busy machine, the new engine may have replaced it before.
            assert!(!status.success() || stage == "carries packets", "{stage}: {}", log.text());
            until(|| processes().is_empty());
            log.until("the launcher failed");
            assert!(!directory.join("ctl.sock").exists(), "{stage}: {}", log.text());
        });
    }
}
