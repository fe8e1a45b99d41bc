//! The mux under any operations, beside the model that its tests have.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_mux::mux::world::World;

fuzz_target!(|input: &[u8]| {
    let [kind, ops @ ..] = input else { return };
    let (ops, _) = ops.as_chunks::<3>();
    World::run(*kind, ops.iter().copied());
});
