//! Answers to rejected packets: at most so many a second and port, each counted.

use towpath_gate::{PortId, Reject, ReplyLimiter, Walker};
use towpath_metrics::metrics;
use towpath_wire::{Packet, Time};

use super::{Meta, PacketIo};

metrics! {
    /// Answers to rejected packets. `rejected = sent + silent + limited + unsent`.
    pub struct ReplyStats in "engine" {
        /// Answers that were sent.
        pub sent: counter packets as "replies" (result = "sent"),
        /// Rejected packets that get no answer, or one together with other fragments of their datagram.
        pub silent: counter packets as "replies" (result = "silent"),
        /// Answers that were not sent because the port had reached its rate limit.
        pub limited: counter packets as "replies" (result = "limited"),
        /// Answers that the port could not send.
        pub unsent: counter packets as "replies" (result = "unsent"),
    }
}

/// What the engine keeps for answering.
#[derive(Debug, Default)]
pub(super) struct Replies {
    /// By port, made with a port's first answer.
    limits: Vec<Option<ReplyLimiter>>,
    frame: Vec<u8>,
    pub(super) counts: ReplyStats,
}

impl Replies {
    /// Answers a packet that burst in by `arrival`, as `reject` says; without it, as an inspector's rejection is answered.
    /// `parts` is how many packets it stands for: they are answered once.
    #[expect(clippy::too_many_arguments, reason = "each is another's: the packet's, the engine's, the io")]
    pub(super) fn answer<E: PacketIo>(
        &mut self,
        reject: Option<Reject>,
        packet: &Packet<'_>,
        (arrival, meta): (PortId, &Meta),
        parts: u32,
        walker: &Walker,
        now: Time,
        io: &mut E,
    ) {
        self.counts.silent += u64::from(parts.saturating_sub(1));
        let reject = reject.unwrap_or_else(|| Reject::by_inspector(packet));
        if reject.reply(packet, walker.ports().addresses(arrival), &mut self.frame).is_err() {
            self.counts.silent += 1;
            return;
        }
        if !self.limit(arrival).take(now) {
            self.counts.limited += 1;
            return;
        }
        let meta = Meta {
            wire_len: self.frame.len() as u32,
            out: Some(arrival),
            hop: None,
            changed: true,
            port: towpath_port::Meta::default(),
            ..*meta
        };
        match io.reply(arrival, &self.frame, &meta) {
            true => self.counts.sent += 1,
            false => self.counts.unsent += 1,
        }
    }

    fn limit(&mut self, port: PortId) -> &mut ReplyLimiter {
        let at = usize::from(port.0);
        if self.limits.len() <= at {
            self.limits.resize(at + 1, None);
        }
        self.limits[at].get_or_insert_default()
    }
}
