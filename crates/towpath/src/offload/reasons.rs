//! Why a flow is not offloaded now, and whether that may change.

use towpath_engine::offload::NoPath;
use towpath_gate::NoOffload;
use towpath_gate::state::Listed;
use towpath_wire::proto;

/// TCP flags in ipfw's word of a state: the SYN of each side.
const SYNS: u32 = 0x0202;
/// RST of either side, and FIN of both.
const RSTS: u32 = 0x0404;
const FINS: u32 = 0x0101;

/// The reason may soon be gone, without a change of rules or interfaces.
pub(super) fn is_transient(reason: NoPath) -> bool {
    matches!(reason, NoPath::NoRoute | NoPath::NotEstablished | NoPath::Rules(NoOffload::Recheck))
}

/// The reason may be gone later.
pub(super) fn may_change(reason: NoPath) -> bool {
    is_transient(reason) || matches!(reason, NoPath::Rules(NoOffload::NoVerdict(_)))
}

/// A TCP connection whose SYNs were seen and that has not ended; any other flow.
pub(super) fn is_established(state: &Listed) -> bool {
    let seen = state.tcp_seen;
    state.flow.proto != proto::TCP || seen & SYNS == SYNS && seen & RSTS == 0 && seen & FINS != FINS
}

/// A TCP connection begins, maybe after another one with the same ports.
pub(super) fn begins(state: &Listed) -> bool {
    state.flow.proto == proto::TCP && state.tcp_seen & SYNS != SYNS
}

#[cfg(test)]
mod tests {
    use towpath_gate::state::{Flow, Kind, Name, Origin, RuleId};

    use super::*;

    #[test]
    fn connections_are_offloaded_while_they_are_established() {
        let listed = |proto, tcp_seen| Listed {
            kind: Kind::State,
            rule: RuleId(1),
            name: Name::DEFAULT,
            orphaned: false,
            flow: Flow {
                ends: towpath_wire::Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into()),
                proto,
                src_port: 1,
                dst_port: 2,
                zone: 0,
            },
            packets: [0; 2],
            bytes: [0; 2],
            remaining: std::time::Duration::ZERO,
            tcp_seen,
            picked_up: false,
            tcp_ack: [0; 2],
            origin: Origin::UNRECORDED,
        };
        for (proto, seen, expected) in [
            (proto::UDP, 0, true),
            (proto::TCP, 0x0002, false),
            (proto::TCP, 0x0202, true),
            (proto::TCP, 0x3_0203, true),
            (proto::TCP, 0x0303, false),
            (proto::TCP, 0x0602, false),
        ] {
            assert_eq!(is_established(&listed(proto, seen)), expected, "{seen:#x}");
        }
    }
}
