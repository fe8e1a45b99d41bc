//! Private namespaces (namespaces(7)): a network namespace and others, and a user namespace with the capabilities to configure them.

use std::{fs, io};

use crate::sys;

/// Moves the calling thread into a new network namespace. Threads and processes that it starts later inherit the namespace, which
/// ends with the last of them.
///
/// # Errors
/// Errors of unshare(2): EPERM without CAP_SYS_ADMIN; [`enter_user`] provides it.
pub fn enter_network() -> io::Result<()> {
    sys::unshare_network()
}

/// A kind of namespace that a thread can enter alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Interfaces, addresses and abstract Unix sockets (network_namespaces(7)). The only interface is `lo`, which is down.
    Network,
    /// System V IPC and POSIX message queues (ipc_namespaces(7)).
    Ipc,
    /// The names of the host (uts_namespaces(7)).
    Uts,
    /// The root of the cgroups (cgroup_namespaces(7)).
    Cgroup,
}

/// Moves the calling thread into new namespaces of these kinds, as [`enter_network`].
///
/// # Errors
/// As [`enter_network`].
pub fn enter(kinds: &[Kind]) -> io::Result<()> {
    sys::unshare(kinds)
}

/// Moves the process into a new user namespace as root (user_namespaces(7)). It has all capabilities over namespaces created
/// there, and its previous identity elsewhere. The process must have one thread.
///
/// # Errors
/// Errors of unshare(2): EINVAL with several threads, EPERM or ENOSPC if user namespaces are disabled. Errors of writing the
/// user and group maps.
pub fn enter_user() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    sys::unshare_user()?;
    // "Writing "deny" to the /proc/pid/setgroups file before writing to /proc/pid/gid_map" is what an unprivileged process must do.
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {} 1", uid.as_raw()))?;
    fs::write("/proc/self/gid_map", format!("0 {} 1", gid.as_raw()))
}
