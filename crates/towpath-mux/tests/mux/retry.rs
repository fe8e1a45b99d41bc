//! `Retry::Always` over sockets: messages in the kernel's buffers when a connection is reset.
#![cfg(feature = "io")]

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use socket2::{SockFilter, SockRef};
use towpath_mux::io::{Event, Kind, Socket, To};
use towpath_mux::mux::{Config, Retry};

use super::worker_api::{NONE, PATIENCE, connected, server};

/// Interval of polling.
const SOON: Duration = Duration::from_millis(1);
const LINES: usize = 20_000;
/// Bytes that the first sink reads before it resets its connection.
const READ: usize = 512 << 10;

/// Numbers of the whole lines in `bytes`.
fn numbers(bytes: &[u8]) -> BTreeSet<usize> {
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let lines = std::str::from_utf8(&bytes[..whole]).expect("text").lines();
    lines.map(|line| line[..8].parse().expect("a number")).collect()
}

fn read_some(sink: &mut impl Read) -> Vec<u8> {
    let mut got = vec![0; READ];
    sink.read_exact(&mut got).expect("so many bytes");
    got
}

/// Sends all lines to two sinks, of which `first` resets its connection. Returns the lines that arrived at neither of
/// them and were not reported.
fn lost<S: Read + Send>(
    mut socket: Socket,
    (mut first, mut second): (S, S),
    reset: impl FnOnce(S, Vec<u8>) -> Vec<u8> + Send,
) -> usize {
    let server = socket.server();
    while server.show().psocks.len() < 2 {
        thread::sleep(SOON);
    }
    thread::scope(|scope| {
        let first = scope.spawn(move || {
            let got = read_some(&mut first);
            reset(first, got)
        });
        let second = scope.spawn(move || {
            let mut got = Vec::new();
            second.read_to_end(&mut got).expect("the end of the stream");
            got
        });
        for number in 0..LINES {
            let line = format!("{number:08}{}\n", "x".repeat(500 + number % 500));
            socket.send(To::Any, line.as_bytes(), NONE).expect("a connection is open");
        }
        assert!(socket.close(PATIENCE), "the mux has drained");
        let mut known = numbers(&first.join().expect("it does not panic"));
        known.extend(numbers(&second.join().expect("it does not panic")));
        while let Some(event) = server.poll_event() {
            if let Event::Undelivered(undelivered) = event {
                known.extend(numbers(&undelivered.bytes));
            }
        }
        LINES - known.len()
    })
}

fn always() -> Socket {
    server(Config { retry: Retry::Always, ..connected() }).socket(Kind::Dgram).expect("a handle")
}

#[test]
fn every_line_arrives_or_is_reported_after_a_reset_over_tcp() {
    let socket = always();
    let server = socket.server();
    let address = server.listen("127.0.0.1:0").expect("a port");
    let connect = || TcpStream::connect(address).expect("it listens");
    let first = connect();
    // Most of its messages wait in the sender's kernel.
    SockRef::from(&first).set_recv_buffer_size(32 << 10).expect("a size");
    let id = loop {
        if let Some(row) = server.show().psocks.first() {
            break row.id;
        }
        thread::sleep(SOON);
    };
    let sent = || server.show().totals.tx_msgs == LINES as u64;
    let waits = || server.show().psocks.iter().any(|row| row.id == id && row.send_bytes > 0);
    let lost = lost(socket, (first, connect()), |mut sink, mut got| {
        let socket = SockRef::from(&sink);
        // From here on the kernel drops every segment, so that the sink has read all that its TCP acknowledges. Then the
        // buffer of the sender fills.
        socket.attach_filter(&[SockFilter::new(libc::BPF_RET as u16, 0, 0, 0)]).expect("a filter");
        while !waits() && !sent() {
            thread::sleep(SOON);
        }
        socket.set_linger(Some(Duration::ZERO)).expect("a reset at the close");
        sink.set_nonblocking(true).expect("a mode");
        let end = sink.read_to_end(&mut got).expect_err("it is open");
        assert_eq!(end.kind(), ErrorKind::WouldBlock);
        got
    });
    assert_eq!(lost, 0);
    assert!(server.show().totals.tx_retries > 0, "the buffers of the kernel had messages");
}

#[test]
fn every_line_arrives_or_is_reported_after_a_reset_over_unix_sockets() {
    let socket = always();
    let server = socket.server();
    let attach = || {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        server.attach(ours, &[]).expect("it is attached");
        theirs
    };
    // It closes with unread bytes, which its peer sees as a reset.
    let lost = lost(socket, (attach(), attach()), |sink, got| {
        drop(sink);
        got
    });
    assert_eq!(lost, 0);
    assert!(server.show().totals.tx_retries > 0, "the buffers of the kernel had messages");
}
