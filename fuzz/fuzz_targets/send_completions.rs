//! Any calls, refusals and notifications, with MSG_ZEROCOPY and with io_uring, against the completion engine and its model;
//! and any control messages against their reader.
//!
//! Input: the connection's shape, then operations.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_send::ops::{OP_BYTES, Op, World};

fuzz_target!(|data: &[u8]| {
    let _ = towpath_send::parse(data);
    let Some((&shape, rest)) = data.split_first() else { return };
    for mut world in [World::new(shape), World::io_uring(shape)] {
        for op in rest.as_chunks::<OP_BYTES>().0.iter().take(4096) {
            world.step(Op::from_bytes(*op));
        }
        world.finish();
    }
});
