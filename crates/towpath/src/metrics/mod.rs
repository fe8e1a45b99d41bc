//! Renders groups of counters: as JSON, as text and as OpenMetrics text.
//!
//! Each counter is described once, where it is kept ([`towpath_metrics::metrics!`]). A new counter appears in every output.

pub mod endpoint;
mod openmetrics;
mod process;
mod tables;
pub(crate) mod thread;

use serde_json::{Map, Value};
use towpath_metrics::{Kind, Metric, Metrics, Unit, metrics};

pub use self::endpoint::EndpointStats;
pub use self::openmetrics::Samples;
pub use self::process::ProcessStats;
pub use self::tables::{TABLES, Table};

metrics! {
    /// Counters of a rule.
    pub struct RuleStats in "rule" {
        /// Packets for which the rule's action was carried out.
        pub packets: counter packets,
        /// Bytes of these packets.
        pub bytes: counter bytes,
    }
}

metrics! {
    /// Reloads of configuration and rules.
    pub struct ReloadStats in "reload" {
        /// Reloads that were applied.
        pub applied: counter events as "reloads": "Reloads of configuration and rules, by result." (result = "applied"),
        /// Reloads that were refused because of an error. The engine kept its configuration and rules.
        pub refused: counter events as "reloads" (result = "refused"),
        /// 1 if the last reload was refused.
        pub last_refused: gauge events,
    }
}

metrics! {
    /// Upgrades of the engine.
    pub struct EngineUpgradeStats in "upgrade" {
        /// Time without reception at the upgrade that started this process; 0 if it was not started by an upgrade.
        pub pause: gauge nanoseconds,
        /// Upgrades that failed or were refused; this process continued.
        pub failed: counter events,
    }
}

const fn duration(group: &'static str, name: &'static str, help: &'static str) -> Metric {
    let (kind, unit) = (Kind::Histogram, Unit::Nanoseconds);
    Metric { group, name, stem: name, kind, unit, label: None, help, family_help: None }
}

/// Time of messages in a mux.
pub const MESSAGE_WAIT: Metric = duration("mux", "message_wait", "Time that messages waited for a worker.");

/// Time of zero-copy sends.
pub const COMPLETION_TIME: Metric = duration(
    "send",
    "completion_time",
    "Time from a call with MSG_ZEROCOPY to the reading of its notification, rounded up.",
);

/// How a group is rendered as a JSON object where that differs from names and values.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    /// The counters of the families `(stem, key)` are in separate objects, under `key`. Their keys are the values of their labels.
    pub families: &'static [(&'static str, &'static str)],
    /// Counters `(name, key)` that have another key.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Counters `(name, key)` that are in the object `key`.
    pub moved: &'static [(&'static str, &'static str)],
    /// Counters that the object does not have.
    pub hidden: &'static [&'static str],
}

/// The value for `name` in a list of pairs.
fn find(pairs: &[(&'static str, &'static str)], name: &str) -> Option<&'static str> {
    pairs.iter().find(|(own, _)| *own == name).map(|(_, value)| *value)
}

impl Layout {
    /// The key of a counter.
    pub fn key(&self, metric: &Metric) -> &'static str {
        let label = metric.label.filter(|_| find(self.families, metric.stem).is_some());
        find(self.renamed, metric.name).or(label.map(|(_, label)| label)).unwrap_or(metric.name)
    }

    /// The counters as an object.
    ///
    /// # Panics
    ///
    /// Panics if a key names both a counter and an object.
    pub fn object(&self, group: &dyn Metrics) -> Map<String, Value> {
        let mut object = Map::new();
        for (metric, value) in group.each().filter(|(metric, _)| !self.hidden.contains(&metric.name)) {
            let family = find(self.families, metric.stem).filter(|_| metric.label.is_some());
            let key = self.key(metric);
            let object = match family.or_else(|| find(self.moved, metric.name)) {
                Some(inner) => {
                    let inner = object.entry(inner).or_insert_with(|| Map::new().into());
                    inner.as_object_mut().expect("a key names either a counter or an object")
                }
                None => &mut object,
            };
            object.insert(key.to_owned(), value.into());
        }
        object
    }
}

/// The counters as an object: name and value.
pub fn json(group: &dyn Metrics) -> Map<String, Value> {
    Layout::default().object(group)
}

/// The word for a counter in text: the value of its label, or its name.
pub fn word(metric: &Metric) -> String {
    metric.label.map_or(metric.name, |(_, label)| label).replace('_', " ")
}

/// All counters, in the order of the table: `2 tcp, 0 udp`.
pub fn listing(group: &dyn Metrics) -> String {
    group.each().map(|(metric, value)| format!("{value} {}", word(metric))).collect::<Vec<_>>().join(", ")
}

/// The counters that are not 0 and that `wanted` selects: `2 full, 1 not connected`. Gauges are left out.
pub fn nonzero(group: &dyn Metrics, wanted: impl Fn(&Metric) -> bool) -> String {
    let counters = group.each().filter(|(metric, value)| *value > 0 && metric.kind == Kind::Counter);
    let counters = counters.filter(|(metric, _)| wanted(metric));
    counters.map(|(metric, value)| format!("{value} {}", word(metric))).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    metrics! {
        struct Queue in "test_queue" {
            /// Frames.
            frames: counter frames,
            /// Late.
            late_frames: counter frames as "lost": "Frames lost, by reason." (reason = "no_time"),
            /// Full.
            full: counter frames as "lost" (reason = "no_room"),
            /// Open.
            open: gauge frames,
        }
    }

    #[test]
    fn objects_have_every_counter_that_is_not_hidden() {
        let queue = Queue { frames: 4, late_frames: 0, full: 2, open: 1 };
        assert_eq!(Value::from(json(&queue)), json!({ "frames": 4, "late_frames": 0, "full": 2, "open": 1 }));
        let layout = Layout {
            families: &[("lost", "lost_by")],
            renamed: &[("late_frames", "late")],
            moved: &[("open", "now")],
            hidden: &["frames"],
        };
        let expected = json!({ "lost_by": { "late": 0, "no_room": 2 }, "now": { "open": 1 } });
        assert_eq!(Value::from(layout.object(&queue)), expected);
        assert_eq!(nonzero(&queue, |_| true), "4 frames, 2 no room");
    }
}
