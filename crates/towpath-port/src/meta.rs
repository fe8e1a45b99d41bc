use crate::Offload;

/// Metadata of a frame from a live port. Frames of a capture have [`Meta::default`].
///
/// Keep it together with the frame's bytes, and pass both to [`Port::send`](crate::Port::send) or
/// [`Port::verdict`](crate::Port::verdict).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Receive queue of the interface; 0 if it has one.
    pub queue: u16,
    /// Checksum and segmentation work that remains.
    pub offload: Offload,
    /// Firewall mark (`SO_MARK`, `skb->mark`); 0 if the port has none. A verdict sets the packet's mark to this value.
    pub mark: u32,
    /// Mark to set in the kernel's connection tracking entry with the verdict. No effect without [`Queued::conntrack`].
    pub connmark: Option<u32>,
    /// The kernel's queue entry, if the kernel holds the packet until [`Port::verdict`](crate::Port::verdict) (NFQUEUE).
    pub queued: Option<Queued>,
}

/// A packet in a kernel queue (NFQUEUE).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queued {
    /// Packet id, unique among the waiting packets of one queue.
    pub id: u32,
    /// The netfilter hook (`NF_INET_`, linux/netfilter.h): 0 prerouting, 1 local in, 2 forward, 3 local
    /// out, 4 postrouting.
    pub hook: u8,
    /// Index of the output interface; 0 if the hook does not know it.
    pub out_interface: u32,
    /// Positions of the input and the output interface in [`Config::interfaces`](crate::nfqueue::Config::interfaces), for listed ones.
    pub listed: [Option<u16>; 2],
    /// Mark of the packet when it was queued.
    pub mark: u32,
    /// The frame is truncated (`copy_range`). Only a complete packet can replace it.
    pub cut: bool,
    /// Connection tracking entry, if requested and available.
    pub conntrack: Option<Conntrack>,
}

/// Connection tracking entry of a packet (linux/netfilter/nf_conntrack_common.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conntrack {
    /// `enum ip_conntrack_info`: 0 established, 1 related, 2 new, 3 established in reply direction, 4 related in reply direction.
    pub info: u32,
    /// Connection id.
    pub id: u32,
    /// `IPS_` bits: 1 expected, 2 seen reply, 4 assured, 8 confirmed...
    pub status: u32,
    /// Connection mark.
    pub mark: u32,
}
