//! `towpath ctl show states`, and the records of states and events.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_gate::state::{Cursor, Kind, Listed};

use super::super::client::{Engine, Failure};
use super::super::command::{Context, Handled, Query, Reply, name};
use super::super::protocol::{Code, Refusal};
use super::super::state_filter::StateFilter;
use super::super::text::items;
use super::paging;
use crate::ruleset_manager::{self, StateLine};

/// The dynamic states, as ipfw lists them: all, or those that match the options
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowStates {
    /// Cursor of the first state of the page.
    #[arg(skip)]
    #[serde(default)]
    from: u64,
    /// With the details of `ipfw -v`.
    #[arg(skip)]
    #[serde(default)]
    verbose: bool,
    #[command(flatten)]
    #[serde(default, skip_serializing_if = "StateFilter::is_empty")]
    filter: StateFilter,
}

impl Query for ShowStates {
    const WORDS: &'static str = "show states";
    const ANSWER: &'static str = "states";

    fn handle(self, context: &Context<'_>) -> Handled {
        let ruleset = context.ruleset()?;
        let filter = self.filter.compile().map_err(|error| Refusal::new(Code::Invalid, error))?;
        let wanted = |state: &Listed, rule, name: &str| filter.takes(state, rule, name);
        let (lines, next) =
            ruleset.states_where(Cursor::from_bits(self.from), paging::PAGE, self.verbose, wanted);
        let states: Vec<State> = lines.into_iter().map(State::from).collect();
        Ok(Reply::Answer(Self::ANSWER, json!({ "states": states, "next": next.map(Cursor::to_bits) })))
    }

    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        Ok(json!({ "states": filtered(engine, self.verbose, &self.filter)? }))
    }

    fn text(&self, answer: &Value) -> String {
        text(items(&answer["states"]))
    }
}

/// All states. A state that exists throughout is listed once.
pub(super) fn states(engine: &Engine, verbose: bool) -> Result<Vec<Value>, Failure> {
    filtered(engine, verbose, &StateFilter::default())
}

fn filtered(engine: &Engine, verbose: bool, filter: &StateFilter) -> Result<Vec<Value>, Failure> {
    let ask = |from| {
        let request = ShowStates { from, verbose, filter: filter.clone() };
        engine.ask(&name(ShowStates::WORDS), request, ShowStates::ANSWER)
    };
    paging::all(ask, "states")
}

/// States as ipfw's `-D list` prints them.
pub(super) fn text(states: &[Value]) -> String {
    let mut text = format!("## Dynamic rules ({}):\n", states.len());
    for state in states {
        text += state["text"].as_str().unwrap_or_default();
        text.push('\n');
    }
    text
}

/// A dynamic state. Pairs are forward and reverse.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct State {
    /// Number of its rule.
    pub rule: u32,
    /// `state`, `limit` or `parent`.
    pub kind: &'static str,
    /// Its flow name.
    pub name: String,
    /// Its zone.
    pub zone: u16,
    /// IP protocol.
    pub proto: u8,
    /// Source address of the first packet.
    pub src: String,
    /// Source port of the first packet. 0 if the protocol has no ports.
    pub src_port: u16,
    /// Destination address of the first packet.
    pub dst: String,
    /// Destination port of the first packet.
    pub dst_port: u16,
    /// Packets.
    pub packets: [u64; 2],
    /// Bytes.
    pub bytes: [u64; 2],
    /// Remaining lifetime in seconds.
    pub expire: u64,
    /// Its rule was deleted.
    pub orphaned: bool,
    /// Number of states that a parent counts.
    pub count: u32,
    /// As ipfw prints it.
    pub text: String,
}

impl From<StateLine> for State {
    fn from(line: StateLine) -> Self {
        let StateLine { rule, text, parts, name } = line;
        let Listed { kind, orphaned, flow, packets, bytes, .. } = *parts;
        let (src, dst) = flow.ends.addresses();
        let (kind, count) = match kind {
            Kind::State => ("state", 0),
            Kind::Limit => ("limit", 0),
            Kind::Parent { count } => ("parent", count),
        };
        Self {
            rule,
            kind,
            name,
            zone: flow.zone,
            proto: flow.proto,
            src: src.to_string(),
            src_port: flow.src_port,
            dst: dst.to_string(),
            dst_port: flow.dst_port,
            packets,
            bytes,
            expire: parts.seconds(),
            orphaned,
            count,
            text,
        }
    }
}

/// An event of a state, or of the table of states.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Event {
    /// Nanoseconds of the engine's clock, which starts with the engine.
    pub at: u64,
    /// `created`, `expired`, `removed`, `evicted`, `nearly full`, `no longer full`.
    pub what: &'static str,
    /// The state at that time. `None` for an event of the table.
    pub state: Option<State>,
}

impl From<ruleset_manager::Event> for Event {
    fn from(event: ruleset_manager::Event) -> Self {
        Self { at: event.at, what: event.what, state: event.state.map(State::from) }
    }
}
