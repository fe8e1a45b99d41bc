//! A verified program.

use crate::classic;
use crate::code::{Body, Code, LoadError, LoadOptions};
use crate::context::Context;
use crate::insn::Kind;
use crate::lower::{Lowered, lower};
use crate::op::{Code as OpCode, Op};
use crate::run::{FRAME_BYTES, Machine, RunError, Stop};
use crate::verifier::{self, Facts};
use crate::verifier_error::{Reason, VerifierError};

/// A program that was verified and can be run.
///
/// ```
/// use towpath_bpf::{Context, LoadOptions, Program};
///
/// // The format of `tcpdump -ddd`. The program loads the 16 bits at offset 0, adds 2, and returns the sum as the length.
/// let text = "3\n40 0 0 0\n4 0 0 2\n22 0 0 0\n";
/// let program = Program::load(text.as_bytes(), &LoadOptions::default())?;
///
/// let mut context = Context::new();
/// let mut fuel = 1000;
/// assert_eq!(program.run(&[0, 5, b'h', b'e', b'l', b'l', b'o'], &mut context, &mut fuel)?, 7);
/// // Not enough bytes: the load ends the program with 0, "need more".
/// assert_eq!(program.run(&[0], &mut context, &mut fuel)?, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Program {
    ops: Box<[Op]>,
    /// For each operation, the slot of the instruction from which it was compiled.
    origin: Box<[usize]>,
    /// Bytes of stack.
    stack: usize,
    stats: Stats,
}

/// Results of verifying a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// True for classic BPF.
    pub classic: bool,
    /// Instructions, in slots of eight bytes.
    pub instructions: usize,
    /// Operations to which the instructions were compiled.
    pub operations: usize,
    /// Unreachable instructions.
    pub unreached: usize,
    /// Functions, including the main program.
    pub functions: usize,
    /// Maximum depth of nested calls, including the main program.
    pub depth: usize,
    /// Bytes of stack in use.
    pub stack: usize,
    /// Loads from the message, helper calls included.
    pub message_loads: usize,
    /// Of these, loads that no comparison with the message's end is known to cover, as in loops. A load outside
    /// the message ends the run with [`RunError::OutsideMessage`].
    pub variable_loads: usize,
    /// Loads from and stores to the context.
    pub context_accesses: usize,
    /// Conditional jumps.
    pub branches: usize,
    /// Backward jumps. A program without them uses at most `operations` units of fuel per run, plus those of `skb_load_bytes`.
    pub back_edges: usize,
    /// Steps of the verifier.
    pub steps: u32,
}

impl Program {
    /// Reads, links and verifies a program.
    ///
    /// # Errors
    /// Fails if the bytes are not in the format, if the object does not contain the program, or if the verifier refuses it.
    pub fn load(bytes: &[u8], options: &LoadOptions) -> Result<Self, LoadError> {
        Ok(Code::load(bytes, options)?.verify()?)
    }

    /// Runs the program on the bytes of a message received so far.
    ///
    /// The result is the low 32 bits of r0 (eBPF) or A (classic BPF). For framing, it is the length of the message; 0 if more
    /// bytes are needed (at least `context.mark` bytes in total, unless `mark` is 0); or a negative errno. `context.mark` and
    /// `context.hash` are 0 at the start of every run; `context.cb` persists. Each instruction costs one unit of `fuel` (some
    /// classic instructions cost two), and `skb_load_bytes` one more for every eight bytes. The remaining fuel is returned in
    /// `fuel`.
    ///
    /// The result depends on the arguments alone. Nothing is allocated.
    ///
    /// # Errors
    /// Fails if the fuel is used up, or if a pointer is outside the message.
    #[allow(clippy::cast_possible_truncation)] // `int` in Linux (`bpf_prog_run` as KCM uses it).
    pub fn run(&self, message: &[u8], context: &mut Context, fuel: &mut u64) -> Result<i32, RunError> {
        context.mark = 0;
        context.hash = 0;
        // Clearing the stack takes longer than most programs run, so its size is what the program needs.
        let result = match self.stack {
            0 => self.execute(message, context, fuel, &mut []),
            1..=64 => self.execute(message, context, fuel, &mut [0; 64]),
            65..=FRAME_BYTES => self.execute(message, context, fuel, &mut [0; FRAME_BYTES]),
            _ => self.execute(message, context, fuel, &mut [0; FRAME_BYTES * crate::run::MAX_FRAMES]),
        };
        let instruction = |op: usize| self.origin.get(op).copied().unwrap_or(0);
        match result {
            Ok(r0) => Ok((r0 as u32).cast_signed()),
            Err(Stop::Zero) => Ok(0),
            Err(Stop::Fuel(op)) => Err(RunError::OutOfFuel { instruction: instruction(op) }),
            Err(Stop::Packet(op)) => Err(RunError::OutsideMessage { instruction: instruction(op) }),
            Err(Stop::Unchecked(op)) => Err(RunError::Unchecked { instruction: instruction(op) }),
        }
    }

