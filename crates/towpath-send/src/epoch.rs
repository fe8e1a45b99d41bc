//! The word in front of a frame in shared memory that says who has it, and since which start of the engine.
//!
//! A socket's numbers begin at 0 again with every socket, and the kernel may still send from a frame whose engine is dead:
//! so a frame that says it is in flight, from an epoch that is not ours, is nobody's until its quarantine is over.

/// One start of an engine. Never zero, so that fresh memory is of no epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(u32);

impl Epoch {
    /// The epoch with this value; zero becomes one.
    pub const fn new(value: u32) -> Self {
        Self(if value == 0 { 1 } else { value })
    }

    /// The epoch after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self::new(self.0.wrapping_add(1))
    }

    /// What a frame says that the kernel is sending from since this epoch.
    pub const fn in_flight(self) -> u64 {
        (self.0 as u64) << 32 | IN_FLIGHT
    }

    /// What a frame's word means to an engine of this epoch.
    pub const fn judge(self, word: u64) -> Fence {
        let epoch = (word >> 32) as u32;
        match word & 0xffff_ffff {
            FREE if epoch == 0 => Fence::Free,
            IN_FLIGHT if epoch == self.0 => Fence::InFlight,
            IN_FLIGHT if epoch != 0 => Fence::Stale(Epoch(epoch)),
            _ => Fence::Unknown,
        }
    }
}

/// The word of a frame that nothing sends from.
pub const FREE_WORD: u64 = FREE;
const FREE: u64 = 0;
const IN_FLIGHT: u64 = 1;

/// What a frame's word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Nothing sends from it.
    Free,
    /// This engine sends from it: its completion frees it.
    InFlight,
    /// An engine that is gone sent from it, and no completion will ever be seen: quarantine.
    Stale(Epoch),
    /// No word that an engine writes. Whoever wrote it, the frame is not trusted: quarantine.
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows() {
        let (old, now) = (Epoch::new(7), Epoch::new(7).next());
        let rows = [
            (FREE_WORD, Fence::Free),
            (now.in_flight(), Fence::InFlight),
            (old.in_flight(), Fence::Stale(old)),
            (2, Fence::Unknown),
            (1, Fence::Unknown),
            (8 << 32, Fence::Unknown),
            (u64::MAX, Fence::Unknown),
        ];
        for (word, expected) in rows {
            assert_eq!(now.judge(word), expected, "{word:#x}");
        }
        assert_eq!(Epoch::new(u32::MAX).next(), Epoch::new(1));
    }
}
