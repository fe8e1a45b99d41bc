//! What is measured.

pub(crate) mod replay;
pub(crate) mod ring;
