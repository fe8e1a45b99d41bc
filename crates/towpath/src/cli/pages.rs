//! `towpath completions` and `towpath man`: both made from the grammar, so they cannot be out of date.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::{Cli, exit};
use crate::cli::{answer, fail};

/// Prints the completion script of `shell`.
pub(crate) fn completions(shell: Shell) -> u8 {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(), "towpath", &mut script);
    answer(exit::OK, &String::from_utf8_lossy(&script))
}

/// The grammar without what is hidden, which completions would offer all the same.
fn shown() -> clap::Command {
    let whole = Cli::command();
    let commands: Vec<_> =
        whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    // There is no way to take one out: the program anew, with all others.
    let program = clap::Command::new("towpath").version(env!("CARGO_PKG_VERSION"));
    program.subcommand_required(true).subcommands(commands)
}

/// Writes a man page for the program and for each command.
pub(crate) fn man(directory: &Path) -> u8 {
    let written = std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), directory));
    match written {
        Ok(()) => exit::OK,
        Err(error) => fail(exit::FAILED, format_args!("{}: {error}", directory.display())),
    }
}
