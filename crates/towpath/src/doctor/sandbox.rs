//! The sandbox of the engine and of its programs.

use super::facts::Facts;
use super::{Findings, Level};

/// Versions of Landlock whose rights the sandbox uses, with their kernel.
const LANDLOCK: &[(u32, &str)] = &[(3, "6.2: truncation of files"), (5, "6.10: ioctl(2) of devices")];

pub(super) fn findings(facts: &Facts, found: &mut Findings) {
    match facts.seccomp {
        true => found.ok("seccomp", "seccomp filters"),
        false => found.add(
            "seccomp",
            Level::Hint,
            "no seccomp filters: threads of the engine and its programs may make every system call",
            "use a kernel with CONFIG_SECCOMP_FILTER; in a container, mount /proc and permit seccomp(2)",
        ),
    }
    let Some(version) = facts.landlock else {
        return found.add(
            "landlock",
            Level::Hint,
            "no Landlock: the engine may use every file of its user, and `read` and `write` of a sandbox are errors",
            "add landlock to lsm= of the kernel's command line (/sys/kernel/security/lsm has the present list), or use a kernel with CONFIG_SECURITY_LANDLOCK (5.13)",
        );
    };
    let missing: Vec<_> =
        LANDLOCK.iter().filter(|(since, _)| version < *since).map(|(_, what)| *what).collect();
    match missing.is_empty() {
        true => found.ok("landlock", format!("Landlock, version {version}")),
        false => found.add(
            "landlock",
            Level::Hint,
            format!("Landlock, version {version}, which does not restrict everything"),
            &format!("a later kernel restricts more: {}", missing.join("; ")),
        ),
    }
}
