//! Where the headers of a frame are, as far as checksums and segmentation need it.
//!
//! Ethernet with any number of VLAN tags, or IP at once; IPv4 with options; IPv6 with hop-by-hop, routing, destination and
//! fragment headers. Lengths that do not fit the frame are no headers.

use std::ops::Range;

use crate::{Header, LinkType, checksum};

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMP6: u8 = 58;

/// Places in a frame, from its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Headers {
    /// The IP header.
    pub(crate) network: usize,
    /// What follows the IP header.
    pub(crate) transport: usize,
    /// Behind the packet's last byte; Ethernet padding comes after it.
    pub(crate) end: usize,
    /// IP protocol number of what is at `transport`.
    pub(crate) protocol: u8,
    /// IPv6, otherwise IPv4.
    pub(crate) six: bool,
    /// A fragment: its transport checksum is another's matter.
    pub(crate) fragment: bool,
    /// Where the pseudo header's addresses are: those of the first sender and the last receiver. None when the packet does not say.
    pub(crate) ends: Option<(usize, usize)>,
}

/// The headers of a frame; `None` when it is no whole IP packet.
pub(crate) fn locate(link: LinkType, bytes: &[u8]) -> Option<Headers> {
    let network = match link.header() {
        Header::Ip => 0,
        Header::Ethernet => ethernet(bytes)?,
        _ => return None,
    };
    ip(bytes, network)
}

/// Those of the IP packet at `network`.
pub(crate) fn ip(bytes: &[u8], network: usize) -> Option<Headers> {
    match bytes.get(network)? >> 4 {
        4 => four(bytes, network),
        6 => six(bytes, network),
        _ => None,
    }
}

/// Length of the Ethernet header with its VLAN tags, when IP follows it.
pub(crate) fn ethernet(bytes: &[u8]) -> Option<usize> {
    let mut at = 12;
    loop {
        match word(bytes, at)? {
            // IEEE 802.1Q and 802.1ad tags, and the ethertype that older bridges used for the outer one.
            0x8100 | 0x88a8 | 0x9100 => at += 4,
            0x0800 | 0x86dd => return Some(at + 2),
            _ => return None,
        }
    }
}

fn four(bytes: &[u8], network: usize) -> Option<Headers> {
    let header = usize::from(bytes[network] & 15) * 4;
    let total = usize::from(word(bytes, network + 2)?);
    // "BIG TCP": a total length of 0 is what does not fit 16 bits.
    let end = if total == 0 { bytes.len() } else { network + total };
    if header < 20 || end > bytes.len() || network + header > end {
        return None;
    }
    let fragment = word(bytes, network + 6)? & 0x3fff != 0;
    let (protocol, transport) = (bytes[network + 9], network + header);
    let to = last_hop(bytes, network + 20..transport, network + 16);
    let ends = to.map(|to| (network + 12, to));
    Some(Headers { network, transport, end, protocol, six: false, fragment, ends })
}

/// Where the address is that an IPv4 packet with these options goes to at last: with a source route that is not used up, the route's last. (RFC
/// 791 section 3.1.)
fn last_hop(bytes: &[u8], options: Range<usize>, header: usize) -> Option<usize> {
    let mut at = options.start;
    while at < options.end {
        let (kind, len) = match bytes[at] {
            0 => break,
            1 => (1, 1),
            kind => (kind, usize::from(*bytes.get(at + 1)?)),
        };
        if len == 0 || at + len > options.end {
            return None;
        }
        // Loose and strict source route: type, length, a pointer from 1 to the next address, addresses.
        if matches!(kind, 131 | 137) && len >= 7 && usize::from(bytes[at + 2]) < len {
            return Some(at + len - 4);
        }
        at += len;
    }
    Some(header)
}

fn six(bytes: &[u8], network: usize) -> Option<Headers> {
    let payload = usize::from(word(bytes, network + 4)?);
    let end = if payload == 0 { bytes.len() } else { network + 40 + payload };
    if end > bytes.len() || network + 40 > end {
        return None;
    }
    let (mut protocol, mut transport, mut fragment) = (bytes[network + 6], network + 40, false);
    let (mut from, mut to) = (network + 8, Some(network + 24));
    loop {
        let len = match protocol {
            // RFC 8200 section 4: hop-by-hop options, routing, destination options; in units of 8 bytes.
            0 | 43 | 60 => (usize::from(*bytes.get(transport + 1)?) + 1) * 8,
            44 => 8,
            _ => break,
        };
        let header = bytes.get(transport..transport + len)?;
        match protocol {
            43 => to = last_segment(header, transport, to),
            60 => from = home(header).map_or(from, |home| transport + home),
            // Offset and M flag: neither, and it is a fragment that is a whole packet (RFC 6946).
            44 if word(header, 2)? & 0xfff9 != 0 => fragment = true,
            _ => {}
        }
        protocol = header[0];
        transport += len;
        // What a later fragment begins with is no header.
        if fragment {
            break;
        }
    }
    let ends = to.map(|to| (from, to));
    (transport <= end).then_some(Headers { network, transport, end, protocol, six: true, fragment, ends })
}

