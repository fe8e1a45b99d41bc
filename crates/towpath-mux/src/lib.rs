//! Messages, not bytes, over TCP connections.
//!
//! Three parts without IO:
//! - [`framing`]: where a message ends, said in a line, by a preset's name, or by a Rust function;
//! - [`assembler`]: bytes in any cut go in, whole messages come out;
//! - [`mux`]: messages of many connections go to the worker that is free, and answers to the connection that asked.
//!
//! No descriptor, no clock, no thread: bytes and a [`Time`] go in, messages and causes come out. Feature `io` adds those, in a
//! module of that name.
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
//! // Two messages, cut where the network pleased.
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

mod time;

pub mod assembler;
pub mod framing;
#[cfg(feature = "io")]
pub mod io;
pub mod mux;

pub use time::Time;
