//! kill -9 at every step of a client's life, and overdue frames: the sum of the counters always holds.

use std::time::Duration;

use crate::world::{self, PATIENCE, World, assert_conserved, bare, consumer, message, send};
use rustix::process::{Signal, getpid, kill_process};
use towpath_ring::reaper::{Limits, Reaper};
use towpath_ring::{Cause, Config, Consumer, Death, Meta, Options, Quota, ReserveError, Verdict};

/// The client kills itself here, without a cleanup.
fn kill_9() -> ! {
    kill_process(getpid(), Signal::KILL).expect("kill");
    unreachable!("killed");
}

/// A row: the step after which the client dies, and how many of 100 frames it has decided by then.
const STEPS: [(&str, u64); 9] = [
    ("attach", 0),
    ("receive", 0),
    ("receive all", 0),
    ("hold", 0),
    ("verdict", 1),
    ("verdict of a held frame", 1),
    ("cumulative verdict", 50),
    ("replacement", 1),
    ("half of everything", 50),
];

#[test]
fn a_client_may_die_at_any_step() {
    world::each(|| {
        for (step, (name, decided)) in STEPS.iter().enumerate() {
            let mut world = World::new(Config { deadline: None, ..Config::default() });
            let client = world.spawn_with("death::client_dies", &step.to_string());
            let mut channel = world.accept();
            // Another client, which must not be affected.
            let path = world.socket();
            let neighbour = std::thread::spawn(move || Consumer::attach(path).expect("attached"));
            let mut other = world.accept();
            let mut neighbour = neighbour.join().expect("attached");
            other.send(b"still here", &Meta::default()).expect("room");

            let mut back = Vec::new();
            for n in 1..=100 {
                if send(&mut channel, &message(n, 1500), |seq, _| back.push(seq.0)).is_none() {
                    break;
                }
            }
            let published = channel.stats().published;
            while !channel.is_dead() {
                channel.wait(Some(PATIENCE)).expect("wait");
                channel.poll_verdicts(0, |seq, _| back.push(seq.0));
            }
            drop(client);
            channel.poll_verdicts(0, |seq, _| back.push(seq.0));
            if published == 100 {
                assert_eq!(back.len() as u64, *decided, "{name}");
            }
            channel.drain_held(|seq| back.push(seq.0));
            channel.drain_held(|seq| panic!("{name}: {seq} came back twice"));
            back.sort_unstable();
            assert_eq!(back, (1..=published as u32).collect::<Vec<_>>(), "{name}");
            assert_eq!(channel.reserve(1).err(), Some(ReserveError::Disconnected), "{name}");
            assert_conserved(&channel);

            let frame = neighbour.recv().expect("received").expect("a frame");
            assert_eq!(neighbour.payload(&frame), b"still here", "{name}");
            neighbour.verdict(frame, Verdict::Pass);
            assert_eq!(other.poll_verdicts(0, |_, _| {}), 1, "{name}");
            assert!(!other.is_dead());
        }
    });
}

/// The client dies during the handshake: connected, half a hello, hello, welcome unread.
#[test]
fn a_client_may_die_before_it_is_attached() {
    world::each(|| {
        let quota = Quota { channels: 1, ..Quota::default() };
        for step in ["connected", "half a hello", "hello", "welcome"] {
            let reaper = Reaper::new(Limits::default());
            let config = Config { deadline: None, quota, reaper: reaper.clone(), ..Config::default() };
            let mut world = World::new(config);
            let client = world.spawn_with("death::client_dies_early", step);
            // A client that exits after its hello may be gone when the engine answers.
            let channel = loop {
                if let Some(channel) = world.endpoint.accept().expect("accept") {
                    break Some(channel);
                }
                if world.endpoint.stats().failed > 0 {
                    break None;
                }
                world.endpoint.wait(Some(PATIENCE)).expect("wait");
            };
            // With several lanes, the client may be gone before it got the last one.
            assert!(channel.is_some() || step != "welcome" || world::lanes() > 1, "{step}");
            if let Some(mut channel) = channel {
                assert!(matches!(step, "hello" | "welcome"), "{step}");
                // The engine does not know yet: the frames that it sends return unchanged.
                let mut sent = 0;
                while !channel.is_dead() {
                    sent += u64::from(channel.send(&message(1, 1500), &Meta::default()).is_ok());
                    channel.wait(Some(PATIENCE)).expect("wait");
                    assert_eq!(channel.poll_verdicts(0, |seq, _| panic!("{step}: {seq} decided")), 0);
                }
                let mut back = 0;
                channel.drain_held(|_| back += 1);
                assert_eq!(back, sent, "{step}");
                assert_conserved(&channel);
            }
            drop(client);
            while reaper.stats().pending > 0 {
                std::thread::yield_now();
            }
            // Its charge of the quota is free again: the quota admits one channel, and this is it.
            let (mut channel, mut next) = world.attach(Options::default());
            channel.send(b"next", &Meta::default()).expect("room");
            let frame = next.recv().expect("received").expect("a frame");
            assert_eq!(next.payload(&frame), b"next", "{step}");
            next.verdict(frame, Verdict::Pass);
        }
    });
}

