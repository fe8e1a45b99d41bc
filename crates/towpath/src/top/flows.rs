//! The flows that were read, with their rates. No IO.
//!
//! A sample has a bounded part of the states; a sweep of all states may take several samples. A flow's rate is its traffic between the
//! last two times that it was read.

use std::collections::HashMap;

use serde_json::Value;

use super::sample::seconds;

/// Flows that are kept. Above this number, those with the least traffic per second are forgotten.
const FLOWS: usize = 20_000;

/// The flows. See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Flows {
    known: HashMap<String, Flow>,
    /// The number of the current sweep.
    sweep: u64,
    /// True if all states were read at least once.
    pub(super) complete: bool,
}

/// A flow.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    pub(super) packets: u64,
    pub(super) bytes: u64,
    /// Per second.
    pub(super) packet_rate: Option<f64>,
    pub(super) byte_rate: Option<f64>,
    /// The state as the engine described it.
    pub(super) state: Value,
    at: u64,
    sweep: u64,
}

impl Flows {
    /// Forgets everything: another engine, or another filter.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Takes states that were read at `at`. `swept`: the end of the sweep.
    pub(super) fn take(&mut self, states: Vec<Value>, at: u64, swept: bool) {
        for state in states {
            if state["kind"] == "parent" {
                continue;
            }
            let (packets, bytes) = (both(&state["packets"]), both(&state["bytes"]));
            let sweep = self.sweep;
            let flow = Flow { packets, bytes, packet_rate: None, byte_rate: None, state, at, sweep };
            let id = id(&flow.state);
            match self.known.get_mut(&id) {
                // It is in the listing and among the busiest.
                Some(known) if known.at == at => {}
                Some(known) => *known = flow.after(known),
                None => {
                    self.known.insert(id, flow);
                }
            }
        }
        if swept {
            let sweep = self.sweep;
            self.known.retain(|_, flow| flow.sweep == sweep);
            self.sweep += 1;
            self.complete = true;
        }
        if self.known.len() > FLOWS {
            let mut rates: Vec<(f64, u64)> = self.known.values().map(Flow::weight).collect();
            rates.sort_unstable_by(|one, other| other.0.total_cmp(&one.0).then(other.1.cmp(&one.1)));
            let least = rates[FLOWS * 3 / 4];
            self.known.retain(|_, flow| flow.weight() > least);
            self.complete = false;
        }
    }

    /// All flows with their ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &Flow)> {
        self.known.iter()
    }

    /// Number of flows.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }
}

impl Flow {
    fn after(mut self, before: &Self) -> Self {
        let seconds = seconds(before.at, self.at);
        // A state that is newer than the one before has smaller counters.
        let rate = |now: u64, before: u64| Some(now.checked_sub(before)? as f64 / seconds?);
        self.packet_rate = rate(self.packets, before.packets);
        self.byte_rate = rate(self.bytes, before.bytes);
        self
    }

    fn weight(&self) -> (f64, u64) {
        (self.byte_rate.unwrap_or(0.0), self.bytes)
    }
}

/// The sum of the forward and the reverse direction.
fn both(pair: &Value) -> u64 {
    let number = |at: usize| pair[at].as_u64().unwrap_or(0);
    number(0).saturating_add(number(1))
}

fn id(state: &Value) -> String {
    ["proto", "src", "src_port", "dst", "dst_port", "name", "zone", "rule", "kind"]
        .map(|key| state[key].to_string())
        .join(" ")
}

/// `tcp 10.0.0.1:4000 <-> 192.0.2.1:22 :web zone 3`.
pub(super) fn words(state: &Value) -> String {
    let number = |key: &str| state[key].as_u64().unwrap_or(0);
    let word = |key: &str| state[key].as_str().unwrap_or("?");
    let ports = number("src_port") != 0 || number("dst_port") != 0;
    let end = |address: &str, port: u64| match (ports, address.contains(':')) {
        (false, _) => address.to_owned(),
        (true, true) => format!("[{address}]:{port}"),
        (true, false) => format!("{address}:{port}"),
    };
    let mut text = format!(
        "{} {} <-> {}",
        protocol(number("proto")),
        end(word("src"), number("src_port")),
        end(word("dst"), number("dst_port")),
    );
    if !["default", "", "?"].contains(&word("name")) {
        text += &format!(" :{}", word("name"));
    }
    if number("zone") != 0 {
        text += &format!(" zone {}", number("zone"));
    }
    text
}

/// The flow as `ctl delete state` names it.
pub(super) fn exactly(state: &Value) -> String {
    let number = |key: &str| state[key].as_u64().unwrap_or(0);
    let word = |key: &str| state[key].as_str().unwrap_or("?");
    format!(
        "{} {} {} <-> {} {} :{} zone {}",
        number("proto"),
        word("src"),
        number("src_port"),
        word("dst"),
        number("dst_port"),
        word("name"),
        number("zone"),
    )
}

