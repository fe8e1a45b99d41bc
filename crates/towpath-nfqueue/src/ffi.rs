//! The boundary to C: return values, errno(3), and panics, which do not cross it.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::io::Errno;

use crate::errno;

/// `extern int nfq_errno`: the error of the last call that failed.
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
pub static nfq_errno: AtomicI32 = AtomicI32::new(0);

/// Runs `call`. An error or a panic sets errno and `nfq_errno`, and returns -1.
pub(crate) fn guard(call: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    guard_or(-1, call)
}

/// Runs `call`. An error or a panic sets errno and `nfq_errno`, and returns `failed`.
pub(crate) fn guard_or<T>(failed: T, call: impl FnOnce() -> Result<T, Errno>) -> T {
    // A panic leaves locks poisoned and no other state half changed: the locks are taken anyway (`crate::lock`).
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(Errno::IO));
    result.unwrap_or_else(|error| {
        // Relaxed: a number that orders nothing.
        nfq_errno.store(error.raw_os_error(), Ordering::Relaxed);
        errno::set(error);
        failed
    })
}
