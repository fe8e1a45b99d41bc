//! KCM's socket calls over real connections.
#![cfg(feature = "io")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towpath_mux::io::{Error, Event, Flags, Kind, Received, Server, Socket, To};
use towpath_mux::mux::{Cause, Config, Order, Retry};

pub(crate) const NONE: Flags = Flags::empty();
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn server(config: Config) -> Server {
    Server::new("line".parse().expect("a framing"), config).expect("epoll")
}

pub(crate) fn connected() -> Config {
    Config { connected: true, ..Config::new(Order::None) }
}

/// A server over TCP with one socket, and a client.
fn over_tcp(kind: Kind) -> (Socket, TcpStream) {
    let server = server(Config::new(Order::None));
    let address = server.listen("127.0.0.1:0").expect("a port");
    let socket = server.socket(kind).expect("a handle");
    (socket, client(address))
}

fn client(address: SocketAddr) -> TcpStream {
    let client = TcpStream::connect(address).expect("it listens");
    client.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    client
}

/// A socket with a connection over a Unix pair, and the other end.
pub(crate) fn over_unix(kind: Kind, config: Config) -> (Socket, UnixStream) {
    let socket = server(config).socket(kind).expect("a handle");
    let peer = attach(&socket);
    (socket, peer)
}

pub(crate) fn attach(socket: &Socket) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    theirs.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    socket.attach(ours, "line".parse().expect("a framing")).expect("it is attached");
    theirs
}

pub(crate) fn read(stream: &mut impl Read, length: usize) -> String {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).expect("so many bytes");
    String::from_utf8(bytes).expect("text")
}

pub(crate) fn recv(socket: &mut Socket, room: usize, flags: Flags) -> Result<(String, Received), Error> {
    let mut buffer = vec![0; room];
    let received = socket.recv(&mut buffer, flags)?;
    Ok((String::from_utf8_lossy(&buffer[..received.bytes]).into_owned(), received))
}

