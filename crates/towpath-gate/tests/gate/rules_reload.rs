//! Reload: which rules stay, and which rule owns each state afterwards.

use std::net::Ipv4Addr;

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{Cursor, Ends, Kind, Listed, Settings};
use towpath_gate::{Dir, Gate, PacketSpec, Ports, StatePolicy, Step, Walk};
use towpath_wire::{self as wire, Time};

const NOW: Time = Time::from_secs(100);

fn ruleset(rules: &str) -> Ruleset {
    Ruleset::parse("t", rules).ruleset.unwrap_or_else(|errors| panic!("{rules}: {}", errors[0]))
}

fn gate(rules: &str) -> Gate {
    let mut ports = Ports::new();
    for name in ["em0", "em1", "em2"] {
        ports.add(name, Vec::new());
    }
    Gate::new(ruleset(rules), ports, Settings::default(), 3)
}

/// Walks a packet that was received on the port that it names.
fn step(gate: &mut Gate, packet: &str) -> Step {
    let spec = PacketSpec::parse(packet).unwrap();
    let parsed = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
    let port = spec.port.as_deref().and_then(|name| gate.ports().find(name));
    gate.walk(&mut Walk::new(spec.dir, port, None), &parsed, NOW)
}

/// The states by destination port: number of the rule, and flow name.
fn owners(gate: &Gate) -> Vec<(u16, u32, String)> {
    let of = |state: &Listed| {
        (state.flow.dst_port, gate.rule_number(state.rule), gate.flow_name(state.name).to_owned())
    };
    let states = gate.states().list(NOW).filter(|state| !matches!(state.kind, Kind::Parent { .. }));
    let mut owners: Vec<_> = states.map(|state| of(&state)).collect();
    owners.sort();
    owners
}

const SSH: &str = "in em0 tcp 10.0.0.1:1000 > 10.0.0.2:22 syn";
const SSH_ACK: &str = "in em0 tcp 10.0.0.1:1000 > 10.0.0.2:22 ack";

/// Rows: the file after an edit of an unnumbered file, and the number of the rule that then owns the state of a
/// connection; 0 if it is removed.
#[test]
fn an_edit_of_an_unnumbered_file_keeps_connections() {
    let old = "add check-state\nadd allow tcp from any to any 22 in recv em0 setup keep-state\nadd deny ip from any to any";
    let rows = [
        // Added at the top, in the middle, at the end.
        (format!("add count ip from any to any\n{old}"), 300),
        (old.replace("add allow", "add count ip from any to any\nadd allow"), 300),
        (format!("{old}\nadd allow ip from any to any"), 200),
        // Moved, renumbered, in another set, with a comment, with another action.
        ("add allow tcp from any to any 22 in recv em0 setup keep-state\nadd check-state".to_owned(), 100),
        (old.replace("add allow", "add 7777 allow"), 7777),
        (old.replace("add allow", "add set 3 allow"), 200),
        (old.replace("keep-state", "keep-state // ssh"), 200),
        (old.replace("add allow", "add allow log"), 200),
        (old.replace("add allow", "add reset"), 200),
        // Wider, narrower, under another name, before another rule that creates the state.
        (old.replace("22", "1-1023"), 200),
        (old.replace("from any", "from 10.0.0.0/24"), 200),
        (old.replace("keep-state", "keep-state :ssh"), 200),
        (format!("add allow tcp from 10.0.0.1 to any keep-state\n{old}"), 100),
        (old.replace("keep-state", "limit src-addr 1"), 200),
        // Refused.
        (format!("add deny tcp from 10.0.0.1 to any\n{old}"), 0),
        (format!("add deny tcp from any to any recv em0\n{old}"), 0),
        (old.replace("recv em0", "recv em1"), 0),
        (old.replace("any 22", "any 23"), 0),
        (old.replace(" keep-state", ""), 0),
        (format!("{old}\nset disable 0"), 0),
    ];
    for (new, owner) in rows {
        let mut gate = gate(old);
        assert_eq!(step(&mut gate, SSH), Step::Pass);
        let preview = gate.preview(&ruleset(&new), StatePolicy::Recheck, NOW);
        let diff = gate.reload(ruleset(&new), StatePolicy::Recheck, NOW);
        assert_eq!(diff, preview, "{new}");
        let owners = owners(&gate);
        let found = owners.first().map_or(0, |(_, rule, _)| *rule);
        assert_eq!((found, diff.states_dropped), (owner, usize::from(owner == 0)), "{new}");
        let passes = owner != 0 && !new.contains("add reset");
        assert_eq!(step(&mut gate, SSH_ACK) == Step::Pass, passes, "{new}");
    }
}

