//! A flood of small packets, for measurements of the gate and the ring.

use std::net::{IpAddr, Ipv4Addr};

use etherparse::TcpHeader;
use towpath_port::{Error, Frame, LinkType, pcap};

use super::frames::{Host, Path, Random};

/// Half of them UDP, half TCP.
const FLOWS: usize = 2_000;
/// Every frame.
const LEN: usize = 64;
/// A million packets a second.
const INTERVAL_NS: u64 = 1_000;
const START_NS: u64 = 1_714_982_400_000_000_000;

const TCP_PORTS: [u16; 3] = [80, 443, 22];
const UDP_PORTS: [u16; 3] = [53, 123, 5060];

struct Flow {
    forward: Path,
    ports: (u16, u16),
    tcp: bool,
    packets: u64,
}

/// Writes `packets` packets of 64 bytes of 2,000 flows in both directions. TCP flows begin with their handshake and
/// then carry 10 bytes a segment.
pub(crate) fn write(packets: u64, file: &mut pcap::Writer) -> Result<(), Error> {
    let mut random = Random(2);
    let mut flows: Vec<Flow> = (0..FLOWS).map(Flow::new).collect();
    for index in 0..packets {
        let flow = &mut flows[random.within(0..FLOWS as u64) as usize];
        let bytes = flow.next();
        assert_eq!(bytes.len(), LEN, "length of a frame");
        let time_ns = START_NS + index * INTERVAL_NS;
        let frame = Frame {
            bytes: &bytes,
            wire_len: LEN as u32,
            time_ns,
            link: LinkType::ETHERNET,
            interface: 0,
            meta: Default::default(),
        };
        file.write(frame, None)?;
    }
    Ok(())
}

impl Flow {
    fn new(index: usize) -> Self {
        let (high, low) = ((index >> 8) as u8, index as u8);
        let host = |mac, ip| Host { mac, ip: IpAddr::V4(ip), ttl: 64 };
        let client = host([2, 0, 0, 0, high, low], Ipv4Addr::new(10, 0, high, low));
        let server = host([2, 0, 0, 1, 0, 1], Ipv4Addr::new(10, 1, 0, (index % 100) as u8));
        let tcp = index.is_multiple_of(2);
        let port = if tcp { TCP_PORTS } else { UDP_PORTS }[index / 2 % 3];
        Self { forward: Path::new(client, server), ports: (20_000 + index as u16, port), tcp, packets: 0 }
    }

    /// Its next packet: from the client and from the server in turn.
    fn next(&mut self) -> Vec<u8> {
        let count = self.packets;
        self.packets += 1;
        let (id, back) = (count as u16, count % 2 == 1);
        let (path, ports) = match back {
            false => (self.forward, self.ports),
            true => (self.forward.reverse(), (self.ports.1, self.ports.0)),
        };
        if !self.tcp {
            let mut payload = [b'.'; LEN - 14 - 20 - 8];
            payload[..8].copy_from_slice(&count.to_be_bytes());
            return path.udp(id, ports, &payload);
        }
        let mut header = TcpHeader::new(ports.0, ports.1, 0, 64_240);
        header.syn = count < 2;
        header.ack = count > 0;
        header.psh = count >= 2;
        // Each side has sent its SYN and, of the segments before this one, every other.
        let sent = |segments: u64| 1 + (segments * 10) as u32;
        match count {
            0 => {}
            1 => header.acknowledgment_number = 1,
            _ => {
                header.sequence_number = sent(count / 2 - 1);
                header.acknowledgment_number = sent(count.div_ceil(2) - 1);
            }
        }
        let payload = if header.syn { &[][..] } else { b"0123456789" };
        let mut frame = path.tcp(id, header, payload);
        frame.resize(LEN, 0); // a SYN is shorter
        frame
    }
}
