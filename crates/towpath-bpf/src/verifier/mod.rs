//! The verifier: follows every path of a program before it runs.
//!
//! Purpose: follows each path with the known contents of every register and stack byte ([`State`]). A state that an earlier
//! one at the same instruction covers is not followed again. Where more than [`MAX_STATES`] states meet, they are
//! joined and widened into one, so that the analysis of a loop reaches a fixed point. Linux's verifier follows every iteration
//! of a loop and refuses loops that it cannot follow to the end. Here loops are allowed, because the fuel bounds the run.
//!
//! Invariants after success: no path reads an unset register or stack byte, leaves its function, nests calls deeper
//! than [`MAX_FRAMES`], or writes anything but its stack, `cb`, `mark` and `hash`.
//!
//! Bounds of the message are not proven: the interpreter checks every load. The verifier only refuses loads of programs that forget
//! the end of the message: a load at a constant distance from the start must be covered by a comparison with `data_end`, or the path
//! has compared a pointer with a variable offset or read the length. Any other load needs a comparison on its path. Loads that no
//! comparison covers are counted ([`Facts::variable`]).
//!
//! References: RFC 9669; `kernel/bpf/verifier.c` for the properties that programs for Linux rely on.

mod branch;
mod stack;

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use self::branch::{assume, comparable};
use self::stack::{forget_frame, read_stack, write_stack};
use crate::alu::{AluOp, Cond};
use crate::context::{self, Field};
use crate::insn::{FRAME_POINTER, Insn, Kind, Operand, Size, decode};
use crate::range::Range;
use crate::run::{FRAME_BYTES, MAX_FRAMES};
use crate::state::{ANYWHERE, Compared, Frame, State, Unset, Value, fresh};
use crate::verifier_error::Reason;

/// Instructions of a program, in slots of eight bytes.
pub const MAX_INSTRUCTIONS: usize = 32_768;

/// States kept apart at one instruction before they are joined: constant loops up to this length are followed exactly.
const MAX_STATES: usize = 64;

/// Number of steps after which fewer states are kept apart.
const STEPS_EXACT: u32 = MAX_STEPS / 4;
/// Number of steps after which all states of an instruction are joined.
const STEPS_COARSE: u32 = MAX_STEPS / 2;

/// Maximum number of states of all instructions. Above it, each instruction has one state. Bounds the verifier's memory.
const MAX_ALL_STATES: usize = 4096;

/// Maximum number of branches waiting to be followed: the longest program has no more on one path. Bounds the verifier's memory.
const MAX_PENDING: usize = MAX_INSTRUCTIONS / 2;

/// Instructions and comparisons of states (`BPF_COMPLEXITY_LIMIT_INSNS` of `linux/bpf.h` is the same number).
pub(crate) const MAX_STEPS: u32 = 1_000_000;

/// Pointers moved by more than this are refused; keeps offsets far from overflow (`BPF_MAX_VAR_OFF` of Linux).
const MAX_OFFSET: i64 = 1 << 29;

/// The memory that a load or store reaches, on every path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Region {
    Context(Field),
    Stack,
    Packet,
}

impl Region {
    const fn what(self) -> &'static str {
        match self {
            Self::Context(_) => "a field of the context",
            Self::Stack => "the stack",
            Self::Packet => "the message",
        }
    }
}

/// Results of verification.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Each slot's instruction; None in the second half of a 64-bit load.
    pub(crate) kinds: Vec<Option<Kind>>,
    /// The memory that each load and store reaches.
    pub(crate) regions: Vec<Option<Region>>,
    /// Loads from the message that no comparison is known to cover.
    pub(crate) variable: BTreeSet<usize>,
    /// Which instructions some path reaches.
    pub(crate) reached: Vec<bool>,
    /// The most bytes of stack in use below the first frame pointer.
    pub(crate) stack: usize,
    /// Maximum number of frames.
    pub(crate) frames: usize,
    /// First instructions of the functions, ascending.
    pub(crate) functions: Vec<usize>,
    /// Steps of the verifier.
    pub(crate) steps: u32,
}

