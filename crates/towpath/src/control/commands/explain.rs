//! `towpath ctl explain`, and `towpath explain --live`.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use towpath_gate::PacketSpec;

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use crate::explained;

/// What the rules would do with one packet now; nothing changes
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Explain {
    /// The packet, such as `in lan tcp 10.0.0.1:1234 > 10.0.0.2:22 syn`
    #[arg(value_name = "PACKET", required = true)]
    packet: Vec<String>,
}

impl Query for Explain {
    const WORDS: &'static str = "explain";
    const ANSWER: &'static str = "explained";

    fn handle(self, context: &Context<'_>) -> Handled {
        let invalid = |message: String| Refusal::new(Code::Invalid, message);
        let spec = PacketSpec::parse(&self.packet.join(" ")).map_err(|error| invalid(error.to_string()))?;
        let (walks, note) = context.ruleset()?.explain(&spec).map_err(invalid)?;
        Ok(Reply::Answer(Self::ANSWER, explained::json(&walks, note.as_slice())))
    }

    fn text(&self, answer: &Value) -> String {
        explained::text(answer)
    }
}
