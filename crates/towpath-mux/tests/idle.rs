//! Memory per idle connection. A separate process, because the test measures all memory of the process.
#![cfg(feature = "io")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towpath_mux::io::Server;
use towpath_mux::mux::{Config, Order};

/// At most 2 KiB in user space per connection (10,000 of them, or as many as descriptors permit: both ends
/// are in this process), also after use.
#[towpath_testenv::needs(files)]
#[test]
fn idle_connections_are_small() {
    let server = Server::new("length=1 adjust=1".parse().expect("a framing"), Config::new(Order::None))
        .expect("epoll");
    let address = server.listen("127.0.0.1:0").expect("a port");
    let mut worker = server.worker().expect("a worker");
    let echo = thread::spawn(move || {
        while let Some(message) = worker.recv().expect("epoll") {
            worker.reply(&message, message.bytes().clone());
        }
    });
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
        .expect("the soft limit may be raised");
    let limit = limit.maximum.unwrap_or(u64::MAX);
    let count = (limit.saturating_sub(200) / 2).min(10_000) as usize;
    let before = resident();
    let mut clients: Vec<_> = (0..count).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    for client in &mut clients {
        let asked = [[99].as_slice(), &[3; 99]].concat();
        client.write_all(&asked).expect("it reads");
        let mut answer = [0; 100];
        client.read_exact(&mut answer).expect("an answer");
        assert_eq!(answer[..], asked);
    }
    while server.look(|mux| mux.bytes()) > 0 {
        thread::yield_now();
    }
    let each = resident().saturating_sub(before) / count.max(1);
    println!("{each} bytes for each of {count} idle connections");
    assert!(each <= 2048, "{each} bytes per idle connection");
    drop(clients);
    server.drain(None);
    echo.join().expect("it does not panic");
}

/// Resident memory of this process in bytes (proc_pid_statm(5)).
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: usize = statm.split(' ').nth(1).expect("resident").parse().expect("a number");
    pages * rustix::param::page_size()
}