/// Reads without blocking until something arrives.
fn recv_soon(socket: &mut Socket, room: usize) -> String {
    loop {
        match recv(socket, room, Flags::DONTWAIT) {
            Ok((text, _)) => return text,
            Err(Error::WouldBlock) => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Every received message is accounted for.
fn conserved(server: &Server) {
    let totals = server.show().totals;
    let known = totals.done + totals.undone + totals.discarded() + totals.queued + totals.in_hand;
    assert_eq!(totals.received, known);
    server.look(|mux| mux.check().expect("the counts fit"));
}

/// Rows: socket kind; for each read: buffer size, peek, and the result (bytes, real length, flags).
#[test]
fn short_reads() {
    let (trunc, eor) = (Flags::TRUNC | Flags::EOR, Flags::EOR);
    type Row = (usize, bool, &'static str, usize, Flags);
    let dgram: &[Row] = &[
        (9, false, "hello\n", 6, eor),
        (6, false, "hello\n", 6, eor),
        (4, true, "hell", 6, trunc),
        (9, true, "hello\n", 6, eor),
        (4, false, "hell", 6, trunc),
        (0, false, "", 6, trunc),
        (9, false, "hello\n", 6, eor),
    ];
    let seqpacket: &[Row] = &[
        (9, false, "hello\n", 6, eor),
        (4, false, "hell", 6, NONE),
        (1, true, "o", 2, NONE),
        (0, false, "", 2, NONE),
        (1, false, "o", 2, NONE),
        (9, true, "\n", 1, eor),
        (9, false, "\n", 1, eor),
        (6, false, "hello\n", 6, eor),
    ];
    for (kind, rows) in [(Kind::Dgram, dgram), (Kind::Seqpacket, seqpacket)] {
        let (mut socket, mut client) = over_tcp(kind);
        client.write_all(&b"hello\n".repeat(8)).expect("it is open");
        for (row, (room, peek, text, length, flags)) in rows.iter().enumerate() {
            let peek = if *peek { Flags::PEEK } else { NONE };
            let (got, received) = recv(&mut socket, *room, peek).expect("a message");
            assert_eq!(
                (got.as_str(), received.length, received.flags),
                (*text, *length, *flags),
                "{kind:?} {row}"
            );
        }
        conserved(&socket.server());
    }
}

#[test]
fn nothing_to_read() {
    let (mut socket, mut client) = over_tcp(Kind::Dgram);
    assert!(matches!(recv(&mut socket, 9, Flags::DONTWAIT), Err(Error::WouldBlock)));
    socket.set_recv_timeout(Some(Duration::from_millis(5)));
    assert!(matches!(recv(&mut socket, 9, NONE), Err(Error::WouldBlock)));
    socket.set_recv_timeout(None);
    client.write_all(b"hello\nwor").expect("it is open");
    assert_eq!(recv(&mut socket, 9, NONE).expect("a message").0, "hello\n");
    assert!(
        matches!(recv(&mut socket, 9, Flags::DONTWAIT), Err(Error::WouldBlock)),
        "an incomplete message is not delivered"
    );
    client.write_all(b"ld\n").expect("it is open");
    assert_eq!(recv_soon(&mut socket, 9), "world\n");
    socket.server().drain(None);
    drop(client);
    assert!(matches!(recv(&mut socket, 9, NONE), Err(Error::Drained)));
}

#[test]
fn replies_reach_their_requesters() {
    let (mut socket, mut first) = over_tcp(Kind::Dgram);
    assert!(matches!(socket.send(To::Requester, b"?", NONE), Err(Error::NoAddress)));
    assert!(matches!(socket.send(To::Any, b"?", NONE), Err(Error::NoAddress)), "not in connected mode");
    let mut second = attach(&socket);
    first.write_all(b"1\n").expect("it is open");
    let (_, one) = recv(&mut socket, 9, NONE).expect("a message");
    assert_eq!(socket.send(To::Requester, b"a", Flags::MORE).expect("it is taken"), 1);
    assert!(matches!(socket.send(To::Psock(one.ticket.psock), b"b", NONE), Err(Error::AddressMismatch)));
    assert_eq!(socket.send(To::Requester, b"b\n", NONE).expect("it is sent"), 2);
    assert_eq!(socket.send(To::Message(one.ticket), b"c\n", NONE).expect("it is sent"), 2);
    assert_eq!(read(&mut first, 5), "ab\nc\n");
    second.write_all(b"2\n").expect("it is open");
    let (_, two) = recv(&mut socket, 9, NONE).expect("a message");
    assert!(
        matches!(socket.send(To::Message(one.ticket), b"late\n", NONE), Err(Error::Gone)),
        "the message is done"
    );
    assert_eq!(socket.send(To::Psock(one.ticket.psock), b"news\n", NONE).expect("it is sent"), 5);
    assert_eq!(socket.send(To::Requester, b"d\n", NONE).expect("it is sent"), 2);
    assert_eq!((read(&mut first, 5), read(&mut second, 2)), ("news\n".to_owned(), "d\n".to_owned()));
    drop(second);
    // The end is noticed a moment later.
    while socket.send(To::Psock(two.ticket.psock), b"e\n", NONE).is_ok() {
        thread::yield_now();
    }
    assert!(matches!(socket.send(To::Psock(two.ticket.psock), b"e\n", NONE), Err(Error::Gone)));
}

#[test]
fn parts_make_one_message() {
    let (mut socket, mut peer) = over_unix(Kind::Seqpacket, connected());
    for (part, flags) in [("he", NONE), ("", NONE), ("llo\n", Flags::EOR), ("world", NONE), ("", Flags::EOR)]
    {
        assert_eq!(socket.send(To::Any, part.as_bytes(), flags).expect("it is taken"), part.len());
    }
    assert_eq!(read(&mut peer, 11), "hello\nworld");
    assert_eq!(socket.server().show().totals.tx_msgs, 2);
    // An empty message is not sent.
    assert_eq!(socket.send(To::Any, b"", Flags::EOR).expect("nothing is to be done"), 0);
    assert_eq!(socket.send(To::Any, b"!", Flags::EOR).expect("it is sent"), 1);
    assert_eq!(read(&mut peer, 1), "!");
    assert_eq!(socket.server().show().totals.tx_msgs, 3);
}

#[test]
fn messages_that_are_too_long_are_dropped() {
    let (mut socket, mut peer) = over_unix(Kind::Dgram, Config { send_most: 8, ..connected() });
    socket.send(To::Any, b"1234", Flags::MORE).expect("it is taken");
    let error = socket.send(To::Any, b"56789", NONE).expect_err("it is too long");
    assert!(matches!(error, Error::TooLong { length: 9, most: 8 }), "{error}");
    socket.send(To::Any, b"12345678", NONE).expect("it is sent");
    assert_eq!(read(&mut peer, 8), "12345678");
}

#[test]
fn a_batch_is_sent_with_the_next_message() {
    let (mut socket, mut peer) = over_unix(Kind::Dgram, connected());
    peer.set_nonblocking(true).expect("a mode");
    socket.send(To::Any, b"1\n", Flags::BATCH).expect("it is taken");
    socket.send(To::Any, b"2", Flags::BATCH | Flags::MORE).expect("it is taken");
    socket.send(To::Any, b"\n", Flags::BATCH).expect("it is taken");
    assert!(peer.read(&mut [0; 9]).is_err(), "the batch is held back");
    socket.send(To::Any, b"3\n", NONE).expect("it is sent");
    assert_eq!(read(&mut peer, 6), "1\n2\n3\n");
    assert_eq!(socket.server().show().totals.tx_msgs, 3);
    let many: Vec<_> = (0..200).map(|_| (To::Any, &b"x\n"[..])).collect();
    assert_eq!(socket.send_many(&many, NONE).expect("they are sent"), 200);
    peer.set_nonblocking(false).expect("a mode");
    assert_eq!(read(&mut peer, 400), "x\n".repeat(200));
}

#[test]
fn several_messages_in_one_call() {
    let (mut socket, mut client) = over_tcp(Kind::Dgram);
    client.write_all(b"1\n2\n3\n4\n").expect("it is open");
    let mut texts = Vec::new();
    while texts.len() < 4 {
        let mut buffers = [[0; 8]; 3];
        let mut rooms: Vec<_> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
        let all = socket.recv_many(&mut rooms, NONE).expect("messages");
        assert!((1..=3).contains(&all.len()));
        for (received, buffer) in all.iter().zip(&buffers) {
            texts.push(buffer[0]);
            socket.send(To::Message(received.ticket), &buffer[..2], Flags::BATCH).expect("it is held");
        }
    }
    assert_eq!(texts, b"1234");
    assert!(matches!(recv(&mut socket, 9, Flags::DONTWAIT), Err(Error::WouldBlock)), "the batch is sent");
    assert_eq!(read(&mut client, 8), "1\n2\n3\n4\n");
}

#[test]
fn a_disabled_socket_hands_back_messages_not_begun() {
    let (mut socket, mut client) = over_tcp(Kind::Seqpacket);
    let mut other = socket.try_clone().expect("another handle");
    client.write_all(b"1234\n").expect("it is open");
    assert_eq!(recv(&mut socket, 2, Flags::PEEK).expect("a message").0, "12");
    assert!(
        matches!(recv(&mut other, 9, Flags::DONTWAIT), Err(Error::WouldBlock)),
        "the first socket holds it"
    );
    socket.set_receive(false);
    assert_eq!(recv_soon(&mut other, 2), "12");
    assert!(matches!(recv(&mut socket, 9, NONE), Err(Error::Disabled)));
    // A partly read message stays.
    other.set_receive(false);
    assert_eq!(recv(&mut other, 9, NONE).expect("its rest").0, "34\n");
    assert!(matches!(recv(&mut other, 9, NONE), Err(Error::Disabled)));
    client.write_all(b"5\n").expect("it is open");
    socket.set_receive(true);
    assert_eq!(recv(&mut socket, 9, NONE).expect("a message").0, "5\n");
}

#[test]
fn an_inactive_socket_delays_no_message() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Key] {
        let server = server(Config::new(order));
        let address = server.listen("127.0.0.1:0").expect("a port");
        let mut absent = server.socket(Kind::Dgram).expect("a handle");
        let mut socket = absent.try_clone().expect("another handle");
        assert!(matches!(recv(&mut absent, 9, Flags::DONTWAIT), Err(Error::WouldBlock)));
        let mut client = client(address);
        for _ in 0..20 {
            client.write_all(b"1\n").expect("it is open");
            assert_eq!(recv(&mut socket, 9, NONE).expect("a message").0, "1\n");
            socket.send(To::Requester, b"2\n", NONE).expect("it is sent");
            assert_eq!(read(&mut client, 2), "2\n");
        }
        conserved(&server);
    }
}

#[test]
fn attach_with_a_framing_and_unattach() {
    let socket = server(Config::new(Order::None)).socket(Kind::Dgram).expect("a handle");
    let mut other = socket.try_clone().expect("another handle");
    let (ours, mut peer) = UnixStream::pair().expect("a pair");
    let id = socket.attach(ours, "length=1 be adjust=1".parse().expect("a framing")).expect("it is attached");
    let mut lines = attach(&socket);
    peer.write_all(b"\x02ab").expect("it is open");
    lines.write_all(b"ab\n").expect("it is open");
    let mut texts = [recv_soon(&mut other, 9), recv_soon(&mut other, 9)];
    texts.sort();
    assert_eq!(texts, ["\u{2}ab", "ab\n"]);
    peer.write_all(b"\x05ab").expect("it is open");
    // It completes its own messages, so that it does not wait for itself.
    let ended = other.unattach(id, Some(PATIENCE)).expect("it is attached");
    assert_eq!(ended.cause, Cause::Unattached);
    let mut back = UnixStream::from(ended.socket.expect("the descriptor"));
    back.set_nonblocking(false).expect("a mode");
    let mut rest = ended.rest.to_vec();
    rest.extend(read(&mut back, 3 - rest.len()).bytes());
    assert_eq!(rest, b"\x05ab");
    assert!(matches!(other.unattach(id, None), Err(Error::NotAttached)));
}

#[test]
fn errors_of_sending_without_a_connection() {
    let mut socket =
        server(Config { retry: Retry::IfNoByteLeft, ..connected() }).socket(Kind::Dgram).expect("a handle");
    assert!(matches!(socket.send(To::Any, b"1\n", NONE), Err(Error::NotConnected)));
    socket.send(To::Any, b"1\n", Flags::BATCH).expect("it is taken");
    assert!(matches!(socket.send(To::Any, b"2\n", NONE), Err(Error::NotConnected)), "the error of the batch");
    let first = attach(&socket);
    let mut second = attach(&socket);
    drop(first);
    while socket.server().poll_ended().is_none() {
        thread::yield_now();
    }
    socket.send(To::Any, b"3\n", NONE).expect("the other one is open");
    assert_eq!(read(&mut second, 2), "3\n");
    drop(second);
    while socket.send(To::Any, b"4\n", NONE).is_ok() {
        thread::yield_now();
    }
    assert!(matches!(socket.send(To::Any, b"4\n", NONE), Err(Error::NotConnected)));
}

/// Returns true if the socket's descriptor becomes readable.
pub(crate) fn becomes_readable(socket: &Socket, patience: Duration) -> bool {
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout)).expect("poll(2)") > 0
}

