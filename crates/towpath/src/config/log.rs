//! `[log]`: the format of the log and its levels.

use tracing::level_filters::LevelFilter;

use super::reader::Table;
use crate::logging::{Directive, Format, Levels, STATES, level, level_word};

/// The log.
#[derive(Clone, Debug, PartialEq)]
pub struct Log {
    /// How lines are written. `None`: by the kind of standard error.
    pub format: Option<Format>,
    /// The levels.
    pub levels: Levels,
}

/// The level of targets by default.
const LEVEL: &str = "info";

/// The beginning of the targets of the library crates.
const LIBRARIES: &str = "towpath_";

impl Default for Log {
    /// Everything of interest to an operator: the libraries' lines from `warning` on. The events of states are too many to be logged
    /// unasked.
    fn default() -> Self {
        Self { format: None, levels: levels(LEVEL) }
    }
}

fn levels(word: &str) -> Levels {
    let all = level(word).expect("a level of KEYS");
    let mut levels = Levels::new(all);
    let libraries = level_word(all.min(LevelFilter::WARN));
    for directive in [format!("{STATES}=off"), format!("{LIBRARIES}={libraries}")] {
        levels.set(&directive.parse().expect("a directive")).expect("there is room");
    }
    levels
}

pub(super) fn take(top: &Table<'_, '_>) -> Log {
    let Some(table) = top.table("log") else { return Log::default() };
    let format = table.word("format").map(|word| match word {
        "json" => Format::Json,
        "journald" => Format::Journald,
        _ => Format::Text,
    });
    let mut levels = levels(table.word("level").unwrap_or(LEVEL));
    for text in table.texts("targets") {
        let set = text.value.parse().and_then(|directive: Directive| {
            if directive.has_target() {
                return levels.set(&directive).map(|()| true);
            }
            Ok(false)
        });
        match set {
            Ok(true) => {}
            Ok(false) => {
                let hint = format!("write `TARGET={}`, or level = \"{}\"", text.value, text.value);
                table.wrong(&text.span, format!("`{}` has no target", text.value), hint);
            }
            Err(error) => table.wrong(&text.span, error.to_string(), "write targets = [\"states=info\"]"),
        }
    }
    table.finish();
    Log { format, levels }
}
