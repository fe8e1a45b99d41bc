//! Several listeners and taps on one payload area.

mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use proptest::prelude::*;
use towpath_ring::{
    Allow, AttachError, BindError, Config, Consumer, Death, Endpoint, Frame, Full, Gap, Geometry, Group,
    Joined, Limits, Loss, MemberId, Meta, Tap, Verdict,
};
use world::{PATIENCE, assert_conserved, message};

struct World {
    group: Group,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

fn config(frames: u32) -> Config {
    let rx = Geometry::with(frames * 1024, 1024).expect("a geometry");
    Config { rx, deadline: None, ..Config::default() }
}

fn world(config: Config) -> World {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("group");
    World { group: Group::bind(&path, config).expect("a group"), path, _dir: dir }
}

impl World {
    fn attach<T: Send + 'static>(&mut self, attach: fn(PathBuf) -> T) -> (Joined, T) {
        let path = self.path.clone();
        let client = thread::spawn(move || attach(path));
        let joined = loop {
            if let Some(joined) = self.group.accept().expect("accept") {
                break joined;
            }
            self.group.wait(Some(PATIENCE)).expect("wait");
        };
        (joined, client.join().expect("attached"))
    }

    fn listener(&mut self) -> (MemberId, Consumer) {
        match self.attach(|path| Consumer::attach(path).expect("attached")) {
            (Joined::Listener(id), client) => (id, client),
            (Joined::Tap, _) => panic!("a consumer is no tap"),
        }
    }

    fn tap(&mut self) -> Tap {
        match self.attach(|path| Tap::attach(path).expect("attached")) {
            (Joined::Tap, tap) => tap,
            (Joined::Listener(_), _) => panic!("a tap is no listener"),
        }
    }

    fn poll(&mut self) -> usize {
        self.group.poll_verdicts(0, |_, _, _| {})
    }
}

/// Everything there is: content's first byte, or the gap.
fn drain(client: &mut Consumer) -> Vec<Result<u8, Gap>> {
    let mut got = Vec::new();
    while let Some(frame) = client.try_recv().expect("received") {
        got.push(frame.header().gap().map_or_else(|| Ok(client.payload(&frame)[0]), Err));
        client.verdict(frame, Verdict::Pass);
    }
    got
}

fn gap(count: u32, loss: Loss) -> Result<u8, Gap> {
    Err(Gap { count, loss: Some(loss) })
}

#[test]
fn frames_are_free_when_the_last_listener_has_given_them_back() {
    let mut w = world(config(8));
    let ((a, mut first), (b, mut second)) = (w.listener(), w.listener());
    let mut verdicts = Vec::new();
    for n in 0..4 {
        assert_eq!(w.group.send(&[n; 1000], &Meta::default()), 2);
    }
    // Four of eight are the part of each.
    assert_eq!(w.group.send(&[4; 1000], &Meta::default()), 0);
    let frame = first.try_recv().expect("received").expect("a frame");
    let held = second.try_recv().expect("received").expect("a frame");
    assert_eq!((first.payload(&frame), second.payload(&held)), (&[0; 1000][..], &[0; 1000][..]));
    first.verdict(frame, Verdict::Drop);
    second.hold(&held);
    assert_eq!(drain(&mut first), [Ok(1), Ok(2), Ok(3)]);
    assert_eq!(drain(&mut second), [Ok(1), Ok(2), Ok(3)]);
    w.group.poll_verdicts(0, |id, seq, d| verdicts.push((id, seq.0, d.verdict)));
    assert_eq!(verdicts.iter().filter(|v| **v == (a, 1, Verdict::Drop)).count(), 1);
    assert_eq!(verdicts.iter().filter(|v| v.0 == b).count(), 3);
    // What one holds costs its frame and nothing else.
    for n in 5..100 {
        assert_eq!(w.group.send(&[n; 1000], &Meta::default()), 2, "{n}");
        let expected = if n == 5 { vec![gap(1, Loss::NoRoom), Ok(5)] } else { vec![Ok(n)] };
        assert_eq!((drain(&mut first), drain(&mut second)), (expected.clone(), expected));
        w.poll();
    }
    assert_eq!(second.payload(&held), [0; 1000]);
    second.verdict(held, Verdict::Pass);
    assert_eq!(w.poll(), 1);
    for (_, channel) in w.group.members() {
        assert_conserved(channel);
        assert_eq!(channel.stats().out, 0);
    }
}

#[test]
fn one_listener_has_it_like_unicast() {
    let mut w = world(config(8));
    let (_, mut client) = w.listener();
    for n in 0..8 {
        assert_eq!(w.group.send(&[n; 1000], &Meta::default()), 1);
    }
    assert_eq!(w.group.send(&[8; 1000], &Meta::default()), 0);
    assert_eq!(drain(&mut client), (0..8).map(Ok).collect::<Vec<_>>());
    assert_eq!(w.poll(), 8);
    // What it sends alone, it sends through the group.
    let (_, channel) = w.group.members().next().expect("a member");
    assert_eq!(channel.send(b"x", &Meta::default()), Err(Full::Shared));
    assert_eq!(channel.reserve(1).err(), Some(Full::Shared));
}

