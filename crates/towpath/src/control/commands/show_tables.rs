//! `towpath ctl show tables`, and `table T info`.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{Context, Handled, Query, Reply, name};
use super::super::text::{columns, items, table};
use crate::exit;

/// The tables, their types and the number of their entries
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowTables {}

impl Query for ShowTables {
    const WORDS: &'static str = "show tables";
    const ANSWER: &'static str = "tables";

    fn handle(self, context: &Context<'_>) -> Handled {
        let tables = context.ruleset()?.tables();
        let table = |(name, kind, entries)| json!({ "name": name, "kind": kind, "entries": entries });
        let tables: Vec<Value> = tables.into_iter().map(table).collect();
        Ok(Reply::Answer(Self::ANSWER, json!({ "tables": tables })))
    }

    fn text(&self, answer: &Value) -> String {
        match items(&answer["tables"]) {
            [] => "no tables\n".to_owned(),
            tables => table(&columns(&[("type", "kind"), ("entries", "entries"), ("table", "name")], tables)),
        }
    }
}

/// One table, or all of them for the name `all`.
pub(super) fn info(engine: &Engine, wanted: &str, json: bool) -> Result<String, Failure> {
    let mut answer = engine.ask(&name(ShowTables::WORDS), ShowTables {}, ShowTables::ANSWER)?;
    if wanted != "all"
        && let Some(tables) = answer["tables"].as_array_mut()
    {
        tables.retain(|table| table["name"] == wanted);
        if tables.is_empty() {
            return Err(Failure::new(exit::FAILED, format!("there is no table {wanted}")));
        }
    }
    Ok(if json { format!("{answer}\n") } else { ShowTables {}.text(&answer) })
}
