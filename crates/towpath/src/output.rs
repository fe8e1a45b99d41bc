//! Lines on standard error.

use std::fmt::Display;

use crate::logging::{Class, submit};

/// Prints a line on standard error. After [`logging::start`](crate::logging::start), the call does not wait for the reader.
pub fn say(line: impl Display) {
    submit(line.to_string(), Class::Event);
}

/// Prints a warning; the run continues.
pub fn warn(warning: impl Display) {
    say(format_args!("towpath: warning: {warning}"));
}
