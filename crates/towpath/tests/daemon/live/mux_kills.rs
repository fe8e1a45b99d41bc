//! Processes that end while the muxes of an upgrade hand over their connections: a connection is lost only with a process that had it.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::within;

use super::machines::*;
use super::mux_upgrade::sum;
use super::services;
use super::upgrade::{TIME, upgrades};
use super::upgrade_kills::{log, process, processes};
use crate::example::example;
use crate::support::{Log, until};

const TOWPATH: &str = env!("CARGO_BIN_EXE_towpath");
/// Time for which a new engine must have carried packets before it gets connections.
const TRIAL: Duration = Duration::from_secs(1);
const PORTS: [u16; 2] = [7001, 7002];
/// Messages that follow the one that a worker holds.
const BEHIND: usize = 3;

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn send(stream: &mut TcpStream, body: &str) {
    stream.write_all(&[&(body.len() as u32).to_be_bytes()[..], body.as_bytes()].concat()).unwrap();
}

/// Reads the answer to a message.
fn answered(stream: &mut TcpStream, body: &str) {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.ends_with(&format!(" {body}")), "{answer}, not {body}");
}

fn is_served(stream: &mut TcpStream) {
    send(stream, "hello");
    answered(stream, "hello");
}

/// The connection ends, without another byte.
fn is_lost(stream: &mut TcpStream) {
    match stream.read(&mut [0]).map_err(|error| error.kind()) {
        Ok(0) | Err(ErrorKind::ConnectionReset) => {}
        other => panic!("{other:?}"),
    }
}

/// A connection with messages, the first of which a worker has until `holder` is dropped. It does not move before.
struct Busy {
    stream: TcpStream,
    holder: TcpStream,
    held: String,
}

impl Busy {
    fn on(port: u16) -> Self {
        let gate = TcpListener::bind("127.0.0.1:0").unwrap();
        let held = format!("wait {}", gate.local_addr().unwrap());
        let mut stream = connect(port);
        send(&mut stream, &held);
        let holder = gate.accept().unwrap().0;
        (0..BEHIND).for_each(|number| send(&mut stream, &format!("behind {number}")));
        Self { stream, holder, held }
    }

    /// The worker answers, and the other messages are answered too.
    fn release(self) -> TcpStream {
        let Self { mut stream, holder, held } = self;
        drop(holder);
        answered(&mut stream, &held);
        (0..BEHIND).for_each(|number| answered(&mut stream, &format!("behind {number}")));
        stream
    }
}

/// An upgrade whose muxes hand over connections: the old engine still has `busy`, the new one has `moved`.
struct Upgrade {
    old: Engine,
    log: Log,
    new: Pid,
    busy: Vec<Busy>,
    moved: Vec<TcpStream>,
}

impl Upgrade {
    /// Begins an upgrade in this directory.
    fn begin(directory: &Path) -> Self {
        let mut old = Engine::start(directory);
        let log = log(&mut old);
        let mut moved: Vec<_> = PORTS.into_iter().flat_map(|port| [connect(port), connect(port)]).collect();
        moved.iter_mut().for_each(is_served);
        let busy = PORTS.into_iter().map(Busy::on).collect();
        let said = old.json("upgrade --json");
        let new = Pid::from_raw(said["process"].as_i64().unwrap() as i32).unwrap();
        let all = moved.len() as u64;
        until(|| sum(&old.json("show mux --json"), "taken_over") == all);
        assert!(old.child.try_wait().unwrap().is_none(), "the engine has ended: {}", log.text());
        Self { old, log, new, busy, moved }
    }
}

