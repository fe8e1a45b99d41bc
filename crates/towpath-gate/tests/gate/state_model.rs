//! Random operations: the table behaves as the model, step by step.

use std::collections::BTreeMap;

use proptest::prelude::*;
use towpath_gate::state::testing::ops::{OP_BYTES, Op, World, WorldCounts};
use towpath_gate::state::{Counters, Ends, Flow, Install, Limit, LimitMask, Lookup, Name, RuleId, Segment};

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn table_and_model_agree(ops in prop::collection::vec(any::<[u8; OP_BYTES]>(), 0..300)) {
        let mut world = World::default();
        for bytes in &ops {
            world.step(&Op::new(bytes));
        }
    }
}

/// The random operations cause every event, so that the test above covers them.
#[test]
fn random_operations_cause_every_event() {
    let mut world = World::default();
    let mut random = 1_u64;
    let mut happened = BTreeMap::new();
    for n in 0..240_000 {
        let bytes = std::array::from_fn(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 56) as u8
        });
        // The table is large for a while.
        if n % 60_000 == 59_000 {
            world.grow(4_500, n > 60_000);
        }
        world.step(&Op::new(&bytes));
    }
    world.counters().for_each(|counters| add(&mut happened, &counters));
    let WorldCounts { fragments, restored, left } = world.seen();
    happened.extend([("fragments", fragments), ("restored", restored), ("not restored", left)]);
    assert!(happened.values().all(|times| *times >= 5), "{happened:?}");
}

/// Adds the counters of one table.
fn add(happened: &mut BTreeMap<&'static str, u64>, counters: &Counters) {
    let rows = [
        ("created", counters.created),
        ("expired", counters.expired),
        ("removed", counters.removed),
        ("evicted", counters.evicted),
        ("full", counters.full),
        ("over limit", counters.over_limit),
        ("over rate", counters.over_rate),
        ("parents full", counters.parents_full),
        ("over source", counters.over_source),
        ("invalid", counters.invalid),
        ("unfit", counters.unfit),
        ("first SYN", counters.first_syn),
        ("nearly full", counters.nearly_full),
        ("related", counters.related),
    ];
    for (what, times) in rows {
        *happened.entry(what).or_default() += times;
    }
}

/// Two sequences found by long random runs. The test above would need millions of operations to find them.
#[test]
fn changed_settings_leave_nothing_behind() {
    let mut ops: Vec<Op> = Vec::new();
    let udp = Flow {
        ends: Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 0].into()),
        proto: 17,
        src_port: 0,
        dst_port: 1,
        zone: 0,
    };
    let packet = Segment::default();
    let limit = |max| Install { limit: Some(Limit::new(LimitMask::DST_ADDR, max)), ..Install::default() };
    // A parent expires in the install that uses it, and there is no room for another.
    ops.extend([
        Op::Install(udp, Name::DEFAULT, packet, RuleId(0), limit(1)),
        Op::RemoveOne(udp, Name::DEFAULT),
        Op::Set("dyn_parent_max", 0),
        Op::Set("dyn_short_lifetime", 0),
        Op::Install(udp, Name::DEFAULT, packet, RuleId(0), limit(0)),
    ]);
    // An association is aborted, and seen again after `dyn_sctp` was off for one packet.
    let sctp = Flow { proto: 132, ..udp };
    let chunk = |kind| Segment { sctp_chunk: Some(kind), ..packet };
    ops.extend([
        Op::Set("dyn_sctp", 1),
        Op::Set("dyn_short_lifetime", 60),
        Op::Install(sctp, Name::DEFAULT, chunk(6), RuleId(1), Install::default()),
        Op::Set("dyn_sctp", 0),
        Op::Lookup(sctp, Lookup::Any, chunk(0)),
        Op::Set("dyn_sctp", 1),
        Op::Lookup(sctp, Lookup::Any, chunk(0)),
    ]);
    let mut world = World::default();
    for op in &ops {
        world.step(op);
    }
    assert_eq!(world.counters().map(|counters| counters.over_limit).sum::<u64>(), 1);
}
