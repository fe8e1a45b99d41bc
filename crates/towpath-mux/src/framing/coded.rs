//! Protocols that the declarative form cannot express.

use super::body::{Key, hash};
use super::cause::Cause;
use super::counted::words;
use super::{Message, State, Step, cassandra, dnp3, http1, mysql, postgres, resp, smtp};

/// A protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Resp,
    Mysql,
    PostgresFrontend,
    PostgresBackend,
    Dnp3,
    Cassandra,
    Http1,
    Smtp,
}

/// A protocol with the clauses that extend it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Coded {
    pub(super) protocol: Protocol,
    /// Limit of a message in bytes, besides that of the protocol.
    pub(super) max: usize,
    pub(super) key: Option<Key>,
}

impl Protocol {
    fn step(self, bytes: &[u8], state: &mut State) -> Step {
        match self {
            Self::Resp => resp::step(bytes, state),
            Self::Mysql => mysql::step(bytes, state),
            Self::PostgresFrontend => postgres::frontend(bytes, state),
            Self::PostgresBackend => postgres::backend(bytes, state),
            Self::Dnp3 => dnp3::step(bytes),
            Self::Cassandra => cassandra::step(bytes, state),
            Self::Http1 => http1::step(bytes, state),
            Self::Smtp => smtp::step(bytes, state),
        }
    }

    /// Returns true if a word or an argument may be the key.
    pub(super) const fn has_words(self) -> bool {
        matches!(self, Self::Resp | Self::Http1 | Self::Smtp)
    }

    /// A word of the first line, or an argument of the command.
    pub(super) fn word(self, message: &[u8], at: usize) -> Option<&[u8]> {
        match self {
            Self::Resp => resp::argument(message, at),
            _ => words(message.split(|byte| *byte == b'\n').find(|line| *line != b"\r")?, b" \t").nth(at),
        }
    }
}

impl Coded {
    pub(super) fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        let before = self.key.map(|_| state.clone());
        let message = match self.protocol.step(bytes, state) {
            Step::Message(message) => message,
            Step::Need(need) if need > self.max => return Step::Error(self.too_big(None)),
            step => return step,
        };
        if message.length > self.max {
            return Step::Error(self.too_big(Some(message.length as u64)));
        }
        let hash = match self.key {
            None => 0,
            Some(Key::Word(at)) => {
                self.protocol.word(&bytes[..bytes.len().min(message.length)], at).map_or(0, hash)
            }
            Some(Key::Bytes(offset, width)) => {
                let end = (offset + width).min(message.length);
                let Some(known) = bytes.get(..end) else {
                    // The protocol is asked again with the key.
                    *state = before.unwrap_or_default();
                    return Step::Need(end);
                };
                hash(known.get(offset..).unwrap_or(&[]))
            }
        };
        Step::Message(Message { hash, ..message })
    }

    fn too_big(&self, length: Option<u64>) -> Cause {
        Cause::TooBig { length, max: self.max as u64 }
    }
}