/// Tests of fields that a state does not record match only if the state's own rule has them.
#[test]
fn unrecorded_fields_are_those_of_the_own_rule() {
    let old = "add 10 allow tcp from any to any 22 ipttl 64 setup keep-state\nadd 20 allow udp from any to any out xmit em1 keep-state";
    let rows = [
        // Unknown in other rules: they neither refuse the packet nor create its state.
        ("add 5 deny ip from any to any ipttl 1-100", [10, 20]),
        ("add 5 allow ip from any to any iplen 1-9000 keep-state", [10, 20]),
        ("add 5 deny ip from any to any xmit em2", [10, 20]),
        ("add 5 prob 0.99 deny ip from any to any", [10, 20]),
        // The tests of the state's own rule.
        ("add 5 deny ip from any to any ipttl 64", [0, 20]),
        ("add 5 deny ip from any to any xmit em1", [10, 0]),
        (
            "add 5 skipto 30 ip from any to any xmit em1\nadd 40 allow udp from any to any keep-state",
            [10, 40],
        ),
        // Both paths lead to the rule of the state.
        ("add 5 skipto 10 ip from any to any iplen 1-9000\nadd 6 deny tcp from any to any", [10, 20]),
        ("add 5 prob 0.5 skipto 10 ip from any to any\nadd 6 deny ip from any to any", [10, 20]),
    ];
    for (more, expected) in rows {
        let mut gate = gate(old);
        assert_eq!(step(&mut gate, SSH), Step::Pass);
        let spec = PacketSpec::parse("udp 10.0.0.1:1 > 10.0.0.2:53").unwrap();
        let parsed = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        let (em0, em1) = (gate.ports().find("em0"), gate.ports().find("em1"));
        assert_eq!(gate.walk(&mut Walk::new(Dir::Out, em0, em1), &parsed, NOW), Step::Pass);
        gate.reload(ruleset(&format!("{more}\n{old}")), StatePolicy::Recheck, NOW);
        let owners = owners(&gate);
        let owner = |port| owners.iter().find(|row| row.0 == port).map_or(0, |row| row.1);
        assert_eq!([owner(22), owner(53)], expected, "{more}");
    }
    // A connection that was picked up in the middle: its first packet was not a SYN.
    let old = "add 10 allow tcp from any to any 22 established keep-state";
    let mut gate = gate(old);
    assert_eq!(step(&mut gate, SSH_ACK), Step::Pass);
    gate.reload(ruleset(&format!("add deny udp from any to any\n{old}")), StatePolicy::Recheck, NOW);
    assert_eq!(owners(&gate), [(22, 10, "default".to_owned())]);
}

/// The first packet of a connection that a `loose` rule picked up was not a SYN, also after a restart.
#[test]
fn the_first_packet_of_a_picked_up_connection_is_no_syn() {
    let old = "add 10 allow tcp from any to any keep-state loose";
    let new = format!("add 5 deny tcp from any to any setup\n{old}");
    for (first, expected) in [(SSH_ACK, vec![10]), (SSH, vec![])] {
        let mut first_gate = gate(old);
        assert_eq!(step(&mut first_gate, first), Step::Pass);
        let mut snapshot = Vec::new();
        first_gate.snapshot(NOW, |piece| snapshot.extend_from_slice(piece));
        let mut next = gate(old);
        assert_eq!(next.restore(&snapshot, NOW).unwrap().states, 1);
        for mut gate in [first_gate, next] {
            gate.reload(ruleset(&new), StatePolicy::Recheck, NOW);
            let rules: Vec<u32> = owners(&gate).iter().map(|owner| owner.1).collect();
            assert_eq!(rules, expected, "{first}");
        }
    }
}

