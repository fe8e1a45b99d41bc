//! One harness for the table of states: operations, run against the table and against the model.
//!
//! The same harness serves the property test, long random runs (`examples/state_ops.rs`) and the fuzzer
//! (`fuzz/fuzz_targets/state_operations.rs`): operations come from bytes, and the space of keys is so small that flows meet.
//! Two handles take turns, as the workers of an engine do; the one that waits is away, as otherwise it would hold up room, of
//! which the model knows nothing (`tests/state_room.rs` is about that).

use std::time::Duration;

use super::model::Model;
use super::{
    Counters, Ends, Flow, Install, Kind, Limit, LimitMask, Listed, Lookup, Name, Quoted, RuleId, Segment,
    Settings, States, Tracking,
};
use crate::Time;

/// Bytes that make one operation.
pub const OP_BYTES: usize = 12;

/// Something that is done to states.
#[derive(Clone, Debug)]
pub enum Op {
    /// A packet is looked up.
    Lookup(Flow, Lookup, Segment),
    /// An ICMP error quotes a packet.
    Related(Quoted, Lookup),
    /// A packet that a rule with a state option matched.
    Install(Flow, Name, Segment, RuleId, Install),
    /// Time passes.
    Advance(Duration),
    /// A rule is deleted.
    Remove(RuleId),
    /// One state is removed.
    RemoveOne(Flow, Name),
    /// A rule is deleted, its states are kept.
    Orphan(RuleId),
    /// A setting is changed.
    Set(&'static str, u64),
    /// Collection with a budget.
    Expire(usize),
    /// Collection of all that is over.
    Settle,
}

/// A table and its model.
pub struct World {
    states: States,
    /// The other handle on the states.
    other: States,
    model: Model,
    settings: Settings,
    now: Time,
    /// All is compared every so many steps.
    every: u64,
    steps: u64,
}

impl Default for World {
    fn default() -> Self {
        Self::new(1)
    }
}

impl World {
    /// A world in which all is compared every so many steps; what each step answers is compared always.
    pub fn new(every: u64) -> Self {
        let settings = Settings { dyn_max: 12, dyn_parent_max: 3, ..Settings::default() };
        let states = States::new(settings.clone(), 0);
        Self {
            other: states.worker().expect("the second one"),
            states,
            model: Model::new(settings.clone()),
            settings,
            now: Time::from_secs(1_700_000_000),
            every: every.max(1),
            steps: 0,
        }
    }

    /// Does `op` to both.
    ///
    /// # Panics
    /// When the table and the model disagree.
    pub fn step(&mut self, op: &Op) {
        self.take_turns();
        let Self { states, model, settings, now, steps, .. } = self;
        match op {
            Op::Lookup(flow, lookup, segment) => {
                // An answer, a packet of nobody's, and the same again: a burst, or one by one.
                let flows = [Some(*flow), None, Some(flow.reversed()), Some(*flow)];
                let flows = if steps.is_multiple_of(3) { &flows[..1] } else { &flows[..] };
                let wants = flows.iter().map(|flow| model.lookup(&(*flow)?, *lookup, segment, *now));
                let wants: Vec<_> = wants.collect();
                let mut hits = vec![None; flows.len()];
                let asked = states.peek(flow, *lookup, *now);
                if steps.is_multiple_of(2) {
                    for (hit, flow) in hits.iter_mut().zip(flows) {
                        *hit = flow.and_then(|flow| states.lookup(&flow, *lookup, segment, *now));
                    }
                } else {
                    let packets = flows.iter().map(|flow| flow.map(|flow| (flow, *segment)));
                    states.lookup_burst(packets, *lookup, *now, &mut hits);
                }
                assert_eq!(hits, wants, "lookup");
                // What does not fit into its connection is there for who only asks.
                assert!(asked == wants[0] || wants[0].is_none(), "peek");
            }
            Op::Related(quoted, lookup) => {
                let want = model.lookup_related(quoted, *lookup, *now);
                assert_eq!(states.lookup_related(quoted, *lookup, *now), want, "related");
            }
            Op::Install(flow, name, segment, rule, install) => {
                let is = states.install(flow, *name, segment, *rule, install, *now);
                let is_state = |listed: &Listed| !matches!(listed.kind, Kind::Parent { .. });
                let states = states.list(*now).filter(is_state);
                let kept: Vec<_> = states.map(|listed| (listed.flow, listed.name)).collect();
                let want = model.install((flow, *name), segment, *rule, install, *now, &kept);
                assert_eq!(is, want, "install");
            }
            Op::Advance(time) => *now = *now + *time,
            Op::Remove(rule) => {
                let want = model.remove_where(|r| r == *rule, *now);
                // The table counts expired states that it had not collected yet too.
                assert!(states.remove_where(|r| r == *rule) >= want, "remove");
            }
            Op::RemoveOne(flow, name) => {
                let want = model.remove(flow, *name, *now);
                assert_eq!(states.remove(flow, *name, *now), want, "remove one");
            }
            Op::Orphan(rule) => {
                model.orphan_where(|r| r == *rule, *now);
                states.orphan_where(|r| r == *rule);
            }
            Op::Set(name, value) => {
                settings.set(name, *value).expect("the operations know the settings");
                model.set_settings(settings.clone());
                states.set_settings(settings.clone());
            }
            Op::Expire(budget) => states.expire(*now, *budget),
            Op::Settle => states.expire_all(*now),
        }
        self.steps += 1;
        if !self.steps.is_multiple_of(self.every) {
            return;
        }
        self.compare();
        if matches!(op, Op::Settle) {
            self.compare_settled();
        }
    }

