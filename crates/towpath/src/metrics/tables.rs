//! The tables that `towpath ctl metrics` renders, and their text in the documentation.

use towpath_engine::egress::TxStats;
use towpath_engine::queue::{self, VERDICT_TIME, VerdictStats};
use towpath_engine::{Drops, ReplyStats, flow_verdict};
use towpath_fleet::FleetStats;
use towpath_fleet::group::{GroupStats, TableStats};
use towpath_fleet::workers::WorkerStats;
use towpath_metrics::Metric;
use towpath_mux::mux::psock;
use towpath_mux::{io, mux};
use towpath_port::offload::PathStats;
use towpath_ring::{self as ring, ChannelStats, reaper};

use super::thread::ThreadStats;
use super::{
    COMPLETION_TIME, EndpointStats, EngineUpgradeStats, MESSAGE_WAIT, ProcessStats, ReloadStats, RuleStats,
};
use crate::control::ControlStats;
use crate::events::EventStats;
use crate::ipfix::IpfixStats;
use crate::logging::LogStats;
use crate::offload::{NotOffloaded, OffloadStats};
use crate::snapshot::running::RunningStats;
use crate::worker_pool::{UnsentStats, UpgradeStats, Violations};

/// A table of counters with the labels that all of its rows have.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Title of the section: the objects that have these counters.
    pub title: &'static str,
    /// The labels.
    pub labels: &'static [&'static str],
    /// The counters.
    pub rows: &'static [Metric],
}

