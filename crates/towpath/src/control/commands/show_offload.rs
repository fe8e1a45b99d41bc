//! `towpath ctl show offload`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use crate::metrics::{self, Layout};

/// The flows whose packets the kernel forwards: entries, packets, and why others took the path through the engine
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowOffload {}

/// The packets that the kernel did not forward, and the flows without an entry, are in separate objects.
const BY_REASON: Layout = Layout {
    families: &[("missed", "missed"), ("not_offloaded", "not_offloaded")],
    renamed: &[],
    moved: &[],
    hidden: &[],
};

impl Query for ShowOffload {
    const WORDS: &'static str = "show offload";
    const ANSWER: &'static str = "offload";

    fn handle(self, context: &Context<'_>) -> Handled {
        let none = || {
            Refusal::new(
                Code::NotFound,
                "this engine offloads no flows: its configuration has no [offload], or its log says why it cannot",
            )
        };
        let offload = context.ruleset()?.offload().ok_or_else(none)?;
        let shown = offload.show().map_err(|error| Refusal::new(Code::NotFound, error.to_string()))?;
        let mut object = metrics::json(&shown.stats);
        object.extend(BY_REASON.object(&shown.refused));
        object.extend(BY_REASON.object(&shown.path));
        object.insert("epoch".to_owned(), shown.epoch.into());
        object.insert("paused".to_owned(), shown.paused.into());
        Ok(Reply::Answer(Self::ANSWER, json!({ "offload": object })))
    }

    fn text(&self, answer: &Value) -> String {
        let mut text = String::new();
        for (name, value) in answer["offload"].as_object().into_iter().flatten() {
            match value.as_object() {
                Some(reasons) => {
                    text += &format!("{}\n", name.replace('_', " "));
                    for (reason, count) in reasons {
                        text += &format!("  {:<18}{count:>16}\n", reason.replace('_', " "));
                    }
                }
                None => text += &format!("{:<20}{value:>16}\n", name.replace('_', " ")),
            }
        }
        text
    }
}
