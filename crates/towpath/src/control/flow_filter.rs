//! Filter of `towpath ctl trace` and `follow` by deciding rule, by flow, by drop reason, or by several of them; and of states by their flow.

use std::net::{IpAddr, SocketAddr};

use towpath_engine::{DropReason, Outcome, TraceFilter};
use towpath_gate::rules::protocol::number;
use towpath_gate::state::Flow;
use towpath_wire::{Packet, proto};

/// A packet filter. The default matches every packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// Number of the deciding rule.
    rule: Option<u32>,
    /// Only packets that were dropped for one of these reasons.
    drops: Option<Vec<DropReason>>,
    /// The protocol number and the two ends of the flow, in either direction.
    proto: Option<u8>,
    ends: [End; 2],
}

/// One end of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct End {
    address: Option<IpAddr>,
    port: Option<u16>,
}

impl FlowFilter {
    /// Creates a filter for packets that `rule` decided and that belong to `flow`: PROTOCOL END END, such as
    /// `tcp 10.0.0.1:4000 10.0.0.2:22`. An END is an address, an address and a port, `:PORT`, or `any`; the second END is optional.
    ///
    /// # Errors
    /// `flow` is malformed.
    pub fn new(rule: Option<u32>, flow: Option<&str>) -> Result<Self, String> {
        let mut filter = Self { rule, ..Self::default() };
        let Some(flow) = flow else { return Ok(filter) };
        let mut words = flow.split_whitespace();
        let proto = words.next().ok_or("a flow is PROTOCOL END END, such as `tcp 10.0.0.1 10.0.0.2:22`")?;
        filter.proto = protocol(proto)?;
        for (end, word) in filter.ends.iter_mut().zip(&mut words) {
            *end = self::end(word)?;
        }
        match words.next() {
            None => Ok(filter),
            Some(word) => Err(format!("unexpected `{word}`: a flow is PROTOCOL END END")),
        }
    }

    /// Restricts the filter to dropped packets: a reason, the beginning of several names before an underscore, or `any`.
    ///
    /// # Errors
    /// There is no such reason.
    pub fn with_drop(self, word: Option<&str>) -> Result<Self, String> {
        let Some(word) = word else { return Ok(self) };
        let reasons = DropReason::named(word);
        if reasons.is_empty() {
            let names: Vec<&str> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
            return Err(format!(
                "`{word}` is not a drop reason: write any, malformed, tx_refused, or one of {}",
                names.join(", ")
            ));
        }
        Ok(Self { drops: Some(reasons), ..self })
    }

    /// Returns true if the packet matches; `rule` is the rule that decided it.
    pub fn takes(&self, packet: &Packet<'_>, rule: Option<u32>) -> bool {
        if self.rule.is_some() && self.rule != rule || self.proto.is_some_and(|proto| proto != packet.proto) {
            return false;
        }
        if self.ends == [End::default(); 2] {
            return true;
        }
        packet.flow().is_some_and(|flow| self.takes_flow(&flow))
    }

    /// Returns true if the flow matches, in either direction.
    pub fn takes_flow(&self, flow: &Flow) -> bool {
        let (from, to) = flow.ends.addresses();
        self.proto.is_none_or(|proto| proto == flow.proto)
            && self.connects((from, flow.src_port), (to, flow.dst_port))
    }

    /// Returns true if the filter names one flow: a protocol and both ends, with ports if the protocol has ports. ICMP may have its
    /// identifier in place of both ports.
    pub fn is_one_flow(&self) -> bool {
        let Some(proto) = self.proto else { return false };
        let [one, other] = self.ends.map(|end| end.port);
        let whole = match proto {
            proto::ICMP | proto::ICMP6 => one == other,
            _ => [one, other].iter().all(|port| port.is_some() == WITH_PORTS.contains(&proto)),
        };
        whole && self.ends.iter().all(|end| end.address.is_some())
    }

    fn connects(&self, from: (IpAddr, u16), to: (IpAddr, u16)) -> bool {
        let [one, other] = self.ends;
        one.is(from) && other.is(to) || one.is(to) && other.is(from)
    }
}

/// IPv6 in IP (RFC 4213).
const IPV6: u8 = 41;

/// Protocols with ports.
const WITH_PORTS: [u8; 5] = [proto::TCP, proto::UDP, proto::DCCP, proto::SCTP, proto::UDPLITE];

impl TraceFilter for FlowFilter {
    fn takes(&self, packet: Option<&Packet<'_>>, rule: Option<u32>, outcome: Outcome) -> bool {
        let is_wanted = match (&self.drops, outcome) {
            (None, _) => true,
            (Some(reasons), Outcome::Dropped(reason)) => reasons.contains(&reason),
            (Some(_), _) => false,
        };
        is_wanted
            && match packet {
                Some(packet) => Self::takes(self, packet, rule),
                // A malformed frame has no flow, and no rule decided it.
                None => self.rule.is_none() && self.proto.is_none() && self.ends == [End::default(); 2],
            }
    }
}

impl End {
    fn is(self, (address, port): (IpAddr, u16)) -> bool {
        self.address.is_none_or(|own| own == address) && self.port.is_none_or(|own| own == port)
    }
}

