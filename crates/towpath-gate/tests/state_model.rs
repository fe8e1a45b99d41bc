//! Random operations: the table does what the model says, step by step.

use proptest::prelude::*;
use towpath_gate::state::ops::{OP_BYTES, Op, World};

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

/// The operations come to everything that can happen, so that the test above says something about it.
#[test]
fn everything_happens() {
    let mut world = World::default();
    let mut random = 1_u64;
    for _ in 0..20_000 {
        let bytes = std::array::from_fn(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 56) as u8
        });
        world.step(&Op::new(&bytes));
    }
    let counters = world.counters();
    let happened = [
        ("created", counters.created),
        ("expired", counters.expired),
        ("removed", counters.removed),
        ("evicted", counters.evicted),
        ("full", counters.full),
        ("over limit", counters.over_limit),
        ("parents full", counters.parents_full),
        ("over source", counters.over_source),
        ("invalid", counters.invalid),
        ("related", counters.related),
    ];
    for (what, times) in happened {
        assert!(times >= 20, "{what}: {times} times");
    }
}
