//! A channel with a lane for each engine thread: each lane has its numbers, verdicts and replies; the client and its end are
//! shared.

use std::thread;

use crate::world::{World, assert_conserved, bare, consumer, message, replaced, send, settle};
use towpath_ring::{
    BindError, Cause, Config, Consumer, Death, Decision, Endpoint, Enqueue, Fanout, FrameId, Geometry, Meta,
    Options, Overload, Policy, Queue, Quota, ReserveError, Seq, Verdict,
};

const MESSAGES: u32 = 4000;
const LENGTHS: [usize; 4] = [10, 64, 900, 5000];

fn config(lanes: u32) -> Config {
    let rx = Geometry::with(64 << 10, 1024).expect("a geometry");
    let tx = Geometry::with(16 << 10, 1024).expect("a geometry");
    Config { rx, tx, lanes, deadline: None, messages: true, ..Config::default() }
}

/// The lanes of a channel to a client of this process.
fn lanes(config: Config) -> (World, Vec<towpath_ring::Channel>, Consumer) {
    let mut world = World::new(config);
    let path = world.socket();
    let client = thread::spawn(move || Consumer::attach(path).expect("attached"));
    let channel = world.accept_all();
    (world, channel.split(), client.join().expect("attached"))
}

/// Concurrent engine threads, each on its lane. The client decides single frames on even lanes and batches on odd ones. The mark of its
/// verdict is the number of the lane.
#[test]
fn each_thread_has_the_verdicts_for_what_it_sent() {
    for count in [2, 3] {
        let mut world = World::new(config(count));
        let client = world.spawn("lanes::client_answers_by_lane");
        let lanes = world.accept_all().split();
        assert_eq!(lanes.len(), count as usize);
        let threads = lanes.into_iter().map(|mut lane| {
            thread::spawn(move || {
                let number = lane.lane();
                let mut decided = vec![0_u32; MESSAGES as usize];
                let mut note = |seq: Seq, d: towpath_ring::Decision<'_>| {
                    assert_eq!(d.mark, number + 1, "a verdict of another lane");
                    assert_eq!(d.cause, if number % 2 == 0 { Cause::Single } else { Cause::Cumulative });
                    decided[seq.0 as usize - 1] += 1;
                };
                for n in 1..=MESSAGES {
                    let bytes = message(n ^ number << 16, LENGTHS[n as usize % LENGTHS.len()]);
                    assert_eq!(send(&mut lane, &bytes, &mut note), Some(Seq(n)));
                }
                settle(&mut lane, &mut note);
                assert!(decided.iter().all(|times| *times == 1));
                assert_conserved(&lane);
                assert_eq!(lane.stats().violations, 0);
                lane
            })
        });
        let threads: Vec<_> = threads.collect();
        // Dropped together, because the end of one lane ends all.
        let lanes: Vec<_> = threads.into_iter().map(|t| t.join().expect("the thread")).collect();
        drop(lanes);
        client.succeeds();
    }
}

#[test]
#[ignore = "the client of each_thread_has_the_verdicts_for_what_it_sent"]
fn client_answers_by_lane() {
    let mut queue = consumer();
    let mut next = vec![1; queue.lanes() as usize];
    while let Some(frame) = queue.recv().expect("received") {
        let FrameId { lane, seq } = frame.id();
        assert_eq!(seq.0, next[lane as usize], "lane {lane} is dense and in order");
        next[lane as usize] += 1;
        let expected = message(seq.0 ^ lane << 16, LENGTHS[seq.0 as usize % LENGTHS.len()]);
        assert!(queue.payload(&frame) == expected, "frame {seq} of lane {lane} is damaged");
        let answer = Decision::from(Verdict::Pass).with_mark(lane + 1, !0);
        if lane % 2 == 0 {
            queue.verdict(frame, answer);
        } else if seq.0 % 10 == 0 || seq.0 == MESSAGES {
            queue.verdict_upto(frame.id(), answer);
        }
    }
    assert_eq!(next, vec![MESSAGES + 1; next.len()]);
}

