//! One session's records in both directions, in order and with a bounded number of bytes on their way.
//!
//! Each direction is a stream of records, cut into numbered pieces of at most [`CHUNK`] bytes, whatever the records' lengths: short
//! records share a piece. A piece that is missing or comes twice ends the session. The sender has at most [`WINDOW`] bytes, and a piece, in
//! records that the receiver has not taken.
//!
//! Bound: the receiver's buffer has at most [`WINDOW`], a piece, and one record, which is bounded by [`RECORD`]. A record that is not
//! complete counts as taken, because otherwise one that is longer than the window would never arrive.
//!
//! ```text
//! length:u32 (of the payload) what:u8 zero:[u8; 3] { 13 fields of a frame's header } { payload }
//! ```

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::PEER_BYTES;
use super::message::{CHUNK, Fields, NotRead};

/// Bytes that are sent and not taken.
pub(super) const WINDOW: u64 = 1 << 20;

/// Longest payload of a record: the longest message of a mux, and some more for answers.
pub const RECORD: usize = 64 << 20;

/// Bytes of a record before its payload.
pub(super) const HEAD: usize = 64;

/// What a record is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// A frame of the ring.
    #[default]
    Frame,
    /// The frame with the number `seq` is released.
    Release,
}

/// A frame of the ring without its payload. The fields are those of the ring's header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the ring's header")]
pub struct Record {
    pub what: What,
    /// The sequence number in the ring.
    pub seq: u32,
    pub kind: u16,
    pub wire_len: u32,
    pub group: u32,
    pub time: u64,
    pub mark: u32,
    pub port: u32,
    pub sender: [u32; 3],
    pub hash: u32,
    pub layers: [u16; 3],
}

/// Why a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// A piece was lost, or came twice.
    #[error("a message of the bus was lost")]
    Gap,
    /// The peer sends more than the window.
    #[error("the peer sends more than it may")]
    Window,
    /// The peer's sessions have too many bytes in memory.
    #[error("too many bytes wait")]
    Memory,
    /// A record is damaged, or has a wrong length.
    #[error("the peer sent a damaged record")]
    Record,
    /// The peer has taken more than was sent.
    #[error("the peer acknowledges what was not sent")]
    Taken,
}

/// See the documentation of this module.
#[derive(Debug, Default)]
pub struct Link {
    out: BytesMut,
    number: u32,
    sent: u64,
    /// Bytes of `sent` that the peer has taken.
    acked: u64,
    input: BytesMut,
    expected: u32,
    received: u64,
    /// The value of `taken` that the peer knows.
    told: u64,
}

impl Link {
    /// Returns true if another record may be added: there is less than a piece that waits.
    pub fn has_room(&self) -> bool {
        self.out.len() < CHUNK
    }

    /// Adds a record.
    pub fn push(&mut self, record: &Record, payload: &[u8]) {
        let Record { what, seq, kind, wire_len, group, time, mark, port, sender, hash, layers } = *record;
        let out = &mut self.out;
        out.reserve(HEAD + payload.len());
        out.put_u32_le(payload.len() as u32);
        out.put_u8(what as u8);
        out.put_slice(&[0; 3]);
        out.put_u32_le(seq);
        [wire_len, group, mark, port, hash].into_iter().chain(sender).for_each(|word| out.put_u32_le(word));
        out.put_u64_le(time);
        layers.into_iter().chain([kind]).for_each(|word| out.put_u16_le(word));
        out.put_u32_le(0);
        out.put_slice(payload);
    }

    /// The next piece: its number, the bytes taken, and the bytes. `None` if there is nothing to send or the window is full.
    pub(super) fn next(&mut self) -> Option<(u32, u64, Bytes)> {
        let taken = self.taken();
        let open = self.sent - self.acked < WINDOW;
        let bytes = if open { self.out.split_to(self.out.len().min(CHUNK)).freeze() } else { Bytes::new() };
        if bytes.is_empty() && taken - self.told < WINDOW / 2 {
            return None;
        }
        let number = self.number;
        self.number = number.wrapping_add(1);
        self.sent += bytes.len() as u64;
        self.told = taken;
        Some((number, taken, bytes))
    }

