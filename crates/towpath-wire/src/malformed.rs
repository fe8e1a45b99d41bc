use std::error::Error;
use std::fmt;

/// The reason why a frame is malformed: the first inconsistent or truncated header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Malformed {
    /// The link header (Ethernet, VLAN, SNAP, cooked capture, loopback) is longer than the frame.
    LinkCut,
    /// More than 16 VLAN tags.
    TooManyTags,
    /// The version of the IP header differs from the EtherType, or is neither 4 nor 6.
    Version,
    /// Fewer than 20 bytes of IPv4 header.
    Ip4Cut,
    /// The IPv4 header length is below 20 bytes or exceeds the packet.
    Ip4HeaderLength,
    /// The IPv4 total length is below the header length or exceeds the frame.
    Ip4TotalLength,
    /// Fewer than 40 bytes of IPv6 header.
    Ip6Cut,
    /// The IPv6 payload length exceeds the frame.
    Ip6PayloadLength,
    /// A jumbo payload option that does not fit the packet (RFC 2675, section 3).
    Ip6Jumbo,
    /// An IPv6 extension header ends beyond the packet.
    Ip6ExtensionCut,
    /// More than 16 IPv6 extension headers.
    Ip6TooManyExtensions,
    /// The packet, or the first fragment, ends inside its upper-layer header.
    UpperCut,
    /// The TCP data offset is below 20 bytes, or beyond the segment.
    TcpDataOffset,
    /// The UDP length is below 8 bytes, or beyond the packet.
    UdpLength,
    /// The UDP-Lite checksum coverage is 1 to 7 bytes, or beyond the packet (RFC 3828, section 3.1).
    UdpLiteCoverage,
    /// The capture is too short to contain the addresses, the ports or the ICMP type.
    CaptureCut,
}

impl Malformed {
    /// All reasons, in the order of declaration: `ALL[reason as usize] == reason`.
    pub const ALL: [Self; 16] = [
        Self::LinkCut,
        Self::TooManyTags,
        Self::Version,
        Self::Ip4Cut,
        Self::Ip4HeaderLength,
        Self::Ip4TotalLength,
        Self::Ip6Cut,
        Self::Ip6PayloadLength,
        Self::Ip6Jumbo,
        Self::Ip6ExtensionCut,
        Self::Ip6TooManyExtensions,
        Self::UpperCut,
        Self::TcpDataOffset,
        Self::UdpLength,
        Self::UdpLiteCoverage,
        Self::CaptureCut,
    ];

    /// A short description.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::LinkCut => "link header cut off",
            Self::TooManyTags => "too many VLAN tags or MPLS labels",
            Self::Version => "wrong IP version",
            Self::Ip4Cut => "IPv4 header cut off",
            Self::Ip4HeaderLength => "IPv4 header length too short or beyond the packet",
            Self::Ip4TotalLength => "IPv4 total length too short or beyond the frame",
            Self::Ip6Cut => "IPv6 header cut off",
            Self::Ip6PayloadLength => "IPv6 payload length beyond the frame",
            Self::Ip6Jumbo => "IPv6 jumbo payload option does not fit the packet",
            Self::Ip6ExtensionCut => "IPv6 extension header cut off",
            Self::Ip6TooManyExtensions => "too many IPv6 extension headers",
            Self::UpperCut => "upper-layer header cut off",
            Self::TcpDataOffset => "TCP data offset too short or beyond the segment",
            Self::UdpLength => "UDP length too short or beyond the packet",
            Self::UdpLiteCoverage => "UDP-Lite checksum coverage too short or beyond the packet",
            Self::CaptureCut => "cut short by the capture",
        }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

impl Error for Malformed {}
