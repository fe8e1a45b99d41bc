//! Errors in the text of a framing: what is wrong, where, and a suggestion.

use std::error::Error;
use std::fmt;

/// Why the text of a framing is invalid.
///
/// Displays as `column 10: ...` for a line and as `3:5: ...` (line, column) for TOML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line in a document, from 1; `None` for a single line.
    pub line: Option<u32>,
    /// Column in characters, from 1.
    pub column: u32,
    /// The error, and a suggestion if there is one.
    pub message: String,
}

impl ParseError {
    pub(super) fn unknown_preset<'a>(name: &str, known: impl Iterator<Item = &'a str> + Clone) -> Self {
        let hint = match nearest(name, known.clone()) {
            Some(near) => format!("did you mean {near:?}?"),
            None => format!("the presets are {}", known.collect::<Vec<_>>().join(", ")),
        };
        Self { line: None, column: 1, message: format!("unknown preset {name:?}; {hint}") }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{line}:{}: {}", self.column, self.message),
            None => write!(f, "column {}: {}", self.column, self.message),
        }
    }
}

impl Error for ParseError {}

/// An error at a byte offset of the text.
#[derive(Debug)]
pub(super) struct Fault {
    at: usize,
    message: String,
}

impl Fault {
    pub(super) fn new(at: usize, message: impl Into<String>) -> Self {
        Self { at, message: message.into() }
    }

    /// Converts to an error in a single line.
    pub(super) fn in_line(self, text: &str) -> ParseError {
        let column = column(text.get(..self.at).unwrap_or(text));
        ParseError { line: None, column, message: self.message }
    }

    /// Converts to an error in a document.
    pub(super) fn in_document(self, document: &str) -> ParseError {
        let before = document.get(..self.at).unwrap_or(document);
        let line = u32::try_from(before.matches('\n').count() + 1).unwrap_or(u32::MAX);
        let column = column(before.rsplit('\n').next().unwrap_or(before));
        ParseError { line: Some(line), column, message: self.message }
    }
}

/// `; did you mean "x"?` if one of `known` is similar to `word`.
pub(super) fn hint<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> String {
    nearest(word, known).map_or_else(String::new, |near| format!("; did you mean {near:?}?"))
}

fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    known
        .map(|near| (strsim::damerau_levenshtein(&word, &near.to_ascii_lowercase()), near))
        .min()
        .filter(|(distance, near)| *distance <= (near.len() / 3).max(1))
        .map(|(_, near)| near)
}

fn column(before: &str) -> u32 {
    u32::try_from(before.chars().count() + 1).unwrap_or(u32::MAX)
}
