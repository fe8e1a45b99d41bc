//! Tests of a live engine with a simulated inspector. The inspector sees published frames only after `kick`.

mod announced;
mod chained;
mod injected;
mod isolation;
mod replaced;
mod yields;

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use towpath_gate::rules::Ruleset;
use towpath_gate::{Gate, PacketSpec, Ports, state};
use towpath_ring::{Decision, Loss, ReserveError, Seq, Verdict};
use towpath_wire::LinkType;

use super::*;
use crate::queue::{Channel, DefaultVerdict, Detached, Policy, Queue};

/// The state that an inspector shares with its test.
#[derive(Debug, Default)]
struct Inside {
    /// Maximum number of undecided frames. 0: no limit.
    room: usize,
    published: u32,
    /// Published frames that were announced.
    announced: u32,
    /// Announced frames that were decided.
    decided: u32,
    /// Decided frames that were not polled.
    verdicts: Vec<(u32, Decision<'static>)>,
    /// The last byte of each published frame.
    labels: Vec<u8>,
    may_inject: bool,
    /// The inspector ran on the engine's CPU.
    shares_cpu: bool,
    /// Packets that were not polled.
    injected: Vec<(towpath_ring::Header, Vec<u8>)>,
}

#[derive(Clone, Debug, Default)]
struct Inspector(Rc<RefCell<Inside>>);

impl Inspector {
    /// Passes the announced frames. Returns their number.
    fn decide(&self) -> u32 {
        self.decide_with(Verdict::Pass.into())
    }

    /// Decides the announced frames alike. Returns their number.
    fn decide_with(&self, decision: Decision<'static>) -> u32 {
        let mut inside = self.0.borrow_mut();
        let frames = inside.decided..inside.announced;
        inside.verdicts.extend(frames.clone().map(|seq| (seq, decision)));
        inside.decided = inside.announced;
        frames.len() as u32
    }
}

impl Channel for Inspector {
    fn publish(&mut self, frame: &[u8], _meta: &towpath_ring::Meta) -> Result<Seq, ReserveError> {
        let mut inside = self.0.borrow_mut();
        if inside.room > 0 && inside.published - inside.decided >= inside.room as u32 {
            return Err(ReserveError::RingFull);
        }
        inside.published += 1;
        inside.labels.extend(frame.last());
        Ok(Seq(inside.published - 1))
    }
    fn lose(&mut self, _loss: Loss) {}
    fn kick(&mut self) {
        let mut inside = self.0.borrow_mut();
        inside.announced = inside.published;
    }
    fn poll(&mut self, _now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        let verdicts = std::mem::take(&mut self.0.borrow_mut().verdicts);
        verdicts.iter().for_each(|(seq, decision)| each(Seq(*seq), Ok(*decision)));
        verdicts.len()
    }
    fn may_inject(&self) -> bool {
        self.0.borrow().may_inject
    }
    fn shares_cpu(&self) -> bool {
        self.0.borrow().shares_cpu
    }
    fn poll_injected(&mut self, each: &mut dyn FnMut(&towpath_ring::Header, &[u8])) {
        let packets = std::mem::take(&mut self.0.borrow_mut().injected);
        packets.iter().for_each(|(header, bytes)| each(header, bytes));
    }
    fn wait(&mut self, _now: u64, _until: u64) {}
    fn unreturned(&self) -> u32 {
        0
    }
    fn is_dead(&self) -> bool {
        false
    }
    fn detached(&mut self) -> Option<Detached> {
        None
    }
}

/// The longest frame that leaves.
const MAX_FRAME: usize = 1514;

/// The packets that left, in order.
#[derive(Debug, Default)]
struct Out(Vec<Vec<u8>>);

impl PacketIo for Out {
    type Channel = Inspector;
    type Error = Infallible;

    fn now(&mut self) -> u64 {
        1
    }
    fn send(&mut self, frame: &[u8], _meta: &Meta) -> Result<(), Infallible> {
        self.0.push(frame.to_vec());
        Ok(())
    }
    fn link(&self, interface: u32) -> Option<LinkType> {
        (interface == 0).then_some(LinkType::ETHERNET)
    }
    fn reply(&mut self, _port: towpath_gate::PortId, frame: &[u8], _meta: &Meta) -> bool {
        self.0.push(frame.to_vec());
        true
    }
    fn max_frame(&self, egress: Option<towpath_gate::PortId>, _bytes: &[u8], _meta: &Meta) -> usize {
        if egress.is_some() { MAX_FRAME } else { usize::MAX }
    }
}

struct World {
    _gate: Gate,
    engine: Engine<Out>,
    inspector: Inspector,
}

impl World {
    /// A bridge with these rules. The inspector serves queue 1.
    fn new(rules: &str, inside: Inside) -> Self {
        let (mut world, inspector) = Self::with_queues(rules, vec![Queue::new(1, Policy::default())], inside);
        world.engine.join(1, 1, inspector).unwrap();
        world
    }

