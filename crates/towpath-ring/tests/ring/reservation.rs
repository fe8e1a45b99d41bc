//! Slots: written in place, shortened or given up. The fields of headers.

use crate::world::{self, assert_conserved, pair, pair_with};
use towpath_ring::{Config, Credentials, Kind, Layers, Loss, Meta, Options, ReserveError, Verdict};

#[test]
fn a_slot_is_filled_in_place_cut_or_given_up() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(Config { deadline: None, ..Config::default() });
        for reserved in [10, 64, 65, 5000] {
            // A dropped slot uses no number, and the client receives nothing.
            channel.reserve(reserved).expect("room").write(&[1; 5]);
            assert!(client.try_recv().expect("received").is_none());

            let mut slot = channel.reserve(reserved).expect("room");
            slot.bytes_mut().fill(7);
            let seq = slot.commit_len(reserved - 3, &Meta::default());
            let frame = client.try_recv().expect("received").expect("a frame");
            assert_eq!((frame.seq(), client.payload(&frame)), (seq, &vec![7; reserved - 3][..]));
            client.verdict(frame, Verdict::Pass);

            let mut slot = channel.reserve(reserved).expect("room");
            slot.write(&[1; 4]);
            slot.write(&[2; 5]);
            slot.commit(&Meta::default());
            let frame = client.try_recv().expect("received").expect("a frame");
            assert_eq!(client.payload(&frame), [1, 1, 1, 1, 2, 2, 2, 2, 2]);
            client.verdict(frame, Verdict::Pass);
            channel.poll_verdicts(0, |_, _| {});
        }
        assert_eq!(channel.frames().count(), 0);
        assert_conserved(&channel);
    });
}

#[test]
#[should_panic(expected = "more bytes than the 10 that were reserved")]
fn a_slot_cannot_be_overfilled() {
    let (_world, mut channel, _client) = pair(Config::default());
    channel.reserve(10).expect("room").write(&[0; 11]);
}

#[test]
fn a_header_has_the_fields_of_the_producer_and_the_losses() {
    world::each(|| {
        let options = Options { gaps: false, ..Options::default() };
        let (_world, mut channel, mut client) =
            pair_with(Config { deadline: None, ..Config::default() }, options);
        let meta = Meta {
            kind: Kind::EVENT,
            wire_len: 70_000,
            time: u64::MAX - 1,
            mark: 0xdead_beef,
            port: 3,
            group: 4,
            hash: 5,
            layers: Layers { link: 1, network: 14, payload: 0xffff },
            sender: Some(Credentials { pid: 6, uid: 7, gid: 8 }),
        };
        channel.lose(Loss::NoRoom);
        channel.lose(Loss::Oldest);
        channel.send(b"abc", &meta).expect("room");
        channel.send(b"", &Meta::default()).expect("room");
        let frame = client.try_recv().expect("received").expect("a frame");
        let h = frame.header();
        assert_eq!(
            (h.len, h.kind, h.wire_len, h.time, h.mark),
            (3, Kind::EVENT, 70_000, u64::MAX - 1, 0xdead_beef)
        );
        assert_eq!((h.port, h.group, h.hash, h.layers), (3, 4, 5, meta.layers));
        assert_eq!((h.pid, h.uid, h.gid, h.lost), (6, 7, 8, 2));
        client.verdict(frame, Verdict::Pass);
        let frame = client.try_recv().expect("received").expect("a frame");
        assert_eq!((frame.header().lost, frame.header().wire_len, frame.header().pid), (0, 0, 0));
        client.verdict(frame, Verdict::Pass);
        assert_eq!(client.stats().lost, 2);
        assert_eq!(channel.stats().lost(), 2);
    });
}

/// The kernel's ring was full while one frame was held. This ring skips the frame and continues.
#[test]
fn a_full_ring_says_why() {
    world::each(|| {
        let rx = towpath_ring::Geometry::with(8192, 1024).expect("a geometry");
        let (_world, mut channel, mut client) = pair(Config { rx, deadline: None, ..Config::default() });
        for _ in 0..8 {
            channel.send(&[1; 1000], &Meta::default()).expect("room");
        }
        assert_eq!(channel.reserve(1).err(), Some(ReserveError::RingFull));
        assert_eq!(channel.reserve(8193).err(), Some(ReserveError::TooLarge));
        let mut frames = Vec::new();
        client.recv_batch(&mut frames, 8).expect("received");
        client.hold(&frames[4]);
        let held = frames.remove(4);
        client.verdict_all(Verdict::Pass);
        channel.poll_verdicts(0, |_, _| {});
        let out: Vec<_> = channel.frames().map(|f| (f.seq.0, f.first, f.frames, f.held)).collect();
        assert_eq!(out, [(5, 4, 1, true)]);
        assert_eq!(channel.reserve(8192).err(), Some(ReserveError::NoContiguousSpace));
        // Larger than every free range: the same call sends it as a one-shot message.
        channel.send(&[9; 8000], &Meta::default()).expect("room");
        let frame = client.try_recv().expect("received").expect("a frame");
        assert!(client.payload(&frame).iter().all(|b| *b == 9));
        client.verdict(frame, Verdict::Pass);
        client.verdict(held, Verdict::Pass);
        assert_eq!(channel.poll_verdicts(0, |_, _| {}), 2);
        assert_eq!((channel.stats().oneshots, channel.stats().oneshots_held), (1, 1));
        assert_conserved(&channel);
    });
}
