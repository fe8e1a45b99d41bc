//! Reading along the words of one command.

use crate::rules::diagnostic::{Fault, Position, quoted};
use crate::rules::token::{Line, Token};

/// A place in a command, and what was wrong before it.
pub(crate) struct Cursor<'l, 'a> {
    line: &'l Line<'a>,
    at: usize,
    faults: &'l mut Vec<Fault>,
    /// How many faults there were before this command.
    before: usize,
}

/// Most faults that are noted of one command: a line may be as long as the file.
const MAX_FAULTS: usize = 100;

pub(crate) type Parse<T> = Result<T, Fault>;

impl<'l, 'a> Cursor<'l, 'a> {
    pub(crate) fn new(line: &'l Line<'a>, faults: &'l mut Vec<Fault>) -> Self {
        let before = faults.len();
        Self { line, at: 0, faults, before }
    }

    /// The next word.
    pub(crate) fn peek(&self) -> Option<&'l str> {
        self.peek_at(0)
    }

    /// The word `ahead` words after the next one.
    pub(crate) fn peek_at(&self, ahead: usize) -> Option<&'l str> {
        self.line.tokens.get(self.at + ahead).map(|token| &*token.text)
    }

    /// Where the next word stands, or would stand.
    pub(crate) fn here(&self) -> Position {
        self.line.tokens.get(self.at).map_or(self.line.end, Token::position)
    }

    pub(crate) fn take(&mut self) -> Option<&'l Token<'a>> {
        let token = self.line.tokens.get(self.at)?;
        self.at += 1;
        Some(token)
    }

    /// Takes the next word if it is `word`.
    pub(crate) fn eat(&mut self, word: &str) -> bool {
        let here = self.peek() == Some(word);
        self.at += usize::from(here);
        here
    }

    /// Takes the next word, or says that `what` is missing.
    pub(crate) fn need(&mut self, what: &str) -> Parse<&'l Token<'a>> {
        let at = self.here();
        self.take().ok_or_else(|| Fault::new(at, format!("{what} is missing")))
    }

    /// Takes a number between `lo` and `hi` (decimal, or hexadecimal with 0x).
    pub(crate) fn number(&mut self, what: &str, lo: u32, hi: u32) -> Parse<u32> {
        let token = self.need(what)?;
        number(&token.text)
            .filter(|n| (lo..=hi).contains(n))
            .ok_or_else(|| bad_number(token.position(), &token.text, what, lo, hi))
    }

    /// Notes what is wrong and lets the caller go on.
    pub(crate) fn note(&mut self, fault: Fault) {
        if !self.full() {
            self.faults.push(fault);
        }
    }

    /// Enough is wrong with this command: the rest of it need not be read.
    pub(crate) fn full(&self) -> bool {
        self.faults.len() - self.before >= MAX_FAULTS
    }

    /// Nothing was wrong with this command so far.
    pub(crate) fn fine(&self) -> bool {
        self.faults.len() == self.before
    }

    /// The comment of the line.
    pub(crate) fn comment(&self) -> Option<&'l str> {
        self.line.comment.as_deref()
    }

    /// Complains about words that nothing has read.
    pub(crate) fn nothing_left(&mut self, after: &str) -> Parse<()> {
        match self.take() {
            None => Ok(()),
            Some(token) => {
                let message = format!("nothing may follow {after}, but {} does", quoted(&token.text));
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
    Fault::new(at, format!("{} is no {what}", quoted(text))).hint(format!("a number from {lo} to {hi}"))
}

/// The elements of a comma list with their offsets; commas inside brackets do not separate.
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
