//! Packet sequences: `state-timeout`, and TCP connections whose sequence numbers are checked.

use super::*;

/// `state-timeout` as in YANET.
#[test]
fn every_packet_sets_the_timeout() {
    let install = Install { timeout: Some(60), ..Install::default() };
    let tcp: &[Step] = &[
        (0, '>', "S", 0, 60_000),
        (1_000, '<', "SA", 101, 60_000),
        (2_000, '>', "A", 201, 60_000),
        (3_000, '>', "PA", 201, 60_000),
        (4_000, '>', "FA", 201, 60_000),
        (5_000, '<', "FA", 102, 60_000),
        (6_000, '>', "RA", 202, 60_000),
        (65_999, '>', "S", 0, 60_000),
    ];
    play("tcp", flow(6), &install, tcp);
    play("picked up", flow6(6), &install, &[(0, '>', "A", 1, 60_000), (59_999, '>', "A", 1, 60_000)]);
    play("udp", flow(17), &install, &[(0, '>', "", 0, 60_000), (59_000, '<', "", 0, 60_000)]);
    let both = Install { lifetime: Some(30), ..install };
    play("the rule's lifetime", flow(6), &both, &[(0, '>', "S", 0, 20_000), (100, '<', "RA", 1, 1_000)]);
    let mut world = World::new(Settings { dyn_sctp: true, ..Settings::default() });
    for (i, chunk) in [1, 2, 10, 11, 7, 6].into_iter().enumerate() {
        let flow = Flow { proto: 132, ..flow(17) };
        let flow = if i % 2 == 0 { flow } else { flow.reversed() };
        let segment = Segment { sctp_chunk: Some(chunk), ..PACKET };
        world.states.install(&flow, Name::DEFAULT, &segment, RULE, &install, world.now).unwrap();
        assert_eq!(only(&world.states, world.now).unwrap().seconds(), 60, "chunk {chunk}");
        world.wait(1);
    }
}

