//! Flow offload: the rules that deny packets by their source or destination, before any other rule decides on them.
//!
//! What: a walk through the rules for all packets of a [class](PacketClass) that arrive on a port, as far as the port, the direction, the family
//! and the protocol fix it. A rule `deny ip from table(bad) to any` then denies exactly the packets whose source is in the table, and the
//! kernel may drop them; so does a rule with a table of destinations, or with addresses of its own. The first rule whose result another
//! property of a packet may change ends the walk: it is the reason why later rules are not offloaded.
//!
//! The packets are those that the kernel drops: TCP and UDP in Ethernet frames, with any TCP flags, without fragments, IPv4 options and
//! IPv6 extension headers.
//!
//! Invariant: while the [version](Walker::version) is the same, a packet with an address of a rule counts for the rules of
//! [`DenyingRule::counts`] and is denied, unless it has an address of an earlier rule of [`DeniedAddresses::rules`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use super::insn::{Insn, Op};
use super::offload::{NoOffload, Obstacle, flow_frame};
use super::port::PortId;
use super::program::{CompiledAction, CompiledRule, Jump};
use super::walk::{Dir, Walk};
use super::walker::Walker;
use crate::rules::address::{Net4, Net6, Set4};
use crate::rules::table::{Key, Table};
use crate::state::{Flow, RuleId};
use towpath_wire::{self as wire, End, Ends, LinkType, Packet, proto};

/// The packets of one family and one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketClass {
    /// They are IPv6 packets.
    pub six: bool,
    /// TCP or UDP.
    pub proto: u8,
}

impl PacketClass {
    /// All classes.
    pub const ALL: [Self; 4] = [
        Self { six: false, proto: proto::TCP },
        Self { six: false, proto: proto::UDP },
        Self { six: true, proto: proto::TCP },
        Self { six: true, proto: proto::UDP },
    ];

    /// The position of the packets' class in [`ALL`](Self::ALL). `None`: their protocol is another one.
    pub fn position_of(flow: &Flow) -> Option<usize> {
        let own = Self { six: matches!(flow.ends, Ends::V6(..)), proto: flow.proto };
        Self::ALL.iter().position(|class| *class == own)
    }

    /// A packet.
    fn frame(self) -> Vec<u8> {
        let ends = match self.six {
            false => Ends::V4(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST),
            true => Ends::V6(Ipv6Addr::LOCALHOST, Ipv6Addr::LOCALHOST, 0),
        };
        flow_frame(&Flow { ends, proto: self.proto, src_port: 1, dst_port: 1, zone: 0 })
    }
}

/// The rules of a port that deny by an address.
#[derive(Clone, Debug, Default)]
pub struct DeniedAddresses {
    /// In the order of the rules.
    pub rules: Vec<DenyingRule>,
    /// Why the rules after these are not among them. `None`: there are no others, or no more were wanted.
    pub stopped_by: Option<NoOffload>,
}

/// A rule that denies the packets that have one of some addresses.
#[derive(Clone, Debug)]
pub struct DenyingRule {
    /// Its position among the rules, for the order of the rules of several ports and classes.
    pub position: usize,
    /// The rules for which such a packet counts; the last one is the rule itself.
    pub counts: Box<[RuleId]>,
    /// Which address of the packet.
    pub end: End,
    /// The addresses.
    pub addresses: DenyingAddresses,
}

/// The addresses of a rule.
#[derive(Clone, Debug)]
pub enum DenyingAddresses {
    /// Those of a table.
    Table(Arc<Table>),
    /// Networks in the rule, of the packets' family.
    Networks(Box<[Key]>),
}

impl DenyingRule {
    /// Returns true if the rule denies the packets of a flow of its class, unless an earlier one does.
    pub fn denies(&self, flow: &Flow) -> bool {
        let address = flow.ends.address(self.end);
        match &self.addresses {
            DenyingAddresses::Table(table) => table.lookup_ip(address).is_some(),
            DenyingAddresses::Networks(networks) => networks.iter().any(|network| contains(network, address)),
        }
    }
}

/// Which address of a packet a rule compares, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressTest {
    /// Which address.
    pub end: End,
    /// It is compared with a table; otherwise with addresses in the rule.
    pub has_table: bool,
}

/// The result of a test, of a block or of a rule, for all packets of a class at a port.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Fixed {
    Never,
    Always,
    /// This address is one of these.
    Among(End, Among),
    Differs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Among {
    Table(u32),
    Networks(Vec<Key>),
}

