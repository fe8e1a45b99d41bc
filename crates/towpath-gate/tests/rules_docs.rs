//! The reference of the language is true: its examples parse, and so do other rules outside the tests.

use towpath_gate::rules::Ruleset;
use towpath_wire::Malformed;

#[test]
fn examples_of_the_reference_parse() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
    let text = std::fs::read_to_string(path).unwrap();
    let blocks: Vec<&str> =
        text.split("```ipfw\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 6);
    for block in blocks {
        let ruleset = Ruleset::parse("docs/book/src/reference/rules.md", block)
            .ruleset
            .unwrap_or_else(|errors| panic!("{block}{errors:#?}"));
        let again = Ruleset::parse("again", &ruleset.to_text()).ruleset.unwrap();
        assert_eq!(again.to_text(), ruleset.to_text());
    }
}

#[test]
fn the_reference_says_which_packets_no_rule_sees() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
    let text = std::fs::read_to_string(path).unwrap();
    let words: Vec<&str> = text.split_once("## What no rule sees").unwrap().1.split_whitespace().collect();
    let section = words.join(" ");
    for reason in Malformed::ALL {
        assert!(section.contains(reason.reason()), "{reason}");
    }
}

/// The fuzzer for packets is not built by the tests; a change of the language must not leave it without rules.
#[test]
fn rules_of_the_fuzzer_parse() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/fuzz_targets/packets.ipfw");
    let text = std::fs::read_to_string(path).unwrap();
    let parsed = Ruleset::parse("packets.ipfw", &text).ruleset;
    assert!(parsed.is_ok_and(|ruleset| ruleset.to_text().contains("inspect")));
}
