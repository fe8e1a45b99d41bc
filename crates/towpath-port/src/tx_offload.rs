//! Transmit offload in software: prepares frames for a live port's medium.
//!
//! A frame that the medium accepts is sent from where it is. Otherwise its checksum is completed, or it is segmented, in a
//! buffer of the port.
//!
//! Invariant: the buffer is bounded by [`BYTES`] plus the segments of one frame, and is transmitted before it is cleared.

use std::ops::Range;

use towpath_wire::{VIRTIO_NET_HDR_LEN, checksum, gso};

use crate::{Checksum, Error, Frame, LinkType, MAX_FRAME, Segmentation};

/// Limit on pieces per transmission.
pub(crate) const BATCH: usize = 64;
/// Buffered bytes that trigger a transmission.
const BYTES: usize = 256 << 10;

/// Properties of a medium.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Medium {
    /// Required link type.
    pub(crate) link: LinkType,
    /// Length of the longest piece, with link header, without VLAN tags.
    pub(crate) max_piece: usize,
    /// The medium completes partial checksums.
    pub(crate) checksum: bool,
    /// The kinds of frames that the medium segments.
    pub(crate) segmentation: Segmentation,
}

/// One message to the medium: a frame or a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// The virtio_net_hdr, for a medium that uses it.
    pub(crate) vnet: [u8; VIRTIO_NET_HDR_LEN],
    bytes: Bytes<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Bytes<'a> {
    Lent(&'a [u8]),
    /// Index of its range in the buffer.
    Staged(usize),
}

/// Buffer for frames that the medium does not accept as they are.
#[derive(Debug, Default)]
pub(crate) struct TxOffload {
    bytes: Vec<u8>,
    places: Vec<Range<usize>>,
}

/// Reason why a port cannot send a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TxError {
    TooLong { len: usize, max: usize },
    LinkType { link: LinkType, frame: LinkType },
}

impl TxOffload {
    /// The bytes of a piece.
    pub(crate) fn bytes<'a>(&'a self, piece: &Piece<'a>) -> &'a [u8] {
        match piece.bytes {
            Bytes::Lent(bytes) => bytes,
            Bytes::Staged(place) => &self.bytes[self.places[place].clone()],
        }
    }

    /// Sends all of `frames`: prepares each for `medium` and passes the pieces to `transmit`, at most [`BATCH`] at a time.
    /// Returns the number of frames accepted.
    ///
    /// # Errors
    /// [`Error::TooLong`] or [`Error::LinkType`] for the frame taken last. Errors of `transmit`, which counts the pieces it was
    /// given and did not send.
    pub(crate) fn send<'a>(
        &mut self,
        name: &str,
        medium: &Medium,
        frames: &mut dyn Iterator<Item = Frame<'a>>,
        transmit: impl FnMut(&Self, &[Piece<'_>]) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let sent = self.send_pieces(name, medium, frames, transmit);
        self.clear();
        sent
    }

    fn send_pieces<'a>(
        &mut self,
        name: &str,
        medium: &Medium,
        frames: &mut dyn Iterator<Item = Frame<'a>>,
        mut transmit: impl FnMut(&Self, &[Piece<'_>]) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let empty = Piece { vnet: [0; VIRTIO_NET_HDR_LEN], bytes: Bytes::Lent(&[]) };
        let mut pieces = [empty; BATCH];
        let (mut len, mut taken, mut failed) = (0, 0, None);
        for frame in frames {
            let staged = match self.prepare(medium, frame) {
                Ok(Prepared::AsIs(frame)) => {
                    pieces[len] =
                        Piece { vnet: frame.meta.offload.emit(frame.bytes), bytes: Bytes::Lent(frame.bytes) };
                    len += 1;
                    0..0
                }
                Ok(Prepared::Staged(places)) => places,
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            taken += 1;
            for place in staged {
                if len == BATCH {
                    transmit(self, &pieces)?;
                    len = 0;
                }
                pieces[len] = Piece { bytes: Bytes::Staged(place), ..empty };
                len += 1;
            }
            if len == BATCH || self.bytes.len() >= BYTES {
                transmit(self, &pieces[..len])?;
                len = 0;
                self.clear();
            }
        }
        if len > 0 {
            transmit(self, &pieces[..len])?;
        }
        failed.map_or(Ok(taken), |error| Err(error.error(name)))
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.places.clear();
    }

    fn prepare<'a>(&mut self, medium: &Medium, frame: Frame<'a>) -> Result<Prepared<'a>, TxError> {
        let mut frame = relink(medium.link, frame)?;
        let (link, bytes, offload) = (frame.link, frame.bytes, frame.meta.offload);
        if bytes.len() > MAX_FRAME {
            return Err(TxError::TooLong { len: bytes.len(), max: MAX_FRAME });
        }
        if let Some(gso) = offload.gso {
            frame.meta.offload = gso::limit(link, bytes, offload, medium.max(bytes));
            if medium.segmentation.takes(gso.kind) && offload.is_emittable() {
                medium.fits(bytes, gso::max_segment_len(link, bytes, frame.meta.offload))?;
                return Ok(Prepared::AsIs(frame));
            }
            return self.cut(medium, frame);
        }
        medium.fits(bytes, bytes.len())?;
        let unfinished = matches!(offload.checksum, Checksum::Partial { .. });
        if medium.checksum || !unfinished {
            return Ok(Prepared::AsIs(frame));
        }
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        checksum::complete(&mut self.bytes[start..], offload);
        self.places.push(start..self.bytes.len());
        Ok(Prepared::Staged(self.places.len() - 1..self.places.len()))
    }

    fn cut<'a>(&mut self, medium: &Medium, frame: Frame<'a>) -> Result<Prepared<'a>, TxError> {
        let (bytes, first) = (self.bytes.len(), self.places.len());
        let Frame { bytes: whole, link, meta, .. } = frame;
        let result = if gso::segment(link, whole, meta.offload, &mut self.bytes, &mut self.places) {
            // No segment is longer than the first.
            let longest = &self.bytes[self.places[first].clone()];
            medium.fits(longest, longest.len())
        } else {
            Err(TxError::TooLong { len: whole.len(), max: medium.max_piece })
        };
        if result.is_err() {
            self.bytes.truncate(bytes);
            self.places.truncate(first);
        }
        result.map(|()| Prepared::Staged(first..self.places.len()))
    }
}

