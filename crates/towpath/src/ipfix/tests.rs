//! The exporter with a collector of the tests at the end of a socket.

use towpath_gate::Walker;

use super::decode::{Collector, Data};
use super::*;
use crate::state_feed::tests::{walk, world};

const RULES: &str = "add 100 allow udp from any to any keep-state";

struct World {
    ruleset: Arc<RulesetManager>,
    walker: Walker,
    exporter: Exporter,
    socket: UdpSocket,
    collector: Collector,
    now: Instant,
}

impl World {
    fn new(rules: &str, change: impl FnOnce(&mut config::Ipfix)) -> Self {
        let (ruleset, walker) = world(rules);
        ruleset.clock().set_zero(Duration::from_secs(1000));
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        let mut config = config::Ipfix {
            collector: socket.local_addr().unwrap().to_string(),
            domain: 7,
            active_timeout: Duration::from_secs(60),
            template_refresh: Duration::from_secs(600),
            mtu: 1500,
            starts: false,
        };
        change(&mut config);
        let Opened { socket: out, collector, config } = Opened::open(&config).unwrap();
        let now = Instant::now();
        let exporter = Exporter::new(out, collector, &config, &ruleset, now);
        Self { ruleset, walker, exporter, socket, collector: Collector::default(), now }
    }

    /// The engine's clock at `second`, and the thread's turns until then.
    fn at(&mut self, second: u64) {
        self.ruleset.clock().set(Time::from_secs(second));
        self.now += self.exporter.every.max(FLUSH);
        self.exporter.step(self.now);
        // On a busy machine, a turn ends before its scan does.
        while self.exporter.scan.is_some() {
            self.now += FLUSH;
            self.exporter.step(self.now);
        }
    }

    /// The data records that have arrived.
    fn read(&mut self) -> Vec<Data> {
        let mut records = Vec::new();
        let mut buffer = [0; 65_536];
        while let Ok(length) = self.socket.recv(&mut buffer) {
            let read = self.collector.read(&buffer[..length]).unwrap();
            assert_eq!(read.domain, 7);
            records.extend(read.records);
        }
        records
    }
}

