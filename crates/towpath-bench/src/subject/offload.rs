//! Metrics of flow offload: an engine whose kernel forwards the packets of decided flows, against the kernel's bridge, a bare tc redirect, the
//! engine without offload, and NFQUEUE. The engine's sockets are open in all rows.
//!
//! The CPU time for a packet is that of both CPUs at a fixed rate, less that of the same sender into XDP_DROP: the kernel charges the
//! receive processing of a virtual link to the sender.

use std::time::Duration;

use anyhow::Result;

use crate::live::dut::{Driver, Dut, REDIRECTED};
use crate::live::load::{self, Load};
use crate::live::offload_times::{self, Reload};
use crate::live::topology::Topology;
use crate::metric::{Better, Metric};
use crate::pin::Cpus;
use crate::stat::median;
use crate::subject::live::Case;
use crate::subject::rows::{self, Row};

/// A row of the subject.
enum OffloadRow {
    Through(Case),
    Cpu(CpuCase),
    Time(&'static str, TimeCase),
}

/// A row about a time, or about what happens meanwhile.
#[derive(Clone, Copy)]
enum TimeCase {
    /// The 99th percentile from an inspector's verdict for a flow until the kernel's map has the flow, over [`VERDICT`].
    Verdict,
    /// The packets that arrive during a reload with 100,000 flows, over those that were sent.
    ReloadLoss,
    /// The time from the answer to a change of rules with 100,000 flows until the last packet that they deny arrives, over [`RELOAD`].
    Reload,
}

/// A row about the CPU time for a packet of 64 bytes: a device under test with a number of flows, over another one.
struct CpuCase {
    name: &'static str,
    ours: (Dut, u32),
    peer: (Dut, u32),
    target: f64,
}

/// Packets per second: less than the slowest device under test forwards.
const RATE: u64 = 200_000;
const SMALL: usize = 64;
/// Sources of a flood, all of the generator, from a table of [`DENIED`](crate::live::dut::DENIED) addresses.
const SOURCES: u32 = 65_536;
/// The times to reach, in nanoseconds.
const VERDICT: f64 = 1e6;
const RELOAD: f64 = 1e7;
/// Flows of one repetition of [`TimeCase::Verdict`].
const VERDICTS: u16 = 100;

/// CPU time is measured for this many times the duration of other rows: its unit is 10 ms.
const CPU_TIMES: u32 = 8;

impl Row for OffloadRow {
    fn name(&self) -> &str {
        match self {
            Self::Through(case) => case.name(),
            Self::Cpu(case) => case.name,
            Self::Time(name, _) => name,
        }
    }
}

impl TimeCase {
    fn measure(self, name: &str, cpus: Cpus, reps: u32) -> Result<Metric> {
        if let Self::Verdict = self {
            let mut times = Vec::new();
            for _ in 0..reps {
                times.extend(offload_times::verdicts(cpus, VERDICTS)?);
            }
            times.sort_unstable();
            let p99 = times[times.len() * 99 / 100] as f64;
            return Ok(Metric::new(name, p99, VERDICT, "ns", Better::Lower, 1.0));
        }
        let all = (0..reps).map(|_| offload_times::reload(cpus)).collect::<Result<Vec<_>>>()?;
        if let Self::ReloadLoss = self {
            let sum = |of: fn(&Reload) -> u64| all.iter().map(of).sum::<u64>() as f64;
            let (arrived, sent) = (sum(|reload| reload.arrived), sum(|reload| reload.sent));
            return Ok(Metric::new(name, arrived, sent, "packets", Better::Higher, 1.0));
        }
        let longest = all.iter().map(|reload| reload.late).max().unwrap_or_default() as f64;
        Ok(Metric::new(name, longest, RELOAD, "ns", Better::Lower, 1.0))
    }
}

impl CpuCase {
    fn measure(&self, cpus: Cpus, time: Duration, reps: u32) -> Result<Metric> {
        let cost = |(dut, flows): (Dut, u32)| {
            let mut topology = Topology::start(dut.wiring(), 1500)?;
            let _work = dut.start(&mut topology, cpus, 1500)?;
            load::cpu_time(&mut topology, cpus, (SMALL, flows), RATE, time * CPU_TIMES)
        };
        let (mut ours, mut peer, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..reps {
            // The sender's costs depend on the number of its flows.
            let turn =
                [self.ours, self.peer].map(|of| Ok::<_, anyhow::Error>(cost(of)? - cost((Dut::Drop, of.1))?));
            let [own, other] = turn;
            let (own, other) = (own?, other?);
            ours.push(own);
            peer.push(other);
            ratios.push(own / other);
        }
        let (ours, peer) = (median(&ours), median(&peer));
        Ok(Metric::paired(self.name, ours, peer, median(&ratios), "ns", Better::Lower, self.target))
    }
}

/// Measures and prints all rows. Returns true if every measured metric meets its target.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let cases = rows::chosen(cases(), only)?;
    rows::need_root()?;
    let cpus = Cpus::find()?;
    rows::measure(&cases, json, |row| match row {
        OffloadRow::Through(case) => case.measure(cpus, time, reps),
        OffloadRow::Cpu(case) => case.measure(cpus, time, reps),
        OffloadRow::Time(name, case) => case.measure(name, cpus, reps),
    })
}

/// The names of all rows.
pub(crate) fn names() -> Vec<String> {
    rows::names(&cases())
}

fn cases() -> Vec<OffloadRow> {
    let towpath = |driver| Dut::Towpath { driver, park: true, inspectors: 0 };
    let nfqueue = Dut::Nfqueue { accept: 1, batch: 64 };
    let small = |flows| Load::Flood { len: SMALL, flows };
    let case = |name: &str, load, peer, target| Case {
        name: name.to_owned(),
        load,
        ours: towpath(Driver::AfPacketFlows),
        peer,
        target,
    };
    let cases = vec![
        case("offload, TCP, over the kernel's bridge", Load::Tcp, Dut::Bridge, 1.0),
        case("offload, TCP, over a bare tc redirect", Load::Tcp, Dut::Redirect, 0.9),
        case("offload, TCP, over the engine without it", Load::Tcp, towpath(Driver::AfPacketOffload), 2.0),
        case("offload, TCP, over NFQUEUE", Load::Tcp, nfqueue, 1.4),
        case("offload, 64 B, over the kernel's bridge", small(2000), Dut::Bridge, 0.9),
        case("offload, 64 B, over a bare tc redirect", small(2000), Dut::Redirect, 0.9),
        case("offload, 64 B, over the engine without it", small(2000), towpath(Driver::AfPacket), 1.4),
    ];
    let flows = towpath(Driver::AfPacketFlows);
    let many = towpath(Driver::AfPacketManyFlows);
    let cpu = |name, ours, peer, target| CpuCase { name, ours, peer, target };
    let cpu_cases = [
        cpu(
            "offload, 64 B, CPU, over a bare tc redirect",
            (flows, REDIRECTED),
            (Dut::RedirectFlows, REDIRECTED),
            1.1,
        ),
        cpu(
            "offload, 64 B, CPU, over the engine's AF_XDP",
            (flows, 1000),
            (towpath(Driver::AfXdp), 1000),
            0.7,
        ),
        cpu(
            "offload, XDP, 64 B, CPU, over a bare XDP redirect",
            (towpath(Driver::AfXdpFlows), REDIRECTED),
            (Dut::RedirectXdp, REDIRECTED),
            1.1,
        ),
        cpu(
            "offload, XDP, 64 B, CPU, over the engine's AF_XDP",
            (towpath(Driver::AfXdpFlows), 1000),
            (towpath(Driver::AfXdp), 1000),
            0.7,
        ),
        cpu(
            "offload, XDP, 64 B, CPU, blocked, over a bare XDP drop",
            (towpath(Driver::AfXdpBlocked), REDIRECTED),
            (Dut::DropXdp, REDIRECTED),
            1.1,
        ),
        cpu(
            "offload, XDP, 64 B, CPU, denied by a table, over a bare XDP drop",
            (towpath(Driver::AfXdpDenied), SOURCES),
            (Dut::DropSourcesXdp, SOURCES),
            1.1,
        ),
        cpu("offload, 64 B, CPU, 1M entries over 1,000", (many, 500_000), (many, 500), 2.5),
    ];
    let time_cases = [
        ("offload, a verdict's way into the map, p99", TimeCase::Verdict),
        ("offload, reload of 100,000 flows, packets", TimeCase::ReloadLoss),
        ("offload, new rules for 100,000 flows, time", TimeCase::Reload),
    ];
    let cases = cases.into_iter().map(OffloadRow::Through);
    let cpu_cases = cpu_cases.into_iter().map(OffloadRow::Cpu);
    let time_cases = time_cases.into_iter().map(|(name, case)| OffloadRow::Time(name, case));
    cases.chain(cpu_cases).chain(time_cases).collect()
}
