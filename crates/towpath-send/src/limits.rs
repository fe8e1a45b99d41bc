//! What the system lets a sender pin.

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

/// The limits of this process, as far as they can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// RLIMIT_MEMLOCK in bytes, which all sockets of the user share; none with CAP_IPC_LOCK, or when there is no limit.
    pub locked: Option<u64>,
    /// net.core.optmem_max of this network namespace, bytes: what one socket's notes about pinned memory may take.
    pub optmem: u64,
}

/// What net.core.optmem_max was before Linux 6.8, taken when it cannot be read.
const OLD_OPTMEM: u64 = 20_480;

impl Limits {
    /// Reads them.
    pub fn read() -> Self {
        let exempt = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
        let locked = if exempt { None } else { getrlimit(Resource::Memlock).current };
        let optmem = std::fs::read_to_string("/proc/sys/net/core/optmem_max")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(OLD_OPTMEM);
        Self { locked, optmem }
    }
}
