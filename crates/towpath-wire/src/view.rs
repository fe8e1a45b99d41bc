//! Header fields that only some rules need. The accessors read them from the frame on demand.

use std::ops::Range;

use super::{DF, MF, RF, be16, bytes, ip6, proto};
use crate::{Addresses, Fragment, LinkType, Packet};

/// The addresses of an Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Macs {
    /// Destination.
    pub dst: [u8; 6],
    /// Source.
    pub src: [u8; 6],
}

/// One option of an IPv4 or TCP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionField<'a> {
    /// Option type, as IANA numbers it for that protocol.
    pub kind: u8,
    /// The bytes after type and length.
    pub data: &'a [u8],
}

/// Iterator over the options of an IPv4 or TCP header, without padding. Ends at the first option that does not fit the header.
#[derive(Clone, Debug)]
pub struct Options<'a> {
    rest: &'a [u8],
}

impl<'a> Options<'a> {
    /// Options in `bytes`, the part of a header after its fixed fields.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Options<'a> {
    type Item = OptionField<'a>;

    fn next(&mut self) -> Option<OptionField<'a>> {
        while let [OPTION_NOP, rest @ ..] = self.rest {
            self.rest = rest;
        }
        let rest = std::mem::take(&mut self.rest);
        let [kind, length, ..] = *rest else { return None };
        if kind == OPTION_END {
            return None;
        }
        let data = rest.get(2..usize::from(length))?;
        self.rest = rest.get(usize::from(length)..)?;
        Some(OptionField { kind, data })
    }
}

impl<'a> Packet<'a> {
    /// The Ethernet addresses; `None` for other link types.
    pub fn macs(&self) -> Option<Macs> {
        if self.link != LinkType::ETHERNET {
            return None;
        }
        let [d0, d1, d2, d3, d4, d5, src @ ..] = *bytes::<12>(self.frame, 0)?;
        Some(Macs { dst: [d0, d1, d2, d3, d4, d5], src })
    }

    /// Type of service (IPv4) or traffic class (IPv6): DSCP in the upper six bits, ECN in the lower two. 0 if not IP.
    pub fn tos(&self) -> u8 {
        match (self.addresses, bytes::<2>(self.frame, self.network)) {
            (Addresses::V4(..), Some([_, tos])) => *tos,
            (Addresses::V6(..), Some([first, second])) => first << 4 | second >> 4,
            _ => 0,
        }
    }

    /// Time to live (IPv4) or hop limit (IPv6); 0 if not IP.
    pub fn ttl(&self) -> u8 {
        match self.addresses {
            Addresses::V4(..) => self.network_byte(8),
            Addresses::V6(..) => self.network_byte(7),
            Addresses::None => 0,
        }
    }

    /// The identification field of IPv4; `None` for others.
    pub fn ip_id(&self) -> Option<u16> {
        match self.addresses {
            Addresses::V4(..) => bytes(self.frame, self.network + 4).map(|id| be16(*id)),
            _ => None,
        }
    }

    /// The identification that all fragments of a datagram share. `None` for a packet that is not a fragment, and for a first
    /// IPv6 fragment with more extension headers after the fragment header.
    pub fn fragment_id(&self) -> Option<u32> {
        if self.fragment == Fragment::Whole {
            return None;
        }
        match self.addresses {
            Addresses::V4(..) => self.ip_id().map(u32::from),
            Addresses::V6(..) => {
                let header = bytes::<8>(self.frame, self.transport.checked_sub(8)?)?;
                let field = be16([header[2], header[3]]);
                // The first of several fragments; the two bits between are reserved, "ignored on reception" (RFC 8200, 4.5).
                let first = field & !ip6::FRAGMENT_RESERVED == ip6::FRAGMENT_MORE;
                let last = self.fragment == Fragment::Later || first;
                let id = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
                (last && header[0] == self.proto).then_some(id)
            }
            Addresses::None => None,
        }
    }

    /// The flags next to the fragment offset: [`RF`], [`DF`] and [`MF`] for IPv4; [`MF`] of the fragment header for
    /// IPv6. 0 if not IP.
    pub fn ipoff_flags(&self) -> u8 {
        match self.addresses {
            Addresses::V4(..) => self.network_byte(6) & (RF | DF | MF),
            Addresses::V6(..) => match self.fragment {
                Fragment::Whole => 0,
                Fragment::First => MF,
                Fragment::Later => self.more_fragments6(),
            },
            Addresses::None => 0,
        }
    }

    /// The flow label of IPv6 (20 bits); `None` for others.
    pub fn flow_label(&self) -> Option<u32> {
        match self.addresses {
            Addresses::V6(..) => {
                bytes(self.frame, self.network).map(|first| u32::from_be_bytes(*first) & 0x000f_ffff)
            }
            _ => None,
        }
    }

