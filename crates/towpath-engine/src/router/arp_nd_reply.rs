//! Replies to requests for the router's addresses: ARP requests (RFC 826) and neighbor solicitations (RFC 4861).
//!
//! Not supported: tagged frames, router solicitations, duplicate address detection for the router's own addresses.

use std::net::{IpAddr, Ipv6Addr};

use towpath_wire::{self as wire, Addresses, LinkType, proto};

use super::{
    ADVERTISEMENT, ETHERNET, IPV6, MESSAGE, OVERRIDE, ROUTER, SOLICITATION, SOLICITED, SOURCE_LINK_ADDRESS,
    TARGET_LINK_ADDRESS, icmp6_sum, link_address, solicited_node,
};

/// Writes the reply to a request for one of `addresses` of the host `mac` into `out`. Returns false if `frame` is not such a request,
/// or invalid.
pub(crate) fn reply(frame: &[u8], mac: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> bool {
    match frame.get(12..ETHERNET) {
        Some([0x08, 0x06]) => reply_arp(frame, mac, addresses, out),
        Some([0x86, 0xdd]) => reply_solicitation(frame, mac, addresses, out),
        _ => None,
    }
    .is_some()
}

fn reply_arp(frame: &[u8], mac: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> Option<()> {
    // RFC 826: hardware Ethernet, protocol IPv4, their lengths, request.
    const REQUEST: [u8; 10] = [8, 6, 0, 1, 8, 0, 6, 4, 0, 1];
    let frame: &[u8; 42] = frame.first_chunk()?;
    let target: [u8; 4] = *frame[38..42].first_chunk()?;
    if frame[12..22] != REQUEST || !addresses.contains(&IpAddr::from(target)) {
        return None;
    }
    out.clear();
    out.extend_from_slice(&frame[22..28]);
    out.extend_from_slice(&mac);
    out.extend_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 2]);
    out.extend_from_slice(&mac);
    out.extend_from_slice(&target);
    out.extend_from_slice(&frame[22..32]);
    Some(())
}

