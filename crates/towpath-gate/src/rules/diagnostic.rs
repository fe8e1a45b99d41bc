//! Diagnostics of rule files: errors and warnings with their positions.

use std::fmt;
use std::sync::Arc;

/// A position in a rule file. Both numbers start at 1; columns count characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Line.
    pub line: u32,
    /// Column.
    pub column: u32,
}

/// An error or a warning about a rule file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Diagnostic {
    /// File name, as passed to the parser.
    pub file: Arc<str>,
    /// Line, from 1.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
    /// The column after the word; equal to [`Diagnostic::column`] if something is missing.
    pub end: u32,
    /// The problem.
    pub message: String,
    /// The remedy.
    pub hint: Option<String>,
    /// A warning that a `delete` without `-q` found no rule. In a running engine it is an error.
    pub no_such_rule: bool,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Diagnostic {}

/// A diagnostic without its file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) at: Position,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    /// As in [`Diagnostic`].
    pub(crate) no_such_rule: bool,
}

impl Fault {
    pub(crate) fn new(at: Position, message: impl Into<String>) -> Self {
        Self { at, message: message.into(), hint: None, no_such_rule: false }
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds `did you mean "x"?` if one of `words` is close to `written`.
    pub(crate) fn did_you_mean<'w>(
        mut self,
        written: &str,
        words: impl IntoIterator<Item = &'w str>,
    ) -> Self {
        if self.hint.is_none()
            && let Some(word) = nearest(written, words)
        {
            self.hint = Some(format!("did you mean \"{word}\"?"));
        }
        self
    }

    pub(crate) fn in_file(self, file: &Arc<str>) -> Diagnostic {
        Diagnostic {
            file: file.clone(),
            line: self.at.line,
            column: self.at.column,
            end: self.at.column,
            message: self.message,
            hint: self.hint,
            no_such_rule: self.no_such_rule,
        }
    }
}

/// Returns the word of `words` that is closest to `written`, if any is close enough.
pub(crate) fn nearest<'w>(written: &str, words: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    // A much longer word is not a typing error, and the distance costs the product of both lengths.
    if written.len() > 40 {
        return None;
    }
    let written = written.to_ascii_lowercase();
    let far = written.chars().count().div_ceil(3).min(4);
    let mut best: Option<(usize, &str)> = None;
    for word in words {
        let distance = match word.to_ascii_lowercase() {
            // An abbreviation: "estab" for "established".
            word if written.len() >= 3 && word.starts_with(&written) => far,
            word => strsim::damerau_levenshtein(&written, &word),
        };
        if distance <= far && distance < word.len() && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, word));
        }
    }
    best.map(|(_, word)| word)
}

/// Quotes text of the file for a message: escaped, and truncated if long.
pub(crate) fn quoted(text: &str) -> String {
    const SHOWN: usize = 40;
    let escaped = |c: char| if c == '\'' { c.to_string() } else { c.escape_debug().to_string() };
    let mut shown: String = text.chars().take(SHOWN).map(escaped).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    format!("\"{shown}\"")
}
