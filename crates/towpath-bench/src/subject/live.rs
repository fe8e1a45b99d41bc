//! Metrics of live ports: Towpath between two interfaces against a baseline forwarder, NFQUEUE and kernel forwarding.

use std::time::Duration;

use anyhow::Result;

use crate::live::dut::{Driver, Dut};
use crate::live::inspectors;
use crate::live::load::{self, Load};
use crate::live::topology::Topology;
use crate::metric::{Better, Metric};
use crate::peer::conntrack::Raised;
use crate::pin::Cpus;
use crate::stat::median;
use crate::subject::rows::{self, Row};

/// A row: a load through our device under test and the peer's.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) load: Load,
    pub(crate) ours: Dut,
    pub(crate) peer: Dut,
    pub(crate) target: f64,
}

/// A row of the subject.
enum LiveRow {
    Through(Case),
    Inspectors(InspectorCase),
}

/// A row about the inspectors of one engine.
struct InspectorCase {
    name: &'static str,
    what: InspectorRow,
    target: f64,
}

#[derive(Clone, Copy)]
enum InspectorRow {
    /// This quantile of the time from the kill of an inspector to the first datagram that its successor passes: one on standby, over one
    /// that is started.
    TakeOver(f64),
    /// The median of this time with one on standby, over [`TAKE_OVER`].
    TakeOverTime,
    /// The share of datagrams that arrive while inspectors are killed.
    Kills,
    /// Doorbells per datagram of many inspectors, of which one is busy, over one inspector.
    Doorbells,
    /// The same for CPU time.
    Cpu,
    /// Datagrams per second of one flow through a chain of inspectors with these delays in microseconds, over those through the slowest
    /// one alone.
    Chain(&'static [u64]),
}

/// Kills of one repetition in the rows of take-over times, and in a row.
const KILLS: usize = 20;
const KILLS_IN_A_ROW: usize = 6;
/// Time after which the engine starts an inspector that dies again at once.
const LIVED: Duration = Duration::from_millis(1100);
/// The take-over time to reach, in nanoseconds.
const TAKE_OVER: f64 = 1e6;

/// Inspectors of which one is busy.
const INSPECTORS: usize = 24;

/// Send rate of the loss test, relative to the baseline forwarder's rate.
const PACE: f64 = 0.6;

/// Measurements of each side per repetition, in alternation, each this many times shorter. A disturbance lasts longer than one of
/// them, so it affects both sides. (TCP takes the whole time in each, because iperf3 measures whole seconds.)
const TURNS: u32 = 3;

const SMALL: Load = Load::Flood { len: 64, flows: 2000 };

/// Measures and prints all rows. Returns true if every measured metric meets its target.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let cases = rows::chosen(cases(), only)?;
    rows::need_root()?;
    let cpus = Cpus::find()?;
    rows::measure(&cases, json, |row| match row {
        LiveRow::Through(case) => case.measure(cpus, time, reps),
        LiveRow::Inspectors(case) => case.measure(cpus, time, reps),
    })
}

/// The names of all rows.
pub(crate) fn names() -> Vec<String> {
    rows::names(&cases())
}

impl Row for LiveRow {
    fn name(&self) -> &str {
        match self {
            Self::Through(case) => &case.name,
            Self::Inspectors(case) => case.name,
        }
    }
}

impl InspectorCase {
    fn measure(&self, cpus: Cpus, time: Duration, reps: u32) -> Result<Metric> {
        let name = self.name;
        match self.what {
            InspectorRow::TakeOver(quantile) => {
                let (mut standby, mut started) = (Vec::new(), Vec::new());
                for _ in 0..reps {
                    standby.extend(inspectors::kills(cpus, 1, KILLS, LIVED)?.times);
                    started.extend(inspectors::kills(cpus, 0, KILLS, LIVED)?.times);
                }
                let [ours, peer] = [standby, started].map(|times| at(times, quantile) / 1e3);
                Ok(Metric::new(name, ours, peer, "us", Better::Lower, self.target))
            }
            InspectorRow::TakeOverTime => {
                let mut times = Vec::new();
                for _ in 0..reps {
                    times.extend(inspectors::kills(cpus, 1, KILLS, LIVED)?.times);
                }
                let [ours, peer] = [at(times, 0.5), TAKE_OVER].map(|time| time / 1e3);
                Ok(Metric::new(name, ours, peer, "us", Better::Lower, self.target))
            }
            InspectorRow::Kills => {
                let (mut sent, mut arrived) = (0, 0);
                for _ in 0..reps {
                    let turn = inspectors::kills(cpus, 1, KILLS_IN_A_ROW, Duration::ZERO)?;
                    sent += turn.sent;
                    arrived += turn.arrived;
                }
                let share = 100.0 * arrived as f64 / sent as f64;
                Ok(Metric::new(name, share, 100.0, "% arrive", Better::Higher, self.target))
            }
            InspectorRow::Chain(delays) => {
                let slowest = delays.iter().copied().max().unwrap_or(0);
                let (mut ours, mut peer, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
                for _ in 0..reps {
                    let (chain, alone) =
                        (inspectors::chain(cpus, delays, time)?, inspectors::chain(cpus, &[slowest], time)?);
                    ours.push(chain);
                    peer.push(alone);
                    ratios.push(chain / alone);
                }
                let (ours, peer) = (median(&ours), median(&peer));
                Ok(Metric::paired(name, ours, peer, median(&ratios), "/s", Better::Higher, self.target))
            }
            InspectorRow::Doorbells | InspectorRow::Cpu => {
                let (mut ours, mut peer, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
                for _ in 0..reps {
                    let turn = [INSPECTORS, 1].map(|count| inspectors::cost(cpus, count, time));
                    let [many, one] = turn;
                    let [many, one] = [many?, one?].map(|cost| match self.what {
                        InspectorRow::Cpu => cost.cpu / 1e3,
                        _ => cost.doorbells,
                    });
                    ours.push(many);
                    peer.push(one);
                    ratios.push(many / one);
                }
                let unit = if matches!(self.what, InspectorRow::Cpu) { "us" } else { "a packet" };
                let (ours, peer) = (median(&ours), median(&peer));
                Ok(Metric::paired(name, ours, peer, median(&ratios), unit, Better::Lower, self.target))
            }
        }
    }
}

impl Row for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

/// The value at this quantile.
fn at(mut times: Vec<f64>, quantile: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * quantile).ceil() as usize]
}

