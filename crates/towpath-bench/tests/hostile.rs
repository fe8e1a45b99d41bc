//! Every mode of `towpath-bench hostile`, for HOSTILE_SECONDS (1) each: honest peers lose nothing beside hostile ones.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

#[test]
fn honest_peers_lose_nothing_beside_hostile_ones() {
    let bench = Path::new(env!("CARGO_BIN_EXE_towpath-bench"));
    assert!(bench.with_file_name("towpath").is_file(), "build the engine first: cargo build -p towpath");
    let seconds = std::env::var("HOSTILE_SECONDS").unwrap_or_else(|_| "1".to_owned());
    let output = Command::new(bench).args(["hostile", "--json", "--seconds", &seconds]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let rows: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    assert!(rows.len() >= 15, "{said}");
    for row in rows {
        assert_eq!(row["failures"], Value::Array(Vec::new()), "{row:#}");
        let count = |name: &str| row[name].as_u64().unwrap();
        assert!(count("inspected") > 0 && count("uninspected") > 0 && count("messages") > 0, "{row:#}");
    }
    assert!(output.status.success(), "{said}");
}
