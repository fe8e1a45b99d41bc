//! A frame with a virtio_net_hdr that says anything: finished, made right again, cut.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_port::{Frame, LinkType, Offload, checksum, segment};

fuzz_target!(|data: &[u8]| {
    let Some((header, rest)) = data.split_first_chunk::<10>() else { return };
    let Some((choice, bytes)) = rest.split_first() else { return };
    let link = if choice & 1 == 0 { LinkType::ETHERNET } else { LinkType::RAW };
    let mut frame = Frame::new(bytes, link);
    checksum::detect(frame);
    segment::guess(frame, 1500);
    let Some(offload) = Offload::parse(header) else { return };
    frame.meta.offload = offload;

    let (mut pieces, mut places) = (Vec::new(), Vec::new());
    if segment::cut(frame, &mut pieces, &mut places) {
        assert!(places.iter().all(|place| place.len() <= bytes.len() && place.end <= pieces.len()));
    } else {
        assert!(pieces.is_empty() && places.is_empty());
    }
    let mut copy = bytes.to_vec();
    checksum::complete(&mut copy, offload);
    checksum::renew(link, &mut copy, offload);
    assert_eq!(copy.len(), bytes.len());
});
