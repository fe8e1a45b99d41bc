//! An engine whose inspector runs on its CPU yields to it after a burst.

use super::*;

/// Packets that leave are counted. The CPU is given away for a time, and the inspector decides at one of these times.
struct SharedCpu {
    inspector: Inspector,
    yields: usize,
    /// The yield at which the inspector runs.
    decides_at: usize,
    /// Nanoseconds of a yield.
    time: u64,
    now: u64,
    sent: usize,
}

impl PacketIo for SharedCpu {
    type Channel = Inspector;
    type Error = Infallible;

    fn now(&mut self) -> u64 {
        self.now
    }
    fn yield_cpu(&mut self) {
        self.yields += 1;
        self.now += self.time;
        if self.yields == self.decides_at {
            self.inspector.decide();
        }
    }
    fn send(&mut self, _frame: &[u8], _meta: &Meta) -> Result<(), Infallible> {
        self.sent += 1;
        Ok(())
    }
    fn link(&self, _interface: u32) -> Option<LinkType> {
        Some(LinkType::ETHERNET)
    }
    fn reply(&mut self, _port: towpath_gate::PortId, _frame: &[u8], _meta: &Meta) -> bool {
        false
    }
    fn max_frame(&self, _egress: Option<towpath_gate::PortId>, _bytes: &[u8], _meta: &Meta) -> usize {
        usize::MAX
    }
}

/// Yields and sent packets of a burst of two packets.
fn burst(shares_cpu: bool, decides_at: usize, time: u64) -> (usize, usize) {
    let ruleset = Ruleset::parse("t", "add inspect 1 ip from any to any").ruleset.unwrap();
    let mut ports = Ports::new();
    let (a, b) = (ports.add("a", Vec::new()), ports.add("b", Vec::new()));
    let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
    let mut topology = Topology::none();
    topology.add(a, ForwardMode::Bridge { xmit: b, walk_out: false });
    let inspector = Inspector(Rc::new(RefCell::new(Inside { shares_cpu, ..Inside::default() })));
    let io = SharedCpu { inspector: inspector.clone(), yields: 0, decides_at, time, now: 1, sent: 0 };
    let queues = vec![Queue::new(1, Policy::default())];
    let mut engine = Engine::live(io, gate.walker().unwrap(), topology, queues, Policy::default());
    engine.join(1, 1, inspector).unwrap();
    let frame = packet("udp 10.0.0.1:4000 > 10.0.0.2:53");
    let meta = Meta::new(LinkType::ETHERNET, frame.len());
    let Ok(()) = engine.process_burst([(&frame[..], meta), (&frame[..], meta)].into_iter());
    (engine.io.yields, engine.io.sent)
}

#[test]
fn the_engine_yields_until_the_inspector_has_decided() {
    // The scheduler returns from the first yields at once.
    for decides_at in 1..=8 {
        assert_eq!(burst(true, decides_at, 500), (decides_at, 2));
    }
}

#[test]
fn the_engine_does_not_wait_for_an_inspector_that_decides_nothing() {
    assert_eq!(burst(true, usize::MAX, 500), (8, 0), "it does not run");
    assert_eq!(burst(true, usize::MAX, 3_000_000), (1, 0), "another process runs");
    assert_eq!(burst(true, 1, 3_000_000), (1, 2), "it takes long, and decides");
    assert_eq!(burst(false, usize::MAX, 500), (0, 0), "it is on another CPU");
}
