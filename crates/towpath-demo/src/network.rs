//! The hosts, their links, the engine, and the kernel's forwarding path for comparison.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::files::Files;
use super::netns_host::{NetnsHost, system_program};
use super::process::{Process, ctl};
use super::{Driver, Failure, Stop, doing};

/// The clients, on the outside.
pub(super) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// A source that exceeds its connection limit.
pub(super) const GREEDY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
/// The port scanner.
pub(super) const SCANNER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 66);
/// The servers, through the engine.
pub(super) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The same host, through the kernel.
pub(super) const KERNEL_SERVER: Ipv4Addr = Ipv4Addr::new(10, 78, 2, 2);
/// Ethernet address of the server's interface on the engine's side.
pub(super) const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

pub(super) const WEB: u16 = 80;
pub(super) const NAMES: u16 = 53;
pub(super) const LOGS: u16 = 514;
pub(super) const MESSAGES: u16 = 7007;
pub(super) const FILES: u16 = 9000;
/// Ports of the sinks and the echo server of the comparison.
pub(super) const STREAM: u16 = 9100;
pub(super) const DATAGRAMS: u16 = 9101;
pub(super) const INSPECTED: u16 = 9102;
pub(super) const ECHO: u16 = 9103;

/// Connection limits: for one client, and for all other addresses together.
pub(super) const LIMIT: u64 = 8;
pub(super) const OTHERS_LIMIT: u64 = 50;

/// Lifetime of the state of an unanswered SYN, in seconds.
pub(super) const SYN_LIFETIME: u64 = 5;

/// Numbers of the rules, by their role.
pub(super) mod rule {
    /// Counts all connection attempts of clients; the limit; attempts within the limit.
    pub(crate) const ATTEMPTS: u64 = 490;
    pub(crate) const LIMIT: u64 = 500;
    pub(crate) const ADMITTED: u64 = 510;
    /// The same for other addresses, which share one limit.
    pub(crate) const FLOOD_ATTEMPTS: u64 = 590;
    pub(crate) const FLOOD_LIMIT: u64 = 600;
    pub(crate) const FLOOD_ADMITTED: u64 = 610;
    /// Packets for the inspector.
    pub(crate) const INSPECT: u64 = 400;
    /// Ports without a server.
    pub(crate) const SCAN: u64 = 800;
    /// Everything else, and the default rule.
    pub(crate) const ELSE: u64 = 900;
    pub(crate) const DEFAULT: u64 = 65_535;
    /// TCP segments without a connection.
    pub(crate) const STRAY: u64 = 300;
}

/// The numbers of the rules that the demo reports on.
pub const REPORTED_RULES: [u64; 10] = [
    rule::ATTEMPTS,
    rule::LIMIT,
    rule::ADMITTED,
    rule::FLOOD_ATTEMPTS,
    rule::FLOOD_LIMIT,
    rule::FLOOD_ADMITTED,
    rule::SCAN,
    rule::STRAY,
    rule::INSPECT,
    rule::ELSE,
];

/// The demo's rule file, `demo.ipfw`.
pub const RULES: &str = "\
# The rules of `towpath demo`. Written for one run; outside is wan, inside is lan.
add 100 allow layer2 mac-type arp
add 200 check-state
add 300 deny tcp from any to any established // belongs to no connection
add 400 inspect 1 udp from any to 10.77.0.2 514,9102 recv wan // lines for the inspector

# Clients: 8 connections for each address. A packet over the limit is dropped there; others continue below.
add 490 count tcp from 10.77.0.0/24 to 10.77.0.2 80 setup recv wan // SYNs of clients
add 500 allow tcp from 10.77.0.0/24 to 10.77.0.2 80 setup recv wan set-limit src-addr 8 defer-action // a source over its limit
add 510 allow tcp from 10.77.0.0/24 to 10.77.0.2 80 setup recv wan // admitted

