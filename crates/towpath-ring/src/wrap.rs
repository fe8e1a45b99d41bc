//! Sequence numbers that wrap after 2^32 frames: all comparisons of them, in both directions.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use crate::mock::{self, config};
use crate::shm::seq::BEGIN;
use crate::{Channel, Config, Consumer, Frame, Kind, Meta, ReserveError, Seq, Verdict};

#[derive(Clone, Debug)]
enum Op {
    Send(usize),
    Recv,
    Pass(usize),
    Replace(usize, usize),
    Hold(usize),
    Upto(usize),
    Message(usize),
    Poll,
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![3 => 0..300usize, 1 => 300..3000usize];
    prop_oneof![
        8 => len().prop_map(Op::Send),
        10 => Just(Op::Recv),
        4 => any::<usize>().prop_map(Op::Pass),
        1 => (any::<usize>(), len()).prop_map(|(i, len)| Op::Replace(i, len)),
        1 => any::<usize>().prop_map(Op::Hold),
        2 => any::<usize>().prop_map(Op::Upto),
        5 => len().prop_map(Op::Message),
        4 => Just(Op::Poll),
    ]
}

/// Both ends of a channel, and the frames that each must receive.
struct World {
    channel: Channel,
    client: Consumer,
    /// Received and undecided.
    frames: Vec<Frame>,
    /// The number of the next frame.
    next: Seq,
    /// Sent and not received.
    sent: VecDeque<Vec<u8>>,
    /// The expected decision about a frame; `None` while it is undecided.
    out: BTreeMap<u32, Option<Verdict<'static>>>,
    said: VecDeque<Vec<u8>>,
    written: u8,
    now: u64,
}

impl World {
    fn new(first: Seq) -> Self {
        BEGIN.set(first);
        let config = Config { deadline: None, ..config() };
        let (mut lanes, clients) = mock::channel(&config);
        let client = Consumer::over(clients);
        BEGIN.set(Seq::FIRST);
        Self {
            channel: lanes.remove(0),
            client,
            frames: Vec::new(),
            next: first,
            sent: VecDeque::new(),
            out: BTreeMap::new(),
            said: VecDeque::new(),
            written: 0,
            now: 0,
        }
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        self.written = self.written.wrapping_add(1);
        vec![self.written; len]
    }

    fn apply(&mut self, op: Op) {
        let count = self.frames.len();
        match op {
            Op::Send(len) => {
                let bytes = self.bytes(len);
                match self.channel.send(&bytes, &Meta::default()) {
                    Ok(seq) => {
                        assert_eq!(self.out.insert(seq.0, None), None);
                        self.sent.push_back(bytes);
                    }
                    // An empty message cannot be one-shot.
                    Err(ReserveError::TooLarge) => assert_eq!(len, 0),
                    Err(why) => assert!(
                        matches!(why, ReserveError::RingFull | ReserveError::NoContiguousSpace),
                        "{why}"
                    ),
                }
            }
            Op::Recv => self.receive(),
            Op::Poll => self.poll(),
            Op::Message(len) => {
                let bytes = self.bytes(len);
                match self.client.try_send(&bytes, &Meta { kind: Kind::MESSAGE, ..Meta::default() }) {
                    Ok(()) => self.said.push_back(bytes),
                    Err(why) => assert_eq!(why, ReserveError::RingFull),
                }
            }
            Op::Pass(i) if count > 0 => {
                let frame = self.frames.swap_remove(i % count);
                self.out.insert(frame.seq().0, Some(Verdict::Pass));
                self.client.verdict(frame, Verdict::Pass);
            }
            Op::Replace(i, len) if count > 0 => {
                let frame = self.frames.swap_remove(i % count);
                let (seq, bytes) = (frame.seq(), self.bytes(len));
                match self.client.try_replace(frame, &bytes) {
                    Ok(()) => {
                        self.out.insert(seq.0, Some(Verdict::Replace(&[])));
                    }
                    Err(not) => self.frames.push(not.frame),
                }
            }
            Op::Hold(i) if count > 0 => self.client.hold(&self.frames[i % count]),
            Op::Upto(i) if count > 0 => {
                let upto = self.frames[i % count].id();
                self.client.verdict_upto(upto, Verdict::Drop);
                let Self { frames, client, out, .. } = self;
                for frame in frames.extract_if(.., |frame| !client.has(frame)) {
                    assert!(!upto.seq.is_before(frame.seq()), "{} is behind {}", frame.seq(), upto.seq);
                    out.insert(frame.seq().0, Some(Verdict::Drop));
                }
            }
            _ => {}
        }
    }

    fn receive(&mut self) {
        let frame = self.client.try_recv().expect("received");
        let Some(bytes) = self.sent.pop_front() else {
            assert!(frame.is_none(), "{frame:?}");
            return;
        };
        let frame = frame.expect("the frame that was sent");
        assert_eq!(frame.seq(), self.next);
        assert!(self.client.payload(&frame) == bytes, "frame {}", frame.seq());
        self.next = self.next.next();
        self.frames.push(frame);
    }

    fn poll(&mut self) {
        self.now += 10_000_000;
        let Self { channel, out, said, .. } = self;
        channel.poll_verdicts(self.now, |seq, decision| {
            let expected = out.remove(&seq.0).flatten().expect("a frame that was decided");
            // The payload is not compared.
            let said = match decision.verdict {
                Verdict::Replace(_) => Verdict::Replace(&[]),
                other => other,
            };
            assert_eq!(said, expected, "{seq}: {decision:?}");
        });
        let mut said_now = Vec::new();
        channel.poll_messages(|_, payload| said_now.push(payload.to_vec()));
        for bytes in said_now {
            assert!(said.pop_front() == Some(bytes), "another message");
        }
    }

    fn finish(mut self) {
        while !self.sent.is_empty() {
            self.receive();
        }
        while !self.frames.is_empty() {
            self.apply(Op::Pass(0));
        }
        for _ in 0..100 {
            self.poll();
        }
        assert!(self.out.is_empty() && self.said.is_empty(), "{:?}", self.out);
        let stats = self.channel.stats();
        assert_eq!((stats.violations, self.channel.held()), (0, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn everything_goes_on_when_the_numbers_begin_again(
        before in 0..60u32,
        ops in prop::collection::vec(op(), 1..600),
    ) {
        let mut world = World::new(Seq(0).back(before));
        for op in ops {
            world.apply(op);
        }
        world.finish();
    }
}
