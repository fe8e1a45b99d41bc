//! Capabilities: which ones a configuration needs, and dropping all others.

use std::fmt;
use std::io;

use rustix::process::DumpableBehavior;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
    set_keep_capabilities, set_no_new_privs,
};

use towpath_port::credentials;
use towpath_port::driver::{self, Capability};
use towpath_ring::reaper::Reaper;

use crate::config::{Config, users};
use crate::logging;
use crate::process::{Identity, Sandbox};
use crate::sandbox::{self, Role};

/// A set of capabilities (capabilities(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(CapabilitySet);

impl Capabilities {
    /// The capabilities that the configured ports need, including for reopening an interface.
    pub fn needed(config: &Config) -> Self {
        Self::of_ports(config, |driver| driver.capabilities())
    }

    /// The capabilities that the engine needs while it uses the ports, if the launcher opens their descriptors.
    pub fn needed_in_use(config: &Config) -> Self {
        Self::of_ports(config, |driver| driver.capabilities_in_use())
    }

    /// Also CAP_IPC_LOCK: memory above RLIMIT_MEMLOCK.
    #[must_use]
    pub fn with_locked_memory(self) -> Self {
        Self(self.0 | CapabilitySet::IPC_LOCK)
    }

    fn of_ports(config: &Config, of: fn(&driver::Config) -> &'static [Capability]) -> Self {
        let mut set = CapabilitySet::empty();
        for port in &config.ports {
            for capability in of(&port.driver) {
                set |= match capability {
                    Capability::NetRaw => CapabilitySet::NET_RAW,
                    Capability::NetAdmin => CapabilitySet::NET_ADMIN,
                    Capability::Bpf => CapabilitySet::BPF,
                    Capability::PerfMon => CapabilitySet::PERFMON,
                };
            }
        }
        Self(set)
    }

    /// The capabilities of the launcher: those that ports need, and those that start a process as another user in a cgroup and in new
    /// namespaces, and end it.
    pub(super) fn of_launcher(config: &Config) -> Self {
        let starts = CapabilitySet::SETUID
            | CapabilitySet::SETGID
            | CapabilitySet::SETPCAP
            | CapabilitySet::KILL
            | CapabilitySet::DAC_OVERRIDE;
        let optional = Self::of_ports(config, |driver| driver.capabilities_optional());
        // The next version of the engine gives its new files to its user, and raises its limit of locked memory.
        let upgrades = match config.engine.upgrade.is_empty() {
            true => CapabilitySet::empty(),
            false => CapabilitySet::CHOWN | CapabilitySet::SYS_RESOURCE,
        };
        let mut queues = config.queues.iter().map(|queue| &queue.inspectors.process.sandbox);
        let mut muxes = config.muxes.iter().map(|mux| &mux.process.sandbox);
        let enters = |sandbox: &Sandbox| !sandbox.namespaces.is_empty();
        let namespaces = match queues.any(enters) || muxes.any(enters) {
            true => CapabilitySet::SYS_ADMIN,
            false => CapabilitySet::empty(),
        };
        Self(Self::needed(config).0 | optional.0 | starts | upgrades | namespaces)
    }

    /// Drops all other capabilities of this thread and of threads and processes that it starts, and the possibility to get new ones by
    /// execve(2) (no_new_privs). Returns the remaining set.
    ///
    /// # Errors
    ///
    /// The error of capset(2) or prctl(2).
    pub fn keep(self) -> io::Result<Self> {
        self.keep_as(None)
    }

    /// As [`keep`](Self::keep), and becomes another user.
    ///
    /// # Errors
    ///
    /// Also that of setresuid(2).
    pub fn keep_as(self, identity: Option<Identity>) -> io::Result<Self> {
        let had = capabilities(None)?.permitted;
        if had.contains(CapabilitySet::SETPCAP) {
            for capability in CapabilitySet::all().iter().filter(|capability| !self.0.contains(*capability)) {
                // A capability unknown to this kernel cannot be dropped.
                let _ = remove_capability_from_bounding_set(capability);
            }
        }
        let left = had & self.0;
        if let Some(Identity { user, group }) = identity {
            // Otherwise the change of the user drops all.
            set_keep_capabilities(true)?;
            credentials::set_user(user, group)?;
        }
        let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
        set_capabilities(None, sets)?;
        set_no_new_privs(true)?;
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

/// The user to which an engine started by root changes: that of the configuration, or `towpath` if it exists. `None`: root.
///
/// # Errors
///
/// The engine is not started as root, and the configuration names another user.
pub(super) fn engine_user(configured: Option<Identity>) -> io::Result<Option<Identity>> {
    let user = rustix::process::geteuid();
    if !user.is_root() {
        return match configured {
            Some(other) if other.user != user.as_raw() => {
                let text =
                    format!("`user` of [engine] is {}: start the engine as root or as that user", other.user);
                Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
            }
            _ => Ok(None),
        };
    }
    match configured.or_else(|| users::named(USER)) {
        Some(identity) if identity.user == 0 => Ok(None),
        Some(identity) => Ok(Some(identity)),
        None => Ok(None),
    }
}

/// Logs that the engine stays root although the configuration does not say so.
pub(super) fn warn_of_root(configured: Option<Identity>, identity: Option<Identity>) {
    if rustix::process::geteuid().is_root() && configured.is_none() && identity.is_none() {
        tracing::warn!(
            "the engine stays user root, because there is no user `{USER}`: write `user` in [engine], or run `useradd --system {USER}`"
        );
    }
}

/// Starts the threads of the log and of the reaper, before the engine gives up its privileges. A later change of the user removes
/// their capabilities. If the engine does not change its user, the threads are started from a temporary thread without
/// capabilities, so that they have none.
pub(super) fn start_helper_threads(identity: Option<Identity>) {
    let start = || {
        logging::start_or_warn();
        towpath_ring::reaper::on_helper_start(|| {
            crate::background::begin();
            // Before, no peer is connected.
            sandbox::enter_when_begun(Role::Reaper);
        });
        Reaper::shared().start();
        towpath_port::clsact::on_beat(|| sandbox::follow(Role::Heartbeat));
    };
    if identity.is_some() {
        return start();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            // Needs no privilege.
            let _ = set_capabilities(None, sets);
            start();
        });
    });
}

/// The engine's user by default.
const USER: &str = "towpath";

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
    fn needed_capabilities_follow_from_the_drivers() {
        let config = |driver: &str| {
            let text =
                format!("rules = \"r\"\nmonitor = \"a\"\n[port.a]\ndriver = \"{driver}\"\nread = \"x\"\n");
            let text = if driver == "pcap" { text } else { text.replace("read = \"x\"\n", "") };
            Config::parse("t", &text).unwrap()
        };
        let rows = [
            // A monitor is not exclusive.
            ("af_packet", "CAP_NET_RAW"),
            ("af_packet\"\nexclusive = true #", "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF"),
            ("af_xdp", "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF"),
            ("tap", "CAP_NET_ADMIN"),
            ("pcap", "none"),
        ];
        for (driver, expected) in rows {
            let config = config(driver);
            assert_eq!(Capabilities::needed(&config).to_string(), expected, "{driver}");
            // A launcher that loads programs has it.
            let launcher = Capabilities::of_launcher(&config).0;
            assert_eq!(launcher.contains(CapabilitySet::PERFMON), expected.contains("CAP_BPF"), "{driver}");
        }
    }
}
