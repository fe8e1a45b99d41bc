//! Netlink messages of the NFQUEUE subsystem, parsed and emitted: bytes in, values out.
//!
//! Numbers inside attributes are in network byte order, those in netlink headers in native byte order.
//! References: linux/netlink.h, linux/netfilter/nfnetlink_queue.h, linux/netfilter/nfnetlink_conntrack.h.

use std::ops::Range;

use crate::{Conntrack, Queued};

const HEADER: usize = 16;
/// Length of `struct nfgenmsg`, which precedes the attributes.
const GENERIC: usize = 4;
/// Flag bits of an attribute type: nested, network byte order.
const TYPE_MASK: u16 = 0x3fff;
/// NLA_F_NESTED.
const NESTED: i32 = 1 << 15;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;

/// linux/netfilter/nfnetlink_conntrack.h, `enum ctattr_type`.
const CTA_STATUS: u16 = 3;
pub(super) const CTA_MARK: u16 = 8;
const CTA_ID: u16 = 12;

/// A message from the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Message {
    Packet(Packet),
    /// Acknowledgement of the request with this sequence number: 0 or an errno.
    Answer {
        seq: u32,
        errno: i32,
    },
    /// Any other message.
    Other,
}

/// A queued packet.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) queued: Queued,
    pub(super) in_interface: u32,
    pub(super) time_ns: Option<u64>,
    /// Range of its bytes in the message.
    pub(super) payload: Range<usize>,
    /// Length of the packet if it was truncated.
    pub(super) len: Option<u32>,
    /// `NFQA_SKB_` bits.
    pub(super) info: u32,
}

/// Parses the first message in `bytes`.
pub(super) fn parse(bytes: &[u8]) -> Message {
    let Some(header) = bytes.first_chunk::<HEADER>() else { return Message::Other };
    let len = native32(header, 0) as usize;
    let kind = u16::from_ne_bytes([header[4], header[5]]);
    let Some(message) = bytes.get(..len).filter(|message| message.len() >= HEADER + GENERIC) else {
        return Message::Other;
    };
    if kind == NLMSG_ERROR {
        let errno = (native32(message, HEADER) as i32).wrapping_neg();
        return Message::Answer { seq: native32(header, 8), errno };
    }
    if kind != request(libc::NFQNL_MSG_PACKET) {
        return Message::Other;
    }
    packet(message).map_or(Message::Other, Message::Packet)
}

fn packet(message: &[u8]) -> Option<Packet> {
    let mut packet = Packet::default();
    let mut conntrack = None::<Conntrack>;
    let mut numbered = false;
    for (kind, range) in attributes(message, HEADER + GENERIC..message.len()) {
        let value = &message[range.clone()];
        match i32::from(kind) {
            libc::NFQA_PACKET_HDR => {
                packet.queued.id = big32(value, 0)?;
                packet.queued.hook = *value.get(6)?;
                numbered = true;
            }
            libc::NFQA_MARK => packet.queued.mark = big32(value, 0)?,
            libc::NFQA_TIMESTAMP => {
                let (seconds, micros) = (big64(value, 0)?, big64(value, 8)?);
                let ns = seconds.saturating_mul(1_000_000_000).saturating_add(micros.saturating_mul(1_000));
                packet.time_ns = Some(ns);
            }
            libc::NFQA_IFINDEX_INDEV => packet.in_interface = big32(value, 0)?,
            libc::NFQA_IFINDEX_OUTDEV => packet.queued.out_interface = big32(value, 0)?,
            libc::NFQA_PAYLOAD => packet.payload = range,
            libc::NFQA_CAP_LEN => packet.len = Some(big32(value, 0)?),
            libc::NFQA_SKB_INFO => packet.info = big32(value, 0)?,
            libc::NFQA_CT_INFO => conntrack.get_or_insert_default().info = big32(value, 0)?,
            libc::NFQA_CT => connection(message, range, conntrack.get_or_insert_default()),
            _ => {}
        }
    }
    packet.queued.conntrack = conntrack;
    packet.queued.cut = packet.len.is_some_and(|len| len as usize > packet.payload.len());
    numbered.then_some(packet)
}

fn connection(message: &[u8], range: Range<usize>, conntrack: &mut Conntrack) {
    for (kind, range) in attributes(message, range) {
        let Some(value) = big32(&message[range], 0) else { continue };
        match kind {
            CTA_STATUS => conntrack.status = value,
            CTA_MARK => conntrack.mark = value,
            CTA_ID => conntrack.id = value,
            _ => {}
        }
    }
}

/// Type and range of each complete attribute in `range`.
fn attributes(message: &[u8], range: Range<usize>) -> impl Iterator<Item = (u16, Range<usize>)> + '_ {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let header = message.get(at..range.end)?.first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & TYPE_MASK;
        if len < 4 || at + len > range.end {
            return None;
        }
        let value = at + 4..at + len;
        at += len.next_multiple_of(4);
        Some((kind, value))
    })
}

/// A buffer of requests.
#[derive(Debug, Default)]
pub(super) struct Requests {
    bytes: Vec<u8>,
    /// Offset of the last request.
    last: usize,
    seq: u32,
}

