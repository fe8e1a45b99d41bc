//! Rules with `offload` in an engine that offloads no flows.

use std::sync::Arc;

use super::diagnostic::{Diagnostic, Fault};
use super::ruleset::Ruleset;

impl Ruleset {
    /// Returns an error about the first rule with `offload`, for a configuration without it.
    pub fn offload_without_table(&self, file: &str) -> Option<Diagnostic> {
        let rule = self.rules.iter().find(|rule| rule.state.as_ref().is_some_and(|state| state.offload))?;
        let fault = Fault::new(rule.at, "`offload` needs the table [offload] of the configuration")
            .hint("add the line `[offload]` to the configuration, or remove the word");
        Some(fault.in_file(&Arc::from(file)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_with_offload_is_named() {
        for (text, expected) in [
            ("add allow ip from any to any keep-state", None),
            ("add allow tcp from any to any\nadd allow ip from any to any keep-state offload", Some("t:2:")),
        ] {
            let ruleset = Ruleset::parse("t", text).ruleset.unwrap();
            let found = ruleset.offload_without_table("t").map(|found| found.to_string());
            assert_eq!(found.is_some(), expected.is_some(), "{text}");
            assert!(found.is_none_or(|found| found.starts_with(expected.unwrap())), "{text}");
        }
    }
}
