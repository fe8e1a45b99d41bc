//! ICMP errors match the state of the packet that they quote.

use towpath_gate::state::{
    Direction, Ends, Flow, Install, Lookup, Name, Quoted, RuleId, Segment, Settings, States,
};
use towpath_wire::{self as wire, LinkType, Time};

const CLIENT: [u8; 4] = [10, 0, 0, 1];
const SERVER: [u8; 4] = [192, 0, 2, 1];
const ROUTER: [u8; 4] = [203, 0, 113, 9];

fn ip4(src: [u8; 4], dst: [u8; 4], proto: u8, upper: &[u8]) -> Vec<u8> {
    let length = (20 + upper.len() as u16).to_be_bytes();
    let mut packet = vec![0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, proto, 0, 0];
    packet.extend(src);
    packet.extend(dst);
    packet.extend(upper);
    packet
}

fn ip6(src: &str, dst: &str, next: u8, upper: &[u8]) -> Vec<u8> {
    let length = (upper.len() as u16).to_be_bytes();
    let mut packet = vec![0x60, 0, 0, 0, length[0], length[1], next, 64];
    for address in [src, dst] {
        packet.extend(address.parse::<std::net::Ipv6Addr>().unwrap().octets());
    }
    packet.extend(upper);
    packet
}

/// The first 8 bytes of the TCP header: what RFC 792 guarantees.
const TCP: [u8; 8] = [0x9c, 0x40, 0x01, 0xbb, 0, 0, 0x12, 0x34];
const UDP: [u8; 8] = [0x9c, 0x40, 0x00, 0x35, 0, 40, 0, 0];

fn icmp(kind: u8, quote: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, 1, 0, 0, 0, 0, 0, 0];
    message.extend(quote);
    message
}

fn quoted(packet: &[u8]) -> Option<Quoted> {
    Quoted::of(&wire::parse(LinkType::RAW, packet, packet.len() as u32).unwrap())
}

/// An IPv4 packet whose total length exceeds what is quoted.
fn longer(mut packet: Vec<u8>) -> Vec<u8> {
    packet[2..4].copy_from_slice(&1500_u16.to_be_bytes());
    packet
}

#[test]
fn quotes_of_icmp_errors() {
    let sent = |upper: &[u8], proto| longer(ip4(CLIENT, SERVER, proto, upper));
    let error = |kind, quote: &[u8]| ip4(ROUTER, CLIENT, 1, &icmp(kind, quote));
    let echo = [8, 0, 0, 0, 0, 7, 0, 1];
    let later = {
        let mut packet = sent(&TCP, 6);
        packet[7] = 100;
        packet
    };
    let rows = [
        ("port unreachable", error(3, &sent(&UDP, 17)), Some((17, 40000, 53, None))),
        ("source quench", error(4, &sent(&UDP, 17)), Some((17, 40000, 53, None))),
        ("time exceeded", error(11, &sent(&TCP, 6)), Some((6, 40000, 443, Some(0x1234)))),
        ("parameter problem", error(12, &sent(&TCP, 6)), Some((6, 40000, 443, Some(0x1234)))),
        ("about a ping", error(11, &sent(&echo, 1)), Some((1, 7, 7, None))),
        ("about GRE", error(3, &sent(&[0; 8], 47)), Some((47, 0, 0, None))),
        ("a redirect", error(5, &sent(&TCP, 6)), None),
        ("an echo reply", error(0, &sent(&TCP, 6)), None),
        ("about an error", error(3, &sent(&icmp(3, &[]), 1)), None),
        ("about a later fragment", error(3, &later), None),
        ("no quote", error(3, &[]), None),
        ("half a quote", error(3, &sent(&TCP, 6)[..19]), None),
        ("for another host", ip4(ROUTER, SERVER, 1, &icmp(3, &sent(&TCP, 6))), None),
        ("not ICMP", ip4(ROUTER, CLIENT, 17, &icmp(3, &sent(&TCP, 6))), None),
    ];
    for (title, packet, want) in rows {
        // The quote of the last row is malformed UDP.
        let is = wire::parse(LinkType::RAW, &packet, packet.len() as u32)
            .ok()
            .and_then(|packet| Quoted::of(&packet));
        let is = is.map(|Quoted { flow, tcp_seq }| {
            assert_eq!(flow.ends, Ends::V4(CLIENT.into(), SERVER.into()), "{title}");
            (flow.proto, flow.src_port, flow.dst_port, tcp_seq)
        });
        assert_eq!(is, want, "{title}");
    }
}

#[test]
fn quotes_of_icmpv6_errors() {
    let (client, server, router) = ("2001:db8::1", "2001:db8:1::1", "2001:db8:2::1");
    let mut sent = ip6(client, server, 17, &UDP);
    sent[4..6].copy_from_slice(&1400_u16.to_be_bytes());
    for (kind, is) in [(1, true), (2, true), (3, true), (4, true), (128, false), (135, false)] {
        let error = ip6(router, client, 58, &icmp(kind, &sent));
        assert_eq!(quoted(&error).is_some(), is, "type {kind}");
    }
    // An IPv6 quote is not valid in an IPv4 error.
    assert_eq!(quoted(&ip4(ROUTER, CLIENT, 1, &icmp(3, &sent))), None);
}

#[test]
fn an_error_matches_the_state_without_changing_it() {
    let mut states = States::new(Settings::default(), 1);
    let now = Time::from_secs(1);
    let flow = Flow {
        ends: Ends::V4(CLIENT.into(), SERVER.into()),
        proto: 6,
        src_port: 40000,
        dst_port: 443,
        zone: 0,
    };
    let segment = Segment { tcp_flags: 2, bytes: 60, ..Segment::default() };
    states.install(&flow, Name::DEFAULT, &segment, RuleId(9), &Install::default(), now).unwrap();
    let before: Vec<_> = states.list(now).collect();

    let rows = [
        (ip4(ROUTER, CLIENT, 1, &icmp(11, &longer(ip4(CLIENT, SERVER, 6, &TCP)))), Some(Direction::Reverse)),
        // The server's packets have the state's reverse direction, errors about them the forward direction.
        (
            ip4(
                ROUTER,
                SERVER,
                1,
                &icmp(11, &longer(ip4(SERVER, CLIENT, 6, &[1, 0xbb, 0x9c, 0x40, 0, 0, 0, 1]))),
            ),
            Some(Direction::Forward),
        ),
        (ip4(ROUTER, CLIENT, 1, &icmp(11, &longer(ip4(CLIENT, SERVER, 17, &UDP)))), None),
    ];
    for (error, direction) in rows {
        let hit = states.lookup_related(&quoted(&error).unwrap(), Lookup::Any, now);
        assert_eq!(hit.map(|hit| hit.direction), direction);
        assert!(hit.is_none_or(|hit| hit.rule == RuleId(9)));
    }
    assert_eq!(states.list(now).collect::<Vec<_>>(), before);
    assert_eq!(states.counters().related, 2);
    let late = Time::from_secs(21);
    let error = ip4(ROUTER, CLIENT, 1, &icmp(11, &longer(ip4(CLIENT, SERVER, 6, &TCP))));
    assert_eq!(states.lookup_related(&quoted(&error).unwrap(), Lookup::Any, late), None);
}