/// Checks a program.
///
/// # Errors
/// The first instruction that breaks a rule, on the first path found to reach it.
pub(crate) fn check(code: &[Insn]) -> Result<Facts, (usize, Reason)> {
    check_joining(code, MAX_STATES)
}

/// As [`check`], with another number of separate states. An accepted program keeps the invariants for any number.
pub(crate) fn check_joining(code: &[Insn], max_states: usize) -> Result<Facts, (usize, Reason)> {
    if code.is_empty() {
        return Err((0, Reason::Empty));
    }
    if code.len() > MAX_INSTRUCTIONS {
        return Err((MAX_INSTRUCTIONS, Reason::TooLong(code.len(), MAX_INSTRUCTIONS)));
    }
    let kinds = decode_all(code)?;
    let functions = functions(&kinds)?;
    let targets = targets(&kinds, &functions)?;
    let mut walk = Walk {
        facts: Facts {
            regions: vec![None; kinds.len()],
            variable: BTreeSet::new(),
            reached: vec![false; kinds.len()],
            kinds,
            stack: 0,
            frames: 1,
            functions,
            steps: 0,
        },
        targets,
        seen: HashMap::new(),
        max_states,
        kept: 0,
        ids: 0,
        pending: vec![(0, State::start())],
    };
    walk.run()?;
    Ok(walk.facts)
}

/// Decodes every slot, reached or not.
fn decode_all(code: &[Insn]) -> Result<Vec<Option<Kind>>, (usize, Reason)> {
    let mut kinds = Vec::with_capacity(code.len());
    while let Some(rest) = code.get(kinds.len()..).filter(|rest| !rest.is_empty()) {
        let kind = decode(rest).map_err(|reason| (kinds.len(), reason))?;
        kinds.push(Some(kind));
        if kind.slots() == 2 {
            kinds.push(None);
        }
    }
    Ok(kinds)
}

/// The first instructions of the functions: 0, and the targets of calls.
fn functions(kinds: &[Option<Kind>]) -> Result<Vec<usize>, (usize, Reason)> {
    let mut starts = vec![0];
    for (at, kind) in kinds.iter().enumerate() {
        let Some(Kind::Call { by }) = *kind else { continue };
        let target = at as i64 + 1 + i64::from(by);
        match usize::try_from(target).ok().filter(|&target| target < kinds.len()) {
            Some(target) if kinds[target].is_none() => return Err((at, Reason::JumpIntoLoad(target))),
            Some(target) => starts.push(target),
            None => return Err((at, Reason::CallOut(target))),
        }
    }
    starts.sort_unstable();
    starts.dedup();
    Ok(starts)
}

/// Marks the targets of jumps. Fails if a jump or a fall-through leaves its function.
fn targets(kinds: &[Option<Kind>], functions: &[usize]) -> Result<Vec<bool>, (usize, Reason)> {
    let mut targets = vec![false; kinds.len()];
    let ends = functions.iter().skip(1).copied().chain([kinds.len()]);
    for (&start, end) in functions.iter().zip(ends) {
        targets[start] = true;
        for at in start..end {
            let Some(kind) = kinds[at] else { continue };
            if let Some(target) = jump_target(at, kind) {
                match usize::try_from(target).ok().filter(|target| (start..end).contains(target)) {
                    Some(target) if kinds[target].is_none() => {
                        return Err((at, Reason::JumpIntoLoad(target)));
                    }
                    Some(target) => targets[target] = true,
                    None => return Err((at, Reason::JumpOut(target))),
                }
            }
            if at + kind.slots() == end && !matches!(kind, Kind::Exit | Kind::Jump { .. }) {
                return Err((at, Reason::FallsOff));
            }
        }
    }
    Ok(targets)
}

/// The instruction that a jump goes to; calls are not jumps.
pub(crate) fn jump_target(at: usize, kind: Kind) -> Option<i64> {
    match kind {
        Kind::Jump { by } => Some(at as i64 + 1 + i64::from(by)),
        Kind::JumpIf { by, .. } => Some(at as i64 + 1 + i64::from(by)),
        _ => None,
    }
}