/// Segments of a tracked connection: direction, flags, sequence and acknowledgement number, whether the segment is a hit,
/// and the seconds that the state lives after it. The first one installs the state.
type Tracked = (char, &'static str, u32, u32, bool, u64);

fn track(title: &str, tracking: Tracking, settings: Settings, wscale: Option<u8>, rows: &[Tracked]) {
    let mut world = World::new(settings);
    for (i, &(direction, letters, seq, ack, hit, seconds)) in rows.iter().enumerate() {
        let (flow, mut segment) = tcp_segment(direction, letters, seq, ack);
        segment.tcp_wscale = wscale.filter(|_| letters.contains('S'));
        let found = world.states.lookup(&flow, Lookup::Any, &segment, world.now).is_some();
        assert_eq!(found, hit && i > 0, "{title}: segment {i}");
        if i == 0 {
            let install = tracked(tracking);
            world.states.install(&flow, Name::DEFAULT, &segment, RULE, &install, world.now).unwrap();
        }
        assert_eq!(only(&world.states, world.now).unwrap().seconds(), seconds, "{title}: segment {i}");
    }
}

/// Linux's `conntrack_syn_challenge_ack.pkt` and `conntrack_ack_loss_stall.pkt`.
#[test]
fn strict_tracking_recovers_from_a_half_open_connection_and_a_lost_acknowledgement() {
    let half_open: &[Tracked] = &[
        ('>', "S", 100, 0, true, 20),
        ('<', "A", 145_824_453, 643_160_523, true, 20),
        ('>', "R", 643_160_523, 0, true, 20),
        ('>', "S", 100, 0, true, 20),
        ('<', "SA", 500, 101, true, 20),
        ('>', "A", 101, 501, true, 300),
    ];
    track("half-open", Tracking::Strict, Settings::default(), None, half_open);
    let lost: &[Tracked] = &[
        ('>', "S", 100, 0, true, 20),
        ('<', "SA", 500, 101, true, 20),
        ('>', "A", 101, 501, true, 300),
        ('>', "A", 1_101, 501, true, 300),
        ('<', "A", 501, 1_101, true, 300),
        ('>', "A", 2_100, 501, true, 300),
        // Retransmitted, although it was acknowledged long ago.
        ('>', "A", 101, 501, true, 300),
        ('<', "A", 501, 2_100, true, 300),
    ];
    track("lost acknowledgement", Tracking::Strict, Settings::default(), None, lost);
    let resets: &[Tracked] = &[
        ('>', "S", 100, 0, true, 20),
        ('<', "SA", 500, 101, true, 20),
        ('>', "A", 101, 501, true, 300),
        ('>', "R", 101, 0, true, 1),
        // Each segment in flight from the other side is answered with a reset.
        ('>', "R", 70_000, 0, true, 1),
        ('<', "RA", 9_000_000, 70_000, true, 1),
        ('>', "S", 200_000, 0, true, 20),
    ];
    track("a reset after a reset", Tracking::Strict, Settings::default(), None, resets);
}

#[test]
fn a_blind_reset_does_not_end_an_established_connection() {
    let opening: [Tracked; 3] =
        [('>', "S", 100, 0, true, 20), ('<', "SA", 500, 101, true, 20), ('>', "A", 101, 501, true, 300)];
    let play = |title: &str, wscale: Option<u8>, rest: &[Tracked]| {
        let rows = [&opening, rest].concat();
        track(title, Tracking::Ipfw, Settings::default(), wscale, &rows);
    };
    play(
        "outside the window, and exact",
        Some(7),
        &[
            ('<', "R", 500, 0, true, 300),
            ('<', "R", 0x8000_0000, 0, true, 300),
            ('<', "RA", 501 + (65_535 << 7) + 1, 101, true, 300),
            ('>', "R", 0, 0, true, 300),
            ('>', "RA", 100, 501, true, 300),
            ('<', "R", 501, 0, true, 1),
            ('<', "A", 501, 101, true, 1),
        ],
    );
    play(
        "in the window, with an acknowledgement of another connection",
        Some(7),
        &[('<', "RA", 502, 0x8000_0000, true, 300), ('<', "RA", 501 + (65_535 << 7), 101, true, 1)],
    );
    play(
        "unscaled windows",
        None,
        &[('<', "RA", 501 + 65_536, 101, true, 300), ('<', "RA", 501 + 65_535, 101, true, 1)],
    );
    play(
        "a half-closed connection",
        None,
        &[('>', "FA", 101, 501, true, 300), ('<', "R", 7, 0, true, 300), ('<', "RA", 501, 102, true, 1)],
    );
    play(
        "after data in flight",
        Some(7),
        &[('>', "A", 101, 501, true, 300), ('>', "RA", 20_101, 501, true, 1)],
    );
    play(
        "without ACK",
        None,
        &[('>', "R", 101 + 65_536, 0, true, 300), ('>', "R", 101 + 65_535, 0, true, 1)],
    );
    play(
        "without ACK, with scaled windows",
        Some(14),
        &[
            ('>', "R", 101 + 65_536, 0, true, 300),
            ('>', "R", 100, 0, true, 300),
            ('>', "R", 101 + 65_535, 0, true, 1),
        ],
    );
    play(
        "the answer to a challenge ACK",
        Some(7),
        &[
            ('>', "A", 101, 501, true, 300),
            ('>', "R", 200_101, 0, true, 300),
            ('<', "A", 501, 100_101, true, 300),
            ('>', "R", 100_101, 0, true, 1),
        ],
    );
    // Nothing is known of the other side yet.
    let refused: [Tracked; 2] = [('>', "S", 100, 0, true, 20), ('<', "RA", 0, 101, true, 1)];
    track("refused", Tracking::Ipfw, Settings::default(), None, &refused);
    let rows = [&opening[..], &[('<', "R", 7, 0, true, 1)]].concat();
    let as_ipfw = Settings { dyn_rst_check: false, ..Settings::default() };
    track("as in ipfw", Tracking::Ipfw, as_ipfw, None, &rows);
}
