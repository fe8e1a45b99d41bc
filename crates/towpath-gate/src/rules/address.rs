//! Addresses in rules: networks with any mask, last-octet sets, tables, `me`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::cursor::number;

/// An IPv4 network: the bits of `mask` must equal those of `addr`. The mask may be non-contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Net4 {
    /// Address, with host bits 0.
    pub addr: u32,
    /// Mask.
    pub mask: u32,
}

impl Net4 {
    /// Creates the network of `addr` with `mask`.
    pub const fn new(addr: u32, mask: u32) -> Self {
        Self { addr: addr & mask, mask }
    }

    /// Creates the network of `addr` with a prefix of `len` bits, at most 32.
    pub fn prefix(addr: u32, len: u8) -> Self {
        Self::new(addr, u32::MAX.checked_shl(32 - len as u32).unwrap_or(0))
    }

    /// Returns true if the network contains `addr`.
    #[inline]
    pub const fn contains(self, addr: u32) -> bool {
        addr & self.mask == self.addr
    }

    /// The prefix length, if the mask is contiguous.
    pub const fn prefix_len(self) -> Option<u8> {
        let ones = self.mask.leading_ones();
        if ones == self.mask.count_ones() { Some(ones as u8) } else { None }
    }
}

impl fmt::Display for Net4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addr = Ipv4Addr::from_bits(self.addr);
        match self.prefix_len() {
            Some(32) => write!(f, "{addr}"),
            Some(len) => write!(f, "{addr}/{len}"),
            None => write!(f, "{addr}:{}", Ipv4Addr::from_bits(self.mask)),
        }
    }
}

/// An IPv6 network: the bits of `mask` must equal those of `addr`. The mask may be non-contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Net6 {
    /// Address, with host bits 0.
    pub addr: u128,
    /// Mask.
    pub mask: u128,
}

impl Net6 {
    /// Creates the network of `addr` with `mask`.
    pub const fn new(addr: u128, mask: u128) -> Self {
        Self { addr: addr & mask, mask }
    }

    /// Creates the network of `addr` with a prefix of `len` bits, at most 128.
    pub fn prefix(addr: u128, len: u8) -> Self {
        Self::new(addr, u128::MAX.checked_shl(128 - len as u32).unwrap_or(0))
    }

    /// Returns true if the network contains `addr`.
    #[inline]
    pub const fn contains(self, addr: u128) -> bool {
        addr & self.mask == self.addr
    }

    /// The prefix length, if the mask is contiguous.
    pub const fn prefix_len(self) -> Option<u8> {
        let ones = self.mask.leading_ones();
        if ones == self.mask.count_ones() { Some(ones as u8) } else { None }
    }
}

impl fmt::Display for Net6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addr = Ipv6Addr::from_bits(self.addr);
        match self.prefix_len() {
            Some(128) => write!(f, "{addr}"),
            Some(len) => write!(f, "{addr}/{len}"),
            None => write!(f, "{addr}/{}", Ipv6Addr::from_bits(self.mask)),
        }
    }
}

/// A set of addresses in one IPv4 network of at most 256 addresses: `192.168.2.0/24{1,5-9}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Set4 {
    /// First address of the network.
    pub base: u32,
    /// Prefix length of the network, 24 to 32.
    pub len: u8,
    /// Last octets in the set: bit N % 64 of word N / 64 is octet N.
    pub octets: [u64; 4],
}

impl Set4 {
    /// Returns true if the set contains `addr`.
    pub const fn contains(&self, addr: u32) -> bool {
        let octet = (addr & 0xff) as usize;
        addr & 0xffff_ff00 == self.base & 0xffff_ff00 && self.octets[octet / 64] >> (octet % 64) & 1 == 1
    }
}

impl fmt::Display for Set4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}{{", Ipv4Addr::from_bits(self.base), self.len)?;
        let members = (0..=255u16).filter(|o| self.octets[usize::from(*o) / 64] >> (o % 64) & 1 == 1);
        let mut runs: Vec<(u16, u16)> = Vec::new();
        for octet in members {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == octet => *last = octet,
                _ => runs.push((octet, octet)),
            }
        }
        for (i, (lo, hi)) in runs.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if lo == hi { write!(f, "{comma}{lo}")? } else { write!(f, "{comma}{lo}-{hi}")? }
        }
        f.write_str("}")
    }
}

/// `table(name)` or `table(name,value)`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TableRef {
    /// Name of the table.
    pub name: Box<str>,
    /// If present, only entries with this value match.
    pub value: Option<u32>,
}

impl fmt::Display for TableRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.value {
            Some(value) => write!(f, "table({},{value})", self.name),
            None => write!(f, "table({})", self.name),
        }
    }
}

