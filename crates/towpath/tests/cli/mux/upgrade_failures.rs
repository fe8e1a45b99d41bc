//! Upgrades of `towpath mux` whose new process does not take over.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use towpath_port::netns::until;

use super::daemon::{Mux, answer, ask, example, kill, message, split, towpath};
use super::upgrade::{Chain, connect, numbered, parent, runs};
use crate::deserter::DESERTER;
use crate::executable::write_script;

#[towpath_testenv::needs("python3")]
#[test]
fn connections_that_were_not_handed_over_are_served_by_the_old_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut chain, link) = linked(directory.path(), &["--workers", "2"]);
    let mut streams = [chain.mux.connect(), chain.mux.connect()];
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let wait = format!("wait {}", gate.local_addr().expect("an address"));
    let [busy, idle] = &mut streams;
    busy.write_all(&message(wait.as_bytes())).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    ask(idle, b"hello");
    let program = directory.path().join("deserter.py");
    std::fs::write(&program, DESERTER).expect("a file");
    write_script(&link, &format!("exec python3 {} '+ready -go +serving -item'", program.display()));
    chain.request();
    let line = chain.mux.until("upgrade failed: ");
    assert!(line.contains("closed the channel") && line.contains("; this process continues"), "{line}");
    assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0, "it was lost with the new process");
    drop(holder);
    assert_eq!(split(&answer(busy).expect("an answer")).1, wait.as_bytes());
    // It stays open, and others are accepted.
    let first = chain.mux.id();
    assert_eq!(parent(split(&ask(busy, b"next")).0), Some(first));
    assert_eq!(parent(split(&ask(&mut chain.mux.connect(), b"new")).0), Some(first));
    std::fs::remove_file(&link).expect("it is there");
    symlink(env!("CARGO_BIN_EXE_towpath"), &link).expect("a link");
    assert!(chain.upgrade() >= 1);
    assert_eq!(parent(split(&ask(busy, b"after")).0), Some(chain.current.0));
    chain.finish();
}

/// The old process has the listeners, their files and the control socket until the new one has served for a while.
#[towpath_testenv::needs("python3")]
#[test]
fn a_new_process_that_dies_at_any_stage_leaves_the_old_one_as_it_was() {
    let directory = tempfile::tempdir().expect("a directory");
    let (unix, control) = (directory.path().join("mux.sock"), directory.path().join("control.sock"));
    let address = format!("unix:{}", unix.display());
    let more = [&*address, "--workers", "1", "--control", control.to_str().expect("UTF-8")];
    let (mut chain, link) = linked(directory.path(), &more);
    let mut stream = chain.mux.connect();
    let worker = split(&ask(&mut stream, b"hello")).0;
    let program = directory.path().join("deserter.py");
    std::fs::write(&program, DESERTER).expect("a file");
    let show = || {
        let args = ["ctl", "--socket", control.to_str().expect("UTF-8"), "show", "mux", "--json"];
        let output = towpath().args(args).output().expect("towpath starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")["mux"]["upgrade"].clone()
    };
    // The channel of a process closes before its status can be read.
    let ended = ["ended (exit status: 0)", "closed the channel"];
    let rows = [
        ("+ready", ended),
        ("+ready -go", ended),
        ("+ready -go +serving", ended),
        ("+ready -go +serving +ending", ["was told to end"; 2]),
        ("+ready -go +go", ["sent an invalid message"; 2]),
        // Before it may serve.
        ("+serving -go", ["sent an invalid message"; 2]),
        ("+ready -go -never", ["did not serve in time"; 2]),
    ];
    for (failed, (stages, why)) in (1..).zip(rows) {
        write_script(&link, &format!("exec python3 {} '{stages}'", program.display()));
        chain.request();
        let line = chain.mux.until("upgrade failed: ");
        assert!(why.iter().any(|why| line.contains(why)), "{stages}: {line}");
        assert!(line.contains("; this process continues"), "{stages}: {line}");
        assert_eq!(split(&ask(&mut stream, b"hello")).0, worker, "{stages}");
        for address in [&chain.mux.address, &address] {
            let mut stream = connect(address);
            let mut workers = BTreeSet::new();
            numbered(&mut *stream, &mut 7, 2, &mut workers);
            assert_eq!(workers, [worker].into(), "{stages}, {address}");
        }
        assert_eq!(show()["failed"], failed, "{stages}");
    }
    std::fs::remove_file(&link).expect("it is there");
    symlink(env!("CARGO_BIN_EXE_towpath"), &link).expect("a link");
    assert!(chain.upgrade() >= 1);
    numbered(&mut *connect(&address), &mut 7, 2, &mut BTreeSet::new());
    assert_ne!(split(&ask(&mut stream, b"hello")).0, worker);
    chain.finish();
    assert!(!unix.exists() && !control.exists(), "the last process removes the files");
}

