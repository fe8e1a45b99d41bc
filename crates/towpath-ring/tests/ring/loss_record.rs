//! Lost messages, and how the client learns of them.

use crate::world::{self, assert_conserved, pair, pair_with};
use towpath_ring::{
    Channel, Config, Consumer, Geometry, Kind, Loss, LossRecord, Meta, Options, ReserveError, Verdict,
};

fn config() -> Config {
    Config { rx: Geometry::with(8192, 1024).expect("a geometry"), deadline: None, ..Config::default() }
}

/// Receives and passes all frames. Returns the first byte and the header's `lost` of each message, or the gap record.
fn drain(client: &mut Consumer, channel: &mut Channel) -> Vec<Result<(u8, u16), LossRecord>> {
    let mut got = Vec::new();
    while let Some(frame) = client.try_recv().expect("received") {
        got.push(match frame.header().loss_record() {
            Some(gap) => Err(gap),
            None => Ok((client.payload(&frame)[0], frame.header().lost)),
        });
        client.verdict(frame, Verdict::Pass);
    }
    let records = got.iter().filter(|g| g.is_err()).count();
    let mut decided = 0;
    assert_eq!(channel.poll_verdicts(0, |_, _| decided += 1), got.len());
    assert_eq!(decided + records, got.len(), "the return of a record is not reported");
    got
}

fn gap(count: u32, loss: Loss) -> Result<(u8, u16), LossRecord> {
    Err(LossRecord { count, loss: Some(loss) })
}

#[test]
fn a_loss_is_reported_before_the_next_message() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(config());
        channel.send(&[1; 100], &Meta::default()).expect("room");
        channel.lose(Loss::NoRoom);
        channel.lose(Loss::Passed);
        channel.lose(Loss::NoRoom);
        channel.send(&[2; 2000], &Meta::default()).expect("room");
        channel.send(&[3; 100], &Meta::default()).expect("room");
        let expected = [Ok((1, 0)), gap(2, Loss::NoRoom), gap(1, Loss::Passed), Ok((2, 3)), Ok((3, 0))];
        assert_eq!(drain(&mut client, &mut channel), expected);
        assert_eq!((client.overrun(), client.overrun(), client.stats().lost), (3, 0, 3));
        let stats = channel.stats();
        assert_eq!((stats.published, stats.gaps, stats.lost()), (5, 2, 3));
        assert_eq!(stats.lost_no_room, 2);
        assert_conserved(&channel);
    });
}

#[test]
fn a_full_ring_is_not_filled_with_records_of_its_being_full() {
    world::each(|| {
        let (_world, mut channel, mut client) = pair(config());
        for n in 0..8 {
            channel.send(&[n; 1000], &Meta::default()).expect("room");
        }
        assert_eq!(channel.send(&[8; 1000], &Meta::default()), Err(ReserveError::RingFull));
        channel.lose(Loss::NoRoom);
        // Reported at once in the lost counter, although no frame is free for a record.
        assert_eq!((client.overrun(), client.overrun()), (1, 0));
        channel.kick();
        let frame = client.try_recv().expect("received").expect("a frame");
        client.verdict(frame, Verdict::Pass);
        channel.poll_verdicts(0, |_, _| {});
        // One frame is free, and the message uses it: the record waits.
        channel.send(&[9; 1000], &Meta::default()).expect("room");
        let expected: Vec<_> = (1..8).map(|n| Ok((n, 0))).chain([Ok((9, 1))]).collect();
        assert_eq!(drain(&mut client, &mut channel), expected);
        channel.kick();
        assert_eq!(drain(&mut client, &mut channel), [gap(1, Loss::NoRoom)]);
        channel.kick();
        assert_eq!(drain(&mut client, &mut channel), []);
        assert_conserved(&channel);
    });
}

#[test]
fn a_client_without_loss_records_gets_none() {
    world::each(|| {
        let options = Options { gaps: false, ..Options::default() };
        let (_world, mut channel, mut client) = pair_with(config(), options);
        channel.lose(Loss::Oldest);
        channel.kick();
        channel.send(&[1], &Meta::default()).expect("room");
        assert_eq!(drain(&mut client, &mut channel), [Ok((1, 1))]);
        assert_eq!((client.overrun(), client.stats().lost, channel.stats().gaps), (0, 1, 0));
    });
}

#[test]
fn drain_returns_no_loss_records_of_a_dead_client() {
    world::each(|| {
        let (_world, mut channel, client) = pair(config());
        channel.lose(Loss::Oldest);
        let seq = channel.send(&[1], &Meta::default()).expect("room");
        assert_eq!(channel.frames().count(), 2);
        drop(client);
        let mut back = Vec::new();
        channel.drain_held(|seq| back.push(seq));
        assert_eq!(back, [seq]);
        assert_conserved(&channel);
        assert_eq!(channel.stats().drained, 2);
    });
}

#[test]
fn a_record_is_of_its_own_kind() {
    world::each(|| {
        assert_eq!(Kind::GAP, Kind(8));
        let (_world, mut channel, mut client) = pair(config());
        channel.lose(Loss::TooLarge);
        channel.kick();
        let frame = client.try_recv().expect("received").expect("a frame");
        assert_eq!((frame.header().kind, frame.header().lost), (Kind::GAP, 0));
        assert_eq!(client.payload(&frame), b"");
        // A verdict for all frames decides a record as well.
        client.verdict_upto(frame.id(), Verdict::Drop);
        assert_eq!(channel.poll_verdicts(0, |seq, _| panic!("{seq}")), 1);
    });
}
