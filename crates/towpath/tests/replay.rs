//! `towpath replay` as a user runs it: exit codes, the report, and inspectors that go wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Frame, LinkType, Port, Received};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn office() -> PathBuf {
    root().join("examples/office.pcap")
}

fn towpath(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_towpath")).args(args).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An inspector among this crate's examples, which cargo builds beside the tests.
fn troublesome(words: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_towpath")).with_file_name("examples").join("troublesome");
    assert!(program.exists(), "{} is missing: `cargo test -p towpath` builds it", program.display());
    format!("{} {words}", program.display())
}

/// A directory with a rule file and whatever the test puts there.
struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    fn new(rules: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("rules.ipfw"), rules).unwrap();
        Self { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn run(&self, capture: &Path, more: &[&str]) -> Output {
        let rules = self.path("rules.ipfw");
        let mut args = vec!["replay", capture.to_str().unwrap(), "--rules", rules.to_str().unwrap()];
        args.extend(more);
        towpath(&args)
    }

    /// Runs with `--json`; the report's sum is checked, and that of each queue.
    fn report(&self, capture: &Path, more: &[&str]) -> Value {
        // A busy machine may keep an inspector from its processor for longer than the usual deadline.
        let patient: &[&str] = if more.contains(&"--deadline") { &[] } else { &["--deadline", "60"] };
        let output = self.run(capture, &[more, patient, &["--json"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let sum = ["passed", "dropped", "rejected", "undecodable"].map(|key| number(&report, key));
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

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} of {value}"))
}

fn frames(capture: &Path) -> Vec<Vec<u8>> {
    let mut reader = Reader::open(capture).unwrap();
    let mut burst = Burst::new(64);
    let mut frames = Vec::new();
    while reader.receive(&mut burst).unwrap() == Received::Frames {
        frames.extend(burst.iter().map(|frame| frame.bytes.to_vec()));
    }
    frames
}

/// `n` UDP packets of one flow each, numbered in their payload.
fn udp_capture(path: &Path, n: u32, flows: u16) {
    let mut writer = Writer::create(path).unwrap();
    for i in 0..n {
        let mut bytes = vec![0; 12];
        bytes.extend([0x08, 0x00, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        bytes.extend((1024 + (i % u32::from(flows)) as u16).to_be_bytes());
        bytes.extend([0, 53, 0, 26, 0, 0]);
        bytes.extend(format!("payload {i:010}").as_bytes());
        let wire_len = bytes.len() as u32;
        let time_ns = u64::from(i) * 1000;
        let frame = Frame {
            bytes: &bytes,
            wire_len,
            time_ns,
            link: LinkType::ETHERNET,
            interface: 0,
            meta: Default::default(),
        };
        writer.write(frame, None).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn rejected_packets_are_answered() {
    let bench = Bench::new(
        "add inspect 1 udp from any to any 1023\nadd reset tcp from any to any\nadd unreach port udp from any to any",
    );
    let write = |name: &str, packets: &[String]| {
        let path = bench.path(name);
        let mut writer = Writer::create(&path).unwrap();
        for (time_ns, words) in (0..).step_by(1_000_000).zip(packets) {
            let bytes = towpath_gate::gate::Written::parse(words).unwrap().frame;
            let wire_len = bytes.len() as u32;
            let frame = Frame {
                bytes: &bytes,
                wire_len,
                time_ns,
                link: LinkType::ETHERNET,
                interface: 0,
                meta: Default::default(),
            };
            writer.write(frame, None).unwrap();
        }
        writer.finish().unwrap();
        path
    };
    let counts =
        |report: &Value| ["sent", "silent", "limited", "unsent"].map(|key| number(&report["replies"], key));
    let replies = bench.path("replies.pcap");
    let file = ["--replies", replies.to_str().unwrap()];

    let mut packets: Vec<_> = (0..300).map(|port| format!("tcp 10.0.0.1:{port} > 10.0.0.2:80 syn")).collect();
    packets.insert(0, "udp 10.0.0.1:1000 > 10.0.0.2:54 vlan 7".to_owned());
    packets.push("udp 10.0.0.1:1000 > 224.0.0.1:54".to_owned());
    let capture = write("in.pcap", &packets);
    assert_eq!(counts(&bench.report(&capture, &file)), [200, 1, 101, 0]);
    let sent = frames(&replies);
    assert_eq!(sent.len(), 200);
    // ICMP's type and code behind the tag; the rest are resets.
    assert_eq!((&sent[0][12..16], &sent[0][38..40]), (&[0x81, 0, 0, 7][..], &[3, 3][..]));
    assert!(sent[1..].iter().all(|frame| frame[23] == 6 && frame[47] == 0x14));
    assert_eq!(sent[1][..12], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    assert_eq!(counts(&bench.report(&capture, &[])), [0, 1, 101, 200]);

    let capture = write("inspected.pcap", &["udp 10.0.0.1:1000 > 10.0.0.2:1023 len 20".to_owned()]);
    let queue = format!("1={}", troublesome("reject"));
    let report = bench.report(&capture, &[&file[..], &["--queue", &queue]].concat());
    assert_eq!(counts(&report), [1, 0, 0, 0]);
    assert_eq!(frames(&replies)[0][34..36], [3, 13]);

    let same = bench.run(&capture, &["--out", "x.pcap", "--replies", "x.pcap"]);
    assert_eq!(same.status.code(), Some(64), "{}", text(&same.stderr));
}

#[test]
fn the_office_example_does_what_its_rules_say() {
    let rules = root().join("examples/office.ipfw");
    let bench = Bench::new(&fs::read_to_string(rules).unwrap());
    let out = bench.path("out.pcap");
    let report = bench.report(
        &office(),
        &[
            "--out",
            out.to_str().unwrap(),
            "--queue",
            "1=towpath inspect --queue 1 --match password= --verdict drop",
        ],
    );
    let with_password = |frame: &Vec<u8>| frame.windows(9).any(|w| w == b"password=");
    let before = frames(&office());
    let after = frames(&out);
    assert_eq!(number(&report, "packets"), before.len() as u64);
    assert_eq!(number(&report, "passed"), after.len() as u64);
    assert!(before.iter().any(with_password));
    assert!(!after.iter().any(with_password), "the inspector dropped them all");
    let queue = &report["queues"][0];
    assert!(number(queue, "dropped") > 0 && number(queue, "passed") > 0, "{queue}");
    assert_eq!(number(queue, "lost"), 0);
    assert!(number(&report["states"], "created") > 0);
    assert!(number(&report["conversations"], "tcp") > 0 && number(&report["conversations"], "udp") > 0);
}

#[test]
fn the_text_report_shows_the_rules_as_ipfw_does() {
    let bench = Bench::new("add 100 count ip from any to any\nadd 200 allow ip from any to any\n");
    let output = bench.run(&office(), &[]);
    let printed = text(&output.stdout);
    let line = printed.lines().find(|line| line.starts_with("00100 ")).unwrap_or_else(|| panic!("{printed}"));
    assert!(line.ends_with(" count ip from any to any"), "{line}");
    assert!(printed.contains("passed"), "{printed}");
}

#[test]
fn output_is_in_capture_order_and_whole() {
    let bench = Bench::new(
        "add divert 1 udp from any to any 53\nadd tee 2 ip from any to any\nadd allow ip from any to any\n",
    );
    let capture = bench.path("in.pcap");
    let out = bench.path("out.pcap");
    udp_capture(&capture, 20_000, 500);
    let hold = format!("1={}", troublesome("hold"));
    let report = bench.report(
        &capture,
        &[
            "--out",
            out.to_str().unwrap(),
            "--queue",
            &hold,
            "--queue",
            "2=towpath inspect --queue 2 --match x --verdict pass",
        ],
    );
    assert_eq!(number(&report, "inspected"), 20_000);
    assert_eq!(number(&report["queues"][0], "passed"), 20_000);
    assert_eq!(number(&report["queues"][1], "frames"), 20_000);
    assert_eq!(frames(&out), frames(&capture));
}

#[test]
fn a_replaced_payload_goes_out_and_the_rest_stays() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    let out = bench.path("out.pcap");
    udp_capture(&capture, 50, 7);
    let queue = format!("1={}", troublesome("upper"));
    let report = bench.report(&capture, &["--out", out.to_str().unwrap(), "--queue", &queue]);
    assert_eq!(number(&report["queues"][0], "replaced"), 50);
    for (before, after) in frames(&capture).iter().zip(frames(&out)) {
        // The test's own packets had no IPv4 checksum; what goes out again has one.
        assert_eq!((&before[..24], &before[26..34]), (&after[..24], &after[26..34]));
        assert_ne!(after[24..26], [0, 0]);
        assert_eq!(before[42..].to_ascii_uppercase(), after[42..]);
    }
}

/// The inspector sees the first bytes and answers with those: the rest was not captured before, nor after.
#[test]
fn a_packet_that_was_cut_short_can_be_replaced() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let (whole, capture, out) = (bench.path("whole.pcap"), bench.path("in.pcap"), bench.path("out.pcap"));
    udp_capture(&whole, 50, 7);
    let mut writer = Writer::create(&capture).unwrap();
    for bytes in frames(&whole) {
        let wire_len = bytes.len() as u32;
        writer.write(Frame { wire_len, ..Frame::new(&bytes[..48], LinkType::ETHERNET) }, None).unwrap();
    }
    writer.finish().unwrap();
    let queue = format!("1={}", troublesome("upper"));
    let report = bench.report(&capture, &["--out", out.to_str().unwrap(), "--queue", &queue]);
    assert_eq!((number(&report["queues"][0], "replaced"), number(&report, "passed")), (50, 50));
    let (mut reader, mut burst) = (Reader::open(&out).unwrap(), Burst::new(64));
    assert_eq!(reader.receive(&mut burst).unwrap(), Received::Frames);
    assert_eq!(burst.len(), 50);
    for frame in burst.iter() {
        assert_eq!((frame.bytes.len(), frame.wire_len, &frame.bytes[42..]), (48, 60, &b"PAYLOA"[..]));
    }
}

#[test]
fn an_inspector_that_dies_costs_its_packets_the_default_verdict() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 5_000, 100);
    let queue = format!("1={}", troublesome("die 1000"));
    for (default, rest) in [("drop", 0), ("pass", 4_000)] {
        let report = bench.report(&capture, &["--queue", &queue, "--default-verdict", default]);
        assert_eq!(number(&report["queues"][0], "passed"), 1_000);
        assert_eq!(number(&report["queues"][0], "lost"), 4_000);
        assert_eq!(number(&report, "passed"), 1_000 + rest);
        assert_eq!(number(&report, "dropped"), 4_000 - rest);
    }
    let output = bench.run(&capture, &["--queue", &queue, "--deadline", "600"]);
    assert!(
        text(&output.stderr).contains("warning: queue 1: the inspector is gone"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn several_inspectors_share_a_queue() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 3_000, 100);
    let inspector = "1=towpath inspect --queue 1 --match 7$ --verdict drop";
    // Policy, frames that three inspectors get in all.
    for (policy, frames) in [
        ("1=fanout:exclusive", 3_000),
        ("1=fanout:flow", 3_000),
        ("1=fanout:cpu", 3_000),
        ("1=fanout:least", 3_000),
        ("1=fanout:broadcast,workers:1", 9_000),
    ] {
        let report = bench.report(
            &capture,
            &["--queue", inspector, "--queue", inspector, "--queue", inspector, "--queue-policy", policy],
        );
        let queue = &report["queues"][0];
        assert_eq!(number(queue, "frames"), frames, "{policy}: {queue}");
        assert_eq!((number(&report, "dropped"), number(&report, "inspected")), (300, 3_000), "{policy}");
        assert_eq!(number(queue, "lost"), 0, "{policy}");
    }
    let report = bench.report(&capture, &["--queue", inspector, "--queue-policy", "1=fanout:tap,workers:2"]);
    assert_eq!(number(&report, "passed"), 3_000, "what a tap says changes nothing");
    assert_eq!(number(&report["queues"][0], "frames"), 6_000);
}

#[test]
fn what_one_of_several_inspectors_had_goes_to_another() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 5_000, 100);
    let stays = "1=towpath inspect --queue 1 --match payload --verdict pass";
    // By flow each has its share however fast the other is; the first of the least loaded has the first packet, and no more is sure.
    for (dies, policy) in [("die 300", "1=fanout:flow"), ("die 0", "1=fanout:least")] {
        let dies = format!("1={}", troublesome(dies));
        let report = bench.report(&capture, &["--queue", &dies, "--queue", stays, "--queue-policy", policy]);
        assert_eq!(number(&report, "passed"), 5_000, "{policy}: {report}");
        assert!(number(&report["queues"][0], "redelivered") > 0, "{policy}: {report}");
    }
    let dies = format!("1={}", troublesome("die 300"));
    // Two that die take their packets with them: one is offered once more, not for ever.
    let report = bench.report(&capture, &["--queue", &dies, "--queue", &dies]);
    assert_eq!(number(&report["queues"][0], "passed"), 600);
    assert_eq!(number(&report, "dropped"), 4_400);
}

#[test]
fn overload_policies_decide_about_packets_that_find_no_room() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    // One burst, for which the clock is looked at once.
    udp_capture(&capture, 64, 10);
    // It takes packets and never answers; the mark leaves room for four until the deadline.
    let stalls = format!("1={}", troublesome("stall 0"));
    // Policy of queue 1; packets that passed, frames lost for want of room, the first packet that passed.
    let rows = [
        ("overload:drop-newest", 0, 60, None),
        ("overload:drop", 0, 60, None),
        ("overload:pass", 60, 60, Some("payload 0000000004")),
        ("overload:pass,default:pass", 64, 60, Some("payload 0000000000")),
        // The last twenty wait until the deadline.
        ("overload:drop-oldest:20,default:pass", 24, 60, Some("payload 0000000000")),
        ("overload:queue:2", 60, 0, Some("payload 0000000004")),
    ];
    std::thread::scope(|scope| {
        for (policy, passed, overload, first) in rows {
            let (bench, capture, stalls) = (&bench, &capture, &stalls);
            scope.spawn(move || {
                let out = bench.path(&format!("{policy}.pcap"));
                let policy = format!("1=high:4,deadline:3,{policy}");
                let other = "2=towpath inspect --queue 2 --match payload --verdict pass";
                let out_arg = out.to_str().unwrap();
                let args = ["--queue", stalls, "--queue", other, "--queue-policy", &policy, "--out", out_arg];
                let report = bench.report(capture, &args);
                let queue = &report["queues"][0];
                assert_eq!(number(&report, "passed"), passed, "{policy}: {queue}");
                assert_eq!(number(&queue["lost_by"], "overload"), overload, "{policy}: {queue}");
                let written = frames(&out).first().map(|frame| text(&frame[42..]));
                assert_eq!(written.as_deref(), first, "{policy}");
            });
        }
    });
    // Who blocks waits for the deadline, and then for nobody until an answer comes.
    let report = bench.report(&capture, &["--queue", &stalls, "--queue-policy", "1=high:4,deadline:0.1"]);
    let lost = &report["queues"][0]["lost_by"];
    assert_eq!((number(lost, "overdue"), number(lost, "overload")), (4, 60), "{report}");
}

#[test]
fn losses_are_told_in_the_stream_and_the_inspector_goes_on() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 5_000, 10);
    let queue = "1=towpath inspect --queue 1 --match nothing --verdict drop --verbose";
    let policy = "1=high:1,overload:drop-newest";
    let args = ["--queue", queue, "--queue-policy", policy, "--deadline", "60", "--json"];
    let output = bench.run(&capture, &args);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let queue = &report["queues"][0];
    assert!(number(queue, "passed") > 0, "{queue}");
    assert_eq!(number(queue, "passed") + number(&queue["lost_by"], "overload"), 5_000, "{queue}\n{said}");
    // What was lost after the last packet that it got is not told. What the engine says meanwhile may stand in the same line.
    let told: u64 = said
        .split("queue 1: ")
        .filter_map(|line| line.split_once(" packets were lost: NoRoom"))
        .map(|(count, _)| count.parse::<u64>().expect("a number"))
        .sum();
    assert!(told > 0 && told <= number(queue, "lost"), "{told}: {queue}");
}

#[test]
fn a_verdict_for_the_flow_spares_its_later_packets() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 1_000, 10);
    // One packet of each of three flows matches.
    let queue = "1=towpath inspect --queue 1 --match 000001[345]$ --verdict drop --flow";
    let report = bench.report(&capture, &["--queue", queue, "--queue-policy", "1=high:1"]);
    let queue = &report["queues"][0];
    assert_eq!(number(&report, "dropped"), 3 * 99, "the first ten packets of the capture passed: {report}");
    assert_eq!(number(queue, "dropped") + number(queue, "by_flow"), 3 * 99);
    assert!(number(queue, "by_flow") > 3 * 80, "{queue}");
    assert_eq!(number(queue, "frames") + number(queue, "by_flow"), 1_000);
}