/// The real program: it is killed after it has begun to accept connections.
#[test]
fn a_new_process_that_is_killed_while_it_serves_is_replaced_by_the_old_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let unix = format!("unix:{}", directory.path().join("mux.sock").display());
    let mut chain = Chain::start(&[&unix, "--workers", "2"]);
    let first = chain.mux.id();
    // A connection that cannot be moved: the upgrade does not end before.
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut busy = chain.mux.connect();
    let wait = format!("wait {}", gate.local_addr().expect("an address"));
    busy.write_all(&message(wait.as_bytes())).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    chain.request();
    let new = loop {
        let served = parent(split(&ask(&mut chain.mux.connect(), b"who")).0);
        if served != Some(first) {
            break served.expect("its mux");
        }
    };
    kill(new, Signal::KILL);
    let line = chain.mux.until("upgrade failed: ");
    assert!(line.contains("; this process continues"), "{line}");
    for address in [&chain.mux.address, &unix] {
        let mut workers = BTreeSet::new();
        numbered(&mut *connect(address), &mut 7, 2, &mut workers);
        assert!(workers.iter().all(|worker| parent(*worker) == Some(first)), "{address}");
    }
    drop(holder);
    assert_eq!(split(&answer(&mut busy).expect("an answer")).1, wait.as_bytes());
    assert!(chain.upgrade() >= 1);
    assert_eq!(parent(split(&ask(&mut busy, b"next")).0), Some(chain.current.0));
    chain.finish();
}

/// A mux that is started through a link, which can be replaced.
fn linked(directory: &Path, more: &[&str]) -> (Chain, PathBuf) {
    let link = directory.join("towpath");
    symlink(env!("CARGO_BIN_EXE_towpath"), &link).expect("a link");
    let chain = Mux::begin(Command::new(&link), "127.0.0.1:0", &example("mux_worker"), more);
    (Chain::of(chain), link)
}

#[test]
fn after_a_failed_upgrade_the_old_process_continues() {
    let directory = tempfile::tempdir().expect("a directory");
    let (mut chain, link) = linked(directory.path(), &["--workers", "1", "--upgrade-time", "600"]);
    let mut stream = chain.mux.connect();
    let worker = split(&ask(&mut stream, b"hello")).0;
    let real = env!("CARGO_BIN_EXE_towpath");
    let rows = [
        ("exit 3".to_owned(), "ended (exit status: 3)"),
        // Its parent is not the old process.
        ("echo nonsense >&0".to_owned(), "upgrade failed: "),
        // The old process sees both messages at once, as after a long stop.
        (
            "kill -STOP $PPID; echo 'J{\"type\":\"ready\"}' >&0; \
             echo 'J{\"type\":\"refused\",\"reason\":\"too late\"}' >&0; kill -CONT $PPID"
                .to_owned(),
            "refuses: too late",
        ),
        (
            format!("exec {real} mux 127.0.0.1:0 --framing line --worker /nowhere/worker"),
            "refuses: worker 0: cannot start `/nowhere/worker`",
        ),
    ];
    for (lines, why) in rows {
        write_script(&link, &lines);
        chain.request();
        let line = chain.mux.until("upgrade failed: ");
        assert!(line.contains(why) && line.contains("; this process continues"), "{line}");
        assert_eq!(split(&ask(&mut stream, b"hello")).0, worker, "{lines}");
        assert_eq!(split(&ask(&mut chain.mux.connect(), b"hello")).0, worker, "{lines}");
    }
    std::fs::remove_file(&link).expect("it is there");
    chain.request();
    assert!(chain.mux.until("upgrade failed: ").contains("No such file"));
    symlink(real, &link).expect("a link");
    assert!(chain.upgrade() >= 1);
    assert_ne!(split(&ask(&mut stream, b"hello")).0, worker);
    chain.finish();
}

