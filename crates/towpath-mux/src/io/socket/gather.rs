//! What becomes one message to be sent: parts, until one ends it.
//!
//! What: on a datagram handle each part ends a message unless more is said to follow; on a seqpacket handle only the one that says so
//! does. The first part says to whom the message goes.
//!
//! Invariant: what leaves is whole; what cannot be sent yet is not taken, and what never can be is dropped with all of its parts.

use bytes::{Bytes, BytesMut};

use super::{Error, Flags, Kind, To};

/// Parts of the message that is not ended yet.
#[derive(Debug)]
pub(super) struct Gather {
    kind: Kind,
    /// Bytes that a message may have.
    most: usize,
    /// Whom the first part is for.
    to: Option<To>,
    bytes: BytesMut,
}

impl Gather {
    pub(super) fn new(kind: Kind, most: usize) -> Self {
        Self { kind, most, to: None, bytes: BytesMut::new() }
    }

    /// Whom the message is for, of which there are parts.
    pub(super) const fn to(&self) -> Option<To> {
        self.to
    }

    /// Whether a part with these flags ends its message.
    pub(super) const fn ends(&self, flags: Flags) -> bool {
        match self.kind {
            Kind::Dgram => !flags.contains(Flags::MORE),
            Kind::Seqpacket => flags.contains(Flags::EOR),
        }
    }

    /// How long the message is with this part.
    ///
    /// # Errors
    ///
    /// [`Error::AddressMismatch`] and [`Error::TooLong`], the latter behind dropping it.
    pub(super) fn length_with(&mut self, to: To, part: &[u8]) -> Result<usize, Error> {
        if self.to.is_some_and(|first| first != to) {
            return Err(Error::AddressMismatch);
        }
        let length = self.bytes.len().saturating_add(part.len());
        if length > self.most {
            self.clear();
            return Err(Error::TooLong { length, most: self.most });
        }
        Ok(length)
    }

    /// One more part, behind which others follow.
    pub(super) fn add(&mut self, to: To, part: &[u8]) {
        self.to = Some(to);
        self.bytes.extend_from_slice(part);
    }

    /// The message with its last part.
    pub(super) fn finish(&mut self, part: &[u8]) -> Bytes {
        self.to = None;
        if self.bytes.is_empty() {
            return Bytes::copy_from_slice(part);
        }
        self.bytes.extend_from_slice(part);
        self.bytes.split().freeze()
    }

