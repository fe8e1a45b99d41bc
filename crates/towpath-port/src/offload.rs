//! What a frame's checksums and its segmentation still need, in the words of `struct virtio_net_hdr`.

/// What is left to be done before a frame may go out on a wire.
///
/// The sending half of a local connection leaves checksums unfinished and hands over many segments as one packet; a live
/// port passes both on as they are. [`Port::send`](crate::Port::send) accepts every frame: a port that cannot leave the work to its medium
/// ([`Caps::checksum`](crate::Caps::checksum), [`Caps::segmentation`](crate::Caps::segmentation)) does it itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// State of the transport checksum.
    pub checksum: Checksum,
    /// For a frame that stands for several.
    pub gso: Option<Gso>,
}

/// State of a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// As it stands in the frame; nobody looked.
    #[default]
    Unverified,
    /// The medium checked it: it is right (`VIRTIO_NET_HDR_F_DATA_VALID`).
    Valid,
    /// The field holds the pseudo header's sum only (`VIRTIO_NET_HDR_F_NEEDS_CSUM`): to finish it, sum all bytes from
    /// `start` and store the complement at `start + offset`.
    Partial {
        /// First byte of the sum, from the start of the frame: the transport header.
        start: u16,
        /// Place of the checksum field, from `start`.
        offset: u16,
    },
}

/// How a frame that stands for several is to be cut (generic segmentation offload).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// By what rules.
    pub kind: GsoKind,
    /// Most payload bytes for each piece (`gso_size`); never 0.
    pub size: u16,
    /// The segments carry ECN: CWR only on the first (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
}

/// By what rules a frame is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GsoKind {
    /// TCP over IPv4 (TSO).
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP datagrams of one size (USO, `VIRTIO_NET_HDR_GSO_UDP_L4`).
    Udp,
}

/// What a port takes without having it cut first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segmentation {
    /// [`GsoKind::Tcp4`].
    pub tcp4: bool,
    /// [`GsoKind::Tcp6`].
    pub tcp6: bool,
    /// [`GsoKind::Udp`].
    pub udp: bool,
}

impl Segmentation {
    /// Every kind.
    pub const ALL: Self = Self { tcp4: true, tcp6: true, udp: true };

    /// Whether frames of `kind` are taken.
    pub const fn takes(self, kind: GsoKind) -> bool {
        match kind {
            GsoKind::Tcp4 => self.tcp4,
            GsoKind::Tcp6 => self.tcp6,
            GsoKind::Udp => self.udp,
        }
    }
}