impl From<bool> for Fixed {
    fn from(holds: bool) -> Self {
        if holds { Self::Always } else { Self::Never }
    }
}

impl Fixed {
    fn not(self) -> Self {
        match self {
            Self::Never => Self::Always,
            Self::Always => Self::Never,
            Self::Among(..) | Self::Differs => Self::Differs,
        }
    }

    fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Always, _) | (_, Self::Always) => Self::Always,
            (Self::Never, result) | (result, Self::Never) => result,
            (Self::Among(end, Among::Networks(mut networks)), Self::Among(same, Among::Networks(others)))
                if end == same =>
            {
                networks.extend(others);
                Self::Among(end, Among::Networks(networks))
            }
            _ => Self::Differs,
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Never, _) | (_, Self::Never) => Self::Never,
            (Self::Always, result) | (result, Self::Always) => result,
            _ => Self::Differs,
        }
    }
}

impl Walker {
    /// The first rules, at most `limit`, that deny packets of a class which arrive on a port by an address, before another rule can decide on
    /// them.
    pub fn denied_addresses(&mut self, arrival: PortId, class: PacketClass, limit: usize) -> DeniedAddresses {
        self.catch_up();
        let mut found = DeniedAddresses::default();
        if !self.generation.left_names.is_empty() {
            return DeniedAddresses { stopped_by: Some(NoOffload::Recheck), ..found };
        }
        let frame = class.frame();
        let Ok(sample) = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32) else { return found };
        let mut walk = Walk::new(Dir::In, Some(arrival), None);
        walk.enter_zone(&self.generation.ports);
        let program = &self.generation.program;
        let (mut at, mut counts) = (0, Vec::new());
        // Terminates: `at` increases.
        while at <= program.default && found.rules.len() < limit {
            let rule = &program.rules[at];
            match self.denying(rule, &walk, &sample) {
                Ok(Denying::No) => {}
                Ok(Denying::Counts) => counts.push(rule.id),
                Ok(Denying::Jumps(to)) if to > at => {
                    counts.push(rule.id);
                    at = to;
                    continue;
                }
                Ok(Denying::Addresses(end, among)) => {
                    if let Some(addresses) = self.addresses(among) {
                        let counts = counts.iter().copied().chain([rule.id]).collect();
                        found.rules.push(DenyingRule { position: at, counts, end, addresses });
                    }
                }
                Ok(Denying::Jumps(_)) => {
                    found.stopped_by = Some(NoOffload::Rule(rule.number, Obstacle::Jumps));
                    break;
                }
                Err(obstacle) => {
                    found.stopped_by = Some(NoOffload::Rule(rule.number, obstacle));
                    break;
                }
            }
            at += 1;
        }
        found
    }

    /// `None`: there is no such table.
    fn addresses(&self, among: Among) -> Option<DenyingAddresses> {
        Some(match among {
            Among::Table(table) => {
                DenyingAddresses::Table(Arc::clone(self.generation.tables.get(table as usize)?))
            }
            Among::Networks(networks) => DenyingAddresses::Networks(networks.into()),
        })
    }

    /// What the rule with this number compares, if it denies and compares an address.
    pub fn denies_by_address(&mut self, number: u32) -> Option<AddressTest> {
        self.catch_up();
        let program = &self.generation.program;
        let rule = &program.rules[program.position_from(number)];
        if rule.number != number || !matches!(rule.action, CompiledAction::Deny) {
            return None;
        }
        let test = |end, has_table| Some(AddressTest { end, has_table });
        program.insns_of(rule).iter().find_map(|insn| match insn.op {
            Op::SrcTable(_) => test(End::Source, true),
            Op::DstTable(_) => test(End::Destination, true),
            Op::Src4(_) | Op::Src6(_) | Op::SrcSet(_) => test(End::Source, false),
            Op::Dst4(_) | Op::Dst6(_) | Op::DstSet(_) => test(End::Destination, false),
            _ => None,
        })
    }

    fn denying(&self, rule: &CompiledRule, walk: &Walk, sample: &Packet<'_>) -> Result<Denying, Obstacle> {
        if !rule.enabled {
            return Ok(Denying::No);
        }
        if rule.lookup.is_some() {
            return Err(Obstacle::Lookup);
        }
        let fixed = self.fixed_by_class(rule, walk, sample);
        match fixed {
            Fixed::Never => return Ok(Denying::No),
            Fixed::Differs => return Err(Obstacle::Test),
            Fixed::Always | Fixed::Among(..) if rule.prob != 0 => return Err(Obstacle::Prob),
            Fixed::Always | Fixed::Among(..) if rule.log.is_some() => return Err(Obstacle::Log),
            Fixed::Always | Fixed::Among(..) if rule.install.is_some() => return Err(Obstacle::Install),
            Fixed::Always | Fixed::Among(..) => {}
        }
        match (fixed, rule.action) {
            (Fixed::Among(end, among), CompiledAction::Deny) => Ok(Denying::Addresses(end, among)),
            (Fixed::Among(..), _) => Err(Obstacle::Test),
            (_, CompiledAction::Count) => Ok(Denying::Counts),
            (_, CompiledAction::Skipto(Jump::To(to))) => Ok(Denying::Jumps(to as usize)),
            _ => Err(Obstacle::Action),
        }
    }

    /// Whether the rule matches the packets of a class at a port.
    fn fixed_by_class(&self, rule: &CompiledRule, walk: &Walk, sample: &Packet<'_>) -> Fixed {
        let blocks = self.generation.program.insns_of(rule).chunk_by(|insn: &Insn, _| insn.or);
        blocks.fold(Fixed::Always, |all, block| {
            let results = block.iter().map(|insn| {
                let found = self.test_of_class(&insn.op, rule.number, walk, sample);
                if insn.not { found.not() } else { found }
            });
            all.and(results.fold(Fixed::Never, Fixed::or))
        })
    }

    fn test_of_class(&self, op: &Op, number: u32, walk: &Walk, sample: &Packet<'_>) -> Fixed {
        let holds = || Fixed::from(op.holds(&self.generation.context(sample), walk, number, &mut None));
        let four = matches!(sample.addresses, wire::Addresses::V4(..));
        match op {
            Op::SrcTable(check) if check.value.is_none() => {
                Fixed::Among(End::Source, Among::Table(check.table))
            }
            Op::DstTable(check) if check.value.is_none() => {
                Fixed::Among(End::Destination, Among::Table(check.table))
            }
            Op::Src4(net) if four => network(End::Source, *net),
            Op::Dst4(net) if four => network(End::Destination, *net),
            Op::SrcSet(set) if four => octets(End::Source, set),
            Op::DstSet(set) if four => octets(End::Destination, set),
            Op::Src6(net) if !four => {
                networks(End::Source, net.prefix_len().map(|len| Key::Net6(net.addr, len)))
            }
            Op::Dst6(net) if !four => {
                networks(End::Destination, net.prefix_len().map(|len| Key::Net6(net.addr, len)))
            }
            // Of the other family.
            Op::Src4(_) | Op::Dst4(_) | Op::SrcSet(_) | Op::DstSet(_) | Op::Src6(_) | Op::Dst6(_) => {
                Fixed::Never
            }
            Op::Established | Op::Setup if sample.proto != proto::TCP => Fixed::Never,
            Op::True
            | Op::Ip4
            | Op::Ip6
            | Op::Proto(_)
            | Op::In
            | Op::Out
            | Op::Recv(_)
            | Op::Xmit(_)
            | Op::Via(_)
            | Op::RecvTable(_)
            | Op::XmitTable(_)
            | Op::ViaTable(_)
            | Op::Layer2 => holds(),
            Op::Field(test) if !test.scope().includes(sample) || test.is_fixed_by_form() => holds(),
            _ => Fixed::Differs,
        }
    }
}

