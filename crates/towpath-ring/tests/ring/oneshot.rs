//! One-shot messages: many at a time, and processes without a free descriptor for one.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::world::{self, PATIENCE, World, assert_conserved, consumer, message, pair, settle};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use towpath_ring::{Config, Geometry, Kind, Meta, RecvError, ReserveError, Seq, Verdict};

/// Longer than any ring here.
const LONG: usize = 70_000;

fn config() -> Config {
    let ring = Geometry::with(64 << 10, 64).expect("a geometry");
    Config { rx: ring, tx: ring, deadline: None, messages: true, violations_max: 0, ..Config::default() }
}

/// Prevents this process from opening files while `then` runs. (The limit is not 0, because poll(2) checks it, too.)
fn without_descriptors<T>(then: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum: before.maximum }).expect("setrlimit");
    let result = then();
    setrlimit(Resource::Nofile, before).expect("setrlimit");
    result
}

/// An engine that is always faster: the socket is full of notices whenever the client reads one.
#[test]
fn notices_are_read_as_their_frames_are_received() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(config());
        let bytes = message(1, LONG);
        let mut taken = Vec::new();
        for _ in 0..40 {
            while channel.send(&bytes, &Meta::default()) != Err(ReserveError::RingFull) {}
            let frame = client.try_recv().expect("received").expect("a frame");
            assert!(client.payload(&frame) == bytes);
            taken.push(frame);
        }
        for (n, frame) in (1..).zip(taken) {
            assert_eq!(frame.seq(), Seq(n));
            client.verdict(frame, Verdict::Pass);
        }
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 40);
        while let Some(frame) = client.try_recv().expect("received") {
            client.verdict(frame, Verdict::Pass);
        }
        settle(&mut channel, |_, _| {});
        assert_eq!((channel.held(), channel.stats().violations), (0, 0));
        assert_conserved(&channel);
    });
}

#[test]
fn a_client_without_a_free_descriptor_gets_an_error_and_continues() {
    let mut world = World::new(config());
    let client = world.spawn("oneshot::client_without_descriptors");
    let mut channel = world.accept();
    channel.send(&message(1, LONG), &Meta::default()).expect("room");
    channel.send(&message(2, LONG), &Meta::default()).expect("room");
    channel.send(&message(3, 1000), &Meta::default()).expect("room");
    channel.kick();
    let mut decided = Vec::new();
    let end = Instant::now() + PATIENCE;
    while decided.len() < 2 && !channel.is_dead() && Instant::now() < end {
        if channel.poll_verdicts(0, |seq, _| decided.push(seq.0)) == 0 {
            channel.wait(Some(Duration::from_secs(1))).expect("wait");
        }
    }
    // The client keeps the first frame, as any frame without a verdict.
    assert_eq!(decided, [2, 3]);
    assert_eq!(channel.held(), 1);
    drop(channel);
    client.succeeds();
}

#[test]
#[ignore = "the client of a_client_without_a_free_descriptor_gets_an_error_and_continues"]
fn client_without_descriptors() {
    let mut queue = consumer();
    match without_descriptors(|| queue.recv()) {
        Err(RecvError::System(e)) => {
            assert_eq!(e.raw_os_error(), Some(rustix::io::Errno::MFILE.raw_os_error()), "{e}");
        }
        other => panic!("{other:?}"),
    }
    for (n, len) in [(2, LONG), (3, 1000)] {
        let frame = queue.recv().expect("received").expect("a frame");
        assert_eq!(frame.seq(), Seq(n));
        assert!(queue.payload(&frame) == message(n, len));
        queue.verdict(frame, Verdict::Pass);
    }
    while queue.recv().expect("received").is_some() {}
}

/// A lost descriptor holds back the messages after it in the socket, which then stays readable.
#[test]
fn a_client_that_does_not_listen_sleeps_and_sees_the_end() {
    World::new(config()).spawn("oneshot::client_that_does_not_listen").succeeds();
}

