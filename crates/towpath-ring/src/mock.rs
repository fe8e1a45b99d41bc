//! Hostile peers: a client that writes arbitrary words to all memory that it may write, and an engine with random memory.
//!
//! One harness for the property tests and for the fuzzer. It checks that no side panics or reads
//! outside of the memory, that each frame is decided at most once, and that the counters add up.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::engine::open::open;
use crate::engine::quota::Quotas;
use crate::handshake::attach::{Attached, receive};
use crate::handshake::messages::{Hello, Notice, Offer, Welcome};
use crate::shm::abi::{self, ENTRY_WORDS, HEADER_WORDS};
use crate::shm::park::Fences;
use crate::shm::sys;
use crate::{
    Channel, Config, Credentials, Decision, Geometry, Kind, Meta, Quota, ReserveError, Seq, Verdict,
};
use engine::{EngineOp, run_engine};

pub(crate) mod engine;
pub(crate) mod welcome;

/// Maximum number of operations of one run.
const OPS: usize = 400;
/// Maximum number of bytes of a one-shot message.
const ONESHOT_MAX: u64 = 8000;
/// Maximum number of bytes of a replacement.
const REPLACEMENT_MAX: u32 = 3000;

/// Runs an engine against a client whose control messages, ring and socket the fuzzer writes.
///
/// # Panics
/// Panics if the engine's side violates an invariant.
pub fn hostile_client(input: &[u8]) {
    let _ = Hello::parse(input);
    let _ = Notice::parse(input);
    let mut input = Input(input);
    let shape = input.below(2);
    let config = Config { lanes: 1 + shape as u32, ..config() };
    run_client(&config, std::iter::from_fn(|| Op::decode(&mut input)).take(OPS));
}

/// Runs a client against an engine whose welcome, ring and socket the fuzzer writes.
///
/// # Panics
/// Panics if the client's side violates an invariant.
pub fn hostile_engine(input: &[u8]) {
    let _ = Welcome::parse(input);
    let _ = Offer::parse(input);
    let mut input = Input(input);
    let lanes = 1 + input.below(2) as u32;
    run_engine(lanes, std::iter::from_fn(|| EngineOp::decode(&mut input)).take(OPS));
}

/// Attaches a client to an engine whose messages and descriptors the fuzzer chooses, and uses the rings if the client
/// accepts them.
///
/// # Panics
/// Panics if the client's side violates an invariant.
pub fn hostile_handshake(input: &[u8]) {
    welcome::run(&mut Input(input));
}

/// Numbers from a fuzzer's bytes.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn number(&mut self, bytes: usize) -> u64 {
        let (head, rest) = self.0.split_at(bytes.min(self.0.len()));
        self.0 = rest;
        head.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.number(if end <= 256 { 1 } else { 2 }) % end
    }

    /// A small, a medium, or an arbitrary number.
    pub(crate) fn any(&mut self, small: u64, middling: u64) -> u64 {
        match self.below(3) {
            0 => self.below(small),
            1 => self.below(middling),
            _ => self.number(8),
        }
    }

    pub(crate) fn bytes(&mut self, max: usize) -> Vec<u8> {
        let len = (self.below(max as u64) as usize).min(self.0.len());
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head.to_vec()
    }
}

pub(crate) fn small(frame_nr: u32) -> Geometry {
    Geometry { block_size: 4096, block_nr: frame_nr / 16, frame_size: 256, frame_nr }
}

pub(crate) fn config() -> Config {
    Config {
        oneshot_max: ONESHOT_MAX,
        replacement_max: REPLACEMENT_MAX,
        rx: small(32),
        tx: small(16),
        records: 4,
        held_max: 8,
        deadline: Some(Duration::from_nanos(1000)),
        violations_max: u64::MAX,
        messages: true,
        ..Config::default()
    }
}

pub(crate) fn sockets() -> (OwnedFd, OwnedFd) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).expect("sockets")
}

pub(crate) fn hello() -> Hello {
    Hello {
        version: abi::VERSION,
        gaps: true,
        events: false,
        parts: false,
        fences: Fences::Both,
        name: "mock".into(),
    }
}

/// The payload of a replacement.
pub(crate) fn replaced<'a>(decision: &Decision<'a>) -> Option<&'a [u8]> {
    match decision.verdict {
        Verdict::Replace(bytes) => Some(bytes),
        _ => None,
    }
}

