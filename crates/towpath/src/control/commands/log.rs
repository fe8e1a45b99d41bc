//! `towpath ctl log`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{Access, Command, Context, Handled, NoMembers, Reply, Request, arguments, parse};
use super::super::protocol::{Code, Refusal};
use crate::exit;
use crate::logging::{self, Directive, OPERATOR, level_word};
use crate::metrics;

/// List the levels of the log, or change some until the engine ends: `log debug`, `log states=info towpath::control=debug`
///
/// A line is written if its level is at least as severe as that of its target. The longest name with which the target begins counts;
/// LEVEL alone is for all other targets. The targets `packets`, `connections`, `states` and `operator` are named by their lines; others
/// are modules, such as `towpath::control` and `towpath_ring`. A reload that changes [log] replaces all levels.
#[derive(Debug, Args)]
pub(super) struct Log {
    /// off, error, warning, info, debug or trace
    #[arg(value_name = "[TARGET=]LEVEL")]
    levels: Vec<String>,

    /// Return to the levels of the configuration first
    #[arg(long)]
    reset: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) const COMMAND: Command = Command::other::<Log>(
    "log",
    &[
        Request { name: "show log", access: Access::Read, handle: show },
        Request { name: "log", access: Access::Change, handle: change },
    ],
    |engine, matches| log(engine, &arguments(matches)),
);

/// Changes levels: all of them, or none.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    #[serde(default)]
    levels: Vec<String>,
    #[serde(default)]
    reset: bool,
}

fn show(body: Value, _: &Context<'_>) -> Handled {
    let NoMembers {} = parse(body)?;
    Ok(answer())
}

fn change(body: Value, _: &Context<'_>) -> Handled {
    let Change { levels, reset } = parse(body)?;
    let directives = levels.iter().map(|text| text.parse()).collect::<Result<Vec<Directive>, _>>();
    directives
        .and_then(|directives| logging::change_levels(reset, &directives))
        .map_err(|error| Refusal::new(Code::Invalid, error.to_string()))?;
    tracing::info!(target: OPERATOR, "levels of the log: {}", logging::levels());
    Ok(answer())
}

fn answer() -> Reply {
    let levels = logging::levels();
    let targets: Map<String, Value> =
        levels.targets().into_iter().map(|(target, level)| (target, level_word(level).into())).collect();
    let lines = metrics::json(&logging::stats());
    Reply::Answer("log", json!({ "level": level_word(levels.level()), "targets": targets, "lines": lines }))
}

fn log(engine: &Engine, Log { levels, reset, json }: &Log) -> Result<String, Failure> {
    for text in levels {
        text.parse::<Directive>().map_err(|error| Failure::new(exit::USAGE, error.to_string()))?;
    }
    let answer = match levels.is_empty() && !reset {
        true => engine.ask("show-log", json!({}), "log")?,
        false => engine.ask("log", Change { levels: levels.clone(), reset: *reset }, "log")?,
    };
    if *json {
        return Ok(format!("{answer}\n"));
    }
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut text = format!("{:<24} {}\n", "all other targets", word(&answer["level"]));
    for (target, level) in answer["targets"].as_object().into_iter().flatten() {
        text = format!("{target:<24} {}\n", word(level)) + &text;
    }
    for (outcome, lines) in answer["lines"].as_object().into_iter().flatten() {
        text += &format!("lines {outcome:<18} {lines}\n");
    }
    Ok(text)
}
