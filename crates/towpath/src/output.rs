//! Lines on standard error.

use std::fmt::Display;

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
