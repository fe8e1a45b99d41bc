//! Lines on standard error.

use std::fmt::Display;
use std::io::Write;

/// Prints a line on standard error. A closed pipe is ignored (`2>&1 | tee`): it must not end a daemon.
pub fn say(line: impl Display) {
    // One write: other processes may use the same terminal.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints a warning; the run continues.
pub fn warn(warning: impl Display) {
    say(format_args!("towpath: warning: {warning}"));
}
