//! Frames in shared memory between processes that do not trust each other.
