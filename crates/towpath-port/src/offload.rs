//! What a frame's checksums and its segmentation still need, in the words of `struct virtio_net_hdr`.

use crate::Frame;

/// `struct virtio_net_hdr` of linux/virtio_net.h: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset.
pub(crate) const VNET_HEADER: usize = 10;
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

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

impl Offload {
    /// Reads a `struct virtio_net_hdr` in the machine's byte order; `None` for a kind of segmentation that has no name here (UFO).
    pub fn parse(header: &[u8; VNET_HEADER]) -> Option<Self> {
        let word = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let checksum = match header[0] {
            flags if flags & NEEDS_CSUM != 0 => Checksum::Partial { start: word(6), offset: word(8) },
            flags if flags & DATA_VALID != 0 => Checksum::Valid,
            _ => Checksum::Unverified,
        };
        let kind = match header[1] & !GSO_ECN {
            0 => return Some(Self { checksum, gso: None }),
            GSO_TCPV4 => GsoKind::Tcp4,
            GSO_TCPV6 => GsoKind::Tcp6,
            GSO_UDP_L4 => GsoKind::Udp,
            _ => return None,
        };
        let size = word(4);
        let gso = Gso { kind, size, ecn: header[1] & GSO_ECN != 0 };
        (size > 0).then_some(Self { checksum, gso: Some(gso) })
    }

    /// The `struct virtio_net_hdr` in front of `frame` on its way out. Without an unfinished checksum it says
    /// nothing: what is cut later has one.
    pub fn emit(frame: Frame<'_>) -> [u8; VNET_HEADER] {
        let mut header = [0; VNET_HEADER];
        let offload = frame.meta.offload;
        let Checksum::Partial { start, offset } = offload.checksum else { return header };
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&start.to_ne_bytes());
        header[8..10].copy_from_slice(&offset.to_ne_bytes());
        let Some(gso) = offload.gso else { return header };
        let (kind, transport) = match gso.kind {
            GsoKind::Tcp4 => (GSO_TCPV4, tcp_len(frame.bytes, start)),
            GsoKind::Tcp6 => (GSO_TCPV6, tcp_len(frame.bytes, start)),
            GsoKind::Udp => (GSO_UDP_L4, 8),
        };
        header[1] = kind | if gso.ecn { GSO_ECN } else { 0 };
        header[2..4].copy_from_slice(&start.saturating_add(transport).to_ne_bytes());
        header[4..6].copy_from_slice(&gso.size.to_ne_bytes());
        header
    }

    /// Whether a `virtio_net_hdr` can say it: a frame that is to be cut needs an unfinished checksum.
    pub(crate) fn is_sendable(&self) -> bool {
        self.gso.is_none() || matches!(self.checksum, Checksum::Partial { .. })
    }

    /// What it is after `by` bytes were put in front of the transport header (or taken away, when negative).
    pub(crate) fn moved(self, by: isize) -> Self {
        let checksum = match self.checksum {
            Checksum::Partial { start, offset } => {
                let start = usize::from(start).saturating_add_signed(by);
                u16::try_from(start).map_or(Checksum::Unverified, |start| Checksum::Partial { start, offset })
            }
            checksum => checksum,
        };
        Self { checksum, ..self }
    }
}

/// Length of the TCP header at `start`; 20 when it is not there.
fn tcp_len(bytes: &[u8], start: u16) -> u16 {
    bytes.get(usize::from(start) + 12).map_or(20, |offset| u16::from(offset >> 4) * 4)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LinkType;

    #[test]
    fn a_header_says_what_it_was_made_from() {
        let partial = Checksum::Partial { start: 34, offset: 16 };
        let gso = |kind, ecn| Some(Gso { kind, size: 1448, ecn });
        #[rustfmt::skip]
        let rows = [
            (Checksum::Unverified, None,                      0),
            (partial,              None,                      0),
            (partial,              gso(GsoKind::Tcp4, false), 66),
            (partial,              gso(GsoKind::Tcp6, true),  66),
            (partial,              gso(GsoKind::Udp, false),  42),
        ];
        let mut bytes = [0; 100];
        bytes[46] = 8 << 4; // a TCP header of 32 bytes at 34
        for (checksum, gso, hdr_len) in rows {
            let mut frame = Frame::new(&bytes, LinkType::ETHERNET);
            frame.meta.offload = Offload { checksum, gso };
            let header = Offload::emit(frame);
            assert_eq!(Offload::parse(&header), Some(frame.meta.offload));
            assert_eq!(u16::from_ne_bytes([header[2], header[3]]), hdr_len);
        }
    }

    #[test]
    fn what_has_no_name_is_no_offload() {
        assert_eq!(Offload::parse(&[0, 3, 0, 0, 1, 1, 0, 0, 0, 0]), None, "UFO");
        assert_eq!(Offload::parse(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]), None, "segments of no bytes");
        let valid = Offload { checksum: Checksum::Valid, gso: None };
        assert_eq!(Offload::parse(&[2, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Some(valid));
    }
}
