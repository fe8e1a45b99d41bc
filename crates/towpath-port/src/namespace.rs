//! Namespaces of one's own (namespaces(7)): a network without the machine's interfaces, and the right to set it up.

use std::{fs, io};

use crate::sys;

/// Gives the calling thread, and the threads and processes that it starts from now on, a network namespace of their own. It goes
/// with the last of them.
///
/// # Errors
/// What unshare(2) says: EPERM without CAP_SYS_ADMIN, which [`enter_user`] gives.
pub fn enter_network() -> io::Result<()> {
    sys::unshare_network()
}

/// Makes the process root in a user namespace of its own (user_namespaces(7)): it has every capability over what it makes there, and
/// is who it was towards everything else. Call it before there is a second thread.
///
/// # Errors
/// What unshare(2) says, EINVAL with several threads and EPERM or ENOSPC where the system does not let users have namespaces; or
/// what writing the map of users says.
pub fn enter_user() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    sys::unshare_user()?;
    // "Writing "deny" to the /proc/pid/setgroups file before writing to /proc/pid/gid_map" is what an unprivileged process must do.
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw()))?;
    fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw()))
}
