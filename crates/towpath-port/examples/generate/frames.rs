//! Frames with correct lengths and checksums, as hosts of the story send them.

use std::net::IpAddr;

use etherparse::{
    IpFragOffset, IpHeaders, IpNumber, Ipv4Header, Ipv6Header, PacketBuilder, PacketBuilderStep, TcpHeader,
    UdpHeader, VlanId,
};

/// Ethernet frames are at least this long, without the frame check sequence; shorter ones are padded.
const MIN_FRAME: usize = 60;
/// Maximum UDP payload of one IPv4 packet of 1,500 bytes.
const FRAGMENT: usize = 1_480;

/// One end of a conversation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host {
    /// MAC address: its own on the local network, the gateway's elsewhere.
    pub(crate) mac: [u8; 6],
    pub(crate) ip: IpAddr,
    pub(crate) ttl: u8,
}

impl Host {
    /// Creates a host. An invalid address ends the program.
    pub(crate) fn new(mac: [u8; 6], ip: &str, ttl: u8) -> Self {
        Self { mac, ip: ip.parse().unwrap_or_else(|error| panic!("{ip}: {error}")), ttl }
    }
}

/// Fields of an IPv4 header besides the addresses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ip4<'a> {
    pub(crate) proto: u8,
    /// Fragment offset, in units of eight bytes.
    pub(crate) offset: u16,
    pub(crate) more: bool,
    pub(crate) options: &'a [u8],
}

/// The addresses and TTL of packets from one host to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    pub(crate) from: Host,
    pub(crate) to: Host,
    pub(crate) vlan: Option<u16>,
}

impl Path {
    pub(crate) fn new(from: Host, to: Host) -> Self {
        Self { from, to, vlan: None }
    }

