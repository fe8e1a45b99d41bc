//! The end of a process whose thread makes a system call that its seccomp filter traps.

use std::io;

use crate::sys;

/// Installs a handler for SIGSYS in this process. It writes the name of the thread and the number of the system call to standard error,
/// and ends the process by SIGSYS. The kernel has not executed the call. Without the handler, the process ends without a line.
///
/// # Errors
/// The error of sigaction(2).
pub fn report() -> io::Result<()> {
    sys::report_forbidden_calls()
}
