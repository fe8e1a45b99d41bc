//! pcapng: blocks of type, length, body, length again. A section header begins a section, gives its byte order and
//! forgets the interfaces of the section before; interface blocks describe, in order, the interfaces that packets name
//! by number.

use super::order::Order;
use super::{MAX_BLOCK, Step, part};
use crate::{Frame, LinkType, MAX_FRAME, Meta};

// Block types (draft-ietf-opsawg-pcapng, section 4 and appendix A).
pub(super) const SECTION_HEADER: u32 = 0x0a0d_0d0a;
pub(super) const INTERFACE_DESCRIPTION: u32 = 1;
const PACKET: u32 = 2;
const SIMPLE_PACKET: u32 = 3;
pub(super) const ENHANCED_PACKET: u32 = 6;

/// Byte-order magic of a section header.
pub(super) const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;

// Options.
const OPT_ENDOFOPT: u16 = 0;
pub(super) const IF_TSRESOL: u16 = 9;
const IF_TSOFFSET: u16 = 14;

/// Type, length, and the same length at the end.
const FRAMING: usize = 12;

/// Interfaces that one section may describe: what the obsolete packet block could count.
const MAX_INTERFACES: usize = 1 << 16;

/// The section being read.
#[derive(Debug)]
pub(super) struct Ng {
    order: Order,
    interfaces: Vec<Interface>,
    /// Interfaces of earlier sections: each section's numbers begin after them.
    base: u32,
    /// Time of the last packet, for simple packets, which have none.
    last_ns: u64,
    nanos: bool,
}

#[derive(Debug)]
struct Interface {
    link: LinkType,
    snaplen: u32,
    ticks: Ticks,
    offset_ns: i64,
}

/// How the interface's time stamps become nanoseconds.
#[derive(Clone, Copy, Debug)]
enum Ticks {
    Times(u64),
    Over(u64),
    /// Units of 2^-n seconds.
    Binary(u32),
}

impl Ng {
    pub(super) fn new() -> Self {
        Self { order: Order::Little, interfaces: Vec::new(), base: 0, last_ns: 0, nanos: false }
    }

    /// Whether an interface so far counts in less than microseconds.
    pub(super) fn nanos(&self) -> bool {
        self.nanos
    }

