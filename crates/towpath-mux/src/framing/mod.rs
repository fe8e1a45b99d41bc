//! Where a message ends.
//!
//! A [`Framing`] is asked with the bytes of a message so far, the message's first byte at offset 0, and answers with a
//! [`Step`]: the message's length, how many bytes it needs to say more, an error, or that the connection is not for it.
//! What it has to remember of a connection is in a [`State`] that the caller keeps.
//!
//! Four ways to make one:
//! - in a line, or in TOML ([`Framing::parse`], [`Framing::from_toml`]): the declarative form;
//! - by the name of a preset ([`Framing::preset`], [`PRESETS`]);
//! - a BPF program made for KCM ([`Framing::program`]);
//! - a Rust function or type ([`Framing::custom`], [`Custom`]).
//!
//! Invariant: the answer about the first n bytes of a stream does not change when more bytes follow, except from "need" to
//! something else. So every cut of a stream gives the same messages.
//!
//! Reference: Linux, Documentation/networking/strparser.rst and kcm.rst.

mod body;
mod cassandra;
mod cause;
mod clause;
mod compile;
mod delimiter;
mod dnp3;
mod error;
mod field;
mod mysql;
mod pattern;
mod plain;
mod postgres;
mod preset;
mod program;
mod resp;
mod text;
mod toml;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use cause::Cause;
pub use error::ParseError;
pub use preset::{PRESETS, Preset};

use body::Declared;
pub(crate) use plain::Plain;

/// What a framing says about the bytes at the start of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The message's length is known; its bytes need not all be there yet.
    Message(Message),
    /// The length cannot be known before this many bytes, counted from the message's start, are there. Always more than were
    /// given, never more than are really needed: a caller may wait for them.
    Need(usize),
    /// The stream cannot be framed from here on.
    Error(Cause),
    /// The connection goes on in a protocol that this framing leaves alone (KCM's -ESTRPIPE): give it back to
    /// whoever attached it, from this message's first byte.
    GiveBack,
}

/// A message whose length is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Bytes of the whole message, header included; at least 1.
    pub length: usize,
    /// Bytes at its start that are not payload.
    pub skip: usize,
    /// Bytes at its end that are not payload; `skip + trim <= length`.
    pub trim: usize,
    /// A number the framing gives to the message (strparser's plan for SO_MARK).
    pub mark: u32,
    /// A hash of what the message is ordered by; 0 when the framing has no key.
    pub hash: u32,
}

impl Message {
    /// A message of `length` bytes, all payload, without mark and hash.
    pub const fn of(length: usize) -> Self {
        Self { length, skip: 0, trim: 0, mark: 0, hash: 0 }
    }
}

impl From<usize> for Step {
    /// A message of that many bytes.
    fn from(length: usize) -> Self {
        Self::Message(Message::of(length))
    }
}

/// What a framing remembers of one direction of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Messages that were framed on the connection; 0 at its first.
    pub messages: u64,
    /// Bytes of the current message that need not be looked at again. Set to 0 behind each message.
    pub scanned: usize,
    /// Whether the connection was already under way when its bytes were first seen, so that they may start with any message
    /// of the protocol.
    pub midstream: bool,
    /// The framing's own count within the current message. Set to 0 behind each message.
    pub pending: u64,
    /// The framing's own 20 bytes for the connection (the context's `cb` of a program). Starts at 0 and persists.
    pub cb: [u32; 5],
}

/// A framing written in Rust.
///
/// Every `Fn(&[u8], &mut State) -> Step` is one.
pub trait Custom: Send + Sync {
    /// Says where the message ends that starts with `bytes`. See [`Framing::step`].
    fn step(&self, bytes: &[u8], state: &mut State) -> Step;
}

impl<F: Fn(&[u8], &mut State) -> Step + Send + Sync> Custom for F {
    fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        self(bytes, state)
    }
}

