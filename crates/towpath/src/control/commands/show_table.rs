//! `towpath ctl show table T`, and ipfw's `table T list`.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{Context, Handled, Query, Reply, name};
use super::super::protocol::{Code, Refusal};
use super::super::text::items;
use super::paging;

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
}

impl Query for ShowTable {
    const WORDS: &'static str = "show table";
    const ANSWER: &'static str = "table";

    fn handle(self, context: &Context<'_>) -> Handled {
        let (version, entries) = paging::at_version(context.ruleset()?, |ruleset| ruleset.table(&self.name));
        let entries = entries.ok_or_else(|| no_table(&self.name))?;
        let (entries, next) = paging::page(entries, self.from, |(key, value)| key.len() + value.len() + 10);
        let body = json!({ "name": self.name, "entries": entries, "next": next, "version": version });
        Ok(Reply::Answer(Self::ANSWER, body))
    }

    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        Ok(json!({ "name": self.name, "entries": entries(engine, &self.name)? }))
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

/// All entries of a table: pairs of key and value.
pub(super) fn entries(engine: &Engine, table: &str) -> Result<Vec<Value>, Failure> {
    let ask = |from| {
        let request = ShowTable { name: table.to_owned(), from };
        engine.ask(&name(ShowTable::WORDS), request, ShowTable::ANSWER)
    };
    paging::all(ask, "entries")
}

/// Entries as ipfw prints them.
pub(super) fn text(entries: &[Value]) -> String {
    let line = |entry: &Value| {
        let [key, value] = [0, 1].map(|at| entry[at].as_str().unwrap_or_default());
        format!("{key} {value}\n")
    };
    entries.iter().map(line).collect()
}