    /// The options of an IPv4 header; empty for other packets.
    pub fn ip_options(&self) -> Options<'a> {
        let options = match self.addresses {
            Addresses::V4(..) => {
                let length = usize::from(self.network_byte(0) & 0x0f) * 4;
                part(self.frame, self.network + 20, self.network + length)
            }
            _ => &[],
        };
        Options::new(options)
    }

    /// The options of a TCP header; empty for other protocols and later fragments.
    pub fn tcp_options(&self) -> Options<'a> {
        let options = match self.tcp_header_len() {
            Some(length) => {
                let end = length.min(self.transport_len);
                part(self.frame, self.transport + 20, self.transport + end)
            }
            None => &[],
        };
        Options::new(options)
    }

    /// The maximum segment size option of a TCP header (RFC 9293, 3.7.1).
    pub fn tcp_mss(&self) -> Option<u16> {
        self.tcp_options().find_map(|option| match (option.kind, option.data) {
            (TCP_OPTION_MSS, [high, low]) => Some(be16([*high, *low])),
            _ => None,
        })
    }

    /// The window scale option of a TCP header (RFC 7323, 2.2), at most 14.
    pub fn tcp_wscale(&self) -> Option<u8> {
        self.tcp_options().find_map(|option| match (option.kind, option.data) {
            (TCP_OPTION_WSCALE, [shift]) => Some((*shift).min(14)),
            _ => None,
        })
    }

    /// The type of the first chunk of an SCTP packet (RFC 9260, 3.2).
    pub fn sctp_chunk(&self) -> Option<u8> {
        if self.proto != proto::SCTP || self.fragment == Fragment::Later || self.transport_len < 13 {
            return None;
        }
        bytes::<1>(self.frame, self.transport + 12).map(|kind| kind[0])
    }

    /// Bytes of TCP payload on the wire according to the headers; `None` if not TCP, or a later fragment.
    pub fn tcp_data_len(&self) -> Option<u32> {
        let headers = self.transport - self.network + self.tcp_header_len()?;
        u32::try_from(headers).ok().map(|headers| self.ip_len.saturating_sub(headers))
    }

    /// The identifier of an ICMP or ICMPv6 query or reply: echo, and for ICMP also timestamp, information and address
    /// mask (RFC 792, RFC 950, RFC 4443). `None` for other messages.
    pub fn icmp_echo_id(&self) -> Option<u16> {
        if self.fragment == Fragment::Later || self.transport_len < 6 {
            return None;
        }
        match (self.proto, self.icmp_type) {
            (proto::ICMP, 0 | 8 | 13..=18) | (proto::ICMP6, 128 | 129) => {
                bytes(self.frame, self.transport + 4).map(|id| be16(*id))
            }
            _ => None,
        }
    }

    /// The captured payload, without link padding: the bytes after the header of TCP, UDP, UDP-Lite, SCTP, DCCP, ICMP and
    /// ICMPv6; the entire upper layer of a later fragment and for other protocols; everything after the link header
    /// if the packet is not IP.
    pub fn payload(&self) -> &'a [u8] {
        &self.frame[self.payload_range()]
    }

    /// The range of [`Packet::payload`] in the frame.
    pub fn payload_range(&self) -> Range<usize> {
        if self.addresses == Addresses::None {
            return clip(self.frame, self.network, self.frame.len());
        }
        let end = self.transport + self.transport_len;
        let header = match self.proto {
            _ if self.fragment == Fragment::Later => 0,
            proto::TCP => self.tcp_header_len().unwrap_or(20),
            proto::UDP => return clip(self.frame, self.transport + 8, end.min(self.udp_end())),
            proto::UDPLITE | proto::ICMP | proto::ICMP6 => 8,
            proto::SCTP => 12,
            // The data offset counts words (RFC 4340, 5.1).
            proto::DCCP => {
                bytes::<5>(self.frame, self.transport).map_or(12, |header| usize::from(header[4]) * 4).max(12)
            }
            _ => 0,
        };
        clip(self.frame, self.transport + header, end)
    }

    /// The end of the UDP datagram. Bytes of the IP packet after it (the surplus area of RFC 9868) are not payload.
    fn udp_end(&self) -> usize {
        match bytes(self.frame, self.transport + 4).map(|length| be16(*length)) {
            None | Some(0) => usize::MAX,
            Some(length) => self.transport + usize::from(length),
        }
    }

    /// Length of the TCP header, at least 20; `None` if not TCP or not captured.
    fn tcp_header_len(&self) -> Option<usize> {
        if self.proto != proto::TCP || self.fragment == Fragment::Later || self.transport_len < 13 {
            return None;
        }
        bytes::<1>(self.frame, self.transport + 12).map(|offset| (usize::from(offset[0] >> 4) * 4).max(20))
    }

    /// [`MF`] of a later IPv6 fragment. The walk ends at the fragment header, so it directly precedes the fragment's data.
    fn more_fragments6(&self) -> u8 {
        let field = self.transport.checked_sub(8).and_then(|at| bytes::<4>(self.frame, at));
        match field {
            Some([_, _, high, low]) if be16([*high, *low]) & ip6::FRAGMENT_MORE != 0 => MF,
            _ => 0,
        }
    }

    fn network_byte(&self, offset: usize) -> u8 {
        bytes::<1>(self.frame, self.network + offset).map_or(0, |byte| byte[0])
    }
}

/// End of option list and no-operation, the same in IPv4 and TCP (RFC 791; RFC 9293, 3.1).
pub(super) const OPTION_END: u8 = 0;
pub(super) const OPTION_NOP: u8 = 1;
/// Maximum segment size (IANA, TCP option kinds).
pub(super) const TCP_OPTION_MSS: u8 = 2;
/// Window scale (RFC 7323, 2.2).
pub(super) const TCP_OPTION_WSCALE: u8 = 3;

/// `from..to`, clipped to the frame.
fn clip(frame: &[u8], from: usize, to: usize) -> Range<usize> {
    let end = to.min(frame.len());
    from.min(end)..end
}

fn part(frame: &[u8], from: usize, to: usize) -> &[u8] {
    frame.get(from..to.min(frame.len())).unwrap_or(&[])
}
