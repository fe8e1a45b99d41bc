//! Muxes on threads that process packets: packets and messages both progress.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use towpath_port::netns::within;

use super::machines::*;
use crate::example::example;

/// Number of connections that send requests without a pause.
const CLIENTS: usize = 4;
/// Number of requests that each sends before it reads the first answer.
const AHEAD: usize = 32;

/// Clients of a mux that always have requests, until `stop` is set.
struct Clients {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Clients {
    fn start(port: u16) -> Self {
        let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let client = |_| {
            let (stop, answers) = (Arc::clone(&stop), Arc::clone(&answers));
            move || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let request = [&100_u32.to_be_bytes()[..], &[b'a'; 100]].concat();
                stream.write_all(&request.repeat(AHEAD)).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let mut length = [0; 4];
                    let mut answer = Vec::new();
                    let read = stream.read_exact(&mut length).and_then(|()| {
                        answer.resize(u32::from_be_bytes(length) as usize, 0);
                        stream.read_exact(&mut answer)
                    });
                    match read.map_err(|error| error.kind()) {
                        Ok(()) => {}
                        // The engine has ended. Requests that it had not read are not answered.
                        Err(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => return,
                        Err(other) => panic!("{other}"),
                    }
                    assert!(answer.ends_with(&request[4..]), "another answer");
                    answers.fetch_add(1, Ordering::Relaxed);
                    if stream.write_all(&request).is_err() {
                        return;
                    }
                }
            }
        };
        // The connections are local: the engine's namespace is that of the thread that made them.
        let threads = (0..CLIENTS).map(client).map(std::thread::spawn).collect();
        Self { stop, answers, threads }
    }

    fn goes_on(&self) {
        let before = self.answers.load(Ordering::Relaxed);
        let begun = Instant::now();
        while self.answers.load(Ordering::Relaxed) < before + 100 {
            assert!(begun.elapsed() < Duration::from_secs(120), "nothing is answered any more");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.answers.load(Ordering::Relaxed)
    }
}

/// The configuration of a bridge with muxes, each with an additional key.
pub(super) fn config(threads: usize, muxes: &[(&str, u16, &str)]) -> String {
    let worker = example("mux_worker");
    let mut text = format!("{BRIDGE}[engine]\nthreads = {threads}\nwait = \"park\"\n");
    for (name, port, more) in muxes {
        text += &format!(
            "[mux.{name}]\nlisten = \"127.0.0.1:{port}\"\ndrain = 600\nframing = \"offset=0 length=4 be adjust=4\"\n\
             worker = \"{}\"\nworkers = 2\n{more}\n",
            worker
        );
    }
    text
}

/// Rules that admit connections to the muxes, and the packets of the bridge.
pub(super) const SERVED: &str =
    "add 50 allow tcp from any to any setup recv web\nadd 60 allow tcp from any to any setup recv api\n";

/// The threads of a process, by name.
fn threads(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let name =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.map(|task| name(task.unwrap()).trim().to_owned()).collect()
}

#[towpath_testenv::needs(netns)]
#[test]
fn packets_and_messages_share_threads() {
    #[rustfmt::skip]
    let rows = [
        // threads, keys of the two muxes, which have a separate thread
        (1, ["", ""],                              &[][..]),
        (2, ["", ""],                              &[]),
        (2, ["thread = 1", "thread = 1"],          &[]),
        (1, ["thread = \"own\"", "thread = 0"],    &["mux-web"]),
    ];
    for (count, [web, api], own) in rows {
        within(|| {
            let (left, right) = machines();
            let files =
                files(&config(count, &[("web", 7001, web), ("api", 7002, api)]), &format!("{SERVED}{RULES}"));
            let engine = Engine::start(files.path());
            let echo = Echo::start(&left, &right, 9001);
            let clients = [Clients::start(7001), Clients::start(7002)];
            // Both progress under full load.
            for _ in 0..3 {
                echo.goes_on();
                clients.iter().for_each(Clients::goes_on);
            }
            echo.end();
            arrived(transfer(&left, &right, 9002));
            clients.iter().for_each(Clients::goes_on);
            let mut has: Vec<String> = threads(engine.child.id());
            has.retain(|name| name.starts_with("mux-"));
            assert_eq!(has, own);
            // A query gets an answer of each mux, whether its thread sleeps or not.
            let mux = engine.json("show mux --json");
            assert_eq!(
                (&mux["mux"]["name"], &mux["mux"]["others"][0]["name"]),
                (&"api".into(), &"web".into()),
                "{mux}"
            );
            assert_eq!(engine.json("show stats --json")["stats"]["dropped"], 0);
            // A stop under load: every received message is answered or counted.
            let said = engine.stop();
            assert!(said.contains("mux web: ") && said.contains("mux api: "), "{said}");
            for line in said.lines().filter(|line| line.contains(" messages: ")) {
                assert!(line.contains(" done, 0 given up, 0 discarded, 0 not begun; 0 workers"), "{line}");
            }
            assert!(clients.into_iter().map(Clients::end).sum::<u64>() > 0);
        });
    }
}

/// A mux whose workers are killed repeatedly, on the thread of a bridge that continues to forward.
#[towpath_testenv::needs(netns)]
#[test]
fn workers_that_die_do_not_hold_packets_up() {
    within(|| {
        let (left, right) = machines();
        let files = files(&config(1, &[("web", 7001, "redeliver = 255")]), &format!("{SERVED}{RULES}"));
        let engine = Engine::start(files.path());
        let (echo, clients) = (Echo::start(&left, &right, 9001), Clients::start(7001));
        for _ in 0..5 {
            clients.goes_on();
            let mux = engine.json("show mux --json");
            let pid = mux["mux"]["workers"][0]["pid"].as_u64().unwrap();
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            // The worker may have been killed already, and the next one may not be listed yet.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            echo.goes_on();
            clients.goes_on();
        }
        assert_eq!(engine.json("show stats --json")["stats"]["dropped"], 0);
        echo.end();
        clients.end();
        engine.stop();
    });
}