#[test]
fn a_slow_listener_slows_nobody_and_is_told_what_it_lost() {
    let mut w = world(config(8));
    let ((_, mut fast), (slow_id, mut slow)) = (w.listener(), w.listener());
    for n in 0..100 {
        assert!(w.group.send(&[n; 1000], &Meta::default()) >= 1);
        assert_eq!(drain(&mut fast), [Ok(n)]);
        w.poll();
    }
    // Its part is four of eight.
    assert_eq!(drain(&mut slow), [Ok(0), Ok(1), Ok(2), Ok(3)]);
    assert_eq!((slow.overrun(), slow.overrun()), (96, 0));
    w.poll();
    w.group.kick();
    w.group.send(&[100; 1000], &Meta::default());
    assert_eq!(drain(&mut slow), [gap(96, Loss::NoRoom), Ok(100)]);
    w.poll();
    let (_, channel) = w.group.members().find(|(id, _)| *id == slow_id).expect("a member");
    assert_eq!((channel.stats().lost, channel.stats().gaps), (96, 1));
    assert_conserved(channel);
    let stats = w.group.stats();
    assert_eq!((stats.offered, stats.sent, stats.copies, stats.copies_lost), (101, 101, 106, 96));
}

#[test]
fn a_message_larger_than_the_area_is_one_memory_for_all() {
    let mut w = world(config(8));
    let ((_, mut first), (_, mut second)) = (w.listener(), w.listener());
    assert_eq!(w.group.send(&message(1, 100_000), &Meta::default()), 2);
    for client in [&mut first, &mut second] {
        let frame = client.try_recv().expect("received").expect("a frame");
        assert!(client.payload(&frame) == message(1, 100_000));
        client.verdict(frame, Verdict::Pass);
    }
    assert_eq!(w.poll(), 2);
    assert_eq!((w.group.stats().oneshots, w.group.stats().no_room), (1, 1));
}

#[test]
fn what_a_dead_listener_had_is_free_and_one_that_may_still_read_keeps_its_part() {
    let mut w = world(config(8));
    let ((a, first), (b, mut second)) = (w.listener(), w.listener());
    for n in 0..3 {
        w.group.send(&[n; 1000], &Meta::default());
    }
    let held = second.try_recv().expect("received").expect("a frame");
    drop(first);
    let (_, channel) = w.group.members().find(|(id, _)| *id == b).expect("a member");
    channel.detach();
    let (_, channel) = w.group.members().find(|(id, _)| *id == a).expect("a member");
    while channel.check_peer() {
        channel.wait(Some(PATIENCE)).expect("wait");
    }
    assert_eq!(channel.death(), Some(Death::Closed));
    let mut back = BTreeMap::new();
    assert_eq!(w.group.remove_dead(|id, seq| assert_eq!(back.insert((id, seq.0), ()), None)), 2);
    assert_eq!(back.len(), 6);
    // The second was detached, and its process, this one, lives: its three frames are not written again.
    assert_eq!(w.group.stats().quarantined, 3);
    let (_, mut third) = w.listener();
    for n in 10..200 {
        assert_eq!(w.group.send(&[n; 1000], &Meta::default()), 1, "{n}");
        assert_eq!(drain(&mut third), [Ok(n)]);
        w.poll();
    }
    assert_eq!(second.payload(&held), [0; 1000]);
}

#[test]
fn all_of_a_group_have_the_same_rights() {
    let dir = tempfile::tempdir().expect("a directory");
    let any = Config { allow: Allow::Any, ..Config::default() };
    assert!(matches!(Group::bind(dir.path().join("g"), any), Err(BindError::GroupOfAny)));
    // A tap needs a group: another client's ring is nobody's to look into.
    let path = dir.path().join("s");
    let mut endpoint = Endpoint::bind(&path, Config::default()).expect("an endpoint");
    let tap = thread::spawn(move || Tap::attach(path).expect_err("refused"));
    while !tap.is_finished() {
        assert!(endpoint.accept().expect("accept").is_none());
        endpoint.wait(Some(std::time::Duration::from_millis(5))).expect("wait");
    }
    let e = tap.join().expect("refused");
    assert!(matches!(&e, AttachError::Engine(why) if why.contains("nothing to tap")), "{e}");
}

