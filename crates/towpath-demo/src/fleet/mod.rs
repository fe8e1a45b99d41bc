//! `towpath demo fleet`: two gates share their states, one of them is killed, and connections continue through the other one.
//!
//! ```text
//!               10.77.1.1  l1 ═ wan1  gate a  lan1 ═ r1  10.77.1.2
//! client ─────┤                                              ├───── server
//! 10.77.100.N   10.77.2.1  l2 ═ wan2  gate b  lan2 ═ r2  10.77.2.2  10.77.0.2
//! ```
//!
//! Both machines have a route with two next hops (ECMP), and the kernel selects one by a hash of both addresses, which is the same for both
//! directions. The client has many addresses, so that about half of the connections pass each gate. (A hash of ports would take that of
//! the sender's socket over veth, which differs between the directions.) Both gates and nats-server(1) are in one namespace.

mod connections;

use std::fmt;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;

use self::connections::Exchange;
use super::digits::thousands;
use super::files::Files;
use super::netns_host::{NetnsHost, system_program};
use super::process::{PATIENCE, Process, ctl};
use super::{Failure, Stop, director, doing, say};

/// Addresses of the client.
const CLIENTS: &str = "10.77.100.0/24";
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const PORT: u16 = 7;

/// Only the first packet of a connection makes a state; all others need one.
const RULES: &str = "\
# Written by `towpath demo fleet` for one run; the client is at wan, the server at lan.
add 100 allow layer2 mac-type arp
add 200 check-state
add 300 allow tcp from any to any setup recv wan keep-state
";

/// Time of traffic before the gate is killed, and for connections to continue afterwards.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(20);

/// Kill one of two gates under TCP connections: they continue through the other one
///
/// A client and a server with two paths between them, on each an engine with `[fleet]`, and nats-server, all in network namespaces. The
/// routes spread the connections over both gates (ECMP). One gate gets SIGKILL, and the routes lead to the other one. The result lists the
/// connections that continued, and how long they waited.
///
/// Needs nats-server, and a towpath that was built with the feature `fleet`. Exit code: 0 if every connection continued, 1 otherwise.
#[derive(Debug, Parser)]
pub(crate) struct Fleet {
    /// Number of TCP connections, 1 to 10,000
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,

    /// Print progress as lines; the default without a terminal
    #[arg(long)]
    plain: bool,

    /// Print the results as one JSON object
    #[arg(long)]
    json: bool,
}

/// The results.
#[derive(Debug, Serialize)]
struct Results {
    connections: usize,
    /// Through each gate, before one was killed.
    through: [u64; 2],
    /// From the signal until the routes of both machines led to the other gate.
    routes_ms: f64,
    continued: usize,
    lost: usize,
    /// Waits for an answer since then: the middle one, the 99% quantile, and the longest.
    median_ms: f64,
    p99_ms: f64,
    longest_ms: f64,
}

impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |n: usize| thousands(n as u64);
        let [a, b] = self.through.map(thousands);
        writeln!(f, "{} TCP connections: {a} through gate a, {b} through gate b", number(self.connections))?;
        writeln!(f, "gate a killed; {:.0} ms later, all routes led through gate b", self.routes_ms)?;
        writeln!(f, "continued  {}", number(self.continued))?;
        writeln!(f, "lost       {}", number(self.lost))?;
        writeln!(
            f,
            "waited     {:.1} ms (median), {:.1} ms (99%), {:.1} ms (longest)",
            self.median_ms, self.p99_ms, self.longest_ms
        )
    }
}

impl Fleet {
    /// Plays the demo. Returns the text for standard output, and whether every connection continued.
    ///
    /// Must be called while the process has one thread: it may enter a user namespace.
    pub(crate) fn play(&self) -> Result<(String, bool), Failure> {
        let nats = system_program("nats-server").ok_or_else(|| {
            Failure::Missing("there is no program nats-server (install the package nats-server)".into())
        })?;
        director::descriptors(u64::from(self.connections) * 2 + 256)?;
        director::enter()?;
        let stop = Stop::on_signals()?;
        let played = Stage::set(self, &stop, nats).and_then(Stage::play);
        let results = played.map_err(|failure| stop.explain(failure))?;
        let text = match self.json {
            true => serde_json::to_string(&results).expect("numbers serialise") + "\n",
            false => results.to_string(),
        };
        Ok((text, results.lost == 0))
    }
}

