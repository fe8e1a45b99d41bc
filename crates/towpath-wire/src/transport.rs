//! The position of the transport layer in a frame, as checksums and segmentation need it.
//!
//! The pseudo header has the address of the first sender and the last receiver, which need not be those of the IP header:
//! source routes (RFC 791, 3.1), routing headers (RFC 8200, 8.1; RFC 6275, 6.4; RFC 8754, 2) and home addresses (RFC 6275, 11.3.1).

use crate::{Addresses, Fragment, LinkType, Packet, be16, bytes, ones_complement, proto, tunnel};

/// Maximum number of nested packets examined in one frame, the outermost included.
const DEPTH: usize = 4;

/// Offsets from the first byte of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transport {
    /// The IP header.
    pub(crate) network: usize,
    /// The transport header.
    pub(crate) start: usize,
    /// The end of the IP packet. Link padding may follow. At most the length of the frame.
    pub(crate) end: usize,
    /// Protocol at `start` (IANA number).
    pub(crate) proto: u8,
    /// IPv6, otherwise IPv4.
    pub(crate) v6: bool,
    /// A fragment: its transport checksum covers bytes of other packets.
    pub(crate) fragment: bool,
    /// The source and destination address of the pseudo header. `None` if the last receiver is unknown: a routing header of an
    /// unknown type, malformed IPv4 options.
    pub(crate) addresses: Option<(usize, usize)>,
}

impl Transport {
    /// The transport layer of an entire IP packet; `None` for other frames and packets that the capture cut short.
    pub(crate) fn of(packet: &Packet<'_>) -> Option<Self> {
        let Packet { frame, network, proto, transport: start, .. } = *packet;
        let end = network + packet.ip_len as usize;
        let v6 = match packet.addresses {
            Addresses::None => return None,
            Addresses::V4(..) => false,
            Addresses::V6(..) => true,
        };
        if end > frame.len() {
            return None;
        }
        let addresses = match v6 {
            false => addresses4(frame.get(..start)?, network),
            true => addresses6(frame.get(..end)?, network, start),
        };
        let fragment = packet.fragment != Fragment::Whole;
        Some(Self { network, start, end, proto, v6, fragment, addresses })
    }

    /// The transport layer of the outermost IP packet of a complete frame.
    pub(crate) fn parse(link: LinkType, frame: &[u8]) -> Option<Self> {
        Self::of(&crate::parse(link, frame, 0).ok()?)
    }

    /// The transport layers of a complete frame: the outermost packet, the packet that it carries, and so on.
    pub(crate) fn nested(link: LinkType, frame: &[u8]) -> impl Iterator<Item = Self> {
        let outermost = crate::parse(link, frame, 0).ok();
        let packets = std::iter::successors(outermost, |outer| tunnel::inner_of_sender(outer).ok().flatten());
        packets.take(DEPTH).filter_map(|packet| {
            // The inner frame is a part of the outer one.
            let base = packet.frame.as_ptr().addr() - frame.as_ptr().addr();
            let inner = Self::of(&packet)?;
            Some(Self {
                network: base + inner.network,
                start: base + inner.start,
                end: base + inner.end,
                addresses: inner.addresses.map(|(src, dst)| (base + src, base + dst)),
                ..inner
            })
        })
    }

    pub(crate) fn is_tcp(&self) -> bool {
        self.proto == proto::TCP
    }

    pub(crate) fn is_udp(&self) -> bool {
        self.proto == proto::UDP
    }

    /// Offset of the checksum field from `start`; `None` if the checksum cannot be computed.
    pub(crate) fn checksum_offset(&self) -> Option<usize> {
        self.addresses?;
        match (self.proto, self.v6) {
            (proto::TCP, _) => Some(16),
            (proto::UDP, _) => Some(6),
            (proto::ICMP, false) | (proto::ICMP6, true) => Some(2),
            _ => None,
        }
    }

    /// The end of the bytes that the transport checksum covers. A UDP length (RFC 768) may be shorter than the IP packet;
    /// UDP options follow (RFC 9868).
    pub(crate) fn covered(&self, frame: &[u8]) -> usize {
        let length = bytes::<2>(frame, self.start + 4).filter(|_| self.is_udp());
        match length.map(|length| usize::from(be16(*length))) {
            Some(length) if length >= 8 => self.end.min(self.start + length),
            _ => self.end,
        }
    }

    /// The sum of the pseudo header (RFC 9293, 3.1; RFC 8200, 8.1); 0 for ICMP, which has none.
    pub(crate) fn pseudo(&self, frame: &[u8]) -> u16 {
        let Some((src, dst)) = self.addresses.filter(|_| self.proto != proto::ICMP || self.v6) else {
            return 0;
        };
        let width = if self.v6 { 16 } else { 4 };
        let len = ((self.covered(frame) - self.start) as u32).to_be_bytes();
        let fixed = ones_complement::sum(&[len[0], len[1], len[2], len[3], 0, self.proto], 0);
        ones_complement::sum(&frame[src..src + width], ones_complement::sum(&frame[dst..dst + width], fixed))
    }

    /// Computes and stores the IPv4 header checksum. IPv6 has none.
    pub(crate) fn fill_ip4(&self, frame: &mut [u8]) {
        if !self.v6 {
            ones_complement::fill_ip4(frame, self.network);
        }
    }
}

