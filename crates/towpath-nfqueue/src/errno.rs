//! errno(3).

use rustix::io::Errno;

/// Sets errno for the calling thread.
pub(crate) fn set(errno: Errno) {
    // SAFETY: the function has no precondition.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: the address of this thread's errno is valid while the thread runs.
    unsafe { place.write(errno.raw_os_error()) };
}
