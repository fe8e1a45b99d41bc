//! Limits of the system on pinned memory.

use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

/// Limits of this process; values that cannot be read have defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// RLIMIT_MEMLOCK in bytes, shared by all sockets of the user. `None` with CAP_IPC_LOCK, or if the limit is infinite.
    pub locked: Option<u64>,
    /// net.core.optmem_max of this network namespace in bytes: the limit on one socket's records of pinned memory.
    pub optmem: u64,
}

/// Default of net.core.optmem_max before Linux 6.8, used if the value cannot be read.
const OLD_OPTMEM: u64 = 20_480;

impl Limits {
    /// Reads the limits.
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
