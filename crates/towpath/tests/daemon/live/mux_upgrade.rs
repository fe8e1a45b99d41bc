//! Upgrades of a running engine with muxes: their connections continue, and no message is lost or answered twice.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use towpath_port::netns::within;

use super::machines::*;
use super::services;
use super::upgrade::{self, Load, Running, TIME};
use crate::openssl;
use crate::support::until;

const TOWPATH: &str = env!("CARGO_BIN_EXE_towpath");
/// Requests of a connection that are not answered yet, at most.
const AHEAD: u64 = 16;

/// A connection with numbered requests. Each one must be answered once, in order.
pub(super) struct Talk {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: JoinHandle<u64>,
}

trait Stream: Read + Write + Send + 'static {}
impl<S: Read + Write + Send + 'static> Stream for S {}

impl Talk {
    pub(super) fn tcp(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self::over(stream)
    }

    pub(super) fn unix(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self::over(stream)
    }

    fn over(mut stream: impl Stream) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, count) = (Arc::clone(&stop), Arc::clone(&answered));
        let thread = thread::spawn(move || {
            let (mut sent, mut got) = (0, 0);
            loop {
                let stopped = over.load(Ordering::Relaxed);
                if stopped && got == sent {
                    return got;
                }
                if !stopped && sent < got + AHEAD {
                    let text = format!("number {sent}");
                    let request = [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat();
                    stream.write_all(&request).unwrap();
                    sent += 1;
                    continue;
                }
                let mut length = [0; 4];
                stream.read_exact(&mut length).unwrap();
                let mut answer = vec![0; u32::from_be_bytes(length) as usize];
                stream.read_exact(&mut answer).unwrap();
                let answer = String::from_utf8(answer).unwrap();
                assert!(answer.ends_with(&format!(" number {got}")), "{answer}, not number {got}");
                got += 1;
                count.store(got, Ordering::Relaxed);
            }
        });
        Self { stop, answered, thread }
    }

    pub(super) fn goes_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        until(|| self.answered.load(Ordering::Relaxed) > before + 100 || self.thread.is_finished());
        assert!(!self.thread.is_finished(), "the connection has ended");
    }

    /// Returns the number of requests, each of which was answered.
    pub(super) fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// A bridge with two muxes: one on a thread that processes packets, one on its own, which also has a Unix socket.
fn write_config(directory: &Path, program: &str) {
    let muxes =
        [("web", 7001, "order = \"replies\""), ("api", 7002, "order = \"replies\"\nthread = \"own\"")];
    let unix = format!("listen = [\"127.0.0.1:7002\", \"unix:{}\"]", directory.join("api.sock").display());
    let config = services::config(1, &muxes)
        .replace("listen = \"127.0.0.1:7002\"", &unix)
        .replace("[engine]\n", &format!("[engine]\nupgrade = [\"{program}\"]\n{TIME}\n"));
    std::fs::write(directory.join("t.toml"), config).unwrap();
}

/// The sum of the values of `key` anywhere in an answer.
pub(super) fn sum(answer: &serde_json::Value, key: &str) -> u64 {
    let object = answer.as_object().into_iter().flatten();
    let own: u64 =
        object.map(|(name, value)| if name == key { value.as_u64().unwrap() } else { sum(value, key) }).sum();
    own + answer.as_array().into_iter().flatten().map(|value| sum(value, key)).sum::<u64>()
}

#[towpath_testenv::needs(netns)]
#[test]
fn connections_of_muxes_outlive_upgrades() {
    within(|| {
        let (left, right) = machines();
        let admitted = services::SERVED.replace("recv api", "recv api keep-state");
        let files = files("", &format!("{admitted}{RULES}"));
        let directory = files.path();
        write_config(directory, TOWPATH);
        let mut engine = Running::start(directory);
        let load = Load::start(&left, &right, &[11]);
        let talks = [Talk::tcp(7001), Talk::tcp(7002), Talk::unix(&directory.join("api.sock"))];
        talks.iter().for_each(Talk::goes_on);
        for _ in 0..upgrade::upgrades() {
            load.goes_on();
            engine.upgrade();
            talks.iter().for_each(Talk::goes_on);
            let new = [Talk::tcp(7001), Talk::tcp(7002), Talk::unix(&directory.join("api.sock"))];
            new.iter().for_each(Talk::goes_on);
            new.into_iter().for_each(|talk| assert!(talk.end() >= 100));
            let shown = engine.first.json("show mux --json");
            assert_eq!(sum(&shown, "taken_over"), 3, "{shown}");
        }
        // The rules admit the connections that were taken over, and hold for them.
        let state = engine.first.json("show states --json").to_string();
        assert!(state.contains("7002"), "{state}");
        talks.into_iter().for_each(|talk| assert!(talk.end() >= 100));
        // [`upgrade`] counts lost datagrams, without clients that take the processor.
        load.end();
        engine.stop();
        assert!(!directory.join("api.sock").exists());
    });
}

