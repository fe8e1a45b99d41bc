//! Metrics of the state table, each against a peer, a raw limit, or the same table at another size.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use towpath_gate::state::Pages;

use crate::flows::{BURST, Family, Load, RulesLoad, Work};
use crate::memory;
use crate::metric::{Better, Metric};
use crate::peer::{conntrack, maps};
use crate::pin::{self, Cpus};
use crate::stat::median;
use crate::subject::rows::{self, Row};
use crate::subject::{gate_changes, gate_saves};

const FEW: u32 = 2000;
const MANY: u32 = 5_000_000;

/// Target for (misses/s) / (hits/s): 1.3 x 0.75, rounded. 0.75 is this ratio for an index that reads both cache lines of a flow on
/// a miss.
const MISSES: f64 = 1.0;

/// Parameters common to all measurements.
#[derive(Debug, Clone, Copy)]
struct Setting {
    cpus: Cpus,
    time: Duration,
    reps: u32,
}

type Measure = Box<dyn Fn(&str, Setting) -> Result<Metric>>;

/// A row: its name and its measurement.
struct Case {
    name: String,
    measure: Measure,
}

impl Case {
    fn new(name: impl Into<String>, measure: impl Fn(&str, Setting) -> Result<Metric> + 'static) -> Self {
        Self { name: name.into(), measure: Box::new(measure) }
    }
}

/// Measures and prints all rows. Returns true if every measured metric meets its target.
pub(crate) fn run(json: bool, time: Duration, reps: u32, only: Option<&str>) -> Result<bool> {
    let setting = Setting { cpus: Cpus::find()?, time, reps };
    rows::measure(&rows::chosen(cases(), only)?, json, |case| (case.measure)(&case.name, setting))
}

