//! Replies to rejected packets: ICMP and ICMPv6 unreachable, TCP RST, SCTP ABORT. Bytes in, bytes out.
//!
//! [`unreach`] and [`reset`] decide during the walk whether a packet may have a reply, and which.
//! [`Reject::reply`] builds the reply. [`ReplyLimiter`] limits the rate.
//!
//! Rules for every reply:
//! - No reply to a packet that may itself be a reply, or to which many hosts would reply (RFC 1122 section 3.2.2,
//!   RFC 1812 section 4.3.2.7, RFC 4443 section 2.4). Two gates cannot loop.
//! - The reply returns on the link of the packet: Ethernet addresses swapped, VLAN tags and 802.2 headers kept. On
//!   a cooked link it is a packet sent by this host.
//! - The reply is at most a header plus the quoted bytes, and all checksums are valid.
//!
//! Based on ipfw's `send_reject` and `send_reject6`; `docs/book/src/reference/rules.md` lists the differences.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crc::{CRC_32_ISCSI, Crc};

use super::step::Reject;
use towpath_wire::{Addresses, Fragment, LinkType, Packet, Time, checksum, proto};

/// Why a rejected packet gets no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoReply {
    /// The frame is not IP.
    NotIp,
    /// The action replies to the other address family.
    OtherFamily,
    /// The action replies to another protocol.
    OtherProtocol,
    /// An ICMP message that is not a query: an error or a reply.
    NotQuery,
    /// A TCP RST or SCTP ABORT.
    Reset,
    /// Sent to a multicast or broadcast address, or to an Ethernet group.
    Multicast,
    /// The source does not identify a single other host: unspecified, multicast, broadcast, reserved, or equal to
    /// the destination.
    BadSource,
    /// A later fragment.
    LaterFragment,
    /// The capture lacks headers that the reply needs.
    Truncated,
    /// An SCTP packet without the verification tag that an ABORT needs.
    NoSctpTag,
    /// A link header that cannot be reversed.
    UnsupportedLink,
    /// The checksum of an echo request is wrong.
    BadChecksum,
}

impl NoReply {
    /// A short description for reports.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotIp => "not IP",
            Self::OtherFamily => "wrong address family",
            Self::OtherProtocol => "wrong protocol",
            Self::NotQuery => "ICMP message that is not a query",
            Self::Reset => "TCP RST or SCTP ABORT",
            Self::Multicast => "multicast or broadcast",
            Self::BadSource => "source is not a single other host",
            Self::LaterFragment => "later fragment",
            Self::Truncated => "truncated capture",
            Self::NoSctpTag => "SCTP without verification tag",
            Self::UnsupportedLink => "unsupported link header",
            Self::BadChecksum => "wrong checksum",
        }
    }
}

impl fmt::Display for NoReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Returns an unreachable message if the packet may have one. As in ipfw, an IPv4 code is translated for an IPv6
/// packet.
pub(super) fn unreach(packet: &Packet<'_>, answer: Reject) -> Reject {
    let answer = match (packet.addresses, answer) {
        (Addresses::V6(..), Reject::Unreach { code, .. }) => Reject::Unreach6 { code: code6(code) },
        (Addresses::V4(..), Reject::Unreach6 { .. }) => return Reject::NoReply(NoReply::OtherFamily),
        _ => answer,
    };
    no_reply_reason(packet).map_or(answer, Reject::NoReply)
}

/// Returns a reset or abort if the packet may have one. `six` is true for the actions that reply to IPv6 only.
pub(super) fn reset(packet: &Packet<'_>, answer: Reject, six: bool) -> Reject {
    let wanted = if answer == Reject::Reset { proto::TCP } else { proto::SCTP };
    match packet.addresses {
        Addresses::V4(..) if six => Reject::NoReply(NoReply::OtherFamily),
        _ if packet.proto != wanted && packet.addresses != Addresses::None => {
            Reject::NoReply(NoReply::OtherProtocol)
        }
        _ if wanted == proto::TCP && packet.tcp_flags & TCP_RST != 0 => Reject::NoReply(NoReply::Reset),
        _ => no_reply_reason(packet).map_or(answer, Reject::NoReply),
    }
}

