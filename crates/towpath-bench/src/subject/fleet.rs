//! Metrics of a group of gates: replication, snapshots, connections whose gate is killed, and tables. The peer of a row is a fixed bound, except for
//! instructions.

use std::time::Duration;

use anyhow::Result;
use clap::Parser;

use crate::fleet::{member, packets, remote, tables, take_over};
use crate::metric::{Better, Metric};
use crate::stat::median;
use crate::subject::instructions;
use crate::subject::rows::{self, Row};

/// New states a second: the bound, and what is offered.
const RATE: f64 = 200_000.0;
const OFFERED: f64 = 220_000.0;

/// The bound of a snapshot in seconds for this number of states.
const BULK: f64 = 10.0;
const BULK_STATES: f64 = 5e6;

/// The bound of a list in seconds for this number of entries, and that of one entry in ms.
const LIST: f64 = 10.0;
const LIST_ENTRIES: f64 = 1e6;
const ENTRY: f64 = 50.0;
/// The work in us from which a remote worker must be worth it.
const WORTH: f64 = 500.0;

/// Flows of which instructions are counted.
const FLOWS: u32 = 2000;

/// The shortest retransmission timeout of Linux (TCP_RTO_MIN, include/net/tcp.h) in ms: with a longer wait, a segment was lost.
const RTO: f64 = 200.0;

/// Benchmark a group of gates: replication, snapshots, connections whose gate is killed, and tables
///
/// Each measurement starts a nats-server on loopback. The command creates temporary network namespaces, which needs root, `ip` and
/// `nats-server`; instructions need valgrind. Expects a `towpath` binary with the feature `fleet` in the directory of this program. The peer
/// of a row is a fixed bound. Exits with 0 if every measured metric meets its target, else with 1.
#[derive(Debug, Parser)]
pub(crate) struct Fleet {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement of a rate
    #[arg(long, value_name = "N", default_value = "5", value_parser = crate::seconds)]
    seconds: Duration,

    /// Number of repetitions
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// States of the snapshot
    #[arg(long, value_name = "N", default_value = "5000000", value_parser = clap::value_parser!(u32).range(1000..=50_000_000))]
    states: u32,

    /// Entries of the list of a table
    #[arg(long, value_name = "N", default_value = "1000000", value_parser = clap::value_parser!(u32).range(1000..=4_000_000))]
    entries: u32,

    /// TCP connections whose gate is killed
    #[arg(long, value_name = "N", default_value = "10000", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    connections: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

#[derive(Clone, Copy)]
enum What {
    Rate,
    Lag,
    Bulk,
    Instructions,
    Continued,
    Outage,
    Planned,
    Load,
    Entry,
    RoundTrip,
    Crossing,
}

struct Case {
    name: String,
    what: What,
}

impl Row for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

/// Measures and prints all rows. Returns true if every measured metric meets its target.
pub(crate) fn run(args: &Fleet) -> Result<bool> {
    let cases = rows::chosen(cases(), args.only.as_deref())?;
    rows::need_root()?;
    rows::measure(&cases, args.json, |case| case.measure(args))
}

/// The names of all rows.
pub(crate) fn names() -> Vec<String> {
    rows::names(&cases())
}

fn cases() -> Vec<Case> {
    let case = |name: &str, what| Case { name: format!("fleet: {name}"), what };
    vec![
        case("new states a second", What::Rate),
        case("lag, 99%, with 200,000 states a second", What::Lag),
        case("snapshot, per 5M states", What::Bulk),
        case("instructions per packet", What::Instructions),
        case("killed: connections that continue", What::Continued),
        case("killed: outage after the routes changed", What::Outage),
        case("planned: longest wait", What::Planned),
        case("table: list at two gates, per 1M entries", What::Load),
        case("table: one entry at the other gate, 99%", What::Entry),
        case("remote worker: round trip, over request and reply of NATS", What::RoundTrip),
        case("remote worker: work per message from which it is worth it", What::Crossing),
    ]
}

impl Case {
    fn measure(&self, args: &Fleet) -> Result<Metric> {
        let Fleet { seconds: time, reps, states, .. } = *args;
        let connections = args.connections as usize;
        let of = |measure: &dyn Fn() -> Result<f64>| -> Result<f64> {
            Ok(median(&(0..reps).map(|_| measure()).collect::<Result<Vec<_>>>()?))
        };
        let row =
            |ours, peer, unit, better, target| Metric::new(&self.name, ours, peer, unit, better, target);
        let lower = |ours, peer, unit| row(ours, peer, unit, Better::Lower, 1.0);
        Ok(match self.what {
            What::Rate => row(of(&|| member::rate(OFFERED, time))?, RATE, "states/s", Better::Higher, 1.0),
            What::Lag => lower(of(&|| member::lag(RATE, time))?, 20.0, "ms"),
            What::Bulk => {
                let share = f64::from(states) / BULK_STATES;
                lower(of(&|| member::bulk(states))? / share, BULK, "s")
            }
            What::Instructions => {
                let [with, without] = [count(true)?, count(false)?];
                row(with, without, "each", Better::Lower, 1.05)
            }
            What::Continued => {
                let share = of(&|| Ok(take_over::measure(connections, true)?.continued))?;
                row(share * 100.0 / connections as f64, 99.99, "%", Better::Higher, 1.0)
            }
            What::Outage => lower(of(&|| Ok(take_over::measure(connections, true)?.longest))?, 1000.0, "ms"),
            What::Load => {
                let share = f64::from(args.entries) / LIST_ENTRIES;
                lower(of(&|| tables::load(args.entries))? / share, LIST, "s")
            }
            What::Entry => lower(of(&tables::entry)?, ENTRY, "ms"),
            What::RoundTrip => {
                let [ours, peer] = [of(&|| remote::round_trip(time))?, of(&|| remote::request_reply(time))?];
                row(ours, peer, "us", Better::Lower, 1.3)
            }
            What::Crossing => lower(of(&|| remote::crossing(time))?, WORTH, "us"),
            What::Planned => lower(of(&|| Ok(take_over::measure(connections, false)?.longest))?, RTO, "ms"),
        })
    }
}

/// Counts the instructions per packet of a walk.
fn count(replicated: bool) -> Result<f64> {
    let side = |flows: u32| {
        instructions::instructions(&["fleet-packets", &replicated.to_string(), &flows.to_string()])
    };
    Ok((side(2 * FLOWS)? - side(FLOWS)?) / f64::from(FLOWS * packets::PACKETS))
}
