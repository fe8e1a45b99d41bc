//! Internet checksums: finish an unfinished one, update one after a change, tell an unfinished one from a right one.
//!
//! What: ones' complement sums of 16-bit words (RFC 1071), over frames that a local host or a tunnel handed over before its
//! network card would have finished them.
//! Invariant: nothing outside the checksum field is written; a frame that is too short for what is said of it is left as it is.
//! References: RFC 1071, RFC 1624 (incremental update), RFC 768 (a UDP checksum of 0 means none), RFC 8200 section 8.1.

use crate::headers::{self, Headers};
use crate::{Checksum, Frame, LinkType, Offload};

/// Finishes what [`Checksum::Partial`] describes: sums `bytes` from `start` and stores the complement at `start + offset`.
///
/// Returns whether the places lie inside the frame; it is unchanged otherwise.
///
/// ```
/// use towpath_port::checksum;
///
/// // A transport header of 8 bytes whose checksum field (at 6) holds the pseudo header's sum, 0x0102.
/// let mut frame = [0x12, 0x34, 0x00, 0x50, 0x00, 0x08, 0x01, 0x02];
/// assert!(checksum::finish(&mut frame, 0, 6));
/// assert_eq!(checksum::sum(&frame, 0x0102), 0xffff); // what a receiver checks
/// ```
pub fn finish(bytes: &mut [u8], start: usize, offset: usize) -> bool {
    let Some(covered) = bytes.get(start..) else { return false };
    if covered.len() < offset.saturating_add(2) {
        return false;
    }
    // RFC 768: "If the computed checksum is zero, it is transmitted as all ones". For the others the two mean the same.
    let value = match !sum(covered, 0) {
        0 => 0xffff,
        value => value,
    };
    let at = start + offset;
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
    true
}

/// The ones' complement sum of `bytes` as big-endian words (an odd last byte is followed by a zero), added to `initial`.
pub fn sum(bytes: &[u8], initial: u16) -> u16 {
    // Any multiple of 16 bits at a time in the machine's order gives the same sum with its bytes swapped (RFC 1071, 2.B). Eight lanes
    // of 32 bits in 64 let the compiler use vectors; 4 GiB of ones do not overflow one.
    let mut lanes = [0_u64; 8];
    let mut chunks = bytes.chunks_exact(32);
    for chunk in &mut chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(4)) {
            *lane += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        }
    }
    let mut total: u64 = lanes.iter().map(|lane| (lane & 0xffff_ffff) + (lane >> 32)).sum();
    let mut pairs = chunks.remainder().chunks_exact(2);
    for pair in &mut pairs {
        total += u64::from(u16::from_ne_bytes([pair[0], pair[1]]));
    }
    if let [last] = pairs.remainder() {
        total += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    fold(u64::from(u16::from_be(fold(total))) + u64::from(initial))
}

/// The checksum after `old` bytes that it covers became `new`: equation 3 of RFC 1624, `HC' = ~(~HC + ~m + m')`.
///
/// Both begin at an even place of what is summed and have the same length.
///
/// # Panics
/// When the lengths differ.
pub fn update(checksum: u16, old: &[u8], new: &[u8]) -> u16 {
    assert_eq!(old.len(), new.len(), "bytes in place of as many");
    !fold(u64::from(!checksum) + u64::from(!sum(old, 0)) + u64::from(sum(new, 0)))
}

/// Finishes a frame's checksum, as far as `offload` says that it is unfinished; what is left to do after that.
pub fn complete(bytes: &mut [u8], offload: Offload) -> Offload {
    match offload.checksum {
        Checksum::Partial { start, offset } if offload.gso.is_none() => {
            finish(bytes, start.into(), offset.into());
            Offload::default()
        }
        _ => offload,
    }
}

