//! The message server: `towpath mux` with two worker processes, one of which is killed while it processes a message.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::Value;

use super::digits::thousands;
use super::network::{Ends, MESSAGES};
use super::process::{Process, command, ctl};
use super::status::Status;
use super::{Failure, Stop, doing};

/// Connections of the clients.
const CONNECTIONS: u64 = 8;
/// Messages in flight on each connection. In all, more than the workers process at once, so that each worker always has one.
const IN_FLIGHT: usize = 4;
/// A message without an answer after this time is lost.
const PATIENCE: Duration = Duration::from_secs(20);
/// Attempts to kill a worker while it has a message.
const KILLS: usize = 5;

/// Results of the message server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Service {
    pub(crate) asked: u64,
    pub(crate) answered: u64,
    /// Duplicate answers, and answers to unknown messages.
    pub(crate) strange: u64,
    /// Messages without an answer.
    pub(crate) lost: u64,
    /// Workers killed.
    pub(crate) killed: u64,
    /// Workers restarted.
    pub(crate) restarted: u64,
    /// Messages redelivered from a killed worker.
    pub(crate) redelivered: u64,
    /// Messages answered by each process, in descending order.
    pub(crate) by_worker: Vec<u64>,
    /// Whether the server drained on SIGTERM.
    pub(crate) drained: bool,
    /// The first error.
    pub(crate) trouble: Option<String>,
}

/// Runs clients for `length`, kills a worker halfway, and stops the server.
pub(super) fn ask(
    ends: Ends<'_>,
    stop: &Stop,
    status: &Status,
    length: Duration,
) -> Result<Service, Failure> {
    let socket = ends.files.join("mux.sock");
    let address = ends.address(MESSAGES);
    let worker = command(&["demo-part", "worker"])?;
    let words = [
        "mux",
        &address,
        "--framing",
        "line",
        "--workers",
        "2",
        "--worker",
        &worker,
        "--control",
        "mux.sock",
    ];
    let mut front = Process::start(ends.inside, ends.files, "mux", &words)?;
    front.wait_until(stop, |front| front.said().contains(" attached"))?;
    let address = front.listening()?;
    status.mux(Some(&socket));
    let over = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicU64::new(0));
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let (over, asked) = (Arc::clone(&over), Arc::clone(&asked));
            ends.outside.start(move || client(address, &over, &asked))
        })
        .collect();
    let killed = kill(stop, status, &socket, length);
    over.store(true, Relaxed);
    let mut service = Service { killed: killed?, asked: 0, ..Service::default() };
    let mut by_worker = HashMap::new();
    for client in clients {
        let done = client.join().map_err(|_| Failure::Broken("a client of the mux panicked".into()))?;
        service.add(done, &mut by_worker);
    }
    service.asked = asked.load(Relaxed);
    service.by_worker = by_worker.into_values().collect();
    service.by_worker.sort_by_key(|count| std::cmp::Reverse(*count));
    stop.until(PATIENCE, || {
        if let Some(shown) = ctl(&socket, "show mux") {
            service.redelivered = redelivered(&shown);
            service.restarted = shown["mux"]["restarts"].as_u64().unwrap_or(0);
        }
        Ok(service.restarted >= service.killed)
    })?;
    status.mux(None);
    service.drained = front.stop()?.success();
    Ok(service)
}

impl Service {
    /// Returns true if every expectation was met.
    pub(super) fn well(&self) -> bool {
        let once = self.answered == self.asked && self.asked > 0 && self.lost == 0 && self.strange == 0;
        once && self.redelivered > 0 && self.restarted >= self.killed && self.drained
    }

    fn add(&mut self, done: Done, by_worker: &mut HashMap<u32, u64>) {
        self.answered += done.answered;
        self.strange += done.strange;
        self.lost += done.lost;
        for (pid, count) in done.by_worker {
            *by_worker.entry(pid).or_default() += count;
        }
        if let Err(error) = done.end {
            self.trouble.get_or_insert(error.to_string());
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} answered, {} redelivered, {} lost",
            thousands(self.answered),
            thousands(self.asked),
            self.redelivered,
            self.lost
        )?;
        self.trouble.iter().try_for_each(|trouble| write!(f, " ({trouble})"))
    }
}

fn redelivered(shown: &Value) -> u64 {
    shown["mux"]["stats"]["redelivered"].as_u64().unwrap_or(0)
}

/// Lets the workers run, kills one that has a message, and lets them run on. Returns the number of killed workers.
fn kill(stop: &Stop, status: &Status, socket: &Path, length: Duration) -> Result<u64, Failure> {
    stop.pause(length / 2)?;
    let mut killed = Vec::new();
    while killed.len() < KILLS {
        let mut found = None;
        stop.until(PATIENCE, || {
            let shown = ctl(socket, "show mux").unwrap_or_default();
            let workers = shown["mux"]["workers"].as_array().cloned().unwrap_or_default();
            let pid = |worker: &Value| worker["pid"].as_i64().and_then(|pid| Pid::from_raw(pid as i32));
            // A killed worker may still be listed.
            let others =
                workers.iter().filter(|worker| pid(worker).is_some_and(|pid| !killed.contains(&pid)));
            found = others.max_by_key(|worker| worker["recv_q"].as_u64()).and_then(pid);
            Ok(found.is_some())
        })?;
        let Some(pid) = found else { break };
        kill_process(pid, Signal::KILL).map_err(|error| doing("killing a worker")(error.into()))?;
        killed.push(pid);
        status.say(format!("worker {} killed, it had a message", pid.as_raw_nonzero()));
        let given = stop.until(Duration::from_millis(500), || {
            Ok(ctl(socket, "show mux").is_some_and(|shown| redelivered(&shown) > 0))
        })?;
        if given {
            status.say("redelivered to the other worker".into());
            break;
        }
    }
    stop.pause(length / 2)?;
    Ok(killed.len() as u64)
}

/// Results of one connection.
struct Done {
    answered: u64,
    strange: u64,
    lost: u64,
    by_worker: HashMap<u32, u64>,
    end: std::io::Result<()>,
}

fn client(address: SocketAddr, over: &AtomicBool, asked: &AtomicU64) -> Done {
    let mut done = Done { answered: 0, strange: 0, lost: 0, by_worker: HashMap::new(), end: Ok(()) };
    let mut waiting = Vec::new();
    done.end = converse(address, over, asked, &mut waiting, &mut done);
    done.lost = waiting.len() as u64;
    done
}

fn converse(
    address: SocketAddr,
    over: &AtomicBool,
    asked: &AtomicU64,
    waiting: &mut Vec<u64>,
    done: &mut Done,
) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answers = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    loop {
        // Relaxed: no other data depends on it.
        while waiting.len() < IN_FLIGHT && !over.load(Relaxed) {
            let number = asked.fetch_add(1, Relaxed);
            stream.write_all(format!("{number}\n").as_bytes())?;
            waiting.push(number);
        }
        if waiting.is_empty() {
            return Ok(());
        }
        line.clear();
        if answers.read_line(&mut line)? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        // "PROCESS NUMBER", in any order: the demo's mux does not order replies.
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(pid)), Some(Ok(number))) = (words.next(), words.next()) else {
            done.strange += 1;
            continue;
        };
        match waiting.iter().position(|waits| *waits == number) {
            Some(at) => {
                waiting.swap_remove(at);
                done.answered += 1;
                *done.by_worker.entry(pid as u32).or_default() += 1;
            }
            None => done.strange += 1,
        }
    }
}
