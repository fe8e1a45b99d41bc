//! Any packets: reassembly accounts for every byte, and keeps its bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath::streams::{Chunk, Limits, Streams};
use towpath_wire::{self as wire, LinkType};

fuzz_target!(|input: &[u8]| {
    let mut streams = Streams::new(Limits { streams: 8, waiting: 64, waiting_total: 128 });
    let (mut delivered, mut missing) = (0u64, 0u64);
    let mut out = |_: &_, chunk: Chunk<'_>| match chunk {
        Chunk::Data(bytes) => delivered += bytes.len() as u64,
        Chunk::Gap(length) => missing += length,
        Chunk::End(_) => {}
    };
    let mut rest = input;
    while let [ends, flags, seq_high, seq_low, length, behind @ ..] = rest {
        let length = usize::from(length % 48).min(behind.len());
        let bytes = segment(*ends, *flags, [*seq_high, *seq_low], &behind[..length]);
        rest = &behind[length..];
        if let Ok(packet) = wire::parse(LinkType::RAW, &bytes, u32::from(*ends)) {
            streams.handle_packet(&packet, &mut out);
        }
    }
    streams.handle_end(&mut out);
    let counters = streams.counters();
    assert_eq!((counters.delivered, counters.missing), (delivered, missing));
    assert_eq!(counters.captured, counters.delivered + counters.repeated + counters.stray);
});

/// A segment between two of four ports, with a sequence number near the wrap or far from it.
fn segment(ends: u8, flags: u8, seq: [u8; 2], payload: &[u8]) -> Vec<u8> {
    let length = (40 + payload.len()) as u16;
    let mut bytes = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 1];
    bytes[2..4].copy_from_slice(&length.to_be_bytes());
    bytes.extend([0, ends & 3, 0, ends >> 2 & 3]);
    let high = if seq[0] & 0x80 == 0 { [0, 0] } else { [0xff, 0xff] };
    bytes.extend([high[0], high[1], seq[0] & 3, seq[1]]);
    bytes.extend([0, 0, 0, seq[1] ^ flags]);
    bytes.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
    bytes.extend(payload);
    bytes
}
