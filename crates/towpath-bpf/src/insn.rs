//! Encoding of an eBPF instruction (eight bytes).
//!
//! Encoding and names follow RFC 9669 (BPF Instruction Set Architecture) and `linux/bpf.h`. Fields that an instruction
//! does not use must be zero, as in Linux, because a later version may define them.

use crate::alu::{AluOp, Cond};
use crate::verifier_error::Reason;

/// Register 10: the frame pointer, read only.
pub(crate) const FRAME_POINTER: u8 = 10;

/// Helper 26, `bpf_skb_load_bytes` (`linux/bpf.h`, `___BPF_FUNC_MAPPER`).
pub(crate) const SKB_LOAD_BYTES: i32 = 26;

/// An eBPF instruction as its fields (RFC 9669 section 3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Insn {
    /// Class, and operation or mode and size.
    pub code: u8,
    /// The destination register, 0 to 15 as encoded.
    pub dst: u8,
    /// The source register, 0 to 15 as encoded; for calls, the kind of callee.
    pub src: u8,
    /// Jump or memory offset.
    pub off: i16,
    /// The immediate.
    pub imm: i32,
}

impl Insn {
    /// Bytes of an instruction.
    pub const SIZE: usize = 8;

    /// Reads an instruction in little-endian encoding.
    #[must_use]
    pub const fn parse(bytes: [u8; Self::SIZE]) -> Self {
        let [code, registers, off0, off1, imm @ ..] = bytes;
        Self {
            code,
            dst: registers & 0x0f,
            src: registers >> 4,
            off: i16::from_le_bytes([off0, off1]),
            imm: i32::from_le_bytes(imm),
        }
    }

    /// Writes the instruction in little-endian encoding.
    #[must_use]
    pub const fn emit(self) -> [u8; Self::SIZE] {
        let [off0, off1] = self.off.to_le_bytes();
        let [imm0, imm1, imm2, imm3] = self.imm.to_le_bytes();
        [self.code, self.dst & 0x0f | self.src << 4, off0, off1, imm0, imm1, imm2, imm3]
    }

    /// True for the first half of a 64-bit immediate load, the only instruction of two slots (`BPF_LD|BPF_DW|BPF_IMM`).
    pub(crate) const fn is_wide(self) -> bool {
        self.code == 0x18
    }
}

/// How many bytes a load or store moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    B,
    H,
    W,
    Dw,
}

impl Size {
    pub(crate) const fn bytes(self) -> u32 {
        match self {
            Self::B => 1,
            Self::H => 2,
            Self::W => 4,
            Self::Dw => 8,
        }
    }

    pub(crate) const fn bits(self) -> u32 {
        self.bytes() * 8
    }

    /// `BPF_SIZE` of `linux/bpf_common.h`.
    pub(crate) const fn parse(code: u8) -> Self {
        match code & 0x18 {
            0x00 => Self::W,
            0x08 => Self::H,
            0x10 => Self::B,
            _ => Self::Dw,
        }
    }
}

/// The second operand of arithmetic, comparisons and stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Reg(u8),
    Imm(i32),
}

/// The operation of a byte-order instruction (RFC 9669 section 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// `le`: truncates to the width. The virtual machine is little-endian.
    Little,
    /// `be`: swaps the bytes.
    Big,
    /// `bswap`: swaps the bytes on every machine.
    Swap,
}

/// An instruction's meaning. Registers are valid; jumps are still relative and unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Alu { op: AluOp, wide: bool, dst: u8, src: Operand },
    MovSx { wide: bool, dst: u8, src: u8, bits: u32 },
    End { order: Order, dst: u8, bits: u32 },
    LoadImm { dst: u8, value: u64 },
    LoadAbs { size: Size, at: i32 },
    LoadInd { size: Size, src: u8, at: i32 },
    Load { size: Size, signed: bool, dst: u8, base: u8, off: i16 },
    Store { size: Size, base: u8, off: i16, src: Operand },
    Jump { by: i32 },
    JumpIf { cond: Cond, wide: bool, dst: u8, src: Operand, by: i16 },
    Helper { id: i32 },
    Call { by: i32 },
    Exit,
}

impl Kind {
    /// Slots that the instruction occupies.
    pub(crate) const fn slots(self) -> usize {
        match self {
            Self::LoadImm { .. } => 2,
            _ => 1,
        }
    }
}

