//! Draining a worker pool, and handing over to a successor.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use super::daemon::{Mux, answer, ask, counted, discarded, example, message, split};

#[test]
fn draining_answers_received_requests() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1"]);
    let mut stream = mux.connect();
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let body = format!("wait {}", gate.local_addr().expect("an address"));
    stream.write_all(&message(body.as_bytes())).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    mux.signal(Signal::TERM);
    // After it has started to drain, connections are refused.
    while TcpStream::connect(&mux.address).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    drop(holder);
    assert_eq!(split(&answer(&mut stream).expect("an answer")).1, body.as_bytes());
    let (code, errors) = mux.ended();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_worker_that_dies_during_a_drain_is_restarted() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1"]);
    let mut stream = mux.connect();
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let directory = tempfile::tempdir().expect("a directory");
    let wait = format!("wait {}", gate.local_addr().expect("an address"));
    let die = format!("die once {}", directory.path().join("mark").display());
    let both = [&wait, &die].map(|body| message(body.as_bytes())).concat();
    stream.write_all(&both).expect("open");
    let (holder, _) = gate.accept().expect("the worker");
    mux.signal(Signal::TERM);
    while TcpStream::connect(&mux.address).is_ok() {
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
    let (code, errors) = mux.ended();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains(" 1 worker started again"), "{errors}");
}

#[test]
fn a_stuck_worker_does_not_block_the_end() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--drain", "0.2"]);
    let mut stream = mux.connect();
    let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
    let body = format!("wait {}", gate.local_addr().expect("an address"));
    stream.write_all(&message(body.as_bytes())).expect("open");
    let (mut holder, _) = gate.accept().expect("the worker");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("ended before everything was drained"), "{errors}");
    assert!(errors.contains("not drained in time"), "{errors}");
    assert!(errors.contains("0 done, 0 given up, 0 discarded, 1 begun, 0 not begun"), "{errors}");
    assert_eq!(holder.read(&mut [0]).expect("the worker's end"), 0, "it was killed");
}

/// The report has the message that the stuck worker had begun, and those behind it. The other worker's peers are answered.
#[test]
fn a_drain_reports_what_a_stuck_worker_had_begun() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "2", "--order", "sticky", "--drain", "4"]);
    let (mut stuck, mut other) = (mux.connect(), mux.connect());
    // A connection goes to the worker with the fewest.
    let first = split(&ask(&mut stuck, b"first")).0;
    assert_ne!(split(&ask(&mut other, b"first")).0, first);
    let gates = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let [wait, late] = [0, 1].map(|at| format!("wait {}", gates[at].local_addr().expect("an address")));
    let three = [&wait[..], "second", "third"].map(|body| message(body.as_bytes())).concat();
    stuck.write_all(&three).expect("open");
    let (mut holder, _) = gates[0].accept().expect("the worker");
    other.write_all(&message(late.as_bytes())).expect("open");
    let (released, _) = gates[1].accept().expect("the other worker");
    // The mux has read what was sent before its peers connect once more.
    drop(mux.connect());
    mux.signal(Signal::TERM);
    while TcpStream::connect(&mux.address).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    drop(released);
    assert_eq!(split(&answer(&mut other).expect("an answer")).1, late.as_bytes());
    assert!(answer(&mut stuck).is_err(), "it is never answered");
    let (code, errors) = mux.ended();
    assert_eq!(code, Some(1), "{errors}");
    // The worker has the messages behind the stuck one, or the mux discards them with their connection.
    let (received, done, given_up, not_begun) = counted(&errors);
    assert_eq!((received, done, given_up, discarded(&errors) + not_begun), (6, 3, 0, 2), "{errors}");
    assert!(errors.contains(", 1 begun, "), "{errors}");
    let at = |text: &str| errors.find(text).unwrap_or_else(|| panic!("{text}: {errors}"));
    let order =
        [at("not drained in time"), at(" messages: 3 done"), at("ended before everything was drained")];
    assert!(order.is_sorted(), "{errors}");
    assert_eq!(holder.read(&mut [0]).expect("the worker's end"), 0, "it was killed");
}

#[test]
fn a_peer_that_has_not_read_its_reply_is_reported() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--drain", "0.5"]);
    let mut stream = mux.connect();
    // The kernel accepts the reply, the peer does not read it.
    stream.write_all(&message(&vec![0; 600_000])).expect("open");
    stream.peek(&mut [0]).expect("it is answered");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("1 connection not done"), "{errors}");
}

#[test]
fn a_pipelining_peer_gets_all_replies_on_drain() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "2"]);
    let mut stream = mux.connect();
    let mut asks = stream.try_clone().expect("a descriptor");
    let body = [b'q'; 200];
    let writer = thread::spawn(move || while asks.write_all(&message(&body).repeat(50)).is_ok() {});
    // The peer reads nothing before the drain begins, and keeps sending requests.
    answer(&mut stream).expect("an answer");
    mux.signal(Signal::TERM);
    while TcpStream::connect(&mux.address).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    let mut answered = 1;
    while answer(&mut stream).is_ok() {
        answered += 1;
    }
    // Fails if the mux has given up reading the requests, and reset the connection.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    writer.join().expect("it ends");
    let (code, errors) = mux.ended();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((done, undone, left), (received, 0, 0), "{errors}");
    assert_eq!(answered, done, "{errors}");
}

#[test]
fn the_socket_of_another_process_is_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mux.sock");
    let address = format!("unix:{}", path.display());
    let worker = example("mux_worker");
    let old = Mux::listen(&address, &worker, &["--workers", "1"]);
    std::fs::rename(&path, directory.path().join("old.sock")).expect("it is there");
    let new = Mux::listen(&address, &worker, &["--workers", "1"]);
    assert_eq!(old.finish().0, Some(0));
    let mut stream = UnixStream::connect(&path).expect("the new one listens");
    assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    drop(stream);
    assert_eq!(new.finish().0, Some(0));
    assert!(!path.exists(), "its own socket is removed");
}

/// The socket's file is removed before listening ends. Otherwise a successor's file would look like its own
/// and be removed with it.
#[test]
fn a_draining_mux_hands_its_path_to_a_successor() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mux.sock");
    let address = format!("unix:{}", path.display());
    let held = TcpListener::bind("127.0.0.1:0").expect("a port");
    let args = ["--workers", "1", "--drain", "60"];
    let old = Mux::listen(&address, &example("mux_worker"), &args);
    let mut asked = UnixStream::connect(&path).expect("it listens");
    let wait = format!("wait {}", held.local_addr().expect("an address"));
    asked.write_all(&message(wait.as_bytes())).expect("it is open");
    let (worker, _) = held.accept().expect("the worker waits");
    old.signal(Signal::TERM);
    while UnixStream::connect(&path).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(!path.exists(), "the file is removed before the listener");
    let new = Mux::listen(&address, &example("mux_worker"), &args);
    drop(worker);
    assert_eq!(split(&answer(&mut asked).expect("an answer")).1, wait.as_bytes());
    drop(asked);
    assert_eq!(old.ended().0, Some(0));
    let mut stream = UnixStream::connect(&path).expect("the new one listens");
    assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    drop(stream);
    assert_eq!(new.finish().0, Some(0));
}
