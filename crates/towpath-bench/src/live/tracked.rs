//! How many connections the kernel may follow: one setting for all namespaces (nf_conntrack-sysctl.rst).

use std::fs;

const PATH: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
const ENOUGH: u64 = 2_000_000;

/// As long as it lives, there may be enough.
pub(crate) struct Tracked(Option<String>);

impl Tracked {
    pub(crate) fn raise() -> Self {
        let before = fs::read_to_string(PATH)
            .ok()
            .filter(|most| most.trim().parse().is_ok_and(|most: u64| most < ENOUGH));
        let raised = before.filter(|_| fs::write(PATH, ENOUGH.to_string()).is_ok());
        Self(raised)
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // Whoever may raise it may lower it.
            let _ = fs::write(PATH, before.trim());
        }
    }
}
