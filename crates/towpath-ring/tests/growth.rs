//! Lanes that start small and grow while frames are out: nothing is lost, the order stays, held frames stay readable.

mod world;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use towpath_ring::{Config, Consumer, Full, Geometry, Growth, Limits, Meta, Seq, Verdict};
use world::{World, assert_conserved, consumer, message, pair, send, settle};

fn config(kib: u32, max_kib: u32, after: u32) -> Config {
    let ring = |kib: u32| Geometry::with(kib << 10, 1024).expect("a geometry");
    let growth = Some(Growth { max_bytes: max_kib << 10, after });
    Config { rx: ring(kib), tx: ring(8), growth, deadline: None, messages: true, ..Config::default() }
}

/// Takes every frame that is there.
fn receive(client: &mut Consumer) -> Vec<towpath_ring::Frame> {
    let mut frames = Vec::new();
    while let Some(frame) = client.try_recv().expect("received") {
        frames.push(frame);
    }
    frames
}

#[test]
fn a_ring_that_is_full_again_and_again_grows() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(config(8, 32, 3));
        let mut sent = 0_u32;
        let mut fill = |channel: &mut towpath_ring::Channel| {
            let before = sent;
            while channel.send(&message(sent + 1, 1000), &Meta::default()).is_ok() {
                sent += 1;
            }
            sent - before
        };
        let mut expected = 1;
        // Grown at the third time, and full again in the same round: one of the next three.
        let rounds = [(8, 0), (8, 0), (8 + 16, 1), (16, 1), (16 + 32, 2), (32, 2), (32, 2), (32, 2)];
        for (round, (room, grown)) in rounds.into_iter().enumerate() {
            assert_eq!((fill(&mut channel), channel.stats().grown), (room, grown), "round {round}");
            for frame in receive(&mut client) {
                assert_eq!(frame.seq(), Seq(expected), "in order, none missing");
                assert!(client.payload(&frame) == message(expected, 1000));
                expected += 1;
                client.verdict(frame, Verdict::Pass);
            }
            let mut decided = 0;
            // The second poll finds what the client said before it left the old rings.
            for _ in 0..2 {
                decided += channel.poll_verdicts(0, |_, _| {}) as u32;
            }
            assert_eq!((decided, channel.held(), channel.stats().old), (room, 0, 0));
        }
        // As large as it may be.
        assert_eq!(channel.geometry().bytes(), 32 << 10);
        assert_eq!(channel.stats().violations, 0);
        assert_conserved(&channel);
    });
}

/// Nothing is published after the ring was left: what became of its frames is all that is waited for.
#[test]
fn the_deadline_of_the_ring_before_counts_while_the_lane_grows() {
    world::each(|| {
        let deadline = Some(Duration::from_nanos(1600));
        let (_world, mut channel, _client) = pair(Config { deadline, ..config(8, 1024, 1) });
        for n in 1..=8 {
            channel.send(&message(n, 1000), &Meta::default()).expect("room");
        }
        channel.poll_verdicts(0, |_, _| panic!("too early"));
        channel.send(&message(9, 1000), &Meta::default()).expect("room");
        assert_eq!((channel.stats().grown, channel.deadline()), (1, Some(1600)));
        channel.poll_verdicts(500, |_, _| panic!("too early"));
        assert_eq!(channel.deadline(), Some(1600));
        assert_eq!(channel.poll_verdicts(1600, |seq, _| assert!(seq.0 <= 8)), 8);
        assert_eq!(channel.deadline(), Some(2100));
        assert_eq!(channel.poll_verdicts(2100, |seq, _| assert_eq!(seq.0, 9)), 1);
        assert_eq!(channel.deadline(), None);
    });
}

