//! IPFIX messages (RFC 7011): flow records in, bytes out.
//!
//! A flow is a biflow (RFC 5103): the information elements of its first packet's direction, and the reverse elements of the other. All
//! elements are standard ones; [`FLOW`] lists them. The rule is the element `selectorId`, the hash of its content. An options record
//! ([`RULE_NAMES`]) gives the number and the text of each rule as `selectorName`.
//!
//! A message is never longer than the limit of its encoder, so that no datagram is fragmented. The sequence number counts the data
//! records of earlier messages.

use std::mem;

use towpath_wire::{Ends, Flow};

/// Bytes of a message's header (RFC 7011, 3.1).
const HEADER: usize = 16;
const VERSION: u16 = 10;

/// Set ids (RFC 7011, 3.3.2).
const TEMPLATES: u16 = 2;
const OPTIONS_TEMPLATES: u16 = 3;

/// Ids of the templates.
pub const IPV4: u16 = 256;
/// See [`IPV4`].
pub const IPV6: u16 = 257;
/// The options template of rules: `selectorId` (scope) and `selectorName`.
pub const RULE_NAMES: u16 = 258;

/// The private enterprise number of reverse elements (RFC 5103, 6.1).
pub const REVERSE: u32 = 29305;

/// Length of an element of variable length in a template (RFC 7011, 7).
const VARIABLE: u16 = 65_535;

/// Bytes of a `selectorName`. Longer rules are cut.
const NAME_MAX: usize = 254;

/// Information elements by their numbers (<https://www.iana.org/assignments/ipfix>).
pub mod element {
    /// octetDeltaCount
    pub const OCTETS: u16 = 1;
    /// packetDeltaCount
    pub const PACKETS: u16 = 2;
    /// protocolIdentifier
    pub const PROTOCOL: u16 = 4;
    /// sourceTransportPort
    pub const SRC_PORT: u16 = 7;
    /// sourceIPv4Address
    pub const SRC_V4: u16 = 8;
    /// destinationTransportPort
    pub const DST_PORT: u16 = 11;
    /// destinationIPv4Address
    pub const DST_V4: u16 = 12;
    /// sourceIPv6Address
    pub const SRC_V6: u16 = 27;
    /// destinationIPv6Address
    pub const DST_V6: u16 = 28;
    /// forwardingStatus
    pub const FORWARDING_STATUS: u16 = 89;
    /// flowEndReason
    pub const END_REASON: u16 = 136;
    /// flowId
    pub const FLOW_ID: u16 = 148;
    /// flowStartMilliseconds
    pub const START: u16 = 152;
    /// flowEndMilliseconds
    pub const END: u16 = 153;
    /// firewallEvent
    pub const FIREWALL_EVENT: u16 = 233;
    /// ingressVRFID
    pub const INGRESS_VRF: u16 = 234;
    /// biflowDirection
    pub const BIFLOW_DIRECTION: u16 = 239;
    /// selectorId
    pub const SELECTOR_ID: u16 = 302;
    /// selectorName
    pub const SELECTOR_NAME: u16 = 335;
}

use element::*;

/// One field of a template: element, enterprise number (0: none), and bytes.
type Field = (u16, u32, u16);

/// The fields of a flow record after its addresses.
pub const FLOW: &[Field] = &[
    (SRC_PORT, 0, 2),
    (DST_PORT, 0, 2),
    (PROTOCOL, 0, 1),
    (START, 0, 8),
    (END, 0, 8),
    (OCTETS, 0, 8),
    (PACKETS, 0, 8),
    (OCTETS, REVERSE, 8),
    (PACKETS, REVERSE, 8),
    (BIFLOW_DIRECTION, 0, 1),
    (END_REASON, 0, 1),
    (FIREWALL_EVENT, 0, 1),
    (FORWARDING_STATUS, 0, 1),
    (INGRESS_VRF, 0, 4),
    (SELECTOR_ID, 0, 8),
    (FLOW_ID, 0, 8),
];

const V4: &[Field] = &[(SRC_V4, 0, 4), (DST_V4, 0, 4)];
const V6: &[Field] = &[(SRC_V6, 0, 16), (DST_V6, 0, 16)];

/// Why a record was made: `firewallEvent` and `flowEndReason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The flow began.
    Start,
    /// The flow continues: the active timeout.
    Active,
    /// The flow ended: no packet arrived during its lifetime.
    Idle,
    /// The flow ended: its connection was closed.
    End,
    /// The flow ended: its state was removed.
    Forced,
    /// The flow ended: its state was evicted to make room.
    Resources,
}