/// Two inspectors of one queue and an engine of two threads: each thread has a lane to each inspector, and each inspector
/// gets packets of both threads.
#[test]
fn inspectors_of_a_queue_have_packets_of_each_thread() {
    let mut world = World::new(config(2));
    let inspectors = [(); 2].map(|()| world.spawn("lanes::client_passes_everything"));
    let policy = Policy { fanout: Fanout::FlowHash, overload: Overload::Block, ..Policy::default() };
    let mut queues = [(); 2].map(|()| Queue::new(policy));
    for _ in &inspectors {
        for (queue, lane) in queues.iter_mut().zip(world.accept_all().split()) {
            queue.join(lane);
        }
    }
    let threads = queues.map(|mut queue| {
        thread::spawn(move || {
            for n in 0..MESSAGES {
                let meta = Meta { hash: n.wrapping_mul(0x9e37_79b9), ..Meta::default() };
                let bytes = message(n, LENGTHS[n as usize % LENGTHS.len()]);
                while !matches!(queue.enqueue(&bytes, &meta, 0), Enqueue::Sent(..)) {
                    queue.listeners().for_each(|lane| settle(lane, |_, _| {}));
                }
            }
            for lane in queue.listeners() {
                settle(lane, |_, _| {});
                assert_conserved(lane);
                assert!(lane.stats().decided > u64::from(MESSAGES / 4), "{:?}", lane.stats());
            }
            assert_eq!(queue.listeners().map(|lane| lane.stats().decided).sum::<u64>(), MESSAGES.into());
            queue
        })
    });
    // Dropped together, because the end of one lane ends all.
    let queues = threads.map(|t| t.join().expect("the thread"));
    drop(queues);
    inspectors.into_iter().for_each(|inspector| inspector.succeeds());
}

#[test]
#[ignore = "the clients of inspectors_of_a_queue_have_packets_of_each_thread"]
fn client_passes_everything() {
    let mut queue = consumer();
    let (mut batch, mut of) = (Vec::new(), vec![0; queue.lanes() as usize]);
    while queue.recv_batch(&mut batch, 16).expect("received") > 0 {
        batch.drain(..).for_each(|frame| of[frame.id().lane as usize] += 1);
        queue.verdict_all(Verdict::Pass);
    }
    assert!(of.iter().all(|count| *count > MESSAGES / 4), "{of:?}");
}

#[test]
fn no_lane_waits_for_another_that_is_busy() {
    let (_world, mut lanes, mut client) = lanes(Config { rx: Geometry::RX, ..config(2) });
    for n in 0..500 {
        lanes[0].send(&[n as u8; 10], &Meta::default()).expect("room");
    }
    lanes[1].send(b"me too", &Meta::default()).expect("room");
    let mut before = 0;
    while let Some(frame) = client.try_recv().expect("received") {
        let id = frame.id();
        client.verdict(frame, Verdict::Pass);
        if id.lane == 1 {
            break;
        }
        before += 1;
    }
    assert!(before <= 32, "{before} frames of the busy lane came first");
}

#[test]
fn a_sleeper_is_woken_once_for_all_lanes() {
    let (_world, mut lanes, mut client) = lanes(config(3));
    for round in 1..=3 {
        assert!(client.arm());
        for lane in &mut lanes {
            lane.send(b"wake up", &Meta::default()).expect("room");
            lane.kick();
        }
        assert_eq!(lanes.iter().map(|lane| lane.stats().wakeups).sum::<u64>(), round);
        client.disarm().expect("disarmed");
        let mut frames = Vec::new();
        client.recv_batch(&mut frames, 10).expect("received");
        assert_eq!(frames.len(), 3);
        client.verdict_all(Verdict::Pass);
        for lane in &mut lanes {
            assert_eq!(lane.poll_verdicts(0, |_, d| assert_eq!(d.cause, Cause::Cumulative)), 1);
        }
    }
}

