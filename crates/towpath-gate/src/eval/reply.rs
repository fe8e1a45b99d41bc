//! Answers to rejected packets: ICMP and ICMPv6 unreachable, TCP RST, SCTP ABORT. Bytes in, bytes out.
//!
//! [`unreach`] and [`reset`] say while the rules are walked whether a packet may be answered at all, and how;
//! [`Reject::reply`] writes the answer; [`ReplyLimiter`] keeps answers from becoming a flood of their own.
//!
//! What holds of every answer:
//! - nothing is answered that could be an answer, or that many would answer (RFC 1122 3.2.2, RFC 1812 4.3.2.7, RFC 4443
//!   2.4): two gates never talk to each other for ever;
//! - it goes back where the packet came from: Ethernet addresses exchanged, VLAN tags and 802.2 headers kept; on a cooked
//!   link it is a packet that was sent by this host;
//! - it is never larger than what was quoted and a header, and it has the checksums that it needs.
//!
//! After ipfw's `send_reject` and `send_reject6`; what differs is in `docs/book/src/reference/rules.md`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crc::{CRC_32_ISCSI, Crc};

use super::walk::Reject;
use towpath_wire::{Addresses, Fragment, LinkType, Packet, Time, checksum, proto};

/// Why a rejected packet is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoReply {
    /// It is not IP.
    NotIp,
    /// The action answers the other family.
    OtherFamily,
    /// The action answers another protocol.
    OtherProtocol,
    /// It is an ICMP message and no query: an error, or an answer.
    NoQuery,
    /// It is a TCP RST or an SCTP ABORT itself.
    Reset,
    /// It was sent to many: a multicast or broadcast address, or a group of stations.
    ToMany,
    /// Its source is no single other host: unspecified, multicast, broadcast, reserved, or the destination itself.
    Source,
    /// It is a later fragment.
    LaterFragment,
    /// The capture does not have the headers that the answer is made from.
    Cut,
    /// An SCTP packet without the tag that an abort must have.
    NoTag,
    /// Its link header is none that is known.
    Link,
}

impl NoReply {
    /// The reason in a few words, as in "not answered: it is ...".
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotIp => "not IP",
            Self::OtherFamily => "of the other family",
            Self::OtherProtocol => "of another protocol",
            Self::NoQuery => "an ICMP message that is no query",
            Self::Reset => "a reset or abort itself",
            Self::ToMany => "a multicast or broadcast",
            Self::Source => "from no single other host",
            Self::LaterFragment => "a later fragment",
            Self::Cut => "cut short by the capture",
            Self::NoTag => "SCTP without a tag to abort with",
            Self::Link => "behind a link header that cannot be turned round",
        }
    }
}

impl fmt::Display for NoReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An unreachable message, if the packet may have one. As in ipfw, a rule of IPv4 answers an IPv6 packet too, with the
/// code that means the same there.
pub(super) fn unreach(packet: &Packet<'_>, answer: Reject) -> Reject {
    let answer = match (packet.addresses, answer) {
        (Addresses::V6(..), Reject::Unreach { code, .. }) => Reject::Unreach6 { code: code6(code) },
        (Addresses::V4(..), Reject::Unreach6 { .. }) => return Reject::NoReply(NoReply::OtherFamily),
        _ => answer,
    };
    forbidden(packet).map_or(answer, Reject::NoReply)
}

/// A reset or abort, if the packet may have one. `six` is true for the actions that answer IPv6 only.
pub(super) fn reset(packet: &Packet<'_>, answer: Reject, six: bool) -> Reject {
    let wanted = if answer == Reject::Reset { proto::TCP } else { proto::SCTP };
    match packet.addresses {
        Addresses::V4(..) if six => Reject::NoReply(NoReply::OtherFamily),
        _ if packet.proto != wanted && packet.addresses != Addresses::None => {
            Reject::NoReply(NoReply::OtherProtocol)
        }
        _ if wanted == proto::TCP && packet.tcp_flags & TCP_RST != 0 => Reject::NoReply(NoReply::Reset),
        _ => forbidden(packet).map_or(answer, Reject::NoReply),
    }
}

