//! The handshake over the Unix socket: its messages, and the client's side of it.

pub(crate) mod attach;
pub(crate) mod attach_error;
pub(crate) mod messages;
