//! Answers to rejected packets: TCP resets and ICMP errors, limited to 200 per second and port.

use towpath_gate::{PortId, Reject, ReplyLimiter, Walker};
use towpath_wire::{Packet, Time};

use crate::meta::{Egress, Meta};
use crate::packet_io::PacketIo;
use crate::totals::ReplyStats;

#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// By port, created with a port's first answer.
    limits: Vec<Option<ReplyLimiter>>,
    frame: Vec<u8>,
    pub(crate) stats: ReplyStats,
}

impl Replies {
    /// Answers a packet that came in by `arrival`. Without `reject`, sends the answer to an inspector's rejection. The packet
    /// stands for `packets` received packets, which get one answer.
    #[expect(clippy::too_many_arguments, reason = "separate borrows of the engine's fields")]
    pub(crate) fn answer<E: PacketIo>(
        &mut self,
        reject: Option<Reject>,
        packet: &Packet<'_>,
        (arrival, meta): (PortId, &Meta),
        packets: u32,
        walker: &Walker,
        now: Time,
        io: &mut E,
    ) {
        self.stats.silent += u64::from(packets.saturating_sub(1));
        let reject = reject.unwrap_or_else(|| Reject::by_inspector(packet));
        if reject.reply(packet, walker.ports().addresses(arrival), &mut self.frame).is_err() {
            self.stats.silent += 1;
            return;
        }
        if !self.limiter(arrival).take(now) {
            self.stats.limited += 1;
            return;
        }
        let meta = Meta {
            wire_len: self.frame.len() as u32,
            egress: Egress::Port(arrival),
            packets: 0,
            changed: true,
            port: towpath_port::Meta::default(),
            ..*meta
        };
        match io.reply(arrival, &self.frame, &meta) {
            true => self.stats.sent += 1,
            false => self.stats.unsent += 1,
        }
    }

    fn limiter(&mut self, port: PortId) -> &mut ReplyLimiter {
        let at = usize::from(port.0);
        if self.limits.len() <= at {
            self.limits.resize(at + 1, None);
        }
        self.limits[at].get_or_insert_default()
    }
}