#[test]
fn the_descriptor_reports_messages() {
    for order in [Order::None, Order::Sticky] {
        let server = server(Config::new(order));
        let mut client = client(server.listen("127.0.0.1:0").expect("a port"));
        let mut socket = server.socket(Kind::Seqpacket).expect("a handle");
        for turn in 0..20 {
            assert!(socket.arm(None), "{turn}: there is no message");
            assert!(!becomes_readable(&socket, Duration::ZERO));
            client.write_all(b"1234\n").expect("it is open");
            assert!(
                becomes_readable(&socket, PATIENCE) && becomes_readable(&socket, PATIENCE),
                "until it is disarmed"
            );
            socket.disarm();
            assert!(!becomes_readable(&socket, Duration::ZERO));
            assert!(!socket.arm(None), "there is a message");
            assert_eq!(recv(&mut socket, 2, Flags::DONTWAIT).expect("a message").0, "12");
            assert!(!socket.arm(None), "a part of it is left");
            assert_eq!(recv(&mut socket, 9, Flags::DONTWAIT).expect("its rest").0, "34\n");
            socket.send(To::Requester, b"5\n", Flags::EOR).expect("it is held");
            assert_eq!(read(&mut client, 2), "5\n");
            if turn % 2 == 0 {
                assert!(matches!(recv(&mut socket, 9, Flags::DONTWAIT), Err(Error::WouldBlock)));
            }
        }
        // A thread that waits in recv is woken without the descriptor.
        assert!(socket.arm(None));
        client.write_all(b"6\n").expect("it is open");
        assert_eq!(recv(&mut socket, 9, NONE).expect("a message").0, "6\n");
        assert!(socket.arm(None));
        server.drain(Some(PATIENCE));
        drop(client);
        assert!(becomes_readable(&socket, PATIENCE), "the mux has drained");
        socket.disarm();
        assert!(!socket.arm(None));
        assert!(matches!(recv(&mut socket, 9, Flags::DONTWAIT), Err(Error::Drained)));
        conserved(&server);
    }
}

