//! Explanations of walks, as JSON and as text: `towpath explain`, and the request `explain` of the control socket.

use serde_json::{Value, json};
use towpath_engine::ForwardMode;
use towpath_gate::{
    ActionOutcome, Dir, DropReason, ExplainedRule, Explanation, PortId, Reject, Routes, RuleOutcome, Step,
    Walk,
};
use towpath_wire::Packet;

use crate::control::text::items;

/// One walk of the rules, with direction in or out.
#[derive(Clone, Debug)]
pub struct Walked {
    /// Direction.
    pub dir: Dir,
    /// Name of the port that receives or transmits the packet.
    pub port: String,
    /// The rules.
    pub explanation: Explanation,
    /// The packet's end in this walk. That of the explanation, unless states decide otherwise.
    pub verdict: Step,
}

/// Returns the output port of a packet that ended a walk with direction in, if it walks the rules with direction out: its bridge says
/// so, or a route matches.
pub fn way_out(
    mode: ForwardMode,
    routes: &Routes,
    walk: &Walk,
    packet: &Packet<'_>,
    step: Step,
) -> Option<PortId> {
    let hop = match step {
        Step::Forward(hop, _) => Some(hop),
        Step::Pass | Step::Inspect(_) => None,
        _ => return None,
    };
    if walk.dir() != Dir::In {
        return None;
    }
    match mode {
        ForwardMode::Bridge { xmit, walk_out } => walk_out.then_some(xmit),
        ForwardMode::Back(_) | ForwardMode::Nowhere => None,
        ForwardMode::Routes | ForwardMode::Router => {
            let (_, destination) = packet.flow()?.ends.addresses();
            // Only a router has next hops.
            let to = hop.filter(|_| mode == ForwardMode::Router).unwrap_or(destination);
            routes.lookup(to).map(|(route, _)| route.port)
        }
    }
}

/// Returns walks and notes as one object.
pub fn json(walks: &[Walked], notes: &[String]) -> Value {
    json!({ "walks": walks.iter().map(Walked::json).collect::<Vec<_>>(), "notes": notes })
}

/// Returns the text of the object that [`json()`] returns.
pub fn text(explained: &Value) -> String {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut text = String::new();
    for walk in items(&explained["walks"]) {
        let (dir, port) = (word(&walk["direction"]), word(&walk["port"]));
        text += &format!("{dir} {port}\n");
        for step in items(&walk["steps"]) {
            let number = step["number"].as_u64().unwrap_or_default();
            text += &format!("{number:05} {}\n      {}\n", word(&step["text"]), word(&step["why"]));
        }
        text += &format!("{dir} {port}: {}\n", word(&walk["verdict"]));
    }
    text.extend(items(&explained["notes"]).iter().map(|note| format!("note: {}\n", word(note))));
    text
}

impl Walked {
    /// Returns true if the packet passes in this walk.
    pub fn passes(&self) -> bool {
        !matches!(self.verdict, Step::Drop(_) | Step::Reject(_))
    }

    fn json(&self) -> Value {
        let steps = self.explanation.steps.iter().map(|ExplainedRule { number, set, text, outcome, .. }| {
            json!({ "number": number, "set": set, "text": text, "outcome": word(outcome), "why": said(outcome) })
        });
        json!({
            "direction": direction(self.dir),
            "port": self.port,
            "steps": steps.collect::<Vec<_>>(),
            "verdict": verdict(self.verdict),
            "passes": self.passes(),
        })
    }
}

fn direction(dir: Dir) -> &'static str {
    match dir {
        Dir::In => "in",
        Dir::Out => "out",
    }
}

/// The outcome's name in `--json`.
fn word(outcome: &RuleOutcome) -> &'static str {
    match outcome {
        RuleOutcome::Disabled => "disabled",
        RuleOutcome::Failed { .. } => "failed",
        RuleOutcome::NoState { .. } => "no-state",
        RuleOutcome::State { .. } => "state",
        RuleOutcome::OwnState { .. } => "own-state",
        RuleOutcome::Refused { .. } => "refused",
        RuleOutcome::Matched { .. } => "matched",
        RuleOutcome::Deferred { .. } => "deferred",
        RuleOutcome::Unfit { .. } => "unfit",
        RuleOutcome::Invalid { .. } => "invalid",
        RuleOutcome::CannotMakeState => "cannot-make-state",
    }
}

