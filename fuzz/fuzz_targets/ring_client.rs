//! A client that writes anything anywhere it may: hello, notices, descriptors, TX headers, release entries, records. No panic,
//! no read outside of the memory, each frame decided once, the sum right.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| towpath_ring::mock::hostile_client(input));
