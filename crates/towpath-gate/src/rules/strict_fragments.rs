//! Rules with `strict` states whose TCP segments may come in IP fragments.

use std::sync::Arc;

use super::diagnostic::{Diagnostic, Fault};
use super::rule::Action;
use super::ruleset::Ruleset;
use crate::state::Tracking;

impl Ruleset {
    /// Returns a warning for the first rule with `strict` that has no `reass` before it.
    pub fn strict_without_reass(&self, file: &str) -> Option<Diagnostic> {
        let enabled = || self.rules.iter().filter(|rule| self.set_enabled(rule.set));
        let strict = enabled()
            .find(|rule| rule.state.as_ref().is_some_and(|state| state.tracking == Tracking::Strict))?;
        if enabled()
            .take_while(|rule| !std::ptr::eq(*rule, strict))
            .any(|rule| matches!(rule.action, Action::Reass))
        {
            return None;
        }
        let message = "`strict` checks a TCP segment in IP fragments by its first fragment only: no rule before this one has `reass`";
        let fault = Fault::new(strict.at, message).hint("add `reass ip from any to any in` before it");
        Some(fault.in_file(&Arc::from(file)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_strict_rule_without_reass_is_reported() {
        let reass = "add 10 reass ip from any to any in\n";
        let strict = "add 20 allow tcp from any to any setup keep-state strict\n";
        let rows = [
            (strict.to_owned(), Some("t:1:")),
            (format!("{reass}{strict}"), None),
            (format!("add 5 check-state\n{strict}{strict}"), Some("t:2:")),
            (format!("{strict}{}", reass.replace("10", "30")), Some("t:1:")),
            (format!("{strict}{}", reass.replace("10", "20")), Some("t:1:")),
            (format!("{}{strict}set disable 3\n", reass.replace("add 10", "add 10 set 3")), Some("t:2:")),
            (strict.replace(" strict", ""), None),
            (strict.replace("strict", "loose"), None),
        ];
        for (text, place) in rows {
            let ruleset = Ruleset::parse("t", &text).ruleset.unwrap();
            let found = ruleset.strict_without_reass("t").map(|found| found.to_string());
            assert_eq!(found.is_some(), place.is_some(), "{text}");
            assert!(
                found.is_none_or(|found| found.starts_with(place.unwrap()) && found.contains("reass")),
                "{text}"
            );
        }
    }
}
