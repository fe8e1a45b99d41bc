//! Requests for neighbors, and the validation of their replies: ARP (RFC 826), neighbor solicitations and advertisements
//! (RFC 4861 sections 4.3, 4.4, 7.1.2 and 7.2).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use towpath_wire::{self as wire, Addresses, LinkType, proto};

use super::neighbor_table::{Reply, Request};
use super::{
    ADVERTISEMENT, ETHERNET, IPV6, MESSAGE, OVERRIDE, SOLICITATION, SOLICITED, SOURCE_LINK_ADDRESS,
    TARGET_LINK_ADDRESS, icmp6_sum, link_address, solicited_node,
};

/// RFC 826 for Ethernet and IPv4: EtherType, hardware, protocol, their lengths.
const ARP: [u8; 9] = [8, 6, 0, 1, 8, 0, 6, 4, 0];
const REQUEST: u8 = 1;
const REPLY: u8 = 2;

/// Writes the request into `out`, from `mac` and the first of `addresses` of its family. Returns false without such an address.
pub(super) fn emit(request: Request, mac: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> bool {
    out.clear();
    let source = |six: bool| addresses.iter().find(|address| address.is_ipv6() == six);
    match (request.key.address, source(request.key.address.is_ipv6())) {
        (IpAddr::V4(target), Some(IpAddr::V4(source))) => emit_arp(request, target, mac, *source, out),
        (IpAddr::V6(target), Some(IpAddr::V6(source))) => {
            emit_solicitation(request, target, mac, *source, out)
        }
        _ => return false,
    }
    true
}

fn emit_arp(request: Request, target: Ipv4Addr, mac: [u8; 6], source: Ipv4Addr, out: &mut Vec<u8>) {
    // "Unicast Poll": RFC 1122 section 2.3.2.1.
    out.extend_from_slice(&request.known.unwrap_or([0xff; 6]));
    out.extend_from_slice(&mac);
    out.extend_from_slice(&ARP);
    out.push(REQUEST);
    out.extend_from_slice(&mac);
    out.extend_from_slice(&source.octets());
    out.extend_from_slice(&request.known.unwrap_or_default());
    out.extend_from_slice(&target.octets());
}

fn emit_solicitation(request: Request, target: Ipv6Addr, mac: [u8; 6], source: Ipv6Addr, out: &mut Vec<u8>) {
    let to = if request.known.is_some() { target } else { solicited_node(target) };
    // RFC 2464 section 7.
    let [.., a, b, c, d] = to.octets();
    out.extend_from_slice(&request.known.unwrap_or([0x33, 0x33, a, b, c, d]));
    out.extend_from_slice(&mac);
    out.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, MESSAGE as u8 + 8, proto::ICMP6, 255]);
    out.extend_from_slice(&source.octets());
    out.extend_from_slice(&to.octets());
    out.extend_from_slice(&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&target.octets());
    out.extend_from_slice(&[SOURCE_LINK_ADDRESS, 1]);
    out.extend_from_slice(&mac);
    let sum = !icmp6_sum(source, to, &out[ETHERNET + IPV6..]);
    out[ETHERNET + IPV6 + 2..][..2].copy_from_slice(&sum.to_be_bytes());
}

/// Parses a reply to the host `own` at one of `addresses`. The table knows whether the request was sent.
pub(super) fn parse_reply(frame: &[u8], own: [u8; 6], addresses: &[IpAddr]) -> Option<Reply> {
    if !frame.starts_with(&own) {
        return None;
    }
    let reply = match frame.get(12..ETHERNET)? {
        [0x08, 0x06] => parse_arp(frame, own, addresses),
        [0x86, 0xdd] => parse_advertisement(frame, addresses),
        _ => None,
    }?;
    // A multicast address, zero, or the router's own address would loop packets or send them to all hosts.
    let is_one_host = |mac: [u8; 6]| mac[0] & 1 == 0 && mac != [0; 6] && mac != own;
    reply.mac.is_none_or(is_one_host).then_some(reply)
}

fn parse_arp(frame: &[u8], own: [u8; 6], addresses: &[IpAddr]) -> Option<Reply> {
    let frame: &[u8; 42] = frame.first_chunk()?;
    let (mac, from) = (*frame[22..28].first_chunk()?, *frame[28..32].first_chunk::<4>()?);
    let (to_mac, to) = (&frame[32..38], *frame[38..42].first_chunk::<4>()?);
    let ours = to_mac == own && addresses.contains(&IpAddr::from(to));
    let reply = frame[12..21] == ARP && frame[21] == REPLY;
    (reply && ours).then_some(Reply { address: from.into(), mac: Some(mac), overrides: true })
}

