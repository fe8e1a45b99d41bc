//! The `towpath` program: parses the arguments, runs the command and returns its exit code. The commands are in `cli/`.
#![forbid(unsafe_code)]

mod args;
mod cli;

use std::process::ExitCode;

use clap::Parser;
use towpath::service_manager::Sockets;

use args::{Cli, Command, exit};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap prints help and version to standard output; both exit with 0.
            let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
            let _ = error.print();
            return code.into();
        }
    };
    if matches!(cli.command, Command::Confine) {
        // Before any thread starts: it changes the user of this process and executes another program.
        return towpath::process::confine().into();
    }
    // Before the first descriptor is opened.
    let passed = Sockets::of_this_process();
    cli::log::start();
    let code = match cli.command {
        Command::Run(args) => cli::run::run(&args, passed),
        Command::Replay(args) => cli::replay::run(&args),
        Command::Ctl(args) => cli::ctl::run(&args),
        Command::Top(args) => cli::top::run(&args),
        Command::Config(args) => cli::config::run(&args),
        Command::Doctor(args) => cli::doctor::run(&args),
        Command::Check(args) => cli::check::run(&args),
        Command::Explain(args) => cli::explain::run(&args),
        Command::Inspect(args) => cli::inspect::run(&args),
        Command::Bpf(args) => cli::bpf::run(&args),
        Command::Frame(args) => cli::frame::run(&args),
        Command::Mux(args) => cli::mux::run(&args, passed),
        #[cfg(feature = "fleet")]
        Command::Worker(args) => cli::worker::run(&args),
        Command::Nfq(args) => cli::nfq::run(&args),
        Command::Send(args) => cli::send::run(&args),
        Command::Recv(args) => cli::recv::run(&args),
        #[cfg(feature = "demo")]
        Command::Demo(args) => cli::demo::run(&args),
        #[cfg(feature = "demo")]
        Command::DemoPart(part) => cli::demo::part(&part),
        Command::Launcher { log, config } => {
            log.apply(None);
            towpath::daemon::launcher::serve(&config)
        }
        Command::Confine => exit::USAGE,
        Command::Completions { shell } => cli::pages::completions(shell),
        Command::Man { directory } => cli::pages::man(&directory),
    };
    towpath::logging::finish();
    code.into()
}
