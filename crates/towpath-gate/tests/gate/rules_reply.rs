//! Replies to rejected packets, read with an independent parser: addresses, ports, sequence numbers, lengths,
//! checksums.

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;
use towpath_gate::{NoReply, PacketSpec, REPLIES_PER_SECOND, Reject, ReplyLimiter};
use towpath_wire::{self as wire, LinkType, Time};

fn frame(words: &str) -> Vec<u8> {
    PacketSpec::parse(words).unwrap_or_else(|error| panic!("{error}")).frame
}

fn reply_to(frame: &[u8], wire_len: u32, reject: Reject, me: &[&str]) -> Result<Vec<u8>, NoReply> {
    let packet = wire::parse(LinkType::ETHERNET, frame, wire_len).unwrap();
    let me: Vec<_> = me.iter().map(|ip| ip.parse().unwrap()).collect();
    let mut out = vec![0xaa; 7];
    reject.reply(&packet, &me, &mut out).map(|()| out)
}

fn reply(words: &str, reject: Reject, me: &[&str]) -> Result<Vec<u8>, NoReply> {
    let frame = frame(words);
    reply_to(&frame, frame.len() as u32, reject, me)
}

/// Checks that the addresses are swapped and that lengths and checksums are right.
fn check_headers(frame: &[u8], asked: &[u8]) {
    assert_eq!((&frame[..6], &frame[6..12]), (&asked[6..12], &asked[..6]));
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    match sliced.net.unwrap() {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            assert_eq!((header.time_to_live, header.dont_fragment), (64, true));
            let (src, dst) = (ip.header().source(), ip.header().destination());
            match sliced.transport {
                Some(TransportSlice::Tcp(tcp)) => {
                    let right = tcp.to_header().calc_checksum_ipv4_raw(src, dst, tcp.payload()).unwrap();
                    assert_eq!(tcp.checksum(), right);
                }
                Some(TransportSlice::Icmpv4(icmp)) => {
                    assert_eq!(icmp.checksum(), icmp.header().icmp_type.calc_checksum(icmp.payload()))
                }
                _ => {}
            }
        }
        NetSlice::Ipv6(ip) => {
            let (src, dst) = (ip.header().source(), ip.header().destination());
            assert_eq!(ip.header().hop_limit(), 64);
            match sliced.transport {
                Some(TransportSlice::Tcp(tcp)) => {
                    let right = tcp.to_header().calc_checksum_ipv6_raw(src, dst, tcp.payload()).unwrap();
                    assert_eq!(tcp.checksum(), right);
                }
                Some(TransportSlice::Icmpv6(icmp)) => {
                    let right = icmp.header().icmp_type.calc_checksum(src, dst, icmp.payload()).unwrap();
                    assert_eq!(icmp.checksum(), right);
                }
                _ => {}
            }
        }
        NetSlice::Arp(_) => panic!("an answer that is ARP"),
    }
}