impl Reason {
    /// `flowEndReason` (RFC 5102, 5.11.3). 0 is reserved: the flow has not ended.
    const fn end_reason(self) -> u8 {
        match self {
            Self::Start => 0,
            Self::Idle => 1,
            Self::Active => 2,
            Self::End => 3,
            Self::Forced => 4,
            Self::Resources => 5,
        }
    }

    /// `firewallEvent`: 1 created, 2 deleted, 5 update.
    const fn firewall_event(self) -> u8 {
        match self {
            Self::Start => 1,
            Self::Active => 5,
            _ => 2,
        }
    }
}

/// One flow record. Pairs are \[forward, reverse\].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRecord {
    /// The flow, in the direction of its first packet.
    pub flow: Flow,
    /// Number of its state.
    pub id: u32,
    /// Hash of the content of its rule; 0: the rule was deleted.
    pub rule: u64,
    /// Whether its rule passes packets. `None`: an inspector decides.
    pub passes: Option<bool>,
    /// Time of its first packet in milliseconds since 1970.
    pub start: u64,
    /// Time of the record in milliseconds since 1970.
    pub end: u64,
    /// Bytes since the last record.
    pub bytes: [u64; 2],
    /// Packets since the last record.
    pub packets: [u64; 2],
    /// Why the record was made.
    pub reason: Reason,
}

/// A message that is being built. See the module documentation.
#[derive(Debug)]
pub struct Encoder {
    domain: u32,
    message_max: usize,
    /// Data records in messages that were taken.
    sequence: u32,
    message: Vec<u8>,
    /// Start and id of the open set.
    set: Option<(usize, u16)>,
    /// Data records in `message`.
    records: u32,
}

/// A complete message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Number of its data records.
    pub records: u32,
}

impl Encoder {
    /// Fewest bytes of a message: the longest set of this encoder fits.
    pub const MESSAGE_MIN: usize = 512;

    /// An encoder of this observation domain, with messages of at most `message_max` bytes, at least [`MESSAGE_MIN`](Self::MESSAGE_MIN).
    pub fn new(domain: u32, message_max: usize) -> Self {
        let message_max = message_max.clamp(Self::MESSAGE_MIN, usize::from(u16::MAX));
        let mut encoder =
            Self { domain, message_max, sequence: 0, message: Vec::new(), set: None, records: 0 };
        encoder.begin();
        encoder
    }

    /// Returns true if nothing waits for [`finish`](Self::finish).
    pub fn is_empty(&self) -> bool {
        self.message.len() == HEADER
    }

    /// Adds all templates. Returns the message before, if they did not fit into it.
    pub fn templates(&mut self, time: u32) -> Option<Message> {
        let mut flows = Vec::new();
        for (id, addresses) in [(IPV4, V4), (IPV6, V6)] {
            let fields: Vec<Field> = addresses.iter().chain(FLOW).copied().collect();
            flows.extend(id.to_be_bytes());
            flows.extend((fields.len() as u16).to_be_bytes());
            fields.iter().for_each(|field| put_field(*field, &mut flows));
        }
        // Two fields, one of them scope.
        let mut rules: Vec<u8> = [RULE_NAMES, 2, 1].iter().flat_map(|word| word.to_be_bytes()).collect();
        put_field((SELECTOR_ID, 0, 8), &mut rules);
        put_field((SELECTOR_NAME, 0, VARIABLE), &mut rules);
        let full = self.room(flows.len() + rules.len() + 8, time);
        for (set, templates) in [(TEMPLATES, flows), (OPTIONS_TEMPLATES, rules)] {
            self.open(set);
            self.message.extend(templates);
            self.close();
        }
        full
    }

    /// Adds a flow record. Returns the message before, if it is full.
    pub fn flow(&mut self, record: &FlowRecord, time: u32) -> Option<Message> {
        let mut data = Vec::with_capacity(128);
        let set = match record.flow.ends {
            Ends::V4(src, dst) => {
                [src, dst].iter().for_each(|address| data.extend(address.octets()));
                IPV4
            }
            Ends::V6(src, dst, _) => {
                [src, dst].iter().for_each(|address| data.extend(address.octets()));
                IPV6
            }
        };
        data.extend(record.flow.src_port.to_be_bytes());
        data.extend(record.flow.dst_port.to_be_bytes());
        data.push(record.flow.proto);
        [record.start, record.end].iter().for_each(|time| data.extend(time.to_be_bytes()));
        for side in [0, 1] {
            data.extend(record.bytes[side].to_be_bytes());
            data.extend(record.packets[side].to_be_bytes());
        }
        // biflowDirection (RFC 5103, 6.3): 1, the source is the initiator.
        data.extend([1, record.reason.end_reason(), record.reason.firewall_event()]);
        // forwardingStatus (RFC 7270, 4.12): 64 forwarded, 128 dropped, 0 unknown.
        data.push(match record.passes {
            Some(true) => 64,
            Some(false) => 128,
            None => 0,
        });
        data.extend(u32::from(record.flow.zone).to_be_bytes());
        data.extend(record.rule.to_be_bytes());
        data.extend(u64::from(record.id).to_be_bytes());
        self.data(set, &data, time)
    }