    /// A bridge with these rules and queues, and an inspector that serves none of them.
    fn with_queues(rules: &str, queues: Vec<Queue<Inspector>>, inside: Inside) -> (Self, Inspector) {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap();
        let mut ports = Ports::new();
        let (a, b) = (ports.add("a", Vec::new()), ports.add("b", Vec::new()));
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
        let mut topology = Topology::none();
        topology.add(a, ForwardMode::Bridge { xmit: b, walk_out: false });
        let inspector = Inspector(Rc::new(RefCell::new(inside)));
        let walker = gate.walker().unwrap();
        let engine = Engine::live(Out::default(), walker, topology, queues, Policy::default());
        (Self { _gate: gate, engine, inspector: inspector.clone() }, inspector)
    }

    fn burst(&mut self, frames: &[&[u8]]) {
        let meta = |frame: &[u8]| Meta::new(LinkType::ETHERNET, frame.len());
        let Ok(()) = self.engine.process_burst(frames.iter().map(|frame| (*frame, meta(frame))));
    }

    /// Runs idle turns until the inspector has decided every frame. No packet arrives; the clock does not advance.
    fn settle(&mut self) {
        while self.inspector.decide() > 0 {
            let Ok(()) = self.engine.idle();
        }
    }

    /// Packets: received, passed, dropped, held.
    fn counts(&mut self) -> [u64; 4] {
        let queue = self.engine.queues.get(0).stats();
        assert_eq!(queue.frames, queue.passed + queue.dropped + queue.replaced + queue.lost() + queue.open);
        let totals = self.engine.totals();
        [totals.stats.packets, totals.stats.passed, totals.dropped(), totals.held()]
    }

    fn assert_clear(&self) {
        assert!(self.engine.reorder.is_empty());
        assert!(self.engine.locks.is_clear());
    }
}

fn packet(words: &str) -> Vec<u8> {
    PacketSpec::parse(words).unwrap().frame
}

/// An Ethernet frame's IPv4 packet in two fragments.
fn fragments(frame: &[u8]) -> [Vec<u8>; 2] {
    // RFC 791 section 3.1: the total length at 2, the fragment field at 6: MF is 0x2000, offsets count 8 bytes.
    let piece = |field: u16, payload: &[u8]| {
        let mut piece = [&frame[..34], payload].concat();
        piece[16..18].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
        piece[20..22].copy_from_slice(&field.to_be_bytes());
        piece
    };
    [piece(0x2000, &frame[34..50]), piece(2, &frame[50..])]
}

#[test]
fn frames_published_between_bursts_are_announced() {
    for room in [0, 3] {
        let mut world = World::new(
            "add divert 1 ip from any to any\nadd allow ip from any to any\n",
            Inside { room, ..Inside::default() },
        );
        let flow = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
        // Each packet waits for the one before it, or for room.
        world.burst(&[&flow[..]; 20]);
        world.settle();
        assert_eq!(world.counts(), [20, 20, 0, 0]);
        world.assert_clear();
    }
}

#[test]
fn a_reassembled_datagram_keeps_the_order_of_its_flow() {
    let one = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 8");
    let two = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 24 id 7");
    let three = packet("udp 10.0.0.1:4000 > 10.0.0.2:53 len 9");
    let [first, last] = fragments(&two);
    let rules = [
        "add reass ip from any to any\nadd divert 1 ip from any to any\nadd allow ip from any to any\n",
        "add divert 1 ip from any to any\nadd reass ip from any to any\nadd allow ip from any to any\n",
    ];
    // Rules, bursts, and the lengths of the packets that leave.
    type Row<'a> = (usize, &'a [&'a [&'a [u8]]], &'a [usize]);
    let rows: [Row<'_>; 4] = [
        (0, &[&[&first], &[&last, &three]], &[24, 9]),
        (0, &[&[&last], &[&first, &three]], &[24, 9]),
        (0, &[&[&first], &[&one, &last, &three]], &[8, 24, 9]),
        // The datagram is complete only after both fragments are decided, so it leaves after the packet that arrived in
        // between.
        (1, &[&[&first, &last], &[&one]], &[8, 24]),
    ];
    for (which, bursts, expected) in rows {
        let mut world = World::new(rules[which], Inside::default());
        for burst in bursts {
            world.burst(burst);
        }
        world.settle();
        let received: usize = bursts.iter().map(|burst| burst.len()).sum();
        assert_eq!(world.counts(), [received as u64, received as u64, 0, 0], "{expected:?}");
        let left: Vec<_> = world.engine.io.0.iter().map(|frame| frame.len() - 42).collect();
        assert_eq!(left, expected);
        world.assert_clear();
    }
}