#[test]
#[ignore = "the client of a_client_may_die_before_it_is_attached"]
fn client_dies_early() {
    use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketType};
    let path = std::env::var("TOWPATH_SOCKET").expect("TOWPATH_SOCKET");
    let socket = net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    net::connect(&socket, &SocketAddrUnix::new(path).expect("an address")).expect("connected");
    // As in docs/book/src/reference/ring-abi.md.
    let mut hello = [0; 64];
    hello[..4].copy_from_slice(b"TPRG");
    hello[4..6].copy_from_slice(&towpath_ring::VERSION.to_le_bytes());
    let say = |bytes: &[u8]| net::send(&socket, bytes, SendFlags::empty()).expect("sent");
    match std::env::var("STEP").as_deref() {
        Ok("half a hello") => drop(say(&hello[..32])),
        Ok("hello") => drop(say(&hello)),
        Ok("welcome") => {
            say(&hello);
            let mut fds = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).expect("poll");
        }
        _ => {}
    }
    kill_9();
}

#[test]
#[ignore = "the client of a_client_may_die_at_any_step"]
fn client_dies() {
    let step: usize = std::env::var("STEP").expect("STEP").parse().expect("a number");
    let mut queue = consumer();
    if step == 0 {
        kill_9();
    }
    let mut frames = Vec::new();
    while frames.len() < if step == 1 { 1 } else { 100 } {
        queue.recv_batch(&mut frames, 100).expect("received");
    }
    match STEPS[step].0 {
        "hold" => frames.iter().for_each(|f| queue.hold(f)),
        "verdict" => queue.verdict(frames.remove(7), Verdict::Pass),
        "verdict of a held frame" => {
            frames.iter().for_each(|f| queue.hold(f));
            queue.verdict(frames.remove(7), Verdict::Pass);
        }
        "cumulative verdict" => queue.verdict_upto(frames[49].id(), Verdict::Drop),
        "replacement" => queue.replace(frames.remove(7), b"other").expect("replaced"),
        "half of everything" => {
            for (i, frame) in frames.drain(..).enumerate() {
                if i % 2 == 0 {
                    queue.verdict(frame, Verdict::Pass);
                }
            }
        }
        _ => {}
    }
    kill_9();
}

/// A client that has exited while a child of it keeps the socket open.
#[test]
fn a_socket_that_outlives_its_process_does_not_keep_the_channel() {
    world::each_first(|| {
        let mut world = World::new(Config { deadline: None, ..Config::default() });
        let client = world.spawn("death::client_leaves_a_child");
        let mut channel = world.accept();
        send(&mut channel, b"frame", |_, _| {});
        while !channel.is_dead() {
            channel.wait(Some(PATIENCE)).expect("wait");
        }
        assert_eq!(channel.death(), Some(Death::Exited));
        let mut back = 0;
        channel.drain_held(|_| back += 1);
        assert_eq!(back, 1);
        drop(client);
    });
}

#[test]
#[ignore = "the client of a_socket_that_outlives_its_process_does_not_keep_the_channel"]
fn client_leaves_a_child() {
    use std::os::fd::AsFd;
    let queue = consumer();
    // The child's standard input is the socket. The child outlives this process.
    let socket = queue.as_fd().try_clone_to_owned().expect("a copy");
    let mut child = std::process::Command::new("sleep")
        .arg("60")
        .stdin(socket)
        // The test's output must not wait for this process.
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("a child");
    if child.id() != 0 {
        kill_9();
    }
    child.wait().expect("never reached");
}

