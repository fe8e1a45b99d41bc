//! The files of an engine, and the sandboxes of the programs that it starts.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::within;
use towpath_port::{Frame, LinkType, Port, af_packet};

use crate::bridged::BRIDGE;
use crate::example::example;
use crate::privileges::{Engine, INSPECT, status};
use crate::support::until;

/// What a sandboxed shell tries before it becomes an inspector. Each line of DIR/out/results is a word and an exit status.
const PROBE: &str = r#"
try() { word=$1; shift; "$@" >/dev/null 2>&1; echo "$word $?" >> DIR/out/results; }
try read cat DIR/given/file
try read-other cat DIR/t.toml
try list-other ls /
try write sh -c 'echo x > DIR/out/file'
try write-other sh -c 'echo x > DIR/open/file'
try call strace -o /dev/null true
try interface ip link show dev wan
ip -o link > DIR/out/links
"#;

/// Starts an engine with the probe as an inspector and these keys of its sandbox. Returns it with the results.
fn probed(keys: &str) -> (Engine, String) {
    let binary = Path::new(env!("CARGO_BIN_EXE_towpath"));
    let table = "[queue.1]\ncommand = \"sh DIR/given/probe\"\n[queue.1.sandbox]\n";
    let more = table.to_owned() + &keys.replace("BIN", &binary.display().to_string());
    let engine = start(&more, 1, &format!("{} inspect --queue 1 --match x --verdict drop", binary.display()));
    let results = results(&engine);
    (engine, results)
}

/// Starts an engine with files for the probe, which becomes `program`.
fn start(more: &str, inspectors: usize, program: &str) -> Engine {
    Engine::start_after(more, inspectors, |directory| {
        for name in ["given", "out", "open"] {
            let path = directory.join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        }
        let probe = PROBE.replace("DIR", &directory.display().to_string());
        std::fs::write(directory.join("given/probe"), format!("{probe}exec {program}\n")).unwrap();
        std::fs::write(directory.join("given/file"), "given").unwrap();
    })
}

fn results(engine: &Engine) -> String {
    std::fs::read_to_string(engine.directory.path().join("out/results")).unwrap_or_default()
}

/// The sandbox permits the probe only `given` and `out`, and its own namespaces.
fn is_confined(engine: &Engine, pid: u32) {
    let results = results(engine);
    let failed = |word: &str| {
        let line = results.lines().find_map(|line| line.strip_prefix(&format!("{word} ")));
        line.unwrap_or_else(|| panic!("{word}: {results}")) != "0"
    };
    for (word, expected) in [
        ("read", false),
        ("read-other", true),
        ("list-other", true),
        ("write", false),
        ("write-other", true),
        ("call", true),
        ("interface", true),
    ] {
        assert_eq!(failed(word), expected, "{word}: {results}");
    }
    let links = std::fs::read_to_string(engine.directory.path().join("out/links")).unwrap();
    assert!(links.lines().count() == 1 && links.contains(": lo: "), "{links}");
    let namespace = |pid: u32, name: &str| std::fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap();
    for name in ["net", "ipc", "uts", "cgroup"] {
        assert_ne!(namespace(pid, name), namespace(engine.child.id(), name), "{name}");
    }
    assert_eq!(namespace(pid, "mnt"), namespace(engine.child.id(), "mnt"));
    assert_eq!(status(pid)["Seccomp"], "2");
}

/// Sends a frame that the inspector passes, until it has decided one.
fn inspects(engine: &Engine) {
    let decided = || {
        let answer = engine.control().json("show queues --json");
        answer["queues"][0]["passed"].as_u64().unwrap()
    };
    let mut tx = af_packet::Socket::open(af_packet::Config::new("l0")).unwrap();
    let mut frame = [0u8; 60];
    // Broadcast, IPv4, UDP, without a checksum.
    frame[..6].fill(0xff);
    frame[12..38].copy_from_slice(&[
        8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0xf6, 0xcd, 192, 0, 2, 1, 192, 0, 2, 2, 0, 7, 0, 7,
    ]);
    frame[39] = 8;
    until(|| {
        tx.send(&mut std::iter::once(Frame::new(&frame, LinkType::ETHERNET))).unwrap();
        decided() > 0
    });
}

