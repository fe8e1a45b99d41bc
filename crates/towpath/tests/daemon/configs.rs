//! `towpath config`, `towpath doctor`, and the conflicts that `run --check` finds in the kernel's state.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use towpath_port::netns::{ip, run, veth, within};

fn towpath(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_towpath")).args(words).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit code and warnings of `run --check`.
fn check(config: &Path) -> (Option<i32>, String) {
    let output = towpath(&["run", "--check", config.to_str().unwrap()]);
    (output.status.code(), text(&output.stderr))
}

const KINDS: [&str; 5] = ["bridge", "router", "nfqueue", "tun", "mux"];

#[towpath_testenv::needs(netns, nfqueue, "iptables-nft")]
#[test]
fn a_new_configuration_is_accepted() {
    within(|| {
        veth("eth0", "e0");
        veth("eth1", "e1");
        run("iptables-nft", "-A FORWARD -j NFQUEUE --queue-num 0");
        for kind in KINDS {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("new");
            let words = ["config", "init", kind, "--dir", path.to_str().unwrap()];
            let output = towpath(&words);
            assert!(output.status.success(), "{kind}: {}", text(&output.stderr));
            let config = path.join("towpath.toml");
            assert_eq!(check(&config), (Some(0), String::new()), "{kind}");
            // Existing files stay.
            std::fs::write(path.join("towpath.ipfw"), "x").unwrap();
            let again = towpath(&words);
            assert_eq!(again.status.code(), Some(1));
            assert!(text(&again.stderr).contains("exists; --force"), "{}", text(&again.stderr));
            assert_eq!(std::fs::read(path.join("towpath.ipfw")).unwrap(), b"x");
            assert!(towpath(&[&words[..], &["--force"]].concat()).status.success());
            assert_eq!(check(&config), (Some(0), String::new()), "{kind}");
        }
    });
}

#[test]
fn options_answer_and_wrong_ones_write_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let rows: [&[&str]; 6] = [
        &["bridge", "--wan", "a/b"],
        &["bridge", "--gateway", "192.0.2.1"],
        &["router", "--network", "192.0.2.0"],
        &["nfqueue", "--queue", "70000"],
        &["mux", "--framing", "no-such-framing"],
        // Both ports use one interface.
        &["bridge", "--wan", "eth0", "--lan", "eth0"],
    ];
    for words in rows {
        let output = towpath(&[&["config", "init"], words, &["--dir", path]].concat());
        assert_eq!(output.status.code(), Some(64), "{words:?}: {}", text(&output.stderr));
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 0, "{words:?}");
    }
    let words = [
        "config",
        "init",
        "router",
        "--dir",
        path,
        "--lan",
        "lan7",
        "--driver",
        "af_xdp",
        "--network",
        "2001:db8::/64",
        "--lan-address",
        "2001:db8::1",
    ];
    assert!(towpath(&words).status.success());
    let config = std::fs::read_to_string(directory.path().join("towpath.toml")).unwrap();
    for line in
        ["interface = \"lan7\"", "driver = \"af_xdp\"", "to = \"2001:db8::/64\"", "interface = \"eth0\""]
    {
        assert!(config.contains(&format!("{line}\n")), "{line}: {config}");
    }
}

/// On a terminal, questions with proposed answers; a wrong answer is asked for again.
#[towpath_testenv::needs("tmux")]
#[test]
fn init_asks_on_a_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let server = directory.path().join("tmux");
    let tmux = |words: &[&str]| {
        let output = Command::new("tmux").arg("-S").arg(&server).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let shows = |words: &str| {
        let (begun, mut text) = (Instant::now(), String::new());
        while !text.contains(words) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{words} never appears:\n{text}");
            text = tmux(&["capture-pane", "-p"]);
        }
    };
    let command = format!(
        "'{}' config init bridge --dir '{}'; exec cat",
        env!("CARGO_BIN_EXE_towpath"),
        directory.path().display()
    );
    tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", &command]);
    shows("Interface of the uplink [eth0]:");
    tmux(&["send-keys", "a/b", "Enter"]);
    shows("`a/b` is not the name of an interface");
    tmux(&["send-keys", "up0", "Enter"]);
    shows("Interface of the local network [eth1]:");
    tmux(&["send-keys", "Enter"]);
    shows("af_packet or af_xdp [af_packet]:");
    tmux(&["send-keys", "af_xdp", "Enter"]);
    shows("wrote ");
    tmux(&["kill-server"]);
    let config = std::fs::read_to_string(directory.path().join("towpath.toml")).unwrap();
    assert!(
        config.contains("interface = \"up0\"")
            && config.contains("interface = \"eth1\"")
            && config.contains("af_xdp"),
        "{config}"
    );
}

