//! The key-value example with worker processes and Redis' clients.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::example::example;

/// A `towpath mux` process that is killed on drop.
struct Mux(Child);

impl Drop for Mux {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[towpath_testenv::needs("redis-cli", "redis-benchmark")]
#[test]
fn redis_clients_are_served_by_processes() {
    let keys = tempfile::tempdir().expect("a directory");
    let towpath = Path::new(env!("CARGO_BIN_EXE_towpath"));
    let worker = format!("{} {}", example("redis"), keys.path().display());
    let mux = Command::new(towpath)
        .args([
            "mux",
            "127.0.0.1:0",
            "--framing",
            "resp",
            "--order",
            "serial",
            "--workers",
            "3",
            "--worker",
            &worker,
        ])
        .stderr(Stdio::piped())
        .spawn()
        .expect("towpath starts");
    let mut mux = Mux(mux);
    let mut stderr = BufReader::new(mux.0.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("a line");
    let port = line.trim().rsplit(':').next().expect("a port").to_owned();

    let ask = |args: &[&str]| {
        let output =
            Command::new("redis-cli").args(["-p", &port]).args(args).output().expect("redis-cli starts");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let rows = [
        (&["ping"][..], "PONG"),
        (&["set", "a key", "a value"], "OK"),
        (&["get", "a key"], "a value"),
        (&["get", "none"], ""),
        (&["incr", "count"], "1"),
        (&["incr", "count"], "2"),
        (&["incr", "a key"], "ERR value is not an integer or out of range"),
        (&["exists", "a key", "count", "none"], "2"),
        (&["del", "a key"], "1"),
        (&["get", "a key"], ""),
        (&["fly"], "ERR unknown command 'FLY'"),
    ];
    for (args, expected) in rows {
        assert_eq!(ask(args), expected, "{args:?}");
    }
    // Input that the framing accepts and that is not a command gets an error reply; the worker survives.
    let mut peer = TcpStream::connect(format!("127.0.0.1:{port}")).expect("a connection");
    peer.write_all(b"*1\r\n$-1\r\n*0\r\n*1\r\n*0\r\n*1\r\n$4\r\nping\r\n").expect("room for it");
    let mut answers = BufReader::new(peer).lines().map(|line| line.expect("an answer"));
    for expected in ["-ERR unknown command ''"; 3].into_iter().chain(["+PONG"]) {
        assert_eq!(answers.next().as_deref(), Some(expected));
    }
    // QUIT is answered, then the connection is closed. Later commands have no answer.
    let mut peer = TcpStream::connect(format!("127.0.0.1:{port}")).expect("a connection");
    peer.write_all(b"*1\r\n$4\r\nping\r\n*1\r\n$4\r\nquit\r\n*1\r\n$4\r\nping\r\n").expect("room for it");
    let mut all = String::new();
    peer.read_to_string(&mut all).expect("a clean end");
    assert_eq!(all, "+PONG\r\n+OK\r\n");
    assert_eq!(ask(&["quit"]), "OK");
    // Pipelined, on many connections. Every increment counts, whichever process handles it.
    let bench = ["-p", &port, "-q", "-n", "2000", "-c", "20", "-P", "4", "-t", "ping,set,get,incr"];
    let output = Command::new("redis-benchmark").args(bench).output().expect("redis-benchmark starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    for test in ["PING_INLINE", "PING_MBULK", "SET", "GET", "INCR"] {
        assert!(text.contains(&format!("{test}: ")), "{text}");
    }
    let counted = ask(&["get", "counter:__rand_int__"]);
    assert_eq!(counted, "2000", "no increment is lost");
}
