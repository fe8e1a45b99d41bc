//! The log of the program: its levels by default, and the options of the services `run` and `mux`.

use clap::Args;
use towpath::config;
use towpath::logging::{self, Directive, Format, Levels, OPERATOR, level};

// Not a doc comment: clap would make it the description of the command.
#[derive(Debug, Args)]
pub(crate) struct LogFormat {
    /// Format of the log; default: journald if standard error is a stream to journald (under systemd), text otherwise
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<Format>,
}

// As above.
#[derive(Debug, Args)]
pub(crate) struct LogOptions {
    #[command(flatten)]
    format: LogFormat,

    /// Level of the log, or of one of its targets: off, error, warning, info, debug, trace; may be repeated
    #[arg(long = "log-level", value_name = "[TARGET=]LEVEL")]
    levels: Vec<Directive>,
}

/// Starts the log of a command: warnings and errors.
pub(crate) fn start() {
    let mut levels = Levels::new(level("warning").expect("a level"));
    levels.set(&format!("{OPERATOR}=info").parse().expect("a directive")).expect("there is room");
    logging::install(levels);
}

impl LogFormat {
    /// Sets the format of a service. The option has precedence over the configuration.
    pub(crate) fn apply(&self, configured: Option<Format>) {
        logging::set_format(self.log_format.or(configured).unwrap_or_else(Format::detect));
    }
}

impl LogOptions {
    /// Starts the log of a service without a configuration file.
    pub(crate) fn apply(&self) -> Result<(), String> {
        self.format.apply(None);
        let mut levels = config::Log::default().levels;
        for directive in &self.levels {
            levels.set(directive).map_err(|error| format!("--log-level: {error}"))?;
        }
        logging::configure(levels);
        Ok(())
    }
}
