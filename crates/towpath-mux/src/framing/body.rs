//! The compiled declarative form: choices by first bytes, and rules for the end of a message.

use std::borrow::Cow;
use std::sync::Arc;

use super::cause::Cause;
use super::counted::{Counted, words};
use super::delimiter::Delimiters;
use super::field::{Chain, Field, Measured};
use super::pattern::{Begins, Pattern};
use super::plain::Plain;
use super::{Message, State, Step};

/// A framing: one body for the first message, one for the others.
#[derive(Debug)]
pub(super) struct Declared {
    start: Option<Body>,
    body: Body,
    plain: Option<Plain>,
}

#[derive(Debug)]
pub(super) enum Body {
    Rule(Rule),
    /// The first matching pattern chooses the rule; `otherwise` applies without a match.
    Choice {
        cases: Vec<(Pattern, Body)>,
        otherwise: Option<Box<Body>>,
    },
}

#[derive(Debug)]
pub(super) struct Rule {
    pub(super) end: End,
    /// Limits of the whole message in bytes.
    pub(super) min: usize,
    pub(super) max: usize,
    pub(super) strip: Strip,
    pub(super) trim: usize,
    /// Bytes that must end the message.
    pub(super) tail: Vec<u8>,
    pub(super) mark: u32,
    pub(super) key: Option<Key>,
    /// Bytes that separate the words of a line.
    pub(super) blanks: Cow<'static, [u8]>,
}

/// The bytes of a message that its hash is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// Offset and length.
    Bytes(usize, usize),
    /// A word of the head or line, or an argument of a command, from 0. A message without it has no key.
    Word(usize),
}

#[derive(Debug)]
pub(super) enum End {
    Fixed(usize),
    Length(Field),
    Until(Delimiters),
    Counted(Counted),
    GiveBack,
    Refuse(Arc<str>),
}

impl Body {
    fn has_key(&self) -> bool {
        match self {
            Self::Rule(rule) => rule.key.is_some(),
            Self::Choice { cases, otherwise } => {
                cases.iter().map(|(_, body)| body).chain(otherwise.as_deref()).any(Self::has_key)
            }
        }
    }
}

impl Body {
    fn knows_lengths(&self) -> bool {
        match self {
            Self::Rule(rule) => {
                let single = |field: &Field| matches!(field.chain, Chain::Single);
                let known = match &rule.end {
                    End::Fixed(_) | End::Counted(_) => true,
                    End::Length(field) => single(field),
                    End::Until(_) | End::GiveBack | End::Refuse(_) => false,
                };
                known && rule.tail.is_empty()
            }
            Self::Choice { cases, otherwise } => {
                cases.iter().map(|(_, body)| body).chain(otherwise.as_deref()).any(Self::knows_lengths)
            }
        }
    }
}

/// The part of a message that is not payload.
#[derive(Clone, Copy, Debug)]
pub(super) enum Strip {
    Bytes(usize),
    /// Everything up to the end of the length field.
    Head,
    Delimiter,
}

impl Declared {
    pub(super) fn new(start: Option<Body>, body: Body) -> Self {
        let plain = match (&start, &body) {
            (None, Body::Rule(rule)) => Plain::of(rule),
            _ => None,
        };
        Self { start, body, plain }
    }

    /// The plain scanner, if the rule is simple enough.
    pub(super) const fn plain(&self) -> Option<&Plain> {
        self.plain.as_ref()
    }

    pub(super) fn has_key(&self) -> bool {
        self.start.iter().chain([&self.body]).any(Body::has_key)
    }

    /// Returns true if the length of some messages is known before their last byte.
    pub(super) fn knows_lengths(&self) -> bool {
        self.start.iter().chain([&self.body]).any(Body::knows_lengths)
    }

    pub(super) fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        match &self.start {
            Some(start) if state.messages == 0 => start.step(bytes, state),
            _ => self.body.step(bytes, state),
        }
    }
}

impl Body {
    fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        let (cases, otherwise) = match self {
            Self::Rule(rule) => return rule.step(bytes, state),
            Self::Choice { cases, otherwise } => (cases, otherwise),
        };
        for (pattern, body) in cases {
            match pattern.begins(bytes) {
                Begins::Yes => return body.step(bytes, state),
                Begins::Perhaps => return Step::Need(bytes.len() + 1),
                Begins::No => {}
            }
        }
        match otherwise {
            Some(body) => body.step(bytes, state),
            None => Step::Error(Cause::malformed("the first bytes match no case of this framing")),
        }
    }
}