/// The walk over all paths.
struct Walk {
    facts: Facts,
    targets: Vec<bool>,
    /// States at the targets of jumps. A state covers only states of the same chain of calls.
    seen: HashMap<usize, Vec<Seen>>,
    /// States kept apart at one instruction.
    max_states: usize,
    /// States in `seen`.
    kept: usize,
    /// The last id of a packet pointer's base.
    ids: u32,
    pending: Vec<(usize, State)>,
}

/// States of one chain of calls at one instruction.
struct Seen {
    states: Vec<State>,
    /// There were more than the limit: `states` has one state, which is widened from now on.
    joined: bool,
}

/// The successors of an instruction.
enum Next {
    To(usize),
    /// The path ends here, or continues from `pending`.
    End,
}

impl Walk {
    fn run(&mut self) -> Result<(), (usize, Reason)> {
        while let Some((mut at, mut state)) = self.pending.pop() {
            loop {
                self.step_taken(at, 1)?;
                if self.targets[at] && !self.enter(at, &mut state)? {
                    break;
                }
                self.facts.reached[at] = true;
                match self.step(at, &mut state).map_err(|reason| (at, reason))? {
                    Next::To(next) => at = next,
                    Next::End => break,
                }
            }
        }
        Ok(())
    }

    fn step_taken(&mut self, at: usize, steps: usize) -> Result<(), (usize, Reason)> {
        self.facts.steps = self.facts.steps.saturating_add(u32::try_from(steps).unwrap_or(u32::MAX));
        if self.facts.steps > MAX_STEPS { Err((at, Reason::TooComplex(MAX_STEPS))) } else { Ok(()) }
    }

    /// Remembers a state at a target of jumps; false when it is covered. May replace it by one that covers more.
    fn enter(&mut self, at: usize, state: &mut State) -> Result<bool, (usize, Reason)> {
        let chains = self.seen.entry(at).or_default();
        let looked = chains.len();
        let index = match chains.iter().position(|seen| seen.states[0].same_calls(state)) {
            Some(index) => index,
            None => {
                chains.push(Seen { states: vec![state.clone()], joined: false });
                self.kept += 1;
                self.step_taken(at, looked)?;
                return Ok(true);
            }
        };
        let seen = &mut chains[index];
        let looked = looked + seen.states.len();
        if seen.states.iter().rev().any(|old| old.covers(state)) {
            self.step_taken(at, looked)?;
            return Ok(false);
        }
        // The more steps were spent, the fewer states are kept separate: a program with many paths is analysed less precisely instead of
        // being refused.
        let limit = match self.facts.steps {
            _ if self.kept >= MAX_ALL_STATES || self.pending.len() >= MAX_PENDING / 8 => 1,
            0..STEPS_EXACT => self.max_states,
            STEPS_EXACT..STEPS_COARSE => self.max_states.min(4),
            _ => 1,
        };
        if seen.joined || seen.states.len() >= limit {
            let mut all = seen.states.drain(..);
            let first = all.next().unwrap_or_else(|| state.clone());
            let joined = all.fold(first, |joined, next| joined.join(&next, false, &mut self.ids));
            *state = joined.join(state, seen.joined, &mut self.ids);
            seen.joined = true;
            self.kept = self.kept.saturating_sub(looked);
        }
        seen.states.push(state.clone());
        self.kept += 1;
        self.step_taken(at, looked)?;
        Ok(true)
    }

