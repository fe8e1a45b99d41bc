//! Classic BPF: `struct sock_filter`, the checks of Linux, and the way to operations.
//!
//! References: McCanne and Jacobson, "The BSD Packet Filter" (USENIX 1993); `linux/filter.h`;
//! `net/core/filter.c` (`bpf_check_classic`, `check_load_and_stores`) for what Linux refuses.
//!
//! A and X start at 0. A load out of range and a division by X = 0 end the program with 0. Jumps only go forward.

use crate::alu::{AluOp, Cond};
use crate::insn::{Operand, Size};
use crate::lower::Lowered;
use crate::op::{Code, Op};
use crate::verifier_error::Reason;

/// Instructions of a classic program (`BPF_MAXINSNS` of `linux/bpf_common.h`).
pub const MAX_CLASSIC_INSTRUCTIONS: usize = 4096;

/// A classic instruction (`struct sock_filter`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassicInsn {
    /// Class, and operation or mode and size.
    pub code: u16,
    /// Instructions to skip when the condition holds.
    pub jt: u8,
    /// Instructions to skip when it does not.
    pub jf: u8,
    /// The constant.
    pub k: u32,
}

impl ClassicInsn {
    /// Reads an instruction in little-endian encoding.
    #[must_use]
    pub const fn parse(bytes: [u8; 8]) -> Self {
        let [code0, code1, jt, jf, k @ ..] = bytes;
        Self { code: u16::from_le_bytes([code0, code1]), jt, jf, k: u32::from_le_bytes(k) }
    }
}

/// A decoded classic instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClassicKind {
    /// `ld M[k]` and `ldx M[k]`.
    Scratch {
        to: Register,
        k: u32,
    },
    /// `st M[k]` and `stx M[k]`.
    Store {
        from: Register,
        k: u32,
    },
    /// `ld #k`, `ldx #k`.
    Imm {
        to: Register,
        k: u32,
    },
    /// `ld #len`, `ldx #len`.
    Len {
        to: Register,
    },
    /// `ld [k]`, `ldh [k]`, `ldb [k]`.
    Abs {
        size: Size,
        k: u32,
    },
    /// `ld [x + k]` and so on.
    Ind {
        size: Size,
        k: u32,
    },
    /// `ldx 4*([k]&0xf)`.
    Msh {
        k: u32,
    },
    Alu {
        op: AluOp,
        with: Source,
    },
    Jump {
        k: u32,
    },
    JumpIf {
        cond: Cond,
        with: Source,
    },
    Tax,
    Txa,
    RetA,
    RetK {
        k: u32,
    },
}

/// The two registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Register {
    A,
    X,
}

/// The second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    X,
    K(u32),
}

/// Words of scratch memory (`BPF_MEMWORDS` of `linux/filter.h`).
const SCRATCH_WORDS: u32 = 16;

/// The virtual machine's registers for A, X and the scratch memory. They avoid eBPF's r1 and r10, which do not start at 0.
const A: u8 = 0;
const X: u8 = 11;
const SCRATCH: u8 = 16;

