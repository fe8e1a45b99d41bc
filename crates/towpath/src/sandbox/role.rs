//! The roles of the engine's threads, and the system calls of each.

use super::Needs;
use super::calls::{
    BASE, BPF, Call, FILE_EVENTS, FILES_READ, FILES_WRITTEN, Group, IO_URING, PROCESSES, SHARED_MEMORY,
    SOCKET_DATA, SOCKET_FILES, SOCKETS, WORKERS,
};

/// What a thread of the engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `engine-N`: packets, and the muxes on this thread.
    Packet,
    /// `mux-NAME`: a mux on its own thread.
    Mux,
    /// The first thread: start, reload, upgrade, end, inspectors.
    Supervisor,
    /// Requests of `towpath ctl`.
    Control,
    /// Dumps and packet logs on rings.
    Dumps,
    /// The metrics endpoint.
    Metrics,
    /// Decides which flows the kernel forwards.
    Offload,
    /// Events as JSON lines.
    Events,
    /// Flow records.
    Ipfix,
    /// States of a group of gates, and its bus.
    Fleet,
    /// Workers of a mux on other machines: their rings, and the bus.
    RemoteWorkers,
    /// The running snapshot.
    States,
    /// Notifies the service manager.
    Watchdog,
    /// Writes the log.
    Log,
    /// Frees memory and closes connections of peers that have gone.
    Reaper,
    /// The heartbeat of an exclusive port before Linux 6.6.
    Heartbeat,
}

impl Role {
    /// All roles, in the order of the documentation.
    pub const ALL: &[Self] = &[
        Self::Packet,
        Self::Mux,
        Self::Supervisor,
        Self::Control,
        Self::Dumps,
        Self::Metrics,
        Self::Offload,
        Self::Events,
        Self::Ipfix,
        Self::Fleet,
        Self::RemoteWorkers,
        Self::States,
        Self::Watchdog,
        Self::Log,
        Self::Reaper,
        Self::Heartbeat,
    ];

    /// The name in messages and in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Packet => "packet",
            Self::Mux => "mux",
            Self::Supervisor => "supervisor",
            Self::Control => "control",
            Self::Dumps => "dumps",
            Self::Metrics => "metrics",
            Self::Offload => "offload",
            Self::Events => "events",
            Self::Ipfix => "ipfix",
            Self::Fleet => "fleet",
            Self::RemoteWorkers => "remote-workers",
            Self::States => "states",
            Self::Watchdog => "watchdog",
            Self::Log => "log",
            Self::Reaper => "reaper",
            Self::Heartbeat => "heartbeat",
        }
    }

    /// The groups of a role besides [`BASE`].
    fn groups(self) -> &'static [&'static Group] {
        match self {
            Self::Packet | Self::Mux => &[
                &SOCKET_DATA,
                &SOCKETS,
                &SHARED_MEMORY,
                &FILES_READ,
                &SOCKET_FILES,
                &FILE_EVENTS,
                &WORKERS,
                &IO_URING,
                &BPF,
            ],
            Self::Supervisor => &[
                &SOCKET_DATA,
                &SOCKETS,
                &SHARED_MEMORY,
                &FILES_READ,
                &FILES_WRITTEN,
                &FILE_EVENTS,
                &PROCESSES,
                &BPF,
            ],
            Self::Control => &[&SOCKET_DATA, &FILES_READ, &BPF],
            Self::Dumps => {
                &[&SOCKET_DATA, &SHARED_MEMORY, &FILES_READ, &SOCKET_FILES, &FILE_EVENTS, &PROCESSES]
            }
            Self::Metrics => &[&SOCKET_DATA, &FILES_READ],
            Self::Offload => &[&SOCKET_DATA, &SOCKETS, &FILES_READ, &BPF],
            Self::Events => &[&SOCKET_DATA, &SOCKETS, &FILES_READ, &FILES_WRITTEN],
            Self::Ipfix => &[&SOCKET_DATA, &SOCKETS],
            // Reads certificates, and the files of the resolver.
            Self::Fleet => &[&SOCKET_DATA, &SOCKETS, &FILES_READ],
            Self::RemoteWorkers => &[&SOCKET_DATA, &SOCKETS, &SHARED_MEMORY, &FILES_READ],
            Self::States => &[&FILES_READ, &FILES_WRITTEN],
            Self::Watchdog => &[&SOCKET_DATA, &SOCKETS],
            Self::Log => &[&SOCKET_DATA, &SOCKETS, &SHARED_MEMORY],
            Self::Reaper => &[&SOCKET_DATA, &SOCKET_FILES, &FILE_EVENTS],
            Self::Heartbeat => &[],
        }
    }

    /// True if the threads of this role may open files for writing.
    pub(super) fn writes_files(self, needs: &Needs) -> bool {
        let has = |name| self.groups().iter().any(|group| group.name == name);
        match self {
            // TUN and TAP devices are opened for reading and writing; the Unix sockets of muxes have locks, which are files.
            Self::Packet => needs.opens_ports || needs.muxes,
            _ => has(FILES_WRITTEN.name) || has(SOCKET_FILES.name),
        }
    }

    /// The groups of a role in an engine with these needs.
    pub(super) fn groups_with<'a>(self, needs: &'a Needs) -> impl Iterator<Item = &'static Group> + 'a {
        std::iter::once(&BASE).chain(self.groups().iter().copied()).filter(|group| needs.has(group.need))
    }

    /// The system calls of a role in an engine with these needs.
    pub(super) fn calls(self, needs: &Needs) -> Vec<Call> {
        self.groups_with(needs).flat_map(|group| group.calls.iter().copied().flatten().copied()).collect()
    }
}
