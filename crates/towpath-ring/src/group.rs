//! Groups of the engine's ring for dumps and events, which is next to its control socket (`CONTROL.ring`).
//!
//! A client asks with [`Consumer::request`](crate::Consumer::request). The answer is frames with the same group. An invalid request is answered
//! with [`Kind::ERROR`](crate::Kind::ERROR), whose `mark` is an errno(3).

/// A dump of the states: frames of [`Kind::DUMP`](crate::Kind::DUMP), then one of [`Kind::DONE`](crate::Kind::DONE).
pub const STATES: u32 = 1;

/// Changes of states: a frame of [`Kind::DONE`](crate::Kind::DONE), and then a frame of [`Kind::EVENT`](crate::Kind::EVENT) for each change.
pub const EVENTS: u32 = 2;

/// Logged packets: a frame of [`Kind::DONE`](crate::Kind::DONE), and then a frame of [`Kind::PACKET`](crate::Kind::PACKET) for each packet of a
/// rule with `log`.
pub const PACKETS: u32 = 3;