fn reply_solicitation(frame: &[u8], mac: [u8; 6], addresses: &[IpAddr], out: &mut Vec<u8>) -> Option<()> {
    let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).ok()?;
    let Addresses::V6(from, to) = packet.addresses else { return None };
    let (hops, message) = (frame.get(ETHERNET + 7)?, packet.transport.checked_sub(ETHERNET + IPV6)?);
    // Section 7.1.1: a valid solicitation. The hop limit of 255 proves that it comes from this link.
    if packet.proto != proto::ICMP6 || message != 0 || *hops != 255 {
        return None;
    }
    let body = frame.get(packet.transport..packet.transport + packet.transport_len)?;
    let target = Ipv6Addr::from(*body.get(8..MESSAGE)?.first_chunk::<16>()?);
    let [kind, code, ..] = *body else { return None };
    if kind != SOLICITATION || code != 0 || target.is_multicast() || icmp6_sum(from, to, body) != 0xffff {
        return None;
    }
    let sender = link_address(&body[MESSAGE..], SOURCE_LINK_ADDRESS)?;
    let unspecified = from.is_unspecified();
    if unspecified && (sender.is_some() || to != solicited_node(target))
        || !addresses.contains(&target.into())
    {
        return None;
    }
    // Section 7.2.4: a host without an address gets the reply by multicast (RFC 2464 section 7).
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let (to, destination) = match unspecified {
        true => (all_nodes, [0x33, 0x33, 0, 0, 0, 1]),
        false => (from, sender.unwrap_or(*frame[6..12].first_chunk()?)),
    };
    let flags = if unspecified { ROUTER | OVERRIDE } else { ROUTER | SOLICITED | OVERRIDE };
    out.clear();
    out.extend_from_slice(&destination);
    out.extend_from_slice(&mac);
    out.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, MESSAGE as u8 + 8, proto::ICMP6, 255]);
    out.extend_from_slice(&target.octets());
    out.extend_from_slice(&to.octets());
    out.extend_from_slice(&[ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0]);
    out.extend_from_slice(&target.octets());
    out.extend_from_slice(&[TARGET_LINK_ADDRESS, 1]);
    out.extend_from_slice(&mac);
    let sum = !icmp6_sum(target, to, &out[ETHERNET + IPV6..]);
    out[ETHERNET + IPV6 + 2..][..2].copy_from_slice(&sum.to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: [u8; 6] = [6; 6];
    const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 1];

    fn addresses() -> [IpAddr; 2] {
        ["10.0.0.254".parse().unwrap(), "2001:db8::12:34fe".parse().unwrap()]
    }

    fn replied(frame: &[u8]) -> Option<Vec<u8>> {
        let mut out = vec![0xee; 7];
        reply(frame, OWN, &addresses(), &mut out).then_some(out)
    }

    #[test]
    fn arp() {
        let request = |operation: u8, target: [u8; 4]| {
            let mut request = vec![0xff; 6];
            request.extend([
                2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, operation, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1,
            ]);
            request.extend([0; 6]);
            request.extend(target);
            // Padded to the minimum Ethernet frame.
            request.extend([0; 18]);
            request
        };
        let expected = [
            &[2, 0, 0, 0, 0, 1, 6, 6, 6, 6, 6, 6, 8, 6, 0, 1, 8, 0, 6, 4, 0, 2][..],
            &[6, 6, 6, 6, 6, 6, 10, 0, 0, 254, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1],
        ];
        let good = request(1, [10, 0, 0, 254]);
        assert_eq!(replied(&good), Some(expected.concat()));
        assert_eq!(replied(&good[..41]), None);
        assert_eq!(replied(&request(1, [10, 0, 0, 1])), None);
        assert_eq!(replied(&request(2, [10, 0, 0, 254])), None);
    }

    /// A solicitation; the checksum is computed.
    #[derive(Clone)]
    struct Solicitation {
        from: &'static str,
        to: &'static str,
        hops: u8,
        code: u8,
        target: &'static str,
        options: &'static [u8],
    }

    const SOLICITATION_FRAME: Solicitation = Solicitation {
        from: "2001:db8::1",
        to: "ff02::1:ff12:34fe",
        hops: 255,
        code: 0,
        target: "2001:db8::12:34fe",
        options: &[1, 1, 2, 0, 0, 0, 0, 9],
    };

    impl Solicitation {
        fn frame(&self) -> Vec<u8> {
            let [from, to, target]: [Ipv6Addr; 3] =
                [self.from, self.to, self.target].map(|text| text.parse().unwrap());
            let mut frame = vec![0x33, 0x33, 0xff, 0x12, 0x34, 0xfe];
            frame.extend(SENDER);
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, (MESSAGE + self.options.len()) as u8, 58, self.hops]);
            frame.extend(from.octets());
            frame.extend(to.octets());
            frame.extend([SOLICITATION, self.code, 0, 0, 0, 0, 0, 0]);
            frame.extend(target.octets());
            frame.extend(self.options);
            let sum = !icmp6_sum(from, to, &frame[54..]);
            frame[56..58].copy_from_slice(&sum.to_be_bytes());
            frame
        }
    }

    #[test]
    fn neighbor_solicitations() {
        // Ethernet destination, IPv6 destination, flags.
        type Reply = ([u8; 6], &'static str, u8);
        let reply: Reply = ([2, 0, 0, 0, 0, 9], "2001:db8::1", 0xe0);
        #[rustfmt::skip]
        let rows: [(&str, Solicitation, Option<Reply>); 15] = [
            ("for an address of the router",               SOLICITATION_FRAME,                                              Some(reply)),
            ("unicast",             Solicitation { to: "2001:db8::12:34fe", ..SOLICITATION_FRAME },         Some(reply)),
            ("without link address",   Solicitation { options: &[], ..SOLICITATION_FRAME },                    Some((SENDER, "2001:db8::1", 0xe0))),
            ("unknown option first",  Solicitation { options: &[14, 1, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9], ..SOLICITATION_FRAME }, Some(reply)),
            ("duplicate detection (RFC 4862)", Solicitation { from: "::", options: &[], ..SOLICITATION_FRAME },       Some(([0x33, 0x33, 0, 0, 0, 1], "ff02::1", 0xa0))),
            ("unspecified, link address",  Solicitation { from: "::", ..SOLICITATION_FRAME },                      None),
            ("unspecified, unicast",      Solicitation { from: "::", options: &[], to: "2001:db8::12:34fe", ..SOLICITATION_FRAME }, None),
            ("from another link",             Solicitation { hops: 254, ..SOLICITATION_FRAME },                       None),
            ("nonzero code",                  Solicitation { code: 1, ..SOLICITATION_FRAME },                         None),
            ("for another address",                   Solicitation { target: "2001:db8::1:34fe", ..SOLICITATION_FRAME },      None),
            ("for a multicast address",       Solicitation { target: "ff02::1", ..SOLICITATION_FRAME },               None),
            ("option of length 0",        Solicitation { options: &[1, 0, 2, 0, 0, 0, 0, 9], ..SOLICITATION_FRAME }, None),
            ("truncated option",         Solicitation { options: &[1, 2, 2, 0, 0, 0, 0, 9], ..SOLICITATION_FRAME }, None),
            ("truncated option header",         Solicitation { options: &[1], ..SOLICITATION_FRAME },                   None),
            ("target link address", Solicitation { options: &[2, 1, 9, 9, 9, 9, 9, 9], ..SOLICITATION_FRAME }, Some((SENDER, "2001:db8::1", 0xe0))),
        ];
        for (what, solicitation, expected) in rows {
            let got = replied(&solicitation.frame());
            assert_eq!(got.is_some(), expected.is_some(), "{what}");
            let (Some(got), Some((mac, to, flags))) = (got, expected) else { continue };
            let (target, to): (Ipv6Addr, Ipv6Addr) =
                (solicitation.target.parse().unwrap(), to.parse().unwrap());
            assert_eq!(
                (&got[..6], &got[6..12], &got[12..14]),
                (&mac[..], &OWN[..], &[0x86, 0xdd][..]),
                "{what}"
            );
            assert_eq!((&got[14..22]), [0x60, 0, 0, 0, 0, 32, 58, 255], "{what}");
            assert_eq!((&got[22..38], &got[38..54]), (&target.octets()[..], &to.octets()[..]), "{what}");
            assert_eq!((&got[54..56], &got[58..62]), (&[136, 0][..], &[flags, 0, 0, 0][..]), "{what}");
            assert_eq!(
                (&got[62..78], &got[78..80], &got[80..]),
                (&target.octets()[..], &[2, 1][..], &OWN[..]),
                "{what}"
            );
            assert_eq!(icmp6_sum(target, to, &got[54..]), 0xffff, "{what}");
        }
        let mut frame = SOLICITATION_FRAME.frame();
        frame[57] ^= 1;
        assert_eq!(replied(&frame), None, "wrong checksum");
        for len in 0..frame.len() {
            assert_eq!(replied(&SOLICITATION_FRAME.frame()[..len]), None, "cut to {len}");
        }
    }
}