fn protocol(word: &str) -> Result<Option<u8>, String> {
    match word {
        "ip" | "any" | "all" => Ok(None),
        // A listing has this name for IPv6 in IP. In rules, it is any IPv6 packet.
        "ipv6" => Ok(Some(IPV6)),
        _ => number(word).map(Some).ok_or_else(|| {
            format!("`{word}` is not a protocol: write a name such as tcp, udp, icmp or gre, a number, or ip for all")
        }),
    }
}

fn end(word: &str) -> Result<End, String> {
    if word == "any" {
        return Ok(End::default());
    }
    if let Some(port) = word.strip_prefix(':').and_then(|port| port.parse().ok()) {
        return Ok(End { address: None, port: Some(port) });
    }
    if let Ok(address) = word.trim_matches(['[', ']']).parse() {
        return Ok(End { address: Some(address), port: None });
    }
    match word.parse::<SocketAddr>() {
        Ok(end) => Ok(End { address: Some(end.ip()), port: Some(end.port()) }),
        Err(_) => {
            Err(format!("`{word}` is not an end: write ADDRESS, ADDRESS:PORT, [ADDRESS]:PORT, :PORT or any"))
        }
    }
}

#[cfg(test)]
mod tests {
    use towpath_gate::PacketSpec;
    use towpath_wire as wire;

    use super::*;

    #[test]
    fn packets_are_taken_by_rule_and_by_either_end() {
        let rows = [
            (None, None, true),
            (Some(100), None, true),
            (Some(200), None, false),
            (None, Some("tcp"), true),
            (None, Some("ip any"), true),
            (None, Some("udp"), false),
            (None, Some("tcp 10.0.0.1"), true),
            (None, Some("tcp 192.0.2.1:23 10.0.0.1:40000"), true),
            (None, Some("6 any :23"), true),
            (None, Some("tcp 10.0.0.1:23"), false),
            (None, Some("tcp 10.0.0.1 10.0.0.1"), false),
            (None, Some("tcp [2001:db8::1]:23"), false),
            (None, Some("gre"), false),
            (Some(100), Some("tcp :23"), true),
            (Some(200), Some("tcp :23"), false),
        ];
        let syn = PacketSpec::parse("tcp 10.0.0.1:40000 > 192.0.2.1:23 syn seq 1000").unwrap();
        let packet = wire::parse(syn.link(), &syn.frame, syn.frame.len() as u32).unwrap();
        for (rule, flow, expected) in rows {
            let filter = FlowFilter::new(rule, flow).unwrap();
            assert_eq!(filter.takes(&packet, Some(100)), expected, "{rule:?} {flow:?}");
        }
    }

    #[test]
    fn drops_are_selected_by_reason() {
        let syn = PacketSpec::parse("tcp 10.0.0.1:40000 > 192.0.2.1:23 syn").unwrap();
        let packet = wire::parse(syn.link(), &syn.frame, syn.frame.len() as u32).unwrap();
        let (rule, route) = (Outcome::Dropped(DropReason::Rule), Outcome::Dropped(DropReason::NoRoute));
        let malformed = Outcome::Dropped(DropReason::MalformedIp4TotalLength);
        let refused = Outcome::Dropped(DropReason::TxRefusedEmsgsize);
        // Rows: reason, rule, flow, and whether the packets are taken: passed, dropped by rule 100, without a route, refused, malformed.
        let rows = [
            (None, None, None, [true, true, true, true, true]),
            (Some("any"), None, None, [false, true, true, true, true]),
            (Some("rule"), None, None, [false, true, false, false, false]),
            (Some("rule"), Some(100), None, [false, true, false, false, false]),
            (Some("rule"), Some(200), None, [false, false, false, false, false]),
            (Some("no_route"), None, Some("tcp :23"), [false, false, true, false, false]),
            (Some("no_route"), None, Some("udp"), [false, false, false, false, false]),
            (Some("tx_refused"), None, None, [false, false, false, true, false]),
            (Some("malformed"), None, None, [false, false, false, false, true]),
            (Some("malformed_ip4"), None, None, [false, false, false, false, true]),
            (Some("malformed_ip6"), None, None, [false, false, false, false, false]),
            (Some("malformed"), None, Some("tcp"), [false, false, false, false, false]),
        ];
        for (word, number, flow, expected) in rows {
            let filter = FlowFilter::new(number, flow).unwrap().with_drop(word).unwrap();
            let takes = |packet, rule, outcome| TraceFilter::takes(&filter, packet, rule, outcome);
            let taken = [
                takes(Some(&packet), Some(100), Outcome::Passed),
                takes(Some(&packet), Some(100), rule),
                takes(Some(&packet), Some(100), route),
                takes(Some(&packet), None, refused),
                takes(None, None, malformed),
            ];
            assert_eq!(taken, expected.map(|is| is && (number != Some(200))), "{word:?} {number:?} {flow:?}");
        }
        for word in ["", "mal", "rul", "no_route_"] {
            let error = FlowFilter::default().with_drop(Some(word)).unwrap_err();
            assert!(error.contains("is not a drop reason") && error.contains("no_route"), "{error}");
        }
    }

    #[test]
    fn invalid_flows_are_errors() {
        for (flow, words) in [
            ("", "a flow is PROTOCOL END END"),
            ("tpc", "`tpc` is not a protocol"),
            ("tcp 10.0.0", "`10.0.0` is not an end"),
            ("tcp any any any", "unexpected `any`"),
        ] {
            assert!(FlowFilter::new(None, Some(flow)).unwrap_err().contains(words), "{flow}");
        }
    }
}