/// Under `keep`, the state of a deleted rule ends with its connection: its owner cannot begin another one in it.
#[test]
fn an_orphan_is_not_reopened() {
    let end = [SSH, "in em1 tcp 10.0.0.2:22 > 10.0.0.1:1000 rst ack ackno 1"];
    for option in ["", " strict"] {
        for (more, seconds) in [("", 20), ("add check-state\nadd deny ip from any to any\n", 1)] {
            let rules = format!("add allow tcp from any to any keep-state{option}");
            let mut gate = gate(&rules);
            for packet in end {
                assert_eq!(step(&mut gate, packet), Step::Pass);
            }
            let rules = if more.is_empty() { &rules } else { more };
            gate.reload(ruleset(rules), StatePolicy::Keep, NOW);
            let _ = step(&mut gate, SSH);
            let left: Vec<u64> = gate.states().list(NOW).map(|state| state.remaining.as_secs()).collect();
            assert_eq!(left, [seconds], "{option} {more}");
        }
    }
}

/// Under `keep`, a listing has the parent of orphans under the default dynamic rule, and the orphans under their own.
#[test]
fn the_parent_of_orphans_is_listed_under_the_default_dynamic_rule() {
    let mut gate = gate("add 100 allow tcp from any to any limit src-addr 2");
    assert_eq!(step(&mut gate, SSH), Step::Pass);
    let listed = |gate: &Gate| {
        let mut listed: Vec<_> = gate
            .states()
            .list(NOW)
            .map(|state| {
                (matches!(state.kind, Kind::Parent { .. }), gate.listed_rule(&state), state.orphaned)
            })
            .collect();
        listed.sort_unstable();
        listed
    };
    assert_eq!(listed(&gate), [(false, 100, false), (true, 100, false)]);
    gate.reload(ruleset("add 200 deny ip from any to any"), StatePolicy::Keep, NOW);
    assert_eq!(listed(&gate), [(false, 100, true), (true, 65535, true)]);
}

/// A kept rule keeps its counters, the count of its limit and the count of its log.
#[test]
fn kept_rules_continue() {
    let old = "add allow log logamount 1 tcp from any to any 22 keep-state\nadd allow udp from any to any limit src-addr 2";
    let mut gate = gate(old);
    for packet in [SSH, SSH_ACK, "udp 10.0.0.1:1 > 10.0.0.2:1", "udp 10.0.0.1:1 > 10.0.0.2:2"] {
        assert_eq!(step(&mut gate, packet), Step::Pass);
    }
    assert!(gate.log().take().is_some());
    let (first, second) = old.split_once('\n').unwrap();
    let new = format!("add count ip from any to any\n{second}\nadd count tcp from any to any\n{first}");
    let diff = gate.reload(ruleset(&new), StatePolicy::Recheck, NOW);
    assert_eq!((diff.kept, diff.added.len(), diff.removed.len(), diff.renumbered), (3, 2, 0, 1));
    assert_eq!(diff.moved.len(), 1, "{diff:?}");
    let packets = |gate: &Gate| gate.show().iter().map(|rule| rule.packets).collect::<Vec<_>>();
    assert_eq!(packets(&gate), [0, 2, 0, 2, 0]);
    assert_eq!(step(&mut gate, SSH_ACK), Step::Pass);
    assert!(gate.log().take().is_none());
    assert!(matches!(step(&mut gate, "udp 10.0.0.1:1 > 10.0.0.2:3"), Step::Drop(_)), "the limit is reached");
    // Another rule with another limit takes the states over, and counts them.
    let new = new.replace("limit src-addr 2", "limit dst-addr 3");
    gate.reload(ruleset(&new), StatePolicy::Recheck, NOW);
    let counted = |state: Listed| match state.kind {
        Kind::Parent { count } if count > 0 => Some((count, gate.rule_number(state.rule))),
        _ => None,
    };
    let parents: Vec<_> = gate.states().list(NOW).filter_map(counted).collect();
    assert_eq!(parents, [(2, 200)]);
    assert_eq!(step(&mut gate, "udp 10.0.0.9:1 > 10.0.0.2:3"), Step::Pass);
    assert!(matches!(step(&mut gate, "udp 10.0.0.8:1 > 10.0.0.2:3"), Step::Drop(_)));
}

