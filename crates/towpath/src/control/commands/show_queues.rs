//! `towpath ctl show queues`

use std::path::Path;

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_engine::QueueSnapshot;

use super::super::command::{Context, Handled, Query, Reply};
use super::super::query::Target;
use super::super::text::{cell, columns, items, nonzero, table};
use crate::metrics::Layout;
use crate::report;

/// The queues: attached inspectors, frames that they have, and the fate of all frames
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowQueues {}

impl Query for ShowQueues {
    const WORDS: &'static str = "show queues";
    const ANSWER: &'static str = "queues";

    fn handle(self, context: &Context<'_>) -> Handled {
        let endpoints = context.endpoints.clone();
        context.query(queues, move |parts| {
            let object = |queue: QueueSnapshot| {
                let socket = endpoints.path(queue.number);
                object(queue, socket.as_deref())
            };
            let queues: Vec<Value> = merge(parts).into_iter().map(object).collect();
            Ok(Reply::Answer(Self::ANSWER, json!({ "queues": queues })))
        })
    }

    fn text(&self, answer: &Value) -> String {
        let queues = items(&answer["queues"]);
        if queues.is_empty() {
            return "no queues\n".to_owned();
        }
        let spec = [
            ("queue", "number"),
            ("inspectors", "inspectors"),
            ("open", "open"),
            ("high", "high_water"),
            ("frames", "frames"),
            ("passed", "passed"),
            ("dropped", "dropped"),
            ("replaced", "replaced"),
            ("lost", "lost"),
            ("by flow", "by_flow"),
        ];
        let mut rows = columns(&spec, queues);
        rows[0].push("lost by".to_owned());
        for (row, queue) in rows[1..].iter_mut().zip(queues) {
            let lost = queue["lost_by"].as_object().and_then(nonzero);
            row.push(lost.unwrap_or_else(|| cell(&Value::Null)));
        }
        table(&rows)
    }
}

/// The queues of one engine thread.
pub(super) fn queues(target: &mut Target<'_>) -> Vec<QueueSnapshot> {
    target.engine().map_or_else(Vec::new, |engine| engine.queues())
}

/// The queues of all threads, by number.
pub(super) fn merge(parts: Vec<Vec<QueueSnapshot>>) -> Vec<QueueSnapshot> {
    let mut all: Vec<QueueSnapshot> = Vec::new();
    parts.into_iter().for_each(|queues| report::add_queues(&mut all, queues));
    all
}

/// The counters of a queue.
const QUEUE: Layout = Layout { families: &[("lost", "lost_by")], renamed: &[], moved: &[], hidden: &[] };

/// A queue as an object: its socket, if the configuration names one; the counters; `lost` with its reasons in `lost_by`; the attached inspectors, and why one was detached.
fn object(queue: QueueSnapshot, socket: Option<&Path>) -> Value {
    let mut object: Map<String, Value> = QUEUE.object(&queue.stats);
    object.insert("number".to_owned(), queue.number.into());
    object.insert("socket".to_owned(), json!(socket));
    object.insert("lost".to_owned(), queue.stats.lost().into());
    object.insert("inspectors".to_owned(), queue.inspectors.into());
    object.insert("trouble".to_owned(), json!(queue.trouble));
    object.into()
}