# Other addresses: 50 connections for all of them together.
add 590 count tcp from any to 10.77.0.2 80 setup recv wan // SYNs of other addresses
add 600 allow tcp from any to 10.77.0.2 80 setup recv wan set-limit dst-addr 50 defer-action // SYN flood
add 610 allow tcp from any to 10.77.0.2 80 setup recv wan // admitted

add 700 allow udp from 10.77.0.0/24 to 10.77.0.2 53,9101 recv wan keep-state
add 710 allow tcp from 10.77.0.0/24 to 10.77.0.2 7007,9000,9100,9103 setup recv wan keep-state
add 800 deny tcp from any to 10.77.0.2 setup recv wan // port scan
add 900 deny ip from any to any // everything else
";

const CONFIG: &str = r#"# Written by `towpath demo` for one run.
rules = "demo.ipfw"

[port.wan]
DRIVER

[port.lan]
DRIVER

[[bridge]]
ports = ["wan", "lan"]

[queue.1]
command = "towpath inspect --queue 1 --match 'PATTERN' --verdict drop"
overload = "block"
deadline = 60

[settings]
dyn_syn_lifetime = SYN_LIFETIME

[control]
socket = "engine.sock"
"#;

/// The network of the demo.
#[derive(Debug)]
pub(super) struct Network {
    pub(super) outside: NetnsHost,
    pub(super) inside: NetnsHost,
    pub(super) kernel: NetnsHost,
    /// The kernel's path: the parts that could be enabled here.
    pub(super) way: Way,
    pub(super) files: Files,
    middle: NetnsHost,
}

/// The two hosts of a client and a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends<'a> {
    pub(super) outside: &'a NetnsHost,
    pub(super) inside: &'a NetnsHost,
    /// The server's address.
    pub(super) server: Ipv4Addr,
    /// The host is shared with other programs: servers take an ephemeral port.
    pub(super) shared: bool,
    pub(super) files: &'a Path,
}

impl Ends<'_> {
    /// The listening address of a server whose usual port is `port`.
    pub(super) fn address(&self, port: u16) -> String {
        format!("{}:{}", self.server, if self.shared { 0 } else { port })
    }
}

/// The kernel's path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Way {
    /// Forwarding is enabled.
    pub(super) forwards: bool,
    /// Connection tracking is enabled.
    pub(super) conntrack: bool,
    /// Datagrams to [`INSPECTED`] go to NFQUEUE [`QUEUE`].
    pub(super) queue: bool,
}

/// Number of the kernel's NFQUEUE.
pub(super) const QUEUE: u16 = 7;

impl Network {
    /// Creates the network. The engine is not started.
    pub(super) fn new(files: Files) -> Result<Self, Failure> {
        if system_program("ip").is_none() {
            return Err(Failure::Missing("there is no program ip (install iproute2)".into()));
        }
        let [outside, inside, middle, kernel] =
            [NetnsHost::new()?, NetnsHost::new()?, NetnsHost::new()?, NetnsHost::new()?];
        let (out, within) = (outside.tid(), inside.tid());
        middle.ip(format!(
            "link add wan type veth peer name l0 netns {out}\n\
             link add lan type veth peer name r0 address 02:00:00:00:00:02 netns {within}\n\
             link set wan up\nlink set lan up\n"
        ))?;
        kernel.ip(format!(
            "link add k0 type veth peer name l1 netns {out}\nlink add k1 type veth peer name r1 netns {within}\n\
             addr add 10.78.1.254/24 dev k0\naddr add 10.78.2.254/24 dev k1\nlink set k0 up\nlink set k1 up\n"
        ))?;
        outside.ip(format!(
            "addr add {CLIENT}/24 dev l0\naddr add {GREEDY}/24 dev l0\naddr add {SCANNER}/24 dev l0\n\
             addr add 10.78.1.1/24 dev l1\nlink set l0 up\nlink set l1 up\n\
             route add 10.78.2.0/24 via 10.78.1.254\n"
        ))?;
        inside.ip(format!(
            "addr add {SERVER}/24 dev r0\naddr add {KERNEL_SERVER}/24 dev r1\nlink set r0 up\nlink set r1 up\n\
             route add 10.78.1.0/24 via 10.78.2.254\nroute add default via {CLIENT}\n"
        ))?;
        let lock = files.path().join("xtables.lock");
        let way = kernel.run(move || Way::open(&lock));
        std::fs::write(files.path().join("demo.ipfw"), RULES).map_err(doing("the rules"))?;
        Ok(Self { outside, inside, kernel, way, files, middle })
    }

