//! An engine that answers a client with any welcome, offers and descriptors. The client library neither panics nor waits for
//! ever, maps no memory that can shrink, and reads nothing outside of the memory.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| towpath_ring::mock::hostile_handshake(input));
