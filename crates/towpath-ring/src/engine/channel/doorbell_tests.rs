//! Tests of the limit on doorbells without news.

use crate::engine::control_rx::FALSE_DOORBELLS;
use crate::handshake::messages::Notice;
use crate::mock;
use crate::shm::abi;
use crate::shm::sync::Ordering;
use crate::shm::sys;
use crate::{Channel, Config, Consumer, Death, Geometry, Meta, Verdict};

/// One second of the poll's clock.
const SECOND: u64 = 1_000_000_000;

#[test]
fn doorbells_without_news_are_a_violation() {
    let config = Config { violations_max: 0, deadline: None, ..mock::config() };
    let (mut lanes, clients) = mock::channel(&config);
    let channel = &mut lanes[0];
    let mut now = 0;
    let ring = |channel: &mut Channel, times: u32| {
        for _ in 0..times {
            assert_eq!(sys::send(&clients[0].socket, &Notice::Doorbell.emit(), &[]).unwrap(), sys::Sent::Yes);
            channel.check_peer();
        }
    };
    // As many as permitted, in each second.
    for _ in 0..3 {
        channel.poll_verdicts(now, |_, _| {});
        ring(channel, FALSE_DOORBELLS);
        channel.poll_verdicts(now, |_, _| {});
        assert_eq!(channel.death(), None);
        now += SECOND;
    }
    ring(channel, 1);
    // The doorbell counts for the previous second, because no poll has begun a new one.
    channel.poll_verdicts(now - 1, |_, _| {});
    assert_eq!((channel.death(), channel.stats().violations), (Some(Death::Violations), 1));
}

#[test]
fn a_client_that_rings_once_for_each_sleep_breaks_no_rule() {
    let rx = Geometry { block_size: 1 << 16, block_nr: 4, frame_size: 256, frame_nr: 1024 };
    let config = Config { rx, violations_max: 0, deadline: None, held_max: 1024, ..mock::config() };
    let (mut lanes, clients) = mock::channel(&config);
    let channel = &mut lanes[0];
    let mut client = Consumer::over(clients);
    for n in 0..1000 {
        channel.send(b"packet", &Meta::default()).unwrap();
        // The search looks at 128 held frames at a time.
        while !channel.arm() {}
        let frame = client.try_recv().unwrap().expect("a frame");
        // Every second frame is held; a hold is news, too.
        if n % 2 == 0 {
            client.verdict(frame, Verdict::Pass);
        } else {
            client.hold(&frame);
        }
        client.flush();
        assert!(!channel.has_rung());
        assert!(channel.check_peer());
        assert!(channel.has_rung(), "{n}");
        channel.poll_verdicts(0, |_, _| {});
    }
    assert_eq!((channel.death(), channel.stats().violations), (None, 0));
}

#[test]
fn a_request_for_a_doorbell_stays_until_it_is_answered() {
    let config = Config { deadline: None, ..mock::config() };
    let (mut lanes, clients) = mock::channel(&config);
    let channel = &mut lanes[0];
    let mut client = Consumer::over(clients);
    assert!(channel.arm());
    let sleep = |channel: &Channel| channel.rings.own.word(abi::ENGINE_NEED_WAKEUP).load(Ordering::Relaxed);
    let before = sleep(channel);
    for _ in 0..3 {
        channel.disarm();
        assert!(channel.arm(), "another event ended the sleep");
    }
    assert_eq!(sleep(channel), before);
    channel.send(b"packet", &Meta::default()).unwrap();
    let frame = client.try_recv().unwrap().expect("a frame");
    client.verdict(frame, Verdict::Pass);
    client.flush();
    channel.check_peer();
    assert_eq!(sleep(channel), 0, "answered");
    assert!(!channel.arm(), "the verdict is not read yet");
    assert_eq!(channel.poll_verdicts(0, |_, _| {}), 1);
    assert!(channel.arm());
}
