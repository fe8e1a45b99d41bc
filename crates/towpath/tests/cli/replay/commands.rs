//! Other commands that read rules, and the man pages: explain, check.

use std::fs;

use serde_json::Value;
use towpath_gate::PacketSpec;
use towpath_port::Frame;
use towpath_port::pcap::Writer;

use super::bench::{Bench, number, text, towpath, udp_capture};

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
    // A described packet after those of a capture, and one whose state cannot be made.
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
    assert!(full.contains("no state :default can be made (the rule's limit is reached): drop"), "{full}");
    assert!(full.ends_with("in cap0: drop (over limit)\n"), "{full}");
    let beside = explain(&["--capture", capture, "--packet", "1", "--json"]);
    assert!(beside.contains(r#""outcome":"refused""#) && beside.contains(r#""passes":false"#), "{beside}");
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

/// Each row: the old file, the new file, and what `check --against` says of it. The rules may be the same.
#[test]
fn check_names_every_difference_that_changes_a_packets_end() {
    let rules = "add set 4 deny udp from any to any\nadd allow ip from any to any\n";
    let rows: [(String, String, &[&str]); 5] = [
        (
            format!("{rules}set disable 4\n"),
            rules.to_owned(),
            &["~ set 4: disabled -> enabled", "3 rules kept"],
        ),
        (
            format!("pipe 1 config bw 1Mbit/s\n{rules}"),
            rules.to_owned(),
            &["~ pipe 1: bw 1000000bit/s burst 0 -> none"],
        ),
        (
            format!("table t add 10.0.0.0/8 1\n{rules}"),
            format!("table t add 10.0.0.0/8 2 10.1.0.0/16 3\n{rules}"),
            &["~ table t\n", "~ entry t 10.0.0.0/8: 1 -> 2", "~ entry t 10.1.0.0/16: none -> 3"],
        ),
        (
            "add allow udp from any to any\nadd deny ip from any to any\n".to_owned(),
            "add deny ip from any to any\nadd allow udp from any to any\n".to_owned(),
            &["(moved)", "3 rules kept", "2 of them renumbered"],
        ),
        (
            "add skipto 300 ip from any to any\nadd deny ip from any to any\nadd allow ip from any to any\n"
                .to_owned(),
            "add count ip from any to any\nadd skipto 300 ip from any to any\nadd deny ip from any to any\n\
             add allow ip from any to any\n"
                .to_owned(),
            &[
                "~ rule 00200 skipto 300 ip from any to any: continues at 00300 allow",
                "-> continues at 00300 deny",
            ],
        ),
    ];
    for (old, new, expected) in rows {
        let bench = Bench::new(&new);
        fs::write(bench.path("old.ipfw"), &old).unwrap();
        let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
        let output = towpath(&["check", &p("rules.ipfw"), "--against", &p("old.ipfw")]);
        let printed = text(&output.stdout);
        assert!(expected.iter().all(|line| printed.contains(line)), "{printed}\n{old}\n{new}");
    }
}

/// The packets of a capture that end otherwise, with both reasons.
#[test]
fn check_lists_the_packets_that_end_otherwise() {
    let bench = Bench::new("add set 4 deny udp from any to any\nadd allow ip from any to any\n");
    fs::write(
        bench.path("old.ipfw"),
        "add set 4 deny udp from any to any\nadd allow ip from any to any\nset disable 4\n",
    )
    .unwrap();
    udp_capture(&bench.path("in.pcap"), 2, 1);
    let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
    let args = ["check", &p("rules.ipfw"), "--against", &p("old.ipfw"), "--capture", &p("in.pcap")];
    let printed = text(&towpath(&args).stdout);
    for line in [
        "packet 2 of ",
        "  old: in: pass, by rule 00200 allow ip from any to any\n",
        "  new: in: drop, by rule 00100 deny udp from any to any\n",
        "different: 2 of 2 packets\n",
    ] {
        assert!(printed.contains(line), "{printed} lacks {line}");
    }
    let json: Value = serde_json::from_slice(&towpath(&[&args[..], &["--json"]].concat()).stdout).unwrap();
    assert_eq!(
        (&json["packets"]["compared"], &json["packets"]["different"]),
        (&2.into(), &2.into()),
        "{json}"
    );
    let first = &json["packets"]["packets"][0];
    assert_eq!(
        (&first["old"]["verdict"], &first["new"]["verdict"]),
        (&"pass".into(), &"drop".into()),
        "{json}"
    );
    assert_eq!((&first["new"]["rule"], &first["packet"]), (&100.into(), &1.into()), "{json}");
    let differences = json["changes"]["differences"].as_array().unwrap();
    assert_eq!(differences.len(), 1, "{json}");
    assert_eq!(differences[0]["kind"], "set");
    // The same rules: no packet.
    let same = towpath(&["check", &p("old.ipfw"), "--against", &p("old.ipfw"), "--capture", &p("in.pcap")]);
    assert!(text(&same.stdout).contains("different: 0 of 2 packets\n"), "{}", text(&same.stdout));
}

/// A configuration gives the ports, the settings, the routes and the default rule.
#[test]
fn a_configuration_decides_as_in_an_engine() {
    let rules = "add deny tcp from any to me 22\nadd allow udp from any to any in recv lan keep-state\n\
                 add deny udp from any to any out xmit wan not verrevpath\n";
    let bench = Bench::new(rules);
    let config = "rules = \"rules.ipfw\"\ndefault = \"allow\"\n[port.wan]\ndriver = \"af_packet\"\n\
                  [port.lan]\ndriver = \"af_packet\"\naddress = \"10.0.0.254\"\n\
                  [[route]]\nto = \"10.0.0.0/24\"\nport = \"lan\"\n[settings]\ndyn_max = 1\n";
    fs::write(bench.path("t.toml"), config).unwrap();
    udp_capture(&bench.path("in.pcap"), 2, 1);
    let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
    let explain = |words: &[&str]| {
        let output = towpath(&[&["explain", "--config", &p("t.toml"), "--exit-code"], words].concat());
        (text(&output.stdout), output.status.code())
    };
    let (printed, code) = explain(&["in", "wan", "tcp", "10.9.0.1:1", ">", "10.0.0.254:22", "syn"]);
    assert!(printed.contains("in wan: drop\n") && code == Some(8), "{printed} {code:?}");
    // By the default rule, and on by the route.
    let (printed, code) = explain(&["in", "wan", "tcp", "10.9.0.1:1", ">", "10.0.0.7:23", "syn"]);
    assert!(printed.contains("in wan: pass\nout lan\n") && code == Some(0), "{printed} {code:?}");
    let (printed, code) = explain(&["in", "nope", "tcp", "10.9.0.1:1", ">", "10.0.0.7:23"]);
    assert_eq!((printed.as_str(), code), ("", Some(64)));
    // The table has room for one state.
    let ingress = ["--capture", &p("in.pcap"), "--ingress", "lan"];
    let udp = ["in", "lan", "udp", "10.9.9.9:1", ">", "10.8.0.1:22"];
    let (printed, code) = explain(&[&ingress[..], &udp].concat());
    assert!(printed.contains("in lan: drop (states full)\n") && code == Some(8), "{printed}");
    // Replay and check, too.
    let output = towpath(&["replay", &p("in.pcap"), "--config", &p("t.toml"), "--ingress", "lan", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["passed"], &report["states"]["created"]), (&2.into(), &1.into()), "{report}");
    let other = config.replace("dyn_max = 1", "dyn_max = 2").replace("10.0.0.0/24", "10.0.0.0/16");
    fs::write(bench.path("old.toml"), other.replace("default = \"allow\"\n", "")).unwrap();
    let output = towpath(&["check", "--config", &p("t.toml"), "--against", &p("old.toml")]);
    let printed = text(&output.stdout);
    for line in [
        "- 65535 deny ip from any to any\n",
        "+ 65535 allow ip from any to any\n",
        "~ setting dyn_max: 2 -> 1\n",
        "~ route 10.0.0.0/16 port: lan -> none\n",
        "~ route 10.0.0.0/24 port: none -> lan\n",
    ] {
        assert!(printed.contains(line), "{printed} lacks {line}");
    }
    let output = towpath(&["check", &p("rules.ipfw"), "--against", &p("old.toml")]);
    assert_eq!(output.status.code(), Some(64), "{}", text(&output.stderr));
    fs::write(bench.path("bad.toml"), "rules = 1").unwrap();
    let output = towpath(&["explain", "--config", &p("bad.toml"), "tcp", "10.0.0.1:1", ">", "10.0.0.2:2"]);
    assert_eq!(output.status.code(), Some(6), "{}", text(&output.stderr));
}

/// A bridge has no route by which keepalives could leave.
#[test]
fn check_says_that_keepalives_have_no_effect_on_a_bridge() {
    let bench = Bench::new("add allow tcp from any to any keep-state\n");
    let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
    let ports =
        "rules = \"rules.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\n[port.lan]\ndriver = \"af_packet\"\n";
    let bridge = "[[bridge]]\nports = [\"wan\", \"lan\"]\n";
    let rows = [
        (bridge.to_owned(), true),
        (format!("{bridge}[settings]\ndyn_keepalive = 0\n"), false),
        ("[[route]]\nto = \"10.0.0.0/24\"\nport = \"lan\"\nmac = \"02:00:00:00:00:01\"\n".to_owned(), false),
    ];
    for (wiring, warned) in rows {
        fs::write(bench.path("t.toml"), format!("{ports}{wiring}")).unwrap();
        for args in [&["check", "--config", &p("t.toml")][..], &["run", "--check", &p("t.toml")]] {
            let output = towpath(args);
            let said = text(&output.stderr);
            assert!(output.status.success(), "{args:?} {said}");
            assert_eq!(said.contains("dyn_keepalive has no effect"), warned, "{args:?} {wiring}: {said}");
        }
    }
}

/// A segment outside the window of a strict state does not match it: the packet really ends at a later rule.
#[test]
fn explain_prints_the_end_of_the_real_walk() {
    let bench = Bench::new(
        "add 100 allow tcp from any to any 80 setup keep-state strict\nadd 200 reject tcp from any to any\n",
    );
    let mut writer = Writer::create(bench.path("in.pcap")).unwrap();
    for packet in [
        "tcp 10.0.0.1:1000 > 10.0.0.2:80 syn seq 99",
        "tcp 10.0.0.2:80 > 10.0.0.1:1000 syn ack seq 499 ackno 100",
        "tcp 10.0.0.1:1000 > 10.0.0.2:80 ack seq 100 ackno 500",
    ] {
        let spec = PacketSpec::parse(packet).unwrap();
        writer.write(Frame::new(&spec.frame, spec.link()), None).unwrap();
    }
    writer.finish().unwrap();
    let p = |name: &str| bench.path(name).to_str().unwrap().to_owned();
    let explain = |seq: &str| {
        let words =
            ["in", "cap0", "tcp", "10.0.0.1:1000", ">", "10.0.0.2:80", "ack", "seq", seq, "ackno", "500"];
        let args = ["explain", "--rules", &p("rules.ipfw"), "--capture", &p("in.pcap"), "--exit-code"];
        let output = towpath(&[&args[..], &words].concat());
        let json = towpath(&[&args[..], &["--json"], &words].concat());
        let json: Value = serde_json::from_slice(&json.stdout).unwrap();
        (text(&output.stdout), json["walks"][0]["verdict"].clone(), output.status.code())
    };
    let (printed, verdict, code) = explain("100");
    assert!(printed.ends_with("in cap0: pass\n") && verdict == "pass" && code == Some(0), "{printed}");
    let (printed, verdict, code) = explain("900000000");
    assert!(printed.contains("in cap0: reject (ICMP unreachable, code 1)\n"), "{printed}");
    assert_eq!((verdict.as_str(), code), (Some("reject (ICMP unreachable, code 1)"), Some(8)), "{printed}");
}

/// `check` prints an equivalent rule file, including tables, labels and sets. Every error has its position.
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
fn man_pages_and_completions_name_every_command() {
    let bench = Bench::new("");
    let output = towpath(&["completions", "bash"]);
    let script = text(&output.stdout);
    assert!(script.contains("replay") && script.contains("--capture"), "{script}");
    assert!(!script.contains("demo-part"), "hidden commands are not completed");
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
