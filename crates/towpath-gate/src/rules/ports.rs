//! Lists of 16-bit numbers and ranges: ports, lengths, identifications, times to live, tags, EtherTypes.

use std::fmt;

/// Maximum number of elements in a list, as in ipfw.
pub const MAX_RANGES: usize = 30;

/// A list of numbers and ranges, in the order written.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Ranges(pub Vec<(u16, u16)>);

impl Ranges {
    /// Returns true if one of the ranges contains `number`.
    #[inline]
    pub fn contains(&self, number: u16) -> bool {
        self.0.iter().any(|(lo, hi)| (*lo..=*hi).contains(&number))
    }
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (lo, hi)) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if lo == hi { write!(f, "{comma}{lo}")? } else { write!(f, "{comma}{lo}-{hi}")? }
        }
        Ok(())
    }
}

/// A bad element: its byte offset and the error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadRange {
    pub(crate) offset: usize,
    pub(crate) message: String,
    /// The word, if it may be a misspelt name.
    pub(crate) word: Option<String>,
}

/// Parses a list. `number` parses one end of a range.
pub(crate) fn parse(
    text: &str,
    what: &str,
    number: impl Fn(&str) -> Option<u16>,
) -> Result<Ranges, Vec<BadRange>> {
    let mut ranges = Vec::new();
    let mut bad = Vec::new();
    let mut offset = 0;
    for element in text.split(',') {
        match range(element, what, &number) {
            Ok(range) if ranges.len() < MAX_RANGES => ranges.push(range),
            Ok(_) => {
                let message = format!("more than {MAX_RANGES} elements in one list");
                bad.push(BadRange { offset, message, word: None });
                break;
            }
            Err(_) if bad.len() == MAX_RANGES => break,
            Err((message, word)) => bad.push(BadRange { offset, message, word }),
        }
        offset += element.len() + 1;
    }
    if bad.is_empty() { Ok(Ranges(ranges)) } else { Err(bad) }
}

fn range(
    element: &str,
    what: &str,
    number: impl Fn(&str) -> Option<u16>,
) -> Result<(u16, u16), (String, Option<String>)> {
    let unescaped = element.replace('\\', "");
    if let Some(number) = number(&unescaped) {
        return Ok((number, number));
    }
    let unknown = |word: &str| {
        let word = word.replace('\\', "");
        (format!("{} is not a valid {what}", super::diagnostic::quoted(&word)), Some(word))
    };
    let Some((lo, hi)) = split_range(element) else { return Err(unknown(element)) };
    let (Some(first), Some(last)) = (number(&lo.replace('\\', "")), number(&hi.replace('\\', ""))) else {
        return Err(unknown(element));
    };
    if first > last {
        return Err((format!("the range {first}-{last} is empty"), None));
    }
    Ok((first, last))
}

/// Splits at the first `-` that is not escaped with a backslash.
fn split_range(element: &str) -> Option<(&str, &str)> {
    let at = element.match_indices('-').map(|(at, _)| at).find(|at| !element[..*at].ends_with('\\'))?;
    Some((&element[..at], &element[at + 1..]))
}

/// Parses a 16-bit number, decimal or with 0x. A leading 0 is rejected: ipfw reads such a number as octal, which
/// is seldom intended.
pub(crate) fn decimal(text: &str) -> Option<u16> {
    match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(hex) => u16::from_str_radix(hex, 16).ok(),
        None if text.starts_with('+') || (text.starts_with('0') && text.len() > 1) => None,
        None => text.parse().ok(),
    }
}

/// Parses a port number or service name.
pub(crate) fn port(text: &str) -> Option<u16> {
    decimal(text).or_else(|| SERVICES.iter().find(|(name, _)| *name == text).map(|(_, port)| *port))
}

/// Parses an EtherType: hexadecimal, with or without 0x, or a name.
pub(crate) fn ethertype(text: &str) -> Option<u16> {
    let named = ETHERTYPES.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
    named.or_else(|| u16::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok())
}

