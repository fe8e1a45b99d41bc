//! Messages over TCP connections, balanced over workers: Linux's Kernel Connection Multiplexor (KCM) in user
//! space.
//!
//! A mux joins connections, each with its framing, to workers. It cuts the byte streams into messages, gives
//! each message to a free worker, and sends the reply on the connection that the message came from. Use it
//! for a server whose clients send requests over TCP or Unix stream sockets, if one connection per thread
//! would leave workers idle while messages wait behind a busy one.
//!
//! The crate has three parts without IO, clock and threads:
//! - [`framing`]: finds where a message ends, by a declarative rule, a preset's name, a BPF program, or a
//!   Rust function;
//! - [`assembler`]: takes bytes in any segmentation and returns whole messages;
//! - [`mux`]: schedules messages of many connections over workers and queues their replies.
//!
//! Feature `io` adds module `io`: sockets, listeners and worker threads on Linux, or workers that are other
//! processes. Feature `tls` adds TLS, feature `tokio` a `Stream` of messages.
//!
//! # Examples
//!
//! ```
//! use towpath_mux::assembler::{Assembler, Event, Limits};
//! use towpath_mux::framing::Framing;
//! use towpath_mux::Time;
//!
//! let framing: Framing = "offset=0 length=2 be adjust=2".parse()?;
//! let mut assembler = Assembler::new(framing, Limits::default());
//!
//! // Two messages in arbitrary segmentation.
//! assembler.handle_bytes(b"\x00\x05hel");
//! assert!(assembler.poll(Time::default()).is_none());
//! assembler.handle_bytes(b"lo\x00\x01!");
//! let mut messages = Vec::new();
//! while let Some(event) = assembler.poll(Time::default()) {
//!     if let Event::Message(message) = event {
//!         messages.push(message.bytes[2..].to_vec());
//!     }
//! }
//! assert_eq!(messages, [&b"hello"[..], b"!"]);
//! # Ok::<(), towpath_mux::framing::ParseError>(())
//! ```
#![deny(unsafe_code)] // Only `io/sys.rs` has some.

pub mod assembler;
pub mod framing;
#[cfg(feature = "io")]
pub mod io;
pub mod mux;
mod order;

pub use towpath_wire::Time;