#[test]
fn an_inspector_that_stops_answering_costs_one_deadline() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 20_000, 100);
    let queue = format!("1={}", troublesome("stall 300"));
    let report = bench.report(&capture, &["--queue", &queue, "--deadline", "10"]);
    assert_eq!(number(&report["queues"][0], "passed"), 300);
    assert_eq!(number(&report["queues"][0], "lost"), 19_700);
    assert_eq!(number(&report, "dropped"), 19_700);
}

#[test]
fn an_inspector_that_writes_garbage_is_detached_and_passes_nothing() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: python3 is not installed");
        return;
    }
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 20_000, 100);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/garbage.py");
    for seed in 1..4 {
        let queue = format!("1=python3 {} {seed}", script.display());
        let output = bench.run(&capture, &["--queue", &queue, "--json", "--deadline", "600"]);
        let stderr = text(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(number(&report, "packets"), 20_000);
        assert_eq!(number(&report, "passed"), 0, "{report}\n{stderr}");
        assert_eq!(number(&report, "dropped"), 20_000);
        assert!(stderr.contains("the inspector was detached"), "{stderr}");
        // It could write somewhere, and not everywhere: the payload was out of its reach.
        let said =
            stderr.lines().find(|line| line.starts_with("garbage: ")).unwrap_or_else(|| panic!("{stderr}"));
        let numbers: Vec<u32> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(numbers[1] > 0 && numbers[1] < numbers[0], "{said}");
    }
}