#[test]
fn frames_in_the_ring_before_stay_until_they_are_released() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(config(8, 1024, 1));
        for n in 1..=8 {
            channel.send(&message(n, 1000), &Meta::default()).expect("room");
        }
        let mut old = receive(&mut client);
        old.iter().take(3).for_each(|frame| client.hold(frame));
        // Full: it grows, and does not again while the ring before is in use.
        for n in 9..=24 {
            channel.send(&message(n, 1000), &Meta::default()).expect("room");
        }
        assert_eq!(channel.send(&message(0, 1000), &Meta::default()), Err(Full::Lent));
        let stats = channel.stats();
        assert_eq!((stats.grown, stats.old, stats.out), (1, 8, 24));
        assert_eq!(channel.frames().count(), 24);
        let mut new = receive(&mut client);
        assert_eq!(new.len(), 16);
        channel.poll_verdicts(0, |seq, _| panic!("{seq} decided"));
        assert_eq!(channel.stats().held, 3);
        for frame in old.iter().chain(&new) {
            assert!(client.payload(frame) == message(frame.seq().0, 1000), "frame {}", frame.seq());
        }

        let mut decided = Vec::new();
        let mut poll = |channel: &mut towpath_ring::Channel| {
            decided.clear();
            channel.poll_verdicts(0, |seq, d| {
                decided.push((seq.0, d.verdict, d.replacement.map(<[u8]>::to_vec)));
            });
            decided.sort_by_key(|row| row.0);
            decided.clone()
        };
        // A cumulative verdict goes over both rings, and leaves what is held.
        client.verdict_upto(new[3].id(), Verdict::Drop);
        let rows = poll(&mut channel);
        assert_eq!(rows.iter().map(|row| row.0).collect::<Vec<_>>(), (4..=12).collect::<Vec<_>>());
        // A replacement for a frame in the ring before, and one in this ring.
        let held = old.remove(1);
        client.replace(held, &message(77, 600)).expect("replaced");
        client.replace(new.remove(10), &message(78, 20_000)).expect("replaced");
        let rows = poll(&mut channel);
        assert_eq!(rows[0].2.as_deref(), Some(&message(77, 600)[..]));
        assert_eq!((rows[1].0, rows[1].2.as_deref()), (19, Some(&message(78, 20_000)[..])));
        // Released in any order.
        for frame in [old.remove(1), old.remove(0)] {
            assert!(client.payload(&frame) == message(frame.seq().0, 1000));
            client.verdict(frame, Verdict::Repeat);
        }
        assert_eq!(poll(&mut channel).len(), 2);
        assert_eq!(channel.stats().old, 0);
        client.verdict_all(Verdict::Pass);
        poll(&mut channel);
        assert_eq!((channel.held(), channel.stats().violations), (0, 0));
        assert_conserved(&channel);
    });
}

/// What does not fit at all grows the ring at once; and what a client sends stays in order across its own ring's growth.
#[test]
fn both_directions_grow_and_stay_in_order() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(config(8, 1024, 100));
        channel.send(&message(1, 30_000), &Meta::default()).expect("room");
        assert_eq!((channel.stats().grown, channel.stats().oneshots), (1, 0));
        // Eight frames towards the engine, and sixteen in the larger ring; then that is full, and says so.
        let mut sent = 0_u32;
        while client.try_send(&message(sent + 1, 900), &Meta::default()).is_ok() {
            sent += 1;
        }
        assert_eq!(sent, 8 + 16);
        let frame = client.try_recv().expect("received").expect("a frame");
        assert!(client.payload(&frame) == message(1, 30_000));
        let mut got = 0;
        while channel.poll_messages(|_, payload| {
            got += 1;
            assert!(payload == message(got, 900), "message {got}");
        }) > 0
        {}
        assert_eq!(got, sent);
        client.verdict(frame, Verdict::Pass);
        channel.poll_verdicts(0, |_, _| {});
        // It was told on the socket that the client's ring was full.
        channel.check_peer();
        assert_eq!(channel.stats().grown, 2);
        assert_eq!(channel.stats().violations, 0);
        assert_conserved(&channel);
    });
}

/// It has the number there that the first message has in the larger ring.
#[test]
fn a_replacement_in_the_ring_before_hides_no_message_in_this_one() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(config(8, 1024, 1));
        for n in 1..=9 {
            channel.send(&message(n, 1000), &Meta::default()).expect("room");
        }
        let mut frames = receive(&mut client);
        assert_eq!((frames.len(), channel.stats().grown), (9, 1));
        client.send(b"in the larger ring", &Meta::default()).expect("room");
        client.replace(frames.remove(3), b"in the ring before").expect("replaced");
        let mut replaced = None;
        channel.poll_verdicts(0, |seq, d| replaced = Some((seq.0, d.replacement.map(<[u8]>::to_vec))));
        assert_eq!(replaced, Some((4, Some(b"in the ring before".to_vec()))));
        let mut said = Vec::new();
        channel.poll_messages(|_, payload| said.push(payload.to_vec()));
        assert_eq!(said, [b"in the larger ring"]);
        client.verdict_all(Verdict::Pass);
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 8);
        assert_eq!((channel.stats().old, channel.stats().violations), (0, 0));
    });
}

/// It goes with frames in both rings, some of them held: all come back, once.
#[test]
fn a_client_that_dies_between_two_rings_leaves_nothing() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(config(8, 1024, 1));
        for n in 1..=8 {
            channel.send(&message(n, 1000), &Meta::default()).expect("room");
        }
        let old = receive(&mut client);
        client.hold(&old[2]);
        for n in 9..=12 {
            channel.send(&message(n, 1000), &Meta::default()).expect("room");
        }
        let first = receive(&mut client).remove(0);
        client.verdict(first, Verdict::Pass);
        drop(client);
        // A child of another test may have the socket until it executes its program.
        while channel.check_peer() {
            std::thread::yield_now();
        }
        // What it said in time counts.
        assert_eq!(channel.poll_verdicts(0, |seq, _| assert_eq!(seq, Seq(9))), 1);
        let mut back = Vec::new();
        channel.drain_held(|seq| back.push(seq.0));
        back.sort_unstable();
        assert_eq!(back, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]);
        assert_conserved(&channel);
    });
}

