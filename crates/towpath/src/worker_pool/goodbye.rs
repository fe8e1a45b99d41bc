//! What happens to the connections of a worker that ends, and the last message of such a connection.

use towpath_mux::mux::{OnWorkerEnd, Order};

/// What happens to the connections of a worker that ends (`--on-worker-end`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// Other workers continue them.
    Move,
    /// They are closed, with the goodbye of their protocol if its preset has one.
    Close,
}

impl WorkerEnd {
    /// The default of an order: a sticky worker has state of its connections, which ends with it.
    pub const fn of(order: Order) -> Self {
        match order {
            Order::Sticky => Self::Close,
            _ => Self::Move,
        }
    }

    /// The configuration of the core, for a framing with this name.
    pub fn config(self, framing: &str) -> OnWorkerEnd {
        match self {
            Self::Move => OnWorkerEnd::Move,
            Self::Close => OnWorkerEnd::Close { goodbye: goodbye(framing) },
        }
    }
}

/// The message with which a server of this preset announces the end of a connection; empty if its protocol has none.
fn goodbye(preset: &str) -> &'static [u8] {
    match preset {
        // RESP has no such message but an error.
        "resp" => b"-ERR the server process of this connection ended\r\n",
        // ErrorResponse with SQLSTATE 57P01, admin_shutdown (PostgreSQL, Appendix A and 53.7).
        "postgres-frontend" => b"E\0\0\0\x38SFATAL\0VFATAL\0C57P01\0Mthe server process has ended\0\0",
        // ERR_Packet with ER_SERVER_SHUTDOWN, in the sequence of a new command.
        "mysql-packet" => b"\x18\0\0\0\xff\x1d\x04#08S01server shutdown",
        // GOAWAY, NO_ERROR; any stream may have been processed (RFC 9113, 6.8).
        "http2-frame" => b"\0\0\x08\x07\0\0\0\0\0\x7f\xff\xff\xff\0\0\0\0",
        // Close frame with 1001, going away (RFC 6455, 5.5.1 and 7.4.1).
        "websocket" => b"\x88\x02\x03\xe9",
        _ => b"",
    }
}

#[cfg(test)]
mod tests {
    use towpath_mux::framing::Framing;

    use super::*;

    #[test]
    fn goodbyes_are_whole_messages_of_their_protocols() {
        let length = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        let postgres = goodbye("postgres-frontend");
        assert_eq!(length(&postgres[1..5]) + 1, postgres.len());
        let mysql = goodbye("mysql-packet");
        assert_eq!(usize::from(mysql[0]) + 4, mysql.len());
        let http = goodbye("http2-frame");
        assert_eq!(length(&http[..3]) + 9, http.len());
        let websocket = goodbye("websocket");
        assert_eq!(usize::from(websocket[1]) + 2, websocket.len());
        for preset in ["resp", "postgres-frontend", "mysql-packet", "http2-frame", "websocket"] {
            assert!(!goodbye(preset).is_empty());
            Framing::preset(preset).expect("a preset");
        }
        assert_eq!(goodbye("line"), b"");
    }
}
