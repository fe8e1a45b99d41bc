//! `towpath mux`, from the outside: workers that are processes, and what becomes of messages when they die.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};

const FRAMING: &str = "offset=0 length=4 be adjust=4";

fn towpath() -> Command {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
}

/// The examples are built beside this test.
fn example(name: &str) -> String {
    let bin = Path::new(env!("CARGO_BIN_EXE_towpath"));
    bin.with_file_name("examples").join(name).to_str().expect("UTF-8").to_owned()
}

/// Workers that take a message at a time, and up to sixteen.
fn workers() -> [String; 2] {
    let worker = example("mux_worker");
    [worker.clone(), format!("{worker} 16")]
}

struct Front {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
}

impl Front {
    fn start(worker: &str, more: &[&str]) -> Self {
        Self::listen("127.0.0.1:0", worker, more)
    }

    fn listen(address: &str, worker: &str, more: &[&str]) -> Self {
        Self::begin(towpath(), address, worker, more)
    }

    /// Under a limit: a shell's words.
    fn limited(limit: &str, worker: &str, more: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{limit}; exec \"$@\""), "sh", env!("CARGO_BIN_EXE_towpath")]);
        Self::begin(shell, "127.0.0.1:0", worker, more)
    }

    fn begin(mut command: Command, address: &str, worker: &str, more: &[&str]) -> Self {
        let mut child = command
            .args(["mux", address, "--worker", worker])
            .args(["--framing", FRAMING].iter().filter(|_| !more.contains(&"--framing")))
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .expect("towpath starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        let address =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).trim().to_owned();
        let mut front = Self { child, stderr, address };
        front.until("workers attached");
        front
    }

    /// Reads what it says until a line has this in it.
    fn until(&mut self, what: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.stderr.read_line(&mut line).expect("text") > 0, "it ended without: {what}");
            if line.contains(what) {
                return line;
            }
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        stream
    }

    fn signal(&self, signal: Signal) {
        kill(self.child.id(), signal);
    }

    /// Drains it; its exit code and the rest of what it said.
    fn finish(self) -> (Option<i32>, String) {
        self.signal(Signal::TERM);
        self.ended()
    }

    /// The same when it was told to end before: a second signal would not wait.
    fn ended(mut self) -> (Option<i32>, String) {
        let mut errors = String::new();
        self.stderr.read_to_string(&mut errors).expect("text");
        (self.child.wait().expect("its end").code(), errors)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn kill(pid: u32, signal: Signal) {
    // It may be gone already.
    let _ = kill_process(Pid::from_raw(pid as i32).expect("a process"), signal);
}

fn message(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes()[..], body].concat()
}

fn answer(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let mut body = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut body)?;
    Ok(body)
}

fn ask(stream: &mut (impl Read + Write), body: &[u8]) -> Vec<u8> {
    stream.write_all(&message(body)).expect("it is open");
    answer(stream).expect("an answer")
}

/// The process that answered: examples/mux_worker.rs answers with its process id, a space and what it was asked.
fn split(answer: &[u8]) -> (u32, &[u8]) {
    let at = answer.iter().position(|&byte| byte == b' ').expect("a space");
    (String::from_utf8_lossy(&answer[..at]).parse().expect("a process id"), &answer[at + 1..])
}

/// "R of N messages: D done": the last line.
fn counted(errors: &str) -> (u64, u64, u64, u64) {
    let line =
        errors.lines().rev().find(|line| line.contains(" messages: ")).unwrap_or_else(|| panic!("{errors}"));
    let before = |word: &str| -> u64 {
        let at = line.find(word).unwrap_or_else(|| panic!("{line}"));
        line[..at].trim().rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{line}"))
    };
    (before(" messages:"), before(" done"), before(" given up"), before(" not begun"))
}