impl Rule {
    pub(super) fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        match &self.end {
            End::Fixed(length) => self.finish(bytes, *length, *length, 0),
            End::Length(field) if matches!(field.chain, Chain::Single) => self.single(field, bytes),
            End::Length(field) => self.chained(field, bytes, state),
            End::Until(delimiters) => self.until(delimiters, bytes, state),
            End::Counted(counted) => self.counted(counted, bytes, state),
            End::GiveBack => Step::GiveBack,
            End::Refuse(reason) => Step::Error(Cause::Malformed(reason.to_string().into())),
        }
    }

    fn single(&self, field: &Field, bytes: &[u8]) -> Step {
        let part = match field.measure(bytes) {
            Measured::Part(part) => part,
            Measured::Need(need) => return Step::Need(need),
            Measured::Error(cause) => return Step::Error(cause),
        };
        match self.length(part.length, part.head) {
            Ok(length) => self.finish(bytes, length, part.head, 0),
            Err(cause) => Step::Error(cause),
        }
    }

    /// A message of several parts, each with its length field. `state.scanned` is the start of the current
    /// part.
    fn chained(&self, field: &Field, bytes: &[u8], state: &mut State) -> Step {
        loop {
            let start = state.scanned;
            let part = match field.measure(bytes.get(start..).unwrap_or(&[])) {
                Measured::Part(part) => part,
                Measured::Need(need) => return Step::Need(start + need),
                Measured::Error(cause) => return Step::Error(cause),
            };
            let least = start + part.head;
            let length = match self.length(part.length + start as i128, least) {
                Ok(length) => length,
                Err(cause) => return Step::Error(cause),
            };
            if !part.more {
                return self.finish(bytes, length, part.head, 0);
            }
            state.scanned = length;
        }
    }

    fn until(&self, delimiters: &Delimiters, bytes: &[u8], state: &mut State) -> Step {
        match delimiters.find(bytes, state.scanned) {
            Some((end, _)) if end > self.max => Step::Error(self.too_big(None)),
            Some((end, delimiter)) => self.finish(bytes, end, end, delimiter),
            None if bytes.len() >= self.max => Step::Error(self.too_big(None)),
            None => {
                state.scanned = bytes.len();
                Step::Need(bytes.len() + 1)
            }
        }
    }

    fn counted(&self, counted: &Counted, bytes: &[u8], state: &mut State) -> Step {
        let (head, announced) = match counted.measure(bytes, &self.blanks, state) {
            Ok(measured) => measured,
            Err(step) => return step,
        };
        match self.length(announced, head) {
            Ok(length) => self.finish(bytes, length, head, 0),
            Err(cause) => Step::Error(cause),
        }
    }

    /// Checks the announced length.
    fn length(&self, announced: i128, least: usize) -> Result<usize, Cause> {
        if announced > self.max as i128 {
            return Err(self.too_big(Some(u64::try_from(announced).unwrap_or(u64::MAX))));
        }
        let least = least.max(self.min);
        match usize::try_from(announced) {
            Ok(length) if length >= least => Ok(length),
            _ => {
                let length = i64::try_from(announced).unwrap_or(i64::MIN);
                Err(Cause::BadLength { length, least: least as u64 })
            }
        }
    }

    fn finish(&self, bytes: &[u8], length: usize, head: usize, delimiter: usize) -> Step {
        let (skip, trim) = match self.strip {
            Strip::Bytes(skip) => (skip, self.trim),
            Strip::Head => (head, self.trim),
            Strip::Delimiter => (0, self.trim + delimiter),
        };
        let least = self.min.max(skip + trim).max(self.tail.len());
        if length < least {
            return Step::Error(Cause::BadLength { length: length as i64, least: least as u64 });
        }
        if !self.tail.is_empty() {
            match bytes.get(..length) {
                None => return Step::Need(length),
                Some(message) if message.ends_with(&self.tail) => {}
                Some(_) => {
                    return Step::Error(Cause::malformed("the message does not end with its end mark"));
                }
            }
        }
        let hash = match self.key {
            Some(Key::Bytes(offset, width)) => {
                let end = (offset + width).min(length);
                let Some(message) = bytes.get(..end) else { return Step::Need(end) };
                hash(message.get(offset..).unwrap_or(&[]))
            }
            Some(Key::Word(at)) => words(&bytes[..head], &self.blanks).nth(at).map_or(0, hash),
            None => 0,
        };
        Step::Message(Message { length, skip, trim, mark: self.mark, hash })
    }

    fn too_big(&self, length: Option<u64>) -> Cause {
        Cause::TooBig { length, max: self.max as u64 }
    }
}

/// FNV-1a, 32 bits (RFC 9923, section 2). Not a defence against a peer that chooses keys to overload one
/// worker.
pub(super) fn hash(key: &[u8]) -> u32 {
    key.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}