    /// Starts the engine and waits until its ports are up.
    pub(super) fn engine(&self, driver: Driver, stop: &Stop) -> Result<Process, Failure> {
        std::fs::write(self.files.path().join("demo.toml"), configuration(driver))
            .map_err(doing("the configuration"))?;
        let mut engine = Process::start(&self.middle, self.files.path(), "run", &["run", "demo.toml"])?;
        let socket = self.engine_socket();
        engine.wait_until(stop, |_| {
            let up = |ports: &serde_json::Value| {
                let ports = ports["ports"].as_array()?;
                Some(ports.len() == 2 && ports.iter().all(|port| port["state"] == "up"))
            };
            ctl(&socket, "show ports").is_some_and(|ports| up(&ports) == Some(true))
        })?;
        Ok(engine)
    }

    /// Writes the rule file with another rule in the first place, for reload `number`.
    pub(super) fn change_rules(&self, number: u64) -> Result<(), Failure> {
        let rules = format!("add 50 count icmp from any to any // reload {number}\n{RULES}");
        std::fs::write(self.files.path().join("demo.ipfw"), rules).map_err(doing("the rules"))
    }

    /// Sets the number of segments in one GSO packet of the outside host, for new connections.
    pub(super) fn segments_at_once(&self, count: u32) -> Result<(), Failure> {
        self.outside.ip(format!("link set l0 gso_max_segs {count}\nlink set l1 gso_max_segs {count}\n"))
    }

    /// The two hosts, connected through the engine.
    pub(super) fn ends(&self) -> Ends<'_> {
        let (outside, inside, files) = (&self.outside, &self.inside, self.files.path());
        Ends { outside, inside, server: SERVER, shared: false, files }
    }

    pub(super) fn engine_socket(&self) -> PathBuf {
        self.files.path().join("engine.sock")
    }
}

/// The demo's configuration of `towpath run` with a port driver. It names the rule file `demo.ipfw` beside it.
pub fn configuration(driver: Driver) -> String {
    let driver = match driver {
        Driver::AfPacket => "driver = \"af_packet\"\noffload = true",
        Driver::AfXdp => "driver = \"af_xdp\"",
    };
    CONFIG
        .replace("DRIVER", driver)
        .replace("PATTERN", super::process::PATTERN)
        .replace("SYN_LIFETIME", &SYN_LIFETIME.to_string())
}

impl Way {
    /// Enables what is available, in the calling thread's namespace.
    fn open(lock: &Path) -> Self {
        let forwards = std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").is_ok();
        let iptables = |words: &str| {
            // Prefers iptables-legacy, which is faster; both programs install kernel rules.
            ["iptables", "iptables-legacy"].into_iter().filter_map(system_program).any(|program| {
                let mut command = Command::new(program);
                command.args(words.split_whitespace()).env("XTABLES_LOCKFILE", lock);
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                command.status().is_ok_and(|status| status.success())
            })
        };
        let queue =
            iptables(&format!("-A FORWARD -p udp --dport {INSPECTED} -j NFQUEUE --queue-num {QUEUE}"));
        let conntrack = iptables("-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
            && iptables("-A FORWARD -m conntrack --ctstate NEW -j ACCEPT");
        Self { forwards, conntrack, queue }
    }
}
