//! `towpath replay --states-out` and `--states-in`: a run that continues where another one ended.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Frame, LinkType, Port, Received};

const RULES: &str = "add 100 check-state\n\
     add 200 allow tcp from any to any setup keep-state\n\
     add 300 allow udp from any to any keep-state\n";

fn office() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/office.pcap")
}

fn replay(capture: &Path, more: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
    command.arg("replay").arg(capture).args(more).arg("--json");
    command.output().expect("the program starts")
}

fn passed(output: &Output) -> u64 {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["passed"].as_u64().unwrap()
}

/// The two halves of a capture.
fn halves(capture: &Path, to: [&Path; 2]) {
    let (mut reader, mut burst, mut frames) = (Reader::open(capture).unwrap(), Burst::new(64), Vec::new());
    while reader.receive(&mut burst).unwrap() == Received::Frames {
        frames.extend(burst.iter().map(|frame| (frame.bytes.to_vec(), frame.wire_len, frame.time_ns)));
    }
    let (first, second) = frames.split_at(frames.len() / 2);
    for (half, path) in [first, second].into_iter().zip(to) {
        let mut writer = Writer::create(path).unwrap();
        for (bytes, wire_len, time_ns) in half {
            let frame = Frame {
                bytes,
                wire_len: *wire_len,
                time_ns: *time_ns,
                link: LinkType::ETHERNET,
                interface: 0,
                meta: Default::default(),
            };
            writer.write(frame, None).unwrap();
        }
        writer.finish().unwrap();
    }
}

#[test]
fn two_halves_are_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let [rules, states, first, second] = ["rules.ipfw", "states", "first.pcap", "second.pcap"].map(path);
    fs::write(&rules, RULES).unwrap();
    halves(&office(), [&first, &second]);
    let with =
        |option: &'static str| [Path::new("--rules"), rules.as_path(), Path::new(option), states.as_path()];
    let whole = passed(&replay(&office(), &with("--states-out")[..2]));
    let one = passed(&replay(&first, &with("--states-out")));
    let two = passed(&replay(&second, &with("--states-in")));
    assert_eq!(one + two, whole);
    let forgetful = passed(&replay(&second, &with("--states-in")[..2]));
    assert!(forgetful < two, "without its states the second half passes {forgetful} packets");

    // A file that is not a snapshot is refused before the replay starts.
    fs::write(&states, "anything").unwrap();
    let output = replay(&second, &with("--states-in"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("not a snapshot of states"), "{said}");
    let nowhere = path("no/such/directory");
    let passing = path("passing.pcap");
    let options = ["--rules", "", "--states-out", "", "--out", ""].map(Path::new);
    let [rules_option, _, states_option, _, out_option, _] = options;
    let output = replay(&second, &[rules_option, &rules, states_option, &nowhere, out_option, &passing]);
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("--states-out"));
    assert!(fs::read(&passing).unwrap_or_default().len() < 100, "it is said before the run");
}

#[test]
fn states_go_through_a_run_without_packets() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let [rules, states, empty] = ["rules.ipfw", "states", "empty.pcap"].map(path);
    fs::write(&rules, RULES).unwrap();
    Writer::create(&empty).unwrap().finish().unwrap();
    let [rules_option, states_in, states_out] = ["--rules", "--states-in", "--states-out"].map(Path::new);
    passed(&replay(&office(), &[rules_option, &rules, states_out, &states]));
    let before = fs::read(&states).unwrap();
    // From the file and back to it.
    let output = replay(&empty, &[rules_option, &rules, states_in, &states, states_out, &states]);
    assert_eq!(passed(&output), 0);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let restored = report["restored"]["states"].as_u64().unwrap();
    assert!(restored > 0 && report["restored"]["refused"] == 0, "{report}");
    assert_eq!(report["states"]["left"], restored);
    assert_eq!(fs::read(&states).unwrap().len(), before.len());

    // With other rules the states belong to no rule, and the report says so.
    fs::write(&rules, "add deny ip from any to any\n").unwrap();
    let output = replay(&empty, &[rules_option, &rules, states_in, &states]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["restored"]["companion"], &report["restored"]["states"]),
        (&restored.into(), &0.into())
    );
}

#[test]
fn a_full_table_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.ipfw");
    fs::write(&rules, "add allow ip from any to any limit dst-port 1\n").unwrap();
    let output = replay(&office(), &[Path::new("--rules"), &rules]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let refused = &report["states"]["refused"];
    assert!(refused["over_limit"].as_u64() > Some(0) && refused["full"] == 0, "{report}");
    assert!(refused["over_limit"].as_u64() <= report["dropped"].as_u64(), "{report}");
}