#[test]
#[ignore = "the client of a_client_that_does_not_listen_sleeps_and_sees_the_end"]
fn client_that_does_not_listen() {
    let (_world, mut channel, mut client) = pair(config());
    channel.send(&message(1, LONG), &Meta::default()).expect("room");
    channel.send(&message(2, LONG), &Meta::default()).expect("room");
    without_descriptors(|| client.disarm().expect("listened"));
    let meta = Meta { kind: Kind::REPLY, ..Meta::default() };
    while client.try_send(b"x", &meta).is_ok() {}
    let patience = Duration::from_millis(100);
    client.set_send_timeout(Some(patience));
    // A thread that was not scheduled during the timeout does not sleep: try again.
    let mut tries = 0;
    while client.stats().sleeps == 0 {
        assert_eq!(client.send(b"x", &meta), Err(ReserveError::RingFull));
        tries += 1;
        assert!(tries < 100, "it never sleeps");
    }
    // Each sleep takes a millisecond at least.
    let sleeps = u128::from(client.stats().sleeps);
    assert!(sleeps <= tries * (patience.as_millis() + 1), "{sleeps} sleeps in {tries}");
    drop(channel);
    client.set_send_timeout(Some(PATIENCE));
    assert_eq!(client.send(b"x", &meta), Err(ReserveError::Disconnected));
}

/// Runs in a separate process, because the whole process has no free descriptors.
#[test]
fn an_engine_without_a_descriptor_counts_no_violation() {
    World::new(config()).spawn("oneshot::engine_without_descriptors").succeeds();
}

#[test]
#[ignore = "the engine of an_engine_without_a_descriptor_blames_nobody"]
fn engine_without_descriptors() {
    let (_world, mut channel, mut client) = pair(config());
    let meta = Meta { kind: Kind::REPLY, ..Meta::default() };
    client.send(&message(1, LONG), &meta).expect("sent");
    without_descriptors(|| {
        assert!(channel.check_peer());
        assert_eq!(channel.poll_messages(|_, _| panic!("it has no memory")), 0);
    });
    // A message that arrives when descriptors are free again is received.
    client.send(&message(2, LONG), &meta).expect("sent");
    assert_eq!(channel.poll_messages(|_, payload| assert!(payload == message(2, LONG))), 1);

    // A replacement without memory becomes the default verdict, and is not a violation of the client.
    channel.send(b"one", &Meta::default()).expect("room");
    let frame = client.try_recv().expect("received").expect("a frame");
    client.replace(frame, &message(3, LONG)).expect("replaced");
    without_descriptors(|| {
        assert_eq!(channel.poll_verdicts(0, |_, d| assert_eq!(d.verdict, Verdict::Drop)), 1);
    });
    assert_eq!((channel.death(), channel.stats().violations), (None, 0));
    assert_conserved(&channel);
}

/// Signals interrupt the system calls that create a message's memory. Runs in a separate process, because it is stopped repeatedly.
#[test]
fn signals_make_no_message_too_large() {
    World::new(config()).spawn("oneshot::engine_that_is_stopped").succeeds();
}

#[test]
#[ignore = "the engine of signals_make_no_message_too_large"]
fn engine_that_is_stopped() {
    let (_world, mut channel, mut client) = pair(config());
    let us = std::process::id().to_string();
    // It ends by itself. If it were killed, it could leave this process stopped.
    let script = "for i in 1 2 3 4 5 6 7 8 9 0; do for j in 1 2 3 4 5 6 7 8 9 0; do \
                  kill -STOP $0; kill -CONT $0; sleep 0.002; done; done";
    let mut shell = Command::new("sh").args(["-c", script, &us]).spawn().expect("sh");
    let bytes = message(1, 4 << 20);
    let mut failed = Vec::new();
    while shell.try_wait().expect("wait").is_none() {
        if let Err(why) = channel.send(&bytes, &Meta::default()) {
            failed.push(why);
        }
        while let Some(frame) = client.try_recv().expect("received") {
            client.verdict(frame, Verdict::Pass);
        }
        channel.poll_verdicts(0, |_, _| {});
    }
    assert_eq!(failed, []);
}
