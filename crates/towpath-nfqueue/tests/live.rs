//! Unmodified programs on the queues of running engines: `towpath nfq`, engines that restart, and programs that the engine starts.

#[path = "../../towpath-capi/tests/engine/mod.rs"]
mod engine;

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use towpath_port::netns::{Host, bound, ip, settled, until, veth, within};

use engine::towpath;

const CONFIG: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
[port.lan]
driver = "af_packet"
[[bridge]]
ports = ["wan", "lan"]
[control]
socket = "ctl.sock"
[queue.7]
"#;

const RULES: &str =
    "add allow layer2 mac-type arp\nadd inspect 7 udp from any to any 9\nadd allow ip from any to any\n";

/// Ends its process when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two machines, and an engine in this namespace that bridges them.
struct World {
    directory: tempfile::TempDir,
    left: Host,
    right: Host,
}

impl World {
    /// A world in which queue 7 has these keys. `DIR` stands for the directory of the configuration.
    fn new(queue: &str) -> Self {
        let (left, right) = (Host::new(), Host::new());
        veth("wan", "l0");
        veth("lan", "r0");
        left.take("l0", "10.0.0.1/24");
        right.take("r0", "10.0.0.2/24");
        ["wan", "lan"].into_iter().for_each(settled);
        let directory = tempfile::tempdir().unwrap();
        let queue = queue.replace("DIR", directory.path().to_str().unwrap());
        std::fs::write(directory.path().join("t.toml"), format!("{CONFIG}{queue}")).unwrap();
        std::fs::write(directory.path().join("r.ipfw"), RULES).unwrap();
        Self { directory, left, right }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn engine(&self) -> Process {
        let engine = towpath()
            .arg("run")
            .arg(self.path("t.toml"))
            .env("TOWPATH_NFQUEUE_LIBRARY", library())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let engine = Process(engine);
        until(|| self.ctl("show stats").is_some());
        engine
    }

    fn ctl(&self, words: &str) -> Option<serde_json::Value> {
        let output = towpath()
            .arg("ctl")
            .arg("--socket")
            .arg(self.path("ctl.sock"))
            .args(words.split(' '))
            .arg("--json")
            .output()
            .unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    /// `towpath nfq` with these arguments.
    fn nfq(&self) -> Command {
        let mut nfq = towpath();
        nfq.arg("nfq").arg("--engine").arg(self.path("ctl.sock")).args([
            "--library",
            &library(),
            "--queue",
            "0=7",
        ]);
        nfq
    }

    /// Sends 9 datagrams of one flow. Returns the last bytes of those that arrive, up to `count`.
    fn send(&self, count: usize) -> Vec<u8> {
        // The engine's thread has the program shortly after the program has attached.
        until(|| self.ctl("show queues").is_some_and(|answer| answer["queues"][0]["inspectors"] == 1));
        let server = self.right.run(|| bound(|| UdpSocket::bind("10.0.0.2:9")));
        server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let client = self.left.run(|| UdpSocket::bind("10.0.0.1:0").unwrap());
        for number in b'1'..=b'9' {
            client.send_to(&[b'-', number], "10.0.0.2:9").unwrap();
        }
        let mut received = Vec::new();
        let mut datagram = [0; 16];
        while received.len() < count {
            let length = server.recv(&mut datagram).unwrap();
            received.push(datagram[length - 1]);
        }
        received
    }
}

fn library() -> String {
    let library = std::env::current_exe().unwrap().with_file_name("libnetfilter_queue.so");
    library.to_str().unwrap().to_owned()
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filter.py")
}

fn python() -> PathBuf {
    Path::new(towpath_testenv::clients!()).join("bin/python")
}

/// A program on queue 0 gets the packets of the engine's queue 7, also after the engine was killed and started again.
#[towpath_testenv::needs(netns, "python:netfilterqueue")]
#[test]
fn a_program_outlives_engines() {
    within(|| {
        let world = World::new("socket = \"DIR/queue-7.sock\"\n");
        let engine = world.engine();
        let program =
            world.nfq().arg("--").arg(python()).arg(script()).arg("0").stdout(Stdio::piped()).spawn();
        let mut program = Process(program.unwrap());
        let mut line = String::new();
        BufReader::new(program.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "bound\n");
        // Packets 1, 4 and 7 of the program are changed, and 3, 6 and 9 are dropped.
        assert_eq!(world.send(6), *b"!2!5!8");
        drop(engine);
        let _engine = world.engine();
        assert_eq!(world.send(6), *b"!2!5!8", "the library attached again, and ids continue");
    });
}

/// The engine starts the program with the library.
#[towpath_testenv::needs(root, netns, "python:netfilterqueue")]
#[test]
fn the_engine_starts_a_program_for_nfqueue() {
    within(|| {
        // As root: other users cannot enter every directory that a checkout may be in.
        let command = format!("command = \"{} {} 0\"\n", python().display(), script().display());
        let world = World::new(&(command + "interface = \"nfqueue\"\nuser = \"root\"\n"));
        let _engine = world.engine();
        assert_eq!(world.send(6), *b"!2!5!8");
    });
}

/// One program reads several queues (`-q 7:9`), and two programs share the packets of each queue by flow.
#[towpath_testenv::needs(netns, libnetfilter_queue)]
#[test]
fn several_queues_and_several_programs() {
    const FLOWS: usize = 40;
    within(|| {
        let more = |number| format!("[queue.{number}]\nsocket = \"DIR/queue-{number}.sock\"\n");
        let world = World::new(&format!("socket = \"DIR/queue-7.sock\"\n{}{}", more(8), more(9)));
        let rule = |number| format!("add inspect {number} udp from any to any {number}\n");
        let rules: String = (7..10).map(rule).collect();
        std::fs::write(world.path("r.ipfw"), format!("add allow layer2 mac-type arp\n{rules}")).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/limits.c");
        let program = world.path("limits");
        let mut cc = Command::new("cc");
        cc.arg("-o").arg(&program).arg(source).args(["-lnetfilter_queue", "-lnfnetlink", "-lpthread"]);
        assert!(cc.status().unwrap().success());
        let _engine = world.engine();
        let mut programs = [(); 2].map(|()| {
            let mut nfq = world.nfq();
            let nfq = nfq.arg("--").arg(&program).args(["range", "7", "9"]).stderr(Stdio::piped());
            let mut process = Process(nfq.spawn().unwrap());
            let mut said = BufReader::new(process.0.stderr.take().unwrap());
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            assert_eq!(line, "ready\n");
            (process, said)
        });
        let has_two = |queue: &serde_json::Value| queue["inspectors"] == 2;
        until(|| {
            world
                .ctl("show queues")
                .is_some_and(|answer| answer["queues"].as_array().unwrap().iter().all(has_two))
        });
        let server = |port| {
            let server = world.right.run(move || UdpSocket::bind(("10.0.0.2", port)).unwrap());
            server.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            server
        };
        let servers = [7, 8, 9].map(server);
        for _ in 0..FLOWS {
            let client = world.left.run(|| UdpSocket::bind("10.0.0.1:0").unwrap());
            for port in [7, 8, 9] {
                client.send_to(b"-1", ("10.0.0.2", port)).unwrap();
            }
        }
        let mut datagram = [0; 16];
        for server in &servers {
            (0..FLOWS).for_each(|_| assert_eq!(server.recv(&mut datagram).unwrap(), 2));
        }
        let counts = programs.each_mut().map(|(process, said)| {
            let mut line = String::new();
            said.read_line(&mut line).unwrap();
            assert!(process.0.wait().unwrap().success() && line.ends_with(" wrong=0\n"), "{line}");
            line.split_once('=').unwrap().1.split(' ').next().unwrap().parse::<usize>().unwrap()
        });
        assert!(counts[0] > 0 && counts[1] > 0 && counts[0] + counts[1] == 3 * FLOWS, "{counts:?}");
    });
}

/// Each refusal says what to do.
#[towpath_testenv::needs(netns, libnetfilter_queue)]
#[test]
fn programs_that_cannot_run_are_refused() {
    within(|| {
        ip("link set lo up");
        let world = World::new("socket = \"DIR/queue-7.sock\"\n");
        let compile = |name: &str, option: &str| {
            std::fs::write(world.path("p.c"), "int main(void) { return 0; }\n").unwrap();
            let program = world.path(name);
            let status = Command::new("cc")
                .arg("-o")
                .arg(&program)
                .arg(world.path("p.c"))
                .arg(option)
                .status()
                .unwrap();
            assert!(status.success());
            program
        };
        let fixed = compile("static", "-static");
        let privileged = compile("setuid", "-O0");
        std::fs::set_permissions(&privileged, Permissions::from_mode(0o4755)).unwrap();
        let other = world.path("other");
        let mut bytes = std::fs::read(&fixed).unwrap();
        bytes[4] = 1;
        std::fs::write(&other, bytes).unwrap();
        let plain = compile("plain", "-O0");
        let run = |program: &Path| {
            let output = world.nfq().arg("--").arg(program).output().unwrap();
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        for (program, hint) in [
            (&*fixed, "use a dynamically linked build"),
            (&privileged, "start a copy of it without them"),
            (&other, "use a build for this one"),
            (Path::new("no-such-program"), "not in PATH"),
        ] {
            let (code, said) = run(program);
            assert!(code == Some(4) && said.contains(hint), "{said}");
        }
        // The installed library, at its place below the prefix of the program.
        let install = Path::new(env!("CARGO_MANIFEST_DIR")).join("install");
        let built = Path::new(&library()).parent().unwrap().to_owned();
        let status = Command::new(install).arg(world.path("prefix")).arg(built).status().unwrap();
        assert!(status.success() && world.path("prefix/lib/towpath/libnetfilter_queue.so.1").is_file());
        // Without an engine, and on an engine without this queue.
        let (code, said) = run(&plain);
        assert!(code == Some(5) && said.contains("no engine is there"), "{said}");
        let _engine = world.engine();
        let (code, said) = run(&plain);
        assert!(code == Some(0) && said.contains("not linked to libnetfilter_queue.so.1"), "{said}");
        let output = world.nfq().args(["--queue", "1=8", "--"]).arg(&plain).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(5) && said.contains("no queue 8 with a socket"), "{said}");
    });
}
