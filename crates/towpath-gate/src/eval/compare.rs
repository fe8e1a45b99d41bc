//! Differences between two rulesets, beside added and removed rules, that can change what becomes of a packet.

use std::collections::{BTreeMap, BTreeSet};

use super::kept_rules::{Kept, kept_rules};
use crate::rules::option::{LookupKey, Test};
use crate::rules::table::Table;
use crate::rules::{Action, Rule, Ruleset, Target, jump_position};

/// The kind of a [`Difference`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DifferenceKind {
    /// A rule of both rulesets jumps to another rule, or tests its own number, which is another one.
    Rule,
    /// A set is enabled or disabled.
    Set,
    /// A pipe.
    Pipe,
    /// The type or the columns of a table.
    Table,
    /// An entry of a table.
    Entry,
}

impl DifferenceKind {
    /// The kind as a word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rule => "rule",
            Self::Set => "set",
            Self::Pipe => "pipe",
            Self::Table => "table",
            Self::Entry => "entry",
        }
    }
}

/// A difference between two rulesets ([`differences`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its kind.
    pub kind: DifferenceKind,
    /// The thing that differs: the new number and text of a rule, the number of a set or pipe, the name of a table, or the name of
    /// a table and a key.
    pub name: String,
    /// Its old value; `None` if the old ruleset does not have it.
    pub old: Option<String>,
    /// Its new value; `None` if the new ruleset does not have it.
    pub new: Option<String>,
}

/// Returns the differences in jump targets, sets, pipes and tables, in this order. [`Diff`](super::Diff) has the rules that
/// are added, removed and moved.
///
/// ```
/// use towpath_gate::differences;
/// use towpath_gate::rules::Ruleset;
///
/// let parse = |text: &str| Ruleset::parse("t", text).ruleset.unwrap();
/// let found = differences(&parse("set disable 4"), &parse("table t add 10.0.0.0/8 7"));
/// let rows: Vec<_> = found.iter().map(|d| (d.kind.as_str(), d.name.as_str(), d.new.as_deref())).collect();
/// assert_eq!(rows, [("set", "4", Some("enabled")), ("table", "t", Some("addr")), ("entry", "t 10.0.0.0/8", Some("7"))]);
/// ```
pub fn differences(old: &Ruleset, new: &Ruleset) -> Vec<Difference> {
    let mut found = Vec::new();
    let kept = kept_rules(old.rules().iter(), new.rules().iter());
    jumps(old, new, &kept, &mut found);
    for set in 0..32 {
        let word = |rules: &Ruleset| if rules.set_enabled(set) { "enabled" } else { "disabled" }.to_owned();
        add(&mut found, DifferenceKind::Set, &set.to_string(), Some(word(old)), Some(word(new)));
    }
    let pipes = |rules: &Ruleset| -> BTreeMap<u32, String> {
        rules
            .pipes()
            .map(|(number, pipe)| (number, format!("bw {}bit/s burst {}", pipe.rate, pipe.burst)))
            .collect()
    };
    let (old_pipes, new_pipes) = (pipes(old), pipes(new));
    for number in old_pipes.keys().chain(new_pipes.keys()).collect::<BTreeSet<_>>() {
        let of = |pipes: &BTreeMap<u32, String>| pipes.get(number).cloned();
        add(&mut found, DifferenceKind::Pipe, &number.to_string(), of(&old_pipes), of(&new_pipes));
    }
    let (old_tables, new_tables): (BTreeMap<_, _>, BTreeMap<_, _>) =
        (old.tables().collect(), new.tables().collect());
    for name in old_tables.keys().chain(new_tables.keys()).collect::<BTreeSet<_>>() {
        table(name, old_tables.get(name).copied(), new_tables.get(name).copied(), &mut found);
    }
    found
}

fn add(
    found: &mut Vec<Difference>,
    kind: DifferenceKind,
    name: &str,
    old: Option<String>,
    new: Option<String>,
) {
    if old != new {
        found.push(Difference { kind, name: name.to_owned(), old, new });
    }
}

/// The type and the columns of a table, and its entries.
fn table(name: &str, old: Option<&Table>, new: Option<&Table>, found: &mut Vec<Difference>) {
    if let (Some(old), Some(new)) = (old, new)
        && old.same_as(new)
    {
        return;
    }
    add(found, DifferenceKind::Table, name, old.map(Table::type_text), new.map(Table::type_text));
    let entries = |table: Option<&Table>| -> BTreeMap<String, String> {
        let row = |table: &Table| {
            let rows =
                table.list().into_iter().map(|(key, value)| (table.show_key(&key), table.show_value(&value)));
            rows.collect()
        };
        table.map(row).unwrap_or_default()
    };
    let (mut before, now) = (entries(old), entries(new));
    for (key, value) in now {
        add(found, DifferenceKind::Entry, &format!("{name} {key}"), before.remove(&key), Some(value));
    }
    for (key, value) in before {
        add(found, DifferenceKind::Entry, &format!("{name} {key}"), Some(value), None);
    }
}

