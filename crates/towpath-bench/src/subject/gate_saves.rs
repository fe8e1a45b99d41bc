//! Metrics of saved states: bursts while the running snapshot writes, and the time to restore it after a kill.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use towpath::ruleset_manager::RulesetManager;
use towpath::snapshot::running::Running;
use towpath::snapshot::{self, Saving};
use towpath_gate::rules::Ruleset;
use towpath_gate::{Dir, Gate, Ports, Step, Walk, Walker, state};
use towpath_wire::{self as wire, LinkType, Time};

use crate::flows::{BURST, START};
use crate::live::{self, dut};
use crate::pin::{self, Cpus};
use crate::stat::median;

/// Interval of the snapshots.
const EVERY: Duration = Duration::from_millis(100);

/// Lifetime of the states in seconds: no state ends during a measurement.
const LIFETIME: u32 = 3600;

/// States that another thread creates at the same time, in groups with pauses of a millisecond.
const GROUP: u32 = 10;

/// Rules that make a state for each flow, and two walkers.
fn manager(states: u32) -> Result<(Arc<RulesetManager>, Walker, Walker)> {
    let parse = || Ruleset::parse("bench", &dut::rules(false)).ruleset;
    let ruleset = parse().map_err(|errors| anyhow!("{}", errors[0]))?;
    let settings = state::Settings {
        dyn_max: states + (1 << 20),
        dyn_udp_lifetime: LIFETIME,
        ..state::Settings::default()
    };
    let mut gate = Gate::new(ruleset.clone(), Ports::new(), settings, 1);
    let walkers = gate.walker().zip(gate.walker()).context("no room for walkers")?;
    let manager = RulesetManager::new(gate, ruleset, false);
    manager.clock().set(START);
    Ok((Arc::new(manager), walkers.0, walkers.1))
}

/// A datagram of flow `n`.
fn walk(walker: &mut Walker, n: u32) -> Result<()> {
    let [a, b, c, d] = n.to_be_bytes();
    let frame =
        [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, a, b, c, 192, 0, 2, 1, 4, d, 0, 53, 0, 8, 0, 0];
    let packet = wire::parse(LinkType::RAW, &frame, 28).map_err(|error| anyhow!("{error:?}"))?;
    let step = walker.walk(&mut Walk::new(Dir::In, None, None), &packet, START);
    ensure!(step == Step::Pass, "{step:?}");
    Ok(())
}

/// The 99.9% quantile of the time of a burst, in ns.
fn late(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * 0.999) as usize]
}

/// Measures bursts of packets of `states` states at rest, and while the running snapshot writes their base and the changes of
/// others. Returns the 99.9% quantiles.
pub(super) fn bursts(cpus: Cpus, time: Duration, states: u32) -> Result<(f64, f64)> {
    pin::to(cpus.consumer)?;
    let (manager, mut walker, mut other) = manager(states)?;
    (0..states).try_for_each(|n| walk(&mut walker, n))?;
    let directory = tempfile::tempdir()?;
    let (half, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let (half, stop) = (&half, &stop);
        let bursts = scope.spawn(move || {
            pin::to(cpus.engine)?;
            let mut n = 0_u32;
            let mut until = |over: &AtomicBool| {
                let mut times = Vec::with_capacity(1 << 22);
                while !over.load(Ordering::Acquire) && times.len() < times.capacity() {
                    let begun = Instant::now();
                    for _ in 0..BURST {
                        n = n.wrapping_add(0x9e37_79b9);
                        walk(&mut walker, black_box(n % states))?;
                    }
                    times.push(begun.elapsed().as_nanos() as f64);
                }
                anyhow::Ok(times)
            };
            anyhow::Ok([until(half)?, until(stop)?])
        });
        let mut next = states;
        let mut change = |time: Duration| {
            let begun = Instant::now();
            while begun.elapsed() < time {
                (next..next + GROUP).try_for_each(|n| walk(&mut other, n))?;
                next += GROUP;
                thread::sleep(Duration::from_millis(1));
            }
            anyhow::Ok(())
        };
        let measured = change(time).and_then(|()| {
            half.store(true, Ordering::Release);
            // The snapshot's thread inherits the CPU of this one.
            let _running = Running::start(&directory.path().join("states"), EVERY, &manager)?;
            change(time)
        });
        // Release: the other thread observes the flags eventually.
        half.store(true, Ordering::Release);
        stop.store(true, Ordering::Release);
        let times = bursts.join().map_err(|_| anyhow!("the thread of bursts panicked"))?;
        measured?;
        let [mut rest, mut saving] = times?;
        Ok((late(&mut saving), late(&mut rest)))
    })
}

/// Measures the outage in ms of a bridge with `states` states that is killed and started again at once.
pub(super) fn outage(cpus: Cpus, states: u32) -> Result<f64> {
    let prepare = |file: &Path| {
        let (manager, mut walker, _other) = manager(states)?;
        (0..states).try_for_each(|n| walk(&mut walker, n))?;
        Ok(Saving::create(file)?.finish(&manager)?)
    };
    let check = |file: &Path| {
        let (manager, ..) = manager(states)?;
        let restored = manager.restore(&snapshot::read(file)?.context("no file")?, Time::from_secs(1))?;
        ensure!(restored.states > u64::from(states) && !restored.gap, "{restored:?}");
        Ok(())
    };
    live::outage::measure(cpus, states, prepare, check)
}

/// Measures the time in ms to read and restore the file of an engine that was killed with `states` states.
pub(super) fn restore(cpus: Cpus, reps: u32, states: u32) -> Result<f64> {
    pin::to(cpus.consumer)?;
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("states");
    let (first, mut walker, other) = manager(states)?;
    (0..states).try_for_each(|n| walk(&mut walker, n))?;
    let running = Running::start(&file, EVERY, &first)?;
    while !file.exists() {
        thread::sleep(EVERY);
    }
    drop(running);
    drop((first, walker, other));
    eprintln!("{states} states: a file of {} bytes", fs::metadata(&file)?.len());
    let times: Result<Vec<f64>> = (0..reps).map(|_| restore_once(&file, states)).collect();
    Ok(median(&times?))
}

fn restore_once(file: &Path, states: u32) -> Result<f64> {
    let (manager, ..) = manager(states)?;
    let begun = Instant::now();
    let bytes = snapshot::read(file)?.context("no file")?;
    let restored = manager.restore(&bytes, Time::from_secs(1))?;
    let time = begun.elapsed().as_secs_f64() * 1e3;
    ensure!(restored.states == u64::from(states) && restored.killed, "{restored:?}");
    Ok(time)
}
