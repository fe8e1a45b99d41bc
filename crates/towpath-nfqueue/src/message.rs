//! Messages to the program: `NFQNL_MSG_PACKET` as the kernel writes it (linux/netfilter/nfnetlink_queue.h), and datagrams of them.

use crate::data::{HEADER, nfqa};

/// Longest datagram with several messages: the receive buffer of most programs.
pub(crate) const DATAGRAM: usize = 4096;
/// `NFNL_SUBSYS_QUEUE << 8 | NFQNL_MSG_PACKET`.
pub(crate) const PACKET: u16 = 3 << 8;
/// Bytes of `struct nlmsghdr` and `struct nfgenmsg`.
pub(crate) const HEADERS: usize = 16 + 4;
/// Longest value of an attribute: its length, with the header, has 16 bits.
const VALUE_MAX: usize = u16::MAX as usize - HEADER;
/// Bytes of the attribute NFQA_TIMESTAMP.
const TIMESTAMP: usize = HEADER + 16;

/// A packet as its message states it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Packet<'a> {
    /// The program's queue.
    pub(crate) queue: u16,
    pub(crate) id: u32,
    /// EtherType, and hook (`NF_INET_`).
    pub(crate) protocol: u16,
    pub(crate) hook: u8,
    /// `AF_INET`, `AF_INET6` or `AF_UNSPEC`.
    pub(crate) family: u8,
    /// Interface indices; 0 leaves the attribute out.
    pub(crate) indev: u32,
    pub(crate) outdev: u32,
    pub(crate) physindev: u32,
    pub(crate) physoutdev: u32,
    /// 0 leaves the attribute out, as in the kernel.
    pub(crate) mark: u32,
    /// Ethernet source address.
    pub(crate) hardware: Option<[u8; 6]>,
    /// Nanoseconds since the epoch.
    pub(crate) time: u64,
    /// The packet from its IP header on, or a part; `None` in the copy mode META.
    pub(crate) payload: Option<&'a [u8]>,
    /// The message does not contain the payload.
    pub(crate) in_ring: bool,
    /// Bytes of the packet from its IP header on.
    pub(crate) length: usize,
}

/// Messages, cut into datagrams: several messages of at most [`DATAGRAM`] bytes together, or one longer message.
#[derive(Debug)]
pub(crate) struct Datagrams {
    bytes: Vec<u8>,
    /// Ends of the complete datagrams.
    ends: Vec<usize>,
    /// Longest datagram with several messages.
    limit: usize,
}

impl Default for Datagrams {
    fn default() -> Self {
        Self { bytes: Vec::new(), ends: Vec::new(), limit: DATAGRAM }
    }
}

impl Datagrams {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Empties it, for datagrams of at most `limit` bytes.
    pub(crate) fn clear(&mut self, limit: usize) {
        self.limit = limit;
        self.bytes.clear();
        self.ends.clear();
    }

    /// The datagrams, oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let ends = self.ends.iter().copied().chain([self.bytes.len()]);
        let mut begin = 0;
        ends.map(move |end| &self.bytes[std::mem::replace(&mut begin, end)..end])
    }

    /// The next message begins a datagram.
    pub(crate) fn end_datagram(&mut self) {
        if self.bytes.len() > self.ends.last().copied().unwrap_or(0) {
            self.ends.push(self.bytes.len());
        }
    }

    /// Appends the message of a packet. Returns true if a datagram begins with it.
    pub(crate) fn push(&mut self, packet: &Packet<'_>) -> bool {
        let begin = self.bytes.len();
        let datagram = self.ends.last().copied().unwrap_or(0);
        self.write(packet);
        let full = self.bytes.len() - datagram > self.limit && begin > datagram;
        if full {
            self.ends.push(begin);
        }
        full || begin == datagram
    }

    fn write(&mut self, packet: &Packet<'_>) {
        let begin = self.bytes.len();
        self.bytes.extend_from_slice(&[0; HEADERS]);
        let mut header = [0; 7];
        header[..4].copy_from_slice(&packet.id.to_be_bytes());
        header[4..6].copy_from_slice(&packet.protocol.to_be_bytes());
        header[6] = packet.hook;
        self.attribute(nfqa::PACKET_HDR, &header);
        for (kind, value) in [
            (nfqa::IFINDEX_INDEV, packet.indev),
            (nfqa::IFINDEX_PHYSINDEV, packet.physindev),
            (nfqa::IFINDEX_OUTDEV, packet.outdev),
            (nfqa::IFINDEX_PHYSOUTDEV, packet.physoutdev),
            (nfqa::MARK, packet.mark),
        ] {
            if value != 0 {
                self.attribute(kind, &value.to_be_bytes());
            }
        }
        if let Some(address) = packet.hardware {
            let mut hardware = [0; 12];
            hardware[1] = 6;
            hardware[4..10].copy_from_slice(&address);
            self.attribute(nfqa::HWADDR, &hardware);
        }
        let longest = if packet.in_ring { usize::MAX } else { VALUE_MAX };
        let payload = packet.payload.map(|payload| &payload[..payload.len().min(longest)]);
        let cut = payload.is_some_and(|payload| payload.len() < packet.length);
        let payload = payload.filter(|_| !packet.in_ring);
        let rest = payload.map_or(0, |payload| HEADER + payload.len().next_multiple_of(4));
        let rest = rest + if cut { HEADER + 4 } else { 0 };
        // A program may size its buffer for the attributes that the kernel always sends: the time must not be what exceeds it.
        let length = self.bytes.len() - begin + rest;
        if !(DATAGRAM - TIMESTAMP + 1..=DATAGRAM).contains(&length) {
            let mut time = [0; 16];
            time[..8].copy_from_slice(&(packet.time / 1_000_000_000).to_be_bytes());
            time[8..].copy_from_slice(&(packet.time % 1_000_000_000 / 1000).to_be_bytes());
            self.attribute(nfqa::TIMESTAMP, &time);
        }
        if cut {
            self.attribute(nfqa::CAP_LEN, &(packet.length as u32).to_be_bytes());
        }
        match payload {
            Some(payload) => self.attribute(nfqa::PAYLOAD, payload),
            None if packet.in_ring => self.attribute(nfqa::PAYLOAD_IN_RING, &[]),
            None => {}
        }
        let length = (self.bytes.len() - begin) as u32;
        let head = &mut self.bytes[begin..begin + HEADERS];
        head[..4].copy_from_slice(&length.to_ne_bytes());
        head[4..6].copy_from_slice(&PACKET.to_ne_bytes());
        head[16] = packet.family;
        head[18..].copy_from_slice(&packet.queue.to_be_bytes());
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = (HEADER + value.len()) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// A message in the program's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    /// `nlmsg_type`.
    pub(crate) kind: u16,
    /// After `struct nlmsghdr`.
    pub(crate) body: &'a [u8],
}

