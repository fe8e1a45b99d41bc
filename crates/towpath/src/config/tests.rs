use std::time::Duration;

use super::*;
use towpath_engine::LogDrops;
use towpath_engine::reorder::Limits;
use towpath_port::{af_xdp, driver};

mod documentation;

const BRIDGE: &str = r#"
rules = "bridge.ipfw"
[port.wan]
driver = "af_packet"
[port.lan]
driver = "af_packet"
interface = "eth1"
[[bridge]]
ports = ["wan", "lan"]
"#;

/// A configuration of a bridge, followed by `more`.
fn bridge(more: &str) -> String {
    format!("{BRIDGE}{more}\n")
}

#[test]
fn errors_have_a_position_and_a_hint() {
    let rows: &[(String, &[&str])] = &[
        ("rules = ".into(), &["t:1:9: string values must be quoted, expected literal string"]),
        (
            "rule = \"x\"\n[port.a]\ndriver = \"tun\"\n".into(),
            &[
                "t:1:1: `rules` is missing; name the rule file: rules = \"FILE\"",
                "t:1:1: unknown key `rule`; did you mean `rules`?",
                "t:2:7: port `a` is not wired; name it in a [[bridge]] or in monitor = [...], or add a [[route]]",
            ],
        ),
        (
            "rules = 7\n".into(),
            &[
                "t:1:1: a configuration needs a port or a mux; write [port.NAME] with driver = \"...\" below",
                "t:1:9: `rules` must be text, not an integer",
            ],
        ),
        (
            bridge("[engine]\nwait = \"sleep\"\nthreads = 0"),
            &[
                "t:11:8: `wait` cannot be \"sleep\"; the values are park, spin",
                "t:12:11: `threads` must be a whole number in 1..63, not 0",
            ],
        ),
        (
            bridge("[engine]\nthreads = 2\ncpus = [0]"),
            &["t:12:8: 1 CPUs for 2 threads; name one for each thread, or none"],
        ),
        (
            bridge("[port.wan2]\ndriver = \"af-packet\""),
            &["t:11:10: unknown driver \"af-packet\"; did you mean `af_packet`?"],
        ),
        // A port with an unknown driver has no further errors.
        (
            "rules = \"r\"\nmonitor = \"x\"\n[port.x]\ndriver = \"nfqeue\"\nqueue = 5\n[[route]]\nto = \"::/0\"\nport = \"x\"\n".into(),
            &["t:4:10: unknown driver \"nfqeue\"; did you mean `nfqueue`?"],
        ),
        (
            bridge("[mux.m]\nlisten = \"[::1]:7\"\nframing = \"line\"\nworker = \"w\"\ndrain = 0\nidle = 0x1_0000_0000\ntimeout = \"1\"\nsend-check = 1"),
            &[
                "t:14:9: `drain` must be a number of seconds in 0.001..86400, not 0",
                "t:15:8: `idle` must be a number of seconds in 0.001..86400, not ",
                "t:16:11: `timeout` must be a number of seconds in 0.001..86400, not a string",
                "t:17:14: `send-check` must be true or false, not an integer",
            ],
        ),
        (
            bridge("[queue.1]\ncommand = \"c\"\n[queue.1.sandbox]\nseccomp = \"of\"\nnamespaces = [\"net\", \"nets\", \"pid\"]\nraed = \"/x\"\nwrite = \"\""),
            &[
                "t:13:11: `seccomp` cannot be \"of\"; did you mean `off`?",
                "t:14:22: `nets` is not a namespace of a sandbox; did you mean `net`?",
                "t:14:30: `pid` is not a namespace of a sandbox; the namespaces are net, ipc, uts, cgroup",
                "t:15:1: unknown key `raed`; did you mean `read`?",
                "t:16:9: `` is not a path",
            ],
        ),
        (
            bridge("[queue.1]\nsocket = \"s\"\nsandbox.seccomp = \"off\""),
            &["t:12:1: `sandbox` is for a `command`; inspectors that attach choose it themselves"],
        ),
        (
            bridge("[queue.1]\nsocket = \"s\"\noverload = \"drop-oldest\""),
            &["t:12:12: overload `drop-oldest` is not block, drop-newest, drop-oldest:COUNT, pass, drop or queue:N"],
        ),
        (
            bridge("[port.x]\ndriver = \"tun\"\nofload = true"),
            &[
                "t:10:7: port `x` is not wired; name it in a [[bridge]] or in monitor = [...], or add a [[route]]",
                "t:12:1: unknown key `ofload`; did you mean `offload`?",
            ],
        ),
        (
            bridge("[port.x]\ndriver = \"af_xdp\"\ninterface = \"eth1\"\n[[bridge]]\nports = [\"x\"]"),
            &[
                "t:10:7: ports `lan` and `x` both use `eth1`; use another interface or queue",
                "t:14:9: a bridge has two ports, not 1",
            ],
        ),
        (
            bridge(
                "[port.k]\ndriver = \"nfqueue\"\nqueue = 5\n[engine]\nthreads = 63\ncpus = [1024]\n[mux.m]\n\
                 listen = \"[::1]:7\"\nframing = \"line\"\nworker = \"w\"",
            ),
            &[
                "t:14:11: 64 threads and muxes; at most 63 together are supported; write fewer threads, or run some muxes in \
             another engine",
                "t:15:9: `cpus` must be whole numbers in 0..1023, not 1024",
            ],
        ),
        (
            bridge("[port.a]\ndriver = \"tap\"\nzone = 1\n[port.b]\ndriver = \"tap\"\n[[bridge]]\nports = [\"a\", \"b\"]"),
            &[
                "t:16:9: `a` is in zone 1, `b` in zone 0: replies would not find their states; give both ports the same zone",
            ],
        ),
        (
            bridge("[[bridge]]\nports = [\"wan\", \"lam\"]"),
            &[
                "t:11:10: port `wan` is in a bridge already; a port is wired once",
                "t:11:17: unknown port `lam`; did you mean `lan`?",
            ],
        ),
        (
            bridge("[[route]]\nto = \"10.0.0.0/33\"\nport = \"lan\""),
            &[
                "t:11:6: `10.0.0.0/33` is not a prefix; write an address and a length, such as \"10.0.0.0/8\" or \
             \"2001:db8::/32\"",
                "t:12:8: port `lan` has no `address` to ask for the next hop from; give it an IPv4 address, or write \
             mac = \"aa:bb:cc:dd:ee:ff\", the next hop's Ethernet address",
                "t:12:8: port `lan` is in a bridge; a packet that is routed cannot leave there",
            ],
        ),
        (
            bridge("[[route]]\nto = \"::/0\"\nport = \"lan\"\nvia = \"10.0.0.1\"\nmac = \"2:0:0:0:0:1\""),
            &[
                "t:12:8: port `lan` is in a bridge; a packet that is routed cannot leave there",
                "t:13:7: `10.0.0.1` cannot be a next hop; write the address of a router on the port's link, of the \
             prefix's family",
            ],
        ),
        (
            bridge("[queue.0]\n[queue.1]\n[queue.2]\ncommand = \"a 'b\"\noverload = \"queue:9\"\nlow = 3\nmay-queue = [1, 7]"),
            &[
                "t:10:8: `0` is not a queue number; write [queue.N] with N in 1..65535, the number that rules name",
                "t:11:8: queue 1 needs `socket` or `command`; write socket = \"PATH\" for inspectors that attach, or \
             command = \"...\"",
                "t:12:8: queue 2 needs `socket` or `command`; write socket = \"PATH\" for inspectors that attach, or \
             command = \"...\"",
                "t:13:11: cannot split the command: missing closing quote",
                "t:14:12: queue 2 hands packets to queue 9, which is not another queue of this file; name another [queue.N]",
                "t:15:7: `low` needs a larger `high`",
                "t:16:17: queue 2 may name queue 7, which is not in this file; name a [queue.N] of this file",
            ],
        ),
        (
            bridge("[queue.1]\ncommand = \"a\"\nworkers = 3\nmemory = 60\n[engine]\nthreads = 4"),
            &[
                "t:13:10: the rings of 3 inspectors take 70 MiB with 4 threads, not 60; write memory = 70 or more, or leave it \
               out",
            ],
        ),
        (
            bridge("[settings]\ndyn_mx = 5\ndyn_keepalive = 2\ndyn_count = 1\nxyzzy = 1"),
            &[
                "t:11:1: unknown setting `dyn_mx`; did you mean `dyn_max`?",
                "t:12:17: dyn_keepalive takes 0 or 1",
                "t:13:13: dyn_count can only be read",
                "t:14:1: there is no setting \"xyzzy\"; settable are dyn_max",
            ],
        ),
        (
            bridge("[control]\nowner = \"rooot\"\ngroup = \"no such group\"\nmode = \"9\""),
            &[
                "t:10:2: `socket` is missing; write socket = \"/run/towpath/control.sock\"",
                "t:11:9: unknown user `rooot`; did you mean `root`?",
                "t:12:9: unknown group `no such group`",
                "t:13:8: `9` is not a file mode; write it in octal, such as \"0660\"",
            ],
        ),
    ];
    for (text, expected) in rows {
        let errors = Config::parse("t", text).expect_err(text);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), expected.len(), "{text}\n{errors:#?}");
        for (error, expected) in errors.iter().zip(*expected) {
            assert!(error.starts_with(expected), "{text}\n{error}\n{expected}");
        }
    }
}

