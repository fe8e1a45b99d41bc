//! Order of messages and replies.

/// Ordering of messages that several workers process in parallel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// No ordering: the first free worker takes the next message (KCM). For protocols whose messages have ids.
    None,
    /// Messages are processed in parallel. Replies to a connection are sent in the order of its messages.
    #[default]
    Replies,
    /// One message of a connection at a time, on any worker.
    Serial,
    /// All messages of a connection go to one worker until it leaves: to the one with the fewest connections when the first
    /// message arrives. See [`crate::mux::Config::rebalance`].
    Sticky,
    /// One message with the same hash ([`crate::framing::Message::hash`]) at a time, over all connections and
    /// workers. Messages with hash 0 have no key and are not ordered.
    Key,
}

impl Order {
    /// Its name on the command line and in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Replies => "replies",
            Self::Serial => "serial",
            Self::Sticky => "sticky",
            Self::Key => "key",
        }
    }
}
