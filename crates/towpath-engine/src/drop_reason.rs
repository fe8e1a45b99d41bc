//! Outcomes of packets and the table of drop reasons.

use std::fmt;
use std::ops::{Index, IndexMut};

use towpath_gate::{self as gate, Reject};
use towpath_metrics::{Kind, Metric, Metrics, Unit};
use towpath_port::TxDrop;
use towpath_wire::Malformed;

/// The outcome of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The packet left, or was delivered to the router itself.
    Passed,
    /// The packet was dropped.
    Dropped(DropReason),
    /// A rule or an inspector rejected the packet: it is dropped, and its sender is told. `None` is the answer to an
    /// inspector's rejection: a reset for TCP, port unreachable otherwise.
    Rejected(Option<Reject>),
}

macro_rules! drop_reasons {
    ($($variant:ident $name:literal $help:literal)+) => {
        /// Why a packet was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DropReason {
            $(#[doc = $help] $variant,)+
        }

        impl DropReason {
            /// Every reason, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name in reports, metrics and JSON.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// The words of a line of the log: `Drop (no_route)`.
            pub const fn log_words(self) -> &'static str {
                match self { $(Self::$variant => concat!("Drop (", $name, ")"),)+ }
            }

            /// A sentence that explains the reason.
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)+ }
            }
        }

        const METRICS: &[Metric] = &[$(Metric {
            group: "engine",
            name: $name,
            stem: "dropped",
            kind: Kind::Counter,
            unit: Unit::Packets,
            label: Some(("reason", $name)),
            help: $help,
            family_help: Some("Packets dropped, by reason."),
        }),+];
    };
}

drop_reasons! {
    MalformedLink "malformed_link" "The link header is longer than the frame."
    MalformedTags "malformed_tags" "More than 16 VLAN tags or MPLS labels."
    MalformedVersion "malformed_version" "The version of the IP header is not that of the EtherType."
    MalformedIp4 "malformed_ip4" "Fewer than 20 bytes of IPv4 header."
    MalformedIp4HeaderLength "malformed_ip4_header_length" "IPv4 header length below 20 bytes or beyond the packet."
    MalformedIp4TotalLength "malformed_ip4_total_length" "IPv4 total length below the header length or beyond the frame."
    MalformedIp6 "malformed_ip6" "Fewer than 40 bytes of IPv6 header."
    MalformedIp6PayloadLength "malformed_ip6_payload_length" "IPv6 payload length beyond the frame."
    MalformedIp6Jumbo "malformed_ip6_jumbo" "IPv6 jumbo payload option that does not fit the packet."
    MalformedIp6Extension "malformed_ip6_extension" "IPv6 extension header that ends beyond the packet."
    MalformedIp6Extensions "malformed_ip6_extensions" "More than 16 IPv6 extension headers."
    MalformedUpper "malformed_upper" "The packet or its first fragment ends inside the upper-layer header."
    MalformedTcpOffset "malformed_tcp_offset" "TCP data offset below 20 bytes or beyond the segment."
    MalformedUdpLength "malformed_udp_length" "UDP length below 8 bytes or beyond the packet."
    MalformedUdpliteCoverage "malformed_udplite_coverage" "UDP-Lite checksum coverage of 1 to 7 bytes or beyond the packet."
    MalformedCapture "malformed_capture" "The capture has too few bytes of the headers."
    Rule "rule" "Denied by a rule."
    StatesFull "states_full" "The rule needs a dynamic state, and `dyn_max` states exist."
    OverLimit "over_limit" "The flow exceeds the number of states that a `limit` option allows."
    OverRate "over_rate" "The flow exceeds the rate that a `limit` option allows."
    LimitsFull "limits_full" "The `limit` option needs a parent entry, and `dyn_parent_max` entries exist."
    OverSource "over_source" "The source address has `dyn_source_max` states."
    StateInvalid "state_invalid" "The packet does not fit its connection (`strict`)."
    FirstSyn "first_syn" "First SYN of a connection; only a retransmitted SYN passes (`dyn_first_syn`)."
    StateNotIp "state_not_ip" "The rule needs a dynamic state and the packet is not IP."
    TinyFragment "tiny_fragment" "IPv4 TCP fragment at offset 1 (RFC 3128)."
    UnknownHeader "unknown_header" "Unknown IPv6 extension header."
    CallDepth "call_depth" "More than 16 nested `call` actions."
    RuleLoop "rule_loop" "The packet made more than 256 jumps between rules."
    RulesChanged "rules_changed" "The rule to return to was deleted."
    Policed "policed" "The packet exceeds the rate of a pipe."
    NoPipe "no_pipe" "The pipe of the rule is not configured."
    NoTableHop "no_table_hop" "`fwd` or its table value has no address of the packet's family."
    Inspector "inspector" "Dropped by an inspector."
    Overdue "overdue" "No verdict within the queue's deadline."
    InvalidVerdict "invalid_verdict" "The inspector's verdict was invalid."
    InspectorDied "inspector_died" "The inspector died."
    QueueFull "queue_full" "The inspector had no room."
    NoInspector "no_inspector" "The queue has no inspector."
    ReinjectLimit "reinject_limit" "Inspectors sent the packet to rules or queues more than 16 times."
    ReplaceLimit "replace_limit" "The inspector's share of the reorder buffer has no room for the replaced payload."
    BadReplacement "bad_replacement" "An inspector replaced the packet by a malformed one, or a routed packet by one that cannot be routed."
    NoRoom "no_room" "No room in the reorder buffer for the share of the packet's queue."
    Reassembly "reassembly" "Fragment of a datagram that was never complete, or that overlaps another."
    NotServed "not_served" "For an address of the router, which answers only echo requests, ARP and neighbor discovery."
    NoRoute "no_route" "No route to the destination."
    TtlExceeded "ttl_exceeded" "TTL or hop limit exceeded in transit."
    NoNextHop "no_next_hop" "The route has no usable next hop."
    TooLong "too_long" "Longer than the MTU and not fragmentable; the sender gets an ICMP error."
    Unresolved "unresolved" "The next hop did not answer ARP or neighbor discovery."
    NotOurs "not_ours" "Received by link-layer broadcast or multicast and not to be forwarded (RFC 1812 section 5.3.4)."
    TxNoBuffer "tx_no_buffer" "No room in the copy buffer of the transmit queue."
    TxFull "tx_full" "The port's transmit queue was full."
    PortDown "port_down" "The port's interface is down or gone."
    TxRefusedEperm "tx_refused_eperm" "The kernel refused the frame: EPERM, a firewall rule of the host."
    TxRefusedEinval "tx_refused_einval" "The kernel refused the frame: EINVAL, type or metadata."
    TxRefusedEmsgsize "tx_refused_emsgsize" "The kernel refused the frame: EMSGSIZE, longer than the interface's MTU."
    TxRefusedEnetunreach "tx_refused_enetunreach" "The kernel refused the packet: ENETUNREACH, no route of the host."
    TxRefusedEhostunreach "tx_refused_ehostunreach" "The kernel refused the packet: EHOSTUNREACH, no neighbor of the host."
    TxRefused "tx_refused" "The port or the kernel refused the frame for another reason."
    Shutdown "shutdown" "Still undecided when the engine stopped."
}