#[test]
fn a_hint_lists_each_key_once() {
    let errors = Config::parse("t", "xyzzyxyzzy = 1\n").unwrap_err();
    let hint = errors.iter().find_map(|error| error.hint.as_ref().filter(|hint| hint.contains("keys here")));
    let mut keys: Vec<&str> = hint.unwrap().trim_start_matches("the keys here are ").split(", ").collect();
    let all = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), all, "{keys:?}");
}

#[test]
fn switches_are_true_or_yes() {
    for (written, on) in [("true", true), ("\"yes\"", true), ("false", false), ("\"no\"", false)] {
        let mux = format!(
            "[mux.m]\nlisten = \"[::1]:7\"\nframing = \"line\"\nworker = \"w\"\nsend-check = {written}"
        );
        assert_eq!(Config::parse("t", &bridge(&mux)).unwrap().muxes[0].send_check, on, "{written}");
    }
}

#[test]
fn all_keys_are_read() {
    let text = r#"
rules = "r.ipfw"
default = "allow"
states-at-reload = "keep"
unserved = "pass"
monitor = "mon"
[port.mon]
driver = "af_packet"
interface = "eth2"
[port.wan]
driver = "af_xdp"
interface = "eth0"
address = ["192.0.2.1", "2001:db8::1"]
mode = "native"
multi-buffer = true
fail = "closed"
zone = 4
vlan.guest.id = 200
vlan.staff = { id = 201, zone = 5 }
[port.vpn]
driver = "tun"
interface = "tun7"
offload = true
[port.kernel]
driver = "nfqueue"
queue = 5
fail = "open"
[[route]]
to = "10.0.0.0/8"
port = "vpn"
[[route]]
to = "::/0"
port = "wan"
mac = "02:00:00:00:00:1f"
[queue.7]
command = "towpath inspect --queue 7 --match 'a b' --verdict drop"
workers = 2
overload = "drop-oldest:64"
high = 100
may-queue = [7, 7]
share = 3
deadline = 0.25
[settings]
dyn_max = 1000
dyn_keepalive = false
[engine]
threads = 1
cpus = [1]
spin = 10
reorder-packets = 1000
reorder-memory = 8
log-drops = "all"
[control]
socket = "/run/x.sock"
owner = "root"
group = "0"
"#;
    let config = Config::parse("/etc/towpath/t.toml", text).unwrap();
    assert_eq!(config.rules, Path::new("/etc/towpath/r.ipfw"));
    assert!(config.default_allow);
    assert_eq!((config.reload, config.unserved), (StatePolicy::Keep, DefaultVerdict::Pass));
    let names: Vec<&str> = config.ports.iter().map(|port| port.name.as_str()).collect();
    assert_eq!(names, ["mon", "wan", "vpn", "kernel"]);
    assert_eq!(config.monitors, [0]);
    let vlan = |id, name: &str, zone| Vlan { id, name: name.into(), zone };
    assert_eq!(config.ports[1].vlans, [vlan(200, "guest", 4), vlan(201, "staff", 5)]);
    assert_eq!([0, 1, 2].map(|at| config.ports[at].zone), [0, 4, 0]);
    assert_eq!(
        config.ports[1].driver,
        driver::Config::AfXdp(af_xdp::Config {
            mode: af_xdp::Mode::Native,
            multi_buffer: true,
            after: af_xdp::After::Drop(towpath_port::pins::path("eth0")),
            ..af_xdp::Config::new("eth0")
        })
    );
    assert_eq!(config.routes[1].mac, Some([2, 0, 0, 0, 0, 0x1f]));
    let queue = &config.queues[0];
    assert_eq!(queue.inspectors.commands[0][5], "a b");
    assert_eq!((queue.policy.high, queue.policy.low, queue.policy.deadline), (100, 99, 250_000_000));
    assert_eq!((&queue.policy.may_queue[..], queue.policy.share), (&[7][..], 3));
    assert_eq!(config.engine.reorder, Limits { packets: 1000, bytes: 8 << 20 });
    assert_eq!(config.engine.log_drops, LogDrops::All);
    assert_eq!(config.settings, [("dyn_max".into(), 1000), ("dyn_keepalive".into(), 0)]);
    assert_eq!(config.engine.wait, Wait::Park(Duration::from_micros(10)));
    let control = config.control.unwrap();
    assert_eq!((control.owner, control.group, control.mode), (Some(0), Some(0), 0o660));
}

