//! The counters of a replica.

use towpath_metrics::metrics;

metrics! {
    /// Replication of states in a group of gates.
    pub struct FleetStats in "fleet" {
        /// The gate is connected to a server of the bus.
        pub connected: gauge events,
        /// The gate has the states of its peers: no snapshot and no replay is open.
        pub in_step: gauge events,
        /// Peers that were heard in the last three seconds.
        pub peers: gauge events,
        /// Time of the last batch from its sender to this gate, beyond the shortest one of the last minutes.
        pub lag: gauge nanoseconds,
        /// States that were sent in batches.
        pub sent: counter states,
        /// Batches that were sent, with those that only show that the gate is alive.
        pub batches: counter messages,
        /// States that were received in batches, without repetitions.
        pub received: counter states,
        /// States of peers that were inserted.
        pub created: counter states,
        /// Records of peers that were merged into a live state.
        pub merged: counter states,
        /// States of `strict` rules that were inserted; their TCP windows are unknown until segments are seen.
        pub without_window: counter states,
        /// States that were removed because a peer has removed them.
        pub removed: counter states,
        /// States that were not sent, by reason: no reply when they ended.
        pub not_sent_unreplied: counter states as "not_sent": "States that were not sent, by reason." (reason = "unreplied"),
        /// States that were not sent, by reason: they ended while they waited.
        pub not_sent_ended: counter states as "not_sent" (reason = "ended"),
        /// States that were not sent, by reason: the bus was away. A snapshot follows.
        pub not_sent_away: counter states as "not_sent" (reason = "away"),
        /// States that were not sent, by reason: the bus was slower than the changes. A snapshot follows.
        pub not_sent_busy: counter states as "not_sent" (reason = "busy"),
        /// Changes that were not sent: the thread missed them in the journal. The next walk sends them.
        pub not_sent_missed: counter states as "not_sent" (reason = "missed"),
        /// Records of peers that were refused, by reason: no rule of this gate would create the state.
        pub refused_rules: counter states as "refused": "Records of peers that were refused, by reason." (reason = "rules"),
        /// Records of peers that were refused, by reason: the table has no room.
        pub refused_full: counter states as "refused" (reason = "full"),
        /// Records of peers that were refused, by reason: a limit by source or rule.
        pub refused_limit: counter states as "refused" (reason = "limit"),
        /// Records of peers that were refused, by reason: no number is free for the flow name.
        pub refused_names: counter states as "refused" (reason = "names"),
        /// Records of peers that were refused, by reason: the state expired on its way.
        pub refused_expired: counter states as "refused" (reason = "expired"),
        /// Records of peers that were refused, by reason: another version of records.
        pub refused_version: counter states as "refused" (reason = "version"),
        /// Records of peers that were refused, by reason: the state was removed after they were sent.
        pub refused_removed: counter states as "refused" (reason = "removed"),
        /// Messages that were refused, by reason: malformed.
        pub messages_malformed: counter messages as "refused": "Messages that were refused, by reason." (reason = "malformed"),
        /// Messages that were refused, by reason: only newer versions can read them.
        pub messages_version: counter messages as "refused" (reason = "version"),
        /// Messages that were refused, by reason: too many gates.
        pub messages_peers: counter messages as "refused" (reason = "peers"),
        /// Messages that were refused, by reason: another gate has the name of this one.
        pub messages_own_name: counter messages as "refused" (reason = "own_name"),
        /// Messages that were refused, by reason: the server sent a copy of a message under another subject.
        pub messages_republished: counter messages as "refused" (reason = "republished"),
        /// Messages that were refused, by reason: too much waited for this gate. A replay or a snapshot follows.
        pub messages_busy: counter messages as "refused" (reason = "busy"),
        /// Batches that were received twice.
        pub repeated: counter messages,
        /// Gaps in the sequence of a peer's batches.
        pub gaps: counter events,
        /// Gaps that the stream of the bus has filled.
        pub replayed: counter events,
        /// Replays of the stream that did not end, or failed. A snapshot fills the gap.
        pub replays_failed: counter events,
        /// Gaps that a snapshot of the peer has filled.
        pub resynced: counter events,
        /// Snapshots that were received.
        pub snapshots: counter events,
        /// Snapshots that were begun again: the peer did not answer, or has restarted.
        pub snapshots_failed: counter events,
        /// States in chunks of snapshots that were received.
        pub snapshot_received: counter states,
        /// States in chunks of snapshots that were sent to peers.
        pub snapshot_sent: counter states,
        /// Requests of peers for chunks that were refused, because too many were open.
        pub requests_refused: counter messages,
    }
}
