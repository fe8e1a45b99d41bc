//! Upgrades of `towpath mux` (SIGUSR2): a new process takes over sockets and connections.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, test_kill_process};
use towpath_port::netns::until;

use crate::openssl;

use super::daemon::{Mux, answer, ask, example, kill, message, split, towpath};

/// A mux and the processes that replace it.
pub(super) struct Chain {
    pub(super) mux: Mux,
    /// The process that serves.
    pub(super) current: Current,
    /// The log so far.
    log: String,
}

/// A process that is not a child of the test.
pub(super) struct Current(pub(super) u32);

impl Drop for Current {
    fn drop(&mut self) {
        if thread::panicking() {
            kill(self.0, Signal::KILL);
        }
    }
}

impl Chain {
    pub(super) fn of(mux: Mux) -> Self {
        Self { current: Current(mux.id()), mux, log: String::new() }
    }

    pub(super) fn start(more: &[&str]) -> Self {
        Self::of(Mux::start(&example("mux_worker"), more))
    }

    /// Asks for an upgrade.
    pub(super) fn request(&self) {
        kill(self.current.0, Signal::USR2);
    }

    /// Upgrades, and waits until the new process has all connections that can be moved. Returns their number.
    pub(super) fn upgrade(&mut self) -> u64 {
        self.request();
        self.taken()
    }

    /// The same with a short `--upgrade-time`: again if the new process was late.
    pub(super) fn upgrade_at_last(&mut self) -> u64 {
        for _ in 0..60 {
            self.request();
            if let Some(taken) = self.taken_unless_late() {
                return taken;
            }
        }
        panic!("60 upgrades were late: {}", self.log);
    }

    fn taken(&mut self) -> u64 {
        self.taken_unless_late().expect("the new process is ready in time")
    }

    fn taken_unless_late(&mut self) -> Option<u64> {
        let (mut serves, mut taken) = (None, None);
        // The lines of two processes have no order.
        while serves.is_none() || taken.is_none() {
            let line = self.mux.line("an upgrade");
            self.log += &line;
            if line.contains("was not ready in time") {
                return None;
            }
            assert!(!line.contains("upgrade failed"), "{line}");
            serves = serves.or(number_before(&line, " serves from here on"));
            taken = taken.or(number_before(&line, " taken over from process")
                .or(number_before(&line, " connections taken")));
        }
        self.current = Current(serves.expect("a process") as u32);
        taken
    }

    /// Drains the process that serves. Returns the log, after all processes have ended.
    pub(super) fn finish(self) -> String {
        kill(self.current.0, Signal::TERM);
        let (code, rest) = self.mux.ended();
        assert_eq!(code, Some(0), "the first process: {rest}");
        self.log + &rest
    }
}

/// The number before the last word or words that precede `what`.
fn number_before(line: &str, what: &str) -> Option<u64> {
    let before = &line[..line.find(what)?];
    before.split_whitespace().rev().find_map(|word| word.parse().ok())
}

pub(super) fn runs(pid: u32) -> bool {
    test_kill_process(Pid::from_raw(pid as i32).expect("a process")).is_ok()
}

/// A connection over TCP or a Unix socket.
pub(super) trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

pub(super) fn connect(address: &str) -> Box<dyn Stream> {
    let patience = Some(Duration::from_secs(120));
    match address.strip_prefix("unix:") {
        Some(path) => {
            let stream = UnixStream::connect(path).expect("no connection is refused");
            stream.set_read_timeout(patience).expect("a timeout");
            Box::new(stream)
        }
        None => {
            let stream = TcpStream::connect(address).expect("no connection is refused");
            stream.set_read_timeout(patience).expect("a timeout");
            stream.set_nodelay(true).expect("no delay");
            Box::new(stream)
        }
    }
}

