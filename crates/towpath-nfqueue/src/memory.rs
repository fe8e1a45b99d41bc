//! Memory of the program that a call names by pointer. Only a C caller constructs these types, so each value obeys the contract of
//! libnetfilter_queue's headers during the call.

use std::ffi::c_char;

/// A packet header of `LEN` bytes at least, or NULL. It may lie in a [packet buffer](crate::packet::buffer).
#[derive(Debug)]
#[repr(transparent)]
pub struct Header<const LEN: usize>(*mut u8);

impl<const LEN: usize> Header<LEN> {
    /// A copy of the header; `None` for NULL.
    pub(crate) fn get(&self) -> Option<[u8; LEN]> {
        // SAFETY: not NULL; C guarantees LEN bytes, and an array of bytes has no alignment.
        (!self.0.is_null()).then(|| unsafe { self.0.cast::<[u8; LEN]>().read() })
    }

    /// The address, for comparisons.
    pub(crate) fn address(&self) -> usize {
        self.0.addr()
    }

    /// The header, and as much behind it as makes `len` bytes. The packet's length fields name `len`, and C guarantees that the packet
    /// has the bytes that they name. `None` for NULL.
    pub(crate) fn packet(&mut self, len: usize) -> Option<&mut [u8]> {
        // SAFETY: not NULL; C guarantees LEN and `len` bytes without other accesses during the call.
        (!self.0.is_null()).then(|| unsafe { std::slice::from_raw_parts_mut(self.0, len.max(LEN)) })
    }
}

/// A buffer for text, whose size is the next argument. May be NULL if the size is 0.
#[derive(Debug)]
#[repr(transparent)]
pub struct Text(*mut c_char);

impl Text {
    /// Writes as much of `text` as fits, with a NUL, as snprintf(3) does.
    pub(crate) fn print(&mut self, size: usize, text: &str) {
        let Some(room) = size.checked_sub(1).filter(|_| !self.0.is_null()) else { return };
        let len = text.len().min(room);
        // SAFETY: not NULL; C guarantees `size` bytes, which is more than `len`; C's buffer and `text` are different memory.
        unsafe { self.0.copy_from_nonoverlapping(text.as_ptr().cast(), len) };
        // SAFETY: as before, `len` is less than `size`.
        let end = unsafe { self.0.add(len) };
        // SAFETY: as before.
        unsafe { end.write(0) };
    }
}

/// Bytes whose length is another argument. May be NULL if the length is 0, and may overlap any other memory of the call.
#[derive(Debug)]
#[repr(transparent)]
pub struct Bytes(*const u8);

impl Bytes {
    /// Copies the first `to.len()` bytes. Nothing happens for NULL.
    pub(crate) fn copy_to(&self, to: &mut [u8]) {
        if !self.0.is_null() {
            // SAFETY: not NULL; C guarantees `to.len()` bytes. copy(), because they may overlap.
            unsafe { std::ptr::copy(self.0, to.as_mut_ptr(), to.len()) };
        }
    }
}
