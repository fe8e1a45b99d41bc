//! `towpath demo`: runs the demo of the crate `towpath-demo`; maps its results to exit codes and output.

use towpath_demo::{Args, Outcome, Part};

use crate::args::exit;
use crate::cli::{answer, fail};

pub(crate) fn run(args: &Args) -> u8 {
    match args.run() {
        Outcome::Passed(text) => answer(exit::OK, &text),
        Outcome::Unprivileged(text) => answer(exit::NO_PORT, &text),
        Outcome::Unmet(text) => answer(exit::FAILED, &text),
        Outcome::Failed(error) => fail(exit::FAILED, error),
    }
}

pub(crate) fn part(part: &Part) -> u8 {
    match part.run() {
        Ok(()) => exit::OK,
        Err(error) => fail(exit::FAILED, error),
    }
}
