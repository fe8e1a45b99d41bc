//! Tables of rules: lists, loads and lookups.

use std::sync::Arc;

use towpath_gate::Diff;
use towpath_gate::rules::table::{Key, Kind, Listing, Value};
use towpath_gate::rules::{Diagnostic, Ruleset};

use super::{Book, Done, NoListing, RulesetManager};

impl RulesetManager {
    /// Returns the tables: name, type, number of entries.
    pub fn tables(&self) -> Vec<(String, String, usize)> {
        let book = self.book();
        let row = |(name, table): (&str, &towpath_gate::rules::table::Table)| {
            (name.to_owned(), table.kind().to_string(), table.len())
        };
        book.ruleset.tables().map(row).collect()
    }

    /// Replaces all entries of a table by those of `text`, in one step. A line of `text` is `KEY` or `KEY VALUE`; `file` is its name in
    /// errors. If a key occurs twice, its last entry counts with `quiet`, and is an error without. With `check`, nothing is changed.
    ///
    /// The text is parsed before the lock is taken, so that queries are answered meanwhile.
    ///
    /// # Errors
    /// All errors of the text, or the reason why the table cannot be loaded.
    pub fn load_table(
        &self,
        name: &str,
        file: &str,
        text: &str,
        quiet: bool,
        check: bool,
    ) -> Result<Done, Vec<Diagnostic>> {
        self.book().refuse_group_tables(&format!("table {name} load"))?;
        self.load_entries(name, file, text, quiet, check)
    }

    /// [`load_table`](Self::load_table), also for a table of a group.
    pub(super) fn load_entries(
        &self,
        name: &str,
        file: &str,
        text: &str,
        quiet: bool,
        check: bool,
    ) -> Result<Done, Vec<Diagnostic>> {
        let refused = |message: String, hint: &str| {
            let hint = Some(hint.to_owned());
            vec![Diagnostic {
                file: "command".into(),
                line: 1,
                column: 1,
                end: 1,
                message,
                hint,
                no_such_rule: false,
            }]
        };
        let missing = || {
            let hint = "create it first, with the type of the file's keys: `table NAME create type addr`";
            refused(format!("the table {name} does not exist"), hint)
        };
        let locked = || refused(format!("the table {name} is locked"), "unlock it first");
        let like = self.book().ruleset.table(name).cloned().ok_or_else(missing)?;
        if like.is_locked() {
            return Err(locked());
        }
        let table = Ruleset::load_table(file, text, &like, quiet)?;
        let mut book = self.book();
        let Book { gate, ruleset, .. } = &mut *book;
        let diff = Diff { kept: ruleset.rules().len(), tables: vec![name.to_owned()], ..Diff::default() };
        match ruleset.table(name) {
            None => return Err(missing()),
            Some(now) if now.is_locked() => return Err(locked()),
            Some(now)
                if (now.kind(), now.columns(), now.limit())
                    != (like.kind(), like.columns(), like.limit()) =>
            {
                let message = format!("the table {name} was replaced while the file was read");
                return Err(refused(message, "load it again"));
            }
            Some(_) if check => return Ok(Done { diff, warnings: Vec::new() }),
            Some(_) => {}
        }
        ruleset.set_table(name, table.clone());
        let old = gate.with_table(name, |own| std::mem::replace(own, table));
        self.changed();
        drop(book);
        // Freeing many entries takes time.
        drop(old);
        Ok(Done { diff, warnings: Vec::new() })
    }

    /// Returns the entries of a table at this version of the rules and tables, or at the current one if none is given.
    ///
    /// # Errors
    ///
    /// The table does not exist, or its entries at this version are no longer known.
    pub fn listing(&self, name: &str, version: Option<u64>) -> Result<(u64, Arc<Listing>), NoListing> {
        if let Some(version) = version
            && let Some(listing) = self.listings.find(name, version)
        {
            return Ok((version, listing));
        }
        let (current, table) = {
            let book = self.book();
            // Under the lock: a change increments the version before the lock is released.
            (self.version(), book.ruleset.table(name).ok_or(NoListing::NoTable)?.clone())
        };
        match version {
            Some(version) if version != current => Err(NoListing::Discarded),
            _ => Ok((current, self.listings.keep(name, current, || Listing::new(&table)))),
        }
    }

    /// Looks up a key in a table. Returns the entry in ipfw's format; for addresses, the one with the longest matching prefix. `None` if
    /// the table does not exist.
    ///
    /// # Errors
    /// `key` is not a valid key of the table.
    pub fn lookup(&self, name: &str, key: &str) -> Option<Result<Option<(String, String)>, String>> {
        let book = self.book();
        let table = book.ruleset.table(name)?;
        let row = |(key, value): (Key, Value)| (table.show_key(&key), table.show_value(&value));
        Some(read_key(table.kind(), key).map(|key| table.longest(&key).ok().flatten().map(row)))
    }
}

/// Parses a key of a table of this kind, like `add`.
fn read_key(kind: Kind, text: &str) -> Result<Key, String> {
    let mut words = text.split_whitespace();
    let (Some(word), None) = (words.next(), words.next()) else {
        return Err(format!("`{text}` is not a key: a key is one word"));
    };
    let parsed = Ruleset::parse("key", &format!("table t create type {kind}\ntable t add {word}"));
    let ruleset = parsed.ruleset.map_err(|errors| errors[0].message.clone())?;
    let mut keys = ruleset.tables().flat_map(|(_, table)| table.list());
    keys.next().map(|(key, _)| key).ok_or_else(|| format!("`{word}` is not a key"))
}
