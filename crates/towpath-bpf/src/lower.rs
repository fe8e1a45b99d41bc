//! From checked eBPF instructions to operations.

use crate::alu::AluOp;
use crate::context::Field;
use crate::insn::{Kind, Operand, Order, Size};
use crate::op::{Code, Op, extend, load_code, store_code};
use crate::verifier::{Facts, Region, jump_target};

/// Operations, and for each the slot of the instruction that it stands for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lowered {
    pub(crate) ops: Vec<Op>,
    pub(crate) origin: Vec<usize>,
}

impl Lowered {
    pub(crate) fn push(&mut self, op: Op, origin: usize) {
        self.ops.push(op);
        self.origin.push(origin);
    }
}

/// Makes one operation of each instruction.
pub(crate) fn lower(facts: &Facts) -> Lowered {
    // The operation of each slot.
    let mut index = Vec::with_capacity(facts.kinds.len());
    let mut next = 0;
    for kind in &facts.kinds {
        index.push(next);
        next += i32::from(kind.is_some());
    }
    let mut lowered = Lowered::default();
    for (at, kind) in facts.kinds.iter().enumerate() {
        let Some(kind) = *kind else { continue };
        let op = if facts.reached[at] { operation(kind, facts.regions[at]) } else { UNREACHABLE };
        let target = match kind {
            Kind::Call { by } => Some(at as i64 + 1 + i64::from(by)),
            _ => jump_target(at, kind),
        };
        let target = target.and_then(|target| index.get(usize::try_from(target).ok()?).copied());
        lowered.push(Op { off: if op.jumps() { target.unwrap_or(i32::MAX) } else { op.off }, ..op }, at);
    }
    lowered
}

const UNREACHABLE: Op = Op::new(Code::Unreachable, 0, 0, 0, 0);

fn operation(kind: Kind, region: Option<Region>) -> Op {
    match kind {
        Kind::Alu { op, wide, dst, src } => Op::alu(op, wide, dst, src),
        Kind::MovSx { wide, dst, src, bits } => {
            Op::new(if wide { Code::MovSx64 } else { Code::MovSx32 }, dst, src, 0, u64::from(bits))
        }
        Kind::End { order, dst, bits } => match (order, bits) {
            (Order::Little, 16) => Op::new(Code::Zext16, dst, 0, 0, 0),
            (Order::Little, 32) => Op::new(Code::Zext32, dst, 0, 0, 0),
            (Order::Little, _) => Op::alu(AluOp::Mov, true, dst, Operand::Reg(dst)),
            (_, 16) => Op::new(Code::Swap16, dst, 0, 0, 0),
            (_, 32) => Op::new(Code::Swap32, dst, 0, 0, 0),
            _ => Op::new(Code::Swap64, dst, 0, 0, 0),
        },
        Kind::LoadImm { dst, value } => Op::new(Code::Mov64K, dst, 0, 0, value),
        Kind::LoadAbs { size, at } => {
            let [b, h, w] = [Code::AbsB, Code::AbsH, Code::AbsW];
            Op::new(by_size(size, b, h, w), 0, 0, 0, extend(at))
        }
        Kind::LoadInd { size, src, at } => {
            let [b, h, w] = [Code::IndB, Code::IndH, Code::IndW];
            Op::new(by_size(size, b, h, w), 0, src, 0, extend(at))
        }
        Kind::Load { size, signed, dst, base, off } => match region {
            Some(Region::Context(field)) => load_field(field, size, dst),
            Some(Region::Stack) => Op::new(load_code(true, size, signed), dst, base, i32::from(off), 0),
            Some(Region::Packet) => Op::new(load_code(false, size, signed), dst, base, i32::from(off), 0),
            None => UNREACHABLE,
        },
        Kind::Store { size, base, off, src } => match (region, src) {
            (Some(Region::Context(field)), Operand::Reg(src)) => store_field(field, size, src),
            (Some(Region::Context(field)), Operand::Imm(imm)) => {
                Op { imm: extend(imm), ..store_constant(field, size) }
            }
            (Some(Region::Stack), Operand::Reg(src)) => {
                Op::new(store_code(size, true), base, src, i32::from(off), 0)
            }
            (Some(Region::Stack), Operand::Imm(imm)) => {
                Op::new(store_code(size, false), base, 0, i32::from(off), extend(imm))
            }
            _ => UNREACHABLE,
        },
        Kind::Jump { .. } => Op::new(Code::Ja, 0, 0, 0, 0),
        Kind::JumpIf { cond, wide, dst, src, .. } => Op::jump_if(cond, wide, dst, src),
        Kind::Helper { .. } => Op::new(Code::LoadBytes, 0, 0, 0, 0),
        Kind::Call { .. } => Op::new(Code::Call, 0, 0, 0, 0),
        Kind::Exit => Op::new(Code::Exit, 0, 0, 0, 0),
    }
}

/// LD_ABS and LD_IND have no eight-byte form; the decoder refuses it.
const fn by_size(size: Size, b: Code, h: Code, w: Code) -> Code {
    match size {
        Size::B => b,
        Size::H => h,
        Size::W | Size::Dw => w,
    }
}

/// A load from the context. Compilers load single bytes of a word, so every field also has narrower loads.
fn load_field(field: Field, size: Size, dst: u8) -> Op {
    let bytes = u64::from(size.bytes());
    let whole = |code, narrow, at: u32| {
        let at = at.cast_signed();
        if size == Size::W { Op::new(code, dst, 0, at, 0) } else { Op::new(narrow, dst, 0, at, bytes) }
    };
    match field {
        Field::Len { at } => whole(Code::Len, Code::LenPart, at),
        Field::Mark { at } => whole(Code::LoadMark, Code::LoadMarkPart, at),
        Field::Hash { at } => whole(Code::LoadHash, Code::LoadHashPart, at),
        Field::Cb { at } if size == Size::W => Op::new(Code::LoadCbW, dst, 0, (at / 4).cast_signed(), 0),
        Field::Cb { at } => Op::new(Code::LoadCb, dst, 0, at.cast_signed(), bytes),
        Field::Data => Op::new(Code::Data, dst, 0, 0, 0),
        Field::DataEnd => Op::new(Code::DataEnd, dst, 0, 0, 0),
    }
}

/// A store of a register; the verifier accepts stores to `mark`, `hash` and `cb` only.
fn store_field(field: Field, size: Size, src: u8) -> Op {
    let bytes = u64::from(size.bytes());
    match field {
        Field::Mark { .. } => Op::new(Code::StoreMark, 0, src, 0, 0),
        Field::Hash { .. } => Op::new(Code::StoreHash, 0, src, 0, 0),
        Field::Cb { at } if size == Size::W => Op::new(Code::StoreCbW, 0, src, (at / 4).cast_signed(), 0),
        Field::Cb { at } => Op::new(Code::StoreCb, 0, src, at.cast_signed(), bytes),
        Field::Len { .. } | Field::Data | Field::DataEnd => UNREACHABLE,
    }
}

/// A store of a constant: `dst` says how many bytes.
fn store_constant(field: Field, size: Size) -> Op {
    #[allow(clippy::cast_possible_truncation)] // 1 to 8.
    let bytes = size.bytes() as u8;
    match field {
        Field::Mark { .. } => Op::new(Code::StoreMarkK, 0, 0, 0, 0),
        Field::Hash { .. } => Op::new(Code::StoreHashK, 0, 0, 0, 0),
        Field::Cb { at } => Op::new(Code::StoreCbK, bytes, 0, at.cast_signed(), 0),
        Field::Len { .. } | Field::Data | Field::DataEnd => UNREACHABLE,
    }
}