/// Decodes an instruction.
///
/// # Errors
/// An opcode that classic BPF does not have, and the constants that Linux refuses.
pub(crate) fn decode(insn: ClassicInsn) -> Result<ClassicKind, Reason> {
    let k = insn.k;
    let unknown = Err(Reason::ClassicOpcode(insn.code));
    if insn.code > 0xff {
        return unknown;
    }
    let source = if insn.code & 0x08 == 0 { Source::K(k) } else { Source::X };
    #[allow(clippy::cast_possible_truncation)] // Checked above.
    let size = Size::parse(insn.code as u8);
    Ok(match insn.code {
        0x00 => ClassicKind::Imm { to: Register::A, k },
        0x01 => ClassicKind::Imm { to: Register::X, k },
        0x20 | 0x28 | 0x30 => ClassicKind::Abs { size, k: in_message(k)? },
        0x40 | 0x48 | 0x50 => ClassicKind::Ind { size, k },
        0x60 => ClassicKind::Scratch { to: Register::A, k: scratch(k)? },
        0x61 => ClassicKind::Scratch { to: Register::X, k: scratch(k)? },
        0x80 => ClassicKind::Len { to: Register::A },
        0x81 => ClassicKind::Len { to: Register::X },
        0xb1 => ClassicKind::Msh { k: in_message(k)? },
        0x02 => ClassicKind::Store { from: Register::A, k: scratch(k)? },
        0x03 => ClassicKind::Store { from: Register::X, k: scratch(k)? },
        0x07 => ClassicKind::Tax,
        0x87 => ClassicKind::Txa,
        0x06 => ClassicKind::RetK { k },
        0x16 => ClassicKind::RetA,
        0x05 => ClassicKind::Jump { k },
        0x15 | 0x1d => ClassicKind::JumpIf { cond: Cond::Eq, with: source },
        0x25 | 0x2d => ClassicKind::JumpIf { cond: Cond::Gt, with: source },
        0x35 | 0x3d => ClassicKind::JumpIf { cond: Cond::Ge, with: source },
        0x45 | 0x4d => ClassicKind::JumpIf { cond: Cond::Set, with: source },
        0x84 => ClassicKind::Alu { op: AluOp::Neg, with: Source::K(0) },
        code if code & 0x07 == 0x04 => {
            let op = match code & 0xf0 {
                0x00 => AluOp::Add,
                0x10 => AluOp::Sub,
                0x20 => AluOp::Mul,
                0x30 => AluOp::Div,
                0x40 => AluOp::Or,
                0x50 => AluOp::And,
                0x60 => AluOp::Lsh,
                0x70 => AluOp::Rsh,
                0x90 => AluOp::Mod,
                0xa0 => AluOp::Xor,
                _ => return unknown,
            };
            match (op, source) {
                (AluOp::Div | AluOp::Mod, Source::K(0)) => return Err(Reason::DivideByZero),
                (AluOp::Lsh | AluOp::Rsh, Source::K(32..)) => return Err(Reason::Shift(k.cast_signed())),
                _ => ClassicKind::Alu { op, with: source },
            }
        }
        _ => return unknown,
    })
}

/// A constant offset into the message: not one of Linux's ancillary areas, which are negative.
fn in_message(k: u32) -> Result<u32, Reason> {
    match i32::try_from(k) {
        Ok(_) => Ok(k),
        Err(_) => Err(Reason::Ancillary(k.cast_signed())),
    }
}

fn scratch(k: u32) -> Result<u32, Reason> {
    if k < SCRATCH_WORDS { Ok(k) } else { Err(Reason::NoSuchScratch(k)) }
}

/// Checks a program and makes operations of it.
///
/// # Errors
/// The first instruction that breaks a rule.
pub(crate) fn check(code: &[ClassicInsn]) -> Result<Lowered, (usize, Reason)> {
    if code.is_empty() {
        return Err((0, Reason::Empty));
    }
    if code.len() > MAX_CLASSIC_INSTRUCTIONS {
        let reason = Reason::TooLong(code.len(), MAX_CLASSIC_INSTRUCTIONS);
        return Err((MAX_CLASSIC_INSTRUCTIONS, reason));
    }
    let mut kinds = Vec::with_capacity(code.len());
    for (at, insn) in code.iter().enumerate() {
        kinds.push(decode(*insn).map_err(|reason| (at, reason))?);
    }
    check_flow(code, &kinds)?;
    Ok(lower(code, &kinds))
}

/// Indices of the possible next instructions, and their number; 0 for a return.
fn successors(at: usize, insn: ClassicInsn, kind: ClassicKind) -> ([usize; 2], usize) {
    let by = |skip: u32| at.saturating_add(1).saturating_add(skip as usize);
    match kind {
        ClassicKind::RetA | ClassicKind::RetK { .. } => ([0, 0], 0),
        ClassicKind::Jump { k } => ([by(k), 0], 1),
        ClassicKind::JumpIf { .. } => ([by(u32::from(insn.jt)), by(u32::from(insn.jf))], 2),
        _ => ([by(0), 0], 1),
    }
}

/// All jumps are forward, so one pass sees every path: which scratch words each instruction can rely on.
fn check_flow(code: &[ClassicInsn], kinds: &[ClassicKind]) -> Result<(), (usize, Reason)> {
    // For each instruction the words that every path to it has written; None: no path yet.
    let mut written: Vec<Option<u16>> = vec![None; code.len()];
    written[0] = Some(0);
    for (at, (insn, kind)) in code.iter().zip(kinds).enumerate() {
        // Linux checks instructions that nothing reaches as well; their jumps must be in range.
        let mut words = written[at].unwrap_or(u16::MAX);
        match *kind {
            ClassicKind::Scratch { k, .. } if words & 1 << k == 0 => {
                return Err((at, Reason::ScratchUnset(k)));
            }
            ClassicKind::Store { k, .. } => words |= 1 << k,
            _ => {}
        }
        let (next, count) = successors(at, *insn, *kind);
        for &next in &next[..count] {
            let falls = !matches!(kind, ClassicKind::Jump { .. } | ClassicKind::JumpIf { .. });
            match written.get_mut(next) {
                Some(known) => *known = Some(known.map_or(words, |old| old & words)),
                None if falls => return Err((at, Reason::FallsOff)),
                None => return Err((at, Reason::JumpOut(i64::try_from(next).unwrap_or(i64::MAX)))),
            }
        }
    }
    Ok(())
}