/// RFC 9293 section 3.5.2: rejected segments, and sequence number, acknowledgement number and flags of the reset.
#[test]
fn resets() {
    let rows = [
        ("syn seq 1000", (0, 1001, 0x14)),
        ("syn seq 4294967295", (0, 0, 0x14)),
        ("syn seq 1000 mss 1460", (0, 1001, 0x14)),
        ("syn seq 1000 len 10", (0, 1011, 0x14)),
        ("fin seq 1000 len 5", (0, 1006, 0x14)),
        ("psh seq 1000 len 5", (0, 1005, 0x14)),
        ("seq 7", (0, 7, 0x14)),
        ("ack seq 1000 ackno 77 len 5", (77, 0, 0x04)),
        ("syn ack seq 1000 ackno 77", (77, 0, 0x04)),
        ("fin ack seq 1000 ackno 0", (0, 0, 0x04)),
    ];
    for (words, want) in rows {
        for (from, to) in [("10.0.0.1:40000", "192.0.2.1:23"), ("[2001:db8::1]:40000", "[2001:db8::2]:23")] {
            let words = format!("tcp {from} > {to} {words} vlan 7");
            let bytes = reply(&words, Reject::Reset, &["203.0.113.1"]).unwrap();
            check_headers(&bytes, &frame(&words));
            let back = wire::parse(LinkType::ETHERNET, &bytes, bytes.len() as u32).unwrap();
            assert_eq!((back.tcp_seq, back.tcp_ack, back.tcp_flags), want, "{words}");
            assert_eq!((back.src_port, back.dst_port, back.vlan), (23, 40000, Some(7)), "{words}");
            // A reset has the address of the peer of the connection as its source, not an address of the port.
            assert_eq!(
                Some(back.flow().unwrap()),
                wire::parse(LinkType::ETHERNET, &frame(&words), 999)
                    .unwrap()
                    .flow()
                    .map(|flow| flow.reversed())
            );
        }
    }
    assert_eq!(reply("tcp 10.0.0.1:1 > 10.0.0.2:2 rst", Reject::Reset, &[]), Err(NoReply::Reset));
    assert_eq!(reply("udp 10.0.0.1:1 > 10.0.0.2:2", Reject::Reset, &[]), Err(NoReply::OtherProtocol));
}

#[test]
fn unreachables_quote_the_packet() {
    let words = "udp 10.0.0.1:40000 > 192.0.2.1:53 len 900 id 77 ttl 3 vlan 12";
    let asked = frame(words);
    let bytes = reply(words, Reject::Unreach { code: 4, mtu: 1400 }, &[]).unwrap();
    check_headers(&bytes, &asked);
    let ip = &bytes[18..];
    assert_eq!((ip.len(), ip[1], ip[9]), (576, 0xc0, 1));
    assert_eq!((&ip[12..16], &ip[16..20]), (&[192, 0, 2, 1][..], &[10, 0, 0, 1][..]));
    assert_eq!((&ip[20..22], &ip[24..28]), (&[3, 4][..], &[0, 0, 0x05, 0x78][..]));
    assert_eq!(ip[28..], asked[18..18 + 548]);
    // The source is an address of the port, if it has one. Only needfrag has an MTU.
    let bytes = reply(words, Reject::Unreach { code: 3, mtu: 9 }, &["2001:db8::9", "203.0.113.1"]).unwrap();
    assert_eq!((&bytes[30..34], &bytes[42..46]), (&[203, 0, 113, 1][..], &[0; 4][..]));
    // A short packet is quoted completely, without the padding of its link.
    let mut short = frame("udp 10.0.0.1:40000 > 192.0.2.1:53 len 4");
    short.resize(60, 0x55);
    let bytes = reply_to(&short, 60, Reject::Unreach { code: 3, mtu: 0 }, &[]).unwrap();
    assert_eq!((bytes.len(), &bytes[42..]), (14 + 28 + 32, &short[14..46]));

    let words = "udp [2001:db8::1]:40000 > [2001:db8::2]:53 len 2000 ext hopopt";
    let asked = frame(words);
    let bytes = reply(words, Reject::Unreach6 { code: 1 }, &["fe80::1", "2001:db8::9"]).unwrap();
    check_headers(&bytes, &asked);
    let ip = &bytes[14..];
    assert_eq!((ip.len(), ip[6], &ip[40..42]), (1280, 58, &[1, 1][..]));
    assert_eq!(ip[8..24], "2001:db8::9".parse::<std::net::Ipv6Addr>().unwrap().octets());
    assert_eq!(ip[48..], asked[14..14 + 1232]);
    assert_eq!(reply(words, Reject::Unreach { code: 1, mtu: 0 }, &[]), Err(NoReply::OtherFamily));

    // A router replies with the maximum length of a packet.
    let packet = wire::parse(LinkType::ETHERNET, &asked, asked.len() as u32).unwrap();
    assert_eq!(Reject::too_big(&packet, 1400), Reject::TooBig { mtu: 1400 });
    let bytes = reply(words, Reject::TooBig { mtu: 1400 }, &[]).unwrap();
    check_headers(&bytes, &asked);
    assert_eq!((&bytes[54..56], &bytes[58..62]), (&[2, 0][..], &[0, 0, 0x05, 0x78][..]));
}

