//! Long invalid files are rejected with bounded work and a bounded number of errors.

use towpath_gate::rules::Ruleset;

fn errors(text: &str) -> usize {
    Ruleset::parse("noise", text).ruleset.err().map_or(0, |errors| errors.len())
}

#[test]
fn one_line_has_at_most_a_hundred_errors() {
    let rows = [
        format!("add allow ip from any to any {}", "bogus in ".repeat(100_000)),
        format!("add allow ip from {} to any", "x, ".repeat(100_000)),
        format!("add allow ip from {} to any", "x,".repeat(100_000)),
        format!("add allow tcp from any to any 1,{}", "x,".repeat(100_000)),
        format!("add allow icmp from any to any icmptypes {}", "99,".repeat(100_000)),
        format!("add allow ip from {}", "{".repeat(1_000_000)),
        format!("add allow ip from {}", "a( ".repeat(300_000)),
        format!("table t add {}", "x ".repeat(300_000)),
    ];
    for text in rows {
        assert!((1..=101).contains(&errors(&text)), "{}", &text[..40]);
    }
    let lines = "bogus\n".repeat(100_000);
    assert_eq!(errors(&lines), 10_001);
}

#[test]
fn errors_of_the_final_checks_are_bounded() {
    let jumps: String = (0..20_000).map(|i| format!("add skipto :x{i} ip from any to any\n")).collect();
    let errors = Ruleset::parse("noise", &jumps).ruleset.unwrap_err();
    assert_eq!(errors.len(), 10_001);
    assert_eq!(errors[10_000].message, "more than 10000 errors; 10000 more are not shown");
}

#[test]
fn suggestions_are_limited_to_few_names() {
    let labels = |count: usize| -> String { (0..count).map(|i| format!(":label{i}\n")).collect() };
    let hints = |text: &str| {
        let errors = Ruleset::parse("noise", text).ruleset.unwrap_err();
        errors.iter().filter(|error| error.hint.is_some()).count()
    };
    let jumps = "add skipto :labelx ip from any to any\n".repeat(200);
    assert_eq!(hints(&format!("{jumps}{}add deny ip from any to any\n", labels(500))), 100);
    assert_eq!(hints(&format!("{jumps}{}add deny ip from any to any\n", labels(501))), 0);
}

#[test]
fn commands_cost_in_proportion_to_their_changes() {
    // A command that scans all rules would take minutes here.
    let rules = "add 10 set 1 allow ip from any to any\n".repeat(50_000);
    let rows = [
        ("delete 7\n".repeat(100_000), 50_000),
        ("set move 1 to 2\nset move 2 to 1\n".repeat(50_000), 50_000),
        ("add 5 set 2 deny ip from any to any\nset move 1 to 2\nset move 2 to 1\n".repeat(30_000), 80_000),
        ("set move rule 7 to 1\n".repeat(100_000), 50_000),
        ("set move rule 10 to 2\nset move rule 10 to 1\n".repeat(50_000), 50_000),
        ("add 10 set 2 deny ip from any to any\nset move rule 10 to 1\n".repeat(30_000), 80_000),
        ("set swap 1 3\n".repeat(100_001), 50_000),
        ("delete set 9\n".repeat(100_000), 50_000),
        ("add allow ip from any to any\ndelete 110\n".repeat(50_000), 50_000),
        ("flush\n".repeat(100_000), 0),
    ];
    for (lines, left) in rows {
        let parsed = Ruleset::parse("noise", &format!("{rules}{lines}"));
        assert_eq!(parsed.ruleset.unwrap().rules().len(), left + 1, "{}", &lines[..20]);
    }
}

