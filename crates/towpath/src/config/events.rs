//! `[events]`: events as JSON lines.

use std::fmt;
use std::path::{Path, PathBuf};

use super::reader::{Table, meant};

/// Where events are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventOutput {
    /// A file, to which lines are appended.
    File(PathBuf),
    /// A Unix stream socket, to which the engine connects.
    Unix(PathBuf),
    /// Standard output.
    Stdout,
}

impl fmt::Display for EventOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Stdout => f.write_str("standard output"),
        }
    }
}

/// The events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Events {
    /// Where they are written.
    pub output: EventOutput,
    /// Changes of states are events.
    pub states: bool,
    /// Packets of the drop log are events.
    pub drops: bool,
    /// Packets of `log` rules are events.
    pub verdicts: bool,
}

const KINDS: [&str; 3] = ["states", "drops", "verdicts"];

pub(super) fn take(top: &Table<'_, '_>, directory: &Path) -> Option<Events> {
    let table = top.table("events")?;
    table.need("output", "write output = \"FILE\", output = \"unix:PATH\" or output = \"stdout\"");
    let output = match table.text("output").map(|text| text.value) {
        Some("stdout") | None => EventOutput::Stdout,
        Some(text) => match text.strip_prefix("unix:") {
            Some(path) => EventOutput::Unix(directory.join(path)),
            None => EventOutput::File(directory.join(text)),
        },
    };
    let include = table.texts("include");
    for kind in include.iter().filter(|kind| !KINDS.contains(&kind.value)) {
        let hint = meant(kind.value, KINDS).unwrap_or_else(|| format!("the values are {}", KINDS.join(", ")));
        table.wrong(&kind.span, format!("`include` cannot be \"{}\"", kind.value), hint);
    }
    let all = !table.has("include");
    let [states, drops, verdicts] =
        KINDS.map(|kind| all || include.iter().any(|included| included.value == kind));
    table.finish();
    Some(Events { output, states, drops, verdicts })
}