/// An engine with two muxes and no port: one on an engine thread, the other on its own, which also has a Unix socket.
fn files(drain: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let api = format!("[\"127.0.0.1:7002\", \"unix:{}\"]", directory.path().join("api.sock").display());
    let mux = |name: &str, listen: &str, thread: &str| {
        format!(
            "[mux.{name}]\nlisten = {listen}\norder = \"replies\"\nthread = {thread}\n{drain}\nworkers = 2\n\
             framing = \"offset=0 length=4 be adjust=4\"\nworker = \"{}\"\n",
            example("mux_worker")
        )
    };
    let text = format!(
        "rules = \"r\"\n[control]\nsocket = \"ctl.sock\"\n[engine]\nupgrade = \"{TOWPATH}\"\n{TIME}\n{}{}",
        mux("web", "\"127.0.0.1:7001\"", "0"),
        mux("api", &api, "\"own\"")
    );
    std::fs::write(directory.path().join("t.toml"), text).unwrap();
    std::fs::write(directory.path().join("r"), services::SERVED).unwrap();
    directory
}

/// One engine with its launcher and workers, and nothing else.
fn one_engine_serves() {
    let count = |words: &str| processes().iter().filter(|(_, line)| line.contains(words)).count();
    let expected = [("towpath run", 1), ("towpath launcher", 1), ("mux_worker", 4)];
    until(|| expected.iter().all(|(words, number)| count(words) == *number));
    PORTS.into_iter().for_each(|port| is_served(&mut connect(port)));
}

/// Stops the engine. Nothing is left.
fn stop_engine(directory: &Path) {
    kill_process(process(&format!("{TOWPATH} run")), Signal::TERM).unwrap();
    nothing_is_left(directory);
}