#[towpath_testenv::needs(netns, landlock, "strace")]
#[test]
fn a_program_uses_only_what_its_sandbox_permits() {
    within(|| {
        let keys = "namespaces = [\"net\", \"ipc\", \"uts\", \"cgroup\"]\nread = [\"given\", \"BIN\"]\nwrite = [\"out\"]\n";
        let (engine, results) = probed(keys);
        let [pid] = engine.inspectors()[..] else { panic!("{results} {:?}", engine.stop()) };
        is_confined(&engine, pid);
        inspects(&engine);
        assert_eq!(engine.stop().0, Some(0));
    });
}

/// The same for a worker of a mux, which serves its messages.
#[towpath_testenv::needs(netns, landlock, "strace")]
#[test]
fn a_worker_uses_only_what_its_sandbox_permits() {
    within(|| {
        let worker = example("mux_worker");
        let more = format!(
            "[mux.web]\nlisten = \"unix:DIR/mux.sock\"\nframing = \"offset=0 length=4 be adjust=4\"\nworkers = 1\n\
             worker = \"sh DIR/given/probe\"\n[mux.web.sandbox]\nnamespaces = [\"net\", \"ipc\", \"uts\", \"cgroup\"]\n\
             read = [\"given\", \"{}\"]\nwrite = [\"out\"]\n",
            worker
        );
        let mut engine = start(&more, 0, &worker);
        let mut stream = None;
        until(|| {
            stream = UnixStream::connect(engine.directory.path().join("mux.sock")).ok();
            stream.is_some() || engine.child.try_wait().unwrap().is_some()
        });
        let Some(mut stream) = stream else { panic!("{} {:?}", results(&engine), engine.stop()) };
        stream.write_all(b"\0\0\0\x02hi").unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut answer).unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (pid, echo) = answer.split_once(' ').unwrap();
        assert_eq!(echo, "hi");
        is_confined(&engine, pid.parse().unwrap());
        assert_eq!(engine.stop().0, Some(0));
    });
}

#[towpath_testenv::needs(netns, "strace")]
#[test]
fn a_program_without_a_sandbox_uses_everything_of_its_user() {
    within(|| {
        let (engine, results) = probed("seccomp = \"off\"\n");
        assert_eq!(engine.inspectors().len(), 1, "{results}");
        assert!(
            results.lines().count() == 7 && results.lines().all(|line| line.ends_with(" 0")),
            "{results}"
        );
        assert_eq!(engine.stop().0, Some(0));
    });
}

#[towpath_testenv::needs(netns, landlock)]
#[test]
fn a_missing_path_of_a_sandbox_is_an_error_of_the_start() {
    within(|| {
        let (engine, _) = probed("read = \"no/such\"\n");
        let (code, said) = engine.stop();
        assert_eq!(code, Some(4), "{said}");
        assert!(
            said.contains("opening `read` and `write` of the sandbox") && said.contains("no/such"),
            "{said}"
        );
    });
}

/// Reloads the engine. `applied`: the counter that grows.
fn reload(engine: &Engine, applied: bool) {
    let metrics = || String::from_utf8(engine.control().ctl("metrics").stdout).unwrap();
    let result = if applied { "applied" } else { "refused" };
    let count = || {
        let line = metrics();
        let prefix = format!("towpath_reload_reloads_total{{result=\"{result}\"}} ");
        line.lines()
            .find_map(|line| line.strip_prefix(&prefix))
            .unwrap_or_else(|| panic!("{line}"))
            .to_owned()
    };
    let before = count();
    kill_process(Pid::from_child(&engine.child), Signal::HUP).unwrap();
    until(|| count() != before);
}

