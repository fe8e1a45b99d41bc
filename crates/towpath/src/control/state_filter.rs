//! Filters of states: `towpath ctl show states`, `dump` and `delete state`.

use std::net::IpAddr;

use clap::Args;
use serde::{Deserialize, Serialize};
use towpath_gate::rules::address::{Net4, Net6};
use towpath_gate::state::Listed;

use super::flow_filter::FlowFilter;

/// Which states to list. Without any of these: all. A state must match all that are given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateFilter {
    /// Only states of FLOW: PROTOCOL END END, such as `tcp 10.0.0.1 :22`
    #[arg(long, value_name = "FLOW")]
    #[serde(skip_serializing_if = "Option::is_none")]
    flow: Option<String>,
    /// Only states with an address in PREFIX, such as `10.0.0.0/8`
    #[arg(long, value_name = "PREFIX")]
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// Only states with this source or destination port
    #[arg(long, value_name = "PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    /// Only states of rule N
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<u32>,
    /// Only states with this flow name
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Only states that expire within SECONDS without another packet
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_within: Option<u64>,
    /// Only states that expire after SECONDS or later
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_after: Option<u64>,
}

impl StateFilter {
    /// Returns true if the filter accepts all states.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Reads the filter.
    ///
    /// # Errors
    /// The flow or the prefix is malformed.
    pub fn compile(self) -> Result<StateMatch, String> {
        let flow = FlowFilter::new(None, self.flow.as_deref())?;
        let prefix = self.address.as_deref().map(Prefix::parse).transpose()?;
        let name = self.name.as_deref().map(|name| name.strip_prefix(':').unwrap_or(name).into());
        let Self { port, rule, expires_within, expires_after, .. } = self;
        let expires = (expires_after.unwrap_or(0), expires_within.unwrap_or(u64::MAX));
        Ok(StateMatch { flow, prefix, port, rule, name, zone: None, expires })
    }
}

/// A compiled [`StateFilter`].
#[derive(Clone, Debug)]
pub struct StateMatch {
    flow: FlowFilter,
    prefix: Option<Prefix>,
    port: Option<u16>,
    rule: Option<u32>,
    name: Option<Box<str>>,
    zone: Option<u16>,
    /// Remaining seconds: at least, at most.
    expires: (u64, u64),
}

impl StateMatch {
    /// The states of one flow, in the words of a listing or of a packet filter, under all flow names or one, in all zones or one:
    /// `tcp 10.0.0.1 4000 <-> 10.0.0.2 22 :default zone 3`, `tcp 10.0.0.1:4000 10.0.0.2:22`.
    ///
    /// # Errors
    /// The text does not name one flow.
    pub fn one_flow(text: &str) -> Result<Self, String> {
        let mut words: Vec<&str> = text.split_whitespace().collect();
        let zone = match words[..] {
            [.., "zone", zone] => zone.parse::<u16>().ok(),
            _ => None,
        };
        words.truncate(words.len() - zone.map_or(0, |_| 2));
        let name = words.pop_if(|word| word.len() > 1 && word.starts_with(':'));
        let flow = match words[..] {
            [proto, src, src_port, "<->", dst, dst_port]
            | ["proto", proto, src, src_port, "<->", dst, dst_port] => {
                format!("{proto} {} {}", end(src, src_port), end(dst, dst_port))
            }
            _ => words.join(" "),
        };
        let filter = FlowFilter::new(None, Some(&flow))?;
        if !filter.is_one_flow() {
            return Err(format!(
                "`{text}` is not one flow: write PROTOCOL ADDRESS:PORT ADDRESS:PORT, or what `show states` prints from the protocol on"
            ));
        }
        let name = name.map(|name| name[1..].into());
        Ok(Self { flow: filter, prefix: None, port: None, rule: None, name, zone, expires: (0, u64::MAX) })
    }

