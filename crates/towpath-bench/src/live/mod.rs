//! Live traffic on the way from one network namespace through a second to a third, and what stands in the second.
//!
//! ```text
//! near (generator, TCP client)  near0 == wan  [middle: what is measured]  lan == far0  far (counts, TCP server)
//! ```

pub(crate) mod bare;
pub(crate) mod flood;
pub(crate) mod home;
pub(crate) mod load;
pub(crate) mod middle;
pub(crate) mod path;
pub(crate) mod round_trip;
pub(crate) mod world;
