//! How connections end: at once, or when what they hold is done.

use bytes::Bytes;

use super::event::{Cause, End, Event};
use super::psock::{self, Interest, Phase};
use super::receive::count_refusal;
use super::{Mux, worker};
use crate::Time;

impl Mux {
    /// Gives the connection back to whoever attached it: nothing more is read, its messages are done and answered, then
    /// [`Event::Ended`] has the bytes that were read behind the last message. From `deadline` on it is not waited for.
    pub fn unattach(&mut self, id: psock::Id, deadline: Option<Time>, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_open() {
            return;
        }
        self.counters.totals.unattach_rsvd += u64::from(psock.outstanding > 0);
        psock.deadline = deadline;
        self.close(id, Cause::Unattached, true);
        self.settle(id);
    }

    /// Ends the connection when its messages are done and its answers sent; from `deadline` on it is not waited for.
    pub fn drain_psock(&mut self, id: psock::Id, deadline: Option<Time>, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_dead() {
            psock.deadline = psock.deadline.into_iter().chain(deadline).min();
            self.close(id, Cause::Drained, false);
            self.settle(id);
        }
    }

    /// Drains every connection, takes no new one, and says [`Event::Drained`] when the last has gone.
    pub fn drain(&mut self, deadline: Option<Time>, now: Time) {
        self.draining = true;
        for id in self.psocks.keys().collect::<Vec<_>>() {
            self.drain_psock(id, deadline, now);
        }
    }

    /// What to wait for on the connection's socket.
    pub fn interest(&self, id: psock::Id) -> Interest {
        let Some(psock) = self.psocks.get(id) else { return Interest::default() };
        let room = !psock.full && !psock.tx.full && !self.memory.is_full();
        Interest {
            read: room && psock.is_open() && !psock.assembler.is_over(),
            write: psock.tx.blocked && !psock.is_dead(),
        }
    }

    /// Nothing more is read; it ends when what it holds is done.
    pub(super) fn close(&mut self, id: psock::Id, cause: Cause, hand_back: bool) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_open() {
            return;
        }
        match &cause {
            Cause::Framing(failure) => {
                self.counters.totals.malformed += u64::from(!count_refusal(&mut psock.stats, &failure.cause));
            }
            Cause::Inside { .. } => self.counters.totals.inside += 1,
            _ => {}
        }
        psock.stats.rx_aborts += u64::from(!cause.is_clean());
        psock.phase = Phase::Closing { cause, hand_back };
        self.balance.remove(psock.tx.bytes, id);
    }

    /// It ends now; its messages are still worked on, but nobody is there to be answered.
    pub(super) fn abort(&mut self, id: psock::Id, cause: Cause) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.is_dead() {
            return;
        }
        match cause {
            Cause::Memory => psock.stats.rx_mem_fail += 1,
            Cause::Reset(_) | Cause::Tls(_) => {
                psock.stats.rx_aborts += u64::from(psock.is_open());
                self.counters.totals.resets += 1;
            }
            Cause::Idle => self.counters.totals.idle += 1,
            Cause::SendTimeout => self.counters.totals.send_timeouts += 1,
            Cause::SendFull => self.counters.totals.send_full += 1,
            Cause::DrainTimeout => self.counters.totals.drain_timeouts += 1,
            _ => {}
        }
        psock.phase = Phase::Dead { unreported: Some(cause) };
        psock.tx.blocked = false;
        if psock.reading.is_none() {
            psock.assembler.lend();
        }
        self.balance.remove(psock.tx.bytes, id);
        self.recount_buffer(id);
        self.end_dead(id);
    }

    /// Tells the end of a connection that is gone, once nobody writes to it.
    pub(super) fn end_dead(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let Phase::Dead { unreported } = &mut psock.phase else { return };
        if psock.tx.sending {
            return;
        }
        if let Some(cause) = unreported.take() {
            self.report_end(id, cause, false);
        }
        self.settle(id);
    }

    /// What follows from a change of a connection: its bounds, what to wait for, its end, its timers.
    pub(super) fn settle(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if self.deferred.is_active() {
            if !std::mem::replace(&mut psock.unsettled, true) {
                self.deferred.push(id);
            }
            return;
        }
        psock.full = self.config.psock_bytes.is_full(psock.full, psock.memory);
        psock.tx.full = self.config.send_bytes.is_full(psock.tx.full, psock.tx.bytes);
        let free = psock.is_free();
        match &mut psock.phase {
            Phase::Open => {}
            Phase::Closing { cause, hand_back } if free && psock.tx.bytes == 0 => {
                let (cause, hand_back) = (cause.clone(), *hand_back);
                psock.phase = Phase::Dead { unreported: None };
                self.report_end(id, cause, hand_back);
                return self.remove(id);
            }
            Phase::Closing { .. } => {}
            Phase::Dead { unreported: None } if free => return self.remove(id),
            Phase::Dead { .. } => return,
        }
        self.update_interest(id);
        self.arm(id);
    }

    fn report_end(&mut self, id: psock::Id, cause: Cause, hand_back: bool) {
        let unsent = self.drop_queue(id);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let rest = Bytes::copy_from_slice(psock.assembler.rest());
        let outstanding = psock.outstanding;
        self.counters.totals.unattach += 1;
        self.events.push_back(Event::Ended(End { psock: id, cause, hand_back, rest, unsent, outstanding }));
    }

    fn remove(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.remove(id) else { return };
        self.counters.psocks.add(&psock.stats);
        self.recount(psock.buffered, 0);
    }

    /// A leaving worker's time is over.
    pub(super) fn expire_worker(&mut self, id: worker::Id) {
        let now = self.now;
        self.handle_worker_died(id, now);
        self.events.push_back(Event::Left(id));
    }
}