/// Sends `count` numbered requests in pieces that end anywhere, and reads their answers. Returns the workers.
pub(super) fn numbered(
    mut stream: &mut dyn Stream,
    number: &mut u64,
    count: u64,
    workers: &mut BTreeSet<u32>,
) {
    let body = |number: u64| format!("request {number} {}", "x".repeat(number as usize * 7 % 400));
    let asked: Vec<u8> = (0..count).flat_map(|more| message(body(*number + more).as_bytes())).collect();
    // A part arrives before an upgrade, the rest maybe after it.
    let (one, other) = asked.split_at(*number as usize * 31 % asked.len());
    stream.write_all(one).expect("the connection is open");
    thread::yield_now();
    stream.write_all(other).expect("the connection is open");
    for more in 0..count {
        let answered = answer(&mut stream).expect("no answer is lost");
        let (pid, echo) = split(&answered);
        assert_eq!(
            String::from_utf8_lossy(echo),
            body(*number + more),
            "each request is answered once, in order"
        );
        workers.insert(pid);
    }
    *number += count;
}

#[test]
fn nothing_is_refused_lost_or_repeated_in_20_upgrades_under_load() {
    let directory = tempfile::tempdir().expect("a directory");
    let unix = format!("unix:{}", directory.path().join("mux.sock").display());
    let worker = format!("{} 16", example("mux_worker"));
    let mut chain = Chain::of(Mux::start(&worker, &[&unix, "--workers", "2"]));
    let tcp = chain.mux.address.clone();
    let over = AtomicBool::new(false);
    let over = &over;
    let (upgrades, moved) = (
        20,
        thread::scope(|scope| {
            let clients: Vec<_> = (0..8u64)
                .map(|client| {
                    let address = if client % 2 == 0 { tcp.clone() } else { unix.clone() };
                    scope.spawn(move || {
                        let (mut number, mut workers) = (client, BTreeSet::new());
                        let mut stream = connect(&address);
                        while !over.load(SeqCst) {
                            let count = 1 + number % 5;
                            numbered(&mut *stream, &mut number, count, &mut workers);
                            // Half of the clients keep their connection.
                            if client % 4 > 1 {
                                stream = connect(&address);
                            }
                        }
                        workers
                    })
                })
                .collect();
            let upgrades: u64 = (0..20).map(|_| chain.upgrade()).sum();
            over.store(true, SeqCst);
            for (client, workers) in clients.into_iter().enumerate() {
                let workers = workers.join().expect("a client");
                assert!(workers.len() >= 20, "client {client} was served by {} workers", workers.len());
            }
            upgrades
        }),
    );
    // Four connections are kept through all upgrades.
    assert!(moved >= 4 * upgrades, "{moved}");
    let log = chain.finish();
    for wrong in ["panicked", "not drained", "ended before", "not_taken", "upgrade failed", "was closed"] {
        assert!(!log.contains(wrong), "{log}");
    }
}

#[test]
fn messages_move_as_they_are() {
    let mut chain = Chain::start(&["--workers", "2"]);
    let (mut half, mut busy, mut quiet) = (chain.mux.connect(), chain.mux.connect(), chain.mux.connect());
    let asked = message(&vec![b'h'; 100_000]);
    half.write_all(&asked[..70_000]).expect("open");
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let wait = format!("wait {}", gate.local_addr().expect("an address"));
    busy.write_all(&message(wait.as_bytes())).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    let (old, _) = (split(&ask(&mut quiet, b"first")).0, ());
    chain.request();
    // The old process serves until the busy connection has its answer, and the new one has the others meanwhile.
    let new = loop {
        let pid = split(&ask(&mut quiet, b"second")).0;
        if pid != old && !answered_by_old(pid, old, chain.mux.id()) {
            break pid;
        }
    };
    half.write_all(&asked[70_000..]).expect("open");
    let answered = answer(&mut half).expect("an answer");
    assert_eq!(split(&answered).1, &asked[4..], "the message is whole");
    busy.write_all(&message(b"next")).expect("open");
    assert!(runs(chain.mux.id()));
    drop(holder);
    assert_eq!(split(&answer(&mut busy).expect("an answer")).1, wait.as_bytes());
    let answered = answer(&mut busy).expect("an answer");
    assert_eq!(split(&answered).1, b"next");
    assert_eq!(parent(split(&answered).0), parent(new), "the new process answers");
    assert_eq!(chain.taken(), 3);
    chain.finish();
}

