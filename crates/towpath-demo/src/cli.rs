//! The options of `towpath demo`, and the processes that it starts.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ValueHint;
use clap::{Parser, Subcommand};

use super::fleet::Fleet;
use super::{Driver, Options, files, play, process};

/// Run all parts of Towpath on this machine: gate, rings, mux and zero copy, in network namespaces
///
/// Two hosts with the engine between them, and the kernel's TCP and UDP at both ends: clients, an attack (port scan, SYN flood,
/// a source over its limit), an inspector process, a message server that loses a worker, a file sent without a copy; then the
/// same traffic through the kernel's forwarding. The last page lists what passed, what was dropped by which rule, and the cost.
///
/// The demo runs as root, and as another user where the kernel permits user namespaces. It does not change the machine's
/// network and removes everything it makes. Without namespaces it plays the scenes that need no privilege. Exit code: 0 if
/// every expectation was met, 7 if only the scenes without privilege were played, 1 otherwise.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Example:
  towpath demo
  towpath demo --seconds 10 --json
  towpath demo --record demo.cast; asciinema play demo.cast")]
pub struct Args {
    #[command(subcommand)]
    scene: Option<Scene>,

    /// Approximate duration in seconds, 5 to 600
    #[arg(long, value_name = "N", default_value = "20", value_parser = seconds)]
    seconds: Duration,

    /// Port driver (default: AF_XDP when root, otherwise AF_PACKET)
    #[arg(long, value_name = "DRIVER")]
    driver: Option<Driver>,

    /// Print progress as lines; the default without a terminal
    #[arg(long)]
    plain: bool,

    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,

    /// Record the screen to FILE in asciicast format
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    record: Option<PathBuf>,

    /// Write the last screen to FILE as SVG
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    still: Option<PathBuf>,
}

/// Another demo.
#[derive(Debug, Subcommand)]
enum Scene {
    Fleet(Fleet),
}

/// A process that the demo starts from its own executable.
#[derive(Debug, Subcommand)]
pub enum Part {
    /// Run a command of this program that ends with the demo
    Exec {
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Run another program that ends with the demo
    Program {
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Run a worker of the message server
    Worker,
    /// Run an inspector on the kernel's NFQUEUE
    Queue {
        /// The queue's number
        number: u16,
    },
    /// Remove the demo's files when it has ended
    Sweep {
        /// The directory of the files
        directory: PathBuf,
    },
}

/// How a demo ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The text for standard output: every expectation was met.
    Passed(String),
    /// The text for standard output: every expectation of the scenes that need no privilege was met; the others were not played.
    Unprivileged(String),
    /// The text for standard output: an expectation was not met.
    Unmet(String),
    /// The demo could not be played; the text is for standard error.
    Failed(String),
}

impl Args {
    /// Plays the demo.
    ///
    /// Must be called while the process has one thread: the demo may enter a user namespace.
    pub fn run(&self) -> Outcome {
        if let Some(Scene::Fleet(fleet)) = &self.scene {
            return match fleet.play() {
                Ok((text, true)) => Outcome::Passed(text),
                Ok((text, false)) => Outcome::Unmet(text),
                Err(failure) => Outcome::Failed(failure.to_string()),
            };
        }
        let options = Options {
            length: self.seconds,
            driver: self.driver,
            plain: self.plain,
            record: self.record.clone(),
            still: self.still.clone(),
        };
        let results = match play(&options) {
            Ok(results) => results,
            Err(failure) => return Outcome::Failed(failure.to_string()),
        };
        let text = match self.json {
            true => serde_json::to_string(&results).expect("strings and numbers serialise") + "\n",
            false => results.to_string(),
        };
        match (results.ok, results.alone) {
            (false, _) => Outcome::Unmet(text),
            (true, true) => Outcome::Unprivileged(text),
            (true, false) => Outcome::Passed(text),
        }
    }
}

impl Part {
    /// Runs the process to its end. `Exec` returns only if the command cannot be executed.
    ///
    /// # Errors
    ///
    /// The message for standard error.
    pub fn run(&self) -> Result<(), String> {
        match self {
            Self::Exec { words } => Err(process::exec(words).to_string()),
            Self::Program { words } => Err(process::exec_program(words).to_string()),
            Self::Worker => process::worker(),
            Self::Queue { number } => process::queue(*number),
            Self::Sweep { directory } => files::sweep(directory),
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(5.0..=600.0).contains(&seconds) {
        return Err("between 5 and 600 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}
