//! `towpath ctl fleet`: changes what the gates of a group have in common.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_fleet::group::{Content, GateVersion, Part};

use super::super::client::{Engine, Failure};
use super::super::command::{Access, Command, Context, Handled, Reply, Request, arguments, parse};
use super::super::protocol::{Code, Refusal, request};
use super::super::text::items;
use crate::config::GroupKeys;
use crate::exit;
use crate::fleet::group::{GroupCommand, GroupDesk, GroupDone, Unknown};

/// Interval of looks at the progress.
const LOOK: Duration = Duration::from_millis(20);

/// Change what all gates of the group have in common
#[derive(Debug, Args)]
pub(super) struct Fleet {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Check a rule file on every gate of the group, and apply it everywhere or nowhere
    ///
    /// FILE is a rule file, or a TOML file (`.toml`) with the keys `rules`, `default`, `states-at-reload` and [settings]. Every gate that is
    /// in touch checks it with its own ports. If one of them refuses it, nothing is applied.
    #[command(after_help = "Example:\n  towpath ctl fleet apply edge.ipfw")]
    Apply {
        /// The file
        file: PathBuf,

        /// Print JSON
        #[arg(long)]
        json: bool,
    },

    /// Change entries of a table on every gate of the group
    ///
    /// The table must exist in the rules. From the first change on, its entries are those of the group: entries of the rule file do not count.
    #[command(
        after_help = "Example:\n  towpath ctl fleet table blocked add 192.0.2.7 198.51.100.0/24=5\n  towpath ctl fleet table blocked load FILE"
    )]
    Table {
        /// The table
        name: String,

        #[command(subcommand)]
        how: How,
    },
}

#[derive(Debug, Subcommand)]
enum How {
    /// Add entries, or replace their values
    Add {
        /// `KEY`, or `KEY=VALUE`
        #[arg(required = true, value_name = "ENTRY")]
        entries: Vec<String>,
    },
    /// Delete entries
    Delete {
        /// The keys
        #[arg(required = true, value_name = "KEY")]
        keys: Vec<String>,
    },
    /// Replace all entries by those of a file with one `KEY` or `KEY VALUE` in each line
    Load {
        /// The file
        file: PathBuf,
    },
}

pub(super) const COMMAND: Command = Command::other::<Fleet>(
    "fleet",
    &[
        Request { name: "apply fleet", access: Access::Change, handle: begin },
        Request { name: "change fleet table", access: Access::Change, handle: change },
        Request { name: "show apply", access: Access::Read, handle: show },
    ],
    |engine, matches| {
        let Fleet { what } = arguments(matches);
        match what {
            What::Apply { file, json } => apply(engine, &file, json),
            What::Table { name, how } => table(engine, name, how),
        }
    },
);

/// Changes of a table.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChangeTable {
    table: String,
    /// `add KEY`, `add KEY VALUE` or `delete KEY`, one a line; for `load`, `KEY` or `KEY VALUE`.
    lines: String,
    /// The name of the file whose lines replace all entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    load: Option<String>,
}

