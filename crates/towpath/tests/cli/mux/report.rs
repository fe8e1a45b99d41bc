//! The reports of `towpath mux`: JSON at its end, and `towpath ctl` while it runs.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::Stdio;

use rustix::process::Signal;

use super::daemon::{FRAMING, Mux, ask, example, kill, split, towpath};

#[test]
fn the_final_report_is_json() {
    let mut child = towpath()
        .args(["mux", "127.0.0.1:0", "--framing", FRAMING, "--workers", "1", "--json", "--worker"])
        .arg(example("mux_worker"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("towpath starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    stderr.read_line(&mut line).expect("a line");
    let address = line.trim_start_matches("listening on ").trim();
    let mut stream = TcpStream::connect(address).expect("it listens");
    ask(&mut stream, b"one");
    drop(stream);
    kill(child.id(), Signal::TERM);
    let output = child.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(0));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let counts = ["connections", "messages", "done", "given_up", "not_begun"].map(|key| told[key].as_u64());
    assert_eq!(counts, [1, 1, 1, 0, 0].map(Some), "{told}");
    assert_eq!(told["drained"], true, "{told}");
}

#[test]
fn ctl_shows_the_mux_in_kcms_columns() {
    let directory = tempfile::tempdir().expect("a directory");
    let control = directory.path().join("control.sock");
    let control = control.to_str().expect("UTF-8");
    let mux = Mux::start(&example("mux_worker"), &["--workers", "2", "--control", control]);
    let mut stream = mux.connect();
    for _ in 0..5 {
        ask(&mut stream, b"hello");
    }
    let ctl = |args: &[&str]| {
        let output =
            towpath().args(["ctl", "--socket", control]).args(args).output().expect("towpath starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), String::from_utf8(output.stdout).expect("text"), errors)
    };
    let (code, text, errors) = ctl(&["show", "mux"]);
    assert_eq!(code, Some(0), "{errors}");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][0], "Object");
    assert_eq!(rows[1][..2], ["mux", "5"]);
    assert!(rows[2][0] == "kcm-0" && rows[3][0] == "kcm-1" && rows[4][0] == "psock-1", "{text}");
    let (_, text, _) = ctl(&["show", "mux", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let stats = &json["mux"]["stats"];
    // The reply to the last message may arrive before its completion is counted.
    assert_eq!(stats["rx_msgs"], 5, "{json}");
    assert!(stats["done"].as_u64() >= Some(4), "{json}");
    let pids: BTreeSet<u64> = json["mux"]["workers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|w| w["pid"].as_u64().expect("a number"))
        .collect();
    assert!(pids.contains(&u64::from(split(&ask(&mut stream, b"who")).0)));
    let (_, rings, _) = ctl(&["show", "rings", "--json"]);
    let rings: serde_json::Value = serde_json::from_str(&rings).expect("JSON");
    assert_eq!(rings["rings"].as_array().map(Vec::len), Some(2));
    // An engine without a mux says so; here there is no engine.
    mux.finish();
    let (code, _, errors) = ctl(&["show", "mux"]);
    assert_eq!(code, Some(5), "{errors}");
}
