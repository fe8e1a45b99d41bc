//! Muxes of `towpath run` with workers on other machines.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use towpath_port::netns::within;

use super::Server;
use crate::live::machines::{Engine, files};
use crate::support::until;

/// The permissions of the guide, for the fronts `a-web` and `a-far`.
const SERVER: &str = r#"
listen: "127.0.0.1:4222"
authorization {
  users = [
    { user: a, password: one, permissions: {
      publish: ["jobs.host.*.a-web", "jobs.host.*.a-far"]
      subscribe: ["jobs.offer.*", "jobs.front.a-web.*", "jobs.front.a-far.*"] } }
    { user: h1, password: two, permissions: {
      publish: ["jobs.offer.h1", "jobs.front.*.h1"]
      subscribe: ["jobs.host.h1.*"] } }
  ]
}
"#;

/// A mux with a local worker on a thread of its own, and one without on an engine thread.
const CONFIG: &str = "\
rules = \"r.ipfw\"
[mux.web]
listen = \"127.0.0.1:7007\"
framing = \"offset=0 length=4 be adjust=4\"
worker = \"WORKER\"
workers = 1
remote = \"jobs\"
[mux.far]
listen = \"127.0.0.1:7008\"
framing = \"offset=0 length=4 be adjust=4\"
thread = 0
remote = \"jobs\"
remote-workers = 1
[control]
socket = \"ctl.sock\"
[fleet]
servers = \"nats://a:one@127.0.0.1:4222\"
gate = \"a\"
";

/// `towpath worker` with one process for each front. Ends when it is dropped.
struct WorkerHost(Child);

impl WorkerHost {
    fn start(worker: &str) -> Self {
        let server = ["--nats", "nats://h1:two@127.0.0.1:4222", "--nats-name", "h1"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
        command.args(["worker", "--subject", "jobs", "--workers", "1", "--exec", worker]).args(server);
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for WorkerHost {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn send(stream: &mut TcpStream, body: &[u8]) {
    stream.write_all(&[&(body.len() as u32).to_be_bytes(), body].concat()).unwrap();
}

/// The next answer: the parent of the process that gave it, and the message.
fn answer(stream: &mut TcpStream) -> (u32, Vec<u8>) {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    stream.read_exact(&mut answer).unwrap();
    let space = answer.iter().position(|byte| *byte == b' ').unwrap();
    let pid: u32 = std::str::from_utf8(&answer[..space]).unwrap().parse().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    (parent.and_then(|parent| parent.trim().parse().ok()).unwrap_or(0), answer.split_off(space + 1))
}

fn ask(stream: &mut TcpStream, body: &[u8]) -> (u32, Vec<u8>) {
    send(stream, body);
    answer(stream)
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_mux_of_an_engine_has_workers_on_other_machines() {
    within(|| {
        let worker = Path::new(env!("CARGO_BIN_EXE_towpath")).with_file_name("examples").join("mux_worker");
        let worker = worker.to_str().unwrap();
        let files = files(&CONFIG.replace("WORKER", worker), "add 100 allow tcp from any to any\n");
        let directory = tempfile::tempdir().unwrap();
        // Without a server, the local worker serves, and messages of the other mux wait.
        let engine = Engine::start(files.path());
        let (mut web, mut far) = (connect(7007), connect(7008));
        let (local, echo) = ask(&mut web, b"one");
        assert_eq!(echo, b"one");
        send(&mut far, b"early");
        let host = WorkerHost::start(worker);
        for _ in 0..2 {
            let server = Server::with(directory.path(), SERVER);
            assert_eq!(answer(&mut far), (host.0.id(), b"early".to_vec()));
            until(|| {
                let host = &engine.json("show mux --json")["mux"]["remote"]["hosts"][0];
                let number = |name: &str| host[name].as_u64();
                host["name"] == "h1" && number("used") == Some(1) && number("in_flight") == Some(0)
            });
            // While the local worker is busy, the remote one gets the messages, also long ones.
            let gate = TcpListener::bind("127.0.0.1:0").unwrap();
            send(&mut web, format!("wait {}", gate.local_addr().unwrap()).as_bytes());
            let held = gate.accept().unwrap();
            let (mut other, long) = (connect(7007), vec![b'y'; 3_000_000]);
            assert_eq!(ask(&mut other, &long), (host.0.id(), long));
            drop(held);
            assert_eq!(answer(&mut web).0, local);
            // Without the server, as at the beginning.
            drop(server);
            until(|| engine.json("show rings --json")["rings"].as_array().map(Vec::len) == Some(1));
            assert_eq!(ask(&mut web, b"two"), (local, b"two".to_vec()));
            until(|| {
                let remote = engine.json("show mux --json")["mux"]["remote"].take();
                remote["server"].is_null() && remote["error"].is_string()
            });
            send(&mut far, b"early");
        }
        let _server = Server::with(directory.path(), SERVER);
        assert_eq!(answer(&mut far).0, host.0.id());
        let said = engine.stop();
        let lines = |what: &str| said.lines().filter(|line| line.contains(what)).count();
        // At most once for each mux and each time, though both try again every second.
        let away = lines("remote workers at `jobs`: cannot connect to nats://127.0.0.1:4222");
        assert!((2..=6).contains(&away), "{said}");
        assert!(!said.contains("one@") && !said.contains("Violation"), "{said}");
    });
}
