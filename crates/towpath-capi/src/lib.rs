//! The C API of Towpath: `libtowpath` and `include/towpath.h`, which documents every function. The guide is
//! `docs/book/src/reference/c.md`.
//!
//! This crate is a boundary only. It converts C arguments to Rust types, and results to errno(3) numbers with a message
//! (`error.rs`); a panic does not unwind into C. A handle is a pointer to a box. A frame or message is a struct of numbers with a
//! pointer to its bytes, and its ticket is validated by every function that takes it.
//!
//! The signatures express the contract with C: `Option<&T>` and `Option<&mut T>` are a pointer that is NULL or valid and unaliased
//! during the call; `Option<Box<T>>` is a handle that C does not use again. `ffi.rs` has the types of strings, bytes and arrays, and
//! reads them.
//!
//! ```c
#![doc = include_str!("../examples/inspector.c")]
//! ```
// Exported C symbols, and the dereferencing of pointers from C.
#![allow(unsafe_code)]

pub mod error;
mod ffi;
pub mod framing;
pub mod inspector;
pub mod metrics;
pub mod mux;
pub mod mux_event;
pub mod mux_server;
mod ring;
pub mod sender;
pub mod worker;
pub mod worker_event;

use std::ffi::{CStr, c_char};

/// Version of the library. See `towpath.h`.
// SAFETY: no other function has this name. This applies to all exported functions of this crate.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => unreachable!(),
        };
    VERSION.as_ptr()
}

#[cfg(test)]
mod abi_test;