/// Two states of one flow: a state that would get the name of the other one ends.
#[test]
fn states_that_become_one_are_merged() {
    let old = "add 10 allow udp from any to any record-state :a defer-action\nadd 20 allow udp from any to any keep-state :b";
    let mut gate = gate(old);
    assert_eq!(step(&mut gate, "in em0 udp 10.0.0.1:1 > 10.0.0.2:53"), Step::Pass);
    assert_eq!(gate.states().len(), 2);
    let diff =
        gate.reload(ruleset("add 20 allow udp from any to any keep-state :b"), StatePolicy::Recheck, NOW);
    assert_eq!((diff.states_dropped, diff.states_handed), (1, 0));
    assert_eq!(owners(&gate), [(53, 20, "b".to_owned())]);
}

/// An expired state, or one whose rule's states were removed, has no use: the live state gets its name.
#[test]
fn a_dead_state_does_not_end_a_live_one() {
    let long = "add 10 allow udp from any to any record-state :a lifetime 100 defer-action";
    let short = "add 20 allow udp from any to any keep-state :b lifetime 5";
    let later = NOW + std::time::Duration::from_secs(20);
    for removed in [false, true] {
        let mut gate = gate(&format!("{long}\n{short}"));
        assert_eq!(step(&mut gate, "in em0 udp 10.0.0.1:1 > 10.0.0.2:53"), Step::Pass);
        assert_eq!(gate.states().len(), 2);
        let now = if removed { NOW } else { later };
        if removed {
            gate.reload(ruleset(long), StatePolicy::Delete, now);
        }
        let diff = gate.reload(ruleset(short), StatePolicy::Recheck, now);
        assert_eq!((diff.states_dropped, diff.states_handed), (0, 1), "{removed}");
        assert_eq!(gate.states().list(now).count(), 1);
        assert_eq!(owners(&gate), [(53, 20, "b".to_owned())]);
        // The slot of the dead state is free, and the flow's list is whole.
        let flow = gate.states().list(now).next().unwrap().flow;
        assert_eq!(gate.states_mut().remove_flow(&flow, now), 1);
        gate.expire(now, 10);
        assert!(gate.states().is_empty());
    }
}

/// Pseudo-random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Allow,
    Deny,
    Count,
    Reset,
    /// Over so many rules.
    Skip(usize),
}

/// A rule of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ModelRule {
    act: Act,
    proto: Option<u8>,
    src: Option<u8>,
    ports: (u16, u16),
    out: Option<bool>,
    recv: Option<u16>,
    setup: bool,
    /// A test of a field that states do not record. It matches every packet.
    opaque: Option<&'static str>,
    /// The name of the state that it creates.
    state: Option<&'static str>,
    set: u8,
    comment: usize,
}

/// A packet of the model, the first one of its flow.
#[derive(Clone, Copy, Debug)]
struct ModelPacket {
    proto: u8,
    src: u8,
    src_port: u16,
    dst_port: u16,
    out: bool,
    recv: Option<u16>,
}

/// A rule file of the model.
#[derive(Clone, Debug)]
struct File {
    rules: Vec<ModelRule>,
    /// Distance of rule numbers; `None` is a file without numbers.
    numbers: Option<usize>,
    disabled: Option<u8>,
}

