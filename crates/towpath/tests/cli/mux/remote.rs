//! `towpath mux --remote` with `towpath worker` and nats-server.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;

use rustix::process::Signal;
use towpath_port::netns::{until, within};

use super::daemon::{Mux, answer, ask, counted, example, kill, message, split, towpath};

/// The permissions of the guide.
const SERVER: &str = r#"
listen: "127.0.0.1:4222"
authorization {
  users = [
    { user: front, password: one, permissions: {
      publish: ["jobs.host.*.front"]
      subscribe: ["jobs.offer.*", "jobs.front.front.*"] } }
    { user: h1, password: two, permissions: {
      publish: ["jobs.offer.h1", "jobs.front.*.h1"]
      subscribe: ["jobs.host.h1.*"] } }
  ]
}
"#;

/// nats-server(1) in this thread's namespace.
struct Server(Child);

impl Server {
    fn start() -> Self {
        Self::with(&["--addr", "127.0.0.1"])
    }

    fn with(args: &[&str]) -> Self {
        let mut command = Command::new("nats-server");
        let server = Self(command.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        until(|| TcpStream::connect("127.0.0.1:4222").is_ok());
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `towpath worker`.
struct Host {
    child: Child,
    stderr: BufReader<ChildStderr>,
}

impl Host {
    fn start(more: &[&str]) -> Self {
        let mut host = Self::begin(more);
        host.until("connected to");
        host
    }

    fn begin(more: &[&str]) -> Self {
        let worker = example("mux_worker");
        let mut child = towpath()
            .args(["worker", "--subject", "jobs", "--log-level", "info"])
            .args(["--exec", &worker].iter().filter(|_| !more.contains(&"--exec")))
            .args(["--drain", "60"])
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Self { child, stderr }
    }

    fn until(&mut self, what: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.stderr.read_line(&mut line).unwrap() > 0, "it ended without: {what}");
            if line.contains(what) {
                return line;
            }
        }
    }

    /// Ends it with this signal. Returns its exit code and the rest of its log.
    fn finish(mut self, signal: Signal) -> (Option<i32>, String) {
        kill(self.child.id(), signal);
        let mut errors = String::new();
        self.stderr.read_to_string(&mut errors).unwrap();
        (self.child.wait().unwrap().code(), errors)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A mux whose workers are all remote.
fn front(more: &[&str]) -> Mux {
    Mux::start("", &[&["--remote", "jobs", "--log-level", "info"], more].concat())
}

/// The parent of a process.
fn parent(pid: u32) -> u32 {
    let status =
        std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    line.and_then(|parent| parent.trim().parse().ok()).unwrap_or(0)
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_program_runs_unchanged_on_another_machine() {
    within(|| {
        let _server = Server::start();
        let host = Host::start(&["--workers", "2"]);
        let mux = front(&[]);
        let mut stream = mux.connect();
        let answered = ask(&mut stream, b"hello");
        let (pid, echo) = split(&answered);
        assert_eq!((echo, parent(pid)), (&b"hello"[..], host.child.id()));
        // An answer in parts, and messages and answers longer than a message of the bus and than the window.
        assert_eq!(split(&ask(&mut stream, b"parts 4")).1, b"parts 4");
        assert_eq!(ask(&mut stream, b"huge 3000000"), vec![b'x'; 3_000_000]);
        let long = vec![b'y'; 5_000_000];
        assert_eq!(split(&ask(&mut stream, &long)).1, long);
        // A message of the worker to the connection, before the answer.
        stream.write_all(&message(b"own \0\0\0\x02hi")).unwrap();
        assert_eq!(answer(&mut stream).unwrap(), b"hi");
        assert_eq!(split(&answer(&mut stream).unwrap()).1, b"own \0\0\0\x02hi");
        // Many at once.
        let asked: Vec<u8> = (0..500u32).flat_map(|number| message(&number.to_be_bytes())).collect();
        stream.write_all(&asked).unwrap();
        let mut answers: Vec<u32> = (0..500)
            .map(|_| u32::from_be_bytes(split(&answer(&mut stream).unwrap()).1.try_into().unwrap()))
            .collect();
        answers.sort_unstable();
        assert_eq!(answers, (0..500).collect::<Vec<_>>());
        // The mux drains as with local workers: the last message is answered.
        stream.write_all(&message(b"last")).unwrap();
        assert_eq!(split(&answer(&mut stream).unwrap()).1, b"last");
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
        let (received, done, undone, left) = counted(&errors);
        assert_eq!((received, done, undone, left), (506, 506, 0, 0), "{errors}");
        let (code, errors) = host.finish(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
        assert!(errors.contains(" 0 broken"), "{errors}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn messages_of_a_killed_host_go_to_another_one() {
    within(|| {
        let _server = Server::start();
        let mut one = Host::start(&["--workers", "2"]);
        let mux = front(&["--redeliver", "100"]);
        let mut stream = mux.connect();
        ask(&mut stream, b"there");
        // Two messages that the workers of the first host have.
        let gate = TcpListener::bind("127.0.0.1:0").unwrap();
        let body = format!("wait {}", gate.local_addr().unwrap());
        let mut waiting = [mux.connect(), mux.connect()];
        waiting.iter_mut().for_each(|stream| stream.write_all(&message(body.as_bytes())).unwrap());
        let held: Vec<_> = (0..2).map(|_| gate.accept().unwrap().0).collect();
        let two = Host::start(&["--workers", "2"]);
        let id = two.child.id();
        let clients: Vec<_> = (0..3u32)
            .map(|client| {
                let mut stream = mux.connect();
                thread::spawn(move || {
                    for number in 0..100u32 {
                        let body = [client.to_be_bytes(), number.to_be_bytes()].concat();
                        assert_eq!(split(&ask(&mut stream, &body)).1, body);
                    }
                    stream
                })
            })
            .collect();
        one.child.kill().unwrap();
        one.child.wait().unwrap();
        // They wait again, at workers of the second host.
        let again: Vec<_> = (0..2).map(|_| gate.accept().unwrap().0).collect();
        drop((held, again));
        for stream in &mut waiting {
            let answered = answer(stream).unwrap();
            let (pid, echo) = split(&answered);
            assert_eq!((echo, parent(pid)), (body.as_bytes(), id));
        }
        let clients: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        // No second answer follows: the connections end with the mux, and have nothing more.
        let (code, errors) = mux.finish();
        for mut stream in clients.into_iter().chain(waiting) {
            assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0, "a second answer");
        }
        assert_eq!(code, Some(0), "{errors}");
        let (received, done, undone, left) = counted(&errors);
        assert_eq!((received, done, undone, left), (303, 303, 0, 0), "{errors}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_host_that_ends_answers_what_it_has() {
    within(|| {
        let _server = Server::start();
        let mut host = Host::start(&["--workers", "1"]);
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("ctl.sock");
        let control = control.to_str().unwrap();
        let mux = front(&["--control", control]);
        let mut stream = mux.connect();
        ask(&mut stream, b"there");
        let gate = TcpListener::bind("127.0.0.1:0").unwrap();
        let body = format!("wait {}", gate.local_addr().unwrap());
        stream.write_all(&message(body.as_bytes())).unwrap();
        let held = gate.accept().unwrap();
        kill(host.child.id(), Signal::TERM);
        until(|| {
            let shown =
                towpath().args(["ctl", "--socket", control, "show", "mux", "--json"]).output().unwrap();
            let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
            shown["mux"]["remote"]["hosts"][0]["leaving"] == true
        });
        // The mux does not give it this one.
        let mut other = mux.connect();
        other.write_all(&message(b"other")).unwrap();
        drop(held);
        assert_eq!(split(&answer(&mut stream).unwrap()).1, body.as_bytes());
        assert_eq!(host.child.wait().unwrap().code(), Some(0));
        let next = Host::start(&["--workers", "1"]);
        let answered = answer(&mut other).unwrap();
        let (pid, echo) = split(&answered);
        assert_eq!((echo, parent(pid)), (&b"other"[..], next.child.id()));
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn workers_come_back_after_a_restart_of_the_server() {
    within(|| {
        // Without a server, the host says so and tries again, as the front does.
        let mut host = Host::begin(&["--workers", "1"]);
        host.until("cannot connect to nats://127.0.0.1:4222");
        let mut mux = front(&[]);
        let mut stream = mux.connect();
        for _ in 0..2 {
            stream.write_all(&message(b"early")).unwrap();
            let server = Server::start();
            assert_eq!(split(&answer(&mut stream).unwrap()).1, b"early");
            drop(server);
            mux.until("the connection ended");
        }
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn the_permissions_of_the_guide_are_enough_and_local_workers_come_first() {
    within(|| {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("nats.conf");
        std::fs::write(&file, SERVER).unwrap();
        let _server = Server::with(&["--config", file.to_str().unwrap()]);
        let mut host =
            Host::start(&["--workers", "1", "--nats", "nats://h1:two@127.0.0.1:4222", "--nats-name", "h1"]);
        let more = [
            "--remote",
            "jobs",
            "--nats",
            "nats://front:one@127.0.0.1:4222",
            "--nats-name",
            "front",
            "--workers",
            "1",
        ];
        let mux = Mux::start(&example("mux_worker"), &more);
        host.until("front front is there");
        let mut stream = mux.connect();
        let local = split(&ask(&mut stream, b"one")).0;
        assert_eq!(parent(local), mux.pid());
        // The local worker is busy: the remote one gets the next message.
        let gate = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut busy = mux.connect();
        busy.write_all(&message(format!("wait {}", gate.local_addr().unwrap()).as_bytes())).unwrap();
        let held = gate.accept().unwrap();
        assert_eq!(parent(split(&ask(&mut stream, b"two")).0), host.child.id());
        drop(held);
        assert_eq!(split(&answer(&mut busy).unwrap()).0, local);
        // Another name than its own is refused, and both sides say what to do.
        let mut other = Host::begin(&["--nats", "nats://h1:two@127.0.0.1:4222", "--nats-name", "h2"]);
        let said = other.until("the server: ").to_lowercase();
        assert!(said.contains("permissions violation") && said.contains("h2"), "{said}");
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
    });
}

/// Publishes messages as another client of the server.
fn publish(messages: &[(&str, Vec<u8>)]) {
    let mut stream = TcpStream::connect("127.0.0.1:4222").unwrap();
    let mut bytes = b"CONNECT {\"verbose\":false}\r\n".to_vec();
    for (subject, payload) in messages {
        bytes.extend(format!("PUB {subject} {}\r\n", payload.len()).bytes());
        bytes.extend(payload);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"PING\r\n");
    stream.write_all(&bytes).unwrap();
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("PONG") {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the server has closed the connection");
    }
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn hostile_messages_are_refused_and_counted() {
    within(|| {
        let _server = Server::start();
        let host = Host::start(&["--workers", "1", "--nats-name", "h1"]);
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("ctl.sock");
        let control = control.to_str().unwrap();
        let mut mux = front(&["--nats-name", "front", "--control", control]);
        let mut stream = mux.connect();
        let pid = split(&ask(&mut stream, b"before")).0;
        let header = |kind: u8, rest: &[u8]| {
            [b"TWWK\x01".to_vec(), vec![kind, 0, 0], vec![9; 16], rest.to_vec()].concat()
        };
        let mut messages = Vec::new();
        for subject in ["jobs.host.h1.front", "jobs.front.front.h1", "jobs.offer.h1", "jobs.offer.x"] {
            messages.push((subject, Vec::new()));
            messages.push((subject, b"TWWK".to_vec()));
            messages.push((subject, vec![0xff; 200_000]));
            for kind in 0..12 {
                messages.push((subject, header(kind, &[])));
                messages.push((subject, header(kind, &[0xff; 40])));
            }
        }
        messages.push(("jobs.offer.old", [&b"TWWK\x09"[..], &[1; 30]].concat()));
        messages.push(("jobs.host.h1.old", [&b"TWWK\x09"[..], &[1; 30]].concat()));
        publish(&messages);
        mux.until("worker host old has version 9 of the protocol and this front version 1");
        assert_eq!(split(&ask(&mut stream, b"after")), (pid, &b"after"[..]));
        let metrics = towpath().args(["ctl", "--socket", control, "metrics"]).output().unwrap();
        let metrics = String::from_utf8(metrics.stdout).unwrap();
        let version = "towpath_remote_refused_messages_total{mux=\"mux\",reason=\"version\"} 1\n";
        assert!(metrics.contains(version), "{metrics}");
        let (code, errors) = mux.finish();
        assert_eq!(code, Some(0), "{errors}");
        let (code, errors) = host.finish(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
        assert!(errors.contains("front old has version 9"), "{errors}");
        let refused = errors.split("broken; ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        assert!(refused.parse::<u64>().unwrap() >= 15, "{errors}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_side_that_is_alone_says_what_to_do() {
    within(|| {
        let _server = Server::start();
        let mut host = Host::begin(&["--exec", "/nonexistent/worker", "--workers", "1"]);
        let mut mux = Mux::start("", &["--remote", "tasks", "--log-level", "info"]);
        host.until("no front at `jobs`: run `towpath mux --remote jobs`");
        mux.until("no worker host at `tasks`: run `towpath worker --subject tasks`");
        // A program that cannot be started is named at both ends.
        let mut other = front(&[]);
        host.until("cannot start `/nonexistent/worker`");
        other.until("cannot start `/nonexistent/worker`");
    });
}

#[test]
fn wrong_subjects_and_servers_are_refused() {
    let local = |more: &[&'static str]| {
        [&["mux", "127.0.0.1:0", "--framing", "line", "--worker", "x"], more].concat()
    };
    let rows = [
        (vec!["worker", "--subject", "jobs.*", "--exec", "x"], "a subject has words of letters"),
        (vec!["worker", "--subject", "jobs", "--exec", ""], "--exec has no command"),
        (vec!["worker", "--subject", "jobs", "--exec", "x", "--nats", "http://x"], "write nats://HOST:PORT"),
        (vec!["worker", "--subject", "jobs", "--exec", "x", "--nats-name", "a.b"], "at most 64 letters"),
        (
            vec!["mux", "127.0.0.1:0", "--framing", "line", "--remote", "a..b"],
            "a subject has words of letters",
        ),
        (vec!["mux", "127.0.0.1:0", "--framing", "line"], "--worker <COMMAND>"),
        // Options without the one that they belong to.
        (local(&["--nats", "nats://127.0.0.1"]), "--remote <SUBJECT>"),
        (local(&["--nats-credentials", "f"]), "--remote <SUBJECT>"),
        (local(&["--nats-tls"]), "--remote <SUBJECT>"),
        (local(&["--nats-tls-ca", "f"]), "--remote <SUBJECT>"),
        (local(&["--nats-tls-identity", "c,k"]), "--remote <SUBJECT>"),
        (local(&["--nats-name", "f"]), "--remote <SUBJECT>"),
        (local(&["--remote-workers", "2"]), "--remote <SUBJECT>"),
        (
            vec!["mux", "127.0.0.1:0", "--framing", "line", "--remote", "jobs", "--workers", "2"],
            "--worker <COMMAND>",
        ),
    ];
    for (args, expected) in rows {
        let output = towpath().args(&args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(64) && said.contains(expected), "{args:?}: {said}");
    }
}
