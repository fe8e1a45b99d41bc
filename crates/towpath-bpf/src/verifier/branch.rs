//! Refinement of the state by a comparison, for both sides of a conditional jump.

use crate::alu::Cond;
use crate::insn::Operand;
use crate::state::{State, Value};
use crate::verifier_error::Reason;

/// The state after the comparison if its result is `holds`. `None` if it cannot have this result.
pub(super) fn assume(
    state: &State,
    (cond, wide): (Cond, bool),
    dst: u8,
    src: Operand,
    (left, right): (Value, Value),
    holds: bool,
) -> Option<State> {
    let cond = match (holds, cond.negated()) {
        (true, _) => cond,
        (false, Some(negated)) => negated,
        (false, None) => return assume_unset(state, wide, left, right),
    };
    let mut state = state.clone();
    match (left, right) {
        (Value::Scalar(a), Value::Scalar(b)) => {
            let (narrow_a, narrow_b) =
                (a.where_holds(cond, wide, b)?, b.where_holds(cond.mirrored(), wide, a)?);
            let regs = &mut state.top_mut().regs;
            if let Some(reg) = regs.get_mut(usize::from(dst)) {
                *reg = Value::Scalar(narrow_a);
            }
            if let Operand::Reg(src) = src
                && src != dst
                && let Some(reg) = regs.get_mut(usize::from(src))
            {
                *reg = Value::Scalar(narrow_b);
            }
        }
        (Value::Packet { id, off, .. }, Value::PacketEnd) => learn(&mut state, id, off, cond),
        (Value::PacketEnd, Value::Packet { id, off, .. }) => learn(&mut state, id, off, cond.mirrored()),
        _ => {}
    }
    Some(state)
}

/// The state after a `Set` comparison that is false: no bit is common. `None` for constants with a common bit.
fn assume_unset(state: &State, wide: bool, left: Value, right: Value) -> Option<State> {
    if let (Value::Scalar(a), Value::Scalar(b)) = (left, right) {
        let (a, b) = if wide { (a, b) } else { (a.low32(), b.low32()) };
        if let (Some(a), Some(b)) = (a.constant(), b.constant())
            && a & b != 0
        {
            return None;
        }
    }
    Some(state.clone())
}

/// `pointer cond data_end` holds: the number of bytes from the pointer's base on.
fn learn(state: &mut State, id: u32, off: i64, cond: Cond) {
    let known = match cond {
        Cond::Le | Cond::Eq => off,
        Cond::Lt => off + 1,
        _ => return,
    };
    if let Ok(known) = u32::try_from(known) {
        state.learn(id, known);
    }
}

/// Pointers may be compared in 64 bits: with a pointer to the same memory, or with 0.
pub(super) fn comparable(
    wide: bool,
    (dst, left): (u8, Value),
    (src, right): (Operand, Value),
) -> Result<(), Reason> {
    let zero = |value| matches!(value, Value::Scalar(range) if range.constant() == Some(0));
    match (left, right) {
        (Value::Scalar(_), Value::Scalar(_)) => Ok(()),
        (Value::Packet { .. } | Value::PacketEnd, Value::Packet { .. } | Value::PacketEnd) if wide => Ok(()),
        (Value::Stack { frame: a, .. }, Value::Stack { frame: b, .. }) if wide && a == b => Ok(()),
        (Value::Scalar(_), pointer) if !(wide && zero(left)) => {
            let register = if let Operand::Reg(src) = src { src } else { dst };
            Err(Reason::ComparesPointer(register, pointer.what()))
        }
        (pointer, other) if !(wide && (zero(other) || zero(pointer))) => {
            Err(Reason::ComparesPointer(dst, pointer.what()))
        }
        _ => Ok(()),
    }
}
