//! `towpath ctl show fleet`

use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_fleet::PeerView;

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use super::super::text::items;
use super::fleet::{versions, versions_text};
use crate::fleet::group::GroupView;
use crate::metrics;

/// The group of gates: the peers, whether this gate has their states, and what was sent, merged and refused
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowFleet {}

impl Query for ShowFleet {
    const WORDS: &'static str = "show fleet";
    const ANSWER: &'static str = "fleet";

    fn handle(self, context: &Context<'_>) -> Handled {
        let none =
            || Refusal::new(Code::NotFound, "this engine has no group: its configuration has no [fleet]");
        let view = context.endpoints.fleet().ok_or_else(none)?;
        let peers: Vec<Value> = view.peers.iter().map(peer).collect();
        let syncing = view.syncing.as_ref().map(|sync| json!({ "peer": sync.peer, "states": sync.states }));
        let object = json!({
            "group": view.group,
            "gate": view.gate,
            "status": view.status(),
            "in_step": view.stats.in_step == 1,
            "server": view.server.as_ref().ok(),
            "error": view.server.as_ref().err(),
            "warning": view.warning,
            "syncing": syncing,
            "peers": peers,
            "configuration": context.endpoints.group().map(|group| configuration(&group)),
            "stats": metrics::json(&view.stats),
        });
        Ok(Reply::Answer(Self::ANSWER, json!({ "fleet": object })))
    }

    fn text(&self, answer: &Value) -> String {
        let fleet = &answer["fleet"];
        let word = |name: &str| fleet[name].as_str().unwrap_or_default();
        let mut text = format!("gate {} of group {}: {}\n", word("gate"), word("group"), word("status"));
        for name in ["server", "error", "warning"] {
            if let Some(words) = fleet[name].as_str() {
                text += &format!("{name:<8}{words}\n");
            }
        }
        for peer in items(&fleet["peers"]) {
            let is = |name: &str, yes, no| if peer[name] == true { yes } else { no };
            text += &format!(
                "peer {:<16} {}, {}, {}, lag {} us\n",
                peer["name"].as_str().unwrap_or_default(),
                is("in_step", "in step", "not in step"),
                is("whole", "no gap", "batches are missing"),
                is("same_rules", "same rules", "other rules"),
                peer["lag_ns"].as_u64().unwrap_or(0) / 1000,
            );
        }
        if let Some(problem) = fleet["configuration"]["problem"].as_str() {
            text += &format!("configuration: {problem}\n");
        }
        text += &versions_text(&fleet["configuration"]["gates"]);
        for (name, value) in fleet["stats"].as_object().into_iter().flatten() {
            match value.as_object() {
                Some(reasons) => {
                    text += &format!("{}\n", name.replace('_', " "));
                    for (reason, count) in reasons {
                        text += &format!("  {:<24}{count:>16}\n", reason.replace('_', " "));
                    }
                }
                None => text += &format!("{:<26}{value:>16}\n", name.replace('_', " ")),
            }
        }
        text
    }
}

fn configuration(group: &GroupView) -> Value {
    json!({
        "version": group.stats.version,
        "problem": group.problem,
        "gates": versions(&group.gates),
        "stats": metrics::json(&group.stats),
        "tables": metrics::json(&group.tables),
    })
}

fn peer(peer: &PeerView) -> Value {
    let nanos = |time: Duration| time.as_nanos() as u64;
    json!({
        "name": peer.name,
        "in_step": peer.in_step,
        "whole": peer.whole,
        "same_rules": peer.same_rules,
        "heard_ns": nanos(peer.heard),
        "lag_ns": nanos(peer.lag),
    })
}