const fn table(title: &'static str, labels: &'static [&'static str], rows: &'static [Metric]) -> Table {
    Table { title, labels, rows }
}

/// The tables, in the order of the documentation.
pub const TABLES: &[Table] = &[
    table("Packets", &[], towpath_engine::Stats::TABLE),
    table("Packets", &[], Drops::TABLE),
    table("Packets", &[], ReplyStats::TABLE),
    table("Ports", &["port"], towpath_port::Stats::TABLE),
    table("Ports", &["port"], TxStats::TABLE),
    table("Rules", &["rule", "set"], RuleStats::TABLE),
    table("Rules", &[], towpath_gate::GateCounters::TABLE),
    table("Dynamic states", &[], towpath_gate::state::Counters::TABLE),
    table("Dynamic states", &[], RunningStats::TABLE),
    table("Flow offload", &[], OffloadStats::TABLE),
    table("Flow offload", &[], NotOffloaded::TABLE),
    table("Flow offload", &[], PathStats::TABLE),
    table("Queues", &["queue"], queue::Stats::TABLE),
    table("Queues", &["queue"], flow_verdict::Stats::TABLE),
    table("Queues", &["queue"], ring::Stats::TABLE),
    table("Queues", &["queue"], &[VERDICT_TIME]),
    table("Channels to inspectors", &["channel", "queue"], ChannelStats::TABLE),
    table("Channels to inspectors", &["channel", "queue"], VerdictStats::TABLE),
    table("Multiplexors", &["mux"], mux::Totals::TABLE),
    table("Multiplexors", &["mux"], psock::Stats::TABLE),
    table("Multiplexors", &["mux"], io::AcceptStats::TABLE),
    table("Multiplexors", &["mux"], UnsentStats::TABLE),
    table("Multiplexors", &["mux"], Violations::TABLE),
    table("Multiplexors", &["mux"], UpgradeStats::TABLE),
    table("Multiplexors", &["mux"], WorkerStats::TABLE),
    table("Multiplexors", &["mux"], &[MESSAGE_WAIT]),
    table("Zero-copy sends", &["mux"], towpath_send::Counters::TABLE),
    table("Zero-copy sends", &["mux"], &[COMPLETION_TIME]),
    table("Control socket", &[], ControlStats::TABLE),
    table("Metrics endpoint", &[], EndpointStats::TABLE),
    table("Reloads", &[], ReloadStats::TABLE),
    table("Upgrades", &[], EngineUpgradeStats::TABLE),
    table("Flow records", &[], IpfixStats::TABLE),
    table("Events", &[], EventStats::TABLE),
    table("Fleet", &[], FleetStats::TABLE),
    table("Fleet", &[], GroupStats::TABLE),
    table("Fleet", &[], TableStats::TABLE),
    table("Log", &[], LogStats::TABLE),
    table("Engine threads", &["thread"], ThreadStats::TABLE),
    table("Process", &[], ProcessStats::TABLE),
    table("Helper threads", &[], reaper::Stats::TABLE),
];

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use towpath_metrics::Kind;

    use super::*;

    /// The tables in Markdown: a row for each family, and below it one for each value of its label.
    fn markdown() -> String {
        let mut text = String::new();
        let mut title = "";
        let drops = Drops::TABLE[0].family();
        for table in TABLES {
            if table.title != title {
                title = table.title;
                let labels: Vec<String> = table.labels.iter().map(|label| format!("`{label}`")).collect();
                let labels = match labels.len() {
                    0 => String::new(),
                    1 => format!(" (label {})", labels[0]),
                    _ => format!(" (labels {})", labels.join(", ")),
                };
                text += &format!("\n### {title}{labels}\n\n| metric | kind | meaning |\n|---|---|---|\n");
            }
            let mut last = String::new();
            for row in table.rows {
                let family = row.family();
                let (suffix, kind) = match row.kind {
                    Kind::Counter => ("_total", "counter"),
                    Kind::Gauge => ("", "gauge"),
                    Kind::Histogram => ("", "histogram"),
                };
                if family != last {
                    let help = family_help(table.rows, &family).unwrap_or(row.help);
                    text += &format!("| `{family}{suffix}` | {kind} | {help} |\n");
                    last = family;
                }
                // The drop reasons have a separate table.
                if let Some((label, value)) = row.label.filter(|_| row.family() != drops) {
                    text += &format!("| `{label}=\"{value}\"` | | {} |\n", row.help);
                }
            }
        }
        text
    }

    /// The help text of a family with labels.
    fn family_help(rows: &[Metric], family: &str) -> Option<&'static str> {
        rows.iter().filter(|row| row.family() == family).find_map(|row| row.family_help)
    }

    /// A family has one kind, one unit, one label and one help text, and is in one table.
    #[test]
    fn families_are_stated_once() {
        let mut families: BTreeMap<String, (usize, Vec<&Metric>)> = BTreeMap::new();
        for (at, table) in TABLES.iter().enumerate() {
            for row in table.rows {
                let (first, rows) = families.entry(row.family()).or_insert((at, Vec::new()));
                assert!(*first == at, "{} is in two tables", row.family());
                rows.push(row);
            }
        }
        for (family, (_, rows)) in families {
            let first = rows[0];
            let label = |row: &Metric| row.label.map(|(label, _)| label);
            assert!(rows.iter().all(|row| row.kind == first.kind && label(row) == label(first)), "{family}");
            let helps: BTreeSet<_> = rows.iter().filter_map(|row| row.family_help).collect();
            assert_eq!(helps.len(), usize::from(first.label.is_some()), "help texts of {family}");
            assert!(first.label.is_some() || rows.len() == 1, "{family} needs a label");
            let mut values: Vec<_> = rows.iter().map(|row| row.label).collect();
            values.sort_unstable();
            values.dedup();
            assert_eq!(values.len(), rows.len(), "{family} has a label twice");
            for row in rows {
                assert!(row.help.ends_with('.') && row.help.len() <= 120, "{family}: {}", row.help);
            }
        }
    }

    /// Puts the tables into the documentation with `TOWPATH_WRITE_DOCS=1`; compares them otherwise.
    #[test]
    fn the_documentation_has_the_tables() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/reference/metrics.md");
        let text = std::fs::read_to_string(&path).unwrap();
        let reasons = {
            let mut rows = "| reason | meaning |\n|---|---|\n".to_owned();
            for reason in towpath_engine::DropReason::ALL {
                rows += &format!("| `{}` | {} |\n", reason.name(), reason.help());
            }
            rows
        };
        let mut expected = text.clone();
        for (name, rows) in [("metrics", markdown()), ("drop reasons", reasons)] {
            let mark = format!("<!-- {name} -->\n");
            let (before, rest) = expected.split_once(&mark).unwrap_or_else(|| panic!("no {mark}"));
            let (_, after) = rest.split_once("<!-- end -->").unwrap();
            expected = format!("{before}{mark}{rows}<!-- end -->{after}");
        }
        if std::env::var_os("TOWPATH_WRITE_DOCS").is_some() {
            std::fs::write(&path, &expected).unwrap();
            return;
        }
        assert!(expected == text, "metrics.md differs: run this test once with TOWPATH_WRITE_DOCS=1");
    }
}