#[test]
fn a_woken_socket_that_does_not_read_delays_no_message() {
    let (mut busy, mut client) = over_tcp(Kind::Dgram);
    let mut other = busy.try_clone().expect("another handle");
    let mut waits = busy.try_clone().expect("another handle");
    assert!(busy.arm(None) && other.arm(None));
    client.write_all(b"1\n").expect("it is open");
    assert!(becomes_readable(&busy, PATIENCE), "it was armed first");
    assert!(becomes_readable(&other, PATIENCE));
    other.disarm();
    assert_eq!(recv(&mut other, 9, Flags::DONTWAIT).expect("a message").0, "1\n");
    busy.disarm();
    assert!(matches!(recv(&mut busy, 9, Flags::DONTWAIT), Err(Error::WouldBlock)));
    // The same for a socket that is disarmed without a read.
    assert!(busy.arm(None));
    let waiter = thread::spawn(move || recv(&mut waits, 9, NONE).expect("a message").0);
    while other.server().show().workers.iter().filter(|row| row.rx_wait && !row.disabled).count() < 2 {
        thread::yield_now();
    }
    client.write_all(b"2\n").expect("it is open");
    assert!(becomes_readable(&busy, PATIENCE));
    busy.disarm();
    assert_eq!(waiter.join().expect("it does not panic"), "2\n");
    conserved(&other.server());
}

