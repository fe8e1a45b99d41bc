//! The table of the states' counters.

use towpath_metrics::metrics;

metrics! {
    /// Events of the states of a gate since it was made, and the occupancy of the table.
    pub struct Counters in "states" {
        /// States created, including those restored from a snapshot. Equals `now + expired + removed + evicted`.
        pub created: counter states,
        /// States collected after they expired.
        pub expired: counter states,
        /// States removed with their rule or by request.
        pub removed: counter states,
        /// States evicted to make room (`dyn_evict`).
        pub evicted: counter states,
        /// Packets refused a state because there were `dyn_max` states.
        pub full: counter packets as "refused": "Packets that did not get a dynamic state, by reason." (reason = "full"),
        /// Packets refused a state because the rule's `limit` was reached.
        pub over_limit: counter packets as "refused" (reason = "over_limit"),
        /// Packets refused a state because the rule's `limit` per second was reached.
        pub over_rate: counter packets as "refused" (reason = "over_rate"),
        /// Packets refused a state because their `limit` needed another parent and there were `dyn_parent_max`.
        pub parents_full: counter packets as "refused" (reason = "parents_full"),
        /// Packets refused a state because their source had `dyn_source_max` states.
        pub over_source: counter packets as "refused" (reason = "over_source"),
        /// Packets refused a state because they do not fit into their TCP connection, or do not open one (`strict`).
        pub invalid: counter packets as "refused" (reason = "invalid"),
        /// First SYNs of their flow, which must be repeated (`dyn_first_syn`).
        pub first_syn: counter packets as "refused" (reason = "first_syn"),
        /// Packets that did not match their flow's state because they do not fit into its TCP connection (`strict`).
        pub unfit: counter packets,
        /// ICMP errors that matched the state of the packet that they quote.
        pub related: counter packets,
        /// Times that the number of states rose to 9/10 of `dyn_max` after it was below 8/10.
        pub nearly_full: counter events,
        /// Waits for a lock of the index whose holder was preempted: the thread yielded its CPU, and then slept 50 us at a time.
        pub preempted: counter events,
        /// States held, including those that have expired and were not collected yet.
        pub now: gauge states,
        /// The largest number of states held at the same time.
        pub peak: gauge states,
        /// States without a reply, or whose initiator did not complete the TCP or SCTP handshake. In a SYN flood, most states.
        pub unreplied: gauge states,
        /// Slots of unlinked states that are not free yet because a worker may still read them. They count toward `max`.
        pub waiting: gauge states,
        /// `dyn_max`, the maximum number of states.
        pub max: gauge states,
        /// Parents held: the entries that `limit` counts in.
        pub parents: gauge events,
        /// `dyn_parent_max`, the maximum number of parents.
        pub parents_max: gauge events,
    }
}
