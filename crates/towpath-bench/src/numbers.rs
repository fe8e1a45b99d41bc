//! `towpath-bench numbers`: generates the page of measured metrics, and the README's excerpt from that page, which keeps the two consistent.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::{Command, CommandFactory};
use serde::Deserialize;

use crate::metric::Better;

/// Reasons for missed targets, tab-separated: the metric's name, or its prefix and `*`; the reason.
const REASONS: &str = include_str!("../reasons.tsv");
/// Metrics quoted in the README, tab-separated: the metric's name; its description; the peer.
const QUOTED: &str = include_str!("../quoted.tsv");
/// Start marker of the excerpt.
const BEGIN: &str = "<!-- numbers: written by towpath-bench numbers --readme -->";
const END: &str = "<!-- end of numbers -->";

/// A metric as printed by a subject.
#[derive(Clone, Debug, Deserialize)]
struct Row {
    name: String,
    ours: f64,
    peer: Option<f64>,
    unit: String,
    ratio: Option<f64>,
    better: Better,
    #[serde(rename = "bar")]
    target: f64,
    holds: bool,
}

/// The metrics of one subject.
#[derive(Debug)]
struct Part {
    subject: Command,
    rows: Vec<Row>,
}

/// Returns the page for the files of `towpath-bench all`.
pub(crate) fn page(files: &[impl AsRef<Path>]) -> Result<String> {
    ensure!(!files.is_empty(), "no files: `towpath-bench all --dir DIR` writes them, one for each subject");
    let mut parts = files.iter().map(|file| read(file.as_ref())).collect::<Result<Vec<_>>>()?;
    let order: Vec<String> = subjects().iter().map(|subject| subject.get_name().to_owned()).collect();
    parts.sort_by_key(|part| order.iter().position(|name| name == part.subject.get_name()));
    let page = write(&parts, &crate::machine::describe()) + &crate::variance::section()?;
    for row in missed(&parts).filter(|row| reason(&row.name).is_none()) {
        eprintln!("no reason in reasons.tsv: {}", row.name);
    }
    Ok(page)
}

/// Returns the measuring subcommands (those with `--json`), in order.
pub(crate) fn subjects() -> Vec<Command> {
    let subject = |command: &&Command| {
        let has = |id: &str| command.get_arguments().any(|argument| argument.get_id() == id);
        has("json") && !has("dir") && !has("files")
    };
    crate::Cli::command().get_subcommands().filter(subject).cloned().collect()
}

/// Returns the arguments to run a subject for these files.
pub(crate) fn words(subject: &Command, reps: u32) -> Vec<String> {
    let mut words = vec![subject.get_name().to_owned(), "--json".to_owned()];
    if subject.get_arguments().any(|argument| argument.get_id() == "reps") {
        words.extend(["--reps".to_owned(), reps.to_string()]);
    }
    words
}

/// Rewrites the README's excerpt from the page.
pub(crate) fn quote(readme: &Path, page: &Path) -> Result<()> {
    let text = fs::read_to_string(readme).with_context(|| readme.display().to_string())?;
    fs::write(readme, quoted(&text, page)?).with_context(|| readme.display().to_string())
}

/// Checks that the README's excerpt matches the page.
pub(crate) fn check(readme: &Path, page: &Path) -> Result<()> {
    let text = fs::read_to_string(readme).with_context(|| readme.display().to_string())?;
    ensure!(
        quoted(&text, page)? == text,
        "{}: other numbers than in {}; write them with `towpath-bench numbers --readme`",
        readme.display(),
        page.display()
    );
    Ok(())
}

fn read(file: &Path) -> Result<Part> {
    let name = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let subject = subjects().into_iter().find(|subject| subject.get_name() == name);
    let subject = subject.with_context(|| format!("{}: no subject of this name", file.display()))?;
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    let rows = serde_json::from_slice(&text).with_context(|| file.display().to_string())?;
    Ok(Part { subject, rows })
}

fn missed(parts: &[Part]) -> impl Iterator<Item = &Row> {
    parts.iter().flat_map(|part| &part.rows).filter(|row| !row.holds)
}

