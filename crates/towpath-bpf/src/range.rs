//! Value ranges of numbers: the unsigned 64-bit minimum and maximum.
//!
//! Every operation is conservative: its range contains the result for any members of the operands.

use crate::alu::{AluOp, Cond, alu32, alu64, holds32, holds64};

/// The numbers from `min` to `max`, both included; never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) min: u64,
    pub(crate) max: u64,
}

const MAX32: u64 = u32::MAX as u64;
const MAX_SIGNED: u64 = i64::MAX as u64;
const MAX_SIGNED32: u64 = i32::MAX as u64;

/// Upper bounds to which [`Range::widen`] extends: the maximum of each load width and of the signed integers.
const STEPS: [u64; 7] = [0xff, 0xffff, MAX_SIGNED32, MAX32, 1 << 48, MAX_SIGNED, u64::MAX];

impl Range {
    pub(crate) const ANY: Self = Self { min: 0, max: u64::MAX };

    pub(crate) const fn exactly(value: u64) -> Self {
        Self { min: value, max: value }
    }

    /// The range of a zero-extending load of `bits`.
    pub(crate) const fn of_bits(bits: u32) -> Self {
        Self { min: 0, max: u64::MAX >> (64 - bits) }
    }

    pub(crate) const fn constant(self) -> Option<u64> {
        if self.min == self.max { Some(self.min) } else { None }
    }

    pub(crate) const fn covers(self, other: Self) -> bool {
        self.min <= other.min && self.max >= other.max
    }

