//! The messages between the old and the new process.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A message. Objects and items have a descriptor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Message {
    /// The first message of the old process.
    Hello {
        /// [`super::VERSION`]
        version: u32,
        /// Version of the program, for the log.
        program: String,
        /// The kind of the service: `mux`.
        service: String,
        /// Number of objects that follow.
        objects: usize,
    },
    /// A listening socket, or another thing that exists once.
    Object {
        /// The kind of the object.
        kind: String,
        /// Its name in the command line or the configuration.
        name: String,
        /// The data with which the service continues it.
        detail: Value,
    },
    /// The new process can serve.
    Ready,
    /// The new process cannot serve.
    Refused {
        /// Why.
        reason: String,
    },
    /// The new process may serve. The old one does, too, until it serves.
    Go,
    /// The new process serves.
    Serving,
    /// A connection, or another thing of which there are many. Its bytes follow.
    Item {
        /// The data with which the service continues it.
        detail: Value,
        /// Number of bytes that follow.
        bytes: usize,
    },
    /// The old process hands over nothing more, and has given up the listeners and their files.
    Done,
    /// This process ends, as it was told to while both serve. The other one ends too.
    Ending,
}
