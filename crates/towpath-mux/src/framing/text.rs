//! Parser for the declarative form in a line: `offset=0 length=4 be adjust=4 max=16M`.
//!
//! Blanks separate words. Values with blanks or brackets are quoted. `when PATTERN ( ... )`, `else ( ... )`
//! and `start ( ... )` contain clauses.

use super::clause::{Clause, Scalar};
use super::error::{Fault, ParseError};

/// Maximum nesting of groups. Bounds the stack.
const DEPTH: usize = 8;

pub(super) fn clauses(text: &str) -> Result<Vec<Clause>, ParseError> {
    let mut lexer = Lexer { text, at: 0 };
    group(&mut lexer, 0).map_err(|fault| fault.in_line(text))
}

fn group(lexer: &mut Lexer<'_>, depth: usize) -> Result<Vec<Clause>, Fault> {
    let mut clauses = Vec::new();
    loop {
        lexer.skip_blanks();
        match lexer.peek() {
            None if depth == 0 => return Ok(clauses),
            None => return Err(Fault::new(lexer.at, "missing \")\"")),
            Some(')') if depth > 0 => {
                lexer.at += 1;
                return Ok(clauses);
            }
            Some(_) => clauses.push(clause(lexer, depth)?),
        }
    }
}

fn clause(lexer: &mut Lexer<'_>, depth: usize) -> Result<Clause, Fault> {
    let at = lexer.at;
    let key = lexer.word();
    if key.is_empty() {
        let found = lexer.peek().unwrap_or(' ');
        return Err(Fault::new(at, format!("expected a key such as length=4, found {found:?}")));
    }
    let mut clause = Clause { key: key.to_owned(), at, value: None, pattern: None, group: None };
    if lexer.peek() == Some('=') {
        lexer.at += 1;
        clause.value = Some(lexer.scalar()?);
        return Ok(clause);
    }
    match key {
        "when" => clause.pattern = Some(lexer.until_bracket()?),
        "else" | "start" => {}
        _ => return Ok(clause),
    }
    lexer.skip_blanks();
    if lexer.peek() != Some('(') {
        return Err(Fault::new(lexer.at, format!("{key} needs clauses in brackets: {key} ... (length=4)")));
    }
    if depth == DEPTH {
        return Err(Fault::new(lexer.at, format!("brackets are nested more than {DEPTH} deep")));
    }
    lexer.at += 1;
    clause.group = Some(group(lexer, depth + 1)?);
    Ok(clause)
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    /// Reads up to a blank, a bracket, a quote or `=`.
    fn word(&mut self) -> &'a str {
        self.take(|c| c.is_whitespace() || matches!(c, '(' | ')' | '=' | '"' | '\''))
    }

    fn take(&mut self, ends: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(ends).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    fn scalar(&mut self) -> Result<Scalar, Fault> {
        if let Some(quote @ ('"' | '\'')) = self.peek() {
            return self.quoted(quote);
        }
        let at = self.at;
        let text = self.take(|c| c.is_whitespace() || matches!(c, '(' | ')'));
        if text.is_empty() {
            return Err(Fault::new(at, "missing value after \"=\""));
        }
        Ok(Scalar { text: text.to_owned(), at })
    }

    fn quoted(&mut self, quote: char) -> Result<Scalar, Fault> {
        let open = self.at;
        self.at += 1;
        let at = self.at;
        let mut escaped = false;
        for (offset, c) in self.rest().char_indices() {
            if c == quote && !escaped {
                let raw = &self.rest()[..offset];
                self.at += offset + 1;
                return Ok(Scalar { text: unescape(raw, at)?, at });
            }
            escaped = c == '\\' && !escaped;
        }
        Err(Fault::new(open, format!("missing closing {quote}")))
    }

    /// A pattern verbatim, with quotes and escapes, up to the bracket.
    fn until_bracket(&mut self) -> Result<Scalar, Fault> {
        self.skip_blanks();
        let at = self.at;
        let mut quote = None;
        let mut escaped = false;
        for (offset, c) in self.rest().char_indices() {
            match quote {
                Some(open) => {
                    if c == open && !escaped {
                        quote = None;
                    }
                    escaped = c == '\\' && !escaped;
                }
                None if c == '(' => {
                    let text = self.rest()[..offset].trim_end().to_owned();
                    self.at += offset;
                    return Ok(Scalar { text, at });
                }
                None if c == '"' || c == '\'' => quote = Some(c),
                None => {}
            }
        }
        Err(Fault::new(at, "when needs a pattern and clauses in brackets: when 16 03 (length=2 offset=3)"))
    }
}

/// Resolves `\r \n \t \0 \\ \" \' \xNN`. Bytes above 7f need `0x...`, because text is UTF-8.
pub(super) fn unescape(raw: &str, at: usize) -> Result<String, Fault> {
    let mut text = String::with_capacity(raw.len());
    let mut chars = raw.char_indices();
    while let Some((offset, c)) = chars.next() {
        if c != '\\' {
            text.push(c);
            continue;
        }
        let fault =
            |what: &str| Fault::new(at + offset, format!("{what}; write \\r \\n \\t \\0 \\\\ \\\" \\xNN"));
        match chars.next().map(|(_, c)| c) {
            Some('r') => text.push('\r'),
            Some('n') => text.push('\n'),
            Some('t') => text.push('\t'),
            Some('0') => text.push('\0'),
            Some(c @ ('\\' | '"' | '\'')) => text.push(c),
            Some('x') => {
                let digits = raw.get(offset + 2..offset + 4).unwrap_or("");
                let byte = u8::from_str_radix(digits, 16).map_err(|_| fault("\\x without two hex digits"))?;
                if byte > 0x7f {
                    return Err(Fault::new(
                        at + offset,
                        "write bytes above 7f in hex, such as 0xfe, without quotes",
                    ));
                }
                text.push(char::from(byte));
                chars.nth(1);
            }
            _ => return Err(fault("unknown escape")),
        }
    }
    Ok(text)
}
