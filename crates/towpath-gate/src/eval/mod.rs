//! Rule evaluation: the compiled program, its index, and the walk of a packet through it.

mod burst;
mod class;
mod compare;
mod conditions;
mod creating_rule;
mod decision_tree;
mod denied_addresses;
mod evaluate;
mod explain;
mod flow_names;
mod gate;
mod generation;
mod index;
mod insn;
mod inspect_burst;
mod kept_rules;
mod log;
mod merge;
mod offload;
mod packet_spec;
mod port;
mod program;
mod random;
mod recheck;
mod reload;
mod reply;
mod retired;
mod routes;
mod rule_counters;
mod snapshot;
mod state_ahead;
mod stateless_prefix;
mod step;
mod token_bucket;
mod walk;
mod walker;
mod walker_slot;

pub use burst::BURST;
pub use compare::{Difference, DifferenceKind, differences};
pub use creating_rule::FirstPacket;
pub use denied_addresses::{AddressTest, DeniedAddresses, DenyingAddresses, DenyingRule, PacketClass};
pub use explain::{ActionOutcome, ExplainedRule, Explanation, RuleOutcome};
pub use gate::{DEFAULT_DYNAMIC_RULE, Gate, GateCounters, GateSettings, RuleInfo};
pub use log::{Copied, LogEntry, PacketLog, Suppressed, SuppressedBy};
pub use merge::{Merged, NotMerged, RulesByContent};
pub use offload::{
    FixedWalk, FlowDecision, FlowDecisions, NoOffload, Obstacle, StateHit, Unseen, VerdictHit, flow_frame,
};
pub use packet_spec::{PacketSpec, PacketSpecError};
pub use port::{PortId, Ports};
pub use recheck::RecheckStep;
pub use reload::{Diff, StatePolicy};
pub use reply::{NoReply, REPLIES_PER_SECOND, ReplyLimiter, echo_reply, is_echo_request};
pub use routes::{Gateway, Route, Routes};
pub use snapshot::{
    Frame, NamedRule, Restored, RuleRefs, SNAPSHOT_VERSION, SnapshotError, SnapshotWriter, check_snapshot,
};
pub use step::{DropReason, Reject, Step};
pub use walk::{CALL_DEPTH, Dir, Edits, MAX_TAGS, Walk};
pub use walker::Walker;