#[test]
fn a_router_does_not_forward_ip_in_pppoe() {
    let ruleset = Ruleset::parse("t", "add allow ip from any to any").ruleset.unwrap();
    let mut ports = Ports::new();
    let port = ports.add("a", Vec::new());
    let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
    let mut routes = towpath_gate::Routes::new();
    let route = towpath_gate::Route { port, connected: true, gateway: towpath_gate::Gateway::OnLink };
    routes.add([10, 0, 0, 0].into(), 8, route);
    gate.set_routes(routes);
    let mut topology = Topology::none();
    topology.add(port, ForwardMode::Router);
    let walker = gate.walker().unwrap();
    let mut engine = Engine::live(Out::default(), walker, topology, Vec::new(), Policy::default());
    let plain = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
    let length = (plain.len() - 14 + 2) as u8;
    let in_pppoe = [&plain[..12], &[0x88, 0x64, 0x11, 0, 0, 1, 0, length, 0, 0x21], &plain[14..]].concat();
    for frame in [&plain, &in_pppoe] {
        let Ok(()) =
            engine.process_burst([(&frame[..], Meta::new(LinkType::ETHERNET, frame.len()))].into_iter());
    }
    assert_eq!((engine.io.0.len(), engine.totals().drops[DropReason::NoRoute]), (1, 1));
}

#[test]
fn undecided_packets_are_dropped_at_a_stop() {
    let rules =
        "add reass ip from any to any\nadd divert 1 udp from any to any\nadd allow ip from any to any\n";
    let mut world = World::new(rules, Inside { room: 2, ..Inside::default() });
    let flow = |port: u16| packet(&format!("udp 10.0.0.1:{port} > 10.0.0.2:53 len 24 id 7"));
    let [first, _] = fragments(&flow(1));
    let frames: Vec<_> = [first].into_iter().chain((1..6).chain(1..3).map(flow)).collect();
    world.burst(&frames.iter().map(Vec::as_slice).collect::<Vec<_>>());
    world.burst(&[&packet("tcp 10.0.0.1:4000 > 10.0.0.2:53 syn")]);
    assert_eq!(world.counts(), [9, 1, 0, 8]);
    assert_eq!(world.engine.abandon(), Ok(8));
    assert_eq!(world.counts(), [9, 1, 8, 0]);
    assert_eq!(world.engine.queues.get(0).open(), 0);
    assert!(world.engine.is_drained());
    world.assert_clear();
}

#[test]
fn packets_that_passed_behind_an_undecided_one_leave_at_a_stop() {
    let mut world =
        World::new("add inspect 1 ip from any to any 53\nadd allow ip from any to any\n", Inside::default());
    // Both directions of a flow; one of them is inspected.
    world.burst(&[&packet("udp 10.0.0.1:4000 > 10.0.0.2:53"), &packet("udp 10.0.0.2:53 > 10.0.0.1:4000")]);
    assert_eq!((world.counts(), world.engine.io.0.len()), ([2, 1, 0, 1], 0));
    assert_eq!(world.engine.abandon(), Ok(1));
    assert_eq!((world.counts(), world.engine.io.0.len()), ([2, 1, 1, 0], 1));
}

#[test]
fn set_unserved_changes_implicit_queues() {
    let mut world = World::new("add inspect 5 ip from any to any\n", Inside::default());
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
    world.burst(&[&frame]);
    world.engine.set_unserved(DefaultVerdict::Pass);
    world.burst(&[&frame]);
    assert_eq!(world.counts(), [2, 1, 1, 0]);
    // A configured queue has its own policy.
    world.engine.set_queue(5, Policy::default());
    world.engine.set_unserved(DefaultVerdict::Pass);
    world.burst(&[&frame]);
    assert_eq!(world.counts(), [3, 1, 2, 0]);
}
