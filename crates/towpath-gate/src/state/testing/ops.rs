//! The test harness of the states: operations that run against the table and the model.
//!
//! The property test, the long random runs (`examples/state_ops.rs`) and the fuzzer
//! (`fuzz/fuzz_targets/state_operations.rs`) use it. Operations are decoded from bytes, and the space of keys is so
//! small that flows meet. Two handles take turns like the workers of an engine. The one that waits is idle: otherwise
//! slots would wait for it, which the model does not know about (`tests/gate/state_room.rs` tests that).

use std::time::Duration;

use crate::state::testing::model::Model;
use crate::state::{
    Counters, Cursor, Ends, Flow, Foreseen, Install, Installed, Kind, Limit, LimitMask, Listed, Lookup, Name,
    Quoted, RuleId, Segment, Settings, States, Tracking,
};
use towpath_wire::Time;

/// Bytes of one operation.
pub const OP_BYTES: usize = 12;

/// An operation.
#[derive(Clone, Debug)]
pub enum Op {
    /// Looks a packet up.
    Lookup(Flow, Lookup, Segment),
    /// Looks an ICMP error up.
    Related(Quoted, Lookup),
    /// Looks a later fragment of a datagram up, right after the first one of the same or another datagram.
    Fragment(Flow, [u32; 2], Lookup, u32),
    /// Installs a state.
    Install(Flow, Name, Segment, RuleId, Install),
    /// Advances the time.
    Advance(Duration),
    /// Deletes a rule with its states.
    Remove(RuleId),
    /// Removes one state.
    RemoveOne(Flow, Name),
    /// Deletes a rule and keeps its states.
    Orphan(RuleId),
    /// Changes a setting.
    Set(&'static str, u64),
    /// Collects with a budget.
    Expire(usize),
    /// Collects everything that has expired.
    Settle,
    /// Prepares memory for more states, or gives memory back, in up to this many calls.
    Prepare(u8),
    /// Saves the states and restores them in a new table.
    Restart,
}

/// Counts of events that no counter of the table has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorldCounts {
    /// Later fragments that found their state.
    pub fragments: u64,
    /// States restored by a new table.
    pub restored: u64,
    /// States not restored, because there was no room or a state of the same flow.
    pub left: u64,
}

/// A table and its model.
pub struct World {
    states: States,
    /// The other handle on the states.
    other: States,
    model: Model,
    settings: Settings,
    now: Time,
    /// Steps between two full comparisons.
    every: u64,
    steps: u64,
    /// The table has so many slots that a reclaim does not sweep all of them.
    grown: bool,
    seen: WorldCounts,
    /// The counters of tables before a restart.
    past: Vec<Counters>,
}

impl Default for World {
    fn default() -> Self {
        Self::new(1)
    }
}

