//! The form that runs: one operation for each instruction, sixteen bytes, nothing left to decode or to resolve.
//!
//! Both instruction sets are compiled to operations after verification. An operation has the facts that the verifier proved:
//! the memory or context field of a load, and the target of a jump.

use crate::alu::{AluOp, Cond};
use crate::insn::{Operand, Size};

/// Registers of the machine. eBPF's r0 to r10 are 0 to 10; classic BPF's A is 0, X is 1 and M[n] is 16 + n.
pub(crate) const REGISTERS: usize = 32;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    pub(crate) code: Code,
    /// Destination or first operand.
    pub(crate) dst: u8,
    /// Source, second operand or base.
    pub(crate) src: u8,
    /// A memory offset, or the operation to jump to.
    pub(crate) off: i32,
    /// The immediate, sign-extended.
    pub(crate) imm: u64,
}

impl Op {
    pub(crate) const fn new(code: Code, dst: u8, src: u8, off: i32, imm: u64) -> Self {
        Self { code, dst, src, off, imm }
    }

    /// Arithmetic on `dst`.
    pub(crate) fn alu(op: AluOp, wide: bool, dst: u8, src: Operand) -> Self {
        let [k64, x64, k32, x32] = alu_codes(op);
        match src {
            Operand::Reg(src) => Self::new(if wide { x64 } else { x32 }, dst, src, 0, 0),
            Operand::Imm(imm) => Self::new(if wide { k64 } else { k32 }, dst, 0, 0, extend(imm)),
        }
    }

    /// A conditional jump; its target is filled in later.
    pub(crate) fn jump_if(cond: Cond, wide: bool, dst: u8, src: Operand) -> Self {
        let [k64, x64, k32, x32] = jump_codes(cond);
        match src {
            Operand::Reg(src) => Self::new(if wide { x64 } else { x32 }, dst, src, 0, 0),
            Operand::Imm(imm) => Self::new(if wide { k64 } else { k32 }, dst, 0, 0, extend(imm)),
        }
    }

    /// True when `off` is a target, in operations.
    pub(crate) fn jumps(self) -> bool {
        self.code >= Code::Ja
    }
}

/// An immediate as the 64-bit operand that it stands for.
pub(crate) const fn extend(imm: i32) -> u64 {
    (imm as i64).cast_unsigned()
}

/// Calls `$then!` with a row for each arithmetic operation and each comparison: the semantics, then the codes with a
/// 64-bit constant, a 64-bit register, a 32-bit constant and a 32-bit register.
macro_rules! code_rows {
    ($then:ident $($with:tt)*) => {
        $then! {
            [
                (Add, Add64K, Add64X, Add32K, Add32X), (Sub, Sub64K, Sub64X, Sub32K, Sub32X),
                (Mul, Mul64K, Mul64X, Mul32K, Mul32X), (Div, Div64K, Div64X, Div32K, Div32X),
                (Sdiv, Sdiv64K, Sdiv64X, Sdiv32K, Sdiv32X), (Or, Or64K, Or64X, Or32K, Or32X),
                (And, And64K, And64X, And32K, And32X), (Lsh, Lsh64K, Lsh64X, Lsh32K, Lsh32X),
                (Rsh, Rsh64K, Rsh64X, Rsh32K, Rsh32X), (Arsh, Arsh64K, Arsh64X, Arsh32K, Arsh32X),
                (Neg, Neg64K, Neg64X, Neg32K, Neg32X), (Mod, Mod64K, Mod64X, Mod32K, Mod32X),
                (Smod, Smod64K, Smod64X, Smod32K, Smod32X), (Xor, Xor64K, Xor64X, Xor32K, Xor32X),
                (Mov, Mov64K, Mov64X, Mov32K, Mov32X),
            ]
            [
                (Eq, Jeq64K, Jeq64X, Jeq32K, Jeq32X), (Ne, Jne64K, Jne64X, Jne32K, Jne32X),
                (Gt, Jgt64K, Jgt64X, Jgt32K, Jgt32X), (Ge, Jge64K, Jge64X, Jge32K, Jge32X),
                (Lt, Jlt64K, Jlt64X, Jlt32K, Jlt32X), (Le, Jle64K, Jle64X, Jle32K, Jle32X),
                (Set, Jset64K, Jset64X, Jset32K, Jset32X), (Sgt, Jsgt64K, Jsgt64X, Jsgt32K, Jsgt32X),
                (Sge, Jsge64K, Jsge64X, Jsge32K, Jsge32X), (Slt, Jslt64K, Jslt64X, Jslt32K, Jslt32X),
                (Sle, Jsle64K, Jsle64X, Jsle32K, Jsle32X),
            ]
            $($with)*
        }
    };
}
pub(crate) use code_rows;

