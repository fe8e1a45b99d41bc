//! Packets that inspectors send of their own accord ([`towpath_ring::Consumer::inject`]).
//!
//! They are no received packets: they count in the inspector's [`VerdictStats`](crate::queue::VerdictStats) and in no outcome. Each is checked
//! like a replacement: its link type is that of the port, and it is parsed again.

use towpath_gate::PortId;
use towpath_port::MAX_FRAME;
use towpath_ring::{Header, Inject, Kind};
use towpath_wire::{self as wire, LinkType, checksum};

use crate::drop_reason::Outcome;
use crate::engine::Engine;
use crate::forward::after_pass;
use crate::meta::{Egress, Meta};
use crate::packet_ctx::{Handover, Next, PacketCtx};
use crate::packet_io::PacketIo;
use crate::reorder::Account;
use crate::topology::ForwardMode;

/// Room for bytes that a batch keeps.
const SPARE: usize = 64 << 10;

/// The packets of one poll.
#[derive(Debug, Default)]
pub(crate) struct InjectBatch {
    bytes: Vec<u8>,
    packets: Vec<Injected>,
}

/// A packet of an inspector.
#[derive(Clone, Copy, Debug)]
struct Injected {
    queue: usize,
    channel: u32,
    /// The inspector's account in the reorder buffer.
    account: Account,
    header: Header,
    /// The end of its bytes in the batch.
    end: usize,
}

impl InjectBatch {
    /// Adds a packet of the inspector `channel` of the queue with this index.
    pub(crate) fn push(
        &mut self,
        (queue, channel): (usize, u32),
        account: Account,
        header: &Header,
        bytes: &[u8],
    ) {
        self.bytes.extend_from_slice(bytes);
        self.packets.push(Injected { queue, channel, account, header: *header, end: self.bytes.len() });
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.shrink_to(SPARE);
        self.packets.clear();
    }
}

impl<E: PacketIo> Engine<E> {
    /// Sends what inspectors have injected. The packets leave with the next [`flush`](Self::flush).
    pub(crate) fn inject(&mut self) {
        if !self.live || !self.queues.may_inject() {
            return;
        }
        let mut batch = std::mem::take(&mut self.injected);
        for (index, queue) in self.queues.iter_mut().enumerate() {
            queue.poll_injected(index, &mut batch);
        }
        let mut begin = 0;
        for packet in &batch.packets {
            let bytes = &batch.bytes[std::mem::replace(&mut begin, packet.end)..packet.end];
            let sent = self.inject_one(packet, bytes);
            self.queues.get_mut(packet.queue).count_injected(packet.channel, sent);
        }
        batch.clear();
        self.injected = batch;
    }

    /// Sends one packet. Returns false if it is dropped.
    fn inject_one(&mut self, packet: &Injected, bytes: &[u8]) -> bool {
        let Header { kind, port, group, time, layers, .. } = packet.header;
        let port = u16::try_from(port).ok().map(PortId);
        let Some((port, (at, _))) = port.and_then(|port| Some((port, self.topology.interface_of(port)?)))
        else {
            return false;
        };
        let (interface, mode) = (at as u32, self.topology.mode_of(at));
        let link = LinkType(layers.link);
        if kind != Kind::PACKET || bytes.len() > MAX_FRAME || self.io.link(interface) != Some(link) {
            return false;
        }
        let mut frame = std::mem::take(&mut self.scratch);
        frame.clear();
        frame.extend_from_slice(bytes);
        let meta = Meta { interface, time, packets: 0, changed: true, ..Meta::new(link, frame.len()) };
        checksum::fill(link, &mut frame, meta.wire_len);
        let sent = match group {
            group if group == Inject::Back as u32 => {
                self.io.reply(port, &frame, &Meta { egress: Egress::Port(port), ..meta })
            }
            group if group == Inject::Forward as u32 => {
                self.forward_injected(&frame, meta, (port, mode), packet.account)
            }
            _ => false,
        };
        self.scratch = frame;
        sent
    }

    /// Forwards a packet as if it had come in by the port and an inspector had passed it. It leaves after the packets of its flow that wait.
    fn forward_injected(
        &mut self,
        frame: &[u8],
        meta: Meta,
        (port, mode): (PortId, ForwardMode),
        account: Account,
    ) -> bool {
        let Ok(packet) = wire::parse(meta.link, frame, meta.wire_len) else { return false };
        if !self.reorder.admits(account, frame.len()) {
            return false;
        }
        let mut ctx = PacketCtx::new((port, None), mode, &meta.port);
        ctx.packets = 0;
        self.place(&mut ctx, &packet);
        let next =
            after_pass((&mut self.walker, &self.io), &packet, &mut ctx, Handover::Inspect, self.clock.now);
        let next = self.apply_flow_verdicts(&packet, &mut ctx, next);
        let leaves = match next {
            Next::End(Outcome::Passed) => ctx.egress != Egress::Unrouted,
            Next::End(_) => false,
            Next::Queue(..) | Next::Reassemble => true,
        };
        if leaves {
            let place = (self.order_bucket(&ctx), account);
            let id = self.reorder.push_waiting(frame, meta, ctx, place);
            self.drive(id, next);
        }
        leaves
    }
}
