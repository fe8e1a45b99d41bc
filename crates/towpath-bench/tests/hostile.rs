//! `towpath-bench hostile`: hostile peers cause no loss for honest ones.
//!
//! Each mode runs for HOSTILE_SECONDS (0.5) on captures, and once more on veth devices, with one or two threads and lanes.
//! HOSTILE_ALL=1 runs every mode on every combination.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// Drivers on veth devices, with threads and lanes.
const LINKS: [(&str, &str, &str); 4] =
    [("af_packet", "2", "2"), ("af_xdp", "2", "1"), ("af_packet", "1", "1"), ("af_xdp", "1", "1")];
const MORE_LINKS: [(&str, &str, &str); 2] = [("af_packet", "2", "1"), ("af_xdp", "2", "2")];

/// Runs these modes, or all, and returns their names.
fn run(words: &[&str]) -> Vec<String> {
    // The tests of this file would use the same processors.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let bench = Path::new(env!("CARGO_BIN_EXE_towpath-bench"));
    assert!(bench.with_file_name("towpath").is_file(), "build the engine first: cargo build -p towpath");
    let seconds = std::env::var("HOSTILE_SECONDS").unwrap_or_else(|_| "0.5".to_owned());
    let output = Command::new(bench)
        .args(["hostile", "--json", "--pairs", "0", "--seconds", &seconds])
        .args(words)
        .output()
        .expect("the bench starts");
    let said = String::from_utf8_lossy(&output.stderr);
    let rows: Vec<Value> =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{words:?}: {e}: {said}"));
    for row in &rows {
        assert_eq!(row["failures"], Value::Array(Vec::new()), "{words:?}: {row:#}");
        let count = |name: &str| row[name].as_u64().unwrap();
        assert!(count("inspected") > 0 && count("uninspected") > 0 && count("messages") > 0, "{row:#}");
    }
    assert!(output.status.success(), "{words:?}: {said}");
    rows.iter().map(|row| row["mode"].as_str().unwrap().to_owned()).collect()
}

/// The names of all modes, from the error for an unknown one.
fn modes() -> Vec<String> {
    let bench = env!("CARGO_BIN_EXE_towpath-bench");
    let output = Command::new(bench).args(["hostile", "--modes", "?"]).output().expect("the bench starts");
    let said = String::from_utf8_lossy(&output.stderr);
    let (_, names) = said.trim().split_once("the modes are ").unwrap_or_else(|| panic!("{said}"));
    names.split(", ").map(str::to_owned).collect()
}

#[test]
fn honest_peers_lose_nothing_beside_hostile_ones() {
    let ran = run(&[]);
    let modes = modes();
    assert!(modes.len() >= 20, "{modes:?}");
    let root = rustix::process::geteuid().is_root();
    // Two modes need root.
    assert_eq!(ran.len(), if root { modes.len() } else { modes.len() - 2 }, "{ran:?}");
}

#[towpath_testenv::needs(root, netns, xdp)]
#[test]
fn honest_peers_lose_nothing_on_links_threads_and_lanes() {
    let all = std::env::var_os("HOSTILE_ALL").is_some_and(|value| value == "1");
    let modes = modes();
    let mut ran = Vec::new();
    let links = LINKS.iter().chain(MORE_LINKS.iter().filter(|_| all));
    for (at, (port, threads, lanes)) in links.enumerate() {
        let some = modes.iter().enumerate().filter(|(n, _)| all || n % LINKS.len() == at);
        let some: Vec<&str> = some.map(|(_, name)| name.as_str()).collect();
        let words = ["--port", port, "--threads", threads, "--lanes", lanes, "--modes", &some.join(",")];
        ran.extend(run(&words));
    }
    ran.sort_unstable();
    ran.dedup();
    let mut modes = modes;
    modes.sort_unstable();
    assert_eq!(ran, modes);
}

#[test]
fn combinations_that_do_not_exist_are_refused() {
    let bench = env!("CARGO_BIN_EXE_towpath-bench");
    for (words, why) in [
        (["--threads", "2", "--lanes", "2"], "`pcap` ports have one thread"),
        (
            ["--threads", "1", "--lanes", "2"],
            "a ring has a lane for each thread; use --lanes 1 or more threads",
        ),
        (["--port", "af_xdp", "--modes", "nothing"], "unknown mode \"nothing\""),
    ] {
        let output = Command::new(bench).arg("hostile").args(words).output().expect("the bench starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{words:?}: {said}");
    }
}