impl Requests {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
    }

    /// Begins a request about `queue`; returns its sequence number.
    pub(super) fn begin(&mut self, message: i32, queue: u16, acknowledge: bool) -> u32 {
        self.last = self.bytes.len();
        self.seq = self.seq.wrapping_add(1);
        let flags = NLM_F_REQUEST | if acknowledge { NLM_F_ACK } else { 0 };
        self.bytes.extend_from_slice(&((HEADER + GENERIC) as u32).to_ne_bytes());
        self.bytes.extend_from_slice(&request(message).to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&self.seq.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        // AF_UNSPEC, NFNETLINK_V0, the queue.
        self.bytes.extend_from_slice(&[0, 0]);
        self.bytes.extend_from_slice(&queue.to_be_bytes());
        self.seq
    }

    /// Adds an attribute to the last request and returns the range of its value.
    pub(super) fn attribute(&mut self, kind: i32, value: &[u8]) -> Range<usize> {
        self.bytes.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&(kind as u16).to_ne_bytes());
        let start = self.bytes.len();
        self.bytes.extend_from_slice(value);
        let place = start..self.bytes.len();
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        let len = (self.bytes.len() - self.last) as u32;
        self.bytes[self.last..self.last + 4].copy_from_slice(&len.to_ne_bytes());
        place
    }

    /// Adds an attribute that contains one attribute.
    pub(super) fn nested(&mut self, kind: i32, inner: u16, value: &[u8]) {
        let inner = [&((4 + value.len()) as u16).to_ne_bytes()[..], &inner.to_ne_bytes(), value].concat();
        self.attribute(kind | NESTED, &inner);
    }

    /// Adds `NFQA_VERDICT_HDR`.
    pub(super) fn verdict(&mut self, verdict: i32, id: u32) {
        let mut value = [0; 8];
        value[..4].copy_from_slice(&(verdict as u32).to_be_bytes());
        value[4..].copy_from_slice(&id.to_be_bytes());
        self.attribute(libc::NFQA_VERDICT_HDR, &value);
    }

    pub(super) fn at_mut(&mut self, place: Range<usize>) -> &mut [u8] {
        &mut self.bytes[place]
    }
}

fn request(message: i32) -> u16 {
    ((libc::NFNL_SUBSYS_QUEUE << 8) | message) as u16
}

fn native32(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn big32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn big64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message() -> Vec<u8> {
        let mut requests = Requests::default();
        requests.begin(libc::NFQNL_MSG_PACKET, 5, false);
        requests.attribute(libc::NFQA_PACKET_HDR, &[0, 0, 1, 2, 8, 0, 2]);
        requests.attribute(libc::NFQA_MARK, &[0, 0, 0, 9]);
        requests.attribute(libc::NFQA_IFINDEX_INDEV, &[0, 0, 0, 3]);
        requests.attribute(libc::NFQA_IFINDEX_OUTDEV, &[0, 0, 0, 4]);
        requests.attribute(libc::NFQA_TIMESTAMP, &[0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 5]);
        requests.attribute(libc::NFQA_CT_INFO, &[0, 0, 0, 2]);
        let nested: Vec<u8> = [(CTA_STATUS, 14_u32), (CTA_MARK, 77), (CTA_ID, 123)]
            .into_iter()
            .flat_map(|(kind, value)| {
                [&8_u16.to_ne_bytes()[..], &kind.to_ne_bytes(), &value.to_be_bytes()].concat()
            })
            .collect();
        requests.attribute(libc::NFQA_CT | 0x8000, &nested);
        requests.attribute(libc::NFQA_SKB_INFO, &[0, 0, 0, 3]);
        requests.attribute(libc::NFQA_CAP_LEN, &[0, 0, 5, 220]);
        requests.attribute(libc::NFQA_PAYLOAD, b"a packet");
        requests.bytes().to_vec()
    }

    #[test]
    fn a_packet_is_read() {
        let bytes = message();
        let Message::Packet(packet) = parse(&bytes) else { panic!("a packet") };
        let conntrack = Some(Conntrack { info: 2, id: 123, status: 14, mark: 77 });
        let queued =
            Queued { id: 258, hook: 2, out_interface: 4, listed: [None; 2], mark: 9, cut: true, conntrack };
        assert_eq!(packet.queued, queued);
        assert_eq!((packet.in_interface, packet.time_ns, packet.info), (3, Some(2_000_005_000), 3));
        assert_eq!(packet.len, Some(1500));
        assert_eq!(&bytes[packet.payload], b"a packet");
    }

    /// A verdict with the mark of a connection is read as the kernel reads it (nfnl_ct_hook::parse): CTA_MARK inside NFQA_CT.
    #[test]
    fn the_mark_of_a_connection_is_nested() {
        let mut requests = Requests::default();
        requests.begin(libc::NFQNL_MSG_VERDICT, 5, false);
        requests.verdict(libc::NF_ACCEPT, 258);
        requests.nested(libc::NFQA_CT, CTA_MARK, &77_u32.to_be_bytes());
        let bytes = requests.bytes();
        assert_eq!(native32(bytes, 0) as usize, bytes.len());
        let kind = u16::from_ne_bytes([bytes[bytes.len() - 10], bytes[bytes.len() - 9]]);
        assert_eq!(kind, libc::NFQA_CT as u16 | 0x8000, "NLA_F_NESTED");
        let (_, range) = attributes(bytes, HEADER + GENERIC..bytes.len()).last().unwrap();
        let mut conntrack = Conntrack::default();
        connection(bytes, range, &mut conntrack);
        assert_eq!(conntrack, Conntrack { mark: 77, ..Conntrack::default() });
    }

    proptest! {
        #[test]
        fn damage_is_no_panic(at in 0_usize..200, value: u8, cut in 0_usize..200) {
            let mut bytes = message();
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
            bytes.truncate(cut);
            if let Message::Packet(packet) = parse(&bytes) {
                prop_assert!(packet.payload.end <= bytes.len());
            }
        }
    }
}