#[test]
fn closing_sends_whole_messages_only() {
    for kind in [Kind::Dgram, Kind::Seqpacket] {
        let (mut socket, mut peer) = over_unix(kind, connected());
        let whole = if kind == Kind::Dgram { NONE } else { Flags::EOR };
        let part = if kind == Kind::Dgram { Flags::MORE } else { NONE };
        let long = vec![b'x'; 1 << 20];
        socket.send(To::Any, &long, whole).expect("it is sent");
        socket.send(To::Any, b"batched\n", whole | Flags::BATCH).expect("it is taken");
        socket.send(To::Any, b"half", part).expect("it is taken");
        peer.write_all(b"unread\n").expect("it is open");
        let reader = thread::spawn(move || {
            let mut all = Vec::new();
            // A Unix connection that is closed with unread bytes reports a reset after the last byte.
            let _ = peer.read_to_end(&mut all);
            all
        });
        let server = socket.server();
        assert!(socket.close(PATIENCE), "the mux has drained");
        let all = reader.join().expect("it does not panic");
        assert_eq!(all.len(), long.len() + 8);
        assert!(all.ends_with(b"xbatched\n"));
        assert!(server.socket(kind).is_err());
        conserved(&server);
    }
}

#[test]
fn unread_messages_are_returned() {
    let (socket, mut client) = over_tcp(Kind::Dgram);
    client.write_all(b"1\n2\n").expect("it is open");
    let server = socket.server();
    while server.show().totals.received < 2 {
        thread::yield_now();
    }
    assert!(socket.close(PATIENCE), "the mux has drained");
    let mut undone = Vec::new();
    while let Some(Event::Undone(message)) = server.poll_event() {
        undone.push(message.bytes().to_vec());
    }
    assert_eq!(undone, [b"1\n", b"2\n"]);
    assert_eq!(read_all(&mut client), "");
    conserved(&server);
}

