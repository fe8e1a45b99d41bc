//! `towpath ctl table`: changes a table, lists it, or looks a key up.

use std::fs::File;
use std::io::{self, Read};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::Query;
use super::super::command::{Access, Command, Context, Handled, Reply, Request, name, parse};
use super::super::protocol::{Code, REQUEST_MAX, Refusal, request};
use super::super::text::items;
use super::change::{self, Words};
use super::show_tables::ShowTables;
use super::{show_table, show_tables};
use crate::exit;

/// Create, change or look into a table: `table T add 10.0.0.0/8 5`, `table T load FILE`, `table T list`, `table T lookup 10.1.2.3`
///
/// `load` replaces all entries by those of a file (`-` is standard input), in one step; a line is `KEY` or `KEY VALUE`. `swap OTHER`
/// exchanges two tables. `lookup` exits with code 1 if the table has no entry for the key.
#[derive(Debug, Args)]
pub(super) struct Table {
    #[command(flatten)]
    words: Words,
}

pub(super) const COMMAND: Command = Command::other::<Table>(
    "table",
    &[
        Request { name: "lookup", access: Access::Read, handle },
        Request { name: "load table", access: Access::Change, handle: handle_load },
    ],
    |engine, matches| {
        let words = change::words(matches);
        let (words, json) = words.of("table");
        run(engine, &words, json, How::default())
            .unwrap_or_else(|| change::command(engine, words.join(" "), false, json))
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

/// The new entries of a table, in place of all others.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    name: String,
    /// The name of the file in errors.
    file: String,
    /// The contents of the file.
    text: String,
    /// The last entry of a key counts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    quiet: bool,
    /// Only return what the command would change.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    check: bool,
}

/// ipfw's flags `-q` and `-n`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct How {
    pub(super) quiet: bool,
    pub(super) check: bool,
}

fn handle_load(body: Value, context: &Context<'_>) -> Handled {
    let Load { name, file, text, quiet, check } = parse(body)?;
    change::reply(context.ruleset()?.load_table(&name, &file, &text, quiet, check))
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

/// Runs `list`, `info`, `lookup` or `load`, which are not commands of a rule file. `None` for all other commands.
pub(super) fn run(engine: &Engine, words: &[&str], json: bool, how: How) -> Option<Result<String, Failure>> {
    let printed = |printed: Result<(), Failure>| printed.map(|()| String::new());
    Some(match *words {
        ["table", "all", "list"] => printed(list_all(engine, json)),
        ["table", name, "list"] => printed(show_table::print_table(engine, name, json)),
        ["table", name, "info" | "detail"] => show_tables::info(engine, name, json),
        ["table", name, "lookup", key] => lookup(engine, name, key, json),
        ["table", _, "lookup", ..] => Err(Failure::new(exit::USAGE, "write table NAME lookup KEY")),
        ["table", name, "load", file] => load(engine, name, file, json, how),
        ["table", _, "load", ..] => Err(Failure::new(exit::USAGE, "write table NAME load FILE")),
        _ => return None,
    })
}

fn list_all(engine: &Engine, json: bool) -> Result<(), Failure> {
    let tables = engine.ask(&name(ShowTables::WORDS), ShowTables {}, ShowTables::ANSWER)?;
    let names = items(&tables["tables"]).iter().filter_map(|table| table["name"].as_str());
    show_table::print(engine, |out| {
        if json {
            write!(out, "{{\"tables\":[")?;
        }
        for (name, comma) in names.zip(std::iter::once("").chain(std::iter::repeat(","))) {
            match json {
                true => write!(out, "{comma}")?,
                false => writeln!(out, "--- table({name}), set(0) ---")?,
            }
            show_table::write_table(engine, name, json, out)?;
        }
        if json {
            writeln!(out, "]}}")?;
        }
        Ok(())
    })
}

/// Sends the contents of a file, so that the engine needs no access to it.
fn load(engine: &Engine, name: &str, file: &str, json: bool, how: How) -> Result<String, Failure> {
    let cannot = |error: &dyn std::fmt::Display| Failure::new(exit::FAILED, format!("{file}: {error}"));
    let mut text = Vec::new();
    let mut limited: Box<dyn Read> = match file {
        "-" => Box::new(io::stdin()),
        file => Box::new(File::open(file).map_err(|error| cannot(&error))?),
    };
    limited.as_mut().take(REQUEST_MAX as u64).read_to_end(&mut text).map_err(|error| cannot(&error))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let How { quiet, check } = how;
    let load = Load { name: name.to_owned(), file: file.to_owned(), text, quiet, check };
    let message = request("load-table", &load);
    if message.len() - 4 > REQUEST_MAX {
        let most = REQUEST_MAX >> 20;
        return Err(cannot(&format_args!("the file is larger than a request, which has at most {most} MiB")));
    }
    drop(load);
    let mut connection = engine.send(&message)?;
    // Reading a million entries takes seconds.
    connection.wait_forever()?;
    change::show(&connection.answer("done")?, json)
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
