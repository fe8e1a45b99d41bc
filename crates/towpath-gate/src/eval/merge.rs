//! Merging states of another gate: each record goes to the rule that would create its state here.
//!
//! What: a record names its rule by a hash of the content, so that files with other numbers agree. If both gates have the same rules in
//! the same order and under the same conditions ([`Gate::fingerprint`]), the rule of that content made the state, and makes it here.
//! Otherwise the first packet of the state walks the rules ([`Gate::creating_rule`]). A state that no rule would create is refused.
//!
//! The windows and acknowledgement numbers of TCP are those of the last packet that the other gate has seen, which are older than the
//! next packet here. They would refuse current segments, so a state is inserted without them. The windows of a `strict` rule are unknown
//! until segments are seen here; only their scales are taken over.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use crc::{CRC_64_XZ, Crc};
use towpath_wire::{Time, proto};

use super::creating_rule::FirstPacket;
use super::gate::{DEFAULT_DYNAMIC_RULE, Gate};
use super::snapshot::{reference_of, saved};
use crate::state::record::Record;
use crate::state::{Limit, Name, Refused, RuleId, Tracking};

const CRC: Crc<u64> = Crc::<u64>::new(&CRC_64_XZ);

/// A SYN was seen in the forward direction ([`Record::seen`]).
const SYN_SEEN: u16 = 0x02;

/// The connection was treated as established without its SYN ([`Record::seen`]).
const PICKED_UP: u16 = 0x100;

/// The rules of a gate by the hash of their content, each with its number.
#[derive(Clone, Debug, Default)]
pub struct RulesByContent {
    rules: HashMap<u64, Vec<(u32, RuleId)>>,
    fingerprint: u64,
}

impl RulesByContent {
    /// Checksum of the content and order of the rules, and of the conditions that decide besides them: disabled sets, entries of tables,
    /// zones and addresses of ports. Two gates with the same fingerprint create the same states.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn find(&self, record: &Record<'_>) -> Option<RuleId> {
        let found = self.rules.get(&record.rule.hash)?;
        let same = found.iter().find(|(number, _)| *number == record.rule.number);
        same.or(found.first()).map(|(_, id)| *id)
    }
}

/// A state that was merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Its number here: no other state has it until this one has ended.
    pub id: u32,
    /// It was inserted. Otherwise a live state took over what the record has beyond it.
    pub created: bool,
    /// The packets that it had counted before the merge, in both directions.
    pub before: [u64; 2],
    /// It was inserted with strict tracking: its TCP windows are unknown until segments are seen.
    pub without_window: bool,
}

/// Why a record was not merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotMerged {
    /// No rule would create the state.
    Rules,
    /// No number is free for its flow name.
    Names,
    /// The table or a limit has no room.
    Refused(Refused),
}

impl fmt::Display for NotMerged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rules => f.write_str("no rule would create the state"),
            Self::Names => f.write_str("no number is free for its flow name"),
            Self::Refused(refused) => write!(f, "{refused}"),
        }
    }
}

impl std::error::Error for NotMerged {}

/// The rule that creates a state of a record here.
struct Creator {
    rule: RuleId,
    name: Name,
    limit: Option<Limit>,
    /// Its own lifetime, and whether every packet sets it.
    lifetime: (Option<u32>, bool),
    strict: bool,
}

impl Gate {
    /// The current rules by content. Takes time in proportion to the rules and the entries of tables.
    pub fn rules_by_content(&self) -> RulesByContent {
        let mut rules: HashMap<u64, Vec<_>> = HashMap::new();
        let mut digest = CRC.digest();
        for (id, rule) in self.rules.iter().filter(|(id, _)| *id != DEFAULT_DYNAMIC_RULE) {
            let reference = reference_of(rule);
            digest.update(&reference.hash.to_le_bytes());
            rules.entry(reference.hash).or_default().push((reference.number, *id));
        }
        digest.update(&self.conditions().to_le_bytes());
        RulesByContent { rules, fingerprint: digest.finalize() }
    }

