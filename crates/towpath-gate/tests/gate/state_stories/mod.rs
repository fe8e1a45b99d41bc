//! Packet stories: packets with their times, and the lifetime of the state after each.

mod bounds;
mod tracking;

use towpath_gate::state::{
    Cursor, Direction, Ends, Flow, Install, Installed, Kind, Limit, LimitMask, Listed, Lookup, Name, Quoted,
    Refused, RuleId, Segment, Settings, States, Tracking,
};
use towpath_wire::Time;

const RULE: RuleId = RuleId(7);

fn flow(proto: u8) -> Flow {
    let ends = Ends::V4([10, 0, 0, 1].into(), [192, 0, 2, 1].into());
    match proto {
        6 | 17 | 136 => Flow { ends, proto, src_port: 40000, dst_port: 80, zone: 0 },
        _ => Flow { ends, proto, src_port: 0, dst_port: 0, zone: 0 },
    }
}

fn flow6(proto: u8) -> Flow {
    Flow { ends: Ends::V6("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap(), 0), ..flow(proto) }
}

fn name(n: u16) -> Name {
    Name(n.try_into().unwrap())
}

fn only(states: &States, now: Time) -> Option<Listed> {
    let mut list = states.list(now).filter(|listed| !matches!(listed.kind, Kind::Parent { .. }));
    let first = list.next();
    assert!(list.next().is_none(), "more than one state");
    first
}

/// A packet: milliseconds since the beginning, direction, TCP flags as letters, acknowledgement number; then the
/// milliseconds that the state lives after it, 0 if there is none.
type Step = (u64, char, &'static str, u32, u64);

fn flags(letters: &str) -> u8 {
    let bit = |letter| match letter {
        'F' => 1,
        'S' => 2,
        'R' => 4,
        'P' => 8,
        'A' => 16,
        _ => panic!("no flag {letter}"),
    };
    letters.chars().map(bit).sum()
}

/// Plays a story. Looks each packet up; a forward packet without a state installs one.
fn play(title: &str, flow: Flow, install: &Install, steps: &[Step]) {
    let mut states = States::new(Settings::default(), 1);
    for &(at, direction, letters, tcp_ack, life) in steps {
        let now = Time::from_nanos(at * 1_000_000);
        let segment = Segment { tcp_flags: flags(letters), tcp_ack, bytes: 100, ..Segment::default() };
        let flow = if direction == '>' { flow } else { flow.reversed() };
        let hit = states.lookup(&flow, Lookup::Named(Name::DEFAULT), &segment, now);
        if hit.is_none() && direction == '>' {
            states.install(&flow, Name::DEFAULT, &segment, RULE, install, now).unwrap();
        }
        let left = only(&states, now).map_or(0, |listed| listed.remaining.as_millis() as u64);
        assert_eq!(left, life, "{title}: {direction} {letters} at {at} ms");
    }
}

const TCP_STORIES: &[(&str, &[Step])] = &[
    (
        "a SYN lives 20 s, and so does its repetition",
        &[(0, '>', "S", 0, 20_000), (3_000, '>', "S", 0, 20_000)],
    ),
    (
        "a SYN-ACK refreshes nothing, the ACK establishes the connection",
        &[(0, '>', "S", 0, 20_000), (100, '<', "SA", 101, 19_900), (200, '>', "A", 201, 300_000)],
    ),
    (
        "only the other side's acknowledgement refreshes",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (200, '>', "A", 201, 300_000),
            (1_200, '>', "PA", 201, 299_000),
            (2_200, '>', "PA", 201, 298_000),
            (3_200, '<', "A", 500, 300_000),
            (4_200, '<', "A", 500, 299_000),
            (5_200, '>', "A", 201, 300_000),
        ],
    ),
    (
        "an older acknowledgement does not refresh",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (200, '>', "A", 201, 300_000),
            (1_200, '<', "A", 100, 299_000),
            (2_200, '<', "A", 101, 300_000),
            (3_200, '>', "A", 200, 299_000),
        ],
    ),
    (
        "older is modulo 2^32",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 0xffff_fff0, 19_900),
            (200, '>', "A", 201, 300_000),
            (1_200, '<', "A", 5, 300_000),
            (1_300, '>', "A", 201, 300_000),
            (2_300, '<', "A", 0xffff_fff0, 299_000),
            (3_300, '<', "A", 0x8000_0004, 300_000),
            (3_400, '>', "A", 201, 300_000),
            (4_400, '<', "A", 4, 299_000),
        ],
    ),
    (
        "acknowledgement number 0 is unset",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 0, 19_900),
            (200, '>', "A", 201, 300_000),
            (1_200, '<', "A", 0xffff_ffff, 300_000),
        ],
    ),
    (
        "a repeated SYN acknowledges nothing",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (1_000, '>', "S", 0, 19_000),
            (1_100, '>', "A", 201, 300_000),
        ],
    ),
    (
        "a half-closed connection is refreshed",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (200, '>', "A", 201, 300_000),
            (1_200, '>', "FA", 201, 299_000),
            (2_200, '<', "PA", 102, 300_000),
            (3_200, '>', "A", 301, 300_000),
        ],
    ),
    (
        "also if the other side closed",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (200, '>', "A", 201, 300_000),
            (1_200, '<', "FA", 101, 300_000),
            (2_200, '>', "PA", 202, 300_000),
        ],
    ),
    (
        "closed by both sides: 1 s after each further packet",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (200, '>', "A", 201, 300_000),
            (300, '>', "FA", 201, 299_900),
            (400, '<', "FA", 102, 1_000),
            (500, '>', "A", 202, 1_000),
            (1_499, '<', "A", 102, 1_000),
            (2_499, '<', "A", 102, 0),
        ],
    ),
    (
        "a reset is not forgotten before the next SYN",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "RA", 1, 1_000),
            (200, '<', "S", 0, 1_000),
            (300, '<', "SA", 101, 1_000),
            (400, '>', "A", 201, 1_000),
        ],
    ),
    (
        "the same ports again after a reset",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "RA", 1, 1_000),
            (200, '>', "S", 0, 20_000),
            (300, '<', "SA", 101, 19_900),
            (400, '>', "A", 201, 300_000),
            (500, '<', "A", 0x9000_0000, 299_900),
            (600, '<', "A", 102, 300_000),
        ],
    ),
    (
        "and after a close, which the answers of the first connection do not change",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 0x7000_0000, 19_900),
            (200, '>', "FA", 201, 300_000),
            (300, '<', "FA", 0x7000_0001, 1_000),
            (400, '>', "A", 202, 1_000),
            (900, '>', "S", 0, 20_000),
            (1_000, '<', "SA", 101, 19_900),
            (1_100, '>', "A", 301, 300_000),
        ],
    ),
    (
        "only the side that began the first connection begins another",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "RA", 1, 1_000),
            (200, '<', "S", 0, 1_000),
            (300, '>', "SA", 0, 1_000),
            (1_300, '<', "A", 0, 0),
        ],
    ),
    (
        "a reset after the close",
        &[
            (0, '>', "S", 0, 20_000),
            (100, '<', "SA", 101, 19_900),
            (200, '>', "FA", 201, 300_000),
            (300, '<', "FA", 102, 1_000),
            (400, '>', "R", 0, 1_000),
        ],
    ),
    (
        "picked up in the middle: 1 s",
        &[
            (0, '>', "PA", 1, 1_000),
            (500, '<', "A", 1, 1_000),
            (1_500, '<', "A", 1, 0),
            (1_500, '>', "A", 1, 1_000),
        ],
    ),
    ("a SYN from the reverse side only: 1 s", &[(0, '>', "A", 1, 1_000), (500, '<', "S", 0, 1_000)]),
    ("SYN and FIN at once: 1 s", &[(0, '>', "SF", 0, 1_000)]),
    (
        "a SYN-ACK as the first packet opens",
        &[(0, '>', "SA", 5, 20_000), (100, '<', "A", 9, 20_000), (200, '<', "S", 9, 19_900)],
    ),
];