    /// The block that `bytes` begins with.
    pub(super) fn next<'a>(&mut self, bytes: &'a [u8]) -> Step<'a> {
        if bytes.len() < FRAMING {
            return Step::More;
        }
        let kind = self.order.u32(bytes, 0);
        let order = match kind {
            SECTION_HEADER => match section_order(bytes) {
                Some(order) => order,
                None => return Step::Corrupt("a section header without the byte-order magic".into()),
            },
            _ => self.order,
        };
        let len = order.u32(bytes, 4) as usize;
        if len < FRAMING {
            return Step::Corrupt(format!("a block says it has {len} bytes"));
        }
        if len > MAX_BLOCK {
            return match kind {
                SECTION_HEADER | INTERFACE_DESCRIPTION | PACKET | SIMPLE_PACKET | ENHANCED_PACKET => {
                    Step::Corrupt(format!("a block says it has {len} bytes (the most is {MAX_BLOCK})"))
                }
                _ => Step::Skip(len as u64),
            };
        }
        if bytes.len() < len {
            return Step::More;
        }
        let again = order.u32(bytes, len - 4) as usize;
        if again != len {
            return Step::Corrupt(format!("a block says it has {len} bytes, and at its end {again}"));
        }
        let body = &bytes[8..len - 4];
        let step = match kind {
            SECTION_HEADER => self.section(order, body),
            INTERFACE_DESCRIPTION => self.interface(body),
            ENHANCED_PACKET => return self.enhanced(body, len),
            PACKET => return self.packet(body, len),
            SIMPLE_PACKET => return self.simple(body, len),
            _ => Ok(()),
        };
        match step {
            Ok(()) => Step::Skip(len as u64),
            Err(reason) => Step::Corrupt(reason),
        }
    }

    fn section(&mut self, order: Order, body: &[u8]) -> Result<(), String> {
        if body.len() < 16 {
            return Err(format!("a section header of {} bytes", body.len()));
        }
        let major = order.u16(body, 4);
        if major != 1 {
            return Err(format!("pcapng version {major}; only version 1 is known"));
        }
        self.order = order;
        self.base = self.base.saturating_add(self.interfaces.len() as u32);
        self.interfaces.clear();
        Ok(())
    }

    fn interface(&mut self, body: &[u8]) -> Result<(), String> {
        if body.len() < 8 {
            return Err(format!("an interface description of {} bytes", body.len()));
        }
        if self.interfaces.len() == MAX_INTERFACES {
            return Err(format!("a section with more than {MAX_INTERFACES} interfaces"));
        }
        let mut interface = Interface {
            link: LinkType(self.order.u16(body, 0)),
            snaplen: self.order.u32(body, 4),
            ticks: Ticks::Times(1_000),
            offset_ns: 0,
        };
        for (code, value) in (Options { order: self.order, rest: &body[8..] }) {
            match (code, value) {
                (IF_TSRESOL, &[resolution, ..]) => {
                    interface.ticks = Ticks::new(resolution);
                    self.nanos |= !matches!(interface.ticks, Ticks::Times(1_000..));
                }
                (IF_TSOFFSET, value) if value.len() == 8 => {
                    let seconds = self.order.u64(value, 0) as i64;
                    interface.offset_ns = seconds.saturating_mul(1_000_000_000);
                }
                _ => {}
            }
        }
        self.interfaces.push(interface);
        Ok(())
    }

    fn enhanced<'a>(&mut self, body: &'a [u8], used: usize) -> Step<'a> {
        if body.len() < 20 {
            return Step::Corrupt(format!("an enhanced packet block of {used} bytes"));
        }
        self.frame(self.order.u32(body, 0), body, used)
    }

    /// The obsolete packet block: as the enhanced one, with a shorter interface number and a count of drops.
    fn packet<'a>(&mut self, body: &'a [u8], used: usize) -> Step<'a> {
        if body.len() < 20 {
            return Step::Corrupt(format!("a packet block of {used} bytes"));
        }
        self.frame(u32::from(self.order.u16(body, 0)), body, used)
    }

    /// `body`: interface, time stamp, captured length, length on the wire, bytes, options.
    #[inline]
    fn frame<'a>(&mut self, number: u32, body: &'a [u8], used: usize) -> Step<'a> {
        let Some(interface) = self.interfaces.get(number as usize) else {
            return Step::Corrupt(format!("a packet of interface {number}, which was not described"));
        };
        let caplen = self.order.u32(body, 12) as usize;
        if caplen > MAX_FRAME {
            return Step::Corrupt(format!("a packet says it has {caplen} bytes (the most is {MAX_FRAME})"));
        }
        let Some(bytes) = body.get(20..20 + caplen) else {
            return Step::Corrupt(format!("a packet says it has {caplen} bytes, its block {used}"));
        };
        self.last_ns = interface.time_ns(self.order.high_low(body, 4));
        let wire_len = self.order.u32(body, 16);
        let frame = Frame {
            bytes: part(bytes, wire_len),
            wire_len,
            time_ns: self.last_ns,
            link: interface.link,
            interface: self.base.saturating_add(number),
            meta: Meta::default(),
        };
        Step::Frame { frame, used }
    }

    fn simple<'a>(&mut self, body: &'a [u8], used: usize) -> Step<'a> {
        let Some(interface) = self.interfaces.first() else {
            return Step::Corrupt("a simple packet, and no interface was described".into());
        };
        if body.len() < 4 {
            return Step::Corrupt(format!("a simple packet block of {used} bytes"));
        }
        let wire_len = self.order.u32(body, 0);
        let snaplen = if interface.snaplen == 0 { u32::MAX } else { interface.snaplen };
        let caplen = (wire_len.min(snaplen) as usize).min(body.len() - 4);
        if caplen > MAX_FRAME {
            return Step::Corrupt(format!("a packet says it has {caplen} bytes (the most is {MAX_FRAME})"));
        }
        let frame = Frame {
            bytes: &body[4..4 + caplen],
            wire_len,
            time_ns: self.last_ns,
            link: interface.link,
            interface: self.base,
            meta: Meta::default(),
        };
        Step::Frame { frame, used }
    }
}

