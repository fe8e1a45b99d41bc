//! Checksum and segmentation offload metadata of a frame, with the terms of `struct virtio_net_hdr` (linux/virtio_net.h).

/// Length of `struct virtio_net_hdr`: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset.
pub const VIRTIO_NET_HDR_LEN: usize = 10;
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// The work that remains before a frame can be transmitted on a wire.
///
/// A local sender leaves checksums partial and passes many segments as one packet. A live port passes both on. A port
/// whose medium cannot do the work does it in software: [`checksum::complete`](crate::checksum::complete),
/// [`gso::segment`](crate::gso::segment).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// State of the transport checksum.
    pub checksum: Checksum,
    /// How to segment the frame; `None` if it is one packet.
    pub gso: Option<Gso>,
}

/// State of a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Complete and not verified (`CHECKSUM_NONE`).
    #[default]
    Unverified,
    /// Verified by the medium (`VIRTIO_NET_HDR_F_DATA_VALID`).
    Valid,
    /// The field holds the sum of the pseudo header only (`VIRTIO_NET_HDR_F_NEEDS_CSUM`). To complete it, sum all bytes
    /// from `start` and store the complement at `start + offset`.
    Partial {
        /// Offset of the transport header from the start of the frame.
        start: u16,
        /// Offset of the checksum field from `start`.
        offset: u16,
    },
}

/// Generic segmentation offload: how to segment a frame that stands for several packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// Protocol of the segments.
    pub kind: GsoKind,
    /// Payload bytes per segment (`gso_size`), at least 1. The last segment may be shorter.
    pub size: u16,
    /// The segments carry ECN: only the first has CWR (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
}

/// Protocol of the segments of a [`Gso`] frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GsoKind {
    /// TCP over IPv4 (TSO, `VIRTIO_NET_HDR_GSO_TCPV4`).
    Tcp4,
    /// TCP over IPv6 (TSO, `VIRTIO_NET_HDR_GSO_TCPV6`).
    Tcp6,
    /// UDP datagrams of equal size (USO, `VIRTIO_NET_HDR_GSO_UDP_L4`).
    Udp,
}

/// The kinds of segmentation that a port passes on to its medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segmentation {
    /// Passes [`GsoKind::Tcp4`].
    pub tcp4: bool,
    /// Passes [`GsoKind::Tcp6`].
    pub tcp6: bool,
    /// Passes [`GsoKind::Udp`].
    pub udp: bool,
}

impl Offload {
    /// Parses a `struct virtio_net_hdr` in native byte order.
    ///
    /// Returns `None` for a segmentation type that is not supported (UFO) or a segment size of 0.
    pub fn parse(header: &[u8; VIRTIO_NET_HDR_LEN]) -> Option<Self> {
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

    /// Emits the `struct virtio_net_hdr` for transmitting `frame`.
    ///
    /// The header is all zero unless the checksum is partial: segmentation requires a partial checksum.
    pub fn emit(self, frame: &[u8]) -> [u8; VIRTIO_NET_HDR_LEN] {
        let mut header = [0; VIRTIO_NET_HDR_LEN];
        let Checksum::Partial { start, offset } = self.checksum else { return header };
        header[0] = NEEDS_CSUM;
        header[6..8].copy_from_slice(&start.to_ne_bytes());
        header[8..10].copy_from_slice(&offset.to_ne_bytes());
        let Some(gso) = self.gso else { return header };
        let (kind, transport) = match gso.kind {
            GsoKind::Tcp4 => (GSO_TCPV4, tcp_len(frame, start)),
            GsoKind::Tcp6 => (GSO_TCPV6, tcp_len(frame, start)),
            GsoKind::Udp => (GSO_UDP_L4, 8),
        };
        header[1] = kind | if gso.ecn { GSO_ECN } else { 0 };
        header[2..4].copy_from_slice(&start.saturating_add(transport).to_ne_bytes());
        header[4..6].copy_from_slice(&gso.size.to_ne_bytes());
        header
    }

    /// Returns true if a `virtio_net_hdr` can express it: segmentation requires a partial checksum.
    pub fn is_emittable(&self) -> bool {
        self.gso.is_none() || matches!(self.checksum, Checksum::Partial { .. })
    }

    /// The metadata after `by` bytes were inserted in front of the transport header (removed, if negative).
    #[must_use]
    pub fn moved(self, by: isize) -> Self {
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

/// Length of the TCP header at `start`; 20 if the frame does not contain it.
fn tcp_len(frame: &[u8], start: u16) -> u16 {
    frame.get(usize::from(start) + 12).map_or(20, |offset| u16::from(offset >> 4) * 4)
}

impl Segmentation {
    /// Every kind.
    pub const ALL: Self = Self { tcp4: true, tcp6: true, udp: true };

    /// Returns true if frames of `kind` are passed on.
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

    #[test]
    fn emit_and_parse_are_inverse() {
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
            let offload = Offload { checksum, gso };
            let header = offload.emit(&bytes);
            assert_eq!(Offload::parse(&header), Some(offload));
            assert_eq!(u16::from_ne_bytes([header[2], header[3]]), hdr_len);
        }
    }

    #[test]
    fn unsupported_segmentation_is_rejected() {
        assert_eq!(Offload::parse(&[0, 3, 0, 0, 1, 1, 0, 0, 0, 0]), None, "UFO");
        assert_eq!(Offload::parse(&[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]), None, "a segment size of 0");
        let valid = Offload { checksum: Checksum::Valid, gso: None };
        assert_eq!(Offload::parse(&[2, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Some(valid));
    }
}
