//! Errors of the verifier: one instruction and one reason, for the author of the program.

use std::fmt;

use thiserror::Error;

/// The rejection of a program by the verifier.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct VerifierError {
    /// The function that the instruction belongs to, when the program came with names.
    pub function: Option<String>,
    /// Index of the instruction, in eight-byte slots from the program's start.
    pub instruction: usize,
    /// The disassembled instruction; empty if it cannot be decoded.
    pub text: String,
    /// The rule that it violates.
    pub reason: Reason,
}

impl fmt::Display for VerifierError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "instruction {}", self.instruction)?;
        if let Some(function) = &self.function {
            write!(out, " in `{function}`")?;
        }
        if !self.text.is_empty() {
            write!(out, " ({})", self.text)?;
        }
        write!(out, ": {}", self.reason)
    }
}

/// A rule of the verifier that a program violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Reason {
    // Valid instructions.
    /// The program has no instruction.
    #[error("the program is empty")]
    Empty,
    /// More instructions than the limit.
    #[error("{0} instructions; a program has at most {1}")]
    TooLong(usize, usize),
    /// Neither RFC 9669 nor the classic instruction set defines the opcode.
    #[error("opcode {0:#04x} is no instruction that a framing program may use")]
    Opcode(u8),
    /// As `Opcode`, of classic BPF, whose opcodes have 16 bits.
    #[error("opcode {0:#06x} is no instruction of classic BPF")]
    ClassicOpcode(u16),
    /// A register above r10.
    #[error("r{0} does not exist; the registers are r0 to r10")]
    NoSuchRegister(u8),
    /// A field that the instruction does not use is not zero.
    #[error("a field that this instruction does not use is not zero")]
    ReservedField,
    /// The second slot of a 64-bit immediate load is missing.
    #[error("the second half of this 64-bit load is missing")]
    HalfLoad,
    /// r10 as a destination.
    #[error("r10, the frame pointer, cannot be written")]
    FramePointer,
    /// Division or modulo by the constant zero.
    #[error("division by the constant 0")]
    DivideByZero,
    /// A constant shift that is not below the register's width.
    #[error("a shift by {0} is not below the register's width")]
    Shift(i32),
    /// Read-modify-write instructions.
    #[error("atomic instructions are refused: nothing that a framing program writes is shared")]
    Atomic,
    /// A map's address.
    #[error("it uses a BPF map, and a framing program has none; its state is cb[0] to cb[4]")]
    Map,
    /// The address of a map's value, which is how global variables are reached.
    #[error(
        "it uses a map's value or a global variable; a framing program has only its stack and cb[0] to cb[4]"
    )]
    MapValue,
    /// The address of a function.
    #[error("it takes the address of a function; only direct calls are accepted")]
    FunctionPointer,
    /// Any other address that the kernel would fill in.
    #[error("it loads an address that only a kernel could fill in")]
    KernelAddress,
    /// A helper other than 26.
    #[error("helper {0} is not available; the only one is 26, skb_load_bytes")]
    Helper(i32),
    /// A kernel function.
    #[error("it calls a kernel function; the only call outside the program is helper 26, skb_load_bytes")]
    KernelFunction,
    /// A call through a register.
    #[error("a call through a register is refused; only direct calls are accepted")]
    CallRegister,

    // Control flow.
    /// The last instruction neither ends the program nor jumps.
    #[error("the program can run past its last instruction; end every path with an exit")]
    FallsOff,
    /// A jump that leaves the program or its function.
    #[error("the jump to instruction {0} leaves the function")]
    JumpOut(i64),
    /// A jump to the second slot of a 64-bit load.
    #[error("the jump to instruction {0} lands inside a 64-bit load")]
    JumpIntoLoad(usize),
    /// A call that leaves the program.
    #[error("the call to instruction {0} leaves the program")]
    CallOut(i64),
    /// More frames than the limit.
    #[error("calls are nested deeper than {0} functions, or recurse")]
    TooDeep(usize),
    /// The verifier has used up its steps.
    #[error("the program has more paths than the verifier follows ({0} steps)")]
    TooComplex(u32),

    // Contents of registers.
    /// A register that some path leaves unset.
    #[error("r{0} is read, but a path to here does not set it")]
    Unset(u8),
    /// r0 to r5 after a call.
    #[error("r{0} is read after a call, which leaves nothing in r1 to r5")]
    Clobbered(u8),
    /// A register that holds values of different kinds on different paths.
    #[error("r{0} is read, but holds a number on one path and a pointer, or another pointer, on another")]
    Mixed(u8),
    /// A load or store through a number.
    #[error("r{0} is a number, not a pointer, and cannot be dereferenced")]
    NotPointer(u8),
    /// A pointer where a number is needed.
    #[error("r{0} is {1}, and a number is needed here")]
    NotScalar(u8, &'static str),
    /// Arithmetic that no pointer allows.
    #[error("r{0} is {1}; only additions and subtractions of numbers, in 64 bits, keep it a pointer")]
    PointerArithmetic(u8, &'static str),
    /// Arithmetic on the end of the message.
    #[error("r{0} is data_end; it can be compared with, and subtracted from, but not moved")]
    MovesEnd(u8),
    /// A pointer with an offset above the limit.
    #[error("r{0} is moved too far from where it points to")]
    TooFar(u8),
    /// A comparison of a pointer with an incomparable value.
    #[error("r{0} is {1} and is compared with something else")]
    ComparesPointer(u8, &'static str),
    /// A pointer as the program's result.
    #[error("r0 is {0}; a program returns a number")]
    ReturnsPointer(&'static str),

    // Memory accesses.
    /// One instruction that reaches different kinds of memory.
    #[error("r{0} points to {1} on one path and to {2} on another; use one instruction for each")]
    TwoRegions(u8, &'static str, &'static str),
    /// A context field that a message does not have.
    #[error(
        "offset {0} of the context is `{1}`, which a message does not have; \
         there are len, mark, cb, hash, data and data_end"
    )]
    NoSuchField(i64, &'static str),
    /// A context access of the wrong width or alignment, or outside the structure.
    #[error("{1} bytes at offset {0} of the context are no field")]
    FieldWidth(i64, u32),
    /// A context field that cannot be written.
    #[error("`{0}` of the context cannot be written; cb, mark and hash can")]
    ReadOnlyField(&'static str),
    /// A store of something other than a number into the context.
    #[error("r{0} is {1}; only numbers can be stored in the context")]
    StoresPointer(u8, &'static str),
    /// A sign-extending load from the context.
    #[error("sign-extending loads from the context are refused")]
    SignedField,
    /// A store into the message.
    #[error("messages are read-only: r{0} points into one")]
    WritesPacket(u8),
    /// A dereference of data_end.
    #[error("r{0} is data_end, the first byte after the message")]
    ReadsEnd(u8),
    /// A packet access that no comparison with data_end covers.
    #[error(
        "offsets {1} to {2} from r{0}'s base are read, but only {3} bytes are known to be there; \
         compare the pointer with data_end first"
    )]
    Unproven(u8, i64, i64, u32),
    /// A stack access outside the frame.
    #[error("bytes {0} to {1} of the stack are outside the frame, which is -512 to -1")]
    StackOut(i64, i64),
    /// A stack read of bytes never written.
    #[error("byte {0} of the stack is read, but a path to here does not write it")]
    StackUnset(i64),
    /// A stack pointer moved by a number without bounds.
    #[error(
        "r{0} points to the stack, and the number added to it has no small bound; mask or compare it first"
    )]
    StackUnbounded(u8),
    /// Part of a saved pointer.
    #[error("a pointer saved on the stack is read in part, at byte {0}")]
    PartOfPointer(i64),

    // Instructions with additional rules.
    /// LD_ABS or LD_IND without the context in r6.
    #[error("this load takes the context from r6, and r6 is {0}")]
    AbsWithoutContext(&'static str),
    /// LD_ABS or LD_IND in a called function.
    #[error("this load ends the program when it is out of range; in a called function use skb_load_bytes")]
    AbsInFunction,
    /// A classic load of ancillary data.
    #[error("negative offset {0}: a message has no ancillary data and no link or network header")]
    Ancillary(i32),
    /// The helper's first argument.
    #[error("r1 is {0}; skb_load_bytes takes the context there")]
    HelperContext(&'static str),
    /// The helper's third argument.
    #[error("r3 is {0}; skb_load_bytes writes to the stack only")]
    HelperTarget(&'static str),
    /// The helper's fourth argument.
    #[error("r4, the length for skb_load_bytes, may be {0}; it must be 1 to 512")]
    HelperLength(u64),

    // Classic BPF.
    /// A scratch word read before it is written.
    #[error("M[{0}] is read, but a path to here does not write it")]
    ScratchUnset(u32),
    /// A scratch word that does not exist.
    #[error("M[{0}] does not exist; scratch memory is M[0] to M[15]")]
    NoSuchScratch(u32),
}