/// Bytes of incomplete messages count in the new process as in the old one.
#[test]
fn incomplete_messages_that_nearly_fill_the_mux_move() {
    let mut chain = Chain::start(&["--workers", "2", "--mux-bytes", "1000000"]);
    let asked = message(&vec![b'z'; 70_000]);
    let mut streams: Vec<TcpStream> = (0..12).map(|_| chain.mux.connect()).collect();
    for stream in &mut streams {
        stream.write_all(&asked[..60_000]).expect("open");
    }
    for _ in 0..2 {
        assert_eq!(chain.upgrade(), 12);
    }
    for stream in &mut streams {
        stream.write_all(&asked[60_000..]).expect("open");
        assert_eq!(split(&answer(stream).expect("an answer")).1, &asked[4..]);
    }
    chain.finish();
}

/// Workers of a mux are its children.
pub(super) fn parent(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

fn answered_by_old(pid: u32, first: u32, old: u32) -> bool {
    pid == first || parent(pid) == Some(old)
}

/// Its end would end the new process, too (pid_namespaces(7)).
#[towpath_testenv::needs(netns, "unshare")]
#[test]
fn process_1_is_not_upgraded() {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", env!("CARGO_BIN_EXE_towpath")]);
    let mut mux = Mux::begin(command, "127.0.0.1:0", &example("mux_worker"), &["--workers", "1"]);
    let worker = split(&ask(&mut mux.connect(), b"before")).0;
    assert_ne!(worker, 1, "the worker has another process id in the namespace");
    let children = format!("/proc/{0}/task/{0}/children", mux.id());
    let init = std::fs::read_to_string(children).expect("its children").trim().parse().expect("one child");
    kill(init, Signal::USR2);
    let line = mux.until("SIGUSR2 ignored: ");
    assert!(line.contains("process 1 of its PID namespace"), "{line}");
    assert_eq!(split(&ask(&mut mux.connect(), b"after")).0, worker);
    kill(init, Signal::TERM);
    let (code, log) = mux.ended();
    assert_eq!(code, Some(0), "{log}");
}

/// A mux with a connection whose message a worker holds until the stream is dropped, after an upgrade that has begun to serve.
fn moving(idle: usize) -> (Chain, u32, TcpStream, TcpStream, Vec<TcpStream>) {
    let mut chain = Chain::start(&["--workers", "1"]);
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut busy = chain.mux.connect();
    let wait = format!("wait {}", gate.local_addr().expect("an address"));
    busy.write_all(&message(wait.as_bytes())).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    let idle: Vec<_> = (0..idle).map(|_| chain.mux.connect()).collect();
    chain.request();
    let new = number_before(&chain.mux.until(" serves from here on"), " serves from here on");
    let new = new.expect("a process") as u32;
    chain.current = Current(new);
    (chain, new, busy, holder, idle)
}

#[test]
fn the_old_process_ends_with_the_new_one_and_calls_it_no_failure() {
    let (mut chain, new, mut busy, holder, _idle) = moving(3);
    kill(new, Signal::TERM);
    let line = chain.mux.until(" was told to end; this process drains, too");
    assert_eq!(number_before(&line, " was told to end"), Some(new.into()));
    // Its exit status is waited for.
    until(|| !runs(new));
    drop(holder);
    answer(&mut busy).expect("the answer");
    assert_eq!(busy.read(&mut [0]).expect("an end"), 0, "it is drained");
    let (code, log) = chain.mux.ended();
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("error:"), "{log}");
}