    /// Now and then the other handle goes on, and now and then it is a new one.
    fn take_turns(&mut self) {
        // A multiplicative hash (Knuth): no pattern of operations goes with it.
        let turn = self.steps.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        if turn < 40 {
            self.states.idle();
            std::mem::swap(&mut self.states, &mut self.other);
        }
        if turn == 1 {
            self.other = self.states.worker().expect("there are two");
        }
    }

    /// What happened to the table so far.
    pub fn counters(&self) -> Counters {
        self.states.counters()
    }

    fn compare(&mut self) {
        let Self { states, model, now, .. } = self;
        model.expire(*now);
        let (is, should) = (states.counters(), model.counters());
        assert_eq!(is.created, should.created, "created");
        assert_eq!(
            (is.full, is.over_limit, is.over_rate, is.parents_full, is.over_source, is.invalid),
            (
                should.full,
                should.over_limit,
                should.over_rate,
                should.parents_full,
                should.over_source,
                should.invalid
            ),
            "refused"
        );
        assert_eq!((is.evicted, is.related), (should.evicted, should.related), "evicted, related");
        assert!(is.peak >= should.peak, "peak");
        assert!(states.len() >= model.len(), "held");
        let gone = is.expired + is.removed + is.evicted;
        assert_eq!(is.created, gone + states.len() as u64, "no state is lost");

        let (_, live) = sorted(model.list(*now));
        assert_eq!(sorted(states.list(*now).collect()).1, live, "live states");
    }

