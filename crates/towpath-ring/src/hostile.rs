//! Hostile peers: a client that writes arbitrary words to all memory that it may write, and an engine with random headers.
//!
//! The tests check that no side panics or reads outside of the memory, that each frame is decided at most once, that the
//! counters add up, and that a hostile client does not affect an honest one.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;

use crate::handshake::attach::{Attached, Options, attach};
use crate::handshake::messages::{Notice, Reply, Terms, Welcome};
use crate::lane::verdict::Word;
use crate::mock::{self, Ledger, Op, apply, config, replaced, small};
use crate::reaper::{Limits, Reaper};
use crate::shm::abi::{self, ENTRY_WORDS, Layout};
use crate::shm::header::FLAG_ONESHOT;
use crate::shm::park::Fences;
use crate::shm::region::{Access, Words};
use crate::shm::sys;
use crate::{
    AttachError, Cause, Channel, Config, Consumer, Death, Endpoint, Geometry, Kind, Meta, Quota, Seq, Verdict,
};

struct Pair {
    _dir: tempfile::TempDir,
    path: PathBuf,
    endpoint: Endpoint,
}

fn pair(config: Config) -> Pair {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    Pair { endpoint: Endpoint::bind(&path, config).unwrap(), path, _dir: dir }
}

impl Pair {
    /// Attaches `client`, which runs in a thread because it waits for the engine.
    fn attach<T: Send + 'static>(
        &mut self,
        client: impl FnOnce(PathBuf) -> T + Send + 'static,
    ) -> (Channel, T) {
        let path = self.path.clone();
        let client = thread::spawn(move || client(path));
        let channel = loop {
            if let Some(channel) = self.endpoint.accept().unwrap() {
                break channel;
            }
            self.endpoint.wait(Some(Duration::from_secs(5))).unwrap();
        };
        (channel, client.join().unwrap())
    }
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..2000usize).prop_map(Op::Send),
        4 => (0..400u64).prop_map(Op::Poll),
        3 => (any::<usize>(), any::<u64>()).prop_map(|(i, w)| Op::Word(i, w)),
        8 => (0..32u32, 0..40u32, 0..9u8, 0..5u8, 0..20u16)
            .prop_map(|(at, back, verdict, flags, arg)| Op::Entry(at, back, verdict, flags, arg)),
        3 => (0..4u32, 0..40u32, 0..9u8, any::<u16>(), 0..6u32)
            .prop_map(|(i, back, verdict, arg, more)| Op::Record(i, back, verdict, arg, more)),
        5 => (0..16u32, 0..40u32, prop_oneof![0..70u32, 0..5000u32, any::<u32>()], 0..8u16, 5..8u16)
            .prop_map(|(at, back, len, flags, kind)| Op::Transmit(at, back, len, flags, kind)),
        1 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Op::Message),
        2 => (1..5u32, prop_oneof![0..9000u64, any::<u64>()], 0..9000usize, any::<bool>(), 0..4usize)
            .prop_map(|(seq, len, size, sealed, fds)| Op::OneShot(seq, len, size, sealed, fds)),
        1 => Just(Op::Arm),
        1 => Just(Op::Close),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_client_may_write_anything(lanes in 1..=2u32, ops in prop::collection::vec(op(), 1..200)) {
        let mut pair = pair(Config { lanes, ..config() });
        let (mut honest, mut neighbour) = pair.attach(|path| Consumer::attach_as(path, "honest").unwrap());
        let (channel, mut raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap());
        // The last lane. When it ends, all lanes end.
        let mut others = channel.split();
        let mut channel = others.pop().unwrap();
        let (mut raw, mut ledger, mut now) = (raw.pop(), Ledger::default(), 0);
        for (n, op) in ops.into_iter().enumerate() {
            apply(op, &mut raw, &mut channel, &mut ledger, &mut now);
            let text = [n as u8; 300];
            let sent = honest.send(&text, &Meta::default()).unwrap();
            let frame = neighbour.try_recv().unwrap().expect("the honest client has its frame");
            prop_assert_eq!((frame.seq(), neighbour.payload(&frame)), (sent, &text[..]));
            neighbour.verdict(frame, Verdict::Pass);
            prop_assert_eq!(honest.poll_verdicts(0, |s, d| assert_eq!((s, d.verdict), (sent, Verdict::Pass))), 1);
        }
        ledger.poll(&mut channel, now);
        ledger.finish(&mut channel);
        prop_assert!(others.iter().all(Channel::is_dead));
        prop_assert_eq!(honest.stats().violations, 0);
    }
}