/// Service names (IANA) for port numbers.
pub(crate) const SERVICES: &[(&str, u16)] = &[
    ("tcpmux", 1),
    ("echo", 7),
    ("discard", 9),
    ("daytime", 13),
    ("chargen", 19),
    ("ftp-data", 20),
    ("ftp", 21),
    ("ssh", 22),
    ("telnet", 23),
    ("smtp", 25),
    ("time", 37),
    ("whois", 43),
    ("tacacs", 49),
    ("domain", 53),
    ("bootps", 67),
    ("bootpc", 68),
    ("tftp", 69),
    ("gopher", 70),
    ("finger", 79),
    ("http", 80),
    ("kerberos", 88),
    ("pop2", 109),
    ("pop3", 110),
    ("sunrpc", 111),
    ("auth", 113),
    ("ident", 113),
    ("nntp", 119),
    ("ntp", 123),
    ("msrpc", 135),
    ("epmap", 135),
    ("netbios-ns", 137),
    ("netbios-dgm", 138),
    ("netbios-ssn", 139),
    ("imap", 143),
    ("imap2", 143),
    ("snmp", 161),
    ("snmptrap", 162),
    ("snmp-trap", 162),
    ("xdmcp", 177),
    ("bgp", 179),
    ("irc", 194),
    ("ldap", 389),
    ("https", 443),
    ("microsoft-ds", 445),
    ("kpasswd", 464),
    ("submissions", 465),
    ("smtps", 465),
    ("isakmp", 500),
    ("exec", 512),
    ("login", 513),
    ("who", 513),
    ("shell", 514),
    ("syslog", 514),
    ("printer", 515),
    ("talk", 517),
    ("route", 520),
    ("router", 520),
    ("ripng", 521),
    ("uucp", 540),
    ("klogin", 543),
    ("kshell", 544),
    ("dhcpv6-client", 546),
    ("dhcpv6-server", 547),
    ("rtsp", 554),
    ("nntps", 563),
    ("submission", 587),
    ("ipp", 631),
    ("ldaps", 636),
    ("ldp", 646),
    ("rsync", 873),
    ("domain-s", 853),
    ("ftps-data", 989),
    ("ftps", 990),
    ("telnets", 992),
    ("imaps", 993),
    ("pop3s", 995),
    ("socks", 1080),
    ("openvpn", 1194),
    ("ms-sql-s", 1433),
    ("l2tp", 1701),
    ("l2f", 1701),
    ("pptp", 1723),
    ("radius", 1812),
    ("radius-acct", 1813),
    ("ssdp", 1900),
    ("nfsd", 2049),
    ("nfs", 2049),
    ("cvspserver", 2401),
    ("mysql", 3306),
    ("rdp", 3389),
    ("ms-wbt-server", 3389),
    ("svn", 3690),
    ("vxlan", 4789),
    ("sip", 5060),
    ("sips", 5061),
    ("mdns", 5353),
    ("postgresql", 5432),
    ("rfb", 5900),
    ("x11", 6000),
    ("redis", 6379),
    ("git", 9418),
    ("http-alt", 8080),
    ("ipsec-nat-t", 4500),
    ("nicname", 43),
    ("www", 80),
    ("kerberos-sec", 88),
    ("netbios_ns", 137),
    ("netbios_dgm", 138),
    ("netbios_ssn", 139),
    ("dhcps", 67),
    ("dhcpc", 68),
    ("biff", 512),
    ("rlogin", 513),
    ("rwho", 513),
    ("ntalk", 518),
    ("timed", 525),
    ("globalcatLDAP", 3268),
    ("iscsi-target", 3260),
    ("nut", 3493),
    ("lockd", 4045),
    ("sieve", 4190),
    ("xmpp-client", 5222),
    ("xmpp-server", 5269),
    ("amqp", 5672),
    ("cvsup", 5999),
    ("mqtt", 1883),
    ("webcache", 8080),
    ("natd", 8668),
    ("systat", 11),
    ("qotd", 17),
    ("mail", 25),
    ("nameserver", 42),
    ("hostname", 101),
    ("hostnames", 101),
    ("rpcbind", 111),
    ("sftp", 115),
    ("imap4", 143),
    ("cmd", 514),
    ("spooler", 515),
    ("routed", 520),
    ("kerberos-adm", 749),
    ("eklogin", 2105),
    ("zabbix-agent", 10050),
    ("zabbix-trapper", 10051),
];

/// EtherType names.
pub(crate) const ETHERTYPES: &[(&str, u16)] = &[
    ("ip", 0x0800),
    ("ipv4", 0x0800),
    ("ip4", 0x0800),
    ("ipv6", 0x86dd),
    ("ip6", 0x86dd),
    ("arp", 0x0806),
    ("rarp", 0x8035),
    ("vlan", 0x8100),
    ("loop", 0x9000),
    ("trail", 0x1000),
    ("at", 0x809b),
    ("atalk", 0x809b),
    ("aarp", 0x80f3),
    ("pppoe_disc", 0x8863),
    ("pppoe_sess", 0x8864),
    ("ipx_8022", 0x00e0),
    ("ipx_8023", 0x0000),
    ("ipx_ii", 0x8137),
    ("ipx_snap", 0x8137),
    ("ipx", 0x8137),
    ("ns", 0x0600),
    ("eapol", 0x888e),
    ("lldp", 0x88cc),
    ("mpls", 0x8847),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parse_and_print() {
        let rows = [
            ("80", "80"),
            ("http,https", "80,443"),
            ("1024-65535", "1024-65535"),
            ("0-0", "0"),
            ("ftp\\-data-ssh", "20-22"),
            ("ftp-data", "20"),
            ("0x50", "80"),
            ("rpcbind,cmd", "111,514"),
        ];
        for (text, printed) in rows {
            let ranges = parse(text, "port", port).unwrap();
            assert_eq!(ranges.to_string(), printed, "{text}");
        }
    }

    #[test]
    fn every_bad_element_is_named() {
        let bad = parse("80,xx,65536,9-1", "port", port).unwrap_err();
        let seen: Vec<_> = bad.iter().map(|b| (b.offset, b.message.as_str())).collect();
        assert_eq!(
            seen,
            [
                (3, "\"xx\" is not a valid port"),
                (6, "\"65536\" is not a valid port"),
                (12, "the range 9-1 is empty")
            ]
        );
        assert_eq!(parse(&vec!["1"; 31].join(","), "port", port).unwrap_err().len(), 1);
    }
}
