//! One file per command. Each takes its arguments and returns an exit code; errors go to standard error.

pub(crate) mod bpf;
pub(crate) mod captured;
pub(crate) mod check;
pub(crate) mod ctl;
#[cfg(feature = "demo")]
pub(crate) mod demo;
pub(crate) mod ending;
pub(crate) mod explain;
pub(crate) mod frame;
pub(crate) mod inspect;
pub(crate) mod log;
pub(crate) mod mux;
pub(crate) mod pages;
pub(crate) mod recv;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod send;
pub(crate) mod transfer;
pub(crate) mod wiring;

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use crate::args::exit;

/// Prints an error as every command does, and gives back the code to exit with.
pub(crate) fn fail(code: u8, error: impl Display) -> u8 {
    say(format_args!("towpath: {error}"));
    code
}

/// Prints a line on standard error. Who read it may have gone (`2>&1 | tee`): that ends nobody, least of all a daemon.
pub(crate) fn say(line: impl Display) {
    // In one piece: others may be writing to the same terminal.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints a command's answer, and gives back the code to exit with: `code`, unless it could not be printed. Somebody who
/// reads no further (`| head`) has read enough.
pub(crate) fn answer(code: u8, text: &str) -> u8 {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(exit::FAILED, format_args!("standard output: {error}"))
        }
        _ => code,
    }
}

/// Prints something the user should know although the run goes on.
pub(crate) fn warn(warning: impl Display) {
    say(format_args!("towpath: warning: {warning}"));
}
