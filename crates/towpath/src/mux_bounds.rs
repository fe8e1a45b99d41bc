//! Bounds of a mux, as options of `towpath mux` and keys of `[mux.NAME]`.

use std::time::Duration;

use towpath_mux::assembler::Limits;
use towpath_mux::framing::Framing;
use towpath_mux::mux::{Bound, Config};

/// Bounds that differ from their default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MuxBounds {
    /// Bytes of a message before its length is known; for BPF programs.
    pub head: Option<usize>,
    /// Bytes of a connection's whole messages that are queued or with workers.
    pub connection_bytes: Option<usize>,
    /// Bytes of replies that the peer has not taken, above which its connection is not read.
    pub send_bytes: Option<usize>,
    /// Bytes of such replies above which the connection ends.
    pub send_most: Option<usize>,
    /// All bytes that the mux holds.
    pub mux_bytes: Option<usize>,
    /// Time without progress after which a connection with data to send ends.
    pub send_time: Option<Duration>,
}

impl MuxBounds {
    /// Returns the limits of a connection and the configuration of a mux with these bounds.
    pub fn apply(&self, limits: Limits, config: Config) -> (Limits, Config) {
        let limits = Limits { head: self.head.unwrap_or(limits.head), ..limits };
        let config = Config {
            psock_bytes: self.connection_bytes.map_or(config.psock_bytes, Bound::of),
            send_bytes: self.send_bytes.map_or(config.send_bytes, Bound::of),
            send_most: self.send_most.unwrap_or(config.send_most),
            mux_bytes: self.mux_bytes.map_or(config.mux_bytes, Bound::of),
            send_time: self.send_time.or(config.send_time),
            ..config
        };
        (limits, config)
    }

    /// Why the bound of the head has no effect with this framing, if it has none.
    pub fn unused_head(&self, framing: &Framing) -> Option<&'static str> {
        let unused = self.head.is_some() && framing.bounds_head();
        unused.then_some("it bounds the head itself, with head=N or max=N in its clauses")
    }
}

#[cfg(test)]
mod tests {
    use towpath_mux::mux::Order;

    use super::*;

    #[test]
    fn a_bound_replaces_its_default() {
        let (limits, config) = (Limits::default(), Config::new(Order::None));
        assert_eq!(MuxBounds::default().apply(limits, config), (limits, config));
        let bounds = MuxBounds {
            head: Some(1),
            connection_bytes: Some(20),
            send_bytes: Some(30),
            send_most: Some(4),
            mux_bytes: Some(50),
            send_time: Some(Duration::from_secs(6)),
        };
        let expected = Config {
            psock_bytes: Bound { high: 20, low: 10 },
            send_bytes: Bound { high: 30, low: 15 },
            send_most: 4,
            mux_bytes: Bound { high: 50, low: 25 },
            send_time: Some(Duration::from_secs(6)),
            ..config
        };
        assert_eq!(bounds.apply(limits, config), (Limits { head: 1, ..limits }, expected));
        let line = "line".parse().unwrap();
        assert!(bounds.unused_head(&line).is_some() && MuxBounds::default().unused_head(&line).is_none());
    }
}