/// Both ends of a channel, without an endpoint.
pub(crate) fn channel(config: &Config) -> (Vec<Channel>, Vec<Attached>) {
    let (ours, theirs) = sockets();
    let peer = Credentials { pid: std::process::id(), uid: 0, gid: 0 };
    let charge =
        Quotas::new(Quota::default()).take(&peer, "mock", 0, std::time::Instant::now()).expect("a charge");
    let ours = config.reaper.wrap(crate::reaper::PeerKey::User(peer.uid), ours);
    let channel = open(config, &ours, peer, &hello(), charge).expect("a channel");
    let lanes = receive(theirs, std::path::Path::new("mock"), Fences::Both).expect("attached");
    (channel.split(), lanes)
}

/// An operation of the hostile client or of the engine.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Send(usize),
    Poll(u64),
    /// Writes any word of the client memory.
    Word(usize, u64),
    /// Writes a plausible release entry: frame, number relative to the last, verdict, flags, argument.
    Entry(u32, u32, u8, u8, u16),
    /// Writes a plausible record, and the number of records written.
    Record(u32, u32, u8, u16, u32),
    /// Writes a TX header, often that of a replacement: frame, number, length, flags, kind.
    Transmit(u32, u32, u32, u16, u16),
    Message(Vec<u8>),
    /// Sends a one-shot memory: number, stated length, real size, whether it is sealed, number of copies.
    OneShot(u32, u64, usize, bool, usize),
    Arm,
    Close,
}

impl Op {
    fn decode(i: &mut Input<'_>) -> Option<Self> {
        if i.0.is_empty() {
            return None;
        }
        Some(match i.below(20) {
            0..3 => Self::Send(i.below(9000) as usize),
            3..6 => Self::Poll(i.below(400)),
            6 => Self::Word(i.number(4) as usize, i.number(8)),
            7..11 => Self::Entry(
                i.below(32) as u32,
                i.below(40) as u32,
                i.below(9) as u8,
                i.below(5) as u8,
                i.below(20) as u16,
            ),
            11..13 => Self::Record(
                i.below(4) as u32,
                i.below(40) as u32,
                i.below(9) as u8,
                i.number(2) as u16,
                i.below(6) as u32,
            ),
            13..16 => Self::Transmit(
                i.below(16) as u32,
                i.below(40) as u32,
                i.any(70, 5000) as u32,
                i.below(8) as u16,
                5 + i.below(3) as u16,
            ),
            16 => Self::Message(i.bytes(40)),
            17 => Self::OneShot(
                1 + i.below(4) as u32,
                i.any(70, 9000),
                i.below(9000) as usize,
                i.below(2) == 0,
                i.below(4) as usize,
            ),
            18 => Self::Arm,
            _ => Self::Close,
        })
    }
}

/// The engine's view of what it published, and the check that each is decided once.
#[derive(Default)]
pub(crate) struct Ledger {
    out: BTreeSet<u32>,
}

impl Ledger {
    pub(crate) fn send(&mut self, channel: &mut Channel, len: usize) {
        if let Ok(seq) = channel.send(&vec![0xa5; len], &Meta::default()) {
            assert!(self.out.insert(seq.0));
        }
    }

    pub(crate) fn poll(&mut self, channel: &mut Channel, now: u64) {
        channel.poll_verdicts(now, |seq, decision| {
            assert!(self.out.remove(&seq.0), "{seq} was decided twice or never published");
            assert_ne!(decision.verdict, Verdict::Hold);
            assert!(replaced(&decision).is_none_or(|bytes| bytes.len() <= REPLACEMENT_MAX as usize));
        });
        assert_eq!(channel.held() as usize, self.out.len());
        channel.poll_messages(|header, payload| {
            assert_ne!(header.kind, Kind::REPLACEMENT);
            assert_eq!(header.len as usize, payload.len());
        });
    }

    pub(crate) fn finish(&mut self, channel: &mut Channel) {
        channel.drain_held(|seq| assert!(self.out.remove(&seq.0), "{seq} came back twice"));
        assert!(self.out.is_empty());
        let s = channel.stats();
        assert_eq!(s.published, s.decided + s.overdue + s.invalid + s.drained);
        assert_eq!(channel.send(&[1], &Meta::default()), Err(ReserveError::Disconnected));
    }
}

pub(crate) fn apply(
    op: Op,
    raw: &mut Option<Attached>,
    channel: &mut Channel,
    ledger: &mut Ledger,
    now: &mut u64,
) {
    let last = channel.stats().published as u32;
    match op {
        Op::Send(len) => ledger.send(channel, len),
        Op::Poll(later) => {
            *now += later;
            ledger.poll(channel, *now);
        }
        Op::Arm => {
            let _ = channel.arm();
            channel.check_peer();
            channel.disarm();
        }
        op => poke(op, raw, last),
    }
}

