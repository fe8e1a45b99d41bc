//! Messages between gates, as bytes.
//!
//! ```text
//! "TWFL" version:u8 oldest:u8 (the oldest version that reads it) header:u16 (bytes up to the records)
//! kind:u8 flags:u8 (1 in step, 2 unchecked) ranges:u16 (0 in most messages)
//! incarnation:u64 at:u64 (sender's clock, in ns) fingerprint:u64
//!   1 states:  seq:u64
//!   2 request: epoch:u64 cursor:u64 chunks:u64
//!   3 chunk:   epoch:u64 cursor:u64 next:u64 (all ones: the end)
//! { incarnation:u64 from:u64 to:u64 } (the sender has these batches of a process; `to` is excluded)
//! { record }
//! ```
//!
//! Numbers are little endian. A newer version may make the header longer; an older reader skips what it does not know. Records have a
//! version and a length of their own. The input is untrusted: lengths are checked before they are used.

use std::collections::BTreeMap;

use towpath_gate::state::record::{self, Record, RecordError};
use towpath_wire::Time;

use crate::batches::Batches;

const MAGIC: &[u8; 4] = b"TWFL";

/// The version that is written.
pub const VERSION: u8 = 1;

/// The oldest version whose readers can read messages of [`VERSION`].
const OLDEST: u8 = 1;

const IN_STEP: u8 = 1;
const UNCHECKED: u8 = 2;

/// Bytes of a range of batches, and how many of them a message tells at most.
const RANGE: usize = 24;
pub(crate) const MAX_TOLD: usize = 2048;
const _: () = assert!(12 + 8 * 6 + RANGE * MAX_TOLD <= u16::MAX as usize, "a header has them");

/// Instead of a cursor: the snapshot is complete.
const END: u64 = u64::MAX;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Changes of states. Without records: the gate is alive.
    States {
        /// Its number: one more than that of the batch before.
        seq: u64,
    },
    /// Asks for a part of a snapshot.
    Request {
        /// Chosen by the gate that asks; repeated in the chunks.
        epoch: u64,
        /// Where the part begins.
        cursor: u64,
        /// The number of chunks.
        chunks: u64,
    },
    /// A part of a snapshot.
    Chunk {
        /// That of the request.
        epoch: u64,
        /// Where it begins.
        cursor: u64,
        /// Where the next one begins; `None` after the last one.
        next: Option<u64>,
    },
}

/// What each message tells of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sender {
    /// Chosen when the process starts.
    pub(crate) incarnation: u64,
    /// Its clock.
    pub(crate) at: Time,
    /// The fingerprint of its rules.
    pub(crate) fingerprint: u64,
    /// It has the states of its peers.
    pub(crate) in_step: bool,
    /// Its states were not all checked against its rules.
    pub(crate) unchecked: bool,
}

/// What a gate has of processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Has<'a>(&'a [u8]);

impl<'a> Has<'a> {
    /// The bytes of [`Has::encode`].
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The batches of processes, by their incarnations. Those that do not fit are left out.
    pub(crate) fn encode<'b>(processes: impl Iterator<Item = (u64, &'b Batches)>) -> Vec<u8> {
        let ranges =
            processes.flat_map(|(at, batches)| batches.ranges().map(move |(from, to)| [at, from, to]));
        ranges.take(MAX_TOLD).flatten().flat_map(u64::to_le_bytes).collect()
    }

    /// The batches of each process.
    pub(crate) fn processes(self) -> BTreeMap<u64, Batches> {
        let mut processes: BTreeMap<u64, Batches> = BTreeMap::new();
        let (ranges, _) = self.0.as_chunks::<RANGE>();
        for range in ranges.iter().take(MAX_TOLD) {
            let [incarnation, from, to] = [0, 8, 16].map(|at| {
                let word = range[at..].first_chunk().copied();
                u64::from_le_bytes(word.unwrap_or_default())
            });
            processes.entry(incarnation).or_default().add(&Batches::range(from, to));
        }
        processes
    }
}

