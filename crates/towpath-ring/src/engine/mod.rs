//! The engine's side: endpoints, channels, and queues whose frames go to several clients.

pub(crate) mod arm_scan;
pub(crate) mod bars;
pub(crate) mod bind_error;
pub(crate) mod channel;
pub(crate) mod control_rx;
pub(crate) mod dump;
pub(crate) mod endpoint;
pub(crate) mod fanout;
pub(crate) mod lent_memory;
pub(crate) mod oneshots;
pub(crate) mod open;
pub(crate) mod peer_liveness;
pub(crate) mod quota;
pub(crate) mod reservation;
pub(crate) mod rings;
pub(crate) mod socket_file;
pub(crate) mod stats;
pub(crate) mod tx_ring;
pub(crate) mod verdict_reader;