impl Reject {
    /// The reply to a packet that an inspector rejects: a reset for TCP, an abort for SCTP, otherwise
    /// administratively prohibited.
    pub fn by_inspector(packet: &Packet<'_>) -> Self {
        match packet.proto {
            proto::TCP => reset(packet, Self::Reset, false),
            proto::SCTP => reset(packet, Self::Abort, false),
            _ => unreach(packet, Self::Unreach { code: UNREACH_FILTER_PROHIB, mtu: 0 }),
        }
    }

    /// The reply of a router without a route to the destination.
    pub fn no_route(packet: &Packet<'_>) -> Self {
        unreach(packet, Self::Unreach { code: UNREACH_NET, mtu: 0 })
    }

    /// The reply of a router to a packet whose time to live is exhausted.
    pub fn time_exceeded(packet: &Packet<'_>) -> Self {
        no_reply_reason(packet).map_or(Self::TimeExceeded, Self::NoReply)
    }

    /// The reply of a router to a packet that exceeds the MTU of the next link and must not be fragmented.
    pub fn too_big(packet: &Packet<'_>, mtu: u32) -> Self {
        if matches!(packet.addresses, Addresses::V6(..)) {
            return no_reply_reason(packet).map_or(Self::TooBig { mtu }, Self::NoReply);
        }
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        unreach(packet, Self::Unreach { code: UNREACH_NEEDFRAG, mtu })
    }

