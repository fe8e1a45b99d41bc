//! `towpath bpf`, from the outside.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn object(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../towpath-bpf/tests/programs").join(name)
}

fn bpf(action: &str, program: &Path, rest: &[&str]) -> Output {
    let towpath = env!("CARGO_BIN_EXE_towpath");
    Command::new(towpath).args(["bpf", action]).arg(program).args(rest).output().expect("towpath starts")
}

fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The output of `--json`, as a value.
fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[test]
fn run_says_what_the_program_answers() {
    let output = bpf("run", &object("thrift.o"), &["--hex", "0000000a 80"]);
    let expected =
        "result 14: the message has 14 bytes\nmark 0, hash 0, cb [0, 0, 0, 0, 0]\nfuel used: 4 of 1000000\n";
    assert_eq!(printed(&output), expected);

    let output = bpf("run", &object("direct.o"), &["--name", "length16", "--hex", "00", "--json"]);
    let report = json(&output);
    assert_eq!(
        (&report["outcome"], &report["result"], &report["mark"]),
        (&"need".into(), &0.into(), &4.into())
    );

    // A file as the message, a state from before.
    let output = bpf("run", &object("direct.o"), &["--name", "lines", "", "--json"]);
    assert_eq!(output.status.code(), Some(1), "an empty name is no file");
    let dir = tempfile::tempdir().expect("a directory");
    let message = dir.path().join("message");
    std::fs::write(&message, "SET\n").expect("a file");
    let output = bpf(
        "run",
        &object("direct.o"),
        &["--name", "lines", "--cb", "0x3", "--json", message.to_str().expect("a name")],
    );
    assert_eq!(json(&output)["result"], 4);
}

#[test]
fn check_accepts_or_says_why_not() {
    let output = bpf("check", &object("thrift.o"), &[]);
    assert!(printed(&output).ends_with("accepted, program `frame`, 4 instructions of eBPF\n"));

    let output = bpf("check", &object("map.o"), &["--json"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(json(&output)["ok"], false);

    // r0 is never set.
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("exit");
    std::fs::write(&program, [0x95, 0, 0, 0, 0, 0, 0, 0]).expect("a file");
    let output = bpf("check", &program, &[]);
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        error.ends_with("instruction 0 (exit): r0 is read, but a path to here does not set it\n"),
        "{error}"
    );
    let report = json(&bpf("check", &program, &["--json"]));
    assert_eq!(report["instruction"], 0);
    assert_eq!(report["reason"], "r0 is read, but a path to here does not set it");
}

#[test]
fn disasm_and_stats() {
    let listing = "frame:\n    0: r6 = r1\n    1: r0 = *(u32 *)skb[0]\n    2: r0 += 4\n    3: exit\n";
    assert_eq!(printed(&bpf("disasm", &object("thrift.o"), &[])), listing);
    let rows = json(&bpf("disasm", &object("thrift.o"), &["--json"]));
    assert_eq!(rows["instructions"][1]["bytes"], "2000000000000000");

    let stats = json(&bpf("stats", &object("direct.o"), &["--name", "mqtt", "--json"]));
    assert_eq!((&stats["functions"], &stats["depth"]), (&2.into(), &2.into()));
    assert_eq!(printed(&bpf("stats", &object("thrift.o"), &[])).lines().count(), 13);
}
