//! Packets that wait for room in their queue, and the account that they are charged to.

use crate::drop_reason::{DropReason, Outcome};
use crate::engine::Engine;
use crate::held::bytes;
use crate::packet_ctx::{Handover, Next, Wait};
use crate::packet_io::PacketIo;
use crate::packet_path::Offered;
use crate::reorder::PacketId;

impl<E: PacketIo> Engine<E> {
    /// Puts a packet into the backlog of a full queue. A full backlog drops its oldest packet.
    pub(crate) fn wait_for_room(&mut self, id: PacketId, queue: usize, kind: Handover) {
        self.set_wait(id, Wait { queue, kind, since: Some(self.clock.wall) });
        match self.queues.get_mut(queue).push_backlog(id) {
            Ok(None) => {}
            Ok(Some(oldest)) => self.end(oldest, Outcome::Dropped(DropReason::QueueFull)),
            Err(id) if self.live => self.queues.get_mut(queue).force_backlog(id),
            Err(id) => self.queues.backlog.push_back(id),
        }
    }

    /// Offers the packets that wait for room, oldest first. Gives up on packets that have waited for the deadline.
    pub(crate) fn retry_backlog(&mut self) {
        while let Some(&id) = self.queues.backlog.front() {
            let Some(offered) = self.offer_again(id) else { break };
            self.queues.backlog.pop_front();
            self.resume(id, offered);
        }
        for queue in 0..self.queues.len() {
            while let Some(id) = self.queues.get(queue).next_in_backlog() {
                let Some(offered) = self.offer_again(id) else { break };
                self.queues.get_mut(queue).pop_backlog();
                self.resume(id, offered);
            }
        }
    }

    fn resume(&mut self, id: PacketId, offered: Offered) {
        if let Some(next) = self.after_offer(id, offered) {
            self.drive(id, next);
        }
    }

    /// Offers a packet that waits for room. Returns `None` if it still has to wait.
    fn offer_again(&mut self, id: PacketId) -> Option<Offered> {
        let Some((_, ctx)) = self.reorder.waiting_mut(id) else { return Some(Offered::Held) };
        let wait = ctx.wait;
        match self.offer(id) {
            Offered::Full => {
                let wall = self.clock.wall;
                let (held, ctx) = self.reorder.waiting_mut(id)?;
                let queue = self.queues.get_mut(wait.queue);
                if wall.saturating_sub(wait.since.unwrap_or(wall)) <= queue.policy().deadline {
                    return None;
                }
                let dropped = queue.give_up(&ctx.ring_meta(&held.meta, &self.topology), held.meta.interface);
                let dropped = dropped.filter(|_| wait.kind != Handover::Tee);
                Some(dropped.map_or(Offered::Continues, Offered::Dropped))
            }
            offered => Some(offered),
        }
    }

    /// Continues a packet whose copy for a full queue is not made.
    pub(crate) fn skip_copy(&mut self, id: PacketId) -> Option<Next> {
        let (held, ctx) = self.reorder.waiting_mut(id)?;
        let queue = self.queues.get_mut(ctx.wait.queue);
        queue.skip_copy(&ctx.ring_meta(&held.meta, &self.topology), held.meta.interface);
        Some(self.pass(id))
    }

    /// Charges a packet to the queue that it came to. Returns false if the queue's account has no room.
    pub(crate) fn charge_queue(&mut self, id: PacketId, queue: usize) -> bool {
        let Self { reorder, burst, queues, .. } = self;
        let account = queues.get(queue).account();
        if reorder.account(id).is_none_or(|own| own == account) {
            return true;
        }
        let Some((held, _)) = reorder.waiting_mut(id) else { return true };
        let len = bytes(held, burst.as_ref()).len();
        let admitted = reorder.admits(account, len);
        match admitted {
            true => reorder.charge_to(id, account),
            false => reorder.shares_mut().count_refused(account),
        }
        admitted
    }
}