    /// Writes the reply frame to `packet` into `out`, which is cleared first. `me` are the addresses of the
    /// receive port. The source of an ICMP error is the first suitable one of them, otherwise the destination of
    /// the packet.
    ///
    /// # Errors
    /// [`NoReply`] is the reason why there is no reply. The contents of `out` are then undefined.
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
        if let Some(reason) = no_reply_reason(packet) {
            return Err(reason);
        }
        out.clear();
        link(packet, out)?;
        match self {
            Self::Unreach { code, mtu } => error4(packet, (ICMP_UNREACH, code), mtu, me, out),
            Self::Unreach6 { code } => error6(packet, (ICMP6_UNREACH, code), 0, me, out),
            Self::TooBig { mtu } => error6(packet, (ICMP6_PACKET_TOO_BIG, 0), mtu, me, out),
            // Both have code 0: exceeded in transit (RFC 792; RFC 4443 section 3.3).
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

/// ICMP_ECHO and ICMP_ECHOREPLY (RFC 792), and those of ICMPv6 (RFC 4443 sections 4.1 and 4.2).
const ICMP_ECHO: u8 = 8;
const ICMP_ECHOREPLY: u8 = 0;
const ICMP6_ECHO: u8 = 128;
const ICMP6_ECHOREPLY: u8 = 129;

/// Returns true if the packet is an echo request.
pub fn is_echo_request(packet: &Packet<'_>) -> bool {
    let kind = match packet.addresses {
        Addresses::V4(..) if packet.proto == proto::ICMP => ICMP_ECHO,
        Addresses::V6(..) if packet.proto == proto::ICMP6 => ICMP6_ECHO,
        _ => return false,
    };
    packet.fragment == Fragment::Whole && packet.icmp_type == kind
}

/// Writes the reply to an echo request into `out`, which is cleared first. "The data received in the echo message must be returned in the
/// echo reply message" (RFC 792; RFC 4443 section 4.2). IPv4 options are not returned. The caller has verified that the destination is
/// its own address. `verified` is true if the sender has not computed the checksum, because the packet never left this machine.
///
/// # Errors
/// [`NoReply`] is the reason why there is no reply. The contents of `out` are then undefined.
pub fn echo_reply(packet: &Packet<'_>, verified: bool, out: &mut Vec<u8>) -> Result<(), NoReply> {
    if !is_echo_request(packet) {
        return Err(NoReply::NotQuery);
    }
    if let Some(reason) = no_reply_reason(packet) {
        return Err(reason);
    }
    let message = packet.transport..packet.transport + packet.transport_len;
    let message = packet.frame.get(message).filter(|message| message.len() >= 8).ok_or(NoReply::Truncated)?;
    out.clear();
    link(packet, out)?;
    let reply = match packet.addresses {
        Addresses::V4(..) => {
            swapped(packet, proto::ICMP, out);
            ICMP_ECHOREPLY
        }
        _ => {
            swapped(packet, proto::ICMP6, out);
            ICMP6_ECHOREPLY
        }
    };
    let at = out.len();
    out.extend(message);
    if !verified {
        // The checksum that the request should have had.
        let had = [out[at + 2], out[at + 3]];
        finish(packet, out);
        let is_right = had == [out[at + 2], out[at + 3]];
        if !is_right {
            return Err(NoReply::BadChecksum);
        }
    }
    out[at..at + 2].copy_from_slice(&[reply, 0]);
    finish(packet, out);
    Ok(())
}

/// Maximum number of replies per port and second (ipfw: net.inet.icmp.icmplim).
pub const REPLIES_PER_SECOND: usize = 200;

/// Limits the replies of one port to [`REPLIES_PER_SECOND`] in any interval of one second.
#[derive(Clone, Debug)]
pub struct ReplyLimiter {
    /// Times of the last replies, in a ring; `oldest` is overwritten next.
    sent: Box<[Option<Time>]>,
    oldest: usize,
}

impl Default for ReplyLimiter {
    fn default() -> Self {
        Self { sent: vec![None; REPLIES_PER_SECOND].into(), oldest: 0 }
    }
}

impl ReplyLimiter {
    /// Returns true if another reply may be sent now, and counts it.
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
/// ICMP destination unreachable (RFC 792; codes in RFC 1812 section 5.2.7.1).
const ICMP_UNREACH: u8 = 3;
/// ICMP_TIMXCEED and ICMP_UNREACH_NET (netinet/ip_icmp.h), ICMP6_TIME_EXCEEDED (netinet/icmp6.h).
const ICMP_TIMXCEED: u8 = 11;
const ICMP6_TIME_EXCEEDED: u8 = 3;
const UNREACH_NET: u8 = 0;
const UNREACH_NEEDFRAG: u8 = 4;
const UNREACH_FILTER_PROHIB: u8 = 13;
/// ICMPv6 destination unreachable and packet too big (RFC 4443 sections 3.1 and 3.2).
const ICMP6_UNREACH: u8 = 1;
const ICMP6_PACKET_TOO_BIG: u8 = 2;
/// "The ICMP datagram SHOULD contain as much of the original datagram as possible without the length of the ICMP datagram
/// exceeding 576 bytes" (RFC 1812, 4.3.2.3).
const ICMP_MAX: usize = 576;
/// "As much of invoking packet as possible without the ICMPv6 packet exceeding the minimum IPv6 MTU" (RFC 4443, 3.1).
const ICMP6_MAX: usize = 1280;
/// Time to live, or hop limit (IANA, IP Time to Live).
const TTL: u8 = 64;
/// "Precedence 6 (INTERNETWORK CONTROL)" of ICMP errors (RFC 1812, 4.3.2.5).
const TOS_CONTROL: u8 = 0xc0;
/// PACKET_OUTGOING (linux/if_packet.h): sent by this host.
const SLL_OUTGOING: u8 = 4;
/// SCTP chunk types (RFC 9260 section 3.2).
const CHUNK_INIT: u8 = 1;
const CHUNK_ABORT: u8 = 6;
/// Chunks that never get a reply: ABORT, COOKIE ACK, SHUTDOWN COMPLETE (RFC 9260 section 8.4).
const CHUNKS_SILENT: [u8; 3] = [CHUNK_ABORT, 11, 14];
/// T bit: the sender had no verification tag and reflects the one of the packet.
const ABORT_T: u8 = 1;

/// Returns the ICMPv6 code for an ICMP code (RFC 7915 section 4.2): no route, port, otherwise administratively
/// prohibited. For an unreachable protocol this follows ipfw; the RFC has a parameter problem.
fn code6(code: u8) -> u8 {
    match code {
        0 | 1 | 5 | 6 | 7 | 11 | 12 => 0,
        3 => 4,
        _ => 1,
    }
}

/// Returns the reason why this packet gets no reply of any kind.
fn no_reply_reason(packet: &Packet<'_>) -> Option<NoReply> {
    let (query, to_many, source) = match packet.addresses {
        Addresses::None => return Some(NoReply::NotIp),
        // Echo, router solicitation, timestamp, information, address mask.
        Addresses::V4(src, dst) => (
            packet.proto != proto::ICMP || matches!(packet.icmp_type, 8 | 10 | 13 | 15 | 17),
            dst.is_multicast() || dst.is_broadcast(),
            src != dst && single4(src, dst),
        ),
        // Echo, multicast listener query, node information.
        Addresses::V6(src, dst) => (
            packet.proto != proto::ICMP6 || matches!(packet.icmp_type, 128 | 130 | 139),
            dst.is_multicast(),
            src != dst && single6(src, dst),
        ),
    };
    // The session's length would be wrong, and the labels of the way back are not known.
    if packet.is_encapsulated() {
        return Some(NoReply::UnsupportedLink);
    }
    let macs = packet.macs();
    if packet.fragment == Fragment::Later {
        return Some(NoReply::LaterFragment);
    }
    if !query {
        return Some(NoReply::NotQuery);
    }
    if to_many || macs.is_some_and(|macs| macs.dst[0] & 1 == 1) || cooked_to_many(packet) {
        return Some(NoReply::Multicast);
    }
    // A group address as the source would send the reply to the whole group.
    if !source || macs.is_some_and(|macs| macs.src[0] & 1 == 1) {
        return Some(NoReply::BadSource);
    }
    None
}

/// Returns true if a cooked capture marks the packet as broadcast or multicast (PACKET_BROADCAST,
/// PACKET_MULTICAST).
fn cooked_to_many(packet: &Packet<'_>) -> bool {
    let kind = match packet.link {
        LinkType::LINUX_SLL => packet.frame.get(..2).map(|kind| u16::from_be_bytes([kind[0], kind[1]])),
        LinkType::LINUX_SLL2 => packet.frame.get(10).map(|kind| u16::from(*kind)),
        _ => None,
    };
    matches!(kind, Some(1 | 2))
}

/// "An ICMP error message MUST NOT be sent as the result of receiving a datagram whose source address does not
/// define a single host -- e.g., a zero address, a loopback address, a broadcast address, a multicast address, or
/// a Class E address" (RFC 1122 section 3.2.2). Loopback may reply to loopback.
fn single4(src: Ipv4Addr, dst: Ipv4Addr) -> bool {
    let first = src.octets()[0];
    first != 0 && first < 224 && (!src.is_loopback() || dst.is_loopback())
}

/// The same for IPv6 (RFC 4443 section 2.4, e.6).
fn single6(src: Ipv6Addr, dst: Ipv6Addr) -> bool {
    !src.is_unspecified() && !src.is_multicast() && (!src.is_loopback() || dst.is_loopback())
}

/// Writes the link header of the reply.
fn link(packet: &Packet<'_>, out: &mut Vec<u8>) -> Result<(), NoReply> {
    let header = packet.frame.get(..packet.network).ok_or(NoReply::Truncated)?;
    match packet.link.canonical() {
        LinkType::RAW => {}
        LinkType::NULL | LinkType::PPP => out.extend(header),
        LinkType::ETHERNET => {
            let macs = packet.macs().ok_or(NoReply::Truncated)?;
            // After the addresses: tags of four bytes and a type, or a length and what follows it.
            length_field(header)?;
            out.extend(macs.src);
            out.extend(macs.dst);
            out.extend(&header[12..]);
        }
        LinkType::LINUX_SLL | LinkType::LINUX_SLL2 => {
            out.extend(header);
            // Offsets of the packet type, of the length of the sender's address, and of that address. The sender
            // is this host; the capture does not contain its address.
            let (kind, length, address) =
                if packet.link == LinkType::LINUX_SLL { (1, 5, 6) } else { (10, 11, 12) };
            if out.len() < address + 8 || packet.link == LinkType::LINUX_SLL && out.len() < 16 {
                return Err(NoReply::UnsupportedLink);
            }
            out[kind] = SLL_OUTGOING;
            out[length] = 0;
            out[address..address + 8].fill(0);
        }
        // The header cannot be reversed, or nothing is ever sent on the link: a log is read-only.
        _ => return Err(NoReply::UnsupportedLink),
    }
    Ok(())
}

/// Returns the offset of a length field (IEEE 802.3) if the Ethernet header has one instead of a type.
fn length_field(header: &[u8]) -> Result<Option<usize>, NoReply> {
    let mut at = 12;
    loop {
        match header.get(at..at + 2) {
            Some([0x81 | 0x91, 0] | [0x88, 0xa8]) => at += 4,
            Some([high, _]) if *high < 0x06 => return Ok(Some(at)),
            Some(_) if at + 2 == header.len() => return Ok(None),
            _ => return Err(NoReply::UnsupportedLink),
        }
    }
}

/// Writes an IPv4 header without options. [`finish`] fills in length and checksum.
fn header4(src: Ipv4Addr, dst: Ipv4Addr, tos: u8, proto: u8, out: &mut Vec<u8>) {
    // Don't Fragment is set, so that no identification is needed (RFC 6864 section 4.1).
    out.extend([0x45, tos, 0, 0, 0, 0, 0x40, 0, TTL, proto, 0, 0]);
    out.extend(src.octets());
    out.extend(dst.octets());
}

fn header6(src: Ipv6Addr, dst: Ipv6Addr, proto: u8, out: &mut Vec<u8>) {
    out.extend([0x60, 0, 0, 0, 0, 0, proto, TTL]);
    out.extend(src.octets());
    out.extend(dst.octets());
}

/// Writes a header for `proto` with source and destination swapped.
fn swapped(packet: &Packet<'_>, proto: u8, out: &mut Vec<u8>) {
    match packet.addresses {
        Addresses::None => {}
        Addresses::V4(src, dst) => header4(dst, src, 0, proto, out),
        Addresses::V6(src, dst) => header6(dst, src, proto, out),
    }
}

/// Fills in the length and the checksums of the IP packet after the link header.
fn finish(packet: &Packet<'_>, out: &mut [u8]) {
    let length = out.len() - packet.network;
    let (at, length) = match packet.addresses {
        Addresses::V6(..) => (packet.network + 4, length - 40),
        _ => (packet.network + 2, length),
    };
    // An error has at most 1280 bytes, an echo reply as many as the request.
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

/// Returns the bytes that an error quotes: the IP header and more, at most `room` bytes.
fn quote<'p>(packet: &Packet<'p>, room: usize) -> Result<&'p [u8], NoReply> {
    let whole = packet.ip_len as usize;
    let captured = packet.frame.get(packet.network..).ok_or(NoReply::Truncated)?;
    let quote = &captured[..captured.len().min(whole).min(room)];
    // "The internet header plus the first 64 bits of the original datagram's data" (RFC 792).
    let least = (packet.transport - packet.network + 8).min(whole).min(room);
    if quote.len() < least { Err(NoReply::Truncated) } else { Ok(quote) }
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
    // Next-hop MTU (RFC 1191 section 4).
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
        // A link-local source address is useless for a host beyond this link.
        IpAddr::V6(ip) if ip.is_unicast_link_local() == src.is_unicast_link_local() => Some(*ip),
        _ => None,
    });
    header6(own.unwrap_or(dst), src, proto::ICMP6, out);
    out.extend([kind, code, 0, 0]);
    // MTU of packet too big; "unused" otherwise (RFC 4443 section 3).
    out.extend(mtu.to_be_bytes());
    out.extend(quote(packet, ICMP6_MAX - 48)?);
    finish(packet, out);
    Ok(())
}

