//! Workers of a mux on other machines, over the servers of `[fleet]`.

use std::io;

use crate::config::{Fleet, Mux, RemoteWorkers};
use crate::worker_pool::RemoteSlots;

#[cfg(feature = "fleet")]
pub(super) use crate::remote_workers::RemoteFront;

/// This build has no client of NATS.
#[cfg(not(feature = "fleet"))]
#[derive(Debug)]
pub(super) enum RemoteFront {}

/// What the client of NATS needs to know.
#[derive(Debug)]
#[cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "this build has no client of NATS"))]
pub(super) struct RemoteConfig {
    workers: RemoteWorkers,
    /// The name of the mux in subjects.
    front: String,
    fleet: Fleet,
}

impl RemoteConfig {
    /// `None`: the mux has only workers of this machine.
    pub(super) fn of(mux: &Mux, fleet: Option<&Fleet>) -> Option<Self> {
        let (workers, fleet) = (mux.remote.clone()?, fleet?.clone());
        Some(Self { workers, front: RemoteWorkers::front(&fleet.gate, &mux.name), fleet })
    }

    /// Starts the client of NATS. Worker hosts need not be there, nor a server.
    ///
    /// # Errors
    /// A descriptor or the thread cannot be made, or this build has no client of NATS.
    #[cfg(feature = "fleet")]
    pub(super) fn start(self) -> io::Result<(RemoteFront, RemoteSlots)> {
        use crate::remote_workers::{BusSettings, FrontConfig};
        let RemoteWorkers { subject, most } = self.workers;
        let bus = BusSettings { server: crate::fleet::server(&self.fleet), subject, name: self.front };
        let begin = || crate::sandbox::enter(crate::sandbox::Role::RemoteWorkers);
        let front = RemoteFront::start(FrontConfig { bus, begin })?;
        let remote = RemoteSlots { starter: front.starter(), most };
        Ok((front, remote))
    }

    /// Fails: this build has no client of NATS.
    #[cfg(not(feature = "fleet"))]
    pub(super) fn start(self) -> io::Result<(RemoteFront, RemoteSlots)> {
        Err(io::Error::other("this towpath was built without `remote`; build it with `--features fleet`"))
    }
}