/// It sends without ever receiving, and nothing is taken before its ring was full: at its ninth message it waits, and only larger rings
/// let it go on.
#[test]
fn a_client_that_waits_for_room_goes_on_in_larger_rings() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(config(8, 1024, 100));
        let sender = std::thread::spawn(move || {
            for n in 1..=500 {
                client.send(&message(n, 900), &Meta::default()).expect("sent");
            }
            client.flush();
            client
        });
        let end = Instant::now() + world::PATIENCE;
        while channel.stats().grown == 0 {
            assert!(channel.check_peer() && Instant::now() < end, "{:?}", channel.stats());
            std::thread::yield_now();
        }
        let mut got = 0;
        while got < 500 {
            let found = channel.poll_messages(|_, payload| {
                got += 1;
                assert!(payload == message(got, 900), "message {got}");
            });
            if found == 0 {
                channel.poll_verdicts(0, |_, _| {});
                channel.wait(Some(world::PATIENCE)).expect("wait");
                assert!(!channel.is_dead());
            }
        }
        let stats = channel.stats();
        assert!(stats.grown >= 1, "{stats:?}");
        assert_eq!(stats.violations, 0);
        drop(sender.join().expect("the sender"));
    });
}

#[test]
fn growth_counts_against_the_users_bytes() {
    let limits = Limits { bytes_per_user: 400 << 10, ..Limits::default() };
    let (_world, mut channel, mut client) = pair(Config { limits, records: 2, ..config(8, 1024, 1) });
    let mut grown = Vec::new();
    for _ in 0..8 {
        while channel.send(&[1; 1000], &Meta::default()).is_ok() {}
        for frame in receive(&mut client) {
            client.verdict(frame, Verdict::Pass);
        }
        channel.poll_verdicts(0, |_, _| {});
        channel.poll_messages(|_, _| {});
        channel.poll_verdicts(0, |_, _| {});
        grown.push(channel.stats().grown);
    }
    // Refused once, and not asked again.
    assert!(grown[7] >= 1, "{grown:?}");
    assert_eq!((grown[6], channel.stats().grow_refused), (grown[7], 1));
    assert!(channel.geometry().bytes() < 1 << 20);
    assert!(channel.send(&[1; 1000], &Meta::default()).is_ok());
}

/// Another process, frames of all sizes, some held over several generations.
#[test]
fn a_ring_grows_under_load() {
    world::each(|| {
        let mut world = World::new(config(8, 256, 2));
        let client = world.spawn("client_of_a_growing_ring");
        let mut channel = world.accept();
        let mut decided = BTreeSet::new();
        let mut note =
            |seq: Seq, _: towpath_ring::Decision<'_>| assert!(decided.insert(seq.0), "{seq} twice");
        for n in 1..=3000 {
            let len = [10, 64, 900, 3000, 12_000][n as usize % 5];
            assert_eq!(send(&mut channel, &message(n, len), &mut note), Some(Seq(n)));
        }
        settle(&mut channel, &mut note);
        assert_eq!(decided.len(), 3000);
        let stats = channel.stats();
        assert!(stats.grown >= 3, "{stats:?}");
        assert_eq!((stats.violations, stats.oneshots), (0, 0), "{stats:?}");
        assert_conserved(&channel);
        drop(channel);
        client.succeeds();
    });
}

#[test]
#[ignore = "the client of a_ring_grows_under_load"]
fn client_of_a_growing_ring() {
    let mut queue = consumer();
    let mut held = Vec::new();
    let mut next = 1;
    while let Some(frame) = queue.recv().expect("received") {
        let n = frame.seq().0;
        assert_eq!(n, next);
        next += 1;
        assert!(queue.payload(&frame) == message(n, frame.header().len as usize), "frame {n} is damaged");
        if n % 100 == 7 {
            queue.hold(&frame);
            held.push(frame);
        } else if n % 3 == 0 {
            queue.replace(frame, &message(n, 200)).expect("replaced");
        } else {
            queue.verdict(frame, Verdict::Pass);
        }
        if held.len() > 2 || n == 3000 {
            for frame in held.drain(..) {
                let n = frame.seq().0;
                assert!(queue.payload(&frame) == message(n, frame.header().len as usize), "held {n}");
                queue.verdict(frame, Verdict::Pass);
            }
        }
    }
    assert_eq!(next, 3001);
}
