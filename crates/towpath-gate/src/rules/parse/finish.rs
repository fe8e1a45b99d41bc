//! Final checks after all commands: order of rules, labels, and tables that only rules name.

use std::collections::{HashMap, HashSet};

use super::super::address::Address;
use super::super::contradiction::contradiction;
use super::super::diagnostic::{Fault, Position};
use super::super::option::{Arg, Interface, LookupKey, Term, Test};
use super::super::protocol::Protocol;
use super::super::rule::{Action, DEFAULT_RULE, Rule, Target};
use super::super::ruleset::Ruleset;
use super::super::table::{Column, FlowFields, Kind, Table};
use super::{Builder, LabelValue, Place, order};

/// With more names there are no suggestions: the cost is the number of names times the number of unknown ones.
const MAX_SUGGESTED_FROM: usize = 500;
/// Maximum number of suggestions for unknown labels and tables.
const MAX_SUGGESTIONS: usize = 100;
/// Maximum number of flow names in one file. The numbers suffice for two files and for restored states.
const FLOW_NAMES_MAX: usize = 30_000;

/// The rule below a label.
struct Found {
    number: u32,
    /// Number of rules with the same number above the label.
    above: u32,
    /// Index among all rules.
    index: usize,
}

impl Found {
    /// Resolves a label among the remaining rules.
    fn new(Place { number, added }: Place, rules: &[(u64, u32)]) -> Self {
        let index = rules.partition_point(|place| *place < (order(number), added));
        let first = rules.partition_point(|(other, _)| *other < order(number));
        Self { number, above: (index - first) as u32, index }
    }
}

impl Builder {
    /// Orders the rules and resolves the labels.
    pub(super) fn finish(mut self) -> (Ruleset, Vec<Fault>, Vec<Fault>) {
        let mut faults = Vec::new();
        // The default rule follows them.
        let (rules, places) = self.rules.finish();
        self.ruleset.rules.splice(0..0, rules);
        for label in self.open_labels.drain(..) {
            self.labels.insert(label, Some(Place { number: DEFAULT_RULE, added: u32::MAX }));
        }
        let found = |(name, place): (Box<str>, Option<Place>)| Some((name, Found::new(place?, &places)));
        let labels: HashMap<Box<str>, Found> = self.labels.into_iter().filter_map(found).collect();
        let mut suggestions = if labels.len() > MAX_SUGGESTED_FROM { 0 } else { MAX_SUGGESTIONS };
        let mut unknown = |name: &str, at: Position| {
            let fault = Fault::new(at, format!("unknown label \":{name}\""));
            if suggestions == 0 {
                return fault;
            }
            suggestions -= 1;
            fault.did_you_mean(name, labels.keys().map(|label| &**label))
        };
        for (at, rule) in self.ruleset.rules.iter_mut().enumerate() {
            let state = rule.state.as_ref();
            if let Some(word) = state.and_then(|state| state.tracking.word())
                && !may_be_tcp(&rule.body.proto)
            {
                let message =
                    format!("\"{word}\" has no effect: it applies to TCP, which this rule does not match");
                self.warnings.push(Fault::new(rule.at, message));
            }
            self.warnings.extend(contradiction(rule));
            if let Action::Pipe(Arg::Number(number)) = rule.action
                && !self.ruleset.pipes.contains_key(&number)
            {
                let message = format!("pipe {number} is not configured: this rule drops its packets");
                let hint = format!("add \"pipe {number} config bw RATE\"");
                self.warnings.push(Fault::new(rule.at, message).hint(hint));
            }
            let own = rule.number;
            let (target, forward) = match &mut rule.action {
                Action::Skipto(target) => (target, true),
                Action::Call(target) => (target, false),
                _ => continue,
            };
            match target {
                Target::Label { name, number, above } => match labels.get(&**name) {
                    Some(found) if forward && found.index <= at => {
                        let message = format!("the label \":{name}\" is above this rule");
                        faults.push(Fault::new(rule.at, message).hint("skipto only jumps forward"));
                    }
                    Some(found) => (*number, *above) = (found.number, found.above),
                    None => faults.push(unknown(name, rule.at)),
                },
                Target::Number(number) if forward && order(*number) <= order(own) => {
                    let message =
                        format!("skipto {number} is not ahead: it continues at the next rule number");
                    self.warnings.push(Fault::new(rule.at, message));
                }
                _ => {}
            }
        }
        for (table, keys) in &self.label_values {
            let Some(table) = self.ruleset.tables.get_mut(table) else { continue };
            for (key, LabelValue { column, label, at }) in
                keys.iter().flat_map(|(key, values)| values.iter().map(move |value| (key, value)))
            {
                match labels.get(label) {
                    None => faults.push(unknown(label, *at)),
                    // The value would also send packets to the rules above the label.
                    Some(found) if found.above > 0 => {
                        let message = format!(
                            "the label \":{label}\" is below another rule with the number {}",
                            found.number
                        );
                        let hint =
                            "a table value is a rule number: give the rule below the label a unique number";
                        faults.push(Fault::new(*at, message).hint(hint));
                    }
                    Some(found) => table.set_number(key, *column, found.number),
                }
            }
        }
        // Does nothing for tables that have their index.
        self.ruleset.tables.values_mut().for_each(Table::settle);
        faults.extend(too_many_names(&self.ruleset.rules));
        let warnings = unfilled_tables(&mut self.ruleset, &mut faults);
        self.warnings.extend(warnings);
        (self.ruleset, faults, self.warnings)
    }
}

