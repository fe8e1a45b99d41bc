//! Edits in place, compared with a newly computed checksum.

use proptest::prelude::*;

use super::*;

/// The Internet checksum (RFC 1071), computed word by word.
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The checksum over a TCP segment with its pseudo header.
fn tcp_checksum(addresses: &[u8], segment: &[u8]) -> u16 {
    let length = (segment.len() as u32).to_be_bytes();
    checksum(&[addresses, &[0, proto::TCP], &length, segment])
}

#[test]
fn dscp() {
    let mut bytes = frame("MACS 0800 4501 0028 1234 4000 4006 0000 ADDR4 TCP");
    let sum = checksum(&[&bytes[14..34]]);
    bytes[24..26].copy_from_slice(&sum.to_be_bytes());
    for value in [46, 0, 63, 8, 0xff] {
        assert!(edit::set_dscp(&mut bytes, 14, value));
        assert_eq!(bytes[15], (value & 0x3f) << 2 | 1, "ECN stays");
        assert_eq!(checksum(&[&bytes[14..34]]), 0);
    }

    let mut bytes = frame("6fbabcde 0008 11 40 ADDR6 UDP");
    assert!(edit::set_dscp(&mut bytes, 0, 46));
    // Traffic class 0xfb had ECN 3; the flow label stays.
    assert_eq!(bytes[..4], [0x6b, 0xba, 0xbc, 0xde]);
    assert_eq!(packet_of(LinkType::RAW, &bytes).tos(), 46 << 2 | 3);

    for short in ["", "45", "60000000", "00000000"] {
        let mut bytes = frame(short);
        assert!(!edit::set_dscp(&mut bytes, 0, 46));
        assert_eq!(bytes, frame(short));
    }
    assert!(!edit::set_dscp(&mut [0x45; 20], 21, 46));
}

#[test]
fn mss() {
    let rows = [
        // Options, and where the value is seen from the start of the segment.
        ("0204 05b4", 22),
        ("01 0204 05b4 000000", 23),
        ("0402 0204 05b4 0101", 24),
        ("0303 07 0204 05b4 00", 25),
    ];
    for (options, at) in rows {
        let header_len = 20 + frame(options).len();
        let mut bytes = frame(&format!(
            "1092 0050 00000001 00000000 {:02x} 02 faf0 0000 0000 {options} ffff",
            (header_len / 4) << 4
        ));
        let addresses = frame("ADDR4");
        let sum = tcp_checksum(&addresses, &bytes);
        bytes[16..18].copy_from_slice(&sum.to_be_bytes());
        let length = bytes.len();

        assert!(!edit::clamp_mss(&mut bytes, 0, length, 1460), "{options}");
        assert!(edit::clamp_mss(&mut bytes, 0, length, 1220), "{options}");
        assert_eq!(bytes[at..at + 2], 1220u16.to_be_bytes(), "{options}");
        assert_eq!(tcp_checksum(&addresses, &bytes), 0, "{options}");
        assert!(!edit::clamp_mss(&mut bytes, 0, length, 1220), "{options}");
    }

    // No option, a truncated one, one with a wrong length, and one after the end-of-list option.
    for options in ["01010101", "01010204", "0203 0505", "0000 0204", "0100 0204 05b4 0000"] {
        let header_len = 20 + frame(options).len();
        let mut bytes = frame(&format!(
            "1092 0050 00000001 00000000 {:02x} 02 faf0 0000 0000 {options}",
            (header_len / 4) << 4
        ));
        let before = bytes.clone();
        assert!(!edit::clamp_mss(&mut bytes, 0, header_len, 1));
        assert_eq!(bytes, before, "{options}");
    }
}

proptest! {
    /// An edit keeps the checksum valid for any words.
    #[test]
    fn checksum_stays(mss: u16, clamp: u16, seq: u32, odd: bool, value in 0u8..64, tos: u8) {
        let options = if odd { format!("01 0204 {mss:04x} 010100") } else { format!("0204 {mss:04x} 01010100") };
        let mut bytes = frame(&format!(
            "45 {tos:02x} 0030 1234 4000 4006 0000 ADDR4 1092 0050 {seq:08x} 00000000 7002 faf0 0000 0000 {options}"
        ));
        let sum = checksum(&[&bytes[..20]]);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
        let sum = tcp_checksum(&bytes[12..20], &bytes[20..]);
        bytes[36..38].copy_from_slice(&sum.to_be_bytes());

        edit::set_dscp(&mut bytes, 0, value);
        prop_assert_eq!(edit::clamp_mss(&mut bytes, 20, 28, clamp), clamp < mss);
        prop_assert_eq!(checksum(&[&bytes[..20]]), 0);
        prop_assert_eq!(tcp_checksum(&bytes[12..20], &bytes[20..]), 0);
        prop_assert_eq!(packet_of(LinkType::RAW, &bytes).tcp_mss(), Some(clamp.min(mss)));
    }
}
