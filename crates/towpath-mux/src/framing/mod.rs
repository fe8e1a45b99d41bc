//! Framing: finds where a message ends.
//!
//! A [`Framing`] gets the bytes of a message, from its first byte on, and returns a [`Step`]: the length of
//! the message, the number of bytes that it needs to know more, an error, or that the connection leaves the
//! protocol. The caller keeps its [`State`] per connection.
//!
//! Four ways to make one:
//! - the declarative form, in a line or in TOML ([`Framing::parse`], [`Framing::from_toml`]);
//! - a preset by name ([`Framing::preset`], [`PRESETS`]), which clauses may extend;
//! - a BPF program made for KCM ([`Framing::program`]);
//! - a Rust function or type ([`Framing::custom`], [`Custom`]).
//!
//! Invariant: the result for the first n bytes of a stream does not change when more bytes follow, except
//! from `Need` to another result. Therefore every segmentation of a stream gives the same messages.
//!
//! Reference: Linux, Documentation/networking/strparser.rst and kcm.rst.

mod body;
mod cassandra;
mod cause;
mod clause;
mod coded;
mod compile;
mod counted;
mod delimiter;
mod dnp3;
mod error;
mod extend;
mod field;
mod http1;
mod mysql;
mod pattern;
mod plain;
mod postgres;
mod preset;
mod program;
mod resp;
mod smtp;
mod stream;
mod text;
mod toml;
mod value;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use cause::Cause;
pub use error::ParseError;
pub use preset::{PRESETS, Preset, StartTls};

use crate::order::Order;
use body::Declared;
use coded::Coded;
pub(crate) use plain::Plain;

/// Result of framing the start of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The length is known. The bytes may still be incomplete.
    Message(Message),
    /// This number of bytes, from the start of the message, is needed to know more. More than were given, and
    /// never more than necessary: the caller may wait for them.
    Need(usize),
    /// The stream cannot be framed any further.
    Error(Cause),
    /// Another protocol begins at the first byte of this message (KCM's -ESTRPIPE): the connection leaves the mux.
    GiveBack,
}

/// A message of known length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Length of the whole message in bytes, header included; at least 1.
    pub length: usize,
    /// Number of bytes at its start that are not payload.
    pub skip: usize,
    /// Number of bytes at its end that are not payload; `skip + trim <= length`.
    pub trim: usize,
    /// A mark for the worker (strparser's plan for SO_MARK).
    pub mark: u32,
    /// A hash for ordering by key; 0 without a key.
    pub hash: u32,
}

impl Message {
    /// A message of `length` bytes, all payload, without mark and hash.
    pub const fn of(length: usize) -> Self {
        Self { length, skip: 0, trim: 0, mark: 0, hash: 0 }
    }
}

impl From<usize> for Step {
    /// A message of this length.
    fn from(length: usize) -> Self {
        Self::Message(Message::of(length))
    }
}

/// State of a framing for one direction of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Number of messages framed on the connection.
    pub messages: u64,
    /// Number of bytes of the current message that need not be scanned again. Reset to 0 after each message.
    pub scanned: usize,
    /// The first bytes seen are not the start of the connection. They may start with any message of the
    /// protocol.
    pub midstream: bool,
    /// A counter for the current message. Reset to 0 after each message.
    pub pending: u64,
    /// 20 bytes of state for the connection (a program's `cb`). Starts at 0 and persists.
    pub cb: [u32; 5],
}

/// A framing in Rust. Implemented by every `Fn(&[u8], &mut State) -> Step`.
pub trait Custom: Send + Sync {
    /// Frames the message that starts with `bytes`. See [`Framing::step`].
    fn step(&self, bytes: &[u8], state: &mut State) -> Step;
}

impl<F: Fn(&[u8], &mut State) -> Step + Send + Sync> Custom for F {
    fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        self(bytes, state)
    }
}

