//! The table of one address family: fixed slots, the index that finds them, and the data stored next to each slot.

pub(crate) mod count;
pub(crate) mod entry;
pub(crate) mod family;
pub(crate) mod growing_index;
pub(crate) mod hash;
pub(crate) mod index;
mod index_line;
pub(crate) mod key;
pub(crate) mod live_filter;
pub(crate) mod memory;
pub(crate) mod scan_cursor;
pub(crate) mod shrink;
pub(crate) mod slab;
pub(crate) mod slot_cache;
pub(crate) mod slot_counters;
pub(crate) mod wide_counters;