    pub(crate) fn reverse(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    pub(crate) fn tcp(self, id: u16, header: TcpHeader, payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        self.ip(id).tcp_header(header).write(&mut frame, payload).expect("lengths that fit");
        padded(frame)
    }

    pub(crate) fn udp(self, id: u16, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        self.ip(id).udp(ports.0, ports.1).write(&mut frame, payload).expect("lengths that fit");
        padded(frame)
    }

    /// A UDP datagram over IPv4, fragmented if necessary.
    pub(crate) fn udp_fragments(self, id: u16, ports: (u16, u16), payload: &[u8]) -> Vec<Vec<u8>> {
        let mut ip = self.ipv4(id);
        let udp = UdpHeader::with_ipv4_checksum(ports.0, ports.1, &ip, payload).expect("a length that fits");
        let datagram = [&udp.to_bytes()[..], payload].concat();
        ip.protocol = IpNumber::UDP;
        ip.dont_fragment = false;
        let mut frames = Vec::new();
        for (index, piece) in datagram.chunks(FRAGMENT).enumerate() {
            let offset = index * FRAGMENT;
            ip.fragment_offset = IpFragOffset::try_new((offset / 8) as u16).expect("an offset that fits");
            ip.more_fragments = offset + piece.len() < datagram.len();
            ip.set_payload_len(piece.len()).expect("a length that fits");
            ip.header_checksum = ip.calc_header_checksum();
            frames.push(padded([&self.ethernet(0x0800)[..], &ip.to_bytes(), piece].concat()));
        }
        frames
    }

    /// An ICMP or ICMPv6 message, depending on the address family.
    pub(crate) fn icmp(self, id: u16, kind: u8, code: u8, rest: [u8; 4], payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        let ip = self.ip(id);
        match self.from.ip {
            IpAddr::V4(_) => ip.icmpv4_raw(kind, code, rest).write(&mut frame, payload),
            IpAddr::V6(_) => ip.icmpv6_raw(kind, code, rest).write(&mut frame, payload),
        }
        .expect("lengths that fit");
        padded(frame)
    }

    /// An ARP request or reply (RFC 826) between the two hosts.
    pub(crate) fn arp(self, operation: u16) -> Vec<u8> {
        let (IpAddr::V4(from), IpAddr::V4(to)) = (self.from.ip, self.to.ip) else {
            panic!("ARP is for IPv4")
        };
        let (to_mac, target) = if operation == 1 { ([0xff; 6], [0; 6]) } else { (self.to.mac, self.to.mac) };
        let ethernet = Self { to: Host { mac: to_mac, ..self.to }, ..self }.ethernet(0x0806);
        let fixed = [0, 1, 8, 0, 6, 4];
        let operation = operation.to_be_bytes();
        padded(
            [&ethernet[..], &fixed, &operation, &self.from.mac, &from.octets(), &target, &to.octets()]
                .concat(),
        )
    }

    /// An IPv4 packet of any protocol, options and place in its datagram.
    pub(crate) fn ip4(self, id: u16, part: Ip4, payload: &[u8]) -> Vec<u8> {
        let mut ip = self.ipv4(id);
        ip.protocol = IpNumber(part.proto);
        ip.options = part.options.try_into().expect("whole words of options");
        ip.fragment_offset = IpFragOffset::try_new(part.offset).expect("13 bits");
        ip.more_fragments = part.more;
        ip.dont_fragment = !part.more && part.offset == 0;
        ip.set_payload_len(payload.len()).expect("a length that fits");
        ip.header_checksum = ip.calc_header_checksum();
        padded([&self.ethernet(0x0800)[..], &ip.to_bytes(), payload].concat())
    }

    /// An IPv6 packet whose first header after IPv6's own is `next`.
    pub(crate) fn ip6(self, next: u8, payload: &[u8]) -> Vec<u8> {
        let (IpAddr::V6(from), IpAddr::V6(to)) = (self.from.ip, self.to.ip) else { panic!("not IPv6") };
        let header = Ipv6Header {
            next_header: IpNumber(next),
            payload_length: payload.len() as u16,
            source: from.octets(),
            destination: to.octets(),
            hop_limit: self.from.ttl,
            ..Default::default()
        };
        padded([&self.ethernet(0x86dd)[..], &header.to_bytes(), payload].concat())
    }

    /// A frame of another protocol than IP.
    pub(crate) fn other(self, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        padded([&self.ethernet(ethertype)[..], payload].concat())
    }

    fn ip(self, id: u16) -> PacketBuilderStep<IpHeaders> {
        let ip = match (self.from.ip, self.to.ip) {
            (IpAddr::V4(_), IpAddr::V4(_)) => IpHeaders::Ipv4(self.ipv4(id), Default::default()),
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let (source, destination) = (from.octets(), to.octets());
                let header =
                    Ipv6Header { source, destination, hop_limit: self.from.ttl, ..Default::default() };
                IpHeaders::Ipv6(header, Default::default())
            }
            families => panic!("one address family, not {families:?}"),
        };
        let ethernet = PacketBuilder::ethernet2(self.from.mac, self.to.mac);
        match self.vlan {
            Some(id) => ethernet.single_vlan(VlanId::try_new(id).expect("12 bits")).ip(ip),
            None => ethernet.ip(ip),
        }
    }

    fn ipv4(self, identification: u16) -> Ipv4Header {
        let (IpAddr::V4(from), IpAddr::V4(to)) = (self.from.ip, self.to.ip) else { panic!("not IPv4") };
        Ipv4Header {
            identification,
            dont_fragment: true,
            time_to_live: self.from.ttl,
            source: from.octets(),
            destination: to.octets(),
            ..Default::default()
        }
    }

    fn ethernet(self, ethertype: u16) -> Vec<u8> {
        let tag = self.vlan.map(|id| [0x81, 0, (id >> 8) as u8, id as u8]);
        let tag = tag.as_ref().map_or(&[][..], |tag| &tag[..]);
        [&self.to.mac[..], &self.from.mac, tag, &ethertype.to_be_bytes()].concat()
    }
}

fn padded(mut frame: Vec<u8>) -> Vec<u8> {
    frame.resize(frame.len().max(MIN_FRAME), 0);
    frame
}

/// A small generator of pseudo-random numbers (splitmix64): the same sequence everywhere and always.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from `range`.
    pub(crate) fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }
}
