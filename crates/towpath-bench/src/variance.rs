//! `towpath-bench variance`: compares several runs of the same rows.
//!
//! A run is the `--json` output of a subject. A row is steady if all runs have it, there are at least two runs, and the ratio of each run is
//! within [`STEADY`] of the median of all runs. For a row without a peer, our figure is compared instead of the ratio. The variation of our figure and the
//! peer's is shown too; on a shared machine, both vary together. `--write` stores the result in `variance.tsv`, whose first line describes
//! the machine; the page of numbers shows the stored table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::stat::median;

/// Maximum relative distance of a run from the median.
pub(crate) const STEADY: f64 = 0.15;
/// The stored result at build time.
const KEPT: &str = include_str!("../variance.tsv");

/// The compared fields of a run's row.
#[derive(Debug, Deserialize)]
struct Run {
    name: String,
    ours: f64,
    peer: Option<f64>,
    unit: String,
    ratio: Option<f64>,
}

/// One row over all runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Variance {
    pub(crate) name: String,
    pub(crate) unit: String,
    /// Number of runs with this row.
    pub(crate) runs: usize,
    pub(crate) ours: Range,
    pub(crate) peer: Option<Range>,
    pub(crate) ratio: Option<Range>,
    pub(crate) steady: Steady,
}

/// Result of the comparison of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Steady {
    /// The ratio is within [`STEADY`] of its median in all runs; without a peer, our figure is.
    Yes,
    No,
    /// A run lacks the row, or there is only one run: nothing was compared.
    FewerRuns,
}

/// Range of a figure over the runs, in the row's unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Range {
    pub(crate) least: f64,
    pub(crate) median: f64,
    pub(crate) most: f64,
    /// Largest distance of a run from the median, relative to the median.
    pub(crate) away: f64,
}

/// Compares the runs in `files` and prints the result. Returns true if every row is steady. `write` stores the result.
pub(crate) fn run(files: &[impl AsRef<Path>], json: bool, write: bool) -> Result<bool> {
    ensure!(!files.is_empty(), "no files: a subject writes one with `--json > FILE`, one for each run");
    let runs = files.iter().map(|file| read(file.as_ref())).collect::<Result<Vec<_>>>()?;
    let rows = of(&runs);
    if json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        print!("{}", table(&rows));
    }
    if write {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/variance.tsv");
        let text = format!("# {} runs; {}\n{}", files.len(), crate::machine::describe(), kept(&rows));
        fs::write(path, text).with_context(|| format!("writing {path}"))?;
        eprintln!("wrote {path}; rebuild towpath-bench to include it in `numbers`");
    }
    Ok(rows.iter().all(|row| row.steady == Steady::Yes))
}

/// Returns the section of the page of numbers; empty without a stored result.
pub(crate) fn section() -> Result<String> {
    let rows = parse(KEPT)?;
    if rows.is_empty() {
        return Ok(String::new());
    }
    let steady = rows.iter().filter(|row| row.steady == Steady::Yes).count();
    let alone = rows.iter().filter(|row| row.ours.away <= STEADY).count();
    let of = KEPT.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or("several runs");
    let mut page = format!(
        "\n## Variation between runs\n\n\
         Whole runs of the live rows, one after the other ({of}): the minimum, median and maximum of each figure, and the largest distance from \
         the median (*away*). A row is steady when its ratio is within {:.0}% of its median in every run. Of {} rows, {steady} are steady and {} \
         are not; our figure alone is within this bound in {alone} rows. `target/release/towpath-bench variance RUN.json...` compares runs of \
         `towpath-bench live --json`.\n\n\
         | what | runs | ours | away | peer's | away | ratio | away | |\n|---|---|---|---|---|---|---|---|---|\n",
        STEADY * 100.0,
        rows.len(),
        rows.len() - steady,
    );
    for row in &rows {
        let away = |range: &Range| format!("{:.0}%", range.away * 100.0);
        let none = || "-".to_owned();
        // Writing to a String cannot fail.
        let _ = writeln!(
            page,
            "| {} | {} | {} {} | {} | {} | {} | {} | {} | {} |",
            row.name,
            row.runs,
            figures(&row.ours),
            row.unit,
            away(&row.ours),
            row.peer.as_ref().map_or_else(none, figures),
            row.peer.as_ref().map_or_else(none, away),
            row.ratio.as_ref().map_or_else(none, figures),
            row.ratio.as_ref().map_or_else(none, away),
            match row.steady {
                Steady::Yes => "steady",
                Steady::No => "**not steady**",
                Steady::FewerRuns => "fewer runs",
            },
        );
    }
    Ok(page)
}