/// A prepared frame.
enum Prepared<'a> {
    AsIs(Frame<'a>),
    /// Buffered, at these indices of ranges.
    Staged(Range<usize>),
}

impl Medium {
    /// Length of the longest piece that begins like `bytes`.
    fn max(&self, bytes: &[u8]) -> usize {
        // The MTU does not include a VLAN tag.
        let tag = match bytes.get(12..14) {
            Some([0x81, 0x00] | [0x88, 0xa8]) if self.link == LinkType::ETHERNET => 4,
            _ => 0,
        };
        self.max_piece + tag
    }

    /// Checks that a piece of `len` bytes that begins like `bytes` can be sent.
    fn fits(&self, bytes: &[u8], len: usize) -> Result<(), TxError> {
        let max = self.max(bytes);
        if len > max { Err(TxError::TooLong { len, max }) } else { Ok(()) }
    }
}

impl TxError {
    fn error(self, name: &str) -> Error {
        let name = name.into();
        match self {
            Self::TooLong { len, max } => Error::TooLong { name, len, max },
            Self::LinkType { link, frame } => Error::LinkType { name, link, frame },
        }
    }
}

/// Converts the frame to link type `link`: an Ethernet header can be removed, but not added.
fn relink(link: LinkType, frame: Frame<'_>) -> Result<Frame<'_>, TxError> {
    if frame.link.canonical() == link.canonical() {
        return Ok(frame);
    }
    let error = TxError::LinkType { link, frame: frame.link };
    if frame.link != LinkType::ETHERNET || !link.is_raw_ip() {
        return Err(error);
    }
    let len = towpath_wire::ip_offset(frame.link, frame.bytes).ok_or(error)?;
    let mut frame = Frame { bytes: &frame.bytes[len..], link, ..frame };
    frame.meta.offload = frame.meta.offload.moved(-(len as isize));
    Ok(frame)
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;
    use crate::{Gso, GsoKind};

    fn medium(checksum: bool, segmentation: Segmentation) -> Medium {
        Medium { link: LinkType::RAW, max_piece: 1500, checksum, segmentation }
    }

    fn udp(payload: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.udp(1, 2).write(&mut bytes, &vec![7; payload]).unwrap();
        bytes
    }

    fn sent(medium: &Medium, frame: Frame<'_>, times: usize) -> Result<(usize, Vec<Vec<u8>>), Error> {
        let mut stage = TxOffload::default();
        let mut out = Vec::new();
        let taken = stage.send("t", medium, &mut std::iter::repeat_n(frame, times), |stage, pieces| {
            assert!(pieces.len() <= BATCH);
            out.extend(pieces.iter().map(|piece| stage.bytes(piece).to_vec()));
            Ok(())
        })?;
        Ok((taken, out))
    }

    #[test]
    fn buffer_is_cleared_after_an_error() {
        let (bytes, mut stage) = (udp(4000), TxOffload::default());
        let frame = Frame::new(&bytes, LinkType::ETHERNET);
        // The checksum is completed in the buffer.
        let mut frame = frame;
        frame.meta.offload.checksum = Checksum::Partial { start: 34, offset: 6 };
        let medium = Medium { max_piece: 9000, ..medium(false, Segmentation::default()) };
        let result = stage.send("t", &medium, &mut std::iter::repeat_n(frame, 3), |stage, pieces| {
            assert_eq!((pieces.len(), stage.places.len()), (3, 3));
            Err(Error::Io { name: "t".into(), source: std::io::Error::other("broken") })
        });
        assert!(matches!(result, Err(Error::Io { .. })));
        assert!(stage.bytes.is_empty() && stage.places.is_empty());
    }

    #[test]
    fn frames_are_segmented_only_if_the_medium_cannot() {
        let bytes = udp(4000);
        let mut frame = Frame::new(&bytes, LinkType::ETHERNET);
        frame.meta.offload.checksum = Checksum::Partial { start: 34, offset: 6 };
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Udp, size: 1000, ecn: false });
        let (taken, out) = sent(&medium(true, Segmentation::ALL), frame, 3).unwrap();
        assert_eq!((taken, out.len()), (3, 3));
        assert!(out.iter().all(|piece| piece == &bytes[14..]));

        let (taken, out) = sent(&medium(true, Segmentation::default()), frame, 300).unwrap();
        assert_eq!((taken, out.len()), (300, 1200));
        assert!(out.iter().all(|piece| piece.len() == 1028));
    }

    /// Segments of hardware and software do not exceed the medium's limit.
    #[test]
    fn segments_fit_the_medium() {
        let mut tcp = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.tcp(1, 2, 3, 4).write(&mut tcp, &[7; 4000]).unwrap();
        let mut frame = Frame::new(&tcp, LinkType::ETHERNET);
        frame.meta.offload.checksum = Checksum::Partial { start: 34, offset: 16 };
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Tcp4, size: 8960, ecn: false });
        let mut size = 0;
        let all = medium(true, Segmentation::ALL);
        let taken = TxOffload::default().send("t", &all, &mut std::iter::once(frame), |_, pieces| {
            size = u16::from_ne_bytes([pieces[0].vnet[4], pieces[0].vnet[5]]);
            Ok(())
        });
        assert_eq!((taken.unwrap(), size), (1, 1460));
        let (_, out) = sent(&medium(false, Segmentation::default()), frame, 1).unwrap();
        assert_eq!(out.iter().map(Vec::len).collect::<Vec<_>>(), [1500, 1500, 1120]);

        let bytes = udp(4000);
        let mut frame = Frame::new(&bytes, LinkType::ETHERNET);
        frame.meta.offload.checksum = Checksum::Partial { start: 34, offset: 6 };
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Udp, size: 2000, ecn: false });
        let error = sent(&all, frame, 1).unwrap_err();
        assert!(matches!(error, Error::TooLong { len: 2028, max: 1500, .. }), "{error}");
    }

    #[test]
    fn unsendable_frames_are_errors() {
        let bytes = udp(4000);
        let frame = Frame::new(&bytes, LinkType::ETHERNET);
        let error = sent(&medium(false, Segmentation::default()), frame, 1).unwrap_err();
        assert!(matches!(error, Error::TooLong { len: 4028, max: 1500, .. }), "{error}");
        let raw = Frame::new(&bytes[14..], LinkType::RAW);
        let ethernet = Medium { link: LinkType::ETHERNET, ..medium(false, Segmentation::default()) };
        assert!(matches!(sent(&ethernet, raw, 1), Err(Error::LinkType { .. })));
        let arp = [&[0; 12][..], &[8, 6], &[0; 28]].concat();
        let arp = Frame::new(&arp, LinkType::ETHERNET);
        assert!(matches!(sent(&medium(true, Segmentation::ALL), arp, 1), Err(Error::LinkType { .. })));
    }
}
