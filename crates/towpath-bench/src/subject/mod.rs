//! What is measured.

pub(crate) mod framing;
pub(crate) mod replay;
pub(crate) mod ring;
