//! Frames and verdicts between two real processes.

use std::collections::BTreeMap;

use crate::world::{self, World, assert_conserved, bare, consumer, message, replaced, send, settle};
use towpath_ring::{Cause, Config, Decision, Frame, Meta, ReserveError, Seq, Verdict};

/// Lengths around every edge: inline, one frame, several frames, a GSO packet, and 256 KiB.
const LENGTHS: [usize; 12] = [0, 1, 63, 64, 65, 1023, 1024, 1025, 1500, 9000, 65536, 256 * 1024];

#[test]
fn every_size_arrives_and_every_verdict_returns() {
    world::each(|| {
        let mut world = World::new(Config { deadline: None, ..Config::default() });
        let client = world.spawn("two_processes::client_answers_by_number");
        let mut channel = world.accept();
        let mut decisions = BTreeMap::new();
        let mut note = |seq: Seq, d: Decision<'_>| {
            let copy = (bare(d.verdict), d.flow, d.mark, d.mask, replaced(d.verdict), d.cause);
            assert_eq!(decisions.insert(seq.0, copy), None, "{seq} was decided twice");
        };
        let count = 3000;
        for n in 1..=count {
            let len = LENGTHS[n as usize % LENGTHS.len()];
            assert_eq!(send(&mut channel, &message(n, len), &mut note), Some(Seq(n)));
        }
        settle(&mut channel, &mut note);
        assert_conserved(&channel);
        assert_eq!(channel.stats().decided, u64::from(count));
        assert_eq!(channel.stats().violations, 0);
        for n in 1..=count {
            let (verdict, flow, mark, mask, replacement, cause) = decisions.remove(&n).expect("decided");
            assert_eq!(cause, Cause::Single);
            match (n % 7, verdict) {
                (0, Verdict::Pass) => assert_eq!((flow, mark, mask), (false, n, 0xffff)),
                (1, Verdict::Drop) => assert_eq!((flow, mask), (true, 0)),
                (2, Verdict::Reject) | (4, Verdict::Repeat) => {}
                (3, Verdict::Queue(q)) => assert_eq!(u32::from(q), n),
                (5 | 6, Verdict::Replace(_)) => {
                    let len = LENGTHS[(n as usize + 5) % LENGTHS.len()];
                    assert_eq!(replacement.as_deref(), Some(&message(n ^ 0x55, len)[..]), "{n}");
                }
                other => panic!("{n}: {other:?}"),
            }
        }
        drop(channel);
        client.succeeds();
    });
}

#[test]
#[ignore = "the client of every_size_arrives_and_every_verdict_returns"]
fn client_answers_by_number() {
    let mut queue = consumer();
    while let Some(frame) = queue.recv().expect("received") {
        let n = frame.seq().0;
        let len = LENGTHS[n as usize % LENGTHS.len()];
        assert!(queue.payload(&frame) == message(n, len), "frame {n} of {len} bytes is damaged");
        assert_eq!(frame.header().len as usize, len);
        assert_eq!(frame.header().wire_len as usize, len);
        match n % 7 {
            0 => queue.verdict(frame, Decision::from(Verdict::Pass).with_mark(n, 0xffff)),
            1 => queue.verdict(frame, Decision::from(Verdict::Drop).for_flow()),
            2 => queue.verdict(frame, Verdict::Reject),
            3 => queue.verdict(frame, Verdict::Queue(n as u16)),
            4 => queue.verdict(frame, Verdict::Repeat),
            _ => {
                let len = LENGTHS[(n as usize + 5) % LENGTHS.len()];
                queue.replace(frame, &message(n ^ 0x55, len)).expect("replaced");
            }
        }
    }
}

