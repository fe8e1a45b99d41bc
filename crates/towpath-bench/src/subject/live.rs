//! The bars of live ports: what goes through Towpath between two interfaces, beside a loop that only carries, NFQUEUE and
//! the kernel's own forwarding.

use std::time::Duration;

use anyhow::Result;

use crate::bar::{Bar, Better};
use crate::live::load::{self, Load};
use crate::live::middle::{Driver, Middle};
use crate::live::world::World;
use crate::peer::conntrack::Raised;
use crate::pin::Cpus;
use crate::stat::median;
use crate::subject::rows::{self, Row};

/// One row: a load through ours and through the peer's.
struct Case {
    name: String,
    load: Load,
    ours: Middle,
    peer: Middle,
    bar: f64,
}

/// Of a bare forwarder's rate, what is sent when nothing may be lost.
const PACE: f64 = 0.6;

/// A repetition is so many turns, as much shorter: what else the machine does lasts longer than one, and meets ours and the peer's alike. (A
/// stream has its whole time in each: iperf3 takes whole seconds.)
const TURNS: u32 = 3;

const SMALL: Load = Load::Flood { len: 64, flows: 2000 };

/// Measures and prints; whether every bar that could be measured holds.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let cases = rows::chosen(cases(), only)?;
    rows::need_root()?;
    let cpus = Cpus::find()?;
    rows::measure(&cases, json, |case| case.measure(cpus, time, reps))
}

/// The names of all rows.
pub(crate) fn names() -> Vec<String> {
    rows::names(&cases())
}

impl Row for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

impl Case {
    fn measure(&self, cpus: Cpus, time: Duration, reps: u32) -> Result<Bar> {
        let _raised = match (self.peer, self.load) {
            (Middle::Conntrack, Load::Flood { flows, .. }) => Some(Raised::for_flows(flows)?),
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
        // The machine is another one from second to second, less from one turn to the next.
        let (ours, peer) = (median(&ours) * scale, median(&peer) * scale);
        Ok(Bar::paired(&self.name, ours, peer, median(&ratios), unit, better, self.bar))
    }

    /// Packets that arrived, beside those that were sent.
    fn measure_paced(&self, cpus: Cpus, what: (usize, u32), time: Duration, reps: u32) -> Result<Bar> {
        let (mut sent, mut arrived) = (0, 0);
        for _ in 0..reps {
            let rate = PACE * self.through(self.peer, cpus, time)?;
            let mut world = World::start(self.ours.wiring(), self.load.mtu())?;
            let _work = self.ours.start(&mut world, cpus, self.load.mtu())?;
            let turn = load::paced(&mut world, cpus, what, rate, time)?;
            sent += turn.0;
            arrived += turn.1;
        }
        // How many those are says how fast the bare forwarder was.
        let share = 100.0 * arrived as f64 / sent as f64;
        Ok(Bar::new(&self.name, share, 100.0, "% arrive", Better::Higher, self.bar))
    }

    fn through(&self, middle: Middle, cpus: Cpus, time: Duration) -> Result<f64> {
        let mut world = World::start(middle.wiring(), self.load.mtu())?;
        let _work = middle.start(&mut world, cpus, self.load.mtu())?;
        self.load.measure(&mut world, cpus, time)
    }
}

fn cases() -> Vec<Case> {
    let towpath = |driver| Middle::Towpath { driver, park: false, inspectors: 0 };
    let bare = |driver| Middle::Bare { driver, park: false };
    let nfqueue = Middle::Nfqueue { accept: 1, batch: 64 };
    let case = |name: &str, load, ours, peer, bar| Case { name: name.to_owned(), load, ours, peer, bar };
    let over_bare = |name, load, driver, bar| case(name, load, towpath(driver), bare(driver), bar);
    let mut cases = vec![
        over_bare("AF_PACKET 64 B, over a bare bridge", SMALL, Driver::AfPacket, 0.8),
        over_bare(
            "AF_PACKET 64 B, of what is sent at 0.6 of a bare bridge's rate",
            Load::Paced { len: 64, flows: 2000 },
            Driver::AfPacket,
            1.0,
        ),
        over_bare("AF_XDP 64 B, over a bare bridge", SMALL, Driver::AfXdp, 0.8),
        over_bare("TUN 64 B, over bare reads and writes", SMALL, Driver::Tun, 0.8),
        over_bare("TUN with GSO, TCP, over bare", Load::Tcp, Driver::TunOffload, 0.8),
        over_bare("AF_PACKET with GSO, TCP, over bare", Load::Tcp, Driver::AfPacketOffload, 0.8),
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
    for (flows, words, bar) in [(2000, "2,000", 1.0), (500_000, "500,000", 1.3)] {
        let (name, load) = (format!("conntrack forwarding, {words} flows"), Load::Flood { len: 64, flows });
        cases.push(case(&name, load, towpath(Driver::AfPacket), Middle::Conntrack, bar));
    }
    for (park, word) in [(false, "spinning"), (true, "parked")] {
        for (driver, name) in [(Driver::AfXdp, "AF_XDP"), (Driver::AfPacket, "AF_PACKET")] {
            cases.push(case(
                &format!("round trip {word}, {name}, over bare"),
                Load::RoundTrip,
                Middle::Towpath { driver, park, inspectors: 0 },
                Middle::Bare { driver, park },
                1.1,
            ));
        }
    }
    for (driver, name) in [(Driver::AfPacket, "AF_PACKET"), (Driver::AfXdp, "AF_XDP")] {
        for len in [64, 512, 1500, 4500, 9000, 65_000] {
            let bar = if len == 64 { 1.6 } else { 1.3 };
            let name = format!("{name}, an inspector, {len} B, over NFQUEUE");
            cases.push(inspected(&name, driver, (len, 64), 1, bar));
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
    cases
}

/// Packets of `len` bytes that other processes decide: NFQUEUE's `batch` at a time.
fn inspected(name: &str, driver: Driver, (len, batch): (usize, usize), inspectors: u16, bar: f64) -> Case {
    Case {
        name: name.to_owned(),
        load: Load::Flood { len, flows: 2000 },
        // Parked, as those who share a CPU are.
        ours: Middle::Towpath { driver, park: true, inspectors },
        peer: Middle::Nfqueue { accept: inspectors, batch },
        bar,
    }
}
