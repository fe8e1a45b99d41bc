//! Requests to neighbors, and what answers to them have to be like: ARP (RFC 826), neighbor solicitations and advertisements
//! (RFC 4861 sections 4.3, 4.4, 7.1.2 and 7.2).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use towpath_wire::{self as wire, Addresses, LinkType, proto};

use super::neighbor_table::{Answer, Request};
use super::{
    ADVERTISEMENT, ETHERNET, IPV6, MESSAGE, OVERRIDE, SOLICITATION, SOLICITED, SOURCE_LINK_ADDRESS,
    TARGET_LINK_ADDRESS, icmp6_sum, link_address, solicited_node,
};

/// RFC 826, for Ethernet and IPv4: EtherType, hardware, protocol, their lengths.
const ARP: [u8; 9] = [8, 6, 0, 1, 8, 0, 6, 4, 0];
const REQUEST: u8 = 1;
const REPLY: u8 = 2;

/// Puts the request into `out`, in the name of `own` and the first of `addresses` that is of its family. False when there is none.
pub(super) fn ask(request: Request, own: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> bool {
    out.clear();
    let source = |six: bool| addresses.iter().find(|address| address.is_ipv6() == six);
    match (request.key.address, source(request.key.address.is_ipv6())) {
        (IpAddr::V4(target), Some(IpAddr::V4(source))) => ask_arp(request, target, own, *source, out),
        (IpAddr::V6(target), Some(IpAddr::V6(source))) => solicit(request, target, own, *source, out),
        _ => return false,
    }
    true
}

fn ask_arp(request: Request, target: Ipv4Addr, own: [u8; 6], source: Ipv4Addr, out: &mut Vec<u8>) {
    // "Unicast Poll": RFC 1122 section 2.3.2.1.
    out.extend_from_slice(&request.known.unwrap_or([0xff; 6]));
    out.extend_from_slice(&own);
    out.extend_from_slice(&ARP);
    out.push(REQUEST);
    out.extend_from_slice(&own);
    out.extend_from_slice(&source.octets());
    out.extend_from_slice(&request.known.unwrap_or_default());
    out.extend_from_slice(&target.octets());
}

fn solicit(request: Request, target: Ipv6Addr, own: [u8; 6], source: Ipv6Addr, out: &mut Vec<u8>) {
    let to = if request.known.is_some() { target } else { solicited_node(target) };
    // RFC 2464 section 7.
    let [.., a, b, c, d] = to.octets();
    out.extend_from_slice(&request.known.unwrap_or([0x33, 0x33, a, b, c, d]));
    out.extend_from_slice(&own);
    out.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, MESSAGE as u8 + 8, proto::ICMP6, 255]);
    out.extend_from_slice(&source.octets());
    out.extend_from_slice(&to.octets());
    out.extend_from_slice(&[SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&target.octets());
    out.extend_from_slice(&[SOURCE_LINK_ADDRESS, 1]);
    out.extend_from_slice(&own);
    let sum = !icmp6_sum(source, to, &out[ETHERNET + IPV6..]);
    out[ETHERNET + IPV6 + 2..][..2].copy_from_slice(&sum.to_be_bytes());
}

/// What a frame says that could be an answer to us: to `own` at one of `addresses`. Whether anybody was asked, the table knows.
pub(super) fn read(frame: &[u8], own: [u8; 6], addresses: &[IpAddr]) -> Option<Answer> {
    if !frame.starts_with(&own) {
        return None;
    }
    let answer = match frame.get(12..ETHERNET)? {
        [0x08, 0x06] => read_arp(frame, own, addresses),
        [0x86, 0xdd] => read_advertisement(frame, addresses),
        _ => None,
    }?;
    // One that names a group, nobody or ourselves would have packets go round, or to everybody.
    let somebody = |mac: [u8; 6]| mac[0] & 1 == 0 && mac != [0; 6] && mac != own;
    answer.mac.is_none_or(somebody).then_some(answer)
}

fn read_arp(frame: &[u8], own: [u8; 6], addresses: &[IpAddr]) -> Option<Answer> {
    let frame: &[u8; 42] = frame.first_chunk()?;
    let (mac, from) = (*frame[22..28].first_chunk()?, *frame[28..32].first_chunk::<4>()?);
    let (to_mac, to) = (&frame[32..38], *frame[38..42].first_chunk::<4>()?);
    let ours = to_mac == own && addresses.contains(&IpAddr::from(to));
    let reply = frame[12..21] == ARP && frame[21] == REPLY;
    (reply && ours).then_some(Answer { address: from.into(), mac: Some(mac), overrides: true })
}

