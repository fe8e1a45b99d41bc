//! Table types and keys.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::rules::option::MacMask;

/// The type of a table's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Addresses with a prefix length; the longest prefix matches.
    Addr,
    /// Port names.
    Iface,
    /// 32-bit numbers.
    Number,
    /// Flows, or some of their fields.
    Flow(FlowFields),
    /// Ethernet addresses with a prefix length; the longest prefix matches.
    Mac,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Addr => f.write_str("addr"),
            Self::Iface => f.write_str("iface"),
            Self::Number => f.write_str("number"),
            Self::Flow(fields) => write!(f, "flow:{fields}"),
            Self::Mac => f.write_str("mac"),
        }
    }
}

/// The fields of a flow in a table's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowFields {
    /// Source address.
    pub src_ip: bool,
    /// Protocol.
    pub proto: bool,
    /// Source port.
    pub src_port: bool,
    /// Destination address.
    pub dst_ip: bool,
    /// Destination port.
    pub dst_port: bool,
}

impl FlowFields {
    /// All five fields.
    pub const ALL: Self = Self { src_ip: true, proto: true, src_port: true, dst_ip: true, dst_port: true };
}

impl fmt::Display for FlowFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            (self.src_ip, "src-ip"),
            (self.proto, "proto"),
            (self.src_port, "src-port"),
            (self.dst_ip, "dst-ip"),
            (self.dst_port, "dst-port"),
        ];
        let mut comma = "";
        for (_, word) in words.iter().filter(|(there, _)| *there) {
            write!(f, "{comma}{word}")?;
            comma = ",";
        }
        Ok(())
    }
}

/// A flow as a key. Fields that the table does not use are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey {
    /// Source address.
    pub src_ip: Option<IpAddr>,
    /// Protocol.
    pub proto: u8,
    /// Source port.
    pub src_port: u16,
    /// Destination address.
    pub dst_ip: Option<IpAddr>,
    /// Destination port.
    pub dst_port: u16,
}

/// A key of any type.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// An IPv4 prefix.
    Net4(u32, u8),
    /// An IPv6 prefix.
    Net6(u128, u8),
    /// A port name.
    Iface(Box<str>),
    /// A number.
    Number(u32),
    /// A flow.
    Flow(FlowKey),
    /// An Ethernet prefix.
    Mac(u64, u8),
}

impl Key {
    /// Creates the key of an Ethernet address with a mask; `None` if the mask is not contiguous.
    pub fn mac(mac: MacMask) -> Option<Self> {
        let bits = |octets: [u8; 6]| octets.iter().fold(0u64, |bits, o| bits << 8 | u64::from(*o)) << 16;
        let mask = bits(mac.mask);
        let ones = mask.leading_ones();
        (ones == mask.count_ones()).then(|| Self::Mac(bits(mac.addr), ones as u8))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Net4(addr, len) => write!(f, "{}/{len}", Ipv4Addr::from_bits(*addr)),
            Self::Net6(addr, len) => write!(f, "{}/{len}", Ipv6Addr::from_bits(*addr)),
            Self::Iface(name) => f.write_str(name),
            Self::Number(number) => write!(f, "{number}"),
            Self::Flow(key) => {
                let mut comma = "";
                if let Some(ip) = key.src_ip {
                    write!(f, "{ip}")?;
                    comma = ",";
                }
                if key.proto != 0 {
                    write!(f, "{comma}{}", key.proto)?;
                    comma = ",";
                }
                if key.src_port != 0 {
                    write!(f, "{comma}{}", key.src_port)?;
                    comma = ",";
                }
                if let Some(ip) = key.dst_ip {
                    write!(f, "{comma}{ip}")?;
                    comma = ",";
                }
                if key.dst_port != 0 {
                    write!(f, "{comma}{}", key.dst_port)?;
                }
                Ok(())
            }
            Self::Mac(bits, len) => {
                let [a, b, c, d, e, g, ..] = bits.to_be_bytes();
                write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}/{len}")
            }
        }
    }
}
