//! `towpath ctl show stats`

use std::sync::Arc;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_engine::{ReplyStats, Totals};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::query::Target;
use crate::logging;
use crate::metrics;
use crate::report::{self, States};

/// The packet counters, the dynamic states, and the re-check of states
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowStats {}

impl Query for ShowStats {
    const WORDS: &'static str = "show stats";
    const ANSWER: &'static str = "stats";

    fn handle(self, context: &Context<'_>) -> Handled {
        let (ruleset, control) = (context.ruleset.map(Arc::clone), context.control);
        context.query(stats, move |parts| {
            let (totals, replies, states) = merge(parts);
            let mut object: Map<String, Value> = metrics::json(&totals.stats);
            object.insert("dropped".to_owned(), totals.dropped().into());
            object.insert("dropped_by".to_owned(), json!(report::dropped_by(&totals.drops)));
            object.insert("waiting".to_owned(), totals.held().into());
            object.insert("replies".to_owned(), metrics::json(&replies).into());
            // The ruleset has the current bounds; an engine thread sees a change with its next packet.
            let states = ruleset.as_ref().map_or(states, |ruleset| States {
                counters: ruleset.state_counters(),
                is_nearly_full: ruleset.is_nearly_full(),
            });
            object.insert("states".to_owned(), states.object().into());
            let gate = ruleset.as_ref().map(|ruleset| ruleset.gate_counters()).unwrap_or_default();
            object.insert("rules".to_owned(), metrics::json(&gate).into());
            let rechecks = ruleset.map(|ruleset| ruleset.rechecks()).unwrap_or_default();
            object.insert("recheck".to_owned(), json!(rechecks));
            object.insert("log".to_owned(), metrics::json(&logging::stats()).into());
            object.insert("control".to_owned(), metrics::json(&control).into());
            Ok(Reply::Answer(Self::ANSWER, json!({ "stats": object })))
        })
    }

    fn text(&self, answer: &Value) -> String {
        let mut text = String::new();
        lines(&mut text, "", answer["stats"].as_object());
        text
    }
}

/// The counters of one engine thread.
pub(super) fn stats(target: &mut Target<'_>) -> Option<(Totals, ReplyStats, States)> {
    let engine = target.engine()?;
    Some((engine.totals(), engine.replies(), States::of(engine.states())))
}

/// The counters of all threads. The threads share the states.
pub(super) fn merge(parts: Vec<Option<(Totals, ReplyStats, States)>>) -> (Totals, ReplyStats, States) {
    let mut all = (Totals::default(), ReplyStats::default(), States::default());
    for (totals, replies, states) in parts.into_iter().flatten() {
        all.0.add(&totals);
        all.1.add(&replies);
        all.2 = states;
    }
    all
}

/// One line for each number; the members of an object are indented below its name. A drop reason has its name as in traces and in the
/// log.
fn lines(text: &mut String, indent: &str, object: Option<&Map<String, Value>>) {
    for (name, value) in object.into_iter().flatten() {
        let name = format!("{indent}{}", name.replace('_', " "));
        match value {
            Value::Object(reasons) if name == "dropped by" => {
                *text += &format!("{name}\n");
                reasons.iter().for_each(|(reason, count)| *text += &format!("  {reason:<27} {count:>16}\n"));
            }
            Value::Object(_) => {
                *text += &format!("{name}\n");
                lines(text, &format!("{indent}  "), value.as_object());
            }
            value => *text += &format!("{name:<16}{value:>16}\n"),
        }
    }
}