fn read_advertisement(frame: &[u8], addresses: &[IpAddr]) -> Option<Answer> {
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
    // What answers us is for one of our addresses alone.
    if !valid
        || flags & SOLICITED == 0
        || !addresses.contains(&to.into())
        || icmp6_sum(from, to, body) != 0xffff
    {
        return None;
    }
    let mac = link_address(&body[MESSAGE..], TARGET_LINK_ADDRESS)?;
    Some(Answer { address: target.into(), mac, overrides: flags & OVERRIDE != 0 })
}

#[cfg(test)]
mod tests {
    use super::super::answer;
    use super::super::neighbor_table::Key;
    use super::*;

    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 2];

    fn addresses(last: u16) -> [IpAddr; 2] {
        [IpAddr::from([10, 0, 0, last as u8]), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last).into()]
    }

    /// The answer of `theirs` to a request for each of its addresses.
    fn exchanges(known: Option<[u8; 6]>) -> Vec<(IpAddr, Vec<u8>)> {
        let exchange = |address| {
            let (mut request, mut reply) = (Vec::new(), Vec::new());
            let key = Key { port: 0, address };
            assert!(ask(Request { key, known }, OWN, &addresses(1), &mut request));
            assert!(answer(&request, THEIRS, &addresses(2), &mut reply), "{address}: {request:02x?}");
            (address, reply)
        };
        addresses(2).into_iter().map(exchange).collect()
    }

    #[test]
    fn who_is_asked_answers() {
        for known in [None, Some(THEIRS)] {
            for (address, reply) in exchanges(known) {
                let said = read(&reply, OWN, &addresses(1));
                assert_eq!(said, Some(Answer { address, mac: Some(THEIRS), overrides: true }));
                assert_eq!(read(&reply, THEIRS, &addresses(1)), None, "for another Ethernet address");
                assert_eq!(read(&reply, OWN, &addresses(3)), None, "for another address");
                for len in 0..reply.len() {
                    assert_eq!(read(&reply[..len], OWN, &addresses(1)), None, "{address}: cut to {len}");
                }
            }
        }
        let nobody = Request { key: Key { port: 0, address: addresses(2)[1] }, known: None };
        assert!(!ask(nobody, OWN, &addresses(1)[..1], &mut Vec::new()), "no address of its family");
    }

    /// An answer with this done to it is none.
    #[test]
    fn what_is_not_an_answer() {
        type Damage = fn(&mut Vec<u8>);
        #[rustfmt::skip]
        let rows: [(usize, &str, Damage); 12] = [
            (0, "a request",             |frame| frame[21] = 1),
            (0, "another protocol",      |frame| frame[16] = 9),
            (0, "to everybody",          |frame| frame[..6].fill(0xff)),
            (0, "for another's Ethernet", |frame| frame[37] = 9),
            (0, "names a group",         |frame| frame[22] |= 1),
            (0, "names nobody",          |frame| frame[22..28].fill(0)),
            (0, "names us",              |frame| frame[22..28].copy_from_slice(&OWN)),
            (1, "from another link",     |frame| frame[21] = 254),
            (1, "a wrong checksum",      |frame| frame[56] ^= 1),
            (1, "unsolicited",           |frame| { frame[58] &= !SOLICITED; mend(frame); }),
            (1, "another code",          |frame| { frame[55] = 1; mend(frame); }),
            (1, "an option of no length", |frame| { frame[79] = 0; mend(frame); }),
        ];
        for (at, what, damage) in rows {
            let (address, mut reply) = exchanges(None).swap_remove(at);
            damage(&mut reply);
            assert_eq!(read(&reply, OWN, &addresses(1)), None, "{address}: {what}");
        }
        // Whoever is still there may leave its address out, and say that it does not insist.
        let (address, mut reply) = exchanges(None).swap_remove(1);
        reply.truncate(78);
        reply[19] = 24;
        reply[58] &= !OVERRIDE;
        mend(&mut reply);
        assert_eq!(read(&reply, OWN, &addresses(1)), Some(Answer { address, mac: None, overrides: false }));
    }

    /// Makes the checksum right again.
    fn mend(frame: &mut [u8]) {
        let address = |at: usize| Ipv6Addr::from(*frame[at..].first_chunk::<16>().unwrap());
        let (from, to) = (address(22), address(38));
        frame[56..58].fill(0);
        let sum = !icmp6_sum(from, to, &frame[54..]);
        frame[56..58].copy_from_slice(&sum.to_be_bytes());
    }
}
