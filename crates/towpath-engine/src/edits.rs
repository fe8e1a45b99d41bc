//! Changes to a packet's bytes: by rules (DSCP, TCP MSS) and by inspectors (replaced payload).

use std::ops::Range;

use towpath_gate::Edits;
use towpath_port::Checksum;
use towpath_wire::{self as wire, Addresses, Packet, edit, gso};

use crate::meta::Meta;

/// The place of the headers in a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    network: usize,
    transport: usize,
    transport_len: usize,
}

impl Place {
    pub(crate) fn of(packet: &Packet<'_>) -> Self {
        let Packet { network, transport, transport_len, .. } = *packet;
        Self { network, transport, transport_len }
    }
}

/// Applies the edits of rules to the packet with the headers at `place`. An edit that does not apply to the packet (no MSS option) is
/// left out.
pub(crate) fn apply(edits: Edits, place: Place, frame: &mut [u8], meta: &mut Meta) {
    if edits == Edits::default() {
        return;
    }
    let Place { network, transport, transport_len } = place;
    meta.changed = true;
    if let Some(dscp) = edits.dscp {
        edit::set_dscp(frame, network, dscp);
    }
    if let Some(mss) = edits.mss {
        let partial = partial_checksum(frame, meta);
        edit::clamp_mss(frame, transport, transport_len, mss);
        // A partial checksum covers the pseudo header only, so the segment's bytes must not change it.
        if let Some((at, sum)) = partial {
            frame[at].copy_from_slice(&sum);
        }
    }
}

/// The position and value of a checksum that the port or the kernel completes.
fn partial_checksum(frame: &[u8], meta: &Meta) -> Option<(Range<usize>, [u8; 2])> {
    let Checksum::Partial { start, offset } = meta.port.offload.checksum else { return None };
    let at = usize::from(start) + usize::from(offset);
    Some((at..at + 2, frame.get(at..at + 2)?.try_into().ok()?))
}

/// The metadata of a packet with the metadata `meta` after an inspector replaced its `had` captured bytes by `bytes`.
pub(crate) fn replaced_meta(meta: &Meta, had: usize, bytes: &[u8]) -> Meta {
    let mut replaced = Meta {
        wire_len: replaced_len(meta, had, bytes),
        fragment_len: replaced_fragment_len(meta, bytes),
        changed: true,
        ..*meta
    };
    let offload = &mut replaced.port.offload;
    offload.checksum = Checksum::Unverified;
    // A replacement of another kind, or of one segment, is one packet of its length.
    offload.gso = offload.gso.filter(|_| gso::is_segmented(meta.link, bytes, *offload));
    replaced
}

/// The length on the wire of a packet whose `had` captured bytes an inspector replaced by `bytes`.
///
/// Normally the length of the replacement. If the capture has only the first bytes of the packet, the inspector replaced only
/// these, and the length of the missing bytes is added, unless the replacement is a complete packet. If the complete packet
/// waits in a kernel queue, the replacement replaces all of it.
fn replaced_len(meta: &Meta, had: usize, bytes: &[u8]) -> u32 {
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let missing = meta.wire_len.saturating_sub(had as u32);
    let whole = missing == 0 || meta.port.queued.is_some();
    if whole || wire::parse(meta.link, bytes, len).is_ok() { len } else { len.saturating_add(missing) }
}

/// The length of the fragments in which a replacement of `bytes` leaves, as [`Meta::fragment_len`]. A replacement of a reassembled datagram
/// leaves in fragments only if it is an IPv4 packet, and not in PPPoE or MPLS: the offsets of other frames are not those of an IPv4
/// header.
fn replaced_fragment_len(meta: &Meta, bytes: &[u8]) -> u16 {
    if meta.fragment_len == 0 {
        return 0;
    }
    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    match wire::parse(meta.link, bytes, len) {
        Ok(packet) if matches!(packet.addresses, Addresses::V4(..)) && !packet.is_encapsulated() => {
            meta.fragment_len
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use towpath_port::Queued;
    use towpath_wire::LinkType;

    use super::*;

    #[test]
    fn the_replacement_of_a_cut_packet_keeps_the_missing_bytes() {
        // The first 28 bytes of a packet of 100, and a complete packet of 28.
        let whole = [0x45, 0, 0, 28, 0, 0, 0, 0, 9, 17, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 7, 0, 9, 0, 8, 0, 0];
        let mut first = whole;
        (first[3], first[25]) = (100, 80);
        let queued = Some(Queued { cut: true, ..Queued::default() });
        for (bytes, queued, expected) in
            [(first, None, 100), (whole, None, 28), (first, queued, 28), (whole, queued, 28)]
        {
            let port = towpath_port::Meta { queued, ..towpath_port::Meta::default() };
            let meta = Meta { port, ..Meta::new(LinkType::RAW, 100) };
            assert_eq!(replaced_len(&meta, 28, &bytes), expected, "{queued:?}");
        }
    }
}