/// The flow as `ctl trace --flow` names it. Identifiers of ICMP are not ports of packets.
pub(super) fn traced(state: &Value) -> String {
    let number = |key: &str| state[key].as_u64().unwrap_or(0);
    let end = |address: &str, port: &str| {
        let (address, port) = (state[address].as_str().unwrap_or("?"), number(port));
        match (port, address.contains(':')) {
            (0, _) => address.to_owned(),
            _ if [1, 58].contains(&number("proto")) => address.to_owned(),
            (_, true) => format!("[{address}]:{port}"),
            (_, false) => format!("{address}:{port}"),
        }
    };
    format!("{} {} {}", number("proto"), end("src", "src_port"), end("dst", "dst_port"))
}

/// The name of a protocol (IANA), or its number.
pub(super) fn protocol(number: u64) -> String {
    let name = match number {
        1 => "icmp",
        6 => "tcp",
        17 => "udp",
        47 => "gre",
        50 => "esp",
        58 => "icmp6",
        132 => "sctp",
        136 => "udplite",
        _ => return number.to_string(),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn state(port: u16, packets: u64) -> Value {
        json!({ "proto": 6, "src": "10.0.0.1", "src_port": port, "dst": "192.0.2.1", "dst_port": 22, "name": "default",
                "zone": 0, "rule": 100, "kind": "state", "packets": [packets, packets], "bytes": [packets * 100, 0] })
    }

    fn rate(flows: &Flows, port: u16) -> Option<Option<f64>> {
        let found = flows.iter().find(|(_, flow)| flow.state["src_port"] == port);
        found.map(|(_, flow)| flow.packet_rate)
    }

    #[test]
    fn a_rate_is_that_of_the_time_between_two_reads() {
        let mut flows = Flows::default();
        flows.take(vec![state(1, 5), state(2, 7)], 0, true);
        assert_eq!(rate(&flows, 1), Some(None));
        flows.take(vec![state(1, 10)], 2 * SECOND, false);
        // Read twice in one sample.
        flows.take(vec![state(1, 10)], 2 * SECOND, false);
        assert_eq!((rate(&flows, 1), rate(&flows, 2)), (Some(Some(5.0)), Some(None)));
        // Flow 2 is not in the sweep that ends here; flow 1 began again.
        flows.take(vec![state(1, 3)], 3 * SECOND, true);
        assert_eq!((rate(&flows, 1), rate(&flows, 2)), (Some(None), None));
        flows.take(vec![state(1, 3)], 4 * SECOND, true);
        assert_eq!(rate(&flows, 1), Some(Some(0.0)));
        flows.clear();
        assert_eq!(flows.len(), 0);
    }

    #[test]
    fn the_number_of_flows_is_bounded() {
        let mut flows = Flows::default();
        for at in 1..=3 {
            let states = (0..FLOWS as u64).map(|n| {
                let mut state = state((n % 60_000) as u16, at * n);
                state["zone"] = (at * 10 + n / 60_000).into();
                state
            });
            flows.take(states.collect(), at * SECOND, false);
            assert!(flows.len() <= FLOWS, "{}", flows.len());
        }
        // The busiest stay.
        assert!(rate(&flows, (FLOWS - 1) as u16).is_some());
        assert!(!flows.complete);
    }

    #[test]
    fn a_flow_has_names_for_people_and_for_requests() {
        let mut tcp = state(4000, 1);
        assert_eq!(words(&tcp), "tcp 10.0.0.1:4000 <-> 192.0.2.1:22");
        assert_eq!(exactly(&tcp), "6 10.0.0.1 4000 <-> 192.0.2.1 22 :default zone 0");
        assert_eq!(traced(&tcp), "6 10.0.0.1:4000 192.0.2.1:22");
        tcp["name"] = "web".into();
        tcp["zone"] = 3.into();
        tcp["src"] = "2001:db8::1".into();
        assert_eq!(words(&tcp), "tcp [2001:db8::1]:4000 <-> 192.0.2.1:22 :web zone 3");
        assert_eq!(traced(&tcp), "6 [2001:db8::1]:4000 192.0.2.1:22");
        let mut ping = state(77, 1);
        ping["proto"] = 1.into();
        ping["dst_port"] = 77.into();
        assert_eq!(traced(&ping), "1 10.0.0.1 192.0.2.1");
        for state in [&tcp, &ping] {
            assert!(crate::control::state_filter::StateMatch::one_flow(&exactly(state)).is_ok());
            assert!(crate::control::FlowFilter::new(None, Some(&traced(state))).is_ok());
        }
        // A missing member is no panic.
        assert_eq!(words(&Value::Null), "0 ? <-> ?");
    }
}
