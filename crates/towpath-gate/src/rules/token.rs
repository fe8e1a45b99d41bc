//! Tokenizer: text to words with positions.
//!
//! A line is split like ipfw's shell words. Blanks separate. A comma joins a word with the next. Braces and
//! parentheses are words, except in `table(...)` and in an address set `a/24{1,5-9}`. `#` ends the line. `//`
//! starts the comment of the rule. A backslash at the end continues on the next line. Quotes around a word
//! are removed, because ipfw(8) shows them for the shell: `'table(1)'`.

use std::borrow::Cow;

use super::diagnostic::Position;

/// One word.
#[derive(Clone, Debug)]
pub(crate) struct Token<'a> {
    pub(crate) text: Cow<'a, str>,
    at: Position,
    /// Positions of the parts of a joined word: (offset in `text`, position).
    joins: Vec<(usize, Position)>,
}

impl Token<'_> {
    pub(crate) fn position(&self) -> Position {
        self.at
    }

    /// Returns the position of the byte at `offset` of the text.
    pub(crate) fn position_at(&self, offset: usize) -> Position {
        let behind = self.joins.partition_point(|(start, _)| *start <= offset);
        let (start, at) = behind.checked_sub(1).map_or((0, self.at), |join| self.joins[join]);
        let columns = self.text.get(start..offset).map_or(0, |passed| passed.chars().count());
        Position { line: at.line, column: at.column + columns as u32 }
    }
}

/// One command: its words and its comment.
#[derive(Clone, Debug)]
pub(crate) struct Line<'a> {
    pub(crate) tokens: Vec<Token<'a>>,
    pub(crate) comment: Option<String>,
    /// Position after the last word, where a missing word is reported.
    pub(crate) end: Position,
    /// A preprocessor directive, including `#`. Here it is a comment.
    pub(crate) directive: Option<(&'a str, Position)>,
}

/// Directives of cpp(1). `#if` and `#else` are not included: comments may start like this, and each has an
/// `#endif`.
const DIRECTIVES: &[&str] = &["#include", "#define", "#undef", "#ifdef", "#ifndef", "#endif"];

/// Iterates over the lines of `text` that are not empty.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let mut physical = text.split('\n').zip(1u32..);
    std::iter::from_fn(move || {
        loop {
            let mut lexer = Lexer::default();
            let (first, number) = physical.next()?;
            let mut more = lexer.physical(first, number);
            while more {
                let Some((next, number)) = physical.next() else { break };
                more = lexer.physical(next, number);
            }
            let line = lexer.finish();
            if !line.tokens.is_empty() || line.comment.is_some() || line.directive.is_some() {
                return Some(line);
            }
        }
    })
}

#[derive(Default)]
struct Lexer<'a> {
    tokens: Vec<Token<'a>>,
    comment: Option<String>,
    end: Position,
    directive: Option<(&'a str, Position)>,
}

impl<'a> Lexer<'a> {
    /// Reads one line of the file. Returns true if it continues on the next one.
    fn physical(&mut self, text: &'a str, line: u32) -> bool {
        let text = text.strip_suffix('\r').unwrap_or(text);
        if text.starts_with('#') {
            let word = text.split_whitespace().next().filter(|word| DIRECTIVES.contains(word));
            self.directive = self.directive.or(word.map(|word| (word, Position { line, column: 1 })));
        }
        let text = text.split_once('#').map_or(text, |(before, _)| before);
        let trimmed = text.trim_end();
        let (text, more) = match trimmed.strip_suffix('\\') {
            Some(before) => (before, true),
            None => (trimmed, false),
        };
        if let Some(comment) = &mut self.comment {
            // Continues a comment.
            comment.push(' ');
            comment.push_str(text.trim());
            return more;
        }
        let mut column = 1;
        let mut rest = text;
        loop {
            let blank = rest.len() - rest.trim_start().len();
            column += rest[..blank].chars().count() as u32;
            rest = &rest[blank..];
            if rest.is_empty() {
                break;
            }
            let at = Position { line, column };
            if let Some(comment) = rest.strip_prefix("//") {
                self.comment = Some(comment.trim().to_owned());
                self.end = at;
                break;
            }
            let length = word_length(rest);
            let word = &rest[..length];
            match unquoted(word) {
                Some(inside) => self.push(inside, Position { line, column: column + 1 }),
                None => self.push(word, at),
            }
            column += word.chars().count() as u32;
            rest = &rest[length..];
            self.end = Position { line, column };
        }
        more
    }

