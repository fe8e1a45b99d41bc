//! `towpath ctl add`, `delete`, `zero`, `resetlog` and `flush`: commands of a rule file, carried out in a running engine.

use clap::{ArgMatches, Args};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_gate::Diff;
use towpath_gate::rules::Diagnostic;

use super::super::client::{Engine, Failure};
use super::super::command::{
    Access, Command, Context, Handled, Reply, Request, arguments, json_behind, parse,
};
use super::super::protocol::{Code, Refusal};
use super::super::text::items;
use super::delete_state;
use crate::output::warn;
use crate::quantity::count;
use crate::ruleset_manager::Done;

/// Add a rule: `add [NUMBER] [set N] ACTION ...`, as in a rule file
#[derive(Debug, Args)]
pub(super) struct Add {
    #[command(flatten)]
    words: Words,
}

/// Delete rules by number or range, all rules of a set, or a state: `delete 100 200-300`, `delete set 5`, `delete state tcp 10.0.0.1:4000 10.0.0.2:22`
#[derive(Debug, Args)]
pub(super) struct Delete {
    #[command(flatten)]
    words: Words,
}

/// Reset the counters of all rules, or of the rules with these numbers
#[derive(Debug, Args)]
pub(super) struct Zero {
    #[command(flatten)]
    words: Words,
}

/// Let all rules, or the rules with these numbers, log up to `logamount` packets again
#[derive(Debug, Args)]
pub(super) struct ResetLog {
    #[command(flatten)]
    words: Words,
}

/// Delete all rules except the default rule and the rules of set 31
#[derive(Debug, Args)]
pub(super) struct Flush {
    #[command(flatten)]
    words: Words,
}

/// The words of a command after the first one.
#[derive(Debug, Args)]
pub(super) struct Words {
    /// The words of the command
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,

    /// Print JSON
    #[arg(long, short = 'j')]
    json: bool,
}

pub(super) const ADD: Command =
    Command::other::<Add>("add", REQUESTS, |engine, matches| change(engine, "add", &words(matches)));
pub(super) const DELETE: Command =
    Command::other::<Delete>("delete", delete_state::REQUESTS, |engine, matches| {
        let words = words(matches);
        match &words.words[..] {
            [first, flow @ ..] if first == "state" => delete_state::run(engine, flow, words.json),
            _ => change(engine, "delete", &words),
        }
    });
pub(super) const ZERO: Command =
    Command::other::<Zero>("zero", &[], |engine, matches| change(engine, "zero", &words(matches)));
pub(super) const RESET_LOG: Command = Command::other::<ResetLog>("resetlog", &[], |engine, matches| {
    change(engine, "resetlog", &words(matches))
});
pub(super) const FLUSH: Command =
    Command::other::<Flush>("flush", &[], |engine, matches| change(engine, "flush", &words(matches)));

const REQUESTS: &[Request] = &[Request { name: "command", access: Access::Change, handle }];

/// Commands of a rule file, one per line. All of them are carried out in one step, or none.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CommandRequest {
    text: String,
    /// Only return what the commands would change.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    check: bool,
}

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let CommandRequest { text, check } = parse(body)?;
    let ruleset = context.ruleset()?;
    reply(if check { ruleset.preview(&text) } else { ruleset.command(&text) })
}

/// The answer to a request that changes rules or tables.
pub(super) fn reply(done: Result<Done, Vec<Diagnostic>>) -> Handled {
    match done {
        Ok(done) => {
            let warnings = done.warnings.iter().map(ToString::to_string).collect();
            Ok(Reply::Answer("done", json!({ "changes": Changes { warnings, ..done.diff.into() } })))
        }
        Err(errors) => {
            let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
            Err(Refusal::new(Code::Invalid, lines.join("\n")))
        }
    }
}

/// The changes that a request made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Changes {
    /// New rules, as `number text`.
    added: Vec<String>,
    /// Deleted rules.
    removed: Vec<String>,
    /// Number of rules that stay, with their counters.
    kept: usize,
    /// Tables that are new, deleted, or have other entries.
    tables: Vec<String>,
    /// States deleted.
    states_dropped: usize,
    /// States that stay without their rule.
    states_orphaned: usize,
    /// Warnings about the commands.
    warnings: Vec<String>,
}

impl From<Diff> for Changes {
    fn from(diff: Diff) -> Self {
        let Diff { added, removed, kept, tables, states_dropped, states_orphaned, .. } = diff;
        Self { added, removed, kept, tables, states_dropped, states_orphaned, warnings: Vec::new() }
    }
}

/// The words of a subcommand's arguments.
pub(super) fn words(matches: &ArgMatches) -> Words {
    arguments(matches)
}

impl Words {
    /// The command with its first word, and whether to print JSON. A trailing `--json` is not a word of the command.
    pub(super) fn of<'a>(&'a self, first: &'a str) -> (Vec<&'a str>, bool) {
        let (words, json) = json_behind(&self.words, self.json);
        (std::iter::once(first).chain(words.iter().map(String::as_str)).collect(), json)
    }
}

fn change(engine: &Engine, first: &str, words: &Words) -> Result<String, Failure> {
    let (words, json) = words.of(first);
    command(engine, words.join(" "), false, json)
}

/// Carries out a command, or checks it only.
pub(super) fn command(engine: &Engine, text: String, check: bool, json: bool) -> Result<String, Failure> {
    show(&engine.ask("command", CommandRequest { text, check }, "done")?, json)
}

/// Renders the answer `done`.
pub(super) fn show(answer: &Value, json: bool) -> Result<String, Failure> {
    if json {
        return Ok(format!("{answer}\n"));
    }
    let changes = &answer["changes"];
    let strings = |key: &str| items(&changes[key]).iter().filter_map(Value::as_str);
    strings("warnings").for_each(warn);
    let mut text = String::new();
    text.extend(strings("removed").map(|rule| format!("- {rule}\n")));
    text.extend(strings("added").map(|rule| format!("+ {rule}\n")));
    text.extend(strings("tables").map(|table| format!("~ table {table}\n")));
    if let Some(dropped) = changes["states_dropped"].as_u64().filter(|dropped| *dropped > 0) {
        text += &format!("{} dropped\n", count(dropped, "state"));
    }
    Ok(text)
}
