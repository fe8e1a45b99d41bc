//! Descriptors that need a privilege, opened in this process or by another one.
//!
//! A driver opens only these with privileges, and sets up the rest of a port itself. A process without privileges gets them from a
//! privileged one: see [`Opener::new`].

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::claim::Claim;
use crate::driver::DriverConfig;

/// A descriptor of a port that needs a privilege to open.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// `af_packet`: a packet socket with its send buffer (CAP_NET_RAW; CAP_NET_ADMIN for a buffer above net.core.wmem_max).
    PacketSocket,
    /// `af_packet`: the programs of an exclusive port (CAP_NET_ADMIN, CAP_BPF). The link, or before
    /// Linux 6.6 the map of its heartbeat, and the filter of its sockets if there is one.
    IngressProgram,
    /// `af_packet` and `af_xdp` with offload: the maps of flows (CAP_BPF, CAP_NET_ADMIN), which all ports of an engine share. Ten
    /// descriptors.
    FlowMap {
        /// The process id of the engine: during an upgrade, one process opens the objects of two.
        engine: u32,
    },
    /// `af_packet` with offload: the programs for flows (CAP_NET_ADMIN, CAP_BPF). The link of the program at the ingress hook, and the
    /// filter of the sockets; the link again if it is pinned.
    FlowProgram {
        /// The process id of the engine.
        engine: u32,
    },
    /// `af_xdp`: an XDP socket (CAP_NET_RAW). Binding it and registering its memory need no privilege.
    XdpSocket,
    /// `af_xdp`: the XDP program on the interface (CAP_NET_ADMIN, CAP_BPF). Two descriptors: the map of sockets and the link.
    XdpProgram {
        /// Support frames of several buffers.
        frags: bool,
    },
    /// `af_xdp` with offload: the XDP program for flows (CAP_NET_ADMIN, CAP_BPF). The map of sockets and the program; if it is attached to
    /// the interface, the link, and the link again if it is pinned and stays when the engine is killed.
    XdpFlowProgram {
        /// The process id of the engine.
        engine: u32,
        /// Support frames of several buffers.
        frags: bool,
        /// Attach it. Otherwise it takes the place of another engine's program.
        attach: bool,
    },
    /// `tun`, `tap`: checks that the device node can be opened. No descriptor.
    TunNode,
    /// `tun`, `tap`: a queue of the interface, which is up (CAP_NET_ADMIN).
    TunQueue {
        /// The interface has several queues.
        multi_queue: bool,
        /// Its name: that of the configuration, or one that its `%d` stands for.
        interface: String,
    },
    /// `nfqueue`: raw sockets of IPv4, and IPv6 if the kernel has it (CAP_NET_RAW).
    RawSockets,
}

type Open = dyn Fn(&Object) -> io::Result<Vec<OwnedFd>> + Send + Sync;

/// Opens the objects of one port.
#[derive(Clone)]
pub struct Opener {
    open: Arc<Open>,
    /// The claim of the port: its sockets keep their opener, and so the claim.
    claim: Option<Arc<Claim>>,
}

impl Opener {
    /// An opener that calls `open`, which may ask another process: one with the same configuration, that calls
    /// [`driver::Config::open_object`](crate::driver::Config::open_object). Errors must keep their number (errno(3)).
    pub fn new(open: impl Fn(&Object) -> io::Result<Vec<OwnedFd>> + Send + Sync + 'static) -> Self {
        Self { open: Arc::new(open), claim: None }
    }

    /// An opener with the privileges of this process.
    pub(crate) fn local<C: DriverConfig + Clone + Send + Sync + 'static>(config: &C) -> Self {
        let config = config.clone();
        Self::new(move |object| config.open_object(object))
    }

    /// The opener of a port that has a claim.
    pub(crate) fn with_claim(&self, claim: Claim) -> Self {
        Self { open: Arc::clone(&self.open), claim: Some(Arc::new(claim)) }
    }

    pub(crate) fn open(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        (self.open)(object)
    }

    /// Opens an object of `N` descriptors.
    /// The claim of the port's medium, for another process.
    pub(crate) fn claim(&self) -> io::Result<Option<OwnedFd>> {
        self.claim.as_ref().map_or(Ok(None), |claim| claim.descriptor())
    }

    pub(crate) fn open_all<const N: usize>(&self, object: &Object) -> io::Result<[OwnedFd; N]> {
        self.open(object)?.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener")
    }
}
