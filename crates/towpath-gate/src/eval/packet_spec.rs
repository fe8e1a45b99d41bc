//! Packet specifications: a packet in words, for `explain` and for tests, such as `in cap0 tcp 10.0.0.1:1234 >
//! 10.0.0.2:22 syn`.
//!
//! Format: `[in|out] [PORT] PROTOCOL SRC[:PORT] > DST[:PORT] [FIELD...]`. The default direction is `in`; without PORT
//! the packet has no interface. The protocol is a name, a number, or `ip` for protocol 253. Frames that are not IP are
//! written `arp` or `ether TYPE`.
//!
//! Fields: TCP flags (`syn ack fin rst psh urg ece cwr`), `type N`, `code N`, `ttl N`, `tos N`, `id N`, `df`,
//! `mf`, `offset N` (in units of 8 bytes), `len N` (bytes of payload), `mss N`, `seq N`, `ackno N`, `win N`,
//! `ipopt NAME` (ssrr, lsrr, rr, ts), `tcpopt NAME` (window, sack, ts, cc), `flow N`, `vlan N`, `dmac MAC`, `smac
//! MAC`, `ext NAME` (hopopt, route, dstopt).

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use super::walk::Dir;
use crate::rules::protocol::Protocol;
use crate::state::{Ends, Flow};
use towpath_wire::{LinkType, proto};

/// A packet built from a specification: an Ethernet frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketSpec {
    /// Direction.
    pub dir: Dir,
    /// Name of the port, if the specification has one.
    pub port: Option<String>,
    /// The frame.
    pub frame: Vec<u8>,
}

/// The text is not a packet specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketSpecError(String);

impl fmt::Display for PacketSpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; write a packet as \"in cap0 tcp 10.0.0.1:1234 > 10.0.0.2:22 syn\"", self.0)
    }
}

impl std::error::Error for PacketSpecError {}

fn bad(message: impl Into<String>) -> PacketSpecError {
    PacketSpecError(message.into())
}

impl PacketSpec {
    /// Parses a specification.
    ///
    /// # Errors
    /// [`PacketSpecError`] names the wrong word.
    pub fn parse(text: &str) -> Result<Self, PacketSpecError> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut at = 0;
        let dir = match words.first() {
            Some(&"in") => Dir::In,
            Some(&"out") => Dir::Out,
            _ => Dir::In,
        };
        if matches!(words.first(), Some(&("in" | "out"))) {
            at += 1;
        }
        let arrow = words.iter().position(|word| *word == ">");
        let port_named = match arrow {
            Some(arrow) => arrow == at + 3,
            None => matches!(words.get(at + 1), Some(&("arp" | "ether"))),
        };
        let port = if port_named { words.get(at).map(|word| (*word).to_owned()) } else { None };
        at += usize::from(port_named);
        let word = *words.get(at).ok_or_else(|| bad("the protocol is missing"))?;
        let mut packet = PacketFields::default();
        if word == "arp" {
            packet.options(words.get(at + 1..).unwrap_or_default())?;
            return Ok(Self { dir, port, frame: packet.ethernet(0x0806, &[0; 28]) });
        }
        if word == "ether" {
            let kind = words.get(at + 1).copied().unwrap_or_default();
            let kind = u16::from_str_radix(kind.strip_prefix("0x").unwrap_or(kind), 16)
                .map_err(|_| bad(format!("\"{kind}\" is not an EtherType: write it as 0x88cc")))?;
            packet.options(words.get(at + 2..).unwrap_or_default())?;
            return Ok(Self { dir, port, frame: packet.ethernet(kind, &vec![0; packet.len.max(46)]) });
        }
        packet.proto = match Protocol::parse(word) {
            Some(Protocol::Number(number)) => number,
            Some(_) => 253,
            // The word is a port name; the protocol follows it.
            None if arrow.is_none()
                && words.get(at + 1).is_some_and(|next| Protocol::parse(next).is_some()) =>
            {
                return Err(bad("\">\" is missing between the addresses"));
            }
            None => return Err(bad(format!("unknown protocol \"{word}\""))),
        };
        let ends = words.get(at + 1..at + 4).ok_or_else(|| bad("the addresses are missing"))?;
        if ends[1] != ">" {
            return Err(bad("\">\" is missing between the addresses"));
        }
        let (src, sport) = end(ends[0])?;
        let (dst, dport) = end(ends[2])?;
        packet.ports = (sport, dport);
        packet.options(words.get(at + 4..).unwrap_or_default())?;
        let frame = match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                packet.ethernet(0x0800, &packet.v4(src.octets(), dst.octets()))
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                packet.ethernet(0x86dd, &packet.v6(src.octets(), dst.octets()))
            }
            _ => return Err(bad("the addresses are of different families")),
        };
        Ok(Self { dir, port, frame })
    }

    /// Link type of the frame.
    pub fn link(&self) -> LinkType {
        LinkType::ETHERNET
    }
}