/// Makes every checksum of a frame whose bytes were changed right again, whatever they were: the IPv4 header's, and that of TCP,
/// UDP, ICMP and ICMPv6 in a whole packet. A UDP checksum of 0 over IPv4 stays (RFC 768: none was made). Returns what is left to
/// do: nothing, or [`Checksum::Partial`] for a frame that is still to be cut.
pub fn renew(link: LinkType, bytes: &mut [u8], offload: Offload) -> Offload {
    let Some(headers) = headers::locate(link, bytes) else { return offload };
    headers.renew_ip(bytes);
    let Some(offset) = headers.checksum_offset().filter(|_| !headers.fragment) else {
        return Offload { checksum: Checksum::Unverified, ..offload };
    };
    let field = headers.transport + offset;
    if field + 2 > headers.end {
        return Offload { checksum: Checksum::Unverified, ..offload };
    }
    let unfinished = matches!(offload.checksum, Checksum::Partial { .. });
    if headers.is_udp() && !headers.six && bytes[field..field + 2] == [0, 0] && !unfinished {
        return offload;
    }
    let pseudo = headers.pseudo(bytes);
    bytes[field..field + 2].copy_from_slice(&pseudo.to_be_bytes());
    if offload.gso.is_some() {
        let checksum = Checksum::Partial { start: headers.transport as u16, offset: offset as u16 };
        return Offload { checksum, ..offload };
    }
    finish(&mut bytes[..headers.end], headers.transport, offset);
    Offload::default()
}

/// Whether a TCP or UDP checksum is unfinished, for media that do not tell (AF_XDP): its field holds exactly the pseudo
/// header's sum, and it is not by chance also right.
pub fn detect(frame: Frame<'_>) -> Checksum {
    let Some(headers) = headers::locate(frame.link, frame.bytes).filter(|headers| !headers.fragment) else {
        return Checksum::Unverified;
    };
    match unfinished(&headers, frame.bytes) {
        Some(offset) => Checksum::Partial { start: headers.transport as u16, offset: offset as u16 },
        None => Checksum::Unverified,
    }
}

fn unfinished(headers: &Headers, bytes: &[u8]) -> Option<usize> {
    let offset = headers.checksum_offset().filter(|_| headers.is_tcp() || headers.is_udp())?;
    let field = headers.transport + offset;
    let held = u16::from_be_bytes(*bytes.get(field..headers.end)?.first_chunk()?);
    let pseudo = headers.pseudo(bytes);
    if held != pseudo || held == 0 {
        return None;
    }
    let right = sum(&bytes[headers.transport..headers.end], pseudo) == 0xffff;
    (!right).then_some(offset)
}

fn fold(mut total: u64) -> u16 {
    while total >> 16 != 0 {
        total = (total & 0xffff) + (total >> 16);
    }
    total as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RFC 1071 as it is written: one word after the other.
    fn slow(bytes: &[u8]) -> u16 {
        let mut total = 0_u32;
        for pair in bytes.chunks(2) {
            total += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            total = (total & 0xffff) + (total >> 16);
        }
        total as u16
    }

    proptest! {
        #[test]
        fn sums_as_the_rfc_does(bytes: Vec<u8>) {
            prop_assert_eq!(sum(&bytes, 0), slow(&bytes));
        }

        #[test]
        fn an_updated_checksum_is_that_of_the_changed_bytes(
            mut bytes in prop::collection::vec(any::<u8>(), 8..100),
            new: [u8; 4],
        ) {
            let before = !sum(&bytes, 0);
            let updated = update(before, &bytes[2..6], &new);
            bytes[2..6].copy_from_slice(&new);
            // The two zeroes of ones' complement are one value.
            let zero = |value: u16| if value == 0xffff { 0 } else { value };
            prop_assert_eq!(zero(updated), zero(!sum(&bytes, 0)));
        }

        #[test]
        fn places_outside_the_frame_are_refused(mut bytes: Vec<u8>, start: u16, offset: u16) {
            let inside = usize::from(start) + usize::from(offset) + 2 <= bytes.len();
            prop_assert_eq!(finish(&mut bytes, start.into(), offset.into()), inside);
        }
    }

    #[test]
    fn rfc_1071_has_an_example() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(sum(&bytes, 0), 0xddf2);
    }
}