/// The default memory limit of a user is enough for the inspectors that the engine starts, whatever their number.
#[test]
fn the_default_memory_is_enough_for_started_inspectors() {
    const MIB: u64 = 1 << 20;
    let limits = |more: &str, threads: usize| {
        let config =
            Config::parse("t", &bridge(&format!("[queue.1]\n{more}\n[engine]\nthreads = {threads}")))
                .unwrap();
        let inspectors = &config.queues[0].inspectors;
        let limits = inspectors.limits(threads);
        assert!(inspectors.rings(threads) <= limits.bytes_per_user, "{more}, {threads} threads");
        assert!(
            inspectors.wanted() <= limits.channels_per_user && limits.channels_per_user <= limits.channels
        );
        (limits.bytes_per_user / MIB, limits.channels_per_user)
    };
    let rows = [
        ("command = \"a\"", 1, (256, 64)),
        ("command = \"a\"\nworkers = 12", 4, (552, 64)),
        ("command = \"a\"\nworkers = 45", 1, (517, 90)),
        ("command = [\"a\", \"b\"]\nworkers = 64", 1, (1473, 256)),
        ("socket = \"s\"", 62, (713, 64)),
        ("command = \"a\"\nworkers = 12\nmemory = 300", 4, (300, 64)),
    ];
    for (more, threads, expected) in rows {
        assert_eq!(limits(more, threads), expected, "{more}, {threads} threads");
    }
}

