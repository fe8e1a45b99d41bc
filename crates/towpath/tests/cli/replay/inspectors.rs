//! Inspectors: replacements, shared queues, and the effects of faulty inspectors.

use std::path::Path;

use serde_json::Value;
use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Frame, LinkType, Port, Received};

use super::bench::{Bench, frames, number, text, troublesome, udp_capture};

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
        // The packets of the test have no IPv4 checksum; replaced packets have one.
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
    let report =
        bench.report(&capture, &["--queue", inspector, "--queue-policy", "1=fanout:mirror,workers:2"]);
    assert_eq!(number(&report, "passed"), 3_000, "a mirror listener has no verdict");
    assert_eq!(number(&report["queues"][0], "frames"), 6_000);
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
fn frames_of_a_dead_inspector_go_to_another() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 5_000, 100);
    let stays = "1=towpath inspect --queue 1 --match payload --verdict pass";
    // With `flow`, each inspector gets its share, whatever the speed of the other. With `least`, only the receiver of the first packet
    // is certain.
    for (dies, policy) in [("die 300", "1=fanout:flow"), ("die 0", "1=fanout:least")] {
        let dies = format!("1={}", troublesome(dies));
        let report = bench.report(&capture, &["--queue", &dies, "--queue", stays, "--queue-policy", policy]);
        assert_eq!(number(&report, "passed"), 5_000, "{policy}: {report}");
        assert!(number(&report["queues"][0], "redelivered") > 0, "{policy}: {report}");
    }
    let dies = format!("1={}", troublesome("die 300"));
    // Two inspectors die with their packets: a packet is offered to another inspector only once.
    let report = bench.report(&capture, &["--queue", &dies, "--queue", &dies]);
    assert_eq!(number(&report["queues"][0], "passed"), 600);
    assert_eq!(number(&report, "dropped"), 4_400);
}

#[test]
fn overload_policies_decide_about_packets_that_find_no_room() {
    let bench = Bench::new("add inspect 1 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    // One burst, for which the clock is read once.
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
    // With `block` the replay waits until the deadline, and then not again until the inspector answers.
    let report = bench.report(&capture, &["--queue", &stalls, "--queue-policy", "1=high:4,deadline:0.1"]);
    let lost = &report["queues"][0]["lost_by"];
    assert_eq!((number(lost, "overdue"), number(lost, "overload")), (4, 60), "{report}");
}

#[test]
fn losses_are_reported_in_the_stream_and_the_inspector_continues() {
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
    // Losses after the last packet that the inspector got are not reported. A message of the engine may be in the same line.
    let told: u64 = said
        .split("queue 1: ")
        .filter_map(|line| line.split_once(" packets were lost: NoRoom"))
        .map(|(count, _)| count.parse::<u64>().expect("a number"))
        .sum();
    assert!(told > 0 && told <= number(queue, "lost"), "{told}: {queue}");
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

#[towpath_testenv::needs("python3")]
#[test]
fn an_inspector_that_writes_garbage_is_detached_and_passes_nothing() {
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
fn a_queue_without_inspectors_drops_and_counts() {
    let bench = Bench::new("add inspect 7 udp from any to any\nadd allow ip from any to any\n");
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 10, 1);
    let report = bench.report(&capture, &[]);
    assert_eq!(number(&report["queues"][0], "number"), 7);
    assert_eq!(number(&report["queues"][0], "lost"), 10);
    assert_eq!(number(&report, "dropped"), 10);
}

#[test]
fn tees_without_an_inspector_use_no_stack() {
    let tees = "add tee 1 ip from any to any\n".repeat(60_000);
    let bench = Bench::new(&(tees + "add allow ip from any to any\n"));
    let capture = bench.path("in.pcap");
    udp_capture(&capture, 2, 1);
    let report = bench.report(&capture, &[]);
    assert_eq!((number(&report, "passed"), number(&report, "inspected")), (2, 0));
    assert_eq!(number(&report["queues"][0], "lost"), 120_000);
}
