//! One file per command. Each takes its arguments and returns an exit code; errors go to standard error.

pub(crate) mod check;
#[allow(dead_code)] // Until the grammar has it.
pub(crate) mod frame;
pub(crate) mod inspect;
pub(crate) mod pages;
pub(crate) mod replay;

use std::fmt::Display;

/// Prints an error as every command does, and gives back the code to exit with.
pub(crate) fn fail(code: u8, error: impl Display) -> u8 {
    eprintln!("towpath: {error}");
    code
}

/// Prints something the user should know although the run goes on.
pub(crate) fn warn(warning: impl Display) {
    eprintln!("towpath: warning: {warning}");
}