/// What was made for KCM serves as it is.
#[test]
fn a_framing_may_be_a_program_or_a_document() {
    let directory = tempfile::tempdir().expect("a directory");
    let document = directory.path().join("framing.toml");
    std::fs::write(&document, "length = 4\nadjust = 4\n").expect("a file");
    let object = Path::new(env!("CARGO_MANIFEST_DIR")).join("../towpath-bpf/tests/programs/thrift.o");
    let program = format!("{}:frame", object.display());
    for framing in [document.to_str().expect("UTF-8"), object.to_str().expect("UTF-8"), &program] {
        let front = Front::start(&example("mux_worker"), &["--workers", "1", "--framing", framing]);
        let mut stream = front.connect();
        for body in [&b"one"[..], b"another"] {
            assert_eq!(split(&ask(&mut stream, body)).1, body, "{framing}");
        }
        drop(stream);
        assert_eq!(front.finish().0, Some(0), "{framing}");
    }
    let refused = towpath().args(["mux", "127.0.0.1:0", "--worker", "w", "--framing", "no/such.o"]).output();
    let refused = refused.expect("towpath starts");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(64), "{said}");
    assert!(said.contains("--framing no/such.o: no such file, and no framing either"), "{said}");
}

#[test]
fn messages_of_any_size_are_answered_by_processes() {
    workers().iter().for_each(|worker| any_size(worker));
}