/// Validates documents with jsonschema. Returns, for each, whether it is valid.
fn validate(schema: &Value, documents: &[(String, String)]) -> Vec<bool> {
    let program = "\
import json, sys, tomllib, jsonschema
given = json.load(sys.stdin)
jsonschema.Draft7Validator.check_schema(given['schema'])
validator = jsonschema.Draft7Validator(given['schema'])
print(json.dumps([validator.is_valid(tomllib.loads(text)) for name, text in given['documents']]))
";
    let python = Path::new(towpath_testenv::clients!()).join("bin/python");
    let mut child = Command::new(python)
        .args(["-c", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let given = json!({ "schema": schema, "documents": documents }).to_string();
    child.stdin.take().unwrap().write_all(given.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The configurations of the repository's examples.
fn examples() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let (mut found, mut left) = (Vec::new(), vec![root]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            match entry.is_dir() {
                true => left.push(entry),
                false if entry.extension().is_some_and(|end| end == "toml") => found.push(entry),
                false => {}
            }
        }
    }
    assert!(found.len() >= 6, "{found:?}");
    found
}

#[towpath_testenv::needs("python:jsonschema")]
#[test]
fn the_schema_accepts_examples_and_refuses_errors() {
    let output = towpath(&["config", "schema"]);
    assert!(output.status.success());
    let schema: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut good: Vec<(String, String)> = examples()
        .iter()
        .map(|path| (path.display().to_string(), std::fs::read_to_string(path).unwrap()))
        .collect();
    for kind in KINDS {
        let directory = tempfile::tempdir().unwrap();
        assert!(
            towpath(&["config", "init", kind, "--dir", directory.path().to_str().unwrap()]).status.success()
        );
        good.push((kind.to_owned(), std::fs::read_to_string(directory.path().join("towpath.toml")).unwrap()));
    }
    let port = "rules = \"r\"\n[port.a]\ndriver = \"af_packet\"\n";
    let mux = "[mux.m]\nlisten = \"x:1\"\nframing = \"line\"\nworker = \"w\"\n";
    for more in [
        "vlan.b.id = 7\n",
        "[engine]\ncpus = 3\n",
        "[engine]\ndrain = \"5s\"\n",
        "[settings]\ndyn_max = 5\ndyn_keepalive = false\n\"net.inet.ip.fw.dyn_max\" = 7\n",
        "[bridge]\nports = [\"a\", \"b\"]\n",
        "[queue.65535]\ndeadline = 0.5\n",
        &format!("{mux}starttls = \"yes\"\nthread = \"own\"\n"),
    ] {
        good.push((more.to_owned(), format!("{port}{more}")));
    }
    let bad: Vec<(String, String)> = [
        "rules = \"r\"\n".to_owned(),
        "[port.a]\ndriver = \"af_packet\"\n".to_owned(),
        "rules = 3\n[port.a]\ndriver = \"af_packet\"\n".to_owned(),
        format!("unknown = 1\n{port}"),
        "rules = \"r\"\n[port.a]\ndriver = \"af_paket\"\n".to_owned(),
        "rules = \"r\"\n[port.a]\nmode = \"native\"\n".to_owned(),
        format!("{port}zone = 65536\n"),
        format!("{port}zone = -1\n"),
        format!("{port}zone = \"1\"\n"),
        format!("{port}offload = \"yes\"\n"),
        format!("{port}address = [1]\n"),
        format!("{port}vlan.b.zone = 1\n"),
        format!("{port}[engin]\n"),
        format!("{port}[engine]\nthreads = 0\n"),
        format!("{port}[engine]\ndrain = 3601\n"),
        format!("{port}[engine]\ndrain = \"soon\"\n"),
        format!("{port}[queue.0]\n"),
        format!("{port}[queue.x]\n"),
        format!("{port}[[route]]\nto = \"::/0\"\n"),
        format!("{port}[settings]\nno_such = 1\n"),
        format!("{port}[settings]\ndyn_max = 4294967296\n"),
        format!("{port}[control]\n"),
        format!("{port}{mux}thread = \"mine\"\n"),
        format!("{port}{mux}starttls = \"perhaps\"\n"),
    ]
    .map(|text| (text.clone(), text))
    .into();
    for (documents, expected) in [(&good, true), (&bad, false)] {
        for ((name, text), valid) in documents.iter().zip(validate(&schema, documents)) {
            assert_eq!(valid, expected, "{name}");
            // The engine's own check is at least as strict.
            let directory = tempfile::tempdir().unwrap();
            if !expected {
                std::fs::write(directory.path().join("r"), "add allow ip from any to any\n").unwrap();
                std::fs::write(directory.path().join("t.toml"), text).unwrap();
                assert_eq!(check(&directory.path().join("t.toml")).0, Some(6), "{name}");
            }
        }
    }
}

#[towpath_testenv::needs(netns, nfqueue, "iptables-nft")]
#[test]
fn check_names_conflicts_with_the_kernel() {
    within(|| {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("t.toml");
        std::fs::write(directory.path().join("r"), "add allow ip from any to any\n").unwrap();
        let checked = |text: &str| {
            std::fs::write(&config, format!("rules = \"r\"\n{text}")).unwrap();
            let (code, said) = check(&config);
            // A conflict is a warning: the machine may change before the start.
            assert_eq!(code, Some(0), "{said}");
            said
        };
        let ports = "[port.a]\ndriver = \"af_packet\"\ninterface = \"v0\"\n[port.b]\ndriver = \"af_xdp\"\ninterface = \"v1\"\n\
                     [[bridge]]\nports = [\"a\", \"b\"]\n[settings]\ndyn_keepalive = 0\n";
        let said = checked(ports);
        for line in [
            "t.toml:2:1: `a`: there is no interface `v0` in this network namespace; the engine does not start without it",
            "t.toml:5:1: `b`: there is no interface `v1`",
        ] {
            assert!(said.contains(line), "{line}: {said}");
        }
        let optional = ports.replace("interface = \"v0\"", "interface = \"v0\"\noptional = true");
        assert!(!checked(&optional).contains("`v0`"));
        veth("v0", "e0");
        veth("v1", "e1");
        assert_eq!(checked(ports), "");
        ip("addr add 192.0.2.1/24 dev v1");
        let said = checked(ports);
        assert!(
            said.contains(
                "`b`: the kernel has 192.0.2.1 and receives none of the packets to it; remove the address"
            ),
            "{said}"
        );
        ip("addr del 192.0.2.1/24 dev v1");
        ip("link add br0 type bridge");
        ip("link set v1 master br0");
        assert!(checked(ports).contains("the kernel's br0 has `v1`"));
        let said = checked(&ports.replace("\"v1\"", "\"v1\"\nmode = \"native\"\nzero-copy = true"));
        assert!(said.contains("does not support zero copy"), "{said}");

        let queue = "[port.kernel]\ndriver = \"nfqueue\"\nqueue = 5\n";
        let said = checked(queue);
        assert!(
            said.contains("`kernel`: no rule of nftables sends packets to queue 5; add one: iptables"),
            "{said}"
        );
        run("iptables-nft", "-A FORWARD -j NFQUEUE --queue-balance 4:5");
        assert_eq!(checked(queue), "");
        let other = std::thread::scope(|scope| {
            scope
                .spawn(|| towpath_port::nfqueue::Queue::open(towpath_port::nfqueue::Config::new(5)))
                .join()
                .unwrap()
        })
        .unwrap();
        let said = checked(queue);
        assert!(said.contains("a process has the kernel's queue 5 (netlink port id"), "{said}");
        drop(other);
        assert_eq!(checked(queue), "");
        // As JSON, with the hint.
        let output = towpath(&["run", "--check", "--json", config.to_str().unwrap()]);
        let object: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&object["ok"], &object["warnings"]), (&json!(true), &json!([])));
    });
}