fn networks(end: End, network: Option<Key>) -> Fixed {
    network.map_or(Fixed::Differs, |network| Fixed::Among(end, Among::Networks(vec![network])))
}

/// A mask that is no prefix is left to the engine.
fn network(end: End, net: Net4) -> Fixed {
    networks(end, net.prefix_len().map(|len| Key::Net4(net.addr, len)))
}

fn octets(end: End, set: &Set4) -> Fixed {
    let addresses = (0..=255).map(|octet| set.base & !0xff | octet).filter(|address| set.contains(*address));
    Fixed::Among(end, Among::Networks(addresses.map(|address| Key::Net4(address, 32)).collect()))
}

fn contains(network: &Key, address: IpAddr) -> bool {
    match (network, address) {
        (Key::Net4(net, len), IpAddr::V4(address)) => Net4::prefix(*net, *len).contains(address.to_bits()),
        (Key::Net6(net, len), IpAddr::V6(address)) => Net6::prefix(*net, *len).contains(address.to_bits()),
        _ => false,
    }
}

/// What a rule does with the packets of a class at a port.
enum Denying {
    /// It matches none.
    No,
    /// It counts them.
    Counts,
    /// It counts them, and they continue at this position.
    Jumps(usize),
    /// It denies those that have one of these addresses.
    Addresses(End, Among),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use towpath_wire::Time;

