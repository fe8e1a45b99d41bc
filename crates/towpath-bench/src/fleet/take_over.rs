//! Two gates between two machines, on a path each. The routes lead through one of them, and then through the other one.
//!
//! ```text
//! near (client)  l1 == wan1 [gate a] lan1 == r1  far (server)
//!                l2 == wan2 [gate b] lan2 == r2
//! ```

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use super::connections::{CLIENT, SERVER};
use super::server::Server;
use crate::live::dut;
use crate::live::netns_proc::NetnsProc;
use crate::peer::netns;
use crate::side::Side;

const PORT: u16 = 4222;

/// Only the first packet of a connection makes a state.
const RULES: &str = "add 100 allow layer2 mac-type arp\nadd 200 check-state\n\
                     add 300 allow tcp from any to any setup recv wan keep-state\n";

/// Maximum time to join, and for the states to arrive.
const READY: Duration = Duration::from_secs(60);

/// Time of normal traffic before the change, and of measurement after it.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(5);

/// What happened to the connections after the routes have changed.
pub(crate) struct TakeOver {
    /// Those on which a byte came back.
    pub(crate) continued: f64,
    /// The longest wait for one, in ms.
    pub(crate) longest: f64,
}

struct Gate {
    side: Side,
    files: TempDir,
}

impl Gate {
    fn start(netns_pid: u32, name: &str, number: u8, states: usize) -> Result<Self> {
        let config = format!(
            "rules = \"rules\"\n[settings]\ndyn_max = {}\n[control]\nsocket = \"ctl.sock\"\n\
             [port.wan]\ndriver = \"af_packet\"\ninterface = \"wan{number}\"\n\
             [port.lan]\ndriver = \"af_packet\"\ninterface = \"lan{number}\"\n[[bridge]]\nports = [\"wan\", \"lan\"]\n\
             [fleet]\nservers = \"nats://127.0.0.1:{PORT}\"\ngroup = \"bench\"\ngate = \"{name}\"\n",
            states + (1 << 16),
        );
        let (side, files) = dut::run_towpath(&netns_pid.to_string(), &config, RULES)?;
        Ok(Self { side, files })
    }

    /// What `towpath ctl show fleet` shows.
    fn fleet(&self) -> Result<Value> {
        let output = Command::new(crate::subject::replay::binary()?)
            .args(["ctl", "--socket"])
            .arg(self.files.path().join("ctl.sock"))
            .args(["show", "fleet", "--json"])
            .output()
            .context("starting towpath ctl")?;
        if !output.status.success() {
            bail!("ctl: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let mut answer: Value = serde_json::from_slice(&output.stdout)?;
        Ok(answer["fleet"].take())
    }

    fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Result<()> {
        let begun = Instant::now();
        loop {
            let fleet = self.fleet()?;
            if holds(&fleet) {
                return Ok(());
            }
            ensure!(begun.elapsed() < READY, "{what}: {fleet}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Measures `connections` connections whose gate is killed (`kill`), or whose routes change while it runs.
pub(crate) fn measure(connections: usize, kill: bool) -> Result<TakeOver> {
    let (mut near, mut middle, mut far) = (NetnsProc::start()?, NetnsProc::start()?, NetnsProc::start()?);
    for netns in [&mut near, &mut middle, &mut far] {
        netns.set("ipv6/conf/all/disable_ipv6", "1")?;
        netns.set("ipv6/conf/default/disable_ipv6", "1")?;
    }
    middle.run("ip link set lo up")?;
    for (number, net) in [(1, "10.0.0"), (2, "10.0.1")] {
        let (wan, lan, left, right) =
            (format!("wan{number}"), format!("lan{number}"), format!("l{number}"), format!("r{number}"));
        netns::connect_as([&left, &wan], near.pid(), middle.pid())?;
        netns::connect_as([&right, &lan], far.pid(), middle.pid())?;
        middle.run(&format!("ip link set {wan} up"))?;
        middle.run(&format!("ip link set {lan} up"))?;
        for (netns, device, host) in [(&mut near, &left, 1), (&mut far, &right, 2)] {
            netns.run(&format!("ip address add {net}.{host}/24 dev {device}"))?;
            netns.run(&format!("ip link set {device} up"))?;
        }
    }
    let _server = Server::within(middle.pid(), PORT)?;
    let one = Gate::start(middle.pid(), "a", 1, connections)?;
    let two = Gate::start(middle.pid(), "b", 2, connections)?;
    for gate in [&one, &two] {
        gate.until("not in step", |fleet| {
            fleet["in_step"] == true && fleet["peers"].as_array().is_some_and(|peers| peers.len() == 1)
        })?;
    }
    let side = |role: &str, netns: &NetnsProc| {
        let mut side =
            Side::start(&[role.to_owned(), netns.pid().to_string(), connections.to_string()], &[])?;
        side.line()?;
        anyhow::Ok(side)
    };
    let _echo = side("fleet-server", &far)?;
    let mut client = side("fleet-client", &near)?;
    two.until("states are missing", |fleet| fleet["stats"]["created"].as_u64() >= Some(connections as u64))?;
    thread::sleep(BEFORE);
    let mut running = Some(one);
    if kill {
        // SIGKILL, and waited for.
        drop(running.take().map(|gate| gate.side));
    }
    near.run(&format!("ip route replace {SERVER}/32 dev l2 src {CLIENT}"))?;
    far.run(&format!("ip route replace {CLIENT}/32 dev r2 src {SERVER}"))?;
    client.tell("changed")?;
    thread::sleep(AFTER);
    client.tell("stop")?;
    let (continued, longest) = (client.number()?, client.number()? / 1e6);
    client.finish()?;
    Ok(TakeOver { continued, longest })
}
