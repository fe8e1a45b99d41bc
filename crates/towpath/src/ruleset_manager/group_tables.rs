//! Tables whose entries come from a group of gates. A reload and a version of the group keep their entries.

use std::fmt::Write;

use towpath_gate::rules::table::{Listing, Table};
use towpath_gate::rules::{Diagnostic, Ruleset};

use super::{Book, RulesetManager, words};

/// The file name in errors.
const NAME: &str = "entries";

impl Book {
    /// Gives the tables of the group the entries that they have in the rules that run, if they have the same type.
    pub(super) fn keep_group_tables(&self, ruleset: &mut Ruleset) {
        for name in &self.group_tables {
            let like = |table: &Table| (table.kind(), table.columns().to_vec(), table.limit());
            if let (Some(now), Some(new)) = (self.ruleset.table(name), ruleset.table(name))
                && like(now) == like(new)
            {
                ruleset.set_table(name, now.clone());
            }
        }
    }

    /// Refuses commands that change a table of the group at this gate alone.
    pub(super) fn refuse_group_tables(&self, text: &str) -> Result<(), Vec<Diagnostic>> {
        let refused = |(line, number): (&str, u32)| {
            let mut words = words(line);
            let (Some("table"), Some(name), how, with) =
                (words.next(), words.next(), words.next(), words.next())
            else {
                return None;
            };
            // `table A swap B` changes both; `table all flush` changes each one.
            let swapped = with.filter(|_| how == Some("swap"));
            let changed = |own: &&String| *own == name || name == "all" || swapped == Some(own);
            let name = self.group_tables.iter().find(changed)?;
            let column = line.find("table").map_or(1, |at| line[..at].chars().count() as u32 + 1);
            Some(Diagnostic {
                file: "command".into(),
                line: number,
                column,
                end: column + "table".len() as u32,
                message: format!("the entries of {name} come from the group"),
                hint: Some(format!("use `towpath ctl fleet table {name}`")),
                no_such_rule: false,
            })
        };
        let found: Vec<Diagnostic> = text.lines().zip(1..).filter_map(refused).collect();
        if found.is_empty() { Ok(()) } else { Err(found) }
    }
}

/// The lines as commands of a rule file. A line that is no entry becomes a command that is refused.
fn commands<'a>(table: &str, lines: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::new();
    for line in lines {
        let entry = line.starts_with("add ") || line.starts_with("delete ");
        let _ = writeln!(text, "-q table {table} {}", if entry { line } else { "add" });
    }
    text
}

impl RulesetManager {
    /// Checks lines `add KEY`, `add KEY VALUE` and `delete KEY` for a table.
    ///
    /// # Errors
    /// All errors of the lines, or the table does not exist.
    pub fn check_group_entries(&self, table: &str, lines: &str) -> Result<(), String> {
        let mut ruleset = self.book().ruleset.clone();
        match ruleset.change_entries(NAME, &commands(table, lines.lines())) {
            Some(Ok(_)) => Ok(()),
            Some(Err(errors)) => Err(errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")),
            None => Err(format!("the rules of this gate have no table {table}")),
        }
    }

    /// Checks lines of `file` that replace all entries of a table.
    ///
    /// # Errors
    /// All errors of the lines, or why the table cannot be loaded.
    pub fn check_group_load(&self, table: &str, file: &str, lines: &str) -> Result<(), Vec<Diagnostic>> {
        self.load_entries(table, file, lines, true, true).map(|_| ())
    }

    /// Adds and deletes entries of a table of the group. Returns the number of lines that were refused.
    pub fn change_group_entries(&self, table: &str, lines: &str) -> u64 {
        let mut book = self.book();
        let Book { gate, ruleset, .. } = &mut *book;
        let mut change = |text: &str| matches!(ruleset.change_entries(NAME, text), Some(Ok(_)));
        let mut refused = 0;
        if !change(&commands(table, lines.lines())) {
            // One of them is wrong: the others are applied.
            refused =
                lines.lines().filter(|line| !change(&commands(table, std::iter::once(*line)))).count() as u64;
        }
        if let Some(changed) = ruleset.table(table) {
            gate.with_table(table, |own| *own = changed.clone());
            self.changed();
        }
        refused
    }

    /// Replaces all entries of a table, which belongs to the group from now on. The last entry of a key counts.
    ///
    /// # Errors
    /// All errors of the lines, or why the table cannot be loaded.
    pub fn load_group_entries(&self, table: &str, lines: &str) -> Result<(), Vec<Diagnostic>> {
        self.load_entries(table, NAME, lines, true, false)?;
        self.book().group_tables.insert(table.to_owned());
        Ok(())
    }

    /// A table as it is now.
    pub fn table(&self, table: &str) -> Option<Table> {
        self.book().ruleset.table(table).cloned()
    }

    /// The entries of a table as lines `KEY VALUE`.
    pub fn entry_lines(&self, table: &str) -> Option<String> {
        let mut text = String::new();
        write_entries(&self.table(table)?, |line| text.push_str(line));
        Some(text)
    }
}

/// Passes the entries of a table to `take` as lines `KEY VALUE`.
pub fn write_entries(table: &Table, mut take: impl FnMut(&str)) {
    let mut line = String::new();
    for (key, value) in Listing::new(table).iter_from(0) {
        line.clear();
        let _ = writeln!(line, "{} {}", table.show_key(&key), table.show_value(&value));
        take(&line);
    }
}