impl DropReason {
    /// The reasons that a word names: the reason with this name, and those whose names continue it after an underscore
    /// (`malformed`, `tx_refused`). `any` is all of them. Empty if there is none.
    pub fn named(word: &str) -> Vec<Self> {
        let is_named = |name: &str| {
            word == "any"
                || name.strip_prefix(word).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        };
        Self::ALL.iter().copied().filter(|reason| !word.is_empty() && is_named(reason.name())).collect()
    }

    /// Returns true if a rule or an inspector decided the drop, or if it occurs in normal operation. Rules have `log` for it.
    pub const fn is_decision(self) -> bool {
        matches!(
            self,
            Self::Rule
                | Self::Policed
                | Self::Inspector
                | Self::StateInvalid
                | Self::FirstSyn
                | Self::NotOurs
        )
    }

    /// Returns true if the gate logs the drop, because a rule's state was refused.
    pub(crate) const fn is_logged_by_gate(self) -> bool {
        matches!(
            self,
            Self::StatesFull | Self::OverLimit | Self::OverRate | Self::LimitsFull | Self::OverSource
        )
    }
}

impl From<Malformed> for DropReason {
    fn from(malformed: Malformed) -> Self {
        match malformed {
            Malformed::LinkCut => Self::MalformedLink,
            Malformed::TooManyTags => Self::MalformedTags,
            Malformed::Version => Self::MalformedVersion,
            Malformed::Ip4Cut => Self::MalformedIp4,
            Malformed::Ip4HeaderLength => Self::MalformedIp4HeaderLength,
            Malformed::Ip4TotalLength => Self::MalformedIp4TotalLength,
            Malformed::Ip6Cut => Self::MalformedIp6,
            Malformed::Ip6PayloadLength => Self::MalformedIp6PayloadLength,
            Malformed::Ip6Jumbo => Self::MalformedIp6Jumbo,
            Malformed::Ip6ExtensionCut => Self::MalformedIp6Extension,
            Malformed::Ip6TooManyExtensions => Self::MalformedIp6Extensions,
            Malformed::UpperCut => Self::MalformedUpper,
            Malformed::TcpDataOffset => Self::MalformedTcpOffset,
            Malformed::UdpLength => Self::MalformedUdpLength,
            Malformed::UdpLiteCoverage => Self::MalformedUdpliteCoverage,
            Malformed::CaptureCut => Self::MalformedCapture,
        }
    }
}

