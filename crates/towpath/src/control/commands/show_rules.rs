//! `towpath ctl show rules`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{Context, Handled, Query, Reply, name};
use super::super::text::items;
use super::paging;

/// Every rule with its counters: packets and bytes
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowRules {
    /// Index of the first rule of the page.
    #[arg(skip)]
    #[serde(default)]
    from: u64,
}

impl Query for ShowRules {
    const WORDS: &'static str = "show rules";
    const ANSWER: &'static str = "rules";

    fn handle(self, context: &Context<'_>) -> Handled {
        let ruleset = context.ruleset()?;
        let (version, rules) = paging::at_version(ruleset, |ruleset| ruleset.rules());
        let (rules, next) = paging::page(rules, self.from, |rule| rule.text.len() + 80);
        Ok(Reply::Answer(Self::ANSWER, json!({ "rules": rules, "next": next, "version": version })))
    }

    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        Ok(json!({ "rules": rules(engine)? }))
    }

    fn text(&self, answer: &Value) -> String {
        text(items(&answer["rules"]), true, false)
    }
}

/// All rules, the default rule last.
pub(super) fn rules(engine: &Engine) -> Result<Vec<Value>, Failure> {
    paging::all(|from| engine.ask(&name(ShowRules::WORDS), ShowRules { from }, ShowRules::ANSWER), "rules")
}

/// Rules as ipfw's `show` and `list` print them: with or without counters, with or without sets.
pub(super) fn text(rules: &[Value], counters: bool, sets: bool) -> String {
    let width = |key| rules.iter().map(|rule| rule[key].to_string().len()).max().unwrap_or(0);
    let (packets, bytes) = (width("packets"), width("bytes"));
    let mut text = String::new();
    for rule in rules {
        text += &format!("{:05} ", rule["number"].as_u64().unwrap_or(0));
        if counters {
            text += &format!("{:>packets$} {:>bytes$} ", rule["packets"], rule["bytes"]);
        }
        if sets {
            text += &format!("set {} ", rule["set"]);
        }
        text += rule["text"].as_str().unwrap_or_default();
        text.push('\n');
    }
    text
}