#[test]
fn a_queue_that_nobody_serves_drops_and_says_so() {
    let bench = Bench::new("add inspect 7 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 10, 1);
    let report = bench.report(&capture, &[]);
    assert_eq!(number(&report["queues"][0], "number"), 7);
    assert_eq!(number(&report["queues"][0], "lost"), 10);
    assert_eq!(number(&report, "dropped"), 10);
}

#[test]
fn ports_are_named_by_vlan_and_routes_give_a_way_out() {
    let bench = Bench::new(
        "add 100 count ip from any to any in recv cap0\n\
         add 200 count ip from any to any out recv cap0 xmit lan0\n\
         add 300 allow ip from any to any\n",
    );
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 10, 1);
    let args = ["--port", "lan0=vlan:5", "--route", "10.0.0.0/24=lan0", "--route", "0.0.0.0/0=cap0"];
    let report = bench.report(&capture, &args);
    let packets: Vec<u64> = (0..3).map(|i| number(&report["rules"][i], "packets")).collect();
    assert_eq!(packets, [10, 10, 20]);
}

#[test]
fn several_captures_share_states_and_time_never_goes_back() {
    let bench = Bench::new("add allow udp from any to any keep-state\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 100, 10);
    let second = capture.to_str().unwrap().to_owned();
    let report = bench.report(&capture, &[&second]);
    assert_eq!(number(&report, "packets"), 200);
    assert_eq!(number(&report["states"], "created"), 10);
}

#[test]
fn fragments_are_put_together_where_a_rule_says_so() {
    let bench = Bench::new(
        "add 100 reass ip from any to any\n\
         add 200 count ip from any to any frag\n\
         add 300 inspect 1 udp from 192.168.10.53 to any\n\
         add 400 allow ip from any to any\n",
    );
    let out = bench.path("out.pcap");
    let queue = format!("1={}", troublesome("hold"));
    let report = bench.report(&office(), &["--out", out.to_str().unwrap(), "--queue", &queue]);
    assert_eq!(
        number(&report, "passed"),
        number(&report, "packets"),
        "each fragment counts with its datagram"
    );
    assert_eq!(number(&report["rules"][1], "packets"), 0, "no fragment gets past reass");
    let (before, after) = (frames(&office()), frames(&out));
    let longest = |frames: &[Vec<u8>]| frames.iter().map(Vec::len).max().unwrap();
    assert!(after.len() < before.len());
    assert!(longest(&after) > longest(&before), "{} {}", longest(&after), longest(&before));
}

#[test]
fn a_trailer_behind_the_payload_hides_nothing_from_an_inspector() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    let mut writer = Writer::create(&capture).unwrap();
    let mut bytes = vec![0; 12];
    bytes.extend([0x08, 0x00, 0x45, 0, 0, 38, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([4, 0, 0, 53, 0, 18, 0, 0]);
    bytes.extend(b"evil words");
    bytes.extend([0; 40]);
    let frame = Frame {
        bytes: &bytes,
        wire_len: 0,
        time_ns: 0,
        link: LinkType::ETHERNET,
        interface: 0,
        meta: Default::default(),
    };
    writer.write(frame, None).unwrap();
    writer.finish().unwrap();
    let report =
        bench.report(&capture, &["--queue", "1=towpath inspect --queue 1 --match ^evil --verdict drop"]);
    assert_eq!(number(&report, "dropped"), 1);
}

#[test]
fn a_thousand_tees_to_nobody_are_no_depth() {
    let tees = "add tee 1 ip from any to any\n".repeat(60_000);
    let bench = Bench::new(&(tees + "add allow ip from any to any\n"));
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 2, 1);
    let report = bench.report(&capture, &[]);
    assert_eq!((number(&report, "passed"), number(&report, "inspected")), (2, 0));
    assert_eq!(number(&report["queues"][0], "lost"), 120_000);
}

#[test]
fn explain_says_what_a_rule_does_and_why() {
    let bench = Bench::new(
        "add 100 deny tcp from any to any 23\n\
         add 200 allow tcp from any to any 22 in setup keep-state\n",
    );
    let rules = bench.path("rules.ipfw").to_str().unwrap().to_owned();
    let words = ["in", "cap0", "tcp", "10.0.0.1:1234", ">", "10.0.0.2:22", "syn"];
    let args: Vec<&str> = ["explain", "--rules", &rules].into_iter().chain(words).collect();
    let output = towpath(&args);
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for line in
        ["00100 deny tcp from any to any 23", "dst-port 23", "makes a state :default: pass", "in cap0: pass"]
    {
        assert!(printed.contains(line), "{printed} lacks {line}");
    }
    let json: Value = serde_json::from_slice(&towpath(&[&args[..], &["--json"]].concat()).stdout).unwrap();
    assert_eq!(json["walks"][0]["steps"][0]["outcome"], "failed");
    assert_eq!(json["walks"][0]["verdict"], "pass");

    // The second packet of the capture finds the state that the first one made.
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 2, 1);
    fs::write(bench.path("rules.ipfw"), "add allow udp from any to any keep-state\n").unwrap();
    let capture = capture.to_str().unwrap();
    let output = towpath(&["explain", "--rules", &rules, "--capture", capture, "--packet", "2"]);
    assert!(text(&output.stdout).contains("found the state"), "{}", text(&output.stdout));
    let output = towpath(&["explain", "--rules", &rules, "--capture", capture, "--packet", "3"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("has 2 packets"), "{}", text(&output.stderr));
    // A packet in words behind those of a capture, and one whose state cannot be made.
    let words = ["in", "cap0", "udp", "10.9.9.9:1", ">", "10.0.0.2:22"];
    let explain = |more: &[&str]| {
        let args: Vec<&str> =
            ["explain", "--rules", &rules].into_iter().chain(more.iter().copied()).chain(words).collect();
        text(&towpath(&args).stdout)
    };
    fs::write(
        bench.path("rules.ipfw"),
        "add allow udp from any to any limit dst-addr 1\nadd deny ip from any to any\n",
    )
    .unwrap();
    assert!(explain(&[]).contains("note: there are no states before a packet in words"), "{}", explain(&[]));
    let full = explain(&["--capture", capture]);
    assert!(full.contains("note: with the states that there are the packet ends otherwise: drop"), "{full}");
    let beside = explain(&["--capture", capture, "--packet", "1", "--json"]);
    assert!(beside.contains("ends otherwise"), "{beside}");
    fs::write(bench.path("rules.ipfw"), "add allow udp from any to any set-limit src-port 1\n").unwrap();
    assert!(!explain(&[]).contains("note:"), "{}", explain(&[]));
    fs::write(bench.path("rules.ipfw"), "add check-state\nadd allow udp from any to any record-state\n")
        .unwrap();
    assert!(!explain(&["--capture", capture]).contains("note:"), "{}", explain(&["--capture", capture]));
    let output = towpath(&["explain", "--rules", &rules, "in", "cap0", "tcp", "10.0.0.1"]);
    assert_eq!(output.status.code(), Some(64), "{}", text(&output.stderr));
}

#[test]
fn check_names_what_is_covered_unused_and_changed() {
    let bench = Bench::new(
        "add 100 allow udp from any to any\nadd 200 deny udp from any to any 53\nadd 300 allow tcp from any to any\n",
    );
    fs::write(bench.path("old.ipfw"), "add 100 allow udp from any to any\nadd 150 deny ip from any to any\n")
        .unwrap();
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 2, 1);
    let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
    let output = towpath(&["check", &p("rules.ipfw")]);
    assert!(output.status.success());
    assert!(
        text(&output.stdout).starts_with("add 00100 allow udp from any to any\nadd 00200 "),
        "{}",
        text(&output.stdout)
    );
    assert!(text(&output.stderr).contains("rules.ipfw:2:"), "rule 200 is shadowed: {}", text(&output.stderr));
    let output = towpath(&[
        "check",
        &p("rules.ipfw"),
        "--capture",
        &p("in.pcap"),
        "--against",
        &p("old.ipfw"),
        "--json",
    ]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let unused: Vec<u64> =
        json["unused"].as_array().unwrap().iter().map(|rule| number(rule, "number")).collect();
    assert_eq!(unused, [200, 300]);
    let shadowed = &json["warnings"][0];
    assert_eq!((&shadowed["kind"], number(shadowed, "line")), (&"shadowed".into(), 2), "{json}");
    assert_eq!(json["changes"]["removed"].as_array().unwrap().len(), 1, "{json}");
    assert_eq!(json["changes"]["added"].as_array().unwrap().len(), 2, "{json}");
}

/// What `check` prints is a rule file that says the same, tables, labels and sets included; and every error has its place.
#[test]
fn check_prints_the_whole_file_and_names_every_error() {
    let rules = "ipfw -q table t create type addr valtype skipto,tag limit 9\ntable t add 10.0.0.0/8 :end,7\n\
                 pipe 3 config bw 1Mbit/s\nadd skipto :end ip from table(t) to any // on\n\
                 add set 4 pipe 3 ip from any to any\n:end\nadd 900 allow ip from any to me\nset disable 4\n";
    let bench = Bench::new(rules);
    let printed = |name: &str| {
        let output = towpath(&["check", bench.path(name).to_str().unwrap()]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let once = printed("rules.ipfw");
    for line in ["table t create type addr valtype skipto,tag limit 9", "pipe 3 ", ":end", "set disable 4"] {
        assert!(once.contains(line), "{line} in {once}");
    }
    fs::write(bench.path("again.ipfw"), &once).unwrap();
    assert_eq!(printed("again.ipfw"), once);

    fs::write(bench.path("bad.ipfw"), "add allow tcp form any to any 80,x\nadd allow ip\u{0} from\nfoo\n")
        .unwrap();
    let bad = bench.path("bad.ipfw");
    let output = towpath(&["check", bad.to_str().unwrap(), "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let places: Vec<_> = json["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|error| {
            assert_eq!((&error["file"], &error["kind"]), (&bad.to_str().unwrap().into(), &"error".into()));
            (number(error, "line"), number(error, "column"), number(error, "end"))
        })
        .collect();
    assert_eq!(places, [(1, 15, 19), (1, 34, 35), (2, 11, 14), (3, 1, 4)], "{json}");
    let output = towpath(&["check", "/no/such", "--json"]);
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(3), ""));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["ok"], &json["errors"][0]["file"]), (&false.into(), &"/no/such".into()), "{json}");
}