impl Reject {
    /// How a packet is answered that an inspector rejects: TCP by a reset, SCTP by an abort, the rest as
    /// administratively prohibited.
    pub fn by_inspector(packet: &Packet<'_>) -> Self {
        match packet.proto {
            proto::TCP => reset(packet, Self::Reset, false),
            proto::SCTP => reset(packet, Self::Abort, false),
            _ => unreach(packet, Self::Unreach { code: UNREACH_FILTER_PROHIB, mtu: 0 }),
        }
    }

    /// How a router answers a packet that it has no route for.
    pub fn no_route(packet: &Packet<'_>) -> Self {
        unreach(packet, Self::Unreach { code: UNREACH_NET, mtu: 0 })
    }

    /// How a router answers a packet that has no hop left.
    pub fn time_exceeded(packet: &Packet<'_>) -> Self {
        forbidden(packet).map_or(Self::TimeExceeded, Self::NoReply)
    }

    /// How a router answers a packet that is longer than the next link takes, and is not to be divided.
    pub fn too_big(packet: &Packet<'_>, mtu: u32) -> Self {
        if matches!(packet.addresses, Addresses::V6(..)) {
            return forbidden(packet).map_or(Self::TooBig { mtu }, Self::NoReply);
        }
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        unreach(packet, Self::Unreach { code: UNREACH_NEEDFRAG, mtu })
    }

    /// Writes the frame that answers `packet` into `out`, in place of what is there. `me` are the addresses of the port
    /// that the packet came in by: an ICMP error is from the first that fits, or else from whom the packet was for.
    ///
    /// # Errors
    /// [`NoReply`] says why there is no answer; what is in `out` is then of no use.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_gate::{Reject, PacketSpec};
    /// use towpath_wire as wire;
    ///
    /// let syn = PacketSpec::parse("tcp 10.0.0.1:40000 > 192.0.2.1:23 syn seq 1000").unwrap();
    /// let packet = wire::parse(syn.link(), &syn.frame, syn.frame.len() as u32).unwrap();
    /// let mut frame = Vec::new();
    /// Reject::Reset.reply(&packet, &[], &mut frame).unwrap();
    /// let reply = wire::parse(syn.link(), &frame, frame.len() as u32).unwrap();
    /// assert_eq!((reply.src_port, reply.dst_port, reply.tcp_flags, reply.tcp_ack), (23, 40000, 0x14, 1001));
    /// ```
    pub fn reply(self, packet: &Packet<'_>, me: &[IpAddr], out: &mut Vec<u8>) -> Result<(), NoReply> {
        if let Some(reason) = forbidden(packet) {
            return Err(reason);
        }
        out.clear();
        link(packet, out)?;
        match self {
            Self::Unreach { code, mtu } => error4(packet, (ICMP_UNREACH, code), mtu, me, out),
            Self::Unreach6 { code } => error6(packet, (ICMP6_UNREACH, code), 0, me, out),
            Self::TooBig { mtu } => error6(packet, (ICMP6_PACKET_TOO_BIG, 0), mtu, me, out),
            // Both with code 0: exceeded in transit (RFC 792, RFC 4443 3.3).
            Self::TimeExceeded if matches!(packet.addresses, Addresses::V4(..)) => {
                error4(packet, (ICMP_TIMXCEED, 0), 0, me, out)
            }
            Self::TimeExceeded => error6(packet, (ICMP6_TIME_EXCEEDED, 0), 0, me, out),
            Self::Reset => tcp_reset(packet, out),
            Self::Abort => sctp_abort(packet, out),
            Self::NoReply(reason) => Err(reason),
        }
    }
}

/// At most this many answers a second leave by one port (ipfw: net.inet.icmp.icmplim).
pub const REPLIES_PER_SECOND: usize = 200;

/// Keeps the answers of one port within [`REPLIES_PER_SECOND`], in whichever second one looks.
#[derive(Clone, Debug)]
pub struct ReplyLimiter {
    /// When the last ones were sent: a ring, of which `oldest` is overwritten next.
    sent: Box<[Option<Time>]>,
    oldest: usize,
}

impl Default for ReplyLimiter {
    fn default() -> Self {
        Self { sent: vec![None; REPLIES_PER_SECOND].into(), oldest: 0 }
    }
}

