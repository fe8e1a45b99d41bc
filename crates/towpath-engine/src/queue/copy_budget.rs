//! The copies that a queue makes in one turn of its engine thread.
//!
//! Why: a packet that a rule copies (`tee`), or whose queue has the fan-out `mirror`, costs the packet thread one copy for each
//! inspector that gets it. A user may attach many inspectors. A turn's copies are bounded, so that watchers delay the packets of others
//! by a bounded time. Beyond the budget no copy is made; the packet continues.
//!
//! A replay has no budget: a copy waits for its inspector there.

/// Copies in one turn: one for each packet of the largest burst.
pub(super) const COPIES: u32 = 1024;
/// Bytes of copies in one turn: a burst of the default size of the largest packets.
pub(super) const BYTES: usize = 16 << 20;

/// The rest of a turn's budget.
#[derive(Debug)]
pub(super) enum CopyBudget {
    /// No bound, until [`renew`](Self::renew).
    Unlimited,
    /// The rest of the budget.
    Left { copies: u32, bytes: usize },
}

impl CopyBudget {
    /// Begins a turn.
    pub(super) fn renew(&mut self) {
        *self = Self::Left { copies: COPIES, bytes: BYTES };
    }

    /// Takes `copies` copies of a frame of `bytes` bytes. Returns false, and takes nothing, if the rest does not suffice.
    pub(super) fn take(&mut self, copies: u32, bytes: usize) -> bool {
        let Self::Left { copies: copies_left, bytes: bytes_left } = self else { return true };
        let bytes = bytes.saturating_mul(copies as usize);
        let left = (copies_left.checked_sub(copies), bytes_left.checked_sub(bytes));
        let (Some(copies), Some(bytes)) = left else { return false };
        (*copies_left, *bytes_left) = (copies, bytes);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_has_a_number_of_copies_and_of_bytes() {
        let mut budget = CopyBudget::Unlimited;
        assert!((0..3).all(|_| budget.take(COPIES, BYTES)));
        budget.renew();
        assert!(budget.take(COPIES - 1, 1) && !budget.take(2, 1) && budget.take(1, 1) && !budget.take(1, 0));
        budget.renew();
        assert!(budget.take(2, BYTES / 2) && !budget.take(1, 1) && budget.take(1, 0));
    }
}