fn nothing_is_left(directory: &Path) {
    until(|| processes().is_empty());
    for file in ["ctl.sock", "ctl.sock.ring", "api.sock"] {
        assert!(!directory.join(file).exists(), "{file}");
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn a_new_engine_that_dies_while_connections_move_has_only_those_that_it_got() {
    within(|| {
        let files = files("drain = 600");
        let Upgrade { mut old, log, new, busy, mut moved } = Upgrade::begin(files.path());
        kill_process(new, Signal::KILL).unwrap();
        log.until("; this engine continues");
        moved.iter_mut().for_each(is_lost);
        one_engine_serves();
        let mut kept: Vec<_> = busy.into_iter().map(Busy::release).collect();
        kept.iter_mut().for_each(is_served);
        // The next one gets them.
        let said = old.ctl("upgrade --json");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        assert!(old.child.wait().unwrap().success(), "{}", log.text());
        kept.iter_mut().for_each(is_served);
        one_engine_serves();
        stop_engine(files.path());
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn an_old_engine_that_dies_while_connections_move_has_only_those_that_it_kept() {
    within(|| {
        let files = files("drain = 600");
        let directory = files.path();
        let Upgrade { mut old, log, busy, mut moved, .. } = Upgrade::begin(directory);
        old.signal(Signal::KILL);
        old.child.wait().unwrap();
        // The worker that waits for the test ends, too.
        one_engine_serves();
        for Busy { mut stream, .. } in busy {
            is_lost(&mut stream);
        }
        moved.iter_mut().for_each(is_served);
        // The new one has the files, and can be replaced.
        let said = old.ctl("upgrade --json");
        assert!(said.status.success(), "{}{}", String::from_utf8_lossy(&said.stderr), log.text());
        moved.iter_mut().for_each(is_served);
        one_engine_serves();
        stop_engine(directory);
    });
}

/// Workers die with the launcher, and no other ones can be started.
#[towpath_testenv::needs(netns)]
#[test]
fn both_engines_end_with_the_launcher_while_connections_move() {
    within(|| {
        let files = files("drain = 1");
        let Upgrade { mut old, log, busy, mut moved, .. } = Upgrade::begin(files.path());
        kill_process(process("towpath launcher"), Signal::KILL).unwrap();
        assert!(!old.child.wait().unwrap().success(), "{}", log.text());
        nothing_is_left(files.path());
        assert_eq!(log.whole().matches("the launcher failed").count(), 2, "{}", log.text());
        moved.iter_mut().for_each(is_lost);
        for Busy { mut stream, .. } in busy {
            is_lost(&mut stream);
        }
    });
}

/// SIGTERM to the old engine: both have connections, and both drain.
#[towpath_testenv::needs(netns)]
#[test]
fn both_engines_are_told_to_stop_while_connections_move() {
    within(|| {
        let files = files("drain = 600");
        let Upgrade { mut old, log, new, busy, mut moved } = Upgrade::begin(files.path());
        let held = Busy::on(7002);
        old.signal(Signal::TERM);
        moved.iter_mut().for_each(is_lost);
        // Either engine answers what it has read.
        for Busy { mut stream, holder, held } in busy.into_iter().chain([held]) {
            drop(holder);
            answered(&mut stream, &held);
        }
        assert!(old.child.wait().unwrap().success(), "{}", log.text());
        assert!(!processes().iter().any(|(pid, _)| *pid == new), "the old engine ends last");
        nothing_is_left(files.path());
        assert!(!log.whole().contains(" error: "), "{}", log.text());
    });
}

/// A client with numbered messages, a few of them on their way. It ends when it is told to, or with its connection.
struct Client {
    thread: JoinHandle<bool>,
}

impl Client {
    fn start(port: u16, stop: &Arc<AtomicBool>) -> Self {
        let (mut stream, stop) = (connect(port), Arc::clone(stop));
        let lost = |error: std::io::Error| {
            let ends = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
            assert!(ends.contains(&error.kind()), "{error}");
        };
        let mut client = move || -> Result<(), std::io::Error> {
            let (mut sent, mut got) = (0, 0);
            while got < sent || !stop.load(Ordering::Relaxed) {
                if sent < got + 4 && !stop.load(Ordering::Relaxed) {
                    let body = format!("number {sent}");
                    stream.write_all(&[&(body.len() as u32).to_be_bytes()[..], body.as_bytes()].concat())?;
                    sent += 1;
                    continue;
                }
                let mut length = [0; 4];
                stream.read_exact(&mut length)?;
                let mut answer = vec![0; u32::from_be_bytes(length) as usize];
                stream.read_exact(&mut answer)?;
                let answer = String::from_utf8(answer).unwrap();
                assert!(answer.ends_with(&format!(" number {got}")), "{answer}, not number {got}");
                got += 1;
            }
            Ok(())
        };
        Self { thread: std::thread::spawn(move || client().map_err(lost).is_ok()) }
    }

    /// Returns true if every message was answered, and false if the connection was lost.
    fn end(self) -> bool {
        self.thread.join().unwrap()
    }
}

/// A kill at any moment of the move. Without those that the dead process had, every connection goes on, and each message is answered once.
#[towpath_testenv::needs(netns)]
#[test]
fn connections_are_lost_only_with_the_process_that_had_them() {
    // `.ci/nightly upgrade` sets the number of rounds.
    for round in 0..2 * upgrades().div_ceil(3) {
        within(|| {
            let files = files("drain = 600");
            let mut old = Engine::start(files.path());
            let log = log(&mut old);
            let stop = Arc::new(AtomicBool::new(false));
            let clients: Vec<_> =
                (0..40).map(|number| Client::start(PORTS[number % PORTS.len()], &stop)).collect();
            let said = old.json("upgrade --json");
            let new = Pid::from_raw(said["process"].as_i64().unwrap() as i32).unwrap();
            // The move begins after a second, and takes some milliseconds.
            std::thread::sleep(TRIAL + Duration::from_millis(u64::from(round / 2 * 7 % 30)));
            let kills_old = round % 2 == 0;
            if kills_old {
                old.signal(Signal::KILL);
                // It may have handed over everything and ended.
                old.child.wait().unwrap();
            } else {
                kill_process(new, Signal::KILL).unwrap();
                let over = || log.text().contains("has replaced this one");
                until(|| log.text().contains("; this engine continues") || over());
                if over() {
                    // The new one was the only engine.
                    return;
                }
            }
            one_engine_serves();
            stop.store(true, Ordering::Relaxed);
            let kept = clients.into_iter().map(Client::end).filter(|kept| *kept).count() as u64;
            let shown = old.json("show mux --json");
            if kills_old {
                assert_eq!(kept, sum(&shown, "taken_over"), "{shown}\n{}", log.text());
            } else {
                assert!(kept >= 40 - sum(&shown, "handed_over"), "{kept}: {shown}\n{}", log.text());
            }
            stop_engine(files.path());
        });
    }
}