    fn execute(
        &self,
        message: &[u8],
        context: &mut Context,
        fuel: &mut u64,
        stack: &mut [u8],
    ) -> Result<u64, Stop> {
        let mut machine = Machine { ops: &self.ops, message, context, stack, fuel: *fuel };
        let result = machine.run();
        *fuel = machine.fuel;
        result
    }

    /// Results of verification.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }
}

impl Code {
    /// Verifies the program and compiles it.
    ///
    /// # Errors
    /// The error names the first rule that the program breaks, and the instruction.
    pub fn verify(&self) -> Result<Program, VerifierError> {
        let checked = match &self.body {
            Body::Classic(code) => classic::check(code).map(|lowered| classic_program(code.len(), lowered)),
            Body::Ebpf { code, .. } => verifier::check(code).map(|facts| ebpf_program(&facts)),
        };
        checked.map_err(|(instruction, reason)| self.error(instruction, reason))
    }

    fn error(&self, instruction: usize, reason: Reason) -> VerifierError {
        VerifierError {
            function: self.function(instruction).map(str::to_owned),
            instruction,
            text: self.text(instruction).unwrap_or_default(),
            reason,
        }
    }
}

fn classic_program(instructions: usize, lowered: Lowered) -> Program {
    let count = |wanted: fn(OpCode) -> bool| lowered.ops.iter().filter(|op| wanted(op.code)).count();
    let stats = Stats {
        classic: true,
        instructions,
        operations: lowered.ops.len(),
        unreached: 0,
        functions: 1,
        depth: 1,
        stack: 0,
        message_loads: count(|code| (OpCode::AbsB..=OpCode::Msh).contains(&code)),
        variable_loads: 0,
        context_accesses: count(|code| code == OpCode::Len),
        branches: count(|code| code > OpCode::Call),
        back_edges: 0,
        steps: u32::try_from(instructions).unwrap_or(u32::MAX),
    };
    Program { ops: lowered.ops.into(), origin: lowered.origin.into(), stack: 0, stats }
}

fn ebpf_program(facts: &Facts) -> Program {
    let lowered = lower(facts);
    let kinds = || facts.kinds.iter().enumerate().filter_map(|(at, kind)| Some((at, (*kind)?)));
    let count = |wanted: fn(Kind) -> bool| kinds().filter(|(_, kind)| wanted(*kind)).count();
    let packet = |region: &&Option<verifier::Region>| matches!(region, Some(verifier::Region::Packet));
    let context = |region: &&Option<verifier::Region>| matches!(region, Some(verifier::Region::Context(_)));
    let loads = |kind| matches!(kind, Kind::LoadAbs { .. } | Kind::LoadInd { .. } | Kind::Helper { .. });
    let back = |at: usize, kind| verifier::jump_target(at, kind).is_some_and(|target| target <= at as i64);
    let stats = Stats {
        classic: false,
        instructions: facts.kinds.len(),
        operations: lowered.ops.len(),
        unreached: kinds().filter(|(at, _)| !facts.reached[*at]).count(),
        functions: facts.functions.len(),
        depth: facts.frames,
        stack: facts.stack,
        message_loads: facts.regions.iter().filter(packet).count() + count(loads),
        variable_loads: facts.variable.len(),
        context_accesses: facts.regions.iter().filter(context).count(),
        branches: count(|kind| matches!(kind, Kind::JumpIf { .. })),
        back_edges: kinds().filter(|(at, kind)| back(*at, *kind)).count(),
        steps: facts.steps,
    };
    Program { ops: lowered.ops.into(), origin: lowered.origin.into(), stack: facts.stack, stats }
}
