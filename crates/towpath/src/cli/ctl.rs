//! `towpath ctl`: shows and changes a running engine through its control socket. The subcommands are in `control/commands/`.

use std::path::PathBuf;

use clap::builder::ValueHint;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, value_parser};
use towpath::control::client::{Engine, Failure};
use towpath::control::commands;

use crate::args::exit;
use crate::cli::{answer, fail};

/// The arguments of `towpath ctl`, generated from the table of subcommands.
#[derive(Debug)]
pub(crate) struct Ctl {
    socket: PathBuf,
    matches: ArgMatches,
}

impl FromArgMatches for Ctl {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let socket = matches.get_one::<PathBuf>("socket").cloned().unwrap_or_default();
        Ok(Self { socket, matches: matches.clone() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for Ctl {
    fn augment_args(command: Command) -> Command {
        let socket = Arg::new("socket")
            .long("socket")
            .value_name("PATH")
            .env("TOWPATH_CONTROL")
            .default_value("/run/towpath/control.sock")
            .global(true)
            .value_hint(ValueHint::FilePath)
            .value_parser(value_parser!(PathBuf))
            .help("The engine's control socket");
        commands::grammar(command.arg(socket))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

pub(crate) fn run(args: &Ctl) -> u8 {
    match commands::run(&Engine::at(args.socket.clone()), &args.matches) {
        Ok(text) => answer(exit::OK, &text),
        Err(Failure { code, message }) => fail(code, message),
    }
}
