//! The state table's bars, each beside a peer, a raw limit, or the same table at another size, in one run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use towpath_gate::state::Pages;

use crate::bar::{Bar, Better};
use crate::flows::{BURST, Family, Load, RulesLoad, Work};
use crate::memory;
use crate::peer::{conntrack, maps};
use crate::pin::{self, Cpus};
use crate::stat::median;
use crate::subject::rows::{self, Row};

const FEW: u32 = 2000;
const MANY: u32 = 5_000_000;

/// What every measurement is given.
#[derive(Debug, Clone, Copy)]
struct Setting {
    cpus: Cpus,
    time: Duration,
    reps: u32,
}

type Measure = Box<dyn Fn(&str, Setting) -> Result<Bar>>;

/// A row: its name and how it is measured.
struct Case {
    name: String,
    measure: Measure,
}

impl Case {
    fn new(name: impl Into<String>, measure: impl Fn(&str, Setting) -> Result<Bar> + 'static) -> Self {
        Self { name: name.into(), measure: Box::new(measure) }
    }
}

/// Measures and prints; whether every bar that could be measured holds.
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
        Case::new("bursts at 5M over half the random lines", |name, s| {
            let mut load = load(s, Family::V4, MANY)?;
            let ours = |s: Setting| load.rate(Work::Lookup, true, s.time);
            // The states and the lines of the index.
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
            // Gives back the index that flows moved away from last.
            load.states.prepare();
            let each =
                |load: &Load| anyhow::Ok((memory::resident()? - before) as f64 / load.states.len() as f64);
            let bytes = each(&load)?;
            load.settle();
            eprintln!("{name}: {:.1} with what is made ahead for a million more", each(&load)?);
            Ok(Bar::new(name, bytes, 92.0, "B", Better::Lower, 1.0))
        }),
    ]);
    for (flows, bar) in [(FEW, 1.0 / 18.0), (500_000, 1.0 / 25.0)] {
        let name = format!("full path over what conntrack adds, {} flows", size(flows));
        cases.push(Case::new(name, move |name, s| {
            // Ours comes first: behind the floods the kernel is at taking down their namespaces.
            let mut load = load(s, Family::V4, flows)?;
            // What it takes to make the packets is no more ours than the flood's sending is conntrack's.
            let mut nanos = |work| Ok::<_, anyhow::Error>(1e9 / load.rate(work, true, s.time)?);
            let ours: Result<Vec<f64>> =
                (0..s.reps).map(|_| Ok(nanos(Work::FullPath)? - nanos(Work::Packets)?)).collect();
            let ours = median(&ours?);
            drop(load);
            let theirs = conntrack::added(s.cpus.engine, flows, s.time, s.reps)?;
            Ok(Bar::new(name, ours, theirs, "ns", Better::Lower, bar))
        }));
    }
    for (flows, family, both, bar) in [
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
            move |name, s| two_threads(name, s, family, flows, both, bar),
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

/// Ours and the other's rates, in turns.
fn beside(
    name: &str,
    setting: Setting,
    bar: f64,
    mut ours: impl FnMut(Setting) -> Result<f64>,
    mut peer: impl FnMut(Setting) -> Result<f64>,
) -> Result<Bar> {
    let (mut our, mut their) = (Vec::new(), Vec::new());
    for _ in 0..setting.reps {
        their.push(peer(setting)?);
        our.push(ours(setting)?);
    }
    Ok(Bar::new(name, median(&our), median(&their), "/s", Better::Higher, bar))
}

fn fastest_map(setting: Setting, huge: bool) -> Result<f64> {
    let rate = |map: &&str| maps::rate(map, MANY, huge, setting.cpus.engine, setting.time);
    let rates: Result<Vec<f64>> = maps::MAPS.iter().map(rate).collect();
    Ok(rates?.into_iter().fold(f64::NAN, f64::max))
}

/// The full path on two CPUs over the same on one; flows by halves, or all on both.
fn two_threads(
    name: &str,
    setting: Setting,
    family: Family,
    flows: u32,
    both: bool,
    bar: f64,
) -> Result<Bar> {
    let mut load = load(setting, family, flows)?;
    let one = |load: &mut Load| load.rate(Work::FullPath, true, setting.time);
    let halves = |load: &Load, half: u32, seed: u64| {
        let (first, flows) = if both { (0, flows) } else { (half * (flows / 2), flows / 2) };
        load.worker(seed, first, flows).context("no room for another worker")
    };
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for _ in 0..setting.reps {
        alone.push(one(&mut load)?);
        // What stands still while the others work would hold up their room.
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
    Ok(Bar::new(name, median(&together), median(&alone), "/s", Better::Higher, bar))
}

/// How often the table grows: it takes a while.
const GROWTHS: u32 = 3;

/// What a burst takes at 99.9% while the table grows, and its median at rest: medians of some tables.
fn growth(name: &str, setting: Setting) -> Result<Bar> {
    let grown: Result<Vec<_>> =
        (0..setting.reps.min(GROWTHS)).map(|_| growth_of_one(name, setting)).collect();
    let (late, rest): (Vec<f64>, Vec<f64>) = grown?.into_iter().unzip();
    Ok(Bar::new(name, median(&late), median(&rest), "ns", Better::Lower, 10.0))
}

/// Bursts of the full path while another thread installs seven million flows, and a third, on its CPU, prepares memory.
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
            // Release: the others see it some time.
            done.store(true, Ordering::Release);
            anyhow::ensure!(made == 7_000_000, "only {made} flows found room");
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
    // Ticks and what else the machine does fall into bursts at rest, too.
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

/// Of sorted times the one that so many are not above.
fn at(times: &[f64], share: f64) -> f64 {
    times[((times.len() - 1) as f64 * share) as usize]
}

/// One burst of the full path, and the collection behind it, in which growth goes on: in ns.
fn burst_time(load: &mut Load) -> f64 {
    let start = Instant::now();
    load.burst(Work::FullPath, true);
    load.states.expire(load.now, BURST);
    start.elapsed().as_nanos() as f64
}

/// Lookups on one CPU while on the other a million flows a second come, and go when they end.
fn churn(name: &str, setting: Setting) -> Result<Bar> {
    const FLOWS: u32 = 1_000_000;
    let mut load = load(setting, Family::V4, FLOWS)?;
    let mut other = load.worker(9, 0, 1).context("no room for another worker")?;
    let mut settings = load.states.settings().clone();
    settings.dyn_udp_lifetime = 1;
    let (mut beside, mut alone) = (Vec::new(), Vec::new());
    for _ in 0..setting.reps {
        alone.push(load.rate(Work::Lookup, true, setting.time)?);
        // What is made from here on lives for a second; those that are there are looked up and not refreshed.
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
            eprintln!("{name}: {:.2} M/s came, and as many went", churned / 1e6);
            rate
        })?;
        beside.push(rate);
    }
    Ok(Bar::new(name, median(&beside), median(&alone), "/s", Better::Higher, 0.85))
}

/// Installs a million flows a second, on a clock of its own on which they end after 10 ms; how many a second.
fn come_and_go(load: &mut Load, flows: u32, stop: &AtomicBool) -> Result<f64> {
    let (start, mut made) = (Instant::now(), 0_u32);
    while !stop.load(Ordering::Acquire) {
        let due = (start.elapsed().as_secs_f64() * 1e6) as u32;
        let burst = made..due.min(made + BURST as u32);
        made = made.max(burst.end);
        for n in burst {
            // A hundred times as fast as the clock: what comes now goes in a hundredth of a second.
            load.now = load.now + Duration::from_micros(100);
            load.install(flows + n % 4_000_000, load.now);
        }
        load.states.expire(load.now, BURST * 2);
    }
    Ok(f64::from(made) / start.elapsed().as_secs_f64())
}
