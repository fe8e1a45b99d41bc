//! Memory and descriptors of a process over time.

use std::fs;

use anyhow::{Context, Result};
use rustix::process::Pid;
use serde::Serialize;

use crate::stat::median;

/// Samples at least for a statement about growth.
const SAMPLES: usize = 12;
/// Largest growth of the second half over the first one, after the warm-up.
const GROWTH: f64 = 0.01;

/// A process at one time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// Resident and proportional memory in KiB (smaps_rollup of proc_pid_smaps(5)).
    rss: f64,
    pss: f64,
    pub(super) descriptors: usize,
}

impl Sample {
    pub(super) fn of(process: Pid) -> Result<Self> {
        let place = format!("/proc/{}", process.as_raw_nonzero());
        let text = fs::read_to_string(format!("{place}/smaps_rollup")).context("reading smaps_rollup")?;
        let field = |name: &str| -> Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let word = line.and_then(|line| line.split_whitespace().next());
            word.with_context(|| format!("no {name}"))?.parse().with_context(|| name.to_owned())
        };
        let descriptors = fs::read_dir(format!("{place}/fd")).context("counting descriptors")?.count();
        Ok(Self { rss: field("Rss")?, pss: field("Pss")?, descriptors })
    }
}

/// Samples of one process, or of processes of the same age.
#[derive(Debug, Default)]
pub(super) struct Series(Vec<Sample>);

/// A series in the report.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    what: &'static str,
    samples: usize,
    /// Medians of the two halves after the warm-up, which is the first third.
    rss_kib: [f64; 2],
    pss_kib: [f64; 2],
    descriptors: [usize; 2],
}

impl Series {
    pub(super) fn push(&mut self, sample: Sample) {
        self.0.push(sample);
    }

    /// The row of the report, with what has grown.
    pub(super) fn row(&self, what: &'static str, failures: &mut Vec<String>) -> Row {
        let after = &self.0[self.0.len() / 3..];
        let halves = after.split_at(after.len() / 2);
        let medians = |of: fn(&Sample) -> f64| {
            [halves.0, halves.1].map(|half| match half {
                [] => 0.0,
                half => median(&half.iter().map(of).collect::<Vec<_>>()),
            })
        };
        let largest =
            [halves.0, halves.1].map(|half| half.iter().map(|sample| sample.descriptors).max().unwrap_or(0));
        let (rss, pss) = (medians(|sample| sample.rss), medians(|sample| sample.pss));
        if self.0.len() >= SAMPLES {
            for (name, [first, second]) in [("RSS", rss), ("PSS", pss)] {
                if second > first * (1.0 + GROWTH) {
                    failures.push(format!("{what}: {name} grew from {first:.0} KiB to {second:.0} KiB"));
                }
            }
            if largest[1] > largest[0] {
                failures.push(format!("{what}: {} descriptors became {}", largest[0], largest[1]));
            }
        }
        Row { what, samples: self.0.len(), rss_kib: rss, pss_kib: pss, descriptors: largest }
    }
}

impl Row {
    pub(super) fn text(&self) -> String {
        let Self { what, samples, rss_kib, pss_kib, descriptors } = self;
        format!(
            "{what:<26} {samples:>5} samples; RSS {:.0} -> {:.0} KiB, PSS {:.0} -> {:.0} KiB, {} -> {} descriptors",
            rss_kib[0], rss_kib[1], pss_kib[0], pss_kib[1], descriptors[0], descriptors[1]
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures(memory: impl Fn(usize) -> f64, descriptors: impl Fn(usize) -> usize) -> Vec<String> {
        let sample = |at| Sample { rss: memory(at), pss: memory(at), descriptors: descriptors(at) };
        let mut failures = Vec::new();
        Series((0..30).map(sample).collect()).row("it", &mut failures);
        failures
    }

    #[test]
    fn growth_after_the_warm_up_is_a_failure() {
        // The first ten samples are the warm-up.
        let warm = |at: usize| if at < 10 { 1000.0 + at as f64 * 100.0 } else { 2000.0 + (at % 3) as f64 };
        assert_eq!(failures(warm, |at| if at < 10 { 90 } else { 40 + at % 2 }), Vec::<String>::new());
        let grown = failures(|at| 10_000.0 + at as f64 * 15.0, |_| 40);
        assert_eq!(grown.len(), 2, "{grown:?}");
        let leaked = failures(|_| 1000.0, |at| 40 + at / 25);
        assert_eq!(leaked, ["it: 40 descriptors became 41"]);
    }
}
