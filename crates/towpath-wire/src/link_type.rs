use std::fmt;

/// The type of a frame's link-layer header: a number of the [LINKTYPE_ list] of libpcap.
///
/// Any number is valid. [`parse`](crate::parse) reads the headers of the types in [`LinkType::CANONICAL`] and their aliases;
/// a frame of any other type is a packet without IP addresses.
///
/// [LINKTYPE_ list]: https://www.tcpdump.org/linktypes.html
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkType(pub u16);

impl LinkType {
    /// BSD loopback: a 32-bit address family in the byte order of the capturing host.
    pub const NULL: Self = Self(0);
    /// Ethernet II or IEEE 802.3, with any number of VLAN tags.
    pub const ETHERNET: Self = Self(1);
    /// PPP, with or without address and control fields.
    pub const PPP: Self = Self(9);
    /// FDDI.
    pub const FDDI: Self = Self(10);
    /// PPP in HDLC-like framing (RFC 1662), or Cisco HDLC.
    pub const PPP_HDLC: Self = Self(50);
    /// PPPoE without its Ethernet header.
    pub const PPP_ETHER: Self = Self(51);
    /// IPv4 or IPv6 without a link header. Also the frames of a TUN device.
    pub const RAW: Self = Self(101);
    /// Cisco HDLC.
    pub const C_HDLC: Self = Self(104);
    /// IEEE 802.11.
    pub const IEEE802_11: Self = Self(105);
    /// Frame Relay.
    pub const FRELAY: Self = Self(107);
    /// OpenBSD loopback: a 32-bit address family in network byte order.
    pub const LOOP: Self = Self(108);
    /// Linux cooked capture, version 1.
    pub const LINUX_SLL: Self = Self(113);
    /// OpenBSD pf log.
    pub const PFLOG: Self = Self(117);
    /// IEEE 802.11 after a radiotap header.
    pub const IEEE802_11_RADIOTAP: Self = Self(127);
    /// IPv4 without a link header.
    pub const IPV4: Self = Self(228);
    /// IPv6 without a link header.
    pub const IPV6: Self = Self(229);
    /// Linux netfilter log (`NFLOG`).
    pub const NFLOG: Self = Self(239);
    /// macOS packet metadata in front of the link header.
    pub const PKTAP: Self = Self(258);
    /// Linux cooked capture, version 2.
    pub const LINUX_SLL2: Self = Self(276);
    /// No link header that this crate reads. Not on the LINKTYPE_ list.
    ///
    /// [`tunnel::inner`](crate::tunnel::inner) returns it for a packet that follows a bare EtherType.
    pub const UNKNOWN: Self = Self(u16::MAX);

    /// One value per link header format, [`UNKNOWN`](Self::UNKNOWN) included: the results of [`canonical`](Self::canonical).
    pub const CANONICAL: [Self; 16] = [
        Self::ETHERNET,
        Self::RAW,
        Self::NULL,
        Self::LINUX_SLL,
        Self::LINUX_SLL2,
        Self::UNKNOWN,
        Self::PPP,
        Self::PPP_ETHER,
        Self::C_HDLC,
        Self::FRELAY,
        Self::FDDI,
        Self::NFLOG,
        Self::PFLOG,
        Self::PKTAP,
        Self::IEEE802_11,
        Self::IEEE802_11_RADIOTAP,
    ];

    /// The representative of all types with the same link header format.
    ///
    /// [`IPV4`](Self::IPV4), [`IPV6`](Self::IPV6) and the DLT_RAW numbers 12 and 14 map to [`RAW`](Self::RAW),
    /// [`LOOP`](Self::LOOP) to [`NULL`](Self::NULL), [`PPP_HDLC`](Self::PPP_HDLC) to [`PPP`](Self::PPP), the number 149 that macOS
    /// used before PKTAP was assigned to [`PKTAP`](Self::PKTAP), and types that this crate does not read to
    /// [`UNKNOWN`](Self::UNKNOWN).
    #[inline]
    pub const fn canonical(self) -> Self {
        match self.0 {
            1 | 10 | 51 | 104 | 105 | 107 | 113 | 117 | 127 | 239 | 276 => self,
            12 | 14 | 101 | 228 | 229 => Self::RAW,
            0 | 108 => Self::NULL,
            9 | 50 => Self::PPP,
            149 | 258 => Self::PKTAP,
            _ => Self::UNKNOWN,
        }
    }

    /// Returns true if [`parse`](crate::parse) reads the link header.
    pub const fn is_supported(self) -> bool {
        self.canonical().0 != Self::UNKNOWN.0
    }

    /// Returns true if frames begin with an IP header.
    #[inline]
    pub const fn is_raw_ip(self) -> bool {
        matches!(self.0, 12 | 14 | 101 | 228 | 229)
    }

    /// The name of the LINKTYPE_ constant without its prefix, for common types.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "NULL",
            1 => "ETHERNET",
            6 => "IEEE802_5",
            8 => "SLIP",
            9 => "PPP",
            10 => "FDDI",
            12 | 14 | 101 => "RAW",
            50 => "PPP_HDLC",
            51 => "PPP_ETHER",
            104 => "C_HDLC",
            105 => "IEEE802_11",
            107 => "FRELAY",
            108 => "LOOP",
            113 => "LINUX_SLL",
            117 => "PFLOG",
            127 => "IEEE802_11_RADIOTAP",
            149 => "USER2",
            189 => "USB_LINUX",
            195 => "IEEE802_15_4_WITHFCS",
            220 => "USB_LINUX_MMAPPED",
            228 => "IPV4",
            229 => "IPV6",
            239 => "NFLOG",
            253 => "NETLINK",
            258 => "PKTAP",
            276 => "LINUX_SLL2",
            _ => return None,
        })
    }
}

impl fmt::Display for LinkType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "link type {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_types_and_names() {
        #[rustfmt::skip]
        let rows = [
            (LinkType::ETHERNET,   LinkType::ETHERNET,   "ETHERNET (1)"),
            (LinkType::RAW,        LinkType::RAW,        "RAW (101)"),
            (LinkType(12),         LinkType::RAW,        "RAW (12)"),
            (LinkType::IPV6,       LinkType::RAW,        "IPV6 (229)"),
            (LinkType::LOOP,       LinkType::NULL,       "LOOP (108)"),
            (LinkType::LINUX_SLL,  LinkType::LINUX_SLL,  "LINUX_SLL (113)"),
            (LinkType::LINUX_SLL2, LinkType::LINUX_SLL2, "LINUX_SLL2 (276)"),
            (LinkType(50),         LinkType::PPP,        "PPP_HDLC (50)"),
            (LinkType(149),        LinkType::PKTAP,      "USER2 (149)"),
            (LinkType(189),        LinkType::UNKNOWN,    "USB_LINUX (189)"),
            (LinkType(9999),       LinkType::UNKNOWN,    "link type 9999"),
        ];
        for (link, canonical, text) in rows {
            assert_eq!((link.canonical(), link.to_string().as_str()), (canonical, text));
            assert_eq!(link.is_supported(), canonical != LinkType::UNKNOWN, "{text}");
            assert_eq!(link.is_raw_ip(), canonical == LinkType::RAW, "{text}");
        }
        for link in LinkType::CANONICAL {
            assert_eq!(link.canonical(), link);
        }
    }
}
