//! Files that are long and wrong are refused in bounded work: the number of errors stays small.

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
fn errors_that_show_at_the_end_are_bounded_too() {
    let jumps: String = (0..20_000).map(|i| format!("add skipto :x{i} ip from any to any\n")).collect();
    let errors = Ruleset::parse("noise", &jumps).ruleset.unwrap_err();
    assert_eq!(errors.len(), 10_001);
    assert_eq!(errors[10_000].message, "more than 10000 errors; 10000 more are not shown");
}

#[test]
fn what_was_meant_is_looked_for_among_few_names() {
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
fn lines_that_look_at_all_rules_are_refused_when_they_are_too_many() {
    let rules = "add 10 set 1 allow ip from any to any\n".repeat(20_000);
    let last = "too many \"delete\", \"flush\" and \"set\" commands for so many rules";
    for line in ["delete 7", "set move 1 to 1", "set move rule 7 to 1", "set swap 2 3", "delete set 9"] {
        let lines = format!("{line}\n").repeat(6_000);
        let errors = Ruleset::parse("noise", &format!("{rules}{lines}")).ruleset.unwrap_err();
        assert_eq!((errors.len(), &*errors[0].message), (1001, last), "{line}");
    }
    let lines = "delete 7\n".repeat(1_000);
    assert_eq!(errors(&format!("{rules}{lines}")), 0);
}
