//! Every figure that Towpath claims, measured beside its peers.
fn main() {}