fn write(parts: &[Part], machine: &str) -> String {
    let all = parts.iter().map(|part| part.rows.len()).sum::<usize>();
    let lost = missed(parts).count();
    let mut page = format!(
        "# Numbers\n\n\
         Each row was measured alternately with its peer, in the same run. Of {all} targets, {} hold and {lost} are missed; the reasons are \
         [below](#missed-targets-and-the-reasons).\n\n\
         Machine: {machine}\n\n\
         ```text\n\
         cargo build --release -p towpath -p towpath-bench\n\
         target/release/towpath-bench all --dir DIR                     # as root, on a quiet machine\n\
         target/release/towpath-bench numbers DIR/*.json > docs/book/src/numbers.md\n\
         target/release/towpath-bench numbers --readme README.md        # the rows that README.md quotes\n\
         ```\n\n\
         *Ratio* is ours over the peer's; *target* is the ratio to reach. If a row has no peer, the column *peer* contains a fixed \
         reference value. Each row and its peer are described in [the bench's README](../../../crates/towpath-bench/README.md).\n",
        all - lost
    );
    for part in parts {
        table(&mut page, part);
    }
    if lost > 0 {
        page.push_str("\n## Missed targets, and the reasons\n\n");
    }
    for row in missed(parts) {
        let why = reason(&row.name).unwrap_or("not known yet");
        // Writing to a String cannot fail.
        let _ = writeln!(page, "- **{}** ({}, target {}): {why}", row.name, row.ratio(), row.target());
    }
    page
}

fn table(page: &mut String, part: &Part) {
    let about = part.subject.get_about().map(ToString::to_string).unwrap_or_default();
    let command = words(&part.subject, REPS).join(" ");
    let _ = write!(
        page,
        "\n## {}\n\n{about}. `target/release/towpath-bench {command}`\n\n\
         | what | ours | peer | ratio | target | |\n|---|---|---|---|---|---|\n",
        part.subject.get_name()
    );
    for row in &part.rows {
        let holds = if row.holds { "holds" } else { "**missed**" };
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {holds} |",
            row.name,
            human(row.ours, &row.unit),
            row.peer.map_or("-".into(), |peer| human(peer, &row.unit)),
            row.ratio(),
            row.target(),
        );
    }
    let there = |name: &String| part.rows.iter().any(|row| row.name == *name);
    let missing: Vec<String> = names(&part.subject).into_iter().filter(|name| !there(name)).collect();
    if !missing.is_empty() {
        let _ = write!(page, "\nNot measured: {}.\n", missing.join("; "));
    }
}

/// The names of a subject's rows, where one row is one metric.
fn names(subject: &Command) -> Vec<String> {
    match subject.get_name() {
        "ring" => crate::subject::ring::names(),
        "fleet" => crate::subject::fleet::names(),
        "live" => crate::subject::live::names(),
        "nfqueue" => crate::subject::nfqueue::names(),
        "offload" => crate::subject::offload::names(),
        _ => Vec::new(),
    }
}

/// Default number of repetitions.
pub(crate) const REPS: u32 = 3;

impl Row {
    fn ratio(&self) -> String {
        self.ratio.map_or("-".into(), |ratio| format!("{} x", significant(ratio)))
    }

    fn target(&self) -> String {
        let sign = match self.better {
            Better::Higher => "≥",
            Better::Lower => "≤",
        };
        format!("{sign} {}", (self.target * 1e3).round() / 1e3)
    }
}

/// Formats three significant figures with a suitable prefix.
fn human(value: f64, unit: &str) -> String {
    let (value, unit) = match unit {
        "ns" if value >= 1e6 => (value / 1e6, "ms"),
        "ns" if value >= 1e3 => (value / 1e3, "us"),
        "/s" if value >= 1e6 => (value / 1e6, "M/s"),
        "/s" if value >= 1e3 => (value / 1e3, "k/s"),
        "B/s" if value >= 1e9 => (value / 1e9, "GB/s"),
        "B/s" if value >= 1e6 => (value / 1e6, "MB/s"),
        unit => (value, unit),
    };
    format!("{} {unit}", significant(value))
}

fn significant(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        v if v >= 0.001 => format!("{value:.3}"),
        0.0 => "0".into(),
        _ => format!("{value:.6}"),
    }
}

fn reason(name: &str) -> Option<&'static str> {
    let fits = |key: &str| match key.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == key,
    };
    REASONS.lines().filter_map(|line| line.split_once('\t')).find(|(key, _)| fits(key)).map(|(_, why)| why)
}

