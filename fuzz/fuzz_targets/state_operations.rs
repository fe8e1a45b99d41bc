//! Arbitrary operations on the states, compared with the model of their tests.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_gate::state::testing::ops::{OP_BYTES, Op, World};

fuzz_target!(|input: &[u8]| {
    let (ops, _) = input.as_chunks::<OP_BYTES>();
    let mut world = World::default();
    ops.iter().for_each(|op| world.step(&Op::new(op)));
});
