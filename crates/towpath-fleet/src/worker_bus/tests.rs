//! A server that sends and takes nothing: what waits is bounded.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::*;

/// Bytes of a message.
const PIECE: usize = 64 << 10;

/// A side that sends until it has all messages.
struct Sender {
    fd: UnixStream,
    /// Otherwise, the end of the stream would keep the descriptor readable.
    _peer: UnixStream,
    piece: Bytes,
    /// Turns, for the server.
    turns: Arc<AtomicUsize>,
    /// The numbers of the messages that came.
    got: Vec<u32>,
    most: u32,
    /// Why its sessions ended.
    ended: Vec<String>,
}

impl Sender {
    fn new(most: u32) -> Self {
        let (fd, _peer) = UnixStream::pair().unwrap();
        let (piece, turns) = (Bytes::from(vec![7; PIECE]), Arc::default());
        Self { fd, _peer, piece, turns, got: Vec::new(), most, ended: Vec::new() }
    }

    fn run(&mut self, listener: &TcpListener) {
        let servers = vec![format!("nats://{}", listener.local_addr().unwrap())];
        let config = ServerConfig { servers, ..ServerConfig::default() };
        run(&config, "h", "s", &["host.h.*".to_owned()], self).unwrap();
    }
}

impl Side for Sender {
    fn connected(&mut self, _: &str) {}

    fn disconnected(&mut self, error: &SessionError) {
        self.ended.push(error.to_string());
    }

    fn warning(&mut self, text: &str) {
        panic!("{text}");
    }

    fn message(&mut self, subject: &str, bytes: &Bytes, copied: bool, _: Instant) {
        assert_eq!((subject, copied, bytes.len()), ("host.h.f", false, PIECE));
        self.got.push(u32::from_le_bytes(*bytes.first_chunk().unwrap()));
    }

    fn turn(&mut self, _: bool, out: &mut Vec<Outgoing>) {
        // Relaxed: a hint for the server.
        self.turns.fetch_add(1, Ordering::Relaxed);
        let outgoing = Outgoing { subject: "front.f.h".to_owned(), bytes: self.piece.clone() };
        out.extend(std::iter::repeat_n(outgoing, 64));
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
        self.got.last().is_some_and(|last| last + 1 == self.most)
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

/// Sends the message with this number.
fn send(stream: &mut TcpStream, number: u32) -> io::Result<()> {
    let mut bytes = format!("MSG s.host.h.f 1 {PIECE}\r\n").into_bytes();
    bytes.extend(number.to_le_bytes());
    bytes.resize(bytes.len() + PIECE - 4, 0);
    bytes.extend(b"\r\n");
    stream.write_all(&bytes)
}

/// Waits until the side has no turn: its client has no room.
fn until_it_waits(turns: &AtomicUsize) {
    let mut before = 0;
    loop {
        thread::sleep(Duration::from_millis(50));
        // Relaxed: a hint.
        let now = turns.load(Ordering::Relaxed);
        if now > 0 && now == before {
            return;
        }
        before = now;
    }
}

#[test]
fn a_session_ends_when_too_much_waits_and_the_next_one_works() {
    // More than what may wait and what arrives before.
    const ALL: u32 = 4 * (INBOUND_BYTES / PIECE) as u32;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut side = Sender::new(ALL);
    let turns = Arc::clone(&side.turns);
    let sent = thread::scope(|scope| {
        let server = scope.spawn(|| {
            let mut stream = accept(&listener);
            until_it_waits(&turns);
            let sent = (0..ALL - 1).take_while(|number| send(&mut stream, *number).is_ok()).count();
            let mut stream = accept(&listener);
            let mut reader = stream.try_clone().unwrap();
            scope.spawn(move || io::copy(&mut reader, &mut io::sink()));
            send(&mut stream, ALL - 1).unwrap();
            sent
        });
        side.run(&listener);
        server.join().unwrap()
    });
    // Some more were in the sockets and in the client's buffer.
    let waited = sent - (side.got.len() - 1);
    assert!(waited * PIECE > INBOUND_BYTES / 2, "{waited} waited");
    assert!(waited * PIECE < INBOUND_BYTES + (32 << 20), "{waited} waited");
    assert_eq!(side.ended.len(), 1, "{:?}", side.ended);
    assert!(side.ended[0].contains("more than 128 MiB"), "{:?}", side.ended);
}
