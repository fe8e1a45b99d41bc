//! The verifier's state at one instruction of one path: registers and stacks of all frames.
//!
//! A state *covers* another if it describes every machine state that the other describes; then what was checked
//! for it holds for the other. Packet pointers with the same `id` have the same distance from the message's start
//! except for their `off`; which number an id has means nothing, so covering and joining carry a renaming.

use std::collections::HashMap;
use std::rc::Rc;

use crate::range::Range;

/// The contents of a register or a saved register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    /// Nothing that may be read.
    Unset(Unset),
    /// A number.
    Scalar(Range),
    /// The context, moved by `off`.
    Context { off: i64 },
    /// Into the stack of frame number `frame`, between `min` and `max` from its frame pointer.
    Stack { frame: usize, min: i64, max: i64 },
    /// Into the message, `off` from the base `id`, of which at least `known` bytes are there. Id 0 is the message's start;
    /// [`ANYWHERE`] is no base: nothing is known about such a pointer, and two of them are unrelated.
    Packet { id: u32, off: i64, known: u32 },
    /// The end of the message.
    PacketEnd,
}

/// The id of a pointer that a loop moves.
pub(crate) const ANYWHERE: u32 = u32::MAX;

/// The comparisons of a path with the message's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Compared {
    Nothing,
    /// A pointer at a constant distance from the message's start.
    Fixed,
    /// A pointer that was moved by a variable number; or the message's length was read; or paths with comparisons were joined.
    Variable,
}

/// Why a register holds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unset {
    Never,
    Call,
    Mixed,
}

impl Value {
    pub(crate) const fn scalar(value: u64) -> Self {
        Self::Scalar(Range::exactly(value))
    }

    /// The words for a message.
    pub(crate) const fn what(self) -> &'static str {
        match self {
            Self::Unset(_) => "not set",
            Self::Scalar(_) => "a number",
            Self::Context { .. } => "a pointer to the context",
            Self::Stack { .. } => "a pointer to the stack",
            Self::Packet { .. } => "a pointer into the message",
            Self::PacketEnd => "data_end",
        }
    }

    fn covers(self, new: Self, names: &mut Names) -> bool {
        match (self, new) {
            (Self::Unset(_), _) => true,
            (Self::Scalar(old), Self::Scalar(new)) => old.covers(new),
            (Self::Context { off: old }, Self::Context { off: new }) => old == new,
            (
                Self::Stack { frame: old_frame, min: old_min, max: old_max },
                Self::Stack { frame, min, max },
            ) => old_frame == frame && old_min <= min && old_max >= max,
            (
                Self::Packet { id: old_id, off: old_off, known: old_known },
                Self::Packet { id, off, known },
            ) => {
                let apart = old_id != ANYWHERE && id != ANYWHERE;
                old_id == ANYWHERE || apart && old_off == off && old_known <= known && names.same(old_id, id)
            }
            (Self::PacketEnd, Self::PacketEnd) => true,
            _ => false,
        }
    }

    fn join(self, new: Self, widen: bool, joins: &mut Joins) -> Self {
        match (self, new) {
            (Self::Scalar(old), Self::Scalar(new)) => {
                Self::Scalar(if widen { old.widen(new) } else { old.join(new) })
            }
            (Self::Context { off: old }, Self::Context { off: new }) if old == new => self,
            (
                Self::Stack { frame: old_frame, min: old_min, max: old_max },
                Self::Stack { frame, min, max },
            ) if old_frame == frame && (!widen || old_min <= min && old_max >= max) => {
                Self::Stack { frame, min: old_min.min(min), max: old_max.max(max) }
            }
            (
                Self::Packet { id: old_id, off: old_off, known: old_known },
                Self::Packet { id, off, known },
            ) => joins.packet((old_id, old_off, old_known), (id, off, known), widen),
            (Self::PacketEnd, Self::PacketEnd) => self,
            (Self::Unset(_), _) => self,
            (_, Self::Unset(why)) => Self::Unset(why),
            _ => Self::Unset(Unset::Mixed),
        }
    }
}

/// The renaming of ids under which one state covers another.
#[derive(Default)]
struct Names(HashMap<u32, u32>);

