//! One reading of the engine. No IO.

use std::collections::BTreeMap;

use serde_json::Value;

/// A part of a sample: one or several requests of the control protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Stats,
    Ports,
    Queues,
    Rings,
    Mux,
    Rules,
}

/// One reading of the engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Nanoseconds of a monotonic clock.
    pub(super) at: u64,
    /// What the engine answered to each part, or why it has nothing of that kind.
    pub(super) parts: BTreeMap<Part, Result<Value, String>>,
    /// States, if they were read: a part of all.
    pub(super) flows: Option<Result<FlowPart, String>>,
}

/// States of a sample.
#[derive(Clone, Debug, Default)]
pub(super) struct FlowPart {
    pub(super) states: Vec<Value>,
    /// The end of all states was reached.
    pub(super) swept: bool,
}

impl Sample {
    /// The answer of a part; `Null` without one.
    pub(super) fn part(&self, part: Part) -> &Value {
        match self.parts.get(&part) {
            Some(Ok(value)) => value,
            _ => &Value::Null,
        }
    }

    /// Why the engine has nothing of this kind.
    pub(super) fn refusal(&self, part: Part) -> Option<&str> {
        match self.parts.get(&part) {
            Some(Err(refusal)) => Some(refusal),
            _ => None,
        }
    }
}

/// Seconds between two times; `None` if there are none.
pub(super) fn seconds(before: u64, now: u64) -> Option<f64> {
    let nanos = now.checked_sub(before).filter(|nanos| *nanos > 0)?;
    Some(nanos as f64 / 1e9)
}
