//! Arithmetic and comparisons, as RFC 9669 sections 4.1 and 4.3 define them.
//!
//! The verifier folds constants with the same functions that the interpreter calls, so their results cannot differ.

/// An arithmetic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AluOp {
    Add,
    Sub,
    Mul,
    Div,
    Sdiv,
    Or,
    And,
    Lsh,
    Rsh,
    Arsh,
    Neg,
    Mod,
    Smod,
    Xor,
    Mov,
}

/// A comparison; those with S compare as signed numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cond {
    Eq,
    Ne,
    Gt,
    Ge,
    Lt,
    Le,
    Set,
    Sgt,
    Sge,
    Slt,
    Sle,
}

impl Cond {
    /// The comparison that is true exactly when this one is false. `None` for `Set`.
    pub(crate) const fn negated(self) -> Option<Self> {
        Some(match self {
            Self::Eq => Self::Ne,
            Self::Ne => Self::Eq,
            Self::Gt => Self::Le,
            Self::Le => Self::Gt,
            Self::Ge => Self::Lt,
            Self::Lt => Self::Ge,
            Self::Sgt => Self::Sle,
            Self::Sle => Self::Sgt,
            Self::Sge => Self::Slt,
            Self::Slt => Self::Sge,
            Self::Set => return None,
        })
    }

    /// The equivalent comparison for exchanged operands.
    pub(crate) const fn mirrored(self) -> Self {
        match self {
            Self::Gt => Self::Lt,
            Self::Lt => Self::Gt,
            Self::Ge => Self::Le,
            Self::Le => Self::Ge,
            Self::Sgt => Self::Slt,
            Self::Slt => Self::Sgt,
            Self::Sge => Self::Sle,
            Self::Sle => Self::Sge,
            same => same,
        }
    }
}

macro_rules! arithmetic {
    ($(#[$doc:meta])* $name:ident, $word:ty) => {
        $(#[$doc])*
        #[inline(always)]
        pub(crate) const fn $name(op: AluOp, a: $word, b: $word) -> $word {
            match op {
                AluOp::Add => a.wrapping_add(b),
                AluOp::Sub => a.wrapping_sub(b),
                AluOp::Mul => a.wrapping_mul(b),
                AluOp::Div => match a.checked_div(b) {
                    Some(quotient) => quotient,
                    None => 0,
                },
                AluOp::Sdiv if b == 0 => 0,
                AluOp::Sdiv => a.cast_signed().wrapping_div(b.cast_signed()).cast_unsigned(),
                AluOp::Or => a | b,
                AluOp::And => a & b,
                AluOp::Lsh => a.wrapping_shl(b as u32),
                AluOp::Rsh => a.wrapping_shr(b as u32),
                AluOp::Arsh => a.cast_signed().wrapping_shr(b as u32).cast_unsigned(),
                AluOp::Neg => a.wrapping_neg(),
                AluOp::Mod => match a.checked_rem(b) {
                    Some(rest) => rest,
                    None => a,
                },
                AluOp::Smod if b == 0 => a,
                AluOp::Smod => a.cast_signed().wrapping_rem(b.cast_signed()).cast_unsigned(),
                AluOp::Xor => a ^ b,
                AluOp::Mov => b,
            }
        }
    };
}

arithmetic! {
    /// 64-bit arithmetic. Division by zero gives 0 and modulo by zero leaves `a` (RFC 9669 section 4.1); shifts use the low
    /// six bits.
    alu64, u64
}

arithmetic! {
    /// 32-bit arithmetic; the caller widens the result with zeros. Shifts use the low five bits.
    alu32, u32
}

/// Compares 64-bit numbers.
#[inline(always)]
pub(crate) const fn holds64(cond: Cond, a: u64, b: u64) -> bool {
    match cond {
        Cond::Eq => a == b,
        Cond::Ne => a != b,
        Cond::Gt => a > b,
        Cond::Ge => a >= b,
        Cond::Lt => a < b,
        Cond::Le => a <= b,
        Cond::Set => a & b != 0,
        Cond::Sgt => a.cast_signed() > b.cast_signed(),
        Cond::Sge => a.cast_signed() >= b.cast_signed(),
        Cond::Slt => a.cast_signed() < b.cast_signed(),
        Cond::Sle => a.cast_signed() <= b.cast_signed(),
    }
}

/// Compares the low halves (the JMP32 class).
#[inline(always)]
pub(crate) const fn holds32(cond: Cond, a: u32, b: u32) -> bool {
    match cond {
        Cond::Sgt | Cond::Sge | Cond::Slt | Cond::Sle => {
            holds64(cond, (a.cast_signed() as i64).cast_unsigned(), (b.cast_signed() as i64).cast_unsigned())
        }
        _ => holds64(cond, a as u64, b as u64),
    }
}

/// Extends the low `bits` (8, 16 or 32) of `value` by their sign.
#[inline(always)]
pub(crate) const fn sign_extend(value: u64, bits: u32) -> u64 {
    let spare = 64 - bits;
    (value << spare).cast_signed().wrapping_shr(spare).cast_unsigned()
}

/// Exchanges the bytes of the low `bits` (16, 32 or 64); the rest becomes 0.
#[inline(always)]
pub(crate) const fn swap(value: u64, bits: u32) -> u64 {
    match bits {
        16 => (value as u16).swap_bytes() as u64,
        32 => (value as u32).swap_bytes() as u64,
        _ => value.swap_bytes(),
    }
}
