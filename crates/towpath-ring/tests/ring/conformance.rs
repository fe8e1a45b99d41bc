//! The features of memory-mapped netlink, one by one. Each test names the fault of the kernel's version that it would detect.
//!
//! The numbers of the features: 1 geometry, 2 directions, 3 header, 4 states,
//! 5 readiness, 6 kick, 7 dumps, 8 overrun, 9 multicast, 10 introspection.

use std::os::fd::AsFd;
use std::time::Duration;

use crate::world::{self, World, assert_conserved, pair};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towpath_ring::{
    BindError, Busy, Config, Consumer, Credentials, Endpoint, Enqueue, Fanout, Geometry, GeometryError,
    Header, Kind, Loss, LossRecord, Meta, Options, Overload, Policy, Progress, Queue, ReserveError, Seq,
    Source, TxFrame, TxPayload, TxSink, Verdict,
};

/// Eight frames of 1 KiB in each direction. The engine accepts messages.
fn small() -> Config {
    let ring = Geometry::with(8192, 1024).expect("a geometry");
    Config { rx: ring, tx: ring, deadline: None, messages: true, ..Config::default() }
}

fn is_readable(fd: &impl AsFd) -> bool {
    let mut set = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("poll") > 0
}

/// The kernel multiplied frames per block and blocks in 32 bits: 2^26 x 64 frames of 64 bytes wrapped to 0 and were accepted.
#[test]
fn item_1_each_rule_of_the_geometry_has_its_error() {
    world::each(|| {
        use GeometryError as E;
        let directory = tempfile::tempdir().expect("a directory");
        let row = |block_size, block_nr, frame_size, frame_nr| {
            let rx = Geometry { block_size, block_nr, frame_size, frame_nr };
            match Endpoint::bind(directory.path().join("s"), Config { rx, ..Config::default() }) {
                Err(BindError::Geometry { direction: "RX", rule }) => Some(rule),
                Err(e) => panic!("{e}"),
                Ok(_) => None,
            }
        };
        assert_eq!(row(4096, 2, 1024, 8), None);
        assert_eq!(row(5000, 1, 1000, 5), Some(E::BlockNotPages(5000)));
        assert_eq!(row(4096, 0, 1024, 0), Some(E::NoBlocks));
        assert_eq!(row(4096, 1, 32, 128), Some(E::FrameTooSmall(32)));
        assert_eq!(row(4096, 1, 100, 40), Some(E::FrameUnaligned(100)));
        assert_eq!(row(4096, 1, 8192, 1), Some(E::FrameLargerThanBlock { frame: 8192, block: 4096 }));
        assert_eq!(row(4096, 2, 1024, 9), Some(E::FrameCount { frame_nr: 9, fit: 8 }));
        assert_eq!(row(1 << 31, 2, 64, 0), Some(E::TooLarge(1 << 32)));
        let tx = Geometry { block_size: 0, ..Geometry::TX };
        let refused = Endpoint::bind(directory.path().join("s"), Config { tx, ..Config::default() });
        assert!(matches!(refused, Err(BindError::Geometry { direction: "TX", .. })));
        let records = Endpoint::bind(directory.path().join("s"), Config { records: 3, ..Config::default() });
        assert!(matches!(records, Err(BindError::Records(3))));
    });
}

/// In the kernel, an answer without a free RX frame set an error on the socket, and the next send failed with it.
#[test]
fn item_2_the_directions_do_not_wait_for_each_other() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        while channel.send(&[1; 1000], &Meta::default()).is_ok() {}
        for n in 0..100u32 {
            client.send(&n.to_le_bytes(), &Meta::default()).expect("sent");
            let mut got = None;
            assert_eq!(channel.poll_messages(|_, payload| got = Some(payload.to_vec())), 1);
            assert_eq!(got.expect("a message"), n.to_le_bytes());
        }
    });
}

