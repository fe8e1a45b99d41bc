//! Towpath for C: `libtowpath` and `include/towpath.h`, which documents every function; the guide is `docs/book/src/reference/c.md`.
//!
//! Nothing but a boundary. What: C's arguments become Rust's, Rust's results become numbers of errno(3) and a sentence
//! (`failure.rs`), and a panic ends here. Handles are boxes that C has a pointer to; a frame or message is a struct of
//! numbers and a pointer to its bytes, and its ticket is checked whenever it comes back.
//!
//! What C promises is in the signatures: `Option<&T>` and `Option<&mut T>` are a pointer that is NULL or valid, for the call and
//! for nobody else at that time; `Option<Box<T>>` is a handle that is not used again. Texts, bytes and arrays come as types of
//! `foreign.rs`, where they are read.
//!
//! ```c
#![doc = include_str!("../examples/inspector.c")]
//! ```
// Functions under C's names, which nothing else in the process has, and the reading of pointers that C gave.
#![allow(unsafe_code)]

pub mod failure;
mod foreign;
pub mod inspector;
pub mod mux;
mod ring;
pub mod sender;
pub mod worker;

use std::ffi::{CStr, c_char};

/// The version of the library. See `towpath.h`.
// SAFETY: no other function has this name; so with all below, in every file.
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
mod agreement;
