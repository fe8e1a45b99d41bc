//! The decision about every packet: ipfw rules with dynamic states.
//!
//! No descriptor, no clock, no thread: bytes and a [`Time`](towpath_wire::Time) go in, a decision comes out.
// `unsafe` is in `state/table/memory.rs` only, which has the memory of the states.
#![deny(unsafe_code)]
// `cfg(loom)` swaps the atomics for those of a model checker; the manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]

mod eval;

pub mod reassembly;
pub mod rules;
pub mod state;

pub use eval::{
    ActionOutcome, BURST, CALL_DEPTH, DEFAULT_DYNAMIC_RULE, Diff, Dir, DropReason, Edits, ExplainedRule,
    Explanation, Gate, GateSettings, LogEntry, MAX_TAGS, NoReply, PacketLog, PacketSpec, PacketSpecError,
    PortId, Ports, REPLIES_PER_SECOND, RecheckStep, Reject, ReplyLimiter, Restored, Route, Routes, RuleInfo,
    RuleOutcome, SNAPSHOT_VERSION, SnapshotError, StatePolicy, Step, Walk, Walker, check_snapshot,
};
