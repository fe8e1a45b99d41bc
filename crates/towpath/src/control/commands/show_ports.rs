//! `towpath ctl show ports`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_engine::egress::TxDrops;
use towpath_engine::router::NeighborSnapshot;
use towpath_port::Stats;

use super::super::command::{Context, Handled, Query, Reply};
use super::super::protocol::{Code, Refusal};
use super::super::text::{columns, items, table};
use crate::metrics::Layout;

/// The ports: driver, state, frames, and losses by reason, at most one second old
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowPorts {}

impl Query for ShowPorts {
    const WORDS: &'static str = "show ports";
    const ANSWER: &'static str = "ports";

    fn handle(self, context: &Context<'_>) -> Handled {
        context.query(
            |target| target.ports().map(<[Port]>::to_vec),
            |parts| match merge(parts) {
                Some(ports) => {
                    let ports: Vec<_> = ports.iter().map(Port::object).collect();
                    Ok(Reply::Answer(Self::ANSWER, json!({ "ports": ports })))
                }
                None => Err(Refusal::new(Code::NotFound, "this engine has no live ports")),
            },
        )
    }

    fn text(&self, answer: &Value) -> String {
        let ports = items(&answer["ports"]);
        let spec = [
            ("port", "name"),
            ("driver", "driver"),
            ("state", "state"),
            ("received", "received"),
            ("bytes", "received_bytes"),
            ("sent", "sent"),
            ("bytes", "sent_bytes"),
        ];
        let mut rows = columns(&spec, ports);
        rows[0].push("lost".to_owned());
        for (row, port) in rows[1..].iter_mut().zip(ports) {
            let lost = items(&port["lost"]).iter();
            let lost: Vec<String> =
                lost.filter_map(|reason| Some(format!("{} {}", reason[1], reason[0].as_str()?))).collect();
            row.push(if lost.is_empty() { "-".to_owned() } else { lost.join(", ") });
        }
        let mut text = table(&rows);
        // As ip-neighbour(8) prints them.
        for port in ports {
            let name = port["name"].as_str().unwrap_or_default();
            for neighbor in items(&port["neighbors"]) {
                let word = |key: &str| neighbor[key].as_str();
                let mac = word("mac").map(|mac| format!(" lladdr {mac}")).unwrap_or_default();
                let (address, state) = (word("address").unwrap_or("-"), word("state").unwrap_or("-"));
                text += &format!("{address} dev {name}{mac} {state}\n");
            }
        }
        text
    }
}

/// The ports of all threads.
pub(crate) fn merge(parts: Vec<Option<Vec<Port>>>) -> Option<Vec<Port>> {
    parts.into_iter().flatten().reduce(|mut all, ports| {
        all.iter_mut().zip(ports).for_each(|(own, port)| own.add(port));
        all
    })
}

/// The counters of a port: those of its losses are in a separate list.
const STATS: Layout = Layout { families: &[("dropped", "lost")], renamed: &[], moved: &[], hidden: &[] };

/// A live port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// The driver's name.
    pub driver: String,
    /// `up`, `down` or `gone`.
    pub state: &'static str,
    /// The driver's counters.
    pub stats: Stats,
    /// Packets that passed and were not sent, and other events of the egress.
    pub tx: TxDrops,
    /// The neighbors of a router on this link.
    pub neighbors: Vec<Neighbor>,
}

/// A neighbor of a router.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Neighbor {
    /// Its IP address.
    pub address: String,
    /// Its Ethernet address, if known.
    pub mac: Option<String>,
    /// `INCOMPLETE`, `REACHABLE`, `STALE`, `DELAY`, `PROBE` or `FAILED`.
    pub state: String,
}

impl Port {
    /// Adds the same port of another thread.
    fn add(&mut self, other: Self) {
        self.stats.add(&other.stats);
        self.tx.drops.add(&other.tx.drops);
        self.tx.events.add(&other.tx.events);
        if other.state != "up" {
            self.state = other.state;
        }
    }

    /// Frames lost by the driver, packets that were not sent, and other events of the egress: name and count.
    fn lost(&self) -> Vec<(&'static str, u64)> {
        let mut lost: Vec<(&'static str, u64)> = Vec::new();
        // The driver and the egress may drop for the same reason.
        for (reason, count) in self.stats.drops().chain(self.tx.iter()).filter(|(_, count)| *count > 0) {
            match lost.iter_mut().find(|(own, _)| *own == reason) {
                Some((_, own)) => *own += count,
                None => lost.push((reason, count)),
            }
        }
        lost
    }

    /// The port as an object.
    pub(crate) fn object(&self) -> Map<String, Value> {
        let mut object = STATS.object(&self.stats);
        object.insert("name".to_owned(), self.name.as_str().into());
        object.insert("driver".to_owned(), self.driver.as_str().into());
        object.insert("state".to_owned(), self.state.into());
        object.insert("lost".to_owned(), json!(self.lost()));
        if !self.neighbors.is_empty() {
            object.insert("neighbors".to_owned(), json!(self.neighbors));
        }
        object
    }
}

impl From<NeighborSnapshot> for Neighbor {
    fn from(neighbor: NeighborSnapshot) -> Self {
        let text = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
        Self {
            address: neighbor.address.to_string(),
            mac: neighbor.mac.map(text),
            state: neighbor.state.to_owned(),
        }
    }
}
