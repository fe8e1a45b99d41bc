//! The packet engine's snapshots as answers of the control protocol.

use towpath_ring::{self as ring, Decision, Loss, Verdict};
use towpath_wire::{Packet, Time};

use super::protocol::{Defaults, Frame, Kind, Lost, Ring, State, Verdicts};
use super::records::{self, Neighbor};
use super::{FlowFilter, QueryHandler, TraceBuffer, TraceOutcome, TraceRecord};
use crate::report;
use crate::ruleset_manager::Rechecks;
use towpath_engine::queue::About;
use towpath_engine::queue::parse::{fanout_word, overload_words};
use towpath_engine::{
    ChannelSnapshot, DropReason, FrameSnapshot, Introspect, Outcome, QueueSnapshot, TraceFilter, TraceSink,
    TracedPacket,
};

/// A packet engine that answers queries.
pub struct EngineView<'a>(pub &'a mut dyn Introspect);

impl QueryHandler for EngineView<'_> {
    fn rings(&mut self) -> Vec<Ring> {
        self.0.channels().into_iter().map(Ring::from).collect()
    }

    fn frames(&mut self, channel: u32) -> Option<Vec<Frame>> {
        Some(self.0.frames(channel)?.into_iter().map(Frame::from).collect())
    }

    fn trace(&mut self, channel: u32, tap: TraceBuffer) -> bool {
        self.0.trace_channel(channel, Box::new(tap))
    }

    fn follow(&mut self, filter: FlowFilter, tap: TraceBuffer) -> bool {
        self.0.trace_packets(Box::new(filter), Box::new(tap))
    }

    fn ports(&self) -> Vec<String> {
        self.0.ports()
    }

    fn queues(&mut self) -> Vec<records::Queue> {
        self.0.queues().into_iter().map(records::Queue::from).collect()
    }

    fn stats(&self) -> records::Stats {
        let totals = self.0.totals();
        let stats = totals.stats;
        records::Stats {
            packets: stats.packets,
            bytes: stats.bytes,
            passed: stats.passed,
            dropped: totals.dropped(),
            dropped_by: report::dropped_by(&totals.drops),
            rejected: stats.rejected,
            waiting: totals.held(),
            inspected: stats.inspected,
            replies: self.0.replies().into(),
            states: report::States::of(self.0.states()),
            // The ruleset knows, not the engine.
            recheck: Rechecks::default(),
        }
    }

    fn clock(&self) -> Time {
        self.0.clock()
    }
}

impl From<ChannelSnapshot> for Ring {
    fn from(channel: ChannelSnapshot) -> Self {
        let verdicts = channel.verdicts;
        let verdicts = Verdicts {
            pass: verdicts.pass,
            drop: verdicts.drop,
            reject: verdicts.reject,
            replace: verdicts.replace,
            flow: verdicts.flow,
            ..Verdicts::default()
        };
        let ring = Self {
            channel: channel.channel,
            queue: channel.queue,
            gone: channel.gone,
            fanout: fanout_word(channel.policy.fanout).to_owned(),
            overload: overload_words(channel.policy.overload),
            depth: channel.open,
            oldest: channel.oldest,
            traces: channel.traces,
            ..Self::default()
        };
        let Some(About { peer, name, geometry, stats }) = channel.about else { return ring };
        let lost = |loss: Loss| stats.lost_by[loss as usize];
        let lost = Lost {
            no_room: lost(Loss::NoRoom),
            oldest: lost(Loss::Oldest),
            dropped: lost(Loss::Dropped),
            passed: lost(Loss::Passed),
            handed_on: lost(Loss::HandedOn),
            too_large: lost(Loss::TooLarge),
            other: 0,
        };
        let Lost { no_room, oldest, dropped, passed, handed_on, too_large, .. } = lost;
        let named = no_room + oldest + dropped + passed + handed_on + too_large;
        Self {
            name,
            pid: peer.pid,
            uid: peer.uid,
            block_size: geometry.block_size,
            block_nr: geometry.block_nr,
            frame_size: geometry.frame_size,
            frame_nr: geometry.frame_nr,
            used: channel.used,
            high_water: stats.high_water,
            held: stats.held,
            published: stats.published,
            bytes: stats.bytes,
            verdicts: Verdicts { decided: stats.decided, cumulative: stats.cumulative, ..verdicts },
            defaults: Defaults { overdue: stats.overdue, garbage: stats.invalid, drained: stats.drained },
            lost: Lost { other: stats.lost.saturating_sub(named), ..lost },
            full: stats.full,
            late: stats.late,
            violations: stats.violations,
            wakeups: stats.wakeups,
            oneshots: stats.oneshots,
            gaps: stats.gaps,
            huge_pages: stats.huge_pages,
            ..ring
        }
    }
}

