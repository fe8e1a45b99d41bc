//! Workers that exceed their authority cause no loss for an honest worker and an honest client.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use serde_json::Value;

use super::daemon::{Mux, answer, ask, counted, example, message, split, towpath};

/// A mux with a control socket.
struct Scene {
    mux: Mux,
    control: String,
    _directory: tempfile::TempDir,
}

impl Scene {
    fn start(more: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let control = directory.path().join("control.sock").to_str().expect("UTF-8").to_owned();
        let mux = Mux::start(&example("mux_worker"), &[more, &["--control", &control]].concat());
        Self { mux, control, _directory: directory }
    }

    /// Two workers. Each of the two clients has a separate worker.
    fn with_two(more: &[&str]) -> (Self, Client, Client) {
        // A message that makes its worker exceed its authority is not given to the other one.
        let alone = [
            "--workers",
            "2",
            "--order",
            "sticky",
            "--redeliver",
            "0",
            "--undone",
            "keep",
            "--on-worker-end",
            "move",
        ];
        let scene = Self::start(&[&alone[..], more].concat());
        let (mut bad, mut good) = (scene.mux.connect(), scene.mux.connect());
        let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
        let wait = format!("wait {}", gate.local_addr().expect("an address"));
        bad.write_all(&message(wait.as_bytes())).expect("open");
        let (held, _) = gate.accept().expect("a worker");
        let others = split(&ask(&mut good, b"who")).0;
        drop(held);
        let worker = split(&answer(&mut bad).expect("an answer")).0;
        assert_ne!(worker, others);
        (scene, Client { stream: bad, worker }, Client { stream: good, worker: others })
    }

    fn shown(&self) -> Value {
        let output = towpath().args(["ctl", "--socket", &self.control, "show", "mux", "--json"]).output();
        serde_json::from_slice::<Value>(&output.expect("towpath starts").stdout).expect("JSON")["mux"].take()
    }

    /// The violations that were counted.
    fn violations(&self) -> Vec<(String, u64)> {
        let shown = self.shown();
        let counters = shown["violations"].as_object().expect("an object");
        let counters = counters.iter().map(|(name, count)| (name.clone(), count.as_u64().expect("a number")));
        counters.filter(|(name, count)| *count > 0 && name != "barred").collect()
    }

    /// Index and generation of a client's connection.
    fn connection(&self, client: &TcpStream) -> (u64, u64) {
        let (shown, local) = (self.shown(), client.local_addr().expect("an address").to_string());
        let rows = shown["psocks"].as_array().expect("a list");
        let row = rows.iter().find(|row| row["peer"] == local.as_str()).expect("it is connected");
        (row["index"].as_u64().expect("a number"), row["generation"].as_u64().expect("a number"))
    }
}

struct Client {
    stream: TcpStream,
    /// The worker of its connection.
    worker: u32,
}

impl Client {
    fn send(&mut self, body: &str) {
        self.stream.write_all(&message(body.as_bytes())).expect("open");
    }

    /// Sends numbered messages at once. Each is answered once, in order, by its worker.
    fn check(&mut self, name: &str) {
        let body = |number: u32| format!("number {number}").into_bytes();
        let asked: Vec<u8> = (0..100).flat_map(|number| message(&body(number))).collect();
        self.stream.write_all(&asked).expect("open");
        for number in 0..100 {
            let answered = answer(&mut self.stream).expect("an answer");
            assert_eq!(split(&answered), (self.worker, &body(number)[..]), "{name}");
        }
    }
}

#[test]
fn a_worker_that_exceeds_its_authority_is_detached_alone() {
    // Rows: message; counter; answers that its client gets before the violation; its message is given up.
    let rows = [
        ("again", "again", 1, 0),
        ("unheld", "unheld", 0, 1),
        ("more", "answers", 0, 1),
        ("frame", "frame", 0, 1),
        ("to 4000000 1 x", "connection", 0, 1),
        ("to OTHER x", "connection", 0, 1),
    ];
    for (attack, counter, answers, given_up) in rows {
        let (mut scene, mut bad, mut good) = Scene::with_two(&[]);
        let (index, generation) = scene.connection(&good.stream);
        bad.send(&attack.replace("OTHER", &format!("{index} {generation}")));
        good.check(attack);
        for _ in 0..answers {
            assert_eq!(split(&answer(&mut bad.stream).expect("an answer")), (bad.worker, attack.as_bytes()));
        }
        let line = scene.mux.until("detached: ");
        assert!(line.contains(&format!("process {}: ", bad.worker)), "{attack}: {line}");
        assert!(line.contains("another one is started in 1000 ms"), "{attack}: {line}");
        good.check(attack);
        // The connection of the detached worker continues with another worker.
        let again = ask(&mut bad.stream, b"still here");
        assert_eq!(split(&again).1, b"still here", "{attack}");
        assert_ne!(split(&again).0, bad.worker, "{attack}");
        assert_eq!(scene.violations(), [(counter.to_owned(), 1)], "{attack}");
        assert_eq!(scene.shown()["violations"]["barred"], 1, "{attack}");
        drop((bad, good));
        let (code, errors) = scene.mux.finish();
        assert_eq!(code, Some(0), "{attack}: {errors}");
        assert_eq!(counted(&errors), (204, 204 - given_up, given_up, 0), "{attack}: {errors}");
    }
}

