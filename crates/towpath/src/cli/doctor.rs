//! `towpath doctor`: what this machine can do.

use clap::Parser;
use towpath::doctor::{self, Purpose};

use crate::args::exit;
use crate::cli::answer;

/// Examine this machine: what ports, muxes and the demo can use here, and the remedy for each lack
///
/// Reads /proc, /sys and netlink in this network namespace, and changes nothing. Exit code 0 if nothing is lacking for the purposes, 9
/// otherwise; hints do not count. `towpath run --check CONFIG` examines one configuration.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  towpath doctor
  towpath doctor --for af_xdp --interface eth0 --json")]
pub(crate) struct Doctor {
    /// Examine only what this needs; may be repeated
    #[arg(long = "for", value_name = "PURPOSE")]
    purposes: Vec<Purpose>,

    /// Examine this interface only; may be repeated
    #[arg(long = "interface", value_name = "NAME")]
    interfaces: Vec<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Doctor) -> u8 {
    let report = doctor::examine(&args.purposes, &args.interfaces);
    let code = if report.lacks() { exit::LACKS } else { exit::OK };
    answer(code, &if args.json { report.json() } else { report.text() })
}