#[test]
fn a_tap_that_is_too_slow_loses_in_order_and_slows_nobody() {
    let mut w = world(config(16));
    let (_, mut client) = w.listener();
    let mut tap = w.tap();
    assert!(tap.try_recv().expect("received").is_none());
    for n in 0..100u8 {
        assert_eq!(w.group.send(&[n; 1000], &Meta { mark: n.into(), ..Meta::default() }), 1);
        assert_eq!(drain(&mut client), [Ok(n)]);
        w.poll();
    }
    let (mut next, mut lost) = (0, 0);
    while let Some(seen) = tap.try_recv().expect("received") {
        match seen.header.gap() {
            Some(gap) => {
                assert_eq!(gap.loss, Some(Loss::Overwritten));
                next += gap.count;
                lost += gap.count;
            }
            None => {
                assert_eq!((seen.header.mark, seen.payload), (next, &[next as u8; 1000][..]));
                next += 1;
            }
        }
    }
    assert_eq!(next, 100);
    assert!(lost >= 84, "{lost}");
    assert_eq!(tap.counts(), (u64::from(100 - lost), u64::from(lost)));
    // Beside its header as well, and without a listener.
    drop(client);
    assert_eq!(w.group.send(b"small", &Meta::default()), 1);
    assert_eq!(tap.recv().expect("received").expect("a message").payload, b"small");
}

/// The tap reads while it is overwritten: what it gets is whole and in order, and with what it lost it is everything.
#[test]
fn what_a_tap_gets_is_whole() {
    const COUNT: u32 = 30_000;
    let mut w = world(config(16));
    let mut tap = w.tap();
    let reader = thread::spawn(move || {
        let mut next = 0;
        while next < COUNT {
            let seen = tap.recv().expect("received").expect("the group is there");
            if let Some(gap) = seen.header.gap() {
                next += gap.count;
                continue;
            }
            assert_eq!(seen.header.mark, next);
            let len = next as usize * 7 % 3000;
            assert!(seen.payload == vec![next as u8; len], "message {next} of {len} bytes is damaged");
            next += 1;
        }
        (next, tap.counts())
    });
    for n in 0..COUNT {
        w.group.send(&vec![n as u8; n as usize * 7 % 3000], &Meta { mark: n, ..Meta::default() });
        w.group.kick();
    }
    let (next, (received, lost)) = reader.join().expect("the tap");
    assert_eq!((next, received + lost), (COUNT, u64::from(COUNT)));
}

/// None of them ever slept, so none is ever rung.
#[test]
fn a_tap_that_is_gone_leaves_nothing_behind() {
    // Some more than one: a child of another test may have a socket until it executes its program.
    let limits = Limits { channels_per_user: 3, ..Limits::default() };
    let mut w = world(Config { limits, ..config(8) });
    let mut now = 0;
    let mut poll = |group: &mut Group| {
        now += 5_000_000;
        group.send(b"to all", &Meta::default());
        group.kick();
        group.poll_verdicts(now, |_, _, _| {});
    };
    for _ in 0..8 {
        drop(w.tap());
    }
    let end = Instant::now() + PATIENCE;
    while w.group.stats().taps > 0 {
        assert!(Instant::now() < end, "{:?} are still there", w.group.taps().collect::<Vec<_>>());
        poll(&mut w.group);
    }
    // One that is awake stays.
    let mut tap = w.tap();
    for _ in 0..5 {
        poll(&mut w.group);
    }
    assert_eq!(w.group.stats().taps, 1);
    assert_eq!(tap.try_recv().expect("received").expect("a message").payload, b"to all");
}

/// It is killed while it is awake.
#[test]
fn a_tap_that_was_killed_leaves_nothing_behind() {
    let mut w = world(config(8));
    let exe = std::env::current_exe().expect("our own path");
    let mut child = Command::new(exe)
        .args(["--exact", "client_that_taps", "--ignored", "--nocapture", "--test-threads=1"])
        .env("TOWPATH_SOCKET", &w.path)
        .stdout(Stdio::null())
        .spawn()
        .expect("a client process");
    while w.group.accept().expect("accept").is_none() {
        w.group.wait(Some(PATIENCE)).expect("wait");
    }
    assert_eq!(w.group.stats().taps, 1);
    child.kill().expect("kill");
    child.wait().expect("wait");
    // At once: the end of the process is seen, whoever has the socket.
    w.group.poll_verdicts(1, |_, _, _| {});
    assert_eq!(w.group.stats().taps, 0);
}

#[test]
#[ignore = "the client of a_tap_that_was_killed_leaves_nothing_behind"]
fn client_that_taps() {
    let path = std::env::var_os("TOWPATH_SOCKET").expect("a socket");
    let mut tap = Tap::attach(path).expect("attached");
    let end = Instant::now() + 2 * PATIENCE;
    while Instant::now() < end {
        let _ = tap.try_recv().expect("received");
        thread::yield_now();
    }
}

#[test]
fn the_end_of_a_group_is_the_end_of_its_taps() {
    let mut w = world(config(8));
    let mut tap = w.tap();
    drop(w);
    assert!(tap.recv().expect("received").is_none());
    assert!(tap.is_ended());
}