fn number(data: &Data, enterprise: u32, element: u16) -> u64 {
    data[&(enterprise, element)].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[test]
fn a_flow_has_its_rule_its_times_and_the_counters_of_both_directions() {
    let mut world = World::new(RULES, |_| ());
    world.at(0);
    assert_eq!(world.read(), []);
    for second in [1, 2, 3] {
        walk(&mut world.walker, "udp 10.0.0.1:5 > 10.0.0.2:53", Time::from_secs(second));
    }
    walk(&mut world.walker, "udp 10.0.0.2:53 > 10.0.0.1:5", Time::from_secs(3));
    world.at(4);
    assert_eq!(world.read(), []);
    // The UDP state expires 10 s after its last packet.
    world.ruleset.clock().set(Time::from_secs(30));
    world.ruleset.tidy();
    world.at(30);
    let records = world.read();
    let [rule, flow] = &records[..] else { panic!("{records:?}") };
    assert_eq!(rule[&(0, 335)], b"100 allow udp from any to any keep-state :default");
    assert_eq!(rule[&(0, 302)], flow[&(0, 302)]);
    assert_eq!((number(flow, 0, 2), number(flow, message::REVERSE, 2)), (3, 1));
    assert!(number(flow, 0, 1) > number(flow, message::REVERSE, 1));
    let (start, end) = (number(flow, 0, 152), number(flow, 0, 153));
    assert_eq!(start, 1_001_000);
    assert!((1_013_000..=1_030_000).contains(&end), "{end}");
    // Idle, deleted, forwarded.
    assert_eq!([136, 233, 89].map(|element| number(flow, 0, element)), [1, 2, 64]);
    let stats = world.exporter.stats();
    assert_eq!((stats.ended, stats.active, stats.unsent, stats.flows), (1, 0, 0, 0));
}

#[test]
fn a_flow_that_continues_has_a_record_for_each_active_timeout() {
    let mut world = World::new(RULES, |config| config.starts = true);
    world.at(0);
    let mut packets = 0;
    for second in 1..=200 {
        walk(&mut world.walker, "udp 10.0.0.1:5 > 10.0.0.2:53", Time::from_secs(second));
        world.ruleset.clock().set(Time::from_secs(second));
        if second % 15 == 0 {
            world.at(second);
        }
        for flow in world.read().iter().filter(|data| data.contains_key(&(0, 2))) {
            packets += number(flow, 0, 2);
        }
    }
    let stats = world.exporter.stats();
    assert_eq!((stats.started, stats.active, stats.ended), (1, 3, 0));
    world.exporter.stop();
    let last = world.read();
    assert_eq!(last.iter().map(|flow| number(flow, 0, 136)).collect::<Vec<_>>(), [4]);
    assert_eq!(packets + number(&last[0], 0, 2), 200);
}

#[test]
fn templates_and_names_are_sent_again() {
    let mut world = World::new(RULES, |_| ());
    for flow in 1..=3 {
        walk(&mut world.walker, &format!("udp 10.0.0.{flow}:5 > 10.0.0.99:53"), Time::from_secs(flow));
    }
    world.at(4);
    world.read();
    // A collector that was started again knows nothing.
    world.collector = Collector::default();
    world.now += Duration::from_secs(600);
    world.at(5);
    world.ruleset.clock().set(Time::from_secs(60));
    world.ruleset.tidy();
    world.at(60);
    let records = world.read();
    let names = records.iter().filter(|data| data.contains_key(&(0, 335))).count();
    assert_eq!((records.len(), names), (4, 1));
}

#[test]
fn without_a_collector_messages_are_counted_and_nothing_waits() {
    let mut world = World::new(RULES, |_| ());
    // The collector's socket takes the datagrams of another peer only. Its port stays its own: it cannot be bound again while a child that
    // another test has forked holds a copy.
    world.socket.connect("127.0.0.1:9").unwrap();
    for flow in 1..=5 {
        walk(&mut world.walker, &format!("udp 10.0.0.{flow}:5 > 10.0.0.99:53"), Time::from_secs(1));
        world.exporter.out.templates();
        world.at(1);
    }
    // An error on the loopback interface is known to the next call, and repeats.
    let stats = world.exporter.stats();
    assert_eq!(stats.sent + stats.unsent, 5);
    // The collector is there again.
    world.socket.connect(world.exporter.out.socket.local_addr().unwrap()).unwrap();
    world.exporter.out.templates();
    world.ruleset.clock().set(Time::from_secs(60));
    world.ruleset.tidy();
    world.at(60);
    assert_eq!(world.read().iter().filter(|data| data.contains_key(&(0, 2))).count(), 5);
    assert!(!world.exporter.out.failing);
}

#[test]
fn lost_changes_are_counted_and_a_scan_finds_what_there_is() {
    let mut world = World::new(RULES, |_| ());
    walk(&mut world.walker, "udp 10.0.0.1:5 > 10.0.0.99:53", Time::from_secs(1));
    world.at(1);
    assert_eq!(world.exporter.stats().flows, 1);
    // More than the journal holds: the end of the first flow is among them. The table has one state at a time.
    world.ruleset.set("dyn_max", 1).unwrap();
    for packet in 0..70_000_u64 {
        let (host, port) = (packet / 50_000 + 2, packet % 50_000 + 1);
        let now = Time::from_secs(100 + packet * 100);
        walk(&mut world.walker, &format!("udp 10.0.0.{host}:{port} > 10.0.0.99:53"), now);
    }
    let end = 100 + 70_000 * 100;
    world.at(end);
    let stats = world.exporter.stats();
    assert!(stats.missed > 0 && stats.flows == 1, "{stats:?}");
    world.ruleset.tidy();
    for _ in 0..3 {
        world.at(end);
    }
    // The first flow's end was lost. Its number was used again.
    let stats = world.exporter.stats();
    assert_eq!((stats.lost_ends, stats.flows), (1, 0), "{stats:?}");
}
