//! `towpath ctl metrics`

use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};
use towpath_engine::QueueSnapshot;
use towpath_engine::queue::VERDICT_TIME;
use towpath_metrics::{Kind, Metric, Unit};
use towpath_ring::reaper::Reaper;

use super::super::client::{Engine, Failure};
use super::super::command::{
    Access, Command, Context, Handled, NoMembers, Pending, Progress, Reply, Request, Stream, parse,
};
use super::super::endpoints::ServerStats;
use super::super::protocol::{Refusal, answer};
use super::super::query::Target;
use super::{show_ports, show_queues, show_stats};
use crate::logging;
use crate::metrics::{ProcessStats, RuleStats, Samples, thread};

/// Maximum number of rules in the text: a bound for the number of labels.
const RULES: usize = 1000;

/// Bytes of text of one answer.
const PART: usize = 256 << 10;

/// Print all counters as OpenMetrics text
///
/// Packets and bytes, drops by reason, rules (the first 1000), queues, channels, states, muxes, zero-copy sends and helper threads.
#[derive(Debug, Args)]
pub(super) struct ShowMetrics {}

pub(super) const COMMAND: Command = Command::other::<ShowMetrics>(
    "metrics",
    &[Request { name: "metrics", access: Access::Read, handle }],
    |engine, _| metrics(engine),
);

/// Packets that a port did not transmit. They are in the same family as the driver's losses.
const PORT_DROPS: Metric = Metric {
    group: "port",
    name: "dropped",
    stem: "dropped",
    kind: Kind::Counter,
    unit: Unit::Packets,
    label: None,
    help: "Packets that passed and were not transmitted.",
    family_help: None,
};

/// The counters of one engine thread.
struct Part {
    samples: Samples,
    queues: Vec<QueueSnapshot>,
    ports: Option<Vec<show_ports::Port>>,
}

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let NoMembers {} = parse(body)?;
    let text = |samples: Samples| Reply::Stream(Box::new(Text { text: samples.into_text(), sent: 0 }));
    Ok(Reply::Pending(collect(context, text)?))
}

/// Collects all counters and passes them to `done`.
pub(crate) fn collect<R: 'static>(
    context: &Context<'_>,
    done: impl FnOnce(Samples) -> R + Send + 'static,
) -> Result<Box<dyn Pending<R>>, Refusal> {
    let (ruleset, control) = (context.ruleset.map(Arc::clone), context.control);
    let endpoints = context.endpoints.clone();
    context.gather(
        || part,
        move |parts| {
            let mut samples = Samples::default();
            let ServerStats { metrics, reloads, upgrades, ipfix, events, fleet, group, group_tables, .. } =
                endpoints.servers();
            samples.add(&[], &control);
            samples.add(&[], &metrics);
            samples.add(&[], &reloads);
            samples.add(&[], &upgrades);
            samples.add(&[], &ipfix);
            samples.add(&[], &events);
            samples.add(&[], &fleet);
            samples.add(&[], &group);
            samples.add(&[], &group_tables);
            samples.add(&[], &ProcessStats::now());
            samples.add(&[], &logging::stats());
            samples.add(&[], &Reaper::shared().stats());
            for (queue, stats) in endpoints.get() {
                samples.add(&[("queue", &queue.to_string())], &stats);
            }
            let (mut queues, mut ports) = (Vec::new(), Vec::new());
            for part in parts {
                samples.merge(part.samples);
                queues.push(part.queues);
                ports.push(part.ports);
            }
            for port in show_ports::merge(ports).into_iter().flatten() {
                samples.add(&[("port", &port.name)], &port.stats);
                samples.add(&[("port", &port.name)], &port.tx.events);
                for (reason, count) in port.tx.drops.iter() {
                    samples.add_value(&[("port", &port.name), ("reason", reason.name())], &PORT_DROPS, count);
                }
            }
            for queue in show_queues::merge(queues) {
                let number = queue.number.to_string();
                samples.add(&[("queue", &number)], &queue.stats);
                samples.add(&[("queue", &number)], &queue.flow_verdicts);
                samples.add_histogram(&[("queue", &number)], &VERDICT_TIME, &queue.verdict_time);
            }
            if let Some(ruleset) = ruleset {
                samples.add(&[], &ruleset.state_counters());
                samples.add(&[], &ruleset.gate_counters());
                samples.add(&[], &ruleset.snapshot_stats());
                if let Some(Ok(shown)) = ruleset.offload().map(|offload| offload.show()) {
                    samples.add(&[], &shown.stats);
                    samples.add(&[], &shown.refused);
                    samples.add(&[], &shown.path);
                }
                for rule in ruleset.rules().into_iter().take(RULES) {
                    let stats = RuleStats { packets: rule.packets, bytes: rule.bytes };
                    let (number, set) = (rule.number.to_string(), rule.set.to_string());
                    samples.add(&[("rule", &number), ("set", &set)], &stats);
                }
            }
            Ok(done(samples))
        },
    )
}

/// Collects the counters of one engine thread.
fn part(target: &mut Target<'_>) -> Part {
    let mut samples = Samples::default();
    if let Some((totals, replies, _)) = show_stats::stats(target) {
        samples.add(&[], &totals.stats);
        samples.add(&[], &totals.drops);
        samples.add(&[], &replies);
    }
    let name = std::thread::current();
    if let Some(name) = name.name() {
        samples.add(&[("thread", name)], &thread::this());
    }
    let ports = target.ports().map(<[_]>::to_vec);
    if let Some(pool) = target.pool() {
        pool.metrics(&mut samples);
    }
    if let Some(engine) = target.engine() {
        for channel in engine.channels() {
            let (number, queue) = (channel.channel.to_string(), channel.queue.to_string());
            samples.add(&[("channel", &number), ("queue", &queue)], &channel.verdicts);
            if let Some(about) = channel.about {
                samples.add(&[("channel", &number), ("queue", &queue)], &about.stats);
            }
        }
    }
    Part { samples, queues: show_queues::queues(target), ports }
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
