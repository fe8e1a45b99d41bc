//! All rules, tables and pipes of a configuration.

use std::collections::BTreeMap;

use super::diagnostic::Diagnostic;
use super::rule::{Action, DEFAULT_RULE, RESERVED_SET, Rule};
use super::table::Table;

/// What [`Ruleset::parse`] found.
#[derive(Debug)]
pub struct Parsed {
    /// The rules, or everything that is wrong with the file.
    pub ruleset: Result<Ruleset, Vec<Diagnostic>>,
    /// What is allowed but was probably not meant.
    pub warnings: Vec<Diagnostic>,
}

/// All rules, tables and pipes of a configuration. The default rule is always its last rule.
#[derive(Clone, Debug)]
pub struct Ruleset {
    pub(crate) rules: Vec<Rule>,
    pub(crate) tables: BTreeMap<Box<str>, Table>,
    pub(crate) pipes: BTreeMap<u32, Pipe>,
    pub(crate) disabled_sets: u32,
}

/// A policer: a token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipe {
    /// Bits per second; 0 is no limit.
    pub rate: u64,
    /// Bytes that may pass at once.
    pub burst: u64,
}

impl Ruleset {
    /// Reads a rule file: one command a line. `file` is its name in messages.
    pub fn parse(file: &str, text: &str) -> Parsed {
        super::parse::file(file, text)
    }

    /// Carries out commands that add entries to tables or take them away, all or none; nothing else is read again. The names of
    /// those tables, or everything that is wrong; `None` when `text` has other commands, or tables that there are not: then
    /// nothing was done, and it has to be read behind the whole.
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

    /// No rules but the default rule, which denies.
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

    /// Makes the default rule allow (true) or deny, which it does from the start.
    #[must_use]
    pub fn with_default_allow(mut self, allow: bool) -> Self {
        if let Some(default) = self.rules.last_mut() {
            default.action = if allow { Action::Allow } else { Action::Deny };
        }
        self
    }

    /// The rules in order, the default rule last.
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

    /// Whether the rules of `set` (0 to 31) are tried.
    pub fn set_enabled(&self, set: u8) -> bool {
        self.disabled_sets >> (set & 31) & 1 == 0
    }

    /// Whether both say the same: rules, tables with their entries, pipes and sets. Where a rule stands in its file does
    /// not matter.
    pub fn same_as(&self, other: &Self) -> bool {
        let rule = |a: &Rule, b: &Rule| Rule { at: b.at, ..a.clone() } == *b;
        self.rules.len() == other.rules.len()
            && self.rules.iter().zip(&other.rules).all(|(a, b)| rule(a, b))
            && self.tables.len() == other.tables.len()
            && self.tables.iter().zip(&other.tables).all(|(a, b)| a.0 == b.0 && a.1.same_as(b.1))
            && (&self.pipes, self.disabled_sets) == (&other.pipes, other.disabled_sets)
    }

    /// The whole configuration as a rule file that reads back as the same.
    pub fn to_text(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for (name, table) in &self.tables {
            table.write_commands(name, &mut text);
        }
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