/// A message that was read. The records are not validated yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    /// The sender.
    pub(crate) sender: Sender,
    /// The kind.
    pub(crate) kind: Kind,
    /// What the sender has. Empty in most messages.
    pub(crate) has: Has<'a>,
    /// The records.
    pub(crate) records: &'a [u8],
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageError {
    /// The contents are invalid.
    Malformed,
    /// It can only be read by this version and newer ones.
    Version(u8),
}

impl<'a> Message<'a> {
    /// The message as bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let has = self.has.0;
        let mut out = Vec::with_capacity(64 + has.len() + self.records.len());
        out.extend(MAGIC);
        let (kind, words): (u8, &[u64]) = match &self.kind {
            Kind::States { seq } => (1, &[*seq]),
            Kind::Request { epoch, cursor, chunks } => (2, &[*epoch, *cursor, *chunks]),
            Kind::Chunk { epoch, cursor, next } => (3, &[*epoch, *cursor, next.unwrap_or(END)]),
        };
        let Sender { incarnation, at, fingerprint, in_step, unchecked } = self.sender;
        let flag = |flag, on| if on { flag } else { 0 };
        let header = (4 + 4 + 4 + 8 * (3 + words.len()) + has.len()) as u16;
        out.extend([VERSION, OLDEST]);
        out.extend(header.to_le_bytes());
        out.extend([kind, flag(IN_STEP, in_step) | flag(UNCHECKED, unchecked)]);
        out.extend(((has.len() / RANGE) as u16).to_le_bytes());
        let sender = [incarnation, at.as_nanos(), fingerprint];
        sender.iter().chain(words).for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(has);
        out.extend(self.records);
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// The bytes are not a message that this version can read.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let malformed = || MessageError::Malformed;
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(malformed)?;
        let &[_, oldest, low, high, kind, flags, few, many, ..] = rest else {
            return Err(MessageError::Malformed);
        };
        if oldest > VERSION {
            return Err(MessageError::Version(oldest));
        }
        let header = usize::from(u16::from_le_bytes([low, high]));
        let (header, records) = bytes.split_at_checked(header).ok_or_else(malformed)?;
        let word = |at: usize| {
            let word = header.get(12 + 8 * at..).and_then(<[u8]>::first_chunk);
            word.map(|word| u64::from_le_bytes(*word)).ok_or_else(malformed)
        };
        let sender = Sender {
            incarnation: word(0)?,
            at: Time::from_nanos(word(1)?),
            fingerprint: word(2)?,
            in_step: flags & IN_STEP != 0,
            unchecked: flags & UNCHECKED != 0,
        };
        let (kind, words) = match kind {
            1 => (Kind::States { seq: word(3)? }, 4),
            2 => (Kind::Request { epoch: word(3)?, cursor: word(4)?, chunks: word(5)? }, 6),
            3 => {
                let next = Some(word(5)?).filter(|next| *next != END);
                (Kind::Chunk { epoch: word(3)?, cursor: word(4)?, next }, 6)
            }
            _ => return Err(MessageError::Malformed),
        };
        let (from, length) = (12 + 8 * words, RANGE * usize::from(u16::from_le_bytes([few, many])));
        let has = Has(header.get(from..from + length).ok_or_else(malformed)?);
        Ok(Self { sender, kind, has, records })
    }
}

/// A record of a message, or why it is none.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one at a time, on the stack of the reader")]
pub(crate) enum Item<'a> {
    /// A record.
    Record(Record<'a>),
    /// A record of another version.
    Version,
    /// The rest of the message is malformed.
    Malformed,
}