impl From<FrameSnapshot> for Frame {
    fn from(FrameSnapshot { out, len, age, oneshot }: FrameSnapshot) -> Self {
        Self {
            seq: out.seq.0,
            first: out.first,
            frames: out.frames,
            state: match (out.overdue, out.held) {
                (true, _) => State::Overdue,
                (false, true) => State::Skip,
                (false, false) if oneshot => State::Copy,
                (false, false) => State::Valid,
            },
            len,
            kind: if len.is_some() { Kind::Packet } else { Kind::Other },
            age,
        }
    }
}

impl From<QueueSnapshot> for records::Queue {
    fn from(queue: QueueSnapshot) -> Self {
        let inspectors = queue.inspectors;
        let counters = report::Queue::from(queue);
        let (open, high_water) = (counters.open, counters.high_water);
        Self { open, high_water, inspectors, trouble: counters.trouble.clone(), counters }
    }
}

impl TraceFilter for FlowFilter {
    fn takes(&self, packet: &Packet<'_>, rule: Option<u32>) -> bool {
        FlowFilter::takes(self, packet, rule)
    }
}

impl TraceSink for TraceBuffer {
    fn is_over(&self) -> bool {
        TraceBuffer::is_over(self)
    }

    fn given(&mut self, seq: ring::Seq, bytes: &[u8], meta: &ring::Meta) {
        TraceBuffer::given(self, seq, bytes, meta);
    }

    fn decided(&mut self, seq: ring::Seq, after: u64, decision: &Result<Decision<'_>, DropReason>) {
        TraceBuffer::decided(self, seq, after, || trace_outcome(decision));
    }

    fn packet(&mut self, packet: &TracedPacket<'_>) {
        let what = match (packet.outcome, packet.out) {
            (Outcome::Passed, Some(port)) => format!("pass, out by {port}"),
            (Outcome::Passed, None) => "pass".to_owned(),
            (Outcome::Dropped(reason), _) => format!("drop, {reason}"),
            (Outcome::Rejected(_), _) => "reject".to_owned(),
        };
        self.push(TraceRecord {
            seq: packet.number as u32,
            time: packet.meta.time,
            wire_len: packet.meta.wire_len,
            link: packet.meta.link.0,
            port: packet.arrival.0.into(),
            queue: 0,
            bytes: packet.bytes.into(),
            after: 0,
            note: TraceOutcome::Decided { rule: packet.rule, what },
        });
    }
}

fn trace_outcome(decision: &Result<Decision<'_>, DropReason>) -> TraceOutcome {
    match *decision {
        Err(reason) => TraceOutcome::Lost(reason),
        Ok(Decision { verdict, mark, mask, flow, .. }) => {
            let verdict = match verdict {
                Verdict::Pass => "pass".to_owned(),
                Verdict::Drop | Verdict::Hold => "drop".to_owned(),
                Verdict::Reject => "reject".to_owned(),
                Verdict::Replace(bytes) => format!("replace by {} bytes", bytes.len()),
                Verdict::Queue(number) => format!("queue {number}"),
                Verdict::Repeat => "repeat".to_owned(),
            };
            TraceOutcome::Verdict { verdict, mark: (mark, mask), flow }
        }
    }
}

/// The neighbors of a port as rows.
pub(crate) fn neighbors(neighbors: Vec<towpath_engine::router::NeighborSnapshot>) -> Vec<Neighbor> {
    let text = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    let row = |neighbor: towpath_engine::router::NeighborSnapshot| Neighbor {
        address: neighbor.address.to_string(),
        mac: neighbor.mac.map(text),
        state: neighbor.state.to_owned(),
    };
    neighbors.into_iter().map(row).collect()
}
