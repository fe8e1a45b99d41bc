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
