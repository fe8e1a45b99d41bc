//! Which capabilities a configuration needs, and giving up all others.

use std::fmt;

use rustix::process::DumpableBehavior;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
};

use crate::config::{Config, Driver};

/// Capabilities (capabilities(7)) of the calling thread, and of the threads that it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(CapabilitySet);

impl Capabilities {
    /// Those that the ports of a configuration need, also to be opened again.
    pub fn needed(config: &Config) -> Self {
        let mut set = CapabilitySet::empty();
        for port in &config.ports {
            set |= match port.driver {
                Driver::AfPacket { .. } => CapabilitySet::NET_RAW,
                Driver::AfXdp { .. } => {
                    CapabilitySet::NET_RAW | CapabilitySet::NET_ADMIN | CapabilitySet::BPF
                }
                Driver::Tun { .. } | Driver::Nfqueue { .. } => CapabilitySet::NET_ADMIN,
                Driver::Pcap { .. } => CapabilitySet::empty(),
            };
        }
        Self(set)
    }

    /// Gives up all others, for this thread, the threads and the processes that it starts. Returns what is left.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn keep(self) -> std::io::Result<Self> {
        let had = capabilities(None)?.permitted;
        if had.contains(CapabilitySet::SETPCAP) {
            for capability in CapabilitySet::all().iter().filter(|capability| !self.0.contains(*capability)) {
                // A capability that this kernel does not know yet is not there to be given up.
                let _ = remove_capability_from_bounding_set(capability);
            }
        }
        let left = had & self.0;
        let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets)?;
        // A process of the same user may otherwise read and write our memory through ptrace(2).
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
        Ok(Self(left))
    }

    /// Those of `other` that are not here.
    #[must_use]
    pub fn missing(self, other: Self) -> Self {
        Self(other.0 - self.0)
    }

    /// Whether there is none.
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
            let text = format!("rules = \"r\"\ntap = \"a\"\n[port.a]\ndriver = \"{driver}\"\nread = \"x\"\n");
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