/// The answer was begun, so its connection ends.
#[test]
fn parts_without_bytes_are_bounded() {
    let (scene, mut bad, mut good) = Scene::with_two(&[]);
    bad.send("empty 1024");
    assert_eq!(split(&answer(&mut bad.stream).expect("an answer")), (bad.worker, &b"empty 1024"[..]));
    assert_eq!(scene.violations(), []);
    bad.send("empty 1025");
    good.check("while a worker sends parts without bytes");
    assert_eq!(bad.stream.read(&mut [0]).expect("the end"), 0);
    assert_eq!(scene.violations(), [("empty_parts".to_owned(), 1)]);
    good.check("after it was detached");
}

#[test]
fn a_worker_that_may_push_sends_to_any_connection() {
    let (scene, mut bad, mut good) = Scene::with_two(&["--worker-may", "push"]);
    let (index, generation) = scene.connection(&good.stream);
    let push = format!("to {index} {generation} \0\0\0\x04push");
    assert_eq!(split(&ask(&mut bad.stream, push.as_bytes())).1, push.as_bytes());
    assert_eq!(answer(&mut good.stream).expect("a message"), b"push");
    bad.send("again");
    for _ in 0..2 {
        assert_eq!(split(&answer(&mut bad.stream).expect("an answer")), (bad.worker, &b"again"[..]));
    }
    // An answer to a message that the worker does not have remains a violation.
    bad.send("unheld");
    good.check("push");
    // Before that, the worker may begin the next message, which is then not given again.
    while scene.violations().is_empty() {
        std::thread::yield_now();
    }
    assert_ne!(split(&ask(&mut bad.stream, b"who")).0, bad.worker);
    assert_eq!(scene.violations(), [("unheld".to_owned(), 1)]);
}

#[test]
fn a_worker_sends_to_the_connections_of_its_messages_until_they_end() {
    let scene = Scene::start(&["--workers", "1"]);
    let (mut stream, mut other) = (scene.mux.connect(), scene.mux.connect());
    let own = b"own \0\0\0\x05hello";
    stream.write_all(&message(own)).expect("open");
    // A worker's message and its answer, in any order. The answer begins with a digit.
    let mut got = [answer(&mut stream).expect("a message"), answer(&mut stream).expect("an answer")];
    got.sort();
    assert_eq!((split(&got[0]).1, &got[1][..]), (&own[..], &b"hello"[..]));
    // In parts, the answer is one answer.
    stream.write_all(&message(b"parts 3")).expect("open");
    assert_eq!(split(&answer(&mut stream).expect("an answer")).1, b"parts 3");
    let place = String::from_utf8(split(&ask(&mut other, b"remember")).1.to_vec()).expect("text");
    let to = format!("to {place} \0\0\0\x04mine");
    assert_eq!(split(&ask(&mut stream, to.as_bytes())).1, to.as_bytes());
    assert_eq!(answer(&mut other).expect("a message"), b"mine");
    drop(other);
    // The message for the connection that has ended returns with EPIPE; that is not a violation.
    while scene.shown()["stats"]["unattach"] != 1 {
        std::thread::yield_now();
    }
    assert_eq!(split(&ask(&mut stream, to.as_bytes())).1, to.as_bytes());
    loop {
        let unsent = ask(&mut stream, b"unsent");
        let unsent = String::from_utf8_lossy(split(&unsent).1).into_owned();
        if !unsent.is_empty() {
            assert!(unsent.starts_with("32 Some("), "{unsent}");
            break;
        }
    }
    assert_eq!(scene.violations(), []);
    assert_eq!(scene.shown()["lost"]["gone"], 1);
}

#[test]
fn a_message_without_a_connection_needs_the_right_in_connected_mode() {
    for (more, pushed) in [(&[][..], false), (&["--worker-may", "push"], true)] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let peer = listener.local_addr().expect("an address").to_string();
        let base = [
            "--workers",
            "1",
            "--connected",
            &peer,
            "--redeliver",
            "0",
            "--undone",
            "keep",
            "--on-worker-end",
            "move",
        ];
        let scene = Scene::start(&[&base[..], more].concat());
        let (mut stream, _) = listener.accept().expect("it connects");
        stream.write_all(&message(b"send \0\0\0\x05hello")).expect("open");
        if pushed {
            let mut got = [answer(&mut stream).expect("a message"), answer(&mut stream).expect("an answer")];
            got.sort();
            assert_eq!(got[1], b"hello");
        }
        assert_eq!(split(&ask(&mut stream, b"next")).1, b"next");
        let expected = if pushed { vec![] } else { vec![("push".to_owned(), 1)] };
        assert_eq!(scene.violations(), expected);
    }
}

/// Many answers of megabytes at a time: the pool copies a bounded number of bytes before it serves the other worker.
#[test]
fn huge_answers_delay_nothing_of_another_worker() {
    let (scene, mut bad, mut good) = Scene::with_two(&[]);
    for _ in 0..4 {
        bad.send("huge 7000000");
    }
    good.check("huge");
    for _ in 0..4 {
        assert_eq!(answer(&mut bad.stream).expect("an answer").len(), 7_000_000);
    }
    good.check("huge");
    assert_eq!(scene.violations(), []);
}