/// Returns the README with its excerpt regenerated from the page.
fn quoted(readme: &str, page: &Path) -> Result<String> {
    let page = fs::read_to_string(page).with_context(|| page.display().to_string())?;
    let (Some(begin), Some(end)) = (readme.find(BEGIN), readme.find(END)) else {
        bail!("no block between `{BEGIN}` and `{END}`");
    };
    ensure!(begin < end, "`{END}` is before `{BEGIN}`");
    let mut block =
        format!("{BEGIN}\n| what | ours | peer | ratio | target | |\n|---|---|---|---|---|---|\n");
    for line in QUOTED.lines() {
        let [name, words, peer] = line.split('\t').collect::<Vec<_>>()[..] else {
            bail!("quoted.tsv: {line:?}: expected three columns");
        };
        let row = page.lines().find_map(|line| line.strip_prefix(&format!("| {name} | ")));
        let row = row.with_context(|| format!("{name:?} is in quoted.tsv and not on the page"))?;
        let (ours, rest) = row.split_once(" | ").with_context(|| format!("{name:?} has no figures"))?;
        let _ = writeln!(block, "| {words} | {ours} | {peer}: {rest}");
    }
    block.push_str(
        "\nAll measurements, the machine, and the missed targets with their reasons: [Numbers](docs/book/src/numbers.md).\n",
    );
    Ok(format!("{}{block}{}", &readme[..begin], &readme[end..]))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{BEGIN, END, QUOTED, REASONS, REPS, check, human, page, quoted, reason, subjects};

    #[test]
    fn subjects_are_the_measuring_commands() {
        let names: Vec<String> = subjects().iter().map(|subject| subject.get_name().to_owned()).collect();
        for name in ["ring", "gate", "mux", "send", "framing", "replay", "instructions"] {
            assert!(names.iter().any(|subject| subject == name), "{name} of {names:?}");
        }
        for name in ["numbers", "all", "side", "variance"] {
            assert!(!names.iter().any(|subject| subject == name), "{name}");
        }
    }

    #[test]
    fn page_lists_metrics_and_reasons() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let metrics = r#"[
            {"name": "fast", "ours": 12000000, "peer": 580000, "unit": "/s", "ratio": 20.69, "better": "higher", "bar": 8, "holds": true},
            {"name": "nothing to divide", "ours": 0, "peer": 0, "unit": "each", "ratio": null, "better": "lower", "bar": 0, "holds": false}
        ]"#;
        let text = page(&[file("ring.json", metrics)]).unwrap();
        assert!(text.contains("Of 2 targets, 1 hold and 1 are missed"), "{text}");
        assert!(text.contains("| fast | 12.0 M/s | 580 k/s | 20.7 x | ≥ 8 | holds |"), "{text}");
        assert!(text.contains("- **nothing to divide** (-, target ≤ 0): not known yet"), "{text}");
        let command = format!("`target/release/towpath-bench ring --json --reps {REPS}`");
        assert!(text.contains(&command), "{text}");
        assert!(text.contains("\nNot measured: round trip 64 B"), "{text}");
        let unknown = page(&[file("rong.json", "[]")]).unwrap_err();
        assert!(format!("{unknown:#}").contains("no subject"), "{unknown:#}");
    }

    #[test]
    fn readme_excerpt_is_generated_from_page() {
        let directory = tempfile::tempdir().unwrap();
        let page = directory.path().join("numbers.md");
        let rows: String = QUOTED
            .lines()
            .map(|line| {
                format!("| {} | 2 /s | 1 /s | 2.00 x | ≥ 1 | holds |\n", line.split('\t').next().unwrap())
            })
            .collect();
        std::fs::write(&page, rows).unwrap();
        let readme = format!("before\n{BEGIN}\nstale\n{END}\nafter\n");
        let new = quoted(&readme, &page).unwrap();
        assert!(new.starts_with("before\n") && new.ends_with("\nafter\n") && !new.contains("stale"), "{new}");
        assert_eq!(new.matches("| 2 /s | ").count(), QUOTED.lines().count(), "{new}");
        assert_eq!(quoted(&new, &page).unwrap(), new, "once is enough");
        std::fs::write(&page, "| nothing |\n").unwrap();
        assert!(quoted(&readme, &page).is_err());
    }

    #[test]
    fn repository_readme_matches_page() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let page = root.join("docs/book/src/numbers.md");
        check(&root.join("README.md"), &page).unwrap();
    }

    #[test]
    fn reasons_match_by_name_or_prefix() {
        assert!(REASONS.lines().all(|line| line.split('\t').count() == 2));
        assert_eq!(reason("no such metric"), None);
        let (key, why) = REASONS.lines().next().unwrap().split_once('\t').unwrap();
        assert_eq!(reason(&key.replace('*', " and more")), Some(why));
    }

    #[test]
    fn human_selects_prefix() {
        let rows = [
            (427.3, "ns", "427 ns"),
            (34_000.0, "ns", "34.0 us"),
            (0.0583, "s/GB", "0.058 s/GB"),
            (3.2e9, "B/s", "3.20 GB/s"),
            (0.0, "each", "0 each"),
        ];
        for (value, unit, text) in rows {
            assert_eq!(human(value, unit), text);
        }
    }
}