#[test]
fn a_batch_verdict_covers_what_has_none_of_its_own() {
    world::each(|| {
        let mut world = World::new(Config { deadline: None, ..Config::default() });
        let client = world.spawn("two_processes::client_answers_in_batches");
        let mut channel = world.accept();
        let mut decisions = BTreeMap::new();
        let mut note = |seq: Seq, d: Decision<'_>| {
            assert_eq!(decisions.insert(seq.0, (bare(d.verdict), d.cause)), None, "{seq} was decided twice");
        };
        for n in 1..=2000 {
            send(&mut channel, &message(n, 100), &mut note);
        }
        settle(&mut channel, &mut note);
        assert_conserved(&channel);
        assert_eq!(channel.stats().violations, 0);
        for n in 1..=2000u32 {
            let expected = match n % 20 {
                3 => (Verdict::Reject, Cause::Single),
                7 => (Verdict::Repeat, Cause::Single),
                1..=10 => (Verdict::Pass, Cause::Cumulative),
                _ => (Verdict::Drop, Cause::Cumulative),
            };
            assert_eq!(decisions[&n], expected, "frame {n}");
        }
        drop(channel);
        client.succeeds();
    });
}

/// 1-10 pass, 11-20 drop, in two records; 3 is rejected before; 7 is held over both and decided much later.
#[test]
#[ignore = "the client of a_batch_verdict_covers_what_has_none_of_its_own"]
fn client_answers_in_batches() {
    let mut queue = consumer();
    let mut held: Vec<Frame> = Vec::new();
    while let Some(frame) = queue.recv().expect("received") {
        let n = frame.seq().0;
        match n % 20 {
            3 => queue.verdict(frame, Verdict::Reject),
            7 => {
                queue.hold(&frame);
                held.push(frame);
            }
            10 => queue.verdict_upto(frame.id(), Verdict::Pass),
            0 => queue.verdict_upto(frame.id(), Verdict::Drop),
            _ => {}
        }
        if n == 2000 {
            for frame in held.drain(..).rev() {
                let n = frame.seq().0;
                assert!(queue.payload(&frame) == message(n, 100), "held frame {n} was overwritten");
                queue.verdict(frame, Verdict::Repeat);
            }
        }
    }
}

#[test]
fn a_message_larger_than_the_ring_comes_through_the_same_call() {
    world::each(|| {
        let geometry = towpath_ring::Geometry::with(64 << 10, 1024).expect("a geometry");
        let config = Config { rx: geometry, deadline: None, oneshot_max: 20 << 20, ..Config::default() };
        let mut world = World::new(config);
        let client = world.spawn("two_processes::client_reads_large_messages");
        let mut channel = world.accept();
        let mut decided = 0;
        for n in 1..=60 {
            send(&mut channel, &message(n, large(n)), |seq, d| {
                assert_eq!(d.mark, seq.0);
                decided += 1;
            });
        }
        settle(&mut channel, |_, _| decided += 1);
        assert_eq!(decided, 60);
        assert_eq!(channel.stats().oneshots, 20);
        assert_eq!(channel.send(&vec![0; (20 << 20) + 1], &Meta::default()), Err(ReserveError::TooLarge));
        assert_eq!(channel.reserve(65 << 10).err(), Some(ReserveError::TooLarge));
        assert_conserved(&channel);
        drop(channel);
        client.succeeds();
    });
}

/// The same call with the same content, in the other direction.
#[test]
fn a_message_larger_than_the_ring_goes_to_the_engine_through_the_same_call() {
    world::each_first(|| {
        let tx = towpath_ring::Geometry::with(16 << 10, 1024).expect("a geometry");
        let config = Config {
            tx,
            deadline: None,
            oneshot_max: 5 << 20,
            replacement_max: 3 << 20,
            messages: true,
            ..Config::default()
        };
        let mut world = World::new(config);
        let client = world.spawn("two_processes::client_sends_large_messages");
        let mut channel = world.accept();
        let mut got = 0;
        while got < LARGE {
            let found = channel.poll_messages(|header, payload| {
                got += 1;
                assert_eq!(header.mark, got);
                assert!(payload == message(got, large_to_engine(got)), "message {got} is damaged");
            });
            if found == 0 {
                channel.wait(Some(world::PATIENCE)).expect("wait");
            }
        }
        // And as the payload of a verdict.
        channel.send(&message(1, 100), &Meta::default()).expect("room");
        let mut was_replaced = false;
        settle(&mut channel, |_, d| was_replaced = replaced(d.verdict) == Some(message(7, 3 << 20)));
        assert!(was_replaced);
        let large = (1..=LARGE).filter(|n| large_to_engine(*n) > 16 << 10).count() as u64;
        assert_eq!((channel.stats().oneshots_in, channel.stats().violations), (large + 1, 0));
        assert_conserved(&channel);
        drop(channel);
        client.succeeds();
    });
}