/// Fields of a TX header.
pub(crate) struct Header {
    pub(crate) seq: u32,
    pub(crate) len: u32,
    pub(crate) kind: Kind,
    pub(crate) flags: u16,
    /// The RX frame that it is for.
    pub(crate) of: u32,
}

/// Writes a TX header.
pub(crate) fn transmit(client: &Attached, at: u32, says: Header) {
    let Header { seq, len, kind, flags, of } = says;
    let header = client.memory.layout.tx_headers() + at as usize * HEADER_WORDS;
    let store = |index: usize, word: u64| client.memory.own.word(index).store(word, Ordering::Relaxed);
    store(header + 4, u64::from(of) << 32);
    store(header + 1, u64::from(len) | u64::from(kind.0) << 32 | u64::from(flags) << 48);
    store(header, seq.into());
}

/// Writes the word of a release entry.
pub(crate) fn answer(client: &Attached, at: u32, word: u64) {
    let entry = client.memory.layout.rx_entries() + at as usize * ENTRY_WORDS + 1;
    client.memory.own.word(entry).store(word, Ordering::Relaxed);
}

/// Writes record `number` (from 0), and the count of records.
#[cfg(test)]
pub(crate) fn record(client: &Attached, number: u32, word: u64) {
    let records = client.memory.layout.records;
    let record = client.memory.layout.record_ring() + (number % records) as usize * ENTRY_WORDS + 1;
    client.memory.own.word(record).store(word, Ordering::Relaxed);
    client.memory.own.word(abi::CLIENT_RECORDS).store(u64::from(number) + 1, Ordering::Relaxed);
}

/// Applies an operation of the hostile client to its memory and its socket; `last` is the number of the last frame sent to it.
pub(crate) fn poke(op: Op, raw: &mut Option<Attached>, last: u32) {
    let Some(client) = raw else { return };
    let layout = client.memory.layout;
    let store = |index: usize, word: u64| client.memory.own.word(index).store(word, Ordering::Relaxed);
    let word = |back: u32, verdict: u8, flags: u8, arg: u16| {
        u64::from(last.wrapping_sub(back).wrapping_add(2))
            | u64::from(verdict) << 32
            | u64::from(flags) << 40
            | u64::from(arg) << 48
    };
    match op {
        Op::Word(index, word) => store(index % (layout.client_bytes() / 8), word),
        Op::Entry(at, back, verdict, flags, arg) => {
            answer(client, at, word(back, verdict, flags, arg));
        }
        Op::Record(index, back, verdict, arg, more) => {
            store(layout.record_ring() + index as usize * ENTRY_WORDS + 1, word(back, verdict, 0, arg));
            let taken = client.memory.theirs.word(abi::ENGINE_RECORDS).load(Ordering::Relaxed);
            store(abi::CLIENT_RECORDS, taken.wrapping_add(more.into()));
        }
        Op::Transmit(at, back, len, flags, kind) => {
            let of = last.wrapping_sub(back).wrapping_add(2);
            transmit(client, at, Header { seq: back % 4 + 1, len, kind: Kind(kind), flags, of });
        }
        Op::Message(bytes) => {
            let _ = sys::send(&client.socket, &bytes, &[]);
        }
        Op::OneShot(seq, len, size, sealed, copies) => {
            let bytes = vec![1; size.max(1)];
            let memory =
                if sealed { sys::frozen(&bytes) } else { sys::memfd("hostile", bytes.len()) }.unwrap();
            let fds = vec![memory.as_fd(); copies];
            let _ = sys::send(&client.socket, &Notice::OneShot { seq: Seq(seq), len }.emit(), &fds);
            // Also the header of the frame.
            let header = layout.tx_headers() + (seq as usize % 16) * HEADER_WORDS;
            store(
                header + 1,
                len & 0xffff_ffff | 6 << 32 | u64::from(crate::shm::header::FLAG_ONESHOT) << 48,
            );
            store(header, seq.into());
        }
        Op::Close => *raw = None,
        Op::Send(_) | Op::Poll(_) | Op::Arm => {}
    }
}

/// The operations, on the last lane of an engine's channel and the client's raw memory.
pub(crate) fn run_client(config: &Config, ops: impl IntoIterator<Item = Op>) {
    let (mut others, mut raw) = channel(config);
    let mut channel = others.pop().expect("a lane");
    let (mut raw, mut ledger, mut now) = (raw.pop(), Ledger::default(), 0);
    for op in ops {
        apply(op, &mut raw, &mut channel, &mut ledger, &mut now);
    }
    ledger.poll(&mut channel, now);
    ledger.finish(&mut channel);
    assert!(others.iter().all(Channel::is_dead), "a lane outlives the others");
}
