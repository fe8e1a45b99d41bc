//! The user of a process, and the descriptors that a program it starts inherits.

use std::io;

use crate::sys;

/// Sets the real, effective and saved user and group of all threads of this process, without supplementary groups.
///
/// # Errors
/// The system's error: `PermissionDenied` without CAP_SETUID and CAP_SETGID, `InvalidInput` if the user namespace does not map the ids.
pub fn set_user(user: u32, group: u32) -> io::Result<()> {
    sys::set_user(user, group)
}

/// Marks all descriptors except standard input, output and error as closed on exec(2).
///
/// # Errors
/// The system's error: `Unsupported` before Linux 5.11.
pub fn close_on_exec() -> io::Result<()> {
    sys::close_on_exec(3)
}
