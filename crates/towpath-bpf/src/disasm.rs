//! Instructions as text: eBPF as Linux's verifier and llvm-objdump write it, classic BPF as bpf_asm reads it.

use std::fmt;

use crate::alu::{AluOp, Cond};
use crate::classic::{ClassicInsn, ClassicKind, Register, Source};
use crate::insn::{Kind, Operand, Order, Size};

/// An eBPF instruction; jumps are written with the instruction they go to.
pub(crate) struct Ebpf(pub(crate) usize, pub(crate) Kind);

impl fmt::Display for Ebpf {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(at, kind) = *self;
        let target = |by: i32| at as i64 + 1 + i64::from(by);
        match kind {
            Kind::Alu { op: AluOp::Neg, wide, dst, .. } => {
                let (r, r2) = (Reg(wide, dst), Reg(wide, dst));
                write!(out, "{r} = -{r2}")
            }
            Kind::Alu { op, wide, dst, src } => {
                write!(out, "{} {} {}", Reg(wide, dst), sign(op), Right(wide, src))
            }
            Kind::MovSx { wide, dst, src, bits } => {
                write!(out, "{} = (s{bits}){}", Reg(wide, dst), Reg(wide, src))
            }
            Kind::End { order, dst, bits } => {
                let order = match order {
                    Order::Little => "le",
                    Order::Big => "be",
                    Order::Swap => "bswap",
                };
                write!(out, "r{dst} = {order}{bits} r{dst}")
            }
            Kind::LoadImm { dst, value } => write!(out, "r{dst} = {value:#x} ll"),
            Kind::LoadAbs { size, at } => write!(out, "r0 = *({} *)skb[{at}]", word(size)),
            Kind::LoadInd { size, src, at } => write!(out, "r0 = *({} *)skb[r{src}{at:+}]", word(size)),
            Kind::Load { size, signed, dst, base, off } => {
                let word = if signed { signed_word(size) } else { word(size) };
                write!(out, "r{dst} = *({word} *)(r{base} {})", Off(off))
            }
            Kind::Store { size, base, off, src } => {
                write!(out, "*({} *)(r{base} {}) = {}", word(size), Off(off), Right(true, src))
            }
            Kind::Jump { by } => write!(out, "goto {}", target(by)),
            Kind::JumpIf { cond, wide, dst, src, by } => {
                let (left, right) = (Reg(wide, dst), Right(wide, src));
                write!(out, "if {left} {} {right} goto {}", compare(cond), target(i32::from(by)))
            }
            Kind::Helper { .. } => out.write_str("call skb_load_bytes"),
            Kind::Call { by } => write!(out, "call {}", target(by)),
            Kind::Exit => out.write_str("exit"),
        }
    }
}

/// A classic instruction, jumps as in `Ebpf`.
pub(crate) struct Classic(pub(crate) usize, pub(crate) ClassicInsn, pub(crate) ClassicKind);

impl fmt::Display for Classic {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(at, insn, kind) = *self;
        let suffix = |size| match size {
            Size::B => "b",
            Size::H => "h",
            Size::W | Size::Dw => "",
        };
        let x = |register| if register == Register::X { "x" } else { "" };
        match kind {
            ClassicKind::Scratch { to, k } => write!(out, "ld{} M[{k}]", x(to)),
            ClassicKind::Store { from, k } => write!(out, "st{} M[{k}]", x(from)),
            ClassicKind::Imm { to, k } => write!(out, "ld{} #{k:#x}", x(to)),
            ClassicKind::Len { to } => write!(out, "ld{} #len", x(to)),
            ClassicKind::Abs { size, k } => write!(out, "ld{} [{k}]", suffix(size)),
            ClassicKind::Ind { size, k } => write!(out, "ld{} [x + {k}]", suffix(size)),
            ClassicKind::Msh { k } => write!(out, "ldx 4*([{k}]&0xf)"),
            ClassicKind::Alu { op: AluOp::Neg, .. } => out.write_str("neg"),
            ClassicKind::Alu { op, with } => write!(out, "{} {}", mnemonic(op), Second(with)),
            ClassicKind::Jump { k } => write!(out, "jmp {}", at as u64 + 1 + u64::from(k)),
            ClassicKind::JumpIf { cond, with } => {
                let name = match cond {
                    Cond::Eq => "jeq",
                    Cond::Gt => "jgt",
                    Cond::Ge => "jge",
                    _ => "jset",
                };
                let target = |skip: u8| at + 1 + usize::from(skip);
                write!(out, "{name} {}, {}, {}", Second(with), target(insn.jt), target(insn.jf))
            }
            ClassicKind::Tax => out.write_str("tax"),
            ClassicKind::Txa => out.write_str("txa"),
            ClassicKind::RetA => out.write_str("ret a"),
            ClassicKind::RetK { k } => write!(out, "ret #{k:#x}"),
        }
    }
}

struct Reg(bool, u8);

impl fmt::Display for Reg {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}{}", if self.0 { 'r' } else { 'w' }, self.1)
    }
}

struct Right(bool, Operand);

impl fmt::Display for Right {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Operand::Reg(register) => Reg(self.0, register).fmt(out),
            Operand::Imm(imm) => imm.fmt(out),
        }
    }
}

struct Off(i16);

impl fmt::Display for Off {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { '-' } else { '+' };
        write!(out, "{sign} {}", self.0.unsigned_abs())
    }
}

struct Second(Source);

impl fmt::Display for Second {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Source::X => out.write_str("x"),
            Source::K(k) => write!(out, "#{k:#x}"),
        }
    }
}

const fn word(size: Size) -> &'static str {
    match size {
        Size::B => "u8",
        Size::H => "u16",
        Size::W => "u32",
        Size::Dw => "u64",
    }
}

const fn signed_word(size: Size) -> &'static str {
    match size {
        Size::B => "s8",
        Size::H => "s16",
        Size::W => "s32",
        Size::Dw => "s64",
    }
}

const fn sign(op: AluOp) -> &'static str {
    match op {
        AluOp::Add => "+=",
        AluOp::Sub => "-=",
        AluOp::Mul => "*=",
        AluOp::Div => "/=",
        AluOp::Sdiv => "s/=",
        AluOp::Or => "|=",
        AluOp::And => "&=",
        AluOp::Lsh => "<<=",
        AluOp::Rsh => ">>=",
        AluOp::Arsh => "s>>=",
        AluOp::Neg => "= -",
        AluOp::Mod => "%=",
        AluOp::Smod => "s%=",
        AluOp::Xor => "^=",
        AluOp::Mov => "=",
    }
}

const fn compare(cond: Cond) -> &'static str {
    match cond {
        Cond::Eq => "==",
        Cond::Ne => "!=",
        Cond::Gt => ">",
        Cond::Ge => ">=",
        Cond::Lt => "<",
        Cond::Le => "<=",
        Cond::Set => "&",
        Cond::Sgt => "s>",
        Cond::Sge => "s>=",
        Cond::Slt => "s<",
        Cond::Sle => "s<=",
    }
}

const fn mnemonic(op: AluOp) -> &'static str {
    match op {
        AluOp::Add => "add",
        AluOp::Sub => "sub",
        AluOp::Mul => "mul",
        AluOp::Div | AluOp::Sdiv => "div",
        AluOp::Or => "or",
        AluOp::And => "and",
        AluOp::Lsh => "lsh",
        AluOp::Rsh | AluOp::Arsh => "rsh",
        AluOp::Neg => "neg",
        AluOp::Mod | AluOp::Smod => "mod",
        AluOp::Xor => "xor",
        AluOp::Mov => "mov",
    }
}