/// A program that something else has attached.
#[towpath_testenv::needs(netns, xdp, "clang-14")]
#[test]
fn check_and_doctor_name_an_xdp_program() {
    within(|| {
        let directory = tempfile::tempdir().unwrap();
        veth("v0", "e0");
        let source = directory.path().join("pass.c");
        let object = directory.path().join("pass.o");
        std::fs::write(&source, "__attribute__((section(\"xdp\"))) int pass(void *c) { return 2; }\n")
            .unwrap();
        run("clang-14", &format!("-O2 -target bpf -c {} -o {}", source.display(), object.display()));
        ip(&format!("link set dev v0 xdpgeneric obj {} sec xdp", object.display()));
        let config = directory.path().join("t.toml");
        std::fs::write(directory.path().join("r"), "add allow ip from any to any\n").unwrap();
        std::fs::write(&config, "rules = \"r\"\nmonitor = \"v0\"\n[port.v0]\ndriver = \"af_xdp\"\n").unwrap();
        let (_, said) = check(&config);
        assert!(
            said.contains("an XDP program is attached to `v0` (number ") && said.contains("generic mode"),
            "{said}"
        );
        let doctor = || {
            let output = towpath(&["doctor", "--for", "af_xdp", "--interface", "v0", "--json"]);
            (output.status.code(), serde_json::from_slice::<Value>(&output.stdout).unwrap())
        };
        let program = |object: &Value| {
            object["findings"]
                .as_array()
                .unwrap()
                .iter()
                .any(|finding| finding["check"] == "xdp_program" && finding["level"] == "lack")
        };
        let (code, object) = doctor();
        assert!(code == Some(9) && program(&object), "{object}");
        ip("link set dev v0 xdpgeneric off");
        assert_eq!(check(&config), (Some(0), String::new()));
        assert!(!program(&doctor().1));
    });
}