/// Returns a frame that may start a flow: a TCP segment with these flags, an ICMP echo request, or a packet of another
/// protocol without data.
pub(super) fn first_packet(flow: &Flow, flags: u8) -> Vec<u8> {
    let Flow { proto, src_port, dst_port, ends, .. } = *flow;
    let kind = match proto {
        proto::ICMP => 8,
        proto::ICMP6 => 128,
        _ => 0,
    };
    let packet = PacketFields {
        proto,
        ports: (src_port, dst_port),
        flags,
        icmp: (kind, 0),
        echo: (src_port, 0),
        ..PacketFields::default()
    };
    match ends {
        Ends::V4(src, dst) => packet.ethernet(0x0800, &packet.v4(src.octets(), dst.octets())),
        Ends::V6(src, dst, _) => packet.ethernet(0x86dd, &packet.v6(src.octets(), dst.octets())),
    }
}

/// Parses `10.0.0.1`, `10.0.0.1:80`, `::1` or `[::1]:80`.
fn end(text: &str) -> Result<(IpAddr, u16), PacketSpecError> {
    if let Ok(ip) = text.parse() {
        return Ok((ip, 0));
    }
    let socket: SocketAddr =
        text.parse().map_err(|_| bad(format!("\"{text}\" is not an address or address:port")))?;
    Ok((socket.ip(), socket.port()))
}

/// The fields of a specification.
struct PacketFields {
    proto: u8,
    ports: (u16, u16),
    flags: u8,
    icmp: (u8, u8),
    /// Identifier and sequence number of an ICMP query.
    echo: (u16, u16),
    ttl: u8,
    tos: u8,
    id: u16,
    fragment: u16,
    len: usize,
    mss: Option<u16>,
    seq: u32,
    ack: u32,
    window: u16,
    flow: u32,
    vlan: Option<u16>,
    dmac: [u8; 6],
    smac: [u8; 6],
    extensions: Vec<u8>,
    /// Options of the IPv4 header and the TCP header, padded to 32-bit words.
    ip_options: Vec<u8>,
    tcp_options: Vec<u8>,
}

impl Default for PacketFields {
    fn default() -> Self {
        Self {
            proto: 0,
            ports: (0, 0),
            flags: 0,
            icmp: (0, 0),
            echo: (0, 0),
            ttl: 64,
            tos: 0,
            id: 0,
            fragment: 0,
            len: 0,
            mss: None,
            seq: 0,
            ack: 0,
            window: 65535,
            flow: 0,
            vlan: None,
            dmac: [2, 0, 0, 0, 0, 2],
            smac: [2, 0, 0, 0, 0, 1],
            extensions: Vec::new(),
            ip_options: Vec::new(),
            tcp_options: Vec::new(),
        }
    }
}