/// A framing. Clones share it; one framing serves any number of connections.
#[derive(Clone)]
pub struct Framing {
    name: Arc<str>,
    kind: Kind,
    /// The preset that it is or extends.
    preset: Option<&'static Preset>,
    /// `body=stream`.
    streams: bool,
}

#[derive(Clone)]
enum Kind {
    Declared(Arc<Declared>),
    Coded(Coded),
    Program(Arc<towpath_bpf::Program>),
    Custom(Arc<dyn Custom>),
}

impl Framing {
    /// Parses the declarative form, or the name of a preset with clauses that extend it.
    ///
    /// # Errors
    ///
    /// [`ParseError`] with the column and a suggestion.
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
        let word = text.trim_start();
        let word = &word[..word.find(char::is_whitespace).unwrap_or(word.len())];
        if !is_name(word) {
            let clauses = text::clauses(text)?;
            return Self::declared(text.trim(), clauses).map_err(|fault| fault.in_line(text));
        }
        let preset = preset::known(word)?;
        let end = text.len() - text.trim_start().len() + word.len();
        // Blanks in place of the name, so that columns are right.
        let clauses = text::clauses(&format!("{:end$}{}", "", &text[end..]))?;
        if clauses.is_empty() {
            return Self::extended(preset, preset.name, clauses).map_err(|fault| fault.in_line(text));
        }
        Self::extended(preset, text.trim(), clauses).map_err(|fault| fault.in_line(text))
    }

    fn declared(name: &str, mut clauses: Vec<clause::Clause>) -> Result<Self, error::Fault> {
        let body = stream::take(&mut clauses)?;
        let kind = Kind::Declared(Arc::new(compile::declared(&clauses)?));
        Self { name: name.into(), kind, preset: None, streams: false }.with_body(body)
    }

    fn extended(
        preset: &'static Preset,
        name: &str,
        mut clauses: Vec<clause::Clause>,
    ) -> Result<Self, error::Fault> {
        let body = stream::take(&mut clauses)?;
        let kind = extend::kind(preset, clauses)?;
        Self { name: name.into(), kind, preset: Some(preset), streams: false }.with_body(body)
    }

    /// Parses TOML.
    ///
    /// # Errors
    ///
    /// [`ParseError`] with line, column and a suggestion.
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
    /// assert_eq!(error.to_string(), "2:10: length must be 1 to 8 bytes wide, not 9");
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub fn from_toml(document: &str) -> Result<Self, ParseError> {
        let mut clauses = toml::clauses(document)?;
        let name = "declared in TOML";
        let framing = match clauses.iter().position(|clause| clause.key == "preset") {
            None => Self::declared(name, clauses),
            Some(at) => {
                let preset = clauses.remove(at).value;
                let written = preset.as_ref().map_or("", |value| value.text.as_str());
                let known = preset::known(written).map_err(|error| {
                    error::Fault::new(preset.as_ref().map_or(0, |value| value.at), error.message)
                });
                known.and_then(|preset| Self::extended(preset, name, clauses))
            }
        };
        framing.map_err(|fault| fault.in_document(document))
    }

    /// Returns a preset, see [`PRESETS`].
    ///
    /// # Errors
    ///
    /// If no preset has this name, the error names the most similar one.
    pub fn preset(name: &str) -> Result<Self, ParseError> {
        let preset = preset::known(name)?;
        Self::extended(preset, preset.name, Vec::new()).map_err(|fault| fault.in_line(name))
    }

    /// A verified BPF program with KCM's calling convention.
    ///
    /// The program sees a message from offset 0. It returns the length of the message; 0 for "need more",
    /// with `mark` as the minimum number of bytes; -ESTRPIPE if another protocol begins; another negative
    /// number as an error. `cb` starts at 0 for a connection and persists. `mark` and `hash` go with the
    /// message.
    pub fn program(name: &str, program: towpath_bpf::Program) -> Self {
        Self { name: name.into(), kind: Kind::Program(Arc::new(program)), preset: None, streams: false }
    }

    /// Loads and verifies a program from the bytes of a file: an ELF object of clang, raw eBPF instructions, or the output of
    /// `tcpdump -ddd`. `name` selects one of several programs of an object.
    ///
    /// # Errors
    ///
    /// The verifier's reason, or the programs of the object if `name` is none of them.
    pub fn load_program(bytes: &[u8], name: Option<String>) -> Result<Self, towpath_bpf::LoadError> {
        let shown = name.clone().unwrap_or_else(|| "a BPF program".to_owned());
        let options = towpath_bpf::LoadOptions { name, ..towpath_bpf::LoadOptions::default() };
        Ok(Self::program(&shown, towpath_bpf::Program::load(bytes, &options)?))
    }

    /// A framing written in Rust.
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::{Framing, State, Step};
    ///
    /// // The first byte is the number of 4-byte words that follow.
    /// let words = Framing::custom("words", |bytes: &[u8], _: &mut State| match bytes {
    ///     [count, ..] => Step::from(1 + 4 * usize::from(*count)),
    ///     [] => Step::Need(1),
    /// });
    /// assert_eq!(words.step(&[2], &mut State::default()), Step::from(9));
    /// ```
    pub fn custom(name: &str, custom: impl Custom + 'static) -> Self {
        Self { name: name.into(), kind: Kind::Custom(Arc::new(custom)), preset: None, streams: false }
    }

    /// The order that the protocol needs: that of the preset, otherwise [`Order::Replies`].
    ///
    /// # Examples
    ///
    /// ```
    /// use towpath_mux::framing::Framing;
    /// use towpath_mux::mux::Order;
    ///
    /// assert_eq!(Framing::parse("dns-tcp")?.order(), Order::None);
    /// assert_eq!(Framing::parse("resp key=1")?.order(), Order::Replies);
    /// assert_eq!(Framing::parse("length=2")?.order(), Order::Replies);
    /// # Ok::<(), towpath_mux::framing::ParseError>(())
    /// ```
    pub const fn order(&self) -> Order {
        match self.preset {
            Some(preset) => preset.order,
            None => Order::Replies,
        }
    }

    /// Protocol ids of ALPN (RFC 7301): those of the preset, otherwise none.
    pub fn alpn(&self) -> &'static [&'static str] {
        self.preset.map_or(&[], |preset| preset.alpn)
    }

    /// How clients of the protocol ask for TLS in plaintext; `None` without, and for framings that are not a preset.
    pub fn starttls(&self) -> Option<StartTls> {
        self.preset.and_then(|preset| preset.starttls)
    }

    /// Name of the preset, text of the declarative form, or name passed to [`Framing::custom`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Frames the message that starts with `bytes`.
    ///
    /// `bytes` may be incomplete or extend beyond the message. After [`Step::Message`] the state is that of
    /// the next message: the next call gets the bytes after this one, even if not all of this one had
    /// arrived. After [`Step::Need`] the next call gets the same bytes and more.
    pub fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        if bytes.is_empty() {
            return Step::Need(1);
        }
        let step = match &self.kind {
            Kind::Declared(declared) => declared.step(bytes, state),
            Kind::Coded(coded) => coded.step(bytes, state),
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

    /// A faster scanner, if the framing is simple and its only state is the number of messages.
    pub(crate) fn plain(&self) -> Option<&Plain> {
        match &self.kind {
            Kind::Declared(declared) => declared.plain(),
            _ => None,
        }
    }

    /// Returns true if messages may have a hash. A program or function may give one.
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
            Kind::Coded(coded) => coded.key.is_some(),
            Kind::Program(_) | Kind::Custom(_) => true,
        }
    }

    /// Returns true if the framing bounds the bytes before the length is known. For programs and functions
    /// the caller bounds them.
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

/// Returns true for a preset's name, false for clauses.
fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
        && !compile::is_key(text)
}

/// Enforces what [`Step`] promises on the result of foreign code.
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
