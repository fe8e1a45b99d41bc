//! One file per command. A command takes its arguments and returns an exit code; errors go to standard error.

pub(crate) mod against;
pub(crate) mod bpf;
#[cfg(feature = "fleet")]
pub(crate) mod bus;
pub(crate) mod captured;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod ctl;
#[cfg(feature = "demo")]
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod ending;
pub(crate) mod explain;
pub(crate) mod frame;
pub(crate) mod inspect;
pub(crate) mod log;
pub(crate) mod mux;
pub(crate) mod nfq;
pub(crate) mod offline_gate;
pub(crate) mod pages;
pub(crate) mod recv;
pub(crate) mod replay;
pub(crate) mod run;
pub(crate) mod send;
pub(crate) mod top;
pub(crate) mod transfer;
pub(crate) mod wiring;
#[cfg(feature = "fleet")]
pub(crate) mod worker;

use std::fmt::Display;
use std::io::{ErrorKind, Write};

pub(crate) use towpath::output::{say, warn};

use crate::args::exit;

/// Prints an error in the common format. Returns `code`.
pub(crate) fn fail(code: u8, error: impl Display) -> u8 {
    towpath::output::fail(error);
    code
}

/// Prints a command's output. Returns `code`, or another exit code if the output cannot be written. A closed pipe (`| head`) is not an
/// error.
pub(crate) fn answer(code: u8, text: &str) -> u8 {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            fail(exit::FAILED, format_args!("standard output: {error}"))
        }
        _ => code,
    }
}
