//! Messages between the gates of a group about its configuration, as bytes.
//!
//! ```text
//! "TWGM" version:u8 oldest:u8 (the oldest version that reads it) kind:u8 flags:u8 (1 refused)
//! incarnation:u64
//!   1 status:  version:u64 failed:u64 reason (the rest)
//!   2 prepare: apply:u64 content (the rest)
//!   3 answer:  apply:u64 reason (the rest)
//! ```
//!
//! Numbers are little endian. The input is untrusted: lengths are checked, and a reason is shortened and made printable.

use super::CONTENT_MAX;

const MAGIC: &[u8; 4] = b"TWGM";

/// The version that is written, and the oldest one whose readers can read it.
const VERSION: u8 = 1;
const OLDEST: u8 = 1;

const REFUSED: u8 = 1;

/// Bytes of the longest reason.
pub(crate) const REASON_MAX: usize = 4096;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message<'a> {
    /// What the sender has. Sent every second.
    Status {
        /// The version that it has applied; 0: none.
        version: u64,
        /// A version that it could not apply, and why; 0: none.
        failed: u64,
        reason: String,
    },
    /// Asks all gates to check a version.
    Prepare {
        /// Chosen by the sender.
        apply: u64,
        content: &'a [u8],
    },
    /// The result of a check.
    Answer {
        /// That of the question.
        apply: u64,
        /// Why the version is refused.
        refused: Option<String>,
    },
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageError {
    Malformed,
    Version,
}

/// The text as one that may be shown: of bounded length, with line breaks as the only control characters.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if out.len() + c.len_utf8() > REASON_MAX {
            break;
        }
        out.push(if c.is_control() && c != '\n' { '?' } else { c });
    }
    out
}

impl<'a> Message<'a> {
    pub(crate) fn encode(&self, incarnation: u64) -> Vec<u8> {
        let (kind, flags, words, rest): (u8, u8, Vec<u64>, &[u8]) = match self {
            Self::Status { version, failed, reason } => (1, 0, vec![*version, *failed], reason.as_bytes()),
            Self::Prepare { apply, content } => (2, 0, vec![*apply], content),
            Self::Answer { apply, refused } => {
                let flags = if refused.is_some() { REFUSED } else { 0 };
                (3, flags, vec![*apply], refused.as_deref().unwrap_or_default().as_bytes())
            }
        };
        let mut out = Vec::with_capacity(32 + rest.len());
        out.extend(MAGIC);
        out.extend([VERSION, OLDEST, kind, flags]);
        [incarnation].iter().chain(&words).for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(rest);
        out
    }

    /// Reads a message and the incarnation of its sender.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<(Self, u64), MessageError> {
        let malformed = MessageError::Malformed;
        let rest = bytes.strip_prefix(MAGIC).ok_or(malformed)?;
        let &[_, oldest, kind, flags, ref rest @ ..] = rest else { return Err(malformed) };
        if oldest > VERSION {
            return Err(MessageError::Version);
        }
        let word = |rest: &'a [u8]| {
            let (word, rest) = rest.split_first_chunk().ok_or(malformed)?;
            Ok((u64::from_le_bytes(*word), rest))
        };
        let reason = |rest: &[u8]| {
            // A longer text is cut before it is read.
            printable(&String::from_utf8_lossy(&rest[..rest.len().min(REASON_MAX)]))
        };
        let (incarnation, rest) = word(rest)?;
        let message = match kind {
            1 => {
                let (version, rest) = word(rest)?;
                let (failed, rest) = word(rest)?;
                Self::Status { version, failed, reason: reason(rest) }
            }
            2 => {
                let (apply, content) = word(rest)?;
                if content.len() > CONTENT_MAX {
                    return Err(malformed);
                }
                Self::Prepare { apply, content }
            }
            3 => {
                let (apply, rest) = word(rest)?;
                Self::Answer { apply, refused: (flags & REFUSED != 0).then(|| reason(rest)) }
            }
            _ => return Err(malformed),
        };
        Ok((message, incarnation))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_message_reads_back(kind in 0..4, words in any::<[u64; 3]>(), text in "[ -~]{0,40}") {
            let [a, b, c] = words;
            let message = match kind {
                0 => Message::Status { version: a, failed: b, reason: text },
                1 => Message::Prepare { apply: a, content: text.as_bytes() },
                2 => Message::Answer { apply: a, refused: None },
                _ => Message::Answer { apply: a, refused: Some(text) },
            }
            .encode(c);
            let (read, incarnation) = Message::decode(&message).unwrap();
            prop_assert_eq!((read.encode(c), incarnation), (message.clone(), c));
        }

        #[test]
        fn any_bytes_are_refused_or_read(bytes in any::<Vec<u8>>(), kind in 0_u8..5) {
            let message = [MAGIC, &[VERSION, OLDEST, kind, 0][..], &bytes].concat();
            if let Ok((message, incarnation)) = Message::decode(&message) {
                prop_assert!(message.encode(incarnation).len() <= 32 + REASON_MAX.max(bytes.len()));
            }
        }
    }

    #[test]
    fn a_reason_is_printable_and_short() {
        let text = format!("\u{1b}[2J{}", "ä".repeat(REASON_MAX));
        let shown = printable(&text);
        assert!(shown.starts_with("?[2Jää") && shown.len() <= REASON_MAX, "{} bytes", shown.len());
    }

    #[test]
    fn a_newer_message_is_refused_unless_it_allows_older_readers() {
        let mut bytes = Message::Answer { apply: 7, refused: None }.encode(1);
        bytes[4] = VERSION + 1;
        assert!(Message::decode(&bytes).is_ok());
        bytes[5] = VERSION + 1;
        assert_eq!(Message::decode(&bytes), Err(MessageError::Version));
    }
}