#[test]
fn exit_codes_tell_what_went_wrong() {
    let bench = Bench::new("add allow ip from any to any\n");
    fs::write(
        bench.path("bad.ipfw"),
        "add allow tcp from any to any keepstate\nadd frobnicate ip from any to any\n",
    )
    .unwrap();
    fs::write(bench.path("noise.pcap"), b"this is no capture").unwrap();
    let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
    let office = office().to_str().unwrap().to_owned();
    let rows: &[(&[&str], i32, &[&str])] = &[
        (&["replay", &p("noise.pcap"), "--rules", &p("rules.ipfw")], 2, &["noise.pcap", "not a capture"]),
        (&["replay", &p("none.pcap"), "--rules", &p("rules.ipfw")], 2, &["none.pcap"]),
        (&["replay", "/", "--rules", &p("rules.ipfw")], 2, &["directory"]),
        (
            &["replay", &office, "--rules", &p("bad.ipfw")],
            3,
            &["bad.ipfw:1:31: ", "did you mean \"keep-state\"", "bad.ipfw:2:5: "],
        ),
        (&["replay", &office, "--rules", &p("none.ipfw")], 3, &["none.ipfw"]),
        (&["check", &p("bad.ipfw")], 3, &["bad.ipfw:1:31: ", "bad.ipfw:2:5: "]),
        (
            &["replay", &office, "--rules", &p("rules.ipfw"), "--queue", "1=/no/such/program"],
            4,
            &["/no/such/program"],
        ),
        (
            &["replay", &office, "--rules", &p("rules.ipfw"), "--queue", "1=true"],
            4,
            &["ended before it attached"],
        ),
        (
            &["replay", &office, "--rules", &p("rules.ipfw"), "--route", "0.0.0.0/0=lan0"],
            64,
            &["lan0", "cap0"],
        ),
        (&["replay", &office, "--rules", &p("rules.ipfw"), "--out", &office], 64, &["overwrite"]),
        (&["replay", &office], 64, &["--rules"]),
        (&["frobnicate"], 64, &["frobnicate"]),
        (&["--help"], 0, &[]),
        (&["--version"], 0, &[]),
    ];
    for (args, code, said) in rows {
        let output = towpath(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(*code), "{args:?}: {stderr}");
        for words in *said {
            assert!(stderr.contains(words), "{args:?} said {stderr:?}, not {words:?}");
        }
    }
}