fn lower(code: &[ClassicInsn], kinds: &[ClassicKind]) -> Lowered {
    let mut lowered = Lowered::default();
    // The first operation of each instruction, and the operations whose targets are instructions still to come.
    let mut first = Vec::with_capacity(code.len());
    let mut jumps = Vec::new();
    for (at, (insn, kind)) in code.iter().zip(kinds).enumerate() {
        first.push(lowered.ops.len());
        let mut push = |op| lowered.push(op, at);
        match *kind {
            ClassicKind::Scratch { to, k } => push(mov(register(to), Operand::Reg(word(k)))),
            ClassicKind::Store { from, k } => push(mov(word(k), Operand::Reg(register(from)))),
            ClassicKind::Imm { to, k } => push(mov(register(to), Operand::Imm(k.cast_signed()))),
            ClassicKind::Len { to } => push(Op::new(Code::Len, register(to), 0, 0, 0)),
            ClassicKind::Abs { size, k } => {
                push(Op::new(network(size, [Code::AbsB, Code::AbsH, Code::AbsW]), A, 0, 0, u64::from(k)));
            }
            ClassicKind::Ind { size, k } => {
                push(Op::new(network(size, [Code::IndB, Code::IndH, Code::IndW]), A, X, 0, u64::from(k)));
            }
            ClassicKind::Msh { k } => push(Op::new(Code::Msh, X, 0, 0, u64::from(k))),
            ClassicKind::Alu { op, with } => {
                if matches!((op, with), (AluOp::Div | AluOp::Mod, Source::X)) {
                    push(Op::new(Code::EndIfZero, 0, X, 0, 0));
                }
                push(Op::alu(op, false, A, operand(with)));
            }
            ClassicKind::Tax => push(mov(X, Operand::Reg(A))),
            ClassicKind::Txa => push(mov(A, Operand::Reg(X))),
            ClassicKind::RetA => push(Op::new(Code::Exit, 0, 0, 0, 0)),
            ClassicKind::RetK { k } => {
                push(mov(A, Operand::Imm(k.cast_signed())));
                push(Op::new(Code::Exit, 0, 0, 0, 0));
            }
            ClassicKind::Jump { .. } | ClassicKind::JumpIf { .. } => {
                let ([then, otherwise], _) = successors(at, *insn, *kind);
                let branch = match *kind {
                    ClassicKind::JumpIf { cond, with } if then != otherwise => Some((cond, with)),
                    _ => None,
                };
                // One operation where one side falls through, two where both jump.
                let next = at + 1;
                match branch {
                    None => jumps.push((lowered.ops.len(), then)),
                    Some((cond, with)) => {
                        let (cond, to, rest) = match cond.negated() {
                            Some(negated) if then == next => (negated, otherwise, next),
                            _ => (cond, then, otherwise),
                        };
                        jumps.push((lowered.ops.len(), to));
                        lowered.push(Op::jump_if(cond, false, A, operand(with)), at);
                        if rest == next {
                            continue;
                        }
                        jumps.push((lowered.ops.len(), rest));
                    }
                }
                lowered.push(Op::new(Code::Ja, 0, 0, 0, 0), at);
            }
        }
    }
    for (op, target) in jumps {
        let target = first.get(target).and_then(|&target| i32::try_from(target).ok());
        lowered.ops[op].off = target.unwrap_or(i32::MAX);
    }
    lowered
}

fn mov(dst: u8, src: Operand) -> Op {
    Op::alu(AluOp::Mov, false, dst, src)
}

const fn register(register: Register) -> u8 {
    match register {
        Register::A => A,
        Register::X => X,
    }
}

/// The machine's register for M[k]; k is below 16.
#[allow(clippy::cast_possible_truncation)]
const fn word(k: u32) -> u8 {
    SCRATCH + (k % SCRATCH_WORDS) as u8
}

const fn operand(source: Source) -> Operand {
    match source {
        Source::X => Operand::Reg(X),
        Source::K(k) => Operand::Imm(k.cast_signed()),
    }
}

const fn network(size: Size, [b, h, w]: [Code; 3]) -> Code {
    match size {
        Size::B => b,
        Size::H => h,
        Size::W | Size::Dw => w,
    }
}