impl From<TxDrop> for DropReason {
    fn from(reason: TxDrop) -> Self {
        match reason {
            TxDrop::Full => Self::TxFull,
            TxDrop::Down => Self::PortDown,
            TxDrop::Eperm => Self::TxRefusedEperm,
            TxDrop::Einval => Self::TxRefusedEinval,
            TxDrop::Emsgsize => Self::TxRefusedEmsgsize,
            TxDrop::Enetunreach => Self::TxRefusedEnetunreach,
            TxDrop::Ehostunreach => Self::TxRefusedEhostunreach,
            TxDrop::Other => Self::TxRefused,
        }
    }
}

impl fmt::Display for DropReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<gate::DropReason> for DropReason {
    fn from(reason: gate::DropReason) -> Self {
        use gate::DropReason as Gate;
        use towpath_gate::state::Refused;
        match reason {
            Gate::Deny => Self::Rule,
            Gate::NoState(Refused::Full) => Self::StatesFull,
            Gate::NoState(Refused::OverLimit) => Self::OverLimit,
            Gate::NoState(Refused::OverRate) => Self::OverRate,
            Gate::NoState(Refused::ParentsFull) => Self::LimitsFull,
            Gate::NoState(Refused::OverSource) => Self::OverSource,
            Gate::NoState(Refused::Invalid) => Self::StateInvalid,
            Gate::NoState(Refused::FirstSyn) => Self::FirstSyn,
            Gate::NotIp => Self::StateNotIp,
            Gate::TinyFragment => Self::TinyFragment,
            Gate::UnknownHeader => Self::UnknownHeader,
            Gate::CallDepth => Self::CallDepth,
            Gate::Loop => Self::RuleLoop,
            Gate::Reloaded => Self::RulesChanged,
            Gate::Policed => Self::Policed,
            Gate::NoPipe => Self::NoPipe,
            Gate::NoNextHop => Self::NoTableHop,
        }
    }
}

/// Dropped packets by reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drops([u64; DropReason::ALL.len()]);

impl Default for Drops {
    fn default() -> Self {
        Self([0; DropReason::ALL.len()])
    }
}

impl Drops {
    /// The metrics, in the order of [`DropReason::ALL`].
    pub const TABLE: &'static [Metric] = METRICS;

    /// The sum over all reasons.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds every counter of `other`.
    pub fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(own, other)| *own += other);
    }

    /// The reasons that occurred, with their counters.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + use<> {
        DropReason::ALL.iter().copied().zip(self.0).filter(|(_, count)| *count > 0)
    }
}

impl Index<DropReason> for Drops {
    type Output = u64;

    fn index(&self, reason: DropReason) -> &u64 {
        &self.0[reason as usize]
    }
}

impl IndexMut<DropReason> for Drops {
    fn index_mut(&mut self, reason: DropReason) -> &mut u64 {
        &mut self.0[reason as usize]
    }
}

impl Metrics for Drops {
    fn table(&self) -> &'static [Metric] {
        METRICS
    }

    fn value(&self, index: usize) -> u64 {
        self.0[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_snake_case() {
        let mut names: Vec<_> = DropReason::ALL.iter().map(|reason| reason.name()).collect();
        for name in &names {
            assert!(
                name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'),
                "{name}"
            );
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), DropReason::ALL.len());
    }

    #[test]
    fn drops_are_counted_by_reason() {
        let mut drops = Drops::default();
        drops[DropReason::Rule] += 2;
        drops[DropReason::TxFull] += 1;
        let mut all = drops;
        all.add(&drops);
        assert_eq!(all.total(), 6);
        assert_eq!(all.iter().collect::<Vec<_>>(), [(DropReason::Rule, 4), (DropReason::TxFull, 2)]);
        let counted: Vec<_> = all
            .values()
            .filter(|(_, value)| *value > 0)
            .map(|(metric, value)| (metric.name, value))
            .collect();
        assert_eq!(counted, [("rule", 4), ("tx_full", 2)]);
    }
}
