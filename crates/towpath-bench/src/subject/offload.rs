//! Metrics of flow offload: an engine whose kernel forwards the packets of decided flows, against the kernel's bridge, a bare tc redirect, the
//! engine without offload, and NFQUEUE. The engine's sockets are open in all rows.

use std::time::Duration;

use anyhow::Result;

use crate::live::dut::{Driver, Dut};
use crate::live::load::Load;
use crate::pin::Cpus;
use crate::subject::live::Case;
use crate::subject::rows;

/// Measures and prints all rows. Returns true if every measured metric meets its target.
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

fn cases() -> Vec<Case> {
    let towpath = |driver| Dut::Towpath { driver, park: true, inspectors: 0 };
    let nfqueue = Dut::Nfqueue { accept: 1, batch: 64 };
    let small = |flows| Load::Flood { len: 64, flows };
    let case = |name: &str, load, peer, target| Case {
        name: name.to_owned(),
        load,
        ours: towpath(Driver::AfPacketFlows),
        peer,
        target,
    };
    vec![
        case("offload, TCP, over the kernel's bridge", Load::Tcp, Dut::Bridge, 1.0),
        case("offload, TCP, over a bare tc redirect", Load::Tcp, Dut::Redirect, 0.9),
        case("offload, TCP, over the engine without it", Load::Tcp, towpath(Driver::AfPacketOffload), 2.0),
        case("offload, TCP, over NFQUEUE", Load::Tcp, nfqueue, 1.4),
        case("offload, 64 B, over the kernel's bridge", small(2000), Dut::Bridge, 0.9),
        case("offload, 64 B, over a bare tc redirect", small(2000), Dut::Redirect, 0.9),
        case("offload, 64 B, over the engine without it", small(2000), towpath(Driver::AfPacket), 1.4),
    ]
}
