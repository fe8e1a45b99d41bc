//! `towpath ctl table`: changes a table, lists it, or looks a key up.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::Query;
use super::super::command::{Access, Command, Context, Handled, Reply, Request, name, parse};
use super::super::protocol::{Code, Refusal};
use super::super::text::items;
use super::change::{self, Words};
use super::show_tables::ShowTables;
use super::{show_table, show_tables};
use crate::exit;

/// Create, change or look into a table: `table T add 10.0.0.0/8 5`, `table T list`, `table T lookup 10.1.2.3`
///
/// `lookup` exits with code 1 if the table has no entry for the key.
#[derive(Debug, Args)]
pub(super) struct Table {
    #[command(flatten)]
    words: Words,
}

pub(super) const COMMAND: Command = Command::other::<Table>(
    "table",
    &[Request { name: "lookup", access: Access::Read, handle }],
    |engine, matches| {
        let words = change::words(matches);
        let (words, json) = words.of("table");
        show(engine, &words, json).unwrap_or_else(|| change::command(engine, words.join(" "), false, json))
    },
);

/// The entry of a table for a key; for an address the entry with the longest prefix.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lookup {
    name: String,
    /// As in a rule file.
    key: String,
}

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let Lookup { name, key } = parse(body)?;
    match context.ruleset()?.lookup(&name, &key) {
        Some(Ok(Some((key, value)))) => Ok(Reply::Answer("entry", json!({ "key": key, "value": value }))),
        Some(Ok(None)) => Err(Refusal::new(Code::NotFound, format!("{key} is not in table {name}"))),
        Some(Err(error)) => Err(Refusal::new(Code::Invalid, error)),
        None => Err(show_table::no_table(&name)),
    }
}

/// Runs a table command that changes nothing. `None` for all other commands.
pub(super) fn show(engine: &Engine, words: &[&str], json: bool) -> Option<Result<String, Failure>> {
    Some(match *words {
        ["table", "all", "list"] => list_all(engine, json),
        ["table", name, "list"] => list(engine, name, json),
        ["table", name, "info" | "detail"] => show_tables::info(engine, name, json),
        ["table", name, "lookup", key] => lookup(engine, name, key, json),
        ["table", _, "lookup", ..] => Err(Failure::new(exit::USAGE, "write table NAME lookup KEY")),
        _ => return None,
    })
}

fn list(engine: &Engine, name: &str, json: bool) -> Result<String, Failure> {
    let entries = show_table::entries(engine, name)?;
    Ok(match json {
        true => format!("{}\n", json!({ "name": name, "entries": entries })),
        false => show_table::text(&entries),
    })
}

fn list_all(engine: &Engine, json: bool) -> Result<String, Failure> {
    let tables = engine.ask(&name(ShowTables::WORDS), ShowTables {}, ShowTables::ANSWER)?;
    let (mut text, mut rows) = (String::new(), Vec::new());
    for name in items(&tables["tables"]).iter().filter_map(|table| table["name"].as_str()) {
        let entries = show_table::entries(engine, name)?;
        text += &format!("--- table({name}), set(0) ---\n{}", show_table::text(&entries));
        rows.push(json!({ "name": name, "entries": entries }));
    }
    Ok(if json { format!("{}\n", json!({ "tables": rows })) } else { text })
}

fn lookup(engine: &Engine, name: &str, key: &str, json: bool) -> Result<String, Failure> {
    let request = Lookup { name: name.to_owned(), key: key.to_owned() };
    let entry = engine.ask("lookup", request, "entry")?;
    let (key, value) = (&entry["key"], &entry["value"]);
    Ok(match json {
        true => format!("{}\n", json!({ "name": name, "key": key, "value": value })),
        false => show_table::text(&[json!([key, value])]),
    })
}