/// SIGTERM to the old process drains what stays: what it can hand over, it does.
#[test]
fn sigterm_ends_the_old_process_while_connections_move() {
    let (mut chain, _, mut busy, holder, mut idle) = moving(3);
    for stream in &mut idle {
        ask(stream, b"idle");
    }
    chain.mux.signal(Signal::TERM);
    drop(holder);
    answer(&mut busy).expect("the answer");
    assert_eq!(parent(split(&ask(&mut busy, b"next")).0), Some(chain.current.0));
    for stream in &mut idle {
        assert_eq!(parent(split(&ask(stream, b"idle")).0), Some(chain.current.0));
    }
    let taken = chain.mux.until(" taken over from process");
    assert_eq!(number_before(&taken, " connections taken over"), Some(4), "{taken}");
    let log = chain.finish();
    assert!(!log.contains("error:"), "{log}");
}

#[towpath_testenv::needs("openssl")]
#[test]
fn connections_with_tls_stay() {
    let directory = tempfile::tempdir().expect("a directory");
    openssl::certificate(directory.path(), "mux", "/CN=localhost", &[]);
    let files = format!("{0}/mux.pem,{0}/mux.key", directory.path().display());
    let mut chain = Chain::start(&["--workers", "1", "--tls", &files]);
    let address = chain.mux.address.clone();
    let client = || openssl::client(&address, directory.path(), &[]);
    let ask = |client: &mut openssl::Client, body: &[u8]| {
        client.stdin.as_mut().expect("a pipe").write_all(&message(body)).expect("it reads");
        let answered = answer(client.stdout.as_mut().expect("a pipe")).expect("an answer");
        assert_eq!(split(&answered).1, body);
        split(&answered).0
    };
    let mut old = client();
    let worker = ask(&mut old, b"before");
    let first = chain.mux.id();
    assert_eq!(chain.upgrade(), 0);
    assert_eq!(ask(&mut old, b"after"), worker, "the old process serves it");
    let mut new = client();
    assert_ne!(ask(&mut new, b"new"), worker);
    assert!(runs(first));
    drop((old, new));
    // The old process ends with its last connection.
    until(|| !runs(worker));
    let log = chain.finish();
    assert!(log.contains("1 stay for up to "), "{log}");
}

#[test]
fn connections_whose_worker_has_state_stay_until_the_deadline() {
    let sticky = ["--workers", "1", "--order", "sticky"];
    let mut chain = Chain::start(&[&sticky[..], &["--drain", "1"]].concat());
    let mut stream = chain.mux.connect();
    let worker = split(&ask(&mut stream, b"before")).0;
    assert_eq!(chain.upgrade(), 0);
    assert_ne!(split(&ask(&mut chain.mux.connect(), b"new")).0, worker);
    assert_eq!(stream.read(&mut [0]).expect("an end"), 0, "it is closed at the deadline");
    until(|| !runs(worker));
    chain.finish();

    let mut chain = Chain::start(&[&sticky[..], &["--on-worker-end", "move"]].concat());
    let mut stream = chain.mux.connect();
    let worker = split(&ask(&mut stream, b"before")).0;
    assert_eq!(chain.upgrade(), 1);
    assert_ne!(split(&ask(&mut stream, b"after")).0, worker);
    chain.finish();
}

#[test]
fn outbound_connections_stay_and_the_new_process_makes_its_own() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = listener.local_addr().expect("an address").to_string();
    let mut chain = Chain::start(&["--workers", "1", "--drain", "1", "--connected", &peer]);
    let (mut old, _) = listener.accept().expect("it connects");
    let worker = split(&ask(&mut old, b"before")).0;
    assert_eq!(chain.upgrade(), 0);
    let (mut new, _) = listener.accept().expect("it connects");
    assert_eq!(split(&ask(&mut old, b"after")).0, worker);
    assert_ne!(split(&ask(&mut new, b"new")).0, worker);
    assert_eq!(old.read(&mut [0]).expect("an end"), 0, "it is closed at the deadline");
    until(|| !runs(worker));
    let log = chain.finish();
    assert!(log.contains("1 connection had not ended in time"), "{log}");
}

