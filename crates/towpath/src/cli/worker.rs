//! `towpath worker`: worker processes for multiplexors on other machines.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use clap::Parser;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use towpath::process::{Local, Program, Starter};
use towpath::remote_workers::{self, HostConfig};
use towpath_fleet::workers::HostSettings;

use crate::args::exit;
use crate::cli::bus::{BusArgs, SUBJECT, subject};
use crate::cli::log::LogOptions;
use crate::cli::{fail, say};

/// Serve multiplexors on other machines with worker processes
///
/// Each `towpath mux --remote SUBJECT` that the host finds at SUBJECT gets --workers processes of PROGRAM. They are the same programs as for
/// `towpath mux --worker`: each one gets a socket in TOWPATH_SOCKET, and messages on it. The messages and the answers go over NATS.
///
/// SIGTERM and SIGINT drain: the host takes no further messages and ends when its messages are answered, or after --drain seconds.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath worker --subject jobs --exec target/debug/examples/worker --nats nats://bus.example:4222
  towpath mux 127.0.0.1:7007 --framing line --remote jobs --nats nats://bus.example:4222")]
pub(crate) struct Worker {
    /// The subject of the multiplexors (`towpath mux --remote SUBJECT`)
    #[arg(long, value_name = "SUBJECT", group = SUBJECT, value_parser = subject)]
    subject: String,

    /// The worker's command; split into words as by a shell, and runs without a shell
    #[arg(long, value_name = "PROGRAM")]
    exec: String,

    /// Number of worker processes for each multiplexor (1-64); default: the number of processors
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: Option<u16>,

    /// Number of messages that a worker process may have at a time (1-256)
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(1..=256))]
    credit: u16,

    /// Maximum number of multiplexors served at a time (1-64)
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u8).range(1..=64))]
    fronts: u8,

    /// Time for messages to be answered when the host ends, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    drain: u32,

    #[command(flatten)]
    bus: BusArgs,

    #[command(flatten)]
    log: LogOptions,
}

pub(crate) fn run(args: &Worker) -> u8 {
    if let Err(message) = args.log.apply() {
        return fail(exit::USAGE, message);
    }
    let words = match shell_words::split(&args.exec) {
        Ok(words) if !words.is_empty() => words,
        Ok(_) => return fail(exit::USAGE, "--exec has no command"),
        Err(error) => return fail(exit::USAGE, format_args!("--exec {}: {error}", args.exec)),
    };
    towpath::logging::start_or_warn();
    super::run::open_files();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let settings = HostSettings {
        workers: args.workers.unwrap_or_else(|| processors.min(64) as u16),
        credit: args.credit,
        fronts: usize::from(args.fronts),
    };
    let config = HostConfig {
        bus: args.bus.settings(&args.subject),
        settings,
        program: Program::new(&words),
        // The user of this command runs its workers: with the same environment, without privileges.
        starter: Starter::Local(Local::interactive()),
        drain: Duration::from_secs(args.drain.into()),
    };
    match serve(config) {
        Ok(true) => exit::OK,
        Ok(false) => fail(exit::FAILED, "ended before everything was drained"),
        Err(error) => fail(exit::FAILED, error),
    }
}

fn serve(config: HostConfig) -> io::Result<bool> {
    let (mut read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in [SIGTERM, SIGINT] {
        pipe::register(signal, write.try_clone()?)?;
    }
    let watched = read.try_clone()?;
    let outcome = remote_workers::serve(config, watched, move || matches!(read.read(&mut [0]), Ok(1)))?;
    let stats = outcome.stats;
    let refused = stats.malformed + stats.version + stats.unknown + stats.too_many;
    say(format_args!(
        "{} sessions; {} ended in silence, {} broken; {refused} messages refused; {} overflows",
        stats.sessions, stats.silent, stats.broken, stats.overflows
    ));
    Ok(outcome.drained)
}
