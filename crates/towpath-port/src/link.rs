use std::fmt;

/// A link-layer header type, by its number in pcap files (the tcpdump.org list of LINKTYPE_ values).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkType(pub u16);

impl LinkType {
    /// BSD loopback: a 32-bit address family in the byte order of the machine that captured.
    pub const NULL: Self = Self(0);
    /// Ethernet II or 802.3.
    pub const ETHERNET: Self = Self(1);
    /// IPv4 or IPv6, no link header.
    pub const RAW: Self = Self(101);
    /// OpenBSD loopback: a 32-bit address family in network byte order.
    pub const LOOP: Self = Self(108);
    /// Linux cooked capture.
    pub const LINUX_SLL: Self = Self(113);
    /// IPv4, no link header.
    pub const IPV4: Self = Self(228);
    /// IPv6, no link header.
    pub const IPV6: Self = Self(229);
    /// Linux cooked capture, version 2.
    pub const LINUX_SLL2: Self = Self(276);

    /// The header that frames of this type begin with.
    pub const fn header(self) -> Header {
        match self.0 {
            1 => Header::Ethernet,
            // 12 and 14 are DLT_RAW of most systems and of OpenBSD: old files have them in place of 101.
            12 | 14 | 101 | 228 | 229 => Header::Ip,
            0 | 108 => Header::Null,
            113 => Header::Sll,
            276 => Header::Sll2,
            9 | 50 => Header::Ppp,
            51 => Header::PppEther,
            104 => Header::CiscoHdlc,
            107 => Header::FrameRelay,
            10 => Header::Fddi,
            239 => Header::Nflog,
            117 => Header::Pflog,
            // Before it had a number of its own, macOS wrote it as the second of those that are for anybody's use.
            149 | 258 => Header::Pktap,
            105 => Header::Wlan,
            127 => Header::Radiotap,
            _ => Header::Other,
        }
    }

    /// The name of the LINKTYPE_ constant without its prefix, for the types that are met most.
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

/// How a frame begins, as far as Towpath reads link headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Header {
    /// Ethernet, possibly with VLAN tags.
    Ethernet,
    /// None: the IP header is the first byte.
    Ip,
    /// A 32-bit address family, in either byte order.
    Null,
    /// Linux cooked capture.
    Sll,
    /// Linux cooked capture, version 2.
    Sll2,
    /// PPP, alone or in HDLC's framing.
    Ppp,
    /// PPPoE.
    PppEther,
    /// Cisco HDLC.
    CiscoHdlc,
    /// Frame relay.
    FrameRelay,
    /// FDDI.
    Fddi,
    /// Linux's netfilter log.
    Nflog,
    /// BSD's pf log.
    Pflog,
    /// The header that macOS puts before the link's.
    Pktap,
    /// 802.11.
    Wlan,
    /// 802.11 behind radiotap.
    Radiotap,
    /// Something that Towpath does not read.
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_headers() {
        #[rustfmt::skip]
        let rows = [
            (LinkType::ETHERNET,   Header::Ethernet, "ETHERNET (1)"),
            (LinkType::RAW,        Header::Ip,       "RAW (101)"),
            (LinkType(12),         Header::Ip,       "RAW (12)"),
            (LinkType::IPV6,       Header::Ip,       "IPV6 (229)"),
            (LinkType::LOOP,       Header::Null,     "LOOP (108)"),
            (LinkType::LINUX_SLL,  Header::Sll,      "LINUX_SLL (113)"),
            (LinkType::LINUX_SLL2, Header::Sll2,     "LINUX_SLL2 (276)"),
            (LinkType(50),         Header::Ppp,      "PPP_HDLC (50)"),
            (LinkType(149),        Header::Pktap,    "USER2 (149)"),
            (LinkType(189),        Header::Other,    "USB_LINUX (189)"),
            (LinkType(9999),       Header::Other,    "link type 9999"),
        ];
        for (link, header, text) in rows {
            assert_eq!((link.header(), link.to_string().as_str()), (header, text));
        }
    }
}
