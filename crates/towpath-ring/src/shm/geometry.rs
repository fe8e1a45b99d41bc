//! Shape of a ring, and the rules for it.
//!
//! The four numbers and their rules are those of `struct nl_mmap_req` and `netlink_set_ring` (Linux 3.10,
//! net/netlink/af_netlink.c). The kernel did not check the products for overflow; this file does.

use thiserror::Error;

/// Page size that the ABI assumes. Areas are multiples of it.
pub(crate) const PAGE: u32 = 4096;

/// A payload area and its division into frames.
///
/// A message takes as many adjacent frames as it needs. Headers are in another area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a block: a multiple of the page.
    pub block_size: u32,
    /// Blocks in the payload area.
    pub block_nr: u32,
    /// Bytes of a frame: a multiple of the cache line (64), at most a block.
    pub frame_size: u32,
    /// Frames in the payload area: frames per block times blocks.
    pub frame_nr: u32,
}

/// The rule of [`Geometry`] that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)] // the error text documents each variant
pub enum GeometryError {
    #[error("block size {0} is not a positive multiple of the page (4096)")]
    BlockNotPages(u32),
    #[error("a ring needs at least one block")]
    NoBlocks,
    #[error("frame size {0} is smaller than the minimum (64)")]
    FrameTooSmall(u32),
    #[error("frame size {0} is not a multiple of the cache line (64)")]
    FrameUnaligned(u32),
    #[error("frame size {frame} is larger than a block ({block})")]
    FrameLargerThanBlock { frame: u32, block: u32 },
    #[error("frame size {frame} does not divide the block ({block}), so frames would not be adjacent")]
    FrameDoesNotDivideBlock { frame: u32, block: u32 },
    #[error("frame_nr is {frame_nr}, but the blocks hold {fit} frames")]
    FrameCount { frame_nr: u32, fit: u64 },
    #[error("a ring of {0} bytes exceeds the maximum (1 GiB)")]
    TooLarge(u64),
    #[error("{0} frames exceed the maximum (65536)")]
    TooManyFrames(u32),
}

impl Geometry {
    /// Default towards a client: 4 MiB in 4096 frames of 1 KiB.
    pub const RX: Self = Self { block_size: 65536, block_nr: 64, frame_size: 1024, frame_nr: 4096 };
    /// Default from a client: 1 MiB in 1024 frames of 1 KiB.
    pub const TX: Self = Self { block_size: 65536, block_nr: 16, frame_size: 1024, frame_nr: 1024 };

    /// Largest payload area in bytes.
    pub const MAX_BYTES: u64 = 1 << 30;
    /// Largest number of frames: the 16-bit argument of a verdict names each.
    pub const MAX_FRAMES: u32 = 1 << 16;

    /// A payload area of `bytes` in frames of `frame_size`, in blocks of 64 KiB if `bytes` is a multiple, else in
    /// pages.
    ///
    /// # Errors
    /// The rule that the result breaks.
    pub fn with(bytes: u32, frame_size: u32) -> Result<Self, GeometryError> {
        let block_size = if bytes.is_multiple_of(65536) { 65536 } else { PAGE };
        let block_nr = bytes / block_size;
        let frame_nr = bytes.checked_div(frame_size).unwrap_or(0);
        let geometry = Self { block_size, block_nr, frame_size, frame_nr };
        geometry.check()?;
        Ok(geometry)
    }

    /// Checks every rule, in the kernel's order.
    ///
    /// # Errors
    /// The first broken rule.
    pub fn check(&self) -> Result<(), GeometryError> {
        use GeometryError as E;
        if self.block_size == 0 || !self.block_size.is_multiple_of(PAGE) {
            return Err(E::BlockNotPages(self.block_size));
        }
        if self.block_nr == 0 {
            return Err(E::NoBlocks);
        }
        if self.frame_size < 64 {
            return Err(E::FrameTooSmall(self.frame_size));
        }
        if !self.frame_size.is_multiple_of(64) {
            return Err(E::FrameUnaligned(self.frame_size));
        }
        let (frame, block) = (self.frame_size, self.block_size);
        if frame > block {
            return Err(E::FrameLargerThanBlock { frame, block });
        }
        if !block.is_multiple_of(frame) {
            return Err(E::FrameDoesNotDivideBlock { frame, block });
        }
        let bytes = u64::from(self.block_size) * u64::from(self.block_nr);
        if bytes > Self::MAX_BYTES {
            return Err(E::TooLarge(bytes));
        }
        let fit = u64::from(block / frame) * u64::from(self.block_nr);
        if fit != u64::from(self.frame_nr) {
            return Err(E::FrameCount { frame_nr: self.frame_nr, fit });
        }
        if self.frame_nr > Self::MAX_FRAMES {
            return Err(E::TooManyFrames(self.frame_nr));
        }
        Ok(())
    }

    /// Bytes of the payload area.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.frame_size as usize * self.frame_nr as usize
    }

    /// Frames of a message of `len` bytes; at least 1.
    #[must_use]
    #[inline]
    pub const fn frames_for(&self, len: usize) -> usize {
        if len <= self.frame_size as usize {
            return 1;
        }
        // A 32-bit division takes half the time; it is on the path of every message longer than a frame.
        if len <= u32::MAX as usize {
            (len as u32).div_ceil(self.frame_size) as usize
        } else {
            len.div_ceil(self.frame_size as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_has_its_error() {
        use GeometryError as E;
        let row = |block_size, block_nr, frame_size, frame_nr| {
            Geometry { block_size, block_nr, frame_size, frame_nr }.check()
        };
        assert_eq!(Geometry::RX.check(), Ok(()));
        assert_eq!(Geometry::TX.check(), Ok(()));
        assert_eq!(row(0, 1, 64, 64), Err(E::BlockNotPages(0)));
        assert_eq!(row(4095, 1, 64, 64), Err(E::BlockNotPages(4095)));
        assert_eq!(row(4096, 0, 64, 0), Err(E::NoBlocks));
        assert_eq!(row(4096, 1, 24, 1), Err(E::FrameTooSmall(24)));
        assert_eq!(row(4096, 1, 100, 40), Err(E::FrameUnaligned(100)));
        assert_eq!(row(4096, 1, 8192, 1), Err(E::FrameLargerThanBlock { frame: 8192, block: 4096 }));
        assert_eq!(row(4096, 1, 192, 21), Err(E::FrameDoesNotDivideBlock { frame: 192, block: 4096 }));
        assert_eq!(row(4096, 2, 64, 64), Err(E::FrameCount { frame_nr: 64, fit: 128 }));
        // The kernel multiplied in 32 bits: 2^26 frames per block times 64 blocks is 0.
        let wraps = Geometry { block_size: 1 << 31, block_nr: 2, frame_size: 64, frame_nr: 0 };
        assert_eq!(wraps.check(), Err(E::TooLarge(1 << 32)));
        assert_eq!(row(1 << 20, 8, 64, 1 << 17), Err(E::TooManyFrames(1 << 17)));
    }

    #[test]
    fn with_picks_blocks() {
        assert_eq!(Geometry::with(4 << 20, 1024), Ok(Geometry::RX));
        assert_eq!(Geometry::with(8192, 1024).map(|g| g.frame_nr), Ok(8));
        assert_eq!(Geometry::with(8192, 0), Err(GeometryError::FrameTooSmall(0)));
    }
}