    /// Bytes that were taken: all, if the first record is not complete. Bytes of a record that were reported as taken stay so when it is
    /// complete.
    fn taken(&self) -> u64 {
        let taken = match self.peek() {
            Ok(Some(_)) => self.received - self.input.len() as u64,
            _ => self.received,
        };
        taken.max(self.told)
    }

    /// Returns true if all that was added is sent.
    pub(super) fn is_sent(&self) -> bool {
        self.out.is_empty()
    }

    /// Bytes in the buffers.
    pub fn bytes(&self) -> usize {
        self.input.len() + self.out.len()
    }

    /// A piece of the peer.
    ///
    /// # Errors
    /// The session ends.
    pub(super) fn receive(&mut self, number: u32, taken: u64, bytes: &[u8]) -> Result<(), LinkError> {
        if number != self.expected {
            return Err(LinkError::Gap);
        }
        self.expected = number.wrapping_add(1);
        if taken < self.acked || taken > self.sent {
            return Err(LinkError::Taken);
        }
        self.acked = taken;
        // What the peer cannot know yet does not count.
        if self.received + bytes.len() as u64 - self.told > WINDOW + CHUNK as u64 {
            return Err(LinkError::Window);
        }
        self.received += bytes.len() as u64;
        self.input.extend_from_slice(bytes);
        self.peek().map(drop)
    }

    /// The first record of the peer and its payload, if it is complete.
    ///
    /// # Errors
    /// The session ends.
    pub fn peek(&self) -> Result<Option<(Record, &[u8])>, LinkError> {
        if self.input.len() < HEAD {
            return Ok(None);
        }
        let (len, record) = parse(&self.input).map_err(|_| LinkError::Record)?;
        let len = Some(len).filter(|len| *len <= RECORD).ok_or(LinkError::Record)?;
        Ok(self.input.get(HEAD..HEAD + len).map(|payload| (record, payload)))
    }

    /// Removes the first record.
    pub fn pop(&mut self) {
        if let Ok(Some((_, payload))) = self.peek() {
            let len = HEAD + payload.len();
            self.input.advance(len);
        }
    }
}

