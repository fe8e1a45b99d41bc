//! BPF programs as framings: translates KCM's contract to a [`Step`].

use towpath_bpf::{Context, Program};

use super::cause::Cause;
use super::{Message, State, Step};

/// Maximum cost of a call: enough to search some thousand bytes in a few milliseconds.
const FUEL: u64 = 1 << 18;
/// "Not for the mux" (include/uapi/asm-generic/errno.h; net/strparser/strparser.c).
const ESTRPIPE: i32 = 86;

pub(super) fn step(program: &Program, bytes: &[u8], state: &mut State) -> Step {
    let mut context = Context::new();
    context.cb = state.cb;
    let mut fuel = FUEL;
    let result = program.run(bytes, &mut context, &mut fuel);
    state.cb = context.cb;
    match result {
        Err(error) => Step::Error(Cause::Malformed(format!("the framing program: {error}").into())),
        Ok(0) => Step::Need((context.mark as usize).max(bytes.len() + 1)),
        Ok(length) if length > 0 => {
            let (mark, hash) = (context.mark, context.hash);
            Step::Message(Message { mark, hash, ..Message::of(length as usize) })
        }
        Ok(result) if result == -ESTRPIPE => Step::GiveBack,
        Ok(errno) => Step::Error(Cause::Program(errno.checked_neg().unwrap_or(i32::MAX))),
    }
}