#[test]
fn tcp() {
    for (title, steps) in TCP_STORIES {
        // Catches a story whose state is missing from the start.
        assert!(steps[0].4 > 0, "{title}");
        play(title, flow(6), &Install::default(), steps);
        play(title, flow6(6), &Install::default(), steps);
    }
}

#[test]
fn other_protocols() {
    let steps: &[(u8, &[Step])] = &[
        (
            17,
            &[
                (0, '>', "", 0, 10_000),
                (4_000, '>', "", 0, 10_000),
                (9_000, '<', "", 0, 10_000),
                (19_000, '<', "", 0, 0),
            ],
        ),
        (136, &[(0, '>', "", 0, 10_000), (9_999, '<', "", 0, 10_000)]),
        (1, &[(0, '>', "", 0, 5_000), (4_999, '<', "", 0, 5_000), (9_999, '>', "", 0, 5_000)]),
        (47, &[(0, '>', "", 0, 5_000), (5_000, '<', "", 0, 0)]),
    ];
    for (proto, steps) in steps {
        play(&format!("protocol {proto}"), flow(*proto), &Install::default(), steps);
        play(&format!("protocol {proto}"), flow6(*proto), &Install::default(), steps);
    }
}

#[test]
fn the_lifetime_option_replaces_the_lifetime_of_refreshes() {
    let install = Install { lifetime: Some(60), ..Install::default() };
    let tcp: &[Step] = &[
        (0, '>', "S", 0, 20_000),
        (100, '<', "SA", 101, 19_900),
        (200, '>', "A", 201, 60_000),
        (300, '>', "FA", 201, 59_900),
        (400, '<', "FA", 102, 1_000),
    ];
    play("tcp", flow(6), &install, tcp);
    play("a reset", flow(6), &install, &[(0, '>', "S", 0, 20_000), (100, '<', "RA", 1, 1_000)]);
    play("udp", flow(17), &install, &[(0, '>', "", 0, 60_000), (59_000, '<', "", 0, 60_000)]);
    play("icmp", flow(1), &install, &[(0, '>', "", 0, 60_000)]);
}

