//! An engine that writes anything anywhere it may: welcome, notices, descriptors, headers, notes, positions. The client library
//! does not panic and reads nothing outside of the memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| towpath_ring::mock::hostile_engine(input));
