//! The counters of an engine.

use towpath_metrics::metrics;

use crate::drop_reason::Drops;

metrics! {
    /// Packet counters of an engine.
    pub struct Stats in "engine" {
        /// Packets received.
        pub packets: counter packets,
        /// Bytes received, as on the wire.
        pub bytes: counter bytes,
        /// Packets that left, were delivered to the router itself, or were accepted on a monitored port.
        pub passed: counter packets,
        /// Packets that a rule or an inspector rejected.
        pub rejected: counter packets,
        /// Packets that at least one inspector got.
        pub inspected: counter packets,
    }
}

/// The packets of an engine by outcome. `packets = passed + dropped + rejected + held`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Received, passed and rejected packets.
    pub stats: Stats,
    /// Dropped packets by reason.
    pub drops: Drops,
}

impl Totals {
    /// Dropped packets, for any reason.
    pub fn dropped(&self) -> u64 {
        self.drops.total()
    }

    /// Packets without an outcome: they wait for a verdict, for room, for other fragments, or for a neighbor.
    pub fn held(&self) -> u64 {
        self.stats.packets - self.stats.passed - self.stats.rejected - self.dropped()
    }

    /// Adds the packets of another engine.
    pub fn add(&mut self, other: &Self) {
        self.stats.add(&other.stats);
        self.drops.add(&other.drops);
    }
}

metrics! {
    /// Answers to rejected packets. `rejected = sent + silent + limited + unsent`.
    pub struct ReplyStats in "engine" {
        /// Answers that were sent.
        pub sent: counter packets as "replies": "Answers to rejected packets, by result." (result = "sent"),
        /// Rejected packets that get no answer, or one answer together with other fragments of their datagram.
        pub silent: counter packets as "replies" (result = "silent"),
        /// Answers that were not sent because the port had reached its rate limit.
        pub limited: counter packets as "replies" (result = "limited"),
        /// Answers that the port could not send.
        pub unsent: counter packets as "replies" (result = "unsent"),
    }
}

metrics! {
    /// Conversations of a replay.
    pub struct ConversationStats in "engine" {
        /// TCP conversations.
        pub tcp: counter connections as "conversations": "Conversations of a replay, by protocol." (protocol = "tcp"),
        /// UDP conversations.
        pub udp: counter connections as "conversations" (protocol = "udp"),
    }
}
