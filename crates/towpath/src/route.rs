//! Where a packet leaves: the longest prefix that holds its destination names a port.

use std::net::IpAddr;
use std::str::FromStr;

use towpath_gate::packet::Addresses;

/// An address prefix, `10.0.0.0/8` or `2001:db8::/32`; without a length a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    v6: bool,
    bits: u128,
    len: u8,
}

impl Prefix {
    fn holds(&self, v6: bool, address: u128) -> bool {
        self.v6 == v6 && (address ^ self.bits) & mask(self.width(), self.len) == 0
    }

    fn width(&self) -> u8 {
        if self.v6 { 128 } else { 32 }
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, len) = text.split_once('/').map_or((text, None), |(a, l)| (a, Some(l)));
        let (v6, bits) = match address.parse() {
            Ok(IpAddr::V4(a)) => (false, u128::from(a.to_bits())),
            Ok(IpAddr::V6(a)) => (true, a.to_bits()),
            Err(_) => return Err(format!("`{address}` is not an IP address")),
        };
        let width = if v6 { 128 } else { 32 };
        let len = match len.map_or(Ok(width), str::parse) {
            Ok(len) if len <= width => len,
            _ => return Err(format!("prefix length of `{text}` is not in 0..{width}")),
        };
        Ok(Self { v6, bits: bits & mask(width, len), len })
    }
}

/// The routes of a run, longest prefix first.
#[derive(Clone, Debug)]
pub struct Routes<T> {
    longest_first: Vec<(Prefix, T)>,
}

impl<T> Default for Routes<T> {
    fn default() -> Self {
        Self { longest_first: Vec::new() }
    }
}

impl<T: Copy> Routes<T> {
    /// Adds a route. Of two routes with the same prefix the later one wins.
    pub fn add(&mut self, prefix: Prefix, port: T) {
        let at = self.longest_first.partition_point(|(p, _)| p.len > prefix.len);
        self.longest_first.insert(at, (prefix, port));
    }

    /// True when there is no route at all.
    pub fn is_empty(&self) -> bool {
        self.longest_first.is_empty()
    }

    /// The port for a packet's destination, if a prefix holds it.
    ///
    /// ```
    /// use towpath::route::Routes;
    /// use towpath_gate::packet::Addresses;
    ///
    /// let mut routes = Routes::default();
    /// routes.add("0.0.0.0/0".parse()?, 1);
    /// routes.add("10.0.0.0/8".parse()?, 2);
    /// let to = |dst| Addresses::V4([192, 0, 2, 1].into(), dst);
    /// assert_eq!(routes.lookup(to([10, 1, 2, 3].into())), Some(2));
    /// assert_eq!(routes.lookup(to([11, 1, 2, 3].into())), Some(1));
    /// # Ok::<(), String>(())
    /// ```
    pub fn lookup(&self, addresses: Addresses) -> Option<T> {
        let (v6, address) = match addresses {
            Addresses::None => return None,
            Addresses::V4(_, dst) => (false, u128::from(dst.to_bits())),
            Addresses::V6(_, dst) => (true, dst.to_bits()),
        };
        self.longest_first.iter().find(|(p, _)| p.holds(v6, address)).map(|&(_, port)| port)
    }
}

/// The `len` highest of `width` bits.
fn mask(width: u8, len: u8) -> u128 {
    let all = u128::MAX >> (128 - u32::from(width));
    all & !all.checked_shr(u32::from(len)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v6(dst: &str) -> Addresses {
        Addresses::V6("::1".parse().unwrap(), dst.parse().unwrap())
    }

    #[test]
    fn the_longest_prefix_wins_whatever_the_order() {
        let mut routes = Routes::default();
        for (prefix, port) in [("2001:db8::/32", 1), ("::/0", 2), ("2001:db8::1", 3), ("2001:db8::/32", 4)] {
            routes.add(prefix.parse().unwrap(), port);
        }
        for (dst, port) in [("2001:db8::1", 3), ("2001:db8::2", 4), ("2001:db9::", 2)] {
            assert_eq!(routes.lookup(v6(dst)), Some(port), "{dst}");
        }
        assert_eq!(routes.lookup(Addresses::V4([1, 2, 3, 4].into(), [1, 2, 3, 4].into())), None);
        assert_eq!(routes.lookup(Addresses::None), None);
    }

    #[test]
    fn wrong_prefixes_are_named() {
        let rows = [
            ("10.0.0.0/33", "prefix length of `10.0.0.0/33` is not in 0..32"),
            ("::/129", "prefix length of `::/129` is not in 0..128"),
            ("10.0.0/8", "`10.0.0` is not an IP address"),
            ("10.0.0.0/x", "prefix length of `10.0.0.0/x` is not in 0..32"),
        ];
        for (text, message) in rows {
            assert_eq!(text.parse::<Prefix>(), Err(message.to_owned()));
        }
    }
}
