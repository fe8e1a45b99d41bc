//! The language: valid rules and their printed form, and the messages for invalid ones.

use towpath_gate::rules::Ruleset;

/// Prints the only rule of `rule`.
fn printed(rule: &str) -> String {
    let parsed = Ruleset::parse("t", &format!("add {rule}\n"));
    let ruleset = parsed.ruleset.unwrap_or_else(|errors| panic!("{rule}: {}", errors[0]));
    ruleset.rules()[0].to_string()
}

fn errors(text: &str) -> Vec<String> {
    match Ruleset::parse("t", text).ruleset {
        Ok(_) => Vec::new(),
        Err(errors) => errors.iter().map(ToString::to_string).collect(),
    }
}

#[test]
fn rules_print_as_ipfw_lists_them() {
    // PacketSpec, and printed; "" when both are the same.
    let rows: &[(&str, &str)] = include!("rows/print.in");
    for (text, expected) in rows {
        let expected = if expected.is_empty() { text } else { expected };
        let once = printed(text);
        assert_eq!(&once, expected, "{text}");
        assert_eq!(printed(&once), once, "{text}");
    }
}

#[test]
fn errors_and_hints() {
    let rows: &[(&str, &[&str])] = include!("rows/errors.in");
    let wrong: Vec<_> = rows.iter().filter(|(text, expected)| errors(text) != *expected).collect();
    let found: Vec<_> = wrong.iter().map(|(text, _)| errors(text)).collect();
    assert!(wrong.is_empty(), "expected {wrong:#?}\nfound {found:#?}");
}

#[test]
fn warnings() {
    let rows: &[(&str, &[&str])] = include!("rows/warnings.in");
    for (text, expected) in rows {
        let parsed = Ruleset::parse("t", text);
        parsed.ruleset.unwrap_or_else(|errors| panic!("{text}: {}", errors[0]));
        let found: Vec<_> = parsed.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(&found, expected, "{text}");
    }
}

#[test]
fn files_print_in_normalised_form() {
    let rows: &[(&str, &str)] = include!("rows/files.in");
    for (text, expected) in rows {
        let written = |text: &str| match Ruleset::parse("t", text).ruleset {
            Ok(ruleset) => ruleset.to_text(),
            Err(errors) => panic!("{text}: {}", errors[0]),
        };
        let once = written(text);
        assert_eq!(once, *expected, "{text}");
        assert_eq!(written(&once), once, "{text}");
    }
}

#[test]
fn tables_print_in_key_order() {
    let flows = (0..40).rev().map(|i| format!("table f add 10.0.0.{i},tcp,1,10.0.0.1,80 {i}\n"));
    let ports = (10..40).rev().map(|i| format!("table i add em{i} {i}\n"));
    let head = "table f create type flow\ntable i create type iface\n".to_owned();
    let text = head + &flows.chain(ports).collect::<String>();
    let written = towpath_gate::rules::Ruleset::parse("t", &text).ruleset.unwrap().to_text();
    let values = |table: &str| -> Vec<u32> {
        let lines = written.lines().filter(|line| line.starts_with(table));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    assert_eq!(values("table f add"), (0..40).collect::<Vec<_>>());
    assert_eq!(values("table i add"), (10..40).collect::<Vec<_>>());
}

#[test]
fn tcp_tracking_of_other_protocols_warns() {
    let rows =
        [("udp", 1), ("tcp", 0), ("ip", 0), ("{ udp or tcp }", 0), ("{ udp or icmp }", 1), ("not tcp", 1)];
    for (proto, warnings) in rows {
        for word in ["strict", "loose"] {
            let parsed = Ruleset::parse("t", &format!("add allow {proto} from any to any keep-state {word}"));
            let found: Vec<_> = parsed.warnings.iter().map(ToString::to_string).collect();
            assert_eq!(found.len(), warnings, "{proto} {word}: {found:?}");
            assert!(found.iter().all(|found| found.contains(word)), "{found:?}");
        }
    }
}