#[test]
fn unknown_ports_and_queues_in_rules_are_warnings() {
    let config = Config::parse("t", &bridge("[queue.1]\ncommand = \"x\"")).unwrap();
    let rules = "add allow ip from any to any via wann\nadd inspect 1 ip from any to any\nadd tee 2 ip from any to any\n";
    let rules = config.parse_rules("r", rules).unwrap();
    let warnings: Vec<String> = rules.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert_eq!(
        warnings[0],
        "r:1:1: rule 100 names the port `wann`, which does not exist; did you mean `wan`?"
    );
    assert!(warnings[1].starts_with("r:3:1: rule 300 uses queue 2, which does not exist"), "{warnings:?}");
}

#[test]
fn keepalives_without_a_route_are_a_warning_of_check() {
    let rows = [
        ("add 7 allow tcp from any to any keep-state", "", true),
        ("add allow ip from any to any keep-state", "", true),
        ("add allow udp from any to any keep-state", "", false),
        ("add allow tcp from any to any", "", false),
        ("add allow tcp from any to any keep-state", "[settings]\ndyn_keepalive = 0", false),
        ("add allow tcp from any to any keep-state", "[settings]\ndyn_keepalive = 1", true),
    ];
    for (rules, more, warned) in rows {
        let config = Config::parse("t", &bridge(more)).unwrap();
        let ruleset = towpath_gate::rules::Ruleset::parse("r", rules).ruleset.unwrap();
        let warning = config.without_keepalives("r", &ruleset).map(|warning| warning.to_string());
        assert_eq!(warning.is_some(), warned, "{rules} {more}: {warning:?}");
        assert!(warning.is_none_or(|warning| warning.contains("dyn_keepalive has no effect")));
    }
}

