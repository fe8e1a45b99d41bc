//! One bar: a figure of ours beside a peer's from the same run, and whether the promise holds.

use std::fmt;
use std::io::{self, Write};

use serde::{Deserialize, Serialize};

/// Which way a figure improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Better {
    /// Rates.
    Higher,
    /// Times and counts of dear things.
    Lower,
}

/// One object of the report; the same shape for every subject.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Bar {
    pub(crate) name: String,
    /// Median of our repetitions, in `unit`.
    pub(crate) ours: f64,
    /// Median of the peer's (or the raw limit's) repetitions, in `unit`.
    pub(crate) peer: f64,
    pub(crate) unit: &'static str,
    /// `ours / peer`, whichever way is better; or the median of that of pairs.
    pub(crate) ratio: f64,
    pub(crate) better: Better,
    /// What `ratio` must reach (`higher`) or stay under (`lower`).
    pub(crate) bar: f64,
    pub(crate) holds: bool,
    /// How long messages took, where each was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency: Option<Latency>,
}

/// How long messages took, with us and with the peer, over all repetitions.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Latency {
    pub(crate) ours: Quantiles,
    pub(crate) peer: Quantiles,
}

/// In nanoseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) max: u64,
}

impl Bar {
    pub(crate) fn new(
        name: &str,
        ours: f64,
        peer: f64,
        unit: &'static str,
        better: Better,
        bar: f64,
    ) -> Self {
        Self::paired(name, ours, peer, ours / peer, unit, better, bar)
    }

    /// A bar whose ratio is not that of the medians: each pair of measurements, made one behind the other, has its own, and
    /// this is their median.
    pub(crate) fn paired(
        name: &str,
        ours: f64,
        peer: f64,
        ratio: f64,
        unit: &'static str,
        better: Better,
        bar: f64,
    ) -> Self {
        let holds = match better {
            Better::Higher => ratio >= bar,
            Better::Lower => ratio <= bar,
        };
        Self { name: name.to_owned(), ours, peer, unit, ratio, better, bar, holds, latency: None }
    }
}

impl fmt::Display for Bar {
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
            self.bar,
            if self.holds { "holds" } else { "MISSED" },
        )
    }
}

/// The report: bars as they come.
pub(crate) struct Report {
    json: bool,
    /// So many were told, and each of them holds.
    told: usize,
    holds: bool,
    /// What standard output said that took no more.
    wrong: Option<io::Error>,
}

impl Report {
    /// A table that grows on standard output; or one JSON array there, which grows too and is whole when this is finished or dropped,
    /// and the table on standard error.
    pub(crate) fn new(json: bool) -> Self {
        let report = Self { json, told: 0, holds: true, wrong: None };
        report.line(&format!(
            "{:<44} {:>12} {:>12} {:<8} {:>9}    bar",
            "what", "ours", "peer", "unit", "ratio"
        ));
        report
    }

    pub(crate) fn push(&mut self, bar: Bar) {
        self.line(&bar.to_string());
        self.holds &= bar.holds;
        if self.json && self.wrong.is_none() {
            self.wrong = self.write(&bar).err();
        }
        self.told += 1;
    }

    fn write(&self, bar: &Bar) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(if self.told == 0 { b"[\n" } else { b",\n" })?;
        serde_json::to_writer_pretty(&mut out, bar)?;
        out.flush()
    }

    /// Ends the report; whether every bar in it holds.
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
            // Who reads it sees that it is cut.
            let _ = io::stdout().write_all(if self.told == 0 { b"[]\n" } else { b"\n]\n" });
        }
    }
}

/// Four significant figures, without an exponent.
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
    use super::{Bar, Better};

    #[test]
    fn a_bar_holds_at_its_limit_and_not_beyond() {
        let rows = [
            (Better::Higher, 8.0, 1.0, 8.0, true),
            (Better::Higher, 7.9, 1.0, 8.0, false),
            (Better::Lower, 3.0, 1.0, 3.0, true),
            (Better::Lower, 3.1, 1.0, 3.0, false),
            (Better::Higher, 8.0, f64::NAN, 8.0, false),
        ];
        for (better, ours, peer, bar, holds) in rows {
            let row = Bar::new("row", ours, peer, "M/s", better, bar);
            assert_eq!(row.holds, holds, "{row}");
        }
    }

    #[test]
    fn the_object_has_the_names_that_readers_know() {
        let json = serde_json::to_value(Bar::new("row", 2.0, 1.0, "ns", Better::Lower, 3.0)).unwrap();
        let expected = serde_json::json!({
            "name": "row", "ours": 2.0, "peer": 1.0, "unit": "ns", "ratio": 2.0,
            "better": "lower", "bar": 3.0, "holds": true
        });
        assert_eq!(json, expected);
    }
}
