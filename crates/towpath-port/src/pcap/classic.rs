//! Classic pcap: a file header of 24 bytes, then records: seconds, fraction, captured length, length on the wire, bytes.

use super::Step;
use super::order::Order;
use crate::{Frame, LinkType, MAX_FRAME, Meta};

/// Length of the file header.
pub(super) const HEADER: usize = 24;
/// Magic number of microsecond files.
pub(super) const MAGIC_MICROS: u32 = 0xa1b2_c3d4;
/// Magic number of nanosecond files.
pub(super) const MAGIC_NANOS: u32 = 0xa1b2_3c4d;
/// Magic number of the "modified" format (Kuznetsov's libpcap): 8 more bytes in every record header.
const MAGIC_MODIFIED: u32 = 0xa1b2_cd34;

/// What the file header says.
#[derive(Debug)]
pub(super) struct Classic {
    order: Order,
    link: LinkType,
    /// Nanoseconds in one unit of the fraction.
    unit: u64,
    record_header: usize,
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
        })
    }

    pub(super) fn nanos(&self) -> bool {
        self.unit == 1
    }

    /// The record that `window` begins with.
    #[inline]
    pub(super) fn next<'a>(&self, window: &'a [u8]) -> Step<'a> {
        if window.len() < self.record_header {
            return Step::More;
        }
        let caplen = self.order.u32(window, 8) as usize;
        if caplen > MAX_FRAME {
            // Otherwise a damaged length would make us swallow, and hold, the rest of the file.
            return Step::Corrupt(format!(
                "a packet record says it has {caplen} bytes (the most is {MAX_FRAME})"
            ));
        }
        let used = self.record_header + caplen;
        if window.len() < used {
            return Step::More;
        }
        let seconds = u64::from(self.order.u32(window, 0));
        let fraction = u64::from(self.order.u32(window, 4));
        let frame = Frame {
            bytes: &window[self.record_header..used],
            wire_len: self.order.u32(window, 12).max(caplen as u32),
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