/// The machines and programs.
struct Stage<'a> {
    args: &'a Fleet,
    stop: &'a Stop,
    gates: [Process; 2],
    outside: NetnsHost,
    inside: NetnsHost,
    _nats: Process,
    _middle: NetnsHost,
    files: Files,
}

impl<'a> Stage<'a> {
    fn set(args: &'a Fleet, stop: &'a Stop, nats: PathBuf) -> Result<Self, Failure> {
        if system_program("ip").is_none() {
            return Err(Failure::Missing("there is no program ip (install iproute2)".into()));
        }
        let files = Files::new()?;
        let [outside, inside, middle] = [NetnsHost::new()?, NetnsHost::new()?, NetnsHost::new()?];
        for number in [1, 2] {
            middle.ip(format!(
                "link add wan{number} type veth peer name l{number} netns {}\n\
                 link add lan{number} type veth peer name r{number} netns {}\n\
                 link set wan{number} up\nlink set lan{number} up\n",
                outside.tid(),
                inside.tid(),
            ))?;
        }
        let addresses: String =
            connections::clients().map(|address| format!("addr add {address}/32 dev lo\n")).collect();
        let ends = [
            (&outside, addresses, 'l', 1, format!("{SERVER}/32")),
            (&inside, format!("addr add {SERVER}/32 dev lo\n"), 'r', 2, CLIENTS.to_owned()),
        ];
        for (host, own, device, at, other) in ends {
            let there = 3 - at;
            host.ip(format!(
                "{own}\
                 addr add 10.77.1.{at}/24 dev {device}1\naddr add 10.77.2.{at}/24 dev {device}2\n\
                 link set {device}1 up\nlink set {device}2 up\n\
                 route add {other} nexthop via 10.77.1.{there} dev {device}1 nexthop via 10.77.2.{there} dev {device}2\n"
            ))?;
        }
        let write =
            |name: &str, text: &str| std::fs::write(files.path().join(name), text).map_err(doing(name));
        write("fleet.ipfw", RULES)?;
        let store = files.path().join("nats");
        write("nats.conf", &format!("listen: \"127.0.0.1:4222\"\njetstream {{ store_dir: {store:?} }}\n"))?;
        let mut server =
            Process::start_program(&middle, files.path(), "nats-server", &nats, &["--config", "nats.conf"])?;
        server.wait_until(stop, |server| server.said().contains("Server is ready"))?;
        let gate = |name: &'static str, number: u8| {
            write(&format!("{name}.toml"), &configuration(name, number))?;
            Process::start(&middle, files.path(), name, &["run", &format!("{name}.toml")])
        };
        let gates = [gate("a", 1)?, gate("b", 2)?];
        let mut stage = Self { args, stop, gates, outside, inside, _nats: server, _middle: middle, files };
        for at in [0, 1] {
            let socket = stage.socket(at);
            stage.gates[at].wait_until(stop, |_| {
                let fleet = fleet(&socket);
                fleet["in_step"] == true && fleet["peers"].as_array().is_some_and(|peers| peers.len() == 1)
            })?;
        }
        stage.tell("gates a and b are in step");
        Ok(stage)
    }

    fn play(self) -> Result<Results, Failure> {
        let connections = self.args.connections as usize;
        let server =
            self.inside.run(move || connections::listen(SERVER, PORT)).map_err(doing("the server"))?;
        let echo = Exchange::default();
        let _server = self.inside.start({
            let echo = echo.clone();
            move || connections::echo(&server, connections, &echo)
        });
        let exchange = Exchange::default();
        let client = self.outside.start({
            let exchange = exchange.clone();
            move || connections::client(SocketAddrV4::new(SERVER, PORT), connections, &exchange)
        });
        // A state of the other gate for each connection.
        let sockets = [self.socket(0), self.socket(1)];
        let created = || [1, 0].map(|at| fleet(&sockets[at])["stats"]["created"].as_u64().unwrap_or(0));
        let all = |client: &std::thread::JoinHandle<_>| {
            self.stop.until(PATIENCE, || {
                Ok(client.is_finished() || created().iter().sum::<u64>() >= connections as u64)
            })
        };
        if !all(&client)? {
            return Err(Failure::Broken(format!(
                "{} of {} connections have a state at both gates",
                created().iter().sum::<u64>(),
                thousands(connections as u64)
            )));
        }
        let through = created();
        let [a, b] = through.map(thousands);
        self.tell(&format!(
            "{} connections: {a} through gate a, {b} through gate b",
            thousands(connections as u64)
        ));
        self.stop.pause(BEFORE)?;
        self.tell("gate a: SIGKILL");
        let killed = Instant::now();
        self.gates[0].signal(Signal::KILL);
        self.outside.ip(format!("route replace {SERVER}/32 via 10.77.2.2 dev l2\n"))?;
        self.inside.ip(format!("route replace {CLIENTS} via 10.77.2.1 dev r2\n"))?;
        exchange.change();
        let routes = killed.elapsed();
        self.tell(&format!("all routes lead through gate b, {:.0} ms later", routes.as_secs_f64() * 1e3));
        let begun = Instant::now();
        self.stop.until(AFTER, || {
            self.progress(exchange.answered(), begun);
            Ok(client.is_finished() || exchange.answered() == connections)
        })?;
        exchange.end();
        echo.end();
        let waits = client.join().map_err(|_| Failure::Broken("the client panicked".into()))?;
        let mut waits = waits.map_err(doing("the client"))?;
        waits.sort();
        let ms = |share: f64| {
            let at = (waits.len().saturating_sub(1) as f64 * share) as usize;
            waits.get(at).map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
        };
        let continued = waits.len();
        self.tell(&format!("{} connections continued", thousands(continued as u64)));
        Ok(Results {
            connections,
            through,
            routes_ms: routes.as_secs_f64() * 1e3,
            continued,
            lost: connections - continued,
            median_ms: ms(0.5),
            p99_ms: ms(0.99),
            longest_ms: ms(1.0),
        })
    }

    fn socket(&self, at: usize) -> PathBuf {
        self.files.path().join(format!("{}.sock", ["a", "b"][at]))
    }

    /// A line of progress.
    fn tell(&self, text: &str) {
        let clear = if self.is_live() { "\r\x1b[K" } else { "" };
        say(format_args!("{clear}{text}"));
    }

    /// The number of connections that continue, in one line that changes.
    fn progress(&self, answered: usize, begun: Instant) {
        if !self.is_live() {
            return;
        }
        let all = self.args.connections as usize;
        let mut line = String::from("\r\x1b[K");
        let full = answered * 40 / all;
        let _ = write!(
            line,
            "{}{} {} of {} connections continue, {:.1} s",
            "█".repeat(full),
            "░".repeat(40 - full),
            thousands(answered as u64),
            thousands(all as u64),
            begun.elapsed().as_secs_f64()
        );
        // A closed standard error is not an error of the demo.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn is_live(&self) -> bool {
        !self.args.plain && std::io::stderr().is_terminal()
    }
}

/// What `towpath ctl show fleet` shows; null without an answer.
fn fleet(socket: &std::path::Path) -> Value {
    ctl(socket, "show fleet").map_or(Value::Null, |mut answer| answer["fleet"].take())
}

fn configuration(name: &str, number: u8) -> String {
    format!(
        "# Written by `towpath demo fleet` for one run.\nrules = \"fleet.ipfw\"\n\n\
         [port.wan]\ndriver = \"af_packet\"\ninterface = \"wan{number}\"\n\n\
         [port.lan]\ndriver = \"af_packet\"\ninterface = \"lan{number}\"\n\n\
         [[bridge]]\nports = [\"wan\", \"lan\"]\n\n[control]\nsocket = \"{name}.sock\"\n\n\
         [fleet]\nservers = \"nats://127.0.0.1:4222\"\ngroup = \"demo\"\ngate = \"{name}\"\n"
    )
}
