//! Many handshakes at once. A separate process, because the test changes the limit of its descriptors.
#![cfg(feature = "tls")]

use std::io::Read;
use std::net::TcpStream;
use std::thread;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towpath_mux::framing::StartTls;
use towpath_mux::io::{Event, Server, ServerTls, Tls};
use towpath_mux::mux::{Config, Order};

/// 1,024 handshakes run at once; the oldest one makes room for another.
#[towpath_testenv::needs(files)]
#[test]
fn half_handshakes_are_bounded() {
    const MOST: usize = 1024;
    const MORE: usize = 76;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("the soft limit may be raised");
    let directory = tempfile::tempdir().expect("a directory");
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let (cert, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("a file");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("a file");
    let tls = ServerTls { starttls: Some(StartTls::Smtp), ..ServerTls::new(cert, key) };
    let server = Server::new("line".parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    let address =
        server.listen_tls("127.0.0.1:0", Tls::from_files(tls).expect("good files")).expect("a port");
    let mut worker = server.worker().expect("a worker");
    let thread = thread::spawn(move || worker.serve(|_, _| {}));
    // A greeted client has begun its handshake, and then says nothing.
    let clients: Vec<_> = (0..MOST + MORE)
        .map(|_| {
            let mut client = TcpStream::connect(address).expect("it listens");
            client.read_exact(&mut [0; 4]).expect("a greeting");
            client
        })
        .collect();
    let stats = server.accept_stats();
    assert_eq!((stats.handshakes_late, stats.handshakes_failed), (MORE as u64, 0));
    for mut client in &clients[..MORE] {
        client.read_to_end(&mut Vec::new()).expect("the oldest ones end");
    }
    for client in &clients[MORE..] {
        client.set_nonblocking(true).expect("a socket");
        while let Ok(read) = (&*client).read(&mut [0; 256]) {
            assert!(read > 0, "the others do not");
        }
    }
    match server.poll_event() {
        Some(Event::NotAttached { why, .. }) => assert_eq!(why, "too many handshakes are in progress"),
        other => panic!("{other:?}"),
    }
    server.drain(None);
    thread.join().expect("it does not panic").expect("epoll");
}
