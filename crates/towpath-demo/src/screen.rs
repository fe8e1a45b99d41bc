//! Output of the demo: the live view or lines, and the files for the recording and the last picture.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use super::results::Results;
use super::status::Status;
use super::view::{Seen, View};
use super::{Failure, Options, Stop, doing, svg};
use crate::say;

/// The terminal and the output files. The files are opened before the first scene, so that errors come early.
#[derive(Debug)]
pub(super) struct Screen {
    on_terminal: bool,
    recording: Option<(PathBuf, File)>,
    still: Option<(PathBuf, File)>,
}

impl Screen {
    pub(super) fn open(options: &Options) -> Result<Self, Failure> {
        let open = |path: &Option<PathBuf>| {
            let Some(path) = path else { return Ok(None) };
            let file = File::create(path).map_err(doing(path.display().to_string()))?;
            Ok(Some((path.clone(), file)))
        };
        let on_terminal = !options.plain && View::fits();
        Ok(Self { on_terminal, recording: open(&options.record)?, still: open(&options.still)? })
    }

    /// Creates the status of these scenes. The `starred` ones have no equivalent on the kernel's path.
    pub(super) fn status(&self, scenes: &[&'static str], starred: &[&'static str]) -> Status {
        Status::new(scenes, starred, !self.on_terminal)
    }

    /// Shows `status` while `play` runs. Errors of the view are reported in the results and have no other effect.
    pub(super) fn show(
        &self,
        status: &Status,
        stop: &Stop,
        play: impl FnOnce() -> Result<Results, Failure>,
    ) -> Result<Results, Failure> {
        let wanted = self.recording.is_some() || self.still.is_some();
        let view = (self.on_terminal || wanted).then(|| View::start(status, stop, self.on_terminal));
        let mut played = play();
        if let Ok(results) = &mut played {
            results.seconds = status.shown().begun.elapsed().as_secs_f64();
            status.shown().ended = Some(results.ok);
        }
        let Some(view) = view else { return played };
        // If the demo continues without privilege, that run writes the files.
        let seen = match (view.end(), &played) {
            (_, Err(Failure::Missing(_))) => return played,
            (seen, _) => seen,
        };
        match (seen.and_then(|seen| self.write(&seen)), &mut played) {
            (Ok(()), _) => {}
            (Err(failure), Ok(results)) if wanted => {
                results.expect("the screen is recorded", false, failure.to_string());
            }
            (Err(failure), Ok(results)) => results.left_out.push(format!("the picture: {failure}")),
            // The caller reports this error.
            (Err(failure), Err(_)) => say(format_args!("towpath demo: not recorded: {failure}")),
        }
        played
    }

    fn write(&self, seen: &Seen) -> Result<(), Failure> {
        if let Some((path, file)) = &self.recording {
            let mut file = io::BufWriter::new(file);
            let written = seen.cast.emit(&mut file).and_then(|()| io::Write::flush(&mut file));
            written.map_err(doing(path.display().to_string()))?;
        }
        if let Some((path, mut file)) = self.still.as_ref().map(|(path, file)| (path, file)) {
            let written = io::Write::write_all(&mut file, svg::svg(&seen.screen).as_bytes());
            written.map_err(doing(path.display().to_string()))?;
        }
        Ok(())
    }
}