/// RFC 9260 section 8.4: chunks and verification tag of the packet; verification tag of the ABORT and its T bit.
#[test]
fn aborts() {
    let init = [1, 0, 0, 20, 0xca, 0xfe, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0];
    let data = [0, 3, 0, 17, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0];
    let abort = [6, 0, 0, 4];
    let both = [&data[..], &abort].concat();
    type Row<'a> = (&'a [u8], u32, Result<(u32, u8), NoReply>);
    let rows: [Row<'_>; 9] = [
        (&init, 0, Ok((0xcafe_0001, 0))),
        (&data, 0x0102_0304, Ok((0x0102_0304, 1))),
        (&[], 0x0102_0304, Ok((0x0102_0304, 1))),
        (&[7, 0, 0, 8, 0, 0, 0, 0], 5, Ok((5, 1))),
        (&init, 7, Err(NoReply::NoSctpTag)),
        (&data, 0, Err(NoReply::NoSctpTag)),
        (&abort, 7, Err(NoReply::Reset)),
        (&both, 7, Err(NoReply::Reset)),
        (&[14, 0, 0, 4], 7, Err(NoReply::Reset)),
    ];
    for (chunks, tag, want) in rows {
        for ends in ["10.0.0.1:40000 > 192.0.2.1:23", "[2001:db8::1]:40000 > [2001:db8::2]:23"] {
            let words = format!("sctp {ends}");
            let mut asked = frame(&format!("{words} len {}", chunks.len()));
            let at = asked.len() - chunks.len();
            asked[at..].copy_from_slice(chunks);
            asked[at - 8..at - 4].copy_from_slice(&tag.to_be_bytes());
            let got = reply_to(&asked, asked.len() as u32, Reject::Abort, &[]);
            let got = got.map(|bytes| {
                check_headers(&bytes, &asked);
                let sctp = &bytes[bytes.len() - 16..];
                assert_eq!(&sctp[..4], [0, 23, 0x9c, 0x40]);
                assert_eq!((sctp[12], &sctp[14..]), (6, &[0, 4][..]));
                let sum = u32::from_le_bytes(sctp[8..12].try_into().unwrap());
                assert_eq!(sum, crc32c(&[&sctp[..8], &[0; 4], &sctp[12..]].concat()));
                (u32::from_be_bytes(sctp[4..8].try_into().unwrap()), sctp[13])
            });
            assert_eq!(got, want, "{chunks:?} {tag}");
        }
    }
}

/// Bitwise CRC32c, as in RFC 9260, appendix A.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

#[test]
fn truncated_captures_get_no_reply() {
    let asked = frame("tcp 10.0.0.1:1 > 10.0.0.2:2 ack len 100");
    let cut = |length: usize, reject| reply_to(&asked[..length], asked.len() as u32, reject, &[]);
    let unreach = Reject::Unreach { code: 1, mtu: 0 };
    assert_eq!(cut(50, Reject::Reset).map(drop), Err(NoReply::Truncated));
    assert_eq!(cut(54, Reject::Reset).map(drop), Ok(()));
    assert_eq!(cut(41, unreach).map(drop), Err(NoReply::Truncated));
    assert_eq!(cut(42, unreach).map(|bytes| bytes.len()), Ok(42 + 28));
}