/// Inspection is per packet: a rule that sends only connections of a mux to inspectors is an error.
#[test]
fn inspectors_do_not_get_a_muxs_connections() {
    let mux =
        "[mux.web]\nlisten = \"[::1]:7\"\nframing = \"line\"\nworker = \"w\"\n[queue.1]\ncommand = \"x\"";
    let both = Config::parse("t", &bridge(mux)).unwrap();
    let alone = Config::parse("t", &format!("rules = \"r\"\n{mux}\n")).unwrap();
    let rows = [
        (&both, "inspect 1 tcp from any to any in recv web", true),
        (&both, "divert 1 tcp from any to any via web", true),
        (&both, "inspect 1 tcp from any to any not via web", false),
        (&both, "inspect 1 tcp from any to any via wan", false),
        (&both, "inspect 1 tcp from any to any", false),
        (&both, "tee 1 tcp from any to any via web", false),
        (&alone, "inspect 1 tcp from any to any", true),
        (&alone, "allow tcp from any to any", false),
    ];
    for (config, rule, wrong) in rows {
        let rules = config.parse_rules("r", &format!("add allow ip from any to any\nadd {rule}\n"));
        assert_eq!(rules.is_err(), wrong, "{rule}: {rules:?}");
        let Err(errors) = rules else { continue };
        let said = errors[0].to_string();
        assert!(
            said.starts_with("r:2:1: rule 200 sends connections of the mux `web` to inspectors"),
            "{said}"
        );
        assert!(said.contains("write `allow`, `deny` or `reset`"), "{said}");
    }
}

#[test]
fn muxes_are_assigned_to_engine_threads_round_robin() {
    let mux = |name: &str, more: &str| {
        format!("[mux.{name}]\nlisten = \"[::1]:7\"\nframing = \"line\"\nworker = \"w\"\n{more}\n")
    };
    let muxes =
        [mux("a", ""), mux("b", "thread = \"own\""), mux("c", "thread = 0"), mux("d", ""), mux("e", "")];
    let with = |threads: usize| format!("{}[engine]\nthreads = {threads}\n", muxes.concat());
    #[rustfmt::skip]
    let rows = [
        (bridge(&with(1)),                                  [Some(0), None, Some(0), Some(0), Some(0)], 1),
        (bridge(&with(2)),                                  [Some(0), None, Some(0), Some(1), Some(0)], 2),
        (format!("rules = \"r\"\n{}", with(2)),            [None, None, Some(0), None, None],          2),
    ];
    for (text, expected, threads) in rows {
        let config = Config::parse("t", &text).unwrap();
        assert_eq!((&config.mux_threads()[..], config.engine_threads()), (&expected[..], threads), "{text}");
    }
    let alone = Config::parse("t", &format!("rules = \"r\"\n{}", mux("a", ""))).unwrap();
    assert_eq!(alone.engine_threads(), 0, "no engine thread is needed");
    for (thread, wrong) in [
        ("1", "the engine has no thread 1"),
        ("\"mine\"", "`thread` must be a whole number in 0..63, or \"own\""),
    ] {
        let errors = Config::parse("t", &bridge(&mux("a", &format!("thread = {thread}")))).unwrap_err();
        assert!(errors[0].to_string().contains(wrong), "{errors:?}");
    }
}

#[test]
fn programs_are_relative_to_the_configuration_or_in_path() {
    #[rustfmt::skip]
    let rows = [
        ("/etc/x/t.toml", "bin/w a/b 'c d'", "/etc/x/bin/w"),
        ("/etc/x/t.toml", "/opt/w a/b 'c d'", "/opt/w"),
        ("/etc/x/t.toml", "w a/b 'c d'", "w"),
        ("x/t.toml", "./w a/b 'c d'", "x/./w"),
        ("t.toml", "./w a/b 'c d'", "./w"),
    ];
    for (file, command, program) in rows {
        let mux = format!("[mux.m]\nlisten = \"[::1]:7\"\nframing = \"line\"\nworker = \"{command}\"");
        let text = bridge(&format!("[queue.1]\ncommand = \"{command}\"\n{mux}"));
        let config = Config::parse(file, &text).unwrap();
        let words = [program, "a/b", "c d"];
        assert_eq!(config.queues[0].inspectors.commands, [words], "{file}: {command}");
        assert_eq!(config.muxes[0].worker, words, "{file}: {command}");
    }
}

