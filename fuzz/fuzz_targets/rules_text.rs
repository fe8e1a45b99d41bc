//! A rule file: read, printed, read again, and given to a gate.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_gate::{Gate, Ports};
use towpath_gate::rules::Ruleset;
use towpath_gate::state;

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let parsed = Ruleset::parse("fuzz", &text);
    for warning in &parsed.warnings {
        assert!(!warning.to_string().is_empty());
    }
    let ruleset = match parsed.ruleset {
        Ok(ruleset) => ruleset,
        Err(errors) => {
            assert!(!errors.is_empty(), "no ruleset and no reason");
            for error in &errors {
                assert!(error.line >= 1 && error.column >= 1 && !error.to_string().is_empty());
            }
            return;
        }
    };
    let printed = ruleset.to_text();
    let again = match Ruleset::parse("again", &printed).ruleset {
        Ok(again) => again,
        Err(errors) => panic!("{printed}\n{errors:#?}"),
    };
    assert_eq!(sorted(&printed), sorted(&again.to_text()), "printed, read and printed again");
    let rules = ruleset.rules().iter().map(ToString::to_string);
    assert!(rules.eq(again.rules().iter().map(ToString::to_string)));

    let mut ports = Ports::new();
    ports.add("em0", vec!["192.0.2.1".parse().expect("an address")]);
    let gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
    assert!(!gate.show().is_empty());
});

/// The tables' entries have no order; the rules have.
fn sorted(text: &str) -> (Vec<&str>, Vec<&str>) {
    let (mut tables, rules): (Vec<_>, Vec<_>) = text.lines().partition(|line| line.starts_with("table "));
    tables.sort_unstable();
    (tables, rules)
}
