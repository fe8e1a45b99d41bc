//! Renders groups of counters: as JSON and as OpenMetrics text.
//!
//! Each counter is described once, where it is kept ([`towpath_metrics::metrics!`]). Nothing here names a counter.

mod openmetrics;

use serde_json::{Map, Value};
use towpath_metrics::{Metrics, metrics};

pub use self::openmetrics::Samples;

metrics! {
    /// Counters of a rule.
    pub struct RuleStats in "rule" {
        /// Packets for which the rule's action was carried out.
        pub packets: counter packets,
        /// Bytes of these packets.
        pub bytes: counter bytes,
    }
}

/// The counters as an object: name and value.
pub fn json(group: &impl Metrics) -> Map<String, Value> {
    grouped(group, &[])
}

/// As [`json`]; the counters of the families `(stem, key)` are in objects of their own, under `key`.
pub fn grouped(group: &impl Metrics, families: &[(&str, &str)]) -> Map<String, Value> {
    let mut object = Map::new();
    for (metric, value) in group.values() {
        let family = families.iter().find(|(stem, _)| *stem == metric.stem);
        let object = match family {
            Some((_, key)) => {
                let inner = object.entry(*key).or_insert_with(|| Map::new().into());
                inner.as_object_mut().expect("a key names either a counter or a family")
            }
            None => &mut object,
        };
        object.insert(metric.name.to_owned(), value.into());
    }
    object
}
