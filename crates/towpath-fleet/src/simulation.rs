//! Worlds of gates with a model of the bus, which loses, delays, reorders and repeats messages, and splits. The gates are real ones.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use proptest::prelude::*;
use towpath_gate::rules::Ruleset;
use towpath_gate::state::record::Record;
use towpath_gate::state::{Cursor, JournalRead, JournalReader, Name};
use towpath_gate::{
    Dir, Gate, Merged, NotMerged, PacketSpec, Ports, RuleRefs, RulesByContent, Walk, Walker, state,
};
use towpath_wire::{self as wire, Time};

use super::message::{Kind, Message, Sender};
use super::*;

const GATES: usize = 3;
const FLOWS: u8 = 6;
const TICK: Duration = Duration::from_millis(5);
const SCAN: Duration = Duration::from_secs(1);

/// Files with the same rules under other numbers.
const RULES: [&str; GATES] = [
    "add 100 deny udp from any to any 99\nadd 200 allow ip from any to any keep-state lifetime 3000",
    "add 7 deny udp from any to any 99\nadd 9 allow ip from any to any keep-state lifetime 3000",
    "add 5 count udp from any to any 98\nadd 100 deny udp from any to any 99\nadd 200 allow ip from any to any keep-state lifetime 3000",
];

/// A gate with its table.
struct Host {
    gate: Gate,
    walker: Walker,
    journal: JournalReader,
    rules: RulesByContent,
    refs: RuleRefs,
    now: Time,
}

impl Host {
    fn new(at: usize, now: Time) -> Self {
        Self::with(RULES[at], state::Settings::default(), at, now)
    }

    fn with(rules: &str, settings: state::Settings, at: usize, now: Time) -> Self {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset, Ports::new(), settings, at as u64 + 1);
        let walker = gate.walker().unwrap();
        let journal = gate.states().journal();
        let mut refs = RuleRefs::default();
        gate.update_refs(&mut refs);
        let rules = gate.rules_by_content();
        Self { gate, walker, journal, rules, refs, now }
    }

    fn packet(&mut self, text: &str) {
        let spec = PacketSpec::parse(text).unwrap();
        let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
        self.walker.walk(&mut Walk::new(Dir::In, None, None), &packet, self.now);
        self.walker.idle();
    }

    fn remove(&mut self, flow: u8) {
        let (bytes, port) = (self.states(), 1000 + u16::from(flow));
        each(&bytes, |record| {
            if [record.flow.src_port, record.flow.dst_port].contains(&port) {
                self.gate.remove_state(&record.flow, Name::DEFAULT, self.now);
            }
        });
    }

    fn changes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let JournalRead::Change(event) = self.journal.read() {
            self.gate.snapshot_change(&self.refs, &event, &mut bytes);
        }
        bytes
    }

    fn states(&self) -> Vec<u8> {
        let (mut bytes, mut next) = (Vec::new(), Some(Cursor::default()));
        while let Some(at) = next {
            next = self.gate.snapshot_part(&self.refs, at, 4096, self.now, &mut bytes);
        }
        bytes
    }
}