fn any_size(worker: &str) {
    let front = Front::start(worker, &["--workers", "3"]);
    let mut stream = front.connect();
    let mut pids = BTreeSet::new();
    for size in [0, 1, 60, 64, 65, 1500, 70_000, 5_000_000] {
        let body: Vec<u8> = (0..size).map(|at| at as u8).collect();
        let answered = ask(&mut stream, &body);
        let (pid, echo) = split(&answered);
        assert!(echo == body, "{size} bytes come back");
        pids.insert(pid);
    }
    // Many at a time, each with a number, over two connections.
    let mut other = front.connect();
    for stream in [&mut stream, &mut other] {
        let asked: Vec<u8> = (0..500u32).flat_map(|number| message(&number.to_be_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
    }
    for stream in [&mut stream, &mut other] {
        let mut numbers = BTreeSet::new();
        for _ in 0..500 {
            let answer = answer(stream).expect("an answer");
            let (pid, number) = split(&answer);
            pids.insert(pid);
            numbers.insert(number.to_vec());
        }
        assert_eq!(numbers.len(), 500, "each is answered once");
    }
    assert!(pids.len() <= 3);
    drop((stream, other));
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(counted(&errors), (1008, 1008, 0, 0));
}

#[test]
fn a_slow_message_does_not_keep_others_waiting() {
    let front = Front::start(&example("mux_worker"), &["--workers", "2"]);
    let (mut slow, mut quick) = (front.connect(), front.connect());
    // It waits until it is told that the others were answered.
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    slow.write_all(&message(format!("wait {}", gate.local_addr().expect("an address")).as_bytes()))
        .expect("open");
    let (holder, _) = gate.accept().expect("the slow worker");
    for _ in 0..50 {
        ask(&mut quick, b"quick");
    }
    drop(holder);
    assert!(
        answer(&mut slow).expect("an answer").ends_with(gate.local_addr().unwrap().to_string().as_bytes())
    );
}

#[test]
fn answers_keep_the_order_that_was_asked_for() {
    let orders = ["replies", "serial", "sticky"];
    for (order, worker) in orders.into_iter().flat_map(|order| workers().map(|worker| (order, worker))) {
        let front = Front::start(&worker, &["--workers", "4", "--order", order]);
        let mut stream = front.connect();
        let asked: Vec<u8> = (0..300u32).flat_map(|number| message(&number.to_be_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
        for number in 0..300u32 {
            let answered = answer(&mut stream).expect("an answer");
            assert_eq!(split(&answered).1, number.to_be_bytes(), "{order}");
        }
    }
}

#[test]
fn a_worker_hears_what_nobody_took() {
    let front = Front::start(&example("mux_worker"), &["--workers", "1"]);
    let mut stream = front.connect();
    for text in ["one", "two"] {
        ask(&mut stream, format!("send {text}").as_bytes());
    }
    // ENOTCONN: it is not in connected mode.
    let mut heard = Vec::new();
    while heard.len() < 2 {
        let answer = ask(&mut stream, b"unsent");
        let said = String::from_utf8_lossy(split(&answer).1);
        heard.extend(said.split(", ").filter(|said| !said.is_empty()).map(str::to_owned));
    }
    assert_eq!(heard, ["107 None one", "107 None two"]);
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_message_whose_worker_dies_goes_to_another() {
    let mut front = Front::start(&example("mux_worker"), &["--workers", "2"]);
    let mut stream = front.connect();
    let directory = tempfile::tempdir().expect("a directory");
    // It dies the first time, and leaves a mark so that it does not die again.
    let mark = directory.path().join("mark");
    let body = format!("die once {}", mark.display());
    let answered = ask(&mut stream, body.as_bytes());
    assert!(mark.exists());
    assert_eq!(split(&answered).1, body.as_bytes());
    front.until("another one is started");
    // One that kills all of them is given up, and its connection ends; others do not notice.
    let mut other = front.connect();
    stream.write_all(&message(b"die")).expect("open");
    assert_eq!(stream.read(&mut [0; 16]).expect("an end"), 0, "the connection ends");
    front.until("was given up");
    assert_eq!(split(&ask(&mut other, b"still here")).1, b"still here");
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((received, done, undone, left), (3, 2, 1, 0), "{errors}");
}

#[test]
fn nothing_is_lost_when_workers_are_killed_and_connections_reset() {
    workers().iter().for_each(|worker| kills(worker));
}

#[test]
fn who_kills_workers_is_found_among_others() {
    let front =
        Front::start(&format!("{} 16", example("mux_worker")), &["--workers", "2", "--undone", "keep"]);
    let mut stream = front.connect();
    let mut ask = |deadly: Option<usize>| {
        let body = |number| if Some(number) == deadly { "die".to_owned() } else { number.to_string() };
        let asked: Vec<u8> = (0..300).flat_map(|number| message(body(number).as_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
        let mut answered = BTreeSet::new();
        for _ in 0..300 - usize::from(deadly.is_some()) {
            let answer = answer(&mut stream).expect("an answer");
            answered.insert(String::from_utf8_lossy(split(&answer).1).into_owned());
        }
        assert_eq!(answered, (0..300).filter(|number| Some(*number) != deadly).map(body).collect());
    };
    // The first are alone, until it is known how short they are.
    (0..10).for_each(|_| ask(None));
    [0, 7, 150, 299].into_iter().for_each(|number| ask(Some(number)));
    ask(None);
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(counted(&errors), (15 * 300, 15 * 300 - 4, 4, 0), "{errors}");
}

/// Connections, opened and reset at random by four threads at once while their workers are killed.
#[test]
fn nothing_is_lost_among_thousands_of_connections() {
    const CONNECTIONS: usize = 500;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("up to there it may");
    if limit.maximum.is_some_and(|most| most < 5000) {
        return eprintln!("skipped: fewer than 5000 files may be open");
    }
    let worker = format!("{} 16", example("mux_worker"));
    let front = Front::start(&worker, &["--workers", "3", "--redeliver", "200"]);
    let client = &|client: u64| {
        // xorshift64* (Vigna 2016).
        let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(client + 1);
        let mut random = move |below: u64| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
        };
        let body = |number: usize, at: u8| [&client.to_be_bytes()[..], &number.to_be_bytes(), &[at]].concat();
        let mut answered = 0;
        let mut streams: Vec<_> = (0..CONNECTIONS)
            .map(|number| {
                let mut stream = front.connect();
                let asked: Vec<u8> = (0..3).flat_map(|at| message(&body(number, at))).collect();
                stream.write_all(&asked).expect("it is open");
                (number, stream)
            })
            .collect();
        while !streams.is_empty() {
            let (number, mut stream) = streams.swap_remove(random(streams.len() as u64) as usize);
            if random(3) == 0 {
                // Inside a message; with answers unread, this is a reset.
                stream.write_all(&message(&[0; 100])[..50]).expect("it is open");
                continue;
            }
            let mut bodies = BTreeSet::new();
            for _ in 0..3 {
                let answer = answer(&mut stream).expect("an answer");
                let (pid, echo) = split(&answer);
                bodies.insert(echo.to_vec());
                if random(100) == 0 {
                    kill(pid, Signal::KILL);
                }
            }
            assert_eq!(bodies, (0..3).map(|at| body(number, at)).collect(), "its own, each once");
            answered += 3;
        }
        answered
    };
    let answered: u64 = thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|number| scope.spawn(move || client(number))).collect();
        clients.into_iter().map(|client| client.join().expect("every question is answered")).sum()
    });
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((undone, left), (0, 0), "{errors}");
    assert_eq!(received, done, "{errors}");
    assert!(received >= answered && errors.contains("another one is started"), "{answered}: {errors}");
}

fn kills(worker: &str) {
    let mut front = Front::start(worker, &["--workers", "3", "--redeliver", "200"]);
    // Who resets does it while its messages are under way.
    for _ in 0..20 {
        let mut stream = front.connect();
        let asked: Vec<u8> = (0..50u32).flat_map(|number| message(&number.to_be_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
        let answered = answer(&mut stream).expect("an answer");
        kill(split(&answered).0, Signal::KILL);
        // With bytes unread, this is a reset.
        drop(stream);
    }
    let clients: Vec<_> = (0..4u32)
        .map(|client| {
            let mut stream = front.connect();
            thread::spawn(move || {
                for number in 0..200u32 {
                    let body = [client.to_be_bytes(), number.to_be_bytes()].concat();
                    let answered = ask(&mut stream, &body);
                    let (pid, echo) = split(&answered);
                    assert_eq!(echo, body, "its own answer");
                    if number % 20 == 7 {
                        kill(pid, Signal::KILL);
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("every question is answered");
    }
    front.until("another one is started");
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((undone, left), (0, 0), "{errors}");
    assert_eq!(received, done, "{errors}");
    assert!(received >= 820);
}

#[test]
fn a_stuck_worker_is_killed_when_there_is_a_limit() {
    let front =
        Front::start(&example("mux_worker"), &["--workers", "1", "--timeout", "10", "--redeliver", "0"]);
    let mut stream = front.connect();
    stream.write_all(&message(b"stop")).expect("open");
    assert_eq!(stream.read(&mut [0; 16]).expect("an end"), 0, "the connection ends");
    assert_eq!(split(&ask(&mut front.connect(), b"next")).1, b"next");
    let (_, errors) = front.finish();
    assert!(errors.contains("killed: it had a message for too long"), "{errors}");
}

#[test]
fn hangup_replaces_the_workers_one_by_one() {
    let mut front = Front::start(&example("mux_worker"), &["--workers", "2"]);
    let pids = |front: &Front| -> BTreeSet<u32> {
        // So that both answer: each waits until both have begun.
        let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
        let body = message(format!("wait {}", gate.local_addr().expect("an address")).as_bytes());
        let mut streams = [front.connect(), front.connect()];
        let both = streams.each_mut().map(|stream| {
            stream.write_all(&body).expect("open");
            gate.accept().expect("a worker")
        });
        drop(both);
        streams.iter_mut().map(|stream| split(&answer(stream).expect("an answer")).0).collect()
    };
    let before = pids(&front);
    assert_eq!(before.len(), 2);
    // Somebody keeps asking meanwhile, and is always answered.
    let mut stream = front.connect();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let asks = thread::spawn(move || {
        let mut count = 0u64;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            ask(&mut stream, b"meanwhile");
            count += 1;
        }
        count
    });
    front.signal(Signal::HUP);
    front.until("all workers were replaced");
    stop.send(()).expect("it asks");
    assert!(asks.join().expect("every question is answered") > 0);
    let after = pids(&front);
    assert!(before.is_disjoint(&after), "{before:?} {after:?}");
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains(" 0 workers started again"), "{errors}");
}

#[test]
fn draining_answers_what_was_asked() {
    let front = Front::start(&example("mux_worker"), &["--workers", "1"]);
    let mut stream = front.connect();
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let body = format!("wait {}", gate.local_addr().expect("an address"));
    stream.write_all(&message(body.as_bytes())).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    front.signal(Signal::TERM);
    // Nobody is accepted any more, once it has heard.
    while TcpStream::connect(&front.address).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    drop(holder);
    assert_eq!(split(&answer(&mut stream).expect("an answer")).1, body.as_bytes());
    let (code, errors) = front.ended();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_worker_that_dies_while_the_front_drains_is_started_again() {
    let front = Front::start(&example("mux_worker"), &["--workers", "1"]);
    let mut stream = front.connect();
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let directory = tempfile::tempdir().expect("a directory");
    let wait = format!("wait {}", gate.local_addr().expect("an address"));
    let die = format!("die once {}", directory.path().join("mark").display());
    let both = [&wait, &die].map(|body| message(body.as_bytes())).concat();
    stream.write_all(&both).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    front.signal(Signal::TERM);
    while TcpStream::connect(&front.address).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    drop(holder);
    let answers = [wait, die].map(|body| {
        let answered = answer(&mut stream).expect("an answer");
        let (pid, echo) = split(&answered);
        assert_eq!(echo, body.as_bytes());
        pid
    });
    assert_ne!(answers[0], answers[1], "the only one died with the second");
    let (code, errors) = front.ended();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains(" 1 workers started again"), "{errors}");
}

#[test]
fn a_worker_that_is_stuck_does_not_keep_the_front_from_ending() {
    let front = Front::start(&example("mux_worker"), &["--workers", "1", "--drain", "0.2"]);
    let mut stream = front.connect();
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let body = format!("wait {}", gate.local_addr().expect("an address"));
    stream.write_all(&message(body.as_bytes())).expect("open");
    let _holder = gate.accept().expect("the worker");
    let (code, errors) = front.finish();
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("ended before everything was drained"), "{errors}");
    assert!(errors.contains("not drained in time"), "{errors}");
}

#[test]
fn a_peer_that_has_not_taken_its_answer_is_not_done_and_that_is_said() {
    let front = Front::start(&example("mux_worker"), &["--workers", "1", "--drain", "0.5"]);
    let mut stream = front.connect();
    // The kernel takes it, the peer does not.
    stream.write_all(&message(&vec![0; 600_000])).expect("open");
    stream.peek(&mut [0]).expect("it is answered");
    let (code, errors) = front.finish();
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("1 connections were not done"), "{errors}");
}

#[test]
fn the_limit_of_open_files_is_raised() {
    let front = Front::limited("ulimit -Sn 64", &example("mux_worker"), &["--workers", "1"]);
    let mut clients: Vec<_> = (0..100).map(|_| front.connect()).collect();
    assert_eq!(split(&ask(clients.last_mut().expect("many"), b"hello")).1, b"hello");
}

#[test]
fn connections_leave_workers_the_descriptors_that_they_need() {
    let mut front = Front::limited("ulimit -n 64", &example("mux_worker"), &["--workers", "1"]);
    let mut stream = front.connect();
    let mut pid = split(&ask(&mut stream, b"who")).0;
    // More than there is room for: the last of them wait.
    let clients: Vec<_> = (0..80).map(|_| front.connect()).collect();
    let line = front.until("cannot accept until a connection ends");
    assert!(line.contains("LimitNOFILE="), "{line}");
    for _ in 0..3 {
        kill(pid, Signal::KILL);
        let before = std::mem::replace(&mut pid, split(&ask(&mut stream, b"who")).0);
        assert_ne!(pid, before, "another one was started");
    }
    drop(clients);
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn what_else_was_asked_is_answered_when_a_message_is_given_up() {
    let front = Front::start(&example("mux_worker"), &["--workers", "2", "--redeliver", "0"]);
    let mut stream = front.connect();
    let body = |number: u32| if number == 0 { b"die".to_vec() } else { number.to_be_bytes().to_vec() };
    // They arrive in one piece.
    stream.write_all(&(0..300).flat_map(|number| message(&body(number))).collect::<Vec<_>>()).expect("open");
    let mut answered = BTreeSet::new();
    while let Ok(answer) = answer(&mut stream) {
        answered.insert(split(&answer).1.to_vec());
    }
    assert_eq!(answered, (1..300).map(body).collect());
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(counted(&errors), (300, 299, 1, 0), "{errors}");
}

#[test]
fn what_is_wrong_with_peers_and_order_is_said_before_anything_begins() {
    let rows: [(&[&str], &str); 4] = [
        (&["--connected", "foo"], "--connected foo: a peer is HOST:PORT or unix:PATH"),
        (&["--connected", "foo:99999"], "--connected foo:99999: a peer is HOST:PORT or unix:PATH"),
        (&["--connected", "127.0.0.1:1", "--trust", "/nowhere/at-all.pem"], "--trust: "),
        (&["--order", "key"], "it gives no key; write its clauses with key=OFFSET:LENGTH"),
    ];
    for (more, expected) in rows {
        let worker = example("mux_worker");
        let mut command = towpath();
        command.args(["mux", "127.0.0.1:0", "--framing", FRAMING, "--worker", &worker]).args(more);
        let output = command.output().expect("towpath starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{errors}");
        assert!(errors.contains(expected) && !errors.contains("listening on"), "{errors}");
    }
}

#[test]
fn a_socket_that_another_front_made_stays() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("front.sock");
    let address = format!("unix:{}", path.display());
    let worker = example("mux_worker");
    let old = Front::listen(&address, &worker, &["--workers", "1"]);
    std::fs::rename(&path, directory.path().join("old.sock")).expect("it is there");
    let new = Front::listen(&address, &worker, &["--workers", "1"]);
    assert_eq!(old.finish().0, Some(0));
    let mut stream = UnixStream::connect(&path).expect("the new one listens");
    assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    drop(stream);
    assert_eq!(new.finish().0, Some(0));
    assert!(!path.exists(), "its own goes with it");
}

/// Its file is gone before nobody listens there: a successor's would otherwise look like its own, and go with it.
#[test]
fn a_front_that_drains_leaves_its_place_to_the_next() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("front.sock");
    let address = format!("unix:{}", path.display());
    let held = TcpListener::bind("127.0.0.1:0").expect("a port");
    let args = ["--workers", "1", "--drain", "60"];
    let old = Front::listen(&address, &example("mux_worker"), &args);
    let mut asked = UnixStream::connect(&path).expect("it listens");
    let wait = format!("wait {}", held.local_addr().expect("an address"));
    asked.write_all(&message(wait.as_bytes())).expect("it is open");
    let (worker, _) = held.accept().expect("the worker waits");
    old.signal(Signal::TERM);
    while UnixStream::connect(&path).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(!path.exists(), "it has gone before the listener");
    let new = Front::listen(&address, &example("mux_worker"), &args);
    drop(worker);
    assert_eq!(split(&answer(&mut asked).expect("an answer")).1, wait.as_bytes());
    drop(asked);
    assert_eq!(old.ended().0, Some(0));
    let mut stream = UnixStream::connect(&path).expect("the new one listens");
    assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    drop(stream);
    assert_eq!(new.finish().0, Some(0));
}

#[test]
fn a_unix_socket_works_as_tcp_does() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("front.sock");
    // One that somebody left behind is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let address = format!("unix:{}", path.display());
    let front = Front::listen(&address, &example("mux_worker"), &["--workers", "1"]);
    let mut stream = UnixStream::connect(&path).expect("it listens");
    assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    drop(stream);
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert!(!path.exists(), "it is removed");
}

/// It goes to a peer that asks, and again when that one has gone.
#[test]
fn peers_are_connected_to() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = listener.local_addr().expect("an address").to_string();
    let front = Front::start(&example("mux_worker"), &["--workers", "1", "--connected", &peer]);
    for _ in 0..3 {
        let (mut stream, _) = listener.accept().expect("it connects");
        assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    }
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_peer_that_cannot_be_connected_to_is_said() {
    // Nobody else gets the port while it is bound, and nobody listens.
    let taken = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&taken, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let peer = rustix::net::getsockname(&taken).expect("an address");
    let peer = SocketAddrV4::try_from(peer).expect("of IPv4").to_string();
    let mut front = Front::start(&example("mux_worker"), &["--workers", "1", "--connected", &peer]);
    front.until(&format!("cannot connect to {peer}: "));
    assert_eq!(front.finish().0, Some(0));
}

#[test]
fn what_became_of_messages_is_told_as_json() {
    let mut child = towpath()
        .args(["mux", "127.0.0.1:0", "--framing", FRAMING, "--workers", "1", "--json", "--worker"])
        .arg(example("mux_worker"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("towpath starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("a line");
    let address = line.trim_start_matches("listening on ").trim();
    let mut stream = TcpStream::connect(address).expect("it listens");
    ask(&mut stream, b"one");
    drop(stream);
    kill(child.id(), Signal::TERM);
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(0));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let counts = ["connections", "messages", "done", "given_up", "not_begun"].map(|key| told[key].as_u64());
    assert_eq!(counts, [1, 1, 1, 0, 0].map(Some), "{told}");
    assert_eq!(told["drained"], true, "{told}");
}

#[test]
fn a_front_that_cannot_start_leaves_no_socket_behind() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("front.sock");
    let address = format!("unix:{}", path.display());
    let args = ["mux", &address, "nowhere", "--framing", "line", "--worker", "true"];
    let output = towpath().args(args).output().expect("towpath starts");
    assert_eq!(output.status.code(), Some(64));
    assert!(!path.exists());
}

#[test]
fn a_peer_that_asks_ahead_gets_all_answers_when_the_front_drains() {
    let front = Front::start(&example("mux_worker"), &["--workers", "2"]);
    let mut stream = front.connect();
    let mut asks = stream.try_clone().expect("a descriptor");
    let body = [b'q'; 200];
    let writer = thread::spawn(move || while asks.write_all(&message(&body).repeat(50)).is_ok() {});
    // It takes no answer before the front is told to end, and has more to ask all the time.
    answer(&mut stream).expect("an answer");
    front.signal(Signal::TERM);
    while TcpStream::connect(&front.address).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    let mut answered = 1;
    while answer(&mut stream).is_ok() {
        answered += 1;
    }
    stream.shutdown(std::net::Shutdown::Both).expect("it is open");
    writer.join().expect("it ends");
    let (code, errors) = front.ended();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((done, undone, left), (received, 0, 0), "{errors}");
    assert_eq!(answered, done, "{errors}");
}

#[test]
fn tls_is_spoken_with_openssl() {
    let directory = tempfile::tempdir().expect("a directory");
    let (cert, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=localhost", "-keyout"])
        .args([key.as_os_str(), "-out".as_ref(), cert.as_os_str()])
        .stderr(Stdio::null())
        .status();
    if !made.is_ok_and(|status| status.success()) {
        println!("skipped: no openssl");
        return;
    }
    let files = format!("{},{}", cert.display(), key.display());
    let mut front = Front::start(&example("mux_worker"), &["--workers", "1", "--tls", &files]);
    let mut client = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", &front.address])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl starts");
    client.stdin.as_mut().expect("a pipe").write_all(&message(b"hello")).expect("it reads");
    let answered = answer(client.stdout.as_mut().expect("a pipe")).expect("an answer");
    assert_eq!(split(&answered).1, b"hello");
    // Quiet, it does not end with its input.
    client.kill().expect("it runs");
    client.wait().expect("it ends");
    // What is no TLS is said.
    front.connect().write_all(b"hello, this is no handshake").expect("it reads");
    assert!(front.until("was not attached").contains("TLS: "));
    let (code, errors) = front.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn what_cannot_be_served_is_told_in_a_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("an address").to_string();
    let worker = example("mux_worker");
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    std::fs::write(&file, b"").expect("a file");
    let file = format!("unix:{}", file.display());
    let any = "127.0.0.1:0";
    let rows: [(&[&str], i32, &str); 14] = [
        (&[&taken, "--framing", "line", "--worker", &worker], 7, "another program listens there"),
        (&[&file, "--framing", "line", "--worker", &worker], 7, "something that is no socket is there"),
        (&["nowhere", "--framing", "line", "--worker", &worker], 64, "an address is HOST:PORT or unix:PATH"),
        (&["[fe80::1]:0", "--framing", "line", "--worker", &worker], 7, "cannot listen on [fe80::1]:0"),
        (&[any, "--framing", "thrift-frame", "--worker", &worker], 64, "did you mean \"thrift-framed\"?"),
        (&[any, "--framing", "line", "--worker", "/nowhere/worker"], 4, "cannot start `/nowhere/worker`"),
        (&[any, "--framing", "line", "--worker", "true"], 4, "ended before it attached (exit status: 0)"),
        (&[any, "--framing", "line", "--worker", "'"], 64, "missing closing quote"),
        (
            &[any, "--framing", "line", "--worker", &worker, "--workers", "65"],
            64,
            "there are 1 to 64 workers",
        ),
        (&["--framing", "line", "--worker", &worker], 64, "<ADDR>"),
        (
            &[any, "--framing", "line", "--worker", &worker, "--tls", "a,b"],
            64,
            "a: cannot be read: No such file",
        ),
        (&[any, "--framing", "line", "--worker", &worker, "--tls", "a"], 64, "CERT,KEY"),
        (
            &["--framing", "line", "--worker", &worker, "--connected", "here"],
            64,
            "a peer is HOST:PORT or unix:PATH",
        ),
        (
            &["--framing", "line", "--worker", &worker, "--connected", "127.0.0.1:http"],
            64,
            "a peer is HOST:PORT or unix:PATH",
        ),
    ];
    for (args, code, text) in rows {
        let output = towpath().arg("mux").args(args).output().expect("towpath starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(text), "{args:?}: {errors}");
    }
}

#[test]
fn ctl_shows_the_mux_in_kcms_columns() {
    let directory = tempfile::tempdir().expect("a directory");
    let control = directory.path().join("control.sock");
    let control = control.to_str().expect("UTF-8");
    let front = Front::start(&example("mux_worker"), &["--workers", "2", "--control", control]);
    let mut stream = front.connect();
    for _ in 0..5 {
        ask(&mut stream, b"hello");
    }
    let ctl = |args: &[&str]| {
        let output =
            towpath().args(["ctl", "--socket", control]).args(args).output().expect("towpath starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), String::from_utf8(output.stdout).expect("text"), errors)
    };
    let (code, text, errors) = ctl(&["show", "mux"]);
    assert_eq!(code, Some(0), "{errors}");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][0], "Object");
    assert_eq!(rows[1][..2], ["mux", "5"]);
    assert!(rows[2][0] == "kcm-0" && rows[3][0] == "kcm-1" && rows[4][0] == "psock-1", "{text}");
    let (_, text, _) = ctl(&["show", "mux", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let stats = &json["mux"]["stats"];
    // The last one's answer may be here before that it is done is written down.
    assert_eq!(stats["rx_msgs"], 5, "{json}");
    assert!(stats["done"].as_u64() >= Some(4), "{json}");
    let pids: BTreeSet<u64> = json["mux"]["workers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|w| w["pid"].as_u64().expect("a number"))
        .collect();
    assert!(pids.contains(&u64::from(split(&ask(&mut stream, b"who")).0)));
    let (_, rings, _) = ctl(&["show", "rings", "--json"]);
    let rings: serde_json::Value = serde_json::from_str(&rings).expect("JSON");
    assert_eq!(rings["rings"].as_array().map(Vec::len), Some(2));
    // An engine without a mux says so; here there is none at all.
    front.finish();
    let (code, _, errors) = ctl(&["show", "mux"]);
    assert_eq!(code, Some(5), "{errors}");
}