    /// What is left when all is collected.
    fn compare_settled(&mut self) {
        let Self { states, model, now, .. } = self;
        let (parents, live) = sorted(model.list(*now));
        assert_eq!(states.len(), live.len(), "states left");
        assert_eq!(states.parents(), parents.len(), "parents left");
        let unreplied = model.unreplied();
        assert_eq!(states.gauge().unreplied, unreplied, "unreplied states left");
        assert_eq!(sorted(states.list(*now).collect()), (parents, live), "settled");
        let in_rules: usize = (0..=RULES).map(|rule| states.count_of(RuleId(rule.into()))).sum();
        assert_eq!(in_rules, states.len(), "states by rule");
    }
}

/// Parents and states apart, in an order of their own.
fn sorted(mut list: Vec<Listed>) -> (Vec<Listed>, Vec<Listed>) {
    list.sort_by_key(|listed| format!("{:?} {:?} {:?}", listed.flow, listed.name, listed.rule));
    list.into_iter().partition(|listed| matches!(listed.kind, Kind::Parent { .. }))
}

const RULES: u8 = 3;

/// Settings that the operations change, and to what.
const SETTINGS: [(&str, [u64; 3]); 16] = [
    ("dyn_max", [12, 3, 40]),
    ("dyn_parent_max", [3, 0, 10]),
    ("dyn_ack_lifetime", [300, 2, 1000]),
    ("dyn_syn_lifetime", [20, 0, 3]),
    ("dyn_fin_lifetime", [1, 0, 9]),
    ("dyn_rst_lifetime", [1, 0, 9]),
    ("dyn_udp_lifetime", [10, 0, 700]),
    ("dyn_short_lifetime", [5, 0, 60]),
    ("dyn_keepalive", [1, 0, 1]),
    ("dyn_keep_states", [0, 1, 0]),
    ("dyn_icmp_id", [0, 1, 0]),
    ("dyn_evict", [1, 0, 1]),
    ("dyn_evict", [1, 0, 1]),
    ("dyn_source_max", [2, 0, 4]),
    ("dyn_sctp", [1, 0, 1]),
    ("dyn_max", [12, 3, 40]),
];

impl Op {
    /// The operation that some bytes make; any bytes make one.
    pub fn new(bytes: &[u8; OP_BYTES]) -> Self {
        let [what, a, b, c, d, e, f, g, h, i, j, k] = *bytes;
        let rule = RuleId((a % RULES).into());
        match what % 16 {
            0..=4 => {
                let lookup = if b % 4 == 0 { Lookup::Any } else { Lookup::Named(name(b)) };
                match a % 4 {
                    0 => Self::Related(
                        Quoted { flow: flow(c, d, e), tcp_seq: (f % 2 == 0).then_some(g.into()) },
                        lookup,
                    ),
                    _ => Self::Lookup(flow(c, d, e), lookup, segment(f, g, j)),
                }
            }
            5..=10 => Self::Install(flow(c, d, e), name(b), segment(f, g, j), rule, install(h, i, k)),
            11 | 12 => Self::Advance(Duration::from_nanos(match a % 8 {
                0 => 1,
                1 => 999_999_999,
                2 => u64::from(b) * 20_000_000,
                3 => 1_000_000_000,
                4 => 5_000_000_000,
                5 => 10_000_000_000,
                6 => 300_000_000_000,
                _ => u64::from(b) * 7_777_777_777,
            })),
            13 => match b % 4 {
                0 => Self::Remove(rule),
                1 => Self::Orphan(rule),
                2 => Self::RemoveOne(flow(c, d, e), name(f)),
                _ => Self::Expire((b / 4).into()),
            },
            14 if a % 2 == 0 => Self::Settle,
            14 => Self::Expire(a.into()),
            _ => {
                let (name, values) = SETTINGS[usize::from(a) % SETTINGS.len()];
                Self::Set(name, values[usize::from(b % 3)])
            }
        }
    }
}

fn name(byte: u8) -> Name {
    Name(u16::from(1 + byte % 3).try_into().expect("not zero"))
}

fn flow(kind: u8, addresses: u8, ports: u8) -> Flow {
    let (src, dst) = (addresses % 2, addresses / 2 % 2);
    let ends = match kind / 8 % 4 {
        0..=2 => Ends::V4([10, 0, 0, src].into(), [10, 0, 0, dst].into()),
        _ => {
            let address = |last| [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last].into();
            Ends::V6(address(src), address(dst), (addresses / 4 % 8 / 7).into())
        }
    };
    let proto = [6, 6, 6, 132, 17, 132, 136, 1][usize::from(kind % 8)];
    let (src_port, dst_port) = ((ports % 2).into(), (ports / 2 % 2).into());
    Flow { ends, proto, src_port, dst_port, tenant: u16::from(kind > 250) }
}

fn segment(flags: u8, ack: u8, seq: u8) -> Segment {
    // Mostly what a connection is made of.
    let tcp_flags = [0x02, 0x12, 0x10, 0x10, 0x10, 0x11, 0x04, flags][usize::from(flags % 8)];
    let tcp_ack = [0, 1, 2, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, u32::MAX, 1000][usize::from(ack % 8)];
    // In the order in which they open and close an association.
    let sctp_chunk = [1, 2, 10, 11, 0, 7, 14, 6].get(usize::from(flags / 8 % 9)).copied();
    Segment {
        tcp_flags,
        tcp_ack,
        // Initial sequence numbers are 0, and not much is sent.
        tcp_seq: (seq % 4).into(),
        tcp_len: (seq / 4 % 2).into(),
        tcp_window: (seq / 8).into(),
        tcp_wscale: (flags > 128).then_some(1),
        sctp_chunk,
        bytes: ack.into(),
    }
}

fn install(kind: u8, max: u8, tracking: u8) -> Install {
    let limit = (kind % 2 == 1).then(|| {
        // By whole addresses mostly, by the prefix that the two have in common, by none.
        let (v4, v6) = [(32, 128), (32, 128), (31, 127), (0, 0)][usize::from(tracking / 4 % 4)];
        let (src, dst) = (LimitMask::src_net(v4, v6), LimitMask::dst_net(v4, v6));
        let masks = [src, dst, LimitMask::SRC_PORT, LimitMask::DST_PORT];
        let chosen = masks.into_iter().enumerate().filter(|(bit, _)| kind >> (bit + 1) & 1 == 1);
        let mask = chosen.fold(LimitMask::default(), |mask, (_, field)| mask | field);
        let per_second = (max / 4).is_multiple_of(4);
        let shared = (max / 16).is_multiple_of(4).then(|| name(max / 64));
        Limit { per_second, shared, ..Limit::new(mask, (max % 4).into()) }
    });
    let lifetime = [None, None, Some(2), Some(700)][usize::from(kind >> 5 & 3)];
    let tracking =
        [Tracking::Ipfw, Tracking::Ipfw, Tracking::Strict, Tracking::Loose][usize::from(tracking % 4)];
    Install { limit, lifetime, tracking }
}
