//! The two ends of a lane without memory or descriptors: who holds which frame, and where the next one is.

pub(crate) mod consumer;
pub(crate) mod cursor;
pub(crate) mod deadline;
pub(crate) mod frames;
pub(crate) mod producer;
