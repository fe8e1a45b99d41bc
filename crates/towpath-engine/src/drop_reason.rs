//! Outcomes of packets and the table of drop reasons.

use std::fmt;
use std::ops::{Index, IndexMut};

use towpath_gate::{self as gate, Reject};
use towpath_metrics::{Kind, Metric, Metrics, Unit};

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
    Undecodable "undecodable" "Malformed packet; no rule was evaluated."
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
    NoTableHop "no_table_hop" "The table value of `fwd` has no address of the packet's family."
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
    NoRoute "no_route" "No route to the destination."
    TtlExceeded "ttl_exceeded" "TTL or hop limit exceeded in transit."
    NoNextHop "no_next_hop" "The route has no usable next hop."
    TooLong "too_long" "Longer than the MTU and not fragmentable; the sender gets an ICMP error."
    Unresolved "unresolved" "The next hop did not answer ARP or neighbor discovery."
    NotOurs "not_ours" "Received by link-layer broadcast or multicast and not to be forwarded (RFC 1812 section 5.3.4)."
    TxNoBuffer "tx_no_buffer" "No room in the copy buffer of the transmit queue."
    TxFull "tx_full" "The port's transmit queue was full."
    TxRefused "tx_refused" "The port refused the frame."
    Shutdown "shutdown" "Still undecided when the engine stopped."
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
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
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
