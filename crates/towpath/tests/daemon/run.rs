//! `towpath run`: its configuration, and its errors.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, getpgid, kill_process};
use serde_json::Value;
use towpath_port::netns::{veth, within};
use towpath_port::pcap::Writer;

use crate::support::{Log, until};

fn towpath(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_towpath")).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// The configurations of the repository's examples.
fn examples() -> Vec<PathBuf> {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/run");
    let files = std::fs::read_dir(&examples).unwrap().map(|file| file.unwrap().path());
    let examples: Vec<_> = files.filter(|file| file.extension().is_some_and(|it| it == "toml")).collect();
    assert!(!examples.is_empty());
    examples
}

#[towpath_testenv::needs(netns)]
#[test]
fn the_examples_are_right() {
    within(|| {
        veth("eth0", "e0");
        veth("eth1", "e1");
        for file in examples() {
            let (code, out, err) = towpath(&["run", "--check", file.to_str().unwrap()]);
            assert_eq!((code, err.as_str()), (0, ""), "{}", file.display());
            assert!(out.starts_with(&format!("{}: ", file.display())), "{out}");
        }
    });
}

/// The configurations, with the paths of programs and files replaced.
#[towpath_testenv::needs(netns)]
#[test]
fn the_examples_start() {
    within(|| {
        veth("eth0", "e0");
        veth("eth1", "e1");
        for example in examples() {
            let directory = tempfile::tempdir().unwrap();
            let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
            let text = std::fs::read_to_string(&example)
                .unwrap()
                .replace("../../target/debug/examples/worker", &crate::example::example("mux_worker"))
                .replace("../../target/debug/examples/redis", &crate::example::example("redis"))
                .replace("/dev/shm/keys", &path("keys"))
                .replace("/run/towpath/control.sock", &path("ctl.sock"))
                .replace("/run/towpath/", &path(""));
            let (config, muxes) = (path("t.toml"), text.matches("\n[mux.").count());
            std::fs::write(&config, text).unwrap();
            std::fs::create_dir(path("keys")).unwrap();
            // The workers have a separate user.
            std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
            std::fs::set_permissions(path("keys"), Permissions::from_mode(0o1777)).unwrap();
            let rules = example.with_extension("ipfw");
            std::fs::copy(&rules, directory.path().join(rules.file_name().unwrap())).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
            let mut engine =
                command.args(["run", &config]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            let control = path("ctl.sock");
            until(|| {
                let ended = engine.try_wait().unwrap();
                ended.is_some()
                    || if muxes > 0 {
                        attached(&control) == muxes
                    } else {
                        ctl(&control, "show stats").status.success()
                    }
            });
            // The process may have ended.
            let _ = kill_process(Pid::from_child(&engine), Signal::TERM);
            let output = engine.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(0), "{}: {said}", example.display());
        }
    });
}

fn ctl(control: &str, words: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
    command.args(["ctl", "--socket", control]).args(words.split_whitespace()).output().unwrap()
}

/// How many muxes have workers.
fn attached(control: &str) -> usize {
    let output = ctl(control, "show mux --json");
    let Ok(answer) = serde_json::from_slice::<Value>(&output.stdout) else { return 0 };
    let others = answer["mux"]["others"].as_array().into_iter().flatten();
    let has_workers = |mux: &&Value| mux["workers"].as_array().is_some_and(|workers| !workers.is_empty());
    others.chain([&answer["mux"]]).filter(has_workers).count()
}

#[test]
fn check_tells_every_error_with_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let config = path("t.toml");
    std::fs::write(&config, "rules = \"r\"\nmonitor = [\"a\"]\n[port.a]\ndriver = \"af_paket\"\n[engin]\n")
        .unwrap();
    // One run reports the errors of the configuration, then those of the rules. A start reports the same.
    let ends = |errors: &str, ends: &[&str]| {
        let lines: Vec<&str> = errors.lines().collect();
        assert_eq!(lines.len(), ends.len(), "{errors}");
        lines.iter().zip(ends).for_each(|(line, end)| assert!(line.ends_with(end), "{line}: {end}"));
    };
    let wrong = [
        "t.toml:4:10: unknown driver \"af_paket\"; did you mean `af_packet`?",
        "t.toml:5:2: unknown key `engin`; did you mean `engine`?",
    ];
    let unread = format!(
        "/r:1:1: cannot be read: No such file or directory (os error 2); `rules` of {config} names it"
    );
    for words in [&["run", "--check", &config][..], &["run", &config]] {
        let (code, out, err) = towpath(words);
        assert_eq!((code, out.as_str()), (6, ""));
        ends(&err, &[wrong[0], wrong[1], &unread]);
    }
    std::fs::write(path("r"), "add allow tpc from any to any\nadd alow ip from any to any\n").unwrap();
    let (code, _, err) = towpath(&["run", "--check", &config]);
    assert_eq!(code, 6);
    let rules = [
        "r:1:11: unknown protocol \"tpc\"; did you mean \"tcp\"?",
        "r:2:5: unknown action \"alow\"; did you mean \"allow\"?",
    ];
    ends(&err, &[wrong[0], wrong[1], rules[0], rules[1]]);
    // The errors of the rules are reported even if the configuration is not valid TOML.
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text}x = = 1\n")).unwrap();
    let (code, _, err) = towpath(&["run", "--check", &config]);
    assert_eq!(code, 6, "{err}");
    assert!(err.lines().last().unwrap().ends_with(rules[1]), "{err}");
    std::fs::remove_file(path("r")).unwrap();

    std::fs::write(&config, "rules = \"r\"\nmonitor = [\"a\"]\n[port.a]\ndriver = \"af_packet\"\n").unwrap();
    let (code, _, err) = towpath(&["run", "--check", &config]);
    assert_eq!(code, 3);
    assert!(err.contains("/r:1:1: cannot be read: No such file or directory"), "{err}");
    std::fs::write(path("r"), "add allow ip from any to any\nadd alow ip from any to any\n").unwrap();
    let (code, out, err) = towpath(&["run", "--check", "--json", &config]);
    assert_eq!((code, err.as_str()), (3, ""));
    let object: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&object["ok"], &object["errors"][0]["line"]), (&false.into(), &2.into()), "{out}");
}