impl PacketFields {
    fn options(&mut self, words: &[&str]) -> Result<(), PacketSpecError> {
        let mut words = words.iter().flat_map(|word| word.split(','));
        while let Some(word) = words.next() {
            let mut number = |hi: u32| {
                let text =
                    words.next().ok_or_else(|| bad(format!("a number is missing after \"{word}\"")))?;
                let value = match text.strip_prefix("0x") {
                    Some(hex) => u32::from_str_radix(hex, 16).ok(),
                    None => text.parse().ok(),
                };
                value
                    .filter(|value| *value <= hi)
                    .ok_or_else(|| bad(format!("\"{text}\" after \"{word}\" is not a number from 0 to {hi}")))
            };
            match word {
                "fin" => self.flags |= 0x01,
                "syn" => self.flags |= 0x02,
                "rst" => self.flags |= 0x04,
                "psh" => self.flags |= 0x08,
                "ack" => self.flags |= 0x10,
                "urg" => self.flags |= 0x20,
                "ece" => self.flags |= 0x40,
                "cwr" => self.flags |= 0x80,
                "type" => self.icmp.0 = number(255)? as u8,
                "code" => self.icmp.1 = number(255)? as u8,
                "ttl" => self.ttl = number(255)? as u8,
                "tos" => self.tos = number(255)? as u8,
                "id" => self.id = number(65535)? as u16,
                "df" => self.fragment |= 0x4000,
                "mf" => self.fragment |= 0x2000,
                "offset" => self.fragment |= number(8191)? as u16,
                "len" => self.len = number(60_000)? as usize,
                "mss" => self.mss = Some(number(65535)? as u16),
                "seq" => self.seq = number(u32::MAX)?,
                "ackno" => self.ack = number(u32::MAX)?,
                "win" => self.window = number(65535)? as u16,
                "flow" => self.flow = number(0xf_ffff)?,
                "vlan" => self.vlan = Some(number(4095)? as u16),
                "dmac" => self.dmac = mac(words.next())?,
                "smac" => self.smac = mac(words.next())?,
                "ipopt" => add_option(&mut self.ip_options, words.next(), IP_OPTIONS, 40)?,
                "tcpopt" => add_option(&mut self.tcp_options, words.next(), TCP_OPTIONS, 36)?,
                "ext" => self.extensions.push(match words.next() {
                    Some("hopopt") => proto::HOPOPT,
                    Some("route") => proto::ROUTE,
                    Some("dstopt") => proto::DSTOPT,
                    other => {
                        return Err(bad(format!(
                            "unknown extension header \"{}\"",
                            other.unwrap_or_default()
                        )));
                    }
                }),
                other => return Err(bad(format!("unknown word \"{other}\""))),
            }
        }
        Ok(())
    }

    fn v4(&self, src: [u8; 4], dst: [u8; 4]) -> Vec<u8> {
        let upper = self.upper();
        let header_len = 20 + self.ip_options.len();
        let length = (header_len + upper.len()) as u16;
        let mut header = vec![0x40 | (header_len / 4) as u8, self.tos];
        header.extend(length.to_be_bytes());
        header.extend(self.id.to_be_bytes());
        header.extend(self.fragment.to_be_bytes());
        header.extend([self.ttl, self.proto, 0, 0]);
        header.extend(src);
        header.extend(dst);
        header.extend(&self.ip_options);
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        header.extend(upper);
        header
    }

    fn v6(&self, src: [u8; 16], dst: [u8; 16]) -> Vec<u8> {
        let fragmented = self.fragment & 0x3fff != 0;
        let mut chain = self.extensions.clone();
        if fragmented {
            chain.push(proto::FRAG);
        }
        chain.push(self.proto);
        let upper = self.upper();
        let length = (8 * (chain.len() - 1) + upper.len()) as u16;
        let mut packet = (6u32 << 28 | u32::from(self.tos) << 20 | self.flow).to_be_bytes().to_vec();
        packet.extend(length.to_be_bytes());
        packet.extend([chain[0], self.ttl]);
        packet.extend(src);
        packet.extend(dst);
        for pair in chain.windows(2) {
            if pair[0] == proto::FRAG {
                let offset = self.fragment << 3 | u16::from(self.fragment & 0x2000 != 0);
                packet.extend([pair[1], 0]);
                packet.extend(offset.to_be_bytes());
                packet.extend(u32::from(self.id).to_be_bytes());
            } else {
                // Six bytes of PadN; for a routing header, no segments left.
                let body = if pair[0] == proto::ROUTE { [3, 0, 0, 0, 0, 0] } else { [1, 4, 0, 0, 0, 0] };
                packet.extend([pair[1], 0]);
                packet.extend(body);
            }
        }
        packet.extend(upper);
        packet
    }

