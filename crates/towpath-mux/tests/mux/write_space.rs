//! Senders that wait for write space.

use std::io::Write;
use std::thread;
use std::time::Duration;

use towpath_mux::io::{Error, Flags, Kind, To};
use towpath_mux::mux::{Bound, Config};

use super::worker_api::{NONE, PATIENCE, attach, becomes_readable, connected, over_unix, read, recv};

#[test]
fn a_sender_waits_for_write_space() {
    let config = Config { send_bytes: Bound::of(4096), ..connected() };
    let (mut socket, mut peer) = over_unix(Kind::Dgram, config);
    let message = [b'x'; 1024];
    let mut sent = 0;
    let blocked = loop {
        match socket.send(To::Any, &message, Flags::DONTWAIT) {
            Ok(bytes) => sent += bytes,
            Err(error) => break error,
        }
    };
    assert!(matches!(blocked, Error::WouldBlock), "{blocked}");
    socket.set_send_timeout(Some(Duration::from_millis(5)));
    assert!(matches!(socket.send(To::Any, &message, NONE), Err(Error::WouldBlock)));
    // Earlier parts are kept.
    assert_eq!(socket.send(To::Any, b"12", Flags::MORE).expect("it is taken"), 2);
    assert!(matches!(socket.send(To::Any, b"3", Flags::DONTWAIT), Err(Error::WouldBlock)));
    socket.set_send_timeout(None);
    let reader = thread::spawn(move || {
        let all = read(&mut peer, sent + 3);
        (peer, all)
    });
    assert_eq!(socket.send(To::Any, b"3", NONE).expect("there is room by and by"), 1);
    let (peer, all) = reader.join().expect("it does not panic");
    assert!(all.ends_with("x123"));
    // Waiting ends with the connection.
    let id = loop {
        if let Some(row) = socket.server().show().psocks.first() {
            break row.id;
        }
    };
    while socket.send(To::Psock(id), &message, Flags::DONTWAIT).is_ok() {}
    let closer = thread::spawn(move || drop(peer));
    assert!(matches!(socket.send(To::Psock(id), &message, NONE), Err(Error::Gone)));
    closer.join().expect("it does not panic");
}

#[test]
fn several_senders_get_write_space() {
    let config = Config { send_bytes: Bound::of(4096), ..connected() };
    let (mut socket, mut peer) = over_unix(Kind::Dgram, config);
    let message = [b'x'; 1024];
    let mut sent = 0;
    while let Ok(bytes) = socket.send(To::Any, &message, Flags::DONTWAIT) {
        sent += bytes;
    }
    thread::scope(|scope| {
        for mut socket in
            [socket.try_clone().expect("a handle"), socket.try_clone().expect("a handle"), socket]
        {
            scope.spawn(move || {
                for _ in 0..50 {
                    assert_eq!(socket.send(To::Any, &message, NONE).expect("there is room by and by"), 1024);
                }
            });
        }
        assert!(read(&mut peer, sent + 3 * 50 * 1024).bytes().all(|byte| byte == b'x'));
    });
}

#[test]
fn the_descriptor_reports_write_space() {
    let config = Config { send_bytes: Bound::of(4096), ..connected() };
    let (mut socket, mut peer) = over_unix(Kind::Dgram, config);
    let id = socket.server().show().psocks[0].id;
    let message = [b'x'; 1024];
    for to in [To::Any, To::Psock(id)] {
        let mut sent = 0;
        while let Ok(bytes) = socket.send(to, &message, Flags::DONTWAIT) {
            sent += bytes;
        }
        assert!(socket.arm(Some(to)));
        assert!(!becomes_readable(&socket, Duration::ZERO), "the peer does not read");
        let reader = thread::spawn(move || {
            read(&mut peer, sent);
            peer
        });
        assert!(becomes_readable(&socket, PATIENCE), "there is write space");
        peer = reader.join().expect("it does not panic");
        socket.disarm();
        assert!(!socket.arm(Some(to)));
    }
    // A batch without write space is sent later, and wakes its socket.
    while socket.send(To::Any, &message, Flags::DONTWAIT).is_ok() {}
    socket.send(To::Any, b"last", Flags::BATCH).expect("it is taken");
    assert!(socket.arm(None));
    let closer = thread::spawn(move || {
        while !read(&mut peer, 1).ends_with('t') {}
        peer
    });
    assert!(becomes_readable(&socket, PATIENCE), "there is write space");
    socket.disarm();
    assert!(matches!(recv(&mut socket, 9, Flags::DONTWAIT), Err(Error::WouldBlock)));
    // A connection that has ended is not waited for.
    let peer = closer.join().expect("it does not panic");
    while socket.send(To::Psock(id), &message, Flags::DONTWAIT).is_ok() {}
    assert!(socket.arm(Some(To::Psock(id))));
    drop(peer);
    assert!(becomes_readable(&socket, PATIENCE));
    socket.disarm();
    assert!(matches!(socket.send(To::Psock(id), &message, Flags::DONTWAIT), Err(Error::Gone)));
}

/// A socket that waits for write space can still answer the message that it holds.
#[test]
fn a_socket_that_waits_for_write_space_keeps_its_message() {
    let config = Config { send_bytes: Bound::of(4096), ..connected() };
    let (mut socket, mut full) = over_unix(Kind::Dgram, config);
    let id = socket.server().show().psocks[0].id;
    let mut asks = attach(&socket);
    asks.write_all(b"?\n").expect("it is open");
    assert_eq!(recv(&mut socket, 9, NONE).expect("a message").0, "?\n");
    let mut sent = 0;
    while let Ok(bytes) = socket.send(To::Psock(id), &[b'x'; 1024], Flags::DONTWAIT) {
        sent += bytes;
    }
    assert!(socket.arm(Some(To::Psock(id))));
    let reader = thread::spawn(move || read(&mut full, sent));
    assert!(becomes_readable(&socket, PATIENCE));
    socket.disarm();
    assert!(!socket.arm(Some(To::Requester)), "a reply does not wait");
    socket.send(To::Requester, b"!\n", NONE).expect("it is not done");
    assert_eq!(read(&mut asks, 2), "!\n");
    reader.join().expect("it does not panic");
}
