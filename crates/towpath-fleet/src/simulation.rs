//! Worlds of gates with a model of the bus, which loses, delays, reorders and repeats messages, and splits. The gates are real ones.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use towpath_gate::rules::Ruleset;
use towpath_gate::state::record::Record;
use towpath_gate::state::{Changes, Cursor, JournalRead, JournalReader, Name};
use towpath_gate::{
    Dir, Gate, Merged, NotMerged, PacketSpec, Ports, RuleRefs, RulesByContent, Walk, Walker, state,
};
use towpath_wire::{self as wire, Time};

use super::message::{Has, Kind, Message, Sender};
use super::*;

const GATES: usize = 3;
const FLOWS: u8 = 6;
const TICK: Duration = Duration::from_millis(5);
const SCAN: Duration = Duration::from_secs(1);

/// The wall clock of a gate when its own begins: its processes have the time of their start as incarnation.
const WALL: Duration = Duration::from_secs(1_700_000_000);

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
        Self::with(RULES[at], state::Settings { dyn_max: 64, ..state::Settings::default() }, at, now)
    }

    fn with(rules: &str, settings: state::Settings, at: usize, now: Time) -> Self {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut gate = Gate::new(ruleset, Ports::new(), settings, at as u64 + 1);
        let walker = gate.walker().unwrap();
        let journal = gate.states().journal_of(Changes::AfterBeginning);
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
        self.gate.scan_part(&self.refs, from, slots, self.now, take)
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
    /// The wall clock of a gate is set forwards or back by these seconds.
    Jump { gate: usize, seconds: i32 },
}

struct World {
    now: Time,
    bus: Bus,
    seed: u64,
    hosts: Vec<Host>,
    replicas: Vec<Replica>,
    away: [bool; GATES],
    /// Seconds by which the wall clock of each gate was set.
    wall: [i64; GATES],
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
            replicas: Vec::new(),
            away: [false; GATES],
            wall: [0; GATES],
            moving: Vec::new(),
            stream: Vec::new(),
            scanned: now,
            restarts: 0,
            sent: BTreeMap::new(),
            closed: HashSet::new(),
        };
        for gate in 0..GATES {
            let mut replica = replica(gate, world.wall_clock(gate));
            replica.connect(world.time(gate));
            world.replicas.push(replica);
        }
        world
    }

    /// The clock of a replica.
    fn time(&self, gate: usize) -> Time {
        self.now + self.bus.skew * gate as u32
    }

    /// The wall clock of a gate in ns. No two processes of the group begin in the same one.
    fn wall_clock(&self, gate: usize) -> u64 {
        let clock = (self.now + WALL).as_nanos() + self.restarts * GATES as u64 + gate as u64;
        clock.saturating_add_signed(self.wall[gate] * 1_000_000_000)
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
                    true => self.replicas[gate].disconnect(),
                    false => self.replicas[gate].connect(now),
                }
            }
            Step::Restart(gate) => {
                self.restarts += 1;
                self.hosts[gate] = Host::new(gate, self.now);
                self.replicas[gate] = replica(gate, self.wall_clock(gate));
                if !self.away[gate] {
                    let now = self.time(gate);
                    self.replicas[gate].connect(now);
                }
            }
            Step::Jump { gate, seconds } => self.wall[gate] += i64::from(seconds),
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
                    let (due, channel) = (self.now, Channel::Replayed);
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

    /// Takes the steps, and [settles](Self::settle).
    fn run(&mut self, steps: impl IntoIterator<Item = Step>) {
        steps.into_iter().for_each(|step| self.step(step));
        self.settle();
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

mod sizes;
mod tests;