impl Names {
    /// Whether `old` may stand for `new`. 0, the message's start, stands for itself only.
    fn same(&mut self, old: u32, new: u32) -> bool {
        if old == 0 { new == 0 } else { *self.0.entry(old).or_insert(new) == new }
    }
}

/// The bases that a join makes: one for each pair of bases and each distance between them, so that pointers that moved
/// together stay together. Widening makes no base of pointers that moved, so that the analysis of a loop ends.
struct Joins<'a> {
    /// Key: both ids and their distance. Value: the new id, and its offset from the old base.
    made: HashMap<(u32, u32, i64), (u32, i64)>,
    ids: &'a mut u32,
}

impl Joins<'_> {
    fn packet(&mut self, old: (u32, i64, u32), new: (u32, i64, u32), widen: bool) -> Value {
        let (old_id, old_off, old_known) = old;
        let (new_id, new_off, new_known) = new;
        let shift = new_off - old_off;
        if old_id == ANYWHERE || new_id == ANYWHERE || widen && shift != 0 {
            return Value::Packet { id: ANYWHERE, off: 0, known: 0 };
        }
        let ids = &mut *self.ids;
        let (id, base) = match (old_id, new_id, shift) {
            (0, 0, 0) => (0, 0),
            (.., 0) => *self.made.entry((old_id, new_id, 0)).or_insert_with(|| (fresh(ids), 0)),
            _ => *self.made.entry((old_id, new_id, shift)).or_insert_with(|| (fresh(ids), old_off)),
        };
        // Both offsets relative to the new base; knowledge about bytes before the base is discarded.
        let off = old_off - base;
        let old_known = i64::from(old_known) - base;
        let new_known = i64::from(new_known) - shift - base;
        let known = if widen && new_known < old_known { 0 } else { old_known.min(new_known) };
        Value::Packet { id, off, known: u32::try_from(known).unwrap_or(0) }
    }
}

/// The next id that no pointer has.
pub(crate) fn fresh(ids: &mut u32) -> u32 {
    *ids = ids.saturating_add(1).min(ANYWHERE - 1);
    *ids
}

/// Eight bytes of a stack, aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Which bytes are written, the lowest address in bit 0.
    Bytes(u8),
    /// A register saved whole.
    Saved(Value),
}

impl Slot {
    /// Which bytes are written.
    pub(crate) const fn written(self) -> u8 {
        match self {
            Self::Bytes(mask) => mask,
            Self::Saved(_) => u8::MAX,
        }
    }

    fn covers(self, new: Self, names: &mut Names) -> bool {
        match (self, new) {
            (Self::Saved(old), Self::Saved(new)) => old.covers(new, names),
            (Self::Saved(_), Self::Bytes(_)) => false,
            (Self::Bytes(mask), new) => mask & !new.written() == 0,
        }
    }

    fn join(self, new: Self, widen: bool, joins: &mut Joins) -> Self {
        match (self, new) {
            (Self::Saved(old), Self::Saved(new)) => match old.join(new, widen, joins) {
                // Bytes of a number or of a pointer: initialised, with unknown contents.
                Value::Unset(_) => Self::Bytes(u8::MAX),
                value => Self::Saved(value),
            },
            (old, new) => Self::Bytes(old.written() & new.written()),
        }
    }
}

/// One function's registers and stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// r0 to r9; r10 never changes.
    pub(crate) regs: [Value; 10],
    /// From the frame pointer down: slot 0 is bytes -8 to -1. Shorter than the frame as long as nothing deeper is
    /// written.
    pub(crate) stack: Vec<Slot>,
    /// The instruction after the call that made this frame.
    pub(crate) back: usize,
}

impl Frame {
    pub(crate) const fn new(back: usize) -> Self {
        Self { regs: [Value::Unset(Unset::Never); 10], stack: Vec::new(), back }
    }

    pub(crate) fn slot(&self, index: usize) -> Slot {
        self.stack.get(index).copied().unwrap_or(Slot::Bytes(0))
    }

    /// The slot to write; `index` is inside the frame.
    pub(crate) fn slot_mut(&mut self, index: usize) -> &mut Slot {
        if self.stack.len() <= index {
            self.stack.resize(index + 1, Slot::Bytes(0));
        }
        &mut self.stack[index]
    }

