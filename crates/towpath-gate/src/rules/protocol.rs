//! Protocols by name and number.

use std::fmt;

/// The protocol of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// `ip`, `all`: any packet, including frames that are not IP.
    Any,
    /// `ip4`: any IPv4 packet.
    Ip4,
    /// `ip6`: any IPv6 packet.
    Ip6,
    /// An upper-layer protocol (IANA number).
    Number(u8),
}

impl Protocol {
    /// Parses the name or number of a protocol.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "ip" | "all" => return Some(Self::Any),
            "ip4" | "ipv4" => return Some(Self::Ip4),
            "ip6" | "ipv6" => return Some(Self::Ip6),
            _ => {}
        }
        // 0 is `ip` in /etc/protocols: any packet.
        number(text).map(|number| if number == 0 { Self::Any } else { Self::Number(number) })
    }

    /// All names that [`Self::parse`] accepts.
    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        ["ip", "all", "ip4", "ipv4", "ip6", "ipv6"].into_iter().chain(NAMES.iter().map(|(name, _)| *name))
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("ip"),
            Self::Ip4 => f.write_str("ip4"),
            Self::Ip6 => f.write_str("ip6"),
            Self::Number(number) => match NAMES.iter().find(|(_, n)| n == number) {
                Some((name, _)) => f.write_str(name),
                None => write!(f, "{number}"),
            },
        }
    }
}

/// Returns the printed name of a protocol number, if it has one.
pub fn name(number: u8) -> Option<&'static str> {
    NAMES.iter().find(|(_, n)| *n == number).map(|(name, _)| *name)
}

/// Returns the number of an upper-layer protocol by its name or number.
///
/// ```
/// use towpath_gate::rules::protocol;
///
/// assert_eq!([protocol::number("gre"), protocol::number("47"), protocol::number("any")], [Some(47), Some(47), None]);
/// ```
pub fn number(text: &str) -> Option<u8> {
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return text.parse().ok();
    }
    let lower = text.to_ascii_lowercase();
    NAMES.iter().find(|(name, _)| *name == lower).map(|(_, number)| *number)
}

/// Names and numbers (IANA, with BSD spellings). The first name of a number is printed.
const NAMES: &[(&str, u8)] = &[
    ("tcp", 6),
    ("udp", 17),
    ("icmp", 1),
    ("ipv6-icmp", 58),
    ("icmp6", 58),
    ("icmpv6", 58),
    ("ip6-icmp", 58),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
    ("sctp", 132),
    ("dccp", 33),
    ("udplite", 136),
    ("igmp", 2),
    ("ipencap", 4),
    ("ipip", 4),
    ("ggp", 3),
    ("st", 5),
    ("st2", 5),
    ("cbt", 7),
    ("egp", 8),
    ("igp", 9),
    ("pup", 12),
    ("hmp", 20),
    ("xns-idp", 22),
    ("rdp", 27),
    ("iso-tp4", 29),
    ("xtp", 36),
    ("ddp", 37),
    ("ipv6-route", 43),
    ("ipv6-frag", 44),
    ("rsvp", 46),
    ("idrp", 45),
    ("swipe", 53),
    ("narp", 54),
    ("mobile", 55),
    ("tlsp", 56),
    ("skip", 57),
    ("ipv6-nonxt", 59),
    ("ipv6-opts", 60),
    ("rspf", 73),
    ("vmtp", 81),
    ("eigrp", 88),
    ("ospf", 89),
    ("ospfigp", 89),
    ("ax.25", 93),
    ("micp", 95),
    ("etherip", 97),
    ("encap", 98),
    ("pim", 103),
    ("ipcomp", 108),
    ("vrrp", 112),
    ("carp", 112),
    ("pgm", 113),
    ("l2tp", 115),
    ("isis", 124),
    ("mobility-header", 135),
    ("fc", 133),
    ("mpls-in-ip", 137),
    ("manet", 138),
    ("hip", 139),
    ("shim6", 140),
    ("wesp", 141),
    ("rohc", 142),
    ("pfsync", 240),
    ("divert", 254),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        let rows = [
            ("tcp", "tcp"),
            ("6", "tcp"),
            ("TCP", "tcp"),
            ("all", "ip"),
            ("ipv4", "ip4"),
            ("icmp6", "ipv6-icmp"),
            ("200", "200"),
            ("0", "ip"),
        ];
        for (text, printed) in rows {
            assert_eq!(Protocol::parse(text).unwrap().to_string(), printed, "{text}");
        }
        assert_eq!(Protocol::parse("tpc"), None);
        assert_eq!(Protocol::parse("256"), None);
        for word in Protocol::names() {
            let protocol = Protocol::parse(word).unwrap();
            assert_eq!(Protocol::parse(&protocol.to_string()), Some(protocol), "{word}");
        }
    }
}
