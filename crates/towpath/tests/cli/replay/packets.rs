//! Outcomes of packets, their reports, and the exit codes.

use std::fs;
use std::process::Command;

use serde_json::Value;
use towpath_port::pcap::Writer;
use towpath_port::{Frame, LinkType};

use super::bench::{Bench, frames, number, office, root, text, towpath, troublesome, udp_capture};

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
fn rejected_packets_are_answered() {
    let bench = Bench::new(
        "add inspect 1 udp from any to any 1023\nadd reset tcp from any to any\nadd unreach port udp from any to any",
    );
    let write = |name: &str, packets: &[String]| {
        let path = bench.path(name);
        let mut writer = Writer::create(&path).unwrap();
        for (time_ns, words) in (0..).step_by(1_000_000).zip(packets) {
            let bytes = towpath_gate::PacketSpec::parse(words).unwrap().frame;
            writer.write(Frame { time_ns, ..Frame::new(&bytes, LinkType::ETHERNET) }, None).unwrap();
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
    // The ICMP type and code after the tag; the rest are resets.
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

/// The lines of `log` rules are those of a live engine, with the capture's time. No line is missing.
#[test]
fn log_rules_write_their_lines_and_the_number_of_suppressed_ones() {
    let bench =
        Bench::new("add 100 count log ip from any to any\nadd 200 deny log logamount 2 udp from any to any");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 3000, 1);
    let packet = "UDP 10.0.0.1:1024 10.0.0.2:53 in via cap0";
    let log = bench.path("packets.log");
    let output = bench.run(&capture, &["--log", log.to_str().unwrap()]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let written = fs::read_to_string(&log).unwrap();
    for (lines, place) in
        [(written.clone(), "file"), (text(&bench.run(&capture, &[]).stderr), "standard error")]
    {
        let lines: Vec<&str> = lines.lines().collect();
        let of = |rule: &str| lines.iter().filter(|line| line.contains(rule)).copied().collect::<Vec<_>>();
        let counted = of(" ipfw: 100 ");
        assert_eq!(counted.len(), 3000, "{place}");
        assert_eq!(counted[0], format!("1970-01-01T00:00:00.000000Z ipfw: 100 Count {packet}"), "{place}");
        assert_eq!(counted[2999], format!("1970-01-01T00:00:00.002999Z ipfw: 100 Count {packet}"), "{place}");
        assert_eq!(
            of(" ipfw: 200 "),
            [
                format!("1970-01-01T00:00:00.000000Z ipfw: 200 Deny {packet}"),
                format!("1970-01-01T00:00:00.000001Z ipfw: 200 Deny {packet}, limit 2 reached"),
                "1970-01-01T00:00:00.002999Z ipfw: 200 suppressed 2998 lines: limit 2 reached".to_owned(),
            ],
            "{place}"
        );
        assert_eq!(lines.len(), 3003, "{place}");
    }
    let output = bench.run(&capture, &["--log", capture.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(64));
    assert!(text(&output.stderr).contains("would overwrite"), "{}", text(&output.stderr));
    let output = bench.run(&capture, &["--log", "/dev/full"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--log: /dev/full: No space left"), "{}", text(&output.stderr));
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