/// A frame that a client has, the message's number and its length.
type Has = (Frame, u32, usize);

#[derive(Clone, Debug)]
enum Op {
    Send(usize),
    Recv(usize),
    Release(usize, usize),
    Hold(usize, usize),
    Upto(usize, usize),
    Poll,
    Leave(usize),
    Join,
}

fn op() -> impl Strategy<Value = Op> {
    let (who, which) = (0..3usize, 0..20usize);
    prop_oneof![
        8 => (0..4000usize).prop_map(Op::Send),
        8 => who.clone().prop_map(Op::Recv),
        6 => (who.clone(), which.clone()).prop_map(|(i, n)| Op::Release(i, n)),
        2 => (who.clone(), which.clone()).prop_map(|(i, n)| Op::Hold(i, n)),
        2 => (who.clone(), which).prop_map(|(i, n)| Op::Upto(i, n)),
        4 => Just(Op::Poll),
        1 => who.prop_map(Op::Leave),
        1 => Just(Op::Join),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever the others do: a frame that somebody has is not written.
    #[test]
    fn a_frame_is_whole_as_long_as_somebody_has_it(ops in prop::collection::vec(op(), 1..150)) {
        let mut w = world(config(16));
        let mut clients: Vec<(Consumer, Vec<Has>)> = Vec::new();
        let mut sent = 0;
        for op in [Op::Join, Op::Join].into_iter().chain(ops) {
            match op {
                Op::Send(len) => {
                    sent += 1;
                    w.group.send(&message(sent, len), &Meta { mark: sent, ..Meta::default() });
                }
                Op::Recv(i) => {
                    let Some((client, frames)) = clients.get_mut(i) else { continue };
                    let Some(frame) = client.try_recv().expect("received") else { continue };
                    let (n, len) = match frame.header().gap() {
                        Some(_) => (0, 0),
                        None => (frame.header().mark, frame.header().len as usize),
                    };
                    frames.push((frame, n, len));
                }
                Op::Release(i, n) => {
                    let Some((client, frames)) = clients.get_mut(i).filter(|c| !c.1.is_empty()) else { continue };
                    let (frame, ..) = frames.swap_remove(n % frames.len());
                    client.verdict(frame, Verdict::Pass);
                }
                Op::Hold(i, n) => {
                    let Some((client, frames)) = clients.get_mut(i).filter(|c| !c.1.is_empty()) else { continue };
                    client.hold(&frames[n % frames.len()].0);
                }
                Op::Upto(i, n) => {
                    let Some((client, frames)) = clients.get_mut(i).filter(|c| !c.1.is_empty()) else { continue };
                    client.verdict_upto(frames[n % frames.len()].0.id(), Verdict::Drop);
                    frames.retain(|(f, ..)| client.has(f));
                }
                Op::Poll => {
                    w.poll();
                    w.group.kick();
                }
                Op::Leave(i) if i < clients.len() => {
                    clients.remove(i);
                    // A child of another test may have the socket until it executes its program.
                    let alive = |group: &mut Group| group.members().filter_map(|(_, channel)| channel.check_peer().then_some(())).count();
                    let begun = std::time::Instant::now();
                    while alive(&mut w.group) > clients.len() {
                        prop_assert!(begun.elapsed() < PATIENCE, "a client that has left is taken for alive");
                        std::thread::yield_now();
                    }
                    w.group.remove_dead(|_, _| {});
                    prop_assert_eq!(w.group.stats().quarantined, 0);
                }
                Op::Join if clients.len() < 3 => clients.push((w.listener().1, Vec::new())),
                Op::Leave(_) | Op::Join => {}
            }
            for (client, frames) in &clients {
                for (frame, n, len) in frames {
                    let expected = if *n == 0 { vec![] } else { message(*n, *len) };
                    prop_assert!(client.payload(frame) == expected, "message {} was overwritten", n);
                }
            }
            for (_, channel) in w.group.members() {
                assert_conserved(channel);
                prop_assert_eq!(channel.stats().violations, 0);
            }
        }
        // All given back: the area is free again.
        for (client, frames) in &mut clients {
            frames.drain(..).for_each(|(frame, ..)| client.verdict(frame, Verdict::Pass));
            while let Some(frame) = client.try_recv().expect("received") {
                client.verdict(frame, Verdict::Pass);
            }
        }
        w.poll();
        w.group.kick();
        for (client, _) in &mut clients {
            drain(client);
        }
        w.poll();
        if clients.len() == 1 {
            let before = w.group.stats().oneshots;
            prop_assert_eq!(w.group.send(&[1; 16 * 1024], &Meta::default()), 1);
            prop_assert_eq!(w.group.stats().oneshots, before);
        }
    }
}