fn parse_advertisement(frame: &[u8], addresses: &[IpAddr]) -> Option<Reply> {
    let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).ok()?;
    let Addresses::V6(from, to) = packet.addresses else { return None };
    let message = packet.transport.checked_sub(ETHERNET + IPV6)?;
    // "The IP Hop Limit field has a value of 255, i.e., the packet could not possibly have been forwarded by a router."
    if packet.proto != proto::ICMP6 || message != 0 || *frame.get(ETHERNET + 7)? != 255 {
        return None;
    }
    let body = frame.get(packet.transport..packet.transport + packet.transport_len)?;
    let target = Ipv6Addr::from(*body.get(8..MESSAGE)?.first_chunk::<16>()?);
    let [kind, code, _, _, flags, ..] = *body else { return None };
    let valid = kind == ADVERTISEMENT && code == 0 && !target.is_multicast();
    // A solicited reply is unicast to the router's address.
    if !valid
        || flags & SOLICITED == 0
        || !addresses.contains(&to.into())
        || icmp6_sum(from, to, body) != 0xffff
    {
        return None;
    }
    let mac = link_address(&body[MESSAGE..], TARGET_LINK_ADDRESS)?;
    Some(Reply { address: target.into(), mac, overrides: flags & OVERRIDE != 0 })
}

#[cfg(test)]
mod tests {
    use super::super::arp_nd_reply;
    use super::super::neighbor_table::Key;
    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];

    fn addresses(last: u16) -> [IpAddr; 2] {
        [IpAddr::from([10, 0, 0, last as u8]), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last).into()]
    }

    /// The replies of the neighbor to a request for each of its addresses.
    fn exchanges(known: Option<[u8; 6]>) -> Vec<(IpAddr, Vec<u8>)> {
        let exchange = |address| {
            let (mut request, mut reply) = (Vec::new(), Vec::new());
            let key = Key { port: 0, address };
            assert!(emit(Request { key, known }, OWN, &addresses(1), &mut request));
            assert!(arp_nd_reply(&request, THEIRS, &addresses(2), &mut reply), "{address}: {request:02x?}");
            (address, reply)
        };
        addresses(2).into_iter().map(exchange).collect()
    }

    #[test]
    fn a_reply_to_a_request_is_parsed() {
        for known in [None, Some(THEIRS)] {
            for (address, reply) in exchanges(known) {
                let parsed = parse_reply(&reply, OWN, &addresses(1));
                assert_eq!(parsed, Some(Reply { address, mac: Some(THEIRS), overrides: true }));
                assert_eq!(parse_reply(&reply, THEIRS, &addresses(1)), None, "for another Ethernet address");
                assert_eq!(parse_reply(&reply, OWN, &addresses(3)), None, "for another address");
                for len in 0..reply.len() {
                    assert_eq!(
                        parse_reply(&reply[..len], OWN, &addresses(1)),
                        None,
                        "{address}: cut to {len}"
                    );
                }
            }
        }
        let request = Request { key: Key { port: 0, address: addresses(2)[1] }, known: None };
        assert!(!emit(request, OWN, &addresses(1)[..1], &mut Vec::new()), "no address of its family");
    }

    #[test]
    fn a_damaged_reply_is_not_accepted() {
        type Damage = fn(&mut Vec<u8>);
        #[rustfmt::skip]
        let rows: [(usize, &str, Damage); 12] = [
            (0, "a request",             |frame| frame[21] = 1),
            (0, "other protocol",      |frame| frame[16] = 9),
            (0, "broadcast",             |frame| frame[..6].fill(0xff)),
            (0, "other Ethernet target", |frame| frame[37] = 9),
            (0, "multicast source",         |frame| frame[22] |= 1),
            (0, "zero source",          |frame| frame[22..28].fill(0)),
            (0, "our own address",              |frame| frame[22..28].copy_from_slice(&OWN)),
            (1, "hop limit 254",     |frame| frame[21] = 254),
            (1, "wrong checksum",      |frame| frame[56] ^= 1),
            (1, "unsolicited",           |frame| { frame[58] &= !SOLICITED; mend(frame); }),
            (1, "nonzero code",          |frame| { frame[55] = 1; mend(frame); }),
            (1, "option of length 0", |frame| { frame[79] = 0; mend(frame); }),
        ];
        for (at, what, damage) in rows {
            let (address, mut reply) = exchanges(None).swap_remove(at);
            damage(&mut reply);
            assert_eq!(parse_reply(&reply, OWN, &addresses(1)), None, "{address}: {what}");
        }
        // The reply to a unicast request may omit the link address and the override flag.
        let (address, mut reply) = exchanges(None).swap_remove(1);
        reply.truncate(78);
        reply[19] = 24;
        reply[58] &= !OVERRIDE;
        mend(&mut reply);
        assert_eq!(
            parse_reply(&reply, OWN, &addresses(1)),
            Some(Reply { address, mac: None, overrides: false })
        );
    }

    /// Recomputes the checksum.
    fn mend(frame: &mut [u8]) {
        let address = |at: usize| Ipv6Addr::from(*frame[at..].first_chunk::<16>().unwrap());
        let (from, to) = (address(22), address(38));
        frame[56..58].fill(0);
        let sum = !icmp6_sum(from, to, &frame[54..]);
        frame[56..58].copy_from_slice(&sum.to_be_bytes());
    }
}
