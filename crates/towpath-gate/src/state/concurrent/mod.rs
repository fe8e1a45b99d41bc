//! Sharing a table between threads without locks: atomics, grace periods, retired slots, and counters of each worker.

pub(crate) mod epoch;
pub(crate) mod retire_list;
pub(crate) mod sync;
pub(crate) mod worker_counters;
