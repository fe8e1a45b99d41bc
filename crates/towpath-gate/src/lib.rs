//! Packet filter with the rule language of ipfw(8) and a table of dynamic states.
//!
//! A [`Gate`] owns a ruleset. For each packet, a [`Walker`] evaluates the rules and returns a [`Step`]: pass, drop,
//! reject, forward to a next hop, or hand the packet to an inspector. Rules with `keep-state` create states; later
//! packets of the flow match the state instead of the rules.
//!
//! Use this crate to decide packets in your own program: a user-space router or bridge, an NFQUEUE program, a
//! capture analyser, or a test of a firewall ruleset. The crate does no IO, reads no clock and starts no thread. The
//! caller supplies the bytes of each frame and the time, and carries out the step.
//!
//! - [`rules`]: the language. [`rules::Ruleset::parse`] reads a rule file and reports all errors at once.
//! - The crate root: evaluation. [`Gate::walker`] creates a handle per thread; a walk takes no lock. Rules, tables
//!   and routes can be replaced while walkers run ([`Gate::reload`]).
//! - [`state`]: the state table, its settings and its timeouts.
//! - [`reassembly`]: a reassembler for IPv4 fragments.
//!
//! # Example
//!
//! ```
//! use towpath_gate::rules::Ruleset;
//! use towpath_gate::{Dir, DropReason, Gate, PacketSpec, Ports, Step, Walk, state};
//! use towpath_wire::{self as wire, Time};
//!
//! let text = "add check-state\nadd allow tcp from 10.0.0.0/8 to any 443 setup keep-state\nadd deny ip from any to any";
//! let rules = Ruleset::parse("office.ipfw", text).ruleset.unwrap();
//! let mut ports = Ports::new();
//! let lan0 = ports.add("lan0", Vec::new());
//! let mut gate = Gate::new(rules, ports, state::Settings::default(), 0x5eed);
//! let mut walker = gate.walker().unwrap();
//!
//! let mut decide = |spec: &str| {
//!     let spec = PacketSpec::parse(spec).unwrap();
//!     let packet = wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32).unwrap();
//!     walker.walk(&mut Walk::new(Dir::In, Some(lan0), None), &packet, Time::from_secs(1))
//! };
//! assert_eq!(decide("tcp 10.0.0.1:40000 > 192.0.2.1:443 syn"), Step::Pass);
//! // The reply matches the state.
//! assert_eq!(decide("tcp 192.0.2.1:443 > 10.0.0.1:40000 syn ack"), Step::Pass);
//! assert_eq!(decide("tcp 192.0.2.1:443 > 10.0.0.1:40001 syn ack"), Step::Drop(DropReason::Deny));
//!
//! assert_eq!(gate.states().len(), 1);
//! assert_eq!(gate.show()[1].packets, 2);
//! ```
//!
//! # Differences from ipfw
//!
//! Actions that need the kernel (netgraph, NAT, dummynet scheduling) are not supported. The rules reference lists
//! all words and every difference.
// Only `state/table/memory.rs` contains `unsafe` code: it manages the memory of the state table.
#![deny(unsafe_code)]
// `cfg(loom)` replaces the atomics by those of a model checker. The manifest of a workspace member cannot declare it.
#![allow(unexpected_cfgs)]

mod eval;

pub mod reassembly;
pub mod rules;
mod settings;
pub mod state;

pub use eval::{
    ActionOutcome, AddressTest, BURST, CALL_DEPTH, Copied, DEFAULT_DYNAMIC_RULE, DeniedAddresses,
    DenyingAddresses, DenyingRule, Diff, Difference, DifferenceKind, Dir, DropReason, Edits, ExplainedRule,
    Explanation, FirstPacket, FixedWalk, FlowDecision, FlowDecisions, Frame, Gate, GateCounters,
    GateSettings, Gateway, LogEntry, MAX_TAGS, Merged, NamedRule, NoOffload, NoReply, NotMerged, Obstacle,
    PacketClass, PacketLog, PacketSpec, PacketSpecError, PortId, Ports, REPLIES_PER_SECOND, RecheckStep,
    Reject, ReplyLimiter, Restored, Route, Routes, RuleInfo, RuleOutcome, RuleRefs, RulesByContent,
    SNAPSHOT_VERSION, SnapshotError, SnapshotWriter, StateHit, StatePolicy, Step, Suppressed, SuppressedBy,
    Unseen, VerdictHit, Walk, Walker, check_snapshot, differences, echo_reply, flow_frame, is_echo_request,
};
pub use settings::{Setting, SettingError, Values};