fn read_all(stream: &mut impl Read) -> String {
    let mut all = String::new();
    stream.read_to_string(&mut all).expect("it ends cleanly");
    all
}

#[test]
fn a_message_of_a_panicking_thread_goes_to_another_socket() {
    for (room, kind) in [(9, Kind::Dgram), (2, Kind::Seqpacket)] {
        let (mut socket, mut client) = over_tcp(kind);
        let mut dies = socket.try_clone().expect("another handle");
        client.write_all(b"hello\n").expect("it is open");
        let died = thread::spawn(move || {
            recv(&mut dies, room, NONE).expect("a message");
            std::panic::resume_unwind(Box::new("it is to"));
        });
        assert!(died.join().is_err());
        assert_eq!(recv(&mut socket, 9, NONE).expect("the same").0, "hello\n");
        // A socket that is closed in the middle of a message has not done it.
        let mut closes = socket.try_clone().expect("another handle");
        client.write_all(b"world\n").expect("it is open");
        assert!(recv(&mut closes, 2, if kind == Kind::Dgram { Flags::PEEK } else { NONE }).is_ok());
        drop(closes);
        assert_eq!(recv(&mut socket, 9, NONE).expect("the same").0, "world\n");
        conserved(&socket.server());
    }
}

#[test]
fn sockets_exclude_drivers_and_workers() {
    let first = server(Config::new(Order::None));
    let _socket = first.socket(Kind::Dgram).expect("a handle");
    assert!(first.worker().is_err() && first.driver().is_err());
    let second = server(Config::new(Order::None));
    let _worker = second.worker().expect("a worker");
    assert!(second.socket(Kind::Dgram).is_err());
}

/// Error numbers of Linux (include/uapi/asm-generic/errno.h).
#[test]
fn errors_have_kcms_numbers() {
    let rows = [
        (Error::WouldBlock, 11),
        (Error::TooLong { length: 2, most: 1 }, 90),
        (Error::Gone, 32),
        (Error::NotConnected, 107),
        (Error::NoAddress, 89),
        (Error::AddressMismatch, 22),
        (Error::Disabled, 11),
        (Error::Drained, 108),
        (Error::NotAttached, 2),
        (Error::Io(std::io::Error::from_raw_os_error(24)), 24),
    ];
    for (error, errno) in rows {
        assert_eq!(error.errno(), errno, "{error}");
        assert_eq!(std::io::Error::from(error).raw_os_error(), Some(errno));
    }
}