/// Offsets of source and destination of the pseudo header of the IPv4 packet at `network`, whose header ends where `frame` does.
///
/// With a source route that still has addresses left, the destination is its last address (RFC 791, 3.1). `None` if the
/// options are malformed.
fn addresses4(frame: &[u8], network: usize) -> Option<(usize, usize)> {
    let mut at = network + 20;
    while let Some(&kind) = frame.get(at)
        && kind != 0
    {
        let len = if kind == 1 { 1 } else { usize::from(*frame.get(at + 1)?) };
        let option = frame.get(at..at + len).filter(|option| !option.is_empty())?;
        // Loose and strict source route: type, length, a pointer from 1 to the next address, addresses.
        if let [131 | 137, _, pointer, _, _, _, _, ..] = option
            && usize::from(*pointer) < len
        {
            return Some((network + 12, at + len - 4));
        }
        at += len;
    }
    Some((network + 12, network + 16))
}

/// Offsets of source and destination of the pseudo header of the IPv6 packet at `network` whose upper layer begins at `transport`.
///
/// "At the originating node, that address will be in the last element of the Routing header; at the recipient(s), that address
/// will be in the Destination Address field of the IPv6 header" (RFC 8200, 8.1). `None` for routing headers of unknown types.
fn addresses6(frame: &[u8], network: usize, transport: usize) -> Option<(usize, usize)> {
    let (mut src, mut dst) = (network + 8, network + 24);
    let (mut next, mut at) = (*frame.get(network + 6)?, network + 40);
    while at < transport {
        let units = usize::from(*frame.get(at + 1)?);
        let len = match next {
            proto::FRAG => 8,
            // In units of four bytes, minus two (RFC 4302, 2.2).
            proto::AH => (units + 2) * 4,
            _ => (units + 1) * 8,
        };
        let header = frame.get(at..at + len)?;
        match (next, header[2], header[3]) {
            // No segments left.
            (proto::ROUTE, _, 0) => {}
            // Addresses in the order of the route (RFC 2460, 4.4; RFC 6275, 6.4).
            (proto::ROUTE, 0 | 2, _) if len >= 24 => dst = at + (len - 8) / 16 * 16 - 8,
            // "The Segment List is encoded starting from the last segment" (RFC 8754, 2).
            (proto::ROUTE, 4, _) if len >= 24 => dst = at + 8,
            (proto::ROUTE, ..) => return None,
            (proto::DSTOPT, ..) => src = home_address(header).map_or(src, |home| at + home),
            _ => {}
        }
        (next, at) = (header[0], at + len);
    }
    Some((src, dst))
}

/// Offset of the home address in a destination options header. A checksum has it in place of the source (RFC 6275, 11.3.1).
fn home_address(header: &[u8]) -> Option<usize> {
    let mut at = 2;
    loop {
        at += match header.get(at..)? {
            // Pad1; every other option has a length.
            [0, ..] => 1,
            [0xc9, 16, address @ ..] if address.len() >= 16 => return Some(at + 2),
            [_, len, ..] => 2 + usize::from(*len),
            _ => return None,
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proto::{TCP, UDP};

    fn ip4(protocol: u8, payload: usize) -> Vec<u8> {
        let mut bytes = vec![0; 20 + payload];
        bytes[0] = 0x45;
        bytes[2..4].copy_from_slice(&(20 + payload as u16).to_be_bytes());
        bytes[9] = protocol;
        if protocol == UDP {
            bytes[24..26].copy_from_slice(&(payload as u16).to_be_bytes());
        }
        if protocol == TCP {
            bytes[32] = 0x50;
        }
        bytes
    }

    #[test]
    fn tags_padding_and_extension_headers() {
        let tagged = |tags: &[u8], ip: &[u8]| [&[0; 12][..], tags, ip].concat();
        let mut six = vec![0x60, 0, 0, 0, 0, 16, 0, 64];
        six.extend([0; 32]);
        six.extend([UDP, 0, 0, 0, 0, 0, 0, 0]); // hop-by-hop options of 8 bytes
        six.extend([0, 0, 0, 0, 0, 8, 0, 0]);
        let (e, r) = (LinkType::ETHERNET, LinkType::RAW);
        #[rustfmt::skip]
        let rows = [
            ("raw",          r, ip4(UDP, 8),                                                Some((0, 20, 28, UDP))),
            ("ethernet",     e, tagged(&[8, 0], &ip4(TCP, 20)),                             Some((14, 34, 54, TCP))),
            ("padding",      e, [tagged(&[8, 0], &ip4(UDP, 8)), vec![0; 18]].concat(),      Some((14, 34, 42, UDP))),
            ("a tag",        e, tagged(&[0x81, 0, 0, 5, 8, 0], &ip4(UDP, 8)),               Some((18, 38, 46, UDP))),
            ("two tags",     e, tagged(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6, 8, 0], &ip4(1, 8)), Some((22, 42, 50, 1))),
            ("extensions",   r, six.clone(),                                                Some((0, 48, 56, UDP))),
            ("arp",          e, tagged(&[8, 6], &[0; 28]),                                  None),
            ("cut",          r, ip4(UDP, 8)[..27].to_vec(),                                 None),
            ("empty",        r, vec![],                                                     None),
        ];
        for (name, link, bytes, expected) in rows {
            let found = Transport::parse(link, &bytes).map(|h| (h.network, h.start, h.end, h.proto));
            assert_eq!(found, expected, "{name}");
        }
    }

    proptest! {
        #[test]
        fn offsets_of_random_bytes_are_inside_the_frame(mut bytes: Vec<u8>, four: bool) {
            if let Some(first) = bytes.first_mut() {
                *first = if four { 0x45 } else { 0x60 };
            }
            for found in Transport::nested(LinkType::RAW, &bytes.clone()) {
                prop_assert!(found.network <= found.start && found.start <= found.end);
                prop_assert!(found.end <= bytes.len());
                found.fill_ip4(&mut bytes);
                found.pseudo(&bytes);
            }
        }
    }
}