    /// Merges a record of another gate. `trusted`: that gate has the same [fingerprint](RulesByContent::fingerprint), and no re-check of
    /// its states is due. `rules` are the current ones.
    ///
    /// # Errors
    /// The reason why the state does not exist here.
    pub fn merge(
        &mut self,
        rules: &RulesByContent,
        record: &Record<'_>,
        trusted: bool,
        now: Time,
    ) -> Result<Merged, NotMerged> {
        let own = rules.find(record);
        let creator = match own.filter(|_| trusted) {
            Some(rule) => self.known_creator(rule, record)?,
            None => self.creator(own, record)?,
        };
        let mut saved = saved(record, self.ports());
        saved.listed.tcp_ack = [0; 2];
        (saved.lifetime, saved.every_packet) = creator.lifetime;
        let Creator { rule, name, limit, strict, .. } = creator;
        let strict = strict && record.flow.proto == proto::TCP;
        let merged = self.maintain(|gate| gate.states_mut().merge(&saved, rule, name, limit, strict, now));
        let merged = merged.map_err(NotMerged::Refused)?;
        let (id, created, before) = (merged.id, merged.created, merged.before);
        Ok(Merged { id, created, before, without_window: strict && created })
    }

    /// Removes the state of a record because another gate has removed it, unless it expires later than in `within`. Returns its number.
    pub fn remove_merged(&mut self, record: &Record<'_>, within: Option<Duration>, now: Time) -> Option<u32> {
        let name = self.flow_names.get(record.name)?;
        self.maintain(|gate| gate.states_mut().remove_merged(&record.flow, name, within, now))
    }

    fn known_creator(&mut self, rule: RuleId, record: &Record<'_>) -> Result<Creator, NotMerged> {
        let name = self.flow_names.get(record.name).or_else(|| self.flow_names.intern(record.name));
        Ok(Creator {
            rule,
            name: name.ok_or(NotMerged::Names)?,
            limit: self.install_of(rule).and_then(|install| install.limit),
            lifetime: (record.lifetime, record.every_packet),
            strict: self.install_of(rule).is_some_and(|install| install.tracking == Tracking::Strict),
        })
    }

    /// The rule that the first packet of the state finds here.
    fn creator(&self, own: Option<RuleId>, record: &Record<'_>) -> Result<Creator, NotMerged> {
        let first = FirstPacket {
            flow: record.flow,
            name: self.flow_names.get(record.name).unwrap_or(Name::DEFAULT),
            origin: saved(record, self.ports()).listed.origin,
            syn: record.seen & SYN_SEEN != 0 && record.seen & PICKED_UP == 0,
            rule: own.and_then(|id| Some((id, self.rule_of(id)?))),
        };
        let creation = self.creation(&first).ok_or(NotMerged::Rules)?;
        let creating = &self.generation().program.rules[creation.at];
        let install = creating.install.as_ref().ok_or(NotMerged::Rules)?;
        let with_timeout = crate::state::Install { timeout: creation.timeout, ..install.install };
        let lifetime = match own == Some(creating.id) {
            true => (record.lifetime, record.every_packet),
            false => with_timeout.own_lifetime(),
        };
        let strict = install.install.tracking == Tracking::Strict;
        Ok(Creator { rule: creating.id, name: install.name, limit: install.install.limit, lifetime, strict })
    }
}

#[cfg(test)]
mod tests {
    use towpath_wire::{self as wire};

    use super::*;
    use crate::rules::Ruleset;
    use crate::state::{Cursor, Settings};
    use crate::{Dir, PacketSpec, Ports, RuleRefs, Walk, Walker};

    const NOW: Time = Time::from_secs(100);

    fn gate(rules: &str) -> (Gate, Walker) {
        let mut gate =
            Gate::new(Ruleset::parse("t", rules).ruleset.unwrap(), Ports::new(), Settings::default(), 1);
        let walker = gate.walker().unwrap();
        (gate, walker)
    }

