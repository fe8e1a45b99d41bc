//! `towpath ctl set`, and ipfw's `set show`.

use clap::Args;
use serde_json::json;

use super::super::client::{Engine, Failure};
use super::super::command::Command;
use super::change::{self, Words};
use super::show_rules;

/// Enable, disable, move or swap sets: `set disable 4 enable 5`; or list the sets that have rules: `set show`
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
        _ => change::command(engine, words.join(" "), false, json),
    }
});

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
