//! Instruction counts of the live packet path without interfaces, by callgrind, compared with the stored counts.
//! (`crates/towpath-gate/examples/instructions.rs` counts the gate's steps.)
//!
//! Each step runs in two processes under `valgrind --tool=callgrind`, the second with twice the iterations. The difference is the cost
//! of the step. Counts depend on the compiler and are compared only if it is the same.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::live::path::{COURSES, Path};
use crate::metric::{Better, Metric, Report};
use crate::peer::Skipped;

/// The stored counts; the first line names the compiler.
const KEPT: &str = include_str!("../../instructions.tsv");

/// Ratio above which an increase is reported.
const MORE: f64 = 1.05;

/// Iterations per step.
const TIMES: u32 = 2000;

/// Counts and prints all steps. Returns true if no step takes 5% more than its stored count. `write` stores the counts.
pub(crate) fn run(json: bool, write: bool) -> Result<bool> {
    let compiler = compiler()?;
    let mut report = Report::new(json);
    let (kept_by, kept) = read(KEPT);
    let mut text = format!("# {compiler}\n");
    for (step, _) in COURSES {
        let count = match count(step) {
            Err(error) if error.is::<Skipped>() => {
                eprintln!("instructions: {error}");
                return Ok(report.finish()?);
            }
            count => count?,
        };
        writeln!(text, "{step}\t{count:.0}")?;
        match kept.get(step) {
            Some(before) if kept_by == compiler => {
                let name = format!("instructions: {step}");
                report.push(Metric::new(&name, count, *before, "each", Better::Lower, MORE));
            }
            Some(_) => {
                eprintln!(
                    "instructions: {step}: {count:.0}; the stored count is of another compiler ({kept_by})"
                )
            }
            None => eprintln!("instructions: {step}: {count:.0}; no stored count (--write stores it)"),
        }
    }
    if write {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.tsv");
        std::fs::write(path, text).with_context(|| format!("writing {path}"))?;
    }
    Ok(report.finish()?)
}

/// Runs a step `times` times, under callgrind.
pub(crate) fn side(step: &str, times: u32) -> Result<()> {
    let Some((_, course)) = COURSES.iter().find(|(name, _)| *name == step) else {
        bail!("unknown step {step}");
    };
    Path::new(*course)?.run(times)
}

fn count(step: &str) -> Result<f64> {
    let once = instructions(&["instructions", step, &TIMES.to_string()])?;
    let twice = instructions(&["instructions", step, &(2 * TIMES).to_string()])?;
    Ok((twice - once) / f64::from(TIMES))
}

/// Returns the instructions of a side.
pub(super) fn instructions(words: &[&str]) -> Result<f64> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
    command.arg("side").args(words);
    let output = match command.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Skipped("the program valgrind is not installed".to_owned()).into());
        }
        output => output.context("starting valgrind")?,
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected :"));
    let (_, number) = collected.with_context(|| format!("callgrind counted nothing: {}", said.trim()))?;
    number.trim().parse().with_context(|| format!("callgrind counted {number:?}"))
}

fn compiler() -> Result<String> {
    let output = Command::new("rustc").arg("--version").output().context("starting rustc --version")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn read(text: &str) -> (&str, BTreeMap<&str, f64>) {
    let by = text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
    let rows = text.lines().filter_map(|line| {
        let (name, count) = line.split_once('\t')?;
        Some((name, count.parse().ok()?))
    });
    (by, rows.collect())
}

#[cfg(test)]
mod tests {
    use super::{COURSES, KEPT, read};

    #[test]
    fn every_step_has_a_stored_count() {
        let (by, kept) = read(KEPT);
        assert!(by.starts_with("rustc "), "{by}");
        assert!(COURSES.iter().all(|(step, _)| kept.contains_key(step)));
    }
}