impl Row for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        let named = |what: &str| if family == Family::V6 { format!("IPv6: {what}") } else { what.to_owned() };
        cases.extend([
            Case::new(named("lookups at 5M over 2k, bursts"), move |name, s| {
                let (mut many, mut few) = (load(s, family, MANY)?, load(s, family, FEW)?);
                let ours = |s: Setting| many.rate(Work::Lookup, true, s.time);
                beside(name, s, 0.25, ours, |s| few.rate(Work::Lookup, true, s.time))
            }),
            Case::new(named("lookups at 5M over 2k, one by one"), move |name, s| {
                let (mut many, mut few) = (load(s, family, MANY)?, load(s, family, FEW)?);
                let ours = |s: Setting| many.rate(Work::Lookup, false, s.time);
                beside(name, s, 0.12, ours, |s| few.rate(Work::Lookup, false, s.time))
            }),
            Case::new(named("full path at 5M, bursts over one by one"), move |name, s| {
                let mut load = load(s, family, MANY)?;
                let mut other = load.worker(2, 0, MANY).context("no room for another worker")?;
                let ours = |s: Setting| load.rate(Work::FullPath, true, s.time);
                beside(name, s, 2.2, ours, |s| other.rate(Work::FullPath, false, s.time))
            }),
        ]);
    }
    cases.extend([
        Case::new("bursts at 5M over the fastest map, huge pages", |name, s| {
            let mut load = load(s, Family::V4, MANY)?;
            let ours = |s: Setting| load.rate(Work::Lookup, true, s.time);
            beside(name, s, 2.2, ours, |s| fastest_map(s, true))
        }),
        Case::new("bursts at 5M over the fastest map, 4 KiB pages", |name, s| {
            pin::to(s.cpus.engine)?;
            let mut load = Load::new(Family::V4, MANY, Pages::Base)?;
            let ours = |s: Setting| load.rate(Work::Lookup, true, s.time);
            beside(name, s, 1.8, ours, |s| fastest_map(s, false))
        }),
        Case::new("bursts at 5M over half the rate of random cache-line reads", |name, s| {
            let mut load = load(s, Family::V4, MANY)?;
            let ours = |s: Setting| load.rate(Work::Lookup, true, s.time);
            // The states and the cache lines of the index.
            let bytes = (MANY as usize + (1 << 20)) * 64;
            beside(name, s, 0.95, ours, move |s| Ok(memory::random_reads(bytes, s.time)? / 2.0))
        }),
        Case::new("full path at 2k, bursts, over 50 M/s", |name, s| {
            let mut load = load(s, Family::V4, FEW)?;
            beside(name, s, 1.0, |s| load.rate(Work::FullPath, true, s.time), |_| Ok(50e6))
        }),
        Case::new("full path at 2k with 20 rules, states first, over 30 M/s", |name, s| {
            pin::to(s.cpus.engine)?;
            let mut load = RulesLoad::new(FEW)?;
            beside(name, s, 1.0, |s| load.rate(s.time), |_| Ok(30e6))
        }),
        Case::new("p99.9 of a burst while 1M grow to 8M", growth),
        Case::new("lookups at 1M beside 1M/s installs and ends", churn),
        Case::new("misses over lookups at 5M, bursts", |name, s| {
            let mut load = load(s, Family::V4, MANY)?;
            let mut misses = load.worker(7, MANY, MANY).context("no room for another worker")?;
            let ours = |s: Setting| misses.misses(s.time);
            beside(name, s, MISSES, ours, |s| load.rate(Work::Lookup, true, s.time))
        }),
        Case::new("states with a limit, two threads over one", |name, s| {
            let (both, one) = gate_changes::install_states(s.cpus, true, s.time, s.reps)?;
            Ok(Metric::new(name, both, one, "/s", Better::Higher, 1.7))
        }),
        // What the machine permits, for comparison.
        Case::new("states without a limit, two threads over one", |name, s| {
            let (both, one) = gate_changes::install_states(s.cpus, false, s.time, s.reps)?;
            Ok(Metric::new(name, both, one, "/s", Better::Higher, 1.7))
        }),
        Case::new("a table entry at 1M entries over 100", |name, s| {
            let (many, late, rest) = gate_changes::table_entry(s.cpus, s.time, 1_000_000)?;
            let (few, ..) = gate_changes::table_entry(s.cpus, s.time, 100)?;
            eprintln!("{name}: 99.9% of a walker's bursts take {late:.0} ns beside the changes, {rest:.0} ns at rest");
            Ok(Metric::new(name, many, few, "ns", Better::Lower, 3.0))
        }),
        Case::new("p99.9 of a burst while entries change, 1M entries", |name, s| {
            let (_, late, rest) = gate_changes::table_entry(s.cpus, s.time, 1_000_000)?;
            Ok(Metric::new(name, late, rest, "ns", Better::Lower, 10.0))
        }),
        Case::new("p99.9 of a burst while 5M states are saved", |name, s| {
            let (late, rest) = gate_saves::bursts(s.cpus, s.time, MANY)?;
            Ok(Metric::new(name, late, rest, "ns", Better::Lower, 10.0))
        }),
        Case::new("outage of a killed bridge, 10k states, over 50 ms", |name, s| {
            let times: Result<Vec<f64>> = (0..s.reps).map(|_| gate_saves::outage(s.cpus, 10_000)).collect();
            Ok(Metric::new(name, median(&times?), 50.0, "ms", Better::Lower, 1.0))
        }),
        Case::new("outage of a killed bridge, 5M states, over 90 s", |name, s| {
            let time = gate_saves::outage(s.cpus, MANY)?;
            Ok(Metric::new(name, time, 90_000.0, "ms", Better::Lower, 1.0))
        }),
        Case::new("restore after a kill, 10k states, over 50 ms", |name, s| {
            let time = gate_saves::restore(s.cpus, s.reps, 10_000)?;
            Ok(Metric::new(name, time, 50.0, "ms", Better::Lower, 1.0))
        }),
        // Reported; the target is the time in which a supervisor gives a start up (systemd: TimeoutStartSec=90s).
        Case::new("restore after a kill, 5M states, over 90 s", |name, s| {
            let time = gate_saves::restore(s.cpus, s.reps, MANY)?;
            Ok(Metric::new(name, time, 90_000.0, "ms", Better::Lower, 1.0))
        }),
        Case::new("lookups of crafted flows over others, 1M flows", |name, s| {
            let (mut crafted, mut others) =
                (load(s, Family::Crafted, 1_000_000)?, load(s, Family::V4, 1_000_000)?);
            let ours = |s: Setting| crafted.rate(Work::Lookup, true, s.time);
            beside(name, s, 0.5, ours, |s| others.rate(Work::Lookup, true, s.time))
        }),
        Case::new("bytes per IPv4 state at 5M", |name, s| {
            pin::to(s.cpus.engine)?;
            let before = memory::resident()?;
            let mut load = Load::filled(Family::V4, MANY, Pages::Base)?;
            // Frees the old index after the migration of its flows.
            load.states.prepare();
            let each =
                |load: &Load| anyhow::Ok((memory::resident()? - before) as f64 / load.states.len() as f64);
            let bytes = each(&load)?;
            load.settle();
            eprintln!("{name}: {:.1} with memory prepared for a million more", each(&load)?);
            Ok(Metric::new(name, bytes, 92.0, "B", Better::Lower, 1.0))
        }),
    ]);
    for (flows, target) in [(FEW, 1.0 / 18.0), (500_000, 1.0 / 25.0)] {
        let name = format!("full path over what conntrack adds, {} flows", size(flows));
        cases.push(Case::new(name, move |name, s| {
            // Our side first: `conntrack::added` sends packet floods in network namespaces; the kernel removes those afterwards,
            // which would disturb our measurement.
            let mut load = load(s, Family::V4, flows)?;
            // The cost of packet generation is subtracted from our side. The peer's figure (time with conntrack minus time
            // without) excludes the cost of sending in the same way.
            let mut nanos = |work| Ok::<_, anyhow::Error>(1e9 / load.rate(work, true, s.time)?);
            let ours: Result<Vec<f64>> =
                (0..s.reps).map(|_| Ok(nanos(Work::FullPath)? - nanos(Work::Packets)?)).collect();
            let ours = median(&ours?);
            drop(load);
            let theirs = conntrack::added(s.cpus.engine, flows, s.time, s.reps)?;
            Ok(Metric::new(name, ours, theirs, "ns", Better::Lower, target))
        }));
    }
    for (flows, family, both, target) in [
        (MANY, Family::V4, false, 1.9),
        (1_000_000, Family::V4, false, 1.9),
        (100_000, Family::V4, false, 1.7),
        (FEW, Family::V4, false, 1.9),
        (FEW, Family::V4, true, 1.4),
        (1_000_000, Family::V6, false, 1.9),
        (FEW, Family::V6, true, 1.4),
    ] {
        let how = if both { "the same flows" } else { "each its own" };
        let six = if family == Family::V6 { "IPv6: " } else { "" };
        cases.push(Case::new(
            format!("{six}two threads over one, {} flows, {how}", size(flows)),
            move |name, s| two_threads(name, s, family, flows, both, target),
        ));
    }
    for flows in [64, FEW, 100_000, 1_000_000, MANY] {
        cases.push(Case::new(format!("IPv6 over IPv4 lookups, {} flows", size(flows)), move |name, s| {
            let (mut six, mut four) = (load(s, Family::V6, flows)?, load(s, Family::V4, flows)?);
            let ours = |s: Setting| six.rate(Work::Lookup, true, s.time);
            beside(name, s, 0.7, ours, |s| four.rate(Work::Lookup, true, s.time))
        }));
    }
    cases
}

