//! Upgrade: a running process starts a new one of the same path, hands over what it holds, and ends.
//!
//! ```text
//! old process                                     new process (its child; standard input is the channel)
//! Hello(version, service), Object...     ---->    takes the objects, prepares to serve
//!                                        <----    Ready, or Refused(reason)
//! Go                                     ---->    serves
//! stops accepting, keeps the listeners   <----    Serving
//! Item, bytes...                         ---->    continues them
//! Done: closes listeners, gives up files ---->    has the files, closes the channel
//! ```
//!
//! Parts: `message.rs` has the messages, `channel.rs` their transport, `successor.rs` the old process's side, `predecessor.rs` the new
//! one's. What objects and items are is a matter of the service; `worker_pool/upgrade.rs` is the mux's.
//!
//! Invariants:
//! - Until Done, the old process has the listeners and owns their files: after a refusal, an exit, or a time limit, it continues as
//!   before. Items that the new process has are lost with it; none is sent before [`TRIAL`] has passed.
//! - A descriptor is open in one of the processes, or in the channel, at every time. A listening socket is never closed in between.
//! - Each message carries at most one descriptor, and each packet has at most 32 KiB.
//! - Ending, from either side after Serving (in `towpath run`, from the old process only): this process was told to end, and the other one ends too.
//! - Neither side waits for the other: the channel does not block. The handshake of the new process is bounded by [`HANDSHAKE`].
//!
//! The processes trust each other: both have the same path, user and parent. A message of another version, or one that is not valid, is
//! refused all the same.

mod channel;
mod message;
mod predecessor;
mod successor;

use std::time::Duration;

pub use channel::{Channel, Packet};
pub use message::Message;
pub use predecessor::{Item, Object, Predecessor, Received};
pub use successor::{Executable, Successor};

/// Version of the messages. A new process with another version refuses. To be increased when a message, the detail of an item, or the state of
/// a framing gets another meaning.
pub const VERSION: u32 = 3;

/// The variable that tells a process that its standard input is the channel of its parent, whose process id is its value.
pub const VARIABLE: &str = "TOWPATH_UPGRADE";

/// Maximum number of objects.
pub const OBJECTS: usize = 1024;

/// Time for a single step of the handshake: for the first messages, from Ready to Go, and from Go to Serving.
pub const HANDSHAKE: Duration = Duration::from_secs(10);

/// Time for which a new process must have served before it is handed items.
pub const TRIAL: Duration = Duration::from_secs(1);

/// Time for a process that must end after SIGTERM. Then it is killed.
pub const EXIT: Duration = Duration::from_secs(5);