fn each(mut bytes: &[u8], mut each: impl FnMut(&Record<'_>)) {
    while let Ok((record, length)) = Record::decode(bytes) {
        each(&record);
        bytes = &bytes[length..];
    }
}

impl Table for Host {
    fn rules(&mut self) -> (u64, bool) {
        (self.rules.fingerprint(), false)
    }

    fn merge(&mut self, record: &Record<'_>, trusted: bool) -> Result<Merged, NotMerged> {
        self.gate.merge(&self.rules, record, trusted, self.now)
    }

    fn remove(&mut self, record: &Record<'_>, within: Option<Duration>) -> Option<u32> {
        self.gate.remove_merged(record, within, self.now)
    }

    fn scan(&mut self, from: Cursor, slots: u32, take: &mut dyn FnMut(&Record<'_>)) -> Option<Cursor> {
        let mut bytes = Vec::new();
        let next = self.gate.snapshot_part(&self.refs, from, slots, self.now, &mut bytes);
        each(&bytes, take);
        next
    }
}

/// A message on its way.
struct Moving {
    due: Time,
    channel: Channel,
    from: usize,
    to: usize,
    bytes: Vec<u8>,
}

/// What the bus does in this world.
#[derive(Clone, Copy, Debug)]
struct Bus {
    /// Percent of messages that are lost, and that are repeated.
    lost: u32,
    repeated: u32,
    /// Longest delay.
    delay: Duration,
    /// The stream has the batches of this time.
    stream: Duration,
    /// The clock of each gate is ahead of the one before by this much.
    skew: Duration,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A packet of a flow at a gate.
    Packet { gate: usize, flow: u8, reply: bool, tcp: Option<&'static str> },
    /// A state is removed at a gate.
    Remove { gate: usize, flow: u8 },
    /// Time passes.
    Wait(u16),
    /// The bus of a gate fails, or comes back.
    Split(usize),
    /// A gate is killed, and begins again without states.
    Restart(usize),
}

struct World {
    now: Time,
    bus: Bus,
    seed: u64,
    hosts: Vec<Host>,
    replicas: Vec<Replica>,
    away: [bool; GATES],
    moving: Vec<Moving>,
    stream: Vec<(Time, usize, Vec<u8>)>,
    scanned: Time,
    restarts: u64,
    sent: BTreeMap<u8, u64>,
    closed: HashSet<u8>,
}

fn name(gate: usize) -> String {
    format!("g{gate}")
}

fn replica(gate: usize, incarnation: u64) -> Replica {
    Replica::new(Settings {
        gate: name(gate),
        incarnation,
        replicate: Replicate::Replied,
        window: Duration::from_millis(20),
    })
}

impl World {
    fn new(bus: Bus, seed: u64) -> Self {
        let now = Time::from_secs(1_000);
        let mut world = Self {
            now,
            bus,
            seed,
            hosts: (0..GATES).map(|at| Host::new(at, now)).collect(),
            replicas: (0..GATES).map(|at| replica(at, at as u64 + 1)).collect(),
            away: [false; GATES],
            moving: Vec::new(),
            stream: Vec::new(),
            scanned: now,
            restarts: 0,
            sent: BTreeMap::new(),
            closed: HashSet::new(),
        };
        for gate in 0..GATES {
            let now = world.time(gate);
            world.replicas[gate].connect(now);
        }
        world
    }

    /// The clock of a replica.
    fn time(&self, gate: usize) -> Time {
        self.now + self.bus.skew * gate as u32
    }

    fn random(&mut self, below: u64) -> u64 {
        // splitmix64
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % below.max(1)
    }

    fn send(&mut self, channel: Channel, from: usize, to: usize, bytes: &[u8]) {
        if self.away[from] || self.random(100) < self.bus.lost.into() {
            return;
        }
        let copies = 1 + u32::from(self.random(100) < self.bus.repeated.into());
        for _ in 0..copies {
            let delay = Duration::from_nanos(self.random(self.bus.delay.as_nanos() as u64 + 1));
            self.moving.push(Moving { due: self.now + delay, channel, from, to, bytes: bytes.to_vec() });
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Packet { gate, flow, reply, tcp } => {
                let port = if tcp.is_some() { 80 } else { 53 };
                let (client, server) =
                    (format!("10.0.0.1:{}", 1000 + u16::from(flow)), format!("10.0.0.2:{port}"));
                let (src, dst) = if reply { (&server, &client) } else { (&client, &server) };
                let text = match tcp {
                    Some(flags) => format!("tcp {src} > {dst} {flags}"),
                    None => format!("udp {src} > {dst}"),
                };
                if tcp.is_some_and(|flags| flags.contains("fin") || flags.contains("rst")) {
                    self.closed.insert(flow);
                }
                *self.sent.entry(flow).or_default() += 1;
                self.hosts[gate].packet(&text);
                self.turn();
            }
            Step::Remove { gate, flow } => {
                self.closed.insert(flow);
                self.hosts[gate].remove(flow);
                self.turn();
            }
            Step::Wait(millis) => self.pass(Duration::from_millis(millis.into())),
            Step::Split(gate) => {
                self.away[gate] = !self.away[gate];
                let now = self.time(gate);
                match self.away[gate] {
                    true => self.replicas[gate].disconnect(now),
                    false => self.replicas[gate].connect(now),
                }
            }
            Step::Restart(gate) => {
                self.restarts += 1;
                self.hosts[gate] = Host::new(gate, self.now);
                self.replicas[gate] = replica(gate, 100 + self.restarts);
                if !self.away[gate] {
                    let now = self.time(gate);
                    self.replicas[gate].connect(now);
                }
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + TICK;
            self.turn();
        }
    }

    fn turn(&mut self) {
        let scan = self.now.since(self.scanned) >= SCAN;
        if scan {
            self.scanned = self.now;
        }
        let (now, stream) = (self.now, self.bus.stream);
        self.stream.retain(|(at, ..)| now.since(*at) < stream);
        for gate in 0..GATES {
            let time = self.time(gate);
            self.hosts[gate].now = self.now;
            self.hosts[gate].gate.expire(self.now, 1 << 16);
            self.deliver(gate);
            let changes = self.hosts[gate].changes();
            each(&changes, |record| self.replicas[gate].change(record, time));
            if scan {
                let states = self.hosts[gate].states();
                each(&states, |record| self.replicas[gate].scanned(record, time));
            }
            while let Some(output) = self.replicas[gate].poll(&mut self.hosts[gate], time) {
                self.output(gate, output);
            }
            while let Some(output) = self.replicas[gate].poll_chunk(&mut self.hosts[gate], time) {
                self.output(gate, output);
            }
        }
    }

    fn deliver(&mut self, gate: usize) {
        let now = self.now;
        let (due, later) = std::mem::take(&mut self.moving)
            .into_iter()
            .partition(|moving: &Moving| moving.to == gate && moving.due <= now);
        self.moving = later;
        for Moving { channel, from, bytes, .. } in due {
            if !self.away[gate] {
                let time = self.time(gate);
                self.replicas[gate].message(channel, &name(from), &bytes, &mut self.hosts[gate], time);
            }
        }
    }

    fn output(&mut self, gate: usize, output: Output) {
        let peer = |name: &str| name[1..].parse::<usize>().unwrap();
        match output {
            Output::Batch { bytes, .. } => {
                if !self.away[gate] {
                    self.stream.push((self.now, gate, bytes.clone()));
                }
                (0..GATES).for_each(|to| self.send(Channel::States, gate, to, &bytes));
            }
            Output::Request { to, bytes } => self.send(Channel::Request, gate, peer(&to), &bytes),
            Output::Chunk { to, bytes } => self.send(Channel::Chunk, gate, peer(&to), &bytes),
            Output::Replay { peer: from } => {
                let from = peer(&from);
                let batches: Vec<_> = self
                    .stream
                    .iter()
                    .filter(|(_, gate, _)| *gate == from)
                    .map(|(.., b)| b.clone())
                    .collect();
                for bytes in batches {
                    let (due, channel) = (self.now, Channel::States);
                    self.moving.push(Moving { due, channel, from, to: gate, bytes });
                }
            }
        }
    }

    /// The states of a gate that live on: the port of the client, whether it was replied to, and its packets.
    fn table(&self, gate: usize) -> BTreeMap<u16, (bool, [u64; 2])> {
        let mut table = BTreeMap::new();
        each(&self.hosts[gate].states(), |record| {
            if record.remaining < Duration::from_secs(30) {
                return;
            }
            let reversed = record.flow.src_port < 1000;
            let port = record.flow.src_port.max(record.flow.dst_port);
            let [a, b] = record.packets;
            let packets = if reversed { [b, a] } else { [a, b] };
            let before = table.insert(port, (a > 0 && b > 0, packets));
            assert!(before.is_none(), "the state of {port} exists twice at {gate}");
        });
        table
    }

    /// Heals the bus, lets time pass, and compares the tables.
    fn settle(&mut self) {
        self.bus = Bus { lost: 0, repeated: 0, ..self.bus };
        (0..GATES)
            .filter(|gate| self.away[*gate])
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|gate| self.step(Step::Split(gate)));
        self.pass(Duration::from_secs(25));
        let tables: Vec<_> = (0..GATES).map(|gate| self.table(gate)).collect();
        for (gate, table) in tables.iter().enumerate() {
            let replica = &self.replicas[gate];
            bounded(replica);
            assert!(replica.is_in_step(), "gate {gate} is not in step: {replica:?}");
            for (port, (replied, packets)) in table {
                let flow = (port - 1000) as u8;
                let most = self.sent[&flow];
                assert!(packets.iter().sum::<u64>() <= most, "{port} at {gate}: {packets:?} of {most}");
                if !replied || self.closed.contains(&flow) {
                    continue;
                }
                for (other, there) in tables.iter().enumerate() {
                    assert!(there.contains_key(port), "{port} of gate {gate} is missing at {other}");
                }
            }
        }
    }
}

fn bounded(replica: &Replica) {
    let sizes = replica.sizes();
    assert!(sizes.iter().all(|(size, bound)| size <= bound), "{sizes:?}");
}

fn bus() -> impl Strategy<Value = Bus> {
    (0_u32..40, 0_u32..20, 0_u64..200, prop_oneof![Just(0_u64), Just(60)], 0_u64..1_000_000).prop_map(
        |(lost, repeated, delay, stream, skew)| Bus {
            lost,
            repeated,
            delay: Duration::from_millis(delay),
            stream: Duration::from_secs(stream),
            skew: Duration::from_secs(skew),
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    // Flows below 3 are UDP.
    let flags =
        prop_oneof![Just("syn"), Just("syn ack"), Just("ack"), Just("ack"), Just("fin ack"), Just("rst")];
    let packet = (0..GATES, 0..FLOWS, any::<bool>(), flags).prop_map(|(gate, flow, reply, flags)| {
        Step::Packet { gate, flow, reply, tcp: (flow >= 3).then_some(flags) }
    });
    prop_oneof![
        20 => packet,
        10 => (0_u16..1_500).prop_map(Step::Wait),
        2 => (0..GATES).prop_map(Step::Split),
        1 => (0..GATES).prop_map(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(48), ..ProptestConfig::default() })]

    /// After any loss, delay, order, split and restart, the gates have the same states, each once, and none has counted a packet twice.
    #[test]
    fn the_tables_of_all_gates_converge(bus in bus(), seed in any::<u64>(), steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new(bus, seed);
        for step in steps {
            world.step(step);
        }
        world.settle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Whatever peers send, a replica holds a bounded amount.
    #[test]
    fn memory_is_bounded_for_any_messages(
        messages in prop::collection::vec((0_u16..400, 0_usize..3, any::<[u64; 3]>(), 0_u64..200, any::<bool>()), 1..2000),
    ) {
        let mut host = Host::new(0, Time::from_secs(1_000));
        let mut replica = replica(0, 1);
        let mut now = Time::from_secs(1_000);
        replica.connect(now);
        for (from, kind, [a, b, c], wait, small) in messages {
            now = now + Duration::from_millis(wait);
            host.now = now;
            let (a, c) = if small { (a % 1000, c % 1000) } else { (a, c) };
            let (channel, kind) = [
                (Channel::States, Kind::States { seq: a }),
                (Channel::Request, Kind::Request { epoch: a, cursor: b, chunks: c }),
                (Channel::Chunk, Kind::Chunk { epoch: a, cursor: b, next: Some(c) }),
            ][kind];
            let sender = Sender { incarnation: 1 + b % 3, at: now, fingerprint: 0, in_step: small, unchecked: false };
            let bytes = Message { sender, kind, records: &[] }.encode();
            replica.message(channel, &format!("p{from}"), &bytes, &mut host, now);
            while replica.poll(&mut host, now).is_some() {}
            bounded(&replica);
        }
    }
}

const CALM: Bus = Bus {
    lost: 0,
    repeated: 0,
    delay: Duration::from_millis(1),
    stream: Duration::from_secs(60),
    skew: Duration::from_secs(77),
};

fn udp(gate: usize, flow: u8, reply: bool) -> Step {
    Step::Packet { gate, flow, reply, tcp: None }
}

#[test]
fn a_replied_state_is_sent_and_an_unreplied_one_is_not() {
    let mut world = World::new(CALM, 1);
    world.step(Step::Wait(3_000));
    world.step(udp(0, 1, false));
    world.step(udp(0, 2, false));
    world.step(udp(0, 2, true));
    world.step(Step::Wait(100));
    assert_eq!(world.table(1).keys().copied().collect::<Vec<_>>(), [1002]);
    let stats = world.replicas[1].stats(world.time(1));
    assert_eq!((stats.created, stats.merged, stats.gaps, stats.in_step), (1, 0, 0, 1), "{stats:?}");
    // The state that came is not sent back.
    assert_eq!(stats.sent, 0, "{stats:?}");
    assert_eq!(world.replicas[0].stats(world.time(0)).sent, 1);
    // The other gate takes the flow over: its counters continue.
    world.step(udp(1, 2, true));
    assert_eq!(world.table(1)[&1002], (true, [1, 2]));
}

#[test]
fn directions_that_pass_different_gates_add_up() {
    let mut world = World::new(CALM, 2);
    world.step(Step::Wait(3_000));
    for _ in 0..3 {
        world.step(udp(0, 0, false));
    }
    world.step(udp(0, 0, true));
    world.step(Step::Wait(100));
    for _ in 0..5 {
        world.step(udp(1, 0, true));
    }
    assert_eq!(world.table(1)[&1000], (true, [3, 6]));
    // A third of the lifetime later, the gate that sees packets says so.
    assert_eq!(world.table(0)[&1000], (true, [3, 1]));
    for _ in 0..17 {
        world.step(Step::Wait(60_000));
    }
    assert_eq!(world.table(0)[&1000], (true, [3, 6]));
}

#[test]
fn a_gate_that_joins_takes_a_snapshot() {
    let mut world = World::new(CALM, 3);
    world.step(Step::Wait(3_000));
    for flow in 0..3 {
        world.step(udp(0, flow, false));
        world.step(udp(0, flow, true));
    }
    world.step(Step::Wait(200));
    world.step(Step::Restart(2));
    assert!(!world.replicas[2].is_in_step());
    world.step(Step::Wait(3_500));
    assert!(world.replicas[2].is_in_step());
    assert_eq!(world.table(2).len(), 3);
    let stats = world.replicas[2].stats(world.time(2));
    // One snapshot is enough: both peers are in step.
    assert_eq!((stats.snapshots, stats.snapshot_received, stats.created), (1, 3, 3), "{stats:?}");
}

#[test]
fn a_gap_is_filled_by_the_stream_or_by_a_snapshot() {
    for (stream, by_stream) in [(60, true), (0, false)] {
        let mut world = World::new(Bus { stream: Duration::from_secs(stream), ..CALM }, 4);
        world.step(Step::Wait(4_000));
        world.bus.lost = 100;
        world.step(udp(0, 0, false));
        world.step(udp(0, 0, true));
        world.step(Step::Wait(30));
        world.bus.lost = 0;
        world.step(Step::Wait(5_000));
        let stats = world.replicas[1].stats(world.time(1));
        assert_eq!([stats.replayed > 0, stats.resynced > 0], [by_stream, !by_stream], "{stats:?}");
        assert!(stats.gaps >= 1 && world.replicas[1].is_in_step());
        assert_eq!(world.table(1).len(), 1);
    }
}

#[test]
fn a_state_that_the_rules_of_the_receiver_refuse_is_counted() {
    let mut world = World::new(CALM, 5);
    world.hosts[1].gate.reload(
        Ruleset::parse("t", "add deny udp from any to any\nadd allow ip from any to any keep-state")
            .ruleset
            .unwrap(),
        towpath_gate::StatePolicy::Keep,
        world.now,
    );
    world.hosts[1].rules = world.hosts[1].gate.rules_by_content();
    world.step(Step::Wait(3_000));
    world.step(udp(0, 0, false));
    world.step(udp(0, 0, true));
    world.step(Step::Wait(100));
    let stats = world.replicas[1].stats(world.time(1));
    assert_eq!((stats.refused_rules, stats.created), (1, 0), "{stats:?}");
    assert!(world.table(1).is_empty());
    assert_eq!(world.table(2).len(), 1);
}

#[test]
fn a_connection_that_was_closed_through_one_gate_ends_at_the_other() {
    let mut world = World::new(CALM, 6);
    let tcp = |gate, reply, flags| Step::Packet { gate, flow: 4, reply, tcp: Some(flags) };
    world.step(Step::Wait(3_000));
    [(false, "syn"), (true, "syn ack"), (false, "ack"), (true, "ack")]
        .into_iter()
        .for_each(|(reply, flags)| world.step(tcp(0, reply, flags)));
    world.step(Step::Wait(100));
    assert_eq!(world.table(1).len(), 1);
    world.step(tcp(0, false, "fin ack"));
    world.step(tcp(0, true, "fin ack"));
    world.step(Step::Wait(100));
    assert!(world.table(1).is_empty(), "{:?}", world.table(1));
}

#[test]
fn a_state_that_is_removed_at_one_gate_is_removed_at_all() {
    let mut world = World::new(CALM, 9);
    world.step(Step::Wait(3_000));
    for flow in [0, 1] {
        world.step(udp(0, flow, false));
        world.step(udp(0, flow, true));
    }
    world.step(Step::Wait(100));
    assert_eq!(world.table(1).len(), 2);
    world.bus.delay = Duration::ZERO;
    // At a gate that did not make it.
    world.step(Step::Remove { gate: 1, flow: 0 });
    // What was sent before is still on its way.
    let mut before = replica(2, 77);
    before.connect(world.time(2));
    let (now, states) = (world.time(2), world.hosts[2].states());
    each(&states, |record| before.scanned(record, now));
    world.step(Step::Wait(100));
    for gate in 0..GATES {
        assert_eq!(world.table(gate).keys().copied().collect::<Vec<_>>(), [1001], "at {gate}");
    }
    let stats = |world: &World, gate: usize| world.replicas[gate].stats(world.time(gate));
    assert_eq!([0, 1, 2].map(|gate| stats(&world, gate).removed), [1, 0, 1]);
    // No gate sends the removal once more.
    assert_eq!(stats(&world, 1).sent, 1);
    assert_eq!(stats(&world, 2).sent, 0);
    while let Some(output) = before.poll(&mut world.hosts[2], now + Duration::from_millis(30)) {
        let Output::Batch { bytes, .. } = output else { continue };
        let now = world.time(0);
        world.replicas[0].message(Channel::States, "g3", &bytes, &mut world.hosts[0], now);
    }
    let after = stats(&world, 0);
    assert_eq!((after.refused_removed, after.merged), (1, 1), "{after:?}");
    assert_eq!(world.table(0).len(), 1);
    // The flow may begin again at once, at any gate.
    world.step(Step::Wait(1_200));
    world.step(udp(2, 0, false));
    world.step(udp(2, 0, true));
    world.step(Step::Wait(100));
    assert_eq!([0, 1].map(|gate| world.table(gate)[&1000]), [(true, [1, 1]); 2]);
}

/// Changes the versions of a message and of its records.
fn of_version(bytes: &[u8], message: u8, oldest: u8, records: u8) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    (bytes[4], bytes[5]) = (message, oldest);
    let mut at = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
    while at < bytes.len() {
        bytes[at + 2] = records;
        at += 2 + usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    }
    bytes
}

#[test]
fn a_message_of_the_next_version_is_merged_or_counted() {
    for (version, oldest, records, expected) in
        [(1, 1, 1, [1, 0, 0]), (2, 1, 1, [1, 0, 0]), (2, 2, 1, [0, 1, 0]), (2, 1, 2, [0, 0, 1])]
    {
        let mut world = World::new(CALM, 10);
        world.step(Step::Wait(3_000));
        world.step(udp(0, 0, false));
        world.step(udp(0, 0, true));
        let now = world.time(0) + Duration::from_millis(30);
        let Some(Output::Batch { bytes, states: 1 }) = world.replicas[0].poll(&mut world.hosts[0], now)
        else {
            panic!("no batch")
        };
        let (bytes, now) = (of_version(&bytes, version, oldest, records), world.time(1));
        world.replicas[1].message(Channel::States, "g0", &bytes, &mut world.hosts[1], now);
        let stats = world.replicas[1].stats(now);
        let counted = [stats.created, stats.messages_version, stats.refused_version];
        assert_eq!(counted, expected, "{version}, {oldest}, {records}: {stats:?}");
    }
}

/// Gates with these rules, of which the first two make states of these flows, at the same time or one after the other. Returns the number
/// of states at each gate, and whether records were refused because of a limit.
fn limited(
    rules: &str,
    settings: state::Settings,
    flows: [std::ops::Range<u8>; 2],
    wait: u16,
    split: bool,
) -> ([usize; 2], [bool; 2]) {
    let mut world = World::new(CALM, 11);
    let now = world.now;
    world.hosts = (0..GATES).map(|at| Host::with(rules, settings.clone(), at, now)).collect();
    world.step(Step::Wait(3_000));
    if split {
        world.step(Step::Split(0));
    }
    for (gate, flows) in flows.into_iter().enumerate() {
        for flow in flows {
            world.step(udp(gate, flow, false));
            world.step(udp(gate, flow, true));
        }
        world.step(Step::Wait(wait));
    }
    if split {
        assert_eq!([0, 1].map(|gate| world.table(gate).len()), [4; 2], "each counts its own");
        world.step(Step::Split(0));
        world.step(Step::Wait(8_000));
    }
    let refused = [0, 1].map(|gate| world.replicas[gate].stats(world.time(gate)).refused_limit > 0);
    ([0, 1].map(|gate| world.table(gate).len()), refused)
}

#[test]
fn limits_count_the_states_of_the_group() {
    let limit = "add allow udp from 10.0.0.1 to any limit src-addr 4 lifetime 3000";
    let default = state::Settings::default;
    let source = || state::Settings { dyn_source_max: 4, ..default() };
    let keep = "add allow udp from 10.0.0.1 to any keep-state lifetime 3000";
    // In touch: the other gate has made three, so that one more is admitted.
    assert_eq!(limited(limit, default(), [0..3, 10..20], 100, false), ([4; 2], [false; 2]));
    assert_eq!(limited(keep, source(), [0..3, 10..20], 100, false), ([4; 2], [false; 2]));
    // The error: states that others have made and that are still on their way.
    assert_eq!(limited(limit, default(), [0..3, 10..20], 0, false).0, [3, 4]);
    // Not in touch: each gate counts the states that it has. Later, all states have their place in a `limit`, and `dyn_source_max`
    // refuses those beyond it.
    assert_eq!(limited(limit, default(), [0..10, 10..20], 100, true), ([8; 2], [false; 2]));
    assert_eq!(limited(keep, source(), [0..10, 10..20], 100, true), ([4; 2], [true; 2]));
}

#[test]
fn changes_while_the_bus_is_away_are_counted_and_follow() {
    let mut world = World::new(CALM, 7);
    world.step(Step::Wait(3_000));
    world.step(Step::Split(0));
    for flow in 0..3 {
        world.step(udp(0, flow, false));
        world.step(udp(0, flow, true));
    }
    world.step(Step::Wait(10_000));
    let stats = world.replicas[0].stats(world.time(0));
    assert_eq!((stats.not_sent_away, stats.sent, stats.in_step, stats.connected), (3, 0, 0, 0), "{stats:?}");
    assert!(world.table(1).is_empty());
    world.step(Step::Split(0));
    world.step(Step::Wait(8_000));
    assert_eq!(world.table(1).len(), 3);
    assert!((0..GATES).all(|gate| world.replicas[gate].is_in_step()));
}

#[test]
fn two_gates_of_one_name_are_noticed() {
    let mut world = World::new(CALM, 8);
    let mut other = replica(1, 99);
    other.connect(world.time(1));
    let now = world.time(1);
    let Some(Output::Batch { bytes, .. }) = other.poll(&mut world.hosts[1], now) else { panic!() };
    world.replicas[1].message(Channel::States, "g1", &bytes, &mut world.hosts[1], now);
    assert_eq!(world.replicas[1].stats(now).messages_own_name, 1);
    // A kind that does not belong to the subject.
    world.replicas[1].message(Channel::Chunk, "g2", &bytes, &mut world.hosts[1], now);
    world.replicas[1].message(Channel::States, "g2", b"TWFLx", &mut world.hosts[1], now);
    assert_eq!(world.replicas[1].stats(now).messages_malformed, 2);
}

/// Gates 0 and 1 come back at the same moment, gate 0 without states. Only gate 2 has the last batch of the process before.
#[test]
fn a_gate_that_returns_with_a_restarted_one_asks_all_peers() {
    let bus = Bus {
        lost: 0,
        repeated: 0,
        delay: Duration::ZERO,
        stream: Duration::from_secs(60),
        skew: Duration::ZERO,
    };
    let mut world = World::new(bus, 0);
    let packet = |flow: u8, reply: bool| Step::Packet { gate: 0, flow, reply, tcp: None };
    let steps = [
        packet(0, false),
        packet(2, false),
        Step::Split(0),
        Step::Split(1),
        packet(2, true),
        Step::Split(0),
        Step::Wait(1001),
        Step::Restart(0),
        Step::Split(0),
    ];
    steps.into_iter().for_each(|step| world.step(step));
    world.settle();
}