/// The records in the bytes of a message.
pub(crate) fn records(mut bytes: &[u8]) -> impl Iterator<Item = Item<'_>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let Ok(length) = record::skip(bytes) else {
            bytes = &[];
            return Some(Item::Malformed);
        };
        let (this, rest) = bytes.split_at(length);
        bytes = rest;
        Some(match Record::decode(this) {
            Ok((record, _)) => Item::Record(record),
            Err(RecordError::Version(_)) => Item::Version,
            Err(RecordError::Truncated | RecordError::Malformed) => {
                bytes = &[];
                Item::Malformed
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SENDER: Sender =
        Sender { incarnation: 7, at: Time::from_secs(3), fingerprint: 9, in_step: true, unchecked: false };

    fn kinds() -> impl Strategy<Value = Kind> {
        let words = any::<[u64; 3]>();
        (0..3, words).prop_map(|(kind, [a, b, c])| match kind {
            0 => Kind::States { seq: a },
            1 => Kind::Request { epoch: a, cursor: b, chunks: c },
            _ => Kind::Chunk { epoch: a, cursor: b, next: Some(c).filter(|next| *next != END) },
        })
    }

    proptest! {
        #[test]
        fn a_message_reads_back(
            kind in kinds(),
            has in prop::collection::btree_map(any::<u64>(), (any::<u64>(), any::<u64>()), 0..100),
            records in any::<Vec<u8>>(),
            in_step in any::<bool>(),
        ) {
            let sender = Sender { in_step, ..SENDER };
            let batches = |(from, to): (u64, u64)| Batches::range(from.min(to), from.max(to));
            let has: BTreeMap<_, _> = has.into_iter().map(|(at, range)| (at, batches(range))).collect();
            let bytes = Has::encode(has.iter().map(|(at, batches)| (*at, batches)));
            let message = Message { sender, kind, has: Has::of(&bytes), records: &records };
            let bytes = message.encode();
            let read = Message::decode(&bytes);
            prop_assert_eq!(read, Ok(message));
            let has: BTreeMap<_, _> = has.into_iter().filter(|(_, batches)| !batches.is_empty()).collect();
            prop_assert_eq!(message.has.processes(), has);
        }

        #[test]
        fn other_bytes_are_refused_or_read(kind in kinds(), changes in prop::collection::vec(any::<(u8, u8)>(), 1..4)) {
            let batches = Batches::below(9);
            let has = Has::encode([(1, &batches), (3, &batches)].into_iter());
            let mut bytes = Message { sender: SENDER, kind, has: Has::of(&has), records: &[1, 2, 3] }.encode();
            for (at, bits) in changes {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= bits;
            }
            if let Ok(message) = Message::decode(&bytes) {
                prop_assert!(records(message.records).count() <= bytes.len());
                prop_assert!(message.has.processes().len() <= MAX_TOLD);
            }
        }
    }

    #[test]
    fn a_message_of_the_next_version_is_read_if_it_allows_it() {
        let kind = Kind::States { seq: 4 };
        let message = Message { sender: SENDER, kind, has: Has::default(), records: b"" };
        let mut bytes = message.encode();
        // The header of another version has eight bytes more.
        bytes[4] = VERSION + 1;
        bytes[6] += 8;
        bytes.extend([0xee; 8]);
        assert_eq!(Message::decode(&bytes), Ok(message));
        bytes[5] = VERSION + 1;
        assert_eq!(Message::decode(&bytes), Err(MessageError::Version(VERSION + 1)));
    }

    #[test]
    fn more_ranges_than_fit_are_left_out() {
        let batches = Batches::below(9);
        let has = Has::encode((0..3000).map(|at| (at, &batches)));
        let message =
            Message { sender: SENDER, kind: Kind::States { seq: 4 }, has: Has::of(&has), records: b"" };
        let bytes = message.encode();
        assert_eq!(Message::decode(&bytes).map(|message| message.has.processes().len()), Ok(MAX_TOLD));
    }

    #[test]
    fn records_of_another_version_are_skipped() {
        // Two records of version 99 with one byte of content, and a truncated one.
        let bytes = [2, 0, 99, 1, 2, 0, 99, 1, 9, 0, 1];
        let items: Vec<_> = records(&bytes).collect();
        assert!(matches!(items[..], [Item::Version, Item::Version, Item::Malformed]), "{items:?}");
    }
}