#[test]
fn item_2_a_wait_for_room_has_a_timeout() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        channel.send(b"frame", &Meta::default()).expect("room");
        let mut sent = 0;
        while client.try_send(&[1; 1000], &Meta::default()).is_ok() {
            sent += 1;
        }
        client.set_send_timeout(Some(Duration::from_millis(5)));
        assert_eq!(client.send(&[2; 1000], &Meta::default()), Err(ReserveError::RingFull));
        let frame = client.recv().expect("received").expect("a frame");
        let not = client.replace(frame, &[2; 1000]).expect_err("there is no room");
        assert_eq!(not.why, ReserveError::RingFull);
        assert_eq!(channel.poll_messages(|_, payload| assert_eq!(payload[0], 1)), sent);
        client.replace(not.frame, &[3; 1000]).expect("there is room");
        client.send(&[4; 1000], &Meta::default()).expect("there is room");
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 1);
        assert_eq!(channel.poll_messages(|_, payload| assert_eq!(payload[0], 4)), 1);
    });
}

/// The kernel's header carried the sender's credentials in memory that the receiver could write, and one set for a whole batch.
#[test]
fn item_3_a_header_has_credentials_that_no_client_can_forge() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        let sender = Some(Credentials { pid: 7, uid: 65534, gid: 65533 });
        let meta = Meta { sender, group: 3, time: 4, mark: 5, port: 6, wire_len: 9000, ..Meta::default() };
        let seq = channel.send(&[1; 100], &meta).expect("room");
        let frame = client.try_recv().expect("received").expect("a frame");
        let h = frame.header();
        assert_eq!((frame.seq(), h.len, h.wire_len, h.group, h.time), (seq, 100, 9000, 3, 4));
        assert_eq!((h.mark, h.port, h.pid, h.uid, h.gid), (5, 6, 7, 65534, 65533));
        client.verdict(frame, Verdict::Pass);

        // The engine reports the credentials of the kernel, not those that the client claims.
        let forged = Meta { sender: Some(Credentials { pid: 1, uid: 4242, gid: 4242 }), ..Meta::default() };
        client.send(b"x", &forged).expect("sent");
        let mut told = None;
        channel.poll_messages(|h, _| told = Some((h.pid, h.uid, h.gid)));
        let us = channel.peer();
        assert_eq!(told, Some((std::process::id(), us.uid, us.gid)));
    });
}

/// In the kernel SKIP made the producer spin round the ring without progress (netlink_forward_ring looked at one frame only), a
/// frame's position fixed its order, and a message that did not fit needed recv(2): a second code path.
#[test]
fn item_4_each_side_makes_only_its_own_transitions_of_a_frame() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(small());
        // UNUSED -> RESERVED, then given up: the client receives nothing, and no number is used.
        let mut slot = channel.reserve(1000).expect("room");
        slot.write(&[1; 10]);
        assert!(client.try_recv().expect("received").is_none());
        let _ = slot;
        assert!(client.try_recv().expect("received").is_none());
        // RESERVED -> VALID, with length 0: released like any other.
        let mut slot = channel.reserve(1000).expect("room");
        let _ = slot.bytes_mut();
        assert_eq!(slot.commit_len(0, &Meta::default()), Seq(1));
        let frame = client.try_recv().expect("received").expect("a frame");
        assert_eq!(client.payload(&frame), b"");
        // VALID -> UNUSED.
        client.verdict(frame, Verdict::Pass);
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 1);
        // VALID -> SKIP: later frames continue until it is released, in any order.
        for n in 2..=4 {
            channel.send(&[n; 1000], &Meta::default()).expect("room");
        }
        let mut frames = Vec::new();
        client.recv_batch(&mut frames, 3).expect("received");
        frames.iter().for_each(|f| client.hold(f));
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 0);
        for n in 0..100 {
            channel.send(&[n; 1000], &Meta::default()).expect("room");
            let frame = client.try_recv().expect("received").expect("a frame");
            assert_eq!(client.payload(&frame), [n; 1000]);
            client.verdict(frame, Verdict::Pass);
            assert_eq!(channel.poll_verdicts(0, |_, _| {}), 1);
        }
        for n in [3, 2, 4] {
            let index = frames.iter().position(|f| f.seq() == Seq(n)).expect("held");
            assert_eq!(client.payload(&frames[index]), [n as u8; 1000]);
            client.verdict(frames.remove(index), Verdict::Drop);
            assert_eq!(channel.poll_verdicts(0, |seq, _| assert_eq!(seq, Seq(n))), 1);
        }
        // COPY: too large for the ring. Both sides use the same call.
        channel.send(&[9; 100_000], &Meta::default()).expect("room");
        let frame = client.try_recv().expect("received").expect("a frame");
        assert!(client.payload(&frame) == [9; 100_000]);
        client.verdict(frame, Verdict::Pass);
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 1);
        assert_conserved(&channel);
    });
}

