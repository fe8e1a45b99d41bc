//! Gathers the parts of a message to send.
//!
//! What: on a datagram socket each part ends a message unless [`Flags::MORE`] is set. On a seqpacket socket
//! only [`Flags::EOR`] ends a message. The first part gives the destination.
//!
//! Invariant: only whole messages are sent. A part that cannot be sent yet is not taken; a message that can
//! never be sent is dropped with all parts.

use bytes::{Bytes, BytesMut};

use super::{Error, Flags, Kind, To};

/// Parts of the message that has not ended.
#[derive(Debug)]
pub(super) struct Gather {
    kind: Kind,
    /// Maximum length of a message.
    most: usize,
    /// Destination given by the first part.
    to: Option<To>,
    bytes: BytesMut,
}

impl Gather {
    pub(super) fn new(kind: Kind, most: usize) -> Self {
        Self { kind, most, to: None, bytes: BytesMut::new() }
    }

    /// Destination of the message that has parts.
    pub(super) const fn to(&self) -> Option<To> {
        self.to
    }

    /// Returns true if a part with these flags ends its message.
    pub(super) const fn ends(&self, flags: Flags) -> bool {
        match self.kind {
            Kind::Dgram => !flags.contains(Flags::MORE),
            Kind::Seqpacket => flags.contains(Flags::EOR),
        }
    }

    /// Length of the message including this part.
    ///
    /// # Errors
    ///
    /// [`Error::AddressMismatch`], and [`Error::TooLong`] after dropping the message.
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

    /// Adds a part that is not the last one.
    pub(super) fn add(&mut self, to: To, part: &[u8]) {
        self.to = Some(to);
        self.bytes.extend_from_slice(part);
    }

    /// Returns the message with its last part.
    pub(super) fn finish(&mut self, part: &[u8]) -> Bytes {
        self.to = None;
        if self.bytes.is_empty() {
            return Bytes::copy_from_slice(part);
        }
        self.bytes.extend_from_slice(part);
        self.bytes.split().freeze()
    }

    /// Drops all parts.
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

    /// Rows: socket kind, parts sent (`+`: more follows, `.`: ends the record), resulting messages.
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
                assert_eq!(sent, [&b"a"[..]], "a message that is too long is dropped with all parts");
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
    fn all_parts_have_one_address() {
        let mut gather = Gather::new(Kind::Dgram, 8);
        assert_eq!(gather.length_with(To::Any, b"ab").ok(), Some(2));
        gather.add(To::Any, b"ab");
        assert!(matches!(gather.length_with(To::Requester, b"c"), Err(Error::AddressMismatch)));
        assert_eq!(gather.length_with(To::Any, b"c").ok(), Some(3), "earlier parts are kept");
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Dgram), Just(Kind::Seqpacket)]
    }

    proptest! {
        /// For any parts and buffers: the bytes read are the bytes sent, in order. A datagram loses what
        /// exceeds the buffer, a packet nothing.
        #[test]
        fn bytes_read_equal_bytes_sent(
            sends in kind(),
            reads in kind(),
            parts in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..6), any::<bool>()), 0..24),
            buffers in prop::collection::vec((0_usize..8, any::<bool>()), 1..64),
        ) {
            let flag = if sends == Kind::Dgram { Flags::MORE } else { Flags::EOR };
            let flagged = parts.iter().map(|(part, set)| (&part[..], if *set { flag } else { Flags::empty() }));
            let sent = send(sends, usize::MAX, flagged);
            // The model: cut after each part that ends a message; empty messages do not count.
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