/// A table with helper functions for the stories below.
struct World {
    states: States,
    now: Time,
}

const PACKET: Segment = Segment {
    tcp_flags: 0,
    tcp_ack: 0,
    tcp_seq: 0,
    tcp_len: 0,
    tcp_fragment: false,
    tcp_window: 0,
    tcp_wscale: None,
    sctp_chunk: None,
    bytes: 50,
};

impl World {
    fn new(settings: Settings) -> Self {
        Self { states: States::new(settings, 3), now: Time::from_secs(1_000) }
    }

    fn wait(&mut self, seconds: u64) {
        self.now = self.now + std::time::Duration::from_secs(seconds);
    }

    fn install(&mut self, flow: Flow, rule: u32, install: Install) -> Result<Installed, Refused> {
        self.states.install(&flow, Name::DEFAULT, &PACKET, RuleId(rule), &install, self.now)
    }

    fn keep(&mut self, flow: Flow, rule: u32) -> Result<Installed, Refused> {
        self.install(flow, rule, Install::default())
    }

    fn limit(&mut self, flow: Flow, rule: u32, mask: LimitMask, max: u32) -> Result<Installed, Refused> {
        self.install(flow, rule, Install { limit: Some(Limit::new(mask, max)), ..Install::default() })
    }

    fn find(&mut self, flow: Flow, lookup: Lookup) -> Option<(u32, Direction)> {
        self.states.lookup(&flow, lookup, &PACKET, self.now).map(|hit| (hit.rule.0, hit.direction))
    }

    fn lines(&self) -> Vec<String> {
        self.states
            .list(self.now)
            .map(|listed| listed.line(listed.rule.0, |_| "default").to_string())
            .collect()
    }
}

fn udp(src: u8, src_port: u16, dst: u8, dst_port: u16) -> Flow {
    let ends = Ends::V4([10, 0, 0, src].into(), [10, 0, 0, dst].into());
    Flow { ends, proto: 17, src_port, dst_port, zone: 0 }
}

#[test]
fn both_directions_match_and_forward_is_that_of_the_first_packet() {
    // The end that made the state sorts first in some flows and last in others.
    for flow in [udp(1, 1000, 2, 53), udp(2, 1000, 1, 53), udp(1, 1000, 1, 53), udp(1, 53, 1, 1000)] {
        let mut world = World::new(Settings::default());
        world.keep(flow, 1).unwrap();
        assert_eq!(world.find(flow, Lookup::Any), Some((1, Direction::Forward)));
        assert_eq!(world.find(flow.reversed(), Lookup::Any), Some((1, Direction::Reverse)));
        let listed = only(&world.states, world.now).unwrap();
        assert_eq!((listed.flow, listed.packets, listed.bytes), (flow, [2, 1], [100, 50]));
    }
}

