use std::fmt;

#[cfg(test)]
thread_local! {
    /// First sequence number of new lanes in this thread.
    pub(crate) static BEGIN: std::cell::Cell<Seq> = const { std::cell::Cell::new(Seq::FIRST) };
}

/// Sequence number of a frame: dense per lane, assigned at publication, starting at 1, wrapping after 2^32 frames.
///
/// Comparison is serial number arithmetic (RFC 1982): two compared numbers are less than 2^31 apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Seq(pub u32);

impl Seq {
    /// Sequence number of a lane's first frame.
    pub const FIRST: Self = Self(1);

    /// First sequence number of a new lane.
    #[cfg(not(test))]
    pub(crate) const fn begin() -> Self {
        Self::FIRST
    }

    /// First sequence number of a new lane; tests set it close to the wrap.
    #[cfg(test)]
    pub(crate) fn begin() -> Self {
        BEGIN.get()
    }

    /// The next number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The number `n` before this one.
    #[must_use]
    pub const fn back(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n))
    }

    /// Distance from `earlier` to `self`, modulo 2^32.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Returns true if this number was assigned before `other`.
    #[must_use]
    pub const fn is_before(self, other: Self) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }
}

impl fmt::Debug for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_holds_across_the_wrap() {
        for (a, b, before) in [
            (1, 2, true),
            (2, 1, false),
            (5, 5, false),
            (u32::MAX, 0, true),
            (u32::MAX - 3, 7, true),
            (7, u32::MAX - 3, false),
        ] {
            assert_eq!(Seq(a).is_before(Seq(b)), before, "{a} before {b}");
        }
        assert_eq!(Seq(u32::MAX).next(), Seq(0));
        assert_eq!(Seq(3).since(Seq(u32::MAX)), 4);
    }
}
