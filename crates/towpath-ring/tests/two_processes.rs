//! Frames and verdicts between two real processes.

mod world;

use std::collections::BTreeMap;

use towpath_ring::{Answer, Cause, Config, Flags, Frame, Full, Seq, Verdict};
use world::{World, assert_conserved, consumer, message, send, settle};

/// Lengths around every edge: inline, frame, several frames, a GSO packet, the largest that a bar names.
const LENGTHS: [usize; 12] = [0, 1, 63, 64, 65, 1023, 1024, 1025, 1500, 9000, 65536, 256 * 1024];

#[test]
fn every_size_arrives_and_every_verdict_returns() {
    let mut world = World::new(Config { deadline: None, ..Config::default() });
    let client = world.spawn("client_answers_by_number");
    let mut channel = world.accept();
    let mut decisions = BTreeMap::new();
    let mut note = |seq: Seq, d: towpath_ring::Decision<'_>| {
        let copy = (d.verdict, d.flags, d.mark, d.mask, d.replacement.map(<[u8]>::to_vec), d.cause);
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
        let (verdict, flags, mark, mask, replacement, cause) = decisions.remove(&n).expect("decided");
        assert_eq!(cause, Cause::Single);
        match (n % 7, verdict) {
            (0, Verdict::Pass) => assert_eq!((flags, mark, mask), (Flags::MARK, n, 0xffff)),
            (1, Verdict::Drop) => assert_eq!(flags, Flags::FLOW),
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
            0 => queue.verdict(frame, Answer::from(Verdict::Pass).mark(n, 0xffff)),
            1 => queue.verdict(frame, Answer::from(Verdict::Drop).flow()),
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
    let mut world = World::new(Config { deadline: None, ..Config::default() });
    let client = world.spawn("client_answers_in_batches");
    let mut channel = world.accept();
    let mut decisions = BTreeMap::new();
    let mut note = |seq: Seq, d: towpath_ring::Decision<'_>| {
        assert_eq!(decisions.insert(seq.0, (d.verdict, d.cause)), None, "{seq} was decided twice");
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
            10 => queue.verdict_upto(frame.seq(), Verdict::Pass),
            0 => queue.verdict_upto(frame.seq(), Verdict::Drop),
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
fn kill_9_gives_back_what_was_held() {
    let mut world = World::new(Config { deadline: None, ..Config::default() });
    let mut client = world.spawn("client_takes_and_stalls");
    let mut channel = world.accept();
    let mut decided = Vec::new();
    for n in 1..=100 {
        send(&mut channel, &message(n, 1500), |_, _| panic!("decided too early"));
    }
    while decided.len() < 50 {
        channel.wait(Some(world::PATIENCE)).expect("wait");
        channel.poll_verdicts(0, |seq, _| decided.push(seq.0));
    }
    client.kill();
    channel.wait(Some(world::PATIENCE)).expect("wait");
    assert!(channel.is_dead());
    assert_eq!(channel.reserve(1).err(), Some(Full::Dead));
    channel.poll_verdicts(0, |seq, _| decided.push(seq.0));
    let mut drained = Vec::new();
    channel.drain_held(|seq| drained.push(seq.0));
    channel.drain_held(|seq| panic!("{seq} came back twice"));
    decided.extend(&drained);
    decided.sort_unstable();
    assert_eq!(decided, (1..=100).collect::<Vec<_>>());
    assert_eq!(channel.stats().drained, 50);
    assert_conserved(&channel);
}

#[test]
#[ignore = "the client of kill_9_gives_back_what_was_held"]
fn client_takes_and_stalls() {
    let mut queue = consumer();
    for n in 1..=100 {
        let frame = queue.recv().expect("received").expect("a frame");
        match n % 4 {
            0 | 1 => queue.verdict(frame, Verdict::Pass),
            2 => queue.hold(&frame),
            _ => drop(frame),
        }
    }
    queue.recv().expect("killed here");
}
