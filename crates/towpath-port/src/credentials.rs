//! The user of a process, and the descriptors that a program it starts inherits.

use std::io;
use std::os::fd::OwnedFd;

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

/// The descriptors that a service manager passed to this process (sd_listen_fds(3): LISTEN_PID, LISTEN_FDS), marked as closed on exec(2).
/// Only the first call returns them. Call it before the process opens its first descriptor: descriptors that were closed at the start
/// are left out.
pub fn passed_descriptors() -> Vec<OwnedFd> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    match (number("LISTEN_PID"), number("LISTEN_FDS")) {
        (Some(pid), Some(count)) if pid == std::process::id() => sys::inherited(count),
        _ => Vec::new(),
    }
}
