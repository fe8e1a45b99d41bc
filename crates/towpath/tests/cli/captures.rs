//! Every real capture replays: no panic, no hang, bounded memory, and every packet ends in one place.
//!
//! The captures are not part of the project: see `towpath_testenv::shared`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Rules that use all features: each header, states of every kind, limits, and both directions.
const RULES: &str = "\
add 100 check-state
add 200 count ip from any to any frag
add 300 count icmp from any to any icmptypes 0,3,8,11
add 400 count ipv6-icmp from any to any icmp6types 1,2,3,128,129
add 500 count tcp from any to any established
add 600 skipto 1000 tcp from any to any setup
add 700 count all from any to any layer2
add 1000 allow tcp from any to any limit src-addr 1000
add 1100 allow udp from any to any keep-state :udp
add 1200 allow ip from any to any out
add 1300 allow ip from any to any keep-state
add 1400 allow all from any to any
";

fn find(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.extension().and_then(|extension| extension.to_str()) {
            None if path.is_dir() && !path.ends_with("truth") => find(&path, found),
            Some("pcap" | "pcapng" | "cap" | "ntar" | "gz" | "dmp") => found.push(path),
            _ => {}
        }
    }
}

#[towpath_testenv::needs(shared)]
#[test]
fn every_capture_replays() {
    let captures = Path::new(towpath_testenv::shared!()).join("captures");
    let mut files = Vec::new();
    find(&captures, &mut files);
    assert!(files.len() > 500, "only {} captures below {}", files.len(), captures.display());
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.ipfw");
    std::fs::write(&rules, RULES).unwrap();
    for file in files {
        // Address space, which is more than memory, so the bound is a stricter one.
        let limit = (2 * std::fs::metadata(&file).unwrap().len() + 100_000_000) / 1024;
        let output = Command::new("timeout")
            .args(["60", "sh", "-c", &format!("ulimit -v {limit}; exec \"$@\""), "sh"])
            .args([env!("CARGO_BIN_EXE_towpath"), "replay", "--json", "--route", "0.0.0.0/1=cap0"])
            .args([Path::new("--rules"), &rules, &file])
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => {}
            Some(2) => {
                assert!(stderr.contains("not a capture"), "{}: {stderr}", file.display());
                assert!(file.parent().unwrap().ends_with("corrupt"), "{} is a capture", file.display());
                continue;
            }
            code => panic!("{}: {code:?} {stderr}", file.display()),
        }
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let number = |key: &str| report[key].as_u64().unwrap();
        let ends = ["passed", "dropped", "rejected"].map(number);
        assert_eq!(number("packets"), ends.iter().sum::<u64>(), "{}: {report}", file.display());
    }
}
