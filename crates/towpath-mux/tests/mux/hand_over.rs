//! Listeners and connections that move from one server to another.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use towpath_mux::Time;
use towpath_mux::assembler::{Assembler, Event, InvalidProgress, Limits, Progress};
use towpath_mux::framing::{Framing, Message, State};
use towpath_mux::io::{HandOver, Server};
use towpath_mux::mux::{Cause, Config, Order};

const PATIENCE: Duration = Duration::from_secs(120);

fn messages(assembler: &mut Assembler, bytes: &[u8], found: &mut Vec<Vec<u8>>) {
    let mut at = 0;
    while at < bytes.len() {
        at += assembler.handle_bytes(&bytes[at..]);
        while let Some(event) = assembler.poll(Time::default()) {
            match event {
                Event::Message(message) => found.push(message.bytes.to_vec()),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_stream_may_move_after_every_byte() {
    let rows: [(&str, &[u8], usize); 6] = [
        ("line", b"one\ntwo\nthree\n", 3),
        ("offset=0 length=2 be adjust=2", b"\0\x03one\0\0\0\x05three", 3),
        ("http1", b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", 2),
        (
            "http1",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\na: b\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            2,
        ),
        ("redis", b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*1\r\n$4\r\nPING\r\n", 2),
        ("smtp", b"DATA\r\nA: b\r\n\r\n..\r\n.\r\nQUIT\r\n", 3),
    ];
    for (framing, stream, count) in rows {
        let framing: Framing = framing.parse().expect("a framing");
        let limits = Limits::default();
        let mut whole = Vec::new();
        messages(&mut Assembler::new(framing.clone(), limits), stream, &mut whole);
        assert_eq!(whole.len(), count, "{whole:?}");
        for cut in 0..=stream.len() {
            let (mut found, mut first) = (Vec::new(), Assembler::new(framing.clone(), limits));
            messages(&mut first, &stream[..cut], &mut found);
            let (progress, rest) = (first.progress(), first.rest().to_vec());
            let second = Assembler::resume(framing.clone(), limits, progress, &rest);
            let mut second = second.expect("the position of an assembler");
            assert_eq!(second.need(), first.need());
            messages(&mut second, &stream[cut..], &mut found);
            assert_eq!(found, whole, "cut at {cut}");
        }
    }
}

#[test]
fn positions_outside_of_the_limits_are_refused() {
    let limits = Limits { message: 100, head: 50, ..Limits::default() };
    let known = |length, skip, trim| Progress {
        known: Some(Message { length, skip, trim, ..Message::default() }),
        ..Progress::default()
    };
    let rows = [
        (known(101, 0, 0), 0),
        (known(0, 0, 0), 0),
        (known(10, 6, 5), 0),
        (known(10, usize::MAX, 5), 0),
        (Progress { need: 0, ..Progress::default() }, 0),
        (Progress { need: 101, ..Progress::default() }, 0),
        (Progress { asked: 4, ..Progress::default() }, 3),
        (Progress::default(), 101),
    ];
    for (progress, rest) in rows {
        let line: Framing = "line".parse().expect("a framing");
        let refused = Assembler::resume(line, limits, progress.clone(), &vec![b'x'; rest]);
        assert_eq!(refused.err(), Some(InvalidProgress), "{progress:?} with {rest} bytes");
    }
    assert_eq!(Progress::default().state, State::default());
}

fn server() -> Server {
    Server::new("line".parse().expect("a framing"), Config::new(Order::Replies)).expect("epoll")
}

/// A worker that answers each line with `name` before it, and `wait` only when the gate is opened.
fn worker(server: &Server, name: &'static str, gate: std::sync::mpsc::Receiver<()>) -> JoinHandle<()> {
    let mut worker = server.worker().expect("a worker");
    thread::spawn(move || {
        while let Some(message) = worker.recv().expect("epoll") {
            if message.bytes().starts_with(b"wait") {
                gate.recv().expect("the test opens it");
            }
            worker.reply(&message, [name.as_bytes(), message.bytes()].concat());
        }
    })
}

fn read(stream: &mut TcpStream, length: usize) -> String {
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer).expect("an answer");
    String::from_utf8(answer).expect("text")
}

#[test]
fn connections_move_when_their_messages_are_answered() {
    let (old, new) = (server(), server());
    let address = old.listen("127.0.0.1:0").expect("a port");
    let (open, gate) = std::sync::mpsc::channel();
    let (_open, closed) = std::sync::mpsc::channel();
    let workers = [worker(&old, "1 ", gate), worker(&new, "2 ", closed)];
    let connect = || {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    };
    let mut busy = connect();
    let mut half = connect();
    // The worker has the first message, and the second connection an incomplete one.
    half.write_all(b"a\nhal").expect("it is open");
    assert_eq!(read(&mut half, 4), "1 a\n");
    busy.write_all(b"wait\nb\n").expect("it is open");
    while old.look(|mux| mux.totals().in_hand) == 0 {
        thread::yield_now();
    }

    let listener = old.listeners().expect("a descriptor").remove(0);
    assert_eq!(listener.name, address.to_string());
    assert_eq!(new.listen_on(listener.socket).expect("a listener"), listener.name);
    old.stop_listening();
    // Both servers have a connection in the end: it was accepted by the new one, or is in its backlog.
    let mut late = connect();
    late.write_all(b"c\n").expect("it is open");
    assert_eq!(read(&mut late, 4), "2 c\n");

    assert_eq!(old.hand_over(Some(PATIENCE)), HandOver { finishing: 1, waiting: 0, staying: 0 });
    let moves = |expected: &[u8]| {
        let ended = loop {
            match old.poll_ended() {
                Some(ended) => break ended,
                None => thread::yield_now(),
            }
        };
        assert_eq!((&ended.cause, ended.unsent, &ended.rest[..]), (&Cause::Unattached, 0, expected));
        let resume = *ended.resume.expect("where it stands");
        assert!(resume.core.used);
        assert_eq!(resume.listener, listener.name);
        new.attach_moved(ended.socket.expect("its socket"), &ended.rest, resume).expect("it is attached");
    };
    moves(b"hal");
    half.write_all(b"f\n").expect("it is open");
    assert_eq!(read(&mut half, 7), "2 half\n");
    assert_eq!(new.connection_info(new.show().psocks[1].id).expect("it is open").listener, listener.name);
    // Messages that were received are answered here, later ones there.
    busy.write_all(b"d\n").expect("it is open");
    open.send(()).expect("it waits");
    assert_eq!(read(&mut busy, 7), "1 wait\n");
    moves(b"");
    assert_eq!(read(&mut busy, 8), "1 b\n2 d\n");
    assert_eq!(old.hand_over(Some(PATIENCE)), HandOver::default());
    for server in [old, new] {
        server.drain(Some(PATIENCE));
    }
    workers.into_iter().for_each(|worker| worker.join().expect("it does not panic"));
}

#[test]
fn a_stream_that_no_mux_with_these_limits_has_is_closed() {
    let server = server();
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().expect("sockets");
    let mut resume = towpath_mux::io::Resume::default();
    resume.core.progress.need = usize::MAX;
    assert!(server.attach_moved(ours.into(), b"", resume).is_err());
    assert_eq!(theirs.read(&mut [0]).expect("an end"), 0);
}

#[test]
fn no_connection_is_lost_when_many_are_handed_over() {
    let old = server();
    let address = old.listen("127.0.0.1:0").expect("a port");
    let (_open, gate) = std::sync::mpsc::channel();
    let worker = worker(&old, "", gate);
    // More than the ends that a server keeps otherwise.
    let clients: Vec<TcpStream> = (0..1500)
        .map(|_| {
            let mut stream = TcpStream::connect(address).expect("it listens");
            stream.write_all(b"a\n").expect("it is open");
            assert_eq!(read(&mut stream, 2), "a\n");
            stream
        })
        .collect();
    while old.hand_over(Some(PATIENCE)) != HandOver::default() {}
    let mut moved = 0;
    while let Some(ended) = old.poll_ended() {
        assert!(ended.socket.is_some());
        moved += 1;
    }
    assert_eq!(moved, clients.len());
    old.drain(Some(PATIENCE));
    worker.join().expect("it does not panic");
}
