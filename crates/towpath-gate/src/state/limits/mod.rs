//! Bounds on the number of states: by rule, by source, and for the first SYN of a flow.

pub(crate) mod first_syn;
pub(crate) mod parents;
pub(crate) mod rule_counts;
pub(crate) mod slot_list;
pub(crate) mod sources;
pub(crate) mod table;
mod timer_wheel;