/// Clients send requests and are reset at any moment; sockets are opened, closed and panic. Every reply
/// belongs to its client, and every message is accounted for.
#[test]
fn nothing_is_lost_under_churn() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky] {
        let server = server(Config { redeliver: u8::MAX, ..Config::new(order) });
        let address = server.listen("127.0.0.1:0").expect("a port");
        let mut stays = server.socket(Kind::Dgram).expect("a handle");
        let last = stays.try_clone().expect("another handle");
        thread::scope(|scope| {
            scope.spawn(move || {
                // Sockets that close leave their messages to the others.
                while let Ok((text, _)) = recv(&mut stays, 99, NONE) {
                    let _ = stays.send(To::Requester, text.as_bytes(), NONE);
                }
            });
            let workers: Vec<_> = (0..4)
                .map(|number| {
                    let server = server.clone();
                    scope.spawn(move || work(&server, number))
                })
                .collect();
            let clients: Vec<_> = (0..8).map(|number| scope.spawn(move || ask(address, number))).collect();
            for client in clients {
                client.join().expect("it does not panic");
            }
            server.drain(Some(PATIENCE));
            for worker in workers {
                worker.join().expect("it does not panic");
            }
        });
        assert!(last.close(PATIENCE));
        conserved(&server);
        let totals = server.show().totals;
        // Of connections that were reset, no worker begins more messages.
        assert_eq!((totals.received, totals.undone), (totals.done + totals.discarded_reset, 0), "{totals:?}");
    }
}

/// Opens one socket after the other; each reads some messages in pieces; some panic.
fn work(server: &Server, number: usize) {
    for turn in number.. {
        let Ok(mut socket) = server.socket(Kind::Seqpacket) else { return };
        let over = thread::spawn(move || {
            for _ in 0..turn % 7 + 1 {
                let mut whole = Vec::new();
                loop {
                    let mut piece = [0; 5];
                    let read = match socket.recv(&mut piece, NONE) {
                        Err(Error::Drained) => return true,
                        read => read.expect("a message"),
                    };
                    whole.extend_from_slice(&piece[..read.bytes]);
                    if read.flags.contains(Flags::EOR) {
                        break;
                    }
                }
                if turn % 5 == 0 {
                    std::panic::resume_unwind(Box::new("it is to"));
                }
                match socket.send(To::Requester, &whole, Flags::EOR) {
                    Ok(_) | Err(Error::Gone) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            false
        });
        if over.join().unwrap_or(false) {
            return;
        }
    }
}

/// Sends requests on several connections; every third one ends in the middle.
fn ask(address: SocketAddr, number: usize) {
    for turn in number..number + 12 {
        let mut client = client(address);
        let asked: String = (0..20).map(|at| format!("{number} {turn} {at}\n")).collect();
        client.write_all(asked.as_bytes()).expect("it is open");
        if turn % 3 == 0 {
            continue;
        }
        let mut got: Vec<_> = read(&mut client, asked.len()).lines().map(str::to_owned).collect();
        let mut lines: Vec<_> = asked.lines().collect();
        got.sort();
        lines.sort_unstable();
        assert_eq!(got, lines);
        client.shutdown(Shutdown::Both).expect("it is open");
    }
}

#[test]
fn an_outbound_connection_is_one_of_any() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = listener.local_addr().expect("an address").to_string();
    let mut socket = server(connected()).socket(Kind::Dgram).expect("a handle");
    let _connector = socket.server().connect(&peer, towpath_mux::io::Connect::default()).expect("a thread");
    let (mut accepted, _) = listener.accept().expect("it connects");
    while let Err(error) = socket.send(To::Any, b"hello\n", NONE) {
        assert!(matches!(error, Error::NotConnected), "{error}");
        thread::yield_now();
    }
    assert_eq!(read(&mut accepted, 6), "hello\n");
    accepted.write_all(b"world\n").expect("it is open");
    assert_eq!(recv(&mut socket, 9, NONE).expect("an answer").0, "world\n");
}
