//! Batches: several short messages of one connection in one frame.
//!
//! A frame of [`Kind::MESSAGES`](crate::Kind::MESSAGES) has as many messages as its mark says: one entry per message
//! in a row, then their bytes in the same order. For the ring, it is one frame with one sequence number and one
//! release. A client announces how many messages it accepts ([`Channel::batch_max`](crate::Channel::batch_max)) and
//! which message it processes ([`Channel::position`](crate::Channel::position)): if it dies, that message is the suspect.
//!
//! | entry: offset | size | content |
//! |---|---|---|
//! | 0 | 4 | bytes of the message |
//! | 4 | 2 | of these, bytes that the framing strips in front |
//! | 6 | 2 | bytes that it strips at the end |
//! | 8 | 4 | mark |
//! | 12 | 4 | hash |

use crate::shm::seq::Seq;

/// Largest number of messages in a frame.
pub const BATCH_MAX: usize = 64;
/// Bytes of an entry.
pub(crate) const ENTRY: usize = 16;

/// A message of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// All bytes of the message.
    pub bytes: &'a [u8],
    /// Bytes that the framing strips in front.
    pub skip: u16,
    /// Bytes that the framing strips at the end.
    pub trim: u16,
    /// The framing's mark.
    pub mark: u32,
    /// The framing's hash.
    pub hash: u32,
}

impl Part<'_> {
    pub(crate) fn emit(&self) -> [u8; ENTRY] {
        let mut entry = [0; ENTRY];
        entry[..4].copy_from_slice(&(self.bytes.len() as u32).to_ne_bytes());
        entry[4..6].copy_from_slice(&self.skip.to_ne_bytes());
        entry[6..8].copy_from_slice(&self.trim.to_ne_bytes());
        entry[8..12].copy_from_slice(&self.mark.to_ne_bytes());
        entry[12..].copy_from_slice(&self.hash.to_ne_bytes());
        entry
    }
}

/// The messages of a frame's payload, in order. None if there are more than [`BATCH_MAX`], or if the lengths in the
/// entries do not match the payload. Never panics, even if the engine writes the payload meanwhile.
pub(crate) fn parse(payload: &[u8], count: u32) -> Option<impl Iterator<Item = Part<'_>>> {
    if count as usize > BATCH_MAX {
        return None;
    }
    let (entries, mut rest) = payload.split_at_checked((count as usize).checked_mul(ENTRY)?)?;
    let (entries, _) = entries.as_chunks::<ENTRY>();
    let length = |entry: &[u8; ENTRY]| u32::from_ne_bytes([entry[0], entry[1], entry[2], entry[3]]) as usize;
    let all = entries.iter().try_fold(0usize, |sum, entry| sum.checked_add(length(entry)))?;
    if all != rest.len() {
        return None;
    }
    Some(entries.iter().map(move |entry| {
        // The length was read before, and the engine may have changed it since.
        let (bytes, more) = rest.split_at(length(entry).min(rest.len()));
        rest = more;
        let word = |at: usize| u32::from_ne_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]]);
        let (skip, trim) = (word(4) as u16, (word(4) >> 16) as u16);
        Part { bytes, skip, trim, mark: word(8), hash: word(12) }
    }))
}

/// The word that reports message `index` of frame `seq`.
pub(crate) const fn at(seq: Seq, index: u16) -> u64 {
    1 << 63 | (index as u64) << 32 | seq.0 as u64
}

/// The word that reports frame `seq` as the last one received: the client may process it and all earlier frames that it holds.
pub(crate) const fn received(seq: Seq) -> u64 {
    at(seq, 0) | 1 << 62
}

/// The message that a client reports to be processing. A client can report any value: use it only for decisions about the client's own frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// This message of this frame, from 0, after all earlier ones.
    At(Seq, u32),
    /// Any of the frames that it holds, up to this one.
    Received(Seq),
}

impl Position {
    pub(crate) const fn of(word: u64) -> Option<Self> {
        let seq = Seq(word as u32);
        match word >> 62 {
            0 | 1 => None,
            2 => Some(Self::At(seq, (word >> 32) as u32 & 0xffff)),
            _ => Some(Self::Received(seq)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(parts: &[Part<'_>]) -> Vec<u8> {
        let entries = parts.iter().flat_map(Part::emit);
        entries.chain(parts.iter().flat_map(|part| part.bytes.to_vec())).collect()
    }

    #[test]
    fn positions_survive_their_words() {
        assert_eq!(Position::of(0), None);
        assert_eq!(Position::of(at(Seq(u32::MAX), 7)), Some(Position::At(Seq(u32::MAX), 7)));
        assert_eq!(Position::of(received(Seq(9))), Some(Position::Received(Seq(9))));
    }

    #[test]
    fn parts_are_found_again_and_nothing_else_is() {
        let part = |bytes, skip| Part { bytes, skip, trim: 2, mark: 7, hash: u32::MAX };
        let parts = [part(&b"first"[..], 1), part(b"", 0), part(b"third, and last", u16::MAX)];
        let whole = payload(&parts);
        assert_eq!(parse(&whole, 3).unwrap().collect::<Vec<_>>(), parts);
        assert_eq!(parse(&[], 0).unwrap().count(), 0);
        for (wrong, count) in [
            (&whole[..], 2),
            (&whole, 4),
            (&whole, u32::MAX),
            (&whole[..whole.len() - 1], 3),
            (&[&whole[..], b"x"].concat(), 3),
            (&[0xff; 48], 3),
        ] {
            assert!(parse(wrong, count).is_none(), "{count} in {} bytes", wrong.len());
        }
    }
}