/// A file of a version.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    name: String,
    text: String,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Begin {
    rules: FileText,
    /// Without a name: no keys.
    #[serde(default)]
    config: FileText,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Show {
    apply: u64,
}

impl From<FileText> for Part {
    fn from(FileText { name, text }: FileText) -> Self {
        Self { name, text }
    }
}

fn desk(context: &Context<'_>) -> Result<std::sync::Arc<GroupDesk>, Refusal> {
    let hint =
        "this gate does not take its rules from a group: its configuration has no `configuration` in [fleet]";
    context.endpoints.group_desk().ok_or_else(|| Refusal::new(Code::NotFound, hint))
}

fn begin(body: Value, context: &Context<'_>) -> Handled {
    let Begin { rules, config } = parse(body)?;
    let content = Content { config: config.into(), rules: rules.into() };
    asked(desk(context)?.ask(GroupCommand::Apply(content)))
}

fn change(body: Value, context: &Context<'_>) -> Handled {
    let ChangeTable { table, lines, load } = parse(body)?;
    let desk = desk(context)?;
    let invalid = |message: String| Refusal::new(Code::Invalid, message);
    if !towpath_fleet::workers::is_name(&table) {
        let hint = "a table of a group has a name of at most 64 letters, digits, `-` and `_`: it is a word of subjects";
        return Err(invalid(hint.to_owned()));
    }
    let ruleset = context.ruleset()?;
    asked(desk.ask(match load {
        Some(file) => {
            ruleset.check_group_load(&table, &file, &lines).map_err(|found| {
                let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
                invalid(lines.join("\n"))
            })?;
            GroupCommand::Load { table, lines }
        }
        None => {
            ruleset.check_group_entries(&table, &lines).map_err(invalid)?;
            GroupCommand::Change { table, lines }
        }
    }))
}

fn asked(apply: Option<u64>) -> Handled {
    let apply =
        apply.ok_or_else(|| Refusal::new(Code::Busy, "too many changes of the group wait; try again"))?;
    Ok(Reply::Answer("apply", json!({ "apply": apply })))
}

fn show(body: Value, context: &Context<'_>) -> Handled {
    let Show { apply } = parse(body)?;
    let unknown = |Unknown| {
        Refusal::new(Code::NotFound, "there is no such change, or it is forgotten: see `show fleet`")
    };
    let answer = match desk(context)?.outcome(apply).map_err(unknown)? {
        None => json!({ "done": false }),
        Some(Ok(GroupDone::Entries)) => json!({ "done": true }),
        Some(Ok(GroupDone::Version(version, gates))) => {
            json!({ "done": true, "version": version, "gates": versions(&gates) })
        }
        Some(Err(error)) => json!({ "done": true, "error": error }),
    };
    Ok(Reply::Answer("apply", answer))
}

/// The gates and their versions.
pub(super) fn versions(gates: &[GateVersion]) -> Value {
    let gate = |gate: &GateVersion| {
        let failed = gate.failed.as_ref().map(|(version, why)| json!({ "version": version, "error": why }));
        json!({ "gate": gate.gate, "version": gate.version, "in_touch": gate.in_touch, "failed": failed })
    };
    gates.iter().map(gate).collect()
}

/// [`versions`] as text.
pub(super) fn versions_text(gates: &Value) -> String {
    let mut text = String::new();
    for gate in items(gates) {
        let name = gate["gate"].as_str().unwrap_or_default();
        text += &format!("gate {name:<16} ");
        text += &match gate["version"].as_u64() {
            None | Some(0) => "no version".to_owned(),
            Some(version) => format!("version {version}"),
        };
        if gate["in_touch"] != true {
            text += ", not in touch";
        }
        if let Some(why) = gate["failed"]["error"].as_str() {
            text += &format!(", cannot apply version {}: {why}", gate["failed"]["version"]);
        }
        text.push('\n');
    }
    text
}

fn apply(engine: &Engine, file: &Path, json: bool) -> Result<String, Failure> {
    let begin = files(file)?;
    let apply = engine.ask("apply-fleet", begin, "apply")?["apply"].as_u64().unwrap_or_default();
    let answer = finished(engine, apply)?;
    Ok(match json {
        true => format!("{}\n", json!({ "version": answer["version"], "gates": answer["gates"] })),
        false => format!("version {} is applied\n{}", answer["version"], versions_text(&answer["gates"])),
    })
}

fn table(engine: &Engine, table: String, how: How) -> Result<String, Failure> {
    let lines = |word: &str, entries: Vec<String>| {
        let line = |entry: String| format!("{word} {}\n", entry.replacen('=', " ", 1));
        entries.into_iter().map(line).collect::<String>()
    };
    let change = match how {
        How::Add { entries } => ChangeTable { table, lines: lines("add", entries), load: None },
        How::Delete { keys } => ChangeTable { table, lines: lines("delete", keys), load: None },
        How::Load { file } => {
            let FileText { name, text } = read(&file)?;
            ChangeTable { table, lines: text, load: Some(name) }
        }
    };
    let mut connection = engine.send(&request("change-fleet-table", &change))?;
    // Reading a million entries takes seconds.
    connection.wait_forever()?;
    let apply = connection.answer("apply")?["apply"].as_u64().unwrap_or_default();
    finished(engine, apply).map(|_| String::new())
}

/// Waits for the end of a change.
fn finished(engine: &Engine, apply: u64) -> Result<Value, Failure> {
    loop {
        let answer = engine.ask("show-apply", Show { apply }, "apply")?;
        if answer["done"] != true {
            thread::sleep(LOOK);
        } else if let Some(why) = answer["error"].as_str() {
            return Err(Failure::new(exit::FAILED, why));
        } else {
            return Ok(answer);
        }
    }
}

fn read(path: &Path) -> Result<FileText, Failure> {
    let name = path.display().to_string();
    let text =
        fs::read_to_string(path).map_err(|error| Failure::new(exit::FAILED, format!("{name}: {error}")))?;
    Ok(FileText { name, text })
}

/// Reads the files, so that the engine needs no access to them.
fn files(file: &Path) -> Result<Begin, Failure> {
    if file.extension().is_none_or(|extension| extension != "toml") {
        return Ok(Begin { rules: read(file)?, config: FileText::default() });
    }
    let config = read(file)?;
    let keys = GroupKeys::parse(&config.name, &config.text).map_err(|found| {
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        Failure::new(exit::FAILED, lines.join("\n"))
    })?;
    Ok(Begin { rules: read(&keys.rules_beside(file))?, config })
}