#[test]
fn framing_files_are_relative_to_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("t.toml").display().to_string();
    let object = Path::new(env!("CARGO_MANIFEST_DIR")).join("../towpath-bpf/tests/programs/thrift.o");
    std::fs::copy(object, directory.path().join("thrift.o")).unwrap();
    let mux = |framing: &str| {
        let text = format!(
            "rules = \"r\"\n[mux.m]\nlisten = \"[::1]:7\"\nworker = \"w\"\nframing = \"{framing}\"\n"
        );
        Config::parse(&file, &text)
    };
    let named = |config: &Config| config.muxes[0].framing.framing().name().to_owned();
    for framing in ["thrift.o", "thrift.o:frame"] {
        assert_eq!(named(&mux(framing).unwrap()), framing);
    }
    std::fs::write(directory.path().join("f.toml"), "length = 2\n").unwrap();
    let before = mux("f.toml").unwrap();
    assert!(before.fixed_differences(&mux("f.toml").unwrap()).is_empty());
    std::fs::write(directory.path().join("f.toml"), "length = 4\n").unwrap();
    assert_eq!(before.fixed_differences(&mux("f.toml").unwrap()), ["[mux]"]);
    std::fs::write(directory.path().join("f.toml"), "lenght = 4\n").unwrap();
    for (framing, why) in [
        ("f.toml", "`f.toml` is not a framing: 1:1: unknown key \"lenght\"; did you mean \"length\"?"),
        ("g.toml", "`g.toml` is not a framing: no such file, and not a framing"),
        ("thrift.o:x", "`thrift.o:x` is not a framing: "),
    ] {
        let errors = mux(framing).unwrap_err();
        assert!(errors[0].message.starts_with(why), "{errors:?}");
    }
}

#[test]
fn a_reload_names_the_keys_that_cannot_change() {
    let queue = "[queue.1]\ncommand = \"a b\"\n";
    let mux = "[mux.m]\nlisten = \"[::1]:7\"\nframing = \"line\"\nworker = \"w\"\n";
    let text = |more: &str| format!("unserved = \"drop\"\n{BRIDGE}{queue}{mux}{more}\n");
    let before = Config::parse("t", &text("")).unwrap();
    let rows: [(&str, String, &[&str]); 13] = [
        ("nothing", text(""), &[]),
        ("ports in another order", ports_reversed(&text("")), &[]),
        ("another command", text("").replace("a b", "c d"), &[]),
        ("default verdicts", text("").replace("\"drop\"", "\"pass\""), &[]),
        (
            "another `memory`",
            text("").replace("a b\"", "a b\"\nmemory = 99"),
            &[
                "[queue.1], but for `default`, `may-queue`, `stall`, `standby`, `command` and its keys, `workers`, `users` and `groups`,",
            ],
        ),
        ("one queue more", text("[queue.2]\nsocket = \"s\""), &[]),
        ("another pace", text("[engine]\ndrain = 9\nwait = \"spin\""), &[]),
        ("another log", text("[engine]\nlog-drops = \"all\""), &[]),
        ("more threads", text("[engine]\nthreads = 2"), &["`threads` and `cpus` of [engine]"]),
        ("other pages", text("[engine]\nhugepages = true"), &["`hugepages` of [engine]"]),
        ("another queue", text("").replace("queue.1", "queue.2"), &["[queue.1], which was removed,"]),
        ("another framing", text("").replace("line", "resp"), &["[mux]"]),
        ("another way to send", text("").replace("\"w\"", "\"w\"\nsend = \"plain\""), &["[mux]"]),
    ];
    for (what, text, expected) in rows {
        let mut after = Config::parse("t", &text).unwrap_or_else(|errors| panic!("{what}: {errors:?}"));
        after.number_ports_as(&before);
        assert_eq!(before.fixed_differences(&after), expected, "{what}");
    }
}

/// The same configuration with the port tables in reverse order.
fn ports_reversed(text: &str) -> String {
    let mut ports: Vec<&str> = text.split_inclusive('\n').collect();
    let at = |name: &str| ports.iter().position(|line| line.starts_with(name)).unwrap();
    let (wan, lan) = (at("[port.wan]"), at("[port.lan]"));
    ports[wan..].rotate_left(lan - wan);
    // The other tables follow `lan` and its two keys.
    ports[wan + 3..].rotate_right(lan - wan);
    ports.concat()
}