/// One element of an address list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// Every packet, IP or not.
    Any,
    /// An address of one of the configured ports.
    Me,
    /// An IPv6 address of one of the configured ports.
    Me6,
    /// An IPv4 network.
    Net4(Net4),
    /// An IPv6 network.
    Net6(Net6),
    /// A set of addresses of a small IPv4 network.
    Set4(Set4),
    /// The entries of a table.
    Table(TableRef),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Me => f.write_str("me"),
            Self::Me6 => f.write_str("me6"),
            Self::Net4(net) => net.fmt(f),
            Self::Net6(net) => net.fmt(f),
            Self::Set4(set) => set.fmt(f),
            Self::Table(table) => table.fmt(f),
        }
    }
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoAddress {
    pub(crate) message: String,
    pub(crate) hint: Option<&'static str>,
}

fn no(message: impl Into<String>) -> NoAddress {
    NoAddress { message: message.into(), hint: None }
}

/// Parses `table(name)` or `table(name,value)`; `None` if the text has another form.
pub(crate) fn table_ref(text: &str) -> Option<Result<TableRef, NoAddress>> {
    let inner = text.strip_prefix("table(")?.strip_suffix(')')?;
    let (name, value) = match inner.split_once(',') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (inner.trim(), None),
    };
    Some(table_name(name).and_then(|name| {
        let value = match value.map(number) {
            None => None,
            Some(Some(value)) => Some(value),
            Some(None) => return Err(no("the value in table(name,value) must be a number")),
        };
        Ok(TableRef { name, value })
    }))
}

/// Validates the name of a table.
pub(crate) fn table_name(name: &str) -> Result<Box<str>, NoAddress> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > 63 || !name.chars().all(fits) {
        return Err(NoAddress {
            message: "not a table name".into(),
            hint: Some("a table name has 1 to 63 letters, digits, '_', '-' or '.'"),
        });
    }
    Ok(name.into())
}

/// Parses one element of an address list.
pub(crate) fn parse(text: &str) -> Result<Address, NoAddress> {
    match text {
        "any" => return Ok(Address::Any),
        "me" => return Ok(Address::Me),
        "me6" => return Ok(Address::Me6),
        "me4" => {
            return Err(NoAddress {
                message: "unknown address \"me4\"".into(),
                hint: Some("use \"me\", with protocol ip4 for IPv4 only"),
            });
        }
        _ => {}
    }
    if let Some(table) = table_ref(text) {
        return table.map(Address::Table);
    }
    if let Some((project, net)) = text.split_once('@') {
        return project_net(project, net).map(Address::Net6);
    }
    if text.contains('{') {
        return set4(text).map(Address::Set4);
    }
    if let Some((addr, mask)) = text.split_once('/') {
        return match ip(addr)? {
            IpAddr::V4(addr) => mask4(mask).map(|mask| Address::Net4(Net4::new(addr.to_bits(), mask))),
            IpAddr::V6(addr) => mask6(mask).map(|mask| Address::Net6(Net6::new(addr.to_bits(), mask))),
        };
    }
    // `a:mask`. A plain IPv6 address also contains colons, so it is tried first.
    if let Ok(addr) = text.parse::<IpAddr>() {
        return Ok(match addr {
            IpAddr::V4(addr) => Address::Net4(Net4::prefix(addr.to_bits(), 32)),
            IpAddr::V6(addr) => Address::Net6(Net6::prefix(addr.to_bits(), 128)),
        });
    }
    if let Some((addr, mask)) = text.split_once(':')
        && let Ok(addr) = addr.parse::<Ipv4Addr>()
    {
        let mask: Ipv4Addr = mask.parse().map_err(|_| no("the mask in a:mask must be an address"))?;
        return Ok(Address::Net4(Net4::new(addr.to_bits(), mask.to_bits())));
    }
    Err(no_ip(text))
}

fn ip(text: &str) -> Result<IpAddr, NoAddress> {
    text.parse().map_err(|_| no_ip(text))
}

fn no_ip(text: &str) -> NoAddress {
    let numeric = text.is_empty() || text.contains(':') || text.starts_with(|c: char| c.is_ascii_digit());
    let hint = (!numeric).then_some("host names are not resolved; use an address");
    NoAddress { message: "not an address".into(), hint }
}

fn mask4(text: &str) -> Result<u32, NoAddress> {
    if let Ok(mask) = text.parse::<Ipv4Addr>() {
        return Ok(mask.to_bits());
    }
    match text.parse::<u8>() {
        Ok(len) if len <= 32 => Ok(Net4::prefix(0, len).mask),
        _ => Err(no("an IPv4 prefix length must be 0 to 32")),
    }
}

fn mask6(text: &str) -> Result<u128, NoAddress> {
    if let Ok(mask) = text.parse::<Ipv6Addr>() {
        return Ok(mask.to_bits());
    }
    match text.parse::<u8>() {
        Ok(len) if len <= 128 => Ok(Net6::prefix(0, len).mask),
        _ => Err(no("an IPv6 prefix length must be 0 to 128")),
    }
}