#[test]
fn a_truncated_capture_gives_what_is_whole_and_a_warning() {
    let bench = Bench::new("add allow ip from any to any\n");
    let whole = fs::read(office()).unwrap();
    let cut = bench.path("cut.pcap");
    fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let output = bench.run(&cut, &["--json"]);
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("warning: "), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(number(&report, "packets"), frames(&cut).len() as u64);
}

#[test]
fn standard_input_is_a_capture_too() {
    let bench = Bench::new("add allow ip from any to any\n");
    let rules = bench.path("rules.ipfw");
    let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["replay", "-", "--json", "--rules", rules.to_str().unwrap()])
        .stdin(fs::File::open(office()).unwrap())
        .output()
        .unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(number(&report, "packets"), frames(&office()).len() as u64);
}

#[test]
fn man_pages_and_completions_name_every_command() {
    let bench = Bench::new("");
    let output = towpath(&["completions", "bash"]);
    let script = text(&output.stdout);
    assert!(script.contains("replay") && script.contains("--capture"), "{script}");
    assert!(!script.contains("demo-part"), "what is hidden is offered to nobody");
    let man = bench.path("man");
    assert!(towpath(&["man", man.to_str().unwrap()]).status.success());
    for command in [
        "towpath.1",
        "towpath-replay.1",
        "towpath-check.1",
        "towpath-inspect.1",
        "towpath-ctl.1",
        "towpath-ctl-show-rings.1",
        "towpath-ctl-trace.1",
    ] {
        assert!(man.join(command).exists(), "{command}");
    }
}