impl ReplyLimiter {
    /// Whether one more may be sent now; if so it counts as sent.
    pub fn take(&mut self, now: Time) -> bool {
        let oldest = &mut self.sent[self.oldest];
        if oldest.is_some_and(|sent| now.since(sent) < Duration::from_secs(1)) {
            return false;
        }
        *oldest = Some(now);
        self.oldest = (self.oldest + 1) % self.sent.len();
        true
    }
}

const TCP_RST: u8 = 0x04;
const TCP_ACK: u8 = 0x10;
/// ICMP destination unreachable, and two of its codes (RFC 792, RFC 1812 5.2.7.1).
const ICMP_UNREACH: u8 = 3;
/// ICMP_TIMXCEED (netinet/ip_icmp.h), ICMP6_TIME_EXCEEDED (netinet/icmp6.h), ICMP_UNREACH_NET.
const ICMP_TIMXCEED: u8 = 11;
const ICMP6_TIME_EXCEEDED: u8 = 3;
const UNREACH_NET: u8 = 0;
const UNREACH_NEEDFRAG: u8 = 4;
const UNREACH_FILTER_PROHIB: u8 = 13;
/// ICMPv6 destination unreachable, packet too big (RFC 4443, 3.1 and 3.2).
const ICMP6_UNREACH: u8 = 1;
const ICMP6_PACKET_TOO_BIG: u8 = 2;
/// "The ICMP datagram SHOULD contain as much of the original datagram as possible without the length of the ICMP datagram
/// exceeding 576 bytes" (RFC 1812, 4.3.2.3).
const ICMP_MAX: usize = 576;
/// "As much of invoking packet as possible without the ICMPv6 packet exceeding the minimum IPv6 MTU" (RFC 4443, 3.1).
const ICMP6_MAX: usize = 1280;
/// Time to live, hop limit (IANA, IP Time to Generation).
const TTL: u8 = 64;
/// "Precedence 6 (INTERNETWORK CONTROL)" of ICMP errors (RFC 1812, 4.3.2.5).
const TOS_CONTROL: u8 = 0xc0;
/// PACKET_OUTGOING (linux/if_packet.h): the packet was sent by this host.
const SLL_OUTGOING: u8 = 4;
/// SCTP chunks (RFC 9260, 3.2).
const CHUNK_INIT: u8 = 1;
const CHUNK_ABORT: u8 = 6;
/// Chunks that are never answered: ABORT, COOKIE ACK, SHUTDOWN COMPLETE (RFC 9260, 8.4).
const CHUNKS_SILENT: [u8; 3] = [CHUNK_ABORT, 11, 14];
/// The sender had no tag to put in: it has reflected the packet's.
const ABORT_T: u8 = 1;

/// The ICMPv6 code for an ICMP one (RFC 7915 4.2): no route, port, and for all others administratively prohibited.
/// ipfw's answer to an unreachable protocol is that too, where the RFC has a parameter problem.
fn code6(code: u8) -> u8 {
    match code {
        0 | 1 | 5 | 6 | 7 | 11 | 12 => 0,
        3 => 4,
        _ => 1,
    }
}

/// Why nobody may answer this packet, whatever the answer.
fn forbidden(packet: &Packet<'_>) -> Option<NoReply> {
    let (query, to_many, source) = match packet.addresses {
        Addresses::None => return Some(NoReply::NotIp),
        // Echo, router solicitation, timestamp, information, address mask.
        Addresses::V4(src, dst) => (
            packet.proto != proto::ICMP || matches!(packet.icmp_type, 8 | 10 | 13 | 15 | 17),
            dst.is_multicast() || dst.is_broadcast(),
            src != dst && single4(src, dst),
        ),
        // Echo, multicast listener, node information (once "who are you").
        Addresses::V6(src, dst) => (
            packet.proto != proto::ICMP6 || matches!(packet.icmp_type, 128 | 130 | 139),
            dst.is_multicast(),
            src != dst && single6(src, dst),
        ),
    };
    let macs = packet.macs();
    if packet.fragment == Fragment::Later {
        return Some(NoReply::LaterFragment);
    }
    if !query {
        return Some(NoReply::NoQuery);
    }
    if to_many || macs.is_some_and(|macs| macs.dst[0] & 1 == 1) || cooked_to_many(packet) {
        return Some(NoReply::ToMany);
    }
    // Who takes a group's address for its source wants the whole group to hear the answer.
    if !source || macs.is_some_and(|macs| macs.src[0] & 1 == 1) {
        return Some(NoReply::Source);
    }
    None
}

