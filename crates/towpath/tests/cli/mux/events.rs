//! Connection events of worker processes; workers that speak first, close connections and reset them.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use super::daemon::{Mux, example, kill};

const LINE: [&str; 2] = ["--framing", "line"];

/// A client that sends and receives lines.
struct Client {
    stream: TcpStream,
    lines: BufReader<TcpStream>,
}

impl Client {
    fn of(mux: &Mux) -> Self {
        let stream = mux.connect();
        let lines = BufReader::new(stream.try_clone().expect("a descriptor"));
        Self { stream, lines }
    }

    fn send(&mut self, line: &str) {
        self.stream.write_all(format!("{line}\n").as_bytes()).expect("open");
    }

    /// The next line; empty at the end.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.line()
    }

    /// The words of the greeting.
    fn greeting(&mut self) -> Vec<String> {
        let line = self.line();
        assert!(line.starts_with("opened "), "{line}");
        line.split(' ').map(str::to_owned).collect()
    }
}

fn start(mode: &str, more: &[&str]) -> Mux {
    Mux::start(&format!("{} {mode}", example("event_worker")), &[&LINE, more].concat())
}

/// Asks for ended events until there are `count`.
fn ends(client: &mut Client, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    while all.len() < count {
        let more = client.ask("ends");
        all.extend(more.split_terminator(';').map(|end| end.split_once(' ').expect("a cause").1.to_owned()));
        thread::yield_now();
    }
    all
}

#[test]
fn opened_has_the_addresses_and_precedes_the_messages() {
    for order in ["none", "replies", "serial", "sticky"] {
        let mux = start("", &["--order", order, "--workers", "1"]);
        let mut client = Client::of(&mux);
        client.send("early");
        let greeting = client.greeting();
        let local = client.stream.local_addr().expect("an address").to_string();
        assert_eq!(greeting[2..], ["false", &local, &mux.address, &mux.address], "{order}");
        assert_eq!(client.line(), format!("{} early", greeting[1]), "{order}");
        drop(client);
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
    }
}

#[test]
fn a_worker_without_events_sees_none() {
    let mux = start("deaf", &["--workers", "1"]);
    let mut client = Client::of(&mux);
    assert!(client.ask("one").ends_with(" one"), "no greeting");
    assert_eq!(client.ask("ends"), "");
}

#[test]
fn ended_has_the_cause() {
    let mux = start("silent", &["--workers", "1", "--message-max", "100", "--timeout", "60"]);
    let mut observer = Client::of(&mux);
    type Act = fn(&mut Client);
    let rows: [(&str, Act); 5] = [
        ("clean", |_| {}),
        ("inside", |client| client.stream.write_all(b"inside").expect("open")),
        ("too_big", |client| client.stream.write_all(&[b'x'; 200]).expect("open")),
        ("closed", |client| assert_eq!(client.ask("quit"), "bye")),
        ("reset_by_worker", |client| client.send("reset")),
    ];
    for (cause, act) in rows {
        let mut client = Client::of(&mux);
        assert!(client.ask("hello").ends_with(" hello"));
        act(&mut client);
        let ended = client.stream.shutdown(Shutdown::Write);
        assert_eq!(ends(&mut observer, 1), [cause], "{ended:?}");
    }
    // A connection without a message.
    drop(Client::of(&mux));
    assert_eq!(ends(&mut observer, 1), ["clean"]);
}

#[test]
fn another_worker_gets_opened_if_the_first_one_dies_with_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let mark = directory.path().join("mark");
    let mut mux = start(&format!("late {}", mark.display()), &["--workers", "2"]);
    let mut client = Client::of(&mux);
    assert_eq!(client.greeting()[2], "false", "nothing was sent before");
    mux.until("another one is started");
    assert!(client.ask("hello").ends_with(" hello"));
}

#[test]
fn another_worker_gets_opened_if_the_first_one_dies_after_it() {
    let mux = start("", &["--workers", "2", "--order", "sticky", "--on-worker-end", "move"]);
    let mut client = Client::of(&mux);
    let first = client.greeting();
    kill(first[1].parse().expect("a number"), Signal::KILL);
    let second = client.greeting();
    assert_eq!((&first[2][..], &second[2][..]), ("false", "true"), "the second one knows that it was served");
    assert_ne!(first[1], second[1]);
    assert_eq!(client.ask("hello"), format!("{} hello", second[1]));
}