/// No process takes over a connection that the framing gives back: `towpath mux` closes it.
#[test]
fn a_connection_that_the_framing_gives_back_is_closed_during_an_upgrade() {
    let framing = "when 00 (fixed=8) when 16 03 (giveback)";
    let mut chain = Chain::start(&["--workers", "1", "--order", "sticky", "--framing", framing]);
    let mut stream = chain.mux.connect();
    ask(&mut stream, b"four");
    assert_eq!(chain.upgrade(), 0);
    stream.write_all(&[0x16, 3]).expect("open");
    assert_eq!(stream.read(&mut [0]).expect("an end"), 0);
    let log = chain.finish();
    assert!(!log.contains("error:"), "{log}");
}

/// Replies that leave without a copy are completed before their connection moves.
#[test]
fn connections_with_zerocopy_sends_move() {
    let mut chain = Chain::start(&["--workers", "1", "--send", "zerocopy"]);
    let mut stream = chain.mux.connect();
    for generation in 0..3 {
        stream.write_all(&message(b"huge 200000")).expect("open");
        assert_eq!(answer(&mut stream).expect("an answer"), [b'x'; 200_000], "{generation}");
        assert_eq!(chain.upgrade(), 1);
    }
    chain.finish();
}

#[test]
fn events_say_that_a_connection_is_resumed() {
    let worker = example("event_worker");
    let mut chain = Chain::of(Mux::start(&worker, &["--framing", "line", "--workers", "1"]));
    let mut stream = chain.mux.connect();
    let mut line = || {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a line");
            line.push(byte[0]);
        }
        String::from_utf8(line).expect("text").split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    let first = line();
    assert_eq!((&*first[0], &*first[2]), ("opened", "false"));
    assert_eq!(chain.upgrade(), 1);
    let second = line();
    assert_eq!((&*second[0], &*second[2]), ("opened", "true"));
    assert_ne!(first[1], second[1], "another worker");
    assert_eq!(first[3..], second[3..], "the same addresses and listener");
    chain.finish();
}

#[test]
fn the_control_socket_and_the_service_manager_follow() {
    let directory = tempfile::tempdir().expect("a directory");
    let (control, manager) = (directory.path().join("control.sock"), directory.path().join("notify.sock"));
    let notify = UnixDatagram::bind(&manager).expect("a socket");
    let heard = || {
        let mut text = [0; 256];
        let length = notify.recv(&mut text).expect("a notice");
        String::from_utf8_lossy(&text[..length]).into_owned()
    };
    let mut command = towpath();
    command.env("NOTIFY_SOCKET", &manager);
    let control = control.to_str().expect("UTF-8");
    let more = ["--workers", "1", "--control", control];
    let mut chain = Chain::of(Mux::begin(command, "127.0.0.1:0", &example("mux_worker"), &more));
    assert_eq!(heard(), "READY=1");
    let _stream = chain.mux.connect();
    ask(&mut chain.mux.connect(), b"hello");
    let show = || {
        let args = ["ctl", "--socket", control, "show", "mux", "--json"];
        let output = towpath().args(args).output().expect("towpath starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    };
    for _ in 0..2 {
        show();
        let taken = chain.upgrade();
        let heard: BTreeSet<String> = [heard(), heard()].into();
        assert!(heard.contains(&format!("MAINPID={}", chain.current.0)), "{heard:?}");
        assert!(heard.contains("READY=1"), "{heard:?}");
        assert_eq!(show()["mux"]["upgrade"]["taken_over"], taken);
    }
    chain.finish();
    assert!(!Path::new(control).exists(), "the last process removes it");
}
