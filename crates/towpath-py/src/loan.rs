//! Memory of Python's that is lent to the kernel: its export is held as long as the kernel may read it, whatever becomes of the sender.
//!
//! What: a buffer's export (PEP 3118) keeps its object alive, and its bytes where they are: a bytearray that has one cannot be resized.
//! It ends when the buffer is dropped, which is when it has come back. What never came back, because its connection was reset, is held
//! for another minute, here if its sender has gone; what a sender leaves behind that was not closed, for ever.
//!
//! Who writes into lent memory is Python, in any thread: no reference to it is ever made. The only file of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use towpath_send::{Buffer, Done, HOLD, Lent, Quarantine, Region, Time};

/// An object's bytes, which stay where they are until this is dropped. Their export ends last.
#[derive(Debug)]
struct Loan {
    region: Region,
    _export: PyUntypedBuffer,
}

impl Lent for Loan {
    fn region(&self) -> &Region {
        &self.region
    }

    fn span(&self) -> std::ops::Range<usize> {
        0..self.region.len()
    }
}

/// Takes a loan of an object's bytes.
pub(crate) fn take(data: &Bound<'_, PyAny>) -> PyResult<Buffer> {
    let export = PyUntypedBuffer::get(data)?;
    if !export.is_c_contiguous() {
        return Err(PyValueError::new_err("its bytes do not lie side by side: queue bytes(...) of it"));
    }
    // It is NULL for some objects without bytes.
    let start = NonNull::new(export.buf_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
    let bytes = NonNull::slice_from_raw_parts(start, export.len_bytes());
    // SAFETY: whoever exports a buffer keeps so many bytes there until its release, and the export is released behind the region, which
    // nobody gets out of the loan.
    let region = unsafe { Region::foreign(bytes) };
    let loan = Loan { region, _export: export };
    Ok(Buffer::lent(loan).expect("all of it is in it"))
}

/// Buffers of a connection that was reset, which the kernel may still read: see [`HOLD`].
#[derive(Debug)]
pub(crate) struct Pinned {
    /// When they were abandoned, or later.
    since: Instant,
    quarantine: Quarantine<Done>,
}

/// After any time in a quarantine.
const EVER: Time = Time::from_nanos(u64::MAX);

impl Pinned {
    pub(crate) fn new(quarantine: Quarantine<Done>) -> Self {
        Self { since: Instant::now(), quarantine }
    }

    /// All of them when their time is over, else none.
    pub(crate) fn take_over(&mut self, now: Instant) -> Vec<Done> {
        if now.duration_since(self.since) < HOLD {
            return Vec::new();
        }
        std::iter::from_fn(|| self.quarantine.poll(EVER)).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.quarantine.is_empty()
    }
}

/// Those whose senders have gone.
static LEFT: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// Holds what nobody else does any more.
pub(crate) fn leave(pinned: Pinned) {
    if !pinned.is_empty() {
        LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(pinned);
    }
}

/// Ends the loans of those whose time is over.
pub(crate) fn sweep(now: Instant) {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    let over: Vec<Done> = left.iter_mut().flat_map(|pinned| pinned.take_over(now)).collect();
    left.retain(|pinned| !pinned.is_empty());
    // The end of an export may run code of Python's, which may come here.
    drop(left);
    drop(over);
}
