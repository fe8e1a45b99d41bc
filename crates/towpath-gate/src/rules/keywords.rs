//! Keywords of the language, and ipfw keywords that are not supported, with reasons.

/// Actions of the parser ([`super::parse::action`]).
pub(crate) const ACTIONS: &[&str] = &[
    "allow",
    "accept",
    "pass",
    "permit",
    "deny",
    "drop",
    "reject",
    "unreach",
    "unreach6",
    "reset",
    "reset6",
    "abort",
    "abort6",
    "count",
    "check-state",
    "skipto",
    "call",
    "return",
    "inspect",
    "divert",
    "tee",
    "pipe",
    "fwd",
    "forward",
    "reass",
    "setdscp",
    "setmark",
    "setconnmark",
    "tcp-setmss",
    "state-timeout",
    "setzone",
];

/// Unsupported actions of ipfw: word, reason, alternative.
pub(crate) const NO_ACTIONS: &[(&str, &str, &str)] = &[
    (
        "queue",
        "dummynet scheduling is not implemented",
        "use \"inspect\" for an inspector queue, or \"pipe\" to limit a rate",
    ),
    ("sched", "dummynet scheduling is not implemented", "use \"pipe\" to limit a rate"),
    ("netgraph", "netgraph is a kernel facility", "use \"divert\""),
    ("ngtee", "netgraph is a kernel facility", "use \"tee\""),
    ("nat", "address translation is not implemented", "translate in the kernel or on another machine"),
    ("nat64lsn", "address translation is not implemented", "translate on another machine"),
    ("nat64stl", "address translation is not implemented", "translate on another machine"),
    ("nat64clat", "address translation is not implemented", "translate on another machine"),
    ("nptv6", "address translation is not implemented", "translate on another machine"),
    ("eaction", "loadable actions are not implemented", "use \"divert\" to an inspector"),
    ("setfib", "there is only one route table", "use \"tag\" or \"setmark\""),
    ("dump", "there is no dump buffer", "use \"tee\""),
    ("hitcount", "every rule has counters", "use \"count\""),
];

/// Unsupported options of ipfw.
pub(crate) const NO_OPTIONS: &[(&str, &str, &str)] = &[
    ("uid", "packets have no user", "filter by port or address"),
    ("gid", "packets have no group", "filter by port or address"),
    ("jail", "packets have no jail", "filter by port or address"),
    ("fib", "there is only one route table", "use \"tagged\" or \"mark\""),
    ("ipsec", "packets have no IPsec history", "match \"proto esp\" or \"proto ah\""),
    ("sockarg", "packets have no socket", "use \"tagged\" or \"mark\""),
    ("altq", "ALTQ is not available", "use \"pipe\""),
    (
        "diverted",
        "packets do not return through a divert socket",
        "use \"tag\" before and \"tagged\" after the divert",
    ),
    ("diverted-loopback", "packets do not return through a divert socket", "use \"tagged\""),
    ("diverted-output", "packets do not return through a divert socket", "use \"tagged\""),
    ("logdst", "the configuration sets the destination of the log", "remove the word"),
];

/// Commands of a rule file.
pub(crate) const COMMANDS: &[&str] =
    &["add", "delete", "disable", "enable", "flush", "pipe", "resetlog", "set", "table", "zero"];

/// Commands of ipfw that a rule file cannot contain.
pub(crate) const NO_COMMANDS: &[(&str, &str, &str)] = &[
    ("queue", "dummynet scheduling is not implemented", "use \"pipe N config bw RATE\" for a policer"),
    ("sched", "dummynet scheduling is not implemented", "use \"pipe N config bw RATE\" for a policer"),
    ("nat", "address translation is not implemented", "translate in the kernel or on another machine"),
    ("nat64lsn", "address translation is not implemented", "translate on another machine"),
    ("nat64stl", "address translation is not implemented", "translate on another machine"),
    ("nat64clat", "address translation is not implemented", "translate on another machine"),
    ("nptv6", "address translation is not implemented", "translate on another machine"),
    ("internal", "there is no kernel module", "remove the line"),
    ("sysctl", "settings are not part of a rule file", "put settings such as dyn_max into the configuration"),
    ("list", "a rule file cannot list rules", "remove the line"),
    ("show", "a rule file cannot list rules", "remove the line"),
    ("print", "a rule file cannot list rules", "remove the line"),
];

/// Finds a word in a table of unsupported keywords.
pub(crate) fn refused(
    table: &'static [(&str, &str, &str)],
    word: &str,
) -> Option<(&'static str, &'static str)> {
    table.iter().find(|(w, ..)| *w == word).map(|(_, reason, instead)| (*reason, *instead))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::option::{self, STATE_OPTIONS};

    #[test]
    fn the_reference_has_every_word() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
        let text = std::fs::read_to_string(path).unwrap();
        let boundary = |c: Option<char>| c.is_none_or(|c| !(c.is_ascii_alphanumeric() || c == '-'));
        let has = |word: &str| {
            text.match_indices(word).any(|(at, _)| {
                boundary(text[..at].chars().next_back()) && boundary(text[at + word.len()..].chars().next())
            })
        };
        let words = ACTIONS.iter().chain(COMMANDS).copied().chain(option::words());
        let missing: Vec<_> = words.filter(|word| !has(word)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// Each option has a row with a packet that matches and one that does not. An alias has a row that prints the
    /// option's main word.
    #[test]
    fn every_option_has_a_row() {
        let rows =
            [include_str!("../../tests/gate/rows/match.in"), include_str!("../../tests/gate/rows/print.in")];
        let words: std::collections::HashSet<&str> =
            rows.iter().flat_map(|rows| rows.split(|c: char| c.is_whitespace() || c == '"')).collect();
        let stories = include_str!("../../tests/gate/rules_stories/states.rs").to_owned()
            + include_str!("../../tests/gate/rules_related.rs")
            + rows[1];
        for option in option::words() {
            let shown = if STATE_OPTIONS.contains(&option) {
                stories.contains(option)
            } else {
                words.contains(option)
            };
            assert!(shown, "{option}");
        }
        for action in ACTIONS {
            assert!(words.contains(action) || stories.contains(&format!("{action} ")), "{action}");
        }
    }
}