fn size(flows: u32) -> String {
    match flows {
        1_000_000.. => format!("{}M", flows / 1_000_000),
        1000.. => format!("{}k", flows / 1000),
        _ => flows.to_string(),
    }
}

fn load(setting: Setting, family: Family, flows: u32) -> Result<Load> {
    pin::to(setting.cpus.engine)?;
    Load::new(family, flows, Pages::Huge)
}

/// Measures our rate and the peer's alternately.
fn beside(
    name: &str,
    setting: Setting,
    target: f64,
    mut ours: impl FnMut(Setting) -> Result<f64>,
    mut peer: impl FnMut(Setting) -> Result<f64>,
) -> Result<Metric> {
    let (mut our, mut their) = (Vec::new(), Vec::new());
    for _ in 0..setting.reps {
        their.push(peer(setting)?);
        our.push(ours(setting)?);
    }
    Ok(Metric::new(name, median(&our), median(&their), "/s", Better::Higher, target))
}

fn fastest_map(setting: Setting, huge: bool) -> Result<f64> {
    let rate = |map: &&str| maps::rate(map, MANY, huge, setting.cpus.engine, setting.time);
    let rates: Result<Vec<f64>> = maps::MAPS.iter().map(rate).collect();
    Ok(rates?.into_iter().fold(f64::NAN, f64::max))
}