#[test]
fn garbage_is_never_a_pass_and_ends_in_detachment() {
    let mut pair = pair(Config { violations_max: 10, deadline: None, ..config() });
    let (mut channel, raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
    for n in 1..=11u32 {
        let seq = channel.send(&[0], &Meta::default()).unwrap();
        let entry = raw.memory.layout.rx_entries() + (n as usize - 1) * ENTRY_WORDS + 1;
        raw.memory.own.word(entry).store(u64::from(seq.0) | 200 << 32, Ordering::Release);
        let mut decided = Vec::new();
        channel.poll_verdicts(0, |s, d| decided.push((s, d.verdict == Verdict::Drop, d.cause)));
        assert_eq!(decided, [(seq, true, Cause::Invalid)]);
    }
    assert_eq!(channel.death(), Some(Death::Violations));
    assert_eq!(channel.stats().violations, 11);
}

/// The rules of cumulative records, as rows: the records written, and the outcome of frames 1 to 4.
#[test]
fn records_outside_of_the_undecided_frames_are_refused() {
    let pass = |upto: u32| Word::new(Seq(upto), Verdict::Pass).emit();
    let raw_word = |upto: u32, verdict: u64| u64::from(upto) | verdict << 32;
    for (records, decided, violations) in [
        (vec![pass(4)], 4, 0),
        (vec![pass(2), pass(4)], 4, 0),
        (vec![pass(5)], 0, 1),          // not published
        (vec![pass(0)], 0, 1),          // before the first
        (vec![pass(3), pass(3)], 3, 1), // decided already
        (vec![pass(3), pass(2)], 3, 1), // goes back
        (vec![raw_word(4, 7)], 0, 1),   // hold concerns one frame
        (vec![raw_word(4, 4)], 0, 1),   // so is replace
        (vec![raw_word(4, 99), pass(1)], 1, 1),
    ] {
        let mut pair = pair(Config { deadline: None, ..config() });
        let (mut channel, raw) =
            pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
        for _ in 0..4 {
            channel.send(&[0; 100], &Meta::default()).unwrap();
        }
        for (i, word) in records.iter().enumerate() {
            raw.memory
                .own
                .word(raw.memory.layout.record_ring() + i * ENTRY_WORDS + 1)
                .store(*word, Ordering::Relaxed);
        }
        raw.memory.own.word(abi::CLIENT_RECORDS).store(records.len() as u64, Ordering::Release);
        assert_eq!(
            channel.poll_verdicts(0, |_, d| assert_eq!(d.verdict, Verdict::Pass)),
            decided,
            "{records:x?}"
        );
        assert_eq!(channel.stats().violations, violations, "{records:x?}");
    }
}

#[test]
fn a_replacement_is_for_its_own_packet_only() {
    let mut pair = pair(Config { deadline: None, ..config() });
    let (mut channel, mut client) = pair.attach(|path| Consumer::attach_as(path, "c").unwrap());
    channel.send(&[1; 300], &Meta::default()).unwrap();
    channel.send(&[2; 300], &Meta::default()).unwrap();
    let (a, b) = (client.try_recv().unwrap().unwrap(), client.try_recv().unwrap().unwrap());
    client.replace(a, &[9; 500]).unwrap();
    // The second frame names the first one's replacement.
    client.replace_by(b, 0);
    let mut decided = Vec::new();
    channel.poll_verdicts(0, |s, d| decided.push((s.0, d.cause, replaced(&d).map(<[u8]>::len))));
    assert_eq!(decided, [(1, Cause::Single, Some(500)), (2, Cause::Invalid, None)]);
}

/// Replaces RX frame `n` (number n + 1) by the payload of TX frame `n`, with these values in its header.
fn replace(raw: &Attached, n: u32, len: u32, flags: u16) {
    mock::transmit(raw, n, mock::Header { seq: n + 1, len, kind: Kind::REPLACEMENT, flags, of: n + 1 });
    mock::answer(raw, n, Word::replace(Seq(n + 1), n as u16, false).emit());
}

#[test]
fn a_replacement_that_is_too_long_is_garbage_and_not_copied() {
    let quota = Quota { descriptors: 1, ..Quota::default() };
    let config = Config { replacement_max: 3000, deadline: None, quota, ..config() };
    let mut pair = pair(config);
    let (mut channel, raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
    // The ring has 4096 bytes; a one-shot payload may have 8000.
    let rows = [(3000, false, true), (3001, false, false), (4096, false, false), (3000, true, true)];
    let rows = rows.into_iter().chain([(3001, true, false), (8000, true, false), (3000, true, true)]);
    for (n, (len, oneshot, good)) in rows.enumerate() {
        let n = n as u32;
        let before = channel.stats().violations;
        assert_eq!(channel.send(&[0; 100], &Meta::default()), Ok(Seq(n + 1)));
        if oneshot {
            let memory = sys::frozen(&vec![7; len as usize]).unwrap();
            let notice = Notice::OneShot { seq: Seq(n + 1), len: len.into() };
            sys::send(&raw.socket, &notice.emit(), &[memory.as_fd()]).unwrap();
        }
        replace(&raw, n, len, if oneshot { FLAG_ONESHOT } else { 0 });
        let mut decided = Vec::new();
        channel.poll_verdicts(0, |s, d| decided.push((s.0, d.cause, replaced(&d).map(<[u8]>::len))));
        let cause = if good { Cause::Single } else { Cause::Invalid };
        assert_eq!(decided, [(n + 1, cause, good.then_some(len as usize))], "{len} bytes");
        // The payload's descriptor is closed: it occupies no descriptor slot of the engine.
        assert!(channel.check_peer());
        assert_eq!(channel.stats().violations - before, u64::from(!good), "{len} bytes");
    }
    assert_eq!(channel.stats().oneshots_in, 2);
}

/// 31 frames are replaced by the same payload of 1 MiB; a record drops one frame.
#[test]
fn a_poll_copies_a_bounded_number_of_bytes_of_replacements() {
    const LONG: u32 = 1 << 20;
    for with_record in [false, true] {
        let config = Config { tx: Geometry::TX, replacement_max: LONG, deadline: None, ..config() };
        let mut pair = pair(config);
        let (mut channel, raw) =
            pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
        for n in 0..32 {
            channel.send(&[0; 100], &Meta::default()).unwrap();
            if n != 1 {
                replace(&raw, n, LONG, 0);
            }
        }
        let drop = Word::new(Seq(32), Verdict::Drop).emit();
        if with_record {
            mock::record(&raw, 0, drop);
        } else {
            mock::answer(&raw, 1, Word::new(Seq(2), Verdict::Drop).emit());
        }
        let (mut replaced, mut dropped) = (BTreeSet::new(), Vec::new());
        for poll in 1..=8 {
            assert!(!channel.arm(), "there is something to poll for");
            channel.disarm();
            channel.poll_verdicts(0, |seq, d| match mock::replaced(&d) {
                Some(bytes) => assert!(bytes.len() == LONG as usize && replaced.insert(seq.0)),
                None => dropped.push((seq.0, d.verdict == Verdict::Drop)),
            });
            assert_eq!(replaced.len(), (4 * poll).min(31));
        }
        assert_eq!(dropped, [(2, true)]);
        assert!(channel.arm());
        assert_eq!((channel.stats().violations, channel.stats().decided), (0, 32));
    }
}

#[test]
fn each_missing_message_ends_a_poll_and_is_counted() {
    for violations_max in [2, 5] {
        let mut pair = pair(Config { violations_max, deadline: None, ..config() });
        let (mut channel, raw) =
            pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
        for n in 0..16 {
            let says = mock::Header { seq: n + 1, len: 100, kind: Kind::MESSAGE, flags: FLAG_ONESHOT, of: 0 };
            mock::transmit(&raw, n, says);
        }
        for polls in 1..=violations_max + 1 {
            assert!(!channel.is_dead());
            assert_eq!(channel.poll_messages(|_, _| panic!("nothing came")), 0);
            assert_eq!(channel.stats().violations, polls);
        }
        assert_eq!(channel.death(), Some(Death::Violations));
    }
    // The same for replacements.
    let mut pair = pair(Config { deadline: None, ..config() });
    let (mut channel, raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
    for n in 0..4 {
        channel.send(&[0; 100], &Meta::default()).unwrap();
        replace(&raw, n, 100, FLAG_ONESHOT);
    }
    for polls in 1..=4 {
        assert_eq!(channel.poll_verdicts(0, |_, d| assert_eq!(d.cause, Cause::Invalid)), 1);
        assert_eq!(channel.stats().violations, polls);
    }
}

/// A client that publishes the whole area again as soon as the engine has copied it.
#[test]
fn a_poll_takes_a_bounded_number_of_bytes_of_messages() {
    const LONG: u32 = 1 << 20;
    let mut pair = pair(Config { tx: Geometry::TX, deadline: None, ..config() });
    let (mut channel, raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
    let mut seq = 0;
    let mut publish = || {
        seq += 1;
        mock::transmit(&raw, 0, mock::Header { seq, len: LONG, kind: Kind::MESSAGE, flags: 0, of: 0 });
    };
    publish();
    for _ in 0..2 {
        assert_eq!(channel.poll_messages(|header, _| (publish(), assert_eq!(header.len, LONG)).1), 4);
    }
    assert!(!channel.arm());
}

/// The client releases no frame, so that all published frames precede each record.
#[test]
fn any_number_of_records_costs_one_walk_over_the_frames() {
    let mut pair = pair(Config { records: 32, held_max: 0, deadline: None, ..config() });
    let (mut channel, raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
    let word = |seq, verdict: Verdict<'_>| Word::new(Seq(seq), verdict).emit();
    for n in 0..32 {
        channel.send(&[0; 100], &Meta::default()).unwrap();
        mock::answer(&raw, n, word(n + 1, Verdict::Hold));
        mock::record(&raw, n, word(n + 1, Verdict::Pass));
    }
    assert_eq!(channel.poll_verdicts(0, |_, _| panic!("held")), 0);
    assert_eq!((channel.stats().violations, channel.rings.verdict_reader.walked), (0, 32));
}

/// Serves one connection with the given welcome.
fn attach_to(welcome: [u8; crate::handshake::messages::WELCOME], fds: Vec<OwnedFd>) -> AttachError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let listener = sys::listen(&path, 1).unwrap();
    let client = thread::spawn(move || attach(&path, &Options::named("c")).unwrap_err());
    sys::wait(&[listener.as_fd()], None).unwrap();
    let socket = sys::accept(&listener).unwrap().unwrap();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    sys::send(&socket, &welcome, &fds).unwrap();
    client.join().unwrap()
}

#[test]
fn memory_that_is_not_safe_to_map_is_refused() {
    let layout = Layout { rx: small(32), tx: small(16), records: 4 };
    let welcome = |layout| {
        let terms = Terms {
            layout,
            lanes: 1,
            oneshot_max: 0,
            replacement_max: 0,
            fences: Fences::Both,
            messages: false,
        };
        Welcome { version: abi::VERSION, answer: Reply::Attached(terms) }.emit()
    };
    let sizes = [layout.engine_bytes(), layout.rx.bytes(), layout.client_bytes(), layout.tx.bytes()];
    let seals = [sys::READ_ONLY, sys::READ_ONLY, sys::WRITABLE, sys::WRITABLE];
    let fds = |wrong: usize, seal, size: usize| {
        (0..4)
            .map(|i| {
                let fd = sys::memfd("test", if i == wrong { size } else { sizes[i] }).unwrap();
                sys::seal(&fd, if i == wrong { seal } else { seals[i] }).unwrap();
                fd
            })
            .collect::<Vec<_>>()
    };
    for i in 0..4 {
        let e = attach_to(welcome(layout), fds(i, rustix::fs::SealFlags::SHRINK, sizes[i]));
        assert!(matches!(&e, AttachError::Unsafe(why) if why.contains("lacks seals")), "{e}");
        let e = attach_to(welcome(layout), fds(i, seals[i], sizes[i] + 4096));
        assert!(matches!(&e, AttachError::Unsafe(why) if why.contains("bytes instead of")), "{e}");
    }
    let e =
        attach_to(welcome(layout), fds(9, seals[0], 0)[..3].iter().map(|f| f.try_clone().unwrap()).collect());
    assert!(matches!(&e, AttachError::Unsafe(why) if why.contains("3 descriptors")), "{e}");
    let e = attach_to(welcome(layout), fds(9, seals[0], 0));
    assert!(matches!(&e, AttachError::Unsafe(why) if why.contains("first word is")), "{e}");
    let e = attach_to(welcome(Layout { rx: Geometry { frame_nr: 33, ..layout.rx }, ..layout }), vec![]);
    assert!(matches!(e, AttachError::Geometry(_)), "{e}");
    let null = std::fs::File::open("/dev/null").unwrap();
    let nulls = (0..4).map(|_| null.try_clone().unwrap().into()).collect();
    let e = attach_to(welcome(layout), nulls);
    assert!(matches!(&e, AttachError::Unsafe(why) if why.contains("is not a memfd")), "{e}");
    let e = attach_to([0; crate::handshake::messages::WELCOME], vec![]);
    assert!(matches!(e, AttachError::NotTowpath(_)), "{e}");
}

/// Attaches while the engine accepts connections. Returns the refusal.
fn refused(endpoint: &mut Endpoint) -> AttachError {
    let path = endpoint.path().to_path_buf();
    let client = thread::spawn(move || Consumer::attach_as(path, "c").unwrap_err());
    while !client.is_finished() {
        assert!(endpoint.accept().unwrap().is_none());
        endpoint.wait(Some(Duration::from_millis(5))).unwrap();
    }
    client.join().unwrap()
}

/// membarrier(2) fails after both sides have agreed on it: neither side sleeps, so no wake-up is lost.
#[test]
fn without_the_agreed_fence_neither_side_sleeps() {
    assert_ne!(Fences::offer(), Fences::Both, "membarrier(2)");
    let mut pair = pair(Config { deadline: None, ..config() });
    let (mut channel, mut client) = pair.attach(|path| Consumer::attach_as(path, "c").unwrap());
    assert!(client.arm());
    client.disarm().unwrap();
    sys::REFUSE_MEMBARRIER.set(true);
    assert!(!client.arm());
    client.disarm().unwrap();
    // Without the check, these sleeps would never end.
    channel.wait(None).unwrap();
    assert!(client.recv_timeout(Duration::from_millis(1)).unwrap().is_none());
    let sleeps = client.stats().sleeps;
    channel.send(&[1], &Meta::default()).unwrap();
    let frame = client.recv().unwrap().unwrap();
    client.verdict(frame, Verdict::Pass);
    while channel.poll_verdicts(0, |_, _| {}) == 0 {
        channel.wait(None).unwrap();
    }
    assert_eq!((sleeps, client.stats().sleeps), (0, 0));
    sys::REFUSE_MEMBARRIER.set(false);
}

#[test]
fn a_refusal_has_its_reason() {
    let mut nobody = pair(Config { allow: crate::Allow::Users(vec![]), ..config() });
    let e = refused(&mut nobody.endpoint);
    let uid = rustix::process::geteuid().as_raw();
    assert!(
        matches!(&e, AttachError::NotPermitted(why) if why.starts_with(&format!("user {uid} may not"))),
        "{e}"
    );
    assert_eq!(nobody.endpoint.stats().not_permitted, 1);

    let quota = Quota { channels_per_user: 1, ..Quota::default() };
    let reaper = Reaper::new(Limits::default());
    let mut one = pair(Config { quota, reaper: reaper.clone(), ..config() });
    let (channel, _client) = one.attach(|path| Consumer::attach_as(path, "first").unwrap());
    let e = refused(&mut one.endpoint);
    assert!(matches!(&e, AttachError::Limit(why) if why.contains("held by: first[")), "{e}");
    drop(channel);
    // The slot is free when the channel is closed.
    while reaper.stats().pending > 0 {
        thread::yield_now();
    }
    one.attach(|path| Consumer::attach_as(path, "second").unwrap());

    let theirs = Welcome {
        version: 7,
        answer: Reply::Refused(crate::handshake::messages::Refusal::Version, String::new()),
    };
    let e = attach_to(theirs.emit(), vec![]);
    assert_eq!(
        e.to_string(),
        format!(
            "the engine speaks ring ABI version 7, this client version {}; use releases that match",
            abi::VERSION
        )
    );
}

#[test]
fn descriptors_beyond_the_limit_are_closed_and_counted() {
    let quota = Quota { descriptors: 2, ..Quota::default() };
    let mut pair = pair(Config { quota, deadline: None, ..config() });
    let (mut channel, raw) = pair.attach(|path| attach(&path, &Options::named("hostile")).unwrap().remove(0));
    let fd = sys::frozen(&[1; 100]).unwrap();
    let one = |seq| Notice::OneShot { seq: Seq(seq), len: 100 };
    // Three notices more than may wait; a notice with two descriptors; a doorbell with a descriptor.
    for (notice, fds) in (1..=5).map(|n| (one(n), 1)).chain([(one(6), 2), (Notice::Doorbell, 1)]) {
        sys::send(&raw.socket, &notice.emit(), &vec![fd.as_fd(); fds]).unwrap();
    }
    assert!(channel.check_peer());
    assert_eq!(channel.stats().violations, 5);
}

#[test]
fn attach_times_out_if_the_engine_accepts_no_connection() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ring");
    let _listener = sys::listen(&path, 0).unwrap();
    let _first = sys::connect(&path, Duration::from_secs(60)).unwrap();
    let error = sys::connect(&path, Duration::from_millis(5)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn an_endpoint_survives_invalid_hellos() {
    let mut pair = pair(Config { pending_max: 2, ..config() });
    let connect = |say: &[u8]| {
        let socket = sys::connect(&pair.path, Duration::from_secs(5)).unwrap();
        if !say.is_empty() {
            sys::send(&socket, say, &[]).unwrap();
        }
        socket
    };
    let silent: Vec<_> = (0..5).map(|_| connect(b"")).collect();
    let wrong = crate::handshake::messages::Hello {
        version: 9,
        gaps: true,
        events: false,
        parts: false,
        fences: Fences::Both,
        name: "old".into(),
    }
    .emit();
    let (strange, old, long) = (connect(b"GET / HTTP/1.1"), connect(&wrong), connect(&[b'x'; 500]));
    for _ in 0..10 {
        assert!(pair.endpoint.accept().unwrap().is_none());
    }
    let stats = pair.endpoint.stats();
    assert_eq!((stats.wrong_version, stats.attached), (1, 0));
    assert!(stats.failed >= 3, "{stats:?}");
    // The refused client got the engine's process id.
    let mut answer = [0; crate::handshake::messages::WELCOME];
    assert!(matches!(sys::recv_with_fds(&silent[0], &mut answer), Ok(sys::Received::Message(..))));
    let us = std::process::id();
    let over = format!("2 connections without a hello; held by: [{us}] [{us}]");
    let refusal = Reply::Refused(crate::handshake::messages::Refusal::Limit, over);
    assert_eq!(Welcome::parse(&answer).unwrap().answer, refusal);
    let mut answer = [0; crate::handshake::messages::WELCOME];
    assert!(matches!(sys::recv_with_fds(&old, &mut answer), Ok(sys::Received::Message(..))));
    assert_eq!(Welcome::parse(&answer).unwrap().version, abi::VERSION);
    // Shut down, because a child process of another test may have copies of the descriptors for a moment.
    silent.iter().chain([&strange, &long]).for_each(sys::shut);
    drop((silent, strange, long));
    pair.attach(|path| Consumer::attach_as(path, "late").unwrap());
    // No descriptor remains readable, so an event loop can sleep.
    assert!(!sys::wait(&[pair.endpoint.as_fd()], Some(Duration::ZERO)).unwrap());
}

#[test]
fn memory_for_reading_cannot_be_written() {
    // Memory that the client gets for reading: try every way of writing to it.
    let fd = sys::memfd("test", 4096).unwrap();
    let own = Words::map(fd.as_fd(), 4096, Access::Own).unwrap();
    sys::seal(&fd, sys::READ_ONLY).unwrap();
    assert!(Words::map(fd.as_fd(), 4096, Access::Own).is_err(), "mmap for writing");
    assert!(rustix::io::pwrite(&fd, b"x", 0).is_err(), "pwrite");
    assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "shrink");
    assert!(rustix::fs::ftruncate(&fd, 8192).is_err(), "grow");
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    if let Ok(again) = std::fs::OpenOptions::new().read(true).write(true).open(again) {
        let again: OwnedFd = again.into();
        assert!(Words::map(again.as_fd(), 4096, Access::Own).is_err(), "mmap after opening again");
        assert!(rustix::io::pwrite(&again, b"x", 0).is_err(), "pwrite after opening again");
    }
    let reader = Words::map(fd.as_fd(), 4096, Access::Lent).unwrap();
    own.word(3).store(77, Ordering::Relaxed);
    assert_eq!(reader.word(3).load(Ordering::Relaxed), 77);
}
