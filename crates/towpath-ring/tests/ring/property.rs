//! An engine and a client execute any permitted operations in any order, on one lane or two. An oracle
//! records the decision of each frame.

use std::collections::BTreeMap;

use crate::world::{self, World, assert_conserved, message};
use proptest::prelude::*;
use towpath_ring::{Channel, Config, Consumer, Frame, Geometry, Meta, Seq, Verdict};

const VERDICTS: [Verdict<'static>; 4] = [Verdict::Pass, Verdict::Drop, Verdict::Reject, Verdict::Repeat];

#[derive(Clone, Debug)]
enum Op {
    /// Sends this number of bytes on a lane.
    Send(usize, usize),
    Recv(usize),
    Verdict(usize, usize),
    Hold(usize),
    Upto(usize, usize),
    Replace(usize, usize),
    /// Sends this number of bytes to the engine.
    Message(usize),
    Poll(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![0..70usize, 0..3000usize, Just(10_000)];
    prop_oneof![
        8 => (0..2usize, len()).prop_map(|(lane, len)| Op::Send(lane, len)),
        4 => (1..6usize).prop_map(Op::Recv),
        4 => (any::<usize>(), 0..4usize).prop_map(|(i, v)| Op::Verdict(i, v)),
        1 => any::<usize>().prop_map(Op::Hold),
        2 => (any::<usize>(), 0..4usize).prop_map(|(i, v)| Op::Upto(i, v)),
        2 => (any::<usize>(), len()).prop_map(|(i, len)| Op::Replace(i, len)),
        1 => len().prop_map(Op::Message),
        4 => (0..2usize).prop_map(Op::Poll),
    ]
}

/// The oracle's record of an outstanding frame.
#[derive(Clone, Debug, Default)]
struct Known {
    len: usize,
    received: bool,
    held: bool,
    said: Option<Verdict<'static>>,
    replacement: Option<Vec<u8>>,
}

#[derive(Default)]
struct Oracle {
    out: BTreeMap<(u32, u32), Known>,
    /// By lane: the number that the client receives next.
    next: [u32; 2],
    /// Messages for the engine, oldest first.
    messages: Vec<Vec<u8>>,
}

impl Oracle {
    fn poll(&mut self, channel: &mut Channel) {
        let lane = channel.lane();
        channel.poll_verdicts(0, |seq, decision| {
            let known = self.out.remove(&(lane, seq.0)).expect("decided once, and only if it was out");
            let said = known.said.unwrap_or_else(|| panic!("{seq} has no verdict"));
            match (said, decision.verdict) {
                (Verdict::Replace(_), Verdict::Replace(_)) => {}
                (said, verdict) => assert_eq!(said, verdict, "{seq}"),
            }
            assert_eq!(world::replaced(decision.verdict), known.replacement, "{seq}");
        });
        channel.poll_messages(|_, payload| {
            assert_eq!(lane, 0);
            assert!(payload == self.messages.remove(0), "in order, and whole");
        });
        assert_conserved(channel);
        assert_eq!(channel.stats().violations, 0);
    }

    fn take(&mut self, client: &Consumer, frame: &Frame) {
        let (lane, seq) = (frame.id().lane, frame.seq().0);
        self.next[lane as usize] += 1;
        assert_eq!(seq, self.next[lane as usize], "in order, none missing");
        let known = self.out.get_mut(&(lane, seq)).expect("it was sent");
        known.received = true;
        assert!(client.payload(frame) == content(lane, seq, known.len));
    }

    fn known(&mut self, frame: &Frame) -> &mut Known {
        self.out.get_mut(&(frame.id().lane, frame.seq().0)).expect("it is out")
    }
}

fn content(lane: u32, seq: u32, len: usize) -> Vec<u8> {
    message(seq ^ lane << 16, len)
}

fn run(lanes: u32, ops: Vec<Op>) {
    let ring = |kib: u32| Geometry::with(kib << 10, 512).expect("a geometry");
    let config =
        Config { rx: ring(8), tx: ring(8), lanes, deadline: None, messages: true, ..Config::default() };
    let mut world = World::new(config);
    let path = world.socket();
    let client = std::thread::spawn(move || Consumer::attach(path).expect("attached"));
    let mut lanes = world.accept_all().split();
    let mut client = client.join().expect("attached");
    let (mut oracle, mut frames) = (Oracle::default(), Vec::<Frame>::new());
    for op in ops {
        match op {
            Op::Send(lane, len) => {
                let lane = lane % lanes.len();
                let number = lanes[lane].stats().published as u32 + 1;
                if let Ok(seq) = lanes[lane].send(&content(lane as u32, number, len), &Meta::default()) {
                    assert_eq!(seq, Seq(number));
                    oracle.out.insert((lane as u32, number), Known { len, ..Known::default() });
                }
            }
            Op::Recv(count) => {
                for _ in 0..count {
                    let Some(frame) = client.try_recv().expect("received") else { break };
                    oracle.take(&client, &frame);
                    frames.push(frame);
                }
            }
            Op::Verdict(i, v) if !frames.is_empty() => {
                let frame = frames.swap_remove(i % frames.len());
                let known = oracle.known(&frame);
                known.said = Some(VERDICTS[v]);
                assert!(client.payload(&frame) == content(frame.id().lane, frame.seq().0, known.len));
                client.verdict(frame, VERDICTS[v]);
            }
            Op::Hold(i) if !frames.is_empty() => {
                let frame = &frames[i % frames.len()];
                client.hold(frame);
                oracle.known(frame).held = true;
            }
            Op::Upto(i, v) if !frames.is_empty() => {
                let id = frames[i % frames.len()].id();
                client.verdict_upto(id, VERDICTS[v]);
                for ((lane, seq), known) in &mut oracle.out {
                    if *lane == id.lane && *seq <= id.seq.0 && !known.held && known.said.is_none() {
                        known.said = Some(VERDICTS[v]);
                    }
                }
                frames.retain(|frame| client.has(frame));
                assert!(frames.iter().all(|frame| oracle.known(frame).said.is_none()));
            }
            Op::Replace(i, len) if !frames.is_empty() => {
                let frame = frames.swap_remove(i % frames.len());
                let bytes = vec![i as u8; len];
                let (lane, seq) = (frame.id().lane, frame.seq().0);
                match client.try_replace(frame, &bytes) {
                    Ok(()) => {
                        let known = oracle.out.get_mut(&(lane, seq)).expect("it is out");
                        known.said = Some(Verdict::Replace(&[]));
                        known.replacement = Some(bytes);
                    }
                    Err(not) => frames.push(not.frame),
                }
            }
            Op::Message(len) => {
                let bytes = vec![oracle.messages.len() as u8; len];
                if client.try_send(&bytes, &Meta::default()).is_ok() {
                    oracle.messages.push(bytes);
                }
            }
            Op::Poll(lane) => {
                let lane = lane % lanes.len();
                oracle.poll(&mut lanes[lane]);
            }
            _ => {}
        }
    }
    // Drains all frames and messages.
    for _ in 0..200 {
        while let Some(frame) = client.try_recv().expect("received") {
            oracle.take(&client, &frame);
            frames.push(frame);
        }
        for frame in frames.drain(..) {
            oracle.known(&frame).said = Some(Verdict::Pass);
            client.verdict(frame, Verdict::Pass);
        }
        lanes.iter_mut().for_each(|lane| oracle.poll(lane));
    }
    assert!(oracle.out.is_empty(), "{:?}", oracle.out);
    assert!(oracle.messages.is_empty());
    assert!(lanes.iter().all(|lane| lane.held() == 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn whatever_is_done_each_frame_has_its_verdict(
        lanes in 1..=2u32,
        ops in prop::collection::vec(op(), 1..200),
    ) {
        run(lanes, ops);
    }
}