/// Decodes the instruction at the head of `code`.
///
/// # Errors
/// An opcode, register or field that RFC 9669 does not define, or that a framing program may not use.
pub(crate) fn decode(code: &[Insn]) -> Result<Kind, Reason> {
    let Some(&insn) = code.first() else { return Err(Reason::FallsOff) };
    if insn.dst > FRAME_POINTER {
        return Err(Reason::NoSuchRegister(insn.dst));
    }
    match insn.code & 0x07 {
        0x00 => decode_ld(insn, code.get(1).copied()),
        0x01 => decode_ldx(insn),
        0x02 | 0x03 => decode_store(insn),
        0x04 | 0x07 => decode_alu(insn),
        _ => decode_jump(insn),
    }
}

/// Mode bits, `BPF_MODE` of `linux/bpf_common.h`.
const MODE: u8 = 0xe0;

fn decode_ld(insn: Insn, next: Option<Insn>) -> Result<Kind, Reason> {
    if insn.is_wide() {
        return decode_wide(insn, next);
    }
    let size = Size::parse(insn.code);
    if size == Size::Dw {
        return Err(Reason::Opcode(insn.code));
    }
    zero(insn.off != 0 || insn.dst != 0)?;
    match insn.code & MODE {
        0x20 => {
            zero(insn.src != 0)?;
            Ok(Kind::LoadAbs { size, at: insn.imm })
        }
        0x40 => Ok(Kind::LoadInd { size, src: source(insn)?, at: insn.imm }),
        _ => Err(Reason::Opcode(insn.code)),
    }
}

fn decode_wide(insn: Insn, next: Option<Insn>) -> Result<Kind, Reason> {
    let Some(next) = next else { return Err(Reason::HalfLoad) };
    zero(next.code != 0 || next.dst != 0 || next.src != 0 || next.off != 0 || insn.off != 0)?;
    // RFC 9669 section 5.4: the source field defines the meaning of the 64 bits.
    match insn.src {
        0 => {
            let value = u64::from(insn.imm.cast_unsigned()) | u64::from(next.imm.cast_unsigned()) << 32;
            Ok(Kind::LoadImm { dst: writable(insn)?, value })
        }
        1 | 5 => Err(Reason::Map),
        2 | 6 => Err(Reason::MapValue),
        4 => Err(Reason::FunctionPointer),
        _ => Err(Reason::KernelAddress),
    }
}

fn decode_ldx(insn: Insn) -> Result<Kind, Reason> {
    zero(insn.imm != 0)?;
    let size = Size::parse(insn.code);
    let signed = match insn.code & MODE {
        0x60 => false,
        0x80 if size != Size::Dw => true,
        _ => return Err(Reason::Opcode(insn.code)),
    };
    Ok(Kind::Load { size, signed, dst: writable(insn)?, base: source(insn)?, off: insn.off })
}

fn decode_store(insn: Insn) -> Result<Kind, Reason> {
    let size = Size::parse(insn.code);
    let from_register = insn.code & 0x07 == 0x03;
    match insn.code & MODE {
        0x60 => {}
        0xc0 if from_register => return Err(Reason::Atomic),
        _ => return Err(Reason::Opcode(insn.code)),
    }
    let src = if from_register {
        zero(insn.imm != 0)?;
        Operand::Reg(source(insn)?)
    } else {
        zero(insn.src != 0)?;
        Operand::Imm(insn.imm)
    };
    Ok(Kind::Store { size, base: insn.dst, off: insn.off, src })
}

fn decode_alu(insn: Insn) -> Result<Kind, Reason> {
    let wide = insn.code & 0x07 == 0x07;
    let from_register = insn.code & 0x08 != 0;
    let dst = writable(insn)?;
    if insn.code & 0xf0 == 0xd0 {
        return decode_end(insn, wide, from_register, dst);
    }
    let op = match (insn.code & 0xf0, insn.off) {
        (0x00, 0) => AluOp::Add,
        (0x10, 0) => AluOp::Sub,
        (0x20, 0) => AluOp::Mul,
        (0x30, 0) => AluOp::Div,
        (0x30, 1) => AluOp::Sdiv,
        (0x40, 0) => AluOp::Or,
        (0x50, 0) => AluOp::And,
        (0x60, 0) => AluOp::Lsh,
        (0x70, 0) => AluOp::Rsh,
        (0x80, 0) if !from_register => {
            zero(insn.src != 0 || insn.imm != 0)?;
            return Ok(Kind::Alu { op: AluOp::Neg, wide, dst, src: Operand::Imm(0) });
        }
        (0x90, 0) => AluOp::Mod,
        (0x90, 1) => AluOp::Smod,
        (0xa0, 0) => AluOp::Xor,
        (0xb0, 0) => AluOp::Mov,
        (0xb0, 8 | 16 | 32) if from_register && (wide || insn.off != 32) => {
            zero(insn.imm != 0)?;
            return Ok(Kind::MovSx {
                wide,
                dst,
                src: source(insn)?,
                bits: u32::from(insn.off.unsigned_abs()),
            });
        }
        (0xc0, 0) => AluOp::Arsh,
        (0x00..=0x70 | 0x90..=0xc0, _) => return Err(Reason::ReservedField),
        _ => return Err(Reason::Opcode(insn.code)),
    };
    if from_register {
        zero(insn.imm != 0)?;
        return Ok(Kind::Alu { op, wide, dst, src: Operand::Reg(source(insn)?) });
    }
    zero(insn.src != 0)?;
    match op {
        AluOp::Div | AluOp::Mod | AluOp::Sdiv | AluOp::Smod if insn.imm == 0 => Err(Reason::DivideByZero),
        AluOp::Lsh | AluOp::Rsh | AluOp::Arsh if !(0..if wide { 64 } else { 32 }).contains(&insn.imm) => {
            Err(Reason::Shift(insn.imm))
        }
        _ => Ok(Kind::Alu { op, wide, dst, src: Operand::Imm(insn.imm) }),
    }
}

