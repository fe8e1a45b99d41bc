//! The interpreter.
//!
//! Purpose: executes operations and returns a number. Reads the message; reads and writes the context and a private stack.
//!
//! Invariants, for verified and for arbitrary operations:
//! - memory is reached through bounds-checked slices only: an address outside its region is a fault, never an access;
//! - each operation costs at least one unit of fuel, and `skb_load_bytes` one more for every eight bytes it copies, so
//!   work is bounded by the fuel given, loops or not;
//! - calls nest at most [`MAX_FRAMES`] deep;
//! - the result depends on the message, the context and the fuel alone.
//!
//! Addresses are numbers of this machine, not of the process: the message begins at [`PACKET_BASE`], the stack at
//! [`STACK_BASE`]. A program can learn nothing from them.

use thiserror::Error;

use crate::alu::{AluOp, Cond, alu32, alu64, holds32, holds64, sign_extend, swap};
use crate::context::{Context, cut};
use crate::insn::Size;
use crate::op::{Code, Op, REGISTERS, code_rows};

/// The address of the message's first byte. Programs see it; that it is the same everywhere keeps runs repeatable.
pub(crate) const PACKET_BASE: u64 = 1 << 32;

/// The address of the stack's lowest byte.
pub(crate) const STACK_BASE: u64 = 1 << 48;

/// The context's address; nothing reads through it.
const CONTEXT_ADDRESS: u64 = 1 << 56;

/// Bytes of a function's stack (`MAX_BPF_STACK` of `linux/filter.h`).
pub(crate) const FRAME_BYTES: usize = 512;

/// Functions that may call one another (`MAX_CALL_FRAMES` of `linux/bpf_verifier.h`).
pub const MAX_FRAMES: usize = 8;

/// The result of `skb_load_bytes` beyond the end of the bytes: -EFAULT.
const EFAULT: u64 = (-14_i64).cast_unsigned();

const R0: usize = 0;
const R10: usize = 10;

/// A run that gave no result. The context is as the program left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RunError {
    /// The fuel is used up.
    #[error("instruction {instruction}: out of fuel; the program loops, or needs more than it was given")]
    OutOfFuel {
        /// Index of the instruction.
        instruction: usize,
    },
    /// A pointer into the message left it by wrapping around, which comparisons with `data_end` cannot detect.
    #[error("instruction {instruction}: the pointer is outside the message")]
    OutsideMessage {
        /// The load.
        instruction: usize,
    },
    /// The program attempted an access that the verifier should have rejected, and was stopped before it.
    #[error(
        "instruction {instruction}: stopped; the verifier should have refused this program; please report this"
    )]
    Unchecked {
        /// Index of the instruction.
        instruction: usize,
    },
}

/// Why operations stop early.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stop {
    /// An out-of-range LD_ABS or LD_IND, or a classic division by zero: the program's result is 0.
    Zero,
    /// No fuel.
    Fuel(usize),
    /// A packet access out of range.
    Packet(usize),
    /// An operation that the verifier should have refused.
    Unchecked(usize),
}

/// One run.
pub(crate) struct Machine<'a> {
    pub(crate) ops: &'a [Op],
    pub(crate) message: &'a [u8],
    pub(crate) context: &'a mut Context,
    pub(crate) stack: &'a mut [u8],
    pub(crate) fuel: u64,
}