#[test]
fn fields_of_the_key() {
    let base = udp(1, 1000, 2, 53);
    let link_local =
        |zone| Flow { ends: Ends::V6("fe80::1".parse().unwrap(), "fe80::2".parse().unwrap(), zone), ..base };
    let mapped = Flow {
        ends: Ends::V6("::ffff:10.0.0.1".parse().unwrap(), "::ffff:10.0.0.2".parse().unwrap(), 0),
        ..base
    };
    let rows = [
        (base, Flow { proto: 6, ..base }),
        (base, Flow { zone: 1, ..base }),
        (base, Flow { src_port: 1001, ..base }),
        (base, Flow { src_port: 53, dst_port: 1000, ..base }),
        (base, udp(2, 1000, 1, 53)),
        (base, mapped),
        (link_local(1), link_local(2)),
    ];
    for (flow, other) in rows {
        let mut world = World::new(Settings::default());
        world.keep(flow, 1).unwrap();
        assert_eq!(world.find(other, Lookup::Any), None, "{other:?}");
        assert_eq!(world.find(flow, Lookup::Any), Some((1, Direction::Forward)));
    }
}

#[test]
fn names_are_separate_and_any_finds_the_newest() {
    let mut world = World::new(Settings::default());
    let flow = udp(1, 1, 2, 2);
    for rule in [1, 2, 3] {
        let made = world.states.install(
            &flow,
            name(rule),
            &PACKET,
            RuleId(rule.into()),
            &Install::default(),
            world.now,
        );
        assert_eq!(made, Ok(Installed::New));
    }
    assert_eq!(world.find(flow, Lookup::Named(name(2))), Some((2, Direction::Forward)));
    assert_eq!(world.find(flow, Lookup::Named(name(4))), None);
    assert_eq!(world.find(flow, Lookup::Any), Some((3, Direction::Forward)));
    world.states.remove_where(|rule| rule == RuleId(3));
    assert_eq!(world.find(flow, Lookup::Any), Some((2, Direction::Forward)));
    assert_eq!(world.states.curr_max_length(), 3);
}

#[test]
fn a_second_install_counts_a_packet() {
    let mut world = World::new(Settings { dyn_max: 1, ..Settings::default() });
    let flow = udp(1, 1, 2, 2);
    assert_eq!(world.keep(flow, 1), Ok(Installed::New));
    world.wait(9);
    assert_eq!(world.keep(flow.reversed(), 2), Ok(Installed::Existing));
    assert_eq!(world.lines(), ["00001 2 100 (10s) STATE udp 10.0.0.1 1 <-> 10.0.0.2 2 :default"]);
    assert_eq!((world.states.len(), world.states.counters().created), (1, 1));
}

#[test]
fn an_expired_state_never_matches_and_takes_no_room() {
    let mut world = World::new(Settings { dyn_max: 1, ..Settings::default() });
    world.keep(udp(1, 1, 2, 2), 1).unwrap();
    world.wait(10);
    assert_eq!(world.find(udp(1, 1, 2, 2), Lookup::Any), None);
    assert_eq!(world.lines(), [""; 0]);
    assert_eq!(world.keep(udp(1, 1, 2, 2), 2), Ok(Installed::New));
    world.wait(10);
    assert_eq!(world.keep(udp(3, 1, 2, 2), 3), Ok(Installed::New));
    assert_eq!(world.states.len(), 1);
    assert_eq!(world.states.counters().expired, 2);
}

#[test]
fn deleting_a_rule_removes_its_states_and_parents() {
    let mut world = World::new(Settings::default());
    world.keep(udp(1, 1, 2, 53), 1).unwrap();
    world.keep(flow6(17), 1).unwrap();
    world.keep(udp(1, 2, 2, 53), 2).unwrap();
    world.limit(udp(1, 3, 2, 53), 1, LimitMask::SRC_ADDR, 9).unwrap();
    assert_eq!(world.states.count_of(RuleId(1)), 3);
    assert_eq!(world.states.remove_where(|rule| rule == RuleId(1)), 3);
    assert_eq!((world.lines().len(), world.states.count_of(RuleId(1))), (1, 0));
    world.states.expire_all(world.now);
    assert_eq!((world.states.len(), world.states.parents(), world.states.counters().removed), (1, 0, 3));
    assert_eq!(world.find(udp(1, 2, 2, 53), Lookup::Any), Some((2, Direction::Forward)));
}