/// The outcome as a sentence for text output.
fn said(outcome: &RuleOutcome) -> String {
    match outcome {
        RuleOutcome::Disabled => "skipped: its set is disabled".to_owned(),
        RuleOutcome::Failed { test, packet } if packet.is_empty() => format!("no: `{test}` does not hold"),
        RuleOutcome::Failed { test, packet } => {
            format!("no: `{test}` does not hold, the packet has {packet}")
        }
        RuleOutcome::NoState { name } => format!("no state {name} for this flow"),
        RuleOutcome::State { state, related: false, parent, lead } => {
            format!("found the state `{}` of rule {parent}: {}", state.trim(), led(lead))
        }
        RuleOutcome::State { state, related: true, parent, lead } => {
            format!("an error about the state `{}` of rule {parent}: {}", state.trim(), led(lead))
        }
        RuleOutcome::OwnState { name, parent, lead } => {
            format!("found the state {name} that this packet made at rule {parent}: {}", led(lead))
        }
        RuleOutcome::Refused { name, reason } => {
            format!("matches, but no state {name} can be made ({reason}): drop")
        }
        RuleOutcome::Matched { makes_state: Some(name), lead } => {
            format!("matches, and makes a state {name}: {}", led(lead))
        }
        RuleOutcome::Matched { makes_state: None, lead } => format!("matches: {}", led(lead)),
        RuleOutcome::Deferred { makes_state } => {
            format!("matches, makes a state {makes_state}, and leaves the action to later packets")
        }
        RuleOutcome::Unfit { state, parent } => {
            format!("no: the packet does not fit the state `{}` of rule {parent}", state.trim())
        }
        RuleOutcome::Invalid { name } => {
            format!("matches, but the packet does not fit the state {name} of its flow: drop")
        }
        RuleOutcome::CannotMakeState => {
            "matches, but no state can be made for a frame that is not IP: drop".to_owned()
        }
    }
}

fn led(lead: &ActionOutcome) -> String {
    match lead {
        ActionOutcome::On(number) => format!("on with rule {number}"),
        ActionOutcome::End(step) => verdict(*step),
        ActionOutcome::Through(step, number) => {
            format!("{}, then on with rule {number}", verdict(*step))
        }
    }
}

/// Returns a verdict as text.
pub fn verdict(step: Step) -> String {
    match step {
        Step::Pass => "pass".to_owned(),
        Step::Drop(DropReason::Deny) => "drop".to_owned(),
        Step::Drop(reason) => format!("drop ({})", reason.as_str()),
        Step::Reject(Reject::NoReply(reason)) => format!("reject, no reply: {reason}"),
        Step::Reject(Reject::Unreach { code, .. }) => format!("reject (ICMP unreachable, code {code})"),
        Step::Reject(Reject::Unreach6 { code }) => format!("reject (ICMPv6 unreachable, code {code})"),
        Step::Reject(Reject::TimeExceeded) => "reject (ICMP time exceeded)".to_owned(),
        Step::Reject(Reject::TooBig { .. }) => "reject (ICMPv6 packet too big)".to_owned(),
        Step::Reject(Reject::Reset) => "reject (TCP reset)".to_owned(),
        Step::Reject(Reject::Abort) => "reject (SCTP abort)".to_owned(),
        Step::Inspect(queue) => format!("inspect {queue}"),
        Step::Divert(queue) => format!("divert {queue}"),
        Step::Tee(queue) => format!("tee {queue}"),
        Step::Forward(hop, None) => format!("pass, forward to {hop}"),
        Step::Forward(hop, Some(port)) => format!("pass, forward to {hop} port {port}"),
        Step::Reassemble => "wait for the other fragments".to_owned(),
    }
}