    /// Adds the name of a rule: its number and its text. Returns the message before, if it is full.
    pub fn rule(&mut self, hash: u64, number: u32, text: &str, time: u32) -> Option<Message> {
        let name = format!("{number} {text}");
        let name = &name[..name.floor_char_boundary(NAME_MAX)];
        let mut data = hash.to_be_bytes().to_vec();
        // Below 255, the length is one byte (RFC 7011, 7).
        data.push(name.len() as u8);
        data.extend(name.as_bytes());
        self.data(RULE_NAMES, &data, time)
    }

    /// Completes the message. `time`: the export time in seconds since 1970. `None`: it is empty.
    pub fn finish(&mut self, time: u32) -> Option<Message> {
        if self.is_empty() {
            return None;
        }
        self.close();
        let length = self.message.len() as u16;
        self.message[2..4].copy_from_slice(&length.to_be_bytes());
        self.message[4..8].copy_from_slice(&time.to_be_bytes());
        self.message[8..12].copy_from_slice(&self.sequence.to_be_bytes());
        let message = Message { bytes: mem::take(&mut self.message), records: self.records };
        self.sequence = self.sequence.wrapping_add(self.records);
        self.begin();
        Some(message)
    }

    fn begin(&mut self) {
        (self.set, self.records) = (None, 0);
        self.message.extend(VERSION.to_be_bytes());
        self.message.resize(HEADER - 4, 0);
        self.message.extend(self.domain.to_be_bytes());
    }

    fn data(&mut self, set: u16, data: &[u8], time: u32) -> Option<Message> {
        let header = if self.set.is_some_and(|(_, open)| open == set) { 0 } else { 4 };
        let full = self.room(header + data.len(), time);
        if self.set.is_none_or(|(_, open)| open != set) {
            self.close();
            self.open(set);
        }
        self.message.extend(data);
        self.records += 1;
        full
    }

    /// Completes the message if it has no room for `bytes` more.
    fn room(&mut self, bytes: usize, time: u32) -> Option<Message> {
        if self.message.len() + bytes > self.message_max { self.finish(time) } else { None }
    }

    fn open(&mut self, set: u16) {
        self.close();
        self.set = Some((self.message.len(), set));
        self.message.extend(set.to_be_bytes());
        self.message.extend([0; 2]);
    }

    fn close(&mut self) {
        if let Some((at, _)) = self.set.take() {
            let length = (self.message.len() - at) as u16;
            self.message[at + 2..at + 4].copy_from_slice(&length.to_be_bytes());
        }
    }
}