    /// One instruction.
    fn step(&mut self, at: usize, state: &mut State) -> Result<Next, Reason> {
        // Targets are checked, and every function ends in an exit or a jump.
        let Some(kind) = self.facts.kinds[at] else { return Err(Reason::JumpIntoLoad(at)) };
        match kind {
            Kind::Alu { op, wide, dst, src } => self.alu(state, op, wide, dst, src)?,
            Kind::MovSx { dst, src, .. } => {
                scalar(state, src)?;
                state.top_mut().regs[usize::from(dst)] = Value::Scalar(Range::ANY);
            }
            Kind::End { dst, bits, .. } => {
                scalar(state, dst)?;
                state.top_mut().regs[usize::from(dst)] = Value::Scalar(Range::of_bits(bits));
            }
            Kind::LoadImm { dst, value } => state.top_mut().regs[usize::from(dst)] = Value::scalar(value),
            Kind::LoadAbs { size, at } => {
                if at < 0 {
                    return Err(Reason::Ancillary(at));
                }
                load_network(state, size)?;
            }
            Kind::LoadInd { size, src, .. } => {
                scalar(state, src)?;
                load_network(state, size)?;
            }
            Kind::Load { size, signed, dst, base, off } => {
                let value = self.load(at, state, size, signed, base, i64::from(off))?;
                state.top_mut().regs[usize::from(dst)] = value;
            }
            Kind::Store { size, base, off, src } => self.store(at, state, size, base, i64::from(off), src)?,
            Kind::Jump { .. } => return Ok(Next::To(self.target(at, kind))),
            Kind::JumpIf { cond, wide, dst, src, .. } => {
                return self.branch(at, kind, state, (cond, wide), dst, src);
            }
            Kind::Helper { .. } => self.load_bytes(state)?,
            Kind::Call { by } => return self.call(at, state, by),
            Kind::Exit => return exit(state),
        }
        Ok(Next::To(at + kind.slots()))
    }

    /// A jump's target; it was checked to be inside the program.
    fn target(&self, at: usize, kind: Kind) -> usize {
        let target = jump_target(at, kind).and_then(|target| usize::try_from(target).ok());
        target.unwrap_or(at).min(self.facts.kinds.len() - 1)
    }

    fn alu(&mut self, state: &mut State, op: AluOp, wide: bool, dst: u8, src: Operand) -> Result<(), Reason> {
        let right = operand(state, src)?;
        let result = match (op, wide) {
            (AluOp::Mov, true) => right,
            (AluOp::Mov, false) => {
                Value::Scalar(number(src, right)?.alu(AluOp::Mov, false, number(src, right)?))
            }
            _ => {
                let left = read(state, dst)?;
                match (left, right) {
                    (Value::Scalar(left), Value::Scalar(right)) => Value::Scalar(left.alu(op, wide, right)),
                    _ => {
                        if matches!((left, right), (Value::PacketEnd, _) | (_, Value::PacketEnd)) {
                            // The number of bytes from a pointer on.
                            state.compared = Compared::Variable;
                        }
                        self.move_pointer(op, wide, (dst, left), (src, right))?
                    }
                }
            }
        };
        state.top_mut().regs[usize::from(dst)] = result;
        Ok(())
    }