    fn walk(walker: &mut Walker, text: &str) {
        let spec = PacketSpec::parse(text).unwrap();
        let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        walker.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW);
        walker.idle();
    }

    fn later(walker: &mut Walker, text: &str) {
        let spec = PacketSpec::parse(text).unwrap();
        let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        walker.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW + Duration::from_secs(2));
        walker.idle();
    }

    fn records(gate: &Gate) -> Vec<u8> {
        let (mut refs, mut bytes, mut next) = (RuleRefs::default(), Vec::new(), Some(Cursor::default()));
        gate.update_refs(&mut refs);
        while let Some(at) = next {
            next = gate.snapshot_part(&refs, at, 4096, NOW, &mut bytes);
        }
        bytes
    }

    /// Merges the states of one gate into another.
    fn merge(from: &Gate, to: &mut Gate, trusted: bool) -> Vec<Result<(bool, bool), NotMerged>> {
        let (bytes, rules) = (records(from), to.rules_by_content());
        let (mut rest, mut results) = (&bytes[..], Vec::new());
        while let Ok((record, length)) = Record::decode(rest) {
            let merged = to.merge(&rules, &record, trusted, NOW);
            results.push(merged.map(|merged| (merged.created, merged.without_window)));
            rest = &rest[length..];
        }
        results
    }

    fn owners(gate: &Gate) -> Vec<(u32, [u64; 2])> {
        let rows = gate.states().dump(Cursor::default(), NOW).map(|(state, _)| state);
        let states = rows.filter(|state| !matches!(state.kind, crate::state::Kind::Parent { .. }));
        states.map(|state| (gate.listed_rule(&state), state.packets)).collect()
    }

    #[test]
    fn a_state_goes_to_the_rule_of_the_same_content() {
        let (from, mut walker) = gate("add 100 allow udp from any to any keep-state");
        walk(&mut walker, "udp 10.0.0.1:1 > 10.0.0.2:53");
        for trusted in [true, false] {
            let (mut to, _) =
                gate("add 1 count tcp from any to any\nadd 7 allow udp from any to any keep-state");
            assert_eq!(merge(&from, &mut to, trusted), [Ok((true, false))]);
            assert_eq!(merge(&from, &mut to, trusted), [Ok((false, false))]);
            assert_eq!(owners(&to), [(7, [1, 0])]);
        }
    }

    #[test]
    fn a_state_that_no_rule_would_create_is_refused() {
        let (from, mut walker) = gate("add 100 allow udp from any to any keep-state");
        walk(&mut walker, "udp 10.0.0.1:1 > 10.0.0.2:53");
        // The rule of the same content is not reached.
        let rules = "add 7 deny udp from 10.0.0.1 to any\nadd 100 allow udp from any to any keep-state";
        let (mut to, _) = gate(rules);
        assert_eq!(merge(&from, &mut to, false), [Err(NotMerged::Rules)]);
        assert!(owners(&to).is_empty());
        let (mut to, _) = gate("add 9 allow udp from any to any 53 keep-state :dns lifetime 77");
        assert_eq!(merge(&from, &mut to, false), [Ok((true, false))]);
        assert_eq!(owners(&to), [(9, [1, 0])]);
    }

    #[test]
    fn equal_rules_have_the_same_fingerprint_under_other_numbers() {
        let fingerprint = |rules| gate(rules).0.rules_by_content().fingerprint();
        let one =
            fingerprint("add 100 count udp from any to any\nadd 200 allow ip from any to any keep-state");
        assert_eq!(
            one,
            fingerprint("add 1 count udp from any to any\nadd 2 allow ip from any to any keep-state")
        );
        assert_ne!(
            one,
            fingerprint("add 1 allow ip from any to any keep-state\nadd 2 count udp from any to any")
        );
        assert_ne!(one, fingerprint("add 100 count udp from any to any"));
    }

    #[test]
    fn the_limit_counts_states_of_another_gate() {
        let rules = "add 100 allow udp from any to any keep-state limit src-addr 2";
        let rules = &rules.replace("keep-state ", "");
        let (from, mut walker) = gate(rules);
        walk(&mut walker, "udp 10.0.0.1:1 > 10.0.0.2:53");
        walk(&mut walker, "udp 10.0.0.1:2 > 10.0.0.2:53");
        let (mut to, mut walker) = gate(rules);
        assert_eq!(merge(&from, &mut to, true).len(), 2);
        walk(&mut walker, "udp 10.0.0.1:3 > 10.0.0.2:53");
        assert_eq!(owners(&to).len(), 2, "the third is over the limit");
    }

    #[test]
    fn the_first_segments_after_a_merge_teach_the_windows() {
        let rules = "add 100 allow tcp from any to any setup keep-state strict";
        let (from, mut walker) = gate(rules);
        walk(&mut walker, "tcp 10.0.0.1:1 > 10.0.0.2:80 syn");
        for trusted in [true, false] {
            let (mut to, mut walker) = gate(rules);
            assert_eq!(merge(&from, &mut to, trusted), [Ok((true, true))]);
            let packets = |to: &Gate| owners(to)[0].1;
            walk(&mut walker, "tcp 10.0.0.2:80 > 10.0.0.1:1 ack seq 7000 ackno 5000 win 1000");
            walk(&mut walker, "tcp 10.0.0.1:1 > 10.0.0.2:80 ack seq 5000 ackno 7000 win 1000");
            assert_eq!(packets(&to), [2, 1]);
            // Beyond all windows.
            walk(&mut walker, "tcp 10.0.0.1:1 > 10.0.0.2:80 ack seq 2000005000 ackno 7000 win 1000");
            assert_eq!(packets(&to), [2, 1]);
        }
    }

    #[test]
    fn a_strict_connection_that_returns_is_learned_again() {
        let rules = "add 100 allow tcp from any to any setup keep-state strict";
        let ((mut one, mut first), (mut two, mut second)) = (gate(rules), gate(rules));
        let there = |walker: &mut Walker, seq: u32, ack: u32| {
            walk(walker, &format!("tcp 10.0.0.1:1 > 10.0.0.2:80 ack seq {seq} ackno {ack} win 1000"));
        };
        let back = |walker: &mut Walker, seq: u32, ack: u32| {
            walk(walker, &format!("tcp 10.0.0.2:80 > 10.0.0.1:1 ack seq {seq} ackno {ack} win 1000"));
        };
        walk(&mut first, "tcp 10.0.0.1:1 > 10.0.0.2:80 syn seq 10 win 1000");
        walk(&mut first, "tcp 10.0.0.2:80 > 10.0.0.1:1 syn ack seq 20 ackno 11 win 1000");
        there(&mut first, 11, 21);
        assert_eq!(merge(&one, &mut two, true), [Ok((true, true))]);
        // Nothing later was seen there: the windows stay.
        assert_eq!(merge(&two, &mut one, true), [Ok((false, false))]);
        there(&mut first, 500_000, 21);
        assert_eq!(owners(&one), [(100, [2, 1])]);
        // Many bytes pass the other gate, which has seen later packets.
        let tracked = |gate: &Gate| Record::decode(&records(gate)).unwrap().0.is_tracked();
        assert!(!tracked(&two));
        later(&mut second, "tcp 10.0.0.1:1 > 10.0.0.2:80 ack seq 500000 ackno 21 win 1000");
        later(&mut second, "tcp 10.0.0.2:80 > 10.0.0.1:1 ack seq 21 ackno 500001 win 1000");
        assert!(tracked(&two));
        assert_eq!(merge(&two, &mut one, true), [Ok((false, false))]);
        assert!(!tracked(&one));
        there(&mut first, 500_001, 21);
        back(&mut first, 21, 500_001);
        assert!(tracked(&one));
        // 3 and 2 of both gates, and one of each side.
        assert_eq!(owners(&one), [(100, [4, 3])]);
    }

    #[test]
    fn a_state_that_another_gate_has_removed_is_removed() {
        let rules = "add 100 allow udp from any to any keep-state :dns";
        let ((mut gate, mut walker), packet) = (gate(rules), "udp 10.0.0.1:1 > 10.0.0.2:53");
        walk(&mut walker, packet);
        let bytes = records(&gate);
        let record = Record::decode(&bytes).unwrap().0;
        // It lives longer here: the other gate has removed an older one.
        assert_eq!(gate.remove_merged(&record, Some(Duration::from_secs(1)), NOW), None);
        let other = Record { name: "other", ..record.clone() };
        assert_eq!(gate.remove_merged(&other, None, NOW), None);
        let reversed = Record { flow: record.flow.reversed(), ..record.clone() };
        assert_eq!(gate.remove_merged(&reversed, Some(record.remaining), NOW), Some(record.id));
        assert_eq!(gate.remove_merged(&record, None, NOW), None);
        assert!(owners(&gate).is_empty());
    }

    #[test]
    fn directions_are_those_of_the_state_here() {
        let rules = "add 100 allow udp from any to any keep-state";
        let ((mut one, mut first), (mut two, mut second)) = (gate(rules), gate(rules));
        walk(&mut first, "udp 10.0.0.1:1 > 10.0.0.2:53");
        (0..3).for_each(|_| walk(&mut second, "udp 10.0.0.2:53 > 10.0.0.1:1"));
        assert_eq!(merge(&one, &mut two, true), [Ok((false, false))]);
        assert_eq!(merge(&two, &mut one, true), [Ok((false, false))]);
        assert_eq!((owners(&one), owners(&two)), (vec![(100, [1, 3])], vec![(100, [3, 1])]));
    }
}