#[towpath_testenv::needs(netns, landlock)]
#[test]
fn a_reload_reads_only_directories_that_were_named_at_the_start() {
    within(|| {
        let engine = Engine::start(INSPECT, 1);
        let at = |name: &str| engine.directory.path().join(name);
        let other = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(at("t.toml")).unwrap();
        // Another file in the same directory, and a file that replaces one.
        std::fs::write(at("other.ipfw"), "add allow ip from any to any\n").unwrap();
        let outside = other.path().join("r.ipfw");
        std::fs::write(&outside, "add allow ip from any to any\n").unwrap();
        std::fs::write(at("table"), "10.0.0.0/8 1\n").unwrap();
        std::fs::write(at("new.toml"), config.replace("r.ipfw", "other.ipfw")).unwrap();
        std::fs::rename(at("new.toml"), at("t.toml")).unwrap();
        reload(&engine, true);
        let outside = outside.display().to_string();
        std::fs::write(at("t.toml"), config.replace("r.ipfw", &outside)).unwrap();
        reload(&engine, false);
        // A file that the rules name is found out when it is read.
        std::fs::write(at("t.toml"), &config).unwrap();
        std::fs::write(at("r.ipfw"), "table T create type addr\ntable T load table\n").unwrap();
        reload(&engine, true);
        std::fs::write(at("r.ipfw"), format!("table T create type addr\ntable T load {outside}\n")).unwrap();
        reload(&engine, false);
        // The launcher has dropped what these need.
        std::fs::write(at("r.ipfw"), "add allow ip from any to any\n").unwrap();
        std::fs::write(at("t.toml"), format!("{config}sandbox.namespaces = \"net\"\n")).unwrap();
        reload(&engine, false);
        std::fs::write(at("t.toml"), format!("{config}[engine]\nupgrade = \"/usr/bin/towpath\"\n")).unwrap();
        reload(&engine, false);
        let (code, said) = engine.stop();
        assert_eq!(code, Some(0), "{said}");
        let refused: Vec<_> = said.lines().filter(|line| line.contains("not reloaded: ")).collect();
        let expected = [
            "r.ipfw: the sandbox permits only the directories of files",
            "Permission denied",
            "the sandbox permits only the directories of files",
            "the launcher has dropped CAP_SYS_ADMIN at the start",
            "the launcher has dropped CAP_CHOWN, CAP_SYS_RESOURCE at the start",
        ];
        assert_eq!(refused.len(), expected.len(), "{said}");
        for (line, expected) in refused.iter().zip(expected) {
            assert!(line.contains(expected), "{line}\n{expected}");
        }
    });
}

/// The name and the number of seccomp filters of each thread.
fn threads(pid: u32) -> Vec<(String, u32)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let filters = |task: std::fs::DirEntry| {
        // It may have ended.
        let text = std::fs::read_to_string(task.path().join("status")).ok()?;
        let value =
            |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
        Some((value("Name:"), value("Seccomp_filters:").parse().unwrap()))
    };
    tasks.filter_map(|task| filters(task.unwrap())).collect()
}

/// A thread that restricts its system calls restricts its files, unless it has inherited that. All threads do so, whatever starts them.
#[towpath_testenv::needs(netns, xdp, landlock)]
#[test]
fn every_thread_has_the_filter_of_its_role() {
    let more = format!(
        "{INSPECT}[mux.web]\nlisten = \"unix:DIR/web.sock\"\nframing = \"line\"\nworkers = 1\nworker = \"{0}\"\n\
         [mux.api]\nlisten = \"unix:DIR/api.sock\"\nframing = \"line\"\nworkers = 1\nthread = \"own\"\nworker = \"{0}\"\n\
         [metrics]\nlisten = \"unix:DIR/metrics.sock\"\n[events]\noutput = \"DIR/events\"\n\
         [ipfix]\ncollector = \"127.0.0.1:4739\"\n",
        example("mux_worker")
    );
    // The filters of all roles together, and those of the role.
    const PROCESS: u32 = 2;
    for driver in ["af_packet", "af_xdp"] {
        within(|| {
            let engine = Engine::start_with(&BRIDGE.replace("af_packet", driver), &more, 1, |_| {});
            let found = || threads(engine.child.id());
            let expected = ["towpath", "engine-0", "mux-api", "log", "reaper"];
            until(|| {
                let found = found();
                let names: BTreeSet<_> = found.iter().map(|(name, _)| &**name).collect();
                expected.iter().all(|name| names.contains(name))
                    && found.iter().all(|(_, filters)| *filters > PROCESS)
            });
            let (code, said) = engine.stop();
            assert_eq!(code, Some(0), "{driver}: {said}");
        });
    }
}