/// Ratio of the full path on two CPUs to one; each CPU has half of the flows, or all.
fn two_threads(
    name: &str,
    setting: Setting,
    family: Family,
    flows: u32,
    both: bool,
    target: f64,
) -> Result<Metric> {
    let mut load = load(setting, family, flows)?;
    let one = |load: &mut Load| load.rate(Work::FullPath, true, setting.time);
    let halves = |load: &Load, half: u32, seed: u64| {
        let (first, flows) = if both { (0, flows) } else { (half * (flows / 2), flows / 2) };
        load.worker(seed, first, flows).context("no room for another worker")
    };
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for _ in 0..setting.reps {
        alone.push(one(&mut load)?);
        // An idle worker must be marked as idle, or it delays the release of memory.
        load.states.idle();
        let (mut first, mut second) = (halves(&load, 0, 3)?, halves(&load, 1, 4)?);
        let rates: Result<f64> = thread::scope(|scope| {
            let other = scope.spawn(|| {
                pin::to(setting.cpus.consumer)?;
                one(&mut second)
            });
            let own = one(&mut first)?;
            Ok(own + other.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??)
        });
        together.push(rates?);
    }
    Ok(Metric::new(name, median(&together), median(&alone), "/s", Better::Higher, target))
}

/// Number of table growths to measure, because each takes long.
const GROWTHS: u32 = 3;

/// Compares the 99.9% quantile of a burst's time during table growth with the median at rest; medians of several tables.
fn growth(name: &str, setting: Setting) -> Result<Metric> {
    let grown: Result<Vec<_>> =
        (0..setting.reps.min(GROWTHS)).map(|_| growth_of_one(name, setting)).collect();
    let (late, rest): (Vec<f64>, Vec<f64>) = grown?.into_iter().unzip();
    Ok(Metric::new(name, median(&late), median(&rest), "ns", Better::Lower, 10.0))
}

