//! Messages and replies over all kinds of connections.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::openssl;

use super::daemon::{Mux, answer, ask, counted, example, message, split, towpath, workers};

/// A program made for KCM runs unchanged.
#[test]
fn a_framing_may_be_a_program_or_a_toml_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let document = directory.path().join("framing.toml");
    std::fs::write(&document, "length = 4\nadjust = 4\n").expect("a file");
    let object = Path::new(env!("CARGO_MANIFEST_DIR")).join("../towpath-bpf/tests/programs/thrift.o");
    let program = format!("{}:frame", object.display());
    for framing in [document.to_str().expect("UTF-8"), object.to_str().expect("UTF-8"), &program] {
        let mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--framing", framing]);
        let mut stream = mux.connect();
        for body in [&b"one"[..], b"another"] {
            assert_eq!(split(&ask(&mut stream, body)).1, body, "{framing}");
        }
        drop(stream);
        assert_eq!(mux.finish().0, Some(0), "{framing}");
    }
    let refused = towpath().args(["mux", "127.0.0.1:0", "--worker", "w", "--framing", "no/such.o"]).output();
    let refused = refused.expect("towpath starts");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(64), "{said}");
    assert!(said.contains("--framing no/such.o: no such file, and not a framing"), "{said}");
}

#[test]
fn messages_of_any_size_are_answered_by_processes() {
    workers().iter().for_each(|worker| any_size(worker));
}

fn any_size(worker: &str) {
    let mux = Mux::start(worker, &["--workers", "3"]);
    let mut stream = mux.connect();
    let mut pids = BTreeSet::new();
    for size in [0, 1, 60, 64, 65, 1500, 70_000, 5_000_000] {
        let body: Vec<u8> = (0..size).map(|at| at as u8).collect();
        let answered = ask(&mut stream, &body);
        let (pid, echo) = split(&answered);
        assert!(echo == body, "{size} bytes come back");
        pids.insert(pid);
    }
    // Many numbered messages at once, over two connections.
    let mut other = mux.connect();
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
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(counted(&errors), (1008, 1008, 0, 0));
}

#[test]
fn a_slow_message_does_not_delay_others() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "2"]);
    let (mut slow, mut quick) = (mux.connect(), mux.connect());
    // The slow message waits until the others were answered.
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
fn replies_keep_the_configured_order() {
    // Without `--order`, a framing that is not a preset has the order `replies`.
    let orders = [&["--order", "replies"][..], &["--order", "serial"], &["--order", "sticky"], &[]];
    for (order, worker) in orders.into_iter().flat_map(|order| workers().map(|worker| (order, worker))) {
        let mux = Mux::start(&worker, &[&["--workers", "4"], order].concat());
        let mut stream = mux.connect();
        let asked: Vec<u8> = (0..300u32).flat_map(|number| message(&number.to_be_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
        for number in 0..300u32 {
            let answered = answer(&mut stream).expect("an answer");
            assert_eq!(split(&answered).1, number.to_be_bytes(), "{order:?}");
        }
    }
}

#[test]
fn a_unix_socket_works_as_tcp_does() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mux.sock");
    // A stale socket is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let address = format!("unix:{}", path.display());
    let mux = Mux::listen(&address, &example("mux_worker"), &["--workers", "1"]);
    let mut stream = UnixStream::connect(&path).expect("it listens");
    assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    drop(stream);
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert!(!path.exists(), "the socket is removed");
}

/// The mux connects to a listening peer, and reconnects after the connection has ended.
#[test]
fn outbound_peers_are_connected() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = listener.local_addr().expect("an address").to_string();
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--connected", &peer]);
    for _ in 0..3 {
        let (mut stream, _) = listener.accept().expect("it connects");
        assert_eq!(split(&ask(&mut stream, b"hello")).1, b"hello");
    }
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[towpath_testenv::needs("openssl")]
#[test]
fn tls_is_spoken_with_openssl() {
    let directory = tempfile::tempdir().expect("a directory");
    openssl::certificate(directory.path(), "mux", "/CN=localhost", &[]);
    let files = format!("{0}/mux.pem,{0}/mux.key", directory.path().display());
    let mut mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--tls", &files]);
    let mut client = openssl::client(&mux.address, directory.path(), &[]);
    client.stdin.as_mut().expect("a pipe").write_all(&message(b"hello")).expect("it reads");
    let answered = answer(client.stdout.as_mut().expect("a pipe")).expect("an answer");
    assert_eq!(split(&answered).1, b"hello");
    drop(client);
    // Data that is not TLS is logged.
    mux.connect().write_all(b"hello, this is no handshake").expect("it reads");
    assert!(mux.until("was not attached").contains("TLS: "));
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}
