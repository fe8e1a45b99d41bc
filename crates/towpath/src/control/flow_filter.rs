//! Filter of `towpath ctl trace` and `follow` by deciding rule, by flow, or both; and of states by their flow.

use std::net::{IpAddr, SocketAddr};

use towpath_gate::state::{Ends, Flow};

use towpath_engine::TraceFilter;
use towpath_wire::{Addresses, Packet};

/// A packet filter. The default matches every packet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowFilter {
    /// Number of the deciding rule.
    rule: Option<u32>,
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
            Some(word) => Err(format!("`{word}` is too much: a flow is PROTOCOL END END")),
        }
    }

    /// Returns true if the packet matches; `rule` is the rule that decided it.
    pub fn takes(&self, packet: &Packet<'_>, rule: Option<u32>) -> bool {
        if self.rule.is_some() && self.rule != rule || self.proto.is_some_and(|proto| proto != packet.proto) {
            return false;
        }
        if self.ends == [End::default(); 2] {
            return true;
        }
        let (from, to): (IpAddr, IpAddr) = match packet.addresses {
            Addresses::V4(from, to) => (from.into(), to.into()),
            Addresses::V6(from, to) => (from.into(), to.into()),
            Addresses::None => return false,
        };
        self.connects((from, packet.src_port), (to, packet.dst_port))
    }

    /// Returns true if the flow matches, in either direction.
    pub fn takes_flow(&self, flow: &Flow) -> bool {
        let (from, to) = addresses(flow);
        self.proto.is_none_or(|proto| proto == flow.proto)
            && self.connects((from, flow.src_port), (to, flow.dst_port))
    }

    /// Returns true if the filter names one flow: a protocol and both ends, with ports if the protocol has ports.
    pub fn is_one_flow(&self) -> bool {
        let has_ports = self.proto.is_some_and(|proto| WITH_PORTS.contains(&proto));
        let whole = |end: &End| end.address.is_some() && end.port.is_some() == has_ports;
        self.proto.is_some() && self.ends.iter().all(whole)
    }

    fn connects(&self, from: (IpAddr, u16), to: (IpAddr, u16)) -> bool {
        let [one, other] = self.ends;
        one.is(from) && other.is(to) || one.is(to) && other.is(from)
    }
}

/// TCP, UDP, DCCP, SCTP, UDP-Lite.
const WITH_PORTS: [u8; 5] = [6, 17, 33, 132, 136];

/// The addresses of a flow: source and destination.
pub(super) fn addresses(flow: &Flow) -> (IpAddr, IpAddr) {
    match flow.ends {
        Ends::V4(src, dst) => (src.into(), dst.into()),
        Ends::V6(src, dst, _) => (src.into(), dst.into()),
    }
}

impl TraceFilter for FlowFilter {
    fn takes(&self, packet: &Packet<'_>, rule: Option<u32>) -> bool {
        Self::takes(self, packet, rule)
    }
}

impl End {
    fn is(self, (address, port): (IpAddr, u16)) -> bool {
        self.address.is_none_or(|own| own == address) && self.port.is_none_or(|own| own == port)
    }
}

fn protocol(word: &str) -> Result<Option<u8>, String> {
    // Protocol numbers assigned by IANA.
    let known = [
        ("tcp", 6),
        ("udp", 17),
        ("icmp", 1),
        ("icmp6", 58),
        ("ipv6-icmp", 58),
        ("sctp", 132),
        ("dccp", 33),
        ("udplite", 136),
    ];
    match known.iter().find(|(name, _)| *name == word) {
        Some((_, number)) => Ok(Some(*number)),
        None if matches!(word, "ip" | "any" | "all") => Ok(None),
        None => word.parse().map(Some).map_err(|_| {
            format!("`{word}` is no protocol: write tcp, udp, icmp, icmp6, sctp, ip or a number")
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
            Err(format!("`{word}` is no end: write ADDRESS, ADDRESS:PORT, [ADDRESS]:PORT, :PORT or any"))
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
    fn what_is_no_flow_is_said() {
        for (flow, words) in [
            ("", "a flow is PROTOCOL END END"),
            ("tpc", "`tpc` is no protocol"),
            ("tcp 10.0.0", "`10.0.0` is no end"),
            ("tcp any any any", "`any` is too much"),
        ] {
            assert!(FlowFilter::new(None, Some(flow)).unwrap_err().contains(words), "{flow}");
        }
    }
}