/// Whether a cooked capture says that the packet was sent to everybody or to a group (PACKET_BROADCAST,
/// PACKET_MULTICAST).
fn cooked_to_many(packet: &Packet<'_>) -> bool {
    let kind = match packet.link {
        LinkType::LINUX_SLL => packet.frame.get(..2).map(|kind| u16::from_be_bytes([kind[0], kind[1]])),
        LinkType::LINUX_SLL2 => packet.frame.get(10).map(|kind| u16::from(*kind)),
        _ => None,
    };
    matches!(kind, Some(1 | 2))
}

/// "An ICMP error message MUST NOT be sent as the result of receiving a datagram whose source address does not define a
/// single host -- e.g., a zero address, a loopback address, a broadcast address, a multicast address, or a Class E
/// address" (RFC 1122, 3.2.2). Loopback talks to loopback.
fn single4(src: Ipv4Addr, dst: Ipv4Addr) -> bool {
    let first = src.octets()[0];
    first != 0 && first < 224 && (!src.is_loopback() || dst.is_loopback())
}

/// The same (RFC 4443, 2.4 (e.6)).
fn single6(src: Ipv6Addr, dst: Ipv6Addr) -> bool {
    !src.is_unspecified() && !src.is_multicast() && (!src.is_loopback() || dst.is_loopback())
}

/// The link header of the answer.
fn link(packet: &Packet<'_>, out: &mut Vec<u8>) -> Result<(), NoReply> {
    let header = packet.frame.get(..packet.network).ok_or(NoReply::Cut)?;
    match packet.link.canonical() {
        LinkType::RAW => {}
        LinkType::NULL | LinkType::PPP => out.extend(header),
        LinkType::ETHERNET => {
            let macs = packet.macs().ok_or(NoReply::Cut)?;
            // Addresses, tags of four bytes, type; or a length and what follows it.
            length_field(header)?;
            out.extend(macs.src);
            out.extend(macs.dst);
            out.extend(&header[12..]);
        }
        LinkType::LINUX_SLL | LinkType::LINUX_SLL2 => {
            out.extend(header);
            // Where the kind of packet, the length of its sender's address, and that are. The sender is this host, whose
            // address the capture does not tell.
            let (kind, length, address) =
                if packet.link == LinkType::LINUX_SLL { (1, 5, 6) } else { (10, 11, 12) };
            if out.len() < address + 8 || packet.link == LinkType::LINUX_SLL && out.len() < 16 {
                return Err(NoReply::Link);
            }
            out[kind] = SLL_OUTGOING;
            out[length] = 0;
            out[address..address + 8].fill(0);
        }
        // Of others it is not known, or nothing is ever sent there: a log is read only.
        _ => return Err(NoReply::Link),
    }
    Ok(())
}

/// Where an Ethernet header has a length (IEEE 802.3) in place of a type.
fn length_field(header: &[u8]) -> Result<Option<usize>, NoReply> {
    let mut at = 12;
    loop {
        match header.get(at..at + 2) {
            Some([0x81 | 0x91, 0] | [0x88, 0xa8]) => at += 4,
            Some([high, _]) if *high < 0x06 => return Ok(Some(at)),
            Some(_) if at + 2 == header.len() => return Ok(None),
            _ => return Err(NoReply::Link),
        }
    }
}

/// An IPv4 header without options; length and checksum are filled in by [`finish`].
fn header4(src: Ipv4Addr, dst: Ipv4Addr, tos: u8, proto: u8, out: &mut Vec<u8>) {
    // Never to be divided, so that it needs no identification (RFC 6864, 4.1).
    out.extend([0x45, tos, 0, 0, 0, 0, 0x40, 0, TTL, proto, 0, 0]);
    out.extend(src.octets());
    out.extend(dst.octets());
}