#[test]
fn a_worker_sends_to_and_closes_connections_that_it_opened() {
    let mut mux = start("", &["--workers", "1", "--redeliver", "0"]);
    let (mut one, mut two) = (Client::of(&mux), Client::of(&mux));
    one.greeting();
    two.greeting();
    let name = two.ask("name");
    assert_eq!(one.ask(&format!("push {name} unasked")), "ok");
    assert_eq!(two.line(), "unasked");
    assert_eq!(one.ask(&format!("close {name}")), "ok");
    assert_eq!(two.line(), "", "it is closed");
    // It has ended: no violation.
    assert_eq!(one.ask(&format!("close {name}")), "ok");
    // A connection that never was, and a close with a payload.
    for attack in ["close 4000000 1", "payload"] {
        let mut bad = Client::of(&mux);
        bad.greeting();
        bad.send(attack);
        mux.until("detached: ");
    }
}

#[test]
fn a_reset_is_seen_as_econnreset() {
    let mux = start("", &["--workers", "1"]);
    let mut client = Client::of(&mux);
    client.greeting();
    client.send("reset");
    let error = client.stream.read(&mut [0; 16]).expect_err("a reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[towpath_testenv::needs("curl")]
#[test]
fn http_1_0_ends_with_the_connection() {
    let more = ["--framing", r#"delimiter="\r\n\r\n""#, "--workers", "2"];
    let mux = Mux::start(&format!("{} http", example("event_worker")), &more);
    let url = format!("http://{}/", mux.address);
    // Without a length, the end of the connection is the end of the body.
    let output = Command::new("curl").args(["-sS", "--http1.0", "--max-time", "60", &url]).output();
    let output = output.expect("curl starts");
    let said = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((&*said.0, &*said.1), ("hello\n", ""));
}

#[towpath_testenv::needs("python3")]
#[test]
fn smtplib_is_greeted_and_quits() {
    let mux = Mux::start(&example("smtp"), &["--framing", "smtp", "--workers", "2"]);
    let (host, port) = mux.address.rsplit_once(':').expect("a port");
    let script = format!(
        "import smtplib\n\
         for _ in range(3):\n\
        \x20   with smtplib.SMTP({host:?}, {port}, timeout=60) as smtp:\n\
        \x20       assert smtp.noop()[0] == 250\n\
        \x20       assert smtp.sendmail('a@example', ['b@example'], 'Subject: hello\\n\\n.dot\\nworld\\n') == {{}}\n\
        \x20       code, text = smtp.quit()\n\
        \x20       assert (code, text) == (221, b'bye'), (code, text)\n"
    );
    let output = Command::new("python3").args(["-c", &script]).output().expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}

/// Connections come and go while workers are killed. Every connection is greeted, and every message is answered or its connection ends.
#[test]
fn nothing_is_lost_when_workers_with_events_are_killed() {
    for order in ["none", "serial", "sticky"] {
        let more = ["--workers", "3", "--order", order, "--on-worker-end", "move", "--redeliver", "10"];
        let mux = start("", &more);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..40 {
                        let mut client = Client::of(&mux);
                        let pid = client.greeting()[1].clone();
                        for number in 0..5 {
                            client.send(&format!("{round} {number}"));
                            if number == 2 && round % 8 == 0 {
                                kill(pid.parse().expect("a number"), Signal::KILL);
                            }
                            // A worker that continues the connection reports that.
                            let answer = std::iter::from_fn(|| Some(client.line()));
                            let answer = answer.into_iter().find(|line| !line.starts_with("opened "));
                            assert!(answer.is_some_and(|line| line.ends_with(&format!("{round} {number}"))));
                        }
                    }
                });
            }
        });
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{order}: {errors}");
        let (received, done, undone, left) = super::daemon::counted(&errors);
        assert_eq!((received, done, undone, left), (4 * 40 * 5, 4 * 40 * 5, 0, 0), "{order}: {errors}");
    }
}

