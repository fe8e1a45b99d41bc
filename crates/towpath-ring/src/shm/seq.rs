use std::fmt;

#[cfg(test)]
thread_local! {
    /// Numbers with which new lanes of this thread begin.
    pub(crate) static BEGIN: std::cell::Cell<Seq> = const { std::cell::Cell::new(Seq::FIRST) };
}

/// The number of a frame: dense per lane, given at publication, starting at 1 and wrapping after 2^32 frames.
///
/// Comparison is serial-number arithmetic (RFC 1982): at most 2^31 frames lie between two numbers that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Seq(pub u32);

impl Seq {
    /// The number that the first frame of a lane gets.
    pub const FIRST: Self = Self(1);

    /// The number with which a new lane begins.
    #[cfg(not(test))]
    pub(crate) const fn begin() -> Self {
        Self::FIRST
    }

    /// The same, as a test has it: its numbers may begin again soon.
    #[cfg(test)]
    pub(crate) fn begin() -> Self {
        BEGIN.get()
    }

    /// The number after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The number `n` before this one.
    #[must_use]
    pub const fn back(self, n: u32) -> Self {
        Self(self.0.wrapping_sub(n))
    }

    /// How many numbers `self` is ahead of `earlier`, modulo 2^32.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }

    /// Whether this number was given before `other`.
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
