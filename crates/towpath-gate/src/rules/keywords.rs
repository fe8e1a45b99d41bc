//! The words of the language: what there is, and what there is not, with the reason.

/// Action words that [`super::action`] reads.
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
    "tcp-setmss",
    "state-timeout",
];

/// Action words of ipfw that cannot work here: word, reason, what to use instead.
pub(crate) const NO_ACTIONS: &[(&str, &str, &str)] = &[
    (
        "queue",
        "there is no dummynet scheduler here",
        "\"inspect\" sends packets to a queue's inspector, \"pipe\" limits a rate",
    ),
    ("sched", "there is no dummynet scheduler here", "\"pipe\" limits a rate"),
    ("netgraph", "there is no netgraph in user space", "use \"divert\""),
    ("ngtee", "there is no netgraph in user space", "use \"tee\""),
    ("nat", "there is no address translation here", "translate in the kernel or on another machine"),
    ("nat64lsn", "there is no address translation here", "translate on another machine"),
    ("nat64stl", "there is no address translation here", "translate on another machine"),
    ("nat64clat", "there is no address translation here", "translate on another machine"),
    ("nptv6", "there is no address translation here", "translate on another machine"),
    ("eaction", "there are no loadable actions here", "use \"divert\" to an inspector"),
    ("setfib", "there is one route table here, not several", "use \"tag\" or \"setmark\""),
    ("dump", "there is no dump ring here", "use \"tee\""),
    ("hitcount", "every rule counts here", "use \"count\""),
];

/// Option words of ipfw that cannot work here.
pub(crate) const NO_OPTIONS: &[(&str, &str, &str)] = &[
    ("uid", "packets belong to no user here", "filter by port or address"),
    ("gid", "packets belong to no group here", "filter by port or address"),
    ("jail", "there are no jails here", "filter by port or address"),
    ("fib", "there is one route table here, not several", "use \"tagged\" or \"mark\""),
    ("ipsec", "packets carry no IPsec history here", "match \"proto esp\" or \"proto ah\""),
    ("sockarg", "packets belong to no socket here", "use \"tagged\" or \"mark\""),
    ("altq", "there is no ALTQ here", "use \"pipe\""),
    (
        "diverted",
        "a packet never comes back through a divert socket",
        "use \"tag\" before and \"tagged\" after the divert",
    ),
    ("diverted-loopback", "a packet never comes back through a divert socket", "use \"tagged\""),
    ("diverted-output", "a packet never comes back through a divert socket", "use \"tagged\""),
    ("logdst", "log lines go where the caller takes them", "leave the word out"),
];

/// Commands that a rule file may hold.
pub(crate) const COMMANDS: &[&str] =
    &["add", "delete", "disable", "enable", "flush", "pipe", "resetlog", "set", "table", "zero"];

/// Commands of ipfw that a rule file may not hold here.
pub(crate) const NO_COMMANDS: &[(&str, &str, &str)] = &[
    ("queue", "there is no dummynet scheduler here", "\"pipe N config bw RATE\" makes a policer"),
    ("sched", "there is no dummynet scheduler here", "\"pipe N config bw RATE\" makes a policer"),
    ("nat", "there is no address translation here", "translate in the kernel or on another machine"),
    ("nat64lsn", "there is no address translation here", "translate on another machine"),
    ("nat64stl", "there is no address translation here", "translate on another machine"),
    ("nat64clat", "there is no address translation here", "translate on another machine"),
    ("nptv6", "there is no address translation here", "translate on another machine"),
    ("internal", "there is no kernel module to ask", "leave the line out"),
    ("sysctl", "settings do not belong in a rule file", "set dyn_max and its kin in the configuration"),
    ("list", "a rule file changes rules, it does not show them", "leave the line out"),
    ("show", "a rule file changes rules, it does not show them", "leave the line out"),
    ("print", "a rule file changes rules, it does not show them", "leave the line out"),
];

/// Finds `word` in a table of what cannot work.
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

    /// Every option has a row that matches one packet and not another, or, as another name for one that has, a row that
    /// prints it as that.
    #[test]
    fn every_option_has_a_row() {
        let rows = [include_str!("../../tests/rows/match.in"), include_str!("../../tests/rows/print.in")];
        let words: std::collections::HashSet<&str> =
            rows.iter().flat_map(|rows| rows.split(|c: char| c.is_whitespace() || c == '"')).collect();
        let stories = include_str!("../../tests/rules_stories.rs").to_owned()
            + include_str!("../../tests/rules_related.rs")
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