impl Machine<'_> {
    /// Runs from the first operation; r0 is the result.
    pub(crate) fn run(&mut self) -> Result<u64, Stop> {
        self.run_from(0)
    }

    /// As [`run`](Self::run). Registers without an initial value start with `unset`: classic BPF requires 0, and verified eBPF
    /// never reads such a register before it writes it.
    pub(crate) fn run_from(&mut self, unset: u64) -> Result<u64, Stop> {
        let mut regs = [unset; REGISTERS];
        regs[1] = CONTEXT_ADDRESS;
        regs[R10] = STACK_BASE + self.stack.len() as u64;
        self.function(0, &mut regs, 1)?;
        Ok(regs[R0])
    }

    /// Runs from operation `pc` to the exit of its function, which is the `depth`th.
    #[allow(clippy::too_many_lines, clippy::cast_possible_truncation)] // One arm for each operation.
    fn function(&mut self, mut pc: usize, regs: &mut [u64; REGISTERS], depth: usize) -> Result<(), Stop> {
        let ops = self.ops;
        let message = self.message;
        let mut fuel = self.fuel;

        macro_rules! reg {
            ($number:expr) => {
                regs[$number as usize % REGISTERS]
            };
        }
        // Leaves with the fuel accounted for.
        macro_rules! stop {
            ($why:expr) => {{
                self.fuel = fuel;
                return Err($why);
            }};
        }

        loop {
            let Some(&op) = ops.get(pc) else { stop!(Stop::Unchecked(pc)) };
            let Some(left) = fuel.checked_sub(1) else { stop!(Stop::Fuel(pc)) };
            fuel = left;
            let next = pc + 1;

            macro_rules! packet {
                ($bytes:literal, $number:ty) => {{
                    let at = reg!(op.src).wrapping_add(op.off as u64).wrapping_sub(PACKET_BASE);
                    match chunk::<$bytes>(message, at) {
                        Some(bytes) => <$number>::from_le_bytes(*bytes),
                        None => stop!(Stop::Packet(pc)),
                    }
                }};
            }
            macro_rules! stack {
                ($bytes:literal, $number:ty) => {{
                    let at = reg!(op.src).wrapping_add(op.off as u64).wrapping_sub(STACK_BASE);
                    match chunk::<$bytes>(self.stack, at) {
                        Some(bytes) => <$number>::from_le_bytes(*bytes),
                        None => stop!(Stop::Unchecked(pc)),
                    }
                }};
            }
            macro_rules! store {
                ($bytes:literal, $value:expr) => {{
                    let at = reg!(op.dst).wrapping_add(op.off as u64).wrapping_sub(STACK_BASE);
                    let value = $value.to_le_bytes();
                    match chunk_mut::<$bytes>(self.stack, at) {
                        Some(bytes) => *bytes = value,
                        None => stop!(Stop::Unchecked(pc)),
                    }
                }};
            }
            // LD_ABS and LD_IND: the offset is a 32-bit signed number, network order, out of range ends with 0.
            macro_rules! network {
                ($bytes:literal, $number:ty, $at:expr) => {{
                    let at: u32 = $at;
                    match chunk::<$bytes>(message, u64::from(at)) {
                        Some(bytes) if at <= i32::MAX as u32 => {
                            reg!(op.dst) = u64::from(<$number>::from_be_bytes(*bytes));
                        }
                        _ => stop!(Stop::Zero),
                    }
                }};
            }
            macro_rules! dispatch {
                (
                    [$(($alu:ident, $ak64:ident, $ax64:ident, $ak32:ident, $ax32:ident),)*]
                    [$(($cond:ident, $jk64:ident, $jx64:ident, $jk32:ident, $jx32:ident),)*]
                    $($rest:tt)*
                ) => {
                    match op.code {
                        $(
                            Code::$ak64 => reg!(op.dst) = alu64(AluOp::$alu, reg!(op.dst), op.imm),
                            Code::$ax64 => reg!(op.dst) = alu64(AluOp::$alu, reg!(op.dst), reg!(op.src)),
                            Code::$ak32 => {
                                reg!(op.dst) = u64::from(alu32(AluOp::$alu, reg!(op.dst) as u32, op.imm as u32));
                            }
                            Code::$ax32 => {
                                let value = alu32(AluOp::$alu, reg!(op.dst) as u32, reg!(op.src) as u32);
                                reg!(op.dst) = u64::from(value);
                            }
                        )*
                        $(
                            Code::$jk64 => if holds64(Cond::$cond, reg!(op.dst), op.imm) {
                                pc = op.off as usize;
                                continue;
                            },
                            Code::$jx64 => if holds64(Cond::$cond, reg!(op.dst), reg!(op.src)) {
                                pc = op.off as usize;
                                continue;
                            },
                            Code::$jk32 => if holds32(Cond::$cond, reg!(op.dst) as u32, op.imm as u32) {
                                pc = op.off as usize;
                                continue;
                            },
                            Code::$jx32 => if holds32(Cond::$cond, reg!(op.dst) as u32, reg!(op.src) as u32) {
                                pc = op.off as usize;
                                continue;
                            },
                        )*
                        $($rest)*
                    }
                };
            }

            code_rows! {
                dispatch
                Code::MovSx64 => reg!(op.dst) = sign_extend(reg!(op.src), op.imm as u32),
                Code::MovSx32 => reg!(op.dst) = cut(sign_extend(reg!(op.src), op.imm as u32), Size::W),
                Code::Zext16 => reg!(op.dst) = cut(reg!(op.dst), Size::H),
                Code::Zext32 => reg!(op.dst) = cut(reg!(op.dst), Size::W),
                Code::Swap16 => reg!(op.dst) = swap(reg!(op.dst), 16),
                Code::Swap32 => reg!(op.dst) = swap(reg!(op.dst), 32),
                Code::Swap64 => reg!(op.dst) = swap(reg!(op.dst), 64),
                Code::PacketB => reg!(op.dst) = u64::from(packet!(1, u8)),
                Code::PacketH => reg!(op.dst) = u64::from(packet!(2, u16)),
                Code::PacketW => reg!(op.dst) = u64::from(packet!(4, u32)),
                Code::PacketDw => reg!(op.dst) = packet!(8, u64),
                Code::PacketSb => reg!(op.dst) = i64::from(packet!(1, i8)).cast_unsigned(),
                Code::PacketSh => reg!(op.dst) = i64::from(packet!(2, i16)).cast_unsigned(),
                Code::PacketSw => reg!(op.dst) = i64::from(packet!(4, i32)).cast_unsigned(),
                Code::StackB => reg!(op.dst) = u64::from(stack!(1, u8)),
                Code::StackH => reg!(op.dst) = u64::from(stack!(2, u16)),
                Code::StackW => reg!(op.dst) = u64::from(stack!(4, u32)),
                Code::StackDw => reg!(op.dst) = stack!(8, u64),
                Code::StackSb => reg!(op.dst) = i64::from(stack!(1, i8)).cast_unsigned(),
                Code::StackSh => reg!(op.dst) = i64::from(stack!(2, i16)).cast_unsigned(),
                Code::StackSw => reg!(op.dst) = i64::from(stack!(4, i32)).cast_unsigned(),
                Code::StoreBX => store!(1, (reg!(op.src) as u8)),
                Code::StoreHX => store!(2, (reg!(op.src) as u16)),
                Code::StoreWX => store!(4, (reg!(op.src) as u32)),
                Code::StoreDwX => store!(8, reg!(op.src)),
                Code::StoreBK => store!(1, (op.imm as u8)),
                Code::StoreHK => store!(2, (op.imm as u16)),
                Code::StoreWK => store!(4, (op.imm as u32)),
                Code::StoreDwK => store!(8, op.imm),
                Code::Len => reg!(op.dst) = length(message),
                Code::LoadMark => reg!(op.dst) = u64::from(self.context.mark),
                Code::LoadHash => reg!(op.dst) = u64::from(self.context.hash),
                Code::LenPart => reg!(op.dst) = part(length(message), op),
                Code::LoadMarkPart => reg!(op.dst) = part(u64::from(self.context.mark), op),
                Code::LoadHashPart => reg!(op.dst) = part(u64::from(self.context.hash), op),
                Code::LoadCbW => match self.context.cb.get(op.off as usize) {
                    Some(&word) => reg!(op.dst) = u64::from(word),
                    None => stop!(Stop::Unchecked(pc)),
                },
                Code::LoadCb => reg!(op.dst) = self.context.load_cb(op.off as u32, size(op.imm)),
                Code::Data => reg!(op.dst) = PACKET_BASE,
                Code::DataEnd => reg!(op.dst) = PACKET_BASE + message.len() as u64,
                Code::StoreMark => self.context.mark = reg!(op.src) as u32,
                Code::StoreHash => self.context.hash = reg!(op.src) as u32,
                Code::StoreCbW => match self.context.cb.get_mut(op.off as usize) {
                    Some(word) => *word = reg!(op.src) as u32,
                    None => stop!(Stop::Unchecked(pc)),
                },
                Code::StoreCb => self.context.store_cb(op.off as u32, size(op.imm), reg!(op.src)),
                Code::StoreMarkK => self.context.mark = op.imm as u32,
                Code::StoreHashK => self.context.hash = op.imm as u32,
                Code::StoreCbK => self.context.store_cb(op.off as u32, size(u64::from(op.dst)), op.imm),
                Code::AbsB => network!(1, u8, op.imm as u32),
                Code::AbsH => network!(2, u16, op.imm as u32),
                Code::AbsW => network!(4, u32, op.imm as u32),
                Code::IndB => network!(1, u8, (reg!(op.src) as u32).wrapping_add(op.imm as u32)),
                Code::IndH => network!(2, u16, (reg!(op.src) as u32).wrapping_add(op.imm as u32)),
                Code::IndW => network!(4, u32, (reg!(op.src) as u32).wrapping_add(op.imm as u32)),
                Code::Msh => match message.get(op.imm as u32 as usize) {
                    Some(byte) => reg!(op.dst) = u64::from(byte & 0x0f) * 4,
                    None => stop!(Stop::Zero),
                },
                Code::EndIfZero => if reg!(op.src) as u32 == 0 {
                    stop!(Stop::Zero);
                },
                Code::LoadBytes => match self.load_bytes(regs, &mut fuel) {
                    Some(result) => regs[R0] = result,
                    None if fuel == 0 => stop!(Stop::Fuel(pc)),
                    None => stop!(Stop::Unchecked(pc)),
                },
                Code::Exit => {
                    self.fuel = fuel;
                    return Ok(());
                },
                Code::Unreachable => stop!(Stop::Unchecked(pc)),
                Code::Ja => {
                    pc = op.off as usize;
                    continue;
                },
                Code::Call => {
                    if depth == MAX_FRAMES {
                        stop!(Stop::Unchecked(pc));
                    }
                    // r6 to r9 and the frame pointer are the caller's (RFC 9669 section 2).
                    let kept = *regs;
                    regs[R10] = regs[R10].wrapping_sub(FRAME_BYTES as u64);
                    self.fuel = fuel;
                    self.function(op.off as usize, regs, depth + 1)?;
                    fuel = self.fuel;
                    regs[6..=R10].copy_from_slice(&kept[6..=R10]);
                },
            }
            pc = next;
        }
    }

    /// `bpf_skb_load_bytes(r1 context, r2 offset, r3 target, r4 length)`: 0, or -EFAULT with the target zeroed. None
    /// when the target is outside the stack, or the fuel does not suffice, which leaves none.
    #[allow(clippy::cast_possible_truncation)] // The helper's offset and length have 32 bits.
    fn load_bytes(&mut self, regs: &[u64; REGISTERS], fuel: &mut u64) -> Option<u64> {
        let [_, _, offset, target, length, ..] = *regs;
        let (offset, length) = (offset as u32, length as u32 as usize);
        let target = usize::try_from(target.wrapping_sub(STACK_BASE)).ok()?;
        let target = self.stack.get_mut(target..target.checked_add(length)?)?;
        let Some(left) = fuel.checked_sub(length as u64 / 8) else {
            *fuel = 0;
            return None;
        };
        *fuel = left;
        let source = match i32::try_from(offset) {
            Ok(_) => self.message.get(offset as usize..).and_then(|rest| rest.get(..length)),
            Err(_) => None,
        };
        match source {
            Some(source) => {
                target.copy_from_slice(source);
                Some(0)
            }
            None => {
                target.fill(0);
                Some(EFAULT)
            }
        }
    }
}

/// `N` bytes of `region` at `at`.
#[inline(always)]
fn chunk<const N: usize>(region: &[u8], at: u64) -> Option<&[u8; N]> {
    region.get(usize::try_from(at).ok()?..)?.first_chunk()
}

/// As [`chunk`], to write.
#[inline(always)]
fn chunk_mut<const N: usize>(region: &mut [u8], at: u64) -> Option<&mut [u8; N]> {
    region.get_mut(usize::try_from(at).ok()?..)?.first_chunk_mut()
}

/// `__sk_buff.len`: 32 bits, and the longest message it can say for a longer one.
fn length(message: &[u8]) -> u64 {
    (message.len() as u64).min(u64::from(u32::MAX))
}

/// `op.imm` bytes of a context word from byte `op.off`.
fn part(word: u64, op: Op) -> u64 {
    cut(word >> (op.off.cast_unsigned() % 4 * 8), size(op.imm))
}

/// The size that an operation's constant says in bytes.
const fn size(bytes: u64) -> Size {
    match bytes {
        1 => Size::B,
        2 => Size::H,
        4 => Size::W,
        _ => Size::Dw,
    }
}
