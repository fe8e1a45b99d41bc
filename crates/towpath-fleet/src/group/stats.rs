//! The counters of a group's configuration.

use towpath_metrics::metrics;

metrics! {
    /// Configuration and tables of a group of gates.
    pub struct GroupStats in "fleet_group" {
        /// The version of the group's configuration that this gate has applied; 0 without one.
        pub version: gauge events,
        /// A version that this gate could not apply; 0 without one.
        pub failed: gauge events,
        /// Gates in touch that take their configuration from the group, with this one.
        pub gates: gauge events,
        /// Versions that were applied.
        pub applied: counter events,
        /// Versions that could not be applied.
        pub not_applied: counter events,
        /// Versions that were checked for another gate.
        pub checks: counter events,
        /// Versions of another gate that this one refused.
        pub checks_refused: counter events,
        /// Messages about the configuration that were not sent: too many waited for the server.
        pub not_sent: counter messages,
        /// Messages about the configuration that were refused, by reason: malformed.
        pub messages_malformed: counter messages as "refused": "Messages about the configuration that were refused, by reason." (reason = "malformed"),
        /// Messages about the configuration that were refused, by reason: only newer versions can read them.
        pub messages_version: counter messages as "refused" (reason = "version"),
        /// Messages about the configuration that were refused, by reason: too many gates.
        pub messages_peers: counter messages as "refused" (reason = "peers"),
        /// Messages about the configuration that were refused, by reason: another gate has the name of this one.
        pub messages_own_name: counter messages as "refused" (reason = "own_name"),
        /// Messages about the configuration that were refused, by reason: the server sent a copy of a message.
        pub messages_republished: counter messages as "refused" (reason = "republished"),
        /// Messages about the configuration that were refused, by reason: too many waited while this gate checked a version.
        pub messages_busy: counter messages as "refused" (reason = "busy"),
    }
}

metrics! {
    /// Table entries of a group of gates.
    pub struct TableStats in "fleet_tables" {
        /// Number of the last message of the stream that was applied.
        pub seq: gauge events,
        /// All messages of the stream have been applied.
        pub caught_up: gauge events,
        /// Tables whose entries come from the group.
        pub tables: gauge events,
        /// Messages of the stream that were received.
        pub messages: counter messages,
        /// Changes of entries that were received.
        pub entries: counter events,
        /// Changes of entries that were refused: the table does not exist, or the entry is wrong.
        pub refused: counter events,
        /// Loads and snapshots that replaced a table.
        pub loads: counter events,
        /// Loads and snapshots that were refused: the table does not exist, or an entry is wrong.
        pub loads_refused: counter events,
        /// Loads and snapshots of which a part was missing, or which were too long.
        pub loads_incomplete: counter events,
        /// Messages of the stream that were refused, by reason: malformed.
        pub messages_malformed: counter messages as "refused": "Messages of the stream that were refused, by reason." (reason = "malformed"),
        /// Messages of the stream that were refused, by reason: too many tables.
        pub messages_tables: counter messages as "refused" (reason = "tables"),
        /// Messages of the stream that were refused, by reason: the server sent a copy of another message.
        pub messages_republished: counter messages as "refused" (reason = "republished"),
    }
}