impl Case {
    pub(crate) fn measure(&self, cpus: Cpus, time: Duration, reps: u32) -> Result<Metric> {
        let _raised = match (self.peer, self.load) {
            (Dut::Conntrack, Load::Flood { flows, .. }) => Some(Raised::for_flows(flows)?),
            _ => None,
        };
        if let Load::Paced { len, flows } = self.load {
            return self.measure_paced(cpus, (len, flows), time, reps);
        }
        let time = if matches!(self.load, Load::Tcp) { time } else { time / TURNS };
        let (mut ours, mut peer, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..reps * TURNS {
            let turn = (self.through(self.ours, cpus, time)?, self.through(self.peer, cpus, time)?);
            if std::env::var_os("TURNS").is_some() {
                eprintln!("  turn {:.0} {:.0} {:.3}", turn.0, turn.1, turn.0 / turn.1);
            }
            ours.push(turn.0);
            peer.push(turn.1);
            ratios.push(turn.0 / turn.1);
        }
        let (unit, scale, better) = match self.load {
            Load::Flood { .. } | Load::Paced { .. } => ("k/s", 1e-3, Better::Higher),
            Load::Tcp => ("Gbit/s", 1e-9, Better::Higher),
            Load::RoundTrip => ("us", 1e-3, Better::Lower),
        };
        // The ratio is the median of the ratios of consecutive measurements, between which the machine's speed varies least.
        let (ours, peer) = (median(&ours) * scale, median(&peer) * scale);
        Ok(Metric::paired(&self.name, ours, peer, median(&ratios), unit, better, self.target))
    }

    /// Measures the share of sent packets that arrive.
    fn measure_paced(&self, cpus: Cpus, what: (usize, u32), time: Duration, reps: u32) -> Result<Metric> {
        let (mut sent, mut arrived) = (0, 0);
        for _ in 0..reps {
            let rate = PACE * self.through(self.peer, cpus, time)?;
            let mut topology = Topology::start(self.ours.wiring(), self.load.mtu())?;
            let _work = self.ours.start(&mut topology, cpus, self.load.mtu())?;
            let turn = load::paced(&mut topology, cpus, what, rate, time)?;
            sent += turn.0;
            arrived += turn.1;
        }
        let share = 100.0 * arrived as f64 / sent as f64;
        Ok(Metric::new(&self.name, share, 100.0, "% arrive", Better::Higher, self.target))
    }

    fn through(&self, dut: Dut, cpus: Cpus, time: Duration) -> Result<f64> {
        let mut topology = Topology::start(dut.wiring(), self.load.mtu())?;
        let _work = dut.start(&mut topology, cpus, self.load.mtu())?;
        self.load.measure(&mut topology, cpus, time)
    }
}

fn cases() -> Vec<LiveRow> {
    let towpath = |driver| Dut::Towpath { driver, park: false, inspectors: 0 };
    let baseline = |driver| Dut::BaselineFwd { driver, park: false };
    let nfqueue = Dut::Nfqueue { accept: 1, batch: 64 };
    let case =
        |name: &str, load, ours, peer, target| Case { name: name.to_owned(), load, ours, peer, target };
    let over_baseline =
        |name, load, driver, target| case(name, load, towpath(driver), baseline(driver), target);
    let mut cases = vec![
        over_baseline("AF_PACKET 64 B, over a bare bridge", SMALL, Driver::AfPacket, 0.8),
        over_baseline(
            "AF_PACKET 64 B, of what is sent at 0.6 of a bare bridge's rate",
            Load::Paced { len: 64, flows: 2000 },
            Driver::AfPacket,
            1.0,
        ),
        over_baseline("AF_XDP 64 B, over a bare bridge", SMALL, Driver::AfXdp, 0.8),
        over_baseline("TUN 64 B, over bare reads and writes", SMALL, Driver::Tun, 0.8),
        over_baseline("TUN with GSO, TCP, over bare", Load::Tcp, Driver::TunOffload, 0.8),
        over_baseline("AF_PACKET with GSO, TCP, over bare", Load::Tcp, Driver::AfPacketOffload, 0.8),
        case("AF_PACKET 64 B, over NFQUEUE", SMALL, towpath(Driver::AfPacket), nfqueue, 1.9),
        case("AF_XDP 64 B, over NFQUEUE", SMALL, towpath(Driver::AfXdp), nfqueue, 1.9),
        case("NFQUEUE port 64 B, over accept-all", SMALL, towpath(Driver::Nfqueue), nfqueue, 0.85),
        case(
            "NFQUEUE port, TCP with GSO, over accept-all",
            Load::Tcp,
            towpath(Driver::Nfqueue),
            nfqueue,
            0.85,
        ),
    ];
    for (flows, words, target) in [(2000, "2,000", 1.0), (500_000, "500,000", 1.3)] {
        let (name, load) = (format!("conntrack forwarding, {words} flows"), Load::Flood { len: 64, flows });
        cases.push(case(&name, load, towpath(Driver::AfPacket), Dut::Conntrack, target));
    }
    for (park, word) in [(false, "spinning"), (true, "parked")] {
        for (driver, name) in [(Driver::AfXdp, "AF_XDP"), (Driver::AfPacket, "AF_PACKET")] {
            cases.push(case(
                &format!("round trip {word}, {name}, over bare"),
                Load::RoundTrip,
                Dut::Towpath { driver, park, inspectors: 0 },
                Dut::BaselineFwd { driver, park },
                1.1,
            ));
        }
    }
    for (driver, name) in [(Driver::AfPacket, "AF_PACKET"), (Driver::AfXdp, "AF_XDP")] {
        for len in [64, 512, 1500, 4500, 9000, 65_000] {
            let target = if len <= 1500 { 1.6 } else { 1.3 };
            let row = format!("{name}, an inspector, {len} B, over NFQUEUE");
            cases.push(inspected(&row, driver, (len, 64), 1, target));
            if len <= 9000 {
                let row = format!("{name}, an inspector, {len} B, over a bare bridge");
                // The bare bridge of AF_XDP forwards frames of one buffer.
                let bare = if len <= 1500 { driver } else { Driver::AfPacket };
                cases.push(Case { peer: baseline(bare), ..inspected(&row, driver, (len, 64), 1, 0.9) });
            }
        }
        let name = |rest| format!("{name}, {rest}");
        cases.push(inspected(
            &name("an inspector, 64 B, over NFQUEUE, a verdict each"),
            driver,
            (64, 1),
            1,
            1.6,
        ));
        cases.push(inspected(&name("six inspectors, 1500 B, over NFQUEUE"), driver, (1500, 25), 6, 1.5));
    }
    let inspectors = [
        ("take-over after kill -9, median, standby over restart", InspectorRow::TakeOver(0.5), 1.0),
        ("take-over after kill -9, p99, standby over restart", InspectorRow::TakeOver(0.99), 1.0),
        ("take-over after kill -9, median, over a millisecond", InspectorRow::TakeOverTime, 1.0),
        ("six kills in a row with a standby, of what is sent", InspectorRow::Kills, 1.0),
        ("doorbells at 24 inspectors, one busy, over one", InspectorRow::Doorbells, 1.1),
        ("CPU at 24 inspectors, one busy, over one", InspectorRow::Cpu, 1.1),
        ("a flow through two inspectors, over the slowest", InspectorRow::Chain(&[5000, 10_000]), 0.9),
        (
            "a flow through three inspectors, over the slowest",
            InspectorRow::Chain(&[5000, 10_000, 7000]),
            0.9,
        ),
    ];
    let inspectors = inspectors.map(|(name, what, target)| InspectorCase { name, what, target });
    cases.into_iter().map(LiveRow::Through).chain(inspectors.into_iter().map(LiveRow::Inspectors)).collect()
}

/// Rows with verdicts by other processes: packets of `len` bytes; NFQUEUE decides `batch` packets at a time.
fn inspected(name: &str, driver: Driver, (len, batch): (usize, usize), inspectors: u16, target: f64) -> Case {
    Case {
        name: name.to_owned(),
        load: Load::Flood { len, flows: 2000 },
        // Parked waiting, because the processes share a CPU.
        ours: Dut::Towpath { driver, park: true, inspectors },
        peer: Dut::Nfqueue { accept: inspectors, batch },
        target,
    }
}
