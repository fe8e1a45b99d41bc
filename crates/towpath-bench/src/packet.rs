//! UDP packets of any length and of many flows.

use std::net::Ipv4Addr;

/// Length of an Ethernet header.
pub(crate) const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;

pub(crate) const DESTINATION: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 1);
pub(crate) const DESTINATION_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const SOURCE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Creates an Ethernet frame with an IPv4 UDP packet of `len` bytes (including the IP header), without a UDP checksum.
///
/// # Panics
///
/// Panics if `len` is less than 28 or greater than 65,535.
pub(crate) fn frame(len: usize) -> Box<[u8]> {
    let total = u16::try_from(len).expect("an IPv4 packet of at most 65,535 bytes");
    let udp =
        total.checked_sub(IPV4 as u16).filter(|&udp| usize::from(udp) >= UDP).expect("room for the headers");
    let mut frame = vec![b'x'; ETHERNET + len];
    frame[..6].copy_from_slice(&DESTINATION_MAC);
    frame[6..12].copy_from_slice(&SOURCE_MAC);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    let (ip, rest) = frame[ETHERNET..].split_at_mut(IPV4);
    ip.copy_from_slice(&[0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0]);
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip[16..].copy_from_slice(&DESTINATION.octets());
    rest[2..4].copy_from_slice(&53_u16.to_be_bytes());
    rest[4..6].copy_from_slice(&udp.to_be_bytes());
    rest[6..8].copy_from_slice(&[0, 0]);
    let mut frame = frame.into_boxed_slice();
    set_flow(&mut frame, 0);
    frame
}

/// Sets the flow of `frame`: one of 65,536 source addresses, by which queues are balanced, and the source port.
pub(crate) fn set_flow(frame: &mut [u8], flow: u32) {
    let (ip, rest) = frame[ETHERNET..].split_at_mut(IPV4);
    ip[10..12].copy_from_slice(&[0, 0]);
    ip[14..16].copy_from_slice(&(flow as u16).to_be_bytes());
    let sum = ip.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = (folded & 0xffff) + (folded >> 16);
    // RFC 1071, section 1: one's complement of the one's complement sum.
    ip[10..12].copy_from_slice(&(!(folded as u16)).to_be_bytes());
    rest[..2].copy_from_slice(&(1024 + (flow >> 16) as u16).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::{ETHERNET, frame, set_flow};

    #[test]
    fn header_checksum_is_valid() {
        for flow in [0, 1, 1999, 65_535, 499_999] {
            let mut frame = frame(64);
            set_flow(&mut frame, flow);
            let ip = &frame[ETHERNET..ETHERNET + 20];
            let sum: u32 = ip.as_chunks::<2>().0.iter().map(|w| u32::from(u16::from_be_bytes(*w))).sum();
            // RFC 1071: the sum over a header with its checksum is all ones.
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "flow {flow}");
            assert_eq!(frame.len(), ETHERNET + 64);
        }
    }
}
