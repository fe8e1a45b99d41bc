//! The packet path of Towpath: packets from ports through the gate's rules, to inspectors on rings, and out again.
//!
//! Use this crate to embed the engine: an in-line firewall, a bridge, a router or a replay, with your own ports. The program
//! `towpath` is this engine with a configuration, a supervisor and a control socket. If you need only the rules, use
//! `towpath-gate`; if you need only packets in another process, use `towpath-ring`.
//!
//! The crate has no sockets, no serialization and no control protocol. An [`Engine`] gets bursts of packets from its owner, and
//! everything else through [`PacketIo`]: the clock, the way out, and queries. [`egress::PortIo`] implements it for live ports,
//! and [`ReplayIo`] for captures.
//!
//! ```
//! use std::convert::Infallible;
//!
//! use towpath_engine::queue::Policy;
//! use towpath_engine::{DropReason, Engine, ForwardMode, Meta, PacketIo, Topology};
//! use towpath_gate::rules::Ruleset;
//! use towpath_gate::{Gate, PacketSpec, Ports, state};
//! use towpath_wire::LinkType;
//!
//! /// Keeps the packets that leave.
//! #[derive(Default)]
//! struct Memory(Vec<Vec<u8>>);
//!
//! impl PacketIo for Memory {
//!     type Channel = Infallible;
//!     type Error = Infallible;
//!
//!     fn now(&mut self) -> u64 {
//!         1
//!     }
//!
//!     fn send(&mut self, frame: &[u8], _meta: &Meta) -> Result<(), Infallible> {
//!         self.0.push(frame.to_vec());
//!         Ok(())
//!     }
//! }
//!
//! // A bridge from `wan` to `lan` that passes DNS.
//! let rules = "add allow udp from any to any 53\nadd deny ip from any to any\n";
//! let ruleset = Ruleset::parse("example", rules).ruleset.expect("valid rules");
//! let mut ports = Ports::new();
//! let (wan, lan) = (ports.add("wan", Vec::new()), ports.add("lan", Vec::new()));
//! let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
//! let walker = gate.walker().expect("a first walker");
//! let mut topology = Topology::none();
//! topology.add(wan, ForwardMode::Bridge { xmit: lan, walk_out: false });
//! let mut engine = Engine::live(Memory::default(), walker, topology, Vec::new(), Policy::default());
//!
//! let packets = ["udp 10.0.0.1:4000 > 10.0.0.2:53", "udp 10.0.0.1:4000 > 10.0.0.2:123"];
//! let frames = packets.map(|spec| PacketSpec::parse(spec).expect("a valid packet").frame);
//! let meta = |frame: &[u8]| Meta::new(LinkType::ETHERNET, frame.len());
//! let Ok(()) = engine.process_burst(frames.iter().map(|frame| (&frame[..], meta(frame))));
//!
//! let totals = engine.totals();
//! assert_eq!((totals.stats.passed, totals.drops[DropReason::Rule]), (1, 1));
//! assert_eq!(engine.io_mut().0, [frames[0].clone()]);
//! ```
//!
//! # Outcomes
//!
//! Every packet has one [`Outcome`]: passed, rejected, or dropped with a [`DropReason`]. The same reason appears in counters,
//! traces, reports, metrics and JSON. `packets = passed + dropped + rejected + held` holds at all times ([`Totals`]). A packet
//! that could not leave counts as dropped, never as passed.
//!
//! # Order
//!
//! - Packets leave in the order of their arrival: all packets of a replay, and those of each flow of a live engine
//!   ([`reorder`]).
//! - Within a flow, packets meet the rules in the order of their arrival: while rule evaluation of a packet continues after a
//!   verdict, the next packet of the flow waits. Exceptions: a packet that an inspector sends back to the rules (`repeat`) without
//!   its flow, and later fragments, which have no ports.
//! - The engine waits for a verdict at most for the queue's deadline.
//!
//! # Modules
//!
//! The path of a packet is in `packet_path.rs`, from top to bottom. It calls `forward.rs` (rules and the forwarding decision),
//! [`queue`] (inspectors), [`reorder`] (packets that wait) and, through [`PacketIo`], [`egress`] and [`router`].
#![forbid(unsafe_code)]

mod backlog;
mod by_flow;
pub mod capture_clock;
mod clock;
pub mod conversations;
mod drop_log;
mod drop_reason;
mod edits;
pub mod egress;
mod engine;
mod engine_view;
mod flow_locks;
pub mod flow_verdict;
mod forward;
mod held;
mod inject;
mod introspect;
mod live;
mod meta;
pub mod offload;
mod packet_ctx;
mod packet_io;
mod packet_path;
pub mod queue;
mod queue_set;
mod reassemble;
pub mod reorder;
mod replay;
mod replies;
pub mod router;
#[cfg(test)]
mod tests;
mod topology;
mod totals;
mod trace;
pub mod verdict_feed;
mod verdicts;

pub use drop_log::LogDrops;
pub use drop_reason::{DropReason, Drops, Outcome};
pub use engine::{Engine, Summary};
pub use introspect::Introspect;
pub use live::LiveEngine;
pub use meta::{Egress, Meta};
pub use packet_io::PacketIo;
pub use queue::{ChannelSnapshot, FrameSnapshot, QueueSnapshot};
pub use replay::{ReplayEngine, ReplayIo};
pub use topology::{ForwardMode, Topology};
pub use totals::{ConversationStats, ReplyStats, Stats, Totals};
pub use trace::{TraceFilter, TraceSink, TracedPacket};