#[test]
fn check_looks_at_certificates_and_tells_the_muxes() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("r"), "add allow ip from any to any\n").unwrap();
    let mux = "[mux.web]\nlisten = [\"127.0.0.1:7\", \"unix:/x\"]\nframing = \"line\"\nworker = \"w\"\n";
    let check = |more: &str| {
        std::fs::write(path("t.toml"), format!("rules = \"r\"\n{mux}{more}")).unwrap();
        towpath(&["run", "--check", &path("t.toml")])
    };
    let (code, out, err) = check("");
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains(": 0 ports; "), "{out}");
    assert!(out.contains("; 1 muxes: web (127.0.0.1:7, unix:/x); "), "{out}");
    let (code, _, err) = check("tls-cert = \"no.pem\"\ntls-key = \"key.pem\"\n");
    assert_eq!(code, 6, "{err}");
    assert!(err.contains("t.toml:6:12: ") && err.contains("no.pem: cannot be read: No such file"), "{err}");
}

/// Packets between two `pcap` ports: the packets of `office.pcap` are written to a file.
#[test]
fn captures_go_through_the_live_engine() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let office = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/office.pcap");
    let config = |more: &str| {
        let text = format!(
            "rules = \"r\"\n[[bridge]]\nports = [\"a\", \"b\"]\n[port.a]\ndriver = \"pcap\"\nread = \"{}\"\n\
             [port.b]\ndriver = \"pcap\"\nwrite = \"out.pcap\"\n{more}\n",
            office.display()
        );
        std::fs::write(path("t.toml"), text).unwrap();
        towpath(&["run", &path("t.toml")])
    };
    let frames = |path: &Path| {
        use towpath_port::{Burst, Port, Received, pcap};
        let (mut reader, mut burst, mut frames) =
            (pcap::Reader::open(path).unwrap(), Burst::new(64), Vec::new());
        while reader.receive(&mut burst).unwrap() == Received::Frames {
            frames.extend(burst.iter().map(|frame| frame.bytes.to_vec()));
        }
        frames
    };
    let all = frames(&office);

    std::fs::write(path("r"), "add allow ip from any to any\n").unwrap();
    let (code, out, err) = config("");
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("capabilities kept: none"), "{err}");
    assert!(out.contains("packets"), "{out}");
    let (_, out, _) = towpath(&["run", "--json", &path("t.toml")]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["packets"], all.len(), "{out}");
    assert_eq!(frames(Path::new(&path("out.pcap"))), all);

    // A capture without packets is valid.
    std::fs::write(path("r"), "add deny ip from any to any\n").unwrap();
    let (code, _, err) = config("");
    assert_eq!(code, 0, "{err}");
    assert!(frames(Path::new(&path("out.pcap"))).is_empty());

    // The same through an inspector that passes all packets, and one that drops some.
    std::fs::write(path("r"), "add inspect 7 ip from any to any\n").unwrap();
    let queue = |pattern: &str| {
        let command = format!("towpath inspect --queue 7 --match {pattern} --verdict drop");
        format!(
            "[queue.7]\ncommand = \"{command}\"\noverload = \"block\"\nworkers = 2\ndeadline = 600\n[engine]\ndrain = 600"
        )
    };
    let (code, _, err) = config(&queue("nothing-like-this"));
    assert_eq!(code, 0, "{err}");
    let mut passed = frames(Path::new(&path("out.pcap")));
    // The order of packets is kept within each flow only.
    assert_eq!(passed.len(), all.len());
    passed.sort();
    let mut sorted = all.clone();
    sorted.sort();
    assert!(passed == sorted);
    let (code, _, err) = config(&queue("password="));
    assert_eq!(code, 0, "{err}");
    let passed = frames(Path::new(&path("out.pcap")));
    let has = |frame: &Vec<u8>| frame.windows(9).any(|bytes| bytes == b"password=");
    assert!(passed.len() < all.len() && !passed.iter().any(has));
}

