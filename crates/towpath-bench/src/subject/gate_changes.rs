//! Metrics of changes while other threads run (states with a `limit`, entries of tables), and of packets without a state.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use towpath_gate::rules::Ruleset;
use towpath_gate::rules::table::{Key, Table, Value};
use towpath_gate::state::{self, Install, Installed, Limit, LimitMask, Name, RuleId, States};
use towpath_gate::{Dir, Gate, PacketSpec, Ports, Walk, Walker};
use towpath_wire::{self as wire, Time};

use crate::flows::{BURST, Family, PACKET, START, flow};
use crate::pin::{self, Cpus};
use crate::stat::median;

/// Flows whose states one thread makes and removes in turn. Sixteen of them share a source.
const LIMITED: u32 = 1 << 16;

/// Makes and removes states as fast as possible, with a `limit` by source if `limited`. Returns states per second.
fn installs(states: &mut States, first: u32, limited: bool, time: Duration) -> Result<f64> {
    let limit = limited.then_some(Limit::new(LimitMask::SRC_ADDR, 1000));
    let install = Install { limit, ..Install::default() };
    let (start, mut made, mut now) = (Instant::now(), 0_u64, START);
    loop {
        for _ in 0..64 {
            now = now + Duration::from_micros(10);
            for _ in 0..BURST {
                let flow = flow(Family::V4, first + made as u32 % LIMITED);
                let installed = states.install(&flow, Name::DEFAULT, &PACKET, RuleId(1), &install, now);
                ensure!(installed == Ok(Installed::New), "a state was refused: {installed:?}");
                ensure!(states.remove(&flow, Name::DEFAULT, now), "a state was not found");
                made += 1;
            }
            states.expire(now, 2 * BURST);
        }
        let took = start.elapsed();
        if took >= time {
            return Ok(made as f64 / took.as_secs_f64());
        }
    }
}

/// States that two threads make and remove, and one thread alone, per second. With a `limit` if `limited`.
pub(super) fn install_states(cpus: Cpus, limited: bool, time: Duration, reps: u32) -> Result<(f64, f64)> {
    pin::to(cpus.engine)?;
    let settings = state::Settings { dyn_parent_max: 100_000, ..state::Settings::default() };
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for _ in 0..reps {
        let mut first = States::new(settings.clone(), 0x5eed);
        alone.push(installs(&mut first, 0, limited, time)?);
        let mut second = first.worker().context("no room for another worker")?;
        let rates: Result<f64> = thread::scope(|scope| {
            let other = scope.spawn(|| {
                pin::to(cpus.consumer)?;
                installs(&mut second, 1 << 24, limited, time)
            });
            let own = installs(&mut first, 0, limited, time)?;
            Ok(own + other.join().map_err(|_| anyhow!("the other thread panicked"))??)
        });
        together.push(rates?);
    }
    Ok((median(&together), median(&alone)))
}

/// A thread whose walker looks packets up in a table until it is stopped, and the times of its bursts.
struct Looking {
    walker: Walker,
    packet: PacketSpec,
    times: Vec<f64>,
}

impl Looking {
    fn burst(&mut self) {
        let start = Instant::now();
        for _ in 0..BURST {
            let frame = &self.packet.frame;
            if let Ok(packet) = wire::parse(self.packet.link(), frame, frame.len() as u32) {
                black_box(self.walker.walk(&mut Walk::new(Dir::In, None, None), &packet, Time::from_secs(1)));
            }
        }
        if self.times.len() < self.times.capacity() {
            self.times.push(start.elapsed().as_nanos() as f64);
        }
    }
}

/// Measures changes of a table of `entries` entries while a walker runs. Returns the median time in ns to add an entry, and the
/// 99.9% quantile of the walker's bursts during the changes and at rest.
pub(super) fn table_entry(cpus: Cpus, time: Duration, entries: u32) -> Result<(f64, f64, f64)> {
    pin::to(cpus.consumer)?;
    let text = "table T create type addr\nadd allow ip from table(T) to any\n";
    let mut ruleset = Ruleset::parse("bench", text).ruleset.map_err(|errors| anyhow!("{}", errors[0]))?;
    let mut table = Table::default();
    for n in 0..entries {
        table.add(&Key::Net4(n.wrapping_mul(0x9e37_79b9) & 0x7fff_ffff, 32), Value::legacy(n % 100))?;
    }
    table.settle();
    ruleset.set_table("T", table);
    let mut gate = Gate::new(ruleset.clone(), Ports::new(), state::Settings::default(), 1);
    let packet = PacketSpec::parse("udp 10.0.0.1:1000 > 192.0.2.1:53").map_err(|error| anyhow!("{error}"))?;
    let walker = gate.walker().context("no room for a walker")?;
    let mut looking = Looking { walker, packet, times: Vec::with_capacity(1 << 22) };
    let stop = AtomicBool::new(false);
    let mut added = Vec::new();
    let (looking, rest) = thread::scope(|scope| {
        let stop = &stop;
        let walking = scope.spawn(move || {
            pin::to(cpus.engine)?;
            let start = Instant::now();
            while start.elapsed() < time {
                looking.burst();
            }
            let rest = std::mem::replace(&mut looking.times, Vec::with_capacity(1 << 22));
            while !stop.load(Ordering::Acquire) {
                looking.burst();
            }
            anyhow::Ok((looking, rest))
        });
        thread::sleep(time);
        let (start, mut n) = (Instant::now(), 0_u32);
        while start.elapsed() < time {
            // Above all other entries, so that it is new.
            let key = 0x8000_0000 | n.wrapping_mul(0x9e37_79b9) >> 1;
            for word in ["add", "delete"] {
                let command = format!("table T {word} {}", std::net::Ipv4Addr::from(key));
                let began = Instant::now();
                let changed = ruleset.change_entries("command", &command).context("not an entry")?;
                ensure!(changed.is_ok(), "{changed:?}");
                let table = ruleset.table("T").context("no table")?.clone();
                gate.with_table("T", |own| *own = table);
                added.push(began.elapsed().as_nanos() as f64);
            }
            gate.expire(Time::from_secs(1), 0);
            n += 1;
        }
        stop.store(true, Ordering::Release);
        walking.join().map_err(|_| anyhow!("the walker panicked"))?
    })?;
    let late = |times: &[f64]| {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        times[((times.len() - 1) as f64 * 0.999) as usize]
    };
    Ok((median(&added), late(&looking.times), late(&rest)))
}