#[test]
fn connections_of_a_sticky_worker_close_with_a_goodbye() {
    for (framing, line, goodbye) in [
        ("line", "hello\n", ""),
        ("resp", "PING\r\n", "-ERR the server process of this connection ended\r\n"),
    ] {
        let worker = format!("{} deaf", example("event_worker"));
        let mut mux = Mux::start(&worker, &["--workers", "2", "--order", "sticky", "--framing", framing]);
        let mut client = Client::of(&mux);
        client.stream.write_all(line.as_bytes()).expect("open");
        let pid = client.line().split(' ').next().and_then(|pid| pid.parse().ok()).expect("a process id");
        kill(pid, Signal::KILL);
        let mut rest = String::new();
        client.lines.read_to_string(&mut rest).expect("a clean end");
        assert_eq!(rest, goodbye, "{framing}");
        let line = mux.until("its worker ended");
        assert!(line.contains("psock-"), "{line}");
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
    }
}

#[test]
fn hangup_leaves_connections_on_the_old_sticky_worker() {
    let mut mux = start("", &["--workers", "1", "--order", "sticky"]);
    let mut old = Client::of(&mux);
    let before = old.greeting()[1].clone();
    mux.signal(Signal::HUP);
    mux.until("all workers were replaced");
    let mut new = Client::of(&mux);
    let after = new.greeting()[1].clone();
    assert_ne!(before, after, "new connections have the new worker");
    assert_eq!(old.ask("still here"), format!("{before} still here"));
    assert_eq!(old.ask("quit"), "bye");
    // Without connections, the old worker leaves. The next replacement is possible then.
    loop {
        mux.signal(Signal::HUP);
        let line = mux.until("replaced");
        if line.contains("all workers were replaced") {
            break;
        }
        assert!(line.contains("ignored"), "{line}");
    }
    assert_eq!(new.ask("here"), format!("{after} here"));
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_retired_worker_closes_its_connections_at_the_deadline() {
    let mut mux = start("", &["--workers", "1", "--order", "sticky", "--drain", "0.3"]);
    let mut old = Client::of(&mux);
    old.greeting();
    mux.signal(Signal::HUP);
    mux.until("its worker ended");
    assert_eq!(old.line(), "", "it is closed");
    let mut new = Client::of(&mux);
    new.greeting();
}

/// `--redeliver 0`: a message that a worker has begun is never processed again, also if it shared a frame with others.
#[test]
fn without_redelivery_no_begun_message_is_processed_twice() {
    let directory = tempfile::tempdir().expect("a directory");
    for mode in ["journal", "journal-recv"] {
        let journal = directory.path().join(mode);
        let worker = format!("{} {mode} {}", example("event_worker"), journal.display());
        let more = ["--workers", "2", "--redeliver", "0", "--undone", "keep", "--timeout", "60"];
        let mux = Mux::start(&worker, &[&LINE[..], &more].concat());
        let mut client = Client::of(&mux);
        // Short messages, so that several share a frame.
        let mut sent = 0;
        for round in 0..60 {
            let lines: String = (0..40)
                .map(|number| match (round % 6, number) {
                    (5, 20) => format!("die {round}-{number}\n"),
                    _ => format!("{round}-{number}\n"),
                })
                .collect();
            client.stream.write_all(lines.as_bytes()).expect("open");
            sent += 40;
        }
        // A drain reads nothing more.
        let lines = || std::fs::read_to_string(&journal).map_or(0, |text| text.lines().count());
        while lines() < sent {
            thread::sleep(Duration::from_millis(5));
        }
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{mode}: {errors}");
        let text = std::fs::read_to_string(&journal).expect("a journal");
        let mut lines: Vec<&str> = text.lines().collect();
        let all = lines.len();
        lines.sort_unstable();
        lines.dedup();
        assert_eq!(lines.len(), all, "{mode}: no message twice");
        assert_eq!(all, sent, "{mode}: every message once; {errors}");
        let (received, done, undone, left) = super::daemon::counted(&errors);
        assert_eq!((received, left), (sent as u64, 0), "{mode}: {errors}");
        assert!(undone >= 10 && done + undone == received, "{mode}: {errors}");
    }
}