fn header6(src: Ipv6Addr, dst: Ipv6Addr, proto: u8, out: &mut Vec<u8>) {
    out.extend([0x60, 0, 0, 0, 0, 0, proto, TTL]);
    out.extend(src.octets());
    out.extend(dst.octets());
}

/// A header for `proto` from the packet's destination to its source.
fn swapped(packet: &Packet<'_>, proto: u8, out: &mut Vec<u8>) {
    match packet.addresses {
        Addresses::None => {}
        Addresses::V4(src, dst) => header4(dst, src, 0, proto, out),
        Addresses::V6(src, dst) => header6(dst, src, proto, out),
    }
}

/// Fills in the length and the checksums of the IP packet behind the link header.
fn finish(packet: &Packet<'_>, out: &mut [u8]) {
    let length = out.len() - packet.network;
    let (at, length) = match packet.addresses {
        Addresses::V6(..) => (packet.network + 4, length - 40),
        _ => (packet.network + 2, length),
    };
    // At most 1280 bytes, so it fits.
    out[at..at + 2].copy_from_slice(&(length as u16).to_be_bytes());
    if packet.link == LinkType::ETHERNET
        && let Ok(Some(at)) = length_field(&out[..packet.network])
    {
        let behind = (out.len() - at - 2) as u16;
        out[at..at + 2].copy_from_slice(&behind.to_be_bytes());
    }
    let whole = u32::try_from(out.len()).unwrap_or(u32::MAX);
    checksum::fill(packet.link, out, whole);
}

/// What an error quotes of the packet: its IP header and more, `room` bytes at most.
fn quote<'p>(packet: &Packet<'p>, room: usize) -> Result<&'p [u8], NoReply> {
    let whole = packet.ip_len as usize;
    let captured = packet.frame.get(packet.network..).ok_or(NoReply::Cut)?;
    let quote = &captured[..captured.len().min(whole).min(room)];
    // "The internet header plus the first 64 bits of the original datagram's data" (RFC 792).
    let least = (packet.transport - packet.network + 8).min(whole).min(room);
    if quote.len() < least { Err(NoReply::Cut) } else { Ok(quote) }
}

fn error4(
    packet: &Packet<'_>,
    (kind, code): (u8, u8),
    mtu: u16,
    me: &[IpAddr],
    out: &mut Vec<u8>,
) -> Result<(), NoReply> {
    let Addresses::V4(src, dst) = packet.addresses else { return Err(NoReply::OtherFamily) };
    let own = me.iter().find_map(|ip| match ip {
        IpAddr::V4(ip) => Some(*ip),
        IpAddr::V6(_) => None,
    });
    header4(own.unwrap_or(dst), src, TOS_CONTROL, proto::ICMP, out);
    out.extend([kind, code, 0, 0, 0, 0]);
    // The next-hop MTU (RFC 1191, 4).
    out.extend(if (kind, code) == (ICMP_UNREACH, UNREACH_NEEDFRAG) { mtu } else { 0 }.to_be_bytes());
    out.extend(quote(packet, ICMP_MAX - 28)?);
    finish(packet, out);
    Ok(())
}

fn error6(
    packet: &Packet<'_>,
    (kind, code): (u8, u8),
    mtu: u32,
    me: &[IpAddr],
    out: &mut Vec<u8>,
) -> Result<(), NoReply> {
    let Addresses::V6(src, dst) = packet.addresses else { return Err(NoReply::OtherFamily) };
    let own = me.iter().find_map(|ip| match ip {
        // An address that is good on this link only says nothing to a host behind it.
        IpAddr::V6(ip) if ip.is_unicast_link_local() == src.is_unicast_link_local() => Some(*ip),
        _ => None,
    });
    header6(own.unwrap_or(dst), src, proto::ICMP6, out);
    out.extend([kind, code, 0, 0]);
    // Of a packet too big; "unused" otherwise (RFC 4443 section 3).
    out.extend(mtu.to_be_bytes());
    out.extend(quote(packet, ICMP6_MAX - 48)?);
    finish(packet, out);
    Ok(())
}

