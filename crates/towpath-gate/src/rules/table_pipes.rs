//! Rules with `pipe tablearg` whose tables name pipes that are not configured.

use std::collections::HashMap;
use std::sync::Arc;

use super::diagnostic::{Diagnostic, Fault};
use super::option::Arg;
use super::parse::tables_of;
use super::rule::Action;
use super::ruleset::Ruleset;
use super::table::Listing;

impl Ruleset {
    /// Returns a warning for every rule with `pipe tablearg` and each of its tables that has a value without a configured pipe: the
    /// rule drops those packets. Looks at every entry of these tables.
    pub fn unconfigured_table_pipes(&self, file: &str) -> Vec<Diagnostic> {
        let file: Arc<str> = file.into();
        // The first such pipe of each table: many rules may name one table.
        let mut first: HashMap<&str, Option<u32>> = HashMap::new();
        let mut warnings = Vec::new();
        for rule in self.rules.iter().filter(|rule| matches!(rule.action, Action::Pipe(Arg::Tablearg))) {
            for (name, _) in tables_of(rule) {
                let unconfigured = || {
                    let listing = Listing::new(self.tables.get(name)?);
                    let mut pipes = listing.iter_from(0).map(|(_, value)| value.pipe);
                    pipes.find(|pipe| !self.pipes.contains_key(pipe))
                };
                if let Some(pipe) = *first.entry(name).or_insert_with(unconfigured) {
                    let message = format!(
                        "pipe {pipe}, a value of the table {name}, is not configured: this rule drops its packets"
                    );
                    let hint = format!("add \"pipe {pipe} config bw RATE\", or change the entry");
                    warnings.push(Fault::new(rule.at, message).hint(hint).in_file(&file));
                }
            }
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_a_pipe_are_reported_once_per_rule() {
        let rows: [(&str, &[&str]); 4] = [
            (
                "table t add 10.0.0.1 5\npipe 5 config bw 1Mbit/s\nadd pipe tablearg ip from table(t) to any",
                &[],
            ),
            (
                "table t add 10.0.0.1 5 10.0.0.2 6 10.0.0.3 7\npipe 5 config bw 1Mbit/s\nadd pipe tablearg ip from table(t) to any",
                &["t:3:1: pipe 6, a value of the table t, is not configured"],
            ),
            ("table t add 10.0.0.1 5\nadd skipto tablearg ip from table(t) to any", &[]),
            ("table t create type addr\nadd pipe tablearg ip from table(t) to any", &[]),
        ];
        for (text, expected) in rows {
            let ruleset = Ruleset::parse("t", text).ruleset.unwrap();
            let found: Vec<String> =
                ruleset.unconfigured_table_pipes("t").iter().map(ToString::to_string).collect();
            assert_eq!(found.len(), expected.len(), "{text}: {found:?}");
            assert!(found.iter().zip(expected).all(|(found, start)| found.starts_with(start)), "{found:?}");
        }
    }
}