#[test]
fn orphans_live_until_they_expire() {
    let mut world = World::new(Settings { dyn_keep_states: true, ..Settings::default() });
    world.keep(udp(1, 1, 2, 53), 1).unwrap();
    world.limit(udp(1, 3, 2, 53), 1, LimitMask::SRC_ADDR, 9).unwrap();
    assert_eq!(world.states.orphan_where(|rule| rule == RuleId(1)), 2);
    assert_eq!(world.states.orphan_where(|rule| rule == RuleId(1)), 0);
    assert_eq!(world.find(udp(1, 1, 2, 53), Lookup::Any), Some((1, Direction::Forward)));
    assert!(world.states.list(world.now).all(|listed| listed.orphaned));
    world.wait(10);
    world.states.expire_all(world.now);
    assert_eq!((world.states.count_of(RuleId(1)), world.states.parents()), (0, 0));
}

#[test]
fn a_changed_lifetime_applies_from_the_next_packet() {
    let mut world = World::new(Settings::default());
    world.keep(udp(1, 1, 2, 53), 1).unwrap();
    world.keep(udp(1, 2, 2, 53), 1).unwrap();
    world.states.set_settings(Settings { dyn_udp_lifetime: 2, ..Settings::default() });
    world.find(udp(1, 2, 2, 53), Lookup::Any).unwrap();
    let seconds =
        |world: &World| world.states.list(world.now).map(|listed| listed.seconds()).collect::<Vec<_>>();
    assert_eq!(seconds(&world), [10, 2]);
    // The shortened state is collected at its new expiry.
    world.wait(3);
    world.states.expire(world.now, 1_000);
    assert_eq!((world.states.len(), seconds(&world)), (1, vec![7]));
}

#[test]
fn a_budget_bounds_the_work_of_each_call() {
    let mut world = World::new(Settings::default());
    for port in 1..=1000 {
        world.keep(udp(1, port, 2, 53), 1).unwrap();
        world.keep(Flow { src_port: port, ..flow6(17) }, 1).unwrap();
    }
    world.wait(3_600);
    let mut calls = 0;
    while !world.states.is_empty() {
        let before = world.states.len();
        world.states.expire(world.now, 100);
        assert!(before - world.states.len() <= 100);
        calls += 1;
        assert!(calls <= 200, "{} left", world.states.len());
    }
    assert_eq!((world.states.counters().expired, world.states.counters().peak), (2000, 2000));
}

#[test]
fn icmp_queries_are_separate_with_dyn_icmp_id() {
    let ping = |id| Flow { src_port: id, dst_port: id, ..flow(1) };
    for (dyn_icmp_id, states) in [(false, 1), (true, 2)] {
        let mut world = World::new(Settings { dyn_icmp_id, ..Settings::default() });
        world.keep(ping(7), 1).unwrap();
        world.keep(ping(8), 1).unwrap();
        assert_eq!(world.states.len(), states);
        assert_eq!(world.find(ping(8).reversed(), Lookup::Any), Some((1, Direction::Reverse)));
        assert_eq!(world.find(ping(9), Lookup::Any).is_some(), !dyn_icmp_id);
    }
}

/// A connection that both sides have acknowledged.
fn connect(world: &mut World, flow: Flow) {
    for (flow, tcp_flags) in [(flow, 0x02), (flow.reversed(), 0x12), (flow, 0x10)] {
        let segment = Segment { tcp_flags, tcp_ack: 1, ..PACKET };
        world
            .states
            .install(&flow, Name::DEFAULT, &segment, RuleId(1), &Install::default(), world.now)
            .unwrap();
    }
}

fn syn(world: &mut World, flow: Flow) -> Result<Installed, Refused> {
    let segment = Segment { tcp_flags: 0x02, ..PACKET };
    world.states.install(&flow, Name::DEFAULT, &segment, RuleId(2), &Install::default(), world.now)
}

fn tcp_flow(src: u8, src_port: u16) -> Flow {
    Flow { proto: 6, ..udp(src, src_port, 200, 80) }
}