/// "If the incoming segment has an ACK field, the reset takes its sequence number from the ACK field of the
/// segment; otherwise, the reset has sequence number zero and the ACK field is set to the sum of the sequence
/// number and segment length of the incoming segment" (RFC 9293 section 3.5.2). SYN and FIN each count one.
fn tcp_reset(packet: &Packet<'_>, out: &mut Vec<u8>) -> Result<(), NoReply> {
    if packet.proto != proto::TCP {
        return Err(NoReply::OtherProtocol);
    }
    if packet.tcp_flags & TCP_RST != 0 {
        return Err(NoReply::Reset);
    }
    if packet.transport_len < 20 {
        return Err(NoReply::Truncated);
    }
    let syn_fin = u32::from(packet.tcp_flags & 0x01) + u32::from(packet.tcp_flags >> 1 & 0x01);
    let length = packet.tcp_data_len().ok_or(NoReply::Truncated)?;
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
    // A header of five words; window and urgent pointer 0.
    out.extend([5 << 4, flags, 0, 0, 0, 0, 0, 0]);
    finish(packet, out);
    Ok(())
}

/// CRC32c, the checksum of SCTP (RFC 9260, appendix A).
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
    // Its byte order is the reverse of the network's (RFC 9260, appendix A).
    out[header + 8..header + 12].copy_from_slice(&sum.to_le_bytes());
    finish(packet, out);
    Ok(())
}

