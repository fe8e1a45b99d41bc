//! `body=stream`: long messages are delivered in parts.
//!
//! What: a message of known length needs no more of the framing. A message whose end is not known, an HTTP/1.1 message in chunks, is
//! framed piece by piece: bytes that the framing has checked are delivered, and it continues with the rest ([`Framing::open`],
//! [`Framing::pass`]).

use super::body::{Key, hash};
use super::clause::Clause;
use super::coded::{Coded, Protocol};
use super::error::Fault;
use super::{Framing, Kind, Message, State, http1};

/// Removes the clause `body`. Returns its place in the text if it is `body=stream`.
pub(super) fn take(clauses: &mut Vec<Clause>) -> Result<Option<usize>, Fault> {
    let Some(at) = clauses.iter().position(|clause| clause.key == "body") else { return Ok(None) };
    let clause = clauses.remove(at);
    if let Some(second) = clauses.iter().find(|clause| clause.key == "body") {
        return Err(Fault::new(second.at, "body is given twice"));
    }
    match clause.value.as_ref().map(|value| value.text.as_str()) {
        Some("whole") => Ok(None),
        Some("stream") => Ok(Some(clause.at)),
        _ => {
            Err(Fault::new(clause.at, "body must be stream (long messages in parts) or whole (the default)"))
        }
    }
}

impl Framing {
    /// Applies the clause `body=stream` at this place in the text.
    pub(super) fn with_body(mut self, body: Option<usize>) -> Result<Self, Fault> {
        let Some(at) = body else { return Ok(self) };
        let can = match &self.kind {
            Kind::Declared(declared) => declared.knows_lengths(),
            Kind::Coded(coded) => coded.protocol == Protocol::Http1,
            Kind::Program(_) | Kind::Custom(_) => false,
        };
        if !can {
            let message = "body=stream needs a framing that knows the length of a message before its end: http1, or a length field or count without tail";
            return Err(Fault::new(at, message));
        }
        self.streams = true;
        Ok(self)
    }

    /// Delivers long messages in parts, as `body=stream` does ([`crate::assembler::Limits::part`]). For programs and functions:
    /// they return the length of a message before its end.
    #[must_use]
    pub fn streamed(mut self) -> Self {
        self.streams = true;
        self
    }

    /// Returns true for `body=stream`.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::Framing;
    ///
    /// assert!(Framing::parse("http1 body=stream")?.streams());
    /// assert!(Framing::parse("length=4 be body=stream max=1G")?.streams());
    /// assert!(Framing::parse("line body=stream").is_err());
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub const fn streams(&self) -> bool {
        self.streams
    }

    /// Returns the part of a message of unknown length that can be delivered, after [`super::Step::Need`]. `bytes` are those that were
    /// not delivered before. The `first` part has the message's hash. `None` if the message cannot be delivered in parts, or not yet.
    pub(crate) fn open(&self, bytes: &[u8], first: bool, state: &State) -> Option<Message> {
        let Kind::Coded(coded @ Coded { protocol: Protocol::Http1, .. }) = &self.kind else { return None };
        let length = http1::known(bytes.len(), state);
        if length == 0 || !first {
            return (length > 0).then(|| Message::of(length));
        }
        let hash = match coded.key {
            None => 0,
            Some(Key::Word(at)) => coded.protocol.word(bytes, at).map_or(0, hash),
            Some(Key::Bytes(offset, width)) => hash(bytes.get(offset..offset + width)?),
        };
        Some(Message { skip: http1::blank(bytes), hash, ..Message::of(length) })
    }

    /// Returns true if the peer may not send the rest of the current message before it has an answer: the message is delivered in
    /// parts, however short it is.
    pub(crate) fn expects_answer(&self, state: &State) -> bool {
        matches!(&self.kind, Kind::Coded(coded) if coded.protocol == Protocol::Http1) && http1::expects(state)
    }

    /// Updates `state`: the first `count` bytes of a message of unknown length were delivered.
    pub(crate) fn pass(&self, count: usize, state: &mut State) {
        if matches!(&self.kind, Kind::Coded(coded) if coded.protocol == Protocol::Http1) {
            http1::pass(count, state);
        }
    }

    /// Limit of a message of unknown length that is delivered in parts, in bytes.
    pub(crate) const fn longest(&self) -> u64 {
        match &self.kind {
            Kind::Coded(coded) => coded.max as u64,
            _ => u64::MAX,
        }
    }
}