/// The kernel's poll was ready for a frame that was only RESERVED (a busy loop), missed frames when others were released out of
/// order (it guessed from the frame before the head), and always reported POLLOUT.
#[test]
fn item_5_readiness_is_exact() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        assert!(client.arm());
        let slot = channel.reserve(100).expect("room");
        assert!(!is_readable(&client), "nothing is published");
        slot.commit(&Meta::default());
        channel.kick();
        assert!(is_readable(&client));
        client.disarm().expect("awake");
        assert!(!is_readable(&client), "one doorbell was rung");
        // Released out of order: the messages after it are still received.
        for _ in 0..3 {
            channel.send(&[1; 1000], &Meta::default()).expect("room");
        }
        let mut frames = Vec::new();
        client.recv_batch(&mut frames, 2).expect("received");
        client.verdict(frames.pop().expect("the second"), Verdict::Pass);
        assert!(!client.arm(), "there are frames, so there is no sleep");
        client.disarm().expect("awake");

        // Writable: when a TX frame is free, and not before.
        while client.try_send(&[1; 1000], &Meta::default()).is_ok() {}
        for frame in client.try_recv().expect("received").into_iter().chain(frames) {
            client.verdict(frame, Verdict::Pass);
        }
        while let Some(frame) = client.try_recv().expect("received") {
            client.verdict(frame, Verdict::Pass);
        }
        assert!(client.arm() && !client.has_room(1000) && !is_readable(&client));
        assert_eq!(channel.poll_messages(|_, _| {}), 8);
        channel.kick();
        assert!(is_readable(&client) && client.has_room(1000));
        client.disarm().expect("awake");
    });
}

/// An engine that has read messages wakes only a client that waits for space: one that did not get it, or asks for it after it has announced
/// its sleep.
#[test]
fn a_client_that_waits_for_frames_only_is_not_woken_for_space() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        for round in 0..3 {
            client.try_send(&[1; 1000], &Meta::default()).expect("room");
            assert!(client.arm());
            assert_eq!(channel.poll_messages(|_, _| {}), 1);
            channel.kick_for_room();
            assert!(!is_readable(&client), "it has not asked for space");
            client.disarm().expect("awake");
            // It has not got it, or asks when it is to sleep.
            if round == 0 {
                while client.try_send(&[1; 1000], &Meta::default()).is_ok() {}
            } else {
                (0..8).for_each(|_| client.try_send(&[1; 1000], &Meta::default()).expect("room"));
            }
            assert!(client.arm() && (round == 0 || !client.has_room(1000)));
            assert_eq!(channel.poll_messages(|_, _| {}), 8);
            channel.kick_for_room();
            assert!(is_readable(&client) && client.has_room(1000), "{round}");
            client.disarm().expect("awake");
        }
    });
}

/// In the kernel a TX frame could change after it was checked, and transmission in its place was given up. Here the engine
/// never reads a frame that is transmitted from its place. The frame stays taken until it is given back, in any order; later frames continue.
#[test]
fn item_5_a_frame_that_is_transmitted_from_its_place_stays_taken() {
    #[derive(Default)]
    struct Sink(Vec<TxFrame>, Vec<Vec<u8>>);
    impl TxSink for Sink {
        fn hold(&mut self, header: &Header) -> bool {
            header.group == 1
        }

        fn take(&mut self, _: &Header, payload: TxPayload<'_>) {
            match payload {
                TxPayload::Held(frame) => self.0.push(frame),
                TxPayload::Copied(bytes) => self.1.push(bytes.to_vec()),
            }
        }
    }
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        let (fd, len) = channel.tx_area().expect("a descriptor");
        let mut sink = Sink::default();
        let hold = Meta { group: 1, ..Meta::default() };
        for n in 0..3 {
            client.try_send(&[n; 1000], &hold).expect("room");
        }
        client.try_send(&[3; 10], &hold).expect("room");
        assert_eq!(channel.poll_frames(&mut sink), 4);
        // Five frames are left.
        client.try_send(&[4; 6000], &hold).expect("as a one-shot message");
        assert_eq!(channel.poll_frames(&mut sink), 1);
        // An inline payload and a one-shot message are copied in any case.
        assert_eq!((sink.0.len(), sink.1.iter().map(Vec::len).collect::<Vec<_>>()), (3, vec![10, 6000]));
        for (n, frame) in sink.0.iter().enumerate() {
            let mut bytes = [0; 1000];
            assert!(frame.span().len() == 1000 && frame.span().end <= len);
            rustix::io::pread(&fd, &mut bytes, frame.span().start as u64).expect("readable");
            assert_eq!(bytes, [n as u8; 1000]);
        }
        // Later messages use the other frames again and again.
        for n in 0..50 {
            client.try_send(&[n; 1000], &Meta::default()).expect("room");
            assert_eq!(channel.poll_frames(&mut sink), 1);
            assert_eq!(sink.1.pop().expect("a copy"), [n; 1000]);
        }
        // Released out of order: then all eight frames are free again.
        for at in [1, 0, 0] {
            let frame = sink.0.remove(at);
            channel.give_back(frame);
        }
        assert!(client.has_room(8 * 1024));
        for n in 0..8 {
            client.try_send(&[n; 1000], &Meta::default()).expect("room");
        }
        assert!(client.try_send(&[8; 1000], &Meta::default()).is_err());
        assert_eq!(channel.poll_frames(&mut sink), 8);
        assert!(channel.death().is_none());
    });
}

