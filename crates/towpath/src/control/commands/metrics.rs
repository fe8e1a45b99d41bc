//! `towpath ctl metrics`

use std::sync::Arc;

use clap::Args;
use serde_json::{Map, Value, json};
use towpath_engine::QueueSnapshot;

use super::super::client::{Engine, Failure};
use super::super::command::{Access, Command, Context, Handled, Progress, Reply, Request, Stream, parse};
use super::super::protocol::answer;
use super::super::query::Target;
use super::{show_queues, show_stats};
use crate::metrics::{RuleStats, Samples};

/// Maximum number of rules in the text: a bound for the number of labels.
const RULES: usize = 1000;

/// Bytes of text of one answer.
const PART: usize = 256 << 10;

/// Print all counters as OpenMetrics text
///
/// Packets and bytes, drops by reason, rules (the first 1000), queues, channels, states, muxes and zero-copy sends.
#[derive(Debug, Args)]
pub struct ShowMetrics {}

pub(super) const COMMAND: Command = Command::other::<ShowMetrics>(
    "metrics",
    &[Request { name: "metrics", access: Access::Read, handle }],
    |engine, _| metrics(engine),
);

/// The counters of one engine thread.
struct Part {
    samples: Samples,
    queues: Vec<QueueSnapshot>,
}

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let _: Map<String, Value> = parse(body)?;
    let ruleset = context.ruleset.map(Arc::clone);
    context.query(part, move |parts| {
        let mut samples = Samples::default();
        let mut queues = Vec::new();
        for part in parts {
            samples.merge(part.samples);
            queues.push(part.queues);
        }
        for queue in show_queues::merge(queues) {
            samples.add(&[("queue", &queue.number.to_string())], &queue.stats);
        }
        if let Some(ruleset) = ruleset {
            for rule in ruleset.rules().into_iter().take(RULES) {
                let stats = RuleStats { packets: rule.packets, bytes: rule.bytes };
                let (number, set) = (rule.number.to_string(), rule.set.to_string());
                samples.add(&[("rule", &number), ("set", &set)], &stats);
            }
        }
        Ok(Reply::Stream(Box::new(Text { text: samples.into_text(), sent: 0 })))
    })
}

/// Collects the counters of one engine thread.
fn part(target: &mut Target<'_>) -> Part {
    let mut samples = Samples::default();
    if let Some((totals, replies, _)) = show_stats::stats(target) {
        samples.add(&[], &totals.stats);
        samples.add(&[], &totals.drops);
        samples.add(&[], &replies);
    }
    Part { samples, queues: show_queues::queues(target) }
}

/// Several answers, of which all but the last have `more`.
#[derive(Debug)]
struct Text {
    text: String,
    sent: usize,
}

impl Stream for Text {
    fn produce(&mut self, output: &mut Vec<u8>) -> Progress {
        let rest = &self.text[self.sent..];
        let end = rest.floor_char_boundary(PART);
        let more = end < rest.len();
        output.extend(answer("metrics", json!({ "text": rest[..end], "more": more })));
        self.sent += end;
        if more { Progress::More } else { Progress::Done }
    }
}

fn metrics(engine: &Engine) -> Result<String, Failure> {
    let mut connection = engine.open("metrics", json!({}))?;
    let mut text = String::new();
    loop {
        let answer = connection.answer("metrics")?;
        text += answer["text"].as_str().unwrap_or_default();
        if answer["more"] != true {
            return Ok(text);
        }
    }
}
