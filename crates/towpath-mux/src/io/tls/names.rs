//! Names in the certificate of a client.
//!
//! A name that a client cannot have in full is left out: a part of a name could be the name of another client.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// Maximum number of names of a connection.
const COUNT: usize = 32;
/// Maximum bytes of all names of a connection, with a separator each: they fit into `struct towpath_worker_event`.
const BYTES: usize = 1023;

/// DER tags (ITU-T X.690).
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
/// UTF8String, PrintableString, IA5String: texts whose bytes are UTF-8.
const TEXTS: [u8; 3] = [0x0c, 0x13, 0x16];
/// id-at-commonName, 2.5.4.3 (RFC 5280, appendix A.1).
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// The names of a verified certificate: the DNS names and URIs of its subject alternative name, or its common name if it has none of
/// them.
pub(super) fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    // A configuration of the application may accept certificates that are none.
    let Ok(certificate) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    let alternative = certificate.valid_dns_names().chain(certificate.valid_uri_names());
    let mut alternative = alternative.peekable();
    match alternative.peek() {
        Some(_) => bounded(alternative),
        None => bounded(common_name(certificate.subject()).into_iter()),
    }
}

/// Those that are texts without control characters, within the bounds.
fn bounded<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut rest = BYTES;
    let mut kept = Vec::new();
    for name in names {
        // A newline separates names in C.
        if name.is_empty() || name.chars().any(char::is_control) {
            continue;
        }
        if kept.len() == COUNT || name.len() >= rest {
            log::debug!(
                "a client certificate has more than {COUNT} names, or {BYTES} bytes of names: some are left out"
            );
            continue;
        }
        rest -= name.len() + 1;
        kept.push(name.to_owned());
    }
    kept
}

/// The last common name of a subject: SETs of SEQUENCEs of an object identifier and a text (RFC 5280, 4.1.2.4). The last one is the most
/// specific.
fn common_name(mut subject: &[u8]) -> Option<&str> {
    let mut found = None;
    while let Some((SET, mut attributes, rest)) = value(subject) {
        subject = rest;
        while let Some((SEQUENCE, attribute, rest)) = value(attributes) {
            attributes = rest;
            if let Some((OBJECT_IDENTIFIER, COMMON_NAME, rest)) = value(attribute)
                && let Some((tag, text, _)) = value(rest)
                && TEXTS.contains(&tag)
            {
                found = std::str::from_utf8(text).ok();
            }
        }
    }
    found
}

/// Tag and contents of the first value, and what follows it. Lengths of more than two bytes are not expected in a subject.
fn value(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, short], rest) = der.split_first_chunk()?;
    let (length, rest) = match short {
        0..=0x7f => (usize::from(short), rest),
        0x81 => rest.split_first().map(|(length, rest)| (usize::from(*length), rest))?,
        0x82 => rest.split_first_chunk().map(|(length, rest)| (u16::from_be_bytes(*length).into(), rest))?,
        _ => return None,
    };
    let (contents, rest) = rest.split_at_checked(length)?;
    Some((tag, contents, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn of(alternative: &[SanType], common: &[&str]) -> Vec<String> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = alternative.to_vec();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "organization");
        common.iter().for_each(|name| params.distinguished_name.push(DnType::CommonName, *name));
        let key = KeyPair::generate().expect("a key");
        names(params.self_signed(&key).expect("a certificate").der())
    }

    fn dns(name: &str) -> SanType {
        SanType::DnsName(name.try_into().expect("ASCII"))
    }

    fn uri(name: &str) -> SanType {
        SanType::URI(name.try_into().expect("ASCII"))
    }

    #[test]
    fn alternative_names_precede_the_common_name() {
        let address = SanType::IpAddress([192, 0, 2, 1].into());
        let rows: [(&[SanType], &[&str], &[&str]); 8] = [
            (&[dns("a.example"), uri("urn:b")], &["common"], &["a.example", "urn:b"]),
            (&[address], &["common"], &["common"]),
            (&[], &["J\u{fc}rgen"], &["J\u{fc}rgen"]),
            (&[], &[&"x".repeat(200)], &[&"x".repeat(200)]),
            (&[], &["a\nb"], &[]),
            (&[uri("urn:a\nurn:b"), uri("urn:c")], &["common"], &["urn:c"]),
            (&[uri("urn:a\0b")], &["common"], &[]),
            (&[], &[], &[]),
        ];
        for (alternative, common, expected) in rows {
            assert_eq!(of(alternative, common), expected, "{alternative:?} {common:?}");
        }
    }

    #[test]
    fn names_are_bounded_and_never_cut() {
        let many: Vec<_> = (0..100).map(|number| dns(&format!("{number}.example"))).collect();
        assert_eq!(of(&many, &[]), (0..COUNT).map(|number| format!("{number}.example")).collect::<Vec<_>>());
        let long = "u".repeat(BYTES - 1);
        assert_eq!(of(&[uri(&long), dns("a.example")], &[]), ["a.example"]);
        assert_eq!(of(&[uri(&long)], &[]), [long.as_str()]);
        assert_eq!(of(&[uri(&format!("{long}u")), dns("a.example")], &[]), ["a.example"]);
    }

    proptest! {
        #[test]
        fn a_subject_of_any_bytes_is_parsed(subject: Vec<u8>) {
            let _ = common_name(&subject);
        }
    }
}
