//! `towpath top`: the rates of a running engine.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use clap::builder::ValueHint;
use towpath::control::client::{Engine, Failure};
use towpath::top;

use crate::args::exit;
use crate::cli::{answer, fail};

/// Show the rates of a running engine: ports, rules, flows, inspectors, muxes and drops by reason
///
/// On a terminal of at least 80 columns and 24 lines. `?` explains the keys. Reads the control socket of `towpath run`, or of `towpath
/// replay` or `towpath mux` with `--control PATH`, with the requests of `towpath ctl show`. Ending a state and tracing need the same rights
/// as with `towpath ctl`. While the engine is away, the last values stay and the view waits for it.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath top --socket /tmp/ctl.sock
  towpath top --once --json | jq '.ports[] | {name, received_per_second}'")]
pub(crate) struct Top {
    /// The engine's control socket
    #[arg(long, value_name = "PATH", env = "TOWPATH_CONTROL", default_value = "/run/towpath/control.sock", value_hint = ValueHint::FilePath)]
    socket: PathBuf,

    /// Seconds between two samples, 0.2 to 60
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,

    /// Read two samples, print them with the rates, and exit
    #[arg(long)]
    once: bool,

    /// With --once: at most N flows
    #[arg(long, value_name = "N", default_value = "20", requires = "once")]
    count: usize,

    /// With --once: print one JSON object
    #[arg(long, requires = "once")]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(0.2..=60.0).contains(&seconds) {
        return Err("an interval is between 0.2 and 60 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

pub(crate) fn run(args: &Top) -> u8 {
    let engine = Engine::at(args.socket.clone());
    let done = match args.once {
        true => top::once(engine, args.interval, args.count, args.json),
        false => top::watch(engine, args.interval).map(|()| String::new()),
    };
    match done {
        Ok(text) => answer(exit::OK, &text),
        Err(Failure { code, message }) => fail(code, message),
    }
}