    /// Arithmetic where at least one side is a pointer.
    fn move_pointer(
        &mut self,
        op: AluOp,
        wide: bool,
        (dst, left): (u8, Value),
        (src, right): (Operand, Value),
    ) -> Result<Value, Reason> {
        let right_register = if let Operand::Reg(src) = src { src } else { dst };
        let (register, pointer, by) = match (left, right) {
            (pointer, Value::Scalar(by)) => (dst, pointer, by),
            (Value::Scalar(by), pointer) if op == AluOp::Add => (right_register, pointer, by),
            (Value::Scalar(_), pointer) => {
                return Err(Reason::PointerArithmetic(right_register, pointer.what()));
            }
            // The distance of two pointers into, or to the end of, the message.
            (Value::Packet { .. } | Value::PacketEnd, Value::Packet { .. } | Value::PacketEnd)
                if op == AluOp::Sub =>
            {
                return Ok(Value::Scalar(if wide { Range::ANY } else { Range::of_bits(32) }));
            }
            (Value::Stack { frame: a, .. }, Value::Stack { frame: b, .. })
                if op == AluOp::Sub && wide && a == b =>
            {
                return Ok(Value::Scalar(Range::ANY));
            }
            (pointer, _) => return Err(Reason::PointerArithmetic(dst, pointer.what())),
        };
        if !wide || !matches!(op, AluOp::Add | AluOp::Sub) {
            return Err(Reason::PointerArithmetic(register, pointer.what()));
        }
        // The distance, if it is known: a constant of either sign, or a small unsigned range.
        let far = match by.constant() {
            Some(by) if op == AluOp::Sub => {
                Some((by.cast_signed().wrapping_neg(), by.cast_signed().wrapping_neg()))
            }
            Some(by) => Some((by.cast_signed(), by.cast_signed())),
            None if by.max >= MAX_OFFSET.cast_unsigned() => None,
            None if op == AluOp::Sub => Some((-by.max.cast_signed(), -by.min.cast_signed())),
            None => Some((by.min.cast_signed(), by.max.cast_signed())),
        };
        let within = |at: i64, by: i64| match at.checked_add(by) {
            Some(sum) if sum.abs() < MAX_OFFSET => Ok(sum),
            _ => Err(Reason::TooFar(register)),
        };
        Ok(match (pointer, far) {
            (Value::Context { off }, Some((min, max))) if min == max => {
                Value::Context { off: within(off, min)? }
            }
            (Value::Stack { frame, min, max }, Some((least, most))) => {
                Value::Stack { frame, min: within(min, least)?, max: within(max, most)? }
            }
            (Value::Stack { .. }, None) => return Err(Reason::StackUnbounded(register)),
            (Value::Packet { id: ANYWHERE, .. }, _) => pointer,
            (Value::Packet { id, off, known }, Some((min, max))) if min == max => {
                Value::Packet { id, off: within(off, min)?, known }
            }
            (Value::Packet { .. }, _) => Value::Packet { id: fresh(&mut self.ids), off: 0, known: 0 },
            (Value::PacketEnd, _) => return Err(Reason::MovesEnd(register)),
            (pointer, _) => return Err(Reason::PointerArithmetic(register, pointer.what())),
        })
    }

    fn load(
        &mut self,
        at: usize,
        state: &mut State,
        size: Size,
        signed: bool,
        base: u8,
        off: i64,
    ) -> Result<Value, Reason> {
        let loaded = if signed { Range::ANY } else { Range::of_bits(size.bits()) };
        match read(state, base)? {
            Value::Context { off: moved } => {
                let field = context::field(moved + off, size)?;
                if signed {
                    return Err(Reason::SignedField);
                }
                self.reaches(at, base, Region::Context(field))?;
                Ok(match field {
                    Field::Data => Value::Packet { id: 0, off: 0, known: 0 },
                    Field::DataEnd => Value::PacketEnd,
                    Field::Len { .. } => {
                        state.compared = Compared::Variable;
                        Value::Scalar(loaded)
                    }
                    _ => Value::Scalar(loaded),
                })
            }
            Value::Stack { frame, min, max } => {
                self.reaches(at, base, Region::Stack)?;
                let value = read_stack(&state.frames[frame], (min + off, max + off), size.bytes())?;
                Ok(value.unwrap_or(Value::Scalar(loaded)))
            }
            Value::Packet { id, off: moved, known } => {
                self.reaches(at, base, Region::Packet)?;
                let (first, end) = (moved + off, moved + off + i64::from(size.bytes()));
                if first < 0 || end > i64::from(known) {
                    // Compilers compute a pointer once to compare it and again to use it, and compare counters in place of pointers.
                    if state.compared < if id == 0 { Compared::Variable } else { Compared::Fixed } {
                        return Err(Reason::Unproven(base, first, end - 1, known));
                    }
                    self.facts.variable.insert(at);
                } else if id != 0 {
                    // It may have wrapped around 2^64.
                    self.facts.variable.insert(at);
                }
                Ok(Value::Scalar(loaded))
            }
            Value::PacketEnd => Err(Reason::ReadsEnd(base)),
            Value::Scalar(_) | Value::Unset(_) => Err(Reason::NotPointer(base)),
        }
    }

