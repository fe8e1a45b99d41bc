//! Commands of processes that the engine starts: inspectors, and workers of muxes.

use std::path::Path;

use super::reader::{At, Table};

/// The words of a command, split as a shell would. A program that is named with a directory is looked for from the configuration's
/// own; one without is looked for in PATH.
pub(super) fn words(table: &Table<'_, '_>, text: &At<&str>, directory: &Path) -> Option<Vec<String>> {
    match shell_words::split(text.value) {
        Ok(mut words) => {
            if let Some(program) = words.first_mut() {
                if program.contains('/') {
                    // Whatever is not UTF-8 in the directory's own name cannot be in a word: then as it was written.
                    let joined = directory.join(&*program).into_os_string().into_string();
                    *program = joined.unwrap_or_else(|_| std::mem::take(program));
                }
                return Some(words);
            }
            table.wrong(&text.span, "the command has no word", "name a program");
        }
        Err(error) => table.wrong(&text.span, format!("the command cannot be split: {error}"), ""),
    }
    None
}
