//! Bare pointers of C's: arguments that nobody else can make, so that C's promise about them (`towpath.h`) is theirs, for the call.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;

use crate::failure::Failure;

/// A text that ends with a NUL, or NULL.
#[derive(Debug)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    /// None for NULL.
    pub(crate) fn get(&self) -> Option<&OsStr> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: not NULL; C promises that it ends with a NUL and stays as it is during the call, and only C makes a Text.
        let text = unsafe { CStr::from_ptr(self.0) };
        Some(OsStr::from_bytes(text.to_bytes()))
    }
}

/// Where bytes begin whose number is the next argument; may be NULL when there are none.
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
        // No object is larger: Rust's rule for slices.
        if len > isize::MAX as usize {
            return Err(Failure::new(Errno::INVAL, "the length is larger than memory"));
        }
        // SAFETY: not NULL; C promises so many bytes that stay as they are during the call, and only C makes Bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.0, len) })
    }
}

/// Bytes that C lends for longer than the call: until it is told that they are its own again.
#[derive(Debug)]
pub(crate) struct Borrowed {
    at: *const u8,
    len: usize,
}

impl Bytes {
    /// These bytes, for a function whose comment says for how long C keeps them as they are.
    pub(crate) fn lend(self, len: usize) -> Result<Borrowed, Failure> {
        let bytes = self.get(len)?;
        Ok(Borrowed { at: bytes.as_ptr(), len })
    }
}

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: checked by `Bytes::get`; C promises that they stay there and as they are until they are given back, which is when
        // this is dropped.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

// SAFETY: bytes that nobody writes while they are lent; which thread reads them does not matter.
unsafe impl Send for Borrowed {}
// SAFETY: likewise.
unsafe impl Sync for Borrowed {}

/// Another descriptor of the same file as C's `fd`, which stays C's.
pub(crate) fn duplicate(fd: c_int) -> Result<OwnedFd, Failure> {
    if fd < 0 {
        return Err(Failure::new(Errno::BADF, "a descriptor is not negative"));
    }
    // SAFETY: not -1; C promises that it is open, and it is used during this call only. Of one that is not, the system says EBADF.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(fd.try_clone_to_owned()?)
}

/// Where there is room for as many `T` as the next argument says, which need not be initialised.
#[derive(Debug)]
#[repr(transparent)]
pub struct Room<T>(*mut T);

impl<T: Copy> Room<T> {
    /// The first `max` of them; an error for NULL and for none.
    pub(crate) fn get(&mut self, max: usize) -> Result<&mut [std::mem::MaybeUninit<T>], Failure> {
        if self.0.is_null() || max == 0 || max > isize::MAX as usize / size_of::<T>() {
            return Err(Failure::new(Errno::INVAL, "there is no place for what comes"));
        }
        // SAFETY: not NULL; C promises room for so many that nobody else uses during the call, and only C makes a Room.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast(), max) })
    }
}

impl Room<u8> {
    /// The first `len` of them, which become zeros; none of NULL.
    pub(crate) fn zeroed(&mut self, len: usize) -> Result<&mut [u8], Failure> {
        if len == 0 {
            return Ok(&mut []);
        }
        let room = self.get(len)?;
        room.iter_mut().for_each(|byte| {
            byte.write(0);
        });
        // SAFETY: all were just written, and the room is C's promise, as in `get`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0, len) })
    }
}
