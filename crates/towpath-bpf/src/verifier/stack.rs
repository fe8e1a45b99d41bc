//! The known contents of a function's stack per slot: reads, writes, and the state after its return.

use std::rc::Rc;

use crate::run::FRAME_BYTES;
use crate::state::{Frame, Slot, State, Value};
use crate::verifier_error::Reason;

/// Pointers to the stack of an ended function, saved in a caller's stack, point to nothing.
pub(super) fn forget_frame(state: &mut State, ended: usize) {
    let ends = |slot: &Slot| matches!(slot, Slot::Saved(Value::Stack { frame, .. }) if *frame == ended);
    for frame in state.frames.iter_mut().filter(|frame| frame.stack.iter().any(ends)) {
        for slot in Rc::make_mut(frame).stack.iter_mut().filter(|slot| ends(slot)) {
            *slot = Slot::Bytes(0);
        }
    }
}

/// The slot of the byte at `at` (-512 to -1), and the byte's bit in it.
fn slot_of(at: i64) -> (usize, u8) {
    (usize::try_from((-1 - at) / 8).unwrap_or(0), 1 << at.rem_euclid(8))
}

/// The bytes that an access of `bytes` at `min` to `max` may touch; all are inside the frame.
fn span((min, max): (i64, i64), bytes: u32) -> Result<std::ops::Range<i64>, Reason> {
    let end = max + i64::from(bytes);
    if min < -(FRAME_BYTES as i64) || end > 0 {
        return Err(Reason::StackOut(min, end - 1));
    }
    Ok(min..end)
}

/// Reads the stack: the value saved there, or None for bytes that are a number.
pub(super) fn read_stack(frame: &Frame, at: (i64, i64), bytes: u32) -> Result<Option<Value>, Reason> {
    let span = span(at, bytes)?;
    let (slot, _) = slot_of(at.0);
    if let (Slot::Saved(value), 8, true, 0) = (frame.slot(slot), bytes, at.0 == at.1, at.0 % 8) {
        return Ok(Some(value));
    }
    for byte in span {
        let (slot, bit) = slot_of(byte);
        match frame.slot(slot) {
            Slot::Bytes(mask) if mask & bit == 0 => return Err(Reason::StackUnset(byte)),
            Slot::Bytes(_) | Slot::Saved(Value::Scalar(_)) => {}
            Slot::Saved(_) => return Err(Reason::PartOfPointer(byte)),
        }
    }
    Ok(None)
}

/// Writes the stack: all of the span when its place is known, somewhere in it otherwise.
pub(super) fn write_stack(
    frame: &mut Frame,
    at: (i64, i64),
    bytes: u32,
    value: Option<Value>,
) -> Result<(), Reason> {
    let span = span(at, bytes)?;
    let (slot, _) = slot_of(at.0);
    let certain = at.0 == at.1;
    if let (Some(value), 8, true, 0) = (value, bytes, certain, at.0 % 8) {
        *frame.slot_mut(slot) = Slot::Saved(value);
        return Ok(());
    }
    for byte in span {
        let (slot, bit) = slot_of(byte);
        let slot = frame.slot_mut(slot);
        // A saved value becomes plain bytes; a partially overwritten pointer is not a pointer.
        *slot = Slot::Bytes(if certain { slot.written() | bit } else { slot.written() });
    }
    Ok(())
}