impl World {
    /// A world that compares everything after every `every` steps. The result of each step is compared always.
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
            grown: false,
            seen: WorldCounts::default(),
            past: Vec::new(),
        }
    }

    /// Installs `count` states of a family with a lifetime of two seconds, regardless of `dyn_max`: more than the
    /// first chunk of slots has. The next operations run while the index migrates, and later ones in a table with
    /// many slots.
    ///
    /// # Panics
    /// When the table and the model disagree.
    pub fn grow(&mut self, count: u16, v6: bool) {
        let room = self.states.len() as u32 + u32::from(count);
        let wide = Settings { dyn_max: room, dyn_source_max: 0, dyn_evict: false, ..self.settings.clone() };
        let Self { states, model, now, .. } = self;
        model.set_settings(wide.clone());
        states.set_settings(wide);
        let install = Install { lifetime: Some(2), ..Install::default() };
        for n in 0..count {
            let flow = Flow { ends: ends(1, n, v6), proto: 17, src_port: n, dst_port: 53, zone: 0 };
            let segment = Segment { bytes: n.into(), ..Segment::default() };
            let is = states.install(&flow, Name::DEFAULT, &segment, RuleId(0), &install, *now);
            let want = model.install((&flow, Name::DEFAULT), &segment, RuleId(0), &install, *now, &[]);
            assert_eq!(is, want, "install");
            // One of those before, in whichever index it is.
            let of = n.wrapping_mul(40_503) % (n + 1);
            let flow = Flow { ends: ends(1, of, v6), proto: 17, src_port: of, dst_port: 53, zone: 0 };
            let (is, want) = (
                states.peek(&flow.reversed(), Lookup::Any, *now),
                states.lookup(&flow.reversed(), Lookup::Any, &segment, *now),
            );
            assert_eq!(is, want, "peek");
            assert_eq!(is, model.lookup(&flow.reversed(), Lookup::Any, &segment, *now), "lookup");
        }
        // No eviction: the model does not say which of so many states goes.
        (self.grown, self.settings.dyn_evict) = (true, false);
        model.set_settings(self.settings.clone());
        states.set_settings(self.settings.clone());
        self.compare();
    }

    /// Applies `op` to both.
    ///
    /// # Panics
    /// When the table and the model disagree.
    pub fn step(&mut self, op: &Op) {
        self.take_turns();
        // A table that has grown stays for a while.
        if matches!(op, Op::Restart) && (!self.grown || self.steps.is_multiple_of(32)) {
            self.restart();
        }
        let Self { states, model, settings, now, steps, grown, seen, .. } = self;
        match op {
            Op::Lookup(flow, lookup, segment) => {
                // The flow, a packet without a flow, the reply, and the flow again: as a burst or one by one.
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
                // A peek finds the state of a packet that does not fit into its connection.
                assert!(asked == wants[0] || wants[0].is_none(), "peek");
            }
            Op::Related(quoted, lookup) => {
                let want = model.lookup_related(quoted, *lookup, *now);
                assert_eq!(states.lookup_related(quoted, *lookup, *now), want, "related");
            }
            Op::Fragment(flow, [first, id], lookup, bytes) => {
                model.note_fragment(flow, *first, *now);
                states.note_fragment(flow, *first, *now);
                let later = Flow { src_port: 0, dst_port: 0, ..*flow };
                let want = model.lookup_fragment(&later, *id, *lookup, *bytes, *now);
                assert_eq!(states.lookup_fragment(&later, *id, *lookup, *bytes, *now), want, "fragment");
                seen.fragments += u64::from(want.is_some());
            }
            Op::Install(flow, name, segment, rule, install) => {
                if *grown {
                    // An install sweeps some slots only.
                    states.expire_all(*now);
                }
                // The handle notices what the other one has changed.
                let _ = states.peek(flow, Lookup::Any, *now);
                let foreseen =
                    states.foresee(&mut Foreseen::default(), (flow, *name), segment, *rule, install, *now);
                let is = states.install(flow, *name, segment, *rule, install, *now);
                assert_eq!(foreseen, is, "foreseen {op:?} {:?} {settings:?}", states.counters());
                let kept = kept(states, settings, *now);
                let want = model.install((flow, *name), segment, *rule, install, *now, &kept);
                assert_eq!(is, want, "install");
            }
            Op::Advance(time) => *now = *now + *time,
            Op::Remove(rule) => {
                let want = model.remove_where(|r| r == *rule, *now);
                // The table also counts expired states that were not collected yet.
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
            Op::Set("dyn_evict", _) if *grown => {}
            Op::Set(name, value) => {
                settings.set(name, *value).expect("the operations know the settings");
                model.set_settings(settings.clone());
                states.set_settings(settings.clone());
            }
            Op::Expire(budget) => states.expire(*now, *budget),
            Op::Settle => states.expire_all(*now),
            Op::Prepare(calls) => _ = (0..*calls).take_while(|_| states.prepare()).count(),
            Op::Restart => {}
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

    /// A new table restores what this one saves, state by state.
    fn restart(&mut self) {
        let Self { states, other, model, settings, now, grown, seen, past, .. } = self;
        let mut saved = Vec::new();
        let mut next = Some(Cursor::default());
        while let Some(at) = next {
            let (part, more) = states.save_part(at, 3, *now);
            saved.extend(part);
            next = more;
        }
        past.push(states.counters());
        *states = States::new(settings.clone(), 0);
        *other = states.worker().expect("the second one");
        *grown = false;
        model.restart(*now);
        for saved in &saved {
            let Listed { flow, name, rule, .. } = saved.listed;
            let limit = model.saved_limit(&flow, name);
            let is = states.restore(saved, rule, name, limit, *now);
            let want = model.restore(&flow, name, *now, &kept(states, settings, *now));
            assert_eq!(is, want, "restore");
            match is {
                Ok(Installed::New) => seen.restored += 1,
                _ => seen.left += 1,
            }
        }
        assert_eq!(model.saved(), 0, "states that were not saved");
        self.compare();
    }

    /// Sometimes switches to the other handle, and sometimes replaces it.
    fn take_turns(&mut self) {
        // A multiplicative hash (Knuth), so that it does not correlate with the operations.
        let turn = self.steps.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        if turn < 40 {
            self.states.idle();
            std::mem::swap(&mut self.states, &mut self.other);
        }
        if turn == 1 {
            self.other = self.states.worker().expect("there are two");
        }
    }

    /// The counters of each table, one after the other.
    pub fn counters(&self) -> impl Iterator<Item = Counters> {
        self.past.iter().copied().chain([self.states.counters()])
    }

    /// Counts of other events.
    pub fn seen(&self) -> WorldCounts {
        self.seen
    }

    fn compare(&mut self) {
        let Self { states, model, now, .. } = self;
        model.expire(*now);
        let (is, should) = (states.counters(), model.counters());
        assert_eq!(is.created, should.created, "created");
        assert_eq!(
            (
                is.full,
                is.over_limit,
                is.over_rate,
                is.parents_full,
                is.over_source,
                is.invalid,
                is.unfit,
                is.first_syn
            ),
            (
                should.full,
                should.over_limit,
                should.over_rate,
                should.parents_full,
                should.over_source,
                should.invalid,
                should.unfit,
                should.first_syn
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

    /// Compares the remaining states after all expired ones were collected.
    fn compare_settled(&mut self) {
        let Self { states, model, now, .. } = self;
        let (parents, live) = sorted(model.list(*now));
        assert_eq!(states.len(), live.len(), "states left");
        assert_eq!(states.parents(), parents.len(), "parents left");
        let unreplied = model.unreplied();
        assert_eq!(states.counters().unreplied, unreplied as u64, "unreplied states left");
        assert_eq!(sorted(states.list(*now).collect()), (parents, live), "settled");
        let in_rules: usize = (0..=RULES).map(|rule| states.count_of(RuleId(rule.into()))).sum();
        assert_eq!(in_rules, states.len(), "states by rule");
    }
}

/// The states that are left after an eviction.
fn kept(states: &States, settings: &Settings, now: Time) -> Vec<(Flow, Name)> {
    if !settings.dyn_evict {
        return Vec::new();
    }
    let states = states.list(now).filter(|listed| !matches!(listed.kind, Kind::Parent { .. }));
    states.map(|listed| (listed.flow, listed.name)).collect()
}

/// Parents and states, separately, in a fixed order.
fn sorted(mut list: Vec<Listed>) -> (Vec<Listed>, Vec<Listed>) {
    list.sort_by_cached_key(|listed| format!("{:?} {:?} {:?}", listed.flow, listed.name, listed.rule));
    list.into_iter().partition(|listed| matches!(listed.kind, Kind::Parent { .. }))
}

const RULES: u8 = 3;

/// The settings that operations change, with their values.
const SETTINGS: [(&str, [u64; 3]); 18] = [
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
    ("dyn_first_syn", [0, 1, 0]),
    ("dyn_max", [12, 3, 40]),
    ("dyn_rst_check", [1, 0, 1]),
];

impl Op {
    /// Decodes an operation. All bytes are valid.
    pub fn new(bytes: &[u8; OP_BYTES]) -> Self {
        let [what, a, b, c, d, e, f, g, h, i, j, k] = *bytes;
        let rule = RuleId((a % RULES).into());
        match what % 16 {
            0..=4 => {
                let lookup = if b % 4 == 0 { Lookup::Any } else { Lookup::Named(name(b)) };
                match a % 8 {
                    4 => Self::Fragment(
                        flow(c, d, e),
                        [f % 2, f / 2 % 2].map(u32::from),
                        lookup,
                        u32::from(g) * 1000,
                    ),
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
            14 if a.is_multiple_of(16) => Self::Restart,
            14 if a % 16 == 2 => Self::Prepare(b),
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

/// The network address and a host of a net that no other operation uses.
fn ends(net: u8, host: u16, v6: bool) -> Ends {
    let [high, low] = host.to_be_bytes();
    match v6 {
        false => Ends::V4([10, net, 0, 0].into(), [10, net, high, low].into()),
        true => {
            let net = 0xfc00 + u16::from(net);
            Ends::V6([net, 0, 0, 0, 0, 0, 0, 0].into(), [net, 0, 0, 0, 0, 0, 0, host].into(), 0)
        }
    }
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
    Flow { ends, proto, src_port, dst_port, zone: u16::from(kind > 250) }
}

fn segment(flags: u8, ack: u8, seq: u8) -> Segment {
    // Mostly segments of a regular connection.
    let reset = if flags & 8 == 0 { 0x04 } else { 0x14 };
    let tcp_flags = [0x02, 0x12, 0x10, 0x10, 0x10, 0x11, reset, flags][usize::from(flags % 8)];
    let tcp_ack = [0, 1, 2, 0x7fff_ffff, 0x8000_0000, 0x8000_0001, u32::MAX, 1000][usize::from(ack % 8)];
    // In the order in which they open and close an association.
    let sctp_chunk = [1, 2, 10, 11, 0, 7, 14, 6].get(usize::from(flags / 8 % 9)).copied();
    Segment {
        tcp_flags,
        tcp_ack,
        // Initial sequence numbers are 0, and little is sent.
        tcp_seq: (seq % 4).into(),
        tcp_len: (seq / 4 % 2).into(),
        tcp_fragment: seq / 8 % 8 == 7,
        tcp_window: (seq / 8).into(),
        tcp_wscale: (flags > 128).then_some(1),
        sctp_chunk,
        bytes: ack.into(),
    }
}

fn install(kind: u8, max: u8, tracking: u8) -> Install {
    let limit = (kind % 2 == 1).then(|| {
        // By whole addresses mostly, by the prefix that both addresses share, or by none.
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
    let timeout = (kind >> 4 & 3 == 3).then_some(3);
    let tracking =
        [Tracking::Ipfw, Tracking::Ipfw, Tracking::Strict, Tracking::Loose][usize::from(tracking % 4)];
    Install { limit, lifetime, timeout, tracking, ..Install::default() }
}