#[test]
fn sctp_has_the_lifetimes_of_tcp_with_dyn_sctp() {
    let association = Flow { proto: 132, ..flow(17) };
    let open = [(false, 1), (true, 2), (false, 10), (true, 11)];
    for (dyn_sctp, lives) in [(false, [5, 5, 5, 5]), (true, [20, 20, 20, 300])] {
        let mut world = World::new(Settings { dyn_sctp, ..Settings::default() });
        for ((reverse, chunk), seconds) in open.into_iter().zip(lives) {
            let flow = if reverse { association.reversed() } else { association };
            let segment = Segment { sctp_chunk: Some(chunk), ..PACKET };
            let install = Install::default();
            world.states.install(&flow, Name::DEFAULT, &segment, RULE, &install, world.now).unwrap();
            assert_eq!(only(&world.states, world.now).unwrap().seconds(), seconds, "chunk {chunk}");
        }
    }
}

fn tracked(tracking: Tracking) -> Install {
    Install { tracking, ..Install::default() }
}

/// A TCP segment: direction, flags, sequence number and acknowledgement number.
fn tcp_segment(direction: char, letters: &str, tcp_seq: u32, tcp_ack: u32) -> (Flow, Segment) {
    let flow = if direction == '>' { flow(6) } else { flow(6).reversed() };
    (flow, Segment { tcp_flags: flags(letters), tcp_seq, tcp_ack, tcp_window: 1000, ..PACKET })
}

#[test]
fn strict_tracking_accepts_segments_that_fit() {
    // A segment, whether it is a hit, and the seconds that the state lives after it.
    let rows = [
        (('>', "S", 100, 0), false, 20),
        (('<', "SA", 500, 101), true, 20),
        (('>', "A", 101, 501), true, 300),
        // A blind reset: outside the window, and inside.
        (('<', "R", 5_000, 0), false, 300),
        (('<', "R", 900, 0), true, 300),
        // A blind SYN, and blind data.
        (('>', "S", 7_777, 0), true, 300),
        (('<', "A", 90_000, 101), false, 300),
        (('>', "A", 101, 501), true, 300),
        // The reset that follows the receiver's challenge ACK.
        (('<', "R", 501, 0), true, 1),
        // The same ports again, only in the direction of the first connection.
        (('<', "S", 1, 0), true, 1),
        (('>', "S", 9_000, 0), true, 20),
        (('<', "SA", 44, 9_001), true, 20),
        (('>', "A", 9_001, 45), true, 300),
    ];
    let mut world = World::new(Settings::default());
    for (i, ((direction, letters, seq, ack), hit, seconds)) in rows.into_iter().enumerate() {
        let (flow, segment) = tcp_segment(direction, letters, seq, ack);
        assert_eq!(
            world.states.lookup(&flow, Lookup::Any, &segment, world.now).is_some(),
            hit,
            "segment {i}"
        );
        if i == 0 {
            let install = tracked(Tracking::Strict);
            world.states.install(&flow, Name::DEFAULT, &segment, RULE, &install, world.now).unwrap();
        }
        assert_eq!(only(&world.states, world.now).unwrap().seconds(), seconds, "segment {i}");
    }
    let counters = world.states.counters();
    assert_eq!((counters.unfit, counters.invalid), (2, 0));
    // Ignored segments count, invalid ones do not.
    assert_eq!(only(&world.states, world.now).unwrap().packets, [6, 5]);
}

#[test]
fn a_renewal_counts_no_packet() {
    let mut world = World::new(Settings::default());
    let (flow, first) = tcp_segment('>', "S", 0, 0);
    let install = tracked(Tracking::Ipfw);
    world.states.install(&flow, Name::DEFAULT, &first, RULE, &install, world.now).unwrap();
    for (direction, letters) in [('<', "SA"), ('>', "A"), ('<', "A")] {
        let (flow, segment) = tcp_segment(direction, letters, 1, 1);
        assert!(world.states.renew(&flow, Lookup::Any, &segment, world.now));
    }
    let state = only(&world.states, world.now).unwrap();
    assert_eq!((state.packets, state.seconds(), world.states.counters().unreplied), ([1, 0], 300, 0));
    assert!(!world.states.renew(&Flow { src_port: 9, ..flow }, Lookup::Any, &first, world.now));
}

