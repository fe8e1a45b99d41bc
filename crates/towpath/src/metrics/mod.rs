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

metrics! {
    /// Traffic of a port.
    pub struct PortStats in "port" {
        /// Frames received.
        pub received: counter packets,
        /// Bytes received.
        pub received_bytes: counter bytes as "received",
        /// Frames sent.
        pub sent: counter packets,
        /// Bytes sent.
        pub sent_bytes: counter bytes as "sent",
    }
}

metrics! {
    /// Zero-copy sends of a mux.
    pub struct SendStats in "send" {
        /// Bytes sent with MSG_ZEROCOPY.
        pub zerocopy_bytes: counter bytes as "zerocopy",
        /// Bytes sent with MSG_ZEROCOPY that the kernel copied.
        pub copied_bytes: counter bytes as "copied",
        /// Calls of sendmsg(2) with MSG_ZEROCOPY.
        pub calls: counter events,
        /// Calls with MSG_ZEROCOPY that have completed.
        pub completed: counter events,
        /// Calls of sendmsg(2) without MSG_ZEROCOPY.
        pub plain_calls: counter events,
        /// Calls that failed with ENOBUFS.
        pub no_buffers: counter events,
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