fn read(file: &Path) -> Result<Vec<Run>> {
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{}: not the JSON output of a subject", file.display()))
}

/// Collects the rows of all runs, in order of first appearance.
fn of(runs: &[Vec<Run>]) -> Vec<Variance> {
    let mut order = Vec::new();
    let mut rows: BTreeMap<&str, Vec<&Run>> = BTreeMap::new();
    for run in runs.iter().flatten() {
        let row = rows.entry(&run.name).or_default();
        if row.is_empty() {
            order.push(run.name.as_str());
        }
        row.push(run);
    }
    let most = runs.len();
    let variance = |name: &str| {
        let runs = &rows[name];
        let ours = Range::of(runs.iter().map(|run| run.ours)).expect("a row has a run");
        let ratio = Range::of(runs.iter().filter_map(|run| run.ratio));
        Variance {
            name: name.to_owned(),
            unit: runs[0].unit.clone(),
            runs: runs.len(),
            ours,
            peer: Range::of(runs.iter().filter_map(|run| run.peer)),
            ratio,
            steady: Steady::of(runs.len(), most, &ours, ratio.as_ref()),
        }
    };
    order.into_iter().map(variance).collect()
}

impl Steady {
    fn of(runs: usize, most: usize, ours: &Range, ratio: Option<&Range>) -> Self {
        let near = |range: &Range| range.away <= STEADY + 1e-9;
        match runs > 1 && runs == most {
            false => Self::FewerRuns,
            true if near(ratio.unwrap_or(ours)) => Self::Yes,
            true => Self::No,
        }
    }
}

impl Range {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.collect();
        let median = median(&values);
        let least = values.iter().copied().reduce(f64::min)?;
        let most = values.iter().copied().reduce(f64::max)?;
        // A median of zero has no relative distance.
        let away = (most - median).max(median - least) / if median == 0.0 { 1.0 } else { median.abs() };
        Some(Self { least, median, most, away })
    }
}

/// Formats a range as three figures of at most four significant digits.
fn figures(range: &Range) -> String {
    let figure = |value: f64| match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    format!("{} / {} / {}", figure(range.least), figure(range.median), figure(range.most))
}

fn table(rows: &[Variance]) -> String {
    let mut text =
        format!("{:<44} {:>4} {:>24} {:<7} {:>5} {:>5}\n", "what", "runs", "ours", "unit", "away", "ratio");
    for row in rows {
        let ratio = row.ratio.map_or_else(|| "-".into(), |ratio| format!("{:.0}%", ratio.away * 100.0));
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:<44} {:>4} {:>24} {:<7} {:>4.0}% {ratio:>5}{}",
            row.name,
            row.runs,
            figures(&row.ours),
            row.unit,
            row.ours.away * 100.0,
            match row.steady {
                Steady::Yes => "",
                Steady::No => "  NOT STEADY",
                Steady::FewerRuns => "  FEWER RUNS",
            },
        );
    }
    text
}

/// Formats the stored lines: name, unit and runs; minimum, median and maximum of ours, the peer's and the ratio; `-` for missing figures.
fn kept(rows: &[Variance]) -> String {
    let mut text = String::new();
    for row in rows {
        let range = |range: Option<Range>| match range {
            Some(Range { least, median, most, .. }) => format!("{least:.4}\t{median:.4}\t{most:.4}"),
            None => "-\t-\t-".to_owned(),
        };
        let (ours, peer, ratio) = (range(Some(row.ours)), range(row.peer), range(row.ratio));
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}\t{}\t{}\t{ours}\t{peer}\t{ratio}", row.name, row.unit, row.runs);
    }
    text
}