    pub(crate) fn join(self, other: Self) -> Self {
        Self { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    /// The join, with each changed bound extended to 0 or to the next of [`STEPS`], so that the analysis of a loop ends after a few
    /// iterations.
    pub(crate) fn widen(self, other: Self) -> Self {
        let min = if other.min < self.min { 0 } else { self.min };
        let max = if other.max > self.max {
            STEPS.into_iter().find(|&step| step >= other.max).unwrap_or(u64::MAX)
        } else {
            self.max
        };
        Self { min, max }
    }

    /// The low 32 bits.
    pub(crate) const fn low32(self) -> Self {
        if self.max <= MAX32 {
            self
        } else if let Some(value) = self.constant() {
            Self::exactly(value & MAX32)
        } else {
            Self::of_bits(32)
        }
    }

    /// The result of an operation on any member of `self` and any of `other`.
    pub(crate) fn alu(self, op: AluOp, wide: bool, other: Self) -> Self {
        if wide {
            match (self.constant(), other.constant()) {
                (Some(a), Some(b)) => Self::exactly(alu64(op, a, b)),
                _ => self.compute(op, other, 64),
            }
        } else {
            let (a, b) = (self.low32(), other.low32());
            match (a.constant(), b.constant()) {
                (Some(a), Some(b)) => Self::exactly(u64::from(alu32(op, a as u32, b as u32))),
                _ => a.compute(op, b, 32).low32(),
            }
        }
    }

    /// `alu` for operands that are not both constants. With `bits` 32 the operands are at most `MAX32`, and the caller
    /// truncates the result to 32 bits.
    fn compute(self, op: AluOp, other: Self, bits: u32) -> Self {
        let whole = Self::of_bits(bits);
        let sign = if bits == 64 { MAX_SIGNED } else { MAX_SIGNED32 };
        // The bits that either operand may have set.
        let mask = u64::MAX.checked_shr((self.max | other.max).leading_zeros()).unwrap_or(0);
        match op {
            AluOp::Mov => other,
            AluOp::Add => match self.max.checked_add(other.max) {
                Some(max) => Self { min: self.min + other.min, max },
                None => whole,
            },
            AluOp::Sub if self.min >= other.max => {
                Self { min: self.min - other.max, max: self.max - other.min }
            }
            AluOp::Mul => match self.max.checked_mul(other.max) {
                Some(max) => Self { min: self.min * other.min, max },
                None => whole,
            },
            AluOp::And => Self { min: 0, max: self.max.min(other.max) },
            AluOp::Or => Self { min: self.min.max(other.min), max: mask },
            AluOp::Xor => Self { min: 0, max: mask },
            AluOp::Div if other.min > 0 => Self { min: self.min / other.max, max: self.max / other.min },
            AluOp::Div => Self { min: 0, max: self.max },
            // A remainder by zero is the dividend.
            AluOp::Mod if other.min > 0 => Self { min: 0, max: self.max.min(other.max - 1) },
            AluOp::Mod => Self { min: 0, max: self.max },
            AluOp::Lsh => match other.constant().map(|by| (by % u64::from(bits)) as u32) {
                Some(by) if self.max.leading_zeros() >= by => {
                    Self { min: self.min << by, max: self.max << by }
                }
                _ => whole,
            },
            AluOp::Rsh => self.shift_right(other, bits),
            AluOp::Arsh if self.max <= sign => self.shift_right(other, bits),
            AluOp::Sub | AluOp::Arsh | AluOp::Neg | AluOp::Sdiv | AluOp::Smod => whole,
        }
    }

    fn shift_right(self, other: Self, bits: u32) -> Self {
        match other.constant() {
            Some(by) => {
                let by = by % u64::from(bits);
                Self { min: self.min >> by, max: self.max >> by }
            }
            None => Self { min: 0, max: self.max },
        }
    }

    /// The subrange of `self` for which `self cond other` can hold; `None` if it is empty.
    pub(crate) fn where_holds(self, cond: Cond, wide: bool, other: Self) -> Option<Self> {
        let other = if wide {
            other
        } else if self.max <= MAX32 {
            other.low32()
        } else if let (Some(a), Some(b)) = (self.low32().constant(), other.low32().constant()) {
            return holds32(cond, a as u32, b as u32).then_some(self);
        } else {
            // A comparison of the low halves does not bound the whole number.
            return Some(self);
        };
        if let (Some(a), Some(b)) = (self.constant(), other.constant()) {
            let holds = if wide { holds64(cond, a, b) } else { holds32(cond, a as u32, b as u32) };
            return holds.then_some(self);
        }
        let sign = if wide { MAX_SIGNED } else { MAX_SIGNED32 };
        let cond = match cond {
            // Signed and unsigned comparisons agree for numbers without the sign bit.
            Cond::Sgt if self.max <= sign && other.max <= sign => Cond::Gt,
            Cond::Sge if self.max <= sign && other.max <= sign => Cond::Ge,
            Cond::Slt if self.max <= sign && other.max <= sign => Cond::Lt,
            Cond::Sle if self.max <= sign && other.max <= sign => Cond::Le,
            Cond::Sgt | Cond::Sge => return self.signed_above(cond, other, sign, wide),
            Cond::Slt | Cond::Sle | Cond::Set => return Some(self),
            unsigned => unsigned,
        };
        match cond {
            Cond::Eq => self.between(other.min, other.max),
            Cond::Ne => match other.constant() {
                Some(value) if value == self.min => self.between(value.checked_add(1)?, u64::MAX),
                Some(value) if value == self.max => self.between(0, value.checked_sub(1)?),
                _ => Some(self),
            },
            Cond::Gt => self.between(other.min.checked_add(1)?, u64::MAX),
            Cond::Ge => self.between(other.min, u64::MAX),
            Cond::Lt => self.between(0, other.max.checked_sub(1)?),
            Cond::Le => self.between(0, other.max),
            _ => Some(self),
        }
    }

    /// Signed `>` and `>=`: a number above a constant of at least -1 or 0 is not negative.
    fn signed_above(self, cond: Cond, other: Self, sign: u64, wide: bool) -> Option<Self> {
        let Some(value) = other.constant() else { return Some(self) };
        let value = if wide { value.cast_signed() } else { i64::from((value as u32).cast_signed()) };
        let least = if cond == Cond::Sgt { value.checked_add(1)? } else { value };
        match u64::try_from(least) {
            Ok(least) => self.between(least, sign),
            Err(_) => Some(self),
        }
    }

    fn between(self, min: u64, max: u64) -> Option<Self> {
        let both = Self { min: self.min.max(min), max: self.max.min(max) };
        (both.min <= both.max).then_some(both)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OPS: [AluOp; 15] = [
        AluOp::Add,
        AluOp::Sub,
        AluOp::Mul,
        AluOp::Div,
        AluOp::Sdiv,
        AluOp::Or,
        AluOp::And,
        AluOp::Lsh,
        AluOp::Rsh,
        AluOp::Arsh,
        AluOp::Neg,
        AluOp::Mod,
        AluOp::Smod,
        AluOp::Xor,
        AluOp::Mov,
    ];
    const CONDS: [Cond; 11] = [
        Cond::Eq,
        Cond::Ne,
        Cond::Gt,
        Cond::Ge,
        Cond::Lt,
        Cond::Le,
        Cond::Set,
        Cond::Sgt,
        Cond::Sge,
        Cond::Slt,
        Cond::Sle,
    ];

    /// Numbers near the edges where ranges go wrong.
    fn number() -> impl Strategy<Value = u64> {
        (any::<u64>(), 0..64_u32, -3..=3_i64, any::<bool>()).prop_map(|(random, shift, near, edge)| {
            if edge { (1_u64 << shift).wrapping_add_signed(near) } else { random >> shift }
        })
    }

    /// A range, and a member of it.
    fn member() -> impl Strategy<Value = (Range, u64)> {
        (number(), number(), number()).prop_map(|(a, b, c)| {
            let mut sorted = [a, b, c];
            sorted.sort_unstable();
            let [min, value, max] = sorted;
            (Range { min, max }, value)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn results_are_in_the_range((left, a) in member(), (right, b) in member(), op in 0..OPS.len(), wide: bool) {
            let op = OPS[op];
            let range = left.alu(op, wide, right);
            let value = if wide { alu64(op, a, b) } else { u64::from(alu32(op, a as u32, b as u32)) };
            prop_assert!(range.covers(Range::exactly(value)), "{a:#x} {op:?} {b:#x} = {value:#x} not in {range:x?}");
        }

        #[test]
        fn members_for_which_it_holds_remain(
            (left, a) in member(), (right, b) in member(), cond in 0..CONDS.len(), wide: bool,
        ) {
            let cond = CONDS[cond];
            let holds = if wide { holds64(cond, a, b) } else { holds32(cond, a as u32, b as u32) };
            let remains = left.where_holds(cond, wide, right);
            prop_assert!(
                !holds || remains.is_some_and(|range| range.covers(Range::exactly(a))),
                "{a:#x} {cond:?} {b:#x}, wide {wide}: {left:x?} became {remains:x?}"
            );
        }

        #[test]
        fn joins_cover_both((left, _) in member(), (right, _) in member()) {
            for range in [left.join(right), left.widen(right)] {
                prop_assert!(range.covers(left) && range.covers(right));
            }
        }
    }
}
