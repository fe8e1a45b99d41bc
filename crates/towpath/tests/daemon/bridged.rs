//! The configuration that most tests of a running engine begin with.

/// A bridge that can be looked at.
pub(crate) const BRIDGE: &str = r#"
rules = "r.ipfw"
[port.wan]
driver = "af_packet"
[port.lan]
driver = "af_packet"
[[bridge]]
ports = ["wan", "lan"]
[control]
socket = "ctl.sock"
"#;