#[test]
fn verdicts_and_replies_return_on_the_lane_of_the_frame() {
    let (_world, mut lanes, mut client) = lanes(config(2));
    for (n, lane) in lanes.iter_mut().enumerate() {
        for _ in 0..3 {
            lane.send(&[n as u8; 300], &Meta::default()).expect("room");
        }
    }
    let mut frames = Vec::new();
    client.recv_batch(&mut frames, 10).expect("received");
    for frame in frames {
        let FrameId { lane, seq } = frame.id();
        match seq.0 {
            1 => client.replace(frame, &[10 + lane as u8; 500]).expect("replaced"),
            2 => {
                client.reply(&frame, &[20 + lane as u8], &Meta::default()).expect("sent");
                client.hold(&frame);
                client.verdict_upto(frame.id(), Verdict::Drop);
                client.verdict(frame, Verdict::Reject);
            }
            _ => {
                // Larger than the rings.
                client.reply(&frame, &vec![30 + lane as u8; 40_000], &Meta::default()).expect("sent");
                client.verdict(frame, Verdict::Pass);
            }
        }
    }
    for (n, lane) in lanes.iter_mut().enumerate() {
        let n = n as u8;
        let mut decided = Vec::new();
        lane.poll_verdicts(0, |seq, d| decided.push((seq.0, bare(d.verdict), replaced(d.verdict))));
        decided.sort_by_key(|row| row.0);
        assert_eq!(decided.len(), 3);
        assert_eq!(decided[0].2.as_deref(), Some(&[10 + n; 500][..]));
        assert_eq!((decided[1].1, decided[2].1), (Verdict::Reject, Verdict::Pass));
        let mut said = Vec::new();
        lane.poll_messages(|_, payload| said.push((payload.len(), payload[0])));
        assert_eq!(said, [(1, 20 + n), (40_000, 30 + n)]);
        assert_eq!(lane.stats().violations, 0);
        assert_conserved(lane);
    }
}

#[test]
fn the_end_of_one_lane_is_the_end_of_all() {
    // The engine detaches the client, a thread drops the channel, or the client leaves: on either lane.
    for (end, how) in [(0, Death::Detached), (1, Death::Detached), (2, Death::Closed)] {
        for from in [0, 1] {
            let (_world, mut lanes, mut client) = lanes(config(2));
            for lane in &mut lanes {
                for _ in 0..3 {
                    lane.send(b"frame", &Meta::default()).expect("room");
                }
            }
            let held = client.try_recv().expect("received").expect("a frame");
            client.hold(&held);
            let mut other = lanes.swap_remove(1 - from);
            let mut this = lanes.remove(0);
            match end {
                0 => this.detach(),
                1 => drop(this),
                _ => {
                    drop(client);
                    // A child of another test may have the socket until it executes its program.
                    while this.check_peer() {
                        thread::yield_now();
                    }
                    assert!(other.is_dead());
                    assert_eq!(other.death(), Some(how));
                    continue;
                }
            }
            assert_eq!(other.death(), Some(how));
            assert_eq!(other.send(b"more", &Meta::default()), Err(ReserveError::Disconnected));
            let mut drained = 0;
            other.drain_held(|_| drained += 1);
            assert_eq!(drained, 3);
            assert_conserved(&other);
            while client.recv().expect("received").is_some() {}
            assert!(client.is_ended());
        }
    }
}

#[test]
fn the_number_of_lanes_has_its_bounds_and_its_price() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("s");
    for count in [0, 65] {
        assert!(matches!(Endpoint::bind(&path, config(count)), Err(BindError::Lanes(n)) if n == count));
    }

    // A quota of the memory of one lane admits one lane.
    let bytes = |lanes| {
        let quota = Quota { bytes_per_user: 1, ..Quota::default() };
        let mut endpoint = Endpoint::bind(&path, Config { quota, ..config(lanes) }).expect("an endpoint");
        let path = path.clone();
        let client = thread::spawn(move || Consumer::attach_with(path, &Options::named("c")).unwrap_err());
        while !client.is_finished() {
            assert!(endpoint.accept().expect("accept").is_none());
            endpoint.wait(Some(std::time::Duration::from_millis(5))).expect("wait");
        }
        let refused = client.join().expect("refused").to_string();
        let asked = refused.split(", ").nth(1).and_then(|s| s.split(' ').next()).map(str::parse::<u64>);
        asked.expect("a number").expect("a number")
    };
    assert_eq!(bytes(2), 2 * bytes(1));

    // The maximum number of lanes.
    let (_world, mut lanes, mut client) = lanes(config(64));
    assert_eq!((lanes.len(), client.lanes()), (64, 64));
    lanes[63].send(b"last", &Meta::default()).expect("room");
    assert_eq!(
        client.try_recv().expect("received").expect("a frame").id(),
        FrameId { lane: 63, seq: Seq(1) }
    );
}
