//! `towpath ctl clean`

use std::fmt::Write;

use clap::{ArgMatches, Args, FromArgMatches};

use super::super::client::{Engine, Failure};
use super::super::command::Command;
use crate::exit;
use crate::leftovers::{self, Leftover};

/// List what a killed engine has left, or remove it
///
/// Directories with sockets of inspectors and workers, the file of the control socket, and the programs of ports that no engine has
/// (with fail = "closed"; before Linux 6.6 of all exclusive ports). Removing the program of a closed port opens its interface. No
/// engine is needed. Run it as the user that started the engine, in its network namespace.
#[derive(Debug, Args)]
pub(super) struct Clean {
    /// Remove what is listed
    #[arg(long)]
    remove: bool,
}

pub(super) const COMMAND: Command = Command::other::<Clean>("clean", &[], clean);

fn clean(engine: &Engine, matches: &ArgMatches) -> Result<String, Failure> {
    let Clean { remove } = Clean::from_arg_matches(matches).expect("the grammar is that of the arguments");
    let found = leftovers::find(Some(engine.socket()));
    if !remove {
        return Ok(found.iter().map(|leftover| format!("{leftover}\n")).collect());
    }
    let mut text = String::new();
    let mut failed = String::new();
    for leftover in &found {
        match Leftover::remove(leftover) {
            Ok(true) => writeln!(text, "{leftover}: removed").expect("a string"),
            // Another command or engine was faster.
            Ok(false) => {}
            Err(error) => write!(failed, "{}: {error}; ", leftover.name()).expect("a string"),
        }
    }
    match failed.is_empty() {
        true => Ok(text),
        false => Err(Failure {
            code: exit::FAILED,
            message: format!("not removed: {}", failed.trim_end_matches("; ")),
        }),
    }
}
