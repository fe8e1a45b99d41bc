//! The output of the lines of `log` rules in a replay.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use towpath::logging::{Class, submit};
use towpath::packet_log::{Drained, drain, utc};
use towpath_engine::ReplayEngine;

use super::{Failure, file};
use crate::args::Replay;

/// Standard error, or the file of `--log`.
pub(super) struct LogLines(Option<Output>);

struct Output {
    path: PathBuf,
    file: BufWriter<File>,
}

impl LogLines {
    /// Creates the file, after checking that it is not another file of the replay.
    pub(super) fn create(args: &Replay) -> Result<Self, Failure> {
        let Some(path) = &args.log else { return Ok(Self(None)) };
        if path == Path::new("-") {
            let message = "--log needs the name of a file; without --log the lines go to standard error";
            return Err(Failure::Usage(message.to_owned()));
        }
        // The files of --out and --replies exist by now.
        let states = args.states_in.iter().chain(&args.states_out);
        let others = args.captures.iter().chain(&args.out).chain(&args.replies).chain(&args.rules);
        let others = others.chain(&args.wiring.config).chain(states);
        let there = file(path, &std::io::stdin());
        if let Some(other) = others
            .filter(|other| other.as_os_str() != "-")
            .find(|other| *other == path || there.is_some() && file(other, &std::io::stdin()) == there)
        {
            let message = format!(
                "--log {} would overwrite {}, which the replay uses",
                path.display(),
                other.display()
            );
            return Err(Failure::Usage(message));
        }
        let file = File::create(path).map_err(|error| failed(path, &error))?;
        Ok(Self(Some(Output { path: path.clone(), file: BufWriter::new(file) })))
    }

    /// Writes the engine's new lines. At the end, with `all`, also the summaries of suppressed lines that are not due.
    pub(super) fn write(&mut self, engine: &mut ReplayEngine, all: bool) -> Result<(), Failure> {
        let now = engine.clock();
        let walker = engine.walker_mut();
        let Some(Output { path, file }) = &mut self.0 else {
            drain(walker, now, all, |Drained { time, line, .. }| {
                submit(format!("{} {line}", utc(time, true)), Class::Packet);
            });
            return Ok(());
        };
        let mut wrote = Ok(());
        drain(walker, now, all, |Drained { time, line, .. }| {
            if wrote.is_ok() {
                wrote = writeln!(file, "{} {line}", utc(time, true));
            }
        });
        wrote.and_then(|()| if all { file.flush() } else { Ok(()) }).map_err(|error| failed(path, &error))
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Log(format!("--log: {}: {error}", path.display()))
}
