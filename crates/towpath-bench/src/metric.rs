//! A metric: our figure, a peer's from the same run, and whether their ratio meets the target.

use std::fmt;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

/// The direction in which a figure improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Better {
    /// For rates.
    Higher,
    /// For durations and resource usage.
    Lower,
}

/// One object of the report, with the same fields for every subject.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Metric {
    pub(crate) name: String,
    /// Median of our repetitions, in `unit`.
    pub(crate) ours: f64,
    /// Median of the repetitions of the peer or raw limit, in `unit`.
    pub(crate) peer: f64,
    pub(crate) unit: &'static str,
    /// `ours / peer` regardless of `better`, or the median ratio of pairs.
    pub(crate) ratio: f64,
    pub(crate) better: Better,
    /// Lower limit (`higher`) or upper limit (`lower`) of `ratio`.
    #[serde(rename = "bar")]
    pub(crate) target: f64,
    pub(crate) holds: bool,
    /// Latency distribution, for rows that time each message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency: Option<Latency>,
}

/// Latencies of both sides over all repetitions.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Latency {
    pub(crate) ours: Quantiles,
    pub(crate) peer: Quantiles,
}

/// Quantiles in nanoseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) max: u64,
}

impl Metric {
    pub(crate) fn new(
        name: &str,
        ours: f64,
        peer: f64,
        unit: &'static str,
        better: Better,
        target: f64,
    ) -> Self {
        Self::paired(name, ours, peer, ours / peer, unit, better, target)
    }

    /// Creates a metric whose `ratio` is the median of the ratios of consecutive measurements, not the ratio of the medians.
    pub(crate) fn paired(
        name: &str,
        ours: f64,
        peer: f64,
        ratio: f64,
        unit: &'static str,
        better: Better,
        target: f64,
    ) -> Self {
        let holds = match better {
            Better::Higher => ratio >= target,
            Better::Lower => ratio <= target,
        };
        Self { name: name.to_owned(), ours, peer, unit, ratio, better, target, holds, latency: None }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = match self.better {
            Better::Higher => ">=",
            Better::Lower => "<=",
        };
        write!(
            f,
            "{:<44} {:>12} {:>12} {:<8} {:>9.3} {sign} {:<5} {}",
            self.name,
            figure(self.ours),
            figure(self.peer),
            self.unit,
            self.ratio,
            self.target,
            if self.holds { "holds" } else { "MISSED" },
        )
    }
}

/// The report, printed incrementally.
pub(crate) struct Report {
    json: bool,
    /// Number of metrics printed, and whether all met their targets.
    printed: usize,
    holds: bool,
    /// The first error when writing to standard output.
    wrong: Option<io::Error>,
}

impl Report {
    /// Starts a report. It prints a table to standard output; with `json`, a JSON array to standard output, completed when the report
    /// is finished or dropped, and the table to standard error.
    pub(crate) fn new(json: bool) -> Self {
        let report = Self { json, printed: 0, holds: true, wrong: None };
        report.line(&format!(
            "{:<44} {:>12} {:>12} {:<8} {:>9}    target",
            "what", "ours", "peer", "unit", "ratio"
        ));
        report
    }

    pub(crate) fn push(&mut self, metric: Metric) {
        self.line(&metric.to_string());
        self.holds &= metric.holds;
        if self.json && self.wrong.is_none() {
            self.wrong = self.write(&metric).err();
        }
        self.printed += 1;
    }

    fn write(&self, metric: &Metric) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(if self.printed == 0 { b"[\n" } else { b",\n" })?;
        serde_json::to_writer_pretty(&mut out, metric)?;
        out.flush()
    }

    /// Ends the report. Returns true if every metric meets its target.
    pub(crate) fn finish(mut self) -> io::Result<bool> {
        self.wrong.take().map_or(Ok(self.holds), Err)
    }

    fn line(&self, line: &str) {
        if self.json { eprintln!("{line}") } else { println!("{line}") }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if self.json {
            // An error is ignored: a JSON parser rejects the incomplete array.
            let _ = io::stdout().write_all(if self.printed == 0 { b"[]\n" } else { b"\n]\n" });
        }
    }
}

/// Formats about four significant figures, without an exponent.
fn figure(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.6}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Better, Metric};

    #[test]
    fn target_is_inclusive() {
        let rows = [
            (Better::Higher, 8.0, 1.0, 8.0, true),
            (Better::Higher, 7.9, 1.0, 8.0, false),
            (Better::Lower, 3.0, 1.0, 3.0, true),
            (Better::Lower, 3.1, 1.0, 3.0, false),
            (Better::Higher, 8.0, f64::NAN, 8.0, false),
        ];
        for (better, ours, peer, target, holds) in rows {
            let row = Metric::new("row", ours, peer, "M/s", better, target);
            assert_eq!(row.holds, holds, "{row}");
        }
    }

    #[test]
    fn json_fields() {
        let json = serde_json::to_value(Metric::new("row", 2.0, 1.0, "ns", Better::Lower, 3.0)).unwrap();
        let expected = serde_json::json!({
            "name": "row", "ours": 2.0, "peer": 1.0, "unit": "ns", "ratio": 2.0,
            "better": "lower", "bar": 3.0, "holds": true
        });
        assert_eq!(json, expected);
    }
}