/// "If the incoming segment has an ACK field, the reset takes its sequence number from the ACK field of the segment;
/// otherwise, the reset has sequence number zero and the ACK field is set to the sum of the sequence number and segment
/// length of the incoming segment" (RFC 9293, 3.5.2). SYN and FIN are one each of the length.
fn tcp_reset(packet: &Packet<'_>, out: &mut Vec<u8>) -> Result<(), NoReply> {
    if packet.proto != proto::TCP {
        return Err(NoReply::OtherProtocol);
    }
    if packet.tcp_flags & TCP_RST != 0 {
        return Err(NoReply::Reset);
    }
    if packet.transport_len < 20 {
        return Err(NoReply::Cut);
    }
    let syn_fin = u32::from(packet.tcp_flags & 0x01) + u32::from(packet.tcp_flags >> 1 & 0x01);
    let length = packet.tcp_data_len().ok_or(NoReply::Cut)?;
    let (seq, ack, flags) = if packet.tcp_flags & TCP_ACK != 0 {
        (packet.tcp_ack, 0, TCP_RST)
    } else {
        (0, packet.tcp_seq.wrapping_add(length).wrapping_add(syn_fin), TCP_RST | TCP_ACK)
    };
    swapped(packet, proto::TCP, out);
    out.extend(packet.dst_port.to_be_bytes());
    out.extend(packet.src_port.to_be_bytes());
    out.extend(seq.to_be_bytes());
    out.extend(ack.to_be_bytes());
    // Five words of header, no window, no urgent data.
    out.extend([5 << 4, flags, 0, 0, 0, 0, 0, 0]);
    finish(packet, out);
    Ok(())
}

/// CRC32c, which SCTP has for its checksum (RFC 9260, appendix A).
const CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);

fn sctp_abort(packet: &Packet<'_>, out: &mut Vec<u8>) -> Result<(), NoReply> {
    if packet.proto != proto::SCTP {
        return Err(NoReply::OtherProtocol);
    }
    let (tag, flags) = abort_tag(packet)?;
    swapped(packet, proto::SCTP, out);
    let header = out.len();
    out.extend(packet.dst_port.to_be_bytes());
    out.extend(packet.src_port.to_be_bytes());
    out.extend(tag);
    out.extend([0; 4]);
    out.extend([CHUNK_ABORT, flags, 0, 4]);
    let sum = CRC32C.checksum(&out[header..]);
    // The order of its bytes is the reverse of the network's (RFC 9260, appendix A).
    out[header + 8..header + 12].copy_from_slice(&sum.to_le_bytes());
    finish(packet, out);
    Ok(())
}

/// The verification tag of the ABORT and its flags: what an INIT asks for, else the packet's own, reflected (RFC 9260,
/// 8.4 and 8.5.1).
fn abort_tag(packet: &Packet<'_>) -> Result<([u8; 4], u8), NoReply> {
    let upper = packet.frame.get(packet.transport..packet.transport + packet.transport_len);
    let (tag, mut chunks) = match upper {
        Some([_, _, _, _, a, b, c, d, _, _, _, _, chunks @ ..]) => ([*a, *b, *c, *d], chunks),
        _ => return Err(NoReply::Cut),
    };
    if let [CHUNK_INIT, _, high, low, rest @ ..] = chunks {
        let [a, b, c, d, ..] = *rest else { return Err(NoReply::Cut) };
        let length = usize::from(u16::from_be_bytes([*high, *low])).next_multiple_of(4);
        // An INIT is alone in its packet, and the packet has no tag.
        let alone = tag == [0; 4] && chunks.len() <= length;
        return if alone && [a, b, c, d] != [0; 4] { Ok(([a, b, c, d], 0)) } else { Err(NoReply::NoTag) };
    }
    while let [kind, _, high, low, ..] = *chunks {
        if CHUNKS_SILENT.contains(&kind) {
            return Err(NoReply::Reset);
        }
        let length = usize::from(u16::from_be_bytes([high, low])).max(4).next_multiple_of(4);
        chunks = chunks.get(length..).unwrap_or_default();
    }
    if tag == [0; 4] { Err(NoReply::NoTag) } else { Ok((tag, ABORT_T)) }
}
