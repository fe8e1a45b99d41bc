//! Flow offload: the rules that deny packets by a table of their sources, before any other rule decides on them.
//!
//! What: a walk through the rules for all packets that arrive on a port, as far as the port and the direction fix it. A rule
//! `deny ip from table(bad) to any` then denies exactly the packets whose source is in the table, and the kernel may drop them. The first rule
//! whose result another property of a packet may change ends the walk: it is the reason why later rules are not offloaded.
//!
//! The packets are those that the kernel drops: TCP and UDP in Ethernet frames, with any TCP flags, without fragments, IPv4 options and
//! IPv6 extension headers.
//!
//! Invariant: while the [version](Walker::version) is the same, a packet whose source is in the table of a rule counts for the rules of
//! [`DeniedTable::counts`] and is denied, unless its source is in the table of an earlier rule of [`DeniedSources::rules`].

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use super::insn::{Insn, Op};
use super::offload::{NoOffload, Obstacle, flow_frame};
use super::port::PortId;
use super::program::{CompiledAction, CompiledRule, Jump};
use super::walk::{Dir, Walk};
use super::walker::Walker;
use crate::rules::table::Table;
use crate::state::{Flow, RuleId};
use towpath_wire::{self as wire, Ends, LinkType, Packet, proto};

/// The rules of a port that deny by a table of sources.
#[derive(Clone, Debug, Default)]
pub struct DeniedSources {
    /// In the order of the rules.
    pub rules: Vec<DeniedTable>,
    /// Why the rules after these are not among them. `None`: there are no others.
    pub end: Option<NoOffload>,
}

/// A rule that denies the packets whose source is in a table.
#[derive(Clone, Debug)]
pub struct DeniedTable {
    /// Its position among the rules, for the order of the rules of several ports.
    pub position: usize,
    /// Its number.
    pub number: u32,
    /// The rules for which such a packet counts; the last one is the rule itself.
    pub counts: Box<[RuleId]>,
    /// The table.
    pub table: Arc<Table>,
}

/// The result of a test, of a block or of a rule, for all packets of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fixed {
    Never,
    Always,
    /// The source is in this table.
    InTable(u32),
    Differs,
}

impl From<bool> for Fixed {
    fn from(holds: bool) -> Self {
        if holds { Self::Always } else { Self::Never }
    }
}

/// Packets of both families and protocols.
fn frames() -> [Vec<u8>; 4] {
    let four = Ends::V4(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST);
    let six = Ends::V6(Ipv6Addr::LOCALHOST, Ipv6Addr::LOCALHOST, 0);
    [(four, proto::TCP), (four, proto::UDP), (six, proto::TCP), (six, proto::UDP)]
        .map(|(ends, proto)| flow_frame(&Flow { ends, proto, src_port: 1, dst_port: 1, zone: 0 }))
}