/// States survive a restart: the next run has the states that the previous one saved.
#[test]
fn states_go_from_one_engine_to_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let office = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/office.pcap");
    std::fs::write(path("r"), "add allow ip from any to any keep-state lifetime 600\n").unwrap();
    let run = |states: &str| {
        let text = format!(
            "rules = \"r\"\nstates = \"{states}\"\n[[bridge]]\nports = [\"a\", \"b\"]\n\
             [port.a]\ndriver = \"pcap\"\nread = \"{}\"\n[port.b]\ndriver = \"pcap\"\nwrite = \"out.pcap\"\n",
            office.display()
        );
        std::fs::write(path("t.toml"), text).unwrap();
        towpath(&["run", &path("t.toml")])
    };
    let (code, out, err) = run("states");
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("/states: no states yet") && err.contains(" states saved"), "{err}");
    let made = |out: &str| {
        let line = out.lines().find(|line| line.starts_with("states")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let saved = made(&out);
    assert!(saved > 0 && std::fs::read(path("states")).unwrap().starts_with(b"TOWPATHS"));
    let (code, out, err) = run("states");
    assert_eq!(code, 0, "{err}");
    assert!(err.contains(&format!("/states: {saved} states restored\n")), "{err}");
    // While the engine runs, the states file does not exist: an engine that is killed leaves no outdated states.
    assert!(std::fs::read(path("states.used")).unwrap().starts_with(b"TOWPATHS"));
    // The same flows have the restored states.
    assert_eq!(made(&out), saved);

    // A file that is not a snapshot is reported. The run starts without states, and writes a valid snapshot.
    let whole = std::fs::read(path("states")).unwrap();
    for (wrong, why) in [
        (b"anything".to_vec(), "not a snapshot of states"),
        (whole[..whole.len() / 2].to_vec(), "the snapshot is truncated"),
    ] {
        std::fs::write(path("states"), wrong).unwrap();
        let (code, out, err) = run("states");
        assert_eq!((code, made(&out)), (0, saved), "{err}");
        assert!(err.contains("/states: no states restored: ") && err.contains(why), "{err}");
        assert_eq!(std::fs::read(path("states")).unwrap().len(), whole.len());
    }
    // Other rules, which would not make them.
    let rules = std::fs::read(path("r")).unwrap();
    std::fs::write(path("r"), "add deny ip from any to any\n").unwrap();
    let (code, _, err) = run("states");
    assert_eq!(code, 0, "{err}");
    assert!(err.contains(&format!("/states: {saved} states dropped")), "{err}");
    assert!(err.contains("/states: 0 states saved"), "{err}");
    std::fs::write(path("r"), rules).unwrap();

    // A file that cannot be written is reported at the start.
    let (code, _, err) = run("no/such/states");
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("states: ") && err.contains("/no/such/states: No such file or directory"), "{err}");
}