fn decode_end(insn: Insn, wide: bool, from_register: bool, dst: u8) -> Result<Kind, Reason> {
    zero(insn.src != 0 || insn.off != 0)?;
    let order = match (wide, from_register) {
        (false, false) => Order::Little,
        (false, true) => Order::Big,
        (true, false) => Order::Swap,
        (true, true) => return Err(Reason::Opcode(insn.code)),
    };
    match insn.imm {
        16 | 32 | 64 => Ok(Kind::End { order, dst, bits: insn.imm.cast_unsigned() }),
        _ => Err(Reason::ReservedField),
    }
}

fn decode_jump(insn: Insn) -> Result<Kind, Reason> {
    let wide = insn.code & 0x07 == 0x05;
    let cond = match insn.code & 0xf0 {
        0x00 if insn.code & 0x08 == 0 => {
            zero(insn.dst != 0 || insn.src != 0)?;
            // `BPF_JMP32|BPF_JA` (gotol) has its offset in the immediate.
            zero(if wide { insn.imm != 0 } else { insn.off != 0 })?;
            return Ok(Kind::Jump { by: if wide { i32::from(insn.off) } else { insn.imm } });
        }
        0x10 => Cond::Eq,
        0x20 => Cond::Gt,
        0x30 => Cond::Ge,
        0x40 => Cond::Set,
        0x50 => Cond::Ne,
        0x60 => Cond::Sgt,
        0x70 => Cond::Sge,
        0x80 if insn.code == 0x85 => return decode_call(insn),
        0x80 if insn.code == 0x8d => return Err(Reason::CallRegister),
        0x90 if insn.code == 0x95 => {
            zero(insn.dst != 0 || insn.src != 0 || insn.off != 0 || insn.imm != 0)?;
            return Ok(Kind::Exit);
        }
        0xa0 => Cond::Lt,
        0xb0 => Cond::Le,
        0xc0 => Cond::Slt,
        0xd0 => Cond::Sle,
        _ => return Err(Reason::Opcode(insn.code)),
    };
    let src = if insn.code & 0x08 != 0 {
        zero(insn.imm != 0)?;
        Operand::Reg(source(insn)?)
    } else {
        zero(insn.src != 0)?;
        Operand::Imm(insn.imm)
    };
    Ok(Kind::JumpIf { cond, wide, dst: insn.dst, src, by: insn.off })
}

fn decode_call(insn: Insn) -> Result<Kind, Reason> {
    zero(insn.dst != 0 || insn.off != 0)?;
    // RFC 9669 section 4.3.1: the source field gives the kind of callee.
    match insn.src {
        0 if insn.imm == SKB_LOAD_BYTES => Ok(Kind::Helper { id: insn.imm }),
        0 => Err(Reason::Helper(insn.imm)),
        1 => Ok(Kind::Call { by: insn.imm }),
        2 => Err(Reason::KernelFunction),
        _ => Err(Reason::ReservedField),
    }
}

fn writable(insn: Insn) -> Result<u8, Reason> {
    if insn.dst == FRAME_POINTER { Err(Reason::FramePointer) } else { Ok(insn.dst) }
}

fn source(insn: Insn) -> Result<u8, Reason> {
    if insn.src > FRAME_POINTER { Err(Reason::NoSuchRegister(insn.src)) } else { Ok(insn.src) }
}

fn zero(used: bool) -> Result<(), Reason> {
    if used { Err(Reason::ReservedField) } else { Ok(()) }
}