/// Says where messages end. Cheap to clone; one serves any number of connections.
#[derive(Clone)]
pub struct Framing {
    name: Arc<str>,
    kind: Kind,
}

#[derive(Clone)]
enum Kind {
    Declared(Arc<Declared>),
    Coded(Coded),
    Program(Arc<towpath_bpf::Program>),
    Custom(Arc<dyn Custom>),
}

/// The protocols that the declarative form cannot say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coded {
    Resp,
    Mysql,
    PostgresFrontend,
    PostgresBackend,
    Dnp3,
    Cassandra,
}

impl Framing {
    /// A framing in the declarative form, or the name of a preset.
    ///
    /// # Errors
    ///
    /// [`ParseError`] with the column, and what may have been meant.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::{Framing, State, Step};
    ///
    /// let framing = Framing::parse("offset=0 length=4 be adjust=4 max=16M")?;
    /// let mut state = State::default();
    /// assert_eq!(framing.step(b"\x00\x00", &mut state), Step::Need(4));
    /// assert_eq!(framing.step(b"\x00\x00\x00\x05hel", &mut state), Step::from(9));
    ///
    /// let error = Framing::parse("offset=0 lenght=4").unwrap_err();
    /// assert_eq!(error.to_string(), "column 10: unknown key \"lenght\"; did you mean \"length\"?");
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let name = text.trim();
        if is_name(name) {
            return Self::preset(name);
        }
        let clauses = text::clauses(text)?;
        let declared = compile::declared(&clauses).map_err(|fault| fault.in_line(text))?;
        Ok(Self { name: name.into(), kind: Kind::Declared(Arc::new(declared)) })
    }

    /// A framing in TOML.
    ///
    /// # Errors
    ///
    /// [`ParseError`] with line and column, and what may have been meant.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::{Framing, State, Step};
    ///
    /// let framing = Framing::from_toml("offset = 0\nlength = 2\nendian = 'little'\nmax = '64K'\n")?;
    /// assert_eq!(framing.step(b"\x03\x00\x07", &mut State::default()), Step::from(3));
    ///
    /// let error = Framing::from_toml("offset = 0\nlength = 9\n").unwrap_err();
    /// assert_eq!(error.to_string(), "2:10: length is 1 to 8 bytes wide, not 9");
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub fn from_toml(document: &str) -> Result<Self, ParseError> {
        let clauses = toml::clauses(document)?;
        let declared = compile::declared(&clauses).map_err(|fault| fault.in_document(document))?;
        Ok(Self { name: "declared in TOML".into(), kind: Kind::Declared(Arc::new(declared)) })
    }

    /// The preset of that name, see [`PRESETS`].
    ///
    /// # Errors
    ///
    /// When there is none; the error names the nearest.
    pub fn preset(name: &str) -> Result<Self, ParseError> {
        let Some(preset) = preset::find(name) else {
            return Err(ParseError::unknown_preset(name, PRESETS.iter().map(|preset| preset.name)));
        };
        let kind = match preset.form {
            preset::Form::Coded(coded) => Kind::Coded(coded),
            preset::Form::Text(text) => {
                let clauses = text::clauses(text)?;
                Kind::Declared(Arc::new(compile::declared(&clauses).map_err(|fault| fault.in_line(text))?))
            }
        };
        Ok(Self { name: preset.name.into(), kind })
    }

    /// A checked BPF program with KCM's contract.
    ///
    /// It sees a message's bytes from offset 0. Its result is the message's length; 0 for "need more", where a `mark` says how
    /// many at least; -ESTRPIPE to give the connection back; another negative number is an error. Its `cb` starts at 0 for a
    /// connection and persists; `mark` and `hash` go with the message.
    pub fn program(name: &str, program: towpath_bpf::Program) -> Self {
        Self { name: name.into(), kind: Kind::Program(Arc::new(program)) }
    }

    /// A framing written in Rust.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::{Framing, State, Step};
    ///
    /// // The first byte counts the words of four bytes that follow.
    /// let words = Framing::custom("words", |bytes: &[u8], _: &mut State| match bytes {
    ///     [count, ..] => Step::from(1 + 4 * usize::from(*count)),
    ///     [] => Step::Need(1),
    /// });
    /// assert_eq!(words.step(&[2], &mut State::default()), Step::from(9));
    /// ```
    pub fn custom(name: &str, custom: impl Custom + 'static) -> Self {
        Self { name: name.into(), kind: Kind::Custom(Arc::new(custom)) }
    }

    /// The preset's name, the declarative text, or the name given to [`Framing::custom`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Says where the message ends that starts with `bytes`.
    ///
    /// `bytes` are those that arrived from the message's first byte on, and may go beyond its end. Behind
    /// [`Step::Message`] the state is that of the next message, so the next call is about the bytes behind this one, even if
    /// some of this one were not there yet. Behind [`Step::Need`] the next call has the same bytes and more.
    pub fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        if bytes.is_empty() {
            return Step::Need(1);
        }
        let step = match &self.kind {
            Kind::Declared(declared) => declared.step(bytes, state),
            Kind::Coded(Coded::Resp) => resp::step(bytes, state),
            Kind::Coded(Coded::Mysql) => mysql::step(bytes, state),
            Kind::Coded(Coded::PostgresFrontend) => postgres::frontend(bytes, state),
            Kind::Coded(Coded::PostgresBackend) => postgres::backend(bytes, state),
            Kind::Coded(Coded::Dnp3) => dnp3::step(bytes),
            Kind::Coded(Coded::Cassandra) => cassandra::step(bytes, state),
            Kind::Program(program) => checked(program::step(program, bytes, state), bytes.len()),
            Kind::Custom(custom) => checked(custom.step(bytes, state), bytes.len()),
        };
        if let Step::Message(_) = step {
            state.messages += 1;
            state.scanned = 0;
            state.pending = 0;
        }
        step
    }

    /// What finds whole messages sooner, if the framing is simple and keeps no state but their number.
    pub(crate) fn plain(&self) -> Option<&Plain> {
        match &self.kind {
            Kind::Declared(declared) => declared.plain(),
            _ => None,
        }
    }

    /// Whether messages may have a hash by which they are ordered. A program or a function may give one.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::Framing;
    ///
    /// assert!(Framing::parse("offset=0 length=2 key=4:8")?.may_have_key());
    /// assert!(!Framing::parse("dns-tcp")?.may_have_key());
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub fn may_have_key(&self) -> bool {
        match &self.kind {
            Kind::Declared(declared) => declared.has_key(),
            Kind::Coded(_) => false,
            Kind::Program(_) | Kind::Custom(_) => true,
        }
    }

    /// Whether the framing itself gives up when a length stays unknown for too long. A program or a function does not, so
    /// the caller has to bound the bytes that it is shown.
    pub fn bounds_head(&self) -> bool {
        !matches!(self.kind, Kind::Program(_) | Kind::Custom(_))
    }
}

impl FromStr for Framing {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text)
    }
}

impl fmt::Debug for Framing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Framing").field(&self.name).finish()
    }
}

/// A name of a preset, rather than clauses.
fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
        && !compile::is_key(text)
}

/// The answer of somebody else's code, held to what [`Step`] promises.
fn checked(step: Step, given: usize) -> Step {
    match step {
        Step::Need(need) => Step::Need(need.max(given.saturating_add(1))),
        Step::Message(Message { length: 0, .. }) => Step::Error(Cause::BadLength { length: 0, least: 1 }),
        Step::Message(message) if message.skip.saturating_add(message.trim) > message.length => {
            let least = message.skip.saturating_add(message.trim) as u64;
            Step::Error(Cause::BadLength { length: message.length as i64, least })
        }
        step => step,
    }
}

#[cfg(test)]
mod tests;