impl Interface {
    #[inline]
    fn time_ns(&self, ticks: u64) -> u64 {
        let ns = match self.ticks {
            Ticks::Times(factor) => ticks.saturating_mul(factor),
            Ticks::Over(divisor) => ticks / divisor,
            Ticks::Binary(shift) => {
                u64::try_from((u128::from(ticks) * 1_000_000_000) >> shift).unwrap_or(u64::MAX)
            }
        };
        ns.saturating_add_signed(self.offset_ns)
    }
}

impl Ticks {
    /// "If the Most Significant Bit is equal to zero, the remaining bits indicate the resolution of the timestamp as a
    /// negative power of 10 [...] If [it] is equal to one, [...] as a negative power of 2" (if_tsresol).
    fn new(resolution: u8) -> Self {
        let exponent = u32::from(resolution & 0x7f);
        match (resolution & 0x80, exponent) {
            (0, ..=9) => Self::Times(10u64.pow(9 - exponent)),
            // Beyond 10^-28 s all of 64 bits is less than a nanosecond.
            (0, _) => 10u64.checked_pow(exponent - 9).map_or(Self::Binary(127), Self::Over),
            (_, shift) => Self::Binary(shift),
        }
    }
}

/// The byte order that a section header's third word tells.
fn section_order(bytes: &[u8]) -> Option<Order> {
    [Order::Little, Order::Big].into_iter().find(|order| order.u32(bytes, 8) == BYTE_ORDER_MAGIC)
}

/// The options at the end of a block, up to the first that does not fit: code and value.
struct Options<'a> {
    order: Order,
    rest: &'a [u8],
}

impl<'a> Iterator for Options<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.len() < 4 {
            return None;
        }
        let (code, len) = (self.order.u16(self.rest, 0), usize::from(self.order.u16(self.rest, 2)));
        let value = self.rest.get(4..4 + len)?;
        if code == OPT_ENDOFOPT {
            return None;
        }
        self.rest = self.rest.get(4 + len.next_multiple_of(4)..).unwrap_or_default();
        Some((code, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps() {
        const S: i64 = 1_000_000_000;
        #[rustfmt::skip]
        let rows = [
            // if_tsresol, offset in s,       ticks, nanoseconds
            (6,            0,             1_500_000, 1_500_000_000),
            (9,            0,                    42, 42),
            (0,            0,                     3, 3_000_000_000),
            (3,            10,                1_500, 11_500_000_000),
            (12,           0,             7_000_999, 7_000),
            (28,           0,              u64::MAX, 1),
            (127,          0,              u64::MAX, 0),
            (0x80 | 10,    0,                  1536, 1_500_000_000),
            (0x80 | 20,    -1,              1 << 21, 1_000_000_000),
            (0x80 | 127,   0,              u64::MAX, 0),
            (0,            0,              u64::MAX, u64::MAX),
            (6,            -1,                    5, 0),
        ];
        for (resolution, offset, ticks, expected) in rows {
            let interface = Interface {
                link: LinkType::ETHERNET,
                snaplen: 0,
                ticks: Ticks::new(resolution),
                offset_ns: offset * S,
            };
            assert_eq!(interface.time_ns(ticks), expected, "if_tsresol {resolution:#x}, {ticks} ticks");
        }
    }
}
