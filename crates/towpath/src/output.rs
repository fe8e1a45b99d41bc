//! Lines on standard error.

use std::fmt::{Display, Write};

use unicode_width::UnicodeWidthChar;

use tracing::Level;

use crate::logging::{Class, Head, Line, submit_line};

/// Prints a message. After [`logging::start`](crate::logging::start), the call does not wait for the reader.
pub fn say(line: impl Display) {
    put(Level::INFO, Head::None, &line);
}

/// Prints a warning; the run continues.
pub fn warn(warning: impl Display) {
    put(Level::WARN, Head::Level, &warning);
}

/// Prints the reason why the program fails.
pub fn fail(error: impl Display) {
    put(Level::ERROR, Head::Program, &error);
}

/// Prints an error at a position of a file, which it begins with.
pub fn wrong(error: impl Display) {
    put(Level::ERROR, Head::None, &error);
}

fn put(level: Level, head: Head, message: &dyn Display) {
    submit_line(Line::new(level, head, message.to_string()), Class::Event);
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
