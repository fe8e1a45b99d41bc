//! `towpath run`: runs the engine between live ports according to a configuration file.

use std::path::PathBuf;

use clap::Parser;
use clap::builder::ValueHint;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use towpath::config::{Config, Wrong};
use towpath::daemon::{Failure, Inherited, Supervisor};
use towpath::logging;
use towpath::quantity::count;
use towpath::sandbox;
use towpath::service_manager::Sockets;
use towpath::worker_pool;
use towpath_gate::rules::Diagnostic;

use crate::args::exit;
use crate::cli::log::LogFormat;
use crate::cli::{answer, fail, say, warn};

/// Run the engine between live ports, as a configuration file specifies
///
/// CONFIG is a TOML file with the ports and their wiring, the rule file, the queues and their access rights, the engine's threads
/// and the control socket. docs/book/src/reference/run.md documents every key. SIGTERM and SIGINT drain the engine: it receives
/// nothing more, waits for pending verdicts, and exits. SIGHUP reloads the rules and the configuration.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath run --check /etc/towpath/towpath.toml
  towpath run /etc/towpath/towpath.toml")]
pub(crate) struct Run {
    /// The configuration file
    #[arg(value_name = "CONFIG", value_hint = ValueHint::FilePath)]
    config: PathBuf,

    /// Only check the configuration and its rules: reports all errors, each with line, column and a hint
    #[arg(long)]
    check: bool,

    /// Print the final report, or the findings of --check, as one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    log: LogFormat,
}

pub(crate) fn run(args: &Run, passed: Sockets) -> u8 {
    if args.check {
        return check(args);
    }
    args.log.apply(None);
    // Standard input is the channel of an upgrade then.
    let inherited = match Inherited::of_this_process() {
        Ok(inherited) => inherited,
        Err(error) => return fail(exit::FAILED, error),
    };
    let refusal = inherited.as_ref().map(Inherited::refusal).transpose();
    let refusal = match refusal {
        Ok(refusal) => refusal,
        Err(error) => return fail(exit::FAILED, error),
    };
    let refused = |reason: &dyn std::fmt::Display| {
        if let Some(refuse) = refusal {
            refuse(&reason.to_string());
        }
    };
    let (config, rules) = match Config::read_whole(&args.config) {
        Ok(read) => read,
        Err(wrong) => {
            wrong.config.iter().chain(&wrong.rules).for_each(towpath::output::wrong);
            if let Some(first) = wrong.config.iter().chain(&wrong.rules).next() {
                refused(first);
            }
            return code(&wrong);
        }
    };
    args.log.apply(config.log.format);
    logging::configure(config.log.levels.clone());
    rules.warnings.iter().for_each(warn);
    open_files();
    sandbox::arm(config.engine.sandbox, rules.files);
    let supervisor = match Supervisor::start_with(config, rules.ruleset, passed, inherited) {
        Ok(supervisor) => supervisor,
        Err(failure) => {
            refused(&failure);
            return refuse(&failure);
        }
    };
    // The copy of the channel ends with it.
    drop(refused);
    match supervisor.run() {
        Ok(ended) if args.json => {
            let text = serde_json::to_string(&ended.report).expect("strings and numbers serialise");
            answer(exit::OK, &(text + "\n"))
        }
        Ok(ended) => answer(exit::OK, &ended.report.to_string()),
        Err(failure) => refuse(&failure),
    }
}

/// Raises the soft limit of open files to the hard limit: each connection of a mux needs a descriptor.
pub(super) fn open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!("the limit of open files stays at {}: {error}", current.unwrap_or(u64::MAX));
    }
}

fn refuse(failure: &Failure) -> u8 {
    let code = match failure {
        Failure::Port(_) | Failure::Mux(..) => exit::NO_PORT,
        Failure::Workers(_, worker_pool::Error::Worker { .. }) => exit::INSPECTOR,
        Failure::Workers(..) => exit::FAILED,
        Failure::Control(_) | Failure::Metrics(_) | Failure::Dumps(_) => exit::NO_ENGINE,
        Failure::Inspector(_) => exit::INSPECTOR,
        Failure::Ipfix(_) | Failure::Events(_) => exit::FAILED,
        Failure::Thread(_) | Failure::States { .. } | Failure::Upgrade(_) | Failure::System(..) => {
            exit::FAILED
        }
    };
    fail(code, failure)
}

fn code(wrong: &Wrong) -> u8 {
    if wrong.config.is_empty() { exit::BAD_RULES } else { exit::BAD_CONFIG }
}

fn check(args: &Run) -> u8 {
    let (code, errors, warnings, said) = match Config::check(&args.config) {
        Ok((config, rules)) => {
            (exit::OK, Vec::new(), rules.warnings, summary(&config, rules.ruleset.rules().len()))
        }
        Err(wrong) => (code(&wrong), [wrong.config, wrong.rules].concat(), Vec::new(), String::new()),
    };
    if args.json {
        let row = |d: &Diagnostic| {
            json!({"file": &*d.file, "line": d.line, "column": d.column, "end": d.end,
                   "message": d.message, "hint": d.hint})
        };
        let rows = |found: &[Diagnostic]| found.iter().map(row).collect::<Vec<_>>();
        let object = json!({
            "file": args.config.display().to_string(), "ok": errors.is_empty(),
            "errors": rows(&errors), "warnings": rows(&warnings),
        });
        return answer(code, &format!("{object}\n"));
    }
    warnings.iter().for_each(warn);
    errors.iter().for_each(say);
    answer(code, &said)
}

fn summary(config: &Config, rules: usize) -> String {
    let ports = config.ports.iter().map(|port| format!("{} ({})", port.name, port.driver.name()));
    let muxes = config.muxes.iter().map(|mux| format!("{} ({})", mux.name, mux.listen.join(", ")));
    let started =
        config.queues.iter().map(|queue| &queue.inspectors).filter(|inspectors| inspectors.wanted() > 0);
    let bytes: u64 = started.map(|inspectors| inspectors.rings(config.engine_threads().max(1))).sum();
    let rings = match bytes.div_ceil(1 << 20) {
        0 => String::new(),
        mebibytes => format!(", {mebibytes} MiB for the rings of their inspectors"),
    };
    format!(
        "{}: {}; {}, {}, {}; {}; {}; {}{rings}\n",
        config.file.display(),
        list("ports", ports.collect()),
        count(config.bridges.len() as u64, "bridge"),
        count(config.routes.len() as u64, "route"),
        count(config.monitors.len() as u64, "monitor"),
        list("muxes", muxes.collect()),
        count(rules as u64, "rule"),
        count(config.queues.len() as u64, "queue")
    )
}

/// The count and the list of the rows.
fn list(what: &str, rows: Vec<String>) -> String {
    if rows.is_empty() {
        return format!("0 {what}");
    }
    format!("{} {what}: {}", rows.len(), rows.join(", "))
}
