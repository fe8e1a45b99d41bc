//! Types of pointer arguments. Only a C caller constructs them, so each value obeys the contract of `towpath.h` during the call.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;

use crate::error::Failure;

/// A NUL-terminated string, or NULL.
#[derive(Debug)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// Returns `None` for NULL.
    pub(crate) fn get(&self) -> Option<&OsStr> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not NULL; C guarantees a NUL-terminated string that does not change during the call, and only C constructs a `Text`.
        let text = unsafe { CStr::from_ptr(self.0) };
        Some(OsStr::from_bytes(text.to_bytes()))
    }
}

/// The start of an array of bytes, whose length is the next argument. May be NULL if the length is 0.
#[derive(Debug)]
#[repr(transparent)]
pub struct Bytes(*const u8);

impl Bytes {
    pub(crate) fn get(&self, len: usize) -> Result<&[u8], Failure> {
        if len == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() {
            return Err(Failure::null("the bytes are NULL"));
        }
        // Rust's limit on the size of slices.
        if len > isize::MAX as usize {
            return Err(Failure::new(Errno::INVAL, "the length exceeds the address space"));
        }
        // SAFETY: not NULL; C guarantees `len` bytes that do not change during the call, and only C constructs `Bytes`.
        Ok(unsafe { std::slice::from_raw_parts(self.0, len) })
    }
}

/// Bytes on loan from C beyond the call, until the library reports the end of the loan.
#[derive(Debug)]
pub(crate) struct Borrowed {
    at: *const u8,
    len: usize,
}

impl Bytes {
    /// Borrows the bytes, for a function whose comment in `towpath.h` states the duration of the loan.
    pub(crate) fn lend(self, len: usize) -> Result<Borrowed, Failure> {
        let bytes = self.get(len)?;
        Ok(Borrowed { at: bytes.as_ptr(), len })
    }
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: checked by `Bytes::get`; C guarantees that they stay valid and unchanged until the loan ends, which is when this value is
        // dropped.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

// SAFETY: the bytes do not change during the loan, so any thread may read them.
unsafe impl Send for Borrowed {}
// SAFETY: as for `Send`.
unsafe impl Sync for Borrowed {}

/// `towpath_release`.
pub(crate) type Release = extern "C" fn(*mut c_void);

/// C's context of a function that threads of the library call. Released when the library no longer uses it.
#[derive(Debug)]
pub(crate) struct Context {
    pointer: *mut c_void,
    release: Option<Release>,
}

impl Context {
    pub(crate) const fn new(pointer: *mut c_void, release: Option<Release>) -> Self {
        Self { pointer, release }
    }

    pub(crate) const fn pointer(&self) -> *mut c_void {
        self.pointer
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            release(self.pointer);
        }
    }
}

// SAFETY: the library does not read the memory; C guarantees that its function may be called by any thread.
unsafe impl Send for Context {}
// SAFETY: as for `Send`; towpath.h states when several threads may call the function at a time.
unsafe impl Sync for Context {}

/// Duplicates C's `fd`, which C keeps.
pub(crate) fn duplicate(fd: c_int) -> Result<OwnedFd, Failure> {
    if fd < 0 {
        return Err(Failure::new(Errno::BADF, "the descriptor is negative"));
    }
    // SAFETY: not -1; C guarantees that it is open, and it is used during this call only. For a closed one the system returns EBADF.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(fd.try_clone_to_owned()?)
}

/// An output array of `T`, whose length is the next argument. It need not be initialised.
#[derive(Debug)]
#[repr(transparent)]
pub struct Room<T>(*mut T);

impl<T: Copy> Room<T> {
    /// The first `max` elements. Fails for NULL, and for a length of 0.
    pub(crate) fn get(&mut self, max: usize) -> Result<&mut [std::mem::MaybeUninit<T>], Failure> {
        if self.0.is_null() || max == 0 || max > isize::MAX as usize / size_of::<T>() {
            return Err(Failure::new(
                Errno::INVAL,
                "the output array is NULL, or its length is 0 or too large",
            ));
        }
        // SAFETY: not NULL; C guarantees room for `max` elements without other accesses during the call, and only C constructs a `Room`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), max) })
    }
}

impl Room<u8> {
    /// The first `len` bytes, set to zero. Fails for NULL, unless `len` is 0.
    pub(crate) fn zeroed(&mut self, len: usize) -> Result<&mut [u8], Failure> {
        if len == 0 {
            return Ok(&mut []);
        }
        let room = self.get(len)?;
        room.iter_mut().for_each(|byte| {
            byte.write(0);
        });
        // SAFETY: all bytes were just written, and C guarantees the room, as in `get`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0, len) })
    }
}
