//! The counters of a queue and of its inspectors.

use towpath_metrics::metrics;
use towpath_ring::{Decision, Verdict};

use crate::drop_reason::DropReason;

metrics! {
    /// Counters of one queue. `frames = passed + dropped + replaced + lost + open`, where `lost` is the sum of its reasons.
    pub struct Stats in "queue" {
        /// Frames that the rules sent to the queue.
        pub frames: counter frames,
        /// Frames that the inspector passed unchanged.
        pub passed: counter frames,
        /// Frames that the inspector dropped or rejected.
        pub dropped: counter frames,
        /// Frames that the inspector passed with another payload.
        pub replaced: counter frames,
        /// Frames that had no verdict within the deadline, or at the stop of the engine.
        pub overdue: counter frames as "lost": "Frames that no inspector decided, by reason." (reason = "overdue"),
        /// Frames with an invalid verdict.
        pub invalid_verdict: counter frames as "lost" (reason = "invalid_verdict"),
        /// Frames of an inspector that died.
        pub inspector_died: counter frames as "lost" (reason = "inspector_died"),
        /// Frames for which the inspector, or its share of the reorder buffer, had no room.
        pub queue_full: counter frames as "lost" (reason = "queue_full"),
        /// Frames for which there was no inspector, or only stalled ones.
        pub no_inspector: counter frames as "lost" (reason = "no_inspector"),
        /// Copies that `tee` or the fan-out `mirror` did not make, because the turn's budget of copies was spent.
        pub copy_budget: counter frames as "lost" (reason = "copy_budget"),
        /// Frames that the overload policy gave to another queue. They do not count here.
        pub handed_on: counter frames,
        /// Frames that were given to another inspector because theirs died. Each counts once.
        pub redelivered: counter frames,
        /// Times that an inspector stalled: it returned no frame for the time `stall`.
        pub stalls: counter events,
        /// Times that a standby inspector took over from one that died or stalled.
        pub takeovers: counter events,
        /// Copies of frames that stalled inspectors got to find out whether they answer. They are frames of the queue.
        pub probes: counter frames,
        /// Packets decided by an earlier verdict for their flow. They are not frames of the queue.
        pub by_flow: counter packets,
        /// Packets dropped because the queue's share of the reorder buffer had no room. They are not frames of the queue.
        pub no_room: counter packets,
        /// Packets of the queue in the reorder buffer now.
        pub held: gauge packets,
        /// Bytes of these packets.
        pub held_bytes: gauge bytes,
        /// Inspectors that are stalled now.
        pub stalled: gauge events,
        /// Frames that inspectors have now.
        pub open: gauge frames,
        /// Most frames that inspectors had at one time.
        pub high_water: gauge frames,
    }
}

impl Stats {
    /// Frames that no inspector decided.
    pub fn lost(&self) -> u64 {
        self.overdue
            + self.invalid_verdict
            + self.inspector_died
            + self.queue_full
            + self.no_inspector
            + self.copy_budget
    }

    pub(super) fn count(&mut self, decision: &Result<Decision<'_>, DropReason>) {
        match decision {
            Ok(decision) => match decision.verdict {
                Verdict::Pass | Verdict::Queue(_) | Verdict::Repeat => self.passed += 1,
                Verdict::Drop | Verdict::Reject | Verdict::Hold => self.dropped += 1,
                Verdict::Replace(_) => self.replaced += 1,
            },
            Err(DropReason::Overdue) => self.overdue += 1,
            Err(DropReason::InspectorDied) => self.inspector_died += 1,
            Err(DropReason::ReplaceLimit) => self.queue_full += 1,
            Err(_) => self.invalid_verdict += 1,
        }
    }
}

metrics! {
    /// Verdicts of one inspector by kind.
    pub struct VerdictStats in "channel" {
        /// Pass verdicts, and verdicts that send the packet to another queue or back to the rules.
        pub pass: counter frames as "verdicts": "Verdicts of an inspector, by verdict." (verdict = "pass"),
        /// Drop verdicts.
        pub drop: counter frames as "verdicts" (verdict = "drop"),
        /// Reject verdicts.
        pub reject: counter frames as "verdicts" (verdict = "reject"),
        /// Verdicts that replace the payload.
        pub replace: counter frames as "verdicts" (verdict = "replace"),
        /// Verdicts for the packet's flow.
        pub flow: counter frames as "flow_verdicts",
        /// Packets that the inspector sent (`may-inject`).
        pub injected: counter packets,
        /// Packets of the inspector that were not sent: malformed, dropped by rules, without room, or by a port that cannot send.
        pub not_injected: counter packets,
        /// Verdicts that name a queue outside of `may-queue`: violations. They are invalid.
        pub forbidden_queue: counter frames as "refused_verdicts": "Verdicts that the engine refused, by reason." (reason = "forbidden_queue"),
        /// Replacements that are longer than a frame of the port by which the packet leaves: violations. They are invalid.
        pub too_long: counter frames as "refused_verdicts" (reason = "too_long"),
        /// Replacements for which the inspector's share of the reorder buffer has no room.
        pub over_share: counter frames as "refused_verdicts" (reason = "over_share"),
    }
}

impl VerdictStats {
    pub(super) fn count(&mut self, decision: &Decision<'_>) {
        self.flow += u64::from(decision.flow);
        match decision.verdict {
            Verdict::Pass | Verdict::Queue(_) | Verdict::Repeat => self.pass += 1,
            Verdict::Drop | Verdict::Hold => self.drop += 1,
            Verdict::Reject => self.reject += 1,
            Verdict::Replace(_) => self.replace += 1,
        }
    }
}