macro_rules! define_codes {
    (
        [$(($alu:ident, $ak64:ident, $ax64:ident, $ak32:ident, $ax32:ident),)*]
        [$(($cond:ident, $jk64:ident, $jx64:ident, $jk32:ident, $jx32:ident),)*]
        $($(#[$doc:meta])* $other:ident,)*
    ) => {
        /// Code of an operation. Jumps are last, from `Ja` on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u8)]
        pub(crate) enum Code {
            $($ak64, $ax64, $ak32, $ax32,)*
            $($(#[$doc])* $other,)*
            /// Jump.
            Ja,
            /// Call a function of the program.
            Call,
            $($jk64, $jx64, $jk32, $jx32,)*
        }

        fn alu_codes(op: AluOp) -> [Code; 4] {
            match op {
                $(AluOp::$alu => [Code::$ak64, Code::$ax64, Code::$ak32, Code::$ax32],)*
            }
        }

        fn jump_codes(cond: Cond) -> [Code; 4] {
            match cond {
                $(Cond::$cond => [Code::$jk64, Code::$jx64, Code::$jk32, Code::$jx32],)*
            }
        }
    };
}

code_rows! {
    define_codes
    /// dst = the low `imm` bits of src, sign-extended to 64 bits.
    MovSx64,
    /// The same, then cut to 32 bits.
    MovSx32,
    /// Keep the low 16 bits of dst.
    Zext16,
    /// Keep the low 32 bits of dst.
    Zext32,
    /// Exchange the bytes of dst's low 16 bits.
    Swap16,
    /// Exchange the bytes of dst's low 32 bits.
    Swap32,
    /// Exchange the bytes of dst.
    Swap64,
    /// Loads from the message through the pointer src + off.
    PacketB,
    PacketH,
    PacketW,
    PacketDw,
    /// The same, extended by the sign.
    PacketSb,
    PacketSh,
    PacketSw,
    /// Loads from the stack through the pointer src + off.
    StackB,
    StackH,
    StackW,
    StackDw,
    StackSb,
    StackSh,
    StackSw,
    /// Stores of the register src to the stack, through dst + off.
    StoreBX,
    StoreHX,
    StoreWX,
    StoreDwX,
    /// Stores of the constant to the stack, through dst + off.
    StoreBK,
    StoreHK,
    StoreWK,
    StoreDwK,
    /// dst = the message's length.
    Len,
    /// dst = mark.
    LoadMark,
    /// dst = hash.
    LoadHash,
    /// The same, of `imm` bytes from byte `off`.
    LenPart,
    LoadMarkPart,
    LoadHashPart,
    /// dst = the word `off` of cb.
    LoadCbW,
    /// dst = bytes of cb: `off` the first byte, `imm` how many.
    LoadCb,
    /// dst = the address of the message.
    Data,
    /// dst = the address after the message.
    DataEnd,
    /// mark = src.
    StoreMark,
    /// hash = src.
    StoreHash,
    /// The word `off` of cb = src.
    StoreCbW,
    /// Bytes of cb = src: `off` the first byte, `imm` how many.
    StoreCb,
    /// mark, hash, bytes of cb = the constant; for cb, `off` is the first byte, `dst` how many.
    StoreMarkK,
    StoreHashK,
    StoreCbK,
    /// dst = bytes of the message at imm, in network order; out of range ends the program with 0.
    AbsB,
    AbsH,
    AbsW,
    /// The same at src + imm.
    IndB,
    IndH,
    IndW,
    /// dst = 4 * (the byte of the message at imm & 15): classic BPF's header length.
    Msh,
    /// End the program with 0 when the register src is 0 in its low 32 bits: classic division.
    EndIfZero,
    /// Helper 26.
    LoadBytes,
    /// Leave the function.
    Exit,
    /// An instruction that no path reaches.
    Unreachable,
}

/// The codes of a memory load in every width.
pub(crate) fn load_code(stack: bool, size: Size, signed: bool) -> Code {
    match (stack, size, signed) {
        (false, Size::B, false) => Code::PacketB,
        (false, Size::H, false) => Code::PacketH,
        (false, Size::W, false) => Code::PacketW,
        (false, Size::B, true) => Code::PacketSb,
        (false, Size::H, true) => Code::PacketSh,
        (false, Size::W, true) => Code::PacketSw,
        (false, Size::Dw, _) => Code::PacketDw,
        (true, Size::B, false) => Code::StackB,
        (true, Size::H, false) => Code::StackH,
        (true, Size::W, false) => Code::StackW,
        (true, Size::B, true) => Code::StackSb,
        (true, Size::H, true) => Code::StackSh,
        (true, Size::W, true) => Code::StackSw,
        (true, Size::Dw, _) => Code::StackDw,
    }
}

/// The code of a store to the stack.
pub(crate) fn store_code(size: Size, from_register: bool) -> Code {
    match (size, from_register) {
        (Size::B, true) => Code::StoreBX,
        (Size::H, true) => Code::StoreHX,
        (Size::W, true) => Code::StoreWX,
        (Size::Dw, true) => Code::StoreDwX,
        (Size::B, false) => Code::StoreBK,
        (Size::H, false) => Code::StoreHK,
        (Size::W, false) => Code::StoreWK,
        (Size::Dw, false) => Code::StoreDwK,
    }
}

const _: () = assert!(size_of::<Op>() == 16);
