//! Worlds with random steps, and one world for each property.

use proptest::prelude::*;

use super::*;
use crate::batches::Batches;

fn bus() -> impl Strategy<Value = Bus> {
    (0_u32..40, 0_u32..20, 0_u64..200, prop_oneof![Just(0_u64), Just(60)], 0_u64..1_000_000).prop_map(
        |(lost, repeated, delay, stream, skew)| Bus {
            lost,
            repeated,
            delay: Duration::from_millis(delay),
            stream: Duration::from_secs(stream),
            skew: Duration::from_secs(skew),
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    // Flows below 3 are UDP.
    let flags =
        prop_oneof![Just("syn"), Just("syn ack"), Just("ack"), Just("ack"), Just("fin ack"), Just("rst")];
    let packet = (0..GATES, 0..FLOWS, any::<bool>(), flags).prop_map(|(gate, flow, reply, flags)| {
        Step::Packet { gate, flow, reply, tcp: (flow >= 3).then_some(flags) }
    });
    prop_oneof![
        20 => packet,
        10 => (0_u16..1_500).prop_map(Step::Wait),
        2 => (0..GATES).prop_map(Step::Split),
        1 => (0..GATES).prop_map(Step::Restart),
        1 => (0..GATES, -1_000_000..1_000_000).prop_map(|(gate, seconds)| Step::Jump { gate, seconds }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(48), ..ProptestConfig::default() })]

    /// After any loss, delay, order, split, restart and jump of a wall clock, the gates have the same states, each once, and none has counted a packet twice.
    #[test]
    fn the_tables_of_all_gates_converge(bus in bus(), seed in any::<u64>(), steps in prop::collection::vec(step(), 1..60)) {
        World::new(bus, seed).run(steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Whatever peers send, a replica holds a bounded amount.
    #[test]
    fn memory_is_bounded_for_any_messages(
        messages in prop::collection::vec((0_u16..400, 0_usize..3, any::<[u64; 3]>(), 0_u64..200, any::<bool>()), 1..2000),
        ranges in prop::collection::vec((0_u64..400, any::<u64>(), any::<u64>()), 200..3000),
    ) {
        let mut host = Host::new(0, Time::from_secs(1_000));
        let mut replica = replica(0, 1);
        let mut now = Time::from_secs(1_000);
        replica.connect(now);
        for (from, kind, [a, b, c], wait, small) in messages {
            now = now + Duration::from_millis(wait);
            host.now = now;
            let (a, c) = if small { (a % 1000, c % 1000) } else { (a, c) };
            let (channel, kind) = [
                (Channel::States, Kind::States { seq: a }),
                (Channel::Request, Kind::Request { epoch: a, cursor: b, chunks: c }),
                (Channel::Chunk, Kind::Chunk { epoch: a, cursor: b, next: Some(c) }),
            ][kind];
            let sender = Sender { incarnation: 1 + b % 3, at: now, fingerprint: 0, in_step: small, unchecked: false };
            // Any ranges, also such as no gate has.
            let some = ranges.iter().skip(usize::from(from)).take(if small { 200 } else { 0 });
            let has: Vec<u8> = some.flat_map(|(at, from, to)| [*at, *from, *to]).flat_map(u64::to_le_bytes).collect();
            let bytes = Message { sender, kind, has: Has::of(&has), records: &[] }.encode();
            replica.message(channel, &format!("p{from}"), &bytes, &mut host, now);
            while replica.poll(&mut host, now).is_some() {}
            bounded(&replica);
        }
    }
}

/// The gate 0 is killed after its clock was set back, so that its last process has a larger incarnation than the next one. A replay has
/// batches of both.
#[test]
fn a_replay_brings_back_no_state_of_an_earlier_process() {
    let bus = Bus { lost: 9, repeated: 16, delay: Duration::ZERO, ..CALM };
    let mut world = World::new(Bus { skew: Duration::ZERO, ..bus }, 7_658_665_549_220_075_162);
    let tcp = |reply| Step::Packet { gate: 2, flow: 4, reply, tcp: Some("syn") };
    let before = [Step::Wait(771), Step::Wait(1111), Step::Wait(111), tcp(false), tcp(true), Step::Wait(616)];
    let split = [udp(0, 2, true), Step::Wait(1381), Step::Split(2), udp(0, 2, false)];
    let killed = [Step::Jump { gate: 0, seconds: -5 }, Step::Wait(16), Step::Restart(1), Step::Restart(0)];
    let after = [81, 601, 416, 891].map(Step::Wait);
    world.run(before.into_iter().chain(split).chain(killed).chain(after));
}

/// The gate 2 comes back when the gate 0 begins to take the snapshot of the gate 1, which is in step as far as it knows.
#[test]
fn a_gate_that_comes_back_during_a_snapshot_is_asked_too() {
    let bus = Bus { lost: 10, repeated: 6, delay: Duration::from_millis(26), ..CALM };
    let bus = Bus { stream: Duration::ZERO, skew: Duration::ZERO, ..bus };
    let mut world = World::new(bus, 12_764_428_953_961_438_104);
    let before = [udp(0, 0, false), udp(0, 1, false), udp(0, 0, false), udp(0, 0, false)];
    let waits = [286, 971, 846].map(Step::Wait);
    let split = [udp(2, 1, true), Step::Wait(1061), Step::Restart(1), Step::Split(2), udp(2, 1, false)];
    let killed = [Step::Wait(1226), udp(0, 2, false), Step::Wait(406), Step::Wait(181), Step::Restart(0)];
    let after = [716, 466].map(Step::Wait);
    world.run(before.into_iter().chain(waits).chain(split).chain(killed).chain(after));
}

#[test]
fn a_replay_fills_gaps_of_the_process_that_was_heard() {
    let now = Time::from_secs(1_000);
    let (mut host, mut replica) = (Host::new(0, now), replica(0, 1));
    replica.connect(now);
    let mut take = |channel, incarnation, seq| {
        let sender = Sender { incarnation, at: now, fingerprint: 0, in_step: true, unchecked: false };
        let bytes =
            Message { sender, kind: Kind::States { seq }, has: Has::default(), records: &[] }.encode();
        replica.message(channel, "g1", &bytes, &mut host, now);
        let stats = replica.stats(now);
        (stats.gaps, stats.replayed, stats.repeated)
    };
    assert_eq!(take(Channel::Replayed, 5, 1), (0, 0, 1), "no process was heard");
    assert_eq!(take(Channel::States, 5, 1), (0, 0, 1));
    assert_eq!(take(Channel::States, 5, 3), (1, 0, 1));
    assert_eq!(take(Channel::Replayed, 9, 2), (1, 0, 2), "another process");
    assert_eq!(take(Channel::Replayed, 5, 2), (1, 1, 2));
    assert_eq!(take(Channel::States, 5, 4), (1, 1, 2));
}

/// The batches of a process that has ended are taken from any peer that has them, once.
#[test]
fn batches_of_a_process_that_has_ended_are_taken_of_a_peer_that_has_them() {
    let start = Time::from_secs(1_000);
    let (mut host, mut replica) = (Host::new(0, start), replica(0, 1));
    replica.connect(start);
    let message = |incarnation, kind, has: &[(u64, Batches)]| {
        let sender = Sender { incarnation, at: start, fingerprint: 0, in_step: true, unchecked: false };
        let has = Has::encode(has.iter().map(|(at, batches)| (*at, batches)));
        Message { sender, kind, has: Has::of(&has), records: &[] }.encode()
    };
    let states = |seq| Kind::States { seq };
    let mut requests = |replica: &mut Replica, millis| {
        let now = start + Duration::from_millis(millis);
        let outputs = std::iter::from_fn(|| replica.poll(&mut host, now));
        outputs.filter(|output| matches!(output, Output::Request { .. })).collect::<Vec<_>>()
    };
    let mut host = Host::new(0, start);
    let mut take = |replica: &mut Replica, millis, channel, from, bytes: &[u8]| {
        replica.message(channel, from, bytes, &mut host, start + Duration::from_millis(millis))
    };
    // The first process of g1 sends three batches, of which the last one arrives here and at g2, and the first one only at g2.
    take(&mut replica, 0, Channel::States, "g1", &message(5, states(3), &[]));
    take(&mut replica, 0, Channel::States, "g1", &message(6, states(1), &[]));
    let mut had = Batches::range(1, 2);
    had.insert(3, 4);
    let has = [(7, Batches::below(1)), (6, Batches::below(2)), (5, had)];
    take(&mut replica, 0, Channel::States, "g2", &message(7, states(1), &has));
    let wanted = requests(&mut replica, 1_300);
    assert!(matches!(&wanted[..], [Output::Request { to, .. }] if to == "g2"), "{wanted:?}");
    assert!(!replica.is_in_step());
    let chunk = Kind::Chunk { epoch: 1, cursor: 0, next: None };
    take(&mut replica, 0, Channel::Chunk, "g2", &message(7, chunk, &has));
    assert!(replica.is_in_step());
    // No gate has the second one.
    take(&mut replica, 0, Channel::States, "g2", &message(7, states(2), &has));
    assert_eq!((requests(&mut replica, 2_500), replica.is_in_step()), (vec![], true));
    let g3 = message(8, states(1), &[(5, Batches::below(4))]);
    take(&mut replica, 2_600, Channel::States, "g3", &g3);
    // It may go on, where only g3 hears it: there is time between two snapshots for it.
    assert_eq!((requests(&mut replica, 2_600), replica.is_in_step()), (vec![], false));
    take(&mut replica, 5_000, Channel::States, "g3", &g3);
    let wanted = requests(&mut replica, 5_000);
    assert!(matches!(&wanted[..], [Output::Request { to, .. }] if to == "g3"), "{wanted:?}");
}

pub(super) const CALM: Bus = Bus {
    lost: 0,
    repeated: 0,
    delay: Duration::from_millis(1),
    stream: Duration::from_secs(60),
    skew: Duration::from_secs(77),
};

fn udp(gate: usize, flow: u8, reply: bool) -> Step {
    Step::Packet { gate, flow, reply, tcp: None }
}

#[test]
fn a_replied_state_is_sent_and_an_unreplied_one_is_not() {
    let mut world = World::new(CALM, 1);
    world.step(Step::Wait(3_000));
    world.step(udp(0, 1, false));
    world.step(udp(0, 2, false));
    world.step(udp(0, 2, true));
    world.step(Step::Wait(100));
    assert_eq!(world.table(1).keys().copied().collect::<Vec<_>>(), [1002]);
    let stats = world.replicas[1].stats(world.time(1));
    assert_eq!((stats.created, stats.merged, stats.gaps, stats.in_step), (1, 0, 0, 1), "{stats:?}");
    // The state that came is not sent back.
    assert_eq!(stats.sent, 0, "{stats:?}");
    assert_eq!(world.replicas[0].stats(world.time(0)).sent, 1);
    // The other gate takes the flow over: its counters continue.
    world.step(udp(1, 2, true));
    assert_eq!(world.table(1)[&1002], (true, [1, 2]));
}

/// The window of the simulation is 20 ms.
#[test]
fn the_first_change_of_a_state_does_not_wait_for_the_window() {
    let mut world = World::new(CALM, 7);
    world.step(Step::Wait(3_000));
    world.step(udp(0, 0, false));
    world.step(udp(0, 0, true));
    world.step(Step::Wait(10));
    assert_eq!(world.table(1)[&1000].1, [1, 1]);
    // A state that is sent before its reply, which is a later change.
    let (incarnation, window) = (world.wall_clock(0), Duration::from_millis(20));
    let settings = Settings { gate: name(0), incarnation, replicate: Replicate::All, window };
    world.replicas[0] = Replica::new(settings);
    world.hosts[0].journal = world.hosts[0].gate.states().journal_of(Changes::All);
    let now = world.time(0);
    world.replicas[0].connect(now);
    world.step(Step::Wait(3_000));
    world.step(udp(0, 1, false));
    world.step(Step::Wait(10));
    assert_eq!(world.table(1)[&1001].1, [1, 0]);
    world.step(udp(0, 1, true));
    world.step(Step::Wait(10));
    assert_eq!(world.table(1)[&1001].1, [1, 0]);
    world.step(Step::Wait(20));
    assert_eq!(world.table(1)[&1001].1, [1, 1]);
}

#[test]
fn directions_that_pass_different_gates_add_up() {
    let mut world = World::new(CALM, 2);
    world.step(Step::Wait(3_000));
    for _ in 0..3 {
        world.step(udp(0, 0, false));
    }
    world.step(udp(0, 0, true));
    world.step(Step::Wait(100));
    for _ in 0..5 {
        world.step(udp(1, 0, true));
    }
    assert_eq!(world.table(1)[&1000], (true, [3, 6]));
    // A third of the lifetime later, the gate that sees packets says so.
    assert_eq!(world.table(0)[&1000], (true, [3, 1]));
    for _ in 0..17 {
        world.step(Step::Wait(60_000));
    }
    assert_eq!(world.table(0)[&1000], (true, [3, 6]));
}

#[test]
fn a_gate_that_joins_takes_a_snapshot() {
    // One is enough of a peer with the same rules. One with others may have refused states of the third.
    for (joins, snapshots) in [(1, 1), (2, 2)] {
        let mut world = World::new(CALM, 3);
        world.step(Step::Wait(3_000));
        for flow in 0..3 {
            world.step(udp(0, flow, false));
            world.step(udp(0, flow, true));
        }
        world.step(Step::Wait(200));
        world.step(Step::Restart(joins));
        assert!(!world.replicas[joins].is_in_step());
        world.step(Step::Wait(3_500));
        assert!(world.replicas[joins].is_in_step());
        assert_eq!(world.table(joins).len(), 3);
        let stats = world.replicas[joins].stats(world.time(joins));
        let counts = (stats.snapshots, stats.snapshot_received, stats.created);
        assert_eq!(counts, (snapshots, 3 * snapshots, 3), "{stats:?}");
    }
}

#[test]
fn a_gap_is_filled_by_the_stream_or_by_a_snapshot() {
    for (stream, by_stream) in [(60, true), (0, false)] {
        let mut world = World::new(Bus { stream: Duration::from_secs(stream), ..CALM }, 4);
        world.step(Step::Wait(4_000));
        world.bus.lost = 100;
        world.step(udp(0, 0, false));
        world.step(udp(0, 0, true));
        world.step(Step::Wait(30));
        world.bus.lost = 0;
        world.step(Step::Wait(5_000));
        let stats = world.replicas[1].stats(world.time(1));
        assert_eq!([stats.replayed > 0, stats.resynced > 0], [by_stream, !by_stream], "{stats:?}");
        assert!(stats.gaps >= 1 && world.replicas[1].is_in_step());
        assert_eq!(world.table(1).len(), 1);
    }
}

#[test]
fn a_state_that_the_rules_of_the_receiver_refuse_is_counted() {
    let mut world = World::new(CALM, 5);
    world.hosts[1].gate.reload(
        Ruleset::parse("t", "add deny udp from any to any\nadd allow ip from any to any keep-state")
            .ruleset
            .unwrap(),
        towpath_gate::StatePolicy::Keep,
        world.now,
    );
    world.hosts[1].rules = world.hosts[1].gate.rules_by_content();
    world.step(Step::Wait(3_000));
    world.step(udp(0, 0, false));
    world.step(udp(0, 0, true));
    world.step(Step::Wait(100));
    let stats = world.replicas[1].stats(world.time(1));
    assert_eq!((stats.refused_rules, stats.created), (1, 0), "{stats:?}");
    assert!(world.table(1).is_empty());
    assert_eq!(world.table(2).len(), 1);
}

#[test]
fn a_connection_that_was_closed_through_one_gate_ends_at_the_other() {
    let mut world = World::new(CALM, 6);
    let tcp = |gate, reply, flags| Step::Packet { gate, flow: 4, reply, tcp: Some(flags) };
    world.step(Step::Wait(3_000));
    [(false, "syn"), (true, "syn ack"), (false, "ack"), (true, "ack")]
        .into_iter()
        .for_each(|(reply, flags)| world.step(tcp(0, reply, flags)));
    world.step(Step::Wait(100));
    assert_eq!(world.table(1).len(), 1);
    world.step(tcp(0, false, "fin ack"));
    world.step(tcp(0, true, "fin ack"));
    world.step(Step::Wait(100));
    assert!(world.table(1).is_empty(), "{:?}", world.table(1));
}

#[test]
fn a_state_that_is_removed_at_one_gate_is_removed_at_all() {
    let mut world = World::new(CALM, 9);
    world.step(Step::Wait(3_000));
    for flow in [0, 1] {
        world.step(udp(0, flow, false));
        world.step(udp(0, flow, true));
    }
    world.step(Step::Wait(100));
    assert_eq!(world.table(1).len(), 2);
    world.bus.delay = Duration::ZERO;
    // At a gate that did not make it.
    world.step(Step::Remove { gate: 1, flow: 0 });
    // What was sent before is still on its way.
    let mut before = replica(2, 77);
    before.connect(world.time(2));
    let (now, states) = (world.time(2), world.hosts[2].states());
    each(&states, |record| before.scanned(record, now));
    world.step(Step::Wait(100));
    for gate in 0..GATES {
        assert_eq!(world.table(gate).keys().copied().collect::<Vec<_>>(), [1001], "at {gate}");
    }
    let stats = |world: &World, gate: usize| world.replicas[gate].stats(world.time(gate));
    assert_eq!([0, 1, 2].map(|gate| stats(&world, gate).removed), [1, 0, 1]);
    // No gate sends the removal once more.
    assert_eq!(stats(&world, 1).sent, 1);
    assert_eq!(stats(&world, 2).sent, 0);
    while let Some(output) = before.poll(&mut world.hosts[2], now + Duration::from_millis(30)) {
        let Output::Batch { bytes, .. } = output else { continue };
        let now = world.time(0);
        world.replicas[0].message(Channel::States, "g3", &bytes, &mut world.hosts[0], now);
    }
    let after = stats(&world, 0);
    assert_eq!((after.refused_removed, after.merged), (1, 1), "{after:?}");
    assert_eq!(world.table(0).len(), 1);
    // The flow may begin again at once, at any gate.
    world.step(Step::Wait(1_200));
    world.step(udp(2, 0, false));
    world.step(udp(2, 0, true));
    world.step(Step::Wait(100));
    assert_eq!([0, 1].map(|gate| world.table(gate)[&1000]), [(true, [1, 1]); 2]);
}

/// Gate 0 begins again after its wall clock was set by these seconds. Then a batch of it is lost.
fn with_a_clock_that_was_set(seconds: i32) {
    let mut world = World::new(CALM, 12);
    world.step(Step::Wait(3_000));
    world.step(udp(0, 0, false));
    world.step(udp(0, 0, true));
    world.step(Step::Wait(100));
    world.step(Step::Jump { gate: 0, seconds });
    world.step(Step::Wait(1_000));
    assert!((0..GATES).all(|gate| world.replicas[gate].is_in_step()), "a jump alone changes nothing");
    world.step(Step::Restart(0));
    world.step(udp(0, 1, false));
    world.step(udp(0, 1, true));
    // The peers take its messages after three seconds, and answer when it asks again.
    world.step(Step::Wait(12_000));
    for gate in 0..GATES {
        assert!(world.replicas[gate].is_in_step(), "{seconds} s at {gate}: {:?}", world.replicas[gate]);
        assert_eq!(world.table(gate).len(), 2, "{seconds} s at {gate}");
    }
    let before = world.replicas[1].stats(world.time(1));
    world.bus.lost = 100;
    world.step(udp(0, 2, false));
    world.step(udp(0, 2, true));
    world.step(Step::Wait(30));
    world.bus.lost = 0;
    world.step(Step::Wait(1_500));
    // The stream has batches of the process before, too: they are not those of another one.
    let stats = world.replicas[1].stats(world.time(1));
    assert_eq!(
        (stats.replayed, stats.snapshots),
        (before.replayed + 1, before.snapshots),
        "{seconds} s: {stats:?}"
    );
    assert!(world.replicas[1].is_in_step() && world.table(1).len() == 3, "{seconds} s");
}

#[test]
fn a_gate_begins_again_after_its_wall_clock_was_set() {
    [-3_600, -2, 0, 3_600].into_iter().for_each(with_a_clock_that_was_set);
}

/// Changes the versions of a message and of its records.
fn of_version(bytes: &[u8], message: u8, oldest: u8, records: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    (bytes[4], bytes[5]) = (message, oldest);
    let mut at = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
    while at < bytes.len() {
        bytes[at + 2] = records;
        at += 2 + usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    }
    bytes
}

#[test]
fn a_message_of_the_next_version_is_merged_or_counted() {
    for (version, oldest, records, expected) in
        [(1, 1, 1, [1, 0, 0]), (2, 1, 1, [1, 0, 0]), (2, 2, 1, [0, 1, 0]), (2, 1, 2, [0, 0, 1])]
    {
        let mut world = World::new(CALM, 10);
        world.step(Step::Wait(3_000));
        world.step(udp(0, 0, false));
        world.step(udp(0, 0, true));
        let now = world.time(0) + Duration::from_millis(30);
        let Some(Output::Batch { bytes, states: 1 }) = world.replicas[0].poll(&mut world.hosts[0], now)
        else {
            panic!("no batch")
        };
        let (bytes, now) = (of_version(&bytes, version, oldest, records), world.time(1));
        world.replicas[1].message(Channel::States, "g0", &bytes, &mut world.hosts[1], now);
        let stats = world.replicas[1].stats(now);
        let counted = [stats.created, stats.messages_version, stats.refused_version];
        assert_eq!(counted, expected, "{version}, {oldest}, {records}: {stats:?}");
    }
}

/// Gates with these rules, of which the first two make states of these flows, at the same time or one after the other. Returns the number
/// of states at each gate, and whether records were refused because of a limit.
fn limited(
    rules: &str,
    settings: state::Settings,
    flows: [std::ops::Range<u8>; 2],
    wait: u16,
    split: bool,
) -> ([usize; 2], [bool; 2]) {
    let mut world = World::new(CALM, 11);
    let now = world.now;
    world.hosts = (0..GATES).map(|at| Host::with(rules, settings.clone(), at, now)).collect();
    world.step(Step::Wait(3_000));
    if split {
        world.step(Step::Split(0));
    }
    for (gate, flows) in flows.into_iter().enumerate() {
        for flow in flows {
            world.step(udp(gate, flow, false));
            world.step(udp(gate, flow, true));
        }
        world.step(Step::Wait(wait));
    }
    if split {
        assert_eq!([0, 1].map(|gate| world.table(gate).len()), [4; 2], "each counts its own");
        world.step(Step::Split(0));
        world.step(Step::Wait(8_000));
    }
    let refused = [0, 1].map(|gate| world.replicas[gate].stats(world.time(gate)).refused_limit > 0);
    ([0, 1].map(|gate| world.table(gate).len()), refused)
}

#[test]
fn limits_count_the_states_of_the_group() {
    let limit = "add allow udp from 10.0.0.1 to any limit src-addr 4 lifetime 3000";
    let default = state::Settings::default;
    let source = || state::Settings { dyn_source_max: 4, ..default() };
    let keep = "add allow udp from 10.0.0.1 to any keep-state lifetime 3000";
    // In touch: the other gate has made three, so that one more is admitted.
    assert_eq!(limited(limit, default(), [0..3, 10..20], 100, false), ([4; 2], [false; 2]));
    assert_eq!(limited(keep, source(), [0..3, 10..20], 100, false), ([4; 2], [false; 2]));
    // The error: states that others have made and that are still on their way.
    assert_eq!(limited(limit, default(), [0..3, 10..20], 0, false).0, [3, 4]);
    // Not in touch: each gate counts the states that it has. Later, all states have their place in a `limit`, and `dyn_source_max`
    // refuses those beyond it.
    assert_eq!(limited(limit, default(), [0..10, 10..20], 100, true), ([8; 2], [false; 2]));
    assert_eq!(limited(keep, source(), [0..10, 10..20], 100, true), ([4; 2], [true; 2]));
}

#[test]
fn changes_while_the_bus_is_away_are_counted_and_follow() {
    let mut world = World::new(CALM, 7);
    world.step(Step::Wait(3_000));
    world.step(Step::Split(0));
    for flow in 0..3 {
        world.step(udp(0, flow, false));
        world.step(udp(0, flow, true));
    }
    world.step(Step::Wait(10_000));
    let stats = world.replicas[0].stats(world.time(0));
    assert_eq!((stats.not_sent_away, stats.sent, stats.in_step, stats.connected), (3, 0, 0, 0), "{stats:?}");
    assert!(world.table(1).is_empty());
    world.step(Step::Split(0));
    world.step(Step::Wait(8_000));
    assert_eq!(world.table(1).len(), 3);
    assert!((0..GATES).all(|gate| world.replicas[gate].is_in_step()));
}

#[test]
fn two_gates_of_one_name_are_noticed() {
    let mut world = World::new(CALM, 8);
    let mut other = replica(1, 99);
    other.connect(world.time(1));
    let now = world.time(1);
    let Some(Output::Batch { bytes, .. }) = other.poll(&mut world.hosts[1], now) else { panic!() };
    world.replicas[1].message(Channel::States, "g1", &bytes, &mut world.hosts[1], now);
    assert_eq!(world.replicas[1].stats(now).messages_own_name, 1);
    // A kind that does not belong to the subject.
    world.replicas[1].message(Channel::Chunk, "g2", &bytes, &mut world.hosts[1], now);
    world.replicas[1].message(Channel::States, "g2", b"TWFLx", &mut world.hosts[1], now);
    assert_eq!(world.replicas[1].stats(now).messages_malformed, 2);
}

/// Gates 0 and 1 come back at the same moment, gate 0 without states. Only gate 2 has the last batch of the process before.
#[test]
fn a_gate_that_returns_with_a_restarted_one_asks_all_peers() {
    let bus = Bus {
        lost: 0,
        repeated: 0,
        delay: Duration::ZERO,
        stream: Duration::from_secs(60),
        skew: Duration::ZERO,
    };
    let mut world = World::new(bus, 0);
    let packet = |flow: u8, reply: bool| Step::Packet { gate: 0, flow, reply, tcp: None };
    let steps = [
        packet(0, false),
        packet(2, false),
        Step::Split(0),
        Step::Split(1),
        packet(2, true),
        Step::Split(0),
        Step::Wait(1001),
        Step::Restart(0),
        Step::Split(0),
    ];
    world.run(steps);
}

/// Only gate 2 has the last batch of gate 0's first process, and it is away while the others take snapshots of each other.
#[test]
fn a_gate_that_begins_again_when_another_returns_has_all_states() {
    let bus = Bus {
        lost: 3,
        repeated: 7,
        delay: Duration::ZERO,
        stream: Duration::from_secs(60),
        skew: Duration::ZERO,
    };
    let mut world = World::new(bus, 15_511_418_397_051_524_907);
    let steps = [
        udp(0, 0, false),
        udp(0, 0, false),
        Step::Split(1),
        udp(0, 0, false),
        udp(0, 0, true),
        udp(0, 0, false),
        Step::Wait(16),
        Step::Split(2),
        Step::Split(1),
        Step::Restart(0),
        Step::Wait(131),
        Step::Wait(1061),
    ];
    world.run(steps);
}

/// The acknowledgement of a SYN may come after other segments. It begins the long lifetime, which all gates learn at once.
#[test]
fn a_late_acknowledgement_of_a_syn_is_sent() {
    let mut world = World::new(CALM, 1);
    world.step(Step::Wait(3_000));
    let tcp = |flags, reply| Step::Packet { gate: 0, flow: 1, reply, tcp: Some(flags) };
    for step in [tcp("syn", false), tcp("syn", true), tcp("ack", false)] {
        world.step(step);
    }
    world.step(Step::Wait(500));
    // A state with less than 30 s left is not listed.
    assert!(world.table(1).is_empty());
    world.step(tcp("syn ack", true));
    world.step(Step::Wait(500));
    assert_eq!(world.table(1).keys().copied().collect::<Vec<_>>(), [1001]);
}

/// The two gates have counted as many packets of a connection, but not the same: only one of them has seen the acknowledgement.
#[test]
fn an_expiry_that_is_much_later_is_sent() {
    let bus = Bus { lost: 10, repeated: 3, delay: Duration::from_millis(51), stream: Duration::ZERO, ..CALM };
    let mut world = World::new(Bus { skew: Duration::ZERO, ..bus }, 17_571_816_909_910_784_064);
    let tcp = |gate, reply, flags| Step::Packet { gate, flow: 5, reply, tcp: Some(flags) };
    let begins = [Step::Split(2), Step::Wait(1066), tcp(1, true, "syn"), Step::Split(1), Step::Split(2)];
    let replied = [Step::Wait(1051), Step::Split(1), tcp(1, false, "syn ack")];
    let waits = [831, 746, 586].map(Step::Wait);
    let more = [tcp(1, true, "ack"), Step::Wait(1341), tcp(2, true, "syn"), Step::Wait(426)];
    world.run(begins.into_iter().chain(replied).chain(waits).chain(more));
}

/// The request for a snapshot arrives after its peer has been killed.
#[test]
fn a_chunk_of_the_next_process_is_not_of_the_snapshot() {
    let bus = Bus { lost: 10, repeated: 5, delay: Duration::from_millis(53), stream: Duration::ZERO, ..CALM };
    let mut world = World::new(Bus { skew: Duration::ZERO, ..bus }, 5_335_655_251_941_276_440);
    let tcp = |gate, reply, flags| Step::Packet { gate, flow: 3, reply, tcp: Some(flags) };
    let begins =
        [tcp(1, false, "ack"), Step::Wait(41), Step::Wait(576), tcp(1, true, "syn"), Step::Wait(561)];
    let more = [udp(2, 0, false), tcp(2, true, "syn"), Step::Wait(601), udp(2, 0, true)];
    let waits = [811, 776, 526, 111].map(Step::Wait);
    world.run(begins.into_iter().chain(more).chain(waits).chain([Step::Restart(2)]));
}

/// Gate 0 has not sent its acknowledgement yet when it merges its own state back, from a snapshot of gate 1.
#[test]
fn a_change_that_comes_back_by_a_snapshot_is_sent() {
    let bus = Bus { lost: 27, repeated: 15, stream: Duration::ZERO, skew: Duration::ZERO, ..CALM };
    let mut world = World::new(bus, 16_986_980_750_014_967_869);
    let tcp = |gate, flow, reply, flags| Step::Packet { gate, flow, reply, tcp: Some(flags) };
    let begins = [tcp(1, 4, true, "syn"), Step::Wait(426), udp(0, 0, true), Step::Wait(571)];
    let apart = [tcp(0, 4, true, "syn"), Step::Split(1), Step::Split(0), tcp(1, 4, false, "ack")];
    let back = [Step::Wait(1421), Step::Wait(356), Step::Split(0), udp(0, 0, true), Step::Wait(716)];
    let other = [Step::Split(1), tcp(0, 3, false, "syn"), Step::Wait(1071), Step::Wait(306)];
    let ends = [tcp(0, 3, true, "syn"), Step::Wait(886), Step::Wait(1446), tcp(0, 3, false, "rst")];
    let replied = [tcp(0, 4, false, "syn ack"), udp(0, 0, false), tcp(1, 4, true, "ack"), Step::Wait(786)];
    let last = [
        Step::Split(1),
        tcp(0, 4, true, "ack"),
        tcp(1, 3, false, "syn ack"),
        Step::Split(1),
        Step::Wait(1001),
    ];
    let steps =
        begins.into_iter().chain(apart).chain(back).chain(other).chain(ends).chain(replied).chain(last);
    world.run(steps);
}
