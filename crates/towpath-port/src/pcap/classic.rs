//! Classic pcap: a file header of 24 bytes, then records: seconds, fraction, captured length, length on the wire, bytes.
//! Before version 2.3, and in some files with version 2.3, the two lengths are in reverse order.

use super::order::Order;
use super::{Step, part};
use crate::{Frame, LinkType, MAX_FRAME, Meta};

/// Length of the file header.
pub(super) const HEADER: usize = 24;
/// Magic number of microsecond files.
pub(super) const MAGIC_MICROS: u32 = 0xa1b2_c3d4;
/// Magic number of nanosecond files.
pub(super) const MAGIC_NANOS: u32 = 0xa1b2_3c4d;
/// Magic number of the "modified" format (Kuznetsov's libpcap): 8 more bytes in every record header.
const MAGIC_MODIFIED: u32 = 0xa1b2_cd34;

/// Fields of the file header.
#[derive(Debug)]
pub(super) struct Classic {
    order: Order,
    link: LinkType,
    /// Nanoseconds in one unit of the fraction.
    unit: u64,
    record_header: usize,
    lengths: Lengths,
}

/// Which length comes first in a record.
#[derive(Clone, Copy, Debug)]
enum Lengths {
    Captured,
    Wire,
    /// The smaller one is the captured one.
    Either,
}

impl Classic {
    /// Whether `magic`, the first bytes of a file, is one of pcap's.
    pub(super) fn recognise(magic: &[u8; 4]) -> bool {
        Self::kind(magic).is_some()
    }

    /// Reads the file header; `None` when it is not pcap's.
    pub(super) fn parse(header: &[u8; HEADER]) -> Option<Self> {
        let (order, magic) = Self::kind(header.first_chunk()?)?;
        Some(Self {
            order,
            // The upper half of the field has the length of the frame check sequence and reserved bits.
            link: LinkType(order.u32(header, 20) as u16),
            unit: if magic == MAGIC_NANOS { 1 } else { 1_000 },
            record_header: if magic == MAGIC_MODIFIED { 24 } else { 16 },
            // As in libpcap (sf-pcap.c); 543.0 is what tcpdump of DG/UX wrote.
            lengths: match (order.u16(header, 4), order.u16(header, 6)) {
                (2, ..=2) | (543, _) => Lengths::Wire,
                (2, 3) => Lengths::Either,
                _ => Lengths::Captured,
            },
        })
    }

    pub(super) fn nanos(&self) -> bool {
        self.unit == 1
    }

    /// The record that `input` begins with.
    #[inline]
    pub(super) fn next<'a>(&self, input: &'a [u8]) -> Step<'a> {
        if input.len() < self.record_header {
            return Step::More;
        }
        let (first, second) = (self.order.u32(input, 8), self.order.u32(input, 12));
        let (caplen, wire_len) = match self.lengths {
            Lengths::Wire => (second, first),
            Lengths::Either if first > second => (second, first),
            _ => (first, second),
        };
        let caplen = caplen as usize;
        if caplen > MAX_FRAME {
            // Otherwise a damaged length would make the reader buffer the rest of the file.
            return Step::Corrupt(format!(
                "a packet record says it has {caplen} bytes (the most is {MAX_FRAME})"
            ));
        }
        let used = self.record_header + caplen;
        if input.len() < used {
            return Step::More;
        }
        let seconds = u64::from(self.order.u32(input, 0));
        let fraction = u64::from(self.order.u32(input, 4));
        let frame = Frame {
            bytes: part(&input[self.record_header..used], wire_len),
            wire_len,
            time_ns: seconds * 1_000_000_000 + fraction * self.unit,
            link: self.link,
            interface: 0,
            meta: Meta::default(),
        };
        Step::Frame { frame, used }
    }

    fn kind(magic: &[u8; 4]) -> Option<(Order, u32)> {
        [(Order::Little, u32::from_le_bytes(*magic)), (Order::Big, u32::from_be_bytes(*magic))]
            .into_iter()
            .find(|(_, magic)| matches!(*magic, MAGIC_MICROS | MAGIC_NANOS | MAGIC_MODIFIED))
    }
}
