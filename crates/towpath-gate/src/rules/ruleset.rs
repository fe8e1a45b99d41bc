//! Rulesets: all rules, tables and pipes of a configuration.

use std::collections::BTreeMap;

use super::diagnostic::Diagnostic;
use super::rule::{Action, DEFAULT_RULE, RESERVED_SET, Rule};
use super::table::Table;

/// Result of [`Ruleset::parse`].
#[derive(Debug)]
pub struct Parsed {
    /// The ruleset, or all errors of the file.
    pub ruleset: Result<Ruleset, Vec<Diagnostic>>,
    /// Warnings: valid, but probably not intended.
    pub warnings: Vec<Diagnostic>,
}

/// All rules, tables and pipes of a configuration. The last rule is always the default rule.
#[derive(Clone, Debug)]
pub struct Ruleset {
    pub(crate) rules: Vec<Rule>,
    pub(crate) tables: BTreeMap<Box<str>, Table>,
    pub(crate) pipes: BTreeMap<u32, Pipe>,
    pub(crate) disabled_sets: u32,
}

/// A policer (token bucket).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipe {
    /// Rate in bits per second; 0 means no limit.
    pub rate: u64,
    /// Burst in bytes; 0 is the traffic of 50 ms.
    pub burst: u64,
}

impl Ruleset {
    /// Parses a rule file: one command per line. `file` is the name in messages.
    ///
    /// `table NAME load FILE` is an error; [`Ruleset::parse_with_files`] executes it.
    pub fn parse(file: &str, text: &str) -> Parsed {
        super::parse::file(file, text, None)
    }

    /// Parses a rule file like [`Ruleset::parse`]. `read` reads the files that `table NAME load FILE` names.
    ///
    /// ```
    /// use towpath_gate::rules::Ruleset;
    ///
    /// let read = |name: &str| match name {
    ///     "good" => Ok("10.0.0.0/8 1\n# comment\n192.0.2.1\n".to_owned()),
    ///     _ => Ok("10.0.0.0/8 1\n10.0.0.0/33\n".to_owned()),
    /// };
    /// let text = |file: &str| format!("table T create type addr\ntable T load {file}");
    /// let ruleset = Ruleset::parse_with_files("t", &text("good"), read).ruleset.unwrap();
    /// assert_eq!(ruleset.table("T").unwrap().len(), 2);
    /// let errors = Ruleset::parse_with_files("t", &text("bad"), read).ruleset.unwrap_err();
    /// assert!(errors[0].to_string().starts_with("bad:2:1: "));
    /// ```
    pub fn parse_with_files(
        file: &str,
        text: &str,
        read: impl Fn(&str) -> std::io::Result<String> + 'static,
    ) -> Parsed {
        super::parse::file(file, text, Some(Box::new(read)))
    }

    /// Parses a rule file as an extension of the tables of this ruleset. Entries of tables are not copied.
    pub fn parse_with_tables(&self, file: &str, text: &str) -> Parsed {
        super::parse::file_with_tables(file, text, self.tables.clone())
    }

    /// Reads the entries of a table from a file with one entry per line, `KEY` or `KEY VALUE`. The result has the
    /// type, columns and limit of `like`, and only these entries. With `quiet`, the last entry of a key counts;
    /// without, a second one is an error.
    ///
    /// # Errors
    /// All errors of the file.
    pub fn load_table(file: &str, text: &str, like: &Table, quiet: bool) -> Result<Table, Vec<Diagnostic>> {
        super::parse::table_file(file, text, like, quiet)
    }

    /// Replaces the table with this name. Returns false if it does not exist.
    pub fn set_table(&mut self, name: &str, table: Table) -> bool {
        self.tables.get_mut(name).map(|own| *own = table).is_some()
    }

