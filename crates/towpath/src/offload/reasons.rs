//! Why a flow is not offloaded now, and whether that may change.

use towpath_engine::offload::NoPath;
use towpath_gate::NoOffload;
use towpath_gate::state::Listed;
use towpath_wire::proto;

use super::NotOffloaded;

/// TCP flags in ipfw's word of a state: the SYN of each side.
const SYNS: u32 = 0x0202;
/// RST of either side, and FIN of both.
const RSTS: u32 = 0x0404;
const FINS: u32 = 0x0101;

/// The reason may soon be gone, without a change of rules or interfaces.
pub(super) fn is_transient(reason: NoPath) -> bool {
    matches!(reason, NoPath::NoRoute | NoPath::NotEstablished | NoPath::Rules(NoOffload::Recheck))
}

/// Counts a direction that has no entry, unless the reason may be gone later.
pub(super) fn count(refused: &mut NotOffloaded, reason: NoPath) {
    let NotOffloaded { rules, not_marked, port, not_forwarded, local, tagged, native_egress, down } = refused;
    *match reason {
        NoPath::NoRoute | NoPath::NotEstablished => return,
        NoPath::Rules(NoOffload::Recheck | NoOffload::NoVerdict(_)) => return,
        NoPath::Rules(_) => rules,
        NoPath::NotMarked => not_marked,
        NoPath::Port => port,
        NoPath::NotForwarded => not_forwarded,
        NoPath::Local => local,
        NoPath::Tagged => tagged,
        NoPath::Target => native_egress,
        NoPath::Down => down,
    } += 1;
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

    /// `explain` and the counters have one name for each reason.
    #[test]
    fn reasons_are_counted_by_their_names() {
        let mut refused = NotOffloaded::default();
        for reason in [
            NoPath::Rules(NoOffload::Protocol),
            NoPath::NotMarked,
            NoPath::Port,
            NoPath::NotForwarded,
            NoPath::Local,
            NoPath::Tagged,
            NoPath::Target,
            NoPath::Down,
        ] {
            let mut expected = refused;
            expected.set(reason.name(), 1);
            count(&mut refused, reason);
            assert_eq!(refused, expected, "{reason}");
        }
        assert!(
            towpath_metrics::Metrics::table(&refused)
                .iter()
                .all(|metric| metric.label == Some(("reason", metric.name)))
        );
    }

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