/// Rules of both rulesets that jump to another rule, or whose own number matters and differs.
fn jumps(old: &Ruleset, new: &Ruleset, kept: &[Kept], found: &mut Vec<Difference>) {
    let (old, new) = (old.rules(), new.rules());
    let renumbered = |at: usize| kept[at].old().is_some_and(|before| old[before].number != new[at].number);
    let any_renumbered = (0..new.len()).any(renumbered);
    // The default rules correspond to each other, whatever they do.
    let same =
        |from: usize, to: usize| kept[to].old() == Some(from) || from + 1 == old.len() && to + 1 == new.len();
    let line = |rules: &[Rule], at: usize| format!("{:05} {}", rules[at].number, rules[at]);
    for (at, rule) in new.iter().enumerate() {
        let Some(before) = kept[at].old() else { continue };
        let name = line(new, at);
        match (target(&old[before], old), target(rule, new)) {
            (Some(from), Some(to)) if !same(from, to) => {
                let leads = |rules, at| Some(format!("continues at {}", line(rules, at)));
                add(found, DifferenceKind::Rule, &name, leads(old, from), leads(new, to));
            }
            _ => {}
        }
        let by_table =
            matches!(rule.action, Action::Skipto(Target::Tablearg) | Action::Call(Target::Tablearg));
        let by_number = |test: &Test| matches!(test, Test::Lookup { key: LookupKey::RuleNum, .. });
        let tests_number = rule.body.blocks().flatten().any(|term| by_number(&term.test));
        if by_table && any_renumbered {
            let jumps = |which: &str| Some(format!("jumps by the {which} rule numbers"));
            add(found, DifferenceKind::Rule, &name, jumps("old"), jumps("new"));
        } else if tests_number && renumbered(at) {
            let is = |rule: &Rule| Some(format!("has number {}", rule.number));
            add(found, DifferenceKind::Rule, &name, is(&old[before]), is(rule));
        }
    }
}

/// The position of the rule at which a jump continues; `None` if the rule does not jump to a fixed rule.
fn target(rule: &Rule, rules: &[Rule]) -> Option<usize> {
    jump_position(rule, rules.len().saturating_sub(1), |at| rules[at].number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows: old file, new file, and the differences.
    #[test]
    fn differences_are_found() {
        let rows: [(&str, &str, &[&str]); 11] = [
            ("add allow ip from any to any", "add count ip from any to any", &[]),
            ("set disable 4", "", &["set 4: disabled -> enabled"]),
            (
                "pipe 1 config bw 1Mbit/s",
                "pipe 1 config bw 2Mbit/s",
                &["pipe 1: bw 1000000bit/s burst 0 -> bw 2000000bit/s burst 0"],
            ),
            ("pipe 1 config bw 1Mbit/s", "", &["pipe 1: bw 1000000bit/s burst 0 -> -"]),
            (
                "table t add 10.0.0.0/8 1",
                "table t add 10.0.0.0/8 2 10.0.0.1 3",
                &["entry t 10.0.0.0/8: 1 -> 2", "entry t 10.0.0.1/32: - -> 3"],
            ),
            ("table t add 10.0.0.0/8 1", "", &["table t: addr -> -", "entry t 10.0.0.0/8: 1 -> -"]),
            ("table t create type addr", "table t create type number", &["table t: addr -> number"]),
            // A rule that is inserted at the target of a jump.
            (
                "add 10 skipto 30 ip from any to any\nadd 20 deny ip from any to any\nadd 30 allow ip from any to any",
                "add 10 skipto 30 ip from any to any\nadd 20 deny ip from any to any\nadd 30 count ip from any to any\nadd 30 allow ip from any to any",
                &[
                    "rule 00010 skipto 30 ip from any to any: continues at 00030 allow ip from any to any -> continues at 00030 count ip from any to any",
                ],
            ),
            // A line at the top of a file without numbers.
            (
                "add skipto 300 ip from any to any\nadd deny ip from any to any\nadd allow ip from any to any",
                "add count ip from any to any\nadd skipto 300 ip from any to any\nadd deny ip from any to any\nadd allow ip from any to any",
                &[
                    "rule 00200 skipto 300 ip from any to any: continues at 00300 allow ip from any to any -> continues at 00300 deny ip from any to any",
                ],
            ),
            // A label moves with its rule.
            (
                "add skipto :x ip from any to any\nadd deny ip from any to any\n:x\nadd allow ip from any to any",
                "add count ip from any to any\nadd skipto :x ip from any to any\nadd deny ip from any to any\n:x\nadd allow ip from any to any",
                &[],
            ),
            (
                "table n create type number\nadd allow ip from any to any lookup rulenum n",
                "table n create type number\nadd count ip from any to any\nadd allow ip from any to any lookup rulenum n",
                &["rule 00200 allow ip from any to any lookup rulenum n: has number 100 -> has number 200"],
            ),
        ];
        for (old, new, expected) in rows {
            let parse = |text: &str| {
                Ruleset::parse("t", text).ruleset.unwrap_or_else(|errors| panic!("{text}: {}", errors[0]))
            };
            let line = |found: &Difference| {
                let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
                format!(
                    "{} {}: {} -> {}",
                    found.kind.as_str(),
                    found.name,
                    value(&found.old),
                    value(&found.new)
                )
            };
            let found: Vec<_> = differences(&parse(old), &parse(new)).iter().map(line).collect();
            assert_eq!(found, expected, "{old}\n{new}");
        }
    }
}
