//! Clients that an engine hands over to its successor: they get new memory and keep their connection.

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use towpath_ring::{Channel, Config, Consumer, Death, Endpoint, Meta, Verdict};

const FRAMES: u32 = 100;

fn endpoint(path: &Path, lanes: u32) -> Endpoint {
    Endpoint::bind(path, Config { lanes, ..Config::default() }).unwrap()
}

fn accept(endpoint: &mut Endpoint) -> Channel {
    loop {
        match endpoint.accept().unwrap() {
            Some(channel) => return channel,
            None => endpoint.wait(None).unwrap(),
        }
    }
}

/// The successor's endpoint at the same socket.
fn successor(before: &Endpoint, path: &Path, lanes: u32) -> Endpoint {
    let (listener, _) = before.listener().unwrap();
    Endpoint::on(listener, path, Config { lanes, ..Config::default() }).unwrap()
}

/// Sends frames on each lane and waits for the verdicts.
fn converse(lanes: &mut [Channel]) {
    for lane in &mut *lanes {
        for n in 0..FRAMES {
            lane.send(&n.to_le_bytes(), &Meta::default()).unwrap();
        }
        lane.kick();
    }
    for lane in lanes {
        let mut decided = 0;
        while decided < FRAMES as usize {
            decided += lane.poll_verdicts(0, |_, decision| assert_eq!(decision.verdict, Verdict::Pass));
            lane.wait(Some(Duration::from_millis(50))).unwrap();
        }
        assert_eq!((lane.has_frames(), lane.stats().violations), (false, 0));
    }
}

fn hand_over(lanes: &mut [Channel]) -> std::os::fd::OwnedFd {
    let mut sockets: Vec<_> = lanes.iter_mut().filter_map(Channel::hand_over).collect();
    assert!(lanes.iter().all(|lane| lane.death() == Some(Death::HandedOver)));
    assert_eq!(sockets.len(), 1, "once for all lanes");
    sockets.remove(0)
}

/// A client that counts frames until the engine ends. `polls`: it never sleeps.
fn client(path: &Path, polls: bool, ready: Sender<()>) -> JoinHandle<u64> {
    let path = path.to_owned();
    thread::spawn(move || {
        let mut queue = Consumer::attach(&path).unwrap();
        ready.send(()).unwrap();
        let fd = queue.as_fd().as_raw_fd();
        loop {
            let frame = match polls {
                true => queue.try_recv().unwrap(),
                false => queue.recv().unwrap(),
            };
            match frame {
                Some(frame) => queue.verdict(frame, Verdict::Pass),
                None if !polls || queue.is_ended() => break,
                None => {}
            }
        }
        assert_eq!(queue.as_fd().as_raw_fd(), fd, "the descriptor of an event loop stays");
        queue.stats().received
    })
}

#[test]
fn a_client_is_served_by_one_engine_after_another() {
    for (before, after, polls) in [(1, 1, false), (2, 3, false), (3, 1, false), (1, 2, true)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut old = endpoint(&path, before);
        let (ready, attached) = channel();
        let client = client(&path, polls, ready);
        let mut lanes = accept(&mut old).split();
        attached.recv().unwrap();
        converse(&mut lanes);

        let mut new = successor(&old, &path, after);
        new.adopt(hand_over(&mut lanes)).unwrap();
        assert_eq!(new.adopting(), 1);
        drop((lanes, old));
        let mut lanes = accept(&mut new).split();
        assert_eq!((new.adopting(), lanes.len()), (0, after as usize));
        converse(&mut lanes);
        drop(lanes);
        assert_eq!(client.join().unwrap(), u64::from(FRAMES * (before + after)));
    }
}

#[test]
fn a_successor_that_ends_at_any_point_leaves_the_client_to_the_engine() {
    // The successor has asked for the hello, has read it, has served frames.
    for point in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut old = endpoint(&path, 2);
        let (ready, attached) = channel();
        let client = client(&path, false, ready);
        let mut lanes = accept(&mut old).split();
        attached.recv().unwrap();
        converse(&mut lanes);
        let socket = hand_over(&mut lanes);
        drop(lanes);

        // As in another process, which is killed: its memory and descriptors end without a shutdown(2).
        let mut new = successor(&old, &path, 2);
        new.adopt(socket.try_clone().unwrap()).unwrap();
        let mut served = 0;
        if point > 0 {
            let mut lanes = accept(&mut new).split();
            if point > 1 {
                converse(&mut lanes);
                served = 2 * FRAMES;
            }
            drop(hand_over(&mut lanes));
        }
        drop(new);

        old.adopt(socket).unwrap();
        let mut lanes = accept(&mut old).split();
        converse(&mut lanes);
        assert!(lanes[0].check_peer(), "{point}: the client was detached");
        drop(lanes);
        assert_eq!(client.join().unwrap(), u64::from(4 * FRAMES + served), "{point}");
    }
}

#[test]
fn a_client_with_a_frame_is_not_handed_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let mut endpoint = endpoint(&path, 1);
    let (give, given) = channel::<()>();
    let client = {
        let path = path.clone();
        thread::spawn(move || {
            let mut queue = Consumer::attach(&path).unwrap();
            let frame = queue.recv().unwrap().unwrap();
            given.recv().unwrap();
            queue.verdict(frame, Verdict::Drop);
            queue.recv().unwrap().is_none()
        })
    };
    let mut channel = accept(&mut endpoint);
    channel.send(b"frame", &Meta::default()).unwrap();
    channel.kick();
    // Its deadline has passed: the frame is decided, and the client still reads it.
    let mut overdue = 0;
    for now in 1..100 {
        overdue += channel.poll_verdicts(now * 1_000_000_000, |_, _| ());
    }
    assert_eq!((overdue, channel.has_frames()), (1, true));
    assert!(channel.hand_over().is_none());
    assert_eq!(channel.death(), None);
    give.send(()).unwrap();
    while channel.has_frames() {
        channel.wait(None).unwrap();
        channel.poll_verdicts(200_000_000_000, |_, _| panic!("a late verdict"));
    }
    assert!(channel.hand_over().is_some());
    assert!(channel.hand_over().is_none(), "once");
    drop((channel, endpoint));
    assert!(client.join().unwrap());
}
