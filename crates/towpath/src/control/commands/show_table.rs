//! `towpath ctl show table T`, and ipfw's `table T list`. Pages are printed as they arrive.

use std::io::{self, BufWriter, ErrorKind, Write};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{Context, Handled, Query, Reply, name};
use super::super::protocol::{Code, Refusal};
use super::super::text::items;
use super::paging;
use crate::exit;
use crate::ruleset_manager::NoListing;

/// The entries of a table
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowTable {
    /// The table's name
    name: String,
    /// Index of the first entry of the page.
    #[arg(skip)]
    #[serde(default)]
    from: u64,
    /// The `version` of the first page.
    #[arg(skip)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
}

impl Query for ShowTable {
    const WORDS: &'static str = "show table";
    const ANSWER: &'static str = "table";

    fn handle(self, context: &Context<'_>) -> Handled {
        let listing = context.ruleset()?.listing(&self.name, self.version);
        let (version, listing) = listing.map_err(|error| match error {
            NoListing::NoTable => no_table(&self.name),
            NoListing::Discarded => Refusal::new(Code::Gone, discarded(&self.name)),
        })?;
        let table = listing.table();
        let from = self.from.min(listing.len() as u64);
        let rows = listing.iter_from(from as usize);
        let rows = rows.map(|(key, value)| (table.show_key(&key), table.show_value(&value)));
        let bytes = |(key, value): &(String, String)| key.len() + value.len() + 10;
        let (entries, next) = paging::page_of(rows, from, listing.len() as u64, bytes);
        let body = json!({ "name": self.name, "entries": entries, "next": next, "version": version });
        Ok(Reply::Answer(Self::ANSWER, body))
    }

    fn print(&self, engine: &Engine, json: bool) -> Option<Result<(), Failure>> {
        Some(print_table(engine, &self.name, json))
    }

    fn text(&self, answer: &Value) -> String {
        text(items(&answer["entries"]))
    }
}

/// The refusal for a table that does not exist.
pub(super) fn no_table(name: &str) -> Refusal {
    let message = format!("there is no table {name}; `towpath ctl show tables` lists the tables");
    Refusal::new(Code::NotFound, message)
}

fn discarded(table: &str) -> String {
    format!(
        "the listing of table {table} is incomplete: the engine has discarded it, because other listings followed or the output was not \
         read for a minute; list it again"
    )
}

/// Why output ended.
pub(super) enum Stop {
    Engine(Failure),
    Output(io::Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Engine(failure)
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Lets `write` write to standard output.
pub(super) fn print(
    engine: &Engine,
    write: impl FnOnce(&mut dyn Write) -> Result<(), Stop>,
) -> Result<(), Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| Ok(out.flush()?)) {
        Ok(()) => Ok(()),
        Err(Stop::Engine(failure)) => Err(failure),
        // The reader has read enough (`| head`).
        Err(Stop::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(Stop::Output(error)) => {
            Err(Failure::new(exit::FAILED, format!("{}: {error}", engine.socket().display())))
        }
    }
}

/// Prints a table, with `json` as one line.
pub(super) fn print_table(engine: &Engine, table: &str, json: bool) -> Result<(), Failure> {
    print(engine, |out| {
        write_table(engine, table, json, out)?;
        Ok(out.write_all(if json { b"\n" } else { b"" })?)
    })
}

/// Writes the entries of a table, with `json` as one object with its name. One page is in memory at a time.
pub(super) fn write_table(engine: &Engine, table: &str, json: bool, out: &mut dyn Write) -> Result<(), Stop> {
    let (mut from, mut version, mut comma) = (Some(0), None, "");
    while let Some(page) = from {
        let request = ShowTable { name: table.to_owned(), from: page, version };
        let answer = engine.ask(&name(ShowTable::WORDS), request, ShowTable::ANSWER)?;
        if page == 0 && json {
            write!(out, "{{\"entries\":[")?;
        }
        version = answer["version"].as_u64();
        for entry in items(&answer["entries"]) {
            match json {
                true => write!(out, "{}{entry}", std::mem::replace(&mut comma, ","))?,
                false => out.write_all(text(std::slice::from_ref(entry)).as_bytes())?,
            }
        }
        from = answer["next"].as_u64();
    }
    if json {
        write!(out, "],\"name\":{}}}", json!(table))?;
    }
    Ok(())
}

/// Entries as ipfw prints them.
pub(super) fn text(entries: &[Value]) -> String {
    let line = |entry: &Value| {
        let [key, value] = [0, 1].map(|at| entry[at].as_str().unwrap_or_default());
        format!("{key} {value}\n")
    };
    entries.iter().map(line).collect()
}
