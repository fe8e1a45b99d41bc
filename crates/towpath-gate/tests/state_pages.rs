//! The pages that hold the states, as the kernel reports them.
#![cfg(target_os = "linux")]

use std::sync::{Mutex, PoisonError};

use towpath_gate::rules::Ruleset;
use towpath_gate::state::{Ends, Flow, Install, Name, Pages, RuleId, Segment, Settings};
use towpath_gate::{Gate, Ports};
use towpath_wire::Time;

/// Bytes of this process's memory that are advised to be in huge pages (proc_pid_smaps(5): `hg`, "huge page advise
/// flag").
fn advised() -> Option<usize> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok().filter(|smaps| smaps.contains("VmFlags"))?;
    let (mut bytes, mut size) = (0, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Size:") => size = words.next()?.parse::<usize>().ok()? << 10,
            Some("VmFlags:") if words.any(|flag| flag == "hg") => bytes += size,
            _ => {}
        }
    }
    Some(bytes)
}

/// Bytes of resident memory of this process.
fn resident() -> Option<usize> {
    let smaps = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let rss = smaps.lines().find_map(|line| line.strip_prefix("Rss:"))?;
    Some(rss.split_whitespace().next()?.parse::<usize>().ok()? << 10)
}

/// The tests measure the memory of the process, so only one runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn install(gate: &mut Gate, n: u32) {
    let ends = Ends::V4((0x0a00_0000 | n).into(), [192, 0, 2, 1].into());
    let flow = Flow { ends, proto: 17, src_port: 1024, dst_port: 53, zone: 0 };
    let (segment, install) = (Segment::default(), Install::default());
    let states = gate.states_mut();
    states.install(&flow, Name::DEFAULT, &segment, RuleId(1), &install, Time::from_secs(1)).unwrap();
}

#[test]
fn prepared_memory_is_resident() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // At least a quarter more slots of nine words each, and 2^15 lines.
    let prepared = 50_000 * 72 + (64 << 15);
    // Gates stay: freed memory of other tests and of the last gate would be resident before.
    let mut gates = Vec::new();
    let mut measured = || {
        let mut gate = Gate::new(Ruleset::empty(), Ports::new(), Settings::default(), 1);
        // More than half of the index's capacity: the next index is prepared, too.
        (0..200_000).for_each(|n| install(&mut gate, n));
        let before = resident().expect("/proc/self/smaps_rollup");
        while gate.prepare() {}
        gates.push(gate);
        resident().unwrap().saturating_sub(before)
    };
    let more = (0..4).map(|_| measured()).max().unwrap();
    assert!(more > prepared * 3 / 4, "{more} bytes are there of {prepared}");
}

#[towpath_testenv::needs(thp)]
#[test]
fn huge_pages_are_advised_if_configured() {
    const FLOWS: u32 = 100_000;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = advised().expect("/proc/self/smaps");
    for (pages, wanted) in [(Pages::Base, false), (Pages::Huge, true)] {
        let mut gate = Gate::with_pages(Ruleset::empty(), Ports::new(), Settings::default(), 1, pages);
        for n in 0..FLOWS {
            install(&mut gate, n);
            // Prefaulted memory is of the same kind.
            if n % 1000 == 0 {
                gate.prepare();
            }
        }
        // At least a line of 64 bytes per state.
        let more = advised().unwrap_or(0).saturating_sub(before);
        assert_eq!(more > FLOWS as usize * 64 / 2, wanted, "{pages:?}: {more} bytes more");
    }
}

/// After a flood, the memory of the states goes back to the system, also if some of the states stay.
#[test]
fn memory_is_given_back_after_a_flood() {
    const FLOOD: u32 = 1_000_000;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let settings = Settings { dyn_max: 2 * FLOOD, ..Settings::default() };
    let mut gate = Gate::new(Ruleset::empty(), Ports::new(), settings, 1);
    let measured =
        |gate: &Gate| [gate.states().memory() as usize, resident().expect("/proc/self/smaps_rollup")];
    // A state in every page would keep all of it.
    for stays in [0, 1000] {
        let start = Time::from_secs(1);
        (0..10_000).for_each(|n| install(&mut gate, n));
        while gate.prepare() {}
        let before = measured(&gate);
        let late = Install { lifetime: Some(1000), ..Install::default() };
        for n in 10_000..FLOOD {
            let ends = Ends::V4((0x0a00_0000 | n).into(), [192, 0, 2, 1].into());
            let flow = Flow { ends, proto: 17, src_port: 1024, dst_port: 53, zone: 0 };
            let how = if stays > 0 && n % (FLOOD / stays) == 0 { late } else { Install::default() };
            let states = gate.states_mut();
            states.install(&flow, Name::DEFAULT, &Segment::default(), RuleId(1), &how, start).unwrap();
        }
        let full = measured(&gate);
        gate.states_mut().expire_all(start + std::time::Duration::from_secs(100));
        gate.states_mut().expire_all(start + std::time::Duration::from_secs(100));
        assert!(gate.states().len() <= stays as usize);
        while gate.prepare() {}
        while gate.prepare() {}
        let after = measured(&gate);
        for ((before, full), after) in before.into_iter().zip(full).zip(after) {
            // 72 bytes of each slot and 16 MiB of the index.
            assert!(full - before > 72 << 20, "{before} {full}");
            let more = after.saturating_sub(before);
            assert!(more < (full - before) / 4, "{stays}: {before} {full} {after}");
        }
        gate.states_mut().remove_where(|_| true);
        gate.states_mut().expire_all(start + std::time::Duration::from_secs(100));
    }
}