    /// Returns the table with this name.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.get(name)
    }

    /// Executes commands that add or delete table entries, all or none of them, without parsing the rest again.
    /// Returns the names of the changed tables, or all errors. Returns `None`, without any change, if `text`
    /// contains other commands or names unknown tables: the whole ruleset must then be parsed again.
    ///
    /// ```
    /// use towpath_gate::rules::Ruleset;
    ///
    /// let mut rules = Ruleset::parse("t", "table T create type addr\ntable T add 10.0.0.0/8 1").ruleset.unwrap();
    /// let changed = rules.change_entries("command", "table T delete 10.0.0.0/8\ntable T add 10.1.0.0/16 2");
    /// assert_eq!(changed.unwrap().unwrap(), ["T"]);
    /// assert!(rules.change_entries("command", "table T add 10.1.0.0/16 3").unwrap().is_err());
    /// assert!(rules.change_entries("command", "add allow ip from any to any").is_none());
    /// ```
    pub fn change_entries(&mut self, file: &str, text: &str) -> Option<Result<Vec<String>, Vec<Diagnostic>>> {
        let parsed = super::parse::entries(file, text, &self.tables)?;
        Some(parsed.ruleset.map(|changed| {
            let names = changed.tables.keys().map(ToString::to_string).collect();
            self.tables.extend(changed.tables);
            names
        }))
    }

    /// Creates a ruleset with only the default rule, which denies.
    pub fn empty() -> Self {
        let at = super::diagnostic::Position::default();
        let default = Rule {
            number: DEFAULT_RULE,
            set: RESERVED_SET,
            prob: None,
            action: Action::Deny,
            log: None,
            tag: None,
            body: super::parse::any_to_any(),
            state: None,
            defer: false,
            comment: None,
            at,
        };
        Self { rules: vec![default], tables: BTreeMap::new(), pipes: BTreeMap::new(), disabled_sets: 0 }
    }

    /// Sets the action of the default rule: allow (true) or deny (false, the initial action).
    #[must_use]
    pub fn with_default_allow(mut self, allow: bool) -> Self {
        if let Some(default) = self.rules.last_mut() {
            default.action = if allow { Action::Allow } else { Action::Deny };
        }
        self
    }

    /// The rules in order; the default rule is last.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The tables by name.
    pub fn tables(&self) -> impl Iterator<Item = (&str, &Table)> {
        self.tables.iter().map(|(name, table)| (&**name, table))
    }

    /// The pipes by number.
    pub fn pipes(&self) -> impl Iterator<Item = (u32, Pipe)> {
        self.pipes.iter().map(|(number, pipe)| (*number, *pipe))
    }

    /// Returns true if `set` (0 to 31) is enabled.
    pub fn set_enabled(&self, set: u8) -> bool {
        self.disabled_sets >> (set & 31) & 1 == 0
    }

    /// Returns true if both have the same rules, tables, entries, pipes and sets. Positions in files are ignored.
    pub fn same_as(&self, other: &Self) -> bool {
        let rule = |a: &Rule, b: &Rule| Rule { at: b.at, ..a.clone() } == *b;
        self.rules.len() == other.rules.len()
            && self.rules.iter().zip(&other.rules).all(|(a, b)| rule(a, b))
            && self.tables.len() == other.tables.len()
            && self.tables.iter().zip(&other.tables).all(|(a, b)| a.0 == b.0 && a.1.same_as(b.1))
            && (&self.pipes, self.disabled_sets) == (&other.pipes, other.disabled_sets)
    }

    /// Returns the configuration as a rule file that parses to the same ruleset.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (name, table) in &self.tables {
            table.write_commands(name, &mut text);
        }
        text + &self.to_text_without_tables()
    }

    /// Returns the part of [`Ruleset::to_text`] behind the tables.
    pub fn to_text_without_tables(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for (number, pipe) in &self.pipes {
            let _ = writeln!(text, "pipe {number} config bw {}bit/s burst {}", pipe.rate, pipe.burst);
        }
        let labels = super::parse::label_lines(&self.rules);
        for (i, rule) in self.rules.iter().enumerate() {
            for label in labels.get(&i).into_iter().flatten() {
                let _ = writeln!(text, ":{label}");
            }
            if i + 1 < self.rules.len() {
                let set = if rule.set == 0 { String::new() } else { format!("set {} ", rule.set) };
                let _ = writeln!(text, "add {:05} {set}{rule}", rule.number);
            }
        }
        if self.disabled_sets != 0 {
            let sets = (0..32u8).filter(|set| !self.set_enabled(*set)).map(|set| format!(" {set}"));
            let _ = writeln!(text, "set disable{}", sets.collect::<String>());
        }
        text
    }
}
