//! The command line of Towpath: arguments in, an exit code out. What each command does is in `command/`.
#![forbid(unsafe_code)]

mod args;
mod command;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command, exit};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, not errors: clap prints them to standard output.
            let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
            let _ = error.print();
            return code.into();
        }
    };
    command::log::start();
    let code = match cli.command {
        Command::Run(args) => command::run::run(&args),
        Command::Replay(args) => command::replay::run(&args),
        Command::Ctl(args) => command::ctl::run(&args),
        Command::Check(args) => command::check::run(&args),
        Command::Explain(args) => command::explain::run(&args),
        Command::Inspect(args) => command::inspect::run(&args),
        Command::Bpf(args) => command::bpf::run(&args),
        Command::Frame(args) => command::frame::run(&args),
        Command::Mux(args) => command::mux::run(&args),
        Command::Send(args) => command::send::run(&args),
        Command::Recv(args) => command::recv::run(&args),
        #[cfg(feature = "demo")]
        Command::Demo(args) => command::demo::run(&args),
        #[cfg(feature = "demo")]
        Command::DemoPart(part) => command::demo::part(&part),
        Command::Completions { shell } => command::pages::completions(shell),
        Command::Man { directory } => command::pages::man(&directory),
    };
    code.into()
}
