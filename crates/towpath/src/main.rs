//! The command line of Towpath.
fn main() {}