fn parse(text: &str) -> Result<Vec<Variance>> {
    let lines = || text.lines().filter(|line| !line.starts_with('#'));
    let runs = |line: &str| line.split('\t').nth(2)?.parse().ok();
    let most = lines().filter_map(runs).max().unwrap_or(0);
    lines()
        .map(|line| {
            let columns: Vec<&str> = line.split('\t').collect();
            let [name, unit, runs, figures @ ..] = &columns[..] else { bail!("variance.tsv: {line:?}") };
            ensure!(figures.len() == 9, "variance.tsv: {line:?} expected twelve columns");
            let range =
                |at: usize| Range::of(figures[at..at + 3].iter().filter_map(|figure| figure.parse().ok()));
            let ours = range(0).with_context(|| format!("variance.tsv: {name} has no figures"))?;
            let ratio = range(6);
            let runs = runs.parse().with_context(|| format!("variance.tsv: {line:?}"))?;
            Ok(Variance {
                name: (*name).to_owned(),
                unit: (*unit).to_owned(),
                runs,
                ours,
                peer: range(3),
                ratio,
                steady: Steady::of(runs, most, &ours, ratio.as_ref()),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{KEPT, Run, Steady, kept, of, parse, run, section, table};

    fn row(name: &str, ours: f64, peer: Option<f64>) -> Run {
        Run { name: name.into(), ours, peer, unit: "k/s".into(), ratio: peer.map(|peer| ours / peer) }
    }

    #[test]
    fn steady_if_every_run_is_near_median() {
        use Steady::{FewerRuns, No, Yes};
        let same = &[50.0; 5];
        let rows: [(&[f64], &[f64], f64, Steady); 7] = [
            (&[100.0], same, 0.0, FewerRuns),
            (&[100.0, 110.0, 90.0], same, 0.1, Yes),
            (&[100.0, 100.0, 85.0, 100.0, 115.0], same, 0.15, Yes),
            (&[100.0, 100.0, 100.0, 100.0, 84.0], same, 0.16, No),
            (&[0.0, 0.0, 0.0], same, 0.0, Yes),
            // A slower machine for both sides, and the same values of ours with another ratio.
            (&[100.0, 100.0, 50.0], &[50.0, 50.0, 25.0], 0.5, Yes),
            (&[100.0, 100.0, 100.0], &[50.0, 50.0, 80.0], 0.0, No),
        ];
        for (ours, peers, away, steady) in rows {
            let runs: Vec<_> =
                ours.iter().zip(peers).map(|(ours, peer)| vec![row("a", *ours, Some(*peer))]).collect();
            let variance = &of(&runs)[0];
            assert!((variance.ours.away - away).abs() < 1e-9, "{ours:?}: {variance:?}");
            assert_eq!((variance.steady, variance.runs), (steady, ours.len()), "{ours:?}");
        }
    }

    #[test]
    fn rows_keep_order_of_first_appearance() {
        let runs = [vec![row("b", 1.0, None), row("a", 2.0, Some(1.0))], vec![row("a", 3.0, Some(1.0))]];
        let rows = of(&runs);
        assert_eq!(
            rows.iter().map(|row| (row.name.as_str(), row.runs)).collect::<Vec<_>>(),
            [("b", 1), ("a", 2)]
        );
        assert_eq!((rows[0].peer, rows[0].steady), (None, Steady::FewerRuns));
        assert_eq!(parse(&kept(&rows)).unwrap().len(), 2);
        assert_eq!(
            kept(&parse(&kept(&rows)).unwrap()),
            kept(&rows),
            "a stored result is unchanged by a round trip"
        );
        assert!(table(&rows).contains("NOT STEADY"), "{}", table(&rows));
    }

    #[test]
    fn reads_json_of_subjects() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let metrics = r#"[{"name": "a", "ours": 1, "peer": 2, "unit": "k/s", "ratio": 0.5, "better": "higher", "bar": 1, "holds": false}]"#;
        let good = file("1.json", metrics);
        assert!(run(&[&good, &good], true, false).unwrap());
        let apart = file("2.json", &metrics.replace("\"ratio\": 0.5", "\"ratio\": 0.9"));
        assert!(!run(&[&good, &apart], false, false).unwrap());
        assert!(!run(&[&good], false, false).unwrap(), "nothing was compared");
        let error = run(&[file("3.json", "[1]")], false, false).unwrap_err();
        assert!(format!("{error:#}").contains("not the JSON output of a subject"), "{error:#}");
        assert!(run(&[] as &[&str], false, false).is_err());
    }

    #[test]
    fn stored_result_round_trips() {
        let rows = parse(KEPT).unwrap();
        assert_eq!(
            section().unwrap().matches("| steady |").count(),
            rows.iter().filter(|row| row.steady == Steady::Yes).count()
        );
        assert!(parse("a\tk/s\t5\t1\t2\n").is_err());
    }
}
