//! Results of the demo and their presentation.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::attack::Attack;
use super::clients::Work;
use super::digits::thousands;
use super::file::Transfer;
use super::inspect::Lines;
use super::messages::Service;
use super::trace::Traced;
use super::vs_kernel::{Comparison, Machine};

/// All results; `--json` prints them.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Results {
    /// Every expectation was met.
    pub(crate) ok: bool,
    pub(crate) seconds: f64,
    /// Where the demo ran.
    pub(crate) place: String,
    /// The engine's port driver.
    pub(crate) driver: &'static str,
    pub(crate) expected: Vec<Expectation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) engine: Option<Engine>,
    /// Packets stopped, by rule.
    pub(crate) stopped: Vec<Stopped>,
    pub(crate) clients: Work,
    pub(crate) attack: Attack,
    pub(crate) inspector: Lines,
    /// Reloads of the rules in the flood.
    pub(crate) reloads: u64,
    pub(crate) trace: Traced,
    pub(crate) messages: Service,
    pub(crate) file: Transfer,
    pub(crate) vs_kernel: Vec<Comparison>,
    /// The machine of the comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) machine: Option<Machine>,
    /// TCP congestion control of the comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) congestion: Option<&'static str>,
    /// Scenes that could not be played, with the reason.
    pub(crate) left_out: Vec<String>,
    /// Only the scenes without privilege were played.
    #[serde(skip)]
    pub(crate) alone: bool,
}

/// An expectation.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Expectation {
    pub(crate) name: &'static str,
    pub(crate) met: bool,
    /// The observation.
    pub(crate) saw: String,
}

/// The engine's counters: `packets = passed + dropped + rejected + waiting`.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Engine {
    pub(crate) packets: u64,
    pub(crate) passed: u64,
    pub(crate) dropped: u64,
    pub(crate) rejected: u64,
    /// Malformed packets, which are dropped.
    pub(crate) malformed: u64,
    pub(crate) waiting: u64,
    /// Packets that inspectors received.
    pub(crate) inspected: u64,
    /// States created, and the peak.
    pub(crate) states: u64,
    pub(crate) states_peak: u64,
    /// CPU time of the process, in seconds.
    pub(crate) cpu_seconds: f64,
}

impl Engine {
    /// Reads the report of `towpath replay --json` or the counters of `towpath ctl show stats --json`, which share names.
    pub(crate) fn told(stats: &Value) -> Self {
        let number = |name: &str| stats[name].as_u64().unwrap_or(0);
        Self {
            packets: number("packets"),
            passed: number("passed"),
            dropped: number("dropped"),
            rejected: number("rejected"),
            malformed: stats["dropped_by"]
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(reason, _)| reason.starts_with("malformed"))
                .filter_map(|(_, packets)| packets.as_u64())
                .sum(),
            waiting: number("waiting"),
            inspected: number("inspected"),
            states: stats["states"]["created"].as_u64().unwrap_or(0),
            states_peak: stats["states"]["peak"].as_u64().unwrap_or(0),
            cpu_seconds: 0.0,
        }
    }
}

/// A rule that dropped packets, or another reason.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Stopped {
    /// The rule's number; none for another reason.
    pub(crate) rule: Option<u64>,
    /// The rule's purpose, or the reason.
    pub(crate) what: String,
    /// Packets that matched, and packets that were dropped.
    pub(crate) came: u64,
    pub(crate) stopped: u64,
}

impl Results {
    pub(crate) fn expect(&mut self, name: &'static str, met: bool, saw: String) {
        self.expected.push(Expectation { name, met, saw });
        self.ok = self.expected.iter().all(|expectation| expectation.met);
    }
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "towpath demo: {:.0} s, {}, {}\n", self.seconds, self.place, self.driver)?;
        if let Some(engine) = &self.engine {
            writeln!(
                f,
                "{} packets = {} passed + {} dropped + {} rejected + {} waiting\n\
                 {} inspected; {} states, {} at one time\n",
                thousands(engine.packets),
                thousands(engine.passed),
                thousands(engine.dropped),
                thousands(engine.rejected),
                thousands(engine.waiting),
                thousands(engine.inspected),
                thousands(engine.states),
                thousands(engine.states_peak),
            )?;
        }
        if !self.stopped.is_empty() {
            writeln!(f, "{:<34} {:>6} {:>12} {:>12}", "dropped packets", "rule", "matched", "dropped")?;
            for row in &self.stopped {
                let (came, stopped) = (thousands(row.came), thousands(row.stopped));
                let rule = row.rule.map_or_else(|| "-".to_owned(), |rule| rule.to_string());
                writeln!(f, "  {:<32} {rule:>6} {came:>12} {stopped:>12}", row.what)?;
            }
            writeln!(f)?;
        }
        if !self.vs_kernel.is_empty() {
            write!(f, "{}", ComparisonTable(&self.vs_kernel, self.congestion, self.machine))?;
        }
        for Expectation { name, met, saw } in &self.expected {
            writeln!(f, "{} {name}: {saw}", if *met { "ok    " } else { "FAILED" })?;
        }
        self.left_out.iter().try_for_each(|what| writeln!(f, "left out: {what}"))
    }
}