/// A field specifier (RFC 7011, 3.2).
fn put_field((element, enterprise, bytes): Field, out: &mut Vec<u8>) {
    let bit = if enterprise == 0 { 0 } else { 0x8000 };
    out.extend((element | bit).to_be_bytes());
    out.extend(bytes.to_be_bytes());
    if enterprise != 0 {
        out.extend(enterprise.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::super::decode::{Collector, Data};
    use super::*;

    fn flow_record() -> impl Strategy<Value = FlowRecord> {
        let reason = prop::sample::select(vec![
            Reason::Start,
            Reason::Active,
            Reason::Idle,
            Reason::End,
            Reason::Forced,
            Reason::Resources,
        ]);
        let flow = (any::<(bool, u128, u128)>(), any::<(u8, u16, u16, u16)>());
        (flow, any::<(u32, u64, Option<bool>, u64, u64, [u64; 2], [u64; 2])>(), reason).prop_map(
            |(((v6, src, dst), (proto, src_port, dst_port, zone)), parts, reason)| {
                let (id, rule, passes, start, end, bytes, packets) = parts;
                let ends = match v6 {
                    true => Ends::V6(Ipv6Addr::from_bits(src), Ipv6Addr::from_bits(dst), 0),
                    false => Ends::V4(Ipv4Addr::from_bits(src as u32), Ipv4Addr::from_bits(dst as u32)),
                };
                let flow = Flow { ends, proto, src_port, dst_port, zone };
                FlowRecord { flow, id, rule, passes, start, end, bytes, packets, reason }
            },
        )
    }

    fn expected(record: &FlowRecord) -> Data {
        let (src, dst) = record.flow.ends.addresses();
        let octets = |address: std::net::IpAddr| match address {
            std::net::IpAddr::V4(address) => address.octets().to_vec(),
            std::net::IpAddr::V6(address) => address.octets().to_vec(),
        };
        let v4 = src.is_ipv4();
        let reason = match record.reason {
            Reason::Start => [0, 1],
            Reason::Active => [2, 5],
            Reason::Idle => [1, 2],
            Reason::End => [3, 2],
            Reason::Forced => [4, 2],
            Reason::Resources => [5, 2],
        };
        let status = match record.passes {
            Some(true) => 64,
            Some(false) => 128,
            None => 0,
        };
        let number = |value: u64| value.to_be_bytes().to_vec();
        let mut data = Data::new();
        let mut put = |element, enterprise, bytes: Vec<u8>| data.insert((enterprise, element), bytes);
        put(if v4 { 8 } else { 27 }, 0, octets(src));
        put(if v4 { 12 } else { 28 }, 0, octets(dst));
        put(7, 0, record.flow.src_port.to_be_bytes().to_vec());
        put(11, 0, record.flow.dst_port.to_be_bytes().to_vec());
        put(4, 0, vec![record.flow.proto]);
        put(152, 0, number(record.start));
        put(153, 0, number(record.end));
        put(1, 0, number(record.bytes[0]));
        put(2, 0, number(record.packets[0]));
        put(1, 29305, number(record.bytes[1]));
        put(2, 29305, number(record.packets[1]));
        put(239, 0, vec![1]);
        put(136, 0, vec![reason[0]]);
        put(233, 0, vec![reason[1]]);
        put(89, 0, vec![status]);
        put(234, 0, u32::from(record.flow.zone).to_be_bytes().to_vec());
        put(302, 0, number(record.rule));
        put(148, 0, number(record.id.into()));
        data
    }

    proptest! {
        /// A collector that knows only the RFC reads every record, in messages of at most the limit, with a gapless sequence.
        #[test]
        fn a_collector_reads_what_was_encoded(
            records in prop::collection::vec(flow_record(), 0..60),
            max in 0_usize..3000,
            domain in any::<u32>(),
            first in any::<u32>(),
        ) {
            let mut encoder = Encoder::new(domain, max);
            encoder.sequence = first;
            let mut messages: Vec<Message> = encoder.templates(1).into_iter().collect();
            messages.extend(encoder.rule(77, 100, "allow ip from any to any", 2));
            for record in &records {
                messages.extend(encoder.flow(record, 3));
            }
            messages.extend(encoder.finish(4));
            prop_assert!(encoder.is_empty() && encoder.finish(5).is_none());
            let mut collector = Collector::default();
            let (mut read, mut sequence) = (Vec::new(), first);
            for Message { bytes, records } in &messages {
                prop_assert!(bytes.len() <= max.max(Encoder::MESSAGE_MIN));
                let message = collector.read(bytes).unwrap();
                prop_assert_eq!((message.domain, message.sequence), (domain, sequence));
                prop_assert_eq!(message.records.len(), *records as usize);
                sequence = sequence.wrapping_add(*records);
                read.extend(message.records);
            }
            let mut rule = Data::new();
            rule.insert((0, 302), 77_u64.to_be_bytes().to_vec());
            rule.insert((0, 335), b"100 allow ip from any to any".to_vec());
            let all: Vec<Data> = std::iter::once(rule).chain(records.iter().map(expected)).collect();
            prop_assert_eq!(read, all);
        }
    }

    #[test]
    fn the_templates_fit_into_the_smallest_message_and_a_long_rule_is_cut() {
        let mut encoder = Encoder::new(1, 0);
        assert_eq!(encoder.templates(0), None);
        let text = "ä".repeat(300);
        let full = encoder.rule(1, 65_535, &text, 0);
        let messages: Vec<Message> = full.into_iter().chain(encoder.finish(0)).collect();
        let mut collector = Collector::default();
        let records: Vec<Data> =
            messages.iter().flat_map(|message| collector.read(&message.bytes).unwrap().records).collect();
        let name = String::from_utf8(records[0][&(0, 335)].clone()).unwrap();
        // One byte less than a whole number of letters.
        assert_eq!(name, format!("65535 {}", "ä".repeat(124)));
    }

    #[test]
    fn damaged_messages_are_refused_by_the_collector_of_the_tests() {
        let mut encoder = Encoder::new(1, 1400);
        encoder.templates(0);
        let message = encoder.finish(0).unwrap().bytes;
        for length in 0..message.len() {
            assert!(Collector::default().read(&message[..length]).is_err(), "{length}");
        }
        let mut other = message.clone();
        other[1] = 9;
        assert!(Collector::default().read(&other).is_err());
    }
}