#[test]
fn link_headers_are_reversed() {
    let asked = frame("tcp 10.0.0.1:1 > 10.0.0.2:2 ack len 100");
    let length = asked.len() as u16 - 14 + 8;
    let [high, low] = length.to_be_bytes();
    let macs = |bytes: &[u8]| [&bytes[..6], &bytes[6..12]].map(<[u8]>::to_vec);
    // The length field of an 802.2 header is that of the reply.
    for tags in [&[][..], &[0x81, 0, 0, 7]] {
        let mut snap = asked[..12].to_vec();
        snap.extend(tags);
        snap.extend([high, low, 0xaa, 0xaa, 3, 0, 0, 0, 8, 0]);
        snap.extend(&asked[14..]);
        let answer = reply_to(&snap, snap.len() as u32, Reject::Reset, &[]).unwrap();
        let at = 12 + tags.len();
        let [dst, src] = macs(&snap);
        assert_eq!(macs(&answer), [src, dst]);
        assert_eq!(answer[12..at], *tags);
        assert_eq!(usize::from(u16::from_be_bytes([answer[at], answer[at + 1]])), answer.len() - at - 2);
        assert_eq!(answer[at + 2..at + 10], [0xaa, 0xaa, 3, 0, 0, 0, 8, 0]);
        assert_eq!(answer.len(), at + 10 + 40);
        assert!(towpath_wire::checksum::fill(LinkType::ETHERNET, &mut answer.clone(), answer.len() as u32));
    }
    // Cooked captures: a packet to this host, a broadcast, a multicast. The reply is sent by this host.
    let sll = [0, 0, 0, 1, 0, 6, 2, 0, 0, 0, 0, 9, 0, 0, 8, 0];
    let sll2 = [8, 0, 0, 0, 0, 0, 0, 3, 0, 1, 0, 6, 2, 0, 0, 0, 0, 9, 0, 0];
    let back = [
        &[0, 4, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0][..],
        &[8, 0, 0, 0, 0, 0, 0, 3, 0, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ];
    let headers = [(LinkType::LINUX_SLL, &sll[..], 1, back[0]), (LinkType::LINUX_SLL2, &sll2, 10, back[1])];
    for (link, header, kind, back) in headers {
        for (value, want) in [(0, Ok(back)), (1, Err(NoReply::Multicast)), (2, Err(NoReply::Multicast))] {
            let mut frame = header.to_vec();
            frame[kind] = value;
            frame.extend(&asked[14..]);
            let packet = wire::parse(link, &frame, frame.len() as u32).unwrap();
            let mut out = Vec::new();
            let got = Reject::Reset.reply(&packet, &[], &mut out).map(|()| &out[..header.len()]);
            assert_eq!(got, want, "{link:?} {value}");
        }
    }
}

#[test]
fn replies_are_limited_to_200_per_second() {
    let mut limit = ReplyLimiter::default();
    let mut sent: Vec<u64> = Vec::new();
    // In steps of 1 ms, then of 100 ms.
    let times = (0..3000).map(|ms| ms * 1_000_000).chain((30..90).map(|tenth| tenth * 100_000_000));
    for nanos in times {
        for _ in 0..3 {
            if limit.take(Time::from_nanos(nanos)) {
                sent.push(nanos);
            }
        }
    }
    for window in sent.windows(REPLIES_PER_SECOND + 1) {
        assert!(window[REPLIES_PER_SECOND] - window[0] >= 1_000_000_000);
    }
    assert_eq!(sent.len(), 600 + 60 * 3);
}

proptest! {
    /// For any packet, the reply parses, gets no reply itself, and has the reverse direction.
    #[test]
    fn a_reply_gets_no_reply(mut bytes in proptest::collection::vec(any::<u8>(), 20..200), kind in 0u8..4, code: u8, six: bool, proto in prop_oneof![Just(6u8), Just(132), Just(17), Just(1), Just(58), any::<u8>()]) {
        let whole = bytes.len();
        if six {
            bytes[0] = 0x60;
            if whole < 40 { return Ok(()); }
            bytes[4..6].copy_from_slice(&((whole - 40) as u16).to_be_bytes());
            bytes[6] = proto;
        } else {
            bytes[0] = 0x45;
            bytes[2..4].copy_from_slice(&(whole as u16).to_be_bytes());
            bytes[6] &= 0x40;
            bytes[7] = 0;
            bytes[9] = proto;
        }
        let Ok(packet) = wire::parse(LinkType::RAW, &bytes, whole as u32) else { return Ok(()) };
        let reject = match kind {
            0 => Reject::Reset,
            1 => Reject::Abort,
            2 if six => Reject::Unreach6 { code },
            2 => Reject::Unreach { code, mtu: 0 },
            _ => Reject::by_inspector(&packet),
        };
        let mut out = Vec::new();
        if reject.reply(&packet, &[], &mut out).is_ok() {
            let back = wire::parse(LinkType::RAW, &out, out.len() as u32).expect("well-formed");
            let most = if six { 1280 } else { 576 };
            prop_assert!(out.len() <= most);
            prop_assert_eq!(back.ip_len as usize, out.len());
            for again in [Reject::by_inspector(&back), reject] {
                prop_assert!(again.reply(&back, &[], &mut Vec::new()).is_err());
            }
        }
    }
}

/// Writes the checksum of the ICMP or ICMPv6 message of an Ethernet frame (RFC 792; RFC 4443 section 2.3).
fn with_icmp_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    let (at, mut summed) = match frame[14] >> 4 {
        4 => (34, Vec::new()),
        _ => {
            let length = (frame.len() - 54) as u32;
            (54, [&frame[22..54], &length.to_be_bytes(), &[0, 0, 0, 58]].concat())
        }
    };
    frame[at + 2..at + 4].fill(0);
    summed.extend(&frame[at..]);
    let words = summed.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum = words.fold(0u32, |sum, word| (sum + word) % 0xffff);
    frame[at + 2..at + 4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    frame
}

/// The reply has the request's data, and no packet that is not a request of one other host has one.
#[test]
fn echo_requests_are_answered() {
    use towpath_gate::echo_reply;
    let reply = |frame: &[u8], verified| {
        let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).unwrap();
        let mut out = vec![0xee; 7];
        echo_reply(&packet, verified, &mut out).map(|()| out)
    };
    let v4 = |words: &str| with_icmp_checksum(frame(&format!("icmp {words}")));
    for (request, network, kind) in [
        (v4("10.0.0.1 > 10.0.0.254 type 8"), 34, 0),
        (with_icmp_checksum(frame("icmp6 2001:db8::1 > 2001:db8::fe type 128")), 54, 129),
    ] {
        let answer = reply(&request, false).unwrap();
        check_headers(&answer, &request);
        assert_eq!(answer.len(), request.len());
        assert_eq!((answer[network], answer[network + 1]), (kind, 0));
        assert_eq!(answer[network + 4..], request[network + 4..]);
        // A sender on this machine leaves the checksum to the interface.
        let mut wrong = request.clone();
        wrong[network + 2] ^= 1;
        assert_eq!(reply(&wrong, false), Err(NoReply::BadChecksum));
        assert_eq!(reply(&wrong, true).unwrap(), answer);
        // Two routers cannot answer each other.
        assert_eq!(reply(&answer, false), Err(NoReply::NotQuery));
    }
    let request = v4("10.0.0.1 > 10.0.0.254 type 8");
    let mut group = request.clone();
    group[6] |= 1;
    assert_eq!(reply(&group, false), Err(NoReply::BadSource));
    assert_eq!(reply(&v4("10.0.0.1 > 224.0.0.1 type 8"), false), Err(NoReply::Multicast));
    assert_eq!(reply(&v4("10.0.0.1 > 10.0.0.1 type 8"), false), Err(NoReply::BadSource));
    assert_eq!(reply(&v4("10.0.0.1 > 10.0.0.254 type 13"), false), Err(NoReply::NotQuery));
}