/// The kernel's client had to call sendmsg(2) for every batch.
#[test]
fn item_6_the_engine_is_kicked_only_when_it_sleeps_and_once() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        for _ in 0..5 {
            client.send(b"x", &Meta::default()).expect("sent");
            client.flush();
        }
        assert_eq!(client.stats().wakeups, 0);
        channel.poll_messages(|_, _| {});
        assert!(channel.arm());
        for _ in 0..5 {
            client.send(b"x", &Meta::default()).expect("sent");
            client.flush();
        }
        assert_eq!(client.stats().wakeups, 1);
        assert!(is_readable(&channel) && !channel.has_rung());
        // If the caller reads the doorbell itself, no second doorbell is sent.
        channel.check_peer();
        assert!(!is_readable(&channel) && channel.has_rung());
        channel.disarm();
        // A message that was published between the first check and the sleep is found by the second check.
        assert!(!channel.arm());
        assert!(!channel.has_rung());
        channel.disarm();
    });
}

struct Numbers(u32, u64);

impl Source for Numbers {
    fn next(&mut self, into: &mut Vec<u8>) -> bool {
        self.0 += 1;
        into.extend_from_slice(&self.0.to_le_bytes());
        self.0 <= 50
    }

    fn generation(&self) -> u64 {
        self.1
    }
}

/// The kernel continued a dump in poll(2) only, one frame per call. Its computation of the frame half a ring ahead was off by one at
/// the wrap.
#[test]
fn item_7_a_dump_continues_with_released_frames_and_marks_an_interruption() {
    world::each_first(|| {
        let (_world, mut channel, mut client) = pair(small());
        client.request(7, b"").expect("sent");
        channel.poll_messages(|h, _| assert_eq!((h.kind, h.group), (Kind::REQUEST, 7)));
        channel.begin_dump(7).expect("no dump is under way");
        assert_eq!(channel.begin_dump(7), Err(Busy));
        let mut source = Numbers(0, 1);
        let (mut parts, mut done) = (0, None);
        while done.is_none() {
            let running = channel.dump(&mut source) == Progress::Running;
            assert!(
                channel.stats().out <= 6,
                "half of the ring, the error and the part that reached the mark"
            );
            source.1 += u64::from(parts == 4);
            while let Some(frame) = client.try_recv().expect("received") {
                match frame.header().kind {
                    Kind::ERROR => assert_eq!(frame.header().mark, 16, "EBUSY"),
                    Kind::DUMP => {
                        parts += 1;
                        assert_eq!(client.payload(&frame), u32::to_le_bytes(parts));
                    }
                    Kind::DONE => done = Some(frame.header().interrupted()),
                    other => panic!("{other:?}"),
                }
                client.verdict(frame, Verdict::Pass);
            }
            channel.poll_verdicts(0, |_, _| {});
            assert_ne!(running, done.is_some());
        }
        assert_eq!((parts, done), (50, Some(true)));
    });
}