#[towpath_testenv::needs(netns, tun, "ethtool")]
#[test]
fn doctor_finds_what_is_lacking() {
    within(|| {
        veth("v0", "e0");
        let output = towpath(&["doctor", "--for", "tun"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
        let said = text(&output.stdout);
        assert!(said.contains("ok    tun: /dev/net/tun") && !said.contains("af_xdp"), "{said}");
        let output = towpath(&["doctor", "--for", "af_packet", "--interface", "none"]);
        assert_eq!(output.status.code(), Some(9));
        assert!(
            text(&output.stdout)
                .contains("LACK  interface none: there is no such interface\n      -> `ip link`")
        );
        run("ethtool", "-K v0 gro on");
        let levels = || -> Vec<(String, String)> {
            let output = towpath(&["doctor", "--for", "af_xdp", "--interface", "v0", "--json"]);
            let object: Value = serde_json::from_slice(&output.stdout).unwrap();
            let word = |finding: &Value, key: &str| finding[key].as_str().unwrap().to_owned();
            let findings = object["findings"].as_array().unwrap().iter();
            findings.map(|finding| (word(finding, "check"), word(finding, "level"))).collect()
        };
        assert!(levels().contains(&("gro".into(), "hint".into())));
        run("ethtool", "-K v0 gro off");
        assert!(levels().contains(&("gro".into(), "ok".into())));
        // Without privilege, the capabilities are lacking.
        let program = env!("CARGO_BIN_EXE_towpath");
        let output = Command::new("setpriv")
            .args([
                "--reuid=65534",
                "--clear-groups",
                "--bounding-set=-all",
                "--inh-caps=-all",
                program,
                "doctor",
                "--for",
                "af_packet",
            ])
            .output()
            .unwrap();
        let said = text(&output.stdout);
        assert_eq!(output.status.code(), Some(9), "{said}{}", text(&output.stderr));
        assert!(
            said.contains(
                "LACK  capabilities: this process does not have CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF"
            ),
            "{said}"
        );
    });
}
