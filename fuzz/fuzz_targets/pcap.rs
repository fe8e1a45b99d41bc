//! A capture of any format, plain or gzipped, read to its end.
#![no_main]

use std::io::Cursor;

use libfuzzer_sys::fuzz_target;
use towpath_port::{Burst, Port, Received, pcap};

fuzz_target!(|data: &[u8]| {
    let Ok(mut reader) = pcap::Reader::new("fuzz", Cursor::new(data.to_vec())) else { return };
    let mut burst = Burst::new(64);
    // Gzip gives at most some 1,032 bytes for one, and a frame takes eight bytes of a file at least.
    let most = data.len() * 1_032 / 8 + 1;
    let mut frames = 0;
    loop {
        match reader.receive(&mut burst) {
            Ok(Received::Frames) => {}
            Ok(_) | Err(_) => break,
        }
        for frame in burst.iter() {
            assert!(frame.bytes.len() <= towpath_port::MAX_FRAME);
            frames += 1;
        }
        assert!(frames <= most, "more frames than the file can hold");
    }
    if let Some(warning) = reader.warning() {
        assert!(!warning.to_string().is_empty());
    }
});