    fn store(
        &mut self,
        at: usize,
        state: &mut State,
        size: Size,
        base: u8,
        off: i64,
        src: Operand,
    ) -> Result<(), Reason> {
        let value = operand(state, src)?;
        match read(state, base)? {
            Value::Context { off: moved } => {
                let field = context::field(moved + off, size)?;
                context::writable(field, moved + off, size)?;
                if let (Operand::Reg(src), false) = (src, matches!(value, Value::Scalar(_))) {
                    return Err(Reason::StoresPointer(src, value.what()));
                }
                self.reaches(at, base, Region::Context(field))
            }
            Value::Stack { frame, min, max } => {
                self.reaches(at, base, Region::Stack)?;
                if let (Operand::Reg(src), false, true) = (
                    src,
                    matches!(value, Value::Scalar(_)),
                    size != Size::Dw || min != max || (min + off) % 8 != 0,
                ) {
                    // Saved in part or at an unknown offset: it cannot be restored as a pointer.
                    return Err(Reason::NotScalar(src, value.what()));
                }
                self.uses_stack(frame, min + off);
                write_stack(state.frame_mut(frame), (min + off, max + off), size.bytes(), Some(value))
            }
            Value::Packet { .. } => Err(Reason::WritesPacket(base)),
            Value::PacketEnd => Err(Reason::ReadsEnd(base)),
            Value::Scalar(_) | Value::Unset(_) => Err(Reason::NotPointer(base)),
        }
    }

    /// Records the memory region of an access. All paths must agree, because the emitted operation is specific to the region.
    fn reaches(&mut self, at: usize, base: u8, region: Region) -> Result<(), Reason> {
        match self.facts.regions[at] {
            Some(other) if other != region => Err(Reason::TwoRegions(base, other.what(), region.what())),
            _ => {
                self.facts.regions[at] = Some(region);
                Ok(())
            }
        }
    }

    fn uses_stack(&mut self, frame: usize, lowest: i64) {
        let bytes = frame * FRAME_BYTES + usize::try_from(-lowest).unwrap_or(0).min(FRAME_BYTES);
        self.facts.stack = self.facts.stack.max(bytes);
    }

    /// `bpf_skb_load_bytes(const struct sk_buff *skb, u32 offset, void *to, u32 len)`.
    fn load_bytes(&mut self, state: &mut State) -> Result<(), Reason> {
        match read(state, 1)? {
            Value::Context { off: 0 } => {}
            other => return Err(Reason::HelperContext(other.what())),
        }
        scalar(state, 2)?;
        let Value::Stack { frame, min, max } = read(state, 3)? else {
            return Err(Reason::HelperTarget(read(state, 3)?.what()));
        };
        let length = scalar(state, 4)?.low32();
        if length.min == 0 {
            return Err(Reason::HelperLength(0));
        }
        let Some(bytes) = u32::try_from(length.max).ok().filter(|&bytes| bytes as usize <= FRAME_BYTES)
        else {
            return Err(Reason::HelperLength(length.max));
        };
        if length.constant().is_none() || min != max {
            // The number of written bytes is unknown, so the whole range must have been written before.
            read_stack(&state.frames[frame], (min, max), bytes)?;
        }
        self.uses_stack(frame, min);
        write_stack(state.frame_mut(frame), (min, max), bytes, None)?;
        clobber(state);
        state.top_mut().regs[0] = Value::Scalar(Range::ANY);
        Ok(())
    }

    fn call(&mut self, at: usize, state: &mut State, by: i32) -> Result<Next, Reason> {
        if state.frames.len() == MAX_FRAMES {
            return Err(Reason::TooDeep(MAX_FRAMES));
        }
        let mut frame = Frame::new(at + 1);
        frame.regs[1..=5].copy_from_slice(&state.top().regs[1..=5]);
        state.frames.push(Rc::new(frame));
        self.facts.frames = self.facts.frames.max(state.frames.len());
        // `functions` has checked that the target is inside the program.
        Ok(Next::To(usize::try_from(at as i64 + 1 + i64::from(by)).unwrap_or(0)))
    }