impl ModelRule {
    fn random(random: &mut Random) -> Self {
        let act = random.one_of(&[Act::Allow, Act::Allow, Act::Allow, Act::Deny, Act::Count, Act::Skip(1)]);
        let act = if matches!(act, Act::Skip(_)) { Act::Skip(1 + random.below(3)) } else { act };
        let stateful = act == Act::Allow && random.below(4) > 0 || act == Act::Deny && random.below(6) == 0;
        let act = if act == Act::Deny && random.below(4) == 0 { Act::Reset } else { act };
        let low = random.one_of(&[0, 0, 20, 50, 80]);
        let proto = random.one_of(&[None, None, Some(6), Some(17)]);
        Self {
            act,
            proto: if low > 0 { proto.or(Some(6)) } else { proto },
            src: random.one_of(&[None, None, Some(1), Some(2), Some(3)]),
            ports: if low == 0 { (0, 65535) } else { (low, low + random.one_of(&[0, 5, 40])) },
            out: random.one_of(&[None, None, None, Some(false), Some(true)]),
            recv: random.one_of(&[None, None, None, Some(0), Some(1)]),
            setup: random.below(4) == 0,
            opaque: match act {
                Act::Skip(_) => None,
                _ => random.one_of(&[None, None, None, Some("ipttl 1-255"), Some("not iplen 9000")]),
            },
            state: if stateful { random.one_of(&[Some("default"), Some("web")]) } else { None },
            set: random.below(4) as u8,
            comment: random.below(3),
        }
    }

    /// Whether it matches the packet. A test of a field that is not recorded matches if `known` accepts it.
    fn matches(&self, packet: &ModelPacket, known: impl Fn(&str) -> bool) -> bool {
        self.proto.is_none_or(|proto| proto == packet.proto)
            && self.src.is_none_or(|src| src == packet.src)
            && (self.ports.0..=self.ports.1).contains(&packet.dst_port)
            && self.out.is_none_or(|out| out == packet.out)
            && self.recv.is_none_or(|recv| Some(recv) == packet.recv)
            && (!self.setup || packet.proto == 6)
            && self.opaque.is_none_or(known)
    }

    fn text(&self, target: impl Fn(usize) -> String) -> String {
        let action = match self.act {
            Act::Allow => "allow".to_owned(),
            Act::Deny => "deny".to_owned(),
            Act::Reset => "unreach port".to_owned(),
            Act::Count => "count".to_owned(),
            Act::Skip(over) => format!("skipto {}", target(over)),
        };
        let proto = match self.proto {
            Some(6) => "tcp",
            Some(_) => "udp",
            None => "ip",
        };
        let src = self.src.map_or("any".to_owned(), |host| format!("10.0.0.{host}"));
        let mut text = format!("set {} {action} {proto} from {src} to any", self.set);
        if self.ports != (0, 65535) {
            text += &format!(" {}-{}", self.ports.0, self.ports.1);
        }
        text += self.out.map_or("", |out| if out { " out" } else { " in" });
        text += &self.recv.map_or(String::new(), |port| format!(" recv em{port}"));
        text += if self.setup { " setup" } else { "" };
        text += &self.opaque.map_or(String::new(), |test| format!(" {test}"));
        text += &self.state.map_or(String::new(), |name| format!(" keep-state :{name}"));
        text + &" // note".repeat(self.comment.min(1))
    }
}

impl File {
    fn number(&self, at: usize) -> u32 {
        (self.numbers.unwrap_or(100) * (at + 1)) as u32
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (at, rule) in self.rules.iter().enumerate() {
            let number = self.numbers.map_or(String::new(), |_| format!("{} ", self.number(at)));
            let target = |over: usize| self.number((at + 1 + over).min(self.rules.len())).to_string();
            text += &format!("add {number}{}\n", rule.text(target));
        }
        text + &self.disabled.map_or(String::new(), |set| format!("set disable {set}\n"))
    }

