//! Frames on their way out of a live port: as they are where its medium takes them so, otherwise finished or cut in memory of the
//! port's own.
//!
//! Invariant: what is staged is bounded by [`BYTES`] and one frame's pieces; it is handed to the medium before it is forgotten.

use std::ops::Range;

use towpath_wire::{VIRTIO_NET_HDR_LEN, checksum, gso};

use crate::{Checksum, Error, Frame, LinkType, MAX_FRAME, Segmentation};

/// Most pieces that are handed over at once.
pub(crate) const BATCH: usize = 64;
/// Staged bytes after which everything is handed over.
const BYTES: usize = 256 << 10;

/// What a port's medium takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Medium {
    /// How a frame must begin.
    pub(crate) link: LinkType,
    /// Longest piece, link header included, VLAN tags not.
    pub(crate) max_piece: usize,
    /// Unfinished checksums pass.
    pub(crate) checksum: bool,
    /// Frames to be cut pass.
    pub(crate) segmentation: Segmentation,
}

/// One message for the medium.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// Its virtio_net_hdr, for a medium that has one.
    pub(crate) vnet: [u8; VIRTIO_NET_HDR_LEN],
    bytes: Bytes<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Bytes<'a> {
    Lent(&'a [u8]),
    /// Index of its place.
    Staged(usize),
}

/// Memory for what cannot go as it is.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    bytes: Vec<u8>,
    places: Vec<Range<usize>>,
}

/// Why a frame cannot be sent by a port at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    TooLong { len: usize, max: usize },
    LinkType { link: LinkType, frame: LinkType },
}

impl Stage {
    /// The bytes of a piece.
    pub(crate) fn bytes<'a>(&'a self, piece: &Piece<'a>) -> &'a [u8] {
        match piece.bytes {
            Bytes::Lent(bytes) => bytes,
            Bytes::Staged(place) => &self.bytes[self.places[place].clone()],
        }
    }