#[test]
fn port_indices_are_stable_across_a_reload() {
    let port = |name: &str| format!("[port.{name}]\ndriver = \"tun\"\n");
    let head = |more: &str| format!("rules = \"r\"\n{more}\n");
    let route = |to: &str, port: &str| format!("[[route]]\nto = \"{to}\"\nport = \"{port}\"\n");
    let routes = format!("{}{}", route("10.0.0.0/8", "x"), route("::/0", "z"));
    let read = |text: String| Config::parse("t", &text).unwrap();
    let before = read(format!("{}{}{}{}{routes}", head("monitor = \"y\""), port("x"), port("y"), port("z")));
    let mut after =
        read(format!("{}{}{}{}{routes}", head("monitor = \"y\""), port("z"), port("x"), port("y")));
    assert_ne!(after.routes, before.routes);
    after.number_ports_as(&before);
    assert_eq!(
        (&after.routes, &after.monitors, &after.ports),
        (&before.routes, &before.monitors, &before.ports)
    );

    // The indices are the same; the ports at them differ, and only the second configuration is wired differently.
    let bridges = |a: &str, b: &str| {
        let bridge = |x, y| format!("[[bridge]]\nports = [\"{x}\", \"{y}\"]\n");
        let (a, b) = (a.split_at(1), b.split_at(1));
        format!("{}{}", bridge(a.0, a.1), bridge(b.0, b.1))
    };
    let ports = |names: [&str; 4]| names.map(port).concat();
    let before = read(format!("{}{}{}", head(""), ports(["x", "y", "z", "u"]), bridges("xy", "zu")));
    let rows: [([&str; 4], [&str; 2], &[&str]); 3] = [
        (["z", "u", "x", "y"], ["zu", "xy"], &[]),
        (["u", "z", "x", "y"], ["uz", "xy"], &[]),
        (["x", "z", "y", "u"], ["xz", "yu"], &["[[bridge]]"]),
    ];
    for (names, [one, other], expected) in rows {
        let mut after = read(format!("{}{}{}", head(""), ports(names), bridges(one, other)));
        assert_eq!(after.bridges, before.bridges);
        after.number_ports_as(&before);
        assert_eq!(before.fixed_differences(&after), expected);
    }
}

