//! `towpath-bench all`: runs every subject in sequence, each in a separate process with a separate output file.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::numbers::{subjects, words};

/// Runs all subjects. Returns true if every metric was measured and meets its target.
pub(crate) fn run(json: bool, directory: &Path, reps: u32) -> Result<bool> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let program = std::env::current_exe().context("this program")?;
    let (mut good, mut all) = (true, Vec::new());
    for subject in subjects() {
        let name = subject.get_name();
        // Remove a file of an earlier run, which would be mistaken for this run's if the subject fails.
        let file = directory.join(format!("{name}.json"));
        match fs::remove_file(&file) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| file.display().to_string());
            }
            _ => {}
        }
        eprintln!("== {name}");
        let mut command = Command::new(&program);
        command.args(words(&subject, reps)).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().with_context(|| name.to_owned())?;
        good &= output.status.success();
        // A missed target keeps the other metrics; missing JSON output is an error.
        match serde_json::from_slice::<Vec<Value>>(&output.stdout) {
            Ok(metrics) => {
                fs::write(&file, &output.stdout).with_context(|| file.display().to_string())?;
                all.extend(metrics);
            }
            Err(error) => {
                good = false;
                eprintln!("{name}: no metrics ({}; {error})", output.status);
            }
        }
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&all)?);
    }
    Ok(good)
}
