//! `towpath ctl show top`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_gate::state::Top;

use super::super::command::{Context, Handled, Query, Reply};
use super::super::text::items;
use super::show_states::{self, State};

/// Default of `count`.
const COUNT: u64 = 10;
/// Maximum of `count`.
const COUNT_MAX: u64 = 100;

/// The states with the most traffic
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowTop {
    /// Number of states, at most 100
    #[arg(long, value_name = "N", default_value = "10")]
    #[serde(default)]
    count: u64,
    /// Sort by bytes (default: by packets)
    #[arg(long)]
    #[serde(default)]
    bytes: bool,
}

impl Query for ShowTop {
    const WORDS: &'static str = "show top";
    const ANSWER: &'static str = "top";

    fn handle(self, context: &Context<'_>) -> Handled {
        let count = if self.count == 0 { COUNT } else { self.count.min(COUNT_MAX) };
        let by = if self.bytes { Top::Bytes } else { Top::Packets };
        let lines = context.ruleset()?.top(count as usize, by);
        let states: Vec<State> = lines.into_iter().map(State::from).collect();
        Ok(Reply::Answer(Self::ANSWER, json!({ "states": states })))
    }

    fn text(&self, answer: &Value) -> String {
        show_states::text(items(&answer["states"]))
    }
}