    /// Returns true if the state matches; `rule` is the number of its rule, `name` its flow name.
    pub fn takes(&self, state: &Listed, rule: u32, name: &str) -> bool {
        let flow = &state.flow;
        let (src, dst) = flow.ends.addresses();
        let seconds = state.seconds();
        self.rule.is_none_or(|own| own == rule)
            && self.zone.is_none_or(|own| own == flow.zone)
            && self.name.as_deref().is_none_or(|own| own == name)
            && self.port.is_none_or(|own| own == flow.src_port || own == flow.dst_port)
            && self.prefix.is_none_or(|own| own.contains(src) || own.contains(dst))
            && (self.expires.0..=self.expires.1).contains(&seconds)
            && self.flow.takes_flow(flow)
    }
}

/// `ADDRESS:PORT`, or the address alone for port 0: the flow has no ports.
fn end(address: &str, port: &str) -> String {
    match (port, address.contains(':')) {
        ("0", _) => address.to_owned(),
        (_, true) => format!("[{address}]:{port}"),
        (_, false) => format!("{address}:{port}"),
    }
}

/// The addresses of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefix {
    V4(Net4),
    V6(Net6),
}

impl Prefix {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a prefix: write ADDRESS or ADDRESS/LENGTH");
        let (address, len) = text.split_once('/').map_or((text, None), |(address, len)| (address, Some(len)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let len = len.map_or(Ok(width), str::parse).ok().filter(|len| *len <= width).ok_or_else(wrong)?;
        Ok(match address {
            IpAddr::V4(address) => Self::V4(Net4::prefix(address.to_bits(), len)),
            IpAddr::V6(address) => Self::V6(Net6::prefix(address.to_bits(), len)),
        })
    }

    fn contains(self, address: IpAddr) -> bool {
        match (self, address) {
            (Self::V4(net), IpAddr::V4(address)) => net.contains(address.to_bits()),
            (Self::V6(net), IpAddr::V6(address)) => net.contains(address.to_bits()),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use towpath_gate::state::{Ends, Flow, Install, Name, RuleId, Segment, Settings, States};
    use towpath_wire::Time;

    use super::*;

    /// A connection with a SYN: it expires in 20 s.
    fn state() -> Listed {
        state_of(6, [4000, 22], 0)
    }

    fn state_of(proto: u8, [src_port, dst_port]: [u16; 2], zone: u16) -> Listed {
        let ends = Ends::V4([10, 0, 0, 1].into(), [192, 0, 2, 1].into());
        let flow = Flow { ends, proto, src_port, dst_port, zone };
        let settings = Settings { dyn_icmp_id: true, ..Settings::default() };
        let (mut states, now) = (States::new(settings, 1), Time::from_secs(1));
        let syn = Segment { tcp_flags: 0x02, ..Segment::default() };
        states.install(&flow, Name::DEFAULT, &syn, RuleId(1), &Install::default(), now).unwrap();
        states.list(now).next().unwrap()
    }

    #[test]
    fn each_filter_accepts_its_states() {
        let text = |text: &str| Some(text.to_owned());
        let all = StateFilter::default;
        let rows = [
            (all(), true),
            (StateFilter { address: text("10.9.9.9/8"), ..all() }, true),
            (StateFilter { address: text("10.0.0.0/8"), ..all() }, true),
            (StateFilter { address: text("192.0.2.1"), ..all() }, true),
            (StateFilter { address: text("0.0.0.0/0"), ..all() }, true),
            (StateFilter { address: text("192.0.2.2"), ..all() }, false),
            (StateFilter { address: text("::/0"), ..all() }, false),
            (StateFilter { port: Some(4000), ..all() }, true),
            (StateFilter { port: Some(22), ..all() }, true),
            (StateFilter { port: Some(80), ..all() }, false),
            (StateFilter { rule: Some(100), ..all() }, true),
            (StateFilter { rule: Some(200), ..all() }, false),
            (StateFilter { name: text(":web"), ..all() }, true),
            (StateFilter { name: text("web"), ..all() }, true),
            (StateFilter { name: text("default"), ..all() }, false),
            (StateFilter { expires_within: Some(20), ..all() }, true),
            (StateFilter { expires_within: Some(19), ..all() }, false),
            (StateFilter { expires_after: Some(20), ..all() }, true),
            (StateFilter { expires_after: Some(21), ..all() }, false),
            (StateFilter { flow: text("tcp :22"), ..all() }, true),
            (StateFilter { flow: text("udp :22"), ..all() }, false),
            (StateFilter { port: Some(22), rule: Some(200), ..all() }, false),
        ];
        for (filter, expected) in rows {
            let found = filter.clone().compile().unwrap().takes(&state(), 100, "web");
            assert_eq!(found, expected, "{filter:?}");
        }
        for (filter, error) in [
            (StateFilter { address: text("10.0.0/8"), ..all() }, "is not a prefix"),
            (StateFilter { address: text("10.0.0.0/33"), ..all() }, "is not a prefix"),
            (StateFilter { flow: text("tpc"), ..all() }, "is not a protocol"),
        ] {
            assert!(filter.compile().unwrap_err().contains(error));
        }
    }

    /// Every line of a listing names its own state, and no state of another flow.
    #[test]
    fn a_line_of_a_listing_names_its_state() {
        #[rustfmt::skip]
        let states = [
            state_of(6,   [4000, 22], 0),
            state_of(6,   [4000, 22], 3),
            // ICMP with its identifier (`dyn_icmp_id`), and without.
            state_of(1,   [77, 77],   0),
            state_of(1,   [78, 78],   0),
            state_of(41,  [0, 0],     0),
            state_of(47,  [0, 0],     0),
            state_of(89,  [0, 0],     0),
            state_of(200, [0, 0],     0),
            state_of(200, [0, 0],     9),
        ];
        for (at, state) in states.iter().enumerate() {
            let line = state.line(100, |_| "web").to_string();
            let flow = line.split_once(" STATE ").unwrap().1;
            let filter = StateMatch::one_flow(flow).unwrap();
            for (other, state) in states.iter().enumerate() {
                // A line without a zone is for all zones.
                let same = at == other || [(0, 1), (7, 8)].contains(&(at, other));
                assert_eq!(filter.takes(state, 100, "web"), same, "{line}, {other}");
            }
        }
        for text in ["icmp 10.0.0.1:77 192.0.2.1", "gre 10.0.0.1:77 192.0.2.1:77", "gre 10.0.0.1"] {
            assert!(StateMatch::one_flow(text).is_err(), "{text}");
        }
    }

    #[test]
    fn one_flow_is_named_as_it_is_listed() {
        let rows = [
            ("tcp 10.0.0.1:4000 192.0.2.1:22", Some(true)),
            ("tcp 192.0.2.1:22 10.0.0.1:4000", Some(true)),
            ("tcp 10.0.0.1 4000 <-> 192.0.2.1 22 :web", Some(true)),
            ("tcp 10.0.0.1 4000 <-> 192.0.2.1 22 :default", Some(false)),
            ("tcp 10.0.0.1:4001 192.0.2.1:22", Some(false)),
            ("udp 10.0.0.1:4000 192.0.2.1:22", Some(false)),
            ("icmp 10.0.0.1 0 <-> 192.0.2.1 0 :default", Some(false)),
            ("icmp 10.0.0.1 192.0.2.1", Some(false)),
            ("tcp 2001:db8::1 4000 <-> 2001:db8::2 22", Some(false)),
            ("tcp 10.0.0.1 4000 <-> 192.0.2.1 22 :web zone 0", Some(true)),
            ("tcp 10.0.0.1 4000 <-> 192.0.2.1 22 :web zone 3", Some(false)),
            ("tcp 10.0.0.1 192.0.2.1:22", None),
            ("tcp 10.0.0.1:4000", None),
            ("ip 10.0.0.1 192.0.2.1", None),
            ("", None),
        ];
        for (text, expected) in rows {
            let found = StateMatch::one_flow(text).ok().map(|filter| filter.takes(&state(), 100, "web"));
            assert_eq!(found, expected, "{text}");
        }
    }
}