fn parse(bytes: &[u8]) -> Result<(usize, Record), NotRead> {
    let mut fields = Fields(bytes);
    let len = fields.u32()? as usize;
    let what = match fields.take::<4>()? {
        [0, ..] => What::Frame,
        [1, ..] => What::Release,
        _ => return Err(NotRead::Malformed),
    };
    let seq = fields.u32()?;
    let (wire_len, group, mark, port, hash) =
        (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    let sender = [fields.u32()?, fields.u32()?, fields.u32()?];
    let time = fields.u64()?;
    let layers = [fields.u16()?, fields.u16()?, fields.u16()?];
    let kind = fields.u16()?;
    Ok((len, Record { what, seq, kind, wire_len, group, time, mark, port, sender, hash, layers }))
}

/// Checks that the sessions of one peer, with these links, may hold more `bytes`. A message without bytes only acknowledges: it frees
/// memory.
pub(super) fn check_memory<'a>(links: impl Iterator<Item = &'a Link>, bytes: &[u8]) -> Result<(), LinkError> {
    match bytes.is_empty() || links.map(Link::bytes).sum::<usize>() + bytes.len() <= PEER_BYTES {
        true => Ok(()),
        false => Err(LinkError::Memory),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn record(seq: u32) -> Record {
        Record {
            what: if seq % 3 == 2 { What::Release } else { What::Frame },
            seq,
            kind: 1,
            wire_len: 2,
            group: 3,
            time: 1 << 40,
            mark: 5,
            port: 6,
            sender: [7, 8, 9],
            hash: 10,
            layers: [11, 12, 13],
        }
    }

    #[test]
    fn records_arrive_as_they_were_sent() {
        let (mut one, mut two) = (Link::default(), Link::default());
        one.push(&record(1), b"first");
        one.push(&record(2), b"");
        let (number, taken, bytes) = one.next().unwrap();
        assert_eq!(bytes.len(), 2 * HEAD + 5);
        assert!(one.next().is_none());
        two.receive(number, taken, &bytes).unwrap();
        assert_eq!(two.peek(), Ok(Some((record(1), &b"first"[..]))));
        two.pop();
        assert_eq!(two.peek(), Ok(Some((record(2), &b""[..]))));
        two.pop();
        assert_eq!((two.peek(), two.bytes()), (Ok(None), 0));
    }

    #[test]
    fn a_wrong_peer_ends_the_session() {
        let fresh = |bytes: &[u8]| {
            let mut link = Link::default();
            link.receive(0, 0, bytes).map(|()| link)
        };
        let mut sender = Link::default();
        sender.push(&record(1), b"payload");
        let bytes = sender.next().unwrap().2;
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.to_vec();
            bytes[at] = byte;
            fresh(&bytes).err()
        };
        assert_eq!(with(0, 7), None);
        assert_eq!(with(3, 0xff), Some(LinkError::Record), "a length above the longest");
        assert_eq!(with(4, 2), Some(LinkError::Record), "an unknown kind");
        assert_eq!(fresh(&bytes).unwrap().receive(0, 0, &bytes), Err(LinkError::Gap), "twice");
        assert_eq!(fresh(&bytes).unwrap().receive(2, 0, &bytes), Err(LinkError::Gap), "one is missing");
        assert_eq!(fresh(&bytes).unwrap().receive(1, 1, &bytes), Err(LinkError::Taken), "nothing was sent");
        // Complete records that are not taken.
        let mut link = Link::default();
        let most = (0..).find_map(|number| link.receive(number, 0, &bytes.repeat(100)).err());
        assert_eq!(most, Some(LinkError::Window));
        assert!(link.bytes() as u64 <= WINDOW + CHUNK as u64);
    }

    proptest! {
        /// Against a queue: records of all lengths, taken at any time, arrive complete, in order, within the bounds.
        #[test]
        fn records_arrive_in_order_within_the_bounds(
            lengths in prop::collection::vec(prop_oneof![8 => 0..300usize, 2 => 0..200_000usize, 1 => 0..3_000_000usize], 1..40),
            steps in prop::collection::vec(0..4u8, 1..200),
        ) {
            let (mut from, mut to) = (Link::default(), Link::default());
            let (mut bus, mut back) = (VecDeque::new(), VecDeque::new());
            let mut model = VecDeque::new();
            let mut lengths = lengths.into_iter().zip(0u32..);
            // At the end, all steps in turn until all is done.
            let mut left = 4 * 100 * 40;
            let mut steps = steps.into_iter();
            loop {
                let step = match steps.next() {
                    Some(step) => step,
                    None if left == 0 => break,
                    None => { left -= 1; (left % 4) as u8 }
                };
                match step {
                    0 if from.has_room() => if let Some((len, seq)) = lengths.next() {
                        let payload = vec![seq as u8; len];
                        from.push(&record(seq), &payload);
                        model.push_back((seq, payload));
                    },
                    1 => bus.extend(from.next()),
                    2 => if let Some((number, taken, bytes)) = bus.pop_front() {
                        to.receive(number, taken, &bytes).unwrap();
                        back.extend(to.next());
                    },
                    _ => {
                        if let Some((got, payload)) = to.peek().unwrap() {
                            let (seq, sent) = model.pop_front().unwrap();
                            prop_assert_eq!((got, payload), (record(seq), &sent[..]));
                            to.pop();
                        }
                        back.extend(to.next());
                        if let Some((number, taken, bytes)) = back.pop_front() {
                            from.receive(number, taken, &bytes).unwrap();
                        }
                    }
                }
                let unread: usize = bus.iter().map(|(_, _, bytes): &(u32, u64, Bytes)| bytes.len()).sum();
                prop_assert!((to.bytes() + unread) as u64 <= 2 * WINDOW + CHUNK as u64 + 3_000_000);
            }
            prop_assert!(model.is_empty() && lengths.next().is_none(), "{} left", model.len());
        }
    }
}