    use super::*;
    use crate::rules::Ruleset;
    use crate::state::Settings;
    use crate::{Gate, PacketSpec, Ports};

    /// The numbers of the rules that deny, each with those that count before, and the reason of the end.
    fn denied(rules: &str, class: usize) -> (Vec<Vec<u32>>, Option<String>) {
        let (gate, found) = found(rules, class);
        let rules =
            found.rules.iter().map(|rule| rule.counts.iter().map(|id| gate.rule_number(*id)).collect());
        (rules.collect(), found.stopped_by.map(|end| end.to_string()))
    }

    fn found(rules: &str, class: usize) -> (Gate, DeniedAddresses) {
        first(rules, class, 100)
    }

    fn first(rules: &str, class: usize, limit: usize) -> (Gate, DeniedAddresses) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut ports = Ports::new();
        ports.add("wan", Vec::new());
        ports.add("lan", Vec::new());
        let mut gate = Gate::new(ruleset, ports, Settings::default(), 1);
        let found = gate.walker().unwrap().denied_addresses(PortId(0), PacketClass::ALL[class], limit);
        (gate, found)
    }

    const TABLES: &str = "table t create type addr\ntable u create type addr\n";

    /// Rules, the rules that deny and those that count before each, and the reason of the end.
    type Row<'r> = (&'r str, &'r [&'r [u32]], Option<&'r str>);

    #[test]
    fn rules_deny_by_a_table_until_another_one_may_decide() {
        const TEST: &str = "rule 100 has a test whose result may differ from packet to packet";
        const TABLE: &str = "add 200 deny ip from table(t) to any";
        let rows: [Row<'_>; 28] = [
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
            ("add 100 count tcp from any to any", &[&[100, 200]], None),
            ("add 100 count ip4 from any to any\nadd 110 allow ip6 from any to any", &[&[100, 200]], None),
            ("add 100 allow udp from any to any 53", &[&[200]], None),
            // Several tables.
            ("add 100 deny ip from table(u) to any in recv wan", &[&[100], &[200]], None),
            ("add 100 deny ip from table(u) to any in recv lan", &[&[200]], None),
            // Other rules.
            ("add 100 allow ip from 10.0.0.0/8 to any", &[], Some(TEST)),
            ("add 100 count ip from not table(u) to any", &[], Some(TEST)),
            ("add 100 count ip from table(u) to any", &[], Some(TEST)),
            ("add 100 deny ip from table(u,7) to any", &[], Some(TEST)),
            ("add 100 allow tcp from any to any established", &[], Some(TEST)),
            ("add 100 deny log ip from table(u) to any", &[], Some("rule 100 has `log`")),
            ("add 100 prob 0.5 deny ip from table(u) to any", &[], Some("rule 100 has `prob`")),
            ("add 100 check-state", &[], Some("rule 100 looks for a state first")),
            ("add 100 deny ip from table(u) to any record-state", &[], Some("rule 100 makes a state")),
            ("add 100 count ip from any to any set-limit src-addr 2", &[], Some("rule 100 makes a state")),
            ("add 100 allow ip from any to any", &[], Some("rule 100 does not only pass the packet")),
        ];
        for (rules, expected, end) in rows {
            let (found, reason) = denied(&format!("{TABLES}{rules}\n{TABLE}"), 0);
            assert_eq!(found, expected, "{rules}");
            let default = "rule 65535 does not only pass the packet";
            assert_eq!(reason.as_deref(), Some(end.unwrap_or(default)), "{rules}");
        }
    }

    /// What a rule denies, for each class of packets, or the number of the rule that ends the walk.
    #[test]
    fn rules_deny_by_sources_and_destinations_for_each_class() {
        let denies = |rule: &str, class| {
            let (_, found) = found(&format!("{TABLES}add 100 {rule}"), class);
            let addresses = |rule: &DenyingRule| match &rule.addresses {
                DenyingAddresses::Table(_) => "table".to_owned(),
                DenyingAddresses::Networks(all) => {
                    all.iter().map(Key::to_string).collect::<Vec<_>>().join(" ")
                }
            };
            let mut all: Vec<_> =
                found.rules.iter().map(|rule| format!("{:?} {}", rule.end, addresses(rule))).collect();
            match found.stopped_by {
                Some(NoOffload::Rule(65535, Obstacle::Action)) => {}
                end => all.push(end.unwrap().to_string()),
            }
            all.join(", ")
        };
        const TEST: &str = "rule 100 has a test whose result may differ from packet to packet";
        const ACTION: &str = "rule 100 does not only pass the packet";
        // IPv4 TCP, IPv4 UDP, IPv6 TCP, IPv6 UDP.
        let rows = [
            ("deny ip from any to table(t)", ["Destination table"; 4]),
            ("deny ip from any to table(t,3)", [TEST; 4]),
            ("deny udp from table(t) to any", ["", "Source table", "", "Source table"]),
            ("deny tcp from any to table(t)", ["Destination table", "", "Destination table", ""]),
            ("deny ip6 from table(t) to any", ["", "", "Source table", "Source table"]),
            ("deny ip from 10.0.0.0/8 to any", ["Source 10.0.0.0/8", "Source 10.0.0.0/8", "", ""]),
            ("deny tcp from any to 192.0.2.1", ["Destination 192.0.2.1/32", "", "", ""]),
            (
                "deny udp from any to 192.0.2.1,10.0.0.0/8",
                ["", "Destination 192.0.2.1/32 10.0.0.0/8", "", ""],
            ),
            ("deny udp from 10.0.0.0/24{1,7} to any", ["", "Source 10.0.0.1/32 10.0.0.7/32", "", ""]),
            ("deny tcp from 2001:db8::/32 to any", ["", "", "Source 2001:db8::/32", ""]),
            (
                "deny tcp from { 10.0.0.1 or 2001:db8::1 } to any",
                ["Source 10.0.0.1/32", "", "Source 2001:db8::1/128", ""],
            ),
            ("deny ip from 10.0.0.1 to 192.0.2.0/24", [TEST, TEST, "", ""]),
            ("deny ip from table(t) to 192.0.2.0/24", [TEST, TEST, "", ""]),
            ("deny ip from table(t) to table(u)", [TEST; 4]),
            ("deny udp from { 10.0.0.1 or table(t) } to any", ["", TEST, "", "Source table"]),
            ("deny ip from 10.0.1.0:255.0.255.0 to any", [TEST, TEST, "", ""]),
            (
                "deny ip from any to any { src-ip 10.0.0.1 or proto udp } { src-ip 10.0.0.2 or proto tcp }",
                ["Source 10.0.0.1/32", "Source 10.0.0.2/32", "", ""],
            ),
            (
                "deny ip from any to any { dst-ip 10.0.0.1 or recv lan } in",
                ["Destination 10.0.0.1/32", "Destination 10.0.0.1/32", "", ""],
            ),
            // All IPv6 packets.
            ("deny ip from not 10.0.0.0/8 to any", [TEST, TEST, ACTION, ACTION]),
            ("deny ip from not table(t) to any", [TEST; 4]),
            ("deny ip from me to any", [TEST; 4]),
            ("deny udp from table(t) to any 53", ["", TEST, "", TEST]),
            ("deny tcp from table(t) to any setup", [TEST, "", TEST, ""]),
            ("count ip from any to 10.0.0.0/8", [TEST, TEST, "", ""]),
            ("deny log ip from any to 10.0.0.1", ["rule 100 has `log`", "rule 100 has `log`", "", ""]),
        ];
        for (rule, expected) in rows {
            for (class, expected) in expected.into_iter().enumerate() {
                assert_eq!(denies(rule, class), expected, "{rule}, {:?}", PacketClass::ALL[class]);
            }
        }
    }

    #[test]
    fn no_more_rules_are_found_than_wanted() {
        let rules = "add 100 deny ip from 10.0.0.1 to any\nadd 200 deny ip from any to 10.0.0.1\nadd 300 allow ip from any to any";
        let ends = [0, 1, 2, 3].map(|limit| {
            let (_, found) = first(rules, 0, limit);
            (found.rules.len(), found.stopped_by.map(|end| end.to_string()))
        });
        let end = "rule 300 does not only pass the packet".to_owned();
        assert_eq!(ends, [(0, None), (1, None), (2, None), (2, Some(end))]);
    }

    #[test]
    fn a_flow_has_one_class_and_an_address_of_the_rule() {
        let flow = |proto| Flow {
            ends: Ends::V4([10, 0, 0, 1].into(), [192, 0, 2, 9].into()),
            proto,
            src_port: 1,
            dst_port: 2,
            zone: 0,
        };
        let position = |proto| PacketClass::position_of(&flow(proto));
        assert_eq!([proto::TCP, proto::UDP, proto::ICMP].map(position), [Some(0), Some(1), None]);
        for (rule, denied) in [
            ("deny ip from 10.0.0.0/8 to any", true),
            ("deny ip from 192.0.2.9 to any", false),
            ("deny ip from any to 192.0.2.0/24", true),
            ("deny ip from any to 10.0.0.1", false),
            ("deny ip from table(t) to any", true),
            ("deny ip from any to table(t)", false),
        ] {
            let (_, found) = found(&format!("{TABLES}table t add 10.0.0.1\nadd 100 {rule}"), 1);
            assert_eq!(found.rules[0].denies(&flow(proto::UDP)), denied, "{rule}");
        }
    }

    const PLACES: [&str; 8] = [
        "any",
        "any",
        "10.0.0.0/30",
        "10.0.0.1,10.0.0.6",
        "table(t)",
        "table(u)",
        "not 10.0.0.1",
        "2001:db8::/126",
    ];
    const TESTS: [&str; 9] = [
        "",
        "in recv wan",
        "recv lan",
        "out",
        "frag",
        "setup",
        "{ src-ip 10.0.0.1 or proto udp } { src-ip 10.0.0.2 or proto tcp }",
        "{ dst-ip 10.0.0.1 or recv lan }",
        "{ dst-ip 10.0.0.1 or src-ip 10.0.0.2 }",
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A packet with an address of a rule counts for the rules of its walk, and that rule is the last one of it.
        #[test]
        fn a_rule_denies_what_the_walk_denies(
            rules in proptest::collection::vec((0_usize..7, 0_usize..4, 0_usize..8, 0_usize..8, 0_usize..9), 1..8),
            packets in proptest::collection::vec((0_usize..5, any::<bool>(), 0_u32..8, 0_u32..8), 1..20),
        ) {
            let mut text = format!(
                "{TABLES}table t add 10.0.0.4/30\ntable t add 2001:db8::1\ntable u add 10.0.0.2\ntable u add 2001:db8::/125\n"
            );
            for (at, (action, proto, from, to, test)) in rules.into_iter().enumerate() {
                let action = ["deny", "deny", "deny", "deny", "count", "skipto 750", "allow"][action];
                let proto = ["ip", "tcp", "udp", "ip6"][proto];
                let (from, to, number) = (PLACES[from], PLACES[to], 100 * (at + 1));
                text += &format!("add {number} {action} {proto} from {from} to {to} {}\n", TESTS[test]);
            }
            for (kind, six, src, dst) in packets {
                let (proto, fields) = [("tcp", "syn"), ("tcp", "ack"), ("tcp", "rst"), ("udp", ""), ("udp", "len 9")][kind];
                let host = |n: u32, port| if six { format!("[2001:db8::{n}]:{port}") } else { format!("10.0.0.{n}:{port}") };
                let frame = PacketSpec::parse(&format!("{proto} {} > {} {fields}", host(src, 7), host(dst, 80))).unwrap().frame;
                let packet = wire::parse(LinkType::ETHERNET, &frame, frame.len() as u32).unwrap();
                let flow = packet.flow().unwrap();
                let (mut gate, found) = found(&text, PacketClass::position_of(&flow).unwrap());
                let Some(rule) = found.rules.iter().find(|rule| rule.denies(&flow)) else { continue };
                gate.walk(&mut Walk::new(Dir::In, Some(PortId(0)), None), &packet, Time::from_secs(9));
                let counted: Vec<_> = gate.show().iter().filter(|rule| rule.packets > 0).map(|rule| rule.number).collect();
                let expected: Vec<_> = rule.counts.iter().map(|id| gate.rule_number(*id)).collect();
                prop_assert_eq!(counted, expected, "{}\n{:?}", text, flow);
            }
        }
    }
}
