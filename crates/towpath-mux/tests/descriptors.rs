//! A server without free descriptors. A separate process, because the test uses all of its descriptors.
#![cfg(feature = "io")]

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towpath_mux::io::Server;
use towpath_mux::mux::{Config, Order};

/// No attached connection can end: descriptors become free elsewhere.
#[test]
fn accepting_resumes_when_descriptors_are_free() {
    let server = Server::new("line".parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    let address = server.listen("127.0.0.1:0").expect("a port");
    let mut worker = server.worker().expect("a worker");
    let echo = thread::spawn(move || {
        while let Some(message) = worker.recv().expect("epoll") {
            worker.reply(&message, message.bytes().clone());
        }
    });
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum }).expect("less is always possible");
    let mut files = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        files.push(file);
    }
    // The remaining descriptor is the client's.
    files.pop().expect("there were some");
    let mut client = TcpStream::connect(address).expect("it listens");
    while server.accept_stats().refused == 0 {
        thread::yield_now();
    }
    assert_eq!(server.accept_stats().accepted, 0);
    drop(files);
    client.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    client.write_all(b"hello\n").expect("it is open");
    let mut answer = [0; 6];
    client.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"hello\n");
    server.drain(None);
    drop(client);
    echo.join().expect("it does not panic");
}