#[test]
fn the_group_of_a_fleet_is_checked() {
    let parse = |table: &str| {
        let text = format!("rules = \"r\"\nmonitor = \"a\"\n[port.a]\ndriver = \"tun\"\n[fleet]\n{table}\n");
        Config::parse("t", &text).map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let good = "servers = [\"nats://a:1\", \"tls://b:2\"]\ngroup = \"g\"\ngate = \"a-1\"\n";
    let fleet = parse(good).unwrap().fleet.unwrap();
    assert_eq!((fleet.servers.len(), fleet.all, fleet.window.as_millis()), (2, false, 10));
    let rows = [
        ("group = \"g\"\ngate = \"a\"".to_owned(), "`servers` is missing"),
        (good.replace("nats://", "http://"), "no address of a server"),
        (good.replace("\"a-1\"", "\"a.1\""), "`gate` is not a name"),
        (good.replace("\"g\"", "\"*\""), "`group` is not a name"),
        (format!("{good}tls-key = \"k\""), "`tls-key` needs `tls-certificate`"),
        (format!("{good}replicate = \"some\""), "`replicate` cannot be \"some\""),
        (good.replace("group = \"g\"\n", ""), "[fleet] has no effect"),
        (good.replace("group = \"g\"", "window = 1"), "`window` needs `group`"),
    ];
    for (table, expected) in rows {
        let errors = parse(&table).unwrap_err();
        assert!(errors.iter().any(|error| error.contains(expected)), "{table}: {errors:?}");
    }
}

#[test]
fn workers_of_a_mux_on_other_machines_are_checked() {
    let parse = |name: &str, keys: &str, fleet: &str| {
        let text = format!(
            "rules = \"r\"\n[mux.{name}]\nlisten = \"[::1]:7\"\nframing = \"line\"\n{keys}\n{fleet}\n"
        );
        Config::parse("t", &text).map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let fleet = "[fleet]\nservers = \"nats://127.0.0.1:4222\"\ngate = \"a\"";
    let remote = "remote = \"jobs.x\"";
    // With and without processes of this machine.
    for (keys, workers, most) in [
        (format!("{remote}\nworker = \"w\"\nworkers = 3"), 3, 16),
        (format!("{remote}\nremote-workers = 5"), 0, 5),
    ] {
        let config = parse("web", &keys, fleet).unwrap();
        let mux = &config.muxes[0];
        let remote = mux.remote.as_ref().unwrap();
        assert_eq!((mux.workers, &*remote.subject, remote.most.get()), (workers, "jobs.x", most));
        assert_eq!(config.fleet.as_ref().unwrap().group, None);
        let other = parse("web", &keys.replace("jobs", "tasks"), fleet).unwrap();
        assert_eq!(config.fixed_differences(&other), ["[mux]"]);
        assert_eq!(config.fixed_differences(&config), [""; 0]);
    }
    let long = "a".repeat(63);
    let rows = [
        ("web", remote.to_owned(), String::new(), "`remote` has no server"),
        ("web", "remote = \"jobs.*\"".to_owned(), fleet.to_owned(), "`jobs.*` is not a subject"),
        ("web", format!("{remote}\nremote-workers = 65"), fleet.to_owned(), "`remote-workers` must be"),
        ("web", format!("{remote}\nworkers = 2"), fleet.to_owned(), "`workers` needs `worker`"),
        (
            "web",
            "worker = \"w\"\nremote-workers = 2".to_owned(),
            String::new(),
            "`remote-workers` needs `remote`",
        ),
        ("\"w.b\"", remote.to_owned(), fleet.to_owned(), "`a-w.b` cannot be the name of a front"),
        (
            "web",
            remote.to_owned(),
            fleet.replace("\"a\"", &format!("\"{long}\"")),
            "cannot be the name of a front",
        ),
        ("web", String::new(), String::new(), "`worker` is missing"),
    ];
    for (name, keys, fleet, expected) in rows {
        let errors = parse(name, &keys, &fleet).unwrap_err();
        assert!(errors.iter().any(|error| error.contains(expected)), "{keys}: {errors:?}");
    }
}

#[test]
fn collectors_and_outputs_of_events_are_checked() {
    let parse = |table: &str| {
        let text = format!("rules = \"r\"\nmonitor = \"a\"\n[port.a]\ndriver = \"tun\"\n{table}\n");
        Config::parse("t", &text).map_err(|errors| errors.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    for collector in ["", "host", "host:", "host:x", "host:70000", "host:0", ":4739"] {
        let errors = parse(&format!("[ipfix]\ncollector = \"{collector}\"")).unwrap_err();
        assert!(errors[0].contains("no address `HOST:PORT`"), "{collector}: {errors:?}");
    }
    assert!(parse("[ipfix]").unwrap_err()[0].contains("`collector` is missing"));
    assert_eq!(parse("[ipfix]\ncollector = \"[::1]:4739\"").unwrap().ipfix.unwrap().domain, 1);
    assert!(parse("[events]").unwrap_err()[0].contains("`output` is missing"));
    let errors = parse("[events]\noutput = \"e\"\ninclude = [\"state\"]").unwrap_err();
    assert!(
        errors[0].contains("`include` cannot be \"state\"") && errors[0].contains("`states`"),
        "{errors:?}"
    );
    let events = |text: &str| parse(text).unwrap().events.unwrap();
    let some = events("[events]\noutput = \"unix:s\"\ninclude = [\"drops\"]");
    assert_eq!(
        (some.output, some.states, some.drops, some.verdicts),
        (EventOutput::Unix("s".into()), false, true, false)
    );
    let all = events("[events]\noutput = \"stdout\"");
    assert_eq!((all.output, all.states, all.drops, all.verdicts), (EventOutput::Stdout, true, true, true));
}

#[test]
fn levels_of_the_log_are_checked() {
    let port = "[port.a]\ndriver = \"tun\"\n";
    let text = |log: &str| format!("rules = \"r\"\nmonitor = \"a\"\n[log]\n{log}\n{port}");
    let log = Config::parse("t", &text("level = \"debug\"\ntargets = [\"states=info\", \"towpath=error\"]"))
        .unwrap()
        .log;
    assert_eq!(log.levels.to_string(), "debug, states=info, towpath=error, towpath_=warning");
    for (written, expected) in [
        ("format = \"xml\"", "t:4:10: `format` cannot be \"xml\"; the values are text, json, journald"),
        ("targets = \"info\"", "t:4:11: `info` has no target; write `TARGET=info`, or level = \"info\""),
        (
            "targets = [\"states=loud\"]",
            "t:4:12: `loud` is not a level; the levels are off, error, warning, info, debug, trace; \
             write targets = [\"states=info\"]",
        ),
    ] {
        let errors = Config::parse("t", &text(written)).unwrap_err();
        assert_eq!(errors[0].to_string(), expected);
    }
}

#[test]
fn a_renamed_key_or_word_is_an_error_that_names_the_new_one() {
    let port = "[port.a]\ndriver = \"tun\"\n";
    let rows = [
        (
            format!("rules = \"r\"\ntap = \"a\"\n{port}"),
            "t:2:1: unknown key `tap`; this key is now `monitor`",
        ),
        (
            format!("rules = \"r\"\nmonitor = \"a\"\n{port}[queue.1]\nsocket = \"s\"\nfanout = \"tap\"\n"),
            "t:7:10: fanout `tap` is now called `mirror`",
        ),
    ];
    for (text, expected) in rows {
        let errors = Config::parse("t", &text).expect_err(&text);
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert!(errors.iter().any(|error| error.starts_with(expected)), "{errors:?}");
    }
}