    /// Returns the upper-layer header and the payload. A later fragment has only the payload.
    fn upper(&self) -> Vec<u8> {
        let mut upper = Vec::new();
        if self.fragment & 0x1fff == 0 {
            let ports = [self.ports.0.to_be_bytes(), self.ports.1.to_be_bytes()].concat();
            match self.proto {
                proto::TCP => {
                    let words = 5 + u8::from(self.mss.is_some()) + (self.tcp_options.len() / 4) as u8;
                    upper.extend(ports);
                    upper.extend(self.seq.to_be_bytes());
                    upper.extend(self.ack.to_be_bytes());
                    upper.extend([words << 4, self.flags]);
                    upper.extend(self.window.to_be_bytes());
                    upper.extend([0; 4]);
                    if let Some(mss) = self.mss {
                        upper.extend([2, 4]);
                        upper.extend(mss.to_be_bytes());
                    }
                    upper.extend(&self.tcp_options);
                }
                proto::UDP | proto::UDPLITE => {
                    upper.extend(ports);
                    upper.extend((8 + self.len as u16).to_be_bytes());
                    upper.extend([0; 2]);
                }
                proto::SCTP => {
                    upper.extend(ports);
                    upper.extend([0; 8]);
                }
                proto::DCCP => {
                    upper.extend(ports);
                    upper.extend([4, 0, 0, 0, 2 << 1, 0, 0, 0, 0, 0, 0, 0]);
                }
                proto::ICMP | proto::ICMP6 => {
                    upper.extend([self.icmp.0, self.icmp.1, 0, 0]);
                    upper.extend([self.echo.0.to_be_bytes(), self.echo.1.to_be_bytes()].concat());
                }
                _ => {}
            }
        }
        upper.extend(std::iter::repeat_n(0, self.len));
        upper
    }

    fn ethernet(&self, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = [self.dmac, self.smac].concat();
        if let Some(vlan) = self.vlan {
            frame.extend([0x81, 0x00]);
            frame.extend(vlan.to_be_bytes());
        }
        frame.extend(ethertype.to_be_bytes());
        frame.extend(payload);
        frame
    }
}

/// Options by their names in the rule language, with their bytes.
type Options = &'static [(&'static str, &'static [u8])];
const IP_OPTIONS: Options =
    &[("ssrr", &[137, 3, 4]), ("lsrr", &[131, 3, 4]), ("rr", &[7, 3, 4]), ("ts", &[68, 4, 5, 0])];
const TCP_OPTIONS: Options = &[
    ("window", &[3, 3, 7]),
    ("sack", &[4, 2]),
    ("ts", &[8, 10, 0, 0, 0, 1, 0, 0, 0, 0]),
    ("cc", &[11, 6, 0, 0, 0, 1]),
];

/// Appends an option and pads with no-operation (1) to the next word. `room` is the maximum total length.
fn add_option(
    all: &mut Vec<u8>,
    name: Option<&str>,
    known: Options,
    room: usize,
) -> Result<(), PacketSpecError> {
    let option = known.iter().find(|(known, _)| Some(*known) == name);
    let (_, bytes) = option.ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
        bad(format!("unknown option \"{}\", use one of {}", name.unwrap_or_default(), names.join(", ")))
    })?;
    all.extend(*bytes);
    all.resize(all.len().next_multiple_of(4), 1);
    if all.len() > room { Err(bad("the options do not fit into the header")) } else { Ok(()) }
}

fn mac(text: Option<&str>) -> Result<[u8; 6], PacketSpecError> {
    let text = text.ok_or_else(|| bad("an Ethernet address is missing"))?;
    crate::rules::mac(text).ok_or_else(|| bad(format!("\"{text}\" is not an Ethernet address")))
}

/// Internet checksum (RFC 1071).
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}
