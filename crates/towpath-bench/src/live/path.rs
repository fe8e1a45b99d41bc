//! The live packet path without interfaces and other processes, for callgrind: generated bursts pass through an engine, its gate and,
//! depending on the rules, a queue with an in-memory inspector. A real ring would call the vDSO for the current CPU; valgrind does not
//! map the vDSO.

use std::convert::Infallible;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use towpath::report::Report;
use towpath_engine::queue::{Channel, Detached, Policy, Queue};
use towpath_engine::{DropReason, Engine, ForwardMode, Meta, PacketIo, Topology};
use towpath_gate::Ports;
use towpath_gate::rules::Ruleset;
use towpath_gate::{Gate, state};
use towpath_port::generator::{Description, Generator};
use towpath_port::{Burst, Port, Received};
use towpath_ring::{Decision, Loss, ReserveError, Seq, Verdict};

use super::dut::rules;

/// Number of packets per burst, and of flows. They are equal, so that a burst has few packets of one flow, as on an interface.
const BURST: usize = 250;
/// Number of distinct bursts, which repeat.
const BURSTS: usize = 8;
/// Interval between bursts in nanoseconds.
const STEP: u64 = 250_000;

/// The processing of the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// Twenty rules; the last one passes the packets.
    Rules,
    /// A state passes the packets.
    States,
    /// A state sends the packets to an inspector.
    Inspected,
    /// A state passes the packets, and a tee copies each of them.
    Teed,
}

/// The steps that callgrind counts, by name.
pub(crate) const COURSES: [(&str, Course); 4] = [
    ("engine: twenty rules", Course::Rules),
    ("engine: a state", Course::States),
    ("engine: an inspector", Course::Inspected),
    ("engine: a tee", Course::Teed),
];

/// An engine with its generator; see the module documentation.
pub(crate) struct Path {
    engine: Engine<Inside>,
    bursts: Vec<Arc<Burst>>,
    _gate: Gate,
}

/// The engine's [`PacketIo`]: a clock, and a counter of the packets that left.
struct Inside {
    now: u64,
    left: u64,
}

/// An inspector that passes every packet at the next poll.
#[derive(Default)]
struct Inspector {
    published: u32,
    answered: u32,
    bytes: u64,
}

impl Path {
    /// Creates a path and runs every burst once.
    pub(crate) fn new(course: Course) -> Result<Self> {
        let text = match course {
            Course::Rules => rules(false).replace(" keep-state", ""),
            Course::States => rules(false),
            Course::Inspected => rules(true),
            Course::Teed => format!("add tee 1 ip from any to any\n{}", rules(false)),
        };
        let ruleset = Ruleset::parse("path", &text).ruleset.map_err(|errors| anyhow!("{errors:?}"))?;
        let mut ports = Ports::new();
        let (from, to) = (ports.add("wan", Vec::new()), ports.add("lan", Vec::new()));
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
        let mut topology = Topology::none();
        topology.add(from, ForwardMode::Bridge { xmit: to, walk_out: false });
        let walker = gate.walker().context("a gate has a walker")?;
        let asked = matches!(course, Course::Inspected | Course::Teed);
        let queues = if asked { vec![Queue::new(1, Policy::default())] } else { Vec::new() };
        let inside = Inside { now: 1, left: 0 };
        let mut engine = Engine::live(inside, walker, topology, queues, Policy::default());
        if asked && engine.join(1, 1, Inspector::default()).is_err() {
            bail!("there is no queue 1");
        }
        let mut path = Self { engine, bursts: bursts()?, _gate: gate };
        path.run((BURSTS * BURST) as u32)?;
        ensure!(path.report().totals.stats.passed as usize == BURSTS * BURST, "packets are missing");
        Ok(path)
    }

    fn report(&mut self) -> Report {
        Report::of(&mut self.engine)
    }

    /// Processes `packets` packets, rounded up to whole bursts.
    pub(crate) fn run(&mut self, packets: u32) -> Result<()> {
        for burst in self.bursts.iter().cycle().take((packets as usize).div_ceil(BURST)) {
            let Ok(()) = self.engine.process_burst_borrowed(burst, |frame| Meta::received(frame, 0));
            self.engine.io_mut().now += STEP;
        }
        Ok(())
    }
}

fn bursts() -> Result<Vec<Arc<Burst>>> {
    let description = Description { flows: BURST as u32, ..Description::default() };
    let mut generator = Generator::new("gen", description);
    let mut next = || {
        let mut burst = Burst::new(BURST);
        match generator.receive(&mut burst)? {
            Received::Frames => Ok(Arc::new(burst)),
            _ => bail!("the generator ended"),
        }
    };
    (0..BURSTS).map(|_| next()).collect()
}

impl Channel for Inspector {
    fn publish(&mut self, frame: &[u8], _meta: &towpath_ring::Meta) -> Result<Seq, ReserveError> {
        self.bytes += frame.len() as u64;
        self.published += 1;
        Ok(Seq(self.published - 1))
    }

    fn lose(&mut self, _loss: Loss) {}

    fn kick(&mut self) {}

    fn poll(&mut self, _now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        let count = self.published - self.answered;
        for seq in std::mem::replace(&mut self.answered, self.published)..self.published {
            each(Seq(seq), Ok(Verdict::Pass.into()));
        }
        count as usize
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

impl PacketIo for Inside {
    type Channel = Inspector;
    type Error = Infallible;

    fn now(&mut self) -> u64 {
        self.now
    }

    fn send(&mut self, _frame: &[u8], _meta: &Meta) -> Result<(), Infallible> {
        self.left += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST, BURSTS, COURSES, Course, Path};

    #[test]
    fn every_packet_is_processed_and_sent() {
        for (name, course) in COURSES {
            let mut path = Path::new(course).unwrap();
            path.run(BURST as u32 * 3).unwrap();
            let report = path.report();
            let all = ((BURSTS + 3) * BURST) as u64;
            assert_eq!((report.totals.stats.packets, report.totals.stats.passed), (all, all), "{name}");
            let asked = matches!(course, Course::Inspected | Course::Teed);
            assert_eq!(report.totals.stats.inspected, if asked { all } else { 0 }, "{name}");
            assert_eq!(report.states.counters.created > 0, course != Course::Rules, "{name}");
            assert_eq!(path.engine.io_mut().left, all, "{name}");
        }
    }
}