/// The kernel reported ENOBUFS once for a whole socket, without the number of lost messages, so programs disabled the error and lost
/// messages silently.
#[test]
fn item_8_an_overrun_is_dropped_counted_and_reported_once() {
    world::each(|| {
        for gaps in [true, false] {
            let options = Options { gaps, ..Options::default() };
            let (_world, channel, mut client) = world::pair_with(small(), options);
            let mut queue = Queue::new(Policy { overload: Overload::DropNewest, ..Policy::default() });
            queue.join(channel);
            let fates: Vec<_> = (0..11).map(|n| queue.enqueue(&[n; 1000], &Meta::default(), 0)).collect();
            assert_eq!(fates.iter().filter(|f| **f == Enqueue::Lost).count(), 3);
            assert_eq!((client.overrun(), client.overrun()), (3 * u64::from(gaps), 0));
            let mut told = Vec::new();
            for _ in 0..3 {
                while let Some(frame) = client.try_recv().expect("received") {
                    told.extend(frame.header().loss_record());
                    client.verdict(frame, Verdict::Pass);
                }
                queue.listeners().for_each(|channel| {
                    channel.poll_verdicts(0, |_, _| {});
                    channel.kick();
                });
            }
            let gap = LossRecord { count: 3, loss: Some(Loss::NoRoom) };
            assert_eq!(told, if gaps { vec![gap] } else { vec![] });
            assert_eq!(
                queue.enqueue(&[1; 10], &Meta::default(), 0),
                Enqueue::Sent(0, Seq(9 + u32::from(gaps)))
            );
            assert_eq!(client.try_recv().expect("received").expect("a frame").header().lost, 3);
            let stats = queue.stats();
            assert_eq!((stats.offered, stats.sent, stats.lost), (12, 9, 3));
            assert_eq!(queue.listeners().next().expect("a listener").stats().lost(), 3);
        }
    });
}

/// The kernel never built a multicast message in a ring: each subscriber with a ring had to call recv(2).
#[test]
fn item_9_a_message_to_several_clients_is_in_each_ring() {
    world::each(|| {
        let mut world = World::new(small());
        let mut queue = Queue::new(Policy { fanout: Fanout::Broadcast, ..Policy::default() });
        let mut clients: Vec<Consumer> = Vec::new();
        for _ in 0..3 {
            let (channel, client) = world.attach(Options::default());
            queue.join(channel);
            clients.push(client);
        }
        assert_eq!(queue.enqueue(&[5; 1000], &Meta { group: 9, ..Meta::default() }, 0), Enqueue::SentTo(3));
        for client in &mut clients {
            let frame = client.try_recv().expect("received").expect("a frame");
            assert_eq!((client.payload(&frame), frame.header().group), (&[5; 1000][..], 9));
            client.verdict(frame, Verdict::Pass);
        }
        for channel in queue.listeners() {
            assert_eq!(channel.poll_verdicts(0, |_, _| {}), 1);
            assert_eq!(channel.stats().oneshots, 0);
        }
    });
}

/// The kernel showed the geometry (netlink_diag), but neither the fill level nor the holders of frames.
#[test]
fn item_10_a_ring_is_visible_from_outside() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(small());
        assert_eq!(channel.geometry(), Geometry::with(8192, 1024).expect("a geometry"));
        for len in [1000, 2000, 10] {
            channel.send(&vec![1; len], &Meta::default()).expect("room");
        }
        assert_eq!(channel.send(&[1; 5000], &Meta::default()), Err(ReserveError::RingFull));
        channel.lose(Loss::NoRoom);
        let frame = client.try_recv().expect("received").expect("a frame");
        client.hold(&frame);
        // The client stores its read position before it sleeps.
        assert!(!client.arm());
        client.disarm().expect("awake");
        channel.poll_verdicts(0, |_, _| {});
        let rows: Vec<_> = channel.frames().map(|f| (f.seq.0, f.first, f.frames, f.held)).collect();
        let mut sorted = rows;
        sorted.sort_unstable();
        assert_eq!(sorted, [(1, 0, 1, true), (2, 1, 2, false), (3, 3, 1, false)]);
        let s = channel.stats();
        assert_eq!((s.published, s.bytes, s.out, s.held, s.high_water), (3, 3010, 3, 1, 3));
        assert_eq!((s.full, s.lost(), s.consumed), (1, 1, 2));
        assert!(!channel.name().is_empty());
        channel.wait(Some(Duration::ZERO)).expect("wait");
        assert!(!channel.is_dead());
    });
}
