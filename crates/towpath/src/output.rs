//! Lines on standard error.

use std::fmt::{Display, Write};

use unicode_width::UnicodeWidthChar;

use crate::logging::{Class, submit};

/// Prints a line on standard error. After [`logging::start`](crate::logging::start), the call does not wait for the reader.
pub fn say(line: impl Display) {
    submit(line.to_string(), Class::Event);
}

/// Prints a warning; the run continues.
pub fn warn(warning: impl Display) {
    say(format_args!("towpath: warning: {warning}"));
}

/// The text with an escape (`\u{1b}`) for each character that does not occupy exactly one column, such as control and
/// format characters. The width of the result is its number of characters.
pub(crate) fn printable(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for c in text.chars() {
        let shown = c == ' ' || c.is_ascii_graphic() || c.width() == Some(1) && c.is_alphanumeric();
        match shown {
            true => cleaned.push(c),
            false => write!(cleaned, "{}", c.escape_unicode()).expect("writing to a String does not fail"),
        }
    }
    cleaned
}