const LARGE: u32 = 60;

fn large_to_engine(n: u32) -> usize {
    [10, 16 << 10, (16 << 10) + 1][n as usize % 3] + n as usize / 3 * 100_000 * usize::from(n % 3 == 2)
}

#[test]
#[ignore = "the client of a_message_larger_than_the_ring_goes_to_the_engine_through_the_same_call"]
fn client_sends_large_messages() {
    let mut queue = consumer();
    for n in 1..=LARGE {
        queue.send(&message(n, large_to_engine(n)), &Meta { mark: n, ..Meta::default() }).expect("sent");
    }
    assert_eq!(queue.send(&vec![0; (5 << 20) + 1], &Meta::default()), Err(ReserveError::TooLarge));
    let frame = queue.recv().expect("received").expect("a frame");
    let payload = message(7, 3 << 20);
    let not = queue.replace(frame, &[&payload[..], b"x"].concat()).expect_err("larger than the engine takes");
    let frame = (not.why == ReserveError::TooLarge).then_some(not.frame).expect("too large");
    queue.replace(frame, &payload).expect("replaced");
    assert!(queue.recv().expect("the end").is_none());
    assert!(queue.stats().oneshots > 1);
}

fn large(n: u32) -> usize {
    [100, 64 << 10, 1 << 20][n as usize % 3] + n as usize / 3 * 100_000 * usize::from(n % 3 == 2)
}

#[test]
#[ignore = "the client of a_message_larger_than_the_ring_comes_through_the_same_call"]
fn client_reads_large_messages() {
    let mut queue = consumer();
    let mut batch = Vec::new();
    while queue.recv_batch(&mut batch, 4).expect("received") > 0 {
        for frame in batch.drain(..) {
            let n = frame.seq().0;
            assert!(queue.payload(&frame) == message(n, large(n)), "message {n} is damaged");
            queue.verdict(frame, Decision::from(Verdict::Pass).with_mark(n, !0));
        }
    }
}

/// Every second message is held for the whole time: the ring does not stop, and large messages are placed after held ones.
#[test]
fn held_frames_do_not_stop_the_ring() {
    world::each(|| {
        let geometry = towpath_ring::Geometry::with(64 << 10, 1024).expect("a geometry");
        let mut world =
            World::new(Config { rx: geometry, deadline: None, held_max: 30, ..Config::default() });
        let client = world.spawn("two_processes::client_holds_on");
        let mut channel = world.accept();
        let mut decided = 0;
        for n in 1..=5000 {
            send(&mut channel, &message(n, if n % 50 == 0 { 30_000 } else { 900 }), |_, _| decided += 1);
        }
        settle(&mut channel, |_, _| decided += 1);
        assert_eq!(decided, 5000);
        assert_conserved(&channel);
        drop(channel);
        client.succeeds();
    });
}

#[test]
#[ignore = "the client of held_frames_do_not_stop_the_ring"]
fn client_holds_on() {
    let mut queue = consumer();
    let mut held = Vec::new();
    while let Some(frame) = queue.recv().expect("received") {
        let n = frame.seq().0;
        if n < 1000 && n % 40 == 1 {
            queue.hold(&frame);
            held.push(frame);
            continue;
        }
        assert!(queue.payload(&frame) == message(n, frame.header().len as usize), "frame {n} is damaged");
        queue.verdict(frame, Verdict::Pass);
        if n == 5000 {
            assert_eq!(held.len(), 25);
            for frame in held.drain(..) {
                let n = frame.seq().0;
                assert!(queue.payload(&frame) == message(n, 900), "held frame {n} was overwritten");
                queue.verdict(frame, Verdict::Pass);
            }
        }
    }
}
