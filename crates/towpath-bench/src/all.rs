//! `towpath-bench all`: every subject one after the other, each in a process of its own, its bars in a file of its name.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::numbers::{subjects, words};

/// Measures what there is; whether every bar was measured and holds.
pub(crate) fn run(json: bool, directory: &Path, reps: u32) -> Result<bool> {
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let program = std::env::current_exe().context("this program")?;
    let (mut good, mut all) = (true, Vec::new());
    for subject in subjects() {
        let name = subject.get_name();
        // Without bars now there is no file: an older one would be taken for this run's.
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
        // A missed bar is no reason to lose the others; no bars at all are.
        match serde_json::from_slice::<Vec<Value>>(&output.stdout) {
            Ok(bars) => {
                fs::write(&file, &output.stdout).with_context(|| file.display().to_string())?;
                all.extend(bars);
            }
            Err(error) => {
                good = false;
                eprintln!("{name}: no bars ({}; {error})", output.status);
            }
        }
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&all)?);
    }
    Ok(good)
}
