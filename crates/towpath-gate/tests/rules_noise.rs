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