/// A router between three captures: packets with a route, packets that `fwd` redirects, and packets that are answered.
#[test]
fn a_router_answers_what_it_cannot_pass_on() {
    use towpath_gate::PacketSpec;
    use towpath_port::{Burst, Frame, LinkType, Port, Received, pcap};
    use towpath_wire as wire;

    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let packets = [
        "udp 10.0.0.1:4000 > 10.9.0.2:53 ttl 64",
        "udp 10.0.0.1:4000 > 10.9.0.2:53 ttl 1",
        "udp 10.0.0.1:4000 > 10.7.0.2:53",
        "udp 10.0.0.1:4000 > 10.9.0.2:5353",
        "udp 2001:db8::1:4000 > 2001:db8:9::2:53 ttl 1",
        "udp 2001:db8::1:4000 > 2001:db8:7::2:53",
    ];
    let mut writer = pcap::Writer::create(path("in.pcap")).unwrap();
    for words in packets {
        let words = words.replace("2001:db8::1:4000", "[2001:db8::1]:4000");
        let words = words
            .replace("2001:db8:9::2:53", "[2001:db8:9::2]:53")
            .replace("2001:db8:7::2:53", "[2001:db8:7::2]:53");
        let packet = PacketSpec::parse(&words).unwrap_or_else(|error| panic!("{words}: {error}"));
        let frame = Frame { time_ns: 1, ..Frame::new(&packet.frame, LinkType::ETHERNET) };
        assert_eq!(writer.send(&mut std::iter::once(frame)).unwrap(), 1);
    }
    writer.flush().unwrap();
    drop(writer);
    std::fs::write(path("r"), "add fwd 10.8.0.1 udp from any to any 5353 in\nadd allow ip from any to any\n")
        .unwrap();
    let route = |to: &str, port: &str| {
        format!("[[route]]\nto = \"{to}\"\nport = \"{port}\"\nmac = \"02:00:00:00:00:09\"\n")
    };
    let config = format!(
        "rules = \"r\"\n[port.a]\ndriver = \"pcap\"\nread = \"in.pcap\"\nwrite = \"a.pcap\"\n\
         address = [\"10.0.0.254\", \"2001:db8::254\"]\n[port.b]\ndriver = \"pcap\"\nwrite = \"b.pcap\"\n\
         [port.c]\ndriver = \"pcap\"\nwrite = \"c.pcap\"\n{}{}{}",
        route("10.9.0.0/16", "b"),
        route("2001:db8:9::/48", "b"),
        route("10.8.0.0/16", "c"),
    );
    std::fs::write(path("t.toml"), config).unwrap();
    let (code, _, err) = towpath(&["run", path("t.toml").to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    // Protocol and TTL; for an answer also type and code.
    let came = |name: &str| {
        let (mut reader, mut burst, mut seen) =
            (pcap::Reader::open(path(name)).unwrap(), Burst::new(64), Vec::new());
        while reader.receive(&mut burst).unwrap() == Received::Frames {
            for frame in burst.iter() {
                let packet =
                    wire::parse(towpath_wire::LinkType::ETHERNET, frame.bytes, frame.wire_len).unwrap();
                let hops =
                    frame.bytes[packet.network + if frame.bytes[packet.network] >> 4 == 6 { 7 } else { 8 }];
                seen.push((packet.proto, hops, packet.icmp_type, packet.icmp_code));
            }
        }
        seen
    };
    assert_eq!(came("b.pcap"), [(17, 63, 0, 0)]);
    assert_eq!(came("c.pcap"), [(17, 63, 0, 0)]);
    // Time exceeded and net unreachable; for IPv6 time exceeded and no route to destination.
    assert_eq!(came("a.pcap"), [(1, 64, 11, 0), (1, 64, 3, 0), (58, 64, 3, 0), (58, 64, 1, 0)]);
}

/// Output of a bridge with these rules, whose `pcap` port has these packets.
fn bridged(packets: &[&str], rules: &str) -> String {
    use towpath_gate::PacketSpec;
    use towpath_port::{Frame, LinkType, Port, pcap};

    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut writer = pcap::Writer::create(path("in.pcap")).unwrap();
    for words in packets {
        let packet = PacketSpec::parse(words).unwrap();
        let frame = Frame { time_ns: 1, ..Frame::new(&packet.frame, LinkType::ETHERNET) };
        writer.send(&mut std::iter::once(frame)).unwrap();
    }
    writer.finish().unwrap();
    std::fs::write(path("r"), rules).unwrap();
    let config = "rules = \"r\"\n[[bridge]]\nports = [\"a\", \"b\"]\n[port.a]\ndriver = \"pcap\"\nread = \"in.pcap\"\n\
                  [port.b]\ndriver = \"pcap\"\nwrite = \"out.pcap\"\n";
    std::fs::write(path("t.toml"), config).unwrap();
    let (code, out, err) = towpath(&["run", path("t.toml").to_str().unwrap()]);
    assert_eq!(code, 0, "{err}");
    out
}

#[test]
fn incomplete_datagrams_at_the_end_are_dropped_and_counted() {
    let packets = [
        "udp 10.0.0.1:4000 > 10.0.0.2:53 mf id 7 len 24",
        "udp 10.0.0.1:4000 > 10.0.0.2:53",
        "udp 10.0.0.1:4000 > 10.0.0.2:53 offset 9 id 8 len 24",
    ];
    let out = bridged(&packets, "add reass ip from any to any\nadd allow ip from any to any\n");
    let line = |name: &str| out.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    assert!(out.contains("3 packets"), "{out}");
    assert_eq!((line("passed"), line("dropped")), ("1".into(), "2".into()), "{out}");
}

#[test]
fn a_start_that_fails_leaves_no_process_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("r"), "add allow ip from any to any\n").unwrap();
    // A process that outlives the engine would keep standard error open, which is read to its end here.
    let count = "i=0; while [ $i -lt 500000000 ]; do i=$((i + 1)); done; echo left behind >&2";
    let config = format!(
        "rules = \"r\"\nmonitor = \"a\"\n[port.a]\ndriver = \"pcap\"\nwrite = \"x.pcap\"\n\
         [queue.1]\ncommand = [\"sh -c '{count}'\", \"/no/such/program\"]\n"
    );
    std::fs::write(path("t.toml"), config).unwrap();
    let (code, _, err) = towpath(&["run", &path("t.toml")]);
    assert_eq!(code, 4, "{err}");
    assert!(err.contains("cannot start `/no/such/program`") && !err.contains("left behind"), "{err}");
}

