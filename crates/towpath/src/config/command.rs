//! Commands of processes that the engine starts: inspectors, and workers of muxes.

use std::path::Path;

use super::reader::{At, Table};

/// The words of a command, split as by a shell. A program with a directory is relative to the configuration's directory; other
/// programs are looked up in PATH.
pub(super) fn words(table: &Table<'_, '_>, text: &At<&str>, directory: &Path) -> Option<Vec<String>> {
    match shell_words::split(text.value) {
        Ok(mut words) => {
            if let Some(program) = words.first_mut() {
                if program.contains('/') {
                    // A directory that is not UTF-8 cannot become part of a word: keep the program as written.
                    let joined = directory.join(&*program).into_os_string().into_string();
                    *program = joined.unwrap_or_else(|_| std::mem::take(program));
                }
                return Some(words);
            }
            table.wrong(&text.span, "the command is empty", "name a program");
        }
        Err(error) => table.wrong(&text.span, format!("cannot split the command: {error}"), ""),
    }
    None
}