    /// Sends all of `frames`: makes each into pieces that `medium` takes, and gives them to `transmit`, at most [`BATCH`] at a
    /// time. Returns how many frames were taken.
    ///
    /// # Errors
    /// For the frame pulled last, when it cannot be sent at all ([`Error::TooLong`], [`Error::LinkType`]); what `transmit` says, who
    /// counts what it did not send of what it was given.
    pub(crate) fn send<'a>(
        &mut self,
        name: &str,
        medium: &Medium,
        frames: &mut dyn Iterator<Item = Frame<'a>>,
        transmit: impl FnMut(&Self, &[Piece<'_>]) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let sent = self.hand_over(name, medium, frames, transmit);
        self.clear();
        sent
    }

    fn hand_over<'a>(
        &mut self,
        name: &str,
        medium: &Medium,
        frames: &mut dyn Iterator<Item = Frame<'a>>,
        mut transmit: impl FnMut(&Self, &[Piece<'_>]) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let empty = Piece { vnet: [0; VIRTIO_NET_HDR_LEN], bytes: Bytes::Lent(&[]) };
        let mut pieces = [empty; BATCH];
        let (mut len, mut taken, mut refused) = (0, 0, None);
        for frame in frames {
            let staged = match self.prepare(medium, frame) {
                Ok(Prepared::AsIs(frame)) => {
                    pieces[len] =
                        Piece { vnet: frame.meta.offload.emit(frame.bytes), bytes: Bytes::Lent(frame.bytes) };
                    len += 1;
                    0..0
                }
                Ok(Prepared::Staged(places)) => places,
                Err(refusal) => {
                    refused = Some(refusal);
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
        refused.map_or(Ok(taken), |refusal| Err(refusal.error(name)))
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.places.clear();
    }

    fn prepare<'a>(&mut self, medium: &Medium, frame: Frame<'a>) -> Result<Prepared<'a>, Refusal> {
        let mut frame = relink(medium.link, frame)?;
        let (link, bytes, offload) = (frame.link, frame.bytes, frame.meta.offload);
        if bytes.len() > MAX_FRAME {
            return Err(Refusal::TooLong { len: bytes.len(), max: MAX_FRAME });
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

    fn cut<'a>(&mut self, medium: &Medium, frame: Frame<'a>) -> Result<Prepared<'a>, Refusal> {
        let (bytes, first) = (self.bytes.len(), self.places.len());
        let Frame { bytes: whole, link, meta, .. } = frame;
        let result = if gso::segment(link, whole, meta.offload, &mut self.bytes, &mut self.places) {
            // The first is as long as any.
            let longest = &self.bytes[self.places[first].clone()];
            medium.fits(longest, longest.len())
        } else {
            Err(Refusal::TooLong { len: whole.len(), max: medium.max_piece })
        };
        if result.is_err() {
            self.bytes.truncate(bytes);
            self.places.truncate(first);
        }
        result.map(|()| Prepared::Staged(first..self.places.len()))
    }
}

/// What became of a frame.
enum Prepared<'a> {
    AsIs(Frame<'a>),
    /// Staged at these places.
    Staged(Range<usize>),
}

impl Medium {
    /// Bytes of the longest piece that begins as `bytes` do.
    fn max(&self, bytes: &[u8]) -> usize {
        // A VLAN tag is no part of the MTU.
        let tag = match bytes.get(12..14) {
            Some([0x81, 0x00] | [0x88, 0xa8]) if self.link == LinkType::ETHERNET => 4,
            _ => 0,
        };
        self.max_piece + tag
    }

    /// Whether `len` bytes that begin as `bytes` do can go out.
    fn fits(&self, bytes: &[u8], len: usize) -> Result<(), Refusal> {
        let max = self.max(bytes);
        if len > max { Err(Refusal::TooLong { len, max }) } else { Ok(()) }
    }
}

impl Refusal {
    fn error(self, name: &str) -> Error {
        let name = name.into();
        match self {
            Self::TooLong { len, max } => Error::TooLong { name, len, max },
            Self::LinkType { link, frame } => Error::LinkType { name, link, frame },
        }
    }
}

/// The frame with the link header that the medium needs: an Ethernet header can be taken off; none can be made up.
fn relink(link: LinkType, frame: Frame<'_>) -> Result<Frame<'_>, Refusal> {
    if frame.link.canonical() == link.canonical() {
        return Ok(frame);
    }
    let refusal = Refusal::LinkType { link, frame: frame.link };
    if frame.link != LinkType::ETHERNET || !link.is_raw_ip() {
        return Err(refusal);
    }
    let len = towpath_wire::ip_offset(frame.link, frame.bytes).ok_or(refusal)?;
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
        let mut stage = Stage::default();
        let mut out = Vec::new();
        let taken = stage.send("t", medium, &mut std::iter::repeat_n(frame, times), |stage, pieces| {
            assert!(pieces.len() <= BATCH);
            out.extend(pieces.iter().map(|piece| stage.bytes(piece).to_vec()));
            Ok(())
        })?;
        Ok((taken, out))
    }

    #[test]
    fn nothing_is_left_of_what_a_medium_that_failed_was_given() {
        let (bytes, mut stage) = (udp(4000), Stage::default());
        let frame = Frame::new(&bytes, LinkType::ETHERNET);
        // Its checksum is finished in the stage.
        let mut frame = frame;
        frame.meta.offload.checksum = Checksum::Partial { start: 34, offset: 6 };
        let medium = Medium { max_piece: 9000, ..medium(false, Segmentation::default()) };
        let failed = stage.send("t", &medium, &mut std::iter::repeat_n(frame, 3), |stage, pieces| {
            assert_eq!((pieces.len(), stage.places.len()), (3, 3));
            Err(Error::Io { name: "t".into(), source: std::io::Error::other("broken") })
        });
        assert!(matches!(failed, Err(Error::Io { .. })));
        assert!(stage.bytes.is_empty() && stage.places.is_empty());
    }

    #[test]
    fn what_the_medium_takes_goes_as_it_is_and_the_rest_is_made_fit() {
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

    /// Whoever cuts it, no piece is longer than the medium takes.
    #[test]
    fn pieces_fit_the_medium_where_they_are_cut_by_it_too() {
        let mut tcp = Vec::new();
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.tcp(1, 2, 3, 4).write(&mut tcp, &[7; 4000]).unwrap();
        let mut frame = Frame::new(&tcp, LinkType::ETHERNET);
        frame.meta.offload.checksum = Checksum::Partial { start: 34, offset: 16 };
        frame.meta.offload.gso = Some(Gso { kind: GsoKind::Tcp4, size: 8960, ecn: false });
        let mut size = 0;
        let all = medium(true, Segmentation::ALL);
        let taken = Stage::default().send("t", &all, &mut std::iter::once(frame), |_, pieces| {
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
    fn what_cannot_be_sent_is_said() {
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