#[test]
fn the_error_names_a_missing_resource() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("r"), "add allow ip from any to any\n").unwrap();
    std::fs::write(path("file"), "").unwrap();
    let rows = [
        ("driver = \"pcap\"\nread = \"missing.pcap\"", "", 7, "missing.pcap: cannot open: No such file"),
        (
            "driver = \"pcap\"\nwrite = \"x.pcap\"",
            "[control]\nsocket = \"file\"",
            5,
            "exists and is not a socket; choose another path or remove it",
        ),
        (
            "driver = \"pcap\"\nwrite = \"x.pcap\"",
            "[queue.1]\ncommand = \"/no/such/program\"",
            4,
            "queue 1: cannot start `/no/such/program`: No such file",
        ),
    ];
    for (port, more, expected, words) in rows {
        let text = format!("rules = \"r\"\nmonitor = \"a\"\n[port.a]\n{port}\n{more}\n");
        std::fs::write(path("t.toml"), text).unwrap();
        let (code, _, err) = towpath(&["run", &path("t.toml")]);
        assert_eq!(code, expected, "{err}");
        assert!(err.lines().last().unwrap().contains(words), "{err}");
    }
}

/// A port that is a pipe delays the start until the test writes to it.
#[test]
fn a_reload_during_the_start_is_not_lost() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    // The inspector has a separate user.
    std::fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
    mknodat(CWD, path("in.pcap"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    std::fs::write(path("r"), "add inspect 1 ip from any to any\n").unwrap();
    let inspect =
        format!("exec {} inspect --queue 1 --match x --verdict drop", env!("CARGO_BIN_EXE_towpath"));
    let tells = format!("echo $$ > {0}.new; mv {0}.new {0}; {inspect}", path("pid"));
    let text = format!(
        "rules = \"r\"\n[[bridge]]\nports = [\"a\", \"b\"]\n[port.a]\ndriver = \"pcap\"\nread = \"in.pcap\"\n\
         [port.b]\ndriver = \"pcap\"\nwrite = \"out.pcap\"\n[queue.1]\ncommand = \"sh -c '{tells}'\"\n"
    );
    std::fs::write(path("t.toml"), text).unwrap();
    let mut engine = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["run", &path("t.toml")])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = Log::of(&mut engine);
    // Its handled signals (proc_pid_status(5)).
    until(|| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", engine.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() >> (Signal::HUP.as_raw() - 1) & 1 == 1
    });
    kill_process(Pid::from_child(&engine), Signal::HUP).unwrap();
    Writer::create(path("empty.pcap")).unwrap().finish().unwrap();
    let mut capture = std::fs::File::create(path("in.pcap")).unwrap();
    capture.write_all(&std::fs::read(path("empty.pcap")).unwrap()).unwrap();
    // A terminal's ^C does not reach the inspector: the engine waits for its verdicts.
    until(|| Path::new(&path("pid")).exists());
    let pid = Pid::from_raw(std::fs::read_to_string(path("pid")).unwrap().trim().parse().unwrap()).unwrap();
    assert_eq!(getpgid(Some(pid)).unwrap(), pid);
    drop(capture);
    let (said, status) = (log.whole(), engine.wait().unwrap());
    assert!(status.success(), "{status:?}: {said}");
}
