use crate::Offload;

/// What a live port knows about a frame besides its bytes. A capture's frames have [`Meta::default`].
///
/// It travels with the frame: whoever keeps a frame's bytes keeps its `Meta` and gives both to [`Port::send`](crate::Port::send) or
/// [`Port::verdict`](crate::Port::verdict).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// The receive queue of the interface, where it has several.
    pub queue: u16,
    /// What of checksums and segmentation is still to be done, and by whom it may be left.
    pub offload: Offload,
    /// The firewall mark (`SO_MARK`, `skb->mark`); 0 where the port has none. What it is when a verdict is given is
    /// what the packet has from then on.
    pub mark: u32,
    /// For a frame that the kernel holds until [`Port::verdict`](crate::Port::verdict) (NFQUEUE).
    pub queued: Option<Queued>,
}

/// A packet that waits in the kernel for its verdict (NFQUEUE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queued {
    /// The kernel's number for it, unique among the packets of one queue that wait.
    pub id: u32,
    /// Where in the kernel it waits: an `NF_INET_` hook (linux/netfilter.h), 0 prerouting, 1 local in, 2 forward, 3 local
    /// out, 4 postrouting.
    pub hook: u8,
    /// Number of the interface that it will leave by, 0 when that is not known at the hook.
    pub out_interface: u32,
    /// The mark that it had when it was queued.
    pub mark: u32,
    /// Only its beginning was handed over: nothing but a whole packet can replace it.
    pub cut: bool,
    /// Its connection, where the port was asked for it and the kernel tracks connections.
    pub conntrack: Option<Conntrack>,
}

/// What the kernel's connection tracking says about a packet (linux/netfilter/nf_conntrack_common.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conntrack {
    /// `enum ip_conntrack_info`: 0 established, 1 related, 2 new, 3 established in reply direction, 4 related in reply direction.
    pub info: u32,
    /// Number of the connection.
    pub id: u32,
    /// `IPS_` bits: 1 expected, 2 seen reply, 4 assured, 8 confirmed...
    pub status: u32,
    /// The connection's own mark.
    pub mark: u32,
}