/// Returns the verification tag of the ABORT and its flags: the initiate tag of an INIT, otherwise the packet's
/// own tag, reflected (RFC 9260 sections 8.4 and 8.5.1).
fn abort_tag(packet: &Packet<'_>) -> Result<([u8; 4], u8), NoReply> {
    let upper = packet.frame.get(packet.transport..packet.transport + packet.transport_len);
    let (tag, mut chunks) = match upper {
        Some([_, _, _, _, a, b, c, d, _, _, _, _, chunks @ ..]) => ([*a, *b, *c, *d], chunks),
        _ => return Err(NoReply::Truncated),
    };
    if let [CHUNK_INIT, _, high, low, rest @ ..] = chunks {
        let [a, b, c, d, ..] = *rest else { return Err(NoReply::Truncated) };
        let length = usize::from(u16::from_be_bytes([*high, *low])).next_multiple_of(4);
        // An INIT must be the only chunk, in a packet without a tag.
        let alone = tag == [0; 4] && chunks.len() <= length;
        return if alone && [a, b, c, d] != [0; 4] { Ok(([a, b, c, d], 0)) } else { Err(NoReply::NoSctpTag) };
    }
    while let [kind, _, high, low, ..] = *chunks {
        if CHUNKS_SILENT.contains(&kind) {
            return Err(NoReply::Reset);
        }
        let length = usize::from(u16::from_be_bytes([high, low])).max(4).next_multiple_of(4);
        chunks = chunks.get(length..).unwrap_or_default();
    }
    if tag == [0; 4] { Err(NoReply::NoSctpTag) } else { Ok((tag, ABORT_T)) }
}
