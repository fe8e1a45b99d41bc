//! A server that takes nothing, and one that also sends: the side goes on, and what waits is bounded.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;

use super::*;

/// Bytes of a message.
const PIECE: usize = 64 << 10;

/// Pieces that a side adds in a turn.
const BURST: usize = 64;

/// A side that sends pieces in its first session.
struct Sender {
    fd: UnixStream,
    /// Otherwise, the end of the stream would keep the descriptor readable.
    _peer: UnixStream,
    piece: Bytes,
    /// It sends also without room.
    greedy: bool,
    /// A session has begun.
    connected: bool,
    /// Pieces that it has sent.
    sent: usize,
    /// Turns without room, and after the first session.
    full: usize,
    /// Messages that came, and those that came without room.
    got: [usize; 2],
    over: fn(&Self) -> bool,
    /// Why its sessions ended.
    ended: Vec<String>,
}

impl Sender {
    fn new(greedy: bool, over: fn(&Self) -> bool) -> Self {
        let (fd, _peer) = UnixStream::pair().unwrap();
        let piece = Bytes::from(vec![7; PIECE]);
        let (connected, sent, full, got, ended) = (false, 0, 0, [0; 2], Vec::new());
        Self { fd, _peer, piece, greedy, connected, sent, full, got, over, ended }
    }

    /// Runs until it is over, for at most a minute.
    fn run(mut self, listener: &TcpListener) -> Self {
        let servers = vec![format!("nats://{}", listener.local_addr().unwrap())];
        let config = ServerConfig { servers, ..ServerConfig::default() };
        let (done, wait) = std::sync::mpsc::channel();
        thread::spawn(move || {
            run(&config, "h", "s", &["host.h.*".to_owned()], &mut self).unwrap();
            done.send(self)
        });
        wait.recv_timeout(Duration::from_secs(60)).expect("the side has no turn, or does not end")
    }
}

impl Side for Sender {
    fn connected(&mut self, _: &str) {
        self.connected = true;
    }

    fn disconnected(&mut self, error: &SessionError) {
        self.ended.push(error.to_string());
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn message(&mut self, subject: &str, bytes: &Bytes, copied: bool, _: Instant) {
        assert_eq!((subject, copied, bytes.len()), ("host.h.f", false, PIECE));
        self.got[usize::from(self.full > 0)] += 1;
    }

    fn turn(&mut self, _: bool, room: usize, out: &mut Vec<Outgoing>) {
        self.full += usize::from(room == 0 || !self.ended.is_empty());
        if self.connected && self.ended.is_empty() && (self.greedy || room > 0) {
            let outgoing = Outgoing { subject: "front.f.h".to_owned(), bytes: self.piece.clone() };
            out.extend(std::iter::repeat_n(outgoing, BURST));
            self.sent += BURST;
        }
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn due(&self) -> Instant {
        Instant::now()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn is_over(&self) -> bool {
        (self.over)(self)
    }
}

/// A server's end of the next connection, whose client has subscribed.
fn accept(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(b"INFO {\"server_id\":\"s\",\"max_payload\":1048576,\"proto\":1}\r\n").unwrap();
    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
        match line.unwrap().split(' ').next() {
            Some("PING") => stream.write_all(b"PONG\r\n").unwrap(),
            Some("SUB") => break,
            _ => {}
        }
    }
    stream
}

fn send(stream: &mut TcpStream) -> io::Result<()> {
    let mut bytes = format!("MSG s.host.h.f 1 {PIECE}\r\n").into_bytes();
    bytes.resize(bytes.len() + PIECE, 0);
    bytes.extend(b"\r\n");
    stream.write_all(&bytes)
}

#[test]
fn a_side_goes_on_and_ends_while_the_server_takes_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepting = listener.try_clone().unwrap();
    let server = thread::spawn(move || accept(&accepting));
    // The session may end meanwhile, because the server does not answer pings.
    let side = Sender::new(false, |side| side.full >= 100).run(&listener);
    assert!(side.sent * PIECE > ROOM, "{} pieces", side.sent);
    drop(server.join().unwrap());
}

#[test]
fn a_side_goes_on_and_ends_while_the_server_sends_without_end_and_takes_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepting = listener.try_clone().unwrap();
    let server = thread::spawn(move || {
        let mut stream = accept(&accepting);
        // It answers pings, so that the session does not end.
        while send(&mut stream).and_then(|()| stream.write_all(b"PONG\r\n")).is_ok() {}
    });
    // More messages than the client reads at once.
    let side = Sender::new(false, |side| side.full >= 100 && side.got[1] >= 1000).run(&listener);
    assert_eq!(side.ended, [""; 0]);
    // What waits is what the outbox, the client and the sockets had before there was no room, and one turn more.
    assert!(side.sent * PIECE < ROOM + (64 << 20), "{} pieces", side.sent);
    server.join().unwrap();
}

#[test]
fn a_session_ends_when_too_much_waits_and_the_next_one_works() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepting = listener.try_clone().unwrap();
    let server = thread::spawn(move || {
        let first = accept(&accepting);
        let mut second = accept(&accepting);
        send(&mut second).unwrap();
        (first, second)
    });
    let side = Sender::new(true, |side| side.got != [0; 2]).run(&listener);
    assert_eq!(side.ended.len(), 1, "{:?}", side.ended);
    assert!(side.ended[0].contains("more than 128 MiB"), "{:?}", side.ended);
    // Some more were in the client and in the sockets.
    let sent = side.sent * PIECE;
    assert!(sent > OUTBOUND_BYTES && sent < OUTBOUND_BYTES + (64 << 20), "{sent} bytes");
    drop(server.join().unwrap());
}