/// The comparison with the kernel's path as a table, in lines of at most 80 columns.
struct ComparisonTable<'a>(&'a [Comparison], Option<&'static str>, Option<Machine>);

impl fmt::Display for ComparisonTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.0;
        let ours = rows.first().map(|row| row.ours.as_slice()).unwrap_or_default();
        write!(f, "{:<32} {:>7}", "compared with the kernel's path", "kernel")?;
        ours.iter().try_for_each(|ours| write!(f, " {:>9} {:>8}", ours.driver, "ratio"))?;
        writeln!(f)?;
        for row in rows {
            write!(f, "  {:<30} {:>7.1}", row.name, row.kernel.value)?;
            row.ours.iter().try_for_each(|o| write!(f, " {:>9.1} {:>6.2} x", o.figure.value, o.ratio))?;
            writeln!(f)?;
        }
        write!(f, "\n{:<34} {:>7}", "CPU time, both hosts and the path", "kernel")?;
        ours.iter().try_for_each(|ours| write!(f, " {:>9}", ours.driver))?;
        writeln!(f)?;
        for row in rows {
            let Some(unit) = row.cpu_unit else { continue };
            let name = row.name.strip_suffix(row.unit).unwrap_or(row.name).to_owned() + unit;
            write!(f, "  {name:<32} {:>7.2}", row.kernel.cpu)?;
            row.ours.iter().try_for_each(|o| write!(f, " {:>9.2}", o.figure.cpu))?;
            writeln!(f)?;
        }
        let forwarding = rows.first().map_or("", |row| row.kernel_is);
        let reading = rows.iter().find(|row| row.kernel_is != forwarding).map(|row| row.kernel_is);
        write!(f, "\nA shorter round trip is better. The kernel's path: {forwarding}")?;
        reading.map_or(Ok(()), |reading| write!(f, "; {reading}"))?;
        writeln!(f, ".")?;
        if let Some(machine) = self.2 {
            writeln!(
                f,
                "Machine: {machine}.\n\
                 Sender, path and receiver share these CPUs: the figures are those of all three\n\
                 with one sender. The README has those of the engine alone."
            )?;
        }
        if let Some(congestion) = self.1 {
            writeln!(f, "TCP's congestion control is {congestion} on both paths.")?;
        }
        if ours.iter().any(|ours| ours.driver == "af_xdp") {
            writeln!(
                f,
                "af_xdp: XDP descriptors have no field for segmentation, so a segment of 64 KiB\n\
                 leaves as some 45 packets. The kernel and af_packet forward it as one packet.\n\
                 In the row \"segmented by host\" all of them forward the same packets."
            )?;
        }
        writeln!(f)
    }
}

#[cfg(test)]
mod tests {
    use super::super::vs_kernel::{Comparison, Figure, Machine, Ours};
    use super::Results;

    #[test]
    fn one_expectation_that_is_not_met_is_enough() {
        let mut results = Results::default();
        results.expect("one", true, "1".into());
        assert!(results.ok);
        results.expect("two", false, "2".into());
        results.expect("three", true, "3".into());
        assert!(!results.ok);
        assert!(results.to_string().contains("FAILED two: 2"), "{results}");
    }

    #[test]
    fn the_page_fits_a_terminal() {
        let machine = Some(Machine { cpus: 128, busy: 0.37 });
        let figure = Figure { value: 12_345.6, cpu: 123.45 };
        let ours = ["af_xdp", "af_packet"].map(|driver| Ours { driver, figure, ratio: 129.67 });
        let row = Comparison::of("inspected, 64 B, k/s", "k/s", "forwarding, conntrack", figure, ours.into());
        let results =
            Results { vs_kernel: vec![row], congestion: Some("cubic"), machine, ..Results::default() };
        let page = results.to_string();
        for line in page.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(page.contains("inspected, 64 B, us each"), "{page}");
        assert!(page.contains("XDP descriptors have no field for segmentation"), "{page}");
    }
}
