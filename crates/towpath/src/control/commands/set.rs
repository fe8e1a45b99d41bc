//! `towpath ctl set`, and ipfw's `set show`.

use clap::Args;
use serde_json::json;
use towpath_gate::rules::RESERVED_SET;

use super::super::client::{Engine, Failure};
use super::super::command::Command;
use super::change::{self, Words};
use super::show_rules::{self, Columns};
use crate::exit;

/// Enable, disable, move or swap sets: `set disable 4 enable 5`; list the sets that have rules, or the rules of one: `set show`, `set 4 show`
#[derive(Debug, Args)]
pub(super) struct Set {
    #[command(flatten)]
    words: Words,
}

pub(super) const COMMAND: Command = Command::other::<Set>("set", &[], |engine, matches| {
    let words = change::words(matches);
    let (words, json) = words.of("set");
    match words[..] {
        ["set", "show" | "list"] => show(engine, json),
        ["set", number, word @ ("show" | "list")] => {
            show_rules_of(engine, number, Columns { counters: word == "show", ..Columns::default() }, json)
        }
        _ => change::command(engine, words.join(" "), false, json),
    }
});

/// The rules of one set.
pub(super) fn show_rules_of(
    engine: &Engine,
    number: &str,
    columns: Columns,
    json: bool,
) -> Result<String, Failure> {
    let Some(set) = number.parse::<u8>().ok().filter(|set| *set <= RESERVED_SET) else {
        return Err(Failure::new(
            exit::USAGE,
            format!("`{number}` is not a set; sets are 0 to {RESERVED_SET}"),
        ));
    };
    let mut rules = show_rules::rules(engine)?;
    rules.retain(|rule| rule["set"] == set);
    Ok(if json { format!("{}\n", json!({ "rules": rules })) } else { show_rules::text(&rules, columns) })
}

/// The sets that have rules.
pub(super) fn show(engine: &Engine, json: bool) -> Result<String, Failure> {
    let rules = show_rules::rules(engine)?;
    let mut sets: Vec<u64> = rules.iter().filter_map(|rule| rule["set"].as_u64()).collect();
    sets.sort_unstable();
    sets.dedup();
    Ok(match json {
        true => format!("{}\n", json!({ "sets": sets })),
        false => sets.iter().map(|set| format!("set {set}\n")).collect(),
    })
}