    /// Nothing was begun.
    pub(super) fn clear(&mut self) {
        self.to = None;
        self.bytes.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::unread::{Read, read};
    use super::*;

    /// Each row: the kind, what is sent (with `+` when more follows, `.` when it ends a record), and the messages that come of it.
    #[test]
    fn parts_become_messages() {
        use Kind::{Dgram, Seqpacket};
        let rows: &[(Kind, &[&str], &[&str])] = &[
            (Dgram, &["ab", "c"], &["ab", "c"]),
            (Dgram, &["ab+", "c"], &["abc"]),
            (Dgram, &["ab+", "c+", ""], &["abc"]),
            (Dgram, &["", "a"], &["a"]),
            (Dgram, &["ab+"], &[]),
            (Dgram, &["ab.", "c."], &["ab", "c"]),
            (Seqpacket, &["ab", "c"], &[]),
            (Seqpacket, &["ab", "c."], &["abc"]),
            (Seqpacket, &["ab.", "c."], &["ab", "c"]),
            (Seqpacket, &["ab", "."], &["ab"]),
            (Seqpacket, &[".", "ab+", "c."], &["abc"]),
            (Dgram, &["1234567", "12345678", "123456789", "a"], &["1234567", "12345678", "a"]),
            (Dgram, &["1234+", "56789", "a"], &["1234", "a"]),
            (Seqpacket, &["1234", "56789.", "a."], &["a"]),
        ];
        for (row, (kind, parts, messages)) in rows.iter().enumerate() {
            let parts = parts.iter().map(|part| {
                let bytes = part.trim_end_matches(['+', '.']).as_bytes();
                let flag = if part.ends_with('+') { Flags::MORE } else { Flags::empty() };
                (bytes, if part.ends_with('.') { Flags::EOR } else { flag })
            });
            let sent = send(*kind, 8, parts);
            if row == 12 {
                assert_eq!(sent, [&b"a"[..]], "what is too long is dropped with all of its parts");
            } else {
                assert_eq!(sent, *messages, "row {row}");
            }
        }
    }

    fn send<'a>(kind: Kind, most: usize, parts: impl IntoIterator<Item = (&'a [u8], Flags)>) -> Vec<Bytes> {
        let mut gather = Gather::new(kind, most);
        let mut sent = Vec::new();
        for (part, flags) in parts {
            match gather.length_with(To::Any, part) {
                Ok(0) if gather.ends(flags) => gather.clear(),
                Ok(_) if gather.ends(flags) => sent.push(gather.finish(part)),
                Ok(_) => gather.add(To::Any, part),
                Err(_) => {}
            }
        }
        sent
    }

    #[test]
    fn parts_are_for_one_address() {
        let mut gather = Gather::new(Kind::Dgram, 8);
        assert_eq!(gather.length_with(To::Any, b"ab").ok(), Some(2));
        gather.add(To::Any, b"ab");
        assert!(matches!(gather.length_with(To::Requester, b"c"), Err(Error::AddressMismatch)));
        assert_eq!(gather.length_with(To::Any, b"c").ok(), Some(3), "what was coalesced is there still");
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Dgram), Just(Kind::Seqpacket)]
    }

    proptest! {
        /// Whatever the parts and the buffers: what is read is what was sent, in order; a datagram loses what its buffer has no room
        /// for, and a packet nothing.
        #[test]
        fn what_is_read_is_what_was_sent(
            sends in kind(),
            reads in kind(),
            parts in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..6), any::<bool>()), 0..24),
            buffers in prop::collection::vec((0_usize..8, any::<bool>()), 1..64),
        ) {
            let flag = if sends == Kind::Dgram { Flags::MORE } else { Flags::EOR };
            let flagged = parts.iter().map(|(part, set)| (&part[..], if *set { flag } else { Flags::empty() }));
            let sent = send(sends, usize::MAX, flagged);
            // Beside it, what a person would say: cut behind each part that ends one; what is empty is none.
            let mut said = vec![Vec::new()];
            for (part, set) in &parts {
                said.last_mut().expect("one at least").extend_from_slice(part);
                if *set == (sends == Kind::Seqpacket) {
                    said.push(Vec::new());
                }
            }
            said.pop();
            said.retain(|message| !message.is_empty());
            prop_assert_eq!(&sent, &said);

            let mut buffers = buffers.iter();
            'all: for message in &sent {
                let mut got = Vec::new();
                let mut rest = &message[..];
                loop {
                    let Some(&(room, peek)) = buffers.next() else { break 'all };
                    let mut buffer = vec![0; room];
                    let Read { copied, flags, taken } = read(reads, rest, &mut buffer, peek);
                    prop_assert_eq!(copied, room.min(rest.len()));
                    prop_assert_eq!(&buffer[..copied], &rest[..copied]);
                    prop_assert_eq!(flags.contains(Flags::TRUNC), reads == Kind::Dgram && room < rest.len());
                    prop_assert_eq!(flags.contains(Flags::EOR), reads == Kind::Dgram || room >= rest.len());
                    prop_assert_eq!(taken == 0, peek || reads == Kind::Seqpacket && room == 0);
                    if !peek {
                        got.extend_from_slice(&buffer[..copied]);
                    }
                    rest = &rest[taken..];
                    if rest.is_empty() {
                        break;
                    }
                }
                if reads == Kind::Seqpacket {
                    prop_assert_eq!(got, &message[..]);
                } else {
                    prop_assert!(message.starts_with(&got));
                }
            }
        }
    }
}
