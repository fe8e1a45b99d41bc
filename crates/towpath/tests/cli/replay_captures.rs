//! `towpath replay` with unusual captures: unknown link types, wrong timestamps, several captures, and the output as input.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::Value;
use towpath_gate::PacketSpec;
use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Frame, LinkType, Port, Received};

const SECOND: u64 = 1_000_000_000;
const YEAR: u64 = 365 * 86_400 * SECOND;
/// In 2020.
const THEN: u64 = 50 * YEAR;

/// A directory with rules and captures.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new(rules: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("rules.ipfw"), rules).unwrap();
        Self(directory)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A capture of packets in words, each with its time.
    fn capture(&self, name: &str, packets: &[(u64, &str)]) {
        let mut writer = Writer::create(self.path(name)).unwrap();
        for (time_ns, words) in packets {
            let bytes = PacketSpec::parse(words).unwrap().frame;
            let frame = Frame { time_ns: *time_ns, ..Frame::new(&bytes, LinkType::ETHERNET) };
            writer.write(frame, None).unwrap();
        }
        writer.finish().unwrap();
    }

    fn towpath(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
        command.current_dir(self.0.path()).args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.towpath(args).output().expect("the program starts")
    }

    /// The report of a replay, and its standard error output.
    fn replay(&self, args: &[&str]) -> (Value, String) {
        let output = self.run(&[&["replay", "--rules", "rules.ipfw", "--json"][..], args].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        (serde_json::from_slice(&output.stdout).unwrap(), said)
    }
}

fn states(report: &Value) -> [u64; 2] {
    ["created", "left"]
        .map(|key| report["states"][key].as_u64().unwrap_or_else(|| panic!("{key} of {report}")))
}

fn packets(path: &Path) -> u64 {
    let (mut reader, mut burst) = (Reader::open(path).unwrap(), Burst::new(64));
    while reader.receive(&mut burst).unwrap() == Received::Frames {}
    reader.packets()
}

#[test]
fn unsupported_link_types_are_reported() {
    let bench = Bench::new("add allow tcp from any to any\nadd allow ip from any to any\n");
    let mut writer = Writer::create(bench.path("usb.pcap")).unwrap();
    for _ in 0..3 {
        writer.write(Frame::new(&[0; 60], LinkType(189)), None).unwrap();
    }
    writer.finish().unwrap();
    let expected = "3 packets begin with a link header that is not supported, USB_LINUX (189)";
    let (report, said) = bench.replay(&["usb.pcap", "usb.pcap"]);
    assert_eq!(report["packets"], 6);
    assert!(
        said.contains("6 packets begin with a link header that is not supported, USB_LINUX (189)"),
        "{said}"
    );
    let rules = ["--rules", "rules.ipfw"];
    let explain = [&["explain", "--capture", "usb.pcap", "--packet", "3"][..], &rules].concat();
    for args in [&["check", "rules.ipfw", "--capture", "usb.pcap"][..], &explain] {
        let output = bench.run(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && said.contains(expected), "{args:?}: {said}");
    }
}

/// PPP and netfilter's log: packets like any other, and as many conversations.
#[test]
fn packets_behind_other_links_meet_the_rules() {
    let bench = Bench::new("add allow udp from any to any 53 keep-state\n");
    let ethernet = PacketSpec::parse("udp 10.0.0.1:4242 > 10.0.0.2:53").unwrap().frame;
    let headers = [(9, &[0xff, 3, 0, 0x21][..]), (239, &[2, 0, 0, 0, 8, 0, 10, 0, 97, 0, 0, 0, 32, 0, 9, 0])];
    for (link, header) in headers {
        let mut writer = Writer::create(bench.path("in.pcap")).unwrap();
        let bytes = [header, &ethernet[14..]].concat();
        writer.write(Frame::new(&bytes, LinkType(link)), None).unwrap();
        writer.finish().unwrap();
        let (report, said) = bench.replay(&["in.pcap"]);
        assert_eq!((&report["passed"], &report["conversations"]["udp"]), (&1.into(), &1.into()), "{link}");
        assert_eq!((states(&report)[0], said.as_str()), (1, ""));
    }
}

const HANDSHAKE: &str = "\
add check-state
add allow tcp from any to any setup keep-state
add deny tcp from any to any
add allow ip from any to any
";

#[test]
fn one_wrong_stamp_ruins_nothing() {
    let there = |flags: &str| format!("tcp 10.0.0.1:4242 > 10.0.0.2:80 {flags}");
    let (syn, ack) = (there("syn"), there("ack"));
    let back = "tcp 10.0.0.2:80 > 10.0.0.1:4242 syn ack";
    let bench = Bench::new(HANDSHAKE);
    let right = [(THEN, &*syn), (THEN + SECOND, back), (THEN + 2 * SECOND, &*ack)];
    for at in 0..=3 {
        let mut stamped = right.to_vec();
        stamped.insert(at, (THEN + 80 * YEAR, "udp 10.0.0.9:1 > 10.0.0.8:2"));
        bench.capture("in.pcap", &stamped);
        let (report, said) = bench.replay(&["in.pcap"]);
        // Except the last one, because no later packet shows that its time is wrong.
        assert_eq!(report["passed"], 4, "{at}: {report}");
        let expected = format!("in.pcap: packet {} is 2", at + 1);
        assert_eq!(said.contains(&expected) && said.contains("its time stamp is ignored"), at < 3, "{said}");
    }
}