#[test]
fn strict_tracking_refuses_other_segments() {
    let mut world = World::new(Settings::default());
    let mut install = |direction, letters, seq, ack, tracking| {
        let (flow, segment) = tcp_segment(direction, letters, seq, ack);
        world.states.install(&flow, Name::DEFAULT, &segment, RULE, &tracked(tracking), world.now)
    };
    for letters in ["A", "SA", "R", "SF", "F", ""] {
        assert_eq!(install('>', letters, 1, 1, Tracking::Strict), Err(Refused::Invalid), "{letters}");
    }
    assert_eq!(install('>', "S", 100, 0, Tracking::Strict), Ok(Installed::New));
    // The state is strict, whatever the rule of the packet says.
    assert_eq!(install('<', "SA", 500, 102, Tracking::Ipfw), Err(Refused::Invalid));
    assert_eq!(install('<', "SA", 500, 101, Tracking::Ipfw), Ok(Installed::Existing));
    assert_eq!(world.states.counters().invalid, 7);
    assert_eq!(world.states.count_of(RULE), 1);
    // Other protocols are not checked.
    let udp =
        world.states.install(&flow(17), Name::DEFAULT, &PACKET, RULE, &tracked(Tracking::Strict), world.now);
    assert_eq!(udp, Ok(Installed::New));
}

#[test]
fn strict_tracking_requires_a_sequence_number_in_flight_in_errors() {
    let mut world = World::new(Settings::default());
    let (flow, segment) = tcp_segment('>', "S", 100, 0);
    world
        .states
        .install(&flow, Name::DEFAULT, &segment, RULE, &tracked(Tracking::Strict), world.now)
        .unwrap();
    for (tcp_seq, found) in [(Some(100), true), (Some(101), false), (Some(1 << 30), false), (None, true)] {
        let hit = world.states.lookup_related(&Quoted { flow, tcp_seq }, Lookup::Any, world.now);
        assert_eq!(hit.is_some(), found, "{tcp_seq:?}");
    }
}

#[test]
fn loose_tracking_picks_up_connections() {
    let loose = tracked(Tracking::Loose);
    let picked_up: &[Step] = &[
        (0, '>', "PA", 500, 20_000),
        (1_000, '>', "PA", 500, 19_000),
        (2_000, '<', "A", 700, 300_000),
        (3_000, '>', "A", 501, 300_000),
        (4_000, '>', "FA", 501, 299_000),
        (5_000, '<', "FA", 701, 1_000),
    ];
    play("picked up", flow(6), &loose, picked_up);
    play(
        "from the beginning",
        flow(6),
        &loose,
        &[(0, '>', "S", 0, 20_000), (100, '<', "SA", 101, 19_900), (200, '>', "A", 201, 300_000)],
    );
    play("a reset is not picked up", flow(6), &loose, &[(0, '>', "R", 0, 1_000)]);
    play(
        "one side alone does not keep it alive",
        flow(6),
        &loose,
        &[(0, '>', "A", 5, 20_000), (20_000, '<', "A", 9, 0)],
    );
}

#[test]
fn a_dump_continues_at_its_cursor() {
    let mut world = World::new(Settings::default());
    let v6 = |port| Flow { src_port: port, ..flow6(17) };
    for port in 1..=10 {
        world.limit(udp(1, port, 2, 53), 1, LimitMask::SRC_PORT, 1).unwrap();
        world.keep(v6(port), 2).unwrap();
    }
    let throughout: Vec<_> = world.states.list(world.now).map(|listed| (listed.kind, listed.flow)).collect();
    assert_eq!(throughout.len(), 30);
    let (mut cursor, mut dumped) = (Cursor::default(), Vec::new());
    for other in 100.. {
        let piece: Vec<_> = world.states.dump(cursor, world.now).take(3).collect();
        let Some((_, next)) = piece.last() else { break };
        cursor = *next;
        dumped.extend(piece.into_iter().map(|(listed, _)| (listed.kind, listed.flow)));
        // States are created and removed between the parts.
        world.keep(udp(9, other, 2, 53), other.into()).unwrap();
        world.keep(v6(other), other.into()).unwrap();
        world.states.remove_where(|rule| rule.0 == u32::from(other) - 2);
        // Reuses the slots. Otherwise there would always be another slot after the cursor.
        world.states.expire_all(world.now);
    }
    for entry in &throughout {
        assert_eq!(dumped.iter().filter(|dumped| *dumped == entry).count(), 1, "{entry:?}");
    }
}
