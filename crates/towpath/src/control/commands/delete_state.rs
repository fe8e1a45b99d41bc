//! `towpath ctl delete state`: ends the state of one flow.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_gate::state::{Cursor, Listed};

use super::super::client::{Engine, Failure};
use super::super::command::{Access, Context, Handled, Reply, Request, json_behind, parse};
use super::super::protocol::{Code, Refusal};
use super::super::state_filter::StateMatch;
use super::paging;
use super::show_states::State;
use crate::exit;

pub(super) const REQUESTS: &[Request] = &[Request { name: "delete-state", access: Access::Change, handle }];

/// Removes the states of one flow, in either direction, under all flow names or one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeleteState {
    /// As in a listing, or `PROTOCOL END END [:NAME]`.
    flow: String,
    /// Cursor: one request looks at a bounded number of states.
    #[serde(default)]
    from: u64,
}

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let DeleteState { flow, from } = parse(body)?;
    let ruleset = context.ruleset()?;
    let filter = StateMatch::one_flow(&flow).map_err(|error| Refusal::new(Code::Invalid, error))?;
    let wanted = |state: &Listed, rule, name: &str| filter.takes(state, rule, name);
    let (removed, next) = ruleset.remove_states(Cursor::from_bits(from), wanted);
    let states: Vec<State> = removed.into_iter().map(State::from).collect();
    Ok(Reply::Answer("deleted", json!({ "states": states, "next": next.map(Cursor::to_bits) })))
}

/// `words` are the arguments after `delete state`.
pub(super) fn run(engine: &Engine, words: &[String], json: bool) -> Result<String, Failure> {
    let (words, json) = json_behind(words, json);
    let flow = words.join(" ");
    StateMatch::one_flow(&flow).map_err(|error| Failure::new(exit::USAGE, error))?;
    let states = paging::all(
        |from| engine.ask("delete-state", DeleteState { flow: flow.clone(), from }, "deleted"),
        "states",
    )?;
    if states.is_empty() {
        return Err(Failure::new(exit::FAILED, format!("there is no state of `{flow}`")));
    }
    if json {
        return Ok(format!("{}\n", json!({ "states": states })));
    }
    let lines = states.iter().filter_map(|state| state["text"].as_str());
    Ok(lines.map(|text| format!("- {text}\n")).collect())
}
