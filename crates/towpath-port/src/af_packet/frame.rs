//! Parser of the frames in a block (`struct tpacket_block_desc`, `struct tpacket3_hdr` of linux/if_packet.h).

use std::ops::Range;

use super::ring::Lease;
use towpath_wire::{Offload, VIRTIO_NET_HDR_LEN};

use crate::{Burst, Frame, LinkType, Meta, Stats};

/// Bytes of `struct tpacket3_hdr`.
const HEADER: usize = 48;

/// Properties common to all frames of a socket.
pub(super) struct Context {
    pub(super) link: LinkType,
    pub(super) interface: u32,
    pub(super) queue: u16,
}

/// The number of frames in a block, and the offset of the first header.
pub(super) fn block(lease: &Lease) -> (u32, usize) {
    // num_pkts, offset_to_first_pkt.
    let Some(header) = lease.bytes(12..20) else { return (0, 0) };
    (word(header, 0), word(header, 4) as usize)
}

/// Adds the frame with the header at `at` to the burst and returns the offset of the next header; `None` if the header is invalid.
#[inline]
pub(super) fn receive(
    lease: &mut Lease,
    at: usize,
    context: &Context,
    burst: &mut Burst,
    stats: &mut Stats,
) -> Option<usize> {
    let header: [u8; HEADER] = *lease.bytes(at..at + HEADER)?.first_chunk()?;
    let (snaplen, wire_len) = (word(&header, 12) as usize, word(&header, 16));
    let mac = at + usize::from(half(&header, 24));
    let next = at + word(&header, 0) as usize;
    let mut range = mac..mac + snaplen;
    if lease.bytes(range.clone()).is_none() || mac < at + HEADER + VIRTIO_NET_HDR_LEN {
        return None;
    }
    let status = word(&header, 20);
    // The segmentation type may be unsupported.
    let offload = Offload::parse(lease.bytes(mac - VIRTIO_NET_HDR_LEN..mac)?.first_chunk()?);
    let Some(mut offload) = offload.filter(|_| snaplen as u32 == wire_len) else {
        stats.rx_invalid += 1;
        return Some(next);
    };
    if status & libc::TP_STATUS_VLAN_VALID != 0 && context.link == LinkType::ETHERNET {
        let tpid = if status & libc::TP_STATUS_VLAN_TPID_VALID != 0 { half(&header, 36) } else { 0x8100 };
        range = put_back(lease, range, tpid, word(&header, 32) as u16)?;
        offload = offload.moved(4);
    }
    let time_ns = u64::from(word(&header, 4)) * 1_000_000_000 + u64::from(word(&header, 8));
    let meta = Meta { queue: context.queue, offload, ..Meta::default() };
    stats.count_received(range.len());
    let (link, interface) = (context.link, context.interface);
    burst.add_lent(range, Frame { bytes: &[], wire_len, time_ns, link, interface, meta });
    Some(next)
}

/// Reinserts a VLAN tag after the addresses, which move into the headroom (PACKET_RESERVE).
fn put_back(lease: &mut Lease, range: Range<usize>, tpid: u16, tci: u16) -> Option<Range<usize>> {
    let range = range.start - 4..range.end;
    let bytes = lease.bytes_mut(range.clone())?;
    bytes.get(..16)?;
    bytes.copy_within(4..16, 0);
    bytes[12..14].copy_from_slice(&tpid.to_be_bytes());
    bytes[14..16].copy_from_slice(&tci.to_be_bytes());
    Some(range)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}
