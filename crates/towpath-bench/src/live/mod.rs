//! Live traffic through three network namespaces, and the device under test in the second one.
//!
//! ```text
//! near (generator, TCP client)  near0 == wan  [device under test]  lan == far0  far (counter, TCP server)
//! ```

pub(crate) mod baseline_fwd;
pub(crate) mod dut;
pub(crate) mod flood;
pub(crate) mod inspectors;
pub(crate) mod load;
pub(crate) mod netns_proc;
pub(crate) mod offload_times;
pub(crate) mod outage;
pub(crate) mod path;
pub(crate) mod round_trip;
pub(crate) mod topology;