    /// The rule that creates the state of a first packet.
    fn creates(&self, packet: &ModelPacket, known: impl Fn(&str) -> bool) -> Option<usize> {
        let mut at = 0;
        while let Some(rule) = self.rules.get(at) {
            let enabled = self.disabled != Some(rule.set);
            at += 1;
            if !enabled || !rule.matches(packet, &known) {
                continue;
            }
            match rule.act {
                _ if rule.state.is_some() => return Some(at - 1),
                Act::Count => {}
                Act::Skip(over) => at += over,
                Act::Allow | Act::Deny | Act::Reset => return None,
            }
        }
        None
    }

    fn edit(&mut self, random: &mut Random) {
        let len = self.rules.len();
        let at = random.below(len);
        match random.below(9) {
            0 => self.rules.insert(0, ModelRule::random(random)),
            1 => self.rules.insert(at, ModelRule::random(random)),
            2 if len > 1 => drop(self.rules.remove(at)),
            3 => {
                let rule = self.rules.remove(at);
                self.rules.insert(random.below(len), rule);
            }
            4 => self.numbers = random.one_of(&[None, Some(1), Some(10), Some(100)]),
            5 => self.rules[at].comment += 1,
            6 => self.disabled = random.one_of(&[None, Some(1), Some(2)]),
            7 => {
                let other = ModelRule::random(random);
                let rule = &mut self.rules[at];
                match random.below(4) {
                    0 => rule.src = other.src,
                    1 => (rule.proto, rule.ports) = (other.proto, other.ports),
                    2 => (rule.out, rule.recv) = (other.out, other.recv),
                    _ => rule.state = rule.state.and(other.state),
                }
            }
            _ => {
                let rule = self.rules[at].clone();
                self.rules.insert(random.below(len + 1), rule);
            }
        }
        self.rules.truncate(24);
    }
}

fn walk_model(gate: &mut Gate, packet: &ModelPacket) {
    let (proto, flags) = if packet.proto == 6 { ("tcp", " syn") } else { ("udp", "") };
    let ModelPacket { src, src_port, dst_port, .. } = packet;
    let spec = format!("{proto} 10.0.0.{src}:{src_port} > 10.9.0.1:{dst_port}{flags}");
    let spec = PacketSpec::parse(&spec).unwrap();
    let parsed = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
    let port = |number: Option<u16>| number.map(towpath_gate::PortId);
    let mut walk = match packet.out {
        false => Walk::new(Dir::In, port(packet.recv), None),
        true => Walk::new(Dir::Out, port(packet.recv), port(Some(2))),
    };
    gate.walk(&mut walk, &parsed, NOW);
}

/// Until a re-check has handed a state over, packets of its connection find it, also where the new rules look up
/// another flow name.
#[test]
fn a_state_is_found_until_it_is_handed_over() {
    let old = "add check-state :web\nadd allow tcp from any to any 22 in setup keep-state :web\nadd deny ip from any to any";
    let mut gate = gate(old);
    assert_eq!(step(&mut gate, SSH), Step::Pass);
    gate.reload(ruleset(&old.replace(":web", ":other")), StatePolicy::RecheckLater, NOW);
    assert_eq!(step(&mut gate, SSH_ACK), Step::Pass);
    assert_eq!(step(&mut gate, "in em0 tcp 10.0.0.2:22 > 10.0.0.1:1000 ack"), Step::Pass);
    // Another connection has no state.
    let other = "in em0 tcp 10.0.0.1:1001 > 10.0.0.2:22 ack";
    assert!(matches!(step(&mut gate, other), Step::Drop(_)));
    let handed = gate.recheck_step(Cursor::default(), NOW);
    assert_eq!((handed.checked, handed.handed, handed.next), (1, 1, None));
    assert_eq!(step(&mut gate, SSH_ACK), Step::Pass);
    assert_eq!(gate.finish_recheck(), 0);
    assert_eq!(step(&mut gate, SSH_ACK), Step::Pass);
    assert_eq!(owners(&gate), [(22, 200, "other".to_owned())]);

    // A rule that is moved to another name keeps its connection while a later reload changes its mind.
    gate.reload(ruleset(&old.replace(":web", ":third")), StatePolicy::RecheckLater, NOW);
    gate.reload(ruleset(old), StatePolicy::RecheckLater, NOW);
    assert_eq!(step(&mut gate, SSH_ACK), Step::Pass);
    gate.recheck_step(Cursor::default(), NOW);
    assert_eq!((gate.finish_recheck(), step(&mut gate, SSH_ACK)), (0, Step::Pass));
}

