//! `towpath demo`: everything at work on one machine.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ValueHint;
use clap::{Parser, Subcommand};

use crate::args::exit;
use crate::command::{answer, fail};
use crate::demo::{self, Driver, Options};

/// See everything at work on this machine: gate, rings, mux and zero copy, in namespaces of its own
///
/// Two hosts and the engine between them, with the kernel's own TCP and UDP at both ends: people at work, an attack (port scan, SYN
/// flood, a source over its limit), an inspector process, a message service of which a worker is killed, a file without a
/// copy; then the same traffic through the kernel's own forwarding. At the end, a page of what passed, what was stopped and by
/// which rule, and what it cost.
///
/// Works as root, and without where the kernel lets users have namespaces. It touches nothing of the machine's network, and leaves
/// nothing behind. Elsewhere it shows what needs no privilege. Exit code 0 only if everything happened that should; 7 if that was not all.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath demo
  towpath demo --seconds 10 --json
  towpath demo --record demo.cast; asciinema play demo.cast")]
pub(crate) struct Demo {
    /// How long it takes, about
    #[arg(long, value_name = "N", default_value = "20", value_parser = seconds)]
    seconds: Duration,

    /// What the engine has its interfaces by; without it XDP sockets as root, and packet sockets where these cannot be had
    #[arg(long, value_name = "DRIVER")]
    driver: Option<Driver>,

    /// Print lines as it goes, no picture (as without a terminal)
    #[arg(long)]
    plain: bool,

    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,

    /// Write a recording of the screen, for asciinema
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    record: Option<PathBuf>,

    /// Write a picture of the last screen (SVG)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    still: Option<PathBuf>,
}

/// The processes of a demo, started by itself.
#[derive(Debug, Subcommand)]
pub(crate) enum DemoPart {
    /// A command of this program, which ends when the demo does
    Exec {
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// A worker of the message service
    Worker,
    /// An inspector on the kernel's NFQUEUE
    Queue { number: u16 },
    /// Removes the demo's files when it has ended
    Sweep { directory: PathBuf },
}

pub(crate) fn run(args: &Demo) -> u8 {
    let options = Options {
        length: args.seconds,
        driver: args.driver,
        plain: args.plain,
        record: args.record.clone(),
        still: args.still.clone(),
    };
    let results = match demo::play(&options) {
        Ok(results) => results,
        Err(failure) => return fail(exit::FAILED, failure),
    };
    let code = match (results.ok, results.alone) {
        (false, _) => exit::FAILED,
        (true, true) => exit::NO_PORT,
        (true, false) => exit::OK,
    };
    if args.json {
        return answer(
            code,
            &(serde_json::to_string(&results).expect("strings and numbers serialise") + "\n"),
        );
    }
    answer(code, &results.to_string())
}

pub(crate) fn part(part: &DemoPart) -> u8 {
    let done = match part {
        DemoPart::Exec { words } => Err(demo::exec(words).to_string()),
        DemoPart::Worker => demo::worker(),
        DemoPart::Queue { number } => demo::queue(*number),
        DemoPart::Sweep { directory } => demo::sweep(directory),
    };
    match done {
        Ok(()) => exit::OK,
        Err(error) => fail(exit::FAILED, error),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(5.0..=600.0).contains(&seconds) {
        return Err("between 5 and 600 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}
