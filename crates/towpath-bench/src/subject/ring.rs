//! Metrics of the ring: our figure and that of a peer or raw limit, alternating, in one run.

use std::time::Duration;

use anyhow::Result;
use towpath_ring::Config;

use crate::engine;
use crate::metric::{Better, Metric};
use crate::peer::{iceoryx, nfqueue, seqpacket};
use crate::pin::Cpus;
use crate::raw;
use crate::stat::median;
use crate::subject::rows::{self, Row};

/// Parameters common to all measurements.
#[derive(Debug, Clone, Copy)]
struct Setting {
    cpus: Cpus,
    time: Duration,
}

type Measure = Box<dyn Fn(Setting) -> Result<f64>>;

struct Case {
    name: String,
    unit: &'static str,
    better: Better,
    target: f64,
    ours: Measure,
    peer: Measure,
}

impl Case {
    fn new(
        name: impl Into<String>,
        unit: &'static str,
        (better, target): (Better, f64),
        ours: impl Fn(Setting) -> Result<f64> + 'static,
        peer: impl Fn(Setting) -> Result<f64> + 'static,
    ) -> Self {
        Self { name: name.into(), unit, better, target, ours: Box::new(ours), peer: Box::new(peer) }
    }

    fn measure(&self, setting: Setting, reps: u32) -> Result<Metric> {
        let (mut ours, mut peer) = (Vec::new(), Vec::new());
        for _ in 0..reps {
            peer.push((self.peer)(setting)?);
            ours.push((self.ours)(setting)?);
        }
        Ok(Metric::new(&self.name, median(&ours), median(&peer), self.unit, self.better, self.target))
    }
}

/// Measures and prints all rows. Returns true if every measured metric meets its target.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let setting = Setting { cpus: Cpus::find()?, time };
    rows::measure(&rows::chosen(cases(), only)?, json, |case| case.measure(setting, reps))
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

/// The rows of the ring that need no live port; this crate's README.md describes them.
///
/// In every row, a message is visible as soon as it is published. "One at a time" checks for a sleeping consumer after each message; the
/// other rows check after a batch or burst. All consumers, including the peers', read every byte.
fn cases() -> Vec<Case> {
    use Better::{Higher, Lower};
    let mut cases = vec![
        Case::new(
            "round trip 64 B, over a cache line",
            "ns",
            (Lower, 3.0),
            |s| engine::round_trip(s.cpus, s.time, 64),
            |s| raw::ping_pong(s.cpus, s.time),
        ),
        Case::new(
            "round trip 64 B, over iceoryx2",
            "ns",
            (Lower, 1.0),
            |s| engine::round_trip(s.cpus, s.time, 64),
            |s| iceoryx::round_trip(s.cpus, s.time, 64),
        ),
        Case::new(
            "64 B one at a time, over iceoryx2",
            "/s",
            (Higher, 8.0),
            |s| rate(s, engine::Load::one(64, 1)),
            |s| iceoryx::rate(s.cpus, s.time, 64, true),
        ),
        Case::new(
            "64 B batches of 32, over seqpacket",
            "/s",
            (Higher, 12.0),
            |s| rate(s, engine::Load::one(64, 32)),
            |s| seqpacket::rate(s.cpus, s.time, 64, 32),
        ),
        Case::new(
            "1500 B payload read, over iceoryx2",
            "/s",
            (Higher, 5.0),
            |s| rate(s, engine::Load::one(1500, engine::BURST)),
            |s| iceoryx::rate(s.cpus, s.time, 1500, true),
        ),
        Case::new(
            "64 KiB bytes, over one core's memcpy",
            "B/s",
            (Higher, 0.5),
            |s| Ok(rate(s, engine::Load::one(LARGE, engine::BURST))? * LARGE as f64),
            |s| raw::memcpy(s.cpus, s.time, LARGE, Config::default().rx.bytes()),
        ),
        Case::new(
            "packet to verdict 64 B, over NFQUEUE",
            "/s",
            (Higher, 8.0),
            |s| rate(s, engine::Load::one(64, 32)),
            |s| nfqueue::rate(s.cpus, s.time, one_nfqueue(64)),
        ),
        Case::new(
            "six inspectors 1500 B, over NFQUEUE",
            "B/s",
            (Higher, 1.5),
            |s| Ok(rate(s, engine::Load { len: 1500, publish: 32, inspectors: 6, batch: 25 })? * 1500.0),
            |s| {
                Ok(nfqueue::rate(s.cpus, s.time, nfqueue::Load { len: 1500, consumers: 6, batch: 25 })?
                    * 1500.0)
            },
        ),
        Case::new(
            "wake-up of a parked consumer, over eventfd",
            "ns",
            (Lower, 1.3),
            |s| engine::wake(s.cpus, s.time),
            |s| raw::eventfd_wake(s.cpus, s.time),
        ),
        // The peer has one wake-up per message, as a socket has.
        Case::new(
            "wake-ups per message at saturation",
            "each",
            (Lower, 0.01),
            |s| Ok(engine::throughput(s.cpus, s.time, engine::Load::one(64, 1))?.wakeups),
            |_| Ok(1.0),
        ),
    ];
    for len in [64, 512, 1500, 4500, 9000, 65_536] {
        cases.push(Case::new(
            format!("packet to verdict {len} B, size sweep"),
            "/s",
            (Higher, 1.3),
            move |s| rate(s, engine::Load::one(len, 32)),
            move |s| nfqueue::rate(s.cpus, s.time, one_nfqueue(len)),
        ));
    }
    cases
}

const LARGE: usize = 64 << 10;

fn rate(setting: Setting, load: engine::Load) -> Result<f64> {
    Ok(engine::throughput(setting.cpus, setting.time, load)?.rate)
}

fn one_nfqueue(len: usize) -> nfqueue::Load {
    nfqueue::Load { len, consumers: 1, batch: 64 }
}
