//! A group of two gates with nats-server: a gate that is killed, a server that restarts, is away or does not read, and one that refuses
//! a gate.

mod copies;
mod credentials;
mod group;
mod remote_workers;
mod slow;
mod snapshots;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath_fleet::Output;
use towpath_fleet::nats::{Bus, BusConfig, Incoming, ServerConfig};
use towpath_port::netns::{Host, ip, settled, veth, within};

use crate::live::machines::*;
use crate::support::{Log, until};

/// Only the first packet of a connection makes a state. All other packets need one.
const RULES: &str = "add 100 allow layer2 mac-type arp\nadd 200 check-state\n\
                     add 300 allow tcp from any to any setup recv wan keep-state\n";

/// The same rules under other numbers.
const RENUMBERED: &str = "add 10 allow layer2 mac-type arp\nadd 20 check-state\n\
                          add 30 allow tcp from any to any setup recv wan keep-state\n";

/// The permissions of the guide: a gate publishes under its name only. The user `c` may publish everything, but is no gate.
const SERVER: &str = r#"
listen: "127.0.0.1:4222"
jetstream { store_dir: "DIRECTORY" }
authorization {
  users = [
    { user: a, password: one, permissions: {
      publish: ["towpath.edge.states.a", "towpath.edge.sync.*.a", "towpath.edge.bulk.*.a",
                "towpath.edge.config.a", "$KV.towpath-edge.current", "towpath.edge.table.*.a",
                "$JS.API.STREAM.INFO.KV_towpath-edge", "$JS.API.STREAM.CREATE.KV_towpath-edge",
                "$JS.API.CONSUMER.CREATE.KV_towpath-edge", "$JS.API.CONSUMER.MSG.NEXT.KV_towpath-edge.*",
                "$JS.API.STREAM.INFO.towpath-edge-tables", "$JS.API.STREAM.CREATE.towpath-edge-tables",
                "$JS.API.CONSUMER.CREATE.towpath-edge-tables", "$JS.API.CONSUMER.MSG.NEXT.towpath-edge-tables.*",
                "$JS.API.STREAM.PURGE.towpath-edge-tables",
                "$JS.API.STREAM.INFO.towpath-edge", "$JS.API.STREAM.CREATE.towpath-edge",
                "$JS.API.CONSUMER.CREATE.towpath-edge", "$JS.API.CONSUMER.MSG.NEXT.towpath-edge.*"]
      subscribe: ["towpath.edge.states.*", "towpath.edge.sync.a.*", "towpath.edge.bulk.a.*", "towpath.edge.config.*", "_INBOX.>"] } }
    { user: b, password: two, permissions: {
      publish: ["towpath.edge.states.b", "towpath.edge.sync.*.b", "towpath.edge.bulk.*.b",
                "towpath.edge.config.b", "$KV.towpath-edge.current", "towpath.edge.table.*.b",
                "$JS.API.STREAM.INFO.KV_towpath-edge", "$JS.API.STREAM.CREATE.KV_towpath-edge",
                "$JS.API.CONSUMER.CREATE.KV_towpath-edge", "$JS.API.CONSUMER.MSG.NEXT.KV_towpath-edge.*",
                "$JS.API.STREAM.INFO.towpath-edge-tables", "$JS.API.STREAM.CREATE.towpath-edge-tables",
                "$JS.API.CONSUMER.CREATE.towpath-edge-tables", "$JS.API.CONSUMER.MSG.NEXT.towpath-edge-tables.*",
                "$JS.API.STREAM.PURGE.towpath-edge-tables",
                "$JS.API.STREAM.INFO.towpath-edge", "$JS.API.STREAM.CREATE.towpath-edge",
                "$JS.API.CONSUMER.CREATE.towpath-edge", "$JS.API.CONSUMER.MSG.NEXT.towpath-edge.*"]
      subscribe: ["towpath.edge.states.*", "towpath.edge.sync.b.*", "towpath.edge.bulk.b.*", "towpath.edge.config.*", "_INBOX.>"] } }
    { user: c, password: three }
  ]
}
"#;

/// The permissions of a gate in [`SERVER`].
fn permissions(gate: &str) -> String {
    let (_, user) = SERVER.split_once(&format!("user: {gate},")).unwrap();
    let (_, permissions) = user.split_once("permissions: ").unwrap();
    permissions.split_once("} }").unwrap().0.to_owned() + "}"
}