/// Measures bursts of the full path while a second thread installs seven million flows and a third, on the same CPU, prepares memory.
fn growth_of_one(name: &str, setting: Setting) -> Result<(f64, f64)> {
    let mut load = load(setting, Family::V4, 1_000_000)?;
    let mut rest = Vec::new();
    let start = Instant::now();
    while start.elapsed() < setting.time {
        rest.push(burst_time(&mut load));
    }
    let mut installer = load.worker(5, 0, 1).context("no room for another worker")?;
    let mut preparer = load.worker(6, 0, 1).context("no room for another worker")?;
    let done = AtomicBool::new(false);
    let mut times = Vec::with_capacity(1 << 24);
    thread::scope(|scope| {
        let installing = scope.spawn(|| {
            pin::to(setting.cpus.consumer)?;
            let made = (1_000_000..8_000_000).filter(|&n| installer.install(n, installer.now).is_some());
            let made = made.count();
            // Release: the other threads observe the flag eventually.
            done.store(true, Ordering::Release);
            anyhow::ensure!(made == 7_000_000, "room for only {made} flows");
            Ok(())
        });
        let preparing = scope.spawn(|| {
            pin::to(setting.cpus.consumer)?;
            while !done.load(Ordering::Acquire) {
                if !preparer.states.prepare() {
                    preparer.states.idle();
                    thread::sleep(Duration::from_micros(200));
                }
            }
            anyhow::Ok(())
        });
        while !done.load(Ordering::Acquire) && times.len() < times.capacity() {
            times.push(burst_time(&mut load));
        }
        let joined = |result: thread::Result<Result<()>>| match result {
            Ok(result) => result,
            Err(_) => bail!("a thread panicked"),
        };
        joined(installing.join()).and(joined(preparing.join()))
    })?;
    let usual = median(&rest);
    // Timer ticks and other load of the machine also affect bursts at rest.
    for (when, times) in [("at rest", &mut rest), ("while the table grew", &mut times)] {
        times.sort_by(f64::total_cmp);
        let slower = times.iter().rev().take_while(|&&time| time > 10.0 * usual).count();
        let (all, [half, most, nearly, slowest]) =
            (times.len(), [0.5, 0.99, 0.999, 1.0].map(|q| at(times, q)));
        eprintln!(
            "{name}: {when} {slower} of {all} bursts took more than 10 x the median at rest; half of them {half:.0} ns, 99% {most:.0}, \
             99.9% {nearly:.0}, the slowest {slowest:.0}"
        );
    }
    Ok((at(&times, 0.999), usual))
}

/// Returns the quantile `share` of sorted times.
fn at(times: &[f64], share: f64) -> f64 {
    times[((times.len() - 1) as f64 * share) as usize]
}

/// Time in ns of one burst of the full path, including `expire` (collects expired states, advances a table growth).
fn burst_time(load: &mut Load) -> f64 {
    let start = Instant::now();
    load.burst(Work::FullPath, true);
    load.states.expire(load.now, BURST);
    start.elapsed().as_nanos() as f64
}

/// Lookups on one CPU while the other installs and expires a million flows per second.
fn churn(name: &str, setting: Setting) -> Result<Metric> {
    const FLOWS: u32 = 1_000_000;
    let mut load = load(setting, Family::V4, FLOWS)?;
    let mut other = load.worker(9, 0, 1).context("no room for another worker")?;
    let mut settings = load.states.settings().clone();
    settings.dyn_udp_lifetime = 1;
    let (mut beside, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..setting.reps {
        alone.push(load.rate(Work::Lookup, true, setting.time)?);
        // Flows installed from now on live for a second. Existing flows are looked up without a refresh.
        other.states.set_settings(settings.clone());
        let stop = AtomicBool::new(false);
        let rate = thread::scope(|scope| {
            let churning = scope.spawn(|| {
                pin::to(setting.cpus.consumer)?;
                come_and_go(&mut other, FLOWS, &stop)
            });
            let rate = load.rate(Work::Lookup, true, setting.time);
            stop.store(true, Ordering::Release);
            let churned = churning.join().map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
            eprintln!("{name}: {:.2} M/s installed and expired", churned / 1e6);
            rate
        })?;
        beside.push(rate);
    }
    Ok(Metric::new(name, median(&beside), median(&alone), "/s", Better::Higher, 0.85))
}

/// Installs flows on a simulated clock, on which they expire after 10 ms of real time. Returns the flows per second.
fn come_and_go(load: &mut Load, flows: u32, stop: &AtomicBool) -> Result<f64> {
    let (start, mut made) = (Instant::now(), 0_u32);
    while !stop.load(Ordering::Acquire) {
        let due = (start.elapsed().as_secs_f64() * 1e6) as u32;
        let burst = made..due.min(made + BURST as u32);
        made = made.max(burst.end);
        for n in burst {
            // The simulated clock runs a hundred times as fast: a flow expires after a hundredth of a second.
            load.now = load.now + Duration::from_micros(100);
            load.install(flows + n % 4_000_000, load.now);
        }
        load.states.expire(load.now, BURST * 2);
    }
    Ok(f64::from(made) / start.elapsed().as_secs_f64())
}