/// A forked child has the sockets, too: they stay open when its parent closes the channel.
#[test]
fn a_closed_channel_ends_although_another_process_has_the_socket() {
    use std::os::fd::AsFd;
    world::each_first(|| {
        let (_world, mut channel, client) = world::pair(Config { deadline: None, ..Config::default() });
        send(&mut channel, b"frame", |_, _| {});
        let copy = client.as_fd().try_clone_to_owned().expect("a copy");
        assert!(channel.check_peer());
        client.close();
        assert!(!channel.check_peer());
        let mut back = 0;
        channel.drain_held(|_| back += 1);
        assert_eq!(back, 1);
        drop(copy);
    });
}

#[test]
fn overdue_frames_get_the_default_verdict_and_late_answers_are_counted() {
    world::each(|| {
        let config = Config {
            deadline: Some(Duration::from_millis(1)),
            default_verdict: Verdict::Pass,
            held_max: 1,
            ..Config::default()
        };
        let mut world = World::new(config);
        let path = world.socket();
        let client = std::thread::spawn(move || Consumer::attach(path).expect("attached"));
        let mut channel = world.accept();
        let mut client = client.join().expect("attached");
        for n in 1..=4 {
            channel.send(&message(n, 1500), &Meta::default()).expect("room");
        }
        let mut frames = Vec::new();
        client.recv_batch(&mut frames, 4).expect("received");
        client.hold(&frames[1]);
        client.hold(&frames[2]); // beyond the quota
        let mut decided = Vec::new();
        let mut note = |seq: towpath_ring::Seq, d: towpath_ring::Decision<'_>| {
            decided.push((seq.0, bare(d.verdict), d.cause))
        };
        assert_eq!(channel.poll_verdicts(0, &mut note), 0);
        assert_eq!((channel.stats().held, channel.stats().holds_refused), (1, 1));
        assert_eq!(channel.poll_verdicts(999_999, &mut note), 0);
        assert_eq!(channel.deadline(), Some(1_000_000));
        // The verdict of frame 1 is in time, the others are overdue. Frame 3 keeps its memory although its hold was refused.
        client.verdict(frames.remove(0), Verdict::Drop);
        assert_eq!(channel.poll_verdicts(1_000_000, &mut note), 4);
        assert_eq!(channel.poll_verdicts(9_000_000, &mut note), 0);
        for frame in frames {
            assert!(client.payload(&frame) == message(frame.seq().0, 1500), "{frame:?} was overwritten");
            client.verdict(frame, Verdict::Drop);
        }
        assert_eq!(channel.poll_verdicts(9_000_001, &mut note), 0);
        decided.sort_by_key(|d| d.0);
        let overdue = |n| (n, Verdict::Pass, Cause::Overdue);
        assert_eq!(decided, [(1, Verdict::Drop, Cause::Single), overdue(2), overdue(3), overdue(4)]);
        let stats = channel.stats();
        assert_eq!((stats.decided, stats.overdue, stats.late, stats.out), (1, 3, 3, 0));
        assert_conserved(&channel);
    });
}

#[test]
fn a_stuck_client_is_detached() {
    world::each(|| {
        let config =
            Config { deadline: Some(Duration::from_millis(1)), overdue_max: Some(2), ..Config::default() };
        let mut world = World::new(config);
        let path = world.socket();
        let client = std::thread::spawn(move || Consumer::attach(path).expect("attached"));
        let mut channel = world.accept();
        let mut client = client.join().expect("attached");
        let mut now = 0;
        let mut round = |channel: &mut towpath_ring::Channel| {
            channel.send(b"x", &Meta::default()).expect("room");
            channel.poll_verdicts(now, |_, _| {});
            now += 1_000_000;
            channel.poll_verdicts(now, |_, d| assert_eq!(d.cause, Cause::Overdue));
        };
        round(&mut channel);
        round(&mut channel);
        // One overdue frame is returned: two more may be overdue.
        let frame = client.recv().expect("received").expect("a frame");
        client.verdict(frame, Verdict::Pass);
        round(&mut channel);
        assert_eq!(channel.death(), None);
        round(&mut channel);
        assert_eq!(channel.death(), Some(Death::Stuck));
        channel.drain_held(|seq| panic!("{seq} was decided already"));
        assert_conserved(&channel);
        while client.recv().expect("received").is_some() {}
        assert!(client.is_ended());
    });
}