#[towpath_testenv::needs(netns)]
#[test]
fn muxes_continue_if_the_next_engine_is_killed() {
    within(|| {
        let (left, right) = machines();
        let files = files("", &format!("{}{RULES}", services::SERVED));
        let directory = files.path();
        let good = upgrade::script(directory, "good", &format!("exec {TOWPATH} \"$@\""));
        write_config(directory, &good);
        let engine = Running::start(directory);
        let load = Load::start(&left, &right, &[11]);
        let talks = [Talk::tcp(7001), Talk::tcp(7002), Talk::unix(&directory.join("api.sock"))];
        talks.iter().for_each(Talk::goes_on);
        // While it prepares: before it carries packets.
        thread::scope(|scope| {
            let said = scope.spawn(|| engine.first.ctl("upgrade"));
            kill_process(upgrade::started(directory), Signal::KILL).unwrap();
            assert!(!said.join().unwrap().status.success());
        });
        talks.iter().for_each(Talk::goes_on);
        load.goes_on();
        // The engine accepts connections as before, and is the one that serves them.
        let new = [Talk::tcp(7001), Talk::tcp(7002), Talk::unix(&directory.join("api.sock"))];
        new.iter().for_each(Talk::goes_on);
        new.into_iter().for_each(|talk| assert!(talk.end() >= 100));
        let shown = engine.first.json("show mux --json");
        assert_eq!((sum(&shown, "handed_over"), sum(&shown, "taken_over")), (0, 0), "{shown}");
        talks.into_iter().for_each(|talk| assert!(talk.end() >= 100));
        load.end();
        engine.stop();
        assert!(!directory.join("api.sock").exists());
    });
}

/// A message to a mux by the program `openssl`, and the process id of the worker that answers.
fn asked(client: &mut openssl::Client, body: &str) -> u32 {
    let request = [&(body.len() as u32).to_be_bytes()[..], body.as_bytes()].concat();
    client.stdin.as_mut().unwrap().write_all(&request).unwrap();
    let (mut length, output) = ([0; 4], client.stdout.as_mut().unwrap());
    output.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    output.read_exact(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (worker, echo) = answer.split_once(' ').unwrap();
    assert_eq!(echo, body);
    worker.parse().unwrap()
}

/// The messages to the service manager until one contains `last`.
fn heard(manager: &UnixDatagram, last: &str) -> Vec<String> {
    let mut messages: Vec<String> = Vec::new();
    while !messages.last().is_some_and(|message| message.contains(last)) {
        let mut bytes = [0; 512];
        let length = manager.recv(&mut bytes).unwrap();
        messages.push(String::from_utf8_lossy(&bytes[..length]).into_owned());
    }
    messages
}

/// What cannot be handed over stays with the engine before: it serves these connections until they end, or until `drain` has passed. The
/// service manager follows the engine that carries packets.
#[towpath_testenv::needs(netns, "openssl")]
#[test]
fn connections_with_tls_stay_until_they_end() {
    within(|| {
        let files = files("", &format!("{}{RULES}", services::SERVED));
        let directory = files.path();
        let (_left, _right) = machines();
        openssl::certificate(directory, "mux", "/CN=localhost", &[]);
        let tls = format!("tls-cert = \"{0}/mux.pem\"\ntls-key = \"{0}/mux.key\"", directory.display());
        let muxes = [("web", 7001, &*tls), ("api", 7002, "order = \"sticky\"\nthread = \"own\"")];
        // The time for connections that stay.
        let config = services::config(1, &muxes).replacen("drain = 600", "drain = 120", 1);
        let config = config.replacen("drain = 600", "drain = 1", 1).replace("workers = 2", "workers = 1");
        let config = config.replace("[engine]\n", &format!("[engine]\nupgrade = [\"{TOWPATH}\"]\n{TIME}\n"));
        std::fs::write(directory.join("t.toml"), config).unwrap();
        let manager = UnixDatagram::bind(directory.join("notify")).unwrap();
        manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut command = Command::new(TOWPATH);
        command.env("NOTIFY_SOCKET", directory.join("notify"));
        let first = Engine::try_start_by(directory, &mut command).unwrap_or_else(|said| panic!("{said}"));
        let mut engine = Running::of(first);
        heard(&manager, "READY=1");
        let client = || openssl::client("127.0.0.1:7001", directory, &[]);
        let mut sticky = TcpStream::connect("127.0.0.1:7002").unwrap();
        sticky.write_all(&[0, 0, 0, 1, b'x']).unwrap();
        sticky.read_exact(&mut [0; 4]).unwrap();
        let (mut clients, mut before) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let mut client = client();
            clients.push((asked(&mut client, "before"), client));
            before.push(engine.replace());
            let mut said = heard(&manager, "MAINPID=");
            assert!(
                said.last().unwrap().contains(&format!("MAINPID={}", engine.id().as_raw_nonzero())),
                "{said:?}"
            );
            said.extend(heard(&manager, "READY=1"));
            assert!(!said.iter().any(|said| said.contains("STOPPING")), "{said:?}");
            // The engines before serve their connections, and the new one serves others, also those to the control socket.
            for (worker, client) in &mut clients {
                assert_eq!(asked(client, "after"), *worker);
            }
            let shown = engine.first.json("show mux --json");
            assert_eq!(sum(&shown, "taken_over"), 0, "{shown}");
        }
        sticky.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!(std::io::copy(&mut sticky, &mut std::io::sink()).is_ok(), "it is closed after a second");
        for ((worker, mut client), before) in clients.into_iter().zip(before) {
            assert_eq!(asked(&mut client, "last"), worker);
            drop(client);
            upgrade::ended(&before);
        }
        assert_ne!(asked(&mut client(), "new"), 0);
        engine.stop();
        let said = heard(&manager, "STOPPING=1");
        assert_eq!(said.iter().filter(|said| said.contains("STOPPING")).count(), 1, "{said:?}");
    });
}
