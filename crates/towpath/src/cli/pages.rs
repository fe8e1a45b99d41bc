//! `towpath completions` and `towpath man`, both generated from the command line's grammar.

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

/// The grammar without hidden commands; clap_complete would offer them.
fn shown() -> clap::Command {
    let whole = Cli::command();
    let commands: Vec<_> =
        whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
    // clap cannot remove a subcommand, so a new command is built from the visible ones.
    let program = clap::Command::new("towpath").version(env!("CARGO_PKG_VERSION"));
    program.subcommand_required(true).subcommands(commands)
}

/// Writes the man pages of the program and of each command.
pub(crate) fn man(directory: &Path) -> u8 {
    let written = std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), directory));
    match written {
        Ok(()) => exit::OK,
        Err(error) => fail(exit::FAILED, format_args!("{}: {error}", directory.display())),
    }
}