/// Where the address is that a packet with this routing header goes to at last; `to` is where it goes to without. "At the originating node, that
/// address will be in the last element of the Routing header; at the recipient(s), that address will be in the Destination Address
/// field" (RFC 8200 section 8.1).
fn last_segment(header: &[u8], at: usize, to: Option<usize>) -> Option<usize> {
    let (kind, left) = (header[2], header[3]);
    match kind {
        _ if left == 0 => to,
        // Type 0 (RFC 2460), and type 2 (RFC 6275 section 6.4) which has one: in the order that they are gone to.
        0 | 2 if header.len() >= 24 => Some(at + 8 + (header.len() - 8) / 16 * 16 - 16),
        // Segment routing (RFC 8754 section 2): "The Segment List is encoded starting from the last segment".
        4 if header.len() >= 24 => Some(at + 8),
        // Of others (type 3 has them compressed, RFC 6554) it is not known here.
        _ => None,
    }
}

/// Where in these destination options the home address is, which "the sender's address" of a checksum is (RFC 6275 section 11.3.1).
fn home(header: &[u8]) -> Option<usize> {
    let mut at = 2;
    loop {
        match *header.get(at)? {
            // Pad1; others have a length.
            0 => at += 1,
            0xc9 if header.get(at + 1) == Some(&16) && at + 18 <= header.len() => return Some(at + 2),
            _ => at += 2 + usize::from(*header.get(at + 1)?),
        }
    }
}

impl Headers {
    pub(crate) fn is_tcp(&self) -> bool {
        self.protocol == TCP
    }

    pub(crate) fn is_udp(&self) -> bool {
        self.protocol == UDP
    }

    /// Where the transport's checksum field is, from `transport`; none where it cannot be computed.
    pub(crate) fn checksum_offset(&self) -> Option<usize> {
        self.ends?;
        match (self.protocol, self.six) {
            (TCP, _) => Some(16),
            (UDP, _) => Some(6),
            (ICMP, false) | (ICMP6, true) => Some(2),
            _ => None,
        }
    }

    /// Behind the last byte that the transport's checksum covers: UDP has a length of its own (RFC 768), and options may follow
    /// (RFC 9868).
    pub(crate) fn covered(&self, bytes: &[u8]) -> usize {
        let len = self.is_udp().then(|| word(bytes, self.transport + 4)).flatten().map_or(0, usize::from);
        if len >= 8 { self.end.min(self.transport + len) } else { self.end }
    }

    /// The sum of the pseudo header (RFC 9293 section 3.1, RFC 8200 section 8.1); 0 for ICMP, which has none.
    pub(crate) fn pseudo(&self, bytes: &[u8]) -> u16 {
        self.pseudo_of(bytes, self.covered(bytes) - self.transport)
    }

    /// As [`Headers::pseudo`], for a transport of `len` bytes.
    pub(crate) fn pseudo_of(&self, bytes: &[u8], len: usize) -> u16 {
        let Some((from, to)) = self.ends.filter(|_| self.protocol != ICMP || self.six) else { return 0 };
        let width = if self.six { 16 } else { 4 };
        let len = (len as u32).to_be_bytes();
        let fixed = checksum::sum(&[len[0], len[1], len[2], len[3], 0, self.protocol], 0);
        checksum::sum(&bytes[from..from + width], checksum::sum(&bytes[to..to + width], fixed))
    }

    /// Writes the IPv4 header's checksum.
    pub(crate) fn renew_ip(&self, bytes: &mut [u8]) {
        if self.six {
            return;
        }
        // The header without its checksum has the fixed 20 bytes at least.
        let header_len = usize::from(bytes[self.network] & 15) * 4;
        let header = &mut bytes[self.network..self.network + header_len];
        header[10..12].fill(0);
        let value = !checksum::sum(header, 0);
        header[10..12].copy_from_slice(&value.to_be_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ip4(protocol: u8, payload: usize) -> Vec<u8> {
        let mut bytes = vec![0; 20 + payload];
        bytes[0] = 0x45;
        bytes[2..4].copy_from_slice(&(20 + payload as u16).to_be_bytes());
        bytes[9] = protocol;
        bytes
    }

    #[test]
    fn headers_are_found_behind_tags_and_extensions() {
        let tagged = |tags: &[u8], ip: &[u8]| [&[0; 12][..], tags, ip].concat();
        let mut six = vec![0x60, 0, 0, 0, 0, 16, 0, 64];
        six.extend([0; 32]);
        six.extend([UDP, 0, 0, 0, 0, 0, 0, 0]); // hop-by-hop options of 8 bytes
        six.extend([0; 8]);
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
            ("nothing",      r, vec![],                                                     None),
        ];
        for (name, link, bytes, expected) in rows {
            let found = locate(link, &bytes).map(|h| (h.network, h.transport, h.end, h.protocol));
            assert_eq!(found, expected, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_give_places_inside_them(mut bytes: Vec<u8>, four: bool) {
            if let Some(first) = bytes.first_mut() {
                *first = if four { 0x45 } else { 0x60 };
            }
            if let Some(headers) = locate(LinkType::RAW, &bytes) {
                prop_assert!(headers.network <= headers.transport && headers.transport <= headers.end);
                prop_assert!(headers.end <= bytes.len());
                headers.renew_ip(&mut bytes);
                headers.pseudo(&bytes);
            }
        }
    }
}