impl Walker {
    /// The rules that deny packets which arrive on a port by a table of their sources, before another rule can decide on them.
    pub fn denied_sources(&mut self, arrival: PortId) -> DeniedSources {
        self.catch_up();
        let mut found = DeniedSources::default();
        if !self.generation.left_names.is_empty() {
            return DeniedSources { end: Some(NoOffload::Recheck), ..found };
        }
        let frames = frames();
        let samples: Vec<_> = frames
            .iter()
            .filter_map(|frame| wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).ok())
            .collect();
        let mut walk = Walk::new(Dir::In, Some(arrival), None);
        walk.enter_zone(&self.generation.ports);
        let program = &self.generation.program;
        let (mut at, mut counts) = (0, Vec::new());
        // Terminates: `at` increases.
        while at <= program.default {
            let rule = &program.rules[at];
            match self.denying(rule, &walk, &samples) {
                Ok(Denying::No) => {}
                Ok(Denying::Counts) => counts.push(rule.id),
                Ok(Denying::Jumps(to)) if to > at => {
                    counts.push(rule.id);
                    at = to;
                    continue;
                }
                Ok(Denying::Table(table)) => {
                    if let Some(table) = self.generation.tables.get(table as usize) {
                        let counts = counts.iter().copied().chain([rule.id]).collect();
                        let (number, table) = (rule.number, Arc::clone(table));
                        found.rules.push(DeniedTable { position: at, number, counts, table });
                    }
                }
                Ok(Denying::Jumps(_)) => {
                    found.end = Some(NoOffload::Rule(rule.number, Obstacle::Jumps));
                    break;
                }
                Err(obstacle) => {
                    found.end = Some(NoOffload::Rule(rule.number, obstacle));
                    break;
                }
            }
            at += 1;
        }
        found
    }

    /// Returns true if the rule with this number denies, and compares the source with a table.
    pub fn denies_by_source_table(&mut self, number: u32) -> bool {
        self.catch_up();
        let program = &self.generation.program;
        let rule = &program.rules[program.position_from(number)];
        let has_table = || program.insns_of(rule).iter().any(|insn| matches!(insn.op, Op::SrcTable(_)));
        rule.number == number && matches!(rule.action, CompiledAction::Deny) && has_table()
    }

    fn denying(&self, rule: &CompiledRule, walk: &Walk, samples: &[Packet<'_>]) -> Result<Denying, Obstacle> {
        if !rule.enabled {
            return Ok(Denying::No);
        }
        if rule.lookup.is_some() {
            return Err(Obstacle::Lookup);
        }
        let fixed = self.fixed_by_port(rule, walk, samples);
        match fixed {
            Fixed::Never => return Ok(Denying::No),
            Fixed::Differs => return Err(Obstacle::Test),
            Fixed::Always | Fixed::InTable(_) if rule.prob != 0 => return Err(Obstacle::Prob),
            Fixed::Always | Fixed::InTable(_) if rule.log.is_some() => return Err(Obstacle::Log),
            Fixed::Always | Fixed::InTable(_) if rule.install.is_some() => return Err(Obstacle::Install),
            Fixed::Always | Fixed::InTable(_) => {}
        }
        match (fixed, rule.action) {
            (Fixed::InTable(table), CompiledAction::Deny) => Ok(Denying::Table(table)),
            (Fixed::InTable(_), _) => Err(Obstacle::Test),
            (_, CompiledAction::Count) => Ok(Denying::Counts),
            (_, CompiledAction::Skipto(Jump::To(to))) => Ok(Denying::Jumps(to as usize)),
            _ => Err(Obstacle::Action),
        }
    }

    /// Whether the rule matches the packets of a port.
    fn fixed_by_port(&self, rule: &CompiledRule, walk: &Walk, samples: &[Packet<'_>]) -> Fixed {
        let mut all = Fixed::Always;
        for block in self.generation.program.insns_of(rule).chunk_by(|insn: &Insn, _| insn.or) {
            let result = block.iter().fold(Fixed::Never, |result, insn| {
                let found = match self.test_of_port(&insn.op, rule.number, walk, samples) {
                    Fixed::InTable(table) if block.len() == 1 && !insn.not => Fixed::InTable(table),
                    Fixed::InTable(_) | Fixed::Differs => Fixed::Differs,
                    fixed => Fixed::from((fixed == Fixed::Always) != insn.not),
                };
                match (result, found) {
                    (Fixed::Always, _) | (_, Fixed::Always) => Fixed::Always,
                    (result, Fixed::Never) => result,
                    (_, found) => found,
                }
            });
            all = match (all, result) {
                // Whatever the other blocks say.
                (_, Fixed::Never) => return Fixed::Never,
                (all, Fixed::Always) => all,
                (Fixed::Always, result) => result,
                _ => Fixed::Differs,
            };
        }
        all
    }

    fn test_of_port(&self, op: &Op, number: u32, walk: &Walk, samples: &[Packet<'_>]) -> Fixed {
        let holds = |packet| op.holds(&self.generation.context(packet), walk, number, &mut None);
        match op {
            Op::SrcTable(check) if check.value.is_none() => Fixed::InTable(check.table),
            // The packets are of TCP or UDP.
            Op::Proto(number) if !matches!(*number, proto::TCP | proto::UDP) => Fixed::Never,
            Op::True
            | Op::In
            | Op::Out
            | Op::Recv(_)
            | Op::Xmit(_)
            | Op::Via(_)
            | Op::RecvTable(_)
            | Op::XmitTable(_)
            | Op::ViaTable(_)
            | Op::Layer2 => samples.first().map_or(Fixed::Differs, |packet| holds(packet).into()),
            Op::Field(test) => {
                let mut results = samples.iter().map(|packet| {
                    let fixed = !test.scope().includes(packet) || test.is_fixed_by_form();
                    if fixed { holds(packet).into() } else { Fixed::Differs }
                });
                let first = results.next().unwrap_or(Fixed::Differs);
                if results.all(|result| result == first) { first } else { Fixed::Differs }
            }
            _ => Fixed::Differs,
        }
    }
}

/// What a rule does with the packets of a port.
enum Denying {
    /// It matches none.
    No,
    /// It counts them.
    Counts,
    /// It counts them, and they continue at this position.
    Jumps(usize),
    /// It denies those whose source is in this table.
    Table(u32),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Ruleset;
    use crate::state::Settings;
    use crate::{Gate, Ports};

    /// The numbers of the rules that deny, each with those that count before, and the reason of the end.
    fn denied(rules: &str, port: u16) -> (Vec<Vec<u32>>, Option<String>) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut ports = Ports::new();
        ports.add("wan", Vec::new());
        ports.add("lan", Vec::new());
        let mut gate = Gate::new(ruleset, ports, Settings::default(), 1);
        let found = gate.walker().unwrap().denied_sources(PortId(port));
        let rules = found.rules.iter().map(|rule| {
            assert_eq!(gate.rule_number(*rule.counts.last().unwrap()), rule.number);
            rule.counts.iter().map(|id| gate.rule_number(*id)).collect()
        });
        (rules.collect(), found.end.map(|end| end.to_string()))
    }

    /// Rules, the rules that deny and those that count before each, and the reason of the end.
    type Row<'r> = (&'r str, &'r [&'r [u32]], Option<&'r str>);

    #[test]
    fn rules_deny_by_a_table_until_another_one_may_decide() {
        const TEST: &str = "rule 100 has a test whose result may differ from packet to packet";
        const TABLE: &str = "add 200 deny ip from table(t) to any";
        let rows: [Row<'_>; 26] = [
            ("", &[&[200]], Some("rule 65535 does not only pass the packet")),
            // Rules that no TCP or UDP packet of the port matches.
            ("add 100 allow layer2 mac-type arp", &[&[200]], None),
            ("add 100 allow icmp from any to any icmptypes 8", &[&[200]], None),
            ("add 100 allow ip6 from any to any proto ipv6-icmp", &[&[200]], None),
            ("add 100 allow ip from any to any in recv lan", &[&[200]], None),
            ("add 100 allow ip from any to any out", &[&[200]], None),
            ("add 100 deny ip from any to any frag", &[&[200]], None),
            // Rules that count all of them.
            ("add 100 count ip from any to any", &[&[100, 200]], None),
            ("add 100 count ip from any to any in recv wan", &[&[100, 200]], None),
            ("add 100 count ip from any to any { recv lan or in }", &[&[100, 200]], None),
            ("add 100 skipto 150 ip from any to any\nadd 110 allow ip from any to any", &[&[100, 200]], None),
            ("add 100 skipto 300 ip from any to any", &[], None),
            // Several tables.
            ("add 100 deny ip from table(u) to any in recv wan", &[&[100], &[200]], None),
            ("add 100 deny ip from table(u) to any in recv lan", &[&[200]], None),
            // Other rules.
            ("add 100 allow ip from 10.0.0.0/8 to any", &[], Some(TEST)),
            ("add 100 count tcp from any to any", &[], Some(TEST)),
            ("add 100 count ip from not table(u) to any", &[], Some(TEST)),
            ("add 100 count ip from table(u) to any", &[], Some(TEST)),
            ("add 100 deny ip from table(u,7) to any", &[], Some(TEST)),
            ("add 100 deny tcp from table(u) to any", &[], Some(TEST)),
            ("add 100 deny log ip from table(u) to any", &[], Some("rule 100 has `log`")),
            ("add 100 prob 0.5 deny ip from table(u) to any", &[], Some("rule 100 has `prob`")),
            ("add 100 check-state", &[], Some("rule 100 looks for a state first")),
            ("add 100 deny ip from table(u) to any record-state", &[], Some("rule 100 makes a state")),
            ("add 100 count ip from any to any set-limit src-addr 2", &[], Some("rule 100 makes a state")),
            ("add 100 allow ip from any to any", &[], Some("rule 100 does not only pass the packet")),
        ];
        for (rules, expected, end) in rows {
            let (found, reason) =
                denied(&format!("table t create type addr\ntable u create type addr\n{rules}\n{TABLE}"), 0);
            assert_eq!(found, expected, "{rules}");
            let default = "rule 65535 does not only pass the packet";
            assert_eq!(reason.as_deref(), Some(end.unwrap_or(default)), "{rules}");
        }
    }
}