/// 1,000 edits of random files. A state is removed if and only if the new rules refuse its first packet; otherwise it
/// belongs to the rule that creates it now.
#[test]
fn random_edits_remove_what_the_new_rules_refuse() {
    let (mut removed, mut handed, mut stayed) = (0, 0, 0);
    for seed in 0..100 {
        let mut random = Random(seed);
        let rules = (0..3 + random.below(10)).map(|_| ModelRule::random(&mut random)).collect();
        let mut file = File { rules, numbers: random.one_of(&[None, None, Some(10)]), disabled: None };
        let mut gate = gate(&file.text());
        // The states: first packet, and the rule that owns it.
        let mut states: Vec<(ModelPacket, ModelRule)> = Vec::new();
        let mut src_port = 1000;
        for _ in 0..10 {
            for _ in 0..12 {
                src_port += 1;
                let packet = ModelPacket {
                    proto: random.one_of(&[6, 17]),
                    src: random.one_of(&[1, 2, 3, 4]),
                    src_port,
                    dst_port: random.one_of(&[20, 22, 53, 80, 100]),
                    out: random.below(3) == 0,
                    recv: random.one_of(&[None, Some(0), Some(1)]),
                };
                walk_model(&mut gate, &packet);
                if let Some(at) = file.creates(&packet, |_| true) {
                    states.push((packet, file.rules[at].clone()));
                }
            }
            (0..1 + random.below(3)).for_each(|_| file.edit(&mut random));
            let text = file.text();
            let preview = gate.preview(&ruleset(&text), StatePolicy::Recheck, NOW);
            let stepwise = random.below(2) == 0;
            let mut diff = match stepwise {
                true => gate.reload(ruleset(&text), StatePolicy::RecheckLater, NOW),
                false => gate.reload(ruleset(&text), StatePolicy::Recheck, NOW),
            };
            if stepwise {
                let step = gate.recheck_step(Cursor::default(), NOW);
                assert_eq!((step.next, gate.finish_recheck()), (None, 0));
                (diff.states_dropped, diff.states_handed) = (step.dropped, step.handed);
            }
            assert_eq!(diff, preview, "{text}");
            let before = states.len();
            let mut owners = Vec::new();
            states.retain_mut(|(packet, rule)| {
                let known = |test: &str| rule.opaque == Some(test);
                let Some(at) = file.creates(packet, known) else { return false };
                *rule = file.rules[at].clone();
                owners.push((packet.src_port, file.number(at), rule.state.unwrap_or("").to_owned()));
                true
            });
            let of = |state: Listed| {
                let Ends::V4(src, _) = state.flow.ends else { panic!("{state:?}") };
                assert_ne!(src, Ipv4Addr::UNSPECIFIED);
                (state.flow.src_port, gate.rule_number(state.rule), gate.flow_name(state.name).to_owned())
            };
            let mut found: Vec<_> = gate.states().list(NOW).map(of).collect();
            found.sort();
            owners.sort();
            assert_eq!(found, owners, "seed {seed}:\n{text}");
            assert_eq!(diff.states_dropped, before - states.len(), "{text}");
            removed += diff.states_dropped;
            handed += diff.states_handed;
            stayed += states.len() - diff.states_handed;
        }
    }
    // Each case was exercised.
    assert!(removed > 500 && handed > 500 && stayed > 500, "{removed} {handed} {stayed}");
}