    fn push(&mut self, text: &'a str, at: Position) {
        let joins = |last: &Token<'_>| last.text.ends_with(',') && !matches!(text, "{" | "}" | "or");
        match self.tokens.last_mut() {
            Some(last) if joins(last) => {
                last.joins.push((last.text.len(), at));
                last.text.to_mut().push_str(text);
            }
            _ => {
                let text = match text {
                    "(" => "{",
                    ")" => "}",
                    other => other,
                };
                self.tokens.push(Token { text: Cow::Borrowed(text), at, joins: Vec::new() });
            }
        }
    }

    fn finish(self) -> Line<'a> {
        Line { tokens: self.tokens, comment: self.comment, end: self.end, directive: self.directive }
    }
}

/// Returns the text inside the quotes of `word` if it is one word.
fn unquoted(word: &str) -> Option<&str> {
    let quote = word.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let inside = word.strip_prefix(quote)?.strip_suffix(quote)?;
    let is_word = !inside.is_empty() && !inside.starts_with(char::is_whitespace);
    (is_word && word_length(inside) == inside.len()).then_some(inside)
}

/// Maximum length of bracketed text inside a word; longer text is not a bracket expression.
const MAX_BRACKET: usize = 1024;

/// Returns the length in bytes of the first word of `rest`, which must not be empty or start with a blank.
fn word_length(rest: &str) -> usize {
    // A quoted word includes its blanks and quotes.
    if let Some(quote @ ('"' | '\'')) = rest.chars().next()
        && let Some(end) = rest[1..].find(quote)
    {
        return end + 2;
    }
    let mut closing = None;
    let mut opened = 0;
    for (at, c) in rest.char_indices() {
        if let Some(close) = closing {
            if c == close {
                closing = None;
            } else if at - opened > MAX_BRACKET {
                break;
            }
            continue;
        }
        opened = at;
        match c {
            '{' | '(' | '}' | ')' if at == 0 => return 1,
            '{' => closing = Some('}'),
            '(' => closing = Some(')'),
            '}' | ')' => return at,
            c if c.is_whitespace() => return at,
            _ => {}
        }
    }
    // An unclosed bracket: the word ends at the first blank.
    if closing.is_some() { rest.find(char::is_whitespace).unwrap_or(rest.len()) } else { rest.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<Vec<String>> {
        lines(text).map(|line| line.tokens.iter().map(|t| t.text.to_string()).collect()).collect()
    }

    #[test]
    fn words_are_split_like_shell_words() {
        let rows: &[(&str, &[&[&str]])] = &[
            ("add allow  tcp\n", &[&["add", "allow", "tcp"]]),
            ("a # b\n\n# c\nd", &[&["a"], &["d"]]),
            ("a \\\n b\r\nc", &[&["a", "b"], &["c"]]),
            ("{tcp or udp}", &[&["{", "tcp", "or", "udp", "}"]]),
            ("( tcp or udp )", &[&["{", "tcp", "or", "udp", "}"]]),
            ("80, 443,\t8080 x", &[&["80,443,8080", "x"]]),
            ("1.2.3.0/24{1, 5-9} x", &[&["1.2.3.0/24{1, 5-9}", "x"]]),
            ("table(t, 3) x", &[&["table(t, 3)", "x"]]),
            ("a{b c", &[&["a{b", "c"]]),
            ("a \"b c, d\" e", &[&["a", "\"b c, d\"", "e"]]),
            ("a 'b c, d' e", &[&["a", "'b c, d'", "e"]]),
            ("recv 'table(10)' via \"em0\" x", &[&["recv", "table(10)", "via", "em0", "x"]]),
            ("'table(t, 3)' ''", &[&["table(t, 3)", "''"]]),
            (r"'{' tcp '}'", &[&["{", "tcp", "}"]]),
            ("em'0' 'a", &[&["em'0'", "'a"]]),
        ];
        for (text, expected) in rows {
            assert_eq!(&words(text), expected, "{text:?}");
        }
    }

    #[test]
    fn comments_stay_with_their_line() {
        let all: Vec<_> = lines("a // b c # d\n// e").map(|l| (l.tokens.len(), l.comment)).collect();
        assert_eq!(all, [(1, Some("b c".into())), (0, Some("e".into()))]);
    }

    #[test]
    fn positions_survive_joins() {
        let line = lines("é  80, 443x").next().unwrap();
        assert_eq!(line.tokens[1].position(), Position { line: 1, column: 4 });
        assert_eq!(line.tokens[1].position_at(3), Position { line: 1, column: 8 });
        assert_eq!(line.tokens[1].position_at(6), Position { line: 1, column: 11 });
        assert_eq!(line.end, Position { line: 1, column: 12 });
        let quoted = lines("a 'bc'").next().unwrap();
        assert_eq!(quoted.tokens[1].position_at(1), Position { line: 1, column: 5 });
    }
}
