//! The rule examples of the reference and of other files outside the tests parse.

use towpath_gate::rules::Ruleset;
use towpath_wire::Malformed;

#[test]
fn examples_of_the_reference_parse() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
    let text = std::fs::read_to_string(path).unwrap();
    let blocks: Vec<&str> =
        text.split("```ipfw\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 7);
    for block in blocks {
        let ruleset = Ruleset::parse("docs/book/src/reference/rules.md", block)
            .ruleset
            .unwrap_or_else(|errors| panic!("{block}{errors:#?}"));
        let again = Ruleset::parse("again", &ruleset.to_text()).ruleset.unwrap();
        assert_eq!(again.to_text(), ruleset.to_text());
    }
}

#[test]
fn reference_lists_the_packets_that_no_rule_sees() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
    let text = std::fs::read_to_string(path).unwrap();
    let words: Vec<&str> =
        text.split_once("## Packets dropped before the rules").unwrap().1.split_whitespace().collect();
    let section = words.join(" ");
    for reason in Malformed::ALL {
        assert!(section.contains(reason.reason()), "{reason}");
    }
}

/// The tests do not build the packet fuzzer; a change of the language must not leave it without rules.
#[test]
fn rules_of_the_fuzzer_parse() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/fuzz_targets/packets.ipfw");
    let text = std::fs::read_to_string(path).unwrap();
    let parsed = Ruleset::parse("packets.ipfw", &text).ruleset;
    assert!(parsed.is_ok_and(|ruleset| ruleset.to_text().contains("inspect")));
}
