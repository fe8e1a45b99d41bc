//! Random frames with a random virtio_net_hdr: checksum completion, recomputation, segmentation.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_wire::{LinkType, Offload, checksum, gso};

fuzz_target!(|data: &[u8]| {
    let Some((header, rest)) = data.split_first_chunk::<10>() else { return };
    let Some((choice, bytes)) = rest.split_first() else { return };
    let link = if choice & 1 == 0 { LinkType::ETHERNET } else { LinkType::RAW };
    checksum::detect(link, bytes);
    gso::infer(link, bytes, 1500);
    let Some(offload) = Offload::parse(header) else { return };

    let (mut out, mut ranges) = (Vec::new(), Vec::new());
    if gso::segment(link, bytes, offload, &mut out, &mut ranges) {
        assert!(ranges.iter().all(|range| range.len() <= bytes.len() && range.end <= out.len()));
    } else {
        assert!(out.is_empty() && ranges.is_empty());
    }
    let mut copy = bytes.to_vec();
    checksum::complete(&mut copy, offload);
    checksum::renew(link, &mut copy, offload);
    assert_eq!(copy.len(), bytes.len());
});