/// Deletes and moves rules; checks number and set of the remaining ones.
#[test]
fn deleted_and_moved_rules_match_ipfw() {
    let rows: &[(&str, &[(u32, u8)])] = &[
        ("", &[(10, 1), (10, 2), (20, 1), (30, 31)]),
        ("delete 10", &[(20, 1), (30, 31)]),
        ("delete 15-65534", &[(10, 1), (10, 2)]),
        ("delete set 1", &[(10, 2), (30, 31)]),
        ("flush", &[(30, 31)]),
        ("delete 30\nadd count ip from any to any", &[(10, 1), (10, 2), (20, 1), (120, 0)]),
        ("flush\nadd count ip from any to any", &[(30, 31), (130, 0)]),
        ("set move 1 to 5", &[(10, 5), (10, 2), (20, 5), (30, 31)]),
        ("set move 1 to 2\ndelete set 2", &[(30, 31)]),
        ("set move 1 to 2\nset move rule 20 to 7\nset swap 2 3", &[(10, 3), (10, 3), (20, 7), (30, 31)]),
        (
            "set swap 1 2\nadd 15 set 1 count ip from any to any",
            &[(10, 2), (10, 1), (15, 1), (20, 2), (30, 31)],
        ),
        ("set move rule 10 to 9\ndelete set 1\nset move 9 to 1", &[(10, 1), (10, 1), (30, 31)]),
        ("delete set 1\nset move rule 20 to 4\nset move 1 to 4", &[(10, 2), (30, 31)]),
        ("set move 40 to 4\nset move rule 99 to 4", &[(10, 1), (10, 2), (20, 1), (30, 31)]),
        ("set move 31 to 4", &[(10, 1), (10, 2), (20, 1), (30, 4)]),
    ];
    let rules = "add 10 set 1 count ip from any to any\nadd 20 set 1 count ip from any to any\n\
                 add 10 set 2 count ip from any to any\nadd 30 set 31 count ip from any to any\n";
    for (commands, want) in rows {
        let ruleset = Ruleset::parse("t", &format!("{rules}{commands}")).ruleset.unwrap();
        let left: Vec<_> = ruleset.rules().iter().map(|rule| (rule.number, rule.set)).collect();
        assert_eq!(left[..left.len() - 1], **want, "{commands}");
        assert_eq!(left[left.len() - 1], (65535, 31), "{commands}");
    }
}

#[test]
fn odd_bytes_are_ordinary_words() {
    let rows = [
        ("add allow ip from any to any\r\nadd deny ip from any to any\r\n", None),
        ("\u{feff}add allow ip from any to any", None),
        ("add allow ip from any to any\n\u{feff}add allow ip from any to any", Some((2, 1))),
        ("add allow ip from any to any\0", Some((1, 26))),
        ("add allow \u{fffd} from any to any", Some((1, 11))),
        ("add allow ip from any\u{a0}to any", None),
        ("add allow ip from any to any // \0 \u{fffd}", None),
        ("add allow\x0bip from any to any", None),
    ];
    for (text, error) in rows {
        let found = Ruleset::parse("t", text).ruleset.err();
        assert_eq!(found.map(|errors| (errors[0].line, errors[0].column)), error, "{text:?}");
    }
    let long = "x".repeat(5_000_000);
    for text in [
        format!("add allow ip from any to any {long}"),
        format!("table {long} add 10.0.0.1"),
        format!(":{long}\nadd skipto :{long} ip from any to any"),
        format!("add check-state :{long}"),
        format!("add allow ip from table({long}) to any"),
        format!("add allow ip from any to any recv {long}"),
        format!("add allow ip from any to any // {long}"),
    ] {
        let parsed = Ruleset::parse("t", &text);
        let longest = parsed.ruleset.err().into_iter().flatten().map(|error| error.to_string().len()).max();
        assert!(longest.is_none_or(|longest| longest < 1000), "{}", &text[..40]);
    }
    // As many rules with one number as there are numbers, and an or-block with as many addresses.
    let rules = "add 7 count ip from any to any\n".repeat(65_535);
    assert_eq!(errors(&rules), 0);
    let block = (0..20_000).map(|i| format!("10.{}.{}.1", i / 256, i % 256)).collect::<Vec<_>>();
    assert_eq!(errors(&format!("add allow ip from {{ {} }} to any", block.join(" or "))), 0);
    assert_eq!(errors(&format!("add allow ip from {} to any", block.join(","))), 0);
}
