//! Capabilities: which ones a configuration needs, and dropping all others.

use std::fmt;

use rustix::process::DumpableBehavior;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

use towpath_port::driver::Capability;

use crate::config::Config;

/// A set of capabilities (capabilities(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(CapabilitySet);

impl Capabilities {
    /// The capabilities that the configured ports need, including for reopening an interface.
    pub fn needed(config: &Config) -> Self {
        let mut set = CapabilitySet::empty();
        for port in &config.ports {
            for capability in port.driver.capabilities() {
                set |= match capability {
                    Capability::NetRaw => CapabilitySet::NET_RAW,
                    Capability::NetAdmin => CapabilitySet::NET_ADMIN,
                    Capability::Bpf => CapabilitySet::BPF,
                };
            }
        }
        Self(set)
    }

    /// Drops all other capabilities of this thread and of threads and processes that it starts. Returns the remaining set.
    ///
    /// # Errors
    ///
    /// The error of capset(2) or prctl(2).
    pub fn keep(self) -> std::io::Result<Self> {
        let had = capabilities(None)?.permitted;
        if had.contains(CapabilitySet::SETPCAP) {
            for capability in CapabilitySet::all().iter().filter(|capability| !self.0.contains(*capability)) {
                // A capability unknown to this kernel cannot be dropped.
                let _ = remove_capability_from_bounding_set(capability);
            }
        }
        let left = had & self.0;
        let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets)?;
        // Otherwise a process of the same user can read and write this process's memory through ptrace(2).
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        Ok(Self(left))
    }

    /// The capabilities of `other` that are missing here.
    #[must_use]
    pub fn missing(self, other: Self) -> Self {
        Self(other.0 - self.0)
    }

    /// Returns true if the set is empty.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        for (at, (name, _)) in self.0.iter_names().enumerate() {
            write!(f, "{}CAP_{name}", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_configuration_needs() {
        let needed = |driver: &str| {
            let text =
                format!("rules = \"r\"\nmonitor = \"a\"\n[port.a]\ndriver = \"{driver}\"\nread = \"x\"\n");
            let text = if driver == "pcap" { text } else { text.replace("read = \"x\"\n", "") };
            Capabilities::needed(&Config::parse("t", &text).unwrap()).to_string()
        };
        let rows = [
            ("af_packet", "CAP_NET_RAW"),
            ("af_xdp", "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF"),
            ("tap", "CAP_NET_ADMIN"),
            ("pcap", "none"),
        ];
        for (driver, expected) in rows {
            assert_eq!(needed(driver), expected, "{driver}");
        }
    }
}