/// Iterates over the messages in `bytes`. Ends at the first one that is shorter than its header or longer than the rest.
pub(crate) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
        let body = bytes.get(16..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message { kind, body })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Attributes;

    fn packet(payload: &[u8]) -> Packet<'_> {
        Packet {
            queue: 0x0102,
            id: 7,
            protocol: 0x0800,
            hook: 2,
            family: 2,
            indev: 3,
            mark: 9,
            hardware: Some([1, 2, 3, 4, 5, 6]),
            time: 5_000_000_999,
            payload: Some(payload),
            length: payload.len(),
            ..Packet::default()
        }
    }

    #[test]
    fn a_message_has_the_kernels_layout() {
        let mut datagrams = Datagrams::default();
        datagrams.push(&Packet { length: 100, ..packet(&[0x45; 21]) });
        let all: Vec<_> = datagrams.iter().collect();
        let [Message { kind, body }] = messages(all[0]).collect::<Vec<_>>()[..] else { panic!("{all:?}") };
        assert_eq!((kind, &body[..4]), (0x300, &[2, 0, 1, 2][..]));
        let attributes = Attributes::parse(&body[4..]);
        for (kind, value) in [
            (nfqa::PACKET_HDR, &[0, 0, 0, 7, 8, 0, 2][..]),
            (nfqa::IFINDEX_INDEV, &[0, 0, 0, 3]),
            (nfqa::MARK, &[0, 0, 0, 9]),
            (nfqa::HWADDR, &[0, 6, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0]),
            (nfqa::TIMESTAMP, &[0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0]),
            (nfqa::CAP_LEN, &[0, 0, 0, 100]),
            (nfqa::PAYLOAD, &[0x45; 21]),
        ] {
            assert_eq!(attributes.get(kind), Some(value), "{kind}");
        }
        assert_eq!(attributes.get(nfqa::IFINDEX_OUTDEV), None);
    }

    #[test]
    fn datagrams_have_at_most_4096_bytes_or_one_message() {
        let mut datagrams = Datagrams::default();
        let lengths = [40, 1500, 1500, 1500, 9000, 40, 4020, 4090, 65535, 3990];
        for length in lengths {
            datagrams.push(&packet(&vec![1; length]));
        }
        let mut found = Vec::new();
        for datagram in datagrams.iter() {
            let bodies: Vec<_> = messages(datagram).map(|message| message.body).collect();
            assert!(datagram.len() <= DATAGRAM || bodies.len() == 1, "{} bytes", datagram.len());
            found.extend(bodies.iter().map(|body| {
                let attributes = Attributes::parse(&body[4..]);
                (attributes.get(nfqa::PAYLOAD).unwrap().len(), attributes.get(nfqa::TIMESTAMP).is_some())
            }));
        }
        // The longest attribute value is shorter than the longest packet.
        let expected = lengths.map(|length| (length.min(65531), length != 4020));
        assert_eq!(found, expected);
    }
}