    fn covers(&self, new: &Self, names: &mut Names) -> bool {
        self.regs.iter().zip(&new.regs).all(|(old, new)| old.covers(*new, names))
            && self.stack.iter().enumerate().all(|(index, old)| old.covers(new.slot(index), names))
    }

    fn join(&self, new: &Self, widen: bool, joins: &mut Joins) -> Self {
        let mut regs = self.regs;
        for (old, new) in regs.iter_mut().zip(new.regs) {
            *old = old.join(new, widen, joins);
        }
        let stack = self.stack.iter().enumerate();
        let stack = stack.map(|(index, old)| old.join(new.slot(index), widen, joins)).collect();
        Self { regs, stack, back: self.back }
    }
}

/// All frames, the program's first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// The comparisons of this path with the message's end.
    pub(crate) compared: Compared,
    /// Shared between the states of a path's branches until one changes them.
    pub(crate) frames: Vec<Rc<Frame>>,
}

impl State {
    /// The state in which a program starts: r1 is the context.
    pub(crate) fn start() -> Self {
        let mut frame = Frame::new(usize::MAX);
        frame.regs[1] = Value::Context { off: 0 };
        Self { compared: Compared::Nothing, frames: vec![Rc::new(frame)] }
    }

    /// The running function's frame.
    pub(crate) fn top(&self) -> &Frame {
        &self.frames[self.frames.len() - 1]
    }

    pub(crate) fn top_mut(&mut self) -> &mut Frame {
        let top = self.frames.len() - 1;
        self.frame_mut(top)
    }

    /// The frame to change; `index` is one of them.
    pub(crate) fn frame_mut(&mut self, index: usize) -> &mut Frame {
        Rc::make_mut(&mut self.frames[index])
    }

    /// Whether both are in the same chain of calls.
    pub(crate) fn same_calls(&self, other: &Self) -> bool {
        self.frames.len() == other.frames.len()
            && self.frames.iter().zip(&other.frames).all(|(a, b)| a.back == b.back)
    }

    pub(crate) fn covers(&self, new: &Self) -> bool {
        let mut names = Names::default();
        // The other two differ in what is refused, not in what is safe.
        (self.compared == Compared::Nothing || new.compared != Compared::Nothing)
            // States differ in the running function mostly.
            && self.frames.iter().zip(&new.frames).rev().all(|(old, new)| old.covers(new, &mut names))
    }

    /// A state that covers both; they are in the same chain of calls.
    pub(crate) fn join(&self, new: &Self, widen: bool, ids: &mut u32) -> Self {
        let mut joins = Joins { made: HashMap::new(), ids };
        let frames = self.frames.iter().zip(&new.frames);
        let frames = frames.map(|(old, new)| Rc::new(old.join(new, widen, &mut joins))).collect();
        // The results of comparisons of each pointer are lost in part.
        let compared = match self.compared.min(new.compared) {
            Compared::Nothing => Compared::Nothing,
            Compared::Fixed | Compared::Variable => Compared::Variable,
        };
        Self { compared, frames }
    }

    /// Every packet pointer with base `id` now has at least `known` bytes from its base.
    pub(crate) fn learn(&mut self, id: u32, known: u32) {
        self.compared = self.compared.max(if id == 0 { Compared::Fixed } else { Compared::Variable });
        if id == ANYWHERE {
            return;
        }
        let learn = |value: &mut Value| match value {
            Value::Packet { id: other, known: old, .. } if *other == id => *old = known.max(*old),
            _ => {}
        };
        for frame in &mut self.frames {
            let has = |value: &Value| matches!(value, Value::Packet { id: other, .. } if *other == id);
            let saved = |slot: &Slot| matches!(slot, Slot::Saved(value) if has(value));
            if !frame.regs.iter().any(has) && !frame.stack.iter().any(saved) {
                continue;
            }
            let frame = Rc::make_mut(frame);
            frame.regs.iter_mut().for_each(learn);
            for slot in &mut frame.stack {
                if let Slot::Saved(value) = slot {
                    learn(value);
                }
            }
        }
    }
}