    /// Verifies a conditional jump: the possible sides and their states.
    fn branch(
        &mut self,
        at: usize,
        kind: Kind,
        state: &mut State,
        (cond, wide): (Cond, bool),
        dst: u8,
        src: Operand,
    ) -> Result<Next, Reason> {
        let (left, right) = (read(state, dst)?, operand(state, src)?);
        comparable(wide, (dst, left), (src, right))?;
        let taken = assume(state, (cond, wide), dst, src, (left, right), true);
        let passed = assume(state, (cond, wide), dst, src, (left, right), false);
        let target = self.target(at, kind);
        Ok(match (taken, passed) {
            (Some(taken), Some(passed)) => {
                if self.pending.len() == MAX_PENDING {
                    return Err(Reason::TooComplex(MAX_STEPS));
                }
                self.pending.push((target, taken));
                *state = passed;
                Next::To(at + 1)
            }
            (Some(taken), None) => {
                *state = taken;
                Next::To(target)
            }
            (None, Some(passed)) => {
                *state = passed;
                Next::To(at + 1)
            }
            (None, None) => Next::End,
        })
    }
}

/// The contents of a register.
fn read(state: &State, register: u8) -> Result<Value, Reason> {
    if register == FRAME_POINTER {
        return Ok(Value::Stack { frame: state.frames.len() - 1, min: 0, max: 0 });
    }
    match state.top().regs.get(usize::from(register)).copied() {
        None => Err(Reason::NoSuchRegister(register)),
        Some(Value::Unset(Unset::Never)) => Err(Reason::Unset(register)),
        Some(Value::Unset(Unset::Call)) => Err(Reason::Clobbered(register)),
        Some(Value::Unset(Unset::Mixed)) => Err(Reason::Mixed(register)),
        Some(value) => Ok(value),
    }
}

fn operand(state: &State, operand: Operand) -> Result<Value, Reason> {
    match operand {
        Operand::Reg(register) => read(state, register),
        Operand::Imm(imm) => Ok(Value::scalar(crate::op::extend(imm))),
    }
}

/// A register that must hold a number.
fn scalar(state: &State, register: u8) -> Result<Range, Reason> {
    number(Operand::Reg(register), read(state, register)?)
}

fn number(operand: Operand, value: Value) -> Result<Range, Reason> {
    match (operand, value) {
        (_, Value::Scalar(range)) => Ok(range),
        (Operand::Reg(register), pointer) => Err(Reason::NotScalar(register, pointer.what())),
        (Operand::Imm(imm), _) => Ok(Range::exactly(crate::op::extend(imm))),
    }
}

/// After a call, r1 to r5 are unset (RFC 9669 section 2).
fn clobber(state: &mut State) {
    state.top_mut().regs[1..=5].fill(Value::Unset(Unset::Call));
}

/// LD_ABS and LD_IND: the context is in r6, the result in r0, and r1 to r5 are lost, as by a call.
fn load_network(state: &mut State, size: Size) -> Result<(), Reason> {
    if state.frames.len() > 1 {
        return Err(Reason::AbsInFunction);
    }
    match state.top().regs[6] {
        Value::Context { off: 0 } => {}
        other => return Err(Reason::AbsWithoutContext(other.what())),
    }
    clobber(state);
    state.top_mut().regs[0] = Value::Scalar(Range::of_bits(size.bits()));
    Ok(())
}

/// The end of a function: of the program, or back to the caller.
fn exit(state: &mut State) -> Result<Next, Reason> {
    let result = read(state, 0)?;
    if state.frames.len() == 1 {
        return match result {
            Value::Scalar(_) => Ok(Next::End),
            pointer => Err(Reason::ReturnsPointer(pointer.what())),
        };
    }
    // A pointer into the stack frame of the returning function would dangle.
    if let Value::Stack { frame, .. } = result
        && frame + 1 == state.frames.len()
    {
        return Err(Reason::ReturnsPointer(result.what()));
    }
    let ended = state.frames.len() - 1;
    let back = state.top().back;
    state.frames.pop();
    clobber(state);
    state.top_mut().regs[0] = result;
    forget_frame(state, ended);
    Ok(Next::To(back))
}