/// Returns true if a rule with these protocols may match TCP.
fn may_be_tcp(proto: &[Term]) -> bool {
    let may = |term: &Term| match &term.test {
        Test::Proto(Protocol::Number(number)) => (*number == towpath_wire::proto::TCP) != term.not,
        _ => true,
    };
    proto.is_empty() || proto.iter().any(may)
}

/// Reports the first rule that exceeds the limit of flow names.
fn too_many_names(rules: &[Rule]) -> Option<Fault> {
    let mut names = HashSet::new();
    let over = rules.iter().find(|rule| {
        names.extend(rule.flow_names());
        names.len() > FLOW_NAMES_MAX
    })?;
    let message = format!("more than {FLOW_NAMES_MAX} flow names");
    Some(Fault::new(over.at, message).hint("rules may share a name"))
}

/// Creates tables that only rules name, with a warning. A table of a type that a rule cannot use is an error.
fn unfilled_tables(ruleset: &mut Ruleset, faults: &mut Vec<Fault>) -> Vec<Fault> {
    let Ruleset { rules, tables, .. } = ruleset;
    let mut warnings = Vec::new();
    for rule in &*rules {
        for (name, asked) in tables_of(rule) {
            if let Some(table) = tables.get(name) {
                if std::mem::discriminant(&table.kind()) != std::mem::discriminant(&asked) {
                    let kind = table.kind();
                    let message =
                        format!("the table {name} has keys of type {kind}, this rule needs {asked}");
                    faults.push(Fault::new(rule.at, message));
                }
            } else {
                let fault = Fault::new(rule.at, format!("the table {name} is never created or filled"));
                let few = tables.len() <= MAX_SUGGESTED_FROM;
                warnings.push(match few && warnings.len() < MAX_SUGGESTIONS {
                    true => fault.did_you_mean(name, tables.keys().map(|name| &**name)),
                    false => fault,
                });
                tables.insert(name.into(), Table::new(asked, vec![Column::Legacy]));
            }
        }
    }
    warnings
}

/// Returns the tables that a rule names, with the type that each must have (for flows, any fields).
pub(in crate::rules) fn tables_of(rule: &Rule) -> impl Iterator<Item = (&str, Kind)> {
    rule.body.blocks().flatten().flat_map(|term| {
        let mut names: Vec<(&str, Kind)> = Vec::new();
        match &term.test {
            Test::Src(list) | Test::Dst(list) => {
                names.extend(list.iter().filter_map(|address| match address {
                    Address::Table(table) => Some((&*table.name, Kind::Addr)),
                    _ => None,
                }))
            }
            Test::Recv(Interface::Table(table))
            | Test::Xmit(Interface::Table(table))
            | Test::Via(Interface::Table(table)) => names.push((&table.name, Kind::Iface)),
            Test::Flow(table) => names.push((&table.name, Kind::Flow(FlowFields::ALL))),
            Test::Lookup { table, key, .. } => names.push((
                table,
                match key {
                    LookupKey::DstIp | LookupKey::SrcIp => Kind::Addr,
                    LookupKey::DstMac | LookupKey::SrcMac => Kind::Mac,
                    LookupKey::DstPort
                    | LookupKey::SrcPort
                    | LookupKey::Dscp
                    | LookupKey::Mark
                    | LookupKey::RuleNum => Kind::Number,
                },
            )),
            _ => {}
        }
        names
    })
}
