//! A packet inside a packet: where a sender with a tunnel left a checksum unfinished, it is the inner one's.
//!
//! IP in IP (RFC 2003, RFC 4213), GRE (RFC 2784, RFC 2890), VXLAN (RFC 7348), Geneve (RFC 8926).

use crate::headers::{self, Headers};

/// Packets, the outermost included.
const DEPTH: usize = 4;

/// These headers, those of the packet inside theirs, and so on.
pub(crate) fn nested(bytes: &[u8], headers: Headers) -> impl Iterator<Item = Headers> + '_ {
    std::iter::successors(Some(headers), move |outer| inner(bytes, outer)).take(DEPTH)
}

fn inner(bytes: &[u8], outer: &Headers) -> Option<Headers> {
    let (bytes, at) = (bytes.get(..outer.end)?, outer.transport);
    if outer.fragment {
        return None;
    }
    let of_type = |ethertype, at| match ethertype {
        0x0800 | 0x86dd => headers::ip(bytes, at),
        // Transparent Ethernet bridging.
        0x6558 => ethernet(bytes, at),
        _ => None,
    };
    match outer.protocol {
        4 | 41 => headers::ip(bytes, at),
        47 => {
            // Checksum, key, sequence number; a source route or another version (PPTP) is not looked into.
            let flags = word(bytes, at)?;
            let fields = [0x8000, 0x2000, 0x1000].iter().filter(|bit| flags & **bit != 0).count();
            (flags & 0x4007 == 0).then(|| of_type(word(bytes, at + 2)?, at + 4 + fields * 4))?
        }
        17 => match word(bytes, at + 2)? {
            // VXLAN's port, and Linux's before there was one.
            4789 | 8472 => ethernet(bytes, at + 16),
            6081 => {
                let options = usize::from(bytes.get(at + 8)? & 0x3f) * 4;
                of_type(word(bytes, at + 10)?, at + 16 + options)
            }
            _ => None,
        },
        _ => None,
    }
}

fn ethernet(bytes: &[u8], at: usize) -> Option<Headers> {
    headers::ip(bytes, at + headers::ethernet(bytes.get(at..)?)?)
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}