/// Twenty flows, 100 s apart: each state has expired before the second next one is made, in any order of the captures.
#[test]
fn every_capture_has_its_own_clock() {
    let bench = Bench::new("add allow udp from any to any keep-state\n");
    let flows: Vec<String> = (1..21).map(|port| format!("udp 10.0.0.1:{port} > 10.0.0.2:53")).collect();
    let capture = |name: &str, start: u64| {
        let times = (0..).map(|i| start + i * 100 * SECOND);
        let packets: Vec<_> = times.zip(flows.iter().map(String::as_str)).collect();
        bench.capture(name, &packets);
    };
    capture("old.pcap", THEN);
    capture("new.pcapng", THEN + YEAR);
    for captures in [["old.pcap", "new.pcapng"], ["new.pcapng", "old.pcap"]] {
        let (report, said) = bench.replay(&captures);
        assert_eq!(states(&report), [40, 1], "{captures:?}");
        let told = said.contains("old.pcap: begins 365 days before the end of the previous captures");
        assert_eq!(told, captures[0] == "new.pcapng", "{said}");
    }
    bench.capture(
        "back.pcap",
        &[(THEN + 9 * SECOND, &flows[0]), (THEN, &flows[1]), (THEN + SECOND, &flows[2])],
    );
    let (_, said) = bench.replay(&["back.pcap"]);
    assert_eq!(said, "towpath: warning: back.pcap: time goes back by 9 s at packet 2\n");
}

/// More captures than a process may have open.
#[test]
fn captures_are_open_in_their_turn() {
    let bench = Bench::new("add allow ip from any to any\n");
    bench.capture("in.pcap", &[(THEN, "udp 10.0.0.1:1 > 10.0.0.2:2")]);
    let replay = format!(
        "ulimit -n 64; exec {} replay --rules rules.ipfw --json $(yes in.pcap | head -n 200)",
        env!("CARGO_BIN_EXE_towpath")
    );
    let output = Command::new("sh").args(["-c", &replay]).current_dir(bench.0.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["packets"], 200);
}

/// Under another name, by standard input, and by standard output: a capture that is read is not written.
#[test]
fn a_capture_is_not_overwritten_while_it_is_read() {
    let bench = Bench::new("add allow ip from any to any\n");
    bench.capture("in.pcap", &[(THEN, "udp 10.0.0.1:1 > 10.0.0.2:2")]);
    let before = fs::read(bench.path("in.pcap")).unwrap();
    fs::hard_link(bench.path("in.pcap"), bench.path("hard.pcap")).unwrap();
    std::os::unix::fs::symlink("in.pcap", bench.path("soft.pcap")).unwrap();
    let refused = |output: Output, words: &str| {
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(words), "{said}");
        assert_eq!(fs::read(bench.path("in.pcap")).unwrap(), before);
    };
    let replay = |more: &[&str]| bench.towpath(&[&["replay", "--rules", "rules.ipfw"][..], more].concat());
    for option in ["--out", "--replies"] {
        for name in ["hard.pcap", "soft.pcap", "./in.pcap"] {
            refused(replay(&["in.pcap", option, name]).output().unwrap(), "overwrite a capture");
        }
    }
    let file = fs::File::open(bench.path("in.pcap")).unwrap();
    let from_file = replay(&["-", "--out", "hard.pcap"]).stdin(Stdio::from(file)).output().unwrap();
    refused(from_file, "overwrite a capture");
    let append = fs::File::options().append(true).open(bench.path("in.pcap")).unwrap();
    let to_file = replay(&["hard.pcap", "--out", "-"]).stdout(Stdio::from(append)).output().unwrap();
    refused(to_file, "overwrite a capture");

    fs::write(bench.path("a.pcap"), "").unwrap();
    fs::hard_link(bench.path("a.pcap"), bench.path("b.pcap")).unwrap();
    let twice = replay(&["in.pcap", "--out", "a.pcap", "--replies", "b.pcap"]).output().unwrap();
    refused(twice, "name the same file");

    // A device is not overwritten, so it may be named with another output.
    bench.replay(&["in.pcap", "--out", "/dev/null", "--replies", "out.pcap"]);
    bench.replay(&["in.pcap", "--out", "out.pcap"]);
    assert_eq!(packets(&bench.path("out.pcap")), 1);
}

/// `tcpdump -w - | towpath explain`: the answer does not wait for data after the packet.
#[test]
fn a_packet_of_a_pipe_is_explained_when_it_comes() {
    let bench = Bench::new("add allow ip from any to any\n");
    bench.capture("in.pcap", &[(THEN, "udp 10.0.0.1:1 > 10.0.0.2:2")]);
    let args = ["explain", "--capture", "-", "--packet", "1", "--rules", "rules.ipfw"];
    let mut explain = bench
        .towpath(&args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The pipe stays open: the capture has not ended, but no more data arrives.
    let mut pipe = explain.stdin.take().unwrap();
    pipe.write_all(&fs::read(bench.path("in.pcap")).unwrap()).unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while explain.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            explain.kill().unwrap();
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    drop(pipe);
    let output = explain.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8(output.stdout).unwrap().contains("allow"));
}
