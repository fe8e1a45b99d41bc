//! Other commands that read rules, and the man pages: explain, check.

use std::fs;

use serde_json::Value;

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
    assert!(full.contains("note: with the current states, the packet has another outcome: drop"), "{full}");
    let beside = explain(&["--capture", capture, "--packet", "1", "--json"]);
    assert!(beside.contains("has another outcome"), "{beside}");
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
