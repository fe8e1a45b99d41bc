//! Loader, verifier and interpreter for BPF framing programs in user space: classic BPF and a subset of eBPF.
//!
//! A framing program reads the received bytes of a message and returns the message's length. Programs for Linux's KCM and
//! strparser run unchanged: ELF objects of clang, raw eBPF instructions, `struct sock_filter` arrays and the output of
//! `tcpdump -ddd`. Use this crate to run untrusted framing programs without privilege and without the kernel.
//!
//! - [`Program::load`] parses, links and verifies a program. A [`VerifierError`] names the instruction, the register and the
//!   reason.
//! - [`Program::run`] takes the bytes and the [`Context`] and returns a number. It has no side effects, is bounded by fuel, and
//!   does not allocate.
//! - [`Code`] is a program before verification, for listings.
//!
//! ```
//! use towpath_bpf::{Context, LoadOptions, Program};
//!
//! // Classic BPF, as printed by `tcpdump -ddd`: the first byte is the length.
//! let program = Program::load(b"2\n48 0 0 0\n22 0 0 0\n", &LoadOptions::default())?;
//! let mut fuel = 100;
//! assert_eq!(program.run(b"\x05hello", &mut Context::default(), &mut fuel), Ok(5));
//! # Ok::<(), towpath_bpf::LoadError>(())
//! ```
//!
//! `docs/book/src/reference/bpf.md` lists the accepted instructions and the differences from Linux.
//!
//! Not supported: maps, global data, helpers other than `skb_load_bytes`, atomics, writes to the message, calls through
//! registers, and context fields that only a packet has.
#![forbid(unsafe_code)]

mod alu;
mod classic;
mod code;
mod context;
mod disasm;
mod elf;
mod insn;
mod lower;
mod op;
mod program;
mod range;
mod run;
mod state;
mod verifier;
mod verifier_error;
#[cfg(test)]
mod verifier_fuzz;

pub use classic::{ClassicInsn, MAX_CLASSIC_INSTRUCTIONS};
pub use code::{Code, Format, LoadError, LoadOptions, Row};
pub use context::Context;
pub use elf::ElfError;
pub use insn::Insn;
pub use program::{Program, Stats};
pub use run::{MAX_FRAMES, RunError};
pub use verifier::MAX_INSTRUCTIONS;
pub use verifier_error::{Reason, VerifierError};
