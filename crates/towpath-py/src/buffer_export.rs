//! Exports of Python buffers whose memory the kernel reads. An export is held until the kernel no longer reads the memory, even
//! after the sender is gone.
//!
//! A buffer export (PEP 3118) keeps its object alive and its bytes in place: an exported bytearray cannot be resized. The export
//! ends when the `Buffer` is dropped, after its completion. A buffer without a completion, because its connection was reset, is held
//! for another minute; if its sender is dropped, this module holds it. The buffers of a sender that was dropped without `close` are
//! held until the process exits.
//!
//! Any Python thread may write to exported memory, so this code never creates a reference to it. This is the only file of the crate
//! with `unsafe`.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use towpath_send::{Buffer, Done, HOLD, Lent, Quarantine, Region, Time};

/// The exported bytes of an object. The region is dropped before the export (field order).
#[derive(Debug)]
struct BufferExport {
    region: Region,
    _export: PyUntypedBuffer,
}

impl Lent for BufferExport {
    fn region(&self) -> &Region {
        &self.region
    }

    fn span(&self) -> std::ops::Range<usize> {
        0..self.region.len()
    }
}

/// Exports the bytes of `data`.
///
/// # Errors
///
/// ValueError if the bytes are not contiguous.
pub(crate) fn take(data: &Bound<'_, PyAny>) -> PyResult<Buffer> {
    let export = PyUntypedBuffer::get(data)?;
    if !export.is_c_contiguous() {
        return Err(PyValueError::new_err("the buffer is not contiguous: queue bytes(...) of it"));
    }
    // The pointer may be NULL for an empty object.
    let start = NonNull::new(export.buf_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
    let bytes = NonNull::slice_from_raw_parts(start, export.len_bytes());
    // SAFETY: an exporter keeps `len_bytes()` bytes at `buf_ptr()` until the export is released. The export is dropped after the
    // region, and the region cannot be moved out of the `BufferExport`.
    let region = unsafe { Region::foreign(bytes) };
    let export = BufferExport { region, _export: export };
    Ok(Buffer::lent(export).expect("the span is the whole region"))
}

/// Buffers of a reset connection, which the kernel may still read; see [`HOLD`].
#[derive(Debug)]
pub(crate) struct Pinned {
    /// Time of the reset, or later.
    since: Instant,
    quarantine: Quarantine<Done>,
}

/// A time after the end of every quarantine.
const EVER: Time = Time::from_nanos(u64::MAX);

impl Pinned {
    pub(crate) fn new(quarantine: Quarantine<Done>) -> Self {
        Self { since: Instant::now(), quarantine }
    }

    /// Returns all buffers once [`HOLD`] has passed, else an empty list.
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

/// Pinned buffers of senders that were dropped.
static LEFT: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// Keeps the pinned buffers of a dropped sender.
pub(crate) fn leave(pinned: Pinned) {
    if !pinned.is_empty() {
        LEFT.lock().unwrap_or_else(PoisonError::into_inner).push(pinned);
    }
}

/// Releases the exports whose hold time has passed.
pub(crate) fn sweep(now: Instant) {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    let over: Vec<Done> = left.iter_mut().flat_map(|pinned| pinned.take_over(now)).collect();
    left.retain(|pinned| !pinned.is_empty());
    // Releasing an export may run Python code, which may call this function.
    drop(left);
    drop(over);
}
