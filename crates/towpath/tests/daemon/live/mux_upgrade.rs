//! Upgrades of a running engine with muxes: their connections continue, and no message is lost or answered twice.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use towpath_port::netns::{until, within};

use super::machines::*;
use super::services;
use super::upgrade::{self, Load, Running};

const TOWPATH: &str = env!("CARGO_BIN_EXE_towpath");
/// Requests of a connection that are not answered yet, at most.
const AHEAD: u64 = 16;

/// A connection with numbered requests. Each one must be answered once, in order.
struct Talk {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    thread: JoinHandle<u64>,
}

trait Stream: Read + Write + Send + 'static {}
impl<S: Read + Write + Send + 'static> Stream for S {}

impl Talk {
    fn tcp(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self::over(stream)
    }

    fn unix(path: &Path) -> Self {
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

    fn goes_on(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        until(|| self.answered.load(Ordering::Relaxed) > before + 100 || self.thread.is_finished());
        assert!(!self.thread.is_finished(), "the connection has ended");
    }

    /// Returns the number of requests, each of which was answered.
    fn end(self) -> u64 {
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
        .replace("[engine]\n", &format!("[engine]\nupgrade = [\"{program}\"]\nupgrade-time = 60\n"));
    std::fs::write(directory.join("t.toml"), config).unwrap();
}

/// The sum of the values of `key` anywhere in an answer.
fn sum(answer: &serde_json::Value, key: &str) -> u64 {
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
