//! Dynamic states, which `keep-state` and `limit` make and `check-state` finds.
//!
//! They follow ipfw (ipfw(8), STATEFUL FIREWALL; the lifetimes are those of its code, not of the manual page). Differences:
//!
//! - A state expires to the nanosecond and is never found afterwards. ipfw finds it until it is collected.
//! - `limit` is exact, and an existing state is found before the limit is checked, also by `set-limit`.
//! - Expired states take no room: an install that would be refused collects them first.
//! - An acknowledgement number counts only in a segment with ACK.
//! - A SYN on an ended TCP connection begins another one in the same state. A reset of an established connection must be in its
//!   receiver's window.
//! - `check-state :any` finds the newest state of the flow, as ipfw does as long as its table has not grown.
//! - Optional ([`Settings`], off by default): eviction when the table is full, a maximum per source, ICMP identifiers and SCTP
//!   chunks in states. Optional per rule ([`Tracking`]): strict or loose tracking of TCP.
//!
//! Any number of threads use the same states, each through its own [`States`] ([`States::worker`]).
//!
//! Modules:
//!
//! - `states`: the handle. Lookup, install, removal, sweep, listings, snapshots.
//! - `journal`: changes of states for readers outside the packet path; `record`: a state as bytes.
//! - `table`: the states of one address family. Slots, index, entries, and the data stored next to the slots.
//! - `limits`: bounds by number, rule, source and first SYN.
//! - `tcp`, `sctp`: effects of a packet on a connection.
//! - `concurrent`: atomics, grace periods, counters of each worker.
//! - `testing`: the model, the harness that compares the table with it, and the loom tests.
//!
//! ```
//! use towpath_wire::Time;
//! use towpath_gate::state::{Direction, Ends, Flow, Install, Lookup, Name, RuleId, Segment, Settings, States};
//!
//! let mut states = States::new(Settings::default(), 0x5eed);
//! let query = Flow {
//!     ends: Ends::V4([10, 0, 0, 1].into(), [9, 9, 9, 9].into()),
//!     proto: 17,
//!     src_port: 5353,
//!     dst_port: 53,
//!     zone: 0,
//! };
//! let packet = Segment { bytes: 60, ..Segment::default() };
//! let rule = RuleId(1);
//! states.install(&query, Name::DEFAULT, &packet, rule, &Install::default(), Time::from_secs(0)).unwrap();
//!
//! let reply = query.reversed();
//! let hit = states.lookup(&reply, Lookup::Any, &packet, Time::from_secs(9)).unwrap();
//! assert_eq!((hit.rule, hit.direction), (rule, Direction::Reverse));
//! // A UDP state expires 10 s after its last packet.
//! assert!(states.lookup(&reply, Lookup::Any, &packet, Time::from_secs(19)).is_none());
//! ```

mod concurrent;
mod counters;
mod events;
mod fragment_table;
mod install;
mod journal;
mod keepalive;
mod limits;
mod listing;
mod lookup;
mod origin;
pub mod record;
mod related;
mod sctp;
mod settings;
mod states;
mod table;
mod tcp;
#[doc(hidden)]
pub mod testing;

pub use crate::settings::{LIFETIME_MAX, SettingError};
pub use counters::Counters;
pub use events::{EventKind, StateEvent};
pub use install::{Install, Installed, Limit, LimitMask, Refused, Tracking};
pub use journal::{Changes, JournalRead, JournalReader};
pub use keepalive::{KEEPALIVE_INTERVAL, Keepalive};
pub use listing::{Cursor, Kind, Line, Listed};
pub use lookup::{Direction, Hit, Lookup, Name, RuleId};
pub use origin::{Origin, RecordedPort};
pub use related::Quoted;
pub use settings::{KEEPALIVE_PERIOD, SYN_NEARLY_FULL, Settings};
pub use states::{BURST, Foreseen, States, Top};
pub(crate) use states::{HandedOver, Saved};
pub use table::memory::Pages;
pub use towpath_wire::{Ends, Flow, Segment};
