//! The start of `towpath run` with live ports: failures, a stop before the programs have attached, a PID namespace.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::{veth, within};
use towpath_ring::Consumer;

use crate::bridged::BRIDGE;
use crate::support::{Control, Log, until};

/// Time limit for an end without a wait: much longer than necessary.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts an engine with `more` in its configuration.
fn start(directory: &Path, more: &str) -> (Child, Log) {
    let mut child = command(directory, more, &[]).spawn().unwrap();
    let log = Log::of(&mut child);
    (child, log)
}

/// Starts an engine by a command line that begins with `before`.
fn command(directory: &Path, more: &str, before: &[&str]) -> Command {
    std::fs::write(directory.join("t.toml"), format!("{BRIDGE}{more}")).unwrap();
    std::fs::write(directory.join("r.ipfw"), "add allow ip from any to any\n").unwrap();
    let config = directory.join("t.toml");
    let words = [before, &[env!("CARGO_BIN_EXE_towpath"), "run", config.to_str().unwrap()]].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Returns the exit code and the output. Kills the process if it does not end.
fn ended((mut child, log): (Child, Log)) -> (Option<i32>, String) {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
        }
        // Yield the processor to the processes that end.
        std::thread::sleep(Duration::from_millis(2));
    }
    (child.wait().unwrap().code(), log.whole())
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_failed_start_ends_with_an_error() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let mux = "[mux.web]\nlisten = \"127.0.0.1:0\"\nframing = \"line\"\nworkers = 1\nworker = ";
        let rows = [
            (
                "[queue.1]\ncommand = ".to_owned(),
                "/no/such/program",
                "queue 1: cannot start `/no/such/program`",
            ),
            ("[queue.1]\ncommand = ".to_owned(), "false", "queue 1: `false` ended"),
            (mux.to_owned(), "/no/such/program", "mux web: "),
            (mux.to_owned(), "false", "mux web: "),
            // A queue whose processes have attached, and a mux whose processes have not.
            (
                format!("[queue.1]\ncommand = \"towpath inspect --queue 1 --match x --verdict drop\"\n{mux}"),
                "false",
                "mux web: ",
            ),
        ];
        for (more, command, words) in rows {
            let directory = tempfile::tempdir().unwrap();
            let more = format!("{more}\"{command}\"\n");
            let (code, said) = ended(start(directory.path(), &more));
            assert_eq!(code, Some(4), "{more}{said}");
            assert!(said.lines().last().unwrap().contains(words), "{more}{said}");
            assert!(!directory.path().join("ctl.sock").exists(), "{more}");
        }
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn sigterm_ends_an_engine_whose_programs_have_not_attached() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let mux = "[mux.web]\nlisten = \"127.0.0.1:0\"\nframing = \"line\"\nworkers = 1\nworker = ";
        for more in ["[queue.1]\ncommand = ", mux] {
            let directory = tempfile::tempdir().unwrap();
            // The program has a separate user.
            std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
            // It never attaches, but reports that it runs.
            let command = format!("sh -c 'touch {}/there; exec sleep 1000'", directory.path().display());
            let engine = start(directory.path(), &format!("{more}\"{command}\"\n"));
            until(|| directory.path().join("there").exists());
            kill_process(Pid::from_child(&engine.0), Signal::TERM).unwrap();
            let (code, said) = ended(engine);
            assert_eq!(code, Some(0), "{more}{said}");
            assert!(!directory.path().join("ctl.sock").exists(), "{more}");
        }
    });
}

/// A client outside the engine's PID namespace, where its process has no number.
#[towpath_testenv::needs(netns)]
#[test]
fn an_engine_in_a_pid_namespace_is_asked_from_outside() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let directory = tempfile::tempdir().unwrap();
        let queue = "[queue.1]\nsocket = \"q1.sock\"\n";
        let mut engine = command(directory.path(), queue, &["unshare", "--pid", "--fork", "--kill-child"]);
        let mut engine = engine.spawn().unwrap();
        let _log = Log::of(&mut engine);
        let control = Control::of(directory.path());
        until(|| {
            directory.path().join("ctl.sock.ring").exists() && control.ctl("show stats").status.success()
        });
        let stats = control.json("show stats --json");
        assert_eq!(stats["stats"]["packets"], 0, "{stats}");
        assert!(control.ctl("dump states").status.success());
        // The ring of a dump client is listed while it is attached.
        let client = Consumer::attach_as(directory.path().join("ctl.sock.ring"), "dump-client").unwrap();
        let listed = |ring: &&serde_json::Value| ring["dump"] == true && ring["name"] == "dump-client";
        let dumps =
            || control.json("show rings --json")["rings"].as_array().unwrap().iter().filter(listed).count();
        until(|| dumps() == 1);
        drop(client);
        until(|| dumps() == 0);
        let mut inspector = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["inspect", "--queue", "1", "--match", "x", "--verdict", "drop"])
            .env("TOWPATH_SOCKET", directory.path().join("q1.sock"))
            .spawn()
            .unwrap();
        until(|| control.json("show queues --json")["queues"][0]["inspectors"] == 1);
        inspector.kill().unwrap();
        inspector.wait().unwrap();
        engine.kill().unwrap();
        engine.wait().unwrap();
    });
}
