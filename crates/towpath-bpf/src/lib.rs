//! Classic BPF and a subset of eBPF for framing programs: check, then run.
//!
//! A framing program sees a message's bytes so far and says where the message ends. Programs made for Linux's KCM and
//! strparser run unchanged: ELF objects made by clang, raw eBPF instructions, `struct sock_filter`s and what
//! `tcpdump -ddd` prints. No privilege is needed, and no kernel.
//!
//! - [`Program::load`] reads, links and checks; a [`VerifierError`] names the instruction, the register and the reason.
//! - [`Program::run`] takes the bytes and the [`Context`], and answers with a number. It is pure, bounded by fuel, and
//!   allocates nothing.
//! - [`Code`] is a program before the check, to list it.
//!
//! What is accepted, and what differs from Linux, is in `docs/book/src/reference/bpf.md`.
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
pub use run::RunError;
pub use verifier::{MAX_FRAMES, MAX_INSTRUCTIONS};
pub use verifier_error::{Reason, VerifierError};
