//! A replay that a test runs, its report, and captures to compare.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Frame, LinkType, Port, Received};

use crate::example::example;

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn office() -> PathBuf {
    root().join("examples/office.pcap")
}

pub(crate) fn towpath(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_towpath")).args(args).output().expect("the program starts")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An inspector of this crate's examples.
pub(crate) fn troublesome(words: &str) -> String {
    format!("{} {words}", example("troublesome"))
}

/// A directory with a rule file and whatever the test puts there.
pub(crate) struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new(rules: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("rules.ipfw"), rules).unwrap();
        Self { directory }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn run(&self, capture: &Path, more: &[&str]) -> Output {
        let rules = self.path("rules.ipfw");
        let mut args = vec!["replay", capture.to_str().unwrap(), "--rules", rules.to_str().unwrap()];
        args.extend(more);
        towpath(&args)
    }

    /// Runs with `--json`; the report's sum is checked, and that of each queue.
    pub(crate) fn report(&self, capture: &Path, more: &[&str]) -> Value {
        // A busy machine may keep an inspector from its processor for longer than the usual deadline.
        let patient: &[&str] = if more.contains(&"--deadline") { &[] } else { &["--deadline", "60"] };
        let output = self.run(capture, &[more, patient, &["--json"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let sum = ["passed", "dropped", "rejected"].map(|key| number(&report, key));
        let reasons = report["dropped_by"].as_object().unwrap().values().map(|count| count.as_u64().unwrap());
        assert_eq!(number(&report, "dropped"), reasons.sum::<u64>(), "{report}");
        assert_eq!(number(&report, "packets"), sum.iter().sum::<u64>(), "{report}");
        let answers = ["sent", "silent", "limited", "unsent"].map(|key| number(&report["replies"], key));
        assert_eq!(number(&report, "rejected"), answers.iter().sum::<u64>(), "{report}");
        for queue in report["queues"].as_array().unwrap() {
            let sum = ["passed", "dropped", "replaced", "lost"].map(|key| number(queue, key));
            assert_eq!(number(queue, "frames"), sum.iter().sum::<u64>(), "{queue}");
        }
        report
    }
}

pub(crate) fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

pub(crate) fn frames(capture: &Path) -> Vec<Vec<u8>> {
    let mut reader = Reader::open(capture).unwrap();
    let mut burst = Burst::new(64);
    let mut frames = Vec::new();
    while reader.receive(&mut burst).unwrap() == Received::Frames {
        frames.extend(burst.iter().map(|frame| frame.bytes.to_vec()));
    }
    frames
}

/// `n` UDP packets of one flow each, numbered in their payload.
pub(crate) fn udp_capture(path: &Path, n: u32, flows: u16) {
    let mut writer = Writer::create(path).unwrap();
    for i in 0..n {
        let mut bytes = vec![0; 12];
        bytes.extend([0x08, 0x00, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes.extend((1024 + (i % u32::from(flows)) as u16).to_be_bytes());
        bytes.extend([0, 53, 0, 26, 0, 0]);
        bytes.extend(format!("payload {i:010}").as_bytes());
        let time_ns = u64::from(i) * 1000;
        writer.write(Frame { time_ns, ..Frame::new(&bytes, LinkType::ETHERNET) }, None).unwrap();
    }
    writer.finish().unwrap();
}
