//! The client library faces a hostile engine: a program may attach to a socket in a directory that every user can write.
//!
//! The tests check that no call panics, reads outside of the memory or runs forever, and that the client's memory stays
//! bounded. The harness is `mock/engine.rs` and `mock/welcome.rs`, which the fuzzer runs too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;

use crate::lane::batch;
use crate::mock;
use crate::mock::engine::{EngineOp, HostileLane, engine, run_engine};
use crate::shm::abi;
use crate::{Consumer, Kind, RecvError, ServeError, Verdict, Worker};

fn engine_op() -> impl Strategy<Value = EngineOp> {
    prop_oneof![
        2 => (any::<usize>(), any::<u64>()).prop_map(|(i, w)| EngineOp::Word(i, w)),
        8 => (0..32u32, 0..3u32, prop_oneof![0..70u32, 0..9000u32, any::<u32>()], 0..8u16)
            .prop_map(|(at, ahead, len, flags)| EngineOp::Header(at, ahead, len, flags)),
        2 => (0..3u32, 0..40u32).prop_map(|(ahead, at)| EngineOp::Note(ahead, at)),
        2 => (0..16u32, 0..24u32, 0..9u8).prop_map(|(at, seq, verdict)| EngineOp::Release(at, seq, verdict)),
        1 => (0..3u32, any::<u64>(), 0..4u8).prop_map(|(s, l, what)| EngineOp::Notice(s, l, what)),
        1 => prop::collection::vec(any::<u8>(), 1..40).prop_map(EngineOp::Message),
        8 => Just(EngineOp::Recv),
        2 => (0..40usize).prop_map(EngineOp::RecvBatch),
        1 => Just(EngineOp::RecvTimeout),
        3 => any::<usize>().prop_map(EngineOp::Verdict),
        1 => any::<usize>().prop_map(EngineOp::Hold),
        2 => (any::<usize>(), 0..5000usize).prop_map(|(i, n)| EngineOp::Replace(i, n)),
        2 => any::<u32>().prop_map(EngineOp::Upto),
        1 => Just(EngineOp::All),
        2 => (0..9000usize).prop_map(EngineOp::Send),
        2 => Just(EngineOp::Look),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn an_engine_may_write_anything(lanes in 1..=2u32, ops in prop::collection::vec(engine_op(), 1..120)) {
        run_engine(lanes, ops);
    }

    #[test]
    fn any_bytes_of_the_fuzzer_are_a_handshake(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        mock::hostile_client(&bytes);
        mock::hostile_engine(&bytes);
        mock::hostile_handshake(&bytes);
    }
}

/// Otherwise the harness would only test refusals.
#[test]
fn the_harness_reaches_accepted_handshakes() {
    use crate::handshake::attach::receive;
    use crate::shm::park::Fences;
    let mut accepted = 0;
    for seed in 0..64u64 {
        // Knuth's MMIX generator.
        let mut state = seed;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(400)
        .collect();
        let (messages, client) = mock::sockets();
        mock::welcome::say(&mut mock::Input(&bytes), &messages);
        drop(messages);
        accepted += u32::from(receive(client, std::path::Path::new("hostile"), Fences::Both).is_ok());
    }
    assert!((4..=60).contains(&accepted), "{accepted} of 64 handshakes were accepted");
}

/// The client keeps one frame. The engine publishes on the others, as an honest one never does.
#[test]
fn memory_is_bounded_while_a_frame_is_undecided() {
    let (hostile, attached) = engine(1);
    let mut client = Consumer::over(attached);
    hostile[0].publish(0, 1, Kind(0), 0, 10);
    let kept = client.try_recv().unwrap().unwrap();
    for seq in 2..2000 {
        let at = 1 + seq % 2;
        hostile[0].publish(at, seq, Kind(0), 0, 10);
        hostile[0].note(seq, at);
        let frame = client.try_recv().unwrap().expect("a frame");
        assert_eq!(frame.seq().0, seq);
        client.verdict(frame, Verdict::Pass);
        assert!(client.queued() <= 64, "{} frames are queued", client.queued());
    }
    // It is still decided by a record.
    client.verdict_all(Verdict::Drop);
    assert!(!client.has(&kept));
}

#[test]
fn lost_frames_may_be_any_numbers() {
    let (hostile, attached) = engine(2);
    let mut client = Consumer::over(attached);
    for lane in &hostile {
        lane.own.word(abi::ENGINE_LOST).store(u64::MAX, Ordering::Relaxed);
    }
    assert_eq!(client.overrun(), u64::MAX - 1);
    hostile[0].own.word(abi::ENGINE_LOST).store(3, Ordering::Relaxed);
    assert_eq!(client.overrun(), 4);
}

/// Publishes frames of `kind` in a full ring of 32 as soon as the client has released one, until `stop`.
fn keep_publishing(lane: &HostileLane, kind: Kind, stop: &AtomicBool) {
    for n in 32u32.. {
        let at = n % 32;
        while lane.released(at) != n - 31 {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            thread::yield_now();
        }
        lane.publish(at, n + 1, kind, 0, 10);
    }
}

/// Each call would run forever if it read frames until it finds a message. The calls go on until the ring was filled three times: how
/// many that takes depends on when the publisher runs.
#[test]
fn frames_without_messages_do_not_keep_a_worker() {
    let (mut hostile, attached) = engine(1);
    let lane = hostile.pop().unwrap();
    let mut worker = Worker::over(Consumer::over(attached));
    (0..32).for_each(|n| lane.publish(n, n + 1, Kind::ERROR, 0, 10));
    assert!(worker.try_recv().unwrap().is_none());
    assert!(worker.stats().received > 0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| keep_publishing(&lane, Kind::ERROR, &stop));
        let mut calls = 0;
        while calls < 20 || worker.stats().received <= 64 {
            assert!(worker.try_recv().unwrap().is_none());
            assert!(worker.recv_timeout(Duration::from_millis(1)).unwrap().is_none());
            calls += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// The engine changes the lengths of a batch while the worker reads it.
#[test]
fn a_batch_that_changes_does_not_panic() {
    let (mut hostile, attached) = engine(1);
    let mut lane = hostile.pop().unwrap();
    let mut worker = Worker::over(Consumer::over(attached));
    let entry = |len: u32| [&len.to_ne_bytes()[..], &[0; batch::ENTRY - 4]].concat();
    let batch = [&entry(10)[..], &entry(10), &entry(10), &[b'x'; 30]].concat();
    lane.payload.bytes_mut(0, batch.len()).copy_from_slice(&batch);
    lane.publish_marked(0, 1, Kind::MESSAGES, batch.len() as u32, 3);
    crate::shm::sys::shut(&lane.socket);
    let mut lengths = Vec::new();
    worker
        .serve(|message, _| {
            lengths.push(message.bytes().len());
            lane.payload.bytes_mut(batch::ENTRY, 4).copy_from_slice(&u32::MAX.to_ne_bytes());
        })
        .unwrap();
    assert_eq!(lengths.len(), 3);
    assert!(lengths.iter().sum::<usize>() <= 30, "{lengths:?}");
}

#[test]
fn a_batch_has_at_most_the_stated_number_of_messages() {
    assert!(batch::parse(&[0; 66 * batch::ENTRY], 65).is_none());
    assert_eq!(batch::parse(&[0; 64 * batch::ENTRY], 64).unwrap().count(), 64);
    for mark in [65, u32::MAX] {
        let (hostile, attached) = engine(1);
        let mut worker = Worker::over(Consumer::over(attached));
        hostile[0].publish_marked(0, 1, Kind::MESSAGES, 2000, mark);
        let refused = worker.serve(|_, _| panic!("no message")).unwrap_err();
        assert!(matches!(&refused, ServeError::Recv(RecvError::Damaged(_))), "{refused}");
    }
}