/// Parses `f805@2222:898::/40`: a prefix, and 32 bits of the interface identifier (bits 64 to 95 of the address).
fn project_net(project: &str, net: &str) -> Result<Net6, NoAddress> {
    let id = u32::from_str_radix(project, 16)
        .map_err(|_| no("the part before @ must be a hexadecimal number of at most 32 bits"))?;
    let (addr, len) = net.split_once('/').ok_or_else(|| no("a prefix length is missing after @"))?;
    let addr: Ipv6Addr = addr.parse().map_err(|_| no("the part after @ must be an IPv6 prefix"))?;
    let len: u8 = len
        .parse()
        .ok()
        .filter(|len| *len <= 64)
        .ok_or_else(|| no("the prefix length after @ must be 0 to 64"))?;
    let prefix = Net6::prefix(addr.to_bits(), len);
    Ok(Net6::new(prefix.addr | u128::from(id) << 32, prefix.mask | 0xffff_ffff_u128 << 32))
}

fn set4(text: &str) -> Result<Set4, NoAddress> {
    let wrong = || no("an address set has the form a/len{1,5-9}");
    let (net, members) = text.strip_suffix('}').and_then(|t| t.split_once('{')).ok_or_else(wrong)?;
    let (addr, len) = net.split_once('/').unwrap_or((net, "24"));
    let addr: Ipv4Addr = addr.parse().map_err(|_| wrong())?;
    let len: u8 = len
        .parse()
        .ok()
        .filter(|len| (24..=32).contains(len))
        .ok_or_else(|| no("the prefix length of an address set must be 24 to 32"))?;
    let net = Net4::prefix(addr.to_bits(), len);
    let mut octets = [0u64; 4];
    for member in members.split([',', ' ']).filter(|m| !m.is_empty()) {
        let (lo, hi) = member.split_once('-').unwrap_or((member, member));
        let number = |text: &str| {
            text.parse::<u8>()
                .ok()
                .filter(|octet| net.contains(net.addr & 0xffff_ff00 | u32::from(*octet)))
                .ok_or_else(|| no(format!("\"{text}\" is not a last octet of {net}")))
        };
        let (lo, hi) = (number(lo)?, number(hi)?);
        if lo > hi {
            return Err(no(format!("the range {lo}-{hi} is empty")));
        }
        (lo..=hi).for_each(|octet| octets[usize::from(octet) / 64] |= 1 << (octet % 64));
    }
    if octets == [0; 4] {
        return Err(no("the address set is empty"));
    }
    Ok(Set4 { base: net.addr, len, octets })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_print_as_ipfw_prints_them() {
        let rows = [
            ("any", "any"),
            ("me6", "me6"),
            ("10.0.0.1", "10.0.0.1"),
            ("10.0.0.1/8", "10.0.0.0/8"),
            ("10.0.0.1/255.255.0.0", "10.0.0.0/16"),
            ("10.0.0.1:255.255.255.0", "10.0.0.0/24"),
            ("10.1.2.3:255.0.255.0", "10.0.2.0:255.0.255.0"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("2001:db8::1", "2001:db8::1"),
            ("2001:db8::1/32", "2001:db8::/32"),
            ("2001:db8:0:0:5678::/ffff:ffff:0:0:ffff::", "2001:db8:0:0:5678::/ffff:ffff:0:0:ffff::"),
            ("f805@2222:898::/40", "2222:898::f805:0:0/ffff:ffff:ff00:0:ffff:ffff::"),
            ("192.168.2.9/24{9,1,5-7,6}", "192.168.2.0/24{1,5-7,9}"),
            ("192.168.2.64/26{64,127}", "192.168.2.64/26{64,127}"),
            ("table(t)", "table(t)"),
            ("table(t, 7)", "table(t,7)"),
            ("table(t,0x10)", "table(t,16)"),
        ];
        for (text, printed) in rows {
            let address = parse(text).unwrap_or_else(|e| panic!("{text}: {e:?}"));
            assert_eq!(address.to_string(), printed);
            assert_eq!(parse(printed), Ok(address), "{printed}");
        }
    }

    #[test]
    fn invalid_addresses_are_rejected() {
        for text in [
            "",
            "10.0.0",
            "10.0.0.0/33",
            "::/129",
            "::1/x",
            "host",
            "10.0.0.1:1",
            "1.2.3.4/23{1}",
            "1.2.3.4/24{}",
            "1.2.3.4/24{300}",
            "1.2.3.0/26{64}",
            "1.2.3.4/24{9-1}",
            "g@::/1",
            "1@::",
            "1@::/65",
            "table()",
            "table(a b)",
            "table(a,x)",
            "me4",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_set_contains_only_its_octets() {
        let Ok(Address::Set4(set)) = parse("192.168.2.0/24{1,5-7}") else { panic!() };
        let members: Vec<_> = (0..=255u32).filter(|o| set.contains(0xc0a8_0200 | o)).collect();
        assert_eq!(members, [1, 5, 6, 7]);
        assert!(!set.contains(0xc0a8_0301));
    }
}