/// Requests upgrades that are late, until their process has written its id. A second may be too short for it on a busy machine.
fn late(chain: &mut Chain, pid_file: &Path) -> u32 {
    for _ in 0..60 {
        chain.request();
        let line = chain.mux.until("upgrade failed: ");
        assert!(
            line.contains("was not ready in time") && line.contains("; this process continues"),
            "{line}"
        );
        let id = std::fs::read_to_string(pid_file).unwrap_or_default();
        if let Ok(id) = id.trim().parse() {
            return id;
        }
    }
    panic!("the process of an upgrade has not written its id in 60 upgrades");
}

#[test]
fn a_new_process_that_hangs_is_ended() {
    let directory = tempfile::tempdir().expect("a directory");
    let pid_file = directory.path().join("pid");
    let (mut chain, link) = linked(directory.path(), &["--workers", "1", "--upgrade-time", "1"]);
    let mut stream = chain.mux.connect();
    let worker = split(&ask(&mut stream, b"hello")).0;
    write_script(&link, &format!("echo $$ > {}; exec sleep 1000", pid_file.display()));
    let hung = late(&mut chain, &pid_file);
    assert_eq!(split(&ask(&mut stream, b"hello")).0, worker);
    until(|| !runs(hung));
    chain.finish();
}

#[test]
fn an_upgrade_ends_with_the_mux() {
    let directory = tempfile::tempdir().expect("a directory");
    let pid_file = directory.path().join("pid");
    let (mut chain, link) = linked(directory.path(), &["--workers", "1"]);
    write_script(&link, &format!("echo $$ > {}; exec sleep 1000", pid_file.display()));
    chain.request();
    until(|| std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n')));
    chain.request();
    chain.mux.until("SIGUSR2 ignored: an upgrade is in progress");
    let hung = std::fs::read_to_string(&pid_file).expect("it runs").trim().parse().expect("a process");
    chain.mux.signal(Signal::TERM);
    chain.mux.until("upgrade failed: the mux was told to end");
    let log = chain.mux.ended();
    assert_eq!(log.0, Some(0), "{}", log.1);
    until(|| !runs(hung));
}

/// A worker that does not attach would be left behind, with the directory of its socket, if its mux were killed.
#[test]
fn a_new_process_whose_workers_hang_leaves_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let (hang, pid_file) = (directory.path().join("hang"), directory.path().join("pid"));
    let (worker, sockets) = (directory.path().join("worker"), directory.path().join("sockets"));
    std::fs::create_dir(&sockets).expect("a directory");
    let lines = format!(
        "[ -e {} ] || exec {}\necho $$ > {}; exec sleep 1000",
        hang.display(),
        example("mux_worker"),
        pid_file.display()
    );
    write_script(&worker, &lines);
    let mut command = towpath();
    command.env("TMPDIR", &sockets);
    let more = ["--workers", "1", "--upgrade-time", "1"];
    let mut chain = Chain::of(Mux::begin(command, "127.0.0.1:0", worker.to_str().expect("UTF-8"), &more));
    let entries = || std::fs::read_dir(&sockets).expect("a directory").count();
    let before = entries();
    std::fs::write(&hang, "").expect("a file");
    let hung = late(&mut chain, &pid_file);
    until(|| !runs(hung) && entries() == before);
    std::fs::remove_file(&hang).expect("it is there");
    chain.upgrade_at_last();
    chain.finish();
}
