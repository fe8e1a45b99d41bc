//! A cursor over the words of one command.

use crate::rules::diagnostic::{Fault, Position, quoted};
use crate::rules::token::{Line, Token};

/// A position in a command, and the faults found so far.
pub(crate) struct Cursor<'l, 'a> {
    line: &'l Line<'a>,
    at: usize,
    faults: &'l mut Vec<Fault>,
    /// Number of faults before this command.
    before: usize,
}

/// Maximum number of faults noted per command: a line may be as long as the file.
const MAX_FAULTS: usize = 100;

pub(crate) type Parse<T> = Result<T, Fault>;

impl<'l, 'a> Cursor<'l, 'a> {
    pub(crate) fn new(line: &'l Line<'a>, faults: &'l mut Vec<Fault>) -> Self {
        let before = faults.len();
        Self { line, at: 0, faults, before }
    }

    /// Returns the next word without consuming it.
    pub(crate) fn peek(&self) -> Option<&'l str> {
        self.peek_at(0)
    }

    /// Returns the word `ahead` words after the next one.
    pub(crate) fn peek_at(&self, ahead: usize) -> Option<&'l str> {
        self.line.tokens.get(self.at + ahead).map(|token| &*token.text)
    }

    /// Position of the next word, or the end of the line.
    pub(crate) fn here(&self) -> Position {
        self.line.tokens.get(self.at).map_or(self.line.end, Token::position)
    }

    pub(crate) fn take(&mut self) -> Option<&'l Token<'a>> {
        let token = self.line.tokens.get(self.at)?;
        self.at += 1;
        Some(token)
    }

    /// Consumes the next word if it is `word`.
    pub(crate) fn eat(&mut self, word: &str) -> bool {
        let here = self.peek() == Some(word);
        self.at += usize::from(here);
        here
    }

    /// Consumes the next word, or reports that `what` is missing.
    pub(crate) fn need(&mut self, what: &str) -> Parse<&'l Token<'a>> {
        let at = self.here();
        self.take().ok_or_else(|| Fault::new(at, format!("{what} is missing")))
    }

    /// Consumes a number between `lo` and `hi` (decimal, or hexadecimal with 0x).
    pub(crate) fn number(&mut self, what: &str, lo: u32, hi: u32) -> Parse<u32> {
        let token = self.need(what)?;
        number(&token.text)
            .filter(|n| (lo..=hi).contains(n))
            .ok_or_else(|| bad_number(token.position(), &token.text, what, lo, hi))
    }

    /// Notes a fault; parsing continues.
    pub(crate) fn note(&mut self, fault: Fault) {
        if !self.full() {
            self.faults.push(fault);
        }
    }

    /// Returns true if the command has so many faults that the rest is not parsed.
    pub(crate) fn full(&self) -> bool {
        self.faults.len() - self.before >= MAX_FAULTS
    }

    /// Returns true if the command has no faults so far.
    pub(crate) fn fine(&self) -> bool {
        self.faults.len() == self.before
    }

    /// The comment of the line.
    pub(crate) fn comment(&self) -> Option<&'l str> {
        self.line.comment.as_deref()
    }

    /// Reports the next word as superfluous, if there is one.
    pub(crate) fn nothing_left(&mut self, after: &str) -> Parse<()> {
        match self.take() {
            None => Ok(()),
            Some(token) => {
                let message = format!("unexpected {} after {after}", quoted(&token.text));
                Err(Fault::new(token.position(), message))
            }
        }
    }
}

pub(crate) fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None if text.starts_with('+') => None,
        None => text.parse().ok(),
    }
}

pub(crate) fn bad_number(at: Position, text: &str, what: &str, lo: u32, hi: u32) -> Fault {
    Fault::new(at, format!("{} is not a valid {what}", quoted(text)))
        .hint(format!("use a number from {lo} to {hi}"))
}

/// Iterates over the elements of a comma list with their offsets. Commas inside brackets do not separate.
pub(crate) fn elements(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut start = Some(0);
    std::iter::from_fn(move || {
        let from = start?;
        let mut depth = 0usize;
        let end = text[from..].char_indices().find_map(|(at, c)| {
            match c {
                '(' | '{' => depth += 1,
                ')' | '}' => depth = depth.saturating_sub(1),
                ',' if depth == 0 => return Some(from + at),
                _ => {}
            }
            None
        });
        start = end.map(|end| end + 1);
        Some((from, &text[from..end.unwrap_or(text.len())]))
    })
}
