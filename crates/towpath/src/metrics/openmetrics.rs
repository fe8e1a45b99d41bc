//! OpenMetrics text.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit as OpenMetricsUnit};
use towpath_metrics::{Histogram, Kind, Metric, Metrics, Unit};

/// Names and values of labels.
type Labels = Vec<(&'static str, String)>;

/// Values of counters and gauges, by family and labels.
#[derive(Clone, Debug, Default)]
pub struct Samples(BTreeMap<String, Family>);

#[derive(Clone, Debug)]
struct Family {
    kind: Kind,
    unit: Unit,
    help: Option<&'static str>,
    values: BTreeMap<Labels, u64>,
    histograms: BTreeMap<Labels, Histogram>,
}

impl Samples {
    /// Adds a group of counters with further labels. Values with the same labels are added up.
    pub fn add(&mut self, labels: &[(&'static str, &str)], group: &impl Metrics) {
        for (metric, value) in group.values() {
            self.add_value(labels, metric, value);
        }
    }

    /// Adds one value with further labels.
    pub fn add_value(&mut self, labels: &[(&'static str, &str)], metric: &Metric, value: u64) {
        let (family, labels) = self.family(labels, metric);
        *family.values.entry(labels).or_default() += value;
    }

    /// Adds a distribution with further labels.
    pub fn add_histogram(&mut self, labels: &[(&'static str, &str)], metric: &Metric, histogram: &Histogram) {
        let (family, labels) = self.family(labels, metric);
        family.histograms.entry(labels).or_default().merge(histogram);
    }

    /// The family of a metric, and all labels of its sample.
    fn family(&mut self, labels: &[(&'static str, &str)], metric: &Metric) -> (&mut Family, Labels) {
        let Metric { kind, unit, label, help, family_help, .. } = *metric;
        let mut all: Labels = labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        all.extend(label.map(|(name, value)| (name, value.to_owned())));
        let family = self.0.entry(metric.family()).or_insert_with(|| Family {
            kind,
            unit,
            help: None,
            values: BTreeMap::new(),
            histograms: BTreeMap::new(),
        });
        family.help = family.help.or(family_help).or(label.is_none().then_some(help));
        (family, all)
    }

    /// Adds the values of another thread.
    pub fn merge(&mut self, other: Self) {
        for (name, family) in other.0 {
            match self.0.entry(name) {
                Entry::Vacant(entry) => drop(entry.insert(family)),
                Entry::Occupied(mut entry) => {
                    for (labels, value) in family.values {
                        *entry.get_mut().values.entry(labels).or_default() += value;
                    }
                    for (labels, histogram) in family.histograms {
                        entry.get_mut().histograms.entry(labels).or_default().merge(&histogram);
                    }
                    let own = &mut entry.get_mut().help;
                    *own = own.or(family.help);
                }
            }
        }
    }

    /// Renders the samples, and the version of this program, as OpenMetrics text.
    ///
    /// # Panics
    ///
    /// Does not panic: writing to a string does not fail.
    pub fn into_text(self) -> String {
        let mut registry = Registry::default();
        let version = prometheus_client::metrics::info::Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("towpath_build", "The version of Towpath", version);
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        text::encode(&mut out, &registry).expect("writing to a String does not fail");
        out
    }
}

impl Collector for Samples {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, Family { kind, unit, help, values, histograms }) in &self.0 {
            let word = unit.word();
            // The encoder appends the unit.
            let name = name.strip_suffix(word).and_then(|name| name.strip_suffix('_')).unwrap_or(name);
            let word = (!word.is_empty()).then(|| OpenMetricsUnit::Other(word.to_owned()));
            let help = help.unwrap_or_default().trim_end_matches('.');
            let metric_type = match kind {
                Kind::Counter => MetricType::Counter,
                Kind::Gauge => MetricType::Gauge,
                Kind::Histogram => MetricType::Histogram,
            };
            let mut family = encoder.encode_descriptor(name, help, word.as_ref(), metric_type)?;
            for (labels, value) in values {
                let seconds = matches!(unit, Unit::Nanoseconds).then_some(*value as f64 / 1e9);
                let mut metric = family.encode_family(labels)?;
                match (kind, seconds) {
                    (Kind::Counter, None) => metric.encode_counter::<NoLabelSet, u64, u64>(value, None)?,
                    (Kind::Counter, Some(seconds)) => {
                        metric.encode_counter::<NoLabelSet, f64, u64>(&seconds, None)?;
                    }
                    (Kind::Gauge, None) => metric.encode_gauge(&i64::try_from(*value).unwrap_or(i64::MAX))?,
                    (Kind::Gauge, Some(seconds)) => metric.encode_gauge(&seconds)?,
                    (Kind::Histogram, _) => {}
                }
            }
            for (labels, histogram) in histograms {
                let seconds = |nanoseconds: u64| nanoseconds as f64 / 1e9;
                // The encoder adds the counts up.
                let buckets: Vec<(f64, u64)> = histogram
                    .buckets()
                    .map(|(bound, count)| (bound.map_or(f64::INFINITY, seconds), count))
                    .collect();
                family.encode_family(labels)?.encode_histogram::<NoLabelSet>(
                    seconds(histogram.sum()),
                    histogram.count(),
                    &buckets,
                    None,
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashSet;

    use towpath_metrics::metrics;

    use super::*;

    metrics! {
        struct Port in "test_port" {
            /// Frames received.
            received: counter packets,
            /// The receive ring was full.
            rx_full: counter packets as "dropped": "Frames dropped, by reason." (reason = "rx_full"),
            /// The frame was too long.
            too_long: counter packets as "dropped" (reason = "too_long"),
            /// Frames in the transmit queue.
            queued: gauge packets,
            /// Time asleep.
            asleep: counter nanoseconds,
        }
    }

    /// Checks text against the grammar of the OpenMetrics specification, as far as this program uses it.
    pub(crate) fn check(text: &str) {
        let body = text.strip_suffix("# EOF\n").unwrap_or_else(|| panic!("no # EOF at the end: {text}"));
        let (mut families, mut samples) = (HashSet::new(), HashSet::new());
        let (mut family, mut kind, mut unit) = (String::new(), String::new(), String::new());
        for line in body.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                let (word, rest) = rest.split_once(' ').expect("# WORD NAME TEXT");
                let (name, value) = rest.split_once(' ').expect("# WORD NAME TEXT");
                if name != family {
                    assert!(families.insert(name.to_owned()), "{name} is not contiguous");
                    (family, kind, unit) = (name.to_owned(), String::new(), String::new());
                }
                match word {
                    "HELP" => assert!(!value.is_empty(), "{line}"),
                    "TYPE" => kind = value.to_owned(),
                    "UNIT" => unit = value.to_owned(),
                    _ => panic!("unknown comment: {line}"),
                }
                assert!(unit.is_empty() || family.ends_with(&format!("_{unit}")), "{line}");
                continue;
            }
            let (sample, value) = line.rsplit_once(' ').expect("NAME VALUE");
            let (name, labels) = sample.split_once('{').map_or((sample, ""), |(name, rest)| {
                (name, rest.strip_suffix('}').unwrap_or_else(|| panic!("no brace: {line}")))
            });
            let suffix = match &*kind {
                "counter" => "_total",
                "gauge" => "",
                "info" => "_info",
                "histogram" => ["_bucket", "_sum", "_count"]
                    .into_iter()
                    .find(|suffix| name.ends_with(suffix))
                    .unwrap_or_else(|| panic!("{line}")),
                _ => panic!("{line} has no TYPE"),
            };
            assert_eq!(name, format!("{family}{suffix}"), "{line}");
            let valid = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            assert!(name.chars().all(valid) && !name.starts_with(|c: char| c.is_ascii_digit()), "{line}");
            for label in labels.split("\",").filter(|label| !label.is_empty()) {
                let (name, value) = label.split_once("=\"").unwrap_or_else(|| panic!("label: {line}"));
                assert!(name.chars().all(valid) && !value.is_empty(), "{line}");
            }
            let number: f64 = value.parse().unwrap_or_else(|_| panic!("no number: {line}"));
            assert!(number >= 0.0, "{line}");
            assert!(samples.insert(sample.to_owned()), "{line} comes twice");
        }
    }

    #[test]
    fn samples_are_openmetrics_text() {
        let mut samples = Samples::default();
        let port = Port { received: 3, rx_full: 1, too_long: 2, queued: 4, asleep: 1_500_000_000 };
        samples.add(&[("port", "lan\"0\"")], &port);
        samples.add(&[("port", "wan")], &port);
        samples.add(&[("port", "wan")], &port);
        let mut histogram = Histogram::default();
        histogram.add_many(1000, 2);
        histogram.add(3_000_000);
        histogram.add(u64::MAX >> 20);
        let time = Metric {
            group: "test",
            name: "time",
            stem: "time",
            kind: Kind::Histogram,
            unit: Unit::Nanoseconds,
            label: None,
            help: "Time.",
            family_help: None,
        };
        samples.add_histogram(&[("port", "wan")], &time, &Histogram::default());
        let mut other = Samples::default();
        other.add_histogram(&[("port", "wan")], &time, &histogram);
        samples.merge(other);
        let text = samples.into_text();
        check(&text);
        for line in [
            "# TYPE towpath_test_time_seconds histogram",
            "towpath_test_time_seconds_bucket{le=\"0.000001024\",port=\"wan\"} 2",
            "towpath_test_time_seconds_bucket{le=\"0.002097152\",port=\"wan\"} 2",
            "towpath_test_time_seconds_bucket{le=\"0.004194304\",port=\"wan\"} 3",
            "towpath_test_time_seconds_bucket{le=\"17.179869184\",port=\"wan\"} 3",
            "towpath_test_time_seconds_bucket{le=\"+Inf\",port=\"wan\"} 4",
            "towpath_test_time_seconds_count{port=\"wan\"} 4",
            "# HELP towpath_test_port_dropped_packets Frames dropped, by reason",
            "# TYPE towpath_test_port_dropped_packets counter",
            "# UNIT towpath_test_port_dropped_packets packets",
            "towpath_test_port_dropped_packets_total{port=\"wan\",reason=\"rx_full\"} 2",
            "towpath_test_port_received_packets_total{port=\"lan\\\"0\\\"\"} 3",
            "towpath_test_port_queued_packets{port=\"wan\"} 8",
            "towpath_test_port_asleep_seconds_total{port=\"wan\"} 3.0",
            concat!("towpath_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing:\n{text}");
        }
    }
}