/// nats-server(1) in this thread's namespace. Ends when it is dropped.
struct Server(Child, #[expect(dead_code, reason = "`until` shows it")] Log);

impl Server {
    fn start(directory: &Path) -> Self {
        Self::with(directory, &SERVER.replace("DIRECTORY", directory.to_str().unwrap()))
    }

    fn with(directory: &Path, config: &str) -> Self {
        let file = directory.join("nats.conf");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new("nats-server");
        command.arg("--config").arg(file).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = Log::of(&mut child);
        let server = Self(child, log);
        until(|| TcpStream::connect("127.0.0.1:4222").is_ok());
        server
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a test in a namespace with two machines, between which the gates are, a directory, and a server that keeps its data there.
fn with_server(test: impl FnOnce(&(Host, Host), &Path, Server) + Send) {
    within(|| {
        let paths = two_paths();
        let directory = tempfile::tempdir().unwrap();
        test(&paths, directory.path(), Server::start(directory.path()));
    });
}

/// The configuration of a gate between the interfaces `wanN` and `lanN`.
fn gate(name: &str, password: &str, number: u8) -> String {
    format!(
        "rules = \"r.ipfw\"\n[port.wan]\ndriver = \"af_packet\"\ninterface = \"wan{number}\"\n\
         [port.lan]\ndriver = \"af_packet\"\ninterface = \"lan{number}\"\n[[bridge]]\nports = [\"wan\", \"lan\"]\n\
         [control]\nsocket = \"ctl.sock\"\n\
         [fleet]\nservers = \"nats://{name}:{password}@127.0.0.1:4222\"\ngroup = \"edge\"\ngate = \"{name}\"\n"
    )
}

fn fleet(engine: &Engine) -> Value {
    engine.json("show fleet --json")["fleet"].take()
}

/// Waits until the gate is in step with this many peers.
fn in_step(engine: &Engine, peers: usize) {
    until(|| {
        let fleet = fleet(engine);
        fleet["in_step"] == true && fleet["peers"].as_array().unwrap().len() == peers
    });
}

fn stat(engine: &Engine, name: &str) -> u64 {
    fleet(engine)["stats"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {}", fleet(engine)))
}

/// Two machines with two paths between them.
fn two_paths() -> (Host, Host) {
    let (left, right) = (Host::new(), Host::new());
    for (number, net) in [(1, "10.0.0"), (2, "10.0.1")] {
        veth(&format!("wan{number}"), &format!("l{number}"));
        veth(&format!("lan{number}"), &format!("r{number}"));
        left.take(&format!("l{number}"), &format!("{net}.1/24"));
        right.take(&format!("r{number}"), &format!("{net}.2/24"));
        [format!("wan{number}"), format!("lan{number}")].iter().for_each(|interface| settled(interface));
    }
    (left, right)
}

/// One word in each direction. Returns false if a word does not arrive.
fn exchange(ends: &mut [TcpStream; 2]) -> bool {
    for (from, to) in [(0, 1), (1, 0)] {
        ends[from].write_all(b"towpath").unwrap();
        let mut word = [0; 7];
        match ends[to].read_exact(&mut word) {
            Ok(()) => assert_eq!(&word, b"towpath"),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
                return false;
            }
        }
    }
    true
}

fn connection(left: &Host, right: &Host, port: u16) -> [TcpStream; 2] {
    let listener = right.run(move || TcpListener::bind((RIGHT, port)).unwrap());
    let client = left.run(move || TcpStream::connect((RIGHT, port)).unwrap());
    let ends = [client, listener.accept().unwrap().0];
    ends.iter().for_each(|end| end.set_read_timeout(Some(Duration::from_secs(60))).unwrap());
    ends
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_connection_continues_through_the_other_gate() {
    with_server(|(left, right), _, _server| {
        let first = files(&gate("a", "one", 1), RULES);
        let second = files(&gate("b", "two", 2), RENUMBERED);
        let (mut one, two) = (Engine::start(first.path()), Engine::start(second.path()));
        in_step(&one, 1);
        in_step(&two, 1);
        assert_eq!(fleet(&two)["peers"][0]["same_rules"], true);
        // The server permits all that a gate does.
        assert!(fleet(&one)["warning"].is_null() && fleet(&two)["warning"].is_null(), "{}", fleet(&one));
        let mut ends = connection(left, right, 7);
        assert!(exchange(&mut ends));
        until(|| stat(&two, "created") == 1);
        one.signal(Signal::KILL);
        one.child.wait().unwrap();
        left.run(|| ip(&format!("route replace {RIGHT}/32 dev l2 src {LEFT}")));
        right.run(|| ip(&format!("route replace {LEFT}/32 dev r2 src {RIGHT}")));
        assert!(exchange(&mut ends), "{}", fleet(&two));
        // Its rule there is the one of the same content.
        let states = two.json("show states --json");
        assert_eq!(states["states"][0]["rule"], 30, "{states}");
        // The killed gate joins again and takes a snapshot.
        let one = Engine::start(first.path());
        in_step(&one, 1);
        assert_eq!((stat(&one, "snapshots"), stat(&one, "created")), (1, 1), "{}", fleet(&one));
        let text = String::from_utf8(two.ctl("show fleet").stdout).unwrap();
        assert!(text.starts_with("gate b of group edge: in step, with a\n"), "{text}");
        let metrics = String::from_utf8(two.ctl("metrics").stdout).unwrap();
        assert!(metrics.contains("towpath_fleet_in_step{} 1\n"), "{metrics}");
        one.stop();
        two.stop();
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn gates_continue_while_the_server_is_away_and_catch_up() {
    within(|| {
        let (left, right) = two_paths();
        let directory = tempfile::tempdir().unwrap();
        let first = files(&gate("a", "one", 1), RULES);
        let second = files(&gate("b", "two", 2), RULES);
        let (one, two) = (Engine::start(first.path()), Engine::start(second.path()));
        // Without a server.
        let mut before = connection(&left, &right, 7);
        assert!(exchange(&mut before));
        until(|| {
            fleet(&one)["error"]
                .as_str()
                .is_some_and(|error| error.contains("cannot connect to nats://127.0.0.1:4222"))
        });
        let server = Server::start(directory.path());
        in_step(&one, 1);
        in_step(&two, 1);
        until(|| stat(&two, "created") == 1);
        drop(server);
        until(|| fleet(&one)["server"].is_null() && fleet(&two)["server"].is_null());
        let mut meanwhile = connection(&left, &right, 8);
        assert!(exchange(&mut before) && exchange(&mut meanwhile));
        // A server that has restarted has no stream: a snapshot fills the gap.
        let _server = Server::start(directory.path());
        until(|| stat(&two, "created") == 2);
        in_step(&one, 1);
        in_step(&two, 1);
        one.stop();
        let said = two.stop();
        assert!(said.contains("the engine continues with the states that it has"), "{said}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_gate_that_the_server_refuses_says_so() {
    with_server(|_, _, _server| {
        let files = files(&gate("a", "wrong", 1), RULES);
        let engine = Engine::start(files.path());
        until(|| {
            fleet(&engine)["error"].as_str().is_some_and(|error| error.contains("authorization violation"))
        });
        let text = String::from_utf8(engine.ctl("show fleet").stdout).unwrap();
        assert!(text.contains("check `credentials` and the users of the server"), "{text}");
        let said = engine.stop();
        assert!(said.contains("the server refuses this client") && !said.contains("wrong"), "{said}");
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_gate_cannot_send_under_the_name_of_another() {
    with_server(|_, _, _server| {
        // The user `b` in the place of `a`.
        let config = gate("b", "two", 1).replace("gate = \"b\"", "gate = \"a\"");
        let files = files(&config, RULES);
        let engine = Engine::start(files.path());
        until(|| {
            let fleet = fleet(&engine);
            ["warning", "error"]
                .iter()
                .any(|name| fleet[name].as_str().is_some_and(|text| text.contains("Permissions Violation")))
        });
        engine.stop();
    });
}

/// The next messages of gate `b` to a client. Fails if the server refuses anything.
fn batches(bus: &Bus, number: usize) -> Vec<Vec<u8>> {
    let mut batches = Vec::new();
    until(|| {
        match bus.receive(Duration::from_millis(10)) {
            Some(Incoming::Message { from, bytes, .. }) if from == "b" => batches.push(bytes),
            Some(Incoming::Warning(text)) => panic!("{text}"),
            Some(Incoming::Away(error)) => panic!("{error}"),
            _ => {}
        }
        batches.len() >= number
    });
    batches
}

/// A client that is connected, and the last warning. Messages that came meanwhile are dropped.
fn client(gate: &str, password: &str) -> (Bus, Option<String>) {
    let servers = vec![format!("nats://{gate}:{password}@127.0.0.1:4222")];
    let server = ServerConfig { servers, ..ServerConfig::default() };
    let config = BusConfig { server, group: "edge".to_owned(), gate: gate.to_owned() };
    let bus = Bus::start(config, || ()).unwrap();
    let mut warning = None;
    until(|| match bus.receive(Duration::from_millis(10)) {
        Some(Incoming::Connected(_)) => true,
        Some(Incoming::Warning(text)) => {
            warning = Some(text);
            false
        }
        _ => false,
    });
    (bus, warning)
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn the_permissions_of_the_guide_allow_a_replay() {
    with_server(|_, _, _server| {
        let ((one, refused), (two, _)) = (client("a", "one"), client("b", "two"));
        assert_eq!(refused, None);
        let sent: Vec<_> = (0..100_u8).map(|number| vec![number]).collect();
        for bytes in &sent {
            two.send(Output::Batch { bytes: bytes.clone(), states: 1 }).unwrap();
        }
        assert_eq!(batches(&one, 100), sent);
        one.send(Output::Replay { peer: "b".to_owned() }).unwrap();
        assert_eq!(batches(&one, 100), sent);
    });
}

/// The guide shows the permissions that the tests have.
#[test]
fn the_guide_has_these_permissions() {
    let guide = include_str!("../../../../docs/book/src/guides/fleet.md");
    let permissions = SERVER
        .lines()
        .filter(|line| line.contains("publish") || line.contains("subscribe") || line.contains("$JS"));
    let missing: Vec<_> = permissions.filter(|line| !guide.contains(line)).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}
